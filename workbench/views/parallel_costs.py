"""What an all-reduce costs a call, and a group's step by batch and context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.views import theme
from workbench.views.numbers import signed
from workbench.views.parallel_documents import NOTE, checked, described, group, runs
from workbench.views.rank_rows import timed
from workbench.views.view import View

# field -> name, colour, dash, symbol
_WAYS = {
    "nccl_us": ("NCCL", theme.NEUTRAL, "dash", "square-open"),
    "torch_one_shot_us": ("torch, one shot over symmetric memory", theme.SLIDING, "longdash",
                          "circle-open"),
    "exchange_us": ("this workbench's exchange", theme.SPARSE, "solid", "diamond"),
}  # fmt: skip
# colour, symbol of the first, second … context
_CONTEXTS = (
    (theme.SPARSE, "diamond"),
    (theme.FULL, "triangle-up"),
    (theme.SLIDING, "square"),
    (theme.DENSE, "star"),
    (theme.HEAT, "cross"),
)
_HEIGHT, _TOP, _BOTTOM, _LEGEND = 400, 104, 52, 19
_THICK = {"line": {"width": 2}}  # of markers without a fill
_MARGIN = {"l": 60, "r": 28, "b": _BOTTOM}


def parallel_calls(document: Mapping[str, Any]) -> View:
    """Microseconds of one all-reduce of ``[rows, hidden]``, by rows, each way that was measured.

    ``document`` is what ``workbench bench decode --gpus N`` writes, or ``recorded_group()``. Both
    axes are logarithmic.

    Raises:
        WorkbenchError: no call was timed, or a field is not what it has to be.
    """
    document = checked(document)
    rows = sorted(document.get("calls") or [], key=lambda row: int(row["rows"]))
    ways = {
        field: {row["rows"]: float(row[field]) for row in rows if row.get(field) is not None}
        for field in _WAYS
    }
    ways = {field: points for field, points in ways.items() if points}
    if not ways:
        raise WorkbenchError(
            "this document has no times of single all-reduces; run `workbench bench decode --gpus "
            "N` on GPUs"
        )
    fig = theme.figure(
        f"One all-reduce, {group(document)}",
        described(
            document, "a call inside a CUDA graph" * (document.get("device") == "cuda"), note=NOTE
        ),
        height=_HEIGHT, legend_under_title=True, margin=_MARGIN | {"t": _TOP},
    )  # fmt: skip
    for field, points in ways.items():
        name, color, dash, symbol = _WAYS[field]
        fig.add_trace(
            go.Scatter(
                x=np.array([*points], np.int32), y=np.array([*points.values()], np.float32),
                name=theme.ink(name), mode="lines+markers", cliponaxis=False,
                line={"color": color, "dash": dash, "width": 2},
                marker={"symbol": symbol, "size": 9}, meta=name,
                hovertemplate="%{meta}, rows %{x:,}: %{y:.2f} µs<extra></extra>",
            )
        )  # fmt: skip
    every = [row["rows"] for row in rows]
    times = [value for points in ways.values() for value in points.values()]
    fig.update_layout(
        xaxis=_logarithmic(every, "rows of the all-reduce (tokens in flight)"),
        yaxis=_spent(times, "µs a call"),
    )
    wide = max(len(_WAYS[field][0]) for field in ways)
    lines = [described(document), f"{'µs a call, by rows':<{wide}} " + _cells(every, ",")]
    for field, points in ways.items():
        cells = [points.get(count) for count in every]
        lines.append(f"{_WAYS[field][0]:<{wide}} " + _cells(cells, ",.2f"))
    return View(figure=fig, text="\n".join(lines))


def parallel_load(document: Mapping[str, Any]) -> View:
    """Milliseconds of the fastest step by batch, a line a context, with and without all-reduces.

    ``document`` is what ``workbench bench decode --gpus N`` writes, or ``recorded_group()``. Both
    axes are logarithmic. Which step is the fastest may differ from point to point; the hover and
    the text name it. Without: the one-rank step of the same stage, all ranks at once. The floor is
    that of one rank's bytes.

    Raises:
        WorkbenchError: nothing was timed, or a field is not what it has to be.
    """
    document = checked(document)
    found: dict[int, list[tuple[int, str, Mapping[str, Any], float | None]]] = {}
    for run in runs(document):
        right = {name: row for name, row in run["variants"].items() if timed(row)}
        if right:
            name = min(right, key=lambda one: float(right[one]["milliseconds"]))
            point = (run["batch"], name, right[name], run.get("floor_milliseconds"))
            found.setdefault(run["context"], []).append(point)
    if not found:
        raise WorkbenchError(
            "no step of this document was timed; run `workbench bench decode --gpus N` on GPUs"
        )
    absent = "; ".join(document.get("left_out") or ())
    absent = f"left out, the text says why: {absent}" if absent else ""
    fig = theme.figure(
        f"The fastest decode step by batch, {group(document)}",
        described(document, "dotted: one rank's bytes over the bandwidth", absent, note=NOTE),
        height=_HEIGHT + _LEGEND * (2 * len(found) - 2), legend_under_title=True,
        margin=_MARGIN | {"t": _TOP + _LEGEND * (2 * len(found) - 2)},
    )  # fmt: skip
    times: list[float] = []
    for place, (context, points) in enumerate(sorted(found.items())):
        points.sort(key=lambda point: point[0])
        look = _CONTEXTS[place % len(_CONTEXTS)]
        for trace in _lines(context, points, look, floor_named=place == 0):
            fig.add_trace(trace)
            times += trace.y.tolist()
    batches = sorted({batch for points in found.values() for batch, *_ in points})
    # A share of communication has one height at every batch.
    fig.update_layout(
        xaxis=_logarithmic(batches, "sequences in the batch"), yaxis=_spent(times, "ms a step")
    )
    return View(figure=fig, text=_said(document, found))


def _lines(
    context: int,
    points: Sequence[tuple[int, str, Mapping[str, Any], float | None]],
    look: tuple[str, str],
    *,
    floor_named: bool,
) -> list[go.Scatter]:
    """Of one context: with all-reduces, without, and the floor."""
    color, symbol = look
    named = f"{context:,} tokens of context"
    made = []
    for kind in ("with", "without", "floor"):
        some = []
        for batch, name, row, floor in points:
            value = floor
            if kind != "floor":
                value = row["milliseconds"] if kind == "with" else _without(row)
                name = str(row.get("title", name))
            if value is not None:
                some.append((batch, float(value), theme.plain(name)))
        if not some:
            continue
        dash, mark = {"with": ("solid", symbol), "without": ("dash", f"{symbol}-open"),
                      "floor": ("dot", "line-ew-open")}[kind]  # fmt: skip
        label = {"with": named, "without": f"{named}, without all-reduces", "floor": "floor"}[kind]
        made.append(
            go.Scatter(
                x=np.array([batch for batch, *_ in some], np.int32),
                y=np.array([value for _, value, _ in some], np.float32),
                name=theme.ink(label), mode="lines+markers", cliponaxis=False,
                showlegend=kind != "floor" or floor_named,
                legendrank=1001 if kind == "floor" else None,  # behind all others
                line={"color": color, "dash": dash, "width": 1.5 if kind == "floor" else 2},
                marker={"symbol": mark, "size": 9} | ({} if kind == "with" else _THICK),
                customdata=[name for *_, name in some] if kind == "with" else None,
                meta=f"floor, {named}" if kind == "floor" else label,
                hovertemplate="%{meta}, batch %{x:,}: %{y:.2f} ms"
                + "<br>%{customdata}" * (kind == "with") + "<extra></extra>",
            )
        )  # fmt: skip
    return made


def _without(row: Mapping[str, Any]) -> float | None:
    alone = row.get("without") or {}
    value = alone.get("milliseconds")
    return None if value is None else float(value)


def _said(
    document: Mapping[str, Any],
    found: Mapping[int, Sequence[tuple[int, str, Mapping[str, Any], float | None]]],
) -> str:
    lines = [described(document)]
    for context in sorted(found):
        lines.append(f"context {context:,}:")
        for batch, name, row, floor in found[context]:
            said = f"batch {batch:>5,}  {row['milliseconds']:7.2f} ms"
            part, alone = row.get("communication_milliseconds"), _without(row)
            if alone is not None:
                said += f"  without all-reduces {alone:7.2f} ms"
            if part is not None:
                said += f"  communication {signed(part, 2).lstrip('+')} ms"
            if floor:
                said += f"  floor {floor:.2f} ms"
            lines.append(f"{said}  ({row.get('title', name)})")
    for label, why in (document.get("left_out") or {}).items():
        lines.append(f"left out: {label}: {why}")
    return "\n".join(lines)


def _logarithmic(counts: Sequence[int], title: str) -> dict[str, Any]:
    low, high = log10(min(counts)), log10(max(counts))
    pad = max(0.04 * (high - low), 0.05)
    kept: list[int] = []
    for count in sorted(set(counts)):  # without those whose words would meet the one before
        if not kept or log10(count / kept[-1]) > 0.05 * (high - low):
            kept.append(count)
    return {"type": "log", "range": [low - pad, high + pad], "fixedrange": True,
            "tickvals": kept, "ticktext": [f"{count:,}" for count in kept],
            "title": {"text": theme.ink(title)}}  # fmt: skip


def _spent(times: Sequence[float], title: str) -> dict[str, Any]:
    low, high = min(times) / 1.3, max(times) * 1.3
    steps = [each for ten in range(-3, 7) for each in (10.0**ten, 2 * 10.0**ten, 5 * 10.0**ten)]
    ticks = [each for each in steps if low <= each <= high] or [min(times)]
    return {"type": "log", "range": [log10(low), log10(high)], "fixedrange": True,
            "tickvals": ticks, "ticktext": [f"{each:g}" for each in ticks],
            "title": {"text": theme.ink(title)}}  # fmt: skip


def _cells(values: Sequence[float | None], form: str) -> str:
    return " ".join(f"{'–' if value is None else format(value, form):>9}" for value in values)
