"""One look for every view: colours, type sizes, plotly template, text that follows the theme.

Colours are those of Okabe and Ito (2008), distinguishable with any colour vision, each with a
contrast of at least 3 to 1 on JupyterLab's light and on its dark background. A thing keeps its
colour in every view. Backgrounds are transparent, so that plots lie on the page whatever it is.

Text that must be read is wrapped by :func:`ink`: it takes the colour of JupyterLab's own text
through a CSS variable and so follows the theme, also of a notebook that was saved and reopened.
"""

from __future__ import annotations

import re
from html import escape
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from workbench.model.config import AttentionType, MlpType

SLIDING = "#0072B2"  # sliding-window attention
FULL = "#D55E00"  # full attention
DRAFTER = "#8C6D1F"  # 4.9 : 1 on white, 3.9 on #111; dotted or hatched wherever it is
SPARSE = "#009E73"  # mixture of experts
DENSE = "#CC79A7"  # dense MLP
NEUTRAL = "#7a7a7a"  # 4.3 : 1 on white and on the dark theme's #111
HEAT = "#7D63D9"  # quantities in heat maps, of no part of the model in particular
SURPRISE = "#E69F00"  # unlikely tokens; a background only, too light for lines on white
LINE = "rgba(128,128,128,0.28)"

ATTENTION: dict[AttentionType, str] = {"sliding_attention": SLIDING, "full_attention": FULL}
MLP: dict[MlpType, str] = {"sparse": SPARSE, "dense": DENSE}
ATTENTION_NAMES: dict[AttentionType, str] = {
    "sliding_attention": "sliding",
    "full_attention": "full",
}

FIGURE_SANS = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
SANS = f"var(--jp-ui-font-family, system-ui), {FIGURE_SANS}"  # plotly knows no CSS variables
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

# The one scale of sizes, in px: title, text (subtitles, axis titles, legends), small (tick labels).
TITLE, TEXT, SMALL = 15, 12, 11


PAD = 4  # px at the left of titles and of pages
_TOP = 64  # px above the panels of a figure without a legend
_SUBTITLE_WIDTH = 80  # characters that fit beside JupyterLab's side bar on a page of 1000 px
_LINE_HEIGHT = 16
HEADING = 56  # px of the title and one line of subtitle: where a legend may start


def rgba(color: str, alpha: float) -> str:
    """``#rrggbb`` with an opacity, as CSS and plotly write it."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def ink(text: str, *, faint: bool = False) -> str:
    """Plotly text in the colour of the page's own text; ``faint`` for the secondary one."""
    variable = "--jp-ui-font-color2" if faint else "--jp-ui-font-color1"
    return f'<span style="color:var({variable},{NEUTRAL})">{text}</span>'


def plain(text: str) -> str:
    """Text for plotly, which reads some HTML: names and token texts pass through here."""
    return escape(text, quote=False)  # quotes stay: plotly would show them as entities


