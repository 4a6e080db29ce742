"""The step-time model against what was published and recorded: how wrong it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import floor, log10
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from workbench.model.asked import SizingError
from workbench.model.reference_figures import ANNOUNCED
from workbench.model.references import Comparison, Reference
from workbench.views import theme
from workbench.views.view import View

# Where measured figures come from; hardware stands with each panel, more in hovers and in the text.
_BASIS: Mapping[str, str] = {
    "recorded": "recorded: vLLM 0.33.0 and a prototype kernel on one H200, torch 2.11, CUDA 13.0, "
    "date not recorded",
    "published": f"published: {ANNOUNCED} for Beam, date not recorded",
}
_UNITS: Mapping[str, str] = {"ms": "ms", "tokens/s": "tokens/s", "ratio": "ratio of two rates"}
_MODELLED, _FLOOR = "modelled, added up", "modelled, overlapped"
_SHOWN: Mapping[str, tuple[str, str, str]] = {  # name -> colour, symbol, the same as text
    _MODELLED: (theme.NEUTRAL, "circle-open", "○"),
    _FLOOR: (theme.NEUTRAL, "line-ns-open", "|"),
    "published": (theme.HEAT, "diamond", "◆"),
    "recorded": (theme.HEAT, "square", "■"),
}
# px: a row, a line of its name and what is beside it, between panels, below the last
_ROW, _LINE, _AROUND, _GAP, _BOTTOM = 23, 13, 6, 72, 44
_TOP, _KEY = theme.HEADING + 52, 32  # px: above the panels, from there to the key
_LEFT, _RIGHT = 204, 92  # px: a page of 1000 px leaves half its width to the panels
_EDGE = theme.PAD - _LEFT - 2  # px from the panels to the titles; a note has 2 px of its own
_NAME = 33  # letters of a line of a name
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
    names = [_names(rows) for _, rows in panels]
    heights = [
        len(some) * max(_ROW, *(_LINE * (name.count("<br>") + 1) + _AROUND for name in some))
        for some in names
    ]
    inner = sum(heights) + _GAP * (len(panels) - 1)
    fig = theme.figure(
        "The roofline against what was measured",
        "circles are modelled, one for each set of assumptions; nothing is fitted, so the ratios "
        f"are its errors · {' · '.join(text for kind, text in _BASIS.items() if kind in kinds)}",
        height=inner + _TOP + _BOTTOM,
        margin={"l": _LEFT, "r": _RIGHT, "t": _TOP, "b": _BOTTOM},
        showlegend=False,
    )
    top = 0
    on_the_right = len(panels)
    for panel, ((heading, rows), height) in enumerate(zip(panels, heights, strict=True), start=1):
        axis = "" if panel == 1 else str(panel)
        domain = [1 - (top + height) / inner, 1 - top / inner]
        top += height + _GAP
        for trace in _traces(rows):
            fig.add_trace(trace.update(xaxis=f"x{axis}", yaxis=f"y{axis}"))
        fig.update_layout(
            {
                f"xaxis{axis}": {"anchor": f"y{axis}", **_across(rows)},
                f"yaxis{axis}": {
                    "anchor": f"x{axis}",
                    "domain": domain,
                    **_up(names[panel - 1]),
                },
                f"yaxis{on_the_right + panel}": {
                    "anchor": f"x{axis}",
                    "overlaying": f"y{axis}",
                    "side": "right",
                    **_up([theme.ink(_ratios(made)) for _, made in rows]),
                    "ticklabelstandoff": 6,
                },
            }
        )
        # An axis that no trace lies on is not drawn.
        fig.add_trace(
            go.Scatter(x=[None], y=[None], xaxis=f"x{axis}", yaxis=f"y{on_the_right + panel}")
        )
        last = rows[0][0].unit == "ratio"
        for text, x, anchor, shift in (
            (theme.ink(f"<b>{heading}</b>{_heading_place(rows)}"), 0, "left", _EDGE),
            (theme.ink("÷ modelled" if last else "× slower", faint=True), 1, "left", 8),
        ):
            fig.add_annotation(
                text=text, x=x, xref="paper", xanchor=anchor, xshift=shift,
                y=1, yref=f"y{axis} domain", yanchor="bottom", yshift=8,
            )  # fmt: skip
    # One line of text, for a legend takes as many rows as the panels are narrow.
    fig.add_annotation(
        text=_key({trace.name for trace in fig.data if trace.name}),
        x=0, xref="paper", xanchor="left", xshift=_EDGE,
        y=1, yref="paper", yanchor="bottom", yshift=_KEY,
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


def _key(drawn: Collection[str]) -> str:
    """What the marks are."""
    return "\u2003".join(
        f'<span style="color:{color}">{mark}</span> {theme.ink(name)}'
        for name, (color, _, mark) in _SHOWN.items()
        if name in drawn
    )


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
    line = {"color": theme.rgba(_SHOWN[_MODELLED][0], 0.55), "width": 2}
    traces = [
        go.Scatter(**ends, mode="lines", line=line, hoverinfo="skip"),
        _markers(circles, _MODELLED),
        _markers(floors, _FLOOR),
        _markers(measured, rows[0][0].kind),
    ]
    return [trace for trace in traces if len(trace.x)]


def _apart(a: float, b: float) -> bool:
    """Whether two marks can be told apart: more than 3 %."""
    return abs(a - b) > 0.03 * max(a, b)


def _markers(points: Mapping[str, list[Any]], name: str) -> go.Scatter:
    color, symbol, _ = _SHOWN[name]
    marker: dict[str, Any] = {"symbol": symbol, "size": 9, "color": color}
    if symbol.endswith("-open"):
        marker["line"] = {"width": 2}
    return go.Scatter(**points, name=name, mode="markers", marker=marker, hoverinfo="text")


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


def _up(words: Sequence[str]) -> dict[str, Any]:
    """A row for each reference, with words beside it."""
    return {
        "range": [len(words) - 0.5, -0.5],
        "tickvals": list(range(len(words))),
        "ticktext": list(words),
        "showgrid": False,
    }


def _names(rows: Sequence[_Row]) -> list[str]:
    """Names of references, in lines; with the hardware where it is not that of the heading."""
    place = _usual_place(rows)
    found = []
    for reference, _ in rows:
        lines = theme.folded(reference.name, _NAME)
        if reference.where != place:
            lines[-1] += f", {_where(reference.where)}"
            lines[-1:] = theme.folded(lines[-1], _NAME)
        found.append(theme.ink("<br>".join(map(theme.plain, lines))))
    return found


def _usual_place(rows: Sequence[_Row]) -> str:
    """Where most of a panel was measured; of equally many, the first."""
    places = [reference.where for reference, _ in rows]
    return max(dict.fromkeys(places), key=places.count)


def _where(place: str) -> str:
    return "hardware not stated" if place == "not stated" else place


def _heading_place(rows: Sequence[_Row]) -> str:
    """Hardware for the heading of a panel; rows measured elsewhere name their own."""
    others = "" if _place(rows) else " unless a row says otherwise"
    return f", {theme.plain(_where(_usual_place(rows)))}{others}"


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
