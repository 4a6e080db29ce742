"""The writable copy of the notebooks, and the server on it."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from workbench.lab import LabError, _environment, _wait_for, copy_notebooks, run_lab

NOTEBOOK = '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("00_start_here.ipynb", "01_inside_beam.ipynb"):
        (folder / name).write_text(NOTEBOOK)
    (folder / "conftest.py").write_text("")
    return folder


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(["00_start_here.ipynb", "01_inside_beam.ipynb"][n] for n in numbers)


def test_a_copy_follows_its_source_until_it_is_changed(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "deep" / "copy"
    first = copy_notebooks(copy, source)
    assert (first.written, first.unchanged, first.kept) == (names(0, 1), (), ())
    assert not (copy / "conftest.py").exists()
    assert copy_notebooks(copy, source).unchanged == names(0, 1)

    (copy / names(0)[0]).write_text("mine")
    for n in (0, 1):
        (source / names(n)[0]).write_text(f"version 2 of {n}")
    second = copy_notebooks(copy, source)
    assert (second.written, second.kept) == (names(1), names(0))
    assert (copy / names(0)[0]).read_text() == "mine"
    assert (copy / names(1)[0]).read_text() == "version 2 of 1"
    assert copy_notebooks(copy, source).kept == names(0), "kept once, kept always"

    (copy / names(0)[0]).write_text(NOTEBOOK)  # the change is undone: it follows again
    assert copy_notebooks(copy, source).written == names(0)


def test_files_that_were_there_first_are_the_users(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / names(0)[0]).write_text("mine")
    assert copy_notebooks(copy, source).kept == names(0)
    (copy / ".copied-notebooks.json").write_text("{ damaged")
    (source / names(1)[0]).write_text("version 2")
    assert copy_notebooks(copy, source).kept == names(0, 1)
    assert (copy / names(0)[0]).read_text() == "mine"


def test_folders_that_cannot_hold_a_copy_are_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="where the notebooks come from"):
        copy_notebooks(source, source)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(LabError, match="--dir"):
        copy_notebooks(file / "copy", source)


def test_a_hostile_record_knows_nothing(source: Path, tmp_path: Path) -> None:
    copy_notebooks(tmp_path / "copy", source)
    (tmp_path / "copy" / ".copied-notebooks.json").write_text("[" * 100_000)
    (source / names(1)[0]).write_text("version 2")
    assert copy_notebooks(tmp_path / "copy", source).kept == names(1)


def test_a_signal_while_the_server_starts_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        signal.raise_signal(signal.SIGHUP)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    before = signal.getsignal(signal.SIGHUP)
    assert run_lab(tmp_path, port=None, browser=False, say=lambda _: None) == 0
    assert started[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGHUP) is before


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LabError, match=f"port {port} .* is taken"):
            run_lab(tmp_path, port=port, browser=False, say=print)


def test_the_address_is_told_once_the_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's file comes before it listens; an address told then would be refused."""
    import socket
    import threading
    import time

    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as server,
        socket.socket() as later,
    ):
        later.bind(("127.0.0.1", 0))
        port = later.getsockname()[1]
        described = {"url": f"http://127.0.0.1:{port}/", "token": "t", "port": port}
        (tmp_path / f"jpserver-{server.pid}.json").write_text(json.dumps(described))
        began = time.monotonic()
        timer = threading.Timer(0.5, later.listen)
        timer.start()
        url = _wait_for(server, tmp_path)
        assert time.monotonic() - began >= 0.5
        assert url == f"http://127.0.0.1:{port}/lab/?token=t"
        timer.join()
        server.communicate(b"\n", timeout=30)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "closed"])
def test_the_server_is_on_loopback_with_this_kernel_and_stops(
    ending: signal.Signals, source: Path, tmp_path: Path
) -> None:
    own = {
        name: str(tmp_path / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    code = (
        "import sys; from pathlib import Path; from workbench.lab import run_lab\n"
        "say = lambda line: print(line, flush=True)\n"
        f"sys.exit(run_lab(Path({str(source)!r}), port=None, browser=False, say=say))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | own,
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("JupyterLab: http://127.0.0.1:")
            assert "/lab/tree/00_start_here.ipynb?token=" in first
            url = first.removeprefix("JupyterLab: ").strip()
            base, token = url.split("lab/tree")[0], url.split("token=")[1]
            assert len(token) >= 32
            with urllib.request.urlopen(f"{base}api/kernelspecs?token={token}") as answer:
                kernel = json.load(answer)["kernelspecs"]["python3"]["spec"]
            assert kernel["argv"][0] == sys.executable
            with urllib.request.urlopen(f"{base}api/contents?token={token}") as answer:
                listed = {entry["name"] for entry in json.load(answer)["content"]}
            assert listed >= set(names(0, 1))
            (record,) = Path(own["JUPYTER_RUNTIME_DIR"]).glob("jpserver-*.json")
            server = int(json.loads(record.read_text())["pid"])
        finally:
            process.send_signal(ending)
        try:
            rest, _ = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()  # leaving the block would wait for it without end
            raise
        assert process.returncode == 0
    assert "Stopping JupyterLab" in rest
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_terminals_in_the_lab_find_the_command(tmp_path: Path) -> None:
    path = _environment(tmp_path)["PATH"].split(os.pathsep)
    assert path[0] == str(Path(sys.executable).parent)
    assert path[1:] == os.environ["PATH"].split(os.pathsep)
