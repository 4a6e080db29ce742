"""How wrong a variant may be: relative to the reference's own error, never in absolute numbers.

Error is measured against the float64 oracle, three ways: over all of an output (relative L2), in
its worst row, and in its worst element (in units of the output's RMS). Each must be at most a small
multiple of the same error of the torch reference in the same dtype, plus a floor that depends on
the dtype alone: so zeros, unwritten rows and NaN fail at every scale, and a second rounding, which
adds 40 % to an error that is one rounding, does too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Half the distance between neighbouring numbers, relative, where it is least (just below 2).
UNIT_ROUNDOFF = {
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float32: 2.0**-25,
    torch.float8_e4m3fn: 2.0**-5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Multiples of the reference's own error that are allowed: over all, a row, an element."""

    relative: float = 1.25
    row: float = 2.0
    element: float = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far an output is from the oracle. All without units.

    ``relative``: L2 of the difference over L2 of the oracle. ``row``: the largest L2 of a row's
    difference over the RMS of the rows' L2. ``element``: the largest difference over the RMS.
    """

    relative: float
    row: float
    element: float


def floor(dtype: torch.dtype) -> float:
    """The error that is always allowed, relative: far below one rounding in 16 and 8 bits.

    In float32, where sums in another order differ by more than a rounding, a few roundings.
    """
    unit = UNIT_ROUNDOFF.get(dtype, 0.0)
    return 32 * unit if dtype == torch.float32 else unit / 16


def errors(found: Tensor, exact: Tensor) -> Errors:
    """Errors of ``found`` against float64 ``exact``, same shape; infinite where not finite."""
    if not exact.numel():
        return Errors(relative=0.0, row=0.0, element=0.0)
    exact = exact.double()
    difference = found.to(exact.device).double() - exact
    if not bool(torch.isfinite(difference).all()):
        return Errors(relative=math.inf, row=math.inf, element=math.inf)
    size = float(exact.square().mean().sqrt()) or 1.0
    rows = difference.reshape(-1, exact.shape[-1]) if exact.dim() else difference.reshape(1, 1)
    width = math.sqrt(rows.shape[-1])
    return Errors(
        relative=float(difference.square().mean().sqrt()) / size,
        row=float(rows.norm(dim=-1).max()) / width / size,
        element=float(difference.abs().max()) / size,
    )


# An element's floor is larger: the worst of many roundings is several times the usual one.
_FLOORS = {"relative": 1.0, "row": 2.0, "element": 8.0}
TITLES = {"relative": "relative error", "row": "worst row", "element": "worst element"}


def limits(gate: Gate, own: Errors, dtype: torch.dtype) -> Errors:
    """What a variant may reach, from the reference's ``own`` errors."""
    return Errors(
        **{
            name: getattr(gate, name) * getattr(own, name) + _FLOORS[name] * floor(dtype)
            for name in _FLOORS
        }
    )


def compare(
    found: Tensor, own: Tensor, exact: Tensor, gate: Gate
) -> list[tuple[str, float, float]]:
    """(gate, error, limit) of each of the three, ``own`` being the reference's output."""
    theirs, ours = errors(found, exact), errors(own, exact)
    allowed = limits(gate, ours, own.dtype)
    return [(TITLES[name], getattr(theirs, name), getattr(allowed, name)) for name in _FLOORS]
