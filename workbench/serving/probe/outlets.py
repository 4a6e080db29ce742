"""Where lines go: a file, or readers at a local socket. In the writer's process."""

from __future__ import annotations

import os
import selectors
import socket
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Protocol

from workbench.serving.probe.lines import Line

UNIX = "unix:"
READERS = 8
BEHIND = 4 * 2**20  # bytes that a reader may be behind before it misses lines


class Outlet(Protocol):
    """Takes lines."""

    def put(self, line: Line) -> None:
        """Write it, or raise OSError; what was written before stays whole."""

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Add what has to be waited for."""

    def serve(self) -> None:
        """Do what can be done without waiting."""

    def close(self, patience: float) -> None:
        """Write what is left, within so many seconds."""


def outlet_of(destination: str) -> Outlet:
    """The outlet a destination names.

    Raises:
        OSError: it is taken, or cannot be made.
    """
    if destination.startswith(UNIX):
        return SocketOutlet(destination.removeprefix(UNIX))
    return FileOutlet(destination)


class FileOutlet:
    """A new file. Each line is one write, taken back if it fails: its last line is whole."""

    def __init__(self, path: str) -> None:
        """Make it; one that exists is left alone.

        Raises:
            OSError: it exists, or cannot be made.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)
        self._end = 0

    def put(self, line: Line) -> None:
        """Append it."""
        rest = memoryview(line.data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise
        self._end += len(line.data)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Nothing."""

    def serve(self) -> None:
        """Nothing."""

    def close(self, patience: float) -> None:
        """Close it."""
        os.close(self._file)


class _Reader:
    """One end of a connection, and what it has not taken yet."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.waiting: deque[memoryview] = deque()
        self.size = self.missed = 0
        self.gone = False

    def put(self, data: bytes) -> None:
        """A reader that is too far behind misses this line, and is told how many it missed."""
        told = b""
        if self.missed:
            told = b'{"kind":"engine","what":"missed","lines":%d}\n' % self.missed
        if self.size + len(told) + len(data) > BEHIND:
            self.missed += 1
            return
        for part in filter(None, (told, data)):
            self.waiting.append(memoryview(part))
            self.size += len(part)
        self.missed = 0

    def send(self) -> None:
        """As much as it takes."""
        try:
            while self.waiting:
                sent = self.connection.send(self.waiting[0])
                self.size -= sent
                if sent < len(self.waiting[0]):
                    self.waiting[0] = self.waiting[0][sent:]
                    return
                self.waiting.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.gone = True


class SocketOutlet:
    """A socket that only this user may connect to; a reader gets the header and what is newest of
    tables and coefficients, and then every line until it leaves."""

    def __init__(self, path: str) -> None:
        """Listen. A socket that nobody listens at any more is replaced.

        Raises:
            OSError: something else is there, somebody listens, or it cannot be made.
        """
        self._path = Path(path)
        self._remove_dead()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._listening.bind(path)
        finally:
            os.umask(before)
        self._own = self._path.lstat().st_ino
        self._listening.listen(READERS)
        self._listening.setblocking(False)
        self._newest: dict[str, bytes] = {}
        self._readers: list[_Reader] = []

    def put(self, line: Line) -> None:
        """To every reader; none of them is waited for."""
        if line.keep:
            self._newest[line.keep] = line.data
        for reader in self._readers:
            reader.put(line.data)
        self._send()

    def watch(self, selector: selectors.BaseSelector) -> None:
        """New readers, and those that have not taken all."""
        selector.register(self._listening, selectors.EVENT_READ)
        for reader in self._readers:
            if reader.waiting:
                selector.register(reader.connection, selectors.EVENT_WRITE)

    def serve(self) -> None:
        """Let readers in, and send."""
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listening.accept()
                if len(self._readers) >= READERS:
                    connection.close()
                    continue
                reader = _Reader(connection)
                for data in self._newest.values():
                    reader.put(data)
                self._readers.append(reader)
        self._send()

    def close(self, patience: float) -> None:
        """Send what readers have not taken; the socket is removed."""
        end = monotonic() + patience
        self._send()
        while self._readers and (left := end - monotonic()) > 0:
            with selectors.DefaultSelector() as selector:
                for reader in self._readers:
                    if reader.waiting:
                        selector.register(reader.connection, selectors.EVENT_WRITE)
                if not selector.get_map():
                    break
                selector.select(left)
            self._send()
        for reader in self._readers:
            reader.connection.close()
        self._listening.close()
        with suppress(OSError):
            if self._path.lstat().st_ino == self._own:  # not one that took its place
                self._path.unlink()

    def _send(self) -> None:
        for reader in self._readers:
            reader.send()
            if reader.gone:
                reader.connection.close()
        self._readers = [reader for reader in self._readers if not reader.gone]

    def _remove_dead(self) -> None:
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise FileExistsError(17, "exists and is no socket", str(self._path))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.settimeout(1.0)
            try:
                asked.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink()
                return
        raise FileExistsError(17, "somebody listens there already", str(self._path))
