"""Triton kernels that make partial sums whole and go on with the boundary, in one launch.

A program is a row of the step. It puts its rank's partial sum into the others' inboxes, waits until
theirs are in its own, adds them up (in one order on all ranks, so that they get the same bits),
and computes the boundary: post-norm, depth-scaled add, next norm. ``mailbox.py`` says how
values travel. Two ways:

* one shot: every rank sends its row to all and computes every row itself;
* ``TWO``: row n belongs to rank ``n % W``, which alone gets the parts, computes the boundary, keeps
  the stream and sends the finished norm to all. A second trip, but W times less to receive.

``PUSHED``: the kernel before has sent this rank's part itself, to all ranks (``triton_push.py``),
so this one only receives. It begins to look before it waits for that kernel, whose programs are all
on the GPU or through by then (a dependent launch begins no earlier), so it takes no room from them.
It waits behind that, before it reads the stream: its end still means the end of all before it.

All programs of a launch must be on the GPU together with those of the other ranks, or wait for one
that cannot start: rows are at most as many as multiprocessors (``mailbox.ROWS``).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# Kernels have no annotations but constexpr: Triton types them at each launch.
from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.parallel.mailbox import Mailbox
from workbench.kernels.rank.load_products import _sublayer
from workbench.kernels.rank.triton_vectors import options, parts, release, wait
from workbench.kernels.triton_norms import _scaled_add
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

# A row of the exchange as words [BLOCK], and as values [BLOCK, P]: P of them travel in a word.


@triton.jit
def _as_words(x, dtype: tl.constexpr, high, P: tl.constexpr):
    """Values ``[BLOCK, P]``, float32 that ``dtype`` holds -> words ``[BLOCK]`` with ``high``."""
    if P == 1:
        data = tl.sum(x, 1).to(tl.int32, bitcast=True).to(tl.int64)
    else:
        first, second = tl.split(x.to(dtype).to(tl.int16, bitcast=True).to(tl.int32))
        data = (first & 0xFFFF).to(tl.int64) | (second.to(tl.int64) << 16)
    return (data & 0xFFFFFFFF) | high


@triton.jit
def _as_values(word, P: tl.constexpr):
    """Words ``[…]`` -> float32 ``[…, P]``."""
    data = word.to(tl.int32)
    if P == 1:
        values = tl.expand_dims(data.to(tl.float32, bitcast=True), -1)
    else:
        first = (data << 16).to(tl.float32, bitcast=True)
        values = tl.join(first, (data & -65536).to(tl.float32, bitcast=True))
    return values


@triton.jit
def _come(word, there, number):
    """Whether every word that is asked for belongs to exchange ``number``."""
    right = ((word >> 32).to(tl.int32) == number) | (there == 0)
    return tl.min(right.to(tl.int32))


@triton.jit
def _poll(ptr, there, number, lost_ptr, patience):
    """Words at ``ptr`` once all of them are there; gives up after ``patience`` tries."""
    word = tl.load(ptr, mask=there, other=0, volatile=True)
    tries = tl.where(tl.load(lost_ptr) != 0, patience, 0)  # who gave up once waits no more
    come = _come(word, there, number)
    while (come == 0) & (tries < patience):
        word = tl.load(ptr, mask=there, other=0, volatile=True)
        come = _come(word, there, number)
        tries += 1
    if come == 0:
        tl.store(lost_ptr, 1)
    return word


@triton.jit
def _boxes(table_ptr, W: tl.constexpr, W2: tl.constexpr):
    """The inboxes' pointers ``[W2]``, and which of them there are."""
    r = tl.arange(0, W2)
    place = tl.load(table_ptr + r, mask=r < W, other=0)
    return place.to(tl.pointer_type(tl.int64)), r < W


@triton.jit
def _send(boxes, real, at, word, live):
    """Words ``[BLOCK]`` to place ``at [BLOCK]`` of all inboxes."""
    ptr = boxes[:, None] + at[None, :]
    tl.store(ptr, word[None, :], mask=real[:, None] & live[None, :])


