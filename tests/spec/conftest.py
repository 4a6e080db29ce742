"""Small random targets, each with small random drafters, and their FP64 references."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import beam_fp64, dflash2_fp64
from workbench.model.beam import Beam
from workbench.model.checkpoint import load
from workbench.model.drafter_config import DFlash2Config
from workbench.spec.draft_attention import CachedBlocks
from workbench.spec.draft_cache import DraftCache
from workbench.spec.drafter import Drafter
from workbench.spec.drafter_checkpoint import load_drafter, save_drafter

TOKENS = 60  # of the sequences whose streams the target is asked for

TARGET: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 5,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 6.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
PLAIN: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "sliding_window": 9,
    "max_position_embeddings": 512,
    "target_layer_ids": (2,),
    "mask_token_id": 70,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 6,
    "final_logit_softcapping": 6.0,
    "block_size": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    # Two layers, three query heads for each KV head, two layers read, the last among them.
    "grouped": PLAIN
    | {
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
        "sliding_window": 13, "target_layer_ids": (0, 3), "rope_theta": 500.0,
        "selector_top_k": 5, "selector_rank": 11,
    },
    # Three layers, one KV head, three taps, groups no power of two, a cap that binds.
    "deep": PLAIN
    | {
        "num_hidden_layers": 3, "num_key_value_heads": 1, "sliding_window": 20,
        "target_layer_ids": (0, 1, 3), "conv_kernel_size": 3, "conv_group_size": 12,
        "final_logit_softcapping": 2.5, "rms_norm_eps": 1e-6, "block_size": None,
    },
    # A window narrower than the longest block.
    "narrow": PLAIN | {"sliding_window": 4, "num_hidden_layers": 2},
    # A context that ends soon.
    "short": PLAIN | {"max_position_embeddings": 32, "num_hidden_layers": 2},
}  # fmt: skip


@dataclass(frozen=True)
class Drafting:
    """A drafter, saved and loaded, what it drafts for, and both as FP64 tensors."""

    folder: Path
    drafter: Drafter
    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    embedding: np.ndarray
    head: np.ndarray
    tokens: list[int]
    streams: np.ndarray  # float64 [TOKENS, taps * H]: what the FP64 target gives at the taps

    @property
    def rows(self) -> Tensor:
        """The streams as the drafter takes them."""
        return torch.tensor(self.streams, dtype=torch.float32).to(self.drafter.dtype)

    @functools.cached_property
    def context(self) -> dflash2_fp64.Context:
        return dflash2_fp64.context(self.config, self.weights, self.streams)

    def block(self, start: int, query_len: int, **given: Any) -> np.ndarray:
        """The reference's states of the block at ``start``, anchored by the sequence's token."""
        return dflash2_fp64.block(
            self.config, self.weights, self.embedding, self.context, self.tokens[start], start,
            query_len, **given,
        )  # fmt: skip

    def cache(self, *lengths: int, query_len: int = 8) -> DraftCache:
        """A cache with a slot for each length, filled with that much of the sequence at once."""
        cache = DraftCache(self.drafter, len(lengths), query_len)
        for slot, length in enumerate(lengths):
            cache.write(self.rows[:length], [length], [slot], [length])
        return cache

    def anchors(self, *starts: int) -> Tensor:
        return torch.tensor([self.tokens[start] for start in starts])

    def serve(
        self, cache: DraftCache, slots: list[int], query_len: int, ids: Tensor | None = None
    ) -> Tensor:
        """The serving pass over these slots: states ``[R, Q, H]``."""
        starts = [cache.ends[slot] for slot in slots]
        if ids is None:
            ids = self.drafter.block_ids(self.anchors(*starts), query_len)
        blocks = CachedBlocks(cache, torch.tensor(starts), slots, query_len, cache.limit)
        return self.drafter(ids, blocks, query_len).unflatten(0, (-1, query_len))


@dataclass(frozen=True)
class Maker:
    """Makes targets and drafters in a folder."""

    folder: Path
    target: Beam
    fp64: dict[str, np.ndarray]
    tokens: list[int]
    hidden: np.ndarray  # float64 [layers + 1, TOKENS, H]

    def __call__(
        self,
        name: str,
        dtype: torch.dtype = torch.float32,
        change: Callable[[dict[str, np.ndarray]], None] | None = None,
    ) -> Drafting:
        """A drafter of DRAFTERS; ``change`` may alter its random tensors (BF16 bits) in place."""
        config = DFlash2Config(**DRAFTERS[name]).to_dict()
        tensors = dflash2_fp64.random_tensors(config, seed=len(name))
        if change is not None:
            change(tensors)
        number = len(list(self.folder.glob("drafter*")))
        made, folder = self.folder / f"made{number}", self.folder / f"drafter{number}"
        dflash2_fp64.write_drafter(made, config, tensors)
        save_drafter(load_drafter(self.target, made), folder)
        target = self.target
        if dtype != target.dtype:
            target = load(self.folder / "target", dtype=dtype)
        stored, weights = dflash2_fp64.load_reference(folder)
        taps = DRAFTERS[name]["target_layer_ids"]
        return Drafting(
            folder=folder,
            drafter=load_drafter(target, folder),
            config=stored,
            weights=weights,
            embedding=self.fp64["model.embed_tokens.weight"],
            head=self.fp64["lm_head.weight"],
            tokens=self.tokens,
            streams=np.concatenate([self.hidden[layer + 1] for layer in taps], 1),
        )


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A target, and drafters of it on demand."""
    folder = tmp_path_factory.mktemp("drafting")
    beam_fp64.random_checkpoint(folder / "target", TARGET, seed=5)
    config, weights = beam_fp64.load_reference(folder / "target")
    tokens = np.random.default_rng(5).integers(0, 70, TOKENS).tolist()
    forward = beam_fp64.forward(config, weights, tokens)
    hidden = np.asarray(forward["hidden"])
    return Maker(folder, load(folder / "target"), weights, tokens, hidden)


@pytest.fixture(scope="session")
def drafting(make: Maker) -> Callable[[str], Drafting]:
    """A drafter of DRAFTERS, made once: for tests that change nothing of it."""
    return functools.cache(make)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread only adds the cost of waking it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
