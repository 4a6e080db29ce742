"""A recording followed while it is made: at a file, and at a socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ServingError, TraceError
from workbench.serving.probe import outlets
from workbench.serving.probe.lines import Line
from workbench.serving.probe_read import follow, read_probe
from workbench.spec.trace import Trace

HEAD = {
    "format": "beam-workbench-trace", "version": 1, "mode": "steps", "model": "m", "drafter": "d",
    "sampling": {}, "date": "2026-01-01T00:00:00+00:00", "recorded_by": "workbench probe",
    "engine": {"name": "vLLM", "version": "0.33.0"},
}  # fmt: skip
COSTS = {
    "kind": "engine", "what": "costs", "draft": [[1, 0.5], [8, 1.0]],
    "verify": [[8, 3.0], [16, 4.0]], "captured": 0, "most_rows": 640, "context": 8192,
}  # fmt: skip


def line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def step(index: int, **changed: Any) -> dict[str, Any]:
    return {
        "index": index, "phase": "decode", "rows": 3, "seconds": 0.004, "policy": "vllm adaptive",
        "reason": "2 of 3 drafts", "objective": [0.25, 0.5],
        "requests": [{
            "request": 0, "position": 9 + index, "drafted": [4, 5, 6], "admitted": 2, "accepted": 0,
            "expected": [0.899999976, 0.5, 0.25], "stale": [0.1, 0.2, 0.3], "token_ids": [7],
            "kinds": ["corrected"],
        }],
        "engine": {"pass": 2 * index, "at": 0.5 * index, "plain": 1, "sampling": 1, "budget": 2},
    } | changed  # fmt: skip


def fit(steps: int) -> dict[str, Any]:
    return {
        "kind": "engine", "what": "coefficients", "step": steps, "slope": 0.1,
        "intercepts": [0.2, -0.3, 0.4],
    }  # fmt: skip


ENGINE = step(0)["engine"]


def end(reason: str = "the engine ended") -> dict[str, Any]:
    return {"kind": "engine", "what": "end", "reason": reason}


def whole(path: Path, *lines: Any) -> Path:
    path.write_bytes(b"".join(line(each) for each in (HEAD, *lines)))
    return path


# -- reading ----------------------------------------------------------------------------------


def test_read_back(tmp_path: Path) -> None:
    lost = {"kind": "engine", "what": "dropped", "passes": 4}
    odd = {"kind": "engine", "what": "inconsistent", "number": 3, "reason": "…"}
    later = {"kind": "engine", "what": "weather", "of": "a later probe"}
    path = whole(
        tmp_path / "a.jsonl", COSTS, fit(1), step(0), lost, odd, later, step(1), fit(100), end()
    )
    run = read_probe(path)
    assert [s.index for s in run.trace.steps] == [0, 1]
    assert [p.number for p in run.passes] == [0, 2]
    assert [p.at for p in run.passes] == [0.0, 0.5]
    assert (run.passes[1].plain, run.passes[1].sampling, run.passes[1].budget) == (1, 1, 2)
    # What nine digits stand for in float32: 0.9 is 0.89999997615814208984375 there.
    assert run.trace.steps[0].requests[0].expected == (0.89999997615814208984375, 0.5, 0.25)
    assert run.trace.steps[0].requests[0].stale[0] == 0.100000001490116119384765625
    assert run.coefficients[0].slope == 0.100000001490116119384765625
    assert [c.step for c in run.coefficients] == [1, 100]
    assert run.tables is not None
    # No captured size: the engine pads to the next size it measured, everywhere.
    assert run.tables.verify_ms(9) == 4.0
    assert "context 8,192" in run.tables.label
    assert (run.most_rows, run.dropped, run.inconsistent, run.ended) == (
        640, 4, 1, "the engine ended",
    )  # fmt: skip
    assert "4 passes dropped" in str(run)
    plain = Trace.read(path)
    assert len(plain.steps) == 2
    assert plain.skipped == 7


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_cut_last_line_is_not_missed(tmp_path: Path, cut: int) -> None:
    path = whole(tmp_path / "a.jsonl", COSTS, step(0), step(1))
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    run = read_probe(path)
    assert len(run.trace.steps) == (2 if cut == 1 else 1)  # a line without its end is whole
    assert run.trace.skipped == (0 if cut == 1 else 1)
    assert run.ended is None


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "engine"},
        {"kind": "engine", "what": "costs", "draft": [], "verify": [], "captured": 0},
        COSTS | {"verify": [[8, -3.0]]},
        COSTS | {"most_rows": "many"},
        fit(1) | {"slope": "steep"},
        fit(1) | {"slope": 1e300},
        fit(1) | {"intercepts": None},
        {"kind": "engine", "what": "dropped", "passes": True},
        step(0, engine=None),
        {k: v for k, v in step(0).items() if k != "engine"},
        step(0, engine={"pass": 0, "at": "noon", "plain": 1, "sampling": 1}),
        step(0, rows=-1),
        step(0, requests=[{"request": 0}]),
        [1, 2],
        "text",
        *(step(0, engine=ENGINE | {name: -1}) for name in ENGINE),
        *(step(0, engine=ENGINE | {"at": at}) for at in ("1.5", "nan", True, None, [])),
        *(
            {"kind": "engine", "what": what, name: -5}
            for what, name in (("dropped", "passes"), ("missed", "lines"))
        ),
        COSTS | {"most_rows": -4},
        COSTS | {"context": 1.5},
        COSTS | {"context": "x"},
    ],
)
def test_a_damaged_line_is_skipped_and_counted(tmp_path: Path, bad: Any) -> None:
    run = read_probe(whole(tmp_path / "a.jsonl", bad, step(5)))
    assert run.trace.skipped == 1
    assert [s.index for s in run.trace.steps] == [5]
    assert run.tables is None
    assert run.coefficients == ()


def test_what_is_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line({k: v for k, v in HEAD.items() if k != "recorded_by"}))
    for read in (read_probe, lambda path: list(follow(path, patience=1.0))):
        with pytest.raises(TraceError, match="but not of the probe"):
            read(path)
    path.write_bytes(b"hello\n")
    with pytest.raises(TraceError, match="not a trace"):
        read_probe(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_probe(tmp_path / "absent")
    with pytest.raises(TraceError, match="not a regular file"):
        read_probe(tmp_path)


# -- a file -----------------------------------------------------------------------------------


def test_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    written: list[float] = []

    def write() -> None:
        time.sleep(0.15)  # it is not there yet
        with path.open("wb", buffering=0) as file:
            file.write(line(HEAD))
            for n in range(5):
                data = line(step(n))
                file.write(data[:50])  # half a line is none
                time.sleep(0.08)
                written.append(time.monotonic())
                file.write(data[50:])
            file.write(line(COSTS) + line(fit(7)) + line(end()))

    writer = threading.Thread(target=write)
    writer.start()
    came = []
    with follow(path, patience=20) as steps:
        for each in steps:
            came.append((each.index, time.monotonic()))
            assert steps.passed is not None
            assert steps.passed.number == 2 * each.index
    writer.join()
    assert [index for index, _ in came] == [0, 1, 2, 3, 4]
    assert all(0 <= at - wrote < 5 for (_, at), wrote in zip(came, written, strict=True))
    assert steps.header["model"] == "m"
    assert steps.ended == "the engine ended"
    assert steps.tables is not None
    assert [c.step for c in steps.coefficients] == [7]
    assert (steps.most_rows, steps.skipped, steps.missed, steps.dropped) == (640, 0, 0, 0)
    assert list(steps) == []  # it stays ended


def test_following_ends_by_patience_and_by_stop(tmp_path: Path) -> None:
    path = whole(tmp_path / "a.jsonl", step(0))
    began = time.monotonic()
    assert len(list(follow(path, patience=0.3))) == 1
    assert 0.3 <= time.monotonic() - began < 5
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    assert len(list(follow(path, stop=stop))) == 1
    assert stop.is_set()
    stop.set()
    assert list(follow(path, stop=stop)) == []
    assert list(follow(tmp_path / "absent", patience=0.1)) == []


def test_a_file_written_anew_and_a_file_that_is_none(tmp_path: Path) -> None:
    path = whole(tmp_path / "a.jsonl", step(0), step(1))
    steps = follow(path, patience=10)
    assert next(steps).index == 0
    assert next(steps).index == 1
    path.write_bytes(line(HEAD))
    with pytest.raises(TraceError, match="written anew"):
        next(steps)
    path.write_bytes(b"no header\n")
    with pytest.raises(TraceError, match="not a trace"):
        next(follow(path, patience=10))
    with pytest.raises(ServingError, match="not a regular file"):
        next(follow(tmp_path, patience=10))
    with pytest.raises(ServingError, match="patience"):
        follow(path, patience=-1)
    with pytest.raises(ServingError, match="followed at a file"):
        follow(3)  # type: ignore[arg-type]


def test_a_file_that_another_takes_the_place_of(tmp_path: Path) -> None:
    """As where recordings are rotated; one that was only removed may still be written."""
    path = whole(tmp_path / "a.jsonl", step(0))
    with path.open("ab", buffering=0) as writer:
        steps = follow(path, patience=5)
        assert next(steps).index == 0
        path.rename(tmp_path / "a.jsonl.1")
        writer.write(line(step(1)))
        assert next(steps).index == 1
        whole(path, step(2), step(3), step(4))
        with pytest.raises(TraceError, match="written anew"):
            next(steps)
    steps.close()


def test_what_a_file_says_is_safe_to_print(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    hostile = "\x1b[2J\n<b>\u202e"
    head = HEAD | {"date": hostile, "engine": {"version": [hostile]}}
    path.write_bytes(line(head) + line(COSTS) + line(step(0)) + line(end(hostile * 200)))
    run = read_probe(path)
    assert run.ended is not None
    assert run.ended.startswith("?[2J?<b>?")
    assert len(run.ended) == 400
    assert run.tables is not None
    assert run.tables.label.isprintable()
    assert all(text.isprintable() for text in str(run).split("\n"))


def test_a_long_line_takes_time_by_its_length(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(HEAD) + b'{"x":"' + b"y" * (12 << 20) + b'"}\n' + line(step(3)))
    began = time.process_time()
    assert [s.index for s in follow(path, patience=0.1)] == [3]
    assert time.process_time() - began < 1.0  # searched from its beginning each time: 2.5 s


@pytest.mark.parametrize("kind", ["file", "socket"])
def test_interrupted_and_gone_on_with(tmp_path: Path, kind: str) -> None:
    """Ctrl-C while it waits loses nothing."""
    path = whole(tmp_path / "a.jsonl", step(0))
    where, server = str(path), socket.socket(socket.AF_UNIX)
    if kind == "socket":
        server.bind(str(short_path(tmp_path)))
        server.listen()
        where = f"unix:{short_path(tmp_path)}"
    with server, follow(where, patience=5) as steps:
        accepted = server.accept()[0] if kind == "socket" else None

        def write(data: bytes) -> None:
            if accepted is not None:
                accepted.sendall(data)
            else:
                with path.open("ab") as file:
                    file.write(data)

        if accepted is not None:
            write(path.read_bytes())
        assert next(steps).index == 0
        cut = line(step(1))
        write(cut[:50])
        timer = threading.Timer(0.15, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(steps)
        write(cut[50:] + line(step(2))[:70])
        assert next(steps).index == 1
        if accepted is not None:
            accepted.close()  # in the middle of a line
            assert list(steps) == []
            assert steps.skipped == 0
            assert steps.ended is None


def test_a_line_without_an_end_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.spec import trace_lines

    monkeypatch.setattr(trace_lines, "LONGEST", 100_000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(line(HEAD) + b'{"x":"' + b"y" * 900_000 + b'"}\n' + line(step(3)))
    steps = follow(path, patience=0.2)
    assert [s.index for s in steps] == [3]
    assert steps.skipped == 1
    assert len(steps._held) < 200_000


# -- a socket ---------------------------------------------------------------------------------


def short_path(tmp_path: Path) -> Path:
    """A socket's name has at most 107 bytes."""
    path = tmp_path / "s"
    return path if len(str(path)) < 100 else Path(os.path.relpath(path))


