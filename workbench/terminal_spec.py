"""Drafting in a terminal: the marks of tokens and blocks, and the pages of traces and benchmarks.

No mark is a colour alone: kinds of tokens differ by line, weight and direction, and in lists by the
sign before them; fates of a slot differ by sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.terminal import PROBABILITY_STYLES, printable, speed

if TYPE_CHECKING:
    from workbench.model.beam import Beam
    from workbench.model.generate import Generation
    from workbench.model.tokenizer import Tokenizer
    from workbench.spec.bench import Policy, SpeculativeBench
    from workbench.spec.metrics import Acceptance
    from workbench.spec.positions import Position
    from workbench.spec.step import Kind, RequestStep, Step

_BLUE, _GREEN = PROBABILITY_STYLES[0][1], PROBABILITY_STYLES[1][1]
_ORANGE = "#D55E00"
# Kind -> sign in lists, style in running text, word.
MARKS: dict[Kind, tuple[str, str, str]] = {
    "accepted": ("✓", f"underline {_GREEN}", "accepted draft"),
    "corrected": ("≠", f"bold reverse {_ORANGE}", "corrected by the target"),
    "bonus": ("+", f"bold italic {_BLUE}", "bonus behind a whole block"),
    "first": ("›", "", "first, from the prefill"),
    "plain": ("·", "", "plain, no draft verified"),
}
# Fate of a slot -> sign, style.
SLOTS = {
    "accepted": ("✓", _GREEN),
    "rejected": ("✗", _ORANGE),
    "trimmed": ("○", "dim"),
}
NEWLINE = "⏎"  # a line end has no width that a mark could be seen on


class Pieces:
    """The text of one request's tokens as they come, each with its kind."""

    def __init__(self, beam: Beam) -> None:
        tokenizer = beam.tokenizer
        self._size = 0 if tokenizer is None else tokenizer.vocab_size
        self._decoder = None if tokenizer is None else tokenizer.decode_stream()

    def of(self, part: RequestStep) -> list[tuple[str, Kind]]:
        """(what became complete with it, kind) of each token of a step; as the loop decodes it."""
        pieces = [
            (self._push(token_id), kind)
            for token_id, kind in zip(part.token_ids, part.kinds, strict=True)
        ]
        if part.finished is not None and self._decoder is not None and pieces:
            text, kind = pieces[-1]
            pieces[-1] = (text + self._decoder.flush(), kind)
        return pieces

    def _push(self, token_id: int) -> str:
        if self._decoder is None:
            return ""
        # A model's table may be padded beyond its tokenizer.
        return self._decoder.push(token_id) if token_id < self._size else "\ufffd"


def marks_legend() -> Text:
    """What the marks of tokens, and the signs of a block, mean."""
    legend = Text()
    for _, style, word in MARKS.values():
        if style:
            legend.append(word, style)
            legend.append("   ")
    legend.append("\ndrafted block  ", "dim")
    for word, (sign, style) in SLOTS.items():
        legend.append(sign, style)
        legend.append(f" {word}   ", "dim")
    legend.append("unmarked tokens: the target's own, no draft verified", "dim")
    return legend


def block_signs(drafted: int, admitted: int, accepted: int, width: int = 0) -> Text:
    """A drafted block as one sign a slot, padded to ``width``."""
    strip = Text()
    for word, count in (
        ("accepted", accepted),
        ("rejected", admitted - accepted),
        ("trimmed", drafted - admitted),
    ):
        sign, style = SLOTS[word]
        strip.append(sign * count, style)
    strip.append(" " * (width - drafted))
    return strip


def figures(result: Generation, drafts: Acceptance | str) -> str:
    """Speed, and what drafting did for it (or why there was none), for a summary line."""
    measured = f"{speed(result.tokens_per_second)} (decode, measured here)"
    if isinstance(drafts, str):
        return f"{measured}, {drafts}"
    return f"{measured}, {lengths(drafts)}"


def lengths(acceptance: Acceptance) -> str:
    """Acceptance length and counts in words."""
    if acceptance.length_pooled is None:
        return "nothing was drafted"
    trimmed = f", {acceptance.trimmed:,} trimmed" if acceptance.trimmed else ""
    return (
        f"acceptance length {acceptance.length_pooled:.2f} over {acceptance.events:,} blocks "
        f"({acceptance.accepted:,} drafts accepted, {acceptance.rejected:,} rejected{trimmed})"
    )


# -- traces ---------------------------------------------------------------------------------------


def label(tokenizer: Tokenizer | None, token_id: int) -> str:
    """One token as a label: its text where there is a tokenizer that knows it, else its id."""
    if tokenizer is None or not 0 <= token_id < tokenizer.vocab_size:
        return f"#{token_id}"
    return printable(tokenizer.token_text(token_id))


def signs_legend() -> Text:
    """What the signs of a list of steps mean."""
    tokens = "   ".join(f"{sign} {word}" for sign, _, word in MARKS.values())
    slots = "   ".join(f"{sign} {word}" for word, (sign, _) in SLOTS.items())
    return Text(f"tokens  {tokens}\nblock   {slots}", "dim")


