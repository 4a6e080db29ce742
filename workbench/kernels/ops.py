"""What each operation is: reference, oracle, inputs, gates, bytes and FLOPs, in one table.

``OPERATIONS["boundary"]`` is everything that is needed to check and to time any variant of it. The
parts live in modules of their own: ``reference.py`` (torch, with the roundings), ``oracle.py``
(float64, without), ``inputs.py`` (random arguments for any sizes), ``work.py`` (bytes and FLOPs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.errors import KernelError
from workbench.kernels import judges, oracle, reference, reference_dflash2
from workbench.kernels.case import Case, Outputs, Request
from workbench.kernels.catalogue import DRAFTER_OPS, LAYER_OPS, MODEL_OPS, OPS
from workbench.kernels.gates import Gate
from workbench.kernels.inputs import MAKERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One swappable operation.

    Attributes:
        name: as in ``use(name="variant")``.
        title: a few words.
        reference: the torch function whose signature and roundings every variant has.
        oracle: the same arguments to a dict of float64 outputs without roundings.
        flavours: kinds of inputs that are different code paths in a kernel; "" is the plain one.
        gates: how far each output may be from the oracle, relative to the reference's own error.
        judge: for outputs that are choices, or that follow from another output:
            ``(case, outputs) -> [(gate, found, limit), …]``.
        where: "layer", "model" or "drafter".
    """

    name: str
    title: str
    reference: Callable[..., Any]
    oracle: Callable[..., Outputs] | None
    flavours: tuple[str, ...] = ("",)
    gates: dict[str, Gate] = field(default_factory=dict)
    judge: Callable[[Case, Outputs], list[tuple[str, float, float]]] | None = None
    where: str = "layer"

    def case(self, request: Request) -> Case:
        """Fresh random arguments of these sizes.

        Raises:
            KernelError: a flavour that the operation does not have, or sizes it cannot have.
        """
        if request.flavour not in self.flavours:
            raise KernelError(
                f"{self.name} has no flavour {request.flavour!r:.40}; it has "
                f"{', '.join(repr(f) for f in self.flavours)}"
            )
        if request.tokens < 0:
            raise KernelError(f"tokens must be 0 or more, not {request.tokens}")
        return MAKERS[self.name](request)

    def gate(self, output: str) -> Gate:
        """The gate of one output."""
        return self.gates.get(output, Gate())


_TITLES = {
    "qkvg": "packed Q+K+V+gate projection",
    "qkv_write": "QK norm, RoPE or SSMax, KV-cache write",
    "decode_attention": "attention of a few tokens over the cache",
    "prefill_attention": "attention of whole chunks",
    "output_gate": "sigmoid gate on the attention output",
    "boundary": "post-norm, depth-scaled add, next pre-norm",
    "router": "FP32 router: scores, biased top-k, weights",
    "expert_mlp": "mixture of SwiGLU experts",
    "dense_mlp": "SwiGLU MLP",
    "rms_norm": "RMSNorm",
    "softcap": "softcap of the logits",
    "dynamic_conv": "DFlash2 grouped dynamic convolution",
    "conv_residual_norm": "the same, residual add, next norm",
    "context_kv_write": "DFlash2 context keys and values",
    "candidate_edges": "DFlash2 scores of candidate pairs",
    "selector_walk": "DFlash2 walk over the candidates",
}
# A fused attention rounds its probabilities to the activation dtype before they meet V.
_ATTENTION = {"o": Gate(relative=2.0, row=2.5, element=4.0)}
_FLAVOURS: dict[str, tuple[str, ...]] = {
    "qkv_write": (
        "sliding", "full", "sliding fp8", "full fp8", "sliding joint", "full joint",
        "sliding sequence", "full sequence",
    ),
    "decode_attention": (
        "sliding", "full", "sliding verify", "full verify", "sliding fp8", "full fp8",
    ),
    "prefill_attention": (
        "sliding", "full", "sliding ragged", "full ragged", "sliding batch", "full batch",
    ),
    "router": ("", "groups"),
    "context_kv_write": ("", "fp8", "joint"),
    "selector_walk": ("", "sampled"),
}  # fmt: skip
_GATES = {"decode_attention": _ATTENTION, "prefill_attention": _ATTENTION}
_JUDGES = {
    "router": judges.router,
    "selector_walk": judges.selector_walk,
    "boundary": judges.boundary,
    "conv_residual_norm": judges.conv_residual_norm,
}


def _operation(name: str) -> Operation:
    drafter = name in DRAFTER_OPS
    room = reference_dflash2 if drafter else reference
    return Operation(
        name=name,
        title=_TITLES[name],
        reference=getattr(room, name),
        oracle=judges.DRAFTER_ORACLES.get(name) if drafter else getattr(oracle, name, None),
        flavours=_FLAVOURS.get(name, ("",)),
        gates=_GATES.get(name, {}),
        judge=_JUDGES.get(name),
        where="layer" if name in LAYER_OPS else "model" if name in MODEL_OPS else "drafter",
    )


OPERATIONS: dict[str, Operation] = {name: _operation(name) for name in OPS}


def operation(name: str) -> Operation:
    """The operation of this name.

    Raises:
        KernelError: there is none.
    """
    if name not in OPERATIONS:
        raise KernelError(f"there is no operation {name!r:.60}; there are {', '.join(OPERATIONS)}")
    return OPERATIONS[name]


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
