"""The layer strip: every layer of a model in one line."""

from __future__ import annotations

import plotly.graph_objects as go

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
        f"{_provenance(info)}",
        height=216,
        barmode="overlay",
        margin={"l": 76, "r": 8, "t": 88, "b": 44},
        legend={"traceorder": "normal"},
    )
    for kind, color in theme.ATTENTION.items():
        layers = [i for i, name in enumerate(config.layer_types) if name == kind]
        fig.add_trace(
            go.Bar(
                name=theme.ink(f"{theme.ATTENTION_NAMES[kind]} attention ({len(layers)})"),
                x=layers,
                y=[_HEIGHT[kind]] * len(layers),
                width=_WIDTH,
                marker={"color": color, "line": {"width": 0}},
                hovertext=[_hover(info, i) for i in layers],
                hoverinfo="text",
            )
        )
    for mlp, color in theme.MLP.items():
        layers = [i for i, name in enumerate(config.mlp_layer_types) if name == mlp]
        fig.add_trace(
            go.Bar(
                name=theme.ink(f"{mlp} MLP ({len(layers)})"),
                x=layers,
                y=[-_MLP_DEPTH] * len(layers),
                base=_MLP_TOP,
                width=_WIDTH,
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
                hovertext=[_hover(info, i) for i in layers],
                hoverinfo="text",
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
    return f"layer types {source.kind}" + (f": {source.note}" if source.kind == "assumed" else "")


def _hover(info: ModelInfo, index: int) -> str:
    c = info.config
    full = c.is_full(index)
    position = "none; SSMax scales the queries" if full else f"RoPE, theta {c.rope_theta:,.0f}"
    window = f"everything, up to {c.max_position_embeddings:,}" if full else f"{c.sliding_window:,}"
    mlp = (
        f"{c.num_experts} experts, {c.num_experts_per_tok} a token, "
        f"width {c.moe_intermediate_size:,}"
        if c.is_sparse(index)
        else f"dense, width {c.intermediate_size:,}"
    )
    lines = [
        f"<b>layer {index}</b> · {theme.ATTENTION_NAMES[c.layer_types[index]]}, "
        f"{c.mlp_layer_types[index]}",
        f"sees: {window} tokens",
        f"position encoding: {position}",
        f"heads: {c.num_attention_heads} query, {c.num_key_value_heads} KV, head_dim {c.head_dim}",
        f"MLP: {mlp}",
        f"parameters: {billions(info.layers[index].parameters)}",
    ]
    return "<br>".join(lines)


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
