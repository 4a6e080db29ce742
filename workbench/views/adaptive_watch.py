"""``Watch``: what a watched run of adaptive verification has come to, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import DraftError
from workbench.spec.acceptance import REFIT_STEPS
from workbench.spec.adaptive import Adaptive, Floats, Situation, checked
from workbench.spec.calibration import Reliability, evidence, reliability
from workbench.spec.cost_table import CostTable
from workbench.spec.drift import drift
from workbench.spec.hindsight import hindsight, policy_failed
from workbench.spec.rates import over
from workbench.spec.step import Step
from workbench.views.numbers import plural

LAST_STEPS = 256
SPAN, BUCKET = 60.0, 0.25  # s of decode steps that the lines hold, and of one of their points
EQUAL = 0.01  # speeds closer than this share are told as the same
ENOUGH = 8  # decode steps of which a speed is worth a ratio
_PREDICTIONS = 4096  # whose outcomes are known, that a reliability is made of
_POINTS = 96  # of a curve over budgets
_SPEEDS = 64  # policies and numbers of sequences that are remembered


@dataclass(slots=True)
class Sums:
    """Of decode steps: times in seconds, drafts of all their requests."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    decide: float = 0.0
    drafted: int = 0
    admitted: int = 0
    accepted: int = 0
    events: int = 0

    def add(self, step: Step) -> None:
        """Count a step."""
        self.steps += 1
        self.tokens += step.tokens
        self.seconds += step.seconds
        self.draft += step.draft_seconds
        self.verify += step.verify_seconds
        self.decide += step.decide_seconds
        for part in step.requests:
            self.drafted += len(part.drafted)
            self.admitted += part.admitted
            self.accepted += part.accepted
            self.events += bool(part.drafted)

    @property
    def speed(self) -> float | None:
        """Tokens a second, None of no step."""
        return over(self.tokens, self.seconds)

    @property
    def length(self) -> float | None:
        """Acceptance length: 1 and the accepted drafts of a draft event; None without one."""
        accepted = over(self.accepted, self.events)
        return None if accepted is None else 1 + accepted


@dataclass(slots=True, kw_only=True)
class Bucket:
    """A point of the lines: steps of one policy, side by side.

    Attributes:
        policy, requests: of all its steps.
        sums: of them.
        until: seconds of decode steps, from the beginning of the run, at its end.
    """

    policy: str
    requests: int
    sums: Sums
    until: float = 0.0


