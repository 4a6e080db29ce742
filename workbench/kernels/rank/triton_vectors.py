"""Triton kernels of a batch-1 decode step, fused across the borders of the registry's operations.

A row is ``K = K0 + K1`` elements: the largest power of two, and one that holds the rest, so that a
program holds its whole weight rows at once. Weights depend on no kernel, so a program asks for them
first, and only then waits for its predecessor: launched as programmatic dependents, kernels read
their weights while the short dependent kernels before them still compute. Rules of the chain:

* every kernel waits (``gdc_wait``) before it reads what an earlier one of the step wrote, so that
  the end of one means the end of all before it;
* every kernel lets the next be launched first thing, but the top-k and ``experts_up`` only after
  their wait, because the kernel behind them reads the experts' ids before its own;
* no two kernels of a step write the same buffer (``fused.py``), so nothing is overwritten early.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# Kernels have no annotations but constexpr: Triton types them at each launch.
from __future__ import annotations

from workbench.kernels.triton_linear import silu_times
from workbench.kernels.triton_norms import _scaled_add
from workbench.kernels.triton_runtime import tl, triton


def parts(k: int) -> tuple[int, int]:
    """(K0, K1) of a row of ``k``: the largest power of two in it, and one that holds the rest."""
    first = 1 << (k.bit_length() - 1)
    rest = k - first
    return first, triton.next_power_of_2(rest) if rest else 0


@triton.jit
def release(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def weight_tile(tile, live, column, K: tl.constexpr, END: tl.constexpr):
    """A tile of weight rows, read once and never again."""
    if END <= K:
        return tl.load(tile, mask=live[:, None], other=0.0, eviction_policy="evict_first")
    mask = live[:, None] & (column < K)[None, :]
    return tl.load(tile, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def vector(ptr, column, K: tl.constexpr, END: tl.constexpr):
    if END <= K:
        return tl.load(ptr + column).to(tl.float32)
    return tl.load(ptr + column, mask=column < K, other=0.0).to(tl.float32)


def options(pdl: bool) -> dict[str, bool]:
    """Launch options: the interpreter knows none."""
    return {"launch_pdl": True} if pdl else {}


# ------------------------------------------------------------------ vectors


@triton.jit
def embed_norm(
    token_ptr,
    table_ptr,
    weight_ptr,
    h_ptr,
    x_ptr,
    eps,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
):
    """The token's row of the embedding, and its norm. Reads one row; writes h and x ``[K]``."""
    dtype = h_ptr.dtype.element_ty
    a = tl.arange(0, K0)
    weight_a = vector(weight_ptr, a, K, K0)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        weight_b = vector(weight_ptr, b, K, K0 + K1)
    row = table_ptr + tl.load(token_ptr) * K
    x_a = vector(row, a, K, K0)
    total = tl.sum(x_a * x_a, 0)
    if K1 > 0:
        x_b = vector(row, b, K, K0 + K1)
        total += tl.sum(x_b * x_b, 0)
    scale = tl.rsqrt(total / K + eps)
    tl.store(h_ptr + a, x_a.to(dtype))
    tl.store(x_ptr + a, (x_a * scale * weight_a).to(dtype))
    if K1 > 0:
        tl.store(h_ptr + b, x_b.to(dtype), mask=b < K)
        tl.store(x_ptr + b, (x_b * scale * weight_b).to(dtype), mask=b < K)


