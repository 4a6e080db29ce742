"""Simulation: its made-up recordings against their own odds, its batching against identities."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.errors import DraftError, WorkbenchError
from workbench.spec.acceptance import Estimator
from workbench.spec.adaptive import Adaptive, Fixed, NoDrafts, Oracle, Policy
from workbench.spec.cost_table import CostTable
from workbench.spec.recording import Recording
from workbench.spec.simulate import (
    card_source,
    compare,
    cost_table,
    cost_tables,
    default_requests,
    parametric,
    simulate,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RATES = (0.9, 0.8, 0.7, 0.55)
# A pass whose rows cost: trimming pays. And one where they are free: it cannot.
BUSY = CostTable(draft=((1, 0.1), (64, 1.0)), verify=((1, 1.0), (512, 512.0)), label="by the row")
FLAT = CostTable(draft=((1, 0.5),), verify=((1, 3.0),), label="flat")
POLICIES: list[Policy] = [Fixed(), Fixed(2), NoDrafts(), Adaptive(BUSY), Oracle(BUSY)]


@pytest.fixture(scope="module")
def source() -> Recording:
    return parametric(RATES, requests=300, tokens=60, seed=2)


# -- recordings made up ---------------------------------------------------------------------------


def test_slots_have_the_conditional_acceptance_asked_for(source: Recording) -> None:
    assert (source.requests, source.slots, source.exact) == (300, 4, True)
    for slot, rate in enumerate(RATES):
        reached = source.known >= slot
        assert (source.known[reached] > slot).mean() == pytest.approx(rate, abs=1e-3)


def test_features_tell_the_odds(source: Recording) -> None:
    """Newton's method on the verdicts finds the slope and intercept the features were made with."""
    made = parametric(RATES, requests=2000, tokens=40, slope=0.6, intercept=-0.5, seed=4)
    assert made.features is not None
    assert made.confidences is not None
    reached = made.known[:, None] >= np.arange(4)
    f = made.features[reached].astype(float)
    y = (made.known[:, None] > np.arange(4))[reached]
    slope, intercept = 1.0, 0.0
    for _ in range(30):
        p = 1 / (1 + np.exp(-(slope * f + intercept)))
        w, e = p * (1 - p), y - p
        a = np.array([[(w * f * f).sum(), (w * f).sum()], [(w * f).sum(), w.sum()]])
        d = np.linalg.solve(a, np.array([(e * f).sum(), e.sum()]))
        slope, intercept = slope + d[0], intercept + d[1]
    assert slope == pytest.approx(0.6, abs=0.02)
    assert intercept == pytest.approx(-0.5, abs=0.06)
    assert made.confidences[reached] == pytest.approx(1 / (1 + np.exp(0.5 - 0.6 * f)), abs=1e-5)


def test_a_token_is_as_hard_for_every_block_that_reaches_it(source: Recording) -> None:
    """What a block accepts, the block one position on accepts as well: slots before are easier."""
    known = source.known.reshape(300, 60)
    here, after = known[:, :-1], known[:, 1:]
    again = (after >= here - 1)[here > 1]
    assert again.mean() > 0.99
    shuffled = np.random.default_rng(0).permutation(after.ravel()).reshape(after.shape)
    assert (shuffled >= here - 1)[here > 1].mean() < 0.9


def test_without_spread_the_acceptance_length_is_the_textbook_s() -> None:
    made = parametric(RATES, requests=400, tokens=200, between=0, within=0, seed=6)
    length = 1 + np.cumprod(RATES).sum()
    result = simulate(made, Fixed(), FLAT, concurrency=1, requests=400, seed=1)
    # About 25,000 blocks of a standard deviation of 1.5, some of them drawn twice.
    assert result.acceptance_length == pytest.approx(length, abs=0.06)


def test_requests_differ_by_the_spread_between_them() -> None:
    same = parametric(RATES, requests=400, tokens=100, between=0, within=0, seed=6)
    apart = parametric(RATES, requests=400, tokens=100, between=2, within=0, seed=6)
    spread = [r.known.reshape(400, 100).mean(1).std() for r in (same, apart)]
    assert spread[1] > 4 * spread[0]


