"""The recording of an engine that comes with the workbench is a run like any other."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from workbench import views
from workbench.serving.probe_read import ProbeRun, read_probe
from workbench.spec.adaptive import Fixed, NoDrafts, allocate, budget_of, survival
from workbench.spec.cost_table import CostTable
from workbench.spec.replay import replay

RECORDED = Path(str(files("workbench.serving"))) / "recorded" / "probe-h200.jsonl"
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "serving-probe-h200.json"
TABLES = CostTable(draft=((1, 0.5), (16, 0.6)), verify=((1, 3.0), (128, 4.0)), captured=128)


@pytest.fixture(scope="module")
def run() -> ProbeRun:
    return read_probe(RECORDED)


def test_it_is_whole_small_and_says_what_it_is(run: ProbeRun) -> None:
    data = RECORDED.read_bytes()
    assert len(data) <= 300_000
    assert data.endswith(b"\n")
    assert (run.trace.skipped, run.dropped, run.inconsistent) == (0, 0, 0)
    head = run.trace.header
    assert (head["source"], head["model"], head["drafter"]) == ("recorded", "beam-tiny", "dflash2")
    assert head["hardware"]["gpus"][0]["name"] == "NVIDIA H200"
    assert head["versions"]["vllm"] == "0.33.0"
    assert head["date"].startswith("2026-11-30")
    assert run.ended == "cut here, to be kept"


def test_its_steps_hold_together(run: ProbeRun) -> None:
    steps = run.trace.steps
    assert [s.index for s in steps] == list(range(len(steps)))
    where: dict[int, int] = {}
    spent: dict[int, int] = {}
    for step in steps:
        assert step.rows >= len(step.requests)
        for part in step.requests:
            # Each request goes on where it stood, and none runs past its 96 tokens.
            assert where.setdefault(part.request, part.position) == part.position
            assert spent.setdefault(part.request, 0) < 96
            where[part.request] += len(part.token_ids)
            spent[part.request] += len(part.token_ids)
            assert len(part.token_ids) == part.accepted + 1
            assert part.accepted <= part.admitted <= len(part.drafted)
    decided = [p.budget for p in run.passes if p.budget is not None]
    assert len(decided) >= 40
    assert 0 < np.mean(decided) < 112
    figures = run.trace.acceptance()
    assert figures.accepted == sum(p.accepted for s in steps for p in s.requests)
    assert figures.length_pooled == 1 + figures.accepted / figures.events


def test_views_and_replays_take_it(run: ProbeRun) -> None:
    step = next(
        s for s in run.trace.steps if 0 < s.budget < sum(len(r.drafted) for r in s.requests)
    )
    assert views.survival_map(step, source="recorded").text
    assert views.decisions_over_time(run.trace.steps, source="recorded").text
    record = run.recording()
    assert not record.exact
    given = replay(record, Fixed(), TABLES, concurrency=16, estimator=None)
    none = replay(record, NoDrafts(), TABLES, concurrency=16, estimator=None)
    assert given.tokens == none.tokens > 2000
    assert given.steps < none.steps


def test_the_results_beside_it() -> None:
    text = RESULTS.read_text("utf-8")
    assert not re.search(r'"/|/tmp|/home', text)
    found = json.loads(text)
    first = found["parts"]["adaptive"]["first"]
    # What the steps say, once what the engine throws away is left out, is what its counters say.
    assert first["recorded"]["events"] == first["counters"]["drafts"]
    assert first["recorded"]["accepted"] == first["counters"]["accepted_tokens"]
    assert first["recorded"]["drafted"] == first["counters"]["draft_tokens"]
    assert first["recorded"]["acceptance_length"] == first["acceptance_length"]


def test_our_arithmetic_gives_what_the_engine_decided(run: ProbeRun) -> None:
    """Budgets and admitted drafts of the real engine, from what it saw and the times it took."""
    assert run.tables is not None
    decided = 0
    for step, seen in zip(run.trace.steps, run.passes, strict=True):
        if not step.objective:  # no decision, or one that counted drafts of a request that ended
            continue
        requests = len(step.requests)
        drafted = np.array([len(part.drafted) for part in step.requests])
        stale, live = np.zeros((requests, 7)), np.zeros((requests, 7))
        for row, part in enumerate(step.requests):
            stale[row, : len(part.stale)] = part.stale
            live[row, : len(part.expected)] = part.expected
        plain = np.ones(requests, np.int64)
        plain[0] += seen.plain - requests  # their sum alone matters
        budget, _ = budget_of(
            survival(stale, drafted), drafted, np.arange(requests) < seen.sampling, plain,
            run.tables, run.most_rows,
        )  # fmt: skip
        assert budget == seen.budget
        admitted = allocate(survival(live, drafted), drafted, budget)
        assert admitted.tolist() == [part.admitted for part in step.requests]
        decided += 1
    assert decided >= 20
