"""Triton kernels of one token's experts, down projections by rows (see ``triton_vectors.py``).

FP8 experts (``fp8.py``) go through the same kernels: values become float32 in registers, as BF16's
do, and a row's scale multiplies its sum. A load of 16 bytes is 16 of them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# Kernels have no annotations but constexpr: Triton types them at each launch.
from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch
from workbench.kernels.rank.triton_vectors import options, parts, release, vector, wait, weight_tile
from workbench.kernels.shapes import Shapes
from workbench.kernels.triton_linear import silu_times
from workbench.kernels.triton_router import _top_k_kernel as top_k
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton


@triton.jit
def _prefetch(ptr, first, count, BLOCK: tl.constexpr):
    """Ask for ``count`` 128-byte lines, from the ``first`` on, into the L2; waits for nothing."""
    line = first + tl.minimum(tl.arange(0, BLOCK), tl.maximum(count - 1, 0))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptr.to(tl.int64) + line.to(tl.int64) * 128],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def top_k_ahead(
    logits_ptr,  # float32 [E]
    bias_ptr,  # float32 [E]
    ids_ptr,  # int64 [K]
    weights_ptr,  # float32 [K]
    ahead_ptr,  # what the next layer reads first
    lines,  # of it, 128 bytes each
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    EACH_BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr,
    PROGRAMS: tl.constexpr,  # that prefetch
    BLOCK: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The router's choice in program 0; meanwhile the others bring weights into the L2.

    Until the experts are known nothing of them can be read, and memory would idle. LATE: the
    prefetch begins when the scores are there, not with the launch.
    """
    if tl.program_id(0) == 0:
        top_k(
            logits_ptr, bias_ptr, ids_ptr, weights_ptr, 1, E, K, 1, GROUPS, KEPT, GROUPS_BLOCK,
            EACH_BLOCK, RENORMALISE, PDL,
        )  # fmt: skip
    else:
        if LATE:
            wait(PDL)
        first = (tl.program_id(0) - 1) * lines // PROGRAMS
        end = tl.program_id(0) * lines // PROGRAMS
        _prefetch(ahead_ptr, first, end - first, BLOCK)


