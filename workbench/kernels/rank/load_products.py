"""Triton kernels of a step of many rows: products, the router, boundaries, the head.

Products have the weight rows as the tall side of the matrix instruction and the step's rows as its
narrow one: the weights are what is read, and every program streams its own once. Where few
programs would share a product, the inner dimension is split, and whoever reads the result adds the
float32 parts in their order, so that no launch is spent on it.

Dependent launches follow the rules of ``triton_vectors.py``: weights need no kernel, so a program
may ask for its first ones before it waits, by prefetches into the L2 that take no registers; every
kernel waits before it writes, so buffers may be used again by the next layer.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# Kernels have no annotations but constexpr: Triton types them at each launch.
from __future__ import annotations

from workbench.kernels.rank.triton_vectors import release, vector, wait
from workbench.kernels.triton_linear import silu_times
from workbench.kernels.triton_norms import _scaled_add
from workbench.kernels.triton_router import _top_k_kernel as top_k
from workbench.kernels.triton_runtime import tl, triton


@triton.jit
def ask_rows(w_ptr, row, last, stride, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask for COLUMNS values of ROWS rows from ``row``, ``column`` on, into the L2; no waiting.

    A line of 128 bytes a thread: bulk prefetches of whole rows cost more than they saved.
    """
    LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = COLUMNS // LINE
    EACH: tl.constexpr = LINES & -LINES  # lines of a row at a time: a tensor has a power of two
    lane = tl.arange(0, ROWS * EACH)
    at = w_ptr + tl.minimum(row + lane // EACH, last).to(tl.int64) * stride
    at += column + lane % EACH * LINE
    for part in tl.static_range(LINES // EACH):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(at + part * (EACH * LINE)).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def embed_norm_rows(
    token_ptr,  # int64 [N]
    table_ptr,  # [V, K]
    weight_ptr,  # [K]
    h_ptr,  # [N, K]
    x_ptr,  # [N, K]
    eps,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
):
    """The rows' embeddings and their norms. Grid: (N,). Not a dependent of anything."""
    n = tl.program_id(0).to(tl.int64)
    dtype = h_ptr.dtype.element_ty
    a = tl.arange(0, K0)
    row = table_ptr + tl.load(token_ptr + n) * K
    h_ptr += n * K
    x_ptr += n * K
    x_a = vector(row, a, K, K0)
    total = tl.sum(x_a * x_a, 0)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        x_b = vector(row, b, K, K0 + K1)
        total += tl.sum(x_b * x_b, 0)
    scale = tl.rsqrt(total / K + eps)
    tl.store(h_ptr + a, x_a.to(dtype))
    tl.store(x_ptr + a, (x_a * scale * vector(weight_ptr, a, K, K0)).to(dtype))
    if K1 > 0:
        tl.store(h_ptr + b, x_b.to(dtype), mask=b < K)
        weight = vector(weight_ptr, b, K, K0 + K1)
        tl.store(x_ptr + b, (x_b * scale * weight).to(dtype), mask=b < K)


# ------------------------------------------------------------------ products


@triton.jit
def _dot_rows(
    x_ptr, w_ptr, token, row, column, end, n, WIDTH: tl.constexpr, K: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """float32 ``[ROWS, TOKENS]``: weight rows times the step's rows, columns from column to end."""
    k = tl.arange(0, DEPTH)
    # Rows past the end read the last one instead: what comes of it is not stored.
    w_tile = w_ptr + tl.minimum(row, WIDTH - 1)[:, None].to(tl.int64) * K + k[None, :]
    x_tile = x_ptr + tl.minimum(token, n - 1)[:, None].to(tl.int64) * K + k[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(column, end, DEPTH):
        if EVEN:
            w = tl.load(w_tile + start, eviction_policy="evict_first")
            x = tl.load(x_tile + start)
        else:
            inside = (start + k < end)[None, :]
            w = tl.load(w_tile + start, mask=inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_tile + start, mask=inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["n"])
def product_rows(
    x_ptr,  # [N, K]
    w_ptr,  # [WIDTH, K]
    out_ptr,  # float32 [SPLITS, N, WIDTH]
    n,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,  # columns of a split, a multiple of DEPTH
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,  # columns of its rows that a program asks for before it waits
    PDL: tl.constexpr,
):
    """Parts of x @ w.T. Grid: (row tiles, splits, token tiles)."""
    release(PDL)
    first = tl.program_id(0) * ROWS
    column = tl.program_id(1) * SPAN
    if PDL and AHEAD > 0:
        ask_rows(w_ptr, first, WIDTH - 1, K, column, ROWS, AHEAD)
    wait(PDL)
    row = first + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    end = tl.minimum(column + SPAN, K)
    acc = _dot_rows(
        x_ptr, w_ptr, token, row, column, end, n, WIDTH, K, TOKENS, ROWS, DEPTH, K % DEPTH == 0
    )
    out = out_ptr + tl.program_id(1).to(tl.int64) * n * WIDTH
    out += token[None, :].to(tl.int64) * WIDTH + row[:, None]
    tl.store(out, acc, mask=(token < n)[None, :] & (row < WIDTH)[:, None])


@triton.jit(do_not_specialize=["n"])
def gated_rows(
    x_ptr,  # [N, K]
    w_ptr,  # [2 WIDTH, K], gate rows first
    out_ptr,  # [N, WIDTH]
    n,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """SwiGLU of the dense MLP's gate and up products. Grid: (row tiles, token tiles)."""
    release(PDL)
    first = tl.program_id(0) * ROWS
    if PDL and AHEAD > 0:
        ask_rows(w_ptr, first, WIDTH - 1, K, 0, ROWS, AHEAD)
        ask_rows(w_ptr + WIDTH * K, first, WIDTH - 1, K, 0, ROWS, AHEAD)
    wait(PDL)
    row = first + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    even: tl.constexpr = K % DEPTH == 0
    k = tl.arange(0, DEPTH)
    g_tile = w_ptr + tl.minimum(row, WIDTH - 1)[:, None].to(tl.int64) * K + k[None, :]
    u_tile = g_tile + WIDTH * K
    x_tile = x_ptr + tl.minimum(token, n - 1)[:, None].to(tl.int64) * K + k[None, :]
    gate = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, K, DEPTH):
        if even:
            x = tl.load(x_tile + start)
            g = tl.load(g_tile + start, eviction_policy="evict_first")
            u = tl.load(u_tile + start, eviction_policy="evict_first")
        else:
            inside = (start + k < K)[None, :]
            x = tl.load(x_tile + start, mask=inside, other=0.0)
            g = tl.load(g_tile + start, mask=inside, other=0.0, eviction_policy="evict_first")
            u = tl.load(u_tile + start, mask=inside, other=0.0, eviction_policy="evict_first")
        x = tl.trans(x)
        gate = tl.dot(g, x, gate, input_precision="ieee")
        up = tl.dot(u, x, up, input_precision="ieee")
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    act = silu_times(gate, up, dtype).to(dtype)
    out = out_ptr + token[None, :].to(tl.int64) * WIDTH + row[:, None]
    tl.store(out, act, mask=(token < n)[None, :] & (row < WIDTH)[:, None])


@triton.jit(do_not_specialize=["n"])
def head_rows(
    x_ptr,  # [N, K]
    w_ptr,  # [WIDTH, K]
    logits_ptr,  # float32 [N, WIDTH]
    best_ptr,  # float32 [N, row tiles]
    where_ptr,  # int32 [N, row tiles]
    inverse,
    cap,
    n,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    CAPPED: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rounded logits, softcapped in float32, and each row's largest of the tile with its place."""
    release(PDL)
    first = tl.program_id(0) * ROWS
    if PDL and AHEAD > 0:
        ask_rows(w_ptr, first, WIDTH - 1, K, 0, ROWS, AHEAD)
    wait(PDL)
    row = first + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    value = _dot_rows(
        x_ptr, w_ptr, token, row, 0, K, n, WIDTH, K, TOKENS, ROWS, DEPTH, K % DEPTH == 0
    )
    value = value.to(x_ptr.dtype.element_ty).to(tl.float32)
    if CAPPED:
        y = value * inverse
        # tanh, by its series where 1 - 2 / (e^2y + 1) would cancel.
        s = y * y
        tail = 0.13333333 + s * (-0.053968254 + s * 0.021869488)
        small = y + y * s * (-0.33333333 + s * tail)
        value = tl.where(s < 0.0625, small, 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0)) * cap
    live = (token < n)[None, :] & (row < WIDTH)[:, None]
    tl.store(logits_ptr + token[None, :].to(tl.int64) * WIDTH + row[:, None], value, mask=live)
    value = tl.where(live, value, float("-inf"))
    best = tl.max(value, 0)
    where = tl.min(tl.where(value == best[None, :], row[:, None], WIDTH), 0)
    at = token.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + at, best, mask=token < n)
    tl.store(where_ptr + at, where, mask=token < n)


@triton.jit
def pick_rows(
    best_ptr,  # float32 [N, COUNT]
    where_ptr,  # int32 [N, COUNT]
    token_ptr,
    next_ptr,
    position_ptr,
    last_ptr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ADVANCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first of a row's largest logits; ADVANCE: it is the next token, one position further."""
    i = tl.arange(0, BLOCK)
    n = tl.program_id(0)
    wait(PDL)
    at = n.to(tl.int64) * COUNT + i
    best = tl.load(best_ptr + at, mask=i < COUNT, other=float("-inf"))
    where = tl.load(where_ptr + at, mask=i < COUNT, other=WIDTH)
    chosen = tl.min(tl.where(best == tl.max(best, 0), where, WIDTH), 0).to(tl.int64)
    tl.store(next_ptr + n, chosen)
    if ADVANCE:
        tl.store(token_ptr + n, chosen)
        further = tl.load(position_ptr + n) + 1
        tl.store(position_ptr + n, tl.minimum(further, tl.load(last_ptr + n)))


# ------------------------------------------------------------------ router


@triton.jit(do_not_specialize=["n"])
def router_rows(
    x_ptr,  # [N, K]
    w_ptr,  # float32 [E, K]
    out_ptr,  # float32 [SPLITS, N, E]
    n,
    E: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Parts of the router's logits as good as float32 products. Grid: (tiles, splits, tokens).

    A BF16 row goes through the tensor cores against the weight as three BF16 numbers, whose sum it
    is exactly; the cores' accumulator cuts bits off, so every step's begins at zero, with the small
    parts, and is added in float32 outside (see ``triton_router.py``).
    """
    release(PDL)
    first = tl.program_id(0) * EXPERTS
    begin = tl.program_id(1) * SPAN
    if PDL and AHEAD > 0:
        ask_rows(w_ptr, first, E - 1, K, begin, EXPERTS, AHEAD)
    wait(PDL)
    expert = first + tl.arange(0, EXPERTS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, DEPTH)
    w_tile = w_ptr + tl.minimum(expert, E - 1)[:, None] * K + k[None, :]
    x_tile = x_ptr + tl.minimum(token, n - 1)[:, None].to(tl.int64) * K + k[None, :]
    acc = tl.zeros((EXPERTS, TOKENS), tl.float32)
    for start in range(begin, tl.minimum(begin + SPAN, K), DEPTH):
        inside = (start + k < K)[None, :]
        w = tl.load(w_tile + start, mask=inside, other=0.0)
        x = tl.trans(tl.load(x_tile + start, mask=inside, other=0.0))
        if x_ptr.dtype.element_ty == tl.bfloat16:
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            part = tl.dot(low, x)
            part = tl.dot(middle, x, part)
            acc += tl.dot(high, x, part)
        else:
            acc = tl.dot(w, x.to(tl.float32), acc, input_precision="ieee")
    out = out_ptr + tl.program_id(1).to(tl.int64) * n * E
    out += token[None, :].to(tl.int64) * E + expert[:, None]
    tl.store(out, acc, mask=(token < n)[None, :] & (expert < E)[:, None])


@triton.jit(do_not_specialize=["n"])
def choose_and_place(
    logits_ptr,  # float32 [SPLITS, N, E]
    bias_ptr,  # float32 [E]
    ids_ptr,  # int64 [N, K], the router's own choice
    shares_ptr,  # float32 [N, K], of what is used
    given_ids_ptr,  # int64 [N, K] where GIVEN
    given_shares_ptr,  # float32 [N, K] where GIVEN
    counts_ptr,  # int32 [E + 1], zero: pairs of each expert, and behind them how many have some
    active_ptr,  # int32 [E], which those are
    slots_ptr,  # int32 [E, N], their pairs
    n,
    E: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    EACH_BLOCK: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GIVEN: tl.constexpr,
    LANES: tl.constexpr,  # at least 32 and K: a lane a thread, so that no addition happens twice
    PDL: tl.constexpr,
):
    """Experts of one row, and its place among the pairs of each. Grid: (N,).

    Which of an expert's pairs is the first depends on who came first, and nothing else does: a
    pair's products are the same wherever it stands. So a count and a list take the place of a sort.
    GIVEN: the router chooses all the same, and what was recorded is done.
    """
    top_k(
        logits_ptr, bias_ptr, ids_ptr, shares_ptr, n, E, K, SPLITS, GROUPS, KEPT, GROUPS_BLOCK,
        EACH_BLOCK, RENORMALISE, PDL,
    )  # fmt: skip
    tl.debug_barrier()  # the choice was stored by other threads
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, LANES)
    live = k < K
    if GIVEN:
        expert = tl.load(given_ids_ptr + token * K + k, mask=live, other=0)
        share = tl.load(given_shares_ptr + token * K + k, mask=live, other=0.0)
        tl.store(shares_ptr + token * K + k, share, mask=live)
    else:
        expert = tl.load(ids_ptr + token * K + k, mask=live, other=0)
    _place(counts_ptr, active_ptr, slots_ptr, expert, token * K + k, live, n, E)


@triton.jit
def _place(counts_ptr, active_ptr, slots_ptr, expert, pair, live, n, E: tl.constexpr):
    slot = tl.atomic_add(counts_ptr + expert, 1, mask=live, sem="relaxed")
    tl.store(slots_ptr + expert * n + slot, pair.to(tl.int32), mask=live)
    opens = live & (slot == 0)
    item = tl.atomic_add(counts_ptr + E + expert * 0, 1, mask=opens, sem="relaxed")
    tl.store(active_ptr + item, expert.to(tl.int32), mask=opens)


@triton.jit(do_not_specialize=["n"])
def place_rows(
    used_ids_ptr,  # int64 [N, K], what is done
    used_shares_ptr,  # float32 [N, K]
    own_ids_ptr,  # int64 [N, K], what the router chose
    ids_ptr,  # int64 [N, K], where that is kept
    shares_ptr,  # float32 [N, K], where the shares used are kept
    counts_ptr,  # int32 [E + 1], zero
    active_ptr,  # int32 [E]
    slots_ptr,  # int32 [E, N]
    n,
    E: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,  # at least 32 and K
    PDL: tl.constexpr,
):
    """Places of one row's experts that another kernel has chosen (see above). Grid: (N,)."""
    wait(PDL)
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, LANES)
    live = k < K
    at = token * K + k
    expert = tl.load(used_ids_ptr + at, mask=live, other=0)
    tl.store(ids_ptr + at, tl.load(own_ids_ptr + at, mask=live, other=0), mask=live)
    tl.store(shares_ptr + at, tl.load(used_shares_ptr + at, mask=live, other=0.0), mask=live)
    _place(counts_ptr, active_ptr, slots_ptr, expert, at, live, n, E)


# ------------------------------------------------------------------ boundaries


@triton.jit
def _sublayer(
    part_ptr, share_ptr, token, n, column, K: tl.constexpr, PARTS: tl.constexpr,
    OF_EXPERTS: tl.constexpr, routed_scale, dtype: tl.constexpr,
):  # fmt: skip
    """A row of a sublayer's output as float32 that ``dtype`` holds: parts added, or experts."""
    inside = column < K
    if OF_EXPERTS:
        total = tl.zeros(column.shape, tl.float32)
        for j in tl.static_range(PARTS):
            pair = token * PARTS + j
            value = tl.load(part_ptr + pair * K + column, mask=inside, other=0.0).to(tl.float32)
            total += value * tl.load(share_ptr + pair)
        return (total.to(dtype).to(tl.float32) * routed_scale).to(dtype).to(tl.float32)
    at = part_ptr + token * K + column
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        at += n.to(tl.int64) * K
        total += tl.load(at, mask=inside, other=0.0)
    return total.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["n"])
def boundary_rows(
    h_ptr,  # [N, K]
    part_ptr,  # [PARTS, N, K], or products of the experts [N, PARTS, K]
    share_ptr,  # float32 [N, PARTS] where OF_EXPERTS
    post_ptr,  # [K]
    next_ptr,  # [K]
    stream_ptr,  # [N, K]
    out_ptr,  # [N, K]
    counts_ptr,  # int32 [COUNTS], made zero for the router behind
    scale_new,
    scale_old,
    routed_scale,
    eps,
    n,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    PARTS: tl.constexpr,
    OF_EXPERTS: tl.constexpr,
    COUNTS: tl.constexpr,
    COUNTS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum of parts or experts, post-norm, depth-scaled add, next norm of one row. Grid: (N,)."""
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    a = tl.arange(0, K0)
    post_a = vector(post_ptr, a, K, K0)
    next_a = vector(next_ptr, a, K, K0)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        post_b = vector(post_ptr, b, K, K0 + K1)
        next_b = vector(next_ptr, b, K, K0 + K1)
    wait(PDL)
    if COUNTS > 0:  # noqa: SIM102 - one condition is the compiler's, the other the program's
        if tl.program_id(0) == 0:
            i = tl.arange(0, COUNTS_BLOCK)
            tl.store(counts_ptr + i, i * 0, mask=i < COUNTS)
    h_ptr += token * K
    p_a = _sublayer(part_ptr, share_ptr, token, n, a, K, PARTS, OF_EXPERTS, routed_scale, dtype)
    h_a = vector(h_ptr, a, K, K0)
    total = tl.sum(p_a * p_a, 0)
    if K1 > 0:
        p_b = _sublayer(part_ptr, share_ptr, token, n, b, K, PARTS, OF_EXPERTS, routed_scale, dtype)
        h_b = vector(h_ptr, b, K, K0 + K1)
        total += tl.sum(p_b * p_b, 0)
    scale = tl.rsqrt(total / K + eps)
    p_a = (p_a * scale * post_a).to(dtype).to(tl.float32)
    s_a = _scaled_add(p_a, h_a, scale_new, scale_old, dtype)
    f_a = s_a.to(tl.float32)
    total = tl.sum(f_a * f_a, 0)
    if K1 > 0:
        p_b = (p_b * scale * post_b).to(dtype).to(tl.float32)
        s_b = _scaled_add(p_b, h_b, scale_new, scale_old, dtype)
        f_b = s_b.to(tl.float32)
        total += tl.sum(f_b * f_b, 0)
    scale = tl.rsqrt(total / K + eps)
    out_ptr += token * K
    stream_ptr += token * K
    tl.store(out_ptr + a, (f_a * scale * next_a).to(dtype))
    tl.store(stream_ptr + a, s_a)
    if K1 > 0:
        tl.store(out_ptr + b, (f_b * scale * next_b).to(dtype), mask=b < K)
        tl.store(stream_ptr + b, s_b, mask=b < K)
