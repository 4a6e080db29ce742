"""The waterfall's stages: which forms of the operations each adds, and who published it.

``published`` are the optimisations that the announcement of the engine's Beam support names,
``engine`` those read off the engine's code, ``ours`` what this workbench adds. Stages from
``fused`` on are steps of their own and replace the chain of single operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workbench.errors import KernelError
from workbench.kernels.rank.chain import RankStep
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
    """Forms of all stages up to ``upto``, but those of ``leave_out``."""
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


def _persistent(weights: RankWeights, state: RankState) -> Step:
    import importlib

    made: Step = importlib.import_module("workbench.kernels.rank.persistent").PersistentStep(
        weights, state
    )
    return made


def make(
    name: str, weights: RankWeights, state: RankState, config: FusedConfig | None = None
) -> Step:
    """The step of a stage: everything up to it, or a step of its own; ``config`` of the fused ones.

    Raises:
        KernelError: no such stage, or it cannot run here.
    """
    one = stage(name)
    if name == "persistent":
        return _persistent(weights, state)
    if one.whole:
        return _fused(weights, state, name == "fused_pdl", config)
    return RankStep(weights, state, cumulative(name))
