"""Sorts (token, expert) pairs by expert on the GPU, and cuts them into blocks of one expert each.

No number is read on the host: the list of blocks is as long as the worst routing could need, and
what is left over says so. One launch where a program can hold all pairs, otherwise three: count,
plan, place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

__all__ = ["follows", "sort_pairs"]


@triton.jit
def _chunk_of_experts(ids_ptr, pairs, chunk, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """The pairs of a chunk and their experts, int32; past the end: the last bin, no expert's."""
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    return pair, tl.load(ids_ptr + pair, mask=pair < pairs, other=BINS - 1).to(tl.int32)


@triton.jit
def _write_blocks(
    block_ptr, counts, mine, max_blocks, BINS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes the blocks of expert ``mine`` (the first expert: also that the rest are none).

    ``counts [BINS]`` are the pairs of every expert. Returns the expert's first place in the order.
    """
    bins = tl.arange(0, BINS)
    blocks = (counts + BLOCK - 1) // BLOCK
    count = tl.sum(tl.where(bins == mine, counts, 0), 0)
    place = tl.sum(tl.where(bins < mine, counts, 0), 0)
    first = tl.sum(tl.where(bins < mine, blocks, 0), 0)
    for done in range(0, count, BLOCK):
        entry = block_ptr + (first + done // BLOCK) * 3
        tl.store(entry, mine)
        tl.store(entry + 1, place + done)
        tl.store(entry + 2, tl.minimum(count - done, BLOCK))
    if mine == 0:
        for unused in range(tl.sum(blocks, 0), max_blocks, BINS):
            entry = block_ptr + (unused + bins) * 3
            tl.store(entry, bins * 0 - 1, mask=unused + bins < max_blocks)
    return place


@triton.jit(do_not_specialize=["pairs", "max_blocks"])
def _sort_few_kernel(
    ids_ptr,  # int64 [pairs], at most CHUNK
    order_ptr,  # int32 [pairs]: pairs by expert, in their order within an expert
    block_ptr,  # int32 [max_blocks, 3]: expert (-1: no such block), first place in order, pairs
    pairs,
    max_blocks,
    experts: tl.constexpr,
    BINS: tl.constexpr,  # a power of two above experts
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    OWN: tl.constexpr,
    releases: tl.constexpr,
):
    """Stable counting sort of the pairs by expert, and blocks of up to BLOCK pairs of one expert.

    Every program counts all ids (they are few, and this saves a launch) and then places the pairs
    and writes the blocks of its OWN experts.
    """
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    pair, expert = _chunk_of_experts(ids_ptr, pairs, 0, CHUNK, BINS)
    counts = tl.histogram(expert, BINS)
    counts = tl.where(tl.arange(0, BINS) < experts, counts, 0)
    for own in range(OWN):
        mine = tl.program_id(0) * OWN + own
        if mine < experts:
            place = _write_blocks(block_ptr, counts, mine, max_blocks, BINS, BLOCK)
            match = expert == mine
            rank = tl.cumsum(match.to(tl.int32), 0)
            tl.store(order_ptr + place + rank - 1, pair, mask=match)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    ids_ptr,  # int64 [pairs]
    counts_ptr,  # int32 [chunks, BINS]
    pairs,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    releases: tl.constexpr,
):
    """How often each expert occurs in a chunk of the pairs: first of three launches of the sort."""
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    _, expert = _chunk_of_experts(ids_ptr, pairs, tl.program_id(0), CHUNK, BINS)
    counts = tl.histogram(expert, BINS)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["chunks", "max_blocks"])
def _plan_kernel(
    counts_ptr,  # int32 [chunks, BINS]
    places_ptr,  # int32 [chunks, experts]: where a chunk's pairs of an expert begin in the order
    block_ptr,  # int32 [max_blocks, 3], see _sort_few_kernel
    chunks,
    max_blocks,
    experts: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """Places of one expert's pairs and its blocks, from the counts of all chunks."""
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    if dependent:
        tl.extra.cuda.gdc_wait()
    bins = tl.arange(0, BINS)
    mine = tl.program_id(0)
    counts = tl.zeros((BINS,), tl.int32)
    for chunk in range(chunks):
        counts += tl.load(counts_ptr + chunk * BINS + bins, mask=bins < experts, other=0)
    place = _write_blocks(block_ptr, counts, mine, max_blocks, BINS, BLOCK)
    for chunk in range(chunks):
        tl.store(places_ptr + chunk * experts + mine, place)
        place += tl.load(counts_ptr + chunk * BINS + mine)


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(
    ids_ptr,  # int64 [pairs]
    places_ptr,  # int32 [chunks, experts]
    order_ptr,  # int32 [pairs]
    pairs,
    experts: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """Writes one chunk's pairs of one expert to their places, in their order."""
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    mine = tl.program_id(0)
    chunk = tl.program_id(1)
    pair, expert = _chunk_of_experts(ids_ptr, pairs, chunk, CHUNK, BINS)
    match = expert == mine
    rank = tl.cumsum(match.to(tl.int32), 0)
    if dependent:
        tl.extra.cuda.gdc_wait()
    place = tl.load(places_ptr + chunk * experts + mine)
    tl.store(order_ptr + place + rank - 1, pair, mask=match)


def follows(dependent: bool) -> dict[str, bool]:
    # The interpreter knows no launch options.
    return {"launch_pdl": True} if dependent else {}


def sort_pairs(
    ids: Tensor, order: Tensor, blocks: Tensor, experts: int, block: int, early: bool
) -> None:
    """Fills ``order`` and ``blocks`` (see ``_sort_few_kernel``); its last launch releases early."""
    pairs, max_blocks = order.shape[0], blocks.shape[0]
    bins = triton.next_power_of_2(experts + 1)
    chunk = max(16, min(triton.next_power_of_2(pairs), 16384 if INTERPRETED else 2048))
    warps = 4 if chunk <= 1024 else 8
    if pairs <= chunk:
        own = experts if INTERPRETED else 1  # interpreted: as few programs as possible
        _sort_few_kernel[(triton.cdiv(experts, own),)](
            ids, order, blocks, pairs, max_blocks, experts, bins, block, chunk, own, early,
            num_warps=warps,
        )  # fmt: skip
        return
    chunks = triton.cdiv(pairs, chunk)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    places = torch.empty(chunks, experts, dtype=torch.int32, device=ids.device)
    _count_kernel[(chunks,)](ids, counts, pairs, bins, chunk, early, num_warps=warps)
    _plan_kernel[(experts,)](
        counts, places, blocks, chunks, max_blocks, experts, bins, block, early, early,
        num_warps=4, **follows(early),
    )  # fmt: skip
    _place_kernel[(experts, chunks)](
        ids, places, order, pairs, experts, bins, chunk, early, early,
        num_warps=warps, **follows(early),
    )  # fmt: skip
