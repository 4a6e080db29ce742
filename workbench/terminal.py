"""What the command line prints for people: pages, colours, and text that is safe to print.

JSON goes to stdout through :func:`emit`; everything that is not the answer goes to stderr.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from workbench.doctor import Diagnosis
    from workbench.model.config import SourceKind
    from workbench.model.info import ModelInfo

# The colours of workbench.views.theme (which needs plotly): a thing keeps its colour everywhere.
KIND_COLORS = {
    "sliding_attention": "#0072B2",
    "full_attention": "#D55E00",
    "sparse": "#009E73",
    "dense": "#CC79A7",
}
_SOURCE_STYLES: dict[SourceKind, str] = {
    "published": "green",
    "engine": "cyan",
    "derived": "blue",
    "assumed": "yellow",
    "checkpoint": "green",
    "chosen": "magenta",
}
# Lower bound of the probability, style, label; the last is underlined, to be told without colour.
PROBABILITY_STYLES = (
    (0.9, "#0072B2", "p ≥ 0.9"),
    (0.5, "#009E73", "0.5 – 0.9"),
    (0.1, "#B8860B", "0.1 – 0.5"),
    (0.0, "underline #D55E00", "p < 0.1"),
)
_PLAIN_WIDTH = 140  # columns when stdout is a file or a pipe
# Control characters a model may decode would move the cursor or worse: pictures take their place.
# So do the characters that turn the writing direction or end a line unseen.
_HIDDEN = (
    *range(0x80, 0xA0),
    0x061C,
    *(0x200E, 0x200F),
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
)
_PICTURES = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys(_HIDDEN, 0xFFFD)
)


class Page(Console):
    """A console that leaves a reader who went away to the caller."""

    def on_broken_pipe(self) -> None:
        """Raise what rich would turn into exit status 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def out() -> Console:
    """A console on stdout; without colours and wide when that is not a terminal."""
    terminal = sys.stdout.isatty()
    return Page(highlight=False, width=None if terminal else _PLAIN_WIDTH, soft_wrap=False)


def note(message: str) -> None:
    """One line on stderr, its control characters made visible."""
    print(printable(message), file=sys.stderr, flush=True)


def emit(document: Any) -> None:
    """Print one JSON document (one line) on stdout. Not-a-number is refused: it is no JSON."""
    print(json.dumps(document, allow_nan=False), flush=True)


def printable(text: str) -> str:
    """Text with its control characters made visible, newline and tab excepted."""
    return text.translate(_PICTURES)


def probability_style(probability: float) -> str:
    """The style of a token of this probability."""
    return next(style for bound, style, _ in PROBABILITY_STYLES if probability >= bound)


def probability_legend() -> Text:
    """What the token colours mean."""
    legend = Text("token probability  ", style="dim")
    for _, style, label in PROBABILITY_STYLES:
        legend.append(label, style=style)
        legend.append("   ")
    return legend


# -- info -----------------------------------------------------------------------------------------


def info_page(info: ModelInfo, console: Console) -> None:
    """The page of ``workbench info``."""
    from workbench.model.info import MARKS, billions, field_text
    from workbench.model.presets import bundled_drafter, drafter_of

    console.print(Text(printable(info.name), style="bold"))
    console.print(info.headline)
    console.print(info.layer_summary)
    drafter = drafter_of(info.name)
    if drafter is not None:
        here = "bundled" if bundled_drafter(info.name) is not None else "known by its shape only"
        console.print(f"drafter {drafter}, {here}")
    console.print()
    marks = {"attention": Text(), "mlp": Text()}
    for layer in info.layers:
        marks["attention"].append(MARKS[layer.attention], KIND_COLORS[layer.attention])
        marks["mlp"].append(MARKS[layer.mlp], KIND_COLORS[layer.mlp])
    width = max(20, console.width - 14)
    for first in range(0, len(info.layers), width):
        part = slice(first, first + width)
        count = len(info.layers[part])
        ruler = "".join(f"{i:<10}" for i in range(first, first + count, 10))
        console.print(Text.assemble(("layer      ", "dim"), (ruler[: count + 3].rstrip(), "dim")))
        console.print(Text.assemble(("attention  ", "dim"), marks["attention"][part]))
        console.print(Text.assemble(("MLP        ", "dim"), marks["mlp"][part]))
    legend = Text("           ")
    for kind, label in (
        ("sliding_attention", f"sliding, window {info.config.sliding_window:,}"),
        ("full_attention", "full"),
        ("dense", "dense"),
        (
            "sparse",
            f"sparse, {info.config.num_experts_per_tok} of {info.config.num_experts} experts",
        ),
    ):
        legend.append(MARKS[kind], KIND_COLORS[kind])
        legend.append(f" {label}   ", "dim")
    console.print(legend)
    console.print()
    _parts(info, console, billions)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("field", "value", "source"):
        table.add_column(name, no_wrap=name == "field", overflow="fold")
    for name, (value, source) in info.fields.items():
        origin = Text(source.kind, style=_SOURCE_STYLES[source.kind])
        if source.note:
            origin.append(f"  {source.note}", style="dim")
        table.add_row(Text(name), Text(field_text(name, value)), origin)
    console.print(table)


