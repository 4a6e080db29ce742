"""Beam's speed as published and recorded: the figures themselves, with where they come from.

*published* is the public announcement of vLLM's day-0 support for Beam; *recorded* are runs of
vLLM 0.33.0, and of a prototype kernel, on one H200 with torch 2.11 and CUDA 13.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from workbench.model.asked import SizingError

ReferenceKind = Literal["published", "recorded"]
Unit = Literal["ms", "tokens/s", "ratio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One measured figure: ``value`` in ``unit``, on the hardware and layout ``where``."""

    name: str
    kind: ReferenceKind
    value: float
    unit: Unit
    where: str
    note: str

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


ANNOUNCED = "public announcement of vLLM's day-0 support"
VLLM = "vLLM 0.33.0, torch 2.11, CUDA 13.0, BF16, random weights, FlashAttention 3, Triton MoE"
GB200 = "GB200, TP8"
FOUR_GB300 = "4 x GB300"
H200 = "one H200, one rank of TP8, no all-reduce"


def _published(name: str, value: float, unit: Unit, where: str, note: str = "") -> Reference:
    text = f"{ANNOUNCED}; {note}" if note else ANNOUNCED
    return Reference(name=name, kind="published", value=value, unit=unit, where=where, note=text)


def _recorded(name: str, value: float, note: str) -> Reference:
    return Reference(
        name=name, kind="recorded", value=value, unit="ms", where=H200, note=note
    )  # fmt: skip


_ALL = (
    _published("decode, batch 1, before the optimisations", 8.95, "ms", GB200),
    _published("decode, batch 1, after the optimisations", 3.30, "ms", GB200),
    _published("prefill 8 x 2048 at 100k, before the optimisations", 328, "ms", GB200),
    _published("prefill 8 x 2048 at 100k, after the optimisations", 176, "ms", GB200),
    _published(
        "peak throughput 32k in / 1 out, TP", 98_700, "tokens/s", FOUR_GB300, "TP4 is meant"
    ),
    _published(
        "peak throughput 32k in / 1 out, attention DP + MegaMoE", 168_800, "tokens/s", FOUR_GB300
    ),
    _published(
        "throughput of attention DP + MegaMoE over TP", 168.8 / 98.7, "ratio", FOUR_GB300,
        "168.8k / 98.7k tokens/s",
    ),
    _published(
        "single request with DFlash2, a step", 1e3 * 3.71 / 708, "ms", "TP8",
        "3.71 tokens a step / 708 tokens/s; the hardware is not stated",
    ),
    _published(
        "concurrency 128, adaptive verification", 16_632, "tokens/s", "not stated"
    ),
    _published("concurrency 128, fixed verification", 15_012, "tokens/s", "not stated"),
    _recorded("decode, batch 1, context 1k", 4.58, VLLM),
    _recorded("decode, batch 1, context 4k", 4.59, VLLM),
    _recorded("decode, batch 1, context 32k", 4.68, VLLM),
    _recorded("decode, batch 1, context 120k", 4.91, VLLM),
    _recorded("decode, batch 8, context 1k", 10.11, f"{VLLM}, tuned MoE file (11.16 without)"),
    _recorded("decode, batch 32, context 1k", 20.88, f"{VLLM}, tuned MoE file (21.92 without)"),
    _recorded("decode, batch 128, context 1k", 32.7, f"{VLLM}, tuned MoE file (33.8 without)"),
    *(
        _recorded(
            f"graph replay, {rows} token{'s' * (rows > 1)}",
            value,
            f"{VLLM}, graph replay alone; context and routing not recorded"
            + (" (the whole step at batch 128, context 1k, was shorter: 33.8)" * (rows == 128)),
        )
        for rows, value in (
            (1, 4.47), (2, 5.33), (4, 7.26), (8, 11.1), (16, 16.1), (32, 23.9), (64, 31.9),
            (128, 36.2),
        )
    ),
    _recorded(
        "prefill 8 x 2048, no earlier context", 318, f"{VLLM}, tuned MoE file (326 without)"
    ),
    _recorded(
        "prototype decode kernel, batch 1, context 4k", 1.965,
        "one persistent cooperative CUDA kernel, 1.94-1.99, the middle; torch 2.11, CUDA 13.0",
    ),
)  # fmt: skip

REFERENCES: Mapping[str, Reference] = MappingProxyType({one.name: one for one in _ALL})


def reference(name: str) -> Reference:
    """The reference of that name.

    Raises:
        SizingError: there is none.
    """
    if name not in REFERENCES:
        raise SizingError(f"unknown reference {name!r:.60}; REFERENCES lists the names")
    return REFERENCES[name]
