"""What a figure of a cell 368 px wide has room for, reckoned from its layout."""

import re
from html import unescape
from typing import Any

from workbench.views.view import View

WIDTH = 368
LETTER, BOLD, LINE = 6.2, 8.4, 16  # px: of 12 px text and of a bold title, widths on average


def lines(text: str) -> list[str]:
    return [unescape(re.sub(r"<[^>]+>", "", line)) for line in text.split("<br>")]


def _side(axis: Any) -> tuple[float, float]:
    return tuple(axis.domain) if axis.domain else (0.0, 1.0)


def check(view: View, name: str) -> None:
    """Title, subtitle and panel headings end within the page and do not meet; a legend that takes
    more rows than usual pushes the headings down with their panels."""
    layout = view.figure.layout
    for text, letter in ((layout.title.text, BOLD), (layout.title.subtitle.text, LETTER)):
        for line in lines(text):
            assert len(line) * letter <= WIDTH - 4, (name, line)
    margin = layout.margin.to_plotly_json()
    left = margin.get("l", layout.template.layout.margin.l)
    right = margin.get("r", layout.template.layout.margin.r)
    inner = layout.height - margin["t"] - margin["b"] if {"t", "b"} <= set(margin) else 0
    heads = []
    for note in layout.annotations:
        if not (str(note.xref).endswith(" domain") and note.yanchor == "bottom" and note.yshift):
            continue
        x, y = (layout[f"{ref[0]}axis{ref.split()[0][1:]}"] for ref in (note.xref, note.yref))
        start = left + _side(x)[0] * (WIDTH - left - right)
        heads.append((start, _side(y)[1], lines(note.text)))
    for start, top, words in heads:
        after = [s for s, t, _ in heads if t == top and s > start]
        end = start + LETTER * max(map(len, words))
        assert end <= min([WIDTH, *after]), (name, words)
        if layout.legend.yref == "container":
            assert (1 - top) * inner >= 8 + LINE * len(words) - 4 or top < max(
                t for _, t, _ in heads
            ), (name, words)
