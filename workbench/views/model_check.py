"""The step-time model against what was published and recorded: how wrong it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from workbench.model.asked import SizingError
from workbench.model.reference_figures import ANNOUNCED
from workbench.model.references import Comparison, Reference
from workbench.views import theme
from workbench.views.view import View

# Where measured figures come from; hardware and more of each stand in its hover and in the text.
_BASIS: Mapping[str, str] = {
    "recorded": "recorded: vLLM 0.33.0 and a prototype kernel on one H200, torch 2.11, CUDA 13.0",
    "published": f"published: {ANNOUNCED} for Beam",
}
_UNITS: Mapping[str, str] = {"ms": "ms", "tokens/s": "tokens/s", "ratio": "ratio of two rates"}
_SHOWN: Mapping[str, tuple[str, str]] = {  # colour, symbol
    "published": (theme.HEAT, "diamond"),
    "recorded": (theme.HEAT, "square"),
}
_MODELLED, _FLOOR = theme.NEUTRAL, "line-ns-open"
_ROW, _GAP, _TOP, _BOTTOM = 23, 72, 138, 44  # px
_LEFT, _RIGHT = 330, 150
_ENTRY = 132  # px of a name in the legend, so that two stand in a row beside the side bar
_MOST_RATIOS = 2  # beside a row
_HOVER = 78  # characters of a line of a hover


def step_comparisons(comparisons: Sequence[Comparison]) -> View:
    """One row a reference: what is modelled under each set of assumptions, and what was measured.

    ``comparisons`` are those of ``workbench.model.references.comparisons()``. Axes are logarithmic,
    so that equal distances are equal ratios. Beside each row stands how many times longer reality
    takes than the model says, in the order of the circles from left to right (the span, where
    there are more than two); for a ratio of two rates, the measured one over the modelled one.
    Hover over a circle for its assumptions, over a filled mark for what the model leaves out.

    Raises:
        SizingError: no comparison.
    """
    if not comparisons:
        raise SizingError("give one or more comparisons, those of references.comparisons()")
    panels = _panels(comparisons)
    kinds = {one.reference.kind for one in comparisons}
    heights = [_ROW * len(rows) for _, rows in panels]
    inner = sum(heights) + _GAP * (len(panels) - 1)
    fig = theme.figure(
        "The roofline against what was measured",
        "circles are modelled, one for each set of assumptions; nothing is fitted, so the ratios "
        f"are its errors · {' · '.join(text for kind, text in _BASIS.items() if kind in kinds)}",
        height=inner + _TOP + _BOTTOM,
        margin={"l": _LEFT, "r": _RIGHT, "t": _TOP, "b": _BOTTOM},
        legend={"y": 1 + 30 / inner, "traceorder": "normal", "entrywidth": _ENTRY},
    )
    shown: set[str] = set()
    top = 0
    on_the_right = len(panels)
    for panel, ((heading, rows), height) in enumerate(zip(panels, heights, strict=True), start=1):
        axis = "" if panel == 1 else str(panel)
        domain = [1 - (top + height) / inner, 1 - top / inner]
        top += height + _GAP
        for trace in _traces(rows):
            name = trace.legendgroup
            trace.update(xaxis=f"x{axis}", yaxis=f"y{axis}",
                         showlegend=name is not None and name not in shown)  # fmt: skip
            shown |= {name} if name else set()
            fig.add_trace(trace)
        fig.update_layout(
            {
                f"xaxis{axis}": {"anchor": f"y{axis}", **_across(rows)},
                f"yaxis{axis}": {
                    "anchor": f"x{axis}",
                    "domain": domain,
                    **_up(rows, [reference.name for reference, _ in rows]),
                },
                f"yaxis{on_the_right + panel}": {
                    "anchor": f"x{axis}",
                    "overlaying": f"y{axis}",
                    "side": "right",
                    **_up(rows, [_ratios(made) for _, made in rows]),
                    "ticklabelstandoff": 6,
                },
            }
        )
        # An axis that no trace lies on is not drawn.
        fig.add_trace(
            go.Scatter(x=[None], y=[None], xaxis=f"x{axis}", yaxis=f"y{on_the_right + panel}",
                       showlegend=False)
        )  # fmt: skip
        theme.panel_title(fig, panel, f"<b>{heading}</b>{_place(rows)}")
        last = rows[0][0].unit == "ratio"
        fig.add_annotation(
            text=theme.ink("÷ modelled" if last else "slower than modelled", faint=True),
            x=1, xref="paper", xanchor="left", xshift=8,
            y=1, yref=f"y{axis} domain", yanchor="bottom", yshift=8,
        )  # fmt: skip
    return View(figure=fig, text=_text(panels))


_Row = tuple[Reference, list[Comparison]]


def _panels(comparisons: Sequence[Comparison]) -> list[tuple[str, list[_Row]]]:
    """References of one kind and unit together, each with all that was modelled for it."""
    rows: dict[str, _Row] = {}
    for one in comparisons:
        rows.setdefault(one.reference.name, (one.reference, []))[1].append(one)
    keys = {(r.kind, r.unit) for r, _ in rows.values()}
    order = sorted(keys, key=lambda k: (k[0] != "published", list(_UNITS).index(k[1])))
    found = []
    for kind, unit in order:
        mine = [row for row in rows.values() if (row[0].kind, row[0].unit) == (kind, unit)]
        mine.sort(key=lambda row: not any(c.modelled for c in row[1]))
        found.append((f"{kind}, {_UNITS[unit]}", mine))
    return found


def _modelled(made: Sequence[Comparison]) -> list[Comparison]:
    return sorted((c for c in made if c.modelled is not None), key=lambda c: c.modelled or 0.0)


def _times(one: Comparison) -> float | None:
    return one.ratio if one.reference.unit == "ratio" else one.slower


def _ratios(made: Sequence[Comparison]) -> str:
    values = [value for c in _modelled(made) if (value := _times(c)) is not None]
    if len(values) > _MOST_RATIOS:  # more would not fit; each stands in the text and in its hover
        return f"× {_digits(min(values))} … {_digits(max(values))}"
    return ", ".join(f"× {_digits(value)}" for value in values) or "not modelled"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _figure(value: float, unit: str) -> str:
    if unit == "tokens/s":
        return f"{value:,.0f} tokens/s"
    if unit == "ratio":
        return f"{value:.2f}"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:,.{3 if value < 1 else 2}f} ms"


def _traces(rows: Sequence[_Row]) -> list[go.Scatter]:
    ends: dict[str, list[Any]] = {"x": [], "y": []}
    floors: dict[str, list[Any]] = {"x": [], "y": [], "hovertext": []}
    circles: dict[str, list[Any]] = {"x": [], "y": [], "hovertext": []}
    measured: dict[str, list[Any]] = {"x": [], "y": [], "hovertext": []}
    for row, (reference, made) in enumerate(rows):
        known = _modelled(made)
        places = [reference.value, *(c.modelled for c in known if c.modelled is not None)]
        ends["x"] += [min(places), max(places), None]
        ends["y"] += [row, row, None]
        for one in known:
            circles["x"].append(one.modelled)
            circles["y"].append(row)
            circles["hovertext"].append(_hover(one))
            overlapped = one.modelled_overlapped
            if overlapped is not None and _apart(overlapped, one.modelled or 0.0):
                floors["x"].append(overlapped)
                floors["y"].append(row)
                floors["hovertext"].append(
                    f"modelled, all overlapped: {_figure(overlapped, reference.unit)}"
                )
        measured["x"].append(reference.value)
        measured["y"].append(row)
        measured["hovertext"].append(_measured_hover(reference, made, bool(_place(rows))))
    kind = rows[0][0].kind
    color, symbol = _SHOWN[kind]
    traces = [
        go.Scatter(**ends, mode="lines", line={"color": theme.rgba(_MODELLED, 0.55), "width": 2},
                   hoverinfo="skip", showlegend=False),
        _markers(circles, "modelled, added up", "circle-open", _MODELLED, 9),
        _markers(floors, "modelled, overlapped", _FLOOR, _MODELLED, 9),
        _markers(measured, kind, symbol, color, 9),
    ]  # fmt: skip
    return [trace for trace in traces if len(trace.x)]


def _apart(a: float, b: float) -> bool:
    """Whether two marks can be told apart: more than 3 %."""
    return abs(a - b) > 0.03 * max(a, b)


def _markers(
    points: Mapping[str, list[Any]], name: str, symbol: str, color: str, size: int
) -> go.Scatter:
    return go.Scatter(
        **points,
        name=theme.ink(name),
        legendgroup=name,
        mode="markers",
        marker={"symbol": symbol, "size": size, "color": color, "line": {"width": 2}}
        if symbol.endswith("-open")
        else {"symbol": symbol, "size": size, "color": color},
        hoverinfo="text",
    )


def _folded(text: str) -> str:
    return "<br>".join(theme.plain(line) for line in wrap(text, _HOVER))


def _hover(one: Comparison) -> str:
    r = one.reference
    value = _figure(one.modelled or 0.0, r.unit)
    times = _times(one)
    said = "" if times is None else f", {r.kind} {_figure(r.value, r.unit)}: × {_digits(times)}"
    return f"<b>modelled {value}</b>{said}<br>{_folded(one.assumptions)}"


def _measured_hover(reference: Reference, made: Sequence[Comparison], alone: bool) -> str:
    lines = [
        f"<b>{reference.kind} {_figure(reference.value, reference.unit)}</b>",
        _folded(reference.note),
    ]
    if not alone:
        lines.insert(1, _folded(reference.where))
    if not _modelled(made):
        lines.append(_folded(made[0].assumptions))
    # Those of one reference share most of their remarks: the longest says the most.
    return "<br>".join([*lines, "", _folded(max((c.remark for c in made), key=len))])


def _across(rows: Sequence[_Row]) -> dict[str, Any]:
    """A logarithmic axis with ticks at 1, 2 and 5, and room on both sides."""
    values = [r.value for r, _ in rows]
    for _, made in rows:
        for one in made:
            values += [v for v in (one.modelled, one.modelled_overlapped) if v is not None]
    low, high = log10(min(values)), log10(max(values))
    room = max(0.04, 0.04 * (high - low))
    ticks = [
        step * 10.0**power
        for power in range(floor(low - room), floor(high + room) + 1)
        for step in ((1, 2, 5) if high - low > 0.5 else (1, 1.2, 1.5, 2, 3, 5))
    ]
    return {
        "type": "log",
        "range": [low - room, high + room],
        "tickvals": ticks,
        "ticktext": [_tick(tick) for tick in ticks],
    }


def _tick(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _up(rows: Sequence[_Row], words: Sequence[str]) -> dict[str, Any]:
    """A row for each reference, with words beside it."""
    return {
        "range": [len(rows) - 0.5, -0.5],
        "tickvals": list(range(len(rows))),
        "ticktext": [theme.ink(theme.plain(word)) for word in words],
        "showgrid": False,
    }


# -- text ---------------------------------------------------------------------------------------


def _text(panels: Sequence[tuple[str, list[_Row]]]) -> str:
    """A table, then every assumption and remark once, under the number it has in the table.

    Both are lists of clauses, of which most stand in several: each clause has its number.
    """
    assumptions: dict[str, int] = {}
    remarks: dict[str, int] = {}
    lines = []
    for heading, rows in panels:
        lines.append(
            f"{heading + ', ' + _places(rows):<56}{'modelled':>17}{'measured':>17}{'ratio':>7}"
        )
        for reference, made in rows:
            for one in made:
                notes = f"{_numbers('A', one.assumptions, assumptions)} "
                notes += _numbers("R", one.remark, remarks)
                times = _times(one)
                modelled = (
                    "not modelled" if one.modelled is None
                    else _figure(one.modelled, reference.unit)
                )  # fmt: skip
                lines.append(
                    f"  {reference.name:<54}{modelled:>17}"
                    f"{_figure(reference.value, reference.unit):>17}"
                    f"{'-' if times is None else _digits(times):>7}  {notes}"
                )
    lines.append("ratio: how many times longer reality takes; of two rates, measured / modelled")
    for letter, clauses in (("A", assumptions), ("R", remarks)):
        for clause, number in clauses.items():
            mark = f"{letter}{number} "
            lines += wrap(mark + clause, 118, subsequent_indent=" " * len(mark))
    return "\n".join(lines)


def _numbers(letter: str, text: str, known: dict[str, int]) -> str:
    """The numbers of the clauses of a text, in short; new ones are counted on."""
    found = [known.setdefault(clause, len(known) + 1) for clause in text.split("; ")]
    return letter + ",".join(map(str, found))


def _place(rows: Sequence[_Row]) -> str:
    """Where all of a panel was measured, for its heading; nothing where that differs."""
    places = {reference.where for reference, _ in rows}
    return f", {theme.plain(places.pop())}" if len(places) == 1 else ""


def _places(rows: Sequence[_Row]) -> str:
    return "; ".join(dict.fromkeys(r.where for r, _ in rows))
