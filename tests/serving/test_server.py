"""Starting, finding and ending a server: real processes, an engine that only pretends to be one.

Whether something is left is asked of the operating system, by process id.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from serving.fake_engine import all_gone, asked, free_port, pids, runs, write_engine
from workbench.errors import ServingError
from workbench.serving.address import Address
from workbench.serving.launch.engine_program import engine_command
from workbench.serving.launch.launch import Launch, launch_for
from workbench.serving.server import server as servers
from workbench.serving.server import server_state, starting
from workbench.serving.server.server import (
    EngineEndedError,
    Server,
    attach,
    running,
    serve,
    stop_all,
)
from workbench.serving.server.startup_progress import (
    Progress,
    ProgressReader,
    first_error,
    last_lines,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what is left")
LOGS = Path(__file__).parents[1] / "data" / "startup_logs"
ADAPTIVE = LOGS / "h200_52_layers_dflash2_adaptive.txt"


class Rig:
    """A folder with an engine, a cache of its own, and what was started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.engine = write_engine(folder)
        monkeypatch.setenv("BEAM_WORKBENCH_CACHE", str(folder / "cache"))
        self.said: list[Progress] = []
        self.behave()

    def behave(self, **behaviour: object) -> None:
        for name, value in asked(self.folder, **behaviour).items():
            self.monkeypatch.setenv(name, value)
        (self.folder / "pids.json").unlink(missing_ok=True)

    def launch(self, **options: Any) -> Launch:
        return launch_for("beam-tiny", cpu=True, **{"port": free_port()} | options)

    def serve(self, launch: Launch | None = None, **options: Any) -> Server:
        given = {"engine": self.engine, "limit": 20.0, "say": self.said.append} | options
        return serve(launch or self.launch(), **given)

    def everything(self, server: Server) -> list[int]:
        """Ids of all processes of a server; the workers' from the engine itself."""
        state, found = server.state, pids(self.folder)
        assert found["engine"] == state.engine.pid
        workers = found["workers"]
        assert isinstance(workers, list)
        return [state.supervisor.pid, state.guard.pid, state.engine.pid, *workers]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(tmp_path, monkeypatch)
    yield made
    stop_all()