def test_the_model_card_s_drafter_accepts_about_what_the_card_says() -> None:
    card = Path(simulate.__code__.co_filename).parents[1] / "model/zoo/beam-tiny/dflash2"
    held_out = json.loads((card / "training.json").read_text("utf-8"))["held_out"]["code"]
    made = card_source(requests=400)
    assert made.slots == len(held_out["accuracy"])
    result = simulate(made, Fixed(), FLAT, concurrency=8, requests=400)
    assert result.acceptance_length == pytest.approx(held_out["acceptance_length"], rel=0.1)
    assert made.label.startswith("modelled: ")


# -- batching -------------------------------------------------------------------------------------


def test_concurrency_one_is_a_loop_by_hand(source: Recording) -> None:
    order = np.random.default_rng(9).integers(300, size=20)
    table, drafts = BUSY, 2
    clock, tokens, accepted, events, tpot = 0.0, 0, 0, 0, []
    for request in order:
        began, position = clock, 0
        while position < 60:
            admitted = min(drafts, 60 - position - 1)
            n = min(int(source.known[request * 60 + position]), admitted)
            clock += table.verify_ms(1 + admitted) + (table.draft_ms(1) if admitted else 0.0)
            accepted, events = accepted + n, events + (admitted > 0)
            tokens, position = tokens + n + 1, position + n + 1
        tpot.append((clock - began) / 60)
    result = simulate(source, Fixed(drafts), table, concurrency=1, requests=20, seed=9)
    assert (result.tokens, result.accepted, result.events) == (tokens, accepted, events)
    assert result.tokens_per_second == pytest.approx(1e3 * tokens / clock)
    assert result.acceptance_length == pytest.approx(1 + accepted / events)
    assert result.tpot_ms.tolist() == pytest.approx(tpot)
    assert result.tpot_p50_ms == pytest.approx(np.median(tpot))
    assert result.tpot_p99_ms == pytest.approx(np.percentile(tpot, 99))


@pytest.mark.parametrize("concurrency", [1, 7, 64, 512])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_identities(source: Recording, policy: Policy, concurrency: int) -> None:
    result = simulate(source, policy, BUSY, concurrency=concurrency, requests=90, seed=5)
    h = result.history
    places = min(concurrency, 90)
    assert result.tokens == 90 * 60 == h.tokens.sum()
    assert (h.tokens == h.accepted + h.requests - h.cut).all()
    assert (h.cut == 0).all(), "every request ends at its limit, which drafts respect"
    assert (h.drafted >= h.admitted).all()
    assert (h.admitted >= h.accepted).all()
    # Every place is taken until the last request has come, and then they only empty.
    assert h.requests[0] == places
    assert (np.diff(h.requests) <= 0).all()
    assert (h.requests == places).sum() >= (90 - places) * 60 / (places * 5)
    # Time in the system, summed by request and by step.
    assert (result.tpot_ms * 60).sum() == pytest.approx((h.requests * h.ms).sum())
    rows = h.requests + h.admitted
    drafting = np.where(h.drafted > 0, BUSY.draft_ms(h.requests), 0.0)
    assert h.ms == pytest.approx(BUSY.verify_ms(rows) + drafting)
    assert result.wasted == result.admitted - result.accepted


def test_the_same_seed_is_the_same_run_and_the_same_requests(source: Recording) -> None:
    asked: dict[str, Any] = {"concurrency": 16, "requests": 60}
    one, two, other = (
        simulate(source, Adaptive(BUSY), BUSY, seed=s, **asked).to_dict() for s in (3, 3, 4)
    )
    assert one == two
    assert one != other
    results = compare(source, BUSY, seed=3, **asked)
    assert results["adaptive"].to_dict() == one
    assert list(results) == ["none", "fixed", "adaptive", "oracle"]
    assert len({r.tokens for r in results.values()}) == 1


def test_where_rows_cost_adaptive_lies_between_fixed_and_the_oracle(source: Recording) -> None:
    results = compare(source, BUSY, concurrency=16, requests=200)
    fixed, adaptive, oracle = (
        results[name].tokens_per_second for name in ("fixed", "adaptive", "oracle")
    )
    assert 1.05 * fixed < adaptive < oracle
    assert results["adaptive"].acceptance_length < results["fixed"].acceptance_length
    assert results["oracle"].wasted == 0
    assert results["fixed"].missed == 0 < results["adaptive"].missed
    none = results["none"]
    assert none.tokens_per_second == pytest.approx(1e3)  # a row a millisecond, and no drafts
    assert (none.drafted, none.acceptance_length) == (0, 1.0)


