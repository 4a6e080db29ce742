"""What DFlash2's own operations are, in plain torch with the engine's roundings.

Shape letters: N rows, H hidden, Gc convolution groups, B requests, K candidates a position, R rank
of the selector, L drafter layers, G KV heads, D head_dim, M cache rows, V vocabulary, P positions.
"Rounded" means cast to the activation dtype; everything else is float32. The roundings are those of
vLLM 0.33.0's Beam drafter: run in Triton's interpreter, its kernels give the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0  # the largest float8_e4m3fn


def dynamic_conv(
    x: Tensor,  # [N, H], N a multiple of query_len in use, any N here
    coefficients: Tensor,  # [N, taps, Gc], one side of the kernel projection
    base: Tensor,  # [taps, H]
    query_len: int,
) -> Tensor:
    """Grouped dynamic convolution inside each request's block of ``query_len`` rows, ``[N, H]``.

    ``out[i, c] = sum_t (base[t, c] + coefficients[i, t, c // (H / Gc)]) * x[i - t, c]``, where tap
    t is dropped when row i has fewer than t rows before it in its block. The coefficient is the
    current row's, the value the earlier row's. Float32, one fused multiply-add a tap, rounded once.
    """
    return _convolve(x, coefficients, base, query_len).to(x.dtype)


def _convolve(x: Tensor, coefficients: Tensor, base: Tensor, query_len: int) -> Tensor:
    rows = x.shape[0]
    taps, groups = coefficients.shape[1:]
    wide = x.float()
    # Grouped channels broadcast: [N, taps, Gc, H / Gc], no copy of the coefficients for each.
    delta = coefficients.float()[..., None]
    kernel = (base.float().unflatten(-1, (groups, -1)) + delta).flatten(2)  # [N, taps, H]
    out = kernel[:, 0] * wide
    for tap in range(1, min(taps, rows)):
        place = torch.arange(tap, rows, device=x.device) % query_len  # of the row in its block
        # Not a product with 0: a NaN of another request's row must not come through.
        earlier = torch.where((place >= tap)[:, None], wide[:-tap], 0.0)
        out = torch.cat((out[:tap], _fma(kernel[tap:, tap], earlier, out[tap:], x.dtype)))
    return out


def _fma(a: Tensor, b: Tensor, c: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``a * b + c`` in float32, rounded once where ``dtype``, that of the activations, is narrower.

    The product of two float32 is exact in float64. The engine has no float32 activations whose bits
    there were to be met.
    """
    if dtype == torch.float32:
        return torch.addcmul(c, a, b)
    return (a.double() * b.double() + c.double()).float()


def conv_residual_norm(
    x: Tensor,  # [N, H] the sublayer's output
    coefficients: Tensor,  # [N, taps, Gc]
    base: Tensor,  # [taps, H]
    residual: Tensor,  # [N, H]
    weight: Tensor,  # [H]
    eps: float,
    query_len: int,
) -> tuple[Tensor, Tensor]:
    """Finish a sublayer: convolve, add to the residual, norm for the next one.

    Returns ``(residual', x')``, both ``[N, H]``: ``residual' = round(round(conv) + residual)`` and
    ``x' = round(residual' * rsqrt(mean(residual'^2) + eps) * weight)``.
    """
    residual = dynamic_conv(x, coefficients, base, query_len) + residual
    if x.dtype == torch.float32:
        return residual, F.rms_norm(residual, weight.shape, weight, eps)
    wide = residual.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return residual, (wide * factor * weight.float()).to(x.dtype)


def candidate_edges(
    predecessors: Tensor,  # [V, R]
    successors: Tensor,  # [V, R]
    ids: Tensor,  # [B, N, K] int64 candidates, N the drafted positions of a block
    unary: Tensor,  # [B, N, K] float32, the candidates' own logits
    hidden: Tensor,  # [B, N, R] projected drafter state
    anchors: Tensor,  # [B] int64, the token before the first position
) -> Tensor:
    """Score of every candidate after every candidate one position back, float32 ``[B, N, K, K]``.

    ``edges[b, n, q, c] = unary[b, n, c] + round(sum_r successors[c] * round(predecessors[q] *
    hidden[b, n]))``. The predecessor of position 0 is the anchor, so there all K rows are equal.
    """
    batch, positions, top_k = ids.shape
    first = anchors[:, None, None].expand(batch, 1, top_k)
    before = torch.cat((first, ids[:, :-1]), 1)[:, :positions]  # [B, N, K], for N = 0 too
    weighted = predecessors[before] * hidden[:, :, None]  # [B, N, K, R], rounded
    pair = weighted.float() @ successors[ids].float().mT
    return pair.to(hidden.dtype).float() + unary[:, :, None]


def selector_walk(
    edges: Tensor,  # [B, N, K, K] float32
    ids: Tensor,  # [B, N, K] int64
    temperature: Tensor,  # [B] float32
    noise: Tensor | None,  # [B, N, K] float32 Gumbel noise of each candidate; None: greedy
) -> tuple[Tensor, Tensor]:
    """Walk the edges from slot 0: returns (tokens int64 ``[B, N]``, realized ``[B, N, K]``).

    At each position the K scores are those behind the slot chosen one position back. They are the
    *realized* scores; the choice is their first maximum where the request's temperature is 0 or
    ``noise`` is None, else the maximum of ``scores / temperature + noise``.
    """
    batch, positions, _ = ids.shape
    value = edges
    if noise is not None:
        greedy = (temperature == 0)[:, None, None, None]
        divisor = torch.where(temperature == 0, 1.0, temperature)[:, None, None, None]
        value = torch.where(greedy, edges, edges / divisor + noise[:, :, None])
    # The best slot behind every slot at once; only following them is sequential.
    best = _first_maximum(value)  # [B, N, K]
    row = torch.arange(batch, device=ids.device)
    slot = torch.zeros_like(row)
    before, chosen = [], []
    for position in range(positions):
        before.append(slot)
        slot = best[row, position, slot]
        chosen.append(slot)
    if not chosen:
        return ids[:, :, 0], edges[:, :, 0]
    taken, behind = torch.stack(chosen, 1), torch.stack(before, 1)  # [B, N]
    tokens = ids.gather(-1, taken[..., None])[..., 0]
    index = behind[..., None, None].expand(-1, -1, 1, edges.shape[-1])
    return tokens, edges.gather(2, index)[:, :, 0]


def _first_maximum(value: Tensor) -> Tensor:
    """Index of the first maximum of the last axis (torch.argmax promises no order among ties)."""
    return (value == value.amax(-1, keepdim=True)).to(torch.uint8).cumsum(-1).eq(0).sum(-1)


def context_kv_write(
    kv: Tensor,  # [N, L, 2, G, D] keys and values of every drafter layer, as projected
    weight: Tensor,  # [L, D] key norms
    positions: Tensor,  # [N] int64
    rope: Tensor,  # [P, D] bfloat16 or float32: D/2 cosines, then D/2 sines
    k_rows: Tensor,  # [L, M, G, D], written
    v_rows: Tensor,  # [L, M, G, D], written
    rows: Tensor,  # [N] int64 cache row of each token; -1: not written
    eps: float,
    *,
    k_scale: Tensor | None,  # [L] float32, FP8 caches only; None: 1
    v_scale: Tensor | None,
) -> None:
    """Write the context's keys (normed per head, rotated) and values into every layer's cache.

    The norm is rounded once, the rotation is float32 on that and rounded once. An FP8 cache then
    holds ``value / scale`` clamped to +-448. No row of the cache but ``rows`` changes; of a token
    with row -1 neither the position nor the values matter.
    """
    if kv.shape[0] == 0:
        return
    key, value, target = context_rows(kv, weight, positions, rope, rows, eps)
    store_context(k_rows, target, key, k_scale, rows)
    store_context(v_rows, target, value, v_scale, rows)


def context_rows(
    kv: Tensor, weight: Tensor, positions: Tensor, rope: Tensor, rows: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values ``[N, L, G, D]`` to be stored, and the cache row of each, ``[N]``."""
    written = rows >= 0
    # A token without a row repeats what another token writes, where there is one, else what the
    # cache holds already: a boolean index would need the count on the host.
    stand_in = written.to(torch.uint8).argmax(0, keepdim=True)
    source = torch.where(written, torch.arange(len(rows), device=rows.device), stand_in)
    target = rows[source].clamp(min=0)
    position = torch.where(written, positions, 0)[source]
    key = _rotate(_head_norm(kv[source, :, 0], weight, eps), rope[position])
    return key, kv[source, :, 1], target


def _head_norm(key: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head ``[N, L, G, D]`` with its layer's weight, rounded once."""
    wide = key.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * factor * weight.float()[:, None]).to(key.dtype)


def _rotate(key: Tensor, table: Tensor) -> Tensor:
    """NeoX RoPE of ``[N, L, G, D]`` by ``table [N, D]`` in float32, rounded once."""
    cos, sin = table.float()[:, None, None].chunk(2, -1)
    first, second = key.float().chunk(2, -1)
    kind = key.dtype
    rotated = (_fma(first, cos, -(second * sin), kind), _fma(first, sin, second * cos, kind))
    return torch.cat(rotated, -1).to(key.dtype)


def _quantize(value: Tensor, scale: Tensor | None) -> Tensor:
    """``[N, L, G, D]`` over each layer's scale, clamped to what FP8 holds, float32."""
    scaled = value.float() if scale is None else value.float() / scale[:, None, None]
    return scaled.clamp(-FP8_MAX, FP8_MAX)


def store_context(
    cache: Tensor, target: Tensor, new: Tensor, scale: Tensor | None, rows: Tensor
) -> None:
    """``cache[:, target] = new`` for ``new [N, L, G, D]``, or no change when nothing is written."""
    if cache.dtype == torch.float8_e4m3fn:
        new = _quantize(new, scale)
    new = new.to(cache.dtype).transpose(0, 1)
    if cache.dtype == torch.float8_e4m3fn:  # has no indexing of its own
        cache, new = cache.view(torch.uint8), new.view(torch.uint8)
    cache[:, target] = torch.where((rows >= 0).any(), new, cache[:, target])
