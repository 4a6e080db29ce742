"""Recorded blocks as arrays: what a trace says of every position, ready to be looked up.

A record of the blocks at every position (:mod:`workbench.spec.every_position`) determines the
verdict of any number of drafts anywhere. A record of a run's steps determines less: the verdicts of
the blocks that run drafted, as far as it verified them. :class:`Recording` has both in one form; of
the second it fills in the rest, and marks where it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import TraceError
from workbench.spec.acceptance import log_odds
from workbench.spec.adaptive import Floats, Ints
from workbench.spec.positions import Position
from workbench.spec.step import RequestStep, Step
from workbench.spec.trace import Trace

_ENDLESS = 1 << 40  # tokens a sequence may still get where no limit is known
_MOST_POSITIONS = 1 << 24
_MOST_SCORE = float(np.finfo(np.float32).max)
_LEAST_TEMPERATURE = 1e-5  # above 0: as of model.sampling, which needs torch

# How a record of steps is filled in, for those who are to be told.
STAND_IN = (
    "at a position the run drafted no block, the last block that it drafted before in that request "
    "stands in (confidences and verdict)"
)
BEYOND = (
    "beyond the drafts that the run verified, a block's verdict is drawn slot by slot with the "
    "whole trace's conditional acceptance (Kaplan-Meier over its blocks)"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Recording:
    """Blocks at the positions of requests, as arrays. P positions of Q requests, K slots.

    A request's positions lie side by side, ``first[q]`` to ``end[q] - 1``; a step that gives n
    tokens goes n positions on.

    Attributes:
        first, end: int64 ``[Q]``.
        left: int64 ``[P]``, tokens the sequence may still get from here, as in :class:`Position`.
        width: int64 ``[P]``, drafts of the block, at most K.
        known: int64 ``[P]``, how many of them the target accepts if all are verified.
        sure: int64 ``[P]``, up to how many verified drafts the record determines the verdict; K
            where it determines it whole.
        own: bool ``[P]``, whether the block was drafted at this very position.
        features: float32 ``[P, K]``, the estimator's; None where no scores were recorded.
        confidences: float64 ``[P, K]``, the drafter's own; None where there are none.
        label: where acceptance is from.
    """

    first: Ints
    end: Ints
    left: Ints
    width: Ints
    known: Ints
    sure: Ints
    own: NDArray[np.bool_]
    features: NDArray[np.float32] | None
    confidences: Floats | None
    label: str

    @property
    def requests(self) -> int:
        """Q."""
        return len(self.first)

    @property
    def slots(self) -> int:
        """K, the most drafts of a block."""
        return int(self.width.max())

    @property
    def exact(self) -> bool:
        """Whether it determines the verdict of any number of drafts at every position."""
        return bool(self.own.all() and (self.sure >= self.width).all())

    @classmethod
    def of(cls, trace: Trace | Iterable[Position], *, seed: int = 0) -> Recording:
        """The blocks of a trace, or of positions.

        Args:
            trace: of either mode; positions alone are taken as drafted greedily.
            seed: of the draws that stand in for verdicts a trace of steps lacks.

        Raises:
            TraceError: there are no positions or draft steps in it.
        """
        if isinstance(trace, Trace):
            named = f"{trace.header.get('model')} with {trace.header.get('drafter')}"
            label = f"recorded: {named}, {trace.header.get('date', 'date not recorded')}"
            temperature = _temperature(trace.header)
            if trace.mode == "steps":
                return _of_steps(trace, temperature, label, seed)
            return _of_positions(trace.positions, temperature, label)
        positions = tuple(trace) if isinstance(trace, Iterable) else (trace,)
        if not all(isinstance(p, Position) for p in positions):
            raise TraceError("a replay takes a Trace, or positions of an every-position record")
        return _of_positions(positions, 0.0, "recorded: positions")

    def __repr__(self) -> str:
        """One line."""
        whole = "every verdict known" if self.exact else "some verdicts estimated"
        return (
            f"{self.requests:,} requests, {len(self.known):,} positions, {self.slots} drafts a "
            f"block, {whole}; {self.label}"
        )


# -- from a trace ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One recorded block, from a trace of either mode."""

    position: int
    left: int
    width: int
    known: int
    sure: int
    scores: tuple[tuple[float, ...], ...]
    confidences: tuple[float, ...]


def _of_positions(positions: Sequence[Position], temperature: float, label: str) -> Recording:
    found: dict[int, dict[int, _Block]] = {}
    ends: dict[int, int] = {}
    for p in positions:
        n = len(p.drafted)
        found.setdefault(p.request, {})[p.position] = _Block(
            position=p.position,
            left=p.left,
            width=n,
            known=p.accepted,
            sure=n,
            scores=p.scores,
            confidences=(),
        )
        ends[p.request] = max(ends.get(p.request, 0), p.position + 1)
    spans = {request: (min(at), ends[request]) for request, at in found.items()}
    return _arrays({r: list(at.values()) for r, at in found.items()}, spans, temperature, label)


def _of_steps(trace: Trace, temperature: float, label: str, seed: int) -> Recording:
    parts: dict[int, list[RequestStep]] = {}
    for step in trace.steps:
        if step.phase == "decode":
            for part in step.requests:
                parts.setdefault(part.request, []).append(part)
    rates = _conditional(part for several in parts.values() for part in several)
    rng = np.random.default_rng(seed)
    limits = _limits(trace.steps, trace.header)
    found: dict[int, list[_Block]] = {}
    spans: dict[int, tuple[int, int]] = {}
    for request, several in parts.items():
        last = several[-1]
        end = last.position + len(last.token_ids)
        limit = end if last.finished in ("length", "context") else limits.get(request, _ENDLESS)
        blocks = []
        for part in several:
            n = len(part.drafted)
            if not n:
                continue
            refused = part.accepted < part.admitted  # so the block's verdict is known whole
            known = part.accepted
            while not refused and known < n and rng.random() < rates[known]:
                known += 1
            blocks.append(
                _Block(
                    position=part.position,
                    left=limit - part.position,
                    width=n,
                    known=known,
                    sure=n if refused else part.admitted,
                    scores=part.scores,
                    confidences=part.confidences,
                )
            )
        if blocks and end > several[0].position:
            found[request], spans[request] = blocks, (several[0].position, end)
    return _arrays(found, spans, temperature, label)


