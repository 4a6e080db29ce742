"""The two halves of a speculative step alone, again and again on the same contexts: to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from workbench.model.beam import Beam
from workbench.spec.draft_cache import DraftCache
from workbench.spec.drafter import Drafter
from workbench.spec.selector import propose

Call = Callable[[], None]


class Passes:
    """``batch`` sequences with ``context`` tokens each, for target passes and drafts behind them.

    Call within ``torch.inference_mode``.
    """

    def __init__(
        self,
        beam: Beam,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        drafts: int,
        *,
        context: int,
        batch: int,
        widest: int,
    ) -> None:
        """Fill the caches.

        Args:
            prompts: ids that the context is made of, repeated as often as it takes.
            drafts: draft tokens of a block.
            widest: most rows of a sequence in a pass.
        """
        self.beam, self.drafter, self.drafts, self.context = beam, drafter, drafts, context
        text = [token for prompt in prompts for token in prompt]
        needed = context + max(widest, drafts + 1)
        self._ids = torch.tensor((text * (needed // len(text) + 1))[:needed], device=beam.device)
        self._cache = beam.new_cache(batch, max(16, widest, drafts + 1))
        self._rings = DraftCache(drafter, batch, drafts + 1)
        for slot in range(batch):
            _, streams = self._extend([context], [slot], 0)
            self._rings.write(streams, [context], [slot], [context])
        block = drafts + 1
        _, self._verified = self._extend([block] * batch, list(range(batch)), context)
        self._anchors = self._ids[context].repeat(batch)

    def target(self, counts: Sequence[int]) -> None:
        """A pass of the target over so many rows of each of the first sequences, read back."""
        slots = list(range(len(counts)))
        for slot in slots:
            self._cache.truncate(slot, self.context)
        hidden, _ = self._extend(list(counts), slots, self.context)
        self.beam.logits(hidden).argmax(-1).tolist()  # read back, as the verdict is

    def draft(self, batch: int, kept: int = 1) -> None:
        """A draft for the first ``batch`` sequences, and the context K/V of ``kept`` rows each."""
        slots, block = list(range(batch)), self.drafts + 1
        propose(
            self.drafter, self._rings, self._anchors[:batch], slots, self.drafts
        ).token_ids.tolist()
        rows = self._verified[: block * batch]
        self._rings.write(rows, [block] * batch, slots, [min(kept, block)] * batch)
        self._rings.ends[:batch] = [self.context] * batch

    def _extend(self, counts: list[int], slots: list[int], start: int) -> tuple[Tensor, Tensor]:
        ids = torch.cat([self._ids[start : start + count] for count in counts])
        taps: dict[int, Tensor] = dict.fromkeys(self.drafter.taps, ids)
        hidden = self.beam.extend(self._cache, ids, counts, slots, taps)
        return hidden, torch.cat([taps[layer] for layer in self.drafter.taps], -1)


def rotated(timed: Sequence[tuple[int, Call]], by: int) -> Iterator[tuple[int, Call]]:
    """Another first in each round, so that none always follows the same one."""
    at = by % len(timed)
    yield from (*timed[at:], *timed[:at])


def seconds_of(call: Call, device: torch.device) -> float:
    """Wall time of a call, with what it started on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - began
