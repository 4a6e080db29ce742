"""What a configuration, and a plan where there is one, says each layer of an engine must be.

Everything here is computed without an engine: heads, windows and kinds of layers from the
configuration, precisions and the split from the plan, KV cache groups by our own statement of the
engine's rule (``workbench.model.kv_planner``). What the configuration leaves open (which attention
backend, which kernel) is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from workbench.model.asked import SizingError
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_planner import KVLayer, KVPlan, plan_groups
from workbench.model.layout import Layout
from workbench.model.weights import Precision, matrices, matrix_bytes

Whose = Literal["target", "drafter"]
Source = Literal["config", "plan", "setting", "rule", "others", ""]
Value = str | int | float | bool | tuple[str | int, ...] | None
Key = tuple[Whose, int]  # whose layer, and which of its layers from 0

NONE = "none"  # a value that is known and is none; None is one that is not known
ALL_TOKENS = "all tokens"

SOURCES: Mapping[Source, str] = {
    "config": "the configuration",
    "plan": "the plan",
    "setting": "what the engine was asked for",
    "rule": "our statement of the engine's rule",
    "others": "most layers of its kind",
    "": "nothing to compare with",
}

# Bytes of one number of the KV cache.
KV_BYTES: Mapping[str, int] = {"fp8": 1, "bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What the expectation stands on, beside the configurations.

    ``dtype`` is that of what is not quantised, ``kv_dtype`` a name of ``KV_BYTES`` or None where it
    is none of these. ``precision`` is None where the checkpoint is quantised and no plan says how.
    ``kv_plan`` is None where the grouping rule cannot be applied.
    """

    layout: Layout
    dtype: str
    precision: Precision | None
    precision_source: Source
    kv_dtype: str | None
    kv_source: Source
    split_source: Source
    kv_plan: KVPlan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A value, and what it follows from."""

    value: Value
    source: Source


def kv_name(text: str | None, dtype: str | None) -> str | None:
    """The engine's name of a KV cache precision, with its synonyms taken together."""
    if text is None or text == "auto":
        return dtype
    if text in ("fp8", "fp8_e4m3"):
        return "fp8"
    return {"bf16": "bfloat16", "half": "float16", "float": "float32"}.get(text, text)


def kv_groups(
    config: BeamConfig,
    drafter: DFlash2Config | None,
    layout: Layout,
    kv_dtype: str | None,
    block_size: int,
    *,
    hybrid: bool = True,
) -> KVPlan | None:
    """Groups by our rule; None for a precision or layers that it says nothing of."""
    width = KV_BYTES.get(kv_dtype or "")
    if width is None:
        return None
    layers = [
        KVLayer(
            index=i,
            window=None if config.is_full(i) else config.sliding_window,
            token_bytes=2 * kv_heads(config, layout) * config.head_dim * width,
        )
        for i in range(config.num_hidden_layers)
    ]
    if drafter is not None:
        layers += [
            KVLayer(
                index=config.num_hidden_layers + i,
                window=drafter.sliding_window,
                token_bytes=2 * kv_heads(drafter, layout) * drafter.head_dim * width,
                drafter=True,
            )
            for i in range(drafter.num_hidden_layers)
        ]
    try:
        return plan_groups(tuple(layers), block_size, hybrid=hybrid)
    except SizingError:
        return None


