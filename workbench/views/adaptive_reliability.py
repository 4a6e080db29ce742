"""Do the confidences mean what they say? What was predicted against what the target accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

import numpy as np
import plotly.graph_objects as go

from workbench.errors import DraftError
from workbench.spec.calibration import BINS, Kind, Of, Reliability, evidence, reliability
from workbench.spec.rates import Rate
from workbench.spec.step import Step
from workbench.views import spec_marks, theme
from workbench.views.adaptive_figure import HEADING, LINE, figure
from workbench.views.numbers import plural
from workbench.views.view import View

NOTHING = "no draft was verified yet: there is nothing to compare the confidences with"
START, CALIBRATED = theme.HEAT, theme.SLIDING
_EMPTY = 300  # px
_KINDS: dict[Kind, tuple[str, str]] = {
    "conditional": ("a draft, if all before it are accepted", "confidence"),
    "survival": ("a draft and all before it: the product", "survival"),
}
_HEAD = 23  # letters of a heading's line: two panels stand beside each other on a narrow page
_PANEL, _TOP, _FOOT = 264, 100, 56  # px


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Predictions of some steps; ``short`` is its name beside a number."""

    name: str
    short: str
    of: Of
    steps: Sequence[Step]
    color: str
    dash: str
    symbol: str
    faint: bool = False


def reliability_diagram(
    steps: Sequence[Step], *, after: int | None = None, source: str = "measured here"
) -> View:
    """Predicted probabilities of acceptance against the share that came true, in bins.

    On the diagonal a confidence means what it says; below it it promises too much. To the left the
    conditional confidences, by which the estimator learns, to the right their running product, the
    survival by which drafts are admitted. Bins are 15 of equal mass; bars are 95 %, Wilson.
    Calibrated are the estimator's confidences, where a policy decided; the drafter's own word is
    beside them, faint.

    Args:
        after: decode steps of the uncalibrated start, drawn apart from the later ones.

    Raises:
        DraftError: ``after`` is no number of steps from 1 on.
    """
    if after is not None and (isinstance(after, bool) or after < 1):
        raise DraftError(f"the start to be drawn apart is 1 step or more, not {after!r:.40}")
    decoded = [step for step in steps if step.phase == "decode"]
    lines = _lines(decoded, after)
    found = {kind: {line.name: _measure(line, kind) for line in lines} for kind in _KINDS}
    known = [line for line in lines if any(of[line.name].count for of in found.values())]
    subtitle = (
        f"{source} · {BINS} bins of as many drafts each, bars: 95\u00a0%, Wilson · ECE: how far "
        "they are off the diagonal, on average"
    )
    if not any(line.of == "expected" for line in known) and known:
        subtitle += " · no policy decided here: the drafter's own confidences alone"
    if after is not None and len(decoded) <= after:
        subtitle += f" · the run has {plural(len(decoded), 'decode step')}, none of them later"
    heads = [_heading(kind, found[kind], known) for kind in _KINDS]
    room = HEADING + LINE * (max(map(len, heads)) - 1)
    up = {"domain": [0, _PANEL / (_PANEL + room)]}
    fig = figure(
        _title(found, known), subtitle, height=_TOP + room + _PANEL + _FOOT,
        legend_under_title=True, margin={"l": 62, "r": 16, "t": _TOP, "b": _FOOT},
        legend={"traceorder": "normal"}, xaxis={"domain": [0, 0.44]}, yaxis=up,
        xaxis2={"domain": [0.56, 1], "anchor": "y2"}, yaxis2={"anchor": "x2", **up},
    )  # fmt: skip
    if not known:
        spec_marks.nothing(fig, NOTHING)
        fig.update_layout(height=_EMPTY, xaxis={"domain": [0, 1]}, xaxis2={"visible": False},
                          yaxis2={"visible": False})  # fmt: skip
        return View(figure=fig, text=NOTHING)
    for panel, (kind, (_, word)) in enumerate(_KINDS.items(), 1):
        axis = "" if panel == 1 else "2"
        _diagonal(fig, axis, legend=panel == 1)
        for line in known:
            _draw(fig, line, found[kind][line.name], axis, legend=panel == 1)
        theme.panel_title(fig, panel, "<br>".join(heads[panel - 1]))
        fig.layout.annotations[-1].align = "left"
        share = {"range": [-0.03, 1.03], "tickformat": ".0%", "tickvals": [0, 0.25, 0.5, 0.75, 1]}
        across = {**share, "tickvals": [0, 0.5, 1]}  # more would touch on a narrow page
        fig.update_layout({
            f"xaxis{axis}": {**across, "title": {"text": theme.ink(f"predicted {word}")}},
            f"yaxis{axis}": {**share, "title": {
                "text": theme.ink("share accepted") if panel == 1 else None}},
        })  # fmt: skip
    return View(figure=fig, text=_text(found, known, subtitle))


