"""The tensors of a Beam checkpoint, in Hugging Face names, and the parameter counts they add up to.

One table serves loading (what must be in the files), counting (501.01 B) and drawing (treemap).
Source of names and shapes: ``docs/beam.md`` facts read off vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from workbench.model.config import BeamConfig

Part = Literal["embedding", "head", "attention", "norms", "dense_mlp", "router", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One checkpoint tensor: its name, full (unsharded) shape, model part and layer.

    ``layer`` counts the layers of the config; in a part of a model the name has another number.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int | None = None
    expert: int | None = None
    fp32: bool = False  # router tensors stay in float32 whatever the model's dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def tensor_specs(config: BeamConfig) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint of ``config``, in file order."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield TensorSpec(name="model.embed_tokens.weight", shape=(vocab, hidden), part="embedding")
    for layer in range(config.num_hidden_layers):
        yield from _layer_specs(config, layer)
    yield TensorSpec(name="model.norm.weight", shape=(hidden,), part="norms")
    yield TensorSpec(name="lm_head.weight", shape=(vocab, hidden), part="head")


def _layer_specs(config: BeamConfig, layer: int) -> Iterator[TensorSpec]:
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    shapes: list[tuple[str, tuple[int, ...], Part]] = [
        ("self_attn.q_proj.weight", (q, hidden), "attention"),
        ("self_attn.k_proj.weight", (kv, hidden), "attention"),
        ("self_attn.v_proj.weight", (kv, hidden), "attention"),
        ("self_attn.gate_proj.weight", (q, hidden), "attention"),
        ("self_attn.o_proj.weight", (hidden, q), "attention"),
        ("self_attn.q_norm.weight", (config.head_dim,), "norms"),
        ("self_attn.k_norm.weight", (config.head_dim,), "norms"),
        ("self_attn.gate_bias", (config.num_attention_heads,), "attention"),
        ("input_layernorm.weight", (hidden,), "norms"),
        ("post_attention_layernorm.weight", (hidden,), "norms"),
        ("pre_feedforward_layernorm.weight", (hidden,), "norms"),
        ("post_feedforward_layernorm.weight", (hidden,), "norms"),
    ]
    prefix = f"model.layers.{config.original(layer)}."
    for name, shape, part in shapes:
        yield TensorSpec(name=prefix + name, shape=shape, part=part, layer=layer)
    if not config.is_sparse(layer):
        for name, shape in _swiglu(hidden, config.intermediate_size):
            yield TensorSpec(name=f"{prefix}mlp.{name}", shape=shape, part="dense_mlp", layer=layer)
        return
    for name, router_shape in (
        ("gate.weight", (config.num_experts, hidden)),
        ("gate.e_score_correction_bias", (config.num_experts,)),
    ):
        yield TensorSpec(
            name=f"{prefix}mlp.{name}", shape=router_shape, part="router", layer=layer, fp32=True
        )
    for expert in range(config.num_experts):
        for name, shape in _swiglu(hidden, config.moe_intermediate_size):
            yield TensorSpec(
                name=f"{prefix}mlp.experts.{expert}.{name}",
                shape=shape,
                part="experts",
                layer=layer,
                expert=expert,
            )


def _swiglu(hidden: int, width: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (
        ("gate_proj.weight", (width, hidden)),
        ("up_proj.weight", (width, hidden)),
        ("down_proj.weight", (hidden, width)),
    )


def parameters_by_part(config: BeamConfig) -> dict[Part, int]:
    """Parameters in each part of the whole model. They add up to the total."""
    counts: dict[Part, int] = {
        "embedding": 0, "head": 0, "attention": 0, "norms": 0,
        "dense_mlp": 0, "router": 0, "experts": 0,
    }  # fmt: skip
    for spec in tensor_specs(config):
        counts[spec.part] += spec.size
    return counts


def total_parameters(config: BeamConfig) -> int:
    """All parameters (router correction biases included)."""
    return sum(parameters_by_part(config).values())


def active_parameters(config: BeamConfig) -> int:
    """Parameters one token touches: ``num_experts_per_tok`` experts a sparse layer, all the rest.

    Embedding and head count in full, as in the published 23 B.
    """
    counts = parameters_by_part(config)
    idle = counts["experts"] // config.num_experts
    return sum(counts.values()) - idle * (config.num_experts - config.num_experts_per_tok)
