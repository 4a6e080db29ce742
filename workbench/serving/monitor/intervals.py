"""Pages to samples (:class:`Intervals`), and samples to longer ones and to lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import inf
from typing import Any

from workbench.serving.monitor.metrics_page import EnginePage, Histogram, MetricsPage
from workbench.serving.monitor.sample import COUNTS, SPREADS, Sample
from workbench.serving.monitor.spread import spread_between, spread_sum

_LATE = 1.5  # lengths of a sample that lie between it and the one before, where none is missing


class Intervals:
    """What each page adds to the one before it.

    An engine that was not on the page before begins with this one: what it counted earlier is not
    of the time that is looked at.
    """

    def __init__(self) -> None:
        self._before: MetricsPage | None = None
        self._clock = 0.0

    def add(self, page: MetricsPage, *, at: float, clock: float, missed: int = 0) -> Sample | None:
        """The interval that ends with this page, all engines together; None of the first.

        Args:
            page: the newest.
            at: wall time of it, seconds since 1970.
            clock: time of it in seconds on a clock that is never set.
            missed: pages that did not come since the last one.
        """
        before, seconds = self._before, clock - self._clock
        self._before, self._clock = page, clock
        if before is None:
            return None
        anew = None not in (before.started, page.started) and before.started != page.started
        each = [
            _between(
                None if anew or _restarted(before.engines[name], engine) else before.engines[name],
                engine,
                Sample(at=at, seconds=max(0.0, seconds), missed=missed, unusable=page.unusable),
            )
            for name, engine in page.engines.items()
            if name in before.engines
        ]
        return together(each) if each else None


def together(engines: Sequence[Sample]) -> Sample:
    """All engines of one interval as one sample.

    Counts, requests and times add up, the share of the KV cache is the mean. What one of them does
    not have, the sum does not have either.
    """
    first = engines[0]
    added: dict[str, Any] = {
        name: _add([getattr(s, name) for s in engines], every=True)
        for name in (*COUNTS, "running", "waiting")
    }
    usage = [s.kv_usage for s in engines if s.kv_usage is not None]
    return replace(
        first,
        engine=None,
        model=", ".join(dict.fromkeys(s.model for s in engines)),
        restarted=any(s.restarted for s in engines),
        **added,
        **_tables(engines, every=True),
        kv_usage=sum(usage) / len(usage) if len(usage) == len(engines) else None,
        engines=tuple(engines),
    )


def pooled(samples: Sequence[Sample]) -> Sample | None:
    """Several intervals of one engine, or of all, as one; None of none.

    Counts and times add up; requests and the share of the KV cache are those of the last one. The
    seconds are those of intervals whose time is known; with a restart among them the whole has no
    rates, and :func:`rate` has those of the others.
    """
    if not samples:
        return None
    last, timed = samples[-1], [s for s in samples if s.timed]
    if len(samples) == 1:
        return replace(last, engines=())
    added: dict[str, Any] = {name: _add([getattr(s, name) for s in samples]) for name in COUNTS}
    return replace(
        last,
        seconds=sum(s.seconds for s in timed),
        missed=sum(s.missed for s in samples),
        restarted=any(s.restarted for s in samples),
        **added,
        **_tables(samples),
        unusable=tuple(dict.fromkeys(name for s in samples for name in s.unusable)),
        engines=(),
    )


def rate(samples: Iterable[Sample], name: str) -> float | None:
    """A count of :data:`~workbench.serving.monitor.sample.COUNTS` a second, over intervals whose
    time is known; None without any."""
    counted, seconds = 0, 0.0
    for sample in samples:
        count: int | None = getattr(sample, name)
        if count is not None and sample.timed:
            counted += count
            seconds += sample.seconds
    return counted / seconds if seconds else None


def runs(samples: Sequence[Sample], *, window: float = 0.0, most: int = 200) -> list[list[Sample]]:
    """The samples as points of lines: unbroken runs, each point at least ``window`` seconds long.

    A run ends where pages did not come, where the server was started anew, and where a sample is
    missing: a line across would show what nobody saw. At most ``most`` points, apart from the ones
    that more runs than that need.

    Returns:
        Runs in order, each with its points (pooled samples) in order.
    """
    broken: list[list[Sample]] = []
    for sample in samples:
        if not broken or _gap(broken[-1][-1], sample):
            broken.append([])
        broken[-1].append(sample)
    seconds = sum(sample.seconds for sample in samples)
    least = max(window, seconds / max(1, most))
    return [_points(run, least) for run in broken]


# -- beneath --------------------------------------------------------------------------------------


def _restarted(before: EnginePage, after: EnginePage) -> bool:
    """Whether a count fell, or a series says that it began at another moment."""
    if any(after.created.get(name, at) != at for name, at in before.created.items()):
        return True
    pairs = [(before.counters, after.counters), (before.finished, after.finished)]
    if any(new.get(name, old) < old for was, new in pairs for name, old in was.items()):
        return True
    if any(b < a for a, b in zip(before.accepted_at, after.accepted_at, strict=False)):
        return True
    return any(
        name in after.histograms and spread_between(old, after.histograms[name]) is None
        for name, old in before.histograms.items()
    )


def _between(before: EnginePage | None, after: EnginePage, sample: Sample) -> Sample:
    """The sample of one engine; without a page before, of all it counted."""
    counts: dict[str, Any] = {name: after.counters.get(name) for name in COUNTS}
    finished = dict(after.finished)
    accepted_at = after.accepted_at
    old: Mapping[str, Histogram] = {}
    if before is not None:
        # A count that was not there before begins nobody knows where; a label that was not, at 0.
        for name, count in counts.items():
            earlier = before.counters.get(name)
            counts[name] = None if count is None or earlier is None else count - earlier
        finished = {why: n - before.finished.get(why, 0) for why, n in finished.items()}
        pairs = zip_longest(accepted_at, before.accepted_at[: len(accepted_at)], fillvalue=0)
        accepted_at = tuple(b - a for b, a in pairs)
        old = before.histograms
    spreads: dict[str, Any] = dict.fromkeys(SPREADS)
    for name, histogram in after.histograms.items():
        if before is None or name in old:
            spreads[name] = spread_between(old.get(name), histogram)
    running, waiting = after.gauges.get("running"), after.gauges.get("waiting")
    return replace(
        sample,
        engine=after.engine,
        model=after.model,
        restarted=before is None,
        **counts,
        accepted_at=accepted_at,
        finished=finished if after.finished else None,
        running=None if running is None else round(running),
        waiting=None if waiting is None else round(waiting),
        kv_usage=after.gauges.get("kv_usage"),
        **spreads,
    )


def _tables(samples: Sequence[Sample], *, every: bool = False) -> dict[str, Any]:
    """Sums of what has several numbers each."""
    made: dict[str, Any] = {}
    for name in SPREADS:
        known = [s for s in (getattr(sample, name) for sample in samples) if s is not None]
        there = len(known) == len(samples) if every else bool(known)
        made[name] = spread_sum(known) if there else None
    slots = zip_longest(*(sample.accepted_at for sample in samples), fillvalue=0)
    made["accepted_at"] = tuple(sum(counts) for counts in slots)
    if all(sample.finished is None for sample in samples):
        return made | {"finished": None}
    finished: dict[str, int] = {}
    for sample in samples:
        for why, count in (sample.finished or {}).items():
            finished[why] = finished.get(why, 0) + count
    return made | {"finished": finished}


def _add(counts: Sequence[int | None], *, every: bool = False) -> int | None:
    """Sum of the known ones; None where none is, or with ``every`` where one is not."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and not (every and len(known) < len(counts)) else None


