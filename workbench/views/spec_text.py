"""The text as it was written, each token marked by where it came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go

from workbench.spec.step import KINDS, Kind, RequestStep, Step
from workbench.terminal import printable
from workbench.views import spec_marks, theme
from workbench.views.numbers import plural
from workbench.views.page import box, page
from workbench.views.spec_marks import Mark, TokenTexts
from workbench.views.view import View

_MOST_REQUESTS = 8
_MOST_TOKENS = 400  # on a page: a token takes some 230 bytes of a saved notebook
_MOST_STEPS = 200  # bars of the figure
_FAINT = "opacity:.55"
_PART = "◌"  # stands for a piece of a character, whose text comes with the next token


def written_with_drafts(
    steps: Sequence[Step],
    tokenizer: TokenTexts,
    *,
    prompts: Mapping[int, str] | None = None,
    model: str = "the model",
    source: str = "measured here",
) -> View:
    """What every request wrote: first, plain, accepted, corrected and bonus tokens told apart.

    ``prompts`` are texts to show faint before what was written, by request. ``source`` says where
    the steps come from, such as a trace. A page holds the last tokens of the first requests, the
    counts are of all. The figure is the tokens that each step gave, by kind.
    """
    found: dict[int, list[tuple[int, RequestStep]]] = {}
    for step in steps:
        for part in step.requests:
            found.setdefault(part.request, []).append((step.index, part))
    counts: Counter[Kind] = Counter(k for line in found.values() for _, r in line for k in r.kinds)
    title = f"Written by {model}"
    subtitle = f"{source} · {_summary(found, counts)}"
    shown = dict(list(found.items())[:_MOST_REQUESTS])
    body, lines = "", []
    most = _MOST_TOKENS // max(1, len(shown))
    for request, line in shown.items():
        prompt = printable((prompts or {}).get(request, ""))
        pieces, text = _pieces(line, tokenizer)
        heading = box(f"request {request}", "font-weight:600", "margin:8px 0 2px")
        left_out = len(pieces) - most
        cut = f"({plural(left_out, 'token')} before this) … " if left_out > 0 else ""
        body += (heading if len(found) > 1 else "") + box(
            box(escape(prompt), "opacity:.62", tag="span")
            + box(cut, _FAINT, tag="span")
            + "".join(pieces[-most:]),
            f"font:{theme.TEXT}px/2 {theme.MONO}", "white-space:pre-wrap", "overflow-wrap:anywhere",
        )  # fmt: skip
        lines += [f"-- request {request}"] if len(found) > 1 else []
        lines.append(prompt + text)
    if len(found) > len(shown):
        rest = f"… and {plural(len(found) - len(shown), 'more request')}"
        body += box(rest, _FAINT)
        lines.append(rest)
    lines.append(f"-- {_summary(found, counts)}")
    return View(
        figure=_figure(steps, counts, title, subtitle),
        text="\n".join(lines),
        html=page(title, subtitle, body + _legend(counts)),
    )


def _summary(
    found: Mapping[int, Sequence[tuple[int, RequestStep]]], counts: Mapping[Kind, int]
) -> str:
    total = sum(counts.values())
    if not total:
        return "nothing was written: there is no step among these"
    of = f" of {len(found)} requests" if len(found) > 1 else ""
    each = ", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS if counts.get(kind))
    if not any(counts.get(kind) for kind in ("accepted", "corrected", "bonus")):
        trimmed = sum(part.trimmed for line in found.values() for _, part in line)
        none = f"{plural(trimmed, 'draft')} trimmed, none verified"
        each += f"; {none if trimmed else 'nothing was drafted'}"
    return f"{plural(total, 'token')}{of}: {each}"


def _pieces(
    line: Sequence[tuple[int, RequestStep]], tokenizer: TokenTexts
) -> tuple[list[str], str]:
    """A request's tokens as HTML, one each, and its text."""
    stream = tokenizer.decode_stream()
    pieces, texts = [], []
    for number, part in line:
        for place, (token, kind) in enumerate(zip(part.token_ids, part.kinds, strict=True)):
            text = printable(stream.push(token))
            texts.append(text)
            pieces.append(_piece(text, token, kind, tokenizer, _hover(number, part, place, kind)))
    rest = printable(stream.flush())
    return pieces + ([box(escape(rest), _FAINT, tag="span")] if rest else []), "".join(
        [*texts, rest]
    )


