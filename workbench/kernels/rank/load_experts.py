"""Triton kernels of the experts of many rows: each touched expert's weights are read once.

The work is cut into tiles, ROWS rows of one of the experts that were chosen at all. Programs go
through the tiles in turn, each with all of the expert's pairs, TOKENS at a time: up to that many
the weights go through once. A program a tile lets the GPU balance them, and costs one for every
expert that might have been chosen; a few a multiprocessor know their next tile and ask for it. The
weight rows are the tall side of the matrix instruction (SWAP), or its narrow one. Down projections
lie by output rows, ``[E, H, I]``.

With TMA the weights come by tensor descriptors: one thread asks for a whole tile.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# Kernels have no annotations but constexpr: Triton types them at each launch.
from __future__ import annotations

from workbench.kernels.rank.load_products import ask_rows
from workbench.kernels.rank.triton_vectors import release, wait
from workbench.kernels.triton_linear import silu_times
from workbench.kernels.triton_runtime import tl, triton


@triton.jit(do_not_specialize=["n"])
def up_rows(
    x_ptr,  # [N, K]
    w_ptr,  # [E, 2 WIDTH, K], gate rows first; TMA: a descriptor of [2 E WIDTH, K]
    counts_ptr,  # int32 [E + 1]
    active_ptr,  # int32 [E]
    slots_ptr,  # int32 [E, N]
    act_ptr,  # [N TOP_K, WIDTH], by pair
    n,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    FIRST: tl.constexpr,  # whether weights leave the L2 first
    AHEAD: tl.constexpr,  # columns of its next tile that a program asks for before each
    PDL: tl.constexpr,
):
    """act[pair] = SwiGLU of its expert's gate and up products. Grid: as many as share the tiles."""
    wait(PDL)
    release(PDL)
    tiles: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    units = tl.load(counts_ptr + E) * tiles
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        if PDL and AHEAD > 0:
            later = unit + tl.num_programs(0)
            if later < units:
                at = tl.load(active_ptr + later // tiles).to(tl.int64) * (2 * WIDTH * K)
                ask_rows(w_ptr + at, later % tiles * ROWS, WIDTH - 1, K, 0, ROWS, AHEAD)
                at += WIDTH * K
                ask_rows(w_ptr + at, later % tiles * ROWS, WIDTH - 1, K, 0, ROWS, AHEAD)
        _up_tile(
            x_ptr, w_ptr, counts_ptr, slots_ptr, act_ptr, n, tl.load(active_ptr + unit // tiles),
            unit % tiles * ROWS, TOP_K, K, WIDTH, TOKENS, ROWS, DEPTH, SWAP, TMA, FIRST,
        )  # fmt: skip


@triton.jit
def _up_tile(
    x_ptr, w_ptr, counts_ptr, slots_ptr, act_ptr, n, expert, first, TOP_K: tl.constexpr,
    K: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """All pairs of one expert through ROWS of its gate and up rows, from ``first`` on."""
    count = tl.load(counts_ptr + expert)
    policy: tl.constexpr = "evict_first" if FIRST else ""
    even: tl.constexpr = K % DEPTH == 0
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    k = tl.arange(0, DEPTH)
    row = first + tl.arange(0, ROWS)
    if not TMA:
        w_expert = w_ptr + expert.to(tl.int64) * (2 * WIDTH * K) + k[None, :]
        if SWAP:
            g_tile = w_expert + tl.minimum(row, WIDTH - 1)[:, None] * K
            u_tile = g_tile + WIDTH * K
        else:
            # Gate and up rows in turn, so that a thread holds both products of an output.
            lane = tl.arange(0, 2 * ROWS)
            both = tl.minimum(first + lane // 2, WIDTH - 1) + lane % 2 * WIDTH
            g_tile = w_expert + both[:, None] * K
    for begin in range(0, count, TOKENS):
        slot = begin + tl.arange(0, TOKENS)
        held = tl.minimum(slot, count - 1)
        pair = tl.load(slots_ptr + expert.to(tl.int64) * n + held)
        x_tile = x_ptr + (pair // TOP_K)[:, None].to(tl.int64) * K + k[None, :]
        if SWAP:
            gate = tl.zeros((ROWS, TOKENS), tl.float32)
            up = tl.zeros((ROWS, TOKENS), tl.float32)
        else:
            acc = tl.zeros((TOKENS, 2 * ROWS), tl.float32)
        for start in range(0, K, DEPTH):
            inside = (start + k < K)[None, :]
            if even:  # noqa: SIM108 - the compiler takes one of the two
                x = tl.load(x_tile + start)
            else:
                x = tl.load(x_tile + start, mask=inside, other=0.0)
            if TMA:
                g = w_ptr.load([expert * (2 * WIDTH) + first, start])
                u = w_ptr.load([expert * (2 * WIDTH) + WIDTH + first, start])
                x = tl.trans(x)
                gate = tl.dot(g, x, gate, input_precision="ieee")
                up = tl.dot(u, x, up, input_precision="ieee")
            elif SWAP:
                if even:
                    g = tl.load(g_tile + start, eviction_policy=policy)
                    u = tl.load(u_tile + start, eviction_policy=policy)
                else:
                    g = tl.load(g_tile + start, mask=inside, other=0.0, eviction_policy=policy)
                    u = tl.load(u_tile + start, mask=inside, other=0.0, eviction_policy=policy)
                x = tl.trans(x)
                gate = tl.dot(g, x, gate, input_precision="ieee")
                up = tl.dot(u, x, up, input_precision="ieee")
            else:
                if even:
                    g = tl.load(g_tile + start, eviction_policy=policy)
                else:
                    g = tl.load(g_tile + start, mask=inside, other=0.0, eviction_policy=policy)
                acc = tl.dot(x, tl.trans(g), acc, input_precision="ieee")
        if SWAP:
            act = tl.trans(silu_times(gate, up, dtype).to(dtype))
        else:
            gate, up = tl.split(tl.reshape(acc, (TOKENS, ROWS, 2)))
            act = silu_times(gate, up, dtype).to(dtype)
        out = act_ptr + pair[:, None].to(tl.int64) * WIDTH + row[None, :]
        tl.store(out, act, mask=(slot < count)[:, None] & (row < WIDTH)[None, :])


@triton.jit(do_not_specialize=["n"])
def down_rows(
    act_ptr,  # [N TOP_K, WIDTH]
    w_ptr,  # [E, K, WIDTH]; TMA: a descriptor of [E K, WIDTH]
    counts_ptr,  # int32 [E + 1]
    active_ptr,  # int32 [E]
    slots_ptr,  # int32 [E, N]
    out_ptr,  # [N TOP_K, K], by pair
    n,
    E: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    FIRST: tl.constexpr,
    AHEAD: tl.constexpr,  # columns that a program asks for before it waits, and of its next tile
    PDL: tl.constexpr,
):
    """out[pair] = its expert's down product. Grid: as many as share the tiles.

    The lists were there before the kernel in front of this one let it start, so the weights are
    known before the wait.
    """
    release(PDL)
    tiles: tl.constexpr = (K + ROWS - 1) // ROWS
    units = tl.load(counts_ptr + E) * tiles
    if PDL and AHEAD > 0:
        unit = tl.program_id(0)
        if unit < units:
            at = tl.load(active_ptr + unit // tiles).to(tl.int64) * (K * WIDTH)
            ask_rows(w_ptr + at, unit % tiles * ROWS, K - 1, WIDTH, 0, ROWS, AHEAD)
    wait(PDL)
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        if PDL and AHEAD > 0:
            later = unit + tl.num_programs(0)
            if later < units:
                at = tl.load(active_ptr + later // tiles).to(tl.int64) * (K * WIDTH)
                ask_rows(w_ptr + at, later % tiles * ROWS, K - 1, WIDTH, 0, ROWS, AHEAD)
        _down_tile(
            act_ptr, w_ptr, counts_ptr, slots_ptr, out_ptr, n, tl.load(active_ptr + unit // tiles),
            unit % tiles * ROWS, K, WIDTH, TOKENS, ROWS, DEPTH, SWAP, TMA, FIRST,
        )  # fmt: skip


@triton.jit
def _down_tile(
    act_ptr, w_ptr, counts_ptr, slots_ptr, out_ptr, n, expert, first, K: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """All pairs of one expert through ROWS of its down rows, from ``first`` on."""
    count = tl.load(counts_ptr + expert)
    policy: tl.constexpr = "evict_first" if FIRST else ""
    even: tl.constexpr = WIDTH % DEPTH == 0
    k = tl.arange(0, DEPTH)
    row = first + tl.arange(0, ROWS)
    if not TMA:
        w_tile = w_ptr + expert.to(tl.int64) * (K * WIDTH)
        w_tile += tl.minimum(row, K - 1)[:, None] * WIDTH + k[None, :]
    for begin in range(0, count, TOKENS):
        slot = begin + tl.arange(0, TOKENS)
        held = tl.minimum(slot, count - 1)
        pair = tl.load(slots_ptr + expert.to(tl.int64) * n + held)
        a_tile = act_ptr + pair[:, None].to(tl.int64) * WIDTH + k[None, :]
        acc = tl.zeros((ROWS, TOKENS) if SWAP else (TOKENS, ROWS), tl.float32)
        for start in range(0, WIDTH, DEPTH):
            inside = (start + k < WIDTH)[None, :]
            if even:  # noqa: SIM108 - the compiler takes one of the two
                a = tl.load(a_tile + start)
            else:
                a = tl.load(a_tile + start, mask=inside, other=0.0)
            if TMA:
                w = w_ptr.load([expert * K + first, start])
            elif even:
                w = tl.load(w_tile + start, eviction_policy=policy)
            else:
                w = tl.load(w_tile + start, mask=inside, other=0.0, eviction_policy=policy)
            if SWAP:
                acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
            else:
                acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        value = acc.to(out_ptr.dtype.element_ty)
        if SWAP:
            value = tl.trans(value)
        out = out_ptr + pair[:, None].to(tl.int64) * K + row[None, :]
        tl.store(out, value, mask=(slot < count)[:, None] & (row < K)[None, :])
