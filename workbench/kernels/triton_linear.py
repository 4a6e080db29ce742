"""Triton projections: packed Q + K + V + gate, and the dense SwiGLU MLP in two launches.

One token is a matrix-vector product: programs own a few weight rows each and read them with plain
wide loads, nothing else matters than keeping HBM busy. From two tokens on, tiles go through
``tl.dot``; where one token tile leaves the GPU short of programs, the inner dimension is split over
programs as well and a second launch adds the splits in a fixed order, so results are
deterministic. Layouts: ``x [N, in]`` (rows may be strided), weights ``[out, in]`` row-major.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, multiprocessors, strided
from workbench.kernels.registry import register
from workbench.kernels.requirements import triton_runs
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

__all__ = ["RowConfig", "TileConfig", "dense_mlp", "project", "qkvg"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowConfig:
    """Launch of the one-token kernel: weight rows and inner elements of a program's tile."""

    rows: int
    depth: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Launch of the tiled kernel: tile sizes, over how many programs a tile's sum is split, and
    whether the tile is computed transposed."""

    tokens: int
    rows: int
    depth: int
    splits: int = 1
    swap: bool = False
    warps: int = 4
    stages: int = 3


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr):
    """SwiGLU of float32 products that are first rounded to ``dtype``, as the torch code stores
    them; returns float32 for the caller to round once."""
    gate = gate.to(dtype).to(tl.float32)
    return gate * tl.sigmoid(gate) * up.to(dtype).to(tl.float32)


@triton.jit
def _one_token_kernel(
    x_ptr,  # [N, inner], rows x_stride apart; token program_id(1)
    weight_ptr,  # [width, inner], gated: [2 width, inner], gate rows first
    out_ptr,  # [N, width]
    x_stride,
    width: tl.constexpr,
    inner: tl.constexpr,
    gated: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """out[token] = x[token] @ weight.T, gated: its SwiGLU.

    Reads the weight once and the token (from L2) once a program, writes ``width`` values. The first
    weight tile is requested before waiting for the launch that produces ``x``: weights depend on
    nothing, so their latency hides behind the end of that launch.
    """
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, DEPTH)
    live = row[:, None] < width
    tile = weight_ptr + row[:, None].to(tl.int64) * inner + col[None, :]
    x_row = x_ptr + tl.program_id(1).to(tl.int64) * x_stride + col
    up_offset: tl.constexpr = width * inner

    first = live & (col[None, :] < inner)
    w = tl.load(tile, mask=first, other=0.0, eviction_policy="evict_first")
    if gated:
        u = tl.load(tile + up_offset, mask=first, other=0.0, eviction_policy="evict_first")
    if dependent:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_row, mask=col < inner, other=0.0).to(tl.float32)[None, :]
    acc = w.to(tl.float32) * x
    if gated:
        up_acc = u.to(tl.float32) * x
    for k in tl.static_range(DEPTH, inner, DEPTH):  # unrolled: many loads in flight
        inside = k + col < inner
        x = tl.load(x_row + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        inside = live & inside[None, :]
        w = tl.load(tile + k, mask=inside, other=0.0, eviction_policy="evict_first")
        acc += w.to(tl.float32) * x
        if gated:
            u = tl.load(tile + up_offset + k, mask=inside, other=0.0, eviction_policy="evict_first")
            up_acc += u.to(tl.float32) * x
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    value = tl.sum(acc, 1)
    if gated:
        value = silu_times(value, tl.sum(up_acc, 1), dtype)
    out = out_ptr + tl.program_id(1).to(tl.int64) * width + row
    tl.store(out, value.to(dtype), mask=row < width)


@triton.jit(do_not_specialize=["tokens"])
def _tile_kernel(
    x_ptr,  # [N, inner], rows x_stride apart
    weight_ptr,  # [width, inner], gated: [2 width, inner], gate rows first
    out_ptr,  # [N, width]; with splits: float32 [splits, N, (2) width], gate and up in turn
    tokens,
    x_stride,
    width: tl.constexpr,
    inner: tl.constexpr,
    gated: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """out tile = x tile @ weight tile.T over this split's part of the inner dimension.

    SWAP computes the tile transposed: the weight rows are then the tall side of the matrix
    instruction and few tokens its narrow side (8 at least instead of 16).

    Without splits the epilogue rounds (gated: rounds both products, then writes their SwiGLU); with
    splits it writes raw float32 sums for ``_add_splits_kernel``.
    """
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    # GROUP token tiles go through all weight tiles together: their x tiles and each weight tile are
    # then found in L2 by the programs that run at the same time.
    program = tl.program_id(0)
    row_tiles = tl.cdiv(width, ROWS)
    group = program // (GROUP * row_tiles)
    group_size = tl.minimum(tl.cdiv(tokens, TOKENS) - group * GROUP, GROUP)
    within = program - group * GROUP * row_tiles
    token = (group * GROUP + within % group_size) * TOKENS + tl.arange(0, TOKENS)
    first_row = (within // group_size) * ROWS
    split = tl.program_id(1)

    span: tl.constexpr = (inner + SPLITS * DEPTH - 1) // (SPLITS * DEPTH) * DEPTH
    even: tl.constexpr = span * SPLITS == inner  # no part of a tile lies past the inner dimension
    wide: tl.constexpr = ROWS * 2 if gated else ROWS
    lane = tl.arange(0, wide)
    # Rows past the end read the last row instead of a mask: their products are not stored.
    if gated:  # gate and up rows in turn, so that a thread holds both products of an output
        w_row = tl.minimum(first_row + lane // 2, width - 1) + lane % 2 * width
    else:
        w_row = tl.minimum(first_row + lane, width - 1)
    col = split * span + tl.arange(0, DEPTH)
    x_row = tl.minimum(token, tokens - 1)
    x_tile = x_ptr + x_row[:, None].to(tl.int64) * x_stride + col[None, :]
    w_tile = weight_ptr + w_row[:, None].to(tl.int64) * inner + col[None, :]

    acc = tl.zeros((wide, TOKENS) if SWAP else (TOKENS, wide), tl.float32)
    if dependent:
        tl.extra.cuda.gdc_wait()
    for k in range(0, span, DEPTH):
        if even:
            x = tl.load(x_tile + k)
            w = tl.load(w_tile + k)
        else:
            inside = (col + k < inner)[None, :]
            x = tl.load(x_tile + k, mask=inside, other=0.0)
            w = tl.load(w_tile + k, mask=inside, other=0.0)
        if SWAP:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if SWAP:
        acc = tl.trans(acc)

    token_live = token[:, None] < tokens
    if SPLITS == 1:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        if gated:
            gate, up = tl.split(tl.reshape(acc, (TOKENS, ROWS, 2)))
            acc = silu_times(gate, up, dtype)
        row = first_row + tl.arange(0, ROWS)
        out = out_ptr + token[:, None].to(tl.int64) * width + row[None, :]
        tl.store(out, acc.to(dtype), mask=token_live & (row[None, :] < width))
    else:
        columns: tl.constexpr = width * 2 if gated else width
        column = wide // ROWS * first_row + lane
        out = (split * tokens + token[:, None]).to(tl.int64) * columns + column[None, :]
        tl.store(out_ptr + out, acc, mask=token_live & (column[None, :] < columns))


@triton.jit(do_not_specialize=["tokens"])
def _add_splits_kernel(
    parts_ptr,  # float32 [splits, N, (2) width], gate and up in turn
    out_ptr,  # [N, width]
    tokens,
    width: tl.constexpr,
    gated: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """Adds a token's splits in their order and rounds once (gated: SwiGLU of the rounded sums)."""
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    wide: tl.constexpr = COLUMNS * 2 if gated else COLUMNS
    columns: tl.constexpr = width * 2 if gated else width
    part_col = tl.program_id(0) * wide + tl.arange(0, wide)
    token = tl.program_id(1).to(tl.int64)
    if dependent:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((wide,), tl.float32)
    for split in tl.static_range(SPLITS):
        part = parts_ptr + (split * tokens + token) * columns + part_col
        total += tl.load(part, mask=part_col < columns, other=0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if gated:
        gate, up = tl.split(tl.reshape(total, (COLUMNS, 2)))
        total = silu_times(gate, up, dtype)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out_ptr + token * width + col, total.to(dtype), mask=col < width)


