"""The float64 oracle against the numpy reference of the model, and against numbers worked by hand.

Everything else is judged by the oracle, so it is held against code that shares nothing with it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import beam_fp64
from workbench.kernels import oracle
from workbench.kernels.reach import Reach, Spans
from workbench.kernels.reference import rope_table

F64 = torch.float64
EXACT = 1e-12


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def near(found: Tensor, expected: Any, tolerance: float = EXACT) -> None:
    expected = torch.as_tensor(np.asarray(expected), dtype=F64)
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < tolerance


def test_rms_norm() -> None:
    # rms of (3, 4) is sqrt(12.5).
    found = oracle.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 10.0]), 0.0)["y"]
    near(found, [[6 / math.sqrt(12.5), 40 / math.sqrt(12.5)]])
    x, weight = normal(5, 12), normal(12, seed=1)
    near(oracle.rms_norm(x, weight, 0.3)["y"], beam_fp64.rms_norm(x.numpy(), weight.numpy(), 0.3))


@pytest.mark.parametrize("n", [2, 51])
def test_boundary(n: int) -> None:
    h, a, post, after = normal(4, 8), normal(4, 8, seed=1), normal(8, seed=2), normal(8, seed=3)
    scale = (1 / math.sqrt(n), math.sqrt((n - 1) / n))
    found = oracle.boundary(h, a, post, scale, after, 1e-6)
    branch = beam_fp64.rms_norm(a.numpy(), post.numpy(), 1e-6)
    stream = beam_fp64.depth_scaled_add(branch, h.numpy(), n)
    near(found["h"], stream)
    near(found["x"], beam_fp64.rms_norm(stream, after.numpy(), 1e-6))


def test_products() -> None:
    x = torch.tensor([[1.0, 2.0]])
    near(oracle.qkvg(x, torch.tensor([[3.0, 4.0], [5.0, -6.0]]))["y"], [[11.0, -7.0]])
    # gate = 2, up = 3: silu(2) * 3, then down by 0.5.
    found = oracle.dense_mlp(x, torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([[0.5]]))
    near(found["y"], [[2 / (1 + math.exp(-2)) * 3 * 0.5]])


@pytest.mark.parametrize("full", [False, True])
def test_qkv_write(full: bool) -> None:
    heads, kv_heads, depth, n = 4, 2, 6, 5
    packed = normal(n, 2 * (heads + kv_heads) * depth)
    weight, positions = normal(2, depth, seed=1), torch.tensor([0, 1, 7, 100, 4000])
    rows = torch.tensor([3, -1, 0, 6, 2])
    store = torch.zeros(8, kv_heads, depth, dtype=F64)
    rope = rope_table(5000, depth, 10000.0, "cpu")
    found = oracle.qkv_write(
        packed, weight, positions, rope, store, store, rows, heads=heads, full=full, eps=1e-6
    )
    q, k, v, _ = np.split(packed.numpy().reshape(n, -1, depth), [4, 6, 8], axis=1)
    q = beam_fp64.rms_norm(q, weight[0].numpy(), 1e-6)
    k = beam_fp64.rms_norm(k, weight[1].numpy(), 1e-6)
    for i, position in enumerate(positions.tolist()):
        if full:
            q[i] *= beam_fp64.ssmax_factor(position)
        else:
            q[i] = [beam_fp64.rotate(one, position, 10000.0) for one in q[i]]
            k[i] = [beam_fp64.rotate(one, position, 10000.0) for one in k[i]]
    written = [0, 2, 3, 4]
    near(found["q"], q, 1e-6)  # the table is float32
    near(found["k"], k[written], 1e-6)
    near(found["v"], v[written])
    assert float(store.abs().max()) == 0, "an oracle writes nothing"


def test_a_float8_cache_holds_what_is_left_after_the_scale() -> None:
    packed = torch.tensor([[1.0, 1.0, 2.0, 2.0, 3.0, -900.0, 0.0, 0.0]])
    store = torch.zeros(1, 1, 2, dtype=torch.float8_e4m3fn)
    found = oracle.qkv_write(
        packed, torch.ones(2, 2), torch.tensor([0]), rope_table(1, 2, 10000.0, "cpu"), store,
        store, None, heads=1, full=False, eps=0.0, k_scale=0.5, v_scale=2.0,
    )  # fmt: skip
    near(found["q"], [[[1.0, 1.0]]])
    near(found["k"], [[[2.0, 2.0]]])  # normed to 1, over 0.5
    near(found["v"], [[[1.5, -448.0]]])  # over 2, clamped


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> np.ndarray:
    """Query ``[A, D]`` over ``[S, G, D]`` with the functions of the numpy reference."""
    out = np.empty(q.shape)
    for head in range(q.shape[0]):
        group = head // (q.shape[0] // k.shape[1])
        scores = k[:, group].numpy() @ q[head].numpy() / math.sqrt(q.shape[1])
        out[head] = beam_fp64.softmax(scores) @ v[:, group].numpy()
    return out


@pytest.mark.parametrize("window", [None, 1, 4])
def test_decode_attention_over_scattered_positions(window: int | None) -> None:
    """Keys are laid out by position first, then put where the cache's rule says."""
    heads, groups, depth, tokens = 4, 2, 8, 3
    rows = 20 if window is None else window + tokens - 1
    first = torch.tensor([0, 13])
    slots = torch.tensor([2, 0])
    k_cache, v_cache = (torch.full((3, rows, groups, depth), 1e4, dtype=F64) for _ in range(2))
    q = normal(2, tokens, heads, depth, seed=9)
    expected = np.empty(q.shape)
    for b in range(2):
        end = int(first[b]) + tokens
        keys, values = normal(end, groups, depth, seed=b), normal(end, groups, depth, seed=b + 5)
        for position in range(max(0, end - rows), end):
            k_cache[slots[b], position % rows] = keys[position]
            v_cache[slots[b], position % rows] = values[position]
        for t in range(tokens):
            at = int(first[b]) + t
            low = beam_fp64.first_visible(at, window)
            expected[b, t] = softmax_attention(q[b, t], keys[low : at + 1], values[low : at + 1])
    reach = Reach(slots, first, span=rows if window else 16, window=window)
    # The oracle reads caches through float32, as those in use are.
    near(oracle.decode_attention(q, k_cache, v_cache, reach)["o"], expected, 1e-5)
    halved = oracle.decode_attention(q, 2 * k_cache, 4 * v_cache, reach, k_scale=0.5, v_scale=0.25)
    near(halved["o"], expected, 1e-5)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_prefill_attention(window: int | None) -> None:
    queries, keys = [3, 0, 1, 4], [5, 2, 1, 4]
    q, k, v = normal(8, 4, 6), normal(12, 2, 6, seed=1), normal(12, 2, 6, seed=2)
    expected, q_at, k_at = np.empty(q.shape), 0, 0
    for n, s in zip(queries, keys, strict=True):
        for t in range(n):
            at = s - n + t
            seen = slice(k_at + beam_fp64.first_visible(at, window), k_at + at + 1)
            expected[q_at + t] = softmax_attention(q[q_at + t], k[seen], v[seen])
        q_at, k_at = q_at + n, k_at + s
    near(oracle.prefill_attention(q, k, v, Spans(queries, keys, window))["o"], expected)


