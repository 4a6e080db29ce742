"""``workbench kv`` and ``workbench plan``: memory, and what fits."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli_options import Json, Model, answer
from workbench.model.asked import SizingError, shown

if TYPE_CHECKING:
    from workbench.datasheet import GpuSheet
    from workbench.model.drafter_config import DFlash2Config
    from workbench.model.layout import Layout


class CacheDtype(StrEnum):
    """What keys and values are stored in."""

    bf16 = "bf16"
    fp8 = "fp8"


Context = Annotated[int, typer.Option(help="Tokens of a sequence.", metavar="N")]
Sequences = Annotated[int, typer.Option(help="Sequences at once.", metavar="B")]
KVType = Annotated[CacheDtype, typer.Option("--kv-dtype", help="fp8: one byte a number.")]
BlockSize = Annotated[int, typer.Option(help="Tokens of a cache block.", metavar="N")]
BatchedTokens = Annotated[
    int, typer.Option(help="The engine's max_num_batched_tokens.", metavar="N")
]
AsyncScheduling = Annotated[
    bool,
    typer.Option(
        "--async-scheduling/--no-async-scheduling",
        help="The engine's default, on: two batches are in flight.",
        show_default=False,
    ),
]


def kv(
    model: Model,
    context: Context,
    sequences: Sequences = 1,
    kv_dtype: KVType = CacheDtype.bf16,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", metavar="T")] = 1,
    block_size: BlockSize = 16,
    batched_tokens: BatchedTokens = 8192,
    async_scheduling: AsyncScheduling = True,
    drafter: Annotated[
        bool, typer.Option("--drafter", help="Count the model's DFlash2 drafter.")
    ] = False,
    drafter_config: Annotated[
        str | None,
        typer.Option(help="Count this drafter: a folder with config.json.", metavar="FOLDER"),
    ] = None,
    json: Json = False,
) -> None:
    """How much memory the KV cache takes on each GPU, by four accounts; --json has every layer."""
    from workbench.model.presets import resolve
    from workbench.model.sizing import size_kv

    resolved = resolve(model)
    shape = _drafter_of_kv(model, drafter_config, wanted=drafter)
    sizing = size_kv(
        resolved.config,
        context=context,
        sequences=sequences,
        kv_dtype=kv_dtype.value,
        tp=tp,
        block_size=block_size,
        batched_tokens=batched_tokens,
        async_scheduling=async_scheduling,
        drafter=shape,
    )
    if json:
        answer({"model": resolved.name} | sizing.to_dict())
        return
    from workbench.terminal import out
    from workbench.terminal_sizing import kv_page

    kv_page(resolved.name, sizing, out())


def plan(
    model: Model,
    gpu: Annotated[
        str,
        # Named explicitly: a metavar that is the name in capitals would become the option's own
        # name with some releases of typer.
        typer.Option("--gpu", help="H100, H200, B200, GB200, GB300, or detected.", metavar="GPU"),
    ],
    context: Context,
    gpus: Annotated[
        int | None,
        typer.Option(help="Default: --tp x --dp, else all detected, else 1.", metavar="N"),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="bf16, fp8, nvfp4, or by part: experts=nvfp4,attention=fp8.", metavar="W"
        ),
    ] = "bf16",
    kv_dtype: KVType = CacheDtype.fp8,
    sequences: Sequences = 1,
    tp: Annotated[
        int | None,
        typer.Option(
            help="Tensor-parallel ranks of a group. Default: the first layout that runs.",
            metavar="T",
        ),
    ] = None,
    dp: Annotated[
        int | None, typer.Option(help="Data-parallel groups. Default: as --tp.", metavar="D")
    ] = None,
    ep: Annotated[
        bool | None,
        typer.Option("--ep/--no-ep", help="Whole experts on each GPU. Default: as --tp."),
    ] = None,
    batched_tokens: BatchedTokens = 8192,
    block_size: BlockSize = 16,
    async_scheduling: AsyncScheduling = True,
    utilization: Annotated[
        float, typer.Option(help="The engine's gpu_memory_utilization.", metavar="U")
    ] = 0.92,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="What the command serves. Default: a placeholder.", metavar="PATH"),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="The command's drafter; a folder with config.json gives its shape too. Default: "
            "the shape known for MODEL, and a placeholder.",
            metavar="PATH",
        ),
    ] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="DFlash2 and its drafter.")
    ] = True,
    speculative_tokens: Annotated[int, typer.Option(help="Draft tokens a step.", metavar="N")] = 7,
    adaptive: Annotated[
        bool, typer.Option("--adaptive/--no-adaptive", help="Adaptive verification.")
    ] = True,
    json: Json = False,
) -> None:
    """What fits on which GPUs, how far it goes, and the engine command that runs it."""
    from dataclasses import replace

    from workbench.model.plan import all_plans, make_plan
    from workbench.model.presets import resolve
    from workbench.model.serve_command import Speculation

    resolved = resolve(model)
    card, found = gpu_of(gpu)
    if drafter is not None and not speculation:
        raise SizingError("--drafter and --no-speculation contradict each other; leave one out")
    shape, assumed = drafter_of_plan(model, drafter) if speculation else (None, "")
    asked = (
        Speculation(drafter=drafter, tokens=speculative_tokens, adaptive=adaptive)
        if speculation and (shape is not None or drafter is not None)
        else None
    )
    layout = None
    if tp is not None or dp is not None or ep is not None:
        layout = layout_of(gpus, found, tp, dp, bool(ep))
    settings: dict[str, Any] = {
        "gpus": gpus if gpus is not None or layout is not None else found,
        "weights": weights,
        "kv_dtype": kv_dtype.value,
        "context": context,
        "sequences": sequences,
        "batched_tokens": batched_tokens,
        "block_size": block_size,
        "async_scheduling": async_scheduling,
        "utilization": utilization,
        "drafter": shape,
        "speculation": asked,
        "checkpoint": checkpoint,
        "name": resolved.name,
    }
    best = make_plan(resolved.config, card, layout=layout, **settings)
    if assumed:
        best = replace(best, notes=(*best.notes, assumed))
    if json:
        answer(best.to_dict())
    else:
        from workbench.terminal import out
        from workbench.terminal_sizing import plan_page

        plans = all_plans(resolved.config, card, **settings) if layout is None else (best,)
        plan_page(best, plans, out())
    if not best.runs:
        raise SizingError(best.verdict)


def layout_of(gpus: int | None, found: int, tp: int | None, dp: int | None, ep: bool) -> Layout:
    """The layout that the options name; what they leave open follows from the number of GPUs."""
    from workbench.model.layout import Layout

    if tp is None and dp is None:
        tp = gpus if gpus is not None else found
    elif tp is None and dp is not None:
        tp = _share(gpus, dp, "--dp")
    elif dp is None and tp is not None:
        dp = _share(gpus, tp, "--tp")
    return Layout(
        tp=tp if tp is not None else 1, dp=dp if dp is not None else 1, expert_parallel=ep
    )


def _share(gpus: int | None, ranks: int, option: str) -> int:
    if gpus is None or ranks < 1:  # a wrong number is refused by the layout itself
        return 1
    if gpus % ranks:
        raise SizingError(f"{option} {ranks} does not divide {gpus} GPUs; choose a divisor")
    return gpus // ranks


def _drafter_of_kv(model: str, folder: str | None, *, wanted: bool) -> DFlash2Config | None:
    """The drafter to count: the folder's, or the one known for the model."""
    from workbench.model.presets import drafter_of, resolve_drafter

    if folder is not None:
        return resolve_drafter(folder).config
    if not wanted:
        return None
    name = drafter_of(model)
    if name is None:
        raise SizingError(
            f"no drafter is known for {shown(model)}; give --drafter-config with a folder that "
            "holds the drafter's config.json"
        )
    return resolve_drafter(name).config


