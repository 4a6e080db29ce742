"""Recorded starts of vLLM (``data/startup_logs``) and the model that they served."""

from __future__ import annotations

from pathlib import Path

from workbench.model.config import BeamConfig
from workbench.model.presets import beam_501b

FOLDER = Path(__file__).parent / "data" / "startup_logs"


def served_rank(layers: int) -> BeamConfig:
    """The shapes of one of eight tensor-parallel ranks of the full model, described as a model."""
    full = beam_501b().config
    return full.replace(
        num_hidden_layers=layers,
        layer_types=full.layer_types[:layers],
        mlp_layer_types=full.mlp_layer_types[:layers],
        num_attention_heads=6,
        num_key_value_heads=1,
        intermediate_size=1536,
        moe_intermediate_size=320,
        vocab_size=20480,
        max_position_embeddings=131_072,
    )
