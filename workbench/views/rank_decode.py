"""One rank's decode step: the waterfall of its optimisations, and what leaving one out costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.views import theme
from workbench.views.numbers import signed
from workbench.views.rank_documents import checked, checked_bar
from workbench.views.rank_layout import Places, draw, places, size
from workbench.views.rank_rows import (
    APART,
    LOOKS,
    Other,
    Row,
    look,
    other_rows,
    reason,
    timed,
    variant_rows,
)
from workbench.views.rank_sources import (
    described,
    engine_figures,
    source,
    variant_source,
    whence,
)
from workbench.views.view import View

_HEAD, _NARROW = 38, 24  # px above the first row: names of columns, with and without lines
_ROOM = 1.04  # of the longest bar


def rank_waterfall(document: Mapping[str, Any], *, others: Sequence[Other] = ()) -> View:
    """Milliseconds of a step, optimisation by optimisation, beside the floor and other figures.

    ``document`` is what ``workbench bench decode`` writes (``kernels/rank/waterfall.py``); each bar
    has everything above it, from the fused chain on a step of its own. The pale part is what the
    bar saves of the one above it; where that has no time, nobody knows. ``others`` are documents of
    other runs, whose whole steps are drawn with their own floor (FP8 experts: ``recorded_fp8()``),
    or bars ``(label, ms, whose)`` and ``(label, ms, whose, floor ms)``. Of
    the full model's rank the engine's recorded times and the published pair follow, which are of
    other runs: the published ones of another machine with its all-reduces, on a ground of their
    own.

    Raises:
        WorkbenchError: the document has no variant, or a field is not what it has to be.
    """
    document = checked(document)
    others = [checked(one) if isinstance(one, Mapping) else checked_bar(one) for one in others]
    variants = variant_rows(document)
    rows = [*variants, *other_rows(document, others)]
    floor = document.get("floor_milliseconds")
    where = places(rows, _HEAD)
    fig = theme.figure(
        _title(variants),
        described(document, "each bar has all above it; pale: what it saves of the bar above"),
        **size(where, ("ms", "saved", "× floor")),
    )
    columns = [
        ("ms", ["–" if r.milliseconds is None else f"{r.milliseconds:.2f}" for r in rows]),
        ("saved", ["" if r.saved is None else signed(r.saved, 2).lstrip("+") for r in rows]),
        ("× floor", ["" if not r.of_floor else times(r.of_floor) for r in rows]),
    ]
    most = max([1e-3, *(r.milliseconds or 0.0 for r in rows)]) * _ROOM
    _ground(fig, where)
    fig.add_trace(_saved(rows, where))
    draw(
        fig, rows, where, columns, head=_HEAD, span=(0.0, most), title="ms a step",
        values=[row.milliseconds for row in rows],
    )  # fmt: skip
    _floors(fig, rows, where)
    lines = engine_figures(document)
    end = where.ends[APART][0] if APART in where.ends else where.height
    if floor:
        _line(fig, float(floor), (10, end), f"floor {floor:.2f} ms", "dot")
    for label, one in lines[:1]:
        name = label.partition(" ")[0]
        _line(fig, one.value, (26, end), f"{name} {one.value:.2f} ms", "dash")
    return View(figure=fig, text=_text(document, rows))


def rank_leave_one_out(document: Mapping[str, Any]) -> View:
    """What the chain of single operations costs when one optimisation alone is left out.

    A bar to the right is slower without it, one to the left faster.

    Raises:
        WorkbenchError: the document was made without it, timed none of them, or a field is not
            what it has to be.
    """
    document = checked(document)
    parts = document.get("leave_one_out") or {}
    if not parts:
        raise WorkbenchError(
            "this run did not leave optimisations out one at a time; run `workbench bench decode` "
            "with all variants and without --no-leave-one-out"
        )
    # Older documents kept the verdict of the whole chain only.
    parts = {name: {"passed": True} | part for name, part in parts.items()}
    costs = {name: part.get("costs") if timed(part) else None for name, part in parts.items()}
    if all(cost is None for cost in costs.values()):
        raise WorkbenchError("this run timed none of them; run `workbench bench decode` on a GPU")
    rows, values = [], []
    variants = document.get("variants") or {}
    looks = {name: look(variants.get(name, {}) | {"forms": True}) for name in parts}

    def order(name: str) -> tuple[int, float]:
        cost = costs[name]
        return list(LOOKS).index(looks[name]), np.inf if cost is None else -cost

    for name in sorted(parts, key=order):
        part, variant = parts[name], variants.get(name, {})
        right = costs[name] is not None
        rows.append(
            Row(
                name=str(variant.get("title", name)), look=looks[name],
                source=variant_source(document), whence=whence(document),
                milliseconds=part["milliseconds"] if right else None,
                low=part.get("low") if right else None, high=part.get("high") if right else None,
                why="" if right else reason(part),
            )
        )  # fmt: skip
        values.append(costs[name])
    whole = variants.get("products", {}).get("milliseconds")
    base = "the chain that has all of them" + (f" ({whole:.2f} ms)" if whole else "")
    where = places(rows, _NARROW)
    fig = theme.figure(
        "A step with one optimisation alone left out",
        described(
            document,
            f"slower than {base}",
            "they share what they save: these do not add up to the waterfall",
        ),
        **size(where, ("ms", "slower by")),
    )
    drawn = [value for value in values if value is not None]
    low, high = min(0.0, *drawn), max(0.0, *drawn)
    columns = [
        ("ms", ["–" if r.milliseconds is None else f"{r.milliseconds:.2f}" for r in rows]),
        ("slower by", ["" if value is None else signed(value, 2) for value in values]),
    ]
    draw(
        fig, rows, where, columns, head=_NARROW, span=(low * _ROOM, high * _ROOM or 1e-3),
        values=values, title="ms a step slower without it",
    )  # fmt: skip
    fig.add_vline(x=0, line={"color": theme.NEUTRAL, "width": 1})
    wide = max(len(row.name) for row in rows)
    lines = [f"without one alone, against {base}; {source(document)}; {document.get('note', '')}"]
    for row, value in zip(rows, values, strict=True):
        said = row.why if value is None else f"{signed(value, 2):>6} ms"
        lines.append(f"{row.name:<{wide}}  {said}")
    return View(figure=fig, text="\n".join([*lines, "they share what they save: no sum is meant"]))


def _title(variants: Sequence[Row]) -> str:
    """The step, from its first bar to its fastest one."""
    found = [row.milliseconds for row in variants if row.milliseconds is not None]
    if variants[0].milliseconds is None or min(found) == found[0]:
        return "A decode step of one rank"
    return f"A decode step of one rank: {found[0]:.2f} → {min(found):.2f} ms"


def _saved(rows: Sequence[Row], where: Places) -> go.Bar:
    """From each bar's end to that of the bar above, where it is shorter."""
    some = [(row, y) for row, y in zip(rows, where.rows, strict=True) if (row.saved or 0) > 0]
    return go.Bar(
        x=np.array([row.saved for row, _ in some], np.float32),
        base=[round(row.milliseconds or 0.0, 4) for row, _ in some],  # plotly does not pack it
        y=np.array([y for _, y in some], np.float32),
        width=8, name="saved", hoverinfo="skip", hovertemplate="",
        marker={"color": theme.rgba(theme.NEUTRAL, 0.18),
                "line": {"color": theme.rgba(theme.NEUTRAL, 0.45), "width": 1}},
    )  # fmt: skip


