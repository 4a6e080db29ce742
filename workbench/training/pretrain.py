"""Pretraining of a tiny Beam: ``workbench train model --config F [--resume]``.

Float32 weights, bfloat16 arithmetic on CUDA, Muon for matrices and AdamW for the rest. The router's
correction bias is not trained by gradient: after every step it moves against each expert's load, so
that no expert dies and no loss term pulls at the router.
"""

from __future__ import annotations

import json
import math
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.errors import TrainingError, WorkbenchError
from workbench.files import write_whole
from workbench.model.beam import Beam
from workbench.model.checkpoint import load, save
from workbench.model.tokenizer import Tokenizer
from workbench.training.context import TrainingContext
from workbench.training.curve import CURVE_FILE, RECORD_FILE, loss_curve
from workbench.training.data import open_stream
from workbench.training.evaluate import evaluate_held_out
from workbench.training.interrupt import Interrupts
from workbench.training.optimizer import optimizers_for, rate_factor, set_rates
from workbench.training.rescale import rescale_outputs
from workbench.training.settings import TrainingSettings, check_tokenizer, read_settings
from workbench.training.state import (
    StateError,
    load_state,
    remove_states,
    save_state,
    saved_states,
)
from workbench.training.trainable import balance, build


class Progress(Protocol):
    """Told after every logged step; the command line draws a bar from it."""

    def __call__(self, step: int, steps: int, loss: float, tokens_per_second: float) -> None:
        """``loss`` is nats a token, averaged since the last call."""
        ...


