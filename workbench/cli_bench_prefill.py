"""``workbench bench prefill``: one rank's prefill, or the layouts of several ranks."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli_bench_decode import Place
from workbench.cli_bench_load import error_said
from workbench.cli_options import Dtype, Json, answer

if TYPE_CHECKING:
    from rich.console import Console


class Form(StrEnum):
    """Which forms of the prefill there are."""

    naive = "naive"
    chain = "chain"
    ours = "ours"


def prefill(
    model: Annotated[
        str, typer.Option("--model", help="Preset, bundled name or folder.", metavar="MODEL")
    ] = "beam-501b",
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")] = 8,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            min=1,
            help="Run N ranks at once, each layout with its communication.",
            metavar="N",
        ),
    ] = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            "--layouts",
            help="With --gpus: tp, tensor parallel; ep, attention data-parallel and whole experts; "
            "by comma or repeated (default: both).",
            metavar="NAMES",
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option("--sequences", min=1, help="Sequences (default: 8; with --gpus one a rank)."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", min=1, help="New tokens of each (default: 2048; with --gpus 32768)."
        ),
    ] = None,
    context: Annotated[
        int, typer.Option("--context", min=0, help="Earlier tokens of each, in the cache.")
    ] = 0,
    layers: Annotated[
        int | None,
        typer.Option("--layers", help="Only the first N layers (default: all).", metavar="N"),
    ] = None,
    variants: Annotated[
        list[Form] | None,
        typer.Option("--variants", help="Repeated; default: naive and ours."),
    ] = None,
    device: Annotated[
        Place, typer.Option("--device", help="The weights of beam-501b need a GPU.")
    ] = Place.cuda,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of weights and activations.")] = (
        Dtype.bfloat16
    ),
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Timed runs of each.")] = 5,
    profile: Annotated[
        bool | None,
        typer.Option(
            "--profile/--no-profile", help="Also the time of each kernel (GPU; default: yes)."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the result here too (JSON).", metavar="FILE"),
    ] = None,
    json: Json = False,
) -> None:
    """Time one tensor-parallel rank's prefill at full depth, checked against FP64.

    Random weights at the rank's shapes, every sequence behind --context earlier tokens, a CUDA
    graph where the host is not asked. No all-reduce on one GPU; with --gpus several ranks run it
    together, tensor-parallel and with whole experts on each.
    """
    from workbench.cli_bench_parallel import LAYOUTS, names_of, prefill_group
    from workbench.cli_kernels_asked import refuse_unwritable
    from workbench.errors import KernelError

    refuse_unwritable(out)
    if gpus is not None:
        for option, given in {"--variants": variants, "--profile/--no-profile": profile}.items():
            if given is not None:
                raise KernelError(
                    f"{option} is of one rank by itself: leave it out, or leave out --gpus"
                )
        named = list(LAYOUTS) if layouts is None else names_of(layouts)
        if not named:
            raise KernelError(f"--layouts names none; give {' or '.join(LAYOUTS)}, or both")
        prefill_group(
            gpus=gpus, model=model, tp=tp, layouts=named, sequences=sequences or gpus,
            tokens=tokens or 32_768, context=context, layers=layers, device=device.value,
            dtype=dtype.value, rounds=rounds, out=out, json=json,
        )  # fmt: skip
        return
    if layouts is not None:
        raise KernelError("--layouts are of several ranks: give --gpus N, too")
    _one_rank(
        model=model, tp=tp, sequences=sequences or 8, tokens=tokens or 2048, context=context,
        layers=layers, variants=variants, device=device, dtype=dtype, rounds=rounds,
        profile=profile is not False, out=out, json=json,
    )  # fmt: skip


def _one_rank(
    *,
    model: str,
    tp: int,
    sequences: int,
    tokens: int,
    context: int,
    layers: int | None,
    variants: list[Form] | None,
    device: Place,
    dtype: Dtype,
    rounds: int,
    profile: bool,
    out: Path | None,
    json: bool,
) -> None:
    import torch

    from workbench.cli_kernels_asked import write_document
    from workbench.errors import KernelError
    from workbench.files import FileError
    from workbench.kernels.peaks import measured_peaks
    from workbench.kernels.rank.early_load import refuse_prefill
    from workbench.kernels.rank.prefill_bench import measure_prefill
    from workbench.kernels.rank.prefill_state import PrefillState
    from workbench.kernels.rank.weights import RankWeights
    from workbench.model.presets import resolve
    from workbench.terminal_kernels import Progress

    resolved = resolve(model)
    if device == Place.cuda and not torch.cuda.is_available():
        raise KernelError(
            "this machine has no CUDA GPU that torch can use; --device cpu runs a small model "
            "(--model beam-tiny --tp 2 --sequences 2 --tokens 64)"
        )
    forms = [form.value for form in dict.fromkeys(variants or (Form.naive, Form.ours))]
    kind = getattr(torch, dtype.value)
    refuse_prefill(
        resolved.config,
        tp,
        layers=layers,
        device=torch.device(device.value),
        dtype=kind,
        forms=forms,
        sequences=sequences,
        tokens=tokens,
        context=context,
    )
    with Progress("prefill") as progress, torch.inference_mode():
        progress.told(0, 1, "measuring the matrix rate")
        rates = measured_peaks(device.value)
        if device == Place.cuda:
            torch.cuda.empty_cache()
        progress.told(0, 1, "making the weights")
        weights = RankWeights.random(
            resolved.config, tp, layers=layers, device=device.value, dtype=kind
        )
        state = PrefillState(weights, sequences, tokens, context)
        document = measure_prefill(
            weights,
            state,
            forms,
            rates,
            model=resolved.name,
            rounds=rounds,
            profile=profile,
            progress=progress.told,
        )
    unwritten = None
    try:
        write_document(out, document)
    except FileError as error:  # what took minutes is shown all the same
        unwritten = error
    if json:
        answer(document)
    else:
        from workbench.terminal import out as console

        page(document, console())
    if unwritten is not None:
        raise unwritten
    for name, row in document["variants"].items():
        if row["failures"]:
            raise KernelError(f"{name} did not agree with the FP64 reference: {row['failures'][0]}")


def page(document: dict[str, Any], console: Console) -> None:
    """The forms as a table, and what they are of."""
    from rich.markup import escape
    from rich.table import Table

    from workbench.terminal import printable

    d = document
    console.print(
        f"{escape(printable(d['model']))}, one of {d['tp']} ranks, {d['layers']} layers, "
        f"{d['sequences']} x {d['tokens']:,} tokens behind {d['context']:,}, {d['dtype']}; "
        f"{escape(printable(d['hardware']))}, {d['date']}"
    )
    console.print(
        f"{d['flops']['products'] / 1e12:.1f} TFLOP of products and "
        f"{d['flops']['attention'] / 1e12:.1f} of attention: {d['floor_milliseconds']:.1f} ms at "
        f"{d['matrix_rate'] / 1e12:.1f} TFLOP/s, measured here; {d['note']}"
    )
    table = Table()
    for heading in ("variant", "ms", "of the matrix rate", "max error"):
        table.add_column(heading)
    for name, row in d["variants"].items():
        spent = row.get("milliseconds")
        table.add_row(
            name,
            "–" if spent is None else f"{spent:.2f}",
            "–" if spent is None else f"{row['fraction_of_peak']:.0%}",
            error_said(row),
        )
    console.print(table)
    if any(row["interpreted"] and not row["failures"] for row in d["variants"].values()):
        console.print("interpreted on a CPU: checked, and not timed")
