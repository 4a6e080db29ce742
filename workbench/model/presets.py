"""The models known by name, each field with its source, and how a MODEL argument is resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from workbench.errors import ModelNotFoundError
from workbench.files import expand, is_folder
from workbench.model.asked import shown
from workbench.model.config import (
    ENGINE_DEFAULTS,
    AttentionType,
    BeamConfig,
    Source,
    read_config_json,
)
from workbench.model.drafter_config import DFlash2Config

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedDrafter:
    """A drafter after look-up; fields as in :class:`ResolvedModel`."""

    name: str
    config: DFlash2Config
    sources: Mapping[str, Source]
    folder: Path | None = None


def beam_501b_dflash2() -> ResolvedDrafter:
    """The DFlash2 drafter of the full Beam: five windowed layers that read five target layers."""
    target = beam_501b().config
    like = Source(kind="assumed", note="as Qwen3.8-27B-DFlash2, which has the same hidden_size")
    shared = Source(kind="engine", note="shares the target's embedding and head")
    sources = {
        "vocab_size": shared,
        "hidden_size": shared,
        "intermediate_size": like,
        "num_hidden_layers": Source(kind="published", note="five windowed layers"),
        "num_attention_heads": like,
        "num_key_value_heads": like,
        "head_dim": Source(kind="engine", note="its context kernel is written for 128"),
        "sliding_window": like,
        "max_position_embeddings": Source(kind="assumed", note="the target's"),
        "target_layer_ids": Source(
            kind="assumed", note="five are published; spread over the depth as in other drafters"
        ),
        "mask_token_id": Source(kind="assumed", note="the last token id"),
        "conv_kernel_size": like,
        "conv_group_size": like,
        "selector_rank": like,
        "selector_top_k": like,
        "final_logit_softcapping": Source(kind="assumed", note="the target's"),
        "block_size": like,
        "rms_norm_eps": Source(kind="engine", note="default"),
        "rope_theta": Source(kind="engine", note="default"),
    }
    config = DFlash2Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        sliding_window=2048,
        max_position_embeddings=target.max_position_embeddings,
        target_layer_ids=(5, 16, 27, 38, 49),
        mask_token_id=target.vocab_size - 1,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=256,
        selector_top_k=16,
        final_logit_softcapping=30.0,
        block_size=8,
    )
    return ResolvedDrafter(name="beam-501b-dflash2", config=config, sources=sources)


def assumed_drafter(name: str) -> str:
    """A sentence about a drafter whose shape is not public."""
    return f"the drafter's shape is assumed: counted as {name}; give a drafter's folder for another"


def drafter_of(model: str) -> str | None:
    """Name of the drafter known for a model of :func:`known_models`, None where there is none."""
    if model == "beam-501b":
        return "beam-501b-dflash2"
    return f"{model}-dflash2" if bundled_drafter(model) is not None else None


def bundled_drafter(model: str) -> Path | None:
    """Folder of the drafter bundled with a bundled model; None where there is none."""
    folder = ZOO / model / "dflash2" if model in bundled() else None
    return folder if folder is not None and (folder / "config.json").is_file() else None


def resolve_drafter(drafter: str | Path) -> ResolvedDrafter:
    """Look up a drafter: ``beam-501b-dflash2`` (a shape), one bundled as ``MODEL-dflash2``, or a
    folder with ``config.json``.

    Raises:
        ModelNotFoundError: no such name or folder.
        FileError: ``drafter`` is not a path, or is in the home folder of an unknown user.
        ConfigError: the folder's ``config.json`` is unusable.
    """
    name = _name(drafter, "drafter")
    if name == "beam-501b-dflash2":
        return beam_501b_dflash2()
    folder = bundled_drafter(name.removesuffix("-dflash2")) if name.endswith("-dflash2") else None
    folder = folder or expand(drafter)
    if not is_folder(folder):
        bundles = [f"{model}-dflash2" for model in bundled() if bundled_drafter(model)]
        known = ", ".join(["beam-501b-dflash2", *bundles])
        raise ModelNotFoundError(
            f"unknown drafter {shown(name)}: use {known}, or a folder with config.json"
        )
    config = DFlash2Config.from_json(folder)
    given = Source(kind="checkpoint", note="config.json")
    sources = {f.name: given for f in fields(config) if f.name != "extra"}
    return ResolvedDrafter(name=name, config=config, sources=sources, folder=folder)


def config_of(model: BeamConfig | str | Path) -> BeamConfig:
    """A configuration as it is, or that of a model by name or folder (see :func:`resolve`)."""
    return model if isinstance(model, BeamConfig) else resolve(model).config


def drafter_config_of(drafter: DFlash2Config | str | Path | None) -> DFlash2Config | None:
    """The same for a drafter, or for none."""
    if drafter is None or isinstance(drafter, DFlash2Config):
        return drafter
    return resolve_drafter(drafter).config


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
    name = _name(model, "model")
    if name == "beam-501b":
        return beam_501b()
    if name in bundled():
        return _from_folder(ZOO / name, name, Source(kind="chosen", note="bundled checkpoint"))
    folder = expand(model)
    if is_folder(folder):
        return _from_folder(folder, name, Source(kind="checkpoint", note="config.json"))
    raise ModelNotFoundError(
        f"unknown model {shown(name)}: use one of {', '.join(known_models())}, "
        "or a folder with config.json"
    )


def _name(given: str | Path, what: str) -> str:
    if not isinstance(given, str | Path):
        raise ModelNotFoundError(f"a {what} is a name or a folder, not {shown(given)}")
    if not str(given).strip():
        raise ModelNotFoundError(f"the {what}'s name is empty; give a name or a folder")
    return str(given)


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
