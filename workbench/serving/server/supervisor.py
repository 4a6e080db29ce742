"""The process that owns a server: it outlives the program that started it, the engine never it.

``python -m workbench.serving.server.supervisor``, started by
:mod:`workbench.serving.server.starting` in a session of its own. Standard input is one line of
JSON; unless the server is to be kept, its end means that the program is gone, and ends the server.
Standard output is one line of JSON, the state or why there is none.
:mod:`workbench.serving.server.server` says what ends what.
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
from typing import Any

from workbench.errors import WorkbenchError
from workbench.serving.server.guard import Wakes, adopt_descendants, kill_children, read_line, say
from workbench.serving.server.server_state import Process, State, began, remove, save

_MARGIN = 20.0  # seconds beyond the guard's own limit


def _process(pid: int) -> Process:
    return Process(pid=pid, began=began(pid) or "")


class _Guard:
    """The guard, as its parent sees it: a pipe that keeps it, a pipe that it speaks on."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.stop_seconds = float(request["stop_seconds"])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "workbench.serving.server.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._keeps = self._process.stdin
        self.voice = self._process.stdout.fileno()
        self.pid = self._process.pid
        asked = {name: request[name] for name in ("command", "environment", "stop_seconds")}
        with suppress(OSError):  # it ended at once, which the next line tells
            self._keeps.write((json.dumps(asked) + "\n").encode())
            self._keeps.flush()

    def line(self) -> dict[str, Any] | None:
        """The next thing it says; None where it is gone."""
        line = read_line(self.voice)
        return None if line is None else json.loads(line)

    def let_go(self) -> dict[str, Any] | None:
        """Ask for the end and wait for it; the last thing that it says."""
        with suppress(OSError):
            self._keeps.close()
        until, last = time.monotonic() + self.stop_seconds + _MARGIN, None
        while (left := until - time.monotonic()) > 0:
            if not select.select([self.voice], [], [], left)[0]:
                break
            line = self.line()
            if line is None:
                break
            last = line
        return last

    def finish(self) -> int:
        """See that the group is gone. The guard's id is not free for others before it is waited
        for, so the group that is killed is the right one."""
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        kill_children()  # what the guard, if it was killed, has left to this process
        return code


def main() -> int:
    """Start one server and own it to its end."""
    wakes = Wakes(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    adopt_descendants()
    line = read_line(0)
    if line is None:  # who asked is gone before it said what for
        return 1
    request = json.loads(line)
    guard = _Guard(request)
    first = guard.line() or {"error": "the guard process ended at once"}
    state = None
    if "engine" in first:
        state = State(
            supervisor=_process(os.getpid()),
            guard=_process(guard.pid),
            engine=_process(first["engine"]),
            **request["state"] | {"command": tuple(request["command"])},
        )
        try:
            save(state)
        except WorkbenchError as error:
            first, state = {"error": str(error)}, None
    say(first if state is None else {"state": state.to_dict()})
    _close_output()
    if state is None:
        guard.let_go()
        guard.finish()
        return 1
    try:
        ended = _watch(guard, wakes, keep=state.keep)
    finally:
        code = guard.finish()
        with suppress(WorkbenchError):  # whoever reads it next sees that it is stale
            remove(state)
    return _report(ended, code)


def _watch(guard: _Guard, wakes: Wakes, *, keep: bool) -> dict[str, Any] | None:
    """Wait for the end of the engine, a request to end it, or the end of the program."""
    if keep:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    while True:
        waits = [guard.voice, wakes.descriptor, *([] if keep else [0])]
        ready, _, _ = select.select(waits, [], [])
        wakes.drain()
        if guard.voice in ready:
            return guard.line()
        gone = not keep and 0 in ready and not os.read(0, 512)
        if gone or signal.SIGTERM in wakes.seen:
            return guard.let_go()


def _close_output() -> None:
    """Let go of the pipe to whoever started this: it may be gone long before this ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def _report(ended: dict[str, Any] | None, guard: int) -> int:
    """A last line for the log, and the exit status: 0 after a stop, else the engine's, or 128 + n
    for a signal n."""
    code = None if ended is None else ended.get("ended")
    asked = ended is not None and bool(ended.get("asked"))
    if code is None:
        how = f"was killed with its guard (status {guard})" if ended is None else "was killed"
        code = -int(signal.SIGKILL)
    else:
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
    with suppress(OSError):
        os.write(2, f"workbench: the engine {how}\n".encode())
    if asked:
        return 0
    return int(code) if code >= 0 else 128 - int(code)


if __name__ == "__main__":
    sys.exit(main())
