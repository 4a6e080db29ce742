"""What a server's metrics say of things that were published of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from workbench.model.asked import SizingError, shown
from workbench.serving.monitor.intervals import pooled
from workbench.serving.monitor.sample import Sample
from workbench.serving.published_row import Figure


def samples_of(name: str, given: Any) -> list[Sample]:
    """The samples that somebody gave as ``name``.

    Raises:
        SizingError: these are none, or one has no length.
    """
    found = list(given) if isinstance(given, Iterable) else [given]
    wrong = [one for one in found if not isinstance(one, Sample) or not isfinite(one.seconds)]
    if wrong or not isinstance(given, Iterable):
        raise SizingError(
            f"{name} takes a list of a monitor's samples, not "
            f"{shown(wrong[0]) if wrong else 'a single one'}"
        )
    return found


def measured_figure(value: float | None, how: str, samples: Sequence[Sample]) -> Figure | None:
    """A figure that was measured here, ``how``, in these samples; None where there is no value, or
    none that is a number."""
    if value is None or not isfinite(value):
        return None
    models = ", ".join(dict.fromkeys(sample.model for sample in samples if sample.model))
    told = f"{models or 'model not named'}; {how}"
    return Figure(value=value, kind="measured here", label="", source=told)


def lone_request(samples: Sequence[Sample]) -> list[Sample]:
    """Intervals in which, as far as their ends and endings tell, at most one request ran."""
    return [
        after
        for before, after in pairwise(samples)
        if (before.running or 0) <= 1
        and (after.running or 0) <= 1
        and sum((after.finished or {}).values()) <= 1
    ]


def between_outputs(samples: Sequence[Sample]) -> Figure | None:
    """The time between two outputs of a lone request, which is that of a step."""
    whole = pooled(samples)
    mean = None if whole is None or whole.itl is None else whole.itl.mean
    count = 0 if whole is None or whole.itl is None else whole.itl.count
    how = f"mean between two outputs while one request ran, n = {count:,}"
    return measured_figure(None if mean is None else 1e3 * mean, how, samples)


def p99_tpot(sample: Sample | None) -> float | None:
    """Seconds a token that 99 % of the requests did not exceed; None where it is not known."""
    place = None if sample is None or sample.tpot is None else sample.tpot.percentile(0.99)
    return None if place is None else place.known


def change(new: float | None, old: float | None) -> float | None:
    """``new`` over ``old``, 0.1 for a tenth more; None where one is not known."""
    return new / old - 1 if new is not None and old else None
