"""Drift of costs: medians counted by hand, steps that do not count, slow steps, alarms."""

from __future__ import annotations

import statistics
from math import inf

import pytest

from workbench.errors import DraftError
from workbench.spec.cost_table import CostTable
from workbench.spec.drift import FEWEST, drift
from workbench.spec.step import RequestStep, Step

# draft 1 + 0.5 a request, verification 2 + 0.1 a row: straight lines
TABLE = CostTable(draft=[(1, 1.5), (8, 5.0)], verify=[(1, 2.1), (64, 8.4)])


def step(
    rows: int,
    requests: int = 2,
    *,
    verify: float = 1.0,
    draft: float = 1.0,
    drafted: int = 3,
    phase: str = "decode",
) -> Step:
    """A step whose passes take so many times what TABLE says; ``drafted`` of the first request."""
    parts = tuple(
        RequestStep(request=n, position=9, drafted=(1,) * (drafted if n == 0 else 0),
                    token_ids=(1,), kinds=("plain",))
        for n in range(requests)
    )  # fmt: skip
    return Step(
        index=0,
        phase="prefill" if phase == "prefill" else "decode",
        rows=rows,
        draft_seconds=draft * (1 + 0.5 * requests) / 1e3,
        verify_seconds=verify * (2 + 0.1 * rows) / 1e3,
        seconds=1.0,
        requests=parts,
    )


def test_ratios_are_medians_of_the_last_steps() -> None:
    factors = [5.0, 5.0, 5.0, 1.1, 0.9, 1.3, 1.0, 1.2, 0.7, 1.05, 1.15, 0.95]
    steps = [step(4 + n, 1 + n % 4, verify=f, draft=(1 + f) / 2) for n, f in enumerate(factors)]
    found = drift(TABLE, steps, window=9)
    assert found.verify.ratio == pytest.approx(statistics.median(factors[3:]))
    assert found.draft.ratio == pytest.approx((1 + statistics.median(factors[3:])) / 2)
    assert found.verify.judged == found.draft.judged == 9
    assert not found.alarm
    # Every pass is there, at its own size, beside what the table says.
    assert found.verify.sizes.tolist() == list(range(4, 16))
    assert found.draft.sizes.tolist() == [1 + n % 4 for n in range(12)]
    assert found.verify.predicted.tolist() == pytest.approx([2 + 0.1 * n for n in range(4, 16)])
    assert found.verify.ms.tolist() == pytest.approx(
        [f * (2 + 0.1 * (4 + n)) for n, f in enumerate(factors)]
    )
    assert drift(TABLE, steps).verify.ratio == pytest.approx(statistics.median(factors))


def test_a_batch_that_shrinks_is_no_drift() -> None:
    steps = [step(rows, requests) for requests in range(8, 0, -1) for rows in (requests, 8)]
    found = drift(TABLE, steps)
    assert found.verify.ratio == pytest.approx(1)
    assert found.draft.ratio == pytest.approx(1)
    assert found.sentence.startswith("as the cost table says: verification at 1.00 ×")


def test_a_few_slow_steps_raise_no_alarm_and_lasting_ones_do() -> None:
    usual, slow = step(10), step(10, verify=40.0, draft=30.0)
    some = [usual] * 20 + [slow] * 9 + [usual] * 20
    assert not drift(TABLE, some, window=20).alarm
    lasting = [usual] * 40 + [step(10, verify=1.6)] * 20
    found = drift(TABLE, lasting, window=30)
    assert found.alarm
    assert (found.verify.drifted, found.draft.drifted) == (True, False)
    assert found.sentence == (
        "cost drift: verification at 1.60 ×, drafting at 1.00 × the table's time (median of the "
        "last 30 steps, limit 25 %); budgets are not the best ones; profile again with keep=False"
    )
    assert not drift(TABLE, lasting, window=30, limit=0.61).alarm
    assert drift(TABLE, lasting, window=30, limit=0.59).alarm
    # It is over as soon as half of the window is as it was.
    assert not drift(TABLE, [*lasting, *[usual] * 16], window=30).alarm


