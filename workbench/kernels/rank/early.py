"""What a run of the waterfall would refuse, known from sizes alone: before anything is measured."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress

import torch

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels.footprint import free_bytes
from workbench.kernels.rank.stages import refuse
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import (
    SPARE_BYTES,
    ExpertFormat,
    RankWeights,
    rank_bytes,
    refuse_too_large,
)
from workbench.kernels.triton_runtime import TritonUnavailableError
from workbench.model.config import BeamConfig


def refuse_early(
    config: BeamConfig,
    tp: int,
    *,
    layers: int | None,
    device: torch.device,
    dtype: torch.dtype,
    experts: ExpertFormat,
    context: int,
    batch: int,
    variants: Sequence[str],
) -> None:
    """Refuse a run on ``device`` that cannot be; ``variants`` are those that were asked for.

    Raises:
        KernelError: ``tp``, ``layers``, ``context`` or ``batch`` do not suit the model, FP8 experts
            of layers that have none, weights or caches do not fit the free memory, or a variant
            cannot run on them there.
    """
    # torch imports Triton for tensors without memory, and whoever is first decides for all whether
    # kernels are interpreted: let it be the one who knows.
    with suppress(TritonUnavailableError):
        importlib.import_module("workbench.kernels.triton_runtime").INTERPRETED  # noqa: B018
    weights = RankWeights.random(
        config, tp, layers=layers, device="meta", dtype=dtype, experts=experts
    )
    if experts == "fp8" and all(layer.dense for layer in weights.layers):
        raise KernelError(
            f"the first {len(weights.layers)} layers of this model have no experts, so none can be "
            "FP8; leave out --experts fp8, or take more --layers"
        )
    state = RankState(weights, context, batch=batch)
    s, count = weights.shapes, len(weights.layers)
    refuse_too_large(config, s, count, device, dtype, experts)
    free = free_bytes(str(device))
    held = (*state.k, *state.v, state.rope, state.logits)
    need = sum(tensor.numel() * tensor.element_size() for tensor in held)
    beside = rank_bytes(config, s, count, dtype, experts)
    beside += SPARE_BYTES // 2 if device.type == "cuda" else 0
    if free is not None and need + beside > free:
        raise KernelError(
            f"the caches of {batch} sequences of {context} tokens need {hardware.gigabytes(need)}, "
            f"and beside the weights {hardware.gigabytes(max(0, free - beside))} of memory are "
            f"left on {device}; choose a shorter --context or fewer sequences (--batch)"
        )
    for name in variants:
        refuse(name, weights, state, device)
