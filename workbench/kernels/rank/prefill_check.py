"""A prefill against the float64 reference, layer by layer, teacher-forced, on rows of choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.rank.prefill_state import PrefillState
from workbench.kernels.rank.prefill_step import PrefillStep
from workbench.kernels.rank.reference import Reference, StepCheck, apart
from workbench.kernels.rank.weights import RankWeights


class _ByPosition:
    """A cache ``[S, R, G, D]`` whose rows are asked for by position."""

    def __init__(self, cache: Tensor, first: int) -> None:
        self.cache, self.first = cache, first

    def __getitem__(self, at: tuple[int, Tensor]) -> Tensor:
        return self.cache[at[0], at[1] - self.first]


class _Caches:
    """What the reference reads of a decode state, of a prefill's."""

    def __init__(self, weights: RankWeights, state: PrefillState) -> None:
        first = [state.context - state.past[layer.full] for layer in weights.layers]
        self.k = [_ByPosition(k, f) for k, f in zip(state.k, first, strict=True)]
        self.v = [_ByPosition(v, f) for v, f in zip(state.v, first, strict=True)]

    def rows_of(self, full: bool) -> int:
        """No ring: every position is its own row."""
        return 1 << 40


def sample_rows(state: PrefillState, count: int) -> Tensor:
    """Rows to watch: the last of every sequence, and the first, second and evenly spread others."""
    n = state.sequences * state.tokens
    spread = torch.linspace(0, n - 1, max(2, count)).long()
    rows = torch.cat((spread, torch.tensor([0, min(1, n - 1)]), state.last.cpu()))
    return rows.unique().to(state.token.device)


def check_prefill(
    step: PrefillStep,
    weights: RankWeights,
    state: PrefillState,
    run: Callable[[], Any] | None = None,
    referred: Callable[..., Reference] | None = None,
) -> StepCheck:
    """Run ``step`` (``run``: its replay) and compare its watched rows, teacher-forced.

    Every layer is asked what should have come out for a row, from the stream that the step had
    before it and the keys and values that the step left in the cache, the row's own among them;
    those are compared too. The last rows of all sequences must be watched. Outputs are poisoned
    before. ``expert_sets`` is an average over the rows, rounded up. ``referred`` makes the
    reference of weights and caches (None: of this rank alone).

    Raises:
        KernelError: last rows that are not watched.
    """
    watched = set() if step.watch is None else set(step.watch.tolist())
    if step.watch is None or not watched.issuperset(state.last.tolist()):
        raise KernelError(
            "a prefill is checked by the last row of every sequence: watch them, as sample_rows "
            "gives them"
        )
    reference = (referred or Reference)(weights, _Caches(weights, state))  # type: ignore[arg-type]
    state.poison()
    (run or step)()
    if weights.device.type == "cuda":
        torch.cuda.synchronize(weights.device)
    ids, rows = step.expert_ids(), step.watch.tolist()
    errors, sets, unexplained, cache, equal = [], 0, 0, 0.0, True
    finite = bool(torch.isfinite(state.logits).all())
    for index, layer in enumerate(weights.layers):
        worst, past = 0.0, state.past[layer.full]
        for at, row in enumerate(rows):
            b, t = divmod(row, state.tokens)
            before, after = step.h[index][at], step.h[index + 1][at]
            finite &= bool(torch.isfinite(after).all())
            wanted = reference.layer(index, before, b, state.context + t)
            if wanted.ids is not None:
                own = ids[index, at].long()
                if set(own.tolist()) != set(wanted.ids.tolist()):
                    sets += 1
                    if wanted.explains(own):
                        wanted = reference.layer(index, before, b, state.context + t, own)
                    else:
                        unexplained += 1
            worst = max(worst, apart(after, wanted.h))
            for store, value in ((state.k, wanted.k), (state.v, wanted.v)):
                cache = max(cache, apart(store[index][b, past + t], value))
        errors.append(worst)
    margin, logit = math.inf, 0.0
    for b in range(state.sequences):
        at = rows.index((b + 1) * state.tokens - 1)
        wanted_logits = reference.logits(step.h[-1][at])
        logit = max(logit, apart(state.logits[b], wanted_logits))
        gap, right = reference.right_token(wanted_logits, int(state.next_token[b]))
        margin = min(margin, gap)
        equal &= right
    for at, row in enumerate(rows):
        finite &= torch.equal(step.h[0][at], reference.embedding(int(state.token[row])))
    return StepCheck(
        layer_errors=tuple(errors),
        cache_error=cache,
        logits_error=logit,
        expert_sets=math.ceil(sets / len(rows)),
        unexplained_sets=unexplained,
        margin=margin if math.isfinite(margin) else 0.0,  # every sequence was a tie
        next_token_equal=equal,
        finite=finite,
    )
