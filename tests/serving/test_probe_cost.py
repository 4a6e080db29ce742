"""What a pass costs the engine's thread, counted: calls into torch, events, threads woken."""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

from serving.probe_drive import stand_in as stand_in  # fixtures
from serving.probe_drive import wait_for
from serving.test_probe_parts import Sink, idle_engine
from workbench.serving.probe import feed, hooks, passes
from workbench.serving.probe.frames import Frames
from workbench.serving.probe.slots import Gather, Slot

PASSES = 50


class Calls(TorchFunctionMode):
    """Counts what is asked of torch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class CountedEvent:
    """A CUDA event that is past when it is asked the second time."""

    counts: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        self.asked = 0

    def record(self, stream: object) -> None:
        assert stream == "the engine's", "an event that asks for the stream itself"
        self.asked = 0
        self.counts["record"] = self.counts.get("record", 0) + 1

    def query(self) -> bool:
        self.asked += 1
        self.counts["query"] = self.counts.get("query", 0) + 1
        return self.asked > 1

    def elapsed_time(self, other: CountedEvent) -> float:
        raise AssertionError("times are read in the feed's thread")


def stream_of() -> str:
    CountedEvent.counts["stream"] = CountedEvent.counts.get("stream", 0) + 1
    return "the engine's"


def slots_as_on_a_gpu(rows: int, drafts: int, device: Any) -> list[Slot]:
    """With the staging buffer and the events of a GPU, on the host."""
    gather = Gather(rows, drafts, device)
    return [
        Slot(
            torch.zeros(gather.sizes[-1], dtype=torch.uint8),
            torch.zeros(1 + drafts),
            gather,
            (CountedEvent(), CountedEvent(), CountedEvent()),
            stream_of,
        )
        for _ in range(8)
    ]


@pytest.mark.parametrize("known", [True, False])
def test_a_pass_is_a_handful_of_calls(
    known: bool, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``known``: the engine keeps its stream, so nobody asks for it."""
    monkeypatch.setattr(hooks, "Feed", Sink)
    monkeypatch.setattr(hooks, "make_slots", slots_as_on_a_gpu)
    monkeypatch.setattr(CountedEvent, "counts", {})
    made = hooks.Probe("/nowhere", "0.33.0")
    runner, manager, estimator = idle_engine(16, 7)
    if known:
        runner.main_stream = "the engine's"
    made.install(type(runner), type(manager), type(estimator))
    manager.set_cost_curves([(1, 1.0)], [(1, 1.0)])
    atexit.unregister(made.close)
    work = SimpleNamespace(
        total_num_scheduled_tokens=48, num_scheduled_tokens={"r": 3}, scheduled_new_reqs=[]
    )

    def one_pass() -> None:
        runner.execute_model(work)
        manager.get_num_tokens()
        manager.reallocate_drafts()
        estimator.step()
        runner.sample_tokens(None)

    for _ in range(3):  # coefficients, and the engine's buffers looked at
        one_pass()
    CountedEvent.counts.clear()
    with Calls() as calls:
        for _ in range(PASSES):
            one_pass()
    made.off("done", quiet=True)
    assert made.passes == PASSES + 3
    assert sorted(calls.names) == ["cat"] * PASSES + ["copy_"] * PASSES
    assert CountedEvent.counts["record"] == 3 * PASSES
    assert CountedEvent.counts.get("stream", 0) == (0 if known else PASSES)
    assert PASSES <= CountedEvent.counts["query"] <= 2 * PASSES