def test_attention_of_one_key_is_its_value() -> None:
    q, k, v = normal(1, 2, 4), normal(1, 1, 4, seed=1), normal(1, 1, 4, seed=2)
    near(oracle.prefill_attention(q, k, v, Spans([1], [1], None))["o"], v.expand(1, 2, 4).numpy())


def test_output_gate_and_softcap() -> None:
    o, gate = torch.tensor([[[2.0], [4.0]]]), torch.tensor([[[1.0], [-1.0]]])
    found = oracle.output_gate(o, gate, torch.tensor([-1.0, 0.0]))["y"]
    near(found, [[[1.0], [4 / (1 + math.e)]]])
    near(oracle.softcap(torch.tensor([[0.0, 30.0, -900.0]]), 30.0)["y"],
         [[0.0, 30 * math.tanh(1), 30 * math.tanh(-30)]])  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_experts(scale: float) -> None:
    hidden, width, experts = 6, 4, 5
    gate_up, down = normal(experts, 2 * width, hidden), normal(experts, width, hidden, seed=1)
    weights = {}
    for e in range(experts):
        here = f"model.layers.0.mlp.experts.{e}."
        weights[here + "gate_proj.weight"] = gate_up[e, :width].numpy()
        weights[here + "up_proj.weight"] = gate_up[e, width:].numpy()
        weights[here + "down_proj.weight"] = down[e].T.numpy()
    x = normal(3, hidden, seed=2)
    ids, shares = torch.tensor([[0, 4], [3, 2], [4, 1]]), normal(3, 2, seed=3).abs()
    expected = beam_fp64._experts(
        {"routed_scaling_factor": scale}, weights, 0, x.numpy(), ids.numpy(), shares.numpy()
    )
    near(oracle.expert_mlp(x, gate_up, down, ids, shares, scale)["y"], expected)


def test_router_scores() -> None:
    x, weight = normal(4, 6), normal(9, 6, seed=1)
    expected = beam_fp64.sigmoid(x.numpy() @ weight.numpy().T)
    near(oracle.router_scores(x, weight), expected)
