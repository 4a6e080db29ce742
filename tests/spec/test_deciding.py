"""A policy in the decode loop: lossless whatever it trims, and its Steps say what it saw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import workbench
from spec.planted import plant, small_drafter, small_target
from workbench.errors import DraftError
from workbench.model.beam import Beam
from workbench.model.sampling import Sampling
from workbench.spec.acceptance import Estimator, log_odds
from workbench.spec.adaptive import Adaptive, Decision, Fixed, NoDrafts, Situation
from workbench.spec.cost_table import CostTable
from workbench.spec.deciding import Decider
from workbench.spec.decode import decode
from workbench.spec.doubt import doubt
from workbench.spec.drafter import Drafter
from workbench.spec.metrics import Tally
from workbench.spec.step import Step
from workbench.spec.thrift import RESTS, WEIGHED, Thrift
from workbench.views.spec_curves import _health

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], [7], [3, 3, 2, 1], [9, 8]]
TABLE = CostTable(draft=((1, 0.1), (64, 3.0)), verify=((1, 1.0), (64, 16.0)))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Beam:
    return small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Beam) -> Drafter:
    return small_drafter(target)


class Dice:
    """Admits any number of drafts of each request, from none to all."""

    name = "dice"

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.seen: list[Situation] = []

    def decide(self, situation: Situation) -> Decision:
        self.seen.append(situation)
        admitted = self.rng.integers(0, situation.drafted + 1)
        return Decision(admitted=admitted, budget=int(admitted.sum()), reason="a throw")


def texts(run: Any) -> list[tuple[int, ...]]:
    return [g.token_ids for g in run.generations.values()]


def plain(target: Beam, n: int) -> list[tuple[int, ...]]:
    return [g.token_ids for g in workbench.generate(target, PROMPTS, max_new_tokens=n)]


@pytest.mark.parametrize("policy", [Dice(), NoDrafts(), Fixed(2), Adaptive(TABLE)])
def test_greedy_text_does_not_depend_on_what_is_trimmed(
    target: Beam, drafter: Drafter, policy: Any
) -> None:
    run = decode(target, drafter, PROMPTS, max_new_tokens=33, policy=policy, slots=3)
    steps = list(run)
    assert texts(run) == plain(target, 33)
    for step in steps:
        if step.phase == "prefill" or not any(p.drafted for p in step.requests):
            assert step.policy == ""  # nothing to decide
            continue
        assert step.policy == policy.name
        assert step.rows == len(step.requests) + step.budget
        assert Step.from_dict(step.to_dict()) == step
        for part in step.requests:
            assert part.drafted or part.admitted == 0
            assert len(part.expected) == len(part.stale) == len(part.drafted)
            last = "plain" if not part.admitted else "corrected"
            if part.admitted and part.accepted == part.admitted:
                last = "bonus"
            assert part.kinds == ("accepted",) * part.accepted + (last,)


def test_what_was_planted_is_accepted_as_far_as_it_was_admitted(
    target: Beam, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = plain(target, 60)

    def right(running: Any, n: int) -> list[int]:
        return [*truth[running.request][len(running.ids) :], *[0] * n][:n]

    holder = plant(monkeypatch, right)
    run = holder["run"] = decode(target, drafter, PROMPTS, max_new_tokens=25, policy=Dice(1))
    trimmed = 0
    for step in run:
        for part in step.requests:
            assert part.accepted == part.admitted
            trimmed += part.trimmed
    assert texts(run) == [ids[:25] for ids in truth]
    assert trimmed > 0


def test_the_situation_is_what_the_estimator_said_then(target: Beam, drafter: Drafter) -> None:
    """Live and stale confidences, worked out again from the steps' own scores."""
    dice, again = Dice(2), Estimator(4)
    heat = 0.7
    run = decode(
        target, drafter, PROMPTS, max_new_tokens=150, policy=dice, detail=True, slots=3,
        sampling=Sampling(temperature=heat, seed=5),
    )  # fmt: skip
    last: dict[int, np.ndarray] = {}
    number = 0
    for step in run:
        parts = [p for p in step.requests if p.drafted]
        if step.phase == "prefill" or not parts:
            continue
        seen = dice.seen[number]
        number += 1
        rows = [i for i, p in enumerate(step.requests) if p.drafted]
        features = log_odds([p.scores for p in parts], heat)
        live = again.predict(features)
        np.testing.assert_allclose(seen.live[rows], live, rtol=1e-6)
        np.testing.assert_allclose([p.expected for p in parts], live, rtol=1e-6)
        for row, part, now in zip(rows, parts, live, strict=True):
            before = last.get(part.request, np.ones(4))
            np.testing.assert_allclose(seen.stale[row], before, rtol=1e-6)
            np.testing.assert_allclose(part.stale, before, rtol=1e-6)
            last[part.request] = now
        # A request at its last token has no drafts, and teaches nothing.
        again.observe(live, features, [p.accepted for p in parts], [p.admitted for p in parts])
    assert number == len(dice.seen) > 100
    assert run.decider is not None
    assert run.decider.estimator.steps == again.steps
    assert run.decider.estimator.slope == pytest.approx(float(again.slope), rel=1e-5)
    assert len(again.history) >= 2  # it was fitted at least once


