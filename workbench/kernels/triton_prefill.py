"""Prefill attention in Triton: sequences of any lengths laid end to end, causal, windows.

Method: FlashAttention 2 (Dao, 2023). The query heads that share a KV head are rows of one tile, so
a tile spans few positions: K and V are read once for all of them, and the tiles that a window or
the causal rule cuts are few. Where there are fewer tiles than multiprocessors the keys are divided
among several programs, as in decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, multiprocessors, strided
from workbench.kernels.reach import Spans
from workbench.kernels.registry import register
from workbench.kernels.requirements import triton_runs
from workbench.kernels.triton_attention import (
    _LOWEST,
    merge_splits,
    softmax_step,
)
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip - after the line above


@triton.jit
def _tiles(
    k_src,
    v_src,
    q,
    o,
    top,
    total,
    begin,
    end,
    last,
    position,
    k_start,
    k_at,
    v_at,
    k_r,
    v_r,
    scale,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BULK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Tiles of keys from ``begin`` up to ``end`` join the softmax; MASKED: some are not seen.

    Reads K and V of one KV head: if BULK through descriptors of ``[M, columns]``, from row k_start
    and columns k_at and v_at on (rows from ``last`` on are another sequence's, or zeros behind the
    last one); else through pointers, no row from ``last`` on. Returns ``(o, top, total)``.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        visible = (key[None, :] <= position[:, None]) & (key < last)[None, :]
        if WINDOW > 0:
            visible &= key[None, :] > position[:, None] - WINDOW
        if BULK:
            row = k_start.to(tl.int32) + start
            k = k_src.load([row, k_at])
            v = v_src.load([row, v_at])
        else:
            there = (key < last)[:, None] & (d < D)[None, :]
            row = k_start + start
            k_ptr = k_src + row * k_r + k_at
            v_ptr = v_src + row * v_r + v_at
            k = tl.load(k_ptr + (n * k_r)[:, None] + d[None, :], mask=there, other=0.0)
            v = tl.load(v_ptr + (n * v_r)[:, None] + d[None, :], mask=there, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        o, top, total = softmax_step(score, v, o, top, total, visible, scale, MASKED)
    return o, top, total


@triton.jit(do_not_specialize=["queries", "splits"])
def _prefill(
    q_ptr,
    k_src,
    v_src,
    out_ptr,
    lse_ptr,
    q_starts_ptr,
    k_starts_ptr,
    q_n,
    q_h,
    k_r,
    k_h,
    v_r,
    v_h,
    queries,
    scale,
    splits,
    D: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BULK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of one tile of query rows of one sequence over one part of the keys it sees.

    Reads q ``[N, A, D]``, K and V ``[M, G, D]``, q_starts and k_starts ``[B + 1]``. Writes ``out
    [N, A, D]`` if WHOLE, else ``out [splits, N, A, D]`` float32 and ``lse [splits, N, A]``, see
    the decode kernel. Grid: (B * G, tiles of the longest sequence, splits).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    # The last tiles see the most keys: they start first, so that the short ones fill the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.program_id(2)
    q_start = tl.load(q_starts_ptr + b)
    q_length = (tl.load(q_starts_ptr + b + 1) - q_start).to(tl.int32)
    k_start = tl.load(k_starts_ptr + b)
    k_length = (tl.load(k_starts_ptr + b + 1) - k_start).to(tl.int32)
    if tile * BLOCK_M >= q_length * GROUP:
        return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < q_length * GROUP
    token = row // GROUP
    query_head = head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    at = (q_start + token) * q_n + query_head * q_h
    mask = real[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)

    # Keys by position in the sequence. Tiles of keys that every row sees need no mask: those from
    # `clear` up to `edge`; before them the window cuts, after them the causal rule does.
    shift = k_length - q_length
    position = shift + token
    oldest = shift + tile * BLOCK_M // GROUP
    newest = shift + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_length - 1)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(oldest - WINDOW + 1, 0)
    blocks = tl.cdiv(newest + 1 - low, BLOCK_N)
    begin = low + split * blocks // splits * BLOCK_N
    end = low + (split + 1) * blocks // splits * BLOCK_N
    edge = low + (oldest + 1 - low) // BLOCK_N * BLOCK_N
    edge = tl.maximum(tl.minimum(edge, end), begin)
    clear = begin
    if WINDOW > 0:
        clear = low + tl.cdiv(tl.maximum(newest - WINDOW + 1 - low, 0), BLOCK_N) * BLOCK_N
        clear = tl.maximum(tl.minimum(clear, edge), begin)

    k_at = head * k_h
    v_at = head * v_h
    top = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if WINDOW > 0:
        o, top, total = _tiles(
            k_src, v_src, q, o, top, total, begin, clear, newest + 1, position,
            k_start, k_at, v_at, k_r, v_r, scale,
            D, WINDOW, BLOCK_N, BLOCK_D, BULK, True,
        )  # fmt: skip
    o, top, total = _tiles(
        k_src, v_src, q, o, top, total, clear, edge, newest + 1, position,
        k_start, k_at, v_at, k_r, v_r, scale,
        D, WINDOW, BLOCK_N, BLOCK_D, BULK, False,
    )  # fmt: skip
    o, top, total = _tiles(
        k_src, v_src, q, o, top, total, edge, end, newest + 1, position,
        k_start, k_at, v_at, k_r, v_r, scale,
        D, WINDOW, BLOCK_N, BLOCK_D, BULK, True,
    )  # fmt: skip

    seen = total > 0
    o = o / tl.where(seen, total, 1.0)[:, None]
    heads = KV_HEADS * GROUP
    out_row = (q_start + token) * heads + query_head + split.to(tl.int64) * queries * heads
    tl.store(out_ptr + out_row[:, None] * D + d[None, :], o.to(out_ptr.dtype.element_ty), mask=mask)
    if not WHOLE:
        lse = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + out_row, lse, mask=real)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """Launch configuration of :func:`prefill_attention`."""

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int
    bulk: bool = True  # keys and values through descriptors, where they lie so


def prefill_plan(spans: Spans, kv_heads: int, group: int, itemsize: int, sms: int) -> PrefillPlan:
    """Tile sizes and number of parts from the lengths the host knows.

    The figures are medians on an H200, A = 6, G = 1, D = 128, BF16.
    """
    keys = max((k for q, k in zip(spans.q_lengths, spans.k_lengths, strict=True) if q), default=0)
    rows = [n * group for n in spans.q_lengths]
    # 4 x 2048 tokens behind 32k: 1409 us, with tiles of 64 x 64 1494, of 128 x 64 1668.
    block_m, block_n, warps, stages, bulk = 128, 128, 8, 3, True
    if INTERPRETED:
        pass
    elif itemsize > 2:
        # Float32 products are plain FMA: with larger tiles registers spill.
        block_m, block_n, warps, stages = 32, 16, 8, 1
    elif keys <= 16:
        # One step: what counts is the latency. 8 tokens 3.3 us, with tiles of 64 x 64 4.6.
        block_m, block_n, warps, stages, bulk = 16, 16, 4, 1, False
    elif keys <= 4096 or spans.window is not None:
        # Less of a tile is hidden by the causal rule or the window, and two programs share a
        # multiprocessor: 8 x 2048 tokens 115 us, with 128 x 128 125; windows 76, with 128 x 64 86.
        block_m, block_n, warps, stages = 64, 64, 4, 3
        if spans.window is not None and kv_heads * sum(rows) >= 4 * 64 * sms:
            block_n = 32  # 8 x 2048 tokens in windows 71 us, with 64 keys 76; fewer tokens not
    tiles = kv_heads * sum(triton.cdiv(n, block_m) for n in rows)
    if spans.window is not None:
        keys = min(keys, spans.window + triton.cdiv(block_m, group))
    splits = sms // max(tiles, 1)
    if block_m == 128 and tiles <= sms and spans.window is None:
        splits = max(splits, 2)  # halves fill the last wave better: 2048 behind 8k 142 us, not 147
    splits = max(1, min(splits, keys // 512, 8))
    return PrefillPlan(
        block_m=block_m, block_n=block_n, splits=splits, warps=warps, stages=stages, bulk=bulk
    )


@register("prefill_attention", "triton", requires=(triton_runs,))
@strided("q", "k", "v")
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Causal attention of sequences laid end to end, ``[N, A, D]``, rounded once.

    Args:
        q: ``[N, A, D]`` bfloat16 or float32: each sequence's last ``q_lengths[b]`` positions.
        k: ``[M, G, D]``, q's dtype: ``k_lengths[b]`` positions a sequence.
        v: like k.
        spans: where sequences begin, their lengths and the window.
    """
    if q.numel() == 0:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // k.shape[1]
    plan = prefill_plan(spans, k.shape[1], group, q.element_size(), multiprocessors(q.device))
    return launch_prefill(q, k, v, spans, plan)