def _limits(steps: Sequence[Step], header: Mapping[str, Any]) -> dict[int, int]:
    """The position that the limit of new tokens allows no token at, by request."""
    most = header.get("max_new_tokens")
    if isinstance(most, bool) or not isinstance(most, int):
        return {}
    return {
        part.request: part.position + most
        for step in steps
        if step.phase == "prefill"
        for part in step.requests
    }


def _conditional(parts: Iterable[RequestStep]) -> list[float]:
    """Share of the slots that were judged, all before them accepted, which were accepted too."""
    judged: list[int] = []
    taken: list[int] = []
    for part in parts:
        grow = len(part.drafted) - len(judged)
        judged += [0] * grow
        taken += [0] * grow
        for slot in range(min(part.accepted + 1, part.admitted)):
            judged[slot] += 1
            taken[slot] += slot < part.accepted
    return [a / n if n else 0.0 for a, n in zip(taken, judged, strict=True)]


def _arrays(
    found: Mapping[int, Sequence[_Block]],
    spans: Mapping[int, tuple[int, int]],
    temperature: float,
    label: str,
) -> Recording:
    blocks = [block for several in found.values() for block in several]
    slots = max((block.width for block in blocks), default=0)
    if not slots:
        raise TraceError(
            "the trace has no drafted blocks to replay; record one with a drafter "
            "(workbench trace record --every-position)"
        )
    if (size := sum(end - first for first, end in spans.values())) > _MOST_POSITIONS:
        raise TraceError(
            f"the positions of the trace's requests span {size:,} tokens, more than a replay holds "
            f"({_MOST_POSITIONS:,}); it is damaged, or should be replayed in parts"
        )
    # The block of each position: the one drafted there, else the last before, else the first.
    index: list[Ints] = []
    lefts: list[Ints] = []
    owns: list[NDArray[np.bool_]] = []
    begun = 0
    for request, several in found.items():
        first, end = spans[request]
        order = sorted(range(len(several)), key=lambda i: several[i].position)
        starts = np.array([several[i].position for i in order], np.int64)
        at = np.arange(first, end)
        nearest = np.maximum(np.searchsorted(starts, at, side="right") - 1, 0)
        left = np.array([several[i].left for i in order], np.int64)[nearest]
        lefts.append(np.maximum(left - (at - starts[nearest]), 1))
        owns.append(starts[nearest] == at)
        index.append(begun + np.array(order, np.int64)[nearest])
        begun += len(several)
    sizes = np.array([len(part) for part in index], np.int64)
    end_of = sizes.cumsum()
    block_at = np.concatenate(index)
    features, confidences = _judged(blocks, slots, temperature)
    width = np.array([block.width for block in blocks], np.int64)
    return Recording(
        first=end_of - sizes,
        end=end_of,
        left=np.concatenate(lefts),
        width=width[block_at],
        known=np.array([block.known for block in blocks], np.int64)[block_at],
        sure=np.array([block.sure for block in blocks], np.int64)[block_at],
        own=np.concatenate(owns),
        features=None if features is None else features[block_at],
        confidences=None if confidences is None else confidences[block_at],
        label=label,
    )


def _judged(
    blocks: Sequence[_Block], slots: int, temperature: float
) -> tuple[NDArray[np.float32] | None, Floats | None]:
    """Features and the drafter's own confidences of blocks; 0 in slots a block does not have."""
    features: NDArray[np.float32] | None = None
    confidences: Floats | None = None
    if all(block.scores for block in blocks):
        features = np.zeros((len(blocks), slots), np.float32)
        confidences = np.zeros((len(blocks), slots))
        shapes: dict[tuple[int, int], list[int]] = {}
        for i, block in enumerate(blocks):
            shapes.setdefault((block.width, len(block.scores[0])), []).append(i)
        for (width, candidates), rows in shapes.items():
            if not candidates:
                return None, None
            scores = np.array([blocks[i].scores for i in rows])
            wrong = ~(np.abs(scores) <= _MOST_SCORE).all((1, 2))
            if wrong.any():
                at = blocks[rows[int(wrong.argmax())]].position
                raise TraceError(
                    f"a block at position {at} has a score beyond float32, in which "
                    "drafters score; the trace is damaged, record it again"
                )
            features[rows, :width] = log_odds(scores, temperature)
            z = scores / (temperature or 1.0)
            # The walk was greedy: what it took is the candidate of the highest score.
            confidences[rows, :width] = 1 / np.exp(z - z.max(-1, keepdims=True)).sum(-1)
    if all(block.confidences for block in blocks):
        confidences = np.zeros((len(blocks), slots))
        for i, block in enumerate(blocks):
            confidences[i, : block.width] = block.confidences
    return features, confidences


def _temperature(header: Mapping[str, Any]) -> float:
    sampling = header.get("sampling")
    value = sampling.get("temperature", 0.0) if isinstance(sampling, Mapping) else 0.0
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not (value == 0 or _LEAST_TEMPERATURE <= value < inf):
        raise TraceError(
            f"the trace's header has the temperature {value!r:.40}; it must be 0 or a number from "
            f"{_LEAST_TEMPERATURE:g} up, as whatever is sampled has"
        )
    return float(value)
