"""What a pass costs the engine's thread, counted: calls into torch, events, threads woken."""

from __future__ import annotations

import atexit
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

from serving.probe_drive import stand_in as stand_in  # fixtures
from serving.test_probe_parts import Sink, idle_engine
from workbench.serving.probe import feed, hooks
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

    def record(self) -> None:
        self.asked = 0
        self.counts["record"] = self.counts.get("record", 0) + 1

    def query(self) -> bool:
        self.asked += 1
        self.counts["query"] = self.counts.get("query", 0) + 1
        return self.asked > 1

    def elapsed_time(self, other: CountedEvent) -> float:
        raise AssertionError("times are read in the feed's thread")


def slots_as_on_a_gpu(rows: int, drafts: int, device: Any) -> list[Slot]:
    """With the staging buffer and the events of a GPU, on the host."""
    gather = Gather(rows, drafts, device)
    return [
        Slot(
            torch.zeros(gather.sizes[-1], dtype=torch.uint8),
            torch.zeros(1 + drafts),
            gather,
            (CountedEvent(), CountedEvent(), CountedEvent()),
        )
        for _ in range(8)
    ]


def test_a_pass_is_a_handful_of_calls(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "Feed", Sink)
    monkeypatch.setattr(hooks, "make_slots", slots_as_on_a_gpu)
    monkeypatch.setattr(CountedEvent, "counts", {})
    made = hooks.Probe("/nowhere", "0.33.0")
    runner, manager, estimator = idle_engine(16, 7)
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
    assert PASSES <= CountedEvent.counts["query"] <= 2 * PASSES


class Word:
    """A small item."""

    def data(self) -> bytes:
        return b"word\n"

    def release(self) -> None: ...


def test_the_feeds_thread_is_seldom_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "words"
    code = f"import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, open({str(path)!r}, 'wb'))"
    monkeypatch.setattr(feed, "_CODE", code)
    failed: list[str] = []
    made = feed.Feed("/nowhere", failed.append)
    for _ in range(200):
        made.put(Word())
        time.sleep(0.001)
    woken = made.wakes
    time.sleep(5 * feed.PERIOD)
    made.put(Word())  # after a rest it is woken again
    made.close(lambda: b"end\n", 10.0)
    assert 1 <= woken <= 20
    assert made.wakes >= woken
    assert path.read_bytes() == b"word\n" * 201 + b"end\n"
    assert failed == []
