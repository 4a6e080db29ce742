"""DFlash2's convolutions and context K/V write as Triton kernels, one launch each.

The meaning and the roundings are those of :mod:`workbench.kernels.reference_dflash2`, and so are
the shape letters. Everything is computed in float32; kernels are compiled without floating-point
contraction, so a product is fused into a sum exactly where ``tl.fma`` stands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, strided
from workbench.kernels.registry import register
from workbench.kernels.requirements import triton_runs
from workbench.kernels.triton_elementwise import after_predecessor
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

FP8_MAX = 448.0  # the largest float8_e4m3fn


def power_of_two(n: int, least: int = 1) -> int:
    return max(least, triton.next_power_of_2(n))


@triton.jit
def divided(x, divisor, reciprocal):
    """``x / divisor`` rounded correctly, given ``1 / divisor`` rounded correctly.

    One Newton step on ``x * reciprocal`` (Markstein 1990). ``tl.div_rn`` branches for every element
    and is slow on zeros: with it the walk of a sampled request took twice as long on an H200.
    """
    quotient = x * reciprocal
    better = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    return tl.where(tl.abs(quotient) < float("inf"), better, quotient)


# -- grouped dynamic convolution ----------------------------------------------------------------


@triton.jit
def _convolved(
    x,
    coefficients,
    base,
    rows,  # [ROWS]
    count,  # rows of x
    group,  # [GROUPS_HERE]
    x_stride,
    row_stride,  # of coefficients
    tap_stride,
    base_stride,
    QUERY: tl.constexpr,
    TAPS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # channels a group
    LANES: tl.constexpr,  # WIDTH rounded up to a power of two
):
    """Convolution of some rows and some groups, float32 [ROWS, GROUPS_HERE, LANES], not rounded.

    The group is an axis of its own so that a thread loads one coefficient for its channels of a
    group; indexed by channel, every channel would load it again.
    """
    wide = rows.to(tl.int64)
    lane = tl.arange(0, LANES)
    channel = group[:, None] * WIDTH + lane[None, :]
    inside = (group < GROUPS)[:, None] & (lane < WIDTH)[None, :]
    out = 0.0
    for tap in tl.static_range(TAPS):
        visible = (rows < count) & (rows % QUERY >= tap)
        offset = base + tap * base_stride + channel
        kernel = tl.load(offset, mask=inside, other=0.0).to(tl.float32)
        delta = tl.load(
            coefficients + wide[:, None] * row_stride + tap * tap_stride + group[None, :],
            mask=visible[:, None] & (group < GROUPS)[None, :],
            other=0.0,
        ).to(tl.float32)
        value = tl.load(
            x + (wide - tap)[:, None, None] * x_stride + channel[None, :, :],
            mask=visible[:, None, None] & inside[None, :, :],
            other=0.0,
        ).to(tl.float32)
        kernel = kernel[None, :, :] + delta[:, :, None]
        out = kernel * value if tap == 0 else tl.fma(kernel, value, out)
    return out


@triton.jit(do_not_specialize=["count"])
def _dynamic_conv_kernel(
    x,
    coefficients,
    base,
    out,
    count,
    x_stride,
    row_stride,
    tap_stride,
    base_stride,
    QUERY: tl.constexpr,
    TAPS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS_HERE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_predecessor(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS_HERE + tl.arange(0, GROUPS_HERE)
    result = _convolved(
        x, coefficients, base, rows, count, group, x_stride, row_stride, tap_stride, base_stride,
        QUERY, TAPS, GROUPS, WIDTH, LANES,
    )  # fmt: skip
    lane = tl.arange(0, LANES)
    channel = group[:, None] * WIDTH + lane[None, :]
    inside = (group < GROUPS)[:, None] & (lane < WIDTH)[None, :]
    tl.store(
        out + rows.to(tl.int64)[:, None, None] * (GROUPS * WIDTH) + channel[None, :, :],
        result.to(out.dtype.element_ty),
        mask=(rows < count)[:, None, None] & inside[None, :, :],
    )


@register("dynamic_conv", "triton", requires=(triton_runs,))
@strided("x", "coefficients")
def dynamic_conv(x: Tensor, coefficients: Tensor, base: Tensor, query_len: int) -> Tensor:
    """Grouped dynamic convolution ``[N, H]``: a program for some rows and some groups."""
    count, hidden = x.shape
    taps, groups = coefficients.shape[1:]
    out = torch.empty((count, hidden), dtype=x.dtype, device=x.device)
    if count == 0:
        return out
    lanes = power_of_two(hidden // groups)
    rows, here, warps = _conv_tile(count, groups, lanes)
    pdl = not INTERPRETED and dependent_launch(x)
    _dynamic_conv_kernel[(triton.cdiv(count, rows), triton.cdiv(groups, here))](
        x,
        coefficients,
        base,
        out,
        count,
        x.stride(0),
        coefficients.stride(0),
        coefficients.stride(1),
        base.stride(0),
        QUERY=query_len,
        TAPS=taps,
        GROUPS=groups,
        WIDTH=hidden // groups,
        LANES=lanes,
        ROWS=rows,
        GROUPS_HERE=here,
        PDL=pdl,
        num_warps=warps,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return out


def _conv_tile(count: int, groups: int, lanes: int) -> tuple[int, int, int]:
    """Rows and groups of a program, and its warps.

    One row: several, to read the base once, were slower at every size (H200, 5120 channels, 1024
    rows: 6.8 µs for one of 1024 channels, 8.3 for two; 512 channels 7.8. 8 rows: 1.26 for 512
    channels, 1.30 for 1024).
    """
    if INTERPRETED:
        return power_of_two(min(count, 64)), power_of_two(groups), 4
    channels = 1024 if count >= 128 else 512
    return 1, power_of_two(min(groups, channels // min(lanes, channels))), 4


@triton.jit(do_not_specialize=["count"])
def _conv_residual_norm_kernel(
    x,
    coefficients,
    base,
    residual,
    weight,
    new_residual,
    out,
    count,
    x_stride,
    row_stride,
    tap_stride,
    base_stride,
    residual_stride,
    eps,
    QUERY: tl.constexpr,
    TAPS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS_HERE: tl.constexpr,
    PIECES: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    squares = tl.zeros((ROWS, GROUPS_HERE, LANES), tl.float32)
    # A row is held in pieces because 5120 channels are 5 pieces of 1024 and a power-of-two tile
    # would be 8192. Everything is loaded before anything is stored: a load does not move up past a
    # store, and one row's pieces would wait for memory one after the other.
    streams = ()
    weights = ()
    for piece in tl.static_range(PIECES):
        group = piece * GROUPS_HERE + tl.arange(0, GROUPS_HERE)
        channel = group[:, None] * WIDTH + lane[None, :]
        inside = (group < GROUPS)[:, None] & (lane < WIDTH)[None, :]
        mask = (rows < count)[:, None, None] & inside[None, :, :]
        conv = _convolved(
            x, coefficients, base, rows, count, group, x_stride, row_stride, tap_stride,
            base_stride, QUERY, TAPS, GROUPS, WIDTH, LANES,
        )  # fmt: skip
        earlier = tl.load(
            residual + rows.to(tl.int64)[:, None, None] * residual_stride + channel[None, :, :],
            mask=mask,
            other=0.0,
        ).to(tl.float32)
        stream = conv.to(x.dtype.element_ty).to(tl.float32) + earlier
        stream = stream.to(new_residual.dtype.element_ty).to(tl.float32)
        squares = tl.fma(stream, stream, squares)
        streams += (stream,)  # type: ignore[assignment]
        scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        weights += (scale,)  # type: ignore[assignment]
    power = tl.sum(tl.sum(squares, 2), 1) / (GROUPS * WIDTH)
    factor = tl.rsqrt(power + eps)[:, None, None]
    for piece in tl.static_range(PIECES):
        group = piece * GROUPS_HERE + tl.arange(0, GROUPS_HERE)
        channel = group[:, None] * WIDTH + lane[None, :]
        inside = (group < GROUPS)[:, None] & (lane < WIDTH)[None, :]
        mask = (rows < count)[:, None, None] & inside[None, :, :]
        offset = rows.to(tl.int64)[:, None, None] * (GROUPS * WIDTH) + channel[None, :, :]
        normed = streams[piece] * factor * weights[piece][None, :, :]
        tl.store(new_residual + offset, streams[piece].to(new_residual.dtype.element_ty), mask=mask)
        tl.store(out + offset, normed.to(out.dtype.element_ty), mask=mask)  # type: ignore[unreachable]


@register("conv_residual_norm", "triton", requires=(triton_runs,))
@strided("x", "coefficients", "residual")
def conv_residual_norm(
    x: Tensor,
    coefficients: Tensor,
    base: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    query_len: int,
) -> tuple[Tensor, Tensor]:
    """Convolution, residual add and RMSNorm, ``(residual', x')``: a program for some whole rows."""
    count, hidden = x.shape
    taps, groups = coefficients.shape[1:]
    new_residual = torch.empty((count, hidden), dtype=residual.dtype, device=x.device)
    out = torch.empty((count, hidden), dtype=x.dtype, device=x.device)
    if count == 0:
        return new_residual, out
    lanes = power_of_two(hidden // groups)
    rows, here, warps = _norm_tile(count, groups, lanes)
    _conv_residual_norm_kernel[(triton.cdiv(count, rows),)](
        x,
        coefficients,
        base,
        residual,
        weight,
        new_residual,
        out,
        count,
        x.stride(0),
        coefficients.stride(0),
        coefficients.stride(1),
        base.stride(0),
        residual.stride(0),
        eps,
        QUERY=query_len,
        TAPS=taps,
        GROUPS=groups,
        WIDTH=hidden // groups,
        LANES=lanes,
        ROWS=rows,
        GROUPS_HERE=here,
        PIECES=triton.cdiv(groups, here),
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return new_residual, out


def _norm_tile(count: int, groups: int, lanes: int) -> tuple[int, int, int]:
    """Rows of a program, groups of a piece of a row, and warps.

    H200, 5120 channels, 8 / 1024 rows in µs: pieces of 1024 with 4 warps 2.42 / 12.7, with 8 2.64 /
    13.1; of 512 with 4 2.71 / 13.4; of 2048 with 8 2.49 / 14.6; two rows a program 3.5 / 13.6.
    """
    if INTERPRETED:
        return power_of_two(min(count, 64)), power_of_two(groups), 4
    return 1, power_of_two(min(groups, max(1, 1024 // lanes))), 4


# -- context keys and values --------------------------------------------------------------------


@triton.jit(do_not_specialize=["count"])
def _context_kv_kernel(
    kv,
    weight,
    positions,
    rope,
    k_rows,
    v_rows,
    rows,
    k_scale,
    v_scale,
    count,
    eps,
    kv_stride,
    k_layer_stride,
    k_row_stride,
    k_head_stride,
    v_layer_stride,
    v_row_stride,
    v_head_stride,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS_HERE: tl.constexpr,
    LANES: tl.constexpr,  # DIM / 2 rounded up
    FP8: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
    MOST: tl.constexpr,
):
    """Some tokens, one layer, some heads; tiles [ROWS, HEADS_HERE, LANES] of half a head.

    Halves because RoPE pairs channel j with j + D/2: as two tiles the pair is in one thread.
    """
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    layer = tl.program_id(1)
    head = tl.program_id(2) * HEADS_HERE + tl.arange(0, HEADS_HERE)
    lane = tl.arange(0, LANES)
    exists = token < count
    row = tl.load(rows + token, mask=exists, other=-1)
    position = tl.load(positions + token, mask=exists, other=0)
    inside = (head < HEADS)[:, None] & (lane < HALF)[None, :]
    # Not masked by `row`: what has no row is projected all the same, and a load that need not wait
    # for another one comes earlier.
    mask = exists[:, None, None] & inside[None, :, :]
    source = kv + token[:, None, None] * kv_stride + layer * (2 * HEADS * DIM)
    source += (head[:, None] * DIM + lane[None, :])[None, :, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    v_first = tl.load(source + HEADS * DIM, mask=mask, other=0.0)
    v_second = tl.load(source + HEADS * DIM + HALF, mask=mask, other=0.0)
    w_first = tl.load(weight + layer * DIM + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    w_second = tl.load(weight + layer * DIM + HALF + lane, mask=lane < HALF, other=0.0)
    angle = rope + position[:, None] * DIM + lane[None, :]
    turns = (row >= 0)[:, None] & (lane < HALF)[None, :]  # the position of others may be anything
    cos = tl.load(angle, mask=turns, other=0.0).to(tl.float32)[:, None, :]
    sin = tl.load(angle + HALF, mask=turns, other=0.0).to(tl.float32)[:, None, :]

    power = tl.sum(tl.fma(first, first, second * second), 2) / DIM
    factor = tl.rsqrt(power + eps)[:, :, None]
    first = (first * factor * w_first).to(kv.dtype.element_ty).to(tl.float32)
    second = (second * factor * w_second.to(tl.float32)).to(kv.dtype.element_ty).to(tl.float32)
    k_first = tl.fma(first, cos, -(second * sin)).to(kv.dtype.element_ty)
    k_second = tl.fma(first, sin, second * cos).to(kv.dtype.element_ty)
    if FP8:
        k_first = k_first.to(tl.float32)
        k_second = k_second.to(tl.float32)
        v_first = v_first.to(tl.float32)
        v_second = v_second.to(tl.float32)
        if K_SCALED:
            scale = tl.load(k_scale + layer)
            reciprocal = tl.div_rn(1.0, scale)
            k_first = divided(k_first, scale, reciprocal)
            k_second = divided(k_second, scale, reciprocal)
        if V_SCALED:
            scale = tl.load(v_scale + layer)
            reciprocal = tl.div_rn(1.0, scale)
            v_first = divided(v_first, scale, reciprocal)
            v_second = divided(v_second, scale, reciprocal)
        k_first = tl.minimum(tl.maximum(k_first, -MOST), MOST)
        k_second = tl.minimum(tl.maximum(k_second, -MOST), MOST)
        v_first = tl.minimum(tl.maximum(v_first, -MOST), MOST)
        v_second = tl.minimum(tl.maximum(v_second, -MOST), MOST)

    mask = (row >= 0)[:, None, None] & inside[None, :, :]
    target = k_rows + layer.to(tl.int64) * k_layer_stride + row[:, None, None] * k_row_stride
    target += (head[:, None] * k_head_stride + lane[None, :])[None, :, :]
    tl.store(target, k_first.to(k_rows.dtype.element_ty), mask=mask)
    tl.store(target + HALF, k_second.to(k_rows.dtype.element_ty), mask=mask)
    target = v_rows + layer.to(tl.int64) * v_layer_stride + row[:, None, None] * v_row_stride
    target += (head[:, None] * v_head_stride + lane[None, :])[None, :, :]
    tl.store(target, v_first.to(v_rows.dtype.element_ty), mask=mask)
    tl.store(target + HALF, v_second.to(v_rows.dtype.element_ty), mask=mask)


@register("context_kv_write", "triton", requires=(triton_runs,))
@strided("kv", "k_rows", "v_rows")
def context_kv_write(
    kv: Tensor,
    weight: Tensor,
    positions: Tensor,
    rope: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    rows: Tensor,
    eps: float,
    *,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Normed, rotated keys and plain values of all drafter layers into their caches, one launch."""
    count, layers, _, heads, dim = kv.shape
    if count == 0:
        return
    tokens, here, warps = _context_tile(count, heads)
    _context_kv_kernel[(triton.cdiv(count, tokens), layers, triton.cdiv(heads, here))](
        kv,
        weight,
        positions,
        rope,
        k_rows,
        v_rows,
        rows,
        weight if k_scale is None else k_scale,  # not read without a scale
        weight if v_scale is None else v_scale,
        count,
        eps,
        kv.stride(0),
        k_rows.stride(0),
        k_rows.stride(1),
        k_rows.stride(2),
        v_rows.stride(0),
        v_rows.stride(1),
        v_rows.stride(2),
        LAYERS=layers,
        HEADS=heads,
        DIM=dim,
        ROWS=tokens,
        HEADS_HERE=here,
        LANES=power_of_two(dim // 2),
        FP8=k_rows.dtype == torch.float8_e4m3fn,
        K_SCALED=k_scale is not None,
        V_SCALED=v_scale is not None,
        MOST=FP8_MAX,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def _context_tile(count: int, heads: int) -> tuple[int, int, int]:
    """Tokens and heads of a program, and its warps.

    H200, 5 layers, 8 heads of 128: one token and 4 heads at 8 tokens (1.43 µs; 8 heads 1.50), and 8
    heads at 1024 (11.6 µs; 4 heads 11.9, more tokens 12.0 and up). One head: 8 tokens at 1024
    (2.35 µs; 4 tokens 2.44, one 4.4).
    """
    if INTERPRETED:
        return power_of_two(min(count, 64)), power_of_two(heads), 4
    most = 4 if count < 32 else 8
    here = min(most, power_of_two(heads))
    return (1 if count < 32 else most // here), here, 4
