"""Triton kernels without a reduction: output gate, logit softcap, SwiGLU.

At a decode step each of them is a launch and one round trip to memory, so a program loads
everything it needs before it computes anything; at prefill sizes they stream. Tiles are
``[rows, columns]`` with 16-byte accesses and no division in the address arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, strided
from workbench.kernels.registry import register
from workbench.kernels.requirements import triton_runs
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton


@triton.jit
def after_predecessor(PDL: tl.constexpr):
    """Wait for the kernel before this one, then let the next one be set up.

    Both come before any load or store: kernels reuse each other's buffers, and only after the wait
    is it certain that all earlier kernels have ended.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["n"])  # one compilation for every batch
def _output_gate_kernel(
    o_ptr,
    gate_ptr,
    bias_ptr,
    out_ptr,
    n,
    o_stride,
    gate_stride,
    A: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    T: tl.constexpr,  # tokens a program
    HEADS: tl.constexpr,  # heads a program
    PDL: tl.constexpr,
):
    """Bias, sigmoid and product, with their three roundings. Reads o, gate, bias; writes out."""
    after_predecessor(PDL)
    row = tl.arange(0, T * HEADS)
    token = tl.program_id(0).to(tl.int64) * T + row // HEADS
    head = tl.program_id(1) * HEADS + row % HEADS
    column = tl.arange(0, D_BLOCK)[None, :]
    mask = ((token < n) & (head < A))[:, None] & (column < D)
    inner = head[:, None] * D + column
    gate = tl.load(gate_ptr + token[:, None] * gate_stride + inner, mask, 0.0)
    o = tl.load(o_ptr + token[:, None] * o_stride + inner, mask, 0.0)
    bias = tl.load(bias_ptr + head, head < A, 0.0)
    dtype = out_ptr.dtype.element_ty
    g = (gate.to(tl.float32) + bias.to(tl.float32)[:, None]).to(dtype).to(tl.float32)
    g = (1.0 / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    tl.store(out_ptr + token[:, None] * (A * D) + inner, (o.to(tl.float32) * g).to(dtype), mask)


def launch_output_gate(
    o: Tensor, gate: Tensor, bias: Tensor, tokens: int, heads: int, warps: int, pdl: bool
) -> Tensor:
    """The kernel with a given tile: ``tokens`` x ``heads`` (powers of two) a program."""
    n, a, d = o.shape
    out = torch.empty((n, a, d), dtype=o.dtype, device=o.device)
    if out.numel():
        _output_gate_kernel[(triton.cdiv(n, tokens), triton.cdiv(a, heads))](
            o if o.stride(1) == d else o.contiguous(),
            gate if gate.stride(1) == d else gate.contiguous(),
            bias,
            out,
            n,
            o.stride(0) if o.stride(1) == d else a * d,
            gate.stride(0) if gate.stride(1) == d else a * d,
            a,
            d,
            triton.next_power_of_2(d),
            tokens,
            heads,
            pdl,
            num_warps=warps,
            enable_fp_fusion=False,  # the products are rounded before they are used
            launch_pdl=pdl,
        )
    return out


@register("output_gate", "triton", requires=(triton_runs,))
@strided("o", "gate")
def output_gate(o: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """``round(o * round(sigmoid(round(gate + bias))))`` in one kernel.

    o, gate ``[N, A, D]`` (gate a strided view of the packed projection), bias ``[A]``; gives
    ``[N, A, D]``.
    """
    if INTERPRETED:
        return launch_output_gate(o, gate, bias, 8, 8, 4, False)
    pdl = dependent_launch(o)
    # H200, 6 or 12 heads of 128: 0.73 us for a token (0.76 with a warp a head), 2.2 us for 1024.
    if o.shape[0] <= 256:
        return launch_output_gate(o, gate, bias, 2, 4, 4, pdl)
    return launch_output_gate(o, gate, bias, 16, 1, 4, pdl)


@triton.jit
def _tanh(y):
    """tanh to 5e-7 of its value, without the branch of the library's, which runs lane by lane."""
    s = y * y
    # Taylor's series where 1 - 2 / (e^2y + 1) would cancel.
    tail = 0.13333333 + s * (-0.053968254 + s * 0.021869488)
    small = y + y * s * (-0.33333333 + s * tail)
    large = 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)
    return tl.where(s < 0.0625, small, large)


@triton.jit
def _softcap_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    out_stride,
    inverse,
    cap,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``cap * tanh(x / cap)`` of one piece of a row. Reads logits, writes ``out``."""
    after_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, column < WIDTH, 0.0).to(tl.float32)
    # By the reciprocal: a correctly rounded division costs as much as the tanh.
    y = _tanh(x * inverse) * cap
    tl.store(out_ptr + row * out_stride + column, y, column < WIDTH)


def launch_softcap(
    logits: Tensor, cap: float, block: int, warps: int, pdl: bool, out: Tensor | None = None
) -> Tensor:
    """The kernel with ``block`` columns a program; ``out`` may be the logits themselves."""
    n, width = logits.shape
    if out is None:
        out = torch.empty((n, width), dtype=torch.float32, device=logits.device)
    if out.numel():
        _softcap_kernel[(n, triton.cdiv(width, block))](
            logits,
            out,
            logits.stride(0),
            out.stride(0),
            1.0 / cap,
            float(cap),
            width,
            block,
            pdl,
            num_warps=warps,
            launch_pdl=pdl,
        )
    return out


@register("softcap", "triton", requires=(triton_runs,))
@strided("logits")
def softcap(logits: Tensor, cap: float) -> Tensor:
    """``cap * tanh(logits / cap)`` in float32; logits ``[N, V]`` (rows may be strided)."""
    if INTERPRETED:
        return launch_softcap(logits, cap, 32768, 4, False)
    pdl = dependent_launch(logits)
    # H200, 20480 logits: 1.07 us for a row (1.34 with 1024 columns a program), 35 us for 1024.
    if logits.numel() <= 1 << 19:
        return launch_softcap(logits, cap, 512, 4, pdl)
    return launch_softcap(logits, cap, 1024, 4, pdl)


@triton.jit(do_not_specialize=["n"])  # one compilation for every batch
def _swiglu_kernel(
    x_ptr,
    out_ptr,
    n,
    x_stride,
    WIDTH: tl.constexpr,
    T: tl.constexpr,  # rows a program
    C: tl.constexpr,  # columns a program
    PDL: tl.constexpr,
):
    """``silu(gate) * up`` of a tile. Reads both halves of each row, writes half its width."""
    after_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)[:, None]
    column = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    mask = (row < n) & (column < WIDTH)
    gate = tl.load(x_ptr + row * x_stride + column, mask, 0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + (WIDTH + column), mask, 0.0).to(tl.float32)
    act = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + column, act.to(out_ptr.dtype.element_ty), mask)


def launch_swiglu(gate_up: Tensor, rows: int, columns: int, warps: int, pdl: bool) -> Tensor:
    """The kernel with ``rows`` x ``columns`` (powers of two) a program."""
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        flat = gate_up.reshape(-1, 2 * width)
        _swiglu_kernel[(triton.cdiv(flat.shape[0], rows), triton.cdiv(width, columns))](
            flat,
            out,
            flat.shape[0],
            flat.stride(0),
            width,
            rows,
            columns,
            pdl,
            num_warps=warps,
            enable_fp_fusion=False,
            launch_pdl=pdl,
        )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once: ``gate_up [..., 2 I]`` to ``[..., I]``."""
    width = gate_up.shape[-1] // 2
    if INTERPRETED:
        return launch_swiglu(gate_up, 16, triton.next_power_of_2(max(width, 1)), 4, False)
    pdl = dependent_launch(gate_up)
    rows = gate_up.numel() // max(1, gate_up.shape[-1])
    # H200: many small programs for few rows, 8 values a thread for many. ``columns`` is the widest
    # power of two that leaves no lane idle: 512 for a width of 1536, 64 for an expert's 320.
    columns = min(512, width & -width) if width % 32 == 0 else 64
    if rows <= 64:
        if columns == 512:
            return launch_swiglu(gate_up, 1, 512, 4, pdl)
        return launch_swiglu(gate_up, 2, 64, 1, pdl)
    return launch_swiglu(gate_up, 1024 // columns, columns, 4, pdl)
