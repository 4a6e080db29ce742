"""BF16 and FP8 in numpy, which has neither: bits to float32 values and back, as a GPU rounds."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

# A name of FP8 in Triton: mantissa bits, exponent bias, largest finite value, torch's name.
FP8: dict[str, tuple[int, int, float, torch.dtype]] = {
    "fp8e4nv": (3, 7, 448.0, torch.float8_e4m3fn),
    "fp8e5": (2, 15, 57344.0, torch.float8_e5m2),
}


def bf16_to_f32(bits: Array) -> Array:
    """uint16 bits of BF16 -> float32 (exact)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: Array, *, truncate: bool = False) -> Array:
    """float32 -> uint16 bits of BF16, to nearest even (or toward zero). NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    if not truncate:
        bits = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    out = (bits >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():  # the carry above may have turned one into infinity or zero
        out[nan] = 0x7FFF
    return out


def f64_to_f32_odd(values: Array) -> Array:
    """float64 -> float32, rounded to odd: a further rounding of the result is then the right one.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (IEEE TC 57, 2008).
    """
    near = values.astype(np.float32)
    wide = near.astype(np.float64)
    bits = near.view(np.uint32)
    inexact = (wide != values) & np.isfinite(values) & ((bits & np.uint32(1)) == 0)
    toward = np.where(wide < values, np.inf, -np.inf).astype(np.float32)
    return np.where(inexact, np.nextafter(near, toward), near)


@functools.cache
def fp8_values(name: str) -> Array:
    """The float32 value of each of the 256 codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    return codes.view(FP8[name][3]).float().numpy()


def fp8_to_f32(bits: Array, name: str) -> Array:
    return fp8_values(name)[bits.view(np.uint8)]


def to_fp8(values: Array, name: str) -> Array:
    """float16/32/64 -> uint8 codes, to nearest even, beyond the largest finite value that value."""
    mantissa, bias, largest, _ = FP8[name]
    wide = np.minimum(np.abs(values.astype(np.float64)), largest)
    # In units of the last place of its binade (of the smallest normal below that), half-even on
    # the integer is half-even on the mantissa, and exponent and mantissa count on together.
    wide = np.where(np.isnan(wide), 0.0, wide)
    exponent = np.where(wide == 0, 1 - bias, np.maximum(np.frexp(wide)[1] - 1, 1 - bias))
    units = np.rint(np.ldexp(wide, mantissa - exponent)).astype(np.int64)
    codes = units + ((exponent + bias - 1).astype(np.int64) << mantissa)
    codes = np.where(np.isnan(values), 0x7F, codes)
    return (codes | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)
