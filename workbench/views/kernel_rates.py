"""A bench as pictures: the roofline with a point for each variant, and the fractions as bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, log10
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.kernels.catalogue import DRAFTER_OPS, OPS, REFERENCE
from workbench.kernels.results import BenchResult, BenchRow
from workbench.kernels.roofline import SPLIT, SPLIT_PRODUCTS
from workbench.views import theme
from workbench.views.kernel_words import op_words
from workbench.views.numbers import plural
from workbench.views.view import View

_KNOWN = (REFERENCE, "dense", "compile", "triton")
_SYMBOLS = {"torch": "circle-open", "dense": "circle-open-dot", "compile": "square-open",
            "triton": "diamond", "vllm": "triangle-up-open"}  # fmt: skip
_OTHERS = ("cross-open", "star-open", "hexagon-open", "bowtie-open")
_PATTERNS = {"torch": "", "dense": "-", "compile": ".", "triton": "/", "vllm": "x"}
_MATH = {"bf16": "BF16", "fp8": "FP8", "fp4": "FP4", "fp32": "FP32", "bf16x3": "FP32 as 3 BF16"}
_DASHES = ("solid", "dash", "dot", "dashdot")
_COLORS = {"QKV": theme.NEUTRAL, "sliding attention": theme.SLIDING, "full attention": theme.FULL,
           "experts, router": theme.SPARSE, "dense MLP": theme.DENSE,
           "norms, gate, softcap": theme.HEAT, "drafter": theme.DRAFTER}  # fmt: skip
_LEFT = 72  # px beside the panel
_UNUSUAL = {"verify", "fp8", "ragged", "groups"}  # kinds of inputs that are shown when asked for
_FORMS = ("sliding", "full", "ragged", "groups", "verify", "fp8")

Case = tuple[int, int]  # tensor-parallel ranks, tokens


def _cases(result: BenchResult, dtype: str, every: bool) -> dict[Case, list[BenchRow]]:
    """Rows with a time by (TP, tokens); of the model itself and its usual inputs, or all."""
    found: dict[Case, list[BenchRow]] = {}
    for row in result.rows:
        usual = row.op not in DRAFTER_OPS and not set(row.flavour.split()) & _UNUSUAL
        whole = row.timed and row.dtype == dtype and row.bytes and row.flops is not None
        if whole and (usual or every):
            found.setdefault((row.tp, row.tokens), []).append(row)
    if not found:
        raise WorkbenchError(
            f"there is no time in {dtype} among these {len(result.rows)} rows: nothing passed its "
            "check and was timed; run `workbench kernels bench`, on a GPU for more than the torch "
            "variants"
        )
    return dict(sorted(found.items(), key=lambda item: (-item[0][0], item[0][1])))


def kernel_roofline(
    result: BenchResult,
    *,
    tp: int | None = None,
    tokens: int | None = None,
    dtype: str = "bfloat16",
    every: bool = False,
) -> View:
    """One point an operation and variant: FLOP a byte across, FLOP/s reached up, both logarithmic.

    The lines are the rates measured in the same run. The menu of the figure chooses tokens and
    tensor-parallel ranks, ``tp`` and ``tokens`` what is shown at first. The colour is the kind of
    operation, the symbol the variant. ``every`` adds the drafter's operations and the further kinds
    of inputs: FP8 caches, verification, ragged batches, expert groups.

    Raises:
        WorkbenchError: nothing was timed, or not at this ``tp`` and ``tokens``.
    """
    cases = _cases(result, dtype, every)
    first = _first(cases, tp, tokens)
    variants = _variants(row for rows in cases.values() for row in rows)
    fig = theme.figure(
        "The roofline of each operation",
        f"{result.source} · lines: rates measured in the same run · symbol: variant",
        height=520,
        margin={"l": _LEFT + theme.PAD, "r": 16, "t": 140, "b": 56},
        legend={"y": 1.02, "traceorder": "normal"},
    )
    points = [row for rows in cases.values() for row in rows if row.flops]
    across = [row.flops / row.bytes for row in points if row.flops and row.bytes]
    up = [row.flops / row.microseconds * 1e6 for row in points if row.flops and row.microseconds]
    if not across:
        raise WorkbenchError("none of these rows counts FLOPs; a roofline has nothing to show")
    roofs = _roofs(result, {row.math for row in points})
    low, high = 10 ** floor(log10(min(across)) - 0.2), 10 ** (log10(max(across)) + 0.6)
    for place, (name, rate) in enumerate(roofs.items()):
        bandwidth = float(result.peaks["bandwidth"])
        knee = rate / bandwidth
        high = max(high, knee * 30)
        fig.add_trace(
            go.Scatter(
                x=[low, knee, high], y=[low * bandwidth, rate, rate], mode="lines",
                line={"color": theme.NEUTRAL, "width": 1.5, "dash": _DASHES[place % 4]},
                hoverinfo="skip", showlegend=False,
            )
        )  # fmt: skip
        fig.add_annotation(
            text=theme.ink(f"{_MATH.get(name, name)}: {_rate(rate)}", faint=True),
            x=log10(high), y=log10(rate), xanchor="right", yanchor="bottom", yshift=1,
        )  # fmt: skip
        up.append(rate)
    if roofs:
        fig.add_annotation(
            text=theme.ink(f"memory: {bandwidth / 1e12:.2f} TB/s" if bandwidth > 1e11
                           else f"memory: {bandwidth / 1e9:.1f} GB/s", faint=True),
            x=log10(low), y=log10(low * bandwidth), xanchor="left", yanchor="top",
            xshift=30, yshift=6,
        )  # fmt: skip
    fig.add_annotation(
        text="\u2003".join(
            f'<span style="color:{color}">●</span> {theme.ink(word)}'
            for word, color in _COLORS.items()
            if word != "drafter" or every
        ),
        x=0, xref="paper", xanchor="left", xshift=-_LEFT, y=1, yref="paper", yanchor="bottom",
        yshift=40,
    )  # fmt: skip
    fixed = len(fig.data)
    owners: list[Case] = []
    for case, rows in cases.items():
        for variant in variants:
            mine = [row for row in rows if row.variant == variant and row.flops]
            fig.add_trace(_points(mine, variant, variants, visible=case == first))
            owners.append(case)
    fig.update_layout(
        xaxis={"type": "log", "range": [log10(low), log10(high)], "dtick": 1,
               "title": {"text": theme.ink("FLOP a byte")}},
        yaxis={"type": "log", "range": [floor(log10(min(up)) - 0.1), log10(max(up)) + 0.35],
               **_ticks(),
               "title": {"text": theme.ink("FLOP/s reached")}},
        updatemenus=[_menu(cases, first, fixed, owners)],
    )  # fmt: skip
    return View(figure=fig, text=_text(result, cases[first], first))


def kernel_fractions(
    result: BenchResult,
    *,
    tp: int | None = None,
    tokens: int | None = None,
    dtype: str = "bfloat16",
    every: bool = False,
) -> View:
    """How much of the roofline each variant reaches, operation by operation: bars up to 1.

    The menu chooses as in :func:`kernel_roofline`. 1 is the least time at the rates measured in the
    same run.

    Raises:
        WorkbenchError: nothing was timed, or not at this ``tp`` and ``tokens``.
    """
    cases = _cases(result, dtype, every)
    first = _first(cases, tp, tokens)
    variants = _variants(row for rows in cases.values() for row in rows)
    lines = _lines(row for rows in cases.values() for row in rows)
    labels = [theme.ink(theme.plain(_label(*line))) for line in lines]
    names = {v: [theme.plain(f"{_label(*line)}: {v}") for line in lines] for v in variants}
    height = 9 * len(variants) + 12
    fig = theme.figure(
        "Fraction of the roofline",
        f"{result.source} · 1: no faster at the rates measured in the same run",
        height=140 + 52 + height * len(lines),
        margin={"l": 190, "r": 24, "t": 140, "b": 52},
        barmode="group",
        bargap=0.25,
        legend={"y": 1.0, "traceorder": "normal"},
    )
    owners: list[Case] = []
    most = 1.0
    for case, rows in cases.items():
        by = {(row.op, row.flavour, row.variant): row for row in rows}
        for variant in variants:
            mine = [by.get((*line, variant)) for line in lines]
            most = max([most, *(row.roofline_fraction or 0 for row in mine if row)])
            fig.add_trace(
                go.Bar(
                    orientation="h", name=theme.ink(theme.plain(variant)),
                    y=np.arange(len(lines)),
                    x=np.array(
                        [row.roofline_fraction if row else np.nan for row in mine], np.float32
                    ),
                    marker={
                        "color": theme.rgba(_bar_color(variant), 0.6), "line": {"width": 0},
                        "pattern": {"shape": _pattern(variant), "fgcolor": _bar_color(variant),
                                    "bgcolor": theme.rgba(_bar_color(variant), 0.25),
                                    "size": 6, "solidity": 0.35, "fillmode": "replace"},
                    },
                    text=names[variant],
                    textposition="none",
                    customdata=_numbers(mine),
                    hovertemplate=_HOVER,
                    visible=case == first,
                )
            )  # fmt: skip
            owners.append(case)
    fig.add_vline(x=1, line={"color": theme.NEUTRAL, "dash": "dash", "width": 1.5})
    fig.update_layout(
        xaxis={"range": [0, min(most, 1.5) * 1.04], "tickformat": ".0%"},
        yaxis={"tickvals": list(range(len(lines))), "ticktext": labels,
               "range": [len(lines) - 0.5, -0.5], "showgrid": False},
        updatemenus=[_menu(cases, first, 0, owners)],
    )  # fmt: skip
    return View(figure=fig, text=_text(result, cases[first], first))


# -- parts ----------------------------------------------------------------------------------------


def _first(cases: dict[Case, list[BenchRow]], tp: int | None, tokens: int | None) -> Case:
    fits = [c for c in cases if tp in (None, c[0]) and tokens in (None, c[1])]
    if not fits:
        known = "; ".join(f"TP{t}, {n} tokens" for t, n in cases)
        raise WorkbenchError(f"nothing was timed at tp={tp}, tokens={tokens}; there are {known}")
    if tokens is None:
        return next((c for c in fits if c[1] == 8), fits[0])
    return fits[0]


def _variants(rows: Iterable[BenchRow]) -> list[str]:
    found = {row.variant for row in rows}
    own = [name for name in _KNOWN if name in found]
    return [*own, *sorted(found - set(own))]


def _lines(rows: Iterable[BenchRow]) -> list[tuple[str, str]]:
    found = dict.fromkeys((row.op, row.flavour) for row in rows)
    return sorted(found, key=lambda line: OPS.index(line[0]))


def _label(op: str, flavour: str) -> str:
    return f"{op_words(op)}, {flavour}" if flavour else op_words(op)


def _roofs(result: BenchResult, used: set[str]) -> dict[str, float]:
    """Rates of the arithmetic that is drawn, as measured in the run."""
    if not result.peaks.get("bandwidth"):
        return {}
    rates = {name: float(rate) for name, rate in result.peaks.get("flops", {}).items()}
    if SPLIT in used and "bf16" in rates:
        rates.setdefault(SPLIT, rates["bf16"] / SPLIT_PRODUCTS)
    wanted = {name for name in used if name in rates} or set(rates)
    return {name: rates[name] for name in sorted(wanted, key=lambda n: -rates[n])}


def _color(op: str, flavour: str) -> str:
    if "attention" in op:
        return theme.FULL if "full" in flavour else theme.SLIDING
    if op in DRAFTER_OPS:
        return theme.DRAFTER
    kinds = {"router": theme.SPARSE, "expert_mlp": theme.SPARSE, "dense_mlp": theme.DENSE,
             "qkvg": theme.NEUTRAL, "qkv_write": theme.NEUTRAL}  # fmt: skip
    return kinds.get(op, theme.HEAT)


def _bar_color(variant: str) -> str:
    return theme.HEAT if variant == "triton" else theme.NEUTRAL


def _pattern(variant: str) -> str:
    return _PATTERNS.get(variant, _PATTERNS["vllm"] if variant.startswith("vllm") else "+")


def _symbol(variant: str, variants: Sequence[str]) -> str:
    if variant in _SYMBOLS:
        return _SYMBOLS[variant]
    own = [v for v in variants if v not in _SYMBOLS]
    return _OTHERS[own.index(variant) % len(_OTHERS)]


def _points(
    rows: Sequence[BenchRow], variant: str, variants: Sequence[str], *, visible: bool
) -> go.Scatter:
    return go.Scatter(
        x=np.array([(row.flops or 0) / (row.bytes or 1) for row in rows], np.float32),
        y=np.array([(row.flops or 0) / (row.microseconds or 1) * 1e6 for row in rows], np.float32),
        name=theme.ink(theme.plain(variant)),
        mode="markers",
        marker={
            "symbol": _symbol(variant, variants),
            "size": 10,
            "color": [_color(row.op, row.flavour) for row in rows] or theme.NEUTRAL,
            "line": {"width": 1.5 if _symbol(variant, variants).endswith("open") else 0},
        },
        text=[theme.plain(f"{_label(row.op, row.flavour)}: {row.variant}") for row in rows],
        customdata=_numbers(rows),
        hovertemplate=_HOVER,
        visible=visible,
    )


def _ticks() -> dict[str, Any]:
    """Every power of ten with its prefix: plotly's own prefixes end at T."""
    powers = range(3, 19)
    words = [f"{10 ** (p % 3)}{' kMGTPE'[p // 3]}" for p in powers]
    return {"tickvals": [10.0**p for p in powers], "ticktext": words}


