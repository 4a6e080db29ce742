"""Asking a running engine for the streams around its layers: one prompt, kept by its workers.

The steps are those of ``parity_worker.py``. What cannot be compared is refused here, before or
after the prompt, in one sentence that says what to do.
"""

from __future__ import annotations

import importlib
import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from workbench.errors import ServingError
from workbench.model.config import BeamConfig, is_int
from workbench.serving.layers.engine_worker import EXTENSION
from workbench.serving.layers.parity_worker import HEAD, METHOD, SCHEMA, unpacked

if TYPE_CHECKING:  # the engine is asked and refused where there is no torch
    from torch import Tensor

# What one worker answers to one step.
Answer = Mapping[str, Any]

_HOW = (
    f'start it as vllm.LLM(model, worker_extension_cls="{EXTENSION}", enforce_eager=True), with '
    "the workbench on the workers' PYTHONPATH"
)
_MOST_TOKENS = 1 << 22  # of a prompt that is looked at
_SEED = 20260101  # of a prompt that nobody gave


def ask(llm: Any, action: str, *given: Any) -> list[Answer]:
    """What every worker answers to one step, in the order of the ranks.

    Raises:
        ServingError: this is no engine with our extension, or a worker could not do the step.
    """
    call = getattr(llm, "collective_rpc", None)
    if call is None:
        raise ServingError(
            f"layers are compared with a vllm.LLM of this process, not with {type(llm).__name__}; "
            + _HOW
        )
    try:
        answers = list(call(METHOD, args=(action, *given)))
    except Exception as error:
        raise ServingError(
            f"the engine's workers cannot be asked ({_said(error)}); {_HOW}"
        ) from error
    rows: list[Answer] = [dict(answer) for answer in answers if isinstance(answer, Mapping)]
    if not rows or len(rows) != len(answers) or any(r.get("schema") != SCHEMA for r in rows):
        raise ServingError(
            "the engine's workers have a workbench of another version; give them ours"
        )
    for row in rows:
        if row.get("error"):
            raise ServingError(
                f"rank {_line(row.get('rank'))} of the engine: {_line(row['error'])}"
            )
    return rows


def _line(text: Any) -> str:
    """What the engine says, on one line."""
    words = " ".join(str(text).split())[:600]
    return words if words.isprintable() else ascii(words)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {_line(error)[:200]}"


def check_engine(about: Sequence[Answer], config: BeamConfig, name: str) -> None:
    """Refuse an engine whose layers run no hooks, or that serves another model than ``name``.

    Raises:
        ServingError: it does.
    """
    if any(row.get("eager") is not True for row in about):
        raise ServingError(
            "the engine runs captured graphs or compiled code, which no hook sees; start it with "
            "enforce_eager=True"
        )
    for row in about:
        if row.get("layers") != config.num_hidden_layers:
            raise ServingError(
                f"the engine's model has {_line(row.get('layers'))} layers and {name} "
                f"{config.num_hidden_layers}; give the checkpoint that the engine serves"
            )


def prompt_ids(given: Sequence[int] | None, config: BeamConfig, about: Answer) -> list[int]:
    """The prompt's ids, checked against the vocabulary and what one piece takes.

    None draws ids at random, the same every time.

    Raises:
        ServingError: an id that the vocabulary does not have, no ids, or too many.
    """
    limits = [n for n in (about.get("max_tokens"), config.max_position_embeddings - 1) if is_int(n)]
    length = about.get("max_model_len")
    most = min([*limits, length - 1] if is_int(length) else limits)
    if most < 1:
        raise ServingError(
            f"the engine takes {most} tokens of a prompt in one piece; raise "
            "max_num_batched_tokens and max_model_len"
        )
    if given is None:
        draw = random.Random(_SEED)
        wanted = min(2 * config.sliding_window + 17, most)
        return [draw.randrange(config.vocab_size) for _ in range(wanted)]
    listed = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    # One more than it can be: what is iterated need not have an end.
    ids = [_index(i) for i in islice(given, _MOST_TOKENS)] if listed else []
    if not all(0 <= i < config.vocab_size for i in ids) or not ids:
        raise ServingError(
            f"prompt_token_ids takes token ids from 0 to {config.vocab_size - 1}, at least one"
        )
    if len(ids) > most:
        raise ServingError(
            f"the prompt has {len(ids)} tokens and the engine takes {most} in one piece; shorten "
            "it, or raise max_num_batched_tokens and max_model_len"
        )
    return ids


