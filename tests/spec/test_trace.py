"""Trace files: what is written is read back, whatever happens to writer, file or disk."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.planted import small_drafter, small_target
from workbench.errors import TraceError, WorkbenchError
from workbench.model.sampling import Sampling
from workbench.spec import loop, trace_lines, trace_writer
from workbench.spec.adaptive import Adaptive
from workbench.spec.cost_table import CostTable
from workbench.spec.decode import decode
from workbench.spec.positions import Position, at_every_position, replay_full, replayed
from workbench.spec.step import RequestStep, Step
from workbench.spec.trace import Trace, TraceWriter, header

HEAD = {
    "format": "beam-workbench-trace",
    "version": 1,
    "mode": "steps",
    "model": "beam-tiny",
    "drafter": "beam-tiny-dflash2",
    "sampling": {"temperature": 0.0, "top_p": 1.0, "seed": 0},
    "speculative_tokens": 3,
    "method": "standard",
    "proposals": "greedy",
    "date": "2026-01-01T00:00:00+00:00",
    "hardware": {"cpu": "a processor", "gpus": []},
    "versions": {"torch": "2.9.0"},
}
STEPS = (
    Step(
        index=0,
        phase="prefill",
        rows=4,
        seconds=0.25,
        requests=(RequestStep(request=0, position=4, token_ids=(7,), kinds=("first",)),),
    ),
    Step(
        index=1,
        rows=5,
        draft_seconds=0.001,
        verify_seconds=0.002,
        seconds=0.004,
        requests=(
            RequestStep(
                request=0,
                position=5,
                drafted=(1, 2, 3),
                confidences=(0.9, 0.8, 1e-7),
                admitted=3,
                accepted=2,
                token_ids=(1, 2, 9),
                kinds=("accepted", "accepted", "corrected"),
                finished="eos",
                candidates=((1, 4), (2, 5), (3, 6)),
                unary=((1.5, 1.0), (2.5, -1.0), (0.5, 0.25)),
                scores=((1.5, 1.0), (2.5, -1.0), (0.5, 0.1)),
            ),
            RequestStep(request=1, position=8, token_ids=(3,), kinds=("plain",)),
        ),
    ),
)


def written(path: Path, steps: tuple[Step, ...] = STEPS, **changes: Any) -> bytes:
    with TraceWriter(path, HEAD | changes) as writer:
        for step in steps:
            writer.write(step)
    return path.read_bytes()


def test_round_trip(tmp_path: Path) -> None:
    data = written(tmp_path / "a.jsonl")
    trace = Trace.read(tmp_path / "a.jsonl")
    assert (trace.header, trace.steps, trace.positions, trace.skipped) == (HEAD, STEPS, (), 0)
    assert data.count(b"\n") == 3
    assert json.loads(data.splitlines()[0]) == HEAD
    assert written(tmp_path / "b.jsonl") == data


def test_header_says_what_and_where() -> None:
    made = header(
        model="beam-tiny",
        drafter="d",
        sampling=Sampling(temperature=0.7, seed=3),
        speculative_tokens=7,
        classes=["code", "prose"],
    )
    assert {"format", "version", "hardware", "versions", "date", "mode", "method"} <= made.keys()
    assert made["sampling"] == {"temperature": 0.7, "top_p": 1.0, "seed": 3}
    assert made["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert made["hardware"]["cores"] >= 1
    assert made["classes"] == ["code", "prose"]
    json.dumps(made, allow_nan=False)
    with pytest.raises(TraceError, match="mode is one of"):
        header(model="m", mode="all")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="hardware of the header cannot be set"):
        header(model="m", hardware={})


def test_cut_off_at_every_byte(tmp_path: Path) -> None:
    data = written(tmp_path / "whole")
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path = tmp_path / "cut"
        path.write_bytes(data[:size])
        # The newline itself may be missing: a JSON object is whole with its last brace.
        whole = sum(size >= end - 1 for end in ends)
        if whole == 0:
            with pytest.raises(TraceError, match="is not a trace"):
                Trace.read(path)
            continue
        trace = Trace.read(path)
        assert trace.steps == STEPS[: whole - 1]
        started = size > ends[whole - 1]
        assert trace.skipped == started


DEEP = b"[" * 100_000 + b"]" * 100_000
STEP_LINE = json.dumps(STEPS[1].to_dict()).encode()
BAD_LINES = {
    "binary": bytes(range(256)).replace(b"\n", b""),
    "zeros": b"\0" * 5000,
    "no object": b"[1, 2]",
    "a string": b"\"__import__('os').abort()\"",
    "nested": DEEP,
    "nested in a field": STEP_LINE.replace(b"[[1, 4]", b"[" + DEEP),
    "nested as far as the parser goes": STEP_LINE.replace(
        b"[[1, 4]", b"[" + b"[" * 900 + b"]" * 900
    ),
    "NaN": STEP_LINE.replace(b"0.25", b"NaN"),
    "infinity": STEP_LINE.replace(b"0.25", b"-Infinity"),
    "beyond a float": STEP_LINE.replace(b"0.25", b"1e999"),
    "a number of a million digits": STEP_LINE.replace(b'"rows": 5', b'"rows": ' + b"9" * 10**6),
    "more than 64 bits": STEP_LINE.replace(b'"rows": 5', b'"rows": 9999999999999999999'),
    "negative": STEP_LINE.replace(b'"rows": 5', b'"rows": -5'),
    "a text for a number": STEP_LINE.replace(b'"rows": 5', b'"rows": "5"'),
    "more accepted than admitted": STEP_LINE.replace(b'"admitted": 3', b'"admitted": 1'),
    "a kind that is none": STEP_LINE.replace(b'"plain"', b'"magic"'),
    "kinds that cannot be hashed": STEP_LINE.replace(b'"plain"', b"{}"),
    "no requests": b'{"index": 0, "rows": 1, "seconds": 1}',
    "requests that are none": b'{"index": 0, "rows": 1, "seconds": 1, "requests": 5}',
    "UTF-16": STEP_LINE.decode().encode("utf-16"),
    "half a character": STEP_LINE[:-1] + b"\xc3",
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_skipped_and_counted(name: str, tmp_path: Path) -> None:
    assert BAD_LINES[name] != STEP_LINE
    lines = written(tmp_path / "whole").splitlines(keepends=True)
    path = tmp_path / "bad"
    path.write_bytes(b"".join((lines[0], lines[1], BAD_LINES[name], b"\n", lines[2])))
    trace = Trace.read(path)
    assert (trace.steps, trace.skipped) == (STEPS, 1)
    path.write_bytes(BAD_LINES[name] + b"\n" + b"".join(lines))
    with pytest.raises(TraceError, match="is not a trace"):
        Trace.read(path)


def test_a_line_without_end_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_lines, "LONGEST", 1000)
    lines = written(tmp_path / "whole").splitlines(keepends=True)
    for length in (999, 1000, 1001, 1999, 2000, 2001, 5000):
        path = tmp_path / "long"
        path.write_bytes(b"".join((*lines[:2], b"x" * length, b"\n\n \r\n", lines[2])))
        trace = Trace.read(path)
        assert (trace.steps, trace.skipped) == (STEPS, 1)
    monkeypatch.setattr(trace_lines, "LONGEST", 100)
    with pytest.raises(TraceError, match=r"the header of a trace has \d+ bytes; 100 is the most"):
        TraceWriter(tmp_path / "new", HEAD)
    assert not (tmp_path / "new").exists()


@settings(max_examples=60)
@given(st.binary(max_size=200), st.integers(0, 3))
def test_any_bytes_anywhere(tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int) -> None:
    path = tmp_path_factory.mktemp("junk") / "trace"
    lines = written(path).splitlines(keepends=True)
    lines.insert(at, junk + b"\n")
    path.write_bytes(b"".join(lines))
    blank = [not part.strip() for part in junk.split(b"\n")]
    if at == 0 and not all(blank):
        with pytest.raises(TraceError, match="is not a trace"):
            Trace.read(path)
    else:
        trace = Trace.read(path)
        assert (trace.steps, trace.skipped) == (STEPS, blank.count(False))


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (b"", "is not a trace: its first line"),
        (b"{}\n", "is not a trace: its header lacks"),
        (b'{"format": "another-trace", "version": 1}\n', "is not a trace: its header lacks"),
        (json.dumps(HEAD | {"version": 2}).encode(), "is a trace of version 2.*update"),
        (json.dumps(HEAD | {"version": "1"}).encode(), "has no trace version"),
        (json.dumps(HEAD | {"version": True}).encode(), "has no trace version"),
        (json.dumps(HEAD | {"mode": "none"}).encode(), "has a mode in its header"),
        (json.dumps(HEAD | {"mode": []}).encode(), "has a mode in its header"),
        (STEP_LINE, "is not a trace: its header lacks"),
    ],
)
def test_another_header_is_one_sentence(first: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(first)
    with pytest.raises(TraceError, match=says) as caught:
        Trace.read(tmp_path / "t")
    assert str(tmp_path / "t") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, says in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        ("a\0b", "cannot be read"),
    ):
        with pytest.raises(TraceError, match=says):
            Trace.read(name)


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("of value")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(TraceError, match="notes exists already; give the trace another name"):
        TraceWriter(path, HEAD)
    for name in ("folder", "dangling"):
        with pytest.raises(TraceError, match="exists already"):
            TraceWriter(tmp_path / name, HEAD)
    with pytest.raises(TraceError, match="not a regular file"):
        TraceWriter(tmp_path / "folder", HEAD, overwrite=True)
    with pytest.raises(TraceError, match="header given is not a trace"):
        TraceWriter(path, {"model": "m"}, overwrite=True)
    with pytest.raises(TraceError, match="its folder does not exist"):
        TraceWriter(tmp_path / "missing" / "t", HEAD)
    assert path.read_text() == "of value"
    with TraceWriter(path, HEAD, overwrite=True) as writer:
        writer.write(STEPS[0])
    assert Trace.read(path).steps == STEPS[:1]


def test_it_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t"
    writer = TraceWriter(path, HEAD)
    for count, step in enumerate(STEPS):
        assert len(Trace.read(path).steps) == writer.lines == count
        writer.write(step)
    assert Trace.read(path).steps == STEPS
    writer.close()
    writer.close()
    with pytest.raises(TraceError, match="is closed"):
        writer.write(STEPS[0])


def test_what_json_cannot_say_is_refused_and_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, HEAD) as writer:
        writer.write(STEPS[0])
        bad = Step(index=1, rows=1, seconds=float("nan"), requests=())
        with pytest.raises(TraceError, match="line 3 of a trace cannot be written as JSON"):
            writer.write(bad)
        with pytest.raises(TraceError, match="takes a Step a line, not a Position"):
            writer.write(POSITIONS[0])
        writer.write(STEPS[1])
    assert (Trace.read(path).steps, Trace.read(path).skipped) == (STEPS, 0)
    with pytest.raises(TraceError, match="header of a trace cannot be written"):
        TraceWriter(tmp_path / "u", HEAD | {"prompts": {1, 2}})
    assert not (tmp_path / "u").exists()


def same(a: Any, b: Any) -> bool:
    """Equal, NaN being itself, through all that a step holds."""
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Step | RequestStep):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def test_scores_that_are_no_numbers_are_kept_as_they_are(tmp_path: Path) -> None:
    odd = replace(
        STEPS[1].requests[0],
        confidences=(nan, 0.5, 1e308),
        expected=(1e308, 1e308, -1e308),  # their sum passes through infinity
        stale=(1.0, inf, -inf),
        unary=((1.5, -inf), (2.5, -1.0), (nan, 0.25)),
        scores=((inf, 1.0), (nan, nan), (0.5, 0.1)),
    )
    step = replace(STEPS[1], policy="own", objective=(nan, 1.0, inf), requests=(odd,))
    data = written(tmp_path / "t", (STEPS[0], step, STEPS[1]))
    line = json.loads(data.splitlines()[2], parse_constant=pytest.fail)  # JSON, to the letter
    assert line["objective"] == ["nan", 1.0, "inf"]
    assert line["requests"][0]["stale"] == [1.0, "inf", "-inf"]
    assert line["requests"][0]["unary"][0] == [1.5, "-inf"]
    trace = Trace.read(tmp_path / "t")
    assert trace.skipped == 0
    assert trace.steps[::2] == STEPS
    assert same(trace.steps[1], step)
    assert not same(trace.steps[1], STEPS[1])
    assert same(Step.from_dict(step.to_dict()), step)


@pytest.mark.parametrize("word", ["NaN", "infinity", "1", "", "nan "])
def test_only_the_words_for_numbers_are_numbers(word: str) -> None:
    data = STEPS[1].to_dict()
    data["requests"][0]["confidences"] = [0.5, word, 0.5]
    with pytest.raises(TraceError, match="no numbers"):
        Step.from_dict(data)
    with pytest.raises(TraceError, match="negative count or time"):
        Step.from_dict(STEPS[1].to_dict() | {"seconds": "nan"})


def test_a_run_of_a_drafter_that_gives_nan_is_traced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the target's whatever is drafted, so the run goes on, and so does the trace."""
    usual, calls = loop.propose, []

    def propose(*given: Any, **more: Any) -> Any:
        made = usual(*given, **more)
        calls.append(1)
        return replace(made, scores=made.scores * nan) if len(calls) % 2 else made

    monkeypatch.setattr(loop, "propose", propose)
    target = small_target(tmp_path / "target")
    costs = CostTable(draft=((1, 0.1), (8, 0.2)), verify=((1, 1.0), (8, 4.0)))
    run = decode(
        target, small_drafter(target), [[1, 2, 3]], max_new_tokens=12, detail=True,
        policy=Adaptive(costs),
    )  # fmt: skip
    steps = tuple(run)
    written(tmp_path / "t", steps)
    trace = Trace.read(tmp_path / "t")
    assert trace.skipped == 0
    assert all(same(a, b) for a, b in zip(trace.steps, steps, strict=True))
    said = [x for step in steps for part in step.requests for x in part.expected]
    assert any(map(isnan, said))
    assert not all(map(isnan, said))
    assert any("NaN" in step.reason or "nan" in step.reason for step in steps)


