"""The KV cache over contexts and over layers: stacked areas, and a layer strip in bytes."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from workbench.model.kv_curve import KVCurve
from workbench.model.sizing import Account, KVSizing, LayerKV
from workbench.views import theme
from workbench.views.kv_words import (
    ACCOUNT_NAMES,
    basis,
    settings_words,
    size,
    tokens,
    unit,
)
from workbench.views.numbers import plural
from workbench.views.view import View

Part = Literal["sliding", "drafter", "padding", "full"]

# From the bottom up: what stays flat lies below, so that it is seen to be flat.
PART_NAMES: dict[Part, str] = {
    "sliding": "sliding layers",
    "drafter": "drafter",
    "padding": "padding",
    "full": "full layers",
}
PARTS: tuple[Part, ...] = tuple(PART_NAMES)
PART_COLORS: dict[Part, str] = {
    "full": theme.FULL,
    "sliding": theme.SLIDING,
    "drafter": theme.DRAFTER,
    "padding": theme.NEUTRAL,
}
PART_PATTERNS: dict[Part, str] = {"full": "", "sliding": "", "drafter": ".", "padding": "x"}
_STRIP_EDGES = [0, 0.62, 1.0]  # sliding and full layers, as tall as in the layer strip
_BARS = 5  # rows of the text form


# -- over contexts ------------------------------------------------------------------------------


def kv_growth(curve: KVCurve, *, model: str = "the model") -> View:
    """Stacked area by kind of layer over the context, beside the naive answer as a dashed line.

    ``curve`` is that of ``kv_curve(sizing)``. Both axes are linear: a full layer's bytes are then a
    straight line whose slope is its bytes a token, and stacked heights may be compared, which they
    may not on a logarithmic axis. The left panel is the beginning, where sliding layers still grow,
    the right one everything.
    """
    s = curve.settings
    fig = theme.figure(
        f"KV cache of {model} over the context",
        f"one GPU, {plural(s.sequences, 'sequence')}, {s.kv_dtype.upper()}, TP{s.tp} · "
        f"{basis(curve.account, curve.refusal)}",
        height=400,
        margin={"l": 64, "r": 16, "t": 124, "b": 52},
        xaxis={"domain": [0, 0.45]},
        xaxis2={"domain": [0.56, 1], "anchor": "y2"},
        yaxis2={"anchor": "x2"},
        legend={"y": 1.14, "traceorder": "normal"},
    )
    ends = (_beginning(curve), curve.contexts[-1])
    for panel, end in enumerate(ends, start=1):
        on = {"xaxis": f"x{panel}", "yaxis": f"y{panel}"} if panel > 1 else {}
        for trace in growth_traces(curve, end, **on):
            trace.update(showlegend=panel == 1 and trace.showlegend, legendgroup=trace.name)
            fig.add_trace(trace)
        axes = growth_axes(curve, end)
        fig.update_layout(
            {f"{axis}axis{panel if panel > 1 else ''}": axes[axis] for axis in ("x", "y")}
        )
        theme.panel_title(fig, panel, f"up to {end:,} tokens")
    return View(figure=fig, text=_growth_text(curve, model))


def growth_traces(curve: KVCurve, end: int, **on: Any) -> list[go.Scatter]:
    """A trace for each part up to ``end`` tokens, empty ones too, and one for the naive answer."""
    values = growth_values(curve, end)
    traces = []
    for part in PARTS:
        color = PART_COLORS[part]
        traces.append(
            go.Scatter(
                **values[part],
                name=theme.ink(PART_NAMES[part]),
                stackgroup=f"kv{on.get('xaxis', '')}",
                mode="lines",
                line={"color": color, "width": 1},
                fillcolor=theme.rgba(color, 0.55),
                fillpattern={
                    "shape": PART_PATTERNS[part],
                    "fgcolor": color,
                    "bgcolor": theme.rgba(color, 0.15),
                    "size": 6,
                    "solidity": 0.3,
                    "fillmode": "replace",
                },
                **on,
            )
        )
    traces.append(
        go.Scatter(
            **values["naive"],
            name=theme.ink("naive: every layer full"),
            mode="lines",
            line={"color": theme.NEUTRAL, "width": 2, "dash": "dash"},
            **on,
        )
    )
    return traces


def growth_values(curve: KVCurve, end: int) -> dict[str, dict[str, Any]]:
    """The points of each trace up to ``end`` tokens: x in tokens, y in the unit of `growth_axes`.

    ``end`` is a power of two or the last context, which a curve has a point for.
    """
    count = sum(n <= end for n in curve.contexts)
    x = np.array(curve.contexts[:count])
    unit_name, of = _growth_unit(curve, end)
    # Hovers come from the plotted values: less to send at each move of a slider than words.
    hover = f"%{{x:,}} tokens<br>%{{y:,.3f}} {unit_name} a GPU<extra></extra>"
    return {
        name: {
            "x": x,
            "y": np.array(getattr(curve, name)[:count]) / of,
            "showlegend": any(getattr(curve, name)),
            "hovertemplate": f"{said} at {hover}",
        }
        for name, said in (*PART_NAMES.items(), ("naive", "naive"))
    }


def growth_axes(curve: KVCurve, end: int, *, steps: bool = False) -> dict[str, dict[str, Any]]:
    """Both axes for contexts up to ``end``.

    With ``steps`` the upper end is a 1, 2 or 5 with zeros: where figures are redrawn, an end that
    followed every change would keep all heights as they are.
    """
    name, of = _growth_unit(curve, end)
    ticks = [round(end * i / 4) for i in range(5)]
    high = _highest(curve, end) / of
    return {
        "x": {
            "title": {"text": theme.ink("context (tokens)")},
            "tickvals": ticks,
            "ticktext": [tokens(tick) for tick in ticks],
            "range": [0, end],
            "showgrid": False,
        },
        "y": {
            "title": {"text": theme.ink(f"{name} a GPU")},
            "range": [0, _step_above(high) if steps else high * 1.04],
            "rangemode": "tozero",
        },
    }


def _growth_unit(curve: KVCurve, end: int) -> tuple[str, int]:
    return unit(_highest(curve, end) / 4)


def _highest(curve: KVCurve, end: int) -> int:
    """Bytes of the highest point up to ``end``: whole blocks and a drafter may pass the naive."""
    count = sum(n <= end for n in curve.contexts)
    return max(*curve.naive[:count], *curve.total[:count])


def _step_above(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten that is no less."""
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)


