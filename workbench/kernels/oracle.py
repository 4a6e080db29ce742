"""Every operation of the forward pass in float64, unrounded: what a variant is held against.

Written apart from ``reference.py`` and sharing nothing with it: explicit loops where they are
clearer, since nothing here has to be fast. Arguments are those of the reference; gives a dict of
outputs by name. Written caches come back as the rows that were written.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Outputs = dict[str, Tensor]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Outputs:
    """x / rms(x) * weight."""
    return {"y": _norm(x, weight, eps)}


def boundary(
    h: Tensor,
    sublayer: Tensor,
    post_weight: Tensor,
    scale: tuple[float, float],
    next_weight: Tensor,
    eps: float,
) -> Outputs:
    """Post-norm, scaled add, next norm."""
    stream = _norm(sublayer, post_weight, eps) * scale[0] + h.double() * scale[1]
    return {"h": stream, "x": _norm(stream, next_weight, eps)}


def qkvg(x: Tensor, weight: Tensor) -> Outputs:
    """x @ weight.T"""
    return {"y": x.double() @ weight.double().T}


def qkv_write(
    packed: Tensor,
    qk_norm: Tensor,
    positions: Tensor,
    rope: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    rows: Tensor | None,
    *,
    heads: int,
    full: bool,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Outputs:
    """q, and the k and v of every token that is written, in the order of the tokens."""
    kv_heads, depth = k_rows.shape[1:]
    x = packed.double().unflatten(-1, (-1, depth))
    q = _norm(x[:, :heads], qk_norm[0], eps)
    k = _norm(x[:, heads : heads + kv_heads], qk_norm[1], eps)
    v = x[:, heads + kv_heads : heads + 2 * kv_heads].clone()
    if full:
        q = q * ((1 + (positions.double() + 1) / 2048) ** 0.1)[:, None, None]
    else:
        angle = rope.double()[positions]
        turn = torch.complex(angle[:, : depth // 2], angle[:, depth // 2 :])[:, None]
        q, k = (_turned(t, turn) for t in (q, k))
    if rows is not None:
        k, v = k[rows >= 0], v[rows >= 0]
    if k_rows.dtype == torch.float8_e4m3fn:
        k, v = (k / k_scale).clamp(-448, 448), (v / v_scale).clamp(-448, 448)
    return {"q": q, "k": k, "v": v}


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Each pair (first half, second half) as a complex number, times ``turn``."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((z.real, z.imag), -1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query ``[A, D]`` over all of k, v ``[S, G, D]``."""
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ad,sad->as", q, k) / math.sqrt(q.shape[-1])
    chance = torch.exp(scores - scores.amax(-1, keepdim=True))
    return torch.einsum("as,sad->ad", chance / chance.sum(-1, keepdim=True), v)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    reach: Any,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Outputs:
    """Query by query over the rows of the positions it sees."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    ring = k_cache.shape[1]
    for b, (slot, first) in enumerate(zip(reach.slots.tolist(), reach.first.tolist(), strict=True)):
        for t in range(q.shape[1]):
            end = first + t + 1
            start = 0 if reach.window is None else max(0, end - reach.window)
            seen = torch.arange(start, end, device=q.device) % ring
            k = k_cache[slot].float()[seen].double() * k_scale
            v = v_cache[slot].float()[seen].double() * v_scale
            out[b, t] = _attention(q[b, t].double(), k, v)
    return {"o": out}


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, spans: Any) -> Outputs:
    """Query by query over the keys of its own sequence, up to itself."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    q_at = k_at = 0
    for queries, keys in zip(spans.q_lengths, spans.k_lengths, strict=True):
        own_k, own_v = (x[k_at : k_at + keys].double() for x in (k, v))
        for t in range(queries):
            end = keys - queries + t + 1
            start = 0 if spans.window is None else max(0, end - spans.window)
            out[q_at + t] = _attention(q[q_at + t].double(), own_k[start:end], own_v[start:end])
        q_at, k_at = q_at + queries, k_at + keys
    return {"o": out}


def output_gate(o: Tensor, gate: Tensor, bias: Tensor) -> Outputs:
    """o * sigmoid(gate + bias)."""
    return {"y": o.double() / (1 + torch.exp(-(gate.double() + bias.double()[:, None])))}


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """The unbiased scores, float64 ``[N, E]``."""
    return 1 / (1 + torch.exp(-(x.double() @ weight.double().T)))


def expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, scale: float
) -> Outputs:
    """Expert by expert, the tokens that chose it."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    width = down.shape[1]
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        both = x[token].double() @ gate_up[expert].double().T
        gate, up = both[:, :width], both[:, width:]
        act = gate / (1 + torch.exp(-gate)) * up
        share = weights[token, place].double()[:, None]
        out.index_add_(0, token, act @ down[expert].double() * share)
    return {"y": out * scale}


def dense_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Outputs:
    """down @ (silu(gate) * up)"""
    width = down.shape[1]
    both = x.double() @ gate_up.double().T
    gate, up = both[:, :width], both[:, width:]
    return {"y": (gate / (1 + torch.exp(-gate)) * up) @ down.double().T}


def softcap(logits: Tensor, cap: float) -> Outputs:
    """cap * tanh(logits / cap)"""
    return {"y": cap * torch.tanh(logits.double() / cap)}
