"""Resumable training state: weights and optimizer buffers as safetensors, the rest as JSON.

A state is a folder ``step-N`` that appears by one rename, so there is always a whole one; an
interrupted save leaves the previous state in place.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.errors import TrainingError


def save_state(
    folder: Path, step: int, model: nn.Module, optimizers: list[Optimizer], record: dict[str, Any]
) -> Path:
    """Write ``folder/step-N`` whole or not at all, then drop older states; returns the folder."""
    final = folder / f"step-{step}"
    temporary = folder / f".step-{step}.{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        tensors = {f"model.{n}": p.detach().cpu() for n, p in model.named_parameters()}
        for index, optimizer in enumerate(optimizers):
            tensors |= _flatten(optimizer, f"optimizer.{index}.")
        save_file(tensors, temporary / "state.safetensors")
        (temporary / "state.json").write_text(json.dumps({"step": step, **record}))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in folder.glob("step-*"):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def load_state(folder: Path, model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Restore the newest state under ``folder`` and return its record (with ``step``).

    Raises:
        TrainingError: there is none, or it belongs to another model.
    """
    found = sorted(folder.glob("step-*"), key=lambda p: int(p.name.split("-")[1]))
    if not found:
        raise TrainingError(f"nothing to resume in {folder}; start without --resume")
    newest = found[-1]
    try:
        record: dict[str, Any] = json.loads((newest / "state.json").read_text())
        tensors = load_file(newest / "state.safetensors")
    except Exception as error:  # safetensors raises its own kind on a damaged file
        raise TrainingError(f"the state in {newest} cannot be read ({error})") from error
    with torch.no_grad():
        for name, p in model.named_parameters():
            saved = tensors.get(f"model.{name}")
            if saved is None or saved.shape != p.shape:
                raise TrainingError(f"the state in {newest} is of another model ({name} differs)")
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
