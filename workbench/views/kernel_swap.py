"""Two selections of kernels on one model: logits apart, tokens apart, time of a step."""

from __future__ import annotations

from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from workbench.views import theme
from workbench.views.numbers import plural
from workbench.views.view import View

if TYPE_CHECKING:
    from workbench.model.swap import Comparison, Side


def swap_comparison(found: Comparison, *, model_tokens: Any = None) -> View:
    """The error of B's logits at every position, the tokens that differ, and both steps' times.

    ``found`` is that of ``workbench.model.swap.compare``. ``model_tokens`` is a tokenizer, to write
    tokens that differ as text. Where a side's kernels were interpreted it has no time.
    """
    timed = found.a.step_seconds and found.b.step_seconds
    new = plural(len(found.tokens) - 1, "new token")
    fig = theme.figure(
        f"A and B on {found.model}: {_outcome(found)}",
        f"measured here, {found.device}, {found.dtype}, {found.prompt_tokens} prompt and {new} · "
        f"A: {_names(found.a)} · B: {_names(found.b)}",
        height=330,
        margin={"l": 76, "r": 16, "t": 96, "b": 52},
        showlegend=False,
        xaxis={"domain": [0, 0.6]},
        xaxis2={"domain": [0.72, 1], "anchor": "y2"},
        yaxis2={"anchor": "x2"},
    )
    values = np.array(found.per_position, dtype=np.float64)
    values = np.where(np.isfinite(values), values, np.nan)
    some = values[np.isfinite(values) & (values > 0)]
    # A logarithm has no zero: where the sides agree to the last bit, a point a decade below all.
    drawn = np.maximum(values, some.min() / 10 if len(some) else found.limit / 1e3)
    first = found.prompt_tokens - 1
    apart = [n for n, (a, b) in enumerate(found.tokens) if a != b]
    places = np.arange(len(drawn))
    fig.add_trace(
        go.Scatter(
            x=places, y=drawn, mode="lines+markers", name="error",
            line={"color": theme.HEAT, "width": 1.5},
            marker={"size": 6, "color": theme.HEAT,
                    "symbol": ["circle-open" if v == 0 else "circle" for v in values]},
            customdata=values,
            hovertemplate="position %{x}: error %{customdata:.2e}<extra></extra>",
        )
    )  # fmt: skip
    if apart:
        fig.add_trace(
            go.Scatter(
                x=np.array([first + n for n in apart]), y=drawn[[first + n for n in apart]],
                mode="markers", name="another token",
                marker={"symbol": "x", "size": 11, "color": theme.FULL},
                hovertext=[_token_words(found, n, model_tokens) for n in apart], hoverinfo="text",
            )
        )  # fmt: skip
    if isfinite(found.limit):
        fig.add_trace(
            go.Scatter(
                x=[-0.5, len(drawn) - 0.5], y=[found.limit, found.limit], mode="lines",
                line={"color": theme.NEUTRAL, "dash": "dash", "width": 1.5},
                hovertext=theme.plain(found.limit_from), hoverinfo="text",
            )
        )  # fmt: skip
        fig.add_annotation(
            text=theme.ink(f"limit for the median: {found.limit:.1e}", faint=True),
            x=0.6, xref="paper", xanchor="right", y=np.log10(found.limit), yref="y",
            yanchor="bottom", yshift=2,
        )  # fmt: skip
    fig.add_vrect(x0=-0.5, x1=first - 0.5, fillcolor=theme.LINE, opacity=0.35, line_width=0)
    shown = drawn[np.isfinite(drawn)]
    ends = [*(shown.tolist() or [1.0]), *([found.limit] if isfinite(found.limit) else [])]
    low, high = np.log10(min(ends)), np.log10(max(ends))
    fig.update_layout(
        xaxis={
            "title": {"text": theme.ink("position (grey: prompt)")},
            "range": [-0.5, len(drawn) - 0.5],
            "showgrid": False,
        },
        yaxis={
            "type": "log", "range": [low - 0.4, high + 0.5], "tickformat": ".0e", "dtick": 1,
            "title": {"text": theme.ink("|B − A| ÷ |A| of the logits")},
        },
    )  # fmt: skip
    theme.panel_title(fig, 1, _heading(values, bool(apart)))
    theme.panel_title(fig, 2, "decode step, ms")
    if timed:
        _times(fig, found)
    else:
        fig.update_layout(xaxis2={"visible": False}, yaxis2={"visible": False})
        fig.add_trace(go.Scatter(x=[None], y=[None], xaxis="x2", yaxis="y2"))
        for line, words in enumerate(("interpreted:", "not a measure of speed")):
            fig.add_annotation(
                text=theme.ink(words), x=0.5, xref="x2 domain", y=0.55, yref="y2 domain",
                xanchor="center", yshift=-16 * line,
            )  # fmt: skip
    return View(figure=fig, text=_text(found, model_tokens))


