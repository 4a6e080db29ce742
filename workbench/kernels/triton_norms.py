"""Triton kernels for RMSNorm and the boundary between two sublayers, one row at a time.

A row is read once, held in registers and written once. 5120 is not a power of two, and a tile has
to be one: a row is cut into chunks of ``C`` columns, a first part of ``R`` chunks and, for what is
left, a second part of ``T`` chunks (5120 = 4 x 1024 + 1 x 1024), so that few lanes are idle. The
chunks of a part are summed within a thread, so a reduction crosses threads once for both parts.
With few rows the weights are loaded together with the row, which saves a memory latency; with many
they are loaded when they are used, and the registers hold more rows at a time instead.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, strided
from workbench.kernels.registry import register
from workbench.kernels.requirements import triton_runs
from workbench.kernels.triton_elementwise import after_predecessor
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton


@triton.jit
def _load(ptr, column, H: tl.constexpr, END: tl.constexpr):
    """Columns of a part that ends at ``END``; a mask only where the part passes the row's end."""
    return tl.load(ptr + column) if END <= H else tl.load(ptr + column, column < H, 0.0)


@triton.jit
def _store(ptr, column, x, H: tl.constexpr, END: tl.constexpr):
    if END <= H:
        tl.store(ptr + column, x)
    else:
        tl.store(ptr + column, x, column < H)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    eps,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    EARLY: tl.constexpr,  # load the weights with the row, not when they are used
    PDL: tl.constexpr,
):
    """Mean square, scale, weight. Reads x and the weight, writes the normed row, rounded once."""
    after_predecessor(PDL)
    dtype = out_ptr.dtype.element_ty
    chunk = tl.arange(0, C)[None, :]
    a = tl.arange(0, R)[:, None] * C + chunk
    if T > 0:
        b = (R + tl.arange(0, T)[:, None]) * C + chunk
    if EARLY:
        weight_a = _load(weight_ptr, a, H, R * C)
        if T > 0:
            weight_b = _load(weight_ptr, b, H, (R + T) * C)
    row = tl.program_id(0).to(tl.int64)
    x_a = _load(x_ptr + row * x_stride, a, H, R * C).to(tl.float32)
    squares = tl.sum(x_a * x_a, 0)
    if T > 0:
        x_b = _load(x_ptr + row * x_stride, b, H, (R + T) * C).to(tl.float32)
        squares += tl.sum(x_b * x_b, 0)
    scale = tl.rsqrt(tl.sum(squares, 0) / H + eps)
    if not EARLY:
        weight_a = _load(weight_ptr, a, H, R * C)
        if T > 0:
            weight_b = _load(weight_ptr, b, H, (R + T) * C)
    y_a = (x_a * scale * weight_a.to(tl.float32)).to(dtype)
    _store(out_ptr + row * H, a, y_a, H, R * C)
    if T > 0:
        y_b = (x_b * scale * weight_b.to(tl.float32)).to(dtype)
        _store(out_ptr + row * H, b, y_b, H, (R + T) * C)


@triton.jit
def _scaled_add(p, h, scale_new, scale_old, dtype: tl.constexpr):
    """``round(round(p * scale_new) + round(h * scale_old))`` of a rounded ``p``."""
    new = (p * scale_new).to(dtype).to(tl.float32)
    old = (h.to(tl.float32) * scale_old).to(dtype).to(tl.float32)
    return (new + old).to(dtype)


@triton.jit
def _boundary_kernel(
    h_ptr,
    sublayer_ptr,
    post_ptr,
    next_ptr,
    stream_ptr,
    out_ptr,
    h_stride,
    sublayer_stride,
    scale_new,
    scale_old,
    eps,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    EARLY: tl.constexpr,  # load the weights with the row, not when they are used
    PDL: tl.constexpr,
):
    """Post-norm, depth-scaled add and next pre-norm of a row, which never leaves the registers.

    Reads the stream h, the sublayer's output and two weights; writes the new stream and its norm.
    """
    after_predecessor(PDL)
    dtype = out_ptr.dtype.element_ty
    chunk = tl.arange(0, C)[None, :]
    a = tl.arange(0, R)[:, None] * C + chunk
    if T > 0:
        b = (R + tl.arange(0, T)[:, None]) * C + chunk
    if EARLY:
        post_a = _load(post_ptr, a, H, R * C)
        next_a = _load(next_ptr, a, H, R * C)
        if T > 0:
            post_b = _load(post_ptr, b, H, (R + T) * C)
            next_b = _load(next_ptr, b, H, (R + T) * C)
    row = tl.program_id(0).to(tl.int64)
    p_a = _load(sublayer_ptr + row * sublayer_stride, a, H, R * C).to(tl.float32)
    h_a = _load(h_ptr + row * h_stride, a, H, R * C)
    squares = tl.sum(p_a * p_a, 0)
    if T > 0:
        p_b = _load(sublayer_ptr + row * sublayer_stride, b, H, (R + T) * C).to(tl.float32)
        h_b = _load(h_ptr + row * h_stride, b, H, (R + T) * C)
        squares += tl.sum(p_b * p_b, 0)
    scale = tl.rsqrt(tl.sum(squares, 0) / H + eps)
    if not EARLY:
        post_a = _load(post_ptr, a, H, R * C)
        if T > 0:
            post_b = _load(post_ptr, b, H, (R + T) * C)

    p_a = (p_a * scale * post_a.to(tl.float32)).to(dtype).to(tl.float32)
    s_a = _scaled_add(p_a, h_a, scale_new, scale_old, dtype)
    _store(stream_ptr + row * H, a, s_a, H, R * C)
    s_a = s_a.to(tl.float32)
    squares = tl.sum(s_a * s_a, 0)
    if T > 0:
        p_b = (p_b * scale * post_b.to(tl.float32)).to(dtype).to(tl.float32)
        s_b = _scaled_add(p_b, h_b, scale_new, scale_old, dtype)
        _store(stream_ptr + row * H, b, s_b, H, (R + T) * C)
        s_b = s_b.to(tl.float32)
        squares += tl.sum(s_b * s_b, 0)
    scale = tl.rsqrt(tl.sum(squares, 0) / H + eps)
    if not EARLY:
        next_a = _load(next_ptr, a, H, R * C)
        if T > 0:
            next_b = _load(next_ptr, b, H, (R + T) * C)

    y_a = (s_a * scale * next_a.to(tl.float32)).to(dtype)
    _store(out_ptr + row * H, a, y_a, H, R * C)
    if T > 0:
        y_b = (s_b * scale * next_b.to(tl.float32)).to(dtype)
        _store(out_ptr + row * H, b, y_b, H, (R + T) * C)


