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
from workbench.spec.thrift import Thrift

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
        thrift = getattr(policy, "thrift", None)
        self._thrift = thrift if isinstance(thrift, Thrift) else None
        self._resting: tuple[list[int], str, Decided] | None = None  # the last one, of these drafts
        self._promise: float | None = None  # of the step's decision, until it is weighed

    @property
    def name(self) -> str:
        """The policy's, however odd it is."""
        return name_of(self.policy) or "unnamed"

    def rest(self, drafted: Sequence[int]) -> Decided | None:
        """All drafts while a frugal policy rests, None where it is to be asked."""
        if self._thrift is None or not (why := self._thrift.rest(len(drafted))):
            return None
        self._of = []  # after a rest the confidences before it are of drafts long gone
        if self._resting is None or self._resting[:2] != (drafted, why):
            room = np.array(drafted, np.int64)
            decision = Decision(admitted=room, budget=int(room.sum()), reason=why)
            decided = Decided(decision=decision, stale=_NONE, live=_NONE)
            self._resting = list(drafted), why, decided
        return self._resting[2]

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
            before = dict(zip(self._of, self._last, strict=False))
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
        objective = decision.objective
        if self._thrift is not None and len(objective) > room.sum():
            self._promise = float(objective[decision.budget] / objective[-1]) - 1
        return Decided(decision=decision, stale=stale, live=live)

    def learn(self, accepted: Sequence[int], admitted: Sequence[int]) -> None:
        """Take the verdicts on what :meth:`decide` was asked for."""
        if self._asked is not None:
            self.estimator.take(*self._asked, accepted, admitted)
            self._asked = None

    def spent(self, deciding: float, step: float) -> None:
        """Seconds of the step, and what deciding took of it: by these a frugal policy rests."""
        if self._thrift is not None and self._promise is not None:
            self._thrift.weigh(len(self._of), self._promise, deciding, step)
            self._promise = None