def test_where_rows_are_free_nothing_is_trimmed(source: Recording) -> None:
    results = compare(source, FLAT, concurrency=16, requests=100)
    fixed, adaptive = results["fixed"], results["adaptive"]
    assert adaptive.history.admitted.tolist() == fixed.history.admitted.tolist()
    assert adaptive.tpot_p99_ms == fixed.tpot_p99_ms


def test_a_calibrated_estimator_comes_to_the_source_s_coefficients() -> None:
    made = parametric(RATES, requests=400, tokens=100, slope=0.8, intercept=0.1, seed=8)
    estimator = Estimator(4)
    simulate(made, Fixed(), FLAT, concurrency=32, requests=4000, estimator=estimator)
    assert len(estimator.history) > 10
    assert float(estimator.slope) == pytest.approx(0.8, abs=0.05)
    assert estimator.intercepts.tolist() == pytest.approx([0.1] * 4, abs=0.2)


def test_progress_is_told_after_each_policy(source: Recording) -> None:
    told: list[tuple[int, int]] = []
    compare(
        source, BUSY, concurrency=2, requests=2, progress=lambda done, of: told.append((done, of))
    )
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def seconds(steps: int) -> float:
    """CPU seconds of so many steps of 128 sequences under the adaptive policy, 7 drafts each."""
    table = cost_table("h200-rank").table
    made = card_source(tokens=256)
    requests = 128 + steps * 128 * 4 // 256
    began = time.process_time()
    result = simulate(made, Adaptive(table), table, concurrency=128, requests=requests)
    spent = time.process_time() - began
    assert (result.history.requests == 128).sum() >= 0.8 * steps
    return spent * steps / result.steps


def test_a_step_of_128_sequences_takes_well_under_a_millisecond() -> None:
    assert seconds(500) < 0.5


@pytest.mark.full
def test_ten_thousand_steps_of_128_sequences_take_seconds() -> None:
    """Three on one core is the aim; twice that leaves room for a busy machine."""
    assert seconds(10_000) < 6.0


# -- cost tables ----------------------------------------------------------------------------------


def test_the_rank_s_table_is_what_its_step_took() -> None:
    assert {"gb200-tp8", "h200-rank", "h200-vllm"} <= set(cost_tables())
    named = cost_table("h200-rank")
    rows = json.loads((RESULTS / "rank-load-h200.json").read_text("utf-8"))["verify"]
    took = {int(n): row["milliseconds"] for n, row in rows.items() if n.isdigit()}
    # One row takes the chain of one sequence, which is faster.
    took[1] = rows["1, one sequence's chain"]["milliseconds"]
    assert sorted(took) == [2**i for i in range(11)]
    assert {row["context"] for row in rows.values()} == {8192}
    for n, ms in took.items():
        assert named.table.verify_ms(n) == pytest.approx(ms, abs=6e-4)
    assert (named.draft, named.verify) == ("modelled", "recorded")
    assert named.table.draft == cost_table("h200-vllm").table.draft


def test_the_engine_s_table_is_what_was_recorded() -> None:
    named = cost_table("h200-vllm")
    recorded = {1: 4.47, 2: 5.33, 4: 7.26, 8: 11.1, 16: 16.1, 32: 23.9, 64: 31.9, 128: 36.2}
    for rows, ms in recorded.items():
        assert named.table.verify_ms(rows) == ms
    assert [named.table.verify_ms(rows) for rows in (3, 9, 65, 127)] == [7.26, 16.1, 36.2, 36.2]
    # Above, a line to a prefill of 16,384 tokens: about 52 ms at 1,024.
    line = 36.2 + (326.0 - 36.2) * (1024 - 128) / (16384 - 128)
    assert named.table.verify_ms(1024) == pytest.approx(line)
    assert (named.draft, named.verify) == ("modelled", "recorded up to 128 rows, modelled above")
    assert any("date was not recorded" in note for note in named.notes)
    assert "H200" in named.table.label
    # Drafting: 0.503 G BF16 weights of a rank at 31 % of the measured bandwidth, 8 rows a request.
    for requests in (1, 128):
        expected = 2 * 0.503e9 / 4.23e12 / (1.37 / 4.47) + 2 * 0.503e9 * 8 * requests / 780e12
        assert named.table.draft_ms(requests) == pytest.approx(1e3 * expected, rel=0.01)


