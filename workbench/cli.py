"""The command line, ``workbench COMMAND``: a command reads options, calls the library, prints.

With ``--json`` a command prints exactly one JSON document on stdout (``demo`` prints JSON lines);
whatever else there is to say goes to stderr. Exit status: 0, 1 for a wrong value (one sentence, no
traceback), 2 for wrong usage, 130 after Ctrl-C. Nothing heavy is imported before a command needs
it, so that ``--help`` and ``info`` answer at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from workbench import cli_kernels, cli_sizing
from workbench.cli_options import Json, Model, answer
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from rich.progress import Progress

    from workbench.model.beam import Beam
    from workbench.model.sampling import Sampling


class Dtype(StrEnum):
    """What weights and activations are computed in; routers are float32 always."""

    float32 = "float32"
    bfloat16 = "bfloat16"


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
        _fail("interrupted")
        return 130
    sentence = _sentence(error)
    if sentence is None:
        return None
    if isinstance(error, OSError):
        _discard_output()
    _fail(sentence)
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


def _fail(message: str) -> None:
    from workbench.terminal import printable

    with suppress(OSError):  # nobody is left to be told
        print(f"workbench: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)


app = typer.Typer(
    name="workbench",
    cls=Group,
    help="See, run and change Reflection Beam. MODEL is beam-501b (its shape only), a bundled "
    "checkpoint (beam-tiny), or a folder with config.json.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its panels cut the names of options at 80 columns
)
train_app = typer.Typer(help="Train a model.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(train_app, name="train")
app.add_typer(cli_kernels.kernels_app, name="kernels")
app.command()(cli_sizing.kv)
app.command()(cli_sizing.plan)

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
    from workbench.model.info import info as describe

    description = describe(model)
    if json:
        answer(description.to_dict())
        return
    from workbench.terminal import info_page, out

    info_page(description, out())


@app.command()
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
    no_draft: Annotated[
        bool,
        typer.Option(
            "--no-draft",
            help="Decode without a drafter. No drafter is bundled yet, so this is what runs "
            "in any case.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Go on from a prompt. The text streams to stdout, figures go to stderr."""
    text = _prompt(prompt, prompt_file)
    from workbench.model.generate import stream
    from workbench.terminal import note, printable, speed

    sampling = _sampling(temperature, top_p, seed)
    beam = _load(model, dtype, device)
    if no_draft:
        note("workbench: decoding without a drafter (none is bundled yet)")
    tokens = stream(beam, text, max_new_tokens=max_new_tokens, sampling=sampling)
    terminal = sys.stdout.isatty()
    written = ""
    if terminal and not json:
        print(f"\x1b[2m{printable(text)}\x1b[22m", end="", flush=True)
    for token in tokens:
        if not json and token.text:
            written = token.text
            print(printable(written) if terminal else written, end="", flush=True)
    result = tokens.generations[0]
    if json:
        # Plain decoding: every decode step gives exactly one token and nothing is drafted.
        plain = {"acceptance_length": 1.0, "per_position_acceptance": []}
        answer({"model": beam.name} | result.to_dict() | plain)
        return
    if not written.endswith("\n"):
        print(flush=True)
    note(
        f"{result.new_tokens} tokens after {result.prompt_tokens} of prompt, ended by "
        f"{result.finish}; {speed(result.tokens_per_second)} (decode, measured here)"
    )


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
    text = _prompt(prompt, prompt_file)
    beam = _load(model, dtype, device)
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
    beam = _load(model, dtype, device)
    from workbench.training.evaluate import bits_per_byte, read_texts

    size = sum(path.stat().st_size for path in files)
    with _progress("scoring", size) as bar:
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


@train_app.callback()
def _train() -> None:
    """Keeps ``model`` a word of its own: ``workbench train model``."""


@train_app.command("model")
def train_model(
    config: Annotated[
        str,
        typer.Option(help="Training configuration (TOML), or the name of one that is bundled."),
    ],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the saved state.")] = False,
    json: Json = False,
) -> None:
    """Train a model as a configuration says; Ctrl-C saves the state for --resume."""
    from workbench.training.pretrain import run

    with _progress("training", None) as bar:

        def show(step: int, steps: int, loss: float, tokens_per_second: float) -> None:
            bar.update(
                bar.task_ids[0],
                total=steps,
                completed=step,
                description=f"training  loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s",
            )

        try:
            result = run(config, resume=resume, progress=show)
        except KeyboardInterrupt:
            bar.stop()
            _fail("interrupted; go on from the last saved state with --resume")
            raise typer.Exit(130) from None
    if json:
        answer(result)
        return
    from workbench.terminal import sparkline

    losses = [loss for _, loss in result.get("losses", [])]
    if losses:
        print(f"loss  {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f} nats a token")
    bits = result["bits_per_byte"]
    held_out = "not evaluated" if bits is None else f"{bits:.4f} bits per byte on held-out code"
    print(f"{result['steps']:,} steps in {result['seconds']:,.0f} s; {held_out}")
    print(f"checkpoint: {result['checkpoint']}")


@app.command()
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
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines, one a token.")] = False,
) -> None:
    """Watch a model write, each token coloured by its probability. Ctrl-C stops."""
    given = None if prompt is None and prompt_file is None else _prompt(prompt, prompt_file)
    from workbench.demo import DEFAULT_PROMPT, run_json, run_terminal
    from workbench.model.generate import stream

    text = DEFAULT_PROMPT if given is None else given
    sampling = _sampling(temperature, top_p, seed)
    beam = _load(model, dtype, device)
    tokens = stream(beam, text, max_new_tokens=max_new_tokens, sampling=sampling)
    (run_json if json else run_terminal)(tokens, text)


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
        _fail(f"the bundled model does not run here: {diagnosis.runs[0].reason}")
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


def _prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give either --prompt or --prompt-file")
    if prompt is not None:
        return prompt
    from workbench.files import read_text

    return read_text(str(prompt_file))


def _sampling(temperature: float, top_p: float, seed: int) -> Sampling:
    from workbench.model.sampling import Sampling

    return Sampling(temperature=temperature, top_p=top_p, seed=seed)


def _load(model: str, dtype: Dtype | None, device: str | None) -> Beam:
    import torch

    from workbench.model.checkpoint import load

    if device is not None and device.partition(":")[0] == "meta":
        raise WorkbenchError(f"device '{device}' has no weights to compute with; use cpu or cuda")
    return load(model, device=device, dtype=None if dtype is None else getattr(torch, dtype.value))


def _labels(beam: Beam, token_ids: list[int]) -> list[str]:
    from workbench.model.capture import token_label

    return [token_label(beam, i) for i in token_ids]


def _progress(what: str, total: int | None) -> Progress:
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


def main() -> None:
    """Entry point of the ``workbench`` program."""
    _open_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
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
        _fail("standard output is closed, so there is nowhere to answer; redirect it to a file")
        sys.exit(1)


if __name__ == "__main__":
    main()
