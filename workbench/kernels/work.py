"""Bytes and FLOPs of one call of each operation: every operand once, a multiply-add as two FLOPs.

What a kernel reads again, or writes in between, is its own affair: these are the least any
implementation moves, which is what a roofline is drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.kernels.case import Request
from workbench.kernels.roofline import SPLIT, Work

FP32 = 4
INT64 = 8


def _size(r: Request) -> int:
    return torch.empty((), dtype=r.dtype).element_size()


def _math(r: Request) -> str:
    return "bf16" if r.dtype == torch.bfloat16 else "fp32"


def _store(r: Request) -> int:
    """Bytes of a cached number."""
    return 1 if "fp8" in r.flavour else _size(r)


def _work(r: Request, name: str, bytes_: float, flops: float, math: str = "") -> Work:
    return Work(name=name, bytes=bytes_, flops=flops, math=math or _math(r))


def rms_norm(r: Request) -> Work:
    """x and the weight in, y out; square, sum, two products."""
    h, b = r.shapes.hidden, _size(r)
    return _work(r, "rms_norm", (2 * r.tokens + 1) * h * b, 4 * r.tokens * h, "fp32")


def boundary(r: Request) -> Work:
    """Stream and sublayer in, stream and normed out, two weights."""
    h, b = r.shapes.hidden, _size(r)
    return _work(r, "boundary", (4 * r.tokens + 2) * h * b, 11 * r.tokens * h, "fp32")


def _linear(r: Request, name: str, rows: int, columns: int) -> Work:
    n, b = r.tokens, _size(r)
    moved = (rows * columns + n * (rows + columns)) * b
    return _work(r, name, moved if n else 0, 2 * n * rows * columns)


def qkvg(r: Request) -> Work:
    """The weight once, x in, packed out."""
    return _linear(r, "qkvg", r.shapes.packed, r.shapes.hidden)


def qkv_write(r: Request) -> Work:
    """q, k, v in; q out; k and v into the cache; a row of the RoPE table a token (sliding).

    Each token has a position and, unless they are written in order, a row of the cache.
    """
    s, n = r.shapes, r.tokens
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    table = 0 if "full" in r.flavour else FP32 * s.head_dim
    each = (2 * q + 2 * kv) * _size(r) + 2 * kv * _store(r) + table
    each += INT64 if "sequence" in r.flavour else 2 * INT64
    return _work(r, "qkv_write", n * each, n * 8 * (q + kv), "fp32")


def decode_attention(r: Request, first: Sequence[int], queries: int) -> Work:
    """Every visible key and value once a sequence, q in, o out."""
    s = r.shapes
    window = None if "full" in r.flavour else s.window
    keys = pairs = 0
    for start in first:
        low = 0 if window is None else max(0, start - window + 1)
        keys += start + queries - low
        pairs += sum(
            start + t + 1 if window is None else min(start + t + 1, window) for t in range(queries)
        )
    n = len(first) * queries
    moved = 2 * keys * s.kv_heads * s.head_dim * _store(r)
    moved += 2 * n * s.heads * s.head_dim * _size(r)
    return _work(r, "decode_attention", moved, 4 * pairs * s.heads * s.head_dim)


def prefill_attention(r: Request, queries: Sequence[int], keys: Sequence[int]) -> Work:
    """Every key and value once, q in, o out; FLOPs of the visible pairs only."""
    s = r.shapes
    window = None if "full" in r.flavour else s.window
    pairs = 0
    for q, k in zip(queries, keys, strict=True):
        reach = range(k - q + 1, k + 1)
        pairs += sum(reach) if window is None else sum(min(p, window) for p in reach)
    moved = 2 * sum(keys) * s.kv_heads * s.head_dim + 2 * sum(queries) * s.heads * s.head_dim
    return _work(r, "prefill_attention", moved * _size(r), 4 * pairs * s.heads * s.head_dim)


def output_gate(r: Request) -> Work:
    """o and gate in, y out."""
    s = r.shapes
    q = s.heads * s.head_dim
    return _work(
        r, "output_gate", (3 * r.tokens * q + s.heads) * _size(r), 5 * r.tokens * q, "fp32"
    )


def router(r: Request) -> Work:
    """The float32 weight once, x in, ids and weights out; FP32-exact products (``SPLIT``)."""
    s, n = r.shapes, r.tokens
    moved = s.experts * (s.hidden + 1) * FP32 + n * s.hidden * _size(r)
    moved += n * s.top_k * (INT64 + FP32)
    flops = 2 * n * s.experts * s.hidden
    return _work(r, "router", moved if n else 0, flops, SPLIT if _math(r) == "bf16" else "fp32")


def expert_mlp(r: Request, touched: int) -> Work:
    """The weights of the experts that are touched, once each; x in, y out."""
    s, n, b = r.shapes, r.tokens, _size(r)
    moved = touched * 3 * s.expert_width * s.hidden * b + 2 * n * s.hidden * b
    moved += n * s.top_k * (INT64 + FP32)
    return _work(r, "expert_mlp", moved, 6 * n * s.top_k * s.expert_width * s.hidden)


def dense_mlp(r: Request) -> Work:
    """Three matrices once, x in, y out."""
    s, n, b = r.shapes, r.tokens, _size(r)
    moved = 3 * s.mlp_width * s.hidden * b + 2 * n * s.hidden * b
    return _work(r, "dense_mlp", moved if n else 0, 6 * n * s.mlp_width * s.hidden)


def softcap(r: Request) -> Work:
    """Logits in, float32 out."""
    n = r.tokens * r.shapes.vocabulary
    return _work(r, "softcap", n * (_size(r) + FP32), 10 * n, "fp32")


def dynamic_conv(r: Request, rows: int) -> Work:
    """x and the coefficients in, the base once, y out."""
    s, b = r.shapes, _size(r)
    moved = (2 * rows * s.hidden + rows * s.taps * s.conv_groups + s.taps * s.hidden) * b
    return _work(r, "dynamic_conv", moved, 3 * rows * s.taps * s.hidden, "fp32")


def conv_residual_norm(r: Request, rows: int) -> Work:
    """As the convolution, the residual in and out, the norm's weight."""
    s, b = r.shapes, _size(r)
    one = dynamic_conv(r, rows)
    moved = one.bytes + (2 * rows + 1) * s.hidden * b
    return _work(r, "conv_residual_norm", moved, one.flops + 5 * rows * s.hidden, "fp32")