def _beginning(curve: KVCurve) -> int:
    """A power of two some way beyond where sliding layers stop growing."""
    last = curve.contexts[-1]
    bend = curve.flat_from or last // 8
    return max(2, min(last, 1 << (3 * bend - 1).bit_length()))


def _growth_text(curve: KVCurve, model: str) -> str:
    s = curve.settings
    lines = [
        f"{model}: KV cache on one GPU, {plural(s.sequences, 'sequence')}, {s.kv_dtype}, TP{s.tp} "
        f"({ACCOUNT_NAMES[curve.account]})",
        f"{'context':>11}{'full':>13}{'sliding':>13}{'drafter':>13}{'padding':>13}{'naive':>13}",
    ]
    last = curve.contexts[-1]
    places = sorted({curve.contexts.index(last >> (2 * i)) for i in range(_BARS)
                     if last >> (2 * i) in curve.contexts} | {curve.at})  # fmt: skip
    for i in places:
        parts = (curve.full, curve.sliding, curve.drafter, curve.padding, curve.naive)
        lines.append(f"{curve.contexts[i]:>11,}" + "".join(f"{size(p[i]):>13}" for p in parts))
    flat = curve.flat_from
    if flat is not None:
        lines.append(f"sliding layers grow no more from {flat:,} tokens on")
    return "\n".join(lines)


# -- over layers --------------------------------------------------------------------------------


def kv_strip(sizing: KVSizing, *, account: Account = "admission", model: str = "the model") -> View:
    """One cell a layer, coloured by its bytes on one GPU; full layers stand taller.

    A drafter's layers follow after a gap. Padding belongs to no layer and is left out.
    """
    s = sizing.settings
    fig = theme.figure(
        f"KV cache of {model}, layer by layer",
        f"one GPU, {settings_words(s)} · {basis(account, sizing.hybrid_off_refusal)} · "
        f"{_each_kind(sizing, account)} · taller: sees everything",
        height=236,
        margin={"l": 16, "r": 96, "t": 84, "b": 48},
    )
    fig.add_trace(strip_trace(sizing, account, len=1.1))
    fig.update_layout(**strip_axes(sizing))
    return View(figure=fig, text=_strip_text(sizing, account, model))