def _piece(text: str, token: int, kind: Kind, tokenizer: TokenTexts, hover: str) -> str:
    mark = spec_marks.KINDS[kind]
    signed = kind in ("corrected", "bonus")
    # A frame that is broken at the end of a line is read as two tokens: it is kept in one piece.
    style = (*mark.css, "border-radius:2px", "margin-right:1px",
             *(["white-space:pre"] if signed else []))  # fmt: skip
    before = "<wbr>" if signed else ""
    sign = _sign(mark) if signed else ""
    if not text:
        name = tokenizer.token_text(token)
        shown = box(_PART if name.startswith("\\x") else escape(name), _FAINT, tag="span")
        return before + box(sign + shown, *style, tag="span", title=hover)
    *broken, last = text.split("\n")
    if not broken:
        return before + box(sign + escape(last), *style, tag="span", title=hover)
    # A line break alone would be a mark without a place: it is shown, then made outside the mark.
    lines = [escape(line) + box("⏎", _FAINT, tag="span") for line in broken]
    lines += [escape(last)] if last else []
    marked = [box(line, *style, tag="span") for line in [sign + lines[0], *lines[1:]]]
    whole = "\n".join(marked) + ("" if last else "\n")
    return before + box(whole, tag="span", title=hover)


def _sign(mark: Mark) -> str:
    style = ("font-size:9px", "vertical-align:super", "line-height:0", "font-style:normal",
             f"color:{mark.color}")  # fmt: skip
    return box(mark.sign, *style, tag="span")


def _hover(number: int, part: RequestStep, place: int, kind: Kind) -> str:
    words = [f"step {number}", spec_marks.kind_words(kind, part)]
    if kind == "accepted":
        words.insert(1, f"slot {place + 1} of {len(part.drafted)}")
        if place < len(part.confidences):
            words.append(f"confidence {part.confidences[place]:.2f}")
    elif part.admitted:
        words.append(f"{part.accepted} of {part.admitted} verified drafts accepted")
    return ", ".join(words)


def _legend(counts: Mapping[Kind, int]) -> str:
    """Every kind as it looks in the text, with its count."""
    items = []
    for kind, mark in spec_marks.KINDS.items():
        sign = _sign(mark) if kind in ("corrected", "bonus") else ""
        sample = box(f"{sign}token", *mark.css, "border-radius:2px", f"font-family:{theme.MONO}",
                     tag="span")  # fmt: skip
        words = box(f"{escape(mark.word)}: {counts.get(kind, 0):,}", "margin-left:6px", tag="span")
        items.append(box(sample + words, "white-space:nowrap", tag="span"))
    return box("".join(items), "display:flex", "flex-wrap:wrap", "gap:6px 18px", "margin-top:12px",
               f"font-size:{theme.TEXT}px")  # fmt: skip


def _figure(
    steps: Sequence[Step], counts: Mapping[Kind, int], title: str, subtitle: str
) -> go.Figure:
    some = steps[-_MOST_STEPS:]
    if len(steps) > len(some):
        subtitle += f" · bars: the last {len(some)} of {len(steps):,} steps"
    fig = theme.figure(title, subtitle, height=300, barmode="stack", bargap=0.15,
                       legend_under_title=True, margin={"t": 100},
                       legend={"traceorder": "normal", "itemclick": False,
                               "itemdoubleclick": False})  # fmt: skip
    for kind, mark in spec_marks.KINDS.items():
        if not counts.get(kind):
            continue
        fig.add_trace(
            go.Bar(
                x=np.array([s.index for s in some], np.int32),
                y=np.array([sum(r.kinds.count(kind) for r in s.requests) for s in some], np.int16),
                name=theme.ink(f"{kind} ({counts[kind]:,})"), marker=spec_marks.fill(mark),
                hovertemplate=f"step %{{x}}: %{{y}} {kind}<extra></extra>",
            )
        )  # fmt: skip
    fig.update_layout(
        xaxis={"title": {"text": theme.ink("step")}, "showgrid": False, "tickformat": "d"},
        yaxis={"title": {"text": theme.ink("tokens given")}, "rangemode": "tozero",
               "tickformat": "d"},
        showlegend=True,
    )  # fmt: skip
    if not counts:
        spec_marks.nothing(fig, "no step was given")
    return fig
