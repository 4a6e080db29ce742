"""Hindsight against every possible admission, one by one; and the pace of a run, counted anew."""

import random
from itertools import product
from math import isnan
from typing import Any

import numpy as np
import pytest

from views.spec_steps import run as made_up
from workbench.errors import DraftError
from workbench.spec.adaptive import Adaptive, Situation, checked
from workbench.spec.cost_table import CostTable
from workbench.spec.hindsight import Hindsight, hindsight, policy_failed
from workbench.spec.metrics import Tally
from workbench.spec.pace import pace
from workbench.spec.step import RequestStep, Step

# Steps up to 4 rows, lines above: budgets beyond the best one are not all dearer.
TABLE = CostTable(draft=((1, 0.5), (4, 0.9)), verify=((1, 2.0), (4, 2.6), (8, 4.0), (32, 9.0)),
                  captured=4)  # fmt: skip


def part(
    request: int, drafted: int, admitted: int, accepted: int, expected: tuple[float, ...] = ()
) -> RequestStep:
    return RequestStep(
        request=request, position=9, drafted=tuple(range(300, 300 + drafted)), admitted=admitted,
        expected=expected, accepted=accepted, token_ids=(7,) * (accepted + 1),
        kinds=("accepted",) * accepted + ("corrected" if accepted < admitted else "bonus",),
    )  # fmt: skip


def step(*parts: RequestStep) -> Step:
    rows = sum(1 + p.admitted for p in parts)
    return Step(index=5, rows=rows, seconds=0.1, requests=parts)


def random_step(rng: random.Random) -> Step:
    parts = []
    for request in range(rng.randint(1, 4)):
        drafted = rng.randint(0, 3)
        admitted = rng.randint(0, drafted)
        expected = tuple(rng.choice([0.0, 0.25, 0.5, rng.random(), 1.0]) for _ in range(drafted))
        parts.append(part(request, drafted, admitted, rng.randint(0, admitted), expected))
    return step(*parts)


def gain(p: RequestStep, admitted: int, known: int | None) -> float:
    """Accepted drafts to be expected of so many verified ones, draft by draft."""
    total, chance = 0.0, 1.0
    for slot in range(admitted):
        if known is not None:
            chance *= slot < known
        elif slot < p.admitted:
            chance *= slot < p.accepted
        else:
            chance *= p.expected[slot]
        total += chance
    return total


def every_admission(found: Step, known: list[int] | None) -> dict[int, float]:
    """The most tokens a millisecond of each budget."""
    best: dict[int, float] = {}
    requests = len(found.requests)
    for admitted in product(*(range(len(p.drafted) + 1) for p in found.requests)):
        tokens = requests + sum(
            gain(p, a, None if known is None else known[i])
            for i, (p, a) in enumerate(zip(found.requests, admitted, strict=True))
        )
        budget = sum(admitted)
        ms = TABLE.draft_ms(requests) + TABLE.verify_ms(requests + budget)
        best[budget] = max(best.get(budget, 0.0), tokens / ms)
    return best


def compare(found: Step, seen: Hindsight, known: list[int] | None) -> None:
    best = every_admission(found, known)
    assert list(seen.objective) == pytest.approx([best[b] for b in range(len(best))])
    assert seen.best == pytest.approx(max(best.values()))
    least = min(b for b, value in best.items() if value >= max(best.values()) * (1 - 1e-12))
    assert seen.budget == least == seen.admitted.sum()
    # Its own admission earns what its objective says.
    tokens = len(found.requests) + sum(
        gain(p, int(a), None if known is None else known[i])
        for i, (p, a) in enumerate(zip(found.requests, seen.admitted, strict=True))
    )
    ms = TABLE.draft_ms(len(found.requests)) + TABLE.verify_ms(len(found.requests) + least)
    assert tokens / ms == pytest.approx(seen.best)
    ms = TABLE.draft_ms(len(found.requests)) + TABLE.verify_ms(found.rows)
    assert seen.got == pytest.approx(found.tokens / ms)
    assert seen.chosen == found.budget
    assert seen.got <= seen.objective[seen.chosen] + 1e-12
    assert 0 < seen.share <= 1 + 1e-12


