"""Panels over one time axis, of the samples of a serving engine; what nobody saw is a gap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.serving.monitor.sample import Sample
from workbench.views import spec_marks, theme
from workbench.views.adaptive_figure import HEADING, figure

Runs = Sequence[Sequence[Sample]]
_TOP, _PANEL, _GAP, _FOOT = 94, 120, 42, 52  # px
_FEW = 4  # up to which every count has its tick
_MARKED = 60  # points up to which each has a mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: its value at a point (None is unknown, and a gap), and how it looks."""

    name: str
    value: Callable[[Sample], float | None]
    color: str
    dash: str = "solid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines with one unit; ``nothing`` is said where none has a value.

    ``form`` is a number's format in hovers, as d3 writes it, with its unit. ``log`` is for values
    of several orders, all above 0; ``whole`` for counts, whose axis has no halves.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    nothing: str
    form: str = ",.0f"
    tick: str = ""
    from_zero: bool = True
    log: bool = False
    whole: bool = False


def over_time(title: str, subtitle: str, runs: Runs, panels: Sequence[Panel]) -> go.Figure:
    """The panels under each other. Time is in seconds since the first of the samples began."""
    points = [point for run in runs for point in run]
    if not points:
        fig = figure(title, subtitle, height=220)
        spec_marks.nothing(fig, "there is no sample yet: a monitor needs a second")
        return fig
    inner = HEADING + len(panels) * _PANEL + (len(panels) - 1) * _GAP
    fig = figure(
        title, subtitle, height=_TOP + inner + _FOOT, legend_under_title=True,
        margin={"l": 66, "r": 16, "t": _TOP, "b": _FOOT}, legend={"traceorder": "normal"},
        showlegend=True,
    )  # fmt: skip
    times, breaks = _times(runs)
    mode = "lines+markers" if len(points) <= _MARKED else "lines"
    shown: set[str] = set()
    for n, panel in enumerate(panels):
        axis = "" if n == 0 else str(n + 1)
        drawn = False
        for line in panel.lines:
            values = np.array([_known(line.value(point)) for point in points], np.float32)
            if np.isnan(values).all():
                continue
            drawn = True
            # A lone point between two gaps has no line, so it needs a mark.
            fig.add_trace(
                go.Scatter(
                    x=np.insert(times, breaks, np.nan), y=np.insert(values, breaks, np.nan),
                    cliponaxis=False,  # a mark on the axis is whole
                    mode=mode if len(runs) * 2 < len(points) else "lines+markers",
                    name=theme.ink(line.name), legendgroup=line.name,
                    showlegend=line.name not in shown, xaxis=f"x{axis}", yaxis=f"y{axis}",
                    line={"color": line.color, "dash": line.dash, "width": 2},
                    marker={"color": line.color, "size": 5},
                    hovertemplate=f"%{{x:,.1f}} s: %{{y:{panel.form}}} {panel.unit}, "
                    f"{line.name}<extra></extra>",
                )
            )  # fmt: skip
            shown.add(line.name)
        if not drawn:
            _say(fig, axis, panel.nothing)
    fig.update_layout(_axes(panels, inner, float(times[-1])))
    for n, panel in enumerate(panels):
        known = [v for p in points for line in panel.lines if (v := line.value(p)) is not None]
        if panel.whole and max(known, default=0.0) < _FEW:
            fig.update_layout({f"yaxis{n + 1 if n else ''}": {"dtick": 1}})
    for n, panel in enumerate(panels, 1):
        theme.panel_title(fig, n, panel.title)
    return fig


def _known(value: float | None) -> float:
    return float("nan") if value is None else value


def _times(runs: Runs) -> tuple[Any, list[int]]:
    """Seconds of every point since the beginning, and where a gap stands before a point."""
    first = runs[0][0]
    begin = first.at - first.seconds
    times = [point.at - begin for run in runs for point in run]
    breaks, at = [], 0
    for run in runs[:-1]:
        at += len(run)
        breaks.append(at)
    return np.array(times, np.float32), breaks


def _say(fig: go.Figure, axis: str, words: str) -> None:
    fig.add_trace(
        go.Scatter(
            x=np.array([np.nan], np.float32), y=np.array([np.nan], np.float32), showlegend=False,
            xaxis=f"x{axis}", yaxis=f"y{axis}", hoverinfo="skip",
        )
    )  # fmt: skip
    fig.add_annotation(
        text=theme.ink(theme.plain(words), faint=True), x=0.5, y=0.5, showarrow=False,
        xref=f"x{axis} domain", yref=f"y{axis} domain",
    )  # fmt: skip


def _axes(panels: Sequence[Panel], inner: int, end: float) -> dict[str, Any]:
    axes: dict[str, Any] = {}
    last = len(panels)
    for n, panel in enumerate(panels):
        axis = "" if n == 0 else str(n + 1)
        top = 1 - (HEADING + n * (_PANEL + _GAP)) / inner
        axes[f"yaxis{axis}"] = {
            "domain": [max(0.0, top - _PANEL / inner), top], "anchor": f"x{axis}", "nticks": 4,
            "title": {"text": theme.ink(panel.unit)},
            **({"type": "log", "dtick": 1} if panel.log
               else {"rangemode": "tozero" if panel.from_zero else "normal"}),
            **({"tickformat": panel.tick} if panel.tick else {}),
        }  # fmt: skip
        axes[f"xaxis{axis}"] = {
            "anchor": f"y{axis}", "showgrid": False, "range": [0, end * 1.015 or 1],
            **({"title": {"text": theme.ink("time, s")}} if n == last - 1
               else {"matches": f"x{last}", "showticklabels": False}),
        }  # fmt: skip
    return axes
