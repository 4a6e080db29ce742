"""A GPU's memory as a bar: weights by part, workspace, KV cache, what is free, and the limits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from workbench.model.plan import Plan
from workbench.model.sizing import ENGINE
from workbench.views import theme
from workbench.views.kv_figures import PART_COLORS, PART_NAMES, PART_PATTERNS, PARTS
from workbench.views.kv_words import size
from workbench.views.numbers import plural
from workbench.views.pieces import WEIGHT_GROUPS, piece_marker
from workbench.views.view import View

_GIB = 2**30
ENTRY = 120  # px of a name in the legend: four stand in a row, on a narrow page two
ROW_OF_NAMES = 24  # px of a row of the legend
_ROW = 34  # px a bar
_PX = 440  # px of the axis on a narrow page, and of a letter on a bar: for which words fit
_LETTER = 5.9
_HALO = "0 0 3px var(--jp-layout-color0,rgba(128,128,128,0.4))"
_EDGE = 92  # px beside the axis for what a bar that is cut off comes to

_NAMES = {
    "experts": "expert weights",
    "dense MLPs": "dense MLP weights",
    "attention": "attention weights",
    "drafter": "drafter weights",
}
# name -> the parts of WeightSizing in it, colour, pattern
_WEIGHTS = {_NAMES.get(name, name): group for name, group in WEIGHT_GROUPS.items()}
_WORKSPACE, _FREE = "workspace", "free"
_SHORT = {
    "expert weights": "experts",
    "attention weights": "attention",
    "KV, full layers": "full KV",
    "KV, sliding layers": "sliding KV",
    _WORKSPACE: "workspace",
    _FREE: "free",
}


def kv_per_gpu(plans: Plan | Sequence[Plan]) -> View:
    """One bar a plan: what fills a GPU, up to the engine's budget and the GPU's memory.

    A KV cache that does not fit reaches over the budget line. All plans are of one model, and one
    kind of GPU gives one pair of lines; with several kinds each bar has its own.
    """
    plans = [plans] if isinstance(plans, Plan) else list(plans)
    first = plans[0]
    # A drafter's weights are one name more, which on a narrow page begins a row of its own.
    more = ROW_OF_NAMES if any(plan.kv.drafter is not None for plan in plans) else 0
    fig = theme.figure(
        f"One GPU's memory with {first.model}",
        f"{_load(plans)} · weights and KV cache exact by {ENGINE}'s accounting, "
        "workspace modelled, memory as torch or the driver reports it",
        height=240 + more + _ROW * len(plans),
        margin={"l": 140, "r": _EDGE if _cut_off(plans) else 16, "t": 168 + more, "b": 52},
        barmode="stack",
        bargap=0.3,
        legend={"y": 1, "yanchor": "bottom", "traceorder": "normal", "entrywidth": ENTRY},
    )
    for trace in memory_traces(plans):
        fig.add_trace(trace)
    fig.update_layout(**memory_axes(plans))
    return View(figure=fig, text="\n".join(map(_text, plans)))


def memory_traces(
    plans: Sequence[Plan], *, show_kv: bool = True, **on: Any
) -> list[go.BaseTraceType]:
    """The pieces of the bars in their order, then both limits; empty pieces are there, too."""
    values = memory_values(plans, show_kv=show_kv)
    traces: list[go.BaseTraceType] = []
    for name, color, pattern, opacity in _pieces():
        traces.append(
            go.Bar(
                **values[name],
                name=theme.ink(name),
                orientation="h",
                marker=piece_marker(color, pattern, opacity),
                hovertemplate=f"{_said(name)}<br>%{{x:,.3f}} GiB a GPU<extra></extra>",
                **on,
            )
        )
    for name, dash, width in (("engine's budget", "4px,3px", 2), ("memory", "solid", 3)):
        traces.append(
            go.Scatter(
                **values[name],
                name=theme.ink(name),
                mode="lines",
                line={"color": theme.NEUTRAL, "width": width, "dash": dash},
                hovertemplate=f"{name}<br>%{{x:,.2f}} GiB a GPU<extra></extra>",
                **on,
            )
        )
    # One trace for all words: text of the bars themselves would be measured piece by piece.
    traces.append(
        go.Scatter(
            **values["words"],
            mode="text",
            # Hatching behind the words is kept off them.
            textfont={"size": theme.SMALL, "shadow": ",".join([_HALO] * 4)},
            cliponaxis=False,
            showlegend=False,
            hoverinfo="skip",
            **on,
        )
    )
    return traces


def memory_values(plans: Sequence[Plan], *, show_kv: bool = True) -> dict[str, dict[str, Any]]:
    """Lengths in GiB and hovers of each piece, both limits, and words on what is wide enough."""
    rows = list(range(len(plans)))
    end = _end(plans)
    values: dict[str, dict[str, Any]] = {}
    words: dict[str, list[Any]] = {"x": [], "y": [], "text": [], "textposition": []}

    def write(x: float, row: int, text: str, position: str = "middle center") -> None:
        for key, value in (("x", x), ("y", row), ("text", text), ("textposition", position)):
            words[key].append(value)

    reached = [0.0 for _ in plans]
    for name, *_ in _pieces():
        counts = [_bytes(plan, name) for plan in plans]
        lengths = [count / _GIB for count in counts]
        values[name] = {
            "x": lengths,
            "y": rows,
            # What is free keeps its place in the legend, so that nothing else moves in it.
            "showlegend": name == _FREE or (any(counts) and (show_kv or not name.startswith("KV"))),
        }
        for row, length in zip(rows, lengths, strict=True):
            low, high = reached[row], min(reached[row] + length, end)
            reached[row] += length
            if name not in _SHORT or low >= high:
                continue
            limits = [plans[row].budget_bytes / _GIB, plans[row].memory_bytes / _GIB]
            low, high = _widest(low, high, limits)
            number = f"{length:,.1f}"
            for text in (f"{_SHORT[name]} {number}", number):  # the number alone where that fits
                if (high - low) / end * _PX > _LETTER * (len(text) + 1):
                    write((low + high) / 2, row, theme.ink(text))
                    break
    for row, length in enumerate(reached):
        if length > end:
            write(end, row, theme.ink(f"→ {length:,.0f} GiB"), "middle right")
    for name, field in (("engine's budget", "budget_bytes"), ("memory", "memory_bytes")):
        x: list[float | None] = []
        y: list[float | None] = []
        for row, plan in zip(rows, plans, strict=True):
            at = getattr(plan, field) / _GIB
            if x and x[-1] == at:  # the same GPU: one line through all its bars
                y[-1] = row + 0.5
                continue
            x += [None, at, at] if x else [at, at]
            y += [None, row - 0.5, row + 0.5] if y else [row - 0.5, row + 0.5]
        values[name] = {"x": x, "y": y}
    return values | {"words": words}


def memory_axes(plans: Sequence[Plan], across: str = "xaxis", up: str = "yaxis") -> dict[str, Any]:
    """Both axes; the first plan stands at the top."""
    return {
        across: {
            "title": {"text": theme.ink("GiB a GPU")},
            "range": [0, _end(plans)],
        },
        up: {
            "range": [len(plans) - 0.45, -0.55],
            "tickvals": list(range(len(plans))),
            "ticktext": [theme.ink(label) for label in _labels(plans)],
            "showgrid": False,
            "ticklabelstandoff": 6,
        },
    }


def _pieces() -> list[tuple[str, str, str, float]]:
    """Name, colour, pattern and opacity of every piece, from left to right."""
    weights = [(name, color, pattern, 0.6) for name, (_, color, pattern) in _WEIGHTS.items()]
    kv = [(f"KV, {PART_NAMES[p]}", PART_COLORS[p], PART_PATTERNS[p], 0.75) for p in PARTS]
    return [*weights, (_WORKSPACE, theme.NEUTRAL, "\\", 0.5), *kv, (_FREE, theme.NEUTRAL, "", 0.12)]


def _bytes(plan: Plan, name: str) -> int:
    if name in _WEIGHTS:
        return sum(plan.weights.per_gpu[part] for part in _WEIGHTS[name][0])
    if name == _WORKSPACE:
        return plan.workspace_bytes
    if name == _FREE:
        return max(0, plan.free_bytes)
    kv = plan.kv.per_gpu("admission")
    if name == f"KV, {PART_NAMES['padding']}":  # the pool's null block, too: it holds no token
        return kv.padding + plan.kv_bytes - kv.total
    part = next(p for p in PARTS if name == f"KV, {PART_NAMES[p]}")
    count: int = getattr(kv, part)
    return count


def _said(name: str) -> str:
    return f"{name} (modelled)" if name == _WORKSPACE else name


def _widest(low: float, high: float, limits: Sequence[float]) -> tuple[float, float]:
    """The widest part of a piece between the lines that cross it: its words go there."""
    edges = [low, *sorted(at for at in limits if low < at < high), high]
    return max(pairwise(edges), key=lambda part: part[1] - part[0])


def _used(plan: Plan) -> int:
    return plan.weights_bytes + plan.workspace_bytes + plan.kv_bytes


def _cut_off(plans: Sequence[Plan]) -> bool:
    """Whether a bar is longer than the axis."""
    return max(map(_used, plans)) / _GIB > _end(plans)


def _end(plans: Sequence[Plan]) -> float:
    """Where the axis ends: beyond every limit, and beyond what does not fit, within reason."""
    memory = max(plan.memory_bytes for plan in plans)
    used = max(map(_used, plans))
    # Far too much is cut off by the axis: the limit has to be seen more than the excess.
    return min(max(memory, used), 3 * memory) * 1.02 / _GIB


def _labels(plans: Sequence[Plan]) -> list[str]:
    """What tells the bars apart, escaped; loads that differ stand in a second line."""
    kinds, weights = {plan.gpu.name for plan in plans}, {plan.precision for plan in plans}
    loads = len(set(map(_asked, plans))) > 1
    return [
        theme.plain(
            (f"{p.gpu.name}, " if len(kinds) > 1 else "")
            + p.layout.name
            + (f", {p.precision.name}" if len(weights) > 1 else "")
        )
        + (f"<br>{theme.plain(_short_load(p))}" if loads else "")
        for p in plans
    ]


def _load(plans: Sequence[Plan]) -> str:
    """The load of all bars, for the subtitle."""
    loads = list(dict.fromkeys(map(_asked, plans)))
    return loads[0] if len(loads) == 1 else "sequences × tokens and KV dtype as at each bar"


def _asked(plan: Plan) -> str:
    s = plan.kv.settings
    return f"{plural(plan.sequences, 'sequence')} of {s.context:,} tokens, KV {s.kv_dtype.upper()}"


def _short_load(plan: Plan) -> str:
    s = plan.kv.settings
    return f"{plan.sequences:,} × {s.context:,}, {s.kv_dtype.upper()}"


def _text(plan: Plan) -> str:
    return (
        f"{plan.layout.gpus} x {plan.gpu.name}, {plan.layout.name}: weights "
        f"{size(plan.weights_bytes)}, workspace {size(plan.workspace_bytes)}, KV "
        f"{size(plan.kv_bytes)}, free {size(plan.free_bytes)} of {size(plan.budget_bytes)} a GPU"
    )