def _ground(fig: go.Figure, where: Places) -> None:
    """Behind what is of another machine."""
    if APART in where.ends:
        low, high = where.ends[APART]
        fig.add_shape(
            type="rect", xref="paper", x0=0, x1=1, y0=low + 2, y1=high, layer="below",
            line={"width": 0}, fillcolor=theme.rgba(theme.NEUTRAL, 0.12),
        )  # fmt: skip


def _floors(fig: go.Figure, rows: Sequence[Row], where: Places) -> None:
    """A mark in the rows whose floor is not the document's."""
    own = [(row.floor, y) for row, y in zip(rows, where.rows, strict=True) if row.floor]
    if own:
        fig.add_trace(
            go.Scatter(
                x=[x for x, _ in own], y=[y for _, y in own], mode="markers", name="its own floor",
                marker={"symbol": "line-ns-open", "size": 22, "color": theme.NEUTRAL,
                        "line": {"width": 2}},
                hovertemplate="its own floor: %{x:.2f} ms<extra></extra>",
            )
        )  # fmt: skip


def _line(fig: go.Figure, x: float, span: tuple[float, float], text: str, dash: str) -> None:
    """A line across the bars, named at its top."""
    fig.add_shape(
        type="line", x0=x, x1=x, y0=span[0] - 7, y1=span[1],
        line={"color": theme.NEUTRAL, "width": 1.5, "dash": dash},
    )  # fmt: skip
    fig.add_annotation(text=theme.ink(text), x=x, xref="x", xshift=3, y=span[0] - 1)


def times(ratio: float) -> str:
    """How many times the floor, of the fraction ``floor / time``."""
    many = 1 / ratio
    return f"{many:.2f}" if many < 100 else f"{many:,.0f}"


def _text(document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """As in the figure: a heading, with the source of the bars below it, and a line each."""
    wide = max(len(row.name) for row in rows)
    lines = [described(document)]
    floor = document.get("floor_milliseconds")
    if floor:
        lines.append(f"{'floor':<{wide}} {floor:6.2f} ms")
    for (kind, whose), run in groupby(rows, key=lambda row: (row.look, row.source)):
        lines.append(": ".join(filter(None, (LOOKS[kind][0], whose))))
        for row in run:
            said = row.why
            if row.milliseconds is not None:
                saved = "" if row.saved is None else f"saved {signed(row.saved, 2).lstrip('+')}"
                of_floor = f"{times(row.of_floor)} × floor" if row.of_floor else ""
                said = f"{row.milliseconds:6.2f} ms  {saved:<11} {of_floor}".rstrip()
            lines.append(f"{row.name:<{wide}} {said}")
    return "\n".join(lines)
