"""What a selection becomes: a table of functions a layer, and the lines that explain it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.kernels.catalogue import OPS


class Kernels:
    """A table of functions, one for each operation. Made once, read in every call."""

    __slots__ = OPS

    qkvg: Callable[..., Any]
    qkv_write: Callable[..., Any]
    decode_attention: Callable[..., Any]
    prefill_attention: Callable[..., Any]
    output_gate: Callable[..., Any]
    boundary: Callable[..., Any]
    router: Callable[..., Any]
    expert_mlp: Callable[..., Any]
    dense_mlp: Callable[..., Any]
    rms_norm: Callable[..., Any]
    softcap: Callable[..., Any]
    dynamic_conv: Callable[..., Any]
    conv_residual_norm: Callable[..., Any]
    context_kv_write: Callable[..., Any]
    candidate_edges: Callable[..., Any]
    selector_walk: Callable[..., Any]

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        for op in OPS:
            setattr(self, op, functions[op])


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """One line of the table: for these layers, asked for, used, and why they differ."""

    op: str
    layers: str
    requested: str
    resolved: str
    reason: str = ""

    def to_dict(self) -> dict[str, str]:
        """The values by name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What a selection means for a model: function tables, and the lines that explain them.

    ``forward_only`` are the (operation, variant) of the model whose kernels autograd does not see
    through. A variant of one's own counts as differentiable: only its author knows.
    """

    layers: tuple[Kernels, ...]
    model: Kernels
    rows: tuple[Resolved, ...]
    forward_only: tuple[tuple[str, str], ...] = ()

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow through every operation."""
        return not self.forward_only