def test_a_server_starts_answers_and_stops(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-key")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    launch = rig.launch()
    server = rig.serve(launch)
    assert server.alive
    assert server.ready
    assert server.address.url == f"http://127.0.0.1:{launch.port}"
    assert server.model == "beam-tiny"
    found = pids(rig.folder)
    words = found["words"]
    assert isinstance(words, list)
    assert words[1:] == launch.words[1:]  # what is printed is what is run
    assert found["key"] == "a-secret-key"
    assert found["path"] is None  # our source is not put on the engine's path
    assert rig.said[-1].stage == "ready"
    everything = rig.everything(server)
    assert all(runs(pid) for pid in everything)
    # Nothing that we wrote has the key; only this user can read it.
    cache = rig.folder / "cache"
    for path in cache.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path == cache
        assert path.is_dir() or "a-secret-key" not in path.read_text()
    server.stop()
    assert all_gone(everything, within=1.0)
    assert not server.alive
    assert server.clean
    assert running() == ()
    assert list((cache / "servers").glob("*.json")) == []
    server.stop()  # at once
    assert "signal 15" in server.tail(1)


def test_as_a_context(rig: Rig) -> None:
    with rig.serve() as server:
        everything = rig.everything(server)
    assert all_gone(everything, within=1.0)


def test_progress_is_what_the_engine_says(rig: Rig) -> None:
    rig.behave(log=str(ADAPTIVE), parts=5, pause=0.05)
    rig.serve()
    texts = [progress.text for progress in rig.said]
    for said in (
        "vLLM 0.33.0 begins",
        "weights loaded: 117.8 GiB a GPU in 4.52 s",
        "KV cache: 12.34 GiB a GPU",
        "KV cache: 17.15 requests of 65,536 tokens at once",
        "warmed up in 28.46 s",
        "capturing CUDA graphs (FULL): 5 of 5",
        "capturing CUDA graphs (drafter, FULL): 5 of 5",
        "CUDA graphs captured in 9 s, 0.17 GiB",
        "engine initialised in 53.00 s",
    ):
        assert texts.count(said) == 1, (said, texts)
    seconds = [progress.seconds for progress in rig.said]
    assert seconds == sorted(seconds)
    assert 0 <= seconds[0] <= seconds[-1] < 20
    fractions = {progress.text: progress.fraction for progress in rig.said}
    assert fractions["capturing CUDA graphs (FULL): 5 of 5"] == 1.0
    assert fractions["KV cache: 12.34 GiB a GPU"] is None
    order = [progress.stage for progress in rig.said]
    assert order.index("loading weights") < order.index("sizing the KV cache")
    assert order[-1] == "ready"
    json.dumps([progress.to_dict() for progress in rig.said])


@pytest.mark.parametrize("log", sorted(LOGS.glob("h200_*.txt")), ids=lambda path: path.stem)
def test_every_recorded_start_is_followed(log: Path) -> None:
    said = ProgressReader(log).new(1.0)
    assert {"starting", "loading weights", "sizing the KV cache"} <= {p.stage for p in said}
    assert len({p.text for p in said}) == len(said)
    assert all("\x1b" not in p.text for p in said)


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    data = ADAPTIVE.read_bytes()
    whole = [p.text for p in ProgressReader(ADAPTIVE).new(0.0)]
    log = tmp_path / "log"
    log.write_bytes(b"earlier\n")
    reader, said = ProgressReader(log, start=8), []
    for at in range(0, len(data), 997):  # cuts lines, bars and characters of several bytes
        with log.open("ab") as file:
            file.write(data[at : at + 997])
        said += reader.new(0.0)
    assert [p.text for p in said] == whole
    assert reader.new(0.0) == []
    log.unlink()
    assert reader.new(0.0) == []
    assert last_lines(log) == ()


# -- what ends what --------------------------------------------------------------------------------


def test_engine_killed(rig: Rig) -> None:
    server = rig.serve()
    everything = rig.everything(server)
    os.kill(server.state.engine.pid, signal.SIGKILL)
    assert all_gone(everything)
    assert running() == ()
    assert not server.alive
    assert not server.clean
    assert list((rig.folder / "cache" / "servers").glob("*.json")) == []


def test_supervisor_killed(rig: Rig) -> None:
    server = rig.serve()
    everything = rig.everything(server)
    os.kill(server.pid, signal.SIGKILL)
    assert all_gone(everything)
    assert running() == ()
    assert list((rig.folder / "cache" / "servers").glob("*.json")) == []  # the stale file went


def test_guard_killed(rig: Rig) -> None:
    server = rig.serve()
    everything = rig.everything(server)
    os.kill(server.state.guard.pid, signal.SIGKILL)
    assert all_gone(everything)
    assert running() == ()


def test_supervisor_and_guard_killed(rig: Rig) -> None:
    """The engine itself is told; its workers are its own affair then."""
    server = rig.serve()
    everything = rig.everything(server)
    os.kill(server.state.guard.pid, signal.SIGSTOP)  # so that it cannot act before it is killed
    os.kill(server.pid, signal.SIGKILL)
    os.kill(server.state.guard.pid, signal.SIGKILL)
    assert all_gone(everything[:3])
    for pid in everything[3:]:
        if runs(pid):
            os.kill(pid, signal.SIGKILL)
    assert running() == ()


def orphan(rig: Rig, server: Server) -> list[int]:
    """A server of whose processes only the engine and its workers are left."""
    everything = rig.everything(server)
    os.kill(server.state.guard.pid, signal.SIGSTOP)
    os.kill(server.pid, signal.SIGKILL)
    os.kill(server.state.guard.pid, signal.SIGKILL)
    assert all_gone(everything[:2])
    return everything


def test_an_engine_that_nobody_owns_is_found_and_ended(rig: Rig) -> None:
    rig.behave(deaf=True)
    server = rig.serve(stop_seconds=0.3)
    everything = orphan(rig, server)
    assert all(runs(pid) for pid in everything[2:])
    (found,) = running()
    assert found.alive
    assert found.ready
    assert found.state == server.state
    with pytest.raises(ServingError, match="what is left of your server beam-tiny"):
        rig.serve(rig.launch(port=server.port))
    with pytest.raises(ServingError, match=rf"goes on alone, process {server.state.engine.pid}"):
        found.wait(5.0)
    attach(server.port).stop()
    assert all_gone(everything, within=1.0)  # its worker in another session too
    assert running() == ()
    assert not server.alive
    server.stop()


def test_a_start_whose_owners_are_killed_leaves_nothing(rig: Rig) -> None:
    rig.behave(deaf=True, hang=True)
    everything: list[int] = []

    def strike(progress: Progress) -> None:
        (server,) = running()
        everything.extend(orphan(rig, server))

    with pytest.raises(ServingError, match=r"goes on alone.*it was ended"):
        rig.serve(say=strike, stop_seconds=0.3)
    assert all_gone(everything, within=1.0)
    assert running() == ()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_while_it_stops(rig: Rig, victim: int) -> None:
    rig.behave(deaf=True)
    server = rig.serve(stop_seconds=1.0)
    everything = rig.everything(server)
    timer = threading.Timer(0.3, os.kill, (everything[victim], signal.SIGKILL))
    timer.start()
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 8
    assert all_gone(everything, within=2.0)
    assert running() == ()


def test_an_engine_that_does_not_listen_is_killed(rig: Rig) -> None:
    rig.behave(deaf=True)
    server = rig.serve(stop_seconds=0.5)
    everything = rig.everything(server)
    began = time.monotonic()
    server.stop()
    assert 0.4 < time.monotonic() - began < 5
    assert all_gone(everything, within=1.0)
    assert running() == ()


PROGRAM = """
import json, sys, time
from workbench.serving.launch.launch import launch_for
from workbench.serving.server.server import serve
port, engine, keep, wait = json.loads(sys.argv[1])
server = serve(launch_for("beam-tiny", cpu=True, port=port), engine=engine, keep=keep, wait=wait)
print(server.pid, flush=True)
time.sleep(600)
"""


def start_program(rig: Rig, *, keep: bool, wait: bool = True) -> subprocess.Popen[str]:
    """Another program, in a process group of its own, that has started a server."""
    request = json.dumps([free_port(), str(rig.engine), keep, wait])
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), request],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline().strip().isdigit()
    return program


