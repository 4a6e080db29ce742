"""The pages of ``workbench bench decode --gpus N`` and ``prefill --gpus N``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# field -> name
_CALLS = {
    "nccl_us": "NCCL",
    "torch_one_shot_us": "torch, one shot over symmetric memory",
    "exchange_us": "this workbench's exchange",
}
_EXCHANGES = {
    "nccl": "all-reduce", "boundary": "in the boundary", "products": "by the products"
}  # fmt: skip
_COLUMNS = ("variant", "exchange", "ms", "without", "comm.", "of floor", "max error")
_LAYOUT_COLUMNS = (
    "layout", "pieces", "ms", "without", "comm.", "tokens/s", "of the rate", "kB sent a token",
    "max error",
)  # fmt: skip
_LAYOUT_NARROW = ("layout", "pieces", "ms", "comm.", "tokens/s")
_NARROW = ("variant", "ms", "comm.", "of floor")
_WIDE = 90  # columns of a terminal that all of these fit


def decode_page(document: dict[str, Any], console: Console) -> None:
    """Which ranks, what a single all-reduce takes, and the steps of each batch and context."""
    d = document
    layers = f"{d['layers']} of {d['of_layers']} layers"
    console.print(f"{_plain(d['model'])}, {_group(d)}, {layers}, {d['dtype']}; {d['date']}")
    weights = d["weights"]
    console.print(
        f"weights: {weights['bytes_per_gpu'] / 1e9:.2f} GB a rank, "
        f"{weights['bytes_all'] / 1e9:.2f} GB together; {_plain(d['note'])}"
    )
    for row in d["calls"]:
        ways = ((name, row.get(key)) for key, name in _CALLS.items())
        said = [f"{name} {value:.2f} µs" for name, value in ways if value is not None]
        if said:
            console.print(f"all-reduce of {row['rows']:,} x hidden: {', '.join(said)}")
    for run in d["runs"]:
        console.print()
        console.print(
            f"batch {run['batch']}, context {run['context']:,}: floor "
            f"{run['floor_milliseconds']:.3f} ms, {run['weight_bytes'] / 1e9:.2f} GB of weights "
            f"and {run['cache_bytes'] / 1e9:.3f} GB of cache a rank at "
            f"{run['bandwidth'] / 1e12:.2f} TB/s, measured here"
        )
        _steps(run, console)
    if "prefill" in d:
        p = d["prefill"]
        console.print()
        console.print(
            f"prefill of {p['sequences']} x {p['tokens']:,} tokens behind {p['context']:,}, tensor "
            "parallel, the same weights:"
        )
        _layouts({"tp": p}, console)
        _published(p["published"], console)
    for label, reason in d["left_out"].items():
        console.print(f"left out: {label}: {_plain(reason)}")


def prefill_page(document: dict[str, Any], console: Console) -> None:
    """The layouts of a prefill, each with its communication."""
    d = document
    console.print(
        f"{_plain(d['model'])}, {_group(d)}, {d['layers']} of {d['of_layers']} layers, "
        f"{d['experts']} of {d['of_experts']} experts, {d['dtype']}; {d['date']}"
    )
    console.print(
        f"{d['sequences']} x {d['tokens']:,} tokens behind {d['context']:,}; {_plain(d['note'])}"
    )
    for name, row in d["layouts"].items():
        console.print(f"{name}: {_plain(row['title'])}")
    _layouts(d["layouts"], console)
    if d["ratio"] is not None:
        console.print(f"tokens/s of ep over tp: {d['ratio']:.2f}")
    _published(d["published"], console)
    for name, reason in d["left_out"].items():
        console.print(f"left out: {name}: {_plain(reason)}")


def _layouts(layouts: dict[str, Any], console: Console) -> None:
    """Runs of layouts, the fastest of each marked."""
    headings = _LAYOUT_COLUMNS if console.width >= _WIDE else _LAYOUT_NARROW
    table = _table(headings, console)
    for name, row in layouts.items():
        for place, run in enumerate(row["runs"] or [{}]):
            sent = run.get("bytes_sent_per_token")
            cells = {
                "layout": name + (" *" if run and place == row["fastest"] else ""),
                "pieces": str(run.get("overlap", "–")),
                "ms": _said(run.get("milliseconds"), ".1f"),
                "without": _said((run.get("without") or {}).get("milliseconds"), ".1f"),
                "comm.": _said(run.get("communication_milliseconds"), ".1f"),
                "tokens/s": _said(run.get("tokens_per_second"), ",.0f"),
                "of the rate": _said(run.get("fraction_of_peak"), ".0%"),
                "kB sent a token": _said(None if sent is None else sent / 1e3, ",.0f"),
                "max error": _error(row),
            }
            table.add_row(*(cells[heading] for heading in headings))
    console.print(table)


def _published(figures: Sequence[dict[str, Any]], console: Console) -> None:
    """Figures of others, with where they are from."""
    for one in figures:
        unit = "" if one["unit"] == "ratio" else f" {one['unit']}"
        said = f"published: {one['name']}: {one['value']:.4g}{unit}, {one['where']}"
        console.print(_plain(said))


def _steps(run: dict[str, Any], console: Console) -> None:
    """One run's variants."""
    headings = _COLUMNS if console.width >= _WIDE else _NARROW
    table = _table(headings, console)
    for name, row in run["variants"].items():
        alone = row.get("without") or {}
        cells = {
            "variant": name,
            "exchange": _EXCHANGES.get(row["exchange"], _plain(row["exchange"])),
            "ms": _said(row["milliseconds"], ".3f"),
            "without": _said(alone.get("milliseconds"), ".3f"),
            "comm.": _said(row.get("communication_milliseconds"), ".3f"),
            "of floor": _said(row["fraction_of_floor"], ".0%"),
            "max error": _error(row),
        }
        table.add_row(*(cells[heading] for heading in headings))
    console.print(table)
    for name, reason in run["left_out"].items():
        console.print(f"left out: {name}: {_plain(reason)}")


def _group(d: dict[str, Any]) -> str:
    """Which of the ranks, on what."""
    ranks, tp = d["gpus"], d["tp"]
    part = f"all {tp} ranks" if ranks == tp else f"{ranks} of {tp} ranks"
    return f"{part} on {_plain(d['hardware'])}"


def _plain(text: Any) -> str:
    """A text that is not ours: brackets of it are no markup."""
    from rich.markup import escape

    from workbench.terminal import printable

    return escape(printable(str(text)))


def _error(row: dict[str, Any]) -> str:
    """The worst error of a check, or a dash where that is no number; and why there are no times."""
    remark = " interpreted" if row.get("interpreted") else ""
    return _said(row["check"].get("worst_layer_error"), ".1e") + (
        remark if row["passed"] else " FAILED"
    )


def _said(value: float | None, form: str) -> str:
    """A number, or a dash where nothing was timed."""
    return "–" if value is None else format(value, form)


def _table(headings: Sequence[str], console: Console) -> Any:
    from rich.table import Table

    wide = console.width >= _WIDE
    table = Table() if wide else Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
