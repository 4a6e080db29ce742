"""The residual stream over depth: what the depth-scaled adds do, and what is measured."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.errors import InspectionError
from workbench.model.effects import ResidualAdd, residual_adds
from workbench.model.info import ModelInfo
from workbench.views import theme
from workbench.views.view import View


def residual_scale(info: ModelInfo, rms: Sequence[float] | None = None) -> View:
    """Factors of every residual add, what survives of each sublayer, and the measured stream.

    ``rms``, from ``effects.stream_rms``, is the root mean square of the stream of a prompt: L + 1
    values, the embedding first. Without it the figure holds the modelled panel only.
    """
    adds = residual_adds(info.config)
    layers = info.config.num_hidden_layers
    if rms is not None and len(rms) != layers + 1:
        raise InspectionError(
            f"rms has {len(rms)} values, but {info.name} has {layers + 1} places of the stream; "
            "take them from a capture of the same model"
        )
    basis = "factors modelled" + ("" if rms is None else "; stream measured here on the prompt")
    fig = theme.figure(
        f"Residual scale over the depth of {info.name}",
        basis,
        height=376,
        margin={"l": 56, "r": 16, "t": 134, "b": 48},
        legend={"y": 1.14},
        xaxis={"domain": [0, 1 if rms is None else 0.53]},
    )
    _factors(fig, adds, layers)
    if rms is not None:
        fig.update_layout(xaxis2={"domain": [0.64, 1], "anchor": "y2"}, yaxis2={"anchor": "x2"})
        fig.update_layout(legend2={"x": 0.64, "y": 1.14, **theme.LEGEND})
        _stream(fig, info, rms)
    return View(figure=fig, text=_text(info, adds, rms))


def _factors(fig: go.Figure, adds: tuple[ResidualAdd, ...], layers: int) -> None:
    # Attention of layer l is at l, its MLP half a layer further.
    depth = [a.layer + (0.5 if a.sublayer == "mlp" else 0.0) for a in adds]
    series = (
        ("stream × √((n−1)/n)", [a.stream for a in adds], theme.NEUTRAL, "solid"),
        ("sublayer × 1/√n", [a.new for a in adds], theme.HEAT, "solid"),
        ("left of it at the end", [a.survives for a in adds], theme.HEAT, "dot"),
    )
    for name, values, color, dash in series:
        fig.add_trace(
            go.Scatter(
                x=depth,
                y=values,
                mode="lines",
                line={"color": color, "width": 2, "dash": dash},
                name=theme.ink(name),
                hovertext=[
                    f"layer {a.layer}, {a.sublayer} (add n = {a.number})<br>{name}: {v:.4f}"
                    for a, v in zip(adds, values, strict=True)
                ],
                hoverinfo="text",
            )
        )
    theme.panel_title(fig, 1, "Every sublayer has the same weight in the end")
    fig.update_layout(
        xaxis={"title": {"text": theme.ink("layer")}, "range": [-0.5, layers], "showgrid": False},
        yaxis={"title": {"text": theme.ink("factor")}, "range": [0, 1.04]},
    )


def _stream(fig: go.Figure, info: ModelInfo, rms: Sequence[float]) -> None:
    names = ["emb", *(str(i) for i in range(len(rms) - 1))]
    step = max(1, len(rms) // 10)
    colors = [theme.NEUTRAL, *(theme.ATTENTION[kind] for kind in info.config.layer_types)]
    fig.add_trace(
        go.Scatter(
            x=list(range(len(rms))),
            y=list(rms),
            xaxis="x2",
            yaxis="y2",
            mode="lines+markers",
            line={"color": theme.rgba(theme.NEUTRAL, 0.6), "width": 1.5},
            marker={"color": colors, "size": 8},
            showlegend=False,
            hovertext=[f"after {n}: RMS {v:.3f}" for n, v in zip(names, rms, strict=True)],
            hoverinfo="text",
        )
    )
    for kind, color in theme.ATTENTION.items():
        fig.add_trace(
            go.Scatter(
                x=[None],
                y=[None],
                xaxis="x2",
                yaxis="y2",
                mode="markers",
                marker={"color": color, "size": 8},
                name=theme.ink(f"{theme.ATTENTION_NAMES[kind]} layer"),
                legend="legend2",
            )
        )
    theme.panel_title(fig, 2, "RMS of the stream after each layer")
    fig.update_layout(
        xaxis2={
            "title": {"text": theme.ink("after layer")},
            "tickvals": list(range(0, len(rms), step)),
            "ticktext": names[::step],
            "showgrid": False,
        },
        yaxis2={"title": {"text": theme.ink("RMS")}, "rangemode": "tozero"},
    )


def _text(info: ModelInfo, adds: tuple[ResidualAdd, ...], rms: Sequence[float] | None) -> str:
    first, last = adds[0], adds[-1]
    lines = [
        f"{info.name}: {len(adds)} residual adds; the sublayer's factor 1/sqrt(n) falls from "
        f"{first.new:.4f} to {last.new:.4f}",
        f"what is left of each at the end: {first.survives:.4f} of the first attention, "
        f"{last.survives:.4f} of the last MLP (modelled)",
    ]
    if rms is not None:
        values = " ".join(f"{v:.2f}" for v in rms)
        lines.append(f"RMS of the stream, embedding and after each layer (measured): {values}")
    return "\n".join(lines)
