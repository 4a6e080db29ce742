"""The steps of several ranks compiled for GPUs that are not here, at the sizes of a full rank."""

from __future__ import annotations

from typing import Any

from workbench.kernels.parallel.mailbox import Mailbox
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_fused import TpFusedStep
from workbench.kernels.parallel.tp_load import TpLoadStep
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.targets import LAYERS
from workbench.kernels.rank.weights import ExpertFormat, RankWeights
from workbench.kernels.triton_compile import Job
from workbench.model.config import BeamConfig


def job(
    config: BeamConfig,
    world: int,
    batch: int,
    tp: int = 8,
    context: int = 4096,
    *,
    exchange: str = "boundary",
    experts: ExpertFormat = "same",
) -> Job:
    """What :func:`workbench.kernels.triton_compile.compile_in_child` takes."""
    return Job(
        name=f"decode step of {world} of {tp} ranks, batch {batch}, context {context}, exchange "
        f"{exchange}, experts {experts}",
        call=f"{__name__}:compile_step",
        argument={
            "config": config.to_dict(),
            "world": world,
            "batch": batch,
            "tp": tp,
            "context": context,
            "exchange": exchange,
            "experts": experts,
        },
    )


def compile_step(argument: dict[str, Any]) -> None:
    """Call the step of the last rank on tensors without memory, in the compiling child."""
    config, world = BeamConfig.from_dict(argument["config"]), argument["world"]
    layers = min(LAYERS, config.num_hidden_layers)
    weights = RankWeights.random(
        config, argument["tp"], layers=layers, device="meta", experts=argument["experts"]
    )
    hidden, batch, context = weights.shapes.hidden, argument["batch"], argument["context"]
    mailbox = Mailbox.virtual(world, hidden, weights.dtype, device="meta")[-1]
    ranks = Ranks(rank=world - 1, world=world, device=weights.device, backend="none")
    if batch == 1:
        state = RankState(weights, context)
        TpFusedStep(weights, state, ranks, exchange=argument["exchange"], mailbox=mailbox)()
        return
    for two in (False, True):
        rows = LoadState(weights, [context] * batch)
        TpLoadStep(weights, rows, ranks, exchange=argument["exchange"], mailbox=mailbox, two=two)()
