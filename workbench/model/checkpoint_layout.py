"""Which part of which model parameter a checkpoint tensor is: the one table loading and saving use.

The model stores together what it reads together (packed Q+K+V+gate rows, experts as two stacks, the
down projections of experts transposed); a checkpoint stores every projection on its own, under its
Hugging Face name. With tensor parallelism a rank holds a slice of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from workbench.model.config import BeamConfig
from workbench.model.parallel import Shard
from workbench.model.tensors import TensorSpec, tensor_specs

Index = tuple[int | slice, ...]

_ALL = slice(None)
_NORMS = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "pre_feedforward_layernorm.weight": "pre_mlp_norm",
    "post_feedforward_layernorm.weight": "post_mlp_norm",
}
_WHOLE = {
    "model.norm.weight": "norm",
    **_NORMS,
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.correction_bias",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A copy between checkpoint and model: ``parameter[region]`` is ``tensor[source]``.

    ``transposed``: the last two axes are swapped between the two.
    """

    parameter: str
    source: Index
    region: Index = (_ALL,)
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTensor:
    """All experts of a layer in one checkpoint tensor; ``parts`` maps plain names to targets."""

    shape: tuple[int, ...]
    parts: Mapping[str, Target]


def tensor_targets(config: BeamConfig, shard: Shard | None = None) -> dict[str, Target]:
    """Where each tensor of :func:`~workbench.model.tensors.tensor_specs` lives in ``Beam``.

    The targets of all tensors together cover each element of each parameter of
    ``Beam(config, shard)`` exactly once.
    """
    shard = shard or Shard()
    return {spec.name: _target(spec, config, shard) for spec in tensor_specs(config)}


def float32_parameters(config: BeamConfig) -> frozenset[str]:
    """Parameters of ``Beam`` that are float32 whatever the model's dtype: the routers'."""
    specs = (spec for spec in tensor_specs(config) if spec.fp32)
    return frozenset(_target(spec, config, Shard()).parameter for spec in specs)


def fused_tensors(
    config: BeamConfig, targets: Mapping[str, Target]
) -> Iterator[tuple[str, FusedTensor]]:
    """The other accepted form of the experts, as (name, tensor), two for each sparse layer.

    ``mlp.experts.gate_up_proj [E, 2 I, H]`` (gate rows, then up rows) and
    ``mlp.experts.down_proj [E, H, I]``.
    """
    experts, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    for layer in config.sparse_layers:
        prefix = f"model.layers.{config.original(layer)}.mlp.experts."
        for fused, shape, words in (
            ("gate_up_proj", (experts, 2 * width, hidden), (("gate", 0), ("up", width))),
            ("down_proj", (experts, hidden, width), (("down", 0),)),
        ):
            parts = {}
            for expert in range(experts):
                for word, offset in words:
                    name = f"{prefix}{expert}.{word}_proj.weight"
                    plain = targets[name]
                    rows, *rest = plain.source
                    if isinstance(rows, slice) and offset:
                        rows = slice(rows.start + offset, rows.stop + offset)
                    parts[name] = Target(
                        parameter=plain.parameter,
                        source=(expert, rows, *rest),
                        region=plain.region,
                        transposed=plain.transposed,
                    )
            yield prefix + fused, FusedTensor(shape=shape, parts=parts)


def _target(spec: TensorSpec, config: BeamConfig, shard: Shard) -> Target:
    if spec.layer is None:
        if spec.part == "norms":
            return Target(parameter="norm", source=(_ALL,))
        name = "embed_tokens" if spec.part == "embedding" else "lm_head"
        return Target(parameter=name, source=(shard.part(config.vocab_size),))
    prefix = f"layers.{spec.layer}."
    local = spec.name.removeprefix(f"model.layers.{config.original(spec.layer)}.")
    if local in _WHOLE:
        return Target(parameter=prefix + _WHOLE[local], source=(_ALL,))
    if local.startswith("self_attn."):
        return _attention(prefix + "attention.", local.split(".")[1], config, shard)
    return _swiglu(prefix + "mlp.", local.split(".")[-2], spec.expert, config, shard)


def _attention(prefix: str, name: str, config: BeamConfig, shard: Shard) -> Target:
    heads, kv_heads = shard.part(config.num_attention_heads), shard.kv_heads(config)
    if name == "gate_bias":
        return Target(parameter=prefix + "gate_bias", source=(heads,))
    if name in ("q_norm", "k_norm"):
        row = 0 if name == "q_norm" else 1
        return Target(parameter=prefix + "qk_norm", source=(_ALL,), region=(row,))
    queries = _scaled(heads, config.head_dim)
    keys = _scaled(kv_heads, config.head_dim)
    if name == "o_proj":
        return Target(parameter=prefix + "o_proj", source=(_ALL, queries))
    start = 0
    for packed, rows in (
        ("q_proj", queries), ("k_proj", keys), ("v_proj", keys), ("gate_proj", queries)
    ):  # fmt: skip
        count = rows.stop - rows.start
        if packed == name:
            break
        start += count
    return Target(
        parameter=prefix + "qkvg", source=(rows, _ALL), region=(slice(start, start + count),)
    )


def _swiglu(prefix: str, name: str, expert: int | None, config: BeamConfig, shard: Shard) -> Target:
    stack: Index = () if expert is None else (expert,)
    rows = shard.part(config.intermediate_size if expert is None else config.moe_intermediate_size)
    if name == "down_proj":
        return Target(
            parameter=prefix + "down",
            source=(_ALL, rows),
            region=stack or (_ALL,),
            transposed=expert is not None,
        )
    count = rows.stop - rows.start
    start = 0 if name == "gate_proj" else count
    return Target(
        parameter=prefix + "gate_up",
        source=(rows, _ALL),
        region=(*stack, slice(start, start + count)),
    )


def _scaled(heads: slice, width: int) -> slice:
    return slice(heads.start * width, heads.stop * width)
