"""One rank under load: a decode step by its batch and a verification by its tokens, with floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, log2
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.errors import WorkbenchError
from workbench.model.reference_figures import Reference, reference
from workbench.views import adaptive_figure, theme
from workbench.views.rank_sources import source
from workbench.views.view import View

_MODEL, _TP, _LAYERS = "beam-501b", 8, 52  # the rank that the engine's times are of
_REPLAYED = (1, 2, 4, 8, 16, 32, 64, 128)
_TUNED = (8, 32, 128)
_FLOOR = "floor: bytes of weights, of the experts that the rows chose, and of caches over bandwidth"
_ENGINE = "vLLM 0.33: recorded on one H200, date not recorded"
_HEIGHT, _TOP, _BOTTOM = 560, 108, 52
# colour, dash, symbol
_LOOKS = {
    "load": (theme.SPARSE, "solid", "diamond"),
    "chain": (theme.HEAT, "dashdot", "triangle-up"),
    "replay": (theme.NEUTRAL, "dash", "square-open"),
    "tuned": (theme.FULL, "longdash", "circle-open"),
}
_NAMES = {"load": "fused for many rows", "chain": "single operations"}


@dataclass(slots=True, kw_only=True)
class _Line:
    """Milliseconds by rows; ``floors`` by rows where the line has its own; ``whose`` for hovers."""

    look: str
    name: str
    whose: str
    points: dict[int, float] = field(default_factory=dict)
    floors: dict[int, float] = field(default_factory=dict)


def rank_load(document: Mapping[str, Any]) -> View:
    """A batched decode step: milliseconds by batch, and below them multiples of the floor.

    Of a document as ``recorded_load()`` reads it: the fused step, the chain of single operations
    where it was timed, the floor of each; beside the full model's rank the engine's times, which
    are set against this run's floors.

    Raises:
        WorkbenchError: there is no time of a batch, or a field is not what it has to be.
    """
    lines = _ours(document, "batches")
    floor = lines[0].floors
    if _full(document):
        lines += _engine()
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12, row_heights=[0.6, 0.4]
    )
    remarks = (_FLOOR, _ENGINE if _full(document) else "")
    context = _contexts(document, "batches")
    theme.style(
        figure,
        "A decode step under load",
        _said(document, f"decode{context}", *remarks),
        height=_HEIGHT,
        legend_under_title=True,
        margin={"l": 56, "r": 24, "t": _TOP, "b": _BOTTOM},
    )
    for line in lines:
        figure.add_trace(_trace(line, floor), row=1, col=1)
    figure.add_trace(_floor(floor), row=1, col=1)
    for line in lines:
        figure.add_trace(_multiples(line, floor), row=2, col=1)
    figure.add_hline(y=1, row=2, col=1, line={"color": theme.NEUTRAL, "dash": "dot", "width": 1.5})
    every = sorted({rows for line in lines for rows in line.points})
    most = max(value for line in lines for value in line.points.values())
    above = max(
        value / floor[r] for line in lines for r, value in line.points.items() if r in floor
    )
    for row in (1, 2):
        figure.update_xaxes(**_axis(every), row=row, col=1)
    figure.update_xaxes(title={"text": theme.ink("sequences in the batch")}, row=2, col=1)
    figure.update_yaxes(range=[0, most * 1.14], fixedrange=True,
                        title={"text": theme.ink("ms a step")}, row=1, col=1)  # fmt: skip
    figure.update_yaxes(range=[0.8, above * 1.08], fixedrange=True,
                        title={"text": theme.ink("× floor")}, row=2, col=1)  # fmt: skip
    return View(figure=figure, text=_text(document, lines, floor, f"decode{context}", "sequences"))


def rank_verify(document: Mapping[str, Any]) -> View:
    """A verification: milliseconds by the tokens of the target's pass, with the floor.

    Of a document as ``recorded_load()`` reads it, or of ``workbench bench verify``.

    Raises:
        WorkbenchError: there is no time of a verification, or a field is not what it has to be.
    """
    lines = _ours(document, "verify")
    floor = lines[0].floors
    if _full(document):
        lines += _engine()[:1]
    what = f"verification{_contexts(document, 'verify')}"
    shared = _shared(document)
    remarks = (shared, _FLOOR, _ENGINE if _full(document) else "")
    figure = adaptive_figure.figure(
        "A verification by its tokens",
        _said(document, what, *remarks),
        height=420,
        legend_under_title=True,
        margin={"l": 56, "r": 28, "t": _TOP - 32, "b": _BOTTOM},
    )
    for line in lines:
        met = [r for other in lines if other is not line for r in other.points]
        figure.add_trace(_trace(line, floor, numbers=line is lines[0], without=met))
    figure.add_trace(_floor(floor))
    every = sorted({rows for line in lines for rows in line.points})
    most = max(value for line in lines for value in line.points.values())
    figure.update_layout(
        xaxis=_axis(every) | {"title": {"text": theme.ink("tokens verified at once")}},
        yaxis={"range": [0, most * 1.14], "fixedrange": True,
               "title": {"text": theme.ink("ms a pass")}},
    )  # fmt: skip
    return View(figure=figure, text=_text(document, lines, floor, what, "tokens"))


# ------------------------------------------------------------------ what is drawn


def _trace(
    line: _Line, floor: Mapping[int, float], *, numbers: bool = False, without: Sequence[int] = ()
) -> go.Scatter:
    """A line; with ``numbers`` except ``without`` some, where they would meet another line."""
    color, dash, symbol = _LOOKS[line.look]
    rows = sorted(line.points)
    values = np.array([line.points[r] for r in rows], np.float32)
    own = [line.floors.get(r, floor.get(r)) for r in rows]
    more: dict[str, Any] = {}
    if numbers:
        text = ["" if r in without else theme.ink(f"{line.points[r]:.1f}") for r in rows]
        more = {"text": text, "textposition": "top center"}
    return go.Scatter(
        x=np.array(rows, np.int32), y=values, name=theme.ink(theme.plain(line.name)),
        mode=_mode(rows, floor) + "+text" * numbers, cliponaxis=False, **more,
        line={"color": color, "dash": dash, "width": 2}, marker={"symbol": symbol, "size": 8},
        customdata=[
            "" if f is None else f", {v / f:.2f} × the floor of {f:.2f} ms"
            for v, f in zip(values.tolist(), own, strict=True)
        ],
        meta=theme.plain(line.whose),
        hovertemplate="%{x}: %{y:.2f} ms%{customdata}<br>%{meta}<extra></extra>",
    )  # fmt: skip


def _multiples(line: _Line, floor: Mapping[int, float]) -> go.Scatter:
    color, dash, symbol = _LOOKS[line.look]
    rows = [r for r in sorted(line.points) if line.floors.get(r) or r in floor]
    return go.Scatter(
        x=np.array(rows, np.int32),
        y=np.array([line.points[r] / (line.floors.get(r) or floor[r]) for r in rows], np.float32),
        mode=_mode(rows, floor), showlegend=False, cliponaxis=False,
        line={"color": color, "dash": dash, "width": 2}, marker={"symbol": symbol, "size": 8},
        meta=theme.plain(line.name),
        hovertemplate="%{meta}<br>%{x}: %{y:.2f} × floor<extra></extra>",
    )  # fmt: skip


def _mode(rows: Sequence[int], floor: Mapping[int, float]) -> str:
    """No line across sizes that were measured beside it and not here: it would tell of them."""
    beside = [r for r in sorted(floor) if rows and rows[0] <= r <= rows[-1]]
    return "lines+markers" if list(rows) == beside else "markers"


def _floor(floor: Mapping[int, float]) -> go.Scatter:
    rows = sorted(floor)
    return go.Scatter(
        x=np.array(rows, np.int32), y=np.array([floor[r] for r in rows], np.float32),
        name=theme.ink("floor"), mode="lines+markers", cliponaxis=False,
        line={"color": theme.NEUTRAL, "dash": "dot", "width": 1.5},
        marker={"symbol": "line-ew-open", "size": 8, "line": {"width": 2}},
        hovertemplate="floor at %{x}: %{y:.2f} ms<extra></extra>",
    )  # fmt: skip


def _axis(rows: Sequence[int]) -> dict[str, Any]:
    """A logarithmic axis with the powers of two."""
    low, high = log2(rows[0]), log2(rows[-1])
    pad = max(0.03 * (high - low), 0.1)
    ticks = [r for r in rows if r & (r - 1) == 0] or list(rows)
    ends = [(low - pad) * 0.30103, (high + pad) * 0.30103]  # log10
    return {"type": "log", "range": ends, "fixedrange": True, "tickvals": ticks,
            "ticktext": [f"{t:,}" for t in ticks]}  # fmt: skip


# ------------------------------------------------------------------ what is read


def _ours(document: Any, part: str) -> list[_Line]:
    """The document's lines, the fused step first."""
    if not isinstance(document, Mapping):
        raise WorkbenchError(
            "a document of a rank under load is a dict, as recorded_load(file) reads it, not "
            f"{type(document).__name__}"
        )
    whose = source(dict(document) | _versions(document))
    found = []
    for look, name in (("load", part), ("chain", "chain")):
        if look == "chain" and part != "batches":
            continue
        line = _Line(look=look, name=_NAMES[look], whose=whose)
        for row in _rows(document, name):
            spent, floor = row.get("milliseconds"), row.get("floor", row.get("floor_milliseconds"))
            if row.get("failures") or spent is None:
                continue
            count = row["rows"]
            line.points[count] = _number(spent, f"{name}[{count}].milliseconds")
            line.floors[count] = _number(floor, f"{name}[{count}].floor")
        if line.points:
            found.append(line)
    if not found or found[0].look != "load":
        again = "workbench bench verify" if part == "verify" else "benchmarks/rank_load.py"
        raise WorkbenchError(
            f"this document has no times of {part}; run {again} on a GPU, or read the recorded one "
            "with recorded_load()"
        )
    return found