def kept(value: Any, name: str = "") -> Line:
    return Line(line(value), name)


def test_a_reader_that_comes_late_gets_what_is_newest(tmp_path: Path) -> None:
    path = short_path(tmp_path)
    out = outlets.SocketOutlet(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    out.put(kept(HEAD, "header"))
    out.put(kept(COSTS, "costs"))
    for n in range(3):
        out.put(kept(step(n)))
        out.put(kept(fit(n), "coefficients"))
    first = follow(f"unix:{path}", patience=5)
    out.serve()
    out.put(kept(step(3)))
    assert next(first).index == 3
    second = follow(f"unix:{path}", patience=5)
    out.serve()
    out.put(kept(step(4)))
    assert next(first).index == 4
    assert next(second).index == 4
    for each in (first, second):
        assert each.header["model"] == "m"
        assert each.tables is not None
        assert [c.step for c in each.coefficients] == [2]
    second.close()  # one that leaves disturbs nobody
    for n in range(5, 40):
        out.put(kept(step(n)))
    assert [next(first).index for _ in range(35)] == list(range(5, 40))
    out.put(kept(end()))
    out.close(1.0)
    assert list(first) == []
    assert first.ended == "the engine ended"
    assert not path.exists()


def test_a_reader_that_stalls_misses_lines_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlets, "BEHIND", 20_000)
    path = short_path(tmp_path)
    out = outlets.SocketOutlet(str(path))
    out.put(kept(HEAD, "header"))
    lazy, busy = follow(f"unix:{path}", patience=5), follow(f"unix:{path}", patience=5)
    out.serve()
    total, seen = 3000, []
    for n in range(total):
        out.put(kept(step(n)))
        out.serve()
        if n % 10 == 9:
            seen += [next(busy).index for _ in range(10)]
    assert seen == list(range(total))  # the other one has them all
    assert all(reader.size <= 20_000 for reader in out._readers)
    got = [next(lazy).index]
    while got[-1] != total and len(got) < total:
        if len(out._readers) == 2 and not out._readers[0].waiting:
            out.put(kept(step(total)))
        out.serve()
        got.append(next(lazy).index)
    assert got == sorted(got)
    assert got[-1] == total
    assert lazy.missed == total + 1 - len(got) > 0
    assert lazy.skipped == 0
    out.close(0.1)


def test_a_socket_is_not_taken_from_others(tmp_path: Path) -> None:
    path = short_path(tmp_path)
    out = outlets.SocketOutlet(str(path))
    with pytest.raises(FileExistsError, match="somebody listens"):
        outlets.SocketOutlet(str(path))
    out.close(0.0)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    assert path.exists()
    outlets.SocketOutlet(str(path)).close(0.0)  # nobody listened any more
    path.write_text("a file")
    with pytest.raises(FileExistsError, match="no socket"):
        outlets.SocketOutlet(str(path))
    assert path.read_text() == "a file"


def test_more_readers_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlets, "READERS", 2)
    path = short_path(tmp_path)
    out = outlets.SocketOutlet(str(path))
    out.put(kept(HEAD, "header"))
    readers = [follow(f"unix:{path}", patience=5) for _ in range(3)]
    out.serve()
    out.put(kept(step(0)))
    assert [next(r).index for r in readers[:2]] == [0, 0]
    assert list(readers[2]) == []
    out.close(0.0)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="no probe listens at unix:"):
        follow(f"unix:{tmp_path}/absent")
    with pytest.raises(ServingError, match="no probe listens"):
        follow("unix:" + "x" * 200)
