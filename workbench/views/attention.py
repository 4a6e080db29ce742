"""Attention maps: who looks at whom, in a sliding and in a full layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from workbench.errors import InspectionError
from workbench.model.effects import attention_reach
from workbench.views import theme
from workbench.views.view import View

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.model.config import AttentionType
    from workbench.model.inspect import Capture

MOST_LABELS = 40  # tokens that can be written along an axis
COLOR_TITLE = "probability p, colour ∝ ∛p"


def head_map(captured: Capture, layer: int, head: int | None) -> Tensor:
    """Probabilities ``[T, T]`` of one head of a captured layer, or the mean over heads for None.

    Raises:
        InspectionError: the layer's attention was not captured, or it has no such head.
    """
    if layer not in captured.attention:
        raise InspectionError(
            f"the attention of layer {layer} was not captured; call "
            f"capture(..., attention=[{layer}])"
        )
    maps = captured.attention[layer]
    if head is None:
        return maps.mean(0)
    if not 0 <= head < len(maps):
        raise InspectionError(
            f"layer {layer} has no head {head}; its heads are 0 … {len(maps) - 1}"
        )
    return maps[head]


def attention_maps(
    captured: Capture,
    sliding: int | None = None,
    full: int | None = None,
    *,
    head: int | None = None,
    queries: int = 24,
) -> View:
    """A sliding and a full layer side by side on one colour scale: the last ``queries`` tokens.

    ``captured`` needs the attention of both layers; by default the first of each kind that it has.
    ``head`` None is the mean over heads. The dashed line is the edge of the window.
    """
    layers = [
        _layer(captured, sliding, "sliding_attention"),
        _layer(captured, full, "full_attention"),
    ]
    last = len(captured.tokens)
    first = max(0, last - queries)
    labelled = last <= MOST_LABELS  # token texts under the maps
    fig = theme.figure(
        f"Attention of {captured.model}, {_head_name(head)}",
        f"measured here · last {last - first} of {last} tokens look back over "
        f"{'all of them' if first else 'the prompt'}",
        height=470 if labelled else 430,
        margin={"l": 84, "r": 16, "t": 92, "b": 84 if labelled else 44},
        xaxis={"domain": [0, 0.45]},
        xaxis2={"domain": [0.55, 1], "anchor": "y2"},
        yaxis2={"anchor": "x2"},
        coloraxis={
            "cmin": 0,
            "cmax": 1,
            "colorscale": theme.scale(),
            "colorbar": theme.colorbar(COLOR_TITLE, len=1.0, tickvals=[0, 0.1, 0.25, 0.5, 1]),
        },
    )
    lines = []
    for panel, layer in enumerate(layers, start=1):
        number = "" if panel == 1 else str(panel)
        fig.add_trace(heatmap(captured, layer, head, first, xaxis=f"x{number}", yaxis=f"y{number}"))
        fig.update_layout({f"xaxis{number}": key_axis(captured.tokens)})
        fig.update_layout({f"yaxis{number}": query_axis(captured.tokens, first)})
        edge = window_edge(captured, layer, first)
        fig.add_trace(go.Scatter(**edge, xaxis=f"x{number}", yaxis=f"y{number}"))
        theme.panel_title(fig, panel, panel_title(captured, layer))
        lines.append(reach_text(captured, layer, head))
    fig.update_layout(yaxis2={"title": None})
    return View(figure=fig, text="\n".join(lines))


def _layer(captured: Capture, wanted: int | None, kind: AttentionType) -> int:
    types = captured.config.layer_types
    name = theme.ATTENTION_NAMES[kind]
    if wanted is None:
        for layer in sorted(captured.attention):
            if types[layer] == kind:
                return layer
        raise InspectionError(
            f"the capture holds the attention of no {name} layer; call capture(..., attention=True)"
        )
    if not 0 <= wanted < len(types) or types[wanted] != kind:
        raise InspectionError(f"layer {wanted} is not a {name} layer of {captured.model}")
    return wanted


def _head_name(head: int | None) -> str:
    return "mean over heads" if head is None else f"head {head}"


def panel_title(captured: Capture, layer: int) -> str:
    """Which layer, of which kind, with its colour (plotly text)."""
    c = captured.config
    kind = c.layer_types[layer]
    square = f'<span style="color:{theme.ATTENTION[kind]}">■</span>'
    sees = "sees everything" if c.is_full(layer) else f"window {c.sliding_window:,}"
    return f"{square} layer {layer}, {theme.ATTENTION_NAMES[kind]}: {sees}"


def heatmap(captured: Capture, layer: int, head: int | None, first: int = 0, **axes: str) -> Any:
    """The heat map trace of one layer: queries ``first …`` down, keys across.

    A key that the layer does not show a query has probability 0 exactly, and 0 is drawn as nothing.
    """
    return go.Heatmap(
        z=head_map(captured, layer, head)[first:].float().numpy(),
        y0=first,
        coloraxis="coloraxis",
        text=hidden_texts(captured, layer, first),
        hovertemplate=hover(captured),
        **axes,
    )


def hover(captured: Capture) -> str:
    """Hover of a cell: positions, token texts where the axes have them, probability."""
    # With a format %{x} is the position, without one it is what stands on the axis.
    named = len(captured.tokens) <= MOST_LABELS
    query, key = (f"%{{{axis}:d}}" + (f" %{{{axis}}}" if named else "") for axis in "yx")
    seen = "%{text}" if named else ""
    return f"query {query}<br>key {key}<br>probability %{{z:.4f}}{seen}<extra></extra>"


def hidden_texts(captured: Capture, layer: int, first: int = 0) -> list[list[str]] | None:
    """What the hover adds for keys the layer does not show a query; None for a long prompt."""
    c, tokens = captured.config, len(captured.tokens)
    if tokens > MOST_LABELS:
        return None  # one text a cell would be most of a saved notebook
    window = tokens if c.is_full(layer) else c.sliding_window
    return [
        ["" if 0 <= query - key < window else ", not visible" for key in range(tokens)]
        for query in range(first, tokens)
    ]


def window_edge(captured: Capture, layer: int, first: int = 0) -> dict[str, Any]:
    """Line along the oldest key that each query sees in a sliding layer; empty in a full one."""
    c, tokens = captured.config, len(captured.tokens)
    x: list[float] = []
    y: list[float] = []
    if not c.is_full(layer):
        for query in range(max(first, c.sliding_window), tokens):
            edge = query - c.sliding_window + 0.5
            x += [edge, edge]
            y += [query - 0.5, query + 0.5]
    return {
        "x": x,
        "y": y,
        "mode": "lines",
        "line": {"color": theme.SLIDING, "width": 1.5, "dash": "dot"},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def query_axis(tokens: tuple[str, ...], first: int = 0) -> dict[str, Any]:
    """Vertical axis: positions downward, with token texts where there is room."""
    count = len(tokens) - first
    axis: dict[str, Any] = {
        "range": [len(tokens) - 0.5, first - 0.5],
        "showgrid": False,
        "title": {"text": theme.ink("query")},
    }
    if count <= MOST_LABELS:
        axis |= _token_ticks(tokens, first)
    else:
        axis |= {"tickmode": "auto", "tickvals": None, "ticktext": None}
    return axis


def key_axis(tokens: tuple[str, ...]) -> dict[str, Any]:
    """Horizontal axis: token texts where there is room, else positions."""
    axis: dict[str, Any] = {
        "range": [-0.5, len(tokens) - 0.5],
        "showgrid": False,
        "title": {"text": theme.ink("key" if len(tokens) <= MOST_LABELS else "key (position)")},
    }
    if len(tokens) <= MOST_LABELS:
        axis |= {**_token_ticks(tokens), "tickangle": -90}
    else:
        axis |= {"tickmode": "auto", "tickvals": None, "ticktext": None, "tickangle": None}
    return axis


def _token_ticks(tokens: tuple[str, ...], first: int = 0) -> dict[str, Any]:
    return {
        "tickmode": "array",
        "tickvals": list(range(first, len(tokens))),
        "ticktext": [theme.token_label(t, 10) for t in tokens[first:]],
        "tickfont": {"family": theme.MONO, "size": theme.SMALL, "color": theme.NEUTRAL},
    }


def reach_text(captured: Capture, layer: int, head: int | None) -> str:
    """One line of figures for one map."""
    name, *facts = reach_facts(captured, layer, head)
    return f"{name}: {', '.join(facts)}"


def reach_facts(captured: Capture, layer: int, head: int | None) -> list[str]:
    """The map's name, then its figures one by one."""
    c = captured.config
    reach = attention_reach(head_map(captured, layer, head), c.sliding_window)
    facts = [
        f"layer {layer} ({theme.ATTENTION_NAMES[c.layer_types[layer]]}), {_head_name(head)}",
        f"looks back {reach.distance:.1f} tokens on average",
        f"attention {reach.first:.2f} on the first token",
        f"attention {reach.itself:.2f} on itself",
    ]
    if c.is_full(layer) and len(captured.tokens) > c.sliding_window:
        facts.append(f"attention {reach.beyond:.2f} beyond a window of {c.sliding_window}")
    return facts
