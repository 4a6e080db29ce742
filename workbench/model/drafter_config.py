"""``DFlash2Config``: the fields of a DFlash2 drafter's ``config.json``, checked.

A drafter is a checkpoint of its own beside the target's. It brings neither embedding nor head: both
are the target's. Names are those that vLLM 0.33.0 reads (``DFlash2BeamDraftModel``); the last group
stands in the file under ``dflash_config``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from workbench.errors import ConfigError
from workbench.model.config import (
    ENGINE_DEFAULTS,
    MOST,
    MOST_LAYERS,
    BeamConfig,
    config_path,
    is_int,
    is_number,
    read_config_json,
    rope_theta_of,
    short,
)

DrafterPart = Literal["context", "attention", "mlp", "convolutions", "selector", "norms"]

MOST_CANDIDATES = 256  # published drafters have 16

_NESTED = (
    "target_layer_ids",
    "mask_token_id",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "final_logit_softcapping",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Config:
    """Everything that fixes the shape and the arithmetic of one DFlash2 drafter.

    ``sliding_window`` counts tokens: a query row sees its own block and the ``sliding_window - 1``
    positions before itself. ``target_layer_ids`` are the target layers whose outputs the drafter
    reads, ascending. ``block_size`` is the block it was trained with, one anchor and the draft
    tokens, None where the file does not say.

    Raises:
        ConfigError: a field is missing, of the wrong kind, or contradicts another; the message
            names the field.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    max_position_embeddings: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    final_logit_softcapping: float
    block_size: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "extra", MappingProxyType(dict(self.extra)))

    @property
    def q_size(self) -> int:
        """Width of the queries: heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values: KV heads x head_dim."""
        return self.num_key_value_heads * self.head_dim

    def replace(self, **changes: Any) -> DFlash2Config:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def check_target(self, target: BeamConfig) -> None:
        """Raise ConfigError, naming the field, when this cannot be a drafter of ``target``."""
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(self, name), getattr(target, name)
            if ours != theirs:
                raise ConfigError(
                    f"the drafter's {name} is {ours}, the target's {theirs}; a DFlash2 drafter "
                    "shares the target's embedding and head, so give one trained for this target"
                )
        if self.target_layer_ids[-1] >= target.num_hidden_layers:
            raise ConfigError(
                f"the drafter reads target layer {self.target_layer_ids[-1]} (target_layer_ids), "
                f"but the target's last is {target.num_hidden_layers - 1}; "
                "give a drafter trained for this target"
            )

    # -- config.json ----------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "config") -> DFlash2Config:
        """Build from the keys of a drafter's ``config.json``.

        Raises:
            ConfigError: naming the field and ``where`` it stands.
        """
        nested = data.get("dflash_config")
        if not isinstance(nested, Mapping):
            raise ConfigError(
                f"{where}: dflash_config is missing; this is not a DFlash2 drafter's config.json"
            )
        known = {f.name for f in fields(cls)} - {"extra"}
        values = {k: v for k, v in data.items() if k in known}
        values |= {k: nested[k] for k in _NESTED if k in nested}
        if isinstance(values.get("target_layer_ids"), list):
            values["target_layer_ids"] = tuple(values["target_layer_ids"])
        values["rope_theta"] = rope_theta_of(data, where)
        values.setdefault("rms_norm_eps", ENGINE_DEFAULTS["rms_norm_eps"])
        types = data.get("layer_types")
        if types is not None and (
            not isinstance(types, list)
            or any(t != "sliding_attention" for t in types)
            or len(types) != data.get("num_hidden_layers", len(types))
        ):
            raise ConfigError(
                f"{where}: layer_types of a DFlash2 drafter must be sliding_attention, "
                "one for each layer"
            )
        if data.get("is_causal", False) is not False:
            raise ConfigError(
                f"{where}: is_causal must be false; a DFlash2 block sees itself whole"
            )
        if nested.get("causal", False) is not False:
            raise ConfigError(
                f"{where}: causal in dflash_config must be false; a DFlash2 block sees itself whole"
            )
        if data.get("use_sliding_window", True) is not True:
            raise ConfigError(
                f"{where}: use_sliding_window must be true; the engine ignores sliding_window "
                "without it"
            )
        for name in sorted(known - {"block_size"}):
            if name not in values:
                inside = " (in dflash_config)" if name in _NESTED else ""
                raise ConfigError(f"{where}: the field {name}{inside} is missing; add it")
        extra = {
            k: v
            for k, v in data.items()
            if k not in known and k not in ("dflash_config", "rope_parameters")
        }
        try:
            return cls(**values, extra=extra)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    @classmethod
    def from_json(cls, path: str | Path) -> DFlash2Config:
        """Read a ``config.json`` (or a folder that holds one)."""
        return cls.from_dict(read_config_json(path), where=str(config_path(path)))

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` keys, in the form the engine reads, ``extra`` included."""
        # The engine's loader takes the drafter for a Qwen3 with a window of its own (vLLM 0.33.0).
        data: dict[str, Any] = {
            "architectures": ["DFlash2BeamDraftModel"],
            "model_type": "qwen3",
            "use_sliding_window": True,
        }
        data.update(self.extra)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in (*_NESTED, "extra", "rope_theta") and value is not None:
                data[f.name] = value
        data["layer_types"] = ["sliding_attention"] * self.num_hidden_layers
        data["is_causal"] = False
        data["rope_parameters"] = {"rope_type": "default", "rope_theta": self.rope_theta}
        nested = {name: getattr(self, name) for name in _NESTED}
        nested |= {"target_layer_ids": list(self.target_layer_ids), "causal": False}
        data["dflash_config"] = nested
        return data

    def to_json(self) -> str:
        """``config.json`` as text; ``DFlash2Config.from_dict(json.loads(...))`` gives it back."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTensor:
    """One tensor of a drafter's checkpoint: name, full shape, part and layer."""

    name: str
    shape: tuple[int, ...]
    part: DrafterPart
    layer: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def drafter_tensors(config: DFlash2Config) -> Iterator[DrafterTensor]:
    """Every tensor of a drafter's checkpoint, in the engine's names (vLLM 0.33.0)."""
    c, hidden = config, config.hidden_size
    reads = len(c.target_layer_ids) * hidden
    yield DrafterTensor(name="fc.weight", shape=(hidden, reads), part="context")
    yield DrafterTensor(name="hidden_norm.weight", shape=(hidden,), part="norms")
    groups = hidden // c.conv_group_size
    conv: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("base_kernel", (2, c.conv_kernel_size, hidden)),
        ("kernel_projection.weight", (2 * c.conv_kernel_size * groups, hidden)),
    )
    layer_shapes: tuple[tuple[str, tuple[int, ...], DrafterPart], ...] = (
        ("input_layernorm.weight", (hidden,), "norms"),
        ("post_attention_layernorm.weight", (hidden,), "norms"),
        ("self_attn.q_proj.weight", (c.q_size, hidden), "attention"),
        ("self_attn.k_proj.weight", (c.kv_size, hidden), "attention"),
        ("self_attn.v_proj.weight", (c.kv_size, hidden), "attention"),
        ("self_attn.o_proj.weight", (hidden, c.q_size), "attention"),
        ("self_attn.q_norm.weight", (c.head_dim,), "norms"),
        ("self_attn.k_norm.weight", (c.head_dim,), "norms"),
        ("mlp.gate_proj.weight", (c.intermediate_size, hidden), "mlp"),
        ("mlp.up_proj.weight", (c.intermediate_size, hidden), "mlp"),
        ("mlp.down_proj.weight", (hidden, c.intermediate_size), "mlp"),
        *((f"attention_conv.{name}", shape, "convolutions") for name, shape in conv),
        *((f"mlp_conv.{name}", shape, "convolutions") for name, shape in conv),
    )
    for layer in range(c.num_hidden_layers):
        for name, shape, part in layer_shapes:
            yield DrafterTensor(name=f"layers.{layer}.{name}", shape=shape, part=part, layer=layer)
    yield DrafterTensor(name="norm.weight", shape=(hidden,), part="norms")
    for book in ("predecessor_codebook", "successor_codebook"):
        yield DrafterTensor(
            name=f"candidate_selector.{book}",
            shape=(c.vocab_size, c.selector_rank),
            part="selector",
        )
    yield DrafterTensor(
        name="candidate_selector.hidden_projection.weight",
        shape=(c.selector_rank, hidden),
        part="selector",
    )


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "max_position_embeddings",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)


def _check(c: DFlash2Config) -> None:
    for name in _COUNTS:
        value = getattr(c, name)
        most = MOST_LAYERS if name == "num_hidden_layers" else MOST
        if not is_int(value) or not 1 <= value <= most:
            raise ConfigError(f"{name} must be a whole number from 1 to {most}, not {short(value)}")
    for name in ("rms_norm_eps", "rope_theta", "final_logit_softcapping"):
        value = getattr(c, name)
        if not is_number(value) or value <= 0:
            raise ConfigError(f"{name} must be a positive number, not {short(value)}")
    if c.head_dim % 2:
        raise ConfigError(f"head_dim must be even for RoPE, not {c.head_dim}")
    if c.num_attention_heads % c.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads ({c.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({c.num_key_value_heads})"
        )
    if c.hidden_size % c.conv_group_size:
        raise ConfigError(
            f"conv_group_size ({c.conv_group_size}) must divide hidden_size ({c.hidden_size})"
        )
    if c.selector_top_k > MOST_CANDIDATES:
        raise ConfigError(
            f"selector_top_k must be at most {MOST_CANDIDATES}, not {c.selector_top_k}: every "
            "candidate is scored behind every other, so memory grows with its square"
        )
    if c.selector_top_k > c.vocab_size:
        raise ConfigError(
            f"selector_top_k ({c.selector_top_k}) exceeds vocab_size ({c.vocab_size})"
        )
    ids = c.target_layer_ids
    if (
        not isinstance(ids, tuple)
        or not ids
        or not all(is_int(i) and 0 <= i < MOST_LAYERS for i in ids)
        or list(ids) != sorted(set(ids))
    ):
        # The engine sorts and de-duplicates silently, and fc's columns then no longer fit.
        raise ConfigError(
            f"target_layer_ids must be a list of different layer numbers in ascending order, "
            f"not {ids!r:.80}"
        )
    if not is_int(c.mask_token_id) or not 0 <= c.mask_token_id < c.vocab_size:
        raise ConfigError(
            f"mask_token_id must be a token id below {c.vocab_size}, not {short(c.mask_token_id)}"
        )
    if c.block_size is not None and (not is_int(c.block_size) or not 2 <= c.block_size <= 1024):
        raise ConfigError(
            f"block_size must be a whole number from 2 to 1024 or null, not {short(c.block_size)}"
        )
