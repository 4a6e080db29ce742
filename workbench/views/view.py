"""``View``: one value in its three forms, figure, page and text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from workbench.views import theme

PLOTLY = "application/vnd.plotly.v1+json"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class View:
    """What a function of ``workbench.views`` returns; a notebook shows it as it stands.

    ``figure`` is a plotly figure. ``text`` says the same in a few lines and is the same on every
    run and machine, as far as the numbers are. ``html``, where there is one, is shown in the place
    of the figure: views made of tokens read better as a page than as a plot. Where there is nothing
    to plot at all, ``figure`` is None.
    """

    text: str
    figure: Any = None
    html: str | None = None

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, Any]:
        if self.html is not None:
            return {"text/plain": self.text, "text/html": self.html}
        data = json.loads(self.figure.to_json())
        data["config"] = dict(theme.CONFIG)
        _lean(data["layout"])
        return {"text/plain": self.text, "text/html": preformatted(self.text), PLOTLY: data}


def _lean(layout: dict[str, Any]) -> None:
    """Take out of the template what this figure has no use for: a saved notebook keeps it all."""
    usual = layout.get("template", {}).get("layout", {})
    if not theme.CONFIG["displayModeBar"]:
        usual.pop("modebar", None)
    if not layout.get("annotations"):
        usual.pop("annotationdefaults", None)
    if layout.get("showlegend") is False:
        usual.pop("legend", None)
    if {"l", "r", "t", "b"} <= {*layout.get("margin", {})}:
        usual.pop("margin", None)


def preformatted(text: str) -> str:
    """Text as HTML for readers that show no plotly figure, a code host's preview for one."""
    return f'<pre style="line-height:1.35">{escape(text)}</pre>'