def test_faster_passes_are_a_drift_too() -> None:
    found = drift(TABLE, [step(10, draft=0.7)] * 10)
    assert found.draft.drifted
    assert found.draft.ratio == pytest.approx(0.7)
    assert not drift(TABLE, [step(10, draft=0.8)] * 10).alarm


def test_both_off_alike_moves_no_budget_and_is_said_so() -> None:
    found = drift(TABLE, [step(10, verify=2.0, draft=2.1)] * 10)
    assert found.alarm
    assert "both medians are off alike" in found.sentence
    assert "budgets are not the best" not in found.sentence
    other = drift(TABLE, [step(10, verify=2.0, draft=1.0)] * 10)
    assert "budgets are not the best ones" in other.sentence


def test_prefills_and_steps_without_drafts_do_not_count() -> None:
    steps = [step(500, verify=9.0, draft=9.0, phase="prefill")] * 20
    assert drift(TABLE, steps).verify.ratio is None
    assert drift(TABLE, steps).sentence == (
        "no decode step yet: nothing to compare the cost table with"
    )
    steps += [step(2, drafted=0, draft=7.0)] * 9 + [step(6)] * 3
    found = drift(TABLE, steps)
    assert len(found.verify.ms) == 12
    assert found.draft.sizes.tolist() == [2, 2, 2]
    assert found.draft.ratio == pytest.approx(1)
    assert not found.alarm
    plain = drift(TABLE, [step(2, drafted=0)] * 9)
    assert plain.draft.ratio is None
    assert "drafting" not in plain.sentence


def test_few_steps_raise_no_alarm() -> None:
    few = [step(10, verify=3.0)] * (FEWEST - 1)
    found = drift(TABLE, few)
    assert found.verify.ratio == pytest.approx(3)
    assert not found.alarm
    assert f"it takes {FEWEST} steps to judge, and here are {FEWEST - 1}" in found.sentence
    assert drift(TABLE, [*few, few[0]]).alarm


def test_passes_larger_than_the_profile_are_named() -> None:
    found = drift(TABLE, [step(100, 9)] * 9 + [step(64, 8)] * 3)
    assert (found.verify.beyond, found.draft.beyond) == (9, 9)
    assert "most of verification and drafting is larger than what was profiled" in found.sentence
    assert drift(TABLE, [step(100, 9)] * 5 + [step(64, 8)] * 6).verify.beyond == 5
    assert "larger" not in drift(TABLE, [step(100, 9)] * 5 + [step(64, 8)] * 6).sentence


def test_a_table_that_has_drafts_for_nothing() -> None:
    free = CostTable(draft=[(1, 0.0)], verify=[(1, 2.1), (64, 8.4)])
    found = drift(free, [step(10)] * 10)
    assert found.draft.ratio == inf
    assert found.draft.drifted
    assert "drafting at ∞ ×" in found.sentence
    assert drift(free, [step(10, draft=0.0)] * 10).draft.ratio == 1


def test_medians_by_size() -> None:
    steps = [step(rows, verify=f) for rows, f in ((8, 1.0), (4, 3.0), (8, 2.0), (8, 9.0), (4, 1.0))]
    by = drift(TABLE, steps).verify.by_size()
    assert [(size, count) for size, _, count in by] == [(4, 2), (8, 3)]
    assert [ms for _, ms, _ in by] == pytest.approx([2 * 2.4, 2 * 2.8])
    assert drift(TABLE, []).verify.by_size() == ()


def test_a_drift_of_no_table() -> None:
    with pytest.raises(DraftError, match="a drift needs a CostTable"):
        drift(None, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, -3, 1.5, True])
def test_a_window_of_no_steps(window: int) -> None:
    with pytest.raises(DraftError, match="a window of at least 1 pass"):
        drift(TABLE, [], window=window)


@pytest.mark.parametrize("limit", [0, -0.1, float("nan"), inf, "a", True, 10**400])
def test_a_limit_that_is_none(limit: float) -> None:
    with pytest.raises(DraftError, match="a number above 0"):
        drift(TABLE, [], limit=limit)
