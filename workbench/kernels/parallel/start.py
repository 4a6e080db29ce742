"""Start several ranks of a job, listen to them, end them: what ``--gpus N`` stands on.

Each rank is a Python of its own (``rank_process.py``), in a session of its own, that ends with this
process. The first rank that ends badly decides what is said: its neighbours, whose collectives
break because it is gone, only report that they lost it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from workbench.errors import KernelError
from workbench.kernels.child import command, signal_name, surroundings, whole_characters
from workbench.kernels.parallel.ranks import CONNECT, LOOPBACK, STORE_PORT, without_multicast

# In the environment of a rank that run_ranks started: the process id of what started it.
MARK = "WORKBENCH_RANKS_CHILD_OF"
# Where it is set, the end of what every rank wrote on stderr is shown when one of them fails.
DEBUG = "WORKBENCH_DEBUG"
JOIN_SECONDS = 120.0  # until all ranks have met; importing torch from a cold disk takes most of it
GRACE_SECONDS = 1.0  # after an error, for one that came before it and is still on its way
LOST_SECONDS = 2.0  # after a rank lost another, for that other's reason
CLOSED_SECONDS = 10.0  # a rank with a full GPU closes its pipe long before it is gone
STOPPED_SECONDS = 10.0  # of a rank that a signal stopped, while the others wait for it
LEAVE_SECONDS = 10.0  # for ranks that have answered to leave by themselves
TERM_SECONDS = 3.0
KILL_SECONDS = 15.0  # the driver may hold a process while it frees the GPU's memory
LINE_BYTES = 1 << 30  # of one answer; longer is none
TAIL_BYTES = 4000  # of what a rank wrote on stderr, the end
FOLLOW_UP = "communication"  # the kind of an error that says: another rank is gone

_MODULE = "workbench.kernels.parallel.rank_process"
_SHARED_MEMORY = Path("/dev/shm")

# What often ends a rank by a signal, and what to do.
_SIGNALS = {
    "SIGKILL": "often because the machine's memory was full (dmesg says so): give fewer ranks or "
    "layers",
    "SIGBUS": "often because /dev/shm was full: free it or make it larger",
    "SIGSEGV": "a fault in compiled code, of a kernel or a library",
    "SIGABRT": "a library gave up",
    "SIGTERM": "somebody asked it to end",
    "SIGINT": "somebody interrupted it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended badly.

    ``at``: time.monotonic, which all processes of a machine read alike. ``kind``: "refused",
    "memory", "gpu", "defect", "ended" or :data:`FOLLOW_UP`. ``details``: a traceback, or "".
    """

    rank: int
    at: float
    kind: str
    sentence: str
    details: str = ""


@dataclass(slots=True, eq=False)
class _Rank:
    number: int
    child: subprocess.Popen[bytes]
    errors: IO[bytes]
    reader: threading.Thread
    here: bool = False  # its job is imported
    joined: bool = False
    answered: bool = False
    result: Any = None
    failure: Failure | None = None
    closed_at: float | None = None  # when its pipe was closed without an answer
    stopped_at: float | None = None  # since when a signal has stopped it
    swept: bool = field(default=False, repr=False)  # its process group is gone

    def gone(self) -> bool:
        """Whether it has ended; what it left running in its group is ended then."""
        if self.child.poll() is None:
            return False
        if not self.swept:  # at once: the number is another's some day
            self.swept = True
            _signal(self.child.pid, signal.SIGKILL)
        return True

    def tail(self) -> str:
        """The end of what it wrote on stderr."""
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - TAIL_BYTES))
        return whole_characters(self.errors.read().decode(errors="replace"))