def partly(monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int) -> None:
    """``os.write`` of the writer puts ``after`` bytes down, and fails when it is called again."""
    real, calls = os.write, []

    def write(descriptor: int, data: bytes) -> int:
        calls.append(1)
        if len(calls) > 1:
            raise error
        return real(descriptor, data[:after])

    monkeypatch.setattr(trace_writer.os, "write", write)


@pytest.mark.parametrize("after", [0, 1, 40])
def test_a_full_disk_is_one_sentence(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    writer = TraceWriter(path, HEAD)
    writer.write(STEPS[0])
    with monkeypatch.context() as patch:
        partly(patch, OSError(errno.ENOSPC, "No space left on device"), after)
        with pytest.raises(TraceError, match="No space left on device") as caught:
            writer.write(STEPS[1])
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("(lines that can be read, header apart: 1)")
    trace = Trace.read(path)
    assert (trace.steps, trace.skipped) == (STEPS[:1], 0)
    with pytest.raises(TraceError, match="is closed"):
        writer.write(STEPS[1])


def test_a_header_that_finds_no_room_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partly(monkeypatch, OSError(errno.ENOSPC, "No space left on device"), 10)
    with pytest.raises(TraceError, match="No space left"):
        TraceWriter(tmp_path / "t", HEAD)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("after", [0, 40])
def test_an_interrupt_leaves_whole_lines_and_a_usable_writer(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, HEAD) as writer:
        writer.write(STEPS[0])
        with monkeypatch.context() as patch:
            partly(patch, KeyboardInterrupt(), after)
            with pytest.raises(KeyboardInterrupt):
                writer.write(STEPS[1])
        assert Trace.read(path).skipped == 0
        writer.write(STEPS[1])
    assert (Trace.read(path).steps, Trace.read(path).skipped) == (STEPS, 0)


CHILD = """
import resource, sys
from workbench.errors import TraceError
from workbench.spec.step import RequestStep, Step
from workbench.spec.trace import Trace, TraceWriter
import json
path, limit, head = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
with TraceWriter(path, head) as writer:
    index = 0
    while True:
        part = RequestStep(request=0, position=5 + index, token_ids=(index,), kinds=("plain",))
        try:
            writer.write(Step(index=index, rows=1, seconds=0.1, requests=(part,)))
        except TraceError as error:
            print(index, len(Trace.read(path).steps), error)
            break
        index += 1
        if index == 50 and not limit:
            print("going", flush=True)
"""


def child(path: Path, limit: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", CHILD, str(path), str(limit), json.dumps(HEAD)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_a_file_at_the_limit_of_its_size(tmp_path: Path) -> None:
    with child(tmp_path / "t", 4000) as process:
        out, _ = process.communicate(timeout=120)
    index, readable, sentence = out.split(" ", 2)
    assert process.returncode == 0
    assert int(index) == int(readable) > 10
    assert sentence.count("\n") == 1
    assert "cannot be written any further" in sentence
    trace = Trace.read(tmp_path / "t")
    assert [s.index for s in trace.steps] == list(range(int(index)))
    assert trace.skipped == 0


def test_a_killed_program_leaves_a_readable_file(tmp_path: Path) -> None:
    with child(tmp_path / "t", 0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    trace = Trace.read(tmp_path / "t")
    assert [s.index for s in trace.steps] == list(range(len(trace.steps)))
    assert len(trace.steps) >= 50
    assert trace.skipped <= 1


def test_text_of_a_trace(tmp_path: Path) -> None:
    written(tmp_path / "t")
    trace = Trace.read(tmp_path / "t")
    assert str(trace) == repr(trace) == repr(Trace.read(tmp_path / "t"))
    assert "trace (steps) of beam-tiny, drafter beam-tiny-dflash2, 3 drafts a block" in str(trace)
    assert "recorded 2026-01-01T00:00:00+00:00 on a processor, torch 2.9.0" in str(trace)
    assert "2 steps, every line read" in str(trace)
    assert "acceptance length 3.000" in str(trace)
    hostile = {
        "model": "\x1b[31mred\u202e\ud800",
        "drafter": ["x"] * 1000,
        "hardware": [],
        "date": 5,
    }
    written(tmp_path / "u", **hostile)
    shown = str(Trace.read(tmp_path / "u"))
    assert "?[31mred??" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert max(map(len, shown.splitlines())) < 500
    shown.encode()


def test_frame(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    written(tmp_path / "t")
    frame = Trace.read(tmp_path / "t").frame()
    assert frame[["step", "request", "drafted", "accepted", "emitted"]].to_numpy().tolist() == [
        [0, 0, 0, 0, 1],
        [1, 0, 3, 2, 3],
        [1, 1, 0, 0, 1],
    ]
    assert frame.loc[1, "token_ids"] == (1, 2, 9)
    assert frame["finished"].fillna("no").tolist() == ["no", "eos", "no"]


def position(at: int, accepted: int, left: int = 100, request: int = 0, n: int = 3) -> Position:
    return Position(
        request=request,
        position=at,
        token_id=50 + at,
        left=left,
        drafted=tuple(range(n)),
        accepted=accepted,
        candidates=((1, 2),) * n,
        scores=((0.5, -0.5),) * n,
    )


# From 5 on: 2 accepted -> 8: 0 -> 9: 3 accepted. A stop token at 10 ends the sequence.
POSITIONS = tuple(position(5 + i, accepted) for i, accepted in enumerate((2, 1, 0, 0, 3, 1)))
# From 20 on: 1 accepted -> 22, where a limit leaves two tokens: one draft verified, and accepted.
LIMITED = tuple(
    position(20 + i, accepted, left=4 - i, request=1) for i, accepted in enumerate((1, 0, 3, 2))
)
# From 30 on: the limit leaves two tokens, the first draft is refused; the last token has no draft.
LAST = tuple(position(30 + i, 0, left=2 - i, request=2) for i in range(2))


def test_replay_by_hand() -> None:
    every = (*POSITIONS, *LIMITED, *LAST)
    assert list(replay_full(every, 0)) == [2, 0, 3]
    assert list(replay_full(every, 1)) == [1, 1]
    assert list(replay_full(every, 2)) == [0]
    assert list(replay_full(every, 3)) == []
    assert list(replay_full([p for p in POSITIONS if p.position != 8], 0)) == [2]
    # Request 0: 5 6 7, then 8, then 9 and 10 of the four tokens of the last block.
    a = replayed(POSITIONS)
    assert (a.events, a.accepted, a.emitted, a.cut, a.trimmed) == (3, 5, 6, 2, 0)
    # Request 1: 20 21, then 22 23 with two of three drafts trimmed.
    a = replayed(LIMITED)
    assert (a.events, a.accepted, a.emitted, a.cut, a.trimmed) == (2, 2, 4, 0, 2)
    # Request 2: 30 with two trimmed, then 31 plain.
    a = replayed(LAST)
    assert (a.events, a.accepted, a.emitted, a.plain, a.trimmed) == (1, 0, 2, 1, 2)
    assert replayed(every).histogram == (2, 2, 1, 1)
    assert replayed(every).requests == 3
    a = at_every_position(POSITIONS)
    assert (a.events, a.accepted, a.histogram) == (6, 7, (2, 2, 1, 1))


def test_positions_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, HEAD | {"mode": "every-position"}) as writer:
        for p in POSITIONS:
            writer.write(p)
        with pytest.raises(TraceError, match="takes a Position a line, not a Step"):
            writer.write(STEPS[0])
    with path.open("ab") as file:
        file.write(STEP_LINE + b'\n{"request": 0')
    trace = Trace.read(path)
    assert (trace.positions, trace.steps, trace.skipped) == (POSITIONS, (), 2)
    assert trace.mode == "every-position"
    assert trace.acceptance() == replayed(POSITIONS)
    assert "6 positions, replayed as a run, 2 lines skipped" in str(trace)
    pytest.importorskip("pandas")
    assert trace.frame()["accepted"].tolist() == [2, 1, 0, 0, 3, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"accepted": 4},
        {"accepted": -1},
        {"accepted": True},
        {"left": 0},
        {"position": 1.5},
        {"drafted": "012"},
        {"drafted": None},
        {"candidates": [[1, 2], [3, 4]]},
        {"candidates": [[1, 2], [3, 4], [5]]},
        {"candidates": [["1", 2], [3, 4], [5, 6]]},
        {"scores": [["a", 1], [1, 1], [1, 1]]},
        {"scores": [[1], [1], [1]]},
        {"unary": 5},
        {"token_id": None},
    ],
)
def test_positions_that_contradict_themselves(change: dict[str, Any]) -> None:
    assert Position.from_dict(POSITIONS[0].to_dict()) == POSITIONS[0]
    with pytest.raises(TraceError):
        Position.from_dict(POSITIONS[0].to_dict() | change)


def test_errors_are_the_workbench_s_own() -> None:
    assert issubclass(TraceError, WorkbenchError)
