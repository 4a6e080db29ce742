"""What drafting is worth in time: a speed-up with its causes, and a sweep of its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import DraftError
from workbench.views import spec_marks, theme
from workbench.views.numbers import plural
from workbench.views.view import View

_POLICIES = {"none": "plain", "fixed": "speculative"}
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "diamond", "square-open", "triangle-up-open", "cross-open", "star-open")
_COLORS = (theme.SLIDING, theme.FULL, theme.SPARSE, theme.HEAT, theme.DENSE, theme.DRAFTER)


def speculative_speed(result: Any, *, source: str | None = None) -> View:
    """The speed-up over plain decoding, beside what makes it: times of passes, acceptance length.

    ``result`` is a ``SpeculativeBench`` of ``workbench/spec/bench.py`` or its dictionary:
    ``speedup``, ``target_ms`` (the target's pass by its rows, ms), ``draft_ms``,
    ``acceptance_length`` and the tokens/s of its ``policies`` (or ``tokens_per_second``, by name).
    ``hardware``, ``versions`` and ``date`` say where it was measured, unless ``source`` does. What
    is missing or undefined is said in words.
    """
    data: Mapping[str, Any] = result if isinstance(result, Mapping) else result.to_dict()
    speedup = _number(data.get("speedup"))
    length = _number(data.get("acceptance_length"))
    rows = {int(k): _number(v) for k, v in (data.get("target_ms") or {}).items()}
    rows = dict(sorted(rows.items()))
    draft = _number(data.get("draft_ms"))
    rates = _rates(data)
    title = (
        "Speed-up over plain decoding: undefined" if speedup is None
        else f"{speedup:.2f} × plain decoding"
    )  # fmt: skip
    words = "undefined" if length is None else f"{length:.2f}"
    remark = _spread(data) + (" · interrupted" if data.get("interrupted") else "")
    fig = theme.figure(
        title, f"{source or _source(data)} · acceptance\u00a0length\u00a0{words}{remark}",
        height=340,
        margin={"l": 64, "r": 16, "t": 100, "b": 56}, bargap=0.3, showlegend=False,
        xaxis={"domain": [0, 0.56]}, xaxis2={"domain": [0.72, 1], "anchor": "y2"},
        yaxis2={"anchor": "x2"},
    )  # fmt: skip
    first = rows.get(1)
    passes = [(plural(count, "row"), ms, theme.SLIDING, "") for count, ms in rows.items()]
    passes.append(("draft", draft, theme.DRAFTER, "/"))
    speeds = [(name, rate, theme.NEUTRAL if name == "plain" else theme.SPARSE,
               "" if name == "plain" else ".") for name, rate in rates.items()]  # fmt: skip
    _columns(fig, passes, "", "ms", first)
    # No ratio over these: that of two medians is not the title's, the median of the pairs' ratios.
    _columns(fig, speeds, "2", "tokens/s", None)
    fig.update_layout(
        xaxis={"title": {"text": theme.ink("the target's pass by rows; the drafter's pass")}},
        yaxis={"title": {"text": theme.ink("ms")}},
        yaxis2={"title": {"text": theme.ink("tokens/s")}},
    )  # fmt: skip
    theme.panel_title(fig, 1, "time of a pass")
    theme.panel_title(fig, 2, "decoding")
    lines = [f"{title}; acceptance length {words}{remark}"]
    for count, ms in rows.items():
        ratio = f", {ms / first:.2f} × one row" if ms and first and count != 1 else ""
        lines.append(f"target, {plural(count, 'row')}: {_said(ms, 'ms')}{ratio}")
    ratio = f", {draft / first:.2f} × one row of the target" if draft and first else ""
    lines.append(f"draft: {_said(draft, 'ms')}{ratio}")
    lines += [f"{name}: {_said(rate, 'tokens/s')}" for name, rate in rates.items()]
    return View(figure=fig, text="\n".join(lines))


def _spread(data: Mapping[str, Any]) -> str:
    """How far the speed-ups of the single runs lie apart, where it is known."""
    low, high = _number(data.get("speedup_low")), _number(data.get("speedup_high"))
    if low is None or high is None:
        return ""
    pairs = _number(data.get("pairs"))
    of = f"median of {plural(int(pairs), 'pair')}" if pairs else "median"
    return f" · {of}, 10th to 90th percentile {low:.2f} to {high:.2f}"


def _rates(data: Mapping[str, Any]) -> dict[str, float | None]:
    """Tokens/s by the name of the way of decoding."""
    policies = data.get("policies") or {}
    found = {_POLICIES.get(k, k): p.get("tokens_per_second") for k, p in policies.items()}
    found |= data.get("tokens_per_second") or {}
    return {name: _number(rate) for name, rate in found.items()}


def _columns(
    fig: go.Figure,
    bars: Sequence[tuple[str, float | None, str, str]],
    axis: str,
    unit: str,
    first: float | None,
) -> None:
    """Bars with their values above, and in how many times the first one they are."""
    known = [value for _, value, *_ in bars if value is not None]
    end = max(known, default=1.0)
    fig.add_trace(
        go.Bar(
            x=np.arange(len(bars), dtype=np.int16),
            y=np.array([np.nan if v is None else v for _, v, *_ in bars], np.float32),
            marker={"color": [theme.rgba(c, 0.6) for *_, c, _ in bars],
                    "line": {"color": [c for *_, c, _ in bars], "width": 1},
                    "pattern": {"shape": [p for *_, p in bars], "size": 6, "solidity": 0.35}},
            hoverinfo="skip", xaxis=f"x{axis}", yaxis=f"y{axis}",
        )
    )  # fmt: skip
    fig.add_trace(
        go.Scatter(
            x=np.arange(len(bars), dtype=np.int16), mode="text", textposition="top center",
            y=np.array([value or 0.0 for _, value, *_ in bars], np.float32), cliponaxis=False,
            text=[theme.ink(_said(value, "") + _times(value, first)) for _, value, *_ in bars],
            hovertext=[f"{name}: {_said(value, unit)}" for name, value, *_ in bars],
            hoverinfo="text", xaxis=f"x{axis}", yaxis=f"y{axis}",
        )
    )  # fmt: skip
    fig.update_layout({
        f"xaxis{axis}": {"tickvals": list(range(len(bars))), "showgrid": False,
                         "ticktext": [theme.ink(theme.plain(name)) for name, *_ in bars],
                         "range": [-0.6, max(1, len(bars)) - 0.4]},
        f"yaxis{axis}": {"range": [0, end * 1.25], "showticklabels": bool(known)},
    })  # fmt: skip
    if not bars:
        _not_measured(fig, axis)


def _not_measured(fig: go.Figure, axis: str) -> None:
    fig.add_annotation(text=theme.ink("not measured"), x=0.5, xref=f"x{axis} domain", y=0.5,
                       yref=f"y{axis} domain")  # fmt: skip
    fig.update_layout({f"yaxis{axis}": {"showticklabels": False, "showgrid": False}})


def _times(value: float | None, first: float | None) -> str:
    return f"<br>{value / first:.2f} ×" if value and first and value != first else ""


def _number(value: Any) -> float | None:
    """A value that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    return float(value) if isfinite(value) else None


def _said(value: float | None, unit: str) -> str:
    if value is None:
        return "undefined"
    number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{number} {unit}".strip()


def _source(data: Mapping[str, Any]) -> str:
    """Hardware, versions and date of a measurement, as far as they are known."""
    versions = data.get("versions")
    if isinstance(versions, Mapping):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    hardware = data.get("hardware")
    if isinstance(hardware, Mapping):
        hardware = hardware.get("name") or ", ".join(f"{k} {v}" for k, v in hardware.items())
    known = [str(word) for word in (hardware, versions, data.get("date")) if word]
    return "measured: " + ", ".join(known) if known else "measured, hardware and date not recorded"


# -- sweep ----------------------------------------------------------------------------------------


def sweep_figure(rows: Any, *, source: str = "measured here") -> View:
    """A sweep over draft length and temperature: acceptance length and tokens/s, a line each.

    ``rows`` is a table (a pandas frame, or a list of dictionaries) with ``speculative_tokens``,
    ``temperature``, ``acceptance_length``, and, where they are known, ``tokens_per_second`` and
    ``events`` (n of the length). Draft length 0 is plain decoding: it has a speed and no length.

    Raises:
        DraftError: a row has no draft length or no temperature.
    """
    records: list[dict[str, Any]] = [
        dict(row) for row in (rows.to_dict("records") if hasattr(rows, "to_dict") else rows)
    ]
    for place, row in enumerate(records):
        if (
            _number(row.get("speculative_tokens")) is None
            or _number(row.get("temperature")) is None
        ):
            raise DraftError(
                f"row {place} of the sweep needs speculative_tokens and temperature, both numbers"
            )
    fig = theme.figure(
        "Sweep over draft length and temperature", f"{source} · {plural(len(records), 'setting')}",
        height=380, legend_under_title=True, margin={"l": 60, "r": 16, "t": 128, "b": 56},
        legend={"traceorder": "normal"}, xaxis={"domain": [0, 0.44]},
        xaxis2={"domain": [0.56, 1], "anchor": "y2"}, yaxis2={"anchor": "x2"},
    )  # fmt: skip
    if not records:
        spec_marks.nothing(fig, "the sweep has no settings yet")
        fig.update_layout(xaxis2={"visible": False}, yaxis2={"visible": False})
        return View(figure=fig, text="the sweep has no settings yet")
    temperatures = sorted({float(row["temperature"]) for row in records})
    lengths = sorted({int(row["speculative_tokens"]) for row in records})
    for place, temperature in enumerate(temperatures):
        mine = sorted((r for r in records if float(r["temperature"]) == temperature),
                      key=lambda r: int(r["speculative_tokens"]))  # fmt: skip
        for panel, key in (("", "acceptance_length"), ("2", "tokens_per_second")):
            _sweep_line(fig, mine, key, temperature, place, panel)
    axis = {"title": {"text": theme.ink("draft length (tokens)")}, "showgrid": False,
            "tickvals": lengths if len(lengths) <= 12 else None,
            "range": [lengths[0] - 0.5, lengths[-1] + 0.5]}  # fmt: skip
    fig.update_layout(
        xaxis=axis, xaxis2=axis,
        yaxis={"title": {"text": theme.ink("tokens per draft event")}},
        yaxis2={"title": {"text": theme.ink("tokens/s")}, "rangemode": "tozero"}, showlegend=True,
    )  # fmt: skip
    theme.panel_title(fig, 1, "acceptance length")
    theme.panel_title(fig, 2, "speed")
    for axis_name, key in (("", "acceptance_length"), ("2", "tokens_per_second")):
        if all(_number(row.get(key)) is None for row in records):
            _not_measured(fig, axis_name)
    return View(figure=fig, text=_sweep_text(records))


def _sweep_line(
    fig: go.Figure, rows: Sequence[Mapping[str, Any]], key: str, temperature: float, place: int,
    panel: str,
) -> None:  # fmt: skip
    color, name = _COLORS[place % len(_COLORS)], f"temperature {temperature:g}"
    values = [_number(row.get(key)) for row in rows]
    events = [_number(row.get("events")) for row in rows]
    unit = "tokens/s" if panel else "tokens per draft event"
    fig.add_trace(
        go.Scatter(
            x=np.array([row["speculative_tokens"] for row in rows], np.int16),
            y=np.array([np.nan if v is None else v for v in values], np.float32),
            mode="lines+markers", name=theme.ink(name), legendgroup=name, showlegend=not panel,
            line={"color": color, "width": 2, "dash": _DASHES[place % len(_DASHES)]},
            marker={"symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 8, "color": color},
            hovertext=[
                f"{name}, {row['speculative_tokens']:g} drafts: {_said(value, unit)}"
                + ("" if n is None or panel else f", n = {n:,.0f}")
                for row, value, n in zip(rows, values, events, strict=True)
            ],
            hoverinfo="text", xaxis=f"x{panel}", yaxis=f"y{panel}",
        )
    )  # fmt: skip


def _sweep_text(records: Sequence[Mapping[str, Any]]) -> str:
    lines = ["drafts  temperature  acceptance length         n  tokens/s"]
    for row in sorted(records, key=lambda r: (r["temperature"], r["speculative_tokens"])):
        length, n = _number(row.get("acceptance_length")), _number(row.get("events"))
        rate = _number(row.get("tokens_per_second"))
        lines.append(
            f"{row['speculative_tokens']:>6g}  {row['temperature']:>11g}  "
            f"{'undefined' if length is None else f'{length:.2f}':>17}  "
            f"{'–' if n is None else f'{n:,.0f}':>8}  {'–' if rate is None else f'{rate:,.0f}':>8}"
        )
    return "\n".join(lines)
