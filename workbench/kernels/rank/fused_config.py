"""Launch sizes of the fused chain; the defaults are the fastest measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedConfig:
    """Launch sizes: (rows of a program, warps) of each product, and how attention is divided.

    ``keys`` of a tile; ``sliding_splits`` parts of the window, merged by the output projection;
    ``full_splits`` parts at most in a full layer, merged by a kernel of its own. ``norm_in_router``
    and ``norm_in_qkvg``: the boundary before that product is computed by each of its programs.
    ``ahead``: whether the next layer's first weights are brought into the L2 while the experts are
    chosen, and from when on (with the launch, or when the scores are there), by
    ``ahead_programs`` programs. ``fp8_up`` and ``fp8_down`` take the place of ``gate_up`` and
    ``down`` where the experts are FP8.
    """

    qkvg: tuple[int, int] = (2, 4)
    o_proj: tuple[int, int] = (16, 8)
    router: tuple[int, int] = (2, 4)
    gate_up: tuple[int, int] = (1, 1)
    down: tuple[int, int] = (4, 4)
    fp8_up: tuple[int, int] = (1, 1)
    fp8_down: tuple[int, int] = (8, 4)
    dense_up: tuple[int, int] = (2, 4)
    dense_down: tuple[int, int] = (8, 4)
    head: tuple[int, int] = (4, 4)
    vector_warps: int = 8
    keys: int = 64
    sliding_splits: int = 8
    full_splits: int = 128
    attend_warps: int = 8
    norm_in_router: bool = False
    norm_in_qkvg: bool = False
    ahead: Literal["off", "early", "late"] = "off"
    ahead_programs: int = 128
