"""Triton kernel that adds up rows by a table of places: what whole experts gave for each token."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# Kernels have no annotations but constexpr: Triton types them at each launch.
from __future__ import annotations

from torch import Tensor

from workbench.kernels.triton_runtime import INTERPRETED, tl, triton


@triton.jit
def placed_rows(
    product_ptr,  # [P, H]
    place_ptr,  # int32 [R, S]: a row of product, -1: none
    share_ptr,  # float32 [R, S] if SHARED
    out_ptr,  # [R, H]
    SLOTS: tl.constexpr,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """out[r] = the float32 sum of its slots' rows, times their shares if SHARED, rounded once.

    Grid: (R * cdiv(H, COLUMNS),).
    """
    tiles: tl.constexpr = (H + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    live = column < H
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(SLOTS):
        at = tl.load(place_ptr + row * SLOTS + slot).to(tl.int64)
        value = tl.load(product_ptr + at * H + column, mask=live & (at >= 0), other=0.0)
        value = value.to(tl.float32)
        if SHARED:
            value *= tl.load(share_ptr + row * SLOTS + slot)
        total += value
    tl.store(out_ptr + row * H + column, total.to(out_ptr.dtype.element_ty), mask=live)


def launch_placed_rows(product: Tensor, place: Tensor, shares: Tensor | None) -> Tensor:
    """Launch :func:`placed_rows`; ``[R, H]`` in ``product``'s dtype, R and P of 1 or more.

    ``product [P, H]``, ``place`` int32 ``[R, S]``, ``shares`` float32 ``[R, S]`` or None: 1.
    """
    (count, slots), hidden = place.shape, product.shape[1]
    out = product.new_empty(count, hidden)
    columns = min(triton.next_power_of_2(hidden), 8192 if INTERPRETED else 1024)
    placed_rows[(count * triton.cdiv(hidden, columns),)](
        product, place, place if shares is None else shares, out,
        slots, hidden, columns, shares is not None, num_warps=4,
    )  # fmt: skip
    return out
