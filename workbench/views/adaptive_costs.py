"""The cost table of a machine, what passes really took, and whether the two still agree."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log2, log10
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.spec.adaptive import Ints
from workbench.spec.cost_table import CostTable
from workbench.spec.drift import FEWEST, PassDrift, drift
from workbench.spec.step import Step
from workbench.views import theme
from workbench.views.adaptive_figure import HEADING, LINE, figure
from workbench.views.numbers import plural
from workbench.views.view import View

_SINGLE, _GRID = 240, 96  # passes drawn on their own, and sizes of a curve, at most
_FAR = 256  # a curve whose largest size is so many times its smallest has a logarithmic axis
_STEEP = 16  # and where its largest time is so many times its smallest, both axes are
_PANELS = (("verify", "the target's token rows"), ("draft", "requests"))
_PANEL, _TOP, _FOOT = 208, 104, 56  # px


def cost_curves(
    table: CostTable, steps: Sequence[Step] = (), *, source: str = "measured here"
) -> View:
    """Milliseconds of a verification by token rows and of a draft by requests; the table's curves.

    With the decode ``steps`` of a run their times stand over the curves: each pass as a dot, the
    median of each size as a mark. Where the last steps' median is off by more than a quarter
    (:func:`workbench.spec.drift.drift`), title, heading and marks say so. ``source`` says where the
    steps are from; the table has a label of its own.
    """
    found = drift(table, steps)
    passes = {"verify": found.verify, "draft": found.draft}
    told = bool(len(found.verify.ms))
    title = "Costs of a step"
    if told:
        title += ": the cost table is off" if found.alarm else ": as the cost table says"
        if not found.alarm and found.verify.judged < FEWEST:
            title = "Costs of a step: few of them yet"
    sentence = found.sentence.replace(" ×", "\u00a0×").replace(" %", "\u00a0%")
    remark = f" · steps {source} · {sentence}" if told else " · no step measured beside it"
    room = HEADING + LINE * told
    up = {"domain": [0, _PANEL / (_PANEL + room)]}
    fig = figure(
        title, f"table {table.label or 'without a label'}{remark}",
        height=_TOP + room + _PANEL + _FOOT, legend_under_title=True,
        margin={"l": 62, "r": 16, "t": _TOP, "b": _FOOT},
        legend={"traceorder": "normal"}, xaxis={"domain": [0, 0.52]}, yaxis=up,
        xaxis2={"domain": [0.65, 1], "anchor": "y2"}, yaxis2={"anchor": "x2", **up},
    )  # fmt: skip
    if found.alarm:
        words = f"<b>{theme.plain(title)}</b>"
        fig.update_layout(title_text=f'<span style="color:{theme.FULL}">{words}</span>')
    for panel, (kind, unit) in enumerate(_PANELS, 1):
        one = passes[kind]
        curve = table.verify if kind == "verify" else table.draft
        _panel(fig, panel, one, curve, table)
        axis = "" if panel == 1 else "2"
        fig.update_layout({f"xaxis{axis}": {"title": {"text": theme.ink(unit)}},
                           f"yaxis{axis}": {"title": {"text": theme.ink("ms")}}})  # fmt: skip
        heading = "verification" if kind == "verify" else "draft"
        if one.ratio is not None:
            ratio = f"{one.ratio:.2f}" if isfinite(one.ratio) else "∞"
            # In two lines: the panels stand beside each other on a narrow page too.
            heading += f"{', drifted' if one.drifted else ''}<br>{ratio} × the table"
        theme.panel_title(fig, panel, heading)
        fig.layout.annotations[-1].align = "left"
        if one.drifted:
            text = f'<span style="color:{theme.FULL}"><b>{heading}</b></span>'
            fig.layout.annotations[-1].text = text
    return View(figure=fig, text=_text(table, passes, found.sentence if told else ""))


def _panel(
    fig: go.Figure, panel: int, one: PassDrift, curve: tuple[tuple[int, float], ...],
    table: CostTable,
) -> None:  # fmt: skip
    axes = {"xaxis": "x" if panel == 1 else "x2", "yaxis": "y" if panel == 1 else "y2"}
    of = table.verify_ms if one.kind == "verify" else table.draft_ms
    color = theme.SLIDING if one.kind == "verify" else theme.DRAFTER
    sizes = [size for size, _ in curve]
    end = max([sizes[-1], *one.sizes.tolist()])
    grid = _grid(sizes, table.captured, end)
    line = {"color": color, "width": 2, "dash": "solid" if panel == 1 else "dash"}
    fig.add_trace(
        go.Scatter(
            x=grid.astype(np.int32), y=of(grid).astype(np.float32), mode="lines", line=line,
            name=theme.ink("table, verification" if panel == 1 else "table, draft"),
            legendrank=panel,
            hovertemplate="table at %{x:,}: %{y:.2f} ms<extra></extra>", **axes,
        )
    )  # fmt: skip
    fig.add_trace(
        go.Scatter(
            x=np.array(sizes, np.int32), y=np.array([ms for _, ms in curve], np.float32),
            mode="markers", marker={"color": color, "size": 6, "symbol": "line-ns-open",
                                    "line": {"width": 2}},
            hovertemplate="timed for the table at %{x:,}: %{y:.2f} ms<extra></extra>",
            showlegend=False, **axes,
        )
    )  # fmt: skip
    tops = [float(of(np.array([end])).max())]
    if len(one.ms):
        tops += _measured(fig, one, axes, legend=panel == 1)
    axis: dict[str, Any] = {"rangemode": "tozero", "showgrid": False}
    low = min([sizes[0], *one.sizes.tolist()])
    if end >= _FAR * low:
        ticks = [2**n for n in range(int(log2(max(1, low))), int(log2(end)) + 1)]
        ticks = ticks[:: -(-len(ticks) // 8)]
        axis = {"type": "log", "showgrid": False, "tickvals": ticks,
                "ticktext": [f"{n:,}" for n in ticks]}  # fmt: skip
    which, top = "" if panel == 1 else "2", 1.12 * max(tops)
    up: dict[str, Any] = {"range": [0, top]}
    low_ms = float(of(np.array([1])).min())
    if "type" in axis and low_ms > 0 and top > _STEEP * low_ms:
        marks = [m * 10**e for e in range(-3, 6) for m in (1, 2, 5)]
        marks = [m for m in marks if low_ms / 1.5 <= m <= top]
        up = {"type": "log", "range": [log10(low_ms / 1.5), log10(1.2 * top)], "tickvals": marks,
              "ticktext": [f"{m:g}" for m in marks]}  # fmt: skip
    fig.update_layout({f"xaxis{which}": axis, f"yaxis{which}": up})


def _measured(fig: go.Figure, one: PassDrift, axes: dict[str, str], *, legend: bool) -> list[float]:
    """Passes and the medians by size; the largest medians."""
    every = -(-len(one.ms) // _SINGLE)
    color = theme.FULL if one.drifted else theme.SPARSE
    fig.add_trace(
        go.Scatter(
            x=one.sizes[::every].astype(np.int32), y=one.ms[::every].astype(np.float32),
            mode="markers", name=theme.ink("a pass"), showlegend=legend, legendgroup="pass",
            legendrank=3,
            marker={"color": theme.rgba(theme.NEUTRAL, 0.45), "size": 5},
            hovertemplate="a pass of %{x:,}: %{y:.2f} ms<extra></extra>", **axes,
        )
    )  # fmt: skip
    by = one.by_size()
    fig.add_trace(
        go.Scatter(
            x=np.array([size for size, _, _ in by], np.int32),
            y=np.array([ms for _, ms, _ in by], np.float32), mode="markers",
            name=theme.ink("median of a size" + (", drifted" if one.drifted else "")),
            showlegend=legend, legendgroup="median", legendrank=4,
            marker={"color": color, "size": 8, "symbol": "x" if one.drifted else "circle-open",
                    "line": {"width": 2, "color": color}},
            customdata=np.array([count for *_, count in by], np.int32),
            hovertemplate="median of %{customdata:,} at %{x:,}: %{y:.2f} ms<extra></extra>",
            **axes,
        )
    )  # fmt: skip
    sure = [ms for _, ms, count in by if count >= 3 or len(by) < 3]
    # One slow pass alone does not set the axis.
    return [ms for _, ms, _ in by if not sure or ms <= 2 * max(sure)]


def _grid(sizes: Sequence[int], captured: int, end: int) -> Ints:
    """Sizes at which a curve is drawn: both ends of every step and of every straight line."""
    ends = {1, end, captured, captured + 1}
    for size in sizes:
        ends |= {size, size + 1}
    # Straight lines are bent on a logarithmic axis.
    ends |= {round(n) for n in np.geomspace(max(1, captured + 1), max(end, captured + 2), _GRID)}
    return np.array(sorted(n for n in ends if 1 <= n <= end), np.int64)


def _text(table: CostTable, passes: dict[str, PassDrift], sentence: str) -> str:
    said = [f"cost table: {table.label or 'without a label'}"]
    for kind, unit in (("verify", "row"), ("draft", "request")):
        curve: Any = table.verify if kind == "verify" else table.draft
        some = curve if len(curve) <= 8 else [*curve[:: -(-len(curve) // 7)], curve[-1]]
        each = ", ".join(f"{plural(n, unit)} {ms:.2f}" for n, ms in dict.fromkeys(some))
        one = passes[kind]
        said.append(f"{kind}, ms: {each}")
        if one.ratio is not None:
            said.append(f"  measured: {len(one.ms):,} passes, "
                        f"the last {one.judged} at {one.ratio:.2f} × the table")  # fmt: skip
    return "\n".join([*said, sentence] if sentence else said)
