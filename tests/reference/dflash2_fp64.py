"""Independent reference of the DFlash2 drafter in numpy FP64, one request, loops, no roundings.

It imports nothing of workbench and no torch, keeps no ring and batches nothing: the context is a
list of positions from 0, and every row asks of every key whether it may see it. Projections are
plain matrix products.

Shapes: T context tokens, H hidden_size, n target layers read, L drafter layers, A query heads, G
key/value heads, D head_dim, Q rows of a block, N = Q - 1 mask rows, K candidates, V vocabulary.
Every array is float64 unless stated. Config is the drafter's `config.json`, weights are by its
names; embedding and head are the target's.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .beam_fp64 import _bell, rms_norm, rotate, softcap, softmax, swiglu, weights_sha256
from .safetensors_numpy import bfloat16_bits, read_safetensors, write_safetensors

Context = list[tuple[np.ndarray, np.ndarray]]  # of each layer: keys and values [T, G, D]


# ---------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter's checkpoint: name -> shape."""
    nested = config["dflash_config"]
    hidden, width, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    query = config["num_attention_heads"] * width
    key = config["num_key_value_heads"] * width
    taps = nested["conv_kernel_size"]
    groups = hidden // nested["conv_group_size"]
    book = (config["vocab_size"], nested["selector_rank"])
    table: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(nested["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.predecessor_codebook": book,
        "candidate_selector.successor_codebook": book,
        "candidate_selector.hidden_projection.weight": (nested["selector_rank"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        here = f"layers.{layer}."
        table[here + "input_layernorm.weight"] = (hidden,)
        table[here + "post_attention_layernorm.weight"] = (hidden,)
        table[here + "self_attn.q_proj.weight"] = (query, hidden)
        table[here + "self_attn.k_proj.weight"] = (key, hidden)
        table[here + "self_attn.v_proj.weight"] = (key, hidden)
        table[here + "self_attn.o_proj.weight"] = (hidden, query)
        table[here + "self_attn.q_norm.weight"] = (width,)
        table[here + "self_attn.k_norm.weight"] = (width,)
        table[here + "mlp.gate_proj.weight"] = (inner, hidden)
        table[here + "mlp.up_proj.weight"] = (inner, hidden)
        table[here + "mlp.down_proj.weight"] = (hidden, inner)
        for conv in ("attention_conv", "mlp_conv"):
            table[f"{here}{conv}.base_kernel"] = (2, taps, hidden)
            table[f"{here}{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return table


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """A random checkpoint as uint16 BF16 bits, in which every part counts in the output.

    The same config and seed give the same bits everywhere.
    """
    hidden, rank = config["hidden_size"], config["dflash_config"]["selector_rank"]
    tensors = {}
    for name, shape in expected_tensors(config).items():
        mean, deviation = np.zeros(1), 1.0 / math.sqrt(shape[-1])
        if name.endswith("norm.weight"):
            mean, deviation = np.ones(1), 0.25
        elif name.endswith("base_kernel"):  # the first tap carries most, the others a part
            mean, deviation = np.array([1.0] + [0.3] * (shape[1] - 1))[None, :, None], 0.3
        elif name.endswith("kernel_projection.weight"):
            deviation = 0.3 / math.sqrt(hidden)
        elif name.endswith("codebook"):
            deviation = 1.0
        elif name.endswith("hidden_projection.weight"):  # pair terms as large as logits differ
            deviation = 2.0 / math.sqrt(hidden * rank)
        # One stream a tensor, so that a tensor does not depend on the ones before it.
        generator = np.random.PCG64([seed, zlib.crc32(name.encode())])
        noise = _bell(generator, math.prod(shape)).reshape(shape)
        tensors[name] = bfloat16_bits(mean + deviation * noise)
    return tensors


def write_drafter(
    folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> str:
    """Write a drafter's folder; returns the SHA-256 of its weights."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_safetensors(folder / "model.safetensors", tensors)
    return weights_sha256(tensors)


def load_reference(folder: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read a drafter's folder: `(config.json as a dict, tensors as float64 by name)`.

    Raises ValueError unless names and shapes are exactly those that the config asks for.
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    weights = read_safetensors(folder / "model.safetensors")
    found = {name: array.shape for name, array in weights.items()}
    if found != expected_tensors(config):
        raise ValueError(f"{folder}: tensors are not those of its config.")
    return config, weights


# ---------------------------------------------------------------------------------------------
# Context and block
# ---------------------------------------------------------------------------------------------


def rope_theta(config: Mapping[str, Any]) -> float:
    """RoPE base."""
    return float(config["rope_parameters"]["rope_theta"])


def context(
    config: Mapping[str, Any], weights: Mapping[str, np.ndarray], streams: np.ndarray
) -> Context:
    """Target streams [T, n * H] of positions 0 .. T-1 -> keys and values of every layer."""
    eps, width = config["rms_norm_eps"], config["head_dim"]
    normed = rms_norm(streams @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    layers = []
    for layer in range(config["num_hidden_layers"]):
        here = f"layers.{layer}.self_attn."
        shape = (len(streams), config["num_key_value_heads"], width)
        k = (normed @ weights[here + "k_proj.weight"].T).reshape(shape)
        v = (normed @ weights[here + "v_proj.weight"].T).reshape(shape)
        k = rms_norm(k, weights[here + "k_norm.weight"], eps)
        for position in range(shape[0]):
            for head in range(shape[1]):
                k[position, head] = rotate(k[position, head], position, rope_theta(config))
        layers.append((k, v))
    return layers


def convolve(
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    prefix: str,
    side: int,
    source: np.ndarray,
    x: np.ndarray,
) -> np.ndarray:
    """One side of a grouped dynamic convolution over one block: x [Q, H] -> [Q, H].

    `source` [Q, H] is the sublayer's input, which the coefficients of both sides come from.
    """
    nested = config["dflash_config"]
    taps, size = nested["conv_kernel_size"], nested["conv_group_size"]
    groups = config["hidden_size"] // size
    base = weights[prefix + ".base_kernel"]
    delta = (source @ weights[prefix + ".kernel_projection.weight"].T).reshape(-1, 2, taps, groups)
    out = np.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(taps, row + 1)):
            for channel in range(config["hidden_size"]):
                coefficient = base[side, tap, channel] + delta[row, side, tap, channel // size]
                out[row, channel] += coefficient * x[row - tap, channel]
    return out


def sees(window: int, limit: int, row: int, key: int) -> bool:
    """Whether the row at position `row` sees the key at position `key` (section 1.5).

    The window is symmetric and measured from the row's own position. Keys from `limit` on are
    outside the attention length; what a row out there sees does not matter.
    """
    return abs(key - row) <= window - 1 and key < limit


def attention(
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    layer: int,
    h: np.ndarray,
    old: tuple[np.ndarray, np.ndarray],
    start: int,
    limit: int,
) -> np.ndarray:
    """Attention of one block [Q, H] at positions from `start` over the context before it."""
    here = f"layers.{layer}.self_attn."
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width, eps, theta = config["head_dim"], config["rms_norm_eps"], rope_theta(config)

    def project(name: str, count: int) -> np.ndarray:
        return (h @ weights[f"{here}{name}_proj.weight"].T).reshape(len(h), count, width)

    q = rms_norm(project("q", heads), weights[here + "q_norm.weight"], eps)
    k = rms_norm(project("k", kv_heads), weights[here + "k_norm.weight"], eps)
    v = project("v", kv_heads)
    for row in range(len(h)):
        at = min(start + row, limit - 1)
        q[row] = [rotate(x, at, theta) for x in q[row]]
        k[row] = [rotate(x, at, theta) for x in k[row]]
    keys = np.concatenate((old[0][:start], k))
    values = np.concatenate((old[1][:start], v))
    output = np.zeros((len(h), heads, width))
    for row in range(len(h)):
        seen = [
            key
            for key in range(len(keys))
            if sees(config["sliding_window"], limit, start + row, key)
        ] or [start]
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = keys[seen, kv_head] @ q[row, head] / math.sqrt(width)
            output[row, head] = softmax(scores) @ values[seen, kv_head]
    return output.reshape(len(h), -1) @ weights[here + "o_proj.weight"].T


def block(
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    embedding: np.ndarray,
    old: Context,
    anchor: int,
    start: int,
    query_len: int,
    limit: int | None = None,
    ids: Sequence[int] | None = None,
) -> np.ndarray:
    """The anchor at position `start` and `query_len - 1` masks -> final-normed states [Q, H].

    Args:
        old: the context; what it has of positions from `start` on is not looked at.
        limit: the context limit, by default the config's.
        ids: all Q input tokens, instead of the anchor and masks.
    """
    limit = limit or config["max_position_embeddings"]
    eps, mask = config["rms_norm_eps"], config["dflash_config"]["mask_token_id"]
    r = embedding[list(ids) if ids is not None else [anchor] + [mask] * (query_len - 1)]
    for layer in range(config["num_hidden_layers"]):
        here = f"layers.{layer}."
        source = rms_norm(r, weights[here + "input_layernorm.weight"], eps)
        x = convolve(config, weights, here + "attention_conv", 0, source, source)
        x = attention(config, weights, layer, x, old[layer], start, limit)
        r = r + convolve(config, weights, here + "attention_conv", 1, source, x)
        source = rms_norm(r, weights[here + "post_attention_layernorm.weight"], eps)
        x = convolve(config, weights, here + "mlp_conv", 0, source, source)
        gate = x @ weights[here + "mlp.gate_proj.weight"].T
        up = x @ weights[here + "mlp.up_proj.weight"].T
        x = swiglu(gate, up) @ weights[here + "mlp.down_proj.weight"].T
        r = r + convolve(config, weights, here + "mlp_conv", 1, source, x)
    return rms_norm(r, weights["norm.weight"], eps)


# ---------------------------------------------------------------------------------------------
# Candidates, edges, walk
# ---------------------------------------------------------------------------------------------


def candidates(
    config: Mapping[str, Any], head: np.ndarray, hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mask rows [N, H] -> (ids int64, softcapped logits), both [N, K], best first."""
    nested = config["dflash_config"]
    logits = hidden @ head.T
    ids = np.argsort(-logits, axis=1, kind="stable")[:, : nested["selector_top_k"]]
    unary = softcap(np.take_along_axis(logits, ids, 1), nested["final_logit_softcapping"])
    return ids, unary


def edges(
    weights: Mapping[str, np.ndarray],
    hidden: np.ndarray,
    ids: np.ndarray,
    unary: np.ndarray,
    anchor: int,
) -> np.ndarray:
    """Scores [N, K, K]: step, candidate one step back (the anchor at step 0), candidate."""
    name = "candidate_selector."
    before = weights[name + "predecessor_codebook"]
    after = weights[name + "successor_codebook"]
    steps, top_k = ids.shape
    scores = np.zeros((steps, top_k, top_k))
    for step in range(steps):
        g = weights[name + "hidden_projection.weight"] @ hidden[step]
        for previous in range(top_k):
            token = anchor if step == 0 else ids[step - 1, previous]
            for candidate in range(top_k):
                pair = np.sum(before[token] * g * after[ids[step, candidate]])
                scores[step, previous, candidate] = pair + unary[step, candidate]
    return scores


def walk(
    scores: np.ndarray,
    ids: np.ndarray,
    temperature: float = 0.0,
    noise: np.ndarray | None = None,
) -> tuple[list[int], np.ndarray]:
    """The path and the scores realized along it [N, K]; greedy unless heat and noise are given."""
    at, tokens, realized = 0, [], []
    for step in range(len(ids)):
        line = scores[step, at]
        value = line if noise is None or temperature == 0 else line / temperature + noise[step]
        at = int(np.argmax(value))  # the first of equal ones
        tokens.append(int(ids[step, at]))
        realized.append(line)
    return tokens, np.array(realized)
