"""The model against the FP64 reference, which shares no code with it: whole, and block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from reference import beam_fp64 as ref
from reference.safetensors_numpy import bfloat16_bits, from_bfloat16_bits
from workbench.kernels import reference
from workbench.model.beam import Beam
from workbench.model.checkpoint import load
from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext

from .conftest import Small

pytestmark = pytest.mark.usefixtures("one_thread")

FP32 = 1e-4
Array = np.ndarray


def error(found: torch.Tensor, expected: Array) -> float:
    return float(np.abs(found.double().numpy() - expected).max())


def context(beam: Beam, tokens: int) -> SequenceContext:
    made = SequenceContext(beam.config, 1, tokens)
    made.kernels = beam.kernels().layers
    return made


@pytest.fixture(scope="module")
def x() -> Callable[[Small], Array]:
    """A normed input [T, H] of the width of a model, in float32 values."""

    def make(small: Small) -> Array:
        shape = (len(small.tokens), small.config["hidden_size"])
        return np.random.default_rng(1).normal(size=shape).astype(np.float32).astype(np.float64)

    return make


# -- the whole model ----------------------------------------------------------------------------


def test_logits(each_small: Small) -> None:
    beam = load(each_small.folder)
    logits = beam.sequence_logits(each_small.ids)
    assert logits.dtype == torch.float32
    assert each_small.reference["logits"].std() > 1.0  # so that 1e-4 says something
    assert error(logits, each_small.reference["logits"]) < FP32


def test_stream_after_every_layer(each_small: Small) -> None:
    """The un-normalised residual stream, at the embedding and after each layer."""
    beam = load(each_small.folder)
    streams = [beam.embed(each_small.ids)]
    for layer in beam.layers:
        layer.register_forward_hook(lambda _, __, output: streams.append(output[0]))
    beam.sequence_logits(each_small.ids)
    assert len(streams) == each_small.config["num_hidden_layers"] + 1
    for found, expected in zip(streams, each_small.reference["hidden"], strict=True):
        assert error(found, expected) < FP32


def test_a_batch_of_equal_lengths_is_its_rows(features: Small) -> None:
    beam = load(features.folder)
    batch = torch.stack((features.ids, features.ids.flip(0)))
    logits = beam.sequence_logits(batch)
    assert logits.shape == (2, len(features.tokens), features.config["vocab_size"])
    assert error(logits[0], features.reference["logits"]) < FP32
    backwards = ref.forward(features.config, features.weights, features.tokens[::-1])
    assert error(logits[1], backwards["logits"]) < FP32


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4}, {"routed_scaling_factor": 2.0}, {"norm_topk_prob": False},
        {"num_experts_per_tok": 2}, {"topk_group": 3}, {"final_logit_softcapping": 7.0},
        {"rope_theta": 5000.0}, {"rms_norm_eps": 1e-2},
        {"layer_types": ("full_attention", "sliding_attention") * 2},
    ],
)  # fmt: skip
def test_these_tests_would_notice(features: Small, change: dict[str, Any]) -> None:
    """With one field changed the model no longer agrees: each field reaches the arithmetic."""
    beam = load(features.folder)
    altered = Beam(beam.config.replace(**change))
    altered.load_state_dict(beam.state_dict())
    whole = error(altered.sequence_logits(features.ids), features.reference["logits"])
    layer = 1  # sparse; the norm behind the block hides its scale from the logits
    inputs = torch.randn(20, 48, generator=torch.Generator().manual_seed(0))
    block = error(
        altered.layers[layer].mlp(inputs, altered.kernels().layers[layer]),
        ref.moe_block(features.config, features.weights, layer, inputs.double().numpy()),
    )
    assert max(whole, block) > 10 * FP32


# -- blocks -------------------------------------------------------------------------------------


def test_attention_block(each_small: Small, x: Callable[[Small], Array]) -> None:
    beam, inputs = load(each_small.folder), x(each_small)
    for number, layer in enumerate(beam.layers):
        found = layer.attention(torch.tensor(inputs).float(), context(beam, len(inputs)))
        expected, _ = ref.attention_block(each_small.config, each_small.weights, number, inputs)
        assert expected.std() > 0.05
        assert error(found, expected) < 1e-5


def test_mlp_blocks(each_small: Small, x: Callable[[Small], Array]) -> None:
    """The block's own output: the norm that follows cancels the routed scale in the logits."""
    beam, inputs = load(each_small.folder), x(each_small)
    for number, layer in enumerate(beam.layers):
        found = layer.mlp(torch.tensor(inputs).float(), beam.kernels().layers[number])
        if beam.config.is_sparse(number):
            expected = ref.moe_block(each_small.config, each_small.weights, number, inputs)
        else:
            weights = {
                name: each_small.weights[f"model.layers.{number}.mlp.{name}_proj.weight"]
                for name in ("gate", "up", "down")
            }
            gate = inputs @ weights["gate"].T
            expected = gate / (1 + np.exp(-gate)) * (inputs @ weights["up"].T) @ weights["down"].T
        assert expected.std() > 0.05
        assert error(found, expected) < 1e-5


