"""Rows of a rank's step as a figure: headings, names with their sources, bars, columns of numbers.

The vertical axis counts px, so that rows may have two or three lines and bars keep their width; the
numbers stand in columns at the right, clear of the bars on a narrow page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.views import theme
from workbench.views.rank_rows import LOOKS, Row

LEFT, RIGHT, _LETTER = 216, 8, 6.7  # px beside the panel, and of a letter in its columns
_NUMBER = 5  # letters of a number
_BAR, _LINE, _AROUND, _HEADING, _BOTTOM = 16, 13, 5, 28, 50
_NAME, _SOURCE = 36, 42  # letters of a line of a name, and of its source
_HOVER = 64  # letters of a line of a hover
_FINE = 10  # px of the source's letters
_MOST_WHY = 4  # lines of the reason why there is no time; the text form has it whole
_SHARED: dict[str, Any] = {
    "orientation": "h",
    "marker": {"line": {"width": 1}, "pattern": {"size": 6, "solidity": 0.35}},
}
_WORDS = ("hovertemplate", "meta")  # the same for most bars


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows and headings lie, in px from the panel's top; ``ends`` by look."""

    rows: list[float]
    headings: list[tuple[float, str]]
    ends: dict[str, tuple[float, float]]
    names: list[str]
    height: float


def places(rows: Sequence[Row], head: float) -> Places:
    """Lay out the rows below ``head`` px, a heading before each run of one look."""
    at, middles, titles, ends, names = head, [], [], {}, []
    for look, run in groupby(rows, key=lambda row: row.look):
        start = at
        if LOOKS[look][0]:
            titles.append((at + _HEADING * 0.6, LOOKS[look][0]))
            at += _HEADING
        for row in run:
            lines = wrap(row.name, _NAME) or [""]
            fine = wrap(row.why, _SOURCE, max_lines=_MOST_WHY, placeholder=" …")
            fine = fine or wrap(row.source, _SOURCE, break_on_hyphens=False)
            names.append(
                "<br>".join([_name(line) for line in lines] + [theme.plain(line) for line in fine])
            )
            tall = _LINE * (len(lines) + len(fine)) + _AROUND
            middles.append(at + tall / 2)
            at += tall
        ends[look] = (start, at)
    return Places(middles, titles, ends, names, at + 4)


def _name(line: str) -> str:
    """A line of a name: larger and darker than its source, which has the axis' own letters."""
    return theme.ink(theme.plain(line)).replace('style="', f'style="font-size:{theme.SMALL}px;', 1)


def draw(
    fig: go.Figure,
    rows: Sequence[Row],
    where: Places,
    columns: Sequence[tuple[str, Sequence[str]]],
    *,
    head: float,
    span: tuple[float, float],
    values: Sequence[float | None],
    title: str,
) -> None:
    """Bars of ``values`` (one a row, None without a bar), names, headings and number columns.

    What all bars share is said once, in the template: a saved notebook keeps every letter.
    """
    drawn = [i for i, value in enumerate(values) if value is not None]
    usual = _hovers(rows, drawn[:1], title)
    template = go.layout.Template(theme.TEMPLATE)
    template.data.bar = [go.Bar(_SHARED | {k: v for k, v in usual.items() if k in _WORDS})]
    template.layout.annotationdefaults.update(
        x=0, xref="paper", xanchor="left", xshift=theme.PAD - LEFT - 2
    )
    fig.update_layout(template=template)
    for look in LOOKS:
        mine = [i for i in drawn if rows[i].look == look]
        if mine:
            hovers = _hovers(rows, mine, title)
            own = {k: v for k, v in hovers.items() if k not in _WORDS or v != usual.get(k)}
            fig.add_trace(
                go.Bar(
                    x=np.array([values[i] for i in mine], np.float32),
                    y=np.array([where.rows[i] for i in mine], np.float32),
                    width=_BAR,
                    name=LOOKS[look][0] or theme.plain(rows[mine[0]].name),
                    marker=marker(look),
                    **own,
                )
            )
    for y, text in where.headings:
        fig.add_annotation(text=theme.ink(f"<b>{theme.plain(text)}</b>"), y=y)
    fig.add_trace(_numbers(columns, [head - 12, *where.rows], span[1]))
    fig.update_layout(
        xaxis={"title": {"text": theme.ink(title)}, "range": list(span), "fixedrange": True},
        yaxis={"tickvals": where.rows, "ticktext": where.names, "showgrid": False,
               "range": [where.height, 0], "automargin": False, "fixedrange": True,
               "ticklabelstandoff": 5, "tickfont": {"size": _FINE}},
    )  # fmt: skip


def size(where: Places, columns: Sequence[str]) -> dict[str, Any]:
    """Height and margins of the figure, for ``theme.figure``."""
    top = theme.HEADING + 12
    return {
        "height": round(where.height) + top + _BOTTOM,
        "margin": {
            "l": LEFT,
            "r": RIGHT + round(_LETTER * sum(map(_letters, columns))),
            "t": top,
            "b": _BOTTOM,
        },
        "showlegend": False,
        "barmode": "overlay",
    }


def _numbers(
    columns: Sequence[tuple[str, Sequence[str]]], at: Sequence[float], edge: float
) -> go.Scatter:
    """Columns right of the panel, one text a row: letters of one width, so that they align."""
    rows = zip(*([name, *cells] for name, cells in columns), strict=True)
    wide = [_letters(name) for name, _ in columns]
    lines = [
        "".join(f"{cell:>{n}}" for cell, n in zip(row, wide, strict=True)).rstrip() for row in rows
    ]
    return go.Scatter(
        x=np.full(len(at), edge * (1 - 1e-6), np.float32),  # beyond the range it is not drawn
        y=np.array(at, np.float32),
        mode="text",
        text=[*map(theme.plain, lines)],
        texttemplate=theme.ink("%{text}"),
        textposition="middle right",
        textfont={"family": theme.MONO, "size": theme.SMALL},
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )


def _letters(name: str) -> int:
    """Letters of a column: its name or a number, and what keeps it from the one before."""
    return max(len(name), _NUMBER) + 2


def marker(look: str) -> dict[str, Any]:
    """Fill of a bar."""
    _, color, pattern = LOOKS[look]
    return {
        "color": theme.rgba(color, 0.55),
        "line": {"color": color},
        "pattern": {"shape": pattern},
    }


def _hovers(rows: Sequence[Row], mine: Sequence[int], title: str) -> dict[str, Any]:
    """What hovers over some bars say: the value, its spread, and where it is from."""
    more: dict[str, Any] = {}
    said = f"%{{x:.3f}} {title}"
    spread = [(rows[i].low, rows[i].high) for i in mine]
    if all(None not in ends for ends in spread):
        more["customdata"] = np.array(spread, np.float32)
        said += "<br>the step's 10th to 90th percentile "
        said += "%{customdata[0]:.3f} to %{customdata[1]:.3f}"
    sources = [_whence(rows[i]) for i in mine]
    if len(set(sources)) == 1:
        more["meta"] = sources[0]
        said += "<br>%{meta}"
    else:
        more["hovertext"] = sources
        said += "<br>%{hovertext}"
    return more | {"hovertemplate": f"{said}<extra></extra>"}


def _whence(row: Row) -> str:
    """Where a bar is from, in lines."""
    return "<br>".join(map(theme.plain, wrap(row.whence, _HOVER, break_on_hyphens=False)))