def run_ranks(
    job: str,
    request: dict[str, Any],
    ranks: int,
    *,
    device: str = "cuda",
    told: Callable[[int, int, str], None] | None = None,
    environment: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """Run a job on ``ranks`` processes at once and return what its rank 0 answers.

    ``job`` is "module:function", a function of (request, :class:`Ranks`, told) that answers with a
    dict; ``request`` and the answer are what JSON can say. ``told`` hears rank 0's progress: how
    many of how many, and what is next. ``environment`` changes variables of the ranks (None takes
    one away). When this returns, also by an exception (KeyboardInterrupt), the ranks and what they
    started are gone; where this process is killed, Linux ends the ranks.

    Raises:
        KernelError: more ranks than GPUs; a request or an answer that JSON cannot say; ranks that
            do not meet; or what the first rank that ended badly says, with its traceback as a note
            where it was a defect.
    """
    job_parts(job)
    _check(ranks, device)
    try:
        asked = json.dumps(request, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise KernelError(f"the request for {job} is not what JSON can say: {error}") from error
    events: queue.Queue[tuple[_Rank, bytes, float]] = queue.Queue()
    started: list[_Rank] = []
    began = time.time()
    with contextlib.ExitStack() as held:
        port = _hold_store(held)
        try:
            for number in range(ranks):
                extra = _environment(number, ranks, device, port, environment or {})
                try:
                    started.append(_start(number, job, device, asked, extra, events, held))
                except (OSError, RuntimeError) as error:
                    reason = getattr(error, "strerror", None) or error
                    raise KernelError(
                        f"rank {number} of {ranks} could not be started: {reason}; it takes a "
                        "process, a thread and two temporary files (ulimit -a, TMPDIR)"
                    ) from error
            _watch(started, events, told)
            _wait(started, LEAVE_SECONDS)
        except BaseException as error:
            if stuck := _end(started):
                error.add_note(stuck)
            if os.environ.get(DEBUG):
                _show_tails(started)
            raise
        else:
            if stuck := _end(started):
                raise KernelError(stuck)
        finally:
            _sweep([each.child.pid for each in started], began)
    return dict(started[0].result)


def job_parts(job: str) -> tuple[str, str]:
    """Module and function of a job's name.

    Raises:
        KernelError: it is not "module:function".
    """
    module, _, function = job.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module) or not function.isidentifier():
        raise KernelError(f"{job!r} names no job; write module:function")
    return module, function


def on_loopback() -> dict[str, str]:
    """The environment of ranks on one host: their sockets are on the loopback interface alone.

    Gloo would ask for the host's name, which need not resolve to an address of this machine.
    """
    if sys.platform != "linux":
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def _check(ranks: int, device: str) -> None:
    if device not in ("cuda", "cpu"):
        raise KernelError(f"ranks run on cuda or cpu, not on {device!r}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise KernelError(f"{ranks!r} is no number of ranks; give 1 or more")
    if MARK in os.environ:
        raise KernelError("this process is one of several ranks already, and a rank starts none")
    if device == "cuda":
        import torch

        here = torch.cuda.device_count()
        if not here:
            raise KernelError("torch sees no GPU here, and each rank wants one; take device cpu")
        if ranks > here:
            raise KernelError(
                f"{ranks} ranks want a GPU each, and torch sees {here}; give --gpus {here} or fewer"
            )


def _hold_store(held: contextlib.ExitStack) -> int:
    """The port of a store where the ranks meet, for as long as ``held`` is open."""
    import torch.distributed as dist

    if not dist.is_available():
        raise KernelError("this torch was built without torch.distributed, which ranks speak by")
    # A store that opens its own socket listens on every interface.
    try:
        door = socket.create_server((LOOPBACK, 0))
    except OSError as error:
        raise KernelError(
            f"the ranks cannot meet on {LOOPBACK}: {error.strerror or error}; bring the loopback "
            "interface up, or let this process open more files (ulimit -n)"
        ) from error
    port = int(door.getsockname()[1])
    made: Any = dist.TCPStore  # type: ignore[attr-defined]
    # It connects to itself, and where it cannot, no Ctrl-C reaches it until its patience is over.
    try:
        store = [
            made(
                LOOPBACK, port, is_master=True, wait_for_workers=False,
                master_listen_fd=door.detach(), timeout=CONNECT,
            )
        ]  # fmt: skip
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise KernelError(
            f"the ranks cannot meet on {LOOPBACK}: {words:.160}; bring the loopback interface up, "
            "or let this process open more files (ulimit -n)"
        ) from error
    held.callback(store.clear)
    return port


def _environment(
    number: int, ranks: int, device: str, port: int, changes: Mapping[str, str | None]
) -> dict[str, str | None]:
    # Without its dump, a collective that timed out leaves no file in /tmp.
    made: dict[str, str | None] = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", **changes}
    if device == "cpu" and "OMP_NUM_THREADS" not in {**os.environ, **changes}:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        made["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    return made | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        STORE_PORT: str(port),
        **without_multicast(),
        **on_loopback(),
    }


def _start(
    number: int,
    job: str,
    device: str,
    asked: bytes,
    environment: Mapping[str, str | None],
    events: queue.Queue[tuple[_Rank, bytes, float]],
    held: contextlib.ExitStack,
) -> _Rank:
    # Opened to append, so that reading its end here moves no writer's place.
    errors: IO[bytes] = held.enter_context(tempfile.TemporaryFile("a+b"))  # noqa: SIM115 - held
    with tempfile.TemporaryFile() as request:  # one each: readers of one file share their place
        request.write(asked)
        request.seek(0)
        child = subprocess.Popen(
            command(MARK, _MODULE, job, "--device", device),
            stdin=request,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=surroundings(MARK, environment),
            start_new_session=True,  # so that what it starts (ptxas) goes with it
        )
    reader = threading.Thread(target=lambda: _read(rank, events), daemon=True)
    rank = _Rank(number, child, errors, reader)
    try:
        reader.start()
    except BaseException:  # nobody else knows of the child yet
        _signal(child.pid, signal.SIGKILL)
        child.communicate()
        raise
    return rank


def _read(rank: _Rank, events: queue.Queue[tuple[_Rank, bytes, float]]) -> None:
    assert rank.child.stdout is not None
    while line := rank.child.stdout.readline(LINE_BYTES):
        events.put((rank, line, time.monotonic()))
    events.put((rank, b"", time.monotonic()))


def _watch(
    ranks: Sequence[_Rank],
    events: queue.Queue[tuple[_Rank, bytes, float]],
    told: Callable[[int, int, str], None] | None,
) -> None:
    """Return when every rank has answered; raise what the first one says that ended badly."""
    deadline = time.monotonic() + JOIN_SECONDS
    noticed: float | None = None
    while not all(each.answered for each in ranks):
        failures = [each.failure for each in ranks if each.failure]
        now = time.monotonic()
        if failures:
            noticed = noticed or now
            lost = all(each.kind == FOLLOW_UP for each in failures)
            late = now >= noticed + (LOST_SECONDS if lost else GRACE_SECONDS)
            pending = any(each.closed_at and not each.failure for each in ranks)
            settled = all(each.failure or each.answered for each in ranks)
            if settled or (late and not pending):
                raise _error(failures, len(ranks))
        with contextlib.suppress(queue.Empty):
            rank, line, at = events.get(timeout=0.1)
            if line:
                _take(rank, line, at, told)
            elif not (rank.answered or rank.failure):
                rank.closed_at = at
            continue
        # Here everything that was said has been heard, also after this process itself was stopped.
        if not failures and now > deadline and not all(each.joined for each in ranks):
            raise KernelError(_apart(ranks))
        for rank in ranks:
            _look(rank)
            _refuse_stopped(rank, len(ranks))


def _take(
    rank: _Rank, line: bytes, at: float, told: Callable[[int, int, str], None] | None
) -> None:
    """What a rank says."""
    try:
        said = json.loads(line)
        if not isinstance(said, dict):
            raise ValueError
    except (ValueError, RecursionError):
        said = {"error": "it wrote what is no answer", "kind": "defect", "at": at}
        said["details"] = whole_characters(line[:TAIL_BYTES].decode(errors="replace"))
    if "told" in said:
        done, of, label = said["told"]
        if told is not None:
            told(done, of, label)
    elif "state" in said:
        rank.here = True
        rank.joined = said["state"] == "joined"
    elif "result" in said:
        rank.result = said["result"]
        rank.answered = True
    elif not rank.failure:
        rank.failure = Failure(
            rank=rank.number,
            at=said["at"],
            kind=said["kind"],
            sentence=said["error"],
            details=said["details"],
        )


def _look(rank: _Rank) -> None:
    """Find out how a rank ended that said nothing about it."""
    if rank.answered or rank.failure:
        return
    gone = rank.gone()
    now = time.monotonic()
    if rank.closed_at is None:
        if gone:  # another process holds its pipe open
            rank.closed_at = now
        return
    if not gone:
        if now < rank.closed_at + CLOSED_SECONDS:
            return
        how = "it stopped answering"
    elif rank.child.returncode < 0:
        name = signal_name(-rank.child.returncode)
        meaning = _SIGNALS.get(name, "")
        how = f"it was ended by {name}" + (f", {meaning}" if meaning else "")
    else:
        how = f"it ended with exit code {rank.child.returncode} and no answer"
    tail = rank.tail()
    last = next(filter(None, map(str.strip, reversed(tail.splitlines()))), "")
    # NCCL's watchdog aborts a process whose collective another rank has left.
    watchdog = rank.child.returncode == -signal.SIGABRT and "ProcessGroupNCCL" in tail
    rank.failure = Failure(
        rank=rank.number,
        at=rank.closed_at,
        kind=FOLLOW_UP if watchdog else "ended",
        sentence=how + (f"; its last words: {last[:300]}" if last else ""),
        details=tail,
    )


def _refuse_stopped(rank: _Rank, world: int) -> None:
    """Refuse to wait for a rank that a signal has stopped: the others would, for minutes.

    Raises:
        KernelError: it has not gone on for STOPPED_SECONDS.
    """
    if rank.answered or rank.failure or not is_stopped(rank.child.pid):
        rank.stopped_at = None
        return
    now = time.monotonic()
    rank.stopped_at = rank.stopped_at or now
    if now >= rank.stopped_at + STOPPED_SECONDS:
        raise KernelError(
            f"rank {rank.number} of {world} (process {rank.child.pid}) was stopped by a signal and "
            f"did not go on within {STOPPED_SECONDS:.0f} s, while the others waited for it; start "
            "again, and leave its process alone"
        )


def is_stopped(process: int) -> bool:
    """Whether a signal (SIGSTOP) has stopped a process; Linux says."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return status.rpartition(b")")[2].split()[:1] == [b"T"]


def first_of(failures: Sequence[Failure]) -> Failure:
    """What ended the others: the earliest that does not only say that another rank is gone."""
    own = [each for each in failures if each.kind != FOLLOW_UP] or failures
    return min(own, key=lambda each: (each.at, each.rank))


def _error(failures: Sequence[Failure], world: int) -> KernelError:
    first = first_of(failures)
    alike = len(failures) == world and len({each.sentence for each in failures}) == 1
    whose = "" if alike else f"rank {first.rank} of {world}: "
    error = KernelError(whose + first.sentence)
    if first.details and first.kind not in ("refused", "memory"):
        error.add_note(first.details)
    return error


def _apart(ranks: Sequence[_Rank]) -> str:
    """Why the ranks have not met, as far as it is known."""
    missing = [str(each.number) for each in ranks if not each.here]
    if missing:
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {len(ranks)}"
        return (
            f"{who} had not started after {JOIN_SECONDS:.0f} s; a slow disk delays the import of "
            "torch: try again, or start fewer ranks"
        )
    waiting = ", ".join(str(each.number) for each in ranks if not each.joined)
    return (
        f"the {len(ranks)} ranks started and did not meet within {JOIN_SECONDS:.0f} s (waiting: "
        f"{waiting}); another process may hold a GPU, or no connection over {LOOPBACK} is allowed"
    )


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _wait(ranks: Sequence[_Rank], seconds: float) -> bool:
    """Whether all ranks have ended within so many seconds."""
    end = time.monotonic() + seconds
    while [each for each in ranks if not each.gone()]:  # every one is looked at
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _end(ranks: Sequence[_Rank]) -> str:
    """End what still runs: asked first, then killed; a second Ctrl-C skips the asking.

    What it returns is "", or a sentence about processes that not even SIGKILL ends.
    """
    try:
        if not _wait(ranks, 0.0):
            for rank in ranks:
                if not rank.gone():
                    _signal(rank.child.pid, signal.SIGTERM)
            _wait(ranks, TERM_SECONDS)
    finally:
        for rank in ranks:
            if not rank.gone():
                _signal(rank.child.pid, signal.SIGKILL)
        _wait(ranks, KILL_SECONDS)
        for rank in ranks:
            rank.reader.join(timeout=0.5)
            if not rank.reader.is_alive():  # else a process that left the group holds the pipe
                assert rank.child.stdout is not None
                rank.child.stdout.close()
    held = ", ".join(str(each.child.pid) for each in ranks if not each.gone())
    if not held:
        return ""
    return (
        f"the processes {held} were killed and do not end: the GPU's driver holds them; look at "
        "nvidia-smi before anything else is started"
    )


def _show_tails(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if tail := rank.tail().strip():
            print(f"-- rank {rank.number} of {len(ranks)}, stderr:\n{tail}", file=sys.stderr)


def _sweep(pids: Sequence[int], since: float) -> None:
    """Delete what killed ranks could not: shared memory of torch and NCCL, torch's sockets.

    Torch's names say whose they are. NCCL's do not: a file of this user's that is newer than the
    ranks and that no process has open or mapped is one of theirs.
    """
    numbers = "|".join(map(str, pids)) or "none"
    places = [
        (Path(tempfile.gettempdir()), re.compile(rf"symm_mem-({numbers})(\D.*)?")),
        (_SHARED_MEMORY, re.compile(rf"torch_({numbers})_\w+")),
        (_SHARED_MEMORY, re.compile(rf"workbench-mailbox-({numbers})-\w+")),
    ]
    found = [
        path for folder, name in places for path in _ours(folder, 0.0) if name.fullmatch(path.name)
    ]
    left = [each for each in _ours(_SHARED_MEMORY, since - 1) if each.name.startswith("nccl-")]
    if left:
        used = _used_shared_memory()
        found += [each for each in left if str(each) not in used]
    for path in found:
        with contextlib.suppress(OSError):
            path.unlink()


def _ours(folder: Path, since: float) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and status.st_ctime >= since:
                    yield Path(entry.path)


def _used_shared_memory() -> set[str]:
    """Paths in /dev/shm that a process of this user has open or mapped."""
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            used.update(re.findall(r"/dev/shm/\S+", (process / "maps").read_text(errors="replace")))
        with contextlib.suppress(OSError):
            for each in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used.add(os.readlink(each))
    return used
