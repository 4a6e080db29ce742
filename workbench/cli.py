"""The command line, ``workbench COMMAND``: a command reads options, calls the library, prints.

With ``--json`` a command prints exactly one JSON document on stdout (``demo`` prints JSON lines);
whatever else there is to say goes to stderr. Exit status: 0, 1 for a wrong value (one sentence, no
traceback), 2 for wrong usage, 130 after Ctrl-C. Nothing heavy is imported before a command needs
it, so that ``--help`` and ``info`` answer at once.
"""

from __future__ import annotations

from workbench import cli_start  # first: what follows takes long enough to be interrupted

# isort: split
import errno
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from workbench import (
    cli_bench,
    cli_kernels,
    cli_monitor,
    cli_serve,
    cli_simulate,
    cli_sizing,
    cli_spec,
    cli_trace,
)
from workbench.cli_options import (
    Device,
    Json,
    Model,
    Precision,
    Prompt,
    PromptFile,
    answer,
    fail,
    load_model,
    progress_bar,
    read_prompt,
)
from workbench.cli_train import train_app
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.model.beam import Beam


class Group(TyperGroup):
    """Turns the errors a user can act on into one sentence and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            code = _report(error)
            if code is None:
                raise
            raise typer.Exit(code) from None


# Whether Ctrl-C was pressed: libraries turn its exception into others (safetensors into a
# ValueError, an import cut short into an ImportError), which say nothing about the cause.
_interrupted = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt


def _report(error: BaseException) -> int | None:
    """Say in one sentence what went wrong; the exit status, or None for what is not foreseen."""
    if isinstance(error, typer.Exit):
        return None
    if isinstance(error, OSError) and error.errno == errno.EPIPE:  # the reader has had enough
        _discard_output()
        return 141
    if isinstance(error, KeyboardInterrupt) or _interrupted:
        fail("interrupted")
        return 130
    sentence = _sentence(error)
    if sentence is None:
        return None
    if isinstance(error, OSError):
        _discard_output()
    fail(sentence)
    return 1


def _sentence(error: BaseException) -> str | None:
    if isinstance(error, WorkbenchError | FloatingPointError | MemoryError):
        return str(error) or "there is not enough memory for this; use a smaller size"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}; free space or choose another path"
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in ("", "workbench"):
            return None
        return (
            f"{package} is not installed beside this Python; "
            f"run: {sys.executable} -m pip install {package}"
        )
    if isinstance(error, RuntimeError):
        # torch's, known by name: importing torch to catch it would slow every command down.
        if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError"):
            return f"the GPU gave up ({str(error).splitlines()[0]}); use a smaller size"
        if "DefaultCPUAllocator" in str(error):
            return "there is not enough memory for this; use a smaller size"
    return None


def _discard_output() -> None:
    """What is still buffered cannot be written: without this, Python would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


app = typer.Typer(
    name="workbench",
    cls=Group,
    help="See, run and change Reflection Beam. MODEL is beam-501b (its shape only), a bundled "
    "checkpoint (beam-tiny), or a folder with config.json; info, and what computes with weights, "
    "take an owner/name of the Hugging Face hub too.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels cut the names of options at 80 columns
)
app.add_typer(train_app, name="train")
app.add_typer(cli_kernels.kernels_app, name="kernels")
app.add_typer(cli_trace.trace_app, name="trace")
app.add_typer(cli_bench.bench_app, name="bench")
app.command()(cli_sizing.kv)
app.command()(cli_sizing.plan)
app.command()(cli_simulate.simulate)
app.command()(cli_serve.serve)
app.command()(cli_monitor.monitor)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from workbench import __version__

        print(__version__)
        raise typer.Exit()


@app.command()
def info(model: Model, json: Json = False) -> None:
    """Describe a model: layers, parameters, every field with its source."""
    from workbench.loading import describe

    description, remark = describe(model)
    if json:
        answer(description.to_dict())
        return
    from workbench.terminal import info_page, note, out

    info_page(description, out())
    if remark is not None:
        note(f"workbench: {remark}")


app.command()(cli_spec.generate)
app.command()(cli_spec.demo)


