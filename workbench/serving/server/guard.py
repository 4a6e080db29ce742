"""The leader of an engine's process group: it starts the engine and sees that nothing of it stays.

``python -m workbench.serving.server.guard``, started by the supervisor in a session of its own.
Standard input is one line of JSON, what to start, and then stays open as long as the engine is
wanted: its end, by a stop or because the supervisor was killed, ends the group (SIGTERM, a limit,
SIGKILL). Standard output is JSON lines: the engine's process, or why there is none, and how it
ended.

On Linux the engine's descendants become children of this process when their parents end, whatever
session they put themselves in, so that the last one can be found.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

_SUBREAPER, _DEATH_SIGNAL = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG of prctl(2)
_ORPHAN_SECONDS = 5.0  # for what is left of an engine that has ended
_KILL_SECONDS = 10.0  # how long a process may take to end after SIGKILL


def ignore(number: int, frame: FrameType | None) -> None:
    """A handler, not SIG_IGN: programs that are started inherit what is ignored, but no handler."""


class Wakes:
    """A pipe that becomes readable when a signal comes, for ``select``."""

    def __init__(self, *numbers: int) -> None:
        self.descriptor, end = os.pipe()
        for descriptor in (self.descriptor, end):
            os.set_blocking(descriptor, False)
        self.seen: set[int] = set()
        for number in numbers:
            signal.signal(number, ignore)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)

    def drain(self) -> None:
        """Note which signals came."""
        with suppress(BlockingIOError):
            while data := os.read(self.descriptor, 512):
                self.seen.update(data)


def read_line(descriptor: int) -> str | None:
    """One line of a pipe, without reading beyond it; None where it ends before."""
    data = bytearray()
    while True:
        byte = os.read(descriptor, 1)
        if not byte:
            return None
        if byte == b"\n":
            return data.decode()
        data += byte


def say(message: dict[str, Any]) -> None:
    """A line of JSON on standard output; if nobody listens, that is noticed elsewhere."""
    with suppress(OSError):
        os.write(1, (json.dumps(message) + "\n").encode())


def adopt_descendants() -> None:
    """Become the parent of descendants whose parents end (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """Processes whose parent is this one, ended ones that were not asked about included (Linux)."""
    me, found = str(os.getpid()), []
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                if words[1] == me:
                    found.append(int(entry.name))
    return found


def reap() -> dict[int, int]:
    """Exit codes of children that ended, by id; a signal is a negative number."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def kill_children() -> None:
    """End every descendant that is left, now (Linux)."""
    until = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < until:
        reap()
        left = children()
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _start(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    variables = dict(os.environ)
    for name, value in request["environment"].items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    guard = os.getpid()
    prctl = None
    if sys.platform == "linux":
        import ctypes

        prctl = ctypes.CDLL(None).prctl

    def follow() -> None:
        """In the engine, before it is one: end with this process, even if that is killed."""
        if prctl is not None:
            prctl(_DEATH_SIGNAL, int(signal.SIGTERM))
            if os.getppid() != guard:
                os._exit(1)

    return subprocess.Popen(
        request["command"],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=2,  # the log
        stderr=2,
        preexec_fn=follow,  # there are no threads here that it could meet
    )


def _end_group(wakes: Wakes, engine: int, code: int | None, seconds: float) -> int | None:
    """SIGTERM to the group, which is only noted here; SIGKILL to what is left after ``seconds``.

    What the engine leaves behind when it ends, in whatever group, is told by itself and has little
    time. Returns the engine's exit code, None where it had to be killed.
    """
    with suppress(OSError):
        os.killpg(os.getpgrp(), signal.SIGTERM)
    until = time.monotonic() + seconds
    told: set[int] = set()
    while (left := until - time.monotonic()) > 0:
        code = reap().get(engine, code)
        rest = children() if sys.platform == "linux" else [engine] * (code is None)
        if not rest:
            return code
        if code is not None:
            if not told:
                until = min(until, time.monotonic() + _ORPHAN_SECONDS)
            for pid in set(rest) - told:
                told.add(pid)
                with suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
        select.select([wakes.descriptor], [], [], min(left, 0.2))
        wakes.drain()
    kill_children()
    return code


def main() -> int:
    """Start, watch and end one engine."""
    wakes = Wakes(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    adopt_descendants()
    line = read_line(0)
    if line is None:  # the supervisor is gone already
        return 1
    request = json.loads(line)
    try:
        engine = _start(request).pid
    except OSError as error:
        say({"error": f"{request['command'][0]}: {error.strerror or error}"})
        return 1
    say({"engine": engine})
    code: int | None = None
    wanted = True
    while wanted and code is None:
        ready, _, _ = select.select([0, wakes.descriptor], [], [])
        wakes.drain()
        code = reap().get(engine)
        wanted = not (0 in ready and not os.read(0, 512))
    code = _end_group(wakes, engine, code, float(request["stop_seconds"]))
    say({"ended": code, "asked": not wanted})
    if sys.platform != "linux":  # the group's last processes, this one among them
        os.killpg(os.getpgrp(), signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
