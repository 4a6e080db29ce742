"""The page of adaptive verification: its widget, and what goes to it and comes from it."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import anywidget
import traitlets

from workbench.errors import WorkbenchError
from workbench.spec.adaptive import Policy
from workbench.spec.loop import Decoding
from workbench.spec.step import Step
from workbench.views import (
    adaptive_objective,
    adaptive_reliability,
    adaptive_time,
    spec_marks,
    theme,
)
from workbench.views.adaptive_watch import SPAN, Watch
from workbench.views.drafting_page import Board
from workbench.views.drafting_run import Batch, Run
from workbench.views.numbers import plural

_HERE = Path(__file__).parent
_SLOWLY = 0.5  # s between two messages with what changes little
_EXPORT = "export default { render };"


def _script() -> str:
    """Drafting's pieces (charts, sliders, buttons) and this page's own, as one module."""
    pieces = (_HERE / "drafting.js").read_text("utf-8")
    return pieces.replace(_EXPORT, "") + (_HERE / "adaptive.js").read_text("utf-8")


class AdaptiveWidget(anywidget.AnyWidget):
    """The page's side.

    To the page: ``reset``, ``update`` (the newest step, figures, lines; at most ten a second and
    only the newest of several steps) and ``heard``, which answers each button. From the page:
    ``start``, ``step``, ``pause``, ``resume``, ``stop``; ``change``, of what acts at once;
    ``measure``, costs anew; and ``ready`` when a view of it has been drawn.
    """

    _esm = _script()
    _css = "".join((_HERE / name).read_text("utf-8") for name in ("drafting.css", "adaptive.css"))
    state = traitlets.Unicode("ready").tag(sync=True)  # ready, running, paused, ended
    status = traitlets.Unicode("").tag(sync=True)
    trouble = traitlets.Bool(False).tag(sync=True)  # the status says what went wrong
    settings = traitlets.Dict().tag(sync=True)
    choices = traitlets.Dict().tag(sync=True)
    look = traitlets.Dict().tag(sync=True)


def look() -> dict[str, Any]:
    """Fonts, colours and marks, from where the figures have them."""
    return {
        "mono": theme.MONO,
        "sans": theme.SANS,
        "text": theme.TEXT,
        "small": theme.SMALL,
        "slots": {
            fate: {"word": m.word, "sign": m.sign, "color": m.color}
            for fate, m in spec_marks.SLOTS.items()
        },
        "survival": theme.HEAT,
        # What a figure of the same has: views.objective_curve, decisions_over_time, reliability.
        "chosen": adaptive_objective.EXPECTED,
        "hindsight": adaptive_objective.HINDSIGHT,
        "policy": adaptive_time.COLOR,
        "fixed": adaptive_time.AGAINST,
        "drafted": adaptive_time.DRAFTED,
        "start": adaptive_reliability.START,
        "calibrated": adaptive_reliability.CALIBRATED,
        "neutral": theme.NEUTRAL,
        "span": SPAN,
    }


class AdaptivePage(Board):
    """Controls and messages of the page; who decodes is for :class:`Adaptive` to say."""

    def __init__(self, settings: dict[str, Any], choices: dict[str, Any]) -> None:
        # Not Board's own: its widget shows texts and blocks.
        self.run: Run | None = None
        self.lanes = []
        self.watch = Watch()
        self._page = threading.RLock()
        self._prompt = ""
        self._slow_at = 0.0
        self.widget = AdaptiveWidget(
            status="ready", settings=settings, choices=choices, look=look()
        )
        self.widget.on_msg(self._message)

    @property
    def steps(self) -> list[Step]:
        """The last steps, oldest first, for the figures of ``views``."""
        with self._page:
            return list(self.watch.steps)

    # -- beneath ----------------------------------------------------------------------------------

    def _message(self, widget: Any, content: Any, buffers: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind not in ("change", "measure"):
            super()._message(widget, content, buffers)
            return
        if kind == "measure":
            self.widget.send({"kind": "heard"})
        settings = content.get("settings")
        if isinstance(settings, dict):
            try:
                self._take("", settings)
            except WorkbenchError as error:  # the run goes on with what it has
                self.widget.status, self.widget.trouble = str(error), True
                return
        if kind == "measure":
            self.measure()

    @abstractmethod
    def measure(self) -> None:
        """Measure anew what steps cost, and start with that."""

    def _reset(self) -> None:
        self._slow_at = 0.0
        self.widget.send({"kind": "reset"})

    def _show(self, run: Run, batch: Batch) -> None:
        with self._page:
            if run is not self.run:
                return  # a newer run has the page
            for _, step in batch:
                self.watch.add(step)
            ended = not run.decoding
            if batch or ended:
                self._update(slow=ended)
            # While it runs the update has the status, and is the only message.
            if self.widget.state != "running" or self._now(run)[0] != "running":
                self._say()

    def _send(self, pieces: Sequence[Sequence[Any]]) -> None:
        self._update(slow=True)  # all there is, to a page that was just drawn

    def _update(self, *, slow: bool) -> None:
        figures = self.watch.figures()
        if not figures:
            return
        now = time.monotonic()
        if slow or now - self._slow_at > _SLOWLY:
            self._slow_at = now
            figures |= self.watch.slow_figures()
        figures["status"] = "" if self.run is None else self._now(self.run)[1]
        self.widget.send({"kind": "update", **figures})

    def _now(self, run: Run) -> tuple[str, str]:
        steps = f"{plural(self.watch.seen, 'step')} · {plural(self.watch.tokens, 'token')}"
        if run.error is not None:
            return "ended", f"{type(run.error).__name__}: {run.error}"
        if not run.decoding:
            return "ended", f"{steps} · {self._end(run)}"
        state = "paused" if run.paused else "running"
        return state, f"{steps} · {state}"


# -- decoding for the page ------------------------------------------------------------------------


class Wanted(Protocol):
    """What may change between two steps."""

    @property
    def concurrency(self) -> int:
        """Sequences decoded together."""

    @property
    def policy(self) -> Policy:
        """Who decides what is verified."""


def serving(
    decoding: Decoding, prompts: Sequence[str], wanted: Callable[[], Wanted], most: int
) -> Iterator[Step]:
    """A run without an end: a place that becomes free goes to the next prompt, in turn.

    Request n is of prompt ``n % len(prompts)``; its limit is between half of ``most`` and all of
    it, different for neighbours, so that they do not end together. Whatever is wanted acts before
    the next step; where fewer sequences are, the last that came leave.

    Args:
        decoding: made with the first prompt alone, at most ``most`` tokens, and a policy.
        prompts: at least one.
        wanted: asked before each step.
        most: new tokens of a request.
    """
    joined = 1
    try:
        while True:
            now = wanted()
            assert decoding.decider is not None  # for the type checker: made with a policy
            decoding.decider.policy = now.policy
            there = decoding.requests
            for request in sorted(there)[now.concurrency :]:
                decoding.leave(request)
                decoding.forget(request)
            for _ in range(now.concurrency - len(there)):
                limit = max(1, most - joined * 7 % 16 * most // 32)
                prompt = prompts[joined % len(prompts)]
                decoding.join(prompt, max_new_tokens=limit, seed=joined)
                joined += 1
            step = next(decoding, None)
            if step is None:
                return
            yield step
            for part in step.requests:
                if part.finished is not None:
                    decoding.forget(part.request)
    finally:
        decoding.close()


def settings_words(settings: Mapping[str, Any]) -> str:
    """What a run is started with, for a page without a kernel."""
    return f"{settings['policy']} verification, {settings['concurrency']} sequences together"