def test_an_estimator_goes_on_in_the_next_run(target: Beam, drafter: Drafter) -> None:
    learned = Estimator(4)
    for _ in range(2):
        list(decode(target, drafter, PROMPTS, policy=Fixed(), estimator=learned, max_new_tokens=40))
    assert learned.steps > 40


class Broken:
    name = "broken"

    def decide(self, situation: Situation) -> Decision:
        raise ZeroDivisionError("no idea")


class Greedy:
    name = "more"

    def decide(self, situation: Situation) -> Decision:
        return Decision(admitted=situation.drafted + 1, budget=int(situation.drafted.sum()))


@pytest.mark.parametrize(("policy", "words"), [(Broken(), "no idea"), (Greedy(), "policy more")])
def test_a_policy_that_fails_is_fixed_verification_and_says_so(
    target: Beam, drafter: Drafter, policy: Any, words: str
) -> None:
    run = decode(target, drafter, PROMPTS, max_new_tokens=12, policy=policy)
    reasons = [step.reason for step in run if step.policy]
    assert texts(run) == plain(target, 12)
    assert all(words in reason and "fixed verification" in reason for reason in reasons)
    assert run.decider is not None


class Nameless:
    @property
    def name(self) -> str:
        raise ValueError("no name")

    def decide(self, situation: Situation) -> Decision:
        raise RuntimeError("<b>no</b>")


def test_a_name_that_fails_ends_no_run(target: Beam, drafter: Drafter) -> None:
    run = decode(target, drafter, PROMPTS, max_new_tokens=12, policy=Nameless())
    steps = [step for step in run if step.policy]
    assert texts(run) == plain(target, 12)
    assert {step.policy for step in steps} == {"Nameless"}
    assert all(s.reason.startswith("policy Nameless failed: RuntimeError: <b>") for s in steps)


class Writer:
    name = "writer"

    def decide(self, situation: Situation) -> Decision:
        situation.drafted.setflags(write=True)
        situation.drafted[:] += 1
        return Fixed().decide(situation)


def test_a_policy_that_claims_more_room_gets_none(target: Beam, drafter: Drafter) -> None:
    run = decode(target, drafter, PROMPTS, max_new_tokens=12, policy=Writer())
    reasons = [step.reason for step in run if step.policy]
    assert texts(run) == plain(target, 12)
    assert all("policy writer failed: it admitted" in reason for reason in reasons)


def test_a_drafter_is_not_doubted_for_what_nobody_verified(target: Beam, drafter: Drafter) -> None:
    """Nothing accepted: because nothing was asked, or because every draft was wrong."""
    for policy, doubted in ((NoDrafts(), False), (Fixed(1), True)):
        tally = Tally(4)
        for step in decode(target, drafter, PROMPTS, max_new_tokens=40, policy=policy):
            parts = [replace(p, accepted=0, token_ids=p.token_ids[-1:], kinds=p.kinds[-1:])
                     for p in step.requests]  # fmt: skip
            tally.add(replace(step, requests=tuple(parts)))
        found = tally.acceptance()
        assert found.accepted == 0
        assert found.events > 100
        assert (doubt(found, 0.0) is not None) == doubted
        assert ("almost nothing is accepted" in _health(found)) == doubted


