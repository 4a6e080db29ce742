"""``workbench kernels list|check|bench``: what there is, whether it is right, how fast it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli_kernels_asked import (
    Asked,
    KernelDevice,
    KernelDtype,
    dtype_name,
    fail_on,
    refuse_unwritable,
    write_document,
)
from workbench.cli_options import Json, answer
from workbench.errors import KernelError

if TYPE_CHECKING:
    import torch

    from workbench.kernels.check import Verdict

kernels_app = typer.Typer(
    help="Swappable operations: list them, check variants, time them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


# Named explicitly, all of them: some releases of typer name an option after its metavar.
Op = Annotated[
    list[str] | None,
    typer.Option("--op", help="An operation; repeat for more. Default: all.", metavar="OP"),
]
VariantName = Annotated[
    list[str] | None,
    typer.Option("--variant", help="A variant; repeat for more. Default: all.", metavar="NAME"),
]
Device = Annotated[
    KernelDevice | None,
    typer.Option("--device", help="Default: cuda where there is a GPU."),
]
Tokens = Annotated[
    list[int] | None,
    typer.Option("--tokens", help="Tokens of a call; repeat for more.", metavar="N"),
]
Tp = Annotated[
    int | None,
    typer.Option(
        "--tp", help="Sizes of one of T ranks. Default: 8 for beam-501b, else 1.", metavar="T"
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Whose sizes. Default: beam-tiny on a CPU, beam-501b on a GPU.",
        metavar="MODEL",
    ),
]
Flavour = Annotated[
    list[str] | None,
    typer.Option(
        "--flavour", help="A kind of input, such as 'sliding fp8'; repeat for more.", metavar="F"
    ),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="Python that registers variants; it runs in a process of its own.",
        metavar="FILE",
    ),
]
Limit = Annotated[
    float | None,
    typer.Option("--seconds", help="Time limit of a variant of --file. Default: 120.", metavar="S"),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Write the result here too (JSON).", metavar="FILE")
]


@kernels_app.command("list")
def list_kernels(
    op: Op = None,
    variant: VariantName = None,
    device: Device = None,
    dtype: Annotated[KernelDtype | None, typer.Option("--dtype", help="Of activations.")] = None,
    model: ModelName = None,
    tp: Tp = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Every operation and its variants: which run here, and why the others do not."""
    refuse_unwritable(out)
    asked = Asked(op, variant, device, model, tp, None)
    from workbench.kernels import registry
    from workbench.kernels.ops import operation
    from workbench.kernels.requirements import Where

    where = Where.of(asked.device, asked.dtypes(dtype, both=False)[0], asked.shapes)
    rows = []
    for name in asked.ops:
        for one in asked.variants_of(name):
            reason = registry.why_not(name, one, where)
            rows.append(
                {
                    "op": name,
                    "title": operation(name).title,
                    "flavours": list(operation(name).flavours),
                    "variant": one,
                    "available": reason is None,
                    "reason": reason or "",
                    "max_error": None,
                    "passed": None,
                    "microseconds": None,
                    "roofline_fraction": None,
                }
            )
    document = asked.heading() | {"ops": rows}
    write_document(out, document)
    if json:
        answer(document)
        return
    from workbench.terminal import out as console
    from workbench.terminal_kernels import list_page

    list_page(document, console())