def _heading(values: Any, apart: bool) -> str:
    """What the left panel shows, marks included."""
    words = "error of the logits"
    if (values == 0).all():
        words += ": none, equal to the last bit"
    elif (values == 0).any():
        words += ", ○ none"
    return words + (", ✕ another token" if apart else "")


def _outcome(found: Comparison) -> str:
    return "the same within the limit" if found.passed else "they differ"


def _times(fig: go.Figure, found: Comparison) -> None:
    for place, side in enumerate((found.a, found.b)):
        steps = sorted(1e3 * s for s in side.step_seconds)
        middle = median(steps)
        fig.add_trace(
            go.Bar(
                x=[side.name], y=[middle], xaxis="x2", yaxis="y2", width=0.5,
                error_y={
                    "type": "data", "symmetric": False, "array": [steps[-1] - middle],
                    "arrayminus": [middle - steps[0]], "color": theme.NEUTRAL, "thickness": 1.5,
                },
                marker={
                    "color": theme.rgba((theme.NEUTRAL, theme.HEAT)[place], 0.6),
                    "pattern": {"shape": ("", "/")[place]}, "line": {"width": 0},
                },
                hovertemplate=f"{side.name}: median %{{y:.2f}} ms of {len(steps)} steps, "
                f"{steps[0]:.2f} to {steps[-1]:.2f}<extra></extra>",
            )
        )  # fmt: skip
    fig.update_layout(yaxis2={"rangemode": "tozero"}, xaxis2={"showgrid": False})


def _names(side: Side) -> str:
    """What of a side is not the reference."""
    picked = [
        f"{row.op} {row.resolved}" + (f" ({row.layers})" if row.layers not in ("", "all") else "")
        for row in side.rows
        if row.resolved != "torch"
    ]
    if not picked:
        return "all reference"
    if len(picked) <= 3:
        return ", ".join(picked)
    swapped = [row for row in side.rows if row.resolved != "torch"]
    words = []
    for name in dict.fromkeys(row.resolved for row in swapped):
        ops = {row.op for row in swapped if row.resolved == name}
        one = next(text for row, text in zip(swapped, picked, strict=True) if row.resolved == name)
        words.append(one if len(ops) == 1 else f"{name} in {plural(len(ops), 'operation')}")
    return ", ".join(words)


def _token(ident: int, model_tokens: Any) -> str:
    return str(ident) if model_tokens is None else repr(model_tokens.decode([ident]))


def _token_words(found: Comparison, place: int, model_tokens: Any) -> str:
    a, b = found.tokens[place]
    return theme.plain(
        f"A {_token(a, model_tokens)}, B {_token(b, model_tokens)}, "
        f"A's margin {found.margins[place]:.3g}"
    )


def _text(found: Comparison, model_tokens: Any) -> str:
    worst = max(found.per_position, default=0.0)
    limit = f"limit {found.limit:.1e}, {found.limit_from}"
    against = found.against_exact
    lines = [
        f"A: {_names(found.a)}",
        f"B: {_names(found.b)}",
        f"{found.model}, {found.dtype} on {found.device}: {_outcome(found)}",
        limit,
        f"logits: median error {_about(found.relative_error)}, largest {_about(worst)}",
        f"next-token distributions: KL {_about(found.divergence)} nats",
        f"greedy tokens: {found.equal_tokens} of {len(found.tokens)} the same",
    ]
    if against is not None:
        lines.insert(5, f"against float32: B {against:.1e}, A {found.own_error or 0:.1e}")
    if found.far:
        lines.insert(
            5,
            f"more than ten times the limit: at {found.far} of {found.positions} positions",
        )
    for place, (a, b) in enumerate(found.tokens):
        if a != b:
            lines.append(
                f"  new token {place}: A {_token(a, model_tokens)}, B {_token(b, model_tokens)}, "
                f"A's margin {found.margins[place]:.2g}"
            )
    for side in (found.a, found.b):
        if side.untimed:
            lines.append(f"{side.name} not timed: {side.untimed}")
        elif side.step_seconds:
            lines.append(f"{side.name}: {1e3 * median(side.step_seconds):.1f} ms a decode step")
    return "\n".join(lines)


def _about(value: float) -> str:
    """An error to its power of ten: what lies below depends on the order of additions."""
    if not isfinite(value):
        return "not a number"
    if value == 0:
        return "0"
    if value < 1e-5:
        return "below 1e-5"
    return f"about {value:.0e}"
