"""``workbench bench verify``: what a verification costs one rank, by its token rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli_bench_decode import Place
from workbench.cli_options import Dtype, Json, answer

_DRAFT = "h200-rank"  # the recorded table whose drafts a new one takes over


def verify(
    model: Annotated[
        str, typer.Option("--model", help="Preset, bundled name or folder.", metavar="MODEL")
    ] = "beam-501b",
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")] = 8,
    tokens: Annotated[
        str, typer.Option("--tokens", help="Rows of the target's pass, by comma.", metavar="N,N")
    ] = "1,2,4,8,16,32,64,128,256,512,1024",
    context: Annotated[
        int, typer.Option("--context", min=1, help="Tokens in every sequence's cache.")
    ] = 8192,
    sequences: Annotated[
        int | None,
        typer.Option("--sequences", min=1, help="That share the tokens (default: up to 128)."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", help="Only the first N layers (default: all).", metavar="N"),
    ] = None,
    device: Annotated[
        Place, typer.Option("--device", help="The weights of beam-501b need a GPU.")
    ] = Place.cuda,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of weights and activations.")] = (
        Dtype.bfloat16
    ),
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Timed replays of each.")] = 40,
    table: Annotated[
        Path | None,
        typer.Option("--table", help="Write the cost table here (JSON).", metavar="FILE"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the result here too (JSON).", metavar="FILE"),
    ] = None,
    json: Json = False,
) -> None:
    """Time one rank's verification by how many tokens it has: the cost table of adaptive drafting.

    Each size is checked against FP64 before it is timed; one CUDA graph a step, no all-reduce.
    """
    from workbench.cli_kernels_asked import refuse_unwritable, write_document
    from workbench.errors import KernelError
    from workbench.files import FileError

    refuse_unwritable(out, table)
    sizes = _sizes(tokens)
    import torch

    from workbench import hardware
    from workbench.kernels.peaks import measured_peaks
    from workbench.kernels.rank.early_load import refuse_verify
    from workbench.kernels.rank.load_verify import measure_verify, spread
    from workbench.kernels.rank.weights import RankWeights
    from workbench.model.presets import resolve
    from workbench.terminal_kernels import Progress

    for size in sizes:
        spread(size, sequences)
    if device == Place.cuda and not torch.cuda.is_available():
        raise KernelError(
            "this machine has no CUDA GPU that torch can use; --device cpu runs a small model "
            "(--model beam-tiny --tp 2 --context 500 --tokens 1,4)"
        )
    if device == Place.cpu and table is not None:
        raise KernelError(
            "on a CPU the kernels are interpreted and nothing is timed, so there is no cost table: "
            "leave out --table, or use --device cuda"
        )
    resolved = resolve(model)
    most = resolved.config.max_position_embeddings
    if context > most:
        raise KernelError(
            f"a context of {context} tokens exceeds the model's {most} ({resolved.name}); give "
            f"--context {most} or less"
        )
    kind = getattr(torch, dtype.value)
    refuse_verify(
        resolved.config,
        tp,
        layers=layers,
        device=torch.device(device.value),
        dtype=kind,
        tokens=sizes,
        sequences=sequences,
        context=context,
    )
    with Progress("verify") as progress, torch.inference_mode():
        progress.told(0, 1, "measuring memory bandwidth")
        rates = measured_peaks(device.value)
        if device == Place.cuda:
            torch.cuda.empty_cache()
        progress.told(0, 1, "making the weights")
        weights = RankWeights.random(
            resolved.config, tp, layers=layers, device=device.value, dtype=kind
        )
        document = measure_verify(
            weights,
            sizes,
            context,
            rates,
            sequences=sequences,
            rounds=rounds,
            model=resolved.name,
            progress=progress.told,
        )
    machine = hardware.machine()
    gpu = machine.gpus[0].name if machine.gpus and device == Place.cuda else None
    document["hardware"] = gpu or rates.label
    document["versions"] = dict(machine.versions)
    wrong = [row for row in document["sizes"] if row["failures"]]
    unwritten = None
    try:
        write_document(out, document)
        if table is not None and not wrong:
            write_document(table, _table(document))
    except FileError as error:  # what took minutes is shown all the same
        unwritten = error
    if json:
        answer(document)
    else:
        _page(document)
    if unwritten is not None:
        raise unwritten
    if wrong:
        raise KernelError(
            f"a verification of {wrong[0]['rows']} tokens did not agree with the FP64 reference: "
            f"{wrong[0]['failures'][0]}"
        )


def error_said(row: dict[str, Any]) -> str:
    """The worst error of a row's check, and whether it failed; a dash where it is no number."""
    worst = row["check"]["worst_layer_error"]
    return ("–" if worst is None else f"{worst:.1e}") + (" FAILED" if row["failures"] else "")


def _sizes(given: str) -> list[int]:
    from workbench.errors import KernelError

    try:
        sizes = [int(part) for part in given.split(",") if part.strip()]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise KernelError(
            f"--tokens are whole numbers from 1 on, by comma (1,8,64), not {given!r:.60}"
        )
    return sizes


def _table(d: dict[str, Any]) -> dict[str, Any]:
    """The cost table of a measured document, with the draft curve of a recorded one."""
    import json

    from workbench.spec.recorded import RECORDED
    from workbench.spec.verify_costs import verify_table

    draft: dict[str, Any] = json.loads((RECORDED / f"cost-{_DRAFT}.json").read_text("utf-8"))
    return verify_table(
        {row["rows"]: row["samples"] for row in d["sizes"]},
        draft,
        label=(
            f"{d['hardware']}, one of {d['tp']} ranks of {d['model']}, {d['layers']} layers, "
            f"{d['dtype']}, this workbench's step: verification at {d['context']} tokens of "
            "context measured"
        ),
        date=d["date"],
        notes=[
            f"Verification: graph replays of one of {d['tp']} tensor-parallel ranks, random "
            f"weights, {d['context']} tokens of context a sequence, no all-reduce."
        ],
    )


def _page(d: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from workbench.terminal import out as console
    from workbench.terminal import printable

    screen = console()
    screen.print(
        escape(
            printable(
                f"{d['model']}, one of {d['tp']} ranks, {d['layers']} of {d['of_layers']} layers, "
                f"context {d['context']:,}, {d['dtype']}; {d['hardware']}, {d['date']}; "
                f"{d['note']}; floors at {d['bandwidth'] / 1e12:.2f} TB/s, measured here"
            )
        )
    )
    table = Table()
    for name in ("tokens", "sequences", "ms", "floor", "of floor", "experts", "max error"):
        table.add_column(name, justify="right")
    for row in d["sizes"]:
        spent, floor = row["milliseconds"], row["floor_milliseconds"]
        table.add_row(
            str(row["rows"]),
            str(row["sequences"]),
            "–" if spent is None else f"{spent:.3f}",
            f"{floor:.3f}",
            "–" if spent is None else f"{floor / spent:.0%}",
            f"{row['distinct']:.1f}",
            error_said(row),
        )
    screen.print(table)
    if any(row["milliseconds"] is None and not row["failures"] for row in d["sizes"]):
        screen.print("interpreted on a CPU: checked, and not timed")
