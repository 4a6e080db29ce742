"""The experts of a prefill as two grouped matrix products over tokens sorted by expert.

Hundreds of tokens an expert: tensor cores are the limit, not bandwidth. Weights come through tensor
descriptors (one thread asks for a whole tile), tokens are gathered by their rows, since a sorted
copy of them would cost as much memory traffic as the products' results. The SwiGLU is part of the
first product's epilogue; the weighted sum over a token's experts is part of the boundary that
follows (:mod:`workbench.kernels.rank.triton_prefill_vectors`).

The gate and up rows of one of eight ranks are 320, two and a half tiles of 128: the last tile of a
block is as wide as what is left, in the same launch, so that its tokens are still in the L2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, strided
from workbench.kernels.rank.triton_prefill_sort import sorted_places
from workbench.kernels.triton_expert_sort import follows
from workbench.kernels.triton_linear import silu_times
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip - after the line above


@triton.jit
def _gate_up_tile(
    x_ptr,
    weight,
    order_ptr,
    act_ptr,
    expert,
    place,
    count,
    first,
    x_stride,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """SwiGLU of a block's tokens and ROWS gate and up rows from ``first`` on.

    Gate and up rows are one tile of 2 * ROWS, so the tensor cores get the widest instruction and
    read the tokens once; the two products of an output are then values of one thread.
    """
    slot = tl.arange(0, TOKENS)
    column = tl.arange(0, DEPTH)
    # Slots past the end read the last row instead of a mask: their products are not stored.
    token = tl.load(order_ptr + place + tl.minimum(slot, count - 1)) // top_k
    x_tile = x_ptr + token[:, None].to(tl.int64) * x_stride + column[None, :]
    acc = tl.zeros((TOKENS, 2 * ROWS), tl.float32)
    for k in range(0, hidden, DEPTH):
        if hidden % DEPTH == 0:
            x = tl.load(x_tile + k)
        else:
            x = tl.load(x_tile + k, mask=(column + k < hidden)[None, :], other=0.0)
        w = tl.reshape(weight.load([expert, 0, first, k]), (2 * ROWS, DEPTH))
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    gate, up = tl.split(tl.permute(tl.reshape(acc, (TOKENS, 2, ROWS)), (0, 2, 1)))
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    act = silu_times(gate, up, dtype).to(dtype)
    row = first + tl.arange(0, ROWS)
    out = act_ptr + (place + slot)[:, None].to(tl.int64) * width + row[None, :]
    tl.store(out, act, mask=(slot < count)[:, None] & (row < width)[None, :])


@triton.jit
def _gate_up_block(
    x_ptr,
    weight,
    order_ptr,
    act_ptr,
    expert,
    place,
    count,
    first,
    x_stride,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    TOKENS: tl.constexpr,
    FEW: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The tile of a block in the size that its tokens need."""
    if FEW > 0:
        if count <= FEW:
            _gate_up_tile(
                x_ptr, weight, order_ptr, act_ptr, expert, place, count, first, x_stride,
                top_k, hidden, width, FEW, ROWS, DEPTH,
            )  # fmt: skip
        else:
            _gate_up_tile(
                x_ptr, weight, order_ptr, act_ptr, expert, place, count, first, x_stride,
                top_k, hidden, width, TOKENS, ROWS, DEPTH,
            )  # fmt: skip
    else:
        _gate_up_tile(
            x_ptr, weight, order_ptr, act_ptr, expert, place, count, first, x_stride,
            top_k, hidden, width, TOKENS, ROWS, DEPTH,
        )  # fmt: skip


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [N, H], rows x_stride apart
    wide,  # descriptor of [E, 2, I, H]: gate, up; ROWS rows of both at a time
    narrow,  # the same, TAIL rows of both at a time
    order_ptr,  # int32 [N * K]
    block_ptr,  # int32 [max_blocks, 3]: expert (-1: none), first place in order, pairs
    act_ptr,  # [N * K, I], in sorted order
    x_stride,
    top_k: tl.constexpr,
    hidden: tl.constexpr,
    width: tl.constexpr,
    TOKENS: tl.constexpr,
    FEW: tl.constexpr,  # blocks of so many tokens or fewer take a tile of this size; 0: none
    ROWS: tl.constexpr,
    TAIL: tl.constexpr,  # 0: whole tiles of ROWS
    DEPTH: tl.constexpr,
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """One block's tokens times one tile of its expert's gate and up rows, then their SwiGLU.

    The tiles of a block have neighbouring programs, blocks of an expert follow one another: tokens
    and weights that are read again are then still in the L2.
    """
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    if dependent:
        tl.extra.cuda.gdc_wait()
    whole: tl.constexpr = width // ROWS if TAIL > 0 else (width + ROWS - 1) // ROWS
    tiles: tl.constexpr = whole + 1 if TAIL > 0 else whole
    entry = block_ptr + tl.program_id(0) // tiles * 3
    expert = tl.load(entry)
    if expert < 0:
        return
    place = tl.load(entry + 1)
    count = tl.load(entry + 2)
    tile = tl.program_id(0) % tiles
    first = tile * ROWS
    if TAIL > 0:
        if tile == whole:
            _gate_up_block(
                x_ptr, narrow, order_ptr, act_ptr, expert, place, count, first, x_stride,
                top_k, hidden, width, TOKENS, FEW, TAIL, DEPTH,
            )  # fmt: skip
        else:
            _gate_up_block(
                x_ptr, wide, order_ptr, act_ptr, expert, place, count, first, x_stride,
                top_k, hidden, width, TOKENS, FEW, ROWS, DEPTH,
            )  # fmt: skip
    else:
        _gate_up_block(
            x_ptr, wide, order_ptr, act_ptr, expert, place, count, first, x_stride,
            top_k, hidden, width, TOKENS, FEW, ROWS, DEPTH,
        )  # fmt: skip