def _index(value: Any) -> int:
    """A whole number, numpy's and torch's too; -1, which is no id, for what is none."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def compute(llm: Any, ids: list[int]) -> None:
    """Let the engine prefill the prompt and generate one token.

    Raises:
        ServingError: it failed at that.
    """
    try:
        vllm = importlib.import_module("vllm")
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False
        )
        reset = getattr(llm, "reset_prefix_cache", None)
        if reset is not None:
            reset()  # a prefix that is cached would not be computed
        llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    except Exception as error:
        raise ServingError(
            f"the engine failed while it computed the prompt ({_said(error)}); start it anew"
        ) from error


def _understood(row: Answer) -> bool:
    """Whether an answer to ``seen`` is one of this version."""
    kept = row.get("kept")
    return (
        isinstance(row.get("errors"), list)
        and isinstance(row.get("passes"), list)
        and isinstance(kept, Mapping)
        and all(isinstance(each, Mapping) for each in kept.values())
        and "rank" in row
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStreams:
    """What the workers kept of the prompt's pass.

    Attributes:
        llm: the engine.
        seen: what each rank says it kept: ``passes``, ``errors``, and under ``kept`` a digest of
            each tensor by layer.
    """

    llm: Any
    seen: Sequence[Answer]

    def check(self, layers: Sequence[int], tokens: int, about: Answer) -> None:
        """Refuse a pass of which a layer was not kept whole.

        Raises:
            ServingError: a hook failed or was never called, or the prompt was split.
        """
        if not all(map(_understood, self.seen)):
            raise ServingError(
                "the engine's workers have a workbench of another version; give them ours"
            )
        for row in self.seen:
            if row["errors"]:
                raise ServingError(
                    f"a hook failed in rank {row['rank']} of the engine: {_line(row['errors'][0])}"
                )
        missing = [layer for layer in layers if self.owner(layer) is None]
        if not missing:
            return
        passes: list[int] = next((row["passes"] for row in self.seen if row["passes"]), [])
        if not passes:
            raise ServingError(
                f"no hook was called in layer {missing[0]}: the engine does not run its layers as "
                "modules, as with captured graphs; start it with enforce_eager=True"
            )
        raise ServingError(
            f"the prompt of {tokens} tokens was not computed in one piece: the passes had "
            f"{', '.join(map(str, passes[:6]))} tokens; raise max_num_batched_tokens (now "
            f"{about.get('max_tokens')}), and let nothing else run meanwhile"
        )

    def owner(self, layer: int) -> int | None:
        """The first rank that kept a layer whole (or, for ``HEAD``, the logits)."""
        wanted = ("logits",) if layer == HEAD else ("before", "after")
        for row in self.seen:
            kept = row["kept"].get(str(layer), {})
            if all(name in kept for name in wanted):
                rank = row["rank"]
                return rank if is_int(rank) else 0
        return None

    def outputs(self, layer: int) -> list[tuple[int, str]]:
        """Every rank that kept the layer's output, with the output's digest."""
        return [
            (row["rank"], row["kept"][str(layer)]["after"])
            for row in self.seen
            if "after" in row["kept"].get(str(layer), {})
        ]

    def tensors(self, layer: int, rank: int | None = None) -> dict[str, Tensor]:
        """What a rank kept of a layer, by name, on the CPU; by default what its owner did.

        Names and shapes are those of ``parity_worker.Watch``.

        Raises:
            ServingError: the engine no longer has it.
        """
        owner = self.owner(layer) if rank is None else rank
        for row in ask(self.llm, "take", layer, owner):
            if row.get("tensors"):
                try:
                    return {name: unpacked(one) for name, one in row["tensors"].items()}
                except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                    raise ServingError(
                        f"what rank {owner} of the engine kept of layer {layer} cannot be read "
                        f"({_said(error)}); ask again"
                    ) from error
        raise ServingError(f"rank {owner} of the engine no longer has layer {layer}; ask again")
