"""Policies of verification beside each other: speed, waiting, lengths, and drafts lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.spec.simulation_result import SimulationResult
from workbench.spec.sweep import Figure, SweepRow
from workbench.views import spec_marks, theme
from workbench.views.adaptive_figure import HEADING, figure
from workbench.views.numbers import plural, signed
from workbench.views.view import View

NOTHING = "there is no policy to compare"
# colour, pattern, dash, symbol: a policy keeps them in every view
LOOKS: Mapping[str, tuple[str, str, str, str]] = {
    "none": (theme.HEAT, "x", "dot", "square-open"),
    "fixed": (theme.NEUTRAL, "/", "dash", "diamond"),
    "adaptive": (theme.SLIDING, "", "solid", "circle"),
    "oracle": (theme.SPARSE, ".", "dashdot", "triangle-up"),
}
_MORE = (
    (theme.DENSE, "-", "longdash", "cross-open"),
    (theme.FULL, "\\", "longdashdot", "star-open"),
    (theme.DRAFTER, "+", "dot", "hexagon-open"),
)
_NAMES = {"none": "none (plain)"}
_ROW, _BETWEEN, _TOP, _FOOT = 26, 58, 72, 84  # px
_LONGEST = 18  # letters of a policy's name
_SHORTER = 0.005  # tokens by which a length is told to be shorter
_PANELS = (
    "tokens/s, all requests together: what counts",
    "TPOT, ms: p50 and p99 (its change)",
    "drafts lost: wasted + missed",
    "acceptance length: trimming shortens it",
)


def look(name: str, names: Sequence[str] = ()) -> tuple[str, str, str, str]:
    """Colour, pattern, dash and symbol of a policy; of one of one's own by its place in names."""
    own = [other for other in names if other not in LOOKS]
    return LOOKS.get(name) or _MORE[(own.index(name) if name in own else 0) % len(_MORE)]


def policy_comparison(
    results: Mapping[str, SimulationResult], *, source: str | None = None
) -> View:
    """What policies give on the same requests: tokens/s, TPOT, acceptance length, drafts lost.

    ``results`` of :func:`workbench.spec.simulate.compare`, or of replays of one recording, by name.
    Changes are against ``fixed`` (the first one where it is missing); where ``oracle`` is among
    them, the share of its gain that each policy reaches is said. *Wasted* drafts were verified and
    not accepted; *missed* ones were trimmed, and the target would have accepted them. ``source``
    stands in the place of what the results say of themselves.

    Raises:
        DraftError: the results differ in concurrency or number of requests.
    """
    if not results:
        fig = figure("Policies of verification", source or NOTHING, height=220)
        spec_marks.nothing(fig, NOTHING)
        return View(figure=fig, text=NOTHING)
    row = SweepRow.of(results)
    count = len(results)
    panel = _ROW * max(2, count)
    # One above the other: beside each other their words would meet on a narrow page.
    inner = HEADING + len(_PANELS) * panel + (len(_PANELS) - 1) * _BETWEEN
    # A label with colons and commas of its own: what its parts say is left as it is.
    made = source or f"tokens/s and TPOT modelled, decode steps alone; {row.label}"
    load = f"{plural(row.requests, 'request')}, {row.concurrency:,} together"
    said = [*_verdict(row), load, made, *_remarks(results)]
    fig = figure(
        _title(row), " · ".join(said), height=_TOP + inner + _FOOT, bargap=0.3, barmode="stack",
        margin={"l": 92, "r": 16, "t": _TOP, "b": _FOOT},
        legend={"orientation": "v", "x": 0, "xanchor": "left", "y": -26 / inner,
                "yanchor": "top", "traceorder": "normal"},
    )  # fmt: skip
    names = list(results)
    shown = [theme.ink(theme.plain(_name(name))) for name in names]
    for number, title in enumerate(_PANELS, 1):
        axis = "" if number == 1 else str(number)
        top = 1 - (HEADING + (number - 1) * (panel + _BETWEEN)) / inner
        fig.update_layout({
            f"yaxis{axis}": {"domain": [max(0.0, top - panel / inner), top], "anchor": f"x{axis}",
                             "tickvals": list(range(count)), "range": [count - 0.4, -0.6],
                             "ticktext": shown, "showgrid": False},
            f"xaxis{axis}": {"anchor": f"y{axis}", "nticks": 6},
        })  # fmt: skip
        theme.panel_title(fig, number, title)
    _bars(fig, "", names, [r.tokens_per_second for r in results.values()],
          [_rate(row, name) for name in names], room=1.72)  # fmt: skip
    _waiting(fig, row, results)
    _lost(fig, list(results.values()))
    _bars(fig, "4", names, [r.acceptance_length for r in results.values()],
          [f"{r.acceptance_length:.2f}" for r in results.values()], room=1.3)  # fmt: skip
    return View(figure=fig, text=_text(row, results, made))


