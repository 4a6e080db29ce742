"""Whether a step of many rows is right: each layer of each row, teacher-forced, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from workbench.errors import KernelError
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.rank.load_step import LoadStep
from workbench.kernels.rank.reference import Reference, StepCheck, apart
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import RankWeights


def told(check: StepCheck) -> dict[str, Any]:
    """Its values for JSON, which has no word for what is no number: None there."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in check.to_dict().items()
    }


def check_load(
    step: LoadStep,
    weights: RankWeights,
    state: LoadState,
    *,
    run: Callable[[], None] | None = None,
    rows: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    referred: Callable[..., Reference] | None = None,
) -> StepCheck:
    """Run ``step`` once and compare each layer of ``rows`` (None: all) with the reference.

    ``run`` (None: the step itself) starts it, for instance a graph's replay; ``layers`` (None: all)
    are those that are compared. A row sees the cache as the step left it: rows before it in its
    sequence are compared on their own. The router's choice is compared even where the experts were
    given, and then the layer's output is that of the given ones. ``referred`` makes the reference
    of weights and caches (None: of this rank alone).

    Raises:
        KernelError: a row or a layer that is not there.
    """
    count = len(weights.layers)
    asked = list(range(state.rows)) if rows is None else list(rows)
    among = list(range(count)) if layers is None else list(layers)
    if not asked or not 0 <= min(asked) <= max(asked) < state.rows:
        raise KernelError(f"rows to check must be among 0 to {state.rows - 1}, not {asked!r:.60}")
    if not among or not 0 <= min(among) <= max(among) < count:
        raise KernelError(f"layers to check must be among 0 to {count - 1}, not {among!r:.60}")
    view = state.by_row()
    reference = (referred or Reference)(weights, cast(RankState, view))
    positions, tokens = state.position.tolist(), state.token.tolist()
    state.logits.fill_(math.nan)
    state.next_token.fill_(-1)
    (run or step)()
    if weights.device.type == "cuda":
        torch.cuda.synchronize(weights.device)
    chosen = step.expert_ids()
    errors, sets, unexplained, cache, logit, equal = [], 0, 0, 0.0, 0.0, True
    margin = math.inf
    finite = bool(torch.isfinite(state.logits).all())
    for index in among:
        layer, worst = weights.layers[index], 0.0
        for b in asked:
            before, after = step.h[index][b], step.h[index + 1][b]
            finite &= bool(torch.isfinite(after).all())
            given = None if step.choices is None or layer.dense else step.choices.ids[index, b]
            wanted = reference.layer(index, before, b, positions[b])
            if wanted.ids is not None:
                own = chosen[index, b].long()
                ours = own if given is None else given
                if set(own.tolist()) != set(wanted.ids.tolist()):
                    sets += 1
                    unexplained += not wanted.explains(own)
                if given is not None or (
                    set(own.tolist()) != set(wanted.ids.tolist()) and wanted.explains(own)
                ):
                    wanted = reference.layer(index, before, b, positions[b], ours)
            worst = max(worst, apart(after, wanted.h))
            row = positions[b] if layer.full else positions[b] % state.ring
            for store, value in ((view.k, wanted.k), (view.v, wanted.v)):
                cache = max(cache, apart(store[index][b, row], value))
        errors.append(worst)
    for b in asked:
        finite &= torch.equal(step.h[0][b], reference.embedding(tokens[b]))
        wanted_logits = reference.logits(step.h[count][b])
        logit = max(logit, apart(state.logits[b], wanted_logits))
        found = int(state.next_token[b])
        gap, right = reference.right_token(wanted_logits, found)
        margin = min(margin, gap)
        equal &= right
        if step.advance:
            equal &= int(state.token[b]) == found
    return StepCheck(
        layer_errors=tuple(errors),
        cache_error=cache,
        logits_error=logit,
        expert_sets=sets,
        unexplained_sets=unexplained,
        margin=margin if math.isfinite(margin) else 0.0,  # every row was a tie
        next_token_equal=equal,
        finite=finite,
        sequences=len(asked),
    )
