"""What happens inside Beam for a prompt: the names of this room, router load and layer table.

``capture`` (capture.py) runs a prompt and keeps what was computed; ``logit_lens`` (lens.py) reads
the stream at every depth; ``intervene`` (intervene.py) changes what the model computes, and
captures inside its block see it. None of it is in the model's code path when it is not in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from workbench.errors import InspectionError
from workbench.model.capture import Capture, KVContents, attention_probabilities, capture
from workbench.model.config import AttentionType, BeamConfig, MlpType
from workbench.model.display import Shown, ranges
from workbench.model.intervene import intervene
from workbench.model.lens import LogitLens, logit_lens
from workbench.model.tensors import tensor_specs

__all__ = [
    "Capture", "KVContents", "LayerRow", "LogitLens", "RouterLoad", "attention_probabilities",
    "capture", "intervene", "layer_table", "logit_lens", "router_load",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RouterLoad(Shown):
    """How often each expert was chosen; rows are the captured sparse layers in order.

    ``counts`` int64 ``[layers, experts]``; ``layers`` names the rows; ``tokens`` is T.
    """

    layers: tuple[int, ...]
    tokens: int
    counts: Tensor

    @property
    def share(self) -> Tensor:
        """Each expert's part of its layer's choices, float64 ``[layers, experts]``."""
        return self.counts.double() / self.counts.sum(-1, keepdim=True)

    @property
    def imbalance(self) -> Tensor:
        """Busiest expert's load over the mean load, float64 ``[layers]``; 1 is perfectly even."""
        return self.share.amax(-1) * self.counts.shape[-1]

    def __repr__(self) -> str:
        experts = self.counts.shape[-1]
        return f"RouterLoad(layers {ranges(self.layers)}, {experts} experts, {self.tokens} tokens)"


def router_load(captured: Capture) -> RouterLoad:
    """Count the experts chosen in a capture.

    Raises:
        InspectionError: the capture holds no router choices.
    """
    if not captured.router_ids:
        raise InspectionError(
            "the capture holds no router choices; call capture(..., router=True) and, if layers "
            "are named, name a sparse one"
        )
    layers = tuple(sorted(captured.router_ids))
    experts = captured.config.num_experts
    counts = [captured.router_ids[i].flatten().bincount(minlength=experts) for i in layers]
    return RouterLoad(layers=layers, tokens=len(captured.tokens), counts=torch.stack(counts))


class LayerRow(TypedDict):
    """One layer in plain values; ``window`` in tokens, None for full attention."""

    index: int
    attention: AttentionType
    window: int | None
    position_encoding: str
    mlp: MlpType
    experts: int
    experts_per_token: int
    parameters: int


def layer_table(config: BeamConfig) -> list[LayerRow]:
    """What each layer is, one plain row a layer; ``experts`` is 0 in dense layers."""
    parameters = [0] * config.num_hidden_layers
    for spec in tensor_specs(config):
        if spec.layer is not None:
            parameters[spec.layer] += spec.size
    return [
        LayerRow(
            index=i,
            attention=config.layer_types[i],
            window=None if config.is_full(i) else config.sliding_window,
            position_encoding="none + SSMax" if config.is_full(i) else "RoPE",
            mlp=config.mlp_layer_types[i],
            experts=config.num_experts if config.is_sparse(i) else 0,
            experts_per_token=config.num_experts_per_tok if config.is_sparse(i) else 0,
            parameters=parameters[i],
        )
        for i in range(config.num_hidden_layers)
    ]
