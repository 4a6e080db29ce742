"""A recording of the probe read while it is made: :func:`follow`."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any

from workbench.errors import ServingError, TraceError
from workbench.files import expand
from workbench.serving.probe.outlets import UNIX
from workbench.serving.probe_record import Pass, Reading, read_header
from workbench.spec import trace_lines
from workbench.spec.acceptance import Coefficients
from workbench.spec.cost_table import CostTable
from workbench.spec.step import Step

_CHUNK = 1 << 16
_POLL_SECONDS = 0.05


class Following(Iterator[Step]):
    """Steps as they come, in a bounded memory; made by :func:`follow`. A context manager.

    Attributes:
        header: of the recording; empty until it was read.
        passed: the engine's pass behind the last step.
        tables, most_rows, coefficients, dropped, ended: so far, as in :class:`ProbeRun`.
        missed: lines that this reader was too slow for, at a socket.
        skipped: lines that could not be read.
    """

    def __init__(
        self, source: _Tail | _Connection, stop: Event | None, patience: float | None
    ) -> None:
        """As :func:`follow` says."""
        self._source, self._stop, self._patience = source, stop, patience
        self._reading: Reading | None = None
        self._held = bytearray()
        self._ready: deque[bytes] = deque()
        self._too_long = self._over = False

    @property
    def header(self) -> dict[str, Any]:
        return self._reading.header if self._reading is not None else {}

    @property
    def passed(self) -> Pass | None:
        return self._reading.passed if self._reading is not None else None

    @property
    def tables(self) -> CostTable | None:
        return self._reading.tables if self._reading is not None else None

    @property
    def most_rows(self) -> int | None:
        return self._reading.most_rows if self._reading is not None else None

    @property
    def coefficients(self) -> tuple[Coefficients, ...]:
        return tuple(self._reading.coefficients) if self._reading is not None else ()

    @property
    def dropped(self) -> int:
        return self._reading.dropped if self._reading is not None else 0

    @property
    def missed(self) -> int:
        return self._reading.missed if self._reading is not None else 0

    @property
    def skipped(self) -> int:
        return self._reading.skipped if self._reading is not None else 0

    @property
    def ended(self) -> str | None:
        return self._reading.ended if self._reading is not None else None

    def __next__(self) -> Step:
        """The next step, waited for.

        Raises:
            StopIteration: the recording has ended, nothing came for ``patience`` seconds, or it was
                stopped.
            TraceError: the first line is no header of a probe, or the file was written anew.
            ServingError: the file or socket cannot be read.
        """
        quiet = time.monotonic()
        while not self._over:
            if self._stop is not None and self._stop.is_set():
                break
            while self._ready:
                if (step := self._take(self._ready.popleft())) is not None:
                    return step
            if self.ended is not None:
                break
            data = self._source.read(_POLL_SECONDS)
            if data is None:
                break
            if data:
                quiet = time.monotonic()
                self._cut(data)
            elif self._patience is not None and time.monotonic() - quiet > self._patience:
                break
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Read no further."""
        self._over = True
        self._source.close()

    def __enter__(self) -> Following:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _cut(self, data: bytes) -> None:
        """Whole lines; what is behind the last one waits for its end."""
        ended, newline, rest = data.rpartition(b"\n")  # what is held has been searched before
        if newline:
            first, *others = ended.split(b"\n")
            for line in (bytes(self._held + first), *others):
                if self._too_long:  # this is its end
                    self._too_long = False
                elif line.strip():
                    self._ready.append(line)
            self._held = bytearray(rest)
        else:
            self._held += data
        if len(self._held) > trace_lines.LONGEST:
            if not self._too_long:
                self._ready.append(b"")  # counted as one that cannot be read
            self._held, self._too_long = bytearray(), True

    def _take(self, line: bytes) -> Step | None:
        if self._reading is None:
            self._reading = Reading(read_header(line, self._source.name))
            return None
        return self._reading.take(line)


def follow(
    where: str | os.PathLike[str], *, stop: Event | None = None, patience: float | None = None
) -> Following:
    """Steps of a recording while it is made, from its beginning (of a socket: from now on).

    Args:
        where: a file, which may not be there yet, or ``unix:/path/socket``.
        stop: set from elsewhere, it ends the iteration.
        patience: seconds without anything new after which it ends; None waits for ever.

    Raises:
        ServingError: nobody listens at the socket, or ``where`` is neither.
    """
    if patience is not None and not (isinstance(patience, int | float) and patience >= 0):
        raise ServingError(f"patience is a number of seconds from 0 on, not {patience!r:.40}")
    text = os.fspath(where) if isinstance(where, str | os.PathLike) else ""
    if not isinstance(text, str) or not text:
        raise ServingError(f"a probe is followed at a file or unix:/path/socket, not {where!r:.80}")
    if text.startswith(UNIX):
        return Following(_Connection(text.removeprefix(UNIX)), stop, patience)
    return Following(_Tail(expand(text)), stop, patience)


class _Tail:
    """The bytes of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._file: Any = None
        self._at = 0

    def read(self, wait: float) -> bytes | None:
        """What is new, b"" after ``wait`` seconds without anything."""
        try:
            if self._file is None and not self._open():
                time.sleep(wait)
                return b""
            data: bytes = self._file.read(_CHUNK)
            if data:
                self._at += len(data)
                return data
            if self._replaced():
                raise TraceError(f"{self.name} was written anew while it was read; follow it again")
        except OSError as error:
            raise ServingError(f"{self.name} cannot be read ({error.strerror or error})") from error
        time.sleep(wait)
        return b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _replaced(self) -> bool:
        """Whether it is shorter by now, or another file has its name; one that was removed is not
        over, since who writes it may go on."""
        ours = os.fstat(self._file.fileno())
        if ours.st_size < self._at:
            return True
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino)

    def _open(self) -> bool:
        try:
            mode = self._path.stat().st_mode
        except FileNotFoundError:
            return False
        except ValueError as error:  # a NUL in the name
            raise ServingError(f"{self.name!r:.80} cannot be read ({error})") from error
        if not stat.S_ISREG(mode):
            raise ServingError(f"{self.name} is not a regular file; a socket is unix:/path")
        self._file = self._path.open("rb", buffering=0)
        return True


class _Connection:
    """The bytes of a local socket."""

    def __init__(self, path: str) -> None:
        self.name = f"{UNIX}{path}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(5.0)
            self._socket.connect(path)
        except (OSError, ValueError) as error:
            self._socket.close()
            reason = getattr(error, "strerror", None) or error
            raise ServingError(
                f"no probe listens at {self.name} ({reason}); start the engine with "
                f"BEAM_PROBE={self.name}"
            ) from error

    def read(self, wait: float) -> bytes | None:
        """What is new, b"" after ``wait`` seconds without anything, None at the end."""
        try:
            self._socket.settimeout(wait)
            return self._socket.recv(_CHUNK) or None
        except TimeoutError:
            return b""
        except OSError as error:
            raise ServingError(f"{self.name} cannot be read ({error.strerror or error})") from error

    def close(self) -> None:
        self._socket.close()