def _parts(info: ModelInfo, console: Console, billions: Any) -> None:
    total, longest = info.parameters.total, 30
    for part, count in sorted(info.parameters.by_part.items(), key=lambda item: -item[1]):
        bar = "━" * round(longest * count / total) or "╴"
        console.print(
            Text.assemble(
                (f"{part.replace('_', ' '):<11}", "dim"),
                f"{billions(count):>10}  {count / total:>6.2%}  ",
                (bar, "#7D63D9"),
            )
        )
    console.print()


# -- doctor ---------------------------------------------------------------------------------------


def doctor_page(diagnosis: Diagnosis, console: Console) -> None:
    """The page of ``workbench doctor``."""
    for name, value in diagnosis.machine.lines():
        console.print(Text.assemble((f"{name:<10} ", "dim"), value))
    console.print()
    console.print(Text("What runs here", style="bold"))
    for run in diagnosis.runs:
        console.print(_verdict(run.possible, "yes", "no "), Text(run.name))
        console.print(Text(f"     {run.reason}", style="dim"))
    purpose = None
    for check in diagnosis.checks:
        if check.purpose != purpose:
            purpose = check.purpose
            console.print()
            console.print(Text(f"For {purpose}" if purpose != "model" else "For the model", "bold"))
        console.print(
            _verdict(check.ok, "ok ", "no "), Text.assemble(f"{check.name}  ", (check.found, "dim"))
        )
        if check.remedy:
            console.print(Text(f"     → {check.remedy}"))


def _verdict(ok: bool, yes: str, no: str) -> Text:
    return Text(f" {yes}", style="green") if ok else Text(f" {no}", style="yellow")


# -- numbers --------------------------------------------------------------------------------------


def logits_table(
    tokens: list[str],
    favoured: list[str],
    best: list[float],
    chances: list[float],
    console: Console,
) -> None:
    """A row for each position: its token, and the next one favoured with logit and probability."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, justify in (
        ("position", "right"),
        ("token", "left"),
        ("favours", "left"),
        ("logit", "right"),
        ("probability", "right"),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for position, row in enumerate(zip(tokens, favoured, best, chances, strict=True)):
        token, next_token, logit, chance = row
        table.add_row(
            str(position),
            Text(printable(token)),
            Text(printable(next_token), style=probability_style(chance)),
            f"{logit:.3f}",
            f"{chance:.4f}",
        )
    console.print(table)


def sparkline(values: list[float], width: int = 60) -> str:
    """Values as one line of blocks, each the mean of its stretch, from lowest to highest."""
    if not values:
        return ""
    stretches = min(width, len(values))
    edges = [len(values) * i // stretches for i in range(stretches + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    blocks = "▁▂▃▄▅▆▇█"
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in means)


def speed(tokens_per_second: float) -> str:
    """Tokens a second in words; NaN means that too few steps were timed."""
    if tokens_per_second != tokens_per_second:
        return "too short to time"
    return f"{tokens_per_second:,.0f} tokens/s"
