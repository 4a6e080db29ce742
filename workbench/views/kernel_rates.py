"""A bench as pictures: the roofline with a point for each variant, and the fractions as bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, log10
from typing import Any, NoReturn

import numpy as np
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.kernels.catalogue import DRAFTER_OPS, OPS, REFERENCE
from workbench.kernels.results import BenchResult, BenchRow
from workbench.kernels.roofline import SPLIT, SPLIT_PRODUCTS
from workbench.views import theme
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
           "MoE": theme.SPARSE, "dense MLP": theme.DENSE,
           "norms, gate, softcap": theme.HEAT, "drafter": theme.DRAFTER}  # fmt: skip
_LEFT = 72  # px beside the panel
_USUAL = ("", "sliding", "full")  # kinds of inputs; the others are shown when asked for
_FORMS = ("sliding", "full", "ragged", "groups", "verify", "fp8")
_NEAR = 1.3  # numbers of tokens within this factor show the same
_ENGINE = "vllm"  # the others' times over its own are in the text
_BAR, _GAP = 15, 0.7  # px of a bar with its time beside it; bars between two operations

Case = tuple[int, int]  # tensor-parallel ranks, tokens


def _cases(
    result: BenchResult, dtype: str, every: bool, tp: int | None, tokens: int | None
) -> dict[Case, list[BenchRow]]:
    """Rows with a time by (TP, tokens), of one TP where one is given; of the model itself and its
    usual inputs, or all.

    Of two numbers of tokens close to each other (7 and 8) the larger stands for both, unless the
    smaller is ``tokens``: what goes into a figure goes into a saved notebook.
    """
    found: dict[Case, list[BenchRow]] = {}
    for row in result.rows:
        usual = row.op not in DRAFTER_OPS and row.flavour in _USUAL
        whole = row.timed and row.dtype == dtype and row.bytes and row.flops is not None
        if whole and (usual or every):
            found.setdefault((row.tp, row.tokens), []).append(row)
    if not found:
        raise WorkbenchError(
            f"there is no time in {dtype} among these {len(result.rows)} rows: nothing passed its "
            "check and was timed; run `workbench kernels bench`, on a GPU for more than the torch "
            "variants"
        )
    if tp is not None and not any(case[0] == tp for case in found):
        _unknown(found, tp, None)
    some = {case: rows for case, rows in found.items() if tp in (None, case[0])}
    counts = {case[1] for case in some}
    near = {n for n in counts if n != tokens and any(n < other <= _NEAR * n for other in counts)}
    some = {case: rows for case, rows in some.items() if case[1] not in near}
    return dict(sorted(some.items(), key=lambda item: (-item[0][0], item[0][1])))


def kernel_roofline(
    result: BenchResult,
    *,
    tp: int | None = None,
    tokens: int | None = None,
    dtype: str = "bfloat16",
    every: bool = False,
    among: Sequence[int] | None = None,
) -> View:
    """One point an operation and variant: FLOP a byte across, FLOP/s reached up, both logarithmic.

    The lines are the rates measured in the same run. The menu of the figure chooses the number of
    tokens, and the tensor-parallel ranks unless ``tp`` is given; ``tokens`` is what is shown at
    first. The colour is the kind of operation, the symbol the variant. ``every`` adds the drafter's
    operations and the further kinds of inputs: FP8 caches, verification, ragged batches, expert
    groups. ``among`` leaves so many tokens in the menu, for a smaller figure.

    Raises:
        WorkbenchError: nothing was timed, or not at this ``tp`` and ``tokens``.
    """
    cases = _cases(result, dtype, every, tp, tokens)
    first = _first(cases, tp, tokens)
    if among is not None:
        kept = {*among, first[1]}
        cases = {case: rows for case, rows in cases.items() if case[1] in kept}
    variants = _variants(row for rows in cases.values() for row in rows)
    fig = theme.figure(
        "The roofline of each operation",
        _subtitle(result, "lines: rates measured in the same run"),
        height=520,
        margin={"l": _LEFT + theme.PAD, "r": 16, "t": 128, "b": 56},
        legend={"x": -0.02, "y": 1.02, "traceorder": "normal"},
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
        most = max(roofs.values()) / bandwidth  # FLOP/byte at the end of the slope
        fig.add_annotation(
            text=theme.ink(f"memory: {bandwidth / 1e12:.2f} TB/s" if bandwidth > 1e11
                           else f"memory: {bandwidth / 1e9:.1f} GB/s", faint=True),
            x=log10(low * most) / 2, y=log10(low * most * bandwidth**2) / 2,
            xanchor="right", yanchor="bottom", xshift=-8,
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
    # The legend's marks have no operation's colour; a click on one hides its variant.
    for variant in variants:
        fig.add_trace(
            go.Scatter(
                x=[None], y=[None], mode="markers", name=theme.ink(theme.plain(variant)),
                legendgroup=variant, marker=_mark(variant, variants, theme.NEUTRAL),
            )
        )  # fmt: skip
    fixed = len(fig.data)
    owners: list[Case] = []
    for case, rows in cases.items():
        for variant in variants:
            mine = [row for row in rows if row.variant == variant and row.flops]
            if not mine:
                continue
            fig.add_trace(_points(mine, variant, variants, visible=case == first))
            owners.append(case)
    fig.update_layout(
        xaxis={"type": "log", "range": [log10(low), log10(high)], **_ticks(-3, 7),
               "title": {"text": theme.ink("arithmetic intensity, FLOP/byte")}},
        yaxis={"type": "log", "range": [log10(min(up)) - 0.35, log10(max(up)) + 0.35],
               **_ticks(),
               "title": {"text": theme.ink("FLOP/s reached")}},
        updatemenus=[_menu(cases, first, fixed, owners, above=fig.layout.margin.t)],
    )  # fmt: skip
    _share(fig, "scatter", {"hovertemplate": _HOVER})
    return View(figure=fig, text=_text(result, cases[first], first))


def kernel_fractions(
    result: BenchResult,
    *,
    tp: int | None = None,
    tokens: int | None = None,
    dtype: str = "bfloat16",
    every: bool = False,
    menu: bool = True,
) -> View:
    """How much of the roofline each variant reaches, operation by operation: bars up to 100 %.

    The menu chooses as in :func:`kernel_roofline`; without it (``menu=False``) the figure is a
    quarter of the size. 100 % is the least time at the rates measured in
    the same run; beside a bar is its median time.

    Raises:
        WorkbenchError: nothing was timed, or not at this ``tp`` and ``tokens``.
    """
    cases = _cases(result, dtype, every, tp, tokens)
    first = _first(cases, tp, tokens)
    if not menu:
        cases = {first: cases[first]}
    every_row = [row for rows in cases.values() for row in rows]
    variants = _variants(every_row)
    places, labels, length = _places(every_row, variants)
    fig = theme.figure(
        "Fraction of the roofline, and time of a call",
        _subtitle(result, "100%: the least time at the rates measured in the same run"),
        height=round(104 + 60 + _BAR * length),
        margin={"l": 176, "r": 24, "t": 104, "b": 60},
        barmode="overlay",
        legend={"y": 1.0, "traceorder": "normal"},
    )
    owners: list[Case] = []
    most = 1.0
    for case, rows in cases.items():
        for variant in variants:
            mine = [row for row in rows if row.variant == variant]
            if not mine:
                continue
            most = max([most, *(row.roofline_fraction or 0 for row in mine)])
            fig.add_trace(
                go.Bar(
                    orientation="h", name=theme.ink(theme.plain(variant)), width=0.84,
                    legendgroup=variant,
                    y=np.array([places[row.op, row.flavour, variant] for row in mine], np.float32),
                    x=np.array([row.roofline_fraction for row in mine], np.float32),
                    marker={
                        "color": theme.rgba(_bar_color(variant), 0.6), "line": {"width": 0},
                        "pattern": {"shape": _pattern(variant), "fgcolor": _bar_color(variant),
                                    "bgcolor": theme.rgba(_bar_color(variant), 0.25),
                                    "size": 6, "solidity": 0.35, "fillmode": "replace"},
                    },
                    text=[theme.plain(_label(row.op, row.flavour)) for row in mine],
                    meta=theme.plain(variant),
                    customdata=_numbers(mine),
                    visible=case == first,
                )
            )  # fmt: skip
            owners.append(case)
    fig.add_vline(x=1, line={"color": theme.NEUTRAL, "dash": "dash", "width": 1.5})
    fig.update_layout(
        xaxis={"range": [0, min(most, 1.5) * 1.14], "tickformat": ".0%", "dtick": 0.2,
               "title": {"text": theme.ink("share of the roofline reached")}},
        yaxis={"tickvals": [place for place, _ in labels],
               "ticktext": [theme.ink(theme.plain(word)) for _, word in labels],
               "range": [length - 0.5, -0.5 - _GAP / 2], "showgrid": False},
        updatemenus=[_menu(cases, first, 0, owners, above=fig.layout.margin.t)] if menu else None,
    )  # fmt: skip
    _share(fig, "bar", {
        "hovertemplate": _HOVER, "texttemplate": "%{customdata[0]:,.3~r} µs",
        "textposition": "outside", "cliponaxis": False,
        "textfont": {"size": theme.SMALL, "color": theme.NEUTRAL},
    })  # fmt: skip
    return View(figure=fig, text=_text(result, cases[first], first))


# -- parts ----------------------------------------------------------------------------------------


def _first(cases: dict[Case, list[BenchRow]], tp: int | None, tokens: int | None) -> Case:
    fits = [c for c in cases if tokens in (None, c[1])]
    if not fits:
        _unknown(cases, tp, tokens)
    if tokens is None:
        return next((c for c in fits if c[1] == 8), fits[0])
    return fits[0]


def _unknown(cases: Iterable[Case], tp: int | None, tokens: int | None) -> NoReturn:
    asked = ", ".join(f"{n}={v}" for n, v in (("tp", tp), ("tokens", tokens)) if v is not None)
    known = "; ".join(f"TP{t}, {_tokens(n)}" for t, n in cases)
    raise WorkbenchError(f"nothing was timed at {asked}; there are {known}")


def _share(fig: go.Figure, kind: str, attributes: dict[str, Any]) -> None:
    """Say once what all traces of a kind have: in each it would be most of a saved notebook."""
    template = go.layout.Template(theme.TEMPLATE)
    template.data[kind] = [attributes]
    fig.update_layout(template=template)


def _variants(rows: Iterable[BenchRow]) -> list[str]:
    found = {row.variant for row in rows}
    own = [name for name in _KNOWN if name in found]
    return [*own, *sorted(found - set(own))]


def _subtitle(result: BenchResult, remark: str) -> str:
    """The remark stays in one piece, on a line of its own: the menu lies beside the first."""
    return f"{result.source} · " + remark.replace(" ", "\u00a0")


def _places(
    rows: Sequence[BenchRow], variants: Sequence[str]
) -> tuple[dict[tuple[str, str, str], float], list[tuple[float, str]], float]:
    """Where each bar lies, the middle and name of each operation, and the length of it all.

    A bar is 1 long. Only what was timed takes a place, the same at every number of tokens.
    """
    held = {(row.op, row.flavour, row.variant) for row in rows}
    lines = sorted({key[:2] for key in held}, key=lambda x: (OPS.index(x[0]), _forms(x[1])))
    places: dict[tuple[str, str, str], float] = {}
    labels: list[tuple[float, str]] = []
    top = 0.0
    for line in lines:
        some = [v for v in variants if (*line, v) in held]
        places |= {(*line, v): round(top + n, 2) for n, v in enumerate(some)}
        labels.append((round(top + (len(some) - 1) / 2, 2), _label(*line)))
        top += len(some) + _GAP
    return places, labels, top - _GAP / 2


def _label(op: str, flavour: str) -> str:
    return f"{op}, {flavour}" if flavour else op


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
        mode="markers",
        legendgroup=variant,
        showlegend=False,
        marker=_mark(variant, variants, [_color(row.op, row.flavour) for row in rows]),
        text=[theme.plain(_label(row.op, row.flavour)) for row in rows],
        meta=theme.plain(variant),
        customdata=_numbers(rows),
        visible=visible,
    )


def _mark(variant: str, variants: Sequence[str], color: Any) -> dict[str, Any]:
    symbol = _symbol(variant, variants)
    width = 1.5 if symbol.endswith(("open", "dot")) else 0
    return {"symbol": symbol, "size": 10, "color": color, "line": {"width": width}}


def _ticks(least: int = 3, most: int = 19) -> dict[str, Any]:
    """Every power of ten with its prefix: plotly's own prefixes end at T."""
    powers = range(least, most)
    words = [
        f"{10**p:,}" if p < 5 and least < 0 else f"{10 ** (p % 3)}{' kMGTPE'[p // 3]}"
        for p in powers
    ]
    return {"tickvals": [10.0**p for p in powers], "ticktext": [word.strip() for word in words]}