@triton.jit
def experts_up(
    x_ptr,  # [K]
    weight_ptr,  # [E, 2 WIDTH, K], gate rows first
    scale_ptr,  # float32 [E, 2 WIDTH] where SCALED
    ids_ptr,  # int64 [experts a token]
    act_ptr,  # [experts a token, WIDTH]
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """act[j] = SwiGLU of expert ids[j] on x. Grid: (WIDTH / ROWS, experts a token)."""
    wait(PDL)
    release(PDL)
    expert = tl.load(ids_ptr + tl.program_id(1))
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < WIDTH
    a = tl.arange(0, K0)
    up: tl.constexpr = WIDTH * K
    at = weight_ptr + expert * (2 * WIDTH * K) + row[:, None] * K
    w_a = weight_tile(at + a[None, :], live, a, K, K0)
    u_a = weight_tile(at + up + a[None, :], live, a, K, K0)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        w_b = weight_tile(at + b[None, :], live, b, K, K0 + K1)
        u_b = weight_tile(at + up + b[None, :], live, b, K, K0 + K1)
    if SCALED:
        scale = scale_ptr + expert * (2 * WIDTH) + row
        gate_scale = tl.load(scale, mask=live, other=0.0)
        up_scale = tl.load(scale + WIDTH, mask=live, other=0.0)
    x = vector(x_ptr, a, K, K0)[None, :]
    gate = tl.sum(w_a.to(tl.float32) * x, 1)
    other = tl.sum(u_a.to(tl.float32) * x, 1)
    if K1 > 0:
        x = vector(x_ptr, b, K, K0 + K1)[None, :]
        gate += tl.sum(w_b.to(tl.float32) * x, 1)
        other += tl.sum(u_b.to(tl.float32) * x, 1)
    if SCALED:
        gate *= gate_scale
        other *= up_scale
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    act = silu_times(gate, other, dtype).to(dtype)
    tl.store(act_ptr + tl.program_id(1) * WIDTH + row, act, mask=live)


@triton.jit
def down_rows(
    act_ptr,  # [TOP_K, K]
    weight_ptr,  # [E, WIDTH, K]
    scale_ptr,  # float32 [E, WIDTH] where SCALED
    ids_ptr,  # int64 [TOP_K]
    shares_ptr,  # float32 [TOP_K]
    routed_scale,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two that holds TOP_K
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    EARLY: tl.constexpr,
    dtype: tl.constexpr,
    PDL: tl.constexpr,
):
    """This program's rows of :func:`experts_down`: (rows, which there are, rounded values)."""
    release(PDL)
    if not EARLY:
        wait(PDL)
    j = tl.arange(0, EXPERTS)
    chosen = j < TOP_K
    expert = tl.load(ids_ptr + j, mask=chosen, other=0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = chosen[:, None, None] & (row < WIDTH)[None, :, None]
    at = weight_ptr + expert[:, None, None] * (WIDTH * K) + (row * K)[None, :, None]
    a = tl.arange(0, K0)[None, None, :]
    w_a = tl.load(at + a, mask=live & (a < K), other=0.0, eviction_policy="evict_first")
    if K1 > 0:
        b = K0 + tl.arange(0, K1)[None, None, :]
        w_b = tl.load(at + b, mask=live & (b < K), other=0.0, eviction_policy="evict_first")
    if SCALED:
        scale = scale_ptr + expert[:, None] * WIDTH + row[None, :]
        scale = tl.load(scale, mask=chosen[:, None] & (row < WIDTH)[None, :], other=0.0)
    if EARLY:
        wait(PDL)
    share = tl.load(shares_ptr + j, mask=chosen, other=0.0)[:, None, None]
    act = act_ptr + (j * K)[:, None, None]
    x = tl.load(act + a, mask=chosen[:, None, None] & (a < K), other=0.0).to(tl.float32) * share
    each = tl.sum(w_a.to(tl.float32) * x, 2)  # an expert's share of a row
    if K1 > 0:
        x = tl.load(act + b, mask=chosen[:, None, None] & (b < K), other=0.0)
        each += tl.sum(w_b.to(tl.float32) * (x.to(tl.float32) * share), 2)
    if SCALED:
        each *= scale
    total = tl.sum(each, 0)
    total = (total.to(dtype).to(tl.float32) * routed_scale).to(dtype)
    return row, row < WIDTH, total


@triton.jit
def experts_down(
    act_ptr,  # [TOP_K, K]
    weight_ptr,  # [E, WIDTH, K]
    scale_ptr,  # float32 [E, WIDTH] where SCALED
    ids_ptr,  # int64 [TOP_K]
    shares_ptr,  # float32 [TOP_K]
    out_ptr,  # [WIDTH]
    routed_scale,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two that holds TOP_K
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = round(routed_scale * round(sum of share * (weight[id] @ act))), rows of all experts.

    EARLY: the ids are there before the wait, so the weights are asked for first.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row, live, total = down_rows(
        act_ptr, weight_ptr, scale_ptr, ids_ptr, shares_ptr, routed_scale, WIDTH, K, K0, K1, TOP_K,
        EXPERTS, ROWS, SCALED, EARLY, dtype, PDL,
    )  # fmt: skip
    tl.store(out_ptr + row, total, mask=live)


def launch_top_k(
    scores: Tensor, bias: Tensor, ids: Tensor, shares: Tensor, s: Shapes, ahead: Tensor | None,
    programs: int, late: bool, pdl: bool,
) -> None:  # fmt: skip
    """Choose experts of the raw logits ``scores [E]``: ids int64 and shares float32 ``[K]``.

    ``ahead`` is what ``programs`` further programs prefetch meanwhile (None: nothing).
    """
    groups, kept = s.n_group or 1, s.topk_group or 1
    if kept >= groups:
        groups = kept = 1
    grouped = (groups, kept, triton.next_power_of_2(groups))
    each = triton.next_power_of_2(s.experts // groups)
    if ahead is None:
        top_k[(1,)](
            scores, bias, ids, shares, 1, s.experts, s.top_k, 1, *grouped, each, s.renormalise,
            pdl, num_warps=1, **options(pdl),
        )  # fmt: skip
        return
    lines = ahead.numel() * ahead.element_size() // 128
    block = triton.next_power_of_2(triton.cdiv(lines, programs))
    top_k_ahead[(1 + programs,)](
        scores, bias, ids, shares, ahead, lines, s.experts, s.top_k, *grouped, each,
        s.renormalise, programs, block, late, pdl, num_warps=1, **options(pdl),
    )  # fmt: skip


def launch_experts_up(
    x: Tensor, gate_up: Tensor, ids: Tensor, act: Tensor, rows: int, warps: int, pdl: bool,
    scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch :func:`experts_up`: x ``[H]``, gate_up ``[E, 2 I, H]``, a row of act an expert.

    ``scale``: float32 ``[E, 2 I]`` of FP8 experts.
    """
    top_k, width = act.shape
    hidden = gate_up.shape[-1]
    experts_up[(triton.cdiv(width, rows), top_k)](
        x, gate_up, gate_up if scale is None else scale, ids, act, width, hidden, *parts(hidden),
        rows, scale is not None, pdl,
        num_warps=warps, **options(pdl),
    )  # fmt: skip


def launch_experts_down(
    act: Tensor, down: Tensor, ids: Tensor, shares: Tensor, out: Tensor, routed_scale: float,
    rows: int, warps: int, early: bool, pdl: bool, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch :func:`experts_down`: act ``[K, I]``, down ``[E, H, I]``, out ``[H]``.

    ``scale``: float32 ``[E, H]`` of FP8 experts.
    """
    top_k, width = act.shape
    hidden = down.shape[1]
    experts_down[(triton.cdiv(hidden, rows),)](
        act, down, down if scale is None else scale, ids, shares, out, routed_scale, hidden, width,
        *parts(width), top_k, triton.next_power_of_2(top_k), rows, scale is not None, early, pdl,
        num_warps=warps, **options(pdl),
    )  # fmt: skip


def expert_mlp_rows(
    x: Tensor,  # [1, H]
    gate_up: Tensor,  # [E, 2 I, H]
    down: Tensor,  # [E, H, I]
    ids: Tensor,  # int64 [1, K]
    weights: Tensor,  # float32 [1, K]
    scale: float,
    gate_up_scale: Tensor | None = None,  # float32 [E, 2 I], of FP8 experts
    down_scale: Tensor | None = None,  # float32 [E, H]
) -> Tensor:
    """The operation ``expert_mlp`` of one token on down projections that lie by output rows.

    A program owns rows of the output for all chosen experts, so nothing is added across programs.
    """
    out = torch.empty_like(x)
    act = torch.empty(ids.shape[1], down.shape[2], dtype=x.dtype, device=x.device)
    rows = (512, 512) if INTERPRETED else (2, 8)
    launch_experts_up(x, gate_up, ids, act, rows[0], 4, False, gate_up_scale)
    launch_experts_down(
        act, down, ids, weights, out, scale, rows[1], 4, False, dependent_launch(x), down_scale
    )
    return out
