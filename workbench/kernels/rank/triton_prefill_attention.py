"""Attention of a prefill with the output gate in its epilogue, for keys read through descriptors.

The loop over keys is that of ``kernels/triton_prefill.py``. ``late`` adds a tile's values one step
later: the product of one tile's values then runs on the tensor cores while the softmax of the next
tile keeps the other units busy (Shah et al., "FlashAttention-3", 2024, overlap the two alike).
The gate costs its own read and nothing else: attention's output is never written ungated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, multiprocessors
from workbench.kernels.reach import Spans
from workbench.kernels.triton_attention import _LOWEST
from workbench.kernels.triton_prefill import _bulk_copies, _describe, _tiles, prefill_plan
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton


@triton.jit
def _late_tiles(
    k_src,
    v_src,
    q,
    o,
    top,
    total,
    begin,
    end,
    k_start,
    k_at,
    v_at,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tiles of keys from ``begin`` up to ``end`` (whole tiles), all seen by every row.

    A step multiplies its keys, then the values of the step before, whose softmax is done: nothing
    of the step waits for that product but the next step's.
    """
    dtype: tl.constexpr = q.dtype
    BITS: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    first = k_start.to(tl.int32)
    # Carried as bits, since the compiler gives the tensor cores registers only of what an operation
    # of the same step made (a reinterpretation, which costs nothing), and shared memory otherwise.
    p = tl.zeros((BLOCK_M, BLOCK_N), dtype).to(BITS, bitcast=True)
    keep = tl.full((BLOCK_M,), 1.0, tl.float32)
    for start in range(begin, end, BLOCK_N):
        k = k_src.load([first + start, k_at])
        # Before the first step there is none: zeros meet values that are there.
        v = v_src.load([first + tl.maximum(start - BLOCK_N, begin), v_at])
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        o = tl.dot(p.to(dtype, bitcast=True), v, o * keep[:, None], input_precision="ieee")
        new = tl.maximum(top, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - new[:, None])
        keep = tl.exp2(top - new)
        total = total * keep + tl.sum(weight, 1)
        top = new
        p = weight.to(dtype).to(BITS, bitcast=True)
    if begin < end:
        v = v_src.load([first + end - BLOCK_N, v_at])
        o = tl.dot(p.to(dtype, bitcast=True), v, o * keep[:, None], input_precision="ieee")
    return o, top, total