@triton.jit
def _norms(
    p_a, h_a, post_a, next_a, scale_new, scale_old, eps, K: tl.constexpr, dtype: tl.constexpr
):
    """The boundary of a row in one tile: (stream, norm)."""
    total = tl.sum(tl.sum(p_a * p_a, 1), 0)
    p_a = (p_a * tl.rsqrt(total / K + eps) * post_a).to(dtype).to(tl.float32)
    s_a = _scaled_add(p_a, h_a, scale_new, scale_old, dtype)
    f_a = s_a.to(tl.float32)
    total = tl.sum(tl.sum(f_a * f_a, 1), 0)
    return s_a, (f_a * tl.rsqrt(total / K + eps) * next_a).to(dtype)


@triton.jit
def _norms_of_two(
    p_a, p_b, h_a, h_b, post_a, post_b, next_a, next_b, scale_new, scale_old, eps,
    K: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The boundary of a row in two tiles: (stream, norm) of each."""
    total = tl.sum(tl.sum(p_a * p_a, 1), 0) + tl.sum(tl.sum(p_b * p_b, 1), 0)
    scale = tl.rsqrt(total / K + eps)
    p_a = (p_a * scale * post_a).to(dtype).to(tl.float32)
    p_b = (p_b * scale * post_b).to(dtype).to(tl.float32)
    s_a = _scaled_add(p_a, h_a, scale_new, scale_old, dtype)
    s_b = _scaled_add(p_b, h_b, scale_new, scale_old, dtype)
    f_a, f_b = s_a.to(tl.float32), s_b.to(tl.float32)
    total = tl.sum(tl.sum(f_a * f_a, 1), 0) + tl.sum(tl.sum(f_b * f_b, 1), 0)
    scale = tl.rsqrt(total / K + eps)
    return s_a, s_b, (f_a * scale * next_a).to(dtype), (f_b * scale * next_b).to(dtype)


@triton.jit
def _values(ptr, column, live):
    return tl.load(ptr + column, mask=live[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n", "call", "patience"])
def exchange_rows(
    h_ptr,  # [N, K]
    part_ptr,  # [PARTS, N, K], or products of the experts [N, PARTS, K]
    share_ptr,  # float32 [N, PARTS] where OF_EXPERTS
    post_ptr,  # [K]
    next_ptr,  # [K]
    stream_ptr,  # [N, K]
    out_ptr,  # [N, K]
    counts_ptr,  # int32 [COUNTS], made zero for the router behind
    table_ptr,  # int64 [W]
    count_ptr,  # int32, exchanges before this step
    lost_ptr,
    call,  # which exchange of the step
    patience,
    scale_new,
    scale_old,
    routed_scale,
    eps,
    n,
    ROOM: tl.constexpr,  # rows that an inbox has room for
    K: tl.constexpr,
    P: tl.constexpr,  # values of a word
    K0: tl.constexpr,  # words of the first tile, and of the second
    K1: tl.constexpr,
    PARTS: tl.constexpr,
    OF_EXPERTS: tl.constexpr,
    COUNTS: tl.constexpr,
    COUNTS_BLOCK: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,  # power of two that holds W
    RANK: tl.constexpr,
    TWO: tl.constexpr,
    BOUNDARY: tl.constexpr,  # False: only the sum, into ``out``
    PUSHED: tl.constexpr,  # of one row, one shot, with its boundary: the parts are sent already
    PDL: tl.constexpr,
):
    """All-reduce of partial sums, post-norm, depth-scaled add, next norm. Grid: (N,)."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    WORDS: tl.constexpr = K // P
    p = tl.arange(0, P)[None, :]
    a = tl.arange(0, K0)
    live_a = a < WORDS
    column_a = a[:, None] * P + p
    boxes, real = _boxes(table_ptr, W, W2)
    own = tl.load(table_ptr + RANK).to(tl.pointer_type(tl.int64))
    if BOUNDARY:
        post_a = _values(post_ptr, column_a, live_a)
        next_a = _values(next_ptr, column_a, live_a)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        live_b = b < WORDS
        column_b = b[:, None] * P + p
        if BOUNDARY:
            post_b = _values(post_ptr, column_b, live_b)
            next_b = _values(next_ptr, column_b, live_b)
    if not PUSHED:
        wait(PDL)
    if COUNTS > 0:  # noqa: SIM102 - one condition is the compiler's, the other the program's
        if tl.program_id(0) == 0:
            i = tl.arange(0, COUNTS_BLOCK)
            tl.store(counts_ptr + i, i * 0, mask=i < COUNTS)
    number = tl.load(count_ptr, volatile=PUSHED) + call + 1
    high = number.to(tl.int64) << 32
    slot = (number & 1).to(tl.int64)
    h_ptr += row * K
    stream_ptr += row * K
    out_ptr += row * K
    if not PUSHED:
        # This rank's part goes to whoever adds up.
        sent = ((slot * W + RANK) * ROOM + row) * WORDS
        to = real
        if TWO:
            to = real & (tl.arange(0, W2) == row % W)
        x_a = _sublayer(
            part_ptr, share_ptr, row, n, column_a, K, PARTS, OF_EXPERTS, routed_scale, dtype
        )
        _send(boxes, to, sent + a, _as_words(x_a, dtype, high, P), live_a)
        if K1 > 0:
            x_b = _sublayer(
                part_ptr, share_ptr, row, n, column_b, K, PARTS, OF_EXPERTS, routed_scale, dtype
            )
            _send(boxes, to, sent + b, _as_words(x_b, dtype, high, P), live_b)
    # The finished rows lie behind both slots of parts.
    finished = 2 * W * ROOM * WORDS + (slot * ROOM + row) * WORDS
    mine = True
    if TWO:
        mine = row % W == RANK
    if mine:
        r = tl.arange(0, W2)[:, None]
        inbox = own + ((slot * W + r) * ROOM + row) * WORDS
        if BOUNDARY and not PUSHED:
            h_a = _values(h_ptr, column_a, live_a)
        v_a = _poll(inbox + a[None, :], (r < W) & live_a[None, :], number, lost_ptr, patience)
        p_a = tl.sum(_as_values(v_a, P), 0).to(dtype).to(tl.float32)
        if K1 > 0:
            if BOUNDARY and not PUSHED:
                h_b = _values(h_ptr, column_b, live_b)
            v_b = _poll(inbox + b[None, :], (r < W) & live_b[None, :], number, lost_ptr, patience)
            p_b = tl.sum(_as_values(v_b, P), 0).to(dtype).to(tl.float32)
        if PUSHED:
            wait(PDL)
            h_a = _values(h_ptr, column_a, live_a)
            if K1 > 0:
                h_b = _values(h_ptr, column_b, live_b)
        if K1 > 0:
            if BOUNDARY:
                s_a, s_b, y_a, y_b = _norms_of_two(
                    p_a, p_b, h_a, h_b, post_a, post_b, next_a, next_b, scale_new, scale_old, eps,
                    K, dtype,
                )  # fmt: skip
                tl.store(stream_ptr + column_a, s_a, mask=live_a[:, None])
                tl.store(stream_ptr + column_b, s_b, mask=live_b[:, None])
            else:
                y_a, y_b = p_a.to(dtype), p_b.to(dtype)
        else:
            if BOUNDARY:
                s_a, y_a = _norms(p_a, h_a, post_a, next_a, scale_new, scale_old, eps, K, dtype)
                tl.store(stream_ptr + column_a, s_a, mask=live_a[:, None])
            else:
                y_a = p_a.to(dtype)
        tl.store(out_ptr + column_a, y_a, mask=live_a[:, None])
        if K1 > 0:
            tl.store(out_ptr + column_b, y_b, mask=live_b[:, None])
        if TWO:
            _send(boxes, real, finished + a, _as_words(y_a.to(tl.float32), dtype, high, P), live_a)
            if K1 > 0:
                word = _as_words(y_b.to(tl.float32), dtype, high, P)
                _send(boxes, real, finished + b, word, live_b)
    else:
        w_a = _poll(own + finished + a, live_a, number, lost_ptr, patience)
        tl.store(out_ptr + column_a, _as_values(w_a, P).to(dtype), mask=live_a[:, None])
        if K1 > 0:
            w_b = _poll(own + finished + b, live_b, number, lost_ptr, patience)
            tl.store(out_ptr + column_b, _as_values(w_b, P).to(dtype), mask=live_b[:, None])


@triton.jit(do_not_specialize=["patience"])
def exchange_embedding(
    token_ptr,  # int64 [N], of all ranks' vocabulary
    embed_ptr,  # [VOCABULARY, K], this rank's rows
    next_ptr,  # [K]
    stream_ptr,  # [N, K]
    out_ptr,  # [N, K]
    table_ptr,
    count_ptr,
    lost_ptr,
    patience,
    eps,
    VOCABULARY: tl.constexpr,
    ROOM: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,
    RANK: tl.constexpr,
):
    """The first exchange of a step: a token's owner sends its row, all norm it. Grid: (N,)."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    WORDS: tl.constexpr = K // P
    p = tl.arange(0, P)[None, :]
    a = tl.arange(0, K0)
    live_a = a < WORDS
    column_a = a[:, None] * P + p
    boxes, real = _boxes(table_ptr, W, W2)
    own = tl.load(table_ptr + RANK).to(tl.pointer_type(tl.int64))
    next_a = _values(next_ptr, column_a, live_a)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        live_b = b < WORDS
        column_b = b[:, None] * P + p
        next_b = _values(next_ptr, column_b, live_b)
    token = tl.load(token_ptr + row)
    owner = token // VOCABULARY
    number = tl.load(count_ptr) + 1
    high = number.to(tl.int64) << 32
    slot = (number & 1).to(tl.int64)
    sent = ((slot * W + owner) * ROOM + row) * WORDS
    if owner == RANK:
        at = embed_ptr + (token - owner * VOCABULARY) * K
        _send(
            boxes, real, sent + a, _as_words(_values(at, column_a, live_a), dtype, high, P), live_a
        )
        if K1 > 0:
            word = _as_words(_values(at, column_b, live_b), dtype, high, P)
            _send(boxes, real, sent + b, word, live_b)
    v_a = _as_values(_poll(own + sent + a, live_a, number, lost_ptr, patience), P)
    v_a = tl.where(live_a[:, None], v_a, 0.0)
    total = tl.sum(tl.sum(v_a * v_a, 1), 0)
    if K1 > 0:
        v_b = _as_values(_poll(own + sent + b, live_b, number, lost_ptr, patience), P)
        v_b = tl.where(live_b[:, None], v_b, 0.0)
        total += tl.sum(tl.sum(v_b * v_b, 1), 0)
    scale = tl.rsqrt(total / K + eps)
    tl.store(stream_ptr + row * K + column_a, v_a.to(dtype), mask=live_a[:, None])
    tl.store(out_ptr + row * K + column_a, (v_a * scale * next_a).to(dtype), mask=live_a[:, None])
    if K1 > 0:
        tl.store(stream_ptr + row * K + column_b, v_b.to(dtype), mask=live_b[:, None])
        value = (v_b * scale * next_b).to(dtype)
        tl.store(out_ptr + row * K + column_b, value, mask=live_b[:, None])


@triton.jit(do_not_specialize=["n", "patience"])
def exchange_pick(
    best_ptr,  # float32 [N, COUNT]
    where_ptr,  # int32 [N, COUNT]
    token_ptr,
    next_ptr,
    position_ptr,
    last_ptr,  # int64 [N], the last position that a row may have
    table_ptr,
    count_ptr,
    arrivals_ptr,
    lost_ptr,
    patience,
    n,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    VOCABULARY: tl.constexpr,
    ROOM: tl.constexpr,
    WORDS: tl.constexpr,
    CALLS: tl.constexpr,  # exchanges of a step, this one the last
    W: tl.constexpr,
    W2: tl.constexpr,
    RANK: tl.constexpr,
    ADVANCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first of the largest logits of all ranks is a row's next token. Grid: (N,)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    boxes, real = _boxes(table_ptr, W, W2)
    own = tl.load(table_ptr + RANK).to(tl.pointer_type(tl.int64))
    wait(PDL)
    number = tl.load(count_ptr) + CALLS
    high = number.to(tl.int64) << 32
    slot = (number & 1).to(tl.int64)
    best = tl.load(best_ptr + row * COUNT + i, mask=i < COUNT, other=float("-inf"))
    where = tl.load(where_ptr + row * COUNT + i, mask=i < COUNT, other=VOCABULARY)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, where, VOCABULARY), 0) + RANK * VOCABULARY
    e = tl.arange(0, 2)
    data = tl.where(e == 0, top.to(tl.int32, bitcast=True), first)
    behind = 2 * (W + 1) * ROOM * WORDS  # both slots of parts and of finished rows
    sent = behind + ((slot * W + RANK) * ROOM + row) * 2
    _send(boxes, real, sent + e, (data.to(tl.int64) & 0xFFFFFFFF) | high, e < 2)
    r = tl.arange(0, W2)[:, None]
    inbox = own + behind + ((slot * W + r) * ROOM + row) * 2 + e[None, :]
    word = _poll(inbox, (r < W) & (e[None, :] < 2), number, lost_ptr, patience).to(tl.int32)
    value, index = tl.split(word)
    each = tl.where(real, value.to(tl.float32, bitcast=True), float("-inf"))
    most = W * VOCABULARY
    chosen = tl.min(tl.where(real & (each == tl.max(each, 0)), index, most), 0)
    chosen = tl.minimum(chosen, most - 1).to(tl.int64)  # logits that are no numbers choose nothing
    tl.store(next_ptr + row, chosen)
    if ADVANCE:
        tl.store(token_ptr + row, chosen)
        further = tl.load(position_ptr + row) + 1
        tl.store(position_ptr + row, tl.minimum(further, tl.load(last_ptr + row)))
    # Every program has read the count; the last one through moves it on.
    if tl.atomic_add(arrivals_ptr, 1) == n - 1:
        tl.store(arrivals_ptr, 0)
        tl.store(count_ptr, number)


@triton.jit(do_not_specialize=["n"])
def partial_rows(
    part_ptr,  # [PARTS, N, K], or products of the experts [N, PARTS, K]
    share_ptr,  # float32 [N, PARTS] where OF_EXPERTS
    out_ptr,  # [N, K]
    counts_ptr,  # int32 [COUNTS], made zero for the router behind
    routed_scale,
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
    """A rank's own part of a sublayer, rounded, for NCCL to add up. Grid: (N,)."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wait(PDL)
    if COUNTS > 0:  # noqa: SIM102 - one condition is the compiler's, the other the program's
        if tl.program_id(0) == 0:
            i = tl.arange(0, COUNTS_BLOCK)
            tl.store(counts_ptr + i, i * 0, mask=i < COUNTS)
    a = tl.arange(0, K0)
    x = _sublayer(part_ptr, share_ptr, row, n, a, K, PARTS, OF_EXPERTS, routed_scale, dtype)
    tl.store(out_ptr + row * K + a, x.to(dtype), mask=a < K)
    if K1 > 0:
        b = K0 + tl.arange(0, K1)
        x = _sublayer(part_ptr, share_ptr, row, n, b, K, PARTS, OF_EXPERTS, routed_scale, dtype)
        tl.store(out_ptr + row * K + b, x.to(dtype), mask=b < K)


@triton.jit
def turn(count_ptr, calls):
    """Move the count on by ``calls``, where no step's last exchange does."""
    tl.store(count_ptr, tl.load(count_ptr) + calls)


# ------------------------------------------------------------------ launches


def two_shots(rows: int, world: int) -> bool:
    """Whether owners of rows add up and pass on, instead of every rank for itself.

    One shot receives ``rows * (world - 1)`` rows, two ``2 * rows * (world - 1) / world`` and a
    second trip of about 2 microseconds, in which 40 rows of 20 KB arrive. (Modelled from the
    bandwidth measured between two GPUs, where one shot is always the better.)
    """
    spared = rows * (world - 1) * (1 - 2 / world)
    return spared > 40


def _tiles(mailbox: Mailbox, hidden: int) -> tuple[int, int, int, int]:
    """K, P, K0, K1 of the kernels."""
    return (hidden, values_a_word(mailbox, hidden), *parts(mailbox.words))


def values_a_word(mailbox: Mailbox, hidden: int) -> int:
    """1 of float32, 2 of BF16.

    Raises:
        KernelError: the mailbox is of rows of another width, beside which a kernel would write.
    """
    found, rest = divmod(hidden, mailbox.words)
    if rest or found not in (1, 2):
        raise KernelError(
            f"rows of {hidden} values do not fit a mailbox of {mailbox.words} words a row: open "
            "one with Mailbox.open(ranks, hidden, dtype) of these rows"
        )
    return found


def _others(mailbox: Mailbox) -> tuple[int, int, int]:
    """W, W2, RANK of the kernels."""
    return mailbox.world, triton.next_power_of_2(mailbox.world), mailbox.rank


def launch_exchange(
    mailbox: Mailbox, call: int, h: Tensor, source: Tensor, shares: Tensor | None, count: int,
    post: Tensor, following: Tensor, stream: Tensor, out: Tensor, scale: tuple[float, float],
    eps: float, *, routed_scale: float = 1.0, counts: Tensor | None = None,
    two: bool | None = None, boundary: bool = True, pushed: bool = False, dependent: bool = False,
    warps: int = 16,
) -> None:  # fmt: skip
    """Launch :func:`exchange_rows` for all rows of ``out [N, H]``; arguments as in its signature.

    ``two`` None: as :func:`two_shots` says. With ``boundary`` False ``out`` gets the sum alone.
    ``pushed``: ``source`` is not read, a kernel of ``triton_push.py`` has sent it; one row only.
    """
    n, hidden = out.shape
    mailbox.refuse_rows(n)
    if two is None:
        two = two_shots(n, mailbox.world)
    zeroed = 0 if counts is None else counts.numel()
    exchange_rows[(n,)](
        h, source, source if shares is None else shares, post, following, stream, out,
        mailbox.count if counts is None else counts, mailbox.table, mailbox.count, mailbox.lost,
        call, mailbox.patience, *scale, routed_scale, eps, n, mailbox.rows,
        *_tiles(mailbox, hidden), count, shares is not None, zeroed,
        triton.next_power_of_2(max(1, zeroed)), *_others(mailbox), two and mailbox.world > 1,
        boundary, pushed, dependent,
        num_warps=warps, enable_fp_fusion=False, **options(dependent),
    )  # fmt: skip


def launch_embedding(
    mailbox: Mailbox, token: Tensor, embed: Tensor, following: Tensor, stream: Tensor, out: Tensor,
    eps: float, warps: int = 16,
) -> None:  # fmt: skip
    """Launch :func:`exchange_embedding`, exchange 0 of a step; never a dependent launch."""
    n, hidden = out.shape
    mailbox.refuse_rows(n)
    exchange_embedding[(n,)](
        token, embed, following, stream, out, mailbox.table, mailbox.count, mailbox.lost,
        mailbox.patience, eps, embed.shape[0], mailbox.rows, *_tiles(mailbox, hidden),
        *_others(mailbox), num_warps=warps,
    )  # fmt: skip


def launch_pick(
    mailbox: Mailbox, calls: int, best: Tensor, where: Tensor, token: Tensor, chosen: Tensor,
    position: Tensor, last: Tensor, vocabulary: int, *, advance: bool = True,
    dependent: bool = False,
) -> None:  # fmt: skip
    """Launch :func:`exchange_pick`, the last of a step's ``calls`` exchanges.

    ``best`` float32 and ``where`` int32 ``[N, programs of the head]``.
    """
    n, programs = best.shape
    mailbox.refuse_rows(n)
    exchange_pick[(n,)](
        best, where, token, chosen, position, last, mailbox.table, mailbox.count,
        mailbox.arrivals, mailbox.lost, mailbox.patience, n, programs,
        triton.next_power_of_2(programs), vocabulary, mailbox.rows, mailbox.words, calls,
        *_others(mailbox), advance, dependent,
        num_warps=4 if INTERPRETED else 8, **options(dependent),
    )  # fmt: skip


def exchanges(mailbox: Mailbox, x: Tensor, calls: int, two: bool | None = None) -> Tensor:
    """``calls`` all-reduces of ``x [N, H]`` one after another, and nothing else: to be timed.

    Gives the sum over the ranks; every call sums the same ``x``.
    """
    out = torch.empty_like(x)
    weight = x[0]  # not read without a boundary
    for call in range(calls):
        launch_exchange(
            mailbox, call, x, x, None, 1, weight, weight, out, out, (1.0, 1.0), 1e-6, two=two,
            boundary=False,
        )  # fmt: skip
    turn[(1,)](mailbox.count, calls)
    return out