@triton.jit
def _down_tiles(
    act,
    weight,
    order_ptr,
    product_ptr,
    product,
    expert,
    place,
    count,
    first,
    hidden: tl.constexpr,
    width: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,
    SORTED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A block's products in EACH tiles of columns from ``first`` on.

    Stored by pair, or if SORTED by place; then WHOLE blocks through the descriptor ``product``.
    """
    slot = tl.arange(0, TOKENS)
    live = slot < count
    row = place + slot
    if not SORTED:
        row = tl.load(order_ptr + place + tl.minimum(slot, count - 1))
    out_row = product_ptr + row.to(tl.int64)[:, None] * hidden
    for tile in tl.range(0, EACH, flatten=True):
        start = first + tile * COLUMNS
        acc = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for k in range(0, width, DEPTH):
            a = act.load([place, k])
            w = weight.load([expert * hidden + start, k])
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        out = acc.to(product_ptr.dtype.element_ty)
        if WHOLE:
            product.store([place, start], out)
        else:
            column = start + tl.arange(0, COLUMNS)
            inside = live[:, None] & (column < hidden)[None, :]
            tl.store(out_row + column[None, :], out, mask=inside)


@triton.jit
def _down_kernel(
    act,  # descriptor of [N * K, I], in sorted order; TOKENS rows at a time
    act_few,  # the same, FEW rows at a time
    weight,  # descriptor of [E * H, I]
    order_ptr,  # int32 [N * K]
    block_ptr,  # int32 [max_blocks, 3]
    product_ptr,  # [N * K, H], by pair, or by place
    product,  # descriptor of the same, TOKENS rows at a time
    hidden: tl.constexpr,
    width: tl.constexpr,
    TOKENS: tl.constexpr,
    FEW: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,  # tiles of columns a program
    SORTED: tl.constexpr,
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """act @ down.T of the block's expert, scattered back to the pairs' order, or if SORTED not.

    In sorted order a whole block is a rectangle, which the hardware's bulk copies store while the
    next tile is multiplied. The inner dimension is a few steps only. With several tiles a program
    their steps are one loop, so that the next tile is on its way while one is stored.
    """
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    if dependent:
        tl.extra.cuda.gdc_wait()
    groups: tl.constexpr = (hidden + COLUMNS * EACH - 1) // (COLUMNS * EACH)
    entry = block_ptr + tl.program_id(0) // groups * 3
    expert = tl.load(entry)
    if expert < 0:
        return
    place = tl.load(entry + 1)
    count = tl.load(entry + 2)
    first = tl.program_id(0) % groups * (COLUMNS * EACH)
    if SORTED:
        if count == TOKENS:
            _down_tiles(
                act, weight, order_ptr, product_ptr, product, expert, place, count, first,
                hidden, width, TOKENS, COLUMNS, DEPTH, EACH, SORTED, True,
            )  # fmt: skip
        elif count <= FEW:
            _down_tiles(
                act_few, weight, order_ptr, product_ptr, product, expert, place, count, first,
                hidden, width, FEW if FEW > 0 else TOKENS, COLUMNS, DEPTH, EACH, SORTED, False,
            )  # fmt: skip
        else:
            _down_tiles(
                act, weight, order_ptr, product_ptr, product, expert, place, count, first,
                hidden, width, TOKENS, COLUMNS, DEPTH, EACH, SORTED, False,
            )  # fmt: skip
    elif FEW > 0:
        if count <= FEW:
            _down_tiles(
                act_few, weight, order_ptr, product_ptr, product, expert, place, count, first,
                hidden, width, FEW, COLUMNS, DEPTH, EACH, SORTED, False,
            )  # fmt: skip
        else:
            _down_tiles(
                act, weight, order_ptr, product_ptr, product, expert, place, count, first,
                hidden, width, TOKENS, COLUMNS, DEPTH, EACH, SORTED, False,
            )  # fmt: skip
    else:
        _down_tiles(
            act, weight, order_ptr, product_ptr, product, expert, place, count, first,
            hidden, width, TOKENS, COLUMNS, DEPTH, EACH, SORTED, False,
        )  # fmt: skip


# ------------------------------------------------------------------ launches


@dataclass(frozen=True, slots=True, kw_only=True)
class UpLaunch:
    """Launch of gate and up: ``rows`` gate rows a tile, and as many up rows."""

    rows: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 4
    tail: bool = True  # what is left over by whole tiles is a tile of its own width


@dataclass(frozen=True, slots=True, kw_only=True)
class DownLaunch:
    """Launch of down: ``columns`` a tile, ``each`` tiles a program.

    H200, 16,384 tokens, 8 of 256 experts of 320, H 5120: 0.935 ms, one tile a program 1.165, tiles
    of 256 columns 1.314 and 0.984. Gate and up 1.484 ms, in tiles of 64 rows 1.646.
    """

    columns: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 3
    each: int = 10
    ordered: bool = False  # products by place in the order of experts, not by pair


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsLaunch:
    """Both products; ``tokens`` is the size of the blocks that the sort cuts.

    The last block of an expert is half full on average: ``halves`` gives those of at most half the
    size a tile of half the size.
    """

    tokens: int = 128
    halves: bool = True
    up: UpLaunch = UpLaunch()
    down: DownLaunch = DownLaunch()

    @property
    def few(self) -> int:
        """Tokens of the small tile; 0: there is none."""
        wide = INTERPRETED or self.tokens >= 128  # 64 rows are the least of the matrix units
        return self.tokens // 2 if self.halves and wide else 0


_INTERPRETED = ExpertsLaunch(
    tokens=32,
    up=UpLaunch(rows=32, depth=64, stages=1),
    down=DownLaunch(columns=64, depth=64, each=1),
)


def default_launch() -> ExpertsLaunch:
    """The launch for this process: interpreted programs take small tiles."""
    return _INTERPRETED if INTERPRETED else ExpertsLaunch()


def _tail(width: int, launch: UpLaunch) -> int:
    rest = width % launch.rows
    if not launch.tail or not rest:
        return 0
    return min(launch.rows, max(16, int(triton.next_power_of_2(rest))))


def _matrix(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """All leading axes of a contiguous x as rows, in tiles of ``[rows, columns]``."""
    flat = x.flatten(0, -2)
    return TensorDescriptor(
        flat, shape=list(flat.shape), strides=[flat.stride(0), 1], block_shape=[rows, columns]
    )


def launch_gate_up(
    x: Tensor, gate_up: Tensor, order: Tensor, blocks: Tensor, top_k: int, launch: ExpertsLaunch
) -> Tensor:
    """SwiGLU of every pair in sorted order, ``[N K, I]``."""
    hidden, width, up = x.shape[1], gate_up.shape[1] // 2, launch.up
    act = torch.empty(order.shape[0], width, dtype=x.dtype, device=x.device)
    early, tail = dependent_launch(x), _tail(width, up)
    tiles = width // up.rows + 1 if tail else triton.cdiv(width, up.rows)
    grid = (blocks.shape[0] * tiles,)
    sizes = (top_k, hidden, width, launch.tokens, launch.few, up.rows, tail, up.depth, early, early)
    options = {"num_warps": up.warps, "num_stages": up.stages} | follows(early)
    pair = gate_up.unflatten(1, (2, width))

    def rows(count: int) -> TensorDescriptor:
        return TensorDescriptor(
            pair,
            shape=list(pair.shape),
            strides=list(pair.stride()),
            block_shape=[1, 2, count, up.depth],
        )

    _gate_up_kernel[grid](
        x, rows(up.rows), rows(tail or up.rows), order, blocks, act, x.stride(0), *sizes, **options
    )
    return act


def launch_down(
    act: Tensor, down: Tensor, order: Tensor, blocks: Tensor, launch: ExpertsLaunch
) -> Tensor:
    """Every pair's product, rounded: ``[N K, H]``, ``down [E, H, I]``; by pair, or by place."""
    hidden, width, how = down.shape[1], down.shape[2], launch.down
    product = torch.empty(order.shape[0], hidden, dtype=act.dtype, device=act.device)
    early = dependent_launch(act)
    grid = (blocks.shape[0] * triton.cdiv(hidden, how.columns * how.each),)
    _down_kernel[grid](
        _matrix(act, launch.tokens, how.depth),
        _matrix(act, launch.few or launch.tokens, how.depth),
        _matrix(down, how.columns, how.depth),
        order, blocks, product, _matrix(product, launch.tokens, how.columns),
        hidden, width, launch.tokens, launch.few,
        how.columns, how.depth, how.each, how.ordered, early, early,
        num_warps=how.warps, num_stages=how.stages, **follows(early),
    )  # fmt: skip
    return product


@strided("x")
def grouped_experts(
    x: Tensor,  # [N, H]
    gate_up: Tensor,  # [E, 2 I, H], gate rows first
    down: Tensor,  # [E, H, I]
    ids: Tensor,  # int64 [N, K], distinct in a row
    *,
    launch: ExpertsLaunch | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Every chosen expert's output for its token, rounded and not yet weighted.

    ``([N K, H], places int32 [N, K])``: the row of each pair; without places the rows are
    the pairs.
    """
    how = launch or default_launch()
    order, blocks, place = sorted_places(ids, gate_up.shape[0], how.tokens)
    act = launch_gate_up(x, gate_up, order, blocks, ids.shape[1], how)
    product = launch_down(act, down, order, blocks, how)
    return product, place if how.down.ordered else None
