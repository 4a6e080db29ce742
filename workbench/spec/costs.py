"""What the parts of a speculative step cost here: the target's pass by rows, and a draft."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from time import perf_counter

import torch

from workbench.model.beam import Beam
from workbench.spec.drafter import Drafter
from workbench.spec.passes import Call, Passes, rotated, seconds_of

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
    passes = Passes(
        beam, drafter, prompts, drafts, context=context, batch=batch, widest=max(*ROWS, drafts + 1)
    )
    block = drafts + 1
    rows = sorted({*ROWS, block})
    timed: list[tuple[int, Call]] = [(n, partial(passes.target, [n] * batch)) for n in rows]
    timed.append((0, partial(passes.draft, batch, kept)))
    spent: dict[int, list[float]] = {name: [] for name, _ in timed}
    began = perf_counter()
    while perf_counter() - began < warm_seconds:
        for _, call in timed:
            call()
    for number in range(rounds):
        for name, call in rotated(timed, number):
            spent[name].append(seconds_of(call, beam.device))
    medians = {name: 1e3 * statistics.median(times) for name, times in spent.items()}
    return {n: medians[n] for n in rows}, medians[0]
