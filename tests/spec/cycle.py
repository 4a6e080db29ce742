"""A target and a drafter whose every token is known: the target writes a cycle of five tokens, and
the drafter knows it but for one transition.

No sublayer adds anything, so the target's next token depends on the last one alone. The drafter's
mask rows all name the same candidates, the tokens of the cycle, and its selector orders them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

import workbench
from workbench.model.beam import Beam
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config
from workbench.model.presets import ZOO
from workbench.model.tokenizer import Tokenizer
from workbench.spec.drafter import Drafter
from workbench.spec.drafter_checkpoint import save_drafter

VOCABULARY, HIDDEN, DRAFTS = 4096, 64, 7
MASK = 3
CYCLE_TEXT = ("self", ".", "x", " =", "\n")  # each one token of the bundled tokenizer
CONFIG = BeamConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    num_experts=2,
    num_experts_per_tok=1,
    layer_types=("sliding_attention", "full_attention"),
    mlp_layer_types=("dense", "sparse"),
    sliding_window=16,
    max_position_embeddings=1024,
    final_logit_softcapping=30.0,
)


def cycle_ids() -> list[int]:
    """The cycle as token ids."""
    tokenizer = Tokenizer.from_folder(ZOO / "beam-tiny")
    ids = [tokenizer.encode(text, bos=False) for text in CYCLE_TEXT]
    assert all(len(one) == 1 for one in ids)
    return [one[0] for one in ids]


def written(count: int) -> list[int]:
    """The first new tokens behind any prompt that ends outside of the cycle."""
    ids = cycle_ids()
    return [ids[i % len(ids)] for i in range(count)]


def accepted_runs(count: int, drafts: int = DRAFTS) -> list[int]:
    """Accepted drafts of each step until ``count`` new tokens are there, by hand.

    The drafter is right up to the cycle's last token and wrong behind it.
    """
    runs, at = [], 0  # at: index in the cycle of the anchor, the newest token
    new = 1  # from the prefill
    while new < count - 1:  # with one token left nothing is drafted
        room = min(drafts, count - new - 1)
        run = min(room, len(CYCLE_TEXT) - 1 - at)
        runs.append(run)
        new += run + 1
        at = (at + run + 1) % len(CYCLE_TEXT)
    return runs


def make(folder: Path) -> tuple[str, str]:
    """Write both checkpoints; their folders."""
    ids = cycle_ids()
    beam = Beam(CONFIG)
    with torch.no_grad():
        for name, p in beam.named_parameters():
            p.fill_(1.0 if "norm" in name else 0.0)
        # Stream dimension i says "the last token was number i of the cycle".
        beam.embed_tokens[:, len(ids) - 1] = 1.0
        for number, token in enumerate(ids):
            beam.embed_tokens[token] = 0.0
            beam.embed_tokens[token, number] = 1.0
            beam.lm_head[ids[(number + 1) % len(ids)], number] = 3.0
        beam.embed_tokens[MASK] = 0.0
        beam.embed_tokens[MASK, : len(ids)] = 1.0
    beam.tokenizer = Tokenizer.from_folder(ZOO / "beam-tiny")
    target_folder = folder / "target"
    workbench.save(beam, target_folder, tokenizer_folder=ZOO / "beam-tiny")
    drafter = Drafter(
        DFlash2Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=16,
            max_position_embeddings=CONFIG.max_position_embeddings,
            target_layer_ids=(0, 1),
            mask_token_id=MASK,
            conv_kernel_size=2,
            conv_group_size=16,
            selector_rank=8,
            selector_top_k=5,
            final_logit_softcapping=30.0,
            block_size=DRAFTS + 1,
        ),
        beam,
    )
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            p.fill_(1.0 if "norm" in name else 0.0)
        selector = drafter.selector
        selector.projection[:, : len(ids)] = 1.0
        for number, token in enumerate(ids):
            selector.successor[token, number] = 1.0
            # Behind the last token of the cycle comes the first; it proposes the third.
            follows = number + 1 if number + 1 < len(ids) else 2
            selector.predecessor[token, follows] = 1.0
    drafter_folder = folder / "drafter"
    save_drafter(drafter, drafter_folder, dtype=torch.float32)
    return str(target_folder), str(drafter_folder)


def bundle(zoo: Path, name: str, target: str, drafter: str) -> None:
    """Lay both out as a bundled model with its drafter."""
    shutil.copytree(target, zoo / name)
    shutil.copytree(drafter, zoo / name / "dflash2")
