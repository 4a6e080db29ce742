"""``workbench bench decode --gpus N`` and ``prefill --gpus N``: several ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from workbench.cli_options import answer
from workbench.errors import KernelError

if TYPE_CHECKING:
    from workbench.model.presets import ResolvedModel

DECODE, PREFILL = (
    "workbench.kernels.parallel.jobs:decode",
    "workbench.kernels.parallel.jobs:prefill",
)
LAYOUTS = ("tp", "ep")
# Figures of others that stand beside ours.
PUBLISHED_LAYOUTS = ("throughput of attention DP + MegaMoE over TP",)
PUBLISHED_PREFILL = (
    "prefill 8 x 2048 at 100k, before the optimisations",
    "prefill 8 x 2048 at 100k, after the optimisations",
)
# The prefill that `bench decode --gpus N --prefill` adds: the announcement's.
ALSO = {"sequences": 8, "tokens": 2048, "context": 100_000}


def counts(given: Sequence[str] | None, usual: int, option: str) -> list[int]:
    """Whole numbers from 1 on, by comma or repeated, each once and in order; none: the usual one.

    Raises:
        typer.BadParameter: something else was given.
    """
    found: list[int] = []
    for part in (part.strip() for each in given or () for part in each.split(",")):
        # Digits alone, and not too many of them: int() takes underscores and seconds.
        if not (part.isascii() and part.isdigit() and len(part) <= 40 and int(part) > 0):
            raise typer.BadParameter(
                f"{part[:40]!r} is not a whole number from 1 on.", param_hint=f"'{option}'"
            )
        found.append(int(part))
    return list(dict.fromkeys(found)) or [usual]


def names_of(given: Sequence[str] | None) -> list[str]:
    """Names by comma or repeated, each once."""
    parts = (part.strip() for each in given or () for part in each.split(","))
    return list(dict.fromkeys(filter(None, parts)))


def decode_group(
    *,
    gpus: int,
    model: str,
    tp: int,
    batches: Sequence[int],
    contexts: Sequence[int],
    layers: int | None,
    variants: Sequence[str] | None,
    device: str,
    dtype: str,
    experts: str,
    rounds: int,
    prefill: bool,
    out: Path | None,
    json: bool,
) -> None:
    """Run the decode step of ``gpus`` of ``tp`` ranks, write the document and show it.

    Raises:
        KernelError: it cannot be run, a rank failed, or a variant did not agree with the reference.
    """
    import torch

    from workbench.kernels.parallel.jobs import VARIANTS, refuse_sizes, refuse_variant
    from workbench.terminal_parallel import decode_page

    names = None
    if variants:
        names = names_of(variants)
        if not names:
            raise KernelError(
                f"--variants names none; give some of {', '.join(VARIANTS)}, or leave it out for "
                "all that run here"
            )
        for name in names:
            refuse_variant(name)
    resolved = _model(model, gpus, tp, device, "--context 500")
    most = resolved.config.max_position_embeddings
    for context in contexts:
        if context > most:
            raise KernelError(
                f"a context of {context} tokens exceeds the model's {most} ({resolved.name}); give "
                f"--context {most} or less"
            )
    also = None
    if prefill:
        room = most - ALSO["tokens"]
        if room < 0:
            raise KernelError(
                f"--prefill takes {ALSO['tokens']} tokens, and {resolved.name} has a context of "
                f"{most}: leave it out, or use workbench bench prefill --gpus {gpus} --tokens N"
            )
        also = {**ALSO, "context": min(ALSO["context"], room)}
    kind = getattr(torch, dtype)
    pairs = [(batch, context) for context in contexts for batch in batches]
    refuse_sizes(
        resolved.config, tp, pairs, layers=layers, dtype=kind,
        experts="fp8" if experts == "fp8" else "same",
    )  # fmt: skip
    request = {
        "model": resolved.name, "config": resolved.config.to_dict(), "tp": tp, "layers": layers,
        "dtype": dtype, "rounds": rounds, "batches": list(batches), "contexts": list(contexts),
        "variants": names, "experts": experts, "prefill": also,
    }  # fmt: skip
    document = _run(DECODE, request, gpus, device, "decode")
    if "prefill" in document:
        _publish(document["prefill"], PUBLISHED_PREFILL)
    _answer(document, out, json, decode_page)
    _fail_on_decode(document)


def prefill_group(
    *,
    gpus: int,
    model: str,
    tp: int,
    layouts: Sequence[str],
    sequences: int,
    tokens: int,
    context: int,
    layers: int | None,
    device: str,
    dtype: str,
    rounds: int,
    out: Path | None,
    json: bool,
) -> None:
    """Run a prefill on ``gpus`` ranks in each of the layouts, write the document and show it.

    Raises:
        KernelError: it cannot be run, a rank failed, or a layout did not agree with the reference.
    """
    from workbench.kernels.rank.prefill_state import refuse_sizes
    from workbench.kernels.shapes import Shapes
    from workbench.terminal_parallel import prefill_page

    for name in layouts:
        if name not in LAYOUTS:
            raise KernelError(
                f"there is no layout {name!r:.40}; there are {' and '.join(LAYOUTS)}: tensor "
                "parallel, and attention data-parallel with expert-parallel MoE"
            )
    if "ep" in layouts and sequences % gpus:
        raise KernelError(
            f"--sequences {sequences} cannot be shared out evenly among {gpus} ranks, each of "
            f"which prefills its own in the layout ep; give a multiple of {gpus}, or --layouts tp"
        )
    resolved = _model(model, gpus, tp, device, "--tokens 64")
    refuse_sizes(Shapes.of(resolved.config, tp), sequences, tokens, context)
    request = {
        "model": resolved.name, "config": resolved.config.to_dict(), "tp": tp, "layers": layers,
        "dtype": dtype, "rounds": rounds, "layouts": list(layouts), "sequences": sequences,
        "tokens": tokens, "context": context,
    }  # fmt: skip
    document = _run(PREFILL, request, gpus, device, "prefill")
    _publish(document, PUBLISHED_LAYOUTS)
    _answer(document, out, json, prefill_page)
    for name, row in document["layouts"].items():
        _fail_on_layout(name, row)


def _model(model: str, gpus: int, tp: int, device: str, small: str) -> ResolvedModel:
    """The model; refuses ranks that there are not, or GPUs."""
    if gpus > tp:
        raise KernelError(
            f"--gpus {gpus} is more than the {tp} ranks of the model: give --tp {gpus} or more, or "
            f"--gpus {tp} or fewer"
        )
    import torch

    from workbench.model.presets import resolve

    resolved = resolve(model)
    if device == "cuda":
        here = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not here:
            raise KernelError(
                "this machine has no CUDA GPU that torch can use; --device cpu runs the ranks of a "
                f"small model (--model beam-tiny --tp 2 --gpus 2 {small})"
            )
        if gpus > here:
            raise KernelError(
                f"--gpus {gpus} wants a GPU for each rank, and torch sees {here}; give --gpus "
                f"{here} or fewer"
            )
    return resolved


def _run(job: str, request: dict[str, Any], gpus: int, device: str, what: str) -> dict[str, Any]:
    from workbench.kernels.parallel.start import run_ranks
    from workbench.terminal_kernels import Progress

    with Progress(what) as progress:

        def told(done: int, of: int, label: str) -> None:
            if done < of:  # the end is the answer
                progress.told(done, of, label)

        told(0, 1, f"starting {gpus} rank{'s' * (gpus != 1)}")
        return run_ranks(job, request, gpus, device=device, told=told)


def _publish(document: dict[str, Any], names: Sequence[str]) -> None:
    """Put the published figures beside a document that has none."""
    from workbench.model.reference_figures import reference

    document.setdefault("published", [reference(name).to_dict() for name in names])


def _answer(document: dict[str, Any], out: Path | None, json: bool, page: Any) -> None:
    from workbench.cli_kernels_asked import write_document
    from workbench.files import FileError

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


def _fail_on_decode(document: dict[str, Any]) -> None:
    for run in document["runs"]:
        for name, row in run["variants"].items():
            if not row["passed"]:
                raise KernelError(
                    f"{name} at batch {run['batch']}, context {run['context']} did not agree with "
                    f"the FP64 reference: {(row['failures'] or ['no check'])[0]}"
                )
    if "prefill" in document:
        _fail_on_layout("tp", document["prefill"])


def _fail_on_layout(name: str, row: dict[str, Any]) -> None:
    if not row["passed"]:
        raise KernelError(
            f"the prefill in the layout {name} did not agree with the FP64 reference: "
            f"{(row['failures'] or ['no check'])[0]}"
        )