@triton.jit
def _gated_prefill_kernel(
    q_ptr,
    k_src,
    v_src,
    gate_ptr,
    bias_ptr,
    out_ptr,
    q_starts_ptr,
    k_starts_ptr,
    q_n,
    q_h,
    k_h,
    v_h,
    gate_n,
    scale,
    D: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gated attention of one tile of query rows (tokens x the heads of a KV head) of one sequence.

    Reads q ``[N, A, D]``, K and V ``[M, G, D]`` through descriptors, gate ``[N, A, D]`` with rows
    gate_n apart, bias ``[A]``; writes ``out [N, A, D]``. Grid: (B * G, tiles of the longest
    sequence).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    # The last tiles see the most keys: they start first, so that the short ones fill the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
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
    mask = real[:, None] & (d < D)[None, :]
    at = (q_start + token) * q_n + query_head * q_h
    q = tl.load(q_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)

    # Tiles that every row sees are those from `clear` up to `edge`, as in kernels/triton_prefill.
    shift = k_length - q_length
    position = shift + token
    oldest = shift + tile * BLOCK_M // GROUP
    newest = shift + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_length - 1)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(oldest - WINDOW + 1, 0)
    end = low + tl.cdiv(newest + 1 - low, BLOCK_N) * BLOCK_N
    edge = low + (oldest + 1 - low) // BLOCK_N * BLOCK_N
    clear = low
    if WINDOW > 0:
        clear = low + tl.cdiv(tl.maximum(newest - WINDOW + 1 - low, 0), BLOCK_N) * BLOCK_N
        clear = tl.minimum(clear, edge)

    k_at = head * k_h
    v_at = head * v_h
    top = tl.full((BLOCK_M,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    o = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if WINDOW > 0:
        o, top, total = _tiles(
            k_src, v_src, q, o, top, total, low, clear, newest + 1, position,
            k_start, k_at, v_at, 0, 0, scale,
            D, WINDOW, BLOCK_N, BLOCK_D, True, True,
        )  # fmt: skip
    if LATE:
        o, top, total = _late_tiles(
            k_src, v_src, q, o, top, total, clear, edge,
            k_start, k_at, v_at, scale, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        o, top, total = _tiles(
            k_src, v_src, q, o, top, total, clear, edge, newest + 1, position,
            k_start, k_at, v_at, 0, 0, scale,
            D, WINDOW, BLOCK_N, BLOCK_D, True, False,
        )  # fmt: skip
    o, top, total = _tiles(
        k_src, v_src, q, o, top, total, edge, end, newest + 1, position,
        k_start, k_at, v_at, 0, 0, scale,
        D, WINDOW, BLOCK_N, BLOCK_D, True, True,
    )  # fmt: skip

    # The roundings of attention's output, then those of the operation output_gate.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    o = (o / tl.where(total > 0, total, 1.0)[:, None]).to(dtype).to(tl.float32)
    inner = (query_head * D)[:, None] + d[None, :]
    token_row = q_start + token
    gate = tl.load(gate_ptr + (token_row * gate_n)[:, None] + inner, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + query_head)
    g = (gate.to(tl.float32) + bias.to(tl.float32)[:, None]).to(dtype).to(tl.float32)
    g = (1.0 / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    out_row = (token_row * (KV_HEADS * GROUP * D))[:, None]
    tl.store(out_ptr + out_row + inner, (o * g).to(dtype), mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedPlan:
    """Launch of :func:`gated_prefill`; ``late``: values are added one tile of keys later."""

    block_m: int = 128
    block_n: int = 128
    warps: int = 8
    stages: int = 3
    late: bool = False


# Interpreted, late or not is the same work; the loop that a GPU takes is the one that is tested.
_LATE_FROM = 0 if INTERPRETED else 4096  # keys; with fewer, the step that drains costs more


def gated_plan(q: Tensor, k: Tensor, spans: Spans) -> GatedPlan | None:
    """The usual plan; None where the keys had better be divided among several programs."""
    kv_heads = k.shape[1]
    sms = multiprocessors(q.device)
    found = prefill_plan(spans, kv_heads, q.shape[1] // kv_heads, q.element_size(), sms)
    if found.splits > 1 or not found.bulk:
        return None
    return GatedPlan(
        block_m=found.block_m, block_n=found.block_n, warps=found.warps, stages=found.stages,
        late=spans.window is None and max(spans.k_lengths) > _LATE_FROM,
    )  # fmt: skip


def gated_prefill(
    q: Tensor,  # [N, A, D]
    k: Tensor,  # [M, G, D]
    v: Tensor,
    gate: Tensor,  # [N, A, D], heads next to one another
    bias: Tensor,  # [A]
    spans: Spans,
    plan: GatedPlan | None = None,
) -> Tensor | None:
    """Causal attention and the output gate, ``[N, A, D]``: as the two operations, rounded alike.

    None, and nothing is launched, where this kernel is not for such keys (no descriptor can read
    them, or there are too few tiles): then the two operations have to do it.
    """
    how = plan or gated_plan(q, k, spans)
    dim = q.shape[2]
    if how is None or not (_bulk_copies(k) and _bulk_copies(v)):
        return None
    if gate.stride(2) != 1 or gate.stride(1) != dim or q.stride(2) != 1:
        return None
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_d = max(16, triton.next_power_of_2(dim))
    cut = spans.window is not None and spans.window < max(spans.k_lengths)  # else it hides nothing
    pdl = dependent_launch(q)
    tiles = triton.cdiv(max(spans.q_lengths) * group, how.block_m)
    _gated_prefill_kernel[(len(spans.q_lengths) * kv_heads, tiles)](
        q,
        _describe(k, how.block_n, block_d),
        _describe(v, how.block_n, block_d),
        gate,
        bias,
        out,
        spans.q_starts,
        spans.k_starts,
        *q.stride()[:2],
        k.stride(1),
        v.stride(1),
        gate.stride(0),
        dim**-0.5 * math.log2(math.e),
        D=dim,
        KV_HEADS=kv_heads,
        GROUP=group,
        WINDOW=spans.window if cut else 0,
        BLOCK_M=how.block_m,
        BLOCK_N=how.block_n,
        BLOCK_D=block_d,
        LATE=how.late,
        PDL=pdl,
        num_warps=how.warps,
        num_stages=how.stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
