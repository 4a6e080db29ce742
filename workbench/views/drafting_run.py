"""``Run``: decode loops in the background that can be paused, stepped, resumed and stopped.

Several sources of steps share one thread and take turns, so that what is shown beside each other is
measured in the same minutes: the turn goes to the source that has used the least time so far, and
the texts grow as they would on a machine of their own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from workbench.errors import DraftError
from workbench.views.background import Background

if TYPE_CHECKING:
    from workbench.spec.loop import Decoding
    from workbench.spec.step import Step

# Steps that may wait to be shown. Beyond that decoding waits for a page that has stalled: memory
# stays bounded and no step is lost.
_QUEUE = 1024
_POLL = 0.05  # s between two looks at the cancel event while paused or waiting

Batch = list[tuple[int, "Step"]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """Steps of one lane. ``steps`` may have a ``close()``, which is called at the end."""

    name: str
    steps: Iterator[Step]


class Run(Background):
    """Takes steps of its sources in turn, in a thread.

    Args:
        owner: what only one run may work with at a time: the model.
        sources: where steps come from.
        show: called from the flushing thread with the new ``(source number, step)`` pairs, at most
            ten times a second and a last time (perhaps with none) at the end.
        cancel: the event that the sources' decode loops look at as well.
        paused: begin paused: the first step waits for :meth:`step` or :meth:`resume`.

    Attributes:
        error: what ended it if it failed; :meth:`wait` and :meth:`stop` raise it.
    """

    def __init__(
        self,
        owner: object,
        sources: Sequence[Source],
        show: Callable[[Run, Batch], None],
        *,
        cancel: threading.Event | None = None,
        paused: bool = False,
    ) -> None:
        super().__init__(owner, cancel or threading.Event())
        self.sources, self.show = tuple(sources), show
        self._queue: deque[tuple[int, Step]] = deque()
        self._turn = threading.Condition()
        self._paused, self._singles = paused, 0
        self._was_paused = paused
        self._began = False

    # -- controls: each returns at once and takes effect before the next step ---------------------

    @property
    def paused(self) -> bool:
        """Whether it waits for :meth:`resume`."""
        return self._paused and self.decoding

    def pause(self) -> None:
        """Hold before the next step; nothing when it is held already or over."""
        with self._turn:
            self._paused, self._singles = True, 0

    def resume(self) -> None:
        """Go on."""
        with self._turn:
            self._paused, self._singles = False, 0
            self._turn.notify_all()

    def step(self, count: int = 1) -> None:
        """One step of every source that has not ended, then hold; pauses first if it runs.

        Raises:
            DraftError: ``count`` is no whole number from 1.
        """
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise DraftError(f"step takes a whole number of steps from 1, not {count!r:.60}")
        with self._turn:
            self._singles = count + (self._singles if self._paused else 0)
            self._paused = True
            self._turn.notify_all()

    def cancel(self) -> None:
        """Ask for an end and return at once."""
        super().cancel()
        with self._turn:
            self._turn.notify_all()

    def start(self) -> None:
        """Begin; other runs on the same model are stopped first.

        Raises:
            DraftError: it was started before; a run cannot begin anew.
        """
        if self._began:
            raise DraftError("this run was started before; make another")
        self._began = True
        super().start()

    # -- the two threads --------------------------------------------------------------------------

    def _work(self) -> None:
        spent = dict.fromkeys(range(len(self.sources)), 0.0)  # s, of those that go on
        try:
            while spent and (every := self._admitted()) is not None:
                for number in tuple(spent) if every else (min(spent, key=spent.__getitem__),):
                    before = perf_counter()
                    step = next(self.sources[number].steps, None)
                    if step is None:
                        del spent[number]
                        continue
                    # Not the step's own time: that of a replayed one passed elsewhere.
                    spent[number] += perf_counter() - before
                    self._put(number, step)
        finally:
            for source in self.sources:
                close = getattr(source.steps, "close", None)
                if close is not None:
                    close()

    def _admitted(self) -> bool | None:
        """Wait for the turn: True for a single step of each source, False to run, None to end."""
        with self._turn:
            while not self._cancel.is_set():
                if not self._paused:
                    return False
                if self._singles:
                    self._singles -= 1
                    return True
                self._turn.wait(_POLL)
        return None

    def _put(self, number: int, step: Step) -> None:
        while len(self._queue) >= _QUEUE and not self._cancel.wait(_POLL):
            pass
        self._queue.append((number, step))

    def _hand_over(self, ended: bool) -> None:
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        # A pause has nothing new to show, and is shown.
        turned, self._was_paused = self._was_paused != self._paused, self._paused
        if batch or ended or turned:
            self.show(self, batch)


def cycling(decoding: Decoding, prompts: Sequence[str]) -> Iterator[Step]:
    """A run without an end: when a request has ended it is forgotten, and the next prompt joins.

    The run must have been made with the first prompt alone, in one slot; request n is then of
    prompt ``n % len(prompts)``.
    """
    joined = 1
    try:
        for step in decoding:
            yield step
            for part in step.requests:
                if part.finished is not None:
                    decoding.forget(part.request)
                    decoding.join(prompts[joined % len(prompts)])
                    joined += 1
    finally:
        decoding.close()


def paced(steps: Sequence[Step], speed: float, cancel: threading.Event) -> Iterator[Step]:
    """Recorded steps, each after the time that it took, divided by ``speed``."""
    for step in steps:
        if cancel.wait(step.seconds / speed):
            return
        yield step
