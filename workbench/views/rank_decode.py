"""One rank's decode step: the waterfall of its optimisations, and where its time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.model.reference_figures import reference
from workbench.views import theme
from workbench.views.numbers import plural
from workbench.views.view import View, preformatted

Bar = tuple[str, float, str]  # label, ms, whose

# origin -> (words, colour, pattern): told apart without colour as well.
_ORIGINS = {
    "start": ("plain torch", theme.NEUTRAL, ""),
    "published": ("published optimisation", theme.SLIDING, "/"),
    "engine": ("read off the engine's code", theme.DRAFTER, "."),
    "ours": ("this workbench's", theme.SPARSE, "x"),
    "other": ("for comparison, another run or machine", theme.NEUTRAL, "-"),
}
_ROW = 26  # px a bar
_ENGINE = ("graph replay, 1 token", "decode, batch 1, context 4k")
_PUBLISHED = (
    "decode, batch 1, before the optimisations",
    "decode, batch 1, after the optimisations",
)


def rank_waterfall(document: Mapping[str, Any], *, others: Sequence[Bar] = ()) -> View:
    """Milliseconds of a step, optimisation by optimisation, beside the floor and other figures.

    ``document`` is what ``workbench bench decode`` writes (``kernels/rank/waterfall.py``); each bar
    has everything above it, from the fused chain on a step of its own. ``others`` are further bars
    ``(label, ms, whose)``, drawn with the engine's recorded and the published figures, which are of
    other runs: the published ones of another machine with its all-reduces.

    Raises:
        WorkbenchError: the document has no variant.
    """
    rows = _rows(document)
    floor = float(document["floor_milliseconds"])
    compared = [*others, *_references()]
    note = str(document.get("note", ""))
    names = [row["title"] for row in rows] + [label for label, *_ in compared]
    fig = theme.figure(
        "A decode step of one rank, optimisation by optimisation",
        f"{_source(document)} · {note}",
        height=150 + _ROW * len(names),
        margin={"l": 300, "r": 24, "t": 128, "b": 52},
        legend_under_title=True, barmode="overlay", bargap=0.28,
    )  # fmt: skip
    for origin in _ORIGINS:
        _bars(fig, rows, compared, origin)
    _words(fig, rows, compared, floor)
    fig.add_vline(x=floor, line={"color": theme.NEUTRAL, "width": 1.5, "dash": "dot"})
    last = len(names) - 0.4
    fig.add_annotation(
        text=theme.ink(f"floor {floor:.2f} ms: bytes over the bandwidth of the run"), x=floor,
        y=last, xanchor="left", xshift=6, yanchor="top",
    )  # fmt: skip
    most = max([row["milliseconds"] or 0 for row in rows] + [ms for _, ms, _ in compared])
    fig.update_layout(
        xaxis={"title": {"text": theme.ink("ms a step")}, "range": [0, most * 1.3]},
        yaxis={"tickvals": list(range(len(names))), "showgrid": False,
               "ticktext": [theme.ink(theme.plain(name)) for name in names],
               "range": [len(names) + 0.1, -0.6]},
    )  # fmt: skip
    return View(figure=fig, text=_text(document, rows, compared, floor, note))


def rank_leave_one_out(document: Mapping[str, Any]) -> View:
    """What the chain of single operations costs when one optimisation alone is left out.

    Raises:
        WorkbenchError: the document was made without it.
    """
    parts = document.get("leave_one_out") or {}
    if not parts:
        raise WorkbenchError(
            "this run did not leave optimisations out one at a time; run `workbench bench decode` "
            "with all variants and without --no-leave-one-out"
        )
    variants = document["variants"]
    if all(p["costs"] is None for p in parts.values()):
        raise WorkbenchError("this run timed none of them; run `workbench bench decode` on a GPU")
    timed = [(float(p["costs"]), name) for name, p in parts.items() if p["costs"] is not None]
    costs, whole = sorted(timed, reverse=True), float(variants["products"]["milliseconds"])
    names = [str(variants.get(name, {}).get("title", name)) for _, name in costs]
    fig = theme.figure(
        "What a step costs without one of them",
        f"{_source(document)} · {document.get('note', '')} · over the chain's {whole:.2f} ms",
        height=130 + _ROW * len(costs), showlegend=False, bargap=0.28,
        margin={"l": 300, "r": 24, "t": 72, "b": 52},
    )  # fmt: skip
    values = np.array([cost for cost, _ in costs], np.float32)
    fig.add_trace(
        go.Bar(
            x=values, y=np.arange(len(costs), dtype=np.int16), orientation="h", hoverinfo="skip",
            marker={"color": theme.rgba(theme.FULL, 0.6),
                    "line": {"color": theme.FULL, "width": 1}},
            text=[theme.ink(f"{cost:+.2f} ms") for cost, _ in costs], textposition="outside",
            cliponaxis=False,
        )
    )  # fmt: skip
    low = min(0.0, float(values.min()))
    fig.update_layout(
        xaxis={"title": {"text": theme.ink("ms more a step")},
               "range": [low * 1.3, float(values.max()) * 1.2]},
        yaxis={"tickvals": list(range(len(costs))), "showgrid": False,
               "ticktext": [theme.ink(theme.plain(name)) for name in names],
               "range": [len(costs) - 0.4, -0.6]},
    )  # fmt: skip
    lines = [f"{name}: {cost:+.2f} ms" for name, (cost, _) in zip(names, costs, strict=True)]
    lines += [f"{n}: not timed" for n, p in parts.items() if p["costs"] is None]
    return View(figure=fig, text="\n".join([f"without one, over {whole:.2f} ms:", *lines]))


def rank_kernels(document: Mapping[str, Any], variant: str = "fused") -> View:
    """The kernels of a variant's step: launches, microseconds, share of their sum.

    Dependent launches overlap: there a kernel's time contains waiting, and the sum exceeds the
    step.

    Raises:
        WorkbenchError: the run has no kernel times of this variant.
    """
    every = document.get("kernels") or {}
    rows = every.get(variant)
    if not rows:
        have = ", ".join(every) or "none"
        raise WorkbenchError(
            f"this run has no kernel times of {variant!r:.60}; it has those of: {have}"
        )
    step = float(document["variants"][variant]["milliseconds"]) * 1e3
    total = sum(float(row["microseconds"]) for row in rows)
    names = [_kernel(str(row["kernel"])) for row in rows[:16]]
    wide = max(map(len, names))
    lines = [f"{variant}: {step:,.0f} µs a step, kernels {total:,.0f} µs; {_source(document)}"]
    if total > step:
        lines.append("kernels overlap: a dependent's time contains its wait")
    lines.append(f"{'kernel':<{wide}}  launches  µs a step  µs each   share")
    for name, row in zip(names, rows[:16], strict=True):
        launches, spent = float(row["launches"]), float(row["microseconds"])
        lines.append(
            f"{name:<{wide}}  {launches:8.0f}  {spent:9.1f}  {spent / launches:7.2f}  "
            f"{spent / total:6.1%}"
        )
    if len(rows) > 16:
        rest = sum(float(row["microseconds"]) for row in rows[16:])
        lines.append(f"and {plural(len(rows) - 16, 'other')}: {rest:.1f} µs")
    text = "\n".join(lines)
    return View(text=text, html=preformatted(text))


def _kernel(name: str) -> str:
    """A kernel's name without return type and long template arguments."""
    short = name.removeprefix("void ").removeprefix("at::native::")
    return short if len(short) <= 48 else f"{short[:47]}…"


