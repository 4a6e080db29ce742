"""Sorts many (token, expert) pairs by expert, and cuts them into blocks of one expert each.

What ``kernels/triton_expert_sort.py`` does, for the hundred thousand pairs of a prefill: there
every expert looks at every chunk of the pairs, here each pair finds its own rank, and the plan
reads the counts as tiles instead of chunk by chunk. The order is the same, stable one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch
from workbench.kernels.triton_expert_sort import (
    _count_kernel,
    _write_blocks,
    follows,
    sort_pairs,
)
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

CHUNK = 256 if INTERPRETED else 1024  # pairs that are counted together
PART = 64 if INTERPRETED else 128  # pairs that one program places


@triton.jit(do_not_specialize=["chunks", "max_blocks"])
def _plan_tiles_kernel(
    counts_ptr,  # int32 [chunks, BINS]
    places_ptr,  # int32 [chunks, experts]
    block_ptr,  # int32 [max_blocks, 3]: expert (-1: none), first place in order, pairs
    chunks,
    max_blocks,
    experts: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,  # chunks at a time
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """The blocks of one expert, and for each chunk the place of its first pair of that expert."""
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    if dependent:
        tl.extra.cuda.gdc_wait()
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    part = tl.arange(0, PART)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, chunks, PART):
        row = first + part
        there = (row < chunks)[:, None] & (bins < experts)[None, :]
        tile = tl.load(counts_ptr + row[:, None] * BINS + bins[None, :], mask=there, other=0)
        counts += tl.sum(tile, 0)
    place = _write_blocks(block_ptr, counts, mine, max_blocks, BINS, BLOCK)
    for first in range(0, chunks, PART):
        row = first + part
        own = tl.load(counts_ptr + row * BINS + mine, mask=row < chunks, other=0)
        start = place + tl.cumsum(own, 0) - own
        tl.store(places_ptr + row * experts + mine, start, mask=row < chunks)
        place += tl.sum(own, 0)


@triton.jit(do_not_specialize=["pairs"])
def _place_part_kernel(
    ids_ptr,  # int64 [pairs]
    places_ptr,  # int32 [chunks, experts]
    order_ptr,  # int32 [pairs]: pair by place
    place_ptr,  # int32 [pairs]: place by pair
    pairs,
    experts: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,  # pairs a program, a part of a chunk
    STEP: tl.constexpr,  # pairs that they are compared with at a time
    dependent: tl.constexpr,
    releases: tl.constexpr,
):
    """Writes the pairs of a part of a chunk to their places, and the places to the pairs.

    A pair's rank among its expert's pairs in the chunk is counted by comparing it with all that
    come before it: some hundred comparisons a pair, which are less than a sort's steps.
    """
    if releases:
        tl.extra.cuda.gdc_launch_dependents()
    parts: tl.constexpr = CHUNK // PART
    chunk = tl.program_id(0) // parts
    start = tl.program_id(0) % parts * PART
    first = chunk * CHUNK
    index = tl.arange(0, PART)
    pair = first + start + index
    real = pair < pairs
    expert = tl.load(ids_ptr + pair, mask=real, other=-1).to(tl.int32)
    rank = tl.zeros((PART,), tl.int32)
    step = tl.arange(0, STEP)
    for earlier in range(0, start + PART, STEP):
        before = first + earlier + step
        other = tl.load(ids_ptr + before, mask=before < pairs, other=-2).to(tl.int32)
        same = (expert[:, None] == other[None, :]) & (before[None, :] < pair[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    if dependent:
        tl.extra.cuda.gdc_wait()
    place = tl.load(places_ptr + chunk * experts + expert, mask=real, other=0) + rank
    tl.store(order_ptr + place, pair, mask=real)
    tl.store(place_ptr + pair, place, mask=real)


def sorted_places(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of ``ids [N, K]`` by expert, int32 ``[N K]``, blocks, int32 ``[max_blocks, 3]``, and
    each pair's place in the order, int32 ``[N, K]``.

    A block is (expert, first place in the order, pairs), of up to ``block`` pairs of one expert;
    what is left of the list has the expert -1. Nothing is read on the host.
    """
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    place = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    # The worst routing: each expert that is chosen leaves one block partly filled.
    max_blocks = min(pairs, experts + pairs // block)
    blocks = torch.empty(max_blocks, 3, dtype=torch.int32, device=ids.device)
    early = dependent_launch(ids)
    if pairs <= CHUNK:
        sort_pairs(ids, order, blocks, experts, block, early)
        every = torch.arange(pairs, dtype=torch.int32, device=ids.device)
        place.view(-1)[order.long()] = every
        return order, blocks, place
    bins = triton.next_power_of_2(experts + 1)
    chunks = triton.cdiv(pairs, CHUNK)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    places = torch.empty(chunks, experts, dtype=torch.int32, device=ids.device)
    _count_kernel[(chunks,)](ids, counts, pairs, bins, CHUNK, early, num_warps=8)
    _plan_tiles_kernel[(experts,)](
        counts, places, blocks, chunks, max_blocks, experts, bins, block,
        max(1, min(32, 16384 // bins)), early, early, num_warps=8, **follows(early),
    )  # fmt: skip
    _place_part_kernel[(chunks * (CHUNK // PART),)](
        ids, places, order, place, pairs, experts, CHUNK, PART, min(PART, 32), early, early,
        num_warps=4, **follows(early),
    )  # fmt: skip
    return order, blocks, place
