"""One rank's decode step against the context, with its floor and the engine's times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log10
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.views import theme
from workbench.views.rank_documents import checked
from workbench.views.rank_sources import comparable, engine_contexts, experts, source
from workbench.views.view import View

_HEIGHT, _TOP, _BOTTOM, _LEGEND = 400, 104, 52, 19  # px; a line of the legend
# colour, dash, symbol of the first, second … line of ours
_LOOKS = (
    (theme.SPARSE, "solid", "diamond"),
    (theme.HEAT, "dashdot", "triangle-up"),
    (theme.DENSE, "longdash", "star"),
    (theme.FULL, "longdashdot", "cross"),
)
_NUMBER = theme.ink("%{y:.2f}")
_FLOOR = "floor: the bytes of weights and caches over the bandwidth"
_CLEAR = 0.1  # of the longest time: numbers below a line keep clear of its floor
_ALIKE = 0.03  # floors of the same bytes differ by less: the bandwidth is measured in each run


@dataclass(slots=True, kw_only=True)
class _Line:
    """A variant of one run; a point is context, ms, 10th and 90th percentile, floor in ms."""

    name: str
    what: str
    source: str
    note: str
    points: dict[int, tuple[float, float, float, float]] = field(default_factory=dict)


def rank_contexts(*documents: Mapping[str, Any]) -> View:
    """Milliseconds of a step by context, the floor of each below it.

    Of a document of ``workbench bench decode``: its own context, and those under ``contexts`` where
    it has them. A variant is drawn where it was timed at two contexts or more in one document, or
    in several of the same hardware, layers and types. A floor is the bytes of weights and caches
    over the bandwidth that its run measured; one line stands for all that are alike. Beside the
    full model's rank stand the engine's recorded times.

    Raises:
        WorkbenchError: no variant was timed at two contexts, or a field is not what it has to be.
    """
    documents = tuple(map(checked, documents))
    lines = _read(documents)
    if not lines:
        raise WorkbenchError(
            "no variant of the step was timed at two contexts here; run `workbench bench decode` "
            "with other values of --context and give all the documents"
        )
    engine = [(of, one) for of, one in engine_contexts() if any(map(comparable, documents))]
    whats = ", ".join(dict.fromkeys(line.what for line in lines))
    sources = [whats, *dict.fromkeys(line.source for line in lines)]
    notes = list(dict.fromkeys(line.note for line in lines if line.note))
    remark = ["vLLM 0.33: recorded on one H200, no all-reduce on one GPU, date not recorded"]
    fig = theme.figure(
        "A decode step against the context",
        " · ".join([*sources, *notes, _FLOOR, *(remark if engine else [])]),
        height=_HEIGHT + _LEGEND * (len(lines) - 1), legend_under_title=True,
        margin={"l": 56, "r": 28, "t": _TOP, "b": _BOTTOM},
    )  # fmt: skip
    most = max(
        [p[0] for line in lines for p in line.points.values()] + [e.value for _, e in engine]
    )
    # Numbers above the slowest line and below the fastest one: those between would meet others.
    beside = dict.fromkeys(range(len(lines)), "") | {len(lines) - 1: "top center"}
    if len(lines) > 1 and all(p[0] - p[3] > _CLEAR * most for p in lines[0].points.values()):
        beside[0] = "bottom center"
    for place, line in enumerate(lines):
        fig.add_trace(_measured(line, _LOOKS[place % len(_LOOKS)], beside[place]))
    floors = _floors(lines)
    for line in floors:
        color = theme.NEUTRAL if len(floors) == 1 else _LOOKS[lines.index(line) % len(_LOOKS)][0]
        fig.add_trace(_floor(line, color, alone=len(floors) == 1))
    if engine:
        whose = [word for _, one in engine for word in (one.where, *one.note.split("; "))]
        fig.add_trace(
            go.Scatter(
                x=[of for of, _ in engine], y=[one.value for _, one in engine],
                name=theme.ink("vLLM 0.33, BF16"), mode="lines+markers+text",
                texttemplate=_NUMBER, textposition="top center",
                line={"color": theme.NEUTRAL, "dash": "dash", "width": 1.5},
                marker={"symbol": "square-open", "size": 8},
                meta="<br>".join(dict.fromkeys(whose)),
                hovertemplate="vLLM at %{x:,} tokens: %{y:.2f} ms<br>%{meta}<extra></extra>",
                cliponaxis=False,
            )
        )  # fmt: skip
    every = sorted({c for line in lines for c in line.points})
    low, high = log10(every[0]), log10(every[-1])
    pad = max(0.04 * (high - low), 0.02)
    ticks = _ticks(every)
    fig.update_layout(
        xaxis={"type": "log", "range": [low - pad, high + pad], "fixedrange": True,
               "title": {"text": theme.ink("tokens of context")},
               "tickvals": ticks, "ticktext": [_tokens(c) for c in ticks]},
        yaxis={"range": [0, most * 1.16], "fixedrange": True,
               "title": {"text": theme.ink("ms a step")}},
    )  # fmt: skip
    return View(figure=fig, text=_text(lines, engine, sources, notes))


def _measured(line: _Line, how: tuple[str, str, str], numbers: str) -> go.Scatter:
    """One of our lines, its numbers at ``numbers`` of the points (none where that is empty)."""
    color, dash, symbol = how
    text = {"texttemplate": _NUMBER, "textposition": numbers} if numbers else {}
    contexts = sorted(line.points)
    values = np.array([line.points[c] for c in contexts], np.float32)
    return go.Scatter(
        x=np.array(contexts, np.int32), y=values[:, 0], name=theme.ink(theme.plain(line.name)),
        mode="lines+markers+text" if numbers else "lines+markers", cliponaxis=False, **text,
        line={"color": color, "dash": dash, "width": 2}, marker={"symbol": symbol, "size": 9},
        customdata=np.column_stack([values[:, 1:], values[:, 0] / values[:, 3]]),
        meta=theme.plain(line.source),
        hovertemplate="%{x:,} tokens: %{y:.3f} ms (%{customdata[0]:.3f} to %{customdata[1]:.3f}), "
        "%{customdata[3]:.2f} × its floor of %{customdata[2]:.2f} ms<br>%{meta}<extra></extra>",
    )  # fmt: skip


def _floor(line: _Line, color: str, *, alone: bool) -> go.Scatter:
    contexts = sorted(line.points)
    return go.Scatter(
        x=np.array(contexts, np.int32),
        y=np.array([line.points[c][3] for c in contexts], np.float32),
        name=theme.ink("floor" if alone else f"floor of {theme.plain(line.name)}"),
        mode="lines+markers+text" if alone else "lines+markers",
        texttemplate=_NUMBER, textposition="bottom center", cliponaxis=False,
        line={"color": color, "dash": "dot", "width": 1.5},
        marker={"symbol": "line-ew-open", "size": 9, "line": {"width": 2}},
        hovertemplate="floor at %{x:,} tokens: %{y:.2f} ms<extra></extra>",
    )  # fmt: skip


def _floors(lines: Sequence[_Line]) -> list[_Line]:
    """One line for each floor that is not another's, the one of most contexts for all alike."""
    kept: list[_Line] = []
    for line in sorted(lines, key=lambda line: -len(line.points)):
        shared = [(one, set(one.points) & set(line.points)) for one in kept]
        if not any(
            at and all(abs(one.points[c][3] / line.points[c][3] - 1) < _ALIKE for c in at)
            for one, at in shared
        ):
            kept.append(line)
    return kept


