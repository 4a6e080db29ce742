"""How many different experts a batch touches: expected under uniform routing, and measured."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from workbench.model.routing import TouchedExperts
from workbench.views import theme
from workbench.views.numbers import plural
from workbench.views.view import View

# field -> name, colour, symbol, dash
_LINES = {
    "uniform": ("uniform routing (exact expectation)", theme.NEUTRAL, "circle", "dash"),
    "independent": ("tokens of many sequences (measured here)", theme.SPARSE, "circle", "solid"),
    "consecutive": ("tokens in a row (measured here)", theme.HEAT, "square-open", "dot"),
}


def experts_touched(touched: TouchedExperts) -> View:
    """Different experts a layer over the tokens of a batch; a step reads the weights of these.

    ``touched`` is that of ``touched_experts(beam, texts)``. Batches larger than what was recorded
    have no measured point.
    """
    fig = theme.figure(
        f"Different experts that a batch touches in {touched.model}",
        f"mean of {plural(len(touched.layers), 'sparse layer')}, top {touched.per_token} of "
        f"{touched.experts} experts · measured here on {plural(touched.tokens, 'token')} of "
        f"{plural(touched.texts, 'text')}; the dashed line is exact",
        height=360,
        legend_under_title=True,
        margin={"l": 60, "r": 16, "t": 112, "b": 52},
    )
    for field, (name, color, symbol, dash) in _LINES.items():
        points = [
            (n, value)
            for n, value in zip(touched.batches, getattr(touched, field), strict=True)
            if value is not None
        ]
        fig.add_trace(
            go.Scatter(
                x=[n for n, _ in points],
                y=[value for _, value in points],
                name=theme.ink(name),
                mode="lines" if field == "uniform" else "lines+markers",
                line={"color": color, "width": 2, "dash": dash},
                marker={"symbol": symbol, "size": 8, "color": color},
                hovertemplate=f"{name}<br>%{{x:,}} tokens: %{{y:.2f}} experts<extra></extra>",
            )
        )
    fig.update_layout(
        xaxis={
            "type": "log",
            "title": {"text": theme.ink("tokens in the batch")},
            "tickvals": list(touched.batches),
            "ticktext": [f"{n:,}" for n in touched.batches],
            "range": [np.log10(min(touched.batches)) - 0.06, np.log10(max(touched.batches)) + 0.06],
            "showgrid": False,
        },
        yaxis={
            "title": {"text": theme.ink("different experts a layer")},
            "range": [0, touched.experts * 1.05],
        },
    )
    return View(figure=fig, text=repr(touched))
