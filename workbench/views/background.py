"""``Background``: work in a thread, handed over in batches a page can keep up with.

The working thread does nothing but append to a deque; a second thread empties it at most ``HERTZ``
times a second and passes the batch on. Drawing therefore never slows a decode step, and a slow page
never sees more than ten updates a second.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any
from weakref import WeakSet

HERTZ = 10

# What has threads that run. A page that is written anew (the cell ran again) cannot stop the one
# before it, so the next one of the same owner does; a kernel interrupt stops them all.
_RUNNING: WeakSet[Background] = WeakSet()


class Background(ABC):
    """Two threads: one works, one hands over what is new.

    Attributes:
        error: what ended either of them if it failed; :meth:`wait` and :meth:`stop` raise it.
    """

    def __init__(self, owner: object, cancel: threading.Event) -> None:
        """``owner``: what only one may work with at a time, a model; ``cancel`` ends the work."""
        self.owner = owner
        self.error: BaseException | None = None
        self._cancel, self._done = cancel, threading.Event()
        self._threads = [
            threading.Thread(target=task, daemon=True, name=f"workbench-{task.__name__}")
            for task in (self._decode, self._flush)
        ]

    @property
    def running(self) -> bool:
        """Whether there may still be something to come or to show."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def decoding(self) -> bool:
        """Whether the model is still at work; the last batch is shown after that."""
        return not self._done.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether it was stopped from outside."""
        return self._cancel.is_set()

    def start(self) -> None:
        """Begin; others with the same owner are stopped first."""
        for other in list(_RUNNING):
            if other.owner is self.owner and other is not self:
                other.cancel()
        _RUNNING.add(self)
        for thread in self._threads:
            thread.start()
        _watch_interrupts()

    def cancel(self) -> None:
        """Ask for an end and return at once."""
        self._cancel.set()

    def stop(self, timeout: float = 10.0) -> None:
        """End it, wait until all is shown, and raise what went wrong, if anything did."""
        self.cancel()
        self.wait(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end and raise what went wrong; TimeoutError if it is not over by then."""
        for thread in self._threads:
            thread.join(timeout)
        if self.running:
            raise TimeoutError("decoding has not ended; wait longer or call stop()")
        if self.error is not None:
            raise self.error

    @abstractmethod
    def _work(self) -> None:
        """Do the work until it is over or the cancel event is set."""

    @abstractmethod
    def _hand_over(self, ended: bool) -> None:
        """Pass on what is new; ``ended``: this is the last time."""

    def _decode(self) -> None:
        try:
            self._work()
        except BaseException as error:  # kept for the reader: a thread has nobody to raise to
            self.error = error
        finally:
            self._done.set()

    def _flush(self) -> None:
        try:
            ended = False
            while not ended:
                ended = self._done.wait(1 / HERTZ)  # first: what came before it is then queued
                if ended:
                    _RUNNING.discard(self)
                self._hand_over(ended)
        except BaseException as error:
            self.error = self.error or error
            self.cancel()
        finally:
            _RUNNING.discard(self)


def stop_all() -> None:
    """Ask everything that runs in the background to end."""
    for one in list(_RUNNING):
        one.cancel()


# -- kernel interrupts --------------------------------------------------------------------------
#
# "Interrupt kernel" sends SIGINT. While a cell runs it raises KeyboardInterrupt there, which a
# background thread never sees; between cells ipykernel ignores it. Both are watched for.


def _watch_interrupts() -> None:
    """In a notebook, let an interrupt end all that runs; elsewhere do nothing."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None or threading.current_thread() is not threading.main_thread():
        return
    if stop_after_interrupted_cell not in shell.events.callbacks.get("post_run_cell", []):
        shell.events.register("post_run_cell", stop_after_interrupted_cell)
    with suppress(RuntimeError):  # no event loop: a plain IPython, where Ctrl-C is at the prompt
        asyncio.get_running_loop().call_later(0.1, _take_idle_signal)


def stop_after_interrupted_cell(result: Any) -> None:
    """What a notebook calls after each cell: one that was interrupted ends all that runs."""
    if isinstance(result.error_in_exec, KeyboardInterrupt):
        stop_all()


def _take_idle_signal() -> None:
    """Install the handler for the time between cells, as soon as the kernel is there.

    ipykernel puts the idle handler back after each message, so what is installed while one is
    handled would be lost: wait until the signal is ignored, which says that the kernel is idle.
    """
    current = signal.getsignal(signal.SIGINT)
    if current is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: stop_all())
    elif current is signal.default_int_handler and _RUNNING:
        asyncio.get_running_loop().call_later(0.1, _take_idle_signal)
