"""The command of a plan on the page: its text, a button that copies it, and export to CSV."""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

_HERE = Path(__file__).parent


class CommandWidget(anywidget.AnyWidget):
    """The page's side of the command: text, copy button, export buttons.

    From the page ``{"kind": "export", "which": "layers" | "plans"}``; to it
    ``{"kind": "file", "name", "text", "note"}``.
    """

    _esm = (_HERE / "kv_command.js").read_text("utf-8")
    _css = (_HERE / "kv_command.css").read_text("utf-8")
    title = traitlets.Unicode("").tag(sync=True)
    command = traitlets.Unicode("").tag(sync=True)
    look = traitlets.Dict().tag(sync=True)