def end_program(program: subprocess.Popen[str], number: int) -> None:
    """What a restarted kernel's process group gets, or a program that is killed."""
    os.killpg(program.pid, number)
    program.wait(10)
    assert program.stdout is not None
    program.stdout.close()


def test_a_kept_server_outlives_its_program_and_is_found(rig: Rig) -> None:
    end_program(start_program(rig, keep=True), signal.SIGKILL)
    (server,) = running()
    everything = rig.everything(server)
    time.sleep(0.2)
    assert all(runs(pid) for pid in everything)
    assert server.ready
    again = attach(server.port)
    assert attach(pid=server.pid).state == attach().state == again.state == server.state
    assert again.wait(5.0, rig.said.append) is again
    again.stop()
    assert all_gone(everything, within=1.0)
    assert running() == ()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_unkept_server_ends_with_its_program(rig: Rig, number: int) -> None:
    program = start_program(rig, keep=False)
    (server,) = running()
    everything = rig.everything(server)
    end_program(program, number)
    assert all_gone(everything)
    assert running() == ()


# -- what goes wrong -------------------------------------------------------------------------------


def test_an_engine_that_dies_at_its_start(rig: Rig) -> None:
    rig.behave(code=3, log=str(ADAPTIVE))
    with pytest.raises(EngineEndedError) as caught:
        rig.serve()
    error = caught.value
    assert "ended with exit code 3 before it was ready" in error.sentence
    assert "ValueError: no <b>heads</b>" in error.sentence  # the cause, not what followed
    assert error.sentence.count("\n") == 0
    assert any("See root cause above" in line for line in error.lines)
    assert str(error).count("\n") == len(error.lines) >= 5
    assert "\x1b" not in str(error)
    found = pids(rig.folder)
    assert all_gone([found["engine"], *found["workers"]])  # type: ignore[list-item, misc]
    assert running() == ()


def test_a_start_that_takes_too_long(rig: Rig) -> None:
    rig.behave(hang=True)
    with pytest.raises(ServingError, match=r"not ready within 1 s.*log.*it was ended"):
        rig.serve(limit=1.0)
    found = pids(rig.folder)
    assert all_gone([found["engine"], *found["workers"]], within=1.0)  # type: ignore[list-item, misc]
    assert running() == ()


