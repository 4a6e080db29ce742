"""Muon against numpy, the split of the parameters, and the learning-rate schedule by hand."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from workbench.model.beam import Beam
from workbench.model.config import BeamConfig
from workbench.training.optimizer import (
    Muon,
    optimizers_for,
    orthogonalise,
    rate_factor,
    set_rates,
    split_parameters,
)
from workbench.training.settings import TrainingSettings
from workbench.training.trainable import build

Make = Callable[..., TrainingSettings]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- orthogonalisation ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16), (24, 40)])
def test_singular_values_move_to_about_one_and_directions_stay(shape: tuple[int, int]) -> None:
    stack = random(3, *shape) * torch.tensor([1.0, 1e-3, 1e4])[:, None, None]
    for before, after in zip(stack.numpy(), orthogonalise(stack).numpy(), strict=True):
        u, values, vt = np.linalg.svd(before.astype(np.float64), full_matrices=False)
        moved = u.T @ after @ vt.T
        diagonal = np.diag(moved)
        assert np.abs(moved - np.diag(diagonal)).max() < 2e-3, "singular vectors changed"
        # Values far below the mean (a square random matrix has one) need more iterations.
        near = values > 0.1 * np.sqrt((values**2).mean())
        assert near.sum() >= len(values) - 2
        assert diagonal[near].min() > 0.6
        assert diagonal.max() < 1.25
        assert values.max() / values.min() > 1.3, "it must have had something to do"


def test_stacked_and_one_by_one_are_the_same() -> None:
    stack = random(5, 24, 40)
    together = orthogonalise(stack)
    for i in range(5):
        torch.testing.assert_close(
            together[i], orthogonalise(stack[i : i + 1])[0], rtol=0, atol=1e-5
        )


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalise(torch.zeros(2, 4, 6)).any()


# -- Muon -----------------------------------------------------------------------------------------


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Five steps of the quintic iteration on singular values, in float64."""
    u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ vt


@pytest.mark.parametrize("blocks", [((6, 4), (18, 4)), ((4, 6), (2, 4, 6))])
def test_updates_against_numpy(blocks: tuple[tuple[int, int], tuple[int, ...]]) -> None:
    block, shape = blocks
    parameter = nn.Parameter(random(*shape, seed=1))
    muon = Muon([{"params": [parameter], "block": block}], lr=0.1, weight_decay=0.03, momentum=0.9)
    expected = parameter.detach().numpy().astype(np.float64).reshape(-1, *block)
    buffer = np.zeros_like(expected)
    for step in range(3):
        gradient = random(*shape, seed=10 + step)
        parameter.grad = gradient.clone()
        muon.step()
        g = gradient.numpy().astype(np.float64).reshape(-1, *block)
        buffer = 0.9 * buffer + 0.1 * g
        ahead = 0.1 * g + 0.9 * buffer
        scale = np.sqrt(max(1.0, block[0] / block[1]))
        update = np.stack([newton_schulz(m) for m in ahead])
        expected = expected * (1 - 0.1 * 0.03) - 0.1 * scale * update
    found = parameter.detach().numpy().reshape(-1, *block)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_parameters_together_move_as_they_would_alone() -> None:
    def moved(*seeds: int) -> list[torch.Tensor]:
        parameters = [nn.Parameter(random(3, 8, 12, seed=s)) for s in seeds]
        muon = Muon([{"params": parameters, "block": (8, 12)}], 0.02, 0.01, 0.95)
        for p, seed in zip(parameters, seeds, strict=True):
            p.grad = random(3, 8, 12, seed=100 + seed)
        muon.step()
        return [p.detach() for p in parameters]

    for together, (alone,) in zip(moved(1, 2), (moved(1), moved(2)), strict=True):
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    parameter = nn.Parameter(random(4, 4))
    before = parameter.detach().clone()
    Muon([{"params": [parameter], "block": (4, 4)}], 0.1, 0.1, 0.9).step()
    assert torch.equal(parameter.detach(), before)


# -- which parameter goes where -------------------------------------------------------------------


@pytest.fixture
def beam(small_config: BeamConfig) -> Beam:
    return build(small_config, 0, torch.device("cpu"))


