"""Triton kernels of one token's attention in the fused chain (rules: ``triton_vectors.py``).

QK norm, position, cache write and split attention are one kernel; merging the parts and the output
gate belong to the output projection, or to a kernel of their own where the parts are many.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# Kernels have no annotations but constexpr: Triton types them at each launch.
from __future__ import annotations

from workbench.kernels.rank.triton_vectors import release, wait
from workbench.kernels.triton_runtime import tl, triton

_LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def _turned(x_ptr, norm_ptr, rope_ptr, mask, c, D: tl.constexpr, eps, FULL: tl.constexpr):
    """Rows of heads, normed (rounded), and turned by RoPE in a sliding layer; float32.

    ``x_ptr``, ``norm_ptr`` and ``mask`` are ``[rows, 1]``-shaped, ``c [1, D]`` the columns. The
    other half of a head is loaded again at its place instead of being moved between threads.
    """
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + c, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    y = (x * scale * tl.load(norm_ptr + c).to(tl.float32)).to(dtype).to(tl.float32)
    if not FULL:
        half: tl.constexpr = D // 2
        other = (c + half) % D
        z = tl.load(x_ptr + other, mask=mask, other=0.0).to(tl.float32)
        z = (z * scale * tl.load(norm_ptr + other).to(tl.float32)).to(dtype).to(tl.float32)
        cos = tl.load(rope_ptr + c % half)
        sin = tl.load(rope_ptr + half + c % half)
        y = y * cos + tl.where(c < half, -z, z) * sin
    return y


@triton.jit
def attend(
    packed_ptr,  # [(2 A + 2 G) D] q | k | v | gate
    norm_ptr,  # [2, D]
    position_ptr,
    rope_ptr,  # float32 [P, D]
    k_ptr,  # [R, G, D], the row of this token is written
    v_ptr,
    parts_ptr,  # float32 [SPLITS, A, D]
    lse_ptr,  # float32 [SPLITS, A], base 2
    ring,
    scale,  # D**-0.5 * log2(e)
    eps,
    A: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,  # more than A / G, at least 16
    N: tl.constexpr,  # keys a tile
    SPLITS: tl.constexpr,
    FULL: tl.constexpr,
    LONG: tl.constexpr,  # many tiles a program: the next is asked for before this one's products
    SSMAX_LENGTH: tl.constexpr,
    SSMAX_POWER: tl.constexpr,
    PDL: tl.constexpr,
):
    """QK norm, RoPE or SSMax, cache write and attention over one part of the keys of a KV head.

    Earlier tokens' keys come from the cache, and their first tile before the wait: only this
    token's key, value and query come from the kernel before. The order of the keys in a ring does
    not matter; a row that holds no visible key is masked. Grid: (G, SPLITS).
    """
    release(PDL)
    GROUP: tl.constexpr = A // G
    g = tl.program_id(0)
    split = tl.program_id(1)
    dtype = packed_ptr.dtype.element_ty
    position = tl.load(position_ptr).to(tl.int32)
    own = position % ring
    held = tl.minimum(position, ring)  # rows below it hold earlier tokens, but for ``own``
    blocks = tl.cdiv(held, N)
    begin = split * blocks // SPLITS * N
    end = tl.minimum((split + 1) * blocks // SPLITS * N, held)
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    at = (begin + n).to(tl.int64)[:, None] * (G * D) + g * D + d[None, :]
    inside = (begin + n < end)[:, None]
    k = tl.load(k_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)
    c = d[None, :]
    angle = rope_ptr + position.to(tl.int64) * D

    wait(PDL)
    # Rows of the tile: the query heads of this KV head, and behind them this token's key.
    m = tl.arange(0, M)
    real = m < GROUP
    head = g * GROUP + m
    source = tl.where(real, head, A + g)
    norms = norm_ptr + tl.where(real, 0, D)[:, None]
    there = (m <= GROUP)[:, None]
    value = tl.load(packed_ptr + (A + G + g) * D + d)
    y = _turned(packed_ptr + source[:, None] * D, norms, angle, there, c, D, eps, FULL)
    key = tl.sum(tl.where((m == GROUP)[:, None], y, 0.0), 0).to(dtype)
    if FULL:
        y *= tl.exp(SSMAX_POWER * tl.log(1.0 + (position.to(tl.float32) + 1.0) / SSMAX_LENGTH))
    q = y.to(dtype)
    top = tl.full((M,), _LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    o = tl.zeros((M, D), tl.float32)
    for start in range(begin, end, N):
        row = start + n
        visible = (row < end) & (row != own)
        if LONG:
            at = (row + N).to(tl.int64)[:, None] * (G * D) + g * D + c
            inside = (row + N < end)[:, None]
            next_k = tl.load(k_ptr + at, mask=inside, other=0.0)
            next_v = tl.load(v_ptr + at, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = tl.where(visible[None, :], score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - new[:, None])
        keep = tl.exp2(top - new)
        total = total * keep + tl.sum(p, 1)
        o = tl.dot(p.to(dtype), v, o * keep[:, None], input_precision="ieee")
        top = new
        if LONG:
            k = next_k
            v = next_v
        else:
            row += N
            at = row.to(tl.int64)[:, None] * (G * D) + g * D + c
            inside = (row < end)[:, None]
            k = tl.load(k_ptr + at, mask=inside, other=0.0)
            v = tl.load(v_ptr + at, mask=inside, other=0.0)

    if split == SPLITS - 1:  # this token's own key, which goes into the cache too
        place = own.to(tl.int64) * (G * D) + g * D + d
        tl.store(k_ptr + place, key)
        tl.store(v_ptr + place, value)
        score = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        new = tl.maximum(top, score)
        p = tl.exp2(score - new)
        keep = tl.exp2(top - new)
        total = total * keep + p
        o = o * keep[:, None] + p[:, None] * value.to(tl.float32)[None, :]
        top = new

    seen = total > 0  # a part without a key weighs nothing
    o = o / tl.where(seen, total, 1.0)[:, None]
    out = split * A + head
    tl.store(parts_ptr + out[:, None] * D + c, o, mask=real[:, None])
    lse = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + out, lse, mask=real)


@triton.jit
def _gate(o, gate, bias, dtype: tl.constexpr):
    """``round(round(o) * round(sigmoid(round(gate + bias))))`` as float32."""
    g = (gate.to(tl.float32) + bias.to(tl.float32)).to(dtype).to(tl.float32)
    g = (1.0 / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    return (o.to(dtype).to(tl.float32) * g).to(dtype).to(tl.float32)


@triton.jit
def merge_gate(
    parts_ptr,  # float32 [SPLITS, A, D]
    lse_ptr,  # float32 [SPLITS, A]
    gate_ptr,  # [A D]
    bias_ptr,  # [A]
    out_ptr,  # [A D]
    A: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Many parts of one head merged, and the output gate. Grid: (A, D / COLUMNS)."""
    release(PDL)
    head = tl.program_id(0)
    s = tl.arange(0, BLOCK)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wait(PDL)
    lse = tl.load(lse_ptr + s * A + head, mask=s < SPLITS, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    at = parts_ptr + ((s * A + head) * D)[:, None] + c[None, :]
    part = tl.load(at, mask=(s < SPLITS)[:, None] & (c < D)[None, :], other=0.0)
    o = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + head * D + c, mask=c < D, other=0.0)
    o = _gate(o, gate, tl.load(bias_ptr + head), dtype)
    tl.store(out_ptr + head * D + c, o.to(dtype), mask=c < D)


