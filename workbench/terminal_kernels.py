"""The pages of ``workbench kernels``, and its progress on stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from workbench.terminal import note, printable

if TYPE_CHECKING:
    from workbench.kernels.results import BenchResult, BenchRow

_STYLES = {"passed": "green", "unavailable": "dim"}


class Progress:
    """A bar where stderr is a terminal, else a line for each thing that is said."""

    def __init__(self, what: str) -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._what = what
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def told(self, done: int, of: int, label: str) -> None:
        """So many of so many are done; next is ``label``."""
        shown = printable(f"{self._what}  {label}")
        self._bar.update(self._task, completed=done, total=of, description=shown)
        if self._bar.disable and label:
            note(f"{self._what} {done + 1} of {of}: {label}")

    def within(self, op: str) -> Callable[[int, int, str], None]:
        """Progress inside one operation, on the bar alone."""

        def told(done: int, of: int, label: str) -> None:
            self._bar.update(
                self._task, completed=done, total=of, description=printable(f"{op}  {label}")
            )

        return told

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._bar.disable:
            note(line)
        else:
            self._bar.console.print(Text(printable(line)))


def list_page(document: dict[str, Any], console: Console) -> None:
    """The page of ``workbench kernels list``."""
    _heading(document, console)
    table = _table("operation", "variant", "here", "what it is, or why not")
    last = ""
    for row in document["ops"]:
        first = row["op"] != last
        last = row["op"]
        table.add_row(
            row["op"] if first else "",
            Text(printable(row["variant"])),
            Text("yes", "green") if row["available"] else Text("no", "yellow"),
            Text(printable(row["reason"] or (row["title"] if first else "")), style="dim"),
        )
    console.print(table)


def check_page(document: dict[str, Any], console: Console) -> None:
    """The page of ``workbench kernels check``, and of a bench of a file."""
    _heading(document, console)
    table = _table("operation", "variant", "verdict", "gate", "error", "reference's", "µs", "why")
    for row in document["ops"]:
        time = row["microseconds"]
        table.add_row(
            row["op"],
            Text(printable(row["variant"])),
            Text(row["status"], _STYLES.get(row["status"], "red")),
            printable(row["gate"]),
            _error(row["max_error"]),
            _error(row["own_error"]),
            "" if time is None else f"{time:,.2f}",
            Text(printable(row["reason"]), style="dim"),
        )
    console.print(table)
    console.print(Text("errors are relative to a float64 oracle, measured here", style="dim"))


def bench_page(result: BenchResult, console: Console) -> None:
    """The page of ``workbench kernels bench``."""
    table = _table(
        "operation", "input", "variant", "µs", "10-90 %", "GB/s", "GFLOP/s", "of limit", "by",
        "x torch", "verdict", "remarks",
    )  # fmt: skip
    last: tuple[Any, ...] = ()
    for row in result.rows:
        key = (row.op, row.flavour, row.tokens, row.tp, row.dtype)
        shown = f"{row.tokens} x {row.flavour or 'plain'}, TP{row.tp}"
        table.add_row(
            row.op if key[:1] != last[:1] else "",
            shown if key != last else "",
            Text(printable(row.variant)),
            *_figures(row),
            Text(row.status, _STYLES.get(row.status, "red")),
            Text(printable(": ".join(filter(None, (row.gate, row.reason)))), style="dim"),
        )
        last = key
    console.print(table)
    console.print(Text(printable(result.source), style="bold"))
    peaks = result.peaks
    if peaks:
        rates = ", ".join(f"{k} {v / 1e12:,.2f} TFLOP/s" for k, v in peaks["flops"].items())
        console.print(
            Text(f"limits: memory {peaks['bandwidth'] / 1e9:,.0f} GB/s, {rates}, measured in the "
                 "same run", style="dim")
        )  # fmt: skip
    if result.interrupted:
        console.print(Text("interrupted: what was measured until then", style="yellow"))


def _figures(row: BenchRow) -> tuple[str, ...]:
    def number(value: float | None, form: str, scale: float = 1.0) -> str:
        return "" if value is None else format(value * scale, form)

    spread = ""
    if row.microseconds_low is not None and row.microseconds_high is not None:
        spread = f"{row.microseconds_low:,.2f}-{row.microseconds_high:,.2f}"
    return (
        number(row.microseconds, ",.2f"),
        spread,
        number(row.bytes_per_second, ",.1f", 1e-9),
        number(row.flops_per_second, ",.1f", 1e-9),
        number(row.roofline_fraction, ".0%"),
        row.limit if row.timed else "",
        number(row.ratio_to_reference, ".2f"),
    )


def _heading(document: dict[str, Any], console: Console) -> None:
    console.print(
        Text(
            f"{printable(document['model'])}, one of {document['tp']} rank"
            f"{'s' * (document['tp'] != 1)}, on {document['device']}",
            style="bold",
        )
    )


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    right = {"error", "reference's", "µs", "10-90 %", "GB/s", "GFLOP/s", "of limit", "x torch"}
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table