def _rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    variants = document.get("variants") or {}
    if not variants:
        raise WorkbenchError("this run has no variant of the step; run `workbench bench decode`")
    found = []
    for name, row in variants.items():
        right = bool(row.get("passed")) and row.get("milliseconds") is not None
        why = row.get("failures") or [
            "interpreted, not timed" if row.get("passed") else "not right"
        ]
        found.append(
            {
                "name": name,
                "title": str(row.get("title", name)),
                "origin": row.get("origin", "ours"),
                "milliseconds": float(row["milliseconds"]) if right else None,
                "low": float(row["low"]) if right else 0.0,
                "high": float(row["high"]) if right else 0.0,
                "why": "" if right else "; ".join(map(str, why)),
            }
        )
    return found


def _references() -> list[Bar]:
    found = [
        (f"vLLM 0.33, {where}", name, "recorded on an H200")
        for where, name in zip(("graph replay", "in the engine"), _ENGINE, strict=True)
    ] + [
        (f"published, {name.rsplit(', ', 1)[-1]}", name, "GB200 TP8, all-reduces included")
        for name in _PUBLISHED
    ]
    return [(label, reference(name).value, whose) for label, name, whose in found]


def _bars(
    fig: go.Figure, rows: Sequence[Mapping[str, Any]], compared: Sequence[Bar], origin: str
) -> None:
    if origin == "other":
        places = list(range(len(rows), len(rows) + len(compared)))
        values, errors = [ms for _, ms, _ in compared], None
    else:
        mine = [(i, row) for i, row in enumerate(rows) if row["origin"] == origin]
        places = [i for i, _ in mine]
        values = [row["milliseconds"] or 0.0 for _, row in mine]
        timed = [row if row["milliseconds"] else None for _, row in mine]
        errors = {
            "type": "data", "symmetric": False, "color": theme.NEUTRAL, "thickness": 1, "width": 3,
            "array": [max(0.0, r["high"] - r["milliseconds"]) if r else 0.0 for r in timed],
            "arrayminus": [max(0.0, r["milliseconds"] - r["low"]) if r else 0.0 for r in timed],
        }  # fmt: skip
    if not places:
        return
    words, color, pattern = _ORIGINS[origin]
    fig.add_trace(
        go.Bar(
            x=np.array(values, np.float32), y=np.array(places, np.int16), orientation="h",
            name=words, error_x=errors, hoverinfo="skip",
            marker={"color": theme.rgba(color, 0.55), "line": {"color": color, "width": 1},
                    "pattern": {"shape": pattern, "size": 6, "solidity": 0.35}},
        )
    )  # fmt: skip