def step_lines(steps: Sequence[Step], tokenizer: Tokenizer | None, width: int) -> list[Text]:
    """A line for each request of each step: block, milliseconds, tokens with their signs."""
    lines = [
        Text(f"{'step':>6} {'request':>7} {'position':>8}  {'block':<{width}}  "
             f"{'draft ms':>8} {'verify ms':>9}  tokens", "bold")
    ]  # fmt: skip
    for step in steps:
        times = f"{1e3 * step.draft_seconds:>8.2f} {1e3 * step.verify_seconds:>9.2f}"
        for part in step.requests:
            line = Text(f"{step.index:>6} {part.request:>7} {part.position:>8}  ")
            line.append(block_signs(len(part.drafted), part.admitted, part.accepted, width))
            line.append(f"  {times} ", "dim")
            for token_id, kind in zip(part.token_ids, part.kinds, strict=True):
                sign, style, _ = MARKS[kind]
                line.append(f" {sign}")
                line.append(label(tokenizer, token_id), style)
            if part.finished is not None:
                line.append(f"  ended by {part.finished}", "dim")
            lines.append(line)
    return lines


def position_lines(
    positions: Sequence[Position], tokenizer: Tokenizer | None, width: int
) -> list[Text]:
    """A line for each recorded position: the token there, the block, and its drafts."""
    lines = [
        Text(f"{'request':>7} {'position':>8}  {'block':<{width}}  {'token':<16} drafts", "bold")
    ]
    for p in positions:
        line = Text(f"{p.request:>7} {p.position:>8}  ")
        line.append(block_signs(len(p.drafted), len(p.drafted), p.accepted, width))
        line.append(f"  {label(tokenizer, p.token_id):<16}")
        for slot, token_id in enumerate(p.drafted):
            sign, style = SLOTS["accepted" if slot < p.accepted else "rejected"]
            line.append(f" {sign}")
            line.append(label(tokenizer, token_id), style)
        lines.append(line)
    return lines


# -- benchmark ------------------------------------------------------------------------------------


def bench_page(result: SpeculativeBench, console: Console) -> None:
    """The page of ``workbench bench speculative``."""
    together = (
        "one sequence at a time"
        if result.concurrency == 1
        else f"{result.concurrency} sequences together"
    )
    console.print(
        Text(
            printable(
                f"{result.model} with {result.drafter}: {result.speculative_tokens} drafts a step, "
                f"greedy, {result.dtype}, up to {result.max_new_tokens} tokens, {together}"
            ),
            "bold",
        )
    )
    console.print(
        f"speedup {result.speedup:.2f} over no drafts (median of {result.pairs} turns; 10th to "
        f"90th percentile {result.speedup_low:.2f} to {result.speedup_high:.2f})"
    )
    console.print(
        f"adaptive verification {result.adaptive_gain:.2f} of fixed ("
        f"{result.adaptive_gain_low:.2f} to {result.adaptive_gain_high:.2f}); deciding takes "
        f"{result.decide_share:.1%} of its steps"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("policy")
    for name in ("tokens/s", "10th", "90th", "TPOT p50 ms", "p99 ms"):
        table.add_column(name, justify="right")
    ways = (("none", result.none), ("fixed", result.fixed), ("adaptive", result.adaptive))
    for name, policy in ways:
        table.add_row(name, *_speeds(policy))
    console.print(table)
    console.print(lengths(result.acceptance))
    if (shorter := result.adaptive_acceptance.length_pooled) is not None:
        console.print(f"acceptance length of adaptive {shorter:.2f}")
    if result.target_ms and result.draft_ms is not None:
        one = result.target_ms[1]
        rows = ", ".join(
            f"{n}: {ms:.2f} ({ms / one:.2f} ×)" for n, ms in sorted(result.target_ms.items())
        )
        console.print(f"target pass, ms by rows a sequence: {rows}; context {result.context:,}")
        console.print(f"draft {result.draft_ms:.2f} ms ({result.draft_ms / one:.2f} × one row)")
    console.print(_agreement(result))
    if result.repeated_share is not None:
        console.print(f"tokens inside repeated 8-grams: {result.repeated_share:.0%}")
    threads = f"{result.threads} thread{'s' * (result.threads != 1)}"
    torch = result.versions.get("torch")
    source = f"measured here: {result.hardware}, {threads}, torch {torch}, {result.date}"
    console.print(Text(printable(source), "dim"))
    console.print(Text(printable(f"cost table of adaptive: {result.cost_table}"), "dim"))
    if result.interrupted:
        console.print(Text("interrupted: these are the turns that were whole", "bold"))


def _speeds(policy: Policy) -> list[str]:
    values = (policy.tokens_per_second, policy.low, policy.high)
    return [f"{v:,.0f}" for v in values] + [
        f"{v:.2f}" for v in (policy.tpot_p50_ms, policy.tpot_p99_ms)
    ]


def _agreement(result: SpeculativeBench) -> str:
    same = f"outputs: {result.identical} of {result.compared} prompts identical in all three"
    first = [
        f"prompt {d.prompt} differs first at new token {d.index}, where the target's best two "
        f"logits are {d.margin:.2g} apart"
        for d in result.differences
    ]
    return "; ".join([same, *first])