def test_an_interrupted_start(rig: Rig) -> None:
    rig.behave(hang=True)

    def interrupt(progress: Progress) -> None:
        rig.said.append(progress)
        if progress.stage == "starting":
            pids(rig.folder)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        rig.serve(say=interrupt)
    assert rig.said[-1].text == "interrupted; beam-tiny was ended before it was ready"
    found = pids(rig.folder)
    assert all_gone([found["engine"], *found["workers"]], within=1.0)  # type: ignore[list-item, misc]
    assert running() == ()


def test_a_port_that_is_taken(rig: Rig) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServingError, match=rf"port {port} of 127.0.0.1 cannot be had \(Addr"):
            rig.serve(rig.launch(port=port))
    server = rig.serve(wait=False)  # its engine has not opened the port yet
    with pytest.raises(ServingError, match=rf"your server beam-tiny, process {server.pid}"):
        rig.serve(rig.launch(port=server.port))
    assert len(running()) == 1


def test_two_at_once_for_one_port(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should both find it free, the second is turned away by the first one's file."""
    server = rig.serve()
    monkeypatch.setattr(servers, "check_port", lambda launch: None)
    with pytest.raises(ServingError, match=r"was not started: port .* belongs to the server"):
        rig.serve(rig.launch(port=server.port))
    assert [found.pid for found in running()] == [server.pid]
    assert server.ready


def test_a_state_that_cannot_be_written(rig: Rig) -> None:
    """What nobody could find again is not left running."""
    launch = rig.launch()
    first = rig.serve(wait=False)
    (path,) = (rig.folder / "cache" / "servers").glob("*.json")
    first.stop()
    (rig.folder / "pids.json").unlink(missing_ok=True)
    path.with_name(path.name.replace(str(first.port), str(launch.port), 1)).mkdir()
    with pytest.raises(ServingError, match=r"was not started: .* cannot be written"):
        rig.serve(launch)
    if (rig.folder / "pids.json").exists():
        found = pids(rig.folder)
        assert all_gone([found["engine"], *found["workers"]])  # type: ignore[list-item, misc]
    assert running() == ()


def test_a_lock_that_somebody_keeps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(server_state, "_LOCK_SECONDS", 0.2)
    with open(server_state.state_folder() / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ServingError, match=r"another program has held .*\.lock for"):
            running()
    assert running() == ()

    def refuse(descriptor: int, what: int) -> None:
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        with pytest.raises(ServingError, match=r"cannot be locked \(No locks"):
            running()


def test_folders_that_cannot_hold_a_state(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    with monkeypatch.context() as patched:
        for folder in ("/dev/null/x", "/proc/x", str(rig.engine)):
            patched.setenv("BEAM_WORKBENCH_CACHE", folder)
            with pytest.raises(ServingError, match=r"cannot be made .*BEAM_WORKBENCH_CACHE"):
                running()
        patched.delenv("BEAM_WORKBENCH_CACHE")
        patched.delenv("XDG_CACHE_HOME", raising=False)
        patched.setattr(Path, "home", homeless)
        with pytest.raises(ServingError, match=r"no folder .*set BEAM_WORKBENCH_CACHE"):
            running()


def test_what_a_server_leaves_is_named_from_the_root(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rig.folder)
    monkeypatch.setenv("BEAM_WORKBENCH_CACHE", "near")
    server = rig.serve(wait=False)
    assert server.log.is_absolute()
    assert server.log.is_relative_to(rig.folder / "near")
    server.stop()


@pytest.mark.parametrize(
    "change",
    [
        {"port": float("inf")}, {"port": "x"}, {"url": "http://a b"}, {"url": 3, "port": None},
        {"engine": 3}, {"engine": {"pid": [], "began": ""}}, {"command": 5}, {"began": "soon"},
        {"version": 2}, {"log_start": 1e400}, {"supervisor": None},
    ],
)  # fmt: skip
def test_a_damaged_state_is_no_server(rig: Rig, change: dict[str, Any]) -> None:
    server = rig.serve(wait=False)
    (path,) = (rig.folder / "cache" / "servers").glob("*.json")
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | change))
    assert running() == ()
    path.write_text(whole)
    server.stop()
    for text in ("[" * 200_000, "\x00", "[]", "null", '{"version": 1}', ""):
        path.write_text(text)
        assert running() == ()


