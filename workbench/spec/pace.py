"""How a run went, step by step: drafts verified, tokens a second and acceptance length, windowed.

Only decode steps count, and only their time: a prefill gives its token by another pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.errors import DraftError
from workbench.spec.adaptive import Floats, Ints
from workbench.spec.step import Step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pace:
    """Figures at the end of each decode step, n of them; a window is the last steps up to it.

    Attributes:
        index: numbers of the steps; int64 ``[n]``.
        seconds: decode time up to the end of each, wall time; float64 ``[n]``.
        drafted, admitted: draft tokens of each step, all requests together; int64 ``[n]``.
        drafted_mean, admitted_mean: the same, mean of the window; float64 ``[n]``.
        speed: tokens/s of the window, all requests together; NaN where no time passed.
        length: acceptance length of the window, ``1 + accepted / draft events``; NaN without one.
        tokens: of all these steps.
        total_seconds, deciding: of all these steps, and what of it a policy took.
        total_speed, total_length: as speed and length, of the whole run; None where undefined.
    """

    index: Ints
    seconds: Floats
    drafted: Ints
    admitted: Ints
    drafted_mean: Floats
    admitted_mean: Floats
    speed: Floats
    length: Floats
    tokens: int
    total_seconds: float
    deciding: float
    total_speed: float | None
    total_length: float | None


def pace(steps: Sequence[Step], window: int = 16) -> Pace:
    """The pace of a run; ``window`` is a number of steps, the first ones have a shorter one.

    Raises:
        DraftError: a window below 1.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise DraftError(f"a window is a whole number of steps from 1 on, not {window!r:.40}")
    some = [step for step in steps if step.phase == "decode"]
    window = max(1, min(window, len(some)))  # no larger one looks any further back
    drafted, admitted, accepted, events, tokens = np.array(
        [
            (
                sum(len(part.drafted) for part in step.requests),
                step.budget,
                sum(part.accepted for part in step.requests),
                sum(bool(part.drafted) for part in step.requests),
                step.tokens,
            )
            for step in some
        ],
        np.int64,
    ).reshape(-1, 5).T  # fmt: skip
    took: Floats = np.array([step.seconds for step in some], np.float64)
    steps_in = np.minimum(np.arange(1, len(some) + 1), window)
    spent, given, judged = (_last(x, window) for x in (took, tokens, events))
    whole, all_events = float(took.sum()), int(events.sum())
    return Pace(
        index=np.array([step.index for step in some], np.int64),
        seconds=took.cumsum(),
        drafted=drafted,
        admitted=admitted,
        drafted_mean=_last(drafted, window) / steps_in,
        admitted_mean=_last(admitted, window) / steps_in,
        speed=_over(given, spent),
        length=1 + _over(_last(accepted, window), judged),
        tokens=int(tokens.sum()),
        total_seconds=whole,
        deciding=sum(step.decide_seconds for step in some),
        total_speed=int(tokens.sum()) / whole if whole > 0 else None,
        total_length=1 + int(accepted.sum()) / all_events if all_events else None,
    )


def _last(values: NDArray[np.generic], window: int) -> Floats:
    """Sum of each value and those before it in its window; added up anew, so nothing drifts."""
    padded = np.concatenate([np.zeros(window - 1), values.astype(np.float64)])
    if not len(values):
        return np.empty(0)
    return np.lib.stride_tricks.sliding_window_view(padded, window).sum(-1)


def _over(count: Floats, base: Floats) -> Floats:
    """``count / base``, NaN over nothing."""
    return np.divide(count, base, out=np.full(len(count), np.nan), where=base > 0)