@kernels_app.command("check")
def check_kernels(
    op: Op = None,
    variant: VariantName = None,
    device: Device = None,
    tokens: Tokens = None,
    tp: Tp = None,
    model: ModelName = None,
    dtype: Annotated[
        KernelDtype | None, typer.Option("--dtype", help="Of activations. Default: both.")
    ] = None,
    file: File = None,
    seconds: Limit = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Compare variants with float64: every flavour, odd sizes, strides, poisoned outputs."""
    refuse_unwritable(out)
    asked = Asked(op, variant, device, model, tp, tokens, file, seconds)
    dtypes = asked.dtypes(dtype, both=True)
    asked.refuse_what_does_not_fit(dtypes)
    verdicts: list[Verdict] = []
    if file is not None:
        trials = asked.trials(file, dtypes)
        verdicts = [t.verdict for t in trials if t.verdict is not None]
    else:
        from workbench.kernels.check import check_variants
        from workbench.terminal import note
        from workbench.terminal_kernels import Progress

        if not variant and asked.device == "cpu":
            note("compile is left out, it takes minutes on a CPU: name it with --variant compile")
        with Progress("checking") as progress:
            for name in asked.ops:
                variants = asked.variants_of(name)
                if not variant and asked.device == "cpu":
                    variants = [v for v in variants if v != "compile"]
                for verdict in check_variants(
                    name,
                    variants,
                    asked.shapes,
                    tokens=asked.tokens,
                    dtypes=dtypes,
                    device=asked.device,
                    on_case=progress.within(name),
                ):
                    progress.say(verdict.sentence())
                    verdicts.append(verdict)
    rows = []
    for verdict in verdicts:
        available = verdict.status != "unavailable"
        rows.append(
            verdict.to_dict()
            | {
                "available": available,
                "passed": verdict.passed if available else None,
                "microseconds": None,
                "roofline_fraction": None,
            }
        )
    document = asked.heading() | {"dtypes": [dtype_name(d) for d in dtypes], "ops": rows}
    write_document(out, document)
    if json:
        answer(document)
    else:
        from workbench.terminal import out as console
        from workbench.terminal_kernels import check_page

        check_page(document, console())
    fail_on(
        [(v.op, v.variant, v.status, v.gate, v.reason) for v in verdicts], explicit=bool(variant)
    )


@kernels_app.command("bench")
def bench_kernels(
    op: Op = None,
    variant: VariantName = None,
    device: Device = None,
    tokens: Tokens = None,
    tp: Tp = None,
    model: ModelName = None,
    dtype: Annotated[
        KernelDtype | None,
        typer.Option("--dtype", help="Default: float32 on a CPU, bfloat16 on a GPU."),
    ] = None,
    flavour: Flavour = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", help="Rounds of a comparison. Default: 25.", metavar="N"),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            help="Also trace a decode step of --tokens sequences and write it for Perfetto.",
            metavar="FILE",
        ),
    ] = None,
    file: File = None,
    seconds: Limit = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Time variants that pass the check, beside what this machine's memory and arithmetic allow."""
    if file is not None and (flavour or rounds is not None or timeline is not None):
        raise KernelError(
            "--file tries every flavour in a process of its own, times what passes for half a "
            "second and traces nothing; leave --flavour, --rounds and --timeline out"
        )
    refuse_unwritable(out, timeline)
    asked = Asked(op, variant, device, model, tp, tokens, file, seconds)
    from workbench.kernels.timing import MIN_ROUNDS, ROUNDS

    if rounds is not None and rounds < MIN_ROUNDS:
        raise KernelError(f"--rounds: a median needs {MIN_ROUNDS} rounds or more, not {rounds}")
    dtypes = asked.dtypes(dtype, both=False)
    asked.refuse_what_does_not_fit(dtypes)
    if file is not None:
        _bench_file(asked, file, dtypes, out, json)
        return
    from workbench.kernels.bench import bench
    from workbench.terminal_kernels import Progress

    with Progress("timing") as progress:
        result = bench(
            asked.ops,
            asked.shapes,
            variants=variant,
            tokens=asked.tokens,
            flavours=flavour,
            dtype=dtypes[0],
            device=asked.device,
            model=asked.model,
            rounds=rounds or ROUNDS,
            on_progress=progress.told,
        )
    document = asked.heading() | {
        "dtype": dtype_name(dtypes[0]),
        "how": result.how,
        "hardware": result.hardware,
        "date": result.date,
        "interrupted": result.interrupted,
        "versions": dict(result.versions),
        "peaks": dict(result.peaks),
        "ops": [row.to_dict() for row in result.rows],
    }
    if out is not None:
        result.write(out)
    if timeline is not None and not result.interrupted:
        from workbench.cli_kernels_trace import trace

        document["timeline"] = trace(asked, dtypes[0], timeline)
    if json:
        answer(document)
    else:
        from workbench.terminal import out as console
        from workbench.terminal_kernels import bench_page

        bench_page(result, console())
    if result.interrupted:
        raise typer.Exit(130)
    fail_on(
        [(r.op, r.variant, r.status, r.gate, r.reason) for r in result.rows],
        explicit=bool(variant),
    )


def _bench_file(
    asked: Asked,
    file: Path,
    dtypes: Sequence[torch.dtype],
    out: Path | None,
    json: bool,
) -> None:
    trials = asked.trials(file, dtypes)
    rows = []
    for t in trials:
        timed = t.timing or {"microseconds": None, "roofline_fraction": None}
        verdict = t.verdict
        rows.append(
            {
                "op": t.op,
                "variant": t.variant,
                "available": t.status != "unavailable",
                "status": t.status,
                "gate": t.gate,
                "reason": t.error or t.untimed,
                "max_error": None if verdict is None else verdict.max_error,
                "own_error": None if verdict is None else verdict.own_error,
                "passed": t.passed,
            }
            | timed
        )
    document = asked.heading() | {"dtype": dtype_name(dtypes[0]), "ops": rows}
    write_document(out, document)
    if json:
        answer(document)
    else:
        from workbench.terminal import out as console
        from workbench.terminal_kernels import check_page

        check_page(document, console())
    fail_on([(t.op, t.variant, t.status, t.gate, t.error) for t in trials], explicit=True)
