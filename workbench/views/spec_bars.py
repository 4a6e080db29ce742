"""Bars of acceptance lengths: each with its standard error, and its n in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np
import plotly.graph_objects as go

from workbench.spec.metrics import Acceptance
from workbench.views import theme
from workbench.views.spec_curves import UNDEFINED

_LONGEST_NAME = 36
# colour, pattern, dash, symbol of the first, second … of several
LOOKS = (
    (theme.SLIDING, "", "solid", "circle"),
    (theme.FULL, "/", "dash", "diamond"),
    (theme.SPARSE, ".", "dot", "square-open"),
    (theme.HEAT, "x", "dashdot", "triangle-up-open"),
    (theme.DENSE, "-", "longdash", "cross-open"),
    (theme.DRAFTER, "+", "longdashdot", "star-open"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBar:
    """One acceptance length to draw; ``value`` None is undefined, ``look`` a place in LOOKS.

    ``n`` says in words what the length was counted over.
    """

    name: str
    value: float | None
    error: float | None = None
    n: str = ""
    look: int = 0

    @property
    def words(self) -> str:
        """The length, its error and its n; in words where it is undefined."""
        if self.value is None:
            return UNDEFINED
        spread = "" if self.error is None else f" ± {self.error:.2f}"
        return f"{self.value:.2f}{spread}" + (f", n = {self.n}" if self.n else "")


def bar_of(name: str, acceptance: Acceptance, look: int = 0) -> LengthBar:
    """The pooled length of an ``Acceptance``, its n the draft events."""
    return LengthBar(name=name, value=acceptance.length_pooled, error=length_error(acceptance),
                     n=f"{acceptance.events:,}", look=look)  # fmt: skip


def bar_of_value(name: str, value: object, n: str = "", look: int = 0) -> LengthBar:
    """A length that is only a number; None, NaN and what is no number are undefined."""
    known = float(value) if isinstance(value, int | float) and isfinite(value) else None
    return LengthBar(name=name, value=known, n=n, look=look)


def length_error(acceptance: Acceptance) -> float | None:
    """Standard error of the acceptance length, its draft events taken for independent.

    ``s / sqrt(events)``, s the sample's standard deviation of the accepted drafts of an event; None
    of fewer than two events.
    """
    n = acceptance.events
    if n < 2:
        return None
    mean = acceptance.accepted / n
    squares = sum(count * (run - mean) ** 2 for run, count in enumerate(acceptance.histogram))
    return sqrt(squares / (n - 1) / n)


def length_bars(
    fig: go.Figure, bars: Sequence[LengthBar], *, axis: str = "", room: float = 1.5
) -> None:
    """A bar from 0 for each length with its error, and beside it the length and n in words.

    The axis ends at ``room`` times the longest, so that the words have their place.
    """
    ends = [(bar.value or 0.0) + (bar.error or 0.0) for bar in bars]
    end = max([1.0, *ends])
    y = np.arange(len(bars), dtype=np.int16)
    looks = [LOOKS[bar.look % len(LOOKS)] for bar in bars]
    fig.add_trace(
        go.Bar(
            orientation="h", y=y, xaxis=f"x{axis}", yaxis=f"y{axis}", hoverinfo="skip",
            x=np.array([np.nan if bar.value is None else bar.value for bar in bars], np.float32),
            error_x={"type": "data", "thickness": 1.5, "width": 5, "color": theme.NEUTRAL,
                     "array": np.array([bar.error or np.nan for bar in bars], np.float32)},
            marker={"color": [theme.rgba(look[0], 0.6) for look in looks],
                    "line": {"color": [look[0] for look in looks], "width": 1},
                    "pattern": {"shape": [look[1] for look in looks], "size": 6, "solidity": 0.35}},
            showlegend=False,
        )
    )  # fmt: skip
    fig.add_trace(
        go.Scatter(
            x=np.array(ends, np.float32) + np.float32(0.02 * end), y=y, mode="text",
            textposition="middle right", cliponaxis=False, hoverinfo="skip", showlegend=False,
            text=[theme.ink(bar.words) for bar in bars], xaxis=f"x{axis}", yaxis=f"y{axis}",
        )
    )  # fmt: skip
    names = [theme.ink(theme.token_label(bar.name, _LONGEST_NAME)) for bar in bars]
    fig.update_layout({
        f"xaxis{axis}": {"title": {"text": theme.ink("tokens per draft event")},
                         "range": [0, end * room]},
        f"yaxis{axis}": {"tickvals": y.tolist(), "range": [len(bars) - 0.4, -0.6],
                         "showgrid": False, "ticktext": names},
    })  # fmt: skip
