"""Triton kernels that end a sublayer of one sequence and send its partial sum themselves.

Each is a kernel of ``kernels/rank``, the same rows in the same order, but for its end: what that
one writes to its own memory, for the exchange to load and send, a program here writes into the
inboxes of all ranks, its own included, as soon as it has its rows. ``exchange_rows`` of
``triton_exchange.py`` receives (``PUSHED``). A program sends whole words, so in BF16 it owns an
even number of rows.

**The number of the exchange** is known before the wait. ``count`` changes only in the last kernel
of a step (``exchange_pick``), after its wait, so once all other kernels of the step are through.
The first kernel of the next step is no dependent launch, so it begins when that one has ended, and
every later one begins after the first: no kernel of a step can see another count than the step's.
It is read past the L1, which may hold an older one.

**Two slots are still enough.** A program sends for exchange k only after its wait. By then all
kernels before it have ended on its rank, exchange k - 1 among them, for which every rank had sent;
who had sent for k - 1 had waited, so its exchange k - 2 had ended, and nobody reads that slot any
more. For the embedding, a step's first exchange, only the token's owner sends, so it proves nothing
about the others; but it and the exchange behind it begin after the last step's choice has ended,
for which every rank had sent when all other exchanges of its step had ended.
The other way round, what has come for exchange k stays until it is read: who overwrites it, for
k + 2, had k + 1 from all ranks, who sent that when their own exchange k had ended.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# Kernels have no annotations but constexpr: Triton types them at each launch.
from __future__ import annotations

from torch import Tensor

from workbench.kernels.parallel.mailbox import Mailbox
from workbench.kernels.parallel.triton_exchange import (
    _as_words,
    _boxes,
    _others,
    _send,
    values_a_word,
)
from workbench.kernels.rank.triton_attention import projected_rows
from workbench.kernels.rank.triton_experts import down_rows
from workbench.kernels.rank.triton_vectors import options, parts, product_rows
from workbench.kernels.triton_runtime import tl, triton


@triton.jit
def _push(
    value, number, boxes, real, WIDTH: tl.constexpr, ROWS: tl.constexpr, ROOM: tl.constexpr,
    P: tl.constexpr, W: tl.constexpr, RANK: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """``value [ROWS]``, this program's rows of ``WIDTH``, rounded, to all ranks' inboxes."""
    EACH: tl.constexpr = ROWS // P
    WORDS: tl.constexpr = WIDTH // P
    at = tl.program_id(0) * EACH + tl.arange(0, EACH)
    high = number.to(tl.int64) << 32
    slot = (number & 1).to(tl.int64)
    word = _as_words(tl.reshape(value.to(tl.float32), (EACH, P)), dtype, high, P)
    # Of an exchange of many rows this is the first and only one.
    _send(boxes, real, (slot * W + RANK) * ROOM * WORDS + at, word, at < WORDS)


@triton.jit(do_not_specialize=["call"])
def push_o_proj(
    parts_ptr,  # float32 [SPLITS, A, D]
    lse_ptr,  # float32 [SPLITS, A]
    gate_ptr,  # [A D]
    bias_ptr,  # [A]
    weight_ptr,  # [WIDTH, A D]
    table_ptr,  # int64 [W]
    count_ptr,  # int32, exchanges before this step
    call,  # which exchange of the step
    WIDTH: tl.constexpr,
    A: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    ROOM: tl.constexpr,  # rows that an inbox has room for
    P: tl.constexpr,  # values of a word
    W: tl.constexpr,
    W2: tl.constexpr,  # power of two that holds W
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """:func:`~workbench.kernels.rank.triton_attention.o_proj`, sent to all ranks."""
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    boxes, real = _boxes(table_ptr, W, W2)
    number = tl.load(count_ptr, volatile=True) + call + 1
    _, _, value = projected_rows(
        parts_ptr, lse_ptr, gate_ptr, bias_ptr, weight_ptr, WIDTH, A, D, HEADS, SPLITS, ROWS,
        dtype, PDL,
    )  # fmt: skip
    _push(value, number, boxes, real, WIDTH, ROWS, ROOM, P, W, RANK, dtype)


@triton.jit(do_not_specialize=["call"])
def push_matvec(
    x_ptr,  # [K]
    weight_ptr,  # [WIDTH, K]
    table_ptr,
    count_ptr,
    call,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    ROWS: tl.constexpr,
    ROOM: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """:func:`~workbench.kernels.rank.triton_vectors.matvec`, sent to all ranks."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    boxes, real = _boxes(table_ptr, W, W2)
    number = tl.load(count_ptr, volatile=True) + call + 1
    _, _, value = product_rows(x_ptr, weight_ptr, WIDTH, K, K0, K1, ROWS, False, dtype, PDL)
    _push(value, number, boxes, real, WIDTH, ROWS, ROOM, P, W, RANK, dtype)


