"""The FP64 reference against facts worked out by hand, so that it cannot be wrong quietly."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import beam_fp64 as ref
from .safetensors_numpy import bfloat16_bits, from_bfloat16_bits, write_safetensors

LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def small_config(**changes: Any) -> dict[str, Any]:
    """Three layers, widths that differ from one another, every feature on."""
    config = {
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 20,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 3,
        "layer_types": LAYERS,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return config | changes


def loaded(folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    ref.random_checkpoint(folder, small_config(**changes), seed=7)
    return ref.load_reference(folder)


# --- arithmetic ------------------------------------------------------------------------------


def test_ssmax_factor_at_known_positions() -> None:
    assert ref.ssmax_factor(2047) == pytest.approx(2**0.1, rel=1e-15)
    assert ref.ssmax_factor(0) == pytest.approx(1.0000488, abs=5e-8)
    # One million tokens: (1 + 512)^0.1 = 1.8664.
    assert ref.ssmax_factor(1048575) == pytest.approx(513**0.1, rel=1e-15)


def test_rope_turns_first_half_into_second_half() -> None:
    # theta is chosen so that pair 1 of a 4-wide head turns half as fast: 4^(-2/4) = 1/2.
    unit = np.array([1.0, 0.0, 0.0, 0.0])
    c, s = math.cos(1.0), math.sin(1.0)
    np.testing.assert_allclose(ref.rotate(unit, 1, 4.0), [c, 0, s, 0], atol=1e-15)
    np.testing.assert_allclose(ref.rotate(np.roll(unit, 2), 1, 4.0), [-s, 0, c, 0], atol=1e-15)
    np.testing.assert_allclose(ref.rotate(np.roll(unit, 1), 2, 4.0), [0, c, 0, s], atol=1e-15)


def test_rope_scores_depend_on_distance_only() -> None:
    q, k = np.random.default_rng(0).normal(size=(2, 16))
    near = ref.rotate(q, 9, 100.0) @ ref.rotate(k, 4, 100.0)
    far = ref.rotate(q, 1009, 100.0) @ ref.rotate(k, 1004, 100.0)
    assert near == pytest.approx(far, abs=1e-11)
    assert abs(near - q @ k) > 0.1


def test_depth_scaled_add_keeps_unit_variance() -> None:
    generator = np.random.default_rng(1)
    stream = generator.normal(size=400_000)
    for n in range(2, 20):
        stream = ref.depth_scaled_add(generator.normal(size=stream.size), stream, n)
        assert stream.var() == pytest.approx(1.0, abs=0.02)
    np.testing.assert_allclose(ref.depth_scaled_add(np.ones(1), np.zeros(1), 4), 0.5)
    np.testing.assert_allclose(ref.depth_scaled_add(np.zeros(1), np.ones(1), 4), 0.75**0.5)


def test_softcap_bounds_and_is_identity_near_zero() -> None:
    logits = np.array([-1e6, -30.0, 1e-4, 30.0, 1e6])
    capped = ref.softcap(logits, 30.0)
    np.testing.assert_allclose(
        capped, [-30.0, -30 * math.tanh(1), 1e-4, 30 * math.tanh(1), 30.0], rtol=1e-10
    )
    assert ref.softcap(logits, None) is logits


def test_rms_norm_and_swiglu_by_hand() -> None:
    # mean square of (3, 4) is 12.5
    np.testing.assert_allclose(
        ref.rms_norm(np.array([3.0, 4.0]), np.array([1.0, 2.0]), 0.0),
        [3 / math.sqrt(12.5), 8 / math.sqrt(12.5)],
    )
    np.testing.assert_allclose(
        ref.swiglu(np.array([math.log(3.0), -800.0]), np.array([2.0, 1.0])),
        [math.log(3.0) * 0.75 * 2.0, 0.0],
    )


# --- attention -------------------------------------------------------------------------------


def test_window_of_512_sees_511_tokens_back() -> None:
    assert ref.first_visible(511, 512) == 0
    assert ref.first_visible(512, 512) == 1
    assert ref.first_visible(1000, 512) == 489
    assert ref.first_visible(1000, None) == 0


def test_attention_support_is_the_window_or_the_past(tmp_path: Path) -> None:
    config, weights = loaded(tmp_path)
    attention = ref.forward(config, weights, range(9))["attention"]
    query, key = np.indices((9, 9))
    for layer, kind in enumerate(LAYERS):
        seen = key <= query
        if kind == "sliding_attention":
            seen &= key >= query - 2  # window 3
        np.testing.assert_array_equal(attention[layer] > 0, np.broadcast_to(seen, (4, 9, 9)))
        np.testing.assert_allclose(attention[layer].sum(-1), 1.0, rtol=1e-14)


def test_equal_keys_give_the_mean_of_the_visible_values(tmp_path: Path) -> None:
    """With k = 0 every visible key weighs the same, so the block reduces to a windowed mean."""
    config, weights = loaded(tmp_path)
    for layer in range(3):
        here = f"model.layers.{layer}.self_attn."
        weights[here + "k_proj.weight"] = np.zeros_like(weights[here + "k_proj.weight"])
        x = np.random.default_rng(layer).normal(size=(7, 24))
        out, _ = ref.attention_block(config, weights, layer, x)
        v = (x @ weights[here + "v_proj.weight"].T).reshape(7, 2, 8)
        gate = (x @ weights[here + "gate_proj.weight"].T).reshape(7, 4, 8)
        gate = gate + weights[here + "gate_bias"][None, :, None]
        first = 0 if LAYERS[layer] == "full_attention" else 4
        mean = v[first:7].mean(0)[[0, 0, 1, 1]]  # two query heads share a KV head
        expected = (mean / (1 + np.exp(-gate[6]))).reshape(-1) @ weights[here + "o_proj.weight"].T
        np.testing.assert_allclose(out[6], expected, rtol=1e-12, atol=1e-13)


def test_only_full_layers_ignore_order(tmp_path: Path) -> None:
    """The last row's set of keys is unordered without RoPE, and ordered with it."""
    config, weights = loaded(tmp_path, sliding_window=64)
    x = np.random.default_rng(3).normal(size=(6, 24))
    shuffled = x[[3, 1, 4, 0, 2, 5]]
    for layer, kind in enumerate(LAYERS):
        plain, _ = ref.attention_block(config, weights, layer, x)
        other, _ = ref.attention_block(config, weights, layer, shuffled)
        same = np.allclose(plain[5], other[5], rtol=0, atol=1e-12)
        assert same == (kind == "full_attention")


