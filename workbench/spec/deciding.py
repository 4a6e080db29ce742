"""A policy in the decode loop: what each draft is worth, who is verified, and what was learned.

Confidences are the estimator's, calibrated by the verdicts so far. As in the engine the budget is
made from *stale* ones, of the draft step before (1 for a request that had none), and allocated by
the *live* ones of these drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.errors import DraftError
from workbench.spec.acceptance import Array, Estimator
from workbench.spec.adaptive import (
    Decision,
    Floats,
    Ints,
    Policy,
    Situation,
    check_policy,
    checked,
    name_of,
)

# A frugal policy's decisions that are weighed against what they cost, and the steps that it rests
# after they did not pay.
WEIGHED, RESTS = 32, 480
# Promises are the best of many guesses, so they come true in part; and what deciding costs is more
# than its own time, since it takes room in the processor's caches.
_PROMISED = 2.0  # times its cost
_NONE: Floats = np.empty((0, 0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decided:
    """A decision, and the confidences it was made from.

    Attributes:
        decision: the policy's, or fixed verification where it failed or rests.
        stale, live: float64 ``[R, K]``, conditional; ``[0, 0]`` where it rests.
    """

    decision: Decision
    stale: Floats
    live: Floats


class Decider:
    """Asks ``policy`` at every step of a run, and keeps ``estimator`` learning.

    Attributes:
        policy: who decides.
        estimator: what it is told; a fresh one where None is given.
    """

    def __init__(self, policy: Policy, slots: int, estimator: Estimator | None = None) -> None:
        """For drafts of ``slots`` tokens.

        Raises:
            DraftError: this is no policy, or an estimator for other drafts.
        """
        check_policy(policy)
        if estimator is not None and not isinstance(estimator, Estimator):
            raise DraftError(f"estimator must be an Estimator or None, not {estimator!r:.60}")
        if estimator is not None and estimator.slots != slots:
            raise DraftError(
                f"the estimator is for {estimator.slots} drafts a step, and here are {slots}; give "
                "one for as many, or none"
            )
        self.policy = policy
        self.estimator = Estimator(slots) if estimator is None else estimator
        self._of: list[int] = []  # the requests of the step before, and their drafts' confidences
        self._last: Floats = np.empty((0, slots))
        self._ones: Ints = np.ones(0, np.int64)
        self._yes = np.ones(0, np.bool_)
        self._asked: tuple[Array, Array] | None = None  # predictions and features, until judged
        self._frugal = getattr(policy, "frugal", False) is True
        self._left, self._why = 0, ""  # steps to rest, and the reason
        self._resting: tuple[list[int], Decided] | None = None  # the last one, of these drafts
        self._promised: list[float] = []  # gains over verifying all, of the decisions weighed
        self._spent = self._steps = 0.0  # s of these, deciding and all else

    @property
    def name(self) -> str:
        """The policy's, however odd it is."""
        return name_of(self.policy) or "unnamed"

    def rest(self, drafted: Sequence[int]) -> Decided | None:
        """All drafts while a frugal policy rests, None where it is to be asked.

        A rest ends early when another number of requests decodes.
        """
        if not self._frugal:
            return None
        if len(drafted) != len(self._of):
            self._left = 0
            self._weigh_anew()
        if not self._left:
            return None
        self._left -= 1
        if self._resting is None or self._resting[0] != drafted:
            room = np.array(drafted, np.int64)
            decision = Decision(admitted=room, budget=int(room.sum()), reason=self._why)
            self._resting = list(drafted), Decided(decision=decision, stale=_NONE, live=_NONE)
        return self._resting[1]

    def decide(
        self, requests: Sequence[int], drafted: Sequence[int], scores: Array, temperature: float
    ) -> Decided:
        """Which of this step's drafts are verified.

        Args:
            requests: their numbers, R.
            drafted: drafts of each that there is room for.
            scores: realized scores of the candidates, float32 ``[R, K, C]``.
            temperature: of the drafts; 0 is taken as 1.
        """
        features = self.estimator.features(scores, temperature)
        predicted = self.estimator.predict(features)
        live = predicted.astype(np.float64)
        if self._of == requests:
            stale = self._last
        else:
            before = dict(zip(self._of, self._last, strict=True))
            fresh = np.ones(live.shape[1])
            stale = np.array([before.get(request, fresh) for request in requests])
        if len(self._ones) != len(requests):
            self._ones = np.ones(len(requests), np.int64)
            self._yes = np.ones(len(requests), np.bool_)
        room = np.array(drafted, np.int64)
        situation = Situation.of_step(room, self._ones, self._yes, stale, live)
        decision = checked(self.policy, situation)
        self._of, self._last = list(requests), live
        self._asked = predicted, features
        if self._frugal and len(decision.objective) > room.sum():
            objective = decision.objective
            self._promised.append(float(objective[decision.budget] / objective[-1]) - 1)
        return Decided(decision=decision, stale=stale, live=live)

    def learn(self, accepted: Sequence[int], admitted: Sequence[int]) -> None:
        """Take the verdicts on what :meth:`decide` was asked for."""
        if self._asked is not None:
            self.estimator.take(*self._asked, accepted, admitted)
            self._asked = None

    def spent(self, deciding: float, step: float) -> None:
        """What a step took that was decided, in seconds: decides whether a frugal policy rests."""
        if not self._frugal or self._left or not self._promised:
            return
        self._spent += deciding
        self._steps += step - deciding
        if len(self._promised) < WEIGHED:
            return
        cost, promise = self._spent / self._steps, sum(self._promised) / len(self._promised)
        if promise < _PROMISED * cost:
            self._left, self._resting = RESTS, None
            # What is known by then is of drafts long gone: as of a request that had none.
            self._last = np.ones_like(self._last)
            self._why = (
                f"rests: trimming promises {promise:.1%}, deciding costs {cost:.1%}; all drafts "
                f"for {RESTS} steps"
            )
        self._weigh_anew()

    def _weigh_anew(self) -> None:
        self._promised.clear()
        self._spent = self._steps = 0.0
