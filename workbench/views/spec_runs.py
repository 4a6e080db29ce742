"""Runs, drafters or settings beside each other: survival, acceptance length, tokens a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np
import plotly.graph_objects as go

from workbench.errors import DraftError
from workbench.spec.metrics import Acceptance, Tally
from workbench.spec.step import Step
from workbench.views import spec_marks, theme
from workbench.views.numbers import plural
from workbench.views.spec_bars import LOOKS, bar_of, length_bars
from workbench.views.spec_curves import UNDEFINED, rate_curve
from workbench.views.view import View

_LETTER = 6.6  # px of a letter beside a bar
_LONGEST = 24  # letters of a run's name there
# px: above the curves, of them, below them, below the bars
_TOP, _CURVES, _GAP, _FOOT = 112, 230, 96, 52


def decode_speed(steps: Sequence[Step]) -> float | None:
    """Tokens a second of a run's decode steps, all requests together; prefills excluded."""
    some = [step for step in steps if step.phase == "decode"]
    seconds = sum(step.seconds for step in some)
    return sum(step.tokens for step in some) / seconds if seconds > 0 else None


def compare_runs(
    runs: Mapping[str, Acceptance | Sequence[Step]],
    *,
    speeds: Mapping[str, float | None] | None = None,
    source: str = "measured here",
) -> View:
    """Two runs, drafters or settings (up to six): survival curves, acceptance lengths, tokens/s.

    A run is its steps or its ``Acceptance``. Steps have a speed of their own, tokens over the wall
    time of all decode steps; ``speeds`` says others, in tokens/s. Ratios are to the first run.

    Raises:
        DraftError: more than six runs.
    """
    if len(runs) > len(LOOKS):
        raise DraftError(f"{len(runs)} runs are too many to tell apart; compare at most six")
    found: dict[str, Acceptance] = {}
    rates: dict[str, float | None] = {}
    for name, run in runs.items():
        if isinstance(run, Acceptance):
            found[name], rates[name] = run, None
        else:
            tally = Tally()
            for step in run:
                tally.add(step)
            found[name], rates[name] = tally.acceptance(), decode_speed(run)
    rates |= dict(speeds or {})
    rates = {k: v if v is not None and isfinite(v) else None for k, v in rates.items()}
    timed = any(rates[name] is not None for name in found)
    if not found:
        fig = theme.figure("Runs beside each other", source, height=220)
        spec_marks.nothing(fig, "there is no run")
        return View(figure=fig, text="there is no run")
    below = 58 + 30 * max(2, len(found))
    inner = _CURVES + _GAP + below
    left = round(24 + _LETTER * max(len(theme.short_token(name, _LONGEST)) for name in found))
    fig = theme.figure(
        "Runs beside each other",
        f"{source} · above: survival by slot with 95 % bands; below: acceptance length ± standard "
        "error" + ("" if timed else " · no time is known of these runs"),
        height=_TOP + inner + _FOOT, legend_under_title=True, bargap=0.3,
        margin={"l": max(64, left), "r": 16, "t": _TOP, "b": _FOOT},
        legend={"traceorder": "normal"},
        xaxis={"domain": [0, 1], "anchor": "y"},
        yaxis={"domain": [1 - _CURVES / inner, 1], "anchor": "x"},
        xaxis2={"domain": [0, 0.52 if timed else 1], "anchor": "y2"},
        yaxis2={"domain": [0, below / inner], "anchor": "x2"},
    )  # fmt: skip
    looks = LOOKS[: len(found)]
    for (name, acceptance), (color, _, dash, symbol) in zip(found.items(), looks, strict=True):
        short = theme.short_token(name, 36)
        rate_curve(fig, acceptance.rates("survival"), short, "of all draft events", color, dash,
                   symbol)  # fmt: skip
    slots = max(len(a.accepted_at) for a in found.values())
    fig.update_layout(
        xaxis={"title": {"text": theme.ink("slot of the block")}, "showgrid": False,
               "range": [0.6, max(1, slots) + 0.4], "dtick": 1 if slots <= 16 else None},
        yaxis={"title": {"text": theme.ink("survival")}, "range": [-0.03, 1.04],
               "tickformat": ".0%"},
    )  # fmt: skip
    if not slots:  # without a trace there would be no panel
        fig.add_trace(go.Scatter(x=[None], y=[None], showlegend=False))
        fig.add_annotation(text=theme.ink(UNDEFINED), x=0.5, xref="x domain", y=0.5,
                           yref="y domain")  # fmt: skip
    bars = [bar_of(theme.short_token(k, _LONGEST), a, i) for i, (k, a) in enumerate(found.items())]
    length_bars(fig, bars, axis="2", room=2.0)
    theme.panel_title(fig, 2, "acceptance length")
    if timed:
        _speeds(fig, {name: rates[name] for name in found}, below / inner)
    lines = [
        f"{name}: acceptance length {bar_of(name, acceptance).words}; {_speed(rates, name)}"
        for name, acceptance in found.items()
    ]
    return View(figure=fig, text="\n".join([f"{plural(len(found), 'run')} compared", *lines]))


def _speeds(fig: go.Figure, rates: Mapping[str, float | None], up: float) -> None:
    values = [np.nan if rate is None else rate for rate in rates.values()]
    y = np.arange(len(values), dtype=np.int16)
    fig.add_trace(
        go.Bar(
            orientation="h", x=np.array(values, np.float32), y=y, xaxis="x3", yaxis="y3",
            marker={"color": [theme.rgba(look[0], 0.6) for look in LOOKS[: len(values)]],
                    "line": {"color": [look[0] for look in LOOKS[: len(values)]], "width": 1},
                    "pattern": {"shape": [look[1] for look in LOOKS[: len(values)]], "size": 6,
                                "solidity": 0.35}},
            hoverinfo="skip", showlegend=False,
        )
    )  # fmt: skip
    first = theme.short_token(next(iter(rates)), _LONGEST)
    of = f"; × {theme.plain(first)}" if len(rates) > 1 else ""
    end = max(value for value in values if value == value)
    fig.add_trace(
        go.Scatter(
            x=np.array([(0 if v != v else v) + 0.02 * end for v in values], np.float32), y=y,
            mode="text", textposition="middle right", cliponaxis=False, hoverinfo="skip",
            text=[theme.ink(_speed(rates, name)) for name in rates], showlegend=False, xaxis="x3",
            yaxis="y3",
        )
    )  # fmt: skip
    fig.update_layout(
        xaxis3={"domain": [0.58, 1], "anchor": "y3", "range": [0, end * 2.0],
                "title": {"text": theme.ink(f"tokens/s, decode steps{of}")}, "nticks": 5},
        yaxis3={"domain": [0, up], "anchor": "x3", "range": [len(values) - 0.4, -0.6],
                "showticklabels": False, "showgrid": False},
    )  # fmt: skip
    theme.panel_title(fig, 3, "speed")


def _speed(rates: Mapping[str, float | None], name: str) -> str:
    rate, first = rates[name], next(iter(rates.values()))
    if rate is None:
        return "no time known"
    words = f"{rate:,.0f} tokens/s"
    if name != next(iter(rates)):
        words += f", {rate / first:.2f} ×" if first else ", no ratio"
    return words
