"""What a step is modelled under, and what comes out: operations with their bounds, and the sum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypedDict, get_args

from workbench.errors import WorkbenchError
from workbench.kernels.roofline import SPLIT, AllReduce, Bound, Rates, Work
from workbench.model.asked import SizingError, instance, shown
from workbench.model.config import BeamConfig, is_number
from workbench.model.display import Shown
from workbench.model.kv_settings import KV_WIDTH, KVDtype
from workbench.model.layout import Layout
from workbench.model.weights import PRECISIONS, Precision

StepKind = Literal["decode", "verify", "prefill", "draft", "speculative"]
DispatchDtype = Literal["bf16", "fp8", "nvfp4"]

# Bytes a number takes when tokens are sent to experts, scales as in the weights of that type.
DISPATCH_WIDTH = MappingProxyType({"bf16": 2.0, "fp8": 1 + 4 / 128, "nvfp4": 0.5 + 1 / 16})
ROUTER_MATHS = (SPLIT, "tf32", "fp32")


class StepOptions(TypedDict, total=False):
    """Keyword arguments that every step takes; meanings and defaults as in StepSettings."""

    layout: Layout
    precision: Precision
    kv_dtype: KVDtype
    attention_math: str
    router_math: str
    dispatch_dtype: DispatchDtype
    all_reduce: AllReduce
    distinct: float | None
    communication: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What a step is modelled under.

    ``precision`` is how weights are stored; they are multiplied in their own type where the GPU has
    arithmetic for it, else in BF16 (:func:`~workbench.kernels.roofline.math_of`).
    ``attention_math`` is the rate of the attention products: BF16 also over an FP8 cache, "fp8"
    where queries are quantised as well. ``router_math`` is "bf16x3" (three BF16 products, exact for
    an FP32 router), "tf32", or "fp32" outside the tensor cores. ``dispatch_dtype`` is what tokens
    are sent to experts in (they come back in BF16). ``all_reduce`` is the algorithm of
    :func:`~workbench.kernels.roofline.all_reduce_bytes`. ``distinct`` is the number of different
    experts that a layer touches, by default the expectation under uniform routing.
    ``communication`` False leaves out what goes between GPUs: one rank on its own.
    """

    rates: Rates
    layout: Layout = Layout()  # noqa: RUF009 - frozen
    precision: Precision = PRECISIONS["bf16"]
    kv_dtype: KVDtype = "bf16"
    attention_math: str = "bf16"
    router_math: str = SPLIT
    dispatch_dtype: DispatchDtype = "bf16"
    all_reduce: AllReduce = "ring"
    distinct: float | None = None
    communication: bool = True

    def check(self, config: BeamConfig) -> None:
        """Raise SizingError, in one sentence, for what cannot be modelled."""
        instance("rates", self.rates, Rates, 'Rates, such as data_sheet_rates("GB200")')
        instance("layout", self.layout, Layout, "a Layout, such as Layout(tp=8)")
        instance("precision", self.precision, Precision, 'a Precision, such as precision("nvfp4")')
        instance("communication", self.communication, bool, "true or false")
        for name in ("kv_dtype", "attention_math", "router_math", "dispatch_dtype", "all_reduce"):
            instance(name, getattr(self, name), str, "text")
        self.layout.check(config)
        if self.kv_dtype not in KV_WIDTH:
            raise SizingError(
                f"unknown KV dtype {self.kv_dtype!r:.40}; use one of {', '.join(KV_WIDTH)}"
            )
        if self.router_math not in ROUTER_MATHS:
            raise SizingError(
                f"unknown router arithmetic {self.router_math!r:.40}; the router stays in FP32, so "
                f"use one of {', '.join(ROUTER_MATHS)}"
            )
        if self.dispatch_dtype not in DISPATCH_WIDTH:
            raise SizingError(
                f"unknown dispatch dtype {self.dispatch_dtype!r:.40}; "
                f"use one of {', '.join(DISPATCH_WIDTH)}"
            )
        for math in (self.attention_math, self.router_math):
            try:
                self.rates.rate(math)
            except WorkbenchError as error:
                raise SizingError(str(error)) from None
        if self.all_reduce not in get_args(AllReduce):
            raise SizingError(
                f"unknown all-reduce {self.all_reduce!r:.40}; "
                f"use one of {', '.join(get_args(AllReduce))}"
            )
        most = config.num_experts
        if self.distinct is not None and not (
            is_number(self.distinct) and 0 <= self.distinct <= most
        ):
            raise SizingError(
                f"distinct experts must be from 0 to {most}, not {shown(self.distinct)}"
            )
        if self.communication and self.layout.gpus > 1:
            if self.rates.nvlink is None:
                raise SizingError(
                    f"{self.rates.label} has no NVLink rate, so {self.layout.name} cannot be "
                    "modelled; give one, or leave communication out"
                )
            if self.layout.gpus > self.rates.nvlink_domain:
                raise SizingError(
                    f"{self.layout.name} takes more GPUs than NVLink connects "
                    f"({self.rates.label}: {self.rates.nvlink_domain}), and the network beyond is "
                    "not modelled; choose a smaller layout, or leave communication out"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a step on one GPU: its work, its bound, and its share of the step's time.

    ``work.bytes`` is the sum of ``weight_bytes`` (scales included), ``kv_bytes`` (cache read and
    written) and ``activation_bytes``.
    """

    work: Work
    bound: Bound
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    share: float = 0.0

    @property
    def name(self) -> str:
        """The operation's name."""
        return self.work.name

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            **self.work.to_dict(),
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "activation_bytes": self.activation_bytes,
            **self.bound.to_dict(),
            "share": self.share,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepTime(Shown):
    """A modelled step on one GPU. ``tokens`` counts those run over all data-parallel groups."""

    kind: StepKind
    what: str
    tokens: int
    settings: StepSettings
    operations: tuple[Operation, ...]
    source: str = field(default="modelled", init=False)

    @property
    def seconds(self) -> float:
        """Sum over the operations, none overlapping another."""
        return sum(op.bound.seconds for op in self.operations)

    @property
    def milliseconds(self) -> float:
        """:attr:`seconds` in milliseconds."""
        return 1e3 * self.seconds

    @property
    def memory_seconds(self) -> float:
        """All bytes of memory traffic at the memory's bandwidth."""
        return sum(op.bound.memory_seconds for op in self.operations)

    @property
    def compute_seconds(self) -> float:
        """All FLOPs, each at the rate of its type."""
        return sum(op.bound.compute_seconds for op in self.operations)

    @property
    def wire_seconds(self) -> float:
        """All bytes that leave the GPU, at NVLink's bandwidth."""
        return sum(op.bound.wire_seconds for op in self.operations)

    @property
    def overlapped_seconds(self) -> float:
        """The largest of the three: no step that moves these bytes can be shorter."""
        return max(self.memory_seconds, self.compute_seconds, self.wire_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens run a second by the whole layout, at this step's time."""
        return self.tokens / self.seconds

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights read."""
        return sum(op.weight_bytes for op in self.operations)

    @property
    def kv_bytes(self) -> float:
        """Bytes of KV cache read and written."""
        return sum(op.kv_bytes for op in self.operations)

    @property
    def activation_bytes(self) -> float:
        """Bytes of activations read and written."""
        return sum(op.activation_bytes for op in self.operations)

    @property
    def flops(self) -> float:
        """FLOPs, a multiply-add as two."""
        return sum(op.work.flops for op in self.operations)

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave the GPU over NVLink."""
        return sum(op.work.wire_bytes for op in self.operations)

    def operation(self, name: str) -> Operation:
        """The operation of that name.

        Raises:
            SizingError: the step has none.
        """
        for op in self.operations:
            if op.name == name:
                return op
        raise SizingError(
            f"this step has no operation {name!r:.40}; "
            f"use one of {', '.join(op.name for op in self.operations)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        s = self.settings
        return {
            "source": self.source,
            "kind": self.kind,
            "what": self.what,
            "layout": s.layout.name,
            "precision": s.precision.name,
            "kv_dtype": s.kv_dtype,
            "attention_math": s.attention_math,
            "router_math": s.router_math,
            "dispatch_dtype": s.dispatch_dtype,
            "all_reduce": s.all_reduce,
            "distinct": s.distinct,
            "communication": s.communication,
            "rates": s.rates.to_dict(),
            "tokens": self.tokens,
            "milliseconds": self.milliseconds,
            "overlapped_milliseconds": 1e3 * self.overlapped_seconds,
            "memory_seconds": self.memory_seconds,
            "compute_seconds": self.compute_seconds,
            "wire_seconds": self.wire_seconds,
            "tokens_per_second": self.tokens_per_second,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "activation_bytes": self.activation_bytes,
            "flops": self.flops,
            "wire_bytes": self.wire_bytes,
            "operations": [op.to_dict() for op in self.operations],
        }

    def __repr__(self) -> str:
        s = self.settings
        lines = [
            f"{self.what}, {s.layout.name}, weights {s.precision.name}, KV {s.kv_dtype}, "
            f"{s.rates.label} at {s.rates.kind} rates: {self.milliseconds:.3f} ms modelled "
            f"({1e3 * self.overlapped_seconds:.3f} ms if all overlapped)",
            f"{'operation':<20}{'times':>6}{'GB':>10}{'TFLOP':>10}{'math':>8}{'wire MB':>10}"
            f"{'ms':>9}{'share':>7}  limit",
        ]
        lines += [
            f"{op.name:<20}{op.work.count:>6}{op.work.bytes / 1e9:>10.4f}"
            f"{op.work.flops / 1e12:>10.4f}{op.work.math if op.work.flops else '':>8}"
            f"{op.work.wire_bytes / 1e6:>10.3f}{1e3 * op.bound.seconds:>9.4f}{op.share:>7.1%}"
            f"  {op.bound.limit}"
            for op in self.operations
        ]
        return "\n".join(lines)


def with_shares(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    operations = tuple(operations)
    total = sum(op.bound.seconds for op in operations)
    # Built directly: dataclasses.replace would take half of a step's time here.
    return tuple(
        Operation(
            work=op.work,
            bound=op.bound,
            weight_bytes=op.weight_bytes,
            kv_bytes=op.kv_bytes,
            activation_bytes=op.activation_bytes,
            share=op.bound.seconds / total if total else 0.0,
        )
        for op in operations
    )
