"""A rank's prefill as stacked kernel times, beside other forms of it and the engine's times."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.model.reference_figures import reference
from workbench.views import theme
from workbench.views.rank_sources import source
from workbench.views.view import View

# part -> colour, pattern, the kernels that belong to it
_IDLE = "in no kernel"  # what the whole took beyond the sum of its kernels
_PARTS: dict[str, tuple[str, str, str]] = {
    "attention": (theme.FULL, "", r"prefill_kernel|^_prefill$|^_merge"),
    "experts: gate and up": (theme.SPARSE, "", r"gate_up"),
    "experts: down": (theme.SPARSE, "/", r"_down_kernel"),
    "experts: sum": (theme.SPARSE, ".", r"expert_boundary|_combine"),
    "projections": (theme.SLIDING, "", r"nvjet|gemm|cutlass|cublas"),
    "router and sort": (theme.HEAT, "", r"logits|top_k|_count|_plan|_place|_sort"),
    "norms and the rest": (theme.NEUTRAL, "", r""),
    _IDLE: (theme.NEUTRAL, "x", r"(?!)"),
}
_FORMS = {
    "ours": "this workbench",
    "chain": "single operations",
    "naive": "plain torch, a loop over experts",
}
_LEFT, _RIGHT, _TOP, _BOTTOM, _ROW, _HEADING = 196, 116, 130, 48, 38, 30
_SIZE = (8, 2048)  # of the engine's and the published times
_OWN = "a segment is the time from the end of the kernels before to a kernel's own end"
_SHARE = "kernels overlap, for a dependent one begins with its wait: segments are shares of the sum"


@dataclass(slots=True, kw_only=True)
class _Row:
    """A bar: ``parts`` in milliseconds, empty where no kernel was timed."""

    context: int
    name: str
    source: str
    milliseconds: float
    fraction: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    alike: bool = True  # of the same hardware


def rank_prefill(document: Mapping[str, Any]) -> View:
    """Milliseconds of a prefill by part, each form at each context; shares of the matrix rate.

    Of a document as ``recorded_prefill()`` reads it, or of ``workbench bench prefill``. Beside the
    full model's rank and its 8 x 2048 tokens stand the engine's recorded and published times.

    Raises:
        WorkbenchError: no prefill was timed, or a field is not what it has to be.
    """
    rows, own = _read(document)
    document = dict(document) | {
        "date": str(document.get("date", "date unknown")).partition("T")[0]
    }
    others = _others(document, {row.context for row in rows})
    contexts = sorted({row.context for row in rows})
    every = [row for c in contexts for row in (*rows, *others) if row.context == c]
    remarks = [_OWN if own else _SHARE]
    plain = _FORMS["naive"]
    longest = [row.milliseconds for row in every if row.name != plain]
    edge = 1.04 * max(longest or [row.milliseconds for row in every])
    if any(row.milliseconds > edge for row in every):
        remarks.append("bars of plain torch end at the panel's edge, their numbers say how long")
    if others:
        remarks.append("vLLM 0.33 and the published times: where they are from, in the hover")
    at, headings, where = 6.0, [], []
    for context in contexts:
        headings.append((at + _HEADING / 2, _behind(context)))
        at += _HEADING
        for _ in (row for row in every if row.context == context):
            where.append(at + _ROW / 2)
            at += _ROW
    figure = theme.figure(
        "Where a prefill's time goes",
        " · ".join(filter(None, [_what(document), source(document),
                                 str(document.get("note") or ""), *remarks])),
        height=round(at) + _TOP + _BOTTOM, legend_under_title=True, barmode="stack",
        legend={"traceorder": "normal"},
        margin={"l": _LEFT, "r": _RIGHT, "t": _TOP, "b": _BOTTOM},
    )  # fmt: skip
    for part, (color, pattern, _) in _PARTS.items():
        mine = [i for i, row in enumerate(every) if part in row.parts]
        if mine:
            figure.add_trace(_bars(every, where, mine, part, color, pattern))
    for same in (True, False):
        mine = [i for i, row in enumerate(every) if not row.parts and row.alike == same]
        if mine:
            figure.add_trace(_plain(every, where, mine, edge, same))
    figure.add_trace(_numbers(every, where, edge))
    for y, text in headings:
        figure.add_annotation(
            text=theme.ink(f"<b>{text}</b>"), y=y, x=0, xref="paper", xanchor="left",
            xshift=theme.PAD - _LEFT, showarrow=False, yanchor="middle",
        )  # fmt: skip
    names = [f"{theme.ink(theme.plain(row.name))}<br>{theme.plain(row.source)}" for row in every]
    figure.update_layout(
        xaxis={"title": {"text": theme.ink("ms")}, "range": [0, edge], "fixedrange": True},
        yaxis={"tickvals": where, "ticktext": names, "range": [at, 0], "showgrid": False,
               "fixedrange": True, "automargin": False, "tickfont": {"size": 10}},
    )  # fmt: skip
    return View(figure=figure, text=_text(document, every, contexts, remarks[0]))


# ------------------------------------------------------------------ what is drawn


def _bars(
    rows: Sequence[_Row], where: Sequence[float], mine: Sequence[int], part: str, color: str,
    pattern: str,
) -> go.Bar:  # fmt: skip
    values = [rows[i].parts[part] for i in mine]
    return go.Bar(
        orientation="h", name=theme.ink(part), width=18,
        x=np.array(values, np.float32), y=np.array([where[i] for i in mine], np.float32),
        marker={"color": theme.rgba(color, 0.6), "line": {"color": color, "width": 1},
                "pattern": {"shape": pattern, "size": 6, "solidity": 0.35}},
        customdata=[f"{v / rows[i].milliseconds:.1%} of {rows[i].name}"
                    for i, v in zip(mine, values, strict=True)],
        meta=part, hovertemplate="%{meta}: %{x:.1f} ms, %{customdata}<extra></extra>",
    )  # fmt: skip


def _plain(
    rows: Sequence[_Row], where: Sequence[float], mine: Sequence[int], edge: float, alike: bool
) -> go.Bar:
    """Bars without parts, those of other hardware hatched."""
    return go.Bar(
        orientation="h", width=18, showlegend=False,
        x=np.array([min(rows[i].milliseconds, edge) for i in mine], np.float32),
        y=np.array([where[i] for i in mine], np.float32),
        marker={"color": theme.rgba(theme.NEUTRAL, 0.35),
                "line": {"color": theme.NEUTRAL, "width": 1},
                "pattern": {"shape": "" if alike else "|", "size": 6, "solidity": 0.3}},
        customdata=[[f"{rows[i].milliseconds:,.0f} ms", rows[i].source] for i in mine],
        meta=[theme.plain(rows[i].name) for i in mine],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
    )  # fmt: skip


def _numbers(rows: Sequence[_Row], where: Sequence[float], edge: float) -> go.Scatter:
    """Milliseconds and share of the matrix rate right of the panel."""
    lines = [f"{'ms':>8}{'of rate':>9}"]
    for row in rows:
        share = "" if row.fraction is None else f"{row.fraction:.0%}"
        lines.append(f"{row.milliseconds:>8,.0f}{share:>9}".rstrip())
    return go.Scatter(
        x=np.full(len(lines), edge * (1 - 1e-6), np.float32),
        y=np.array([where[0] - _ROW / 2 - _HEADING / 2, *where], np.float32),
        mode="text", text=lines, texttemplate=theme.ink("%{text}"), textposition="middle right",
        textfont={"family": theme.MONO, "size": 11}, cliponaxis=False, hoverinfo="skip",
        showlegend=False,
    )  # fmt: skip


# ------------------------------------------------------------------ what is read


def _read(document: Any) -> tuple[list[_Row], bool]:
    """The document's bars, and whether all kernels have times of their own."""
    if not isinstance(document, Mapping):
        raise WorkbenchError(
            "a document of a prefill is a dict, as recorded_prefill(file) reads it, not "
            f"{type(document).__name__}"
        )
    rows, own = [], []
    for context, form, one in _timed(document):
        milliseconds = _number(one.get("milliseconds"), f"{form} behind {context}: milliseconds")
        row = _Row(
            context=context, name=_FORMS[form], milliseconds=milliseconds,
            source=f"{document.get('how', 'measured here')}, {document.get('hardware', '?')}",
        )  # fmt: skip
        if one.get("fraction_of_peak") is not None:
            row.fraction = _number(one["fraction_of_peak"], f"{form}: fraction_of_peak")
        kernels = one.get("kernels") or []
        if kernels:
            row.parts, alone = _split(kernels, milliseconds, f"{form} behind {context}")
            own.append(alone)
        rows.append(row)
    if not rows:
        raise WorkbenchError(
            "this document has no time of a prefill; run `workbench bench prefill`, or read the "
            "recorded one with recorded_prefill()"
        )
    return rows, all(own)