def _lines(steps: Sequence[Step], after: int | None) -> list[_Line]:
    own = _Line(name="the drafter's own word", short="drafter", of="confidences", steps=steps,
                color=theme.DRAFTER, dash="dot", symbol="square-open", faint=True)  # fmt: skip
    if after is None:
        return [_Line(name="calibrated", short="calibrated", of="expected", steps=steps,
                      color=CALIBRATED, dash="solid", symbol="circle"), own]  # fmt: skip
    return [
        _Line(name=f"first {plural(after, 'step')}", short="first", of="expected",
              steps=steps[:after], color=START, dash="dash", symbol="diamond"),
        _Line(name="later steps", short="later", of="expected", steps=steps[after:],
              color=CALIBRATED, dash="solid", symbol="circle"),
        own,
    ]  # fmt: skip


def _measure(line: _Line, kind: Kind) -> Reliability:
    return reliability(*evidence(line.steps, line.of, kind))


def _diagonal(fig: go.Figure, axis: str, *, legend: bool) -> None:
    fig.add_trace(
        go.Scatter(
            x=[0, 1], y=[0, 1], mode="lines", name=theme.ink("as predicted"), hoverinfo="skip",
            line={"color": theme.NEUTRAL, "dash": "dot", "width": 1}, showlegend=legend,
            xaxis=f"x{axis}", yaxis=f"y{axis}",
        )
    )  # fmt: skip


def _draw(fig: go.Figure, line: _Line, found: Reliability, axis: str, *, legend: bool) -> None:
    bins = found.bins
    rates = [Rate(round(b.observed * b.count), b.count) for b in bins]
    # A band is known of every bin: none is empty.
    up = [(rate.high or 0.0) - b.observed for rate, b in zip(rates, bins, strict=True)]
    down = [b.observed - (rate.low or 0.0) for rate, b in zip(rates, bins, strict=True)]
    bars = {
        "error_y": {
            "type": "data", "symmetric": False, "thickness": 1, "width": 0,
            "color": theme.rgba(line.color, 0.55),
            "array": np.array(up, np.float32), "arrayminus": np.array(down, np.float32),
        }
    }  # fmt: skip
    fig.add_trace(
        go.Scatter(
            x=np.array([b.predicted for b in bins], np.float32),
            y=np.array([b.observed for b in bins], np.float32),
            mode="lines+markers", name=theme.ink(line.name), legendgroup=line.name,
            showlegend=legend, opacity=0.85 if line.faint else 1,
            line={"color": line.color, "dash": line.dash, "width": 1.5 if line.faint else 2},
            marker={"symbol": line.symbol, "size": 6 if line.faint else 8, "color": line.color},
            customdata=np.array([[b.low, b.high, b.count] for b in bins], np.float32),
            hovertemplate=f"{line.name}: %{{x:.1%}} predicted, %{{y:.1%}} accepted<br>"
            "%{customdata[2]:,} drafts with %{customdata[0]:.1%} to %{customdata[1]:.1%}"
            "<extra></extra>",
            xaxis=f"x{axis}", yaxis=f"y{axis}", **({} if line.faint else bars),
        )
    )  # fmt: skip


def _error(found: Reliability) -> str:
    return "undefined" if found.error is None else f"{found.error:.3f}"


def _heading(kind: Kind, found: dict[str, Reliability], known: Sequence[_Line]) -> list[str]:
    errors = [f"{line.short} {_error(found[line.name])}" for line in known]
    return [*wrap(_KINDS[kind][0], _HEAD), *theme.folded("ECE: " + ", ".join(errors), _HEAD)]


def _title(found: dict[Kind, dict[str, Reliability]], known: Sequence[_Line]) -> str:
    """How far predicted survival is off on average, of the calibrated confidences if there are."""
    usual = "Reliability of the confidences"
    of = [line for line in known if found["survival"][line.name].error is not None]
    first = next((line for line in reversed(of) if line.of == "expected"), None)
    if first is None:
        return usual
    error = found["survival"][first.name].error or 0.0
    when = {"calibrated": "on average", "later": "in later steps"}.get(first.short)
    return f"Survival off by {100 * error:.1f} points {when or f'in the {first.name}'}"


def _text(
    found: dict[Kind, dict[str, Reliability]], known: Sequence[_Line], subtitle: str
) -> str:  # fmt: skip
    said = [f"reliability of confidences; {_spaced(subtitle)}"]
    for kind, (heading, _) in _KINDS.items():
        said.append(f"{kind}: {heading}")
        for line in known:
            one = found[kind][line.name]
            n = plural(one.count, "prediction")
            said.append(f"  {line.name}: expected calibration error {_error(one)} (n = {n})")
    return "\n".join(said)


def _spaced(subtitle: str) -> str:
    return subtitle.replace(" · ", "; ").replace("\u00a0", " ")
