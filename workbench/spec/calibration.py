"""Do the confidences mean what they say? What was predicted against what the target did.

Two predictions, each with its own evidence. A *conditional* confidence is tested where a slot was
verified and all before it were accepted. Its running product, the *survival*, is tested where the
outcome is known: up to the verified slots, and behind a refusal, which refuses all that follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.errors import DraftError
from workbench.spec.step import RequestStep, Step

BINS = 15
Of = Literal["expected", "stale", "confidences"]
Kind = Literal["conditional", "survival"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Predictions of about the same size.

    Attributes:
        low, high: the smallest and the largest of them.
        predicted: their mean.
        observed: the share of them that came true.
        count: how many.
    """

    low: float
    high: float
    predicted: float
    observed: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Predictions in bins of equal mass, by size.

    Attributes:
        bins: the lowest first; fewer than asked for where there are fewer predictions.
        error: expected calibration error: the mean of ``|predicted - observed|`` by count; None of
            nothing.
        count: predictions in all.
    """

    bins: tuple[Bin, ...]
    error: float | None
    count: int


def reliability(predicted: ArrayLike, came_true: ArrayLike, bins: int = BINS) -> Reliability:
    """Sort predictions into ``bins`` of as equal numbers as can be (the larger ones first).

    Args:
        predicted: probabilities, ``[N]``.
        came_true: whether each came true, ``[N]``.

    Raises:
        DraftError: other shapes, something that is no probability, or no bin.
    """
    p, y = np.asarray(predicted, np.float64), np.asarray(came_true, np.float64)
    if p.ndim != 1 or p.shape != y.shape:
        raise DraftError(
            f"a reliability needs one outcome for each prediction, not shapes {list(p.shape)} and "
            f"{list(y.shape)}"
        )
    if bins < 1:
        raise DraftError(f"a reliability needs at least one bin, not {bins}")
    if p.size and not ((p >= 0) & (p <= 1)).all():
        raise DraftError("a prediction is no probability from 0 to 1; leave out what is unknown")
    order = np.argsort(p, kind="stable")
    parts = [part for part in np.array_split(order, bins) if part.size]
    found = tuple(
        Bin(
            low=float(p[part[0]]),
            high=float(p[part[-1]]),
            predicted=float(p[part].mean()),
            observed=float(y[part].mean()),
            count=int(part.size),
        )
        for part in parts
    )
    total = sum(b.count for b in found)
    error = sum(b.count * abs(b.predicted - b.observed) for b in found) / total if total else None
    return Reliability(bins=found, error=error, count=total)


def evidence(
    steps: Iterable[Step], of: Of = "expected", kind: Kind = "conditional"
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Predictions of steps whose outcome is known, and the outcomes; both ``[N]``.

    Args:
        of: which numbers of a :class:`RequestStep`: the estimator's live ones, the stale ones, or
            the drafter's own word.
        kind: the numbers themselves, or their running product.

    Raises:
        DraftError: another word for either.
    """
    for word, words in ((of, get_args(Of)), (kind, get_args(Kind))):
        if word not in words:
            raise DraftError(f"{word!r:.40} is none of {', '.join(words)}")
    predicted: list[NDArray[np.float64]] = []
    true: list[NDArray[np.bool_]] = []
    for step in steps:
        for part in step.requests:
            numbers = np.asarray(getattr(part, of), np.float64)
            if not numbers.size:
                continue
            slots = np.arange(numbers.size)
            known = _known(part, numbers.size, kind)
            values = numbers.cumprod() if kind == "survival" else numbers
            predicted.append(values[:known])
            true.append((slots < part.accepted)[:known])
    if not predicted:
        return np.empty(0), np.empty(0, np.bool_)
    return np.concatenate(predicted), np.concatenate(true)


def _known(part: RequestStep, slots: int, kind: Kind) -> int:
    """So many slots' outcomes are known."""
    refused = part.accepted < part.admitted
    if kind == "survival":
        return slots if refused else part.admitted
    return part.accepted + 1 if refused else part.admitted
