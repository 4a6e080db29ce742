"""The waterfall's stages: which forms of the operations each adds, and who published it.

``published`` are the optimisations that the announcement of the engine's Beam support names,
``engine`` those read off the engine's code, ``ours`` what this workbench adds. Stages from
``fused`` on are steps of their own and replace the chain of single operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from workbench.errors import KernelError
from workbench.kernels.rank import fp8
from workbench.kernels.rank.chain import NAIVE, RankStep, resolved
from workbench.kernels.rank.fused_config import FusedConfig
from workbench.kernels.rank.reference import Step
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import RankWeights

Origin = Literal["start", "published", "engine", "ours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One bar: ``changes`` are forms of operations, none for a step of its own (``name`` says)."""

    name: str
    title: str
    origin: Origin
    changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether it is a step of its own instead of a switch of the chain."""
        return not self.changes and self.origin != "start"


STAGES: tuple[Stage, ...] = (
    Stage(name="naive", title="plain torch, one CUDA graph", origin="start"),
    Stage(
        name="norms",
        title="fused norm and residual",
        origin="published",
        changes={"boundary": "triton", "rms_norm": "triton"},
    ),
    Stage(
        name="merged",
        title="merged Q, K, V and gate projection",
        origin="published",
        changes={"qkvg": "torch"},
    ),
    Stage(
        name="router",
        title="FP32 router kernel",
        origin="published",
        changes={"router": "triton"},
    ),
    Stage(
        name="kv",
        title="fused KV-cache update",
        origin="published",
        changes={"qkv_write": "triton"},
    ),
    Stage(
        name="dense",
        title="dense-MLP kernel",
        origin="published",
        changes={"dense_mlp": "triton"},
    ),
    Stage(
        name="gate",
        title="output-gate kernel",
        origin="engine",
        changes={"output_gate": "triton"},
    ),
    Stage(
        name="attention",
        title="split decode attention",
        origin="ours",
        changes={"decode_attention": "triton"},
    ),
    Stage(
        name="experts",
        title="experts read in place",
        origin="ours",
        changes={"expert_mlp": "rows"},
    ),
    Stage(
        name="products",
        title="matrix-vector kernels for qkvg, o_proj, head",
        origin="ours",
        changes={"qkvg": "triton", "o_proj": "triton", "lm_head": "triton", "softcap": "triton"},
    ),
    Stage(name="fused", title="fused chain", origin="ours"),
    Stage(name="fused_pdl", title="fused chain, dependent launches", origin="ours"),
    Stage(name="load", title="fused chain of many rows, dependent launches", origin="ours"),
    Stage(name="persistent", title="one persistent CUDA kernel", origin="ours"),
)
NAMES = tuple(stage.name for stage in STAGES)


def stage(name: str) -> Stage:
    """The stage of this name.

    Raises:
        KernelError: there is none.
    """
    for one in STAGES:
        if one.name == name:
            return one
    raise KernelError(f"there is no variant {name!r:.60} of the step; there are {', '.join(NAMES)}")


def cumulative(upto: str, leave_out: Sequence[str] = ()) -> dict[str, str]:
    """Forms of all stages up to ``upto``, but those of ``leave_out``.

    Raises:
        KernelError: a name that no stage has.
    """
    for name in (upto, *leave_out):
        stage(name)
    forms: dict[str, str] = {}
    for one in STAGES:
        if one.name not in leave_out:
            forms.update(one.changes)
        if one.name == upto:
            break
    return forms


def _fused(
    weights: RankWeights, state: RankState, dependent: bool, config: FusedConfig | None
) -> Step:
    from workbench.kernels.rank.fused import FusedStep

    return FusedStep(weights, state, dependent=dependent, config=config)


def refuse_foreign(weights: RankWeights, state: RankState) -> None:
    """Refuse a state that was made for other weights: kernels would read beside its caches.

    Raises:
        KernelError: with what differs.
    """
    k, count = state.k[0], len(weights.layers)  # a state of more layers will do
    pairs = {
        "sizes": (state.shapes, weights.shapes),
        "layers": ([rows.shape[1] for rows in state.k[:count]],
                   [state.rows_of(layer.full) for layer in weights.layers]),
        "dtype": (k.dtype, weights.dtype),
        "device": (k.device, weights.device),
    }  # fmt: skip
    other = [what for what, (found, wanted) in pairs.items() if found != wanted]
    if other:
        raise KernelError(
            f"this state is of other weights ({', '.join(other)} differ): make one with "
            "RankState(weights, context)"
        )


def _refuse_persistent(weights: RankWeights, state: RankState, device: torch.device) -> None:
    """What the persistent kernel refuses and sizes do not; its own check says the rest."""
    if weights.experts != "same":
        raise KernelError(
            f"the persistent kernel reads BF16 experts, not {fp8.DESCRIPTION}; use a Triton variant"
        )
    if state.batch != 1:
        raise KernelError(
            f"the persistent kernel decodes one sequence, not {state.batch}; use --batch 1"
        )
    if device.type != "cuda":
        raise KernelError(f"the persistent kernel runs on a CUDA GPU, not on {device}")


def _persistent(weights: RankWeights, state: RankState) -> Step:
    import importlib

    _refuse_persistent(weights, state, weights.device)
    made: Step = importlib.import_module("workbench.kernels.rank.persistent").PersistentStep(
        weights, state
    )
    return made


def refuse(name: str, weights: RankWeights, state: RankState, device: torch.device) -> None:
    """Refuse what :func:`make` would refuse on ``device``; weights and state may be sizes only.

    Raises:
        KernelError: no such stage, or it cannot run there.
    """
    one = stage(name)
    if name == "persistent":
        _refuse_persistent(weights, state, device)
    elif name == "load":
        from workbench.kernels.rank.load_step import refuse_load

        refuse_load(weights, device)
    elif one.whole:
        from workbench.kernels.rank.fused import refuse_fused

        refuse_fused(weights, state, device, name == "fused_pdl")
    else:
        resolved({**NAIVE, **cumulative(name)}, weights, state, device)


def make(
    name: str, weights: RankWeights, state: RankState, config: FusedConfig | None = None
) -> Step:
    """The step of a stage: everything up to it, or a step of its own; ``config`` of the fused ones.

    Raises:
        KernelError: no such stage, it cannot run here, or the state is not of these weights.
    """
    one = stage(name)
    refuse_foreign(weights, state)
    if name == "persistent":
        return _persistent(weights, state)
    if name == "load":
        from workbench.kernels.rank.load_state import LoadState
        from workbench.kernels.rank.load_step import LoadStep

        return LoadStep(weights, LoadState.over(state, weights))
    if one.whole:
        return _fused(weights, state, name == "fused_pdl", config)
    return RankStep(weights, state, cumulative(name))