@app.command()
def logits(
    model: Model,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    dtype: Precision = None,
    device: Device = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write logits [positions, vocabulary] float32 and token_ids here "
            "(safetensors), whole or not at all.",
            metavar="FILE",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Logits at every position of a prompt, and the token each position favours."""
    text = read_prompt(prompt, prompt_file)
    beam = load_model(model, dtype, device)
    import torch

    from workbench.model.prompts import prompt_ids

    token_ids = prompt_ids(beam, text, room=0)[0]
    with torch.inference_mode():
        scores = beam.sequence_logits(torch.tensor(token_ids, device=beam.device)).float().cpu()
        best, favoured = scores.max(-1)
        chances = (best - scores.logsumexp(-1)).exp().tolist()
    if not bool(torch.isfinite(scores).all()):
        raise WorkbenchError(f"the logits of {beam.name} are not finite; check its weights")
    if out is not None:
        from safetensors.torch import save

        from workbench.files import write_whole

        tensors = {"logits": scores.contiguous(), "token_ids": torch.tensor(token_ids)}
        write_whole(out, save(tensors))
    rows = list(zip(favoured.tolist(), best.tolist(), strict=True))
    if json:
        answer(
            {
                "model": beam.name,
                "token_ids": token_ids,
                "top": [{"token_id": i, "logit": logit} for i, logit in rows],
                "file": None if out is None else str(out),
            }
        )
        return
    from workbench.terminal import logits_table, note
    from workbench.terminal import out as console

    labels = _labels(beam, token_ids), _labels(beam, favoured.tolist())
    logits_table(*labels, best.tolist(), chances, console())
    if out is not None:
        note(f"wrote {out}: logits {list(scores.shape)} float32 and token_ids")


@app.command()
def evaluate(
    model: Model,
    file: Annotated[
        list[Path],
        typer.Option(help="Text to score; repeat for more. .jsonl: a 'text' a line.", metavar="F"),
    ],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[F]...", help="More files.")] = None,
    dtype: Precision = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Bits per byte of a model on text files, each scored from its start."""
    files = [*file, *(more or [])]
    for path in files:  # before the model is loaded
        if not path.is_file():
            raise WorkbenchError(f"{path} is not a file; give --file a UTF-8 text file")
    beam = load_model(model, dtype, device)
    from workbench.training.evaluate import bits_per_byte, read_texts

    size = sum(path.stat().st_size for path in files)
    with progress_bar("scoring", size) as bar:
        result = bits_per_byte(
            beam,
            read_texts(files),
            progress=lambda done: bar.update(bar.task_ids[0], completed=done),
        )
    if json:
        answer({"model": beam.name, "files": [str(path) for path in files]} | result)
        return
    print(
        f"{result['bits_per_byte']:.4f} bits per byte over {result['bytes']:,} bytes "
        f"({result['tokens']:,} tokens) in {len(files)} file{'s' * (len(files) != 1)}"
    )


@app.command()
def doctor(json: Json = False) -> None:
    """Say what this machine can run, and what is missing with its remedy."""
    from workbench.doctor import diagnose

    diagnosis = diagnose()
    if json:
        answer(diagnosis.to_dict())
    else:
        from workbench.terminal import doctor_page, out

        doctor_page(diagnosis, out())
    if not diagnosis.ok:
        fail(f"the bundled model does not run here: {diagnosis.runs[0].reason}")
        raise typer.Exit(1)


@app.command()
def lab(
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Folder of your copy of the notebooks [default: ~/beam-workbench/notebooks].",
            metavar="D",
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port on 127.0.0.1 [default: a free one].")
    ] = None,
) -> None:
    """Open JupyterLab on a writable copy of the notebooks. Ctrl-C stops it."""
    from workbench.lab import DEFAULT_FOLDER, copy_notebooks, run_lab
    from workbench.terminal import note

    copied = copy_notebooks(folder or DEFAULT_FOLDER)
    for name in copied.kept:
        note(f"kept your changed {name}; rename it to get the version of this workbench beside it")
    code = run_lab(copied.folder, port=port, browser=browser, say=note)
    if code:
        raise typer.Exit(1)


# -- shared ---------------------------------------------------------------------------------------


def _labels(beam: Beam, token_ids: list[int]) -> list[str]:
    from workbench.model.capture import token_label

    return [token_label(beam, i) for i in token_ids]


def main() -> None:
    """Entry point of the ``workbench`` program."""
    _open_streams()
    # Else it is ignored, as of a job in the background.
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, cli_start.end):
        signal.signal(signal.SIGINT, _interrupt)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a full disk can still be reported
    except (Exception, KeyboardInterrupt) as error:  # outside of a command: --help, an import
        code = _report(error)
        if code is None:
            raise
        sys.exit(code)


def _open_streams() -> None:
    """Leave no standard stream closed: the next file to be opened would take its number."""
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)  # sys.stdin stays None, which --prompt-file - reports
    closed = sys.stdout is None
    if closed:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    for output in (sys.stdout, sys.stderr):
        # Where the terminal's encoding lacks a character, an escape is better than an end.
        if hasattr(output, "reconfigure"):
            output.reconfigure(errors="backslashreplace")
    if closed:
        fail("standard output is closed, so there is nowhere to answer; redirect it to a file")
        sys.exit(1)


if __name__ == "__main__":
    main()
