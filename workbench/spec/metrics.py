"""Counting steps into acceptance figures: :class:`Tally`, and slices of a run.

Every figure is defined once, in :class:`workbench.spec.rates.Acceptance`. A request's step without
drafts is *plain* and stays out of all of them, so speculation that died silently shows as few draft
events and not as a length that fades.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from workbench.errors import DraftError
from workbench.spec.rates import CURVES as CURVES
from workbench.spec.rates import Acceptance as Acceptance
from workbench.spec.rates import Curve as Curve
from workbench.spec.rates import Rate as Rate
from workbench.spec.rates import over

if TYPE_CHECKING:
    from workbench.spec.step import RequestStep, Step

# Lower ends of the context-length bins, in tokens.
CONTEXT_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# Requests whose own sums a tally keeps; the one that was silent longest is closed beyond that, so
# that requests which left without a last word cannot fill the memory.
_ALIVE = 4096

_Key = TypeVar("_Key", bound=Hashable)


class Tally:
    """Counts steps in a memory that does not grow with them; :meth:`acceptance` is a snapshot.

    A request is known by its number while it lives (at most 4,096 at once), so steps of different
    runs belong into tallies of their own, which :meth:`merge` adds up.
    """

    def __init__(self, positions: int = 0) -> None:
        """``positions``: show at least this many slots, also while none was drafted."""
        self.positions = positions
        self._blocks: Counter[tuple[int, int, int]] = Counter()  # drafted, admitted, accepted
        self._plain = self._first = self._emitted = self._cut = 0
        self._alive: dict[int, tuple[int, int, int]] = {}  # events, accepted, emitted of a request
        self._requests = 0  # the sums of those that are closed:
        self._lengths = 0.0
        self._weighted = 0.0
        self._weights = 0

    def add(self, step: Step) -> None:
        """Count every request of a step."""
        for request in step.requests:
            self.add_request(request)

    def add_request(self, r: RequestStep) -> None:
        """Count one request's part of a step; a part without drafts and tokens is nothing."""
        if not r.drafted and not r.token_ids:
            return
        drafted, emitted = len(r.drafted), len(r.token_ids)
        if drafted:
            self._blocks[drafted, r.admitted, r.accepted] += 1
        elif "first" in r.kinds:
            self._first += 1
        else:
            self._plain += 1
        self._emitted += emitted
        self._cut += r.cut
        # Taken out and put in again: the first of the dict is the one that was silent longest.
        before = self._alive.pop(r.request, (0, 0, 0))
        self._alive[r.request] = (
            before[0] + (drafted > 0),
            before[1] + r.accepted,
            before[2] + emitted,
        )
        if r.finished is not None:
            self.leave(r.request)
        elif len(self._alive) > _ALIVE:
            self.leave(next(iter(self._alive)))

    def leave(self, request: int) -> None:
        """Close a request that gives no further steps; one that says why it finished is closed."""
        if request in self._alive:
            self._close(self._alive.pop(request))

    def merge(self, other: Tally) -> None:
        """Add what another tally counted. Its requests are others than this one's, whatever their
        numbers, and give no further steps here.
        """
        self.positions = max(self.positions, other.positions)
        self._blocks.update(other._blocks)
        self._plain += other._plain
        self._first += other._first
        self._emitted += other._emitted
        self._cut += other._cut
        alive = list(other._alive.values())
        self._requests += other._requests
        self._lengths += other._lengths
        self._weighted += other._weighted
        self._weights += other._weights
        for sums in alive:
            self._close(sums)

    def acceptance(self) -> Acceptance:
        """The figures of everything counted so far; requests that still run count as they are."""
        folded = Tally()
        folded._requests, folded._lengths = self._requests, self._lengths
        folded._weighted, folded._weights = self._weighted, self._weights
        for sums in self._alive.values():
            folded._close(sums)
        blocks = self._blocks.items()
        slots = range(max([self.positions, *(block[0] for block in self._blocks)]))

        def at(field: int) -> tuple[int, ...]:
            return tuple(sum(n for block, n in blocks if block[field] > i) for i in slots)

        reached = tuple(sum(n for (_, m, a), n in blocks if m > i and a >= i) for i in slots)
        return Acceptance(
            events=self._blocks.total(),
            drafted=sum(block[0] * n for block, n in blocks),
            admitted=sum(block[1] * n for block, n in blocks),
            accepted=sum(block[2] * n for block, n in blocks),
            plain=self._plain,
            first=self._first,
            emitted=self._emitted,
            cut=self._cut,
            requests=folded._requests,
            length_requests=over(folded._lengths, folded._requests),
            length_tokens=over(folded._weighted, folded._weights),
            histogram=tuple(
                sum(n for block, n in blocks if block[2] == i) for i in range(len(slots) + 1)
            ),
            drafted_at=at(0),
            admitted_at=at(1),
            reached_at=reached,
            accepted_at=at(2),
        )

    def _close(self, sums: tuple[int, int, int]) -> None:
        events, accepted, emitted = sums
        if events:  # without one a request has no acceptance length
            length = 1 + accepted / events
            self._requests += 1
            self._lengths += length
            self._weighted += emitted * length
            self._weights += emitted


