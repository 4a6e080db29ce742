"""``Monitor``: watches a serving engine through its page of metrics, in a thread of its own.

A page is asked for at fixed moments, twice a second by default. One that is late makes the next
ones fall out, so none queue up; a server that is gone is asked again at each moment, and found when
it is back. Nobody waits for a page but the thread.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import isfinite
from pathlib import Path
from types import TracebackType

from workbench.errors import ServingError
from workbench.serving.address import Address
from workbench.serving.monitor.intervals import Intervals
from workbench.serving.monitor.metrics_page import MetricsPage, read_page
from workbench.serving.monitor.monitor_file import SampleWriter, header
from workbench.serving.monitor.sample import Sample
from workbench.serving.monitor.scrape import Answer, Scraper, clock

KEEP = 10_000  # samples: 83 minutes at 2 Hz
KEEP_ENGINES = 100_000  # samples of engines in them, some 2 kB each
FASTEST, SLOWEST = 20.0, 1 / 3600  # pages a second
_PATIENCE = 2.0  # s, and 2.5 intervals, after which a page that does not come is stale

Listener = Callable[[Sample], None]


def check_settings(hertz: object, keep: object) -> None:
    """Whether a monitor can be made with these numbers.

    Raises:
        ServingError: it cannot; the sentence says which and why.
    """
    if isinstance(hertz, bool) or not isinstance(hertz, int | float) or not isfinite(hertz):
        raise ServingError(f"hertz is pages a second, not {hertz!r:.40}")
    if not SLOWEST <= hertz <= FASTEST:
        raise ServingError(
            f"a page is asked for once an hour to {FASTEST:g} times a second, not {hertz:g}"
        )
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ServingError(f"keep is a number of samples from 1 on, not {keep!r:.40}")


class Monitor:
    """Samples of a running server, the newest ones kept; a context manager.

    It begins at once and ends with :meth:`stop`, the end of its ``with``, or when nobody holds it.

    Attributes:
        address: of the server.
        hertz: pages a second.
        keep: samples that are kept; fewer of more than ten engines: 100,000 samples of theirs.
    """

    def __init__(
        self,
        address: str | Address,
        *,
        hertz: float = 2.0,
        keep: int = KEEP,
        record: str | os.PathLike[str] | None = None,
        foreign: bool = False,
    ) -> None:
        """Begin.

        Args:
            address: ``http://127.0.0.1:8000``, ``localhost:8000`` …
            hertz: pages a second, one an hour to 20 a second.
            keep: samples to keep.
            record: write every sample to this file as well (:meth:`record`).
            foreign: whether a host that is not this machine may be asked.

        Raises:
            ServingError: no such address, a number out of its range, or the file exists or cannot
                be written. That nobody answers is no error here: :attr:`error` says it.
        """
        import prometheus_client.parser  # noqa: F401 - where its absence can be told

        check_settings(hertz, keep)
        self.address = Address.of(address, foreign=foreign)
        self.hertz, self.keep = float(hertz), keep
        self._loop = _Loop(self.address, 1 / self.hertz, keep)
        if record is not None:
            self._loop.record(record)
        self._thread = threading.Thread(
            target=self._loop.run, daemon=True, name="workbench-monitor"
        )
        # The thread holds the loop and not the monitor: one that nobody holds any more is ended.
        weakref.finalize(self, self._loop.end)
        self._thread.start()

    @property
    def samples(self) -> list[Sample]:
        """The kept samples, oldest first, all engines together (``sample.engines`` has each)."""
        with self._loop.news:
            return list(self._loop.samples)

    def since(self, seen: int) -> tuple[list[Sample], int]:
        """The kept samples after the first ``seen`` that were ever taken, and how many these are
        by now: what to ask with the next time."""
        with self._loop.news:
            kept, now = self._loop.samples, self._loop.seen
            return [kept[i] for i in range(max(0, len(kept) - (now - seen)), len(kept))], now

    @property
    def seen(self) -> int:
        """Samples that were ever taken."""
        return self._loop.seen

    @property
    def pages(self) -> int:
        """Pages that came."""
        return self._loop.pages

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return not self._loop.ending.is_set()

    @property
    def error(self) -> str | None:
        """Why the newest page did not come, or is none, in one sentence; None while all is well."""
        return self._loop.error

    @property
    def stale_since(self) -> float | None:
        """Since when nothing new is known, wall time in seconds since 1970; None while all is well.

        That is the moment of the last page (the beginning, if there was none), told once a page
        failed or is overdue.
        """
        return self._loop.stale_since

    @property
    def version(self) -> str | None:
        """The engine's version as the server says it; None where it does not, or not yet."""
        return self._loop.version

    @property
    def recording(self) -> Path | None:
        """The file that samples are written to now."""
        writer = self._loop.writer
        return None if writer is None else writer.path

    @property
    def recording_trouble(self) -> str | None:
        """Why recording ended by itself (a full disk), in one sentence."""
        return self._loop.trouble

    @property
    def source(self) -> str:
        """Where the figures come from, in words."""
        engine = "" if self.version is None else f", vLLM {self.version}"
        if self.address.loopback:
            return f"measured here, live{engine}"
        return f"measured live at {self.address.host}{engine}"

    def reached(self, timeout: float | None = None) -> bool:
        """Wait for the first answer, whatever it is; whether it was a page of metrics."""
        loop = self._loop
        with loop.news:
            loop.news.wait_for(lambda: loop.tries or loop.ending.is_set(), timeout)
        return loop.pages > 0

    def wait(self, count: int = 1, timeout: float | None = None) -> list[Sample]:
        """Wait until so many samples were taken in all; the kept ones.

        Raises:
            TimeoutError: they did not come in ``timeout`` seconds; the message says what is wrong.
            ServingError: monitoring was stopped before.
        """
        loop = self._loop
        with loop.news:
            there = loop.news.wait_for(lambda: loop.seen >= count or loop.ending.is_set(), timeout)
            if loop.seen >= count:
                return list(loop.samples)
        what = f"{loop.seen} of {count} samples came from {self.address}"
        if there:
            raise ServingError(f"{what} before monitoring was stopped; start another monitor")
        raise TimeoutError(f"{what} in {timeout:g} s: {loop.error or 'no page yet'}")

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with each new sample, in the monitor's thread; what is returned ends
        it. One that raises is not called again."""
        loop = self._loop
        with loop.news:
            loop.listeners.append(listener)

        def leave() -> None:
            with loop.news, suppress(ValueError):
                loop.listeners.remove(listener)

        return leave

    def record(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write every further sample to a file, a line each
        (:func:`workbench.serving.monitor.monitor_file.read_recording` reads it).

        Raises:
            ServingError: it exists and ``overwrite`` is false, it cannot be written, or another
                one is being written.
        """
        self._loop.record(path, overwrite=overwrite)

    def stop_recording(self) -> None:
        """Close the file; monitoring goes on."""
        self._loop.stop_recording()

    def stop(self, timeout: float = 5.0) -> None:
        """End it. What was taken stays readable."""
        self._loop.end()
        if threading.current_thread() is not self._thread:  # a listener may stop it
            self._thread.join(timeout)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return f"Monitor({self.address}, {self.hertz:g} Hz, {self.seen:,} samples, {state})"


