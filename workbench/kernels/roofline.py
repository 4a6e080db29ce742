"""The roofline: the least time an operation can take on a GPU, from its bytes and its FLOPs.

One roofline serves the benches (a measured time against its bound) and the step-time model (a sum
of bounds). An operation takes ``max(bytes / bandwidth, flops / rate) + wire / NVLink``: memory and
arithmetic overlap inside a kernel, while what goes over the wire is **not** overlapped, since the
next operation needs its result. Engines that hide communication behind arithmetic can beat this
sum; what no engine can beat is the largest of the three totals of a whole step.

How weights are *stored* and what the tensor cores *compute in* are two things: NVFP4 weights on a
GPU without FP4 arithmetic are read at half a byte each and multiplied in BF16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import comb, inf, isfinite
from types import MappingProxyType
from typing import Any, Literal

from workbench.datasheet import GpuSheet, sheet
from workbench.errors import WorkbenchError

RateKind = Literal["data sheet", "recorded", "measured here"]
Limit = Literal["memory", "compute", "wire"]
AllReduce = Literal["ring", "one_shot", "in_switch"]

# FP32-exact products of a BF16 activation: an FP32 weight (24 bits) is the sum of three BF16
# numbers (8 bits each), so three BF16 products accumulated in FP32 lose nothing.
SPLIT = "bf16x3"
SPLIT_PRODUCTS = 3


class RooflineError(WorkbenchError):
    """Bytes, FLOPs or rates that no bound can be computed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one operation does on one GPU in one step.

    ``bytes`` go to or from its memory, ``flops`` count a multiply-add as two, ``wire_bytes`` leave
    the GPU over NVLink; each is the sum over all ``count`` times the step does it. ``math`` is the
    key of the rate the FLOPs run at, ``storage`` how the weights are stored ("" where there are
    none).

    Raises:
        RooflineError: a negative or infinite amount.
    """

    name: str
    bytes: float = 0.0
    flops: float = 0.0
    math: str = "bf16"
    storage: str = ""
    wire_bytes: float = 0.0
    count: int = 1

    def __post_init__(self) -> None:
        # Two comparisons an amount: sliders build thousands of these. NaN fails both.
        for what in ("bytes", "flops", "wire_bytes"):
            value = getattr(self, what)
            if not 0.0 <= value < inf:
                raise RooflineError(f"{self.name}: {what} must be 0 or more, not {value}")

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a GPU reaches: bytes/s of its memory, dense FLOP/s by type, NVLink bytes/s one way.

    ``kind`` says where the rates come from; ``notes`` names those that come from elsewhere.
    ``nvlink`` is None for a GPU on its own; ``nvlink_domain`` GPUs reach one another.

    Raises:
        RooflineError: a rate that is not a positive number.
    """

    label: str
    kind: RateKind
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    nvlink: float | None = None
    nvlink_domain: int = 1
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = {"bandwidth": self.bandwidth, **self.flops}
        if self.nvlink is not None:
            named["nvlink"] = self.nvlink
        for what, value in named.items():
            if not (isfinite(value) and value > 0):
                raise RooflineError(
                    f"{self.label}: the rate {what} must be more than 0, not {value}"
                )
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def rate(self, math: str) -> float:
        """Dense FLOP/s in ``math``; "bf16x3" is a third of the BF16 rate (see ``SPLIT``).

        Raises:
            RooflineError: the GPU has no such rate.
        """
        found = self.flops.get(math)
        if found is not None:
            return found
        if math == SPLIT and "bf16" in self.flops:
            return self.flops["bf16"] / SPLIT_PRODUCTS
        raise RooflineError(
            f"{self.label} has no {math:.20} arithmetic; weights stored in it are multiplied in "
            f"another type there, so name one of {', '.join(self.flops)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "label": self.label,
            "kind": self.kind,
            "bandwidth": self.bandwidth,
            "flops": dict(self.flops),
            "nvlink": self.nvlink,
            "nvlink_domain": self.nvlink_domain,
            "notes": list(self.notes),
        }


def data_sheet_rates(gpu: GpuSheet | str) -> Rates:
    """The rates of a data sheet, which no program reaches in full.

    Raises:
        UnknownGpuError: no sheet is held for this name.
    """
    one = gpu if isinstance(gpu, GpuSheet) else sheet(gpu)
    return Rates(
        label=one.name,
        kind="data sheet",
        bandwidth=one.bandwidth,
        flops=one.flops,
        nvlink=one.nvlink_bandwidth,
        nvlink_domain=one.nvlink_domain,
    )


