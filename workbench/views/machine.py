"""What this machine can do, as a page."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from workbench.views import theme
from workbench.views.page import box, page
from workbench.views.view import View

if TYPE_CHECKING:
    from workbench.doctor import Diagnosis

_YES, _NO = "✓", "–"


def this_machine(diagnosis: Diagnosis) -> View:
    """Hardware, what can run on it, and what is missing with its remedy.

    ``diagnosis`` is that of ``workbench.doctor.diagnose()``.
    """
    missing = [check for check in diagnosis.checks if not check.ok]
    rows: list[tuple[str, str, str]] = [("", *line) for line in diagnosis.machine.lines()]
    runs = [(_YES if run.possible else _NO, run.name, run.reason) for run in diagnosis.runs]
    lacks = [
        (
            _NO,
            f"{check.name} ({check.purpose})",
            "; ".join(filter(None, (check.found, check.remedy))),
        )
        for check in missing
    ]
    parts = [("Hardware and versions", rows), ("What runs here", runs), ("What is missing", lacks)]
    parts = [(title, lines) for title, lines in parts if lines]
    text = "\n".join(
        "\n".join([title, *(f"  {mark or ' '} {name}: {value}" for mark, name, value in lines)])
        for title, lines in parts
    )
    body = "".join(
        box(escape(title), "font-weight:600", "margin:10px 0 2px") + _grid(lines)
        for title, lines in parts
    )
    return View(text=text, html=page("This machine", "as found when this ran", body))


def _grid(rows: list[tuple[str, str, str]]) -> str:
    cells = "".join(
        box(escape(mark), f"color:{theme.SPARSE if mark == _YES else theme.NEUTRAL}")
        + box(escape(name))
        + box(escape(value), "overflow-wrap:anywhere")
        for mark, name, value in rows
    )
    return box(
        cells,
        "display:grid",
        "grid-template-columns:14px 190px 1fr",
        "gap:2px 10px",
        f"font-size:{theme.TEXT}px",
    )