def _menu(
    cases: dict[Case, list[BenchRow]], first: Case, fixed: int, owners: Sequence[Case]
) -> dict[str, Any]:
    """A menu of tokens and ranks; ``fixed`` traces stay, the others belong to ``owners``."""
    buttons = [
        {
            "label": f"TP{tp}, {_tokens(tokens)}",
            "method": "restyle",
            "args": [{"visible": [*(True,) * fixed, *(owner == (tp, tokens) for owner in owners)]}],
        }
        for tp, tokens in cases
    ]
    return {
        "buttons": buttons,
        "active": list(cases).index(first),
        "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom",
        "pad": {"b": 8, "t": 0, "r": 0, "l": 0},
        "bgcolor": "rgba(128,128,128,0.12)",
        "bordercolor": theme.LINE,
        "font": {"size": theme.TEXT, "color": theme.NEUTRAL},
    }  # fmt: skip


_HOVER = (
    "<b>%{text}</b><br>%{customdata[0]:.3~g} µs (%{customdata[1]:.3~g} to "
    "%{customdata[2]:.3~g}), at best %{customdata[3]:.3~g} µs<br>%{customdata[4]:,.3~f} MB, "
    "%{customdata[5]:,.2~f} MFLOP<br>%{customdata[6]:.0%} of the roofline<br>"
    "%{customdata[7]:.2f} × as fast as the torch reference<extra></extra>"
)