def test_a_table_of_the_user_s_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(BUSY.to_dict()), "utf-8")
    named = cost_table(str(file))
    assert named.table == BUSY
    assert (named.draft, named.verify, named.notes) == ("recorded", "recorded", ())
    short = {"draft": [[1, 1]], "verify": [[1, 2]], "origins": {"verify": "measured"}}
    file.write_text(json.dumps(short), "utf-8")
    named = cost_table(str(file))
    assert (named.table.captured, named.table.label) == (0, str(file))
    assert (named.draft, named.verify) == ("recorded", "measured")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[]", "give an object"),
        ("{}", "'draft', which is missing"),
        ('{"draft": [], "verify": [[1, 2]]}', "draft curve is empty"),
        ('{"draft": [[1, 1]], "verify": [[2, 2], [1, 3]]}', "must rise"),
        ('{"draft": [[1, NaN]], "verify": [[2, 2]]}', "from 0 to 1,000,000,000, not nan"),
        ('{"draft": [[1, 1' + "0" * 5000 + ']], "verify": [[1, 1]]}', "digits"),
        ('{"draft": [[1, 1' + "0" * 400 + ']], "verify": [[1, 1]]}', "not 1000"),
        ("[" * 100_000, "not JSON"),
        ('{"draft": [[1, 1]], "verify": [[1, 1]], "origins": {"draft": "guessed"}}', "origins"),
        ('{"draft": [[1, 1]], "verify": [[1, 1]], "origins": 3}', "origins"),
        ('{"draft": [[1, 1]], "verify": [[1, 1]], "notes": "x"}', "notes"),
    ],
)
def test_a_file_that_is_no_cost_table(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text, "utf-8")
    with pytest.raises(DraftError) as caught:
        cost_table(str(file))
    assert says in str(caught.value)
    assert "wrong.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nope", "nope.json", "", "a\0b.json", "x" * 5000])
def test_a_table_that_is_not_there(name: str) -> None:
    with pytest.raises(WorkbenchError) as caught:
        cost_table(name)
    assert "h200-rank" in str(caught.value) or "cannot be read" in str(caught.value)


# -- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"concurrency": 0}, "concurrency must be a whole number from 1 to 512, not 0"),
        ({"concurrency": 513}, "from 1 to 512"),
        ({"concurrency": 2.0}, "concurrency"),
        ({"requests": 0}, "requests must be a whole number from 1 to 1000000"),
        ({"requests": 10**23}, "requests must be a whole number from 1 to 1000000"),
        ({"policy": Fixed}, "Fixed is its class; give Fixed"),
        ({"policy": None}, "NoneType lacks one"),
        ({"most_rows": "x"}, "most rows of a verification are 0 or more, not 'x'"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"source": "trace"}, "draws from a Recording"),
        ({"table": None}, "needs a CostTable"),
    ],
)
def test_wrong_input_is_one_sentence(source: Recording, change: dict[str, Any], says: str) -> None:
    asked: dict[str, Any] = {"source": source, "policy": Fixed(), "table": BUSY}
    asked |= {"concurrency": 2, "requests": 2} | change
    with pytest.raises(DraftError, match=says):
        simulate(asked.pop("source"), asked.pop("policy"), asked.pop("table"), **asked)


@pytest.mark.parametrize(
    "change",
    [
        {"acceptance": ()},
        {"acceptance": (0.5, 1.0)},
        {"acceptance": (0.5, float("nan"))},
        {"requests": 0},
        {"tokens": 0},
        {"between": -1.0},
        {"within": float("inf")},
        {"slope": 0.0},
        {"seed": -1},
        {"requests": 10**9, "tokens": 10**9},
        {"acceptance": "x"},
        {"acceptance": (0.5, "a")},
        {"between": "x"},
        {"within": 10**400},
        {"within": 1e308},
        {"slope": 1e-300},
        {"intercept": float("nan")},
    ],
)
def test_wrong_parameters(change: dict[str, Any]) -> None:
    with pytest.raises(DraftError):
        parametric(**{"acceptance": RATES, "requests": 2, "tokens": 3} | change)


def test_a_spread_beyond_what_a_probability_tells_apart_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = parametric(RATES, requests=2, tokens=30, within=100_000.0)
    assert made.confidences is not None
    assert ((made.confidences == 0) | (made.confidences == 1)).mean() > 0.9


def test_default_requests_show_steady_load() -> None:
    assert [default_requests(c) for c in (1, 16, 128, 512)] == [256, 256, 2048, 8192]
    with pytest.raises(DraftError):
        default_requests(0)
