"""Weights in bytes: what a model holds by part, and what a step reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.model.asked import SizingError
from workbench.model.weight_curve import WeightCurve
from workbench.model.weights import WeightPart, WeightSizing
from workbench.views import theme
from workbench.views.kv_words import size, tokens, unit
from workbench.views.pieces import WEIGHT_GROUPS, piece_marker
from workbench.views.view import View

_ENTRY = 98  # px of a name in the legend
_IN_A_ROW, _LEGEND = 3, 19  # names in a row of it on a page of 1000 px, px of a row
_ROW, _LINE = 34, 14  # px a bar, and a line of its name
_OPACITY = 0.6  # words on a bar are read through it in either theme
_LABELLED = 0.08  # share of the axis from which a piece is wide enough for its name
_ROOM = 1.26  # of the longest bar, so that its total stands beside it
_ROWS = 6  # of the text form of a curve


# -- held ---------------------------------------------------------------------------------------


def weight_bars(*sizings: WeightSizing, per_gpu: bool = False, model: str = "the model") -> View:
    """One stacked bar a sizing, by part: precisions, or layouts, side by side.

    Each weight once, or, with ``per_gpu``, what the fullest GPU of the sizing's layout holds.
    Sizings are those of ``size_weights(config, precision, layout)``.

    Raises:
        SizingError: no sizing.
    """
    if not sizings:
        raise SizingError("give one or more sizings, those of size_weights(...)")
    held = [s.per_gpu if per_gpu else s.whole for s in sizings]
    totals = [sum(h.values()) for h in held]
    name, of = unit(max(totals))
    groups = {
        group: values
        for group, (parts, _, _) in WEIGHT_GROUPS.items()
        if any(values := [sum(h[part] for part in parts) for h in held])
    }
    names = [_bar_name(s, per_gpu) for s in sizings]
    row = max(_ROW, *(_LINE * (name.count("<br>") + 2) for name in names))
    legend_rows = -(-len(groups) // _IN_A_ROW)
    fig = theme.figure(
        f"Weights of {model}",
        f"{'the fullest GPU of each layout' if per_gpu else 'each weight once'} · every byte exact "
        f"for the precision named, scales counted; which parts a checkpoint quantises is assumed",
        height=117 + _LEGEND * legend_rows + row * len(sizings),
        legend_under_title=True,
        margin={"l": 112, "r": 16, "t": 65 + _LEGEND * legend_rows, "b": 52},
        barmode="stack",
        bargap=0.3,
        legend={"traceorder": "normal", "entrywidth": _ENTRY},
    )
    rows = list(range(len(sizings)))
    words: dict[str, list[Any]] = {"x": [], "y": [], "text": []}
    starts = [0.0] * len(sizings)
    end = max(totals) / of * _ROOM
    for group, values in groups.items():
        parts, color, pattern = WEIGHT_GROUPS[group]
        lengths = [v / of for v in values]
        fig.add_trace(
            go.Bar(
                orientation="h",
                name=theme.ink(group),
                x=lengths,
                y=rows,
                marker=piece_marker(color, pattern),
                hovertext=[_held_hover(parts, h, t) for h, t in zip(held, totals, strict=True)],
                hoverinfo="text",
            )
        )
        for place, length in enumerate(lengths):
            if length > _LABELLED * end:
                words["x"].append(starts[place] + length / 2)
                words["y"].append(place)
                words["text"].append(theme.ink(group))
            starts[place] += length
    fig.add_trace(
        go.Scatter(**words, mode="text", textfont={"size": theme.SMALL}, showlegend=False,
                   hoverinfo="skip")
    )  # fmt: skip
    fig.add_trace(
        go.Scatter(
            x=starts,
            y=rows,
            mode="text",
            text=[theme.ink(f" <b>{size(total)}</b>") for total in totals],
            textposition="middle right",
            textfont={"size": theme.TEXT},
            showlegend=False,
            hoverinfo="skip",
        )
    )
    fig.update_layout(
        xaxis={
            "title": {"text": theme.ink(f"{name} {_whose(per_gpu)}")},
            "range": [0, end],
            "tickformat": ",",
        },
        yaxis={
            "tickvals": rows,
            "ticktext": [theme.ink(name) for name in names],
            "range": [len(rows) - 0.5, -0.5],
            "showgrid": False,
        },
    )
    return View(figure=fig, text=_bars_text(sizings, held, per_gpu, model))


def _whose(per_gpu: bool) -> str:
    return "on one GPU" if per_gpu else "in all"


def _bar_name(sizing: WeightSizing, per_gpu: bool) -> str:
    precision = theme.plain(sizing.precision.name).replace(",", "<br>")
    return f"{precision}<br>{sizing.layout.name}" if per_gpu else precision


def _held_hover(parts: tuple[WeightPart, ...], held: Mapping[WeightPart, int], total: int) -> str:
    return "<br>".join(
        f"{part.replace('_', ' ')}: {size(held[part])}, {held[part] / total:.2%} of all"
        f"<br>{held[part]:,} bytes"
        for part in parts
    )


def _bars_text(
    sizings: tuple[WeightSizing, ...],
    held: list[Mapping[WeightPart, int]],
    per_gpu: bool,
    model: str,
) -> str:
    names = [
        f"{s.precision.name} {s.layout.name}" if per_gpu else s.precision.name for s in sizings
    ]
    parts = [part for part in held[0] if any(h[part] for h in held)]
    width = max(map(len, names))
    lines = [
        f"{model}: weights {_whose(per_gpu)}",
        " " * width + "".join(f"{part:>12}" for part in (*parts, "total")),
    ]
    for name, h in zip(names, held, strict=True):
        cells = [h[part] for part in parts] + [sum(h.values())]
        lines.append(f"{name:<{width}}" + "".join(f"{size(cell):>12}" for cell in cells))
    return "\n".join(lines)


# -- read ---------------------------------------------------------------------------------------


def active_curve(curve: WeightCurve, *, model: str = "the model") -> View:
    """Stacked area by part: bytes of weights one GPU reads a step, over the tokens of the step.

    ``curve`` is that of ``weight_curve(config, precision, layout)``. The dashed line is all that
    the GPU holds: the stack comes near it once every expert has a token. It stays below by the
    embedding, of which a step reads a row a token.
    """
    name, of = unit(curve.held)
    basis = (
        "experts touched as measured" if curve.measured
        else "experts touched: exact expectation under uniform routing"
    )  # fmt: skip
    fig = theme.figure(
        f"Weights that a step of {model} reads",
        f"one GPU of {curve.layout.name}, {curve.precision.name} · modelled: each weight read once "
        f"a step; {basis} ({curve.per_token} of {curve.experts} a token)",
        height=380,
        legend_under_title=True,
        margin={"l": 64, "r": 16, "t": 112, "b": 52},
        legend={"traceorder": "normal"},
    )
    x = np.array(curve.batches)
    # From the bottom up: what every step reads lies below, so that the experts are seen to grow.
    for group, (parts, color, pattern) in reversed(WEIGHT_GROUPS.items()):
        values = np.array([curve.parts[part] for part in parts]).sum(0)
        if not values.any():
            continue
        fig.add_trace(
            go.Scatter(
                x=x,
                y=values / of,
                name=theme.ink(group),
                mode="lines",
                stackgroup="parts",
                line={"width": 0.5, "color": color},
                fillcolor=theme.rgba(color, _OPACITY),
                fillpattern={
                    "shape": pattern,
                    "solidity": 0.4,
                    "size": 5,
                    "fgcolor": color,
                    "bgcolor": theme.rgba(color, 0.3),
                    "fillmode": "replace",
                },
                hovertemplate=f"{group} at %{{x:,}} tokens<br>%{{y:,.2f}} {name}<extra></extra>",
            )
        )
    fig.add_trace(
        go.Scatter(
            x=[curve.batches[0], curve.batches[-1]],
            y=[curve.held / of] * 2,
            name=theme.ink("all weights the GPU holds"),
            mode="lines",
            line={"color": theme.NEUTRAL, "width": 2, "dash": "dash"},
            hovertemplate=f"all weights of the GPU<br>{size(curve.held)}<extra></extra>",
        )
    )
    ticks = _octaves(curve.batches)
    fig.update_layout(
        xaxis={
            "type": "log",
            "title": {"text": theme.ink("tokens in the step, all sequences together")},
            "tickvals": ticks,
            "ticktext": [tokens(tick) for tick in ticks],
            "range": [np.log10(curve.batches[0]), np.log10(max(2, curve.batches[-1]))],
            "showgrid": False,
        },
        yaxis={
            "title": {"text": theme.ink(f"{name} a step")},
            "range": [0, max(curve.held, *curve.total) / of * 1.06],
        },
    )
    return View(figure=fig, text=_curve_text(curve, model))


def _octaves(batches: tuple[int, ...]) -> list[int]:
    return [1 << i for i in range(batches[-1].bit_length()) if 1 << i >= batches[0]]


def _curve_text(curve: WeightCurve, model: str) -> str:
    lines = [
        f"{model}: weights one GPU of {curve.layout.name} reads a step, {curve.precision.name}; "
        f"it holds {size(curve.held)}",
        f"{'tokens':>8}{'experts touched':>17}{'experts':>13}{'the rest':>13}{'of all':>9}",
    ]
    total = curve.total
    chosen = [
        i for i, n in enumerate(curve.batches)
        if n & (n - 1) == 0 and n.bit_length() % 2 == 1
    ]  # fmt: skip
    for i in chosen[:_ROWS] or range(min(_ROWS, len(total))):
        experts = curve.parts["experts"][i]
        lines.append(
            f"{curve.batches[i]:>8,}{curve.distinct[i]:>17.1f}{size(experts):>13}"
            f"{size(total[i] - experts):>13}{total[i] / curve.held:>9.1%}"
        )
    return "\n".join(lines)
