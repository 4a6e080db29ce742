"""What adaptive verification changes, from one sequence to many: modelled, measured, published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2, log10
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import DraftError
from workbench.spec.measured_adaptive import MeasuredAdaptive
from workbench.spec.published import Published
from workbench.spec.sweep import Figure, SweepRow
from workbench.views import spec_marks, theme
from workbench.views.adaptive_figure import HEADING, figure
from workbench.views.adaptive_policies import look, percent
from workbench.views.view import View

NOTHING = "the sweep has no concurrency yet"
_PANELS: tuple[tuple[Figure, str], ...] = (
    ("tokens_per_second", "tokens/s: more is better"),
    ("tpot_p99_ms", "p99 of the time per output token: less is better"),
)
_ORDER = ("none", "oracle", "adaptive")  # drawn in this order, the last one on top
_RANKS = {"adaptive": 1, "oracle": 2, "none": 3}  # in the legend
_FOCUS = ("adaptive", "oracle")  # the axes are made for these
_TOP, _LEGEND, _PANEL, _GAP, _FOOT = 112, 19, 210, 48, 56  # px
_EMPTY = 240  # px
_SYMBOLS = ("diamond", "square", "triangle-down", "cross", "star-diamond", "hourglass")
_APART, _WIDEST = 0.12, 0.6  # doublings: between marks at one concurrency, and of all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    concurrency: int
    ratio: float
    low: float | None
    high: float | None
    p99: float | None
    label: str


def concurrency_sweep(
    rows: Sequence[SweepRow],
    *,
    measured: MeasuredAdaptive | Sequence[Any] | None = None,
    published: Published | None = None,
    source: str | None = None,
) -> View:
    """Change of tokens/s and of p99 TPOT against fixed verification, over the concurrency.

    Args:
        rows: of :func:`workbench.spec.sweep.sweep`: lines for plain decoding, adaptive verification
            and the oracle. The axes are made for the last two; where plain decoding lies beyond
            them, it is said in words.
        measured: runs of adaptive against fixed verification, objects or dictionaries with
            ``concurrency`` and ``ratio`` of tokens/s, and where they are known ``low`` and ``high``
            of its 95 % interval, ``p99_ratio`` and a ``label``; or a file of them
            (:func:`workbench.spec.measured_adaptive.measured_adaptive`), which says where as well.
        published: the engine's figures (:func:`workbench.spec.published.published`).
        source: of the lines, in the place of what the rows say.

    Raises:
        DraftError: a measured point lacks its concurrency or ratio.
    """
    where, runs = "measured", measured
    if isinstance(runs, MeasuredAdaptive):
        where, runs = runs.how, runs.runs
    points = [_point(one) for one in runs or ()]
    at = sorted(rows, key=lambda row: row.concurrency)
    labels = "; ".join(dict.fromkeys(row.label for row in at))
    made = [source or f"lines modelled; {labels}"] if at else []
    made += [f"marks: {_labels(points)}, {where}"] if points else []
    made += ["star: published, another machine, model and drafter"] if published else []
    inner = HEADING + 2 * _PANEL + _GAP
    up = _PANEL / inner
    entries = 3 * bool(at) + len({point.label for point in points}) + bool(published)
    top = _TOP + _LEGEND * max(0, -(-entries // 2) - 2)  # two beside each other on a narrow page
    fig = figure(
        _title(at), " · ".join([_against(at), *made]), height=top + inner + _FOOT,
        legend_under_title=True, margin={"l": 70, "r": 38, "t": top, "b": _FOOT},
        legend={"traceorder": "normal"},
        xaxis={"anchor": "y", "matches": "x2", "showticklabels": False},
        yaxis={"domain": [up + _GAP / inner, 2 * up + _GAP / inner], "anchor": "x"},
        xaxis2={"anchor": "y2"}, yaxis2={"domain": [0, up], "anchor": "x2"},
    )  # fmt: skip
    if not at and not points:
        spec_marks.nothing(fig, NOTHING)
        fig.update_layout(height=_EMPTY, xaxis2={"visible": False}, yaxis2={"visible": False})
        return View(figure=fig, text=NOTHING)
    every = [row.concurrency for row in at] + [point.concurrency for point in points]
    every += [published.concurrency] if published else []
    for panel, (kind, heading) in enumerate(_PANELS, 1):
        _panel(fig, panel, kind, at, points, published)
        theme.panel_title(fig, panel, heading)
    doublings = [2**n for n in range(int(log2(min(every))), int(np.ceil(log2(max(every)))) + 1)]
    ends = [log2(min(every)) - 0.45, log2(max(every)) + 1 + _spread(points)]
    fig.update_layout({
        f"xaxis{axis}": {"type": "log", "range": [end * np.log10(2) for end in ends],
                         "tickvals": doublings, "ticktext": [f"{n:,}" for n in doublings]}
        for axis in ("", "2")
    })  # fmt: skip
    fig.update_layout(xaxis2={"title": {"text": theme.ink("sequences decoded together")}})
    return View(figure=fig, text=_text(at, points, published, made))


def _panel(
    fig: go.Figure, panel: int, kind: Figure, rows: Sequence[SweepRow],
    points: Sequence[_Measured], published: Published | None,
) -> None:  # fmt: skip
    axis = "" if panel == 1 else "2"
    axes = {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
    drawn: list[float] = [0.0]
    busy = {point.concurrency for point in points}  # numbers there would cover what was measured
    plain: list[tuple[int, float]] = []
    for name in _ORDER:
        line = [(row.concurrency, row.change(name, kind)) for row in rows]
        known = [(c, 100 * change) for c, change in line if change is not None]
        if not known:
            continue
        if name in _FOCUS:
            drawn += [value for _, value in known]
        else:
            plain = known
        color, _, dash, symbol = look(name)
        fig.add_trace(
            go.Scatter(
                x=np.array([c for c, _ in known], np.int32),
                y=np.array([value for _, value in known], np.float32),
                mode="lines+markers",
                name=theme.ink("plain decoding" if name == "none" else f"{name}, modelled"),
                legendgroup=name, showlegend=panel == 1, legendrank=_RANKS[name],
                line={"color": color, "dash": dash, "width": 2.5 if name == "adaptive" else 2},
                marker={"symbol": symbol, "size": 8, "color": color},
                hovertemplate=f"{name}, %{{x}} together: %{{y:+.1f}} %<extra></extra>", **axes,
            )
        )  # fmt: skip
        if name == "adaptive":
            _numbers(fig, axis, [one for one in known if one[0] not in busy], known)
    drawn += _marks(fig, panel, points, axes)
    if published is not None:
        change = 100 * (
            published.tokens_per_second_change if panel == 1 else published.tpot_p99_change
        )
        drawn.append(change)
        fig.add_trace(
            go.Scatter(
                x=[published.concurrency], y=[change], mode="markers",
                name=theme.ink("published"), showlegend=panel == 1, legendrank=9,
                marker={"symbol": "star", "size": 13, "color": theme.FULL},
                hovertemplate="published for the engine, %{x} together: %{y:+.1f} %"
                "<extra></extra>", **axes,
            )
        )  # fmt: skip
        fig.add_annotation(
            text=theme.ink(_number(change)), y=change, xref=f"x{axis}",
            x=log10(published.concurrency) + log10(2) * _spread(points),
            yref=f"y{axis}", xanchor="left", align="left", xshift=12,
        )  # fmt: skip
    low, high = min(drawn), max(drawn)
    pad = 0.16 * max(high - low, 2.0)
    low, high = low - pad, high + pad
    beyond = [(c, value) for c, value in plain if not low <= value <= high]
    if beyond:  # room for the words
        farthest = max((value for _, value in beyond), key=abs)
        low, high = (low - pad, high) if farthest < 0 else (low, high + pad)
        _out(fig, axis, farthest)
    fig.add_shape(type="line", x0=0, x1=1, y0=0, y1=0, xref=f"x{axis} domain", yref=f"y{axis}",
                  line={"color": theme.NEUTRAL, "width": 1.5}, layer="below")  # fmt: skip
    fig.update_layout({f"yaxis{axis}": {
        "range": [low, high], "ticksuffix": " %", "nticks": 8,
        "title": {"text": theme.ink("against fixed")}, "tickformat": "+.0f"}})  # fmt: skip


def _numbers(
    fig: go.Figure, axis: str, some: Sequence[tuple[int, float]],
    line: Sequence[tuple[int, float]],
) -> None:  # fmt: skip
    """The first, the last, the least and the most of a line, clear of it."""
    values = [value for _, value in line]
    told = {line[0], line[-1], *(one for one in line if one[1] in (min(values), max(values)))}
    for place, one in enumerate(line):
        if one not in told or one not in some:
            continue
        beside = [value for _, value in line[max(0, place - 1) : place + 2]]
        fig.add_annotation(
            text=theme.ink(_number(one[1])), x=log10(one[0]), y=one[1], xref=f"x{axis}",
            yref=f"y{axis}", yshift=16 if one[1] == max(beside) else -16,
        )  # fmt: skip


def _out(fig: go.Figure, axis: str, value: float) -> None:
    """How far plain decoding goes, which the axis leaves out. More words would cover its line."""
    words = f"plain: {_number(value)}"
    under = value < 0
    fig.add_annotation(
        text=theme.ink(f"{words} {'↓' if under else '↑'}", faint=True), x=0.98,
        xanchor="right",
        xref=f"x{axis} domain", y=0 if under else 1, yref=f"y{axis} domain",
        yanchor="bottom" if under else "top",
    )  # fmt: skip


def _spread(points: Sequence[_Measured]) -> float:
    """How far to the right of their concurrency measured marks reach, in doublings."""
    return min(_WIDEST, _APART * len({point.label for point in points}))


def _marks(
    fig: go.Figure, panel: int, points: Sequence[_Measured], axes: Mapping[str, str]
) -> list[float]:
    """Measured points, side by side where there are several; the ends of their intervals."""
    labels = list(dict.fromkeys(point.label for point in points))
    ends: list[float] = []
    for place, label in enumerate(labels):
        some = [p for p in points if p.label == label and (panel == 1 or p.p99 is not None)]
        if not some:
            continue
        ratios = [p.ratio if panel == 1 else p.p99 or 0.0 for p in some]
        values = np.array([100 * (ratio - 1) for ratio in ratios])
        low = high = values
        bars: dict[str, Any] = {}
        if panel == 1:
            low = np.array([100 * ((p.ratio if p.low is None else p.low) - 1) for p in some])
            high = np.array([100 * ((p.ratio if p.high is None else p.high) - 1) for p in some])
            bars = {"error_y": {"type": "data", "symmetric": False, "thickness": 1.5, "width": 4,
                                "color": theme.DENSE,
                                "array": (high - values).astype(np.float32),
                                "arrayminus": (values - low).astype(np.float32)}}  # fmt: skip
        ends += [*low.tolist(), *high.tolist()]
        apart = 2 ** (_spread(points) / len(labels) * (place + 1))
        name = "measured" + (f": {label}" if label else "")
        fig.add_trace(
            go.Scatter(
                x=np.array([p.concurrency * apart for p in some], np.float32),
                y=values.astype(np.float32), mode="markers", name=theme.ink(theme.plain(name)),
                legendgroup=f"measured {place}", showlegend=panel == 1, legendrank=5,
                marker={"symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 9,
                        "color": theme.DENSE},
                hovertext=[f"{theme.plain(name)}, {p.concurrency} together: {_number(v)}"
                           + (_interval(p) if panel == 1 else "")
                           for p, v in zip(some, values.tolist(), strict=True)],
                hoverinfo="text", **bars, **axes,
            )
        )  # fmt: skip
    return ends


def _point(one: Any) -> _Measured:
    get = one.get if isinstance(one, Mapping) else lambda name: getattr(one, name, None)
    concurrency, ratio = _real(get("concurrency")), _real(get("ratio"))
    if concurrency is None or ratio is None or concurrency < 1:
        raise DraftError("a measured point of a sweep has a concurrency and a ratio, both numbers")
    return _Measured(
        concurrency=int(concurrency),
        ratio=ratio,
        low=_real(get("low")),
        high=_real(get("high")),
        p99=_real(get("p99_ratio")),
        label=str(get("label") or ""),
    )


def _real(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return float(value) if np.isfinite(value) else None


def _labels(points: Sequence[_Measured]) -> str:
    known = any(p.low is not None and p.high is not None for p in points)
    return "adaptive" + (", bars: 95\u00a0% intervals" if known else "")


def _number(value: float) -> str:
    return percent(value / 100)


def _interval(point: _Measured) -> str:
    if point.low is None or point.high is None:
        return ""
    return f" ({percent(point.low - 1)} to {percent(point.high - 1)}, 95 %)"


def _title(rows: Sequence[SweepRow]) -> str:
    known = [(row.concurrency, row.change("adaptive")) for row in rows]
    changes = [(c, change) for c, change in known if change is not None]
    title = "Adaptive verification, by concurrency"
    if not changes:
        return title
    (_, least), (_, most) = (pick(changes, key=lambda one: one[1]) for pick in (min, max))
    if len(changes) == 1:
        return f"Adaptive, modelled: {percent(least)} tokens/s"
    return f"Adaptive, modelled: {percent(least)} to {percent(most)} tokens/s"


def _against(rows: Sequence[SweepRow]) -> str:
    """Whose change the title tells."""
    return f"{'modelled lines' if rows else 'adaptive'} against fixed verification"


def _text(
    rows: Sequence[SweepRow], points: Sequence[_Measured], published: Published | None,
    made: Sequence[str],
) -> str:  # fmt: skip
    said = [f"{_title(rows)}, {_against(rows)}", *made]
    if rows:
        heads = [f"{name:>9}" for name in ("none", "adaptive", "oracle")]
        said.append(f"{'together':>8}  tokens/s:{''.join(heads)}   p99 TPOT:{''.join(heads)}")
        for row in rows:
            parts = [
                "".join(f"{percent(row.change(name, kind)):>9}"
                        for name in ("none", "adaptive", "oracle"))
                for kind, _ in _PANELS
            ]  # fmt: skip
            said.append(f"{row.concurrency:>8}  {'':9}{parts[0]}   {'':9}{parts[1]}")
    for point in points:
        p99 = "" if point.p99 is None else f", p99 TPOT {percent(point.p99 - 1)}"
        label = f" ({point.label})" if point.label else ""
        said.append(
            f"measured at {point.concurrency}{label}: tokens/s {percent(point.ratio - 1)}"
            f"{_interval(point)}{p99}"
        )
    if published is not None:
        said.append(
            f"published at {published.concurrency}: tokens/s "
            f"{percent(published.tokens_per_second_change)}, p99 TPOT "
            f"{percent(published.tpot_p99_change)}"
        )
    return "\n".join(said)
