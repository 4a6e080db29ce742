"""Proposals that a test chooses, in the place of a drafter's; and a small random target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench
from reference import beam_fp64
from workbench.model.beam import Beam
from workbench.model.drafter_config import DFlash2Config
from workbench.spec import loop
from workbench.spec.drafter import Drafter
from workbench.spec.selector import Proposal
from workbench.spec.sequences import Running

TARGET: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 6,
    "max_position_embeddings": 96,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 3.0,
}


def small_target(folder: Path, **changes: Any) -> Beam:
    """A random Beam of three layers and twelve tokens, float32."""
    beam_fp64.random_checkpoint(folder, TARGET | changes, seed=5)
    return workbench.load(folder)


def small_drafter(target: Beam, *, seed: int = 0, **changes: Any) -> Drafter:
    """A random drafter of it: two layers, window 5, three candidates."""
    c = target.config
    fields: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 5,
        "max_position_embeddings": c.max_position_embeddings,
        "target_layer_ids": (0, 1, 2),
        "mask_token_id": c.vocab_size - 1,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 6,
        "selector_top_k": 3,
        "final_logit_softcapping": 3.0,
        "block_size": 5,
    }
    drafter = Drafter(DFlash2Config(**(fields | changes)), target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
            if "norm" in name:
                p.add_(1.0)
    return drafter.eval()


Plan = Callable[[Running, int], Sequence[int]]


def plant(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> dict[str, loop.Decoding]:
    """Make the loop draft what ``plan(running, n)`` says; put the run under ``"run"``."""
    holder: dict[str, loop.Decoding] = {}

    def propose(
        drafter: Drafter, cache: Any, anchors: torch.Tensor, slots: list[int], n: int, **_: Any
    ) -> Proposal:
        alive = holder["run"]._alive
        tokens = torch.tensor([list(plan(alive[slot], n)) for slot in slots])
        assert tokens.shape == (len(slots), n)
        candidates = tokens[..., None].expand(-1, -1, drafter.config.selector_top_k).clone()
        return Proposal(
            token_ids=tokens,
            candidates=candidates,
            unary=torch.zeros(candidates.shape),
            scores=torch.zeros(candidates.shape),
        )

    monkeypatch.setattr(loop, "propose", propose)
    return holder
