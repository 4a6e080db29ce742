"""What drafting dashboards have in common: the widget, its messages, and the controls."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.errors import WorkbenchError
from workbench.spec.step import KINDS, Step
from workbench.terminal import printable
from workbench.views import spec_marks, theme
from workbench.views.dashboard import Dashboard
from workbench.views.drafting_lane import LAST_PIECES, PROMPT, Lane, Piece
from workbench.views.drafting_run import Batch, Run, Source
from workbench.views.numbers import plural

_HERE = Path(__file__).parent
_BLOCKS = 24  # sent at most: more than a wide page has room for
_SENT = 600  # pieces of text in one message; a faster run leaves out the middle
PLAIN = "plain decoding"
_BUTTONS = ("start", "step", "pause", "resume", "stop")


class DraftingWidget(anywidget.AnyWidget):
    """The page's side. Token text travels as text, never as HTML.

    To the page: ``reset`` (which lanes there are) and ``update`` (new text, last blocks, figures),
    at most ten a second, and ``block``, the answer to the page's ``block``: one block with its
    candidates (None where it is no longer kept), and ``heard``, which answers each button: a kernel
    that is busy with a cell hears nothing. From the page: ``start``, ``step``, ``pause``,
    ``resume``, ``stop``, and ``ready`` when a view of it has been drawn.
    """

    _esm = (_HERE / "drafting.js").read_text("utf-8")
    _css = (_HERE / "drafting.css").read_text("utf-8")
    prompt = traitlets.Unicode().tag(sync=True)
    state = traitlets.Unicode("ready").tag(sync=True)  # ready, running, paused, ended
    status = traitlets.Unicode("").tag(sync=True)
    trouble = traitlets.Bool(False).tag(sync=True)  # the status says what went wrong
    settings = traitlets.Dict().tag(sync=True)
    choices = traitlets.Dict().tag(sync=True)
    look = traitlets.Dict().tag(sync=True)


def _look() -> dict[str, Any]:
    """Fonts, colours and marks, from where the figures have them."""
    return {
        "mono": theme.MONO,
        "sans": theme.SANS,
        "text": theme.TEXT,
        "small": theme.SMALL,
        "kinds": [
            {"kind": kind, "word": m.word, "sign": m.sign, "color": m.color, "css": ";".join(m.css)}
            for kind, m in ((kind, spec_marks.KINDS[kind]) for kind in KINDS)
        ],
        "slots": {
            fate: {"word": m.word, "sign": m.sign, "color": m.color, "pattern": m.pattern}
            for fate, m in spec_marks.SLOTS.items()
        },
        "pooled": theme.SPARSE,
        "recent": theme.SLIDING,
        "survival": theme.SPARSE,
        "conditional": theme.HEAT,
        "most": LAST_PIECES,
    }


class Board(Dashboard):
    """What a live run and a replay have in common: lanes, controls, and the page."""

    autostart: bool

    def __init__(self, prompt: str, settings: dict[str, Any], choices: dict[str, Any]) -> None:
        self.run: Run | None = None
        self.lanes: list[Lane] = []
        self._page = threading.RLock()  # what is sent to it comes from several threads
        self._prompt = prompt
        self.widget = DraftingWidget(
            prompt=prompt, status="ready", settings=settings, choices=choices, look=_look()
        )
        self.widget.on_msg(self._message)

    # -- in a cell --------------------------------------------------------------------------------

    def pause(self) -> None:
        """Hold before the next step."""
        if self.run is not None:
            self.run.pause()
            self._say()

    def resume(self) -> None:
        """Go on after a pause."""
        if self.run is not None:
            self.run.resume()
            self._say()

    def step(self, count: int = 1) -> None:
        """So many steps of every lane, then hold; begins a run when none is going."""
        if self.run is None or not self.run.decoding:
            self._begin(paused=True)
        if self.run is not None:
            self.run.step(count)
            self._say()

    def stop(self) -> None:
        """End the run; raises what went wrong in the background, if anything did."""
        if self.run is not None:
            self.run.stop()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the run has ended; raises what went wrong, TimeoutError if it goes on."""
        if self.run is not None:
            self.run.wait(timeout)

    @property
    def steps(self) -> list[Step]:
        """The last steps of the first lane, oldest first, for the figures of ``views``."""
        with self._page:
            return list(self.lanes[0].steps) if self.lanes else []

    @property
    def text(self) -> str:
        """The text and the counts of every lane; no times, so that equal runs say equal words."""
        with self._page:
            if not any(lane.seen for lane in self.lanes):
                return f"{printable(self._prompt)}\n-- nothing decoded yet"
            return "\n\n".join(lane.text for lane in self.lanes)

    # -- beneath ----------------------------------------------------------------------------------

    def _begin(self, *, paused: bool = False) -> None:
        with self._page:  # pages may press while a cell starts
            if self.run is not None:
                self.run.cancel()
            self._make(paused)

    @abstractmethod
    def _make(self, paused: bool) -> None:
        """Begin a run."""

    def _launch(self, owner: object, lanes: Sequence[Lane], sources: Sequence[Source],
                cancel: threading.Event, paused: bool) -> None:  # fmt: skip
        self.lanes = list(lanes)
        self.run = Run(owner, sources, self._show, cancel=cancel, paused=paused)
        self._reset()
        self.widget.state, self.widget.trouble = "paused" if paused else "running", False
        self.widget.status = "reading the prompt"
        self.run.start()

    def _refuse(self, error: WorkbenchError) -> None:
        """Say why there is no run; one that went before has been ended."""
        self.run = None
        self.widget.state, self.widget.status, self.widget.trouble = "ready", str(error), True

    def _message(self, _: Any, content: Any, __: Any) -> None:
        if not isinstance(content, dict):
            return
        kind = content.get("kind")
        if kind in _BUTTONS:
            self.widget.send({"kind": "heard"})
        if kind in ("start", "step") and isinstance(content.get("settings"), dict):
            going = self.run is not None and self.run.decoding
            if kind == "step" and going:
                self.step()
                return
            try:
                self._take(str(content.get("prompt", "")), content["settings"])
            except WorkbenchError as error:
                self._refuse(error)
                return
            if kind == "start":
                self._begin()
            else:
                self.step()
        elif kind == "pause":
            self.pause()
        elif kind == "resume":
            self.resume()
        elif kind == "stop" and self.run is not None:
            self.run.cancel()
        elif kind == "block":
            self._answer(content)
        elif kind == "ready":
            with self._page:
                self._reset()
                self._send([list(lane.pieces) for lane in self.lanes])
            if self.autostart and self.run is None:
                self._begin()

    @abstractmethod
    def _take(self, prompt: str, settings: Mapping[str, Any]) -> None:
        """What the page's controls say."""

    def _answer(self, content: Mapping[str, Any]) -> None:
        keys: list[int] = [content.get(key, -1) for key in ("lane", "step", "request")]
        if not all(type(n) is int for n in keys):
            return
        lane, step, request = keys
        with self._page:
            if 0 <= lane < len(self.lanes):
                found = self.lanes[lane].block(step, request)
                answer = {"kind": "block", "lane": lane, "step": step, "block": found}
                self.widget.send(answer)

    def _reset(self) -> None:
        lanes = [{"name": lane.name, "slots": lane.slots} for lane in self.lanes]
        self.widget.send({"kind": "reset", "lanes": lanes, "prompt": printable(self._prompt)})

    def _show(self, run: Run, batch: Batch) -> None:
        with self._page:
            if run is not self.run:
                return  # a newer run has the page
            new: list[list[Any]] = [[] for _ in self.lanes]
            for number, step in batch:
                new[number] += self.lanes[number].add(step)
            if batch:
                self._send(new)
            # While it runs the update has the status, and is the only message.
            if self.widget.state != "running" or self._now(run)[0] != "running":
                self._say()

    def _send(self, pieces: Sequence[Sequence[Any]]) -> None:
        first = next((lane for lane in self.lanes if lane.name == PLAIN), None)
        first = first or (self.lanes[1] if len(self.lanes) > 1 else None)
        items = []
        for lane, new in zip(self.lanes, pieces, strict=True):
            item = {"pieces": last_pieces(new), **lane.figures(first)}
            if lane.slots:
                item["blocks"] = lane.blocks(_BLOCKS)
            items.append(item)
        if items:
            status = "" if self.run is None else self._now(self.run)[1]
            self.widget.send({"kind": "update", "lanes": items, "status": status})

    def _say(self) -> None:
        """State and status as they are."""
        with self._page:
            if self.run is not None:
                self.widget.state, self.widget.status = self._now(self.run)
                self.widget.trouble = self.run.error is not None

    def _now(self, run: Run) -> tuple[str, str]:
        each = [f"{lane.seen:,}" for lane in self.lanes[:-1]]
        steps = " + ".join([*each, plural(self.lanes[-1].seen, "step")]) if self.lanes else ""
        where = self._where()
        steps = f"{steps} · {where}" if where else steps
        if run.error is not None:
            return "ended", f"{type(run.error).__name__}: {run.error}"
        if not run.decoding:
            return "ended", f"{steps} · {self._end(run)}"
        state = "paused" if run.paused else "running"
        return state, f"{steps} · {state}"

    def _where(self) -> str:
        """What is being read, for the status; empty where there is only one thing."""
        return ""

    def _end(self, run: Run) -> str:
        return "stopped" if run.cancelled else "over"


def last_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """What one message holds of them; where some are left out it says so."""
    if len(pieces) <= _SENT:
        return list(pieces)
    left_out = plural(len(pieces) - _SENT, "token")
    return [(f"\n… {left_out} not shown …\n", PROMPT, 0, -1, -1, 0, -1), *pieces[-_SENT:]]
