"""One of eight tensor-parallel ranks of Beam-501B, as a model of its own with a DFlash2 drafter.

Used by ``serving_probe.py``, part ``rank``: an engine whose passes the GPU bounds, as the real
model's do. Each GPU of eight holds an eighth of the heads, of the experts' width, of the dense
layers and of the vocabulary; all of the router, of the norms, and of what the drafter replicates.
A model with these numbers has the rank's shapes on one GPU. What it lacks is the all-reduces.

The engine makes dummy weights: the same ±1e-3 in all, norms and router biases included, so every
token takes the same experts. :func:`rescale` makes them like a model's, in place, since graphs were
captured over them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workbench.files import write_whole
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config
from workbench.model.presets import resolve, resolve_drafter

WHOLE = "beam-501b"
RANKS = 8
POSITIONS = 131072  # a RoPE table of the real model's million positions is never read
EXTRA = {"torch_dtype": "bfloat16"}


def target(depth: int | None = None) -> BeamConfig:
    """The rank's shapes with ``depth`` layers, all 52 if not said."""
    whole = resolve(WHOLE).config
    depth = depth or whole.num_hidden_layers
    if not 16 <= depth <= whole.num_hidden_layers:
        raise ValueError(f"16 to {whole.num_hidden_layers} layers, not {depth}")
    return whole.replace(
        num_hidden_layers=depth,
        layer_types=whole.layer_types[:depth],
        mlp_layer_types=whole.mlp_layer_types[:depth],
        num_attention_heads=whole.num_attention_heads // RANKS,
        num_key_value_heads=whole.num_key_value_heads // RANKS,
        intermediate_size=whole.intermediate_size // RANKS,
        moe_intermediate_size=whole.moe_intermediate_size // RANKS,
        vocab_size=whole.vocab_size // RANKS,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        extra=EXTRA,
    )


def drafter(model: BeamConfig) -> DFlash2Config:
    """The drafter's rank for it.

    The engine's KV planner makes groups of as many layers as the rarest kind has, and all layers
    of the drafter must be in one: so they are no more than the full-attention layers are.
    """
    whole = resolve_drafter(f"{WHOLE}-dflash2").config
    full = sum(kind == "full_attention" for kind in model.layer_types)
    depth, of = model.num_hidden_layers, resolve(WHOLE).config.num_hidden_layers
    made = whole.replace(
        num_hidden_layers=min(whole.num_hidden_layers, full),
        num_attention_heads=whole.num_attention_heads // RANKS,
        num_key_value_heads=whole.num_key_value_heads // RANKS,
        intermediate_size=whole.intermediate_size // RANKS,
        vocab_size=model.vocab_size,
        mask_token_id=model.vocab_size - 1,
        target_layer_ids=tuple(layer * depth // of for layer in whole.target_layer_ids),
        max_position_embeddings=POSITIONS,
        extra=EXTRA,
    )
    made.check_target(model)
    if made.sliding_window == model.sliding_window:
        raise ValueError(
            "the drafter's window is the target's: its layers are no kind of their own"
        )
    return made


def folders(base: Path, depth: int | None = None) -> tuple[Path, Path]:
    """Folders of the target and of its drafter, with nothing but their ``config.json``."""
    model = target(depth)
    made = (base / "beam-rank", base / "beam-rank-dflash2")
    for folder, text in zip(made, (model.to_json(), drafter(model).to_json()), strict=True):
        folder.mkdir(parents=True)
        write_whole(folder / "config.json", text.encode())
    return made


def rescale(models: Iterable[Any]) -> float:
    """Dummy weights as those of a model, in place: norms 1, biases 0, router N(0, 0.02), the rest
    uniform within ±0.02. What the drafter keeps of its weights a second time is made again.

    Args:
        models: torch modules, with weights between -1e-3 and 1e-3; shared ones count once.

    Returns:
        GiB of weights.
    """
    import torch

    seen: set[int] = set()
    size = 0
    with torch.inference_mode():
        for model in models:
            parameters = list(model.named_parameters())
            device = parameters[0][1].device
            generator = torch.Generator(device=device)
            generator.manual_seed(7)
            for name, weight in parameters:
                if weight.data_ptr() in seen:
                    continue
                seen.add(weight.data_ptr())
                size += weight.numel() * weight.element_size()
                if weight.dim() == 1 and "norm" in name:
                    weight.fill_(1.0)
                elif "bias" in name:
                    weight.zero_()
                elif weight.dtype == torch.float32:
                    weight.normal_(0, 0.02, generator=generator)
                else:
                    weight.mul_(20.0)
            inner = getattr(model, "model", None)
            if hasattr(inner, "_context_kv_weight"):
                _again(inner)
    return size / 2**30


def _again(inner: Any) -> None:
    """The weights that the drafter keeps twice, where the graphs read them."""
    names = ("_context_kv_weight", "_context_k_norm_weight")
    kept = {name: getattr(inner, name) for name in names}
    inner.build_context_kv_weights()
    for name, old in kept.items():
        old.copy_(getattr(inner, name))
        setattr(inner, name, old)
