"""One of several ranks: it meets the others, does its part of a job and answers.

``start.py`` starts it, with the request on its stdin, and reads JSON lines from its stdout.
Torchrun can start it too::

    torchrun --nproc-per-node 2 -m workbench.kernels.parallel.rank_process MODULE:FUNCTION \\
        --request request.json --out answer.json
"""

from __future__ import annotations

import abc
import argparse
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from workbench.errors import KernelError, WorkbenchError
from workbench.files import FileError, expand, write_whole
from workbench.kernels.parallel.ranks import Ranks, without_multicast
from workbench.kernels.parallel.start import (
    DEBUG,
    FOLLOW_UP,
    MARK,
    TAIL_BYTES,
    job_parts,
    on_loopback,
)

Told = Callable[[int, int, str], None]
Job = Callable[[dict[str, Any], Ranks, Told], dict[str, Any]]

# In the message of a RuntimeError: a collective broke because another rank is gone.
_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "nccl", "gloo")


def main(arguments: Sequence[str] | None = None) -> None:
    """Be the rank that RANK says. It exits with 1 after it has said what went wrong."""
    # A rank in a collective or beside a spinning kernel never comes back to Python, where a handler
    # would run: these end the process at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # What libraries print (NCCL_DEBUG goes to stdout) must not come between the answers.
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    if MARK in os.environ:
        voice: _Voice = _ToStarter(answers)
    else:
        voice = _ToTerminal(answers)
        os.environ.update(without_multicast())
        if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
            for name, value in on_loopback().items():
                os.environ.setdefault(name, value)
    options = _options(arguments)
    try:
        _run(options, voice)
    except BaseException as error:
        at = time.monotonic()
        kind, sentence = in_words(error)
        details = "".join(traceback.format_exception(error))
        if voice.keeps_stderr:
            print(details, file=sys.stderr)
        voice.failed(at, kind, sentence, details[-TAIL_BYTES:])
        _leave(1)  # in order, it would wait for the others


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rank_process", description="One of several ranks.")
    parser.add_argument("job", help="module:function")
    parser.add_argument("--request", default="", help="a JSON file; without it, stdin")
    parser.add_argument("--out", default="", help="where rank 0 writes its answer; else on stdout")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, voice: _Voice) -> None:
    job = find_job(options.job)
    if options.out:  # before minutes go into what it is for
        from workbench.cli_kernels_asked import refuse_unwritable

        refuse_unwritable(expand(options.out))
    request = read_request(options.request)
    voice.state("here")
    ranks = Ranks.join(options.device)
    voice.state("joined")
    first = ranks.rank == 0
    answer = job(request, ranks, voice.told if first else _unheard)
    voice.result(as_json(options.job, answer) if first else b"null", options.out)
    ranks.close()


def _unheard(done: int, of: int, label: str) -> None:
    """Progress of a rank other than 0: all ranks do the same, and one of them tells."""


def find_job(name: str) -> Job:
    """The function that "module:function" names.

    Raises:
        KernelError: there is none.
    """
    module, function = job_parts(name)
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise KernelError(f"the job {name} is in no module that is here") from error
        raise
    found = getattr(loaded, function, None)
    if not callable(found):
        raise KernelError(f"{module} has no function {function}, which the job {name} names")
    return found


def read_request(path: str) -> dict[str, Any]:
    """The JSON object in a file; "": on stdin.

    Raises:
        WorkbenchError: the file cannot be read, or holds none.
    """
    try:
        text = expand(path).read_bytes() if path else sys.stdin.buffer.read()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; give another file") from error
    try:
        request = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path or 'stdin'} holds no JSON: {error}") from error
    if not isinstance(request, dict):
        raise FileError(f"{path or 'stdin'} holds no JSON object; a request is one")
    return request


