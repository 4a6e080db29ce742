"""``workbench trace show|summary|record``: the steps of a run in a file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli_drafting import (
    DrafterFolder,
    Drafting,
    Method,
    NoDraft,
    Overwrite,
    Proposals,
    SpeculativeTokens,
    trace_of,
)
from workbench.cli_options import (
    Device,
    Json,
    Model,
    NewTokens,
    Precision,
    Seed,
    Temperature,
    TopP,
    answer,
    load_model,
    progress_bar,
    sampling_of,
)

if TYPE_CHECKING:
    from workbench.model.beam import Beam
    from workbench.model.sampling import Sampling
    from workbench.model.tokenizer import Tokenizer
    from workbench.spec.trace import Trace

trace_app = typer.Typer(
    help="Record the steps of a run, show them, sum them up.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="A trace.")]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        help="A text to go on from; repeat for more. .jsonl: a 'text' a line.",
        metavar="FILE",
    ),
]
PromptTexts = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="A text to go on from; repeat for more.", metavar="TEXT"),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        "--prompt-tokens", min=1, help="Keep the first N tokens of each prompt.", metavar="N"
    ),
]
PromptCount = Annotated[
    int | None, typer.Option("--count", min=1, help="Take the first N prompts.", metavar="N")
]


@trace_app.command("summary")
def summary(file: File, json: Json = False) -> None:
    """Acceptance figures of a trace."""
    trace = _read(file)
    if json:
        answer(trace_figures(trace))
        return
    from workbench.terminal import printable

    print(printable(str(trace)))


@trace_app.command("show")
def show(
    file: File,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Show the first N steps.", metavar="N"),
    ] = None,
    json: Json = False,
) -> None:
    """Every step of a trace: what was drafted, accepted and written."""
    trace = _read(file)
    steps, positions = trace.steps[:limit], trace.positions[:limit]
    if json:
        shown = [s.to_dict() for s in steps] + [p.to_dict() for p in positions]
        answer(trace_figures(trace) | {"header": trace.header, "lines": shown})
        return
    from workbench.spec.trace_lines import describe
    from workbench.terminal import out, printable
    from workbench.terminal_spec import position_lines, signs_legend, step_lines

    blocks = [len(r.drafted) for step in trace.steps for r in step.requests]
    blocks += [len(p.drafted) for p in trace.positions]
    width = max([5, *blocks])
    tokenizer = _tokenizer(trace)
    console = out()
    print(printable(describe(trace.header)))
    console.print(signs_legend(), soft_wrap=True)
    every = trace.mode == "every-position"
    page = (
        position_lines(positions, tokenizer, width)
        if every
        else step_lines(steps, tokenizer, width)
    )
    for line in page:
        console.print(line, soft_wrap=True)
    rest = len(trace.steps) + len(trace.positions) - len(steps) - len(positions)
    if rest:
        console.print(f"{rest:,} more")


def _read(file: Path) -> Trace:
    from workbench.spec.trace import Trace
    from workbench.terminal import note

    trace = Trace.read(file)
    if trace.skipped:
        lines = f"{trace.skipped:,} line{'s' * (trace.skipped != 1)}"
        note(f"workbench: {lines} of {file} could not be read and {_were(trace.skipped)} skipped")
    return trace


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def trace_figures(trace: Trace) -> dict[str, Any]:
    """The figures of a trace, for JSON; of an every-position trace those of its full replay."""
    acceptance = trace.acceptance()
    every = trace.mode == "every-position"
    decoded = sum(step.phase == "decode" for step in trace.steps)
    head = {name: trace.header.get(name) for name in ("model", "drafter", "date")}
    return (
        {"mode": trace.mode, "steps": acceptance.events if every else decoded}
        | {
            "acceptance_length": acceptance.length_pooled,
            "per_position_acceptance": list(acceptance.survival),
            "skipped": trace.skipped,
            "positions": len(trace.positions) if every else None,
        }
        | acceptance.to_dict()
        | head
    )


def _tokenizer(trace: Trace) -> Tokenizer | None:
    """The tokenizer of the model that the header names, where that model is here."""
    from workbench.errors import WorkbenchError
    from workbench.model.presets import resolve
    from workbench.model.tokenizer import Tokenizer
    from workbench.terminal import note

    model = trace.header.get("model")
    try:
        folder = resolve(model).folder if isinstance(model, str) else None
        if folder is not None:
            return Tokenizer.from_folder(folder)
    except WorkbenchError:
        pass
    note("workbench: the trace's model is not here, so tokens are shown by their ids")
    return None


@trace_app.command("record")
def record(
    model: Model,
    out: Annotated[Path, typer.Option("--out", help="The trace to write.", metavar="FILE")],
    prompts: PromptFiles = None,
    prompt: PromptTexts = None,
    prompt_tokens: PromptTokens = None,
    count: PromptCount = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    every_position: Annotated[
        bool,
        typer.Option(
            "--every-position",
            help="Draft at every output position, so that any policy can be replayed.",
        ),
    ] = False,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Sequences decoded together.", metavar="C")
    ] = 1,
    dtype: Precision = None,
    device: Device = None,
    no_draft: NoDraft = False,
    drafter: DrafterFolder = None,
    speculative_tokens: SpeculativeTokens = None,
    method: Method = None,
    proposals: Proposals = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Decode prompts and write each step, with candidates and scores. Ctrl-C keeps what is done."""
    if every_position and (no_draft or method or proposals):
        raise typer.BadParameter(
            "--every-position drafts greedily and judges by standard rejection sampling; leave "
            "--no-draft, --method and --proposals out"
        )
    asked = Drafting(
        no_draft=no_draft,
        drafter=drafter,
        speculative_tokens=speculative_tokens,
        method=method,
        proposals=proposals,
    )
    texts = given_texts(prompts, prompt, count)
    if not texts:
        raise typer.BadParameter("give prompts with --prompts or --prompt")
    sampling = sampling_of(temperature, top_p, seed)
    beam = load_model(model, dtype, device)
    ids = prompts_of(beam, texts, prompt_tokens)
    if every_position:
        interrupted = _every_position(beam, asked, ids, sampling, max_new_tokens, out, overwrite)
    else:
        decoding = asked.decoding(
            beam,
            asked.load(beam),
            ids,
            sampling,
            max_new_tokens=max_new_tokens,
            slots=min(concurrency, len(ids)),
            detail=True,
        )
        interrupted, done = False, 0
        with (
            trace_of(decoding, out, overwrite) as writer,
            progress_bar("recording", len(ids)) as bar,
        ):
            assert writer is not None  # for the type checker: a file was named
            try:
                for step in decoding:
                    writer.write(step)
                    done += sum(r.finished is not None for r in step.requests)
                    bar.update(bar.task_ids[0], completed=done)
            except KeyboardInterrupt:
                interrupted = True
    _told(out, interrupted, json)