def recorded_rates(gpu: GpuSheet | str) -> Rates:
    """What was measured on this GPU and recorded; what was not is the data sheet's, and noted.

    Bandwidth is that of reading only, because a step hardly writes; the BF16 rate is the middle of
    the recorded range of 8192³ matrix products.

    Raises:
        UnknownGpuError: no sheet is held for this name.
        RooflineError: nothing was recorded on it.
    """
    one = sheet(gpu) if isinstance(gpu, str) else gpu
    try:
        bandwidth, where = one.measured["read_bandwidth"]
        low, high = (one.measured[f"bf16_flops_{end}"][0] for end in ("low", "high"))
    except KeyError:
        raise RooflineError(
            f"no rates were recorded on the {one.name}; use the data sheet's"
        ) from None
    other = [name for name in one.flops if name != "bf16"]
    return Rates(
        label=one.name,
        kind="recorded",
        bandwidth=bandwidth,
        flops={**one.flops, "bf16": (low + high) / 2},
        nvlink=one.nvlink_bandwidth,
        nvlink_domain=one.nvlink_domain,
        notes=(
            where,
            f"{', '.join(other)} and NVLink from the data sheet: not recorded",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The least time for one :class:`Work`, in seconds, and which resource sets it.

    ``seconds = max(memory_seconds, compute_seconds) + wire_seconds``; ``limit`` is the largest.
    """

    memory_seconds: float
    compute_seconds: float
    wire_seconds: float

    @property
    def seconds(self) -> float:
        """Memory and arithmetic overlapped, communication after them."""
        return max(self.memory_seconds, self.compute_seconds) + self.wire_seconds

    @property
    def limit(self) -> Limit:
        """The largest of the three; memory where they are equal."""
        most = max(self.memory_seconds, self.compute_seconds, self.wire_seconds)
        if most == self.memory_seconds:
            return "memory"
        return "compute" if most == self.compute_seconds else "wire"

    def fraction(self, measured_seconds: float) -> float:
        """How much of the roofline a measured time reaches: 1 is at the bound.

        Raises:
            RooflineError: a time that is not positive.
        """
        if not (isfinite(measured_seconds) and measured_seconds > 0):
            raise RooflineError(f"a measured time must be more than 0 s, not {measured_seconds}")
        return self.seconds / measured_seconds

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "seconds": self.seconds,
            "memory_seconds": self.memory_seconds,
            "compute_seconds": self.compute_seconds,
            "wire_seconds": self.wire_seconds,
            "limit": self.limit,
        }


def bound(work: Work, rates: Rates) -> Bound:
    """The least time for ``work`` at ``rates``.

    Raises:
        RooflineError: the GPU has no rate for the type of arithmetic, or no NVLink.
    """
    wire = 0.0
    if work.wire_bytes:
        if rates.nvlink is None:
            raise RooflineError(f"{work.name}: {rates.label} has no NVLink rate; give one")
        wire = work.wire_bytes / rates.nvlink
    return Bound(
        memory_seconds=work.bytes / rates.bandwidth,
        compute_seconds=work.flops / rates.rate(work.math) if work.flops else 0.0,
        wire_seconds=wire,
    )


def math_of(storage: str, rates: Rates) -> str:
    """What weights stored as bf16, fp8, nvfp4 or fp32 are multiplied in on this GPU.

    FP8 and NVFP4 in their own arithmetic where the GPU has it (activations are then quantised to
    it too), else in BF16 (weight-only quantisation); FP32 as three BF16 products (see ``SPLIT``).

    Raises:
        RooflineError: another storage type.
    """
    own = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "fp4", "fp32": SPLIT}.get(storage)
    if own is None:
        raise RooflineError(f"unknown storage {storage!r:.40}; use bf16, fp8, nvfp4 or fp32")
    return own if own == SPLIT or own in rates.flops else "bf16"


# -- bytes that leave one GPU -------------------------------------------------------------------


def all_reduce_bytes(message: float, ranks: int, algorithm: AllReduce = "ring") -> float:
    """Bytes one GPU sends to sum ``message`` bytes over ``ranks`` GPUs, every one getting the sum.

    ``ring`` (reduce-scatter, then all-gather) sends ``2 (t - 1) / t`` messages, the least where the
    GPUs add. ``one_shot``, which vLLM 0.33 prefers for small messages, sends the whole message
    to each other GPU: more bytes, fewer steps; where it is chosen, latency, which no roofline
    knows, outweighs either. ``in_switch`` (NVLink SHARP) has the switch add and copy: a GPU sends
    its message once and its part of the sum once, ``(t + 1) / t`` messages.

    Raises:
        RooflineError: another algorithm.
    """
    factors = {
        "ring": 2 * (ranks - 1) / ranks,
        "one_shot": ranks - 1.0,
        "in_switch": (ranks + 1) / ranks,
    }
    if algorithm not in factors:
        raise RooflineError(
            f"unknown all-reduce {algorithm!r:.40}; use one of {', '.join(factors)}"
        )
    return message * factors[algorithm] if ranks > 1 else 0.0


def all_gather_bytes(whole: float, ranks: int) -> float:
    """Bytes one GPU sends so that all ``ranks`` get ``whole``, of which each had an equal part.

    A reduce-scatter of ``whole`` sends the same.
    """
    return whole * (ranks - 1) / ranks


@lru_cache(maxsize=256)
def expected_visits(experts: int, per_token: int, held: int) -> float:
    """Probability that a token needs a GPU that holds ``held`` of ``experts``, uniform routing.

    Exact: ``per_token`` different experts are drawn; all miss the GPU with probability
    C(experts - held, per_token) / C(experts, per_token).

    Raises:
        RooflineError: counts that cannot be.
    """
    if not (0 <= held <= experts and 1 <= per_token <= experts):
        raise RooflineError(
            f"{held} of {experts} experts with {per_token} a token cannot be; "
            "a GPU holds at most all, and a token chooses from 1 to all"
        )
    return 1.0 - comb(experts - held, per_token) / comb(experts, per_token)


@lru_cache(maxsize=256)
def expected_destinations(experts: int, per_token: int, gpus: int) -> float:
    """Expected number of *other* GPUs a token is sent to under expert parallelism.

    Experts lie in ``gpus`` runs as equal as can be; routing is uniform and the token's own GPU any
    of them alike. A GPU with several of the token's experts gets one copy.
    """
    small, larger = divmod(experts, gpus)
    visits = larger * expected_visits(experts, per_token, small + 1) if larger else 0.0
    visits += (gpus - larger) * expected_visits(experts, per_token, small)
    return visits * (gpus - 1) / gpus