def test_a_streams_property_of_the_engine_is_not_made_by_the_probe(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine makes it when it needs it; until then torch is asked, and then no more."""
    monkeypatch.setattr(hooks, "Feed", Sink)
    monkeypatch.setattr(hooks, "make_slots", slots_as_on_a_gpu)
    monkeypatch.setattr(CountedEvent, "counts", {})
    made = hooks.Probe("/nowhere", "0.33.0")
    runner, manager, estimator = idle_engine(16, 7)

    def looked_at(_: object) -> None:
        raise AssertionError("the probe had the engine look")

    type(runner).main_stream = functools.cached_property(looked_at)
    type(runner).main_stream.__set_name__(type(runner), "main_stream")
    made.install(type(runner), type(manager), type(estimator))
    manager.set_cost_curves([(1, 1.0)], [(1, 1.0)])
    atexit.unregister(made.close)
    work = SimpleNamespace(
        total_num_scheduled_tokens=48, num_scheduled_tokens={"r": 3}, scheduled_new_reqs=[]
    )
    for n in range(6):
        if n == 4:
            vars(runner)["main_stream"] = "the engine's"
        runner.execute_model(work)
        runner.sample_tokens(None)
    made.off("done", quiet=True)
    assert made.passes == 6
    assert CountedEvent.counts["stream"] == 4


def test_json_is_made_when_it_is_another_one(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and layout; what each pass has of its own is not in it, and arrives exactly."""
    encoded: list[Any] = []
    dumped = passes.dumped
    monkeypatch.setattr(passes, "dumped", lambda v: encoded.append(v) or dumped(v))
    monkeypatch.setattr(hooks, "Feed", Sink)
    made = hooks.Probe("/nowhere", "0.33.0")
    runner, manager, estimator = idle_engine(16, 7)
    made.install(type(runner), type(manager), type(estimator))
    manager.set_cost_curves([(1, 1.0)], [(1, 1.0)])
    atexit.unregister(made.close)
    sink: Any = made._feed
    sink.keep = True
    work = SimpleNamespace(
        total_num_scheduled_tokens=48, num_scheduled_tokens={"r": 3}, scheduled_new_reqs=[]
    )
    batch, told = runner.execute_model_state.input_batch, []
    budgets = [n % 33 for n in range(60)]
    for n, budget in enumerate(budgets):
        if n in (20, 40):
            batch.req_ids = [f"{n}-{name}" for name in batch.req_ids]
        if n == 30:
            estimator._steps_since_refit = 0
        runner.execute_model(work)
        type(manager)._batch_budget = ({}, {}, budget)
        manager.get_num_tokens()
        manager.reallocate_drafts()
        estimator.step()
        estimator._steps_since_refit = 1
        told.append((made._now.at, made._now.decide_seconds, list(batch.req_ids)))
        runner.sample_tokens(None)
    made._hand_on()
    made.off("done", quiet=True)
    got = [next(iter(Frames().feed(data)))[0] for data in sink.taken]
    assert [v["number"] for v in got] == list(range(60))
    assert [v["budget"] for v in got] == budgets
    assert [(v["at"], v["decide_seconds"], v["names"]) for v in got] == told
    assert [n for n, v in enumerate(got) if v["fitted"] is not None] == [0, 30]
    assert got[30]["fitted"] == 31  # steps
    assert all(type(v[name]) is int for v in got for name in ("number", "rows", "dropped"))
    assert all(v["seconds"][0] >= v["seconds"][1] > 0 for v in got)
    # Coefficients in the first and the 31st; names anew twice.
    assert len(encoded) == 6


class Word:
    """A small item."""

    def data(self) -> bytes:
        return b"word\n"

    def release(self) -> None: ...


def test_the_feeds_thread_is_woken_once_for_what_came_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "words"
    code = f"import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, open({str(path)!r}, 'wb'))"
    monkeypatch.setattr(feed, "_CODE", code)
    written: list[int] = []
    write = os.write

    def counted(pipe: int, data: Any) -> int:
        written.append(len(data))
        return write(pipe, data)

    monkeypatch.setattr(feed.os, "write", counted)
    failed: list[str] = []
    made = feed.Feed("/nowhere", failed.append)
    for count in range(1, 21):
        made.put([Word()] * 10)
        wait_for(lambda count=count: len(written) == count)
    assert made.wakes == 20
    assert written == [len(b"word\n" * 10)] * 20
    made.put([Word()] * 40)
    made.say(lambda: b"said\n")
    made.put([])
    made.close(lambda: b"end\n", 10.0)
    assert max(written) <= len(b"word\n" * (feed.MANY + 1))
    words = path.read_bytes().split()
    assert words.count(b"word") == 240
    assert words.count(b"said") == 1
    assert words[-1] == b"end"
    assert made.thread_seconds > 0
    assert failed == []


def test_passes_are_handed_on_several_at_a_time_and_soon(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of passes of 6 ms, nine or so together, and none waits longer than 70 ms."""
    clock, handed = [0.0], []

    class Noting(Sink):
        def put(self, items: list[Any]) -> None:
            handed.append([clock[0] - item.noted.at for item in items])
            super().put(items)

    monkeypatch.setattr(hooks, "Feed", Noting)
    monkeypatch.setattr(hooks, "perf_counter", lambda: clock[0])
    made = hooks.Probe("/nowhere", "0.33.0")
    runner, manager, estimator = idle_engine(16, 7)
    made.install(type(runner), type(manager), type(estimator))
    manager.set_cost_curves([(1, 1.0)], [(1, 1.0)])
    atexit.unregister(made.close)
    work = SimpleNamespace(
        total_num_scheduled_tokens=48, num_scheduled_tokens={"r": 3}, scheduled_new_reqs=[]
    )
    for _ in range(100):
        runner.execute_model(work)
        manager.get_num_tokens()
        manager.reallocate_drafts()
        clock[0] += 0.006
        estimator.step()
        runner.sample_tokens(None)
    assert sum(map(len, handed)) >= 95
    assert 9 <= len(handed) <= 13
    assert max(map(max, handed)) < 0.07
    before = len(handed)
    work.total_num_scheduled_tokens = 0  # the last request has ended: all that is left
    runner.execute_model(work)
    assert len(handed) == before + 1
    assert sum(map(len, handed)) == 100
    made.off("done", quiet=True)