@triton.jit(do_not_specialize=["call"])
def push_experts_down(
    act_ptr,  # [TOP_K, K]
    weight_ptr,  # [E, WIDTH, K]
    scale_ptr,  # float32 [E, WIDTH] where SCALED
    ids_ptr,  # int64 [TOP_K]
    shares_ptr,  # float32 [TOP_K]
    table_ptr,
    count_ptr,
    call,
    routed_scale,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    ROOM: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    W2: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """:func:`~workbench.kernels.rank.triton_experts.experts_down`, sent to all ranks."""
    dtype: tl.constexpr = act_ptr.dtype.element_ty
    boxes, real = _boxes(table_ptr, W, W2)
    number = tl.load(count_ptr, volatile=True) + call + 1
    _, _, value = down_rows(
        act_ptr, weight_ptr, scale_ptr, ids_ptr, shares_ptr, routed_scale, WIDTH, K, K0, K1, TOP_K,
        EXPERTS, ROWS, SCALED, PDL, dtype, PDL,
    )  # fmt: skip
    _push(value, number, boxes, real, WIDTH, ROWS, ROOM, P, W, RANK, dtype)


# ------------------------------------------------------------------ launches


def _place(mailbox: Mailbox, hidden: int) -> tuple[int, int, int, int, int]:
    """ROOM, P, W, W2, RANK of the kernels."""
    return mailbox.rows, values_a_word(mailbox, hidden), *_others(mailbox)


def launch_o_proj(
    mailbox: Mailbox, call: int, merged: Tensor, lse: Tensor, gate: Tensor, bias: Tensor,
    weight: Tensor, tile: tuple[int, int], dependent: bool,
) -> None:  # fmt: skip
    """Launch :func:`push_o_proj`: parts float32 ``[S, A, D]``, lse ``[S, A]``, weight ``[H, A D]``.

    ``tile``: rows of a program, and warps.
    """
    splits, heads, width = merged.shape
    hidden = weight.shape[0]
    push_o_proj[(triton.cdiv(hidden, tile[0]),)](
        merged, lse, gate, bias, weight, mailbox.table, mailbox.count, call, hidden, heads, width,
        triton.next_power_of_2(heads), splits, tile[0], *_place(mailbox, hidden), dependent,
        num_warps=tile[1], **options(dependent),
    )  # fmt: skip


def launch_matvec(
    mailbox: Mailbox, call: int, x: Tensor, weight: Tensor, tile: tuple[int, int], dependent: bool
) -> None:
    """Launch :func:`push_matvec`: x ``[K]``, weight ``[H, K]``."""
    hidden, inner = weight.shape
    push_matvec[(triton.cdiv(hidden, tile[0]),)](
        x, weight, mailbox.table, mailbox.count, call, hidden, inner, *parts(inner), tile[0],
        *_place(mailbox, hidden), dependent,
        num_warps=tile[1], **options(dependent),
    )  # fmt: skip


def launch_experts_down(
    mailbox: Mailbox, call: int, act: Tensor, down: Tensor, ids: Tensor, shares: Tensor,
    routed_scale: float, tile: tuple[int, int], dependent: bool, scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch :func:`push_experts_down`: act ``[K, I]``, down ``[E, H, I]``.

    ``scale``: float32 ``[E, H]`` of FP8 experts.
    """
    top_k, width = act.shape
    hidden = down.shape[1]
    push_experts_down[(triton.cdiv(hidden, tile[0]),)](
        act, down, down if scale is None else scale, ids, shares, mailbox.table, mailbox.count,
        call, routed_scale, hidden, width, *parts(width), top_k, triton.next_power_of_2(top_k),
        tile[0], scale is not None, *_place(mailbox, hidden), dependent,
        num_warps=tile[1], **options(dependent),
    )  # fmt: skip
