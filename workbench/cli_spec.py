"""``workbench generate`` and ``workbench demo``: decoding, with a drafter where there is one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli_drafting import (
    AdaptiveFlag,
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
    Prompt,
    PromptFile,
    Seed,
    Temperature,
    TopP,
    answer,
    load_model,
    read_prompt,
    sampling_of,
)

if TYPE_CHECKING:
    from workbench.spec.loop import Decoding
    from workbench.spec.metrics import Acceptance

TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write the steps here (JSON lines).", metavar="FILE"),
]


def generate(
    model: Model,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    dtype: Precision = None,
    device: Device = None,
    no_draft: NoDraft = False,
    drafter: DrafterFolder = None,
    speculative_tokens: SpeculativeTokens = None,
    method: Method = None,
    proposals: Proposals = None,
    adaptive: AdaptiveFlag = False,
    trace: TraceFile = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Go on from a prompt. The text streams to stdout, figures go to stderr."""
    text = read_prompt(prompt, prompt_file)
    asked = Drafting(
        no_draft=no_draft,
        drafter=drafter,
        speculative_tokens=speculative_tokens,
        method=method,
        proposals=proposals,
        adaptive=adaptive,
    )
    sampling = sampling_of(temperature, top_p, seed)
    beam = load_model(model, dtype, device)
    from workbench.spec.metrics import Tally
    from workbench.terminal import note, printable
    from workbench.terminal_spec import Pieces, figures

    decoding = asked.decoding(
        beam,
        asked.load(beam),
        text,
        sampling,
        max_new_tokens=max_new_tokens,
        detail=trace is not None,
    )
    tally = Tally(decoding.settings.speculative_tokens)
    pieces, terminal, written = Pieces(beam), sys.stdout.isatty(), ""
    with trace_of(decoding, trace, overwrite) as writer:
        if terminal and not json:
            print(f"\x1b[2m{printable(text)}\x1b[22m", end="", flush=True)
        for step in decoding:
            if writer is not None:
                writer.write(step)
            tally.add(step)
            new = "".join(piece for piece, _ in pieces.of(step.requests[0]))
            if new and not json:
                written = new
                print(printable(new) if terminal else new, end="", flush=True)
    result, acceptance = decoding.generations[0], tally.acceptance()
    from workbench.spec.doubt import doubt

    if (said := doubt(acceptance, temperature)) is not None:
        note(f"workbench: {said}")
    if json:
        answer(
            {"model": beam.name, "drafter": _name(decoding)}
            | result.to_dict()
            | drafting_figures(decoding, acceptance)
            | {"trace": None if trace is None else str(trace)}
        )
        return
    if not written.endswith("\n"):
        print(flush=True)
    drafts = asked.why_none(beam) if decoding.drafter is None else acceptance
    note(
        f"{result.new_tokens} tokens after {result.prompt_tokens} of prompt, ended by "
        f"{result.finish}; {figures(result, drafts)}"
    )
    if trace is not None:
        note(f"wrote {trace}")


def drafting_figures(decoding: Decoding, acceptance: Acceptance) -> dict[str, Any]:
    """What a run drafted and what became of it, for JSON.

    Plain decoding gives exactly one token a decode step, so its acceptance length is 1; that of a
    run with a drafter which never drafted is None.
    """
    plain = decoding.drafter is None
    return {
        "acceptance_length": 1.0 if plain else acceptance.length_pooled,
        "per_position_acceptance": [] if plain else list(acceptance.survival),
        "drafted": acceptance.drafted,
        "admitted": acceptance.admitted,
        "accepted": acceptance.accepted,
        "rejected": acceptance.rejected,
        "trimmed": acceptance.trimmed,
        "speculative_tokens": decoding.settings.speculative_tokens,
        "method": None if plain else decoding.settings.method,
        "proposals": None if plain else decoding.settings.proposals,
        "policy": None if decoding.decider is None else decoding.decider.name,
    }


def _name(decoding: Decoding) -> str | None:
    return None if decoding.drafter is None else decoding.drafter.name


def demo(
    model: Model = "beam-tiny",
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    max_new_tokens: NewTokens = 400,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    dtype: Precision = None,
    device: Device = None,
    no_draft: NoDraft = False,
    drafter: DrafterFolder = None,
    speculative_tokens: SpeculativeTokens = None,
    method: Method = None,
    proposals: Proposals = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines, one a token.")] = False,
) -> None:
    """Watch a model write. Ctrl-C stops.

    With a drafter, accepted, corrected and bonus tokens are marked; without one each token is
    coloured by its probability.
    """
    given = None if prompt is None and prompt_file is None else read_prompt(prompt, prompt_file)
    asked = Drafting(
        no_draft=no_draft,
        drafter=drafter,
        speculative_tokens=speculative_tokens,
        method=method,
        proposals=proposals,
    )
    from workbench import demo, demo_spec
    from workbench.model.generate import stream

    text = demo.DEFAULT_PROMPT if given is None else given
    sampling = sampling_of(temperature, top_p, seed)
    beam = load_model(model, dtype, device)
    drafts = asked.load(beam)
    if drafts is None:
        tokens = stream(beam, text, max_new_tokens=max_new_tokens, sampling=sampling)
        if json:
            demo.run_json(tokens, text)
        else:
            demo.run_terminal(tokens, text, asked.why_none(beam))
        return
    decoding = asked.decoding(beam, drafts, text, sampling, max_new_tokens=max_new_tokens)
    (demo_spec.run_json if json else demo_spec.run_terminal)(decoding, text)