def test_ssmax_sharpens_full_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubling the SSMax factor must be the same as doubling q_norm, in full layers only."""
    config, weights = loaded(tmp_path)
    x = np.random.default_rng(4).normal(size=(5, 24))
    factor = ref.ssmax_factor
    for layer, kind in enumerate(LAYERS):
        name = f"model.layers.{layer}.self_attn.q_norm.weight"
        _, plain = ref.attention_block(config, weights, layer, x)
        _, doubled = ref.attention_block(config, weights | {name: 2 * weights[name]}, layer, x)
        with monkeypatch.context() as patch:
            patch.setattr(ref, "ssmax_factor", lambda position: 2 * factor(position))
            _, scaled = ref.attention_block(config, weights, layer, x)
        np.testing.assert_allclose(scaled, doubled if kind == "full_attention" else plain)
        assert np.abs(doubled - plain).max() > 1e-3


# --- experts ---------------------------------------------------------------------------------


def brute_force_choice(biased: np.ndarray, k: int, groups: int, kept: int) -> set[int]:
    """Try every set of groups, then every set of experts inside the best one."""
    blocks = biased.reshape(groups, -1)
    pair = [max(a + b for a, b in itertools.combinations(block, 2)) for block in blocks]
    best = max(itertools.combinations(range(groups), kept), key=lambda c: sum(pair[g] for g in c))
    size = blocks.shape[1]
    allowed = [g * size + e for g in best for e in range(size)]
    return set(max(itertools.combinations(allowed, k), key=lambda c: sum(biased[e] for e in c)))


@pytest.mark.parametrize(("groups", "kept", "k"), [(1, 1, 3), (2, 1, 3), (4, 2, 4), (3, 2, 5)])
def test_group_limited_choice_by_enumeration(groups: int, kept: int, k: int) -> None:
    config = {"num_experts_per_tok": k, "n_group": groups, "topk_group": kept}
    generator = np.random.default_rng(5)
    limited = 0
    for _ in range(100):
        biased = generator.normal(size=12)  # negative scores too: masking with zero would show
        chosen = ref.select_experts(config, biased)
        assert set(chosen) == brute_force_choice(biased, k, groups, kept)
        assert list(biased[chosen]) == sorted(biased[chosen], reverse=True)
        limited += set(chosen) != set(np.argsort(-biased)[:k])
    assert (limited > 0) == (groups > 1)


def test_moe_weights_are_unbiased_and_scaled(tmp_path: Path) -> None:
    """The bias moves the choice and never the weights; norm and scale are those asked for."""
    config, weights = loaded(tmp_path)
    x = np.random.default_rng(6).normal(size=(4, 24))
    gate = weights["model.layers.1.mlp.gate.weight"]
    weights["model.layers.1.mlp.gate.e_score_correction_bias"] = np.arange(8) * 10.0
    ids, shares = ref.route(config, weights, 1, x)
    np.testing.assert_array_equal(ids, [[7, 6, 5]] * 4)
    scores = 1 / (1 + np.exp(-(x @ gate.T)))[:, [7, 6, 5]]
    np.testing.assert_allclose(shares, scores / scores.sum(1, keepdims=True), rtol=1e-13)
    _, raw = ref.route(config | {"norm_topk_prob": False}, weights, 1, x)
    np.testing.assert_allclose(raw, scores, rtol=1e-13)

    def expert(number: int) -> np.ndarray:
        g, u, d = (
            weights[f"model.layers.1.mlp.experts.{number}.{name}_proj.weight"]
            for name in ("gate", "up", "down")
        )
        gated = x @ g.T
        return (gated / (1 + np.exp(-gated)) * (x @ u.T)) @ d.T

    mixed = sum(shares[:, [place]] * expert(number) for place, number in enumerate((7, 6, 5)))
    np.testing.assert_allclose(ref.moe_block(config, weights, 1, x), 2.5 * mixed, rtol=1e-12)
    one = ref.moe_block(config | {"routed_scaling_factor": 1.0}, weights, 1, x)
    np.testing.assert_allclose(one, mixed, rtol=1e-12)


# --- the whole model -------------------------------------------------------------------------


def test_one_group_is_the_same_as_none(tmp_path: Path) -> None:
    config, weights = loaded(tmp_path)
    plain = ref.forward(config, weights, range(6))["logits"]
    grouped = ref.forward(config | {"n_group": 1, "topk_group": 1}, weights, range(6))["logits"]
    np.testing.assert_array_equal(plain, grouped)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_group": 4, "topk_group": 2},
        {"norm_topk_prob": False},
        {"final_logit_softcapping": None},
        {"mlp_layer_types": ["dense", "dense", "sparse"]},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "head_dim": None},
        {"layer_types": None, "mlp_layer_types": None},
        {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 50.0}}},
    ],
)
def test_forward_shapes_and_causality(tmp_path: Path, changes: dict[str, Any]) -> None:
    config, weights = loaded(tmp_path, **changes)
    out = ref.forward(config, weights, [3, 1, 4, 1, 5, 9])
    assert out["logits"].shape == (6, 40)
    assert [stream.shape for stream in out["hidden"]] == [(6, 24)] * 4
    assert all(np.isfinite(stream).all() for stream in out["hidden"])
    assert out["attention"].keys() == {0, 1, 2}
    sparse = {i for i in range(3) if ref.mlp_type(config, i) == "sparse"}
    assert out["router"].keys() == out["moe_output"].keys() == sparse
    for layer in sparse:
        ids, shares = out["router"][layer]
        assert ids.shape == shares.shape == (6, 3)
        assert out["moe_output"][layer].shape == (6, 24)
    shorter = ref.forward(config, weights, [3, 1, 4, 1])
    np.testing.assert_allclose(out["logits"][:4], shorter["logits"], rtol=0, atol=1e-12)
    changed = ref.forward(config, weights, [3, 1, 4, 2, 5, 9])
    assert np.abs(changed["logits"][3:] - out["logits"][3:]).max(-1).min() > 1e-6


def test_window_limits_how_far_a_token_reaches(tmp_path: Path) -> None:
    """Three sliding layers of window 3 see 1 + 3 * 2 tokens; the eighth back cannot matter."""
    config, weights = loaded(tmp_path, layer_types=["sliding_attention"] * 3)
    tokens = list(range(12))
    base = ref.forward(config, weights, tokens)["logits"]
    tokens[2] = 30
    other = ref.forward(config, weights, tokens)["logits"]
    changed = np.abs(other - base).max(-1) > 0
    np.testing.assert_array_equal(changed, [False] * 2 + [True] * 7 + [False] * 3)


# --- files -----------------------------------------------------------------------------------


def test_bfloat16_rounds_to_nearest_even() -> None:
    step = 2.0**-7  # spacing of BF16 at 1
    values = np.array([1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -1 - step / 2, 0.0])
    rounded = from_bfloat16_bits(bfloat16_bits(values))
    np.testing.assert_array_equal(rounded, [1.0, 1 + 2 * step, 1 + step, -1.0, 0.0])


def test_random_checkpoint_is_reproducible_and_has_every_feature(tmp_path: Path) -> None:
    config = small_config()
    first = ref.random_checkpoint(tmp_path / "a", config, seed=1)
    assert first == ref.random_checkpoint(tmp_path / "b", config, seed=1)
    assert first != ref.random_checkpoint(tmp_path / "c", config, seed=2)
    # Recorded with numpy 2.4: if this changes, every recorded fixture is void.
    assert first == "c1efdc4be96bf9fbf2d5e550bfe65bfc4118dd701a919624e36e161d49531ba8"
    same = (tmp_path / "a/model.safetensors").read_bytes()
    assert same == (tmp_path / "b/model.safetensors").read_bytes()
    _, weights = ref.load_reference(tmp_path / "a")
    for name, array in weights.items():
        assert array.std() > 0.02, name
    router = weights["model.layers.1.mlp.gate.weight"]
    assert np.any(router != from_bfloat16_bits(bfloat16_bits(router)))


def test_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    """The safetensors package reads the FP32 tensors; BF16 numpy does not know."""
    numpy_reader = pytest.importorskip("safetensors")
    ref.random_checkpoint(tmp_path, small_config(), seed=1)
    _, weights = ref.load_reference(tmp_path)
    with numpy_reader.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert set(file.keys()) == set(weights)
        name = "model.layers.1.mlp.gate.weight"
        np.testing.assert_array_equal(file.get_tensor(name), weights[name].astype(np.float32))
        assert file.get_slice("lm_head.weight").get_dtype() == "BF16"


def test_fused_experts_read_as_separate_ones(tmp_path: Path) -> None:
    config = small_config()
    tensors = ref.random_tensors(config, seed=1)
    ref.random_checkpoint(tmp_path / "plain", config, seed=1)
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            kind: np.stack([tensors.pop(f"{prefix}{e}.{kind}_proj.weight") for e in range(8)])
            for kind in ("gate", "up", "down")
        }
        tensors[prefix + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[prefix + "down_proj"] = parts["down"]
    fused = tmp_path / "fused"
    fused.mkdir()
    (fused / "config.json").write_text(json.dumps(config))
    write_safetensors(fused / "model.safetensors", tensors)
    _, plain = ref.load_reference(tmp_path / "plain")
    _, split = ref.load_reference(fused)
    assert plain.keys() == split.keys()
    assert all(np.array_equal(plain[name], split[name]) for name in plain)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    config = small_config()
    ref.random_checkpoint(tmp_path, config, seed=1)
    tensors = ref.random_tensors(config, seed=1)
    extra = tensors | {"model.layers.0.mlp.spare": tensors["model.norm.weight"]}
    write_safetensors(tmp_path / "model.safetensors", extra)
    with pytest.raises(ValueError, match=r"mlp\.spare"):
        ref.load_reference(tmp_path)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    kept = tensors.pop(name)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=name):
        ref.load_reference(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", tensors | {name: kept[:-1]})
    with pytest.raises(ValueError, match=name):
        ref.load_reference(tmp_path)