@triton.jit
def projected_rows(
    parts_ptr,  # float32 [SPLITS, A, D]
    lse_ptr,  # float32 [SPLITS, A]
    gate_ptr,  # [A D]
    bias_ptr,  # [A]
    weight_ptr,  # [WIDTH, A D]
    WIDTH: tl.constexpr,
    A: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # power of two that holds A
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    dtype: tl.constexpr,
    PDL: tl.constexpr,
):
    """This program's rows of :func:`o_proj`: (rows, which of them there are, values in float32).

    Tiles are ``[heads, D]``, so that what belongs to a head is loaded once a head.
    """
    release(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, HEADS)
    d = tl.arange(0, D)
    within = head[:, None] * D + d[None, :]
    there = (head < A)[:, None]
    at = weight_ptr + (row * (A * D))[:, None, None] + within[None, :, :]
    live = (row < WIDTH)[:, None, None] & there[None, :, :]
    w = tl.load(at, mask=live, other=0.0, eviction_policy="evict_first")
    bias = tl.load(bias_ptr + head, mask=head < A, other=0.0)[:, None]
    wait(PDL)
    gate = tl.load(gate_ptr + within, mask=there, other=0.0)
    top = tl.load(lse_ptr + head, mask=head < A, other=0.0)
    for s in tl.static_range(1, SPLITS):
        top = tl.maximum(top, tl.load(lse_ptr + s * A + head, mask=head < A, other=0.0))
    total = top * 0
    o = tl.zeros((HEADS, D), tl.float32)
    for s in tl.static_range(SPLITS):
        share = tl.exp2(tl.load(lse_ptr + s * A + head, mask=head < A, other=0.0) - top)
        o += share[:, None] * tl.load(parts_ptr + s * (A * D) + within, mask=there, other=0.0)
        total += share
    x = _gate(o / total[:, None], gate, bias, dtype)
    value = tl.sum(tl.sum(w.to(tl.float32) * x[None, :, :], 2), 1)
    return row, row < WIDTH, value


@triton.jit
def o_proj(
    parts_ptr,  # float32 [SPLITS, A, D]
    lse_ptr,  # float32 [SPLITS, A]
    gate_ptr,  # [A D]
    bias_ptr,  # [A]
    weight_ptr,  # [WIDTH, A D]
    out_ptr,  # [WIDTH]
    WIDTH: tl.constexpr,
    A: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # power of two that holds A
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few parts merged, gated and projected; every program merges for itself."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row, live, value = projected_rows(
        parts_ptr, lse_ptr, gate_ptr, bias_ptr, weight_ptr, WIDTH, A, D, HEADS, SPLITS, ROWS,
        dtype, PDL,
    )  # fmt: skip
    tl.store(out_ptr + row, value.to(dtype), mask=live)
