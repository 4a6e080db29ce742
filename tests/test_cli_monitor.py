"""``workbench monitor``: lines, a live table, a last summary, and sentences where it cannot be."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from serving.metrics_pages import PretendServer, realistic
from serving.metrics_server import Child, Scripted, serving
from workbench.cli import Group
from workbench.cli_monitor import monitor
from workbench.serving.monitor.monitor_file import read_recording
from workbench.serving.monitor.sample import PER_SCHEDULED, Sample

# The command in a program of its own, as the command line has it among others.
PROGRAM = """
import sys
from workbench import cli, cli_monitor
if "monitor" not in [c.name or c.callback.__name__ for c in cli.app.registered_commands]:
    cli.app.command()(cli_monitor.monitor)
sys.argv = ["workbench", "monitor", *sys.argv[1:]]
cli.main()
"""
APP = typer.Typer(cls=Group)
APP.command()(monitor)


@APP.command("other")  # with one command alone typer would leave out its name
def _other() -> None: ...


def call(*words: str) -> Any:
    return CliRunner().invoke(APP, ["monitor", *words], catch_exceptions=False)


def start(*words: str, **more: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.Popen(command, env={**os.environ, "TERM": "xterm"}, **more)


def documents(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_a_sample_and_the_sum() -> None:
    pretend = realistic(slots=3)

    def page() -> str:
        if len(server.times) > 2:
            pretend.request([3, 0, 1], prompt=5, ttft=0.03)
        return pretend.page()

    with serving(page) as server:
        result = call(server.url, "--hertz", "20", "--samples", "4", "--json")
    assert result.exit_code == 0, result.output
    *lines, total = documents(result.stdout)
    assert [line["kind"] for line in lines] == ["sample"] * 4
    assert total["kind"] == "summary"
    # The first page is the beginning, the second the same; then a request each.
    assert [line["drafts"] for line in lines] == [0, 3, 3, 3]
    assert [line["accepted_at"] for line in lines] == [[0, 0, 0], *[[2, 1, 1]] * 3]
    assert lines[1]["acceptance_length"] == 1 + 4 / 3
    assert lines[1]["conditional_acceptance"] == [2 / 3, 1 / 2, 1.0]
    assert lines[0]["acceptance_length"] is None
    assert lines[1]["tokens_per_second"] == pytest.approx(8 / lines[1]["seconds"])
    assert lines[1]["ttft_p50_seconds"] == pytest.approx(0.03)
    assert (total["samples"], total["drafts"], total["generation_tokens"]) == (4, 9, 24)
    assert total["tokens_per_second"] == pytest.approx(24 / total["seconds"])
    assert total["source"] == "measured here, live, vLLM 0.33.0"
    assert [Sample.from_dict(line).drafts for line in lines] == [0, 3, 3, 3]


def test_a_pipe_gets_a_line_a_sample_in_words() -> None:
    pretend = PretendServer(engines=("0", "1"), further=False)
    pretend.set(running=2, waiting=7, cache=0.5)
    with serving(pretend.page) as server:
        result = call(server.url, "--hertz", "20", "--samples", "3")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 3 + 2
    assert "0.0 tokens/s  acceptance length –" in lines[0]
    assert "KV 25.0%  running 2, waiting 7" in lines[0]
    assert lines[3].startswith("3 samples over")
    assert "measured here" in lines[3]


def test_a_run_recorded_is_the_run_replayed(tmp_path: Path) -> None:
    pretend = realistic(slots=3)

    def page() -> str:
        pretend.request([3, 0, 1], prompt=5, ttft=0.03)
        return pretend.page()

    path = tmp_path / "run.jsonl"
    with serving(page) as server:
        live = call(server.url, "--hertz", "20", "--samples", "5", "--json", "--record", str(path))
    assert len(read_recording(path).samples) >= 5
    again = call("--replay", str(path), "--speed", "1000", "--json", "--samples", "5")
    assert again.exit_code == 0
    assert documents(again.stdout)[:5] == documents(live.stdout)[:5]
    assert documents(again.stdout)[-1]["source"].startswith("recorded: ")
    text = call("--replay", str(path), "--speed", "1000")
    assert "acceptance length 2.33 over" in text.stdout
    assert PER_SCHEDULED in text.stdout
    assert "interpolated within the engine's buckets" in text.stdout


def test_what_cannot_be_watched_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    (tmp_path / "taken").write_text("mine")
    html = Scripted(lambda path: (200, {}, b"<html>"))
    locked = Scripted(lambda path: (401, {}, b""))
    away = Scripted(lambda path: (302, {"Location": "http://example.org/metrics"}, b""))
    with html, locked, away:
        for words, says in (
            ([f"http://127.0.0.1:{port}"], "nothing answers at"),
            ([html.url], "an HTML page"),
            ([locked.url], "wants an API key"),
            ([away.url], "not followed"),
            (["ftp://127.0.0.1"], "http or https"),
            (["http://example.org"], "--foreign"),
            ([html.url, "--hertz", "0"], "once an hour"),
            ([html.url, "--record", str(tmp_path / "taken")], "exists already"),
            (["--replay", str(tmp_path / "none")], "cannot be read"),
            (["--replay", str(tmp_path / "taken")], "no recording of the monitor"),
        ):
            result = call(*words)
            assert result.exit_code == 1, words
            assert result.stdout == ""
            assert result.stderr.count("\n") == 1
            assert says in result.stderr
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["http://127.0.0.1:9", "--replay", "x"],
        ["--replay", "x", "--record", "y"],
        ["http://127.0.0.1:9", "--samples", "0"],
        ["http://127.0.0.1:9", "--samples", "1", "--patience", "0"],
    ],
)
def test_wrong_usage(words: list[str]) -> None:
    assert call(*words).exit_code == 2


def test_ctrl_c_ends_with_the_sum() -> None:
    with Child() as server:
        process = start(server.url, "--hertz", "20", "--json", stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE)  # fmt: skip
        assert process.stdout is not None
        for _ in range(3):
            assert json.loads(process.stdout.readline())["kind"] == "sample"
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said == b""
    total = documents(rest.decode())[-1]
    assert total["kind"] == "summary"
    assert total["samples"] >= 3


def test_a_server_that_dies_is_said_once_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Child() as first:
        process = start(first.url, "--hertz", "20", "--json", "--record", str(path),
                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["kind"] == "sample"
        first.kill()
        found: list[dict[str, Any]] = []
        while not found or found[-1]["kind"] != "stale":
            found.append(json.loads(process.stdout.readline()))
        assert found[-1]["error"]
        time.sleep(0.4)
        with Child(first.port):
            new = json.loads(process.stdout.readline())
            assert new["kind"] == "sample"
            assert new["restarted"]
            process.send_signal(signal.SIGINT)
            rest, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said == b""
    total = documents(rest.decode())[-1]
    assert total["restarts"] == 1
    assert read_recording(path).skipped == 0


def test_samples_that_do_not_come_end_it_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Child() as server:
        process = start(server.url, "--hertz", "20", "--samples", "100000", "--patience", "1",
                        "--json", "--record", str(path), stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE)  # fmt: skip
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["kind"] == "sample"
        server.kill()
        gone = time.monotonic()
        rest, said = process.communicate(timeout=30)
    assert 0.5 < time.monotonic() - gone < 10
    assert process.returncode == 1
    total = documents(rest.decode())[-1]  # what came is not lost
    assert total["kind"] == "summary"
    words = said.decode()
    assert words.count("\n") == 1
    assert f"{total['samples']:,} of 100,000 samples came" in words
    assert "no page for 1 s" in words
    assert len(read_recording(path).samples) == total["samples"]


def test_a_server_that_is_back_in_time_is_waited_for() -> None:
    with Child() as first:
        process = start(first.url, "--hertz", "20", "--samples", "40", "--patience", "20",
                        "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["kind"] == "sample"
        first.kill()
        time.sleep(1.2)
        with Child(first.port):
            rest, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, b"")
    total = documents(rest.decode())[-1]
    assert (total["samples"], total["restarts"]) == (40, 1)


def screen(words: list[str], until: bytes) -> str:
    """What a terminal of 100 columns shows until it says so; Ctrl-C then, and the end."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    process = start(*words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    data, sent = b"", False
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    piece = os.read(master, 65536)
                except OSError:
                    break
                if not piece:
                    break
                data += piece
            if until in data and not sent:
                sent = True
                process.send_signal(signal.SIGINT)
            if process.poll() is not None and not select.select([master], [], [], 0)[0]:
                break
        assert process.wait(10) == 0, data
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
    return re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", data).decode()


def test_a_terminal_shows_a_table_that_follows() -> None:
    with Child() as server:
        shown = screen([server.url, "--hertz", "20"], b"since the start")
    assert server.url in shown
    assert "measured here, live" in shown
    for label in ("tokens/s", "acceptance length", "TTFT p50 / p99", "TPOT p50 / p99",
                  "KV cache in use", "running / waiting", "preemptions", "last 10 s"):  # fmt: skip
        assert label in shown
    assert "12 / 3" in shown
    assert "42.0%" in shown
    assert re.search(r"\d+ samples? over", shown)  # the summary
    assert "Traceback" not in shown


def test_names_of_a_server_move_no_cursor(tmp_path: Path) -> None:
    pretend = PretendServer(model="x\x1b]0;mine\x07[red]", further=False)
    with serving(pretend.page, version=None) as server:
        shown = screen([server.url, "--hertz", "20"], b"since the start")
    assert "\x07" not in shown
    assert "[red]" in shown