def folded(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` letters, broken after commas where that is enough."""
    lines: list[str] = []
    for clause in text.split(", "):
        if lines and len(lines[-1]) + len(clause) + 2 < width:
            lines[-1] += f", {clause}"
        else:
            lines[-1:] = [f"{line}," for line in lines[-1:]]
            lines += wrap(clause, width - 1)  # a comma may follow
    return lines


def token_label(text: str, limit: int = 14) -> str:
    """A token's text, escaped for plotly and for HTML; runs of spaces and long texts shortened."""
    return plain(short_token(text, limit))


def short_token(text: str, limit: int = 14) -> str:
    """The same, not escaped: for text that is not markup."""
    text = re.sub("·{5,}", lambda run: f"·×{len(run.group())}", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def scale(color: str = HEAT, *, steps: int = 12) -> list[tuple[float, str]]:
    """Colour scale from nothing to ``color``, opacity growing as the cube root of the value.

    Zero shows the page itself. The root lets a share of 0.01 be seen beside one of 1.
    """
    return [((i / steps) ** 3, rgba(color, i / steps)) for i in range(steps + 1)]


def linear_scale(color: str = HEAT) -> list[tuple[float, str]]:
    """Colour scale from nothing to ``color``, opacity proportional to the value."""
    return [(0.0, rgba(color, 0.0)), (1.0, rgba(color, 1.0))]


def diverging_scale() -> list[tuple[float, str]]:
    """Green below the middle, nothing at it, violet above: told apart with any colour vision."""
    return [(0.0, rgba(SPARSE, 1)), (0.5, rgba(NEUTRAL, 0)), (1.0, rgba(HEAT, 1))]


def _axis() -> dict[str, Any]:
    return {
        "gridcolor": LINE,
        "zeroline": False,
        "linecolor": LINE,
        "ticks": "",
        "tickfont": {"size": SMALL, "color": NEUTRAL},
        "title": {"font": {"size": TEXT, "color": NEUTRAL}, "standoff": 10},
        "automargin": True,
    }


# The template reaches the first legend only; a second one is given this.
LEGEND = {
    "orientation": "h",
    "xanchor": "left",
    "yanchor": "bottom",
    "font": {"size": TEXT},
    "bgcolor": "rgba(0,0,0,0)",
    "itemsizing": "constant",
}


def _template() -> go.layout.Template:
    layout = {
        "font": {"family": FIGURE_SANS, "size": TEXT, "color": NEUTRAL},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": [SLIDING, FULL, SPARSE, DENSE, HEAT, NEUTRAL],
        # At the edge of the figure, not of its panels: all titles of a page start at one place.
        "title": {
            "x": 0,
            "xanchor": "left",
            "xref": "container",
            "y": 1,
            "yanchor": "top",
            "yref": "container",
            "pad": {"t": 10, "l": PAD},
            "font": {"size": TITLE},
            "subtitle": {"font": {"size": TEXT}},
        },
        "margin": {"l": 56, "r": 16, "t": _TOP, "b": 48},
        "xaxis": _axis(),
        "yaxis": _axis(),
        "legend": {"x": 0, "y": 1, **LEGEND},
        "hoverlabel": {
            "bgcolor": "#2b2b2b",
            "bordercolor": "#2b2b2b",
            "font": {"family": FIGURE_SANS, "size": TEXT, "color": "#ffffff"},
            "align": "left",
        },
        "modebar": {
            "bgcolor": "rgba(0,0,0,0)",
            "color": rgba(NEUTRAL, 0.6),
            "activecolor": NEUTRAL,
        },
        "annotationdefaults": {"font": {"size": TEXT, "color": NEUTRAL}, "showarrow": False},
        "hovermode": "closest",
        "dragmode": False,
    }
    return go.layout.Template(layout=layout)


TEMPLATE = _template()

# How figures behave on the page; part of what a saved notebook holds. Not "responsive": JupyterLab
# resizes them itself, and together the two flatten a figure to the height of a line.
CONFIG = {"displaylogo": False, "displayModeBar": False}


def figure(title: str, subtitle: str, *, height: int, **more: Any) -> go.Figure:
    """An empty figure in the house style; ``subtitle`` says where the numbers come from.

    ``more`` is that of :func:`style`.
    """
    fig = go.Figure()
    style(fig, title, subtitle, height=height, **more)
    return fig


def style(
    fig: Any,
    title: str,
    subtitle: str,
    *,
    height: int,
    legend_under_title: bool = False,
    **layout: Any,
) -> None:
    """Put the house style on a figure (a ``FigureWidget`` or one with subplots, too).

    A long subtitle is broken into lines; the figure grows by them, its panels keep their size.
    With ``legend_under_title`` the legend starts at the figure's left edge right below the
    subtitle: for figures with a wide margin, and for legends that take more rows on a narrow page,
    which then move the panels down instead of covering the subtitle.
    """
    # A dot between two remarks ends a line, it starts none.
    words = subtitle.replace(" ·", "\u00a0·")
    lines = wrap(words, _SUBTITLE_WIDTH, break_long_words=False, break_on_hyphens=False)
    lines = [line.replace("\u00a0·", " ·") for line in lines]
    grown = _LINE_HEIGHT * (len(lines) - 1)
    if grown > 0:
        height += grown
        margin = layout.get("margin", {})
        layout["margin"] = {**margin, "t": margin.get("t", _TOP) + grown}
    if legend_under_title:
        layout["legend"] = {
            **layout.get("legend", {}),
            "xref": "container",
            "yref": "container",
            "yanchor": "top",
            "y": round(1 - (HEADING + _LINE_HEIGHT * (len(lines) - 1)) / height, 4),
        }
    fig.update_layout(
        template=TEMPLATE,
        title={
            "text": ink(f"<b>{plain(title)}</b>"),
            "subtitle": {"text": ink("<br>".join(map(plain, lines)), faint=True)},
        },
        height=height,
        autosize=True,
        **layout,
    )


def panel_title(fig: Any, panel: int, text: str, *, align: int | None = None) -> None:
    """A heading above the panel of axes ``x<panel>``, ``y<panel>``; its left edge is that of panel
    ``align`` where another one is given."""
    across, up = (("" if n == 1 else str(n)) for n in (align or panel, panel))
    fig.add_annotation(
        text=ink(text),
        x=0,
        xref=f"x{across} domain",
        xanchor="left",
        y=1,
        yref=f"y{up} domain",
        yanchor="bottom",
        yshift=8,
        showarrow=False,
    )


def colorbar(title: str, **more: Any) -> dict[str, Any]:
    """A slim colour bar with its title along it."""
    return {
        "title": {"text": ink(title), "side": "right", "font": {"size": TEXT}},
        "thickness": 10,
        "outlinewidth": 0,
        "tickfont": {"size": SMALL, "color": NEUTRAL},
        "ticks": "",
        **more,
    }