def test_a_request_that_leaves_takes_its_confidences_along(target: Beam, drafter: Drafter) -> None:
    dice = Dice(3)
    run = decode(target, drafter, PROMPTS, max_new_tokens=200, policy=dice)
    for _ in range(4):
        next(run)
    run.leave(1)
    next(run)
    assert len(dice.seen[-1].drafted) == 4
    joined = run.join([5, 5, 5])
    while joined not in {p.request for p in next(run).requests}:
        pass
    step = next(run)
    part = next(p for p in step.requests if p.request == joined)
    assert part.stale == (1.0,) * 4
    assert part.expected != part.stale
    run.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": object()}, "a policy has a name and decide"),
        ({"policy": Adaptive}, "Adaptive is its class"),
        ({"policy": Fixed(), "estimator": "fresh"}, "estimator must be an Estimator or None"),
        ({"policy": Fixed(), "estimator": Estimator(3)}, "for 3 drafts a step, and here are 4"),
        ({"estimator": Estimator(4)}, "an estimator serves a policy"),
    ],
)
def test_what_cannot_decide_is_refused(
    target: Beam, drafter: Drafter, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(DraftError, match=words):
        decode(target, drafter, PROMPTS, **given)


def test_a_policy_without_drafts_is_refused(target: Beam) -> None:
    with pytest.raises(DraftError, match="there is no drafter"):
        decode(target, None, PROMPTS, policy=Fixed())


@pytest.mark.parametrize("proposals", ["greedy", "probabilistic"])
def test_a_temperature_beyond_float32_decodes(
    target: Beam, drafter: Drafter, proposals: Any
) -> None:
    sampling = Sampling(temperature=1e300)
    run = decode(
        target, drafter, PROMPTS[0], max_new_tokens=8, sampling=sampling, proposals=proposals,
        policy=Adaptive(TABLE), stop_at_eos=False,
    )  # fmt: skip
    assert sum(step.tokens for step in run) == 8
    assert not any("failed" in step.reason for step in run)


# -- frugal ----------------------------------------------------------------------------------------


class Frugal:
    """Admits all and says that ``trimmed`` would have been so much better."""

    name = "told"

    def __init__(self, gain: float) -> None:
        self.gain, self.thrift = gain, Thrift()

    def decide(self, situation: Situation) -> Decision:
        total = int(situation.drafted.sum())
        objective = np.full(total + 1, 0.5)
        objective[total - 1], objective[total] = 1 + self.gain, 1.0
        admitted = situation.drafted.copy()
        admitted[0] -= 1
        return Decision(admitted=admitted, budget=total - 1, objective=objective)


def walked(decider: Decider, steps: int, *, requests: int = 1, cost: float) -> list[bool]:
    """Whether each of so many steps was decided; deciding takes ``cost`` of all else."""
    scores = np.zeros((requests, 3, 2), np.float32)
    seen = []
    for _ in range(steps):
        decided = decider.rest([3] * requests)
        seen.append(decided is None)
        if decided is None:
            decided = decider.decide(list(range(requests)), [3] * requests, scores, 0.0)
            decider.learn([0] * requests, decided.decision.admitted.tolist())
        else:
            assert decided.decision.admitted.tolist() == [3] * requests
            assert decided.decision.budget == 3 * requests
            assert "rests" in decided.decision.reason
            assert decided.live.size == 0
        decider.spent(cost, 1 + cost)
    return seen


def test_a_frugal_policy_rests_where_deciding_does_not_pay() -> None:
    decider = Decider(Frugal(0.05), 3)
    seen = walked(decider, WEIGHED + RESTS + WEIGHED + 1, cost=0.04)
    # A promise of 5 % is less than twice 4 %.
    assert seen == [True] * WEIGHED + [False] * RESTS + [True] * WEIGHED + [False]
    assert decider.estimator.steps == 2 * WEIGHED, "nothing is learned while it rests"


def test_confidences_from_before_a_rest_are_not_those_of_the_step_before() -> None:
    decider, scores = Decider(Frugal(0.0), 3), np.zeros((1, 3, 2), np.float32)
    walked(decider, WEIGHED + RESTS, cost=0.1)
    assert decider.rest([3]) is None
    first = decider.decide([0], [3], scores, 0.0)
    assert (first.stale == 1).all()
    second = decider.decide([0], [3], scores, 0.0)
    np.testing.assert_array_equal(second.stale, first.live)


@pytest.mark.parametrize(("gain", "cost"), [(0.05, 0.02), (0.5, 0.2)])
def test_a_frugal_policy_goes_on_where_deciding_pays(gain: float, cost: float) -> None:
    assert all(walked(Decider(Frugal(gain), 3), 3 * WEIGHED, cost=cost))


def test_rests_are_of_a_number_of_requests() -> None:
    decider = Decider(Frugal(0.0), 3)
    assert not walked(decider, WEIGHED + 1, cost=0.01)[-1]
    assert all(walked(decider, WEIGHED, requests=2, cost=0.01))
    assert not any(walked(decider, 5, requests=2, cost=0.01))
    assert not any(walked(decider, RESTS - 1, cost=0.01)), "one request rests on"
    assert all(walked(decider, WEIGHED, cost=0.01))


def test_a_policy_rests_in_its_next_run_too() -> None:
    policy = Frugal(0.0)
    runs = [sum(walked(Decider(policy, 3), 20, cost=0.1)) for _ in range(5)]
    assert runs == [20, WEIGHED - 20, 0, 0, 0]


def test_confidences_of_another_batch_before_a_rest_are_not_those_of_the_step_before() -> None:
    decider, scores = Decider(Frugal(0.0), 3), np.zeros((2, 3, 2), np.float32)
    walked(decider, WEIGHED + 1, cost=0.1)
    decided = decider.decide([0, 1], [3, 3], scores, 0.0)
    assert (decided.stale == 1).all()


def test_only_a_policy_that_says_so_rests() -> None:
    class Plain(Frugal):
        def __init__(self, gain: float) -> None:
            self.gain, self.thrift = gain, None  # type: ignore[assignment]

    table = CostTable(draft=((1, 1.0),), verify=((1, 1.0),))
    for policy in (Plain(0.0), Adaptive(table), Fixed()):
        assert all(walked(Decider(policy, 3), 3 * WEIGHED, cost=10.0))
    assert not all(walked(Decider(Adaptive(table, frugal=True), 3), 3 * WEIGHED, cost=10.0))
