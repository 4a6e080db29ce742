"""A run's decisions over time: drafts verified, tokens a second, acceptance length.

The three belong together. Trimming shortens the acceptance length, and that is no loss where the
rows it saves are worth more tokens than it gives up: tokens a second decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import plotly.graph_objects as go

from workbench.errors import DraftError
from workbench.spec.adaptive import Floats
from workbench.spec.hindsight import policy_failed
from workbench.spec.pace import Pace, pace
from workbench.spec.step import Step
from workbench.views import spec_marks, theme
from workbench.views.adaptive_figure import HEADING, figure
from workbench.views.numbers import plural
from workbench.views.spec_curves import UNDEFINED
from workbench.views.view import View

Over = Literal["time", "step"]
WINDOW = 16  # steps
COLOR, AGAINST, FAILED = theme.SLIDING, theme.NEUTRAL, theme.FULL
DRAFTED = theme.DRAFTER
_POINTS = 200  # of a line, at most
_SHORTER = 0.005  # tokens by which a length is told to be shorter
_EQUAL = 0.01  # speeds closer than this share are told as equal: one run is no finer
_PANELS = (  # title, unit
    ("drafts verified", "drafts a step"),
    ("speed: what counts", "tokens/s"),
    ("acceptance length: trimming shortens it", "tokens/event"),
)
_TOP, _PANEL, _GAP, _FOOT = 94, 120, 42, 52  # px


def decisions_over_time(
    steps: Sequence[Step],
    *,
    against: Sequence[Step] | None = None,
    window: int = WINDOW,
    over: Over = "time",
    source: str = "measured here",
) -> View:
    """Three panels on one axis: drafts verified of those drafted, tokens/s, acceptance length.

    Lines are of the last ``window`` decode steps; prefills count nowhere, nor does their time.

    Args:
        steps: of a run.
        against: of another run of the same prompts, with fixed verification; drawn beside it, and
            a sentence says what the difference comes to.
        window: decode steps.
        over: wall ``time`` of decode steps, or the ``step``.
        source: where the steps come from.

    Raises:
        DraftError: a window below 1, or another word for the axis.
    """
    if over not in get_args(Over):
        raise DraftError(f"a run goes over {' or '.join(get_args(Over))}, not {over!r:.40}")
    run, other = pace(steps, window), None if against is None else pace(against, window)
    title = "Decisions over time"
    if not len(run.index):
        fig = figure(title, source, height=220)
        spec_marks.nothing(fig, "there is no decode step")
        return View(figure=fig, text="decisions over time: there is no decode step")
    told = _compared(run, other) if other is not None else ""
    names = _policies(steps)
    words = f"last {plural(window, 'step')} · {told or _alone(run)}{_failures(steps)}"
    inner = HEADING + 3 * _PANEL + 2 * _GAP
    fig = figure(
        title, f"{source} · {words}", height=_TOP + inner + _FOOT, legend_under_title=True,
        margin={"l": 66, "r": 16, "t": _TOP, "b": _FOOT}, legend={"traceorder": "normal"},
        showlegend=True,
    )  # fmt: skip
    _drafted(fig, run, over)
    if other is not None and len(other.index):
        _line(fig, other, over, _policies(against or ()) + ", for comparison", AGAINST, "dash")
    _line(fig, run, over, names, COLOR, "solid")
    _failed(fig, run, steps, over)
    unit = "decode time, s" if over == "time" else "decode step"
    end = max(float(_at(r, over)[-1]) for r in (run, other) if r is not None and len(r.index))
    axes: dict[str, Any] = {}
    for n, (_, label) in enumerate(_PANELS):
        axis = "" if n == 0 else str(n + 1)
        top = 1 - (HEADING + n * (_PANEL + _GAP)) / inner
        axes[f"yaxis{axis}"] = {
            "domain": [max(0.0, top - _PANEL / inner), top], "anchor": f"x{axis}", "nticks": 4,
            "title": {"text": theme.ink(label)}, "rangemode": "normal" if n == 2 else "tozero",
        }  # fmt: skip
        axes[f"xaxis{axis}"] = {
            "anchor": f"y{axis}", "showgrid": False, "range": [0, end * 1.015 or 1],
            **({"title": {"text": theme.ink(unit)}} if n == 2
               else {"matches": "x3", "showticklabels": False}),
        }  # fmt: skip
    fig.update_layout(axes)
    for n, (heading, _) in enumerate(_PANELS, 1):
        theme.panel_title(fig, n, heading)
    return View(figure=fig, text=_text(run, other, names, told + _failures(steps)))


def _at(run: Pace, over: str) -> Floats:
    return run.seconds if over == "time" else np.arange(1, len(run.index) + 1, dtype=np.float64)


def _some(n: int) -> Any:
    """Places of at most so many points, the last one among them."""
    return np.unique(np.linspace(0, n - 1, min(n, _POINTS)).round().astype(int))


def _drafted(fig: go.Figure, run: Pace, over: str) -> None:
    at = _some(len(run.index))
    fig.add_trace(
        go.Scatter(
            x=_at(run, over)[at].astype(np.float32), y=run.drafted_mean[at].astype(np.float32),
            mode="lines" if len(at) > 1 else "markers", name=theme.ink("drafted"),
            line={"color": DRAFTED, "dash": "dot", "width": 1.5},
            marker={"color": DRAFTED, "symbol": "circle-open", "size": 8},
            hovertemplate="%{y:,.1f} drafted a step<extra></extra>",
        )
    )  # fmt: skip


def _line(fig: go.Figure, run: Pace, over: str, name: str, color: str, dash: str) -> None:
    at = _some(len(run.index))
    name = theme.plain(name)
    values = (run.admitted_mean, run.speed, run.length)
    for n, (y, form) in enumerate(zip(values, (",.1f", ",.0f", ".2f"), strict=True)):
        axis = "" if n == 0 else str(n + 1)
        fill = {"fill": "tozeroy", "fillcolor": theme.rgba(color, 0.14)} if n == 0 else {}
        fig.add_trace(
            go.Scatter(
                x=_at(run, over)[at].astype(np.float32), y=y[at].astype(np.float32),
                mode="lines" if len(at) > 1 else "markers", name=theme.ink(name),
                legendgroup=name, showlegend=n == 0,
                line={"color": color, "dash": dash, "width": 2},
                marker={"color": color, "size": 8}, xaxis=f"x{axis}", yaxis=f"y{axis}",
                hovertemplate=f"%{{y:{form}}} {_PANELS[n][1]}, {name}<extra></extra>",
                **(fill if dash == "solid" else {}),
            )
        )  # fmt: skip


def _failed(fig: go.Figure, run: Pace, steps: Sequence[Step], over: str) -> None:
    numbers = [step.index for step in steps if step.phase == "decode" and policy_failed(step)]
    at = np.flatnonzero(np.isin(run.index, numbers))
    if at.size:
        at = at[_some(len(at))]
        fig.add_trace(
            go.Scatter(
                x=_at(run, over)[at].astype(np.float32), y=run.admitted_mean[at].astype(np.float32),
                mode="markers", marker={"color": FAILED, "symbol": "x", "size": 7},
                name=theme.ink(f"the policy failed ({plural(len(numbers), 'step')})"),
                hovertemplate="the policy failed: fixed verification in its place<extra></extra>",
            )
        )  # fmt: skip


def _policies(steps: Sequence[Step]) -> str:
    """Names of the policies that decided, in the order they came."""
    names = dict.fromkeys(step.policy for step in steps if step.policy)
    return ", ".join(theme.short_token(name, 24) for name in names) or "no policy"


def _failures(steps: Sequence[Step]) -> str:
    failed = [step for step in steps if policy_failed(step)]
    if not failed:
        return ""
    return f" · in {plural(len(failed), 'step')}: {failed[0].reason}"


def _alone(run: Pace) -> str:
    share = _percent(int(run.admitted.sum()), int(run.drafted.sum()))
    return f"{share} verified · {_length(run)} · {_speed(run)}"


def _compared(run: Pace, other: Pace) -> str:
    """What the difference comes to, in a sentence that does not take a shorter length for worse."""
    speed, before = run.total_speed, other.total_speed
    if not len(other.index):
        return "the run to compare with has no decode step"
    if speed is None or not before:
        return "no time is known of one of the runs, so nobody can say which was faster"
    length, longer = run.total_length, other.total_length
    shorter = length is not None and longer is not None and longer - length > _SHORTER
    ratio = speed / before
    if abs(ratio - 1) < _EQUAL:
        verdict = "the same tokens/s within 1 %: neither gain nor loss"
    elif ratio > 1:
        verdict = f"{ratio - 1:.1%} more tokens/s: a gain" + (
            ", the rows it saved were worth more than the tokens given up" if shorter else ""
        )
    else:
        verdict = f"{1 - ratio:.1%} fewer tokens/s: a loss" + (
            ", the tokens given up were worth more than the rows it saved" if shorter else ""
        )
    words = verdict + " (one run each)"
    if length is not None and longer is not None:
        words = f"acceptance length {length:.2f} instead of {longer:.2f} and {words}"
    if run.tokens != other.tokens:
        words += f"; the runs gave {run.tokens:,} and {other.tokens:,} tokens"
    return words


def _percent(count: int, base: int) -> str:
    return f"{count / base:.0%} of {base:,} drafts" if base else "no drafts"


def _length(run: Pace) -> str:
    if run.total_length is None:
        return f"acceptance length {UNDEFINED}"
    return f"acceptance length {run.total_length:.2f}"


def _speed(run: Pace) -> str:
    if run.total_speed is None:
        return "no time known"
    deciding = run.deciding / run.total_seconds
    return f"{run.total_speed:,.0f} tokens/s" + (f", {deciding:.1%} of the time for deciding"
                                                 if run.deciding else "")  # fmt: skip


def _text(run: Pace, other: Pace | None, names: str, told: str) -> str:
    lines = [
        f"{names}: {plural(len(run.index), 'decode step')}, {run.tokens:,} tokens; {_alone(run)}"
    ]
    if other is not None and len(other.index):
        lines.append(
            f"against it: {plural(len(other.index), 'decode step')}, {other.tokens:,} tokens; "
            + _alone(other)
        )
    return "\n".join([*lines, told.removeprefix(" · ")] if told else lines)
