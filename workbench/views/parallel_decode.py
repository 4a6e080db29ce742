"""Several ranks' decode step: the waterfall, each bar with its communication in its own colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.views import theme
from workbench.views.numbers import signed
from workbench.views.parallel_documents import NOTE, checked, described, group, run_of, taken
from workbench.views.rank_decode import _ground, _line, times
from workbench.views.rank_layout import Places, draw, places, size
from workbench.views.rank_rows import APART, LOOKS, Row, look, other_rows, reason, timed
from workbench.views.view import View

COMMUNICATION, PATTERN = theme.FULL, "+"
EXCHANGES = {"nccl": "all-reduce by NCCL", "gloo": "all-reduce by gloo",
             "boundary": "all-reduce inside the boundary",
             "products": "all-reduce sent by the products"}  # fmt: skip
# Steps of their own, which no chain of operations is.
_WHOLE = ("fused", "fused_pdl", "load", "fused_boundary", "fused_products", "load_boundary")
_HEAD, _ROOM, _LEGEND = 38, 1.04, 24  # px, of the longest bar, px
_TITLE = "ms a step"
_LESS = "communication: the step with all-reduces less the one without"


def parallel_waterfall(document: Mapping[str, Any], batch: int = 1, context: int = 4096) -> View:
    """Milliseconds of a step of several ranks, optimisation by optimisation, and of which exchange.

    ``document`` is what ``workbench bench decode --gpus N`` writes, ``recorded_group()`` the one
    that comes with the package; ``batch`` and ``context`` (tokens) choose one of its runs. The end
    of each bar is communication: the step with its all-reduces less the one-rank step of the same
    stage on the same weights, all ranks at once. Of the full model at batch 1 the published pair
    follows, of another machine, on a ground of its own.

    Raises:
        WorkbenchError: no such run, or a field is not what it has to be.
    """
    document = checked(document)
    run = run_of(document, batch, context)
    rows, parts = _rows(document, run)
    floor = run.get("floor_milliseconds")
    where = places(rows, _HEAD)
    remarks = ["without all-reduces: the one-rank step of the same stage, all ranks at once"]
    kinds = [row.look for row in rows]
    if APART in kinds and document["gpus"] != document["tp"]:
        ranks, tp = document["gpus"], document["tp"]
        remarks.append(f"published: the whole model; here {ranks} of its {tp} ranks")
    layout = size(where, ("ms", "comm.", "× floor"))
    layout["height"] += _LEGEND
    layout["margin"]["t"] += _LEGEND
    layout["showlegend"] = True  # the communication's colour, and no other
    at = f"batch {batch}, context {context:,}"
    fig = theme.figure(
        _title(document, rows),
        described(document, at, *remarks, note=NOTE),
        legend_under_title=True,
        **layout,
    )
    columns = [
        ("ms", ["–" if r.milliseconds is None else f"{r.milliseconds:.2f}" for r in rows]),
        ("comm.", ["" if part is None else signed(part, 2).lstrip("+") for part in parts]),
        ("× floor", ["" if not r.of_floor else times(r.of_floor) for r in rows]),
    ]
    most = max([1e-3, *(r.milliseconds or 0.0 for r in rows)]) * _ROOM
    _ground(fig, where)
    lower = [begins(row, part) for row, part in zip(rows, parts, strict=True)]
    draw(fig, rows, where, columns, head=_HEAD, span=(0.0, most), title=_TITLE, values=lower)
    say(fig, rows, parts, _TITLE)
    fig.add_trace(communication(rows, parts, where, _LESS))
    if floor:
        end = where.ends[APART][0] if APART in where.ends else where.height
        _line(fig, float(floor), (10, end), f"floor {floor:.2f} ms", "dot")
    return View(figure=fig, text=_text(document, run, rows, parts))


def _rows(
    document: Mapping[str, Any], run: Mapping[str, Any]
) -> tuple[list[Row], list[float | None]]:
    """The bars, and the milliseconds of each that are communication (None: nobody knows)."""
    rows: list[Row] = []
    parts: list[float | None] = []
    whence = taken(document, 0)  # the note stands above all bars
    how = str(document.get("how", "measured here"))
    for name, row in run["variants"].items():
        right = timed(row)
        kind = row | {"forms": row.get("forms") or name not in _WHOLE}
        exchange = str(row.get("exchange") or "")
        if exchange == "nccl" and document.get("backend", "nccl") != "nccl":
            exchange = str(document["backend"])
        said = EXCHANGES.get(exchange, exchange)
        rows.append(
            Row(
                name=str(row.get("title", name)), look=look(kind),
                source=", ".join(filter(None, (how, said))),
                whence="; ".join(filter(None, (said, whence))),
                milliseconds=row["milliseconds"] if right else None,
                low=row.get("low") if right else None, high=row.get("high") if right else None,
                of_floor=row.get("fraction_of_floor") if right else None,
                why="" if right else reason(row),
            )
        )  # fmt: skip
        parts.append(row.get("communication_milliseconds") if right else None)
    for name, why in (run.get("left_out") or {}).items():
        rows.append(Row(name=str(name), look="absent", source=how, whence=whence, why=str(why)))
        parts.append(None)
    step = {**document, "batch": run["batch"], "context": run["context"]}
    for row in other_rows(step, ()):
        if row.look == APART:
            rows.append(row)
            parts.append(None)
    return rows, parts


def _title(document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The group, and its step from the first bar to the fastest one."""
    own = [row for row in rows if row.look not in (APART, "absent")]
    found = [row.milliseconds for row in own if row.milliseconds is not None]
    said = f"A decode step, {group(document)}"
    if not found:
        return said
    first, least = own[0].milliseconds, min(found)
    if first is None or first == least:
        return f"{said}: {least:.2f} ms"
    return f"{said}: {first:.2f} → {least:.2f} ms"


