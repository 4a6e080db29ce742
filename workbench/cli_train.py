"""``workbench train model|drafter``: a configuration in, a checkpoint and its record out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer

from workbench.cli_options import Json, answer, fail, progress_bar
from workbench.errors import WorkbenchError

train_app = typer.Typer(
    help="Train a model or a drafter.", no_args_is_help=True, rich_markup_mode=None
)

Config = Annotated[
    str,
    typer.Option(help="Training configuration (TOML), or the name of one that is bundled."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the saved state.")]


@train_app.command("model")
def train_model(config: Config, resume: Resume = False, json: Json = False) -> None:
    """Train a model as a configuration says; Ctrl-C saves the state for --resume."""
    from workbench.training.pretrain import run
    from workbench.training.settings import read_settings

    result = _run(run, read_settings, config, resume)
    if json:
        answer(result)
        return
    bits = result["bits_per_byte"]
    held_out = "not evaluated" if bits is None else f"{bits:.4f} bits per byte on held-out code"
    _page(result, held_out)


@train_app.command("drafter")
def train_drafter(config: Config, resume: Resume = False, json: Json = False) -> None:
    """Distil a drafter from its target as a configuration says; Ctrl-C saves for --resume."""
    from workbench.training.distil import run
    from workbench.training.distil_settings import read_distil_settings

    result = _run(run, read_distil_settings, config, resume)
    if json:
        answer(result)
        return
    length = result["acceptance_length"]
    held_out = (
        "not evaluated" if length is None else f"acceptance length {length:.2f} on held-out text"
    )
    _page(result, held_out)


def _run(
    run: Callable[..., dict[str, Any]], read: Callable[[str], Any], config: str, resume: bool
) -> dict[str, Any]:
    with progress_bar("training", None) as bar:

        def show(step: int, steps: int, loss: float, per_second: float) -> None:
            bar.update(
                bar.task_ids[0],
                total=steps,
                completed=step,
                description=f"training  loss {loss:.3f}  {per_second:,.0f} tokens/s",
            )

        try:
            return run(config, resume=resume, progress=show)
        except KeyboardInterrupt:
            bar.stop()
            fail(f"interrupted; {_how_to_go_on(read, config)}")
            raise typer.Exit(130) from None


def _how_to_go_on(read: Callable[[str], Any], config: str) -> str:
    from workbench.training.state import saved_states

    with suppress(WorkbenchError):  # a configuration that cannot be read has no state, either
        if saved_states(read(config).state):
            return "go on from the last saved state with --resume"
    return "nothing is saved yet, so start again without --resume"


def _page(result: dict[str, Any], held_out: str) -> None:
    from workbench.terminal import sparkline

    losses = [entry[1] for entry in result.get("losses", [])]
    if losses:
        print(f"loss  {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f} nats a token")
    print(f"{result['steps']:,} steps in {result['seconds']:,.0f} s; {held_out}")
    print(f"checkpoint: {result['checkpoint']}")
