"""A vLLM server of this machine: started, waited for, found again, ended.

::

    program (notebook, command line)
        └─ supervisor   owns the server; a file in the user's cache describes it
             └─ guard   leads the engine's process group
                  └─ engine: vllm serve, and all that it starts

Each is in a session of its own, so Ctrl-C in a terminal or an interrupted notebook cell reaches the
program alone. What ends what:

- ``Server.stop()``: the supervisor lets the guard go, which sends SIGTERM to the group, waits
  ``stop_seconds``, and kills what is left. The file goes last.
- The engine ends or is killed: the guard ends its workers, the supervisor ends, the file goes.
- The supervisor is killed, even with SIGKILL: the guard ends the group in the same way. The file is
  stale then, which whoever reads it next sees and removes.
- The guard is killed: the supervisor kills the group, and what had left the group.
- Both are killed at once: Linux sends the engine SIGTERM, and its own shutdown has to do the rest.
  An engine that goes on all the same is still found, and ``stop()`` ends it and its group.
- The program ends, is killed, or a notebook's kernel restarts: with ``keep=True`` (the library's
  default) the server goes on, and :func:`running` or :func:`attach` finds it again; with
  ``keep=False`` (the command line's) it ends.

Processes that the engine starts in a session of their own are found by their parents, on Linux. A
Ray cluster was started by somebody else and is left alone. Nothing waits for a restart of the
machine: a server does not come back.

Only the address of the launch is asked, loopback as a rule, without a proxy; redirects are not
followed. The API key stays in the environment, which the engine inherits: no file, word or message
of ours has it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from workbench.errors import ServingError
from workbench.model.asked import shown
from workbench.model.config import is_int, is_number
from workbench.serving.address import Address
from workbench.serving.launch.engine_program import engine_command
from workbench.serving.launch.launch import Launch
from workbench.serving.server.left_over import end_left_over
from workbench.serving.server.server_state import State, states
from workbench.serving.server.starting import (
    check_port,
    check_startable,
    open_log,
    start_supervised,
)
from workbench.serving.server.startup_progress import (
    Progress,
    ProgressReader,
    first_error,
    last_lines,
)

Say = Callable[[Progress], object]

START_SECONDS = 3600.0  # half a terabyte of weights from a slow disk
STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2
_HEALTH_SECONDS = 2.0
_STATUS = slice(8, 13)  # of "HTTP/1.1 200 OK"


class EngineEndedError(ServingError):
    """An engine that ended before it was ready: a ``sentence``, and the last ``lines`` of its log.

    The lines are text of the engine without control characters; a page escapes them.
    """

    def __init__(self, sentence: str, lines: tuple[str, ...]) -> None:
        super().__init__("\n  ".join((sentence, *lines)))
        self.sentence = sentence
        self.lines = lines


class Server:
    """A server that was started on this machine; :func:`serve` and :func:`attach` make it.

    Attributes:
        state: its processes, words and files.
        address: where it listens.
        model: what clients call its model.
        log: the file that the engine writes to.

    As a context manager it is stopped at the end of the block.
    """

    def __init__(self, state: State, child: subprocess.Popen[bytes] | None = None) -> None:
        self.state = state
        self.address = Address.of(state.url, foreign=True)  # checked when it was launched
        self.model = state.model
        self.log = Path(state.log)
        self._child = child

    @property
    def port(self) -> int:
        """The port."""
        return self.state.port

    @property
    def pid(self) -> int:
        """The supervisor's process id, which :func:`attach` takes."""
        return self.state.supervisor.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, ready or not."""
        owned = self.state.supervisor.alive if self._child is None else self._child.poll() is None
        return owned or self.state.left_over

    @property
    def clean(self) -> bool:
        """Whether it ended because it was told to, as far as the program that started it knows."""
        return self._child is not None and self._child.poll() == 0

    @property
    def ready(self) -> bool:
        """Whether it answers that it is well."""
        return self.alive and _healthy(self.address)

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return max(0.0, time.time() - self.state.began)

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        return "\n".join(last_lines(self.log, self.state.log_start, lines))

    def wait(self, limit: float = START_SECONDS, say: Say | None = None) -> Server:
        """Wait until it is ready, telling ``say`` how far it is; returns itself.

        Raises:
            EngineEndedError: it ended first.
            ServingError: it was not ready within ``limit`` seconds; it still runs.
        """
        until = time.monotonic() + limit
        reader = ProgressReader(self.log, self.state.log_start)
        while True:
            alive = self.alive  # before the log is read, so that its last words are
            for progress in reader.new(self.seconds):
                _tell(say, progress)
            if not alive:
                raise self._ended()
            if self.state.left_over:
                raise ServingError(
                    f"what owned {self.model} was killed and its engine goes on alone, process "
                    f"{self.state.engine.pid}; stop() or workbench serve --stop {self.port} ends it"
                )
            if _healthy(self.address) and self.alive:
                text = f"{self.model} is ready at {self.address}"
                _tell(say, Progress(seconds=self.seconds, stage="ready", text=text))
                return self
            if time.monotonic() > until:
                raise ServingError(
                    f"{self.model} was not ready within {limit:g} s; its log is {self.log}"
                )
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End it and wait until nothing of it is left; at once where it has ended already."""
        until = time.monotonic() + self.state.stop_seconds + 30.0
        with suppress(OSError):
            if self._child is not None and self._child.stdin is not None:
                self._child.stdin.close()
        self._signal(signal.SIGTERM)
        while self.alive or self.state.guard.alive:
            if self.state.left_over:
                end_left_over(self.state)
            if time.monotonic() > until:  # a supervisor that hangs: its end makes the guard end
                self._signal(signal.SIGKILL)
                if time.monotonic() > until + self.state.stop_seconds + 15.0:
                    raise ServingError(
                        f"process {self.state.guard.pid} of {self.model} does not end; look at "
                        f"it with ps, and at {self.log}"
                    )
            time.sleep(0.02)
        if self._child is not None:
            self._child.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        how = "ready" if self.ready else "starting or not answering" if self.alive else "ended"
        return f"Server({self.model} at {self.address}, {how}, process {self.pid}, log {self.log})"

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``workbench serve --list``."""
        return {
            "model": self.model,
            "url": self.address.url,
            "port": self.port,
            "pid": self.pid,
            "ready": self.ready,
            "seconds": round(self.seconds, 1),
            "log": str(self.log),
            "command": list(self.state.command),
        }

    def _signal(self, number: int) -> None:
        if self.state.supervisor.alive:  # else its id may be another process by now
            with suppress(OSError):
                os.kill(self.pid, number)

    def _ended(self) -> EngineEndedError:
        code = None if self._child is None else self._child.poll()
        how = "" if code is None else _in_words(code)
        start = self.state.log_start
        cause = first_error(self.log, start)
        named = f"; its log names {cause}" if cause else ""
        return EngineEndedError(
            f"the engine ended{how} before it was ready{named}; the whole log is {self.log}",
            last_lines(self.log, start),
        )


def serve(
    launch: Launch,
    *,
    engine: str | Path | None = None,
    log: str | Path | None = None,
    keep: bool = True,
    wait: bool = True,
    limit: float = START_SECONDS,
    stop_seconds: float = STOP_SECONDS,
    say: Say | None = None,
) -> Server:
    """Start ``vllm serve`` on this machine and wait until it answers.

    Args:
        launch: what to start.
        engine: the ``vllm`` program, or a Python that has vLLM; what is found here by default.
        log: a file to append to; a new one in the user's cache by default.
        keep: whether it outlives this program.
        wait: whether to wait; else :meth:`Server.wait` does.
        limit: seconds for the start, after which it is ended.
        stop_seconds: how long the engine may take to end before it is killed.
        say: told how far it is, such as ``print``.

    Raises:
        ServingError: it cannot be started here: a port that is taken, no such program or
            checkpoint, no room for the log, a start beyond its limit.
        EngineEndedError: the engine ended before it was ready.
        KeyboardInterrupt: as always, after the server was ended.
    """
    for name, value in (("limit", limit), ("stop_seconds", stop_seconds)):
        if not is_number(value) or not 0 < value < 1e6:
            raise ServingError(f"{name} is a number of seconds above 0, not {shown(value)}")
    check_startable(launch)
    command = [*engine_command(engine), *launch.words[1:]]
    check_port(launch)
    path, start = open_log(log, launch.port, command)
    state = {
        "url": launch.address.url,
        "port": launch.port,
        "model": launch.name,
        "log": str(path),
        "log_start": start,
        "began": time.time(),
        "keep": keep,
        "stop_seconds": float(stop_seconds),
    }
    server: Server | None = None
    try:
        server = Server(*start_supervised(command, launch.environment, path, state))
        text = f"started {launch.name}, process {server.pid}, log {path}"
        _tell(say, Progress(seconds=server.seconds, stage="starting", text=text))
        return server.wait(limit, say) if wait else server
    except BaseException as error:
        if server is None:
            raise
        running_still = server.alive
        server.stop()
        if isinstance(error, KeyboardInterrupt):
            text = f"interrupted; {launch.name} was ended before it was ready"
            _tell(say, Progress(seconds=server.seconds, stage="ended", text=text))
        elif isinstance(error, ServingError) and running_still:
            raise ServingError(f"{error}; it was ended") from None
        raise


def running() -> tuple[Server, ...]:
    """The servers of this user that run on this machine, by port; started by whatever program."""
    return tuple(Server(state) for state in states())


def attach(port: int | None = None, *, pid: int | None = None) -> Server:
    """A server that runs already, by its port or process; the only one where neither is given.

    Raises:
        ServingError: there is none, or more than one.
    """
    found = [
        server
        for server in running()
        if (port is None or server.port == port) and (pid is None or server.pid == pid)
    ]
    if len(found) == 1:
        return found[0]
    others = ", ".join(f"{server.model} on port {server.port}" for server in found or running())
    if found:
        raise ServingError(f"several servers run: {others}; name one by its port")
    asked = " and ".join(
        f"{name} {value if is_int(value) else shown(value)}"
        for name, value in (("port", port), ("process", pid))
        if value is not None
    )
    none = f"no server of yours has {asked}" if asked else "no server of yours runs"
    raise ServingError(f"{none}; {f'there is {others}' if others else 'start one with serve'}")


def stop_all() -> tuple[Server, ...]:
    """End every server of :func:`running`; the ones that were ended."""
    servers = running()
    for server in servers:
        server.stop()
    return servers


def _healthy(address: Address) -> bool:
    """Whether it answers 200, within two seconds in all; only the first line of it counts."""
    until, answer = time.monotonic() + _HEALTH_SECONDS, b""
    host = f"[{address.host}]" if ":" in address.host else address.host
    asked = f"GET {address.path}/health HTTP/1.1\r\nHost: {host}:{address.port}\r\n"
    try:
        with socket.create_connection((address.host, address.port), _HEALTH_SECONDS) as connection:
            connection.sendall(f"{asked}Connection: close\r\n\r\n".encode("ascii"))
            while len(answer) < _STATUS.stop and (left := until - time.monotonic()) > 0:
                connection.settimeout(left)
                if not (part := connection.recv(_STATUS.stop - len(answer))):
                    break
                answer += part
    except (OSError, ValueError):  # ValueError: a host that is no ASCII
        return False
    return answer.startswith(b"HTTP/1.") and answer[_STATUS] == b" 200 "


def _tell(say: Say | None, progress: Progress) -> None:
    if say is not None:
        say(progress)


def _in_words(code: int) -> str:
    """An exit status of the supervisor, which is the engine's."""
    if code == 0:
        return ", or was stopped by another program (exit code 0),"
    if code < 0:
        return f" with its supervisor, which was ended by signal {-code}"
    if code > 128:
        return f" by signal {code - 128}"
    return f" with exit code {code}"