def test_hindsight_is_the_best_of_every_admission() -> None:
    rng = random.Random(4)
    estimated = 0
    for _ in range(300):
        found = random_step(rng)
        if not any(p.drafted for p in found.requests):
            continue
        seen = hindsight(found, TABLE)
        open_ends = any(p.accepted == p.admitted < len(p.drafted) for p in found.requests)
        assert seen.exact is not open_ends
        estimated += open_ends
        compare(found, seen, None)
    assert 100 < estimated < 280


def test_a_record_of_all_verdicts_makes_it_exact() -> None:
    rng = random.Random(5)
    for _ in range(300):
        found = random_step(rng)
        if not any(p.drafted for p in found.requests):
            continue
        known = [
            p.accepted if p.accepted < p.admitted else rng.randint(p.accepted, len(p.drafted))
            for p in found.requests
        ]
        seen = hindsight(found, TABLE, known)
        assert seen.exact
        compare(found, seen, known)
        assert (seen.admitted <= known).all()  # a draft that is refused is worth no row


def test_a_refusal_settles_all_behind_it() -> None:
    sure = (1.0,) * 4
    refused, whole = part(0, 4, 2, 1, sure), part(0, 4, 2, 2, sure)
    assert hindsight(step(refused), TABLE).exact
    assert hindsight(step(refused), TABLE).budget == 1
    open_end = hindsight(step(whole), TABLE)
    assert not open_end.exact
    # Both its drafts were accepted and the others are sure: as if all four had been known.
    assert list(open_end.objective) == pytest.approx(
        list(hindsight(step(whole), TABLE, [4]).objective)
    )
    # What nobody believes is worth no row: the survival is that of these very drafts.
    doubted = part(0, 4, 2, 2, (0.9, 0.9, 0.0, 1.0))
    assert list(hindsight(step(doubted), TABLE).objective) == pytest.approx(
        list(hindsight(step(doubted), TABLE, [2]).objective)
    )


def test_no_drafts_cost_no_draft() -> None:
    seen = hindsight(step(part(0, 0, 0, 0), part(1, 0, 0, 0)), TABLE)
    assert (seen.budget, seen.chosen, seen.exact, seen.share) == (0, 0, True, 1.0)
    assert list(seen.objective) == pytest.approx([2 / TABLE.verify_ms(2)])
    assert seen.admitted.tolist() == [0, 0]


def test_a_request_at_its_limit_had_no_room() -> None:
    last = RequestStep(
        request=0, position=9, drafted=(1, 2, 3, 4), expected=(1.0,) * 4, admitted=1, accepted=1,
        token_ids=(1, 8), kinds=("accepted", "bonus"), finished="length",
    )  # fmt: skip
    seen = hindsight(step(last), TABLE)
    assert seen.exact  # two tokens were left: one draft, and the target's own
    assert len(seen.objective) == 2


def test_hindsight_says_what_it_cannot_do() -> None:
    prefill = Step(index=3, phase="prefill", rows=4, seconds=0.1, requests=(part(0, 0, 0, 0),))
    with pytest.raises(DraftError, match="step 3 reads a prompt"):
        hindsight(prefill, TABLE)
    with pytest.raises(DraftError, match="no requests"):
        hindsight(Step(index=1, rows=0, seconds=0.0, requests=()), TABLE)
    with pytest.raises(DraftError, match="without confidences; give known"):
        hindsight(step(part(0, 3, 1, 1)), TABLE)
    assert hindsight(step(part(0, 3, 1, 1)), TABLE, [2]).exact
    with pytest.raises(DraftError, match="is nan, not a probability"):
        hindsight(step(part(0, 3, 1, 1, (0.5, float("nan"), 0.5))), TABLE)
    refused = step(part(4, 3, 2, 1, (0.5,) * 3))
    for wrong in ([2], [0], [9]):
        with pytest.raises(DraftError, match=r"request 4 had 1 of 2 .* contradict"):
            hindsight(refused, TABLE, wrong)
    for wrong in ([1, 1], [1.0], 1):
        with pytest.raises(DraftError, match="how many drafts the target accepts"):
            hindsight(refused, TABLE, wrong)