def _bars(
    fig: go.Figure, axis: str, names: Sequence[str], values: Sequence[float],
    words: Sequence[str], *, room: float,
) -> None:  # fmt: skip
    looks = [look(name, names) for name in names]
    y, end = np.arange(len(names), dtype=np.int16), max(values)
    fig.add_trace(
        go.Bar(
            orientation="h", y=y, x=np.array(values, np.float32), hoverinfo="skip",
            marker={"color": [theme.rgba(one[0], 0.6) for one in looks],
                    "line": {"color": [one[0] for one in looks], "width": 1},
                    "pattern": {"shape": [one[1] for one in looks], "size": 6, "solidity": 0.35}},
            showlegend=False, xaxis=f"x{axis}", yaxis=f"y{axis}",
        )
    )  # fmt: skip
    _beside(fig, axis, [value + 0.02 * end for value in values], words)
    fig.update_layout({f"xaxis{axis}": {"range": [0, end * room]}})


def _beside(fig: go.Figure, axis: str, x: Sequence[float], words: Sequence[str]) -> None:
    """Words to the right of a bar."""
    fig.add_trace(
        go.Scatter(
            x=np.array(x, np.float32), y=np.arange(len(words), dtype=np.int16), mode="text",
            text=[theme.ink(word) for word in words], textposition="middle right",
            cliponaxis=False, hoverinfo="skip", showlegend=False,
            xaxis=f"x{axis}", yaxis=f"y{axis}",
        )
    )  # fmt: skip


def _waiting(fig: go.Figure, row: SweepRow, results: Mapping[str, SimulationResult]) -> None:
    """p50 and p99 of each policy, joined."""
    x: list[float] = []
    y: list[float] = []
    for place, result in enumerate(results.values()):
        x += [result.tpot_p50_ms, result.tpot_p99_ms, np.nan]
        y += [place, place, np.nan]
    axes = {"xaxis": "x2", "yaxis": "y2"}
    fig.add_trace(
        go.Scatter(x=np.array(x, np.float32), y=np.array(y, np.float32), mode="lines",
                   line={"color": theme.rgba(theme.NEUTRAL, 0.6), "width": 3}, hoverinfo="skip",
                   showlegend=False, **axes)
    )  # fmt: skip
    colors = [look(name, list(results))[0] for name in results]
    for word, symbol, values in (
        ("p50 TPOT", "circle", [r.tpot_p50_ms for r in results.values()]),
        ("p99 TPOT", "diamond", [r.tpot_p99_ms for r in results.values()]),
    ):
        fig.add_trace(
            go.Scatter(
                x=np.array(values, np.float32), y=np.arange(len(values), dtype=np.int16),
                mode="markers", marker={"symbol": symbol, "size": 10, "color": colors},
                hovertemplate=f"{word}: %{{x:.2f}} ms<extra></extra>", showlegend=False, **axes,
            )
        )  # fmt: skip
    end = max(r.tpot_p99_ms for r in results.values())
    words = [
        f"{_ms(r.tpot_p50_ms)}, {_ms(r.tpot_p99_ms)}{_against(row, name, 'tpot_p99_ms')}"
        for name, r in results.items()
    ]
    _beside(fig, "2", [r.tpot_p99_ms + 0.06 * end for r in results.values()], words)
    fig.update_layout(xaxis2={"range": [0, end * 2.3]})


