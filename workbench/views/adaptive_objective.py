"""Why a step had its budget: expected tokens a millisecond over it, and what hindsight says."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike

from workbench.errors import DraftError
from workbench.spec.adaptive import Floats, Ints
from workbench.spec.cost_table import CostTable
from workbench.spec.hindsight import Hindsight, hindsight, policy_failed
from workbench.spec.step import Step
from workbench.views import spec_marks, theme
from workbench.views.adaptive_figure import figure
from workbench.views.numbers import plural
from workbench.views.view import View

EXPECTED = theme.SLIDING
HINDSIGHT = theme.SPARSE  # the target's own word, as accepted drafts are
FAILED = theme.FULL
_ESTIMATED = "estimated: nobody judged what was trimmed behind blocks accepted whole"
_DOTS_UP_TO = 32  # budgets, each with a dot
_POINTS = 400  # of a line, at most
_TOP, _CURVES, _GAP, _COST, _FOOT = 104, 230, 34, 84, 52  # px


def objective_curve(
    step: Step,
    table: CostTable,
    *,
    known: ArrayLike | None = None,
    source: str = "measured here",
) -> View:
    """A step's objective over its budget, the budget that was chosen, and the best in hindsight.

    Above, tokens a millisecond: as the policy expected them (where it weighs budgets), as they come
    out now that the verdicts are known, and what the step got. Below, what a step of each budget
    costs by ``table``.

    Args:
        step: a decode step.
        table: of costs; the policy's own, or another one to look at the step with.
        known: as in :func:`workbench.spec.hindsight.hindsight`; without it hindsight may be
            estimated, and says so.
        source: where the step comes from.

    Raises:
        DraftError: ``known`` does not fit the step.
    """
    title = f"Budget of step {step.index}"
    drafted = sum(len(part.drafted) for part in step.requests)
    if step.phase != "decode" or not drafted:
        why = "a prefill drafts nothing" if step.phase != "decode" else "nothing was drafted"
        fig = figure(title, source, height=220)
        spec_marks.nothing(fig, why)
        return View(figure=fig, text=f"budget of step {step.index}: {why}")
    found, unknown = _hindsight(step, table, known)
    failed = policy_failed(step)
    chosen = f"{step.budget} of {plural(drafted, 'draft')} verified"
    why = f"{step.policy}: {step.reason}" if step.policy else "no policy, all there was room for"
    times = table.label or "of a table without a label"
    told = _told(found) if found else f"no hindsight: {unknown}"
    fig = figure(
        title + (": the policy failed" if failed else ""),
        f"{source} · {step.reason if failed else why} · {told} · times: {times}",
        height=_TOP + _CURVES + _GAP + _COST + _FOOT, legend_under_title=True,
        legend={"traceorder": "normal"}, margin={"l": 66, "r": 16, "t": _TOP, "b": _FOOT},
    )  # fmt: skip
    expected = np.array(step.objective)
    largest = max(drafted, len(expected) - 1)
    if len(expected):
        _curve(fig, expected, "expected by the policy", EXPECTED, "solid")
    if found:
        name = "in hindsight" + ("" if found.exact else ", estimated")
        _curve(fig, found.objective, name, HINDSIGHT, "solid" if found.exact else "dash")
    _marks(fig, step, found, expected, failed)
    _cost(fig, step, table, largest)
    inner = _CURVES + _GAP + _COST
    room = max(0.5, 0.02 * largest)
    across = {"range": [-room, largest + room], "showgrid": False}
    fig.update_layout(
        xaxis={**across, "anchor": "y", "matches": "x2", "showticklabels": False},
        xaxis2={**across, "anchor": "y2", "dtick": 1 if largest <= 16 else None,
                "title": {"text": theme.ink("budget: drafts verified, all requests together")}},
        yaxis={"domain": [1 - _CURVES / inner, 1], "anchor": "x",
               "title": {"text": theme.ink("tokens/ms")}},
        yaxis2={"domain": [0, _COST / inner], "anchor": "x2", "rangemode": "tozero", "nticks": 4,
                "title": {"text": theme.ink("ms a step")}},
        showlegend=True,
    )  # fmt: skip
    lines = [f"step {step.index}: {chosen} ({step.reason if failed else why})"]
    if len(expected):
        lines.append(f"expected: {expected[step.budget]:.3f} tokens/ms at the budget chosen, "
                     f"{expected[0]:.3f} without drafts, {expected[-1]:.3f} at {len(expected) - 1}"
                     )  # fmt: skip
    lines.append(told)
    lines.append(f"times: {times}")
    return View(figure=fig, text="\n".join(lines))


def _hindsight(
    step: Step, table: CostTable, known: ArrayLike | None
) -> tuple[Hindsight | None, str]:
    try:
        return hindsight(step, table, known), ""
    except DraftError as error:
        if known is not None:  # what the caller gave is for the caller to put right
            raise
        return None, str(error)


def _told(found: Hindsight) -> str:
    sure = "" if found.exact else f" ({_ESTIMATED})"
    return (
        f"best in hindsight: {plural(found.budget, 'draft')}, {found.best:.3f} tokens/ms{sure}; "
        f"the step got {found.got:.3f}, {found.share:.0%} of it"
    )


def _curve(fig: go.Figure, values: Floats, name: str, color: str, dash: str) -> None:
    at = _some(len(values))
    fig.add_trace(
        go.Scatter(
            x=at.astype(np.int16), y=values[at].astype(np.float32),
            name=theme.ink(name), line={"color": color, "dash": dash, "width": 2},
            mode="lines+markers" if len(values) <= _DOTS_UP_TO else "lines",
            marker={"color": color, "size": 5},
            hovertemplate=f"%{{x}} drafts: %{{y:.3f}} tokens/ms {name}<extra></extra>",
        )
    )  # fmt: skip


def _some(count: int) -> Ints:
    """Budgets that are drawn: all of them, or as many as a line needs."""
    return np.unique(np.linspace(0, count - 1, min(count, _POINTS)).round().astype(np.int64))


def _marks(
    fig: go.Figure, step: Step, found: Hindsight | None, expected: Floats, failed: bool
) -> None:
    color = FAILED if failed else EXPECTED
    for axes in ({"x": "x", "y": "y domain"}, {"x": "x2", "y": "y2 domain"}):
        fig.add_shape(
            type="line", x0=step.budget, x1=step.budget, xref=axes["x"], y0=0, y1=1,
            yref=axes["y"], line={"color": color, "width": 1, "dash": "dot"}, layer="below",
        )  # fmt: skip
    name = "fixed in its place" if failed else "chosen"
    name += f": {plural(step.budget, 'draft')}"
    if len(expected):
        _point(fig, step.budget, float(expected[step.budget]), name, color, "diamond")
    if not found:
        return
    got = "what it got" if len(expected) else f"{name}, what it got"
    _point(fig, step.budget, found.got, got, color, "diamond-open")
    name = f"best in hindsight: {plural(found.budget, 'draft')}"
    _point(fig, found.budget, found.best, name, HINDSIGHT, "star")


def _point(fig: go.Figure, x: int, y: float, name: str, color: str, symbol: str) -> None:
    marker: dict[str, Any] = {"symbol": symbol, "size": 11, "color": color}
    if symbol.endswith("open"):
        marker["line"] = {"width": 2}
    fig.add_trace(
        go.Scatter(
            x=[x], y=[y], mode="markers", name=theme.ink(name), marker=marker,
            hovertemplate=f"{name}<br>%{{x}} drafts: %{{y:.3f}} tokens/ms<extra></extra>",
        )
    )  # fmt: skip


def _cost(fig: go.Figure, step: Step, table: CostTable, largest: int) -> None:
    requests = len(step.requests)
    draft = table.draft_ms(requests)
    at = _some(largest + 1)
    whole = draft + table.verify_ms(at + requests)
    fig.add_trace(
        go.Scatter(
            x=at.astype(np.int16), y=whole.astype(np.float32), xaxis="x2",
            yaxis="y2", mode="lines", line={"color": theme.NEUTRAL, "width": 1.5},
            fill="tozeroy", fillcolor=theme.rgba(theme.NEUTRAL, 0.12),
            name=theme.ink("cost of a step by the table"),
            hovertemplate=f"%{{x}} drafts: %{{y:.2f}} ms, {draft:.2f} of it drafting"
            "<extra></extra>",
        )
    )  # fmt: skip
