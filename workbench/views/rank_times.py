"""Where the time of one rank's decode step goes: its kernels as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from workbench.errors import WorkbenchError
from workbench.views import theme
from workbench.views.numbers import plural
from workbench.views.page import box, page
from workbench.views.rank_documents import checked
from workbench.views.rank_rows import timed
from workbench.views.rank_sources import described, source
from workbench.views.view import View

_MOST = 16  # kernels with a line of their own
_NAME = 32  # letters of a kernel's name
_BLOCKS = 10  # letters of the longest bar
_HEAD = ("kernel", "µs a step", "share", "launches", "µs a launch", "")  # the last for bars
_CLUTTER = re.compile(
    r"at::native::|at::cuda::detail::|\(anonymous namespace\)::|c10::|internal::"
    r"|(?<=elementwise)_kernel(?=<)|(?<=<)(\d+, )+|gpu_kernel_impl(_nocast)?<"
)


def rank_kernels(document: Mapping[str, Any], variant: str = "fused") -> View:
    """The kernels of a variant's step: microseconds, share of their sum, launches.

    The last lines make up the step: what is outside kernels are the gaps between launches.
    Dependent launches overlap: there a kernel's time contains waiting, and the sum exceeds the
    step.

    Raises:
        WorkbenchError: the run has no kernel times of this variant, or a field is not what it has
            to be.
    """
    document = checked(document)
    every = document.get("kernels") or {}
    rows = every.get(variant)
    if not rows or not any(one["microseconds"] for one in rows):
        have = ", ".join(every) or "none"
        raise WorkbenchError(
            f"this run has no kernel times of {variant!r:.60}; it has those of: {have}"
        )
    row = (document.get("variants") or {}).get(variant) or {}
    step = 1e3 * float(row["milliseconds"]) if timed(row) else None
    times = [float(one["microseconds"]) for one in rows]
    total, most = sum(times), max(times)
    cells: list[list[str]] = []
    for one, spent in zip(rows[:_MOST], times, strict=False):
        count = float(one["launches"])
        each = f"{spent / count:,.2f}" if count else "–"
        name = kernel_name(str(one.get("kernel") or "unnamed"))
        cells.append([name, f"{spent:,.1f}", f"{spent / total:.1%}", f"{count:,.6g}", each,
                      _bar(spent, most)])  # fmt: skip
    if len(rows) > _MOST:
        rest, count = sum(times[_MOST:]), sum(float(one["launches"]) for one in rows[_MOST:])
        cells.append([plural(len(rows) - _MOST, "other"), f"{rest:,.1f}", f"{rest / total:.1%}",
                      f"{count:,.6g}", "", ""])  # fmt: skip
    launches = sum(float(one["launches"]) for one in rows)
    sums = [["= all kernels", f"{total:,.1f}", "100%", f"{launches:,.6g}", "", ""]]
    if step is not None:
        gaps = step - total
        said = "+ between launches" if gaps >= 0 else "− overlap of launches"
        sums += [[said, f"{abs(gaps):,.1f}", "", "", "", ""],
                 ["= the step", f"{step:,.1f}", "", "", "", ""]]  # fmt: skip
    remark = ""
    if step is not None and total > step:
        remark = "kernels overlap: a dependent's time contains its wait; a share is of their sum"
    title = f"Where the step goes: {row.get('title', variant)}"
    table = [list(_HEAD), *cells, *sums]
    html = page(title, described(document, remark), _table(table))
    lines = [f"{title}; {source(document)}; {document.get('note', '')}", *filter(None, [remark])]
    return View(text="\n".join([*lines, *_lines(table)]), html=html)


def kernel_name(name: str) -> str:
    """A kernel's name without return type, namespaces and long template arguments."""
    return theme.short_token(_CLUTTER.sub("", name.removeprefix("void ")), _NAME)


def _bar(value: float, most: float) -> str:
    """A bar of text, a longer one for more; nothing below half a block."""
    return "█" * round(_BLOCKS * value / most) if most > 0 else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The table as HTML; texts are escaped here.

    As little markup as the columns need, for a notebook keeps all of it: numbers lie at the right
    edge through their table, and JupyterLab does so by itself.
    """
    line = ("background:transparent", f"border-bottom:1px solid {theme.LINE}")
    left, bar = "text-align:left", f"color:{theme.HEAT}"
    body = ""
    for row in rows:
        first, *numbers, blocks = row
        cells = box(escape(first), left, tag="td")
        cells += "".join(f"<td>{escape(text)}</td>" for text in numbers)
        cells += box(blocks, left, bar, tag="td") if blocks else "<td></td>"
        body += box(cells, *line, tag="tr")
    style = (
        "border-collapse:collapse", "text-align:right", f"font-size:{theme.TEXT}px", "margin:0",
    )  # fmt: skip
    return box(box(body, *style, tag="table"), "overflow-x:auto", "white-space:nowrap")


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The table as text: numbers end at their column's right edge, bars are left away."""
    kept = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    return [
        "  ".join(
            f"{text:<{wide}}" if place == 0 else f"{text:>{wide}}"
            for place, (text, wide) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in kept
    ]