def _timed(document: Mapping[str, Any]) -> list[tuple[int, str, Mapping[str, Any]]]:
    """(context, form, times) of what is there and right, by form as in _FORMS."""
    found: dict[tuple[int, str], Mapping[str, Any]] = {}
    variants = document.get("variants")
    if isinstance(variants, Mapping):
        context = document.get("context")
        if not isinstance(context, int) or isinstance(context, bool) or context < 0:
            raise WorkbenchError(f"context of this document is no count of tokens: {context!r:.40}")
        found = {(context, str(name)): row for name, row in variants.items()}
    else:
        for name, row in document.items():
            match = re.fullmatch(r"(ours|chain|naive)_(\d{1,9})", str(name))
            if match:
                found[int(match[2]), match[1]] = row
    rows = []
    for (context, form), row in found.items():
        if not isinstance(row, Mapping):
            raise WorkbenchError(f"{form} behind {context} of this document should be an object")
        if form in _FORMS and not row.get("failures") and row.get("milliseconds") is not None:
            rows.append((context, form, row))
    order = list(_FORMS)
    return sorted(rows, key=lambda row: (row[0], order.index(row[1])))


def _split(kernels: Any, whole: float, where: str) -> tuple[dict[str, float], bool]:
    """Milliseconds by part that add up to the whole, and whether they are kernels' own."""
    if not isinstance(kernels, list) or not all(isinstance(row, Mapping) for row in kernels):
        raise WorkbenchError(f"kernels of {where} in this document should be a list of objects")
    own = all("own_microseconds" in row for row in kernels)
    unit = "own_microseconds" if own else "microseconds"
    parts = dict.fromkeys(_PARTS, 0.0)
    for row in kernels:
        spent = row.get(unit)
        if spent == 0:
            continue
        parts[_part(str(row.get("kernel")))] += _number(spent, f"{where}: {unit}") / 1e3
    total = sum(parts.values())
    # One run is profiled, the time is the median of others: within the bar, as shares of it.
    shrink = min(1.0, whole / total) if total else 1.0
    parts = {part: spent * shrink for part, spent in parts.items()}
    # A bar ends where its number says, whatever of it no kernel accounts for.
    parts[_IDLE] = max(0.0, whole - sum(parts.values())) if whole > 1.001 * total else 0.0
    return {part: spent for part, spent in parts.items() if spent}, own


