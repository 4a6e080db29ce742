"""Bits per byte of a Beam on text: the figure that does not depend on the tokenizer."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workbench.errors import TrainingError
from workbench.model.beam import Beam
from workbench.training.settings import TrainingSettings

HELD_OUT = ("heldout_code", "heldout_package", "heldout_prose")


def bits_per_byte(
    beam: Beam,
    texts: Iterable[str],
    *,
    progress: Callable[[int], None] | None = None,
    tokens_a_pass: int = 16384,
) -> dict[str, Any]:
    """Code length of ``texts`` under the model, each text on its own from the start token.

    A text longer than the context is scored in windows that overlap by half: every token is
    scored once, with at least half a context of what precedes it (texts shorter: with all of it).

    Args:
        beam: a model with a tokenizer.
        texts: documents; empty ones count nothing.
        progress: told the bytes scored so far.
        tokens_a_pass: tokens computed at once (memory).

    Returns:
        ``bytes`` (UTF-8), ``tokens`` scored, ``bits_per_byte``.

    Raises:
        TrainingError: there is no text, the model has no tokenizer, or the tokenizer gives a token
            that the model's vocabulary does not have.
    """
    tokenizer = beam.tokenizer
    if tokenizer is None:
        raise TrainingError(f"{beam.name} has no tokenizer.json, so text cannot be scored")
    nats, size, count = 0.0, 0, 0
    context, vocabulary = beam.config.max_position_embeddings, beam.config.vocab_size
    groups: dict[int, list[tuple[list[int], int]]] = {}

    def flush(length: int) -> None:
        nonlocal nats, count
        windows = groups.pop(length, [])
        if windows:
            summed, scored = _score(beam, windows)
            nats, count = nats + summed, count + scored

    for text in texts:
        ids = tokenizer.encode(text, bos=True)
        if max(ids) >= vocabulary:
            raise TrainingError(
                f"the tokenizer of {beam.name} gives token {max(ids)} and has "
                f"{tokenizer.vocab_size} tokens, but the model's vocab_size is {vocabulary}; "
                "use the tokenizer that the model was trained with"
            )
        size += len(text.encode("utf-8"))
        for window, first in _windows(ids, context):
            groups.setdefault(len(window), []).append((window, first))
            if len(groups[len(window)]) * len(window) >= tokens_a_pass:
                flush(len(window))
        if progress is not None:
            progress(size)
    for length in list(groups):
        flush(length)
    if not count:
        raise TrainingError("there is no text to score; give at least one non-empty file")
    return {"bytes": size, "tokens": count, "bits_per_byte": round(nats / math.log(2) / size, 4)}


def _windows(ids: list[int], context: int) -> Iterator[tuple[list[int], int]]:
    """(inputs and targets of one window, index of its first scored target)."""
    start, scored = 0, 1
    while scored < len(ids):
        stop = min(len(ids), start + context)
        yield ids[start:stop], scored - start
        scored, start = stop, max(0, stop - context // 2)


@torch.inference_mode()
def _score(beam: Beam, windows: list[tuple[list[int], int]]) -> tuple[float, int]:
    ids = torch.tensor([w for w, _ in windows], device=beam.device)
    logits = beam.sequence_logits(ids[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    losses = losses.view(len(windows), -1)
    first = torch.tensor([f for _, f in windows], device=beam.device)[:, None]
    scored = torch.arange(1, ids.shape[1], device=beam.device) >= first
    return float(losses.double().mul(scored).sum()), int(scored.sum())


def read_texts(files: Iterable[str | Path]) -> Iterator[str]:
    """The texts of files; a ``.jsonl`` file holds one document a line under ``text``.

    Raises:
        TrainingError: a file cannot be read as UTF-8 text, or is a pipe, a device or a folder.
    """
    for name in files:
        file = Path(name)
        try:
            if not stat.S_ISREG(file.stat().st_mode):  # a pipe may wait and a device go on for ever
                raise TrainingError(f"{file} is not a regular file; write the text into one first")
            if file.suffix == ".jsonl":
                with file.open(encoding="utf-8") as lines:
                    for line in lines:
                        yield _text(json.loads(line))
            else:
                yield file.read_bytes().decode("utf-8")  # as it is: text mode rewrites line ends
        except OSError as error:
            raise TrainingError(f"{file} cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise TrainingError(f"{file} is not UTF-8 text; convert it first") from error
        except TrainingError:
            raise
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if "\0" in str(name):
                raise TrainingError(f"{str(name)!r} is not a path (it holds a NUL)") from error
            raise TrainingError(f"{file} is not JSON lines with a 'text' in each") from error


def _text(document: Any) -> str:
    text = document["text"]
    if not isinstance(text, str):
        raise TypeError(type(text).__name__)
    return text


def evaluate_held_out(beam: Beam, settings: TrainingSettings) -> dict[str, Any]:
    """Bits per byte of each held-out set of the corpus folder (as many documents as asked for)."""
    results = {}
    for name in HELD_OUT:
        file = Path(settings.corpus) / f"{name}.jsonl"
        if settings.evaluate_bytes and file.is_file():
            texts, size = [], 0
            for text in read_texts([file]):
                if size >= settings.evaluate_bytes:
                    break
                texts.append(text)
                size += len(text.encode("utf-8"))
            with counted_experts(beam) as counts:
                results[name] = bits_per_byte(beam, texts, tokens_a_pass=65536)
            results[name]["expert_share"] = _shares(counts)
    return results


@contextmanager
def counted_experts(beam: Beam) -> Iterator[dict[int, torch.Tensor]]:
    """Count the tokens each expert gets, by sparse layer, while the block runs."""
    counts: dict[int, torch.Tensor] = {}
    handles = []

    def counter(layer: int) -> Callable[..., None]:
        def count(_module: nn.Module, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
            counts[layer] += output[0].flatten().bincount(minlength=beam.config.num_experts).cpu()

        return count

    try:
        for index, layer in enumerate(beam.layers):
            if beam.config.is_sparse(index):
                counts[index] = torch.zeros(beam.config.num_experts, dtype=torch.int64)
                router = layer.get_submodule("mlp.router")
                handles.append(router.register_forward_hook(counter(index)))
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _shares(counts: dict[int, torch.Tensor]) -> dict[str, float]:
    """Least and most loaded expert over all layers, as a multiple of an even share."""
    even = [c.double() / c.double().mean() for c in counts.values()]
    if not even:
        return {}
    table = torch.stack(even)
    return {"least": round(float(table.min()), 3), "most": round(float(table.max()), 3)}