def test_moe_inside_the_forward_pass(each_small: Small) -> None:
    beam = load(each_small.folder)
    outputs = {}
    for number in beam.config.sparse_layers:
        beam.layers[number].mlp.register_forward_hook(
            lambda _, __, output, number=number: outputs.update({number: output})
        )
    beam.sequence_logits(each_small.ids)
    assert outputs.keys() == each_small.reference["moe_output"].keys()
    for number, expected in each_small.reference["moe_output"].items():
        assert error(outputs[number], expected) < FP32


def test_router(each_small: Small, x: Callable[[Small], Array]) -> None:
    beam, inputs = load(each_small.folder), x(each_small)
    for number in beam.config.sparse_layers:
        ids, weights = beam.layers[number].mlp.router(
            torch.tensor(inputs).float(), beam.kernels().layers[number]
        )
        expected_ids, expected = ref.route(each_small.config, each_small.weights, number, inputs)
        assert weights.dtype == torch.float32
        assert np.array_equal(ids.numpy(), expected_ids)  # both by descending biased score
        assert error(weights, expected) < 1e-6


@pytest.mark.parametrize("tokens", [1, 2, 7, 32, 33, 100])
@pytest.mark.parametrize("name", ["features", "many_experts"])
def test_dense_and_grouped_experts_agree(
    small: Callable[[str], Small], name: str, tokens: int
) -> None:
    it = small(name)
    beam = load(it.folder)
    layer, kernels = beam.layers[2].mlp, beam.kernels().layers[2]
    inputs = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(tokens))
    ids, weights = layer.router(inputs, kernels)
    arguments = (inputs, layer.gate_up, layer.down, ids, weights)
    dense, grouped = (
        reference.expert_mlp_dense(*arguments),
        reference.expert_mlp_grouped(*arguments),
    )
    expected = ref.moe_block(it.config, it.weights, 2, inputs.double().numpy()) / 2.5
    for found in (dense, grouped, reference.expert_mlp(*arguments, 1.0)):
        assert error(found, expected) < 1e-5
    scaled = reference.expert_mlp(*arguments, 2.5)
    assert error(scaled, expected * 2.5) < 1e-5


# -- BF16 ---------------------------------------------------------------------------------------


def rounded(x: Array) -> Array:
    """To BF16 and back."""
    return from_bfloat16_bits(bfloat16_bits(x))


def rounded_forward(
    config: Mapping[str, Any], weights: Mapping[str, Array], tokens: list[int]
) -> Array:
    """Logits [T, V] of the reference's arithmetic in FP64, rounded to BF16 where Beam rounds.

    Sums are exact, so what is left is the error that the roundings alone bring.
    """
    r, eps, length = rounded, config["rms_norm_eps"], len(tokens)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = ref.head_dim(config)
    theta = ref.rope_theta(config)

    def linear(x: Array, name: str) -> Array:
        return r(x @ weights[name + ".weight"].T)

    def mlp(x: Array, prefix: str) -> Array:
        gate, up = linear(x, prefix + "gate_proj"), linear(x, prefix + "up_proj")
        return linear(r(ref.swiglu(gate, up)), prefix + "down_proj")

    def add(branch: Array, stream: Array, weight: str, n: int) -> Array:
        branch = r(ref.rms_norm(branch, weights[weight], eps))
        return r(r(branch / math.sqrt(n)) + r(stream * math.sqrt((n - 1) / n)))

    h = weights["model.embed_tokens.weight"][tokens]
    distance = np.arange(length)[:, None] - np.arange(length)
    for layer in range(config["num_hidden_layers"]):
        here = f"model.layers.{layer}."
        sliding = ref.attention_type(config, layer) == "sliding_attention"
        x = r(ref.rms_norm(h, weights[here + "input_layernorm.weight"], eps))
        q, k, v, gate = (
            linear(x, f"{here}self_attn.{name}_proj").reshape(length, -1, width)
            for name in ("q", "k", "v", "gate")
        )
        q = r(ref.rms_norm(q, weights[here + "self_attn.q_norm.weight"], eps))
        k = r(ref.rms_norm(k, weights[here + "self_attn.k_norm.weight"], eps))
        for position in range(length):
            if sliding:
                q[position] = [r(ref.rotate(head, position, theta)) for head in q[position]]
                k[position] = [r(ref.rotate(head, position, theta)) for head in k[position]]
            else:
                q[position] = r(q[position] * ref.ssmax_factor(position))
        seen = (distance >= 0) & (distance < (config["sliding_window"] if sliding else length))
        k, v = (np.repeat(t, heads // groups, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(width)
        scores = np.exp(np.where(seen, scores, -np.inf))
        o = r(np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v))
        gate = r(gate + weights[here + "self_attn.gate_bias"][:, None])
        o = r(o * r(ref.sigmoid(gate))).reshape(length, -1)
        a = linear(o, here + "self_attn.o_proj")
        h = add(a, h, here + "post_attention_layernorm.weight", 2 * layer + 2)
        x = r(ref.rms_norm(h, weights[here + "pre_feedforward_layernorm.weight"], eps))
        if ref.mlp_type(config, layer) == "dense":
            m = mlp(x, here + "mlp.")
        else:
            m = np.zeros_like(x)
            ids, shares = ref.route(config, weights, layer, x)
            for row, chosen, share in zip(range(length), ids, shares, strict=True):
                for expert, weight in zip(chosen, share, strict=True):
                    m[row] += weight * mlp(x[row], f"{here}mlp.experts.{expert}.")
            m = r(r(m) * config.get("routed_scaling_factor", 1.0))
        h = add(m, h, here + "post_feedforward_layernorm.weight", 2 * layer + 3)
    x = r(ref.rms_norm(h, weights["model.norm.weight"], eps))
    return ref.softcap(linear(x, "lm_head"), config.get("final_logit_softcapping"))


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x * x)))


