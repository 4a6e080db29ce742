"""What the parts of a speculative step cost here: the target's pass by rows, and a draft."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from workbench.model.beam import Beam
from workbench.spec.draft_cache import DraftCache
from workbench.spec.drafter import Drafter
from workbench.spec.selector import propose

ROWS = (1, 2, 4, 8)  # of a target pass; those of a block are added


@torch.inference_mode()
def costs(
    beam: Beam,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    drafts: int,
    *,
    context: int,
    batch: int = 1,
    kept: int = 1,
    rounds: int = 40,
    warm_seconds: float = 0.5,
) -> tuple[dict[int, float], float]:
    """Milliseconds of a target pass by rows a sequence, and of a draft: medians, in turns.

    Args:
        prompts: ids that the context is made of, repeated as often as it takes.
        drafts: draft tokens of a block.
        context: tokens of each sequence before the pass.
        batch: sequences of a pass.
        kept: rows a sequence whose context K/V a draft writes.
        rounds: of which the medians are taken.
        warm_seconds: of calls before the first timed one: caches, allocator, clock frequency.
    """
    text = [token for prompt in prompts for token in prompt]
    widest = max(*ROWS, drafts + 1)
    needed = context + widest
    ids = torch.tensor((text * (needed // len(text) + 1))[:needed], device=beam.device)
    slots = list(range(batch))
    cache = beam.new_cache(batch, max(16, widest))
    rings = DraftCache(drafter, batch, drafts + 1)

    def extend(part: Tensor, at: list[int]) -> tuple[Tensor, Tensor]:
        taps: dict[int, Tensor] = dict.fromkeys(drafter.taps, part)
        hidden = beam.extend(cache, part.repeat(len(at)), [len(part)] * len(at), at, taps)
        return hidden, torch.cat([taps[layer] for layer in drafter.taps], -1)

    for slot in slots:
        _, streams = extend(ids[:context], [slot])
        rings.write(streams, [context], [slot], [context])
    block = drafts + 1
    _, verified = extend(ids[context : context + block], slots)
    anchors = ids[context].repeat(batch)

    def target(rows: int) -> None:
        for slot in slots:
            cache.truncate(slot, context)
        hidden, _ = extend(ids[context : context + rows], slots)
        beam.logits(hidden).argmax(-1).tolist()  # read back, as the verdict is

    def draft() -> None:
        propose(drafter, rings, anchors, slots, drafts).token_ids.tolist()
        rings.write(verified, [block] * batch, slots, [min(kept, block)] * batch)
        rings.ends[:] = [context] * batch

    rows = sorted({*ROWS, block})
    timed: list[tuple[int, Callable[[], None]]] = [(n, lambda n=n: target(n)) for n in rows]  # type: ignore[misc]
    timed.append((0, draft))
    spent: dict[int, list[float]] = {name: [] for name, _ in timed}
    began = perf_counter()
    while perf_counter() - began < warm_seconds:
        for _, call in timed:
            call()
    for number in range(rounds):
        for name, call in _rotated(timed, number):
            spent[name].append(_seconds(call, beam.device))
    medians = {name: 1e3 * statistics.median(times) for name, times in spent.items()}
    return {n: medians[n] for n in rows}, medians[0]


def _rotated(
    timed: list[tuple[int, Callable[[], None]]], by: int
) -> Iterator[tuple[int, Callable[[], None]]]:
    """Another first in each round, so that none always follows the same one."""
    at = by % len(timed)
    yield from (*timed[at:], *timed[:at])


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - began