def _read(documents: Sequence[Mapping[str, Any]]) -> list[_Line]:
    """Lines of all variants with two contexts or more, the fastest last one first."""
    found: dict[tuple[str, ...], _Line] = {}
    for document in documents:
        of = source(document)
        what = f"one TP{document.get('tp')} rank of {document.get('model') or 'a model'}"
        words = ("hardware", "model", "tp", "layers", "batch", "dtype")
        key = (*(str(document.get(word)) for word in words), experts(document))
        titles = {n: str(r.get("title", n)) for n, r in document.get("variants", {}).items()}
        note = str(document.get("note") or "").partition(":")[0]
        kept = experts(document).partition(" (")[0]
        for row in (document, *(document.get("contexts") or [])):
            if row.get("context") is None:
                continue  # at a context that it does not say
            for name, one in (row.get("variants") or {}).items():
                point = _point(one, row.get("floor_milliseconds"))
                if point is None:
                    continue
                title = titles.get(name, name)
                title += f", {kept} experts" if kept else ""
                line = found.setdefault(
                    (name, *key), _Line(name=title, what=what, source=of, note=note)
                )  # fmt: skip
                if of not in line.source:
                    line.source += f"; {of}"
                line.points[int(row["context"])] = point
    several = [line for line in found.values() if len(line.points) > 1]
    return sorted(several, key=lambda line: line.points[max(line.points)][0])


def _point(one: Mapping[str, Any], floor: float | None) -> tuple[float, float, float, float] | None:
    """A row's times, where it is one of a variant that is right."""
    spent = one.get("milliseconds")
    if spent is None or floor is None or one.get("failures") or not one.get("passed", True):
        return None
    low, high = (spent if one.get(end) is None else one[end] for end in ("low", "high"))
    return float(spent), float(low), float(high), float(floor)


def _ticks(contexts: Sequence[int]) -> list[int]:
    """Contexts, without those whose words would meet the one before."""
    kept: list[int] = []
    span = log10(contexts[-1] / contexts[0])
    for context in contexts:
        if not kept or log10(context / kept[-1]) > 0.07 * span:
            kept.append(context)
    return kept


def _tokens(count: int) -> str:
    """4096 as 4k; a full context less the room for a few steps counts as the full one."""
    if count >= 1_000_000:
        return f"{count / 2**20:.2g}M"
    return f"{count / 1024:.3g}k" if count >= 1024 else str(count)


def _text(
    lines: Sequence[_Line], engine: Sequence[tuple[int, Any]], sources: Sequence[str],
    notes: Sequence[str],
) -> str:  # fmt: skip
    said = ["; ".join([*sources, *notes])]
    for line in lines:
        said.append(f"{line.name}:")
        for context in sorted(line.points):
            spent, _, _, floor = line.points[context]
            said.append(
                f"{context:>11,} tokens  {spent:6.2f} ms  floor {floor:5.2f} ms  "
                f"{spent / floor:.2f} × floor"
            )
    if engine:
        said.append("vLLM 0.33, recorded on one H200, no all-reduce on one GPU:")
        said += [f"{_tokens(of):>11} tokens  {one.value:6.2f} ms" for of, one in engine]
    return "\n".join(said)