def as_json(job: str, answer: Any) -> bytes:
    """The answer of a job, as one line.

    Raises:
        KernelError: JSON cannot say it (numbers that are not finite, too).
    """
    if not isinstance(answer, dict):
        raise KernelError(f"the job {job} answers with {type(answer).__name__} and not with a dict")
    try:
        return json.dumps(answer, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise KernelError(f"the job {job} answers with what JSON cannot say: {error}") from error


def in_words(error: BaseException) -> tuple[str, str]:
    """The kind of an error (see :class:`start.Failure`) and a sentence about it."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    line = re.sub(r"^\[/\S+\] *", "", line)  # where it happened in somebody else's source
    lost = _lost(error)
    # NCCL wants memory of the GPU for itself, and reports it as its own error.
    full = lost and "out of memory" in text.lower()
    if full or isinstance(error, torch.OutOfMemoryError):
        return "memory", (
            f"the GPU's memory was full ({line}); give fewer --layers, a smaller --batch or a "
            "shorter --context"
        )
    if isinstance(error, WorkbenchError | FloatingPointError):
        return FOLLOW_UP if lost else "refused", text or line
    if lost:
        return FOLLOW_UP, f"it lost the other ranks ({line})"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return "memory", "the machine's memory was full; give fewer ranks or --layers"
    if isinstance(error, torch.AcceleratorError):
        return "gpu", f"the GPU gave up ({line}); {DEBUG}=1 shows where"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("workbench"):
        return "refused", f"{error.name} is not installed beside this Python ({sys.executable})"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    what = f"{type(error).__name__}: {line}" if text else type(error).__name__
    return "defect", f"{what}{where}; {DEBUG}=1 shows the traceback"


def _lost(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, says that another rank is gone."""
    import torch.distributed as dist

    family: tuple[type[BaseException], ...] = ()
    if dist.is_available():
        family = (dist.DistError,)
    while error is not None:
        if isinstance(error, family):
            return True
        if isinstance(error, RuntimeError) and any(each in str(error).lower() for each in _LOST):
            return True
        error = error.__cause__
    return False


class _Voice(abc.ABC):
    """How a rank is heard."""

    keeps_stderr = True  # nobody sees it unless asked: a traceback may go there

    def state(self, name: str) -> None:  # noqa: B027 - torchrun's users need not hear of it
        """It is "here", then it has "joined"."""

    @abc.abstractmethod
    def told(self, done: int, of: int, label: str) -> None:
        """Progress: so many of so many are done; next is ``label``."""

    @abc.abstractmethod
    def result(self, answer: bytes, path: str) -> None:
        """It is done; ``answer`` is JSON, and only rank 0's is not null."""

    @abc.abstractmethod
    def failed(self, at: float, kind: str, sentence: str, details: str) -> None:
        """It ends for this reason."""


class _ToStarter(_Voice):
    """JSON lines, which ``start.py`` reads."""

    def __init__(self, answers: IO[bytes]) -> None:
        self._answers = answers
        self._lock = threading.Lock()  # a job may tell from a thread

    def _say(self, line: bytes) -> None:
        with self._lock:
            rest = memoryview(line + b"\n")
            try:
                while rest:
                    rest = rest[self._answers.write(rest) :]
            except BrokenPipeError:
                _leave(1)  # nobody listens any more

    def state(self, name: str) -> None:
        self._say(json.dumps({"state": name}).encode())

    def told(self, done: int, of: int, label: str) -> None:
        self._say(json.dumps({"told": [done, of, label]}).encode())

    def result(self, answer: bytes, path: str) -> None:
        self._say(b'{"result": ' + answer + b"}")

    def failed(self, at: float, kind: str, sentence: str, details: str) -> None:
        said = {"error": sentence, "kind": kind, "at": at, "details": details}
        self._say(json.dumps(said).encode())


class _ToTerminal(_Voice):
    """Lines on stderr and the answer in a file or on stdout, under torchrun."""

    keeps_stderr = bool(os.environ.get(DEBUG))

    def __init__(self, answers: IO[bytes]) -> None:
        self._answers = answers

    def told(self, done: int, of: int, label: str) -> None:
        print(f"workbench: {done} of {of} done: {label}", file=sys.stderr, flush=True)

    def result(self, answer: bytes, path: str) -> None:
        if answer == b"null":
            return
        if path:
            write_whole(expand(path), answer + b"\n")
        else:
            self._answers.write(answer + b"\n")

    def failed(self, at: float, kind: str, sentence: str, details: str) -> None:
        whose = f"rank {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')}"
        print(f"workbench: {whose}: {sentence}", file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