def _every_position(
    beam: Beam,
    asked: Drafting,
    ids: list[list[int]],
    sampling: Sampling,
    most: int,
    out: Path,
    overwrite: bool,
) -> bool:
    """Record a block at every position; whether Ctrl-C ended it."""
    from workbench.spec.drafter_checkpoint import load_drafter
    from workbench.spec.every_position import record_every_position
    from workbench.spec.trace import TraceWriter, header

    drafter = load_drafter(beam, asked.drafter)
    with progress_bar("recording", len(ids)) as bar:
        positions = record_every_position(
            beam,
            drafter,
            ids,
            max_new_tokens=most,
            speculative_tokens=asked.speculative_tokens,
            sampling=sampling,
            unary=True,
            progress=lambda done, _: bar.update(bar.task_ids[0], completed=done),
        )
        head = header(
            model=beam.name,
            drafter=drafter.name,
            sampling=sampling,
            speculative_tokens=asked.speculative_tokens or drafter.block - 1,
            mode="every-position",
            max_new_tokens=most,
        )
        with TraceWriter(out, head, overwrite=overwrite) as writer:
            try:
                for position in positions:
                    writer.write(position)
            except KeyboardInterrupt:
                return True
    return False


def _told(out: Path, interrupted: bool, json: bool) -> None:
    """Sum up the file that was written."""
    from workbench.terminal import note, printable

    trace = _read(out)
    from workbench.spec.doubt import doubt

    if (said := doubt(trace.acceptance(), trace.header["sampling"]["temperature"])) is not None:
        note(f"workbench: {said}")
    if json:
        answer(trace_figures(trace) | {"file": str(out), "interrupted": interrupted})
    else:
        print(printable(str(trace.acceptance())))
        note(f"wrote {out}")
    if interrupted:
        note("workbench: interrupted; the trace holds what was done by then")
        raise typer.Exit(130)


# -- prompts --------------------------------------------------------------------------------------


def given_texts(
    prompts: list[Path] | None, prompt: list[str] | None, count: int | None
) -> list[str]:
    """The texts that the options name, files first; at most ``count``."""
    from itertools import islice

    from workbench.training.evaluate import read_texts

    return list(islice((*read_texts(prompts or []), *(prompt or [])), count))


def prompts_of(beam: Beam, texts: list[str], most: int | None) -> list[list[int]]:
    """Token ids of texts, each cut to its first ``most``."""
    from workbench.model.prompts import prompt_ids

    if most is None or beam.tokenizer is None:
        return prompt_ids(beam, texts)
    # Cut first: a whole file may be longer than the context.
    cut = [beam.tokenizer.encode(text)[:most] if text else [] for text in texts]
    return prompt_ids(beam, cut)