@triton.jit
def boundary(
    h_ptr,
    sublayer_ptr,
    post_ptr,
    next_ptr,
    stream_ptr,
    out_ptr,
    scale_new,
    scale_old,
    eps,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    PDL: tl.constexpr,
):
    """Post-norm, depth-scaled add, next norm of one row; the norms' weights before the wait."""
    release(PDL)
    dtype = out_ptr.dtype.element_ty
    a = tl.arange(0, K0)
    post_a = vector(post_ptr, a, K, K0)
    next_a = vector(next_ptr, a, K, K0)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        post_b = vector(post_ptr, b, K, K0 + K1)
        next_b = vector(next_ptr, b, K, K0 + K1)
    wait(PDL)
    p_a = vector(sublayer_ptr, a, K, K0)
    h_a = vector(h_ptr, a, K, K0)
    total = tl.sum(p_a * p_a, 0)
    if K1 > 0:
        p_b = vector(sublayer_ptr, b, K, K0 + K1)
        h_b = vector(h_ptr, b, K, K0 + K1)
        total += tl.sum(p_b * p_b, 0)
    scale = tl.rsqrt(total / K + eps)
    p_a = (p_a * scale * post_a).to(dtype).to(tl.float32)
    s_a = _scaled_add(p_a, h_a, scale_new, scale_old, dtype)
    f_a = s_a.to(tl.float32)
    total = tl.sum(f_a * f_a, 0)
    if K1 > 0:
        p_b = (p_b * scale * post_b).to(dtype).to(tl.float32)
        s_b = _scaled_add(p_b, h_b, scale_new, scale_old, dtype)
        f_b = s_b.to(tl.float32)
        total += tl.sum(f_b * f_b, 0)
    scale = tl.rsqrt(total / K + eps)
    tl.store(out_ptr + a, (f_a * scale * next_a).to(dtype))
    tl.store(stream_ptr + a, s_a)
    if K1 > 0:
        tl.store(out_ptr + b, (f_b * scale * next_b).to(dtype), mask=b < K)
        tl.store(stream_ptr + b, s_b, mask=b < K)


# ------------------------------------------------------------------ matrix-vector products


