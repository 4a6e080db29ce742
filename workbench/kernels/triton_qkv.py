"""QK-norm, RoPE or SSMax, and the KV-cache write, as one Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, strided
from workbench.kernels.registry import register
from workbench.kernels.requirements import triton_runs
from workbench.kernels.triton_elementwise import after_predecessor
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton
from workbench.model.config import SSMAX_LENGTH, SSMAX_POWER

FP8 = torch.float8_e4m3fn


@triton.jit
def _stored(x, scale, FP8_CACHE: tl.constexpr, dtype: tl.constexpr):
    """A rounded value as the cache keeps it: itself, or float8 of value / scale, clamped."""
    if FP8_CACHE:
        x = tl.div_rn(x.to(tl.float32), scale + tl.zeros_like(x).to(tl.float32))
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return x.to(dtype)


@triton.jit(do_not_specialize=["n"])  # one compilation for every batch
def _qkv_write_kernel(
    packed_ptr,
    norm_ptr,
    positions_ptr,
    rope_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    n,
    packed_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    eps,
    k_scale,
    v_scale,
    A: tl.constexpr,  # query heads
    G: tl.constexpr,  # KV heads
    D: tl.constexpr,
    HALF: tl.constexpr,  # power of two that holds D / 2
    T: tl.constexpr,  # tokens a program
    HEADS: tl.constexpr,  # heads a program, of the A + 2 G that are read
    SSMAX: tl.constexpr,  # full-attention layer
    SSMAX_LENGTH: tl.constexpr,
    SSMAX_POWER: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each tile row is one head of one token: normed and turned (q, k) or as it is (v).

    Reads q | k | v of the packed rows, the two norm weights, positions, the RoPE table and the
    cache rows; writes q, and k and v into the cache. A head is held as its two halves, so RoPE
    pairs values of one thread and nothing is shuffled; positions and rows are asked for first, as
    the table and the cache are addressed by them.
    """
    after_predecessor(PDL)
    r = tl.arange(0, T * HEADS)
    token = tl.program_id(0).to(tl.int64) * T + r // HEADS
    head = tl.program_id(1) * HEADS + r % HEADS
    in_range = token < n
    position = tl.load(positions_ptr + token, in_range, 0)
    row = tl.load(rows_ptr + token, in_range, -1) if HAS_ROWS else token
    c = tl.arange(0, HALF)[None, :]
    mask = (in_range & (head < A + 2 * G))[:, None] & (c < D // 2)
    is_q = head < A
    is_v = head >= A + G
    x_ptr = packed_ptr + token[:, None] * packed_stride + head[:, None] * D + c
    x1 = tl.load(x_ptr, mask, 0.0)
    x2 = tl.load(x_ptr + D // 2, mask, 0.0)
    # Addressed by tile row, so that the weights arrive in the layout of the heads.
    w_ptr = norm_ptr + tl.where(is_q, 0, D)[:, None] + c
    w_mask = mask & (~is_v)[:, None]
    w1 = tl.load(w_ptr, w_mask, 0.0).to(tl.float32)
    w2 = tl.load(w_ptr + D // 2, w_mask, 0.0).to(tl.float32)
    if not SSMAX:
        angle_ptr = rope_ptr + position[:, None] * D + c
        cos = tl.load(angle_ptr, w_mask, 0.0).to(tl.float32)
        sin = tl.load(angle_ptr + D // 2, w_mask, 0.0).to(tl.float32)

    dtype = packed_ptr.dtype.element_ty
    f1 = x1.to(tl.float32)
    f2 = x2.to(tl.float32)
    scale = tl.rsqrt(tl.sum(f1 * f1 + f2 * f2, 1) / D + eps)[:, None]
    y1 = (f1 * scale * w1).to(dtype).to(tl.float32)
    y2 = (f2 * scale * w2).to(dtype).to(tl.float32)
    if SSMAX:
        p = position.to(tl.float32) + 1.0
        grow = tl.exp(SSMAX_POWER * tl.log(1.0 + p / SSMAX_LENGTH))
        grow = tl.where(is_q, grow, 1.0)[:, None]
        z1 = y1 * grow
        z2 = y2 * grow
    else:
        z1 = tl.fma(-sin, y2, y1 * cos)
        z2 = tl.fma(sin, y1, y2 * cos)
    z1 = tl.where(is_v[:, None], x1, z1.to(dtype))
    z2 = tl.where(is_v[:, None], x2, z2.to(dtype))

    q_mask = mask & is_q[:, None]
    out_ptr = q_ptr + token[:, None] * (A * D) + head[:, None] * D + c
    tl.store(out_ptr, z1, q_mask)
    tl.store(out_ptr + D // 2, z2, q_mask)
    kept = mask & (row >= 0)[:, None]
    k_mask = kept & ((~is_q) & (~is_v))[:, None]
    k_dtype = k_ptr.dtype.element_ty
    out_ptr = k_ptr + row[:, None] * k_stride + (head - A)[:, None] * k_head_stride + c
    tl.store(out_ptr, _stored(z1, k_scale, FP8_CACHE, k_dtype), k_mask)
    tl.store(out_ptr + D // 2, _stored(z2, k_scale, FP8_CACHE, k_dtype), k_mask)
    v_mask = kept & is_v[:, None]
    out_ptr = v_ptr + row[:, None] * v_stride + (head - A - G)[:, None] * v_head_stride + c
    tl.store(out_ptr, _stored(z1, v_scale, FP8_CACHE, k_dtype), v_mask)
    tl.store(out_ptr + D // 2, _stored(z2, v_scale, FP8_CACHE, k_dtype), v_mask)


def launch_qkv_write(
    packed: Tensor,
    qk_norm: Tensor,
    positions: Tensor,
    rope: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    rows: Tensor | None,
    heads: int,
    full: bool,
    eps: float,
    k_scale: float,
    v_scale: float,
    tile: tuple[int, int, int],
    pdl: bool,
) -> Tensor:
    """The kernel with ``tile`` = (tokens, heads, warps) of a program, powers of two."""
    n = packed.shape[0]
    kv_heads, d = k_rows.shape[1:]
    q = torch.empty((n, heads, d), dtype=packed.dtype, device=packed.device)
    if n:
        tokens, of_heads, warps = tile
        grid = (triton.cdiv(n, tokens), triton.cdiv(heads + 2 * kv_heads, of_heads))
        _qkv_write_kernel[grid](
            packed,
            qk_norm,
            positions,
            rope,
            q,
            k_rows,
            v_rows,
            positions if rows is None else rows,  # not read without rows
            n,
            packed.stride(0),
            k_rows.stride(0),
            k_rows.stride(1),
            v_rows.stride(0),
            v_rows.stride(1),
            eps,
            float(k_scale),
            float(v_scale),
            heads,
            kv_heads,
            d,
            triton.next_power_of_2(d // 2),
            tokens,
            of_heads,
            full,
            SSMAX_LENGTH,
            SSMAX_POWER,
            rows is not None,
            k_rows.dtype == FP8,
            pdl,
            num_warps=warps,
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )
    return q


def _tile(n: int, of_heads: int) -> tuple[int, int, int]:
    """(tokens, heads, warps) of a program, measured on an H200 with 8 and 16 heads in all.

    For few tokens a warp has one head or two (0.96 us for a token, 1.03 with one program for all
    heads); for many, one RoPE row serves eight heads (2.4 us for 1024 tokens against 10.2).
    """
    if n <= 16:
        return 1, 1 if of_heads <= 8 else 2, 1
    if n <= 128:
        return 2, 4, 4
    return 2, 8, 4


@register("qkv_write", "triton", requires=(triton_runs,))
@strided("packed", "k_rows", "v_rows")
def qkv_write(
    packed: Tensor,
    qk_norm: Tensor,
    positions: Tensor,
    rope: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    rows: Tensor | None,
    *,
    heads: int,
    full: bool,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """QK-norm, position and KV-cache write in one kernel; gives q ``[N, A, D]``.

    packed ``[N, (2A+2G) D]`` (q | k | v | gate, rows may be strided), qk_norm ``[2, D]``, positions
    ``[N]`` int64, rope ``[P, D]`` (D/2 cosines, D/2 sines; not read when ``full``), k_rows, v_rows
    ``[M, G, D]`` in the dtype of packed or float8_e4m3fn, written at ``rows [N]`` (int64; -1: not
    written; None: token i in row i).
    """
    if INTERPRETED:
        tile, pdl = (16, triton.next_power_of_2(heads + 2 * k_rows.shape[1]), 4), False
    else:
        tile, pdl = _tile(packed.shape[0], heads + 2 * k_rows.shape[1]), dependent_launch(packed)
    return launch_qkv_write(
        packed,
        qk_norm,
        positions,
        rope,
        k_rows,
        v_rows,
        rows,
        heads,
        full,
        eps,
        k_scale,
        v_scale,
        tile,
        pdl,
    )