class Watch:
    """Figures of one run, its last steps, and what the page shows of them.

    Attributes:
        table: what steps cost, None until it is known.
        steps: the last steps, oldest first.
        seen: steps so far, prefills among them.
        speeds: sums by policy and number of sequences, the first decode step left out.
        buckets: of the last minute of decode steps.
        focus: the policy whose steps and tiles are shown where it takes turns; None for all.
    """

    def __init__(self, table: CostTable | None = None, *, calibrated: bool = False) -> None:
        """``calibrated``: the run's estimator has learned before."""
        self.table = table
        self.steps: deque[Step] = deque(maxlen=LAST_STEPS)
        self.seen = self.decoded = self.tokens = 0
        self.seconds = 0.0
        self.speeds: dict[tuple[str, int], Sums] = {}
        self.buckets: deque[Bucket] = deque(maxlen=round(SPAN / BUCKET))
        self.focus: str | None = None
        self._policy = ""
        self._first = 0 if calibrated else REFIT_STEPS
        self._early = _Outcomes(_PREDICTIONS)
        self._late = _Outcomes(_PREDICTIONS)

    # -- counting ---------------------------------------------------------------------------------

    def add(self, step: Step) -> None:
        """Count a step."""
        self.seen += 1
        self.tokens += step.tokens
        self.steps.append(step)
        if step.phase != "decode":
            return
        self.decoded += 1
        into = self._early if self.decoded <= self._first else self._late
        into.add(*evidence([step]))
        if self.decoded == 1:
            return  # kernels and buffers are used for the first time
        self.seconds += step.seconds
        self._policy = step.policy or self._policy  # a step that drafts nothing asks nobody
        key = (self._policy, len(step.requests))
        self.speeds.setdefault(key, Sums()).add(step)
        if len(self.speeds) > _SPEEDS:
            self.speeds.pop(next(iter(self.speeds)))
        last = self.buckets[-1] if self.buckets else None
        if last is None or (last.policy, last.requests) != key or last.sums.seconds >= BUCKET:
            last = Bucket(policy=key[0], requests=key[1], sums=Sums())
            self.buckets.append(last)
        last.sums.add(step)
        last.until = self.seconds

    @property
    def last(self) -> Step | None:
        """The newest decode step that is kept; of the policy in focus, where there is one."""
        decoded = [s for s in reversed(self.steps) if s.phase == "decode"]
        decided = [s for s in decoded if s.policy]  # where nothing is drafted nobody is asked
        shown = [s for s in decided if self.focus in (None, s.policy)]
        return next(iter(shown or decided or decoded), None)

    @property
    def text(self) -> str:
        """Counts by policy, a line each; no times, so that equal runs say equal words."""
        return "\n".join(
            f"{policy or 'no policy'}, {requests} together: {plural(sums.steps, 'step')}, "
            f"{plural(sums.tokens, 'token')}; {_length(sums)}; {_verified(sums)}"
            for (policy, requests), sums in self.speeds.items()
        )

    # -- figures ----------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """What the page shows anew with every message: the newest step, tiles, lines."""
        step = self.last
        if step is None:
            return {}
        return {
            "step": step.index,
            "policy": step.policy,
            "reason": step.reason,
            "failed": policy_failed(step),
            "rows": rows(step),
            "objective": objective(step, self.table),
            "tiles": self._tiles(step),
            "verdict": self._verdict(step),
            "lines": [_point(bucket, self.seconds) for bucket in self.buckets],
        }

    def slow_figures(self) -> dict[str, Any]:
        """What takes longer, and changes little from one message to the next."""
        found: dict[str, Any] = {
            "reliability": {
                "first": self._first,
                "early": _bins(self._early.reliability()),
                "late": _bins(self._late.reliability()),
            }
        }
        if self.table is not None and self.decoded:
            costs = drift(self.table, self.steps)
            # The page has a button for what the sentence ends with.
            words = costs.sentence.removesuffix("; profile again with keep=False")
            found["drift"] = {"sentence": words, "alarm": costs.alarm}
        return found

    def _tiles(self, step: Step) -> list[list[str]]:
        key = (step.policy, len(step.requests))
        sums = self.speeds.get(key)
        if sums is None or sums.speed is None:
            return [["tokens/s", "–", "from the second step on"]]
        whole, draft, verify, decide = (
            1e3 * t / sums.steps for t in (sums.seconds, sums.draft, sums.verify, sums.decide)
        )
        share = over(sums.decide, sums.seconds) or 0.0
        length = sums.length
        verified = over(sums.admitted, sums.drafted)
        a_step = f"{sums.admitted / sums.steps:,.0f} of {sums.drafted / sums.steps:,.0f} a step"
        return [
            ["tokens/s", f"{sums.speed:,.0f}",
             f"{key[1]} together, {plural(sums.steps, 'step')}"],
            *self._ratio(key, sums.speed, sums.steps),
            ["a step", f"{whole:.1f} ms", f"draft {draft:.1f}, verify {verify:.1f}"],
            ["drafts verified", "–" if verified is None else f"{verified:.0%}", a_step],
            ["acceptance length", "undefined" if length is None else f"{length:.2f}",
             f"n = {plural(sums.events, 'draft event')}"],
            ["time deciding", f"{share:.1%}", f"{decide:.2f} ms a step"],
        ]  # fmt: skip

    def _ratio(self, key: tuple[str, int], speed: float, steps: int) -> list[list[str]]:
        """Against fixed verification of as many sequences; the other way round while it is fixed's
        turn."""
        other = self._other(key)
        if other is None:
            return []
        sums = self.speeds[other, key[1]]
        few = min(sums.steps, steps) < ENOUGH or not sums.speed
        said = "–" if few or not sums.speed else f"{speed / sums.speed:.2f} ×"
        return [[f"over {other}", said, f"{other}: {sums.speed or 0:,.0f} tokens/s"]]

    def _other(self, key: tuple[str, int]) -> str | None:
        """The policy that one is compared with, None where it did not decide as many yet."""
        other = "adaptive" if key[0] == "fixed" else "fixed"
        return other if (other, key[1]) in self.speeds else None

    def _verdict(self, step: Step) -> str:
        """What a policy's acceptance length came to: a shorter one is no loss in itself."""
        requests = len(step.requests)
        other = self._other((step.policy, requests))
        name = other if step.policy == "fixed" else step.policy
        sums = self.speeds.get((name, requests)) if name and other else None
        fixed = self.speeds.get(("fixed", requests))
        if sums is None or fixed is None or min(sums.steps, fixed.steps) < ENOUGH:
            return ""
        if not sums.speed or not fixed.speed or sums.length is None or fixed.length is None:
            return ""
        ratio = sums.speed / fixed.speed
        if abs(ratio - 1) < EQUAL:
            came = "the same tokens/s within 1%"
        elif ratio > 1:
            came = f"{ratio - 1:.0%} more tokens/s: a gain"
        else:
            came = f"{1 - ratio:.0%} fewer tokens/s: a loss"
        return f"{name}: {sums.length:.2f} instead of {fixed.length:.2f}, and {came}"


