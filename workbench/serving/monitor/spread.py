"""``Spread``: how observations of one interval lie in a histogram's buckets, and its percentiles.

An engine exports times as histograms: how many observations were below each bound. A percentile of
them is known to lie in a bucket and nothing more; within it this takes the observations for evenly
spread, as Prometheus' ``histogram_quantile`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Any

from workbench.serving.monitor.metrics_page import LARGEST, Histogram

Bucket = tuple[float, float, int]  # above, up to and including, observations


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """A time in seconds.

    Attributes:
        beyond: it lies in the open last bucket, so that all that is known of it is that it is more.
        below: the end of the first bucket, where it lies there, so that all that is known of it is
            that it is less: engines have times per token begin with 0 to 10 ms, and 5.00 ms for
            each of them would be no measurement.
    """

    seconds: float
    beyond: bool = False
    below: float | None = None

    @property
    def known(self) -> float | None:
        """``seconds``, where both ends of its bucket say something."""
        return None if self.beyond or self.below is not None else self.seconds

    def __str__(self) -> str:
        if self.below is not None:
            return f"< {duration(self.below)}"
        return f"> {duration(self.seconds)}" if self.beyond else duration(self.seconds)


@dataclass(frozen=True, slots=True)
class Spread:
    """Observations by bucket, and their sum in seconds.

    Buckets rise, empty ones are left out, the last may be open (up to infinity), one of exactly 0
    begins and ends there. ``seconds`` is
    None where the engine's sum is no number.
    """

    buckets: tuple[Bucket, ...] = ()
    seconds: float | None = 0.0

    @property
    def count(self) -> int:
        """Observations."""
        return sum(count for *_, count in self.buckets)

    @property
    def mean(self) -> float | None:
        """Mean in seconds, exact; None of nothing."""
        count = self.count
        return None if self.seconds is None or not count else self.seconds / count

    def percentile(self, share: float) -> Percentile | None:
        """The time that ``share`` (0 to 1) of the observations do not exceed; None of nothing.

        Linearly interpolated within its bucket; one in the first bucket or in the open last one
        is marked as such, the latter with its lower end.

        Raises:
            ValueError: the share is not from 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"a percentile's share is from 0 to 1, not {share}")
        rank, below = share * self.count, 0
        for low, high, count in self.buckets:
            if below + count >= rank or (low, high, count) == self.buckets[-1]:
                if high == inf:
                    return Percentile(seconds=low, beyond=True)
                within = min(1.0, max(0.0, (rank - below) / count))
                first = high if low == 0 < high else None
                return Percentile(seconds=low + (high - low) * within, below=first)
            below += count
        return None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ``[above, up to, observations]`` of each bucket, None for the open end."""
        rows = [[low, high if isfinite(high) else None, count] for low, high, count in self.buckets]
        return {"buckets": rows, "seconds": self.seconds}

    @classmethod
    def from_dict(cls, data: Any) -> Spread:
        """What :meth:`to_dict` made.

        Raises:
            ValueError, TypeError, KeyError: it is no such thing.
        """
        buckets = []
        for low, high, count in data["buckets"]:
            end = inf if high is None else below(high, LARGEST)
            buckets.append((below(low, LARGEST), end, whole(count)))
        buckets = [bucket for bucket in buckets if bucket[2]]
        if any(a[1] > b[0] for a, b in pairwise(buckets)) or any(a > b for a, b, _ in buckets):
            raise ValueError("buckets of a spread rise")
        seconds = data["seconds"]
        return cls(tuple(buckets), None if seconds is None else below(seconds, LARGEST))


def spread_between(before: Histogram | None, after: Histogram) -> Spread | None:
    """What was observed between two pages; ``before`` None is the start of the server.

    None where the two do not belong together: other bounds, or a count that fell.
    """
    old = (0,) * len(after.bounds) if before is None else before.cumulative
    if before is not None and before.bounds != after.bounds:
        return None
    new = [b - a for a, b in zip(old, after.cumulative, strict=True)]
    if min(new, default=0) < 0:
        return None
    buckets, low, seen = [], min(0.0, after.bounds[0]), 0
    for high, count in zip(after.bounds, new, strict=True):
        # A page may be made while an observation is counted: no bucket gets fewer than none.
        if count > seen:
            buckets.append((low, high, count - seen))
            seen = count
        low = high
    earlier = 0.0 if before is None else before.seconds
    known = after.seconds is not None and earlier is not None
    seconds = max(0.0, after.seconds - earlier) if known else None  # type: ignore[operator]
    return Spread(tuple(buckets), seconds)


def spread_sum(spreads: Iterable[Spread]) -> Spread:
    """All observations of several spreads: of engines, or of intervals that follow each other."""
    counts: dict[tuple[float, float], int] = {}
    seconds: float | None = 0.0
    for spread in spreads:
        for low, high, count in spread.buckets:
            counts[low, high] = counts.get((low, high), 0) + count
        unknown = seconds is None or spread.seconds is None
        seconds = None if unknown else seconds + spread.seconds  # type: ignore[operator]
    return Spread(tuple((*edges, counts[edges]) for edges in sorted(counts)), seconds)


def duration(seconds: float) -> str:
    """A time in three digits: 0.82 ms, 12.4 ms, 1.25 s, 80 s."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


# -- values of JSON -------------------------------------------------------------------------------


def whole(value: Any) -> int:
    """A whole number from 0 on; raises ValueError for what is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def real(value: Any) -> float:
    """A finite number from 0 on; raises ValueError for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r:.40} is no number")
    number = float(value)
    if not isfinite(number) or number < 0:
        raise ValueError(f"{value!r:.40} is no such number")
    return number


def below(value: Any, most: float) -> float:
    """:func:`real`, and less than ``most``."""
    number = real(value)
    if number >= most:
        raise ValueError(f"{number:g} is too large a number")
    return number


def wholes(values: Sequence[Any]) -> tuple[int, ...]:
    """:func:`whole` of each."""
    if not isinstance(values, list | tuple):
        raise ValueError(f"{values!r:.40} are no counts")
    return tuple(whole(value) for value in values)
