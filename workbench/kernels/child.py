"""A Python of its own for code that may crash, hang or compile: started, listened to, ended.

``trial.py`` checks variants in one, ``triton_compile.py`` compiles in one, and the ranks of
``parallel/start.py`` are started in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import workbench

# In the environment of a child: its parent's process id. A child starts no children of this kind.
MARK = "WORKBENCH_KERNELS_CHILD_OF"
LINE_BYTES = 1 << 20  # of one answer; longer is none

# Runs before anything is imported. Linux ends the child with its parent (prctl's PR_SET_PDEATHSIG,
# 1), and one whose parent is gone already ends by itself. With -P neither the working directory nor
# the folder of a script hides a module of the standard library.
_START = """
import os, sys
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(os.environ[sys.argv.pop(1)]):
    os._exit(1)
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def command(mark: str, module: str, *arguments: str) -> list[str]:
    """How a module is run in a child of the process whose id the variable ``mark`` says."""
    return [sys.executable, "-P", "-c", _START, mark, module, *arguments]


def surroundings(mark: str, changes: Mapping[str, str | None]) -> dict[str, str]:
    """A child's environment: this one's with ``changes`` (None: without it), which finds us."""
    wanted: dict[str, str | None] = {**os.environ, **changes}
    root = str(Path(workbench.__file__).resolve().parent.parent)
    paths = [root, *filter(None, (wanted.get("PYTHONPATH") or "").split(os.pathsep))]
    wanted |= {mark: str(os.getpid()), "PYTHONPATH": os.pathsep.join(paths)}
    return {name: value for name, value in wanted.items() if value is not None}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended: exit ``code`` (negative: a signal), out of time, the end of its stderr.

    ``spoiled``: it wrote something that is no answer, and was ended for it.
    """

    code: int
    late: bool
    spoiled: bool
    output: str

    @property
    def how(self) -> str:
        """The exit code or the signal in words."""
        if self.code >= 0:
            return f"exit code {self.code}"
        return f"signal {signal_name(-self.code)}"


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number for one that Python has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def run_child(
    module: str,
    request: str,
    deadline: float,
    take: Callable[[dict[str, Any]], bool],
    *,
    output_bytes: int = 4000,
    **environment: str | None,
) -> Ended:
    """Run a module of the workbench in a Python of its own: ``request`` on its stdin, JSON back.

    Every line that it writes must be a JSON object that ``take`` accepts; anything else ends it
    and raises nothing here. ``deadline`` is a time of ``time.monotonic``; an ``environment``
    variable that is None is left out. The child and its process group are gone when this returns,
    also by an exception (KeyboardInterrupt), and the child itself where this process is killed
    (Linux).
    """
    late = spoiled = False
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as asked:
        asked.write(request.encode())
        asked.seek(0)
        child = subprocess.Popen(
            command(MARK, module),
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=surroundings(MARK, environment),
            start_new_session=True,  # so that what it starts (ptxas) goes with it
        )
        assert child.stdout is not None
        lines: queue.Queue[bytes] = queue.Queue()
        reader = threading.Thread(target=_read_lines, args=(child.stdout, lines), daemon=True)
        reader.start()
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    late = True
                    break
                try:
                    line = lines.get(timeout=min(left, 1.0))
                except queue.Empty:
                    if child.poll() is not None:  # another process holds the pipe open
                        break
                    continue
                if not line:
                    break
                if not taken(line, take):
                    spoiled = True
                    break
            if not (late or spoiled):
                child.wait(timeout=max(0.0, min(deadline - time.monotonic(), 60.0)) + 5)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            reader.join(timeout=2)
            if not reader.is_alive():  # else a process that left the group holds the pipe open
                child.stdout.close()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - output_bytes))
        output = errors.read().decode(errors="replace")
    return Ended(code=child.returncode, late=late, spoiled=spoiled, output=output)


def taken(line: bytes, take: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether a line is a JSON object that ``take`` accepts."""
    try:
        message = json.loads(line.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError, MemoryError):
        return False
    return isinstance(message, dict) and take(message)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _read_lines(stream: Any, lines: queue.Queue[bytes]) -> None:
    while line := stream.readline(LINE_BYTES):
        lines.put(line)
    lines.put(b"")


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold, and no bool."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and abs(value) <= sys.float_info.max  # not-a-number is not


def whole_characters(text: str) -> str:
    """The text without halves of surrogate pairs, which no file or terminal takes."""
    return text.encode("utf-8", "replace").decode()
