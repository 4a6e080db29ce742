"""Arguments and options that several commands share, and how a command answers.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from rich.progress import Progress

    from workbench.model.beam import Beam
    from workbench.model.sampling import Sampling


class Dtype(StrEnum):
    """What weights and activations are computed in; routers are float32 always."""

    float32 = "float32"
    bfloat16 = "bfloat16"


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Preset, bundled name or folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Prompt = Annotated[str | None, typer.Option(help="The text to go on from.", metavar="TEXT")]
PromptFile = Annotated[
    str | None,
    typer.Option(help="A UTF-8 file to go on from, exactly; - is stdin.", metavar="FILE"),
]
NewTokens = Annotated[int, typer.Option(help="Most tokens to decode.", metavar="N")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", metavar="T")]
TopP = Annotated[float, typer.Option(help="Probability mass to keep, up to 1.", metavar="P")]
Seed = Annotated[int, typer.Option(help="Seed of the sampling.", metavar="S")]
Precision = Annotated[
    Dtype | None,
    typer.Option(help="Default: float32 on a CPU, bfloat16 elsewhere."),
]
# Named explicitly: a metavar that is the name in capitals would become the option's own name.
Device = Annotated[
    str | None, typer.Option("--device", help="cpu (the default) or cuda.", metavar="DEVICE")
]


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The text of the two options, of which one has to be given."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give either --prompt or --prompt-file")
    if prompt is not None:
        return prompt
    from workbench.files import read_text

    return read_text(str(prompt_file))


def sampling_of(temperature: float, top_p: float, seed: int) -> Sampling:
    """The three options as one value."""
    from workbench.model.sampling import Sampling

    return Sampling(temperature=temperature, top_p=top_p, seed=seed)


def load_model(model: str, dtype: Dtype | None, device: str | None) -> Beam:
    """MODEL with its weights."""
    import torch

    from workbench.loading import load

    if device is not None and device.partition(":")[0] == "meta":
        raise WorkbenchError(f"device '{device}' has no weights to compute with; use cpu or cuda")
    kind = None if dtype is None else getattr(torch, dtype.value)
    return load(model, device=device, dtype=kind, serve=False)


def answer(document: dict[str, Any]) -> None:
    """Print one JSON document on stdout."""
    from workbench.terminal import emit

    emit(document)


def fail(message: str) -> None:
    """Say on stderr, in one line, what went wrong."""
    from workbench.terminal import printable

    with suppress(OSError):  # nobody is left to be told
        print(f"workbench: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)


def progress_bar(what: str, total: int | None) -> Progress:
    """A bar on stderr with one task; none where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        Remaining(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    bar.add_task(what, total=total)
    return bar
