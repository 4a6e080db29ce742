"""The engine's command line that realises a plan: ``vllm serve`` of vLLM 0.33."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from workbench.model.asked import instance, path, whole
from workbench.model.kv_settings import KVSettings
from workbench.model.layout import Layout

# Where a path was not given the command says so, quoted: pasted as it is, it fails at once.
NO_CHECKPOINT = "<path of the Beam checkpoint>"
NO_DRAFTER = "<path of the DFlash2 drafter>"


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


def engine_arguments(
    *,
    layout: Layout,
    kv: KVSettings,
    checkpoint: str | None,
    speculation: Speculation | None,
    utilization: float,
    sequences: int,
) -> list[str]:
    """``vllm serve`` and its arguments, one word each.

    ``kv.context`` becomes ``--max-model-len``; ``sequences`` is what one data-parallel group takes
    at once. The precision of the weights is the checkpoint's own and needs no argument.
    """
    words = ["vllm", "serve", checkpoint or NO_CHECKPOINT, "--host", "127.0.0.1"]
    words += ["--tensor-parallel-size", str(layout.tp)]
    if layout.dp > 1:
        words += ["--data-parallel-size", str(layout.dp)]
    if layout.expert_parallel:
        words.append("--enable-expert-parallel")
    words += ["--kv-cache-dtype", {"bf16": "bfloat16"}.get(kv.kv_dtype, kv.kv_dtype)]
    words += ["--block-size", str(kv.block_size)]
    words += ["--max-model-len", str(kv.context)]
    words += ["--max-num-seqs", str(sequences)]
    words += ["--max-num-batched-tokens", str(kv.batched_tokens)]
    words += ["--gpu-memory-utilization", repr(float(utilization))]
    if not kv.async_scheduling:
        words.append("--no-async-scheduling")
    words += ["--reasoning-parser", "beam", "--tool-call-parser", "beam"]
    words.append("--enable-auto-tool-choice")
    if speculation is not None:
        settings = {
            "method": "dflash",
            "model": speculation.drafter or NO_DRAFTER,
            "num_speculative_tokens": speculation.tokens,
        }
        if speculation.adaptive:
            settings["enable_adaptive_verification"] = True
        words += ["--speculative-config", json.dumps(settings)]
    return words


def shell(words: list[str]) -> str:
    """The words as a shell command, an option a line, ready to paste."""
    lines: list[str] = []
    for word in words:
        if not lines or word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return " \\\n  ".join(lines)
