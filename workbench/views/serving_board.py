"""A running engine as it goes: throughput, acceptance, times and load in a page that follows."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from workbench.errors import ServingError, WorkbenchError
from workbench.serving.address import Address
from workbench.serving.monitor.monitor import KEEP, Monitor, check_settings
from workbench.serving.monitor.monitor_file import Recording, read_recording
from workbench.serving.monitor.monitor_replay import Replay
from workbench.serving.monitor.sample import Sample
from workbench.views import theme
from workbench.views.background import Background
from workbench.views.dashboard import Dashboard
from workbench.views.numbers import plural
from workbench.views.serving_page import (
    ALL,
    WINDOWS,
    ServingWidget,
    Source,
    counts_words,
    engines_of,
    look,
    page_figures,
    title_of,
)

HERTZ = 4  # updates of the page a second, at most
_SHARE = 0.05  # of the time that making updates may take


class Serving(Dashboard):
    """A monitor, or a recording of one, in a page. :func:`serving` makes it.

    Pausing holds the page; the monitor goes on, and what came meanwhile is there afterwards.
    Running the cell again, the stop button and an interrupt of the kernel each end it.

    Attributes:
        monitor: what is shown now, None before the start.
    """

    def __init__(
        self,
        make: Callable[[], Source],
        *,
        owner: object,
        given: Source | None,
        name: str,
        window: str,
        autostart: bool,
    ) -> None:
        self.monitor: Source | None = given
        self.autostart = autostart
        self._make, self._owner, self._given, self._name = make, owner, given, name
        self._where = None if isinstance(owner, Recording) else name
        self._feed: _Feed | None = None
        self._page = threading.RLock()  # what is sent to it comes from several threads
        self._paused = False
        self._refused = ""  # why recording could not begin
        self._seen = -1  # samples that the page knows
        self._said: tuple[Any, ...] = ()  # and the state of the source
        self._next = 0.0  # when the page may be told something again
        self.widget = ServingWidget(
            status="ready",
            settings={"window": window, "engine": ALL},
            choices={
                "windows": list(WINDOWS),
                "engines": [ALL],
                "title": title_of([], self._where),
                "start": "Replay" if self._where is None else "Start",
            },
            look=look(),
        )
        self.widget.on_msg(self._message)

    # -- in a cell --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin, or begin again."""
        with self._page:
            if self._feed is not None:
                self._feed.cancel()
            self.monitor = self._given
            try:
                if self.monitor is None:
                    self.monitor = self._make()
            except WorkbenchError as error:
                self.widget.state, self.widget.trouble = "ready", True
                self.widget.status = str(error)
                return
            self._paused, self._seen, self._said, self._next = False, -1, (), 0.0
            self.widget.state, self.widget.trouble = "running", False
            self.widget.status = f"waiting for the first two pages of {self._name}"
            self._feed = _Feed(self._owner, self.monitor, self._show, own=self._given is None)
        self._feed.start()

    def pause(self) -> None:
        """Hold the page."""
        with self._page:
            if self._going:
                self._paused, self.widget.state = True, "paused"

    def resume(self) -> None:
        """Let it follow again."""
        with self._page:
            if self._going:
                self._paused, self.widget.state, self._seen = False, "running", -1

    def stop(self) -> None:
        """End it; a monitor that was given goes on. Raises what went wrong, if anything did."""
        if self._feed is not None:
            self._feed.stop()

    def record(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Record from now on, into a file with the time in its name where none is given.

        Raises:
            ServingError: nothing live is shown, or the file exists or cannot be written.
        """
        if not isinstance(self.monitor, Monitor):
            raise ServingError("only a running monitor can be recorded; start it first")
        self.monitor.record(path or time.strftime("serving-%Y%m%d-%H%M%S.jsonl"))
        recording = self.monitor.recording
        if recording is None:
            raise ServingError(self.monitor.recording_trouble or "recording ended at once")
        return recording

    @property
    def samples(self) -> list[Sample]:
        """What there is, for the figures of ``views``."""
        return [] if self.monitor is None else self.monitor.samples

    @property
    def text(self) -> str:
        """The counts so far; of a recording that is not replayed yet those of all of it."""
        samples = self.samples
        if self.monitor is None and isinstance(self._owner, Recording):
            samples = list(self._owner.samples)
        return f"{self._name}: {counts_words(samples)}"

    # -- beneath ----------------------------------------------------------------------------------

    @property
    def _going(self) -> bool:
        return self._feed is not None and self._feed.decoding

    @property
    def _engine(self) -> str | None:
        engine = self.widget.settings.get("engine", ALL)
        return None if engine == ALL else engine

    def _message(self, _: Any, content: Any, __: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind in ("start", "stop", "pause", "resume", "record"):
            self.widget.send({"kind": "heard"})
        if kind == "start":
            self.start()
        elif kind == "stop" and self._feed is not None:
            self._feed.cancel()
        elif kind == "pause":
            self.pause()
        elif kind == "resume":
            self.resume()
        elif kind == "record":
            self._toggle_recording()
        elif kind == "settings":
            self._take(content.get("settings"))
        elif kind == "ready":
            with self._page:
                self._seen, self._said, self._next = -1, (), 0.0
                if self.monitor is not None and self._feed is not None:
                    self._update(self.monitor)
            if self.autostart and self._feed is None:
                self.start()

    def _take(self, settings: Any) -> None:
        """What the menus say; what they cannot say changes nothing."""
        if not isinstance(settings, dict):
            return
        window, engine = settings.get("window"), settings.get("engine")
        with self._page:
            known = dict(self.widget.settings)
            if isinstance(window, str) and window in WINDOWS:
                known["window"] = window
            if engine in self.widget.choices["engines"]:
                known["engine"] = engine
            self.widget.settings = known
            self._next = 0.0
            if self.monitor is not None and self._feed is not None:
                self._update(self.monitor)

    def _toggle_recording(self) -> None:
        monitor = self.monitor
        self._refused = ""
        if isinstance(monitor, Monitor) and monitor.recording is not None:
            monitor.stop_recording()
        else:
            try:
                self.record()
            except WorkbenchError as error:
                self._refused = str(error)
        with self._page:
            self._said, self._next = (), 0.0
            if self._paused and self.monitor is not None:  # a page that is held says so, too
                self._update(self.monitor)

    def _show(self, feed: _Feed, ended: bool) -> None:
        with self._page:
            if feed is not self._feed:
                return  # a newer one has the page
            now = time.monotonic()
            if not ended and (self._paused or now < self._next):
                return
            state = self._state(feed.source)
            if feed.source.seen != self._seen or state != self._said or ended:
                self._update(feed.source)
                took = time.monotonic() - now
                self._next = now + max(1 / HERTZ, took / _SHARE)
            if ended:
                self.widget.trouble = feed.error is not None
                self.widget.status = self._end(feed)
                self.widget.state = "ended"  # last: whoever waits for it finds the rest

    def _state(self, source: Source) -> tuple[Any, ...]:
        if isinstance(source, Monitor):
            return source.stale_since, source.error, source.recording, source.recording_trouble
        return (source.stale_since, source.error)

    def _update(self, source: Source) -> None:
        samples = source.samples
        engines = [ALL, *(labels if len(labels := engines_of(samples)) > 1 else [])]
        if engines != self.widget.choices["engines"] and samples:
            self.widget.choices = {**self.widget.choices, "engines": engines}
            if self.widget.settings["engine"] not in engines:
                self.widget.settings = {**self.widget.settings, "engine": ALL}
        self._seen, self._said = source.seen, self._state(source)
        seconds = WINDOWS[self.widget.settings["window"]]
        live = isinstance(source, Monitor)
        recording = source.recording if isinstance(source, Monitor) else None
        trouble = source.recording_trouble if isinstance(source, Monitor) else None
        stale = source.stale_since
        if source.seen:
            status = f"{_origin(source, live=stale is None)} · {plural(source.seen, 'sample')}"
        else:  # figures are of what happened between two pages
            status = "no sample yet: it takes two pages of metrics"
        if recording is not None:
            status += f" · recording into {recording}"
        elif trouble is not None:
            status += f" · {trouble}"
        if self._refused:
            status += f" · {self._refused}"
        self.widget.send(
            {
                "kind": "update",
                **page_figures(samples, self._engine, seconds),
                "title": title_of(samples, self._where),
                "window": seconds,
                "stale": stale,
                "why": source.error or "",
                "status": status,
                "live": live,
                "recording": recording is not None,
            }
        )

    def _end(self, feed: _Feed) -> str:
        if feed.error is not None:
            return f"{type(feed.error).__name__}: {feed.error}"
        words = plural(feed.source.seen, "sample")
        over = isinstance(feed.source, Replay) and not feed.cancelled
        origin = _origin(feed.source, live=False)
        return f"{origin} · {words} · {'end of the recording' if over else 'stopped'}"

    def _what(self) -> str:
        if isinstance(self._owner, Recording):
            return "The recording of a serving engine is replayed"
        return "A serving engine is watched"

    def _static_html(self) -> str:
        return (
            f'<div style="font-family:{theme.SANS};font-size:{theme.TEXT}px;opacity:.75">'
            f"{self._what()} here when the notebook runs:"
            f'<div style="font-family:{theme.MONO};overflow-wrap:anywhere">{escape(self.text)}'
            "</div></div>"
        )


def _origin(source: Source, *, live: bool) -> str:
    """Where the figures come from; what follows no server any more is not called live."""
    words = source.source
    if live or not isinstance(source, Monitor):
        return words
    return words.replace("measured live", "measured").replace(", live", "")


class _Feed(Background):
    """Tells the page about a source until that ends, or is told to end."""

    def __init__(
        self,
        owner: object,
        source: Source,
        show: Callable[[_Feed, bool], None],
        *,
        own: bool,
    ) -> None:
        super().__init__(owner, threading.Event())
        self.source = source
        self._told, self._own = show, own

    def _work(self) -> None:
        try:
            while self.source.running and not self._cancel.wait(0.05):
                pass
        finally:
            if self._own:
                self.source.stop()

    def _hand_over(self, ended: bool) -> None:
        self._told(self, ended)


def serving(
    what: Monitor | Replay | Recording | Address | str | os.PathLike[str],
    *,
    window: str = "2 min",
    hertz: float = 2.0,
    keep: int = KEEP,
    foreign: bool = False,
    speed: float = 1.0,
    autostart: bool = True,
) -> Serving:
    """A serving engine as it goes, from its page of metrics, or a recording of one.

    Args:
        what: a monitor, which goes on when the page ends; the address of a server, which then is
            watched as long as the page is; a recording, or the file of one (a path, or a text that
            ends with ``.jsonl``).
        window: what figures and lines are of at first: ``30 s``, ``2 min``, ``10 min``, ``all``.
        hertz, keep, foreign: of the monitor that is made for an address.
        speed: of a recording; 1 is as it went.
        autostart: begin as soon as a page shows it (and only then: a notebook that runs without a
            page asks no server).

    Raises:
        ServingError: no such address, no recording, an unknown window, a number out of its range.
    """
    if window not in WINDOWS:
        raise ServingError(f"window is one of {', '.join(WINDOWS)}, not {window!r:.40}")
    more: dict[str, Any] = {"window": window, "autostart": autostart}
    if isinstance(what, Monitor):
        given = what
        return Serving(lambda: given, owner=given, given=given, name=given.address.url, **more)
    if isinstance(what, str) and not what.endswith(".jsonl") and not os.path.isfile(what):
        what = Address.of(what, foreign=foreign)
    if isinstance(what, Address):
        address = Address.of(what, foreign=foreign)
        check_settings(hertz, keep)
        return Serving(
            lambda: Monitor(address, hertz=hertz, keep=keep, foreign=foreign),
            owner=sys.intern(address.url),  # a page of the same server ends the one before
            given=None,
            name=address.url,
            **more,
        )
    if isinstance(what, Replay):
        recording, speed = what.recording, what.speed
    else:
        recording = what if isinstance(what, Recording) else read_recording(what)
    Replay(recording, speed=speed)  # refuses a speed that is none
    return Serving(
        lambda: Replay(recording, speed=speed),
        owner=recording,
        given=None,
        name=recording.source,
        **more,
    )