class _Loop:
    """What the thread does and knows. ``news`` guards it, and tells who waits."""

    def __init__(self, address: Address, period: float, keep: int) -> None:
        self.address, self.period = address, period
        self.news = threading.Condition()
        self.ending = threading.Event()
        self.keep = keep
        self.samples: deque[Sample] = deque()
        self._engines = 0  # samples of engines in them
        self.seen = self.pages = self.tries = 0
        self.error: str | None = None
        self.version: str | None = None
        self.listeners: list[Listener] = []
        self.writer: SampleWriter | None = None
        self.trouble: str | None = None
        self._recorder = threading.Lock()  # one recording begins at a time
        self._scraper = Scraper(address)
        self._intervals = Intervals()
        self._missed = 0
        self._last, self._last_clock = time.time(), clock()  # of the newest page; the beginning

    @property
    def stale_since(self) -> float | None:
        with self.news:
            if self.error is not None:
                return self._last
            waited = 0.0 if self.ending.is_set() else clock() - self._last_clock
            return self._last if waited > max(_PATIENCE, 2.5 * self.period) else None

    def run(self) -> None:
        begin, turn = time.monotonic(), 0
        try:
            while not self.ending.is_set():
                self._scrape()
                # The next moment that is still to come, counted from the beginning: no drift.
                turn = max(turn, int((time.monotonic() - begin) / self.period)) + 1
                self.ending.wait(max(0.0, begin + turn * self.period - time.monotonic()))
        finally:
            self.ending.set()
            self._scraper.close()
            self.stop_recording()
            with self.news:
                self.news.notify_all()

    def end(self) -> None:
        self.ending.set()
        self._scraper.abort()
        with self.news:
            self.news.notify_all()

    def record(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        if self.ending.is_set():
            raise ServingError(f"monitoring of {self.address} was stopped; start another monitor")
        with self._recorder:
            if self.writer is not None:
                raise ServingError(f"{self.writer.path} is being written already; stop that first")
            head = header(self.address, hertz=1 / self.period)
            writer = SampleWriter(path, head, overwrite=overwrite)
            with self.news:
                self.writer, self.trouble = writer, None
        if self.version is not None:
            self._write(lambda writer: writer.server(self.version))

    def stop_recording(self) -> None:
        with self.news:
            writer, self.writer = self.writer, None
        if writer is not None:
            try:
                writer.close()
            except ServingError as error:
                self.trouble = str(error)

    # -- beneath ----------------------------------------------------------------------------------

    def _scrape(self) -> None:
        try:
            answer = self._scraper.get("/metrics")
            page = read_page(answer.body, where=f"{self.address}/metrics")
            self._took(answer, page)
        except ServingError as error:
            self._failed(str(error))
        except Exception as error:  # whatever a page can do, the thread goes on
            self._failed(
                f"{self.address}/metrics could not be read ({type(error).__name__}); "
                "please report it with the page"
            )

    def _failed(self, why: str) -> None:
        if self.ending.is_set():  # it was cut off here
            return
        self._missed += 1
        with self.news:
            self.tries += 1
            self.error = why
            self.news.notify_all()

    def _took(self, answer: Answer, page: MetricsPage) -> None:
        sample = self._intervals.add(page, at=answer.at, clock=answer.clock, missed=self._missed)
        self._missed = 0
        if sample is not None:  # what is seen is on the disk already
            self._write(partial(SampleWriter.write, sample=sample))
        with self.news:
            self.tries += 1
            self.pages += 1
            self.error = None
            self._last, self._last_clock = answer.at, clock()
            if sample is not None:
                self._keep(sample)
                self.seen += 1
            listeners = list(self.listeners)
            self.news.notify_all()
        if self.pages == 1 or (sample is not None and sample.restarted):
            self._ask_version()
        if sample is None:
            return
        for listener in listeners:
            try:
                listener(sample)
            except BaseException:  # somebody else's code, sys.exit too: left out from now on
                with self.news, suppress(ValueError):
                    self.listeners.remove(listener)

    def _keep(self, sample: Sample) -> None:
        kept = self.samples
        kept.append(sample)
        self._engines += len(sample.engines)
        while len(kept) > self.keep or (self._engines > KEEP_ENGINES and len(kept) > 1):
            self._engines -= len(kept.popleft().engines)

    def _ask_version(self) -> None:
        self.version = self._scraper.version()
        if self.version is not None:
            self._write(lambda writer: writer.server(self.version))

    def _write(self, what: Callable[[SampleWriter], None]) -> None:
        """Write where something is being written; a full disk ends that and nothing else."""
        writer = self.writer
        if writer is None:
            return
        try:
            what(writer)
        except ServingError as error:
            with self.news:
                if self.writer is writer:
                    self.writer, self.trouble = None, str(error)