def _menu(
    cases: dict[Case, list[BenchRow]],
    first: Case,
    fixed: int,
    owners: Sequence[Case],
    *,
    above: float,
) -> dict[str, Any]:
    """A menu of tokens and ranks; the first ``fixed`` traces stay, the others are ``owners``'.

    It lies beside the title, ``above`` px over the panel less its own height, clear of the legend.
    """
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
        "pad": {"b": above - 33, "t": 0, "r": 0, "l": 0},
        # Opaque, for it opens over the figure, and light, for plotly marks what is chosen in white.
        "bgcolor": "#ececec",
        "bordercolor": "#bdbdbd",
        "font": {"size": theme.TEXT, "color": "#333333"},
    }  # fmt: skip


_HOVER = (
    "<b>%{text}: %{meta}</b><br>%{customdata[0]:,.3~r} µs (%{customdata[1]:,.3~r} to "
    "%{customdata[2]:,.3~r}), at best %{customdata[3]:,.3~r} µs<br>%{customdata[4]:,.3~f} MB, "
    "%{customdata[5]:,.2~f} MFLOP<br>%{customdata[6]:.0%} of the roofline<br>"
    "%{customdata[7]:.2f} × as fast as the torch reference<extra></extra>"
)


def _numbers(rows: Sequence[BenchRow]) -> Any:
    """What a hover says, a line each: packed, for words would make half of a saved notebook."""
    lines = []
    for row in rows:
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
    return f"{flops / 1e12:,.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.0f} GFLOP/s"


