"""Recordings: whole lines at any moment, the same samples afterwards, a full disk is no end."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from serving.metrics_pages import PretendServer, wait_until
from serving.metrics_server import serving
from workbench.errors import ServingError
from workbench.serving.address import Address
from workbench.serving.monitor import monitor_file
from workbench.serving.monitor.monitor import Monitor
from workbench.serving.monitor.monitor_file import SampleWriter, header, read_recording
from workbench.serving.monitor.monitor_replay import Replay, replay
from workbench.serving.monitor.sample import Sample
from workbench.serving.monitor.spread import Spread

HERE = Address.of("http://127.0.0.1:8000")


def some(count: int) -> list[Sample]:
    return [
        Sample(at=1000 + 0.5 * n, seconds=0.5, model="m", generation_tokens=n, drafts=n,
               draft_tokens=3 * n, accepted_tokens=n, accepted_at=(n, 0, 0), kv_usage=0.25,
               finished={"stop": n}, ttft=Spread(((0.01, 0.02, n + 1),), 0.1 * n))
        for n in range(count)
    ]  # fmt: skip


def written(path: Path, samples: list[Sample]) -> Path:
    with SampleWriter(path, header(HERE, hertz=2.0)) as writer:
        writer.server("0.33.0")
        for sample in samples:
            writer.write(sample)
    return path


def test_what_is_read_is_what_was_seen(tmp_path: Path) -> None:
    pretend = PretendServer(engines=("0", "1"), model="tiny <b>")
    path = tmp_path / "run.jsonl"
    with serving(pretend.page) as server:
        with Monitor(server.url, hertz=20, record=path) as monitor:
            assert monitor.recording == path
            monitor.wait(1, 20)
            for engine in ("0", "1", "1"):
                pretend.request([3, 1], engine=engine)
                monitor.wait(monitor.seen + 2, 20)
        assert monitor.recording is None
        assert monitor.recording_trouble is None
        recording = read_recording(path)
        assert recording.samples == tuple(monitor.samples)
        assert sum(sample.drafts or 0 for sample in recording.samples) == 6
        assert recording.header["address"] == server.url
    assert recording.header["hertz"] == 20
    assert recording.version == "0.33.0"
    assert recording.skipped == 0
    assert recording.source.startswith("recorded: ")
    assert "vLLM 0.33.0, tiny <b>, 20" in recording.source
    again = Replay(recording, speed=float("inf"))
    assert again.samples == monitor.samples
    assert list(again) == monitor.samples
    assert not again.running


def test_every_line_is_whole_at_any_moment(tmp_path: Path) -> None:
    pretend = PretendServer(further=False)
    path = tmp_path / "run.jsonl"
    with serving(pretend.page) as server, Monitor(server.url, hertz=20, record=path) as monitor:
        for count in range(1, 12):
            monitor.wait(count, 20)
            data = path.read_bytes()
            assert data.endswith(b"\n")
            kinds = [json.loads(line).get("kind") for line in data.splitlines()]
            assert kinds[0] is None
            assert set(kinds[1:]) <= {"sample", "server"}
            assert read_recording(path).skipped == 0


def test_a_file_that_was_cut_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    samples = some(5)
    path = written(tmp_path / "run.jsonl", samples)
    data = path.read_bytes()
    ends = [i for i, byte in enumerate(data) if byte == 10]
    for cut in range(ends[1] + 1, len(data), 7):
        path.write_bytes(data[:cut])
        # Without the header and what the server said; a whole line may lack its end.
        whole = sum(end <= cut for end in ends) - 2
        assert list(read_recording(path).samples) == samples[:whole]


def test_lines_that_are_none_are_skipped_and_counted(tmp_path: Path) -> None:
    samples = some(3)
    path = written(tmp_path / "run.jsonl", samples)
    lines = path.read_text().splitlines()
    wrong = ["{", "[]", "null", '{"kind": "sample"}', '{"kind": "dance"}', "\x00" * 9,
             lines[2].replace('"drafts":0', '"drafts":-4'), lines[2].replace("0.5", "NaN"),
             lines[2].replace("{", "{\"engines\":" + "[" * 2000, 1)]  # fmt: skip
    path.write_text("\n".join([*lines[:3], *wrong, *lines[3:]]) + "\n")
    recording = read_recording(path)
    assert list(recording.samples) == samples
    assert recording.skipped == len(wrong)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no recording of the monitor"),
        ('{"format": "beam-workbench-trace", "version": 1}\n', "no recording of the monitor"),
        ("vllm:num_requests_running 1\n", "no recording of the monitor"),
        ('{"format": "beam-workbench-serving"}\n', "no version"),
        ('{"format": "beam-workbench-serving", "version": 9}\n', "update the workbench"),
    ],
)
def test_files_that_are_no_recording(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ServingError, match=words):
        read_recording(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "cannot be read"), (tmp_path, "not a regular file"),
                        ("a\0b", "cannot be read")):  # fmt: skip
        with pytest.raises(ServingError, match=words):
            read_recording(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ServingError, match="not a regular file"):
        read_recording(tmp_path / "pipe")


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("precious")
    with pytest.raises(ServingError, match="exists already"):
        Monitor("http://127.0.0.1:9", record=path)
    assert path.read_text() == "precious"
    with pytest.raises(ServingError, match="cannot be written"):
        SampleWriter(tmp_path / "no" / "folder", header(HERE, hertz=2.0))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ServingError, match="not a regular file"):
        SampleWriter(tmp_path / "pipe", header(HERE, hertz=2.0), overwrite=True)
    SampleWriter(path, header(HERE, hertz=2.0), overwrite=True).close()
    assert read_recording(path).samples == ()


def full_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes so many bytes more."""
    left = [count]
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(left[0], len(data))
        left[0] -= taken
        return real(descriptor, data[:taken])

    monkeypatch.setattr(monitor_file.os, "write", write)


