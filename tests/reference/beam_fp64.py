"""Independent reference of Beam in numpy FP64, with explicit loops and no roundings.

It answers one question for the tests: what numbers does the architecture itself give? So it
imports nothing of workbench and no torch, keeps no cache, batches nothing, and walks tokens,
heads and experts one at a time. Projections are plain matrix products.

Shapes: T tokens, H hidden_size, Hq query heads, Hkv key/value heads, D head_dim, E experts,
k experts per token, L layers, V vocabulary. Every array is float64 unless stated.

Checkpoints are Hugging Face folders: `config.json` and `model.safetensors`, or an index with
shards.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .safetensors_numpy import bfloat16_bits, read_safetensors, write_safetensors

SSMAX_LENGTH = 2048.0
SSMAX_EXPONENT = 0.1

_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


# ---------------------------------------------------------------------------------------------
# Checkpoint files
# ---------------------------------------------------------------------------------------------


def _split_fused_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace `experts.gate_up_proj [E,2*Im,H]` and `experts.down_proj [E,H,Im]` by experts."""
    plain = {}
    for name, array in weights.items():
        if name.endswith(".mlp.experts.gate_up_proj"):
            prefix, half = name.removesuffix("gate_up_proj"), array.shape[1] // 2
            for expert, rows in enumerate(array):
                plain[f"{prefix}{expert}.gate_proj.weight"] = rows[:half]
                plain[f"{prefix}{expert}.up_proj.weight"] = rows[half:]
        elif name.endswith(".mlp.experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert, rows in enumerate(array):
                plain[f"{prefix}{expert}.down_proj.weight"] = rows
        else:
            plain[name] = array
    return plain


def load_reference(folder: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a checkpoint folder: `(config.json as a dict, tensors as float64 by HF name)`.

    Raises ValueError when a tensor that the config asks for is missing, has another shape, or
    is one the config does not know.
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    index = folder / _INDEX_FILE
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = [_WEIGHTS_FILE]
    weights: dict[str, np.ndarray] = {}
    for file in files:
        weights.update(read_safetensors(folder / file))
    weights = _split_fused_experts(weights)
    expected = expected_tensors(config)
    for name, (shape, _) in expected.items():
        if name not in weights:
            raise ValueError(f"{folder}: tensor {name} is missing.")
        if weights[name].shape != shape:
            raise ValueError(f"{folder}: tensor {name} is {weights[name].shape}, not {shape}.")
    if extra := sorted(set(weights) - set(expected)):
        raise ValueError(f"{folder}: unknown tensors {extra[:3]}.")
    return config, weights


# ---------------------------------------------------------------------------------------------
# Config
# ---------------------------------------------------------------------------------------------


def head_dim(config: Mapping[str, Any]) -> int:
    """`head_dim`, or hidden_size / heads when it is absent or null."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def attention_type(config: Mapping[str, Any], layer: int) -> str:
    """`full_attention` or `sliding_attention` of one layer; default all sliding."""
    types = config.get("layer_types")
    return types[layer] if types else "sliding_attention"


def mlp_type(config: Mapping[str, Any], layer: int) -> str:
    """`dense` or `sparse` of one layer; default all sparse."""
    types = config.get("mlp_layer_types")
    return types[layer] if types else "sparse"


def rope_theta(config: Mapping[str, Any]) -> float:
    """RoPE base from either form of `rope_parameters`; default 10000."""
    parameters = config.get("rope_parameters") or {}
    if parameters and set(parameters) <= {"full_attention", "sliding_attention"}:
        (parameters,) = [entry for entry in parameters.values() if entry is not None]
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type {parameters['rope_type']} is not part of Beam.")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not part of Beam: whole heads are rotated.")
    return float(parameters.get("rope_theta", 10000.0))


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every tensor of a checkpoint: name -> (shape, safetensors dtype of a BF16 checkpoint)."""
    hidden, vocab, width = config["hidden_size"], config["vocab_size"], head_dim(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    table: dict[str, tuple[tuple[int, ...], str]] = {
        "model.embed_tokens.weight": ((vocab, hidden), "BF16"),
        "model.norm.weight": ((hidden,), "BF16"),
        "lm_head.weight": ((vocab, hidden), "BF16"),
    }

    def swiglu(prefix: str, inner: int) -> None:
        table[prefix + "gate_proj.weight"] = ((inner, hidden), "BF16")
        table[prefix + "up_proj.weight"] = ((inner, hidden), "BF16")
        table[prefix + "down_proj.weight"] = ((hidden, inner), "BF16")

    for layer in range(config["num_hidden_layers"]):
        here = f"model.layers.{layer}."
        table[here + "self_attn.q_proj.weight"] = ((heads * width, hidden), "BF16")
        table[here + "self_attn.k_proj.weight"] = ((kv_heads * width, hidden), "BF16")
        table[here + "self_attn.v_proj.weight"] = ((kv_heads * width, hidden), "BF16")
        table[here + "self_attn.gate_proj.weight"] = ((heads * width, hidden), "BF16")
        table[here + "self_attn.o_proj.weight"] = ((hidden, heads * width), "BF16")
        table[here + "self_attn.q_norm.weight"] = ((width,), "BF16")
        table[here + "self_attn.k_norm.weight"] = ((width,), "BF16")
        table[here + "self_attn.gate_bias"] = ((heads,), "BF16")
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            table[f"{here}{norm}_layernorm.weight"] = ((hidden,), "BF16")
        if mlp_type(config, layer) == "dense":
            swiglu(here + "mlp.", config["intermediate_size"])
        else:
            experts = config["num_experts"]
            table[here + "mlp.gate.weight"] = ((experts, hidden), "F32")
            table[here + "mlp.gate.e_score_correction_bias"] = ((experts,), "F32")
            for expert in range(experts):
                swiglu(f"{here}mlp.experts.{expert}.", config["moe_intermediate_size"])
    return table


# ---------------------------------------------------------------------------------------------
# Random checkpoints
# ---------------------------------------------------------------------------------------------


def _bell(generator: np.random.PCG64, count: int) -> np.ndarray:
    """Bell-shaped numbers of mean 0 and variance 1, the same bits on every machine.

    The raw PCG64 stream is fixed for ever and the sum of four uniforms needs exact operations
    only, unlike `standard_normal`, whose stream may change and whose tail calls libm.
    """
    uniform = (generator.random_raw(4 * count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (uniform.reshape(4, count).sum(axis=0) - 2.0) * math.sqrt(3.0)


def _scale(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """(mean, standard deviation) that make every feature of Beam count in the output."""
    if name.endswith("norm.weight"):
        return 1.0, 0.25
    if name.endswith("gate_bias"):
        return 0.0, 1.0
    if name.endswith("e_score_correction_bias"):
        return 0.0, 0.05  # wide enough to change choices, narrow enough to kill no expert
    if name == "model.embed_tokens.weight":
        return 0.0, 1.0
    if name == "lm_head.weight":
        return 0.0, 4.0 / math.sqrt(shape[1])  # logits large enough to feel the softcap
    return 0.0, 1.0 / math.sqrt(shape[1])


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Stored form of a random checkpoint: uint16 BF16 bits, float32 for the router."""
    tensors = {}
    for name, (shape, dtype) in expected_tensors(config).items():
        # One stream a tensor, so that a tensor does not depend on the ones before it.
        generator = np.random.PCG64([seed, zlib.crc32(name.encode())])
        mean, deviation = _scale(name, shape)
        values = (mean + deviation * _bell(generator, math.prod(shape))).reshape(shape)
        tensors[name] = bfloat16_bits(values) if dtype == "BF16" else values.astype(np.float32)
    return tensors


def random_checkpoint(folder: str | Path, config: Mapping[str, Any], seed: int) -> str:
    """Write a random BF16 checkpoint in Hugging Face names; returns the weights' SHA-256.

    Norm weights, gate biases, router and correction bias are all non-trivial. The same config
    and seed give the same bytes everywhere, so fixtures store the hash and not the weights.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    complete = {"model_type": "beam", "architectures": ["BeamForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(complete, indent=2) + "\n")
    tensors = random_tensors(config, seed)
    write_safetensors(folder / _WEIGHTS_FILE, tensors)
    return weights_sha256(tensors)


def weights_sha256(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names and little-endian bytes of stored tensors, in sorted name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name]
        digest.update(name.encode())
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------
# Arithmetic
# ---------------------------------------------------------------------------------------------


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow for either sign."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up."""
    return gate * sigmoid(gate) * up


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def depth_scaled_add(branch: np.ndarray, stream: np.ndarray, n: int) -> np.ndarray:
    """branch / sqrt(n) + stream * sqrt((n - 1) / n): unit variance in, unit variance out."""
    return branch / math.sqrt(n) + stream * math.sqrt((n - 1) / n)


def ssmax_factor(position: int) -> float:
    """Scale of a query of a full-attention layer at a position counted from 0."""
    return (1.0 + (position + 1) / SSMAX_LENGTH) ** SSMAX_EXPONENT


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """RoPE of one head vector [D]: dimension j turns with j + D/2 by position * theta^(-2j/D)."""
    half = x.shape[0] // 2
    out = np.empty_like(x)
    for j in range(half):
        angle = position * theta ** (-2.0 * j / x.shape[0])
        cosine, sine = math.cos(angle), math.sin(angle)
        out[j] = x[j] * cosine - x[j + half] * sine
        out[j + half] = x[j + half] * cosine + x[j] * sine
    return out


def first_visible(position: int, window: int | None) -> int:
    """First key that a query sees; `window` keys up to itself, or all when it is None."""
    return 0 if window is None else max(0, position - window + 1)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over a vector."""
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def softcap(logits: np.ndarray, cap: float | None) -> np.ndarray:
    """cap * tanh(logits / cap); unchanged when cap is None."""
    return logits if cap is None else cap * np.tanh(logits / cap)


# ---------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------


def attention_block(
    config: Mapping[str, Any], weights: Mapping[str, np.ndarray], layer: int, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Gated attention of one layer on its normed input x [T, H], positions from 0.

    Returns `(output after o_proj [T, H], probabilities [Hq, T, T])`.
    """
    here = f"model.layers.{layer}.self_attn."
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = head_dim(config)
    eps, theta = config.get("rms_norm_eps", 1e-6), rope_theta(config)
    sliding = attention_type(config, layer) == "sliding_attention"
    window = config["sliding_window"] if sliding else None
    tokens = x.shape[0]

    def project(name: str, count: int) -> np.ndarray:
        return (x @ weights[f"{here}{name}_proj.weight"].T).reshape(tokens, count, width)

    q = rms_norm(project("q", heads), weights[here + "q_norm.weight"], eps)
    k = rms_norm(project("k", kv_heads), weights[here + "k_norm.weight"], eps)
    v = project("v", kv_heads)
    gate = project("gate", heads)
    for position in range(tokens):
        for head in range(heads):
            if sliding:
                q[position, head] = rotate(q[position, head], position, theta)
            else:
                q[position, head] *= ssmax_factor(position)
        for head in range(kv_heads):
            if sliding:
                k[position, head] = rotate(k[position, head], position, theta)

    probabilities = np.zeros((heads, tokens, tokens))
    output = np.empty((tokens, heads, width))
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        for position in range(tokens):
            seen = slice(first_visible(position, window), position + 1)
            scores = k[seen, kv_head] @ q[position, head] / math.sqrt(width)
            probabilities[head, position, seen] = softmax(scores)
            mixed = probabilities[head, position, seen] @ v[seen, kv_head]
            bias = weights[here + "gate_bias"][head]
            output[position, head] = mixed * sigmoid(gate[position, head] + bias)
    return output.reshape(tokens, -1) @ weights[here + "o_proj.weight"].T, probabilities


def select_experts(config: Mapping[str, Any], biased: np.ndarray) -> list[int]:
    """The k chosen experts by descending biased score; the lower id wins a tie."""
    experts, chosen = len(biased), config["num_experts_per_tok"]
    groups, kept = config.get("n_group"), config.get("topk_group")
    if (groups is None) != (kept is None):
        raise ValueError("n_group and topk_group must be both set or both null.")
    candidates = list(range(experts))
    if groups is not None:
        size = experts // groups
        ranks = []
        for group in range(groups):
            best = sorted(biased[group * size : (group + 1) * size], reverse=True)[:2]
            ranks.append(sum(best))
        best_groups = sorted(range(groups), key=lambda group: (-ranks[group], group))[:kept]
        candidates = [expert for expert in candidates if expert // size in best_groups]
    if len(candidates) < chosen:
        raise ValueError(f"{len(candidates)} candidate experts cannot fill {chosen} places.")
    return sorted(candidates, key=lambda expert: (-biased[expert], expert))[:chosen]


def route(
    config: Mapping[str, Any], weights: Mapping[str, np.ndarray], layer: int, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Router of one sparse layer on x [T, H].

    Returns `(ids int64 [T, k] by descending biased score, weights [T, k])`. The weights are the
    unbiased scores, divided by their sum when `norm_topk_prob`, without routed_scaling_factor.
    """
    here = f"model.layers.{layer}.mlp.gate."
    bias = weights[here + "e_score_correction_bias"]
    ids, shares = [], []
    for token in x:
        scores = sigmoid(weights[here + "weight"] @ token)
        chosen = select_experts(config, scores + bias)
        share = scores[chosen]
        if config.get("norm_topk_prob", True):
            share = share / share.sum()
        ids.append(chosen)
        shares.append(share)
    return np.array(ids, dtype=np.int64), np.array(shares)


def _experts(
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    layer: int,
    x: np.ndarray,
    ids: np.ndarray,
    shares: np.ndarray,
) -> np.ndarray:
    """Weighted sum of the chosen experts, times routed_scaling_factor."""
    here = f"model.layers.{layer}.mlp.experts."
    out = np.zeros_like(x)
    for position, token in enumerate(x):
        for expert, share in zip(ids[position], shares[position], strict=True):
            out[position] += share * _mlp(weights, f"{here}{expert}.", token)
    return out * config.get("routed_scaling_factor", 1.0)


def _mlp(weights: Mapping[str, np.ndarray], prefix: str, x: np.ndarray) -> np.ndarray:
    gate = x @ weights[prefix + "gate_proj.weight"].T
    up = x @ weights[prefix + "up_proj.weight"].T
    return swiglu(gate, up) @ weights[prefix + "down_proj.weight"].T


def moe_block(
    config: Mapping[str, Any], weights: Mapping[str, np.ndarray], layer: int, x: np.ndarray
) -> np.ndarray:
    """Sparse MLP of one layer on x [T, H]: router, experts, routed_scaling_factor -> [T, H]."""
    x = np.asarray(x, dtype=np.float64)
    return _experts(config, weights, layer, x, *route(config, weights, layer, x))


def forward(
    config: Mapping[str, Any], weights: Mapping[str, np.ndarray], token_ids: Sequence[int]
) -> dict[str, Any]:
    """One sequence from position 0 through the whole model.

    Returns a dict:
    - `logits` [T, V], after the softcap;
    - `hidden`: list of L + 1 arrays [T, H], the residual stream after the embedding and after
      every layer (before the final norm);
    - `attention`: layer -> probabilities [Hq, T, T];
    - `router`: sparse layer -> (ids [T, k], weights [T, k]), see `route`;
    - `moe_output`: sparse layer -> [T, H], the MoE block before the post-norm.
    """
    eps = config.get("rms_norm_eps", 1e-6)
    stream = weights["model.embed_tokens.weight"][np.asarray(token_ids, dtype=np.int64)]
    result: dict[str, Any] = {"hidden": [stream], "attention": {}, "router": {}, "moe_output": {}}
    for layer in range(config["num_hidden_layers"]):
        norms = {
            name: weights[f"model.layers.{layer}.{name}_layernorm.weight"]
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        }
        x = rms_norm(stream, norms["input"], eps)
        branch, result["attention"][layer] = attention_block(config, weights, layer, x)
        branch = rms_norm(branch, norms["post_attention"], eps)
        stream = depth_scaled_add(branch, stream, 2 * (layer + 1))

        x = rms_norm(stream, norms["pre_feedforward"], eps)
        if mlp_type(config, layer) == "dense":
            branch = _mlp(weights, f"model.layers.{layer}.mlp.", x)
        else:
            ids, shares = route(config, weights, layer, x)
            branch = _experts(config, weights, layer, x, ids, shares)
            result["router"][layer] = (ids, shares)
            result["moe_output"][layer] = branch
        branch = rms_norm(branch, norms["post_feedforward"], eps)
        stream = depth_scaled_add(branch, stream, 2 * (layer + 1) + 1)
        result["hidden"].append(stream)
    final = rms_norm(stream, weights["model.norm.weight"], eps)
    logits = final @ weights["lm_head.weight"].T
    result["logits"] = softcap(logits, config.get("final_logit_softcapping"))
    return result