def _text(result: BenchResult, rows: Sequence[BenchRow], case: Case) -> str:
    tp, tokens = case
    engine = {(r.op, r.flavour): r.microseconds for r in rows if r.variant == _ENGINE}
    first = max(len(_label(row.op, row.flavour)) for row in rows) + 2
    second = max(7, *(len(row.variant) for row in rows))
    lines = [
        f"{result.source}: TP{tp}, {_tokens(tokens)}",
        f"{'operation':<{first}}{'variant':<{second}}{'median':>10}{'at best':>10}{'roofline':>10}"
        f"{'× torch':>9}" + (f"{'× vllm':>8}" if engine else ""),
    ]
    order = _variants(rows)
    by_line = sorted(
        rows, key=lambda r: (OPS.index(r.op), _forms(r.flavour), order.index(r.variant))
    )
    for row in by_line:
        ratio = "" if row.ratio_to_reference is None else f"{row.ratio_to_reference:.2f}"
        share = "" if row.roofline_fraction is None else f"{row.roofline_fraction:.0%}"
        lines.append(
            f"{_label(row.op, row.flavour):<{first}}{row.variant:<{second}}"
            f"{_time(row.microseconds):>10}{_time(row.bound_microseconds):>10}{share:>10}{ratio:>9}"
        )
        theirs = engine.get((row.op, row.flavour))
        if theirs and row.microseconds:
            lines[-1] += f"{theirs / row.microseconds:>8.2f}"
    return "\n".join(lines)


def _forms(flavour: str) -> tuple[int, str]:
    place = next((i for i, word in enumerate(_FORMS) if flavour.startswith(word)), -1)
    return place, flavour
