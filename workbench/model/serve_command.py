"""The engine's command line that realises a plan: ``vllm serve`` of vLLM 0.33."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.model.asked import instance, path, whole
from workbench.model.kv_settings import KVSettings
from workbench.model.layout import Layout

# Where a path was not given the command says so, quoted: pasted as it is, it fails at once.
NO_CHECKPOINT = "<path of the Beam checkpoint>"
NO_DRAFTER = "<path of the DFlash2 drafter>"
LOOPBACK = "127.0.0.1"


MOST_DRAFTS = 1023


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding as the engine is asked for it; ``drafter`` is a path or None."""

    drafter: str | None = None
    tokens: int = 7
    adaptive: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", whole("speculative tokens", self.tokens, MOST_DRAFTS))
        object.__setattr__(self, "drafter", path("drafter", self.drafter))
        instance("adaptive", self.adaptive, bool, "true or false")


def engine_keywords(
    *, layout: Layout, kv: KVSettings, utilization: float, sequences: int
) -> dict[str, Any]:
    """The engine's own arguments under their Python names, in the order of the command.

    ``kv.context`` becomes ``max_model_len``; ``sequences`` is what one data-parallel group takes at
    once. The precision of the weights is the checkpoint's own and needs no argument.
    """
    keywords: dict[str, Any] = {"tensor_parallel_size": layout.tp}
    if layout.dp > 1:
        keywords["data_parallel_size"] = layout.dp
    if layout.expert_parallel:
        keywords["enable_expert_parallel"] = True
    keywords |= {
        "kv_cache_dtype": {"bf16": "bfloat16"}.get(kv.kv_dtype, kv.kv_dtype),
        "block_size": kv.block_size,
        "max_model_len": kv.context,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": kv.batched_tokens,
        "gpu_memory_utilization": float(utilization),
    }
    if not kv.async_scheduling:
        keywords["async_scheduling"] = False
    return keywords


def speculative_config(speculation: Speculation) -> dict[str, Any]:
    """The engine's ``speculative_config``: a DFlash2 drafter, with adaptive verification or not."""
    settings: dict[str, Any] = {
        "method": "dflash",
        "model": speculation.drafter or NO_DRAFTER,
        "num_speculative_tokens": speculation.tokens,
    }
    if speculation.adaptive:
        settings["enable_adaptive_verification"] = True
    return settings


def option_words(keywords: Mapping[str, Any]) -> list[str]:
    """Keywords as words of a command: True is the option alone, False its ``--no-`` form."""
    words: list[str] = []
    for name, value in keywords.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{option}", text]
    return words


def engine_arguments(
    *,
    layout: Layout,
    kv: KVSettings,
    checkpoint: str | None,
    speculation: Speculation | None,
    utilization: float,
    sequences: int,
) -> list[str]:
    """``vllm serve`` and its arguments, one word each; see :func:`engine_keywords`."""
    keywords: dict[str, Any] = {"host": LOOPBACK}
    keywords |= engine_keywords(layout=layout, kv=kv, utilization=utilization, sequences=sequences)
    keywords |= beam_parsers()
    if speculation is not None:
        keywords["speculative_config"] = speculative_config(speculation)
    return ["vllm", "serve", checkpoint or NO_CHECKPOINT, *option_words(keywords)]


def beam_parsers() -> dict[str, Any]:
    """How the server reads a reply: Beam's reasoning and tool parsers, tools without being told."""
    return {
        "reasoning_parser": "beam",
        "tool_call_parser": "beam",
        "enable_auto_tool_choice": True,
    }


def shell(words: list[str]) -> str:
    """The words as a shell command, an option a line, ready to paste."""
    lines: list[str] = []
    for word in words:
        if not lines or word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return " \\\n  ".join(lines)
