"""A prefill by several ranks in each layout: its time, and what of it is communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.views import theme
from workbench.views.numbers import plural, signed
from workbench.views.parallel_decode import begins, communication, say
from workbench.views.parallel_documents import NOTE, checked_prefill, described, group, taken
from workbench.views.rank_layout import draw, places, size
from workbench.views.rank_rows import Row
from workbench.views.view import View

_HEAD, _ROOM, _LEGEND = 24, 1.04, 24
_TITLE = "ms for all sequences"
_BESIDE = "in overlapping pieces"
_LESS = "communication: the prefill less the same without it"


def parallel_prefill(document: Mapping[str, Any]) -> View:
    """Milliseconds of a prefill in each layout, in one piece and in pieces that overlap.

    ``document`` is what ``workbench bench prefill --gpus N`` writes, or
    ``recorded_group_prefill()``. The end of each bar is communication: the prefill less the same
    work without it, all ranks at once. The published ratio, of other hardware, is named.

    Raises:
        WorkbenchError: there is no layout, or a field is not what it has to be.
    """
    document = checked_prefill(document)
    rows, parts, speeds = _rows(document)
    if not rows:
        raise WorkbenchError(
            "this document has no layout of a prefill; run `workbench bench prefill --gpus N`"
        )
    where = places(rows, _HEAD)
    layout = size(where, ("ms", "comm.", "tokens/s", "of rate"))
    layout["height"] += _LEGEND
    layout["margin"]["t"] += _LEGEND
    layout["showlegend"] = True  # the communication's colour, and no other
    ratio = document.get("ratio")
    beside = "" if ratio is None else f"tokens/s of ep over tp: {ratio:.2f}"
    fig = theme.figure(
        f"Prefill by layout, {group(document)}",
        described(document, _sizes(document), beside, *_published(document), note=NOTE),
        legend_under_title=True,
        **layout,
    )
    columns = [
        ("ms", ["–" if r.milliseconds is None else f"{r.milliseconds:,.0f}" for r in rows]),
        ("comm.", ["" if part is None else f"{part:,.0f}".replace("-", "−") for part in parts]),
        ("tokens/s", ["" if one is None else f"{one:,.0f}" for one in speeds]),
        ("of rate", ["" if not r.of_floor else f"{r.of_floor:.0%}" for r in rows]),
    ]
    most = max([1e-3, *(row.milliseconds or 0.0 for row in rows)]) * _ROOM
    lower = [begins(row, part) for row, part in zip(rows, parts, strict=True)]
    draw(fig, rows, where, columns, head=_HEAD, span=(0.0, most), title=_TITLE, values=lower)
    say(fig, rows, parts, _TITLE, "least and most of the rounds")
    fig.add_trace(communication(rows, parts, where, _LESS))
    return View(figure=fig, text=_text(document, rows, parts, speeds))


def _rows(
    document: Mapping[str, Any],
) -> tuple[list[Row], list[float | None], list[float | None]]:
    """The bars, their communication in milliseconds, and tokens/s; ``of_floor`` is of the rate."""
    rows: list[Row] = []
    parts: list[float | None] = []
    speeds: list[float | None] = []
    how, whence = str(document.get("how", "measured here")), taken(document, 0)
    for name, one in (document.get("layouts") or {}).items():
        title = str(one.get("title", name))
        if not one.get("passed") or not one.get("runs"):
            why = "interpreted, not timed" if one.get("interpreted") else "not timed"
            if not one.get("passed"):
                why = "not right, not timed: " + "; ".join(map(str, one.get("failures") or ()))
            rows.append(Row(name=title, look="start", source=how, whence=whence, why=why))
            parts.append(None)
            speeds.append(None)
            continue
        for run in one["runs"]:
            said = how if run["overlap"] == 1 else f"{how}, {_BESIDE}"
            rows.append(
                Row(
                    name=f"{title.partition(':')[0]} ({name})", look="start", source=said,
                    whence=whence, milliseconds=run["milliseconds"],
                    low=run.get("low"), high=run.get("high"), of_floor=run.get("fraction_of_peak"),
                )
            )  # fmt: skip
            parts.append(run.get("communication_milliseconds"))
            speeds.append(run["tokens_per_second"])
    for name, why in (document.get("left_out") or {}).items():
        rows.append(Row(name=str(name), look="absent", source=how, whence=whence, why=str(why)))
        parts.append(None)
        speeds.append(None)
    return rows, parts, speeds


def _sizes(document: Mapping[str, Any]) -> str:
    behind = document.get("context") or 0
    sequences = plural(document["sequences"], "sequence")
    said = f"{sequences} of {document['tokens']:,} tokens"
    return f"{said} behind {behind:,}" if behind else said


def _published(document: Mapping[str, Any]) -> list[str]:
    found = []
    for one in document.get("published") or ():
        unit = "" if one.get("unit") in (None, "ratio") else f" {one['unit']}"
        name, place = one.get("name", "a figure"), one.get("where", "elsewhere")
        found.append(f"published: {name}: {one['value']:.4g}{unit}, {place}")
    return found


def _text(
    document: Mapping[str, Any], rows: Sequence[Row], parts: Sequence[float | None],
    speeds: Sequence[float | None],
) -> str:  # fmt: skip
    names = [row.name + f", {_BESIDE}" * row.source.endswith(_BESIDE) for row in rows]
    wide = max(map(len, names))
    lines = [described(document, _sizes(document))]
    for name, row, part, speed in zip(names, rows, parts, speeds, strict=True):
        said = row.why
        if row.milliseconds is not None and speed is not None:
            comm = "" if part is None else f"communication {signed(part, 1).lstrip('+')} ms"
            of_rate = "" if not row.of_floor else f"{row.of_floor:.0%} of the matrix rate"
            said = f"{row.milliseconds:9,.1f} ms  {comm:<24} {speed:9,.0f} tokens/s  {of_rate}"
        lines.append(f"{name:<{wide}} {said}".rstrip())
    if document.get("ratio") is not None:
        lines.append(f"tokens/s of ep over tp: {document['ratio']:.2f}")
    return "\n".join([*lines, *_published(document)])