def _lost(fig: go.Figure, results: Sequence[SimulationResult]) -> None:
    """Wasted and missed drafts, stacked."""
    y = np.arange(len(results), dtype=np.int16)
    wasted, missed = [r.wasted for r in results], [r.missed for r in results]
    for name, mark, values in (
        ("wasted: verified, not accepted", spec_marks.SLOTS["rejected"], wasted),
        ("missed: trimmed, would be accepted", spec_marks.SLOTS["trimmed"], missed),
    ):
        fig.add_trace(
            go.Bar(
                orientation="h", y=y, x=np.array(values, np.int32), name=theme.ink(name),
                marker=spec_marks.fill(mark), xaxis="x3", yaxis="y3",
                hovertemplate=f"{name}: %{{x:,}} drafts<extra></extra>",
            )
        )  # fmt: skip
    sums = [r.wasted + r.missed for r in results]
    end = max([1, *sums])
    words = [f"{r.wasted:,} + {r.missed:,}" if r.drafted else "nothing drafted" for r in results]
    _beside(fig, "3", [value + 0.02 * end for value in sums], words)
    fig.update_layout(xaxis3={"range": [0, end * 1.6]})


def _name(name: str) -> str:
    return _NAMES.get(name) or theme.short_token(name, _LONGEST)


def percent(change: float | None) -> str:
    """A change as a signed percentage; "undefined" where there is none."""
    return "undefined" if change is None else f"{signed(100 * change, 1)} %"


def _against(row: SweepRow, name: str, kind: Figure) -> str:
    return "" if name == row.baseline else f" ({percent(row.change(name, kind))})"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _rate(row: SweepRow, name: str) -> str:
    words = f"{row.policies[name].tokens_per_second:,.0f}"
    return words + _against(row, name, "tokens_per_second")


def _title(row: SweepRow) -> str:
    change = row.change("adaptive")
    if change is None or row.baseline == "adaptive":
        return "Policies of verification"
    return f"Adaptive: {percent(change)} tokens/s"


def _verdict(row: SweepRow) -> list[str]:
    """Against what the title's change is, the share of the oracle's gain, and what a shorter
    acceptance length came to."""
    change = row.change("adaptive")
    if change is None or row.baseline == "adaptive":
        return []
    mine, other = row.policies["adaptive"], row.policies[row.baseline]
    words = f"against {theme.short_token(row.baseline, _LONGEST)}"
    share = row.share_of_oracle("adaptive")
    words += "" if share is None else f", {100 * share:.0f} % of the oracle's gain"
    if other.acceptance_length - mine.acceptance_length <= _SHORTER:
        return [words]
    lengths = (
        f"acceptance length {mine.acceptance_length:.2f} instead of {other.acceptance_length:.2f}"
    )
    if change > 0:
        worth = "a gain all the same: the rows saved were worth more than the tokens given up"
    else:
        worth = "no gain: the rows saved were not worth the tokens given up"
    return [words, f"{lengths}, {worth}"]


def _remarks(results: Mapping[str, SimulationResult]) -> list[str]:
    said = [
        f"{name} failed in {r.failed_steps:,} of {plural(r.steps, 'step')}, fixed verification in "
        "their place"
        for name, r in results.items()
        if r.failed_steps
    ]
    how = dict.fromkeys(r.estimated_how for r in results.values() if r.estimated)
    if how:
        names = ", ".join(name for name, r in results.items() if r.estimated)
        said.append(f"in part estimated ({names}): {'; '.join(how)}")
    return said


def _text(row: SweepRow, results: Mapping[str, SimulationResult], made: str) -> str:
    said = [
        f"{_title(row)} {'; '.join(_verdict(row))}".strip(),
        f"{plural(row.requests, 'request')}, {row.concurrency:,} together; {made}",
        f"{'policy':<14} {'tokens/s':>9} {'change':>9}  {'p50 ms':>7} {'p99 ms':>7} {'change':>9}"
        f"  {'length':>6} {'wasted':>8} {'missed':>8}  of oracle's gain",
    ]
    for name, r in results.items():
        share = row.share_of_oracle(name)
        told = ["–", "–"]
        if name != row.baseline:
            told = [percent(row.change(name)), percent(row.change(name, "tpot_p99_ms"))]
        said.append(
            f"{_name(name):<14} {r.tokens_per_second:>9,.0f} {told[0]:>9}  {r.tpot_p50_ms:>7.2f} "
            f"{r.tpot_p99_ms:>7.2f} {told[1]:>9}  {r.acceptance_length:>6.2f} {r.wasted:>8,} "
            f"{r.missed:>8,}  {'–' if share is None else f'{100 * share:.0f} %'}"
        )
    return "\n".join([*said, *_remarks(results)])
