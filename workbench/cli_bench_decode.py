"""``workbench bench decode``: the decode step of a rank or several, from torch to fused chains."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli_options import Dtype, Json, answer

if TYPE_CHECKING:
    from rich.console import Console


class Place(StrEnum):
    """Where the rank lies."""

    cpu = "cpu"
    cuda = "cuda"


class Experts(StrEnum):
    """How the experts' weights are kept."""

    same = "same"
    fp8 = "fp8"


def decode(
    model: Annotated[
        str, typer.Option("--model", help="Preset, bundled name or folder.", metavar="MODEL")
    ] = "beam-501b",
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")] = 8,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", min=0, help="Which of them (default: 0); it seeds the random weights."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=1, help="Run N of the ranks at once, all-reduces included.", metavar="N"
        ),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(
            "--batch", metavar="N", help="Sequences (default: 1); with --gpus several, by comma."
        ),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            "--context",
            metavar="N",
            help="Tokens in the cache before the first step (default: 4096); likewise.",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", help="Only the first N layers (default: all).", metavar="N"),
    ] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variants",
            help="Stages of the waterfall, by comma or repeated (default: all that run here).",
            metavar="NAMES",
        ),
    ] = None,
    device: Annotated[
        Place, typer.Option("--device", help="The weights of beam-501b need a GPU.")
    ] = Place.cuda,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of weights and activations.")] = (
        Dtype.bfloat16
    ),
    experts: Annotated[
        Experts,
        typer.Option("--experts", help="same: as --dtype; fp8: E4M3 with a scale a row."),
    ] = Experts.same,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Timed replays of each.")] = 40,
    leave_one_out: Annotated[
        bool | None,
        typer.Option(
            "--leave-one-out/--no-leave-one-out",
            help="Also the chain without each of its switches (default: yes, of one rank).",
        ),
    ] = None,
    profile: Annotated[
        bool | None,
        typer.Option(
            "--profile/--no-profile", help="Also the time of each kernel (GPU; default: yes)."
        ),
    ] = None,
    prefill: Annotated[
        bool,
        typer.Option(
            "--prefill",
            help="With --gpus: also a prefill of 8 x 2048 tokens at 100k, on the same weights.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the result here too (JSON).", metavar="FILE"),
    ] = None,
    json: Json = False,
) -> None:
    """Time one tensor-parallel rank's decode step at full depth, every stage checked (FP64).

    Random weights at the rank's shapes, one CUDA graph a step. No all-reduce on one GPU; with
    --gpus N of the ranks run together, and each step is timed with its all-reduces and without.
    """
    from workbench.cli_bench_parallel import counts, decode_group
    from workbench.cli_kernels_asked import refuse_unwritable
    from workbench.errors import KernelError

    batches = counts(batch, 1, "--batch")
    contexts = counts(context, 4096, "--context")
    refuse_unwritable(out)
    if gpus is not None:
        if rank is not None:
            raise KernelError(
                f"--rank names one rank, and --gpus runs ranks 0 to {gpus - 1}: give one of them"
            )
        alone = {"--leave-one-out": leave_one_out, "--profile": profile}
        for option, given in alone.items():
            if given is not None:
                no = "" if given else "no-"
                raise KernelError(
                    f"--{no}{option[2:]} is of one rank by itself: leave it out, or leave out "
                    "--gpus"
                )
        decode_group(
            gpus=gpus, model=model, tp=tp, batches=batches, contexts=contexts, layers=layers,
            variants=variants, device=device.value, dtype=dtype.value, experts=experts.value,
            rounds=rounds, prefill=prefill, out=out, json=json,
        )  # fmt: skip
        return
    if prefill:
        raise KernelError(
            "--prefill goes with --gpus; for one rank's prefill there is workbench bench prefill"
        )
    if len(batches) > 1 or len(contexts) > 1:
        raise KernelError(
            "one rank is timed at one --batch and one --context; give one of each, or --gpus N"
        )
    _one_rank(
        model=model, tp=tp, rank=rank or 0, batch=batches[0], context=contexts[0], layers=layers,
        variants=variants, device=device, dtype=dtype, experts=experts, rounds=rounds,
        leave_one_out=leave_one_out is not False, profile=profile is not False, out=out, json=json,
    )  # fmt: skip


