"""Pages: views made of text, in the same look as the figures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from workbench.views import theme

_INK = "var(--jp-ui-font-color1,inherit)"
_FAINT = "var(--jp-ui-font-color2,inherit)"


def box(content: str, *styles: str, tag: str = "div", title: str = "") -> str:
    """One HTML element; ``content`` is HTML already, ``title`` (the hover) is escaped here."""
    style = escape(";".join(styles))
    hover = f' title="{escape(title)}"' if title else ""
    return f'<{tag} style="{style}"{hover}>{content}</{tag}>'


def page(title: str, subtitle: str, body: str, *, legend: Sequence[tuple[str, str]] = ()) -> str:
    """Title, subtitle, ``body`` (HTML already) and a legend of (colour, word), as one block."""
    foot = "".join(_swatch(color, word) for color, word in legend)
    return box(
        box(escape(title), f"font-size:{theme.TITLE}px", "font-weight:700")
        + box(escape(subtitle), f"font-size:{theme.TEXT}px", f"color:{_FAINT}", "margin:4px 0 12px")
        + body
        + (box(foot, "margin-top:10px", f"font-size:{theme.TEXT}px") if legend else ""),
        f"font-family:{theme.SANS}",
        f"color:{_INK}",
        "padding:10px 4px",
        "line-height:1.4",
    )


def _swatch(color: str, word: str) -> str:
    patch = box(
        "",
        "display:inline-block",
        "width:12px",
        "height:12px",
        "vertical-align:-1px",
        "margin-right:5px",
        "border-radius:2px",
        "box-sizing:border-box",
        f"border:1px solid {theme.LINE}",
        f"background:{color}",
        tag="span",
    )
    return box(patch + escape(word), "margin-right:14px", "white-space:nowrap", tag="span")
