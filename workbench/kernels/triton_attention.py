"""Decode attention in Triton: a few queries a sequence over a long cache (flash-decoding).

The query heads that share a KV head, times the tokens of a verify step, are the rows of one tile,
so K and V are read once for all of them. When there are fewer sequences than multiprocessors the
keys of a sequence are divided among several programs, and a second kernel merges their results.
Method: FlashAttention (Dao et al., 2022) and flash-decoding (Dao et al., 2023), with the softmax
kept in base 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, multiprocessors, strided
from workbench.kernels.reach import Reach
from workbench.kernels.registry import register
from workbench.kernels.requirements import triton_runs
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

# What a score that has not been seen counts as: finite, so that minus itself is 0 and not NaN.
_LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def softmax_step(score, v, o, top, total, visible, scale, MASKED: tl.constexpr):
    """One tile of keys joins a running softmax; returns the new ``(o, top, total)``.

    score ``[M, N]`` float32 (q k), v ``[N, D]``, visible ``[M, N]`` (looked at if MASKED);
    o ``[M, D]`` float32 is the sum of p v so far, top ``[M]`` the largest score in base 2 (score *
    scale, where scale holds log2 e), total ``[M]`` the sum of p. Nothing is read or written.
    """
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    new = tl.maximum(top, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - new[:, None])
    keep = tl.exp2(top - new)
    total = total * keep + tl.sum(p, 1)
    o = tl.dot(p.to(v.dtype), v, o * keep[:, None], input_precision="ieee")
    return o, new, total


# Sizes that vary from pass to pass are kept out of the compiled code's key.
@triton.jit(do_not_specialize=["tokens", "batch", "splits"])
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    slots_ptr,
    first_ptr,
    q_b,
    q_t,
    q_h,
    k_s,
    k_r,
    k_h,
    v_s,
    v_r,
    v_h,
    tokens,
    batch,
    ring,
    scale,
    v_scale,
    splits,
    D: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of some rows of one sequence and KV head over one part of its keys.

    Reads q ``[B, T, A, D]``, K and V ``[S, R, G, D]`` (position p in row p % ring; WINDOW 0: row
    p), slots and first ``[B]``. Writes ``out [B, T, A, D]`` if WHOLE, else the part's own result
    to ``out [splits, B, T, A, D]`` float32 and the base-2 logarithm of its sum of exponentials to
    ``lse [splits, B, T, A]``. Grid: (B * G * row blocks, splits).
    """
    row_blocks = tl.num_programs(0) // (batch * KV_HEADS)
    b = tl.program_id(0) // (KV_HEADS * row_blocks)
    head = tl.program_id(0) // row_blocks % KV_HEADS
    block = tl.program_id(0) % row_blocks
    split = tl.program_id(1)

    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < tokens * GROUP
    token = row // GROUP
    query_head = head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    if PDL:
        # This launch overlaps with the end of the kernel before it, the merging one's with this.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q_at = b.to(tl.int64) * q_b + token * q_t + query_head * q_h
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=real[:, None] & inside[None, :], other=0.0)

    # FP8 becomes FP16 in one instruction for two values, and exactly; BF16 would take several. So a
    # BF16 row of q is brought to FP16's range by a power of two, which loses nothing that counts.
    HALF: tl.constexpr = k_ptr.dtype.element_ty != q.dtype and q.dtype == tl.bfloat16
    if HALF:
        q = q.to(tl.float32)
        unit = tl.exp2(tl.floor(tl.log2(tl.maximum(tl.max(tl.abs(q), 1), 1.0e-30))))
        q = (q / unit[:, None]).to(tl.float16)

    # Keys in order of position, whichever rows hold them: from the first that the oldest query of
    # this block sees, to the newest query itself.
    first = tl.load(first_ptr + b).to(tl.int32)
    slot = tl.load(slots_ptr + b)
    position = first + token
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first + block * BLOCK_M // GROUP - WINDOW + 1, 0)
    high = first + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP + 1, tokens)
    # Parts are whole tiles and differ by one at most, so the work follows the true length although
    # the number of parts was fixed by the host.
    blocks = tl.cdiv(high - low, BLOCK_N)
    begin = low + split * blocks // splits * BLOCK_N
    end = tl.minimum(low + (split + 1) * blocks // splits * BLOCK_N, high)

    k_ptr += slot * k_s + head * k_h
    v_ptr += slot * v_s + head * v_h
    n = tl.arange(0, BLOCK_N)
    top = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        if WINDOW > 0:
            # One division a tile. A ring holds all keys that are visible, so these wrap once only.
            held = start % ring + n
            held = tl.where(held >= ring, held - ring, held).to(tl.int64)
            k_at = k_ptr + (held * k_r)[:, None]
            v_at = v_ptr + (held * v_r)[:, None]
        else:
            k_at = k_ptr + tl.cast(start, tl.int64) * k_r + (n * k_r)[:, None]
            v_at = v_ptr + tl.cast(start, tl.int64) * v_r + (n * v_r)[:, None]
        there = (key < end)[:, None] & inside[None, :]
        k = tl.load(k_at + d[None, :], mask=there, other=0.0)
        v = tl.load(v_at + d[None, :], mask=there, other=0.0)
        visible = (key[None, :] <= position[:, None]) & (key < end)[None, :]
        if WINDOW > 0:
            visible &= key[None, :] > position[:, None] - WINDOW
        if k.dtype != q.dtype:  # the scales are in the scores' scale and in the final factor
            k = k.to(q.dtype)
            v = v.to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HALF:
            score *= unit[:, None]
        o, top, total = softmax_step(score, v, o, top, total, visible, scale, True)

    # A part with no key for a row must weigh nothing and hold no NaN.
    seen = total > 0
    o = o * (v_scale / tl.where(seen, total, 1.0))[:, None]
    heads = KV_HEADS * GROUP
    out_row = (b * tokens + token).to(tl.int64) * heads + query_head
    out_row += split.to(tl.int64) * batch * tokens * heads
    tl.store(
        out_ptr + out_row[:, None] * D + d[None, :],
        o.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & inside[None, :],
    )
    if not WHOLE:
        lse = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + out_row, lse, mask=real)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge(
    part_ptr,
    lse_ptr,
    out_ptr,
    rows,
    splits,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """The parts of one row, each weighted by its share of the sum of exponentials.

    Reads part ``[splits, rows, D]`` and lse ``[splits, rows]`` float32, writes ``out [rows, D]``.
    Grid: (rows, D / BLOCK_D).
    """
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if PDL:
        tl.extra.cuda.gdc_wait()
    lse = tl.load(lse_ptr + s * rows + row, mask=s < splits, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    part = tl.load(
        part_ptr + (s * rows + row)[:, None] * D + d[None, :],
        mask=(s < splits)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    o = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + row * D + d, o.to(out_ptr.dtype.element_ty), mask=d < D)


MOST_SPLITS = 256  # what the merging kernel holds in registers


def merge_splits(parts: Tensor, lse: Tensor, out: Tensor) -> Tensor:
    """Merge ``parts [splits, rows, D]`` with ``lse [splits, rows]`` into ``out`` (rows * D)."""
    splits, rows, dim = parts.shape
    block_s = triton.next_power_of_2(splits)
    block_d = triton.next_power_of_2(dim)
    # Many parts: several programs a row, so that the reads are spread over more multiprocessors.
    while block_s * block_d > 8192 and block_d > 32:
        block_d //= 2
    pdl = dependent_launch(parts)
    _merge[(rows, triton.cdiv(dim, block_d))](
        parts,
        lse,
        out,
        rows,
        splits,
        D=dim,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        PDL=pdl,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Launch configuration of :func:`decode_attention`."""

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int


def decode_plan(
    batch: int, kv_heads: int, rows: int, keys: int, itemsize: int, cached: int, sms: int
) -> DecodePlan:
    """Tile sizes and number of parts from what the host knows.

    The figures are medians of graph replays on an H200, A = 6, G = 1, D = 128, K and V from memory.

    Args:
        batch, kv_heads: programs there are without dividing the keys.
        rows: query heads a KV head times tokens.
        keys: most keys that a sequence's queries see.
        itemsize: bytes of an activation.
        cached: bytes of an element of the cache.
        sms: multiprocessors.
    """
    plain = itemsize > 2 and not INTERPRETED  # float32 products are FMA: larger tiles spill
    block_m = 16 if plain else min(max(16, triton.next_power_of_2(rows)), 64)
    block_n, warps, stages = 64, 4, 4
    programs = batch * kv_heads * triton.cdiv(rows, block_m)
    # One program a multiprocessor keeps the memory busy and has the least to merge: one sequence of
    # 120k 21.8 us, with two 22.7; T = 8 at 32k 12.2 and 13.3. FP8 waits for its conversions, which
    # two programs overlap: 64 sequences of 32k 199 us, as with four (one was 1.5 times slower).
    window = keys <= 1024
    splits = (2 if cached == 1 and not window else 1) * sms // programs
    if INTERPRETED:
        block_n = 128
    elif plain:
        block_n, warps, stages = 32, 8, 2
    elif window and block_m == 16:
        stages = 3  # few tiles a program: 128 sequences 13.8 us, with 4 stages 14.4
    elif window or triton.cdiv(keys, 64) < splits:
        block_n = 32  # one sequence of 4k 5.5 us, with 64 keys 6.2; a window with T = 8 5.9 and 6.1
    if programs * splits < 0.8 * sms:
        # Too many multiprocessors would have nothing to do: 100 sequences of 4k 58.7 us, not 64.
        splits, stages = 2 * sms // programs, min(stages, 3)
    blocks = triton.cdiv(keys, block_n)
    if 4 * splits >= 3 * blocks:  # else a few programs have two tiles, and all wait for them
        splits = blocks
    splits = max(1, min(splits, blocks, MOST_SPLITS))
    return DecodePlan(block_m=block_m, block_n=block_n, splits=splits, warps=warps, stages=stages)


@register("decode_attention", "triton", requires=(triton_runs,))
@strided("q", "k_cache", "v_cache")
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    reach: Reach,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Attention of T new tokens a sequence over caches, ``[B, T, A, D]``, rounded once.

    Args:
        q: ``[B, T, A, D]`` bfloat16 or float32; token t of sequence b is at ``first[b] + t``.
        k_cache: ``[S, R, G, D]``, position p of a slot in row p % R; q's dtype or float8_e4m3fn.
        v_cache: like k_cache.
        reach: slots, first positions, window and the number of rows that can matter.
        k_scale: a stored FP8 key times this is the key.
        v_scale: the same for values.
    """
    batch, tokens, heads, _ = q.shape
    if q.numel() == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = heads // k_cache.shape[2] * tokens
    keys = reach.span if reach.window is None else min(reach.span, reach.window + tokens - 1)
    plan = decode_plan(
        batch,
        k_cache.shape[2],
        rows,
        keys,
        q.element_size(),
        k_cache.element_size(),
        multiprocessors(q.device),
    )
    return launch_decode(q, k_cache, v_cache, reach, k_scale, v_scale, plan)


def launch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    reach: Reach,
    k_scale: float,
    v_scale: float,
    plan: DecodePlan,
) -> Tensor:
    """:func:`decode_attention` with the launch configuration given."""
    batch, tokens, heads, dim = q.shape
    kv_heads, ring = k_cache.shape[2], k_cache.shape[1]
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    whole = plan.splits == 1
    parts, lse = out, out
    if not whole:
        shape = (plan.splits, batch * tokens * heads)
        parts = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    row_blocks = triton.cdiv(group * tokens, plan.block_m)
    pdl = dependent_launch(q)
    _decode[(batch * kv_heads * row_blocks, plan.splits)](
        q,
        k_cache,
        v_cache,
        parts,
        lse,
        reach.slots,
        reach.first,
        *q.stride()[:3],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        tokens,
        batch,
        ring,
        dim**-0.5 * math.log2(math.e) * k_scale,
        v_scale,
        plan.splits,
        D=dim,
        KV_HEADS=kv_heads,
        GROUP=group,
        WINDOW=reach.window or 0,
        WHOLE=whole,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        PDL=pdl,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out if whole else merge_splits(parts, lse, out)
