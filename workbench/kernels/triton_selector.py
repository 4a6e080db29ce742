"""DFlash2's candidate selector as Triton kernels: edges between candidates, and the walk over them.

The meaning and the roundings are those of :mod:`workbench.kernels.reference_dflash2`, and so are
the shape letters. Everything is computed in float32; kernels are compiled without floating-point
contraction, so a product is fused into a sum exactly where ``tl.fma`` stands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.launching import dependent_launch, strided
from workbench.kernels.registry import register
from workbench.kernels.requirements import triton_runs
from workbench.kernels.triton_dflash2 import divided, power_of_two
from workbench.kernels.triton_elementwise import after_predecessor
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton

# -- candidate selector -------------------------------------------------------------------------


@triton.jit
def _edges_kernel(
    predecessors,
    successors,
    ids,
    unary,
    hidden,
    anchors,
    out,
    batch_stride,  # of hidden
    position_stride,
    anchor_stride,
    POSITIONS: tl.constexpr,
    TOP_K: tl.constexpr,
    RANK: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K rounded up, 16 at least
    CHUNK: tl.constexpr,  # of the rank
    PDL: tl.constexpr,
):
    """All K x K edges of one position.

    The K successor rows are gathered once for a matrix product with the K predecessor rows, not
    once for each predecessor: 16 times less to read at K = 16.
    """
    after_predecessor(PDL)
    index = tl.program_id(0)
    position = index % POSITIONS
    request = index // POSITIONS
    slot = tl.arange(0, SLOTS)
    real = slot < TOP_K
    succ = tl.load(ids + index * TOP_K + slot, mask=real, other=0)
    # One of the two is masked out and 0. A branch would make the loads below wait for it.
    inner = tl.load(ids + (index - 1) * TOP_K + slot, mask=real & (position > 0), other=0)
    pred = inner + tl.load(anchors + request * anchor_stride, mask=position == 0, other=0)
    score = tl.load(unary + index * TOP_K + slot, mask=real, other=0.0)
    state = hidden + request.to(tl.int64) * batch_stride + position * position_stride
    pair = tl.zeros((SLOTS, SLOTS), tl.float32)
    for start in range(0, RANK, CHUNK):
        r = start + tl.arange(0, CHUNK)
        # First, as nothing is waited for to load it: last, it is 0.1 µs late.
        here = tl.load(state + r, mask=r < RANK, other=0.0).to(tl.float32)
        mask = real[:, None] & (r < RANK)[None, :]
        target = tl.load(successors + succ[:, None] * RANK + r[None, :], mask=mask, other=0.0)
        source = tl.load(predecessors + pred[:, None] * RANK + r[None, :], mask=mask, other=0.0)
        # Rounded here, as where the engine's product is a tensor of its own.
        weighted = (source.to(tl.float32) * here[None, :]).to(target.dtype)
        pair = tl.dot(weighted, tl.trans(target), pair, input_precision="ieee")
    pair = pair.to(hidden.dtype.element_ty).to(tl.float32)
    tl.store(
        out + index.to(tl.int64) * (TOP_K * TOP_K) + slot[:, None] * TOP_K + slot[None, :],
        pair + score[None, :],
        mask=real[:, None] & real[None, :],
    )


@triton.jit
def _edges_of_one_kernel(
    predecessors,
    successors,
    ids,
    unary,
    hidden,
    anchors,
    out,
    batch_stride,  # of hidden
    position_stride,
    anchor_stride,
    POSITIONS: tl.constexpr,
    TOP_K: tl.constexpr,
    RANK: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K rounded up
    CHUNK: tl.constexpr,  # RANK rounded up
    PDL: tl.constexpr,
):
    """The K edges of one position from one predecessor.

    With few positions the time is the latency of the loads and of what follows them, and a plain
    sum over 256 products is sooner done than 16 matrix instructions that wait for one another.
    """
    after_predecessor(PDL)
    index = tl.program_id(0)
    before = tl.program_id(1)
    position = index % POSITIONS
    request = index // POSITIONS
    slot = tl.arange(0, SLOTS)
    r = tl.arange(0, CHUNK)
    real = slot < TOP_K
    succ = tl.load(ids + index * TOP_K + slot, mask=real, other=0)
    inner = tl.load(ids + (index - 1) * TOP_K + before, mask=position > 0, other=0)
    pred = inner + tl.load(anchors + request * anchor_stride, mask=position == 0, other=0)
    score = tl.load(unary + index * TOP_K + slot, mask=real, other=0.0)
    state = hidden + request.to(tl.int64) * batch_stride + position * position_stride
    here = tl.load(state + r, mask=r < RANK, other=0.0).to(tl.float32)
    source = tl.load(predecessors + pred * RANK + r, mask=r < RANK, other=0.0)
    mask = real[:, None] & (r < RANK)[None, :]
    target = tl.load(successors + succ[:, None] * RANK + r[None, :], mask=mask, other=0.0)
    weighted = (source.to(tl.float32) * here).to(target.dtype).to(tl.float32)
    pair = tl.sum(weighted[None, :] * target.to(tl.float32), 1)
    pair = pair.to(hidden.dtype.element_ty).to(tl.float32)
    row = out + (index.to(tl.int64) * TOP_K + before) * TOP_K
    tl.store(row + slot, pair + score, mask=real)


@register("candidate_edges", "triton", requires=(triton_runs,))
@strided("hidden")
def candidate_edges(
    predecessors: Tensor,
    successors: Tensor,
    ids: Tensor,
    unary: Tensor,
    hidden: Tensor,
    anchors: Tensor,
) -> Tensor:
    """Selector scores ``[B, N, K, K]`` float32: a program a position, or K of them when few."""
    batch, positions, top_k = ids.shape
    rank = hidden.shape[-1]
    out = torch.empty((batch, positions, top_k, top_k), dtype=torch.float32, device=ids.device)
    if out.numel() == 0:
        return out
    together, warps = _edges_tile(batch * positions)
    chunk = power_of_two(rank, 16)
    if together and predecessors.dtype == torch.float32 and not INTERPRETED:
        # Not for the tensor cores: the operands of the product are held in registers.
        chunk = min(chunk, 32)
    kernel = _edges_kernel if together else _edges_of_one_kernel
    pdl = not INTERPRETED and dependent_launch(hidden)
    kernel[(batch * positions,) if together else (batch * positions, top_k)](
        predecessors.contiguous(),
        successors.contiguous(),
        ids.contiguous(),
        unary.contiguous(),
        hidden,
        anchors,
        out,
        hidden.stride(0),
        hidden.stride(1),
        anchors.stride(0),
        POSITIONS=positions,
        TOP_K=top_k,
        RANK=rank,
        SLOTS=power_of_two(top_k, 16),  # tl.dot takes 16 rows at least
        CHUNK=chunk,
        PDL=pdl,
        num_warps=warps,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
    return out


def _edges_tile(count: int) -> tuple[bool, int]:
    """Whether a program takes all predecessors of its position, and its warps.

    H200, K 16, rank 256, a program a predecessor / a program a position, µs: 7 positions 1.95 /
    2.90, 28: 2.22 / 3.04, 56: 2.79 / 3.06, 112: 4.25 / 3.19; 896, 2 warps and 4: 6.04 and 7.49
    (torch 2.11, triton 3.6).
    """
    if INTERPRETED:
        return True, 4
    return count >= 64, 4 if count < 256 else 2


@triton.jit
def _selector_walk_kernel(
    edges,
    ids,
    temperature,
    noise,
    tokens,
    realized,
    POSITIONS: tl.constexpr,
    STEPS: tl.constexpr,  # POSITIONS rounded up
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K rounded up
    NOISE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The walk of one request.

    Which slot follows which depends on one position only, so the table of all positions is made
    from loads that do not wait for one another; what is sequential is a chain of look-ups in
    registers. Following the path through memory instead costs a load's latency a position.
    """
    request = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    real = slot < TOP_K
    square = real[:, None] & real[None, :]
    edges += request * (POSITIONS * TOP_K * TOP_K)
    ids += request * (POSITIONS * TOP_K)
    if NOISE:
        heat = tl.load(temperature + request)
        divisor = tl.where(heat == 0.0, 1.0, heat)
        reciprocal = tl.div_rn(1.0, divisor)
    successor = ()  # for each position, by the slot before it: the slot chosen
    for position in tl.static_range(POSITIONS):
        offset = position * TOP_K * TOP_K + slot[:, None] * TOP_K + slot[None, :]
        value = tl.load(edges + offset, mask=square, other=float("-inf"))
        if NOISE:
            gumbel = tl.load(
                noise + (request * POSITIONS + position) * TOP_K + slot, mask=real, other=0.0
            )
            drawn = divided(value, divisor, reciprocal) + gumbel[None, :]
            value = tl.where(heat == 0.0, value, drawn)
        after = tl.argmax(value, 1, tie_break_left=True)
        if PACKED:  # 16 slots of 4 bits: a look-up is a shift, where a tensor's is a reduction
            after = tl.sum(after.to(tl.int64) << (4 * slot).to(tl.int64))
        successor += (after,)  # type: ignore[assignment]
    step = tl.arange(0, STEPS)
    before = tl.zeros((STEPS,), tl.int32)
    chosen = tl.zeros((STEPS,), tl.int32)
    here = 0
    for position in tl.static_range(POSITIONS):
        before = tl.where(step == position, here, before)
        if PACKED:
            here = ((successor[position] >> (4 * here)) & 15).to(tl.int32)  # type: ignore[attr-defined]
        else:
            here = tl.sum(tl.where(slot == here, successor[position], 0))
        chosen = tl.where(step == position, here, chosen)
    token = tl.load(ids + step * TOP_K + chosen, mask=step < POSITIONS, other=0)
    row = (step * TOP_K + before)[:, None] * TOP_K + slot[None, :]
    mask = (step < POSITIONS)[:, None] & real[None, :]
    score = tl.load(edges + row, mask=mask, other=0.0)
    tl.store(tokens + request * POSITIONS + step, token, mask=step < POSITIONS)
    place = realized + request * (POSITIONS * TOP_K) + step[:, None] * TOP_K + slot[None, :]
    tl.store(place, score, mask=mask)


@register("selector_walk", "triton", requires=(triton_runs,))
@strided()
def selector_walk(
    edges: Tensor, ids: Tensor, temperature: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Greedy or sampled walk, (tokens ``[B, N]``, realized ``[B, N, K]``): a warp a request."""
    batch, positions, top_k = ids.shape
    tokens = torch.empty((batch, positions), dtype=ids.dtype, device=ids.device)
    realized = torch.empty((batch, positions, top_k), dtype=edges.dtype, device=ids.device)
    if realized.numel() == 0:
        return tokens, realized
    slots = power_of_two(top_k)
    _selector_walk_kernel[(batch,)](
        edges.contiguous(),
        ids.contiguous(),
        temperature,
        edges if noise is None else noise.contiguous(),  # not read without noise
        tokens,
        realized,
        POSITIONS=positions,
        STEPS=power_of_two(positions),
        TOP_K=top_k,
        SLOTS=slots,
        NOISE=noise is not None,
        PACKED=slots <= 16,
        num_warps=1 if slots <= 16 else 4,
        enable_fp_fusion=False,
    )
    return tokens, realized
