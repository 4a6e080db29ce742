"""Triton kernel of a step's attention: sequences of mixed lengths, several query rows each.

Sum of the packed projection's parts, QK norm, RoPE or SSMax, cache write, split attention, the
merging of the parts by whichever program comes last, and the output gate are one launch.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# Kernels have no annotations but constexpr: Triton types them at each launch.
from __future__ import annotations

from workbench.kernels.rank.triton_attention import _gate
from workbench.kernels.rank.triton_vectors import release, wait
from workbench.kernels.triton_runtime import tl, triton

_LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def _summed(ptr, stride, mask, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Parts of a product added in their order and rounded, as float32."""
    x = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        ptr += stride
        x += tl.load(ptr, mask=mask, other=0.0)
    return x.to(dtype).to(tl.float32)


@triton.jit
def _heads(
    ptr, stride, norm_ptr, angle_ptr, mask, c, eps, D: tl.constexpr, PARTS: tl.constexpr,
    FULL: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Rows of heads, normed (rounded) and in a sliding layer turned by RoPE; float32.

    ``ptr``, ``angle_ptr`` and ``mask`` are ``[rows, 1]``, ``c [1, D]``. The other half of a head is
    loaded again at its place instead of being moved between threads.
    """
    x = _summed(ptr + c, stride, mask, PARTS, dtype)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    y = (x * scale * tl.load(norm_ptr + c).to(tl.float32)).to(dtype).to(tl.float32)
    if not FULL:
        half: tl.constexpr = D // 2
        other = (c + half) % D
        z = _summed(ptr + other, stride, mask, PARTS, dtype)
        z = (z * scale * tl.load(norm_ptr + other).to(tl.float32)).to(dtype).to(tl.float32)
        cos = tl.load(angle_ptr + c % half, mask=mask, other=0.0)
        sin = tl.load(angle_ptr + half + c % half, mask=mask, other=0.0)
        y = y * cos + tl.where(c < half, -z, z) * sin
    return y


@triton.jit(do_not_specialize=["n", "ring"])
def attend_rows(
    packed_ptr,  # [PARTS, N, (2 A + 2 G) D], q | k | v | gate; float32, or rounded and one part
    norm_ptr,  # [2, D]
    position_ptr,  # int64 [N]
    first_ptr,  # int32 [R], a sequence's first row
    new_ptr,  # int32 [R], how many rows it has
    start_ptr,  # int64 [R], where its rows of a full layer's cache begin
    rope_ptr,  # float32 [P, D]
    bias_ptr,  # [A]
    k_ptr,  # [rows, G, D], the new rows are written
    v_ptr,
    parts_ptr,  # float32 [SPLITS, N, A, D]
    lse_ptr,  # float32 [2, SPLITS, N, A], the largest score (base 2) and the sum of each part
    arrivals_ptr,  # int32 [R, G], zero before and after
    out_ptr,  # [N, A D]
    n,
    ring,  # rows of a sequence in a sliding layer
    scale,  # D**-0.5 * log2(e)
    eps,
    A: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    M: tl.constexpr,  # holds the new rows times A / G, at least 16
    T: tl.constexpr,  # holds the new rows, at least 16
    N: tl.constexpr,  # keys a tile
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FULL: tl.constexpr,
    SSMAX_LENGTH: tl.constexpr,
    SSMAX_POWER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of a sequence's new rows over one part of its keys. Grid: (SPLITS, G, R).

    Rows of the tile are row-major, the A / G heads of one new row behind each other. The last part
    has the new rows' own keys, and writes them; of several parts it has no others.
    """
    release(PDL)
    GROUP: tl.constexpr = A // G
    PACKED: tl.constexpr = (2 * A + 2 * G) * D
    split = tl.program_id(0)
    g = tl.program_id(1)
    r = tl.program_id(2)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    first = tl.load(first_ptr + r).to(tl.int64)
    new = tl.load(new_ptr + r)
    begins = tl.load(position_ptr + first).to(tl.int32)  # of the first new row
    if FULL:
        oldest = begins * 0
        base = tl.load(start_ptr + r)
    else:
        oldest = tl.maximum(begins - WINDOW + 1, 0)
        base = r.to(tl.int64) * ring
    blocks = tl.cdiv(begins - oldest, N)
    CACHED: tl.constexpr = SPLITS - 1 if SPLITS > 1 else 1
    begin = oldest + split * blocks // CACHED * N
    end = tl.minimum(oldest + (split + 1) * blocks // CACHED * N, begins)
    j = tl.arange(0, N)
    c = tl.arange(0, D)[None, :]
    k_ptr += base * (G * D) + g * D
    v_ptr += base * (G * D) + g * D

    wait(PDL)
    stride = n.to(tl.int64) * PACKED
    m = tl.arange(0, M)
    t = m // GROUP
    real = t < new
    head = g * GROUP + m % GROUP
    row = first + t
    rows = packed_ptr + row[:, None] * PACKED
    angle = rope_ptr + (begins + t)[:, None].to(tl.int64) * D
    q = _heads(
        rows + (head * D)[:, None], stride, norm_ptr, angle, real[:, None], c, eps, D, PARTS, FULL,
        dtype,
    )  # fmt: skip
    if FULL:
        place = (begins + t).to(tl.float32) + 1.0
        q *= tl.exp(SSMAX_POWER * tl.log(1.0 + place / SSMAX_LENGTH))[:, None]
    q = q.to(dtype)
    top = tl.full((M,), _LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    o = tl.zeros((M, D), tl.float32)
    for key in tl.range(begin, end, N, num_stages=STAGES):
        at = key + j
        if FULL:
            at = at.to(tl.int64)[:, None] * (G * D) + c
        else:
            at = (at % ring).to(tl.int64)[:, None] * (G * D) + c
        inside = (key + j < end)[:, None]
        k = tl.load(k_ptr + at, mask=inside, other=0.0)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        visible = (key + j < end)[None, :]
        if not FULL:
            visible = visible & ((key + j)[None, :] > (begins + t)[:, None] - WINDOW)
        score = tl.where(visible, score, float("-inf"))
        high = tl.maximum(top, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - high[:, None])
        keep = tl.exp2(top - high)
        total = total * keep + tl.sum(p, 1)
        o = tl.dot(p.to(dtype), v, o * keep[:, None], input_precision="ieee")
        top = high

    if split == SPLITS - 1:  # the new rows' own keys, which go into the cache too
        i = tl.arange(0, T)
        there = (i < new)[:, None]
        own = packed_ptr + (first + i)[:, None] * PACKED + (A + g) * D
        turned = rope_ptr + (begins + i)[:, None].to(tl.int64) * D
        k = _heads(own, stride, norm_ptr + D, turned, there, c, eps, D, PARTS, FULL, dtype).to(
            dtype
        )
        v = _summed(own + G * D + c, stride, there, PARTS, dtype).to(dtype)
        at = begins + i
        if not FULL:
            at = at % ring
        at = at.to(tl.int64)[:, None] * (G * D) + c
        tl.store(k_ptr + at, k, mask=there)
        tl.store(v_ptr + at, v, mask=there)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        visible = (i[None, :] <= t[:, None]) & (i < new)[None, :]
        score = tl.where(visible, score, float("-inf"))
        high = tl.maximum(top, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - high[:, None])
        keep = tl.exp2(top - high)
        total = total * keep + tl.sum(p, 1)
        o = tl.dot(p.to(dtype), v, o * keep[:, None], input_precision="ieee")
        top = high

    where = row * A + head
    turn = split * 0 + SPLITS - 1
    if SPLITS > 1:
        line = n.to(tl.int64) * A
        tl.store(parts_ptr + ((split * line + where) * D)[:, None] + c, o, mask=real[:, None])
        # Parts stay sums: what they are divided by goes with them.
        tl.store(lse_ptr + split * line + where, top, mask=real)
        tl.store(lse_ptr + (SPLITS + split) * line + where, total, mask=real)
        tl.debug_barrier()  # all threads' stores come before the release below
        arrival = arrivals_ptr + r * G + g
        turn = tl.atomic_add(arrival, 1, sem="acq_rel")
    if turn == SPLITS - 1:
        if SPLITS > 1:
            tl.store(arrival, 0)
            # From L2, where the other programs wrote it: L1 is not coherent. Some parts at a time,
            # whose loads are in flight together; they are added in their order.
            top = tl.full((M,), _LOWEST, tl.float32)
            for s in tl.static_range(SPLITS):
                its = tl.load(
                    lse_ptr + s * line + where, mask=real, other=_LOWEST, cache_modifier=".cg"
                )
                top = tl.maximum(top, its)
            TOGETHER: tl.constexpr = min(SPLITS, 9 if M < 64 else 3)
            total = tl.zeros((M,), tl.float32)
            o = tl.zeros((M, D), tl.float32)
            for s in range(0, SPLITS, TOGETHER):
                for u in tl.static_range(TOGETHER):
                    at = (s + u) * line + where
                    there = real & (s + u < SPLITS)
                    part = tl.load(
                        parts_ptr + (at * D)[:, None] + c, mask=there[:, None], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    its = tl.load(lse_ptr + at, mask=there, other=_LOWEST, cache_modifier=".cg")
                    sums = tl.load(
                        lse_ptr + SPLITS * line + at, mask=there, other=0.0, cache_modifier=".cg"
                    )
                    add = tl.exp2(its - top)
                    total += sums * add
                    o += part * add[:, None]
        o = o / tl.where(real, total, 1.0)[:, None]
        gate = packed_ptr + (row * PACKED + (A + 2 * G + head) * D)[:, None] + c
        gate = _summed(gate, stride, real[:, None], PARTS, dtype)
        bias = tl.load(bias_ptr + head, mask=real, other=0.0)[:, None]
        o = _gate(o, gate, bias, dtype)
        tl.store(out_ptr + (where * D)[:, None] + c, o.to(dtype), mask=real[:, None])
