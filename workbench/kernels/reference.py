"""The operations of Beam's forward pass in plain torch: what each one is, with its roundings.

These functions are the variant "torch" of every operation; the other variants have the same
signatures and are held against them (``check.py``). Shape letters: N tokens, H hidden, A query
heads, G KV heads, D head_dim, W = (2 A + 2 G) D packed rows, E experts, K experts a token, I expert
width; S cache slots, R rows a slot, B sequences, T query tokens a sequence. "Rounded" means cast to
the activation dtype; every norm, the router, RoPE and SwiGLU compute in float32 and round once
(vLLM 0.33.0's Beam, described in docs/model.md).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.reach import Reach, Spans
from workbench.model.config import SSMAX_LENGTH, SSMAX_POWER

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

# Above this many tokens it pays to sort tokens by expert; at or below, computing every expert for
# every token is two matrix products and no bookkeeping (measured on a CPU, benchmarks/NOTES.md).
DENSE_EXPERTS_MAX_TOKENS = 32
DENSE_EXPERTS_MAX_EXPERTS = 32


def qkvg(x: Tensor, weight: Tensor) -> Tensor:
    """The packed Q+K+V+gate projection: ``x [N, H] @ weight [W, H].T``, rounded, ``[N, W]``."""
    return linear(x, weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x [N, in] @ weight [out, in].T``, through the weight's packed form when it has one."""
    packed = None if torch.compiler.is_compiling() else getattr(weight, "packed", None)
    if packed is not None and packed.usable(x):
        return packed(x)
    return F.linear(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis in float32, times ``weight`` in float32, rounded once."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def depth_scale(n: int) -> tuple[float, float]:
    """Factors of the ``n``-th residual add: (1/sqrt(n), sqrt((n-1)/n)) for (new, stream).

    Attention of layer l (from 0) is add 2(l+1), its MLP add 2(l+1)+1: the stream keeps unit
    variance over depth when the normed sublayer outputs have it.
    """
    return n**-0.5, ((n - 1) / n) ** 0.5


def boundary(
    h: Tensor,  # [N, H] residual stream
    sublayer: Tensor,  # [N, H] attention or MLP output
    post_weight: Tensor,  # [H]
    scale: tuple[float, float],
    next_weight: Tensor,  # [H] norm before the next sublayer
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Post-norm, depth-scaled add, next pre-norm: returns (new stream, next sublayer's input).

    ``h = round(round(p * scale[0]) + round(h * scale[1]))`` with ``p = rms_norm(sublayer)``.
    """
    h = rms_norm(sublayer, post_weight, eps) * scale[0] + h * scale[1]
    return h, rms_norm(h, next_weight, eps)


def rope_table(length: int, head_dim: int, theta: float, device: torch.device | str) -> Tensor:
    """cos and sin by position, float32 ``[at least length, D]``: D/2 cosines, then D/2 sines.

    The angles are float64: the engine's are float32, whose error grows with the position, to
    0.03 rad at one million (docs/model.md). Made for a power of two of positions and kept.
    """
    rows = 1 << max(8, (length - 1).bit_length())
    return _rope_table(rows, head_dim, theta, str(device))


@lru_cache(maxsize=8)
def _rope_table(rows: int, head_dim: int, theta: float, device: str) -> Tensor:
    # Not an inference tensor, though the first pass may infer: training reads the table too.
    with torch.inference_mode(False), torch.no_grad():
        exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64)
        position = torch.arange(rows, device=device, dtype=torch.float64)
        angle = position[:, None] * theta ** (-exponent / head_dim)  # [P, D/2]
        return torch.cat((angle.cos(), angle.sin()), -1).float()


def apply_rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate ``x [N, heads, D]`` in float32 (NeoX: first half with second half), rounded once."""
    half = x.shape[-1] // 2
    cos, sin = table[positions][:, None].split(half, -1)  # [N, 1, D/2]
    first, second = x.float().split(half, -1)
    turned = (
        torch.addcmul(first * cos, second, sin, value=-1),
        torch.addcmul(second * cos, first, sin),
    )
    return torch.cat(turned, -1).to(x.dtype)


def ssmax_scale(positions: Tensor) -> Tensor:
    """SSMax factor of full layers' queries, float32 ``[N, 1, 1]``: (1 + (p+1)/2048)^0.1."""
    return (1.0 + (positions.to(torch.float32) + 1.0) / SSMAX_LENGTH).pow(SSMAX_POWER)[
        :, None, None
    ]


def qkv_write(
    packed: Tensor,  # [N, W] q | k | v | gate
    qk_norm: Tensor,  # [2, D] rows: q_norm, k_norm
    positions: Tensor,  # [N] int64
    rope: Tensor,  # [P, D] from rope_table
    k_rows: Tensor,  # [M, G, D] the layer's cache as flat rows, written
    v_rows: Tensor,  # [M, G, D] written
    rows: Tensor | None,  # [N] int64: where token i goes, -1 nowhere; None: row i
    *,
    heads: int,
    full: bool,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """QK norm, position, KV-cache write: gives q ``[N, A, D]`` and writes k and v.

    Per-head RMSNorm in float32, rounded; then RoPE on q and k (sliding layers) or SSMax on q (full
    layers) in float32, rounded. A float8 cache stores ``clamp(x / scale, -448, 448)`` of the
    rounded k and v.
    """
    kv_heads, head_dim = k_rows.shape[1:]
    q_width, k_width = heads * head_dim, kv_heads * head_dim
    qk, v, _ = (
        t.unflatten(-1, (-1, head_dim))
        for t in packed.split((q_width + k_width, k_width, q_width), -1)
    )
    weight = torch.cat((qk_norm[:1].expand(heads, -1), qk_norm[1:].expand(kv_heads, -1)))
    qk = (F.rms_norm(qk.float(), (head_dim,), None, eps) * weight).to(packed.dtype)
    if not full:
        qk = apply_rope(qk, positions, rope)
    q, k = qk.split((heads, kv_heads), 1)
    if full:
        q = (q * ssmax_scale(positions)).to(q.dtype)
    write_rows(k_rows, rows, quantised(k, k_rows.dtype, k_scale))
    write_rows(v_rows, rows, quantised(v, v_rows.dtype, v_scale))
    return q


def quantised(x: Tensor, dtype: torch.dtype, scale: Tensor | float) -> Tensor:
    """``x`` as the cache stores it: itself, or float8 of ``x / scale``, clamped."""
    if dtype != FP8:
        return x.to(dtype)
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def write_rows(store: Tensor, rows: Tensor | None, values: Tensor) -> None:
    """``store[rows[i]] = values[i]`` where ``rows[i] >= 0``, on a GPU without a host round trip."""
    if rows is None:
        store[: values.shape[0]].copy_(values)
        return
    if store.dtype == FP8:  # index_copy_ is not written for it
        store, values = store.view(torch.uint8), values.view(torch.uint8)
    quiet = rows.is_cuda or torch.compiler.is_compiling()
    if rows.numel() and (quiet or int(rows.min()) < 0):
        # Every unwanted row repeats the write of one wanted row, or of what row 0 holds already.
        some = rows.argmax(0, keepdim=True)
        each = (-1, *[1] * (values.dim() - 1))
        spare = torch.where((rows[some] >= 0).view(each), values[some], store[:1])
        values = torch.where((rows >= 0).view(each), values, spare)
        rows = torch.where(rows >= 0, rows, rows[some].clamp_min(0))
    store.index_copy_(0, rows, values)


def decode_attention(
    q: Tensor,  # [B, T, A, D]
    k_cache: Tensor,  # [S, R, G, D]
    v_cache: Tensor,  # [S, R, G, D]
    reach: Reach,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Attention of a few new tokens a sequence over its cache: ``[B, T, A, D]``, scale D**-0.5.

    The new tokens' own keys and values are in the cache already. Softmax in float32, one rounding.
    """
    if not q.numel():
        return torch.empty_like(q)
    tokens, group = q.shape[1], q.shape[2] // k_cache.shape[2]
    where = (reach.slots if reach.view is None else reach.view, slice(reach.span))
    keys, values = k_cache[where], v_cache[where]
    if keys.dtype == FP8:
        keys, values = (keys.float() * k_scale).to(q.dtype), (values.float() * v_scale).to(q.dtype)
    # Query heads of one KV head become rows: no copy of K and V for grouped-query attention.
    rows = q.unflatten(2, (k_cache.shape[2], -1)).transpose(1, 2).flatten(2, 3)
    mask = reach.mask(tokens, k_cache.shape[1], group, q.dtype)
    o = F.scaled_dot_product_attention(
        rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
    )
    return o.unflatten(2, (tokens, -1)).transpose(1, 2).reshape(q.shape)


def prefill_attention(
    q: Tensor,  # [N, A, D] the sequences end to end
    k: Tensor,  # [M, G, D]
    v: Tensor,  # [M, G, D]
    spans: Spans,
) -> Tensor:
    """Causal attention of whole chunks, ``[N, A, D]``, scale D**-0.5, windowed if ``spans`` is.

    The queries of a sequence are the last of its key positions.
    """
    if not q.numel():
        return torch.empty_like(q)
    if spans.uniform:
        return _chunk(q, k, v, len(spans.q_lengths), spans)
    parts = zip(
        q.split(spans.q_lengths), k.split(spans.k_lengths), v.split(spans.k_lengths), strict=True
    )
    return torch.cat([_chunk(*part, 1, spans) for part in parts if part[0].shape[0]])


def _chunk(q: Tensor, k: Tensor, v: Tensor, batch: int, spans: Spans) -> Tensor:
    """:func:`prefill_attention` of ``batch`` sequences of equal lengths."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    queries, keys = q.shape[2], k.shape[2]
    if queries == keys and (spans.window is None or spans.window >= keys):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mask = spans.mask(queries, keys, q.device)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return o.transpose(1, 2).flatten(0, 1)


def output_gate(o: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """``round(o * round(sigmoid(round(gate + bias))))``; o, gate ``[N, A, D]``, bias ``[A]``."""
    return o * torch.sigmoid(gate + bias[:, None])


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once; ``gate_up [..., 2 I]`` -> ``[..., I]``."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def dense_mlp(
    x: Tensor,  # [N, H]
    gate_up: Tensor,  # [2 I, H]
    down: Tensor,  # [H, I]
) -> Tensor:
    """SwiGLU MLP, ``[N, H]``; each product is rounded."""
    return linear(swiglu(linear(x, gate_up)), down)


def router(
    x: Tensor,  # [N, H]
    weight: Tensor,  # [E, H] float32
    correction_bias: Tensor,  # [E] float32
    *,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    renormalise: bool,
) -> tuple[Tensor, Tensor]:
    """Experts of each token, all in float32: (ids int64 ``[N, K]``, weights float32 ``[N, K]``)."""
    scores = router_scores(x, weight)
    return route(scores, correction_bias, top_k, n_group, topk_group, renormalise)


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """Sigmoid affinity of every expert, float32 ``[N, E]``; ``weight [E, H]`` is float32."""
    return torch.sigmoid(F.linear(x.float(), weight))


def route(
    scores: Tensor,  # [N, E] float32, from router_scores
    correction_bias: Tensor,  # [E] float32
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    renormalise: bool,
) -> tuple[Tensor, Tensor]:
    """Choose experts: (ids int64 ``[N, K]``, weights float32 ``[N, K]``).

    The choice ranks ``scores + correction_bias``, among the experts of the best ``topk_group``
    groups (a group's rank: the sum of its two best biased scores). The weights are the unbiased
    scores, divided by their sum when ``renormalise``.
    """
    choice = scores + correction_bias
    if n_group is not None and topk_group is not None and topk_group < n_group:
        groups = choice.unflatten(-1, (n_group, -1))  # [N, groups, E / groups]
        rank = groups.topk(2, -1).values.sum(-1)
        keep = torch.zeros_like(rank).scatter_(-1, rank.topk(topk_group, -1).indices, 1.0)
        choice = groups.masked_fill(keep[..., None] == 0, float("-inf")).flatten(-2)
    ids = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) if renormalise else weights


def expert_mlp(
    x: Tensor,  # [N, H]
    gate_up: Tensor,  # [E, 2 I, H]
    down: Tensor,  # [E, I, H], transposed so that all experts' down products are one matrix
    ids: Tensor,  # [N, K]
    weights: Tensor,  # [N, K] float32
    scale: float,
) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU outputs, ``[N, H]``, rounded; times ``scale``."""
    if x.shape[0] == 1:
        form = expert_mlp_gathered
    elif x.shape[0] <= DENSE_EXPERTS_MAX_TOKENS and gate_up.shape[0] <= DENSE_EXPERTS_MAX_EXPERTS:
        form = expert_mlp_dense
    else:
        form = expert_mlp_grouped
    return form(x, gate_up, down, ids, weights) * scale


def expert_mlp_gathered(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """One token (``x [1, H]``): only the weights of its K experts are read."""
    chosen = ids[0]
    act = swiglu(F.linear(x, gate_up[chosen].flatten(0, 1)).unflatten(-1, (len(chosen), -1)))
    act = act * weights[..., None].to(act.dtype)  # [1, K, I]
    return act.flatten(1) @ down[chosen].flatten(0, 1)


def expert_mlp_dense(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Every expert on every token, those not chosen weighted by zero."""
    experts = gate_up.shape[0]
    table = torch.zeros(x.shape[0], experts, dtype=weights.dtype, device=x.device)
    table = table.scatter(1, ids, weights)
    act = swiglu(_all_gate_up(x, gate_up).unflatten(-1, (experts, -1)))  # [N, E, I]
    act = (act * table[..., None].to(act.dtype)).flatten(1)
    packed = None if torch.compiler.is_compiling() else getattr(down, "packed", None)
    if packed is not None and packed.usable(act):
        return packed(act)
    return act @ down.flatten(0, 1)


def _all_gate_up(x: Tensor, gate_up: Tensor) -> Tensor:
    packed = None if torch.compiler.is_compiling() else getattr(gate_up, "packed", None)
    if packed is not None and packed.usable(x):
        return packed(x)
    return F.linear(x, gate_up.flatten(0, 1))


def expert_mlp_grouped(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Tokens sorted by expert, one pair of matrix products for each expert that was chosen."""
    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=gate_up.shape[0]).tolist()
    rows = order // top_k
    scale = weights.flatten()[order][:, None]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            act = swiglu(F.linear(x[rows[part]], gate_up[expert]))
            out.index_add_(0, rows[part], (act @ down[expert]).float() * scale[part])
            start += count
    return out.to(x.dtype)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """``cap * tanh(logits / cap)`` in float32, ``[N, V]`` float32 whatever the logits are."""
    return torch.tanh(logits.float() / cap) * cap