def kv_heads(config: BeamConfig | DFlash2Config, layout: Layout) -> int:
    """KV heads on one rank; beyond as many ranks as heads, each has a copy of one."""
    return max(1, config.num_key_value_heads // layout.tp)


def key_of(layer: KVLayer, config: BeamConfig) -> Key:
    """Whose layer a layer of the planner is."""
    if layer.drafter:
        return "drafter", layer.index - config.num_hidden_layers
    return "target", layer.index


def expected_layers(
    config: BeamConfig, drafter: DFlash2Config | None, basis: Basis
) -> dict[Key, dict[str, Expected]]:
    """Every field of every layer that can be said beforehand; the drafter's layers last."""
    found: dict[Key, dict[str, Expected]] = {}
    for i in range(config.num_hidden_layers):
        window = None if config.is_full(i) else config.sliding_window
        fields = _attention(config, window, basis)
        fields |= _mlp(config, i, basis)
        found["target", i] = fields
    if drafter is not None:
        for i in range(drafter.num_hidden_layers):
            fields = _attention(drafter, drafter.sliding_window, basis)
            # A drafter is stored unquantised, whatever its target is.
            fields["attention weights"] = Expected(value=basis.dtype, source="config")
            fields["MLP"] = Expected(value="dense", source="config")
            fields["MLP weights"] = Expected(value=basis.dtype, source="config")
            found["drafter", i] = fields
        size = _drafter_layer_bytes(config, drafter, basis)
        for i in range(drafter.num_hidden_layers):
            found["drafter", i]["weight bytes"] = Expected(value=size, source="config")
    if basis.kv_plan is not None:
        for group in basis.kv_plan.groups:
            kept = ALL_TOKENS if group.window is None else f"window {group.window}"
            for place, page in zip(group.layers, group.pages, strict=True):
                fields = found.get(key_of(basis.kv_plan.layers[place], config), {})
                fields["cache keeps"] = Expected(value=kept, source="rule")
                fields["block size"] = Expected(value=group.block_size, source="rule")
                fields["page bytes"] = Expected(value=page, source="rule")
    return found


def expected_switches(
    config: BeamConfig, drafter: DFlash2Config | None, layout: Layout
) -> dict[Key, dict[str, Expected]]:
    """Switches of the engine's own Beam that follow from the configuration, where it has them.

    vLLM 0.33, ``models/beam/nvidia``: full layers have no RoPE; the four projections are one unless
    KV heads are copied (``attention.py``); a drafter's block sees itself whole (``dflash2.py``).
    """
    merged = config.num_key_value_heads >= layout.tp
    found: dict[Key, dict[str, Expected]] = {
        ("target", i): {
            "self_attn.disable_rope": Expected(value=config.is_full(i), source="config"),
            "self_attn.merged_qkv_gate": Expected(value=merged, source="rule"),
        }
        for i in range(config.num_hidden_layers)
    }
    for i in range(0 if drafter is None else drafter.num_hidden_layers):
        found["drafter", i] = {"self_attn.causal": Expected(value=False, source="config")}
    return found


def _attention(
    config: BeamConfig | DFlash2Config, window: int | None, basis: Basis
) -> dict[str, Expected]:
    split = basis.split_source if basis.layout.tp > 1 else "config"
    fields = {
        "window": Expected(value=NONE if window is None else window, source="config"),
        "query heads": Expected(value=config.num_attention_heads // basis.layout.tp, source=split),
        "KV heads": Expected(value=kv_heads(config, basis.layout), source=split),
        "head size": Expected(value=config.head_dim, source="config"),
    }
    if basis.kv_dtype is not None:
        fields["KV dtype"] = Expected(value=basis.kv_dtype, source=basis.kv_source)
    return fields


def _mlp(config: BeamConfig, layer: int, basis: Basis) -> dict[str, Expected]:
    sparse, layout = config.is_sparse(layer), basis.layout
    fields = {"MLP": Expected(value=config.mlp_layer_types[layer], source="config")}
    if basis.precision is not None:
        precision = basis.precision
        wide = precision.experts if sparse else precision.dense_mlp
        for name, dtype in (("attention weights", precision.attention), ("MLP weights", wide)):
            fields[name] = Expected(
                value=basis.dtype if dtype == "bf16" else dtype, source=basis.precision_source
            )
    fields["weight bytes"] = Expected(
        value=_layer_bytes(config, layer, basis),
        source=basis.precision_source if basis.precision is not None else "config",
    )
    if sparse:
        fields |= {
            "experts": Expected(value=config.num_experts, source="config"),
            "experts here": Expected(
                value=layout.experts_per_gpu(config),
                source=basis.split_source if layout.expert_parallel else "config",
            ),
            "experts a token": Expected(value=config.num_experts_per_tok, source="config"),
            "expert width": Expected(
                value=config.moe_intermediate_size // layout.expert_slices, source="config"
            ),
            "router dtype": Expected(value="float32", source="config"),
            "router scores": Expected(value="sigmoid", source="config"),
            "router renormalises": Expected(value=config.norm_topk_prob, source="config"),
        }
    return fields


def _layer_bytes(config: BeamConfig, layer: int, basis: Basis) -> int | None:
    """Bytes of one layer's parameters on a rank, by the account that sizes weights.

    None where the precision is not known, or is quantised beside what is not two bytes wide.
    """
    precision = basis.precision
    if precision is None or basis.dtype not in ("bfloat16", "float16", "float32"):
        return None
    if basis.dtype == "float32" and precision != Precision():
        return None
    one = config.replace(
        num_hidden_layers=1,
        layer_types=(config.layer_types[layer],),
        mlp_layer_types=(config.mlp_layer_types[layer],),
    )
    factor = 2 if basis.dtype == "float32" else 1
    size = sum(
        matrix.bytes * (1 if matrix.part == "router" else factor)
        for matrix in matrices(one, precision, basis.layout)
        if matrix.part in ("attention", "dense_mlp", "router", "experts", "norms")
    )
    return size - factor * matrix_bytes(1, config.hidden_size, "bf16")  # the model's last norm


def _drafter_layer_bytes(config: BeamConfig, drafter: DFlash2Config, basis: Basis) -> int | None:
    factor = {"bfloat16": 1, "float16": 1, "float32": 2}.get(basis.dtype)
    if factor is None:
        return None
    sizes = [
        sum(
            matrix.bytes
            for matrix in matrices(
                config, Precision(), basis.layout, drafter.replace(num_hidden_layers=layers)
            )
            if matrix.part == "drafter"
        )
        for layers in (1, 2)
    ]
    return factor * (sizes[1] - sizes[0])
