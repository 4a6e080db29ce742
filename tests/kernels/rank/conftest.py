"""Small ranks for the tests: every kind of layer, grouped experts, heads that share keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench.kernels.rank import RankState, RankWeights
from workbench.model.config import BeamConfig


def small_config(**changes: Any) -> BeamConfig:
    """Dense sliding, sparse full, sparse sliding; widths that are no powers of two."""
    fields: dict[str, Any] = {
        "vocab_size": 200,
        "hidden_size": 96,
        "intermediate_size": 80,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
        "mlp_layer_types": ("dense", "sparse", "sparse"),
        "sliding_window": 24,
        "max_position_embeddings": 4096,
        "routed_scaling_factor": 2.5,
        "final_logit_softcapping": 30.0,
    }
    return BeamConfig(**(fields | changes))


Make = Callable[..., tuple[RankWeights, RankState]]


@pytest.fixture
def rank(one_thread: None) -> Make:
    """Weights of one of two ranks, and a state."""

    def make(
        context: int = 40,
        *,
        dtype: torch.dtype = torch.float32,
        batch: int = 1,
        headroom: int = 16,
        tp: int = 2,
        layout: Any = "HI",
        experts: Any = "same",
        **changes: Any,
    ) -> tuple[RankWeights, RankState]:
        weights = RankWeights.random(
            small_config(**changes), tp, device="cpu", dtype=dtype, down_layout=layout,
            experts=experts,
        )  # fmt: skip
        # The few values of a small layer would leave everything near zero otherwise. FP8 experts
        # stay what their seed makes them.
        kept = [weights.embed]
        if experts == "fp8":
            kept += [each for layer in weights.layers for each in layer.of_experts()]
        places = {each.data_ptr() for each in kept}
        for tensor in weights.tensors():
            if tensor.dim() > 1 and tensor.data_ptr() not in places:
                tensor.mul_(5)
        return weights, RankState(weights, context, batch=batch, headroom=headroom)

    return make
