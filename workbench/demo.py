"""``workbench demo``: watch a model write in the terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from workbench.model.generate import Token, TokenStream
from workbench.terminal import (
    Page,
    emit,
    note,
    printable,
    probability_legend,
    probability_style,
    speed,
)

DEFAULT_PROMPT = '''import os


class Cache:
    """A cache of files."""

    def __init__(self, '''
REDRAW_SECONDS = 0.1


def run_terminal(tokens: TokenStream, prompt: str, why_no_drafts: str) -> None:
    """Write tokens to stdout as they come, in colours and with a status line on a terminal.

    Finished lines scroll up; the line being written and the status below it are redrawn a few times
    a second, whatever the decode speed. Ctrl-C ends the decoding, and the summary follows.
    """
    console = Page(highlight=False)
    if not console.is_terminal:
        _run_plain(tokens, prompt, why_no_drafts)
        return
    console.print(probability_legend())
    console.print()
    page = Written(console, lambda: [_status(tokens)])
    page.add(printable(prompt), "dim")
    stopped = False
    # Redrawn from this loop, not by a thread of Live's: that would race with the text it draws.
    with Live(get_renderable=page.render, console=console, auto_refresh=False) as live:
        try:
            drawn = 0.0
            for token in tokens:
                page.add(printable(token.text), probability_style(math.exp(token.logprob)))
                if monotonic() - drawn >= REDRAW_SECONDS:
                    page.draw(live)
                    drawn = monotonic()
        except KeyboardInterrupt:
            stopped = True
            tokens.close()
        page.done = True
        page.draw(live)
    console.print(Text(_summary(tokens, stopped, why_no_drafts), style="dim"))


def _run_plain(tokens: TokenStream, prompt: str, why_no_drafts: str) -> None:
    stopped = False
    print(prompt, end="", flush=True)
    try:
        for token in tokens:
            print(token.text, end="", flush=True)
    except KeyboardInterrupt:
        stopped = True
        tokens.close()
    print(flush=True)
    note(_summary(tokens, stopped, why_no_drafts))


def run_json(tokens: TokenStream, prompt: str) -> None:
    """JSON lines on stdout: ``type`` is ``start``, then ``token`` for each, then ``summary``."""
    limit = tokens.beam.config.max_position_embeddings
    emit(
        {
            "type": "start",
            "model": tokens.beam.name,
            "drafter": None,
            "prompt": prompt,
            "prompt_tokens": tokens.context_used[0],
            "context": limit,
        }
    )
    stopped = False
    try:
        for token in tokens:
            emit(_token_line(tokens, token))
    except KeyboardInterrupt:
        stopped = True
        tokens.close()
    summary = tokens.generations[0].to_dict()
    emit({"type": "summary"} | summary | {"stopped": stopped, "context_used": _used(tokens)})
    sys.stdout.flush()


def _token_line(tokens: TokenStream, token: Token) -> dict[str, Any]:
    rate = tokens.tokens_per_second
    return {
        "type": "token",
        "index": token.index,
        "token_id": token.id,
        "text": token.text,
        "logprob": token.logprob,
        "tokens_per_second": rate if math.isfinite(rate) else None,
        "context_used": _used(tokens),
        "finished": token.finished,
    }


def _used(tokens: TokenStream) -> int:
    return tokens.context_used[0]


def _summary(tokens: TokenStream, stopped: bool, why_no_drafts: str) -> str:
    result, limit = tokens.generations[0], tokens.beam.config.max_position_embeddings
    why = "stopped" if stopped else f"ended by {result.finish}"
    return (
        f"{result.new_tokens} tokens, {why}; {speed(result.tokens_per_second)} (decode, measured "
        f"here), {why_no_drafts}; context {_used(tokens)} of {limit}"
    )


def _status(tokens: TokenStream) -> Text:
    limit = tokens.beam.config.max_position_embeddings
    return Text.assemble(
        (f"{speed(tokens.tokens_per_second):>16}", "bold"),
        "   context ",
        *context_bar(_used(tokens), limit),
        "   Ctrl-C stops",
    )


def context_bar(used: int, limit: int) -> tuple[tuple[str, str], tuple[str, str], str]:
    """How full the context is, for :meth:`rich.text.Text.assemble`."""
    filled = round(20 * used / limit)
    return ("━" * filled, "#7D63D9"), ("━" * (20 - filled), "dim"), f" {used} of {limit}"


class Written:
    """The line being written; whole lines are handed to the console above it.

    ``status`` gives the lines that are drawn below it.
    """

    def __init__(self, console: Console, status: Callable[[], list[Text]]) -> None:
        self.console, self.status = console, status
        self.line = Text(overflow="fold")
        self.done = False
        self._whole: list[tuple[Text, bool]] = []  # not drawn yet; whether it fills the width

    def add(self, text: str, style: str, newline: str = "") -> None:
        """Append a piece.

        ``newline`` is shown at each line end of the piece, in its style.
        """
        first, *rest = text.expandtabs(4).split("\n")
        self.line.append(first, style)
        for piece in rest:
            self.line.append(newline, style)
            self._whole.append((self.line, False))
            self.line = Text(overflow="fold")
            self.line.append(piece, style)
        # A line longer than the screen is wide would make the redrawn region grow without end.
        while cell_len(self.line.plain) > self.console.width:
            head, self.line = self.line.divide([self.console.width])
            self._whole.append((head, True))

    def draw(self, live: Live) -> None:
        """Hand what is complete over for good, and redraw the rest.

        Both at once: what is printed alone would stand above the region as it was last drawn.
        """
        whole, self._whole = self._whole, []
        for line, full in whole:
            if full:
                self.console.print(line, no_wrap=True, overflow="ignore", crop=False)
            else:
                self.console.print(line, overflow="fold")
        live.refresh()

    def render(self) -> Group | Text:
        """The unfinished line, and below it the figures of this moment."""
        line = self.line.copy()
        return line if self.done else Group(line, Text(), *self.status())