# -- of one step ----------------------------------------------------------------------------------


def rows(step: Step) -> dict[str, Any]:
    """The step's requests, survival of their slots in thousandths; -1 where nothing told it."""
    width = max((len(part.drafted) for part in step.requests), default=0)
    chance = np.full((len(step.requests), width), -1.0)
    for row, part in enumerate(step.requests):
        chance[row, : len(part.expected)] = part.expected
    known = chance >= 0
    survival = np.where(known, np.where(known, chance, 1.0).cumprod(1) * 1000, -1)
    return {
        "request": [part.request for part in step.requests],
        "drafted": [len(part.drafted) for part in step.requests],
        "admitted": [part.admitted for part in step.requests],
        "accepted": [part.accepted for part in step.requests],
        "survival": np.rint(survival).astype(int).tolist(),
    }


def objective(step: Step, table: CostTable | None) -> dict[str, Any] | None:
    """Expected tokens a millisecond over budgets, and what hindsight would have chosen.

    Where the policy weighed nothing the curve is what adaptive verification would have weighed.
    None where there is no curve: no table, or nothing drafted.
    """
    values: Sequence[float] = step.objective
    own = bool(values)
    if table is None or not any(part.expected for part in step.requests):
        return None
    try:
        best = hindsight(step, table)
        values = values if own else _weighed(step, table)
    except DraftError:  # a confidence that is no probability; the policy's reason says so
        return None
    if len(values) < 2:
        return None
    # Hindsight cannot tell a request's room from its drafts, so its curve may go on a little.
    after = np.asarray(best.objective, np.float64)[: max(len(values), best.budget + 1)]
    return {
        "own": own,
        "drafts": len(values) - 1,
        "chosen": step.budget,
        "curve": _thinned(np.asarray(values, np.float64), step.budget),
        "best": int(best.budget),
        "exact": bool(best.exact),
        "after": _thinned(after, int(best.budget)),
    }


def _weighed(step: Step, table: CostTable) -> Sequence[float]:
    width = max(len(part.drafted) for part in step.requests)
    shape = (len(step.requests), width)
    stale, live = np.ones(shape), np.ones(shape)
    for row, part in enumerate(step.requests):
        stale[row, : len(part.stale)] = part.stale
        live[row, : len(part.expected)] = part.expected
    ones = np.ones(len(step.requests), np.int64)
    situation = Situation(
        drafted=np.array([len(part.drafted) for part in step.requests], np.int64),
        plain=ones,
        samples=ones.astype(np.bool_),
        stale=stale,
        live=live,
    )
    weighed: list[float] = checked(Adaptive(table), situation).objective.tolist()
    return weighed


def _thinned(values: Floats, marked: int) -> list[list[float]]:
    """At most a hundred of the points, the ends and the marked one among them."""
    every = np.unique(np.linspace(0, len(values) - 1, _POINTS).round().astype(int))
    kept = np.union1d(every, [min(max(marked, 0), len(values) - 1)])
    return [[int(n), round(float(values[n]), 4)] for n in kept if isfinite(values[n])]


def _point(bucket: Bucket, now: float) -> list[Any]:
    sums = bucket.sums
    speed, length = sums.speed, sums.length
    return [
        round(bucket.until - now, 2),
        round(sums.admitted / sums.steps, 1),
        round(sums.drafted / sums.steps, 1),
        None if speed is None else round(speed),
        None if length is None else round(length, 2),
        bucket.policy,
        bucket.requests,
    ]


def _length(sums: Sums) -> str:
    return "nothing drafted" if sums.length is None else f"acceptance length {sums.length:.2f}"


def _verified(sums: Sums) -> str:
    return f"{sums.admitted:,} of {sums.drafted:,} drafts verified"


# -- confidences ----------------------------------------------------------------------------------


class _Outcomes:
    """The last predictions whose outcome is known."""

    def __init__(self, most: int) -> None:
        self._predicted = np.empty(most)
        self._true = np.empty(most, np.bool_)
        self._most, self._count = most, 0

    def add(self, predicted: Floats, true: NDArray[np.bool_]) -> None:
        sound = ~np.isnan(predicted)
        numbers = predicted[sound]
        places = (self._count + np.arange(len(numbers))) % self._most
        self._predicted[places], self._true[places] = numbers, true[sound]
        self._count += len(numbers)

    def reliability(self) -> Reliability:
        first = max(0, self._count - self._most)
        there = np.arange(first, self._count) % self._most  # the oldest first
        return reliability(self._predicted[there], self._true[there])


def _bins(found: Reliability) -> dict[str, Any]:
    return {
        "error": None if found.error is None else round(found.error, 3),
        "count": found.count,
        "bins": [[round(b.predicted, 3), round(b.observed, 3), b.count] for b in found.bins],
    }
