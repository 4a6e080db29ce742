"""One step's drafts as a map: how likely each was to survive, and where verification ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from workbench.errors import DraftError
from workbench.spec.hindsight import policy_failed
from workbench.spec.step import RequestStep, Step
from workbench.views import spec_marks, theme
from workbench.views.adaptive_figure import figure
from workbench.views.numbers import plural
from workbench.views.view import View

Sort = Literal["survival", "request"]
Places = list[tuple[int, int]]  # slot from 1, row from 0
FRONTIER = theme.SLIDING
MOST = 128
_MOST_CELLS = 1000  # that a saved notebook holds in 30 kB: 128 rows of 7
_TOLD, _TOLD_SLOTS = 16, 140  # rows of the text, and slots in all of them
_NAMED_ROWS, _NAMED_SLOTS = 32, 16  # up to which every one has its number
_SIGNS_FROM = 14  # px of a row from which each slot has a sign; below it refusals alone
_TICKS = [0, 0.25, 0.5, 0.75, 1]
_HALO = "rgba(255,255,255,0.8)"  # under lines and signs that lie on any colour of the map
_TOP, _LEAST, _FOOT = 108, 84, 52  # px: above the map, the least of it, below


def survival_map(
    step: Step,
    *,
    most: int = MOST,
    sort: Sort = "survival",
    source: str = "measured here",
) -> View:
    """Requests (rows) by slots (columns) of a step: colour is a draft's survival.

    Survival is the running product of the estimator's live confidences (``expected``), where a step
    has none that of the drafter's own. The line is the frontier: what is left of it was verified.
    Left of it signs say what the target made of each slot; where rows are too low for signs, only
    refusals are marked: all to their left was accepted.

    Args:
        step: a decode step.
        most: rows at most, those that come first.
        sort: ``survival``: the request that was expected to have most drafts accepted on top;
            ``request``: in the order of the step.
        source: where the step comes from.

    Raises:
        DraftError: no row at all, or another word for the order.
    """
    if most < 1:
        raise DraftError(f"a survival map has at least one row, not {most}")
    if sort not in get_args(Sort):
        raise DraftError(f"rows are sorted by {' or '.join(get_args(Sort))}, not {sort!r:.40}")
    parts = [part for part in step.requests if part.drafted]
    title = f"Survival of the drafts of step {step.index}"
    if not parts:
        why = "a prefill drafts nothing" if step.phase == "prefill" else "nothing was drafted"
        fig = figure(title, source, height=220)
        spec_marks.nothing(fig, why)
        return View(figure=fig, text=f"survival of step {step.index}: {why}")
    own = not all(len(part.expected) == len(part.drafted) for part in parts)
    found = [(part, _survival(part, own)) for part in parts]
    if sort == "survival":
        found.sort(key=lambda pair: -float(np.nansum(pair[1])))
    slots = max(len(part.drafted) for part in parts)
    shown = found[: min(most, max(1, _MOST_CELLS // slots))]
    count = len(shown)
    px = 22 if count <= 12 else 16 if count <= 32 else 10 if count <= 64 else 6
    words = _subtitle(step, parts, count, own)
    fig = figure(
        title + (": the policy failed" if policy_failed(step) else ""), f"{source} · {words}",
        height=_TOP + max(_LEAST, px * count) + _FOOT,
        legend_under_title=True, margin={"l": 62, "r": 16, "t": _TOP, "b": _FOOT},
        legend={"traceorder": "normal", "itemclick": False, "itemdoubleclick": False},
    )  # fmt: skip
    rows = [part for part, _ in shown]
    _heat(fig, shown, slots)
    _frontier(fig, rows)
    if px >= _SIGNS_FROM:
        _signs(fig, rows)
    else:
        _refusals(fig, rows)
    every = count <= _NAMED_ROWS
    fig.update_layout(
        xaxis={
            "title": {"text": theme.ink("slot of the block")}, "showgrid": False,
            "range": [0.5, slots * 1.006 + 0.5], "dtick": 1 if slots <= _NAMED_SLOTS else None,
        },
        yaxis={
            "title": {"text": theme.ink("request" if every else "requests" + _order(sort))},
            "range": [count - 0.5, -0.5], "showgrid": False, "showticklabels": every,
            **({"tickvals": list(range(count)), "ticktext": [str(p.request) for p in rows]}
               if every else {}),
        },
    )  # fmt: skip
    return View(figure=fig, text=_text(step, shown, words))


def _survival(part: RequestStep, own: bool) -> NDArray[np.float64]:
    """What a policy ranks by; of NaN confidences NaN, also behind them."""
    given = part.confidences if own else part.expected
    if len(given) != len(part.drafted):
        return np.full(len(part.drafted), np.nan)
    return np.asarray(given, np.float64).cumprod()


def _order(sort: str) -> str:
    return ", most expected on top" if sort == "survival" else ", in the order of the step"


def _subtitle(step: Step, parts: Sequence[RequestStep], count: int, own: bool) -> str:
    drafted = sum(len(part.drafted) for part in parts)
    accepted = sum(part.accepted for part in parts)
    words = f"{step.budget} of {plural(drafted, 'draft')} verified, {accepted} of them accepted"
    if step.reason:
        words += f" · {'' if policy_failed(step) else step.policy + ': '}{step.reason}"
    if own:
        words += " · confidences are the drafter's own, not calibrated"
    if count < len(parts):
        words += f" · {count} of {len(parts)} requests shown"
    return words


def _heat(
    fig: go.Figure, shown: Sequence[tuple[RequestStep, NDArray[np.float64]]], slots: int
) -> None:
    z = np.full((len(shown), slots), np.nan, np.float32)
    for row, (_, survival) in enumerate(shown):
        z[row, : len(survival)] = survival
    told = np.array([[[p.request, p.admitted, p.accepted]] for p, _ in shown], np.int32)
    if told.max() < 1 << 15:
        told = told.astype(np.int16)
    few = len(shown) <= 8
    fig.add_trace(
        go.Heatmap(
            z=z, x=np.arange(1, slots + 1, dtype=np.int16), zmin=0, zmax=1, xgap=1,
            ygap=1 if len(shown) <= _NAMED_ROWS else 0, hoverongaps=False,
            colorscale=theme.linear_scale(), customdata=np.repeat(told, slots, 1),
            hovertemplate="request %{customdata[0]}, slot %{x}: survival %{z:.1%}<br>"
            "verified %{customdata[1]}, accepted %{customdata[2]}<extra></extra>",
            colorbar=theme.colorbar("survival" if few else "live survival", tickformat=".0%",
                                    x=1.01, xpad=4, tickvals=[0, 1] if few else _TICKS),
        )
    )  # fmt: skip


def _frontier(fig: go.Figure, rows: Sequence[RequestStep]) -> None:
    x = np.array([part.admitted + 0.5 for part in [*rows, rows[-1]]], np.float32)
    y = np.arange(len(rows) + 1, dtype=np.float32) - np.float32(0.5)
    for color, width in ((_HALO, 6), (FRONTIER, 3)):
        fig.add_trace(
            go.Scatter(
                x=x, y=y, mode="lines", hoverinfo="skip", cliponaxis=False,
                line={"color": color, "width": width, "shape": "vh"}, showlegend=width == 3,
                name=theme.ink("frontier: verified to its left"),
            )
        )  # fmt: skip


def _signs(fig: go.Figure, rows: Sequence[RequestStep]) -> None:
    """The sign of each slot. A trace of text has "Aa" for its mark in a legend, so the names have
    the signs and stand at marks that cannot be seen."""
    first, behind = _refused(rows)
    signs: tuple[tuple[str, Places, spec_marks.Slot, bool], ...] = (
        ("accepted", _of("accepted", rows), "accepted", False),
        ("refused", first, "rejected", False),
        ("behind a refused one, verified in vain", behind, "rejected", True),
        ("trimmed, never verified", _of("trimmed", rows), "trimmed", False),
    )
    for name, places, sign, faint in signs:
        if not places:
            continue
        x, y = np.array(places, np.int16).T
        letter = spec_marks.SLOTS[sign].sign
        # Faint signs are those whose verdict no longer mattered.
        letter = f"({letter})" if faint else f"<b>{letter}</b>"
        fig.add_trace(
            go.Scatter(x=x, y=y, mode="text", text=theme.ink(letter, faint=faint),
                       hoverinfo="skip", showlegend=False)
        )  # fmt: skip
        fig.add_trace(
            go.Scatter(
                x=x[:1], y=y[:1], mode="markers", marker={"color": "rgba(0,0,0,0)"},
                hoverinfo="skip", name=theme.ink(f"{letter} {name} ({len(places)})"),
            )
        )  # fmt: skip


def _refusals(fig: go.Figure, rows: Sequence[RequestStep]) -> None:
    first, behind = _refused(rows)
    color = spec_marks.SLOTS["rejected"].color
    for places, name, symbol, size in (
        (first, "refused, all to its left accepted", "x", 6),
        (behind, "behind it, verified in vain", "circle", 4),
    ):
        if places:
            x, y = np.array(places, np.int16).T
            marker: dict[str, Any] = {"symbol": symbol, "size": size, "color": color,
                                      "line": {"color": _HALO, "width": 1}}  # fmt: skip
            fig.add_trace(
                go.Scatter(x=x, y=y, mode="markers", hoverinfo="skip", marker=marker,
                           name=theme.ink(f"{name} ({len(places)})"))
            )  # fmt: skip


def _of(fate: spec_marks.Slot, rows: Sequence[RequestStep]) -> Places:
    """Where the slots are that became so."""
    return [
        (slot, row)
        for row, part in enumerate(rows)
        for slot, found in enumerate(spec_marks.slot_fates(part), 1)
        if found == fate
    ]


def _refused(rows: Sequence[RequestStep]) -> tuple[Places, Places]:
    """Slots that the target refused, and those verified behind one, which no longer mattered."""
    every = _of("rejected", rows)
    first = [(slot, row) for slot, row in every if slot == rows[row].accepted + 1]
    return first, [place for place in every if place not in set(first)]


def _text(step: Step, shown: Sequence[tuple[RequestStep, NDArray[np.float64]]], words: str) -> str:
    lines = [f"step {step.index}: {words}", "request  slots    survival"]
    told = min(_TOLD, max(1, _TOLD_SLOTS // len(shown[0][1])))
    for part, survival in shown[:told]:
        signs = "".join(spec_marks.SLOTS[fate].sign for fate in spec_marks.slot_fates(part))
        each = " ".join("?" if s != s else f"{s:.2f}" for s in survival)
        lines.append(f"{part.request:>7}  {signs:<7}  {each}")
    if len(shown) > told:
        lines.append(f"and {plural(len(shown) - told, 'more request')}")
    return "\n".join([*lines, "(✓ accepted, ✗ refused or behind a refused one, ○ trimmed)"])
