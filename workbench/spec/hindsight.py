"""What would have been best in a step, had one known what the target accepts.

A policy chooses a step's budget before the target has judged; afterwards more is known. A verified
slot was accepted or was not, and a refusal settles all that is behind it. Only behind a block that
was accepted as far as it was verified nobody looked: without a record of every verdict its trimmed
drafts count with their live survival, and what follows from it is *estimated*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.errors import DraftError
from workbench.spec.adaptive import Floats, Ints, allocate, budget_of, survival
from workbench.spec.cost_table import CostTable, check_table
from workbench.spec.step import RequestStep, Step

_IN_ITS_PLACE = "; fixed verification in its place"  # how ``adaptive.checked`` ends its reason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hindsight:
    """The best budget of a step once its verdicts are known. R requests, B the largest budget.

    Attributes:
        budget: the one with the most tokens a millisecond, the smallest of equal ones.
        admitted: the drafts of each request that it verifies; int64 ``[R]``.
        objective: tokens a millisecond for budgets 0 to B; float64 ``[B + 1]``.
        exact: whether every verdict that counts is known; if not, live survival stands in, and
            budget and objective are estimated.
        chosen: the budget that the step had.
        got: tokens a millisecond of what the step did verify, by the same table. It is at most
            ``objective[chosen]``, which gives that budget to the right drafts.
    """

    budget: int
    admitted: Ints
    objective: Floats
    exact: bool
    chosen: int
    got: float

    @property
    def best(self) -> float:
        """Tokens a millisecond of the best budget."""
        return float(self.objective[self.budget])

    @property
    def share(self) -> float:
        """How much of the best the step got; 1 where nothing would have been better."""
        return self.got / self.best


def hindsight(step: Step, table: CostTable, known: ArrayLike | None = None) -> Hindsight:
    """What would have been best in ``step``.

    Tokens are counted as a policy counts them: one of each request and the accepted drafts, whether
    or not a stop token took some away afterwards. A request that ended at a limit had no room for
    more drafts than its tokens show, and those behind are left out; of a request that goes on, the
    step does not say how much room it had, and all its drafts count.

    Args:
        step: a decode step.
        table: what the step costs; times are its, not the step's own.
        known: how many of its drafts the target accepts of each request if all are verified, from
            a record of every position; int ``[R]``.

    Raises:
        DraftError: a prefill; ``known`` has another shape, or contradicts the verdicts; or a
            trimmed draft's survival is needed and the step has no confidence of it.
    """
    check_table(table, "hindsight")
    if not isinstance(step, Step):
        raise DraftError(f"hindsight is of a Step, not {step!r:.60}")
    if step.phase != "decode":
        raise DraftError(f"step {step.index} reads a prompt, it has no drafts to choose among")
    parts = step.requests
    if not parts:
        raise DraftError(f"step {step.index} has no requests")
    drafted: Ints = np.array([_room(part) for part in parts], np.int64)
    verdicts = None if known is None else _verdicts(known, parts)
    chances, exact = _chances(step, drafted, verdicts)
    ones = np.ones(len(parts), np.int64)
    gained = len(parts) + sum(part.accepted for part in parts)
    rows = len(parts) + step.budget
    if not any(part.drafted for part in parts):  # and so no time went into drafting
        alone = len(parts) / table.verify_ms(rows)
        return Hindsight(budget=0, admitted=ones * 0, objective=np.array([alone]), exact=True,
                         chosen=0, got=alone)  # fmt: skip
    likely = survival(chances, drafted)
    budget, objective = budget_of(likely, drafted, ones > 0, ones, table)
    return Hindsight(
        budget=budget,
        admitted=allocate(likely, drafted, budget),
        objective=objective,
        exact=exact,
        chosen=step.budget,
        got=gained / (table.draft_ms(len(parts)) + table.verify_ms(rows)),
    )


def policy_failed(step: Step) -> bool:
    """Whether the step's policy failed, and fixed verification took its place."""
    return step.reason.endswith(_IN_ITS_PLACE)


def _room(part: RequestStep) -> int:
    """Drafts that there was room for, as far as the step tells."""
    if part.finished in ("length", "context"):  # its tokens are all that were left
        return min(len(part.drafted), max(part.admitted, len(part.token_ids) - 1))
    return len(part.drafted)


def _verdicts(known: ArrayLike, parts: Sequence[RequestStep]) -> list[int]:
    try:
        given = np.asarray(known)
    except ValueError:
        raise DraftError("known says a whole number of each request, no lists") from None
    if given.shape != (len(parts),) or given.dtype.kind not in "iu":
        raise DraftError(
            f"known says of each of the step's {len(parts)} requests how many drafts the target "
            f"accepts, a whole number each, not {given.dtype} of shape {list(given.shape)}"
        )
    verdicts: list[int] = given.tolist()
    for part, accepts in zip(parts, verdicts, strict=True):
        whole = part.accepted == part.admitted
        if not (part.accepted <= accepts <= len(part.drafted)) or (
            accepts != part.accepted and not whole
        ):
            raise DraftError(
                f"request {part.request} had {part.accepted} of {part.admitted} verified drafts "
                f"accepted (drafted: {len(part.drafted)}), which {accepts} known ones contradict; "
                "is known of the same step?"
            )
    return verdicts


def _chances(
    step: Step, drafted: Ints, verdicts: Sequence[int] | None
) -> tuple[NDArray[np.float64], bool]:
    """Conditional probabilities as they are known now, ``[R, K]``; and whether all are 0 or 1."""
    slots = int(drafted.max())
    chances, exact = np.zeros((len(drafted), slots)), True
    for row, (part, count) in enumerate(zip(step.requests, drafted.tolist(), strict=True)):
        if verdicts is not None:
            chances[row, : verdicts[row]] = 1.0
            continue
        chances[row, : part.accepted] = 1.0
        if part.accepted < part.admitted or count == part.admitted:
            continue
        if len(part.expected) != len(part.drafted):
            raise DraftError(
                f"request {part.request} of step {step.index} has trimmed drafts without "
                "confidences; give known, or decode with a policy"
            )
        chances[row, part.admitted : count] = part.expected[part.admitted : count]
        exact = False
    return chances, exact