@triton.jit
def product_rows(
    x_ptr,  # [K]
    weight_ptr,  # [WIDTH, K], gated: [2 WIDTH, K], gate rows first
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    dtype: tl.constexpr,
    PDL: tl.constexpr,
):
    """This program's rows of :func:`matvec`: (rows, which of them there are, values in float32)."""
    release(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < WIDTH
    a = tl.arange(0, K0)
    at = weight_ptr + row[:, None].to(tl.int64) * K
    up: tl.constexpr = WIDTH * K
    w_a = weight_tile(at + a[None, :], live, a, K, K0)
    if GATED:
        u_a = weight_tile(at + up + a[None, :], live, a, K, K0)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        w_b = weight_tile(at + b[None, :], live, b, K, K0 + K1)
        if GATED:
            u_b = weight_tile(at + up + b[None, :], live, b, K, K0 + K1)
    wait(PDL)
    x = vector(x_ptr, a, K, K0)[None, :]
    value = tl.sum(w_a.to(tl.float32) * x, 1)
    if GATED:
        other = tl.sum(u_a.to(tl.float32) * x, 1)
    if K1 > 0:
        x = vector(x_ptr, b, K, K0 + K1)[None, :]
        value += tl.sum(w_b.to(tl.float32) * x, 1)
        if GATED:
            other += tl.sum(u_b.to(tl.float32) * x, 1)
    if GATED:
        value = silu_times(value, other, dtype)
    return row, live, value


@triton.jit
def matvec(
    x_ptr,  # [K]
    weight_ptr,  # [WIDTH, K], gated: [2 WIDTH, K], gate rows first
    out_ptr,  # [WIDTH]
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = weight @ x in float32, rounded; gated: its SwiGLU. All weights before the wait."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row, live, value = product_rows(
        x_ptr, weight_ptr, WIDTH, K, K0, K1, ROWS, GATED, dtype, PDL
    )  # fmt: skip
    tl.store(out_ptr + row, value.to(dtype), mask=live)


@triton.jit
def boundary_matvec(
    h_ptr,
    sublayer_ptr,
    post_ptr,
    next_ptr,
    stream_ptr,
    normed_ptr,
    weight_ptr,  # [WIDTH, K]
    out_ptr,  # [WIDTH]
    scale_new,
    scale_old,
    eps,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """:func:`boundary` and the product that follows it; every program norms for itself.

    That costs each program two reductions and saves the chain a launch. The first program writes
    the stream and its norm.
    """
    release(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < WIDTH
    a = tl.arange(0, K0)
    at = weight_ptr + row[:, None].to(tl.int64) * K
    w_a = weight_tile(at + a[None, :], live, a, K, K0)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        w_b = weight_tile(at + b[None, :], live, b, K, K0 + K1)
    # Not yet as float32, which would take twice the registers.
    post_a = tl.load(post_ptr + a, mask=a < K, other=0.0)
    next_a = tl.load(next_ptr + a, mask=a < K, other=0.0)
    if K1 > 0:
        post_b = tl.load(post_ptr + b, mask=b < K, other=0.0)
        next_b = tl.load(next_ptr + b, mask=b < K, other=0.0)
    wait(PDL)
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    p_a = vector(sublayer_ptr, a, K, K0)
    h_a = vector(h_ptr, a, K, K0)
    total = tl.sum(p_a * p_a, 0)
    if K1 > 0:
        p_b = vector(sublayer_ptr, b, K, K0 + K1)
        h_b = vector(h_ptr, b, K, K0 + K1)
        total += tl.sum(p_b * p_b, 0)
    scale = tl.rsqrt(total / K + eps)
    p_a = (p_a * scale * post_a.to(tl.float32)).to(dtype).to(tl.float32)
    s_a = _scaled_add(p_a, h_a, scale_new, scale_old, dtype)
    f_a = s_a.to(tl.float32)
    total = tl.sum(f_a * f_a, 0)
    if K1 > 0:
        p_b = (p_b * scale * post_b.to(tl.float32)).to(dtype).to(tl.float32)
        s_b = _scaled_add(p_b, h_b, scale_new, scale_old, dtype)
        f_b = s_b.to(tl.float32)
        total += tl.sum(f_b * f_b, 0)
    scale = tl.rsqrt(total / K + eps)
    x_a = (f_a * scale * next_a.to(tl.float32)).to(dtype)
    if tl.program_id(0) == 0:
        tl.store(stream_ptr + a, s_a)
        tl.store(normed_ptr + a, x_a)
    value = tl.sum(w_a.to(tl.float32) * x_a.to(tl.float32)[None, :], 1)
    if K1 > 0:
        x_b = (f_b * scale * next_b.to(tl.float32)).to(dtype)
        if tl.program_id(0) == 0:
            tl.store(stream_ptr + b, s_b, mask=b < K)
            tl.store(normed_ptr + b, x_b, mask=b < K)
        value += tl.sum(w_b.to(tl.float32) * x_b.to(tl.float32)[None, :], 1)
    tl.store(out_ptr + row, value.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def head(
    x_ptr,  # [K]
    weight_ptr,  # [WIDTH, K]
    logits_ptr,  # float32 [WIDTH]
    best_ptr,  # float32 [programs]
    where_ptr,  # int32 [programs]
    inverse,
    cap,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    ROWS: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rounded logits, softcapped in float32, and the largest of this program's with its row."""
    release(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < WIDTH
    a = tl.arange(0, K0)
    at = weight_ptr + row[:, None].to(tl.int64) * K
    w_a = weight_tile(at + a[None, :], live, a, K, K0)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        w_b = weight_tile(at + b[None, :], live, b, K, K0 + K1)
    wait(PDL)
    value = tl.sum(w_a.to(tl.float32) * vector(x_ptr, a, K, K0)[None, :], 1)
    if K1 > 0:
        value += tl.sum(w_b.to(tl.float32) * vector(x_ptr, b, K, K0 + K1)[None, :], 1)
    value = value.to(x_ptr.dtype.element_ty).to(tl.float32)
    if CAPPED:
        y = value * inverse
        # tanh, by its series where 1 - 2 / (e^2y + 1) would cancel.
        s = y * y
        tail = 0.13333333 + s * (-0.053968254 + s * 0.021869488)
        small = y + y * s * (-0.33333333 + s * tail)
        value = tl.where(s < 0.0625, small, 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)) * cap
    tl.store(logits_ptr + row, value, mask=live)
    value = tl.where(live, value, float("-inf"))
    best = tl.max(value, 0)
    tl.store(best_ptr + tl.program_id(0), best)
    tl.store(where_ptr + tl.program_id(0), tl.min(tl.where(value == best, row, WIDTH), 0))


@triton.jit
def pick(
    best_ptr,
    where_ptr,
    token_ptr,
    next_ptr,
    position_ptr,
    last,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first of the largest logits becomes the next token; the position goes on by one."""
    i = tl.arange(0, BLOCK)
    wait(PDL)
    best = tl.load(best_ptr + i, mask=i < COUNT, other=float("-inf"))
    where = tl.load(where_ptr + i, mask=i < COUNT, other=WIDTH)
    chosen = tl.min(tl.where(best == tl.max(best, 0), where, WIDTH), 0).to(tl.int64)
    tl.store(token_ptr, chosen)
    tl.store(next_ptr, chosen)
    tl.store(position_ptr, tl.minimum(tl.load(position_ptr) + 1, last))
