"""Sweeps over the concurrency: against single simulations and ratios computed here."""

from __future__ import annotations

import json

import pytest

from workbench.errors import DraftError
from workbench.spec.adaptive import Adaptive, Fixed, NoDrafts, Oracle
from workbench.spec.cost_table import CostTable
from workbench.spec.published import published
from workbench.spec.recording import Recording
from workbench.spec.simulate import compare, default_requests, parametric, simulate
from workbench.spec.sweep import CONCURRENCIES, SweepRow, sweep

TABLE = CostTable(draft=[(1, 0.4), (64, 2.0)], verify=[(1, 3.0), (8, 3.5), (512, 40.0)])


@pytest.fixture(scope="module")
def source() -> Recording:
    return parametric([0.9, 0.8, 0.7, 0.6], requests=24, tokens=24, seed=3)


@pytest.fixture(scope="module")
def rows(source: Recording) -> tuple[SweepRow, ...]:
    return sweep(source, TABLE, (2, 16), requests=20, seed=5)


def test_rows_are_the_simulations_of_each_policy(
    source: Recording, rows: tuple[SweepRow, ...]
) -> None:
    assert [(row.concurrency, row.requests) for row in rows] == [(2, 20), (16, 20)]
    policies = (NoDrafts(), Fixed(), Adaptive(TABLE), Oracle(TABLE))
    for row in rows:
        assert list(row.policies) == ["none", "fixed", "adaptive", "oracle"]
        for policy in policies:
            alone = simulate(
                source, policy, TABLE, concurrency=row.concurrency, requests=20,
                drafting=policy.name != "none", seed=5,
            )  # fmt: skip
            one = row.policies[policy.name]
            assert one.policy == policy.name
            for name in ("tokens_per_second", "tpot_p50_ms", "tpot_p99_ms", "acceptance_length",
                         "drafted", "admitted", "accepted", "wasted", "missed", "estimated",
                         "failed_steps"):  # fmt: skip
                assert getattr(one, name) == getattr(alone, name), name
            assert row.label == alone.label


def test_changes_are_against_fixed(rows: tuple[SweepRow, ...]) -> None:
    for row in rows:
        assert row.baseline == "fixed"
        fixed, adaptive, oracle = (row.policies[n] for n in ("fixed", "adaptive", "oracle"))
        assert row.change("fixed") == 0
        assert row.change("adaptive") == pytest.approx(
            (adaptive.tokens_per_second - fixed.tokens_per_second) / fixed.tokens_per_second
        )
        assert row.change("adaptive", "tpot_p99_ms") == pytest.approx(
            (adaptive.tpot_p99_ms - fixed.tpot_p99_ms) / fixed.tpot_p99_ms
        )
        assert row.share_of_oracle("adaptive") == pytest.approx(
            (adaptive.tokens_per_second - fixed.tokens_per_second)
            / (oracle.tokens_per_second - fixed.tokens_per_second)
        )
        assert row.share_of_oracle("oracle") == 1
        assert row.share_of_oracle("fixed") == 0
        assert row.change("mine") is None
        assert row.share_of_oracle("mine") is None
        with pytest.raises(DraftError, match="none of tokens_per_second"):
            row.change("adaptive", "speed")  # type: ignore[arg-type]
    # Many rows are dear by this table: the oracle gains more, and plain decoding loses less.
    few, many = rows
    assert (many.change("oracle") or 0) > (few.change("oracle") or 0) > 0
    assert (few.change("none") or 0) < (many.change("none") or 0)


def test_rows_of_other_policies(source: Recording) -> None:
    mine = simulate(source, Fixed(1), TABLE, concurrency=4, requests=12)
    less = simulate(source, Fixed(2), TABLE, concurrency=4, requests=12)
    row = SweepRow.of({"one": mine, "two": less})
    assert row.baseline == "one"
    assert row.change("two") == pytest.approx(less.tokens_per_second / mine.tokens_per_second - 1)
    assert row.share_of_oracle("two") is None
    # An oracle with nothing over fixed has nothing to share.
    assert SweepRow.of({"fixed": mine, "oracle": mine}).share_of_oracle("fixed") is None
    with pytest.raises(DraftError, match="at least one policy"):
        SweepRow.of({})
    other = simulate(source, Fixed(), TABLE, concurrency=8, requests=12)
    with pytest.raises(DraftError, match="12 requests at 4 and 12 requests at 8"):
        SweepRow.of({"one": mine, "other": other})


def test_progress_counts_all_policies(source: Recording) -> None:
    told: list[tuple[int, int]] = []
    sweep(source, TABLE, (1, 4, 2), requests=3, progress=lambda *at: told.append(at))
    assert told == [(n, 12) for n in range(1, 13)]


def test_defaults_and_mistakes(source: Recording) -> None:
    assert CONCURRENCIES == (1, 2, 4, 8, 16, 32, 64, 128)
    (row,) = sweep(source, TABLE, [100])
    assert row.requests == default_requests(100) == 1600
    assert sweep(source, TABLE, ()) == ()
    with pytest.raises(DraftError, match="each concurrency once"):
        sweep(source, TABLE, (4, 4))
    for wrong in ((0,), (4, 513), ([1],), ("x",), 5, None, "12"):
        with pytest.raises(DraftError, match="concurrenc"):
            sweep(source, TABLE, wrong, requests=3)  # type: ignore[arg-type]
    with pytest.raises(DraftError, match="draws from a Recording"):
        sweep(None, TABLE)  # type: ignore[arg-type]


def test_a_recording_without_scores_takes_the_drafters_own_confidences(source: Recording) -> None:
    from dataclasses import replace

    bare = replace(source, features=None)
    (row,) = sweep(bare, TABLE, (16,), requests=20, seed=5)
    alone = compare(bare, TABLE, concurrency=16, requests=20, estimator=None, seed=5)
    assert row.policies["adaptive"].admitted == alone["adaptive"].admitted


def test_rows_as_json(rows: tuple[SweepRow, ...]) -> None:
    data = json.loads(json.dumps(rows[0].to_dict(), allow_nan=False))
    assert data["concurrency"] == 2
    assert data["policies"]["adaptive"]["wasted"] == rows[0].policies["adaptive"].wasted
    assert set(data) == {"concurrency", "requests", "label", "policies"}


def test_the_published_figures_agree_with_each_other() -> None:
    found = published()
    assert found.concurrency == 128
    ratio = found.adaptive_tokens_per_second / found.fixed_tokens_per_second
    assert round(ratio - 1, 3) == found.tokens_per_second_change == 0.108
    assert found.tpot_p99_change == -0.09
    assert found.to_dict() == {
        "concurrency": 128,
        "fixed_tokens_per_second": 15012,
        "adaptive_tokens_per_second": 16632,
        "tokens_per_second_change": 0.108,
        "tpot_p99_change": -0.09,
    }