def strip_trace(sizing: KVSizing, account: Account, **colorbar: Any) -> go.Heatmap:
    """The strip: a lower row for every layer and an upper one for those that see everything.

    ``colorbar`` says where the colour bar stands.
    """
    # A heat map is one picture to the page: a bar a layer would be drawn anew one by one.
    return go.Heatmap(
        **strip_values(sizing, account),
        y=_STRIP_EDGES,
        colorscale=theme.scale(),
        xgap=2,
        colorbar=theme.colorbar(theme.ink("MiB a GPU"), **colorbar),
        hovertemplate="%{text}<br>%{z:,.3f} MiB a GPU<extra></extra>",
    )


def strip_values(sizing: KVSizing, account: Account) -> dict[str, Any]:
    """What of the strip depends on the settings: places, MiB and hovers of both rows."""
    layers = sizing.per_layer
    counts = [layer_bytes(layer, account) for layer in layers]
    model_layers = sizing.config.num_hidden_layers
    mib = [count / 2**20 for count in counts]
    words = [f"<b>{_layer_name(x, model_layers)}</b>, {_layer_words(x)}" for x in layers]
    # Between the model's layers and the drafter's a column of nothing keeps its place free.
    gap: list[Any] = [None] * (sizing.drafter is not None)
    below = [*mib[:model_layers], *gap, *mib[model_layers:]]
    said = [*words[:model_layers], *(("",) * len(gap)), *words[model_layers:]]
    full = [layer.window is None for layer in layers]
    full = [*full[:model_layers], *((False,) * len(gap)), *full[model_layers:]]
    return {
        "x": list(range(len(below))),
        "z": [below, [v if tall else None for v, tall in zip(below, full, strict=True)]],
        "text": [said, said],
        "zmin": 0,
        "zmax": max(mib),
    }


def layer_bytes(layer: LayerKV, account: Account) -> int:
    """A layer's bytes by one account."""
    count: int = getattr(layer, f"{account}_bytes")
    return count


def strip_axes(sizing: KVSizing, across: str = "xaxis", up: str = "yaxis") -> dict[str, Any]:
    """The strip's axes; they depend on the model and its drafter only."""
    last = sizing.config.num_hidden_layers - 1
    step = 1 if last < 20 else 5
    ticks: list[float] = list(range(0, last + 1, step))
    labels = [str(tick) for tick in ticks]
    end = last + 0.6
    if sizing.drafter is not None:
        count = sizing.drafter.num_hidden_layers
        ticks.append(last + 2 + (count - 1) / 2)
        labels.append("drafter")
        end += count + 1
    return {
        across: {
            "title": {"text": theme.ink("layer")},
            "range": [-0.6, end],
            "showgrid": False,
            "tickvals": ticks,
            "ticktext": labels,
        },
        up: {"range": [0, 1.02], "visible": False},
    }


def _each_kind(sizing: KVSizing, account: Account) -> str:
    """What a layer of each kind takes: within a kind all take the same."""
    kinds = {
        "drafter" if layer.drafter else theme.ATTENTION_NAMES[layer.attention]: layer
        for layer in sizing.per_layer
    }
    return ", ".join(
        f"a {name} layer {size(layer_bytes(layer, account))}" for name, layer in kinds.items()
    )


def _layer_name(layer: LayerKV, model_layers: int) -> str:
    return (
        f"drafter layer {layer.index - model_layers}" if layer.drafter else f"layer {layer.index}"
    )


def _layer_words(layer: LayerKV) -> str:
    kind = theme.ATTENTION_NAMES[layer.attention]
    sees = "all tokens" if layer.window is None else f"a window of {layer.window:,}"
    return f"{kind}, {sees}"


def _strip_text(sizing: KVSizing, account: Account, model: str) -> str:
    lines = [
        f"{model}: KV cache of each layer on one GPU, {settings_words(sizing.settings)} "
        f"({ACCOUNT_NAMES[account]})"
    ]
    counts = [layer_bytes(layer, account) for layer in sizing.per_layer]
    kinds: dict[tuple[str, int], list[LayerKV]] = {}
    for layer, count in zip(sizing.per_layer, counts, strict=True):
        name = "drafter" if layer.drafter else theme.ATTENTION_NAMES[layer.attention]
        kinds.setdefault((name, count), []).append(layer)
    for (name, count), layers in kinds.items():
        lines.append(f"{plural(len(layers), f'{name} layer')}: {size(count)} each")
    return "\n".join(lines)
