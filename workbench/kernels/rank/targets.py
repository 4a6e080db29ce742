"""The fused chain compiled for GPUs that are not here, at the sizes of the full rank."""

from __future__ import annotations

from typing import Any

from workbench.kernels.rank.fused import FusedStep
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import ExpertFormat, RankWeights
from workbench.kernels.triton_compile import Job
from workbench.model.config import BeamConfig

# Of beam-501b: three dense layers, a full sparse one, a sliding sparse one.
LAYERS = 5


def job(
    config: BeamConfig, tp: int = 8, context: int = 4096, experts: ExpertFormat = "same"
) -> Job:
    """What :func:`workbench.kernels.triton_compile.compile_in_child` takes."""
    return Job(
        name=f"fused decode step, TP{tp}, context {context}, experts {experts}",
        call=f"{__name__}:compile_step",
        argument={
            "config": config.to_dict(),
            "tp": tp,
            "context": context,
            "experts": experts,
        },
    )


def compile_step(argument: dict[str, Any]) -> None:
    """Call the fused step on tensors without memory, in the compiling child."""
    config = BeamConfig.from_dict(argument["config"])
    layers = min(LAYERS, config.num_hidden_layers)
    weights = RankWeights.random(
        config, argument["tp"], layers=layers, device="meta", experts=argument["experts"]
    )
    FusedStep(weights, RankState(weights, argument["context"]))()
