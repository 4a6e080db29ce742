"""The forms of a step's operations before any optimisation: what the waterfall starts from.

Plain torch on the same weights and caches, no host round trip in them, so that they too can be
captured in a CUDA graph. The registry's own "torch" variants serve where they are as plain.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.rank import fp8
from workbench.kernels.reference import (
    apply_rope,
    linear,
    rms_norm,
    ssmax_scale,
    swiglu,
)


def split_projections(heads: int, kv_heads: int, head_dim: int) -> Callable[..., Tensor]:
    """The packed projection as four linears over row slices of the same weight, then joined."""
    parts = [n * head_dim for n in (heads, kv_heads, kv_heads, heads)]

    def qkvg(x: Tensor, weight: Tensor) -> Tensor:
        """``x [N, H]``, ``weight [W, H]`` -> ``[N, W]``."""
        return torch.cat([linear(x, rows) for rows in weight.split(parts)], -1)

    return qkvg


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
) -> Tensor:
    """Norms, RoPE or SSMax and two cache writes, one after the other; every row is written.

    Arguments as in :func:`workbench.kernels.reference.qkv_write`, without float8 caches.
    """
    kv_heads, head_dim = k_rows.shape[1:]
    parts = packed.unflatten(-1, (-1, head_dim))
    q, k, v, _ = parts.split((heads, kv_heads, kv_heads, heads), 1)
    q, k = rms_norm(q, qk_norm[0], eps), rms_norm(k, qk_norm[1], eps)
    if full:
        q = (q * ssmax_scale(positions)).to(q.dtype)
    else:
        q, k = apply_rope(q, positions, rope), apply_rope(k, positions, rope)
    where = torch.arange(packed.shape[0], device=packed.device) if rows is None else rows
    k_rows.index_copy_(0, where, k)
    v_rows.index_copy_(0, where, v)
    return q


def expert_mlp(rows: bool) -> Callable[..., Tensor]:
    """The operation ``expert_mlp`` for any number of tokens without asking the host which experts.

    The chosen experts' weights are gathered into a copy, then batched products are taken. ``rows``:
    down projections are ``[E, H, I]`` instead of ``[E, I, H]``. FP8 experts have scales: their copy
    is float32, so that only the products are rounded, as with other experts.
    """

    def gathered(
        x: Tensor,  # [N, H]
        gate_up: Tensor,  # [E, 2 I, H]
        down: Tensor,
        ids: Tensor,  # [N, K]
        weights: Tensor,  # [N, K] float32
        scale: float,
        gate_up_scale: Tensor | None = None,  # float32 [E, 2 I], of FP8 experts
        down_scale: Tensor | None = None,  # float32 [E, H]
    ) -> Tensor:
        n, top_k = ids.shape
        chosen = ids.flatten()
        pairs = x.repeat_interleave(top_k, 0)[:, :, None]  # [N K, H, 1]
        if gate_up_scale is None or down_scale is None:
            up, own = gate_up[chosen], down[chosen] if rows else down[chosen].mT
        else:
            up = fp8.chosen(gate_up, gate_up_scale, chosen)
            own = fp8.chosen(down, down_scale, chosen, rows)
        pairs = torch.bmm(up, pairs.to(up.dtype))[..., 0].to(x.dtype)
        act = swiglu(pairs)[:, :, None]  # [N K, I, 1]
        each = torch.bmm(own, act.to(own.dtype))[..., 0].to(x.dtype)
        out = each.float() * weights.flatten()[:, None]
        return out.unflatten(0, (n, top_k)).sum(1).to(x.dtype) * scale

    return gathered


def argmax(logits: Tensor) -> Tensor:
    """The first of the largest logits, int64 ``[B]``."""
    return logits.argmax(-1)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of the embedding, ``[B, H]``."""
    return F.embedding(ids, table)
