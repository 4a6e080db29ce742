"""A recording is a run like any other: metrics, hindsight, replay, and every adaptive view."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from serving.probe_drive import ask as ask  # fixtures
from serving.probe_drive import drive, make_runner, recorded, wait_for
from serving.probe_drive import stand_in as stand_in
from workbench import views
from workbench.serving import probe
from workbench.serving.probe_read import ProbeRun, follow
from workbench.spec.adaptive import Adaptive, Fixed, NoDrafts
from workbench.spec.calibration import evidence
from workbench.spec.hindsight import hindsight
from workbench.spec.pace import pace
from workbench.spec.recording import Recording
from workbench.spec.replay import replay


@pytest.fixture
def run(ask: Callable[[Path], None], tmp_path: Path) -> ProbeRun:
    ask(tmp_path / "run.jsonl")
    drive(make_runner(seed=3), 90, 3)
    return recorded(tmp_path / "run.jsonl")


def test_views_take_it(run: ProbeRun) -> None:
    assert run.tables is not None
    step = next(s for s in run.trace.steps if s.policy and 0 < s.budget < 20)
    source = "recorded"
    seen = [
        views.objective_curve(step, run.tables, source=source),
        views.survival_map(step, source=source),
        views.decisions_over_time(run.trace.steps, source=source),
        views.reliability_diagram(run.trace.steps, source=source),
        views.cost_curves(run.tables, run.trace.steps, source=source),
    ]
    assert all(view.text for view in seen)
    assert f"step {step.index}" in seen[0].text
    assert f"{step.budget} of {sum(len(r.drafted) for r in step.requests)}" in seen[0].text


def test_figures_of_it(run: ProbeRun) -> None:
    decoded = [s for s in run.trace.steps if s.phase == "decode"]
    figures = pace(run.trace.steps)
    assert figures.tokens == sum(len(r.token_ids) for s in decoded for r in s.requests)
    assert figures.admitted.tolist() == [s.budget for s in decoded]
    assert figures.deciding > 0
    assert run.tables is not None
    best = [hindsight(s, run.tables) for s in decoded if s.policy]
    assert all(0 < b.share <= 1 + 1e-9 for b in best)
    predicted, true = evidence(decoded)
    slots = [min(r.accepted + 1, r.admitted) for s in decoded for r in s.requests if r.expected]
    assert len(predicted) == sum(slots)
    assert int(np.count_nonzero(true)) == sum(
        r.accepted for s in decoded for r in s.requests if r.expected
    )


def test_it_is_an_estimated_source_of_replays(run: ProbeRun) -> None:
    assert run.tables is not None
    record = run.recording()
    assert not record.exact
    assert record.confidences is not None
    for policy in (Adaptive(run.tables), Fixed(), NoDrafts()):
        result = replay(record, policy, run.tables, concurrency=8, estimator=None)
        assert result.tokens > 0
    plain = Recording.of(run.trace)  # without the engine's confidences
    assert plain.confidences is None
    assert replay(plain, Fixed(2), run.tables).tokens > 0


def test_followed_at_a_socket_while_the_engine_runs(
    ask: Callable[[Path | str], None], tmp_path: Path
) -> None:
    path = tmp_path / "s"
    if len(str(path)) > 100:
        pytest.skip("the temporary folder's name is too long for a socket")
    ask(f"unix:{path}")
    runner = make_runner(seed=8)
    drive(runner, 10, 8)
    made = probe.active()
    assert made is not None
    wait_for(path.is_socket)
    with follow(f"unix:{path}", patience=10) as steps:
        came = []
        while len(came) < 5:  # what was written before is gone; from now on all of it comes
            drive(runner, 10, len(runner.truth))
            came.append(next(steps))
        assert steps.header["model"] == "a-model"
        assert steps.tables is not None
        assert steps.passed is not None
        assert steps.passed.number >= came[-1].index  # not each pass is a step
        made.close()
        rest = list(steps)
        assert steps.ended == "the engine ended"
        indexes = [s.index for s in came + rest]
        assert indexes == list(range(indexes[0], indexes[0] + len(indexes)))
        assert steps.missed == 0
    assert not path.exists()