def context_kv_write(r: Request) -> Work:
    """Projected K and V in, both into the cache, a row of the RoPE table a token."""
    s, n = r.shapes, r.tokens
    wide = s.draft_layers * s.draft_kv_heads * s.draft_head_dim
    each = 2 * wide * (_size(r) + _store(r)) + s.draft_head_dim * _size(r) + 2 * INT64
    return _work(r, "context_kv_write", n * each, 8 * n * wide, "fp32")


def candidate_edges(r: Request, batch: int) -> Work:
    """The code rows of the candidates once each, hidden and unary in, edges out."""
    s, b = r.shapes, _size(r)
    n, k, rank = batch * s.draft_tokens, s.candidates, s.selector_rank
    # Successors of every position; predecessors: the anchor, then the candidates before.
    rows = n * k + batch * (1 + (s.draft_tokens - 1) * k)
    moved = (rows + n) * rank * b + n * k * (INT64 + FP32 + FP32 * k)
    return _work(r, "candidate_edges", moved, n * k * (rank + 2 * k * rank), "fp32")


def selector_walk(r: Request, batch: int) -> Work:
    """One row of edges a draft position, its ids, tokens and realized scores out."""
    s = r.shapes
    n, k = batch * s.draft_tokens, s.candidates
    noise = FP32 * k if r.flavour == "sampled" else 0
    return _work(
        r, "selector_walk", n * (k * (2 * FP32 + INT64) + noise + INT64), 2 * n * k, "fp32"
    )