def drafter_of_plan(model: str, drafter: str | None) -> tuple[DFlash2Config | None, str]:
    """The drafter to count, and a note where its shape was assumed.

    What exists here must be a drafter's folder. A path or name that does not is the engine's to
    find; the drafter known for the model lends it its shape.
    """
    from pathlib import Path

    from workbench.model.asked import path
    from workbench.model.presets import assumed_drafter, drafter_of, resolve_drafter

    given = path("drafter", drafter)
    if given is not None:
        try:
            here = Path(given).exists() or Path(given).is_symlink()
        except (OSError, ValueError):  # too long, or a loop of links
            here = True
        if here:
            return resolve_drafter(given).config, ""
    name = drafter_of(model)
    if name is None:
        return None, ""
    known = resolve_drafter(name)
    if given is not None:
        return known.config, f"{shown(given)} is not here; {assumed_drafter(name)}"
    # A bundled one has its shape from its own config.json.
    return known.config, assumed_drafter(name) if known.folder is None else ""


def gpu_of(name: str) -> tuple[GpuSheet, int]:
    """The data sheet and how many such GPUs to take when nobody says."""
    from workbench.datasheet import detected, sheet

    if name.lower() != "detected":
        return sheet(name), 1
    here = detected()
    if not here:
        raise SizingError(
            "no GPU that torch can use is in this machine; name one with --gpu, such as GB200"
        )
    gpu, card = here[0]
    if card is None:
        raise SizingError(
            f"no data sheet values are held for this machine's {gpu.name}; name another with --gpu"
        )
    return card, len(here)
