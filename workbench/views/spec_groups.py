"""Acceptance lengths of groups: ways to choose a path, classes of text, context, temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.spec.metrics import Acceptance
from workbench.views import spec_marks, theme
from workbench.views.spec_bars import LengthBar, bar_of, bar_of_value, length_bars
from workbench.views.view import View

_ROW = 34  # px of a bar
_LETTER = 6.6  # px of a letter beside a bar
_WAYS = {
    "unary": "unary argmax of each slot",
    "walk": "the selector's walk",
    "oracle": "best path among the candidates",
}
# What the diagnostics of training call them.
_FIGURES = {
    "unary": "acceptance_length_unary",
    "walk": "acceptance_length",
    "oracle": "acceptance_length_oracle",
}


def selector_lengths(
    lengths: Mapping[str, Any], *, n: int | None = None, source: str = "measured here"
) -> View:
    """Acceptance length by how the path through the candidates is chosen, bonus included.

    ``lengths`` has ``unary`` (each slot's own best), ``walk`` (the selector) and ``oracle`` (the
    longest that any path could reach, which no selector does better than), or some of them, each an
    ``Acceptance`` or a length of ``n`` draft events; or it is what ``evaluate_drafter`` of
    ``workbench.training.drafter_evaluate`` gives: these three of each class of held-out text.
    """
    bars: list[LengthBar] = []
    for name, value in lengths.items():
        if isinstance(value, Mapping):
            count = f"{value['tokens']:,} tokens" if "tokens" in value else ""
            bars += [
                bar_of_value(f"{name}: {way}", value.get(figure), count, look)
                for look, (way, figure) in enumerate(_FIGURES.items())
            ]
    for look, way in enumerate([*_WAYS, *(k for k in lengths if k not in _WAYS)]):
        value = lengths.get(way)
        if way not in lengths or isinstance(value, Mapping):
            continue
        name = _WAYS.get(way, way)
        if isinstance(value, Acceptance):
            bars.append(bar_of(name, value, look))
        else:
            bars.append(bar_of_value(name, value, "" if n is None else f"{n:,}", look))
    by_class = any(isinstance(value, Mapping) for value in lengths.values())
    words = "" if not by_class else " · " + "; ".join(f"{k}: {v}" for k, v in _WAYS.items())
    return _groups(bars, "What choosing the path is worth", source, words)


def acceptance_by(
    groups: Mapping[Any, Acceptance], title: str, *, source: str = "measured here"
) -> View:
    """Acceptance length of each group with its standard error and n.

    ``groups`` are those of ``workbench.spec.metrics.group`` or ``by_context``: classes of text,
    bins of context length, temperatures.
    """
    return _groups([bar_of(_group_name(k), v) for k, v in groups.items()], title, source)


def _group_name(key: object) -> str:
    """A context-length bin as by_context names it, or whatever the group is called."""
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], int):
        low, high = key
        return f"{low:,} tokens and more" if high is None else f"{low:,} to {high - 1:,} tokens"
    return str(key)


def _groups(bars: Sequence[LengthBar], title: str, source: str, remark: str = "") -> View:
    spread = ", ± standard error" if any(bar.error is not None for bar in bars) else ""
    left = round(24 + _LETTER * min(36, max([len(bar.name) for bar in bars], default=4)))
    fig = theme.figure(
        title, f"{source} · acceptance length, bonus included{spread}{remark}", bargap=0.35,
        height=80 + 56 + _ROW * max(2, len(bars)), margin={"l": left, "r": 16, "t": 76, "b": 52},
    )  # fmt: skip
    if not bars:
        spec_marks.nothing(fig, "there is no group")
        return View(figure=fig, text=f"{title}: there is no group")
    length_bars(fig, bars)
    width = max(len(bar.name) for bar in bars)
    lines = [f"{bar.name:<{width}}  {bar.words}" for bar in bars]
    return View(figure=fig, text="\n".join([f"{title}: acceptance length", *lines]))
