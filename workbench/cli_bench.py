"""``workbench bench``: what drafting gains, and one rank's work, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli_bench_decode import decode
from workbench.cli_bench_load import verify
from workbench.cli_bench_prefill import prefill
from workbench.cli_drafting import DrafterFolder, SpeculativeTokens
from workbench.cli_options import Device, Json, Model, NewTokens, Precision, answer, load_model
from workbench.cli_trace import PromptCount, PromptFiles, PromptTexts, PromptTokens

bench_app = typer.Typer(
    help="Time decoding on this machine.", no_args_is_help=True, rich_markup_mode=None
)


@bench_app.callback()
def _bench() -> None:
    """The group's own options: none."""


bench_app.command("decode")(decode)
bench_app.command("prefill")(prefill)
bench_app.command("verify")(verify)


@bench_app.command("speculative")
def speculative(
    model: Model = "beam-tiny",
    drafter: DrafterFolder = None,
    speculative_tokens: SpeculativeTokens = None,
    prompts: PromptFiles = None,
    prompt: PromptTexts = None,
    prompt_tokens: PromptTokens = None,
    count: PromptCount = None,
    max_new_tokens: NewTokens = 128,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Times each prompt is decoded.", metavar="R")
    ] = 3,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Sequences decoded together.", metavar="C")
    ] = 1,
    dtype: Precision = None,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the result here too (JSON).", metavar="FILE"),
    ] = None,
    json: Json = False,
) -> None:
    """Greedy decoding without drafts, verifying all, and adaptively, in turns prompt by prompt."""
    from workbench.cli_kernels_asked import refuse_unwritable, write_document
    from workbench.cli_trace import given_texts, prompts_of

    refuse_unwritable(out)
    texts = given_texts(prompts, prompt, None)
    beam = load_model(model, dtype, device)
    from workbench.spec.bench import bench
    from workbench.spec.bench_prompts import PROMPTS
    from workbench.spec.drafter_checkpoint import load_drafter
    from workbench.terminal import note
    from workbench.terminal_kernels import Progress

    drafts = load_drafter(beam, drafter)
    with Progress("timing") as progress:
        result = bench(
            beam,
            drafts,
            prompts_of(beam, (texts or list(PROMPTS))[:count], prompt_tokens),
            speculative_tokens=speculative_tokens,
            max_new_tokens=max_new_tokens,
            rounds=rounds,
            concurrency=concurrency,
            progress=progress.told,
        )
    document = result.to_dict()
    write_document(out, document)
    from workbench.spec.doubt import doubt

    if (said := doubt(result.acceptance, 0.0)) is not None:
        note(f"workbench: {said}")
    if json:
        answer(document)
    else:
        from workbench.terminal import out as console
        from workbench.terminal_spec import bench_page

        bench_page(result, console())
    if result.interrupted:
        raise typer.Exit(130)