def _one_rank(
    *,
    model: str,
    tp: int,
    rank: int,
    batch: int,
    context: int,
    layers: int | None,
    variants: list[str] | None,
    device: Place,
    dtype: Dtype,
    experts: Experts,
    rounds: int,
    leave_one_out: bool,
    profile: bool,
    out: Path | None,
    json: bool,
) -> None:
    from workbench.cli_kernels_asked import write_document
    from workbench.errors import KernelError
    from workbench.files import FileError

    if rank >= tp:
        raise KernelError(f"there is no rank {rank} of {tp}; choose --rank 0 to {tp - 1}")
    import torch

    from workbench.kernels.peaks import measured_peaks
    from workbench.kernels.rank.early import refuse_early
    from workbench.kernels.rank.stages import NAMES, stage
    from workbench.kernels.rank.state import RankState
    from workbench.kernels.rank.waterfall import described, measure
    from workbench.kernels.rank.weights import RankWeights
    from workbench.model.presets import resolve
    from workbench.terminal_kernels import Progress

    names = None
    if variants:
        names = [part.strip() for each in variants for part in each.split(",") if part.strip()]
        if not names:
            raise KernelError(
                f"--variants names none; give some of {', '.join(NAMES)}, or leave it out for all "
                "that run here"
            )
        for name in names:
            stage(name)
    resolved = resolve(model)
    most = resolved.config.max_position_embeddings
    if context > most:  # the default, too, for a small model: before anything is looked for
        raise KernelError(
            f"a context of {context} tokens exceeds the model's {most} ({resolved.name}); give "
            f"--context {most} or less"
        )
    if device == Place.cuda and not torch.cuda.is_available():
        raise KernelError(
            "this machine has no CUDA GPU that torch can use; --device cpu runs a small model "
            "(--model beam-tiny --tp 2 --context 500)"
        )
    kind = getattr(torch, dtype.value)
    refuse_early(
        resolved.config,
        tp,
        layers=layers,
        device=torch.device(device.value),
        dtype=kind,
        experts=experts.value,
        context=context,
        batch=batch,
        variants=names or (),
    )
    with Progress("decode") as progress, torch.inference_mode():
        progress.told(0, 1, "measuring memory bandwidth")
        rates = measured_peaks(device.value)
        if device == Place.cuda:
            torch.cuda.empty_cache()
        progress.told(0, 1, "making the weights")
        weights = RankWeights.random(
            resolved.config,
            tp,
            layers=layers,
            device=device.value,
            dtype=kind,
            seed=rank,
            experts=experts.value,
        )
        state = RankState(weights, context, batch=batch)
        found = measure(
            weights,
            state,
            variants=names,
            rounds=rounds,
            leave_one_out=leave_one_out,
            profile=profile,
            rates=rates,
            model=resolved.name,
            rank=rank,
            progress=progress.told,
        )
    document = described(found, rates)
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
    if found.failed:
        raise KernelError(
            f"{', '.join(found.failed)} did not agree with the FP64 reference: "
            f"{found.variants[found.failed[0]]['failures'][0]}"
        )
    lost = found.quantisation
    if lost is not None and not lost.passed:
        raise KernelError(
            f"rounding the experts to FP8 moved the MLP output of layer {lost.layer} by "
            f"{lost.mlp_output:.1%}, and {lost.limit:.1%} is the most it may"
        )


def page(document: dict[str, Any], console: Console) -> None:
    """The waterfall as a table, and what it is of."""
    from rich.markup import escape
    from rich.table import Table

    from workbench.terminal import printable

    def plain(text: str) -> str:
        """A text that is not ours: brackets of it are no markup."""
        return escape(printable(text))

    d = document
    console.print(
        f"{plain(d['model'])}, rank {d['rank']} of {d['tp']}, {d['layers']} of {d['of_layers']} "
        f"layers, batch {d['batch']}, context {d['context']:,}, {d['dtype']}; "
        f"{plain(d['hardware'])}, {d['date']}"
    )
    console.print(
        f"floor {d['floor_milliseconds']:.3f} ms: {d['weight_bytes'] / 1e9:.2f} GB of weights and "
        f"{d['cache_bytes'] / 1e9:.3f} GB of cache at {d['bandwidth'] / 1e12:.2f} TB/s, measured "
        f"here; {d['note']}"
    )
    lost = d.get("error_gate", {}).get("quantisation")
    if lost is not None:
        console.print(
            f"experts {d['expert_weights']}: rounding moves weights by {lost['weights']:.1%}, a "
            f"layer's MLP output by {lost['mlp_output']:.1%} (limit {lost['limit']:.1%}); errors "
            "below are against the rounded weights"
        )
    # On a narrow terminal fewer columns, and all of their letters.
    wide = console.width >= _WIDE
    table = Table() if wide else Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in _COLUMNS if wide else [name for name in _COLUMNS if name in _NARROW]:
        table.add_column(heading, overflow="fold")
    for name, row in d["variants"].items():
        cells = (
            name,
            row["title"],
            row["origin"],
            *(_said(row[key], ".3f") for key in ("milliseconds", "low", "high")),
            _said(row["fraction_of_floor"], ".0%"),
            f"{row['check']['worst_layer_error']:.1e}" + _remark(row),
        )
        shown = dict(zip(_COLUMNS, cells, strict=True))
        table.add_row(*(shown[str(column.header)] for column in table.columns))
    console.print(table)
    for name, row in d["leave_one_out"].items():
        times = f"{_said(row['milliseconds'], '.3f')} ms, {_said(row['costs'], '+.3f')}"
        why = "interpreted, not timed" if row["passed"] else "FAILED, not timed"
        console.print(f"without {name}: {why if row['milliseconds'] is None else times}")
    for name, reason in d["left_out"].items():
        console.print(f"left out: {name}: {plain(reason)}")
    apart = d["repeat_percent"]
    console.print(
        "nothing was timed" if apart is None else f"two runs differ by {apart:.1f} % at most"
    )


_COLUMNS = ("variant", "what it adds", "from", "ms", "low", "high", "of floor", "max error")
_NARROW = ("variant", "ms", "of floor", "max error")
_WIDE = 100  # columns of a terminal that all of these fit


def _remark(row: dict[str, Any]) -> str:
    """Why a variant has no times."""
    if not row["passed"]:
        return " FAILED"
    return " interpreted" if row["interpreted"] else ""


def _said(value: float | None, form: str) -> str:
    """A number, or a dash where nothing was timed."""
    return "–" if value is None else format(value, form)
