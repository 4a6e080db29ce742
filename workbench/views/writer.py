"""``Writer``: decoding in the background, handed over in batches a page can keep up with.

The decoding thread does nothing but append to a deque; a second thread empties it at most
``HERTZ`` times a second and passes the batch on. Drawing therefore never slows a decode step, and
a slow page never sees more than ten updates a second.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from workbench.model.generate import Token, TokenStream, stream
from workbench.model.sampling import Sampling

if TYPE_CHECKING:
    from workbench.model.beam import Beam

HERTZ = 10

# Writers whose threads run. A page that is written anew (the cell ran again) cannot stop the one
# before it, so the next writer on the same model does; a kernel interrupt stops them all.
_RUNNING: WeakSet[Writer] = WeakSet()


class Writer:
    """Decodes one prompt in a thread.

    Args:
        show: called from the flushing thread with the tokens that are new, at most ``HERTZ`` times
            a second, and a last time (perhaps with none) when decoding has ended.

    Attributes:
        tokens: all tokens handed to ``show`` so far.
        error: what ended decoding or showing if it failed; :meth:`wait` and :meth:`stop` raise it.
    """

    def __init__(
        self,
        beam: Beam,
        prompt: str,
        show: Callable[[Writer, list[Token]], None],
        *,
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
    ) -> None:
        self.beam, self.show = beam, show
        self.tokens: list[Token] = []
        self.error: BaseException | None = None
        self._cancel, self._decoded = threading.Event(), threading.Event()
        self._queue: deque[Token] = deque()
        # Made here, so that a prompt that cannot be decoded is refused before a thread starts.
        self._stream: TokenStream = stream(
            beam,
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(),
            cancel=self._cancel,
        )
        self._threads = [
            threading.Thread(target=task, daemon=True, name=f"workbench-{task.__name__}")
            for task in (self._decode, self._flush)
        ]

    @property
    def running(self) -> bool:
        """Whether there may still be tokens to come or to show."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def decoding(self) -> bool:
        """Whether the model is still at work; the last batch is shown after that."""
        return not self._decoded.is_set()

    @property
    def tokens_per_second(self) -> float:
        """Measured decode speed so far; NaN before the second decode step."""
        return self._stream.tokens_per_second

    @property
    def cancelled(self) -> bool:
        """Whether it was stopped from outside."""
        return self._cancel.is_set()

    def start(self) -> None:
        """Begin; other writers on the same model are stopped first."""
        for other in list(_RUNNING):
            if other.beam is self.beam and other is not self:
                other.cancel()
        _RUNNING.add(self)
        for thread in self._threads:
            thread.start()
        _watch_interrupts()

    def cancel(self) -> None:
        """Ask for an end and return at once."""
        self._cancel.set()

    def stop(self, timeout: float = 10.0) -> None:
        """End decoding, wait until all is shown, and raise what went wrong, if anything did."""
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

    def _decode(self) -> None:
        try:
            for token in self._stream:
                self._queue.append(token)
        except BaseException as error:  # kept for the reader: a thread has nobody to raise to
            self.error = error
        finally:
            self._decoded.set()

    def _flush(self) -> None:
        try:
            ended = False
            while not ended:
                ended = self._decoded.wait(1 / HERTZ)  # first: what came before it is then queued
                batch = [self._queue.popleft() for _ in range(len(self._queue))]
                if batch or ended:
                    self.tokens += batch
                    if ended:
                        _RUNNING.discard(self)
                    self.show(self, batch)
        except BaseException as error:
            self.error = self.error or error
            self.cancel()
        finally:
            _RUNNING.discard(self)


def stop_all() -> None:
    """Ask every running writer to end."""
    for writer in list(_RUNNING):
        writer.cancel()


# -- kernel interrupts --------------------------------------------------------------------------
#
# "Interrupt kernel" sends SIGINT. While a cell runs it raises KeyboardInterrupt there, which a
# background thread never sees; between cells ipykernel ignores it. Both are watched for.


def _watch_interrupts() -> None:
    """In a notebook, let an interrupt end all writers; elsewhere do nothing."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None or threading.current_thread() is not threading.main_thread():
        return
    if _stop_after_interrupted_cell not in shell.events.callbacks.get("post_run_cell", []):
        shell.events.register("post_run_cell", _stop_after_interrupted_cell)
    with suppress(RuntimeError):  # no event loop: a plain IPython, where Ctrl-C is at the prompt
        asyncio.get_running_loop().call_later(0.1, _take_idle_signal)


def _stop_after_interrupted_cell(result: Any) -> None:
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