def _part(kernel: str) -> str:
    return next(part for part, (_, _, names) in _PARTS.items() if re.search(names, kernel))


def _number(value: Any, where: str) -> float:
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    if not fine or not isfinite(value) or value <= 0:
        raise WorkbenchError(
            f"{where} of this document should be a number above 0, and is {value!r:.40}: it is "
            "damaged; run the bench again"
        )
    return float(value)


def _others(document: Mapping[str, Any], contexts: set[int]) -> list[_Row]:
    """The engine's recorded time without earlier context, the published pair at 100k."""
    size = (document.get("sequences"), document.get("tokens"))
    of = (document.get("model"), document.get("tp"), document.get("layers", 52),
          document.get("dtype", "bfloat16"))  # fmt: skip
    if size != _SIZE or of != ("beam-501b", 8, 52, "bfloat16"):
        return []
    rows = []
    if 0 in contexts:
        one = reference("prefill 8 x 2048, no earlier context")
        flops = _operations(document, 0)
        rate = document.get("matrix_rate")
        fraction = None
        if flops and rate and "H200" in str(document.get("hardware")):
            fraction = flops / (one.value / 1e3) / _number(rate, "matrix_rate")
        rows.append(_Row(context=0, name="vLLM 0.33, tuned", source="recorded, one H200, no date",
                         milliseconds=one.value, fraction=fraction))  # fmt: skip
    if 100_000 in contexts:
        for when in ("before", "after"):
            one = reference(f"prefill 8 x 2048 at 100k, {when} the optimisations")
            rows.append(_Row(context=100_000, name=f"{when} the optimisations",
                             source="published, GB200 TP8, all-reduces",
                             milliseconds=one.value, alike=False))  # fmt: skip
    return rows


def _operations(document: Mapping[str, Any], context: int) -> float | None:
    """Counted operations of the prefill at a context."""
    for at, _, one in _timed(document):
        flops = one.get("flops") or document.get("flops")
        if at == context and isinstance(flops, Mapping) and flops.get("all") is not None:
            return _number(flops["all"], "flops.all")
    return None


def _behind(context: int) -> str:
    return f"behind {context:,} tokens of context" if context else "no earlier context"


def _what(document: Mapping[str, Any]) -> str:
    size = f"{document.get('sequences', '?')} × {document.get('tokens', '?')} tokens"
    rate = document.get("matrix_rate")
    said = f"{document.get('model') or 'a model'}, TP{document.get('tp', '?')}, {size}"
    if rate is not None:
        said += f"; matrix rate {_number(rate, 'matrix_rate') / 1e12:.0f} TFLOP/s"
    return said


def _text(
    document: Mapping[str, Any], rows: Sequence[_Row], contexts: Sequence[int], remark: str
) -> str:
    said = [f"{_what(document)}; {source(document)}; {document.get('note', '')}; {remark}"]
    for context in contexts:
        said.append(f"{_behind(context)}:")
        for row in (row for row in rows if row.context == context):
            share = "" if row.fraction is None else f", {row.fraction:.1%} of the matrix rate"
            said.append(f"  {row.name} ({row.source}): {row.milliseconds:,.1f} ms{share}")
            said += [f"    {part:<22}{spent:7.1f} ms" for part, spent in row.parts.items()]
    return "\n".join(said)
