"""A step's modelled time, operation by operation, and what limits each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.kernels.roofline import Limit
from workbench.model.asked import SizingError
from workbench.model.step_values import Operation, StepTime
from workbench.views import theme
from workbench.views.numbers import plural
from workbench.views.view import View

# name -> the operations in it, colour
_KINDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "experts": (("experts", "router"), theme.SPARSE),
    "dense MLPs": (("dense_mlp",), theme.DENSE),
    "full attention": (("attention_full",), theme.FULL),
    "sliding attention": (("attention_sliding",), theme.SLIDING),
    "projections": (("qkvg_projection", "o_proj", "kv_write"), theme.NEUTRAL),
    "communication": (("all_reduce", "all_to_all", "logits_gather", "draft_all_reduce"),
                      theme.HEAT),
    "drafter": ((), theme.DRAFTER),
    "norms, head": (("norms", "head", "embedding"), theme.NEUTRAL),
    "others": ((), theme.NEUTRAL),
}  # fmt: skip
_PATTERNS: Mapping[Limit, str] = {"memory": "", "compute": "/", "wire": "x"}
_FILLS: Mapping[Limit, str] = {
    "memory": "memory (plain)", "compute": "arithmetic (hatched)", "wire": "NVLink (crossed)",
}  # fmt: skip
_LIMIT_NAMES: Mapping[Limit, str] = {
    "memory": "limited by memory",
    "compute": "limited by arithmetic",
    "wire": "limited by NVLink",
}
_SHORT = {
    "attention_full": "full attention",
    "attention_sliding": "sliding",
    "qkvg_projection": "QKV, gate",
    "o_proj": "output",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "dense_mlp": "dense",
}
_OPACITY, _PALE = 0.6, 0.2
_PALE_KINDS = ("norms, head", "others")
# px: above the legend, a row of it, below it, below the bars
_ABOVE, _LEGEND, _UNDER, _BELOW = theme.HEADING, 19, 22, 52
_ENTRIES: Mapping[str, Any] = {
    "traceorder": "normal", "entrywidth": 100, "itemclick": False, "itemdoubleclick": False,
}  # fmt: skip
_SHARED: Mapping[str, Any] = {
    "line": {"width": 1, "color": theme.LINE},
    "pattern": {"solidity": 0.35, "size": 6, "fillmode": "replace"},
}
# Sizes are those of the narrowest page, of 1000 px with JupyterLab's side bar.
_IN_A_ROW = 3  # entries of the legend
_LEFT, _RIGHT = 164, 16  # px beside the bars
_NAME = 26  # letters of a line beside a bar
_LINE, _ROW = 14, 50  # px of such a line, and of a bar at least
_PX = 360  # px of the axis: for which names fit
_LETTER = 6.2  # px of a letter on a bar
_DIAMOND = 11  # px
_ROOM = 1.28  # of the longest bar, so that its time stands beside it
_SMALLEST = 0.01  # share of a step from which an operation has a line of its own in the text


def step_breakdown(*step_times: StepTime) -> View:
    """One stacked bar a step: each operation's time, hatched by what limits it.

    Step times are those of ``decode_step``, ``verify_step``, ``prefill_step`` and their like. The
    bar is the sum, none of the operations overlapping; the diamond is the floor, with memory,
    arithmetic and communication wholly overlapped.

    Raises:
        SizingError: no step.
    """
    if not step_times:
        raise SizingError("give one or more step times, those of decode_step(...) and its like")
    small = _small(step_times)
    kinds = {kind: names for kind in _KINDS if (names := _names(kind, step_times, small))}
    rows = list(range(len(step_times)))
    limits = {op.bound.limit for step in step_times for op in step.operations}
    fills = ", ".join(words for limit, words in _FILLS.items() if limit in limits)
    labels = [_label(step, step_times) for step in step_times]
    height = max(_ROW, *(_LINE * (label.count("<br>") + 1) + 12 for label in labels))
    top = _ABOVE + _LEGEND * -(-(len(kinds) + bool(small)) // _IN_A_ROW) + _UNDER
    floors = [1e3 * s.overlapped_seconds for s in step_times]
    end = max(s.milliseconds for s in step_times) * _ROOM
    fig = theme.figure(
        "What a step spends its time on",
        f"modelled, a roofline with nothing fitted: {_shared(step_times)} · bar: all operations "
        f"added up; diamond: the floor, all overlapped · limited by {fills}",
        height=top + _BELOW + height * len(rows),
        legend_under_title=True,
        margin={"l": _LEFT, "r": _RIGHT, "t": top, "b": _BELOW},
        barmode="stack",
        bargap=0.34,
        legend=_ENTRIES,
    )
    # What all pieces share is written once, not with each of two dozen traces.
    fig.layout.template.data.bar = [go.Bar(marker=_SHARED, hoverinfo="text")]
    words: dict[str, list[Any]] = {"x": [], "y": [], "text": []}
    starts = [0.0] * len(rows)
    covered = (_DIAMOND / 2 + 2) / _PX * end  # by a diamond and its edge, on each side, in ms

    def add(kind: str, short: str, trace: go.Bar, lengths: Sequence[float]) -> None:
        fig.add_trace(trace)
        for row, length in enumerate(lengths):
            low, high = _free(starts[row], starts[row] + length, floors[row], covered)
            if (high - low) / end * _PX > _LETTER * (len(short) + 1):
                words["x"].append((low + high) / 2)
                words["y"].append(row)
                words["text"].append(theme.ink(short))
            starts[row] += length

    for kind, operations in kinds.items():
        for name in operations:
            found = [_operation(step, name) for step in step_times]
            lengths = [1e3 * op.bound.seconds if op else 0.0 for op in found]
            add(kind, _SHORT.get(name, name.replace("_", " ")),
                _piece(name, kind, found, lengths, rows), lengths)  # fmt: skip
    if small:
        kinds["others"] = sorted(small)
        rest = [[op for op in step.operations if op.name in small] for step in step_times]
        lengths = [1e3 * sum(op.bound.seconds for op in some) for some in rest]
        add("others", "others", _others(rest, lengths, rows), lengths)
    fig.add_trace(
        go.Scatter(**words, mode="text", textfont={"size": theme.SMALL}, showlegend=False,
                   hoverinfo="skip")
    )  # fmt: skip
    fig.add_trace(_floors(step_times, rows))
    fig.add_trace(
        go.Scatter(
            x=starts,
            y=rows,
            mode="text",
            text=[theme.ink(f"\u2003<b>{_ms(s.seconds)}</b>") for s in step_times],
            textposition="middle right",
            textfont={"size": theme.TEXT},
            showlegend=False,
            hoverinfo="skip",
        )
    )
    for trace in _legend(kinds):
        fig.add_trace(trace)
    fig.update_layout(
        xaxis={"title": {"text": theme.ink("ms a step on one GPU")}, "range": [0, end]},
        yaxis={
            "tickvals": rows,
            "ticktext": labels,
            "range": [len(rows) - 0.5, -0.5],
            "showgrid": False,
        },
    )
    return View(figure=fig, text="\n\n".join(map(_text, step_times)))


def _small(steps: Sequence[StepTime]) -> set[str]:
    """Operations that take less than 1 % of every step: one piece holds them all."""
    most: dict[str, float] = {}
    for step in steps:
        for op in step.operations:
            most[op.name] = max(op.share, most.get(op.name, 0.0))
    return {name for name, share in most.items() if share < _SMALLEST}


def _names(kind: str, steps: Sequence[StepTime], small: set[str]) -> list[str]:
    """Operations of a kind that some step has, in the order of the kind, then of the steps."""
    every = dict.fromkeys(op.name for step in steps for op in step.operations)
    mine = [name for name in every if name not in small and _kind(name) == kind]
    order = {name: place for place, name in enumerate(_KINDS[kind][0])}
    return sorted(mine, key=lambda name: order.get(name, len(order)))


def _kind(name: str) -> str:
    for kind, (names, _) in _KINDS.items():
        if name in names:
            return kind
    return "drafter" if name.startswith("draft_") else "others"


def _free(low: float, high: float, floor: float, covered: float) -> tuple[float, float]:
    """The part of a piece that is wider, where a diamond lies on it: its words go there.

    The diamond covers ``covered`` on both sides of ``floor``.
    """
    if floor + covered <= low or floor - covered >= high:
        return low, high
    before, after = (low, floor - covered), (floor + covered, high)
    return before if before[1] - before[0] > after[1] - after[0] else after


def _operation(step: StepTime, name: str) -> Operation | None:
    return next((op for op in step.operations if op.name == name), None)


def _marker(kind: str, shape: Any) -> dict[str, Any]:
    """Fill of a piece; ``shape`` is the hatching of its limit, one for all steps or one each."""
    color = _KINDS[kind][1] if kind in _KINDS else theme.NEUTRAL
    opacity = _PALE if kind in _PALE_KINDS else _OPACITY
    marker: dict[str, Any] = {"color": theme.rgba(color, opacity)}
    if any(shape):
        marker["pattern"] = {"shape": shape, "fgcolor": color, "bgcolor": theme.rgba(color, 0.25)}
    return marker


def _piece(
    name: str,
    kind: str,
    found: Sequence[Operation | None],
    lengths: Sequence[float],
    rows: Sequence[int],
) -> go.Bar:
    return go.Bar(
        orientation="h",
        name=name,
        x=[round(length, 6) for length in lengths],  # to a nanosecond
        y=rows,
        marker=_marker(kind, [_PATTERNS[op.bound.limit] if op else "" for op in found]),
        hovertext=[_hover(op) if op else "" for op in found],
        showlegend=False,
    )


def _others(
    rest: Sequence[Sequence[Operation]], lengths: Sequence[float], rows: Sequence[int]
) -> go.Bar:
    return go.Bar(
        orientation="h",
        name="others",
        x=[round(length, 6) for length in lengths],  # to a nanosecond
        y=rows,
        marker=_marker("others", "."),
        hovertext=[
            "<br>".join(
                f"{op.name}: {_ms(op.bound.seconds)}, {_LIMIT_NAMES[op.bound.limit]}" for op in some
            )
            for some in rest
        ],
        showlegend=False,
    )


def _hover(op: Operation) -> str:
    w, b = op.work, op.bound
    lines = [f"<b>{w.name}</b> × {w.count}: {_ms(b.seconds)}, {op.share:.1%} of the step"]
    if w.bytes:
        lines.append(f"memory {w.bytes / 1e9:,.3f} GB, {_ms(b.memory_seconds)}")
    if w.flops:
        lines.append(f"arithmetic {w.flops / 1e12:,.3f} TFLOP in {w.math}, "
                     f"{_ms(b.compute_seconds)}")  # fmt: skip
    if w.wire_bytes:
        lines.append(f"NVLink {w.wire_bytes / 1e6:,.2f} MB, {_ms(b.wire_seconds)}")
    return "<br>".join([*lines, _LIMIT_NAMES[b.limit]])


def _floors(steps: Sequence[StepTime], rows: Sequence[int]) -> go.Scatter:
    return go.Scatter(
        x=[1e3 * s.overlapped_seconds for s in steps],
        y=rows,
        name=theme.ink("all overlapped"),
        mode="markers",
        marker={
            "symbol": "diamond",
            "size": _DIAMOND,
            "color": "#ffffff",
            "line": {"width": 2, "color": "#3a3a3a"},
        },
        hovertext=[
            f"everything overlapped: {_ms(s.overlapped_seconds)}<br>memory "
            f"{_ms(s.memory_seconds)}, arithmetic {_ms(s.compute_seconds)}, NVLink "
            f"{_ms(s.wire_seconds)}"
            for s in steps
        ],
        hoverinfo="text",
        showlegend=False,
    )


def _legend(kinds: Mapping[str, list[str]]) -> list[go.Bar]:
    """Entries of the legend, one a colour: traces that draw nothing else."""
    return [
        go.Bar(x=[None], y=[None], orientation="h", name=theme.ink(kind),
               marker=_marker(kind, "." * (kind == "others")))
        for kind in kinds
    ]  # fmt: skip


# -- words --------------------------------------------------------------------------------------


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f} ms"


def _conditions(step: StepTime) -> tuple[str, str]:
    s = step.settings
    return (
        f"{s.rates.label} at {s.rates.kind} rates",
        f"weights {s.precision.name}, KV {s.kv_dtype}",
    )


def _shared(steps: Sequence[StepTime]) -> str:
    """What all steps have in common; what they have not stands beside each bar."""
    columns = zip(*map(_conditions, steps), strict=True)
    return ", ".join(column[0] for column in columns if len(set(column)) == 1) or "see each bar"


def _label(step: StepTime, steps: Sequence[StepTime]) -> str:
    columns = list(zip(*map(_conditions, steps), strict=True))
    own = [c for c, column in zip(_conditions(step), columns, strict=True) if len(set(column)) > 1]
    what = theme.folded(step.what, _NAME)
    lines = [*what, *theme.folded(", ".join([step.settings.layout.name, *own]), _NAME)]
    return "<br>".join(
        theme.ink(theme.plain(line), faint=i >= len(what)) for i, line in enumerate(lines)
    )


def _text(step: StepTime) -> str:
    where, stored = _conditions(step)
    lines = [
        f"{step.what}, {step.settings.layout.name}, {stored}, {where}",
        f"modelled: {_ms(step.seconds)} in all, {_ms(step.overlapped_seconds)} if all overlapped; "
        f"{step.tokens / step.seconds:,.0f} tokens/s",
    ]
    ordered = sorted(step.operations, key=lambda op: -op.bound.seconds)
    for op in ordered:
        if op.share >= _SMALLEST:
            lines.append(
                f"  {op.name:<18}{_ms(op.bound.seconds):>11}{op.share:>7.0%}  "
                f"{_LIMIT_NAMES[op.bound.limit]}"
            )
    rest = [op for op in ordered if op.share < _SMALLEST]
    if rest:
        lines.append(
            f"  {plural(len(rest), 'other'):<18}{_ms(sum(op.bound.seconds for op in rest)):>11}"
            f"{sum(op.share for op in rest):>7.0%}"
        )
    return "\n".join(lines)
