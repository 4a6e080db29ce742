"""The engine never notices the probe: not its hooks, not its writer, not its errors."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.probe_drive import (
    HOOKS,
    STAND_IN,
    drive,
    flush,
    forget_vllm,
    make_runner,
    recorded,
    run_pass,
    scheduled,
    untouched,
    wait_for,
)
from serving.probe_drive import ask as ask  # fixtures
from serving.probe_drive import stand_in as stand_in
from workbench.serving import probe
from workbench.serving.probe import feed, hooks, slots
from workbench.serving.probe_read import read_probe


def outcome(seed: int, passes: int = 50, kept: list[Any] | None = None) -> Any:
    """What an engine did, and what it gave; ``kept`` gets its runner."""
    runner = make_runner(seed=seed)
    if kept is not None:
        kept.append(runner)
    outputs = drive(runner, passes, seed)
    return runner.truth, [
        (o.sampled_token_ids.tolist(), o.num_sampled_tokens_np.tolist())
        for o in outputs
        if o.copy_event.query()
    ]


def test_results_are_the_same_with_and_without(
    ask: Callable[[Path], None], stand_in: None, tmp_path: Path
) -> None:
    plain = outcome(9)
    forget_vllm()
    ask(tmp_path / "run.jsonl")
    probed = outcome(9)
    made = probe.active()
    assert made is not None
    assert made.on
    assert made.passes == len(probed[0])
    assert probed == plain
    assert len(plain[1]) > 40


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_fails_turns_the_probe_off_and_nothing_else(
    ask: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, name: str,
) -> None:  # fmt: skip
    plain = outcome(9)
    forget_vllm()
    calls = []

    def broken(*_: object) -> None:
        calls.append(1)
        if len(calls) == 1 + 3 * (name != "_priced"):
            raise RuntimeError("a broken\nhook")

    original = getattr(hooks.Probe, name)

    def sometimes(self: Any, *given: Any) -> None:
        broken()
        original(self, *given)

    monkeypatch.setattr(hooks.Probe, name, sometimes)
    ask(tmp_path / "run.jsonl")
    with caplog.at_level(logging.WARNING, "vllm"):
        assert outcome(9) == plain
    assert len(caplog.messages) == 1
    assert "probe off" in caplog.messages[0]
    assert "a broken hook" in caplog.messages[0]
    assert untouched()
    assert len(calls) == 1 + 3 * (name != "_priced")
    made = probe.active()
    assert made is not None
    made.resume()  # not any more
    assert not made.on
    assert untouched()


def test_an_error_of_the_engines_own_passes_through(
    ask: Callable[[Path], None], tmp_path: Path
) -> None:
    ask(tmp_path / "run.jsonl")
    runner = make_runner()
    work = scheduled({"a": 3})
    del work.finished_req_ids
    with pytest.raises(AttributeError, match="finished_req_ids"):
        runner.execute_model(work)
    made = probe.active()
    assert made is not None
    assert made.on  # it was not the probe's
    run_pass(runner, scheduled({"a": 5}, new=[("a", 5)]))
    flush(runner)
    assert len(recorded(tmp_path / "run.jsonl").trace.steps) == 1


def test_pause_and_resume(ask: Callable[[Path], None], tmp_path: Path) -> None:
    ask(tmp_path / "run.jsonl")
    runner = make_runner()
    made = probe.active()
    assert made is not None
    run_pass(runner, scheduled({"a": 5}, new=[("a", 5)]))
    made.pause()
    assert untouched()
    run_pass(runner, scheduled({"a": 6}, {"a": [-1] * 5}))
    made.resume()
    run_pass(runner, scheduled({"a": 4}, {"a": [-1] * 3}))
    flush(runner)
    run = recorded(tmp_path / "run.jsonl")
    assert [len(s.requests[0].drafted) for s in run.trace.steps] == [0, 3]


def test_a_second_engine_in_the_process_is_not_mixed_in(
    ask: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    ask(path)
    drive(make_runner(), 10, 0)
    other = make_runner(requests=16)
    with caplog.at_level(logging.WARNING, "vllm"):
        drive(other, 10, 1)
    assert len(caplog.messages) == 1
    assert "a second engine" in caplog.messages[0]
    made = probe.active()
    assert made is not None
    assert made._feed is not None
    assert made._feed.child.wait(10) == 0
    run = read_probe(path)
    assert len(run.trace.steps) > 3
    assert run.ended is not None
    assert "a second engine" in run.ended


# -- the writer -------------------------------------------------------------------------------


def test_a_full_disk_ends_the_recording_at_a_whole_line(
    ask: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    plain = outcome(9)
    forget_vllm()
    limit = ("import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
             "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); ")  # fmt: skip
    monkeypatch.setattr(feed, "_CODE", limit + feed._CODE)
    path = tmp_path / "run.jsonl"
    ask(path)
    with caplog.at_level(logging.WARNING, "vllm"):
        kept: list[Any] = []
        assert outcome(9, kept=kept) == plain
        made = probe.active()
        assert made is not None
        wait_for(lambda: bool(drive(kept[0], 5, 1) and made.why_off))
    assert len(caplog.messages) == 1
    assert "run.jsonl cannot be written (File too large)" in caplog.messages[0]
    assert untouched()
    data = path.read_bytes()
    assert len(data) <= 20000
    assert data.endswith(b"\n")
    run = read_probe(path)
    assert len(run.trace.steps) > 5
    assert run.trace.skipped == 0
    assert run.ended is None


def test_a_writer_that_stalls_costs_passes_and_no_time(
    ask: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(feed, "_CODE", "import time; time.sleep(60)")
    monkeypatch.setattr(feed, "PATIENCE", 0.1)
    monkeypatch.setattr(hooks, "PATIENCE", 0.1)
    monkeypatch.setattr(hooks, "make_slots", slots.make_slots)
    ask(tmp_path / "run.jsonl")
    runner = make_runner(requests=64, drafts=7, adaptive=False)
    drive(runner, 30, 0, full=True)
    made = probe.active()
    assert made is not None
    began = time.monotonic()
    drive(runner, 200, 0, full=True)
    assert time.monotonic() - began < 20
    assert made.on
    # A pipe and 64 slots are all there is.
    assert made._feed is not None
    waiting = len(made._pending) + len(made._free) + len(made._feed._queue)
    assert waiting <= 64
    assert made.dropped > 100
    assert made.passes == 230


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_writer_that_dies(
    ask: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture, how: int
) -> None:
    path = tmp_path / "run.jsonl"
    ask(path)
    runner = make_runner(seed=2)
    drive(runner, 20, 2)
    made = probe.active()
    assert made is not None
    assert made._feed is not None
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") > 3)
    with caplog.at_level(logging.WARNING, "vllm"):
        made._feed.child.send_signal(how)
        wait_for(lambda: bool(drive(runner, 5, 3) and made.why_off))
        drive(runner, 20, 4)
    assert len(caplog.messages) == 1
    assert f"the writer ended with -{how}" in caplog.messages[0]
    assert untouched()
    assert len(read_probe(path).trace.steps) > 0


def test_an_engine_that_dies_leaves_a_whole_recording_and_no_orphan(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    code = (
        "import os, sys, signal\n"
        f"sys.path[:0] = [{str(STAND_IN)!r}, {str(STAND_IN.parent.parent)!r}]\n"
        "import vllm\n"
        "from workbench.serving import probe\n"
        "probe.register()\n"
        "from serving.probe_drive import *\n"
        "drive(make_runner(), 30, 1)\n"
        "print(probe.active()._feed.child.pid, flush=True)\n"
        "import time; time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"BEAM_PROBE": str(path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL, child.stderr
    writer = int(child.stdout)

    def gone() -> bool:
        try:
            os.kill(writer, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{writer}/stat")
        return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z"

    wait_for(gone)
    run = read_probe(path)
    assert run.ended == "the engine ended without a word"
    assert len(run.trace.steps) > 10


def test_a_file_that_exists_is_left_alone(
    ask: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("somebody's\n")
    ask(path)
    runner = make_runner()
    made = probe.active()
    assert made is not None
    with caplog.at_level(logging.WARNING, "vllm"):
        wait_for(lambda: bool(drive(runner, 5, 3) and made.why_off))
    assert len(caplog.messages) == 1
    assert "cannot be made (File exists)" in caplog.messages[0]
    assert path.read_text() == "somebody's\n"
