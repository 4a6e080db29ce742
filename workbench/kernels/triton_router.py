"""The router as two Triton kernels: float32 logits, then sigmoid, top-k and weights.

The product of one layer is 256 x 5120 float32 weights, 5.2 MB: at a decode step reading them is the
work, at prefill it is 2.7 GFLOP for 1024 tokens, which the float32 units would take 50 us for. BF16
activations go through the tensor cores without loss instead: a float32 weight is the exact sum of
three BF16 numbers (8 + 8 + 8 bits of mantissa), their products with a BF16 activation are exact in
float32 and are added in float32. Against FP64 it is as near as float32 products (1e-7).

Programs share the hidden dimension and leave partial logits ``[splits, N, E]``; the second kernel
adds them in a fixed order, so that a replay gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, strided
from workbench.kernels.registry import register
from workbench.kernels.requirements import triton_runs
from workbench.kernels.triton_elementwise import after_predecessor
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton


@triton.jit(do_not_specialize=["n"])  # one compilation for every batch
def _logits_by_row_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    n,
    x_stride,
    weight_stride,
    H: tl.constexpr,
    E: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens a program
    EXPERTS: tl.constexpr,  # experts a program
    BLOCK: tl.constexpr,  # hidden columns a step; all steps are in flight at once
    PDL: tl.constexpr,
):
    """Logits of a few experts for a few tokens, float32 multiply-adds. Writes ``[1, N, E]``."""
    after_predecessor(PDL)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    column = tl.arange(0, BLOCK)[None, None, :]
    x_ptr += token[:, None, None] * x_stride
    weight_ptr += expert[None, :, None] * weight_stride
    acc = tl.zeros((TOKENS, EXPERTS, BLOCK), tl.float32)
    for start in tl.static_range(0, H, BLOCK):
        inside = start + column < H
        w_mask = (expert < E)[None, :, None] & inside
        w = tl.load(weight_ptr + (start + column), w_mask, 0.0)
        x_mask = (token < n)[:, None, None] & inside
        x = tl.load(x_ptr + (start + column), x_mask, 0.0)
        acc += w * x.to(tl.float32)
    mask = (token < n)[:, None] & (expert < E)[None, :]
    tl.store(out_ptr + token[:, None] * E + expert[None, :], tl.sum(acc, 2), mask)


@triton.jit(do_not_specialize=["n"])  # one compilation for every batch
def _partial_logits_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    n,
    x_stride,
    weight_stride,
    columns,  # hidden columns of a split, a multiple of BLOCK
    H: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of experts x tokens over one split of the hidden dimension.

    Experts are the tile's rows: their weights are split into BF16 parts in registers, from where
    the tensor cores take a left operand. Writes ``[splits, N, E]``.
    """
    after_predecessor(PDL)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    step = tl.arange(0, BLOCK)
    acc = tl.zeros((EXPERTS, TOKENS), tl.float32)
    for start in range(split * columns, min(split * columns + columns, H), BLOCK):
        column = start + step
        w = tl.load(
            weight_ptr + expert[:, None] * weight_stride + column[None, :],
            (expert < E)[:, None] & (column < H)[None, :],
            0.0,
        )
        x = tl.load(
            x_ptr + token[None, :] * x_stride + column[:, None],
            (token < n)[None, :] & (column < H)[:, None],
            0.0,
        )
        if x_ptr.dtype.element_ty == tl.bfloat16:
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            # The tensor cores' own accumulator cuts bits off instead of rounding: over 5120
            # columns that is 1.7e-5 of the logits (H200). So each step starts from zero, the small
            # parts first, and is added in float32 outside (then 1e-7, like float32 products).
            part = tl.dot(low, x)
            part = tl.dot(middle, x, part)
            acc += tl.dot(high, x, part)
        else:
            acc = tl.dot(w, x.to(tl.float32), acc, input_precision="ieee")
    out_ptr += split.to(tl.int64) * n * E
    mask = (expert < E)[:, None] & (token < n)[None, :]
    tl.store(out_ptr + token[None, :] * E + expert[:, None], acc, mask)


