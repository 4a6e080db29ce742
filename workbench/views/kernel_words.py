"""Words and small tables that the views of kernels share."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from html import escape

from workbench.kernels import ledger, registry
from workbench.kernels.catalogue import REFERENCE
from workbench.kernels.requirements import Where
from workbench.kernels.triton_compile import Compiled
from workbench.views import theme
from workbench.views.page import box

GOOD, BAD, FAINT = (
    theme.SPARSE,
    "var(--jp-error-color1,#d32f2f)",
    "var(--jp-ui-font-color2,inherit)",
)

Cell = str | tuple[str, str]  # text, or text and a colour
_SHORT = 26  # letters up to which a cell stays one line
_WORD = re.compile(r"\w+")
_MONO = "var(--jp-code-font-family,monospace)"
# What most cells name, said once on the table: a saved notebook keeps every letter.
_USED = {_MONO: "var(--m)", FAINT: "var(--f)"}
NOT_CHECKED = "not checked here"


def choices(op: str, where: Where) -> list[tuple[str, str]]:
    """Every variant of ``op``, and why it does not run at ``where`` ("" where it does)."""
    return [(name, registry.why_not(op, name, where) or "") for name in registry.names(op)]


def checked(op: str, variant: str) -> tuple[str, str]:
    """What is known here of a variant, and a colour for it."""
    found = ledger.verdict(op, variant)
    if found is None:
        if variant == REFERENCE:
            return "the reference", FAINT
        return NOT_CHECKED, FAINT
    if found.passed:
        error = "" if found.max_error is None else f", error {found.max_error:.1e}"
        return f"✓ passed{error}", GOOD
    gate = f" by the gate “{found.gate}”" if found.gate else ""
    return f"✗ {found.status}{gate}: {found.reason}", BAD


def spills(one: Compiled) -> str:
    """What a compiled kernel spills, in words."""
    return f"{one.spill_bytes} B spilled" if one.spill_bytes else "no spills"


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    mono: int = 0,
    numbers: Collection[int] = (),
    steady: bool = False,
) -> str:
    """A table; texts are escaped here. The first ``mono`` columns hold names of code.

    The columns counted in ``numbers`` end at their right edge. A ``steady`` table has the width of
    the page, and its last column what the others leave: a sentence there moves none of them.
    """
    line = ("background:none", f"border-bottom:1px solid {theme.LINE}")
    last = len(head) - 1

    def cell(place: int) -> list[str]:
        side = "right" if place in numbers else "left"
        fill = ["width:99%"] if steady and place == last else []
        return ["padding:3px 14px 3px 0", f"text-align:{side}", *fill]

    top = "".join(
        box(
            escape(word),
            *cell(place),
            *("white-space:nowrap", "font-weight:400", f"color:{_USED[FAINT]}"),
            tag="th",
        )
        for place, word in enumerate(head)
    )
    body = box(top, *line, tag="tr")
    for row in rows:
        pairs = [one if isinstance(one, tuple) else (one, "") for one in row]
        tall = any(len(text) > _SHORT or "\n" in text for text, _ in pairs)
        cells = ""
        for place, (text, color) in enumerate(pairs):
            if not text:
                cells += "<td></td>"
                continue
            styles = cell(place)
            styles += ["vertical-align:top"] if tall else []
            styles += [f"color:{_USED.get(color, color)}"] if color else []
            if len(text) > _SHORT:
                styles += ["overflow-wrap:anywhere"]
            elif not _WORD.fullmatch(text):  # one word breaks nowhere
                styles += ["white-space:nowrap"]
            styles += [f"font-family:{_USED[_MONO]}"] if place < mono else []
            cells += box(escape(text).replace("\n", "<br>"), *styles, tag="td")
        body += box(cells, *line, tag="tr")
    table = box(
        body,
        *(f"{name.removeprefix('var(').removesuffix(')')}:{long}" for long, name in _USED.items()),
        "border-collapse:collapse",
        f"font-size:{theme.TEXT}px",
        "margin:0",
        *(["width:100%"] if steady else []),
        tag="table",
    )
    return box(table, "overflow-x:auto")


def text_table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """The same as text: columns as wide as their longest cell, the last as long as it is."""
    plain = [[c[0] if isinstance(c, tuple) else c for c in row] for row in rows]
    plain = [[cell.replace("\n", "; ") for cell in row] for row in plain]
    widths = [max(map(len, column)) for column in zip(head, *plain, strict=True)]
    lines = []
    for row in (head, *plain):
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
