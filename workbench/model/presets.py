"""The models known by name, each field with its source, and how a MODEL argument is resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from workbench.errors import ModelNotFoundError
from workbench.files import expand
from workbench.model.config import (
    ENGINE_DEFAULTS,
    AttentionType,
    BeamConfig,
    Source,
    read_config_json,
)

ZOO = Path(__file__).parent / "zoo"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model argument after look-up.

    ``folder`` is where its files are, or None for a preset that is known by its shape only.
    ``sources`` names the source of every field of ``config``.
    """

    name: str
    config: BeamConfig
    sources: Mapping[str, Source]
    folder: Path | None = None


def beam_501b() -> ResolvedModel:
    """The full Reflection Beam: 501.01 B parameters, 52 layers, one million tokens of context."""
    layers = 52
    attention: list[AttentionType] = [
        "full_attention" if i % 6 == 3 else "sliding_attention" for i in range(layers)
    ]
    config = BeamConfig(
        vocab_size=163840,
        hidden_size=5120,
        intermediate_size=12288,
        moe_intermediate_size=2560,
        num_hidden_layers=layers,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        num_experts=256,
        num_experts_per_tok=8,
        layer_types=tuple(attention),
        mlp_layer_types=("dense",) * 3 + ("sparse",) * 49,
        sliding_window=512,
        max_position_embeddings=1048576,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-6,
        final_logit_softcapping=30.0,
        rope_theta=10000.0,
    )
    published, engine = Source(kind="published"), Source(kind="engine")
    assumed = Source(kind="assumed", note="nothing public contradicts it")
    fits = Source(kind="assumed", note="fits 501.0 B in total")
    sources = {
        "vocab_size": fits,
        "hidden_size": published,
        "intermediate_size": fits,
        "moe_intermediate_size": Source(
            kind="derived", note="256 x 3 x 5120 x 2560 x 49 = 493.3 B of the published 501 B"
        ),
        "num_hidden_layers": published,
        "num_attention_heads": Source(
            kind="derived", note="the engine's 14336-row packed Q+K+V+gate = 128 x (2 x 48 + 2 x 8)"
        ),
        "num_key_value_heads": Source(
            kind="derived", note="published 36 KiB a token = 9 layers x 2 x 2 B x 8 x 128"
        ),
        "head_dim": Source(kind="derived", note="published 36 KiB a token = 9 x 2 x 2 B x 8 x 128"),
        "num_experts": Source(kind="engine", note="FP32 router kernel for 256 x 5120"),
        "num_experts_per_tok": Source(kind="derived", note="published 23 B active parameters"),
        "layer_types": Source(
            kind="assumed", note="43 sliding + 9 full is published; which 9 (i % 6 == 3) is assumed"
        ),
        "mlp_layer_types": Source(
            kind="derived", note="three dense layers bring the total to the published 501 B"
        ),
        "sliding_window": published,
        "max_position_embeddings": Source(kind="published", note="one-million-token context"),
        "n_group": assumed,
        "topk_group": assumed,
        "norm_topk_prob": Source(kind="engine", note="default"),
        "routed_scaling_factor": assumed,
        "rms_norm_eps": Source(kind="engine", note="default"),
        "final_logit_softcapping": assumed,
        "rope_theta": Source(kind="engine", note="default"),
        "hidden_act": engine,
        "tie_word_embeddings": Source(kind="engine", note="true is refused"),
        "bos_token_id": assumed,
        "eos_token_id": assumed,
        "pad_token_id": assumed,
    }
    return ResolvedModel(name="beam-501b", config=config, sources=sources)


@cache
def bundled() -> tuple[str, ...]:
    """Names of the checkpoints shipped inside the package."""
    return tuple(sorted(p.parent.name for p in ZOO.glob("*/config.json")))


def known_models() -> tuple[str, ...]:
    """Every name that :func:`resolve` knows without a folder."""
    return ("beam-501b", *bundled())


def resolve(model: str | Path) -> ResolvedModel:
    """Look up a preset, a bundled checkpoint, or a folder with ``config.json``, in this order.

    Raises:
        ModelNotFoundError: no such name or folder.
        FileError: ``model`` is not a path, or is in the home folder of an unknown user.
        ConfigError: the folder's ``config.json`` is unusable.
    """
    name = str(model)
    if name == "beam-501b":
        return beam_501b()
    if name in bundled():
        return _from_folder(ZOO / name, name, Source(kind="chosen", note="bundled checkpoint"))
    folder = expand(model)
    if folder.is_dir():
        return _from_folder(folder, name, Source(kind="checkpoint", note="config.json"))
    raise ModelNotFoundError(
        f"unknown model {name!r}: use one of {', '.join(known_models())}, "
        "or a folder with config.json"
    )


def _from_folder(folder: Path, name: str, given: Source) -> ResolvedModel:
    data = read_config_json(folder)
    config = BeamConfig.from_dict(data, where=str(folder / "config.json"))
    default = Source(kind="engine", note="default, absent from config.json")
    sources = {}
    for f in fields(config):
        if f.name == "extra":
            continue
        stated = f.name in data or (f.name == "rope_theta" and "rope_parameters" in data)
        derived = f.name in ("layer_types", "mlp_layer_types", "head_dim") or (
            f.name in ENGINE_DEFAULTS
        )
        sources[f.name] = given if stated or not derived else default
    return ResolvedModel(name=name, config=config, sources=sources, folder=folder)