def project(
    x: Tensor,
    weight: Tensor,
    *,
    gated: bool = False,
    config: RowConfig | TileConfig | None = None,
    follows: bool = False,
    followed: bool = False,
) -> Tensor:
    """``x [N, in] @ weight [out, in].T``, rounded; gated: its SwiGLU ``[N, out / 2]``.

    Args:
        follows: ``x`` comes from a launch of this module made with ``followed`` just before on the
            same stream, so the launch may overlap its end.
        followed: the next launch on the stream will be one with ``follows``.
    """
    tokens, inner = x.shape
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    if config is None:
        config = _choose(x, width, gated)
    early = dependent_launch(x)
    follows, followed = follows and early, followed and early
    if isinstance(config, RowConfig):
        _one_token_kernel[(triton.cdiv(width, config.rows), tokens)](
            x, weight, out, x.stride(0), width, inner, gated,
            config.rows, config.depth, follows, followed,
            num_warps=config.warps, **_launch(follows),
        )  # fmt: skip
        return out
    split = config.splits > 1
    columns = 2 * width if gated else width
    target = out
    if split:
        target = torch.empty(config.splits, tokens, columns, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(tokens, config.tokens) * triton.cdiv(width, config.rows), config.splits)
    _tile_kernel[grid](
        x, weight, target, tokens, x.stride(0), width, inner, gated,
        config.tokens, config.rows, config.depth, config.splits, 8, config.swap,
        follows, early if split else followed,
        num_warps=config.warps, num_stages=config.stages, **_launch(follows),
    )  # fmt: skip
    if split:
        block = 1024 if INTERPRETED else 256
        _add_splits_kernel[(triton.cdiv(width, block), tokens)](
            target, out, tokens, width, gated, config.splits, block, early, followed,
            num_warps=2, **_launch(early),
        )  # fmt: skip
    return out


