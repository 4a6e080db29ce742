"""What vLLM's start-up figures mean, release by release.

The log's words stayed the same while what they count changed. The table was read in the source of
the released wheels of 0.8.0 to 0.33.0 (``v1/core/kv_cache_utils.py``, ``v1/kv_cache_interface.py``,
``v1/worker/gpu_worker.py``, ``config``); each entry names the first release it holds for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

TokenMeaning = Literal["blocks_x_block_size", "blocks_per_group", "concurrency_x_length"]
ConcurrencyMeaning = Literal["tokens_over_length", "blocks_over_request"]

OLDEST_READ = (0, 8, 0)
NEWEST_READ = (0, 33, 0)

TOKEN_MEANINGS: dict[TokenMeaning, str] = {
    "blocks_x_block_size": (
        "Tokens = blocks x block size, and concurrency = tokens / max_model_len: every layer is "
        "counted as if it kept the whole context (vLLM up to 0.9.0)."
    ),
    "blocks_per_group": (
        "Tokens = blocks // KV groups x the smallest block size: the context that fits if every "
        "group kept all of it, which is less than concurrency x max_model_len once layers slide "
        "(vLLM 0.9.1 to 0.20.0)."
    ),
    "concurrency_x_length": (
        "Tokens = int(concurrency x max_model_len): context the pool holds when every request is "
        "max_model_len long, not slots that exist in memory (vLLM 0.20.1 and later)."
    ),
}
CONCURRENCY_MEANINGS: dict[ConcurrencyMeaning, str] = {
    "tokens_over_length": "Concurrency = the logged tokens / max_model_len.",
    "blocks_over_request": (
        "Concurrency = blocks of the pool / blocks that one request of max_model_len tokens may "
        "hold, summed over the KV groups."
    ),
}

_RELEASE = re.compile(
    r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:\.post\d+|\+[\w.]+)*(.*)", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRules:
    """How one vLLM release counts; see the module's docstring for the source.

    Attributes:
        tokens: what "KV cache size: N tokens" counts.
        concurrency: what "Maximum concurrency" counts.
        in_flight_batches: batches of ``max_num_batched_tokens`` that the bound of a sliding layer
            allows for, as ``(without, with)`` asynchronous scheduling and one pipeline stage; each
            further pipeline stage adds one from 0.26.0 on.
        async_by_default: asynchronous scheduling is on unless something rules it out.
        gpu_memory_utilization: the default, a fraction of the GPU's total memory.
        graphs_in_profile: the estimated CUDA graph memory is taken off the KV cache by default.
        null_block_in_check: the start-up check that one request fits leaves out the pool's null
            block. The pool itself holds one back since 0.8.3, and the logged figures count it.
    """

    tokens: TokenMeaning
    concurrency: ConcurrencyMeaning
    in_flight_batches: tuple[int, int]
    async_by_default: bool
    gpu_memory_utilization: float
    graphs_in_profile: bool
    null_block_in_check: bool


def parse_release(version: str) -> tuple[tuple[int, int, int], bool] | None:
    """``(release, final)`` of a vLLM version: ``final`` is False for a pre-release or a build
    between releases (``0.11.1rc2.dev5``). None if it does not start with two numbers."""
    match = _RELEASE.fullmatch(version.strip())
    if match is None:
        return None
    major, minor, patch, rest = match.groups()
    return (int(major), int(minor), int(patch or 0)), rest == ""


def rules_for(release: tuple[int, int, int]) -> VersionRules:
    """The rules of a release; outside 0.8.0 to 0.33.0 those of the nearest release read."""
    if release < (0, 9, 1):
        tokens: TokenMeaning = "blocks_x_block_size"
    elif release < (0, 20, 1):
        tokens = "blocks_per_group"
    else:
        tokens = "concurrency_x_length"
    return VersionRules(
        tokens=tokens,
        concurrency="tokens_over_length" if release < (0, 9, 1) else "blocks_over_request",
        in_flight_batches=(1, 1) if release < (0, 26, 0) else (1, 2),
        async_by_default=release >= (0, 14, 0),
        gpu_memory_utilization=0.9 if release < (0, 20, 0) else 0.92,
        graphs_in_profile=release >= (0, 20, 0),
        null_block_in_check=release >= (0, 29, 0),
    )