@lru_cache(maxsize=64)
def _parts(hidden: int, chunk: int) -> tuple[int, int, int]:
    """(C, R, T): chunk width, and how many chunks each of the two parts of a row has."""
    chunk = min(chunk, triton.next_power_of_2(hidden))
    chunks = -(-hidden // chunk)
    first = 1 << (chunks.bit_length() - 1)
    rest = chunks - first
    return chunk, first, triton.next_power_of_2(rest) if rest else 0


def launch_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    chunk: int,
    warps: int,
    early: bool,
    pdl: bool,
) -> Tensor:
    """The kernel with a given chunk width; ``early``: the weights are loaded with the row."""
    n, hidden = x.shape
    out = torch.empty((n, hidden), dtype=x.dtype, device=x.device)
    if out.numel():
        _rms_norm_kernel[(n,)](
            x,
            weight,
            out,
            x.stride(0),
            eps,
            hidden,
            *_parts(hidden, chunk),
            early,
            pdl,
            num_warps=warps,
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )
    return out


def launch_boundary(
    h: Tensor,
    sublayer: Tensor,
    post_weight: Tensor,
    scale: tuple[float, float],
    next_weight: Tensor,
    eps: float,
    chunk: int,
    warps: int,
    early: bool,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """The kernel with a given chunk width; ``early``: the weights are loaded with the row."""
    n, hidden = h.shape
    stream = torch.empty((n, hidden), dtype=h.dtype, device=h.device)
    out = torch.empty((n, hidden), dtype=h.dtype, device=h.device)
    if out.numel():
        _boundary_kernel[(n,)](
            h,
            sublayer,
            post_weight,
            next_weight,
            stream,
            out,
            h.stride(0),
            sublayer.stride(0),
            scale[0],
            scale[1],
            eps,
            hidden,
            *_parts(hidden, chunk),
            early,
            pdl,
            num_warps=warps,
            # A fused multiply-add would skip the roundings between the product and the sum.
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )
    return stream, out


@register("rms_norm", "triton", requires=(triton_runs,))
@strided("x")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x [N, H]`` (rows may be strided) times ``weight [H]``, rounded once."""
    if INTERPRETED:
        return launch_rms_norm(x, weight, eps, 8192, 4, True, False)
    # H200, H 5120: 1.15 us for a row (1.50 with late weights), 5.5 us for 1024 (5.8 with early).
    if x.shape[0] <= 256:
        return launch_rms_norm(x, weight, eps, 2048, 4, True, dependent_launch(x))
    return launch_rms_norm(x, weight, eps, 1024, 4, False, dependent_launch(x))


@register("boundary", "triton", requires=(triton_runs,))
@strided("h", "sublayer")
def boundary(
    h: Tensor,
    sublayer: Tensor,
    post_weight: Tensor,
    scale: tuple[float, float],
    next_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Post-norm, depth-scaled add and next pre-norm in one kernel.

    h, sublayer ``[N, H]`` (rows may be strided), weights ``[H]``, ``scale`` = (of the new, of the
    stream); gives (new stream, its norm), both ``[N, H]``.
    """
    args = (h, sublayer, post_weight, scale, next_weight, eps)
    if INTERPRETED:
        return launch_boundary(*args, 8192, 4, True, False)
    # H200, H 5120: 1.85 us for a row (1.95 with 8 warps, 2.23 with late weights), 2.7 us for 64
    # (2.8 with 4 warps), 11.1 us for 1024 (12.0 with early weights).
    warps = 4 if h.shape[0] <= 32 else 8
    return launch_boundary(*args, 2048, warps, h.shape[0] <= 256, dependent_launch(h))
