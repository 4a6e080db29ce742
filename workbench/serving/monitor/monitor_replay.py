"""``Replay``: a recording that gives its samples as they came, so that every view runs on it."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from math import inf, isnan

from workbench.errors import ServingError
from workbench.serving.monitor.monitor_file import Recording, read_recording
from workbench.serving.monitor.sample import Sample


class Replay:
    """What a :class:`~workbench.serving.monitor.monitor.Monitor` offers to views, from a recording.

    It begins when it is made or with :meth:`restart`. A sample is there once the time has passed
    that it took when it was recorded, divided by the speed.

    Attributes:
        recording: the whole of it.
        speed: 1 is as recorded, infinity all at once.
    """

    def __init__(self, recording: Recording, *, speed: float = 1.0) -> None:
        """Raises:
        ServingError: the speed is no number above 0.
        """
        if isinstance(speed, bool) or not isinstance(speed, int | float) or isnan(speed):
            raise ServingError(f"a replay's speed is a number above 0, not {speed!r:.40}")
        if speed <= 0:
            raise ServingError(f"a replay's speed is above 0, not {speed:g}")
        self.recording, self.speed = recording, float(speed)
        # Lengths of the intervals, not their wall times: a clock may have been set meanwhile.
        self._due: list[float] = []
        passed = 0.0
        for sample in recording.samples:
            passed += sample.seconds
            self._due.append(passed)
        self._stopped = threading.Event()
        self._until = inf  # what is due when it is stopped
        self.restart()

    def restart(self) -> None:
        """From the beginning."""
        self._until = inf
        self._stopped.clear()
        self._begin = time.monotonic()

    @property
    def seen(self) -> int:
        """Samples that are there by now."""
        return bisect_right(self._due, self._now())

    @property
    def samples(self) -> list[Sample]:
        """Those that are there by now, oldest first."""
        return list(self.recording.samples[: self.seen])

    def since(self, seen: int) -> tuple[list[Sample], int]:
        """Those after the first ``seen``, and how many these are by now."""
        now = max(seen, self.seen)
        return list(self.recording.samples[seen:now]), now

    @property
    def running(self) -> bool:
        """Whether more is to come."""
        return not self._stopped.is_set() and self.seen < len(self._due)

    @property
    def error(self) -> str | None:
        """None: nothing can go wrong any more."""
        return None

    @property
    def stale_since(self) -> float | None:
        """None."""
        return None

    @property
    def version(self) -> str | None:
        """The engine's, as it was recorded."""
        return self.recording.version

    @property
    def source(self) -> str:
        """Where the figures come from, in words."""
        return self.recording.source

    def stop(self) -> None:
        """Hold for good; what is there stays."""
        if not self._stopped.is_set():
            self._until = self._now()
            self._stopped.set()

    def __iter__(self) -> Iterator[Sample]:
        """Each sample when its time has come."""
        for at, sample in enumerate(self.recording.samples):
            while (left := self._due[at] - self._now()) > 0:
                if self._stopped.wait(min(1.0, left / self.speed)):
                    return
            yield sample

    def _now(self) -> float:
        """Time of the recording."""
        if self.speed == inf:
            return min(inf, self._until)
        return min(self._until, (time.monotonic() - self._begin) * self.speed)


def replay(path: str | os.PathLike[str], *, speed: float = 1.0) -> Replay:
    """A recording as it went, ``speed`` times as fast; iterate over it, or give it to a view.

    Raises:
        ServingError: it cannot be read, or the speed is no number above 0.
    """
    return Replay(read_recording(path), speed=speed)
