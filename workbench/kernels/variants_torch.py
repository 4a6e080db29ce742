"""The variant "torch": the references themselves; and other ways to write an operation in torch."""

from __future__ import annotations

from torch import Tensor

from workbench.kernels import reference, reference_dflash2
from workbench.kernels.catalogue import DRAFTER_OPS, OPS, REFERENCE
from workbench.kernels.registry import register

for _op in OPS:
    _room = reference_dflash2 if _op in DRAFTER_OPS else reference
    register(_op, REFERENCE)(getattr(_room, _op))


@register("expert_mlp", "dense")
def expert_mlp_dense(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, scale: float
) -> Tensor:
    """Every expert on every token: no host round trip, so a whole step compiles (training)."""
    return reference.expert_mlp_dense(x, gate_up, down, ids, weights) * scale
