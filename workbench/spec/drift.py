"""Does a cost table still say what passes cost? Its curves against the times of decode steps.

Adaptive verification decides by the table. A machine that became slower, contexts longer than the
profiled ones or another process beside it make it wrong, and nothing in the loop would notice:
:func:`drift` does. A step's times are compared with the table's at the step's own size, so that a
run whose batch shrinks is no drift, and judged by the median of the last steps, so that a few slow
ones are none either.

A factor common to both curves moves no budget, since expected tokens a millisecond all change by
it; it does make what is predicted in tokens a second wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite
from sys import float_info
from typing import Literal

import numpy as np

from workbench.errors import DraftError
from workbench.spec.adaptive import Floats, Ints
from workbench.spec.cost_table import CostTable, check_table
from workbench.spec.step import Step

Pass = Literal["draft", "verify"]
WINDOW, LIMIT = 64, 0.25
FEWEST = 8  # passes of which a median says something
_WORDS: dict[Pass, str] = {"draft": "drafting", "verify": "verification"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassDrift:
    """Passes of one kind, measured in a run, against a table's curve.

    Attributes:
        kind: ``draft``, its size the requests, or ``verify``, its size the target's token rows.
        sizes: of each pass, in the order of the steps; int64 ``[N]``.
        ms: what each took; float64 ``[N]``.
        predicted: what the table says it takes; float64 ``[N]``.
        ratio: median of ``ms / predicted`` over the last ``window`` passes (infinite where the
            table has them free), None where there are none.
        judged: how many passes that median is of.
        beyond: how many of these are larger than the largest size of the curve, where the table
            goes on in a straight line.
        drifted: there are enough of them, and ``ratio`` is off 1 by more than the limit.
    """

    kind: Pass
    sizes: Ints
    ms: Floats
    predicted: Floats
    ratio: float | None
    judged: int
    beyond: int
    drifted: bool

    def by_size(self) -> tuple[tuple[int, float, int], ...]:
        """Each size that occurred, the median of its ms, and its number of passes; sizes rising."""
        return tuple(
            (int(size), float(np.median(self.ms[here])), int(here.sum()))
            for size in np.unique(self.sizes)
            for here in (self.sizes == size,)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drift:
    """A cost table against a run.

    Attributes:
        draft, verify: the passes of each kind.
        window, limit: as they were asked for.
        alarm: one of the two drifted.
        sentence: what was found, with the numbers and, where it is an alarm, what to do.
    """

    draft: PassDrift
    verify: PassDrift
    window: int
    limit: float
    alarm: bool
    sentence: str


def drift(
    table: CostTable, steps: Iterable[Step], *, window: int = WINDOW, limit: float = LIMIT
) -> Drift:
    """Compare the times of a run's decode steps with a cost table.

    Prefills say nothing here and are left out, and so are the drafts of steps that drafted nothing.
    Fewer than ``FEWEST`` passes raise no alarm.

    Args:
        table: by which the run's policy decided.
        steps: in their order.
        window: passes, the last ones, that are judged.
        limit: how far the median ratio may be from 1, 0.25 for a quarter.

    Raises:
        DraftError: ``window`` or ``limit`` is out of its range.
    """
    check_table(table, "a drift")
    if isinstance(window, bool) or not isinstance(window, int | np.integer) or window < 1:
        raise DraftError(f"a drift is judged by a window of at least 1 pass, not {window!r:.40}")
    if isinstance(limit, bool) or not isinstance(limit, int | float | np.floating):
        raise DraftError(f"a drift's limit is a number above 0, not {limit!r:.40}")
    if not 0 < limit <= float_info.max:
        raise DraftError(f"a drift's limit is a number above 0, not {limit!r:.40}")
    drafts: list[tuple[int, float]] = []
    passes: list[tuple[int, float]] = []
    for step in steps:
        if step.phase != "decode":
            continue
        passes.append((step.rows, 1e3 * step.verify_seconds))
        # All that decode are drafted for, also one whose last token has no room for a draft.
        if any(part.drafted for part in step.requests):
            drafts.append((len(step.requests), 1e3 * step.draft_seconds))
    draft = _pass("draft", drafts, table, int(window), float(limit))
    verify = _pass("verify", passes, table, int(window), float(limit))
    return Drift(
        draft=draft,
        verify=verify,
        window=int(window),
        limit=float(limit),
        alarm=draft.drifted or verify.drifted,
        sentence=_sentence(draft, verify, float(limit)),
    )


def _pass(
    kind: Pass, found: list[tuple[int, float]], table: CostTable, window: int, limit: float
) -> PassDrift:
    sizes = np.array([size for size, _ in found], np.int64)
    ms = np.array([spent for _, spent in found], np.float64)
    predicted = table.draft_ms(sizes) if kind == "draft" else table.verify_ms(sizes)
    largest = (table.draft if kind == "draft" else table.verify)[-1][0]
    last, told = ms[-window:], predicted[-window:]
    ratio: float | None = None
    if len(last):
        # What costs nothing by the table and in fact is as the table says.
        free = np.where(last > 0, inf, 1.0)
        ratio = float(np.median(np.divide(last, told, out=free, where=told > 0)))
    enough = len(last) >= FEWEST
    return PassDrift(
        kind=kind,
        sizes=sizes,
        ms=ms,
        predicted=predicted,
        ratio=ratio,
        judged=len(last),
        beyond=int((sizes[-window:] > largest).sum()),
        drifted=enough and ratio is not None and abs(ratio - 1) > limit,
    )


def _sentence(draft: PassDrift, verify: PassDrift, limit: float) -> str:
    known = [one for one in (verify, draft) if one.ratio is not None]
    if not known:
        return "no decode step yet: nothing to compare the cost table with"
    words = ", ".join(f"{_WORDS[one.kind]} at {_times(one.ratio)}" for one in known)
    words += " the table's time"
    judged = max(one.judged for one in known)
    if judged < FEWEST:
        return f"{words}; it takes {FEWEST} steps to judge, and here are {judged}"
    of = f"median of the last {judged:,} steps, limit {100 * limit:.0f} %"
    larger = [_WORDS[one.kind] for one in known if 2 * one.beyond > one.judged]
    more = f"; most of {' and '.join(larger)} is larger than what was profiled" if larger else ""
    if not any(one.drifted for one in known):
        return f"as the cost table says: {words} ({of}){more}"
    end = "budgets are not the best ones"
    if draft.ratio and verify.ratio and abs(draft.ratio / verify.ratio - 1) <= limit:
        end = "both medians are off alike, which moves every predicted time and hardly a budget"
    return f"cost drift: {words} ({of}){more}; {end}; profile again with keep=False"


def _times(ratio: float | None) -> str:
    """For a sentence; a pass that the table has free took infinitely longer."""
    return f"{ratio:.2f} ×" if ratio is not None and isfinite(ratio) else "∞ ×"
