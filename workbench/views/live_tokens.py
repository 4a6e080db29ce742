"""Live generation: tokens appear in the page as they are decoded, tinted by their probability."""

from __future__ import annotations

import threading
from html import escape
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from workbench.errors import WorkbenchError
from workbench.model.generate import Token
from workbench.model.sampling import Sampling
from workbench.terminal import printable
from workbench.views import theme
from workbench.views.dashboard import Dashboard
from workbench.views.numbers import plural
from workbench.views.tokens import FULL_TINT, STRONGEST, legend
from workbench.views.writer import Writer

if TYPE_CHECKING:
    from workbench.model.beam import Beam

_HERE = Path(__file__).parent


class LiveWidget(anywidget.AnyWidget):
    """The page's side: prompt, button, status, tokens. Token text travels as text, never as HTML.

    Messages to the page: ``{"kind": "reset", "prompt"}`` and ``{"kind": "tokens", "items"}`` with
    ``[text, log-probability]`` pairs. From the page: ``start`` (with the prompt), ``stop``, and
    ``ready`` when a view of it has been drawn.
    """

    _esm = (_HERE / "live_tokens.js").read_text("utf-8")
    _css = (_HERE / "live_tokens.css").read_text("utf-8")
    prompt = traitlets.Unicode().tag(sync=True)
    running = traitlets.Bool(False).tag(sync=True)
    status = traitlets.Unicode("").tag(sync=True)
    look = traitlets.Dict().tag(sync=True)


class Live(Dashboard):
    """A prompt box, a button, and what the model writes.

    Args:
        beam: the model, with its tokenizer.
        prompt: what stands in the box at first.
        autostart: begin as soon as a page shows it (and only then: a notebook that runs without a
            page, in a test for one, decodes nothing here).

    Running the cell again, the stop button and an interrupt of the kernel each end decoding.
    """

    def __init__(
        self,
        beam: Beam,
        prompt: str,
        *,
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
        autostart: bool = True,
    ) -> None:
        if beam.tokenizer is None:
            raise WorkbenchError(
                f"{beam.name} has no tokenizer.json, so there is no text to show; add it to the "
                "model's folder"
            )
        self.beam, self.max_new_tokens, self.autostart = beam, max_new_tokens, autostart
        self.sampling = sampling or Sampling()
        self.writer: Writer | None = None
        self._page = threading.Lock()  # what is sent to it comes from two threads
        self._written_prompt = prompt
        self.widget = LiveWidget(
            prompt=prompt,
            status="ready",
            look={
                "mono": theme.MONO,
                "sans": theme.SANS,
                "text": theme.TEXT,
                "tint": theme.SURPRISE,
                "strongest": STRONGEST,
                "full": FULL_TINT,
                "legend": [list(swatch) for swatch in legend()],
            },
        )
        self.widget.on_msg(self._message)

    @property
    def text(self) -> str:
        """What is in the page: prompt and continuation, then the status."""
        new = "".join(printable(t.text) for t in self.writer.tokens) if self.writer else ""
        return f"{printable(self._written_prompt)}{new}\n-- {self.widget.status}"

    def start(self, prompt: str | None = None) -> None:
        """Decode the prompt (by default the one in the box) from its beginning."""
        if self.writer is not None:
            self.writer.cancel()
        prompt = self.widget.prompt if prompt is None else prompt
        with self._page:
            self.writer = None
            self.widget.prompt = self._written_prompt = prompt
            self.widget.send({"kind": "reset", "prompt": printable(prompt)})
        try:
            self.writer = Writer(
                self.beam,
                prompt,
                self._show,
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
            )
        except WorkbenchError as error:
            self.widget.running = False
            self.widget.status = str(error)
            return
        self.widget.running, self.widget.status = True, "reading the prompt"
        self.writer.start()

    def stop(self) -> None:
        """End decoding; raises what went wrong in the background, if anything did."""
        if self.writer is not None:
            self.writer.stop()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until decoding has ended; raises what went wrong, TimeoutError if it goes on."""
        if self.writer is not None:
            self.writer.wait(timeout)

    def _message(self, _: Any, content: Any, __: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "start":
            self.start(str(content.get("prompt", "")))
        elif kind == "stop" and self.writer is not None:
            self.writer.cancel()
        elif kind == "ready":
            self._replay()
            if self.autostart and self.writer is None:
                self.start()

    def _replay(self) -> None:
        """A new view of the widget has been drawn: give it what the others show already."""
        self.widget.send({"kind": "reset", "prompt": printable(self._written_prompt)})
        if self.writer is not None and self.writer.tokens:
            self._send(self.writer.tokens)

    def _send(self, tokens: list[Token]) -> None:
        items = [[printable(t.text), round(t.logprob, 3)] for t in tokens]
        self.widget.send({"kind": "tokens", "items": items})

    def _show(self, writer: Writer, batch: list[Token]) -> None:
        with self._page:
            if writer is not self.writer:
                return  # a newer run has the page
            if batch:
                self._send(batch)
            self.widget.status = self._status(writer)
            self.widget.running = writer.decoding

    def _status(self, writer: Writer) -> str:
        if writer.error is not None:
            return f"{type(writer.error).__name__}: {writer.error}"
        speed = writer.tokens_per_second
        parts = [plural(len(writer.tokens), "token")]
        parts += [f"{speed:,.0f} tokens/s, measured here"] if isfinite(speed) else []
        if not writer.decoding:
            last = writer.tokens[-1].finished if writer.tokens else None
            reasons = {
                "eos": "ended by the model",
                "length": f"limit of {self.max_new_tokens}",
                "context": "context full",
                None: "stopped",
            }
            parts.append(reasons[last])
        return " · ".join(parts)

    def _static_html(self) -> str:
        return (
            f'<div style="font-family:{theme.SANS};font-size:{theme.TEXT}px;opacity:.75">'
            "Live generation runs here when the notebook does. Its prompt: "
            f"<code>{escape(printable(self._written_prompt))}</code></div>"
        )


def live(beam: Beam, prompt: str = "def ", **options: Any) -> Live:
    """What the model writes, as it writes it; ``options`` are those of :class:`Live`."""
    return Live(beam, prompt, **options)