def _words(
    fig: go.Figure, rows: Sequence[Mapping[str, Any]], compared: Sequence[Bar], floor: float
) -> None:
    """Beside each bar: its time and the fraction of the floor, or why there is none."""
    places, texts = [], []
    for row in rows:
        spent = row["milliseconds"]
        places.append(max(floor, row["high"]) if spent else 0.0)
        texts.append(f"{spent:.2f} ms · {floor / spent:.0%} of the floor" if spent
                     else f"not shown: {theme.short_token(row['why'], 60)}")  # fmt: skip
    for _, spent, whose in compared:
        places.append(spent)
        texts.append(f"{spent:.2f} ms · {whose}")
    fig.add_trace(
        go.Scatter(
            x=np.array(places, np.float32), y=np.arange(len(places), dtype=np.int16), mode="text",
            text=[theme.ink("  " + theme.plain(text)) for text in texts], cliponaxis=False,
            textposition="middle right", hoverinfo="skip", showlegend=False,
        )
    )  # fmt: skip


def _text(
    document: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    compared: Sequence[Bar],
    floor: float,
    note: str,
) -> str:
    wide = max(len(name) for name in [r["title"] for r in rows] + [c[0] for c in compared])
    lines = [f"{_source(document)}; {note}", f"{'floor':<{wide}} {floor:7.2f} ms"]
    for row in rows:
        spent = row["milliseconds"]
        said = f"{spent:7.2f} ms  {floor / spent:4.0%} of the floor" if spent else row["why"]
        lines.append(f"{row['title']:<{wide}} {said}  ({_ORIGINS[row['origin']][0]})")
    lines += [f"{label:<{wide}} {ms:7.2f} ms  ({whose})" for label, ms, whose in compared]
    return "\n".join(lines)


def _source(document: Mapping[str, Any]) -> str:
    versions = document.get("versions") or {}
    used = ", ".join(f"{k} {versions[k]}" for k in ("torch", "triton") if versions.get(k))
    what = (
        f"{document.get('model', 'a rank')}, TP{document.get('tp', '?')}, "
        f"{plural(int(document.get('layers', 0)), 'layer')}, context {document.get('context', 0):,}"
    )
    how = document.get("how", "measured here")
    return f"{what} · {how} ({document.get('hardware', '?')}, {used}, {document.get('date', '?')})"