def _launch(dependent: bool) -> dict[str, bool]:
    # The interpreter knows no launch options.
    return {"launch_pdl": True} if dependent else {}


def _choose(x: Tensor, width: int, gated: bool) -> RowConfig | TileConfig:
    tokens, inner = x.shape
    if INTERPRETED:  # milliseconds a program: as few as possible
        depth = min(triton.next_power_of_2(inner), 512)
        if tokens == 1:
            return RowConfig(rows=min(triton.next_power_of_2(width), 256), depth=depth, warps=4)
        rows = max(16, min(triton.next_power_of_2(width), 512))
        return TileConfig(tokens=max(16, min(triton.next_power_of_2(tokens), 128)), rows=rows,
                          depth=max(16, depth))  # fmt: skip
    # Below: fastest of those measured on one H200 (BF16, shapes of a TP8 rank, weights from HBM;
    # torch 2.11, Triton 3.6); in brackets cuBLAS in the same run, never with the SwiGLU.
    if tokens == 1:
        if inner < 2048:  # down 5.6 us (7.0)
            return RowConfig(rows=4, depth=512, warps=4)
        if gated:  # gate and up 9.8 us (13.3)
            return RowConfig(rows=4, depth=1024, warps=4)
        return RowConfig(rows=2, depth=1024, warps=2)  # qkvg 6.4 us (9.8)
    if x.dtype == torch.float32:  # not tuned; half as much fits into shared memory
        return TileConfig(tokens=16, rows=32, depth=32, warps=4, stages=2)
    wide = 2 if gated else 1  # matrix rows of an output
    if tokens <= 64:
        # 8 tokens: qkvg 8.3 us (9.8), gate and up 11.5 (13.3), down 6.8 (7.0);
        # 64 tokens: qkvg 9.4 us (10.4), gate and up 13.3 (14.4), down 7.7 (7.0).
        tile = max(8, triton.next_power_of_2(tokens))
        splits = _splits(x, tile, width * wide, 64, 0.6)
        return TileConfig(tokens=tile, rows=64 // wide, depth=128, splits=splits, swap=True,
                          warps=4, stages=4)  # fmt: skip
    if tokens <= 128:  # qkvg 11.9 us (11.3), gate and up 15.7 (12.8), down 9.3 (7.2)
        splits = _splits(x, 64, width * wide, 128, 0.75)
        return TileConfig(tokens=64, rows=128 // wide, depth=64, splits=splits, warps=4, stages=5)
    # 256 rows where they need no more waves: gate and up of 1024 tokens 62 us (43; 128 rows 69),
    # qkvg of 16384 525 us (414; 128 rows 558); but down of 1024 tokens 42 us (24; 128 rows 32).
    processors = multiprocessors(x.device)
    tiles = triton.cdiv(tokens, 128) * triton.cdiv(width * wide, 256)
    waves = triton.cdiv(2 * tiles, processors)
    if 2 * triton.cdiv(tiles, processors) <= 1.05 * waves:
        return TileConfig(tokens=128, rows=256 // wide, depth=64, warps=8, stages=4)
    # 256 tokens: qkvg 14.3 us (11.7), gate and up 23.2 (16.3), down 11.7 (9.4)
    splits = _splits(x, 128, width * wide, 128, 0.6)
    return TileConfig(tokens=128, rows=128 // wide, depth=64, splits=splits, warps=8, stages=4)


def _splits(x: Tensor, token_tile: int, rows: int, row_tile: int, fill: float) -> int:
    """Splits of the inner dimension that give ``fill`` of the processors a program each, but none
    shorter than 1024 elements: adding them up would cost more than the idle processors."""
    programs = triton.cdiv(x.shape[0], token_tile) * triton.cdiv(rows, row_tile)
    splits = 1
    while programs * splits < fill * multiprocessors(x.device) and x.shape[1] >= 2048 * splits:
        splits *= 2
    return splits


@register("qkvg", "triton", requires=(triton_runs,))
@strided("x")
def qkvg(x: Tensor, weight: Tensor) -> Tensor:
    """Packed q, k, v and gate projection: ``x [N, H] @ weight [W, H].T`` -> ``[N, W]``, rounded."""
    return project(x, weight)


@register("dense_mlp", "triton", requires=(triton_runs,))
@strided("x")
def dense_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU MLP: ``x [N, H]``, ``gate_up [2 I, H]`` (gate first), ``down [H, I]`` -> ``[N, H]``.

    Gate and up products and the activation are rounded to x's dtype, as is the result. The
    activation ``[N, I]`` is all that passes through memory between the two products.
    """
    act = project(x, gate_up, gated=True, followed=True)
    return project(act, down, follows=True)
