"""Published figures of Beam's serving beside modelled, recorded and measured ones, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import groupby
from textwrap import wrap

from workbench.model.reference_figures import ANNOUNCED
from workbench.serving.published_row import KINDS, Figure, Kind, Row, Unit
from workbench.serving.published_serving import PublishedBeside
from workbench.views import theme
from workbench.views.numbers import signed
from workbench.views.page import box, page
from workbench.views.view import View

_FAINT = "color:var(--jp-ui-font-color2,inherit)"
_PLAIN = "background:transparent"  # JupyterLab stripes the rows of tables otherwise
# The signs of workbench.views.model_check, and one for what was measured here.
_SIGNS: Mapping[Kind, tuple[str, str]] = {
    "published": ("◆", theme.HEAT),
    "modelled": ("○", theme.NEUTRAL),
    "recorded": ("■", theme.HEAT),
    "measured here": ("●", theme.SPARSE),
}
_HEADS: Mapping[Kind, str] = {
    "published": "published",
    "modelled": "modelled for this plan",
    "recorded": "recorded elsewhere",
    "measured here": "measured here",
}
_UNITS: Mapping[Unit, str] = {
    "ms": " ms", "tokens/s": " tokens/s", "tokens a step": "", "change": " %",
}  # fmt: skip
_CELL = ("padding:3px 14px 3px 0", "text-align:left", "vertical-align:top")
# Of the four columns, in %; the last says nothing but why, where nothing was measured.
_MEASURED, _UNMEASURED = (25, 25, 25, 25), (29, 25, 29, 17)
_TEXT_WIDTH = 116  # characters of a line


def beside_published(value: PublishedBeside) -> View:
    """A table with a block for each published thing: four kinds of figures, each with its source.

    ``value`` is that of ``workbench.serving.published_serving.beside_published(plan, samples)``.
    """
    measured = (
        f"measured here: {value.seconds:.0f} s of a server's metrics"
        if value.seconds
        else "nothing was measured here"
    )
    subtitle = (
        f"announcement: {ANNOUNCED} · modelled: {value.plan}, data sheet rates, so reality is "
        f"slower · {measured}"
    )
    widths = _MEASURED if value.seconds else _UNMEASURED
    head = "".join(
        box(_sign(kind) + escape(_HEADS[kind]), *_CELL, f"width:{width}%", "font-weight:600",
            tag="th")
        for kind, width in zip(KINDS, widths, strict=True)
    )  # fmt: skip
    rows = box(head, _PLAIN, tag="tr") + "".join(map(_block, value.rows))
    table = box(
        rows, "border-collapse:collapse", "table-layout:fixed", "width:100%", "min-width:500px",
        "margin:0", f"font-size:{theme.TEXT}px", "overflow-wrap:break-word", tag="table",
    )  # fmt: skip
    return View(
        html=page(
            "Published, and beside it",
            subtitle,
            box(table, "overflow-x:auto", "max-width:1000px"),
        ),
        text="\n".join([subtitle, *(line for row in value.rows for line in _lines(row))]),
    )


def _sign(kind: Kind) -> str:
    sign, color = _SIGNS[kind]
    return box(sign, f"color:{color}", "margin-right:5px", tag="span")


def _block(row: Row) -> str:
    """A line with the thing's name, and one with a cell for each kind."""
    name = box(escape(row.name), "font-weight:600", tag="span")
    if row.remark:
        name += box(escape(f" · {row.remark}"), _FAINT, tag="span")
    title = (
        f'<td colspan="{len(KINDS)}" style="padding:8px 0 0;text-align:left;'
        f'border-top:1px solid {theme.LINE}">{name}</td>'
    )
    cells = "".join(box(_figures(row, kind), *_CELL, tag="td") for kind in KINDS)
    return box(title, _PLAIN, tag="tr") + box(cells, _PLAIN, tag="tr")


def _figures(row: Row, kind: Kind) -> str:
    found = row.of(kind)
    if not found:
        return box(escape(row.missing.get(kind, "–")), _FAINT)
    shown = ""  # figures of one source stand together over it
    for source, group in groupby(found, _source):
        lines = "".join(
            box(
                # Not unbreakable: in a narrow cell the unit goes to the next line, no sign alone.
                _sign(kind)
                + box(escape(number(one, row.unit)), "font-weight:600",
                      "font-variant-numeric:tabular-nums", tag="span")
                + (box(escape(f" {one.label}"), tag="span") if one.label else "")
            )
            for one in group
        )  # fmt: skip
        told = box(escape(source), _FAINT, f"font-size:{theme.SMALL}px")
        shown += box(lines + told, "margin-bottom:5px")
    return shown


def _source(one: Figure) -> str:
    return one.source.replace(ANNOUNCED, "announcement")


def number(one: Figure, unit: Unit) -> str:
    """A figure with its unit: digits enough to tell figures apart, a change as per cent."""
    if unit == "change":
        return f"{signed(100 * one.value, 1)} %"
    if unit == "tokens a step":
        return f"{one.value:.2f}"
    digits = 0 if one.value >= 100 else 1 if one.value >= 20 else 2
    return f"{one.value:,.{digits}f}{_UNITS[unit]}"


def _lines(row: Row) -> list[str]:
    """The same as text: a line for each figure, its source once."""
    lines = ["", row.name + (f" ({row.remark})" if row.remark else "")]
    for kind in KINDS:
        before = ""
        for one in row.of(kind):
            source = _source(one)
            label = f"{one.label}; " if one.label else ""
            told = f"  {_SIGNS[kind][0]} {kind:<13} {number(one, row.unit):>16}  "
            same = bool(label) and source == before
            words = wrap(f"{label}{'as above' if same else source}", _TEXT_WIDTH - len(told))
            before = source
            lines += [told + words[0], *(" " * len(told) + more for more in words[1:])]
        if kind in row.missing:
            lines.append(f"    {row.missing[kind]}")
    return lines