def _bulk_copies(x: Tensor) -> bool:
    """Whether the hardware's bulk copies can read x ``[M, G, D]``: 16-byte starts and strides."""
    size = x.element_size()
    aligned = all(step * size % 16 == 0 for step in x.stride()[:2])
    return aligned and x.data_ptr() % 16 == 0 and x.shape[0] > 0


def _describe(x: Tensor, block_n: int, block_d: int) -> TensorDescriptor:
    """x ``[M, G, D]`` as a matrix of M rows in which head g begins at column ``g * stride(1)``.

    Past a head_dim that is no power of two lie other heads' values: finite, met by zeros of q in
    the scores, and in the result never stored.
    """
    columns = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    return TensorDescriptor(
        x, shape=[x.shape[0], columns], strides=[x.stride(0), 1], block_shape=[block_n, block_d]
    )


def launch_prefill(q: Tensor, k: Tensor, v: Tensor, spans: Spans, plan: PrefillPlan) -> Tensor:
    """:func:`prefill_attention` with the launch configuration given."""
    queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    whole = plan.splits == 1
    parts, lse = out, out
    if not whole:
        shape = (plan.splits, queries * heads)
        parts = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(max(spans.q_lengths) * group, plan.block_m)
    pdl = dependent_launch(q)
    block_d = max(16, triton.next_power_of_2(dim))
    bulk = plan.bulk and _bulk_copies(k) and _bulk_copies(v)
    cut = spans.window is not None and spans.window < max(spans.k_lengths)  # else it hides nothing
    _prefill[(len(spans.q_lengths) * kv_heads, tiles, plan.splits)](
        q,
        _describe(k, plan.block_n, block_d) if bulk else k,
        _describe(v, plan.block_n, block_d) if bulk else v,
        parts,
        lse,
        spans.q_starts,
        spans.k_starts,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        queries,
        dim**-0.5 * math.log2(math.e),
        plan.splits,
        D=dim,
        KV_HEADS=kv_heads,
        GROUP=group,
        WINDOW=spans.window if cut else 0,
        WHOLE=whole,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_D=block_d,
        BULK=bulk,
        PDL=pdl,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out if whole else merge_splits(parts, lse, out)