def train(
    settings: TrainingSettings, *, resume: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Train, save and evaluate; returns the record that is also written as ``training.json``.

    Interrupting (Ctrl-C) saves the state after the running step and re-raises; ``resume=True`` then
    goes on to exactly the weights an uninterrupted run would have had. A second Ctrl-C stops at
    once and leaves the state that was saved last. The state is saved after the last step as well
    and goes when the checkpoint and its record are written: until then ``resume=True`` has only
    these left to do.

    Raises:
        TrainingError: folders, tokenizer, corpus or saved state cannot be used, the loss is no
            number, or the state or the checkpoint cannot be written.
    """
    check_folders(settings.output, settings.state, resume)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_folder(settings.tokenizer)
    check_tokenizer(settings, tokenizer)
    stream = open_stream(settings.corpus, tokenizer, settings.length, settings.seed)
    beam = build(settings.model, settings.seed, device)
    optimizers = optimizers_for(beam, settings)
    record: dict[str, Any] = {"step": 0, "seconds": 0.0, "losses": [], "partial": [0.0, 0]}
    if resume:
        record = load_state(settings.state, beam, optimizers)
        _check_same_run(record, settings)
    record["run"] = _identity(settings)
    loss_of = _loss_function(beam, settings, device)
    pace = max(1, settings.steps // 200)  # about 200 points on the loss curve
    step = kept = record["step"]
    total = torch.tensor(record["partial"][0], device=device)  # summed since the last logged step
    since = record["partial"][1]
    clock = begun = time.perf_counter()
    updating = False  # weights and optimizers are of different steps

    def keep() -> None:
        nonlocal kept, begun
        record.update(step=step, partial=[float(total), since])
        record["seconds"] += time.perf_counter() - begun
        begun = time.perf_counter()
        if not all(bool(p.isfinite().all()) for p in beam.parameters()):
            raise _diverged("a weight is NaN or infinite", step, settings)
        _check_loss(float(total), step, settings)
        save_state(settings.state, step, beam, optimizers, record)
        kept, begun = step, time.perf_counter()  # saving is no training

    try:
        with Interrupts() as interrupts:
            while step < settings.steps:
                interrupts.check()
                factor = rate_factor(step, settings)
                set_rates(optimizers, factor)
                batch = stream.batch(step, settings.batch, settings.length)
                loss = loss_of(batch.to(device, non_blocking=True))
                loss.backward()
                updating = True
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                balance(beam, settings.balance_rate * min(1.0, 2 * factor))
                total += loss.detach()
                since, step = since + 1, step + 1
                updating = False
                if step % pace == 0 or step == settings.steps:
                    mean = float(total) / since
                    _check_loss(mean, step, settings)
                    record["losses"].append([step, round(mean, 4)])
                    tokens = since * settings.batch * settings.length
                    total.zero_()
                    since = 0
                    if progress is not None:
                        progress(step, settings.steps, mean, tokens / (time.perf_counter() - clock))
                    clock = time.perf_counter()
                if step % settings.save_every == 0 and step < settings.steps:
                    keep()
            if step > kept:
                # When it cannot be kept, writing the checkpoint is the only hope left.
                with suppress(StateError):
                    keep()
            interrupts.check()
    except KeyboardInterrupt:
        if not updating and step > kept:
            keep()
        raise
    if device.type == "cuda":
        torch.cuda.synchronize()
    record["step"] = step
    sample = stream.batch(0, 1, settings.length)[0, :-1]  # one context at most
    try:
        result = _finish(beam, tokenizer, settings, record, device, sample)
    except (OSError, WorkbenchError) as error:
        raise _unfinished(error, step, settings) from error
    remove_states(settings.state)
    return result


def run(
    config: str | Path, resume: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """What the command line calls: read the configuration, train, report the contract's keys."""
    return train(read_settings(config), resume=resume, progress=progress)


# -- what cannot go on ----------------------------------------------------------------------------


def check_folders(output: Path, state: Path, resume: bool) -> None:
    """Refuse folders that cannot be written, and a state that would be lost, before any work.

    Raises:
        TrainingError: naming the setting and the folder.
    """
    for name, folder in (("output", output), ("state", state)):
        if folder.is_file():
            raise TrainingError(f"{name} names {folder}, which is a file; name a folder")
        _check_writable(name, folder)
    states = saved_states(state)
    if states and not resume:
        raise TrainingError(
            f"{state} holds {states[-1].name} of an unfinished run; go on from it with "
            "--resume, or delete that folder to start anew"
        )


def _check_writable(name: str, folder: Path) -> None:
    """Make the folder and a file in it, and take away again what was not there before.

    What cannot be written is so found before the first step instead of after the last one.
    """
    made: list[Path] = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TrainingError(
            f"{name} names {folder}, where nothing can be written ({error.strerror or error}); "
            "name another folder"
        ) from error
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _unfinished(error: Exception, step: int, settings: TrainingSettings) -> TrainingError:
    """All steps are done, but the checkpoint or its record could not be made."""
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    states = saved_states(settings.state)
    if states and states[-1].name == f"step-{step}":
        kept = (
            f"all of its {step} steps are kept in {settings.state}: correct that, or name another "
            "folder as 'output', and go on with --resume"
        )
    elif states:
        kept = f"make room and go on from {states[-1].name} in {settings.state} with --resume"
    else:
        kept = f"its state could not be kept in {settings.state} either; make room and start again"
    return TrainingError(
        f"the trained model could not be written to {settings.output} and evaluated ({reason}); "
        f"{kept}"
    )


def _identity(settings: TrainingSettings) -> dict[str, Any]:
    """What a resumed run must share with the run it goes on from, as JSON gives it back."""
    names = ("seed", "batch", "length")
    identity = {name: getattr(settings, name) for name in names}
    same: dict[str, Any] = json.loads(json.dumps(identity | {"model": settings.model.to_dict()}))
    return same


def _check_same_run(record: dict[str, Any], settings: TrainingSettings) -> None:
    for name, now in _identity(settings).items():
        then = record.get("run", {}).get(name)
        if then != now:
            change = "differs" if name == "model" else f"is {now!r} here and was {then!r} there"
            raise TrainingError(
                f"the state in {settings.state} is of another run: {name} {change}; restore it, "
                "or name another folder as 'state'"
            )


def _check_loss(loss: float, step: int, settings: TrainingSettings) -> None:
    if not math.isfinite(loss):
        raise _diverged(f"the loss is {loss}", step, settings)


def _diverged(what: str, step: int, settings: TrainingSettings) -> TrainingError:
    states = saved_states(settings.state)
    again = "start again"
    if states:
        again = f"go on from {states[-1].name} in {settings.state} with --resume"
    return TrainingError(
        f"{what} at step {step}: the run has diverged; lower its rates (matrix_rate first) or "
        f"raise warmup, and {again}"
    )


# -- one step, and the end ------------------------------------------------------------------------


def _loss_function(
    beam: Beam, settings: TrainingSettings, device: torch.device
) -> Callable[[Tensor], Tensor]:
    context = TrainingContext(settings.model, settings.batch, settings.length, device)

    def loss_of(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = beam.logits(beam(tokens[:, :-1].flatten(), context))
        return F.cross_entropy(logits, tokens[:, 1:].flatten())

    if device.type == "cuda" and settings.compile:
        compiled: Callable[[Tensor], Tensor] = torch.compile(loss_of)
        return compiled
    return loss_of


def _finish(
    beam: Beam,
    tokenizer: Tokenizer,
    settings: TrainingSettings,
    record: dict[str, Any],
    device: torch.device,
    sample: Tensor,
) -> dict[str, Any]:
    trained = Beam(settings.model)
    trained.load_state_dict({k: v.cpu() for k, v in beam.state_dict().items()})
    rescale_outputs(trained, sample)
    trained.tokenizer = tokenizer
    save(trained, settings.output, tokenizer_folder=settings.tokenizer)
    for name in (RECORD_FILE, CURVE_FILE):  # of the checkpoint that was just replaced
        (settings.output / name).unlink(missing_ok=True)
    # What is reported is measured on the file that was written, bfloat16 rounding included.
    shipped = load(settings.output, device=device, dtype=torch.float32)
    held_out = evaluate_held_out(shipped, settings)
    losses = record["losses"]
    result = {
        "steps": record["step"],
        "seconds": round(record["seconds"], 1),
        "loss": losses[-1][1] if losses else None,
        "bits_per_byte": held_out.get("heldout_code", {}).get("bits_per_byte"),
        "checkpoint": str(settings.output),
        "held_out": held_out,
        "tokens": record["step"] * settings.batch * settings.length,
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "settings": {
            name: getattr(settings, name)
            for name in TrainingSettings.__dataclass_fields__
            if name not in ("model", "output", "state", "corpus", "tokenizer")
        },
        "losses": losses,
    }
    write_whole(settings.output / RECORD_FILE, (json.dumps(result) + "\n").encode())
    if len(losses) > 1:
        write_whole(settings.output / CURVE_FILE, loss_curve(result).encode())
    return result


def hardware(device: torch.device) -> str:
    """What a record says the run was made on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
