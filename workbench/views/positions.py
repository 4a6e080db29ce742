"""How far position reaches: SSMax in full layers, RoPE in sliding layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.model.effects import rope_wavelengths, ssmax_scale
from workbench.model.info import ModelInfo
from workbench.views import theme
from workbench.views.view import View

_SYMBOLS = ("circle", "diamond", "square", "triangle-up")
_DASHES = ("solid", "dash", "dot", "dashdot")
_POINTS = 121


def position_reach(infos: Sequence[ModelInfo]) -> View:
    """SSMax factor over position, and the RoPE wavelength of every rotated pair, for some models.

    The window of each model is drawn across its wavelengths: a pair above it makes less than one
    turn within what a sliding layer sees.
    """
    fig = theme.figure(
        "How far position reaches",
        "modelled: closed forms of the architecture",
        height=380,
        margin={"l": 56, "r": 16, "t": 118, "b": 48},
        legend_under_title=True,
        xaxis={"domain": [0, 0.45]},
        xaxis2={"domain": [0.56, 1], "anchor": "y2"},
        yaxis2={"anchor": "x2"},
    )
    _ssmax_panel(fig, infos)
    _rope_panel(fig, infos)
    return View(figure=fig, text=_text(infos))


def _ssmax_panel(fig: go.Figure, infos: Sequence[ModelInfo]) -> None:
    furthest = max(info.config.max_position_embeddings for info in infos)
    # Whole positions, evenly spread over the logarithmic axis; arrays travel packed.
    positions = np.unique(np.geomspace(1, furthest, _POINTS).round().astype(np.int32)) - 1
    fig.add_trace(
        go.Scatter(
            x=positions + 1,
            y=np.array([ssmax_scale(p) for p in positions]),
            mode="lines",
            line={"color": theme.FULL, "width": 2},
            showlegend=False,
            hovertemplate="token %{x:,.0f}<br>queries × %{y:.3f}<extra></extra>",
        )
    )
    for info, symbol in zip(infos, _SYMBOLS, strict=False):
        context = info.config.max_position_embeddings
        factor = ssmax_scale(context - 1)
        fig.add_trace(
            go.Scatter(
                x=[context],
                y=[factor],
                mode="markers+text",
                marker={"symbol": symbol, "size": 9, "color": theme.FULL},
                text=[theme.ink(f"{factor:.2f} at {context:,} ")],
                textposition="middle left",
                textfont={"size": theme.TEXT},
                cliponaxis=False,
                showlegend=False,
                hovertext=[
                    f"{theme.plain(info.name)}: end of its context<br>queries × {factor:.4f}"
                ],
                hoverinfo="text",
            )
        )
    theme.panel_title(fig, 1, "SSMax: queries of full layers grow with position")
    fig.update_layout(
        xaxis={
            "type": "log",
            "title": {"text": theme.ink("position (tokens)")},
            "tickvals": [1, 10, 100, 1000, 10**4, 10**5, 10**6],
            "ticktext": ["1", "10", "100", "1k", "10k", "100k", "1M"],
            "showgrid": False,
        },
        yaxis={"title": {"text": theme.ink("factor on the query")}, "range": [0.95, 2.05]},
    )


def _rope_panel(fig: go.Figure, infos: Sequence[ModelInfo]) -> None:
    furthest = max(info.config.head_dim // 2 for info in infos)
    for info, symbol, dash in zip(infos, _SYMBOLS, _DASHES, strict=False):
        waves = rope_wavelengths(info.config)
        window = info.config.sliding_window
        fig.add_trace(
            go.Scatter(
                x=np.arange(len(waves)),
                y=np.array(waves),
                xaxis="x2",
                yaxis="y2",
                mode="lines+markers",
                line={"color": theme.rgba(theme.SLIDING, 0.4), "width": 1},
                marker={"symbol": symbol, "size": 5, "color": theme.SLIDING},
                name=theme.ink(theme.plain(info.name)),
                customdata=window / np.array(waves),
                hovertemplate=(
                    f"{theme.plain(info.name)}, pair %{{x}}<br>one turn in %{{y:,.1f}} tokens<br>"
                    f"%{{customdata:,.2f}} turns in the window of {window}<extra></extra>"
                ),
            )
        )
        fig.add_trace(
            go.Scatter(
                x=[-1, furthest],
                y=[window, window],
                xaxis="x2",
                yaxis="y2",
                mode="lines",
                line={"color": theme.NEUTRAL, "width": 1.5, "dash": dash},
                name=theme.ink(f"its window, {window}"),
                hoverinfo="skip",
            )
        )
    theme.panel_title(fig, 2, "RoPE: how fast each pair of a sliding layer turns")
    fig.update_layout(
        xaxis2={
            "title": {"text": theme.ink("rotated pair i, of head_dim / 2")},
            "range": [-1, furthest],
            "showgrid": False,
        },
        yaxis2={
            "type": "log",
            "title": {"text": theme.ink("wavelength (tokens a turn)")},
            "tickvals": [10, 100, 1000, 10**4, 10**5],
            "ticktext": ["10", "100", "1k", "10k", "100k"],
        },
    )


def _text(infos: Sequence[ModelInfo]) -> str:
    lines = []
    for info in infos:
        c = info.config
        waves = rope_wavelengths(c)
        within = sum(w <= c.sliding_window for w in waves)
        end = c.max_position_embeddings
        lines += [
            f"{info.name}: SSMax multiplies queries by {ssmax_scale(0):.4f} at token 1, "
            f"{ssmax_scale(c.sliding_window - 1):.4f} at {c.sliding_window:,}, "
            f"{ssmax_scale(end - 1):.4f} at {end:,}",
            f"{' ' * len(info.name)}  RoPE turns {len(waves)} pairs once in {waves[0]:.1f} … "
            f"{waves[-1]:,.0f} tokens; {within} turn within the window of {c.sliding_window}",
        ]
    return "\n".join(lines)