def test_bf16_errs_as_much_as_its_roundings_and_no_more(each_small: Small) -> None:
    """BF16 logits are as far from FP64 as exact arithmetic with Beam's own roundings is.

    Both errors are draws of the same rounding noise (weights are BF16 in the file, so they add
    none) over thousands of logits, so their ratio is near 1 (0.90 to 1.16 when written). A wide
    correction bias fixes the choice of experts: one that a rounding tips over would outweigh all.
    """
    config, weights = each_small.config, dict(each_small.weights)
    beam = load(each_small.folder, dtype=torch.bfloat16)
    for layer in beam.config.sparse_layers:
        bias = np.random.default_rng(layer).permutation(beam.config.num_experts) * 10.0
        weights[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = bias
        beam.layers[layer].mlp.router.correction_bias.copy_(torch.tensor(bias))
    exact = ref.forward(config, weights, each_small.tokens)["logits"]
    logits = beam.sequence_logits(each_small.ids)
    assert logits.dtype == torch.float32
    noise = rms(rounded_forward(config, weights, each_small.tokens) - exact)
    found = rms(logits.double().numpy() - exact)
    assert noise > 0.002 * rms(exact)
    assert 0.7 * noise < found < 1.4 * noise


def bf16(*shape: int, seed: int) -> tuple[torch.Tensor, Array]:
    """The same BF16 values as a tensor and in FP64."""
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return tensor, tensor.double().numpy()


def agree(found: torch.Tensor, exact: Array) -> None:
    """One rounding of the exact value, but for the few that lie on the edge between two."""
    assert found.dtype == torch.bfloat16
    found64, expected = found.double().numpy(), rounded(exact)
    differ = found64 != expected
    assert differ.mean() < 0.005
    np.testing.assert_allclose(found64, expected, rtol=2**-7, atol=1e-30)


def test_each_operation_rounds_where_beam_rounds() -> None:
    r, eps = rounded, 1e-6
    h, h64 = bf16(50, 64, seed=1)
    a, a64 = bf16(50, 64, seed=2)
    w, w64 = bf16(64, seed=3)
    u, u64 = bf16(64, seed=4)
    agree(reference.rms_norm(h, w, eps), ref.rms_norm(h64, w64, eps))
    n = 7
    stream, x = reference.boundary(h, a, w, reference.depth_scale(n), u, eps)
    p64 = r(ref.rms_norm(a64, w64, eps))
    s64 = r(r(p64 / math.sqrt(n)) + r(h64 * math.sqrt((n - 1) / n)))
    found = stream.double().numpy()
    assert (found != s64).mean() < 0.01
    agree(x, ref.rms_norm(found, u64, eps))
    agree(reference.swiglu(torch.cat((h, a), -1)), ref.swiglu(h64, a64))

    q, q64 = bf16(50, 3, 8, seed=5)
    gate, gate64 = bf16(50, 3, 8, seed=6)
    bias, bias64 = bf16(3, seed=7)
    gated = r(ref.sigmoid(r(gate64 + bias64[:, None])))
    agree(reference.output_gate(q, gate, bias), q64 * gated)
    positions = torch.arange(50)
    turned = np.array([[ref.rotate(head, t, 10000.0) for head in row] for t, row in enumerate(q64)])
    table = reference.rope_table(50, 8, 10000.0, "cpu")
    agree(reference.apply_rope(q, positions, table), turned)
    factors = reference.ssmax_scale(torch.tensor([0, 2047, 1048575])).flatten()
    np.testing.assert_allclose(factors, [(1 + 1 / 2048) ** 0.1, 2**0.1, 513**0.1], rtol=1e-6)


@pytest.mark.parametrize("theta", [500.0, 10000.0])
def test_rope_is_as_exact_far_from_the_start(theta: float) -> None:
    """A float32 angle is off by up to p * 2^-24 at position p, more than logits can bear."""
    q = torch.randn(4, 1, 64, generator=torch.Generator().manual_seed(10))
    positions = [0, 300, 2047, 65535]
    table = reference.rope_table(65536, 64, theta, "cpu")
    found = reference.apply_rope(q, torch.tensor(positions), table)
    for row, position in enumerate(positions):
        exact = ref.rotate(q[row, 0].double().numpy(), position, theta)
        assert error(found[row, 0], exact) < 1e-6, position


def test_qk_norm_rounds_once_before_the_position(features: Small) -> None:
    """``qkv_write``: per-head norm in float32, rounded; then RoPE or SSMax, rounded again."""
    beam = load(features.folder, dtype=torch.bfloat16)
    qk, qk64 = bf16(20, 6, 16, seed=8)  # 4 query and 2 KV heads
    for number in (0, 1):  # sliding, full
        here = f"model.layers.{number}.self_attn."
        weights = [features.weights[here + n + "_norm.weight"] for n in "q" * 4 + "k" * 2]
        normed = rounded(ref.rms_norm(qk64, np.array(weights), 1e-6))
        for t in range(20):
            if number == 0:
                normed[t] = [ref.rotate(head, t, 10000.0) for head in normed[t]]
            else:
                normed[t, :4] *= ref.ssmax_factor(t)
        rest = torch.zeros(20, (2 + 4) * 16, dtype=torch.bfloat16)  # v and gate
        k, v = torch.empty(2, 20, 2, 16, dtype=torch.bfloat16)
        q = reference.qkv_write(
            torch.cat((qk.flatten(1), rest), 1),
            beam.layers[number].attention.qk_norm,
            torch.arange(20),
            reference.rope_table(20, 16, 10000.0, "cpu"),
            k,
            v,
            None,
            heads=4,
            full=number == 1,
            eps=1e-6,
        )
        found64 = torch.cat((q, k), 1).double().numpy()
        # An edge case of the first rounding moves both elements of a RoPE pair by a step.
        assert (found64 != rounded(normed)).mean() < 0.01
        np.testing.assert_allclose(found64, normed, rtol=2**-6, atol=2**-7)


def test_router_is_float32_in_a_bf16_model(features: Small) -> None:
    """Router weights keep the bits that BF16 would drop, and so do its logits."""
    beam = load(features.folder, dtype=torch.bfloat16)
    layer, kernels = beam.layers[1].mlp, beam.kernels().layers[1]
    inputs, inputs64 = bf16(200, 48, seed=9)
    ids, weights = layer.router(inputs, kernels)
    expected_ids, expected = ref.route(features.config, features.weights, 1, inputs64)
    assert np.array_equal(ids.numpy(), expected_ids)
    assert error(weights, expected) < 1e-6
    coarse = dict(features.weights)
    name = "model.layers.1.mlp.gate.weight"
    coarse[name] = rounded(coarse[name])
    assert not np.array_equal(ref.route(features.config, coarse, 1, inputs64)[0], expected_ids)


def test_softcap_is_float32() -> None:
    logits = torch.tensor([-1e4, -3.0, 0.0, 3.0, 1e4]).bfloat16()
    capped = reference.softcap(logits, 5.0)
    assert capped.dtype == torch.float32
    expected = 5 * np.tanh(np.array([-1e4, -3, 0, 3, 1e4]) / 5)
    np.testing.assert_allclose(capped, expected, rtol=1e-6)


def test_a_bare_model_has_the_default_dtype_and_float32_routers() -> None:
    config = BeamConfig.from_dict(
        {
            "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "num_experts": 2, "num_experts_per_tok": 1, "sliding_window": 2,
            "max_position_embeddings": 8,
        }
    )  # fmt: skip
    with torch.device("meta"):
        beam = Beam(config)
    assert beam.dtype == torch.get_default_dtype()
    assert beam.layers[0].mlp.router.weight.dtype == torch.float32
