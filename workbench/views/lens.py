"""The logit lens: what the model would say if it stopped after each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from workbench.views import theme
from workbench.views.page import box, page
from workbench.views.view import View

if TYPE_CHECKING:
    from workbench.model.config import BeamConfig
    from workbench.model.inspect import LogitLens

_CELL = "padding:2px 6px;overflow:hidden;text-overflow:ellipsis;white-space:pre;border-radius:2px"
_STRONGEST = 0.7  # opacity at probability 1: text stays readable on it


def logit_lens(lens: LogitLens, config: BeamConfig, *, last: int = 11) -> View:
    """The likeliest next token after each layer, for the last ``last`` positions.

    Strength of colour is its probability; a token that is the one that comes next in the prompt is
    underlined. ``lens`` is that of ``inspect.logit_lens(beam, prompt)``.
    """
    first = max(0, len(lens.tokens) - last)
    return View(
        figure=_figure(lens, first),
        text=_text(lens),
        html=_html(lens, config, first),
    )


def _rows(lens: LogitLens) -> list[str]:
    return ["embedding" if layer < 0 else f"layer {layer}" for layer in lens.layers]


def _best(lens: LogitLens, place: int, position: int) -> tuple[str, float]:
    token = int(lens.top_ids[place, position, 0])
    return lens.texts[token], float(lens.top_probs[place, position, 0])


def _figure(lens: LogitLens, first: int) -> go.Figure:
    rows, positions = _rows(lens), range(first, len(lens.tokens))
    fig = theme.figure(
        f"Logit lens of {lens.model}",
        "measured here · likeliest next token if the model stopped after a layer",
        height=150 + 24 * len(rows),
        margin={"l": 80, "r": 8, "t": 76, "b": 60},
    )
    fig.add_trace(
        go.Heatmap(
            z=lens.top_probs[:, first:, 0].numpy(),
            text=[
                [theme.token_label(_best(lens, place, t)[0], 9) for t in positions]
                for place in range(len(rows))
            ],
            texttemplate=theme.ink("%{text}"),
            textfont={"size": theme.SMALL, "family": theme.MONO},
            colorscale=[(0, theme.rgba(theme.HEAT, 0)), (1, theme.rgba(theme.HEAT, _STRONGEST))],
            zmin=0,
            zmax=1,
            xgap=1,
            ygap=1,
            hovertemplate="%{text}<br>probability %{z:.3f}<extra></extra>",
            colorbar=theme.colorbar("probability", len=1.0),
        )
    )
    fig.update_layout(
        xaxis={
            "tickvals": list(range(len(positions))),
            "ticktext": [theme.token_label(lens.tokens[t], 9) for t in positions],
            "tickfont": {"family": theme.MONO},
            "title": {"text": theme.ink("token read")},
            "showgrid": False,
        },
        yaxis={
            "tickvals": list(range(len(rows))),
            "ticktext": rows,
            "range": [len(rows) - 0.5, -0.5],
            "showgrid": False,
        },
    )
    return fig


def _html(lens: LogitLens, config: BeamConfig, first: int) -> str:
    positions = range(first, len(lens.tokens))
    cells = [box("reads", _CELL, "opacity:.7", f"font-family:{theme.SANS}")]
    cells += [
        box(theme.token_label(lens.tokens[t]), _CELL, "font-weight:700", title=f"position {t}")
        for t in positions
    ]
    for place, name in enumerate(_rows(lens)):
        layer = lens.layers[place]
        color = theme.NEUTRAL if layer < 0 else theme.ATTENTION[config.layer_types[layer]]
        cells.append(
            box(name, _CELL, f"font-family:{theme.SANS}", f"box-shadow:inset 3px 0 {color}")
        )
        cells += [_cell(lens, place, t) for t in positions]
    grid = box(
        "".join(cells),
        "display:grid",
        "gap:1px",
        f"font:{theme.SMALL}px/17px {theme.MONO}",
        f"min-width:{80 + 60 * len(positions)}px",
        f"grid-template-columns:80px repeat({len(positions)},minmax(0,1fr))",
    )
    return page(
        f"Logit lens of {lens.model}",
        "measured here · likeliest next token if the model stopped there, underlined where right",
        box(grid, "overflow-x:auto"),
        legend=_legend(),
    )


def _cell(lens: LogitLens, place: int, position: int) -> str:
    text, probability = _best(lens, place, position)
    ids, probabilities = lens.top_ids[place, position], lens.top_probs[place, position]
    best = ", ".join(
        f"{lens.texts[int(i)]} {float(p):.2f}" for i, p in zip(ids, probabilities, strict=True)
    )
    follows = int(lens.target_rank[place, position]) == 1
    return box(
        theme.token_label(text),
        _CELL,
        f"background:{theme.rgba(theme.HEAT, round(_STRONGEST * probability, 2))}",
        *(["text-decoration:underline"] if follows else []),
        title=best,
    )


def _legend() -> list[tuple[str, str]]:
    steps = [(theme.rgba(theme.HEAT, _STRONGEST * p), f"p = {p:g}") for p in (0.1, 0.5, 1)]
    kinds = [(color, theme.ATTENTION_NAMES[kind]) for kind, color in theme.ATTENTION.items()]
    return [*steps, *kinds]


def _text(lens: LogitLens) -> str:
    lines = [f"{lens.model}: what follows the last of {len(lens.tokens)} tokens, layer by layer"]
    for place, name in enumerate(_rows(lens)):
        text, probability = _best(lens, place, len(lens.tokens) - 1)
        kl = max(0.0, float(lens.kl[place, -1]))  # no "-0.0"
        lines.append(f"{name:<10} {text:<14} {probability:.2f}   KL to the end {kl:.1f} nats")
    return "\n".join(lines)