def group(
    steps: Iterable[Step], key: Callable[[Step, RequestStep], _Key | None]
) -> dict[_Key, Acceptance]:
    """Figures by a property of step and request: class of text, context length, temperature.

    ``key`` None leaves that request's step out. Groups come in the order they appear first. A
    request that is in several groups counts in each, with its steps there.
    """
    tallies: dict[_Key, Tally] = {}
    for step in steps:
        for request in step.requests:
            name = key(step, request)
            if name is not None:
                tallies.setdefault(name, Tally()).add_request(request)
    return {name: tally.acceptance() for name, tally in tallies.items()}


def by_context(
    steps: Iterable[Step], edges: Sequence[int] = CONTEXT_EDGES
) -> dict[tuple[int, int | None], Acceptance]:
    """Figures by context length: the tokens of the sequence before the step, prompt included.

    A bin ``(low, high)`` holds ``low <= position < high``; the last has no upper end (None). Bins
    come in ascending order, those without a step are left out, and so is what lies below the first.

    Raises:
        DraftError: the edges do not rise.
    """
    if not edges or any(a >= b for a, b in pairwise(edges)):
        raise DraftError(f"edges of context-length bins must rise, not {list(edges)}")

    def bin_of(step: Step, r: RequestStep) -> tuple[int, int | None] | None:
        at = bisect_right(edges, r.position)
        return (edges[at - 1], edges[at] if at < len(edges) else None) if at else None

    bins = group(steps, bin_of)
    return {name: bins[name] for name in sorted(bins, key=lambda name: name[0])}


def repeated(token_ids: Sequence[int], n: int = 8) -> list[bool]:
    """Which tokens lie inside a repeated n-gram of their own sequence, in one pass.

    An n-gram (n tokens in a row) is repeated if the same n tokens already began at an earlier place
    of the sequence; the two may overlap, as they do in a loop shorter than n. The earlier one, the
    original, is not marked. A token counts if any repeated n-gram covers it.

    Raises:
        DraftError: n is below 1.
    """
    if n < 1:
        raise DraftError(f"an n-gram needs at least one token, not {n}")
    ids = tuple(token_ids)
    inside = [False] * len(ids)
    seen: set[tuple[int, ...]] = set()
    marked = 0  # tokens before this were looked at by an earlier repeated n-gram
    for start in range(len(ids) - n + 1):
        gram = ids[start : start + n]
        if gram in seen:
            for i in range(max(start, marked), start + n):
                inside[i] = True
            marked = start + n
        seen.add(gram)
    return inside


def repeated_share(token_ids: Sequence[int], n: int = 8) -> float | None:
    """Share of the tokens that lie inside a repeated n-gram (:func:`repeated`); None of no tokens.

    For what a model wrote, give the new tokens alone: a small model loops, drafts of a loop are
    nearly always accepted, and an acceptance length on looping text says little.
    """
    return over(sum(repeated(token_ids, n)), len(token_ids))


def without_repeats(
    steps: Iterable[Step],
    n: int = 8,
    before: Mapping[int, Sequence[int]] | None = None,
) -> Acceptance:
    """Figures of the steps that wrote no looping text.

    A request's step counts only if none of the tokens it emitted lies inside a repeated n-gram of
    what that request emitted in all. Long accepted runs touch a repetition more easily than short
    ones, so the figure errs on the low side.

    Args:
        steps: whole requests, in order.
        n: tokens of an n-gram.
        before: prompts by request, where a repetition of the prompt counts, too.
    """
    parts = [r for step in steps for r in step.requests]
    texts: dict[int, list[int]] = {}
    for r in parts:
        texts.setdefault(r.request, list((before or {}).get(r.request, ()))).extend(r.token_ids)
    marks = {request: repeated(ids, n) for request, ids in texts.items()}
    at = {request: len((before or {}).get(request, ())) for request in texts}
    tally = Tally()
    for r in parts:
        start = at[r.request]
        at[r.request] = end = start + len(r.token_ids)
        if not any(marks[r.request][start:end]):
            tally.add_request(r)
    return tally.acceptance()