def _gap(before: Sample, after: Sample) -> bool:
    return (
        after.missed > 0
        or after.restarted
        or after.at - before.at > _LATE * after.seconds + 0.5
        or after.at < before.at
    )


def _points(run: Sequence[Sample], least: float) -> list[Sample]:
    """A run's samples, pooled to at least so many seconds each; the last may be shorter.

    A sample that stands behind a gap is a point of its own: it has no rates, or those of the gap.
    """
    alone = 1 if run[0].restarted or run[0].missed else 0
    groups: list[list[Sample]] = [list(run[:alone])]
    seconds = inf
    for sample in run[alone:]:
        if seconds >= least * (1 - 1e-9):
            groups.append([])
            seconds = 0.0
        groups[-1].append(sample)
        seconds += sample.seconds
    return [point for point in map(pooled, groups) if point is not None]


class Total:
    """Everything so far, in a memory and a time that do not grow with it.

    Attributes:
        whole: all intervals as one, restarts counted in; None before the first. Its rates are not
            to be used: :meth:`rate` leaves out the time that nobody knows.
        samples, restarts: how many there were.
        seconds: of all intervals.
    """

    def __init__(self) -> None:
        self.whole: Sample | None = None
        self.samples = self.restarts = 0
        self.seconds = 0.0
        self._timed = 0.0
        self._counts = dict.fromkeys(COUNTS, 0)

    def add(self, sample: Sample) -> None:
        """Count an interval; all are of one engine, or of all."""
        self.samples += 1
        self.restarts += sample.restarted
        self.seconds += sample.seconds
        if sample.timed:
            self._timed += sample.seconds
            for name in COUNTS:
                self._counts[name] += getattr(sample, name) or 0
        plain = replace(sample, restarted=False, engines=())
        self.whole = plain if self.whole is None else pooled([self.whole, plain])

    def rate(self, name: str) -> float | None:
        """A count a second, over intervals whose time is known; None without one."""
        known = self.whole is not None and getattr(self.whole, name) is not None
        return self._counts[name] / self._timed if known and self._timed else None
