"""Figures of adaptive verification that also fit a narrow page.

Beside JupyterLab's file browser in a window of 800 px a cell's output is about 370 px wide. A
figure cannot know: its title and subtitle are broken here so that they fit there as well, and the
headings of its top panels lie inside the axes' part of the figure, so that a legend which takes
more rows on a narrow page moves them down and does not cover them.
"""

from __future__ import annotations

from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from workbench.views import theme

NARROW = 368  # px of a cell's output in the narrowest window that is looked after
HEADING = 22  # px that a panel's heading takes of its panel, a further line LINE more
LINE = 16  # px of a line of text
_TITLE, _SUBTITLE = 42, 56  # letters of a line that fit there
_TITLE_LINE = 20  # px


def figure(
    title: str, subtitle: str, *, height: int, legend_under_title: bool = False, **layout: Any
) -> go.Figure:
    """:func:`workbench.views.theme.figure` in lines that fit :data:`NARROW` px.

    ``height`` and the margin are those with one line of title and of subtitle; the figure grows by
    the further ones, its panels keep their size.
    """
    titles, lines = _lines(title, _TITLE), _lines(subtitle, _SUBTITLE)
    grown = _TITLE_LINE * (len(titles) - 1) + LINE * (len(lines) - 1)
    margin = dict(layout.pop("margin", {}))
    if grown:
        margin["t"] = margin.get("t", theme.TEMPLATE.layout.margin.t) + grown
    # One line for the theme's own arithmetic, which knows no width; the words come below.
    fig = theme.figure(
        "", "", height=height + grown, legend_under_title=legend_under_title, margin=margin,
        **layout,
    )  # fmt: skip
    fig.update_layout(
        title_text=theme.ink(f"<b>{'<br>'.join(map(theme.plain, titles))}</b>"),
        title_subtitle_text=theme.ink("<br>".join(map(theme.plain, lines)), faint=True),
    )
    if legend_under_title:
        fig.layout.legend.y = round(1 - (theme.HEADING + grown) / (height + grown), 4)
    return fig


def _lines(words: str, width: int) -> list[str]:
    # A dot between two remarks ends a line, it starts none.
    kept = wrap(words.replace(" ·", "\u00a0·"), width, break_on_hyphens=False)
    return [line.replace("\u00a0·", " ·") for line in kept] or [""]
