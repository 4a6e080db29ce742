"""What a model wrote, every token tinted by how much it surprised the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from math import exp, log
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from workbench.terminal import printable
from workbench.views import theme
from workbench.views.numbers import plural
from workbench.views.page import box, page
from workbench.views.view import View

if TYPE_CHECKING:
    from workbench.model.generate import Token

FULL_TINT = 4.0  # nats at which the tint is strongest
STRONGEST = 0.65


def tint(logprob: float) -> str:
    """Background of a token: none when it was certain, amber when it was not."""
    share = min(1.0, max(0.0, -logprob) / FULL_TINT)
    return theme.rgba(theme.SURPRISE, round(STRONGEST * share, 2))


def written(prompt: str, tokens: Sequence[Token], *, model: str = "the model") -> View:
    """The prompt, faint, and the tokens of one sequence as ``workbench.stream`` yields them.

    Control characters in either are made visible.
    """
    prompt = printable(prompt)
    tokens = [replace(t, text=printable(t.text)) for t in tokens]
    mean = sum(t.logprob for t in tokens) / len(tokens) if tokens else 0.0
    subtitle = (
        f"measured here · {plural(len(tokens), 'new token')}, {-mean:.2f} nats a token; "
        "colour is how unlikely the model found its own choice"
    )
    spans = "".join(
        box(
            escape(t.text),
            f"background:{tint(t.logprob)}",
            "border-radius:2px",
            tag="span",
            title=f"p = {exp(t.logprob):.2f}",
        )
        for t in tokens
    )
    body = box(
        box(escape(prompt), "opacity:.62", tag="span") + spans,
        f"font:{theme.TEXT}px/1.55 {theme.MONO}",
        "white-space:pre-wrap",
        "overflow-wrap:anywhere",
    )
    new = "".join(t.text for t in tokens)
    text = f"{prompt}{new}\n-- {plural(len(tokens), 'new token')}, {-mean:.2f} nats a token"
    return View(
        figure=_figure(tokens, model, subtitle),
        text=text,
        html=page(f"Written by {model}", subtitle, body, legend=legend()),
    )


def legend() -> list[tuple[str, str]]:
    """Swatches of some probabilities."""
    return [(tint(log(p)), f"p = {p:g}") for p in (1.0, 0.5, 0.1, 0.01)]


def _figure(tokens: Sequence[Token], model: str, subtitle: str) -> go.Figure:
    fig = theme.figure(f"Written by {model}", subtitle, height=280)
    fig.add_trace(
        go.Bar(
            x=[t.index for t in tokens],
            y=[-t.logprob for t in tokens],
            marker={"color": theme.SURPRISE},
            hovertext=[theme.token_label(t.text) for t in tokens],
            hoverinfo="text+y",
        )
    )
    fig.update_layout(
        xaxis={"title": {"text": theme.ink("new token")}, "showgrid": False},
        yaxis={"title": {"text": theme.ink("surprise (nats)")}, "rangemode": "tozero"},
    )
    return fig
