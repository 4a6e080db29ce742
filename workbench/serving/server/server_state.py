"""Which servers run: a small file for each, in the user's cache, that outlives whoever started it.

A process is named by its id and the time it began, since ids are used again. A file whose processes
are gone is stale and is removed by whoever sees it; one whose engine goes on without an owner is
kept, so that the engine can be found and ended. Files of another machine (a home folder can be
shared) are left alone. No file holds a secret: a key is never among a launch's words.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from workbench.errors import ServingError
from workbench.files import FileError, cache_folder, read_json, write_whole
from workbench.serving.address import Address

_VERSION = 1
_LOCK_SECONDS = 10.0  # what is done under it takes milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of this machine: its id, and when it began in the system's own words."""

    pid: int
    began: str

    @property
    def alive(self) -> bool:
        """Whether it still runs; an ended one that nobody has asked about does not."""
        return began(self.pid) == self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One server.

    Attributes:
        supervisor: the process that owns it; ``guard``: the leader of the engine's process group;
            ``engine``: the engine's first process.
        url, model: where it listens, what clients call its model.
        command: the words it was started with.
        log, log_start: the file that it writes to, and where in it this start begins (bytes).
        began: when it was started, seconds since 1970.
        keep: whether it outlives the program that started it.
        stop_seconds: how long it may take to end before it is killed.
    """

    supervisor: Process
    guard: Process
    engine: Process
    url: str
    port: int
    model: str
    command: tuple[str, ...]
    log: str
    log_start: int
    began: float
    keep: bool
    stop_seconds: float

    @property
    def left_over(self) -> bool:
        """Whether the engine goes on although both that own it were killed."""
        return not self.supervisor.alive and not self.guard.alive and self.engine.alive

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> State:
        """The state in a document.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is none.
        """
        values = {field.name: data[field.name] for field in fields(cls)}
        for name in ("supervisor", "guard", "engine"):
            process = values[name]
            values[name] = Process(pid=int(process["pid"]), began=str(process["began"]))
        values |= {name: str(values[name]) for name in ("url", "model", "log")}
        values |= {name: int(values[name]) for name in ("port", "log_start")}
        values |= {name: float(values[name]) for name in ("began", "stop_seconds")}
        values["command"] = tuple(str(word) for word in values["command"])
        values["keep"] = bool(values["keep"])
        Address.of(values["url"], foreign=True)  # a ServingError is a ValueError
        return cls(**values)


def began(pid: int) -> str | None:
    """When a process began; None where there is none of that id, or it has ended already."""
    if sys.platform != "linux":
        return _began_by_ps(pid)
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may hold anything.
    words = text.rpartition(")")[2].split()
    if len(words) < 20 or words[0] in ("Z", "X", "x"):
        return None
    return f"{_boot()} {words[19]}"


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    return ""


def _began_by_ps(pid: int) -> str | None:
    try:
        done = subprocess.run(
            ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError:
        return None
    status, _, start = done.stdout.strip().partition(" ")
    return start.strip() if start and not status.startswith("Z") else None


def state_folder() -> Path:
    """The folder of the files and logs, made if need be, for this user alone.

    Raises:
        ServingError: it cannot be made.
    """
    try:
        # From the root: what stands in a file is read by programs in other folders.
        folder = Path(os.path.abspath(cache_folder() / "servers"))
    except (OSError, RuntimeError) as error:  # an account without a home, a folder that is gone
        raise ServingError(
            f"there is no folder for what servers leave ({error}); set BEAM_WORKBENCH_CACHE to one"
        ) from error
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServingError(
            f"{folder} cannot be made ({error.strerror or error}); free space, or set "
            "BEAM_WORKBENCH_CACHE to another folder"
        ) from error
    return folder


def save(state: State) -> None:
    """Write a state down.

    Raises:
        ServingError: another server of ours has the port, or the file cannot be written.
    """
    with _lock():
        path = _path(state.port)
        other = _read(path)
        if other is not None and (other.supervisor.alive or other.left_over):
            raise ServingError(
                f"port {state.port} belongs to the server {other.model} (process "
                f"{other.supervisor.pid}); stop it or choose another port"
            )
        document = {"version": _VERSION, "machine": machine()} | state.to_dict()
        try:
            write_whole(path, (json.dumps(document, indent=1) + "\n").encode())
        except FileError as error:
            raise ServingError(str(error)) from error
        with suppress(OSError):
            path.chmod(0o600)


def remove(state: State) -> None:
    """Take a state's file away, unless it is another server's by now."""
    with _lock():
        path = _path(state.port)
        if (there := _read(path)) is not None and there.supervisor == state.supervisor:
            with suppress(OSError):
                path.unlink()


def states() -> tuple[State, ...]:
    """The servers of this machine that run, left over ones too, by port. Stale files are removed
    with that."""
    found = []
    with _lock():
        for path in sorted(state_folder().glob(f"*.{_mark()}.json")):
            state = _read(path)
            if state is not None and (state.supervisor.alive or state.left_over):
                found.append(state)
            # One whose supervisor was killed is being ended by its guard, and then it is gone.
            elif state is None or not state.guard.alive:
                with suppress(OSError):
                    path.unlink()
    return tuple(sorted(found, key=lambda state: state.port))


def machine() -> str:
    """This machine, in a word that a shared home folder cannot mistake; so of a container."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{platform.node()} {namespace}".strip()


def _mark() -> str:
    return f"{zlib.crc32(machine().encode()):08x}"


def _path(port: int) -> Path:
    return state_folder() / f"{port}.{_mark()}.json"


def _read(path: Path) -> State | None:
    """The state in a file; None where it is missing or cannot be read as one of ours."""
    try:
        data = read_json(path)
        if data["machine"] != machine() or data["version"] != _VERSION:
            return None
        return State.from_dict(data)
    except (FileError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


@contextmanager
def _lock() -> Iterator[None]:
    """One at a time, of all programs: a file that is read as stale must not be a new one's."""
    try:
        import fcntl
    except ImportError:  # no servers are started there
        yield
        return
    path = state_folder() / ".lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ServingError(
            f"{path} cannot be opened ({error.strerror or error}); free space, or set "
            "BEAM_WORKBENCH_CACHE to another folder"
        ) from error
    try:
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ServingError(
                        f"another program has held {path} for {_LOCK_SECONDS:.0f} s; see which "
                        "(fuser, lsof) and end it, or set BEAM_WORKBENCH_CACHE to another folder"
                    ) from None
                time.sleep(0.01)
            except OSError as error:  # some network file systems have no locks
                raise ServingError(
                    f"{path} cannot be locked ({error.strerror or error}); set "
                    "BEAM_WORKBENCH_CACHE to a folder of this machine"
                ) from error
        yield
    finally:
        os.close(descriptor)