def test_a_full_disk_ends_recording_and_not_monitoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend = PretendServer(further=False)
    path = tmp_path / "run.jsonl"
    with serving(pretend.page) as server, Monitor(server.url, hertz=20, record=path) as monitor:
        monitor.wait(2, 20)
        full_after(700, monkeypatch)
        wait_until(lambda: monitor.recording_trouble is not None)
        monkeypatch.undo()
        assert monitor.recording is None
        trouble = str(monitor.recording_trouble)
        assert "recording ended" in trouble
        assert "No space left" in trouble
        seen = monitor.seen
        monitor.wait(seen + 3, 20)
        assert monitor.error is None
        recording = read_recording(path)
        assert recording.skipped == 0
        assert list(recording.samples) == monitor.samples[: len(recording.samples)]
        assert 2 <= len(recording.samples) < monitor.seen
        monitor.record(tmp_path / "other.jsonl")  # and it can be recorded again
        assert monitor.recording_trouble is None
        monitor.wait(monitor.seen + 2, 20)
    assert read_recording(tmp_path / "other.jsonl").samples


def test_no_room_for_a_header_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_after(10, monkeypatch)
    with pytest.raises(ServingError, match="No space left"):
        SampleWriter(tmp_path / "run.jsonl", header(HERE, hertz=2.0))
    assert list(tmp_path.iterdir()) == []


def test_recording_begins_and_ends_while_it_goes(tmp_path: Path) -> None:
    pretend = PretendServer(further=False)
    with serving(pretend.page) as server, Monitor(server.url, hertz=20) as monitor:
        monitor.wait(2, 20)
        monitor.record(tmp_path / "a.jsonl")
        with pytest.raises(ServingError, match="being written already"):
            monitor.record(tmp_path / "b.jsonl")
        assert not (tmp_path / "b.jsonl").exists()
        monitor.wait(monitor.seen + 3, 20)
        monitor.stop_recording()
        monitor.stop_recording()
        recording = read_recording(tmp_path / "a.jsonl")
        size = (tmp_path / "a.jsonl").stat().st_size
        monitor.wait(monitor.seen + 2, 20)
        assert (tmp_path / "a.jsonl").stat().st_size == size
    kept = list(recording.samples)
    first = monitor.samples.index(kept[0])
    assert kept == monitor.samples[first : first + len(kept)]
    assert recording.version == "0.33.0"


def test_a_header_says_nothing_of_this_machine_where_the_server_is_another() -> None:
    away = header(Address.of("http://example.org:8000", foreign=True), hertz=1.0)
    assert away["hardware"] is None
    assert header(HERE, hertz=1.0)["hardware"]["cores"] >= 1


# -- replay ---------------------------------------------------------------------------------------


def test_a_replay_takes_its_time(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", some(6))  # three seconds
    begin = time.monotonic()
    played = replay(path, speed=10)
    assert played.samples == []
    assert played.running
    times = []
    for sample in played:
        times.append((sample.at, time.monotonic() - begin))
    assert [at for at, _ in times] == [sample.at for sample in some(6)]
    for n, (_, passed) in enumerate(times, 1):
        assert passed >= 0.05 * n - 0.005
    assert played.samples == some(6)
    assert not played.running
    assert played.since(4) == (some(6)[4:], 6)
    played.restart()
    assert played.seen < 6


def test_a_replay_can_be_stopped(tmp_path: Path) -> None:
    played = replay(written(tmp_path / "run.jsonl", some(40)), speed=0.5)
    threading.Timer(0.1, played.stop).start()
    assert list(played) == []
    assert not played.running
    seen = played.seen
    time.sleep(0.05)
    assert played.seen == seen
    assert (played.error, played.stale_since, played.version) == (None, None, "0.33.0")


@pytest.mark.parametrize("speed", [0, -1, float("nan"), True, "fast"])
def test_speeds_that_are_none(speed: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", some(1))
    with pytest.raises(ServingError, match="speed"):
        replay(path, speed=speed)


def test_a_source_says_what_is_known_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    head = header(HERE, hertz=2.0) | {
        "hardware": {"cpu": "EPYC\x1b[31m", "gpus": ["NVIDIA H200", "NVIDIA H200", 7]},
        "date": "2026-11-30T10:00:00+00:00",
    }
    path.write_text(json.dumps(head) + "\n")
    recording = read_recording(path)
    assert recording.source == "recorded: NVIDIA H200, 7, 2026-11-30"
    head["hardware"] = {"cpu": "EPYC\x1b[31m", "gpus": []}
    path.write_text(json.dumps(head) + "\n")
    assert read_recording(path).source == "recorded: EPYC[31m, 2026-11-30"
    head |= {"hardware": 3, "date": ["x"]}
    path.write_text(json.dumps(head) + "\n")
    assert read_recording(path).source == "recorded: "
