"""Marks of drafting: how a token's kind and a slot's fate are drawn, in figures, pages and text.

No mark is a colour alone: tokens differ by line, weight and sign, slots by pattern. No kind of
layer is drawn beside them, so the colours that stand for those elsewhere speak of tokens here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import plotly.graph_objects as go

from workbench.spec.step import Kind, RequestStep, Step
from workbench.views import theme
from workbench.views.numbers import plural

Slot = Literal["accepted", "rejected", "trimmed"]


class TokenTexts(Protocol):
    """What views need of a tokenizer: :class:`workbench.model.tokenizer.Tokenizer` has it."""

    def token_text(self, token_id: int) -> str:
        """One token as a label."""
        ...

    def decode_stream(self) -> Any:
        """A decoder with ``push(id) -> str`` and ``flush() -> str``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How one kind of token, or one fate of a slot, looks.

    ``sign`` is its letter in texts and hovers, ``css`` its style in a page, ``pattern`` and
    ``symbol`` those of plotly.
    """

    word: str
    sign: str
    color: str
    pattern: str = ""
    symbol: str = ""
    css: tuple[str, ...] = ()


def _line(style: str, color: str, *more: str) -> tuple[str, ...]:
    return (f"border-bottom:{style} {color}", *more)


KINDS: Mapping[Kind, Mark] = {
    "first": Mark(
        word="first, from the prefill", sign="›", color=theme.NEUTRAL, pattern="|",
        symbol="triangle-right-open", css=_line("2px dashed", theme.NEUTRAL),
    ),
    "plain": Mark(
        word="plain, no draft verified", sign="·", color=theme.NEUTRAL, symbol="circle-open",
        css=_line("2px solid", "transparent"),
    ),
    "accepted": Mark(
        word="accepted draft", sign="✓", color=theme.SPARSE, symbol="circle",
        css=_line("2px solid", theme.SPARSE, f"background:{theme.rgba(theme.SPARSE, 0.14)}"),
    ),
    "corrected": Mark(
        word="corrected by the target", sign="≠", color=theme.HEAT, pattern="/", symbol="diamond",
        css=(f"border:2px solid {theme.HEAT}", "font-weight:700"),
    ),
    "bonus": Mark(
        word="bonus behind a whole block", sign="+", color=theme.SLIDING, pattern="x",
        symbol="star", css=_line("4px double", theme.SLIDING, "font-style:italic",
                                 "font-weight:700"),
    ),
}  # fmt: skip
SLOTS: Mapping[Slot, Mark] = {
    "accepted": Mark(word="accepted", sign="✓", color=theme.SPARSE),
    "rejected": Mark(word="rejected", sign="✗", color=theme.FULL, pattern="/"),
    "trimmed": Mark(word="trimmed, never verified", sign="○", color=theme.NEUTRAL, pattern="."),
}


def kind_words(kind: Kind, part: RequestStep) -> str:
    """What a token of this kind is, in the step it came from: why a plain one is plain, too."""
    if kind != "plain" or part.admitted:
        return KINDS[kind].word
    if not part.drafted:
        return "plain, nothing drafted"
    return f"plain, {plural(part.trimmed, 'draft')} trimmed"


def slot_fates(part: RequestStep) -> list[Slot]:
    """What became of each drafted token of a block, in order."""
    counts: Mapping[Slot, int] = {
        "accepted": part.accepted,
        "rejected": part.rejected,
        "trimmed": part.trimmed,
    }
    return [fate for fate, count in counts.items() for _ in range(count)]


def fill(mark: Mark, opacity: float = 0.75) -> dict[str, Any]:
    """A plotly bar's ``marker``: the colour where there is no pattern, strokes of it else."""
    return {
        "color": theme.rgba(mark.color, opacity),
        "line": {"width": 1, "color": mark.color},
        "pattern": {
            "shape": mark.pattern, "size": 5, "solidity": 0.4, "fillmode": "replace",
            "fgcolor": mark.color, "bgcolor": theme.rgba(mark.color, 0.15),
        },
    }  # fmt: skip


def label(tokenizer: TokenTexts | None, token_id: int, limit: int = 14) -> str:
    """A token as a label, not escaped: its text where there is a tokenizer, else its id."""
    if token_id < 0:
        return "(none)"
    if tokenizer is None:
        return f"#{token_id}"
    return theme.short_token(tokenizer.token_text(token_id), limit)


def parts(
    steps: Step | RequestStep | Sequence[Step], request: int | None = None
) -> list[tuple[int | None, RequestStep]]:
    """Every request's part of every step, in order, with the step's number (None where a part was
    given alone); of one request where one is named."""
    if isinstance(steps, RequestStep):
        return [(None, steps)]
    each = [steps] if isinstance(steps, Step) else steps
    return [(s.index, r) for s in each for r in s.requests if request in (None, r.request)]


def nothing(fig: go.Figure, words: str) -> None:
    """Say in the middle of an empty figure why it is empty."""
    hidden = {"range": [0, 1], "showticklabels": False, "showgrid": False}
    fig.add_annotation(text=theme.ink(theme.plain(words)), x=0.5, y=0.5, xref="paper",
                       yref="paper", showarrow=False)  # fmt: skip
    fig.update_layout(xaxis=hidden, yaxis=hidden)