@triton.jit(do_not_specialize=["n"])  # one compilation for every batch
def _top_k_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    n,
    E: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,  # groups that take part
    GROUPS_BLOCK: tl.constexpr,
    EACH_BLOCK: tl.constexpr,  # experts of a group
    RENORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum of the splits, sigmoid, group choice, top-k, weights, for one token.

    Reads ``logits [SPLITS, N, E]`` and the correction bias; writes ids and weights ``[N, K]``. The
    K rounds compare integers (a float's bits, made monotonic), which a warp reduces in one
    instruction. A round only marks its winner with its rank, where it lies; one store at the end
    puts each in its place.
    """
    after_predecessor(PDL)
    EACH: tl.constexpr = E // GROUPS
    LOWEST: tl.constexpr = -2147483648
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_BLOCK)
    inner = tl.arange(0, EACH_BLOCK)[None, :]
    expert = group[:, None] * EACH + inner
    real = (group < GROUPS)[:, None] & (inner < EACH)
    bias = tl.load(bias_ptr + expert, real, 0.0)
    logit = tl.load(logits_ptr + token * E + expert, real, 0.0)
    for _ in tl.static_range(1, SPLITS):
        logits_ptr += n.to(tl.int64) * E
        logit += tl.load(logits_ptr + token * E + expert, real, 0.0)
    score = 1.0 / (1.0 + tl.exp(-logit))
    choice = tl.where(real, score + bias, float("-inf"))

    if KEPT < GROUPS:
        best = tl.max(choice, 1)
        at = tl.min(tl.where(choice == best[:, None], inner, EACH_BLOCK), 1)
        second = tl.max(tl.where(inner == at[:, None], float("-inf"), choice), 1)
        rank_of_group = tl.where(group < GROUPS, best + second, float("-inf"))
        kept = group < 0
        for _ in tl.static_range(KEPT):
            top = tl.max(rank_of_group, 0)
            winner = tl.min(tl.where(rank_of_group == top, group, GROUPS_BLOCK), 0)
            kept = kept | (group == winner)
            rank_of_group = tl.where(group == winner, float("-inf"), rank_of_group)
        choice = tl.where(kept[:, None], choice, float("-inf"))

    bits = choice.to(tl.int32, bitcast=True)
    keys = tl.where(real, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LOWEST)
    rank = tl.full(keys.shape, K, tl.int32)
    key = keys
    for k in tl.static_range(K):
        first = key == tl.max(key)
        rank = tl.where(first, k, rank)
        key = tl.where(first, LOWEST, key)
    if tl.sum((rank < K).to(tl.int32)) != K:
        # Two were equal in a round: once more, now only the lower expert wins a round.
        name = tl.where(real, expert, E)
        rank = tl.full(keys.shape, K, tl.int32)
        key = keys
        for place in range(K):
            first = name == tl.min(tl.where(key == tl.max(key), name, E))
            rank = tl.where(first, place, rank)
            key = tl.where(first, LOWEST, key)
    chosen = real & (rank < K)
    if RENORMALISE:
        score = score / tl.sum(tl.where(chosen, score, 0.0))
    tl.store(ids_ptr + token * K + rank, expert.to(tl.int64), chosen)
    tl.store(weights_ptr + token * K + rank, score, chosen)


def launch_logits_by_row(
    x: Tensor, weight: Tensor, tokens: int, experts: int, block: int, warps: int, pdl: bool
) -> Tensor:
    """Float32 logits ``[1, N, E]``, with ``tokens`` x ``experts`` of them a program."""
    n, hidden = x.shape
    total = weight.shape[0]
    out = torch.empty((1, n, total), dtype=torch.float32, device=x.device)
    _logits_by_row_kernel[(triton.cdiv(total, experts), triton.cdiv(n, tokens))](
        x,
        weight,
        out,
        n,
        x.stride(0),
        weight.stride(0),
        hidden,
        total,
        tokens,
        experts,
        block,
        pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out


def launch_partial_logits(
    x: Tensor,
    weight: Tensor,
    tile: tuple[int, int, int],
    splits: int,
    warps: int,
    stages: int,
    pdl: bool,
) -> Tensor:
    """Float32 partial logits ``[splits, N, E]``; ``tile`` = (experts, tokens, hidden columns)."""
    n, hidden = x.shape
    total = weight.shape[0]
    experts, tokens, block = tile
    steps = triton.cdiv(hidden, block)
    each = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, each)  # none is empty
    out = torch.empty((splits, n, total), dtype=torch.float32, device=x.device)
    _partial_logits_kernel[(triton.cdiv(total, experts), triton.cdiv(n, tokens), splits)](
        x,
        weight,
        out,
        n,
        x.stride(0),
        weight.stride(0),
        each * block,
        hidden,
        total,
        experts,
        tokens,
        block,
        pdl,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )
    return out


def launch_top_k(
    logits: Tensor,
    correction_bias: Tensor,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    renormalise: bool,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    """(ids int64, weights float32) ``[N, K]`` of partial logits ``[splits, N, E]``."""
    splits, n, experts = logits.shape
    if n_group is None or topk_group is None or topk_group >= n_group:
        n_group = topk_group = 1
    ids = torch.empty((n, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((n, top_k), dtype=torch.float32, device=logits.device)
    _top_k_kernel[(n,)](
        logits,
        correction_bias,
        ids,
        weights,
        n,
        experts,
        top_k,
        splits,
        n_group,
        topk_group,
        triton.next_power_of_2(n_group),
        triton.next_power_of_2(experts // n_group),
        renormalise,
        pdl,
        num_warps=1,  # 256 experts are 8 a lane, and every reduction stays in the warp
        launch_pdl=pdl,
    )
    return ids, weights


@register("router", "triton", requires=(triton_runs,))
@strided("x")
def router(
    x: Tensor,
    weight: Tensor,
    correction_bias: Tensor,
    *,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    renormalise: bool,
) -> tuple[Tensor, Tensor]:
    """Experts of each token, all in float32: (ids int64 ``[N, K]``, weights float32 ``[N, K]``).

    x ``[N, H]`` (rows may be strided), weight ``[E, H]`` and correction_bias ``[E]`` float32. The K
    are in descending order of score + bias, the lower expert first where two are equal.
    """
    n = x.shape[0]
    if n == 0:
        shape = (0, top_k)
        return (
            torch.empty(shape, dtype=torch.int64, device=x.device),
            torch.empty(shape, dtype=torch.float32, device=x.device),
        )
    logits = _logits(x, weight)
    pdl = dependent_launch(x)
    return launch_top_k(logits, correction_bias, top_k, n_group, topk_group, renormalise, pdl)


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    n = x.shape[0]
    if INTERPRETED:
        if n <= 2:
            return launch_logits_by_row(x, weight, 2, 32, 1024, 4, False)
        return launch_partial_logits(x, weight, (256, 64, 2048), 1, 4, 1, False)
    pdl = dependent_launch(x)
    # Measured on an H200 with 256 experts and H 5120, weights from memory. Few tokens: a program an
    # expert, 2.6 us for one token (the read alone is 1.2), 3.2 for two, 4.4 for eight. More splits
    # make the product faster (4.0 us for 16 tokens in 80), the second kernel slower (37 ns each).
    if n == 1:
        return launch_logits_by_row(x, weight, 1, 1, 512, 8, pdl)
    if n <= 8:
        return launch_logits_by_row(x, weight, 1 if n <= 4 else 8, 1, 1024, 8, pdl)
    if x.dtype != torch.bfloat16:  # float32 products, without the tensor cores
        return launch_partial_logits(x, weight, (64, 64, 32), 16 if n <= 512 else 4, 4, 3, pdl)
    if n <= 16:
        return launch_partial_logits(x, weight, (64, 16, 64), 20, 4, 3, pdl)
    if n <= 128:
        return launch_partial_logits(x, weight, (64, 64, 64), 20, 4, 3, pdl)
    if n <= 512:
        return launch_partial_logits(x, weight, (64, 128, 64), 16 if n <= 256 else 8, 4, 3, pdl)
    # 24 us for 1024 tokens, 164 for 8192; as many splits as fill the chip with one program each.
    return launch_partial_logits(x, weight, (128, 128, 64), max(1, min(8, 8192 // n)), 8, 3, pdl)