def _rows(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The rows of a part, each with its count of rows: of a recorded run the powers of two, of a
    verification of one's own whatever was asked for."""
    part: Any = document.get(name)
    asked = part is None and name == "verify"
    if asked:
        part = document.get("sizes")
    if part is None:
        return []
    if isinstance(part, list):
        part = {str(row.get("rows")) if isinstance(row, Mapping) else "?": row for row in part}
    if not isinstance(part, Mapping):
        raise WorkbenchError(f"{name} of this document should be an object of rows, not a value")
    found = []
    for key, row in part.items():
        if not isinstance(row, Mapping):
            raise WorkbenchError(f"{name}[{key!r:.20}] of this document should be an object")
        if not str(key).isdigit():
            continue  # the check of this part
        count = int(key)
        if count < 1:
            raise WorkbenchError(f"{name}[{key!r:.20}] of this document has no rows")
        if asked or count & (count - 1) == 0:  # odd batches are there for their check
            found.append(dict(row) | {"rows": count})
    return found


def _number(value: Any, where: str) -> float:
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    if not fine or not isfinite(value) or value <= 0:
        raise WorkbenchError(
            f"{where} of this document should be a number above 0, and is {value!r:.40}: it is "
            "damaged; run the bench again"
        )
    return float(value)


def _engine() -> list[_Line]:
    """vLLM's recorded times."""
    replays = {n: reference(f"graph replay, {n} token{'s' * (n > 1)}") for n in _REPLAYED}
    tuned = {n: reference(f"decode, batch {n}, context 1k") for n in _TUNED}
    return [
        _recorded("replay", "vLLM 0.33, graph replay", replays),
        _recorded("tuned", "vLLM 0.33, whole step, tuned", tuned),
    ]


def _recorded(look: str, name: str, found: Mapping[int, Reference]) -> _Line:
    first = next(iter(found.values()))
    note = first.note.split(" (")[0]
    whose = f"{first.kind}: {first.where}; {note}, date not recorded"
    return _Line(look=look, name=name, whose=whose, points={n: r.value for n, r in found.items()})


def _full(document: Mapping[str, Any]) -> bool:
    """Whether it is the rank that the engine's times are of."""
    layers, dtype = document.get("layers"), document.get("dtype", "bfloat16")
    whose = (document.get("model"), document.get("tp"), layers, dtype)
    return whose == (_MODEL, _TP, _LAYERS, "bfloat16")


def _versions(document: Mapping[str, Any]) -> dict[str, Any]:
    versions = document.get("versions") or {"torch": document.get("torch")}
    return {"versions": versions if isinstance(versions, Mapping) else {}}


def _contexts(document: Mapping[str, Any], part: str) -> str:
    """at a context, where all rows are of one."""
    every = {row.get("context", document.get("context")) for row in _rows(document, part)}
    (context,) = every if len(every) == 1 else (None,)
    return f" at {context:,} tokens of context" if isinstance(context, int) else ""


def _shared(document: Mapping[str, Any]) -> str:
    """From which count of tokens on a sequence has several."""
    counts = [row.get("sequences") for row in _rows(document, "verify")]
    known = [count for count in counts if isinstance(count, int)]
    return f"up to {max(known)} sequences, which share the tokens" if known else ""


def _said(document: Mapping[str, Any], what: str, *remarks: str) -> str:
    model = f"{document.get('model') or 'a model'}, TP{document.get('tp', '?')}"
    layers = f"{document.get('layers', '?')} layers, {what}"
    parts = (f"{model}, {layers}", source(dict(document) | _versions(document)),
             str(document.get("note") or ""), *remarks)  # fmt: skip
    return " · ".join(filter(None, parts))


def _text(
    document: Mapping[str, Any], lines: Sequence[_Line], floor: Mapping[int, float], what: str,
    unit: str,
) -> str:  # fmt: skip
    said = [_said(document, what)]
    for line in lines:
        said.append(f"{line.name}; {line.whose}:" if line.look in ("replay", "tuned")
                    else f"{line.name}:")  # fmt: skip
        for rows in sorted(line.points):
            spent, own = line.points[rows], line.floors.get(rows, floor.get(rows))
            against = "" if own is None else f"  floor {own:6.2f} ms  {spent / own:.2f} × floor"
            said.append(f"{rows:>6,} {unit}  {spent:6.2f} ms{against}")
    return "\n".join(said)