def begins(row: Row, part: float | None) -> float | None:
    """Where a bar's communication begins."""
    if row.milliseconds is None:
        return None
    return row.milliseconds - min(max(part or 0.0, 0.0), row.milliseconds)


def communication(
    rows: Sequence[Row], parts: Sequence[float | None], where: Places, name: str
) -> go.Bar:
    """The end of each bar; of one that has none, nothing. ``name`` stands in the legend."""
    some = [
        (row.milliseconds, min(part, row.milliseconds), y, row)
        for row, part, y in zip(rows, parts, where.rows, strict=True)
        if row.milliseconds is not None and part is not None and part > 0
    ]
    return go.Bar(
        x=np.array([part for _, part, _, _ in some], np.float32),
        base=[round(whole - part, 5) for whole, part, _, _ in some],  # plotly does not pack it
        y=np.array([y for _, _, y, _ in some], np.float32),
        width=16, name=theme.ink(name),
        marker={"color": theme.rgba(COMMUNICATION, 0.6), "line": {"color": COMMUNICATION},
                "pattern": {"shape": PATTERN}},
        customdata=[f"{part / whole:.0%} of {whole:.3f} ms" for whole, part, _, _ in some],
        meta="communication",
        hovertemplate="%{meta}: %{x:.3f} ms, %{customdata}<extra></extra>",
    )  # fmt: skip


def say(
    fig: go.Figure, rows: Sequence[Row], parts: Sequence[float | None], unit: str,
    spread: str = "10th to 90th percentile",
) -> None:  # fmt: skip
    """Hovers of the bars that ``draw`` made: the whole time, and what of it is no communication."""
    drawn = [t for t in fig.data if t.type == "bar"]
    order = [
        [i for i, row in enumerate(rows) if row.look == kind and row.milliseconds is not None]
        for kind in LOOKS
    ]
    for trace, mine in zip(drawn, filter(None, order), strict=True):
        whence = {_lines(rows[i].whence) for i in mine}
        shared = whence.pop() if len(whence) == 1 else None  # said once: a notebook keeps it all
        trace.update(
            showlegend=False, customdata=None, meta=shared,
            hovertext=[
                _hover(rows[i], parts[i], unit, spread)
                + ("" if shared else f"<br>{_lines(rows[i].whence)}")
                for i in mine
            ],
            hovertemplate="%{hovertext}" + "<br>%{meta}" * bool(shared) + "<extra></extra>",
        )  # fmt: skip


def _lines(whence: str) -> str:
    return "<br>".join(map(theme.plain, theme.folded(whence, 64)))


def _hover(row: Row, part: float | None, unit: str, spread: str) -> str:
    whole = row.milliseconds or 0.0  # drawn ones have one
    said = [f"{whole:.3f} {unit}"]
    if part is not None:
        said.append(f"{whole - part:.3f} ms without communication")
    if row.low is not None and row.high is not None:
        said.append(f"{spread} {row.low:.3f} to {row.high:.3f}")
    return "<br>".join(map(theme.plain, said))


def _text(
    document: Mapping[str, Any], run: Mapping[str, Any], rows: Sequence[Row],
    parts: Sequence[float | None],
) -> str:  # fmt: skip
    """As in the figure: a heading, with the source of the bars below it, and a line each."""
    wide = max(len(row.name) for row in rows)
    lines = [described(document, f"batch {run['batch']}, context {run['context']:,}")]
    if run.get("floor_milliseconds"):
        lines.append(f"{'floor':<{wide}} {run['floor_milliseconds']:6.2f} ms")
    both = zip(rows, parts, strict=True)
    for (kind, whose), some in groupby(both, key=lambda pair: (pair[0].look, pair[0].source)):
        lines.append(": ".join(filter(None, (LOOKS[kind][0], whose))))
        for row, part in some:
            said = row.why
            if row.milliseconds is not None:
                of_floor = f"{times(row.of_floor)} × floor" if row.of_floor else ""
                comm = "" if part is None else f"communication {signed(part, 2).lstrip('+')} ms"
                said = f"{row.milliseconds:6.2f} ms  {comm:<22} {of_floor}".rstrip()
            lines.append(f"{row.name:<{wide}} {said}".rstrip())
    return "\n".join(lines)
