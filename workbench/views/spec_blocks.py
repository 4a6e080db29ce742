"""A strip of blocks: every drafted slot of every step, how sure the drafter was, what it became."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.spec.step import RequestStep, Step
from workbench.views import spec_marks, theme
from workbench.views.numbers import plural
from workbench.views.spec_marks import TokenTexts
from workbench.views.view import View

LAST = 40  # blocks shown unless asked otherwise
_MOST_CELLS = 400  # slots that a saved notebook can hold with their hovers
_ROW_CELLS = 86  # slots in a row of the strip: 8 px each on a narrow page
_NAMED_CELLS = 27  # slots in all up to which each has its token written below
_FEW = 6  # candidates in a hover where there are many blocks
_GAP = 1.2  # between blocks, in slots
_PITCH = 1.5  # from row to row, a bar of confidence 1 being 1
_TRACK = "rgba(128,128,128,0.13)"
_LEFT = 56

Part = tuple[int | None, RequestStep]


def block_strip(
    steps: Step | RequestStep | Sequence[Step],
    tokenizer: TokenTexts | None = None,
    *,
    request: int | None = None,
    last: int = LAST,
    source: str = "measured here",
) -> View:
    """A block for each request's part of a step: its drafted slots, then the token behind them.

    A bar is the drafter's confidence in a slot's token, its fill what became of it; a symbol is the
    corrected, bonus, plain or first token. The hover has the token, and with the ``detail`` of
    decoding the candidates: their unary and their realized score, best realized first, and which
    one the walk took. ``steps`` may be one step or one part; ``request`` picks one of several.
    The last blocks are shown, fewer where they are long.
    """
    parts = spec_marks.parts(steps, request)
    slots = max([len(r.drafted) for _, r in parts], default=0)
    fits = max(1, _MOST_CELLS // (slots + 1))
    shown = parts[-min(last, fits) :] if last > 0 else []
    slots = max([len(r.drafted) for _, r in shown], default=0)
    wide = len({r.request for _, r in shown}) > 1
    subtitle = (
        f"{source} · bar: the drafter's own confidence, fill: what became of the slot · "
        + _counted(shown, len(parts))
    )
    if not shown:
        fig = theme.figure("Blocks, step by step", subtitle, height=220)
        spec_marks.nothing(fig, "no step was given")
        return View(figure=fig, text="no step was given")
    block = slots + 1 + _GAP
    across = max(1, int(_ROW_CELLS // block))
    rows = -(-len(shown) // across)
    across = min(across, len(shown))
    named = len(shown) * (slots + 1) <= _NAMED_CELLS
    row_height = 190 if named else 150 if rows == 1 else 82
    below = 96 if named else 44
    fig = theme.figure(
        "Blocks, step by step", subtitle, height=112 + below + row_height * rows,
        margin={"l": _LEFT, "r": 16, "t": 112, "b": below}, legend_under_title=True,
        legend={"traceorder": "normal", "itemclick": False, "itemdoubleclick": False},
        barmode="overlay", bargap=0.0,
    )  # fmt: skip
    places = [((n % across) * block, -(n // across) * _PITCH) for n in range(len(shown))]
    _tracks(fig, shown, places, tokenizer, whole=len(shown) * (slots + 1) <= 90)
    _bars(fig, shown, places, named)
    _tokens(fig, shown, places, tokenizer)
    _labels(fig, shown, places, block, wide)
    fig.update_layout(
        xaxis=_across(shown, places, across * block, tokenizer, named),
        yaxis={
            "range": [-(rows - 1) * _PITCH - (0.4 if rows > 1 else 0.25), 1.06],
            "tickvals": [-r * _PITCH + v for r in range(rows) for v in (0, 1)],
            "ticktext": ["0", "1"] * rows, "showgrid": False,
            "title": {"text": theme.ink("confidence")},
        },
    )  # fmt: skip
    return View(figure=fig, text=_text(shown, len(parts), tokenizer))


def _counted(shown: Sequence[Part], of: int) -> str:
    blocks = [r for _, r in shown]
    fates = [fate for r in blocks for fate in spec_marks.slot_fates(r)]
    which = plural(len(shown), "block") if len(shown) == of else f"the last {len(shown)} of {of:,}"
    if not fates:
        return f"{which}, nothing was drafted"
    each = ", ".join(f"{fates.count(fate)} {fate}" for fate in spec_marks.SLOTS)
    return f"{which}, {plural(len(fates), 'slot')}: {each}"


def _tracks(
    fig: go.Figure, shown: Sequence[Part], places: Any, tokenizer: TokenTexts | None, whole: bool
) -> None:
    """The empty column of every slot: it shows where a low bar is, and carries the hover."""
    x, base, words = [], [], []
    for (number, part), (left, up) in zip(shown, places, strict=True):
        for slot in range(len(part.drafted)):
            x.append(left + slot)
            base.append(up)
            words.append(_hover(number, part, slot, tokenizer, whole))
    fig.add_trace(
        go.Bar(
            x=np.array(x, np.float32), y=np.ones(len(x), np.int8), base=np.array(base, np.float32),
            width=0.86, marker={"color": _TRACK, "line": {"width": 0}}, hovertext=words,
            hoverinfo="text", showlegend=False,
        )
    )  # fmt: skip


def _bars(fig: go.Figure, shown: Sequence[Part], places: Any, named: bool) -> None:
    for fate, mark in spec_marks.SLOTS.items():
        x, y, base, opacity = [], [], [], []
        for (_, part), (left, up) in zip(shown, places, strict=True):
            for slot, found in enumerate(spec_marks.slot_fates(part)):
                if found == fate:
                    x.append(left + slot)
                    # The refused slot itself stands out from those behind it.
                    opacity.append(0.5 if fate == "rejected" and slot > part.accepted else 1)
                    y.append(part.confidences[slot] if slot < len(part.confidences) else np.nan)
                    base.append(up)
        fig.add_trace(
            go.Bar(
                x=np.array(x, np.float32), y=np.array(y, np.float32),
                base=np.array(base, np.float32), width=0.86,
                marker={**spec_marks.fill(mark), "opacity": np.array(opacity, np.float32)},
                name=theme.ink(f"{fate} ({len(x)})"), hoverinfo="skip", showlegend=bool(x),
                text=[theme.ink("?" if v != v else f"{v:.2f}") for v in y] if named else None,
                textposition="outside", textangle=0, cliponaxis=False,
            )
        )  # fmt: skip


def _tokens(
    fig: go.Figure, shown: Sequence[Part], places: Any, tokenizer: TokenTexts | None
) -> None:
    """What the target itself gave: behind the slots, at half height, since it has no confidence."""
    for kind, mark in spec_marks.KINDS.items():
        if kind == "accepted":
            continue
        x, y, words = [], [], []
        for (number, part), (left, up) in zip(shown, places, strict=True):
            if part.kinds and part.kinds[-1] == kind:
                x.append(left + len(part.drafted))
                y.append(up + 0.5)
                name = theme.plain(spec_marks.label(tokenizer, part.token_ids[-1], 40))
                said = spec_marks.kind_words(kind, part)
                words.append(f"{_where(number)}<b>{name}</b><br>{said}{_end(part)}")
        if x:
            fig.add_trace(
                go.Scatter(
                    x=np.array(x, np.float32), y=np.array(y, np.float32), mode="markers",
                    marker={"symbol": mark.symbol, "size": 9, "color": mark.color,
                            "line": {"width": 1.5 if mark.symbol.endswith("open") else 0}},
                    name=theme.ink(f"{kind} ({len(x)})"), hovertext=words, hoverinfo="text",
                )
            )  # fmt: skip


def _labels(fig: go.Figure, shown: Sequence[Part], places: Any, block: float, wide: bool) -> None:
    """The step's number under the start of its block, and the request's where there are several."""
    words = []
    for number, part in shown:
        name = "" if number is None else f"{number}"
        words.append(f"{name} r{part.request}" if wide else name)
    if any(words):
        fig.add_trace(
            go.Scatter(
                x=np.array([left - 0.45 for left, _ in places], np.float32),
                y=np.array([up - 0.12 for _, up in places], np.float32), mode="text", text=words,
                textposition="bottom right", hoverinfo="skip", showlegend=False,
                textfont={"size": theme.SMALL, "color": theme.NEUTRAL},
            )
        )  # fmt: skip


def _across(
    shown: Sequence[Part], places: Any, width: float, tokenizer: TokenTexts | None, named: bool
) -> dict[str, Any]:
    axis: dict[str, Any] = {
        "range": [-0.7, width - _GAP + 0.4], "showgrid": False, "showticklabels": named,
        "title": {"text": theme.ink("step, its slots from left to right")},
    }  # fmt: skip
    if named:
        ticks = [
            (left + slot, spec_marks.label(tokenizer, token))
            for (_, part), (left, _) in zip(shown, places, strict=True)
            for slot, token in enumerate([*part.drafted, *_extra(part)])
        ]
        axis |= {
            "tickvals": [x for x, _ in ticks],
            "ticktext": [theme.ink(theme.plain(word)) for _, word in ticks],
            "tickfont": {"family": theme.MONO, "size": theme.SMALL},
            "title": {"text": theme.ink("slots of a step, then the target's own token")},
        }
    return axis


def _extra(part: RequestStep) -> tuple[int, ...]:
    own = bool(part.kinds) and part.kinds[-1] != "accepted"
    return part.token_ids[-1:] if own else ()


def _where(number: int | None) -> str:
    return "" if number is None else f"step {number}: "


def _end(part: RequestStep) -> str:
    return f"<br>the sequence ended here ({part.finished})" if part.finished else ""


def _hover(
    number: int | None, part: RequestStep, slot: int, tokenizer: TokenTexts | None, whole: bool
) -> str:
    fate = spec_marks.slot_fates(part)[slot]
    word = spec_marks.SLOTS[fate].word
    if fate == "rejected" and slot > part.accepted:
        word += ", behind a refused slot"
    elif fate == "accepted" and slot >= len(part.token_ids):
        word += ", then cut away: the sequence ended before it"
    name = theme.plain(spec_marks.label(tokenizer, part.drafted[slot], 40))
    sure = (
        f"confidence {part.confidences[slot]:.2f}" if slot < len(part.confidences)
        else "confidence not recorded"
    )  # fmt: skip
    lines = [f"{_where(number)}slot {slot + 1}, <b>{name}</b>", f"{word}; {sure}"]
    if slot < len(part.candidates):
        lines += _candidates(part, slot, tokenizer, whole)
    return "<br>".join(lines)


def _candidates(
    part: RequestStep, slot: int, tokenizer: TokenTexts | None, whole: bool
) -> list[str]:
    """Candidates of a slot, best realized score first; the one the walk took is always there."""
    ids, unary, scores = part.candidates[slot], part.unary[slot], part.scores[slot]
    order = sorted(range(len(ids)), key=lambda i: (-scores[i], i))
    some = order if whole else order[:_FEW]
    taken = [i for i in order if ids[i] == part.drafted[slot]]
    some += [i for i in taken if i not in some]
    lines = ["unary → realized score"]
    for i in some:
        arrow = "▸ " if i in taken else "\u2007 "
        name = theme.plain(spec_marks.label(tokenizer, ids[i], 12))
        numbers = f"{unary[i]:.1f} → {scores[i]:.1f}".replace("-", "−")
        lines.append(f"{arrow}{numbers}  {name}")
    if len(some) < len(ids):
        lines.append(f"and {len(ids) - len(some)} more")
    return lines


def _text(shown: Sequence[Part], of: int, tokenizer: TokenTexts | None) -> str:
    lines = [_counted(shown, of)]
    for number, part in shown:
        signs = "".join(spec_marks.SLOTS[fate].sign for fate in spec_marks.slot_fates(part))
        where = "" if number is None else f"step {number:>4}  "
        where += f"request {part.request}  " if len({r.request for _, r in shown}) > 1 else ""
        own = _extra(part)
        kind = part.kinds[-1] if part.kinds else ""
        end = f"{kind}: {spec_marks.label(tokenizer, own[0])}" if own else "cut here"
        lines.append(f"{where}{signs or 'no drafts'}  {end}")
    signs = ", ".join(f"{m.sign} {m.word}" for m in spec_marks.SLOTS.values())
    return "\n".join([*lines, f"({signs})"])
