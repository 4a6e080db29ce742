"""``workbench demo`` with a drafter: what was accepted, corrected and won, as it is written."""

from __future__ import annotations

import math
import sys
from time import monotonic
from typing import Any

from rich.live import Live
from rich.text import Text

from workbench.demo import REDRAW_SECONDS, Written, context_bar
from workbench.model.generate import Generation
from workbench.spec.doubt import doubt
from workbench.spec.loop import Decoding
from workbench.spec.metrics import Tally
from workbench.spec.step import RequestStep, Step
from workbench.terminal import Page, emit, note, printable, speed
from workbench.terminal_spec import MARKS, NEWLINE, Pieces, block_signs, lengths, marks_legend


class _Run:
    """A decoding of one prompt and its figures so far."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding
        self.pieces = Pieces(decoding.beam)
        self.tally = Tally(decoding.settings.speculative_tokens)
        self.last: RequestStep | None = None
        self.stopped = False
        self._drafting = self._verifying = 0.0
        self._drafted = 0  # timed steps with a block

    def count(self, step: Step) -> None:
        """Note a step; the first decode step is not timed, as in :class:`Generation`."""
        self.tally.add(step)
        self.last = step.requests[0]
        if self.decoding.steps > 1 and self.last.drafted:
            self._drafted += 1
            self._drafting += step.draft_seconds
            self._verifying += step.verify_seconds

    @property
    def result(self) -> Generation:
        return self.decoding.generations[0]

    @property
    def used(self) -> int:
        return self.decoding.context_used[0]

    @property
    def limit(self) -> int:
        return self.decoding.beam.config.max_position_embeddings

    @property
    def draft_ms(self) -> float | None:
        """Mean of the timed steps that drafted."""
        return 1e3 * self._drafting / self._drafted if self._drafted else None

    @property
    def verify_ms(self) -> float | None:
        """The same, of the target's pass and the verdict."""
        return 1e3 * self._verifying / self._drafted if self._drafted else None

    def stop(self) -> None:
        self.stopped = True
        self.decoding.close()

    def summary(self) -> str:
        """The line at the end."""
        result = self.result
        why = "stopped" if self.stopped else f"ended by {result.finish}"
        step = ""
        if self.draft_ms is not None and self.verify_ms is not None:
            step = f"; draft {self.draft_ms:.1f} ms, verify {self.verify_ms:.1f} ms a step"
        return (
            f"{result.new_tokens} tokens, {why}; {speed(result.tokens_per_second)} (decode, "
            f"measured here); {lengths(self.tally.acceptance())}{step}; "
            f"context {self.used} of {self.limit}"
        )

    def doubt(self) -> None:
        """Say it when next to nothing was accepted."""
        said = doubt(self.tally.acceptance(), self.decoding.settings.sampling.temperature)
        if said is not None:
            note(f"workbench: {said}")

    def status(self) -> list[Text]:
        """The lines under the text."""
        length = self.tally.acceptance().length_pooled
        rate = self.result.tokens_per_second
        said = "not timed yet" if math.isnan(rate) else speed(rate)
        first = Text.assemble((f"{said:>16}", "bold"))
        if length is not None:
            first.append(f"   acceptance length {length:.2f}")
        if self.draft_ms is not None and self.verify_ms is not None:
            first.append(f"   draft {self.draft_ms:.1f} ms, verify {self.verify_ms:.1f} ms", "dim")
        second = Text.assemble("   context ", *context_bar(self.used, self.limit))
        if self.last is not None and self.last.drafted:
            part = self.last
            second.append("   block ")
            second.append(block_signs(len(part.drafted), part.admitted, part.accepted))
        second.append("   Ctrl-C stops")
        return [first, second]


def run_terminal(decoding: Decoding, prompt: str) -> None:
    """Write the steps to stdout as they come, marked and with a status on a terminal.

    Ctrl-C ends the decoding, and the summary follows.
    """
    run, console = _Run(decoding), Page(highlight=False)
    if not console.is_terminal:
        _run_plain(run, prompt)
        return
    console.print(marks_legend())
    console.print()
    written = Written(console, run.status)
    written.add(printable(prompt), "dim")
    # Redrawn from this loop, not by a thread of Live's: that would race with the text it draws.
    with Live(get_renderable=written.render, console=console, auto_refresh=False) as live:
        try:
            drawn = 0.0
            for step in decoding:
                run.count(step)
                for text, kind in run.pieces.of(step.requests[0]):
                    style = MARKS[kind][1]
                    written.add(printable(text), style, NEWLINE if style else "")
                if monotonic() - drawn >= REDRAW_SECONDS:
                    written.draw(live)
                    drawn = monotonic()
        except KeyboardInterrupt:
            run.stop()
        written.done = True
        written.draw(live)
    console.print(Text(run.summary(), style="dim"))
    run.doubt()


def _run_plain(run: _Run, prompt: str) -> None:
    print(prompt, end="", flush=True)
    try:
        for step in run.decoding:
            run.count(step)
            text = "".join(text for text, _ in run.pieces.of(step.requests[0]))
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        run.stop()
    print(flush=True)
    note(run.summary())
    run.doubt()


def run_json(decoding: Decoding, prompt: str) -> None:
    """JSON lines on stdout: ``type`` is ``start``, then ``step`` and its ``token`` lines for each
    step, then ``summary``. Token lines are those of a demo without a drafter, with their ``kind``;
    the loop gives no log-probabilities, so there is none in them.
    """
    run, drafter = _Run(decoding), decoding.drafter
    emit(
        {
            "type": "start",
            "model": decoding.beam.name,
            "drafter": None if drafter is None else drafter.name,
            "speculative_tokens": decoding.settings.speculative_tokens,
            "prompt": prompt,
            "prompt_tokens": run.used,
            "context": run.limit,
        }
    )
    try:
        for step in decoding:
            run.count(step)
            for line in _lines(run, step):
                emit(line)
    except KeyboardInterrupt:
        run.stop()
    acceptance = run.tally.acceptance()
    emit(
        {"type": "summary"}
        | run.result.to_dict()
        | {
            "acceptance_length": acceptance.length_pooled,
            "per_position_acceptance": list(acceptance.survival),
            "accepted": acceptance.accepted,
            "rejected": acceptance.rejected,
            "trimmed": acceptance.trimmed,
            "draft_ms": run.draft_ms,
            "verify_ms": run.verify_ms,
            "stopped": run.stopped,
            "context_used": run.used,
        }
    )
    sys.stdout.flush()


def _lines(run: _Run, step: Step) -> list[dict[str, Any]]:
    part = step.requests[0]
    rate = run.result.tokens_per_second
    common = {
        "tokens_per_second": rate if math.isfinite(rate) else None,
        "context_used": run.used,
    }
    lines: list[dict[str, Any]] = [
        {
            "type": "step",
            "index": step.index,
            "phase": step.phase,
            "drafted": list(part.drafted),
            "confidences": list(part.confidences),
            "admitted": part.admitted,
            "accepted": part.accepted,
            "draft_seconds": step.draft_seconds,
            "verify_seconds": step.verify_seconds,
            "seconds": step.seconds,
            "acceptance_length": run.tally.acceptance().length_pooled,
        }
        | common
    ]
    first = run.result.new_tokens - len(part.token_ids)
    for offset, (text, kind) in enumerate(run.pieces.of(part)):
        last = offset == len(part.token_ids) - 1
        lines.append(
            {
                "type": "token",
                "index": first + offset,
                "token_id": part.token_ids[offset],
                "text": text,
                "kind": kind,
                "finished": part.finished if last else None,
            }
            | common
        )
    return lines
