"""Experts: how often the router chooses each, and what happens without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from workbench.views import theme
from workbench.views.numbers import plural, signed
from workbench.views.view import View

if TYPE_CHECKING:
    from workbench.model.config import BeamConfig
    from workbench.model.effects import Ablation
    from workbench.model.inspect import RouterLoad

_MOST_CELL_TEXTS = 24  # experts whose values can be written into the cells


def router_load(load: RouterLoad, *, model: str = "the model") -> View:
    """Load of every expert as a multiple of an even share, and each layer's busiest expert.

    ``load`` is that of ``inspect.router_load(capture)``.
    """
    layers, experts = load.counts.shape
    times = load.share * experts
    names = [str(layer) for layer in load.layers]
    fig = theme.figure(
        f"Router load of {model}",
        f"measured here on {plural(load.tokens, 'token')} · 1 is an even share "
        f"(1/{experts} of a layer's choices)",
        height=132 + 28 * layers,
        margin={"l": 56, "r": 8, "t": 92, "b": 44},
        xaxis={"domain": [0, 0.76]},
        xaxis2={"domain": [0.82, 1], "anchor": "y2"},
        yaxis2={"anchor": "x2"},
    )
    cell_text: dict[str, Any] = {}
    if experts <= _MOST_CELL_TEXTS:
        cell_text = {
            "text": [[f"{v:.1f}" if v else "·" for v in row] for row in times.tolist()],
            "texttemplate": theme.ink("%{text}"),
            "textfont": {"size": theme.SMALL},
        }
    fig.add_trace(
        go.Heatmap(
            z=times.float().numpy(),
            customdata=load.counts.int().numpy(),
            colorscale=theme.linear_scale(),
            zmin=0,
            zmax=max(2.0, float(times.max())),
            xgap=1,
            ygap=1,
            hovertemplate=(
                "expert %{x}<br>chosen %{customdata} times<br>%{z:.2f} × an even share"
                "<extra></extra>"
            ),
            showscale=not cell_text,
            colorbar=theme.colorbar("× an even share", x=0.76, len=1.0),
            **cell_text,
        )
    )
    imbalance = load.imbalance.tolist()
    fig.add_trace(
        go.Bar(
            orientation="h",
            x=imbalance,
            y=list(range(layers)),
            xaxis="x2",
            yaxis="y2",
            width=0.5,
            marker={"color": theme.HEAT},
            text=[theme.ink(f"{v:.1f}") for v in imbalance],
            textposition="outside",
            textfont={"size": theme.SMALL},
            cliponaxis=False,
            showlegend=False,
            hovertext=[
                f"layer {n}: its busiest expert has {v:.2f} × an even share"
                for n, v in zip(names, imbalance, strict=True)
            ],
            hoverinfo="text",
        )
    )
    rows = {
        "tickvals": list(range(layers)),
        "ticktext": names,
        "range": [layers - 0.5, -0.5],
        "showgrid": False,
    }
    fig.update_layout(
        xaxis={
            "title": {"text": theme.ink("expert")},
            "showgrid": False,
            "dtick": 1 if experts <= 32 else None,
        },
        yaxis={**rows, "title": {"text": theme.ink("layer")}},
        xaxis2={"visible": False, "range": [0, max(imbalance) * 1.25]},
        yaxis2={**rows, "showticklabels": False},
    )
    theme.panel_title(fig, 1, "each expert, × an even share")
    theme.panel_title(fig, 2, "the busiest")
    return View(figure=fig, text=_load_text(load, model))


def _load_text(load: RouterLoad, model: str) -> str:
    layers, experts = load.counts.shape
    busiest = load.share.argmax(-1).tolist()
    unused = int((load.counts == 0).sum())
    lines = [
        f"{model}: {experts} experts in {plural(layers, 'layer')}, {plural(load.tokens, 'token')}; "
        f"{unused} of {layers * experts} experts never chosen on this prompt"
    ]
    lines += [
        f"layer {layer}: busiest expert {expert} at {value:.1f} × an even share"
        for layer, expert, value in zip(load.layers, busiest, load.imbalance.tolist(), strict=True)
    ]
    return "\n".join(lines)


def ablation_effect(effect: Ablation, config: BeamConfig, *, model: str = "the model") -> View:
    """Rise of the next-token loss without each layer, and without each expert.

    ``effect`` is that of ``effects.ablation(beam, prompt)``.
    """
    rises, experts = effect.layer_effects(), effect.expert_effects()
    rows = sorted(experts)
    fig = theme.figure(
        f"What each part of {model} is worth",
        f"measured here on {plural(effect.tokens, 'predicted token')} · rise of the loss when a "
        f"part is switched off; {effect.loss:.2f} nats a token with all of it",
        height=max(330, 132 + 28 * len(rises)),
        margin={"l": 56, "r": 8, "t": 120, "b": 44},
        legend={"y": 1.12},
        xaxis={"domain": [0, 0.38] if rows else [0, 1]},
    )
    for kind, color in theme.ATTENTION.items():
        layers = [i for i, name in enumerate(config.layer_types) if name == kind]
        fig.add_trace(
            go.Bar(
                orientation="h",
                name=theme.ink(f"{theme.ATTENTION_NAMES[kind]} layer"),
                x=[rises[i] for i in layers],
                y=layers,
                width=0.5,
                marker={"color": color},
                text=[theme.ink(f" {signed(rises[i], 2)}") for i in layers],
                textposition="outside",
                textfont={"size": theme.SMALL},
                cliponaxis=False,
                hovertext=[
                    f"without layer {i}: {signed(rises[i], 4)} nats a token" for i in layers
                ],
                hoverinfo="text",
            )
        )
    low, high = min(0.0, *rises), max(0.0, *rises)
    room = (high - low or 1.0) * 0.18
    fig.update_layout(
        xaxis={
            "title": {"text": theme.ink("rise of the loss (nats a token)")},
            "range": [low - room if low < 0 else low, high + room],
        },
        yaxis={
            "title": {"text": theme.ink("layer switched off")},
            "range": [len(rises) - 0.5, -0.5],
            "dtick": 1 if len(rises) <= 24 else None,
            "showgrid": False,
        },
    )
    theme.panel_title(fig, 1, "without a whole layer")
    if rows:
        _expert_panel(fig, experts, rows)
    return View(figure=fig, text=_ablation_text(effect, config, model))


def _expert_panel(fig: go.Figure, experts: dict[int, tuple[float, ...]], rows: list[int]) -> None:
    values = [list(experts[layer]) for layer in rows]
    most = max(abs(v) for row in values for v in row) or 1.0
    fig.add_trace(
        go.Heatmap(
            z=values,
            xaxis="x2",
            yaxis="y2",
            colorscale=theme.diverging_scale(),
            zmin=-most,
            zmax=most,
            xgap=1,
            ygap=1,
            hovertemplate="without expert %{x}: %{z:+.4f} nats a token<extra></extra>",
            colorbar=theme.colorbar("rise of the loss (nats a token)", len=1.0),
        )
    )
    fig.update_layout(
        xaxis2={
            "domain": [0.52, 1],
            "anchor": "y2",
            "title": {"text": theme.ink("expert")},
            "showgrid": False,
            "dtick": 1 if len(values[0]) <= 32 else None,
        },
        yaxis2={
            "anchor": "x2",
            "title": {"text": theme.ink("layer")},
            "tickvals": list(range(len(rows))),
            "ticktext": [str(layer) for layer in rows],
            "range": [len(rows) - 0.5, -0.5],
            "showgrid": False,
        },
    )
    theme.panel_title(fig, 2, "without one expert (the router takes its next best)")


def _ablation_text(effect: Ablation, config: BeamConfig, model: str) -> str:
    rises = effect.layer_effects()
    lines = [
        f"{model}: {effect.loss:.2f} nats a token over {effect.tokens} tokens",
        "rise without layer: "
        + "  ".join(f"{i} {signed(rise, 2)}" for i, rise in enumerate(rises)),
    ]
    every = [
        (rise, layer, expert)
        for layer, values in effect.expert_effects().items()
        for expert, rise in enumerate(values)
    ]
    if every:
        rise, layer, expert = max(every)
        lines.append(
            f"{len(every)} experts tried one at a time: the one most missed is expert {expert} of "
            f"layer {layer}, {signed(rise, 2)}"
        )
    return "\n".join(lines)
