"""``Feed``: passes from the engine to a writer in a process of its own.

Writing a pass of 128 requests as JSON takes a millisecond or two of Python, which a thread of the
engine's process would take from the engine itself: they share the interpreter's lock. So a thread
here hands bytes to a pipe, which takes tens of microseconds, and a child process with nothing but
the standard library does the rest (``child.py``). The child ends with its pipe; it cannot outlive
the engine.

Passes come several at a time, the thread is woken once for them, and their bytes are written as
one: every turn of the interpreter's lock costs both threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import workbench

_CODE = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from workbench.serving.probe.child import main; sys.exit(main(sys.argv[2]))"
)
PATIENCE = 2.0  # seconds that an end may take
MANY = 16  # items that are written as one

Words = Callable[[], bytes]  # a frame that must not be dropped, made in the feed's thread


class Item(Protocol):
    """What is sent and may be dropped: a frame, and something to let go of afterwards."""

    def data(self) -> bytes:
        """Made in the feed's thread."""

    def release(self) -> None:
        """Called once, whether it was sent or not."""


class Feed:
    """A queue, a thread and the writer's process."""

    def __init__(self, destination: str, failed: Callable[[str], None]) -> None:
        """Start the writer.

        Args:
            destination: as in ``BEAM_PROBE``.
            failed: called once, in the feed's thread, with why nothing more can be sent.

        Raises:
            OSError: no process can be started.
        """
        self._failed = failed
        self._words: deque[Words] = deque()
        self._last: Words | None = None
        self._queue: deque[Item] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._rung = False
        self.wakes = 0  # how often somebody woke the thread
        self.thread_seconds = 0.0  # processor time that the thread has taken
        self._closing = False
        # -I -S: the standard library and us, whatever the engine's environment has.
        self.child = subprocess.Popen(
            [
                sys.executable, "-I", "-S", "-c", _CODE,
                str(Path(workbench.__file__).resolve().parent.parent), destination,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the engine's; the writer goes when its pipe does
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, daemon=True, name="workbench-probe")
        self._thread.start()

    def say(self, words: Words) -> None:
        """Send this before the next item."""
        self._words.append(words)

    def put(self, items: Iterable[Item]) -> None:
        """Send these; wakes the thread, and never waits."""
        self._queue.extend(items)
        if not self._rung:
            self._rung = True
            self.wakes += 1
            self._bell.put(None)

    def drop_oldest(self) -> Item | None:
        """Let go of the oldest that is not yet being sent; None if there is none."""
        try:
            item = self._queue.popleft()
        except IndexError:
            return None
        item.release()
        return item

    def close(self, last: Words | None = None, wait: float = 0.0) -> None:
        """Send what is left and ``last``, then end the writer.

        Waits so many seconds for the feed's thread and as many for the writer, at most.
        """
        if not self._closing:
            self._last, self._closing = last, True
            self._bell.put(None)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(wait)
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(wait)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._bell.get()
                self._rung = False  # before the look: what comes behind it rings again
                self._send_all()
                self.thread_seconds = time.thread_time()
            self._send_all()
            self._send(b"".join(self._said()))
            if self._last is not None:
                self._send(self._last())
        except Exception as error:
            self._failed(self._last_words(error))
        finally:
            assert self.child.stdin is not None  # for the type checker
            assert self.child.stderr is not None
            with suppress(OSError):
                self.child.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(PATIENCE)
            self.child.stderr.close()

    def _send_all(self) -> None:
        while self._queue:
            self._send(b"".join(self._some()))

    def _some(self) -> list[bytes]:
        """Some items, each behind what was said before it, and let go of."""
        found: list[bytes] = []
        for _ in range(MANY):
            try:
                item = self._queue.popleft()
            except IndexError:  # sent or dropped, all of them
                break
            try:
                found += self._said()
                found.append(item.data())
            finally:
                item.release()
        return found

    def _said(self) -> list[bytes]:
        found = []
        while self._words:
            found.append(self._words.popleft()())
        return found

    def _send(self, data: bytes) -> None:
        assert self.child.stdin is not None  # for the type checker
        pipe, rest = self.child.stdin.fileno(), memoryview(data)
        while rest:
            rest = rest[os.write(pipe, rest) :]

    def _last_words(self, error: Exception) -> str:
        """Why: the writer's own words if it has ended, else the error."""
        if isinstance(error, OSError):
            with suppress(subprocess.TimeoutExpired, OSError):
                code = self.child.wait(PATIENCE)
                assert self.child.stderr is not None  # for the type checker
                said = self.child.stderr.read(2000).decode("utf-8", "replace")
                lines = [line for line in said.splitlines() if line.strip()]
                return lines[-1] if lines else f"the writer ended with {code}"
        return f"{type(error).__name__}: {error}"
