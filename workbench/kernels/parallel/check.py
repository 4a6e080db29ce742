"""Whether a step of several ranks is right: the same on all of them, and what float64 says.

First the ranks must agree to the bit on tokens, positions, streams, experts and the next token: a
rank that goes its own way decodes another text soon after. Then every layer is held against the
float64 reference as on one rank, its partial sums made whole in float64. All ranks check in lock
step and come to one verdict, the worst of what each has seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor

from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.rank.load_check import check_load
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.rank.load_step import LoadStep
from workbench.kernels.rank.reference import MARGIN, Reference, Step, StepCheck, check_step
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import LayerWeights, RankWeights

# Odd, bits everywhere (2^64 over the golden ratio, as int64): the place's share of a fingerprint.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GroupReference(Reference):
    """The reference of all ranks together; for all of them to ask at the same time, alike."""

    def __init__(self, weights: RankWeights, state: RankState, ranks: Ranks) -> None:
        super().__init__(weights, state)
        self.ranks = ranks

    def _whole(self, partial: Tensor) -> Tensor:
        return self.ranks.all_reduce(partial)

    # Which experts are right and what is a tie decide how often the ranks are asked: they are rank
    # 0's, so that two GPUs that round a score differently do not wait for each other.

    def _choose(self, biased: Tensor) -> Tensor:
        return super()._choose(self.ranks.broadcast(biased))

    def _experts(
        self, layer: LayerWeights, x: Tensor, given: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m, ids, scores, blur = super()._experts(layer, x, given)
        return m, ids, scores, self.ranks.broadcast(blur)

    def embedding(self, token: int) -> Tensor:
        """The row ``[H]`` of a token of the group's vocabulary; NaN for one that is none."""
        size = self.weights.shapes.vocabulary
        owner, row = divmod(token, size)
        made = torch.full_like(self.weights.embed[0], math.nan)
        if not 0 <= owner < self.ranks.world:
            return made
        if owner == self.ranks.rank:
            made.copy_(self.weights.embed[row])
        return self.ranks.broadcast(made, owner)

    def right_token(self, logits: Tensor, found: int) -> tuple[float, bool]:
        """As on one rank, over the logits of all ranks; ``logits [V]`` are this rank's."""
        top = logits.topk(min(2, logits.shape[0]))
        own = torch.stack((top.values, (top.indices + self.ranks.rank * len(logits)).double()))
        values, indices = self.ranks.all_gather(own)
        order = values.argsort(descending=True, stable=True)
        gap = float(values[order[0]] - values[order[1]]) if len(order) > 1 else math.inf
        return (gap, found == int(indices[order[0]])) if gap > MARGIN else (math.inf, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCheck(StepCheck):
    """A check of all ranks: the worst of their errors.

    Attributes:
        world: how many ranks.
        differences: what the ranks do not agree on, in words; then nothing else was compared.
    """

    world: int
    differences: tuple[str, ...] = ()

    def failures(self, limit: float) -> list[str]:
        """What is wrong, in words; empty where nothing is."""
        return list(self.differences) or StepCheck.failures(self, limit)

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return StepCheck.to_dict(self) | {
            "ranks": self.world,
            "differences": list(self.differences),
        }


class _DifferError(Exception):
    """The ranks do not agree."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__(*differences)
        self.differences = differences


class _Seen:
    """A step as the one-rank checks look at one, with the whole stream where it is shared."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.h: Any = []
        self.choices = getattr(step, "choices", None)
        self.advance = getattr(step, "advance", True)

    def __call__(self) -> None:
        self.step()

    def look(self) -> None:
        """Take the stream that the step left; for all ranks together."""
        gathered = getattr(self.step, "gathered_h", None)
        self.h = self.step.h if gathered is None else gathered()

    def expert_ids(self) -> Tensor:
        found: Tensor = self.step.expert_ids()
        return found


def check_group(
    step: Step,
    weights: RankWeights,
    state: RankState,
    ranks: Ranks,
    run: Callable[[], None] | None = None,
) -> GroupCheck:
    """:func:`check_step` of one step of all ranks, which all of them call together.

    ``run`` (None: the step itself) starts it, for instance a graph's replay. A step that keeps only
    a part of the stream on each rank has a method ``gathered_h()`` that gives the whole.
    """

    def check(seen: _Seen, started: Callable[[], None]) -> StepCheck:
        reference = GroupReference(weights, state, ranks)
        return check_step(seen, weights, state, started, reference)

    return _checked(step, state, ranks, run, len(weights.layers), check)


def check_group_load(
    step: Any,
    weights: RankWeights,
    state: LoadState,
    ranks: Ranks,
    *,
    run: Callable[[], None] | None = None,
    rows: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
) -> GroupCheck:
    """:func:`check_load` of one step of all ranks, which all of them call together.

    The step may also be one of a :class:`RankState` over whose tensors ``state`` lies
    (``LoadState.over``): then some of its sequences are compared.

    Raises:
        KernelError: a row or a layer that is not there.
    """

    def check(seen: _Seen, started: Callable[[], None]) -> StepCheck:
        return check_load(
            cast(LoadStep, seen), weights, state, run=started, rows=rows, layers=layers,
            referred=lambda w, caches: GroupReference(w, caches, ranks),
        )  # fmt: skip

    count = len(weights.layers if layers is None else layers)
    return _checked(step, state, ranks, run, count, check)


def _checked(
    step: Any,
    state: RankState | LoadState,
    ranks: Ranks,
    run: Callable[[], None] | None,
    layers: int,
    check: Callable[[_Seen, Callable[[], None]], StepCheck],
) -> GroupCheck:
    seen = _Seen(step)

    def started() -> None:
        (run or step)()
        seen.look()
        streams = {f"the stream behind layer {i - 1}": h for i, h in enumerate(seen.h)}
        streams["the embedding"] = streams.pop("the stream behind layer -1")
        behind = {
            "the experts": seen.expert_ids(),
            "the next token": state.next_token,
            "the position afterwards": state.position,
        }
        _agree({"the embedding": streams.pop("the embedding"), **streams, **behind}, ranks)

    try:
        _agree({"the token": state.token, "the position": state.position}, ranks)
        found = check(seen, started)
    except _DifferError as error:
        return _none_compared(error.differences, layers, ranks.world)
    return _merged(found, ranks)


def fingerprint(x: Tensor) -> Tensor:
    """int64 ``[]`` of ``x``'s bits and their places; one bit, or two values changed over, shows."""
    bits = x.contiguous().view(_BITS[x.element_size()]).flatten().long()
    places = torch.arange(len(bits), device=x.device) * _SPREAD | 1
    return (bits * places).sum()


def _agree(values: dict[str, Tensor], ranks: Ranks) -> None:
    """Raise _DifferError, on all ranks, where a value is not the same bits on all of them."""
    own = torch.stack([fingerprint(each) for each in values.values()])
    prints = torch.stack(ranks.gather(own))
    other = (prints != prints[0]).tolist()
    found = []
    for place, name in enumerate(values):
        apart = [str(rank) for rank in range(ranks.world) if other[rank][place]]
        if apart:
            found.append(f"{name} of rank {', '.join(apart)} is not that of rank 0, bit for bit")
    # What follows the first difference differs because of it.
    if found:
        raise _DifferError(found[:1])


def _none_compared(differences: list[str], layers: int, world: int) -> GroupCheck:
    return GroupCheck(
        layer_errors=(math.inf,) * layers,
        cache_error=math.inf,
        logits_error=math.inf,
        expert_sets=0,
        unexplained_sets=0,
        margin=0.0,
        next_token_equal=False,
        finite=False,
        world=world,
        differences=tuple(differences),
    )


def _merged(own: StepCheck, ranks: Ranks) -> GroupCheck:
    """The worst of the ranks' checks."""
    device = ranks.device
    errors = (*own.layer_errors, own.cache_error, own.logits_error)
    worst = _largest(torch.tensor(errors, dtype=torch.float64, device=device), ranks)
    counts = (own.expert_sets, own.unexplained_sets, not own.next_token_equal, not own.finite)
    most = _largest(torch.tensor(counts, dtype=torch.int64, device=device), ranks)
    margin = torch.tensor([-own.margin], dtype=torch.float64, device=device)
    values = {each.name: getattr(own, each.name) for each in fields(StepCheck)}
    return GroupCheck(
        **values
        | {
            "layer_errors": tuple(worst[:-2]),
            "cache_error": worst[-2],
            "logits_error": worst[-1],
            "expert_sets": int(most[0]),
            "unexplained_sets": int(most[1]),
            "next_token_equal": not most[2],
            "finite": not most[3],
            "margin": -_largest(margin, ranks)[0],
        },
        world=ranks.world,
    )


def _largest(values: Tensor, ranks: Ranks) -> list[Any]:
    found: list[Any] = torch.stack(ranks.gather(values)).amax(0).tolist()
    return found
