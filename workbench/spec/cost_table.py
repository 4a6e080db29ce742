"""What a step costs by its size: :class:`CostTable`, by which adaptive verification decides.

The draft curve is milliseconds by requests, the verify curve milliseconds by token rows of the
target. Where a pass is padded to captured graph sizes its cost is a step function, and above them
it is continuous; both follow vLLM 0.33.0's cost tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from workbench.errors import DraftError

Curve: TypeAlias = tuple[tuple[int, float], ...]
_Curves: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]

# No pass is free: a verify cost of 0 would make any number of tokens infinitely worth while.
LEAST_DRAFT_MS = 0.0
LEAST_VERIFY_MS = 1e-6

# Of no pass here; beyond them sums overflow and neighbouring sizes are the same float64.
MOST_MS = 1e9
MOST_SIZE = 1 << 24

# Lookups are read from a list of every size up to this one, kept as far as it was asked for.
_LISTED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Milliseconds of a draft by requests, and of a verification by token rows.

    Attributes:
        draft: ``(requests, ms)``, sizes rising. Times that fall with size are raised to the largest
            before them: a larger pass never costs less.
        verify: ``(rows, ms)`` of the target's pass, the same way.
        captured: the largest size that is padded to the next one measured; a step function up to
            it, straight lines above it. 0 where nothing is padded, as without graphs. One limit
            holds for both curves. (vLLM given no captured size at all takes steps everywhere; that
            is ``captured`` at the largest size here.)
        label: where the times are from; shown with every figure that rests on them.

    Raises:
        DraftError: a curve is empty, its sizes do not rise from at least 1, or a time is not a
            number from 0 to ``MOST_MS``.
    """

    draft: Curve
    verify: Curve
    captured: int = 0
    label: str = ""
    _points: tuple[_Curves, _Curves] = field(init=False, repr=False, compare=False)
    _listed: list[NDArray[np.float64]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the curves and raise what falls."""
        if not _whole(self.captured) or not 0 <= self.captured <= MOST_SIZE:
            raise DraftError(
                f"the largest captured size is a number from 0 to {MOST_SIZE:,}, "
                f"not {_cut(self.captured)}"
            )
        if not isinstance(self.label, str):
            raise DraftError(f"a cost table's label is text, not {_cut(self.label)}")
        draft, verify = _rising(self.draft, "draft"), _rising(self.verify, "verify")
        put = object.__setattr__  # the dataclass is frozen for everybody else
        put(self, "draft", draft)
        put(self, "verify", verify)
        put(self, "captured", int(self.captured))
        put(self, "_points", (_arrays(draft), _arrays(verify)))
        put(self, "_listed", [np.empty(0), np.empty(0)])

    @classmethod
    def from_curves(
        cls,
        draft_samples: Mapping[int, Sequence[float]],
        verify_samples: Mapping[int, Sequence[float]],
        captured: int = 0,
        label: str = "",
    ) -> CostTable:
        """Of timed passes: the median of each size.

        Args:
            draft_samples: milliseconds of each timed draft, by requests.
            verify_samples: milliseconds of each timed pass of the target, by token rows.
            captured, label: as in the class.

        Raises:
            DraftError: as in the class, or a size without a time.
        """
        return cls(
            draft=_medians(draft_samples, "draft"),
            verify=_medians(verify_samples, "verify"),
            captured=captured,
            label=label,
        )

    @overload
    def draft_ms(self, requests: int) -> float: ...
    @overload
    def draft_ms(self, requests: NDArray[np.integer[Any]]) -> NDArray[np.float64]: ...
    def draft_ms(self, requests: int | NDArray[np.integer[Any]]) -> float | NDArray[np.float64]:
        """Milliseconds of drafting for so many requests: a number, or an array of the same shape.

        Raises:
            DraftError: a size is not a whole number from 0 on.
        """
        return self._ms(0, requests)

    @overload
    def verify_ms(self, rows: int) -> float: ...
    @overload
    def verify_ms(self, rows: NDArray[np.integer[Any]]) -> NDArray[np.float64]: ...
    def verify_ms(self, rows: int | NDArray[np.integer[Any]]) -> float | NDArray[np.float64]:
        """Milliseconds of the target's pass over so many token rows, all requests together.

        Raises:
            DraftError: a size is not a whole number from 0 on.
        """
        return self._ms(1, rows)

    def verify_span(self, first: int, count: int) -> NDArray[np.float64]:
        """:meth:`verify_ms` of ``first``, ``first + 1`` and so on, ``count`` of them; read only.

        Raises:
            DraftError: ``first`` is below 0.
        """
        end = first + count
        if first < 0 or end > _LISTED:
            return self.verify_ms(np.arange(first, end))
        if end > len(self._listed[1]):
            self._list(1, end)
        return self._listed[1][first:end]

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "draft": [list(point) for point in self.draft],
            "verify": [list(point) for point in self.verify],
            "captured": self.captured,
            "label": self.label,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostTable:
        """Back from :meth:`to_dict`.

        Raises:
            DraftError: a value is missing or of the wrong kind, or as in the class.
        """
        try:
            return cls(
                draft=data["draft"],
                verify=data["verify"],
                captured=data["captured"],
                label=data["label"],
            )
        except KeyError as error:
            raise DraftError(f"a cost table needs {error.args[0]!r}, which is missing") from error
        except TypeError as error:
            raise DraftError(f"a cost table cannot be read from {type(data).__name__}") from error

    def _ms(self, which: int, sizes: int | NDArray[np.integer[Any]]) -> Any:
        if type(sizes) is int and 0 <= sizes < len(self._listed[which]):
            return float(self._listed[which][sizes])
        n = np.asarray(sizes)
        if n.dtype.kind not in "iu" or (n.size and n.min() < 0):
            raise DraftError("a cost table is asked for sizes that are whole numbers from 0 on")
        largest = int(n.max()) if n.size else 0
        if largest >= _LISTED:
            found = self._lookup(which, n)
        else:
            if largest >= len(self._listed[which]):
                self._list(which, largest + 1)
            found = self._listed[which][n]
        return float(found) if n.ndim == 0 else found

    def _list(self, which: int, sizes: int) -> None:
        """Look up every size below ``sizes``, and as many more, once."""
        listed = self._lookup(which, np.arange(1 << sizes.bit_length()))
        listed.flags.writeable = False
        self._listed[which] = listed

    def _lookup(self, which: int, n: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        sizes, ms = self._points[which]
        # A padded pass costs what the next measured size costs.
        found = ms[np.minimum(np.searchsorted(sizes, n, side="left"), len(sizes) - 1)]
        # Only points above the limit are joined: crossing it loses the graphs, which is a jump.
        smooth, above = n > self.captured, sizes > self.captured
        if above.any():
            found = np.where(smooth, np.interp(n, sizes[above], ms[above]), found)
        if len(sizes) > 1:
            slope = (ms[-1] - ms[-2]) / (sizes[-1] - sizes[-2])
            found = np.where(n > sizes[-1], ms[-1] + slope * (n - sizes[-1]), found)
        return np.maximum(found, (LEAST_DRAFT_MS, LEAST_VERIFY_MS)[which])


def check_table(table: object, whose: str) -> None:
    """Raise DraftError unless this is a cost table, which ``whose`` needs."""
    if not isinstance(table, CostTable):
        raise DraftError(
            f"{whose} needs a CostTable for its times, not {table!r:.60}; measure one with "
            "workbench.spec.profile.profile, or take a recorded one, cost_table(NAME).table"
        )


def _rising(curve: Any, name: str) -> Curve:
    try:
        points = tuple((size, ms) for size, ms in curve)
    except (TypeError, ValueError):
        raise DraftError(f"the {name} curve is pairs of size and milliseconds") from None
    if not points:
        raise DraftError(f"the {name} curve is empty: time at least one size")
    for size, ms in points:
        if not _whole(size) or not 1 <= size <= MOST_SIZE:
            raise DraftError(
                f"sizes of the {name} curve are whole numbers from 1 to {MOST_SIZE:,}, "
                f"not {_cut(size)}"
            )
        if not _time(ms):
            raise _no_time(name, ms, size)
    if any(a >= b for (a, _), (b, _) in pairwise(points)):
        raise DraftError(f"sizes of the {name} curve must rise, each given once")
    sizes, times = zip(*points, strict=True)
    return tuple(zip(map(int, sizes), accumulate(map(float, times), max), strict=True))


def _medians(samples: Mapping[int, Sequence[float]], name: str) -> Curve:
    for size, times in samples.items():
        if not len(times):
            raise DraftError(f"the {name} curve has no time at size {size}")
        for ms in times:  # a median would hide one that is no time
            if not _time(ms):
                raise _no_time(name, ms, size)
    return tuple((size, float(statistics.median(samples[size]))) for size in sorted(samples))


def _arrays(curve: Curve) -> _Curves:
    sizes, ms = np.array(curve, np.float64).T
    return sizes, ms


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    return bool(0 <= value <= MOST_MS)


def _no_time(name: str, ms: object, size: object) -> DraftError:
    return DraftError(
        f"times of the {name} curve are milliseconds from 0 to {MOST_MS:,.0f}, "
        f"not {_cut(ms)} at {_cut(size)}"
    )


def _cut(value: object) -> str:
    """What a value is in a sentence: an int of thousands of digits cannot even be written."""
    try:
        return f"{value!r:.60}"
    except ValueError:
        return "a number of thousands of digits"
