"""Triton experts: SwiGLU of the chosen experts and their weighted sum, for decode and for prefill.

A token or two ("pairs"): every (token, expert) pair is a matrix-vector product of its own, in two
launches; an expert chosen twice is read twice, mostly from L2. More tokens ("grouped"): one launch
sorts the pairs by expert on the GPU and cuts them into blocks of one expert each, two launches
multiply blocks of tokens by their expert's weights, one adds the K results of a token. The number
of blocks is never read on the host: the launch is as large as the worst routing could need, and
programs without a block stop at once. No float atomics: every sum has a fixed order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, strided
from workbench.kernels.registry import register
from workbench.kernels.requirements import triton_runs
from workbench.kernels.triton_expert_sort import follows, sort_pairs
from workbench.kernels.triton_linear import silu_times
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

__all__ = ["GroupedConfig", "PairConfig", "expert_mlp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    """Launch of the pair kernels: tile and warps of gate/up; columns, expert rows, expert groups
    (programs that share a token's experts) and warps of down."""

    rows: int
    depth: int
    warps: int
    columns: int
    down_depth: int
    groups: int
    down_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConfig:
    """Launch of the grouped kernels: tokens of a block, then rows/columns, depth, warps, stages of
    the gate/up and of the down product."""

    tokens: int
    rows: int
    depth: int
    warps: int
    stages: int
    columns: int
    down_depth: int
    down_warps: int
    down_stages: int


# ------------------------------------------------------------------ one or two tokens: pairs


@triton.jit(do_not_specialize=["arrival_count"])
def _pair_gate_up_kernel(
    x_ptr,  # [N, H], rows x_stride apart
    weight_ptr,  # [E, 2 I, H], gate rows first
    ids_ptr,  # int64 [N * K]
    act_ptr,  # [N * K, I]
    arrivals_ptr,  # int32 [N, arrival_count], made zero for the down launch
    x_stride,
    arrival_count,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    ARRIVALS: tl.constexpr,
    releases: tl.constexpr,
):
    """act[pair] = SwiGLU of expert ids[pair] on the pair's token; reads that expert's rows once."""
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1)
    token = pair // top_k
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, DEPTH)
    live = row[:, None] < width
    expert = tl.load(ids_ptr + pair)
    gate_tile = weight_ptr + expert * (2 * width * hidden) + row[:, None] * hidden + col[None, :]
    up_tile = gate_tile + width * hidden
    x_row = x_ptr + token.to(tl.int64) * x_stride + col
    if (tl.program_id(0) == 0) & (pair % top_k == 0):
        slot = tl.arange(0, ARRIVALS)
        zero = tl.zeros((ARRIVALS,), tl.int32)
        tl.store(arrivals_ptr + token * arrival_count + slot, zero, mask=slot < arrival_count)
    gate = tl.zeros((ROWS, DEPTH), tl.float32)
    up = tl.zeros((ROWS, DEPTH), tl.float32)
    for k in tl.static_range(0, hidden, DEPTH):  # unrolled: many loads in flight
        inside = k + col < hidden
        x = tl.load(x_row + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        inside = live & inside[None, :]
        w = tl.load(gate_tile + k, mask=inside, other=0.0, eviction_policy="evict_first")
        gate += w.to(tl.float32) * x
        w = tl.load(up_tile + k, mask=inside, other=0.0, eviction_policy="evict_first")
        up += w.to(tl.float32) * x
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    act = silu_times(tl.sum(gate, 1), tl.sum(up, 1), dtype)
    tl.store(act_ptr + pair * width + row, act.to(dtype), mask=row < width)


@triton.jit
def _pair_down_kernel(
    act_ptr,  # [N * K, I]
    weight_ptr,  # [E, I, H]
    ids_ptr,  # int64 [N * K]
    weights_ptr,  # float32 [N * K]
    parts_ptr,  # float32 [N, GROUPS, H]; not used by one group
    arrivals_ptr,  # int32 [N, programs along H], zero
    out_ptr,  # [N, H]
    scale,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    dependent: tl.constexpr,
):
    """out[token] = round(scale * round(sum over experts of weight * (act @ down))).

    A program reads a stripe of COLUMNS of some of the token's experts. With several GROUPS the
    program that arrives last at its stripe adds all groups in their order, whichever it is.
    """
    per_group: tl.constexpr = (top_k + GROUPS - 1) // GROUPS
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(1)
    group = tl.program_id(2)
    depth = tl.arange(0, DEPTH)
    live = column < hidden
    # Expert weights do not depend on the launch before: the first tile is requested ahead of it.
    k_first = group * per_group
    expert = tl.load(ids_ptr + token * top_k + k_first)
    offset = depth[:, None] * hidden + column[None, :]
    inside = (depth[:, None] < width) & live[None, :]
    tile = weight_ptr + expert * (width * hidden) + offset
    first = tl.load(tile, mask=inside, other=0.0, eviction_policy="evict_first")
    if dependent:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((DEPTH, COLUMNS), tl.float32)
    for j in tl.static_range(per_group):
        k = k_first + j
        pair = token * top_k + k
        chosen = k < top_k
        share = tl.load(weights_ptr + pair, mask=chosen, other=0.0)
        expert = tl.load(ids_ptr + pair, mask=chosen, other=0)
        tile = weight_ptr + expert * (width * hidden) + offset
        for start in tl.static_range(0, width, DEPTH):
            a_live = (start + depth < width) & chosen
            a = tl.load(act_ptr + pair * width + start + depth, mask=a_live, other=0.0)
            if j + start == 0:
                w = first
            else:
                inside = a_live[:, None] & live[None, :]
                w = tl.load(
                    tile + start * hidden, mask=inside, other=0.0, eviction_policy="evict_first"
                )
            acc += (a.to(tl.float32) * share)[:, None] * w.to(tl.float32)
    total = tl.sum(acc, 0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = out_ptr + token.to(tl.int64) * hidden + column
    if GROUPS == 1:
        tl.store(out, (total.to(dtype).to(tl.float32) * scale).to(dtype), mask=live)
    else:
        part = parts_ptr + token.to(tl.int64) * (GROUPS * hidden) + column
        tl.store(part + group * hidden, total, mask=live)
        tl.debug_barrier()  # all threads' stores come before the release below
        arrival = arrivals_ptr + token * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrival, 1, sem="acq_rel") == GROUPS - 1:
            total = tl.zeros((COLUMNS,), tl.float32)
            for g in tl.static_range(GROUPS):
                # From L2, where the other programs wrote it: L1 is not coherent.
                total += tl.load(part + g * hidden, mask=live, other=0.0, cache_modifier=".cg")
            tl.store(out, (total.to(dtype).to(tl.float32) * scale).to(dtype), mask=live)


# ------------------------------------------------------------------ more tokens: grouped


@triton.jit
def _grouped_gate_up_kernel(
    x_ptr,  # [N, H], rows x_stride apart
    weight_ptr,  # [E, 2 I, H], gate rows first
    order_ptr,  # int32 [N * K]
    block_ptr,  # int32 [max_blocks, 3]
    act_ptr,  # [N * K, I], in sorted order
    x_stride,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """Gathers a block's tokens, multiplies by its expert's gate and up rows, writes the SwiGLU.

    The tiles of a block have neighbouring programs, blocks of an expert follow one another: tokens
    and weights that are read again are then still in L2.
    """
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    if dependent:
        tl.extra.cuda.gdc_wait()
    tiles: tl.constexpr = (width + ROWS - 1) // ROWS
    entry = block_ptr + tl.program_id(0) // tiles * 3
    expert = tl.load(entry)
    if expert < 0:
        return
    place = tl.load(entry + 1)
    count = tl.load(entry + 2)
    slot = tl.arange(0, TOKENS)
    col = tl.arange(0, DEPTH)
    first_row = tl.program_id(0) % tiles * ROWS
    # Slots and rows past the end read the last one instead: their products are not stored.
    token = tl.load(order_ptr + place + tl.minimum(slot, count - 1)) // top_k
    x_tile = x_ptr + token[:, None].to(tl.int64) * x_stride + col[None, :]
    # Gate and up rows in turn, so that a thread holds both products of an output.
    lane = tl.arange(0, 2 * ROWS)
    w_row = tl.minimum(first_row + lane // 2, width - 1) + lane % 2 * width
    w_tile = weight_ptr + expert.to(tl.int64) * (2 * width * hidden)
    w_tile += w_row[:, None] * hidden + col[None, :]
    acc = tl.zeros((TOKENS, 2 * ROWS), tl.float32)
    for k in range(0, hidden, DEPTH):
        if hidden % DEPTH == 0:
            x = tl.load(x_tile + k)
            w = tl.load(w_tile + k)
        else:
            inside = (col + k < hidden)[None, :]
            x = tl.load(x_tile + k, mask=inside, other=0.0)
            w = tl.load(w_tile + k, mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    gate, up = tl.split(tl.reshape(acc, (TOKENS, ROWS, 2)))
    act = silu_times(gate, up, dtype).to(dtype)
    row = first_row + tl.arange(0, ROWS)
    out = act_ptr + (place + slot)[:, None].to(tl.int64) * width + row[None, :]
    tl.store(out, act, mask=(slot < count)[:, None] & (row < width)[None, :])


@triton.jit
def _grouped_down_kernel(
    act_ptr,  # [N * K, I], in sorted order
    weight_ptr,  # [E, I, H]
    order_ptr,  # int32 [N * K]
    block_ptr,  # int32 [max_blocks, 3]
    product_ptr,  # [N * K, H], by pair
    hidden: tl.constexpr,
    width: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """product[pair] = act @ down of the block's expert, scattered back to the pairs' order."""
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    if dependent:
        tl.extra.cuda.gdc_wait()
    tiles: tl.constexpr = (hidden + COLUMNS - 1) // COLUMNS
    entry = block_ptr + tl.program_id(0) // tiles * 3
    expert = tl.load(entry)
    if expert < 0:
        return
    place = tl.load(entry + 1)
    count = tl.load(entry + 2)
    slot = tl.arange(0, TOKENS)
    depth = tl.arange(0, DEPTH)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    live = column[None, :] < hidden
    held = tl.minimum(slot, count - 1)
    a_tile = act_ptr + (place + held)[:, None].to(tl.int64) * width + depth[None, :]
    w_tile = weight_ptr + expert.to(tl.int64) * (width * hidden)
    w_tile += depth[:, None] * hidden + column[None, :]
    acc = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for k in range(0, width, DEPTH):
        if width % DEPTH == 0 and hidden % COLUMNS == 0:
            a = tl.load(a_tile + k)
            w = tl.load(w_tile + k * hidden)
        else:
            inside = depth + k < width
            a = tl.load(a_tile + k, mask=inside[None, :], other=0.0)
            w = tl.load(w_tile + k * hidden, mask=inside[:, None] & live, other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    pair = tl.load(order_ptr + place + held)
    out = product_ptr + pair[:, None].to(tl.int64) * hidden + column[None, :]
    tl.store(out, acc.to(product_ptr.dtype.element_ty), mask=(slot < count)[:, None] & live)


@triton.jit
def _combine_kernel(
    product_ptr,  # [N * K, H]
    weights_ptr,  # float32 [N * K]
    out_ptr,  # [N, H]
    scale,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    COLUMNS: tl.constexpr,
    dependent: tl.constexpr,
):
    """out[token] = round(scale * round(weighted float32 sum of the token's K products))."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(1).to(tl.int64)
    live = column < hidden
    total = tl.zeros((COLUMNS,), tl.float32)
    if dependent:
        tl.extra.cuda.gdc_wait()
    for k in tl.static_range(top_k):
        pair = token * top_k + k
        product = tl.load(product_ptr + pair * hidden + column, mask=live, other=0.0)
        total += product.to(tl.float32) * tl.load(weights_ptr + pair)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = (total.to(dtype).to(tl.float32) * scale).to(dtype)
    tl.store(out_ptr + token * hidden + column, total, mask=live)


# ------------------------------------------------------------------ launches


def _run_pairs(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    scale: float,
    config: PairConfig,
) -> Tensor:
    tokens, hidden = x.shape
    width, top_k = down.shape[1], ids.shape[1]
    early = dependent_launch(x)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    act = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
    stripes = triton.cdiv(hidden, config.columns)
    arrivals = torch.empty(tokens, stripes, dtype=torch.int32, device=x.device)
    shape = (tokens, config.groups, hidden)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device) if config.groups > 1 else out
    _pair_gate_up_kernel[(triton.cdiv(width, config.rows), tokens * top_k)](
        x, gate_up, ids, act, arrivals, x.stride(0), stripes, top_k, hidden, width,
        config.rows, config.depth, triton.next_power_of_2(stripes), early,
        num_warps=config.warps,
    )  # fmt: skip
    _pair_down_kernel[(stripes, tokens, config.groups)](
        act, down, ids, weights, parts, arrivals, out, scale, top_k, hidden, width,
        config.groups, config.down_depth, config.columns, early,
        num_warps=config.down_warps, **follows(early),
    )  # fmt: skip
    return out


def _run_grouped(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    scale: float,
    config: GroupedConfig,
) -> Tensor:
    tokens, hidden = x.shape
    experts, width, top_k = down.shape[0], down.shape[1], ids.shape[1]
    pairs = tokens * top_k
    early = dependent_launch(x)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    act = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    # Few tokens: products stay float32, which costs nothing beside the weights. Many: K products
    # of every token are the largest traffic after the weights, so they are rounded, as the torch
    # code rounds them.
    dtype = torch.float32 if tokens <= 64 else x.dtype
    product = torch.empty(pairs, hidden, dtype=dtype, device=x.device)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    # The worst routing: each expert that is chosen leaves one block partly filled.
    max_blocks = min(pairs, experts + pairs // config.tokens)
    blocks = torch.empty(max_blocks, 3, dtype=torch.int32, device=x.device)
    sort_pairs(ids, order, blocks, experts, config.tokens, early)
    _grouped_gate_up_kernel[(max_blocks * triton.cdiv(width, config.rows),)](
        x, gate_up, order, blocks, act, x.stride(0), top_k, hidden, width,
        config.tokens, config.rows, config.depth, early, early,
        num_warps=config.warps, num_stages=config.stages, **follows(early),
    )  # fmt: skip
    _grouped_down_kernel[(max_blocks * triton.cdiv(hidden, config.columns),)](
        act, down, order, blocks, product, hidden, width,
        config.tokens, config.columns, config.down_depth, early, early,
        num_warps=config.down_warps, num_stages=config.down_stages, **follows(early),
    )  # fmt: skip
    columns = min(triton.next_power_of_2(hidden), 8192 if INTERPRETED else 1024)
    _combine_kernel[(triton.cdiv(hidden, columns), tokens)](
        product, weights, out, scale, top_k, hidden, columns, early,
        num_warps=4, **follows(early),
    )  # fmt: skip
    return out


def _choose(x: Tensor, ids: Tensor, experts: int, width: int) -> PairConfig | GroupedConfig:
    tokens, hidden = x.shape
    if INTERPRETED:  # milliseconds a program: as few as possible
        depth = max(16, min(triton.next_power_of_2(hidden), 512))
        rows = max(16, min(triton.next_power_of_2(width), 256))
        if tokens == 1:
            return PairConfig(rows=rows, depth=depth, warps=4, columns=2 * depth, down_depth=rows,
                              groups=1, down_warps=4)  # fmt: skip
        return GroupedConfig(tokens=16 if tokens <= 32 else 64, rows=rows, depth=depth, warps=4,
                             stages=1, columns=depth, down_depth=rows, down_warps=4,
                             down_stages=1)  # fmt: skip
    # Below: fastest of those measured on one H200 (BF16, E 256, K 8, H 5120, I 320, weights from
    # HBM, distinct random experts; torch 2.11, Triton 3.6), with neighbours within 3 % unless said.
    if x.dtype == torch.float32:  # not tuned; half as much fits into shared memory
        return GroupedConfig(tokens=16, rows=16, depth=64, warps=4, stages=2, columns=64,
                             down_depth=32, down_warps=4, down_stages=2)  # fmt: skip
    if tokens == 1:  # 23.1 us; two groups instead of eight 30 us, eight warps for down 25 us
        return PairConfig(rows=2, depth=1024, warps=4, columns=64, down_depth=64, groups=8,
                          down_warps=4)  # fmt: skip
    if tokens <= 4:  # 45 us for two tokens (grouped: 70), 80 us for four (grouped: 88)
        return PairConfig(rows=2, depth=1024, warps=4, columns=64, down_depth=64, groups=4,
                          down_warps=8)  # fmt: skip
    pairs_each = tokens * ids.shape[1] / experts
    if pairs_each <= 8:  # 147 us for 8 tokens, 512 us for 64 (blocks of 32: 548), 607 for 256 (643)
        return GroupedConfig(tokens=16, rows=32, depth=128, warps=4, stages=4, columns=128,
                             down_depth=64, down_warps=4, down_stages=4)  # fmt: skip
    if pairs_each < 128:  # 679 us for 1024 tokens (blocks of 32: 735, of 128: 998)
        return GroupedConfig(tokens=32 if pairs_each <= 16 else 64, rows=64, depth=64, warps=4,
                             stages=4, columns=128, down_depth=64, down_warps=4,
                             down_stages=3)  # fmt: skip
    # 3.7 ms for 16384 tokens (blocks of 64: 4.4); three stages leave room for two programs an SM
    return GroupedConfig(tokens=128, rows=64, depth=64, warps=8, stages=3, columns=256,
                         down_depth=64, down_warps=8, down_stages=3)  # fmt: skip


@register("expert_mlp", "triton", requires=(triton_runs,))
@strided("x")
def expert_mlp(
    x: Tensor,  # [N, H]
    gate_up: Tensor,  # [E, 2 I, H], gate rows first
    down: Tensor,  # [E, I, H]
    ids: Tensor,  # int64 [N, K], distinct in a row
    weights: Tensor,  # float32 [N, K]
    scale: float,
    *,
    config: PairConfig | GroupedConfig | None = None,
) -> Tensor:
    """Chosen experts' SwiGLU outputs, weighted, summed, times ``scale``: ``[N, H]``.

    Gate and up products and activations are rounded to x's dtype; the weighted sum is float32,
    rounded once, and so is its product with ``scale``.
    """
    if x.shape[0] == 0:
        return torch.empty_like(x)
    ids, weights = ids.contiguous(), weights.contiguous()
    if config is None:
        config = _choose(x, ids, *down.shape[:2])
    if isinstance(config, PairConfig):
        return _run_pairs(x, gate_up, down, ids, weights, scale, config)
    return _run_grouped(x, gate_up, down, ids, weights, scale, config)
