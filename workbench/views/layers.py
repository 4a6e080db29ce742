"""The layer strip: every layer of a model in one line."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from workbench.model.config import AttentionType, BeamConfig, MlpType
from workbench.model.info import MARKS, ModelInfo, billions
from workbench.views import theme
from workbench.views.numbers import plural
from workbench.views.view import View

# Full layers stand taller and dense MLPs are solid: the strip reads without its colours.
_HEIGHT = {"sliding_attention": 0.62, "full_attention": 1.0}
_PATTERN = {"sparse": "/", "dense": ""}
_MLP_TOP, _MLP_DEPTH, _WIDTH = -0.08, 0.3, 0.88


def layer_strip(info: ModelInfo) -> View:
    """One cell a layer: attention above (sliding or full), MLP below (dense or sparse).

    ``info`` is that of ``workbench.info(model)``. The hover shows window, heads, experts,
    parameters and position encoding.
    """
    config = info.config
    fig = theme.figure(
        f"Layers of {info.name}",
        f"{config.num_hidden_layers} layers, {billions(info.parameters.total)} parameters · "
        f"{_provenance(info)} · taller: sees everything",
        height=236,
        barmode="overlay",
        margin={"l": 76, "r": 8, "t": 108, "b": 44},
        legend={"traceorder": "normal"},
    )
    for kind, color in theme.ATTENTION.items():
        layers = [i for i, name in enumerate(config.layer_types) if name == kind]
        fig.add_trace(
            go.Bar(
                name=theme.ink(f"{theme.ATTENTION_NAMES[kind]} attention ({len(layers)})"),
                y=[_HEIGHT[kind]] * len(layers),
                marker={"color": color, "line": {"width": 0}},
                **_cells(info, layers, _attention_words(config, kind)),
            )
        )
    for mlp, color in theme.MLP.items():
        layers = [i for i, name in enumerate(config.mlp_layer_types) if name == mlp]
        fig.add_trace(
            go.Bar(
                name=theme.ink(f"{mlp} MLP ({len(layers)})"),
                y=[-_MLP_DEPTH] * len(layers),
                base=_MLP_TOP,
                marker={
                    "color": color,
                    "line": {"width": 0},
                    "pattern": {
                        "shape": _PATTERN[mlp],
                        "solidity": 0.5,
                        "size": 5,
                        "fgcolor": color,
                        "bgcolor": theme.rgba(color, 0.3),
                        "fillmode": "replace",
                    },
                },
                **_cells(info, layers, _mlp_words(config, mlp)),
            )
        )
    last = config.num_hidden_layers - 1
    fig.update_xaxes(
        title_text=theme.ink("layer"),
        range=[-0.6, last + 0.6],
        showgrid=False,
        tickvals=_ticks(last),
    )
    fig.update_yaxes(
        range=[_MLP_TOP - _MLP_DEPTH - 0.02, 1.02],
        showgrid=False,
        tickvals=[0.31, _MLP_TOP - _MLP_DEPTH / 2],
        ticktext=[theme.ink("attention"), theme.ink("MLP")],
    )
    return View(figure=fig, text=_text(info))


def _ticks(last: int) -> list[int]:
    step = 1 if last < 20 else 5
    ticks = list(range(0, last + 1, step))
    return ticks if ticks[-1] == last or last - ticks[-1] < step / 2 else [*ticks, last]


def _provenance(info: ModelInfo) -> str:
    source = info.sources["layer_types"]
    full = info.config.full_layers
    if source.kind == "assumed" and {b - a for a, b in pairwise(full)} == {6}:
        return "every sixth layer full (assumed; only the count is published)"
    return f"layer types {source.kind}" + (f": {source.note}" if source.kind == "assumed" else "")


def _cells(info: ModelInfo, layers: list[int], words: str) -> dict[str, Any]:
    """Where the cells of one kind stand and what they say; the words once for all of them."""
    return {
        "x": layers,
        "width": _WIDTH,
        "customdata": [billions(info.layers[i].parameters) for i in layers],
        "hovertemplate": (
            f"<b>layer %{{x}}</b>, %{{customdata}} parameters<br>{words}<extra></extra>"
        ),
    }


def _attention_words(c: BeamConfig, kind: AttentionType) -> str:
    heads = (
        f"{c.num_attention_heads} query heads, {c.num_key_value_heads} KV heads, "
        f"head_dim {c.head_dim}"
    )
    if kind == "full_attention":
        sees = f"full attention: sees all of up to {c.max_position_embeddings:,} tokens"
        position = "no position encoding; SSMax scales the queries"
    else:
        sees = f"sliding attention: sees a window of {c.sliding_window:,} tokens"
        position = f"position encoding: RoPE, theta {c.rope_theta:,.0f}"
    return f"{sees}<br>{heads}<br>{position}"


def _mlp_words(c: BeamConfig, mlp: MlpType) -> str:
    if mlp == "dense":
        return f"dense MLP of width {c.intermediate_size:,}"
    return (
        f"{c.num_experts} experts of width {c.moe_intermediate_size:,}<br>"
        f"{c.num_experts_per_tok} of them work on a token"
    )


def _text(info: ModelInfo) -> str:
    c = info.config
    attention = "".join(MARKS[kind] for kind in c.layer_types)
    mlp = "".join(MARKS[kind] for kind in c.mlp_layer_types)
    sparse = len(c.sparse_layers)
    return "\n".join(
        [
            f"{info.name}: {plural(c.num_hidden_layers, 'layer')}, "
            f"{billions(info.parameters.total)} parameters",
            f"attention  {attention}",
            f"MLP        {mlp}",
            f"{MARKS['sliding_attention']} {len(c.sliding_layers)} sliding, window "
            f"{c.sliding_window}   {MARKS['full_attention']} {len(c.full_layers)} full   "
            f"{MARKS['sparse']} {sparse} sparse, {c.num_experts_per_tok} of {c.num_experts} "
            f"experts   {MARKS['dense']} {c.num_hidden_layers - sparse} dense",
        ]
    )