def _numbers(rows: Sequence[BenchRow | None]) -> Any:
    """What a hover says, a line each: packed, for words would make half of a saved notebook."""
    lines = []
    for row in rows:
        if row is None:
            lines.append([np.nan] * 8)
            continue
        middle = row.microseconds or np.nan
        values = (
            row.microseconds,
            row.microseconds_low or middle,
            row.microseconds_high or middle,
            row.bound_microseconds,
            (row.bytes or 0) / 1e6,
            (row.flops or 0) / 1e6,
            row.roofline_fraction,
            row.ratio_to_reference,
        )
        lines.append([np.nan if value is None else value for value in values])
    return np.array(lines, dtype=np.float32).reshape(len(lines), 8)


def _time(microseconds: float | None) -> str:
    if microseconds is None:
        return "–"
    if microseconds >= 1000:
        return f"{microseconds / 1000:.3g} ms"
    return f"{microseconds:.3f} µs" if microseconds < 1 else f"{microseconds:.3g} µs"


def _tokens(count: int) -> str:
    return plural(count, "token")


def _rate(flops: float) -> str:
    return f"{flops / 1e12:,.1f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.0f} GFLOP/s"


def _text(result: BenchResult, rows: Sequence[BenchRow], case: Case) -> str:
    tp, tokens = case
    lines = [
        f"{result.source}: TP{tp}, {_tokens(tokens)}",
        f"{'operation':<34}{'variant':<14}{'median':>10}{'at best':>12}{'roofline':>10}"
        f"{'× torch':>9}",
    ]
    order = _variants(rows)
    by_line = sorted(
        rows, key=lambda r: (OPS.index(r.op), _forms(r.flavour), order.index(r.variant))
    )
    for row in by_line:
        ratio = "" if row.ratio_to_reference is None else f"{row.ratio_to_reference:.2f}"
        share = "" if row.roofline_fraction is None else f"{row.roofline_fraction:.0%}"
        lines.append(
            f"{_label(row.op, row.flavour):<34}{row.variant:<14}{_time(row.microseconds):>10}"
            f"{_time(row.bound_microseconds):>12}{share:>10}{ratio:>9}"
        )
    return "\n".join(lines)


def _forms(flavour: str) -> tuple[int, str]:
    place = next((i for i, word in enumerate(_FORMS) if flavour.startswith(word)), -1)
    return place, flavour
