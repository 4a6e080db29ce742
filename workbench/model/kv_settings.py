"""What a sizing of the KV cache is asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from workbench.model.asked import SizingError, shown, whole
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config

KVDtype = Literal["bf16", "fp8"]

KV_WIDTH: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp8": 1})

MOST_SEQUENCES = 1 << 20
MOST_BATCHED_TOKENS = 1 << 24
MOST_BLOCK = 1 << 16
MOST_RANKS = 1 << 16
BLOCK_STEP = 16  # what FlashAttention takes a multiple of (vLLM 0.33)
_LISTED = 1024  # ranks that an error message goes through


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSettings:
    """What a sizing was asked for.

    ``context`` and ``batched_tokens`` (the engine's ``max_num_batched_tokens``) count tokens,
    ``tp`` tensor-parallel ranks, ``block_size`` tokens a block. ``context`` is each sequence's
    length and, for the engine's account, its ``max_model_len``.
    """

    context: int
    sequences: int = 1
    kv_dtype: KVDtype = "bf16"
    tp: int = 1
    block_size: int = 16
    batched_tokens: int = 8192
    async_scheduling: bool = True

    @property
    def in_flight_tokens(self) -> int:
        """Tokens scheduled and not settled yet: two batches under asynchronous scheduling."""
        return self.batched_tokens * (2 if self.async_scheduling else 1)


def checked_settings(
    config: BeamConfig,
    *,
    context: int,
    sequences: int,
    kv_dtype: KVDtype,
    tp: int,
    block_size: int,
    batched_tokens: int,
    async_scheduling: bool,
) -> KVSettings:
    """The settings, or SizingError, in one sentence, for a value that cannot be."""
    block = whole("block size", block_size, MOST_BLOCK, "tokens")
    if block % BLOCK_STEP:
        raise SizingError(
            f"block size must be a multiple of {BLOCK_STEP} tokens, not {block}: the engine's "
            "attention kernels take no other, and it would change the size by itself"
        )
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_WIDTH:
        raise SizingError(f"unknown KV dtype {shown(kv_dtype)}; use one of {', '.join(KV_WIDTH)}")
    if not isinstance(async_scheduling, bool):
        raise SizingError(f"async_scheduling must be true or false, not {shown(async_scheduling)}")
    return KVSettings(
        context=whole("context", context, config.max_position_embeddings, "tokens"),
        sequences=whole("sequences", sequences, MOST_SEQUENCES),
        kv_dtype=kv_dtype,
        tp=check_heads(config, tp),
        block_size=block,
        batched_tokens=whole("batched tokens", batched_tokens, MOST_BATCHED_TOKENS, "tokens"),
        async_scheduling=async_scheduling,
    )


def check_heads(config: BeamConfig | DFlash2Config, tp: int, *, whose: str = "") -> int:
    """``tp`` as an int; SizingError when so many ranks cannot share the heads evenly."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    ranks = whole("tensor-parallel ranks (tp)", tp, MOST_RANKS)
    if heads % ranks or (kv % ranks and ranks % kv):
        good = [
            n
            for n in range(1, min(heads, _LISTED) + 1)
            if not heads % n and (not kv % n or not n % kv)
        ]
        raise SizingError(
            f"tensor parallelism over {ranks:,} ranks does not divide {whose}{heads:,} query heads "
            f"and {kv:,} KV heads evenly; use one of {', '.join(map(str, good))}"
        )
    return ranks
