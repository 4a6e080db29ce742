"""``Feed``: passes from the engine to a writer in a process of its own.

Writing a pass of 128 requests as JSON takes a millisecond or two of Python, which a thread of the
engine's process would take from the engine itself: they share the interpreter's lock. So a thread
here hands bytes to a pipe, which takes tens of microseconds, and a child process with nothing but
the standard library does the rest (``child.py``). The child ends with its pipe; it cannot outlive
the engine.

The thread looks 50 times a second what has come. Were it woken for each pass, it would take the
interpreter's lock in the middle of the engine's next one, at each of the many calls that let go of
it, and every such turn costs both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import workbench

_CODE = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from workbench.serving.probe.child import main; sys.exit(main(sys.argv[2]))"
)
PATIENCE = 2.0  # seconds that an end may take
PERIOD = 0.02  # seconds between two looks
MANY = 32  # items that are not left to wait for the next look

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
        self._wake = threading.Event()
        self._idle = True
        self.wakes = 0  # how often somebody woke the thread
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

    def put(self, item: Item) -> None:
        """Send this; never waits, and seldom wakes the thread."""
        self._queue.append(item)
        if self._idle or len(self._queue) == MANY:
            self._idle = False
            self.wakes += 1
            self._wake.set()

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
            self._closing, self._last = True, last
            self._wake.set()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(wait)
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(wait)

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self._queue:  # nothing came since the last look: the next one wakes us
                    self._idle = True
                    if not self._queue:
                        self._wake.wait()
                    self._idle = False
                self._wake.clear()
                if not self._closing:
                    self._wake.wait(PERIOD)
                self._send_all()
            self._send_all()
            self._send_words()
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
        while True:
            try:
                item = self._queue.popleft()
            except IndexError:
                return
            try:
                self._send_words()
                data = item.data()
            finally:
                item.release()
            self._send(data)

    def _send_words(self) -> None:
        while self._words:
            self._send(self._words.popleft()())

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