ANSWERS = {
    "well": (b"HTTP/1.1 200 OK\r\n\r\n", True),
    "well, by the byte": ([bytes([x]) for x in b"HTTP/1.0 200 OK\r\n"], True),
    "500": (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", False),
    "200 in its words": (b"HTTP/1.1 503 200 OK\r\n\r\n", False),
    "moved": (b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n", False),
    "no HTTP": (b"SSH-2.0-OpenSSH 200 \r\n", False),
    "closed": (b"", False),
    "cut": (b"HTTP/1.1 2", False),
    "go on for ever": (b"HTTP/1.1 100 Continue\r\n\r\n" * 100, False),
    "silent": ([b"H"] * 1 + [None], False),
}


@pytest.mark.parametrize(("parts", "well"), ANSWERS.values(), ids=ANSWERS)
def test_what_counts_as_well(parts: Any, well: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_HEALTH_SECONDS", 0.5)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def answer() -> None:
            with suppress(OSError), listening.accept()[0] as connection:
                connection.recv(4096)
                for part in [parts] if isinstance(parts, bytes) else parts:
                    if part is None:
                        time.sleep(1.0)
                        return
                    connection.sendall(part)
                    time.sleep(0.005)

        thread = threading.Thread(target=answer)
        thread.start()
        began = time.monotonic()
        where = Address.of(f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert servers._healthy(where) is well
        assert time.monotonic() - began < 0.9
        thread.join()
    assert not servers._healthy(where)  # nobody listens any more


def test_a_hostile_log(tmp_path: Path) -> None:
    """A line of a megabyte, colours, text that is none, signs that turn the writing direction."""
    log = tmp_path / "log"
    hostile = (
        b"A" * (1 << 20) + b"\n" + b"\xff\xfe\x00\x1b]0;title\x07" + b"\xe2\x80\xae" * 9 + b"\n"
        b"\x1b[2J\x1b[31mINFO Loading weights took 3.5 seconds\r\n"
        b"Loading safetensors checkpoint shards: " + b"9" * 5000 + b"\n"
        b"KV cache memory: Available KV cache memory: " + b"1" * 400 + b".0 GiB\n"
        b"ValueError: \x1b[8m" + b"\xf0\x9f" * 300 + b"\n"
    )
    log.write_bytes(hostile)
    began = time.monotonic()
    reader, said = ProgressReader(log), []
    while part := reader.new(0.0):
        said += part
    while reader._at < len(hostile):
        said += reader.new(0.0)
    assert [p.text for p in said] == ["weights read in 3.5 s"]
    lines = last_lines(log)
    assert all(line.isprintable() and len(line) <= 4096 for line in lines)
    assert (first_error(log) or "").startswith("ValueError: ")
    assert time.monotonic() - began < 2


def test_a_supervisor_that_is_killed_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real = starting._first_line

    def strike(stream: Any) -> bytes:
        (line,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()[-1:]
        os.kill(int(line), signal.SIGKILL)
        return real(stream)

    monkeypatch.setattr(starting, "_first_line", strike)
    with pytest.raises(ServingError, match=r"was not started: its supervisor ended at once; the l"):
        rig.serve()
    assert running() == ()


def test_a_validation_error_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: "
        "1 validation error for SpeculativeConfig\n"
        "(APIServer pid=1)   Value error, DFlash2 wants the V2 runner [type=value_error]\n"
        "RuntimeError: consequence\n"
    )
    assert first_error(log) == (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig: "
        "Value error, DFlash2 wants the V2 runner [type=value_error]"
    )


def test_the_folder_of_an_environment_is_an_engine(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, words in (("python", ["-m", "vllm.entrypoints.cli.main"]), ("vllm", [])):
        program = tmp_path / "bin" / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        assert engine_command(tmp_path) == [str(program), *words]


def test_programs_that_are_not_there(rig: Rig) -> None:
    with pytest.raises(ServingError, match="was not found or cannot be run"):
        rig.serve(engine=rig.folder / "nothing")
    empty = rig.folder / "nothing in it"
    empty.mkdir()
    with pytest.raises(ServingError, match="is a folder without bin/vllm"):
        rig.serve(engine=empty)
    wrong = rig.folder / "wrong"
    wrong.write_text("#!/no/such/interpreter\n")
    wrong.chmod(0o755)
    with pytest.raises(ServingError, match=r"was not started: .*No such file"):
        rig.serve(engine=wrong)
    rig.monkeypatch.setenv("PATH", str(rig.folder / "empty"))
    with pytest.raises(ServingError, match="vLLM is not installed here"):
        rig.serve(engine=None)
    assert running() == ()


def test_a_python_without_vllm(rig: Rig) -> None:
    with pytest.raises(EngineEndedError, match="No module named 'vllm'"):
        rig.serve(engine=sys.executable)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_no_room_for_the_log(rig: Rig) -> None:
    with pytest.raises(ServingError, match=r"/dev/full cannot be written \(No space left"):
        rig.serve(log="/dev/full")
    with pytest.raises(ServingError, match="cannot be written"):
        rig.serve(log=rig.folder / "no" / "folder" / "log")
    assert not (rig.folder / "pids.json").exists()


def test_a_log_of_one_s_own_is_appended_to(rig: Rig) -> None:
    log = rig.folder / "own.log"
    log.write_text("ValueError: of another start\n")
    rig.behave(code=3)
    with pytest.raises(EngineEndedError, match="no <b>heads") as caught:
        rig.serve(log=log)
    assert "another start" not in str(caught.value)
    assert log.read_text().startswith("ValueError: of another start\nworkbench: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checkpoint": "/nowhere/at/all"}, "has no config.json"),
        ({"extra": ("--ssl-keyfile", "/k")}, "plain HTTP"),
        ({"host": "0.0.0.0", "foreign": True}, "set VLLM_API_KEY"),
    ],
)
def test_launches_that_cannot_be_started(rig: Rig, options: dict[str, Any], words: str) -> None:
    rig.monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ServingError, match=words):
        rig.serve(rig.launch(**options))
    for launch, why in (
        (launch_for("beam-501b"), "checkpoint is missing"),
        (launch_for("beam-501b", tp=8, host_gpus=4), "takes 2 hosts"),
    ):
        with pytest.raises(ServingError, match=why):
            rig.serve(launch)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), "5", True, 1e9])
