"""What stands between the products of a prefill: the boundary behind the experts, and the router.

The boundary takes the experts' products as they are: their weighted sum, its two roundings and the
post-norm happen in the registers that hold the row, so the MLP's output is never written.

The router's weights are split into three BF16 numbers beforehand, whose sum is the float32 weight
exactly; so the tensor cores compute float32 products (``kernels/triton_router.py`` says why each
step of the inner loop starts from zero).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, strided
from workbench.kernels.triton_elementwise import after_predecessor
from workbench.kernels.triton_norms import _load, _parts, _scaled_add, _store
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip - after the line above


@triton.jit
def _expert_sum(
    product_ptr,
    place_ptr,
    share_ptr,
    column,
    routed_scale,
    H: tl.constexpr,
    END: tl.constexpr,
    K: tl.constexpr,
    PLACED: tl.constexpr,
    dtype: tl.constexpr,
):
    """Weighted float32 sum of K rows, rounded, times the scale, rounded; as float32."""
    at = tl.load(place_ptr).to(tl.int64) * H if PLACED else 0
    total = _load(product_ptr + at, column, H, END).to(tl.float32) * tl.load(share_ptr)
    for k in tl.static_range(1, K):
        at = tl.load(place_ptr + k).to(tl.int64) * H if PLACED else k * H
        row = _load(product_ptr + at, column, H, END)
        total += row.to(tl.float32) * tl.load(share_ptr + k)
    return (total.to(dtype).to(tl.float32) * routed_scale).to(dtype).to(tl.float32)


@triton.jit
def _expert_boundary_kernel(
    h_ptr,  # [N, H]
    product_ptr,  # [N K, H]
    place_ptr,  # int32 [N, K] if PLACED: the row of each product
    share_ptr,  # float32 [N, K]
    post_ptr,
    next_ptr,
    stream_ptr,  # [N, H]
    out_ptr,  # [N, H]
    h_stride,
    routed_scale,
    scale_new,
    scale_old,
    eps,
    K: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    PLACED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum over experts, post-norm, depth-scaled add and next pre-norm of one row."""
    after_predecessor(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    chunk = tl.arange(0, C)[None, :]
    a = tl.arange(0, R)[:, None] * C + chunk
    if T > 0:
        b = (R + tl.arange(0, T)[:, None]) * C + chunk
    row = tl.program_id(0).to(tl.int64)
    if PLACED:
        place_ptr += row * K
    else:
        product_ptr += row * (K * H)
    share_ptr += row * K
    h_a = _load(h_ptr + row * h_stride, a, H, R * C)
    p_a = _expert_sum(
        product_ptr, place_ptr, share_ptr, a, routed_scale, H, R * C, K, PLACED, dtype
    )
    squares = tl.sum(p_a * p_a, 0)
    if T > 0:
        h_b = _load(h_ptr + row * h_stride, b, H, (R + T) * C)
        p_b = _expert_sum(
            product_ptr, place_ptr, share_ptr, b, routed_scale, H, (R + T) * C, K, PLACED, dtype
        )
        squares += tl.sum(p_b * p_b, 0)
    scale = tl.rsqrt(tl.sum(squares, 0) / H + eps)
    weight = _load(post_ptr, a, H, R * C)
    p_a = (p_a * scale * weight.to(tl.float32)).to(dtype).to(tl.float32)
    s_a = _scaled_add(p_a, h_a, scale_new, scale_old, dtype)
    _store(stream_ptr + row * H, a, s_a, H, R * C)
    s_a = s_a.to(tl.float32)
    squares = tl.sum(s_a * s_a, 0)
    if T > 0:
        weight = _load(post_ptr, b, H, (R + T) * C)
        p_b = (p_b * scale * weight.to(tl.float32)).to(dtype).to(tl.float32)
        s_b = _scaled_add(p_b, h_b, scale_new, scale_old, dtype)
        _store(stream_ptr + row * H, b, s_b, H, (R + T) * C)
        s_b = s_b.to(tl.float32)
        squares += tl.sum(s_b * s_b, 0)
    scale = tl.rsqrt(tl.sum(squares, 0) / H + eps)
    weight = _load(next_ptr, a, H, R * C)
    _store(out_ptr + row * H, a, (s_a * scale * weight.to(tl.float32)).to(dtype), H, R * C)
    if T > 0:
        weight = _load(next_ptr, b, H, (R + T) * C)
        y_b = (s_b * scale * weight.to(tl.float32)).to(dtype)
        _store(out_ptr + row * H, b, y_b, H, (R + T) * C)


@strided("h")
def expert_boundary(
    h: Tensor,
    product: Tensor,
    shares: Tensor,
    routed_scale: float,
    post_weight: Tensor,
    scale: tuple[float, float],
    next_weight: Tensor,
    eps: float,
    *,
    place: Tensor | None = None,
    warps: int = 4,
) -> tuple[Tensor, Tensor]:
    """Sum over experts and boundary: (new stream, its norm), both ``[N, H]``.

    h ``[N, H]``, product ``[N K, H]`` (rounded, not weighted; a token's K in neighbouring rows, or
    each where ``place [N, K]``, int32, says), shares float32 ``[N, K]``. Rounded
    as the operations one after the other: the sum once, its product with ``routed_scale`` once,
    then as in the operation ``boundary``.
    """
    (n, top_k), hidden = shares.shape, product.shape[-1]
    stream = torch.empty((n, hidden), dtype=h.dtype, device=h.device)
    out = torch.empty((n, hidden), dtype=h.dtype, device=h.device)
    pdl = dependent_launch(h)
    if n:
        _expert_boundary_kernel[(n,)](
            h,
            product,
            product if place is None else place,
            shares,
            post_weight,
            next_weight,
            stream,
            out,
            h.stride(0),
            routed_scale,
            scale[0],
            scale[1],
            eps,
            top_k,
            hidden,
            *_parts(hidden, 8192 if INTERPRETED else 2048),
            place is not None,
            pdl,
            num_warps=warps,
            # A fused multiply-add would skip the roundings between the product and the sum.
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )
    return stream, out


# ------------------------------------------------------------------ router


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLaunch:
    """Launch of the logits: tokens and experts of a tile, hidden columns a step.

    H200, 16,384 tokens, 256 experts, H 5120: 0.202 ms, with 32 columns a step 0.259.
    """

    tokens: int = 128
    experts: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3


def split_parts(weight: Tensor) -> Tensor:
    """float32 ``[E, H]`` as the exact sum of three BF16 matrices, ``[3, E, H]``, largest first."""
    high = weight.to(torch.bfloat16)
    rest = weight - high.float()
    middle = rest.to(torch.bfloat16)
    return torch.stack((high, middle, (rest - middle.float()).to(torch.bfloat16)))


@triton.jit(do_not_specialize=["n"])
def _split_logits_kernel(
    x,  # descriptor of [N, H]
    parts,  # descriptor of [3 E, H]
    out_ptr,  # float32 [N, E]
    n,
    E: tl.constexpr,
    H: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits of a tile of tokens x experts: three products a step, the small parts first."""
    after_predecessor(PDL)
    tiles: tl.constexpr = (E + EXPERTS - 1) // EXPERTS
    token = tl.program_id(0) // tiles * TOKENS
    expert = tl.program_id(0) % tiles * EXPERTS
    acc = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for k in range(0, H, DEPTH):
        a = x.load([token, k])
        part = tl.dot(a, tl.trans(parts.load([2 * E + expert, k])), input_precision="ieee")
        part = tl.dot(a, tl.trans(parts.load([E + expert, k])), part, input_precision="ieee")
        acc += tl.dot(a, tl.trans(parts.load([expert, k])), part, input_precision="ieee")
    row = token + tl.arange(0, TOKENS)
    column = expert + tl.arange(0, EXPERTS)
    at = out_ptr + row[:, None].to(tl.int64) * E + column[None, :]
    tl.store(at, acc, mask=(row < n)[:, None] & (column < E)[None, :])


def split_logits(x: Tensor, parts: Tensor, launch: RouterLaunch | None = None) -> Tensor:
    """float32 logits ``[1, N, E]`` of BF16 ``x [N, H]`` and the router's ``parts [3, E, H]``."""
    n, hidden = x.shape
    experts = parts.shape[1]
    how = launch or RouterLaunch()
    if INTERPRETED:
        how = RouterLaunch(tokens=32, experts=16, depth=128)
    out = torch.empty((1, n, experts), dtype=torch.float32, device=x.device)
    pdl = dependent_launch(x)

    def matrix(t: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor(
            t, shape=list(t.shape), strides=[t.stride(0), 1], block_shape=[rows, how.depth]
        )

    grid = (triton.cdiv(n, how.tokens) * triton.cdiv(experts, how.experts),)
    _split_logits_kernel[grid](
        matrix(x, how.tokens), matrix(parts.flatten(0, 1), how.experts), out, n, experts, hidden,
        how.tokens, how.experts, how.depth, pdl,
        num_warps=how.warps, num_stages=how.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out