def test_every_trained_parameter_is_in_exactly_one_group(beam: Beam, make_settings: Make) -> None:
    groups = [g["params"] for o in optimizers_for(beam, make_settings()) for g in o.param_groups]
    grouped = [id(p) for params in groups for p in params]
    names = {id(p): name for name, p in beam.named_parameters()}
    assert len(grouped) == len(set(grouped))
    left_out = {name for key, name in names.items() if key not in set(grouped)}
    assert left_out == {f"layers.{i}.mlp.router.correction_bias" for i in (1, 2)}


def test_kinds_and_their_rates(beam: Beam, make_settings: Make) -> None:
    settings = make_settings(
        matrix_rate=0.1, embedding_rate=0.2, head_rate=0.3, router_rate=0.4, vector_rate=0.5
    )
    muon, adam = optimizers_for(beam, settings)
    rate_of = {id(p): g["lr"] for o in (muon, adam) for g in o.param_groups for p in g["params"]}
    matrices = ("qkvg", "o_proj", "gate_up", "down")
    for name, p in beam.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "correction_bias":
            continue
        expected = 0.5
        if leaf in matrices:
            expected = 0.1
        expected = {"embed_tokens": 0.2, "lm_head": 0.3, "weight": 0.4}.get(leaf, expected)
        assert rate_of[id(p)] == expected, name
    set_rates([muon, adam], 0.25)
    set_rates([muon, adam], 0.5)  # of the peak, not of what was there
    assert {g["lr"] for g in muon.param_groups} == {0.05}
    assert [g["lr"] for g in adam.param_groups] == [0.1, 0.15, 0.2, 0.25]


def projections(config: BeamConfig) -> dict[str, tuple[str, tuple[slice, ...]]]:
    """Every single projection inside the packed parameters: (parameter, its region)."""
    q, kv = config.q_size, config.kv_size
    rows = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
    rows["gate"] = (q + 2 * kv, 2 * q + 2 * kv)
    found = {name: ("layers.2.attention.qkvg", (slice(*span),)) for name, span in rows.items()}
    dense, expert = config.intermediate_size, config.moe_intermediate_size
    for name, first in (("gate", 0), ("up", 1)):
        found[f"dense {name}"] = (
            "layers.0.mlp.gate_up",
            (slice(first * dense, (first + 1) * dense),),
        )
        found[f"expert 3 {name}"] = (
            "layers.1.mlp.gate_up",
            (slice(3, 4), slice(first * expert, (first + 1) * expert)),
        )
    found["expert 5 down"] = ("layers.1.mlp.down", (slice(5, 6),))
    found["o_proj"] = ("layers.1.attention.o_proj", (slice(None),))
    return found


def test_the_update_of_a_projection_never_reaches_another(
    small_config: BeamConfig, make_settings: Make
) -> None:
    """A gradient in one projection moves that one alone, and as if nothing else had one."""
    for name, (parameter, region) in projections(small_config).items():
        moves = []
        for everywhere in (False, True):
            beam = build(small_config, 0, torch.device("cpu"))
            muon = optimizers_for(beam, make_settings(weight_decay=0.0))[0]
            p = dict(beam.named_parameters())[parameter]
            gradient = random(*p.shape, seed=9)
            only = torch.zeros_like(gradient)
            only[region] = gradient[region]
            p.grad = gradient if everywhere else only
            before = p.detach().clone()
            muon.step()
            moves.append(p.detach() - before)
        outside = moves[0].clone()
        outside[region] = 0
        assert not outside.any(), f"{name}: the update leaks into another projection"
        assert moves[0][region].abs().min() > 0, name
        torch.testing.assert_close(moves[1][region], moves[0][region], rtol=0, atol=1e-6)


def test_blocks_divide_their_parameters(beam: Beam) -> None:
    matrices, _ = split_parameters(beam)
    for (rows, columns), parameters in matrices.items():
        for p in parameters:
            assert p.shape[-1] == columns
            assert p.shape[-2] % rows == 0


# -- the schedule ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "by_hand"),
    [
        # Four steps up, flat, and over the last half (five steps) down to a fifth.
        ({"warmup": 4, "cooldown": 0.5}, [0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        # The smaller of the two where they meet.
        ({"warmup": 10, "cooldown": 1.0}, [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ({"warmup": 0, "cooldown": 0.0}, [1.0] * 10),
        ({"warmup": 1, "cooldown": 0.2}, [1.0] * 9 + [0.5]),
    ],
)
def test_rate_schedule(make_settings: Make, changes: dict[str, float], by_hand: list) -> None:
    settings = make_settings(steps=10, **changes)
    assert [rate_factor(step, settings) for step in range(10)] == pytest.approx(by_hand)
