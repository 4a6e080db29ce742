"""``BeamConfig``: the fields of Beam's ``config.json``, checked.

A value's *source* is part of what the workbench shows. ``published`` was stated by the public
announcement, ``engine`` was read off vLLM 0.33.0's Beam code, ``derived`` is the only value that
satisfies those two, ``assumed`` is a free choice, ``checkpoint`` was read from a ``config.json``
and ``chosen`` was fixed by this project (the bundled tiny model).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeGuard

from workbench.errors import ConfigError

AttentionType = Literal["full_attention", "sliding_attention"]
MlpType = Literal["dense", "sparse"]
SourceKind = Literal["published", "engine", "derived", "assumed", "checkpoint", "chosen"]

ATTENTION_TYPES: tuple[AttentionType, ...] = ("full_attention", "sliding_attention")
MLP_TYPES: tuple[MlpType, ...] = ("dense", "sparse")

# SSMax (full layers): queries are scaled by (1 + (position + 1) / SSMAX_LENGTH) ** SSMAX_POWER.
# Fixed in the engine's code, not fields of config.json (vLLM 0.33.0, vllm/models/beam).
SSMAX_LENGTH = 2048
SSMAX_POWER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a field's value comes from, and in a few words how."""

    kind: SourceKind
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamConfig:
    """Everything that fixes the shape and the arithmetic of one Beam model.

    Field names are those of ``config.json``. Widths count elements, ``sliding_window`` counts
    tokens (a query at position ``i`` sees keys ``i - sliding_window + 1 … i``).

    Raises:
        ConfigError: a field is missing, of the wrong kind, or contradicts another; the message
            names the field.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    layer_types: tuple[AttentionType, ...]
    mlp_layer_types: tuple[MlpType, ...]
    sliding_window: int
    max_position_embeddings: int
    n_group: int | None = None
    topk_group: int | None = None
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float | None = None
    rope_theta: float = 10000.0
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    # Keys of the file that Beam does not read (architectures, versions …): kept for the round trip.
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "extra", MappingProxyType(dict(self.extra)))

    # -- derived shapes -------------------------------------------------------------------------

    @property
    def q_size(self) -> int:
        """Width of the query (and of the output gate): heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values: KV heads x head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers that attend to everything (their KV cache grows)."""
        return tuple(i for i, t in enumerate(self.layer_types) if t == "full_attention")

    @property
    def sliding_layers(self) -> tuple[int, ...]:
        """Indices of the layers that attend to the window only."""
        return tuple(i for i, t in enumerate(self.layer_types) if t == "sliding_attention")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the mixture-of-experts layers."""
        return tuple(i for i, t in enumerate(self.mlp_layer_types) if t == "sparse")

    def original(self, layer: int) -> int:
        """Which layer of its checkpoint ``layer`` is: itself, unless this is a part of a model."""
        return layer

    def is_full(self, layer: int) -> bool:
        """Whether ``layer`` uses full attention."""
        return self.layer_types[layer] == "full_attention"

    def is_sparse(self, layer: int) -> bool:
        """Whether ``layer`` has a mixture of experts for its MLP."""
        return self.mlp_layer_types[layer] == "sparse"

    def replace(self, **changes: Any) -> BeamConfig:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    # -- config.json ----------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "config") -> BeamConfig:
        """Build from the keys of a ``config.json``; absent ones take the engine's defaults.

        Raises:
            ConfigError: naming the field and ``where`` it stands.
        """
        return config_from_dict(data, where)

    @classmethod
    def from_json(cls, path: str | Path) -> BeamConfig:
        """Read a ``config.json`` (or a folder that holds one)."""
        return cls.from_dict(read_config_json(path), where=str(config_path(path)))

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` keys, in the form the engine reads, ``extra`` included."""
        data: dict[str, Any] = {"architectures": ["BeamForCausalLM"], "model_type": "beam"}
        data.update(self.extra)
        for f in fields(self):
            if f.name not in ("extra", "rope_theta"):
                value = getattr(self, f.name)
                data[f.name] = list(value) if isinstance(value, tuple) else value
        data["rope_parameters"] = {"rope_type": "default", "rope_theta": self.rope_theta}
        return data

    def to_json(self) -> str:
        """``config.json`` as text; ``BeamConfig.from_dict(json.loads(...))`` gives it back."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def config_path(path: str | Path) -> Path:
    path = Path(path)
    return path / "config.json" if path.is_dir() else path


def read_config_json(path: str | Path) -> dict[str, Any]:
    """The parsed object of a ``config.json``; ConfigError when there is none to be had."""
    file = config_path(path)
    try:
        if file.exists() and (not file.is_file() or file.stat().st_size > MOST_CONFIG_BYTES):
            raise ConfigError(
                f"{file} is not a regular file of at most {MOST_CONFIG_BYTES >> 20} MB; "
                "give a folder with config.json"
            )
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"{file} cannot be read ({reason}); give a folder with config.json"
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} is not valid JSON ({error}); restore the file") from error
    except (RecursionError, ValueError) as error:  # nested too deep, or a number too long
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} is not a config.json; restore the file") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds a {type(data).__name__}, not a JSON object of fields")
    return data


# What the engine assumes for an absent key (vLLM 0.33.0, transformers_utils/configs/beam.py).
ENGINE_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "n_group": None,
        "topk_group": None,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
)


MOST_CONFIG_BYTES = 16 << 20

# Far above any model, and low enough that a slip of the keyboard neither hangs nor fills memory.
MOST_LAYERS = 10_000
MOST_EXPERTS = 65_536
MOST = 1 << 40


def config_from_dict(data: Mapping[str, Any], where: str = "config") -> BeamConfig:
    """See :meth:`BeamConfig.from_dict`."""
    model_type = data.get("model_type", "beam")
    if model_type != "beam":
        raise ConfigError(f"{where}: model_type is {model_type!r}; only 'beam' can be loaded here")
    if "layer_indices" in data:  # what a part of a model writes into records of it
        raise ConfigError(
            f"{where}: layer_indices says that these are some layers of a model; give the whole "
            "model's config.json and name the layers when loading it"
        )
    known = {f.name for f in fields(BeamConfig)} - {"extra"}
    values = {k: v for k, v in data.items() if k in known}
    for name in ("head_dim", "layer_types", "mlp_layer_types"):
        if values.get(name, 0) is None:  # null is the same as absent: derived below
            del values[name]
    values["rope_theta"] = rope_theta_of(data, where)
    layers = values.get("num_hidden_layers")
    if is_int(layers) and 0 < layers <= MOST_LAYERS:
        values.setdefault("layer_types", ["sliding_attention"] * layers)
        values.setdefault("mlp_layer_types", ["sparse"] * layers)
    elif layers is not None:
        raise ConfigError(
            f"{where}: num_hidden_layers must be a whole number from 1 to {MOST_LAYERS}, "
            f"not {short(layers)}"
        )
    heads, hidden = values.get("num_attention_heads"), values.get("hidden_size")
    if "head_dim" not in values and is_int(heads) and is_int(hidden) and heads > 0:
        values["head_dim"] = hidden // heads
    required = [f.name for f in fields(BeamConfig) if f.name not in ENGINE_DEFAULTS]
    missing = [name for name in required if name not in values and name != "extra"]
    if missing:
        raise ConfigError(f"{where}: the field {missing[0]} is missing; add it")
    for name in ("layer_types", "mlp_layer_types"):
        if not isinstance(values[name], list | tuple):
            raise ConfigError(f"{where}: {name} must be a list with one word for each layer")
        values[name] = tuple(values[name])
    extra = {k: v for k, v in data.items() if k not in known and k != "rope_parameters"}
    try:
        return BeamConfig(**values, extra=extra)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def rope_theta_of(data: Mapping[str, Any], where: str) -> Any:
    rope = data.get("rope_parameters")
    if rope is None:
        return data.get("rope_theta", ENGINE_DEFAULTS["rope_theta"])
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{where}: rope_parameters must be an object, not {rope!r}")
    if set(rope) & set(ATTENTION_TYPES):
        unknown = set(rope) - set(ATTENTION_TYPES)
        given = [v for v in rope.values() if v is not None]
        if unknown or len(given) != 1 or not isinstance(given[0], Mapping):
            raise ConfigError(
                f"{where}: rope_parameters keyed by attention type needs exactly one non-null entry"
            )
        rope = given[0]
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"{where}: rope_parameters.rope_type is {kind!r}; Beam uses 'default'")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"{where}: rope_parameters.partial_rotary_factor is not 1; Beam rotates whole heads"
        )
    return rope.get("rope_theta", ENGINE_DEFAULTS["rope_theta"])


def is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if isinstance(value, int):
        return abs(value) < 2**63  # torch takes no more
    return abs(value) < 1e30  # NaN fails too; beyond it float32 overflows


def short(value: Any) -> str:
    if is_int(value) and abs(value) > MOST:
        return "a number far beyond any model"  # repr of a huge integer may itself be refused
    return repr(value)


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "sliding_window",
    "max_position_embeddings",
)


def _check(c: BeamConfig) -> None:
    for name in _COUNTS:
        value = getattr(c, name)
        most = {"num_hidden_layers": MOST_LAYERS, "num_experts": MOST_EXPERTS}.get(name, MOST)
        if not is_int(value) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {short(value)}")
        if value > most:
            raise ConfigError(f"{name} must be at most {most}, not {short(value)}")
    for name in ("rms_norm_eps", "rope_theta", "routed_scaling_factor"):
        value = getattr(c, name)
        if not is_number(value) or value <= 0:
            raise ConfigError(f"{name} must be a positive number, not {short(value)}")
    cap = c.final_logit_softcapping
    if cap is not None and (not is_number(cap) or cap <= 0):
        raise ConfigError(
            f"final_logit_softcapping must be a positive number or null, not {short(cap)}"
        )
    for name in ("norm_topk_prob", "tie_word_embeddings"):
        if not isinstance(getattr(c, name), bool):
            raise ConfigError(f"{name} must be true or false, not {getattr(c, name)!r}")
    if c.tie_word_embeddings:
        raise ConfigError(
            "tie_word_embeddings is true, but Beam has a head of its own; set it to false"
        )
    if c.hidden_act != "silu":
        raise ConfigError(f"hidden_act is {c.hidden_act!r}; Beam knows 'silu' only")
    _check_types("layer_types", c.layer_types, ATTENTION_TYPES, c.num_hidden_layers)
    _check_types("mlp_layer_types", c.mlp_layer_types, MLP_TYPES, c.num_hidden_layers)
    if c.head_dim % 2:
        raise ConfigError(f"head_dim must be even for RoPE, not {c.head_dim}")
    if c.num_attention_heads % c.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads ({c.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({c.num_key_value_heads})"
        )
    if c.num_experts_per_tok > c.num_experts:
        raise ConfigError(
            f"num_experts_per_tok ({c.num_experts_per_tok}) exceeds num_experts ({c.num_experts})"
        )
    _check_groups(c)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(c, name)
        if value is not None and (not is_int(value) or not 0 <= value < c.vocab_size):
            raise ConfigError(
                f"{name} must be null or a token id below {c.vocab_size}, not {value!r}"
            )


def _check_types(name: str, types: Any, allowed: tuple[str, ...], layers: int) -> None:
    if not isinstance(types, tuple):
        raise ConfigError(f"{name} must be a list with one word for each layer")
    if len(types) != layers:
        raise ConfigError(
            f"{name} has {len(types)} entries for {layers} layers (num_hidden_layers); "
            "give one for each layer"
        )
    for index, word in enumerate(types):
        if word not in allowed:
            raise ConfigError(f"{name}[{index}] is {word!r}; use one of {', '.join(allowed)}")


def _check_groups(c: BeamConfig) -> None:
    if (c.n_group is None) != (c.topk_group is None):
        raise ConfigError("n_group and topk_group must be given together, or both left null")
    if c.n_group is None or c.topk_group is None:
        return
    if not is_int(c.n_group) or c.n_group < 1 or c.num_experts % c.n_group:
        raise ConfigError(f"n_group must divide num_experts ({c.num_experts}), not {c.n_group!r}")
    if not is_int(c.topk_group) or not 1 <= c.topk_group <= c.n_group:
        raise ConfigError(f"topk_group must lie in 1…n_group ({c.n_group}), not {c.topk_group!r}")
    if c.num_experts // c.n_group < 2 and c.n_group > 1:
        raise ConfigError("n_group leaves fewer than two experts a group; its rank needs two")
    if c.num_experts_per_tok > c.topk_group * (c.num_experts // c.n_group):
        raise ConfigError(
            f"num_experts_per_tok ({c.num_experts_per_tok}) exceeds the experts of "
            f"topk_group ({c.topk_group}) groups"
        )