@pytest.mark.parametrize("wrong", [{"table": None}, {"step": None}, {"known": [[1], [1, 2]]}])
def test_what_hindsight_cannot_be_of(wrong: dict[str, Any]) -> None:
    step = Step(index=0, rows=1, seconds=0.0, requests=(part(0, 2, 2, 1),))
    asked: dict[str, Any] = {"step": step}
    with pytest.raises(DraftError):
        hindsight(**{"table": TABLE} | asked | wrong)


def test_a_failed_policy_is_known_by_its_step() -> None:
    situation = Situation(
        drafted=np.array([3]), plain=np.array([1]), samples=np.array([True]),
        stale=np.full((1, 3), np.nan), live=np.full((1, 3), np.nan),
    )  # fmt: skip
    decision = checked(Adaptive(TABLE), situation)
    assert decision.failed
    failed = Step(index=0, rows=4, seconds=0.1, requests=(part(0, 3, 3, 1),), policy="adaptive",
                  reason=decision.reason)  # fmt: skip
    assert policy_failed(failed)
    assert not policy_failed(step(part(0, 3, 3, 1)))


# -- the pace of a run ----------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 4, 100])
def test_pace_is_counted_over_its_window(window: int) -> None:
    steps = made_up(40, requests=3, trim=True, seed=2)
    decoded = [s for s in steps if s.phase == "decode"]
    found = pace(steps, window)
    assert found.index.tolist() == [s.index for s in decoded]
    for n in range(len(decoded)):
        some = decoded[max(0, n + 1 - window) : n + 1]
        tally = Tally()
        for each in some:
            tally.add(each)
        length = tally.acceptance().length_pooled
        assert (found.length[n] == pytest.approx(length)) if length else isnan(found.length[n])
        seconds = sum(s.seconds for s in some)
        assert found.speed[n] == pytest.approx(sum(s.tokens for s in some) / seconds)
        budgets = [s.budget for s in some]
        assert found.admitted_mean[n] == pytest.approx(sum(budgets) / len(some))
        drafted = [len(p.drafted) for s in some for p in s.requests]
        assert found.drafted_mean[n] == pytest.approx(sum(drafted) / len(some))
        assert found.seconds[n] == pytest.approx(sum(s.seconds for s in decoded[: n + 1]))
    whole = Tally()
    for each in decoded:
        whole.add(each)
    assert found.total_length == pytest.approx(whole.acceptance().length_pooled)
    assert found.total_speed == pytest.approx(found.tokens / sum(s.seconds for s in decoded))
    assert found.tokens == sum(s.tokens for s in decoded)


def test_pace_of_nothing_is_undefined() -> None:
    found = pace(made_up(0))
    assert len(found.index) == len(found.speed) == len(found.length) == found.tokens == 0
    assert found.total_speed is None
    assert found.total_length is None
    assert pace(made_up(5), window=10**30).speed[-1] == pace(made_up(5), window=5).speed[-1]
    assert len(pace(made_up(0), window=10**30).speed) == 0
    plain = pace(made_up(5, drafted=0))
    assert plain.total_length is None
    assert np.isnan(plain.length).all()
    still = pace([Step(index=0, rows=1, seconds=0.0, requests=(part(0, 0, 0, 0),))])
    assert still.total_speed is None
    assert isnan(still.speed[0])
    for wrong in (0, 1.5, True):
        with pytest.raises(DraftError, match="a window is a whole number of steps"):
            pace([], wrong)  # type: ignore[arg-type]
