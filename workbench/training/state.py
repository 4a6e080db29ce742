"""Resumable training state: weights and optimizer buffers as safetensors, the rest as JSON.

A state is a folder ``step-N`` that appears by one rename, so there is always a whole one; an
interrupted save leaves the previous state in place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.errors import TrainingError


class StateError(TrainingError):
    """The state cannot be written; what was kept before is still there."""


def saved_states(folder: Path) -> list[Path]:
    """The whole states under ``folder``, oldest first."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def save_state(
    folder: Path, step: int, model: nn.Module, optimizers: list[Optimizer], record: dict[str, Any]
) -> Path:
    """Write ``folder/step-N`` whole or not at all, then drop older states; returns the folder.

    Raises:
        StateError: it cannot be written (disk full, no permission); older states stay.
    """
    final = folder / f"step-{step}"
    temporary = folder / f".step-{step}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        tensors = {f"model.{n}": p.detach().cpu() for n, p in model.named_parameters()}
        for index, optimizer in enumerate(optimizers):
            tensors |= _flatten(optimizer, f"optimizer.{index}.")
        save_file(tensors, temporary / "state.safetensors")
        (temporary / "state.json").write_text(json.dumps({"step": step, **record}))
        for file in temporary.iterdir():
            _flush(file)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise StateError(
            f"the training state of step {step} could not be written to {folder} ({reason}); "
            f"{_kept(folder)}"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in saved_states(folder):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def _kept(folder: Path) -> str:
    states = saved_states(folder)
    if not states:
        return "make room and start again"
    return f"{states[-1].name} there is whole: make room and go on from it with --resume"


def remove_states(folder: Path) -> None:
    """Remove the states under ``folder``, and the folder if nothing else is in it."""
    for state in saved_states(folder):
        shutil.rmtree(state, ignore_errors=True)
    with suppress(OSError):  # never made, or somebody else's file is in it
        folder.rmdir()


def load_state(folder: Path, model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Restore the newest state under ``folder`` and return its record (with ``step``).

    Raises:
        TrainingError: there is none, or it is damaged, or it belongs to another model. The model
            and the optimizers are then as they were.
    """
    states = saved_states(folder)
    if not states:
        raise TrainingError(f"there is nothing to resume in {folder}; start without --resume")
    newest = states[-1]
    try:
        record: dict[str, Any] = json.loads((newest / "state.json").read_text())
        tensors = load_file(newest / "state.safetensors")
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise TrainingError(
            f"the state in {newest} cannot be read ({error}); delete {folder} to start anew"
        ) from error
    restored: list[tuple[nn.Parameter, Tensor]] = []
    for name, p in model.named_parameters():
        saved = tensors.get(f"model.{name}")
        if saved is None or saved.shape != p.shape:
            raise TrainingError(
                f"the state in {newest} is of another model ({name} differs); restore [model], "
                "or name another folder as 'state'"
            )
        restored.append((p, saved))
    with torch.no_grad():
        for p, saved in restored:
            p.copy_(saved)
    for index, optimizer in enumerate(optimizers):
        _restore(optimizer, tensors, f"optimizer.{index}.")
    return record


def _flatten(optimizer: Optimizer, prefix: str) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{prefix}{key}.{name}": torch.as_tensor(value).detach().cpu().contiguous()
        for key, values in state.items()
        for name, value in values.items()
    }


def _restore(optimizer: Optimizer, tensors: dict[str, Tensor], prefix: str) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        if full.startswith(prefix):
            key, name = full[len(prefix) :].split(".", 1)
            state.setdefault(int(key), {})[name] = tensor
    saved = optimizer.state_dict()
    saved["state"] = state
    optimizer.load_state_dict(saved)


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
