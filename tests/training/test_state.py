"""Saved training states: whole or absent, the old one surviving whatever happens to the new."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from workbench.errors import TrainingError
from workbench.training import state


def trained(steps: int, seed: int = 0) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model with two optimizers that have been stepped."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model[0].parameters(), lr=0.1),
        torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
    ]
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


def everything(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    found = [p.detach().clone() for p in model.parameters()]
    for optimizer in optimizers:
        for values in optimizer.state_dict()["state"].values():
            found += [values[name].clone() for name in sorted(values)]
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model, optimizers = trained(3)
    folder = state.save_state(tmp_path / "s", 3, model, optimizers, {"losses": [[1, 2.5]]})
    assert folder == tmp_path / "s" / "step-3"
    other, others = trained(0, seed=1)
    assert not same(everything(model, optimizers), everything(other, others))
    record = state.load_state(tmp_path / "s", other, others)
    assert record == {"step": 3, "losses": [[1, 2.5]]}
    assert len(everything(other, others)) == 4 + 2 * 3 + 2
    assert same(everything(model, optimizers), everything(other, others))


def test_only_the_newest_state_is_kept_and_loaded(tmp_path: Path) -> None:
    for step in (9, 100):
        state.save_state(tmp_path, step, *trained(step), {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-100"]
    # Left behind when a machine stops between the two: the higher number wins, 9 < 100.
    (tmp_path / "step-100").rename(tmp_path / "kept")
    state.save_state(tmp_path, 9, *trained(9), {})
    (tmp_path / "kept").rename(tmp_path / "step-100")
    model, optimizers = trained(0)
    assert state.load_state(tmp_path, model, optimizers)["step"] == 100
    assert same(everything(model, optimizers), everything(*trained(100)))


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(tensors: Any, path: Path, *_: Any) -> None:
    Path(path).write_bytes(b"half of it")
    raise SafetensorError("I/O error: No space left on device (os error 28)")


def pressed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    ("place", "failure"),
    [
        ("save_file", half_written),
        ("json.dumps", full_disk),
        ("os.fsync", full_disk),
        ("os.rename", full_disk),
        ("save_file", pressed),
        ("os.fsync", pressed),
        ("os.rename", pressed),
    ],
)
def test_a_state_is_whole_or_absent_and_the_old_one_survives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    failure: Callable[..., None],
    old: bool,
) -> None:
    folder = tmp_path / "s"
    if old:
        state.save_state(folder, 4, *trained(4), {})
    with monkeypatch.context() as patch:
        patch.setattr(f"workbench.training.state.{place}", failure)
        with pytest.raises((TrainingError, KeyboardInterrupt)) as caught:
            state.save_state(folder, 5, *trained(5), {})
    assert [p.name for p in folder.iterdir()] == (["step-4"] if old else [])
    if failure is not pressed:
        message = str(caught.value)
        assert "state of step 5 could not be written" in message
        assert "No space left on device" in message
        assert ("step-4 there is whole" in message) is old
        assert ("--resume" in message) is old
        assert "\n" not in message
    if old:
        model, optimizers = trained(0)
        assert state.load_state(folder, model, optimizers)["step"] == 4
        assert same(everything(model, optimizers), everything(*trained(4)))


def test_damaged_states_are_named_and_change_nothing(tmp_path: Path) -> None:
    model, optimizers = trained(2)
    before = everything(model, optimizers)
    with pytest.raises(TrainingError, match=r"nothing to resume in .*; start without --resume"):
        state.load_state(tmp_path, model, optimizers)
    (tmp_path / "step-next").mkdir()  # not one of ours
    with pytest.raises(TrainingError, match="nothing to resume"):
        state.load_state(tmp_path, model, optimizers)
    saved = state.save_state(tmp_path, 3, *trained(3), {})
    whole = (saved / "state.safetensors").read_bytes()
    for damage in (whole[: len(whole) // 2], b""):
        (saved / "state.safetensors").write_bytes(damage)
        with pytest.raises(TrainingError, match=r"step-3 cannot be read .* to start anew"):
            state.load_state(tmp_path, model, optimizers)
    (saved / "state.safetensors").write_bytes(whole)
    (saved / "state.json").write_text("{")
    with pytest.raises(TrainingError, match="step-3 cannot be read"):
        state.load_state(tmp_path, model, optimizers)
    (saved / "state.json").write_text("{}")
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    kept = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(TrainingError, match=r"another model \(1.weight differs\)"):
        state.load_state(tmp_path, other, [])
    assert same(kept, [p.detach() for p in other.parameters()])
    assert same(before, everything(model, optimizers))


def test_removing_states_leaves_other_files(tmp_path: Path) -> None:
    state.remove_states(tmp_path / "never made")
    (tmp_path / "s").mkdir()
    state.save_state(tmp_path / "s", 1, *trained(1), {})
    (tmp_path / "s" / "mine.txt").write_text("x")
    state.remove_states(tmp_path / "s")
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["mine.txt"]
    (tmp_path / "s" / "mine.txt").unlink()
    state.remove_states(tmp_path / "s")
    assert not (tmp_path / "s").exists()
