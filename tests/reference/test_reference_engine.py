"""The FP64 reference against vectors recorded from vLLM's own Beam (tests/engine/README.md)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import beam_fp64 as ref
from .safetensors_numpy import read_safetensors

DATA = Path(__file__).resolve().parents[1] / "data"
FP32_LOGITS = 5e-5  # logits have a standard deviation of about 4; 2.2e-5 when recorded
FP32_STATES = 1e-5

Fixture = tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any], dict[str, np.ndarray]]


@pytest.fixture(scope="module", params=["plain", "grouped"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    document = json.loads((DATA / f"engine_beam_{request.param}.json").read_text())
    vectors = read_safetensors(DATA / f"engine_beam_{request.param}.safetensors")
    folder = tmp_path_factory.mktemp(request.param)
    digest = ref.random_checkpoint(folder, document["config"], document["seed"])
    assert digest == document["weights_sha256"], "random_checkpoint no longer gives these weights"
    config, weights = ref.load_reference(folder)
    return document, vectors, config, weights


def test_logits_and_residual_streams(recorded: Fixture) -> None:
    document, vectors, config, weights = recorded
    out = ref.forward(config, weights, document["token_ids"])
    np.testing.assert_allclose(out["logits"], vectors["logits"], rtol=0, atol=FP32_LOGITS)
    np.testing.assert_allclose(np.stack(out["hidden"]), vectors["hidden"], rtol=0, atol=FP32_STATES)


def test_moe_block_and_router(recorded: Fixture) -> None:
    document, vectors, config, weights = recorded
    x = vectors["moe_input"]
    for layer in document["moe_layers"]:
        out = ref.moe_block(config, weights, layer, x)
        np.testing.assert_allclose(out, vectors[f"moe_output.{layer}"], rtol=0, atol=FP32_STATES)
        ids, shares = ref.route(config, weights, layer, x)
        dense = np.zeros((2, len(x), config["num_experts"]))
        np.put_along_axis(dense[0], ids, shares, 1)
        np.put_along_axis(dense[1], vectors[f"moe_ids.{layer}"], vectors[f"moe_weights.{layer}"], 1)
        np.testing.assert_allclose(dense[0], dense[1], rtol=0, atol=1e-6)


def test_qk_norm_ssmax_and_rope_at_far_positions(recorded: Fixture) -> None:
    document, vectors, config, weights = recorded
    width, eps, theta = ref.head_dim(config), config["rms_norm_eps"], ref.rope_theta(config)
    for kind, probe in document["position_probes"].items():
        for side in ("q", "k"):
            weight = weights[f"model.layers.{probe['layer']}.self_attn.{side}_norm.weight"]
            rows = vectors[f"{kind}.{side}_input"]
            heads = ref.rms_norm(rows.reshape(len(rows), -1, width), weight, eps)
            for row, position in enumerate(probe["positions"]):
                if kind == "full_attention":
                    heads[row] *= ref.ssmax_factor(position) if side == "q" else 1.0
                else:
                    heads[row] = [ref.rotate(head, position, theta) for head in heads[row]]
            # The engine's FP32 table of angles is off by position * 2^-24 radians.
            np.testing.assert_allclose(
                heads.reshape(rows.shape), vectors[f"{kind}.{side}_output"], rtol=0, atol=1e-3
            )
            near = [row for row, position in enumerate(probe["positions"]) if position < 64]
            exact = range(len(rows)) if kind == "full_attention" else near
            for row in exact:
                np.testing.assert_allclose(
                    heads[row].ravel(), vectors[f"{kind}.{side}_output"][row], rtol=0, atol=2e-5
                )