def test_limits_are_seconds(rig: Rig, limit: Any) -> None:
    with pytest.raises(ServingError, match="limit is a number of seconds"):
        rig.serve(limit=limit)


def test_attach_says_what_there_is(rig: Rig) -> None:
    with pytest.raises(ServingError, match=r"no server of yours runs; start one"):
        attach()
    first, second = rig.serve(wait=False), rig.serve(wait=False)
    with pytest.raises(ServingError, match=f"several servers run: .*{first.port}"):
        attach()
    with pytest.raises(ServingError, match=f"has port 1; there is .*{second.port}"):
        attach(1)
    with pytest.raises(ServingError, match="has port 65535; there is"):  # as it is typed
        attach(65535)
    assert {server.pid for server in stop_all()} == {first.pid, second.pid}
    assert running() == ()


def test_an_id_that_is_used_again_is_not_taken_for_the_server(rig: Rig) -> None:
    """A file that names a process which began at another time, and one that is no state."""
    server = rig.serve()
    folder = rig.folder / "cache" / "servers"
    (path,) = folder.glob("*.json")
    document = json.loads(path.read_text())
    server.stop()
    me = os.getpid()
    for name in ("supervisor", "guard", "engine"):
        document[name] = {"pid": me, "began": "at another time"}
    path.write_text(json.dumps(document))
    assert running() == ()
    assert not path.exists()
    path.write_text("{")
    assert running() == ()
    assert not path.exists()
    began = server_state.began(me)
    assert began is not None
    document["supervisor"] = {"pid": me, "began": began}
    document["machine"] = "another"
    path.write_text(json.dumps(document))
    assert running() == ()


def test_old_logs_are_forgotten(rig: Rig) -> None:
    logs = rig.folder / "cache" / "servers" / "logs"
    logs.mkdir(parents=True)
    for i in range(30):
        (logs / f"2000{i:04}-000000-1-1.log").write_text("x")
    server = rig.serve(wait=False)
    left = sorted(logs.glob("*.log"))
    assert len(left) == 20
    assert server.log in left
    assert left[0].name.startswith("20000011")
