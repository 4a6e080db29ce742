"""A recorded run in the drafting dashboard: no model is needed, only its tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from workbench.errors import DraftError
from workbench.spec.trace import Trace
from workbench.terminal import printable
from workbench.views.drafting_lane import Lane
from workbench.views.drafting_page import PLAIN, Board
from workbench.views.drafting_run import Run, Source, paced
from workbench.views.spec_marks import TokenTexts
from workbench.views.spec_text import written_with_drafts


class Replay(Board):
    """A recorded trace in the same page. :func:`drafting_replay` makes it."""

    def __init__(self, trace: Trace, tokenizer: TokenTexts, prompts: Mapping[int, str],
                 speed: float, autostart: bool) -> None:  # fmt: skip
        self.trace, self.autostart, self.speed = trace, autostart, speed
        self._tokenizer, self._prompts = tokenizer, dict(prompts)
        self._source = _source(trace)
        self._slots = max((len(r.drafted) for s in trace.steps for r in s.requests), default=0)
        super().__init__(
            self._prompts.get(0, ""), {"speed": speed}, {"live": False, "source": self._source}
        )

    @property
    def text(self) -> str:
        """The whole trace's text and counts, replayed so far or not."""
        lane = self._lane()
        for step in self.trace.steps:
            lane.add(step)
        return f"{lane.text}\n-- {self._source}"

    def start(self, *, speed: float | None = None) -> None:
        """From its beginning; ``speed`` 1 is as fast as it was recorded.

        Raises:
            DraftError: the speed is no number above 0.
        """
        if speed is not None:
            self.speed = _sound_speed(speed)
        self._begin()

    def _take(self, prompt: str, settings: Mapping[str, Any]) -> None:
        self.speed = _sound_speed(settings.get("speed", self.speed))

    def _lane(self) -> Lane:
        name = str(self.trace.header.get("drafter") or PLAIN)
        return Lane(
            name, self._tokenizer, slots=self._slots, source="recorded",
            prompt=lambda request: self._prompts.get(request, ""),
        )  # fmt: skip

    def _make(self, paused: bool) -> None:
        cancel, lane = threading.Event(), self._lane()
        self.widget.settings = {"speed": self.speed}
        source = Source(name=lane.name, steps=paced(self.trace.steps, self.speed, cancel))
        self._launch(self, [lane], [source], cancel, paused)

    def _end(self, run: Run) -> str:
        return "stopped" if run.cancelled else "end of the recording"

    def _static_html(self) -> str:
        prompts = {request: printable(text) for request, text in self._prompts.items()}
        view = written_with_drafts(
            self.trace.steps,
            self._tokenizer,
            prompts=prompts,
            model=str(self.trace.header.get("model")),
            source=self._source,
        )
        return str(view.html)


def _sound_speed(speed: Any) -> float:
    if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 < speed <= 1000:
        raise DraftError(f"speed must be a number above 0 and up to 1000, not {speed!r:.60}")
    return float(speed)


def _source(trace: Trace) -> str:
    """Where and when it was recorded."""
    hardware = trace.header.get("hardware")
    name = hardware.get("cpu") if isinstance(hardware, Mapping) else None
    words = [str(word) for word in (name, str(trace.header.get("date", ""))[:10]) if word]
    return "recorded: " + ", ".join(words) if words else "recorded"


def drafting_replay(
    trace: Trace,
    tokenizer: TokenTexts,
    *,
    prompts: Mapping[int, str] | None = None,
    speed: float = 1.0,
    autostart: bool = True,
) -> Replay:
    """A recorded run in the drafting dashboard: no model is needed, only its tokenizer.

    Args:
        trace: of mode ``steps``.
        prompts: texts to show before what was written, by request; those that the trace's header
            has under ``prompts`` when None.
        speed: 1 is as fast as it was recorded.
        autostart: begin as soon as a page shows it.

    Raises:
        DraftError: a trace of another mode or without steps, or a speed out of range.
    """
    if trace.mode != "steps":
        raise DraftError(
            f"a trace of mode {trace.mode} has no steps to replay; record one of mode 'steps'"
        )
    if not trace.steps:
        raise DraftError("this trace has no steps; record one that has")
    if prompts is None:
        said = trace.header.get("prompts")
        found = said if isinstance(said, list) else []
        prompts = {n: text for n, text in enumerate(found) if isinstance(text, str)}
    return Replay(trace, tokenizer, prompts, _sound_speed(speed), autostart)
