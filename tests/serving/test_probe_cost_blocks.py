"""How ``benchmarks/serving_probe_cost.py`` measures: which passes count, and what follows."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serving.probe_drive import ask as ask  # fixtures
from serving.probe_drive import drive, flush, make_runner, recorded, scheduled
from serving.probe_drive import stand_in as stand_in
from workbench.serving import probe
from workbench.serving.probe import fit

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving_probe_cost.py"


@pytest.fixture(scope="module")
def cost() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serving_probe_cost", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["serving_probe_cost"] = made
    spec.loader.exec_module(made)
    return made


def test_passes_in_which_a_request_came_and_their_neighbours_are_left_out(cost: Any) -> None:
    seconds = [1.0] * 30
    seconds[9] = seconds[10] = seconds[11] = 50.0
    starts = np.cumsum([0.0, *seconds]).tolist()
    clean = [True] * 32  # of the pass before the first, too
    clean[11] = False  # the eleventh pass, number 10
    assert cost.block_of(starts, clean) == (1.0, 1.0, 27)
    assert cost.block_of(starts, [True] * 32) == (177 / 30, 1.0, 30)
    with pytest.raises(ValueError, match="0 of 30 passes"):
        cost.block_of(starts, [False] * 32)


def blocks(cost: Any, share: float, noise: float, count: int, seed: int) -> list[Any]:
    """Sets with a drift of 10 % that both meet, and a few blocks with a pause in them."""
    rng = np.random.default_rng(seed)
    found = []
    for n in range(count):
        base = 0.006 * (1 + 0.1 * np.sin(n / 5))
        made: dict[str, list[Any]] = {"on": [], "off": []}
        for name, each in made.items():
            for _ in range(2):
                typical = base * (1 + share * (name == "on")) * (1 + noise * rng.standard_normal())
                each.append(cost.Block(typical * (1.3 if rng.random() < 0.02 else 1), typical, 60))
        found.append(made)
    return found


@pytest.mark.parametrize("share", [0.0, 0.01, 0.04])
def test_a_share_is_found_within_three_thousandths(cost: Any, share: float) -> None:
    found = cost.summary(blocks(cost, share, 0.01, 90, seed=3))
    medians, means = found["median"], found["mean"]
    low, high = medians["cost_share"]["interval"]
    assert low < share < high
    assert high - low < 0.006
    assert abs(medians["cost_share"]["share"] - share) < 0.003
    assert abs(means["cost_share"]["typical"] - share) < 0.004  # whatever the pauses do
    assert abs(medians["control_off"]["share"]) < 0.005
    assert medians["extra_us"] == pytest.approx(6000 * share, abs=20)


def test_intervals_hold_the_truth_as_often_as_they_say(
    cost: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "RESAMPLES", 500)
    rng = np.random.default_rng(0)
    held = {"interval": 0, "typical_interval": 0}
    for seed in range(100):
        found = cost.estimate(0.008 + 0.01 * rng.standard_normal(80), seed)
        for name in held:
            low, high = found[name]
            held[name] += low < 0.008 < high
    assert all(88 <= count <= 99 for count in held.values()), held


def test_blocks_of_an_engine_that_is_slower_with_the_probe(cost: Any) -> None:
    """A clock of its own: passes of 6 ms, 2 % more while it is on, 50 % in what is left out."""

    class Engine:
        def __init__(self) -> None:
            self.starts: list[float] = []
            self.clean: list[bool] = []
            self.now, self.on, self.since = 0.0, False, 0

        def advance(self) -> None:
            self.starts.append(self.now)
            self.clean.append(len(self.starts) % 40 != 0)
            late = self.since < cost.SETTLE
            self.now += 0.006 * (1 + 0.02 * self.on + 0.5 * late)
            self.since += 1

    engine, order = Engine(), []

    def switch(on: bool) -> None:
        engine.on, engine.since = on, 0
        order.append(on)

    engine.advance()
    sets, lost = cost.measure(engine, switch, time.monotonic(), seed=1)
    assert (len(sets), lost, len(order)) == (3, [], 12)
    assert all(sum(order[i : i + 4]) == 2 for i in (0, 4, 8))
    found = cost.summary(sets)
    assert found["mean"]["cost_share"]["share"] == pytest.approx(0.02, abs=1e-9)
    assert found["median"]["cost_share"]["share"] == pytest.approx(0.02, abs=1e-9)
    assert found["mean"]["control_off"]["share"] == pytest.approx(0, abs=1e-9)


class Driven:
    """The stand-in engine, full, as ``serving_probe.Engine`` is."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.clean: list[bool] = []
        self.runner = make_runner(requests=8, drafts=7)
        drive(self.runner, 3, 0, full=True)
        self.names = list(self.runner.req_states.req_id_to_index)

    def advance(self) -> None:
        self.starts.append(time.perf_counter())
        self.clean.append(True)
        drafts = {name: [-1] * 7 for name in self.names}
        self.runner.execute_model(scheduled(dict.fromkeys(self.names, 8), drafts))
        self.runner.sample_tokens(None)


def test_switching_and_timed_hooks_leave_a_whole_recording(
    cost: Any, ask: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    ask(path)
    engine = Driven()
    made = probe.active()
    assert made is not None
    counts = {True: 0, False: 0}

    def switch(on: bool) -> None:
        (made.resume if on else made.pause)()
        counts[on] += 1

    before = made.passes
    sets, lost = cost.measure(engine, switch, time.monotonic())
    assert (len(sets), lost) == (3, [])
    each = cost.SETTLE + cost.PASSES
    assert each * 6 <= made.passes - before <= (each + 1) * 6
    classes = [fit.class_of(of) for of in (fit.GPU_RUNNER, fit.MANAGER, fit.ESTIMATOR)]
    found = cost.hooks(engine, made, tuple(classes), passes=40)
    assert set(found["us"]) == set(cost.HOOKS)
    assert all(0 < us < 5000 for us in found["us"].values())
    assert found["sum_us"] == pytest.approx(sum(found["us"].values()))
    assert 40 <= found["passes"] <= 52
    assert made.on
    assert "_begin" not in vars(made)  # untimed again
    passes = made.passes
    engine.advance()
    assert made.passes == passes + 1
    assert cost.writer_seconds(made) is None or cost.writer_seconds(made) >= 0
    assert cost.calls(made) == cost.device(made) == {}  # there is no device
    flush(engine.runner)
    run = recorded(path)
    assert run.tables is not None
    assert (run.inconsistent, run.trace.skipped) == (0, 0)
    assert len(run.trace.steps) + run.dropped == made.passes
    truth = engine.runner.truth
    assert len(truth) > made.passes  # those without the probe
    assert run.trace.steps[-1].rows == truth[-1]["rows"]
    assert all(int(np.argmax(s.objective)) == s.budget for s in run.trace.steps if s.policy)
    assert SimpleNamespace(**run.trace.header).policy == "vllm adaptive"
