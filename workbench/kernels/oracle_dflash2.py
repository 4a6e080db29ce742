"""DFlash2's operations in float64 without any rounding: what the variants are judged against.

Written apart from the references, row by row and tap by tap, and slow on purpose. Shapes are those
of :mod:`workbench.kernels.reference_dflash2`; every result is float64 on the CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _exact(x: Tensor) -> Tensor:
    return x.detach().cpu().to(torch.float64)


def dynamic_conv(x: Tensor, coefficients: Tensor, base: Tensor, query_len: int) -> Tensor:
    """Grouped dynamic convolution, float64 ``[N, H]``."""
    x, coefficients, base = _exact(x), _exact(coefficients), _exact(base)
    out = torch.zeros(x.shape, dtype=torch.float64)
    width = x.shape[1] // coefficients.shape[2]  # channels a group
    for row in range(x.shape[0]):
        for tap in range(base.shape[0]):
            if row // query_len != (row - tap) // query_len:
                continue  # that row belongs to the request before, or to none
            # Channel c belongs to group c // width.
            kernel = base[tap] + coefficients[row, tap].repeat_interleave(width)
            out[row] += kernel * x[row - tap]
    return out


def conv_residual_norm(
    x: Tensor,
    coefficients: Tensor,
    base: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    query_len: int,
) -> tuple[Tensor, Tensor]:
    """Convolution, residual add and RMSNorm, two float64 ``[N, H]``: (residual', x')."""
    stream = _exact(residual) + dynamic_conv(x, coefficients, base, query_len)
    normed, scale = torch.empty_like(stream), _exact(weight)
    for row in range(stream.shape[0]):
        power = float(stream[row] @ stream[row]) / stream.shape[1]
        normed[row] = stream[row] / math.sqrt(power + eps) * scale
    return stream, normed


def candidate_edges(
    predecessors: Tensor,
    successors: Tensor,
    ids: Tensor,
    unary: Tensor,
    hidden: Tensor,
    anchors: Tensor,
) -> Tensor:
    """Selector scores, float64 ``[B, N, K, K]`` (predecessor slot, successor slot)."""
    codes = _exact(successors[ids])  # [B, N, K, R]: the tables are large, so chosen rows only
    before, first = _exact(predecessors[ids]), _exact(predecessors[anchors])
    unary, hidden = _exact(unary), _exact(hidden)
    batch, positions, top_k = ids.shape
    edges = torch.empty(batch, positions, top_k, top_k, dtype=torch.float64)
    for b in range(batch):
        for n in range(positions):
            for q in range(top_k):
                query = (first[b] if n == 0 else before[b, n - 1, q]) * hidden[b, n]
                edges[b, n, q] = unary[b, n] + codes[b, n] @ query
    return edges


def walk_regret(
    edges: Tensor,  # [B, N, K, K] float32, what the variant was given
    ids: Tensor,  # [B, N, K] int64
    temperature: Tensor,  # [B] float32
    noise: Tensor | None,  # [B, N, K] float32
    tokens: Tensor,  # [B, N] int64, what the variant chose
    realized: Tensor,  # [B, N, K] float32, what it says the scores were
) -> Tensor:
    """How far each choice of a walk lies below the best one, float64 ``[B, N]``; 0: it is the best.

    A walk is judged along *its own* path, for two reasons. Where ``score / T + noise`` of two
    candidates agrees to within a float32 rounding, either is right; and after a different but
    equally right choice all later scores differ, which must not count as an error. So position n is
    judged by the edges behind the slot that the walk itself chose at n - 1, in float64, and a
    variant is right when no regret is beyond the rounding of ``score / T + noise``.

    Greedy choices (temperature 0, or no noise) compare stored values without arithmetic, so nothing
    is left to rounding: the *first* maximum is required, and a later slot of the same value has
    regret infinity. So has, with every position after it, a choice that cannot be judged: a token
    that is no candidate, or realized scores that are not bit for bit the edges of the path taken.
    Candidates of a position are distinct in use; where a token occurs in several slots, each of
    them is followed until the realized scores tell which it was.
    """
    edges, realized, scale = _exact(edges), _exact(realized), _exact(temperature)
    regret = torch.full(tokens.shape, math.inf, dtype=torch.float64)
    for b in range(tokens.shape[0]):
        slots = {0}  # where the walk can be, one position back
        for n in range(tokens.shape[1]):
            taken = [q for q in slots if torch.equal(realized[b, n], edges[b, n, q])]
            chosen = {c for c, i in enumerate(ids[b, n].tolist()) if i == int(tokens[b, n])}
            if not taken or not chosen:
                break
            value = [float(score) for score in realized[b, n]]
            if noise is None or scale[b] == 0:
                first = value.index(max(value))
                nearest = min(chosen, key=lambda c: (c != first, -value[c]))
                short = max(value) - value[nearest]
                regret[b, n] = math.inf if short == 0 and nearest != first else short
            else:
                value = [v / float(scale[b]) + float(noise[b, n, c]) for c, v in enumerate(value)]
                regret[b, n] = max(value) - max(value[c] for c in chosen)
            slots = chosen
    return regret


def context_kv_write(
    kv: Tensor,
    weight: Tensor,
    positions: Tensor,
    rope: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    rows: Tensor,
    eps: float,
    *,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What the caches mean after the write: two float64 ``[L, M, G, D]``, stored value times scale.

    ``k_rows`` and ``v_rows`` are the caches before the write and stay as they are. That an FP8
    cache ends at +-448 times its scale is part of what it means; its grid is a rounding and is not.
    """
    layers, heads, half = kv.shape[1], kv.shape[3], kv.shape[4] // 2
    table = _exact(rope)
    ones = torch.ones(layers, dtype=torch.float64)
    k_unit = ones if k_scale is None else _exact(k_scale)
    v_unit = ones if v_scale is None else _exact(v_scale)
    keys = _exact(k_rows) * k_unit[:, None, None, None]
    values = _exact(v_rows) * v_unit[:, None, None, None]
    most = 448.0 if k_rows.dtype == torch.float8_e4m3fn else math.inf
    for token in range(kv.shape[0]):
        row = int(rows[token])
        if row < 0:
            continue
        cos, sin = table[int(positions[token])].split(half)
        for layer in range(layers):
            k_most, v_most = most * float(k_unit[layer]), most * float(v_unit[layer])
            for head in range(heads):
                key = _exact(kv[token, layer, 0, head])
                key = key / math.sqrt(float(key @ key) / (2 * half) + eps) * _exact(weight[layer])
                # Channel j and channel j + half are the real and imaginary part of one number.
                turned = torch.complex(key[:half], key[half:]) * torch.complex(cos, sin)
                key = torch.cat((turned.real, turned.imag))
                keys[layer, row, head] = key.clamp(-k_most, k_most)
                value = _exact(kv[token, layer, 1, head])
                values[layer, row, head] = value.clamp(-v_most, v_most)
    return keys, values
