"""A decode step in numpy float64, written from docs/model.md alone: what the tests compare with.

No rounding anywhere, loops instead of tricks, and nothing of the steps under test but the weights'
and caches' values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch


def values(x: torch.Tensor) -> Any:
    return x.detach().to(torch.float64).numpy().copy()


def e4m3(x: torch.Tensor) -> Any:
    """Float8 from its bits: a sign, four bits of exponent (bias 7), three of mantissa."""
    bits = x.detach().view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return np.where(bits & 128, -size, size)


def expert_values(weights: Any, layer: Any, expert: int) -> tuple[Any, Any]:
    """gate_up ``[2 I, H]`` and down ``[H, I]`` of an expert, FP8 or not."""
    if layer.gate_up_scale is None:
        up, down = values(layer.gate_up[expert]), values(layer.down[expert])
        return up, down if weights.down_layout == "HI" else down.T
    up, down = e4m3(layer.gate_up[expert]), e4m3(layer.down[expert])
    down = down if weights.down_layout == "HI" else down.T
    scale = values(layer.gate_up_scale[expert]), values(layer.down_scale[expert])
    return up * scale[0][:, None], down * scale[1][:, None]


class NumpyRank:
    """One sequence of a state, with caches by position and not by row."""

    def __init__(self, weights: Any, state: Any, b: int = 0) -> None:
        self.w, self.c = weights, weights.config
        self.s = weights.shapes
        self.window = min(self.c.sliding_window, self.c.max_position_embeddings)
        self.position = int(state.position[b])
        self.token = int(state.token[b])
        self.keys: list[dict[int, Any]] = []
        self.values: list[dict[int, Any]] = []
        for layer, k, v in zip(weights.layers, state.k, state.v, strict=True):
            first = 0 if layer.full else max(0, self.position - k.shape[1])
            rows = range(first, self.position)
            self.keys.append({p: values(k[b, p % k.shape[1]]) for p in rows})
            self.values.append({p: values(v[b, p % v.shape[1]]) for p in rows})
        self.experts: list[set[int]] = []

    def norm(self, x: Any, weight: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.rms_norm_eps) * weight

    def step(self) -> Any:
        """Logits ``[V]``; goes on to the next token and position."""
        h = values(self.w.embed)[self.token]
        self.experts = []
        for index, layer in enumerate(self.w.layers):
            a = self.attention(index, layer, self.norm(h, values(layer.input_norm)))
            n = 2 * (index + 1)
            a = self.norm(a, values(layer.post_attention_norm))
            h = a / math.sqrt(n) + h * math.sqrt((n - 1) / n)
            m = self.mlp(layer, self.norm(h, values(layer.pre_mlp_norm)))
            m = self.norm(m, values(layer.post_mlp_norm))
            h = m / math.sqrt(n + 1) + h * math.sqrt(n / (n + 1))
        logits = values(self.w.lm_head) @ self.norm(h, values(self.w.norm))
        cap = self.c.final_logit_softcapping
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        self.token, self.position = int(logits.argmax()), self.position + 1
        return logits

    def attention(self, index: int, layer: Any, x: Any) -> Any:
        s, d = self.s, self.s.head_dim
        packed = (values(layer.qkvg) @ x).reshape(-1, d)
        q, k = packed[: s.heads], packed[s.heads : s.heads + s.kv_heads]
        v = packed[s.heads + s.kv_heads : s.heads + 2 * s.kv_heads]
        gate = packed[s.heads + 2 * s.kv_heads :]
        weight = values(layer.qk_norm)
        q, k = self.norm(q, weight[0]), self.norm(k, weight[1])
        p = self.position
        if layer.full:
            q = q * (1 + (p + 1) / 2048) ** 0.1
        else:
            q, k = self.turn(q), self.turn(k)
        self.keys[index][p], self.values[index][p] = k, v
        first = 0 if layer.full else max(0, p - self.window + 1)
        out = np.zeros((s.heads, d))
        for head in range(s.heads):
            group = head * s.kv_heads // s.heads
            score = np.array(
                [q[head] @ self.keys[index][t][group] / math.sqrt(d) for t in range(first, p + 1)]
            )
            chance = np.exp(score - score.max())
            chance /= chance.sum()
            for share, t in zip(chance, range(first, p + 1), strict=True):
                out[head] += share * self.values[index][t][group]
        gate = gate + values(layer.gate_bias)[:, None]
        return values(layer.o_proj) @ (out / (1 + np.exp(-gate))).reshape(-1)

    def turn(self, x: Any) -> Any:
        half = self.s.head_dim // 2
        angle = self.position * self.c.rope_theta ** (-np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    def mlp(self, layer: Any, x: Any) -> Any:
        if layer.dense:
            gate, up = np.split(values(layer.gate_up) @ x, 2)
            return values(layer.down) @ (gate / (1 + np.exp(-gate)) * up)
        score = 1 / (1 + np.exp(-(values(layer.router) @ x)))
        biased = score + values(layer.correction_bias)
        if self.c.n_group is not None and self.c.topk_group < self.c.n_group:
            groups = biased.reshape(self.c.n_group, -1)
            rank = np.sort(groups, -1)[:, -2:].sum(-1)
            for out in np.argsort(-rank)[self.c.topk_group :]:
                groups[out] = -np.inf
            biased = groups.reshape(-1)
        chosen = np.argsort(-biased)[: self.c.num_experts_per_tok]
        self.experts.append({int(e) for e in chosen})
        share = score[chosen]
        if self.c.norm_topk_prob:
            share = share / share.sum()
        total = np.zeros_like(x)
        for part, expert in zip(share, chosen, strict=True):
            gate_up, down = expert_values(self.w, layer, int(expert))
            gate, up = np.split(gate_up @ x, 2)
            total += part * (down @ (gate / (1 + np.exp(-gate)) * up))
        return total * self.c.routed_scaling_factor
