"""The pages of ``workbench kv`` and ``workbench plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from workbench.model.display import gib
from workbench.model.plan import Plan
from workbench.model.sizing import ACCOUNTS, ENGINE, KVSizing
from workbench.terminal import KIND_COLORS, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workbench.datasheet import GpuSheet

ACCOUNT_NAMES = {
    "ideal": "ideal",
    "admission": f"engine admission bound ({ENGINE})",
    "hybrid_off": f"hybrid manager off ({ENGINE})",
    "naive": "naive calculator: every layer full",
}


def kv_page(model: str, sizing: KVSizing, console: Console) -> None:
    """The page of ``workbench kv``."""
    s = sizing.settings
    console.print(Text(printable(model), style="bold"))
    console.print(
        f"KV cache of {s.sequences:,} x {s.context:,} tokens in {s.kv_dtype}, TP{s.tp}"
        + (", with a drafter" if sizing.drafter else ", no drafter")
    )
    console.print(
        f"{sizing.bytes_per_token:,} bytes a token in the layers that grow; all layers full would "
        f"be {sizing.naive_bytes_per_token:,}"
    )
    console.print()
    table = _table(
        "one GPU, exact for this shape",
        "full",
        "sliding",
        "drafter",
        "padding",
        "total",
        "of naive",
    )
    naive = sizing.per_gpu("naive").total
    for account in ACCOUNTS:
        b = sizing.per_gpu(account)
        table.add_row(
            ACCOUNT_NAMES[account],
            *(gib(x) for x in (b.full, b.sliding, b.drafter, b.padding, b.total)),
            f"{b.total / naive:.1%}",
        )
    console.print(table)
    if sizing.hybrid_off_refusal:
        console.print(Text(f"hybrid manager off: {sizing.hybrid_off_refusal}", style="dim"))
    console.print(f"what limits it: {sizing.binding_sentence}")
    console.print()
    copies = "" if sizing.replicas == 1 else f" ({sizing.replicas} copies of each KV head)"
    for name, value in (
        ("stored, each head once", sizing.stored.total),
        (f"resident over all ranks{copies}", sizing.resident_bytes),
        ("read by one decode step, all ranks", sizing.read_bytes_per_step),
        ("pool that admits all sequences, one GPU", sizing.pool_bytes),
    ):
        console.print(Text.assemble((f"{name:<52}", "dim"), f"{gib(value):>14}"))
    console.print()
    groups = Text("groups of layers that share a block table: ", style="dim")
    for group in sizing.plan.groups:
        kind = "full_attention" if group.window is None else "sliding_attention"
        groups.append(f"{len(group.layers)} ", KIND_COLORS[kind])
    groups.append(f" padding layers: {sizing.plan.padding_layers}", "dim")
    console.print(groups)


def plan_page(best: Plan, plans: Sequence[Plan], console: Console) -> None:
    """The page of ``workbench plan``."""
    if best.runs:
        console.print(Text(printable(best.verdict), style="bold"))
    else:  # the verdict is the error, which goes to stderr
        heading = f"{best.model} on {best.layout.gpus} x {best.gpu.name} ({best.layout.name})"
        console.print(Text(printable(heading), style="bold"))
    gpu = best.gpu
    console.print(
        Text(
            f"{gpu.name} ({gpu.form}): {gib(best.memory_bytes)} by "
            f"{_whose(gpu)}, of which the engine may use {best.utilization:.0%}",
            style="dim",
        )
    )
    console.print()
    table = _table("one GPU", "bytes", "how known")
    for name, value, how in (
        ("weights", best.weights_bytes, "exact"),
        ("workspace", best.workspace_bytes, "modelled"),
        ("KV cache, engine admission", best.kv_bytes, f"exact, {ENGINE}"),
        ("free", best.free_bytes, ""),
    ):
        table.add_row(name, gib(value), how)
    console.print(table)
    console.print()
    console.print(best.reach)
    told = best.refusals[best.fits :]  # the first is in the verdict, where that is a refusal
    for line in (*told, *best.notes):
        console.print(Text(f"note: {printable(line)}", style="yellow"))
    console.print()
    if len(plans) > 1:
        table = _table(
            "layout", "weights", "KV", "free", "max context", "max sequences", "decode", "runs"
        )
        for plan in plans:
            step = plan.decode_step()
            table.add_row(
                f"{plan.layout.name} *" if plan.layout == best.layout else plan.layout.name,
                *(gib(x) for x in (plan.weights_bytes, plan.kv_bytes, plan.free_bytes)),
                f"{plan.max_context:,}",
                f"{plan.max_sequences:,}",
                "-" if step is None else f"{step.milliseconds:.2f} ms",
                "yes" if plan.runs else "refused" if plan.fits else "no",
            )
        console.print(table)
        console.print(
            Text(
                "* taken: the first that runs, which is no advice about speed · weights, KV and "
                "free are of one GPU · decode: one step of all sequences, modelled as a roofline "
                "at data sheet rates, a lower bound",
                style="dim",
            )
        )
        console.print()
    if not best.runs:  # a command that cannot start is not one to copy
        return
    # Whole lines, whatever the terminal's width: this is what one copies.
    console.print(Text(printable(best.serve_command)), soft_wrap=True)


def _whose(gpu: GpuSheet) -> str:
    if gpu.torch_bytes:
        return "torch's total"
    return "the driver's total" if gpu.driver_bytes else "the data sheet"


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first)
    for name in rest:
        table.add_column(name, justify="left" if name == "how known" else "right")
    return table
