"""The model against vectors recorded from vLLM's own Beam (tests/engine/README.md says how)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reference import beam_fp64
from reference.safetensors_numpy import read_safetensors
from workbench.kernels import reference
from workbench.model.beam import Beam
from workbench.model.checkpoint import load, save

DATA = Path(__file__).resolve().parent / "data"
LOGITS, STATES = 1e-4, 2e-5  # FP32 on both sides; logits have a standard deviation of 3 to 4

Recorded = tuple[dict[str, Any], dict[str, np.ndarray], Beam, Path]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are so small that a second thread only adds the cost of waking it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["plain", "grouped"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    document = json.loads((DATA / f"engine_beam_{request.param}.json").read_text())
    vectors = read_safetensors(DATA / f"engine_beam_{request.param}.safetensors")
    folder = tmp_path_factory.mktemp(request.param)
    digest = beam_fp64.random_checkpoint(folder, document["config"], document["seed"])
    assert digest == document["weights_sha256"], "random_checkpoint no longer gives these weights"
    return document, vectors, load(folder), folder


def close(found: torch.Tensor, expected: np.ndarray, atol: float) -> None:
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=atol)


def test_logits_and_residual_streams(recorded: Recorded) -> None:
    document, vectors, beam, _ = recorded
    tokens = torch.tensor(document["token_ids"])
    streams = [beam.embed(tokens)]
    hooks = [
        layer.register_forward_hook(lambda _, __, output: streams.append(output[0]))
        for layer in beam.layers
    ]
    logits = beam.sequence_logits(tokens)
    for hook in hooks:
        hook.remove()
    close(logits, vectors["logits"], LOGITS)
    close(torch.stack(streams), vectors["hidden"], STATES)


def test_logits_from_the_cache(recorded: Recorded) -> None:
    document, vectors, beam, _ = recorded
    tokens = torch.tensor(document["token_ids"])
    cache = beam.new_cache()
    chunks = [25, *[1] * (len(tokens) - 25)]
    parts = [beam.extend(cache, part, [len(part)]) for part in tokens.split(chunks)]
    close(beam.logits(torch.cat(parts)), vectors["logits"], LOGITS)


def test_moe_block_and_router(recorded: Recorded) -> None:
    document, vectors, beam, _ = recorded
    x = torch.tensor(vectors["moe_input"]).float()
    for layer in document["moe_layers"]:
        mlp, kernels = beam.layers[layer].mlp, beam.kernels().layers[layer]
        close(mlp(x, kernels), vectors[f"moe_output.{layer}"], STATES)
        ids, weights = mlp.router(x, kernels)
        table = torch.zeros(2, len(x), beam.config.num_experts)
        table[0].scatter_(1, ids, weights)
        engine_ids = torch.tensor(vectors[f"moe_ids.{layer}"])
        table[1].scatter_(1, engine_ids, torch.tensor(vectors[f"moe_weights.{layer}"]).float())
        assert (table[1] > 0).sum() == ids.numel()
        close(table[0], table[1].numpy(), 1e-6)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_qk_norm_with_ssmax_or_rope_at_far_positions(recorded: Recorded, kind: str) -> None:
    document, vectors, beam, _ = recorded
    probe = document["position_probes"][kind]
    attention = beam.layers[probe["layer"]].attention
    positions = torch.tensor(probe["positions"])
    config = beam.config
    rope = reference.rope_table(int(positions.max()) + 1, config.head_dim, config.rope_theta, "cpu")
    q, k = (
        torch.tensor(vectors[f"{kind}.{side}_input"]).float().unflatten(1, (-1, attention.head_dim))
        for side in ("q", "k")
    )
    packed = torch.cat((q, k, torch.zeros(len(q), k.shape[1] + q.shape[1], q.shape[2])), 1)
    found = {"k": torch.empty_like(k)}
    found["q"] = reference.qkv_write(
        packed.flatten(1),
        attention.qk_norm,
        positions,
        rope,
        found["k"],
        torch.empty_like(k),
        None,
        heads=q.shape[1],
        full=kind == "full_attention",
        eps=beam.config.rms_norm_eps,
    )
    # A float32 angle is off by position * 2^-24 radians, on either side.
    atol = 2e-5 if kind == "full_attention" else 5e-4
    for side in ("q", "k"):
        close(found[side].flatten(1), vectors[f"{kind}.{side}_output"], atol)
        near = positions < 64
        close(found[side].flatten(1)[near], vectors[f"{kind}.{side}_output"][near.numpy()], 2e-5)


def test_a_saved_checkpoint_is_still_what_the_engine_was_given(
    recorded: Recorded, tmp_path: Path
) -> None:
    """Saving changes no name, shape, dtype or bit of what the engine loaded unchanged."""
    _, _, beam, folder = recorded
    save(beam, tmp_path, shard_bytes=150_000)
    _, before = beam_fp64.load_reference(folder)
    _, after = beam_fp64.load_reference(tmp_path)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
