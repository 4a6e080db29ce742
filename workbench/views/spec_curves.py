"""Acceptance as curves: over a run, by accepted run, by slot of a block. Never a bare mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.spec.metrics import CURVES, Acceptance, Curve, Rate, Tally
from workbench.spec.step import RequestStep, Step
from workbench.views import spec_marks, theme
from workbench.views.numbers import plural
from workbench.views.view import View

WINDOW = 64  # draft events of the windowed mean
UNDEFINED = "undefined: nothing was drafted"
_POINTS = 300  # of a line, at most: a long run stays small in a saved notebook
_NAMED_SLOTS = 16  # up to which every slot has its n under the axis
_LOW, _ENOUGH = 1.05, 16  # acceptance length, over so many events, that says nothing is accepted
# name, what it is a share of, colour, dash, symbol
_CURVES: dict[Curve, tuple[str, str, str, str, str]] = {
    "survival": ("survival", "of all draft events", theme.SPARSE, "solid", "circle"),
    "conditional": ("conditional", "of events verified here with all before accepted",
                    theme.HEAT, "dash", "diamond"),
    "verified_share": ("verified share", "of events with a draft here", theme.NEUTRAL, "dot",
                       "square-open"),
}  # fmt: skip


def length_words(acceptance: Acceptance) -> str:
    """The acceptance length with its n, in words where there is none."""
    length = acceptance.length_pooled
    if length is None:
        return f"acceptance length {UNDEFINED}"
    events = plural(acceptance.events, "draft event")
    return f"acceptance length {length:.2f} (n = {events})"


def _unbroken(acceptance: Acceptance) -> str:
    """The same for a subtitle, where a line must not end within it."""
    return length_words(acceptance).replace(" ", "\u00a0")


def _health(acceptance: Acceptance) -> str:
    judged = sum(acceptance.admitted_at[:1])  # events of which anything was verified
    if judged >= _ENOUGH and 1 + acceptance.accepted / judged < _LOW:
        return " · almost nothing is accepted: does this drafter belong to this target?"
    return ""


# -- over a run -----------------------------------------------------------------------------------


def acceptance_running(
    steps: Sequence[Step], *, window: int = WINDOW, source: str = "measured here"
) -> View:
    """Acceptance length of a run so far, and of its last ``window`` draft events, over its tokens.

    Both lines are ``length_pooled`` of :class:`workbench.spec.metrics.Acceptance`, bonus included.
    A step without drafts is no draft event: it moves the lines to the right and changes neither.
    """
    tokens, pooled, recent, total = _running(steps, max(1, window))
    subtitle = f"{source} · {_unbroken(total)}, bonus included{_health(total)}"
    if total.plain:
        subtitle += f" · {plural(total.plain, 'step')} without drafts counted as no event"
    fig = theme.figure("Acceptance length over the run", subtitle, height=320,
                       legend_under_title=True, margin={"l": 60, "r": 16, "t": 104, "b": 52},
                       legend={"traceorder": "normal"})  # fmt: skip
    if not tokens:
        spec_marks.nothing(fig, UNDEFINED)
        return View(figure=fig, text=f"acceptance length {UNDEFINED}")
    for y, name, color, dash, width in (
        (recent, f"last {window} events", theme.SLIDING, "dot", 1.5),
        (pooled, "all so far (pooled)", theme.SPARSE, "solid", 2.5),
    ):
        fig.add_trace(
            go.Scatter(
                x=np.array(tokens, np.int32), y=np.array(y, np.float32), name=theme.ink(name),
                mode="lines" if len(tokens) > 1 else "markers",
                line={"color": color, "dash": dash, "width": width},
                marker={"color": color, "size": 9, "symbol": _symbol(dash)},
                hovertemplate=f"token %{{x:,}}: %{{y:.2f}}, {name}<extra></extra>",
            )
        )  # fmt: skip
    top = max(*pooled, *recent)
    fig.update_layout(
        xaxis={"title": {"text": theme.ink("tokens emitted")}, "rangemode": "tozero",
               "showgrid": False},
        yaxis={"title": {"text": theme.ink("tokens per draft event")},
               "range": [0.9, top + 0.08 * top]},
        showlegend=True,
    )  # fmt: skip
    last = f"last {plural(min(window, total.events), 'event')}: {recent[-1]:.2f}"
    return View(figure=fig, text=f"{length_words(total)}; {last}{_health(total)}")


def _symbol(dash: str) -> str:
    return "circle" if dash == "solid" else "diamond-open"


def _running(
    steps: Sequence[Step], window: int
) -> tuple[list[int], list[float], list[float], Acceptance]:
    """At some draft events: tokens so far, pooled length, length of the window; then the total."""
    tally, last = Tally(), deque[RequestStep](maxlen=window)
    parts = [part for _, part in spec_marks.parts(steps)]
    events = sum(bool(part.drafted) for part in parts)
    every = max(1, -(-events // _POINTS))
    tokens, pooled, recent = [], [], []
    emitted = seen = 0
    for part in parts:
        tally.add_request(part)
        emitted += len(part.token_ids)
        if not part.drafted:
            continue
        last.append(part)
        seen += 1
        if seen % every and seen != events:
            continue
        some = Tally()
        for other in last:
            some.add_request(other)
        whole, windowed = tally.acceptance().length_pooled, some.acceptance().length_pooled
        if whole is not None and windowed is not None:
            tokens.append(emitted)
            pooled.append(whole)
            recent.append(windowed)
    return tokens, pooled, recent, tally.acceptance()


# -- by accepted run ------------------------------------------------------------------------------


def acceptance_histogram(acceptance: Acceptance, *, source: str = "measured here") -> View:
    """How many draft events accepted 0, 1, … N of their drafts; beside a bar is its share."""
    events = acceptance.events
    subtitle = f"{source} · {_unbroken(acceptance)}{_health(acceptance)}"
    fig = theme.figure("Accepted drafts of a block", subtitle, height=300, bargap=0.2,
                       margin={"l": 60, "r": 16, "t": 80, "b": 52})  # fmt: skip
    if not events:
        spec_marks.nothing(fig, UNDEFINED)
        return View(figure=fig, text=f"accepted runs {UNDEFINED}")
    runs, counts = range(len(acceptance.histogram)), acceptance.histogram
    shares = [count / events for count in counts]
    few = len(runs) <= _NAMED_SLOTS
    fig.add_trace(
        go.Bar(
            x=np.array(runs, np.int16), y=np.array(counts, np.int32),
            marker=spec_marks.fill(spec_marks.SLOTS["accepted"]),
            customdata=np.array(shares, np.float32), hoverinfo="text",
            hovertemplate="%{x} accepted: %{y:,} events, %{customdata:.1%}<extra></extra>",
            text=[theme.ink(f"{share:.0%}") for share in shares] if few else None,
            textposition="outside", cliponaxis=False,
        )
    )  # fmt: skip
    fig.update_layout(
        xaxis={"title": {"text": theme.ink("accepted drafts of a draft event")}, "showgrid": False,
               "dtick": 1 if few else None, "range": [-0.6, len(runs) - 0.4]},
        yaxis={"title": {"text": theme.ink("draft events")}, "range": [0, max(counts) * 1.14]},
        showlegend=False,
    )  # fmt: skip
    each = ", ".join(f"{run}: {count:,}" for run, count in zip(runs, counts, strict=True))
    text = f"{length_words(acceptance)}{_health(acceptance)}\naccepted run, events: {each}"
    return View(figure=fig, text=text)


# -- by slot --------------------------------------------------------------------------------------


def acceptance_curves(acceptance: Acceptance, *, source: str = "measured here") -> View:
    """Survival, conditional acceptance and verified share of every slot, on one axis.

    Each with its 95 % Wilson band and its own n. Survival falls with the slot whatever the drafter
    does; whether later drafts are worse is for the conditional to say.
    """
    slots = len(acceptance.accepted_at)
    reached = [rate.n for rate in acceptance.rates("conditional")]
    never = [str(slot) for slot, n in enumerate(reached, 1) if not n]
    subtitle = f"{source} · bands: 95 %, Wilson · {_unbroken(acceptance)}{_health(acceptance)}"
    if never and acceptance.events:
        which = f"slot {never[0]}" if len(never) == 1 else f"slots {never[0]} to {never[-1]}"
        subtitle += f" · {which} never reached: conditional undefined there"
    few = slots <= _NAMED_SLOTS
    fig = theme.figure(
        "Acceptance by slot of the block", subtitle, height=390, legend_under_title=True,
        margin={"l": 74, "r": 16, "t": 112, "b": 76 if few else 52},
        legend={"traceorder": "normal"},
    )  # fmt: skip
    if not acceptance.events:
        spec_marks.nothing(fig, UNDEFINED)
        return View(figure=fig, text=f"acceptance by slot {UNDEFINED}")
    for curve in CURVES:
        rate_curve(fig, acceptance.rates(curve), *_CURVES[curve])
    fig.update_layout(
        xaxis={
            "range": [0.6, slots + 0.4], "showgrid": False,
            "title": {"text": theme.ink("slot of the block; below it n of the conditional" if few
                                        else "slot of the block")},
            **({"tickvals": list(range(1, slots + 1)),
                "ticktext": [f"{i}<br>n {_short(n)}" for i, n in enumerate(reached, 1)]}
               if few else {}),
        },
        yaxis={"title": {"text": theme.ink("share")}, "range": [-0.03, 1.04],
               "tickformat": ".0%"},
    )  # fmt: skip
    return View(figure=fig, text=_slot_table(acceptance))


def rate_curve(
    fig: go.Figure,
    rates: Sequence[Rate],
    name: str,
    base: str,
    color: str,
    dash: str,
    symbol: str,
    **axes: str,
) -> None:
    """A line of shares over the slots with its band; slots without a base are left out."""
    known: list[tuple[int, Rate, float, float, float]] = [
        (slot, rate, rate.value, rate.low, rate.high)
        for slot, rate in enumerate(rates, 1)
        if rate.value is not None and rate.low is not None and rate.high is not None
    ]
    if not known:
        return
    x = [slot for slot, *_ in known]
    edge = [high for *_, high in known] + [low for *_, low, _ in reversed(known)]
    fig.add_trace(
        go.Scatter(
            x=np.array(x + x[::-1], np.int16), y=np.array(edge, np.float32), fill="toself",
            fillcolor=theme.rgba(color, 0.16), line={"width": 0}, mode="lines", hoverinfo="skip",
            showlegend=False, legendgroup=theme.plain(name), **axes,
        )
    )  # fmt: skip
    numbers: Any = [[low, high, rate.count, rate.n] for _, rate, _, low, high in known]
    fig.add_trace(
        go.Scatter(
            x=np.array(x, np.int16), y=np.array([value for *_, value, _, _ in known], np.float32),
            name=theme.ink(theme.plain(name)), legendgroup=theme.plain(name), mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2},
            marker={"symbol": symbol, "size": 8, "color": color},
            customdata=np.array(numbers, np.float64),
            hovertemplate=f"slot %{{x}}, {theme.plain(name)}: %{{y:.1%}} (%{{customdata[0]:.1%}} "
            "to %{customdata[1]:.1%})<br>%{customdata[2]:,} of n = %{customdata[3]:,}, "
            f"{theme.plain(base)}<extra></extra>",
            **axes,
        )
    )  # fmt: skip


def _short(count: int) -> str:
    return f"{count:,}" if count < 10_000 else f"{count / 1000:,.0f}k"


def _slot_table(acceptance: Acceptance) -> str:
    lines = [length_words(acceptance) + _health(acceptance),
             "slot  survival            conditional               verified"]  # fmt: skip
    curves = zip(*(acceptance.rates(curve) for curve in CURVES), strict=True)
    for slot, (survival, conditional, verified) in enumerate(curves, 1):
        share = "undefined" if verified.value is None else f"{verified.value:.2f}"
        lines.append(
            f"{slot:>4}  {_band(survival):<18}  {_band(conditional):<18} n {conditional.n:>5,}"
            f"  {share}"
        )
    return "\n".join(lines)


def _band(rate: Rate) -> str:
    if rate.value is None:
        return "undefined"
    return f"{rate.value:.2f} ({rate.low:.2f} to {rate.high:.2f})"
