"""An engine that nobody owns any more: its supervisor and its guard were killed, and it stayed."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from workbench.serving.server.server_state import Process, State, began

_KILL_SECONDS = 10.0  # how long a process may take to end after SIGKILL


def end_left_over(state: State) -> None:
    """End the engine and what it started: SIGTERM, ``state.stop_seconds``, SIGKILL.

    Of a process that left the engine's group and whose parent has ended already nobody knows.
    """
    family = _family(state)
    _send(family, signal.SIGTERM)
    until = time.monotonic() + state.stop_seconds
    while any(process.alive for process in family) and time.monotonic() < until:
        family |= _family(state)
        time.sleep(0.05)
    until = time.monotonic() + _KILL_SECONDS
    while any(process.alive for process in family) and time.monotonic() < until:
        _send(family, signal.SIGKILL)
        family |= _family(state)
        time.sleep(0.02)


def _send(family: set[Process], number: int) -> None:
    for process in family:
        if process.alive:
            with suppress(OSError):
                os.kill(process.pid, number)


def _family(state: State) -> set[Process]:
    """The engine, its descendants, and what else is in the group that its guard led."""
    if not state.engine.alive:
        return set()
    found, parents = {state.engine.pid}, dict[int, int]()
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                parents[int(entry.name)] = int(words[1])
                if int(words[2]) == state.guard.pid == _group(state.engine.pid):
                    found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    started = {pid: began(pid) for pid in found}
    return {Process(pid=pid, began=began) for pid, began in started.items() if began is not None}


def _group(pid: int) -> int | None:
    with suppress(OSError):
        return os.getpgid(pid)
    return None
