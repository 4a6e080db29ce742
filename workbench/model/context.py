"""What one forward pass attends to: positions, where K and V go, and which keys a query sees.

The model computes on flat tokens ``[N, …]``; a context knows which sequence and position each
token has, says where a layer's keys and values are written (``destination``) and attends over them
(``attend``) with whichever kernels are selected. Tables and masks are made once a pass and shared
by all layers. :class:`CachedContext` is prefill and decode over a :class:`KVCache`;
:class:`SequenceContext` is whole sequences without a cache (training, evaluation).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Protocol

import torch
from torch import Tensor

from workbench.errors import PromptError
from workbench.kernels.reach import Reach, Spans
from workbench.kernels.reference import rope_table
from workbench.kernels.tables import Kernels
from workbench.model.cache import KVCache
from workbench.model.config import BeamConfig


class Context(Protocol):
    """What the model asks of a context. N tokens, A query heads, G KV heads, D head_dim."""

    positions: Tensor  # [N] int64
    rope: Tensor  # [P, D] float32, by position
    kernels: Sequence[Kernels]  # a table a layer; the model sets it before the first layer

    def destination(
        self, layer: int, packed: Tensor, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where a layer's K and V go: flat rows ``[M, G, D]`` of each, and the N rows to write."""
        ...

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """q ``[N, A, D]`` over what was written and what was there -> ``[N, A, D]``."""
        ...


class CachedContext:
    """One pass of ``counts[i]`` new tokens for cache slot ``slots[i]``, ragged counts allowed.

    Call :meth:`commit` after the pass: until then the cache's lengths are unchanged and no row has
    been overwritten that the next pass sees, so an interrupted pass leaves the cache as it was.
    """

    kernels: Sequence[Kernels] = ()

    def __init__(
        self, cache: KVCache, counts: Sequence[int], slots: Sequence[int] | None = None
    ) -> None:
        self.cache = cache
        self.counts = list(counts)
        self.slots = list(range(len(self.counts))) if slots is None else list(slots)
        self.device = cache.k[0].device
        _check_rows(cache, self.counts, self.slots)
        starts = [cache.lengths[s] for s in self.slots]
        self.ends = [s + c for s, c in zip(starts, self.counts, strict=True)]
        cache.reserve(max(self.ends))
        ranges = [torch.arange(s, e) for s, e in zip(starts, self.ends, strict=True)]
        positions = torch.cat(ranges) if len(ranges) > 1 else ranges[0]
        self.positions = positions.to(self.device)
        config = cache.config
        self.rope = rope_table(max(self.ends), config.head_dim, config.rope_theta, self.device)
        slot_of = self._per_token(self.slots)
        self.rows_full = slot_of * cache.capacity + self.positions
        self.rows_ring = slot_of * cache.ring + self.positions % cache.ring
        # A chunk longer than the spare rows would overwrite keys its first queries still see, so it
        # attends to the old window and itself, and is stored when the pass is committed.
        self.long_chunk = max(self.counts) > cache.rollback + 1
        self._late: list[tuple[Tensor, Tensor, Tensor]] = []  # (store, rows, values) of long chunks
        if self.long_chunk:
            self._plan_chunk(starts)
        else:
            self._plan_step(starts)

    def commit(self) -> None:
        """Count the new tokens as written."""
        for store, rows, values in self._late:
            store.index_copy_(0, rows, values)
        self._late.clear()
        for slot, count in zip(self.slots, self.counts, strict=True):
            self.cache.advance(slot, count)

    def destination(
        self, layer: int, packed: Tensor, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The cache itself, or for a long chunk in a sliding layer the old window and the chunk."""
        flat_k, flat_v = (store[layer].flatten(0, 1) for store in (self.cache.k, self.cache.v))
        if self.cache.config.is_full(layer):
            return flat_k, flat_v, self.rows_full
        if not self.long_chunk:
            return flat_k, flat_v, self.rows_ring
        self._chunk_k = flat_k.new_empty(self.chunk_rows, *flat_k.shape[1:])
        self._chunk_v = torch.empty_like(self._chunk_k)
        self._chunk_k.index_copy_(0, self.old_at, flat_k[self.old_rows])
        self._chunk_v.index_copy_(0, self.old_at, flat_v[self.old_rows])
        return self._chunk_k, self._chunk_v, self.new_at

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Attend over everything this layer may see, what was just written included."""
        kernels, full = self.kernels[layer], self.cache.config.is_full(layer)
        keys, values = self.cache.k[layer], self.cache.v[layer]
        if not self.long_chunk:
            reach = self.reach_full if full else self.reach_ring
            o: Tensor = kernels.decode_attention(self._padded(q), keys, values, reach)
            o = o.flatten(0, 1)
            return o if self.unpad is None else o[self.unpad]
        if full:
            flat_k, flat_v = (_joined(x, self.slots, self.ends) for x in (keys, values))
            return kernels.prefill_attention(q, flat_k, flat_v, self.spans_full)
        rows = self.rows_ring[self.kept]
        for store, chunk in ((keys, self._chunk_k), (values, self._chunk_v)):
            self._late.append((store.flatten(0, 1), rows, chunk[self.new_at[self.kept]]))
        return kernels.prefill_attention(q, self._chunk_k, self._chunk_v, self.spans_ring)

    def _plan_step(self, starts: list[int]) -> None:
        """A decode or verify step: a few tokens a sequence, written before they are attended."""
        cache, width, batch = self.cache, max(self.counts), len(self.counts)
        # Flat tokens <-> padded [batch, width]; None when all counts are equal (a plain view).
        self.pad = self.unpad = None
        if min(self.counts) != width:
            offsets = [0, *accumulate(self.counts)]
            index = [
                offset + min(i, count - 1)
                for offset, count in zip(offsets, self.counts, strict=False)
                for i in range(width)
            ]
            real = [b * width + i for b, count in enumerate(self.counts) for i in range(count)]
            self.pad = torch.tensor(index, device=self.device)
            self.unpad = torch.tensor(real, device=self.device)
        slots = torch.tensor(self.slots, device=self.device)
        first = torch.tensor(starts, device=self.device)
        low, span = self.slots[0], max(self.ends)
        neighbours = self.slots == list(range(low, low + batch))
        view = slice(low, low + batch) if neighbours else None
        alone = batch == 1
        self.reach_full = Reach(slots, first, span=span, window=None, view=view, alone=alone)
        self.reach_ring = Reach(slots, first, span=cache.ring, window=cache.window, view=view)
        for slot, end in zip(self.slots, self.ends, strict=True):
            cache.overwriting(slot, end)

    def _plan_chunk(self, starts: list[int]) -> None:
        """A prefill chunk: sliding layers see the old window, then the chunk, end to end."""
        cache, device = self.cache, self.device
        olds = [min(start, cache.window - 1) for start in starts]  # earlier tokens a ring still has
        lengths = [old + count for old, count in zip(olds, self.counts, strict=True)]
        self.spans_full = Spans(self.counts, self.ends, None, device)
        self.spans_ring = Spans(self.counts, lengths, cache.window, device)
        self.chunk_rows = sum(lengths)
        old_at, old_rows, new_at, kept = [], [], [], []
        base = token = 0
        for slot, start, old, count in zip(self.slots, starts, olds, self.counts, strict=True):
            old_at.append(range(base, base + old))
            old_rows.append([slot * cache.ring + p % cache.ring for p in range(start - old, start)])
            new_at.append(range(base + old, base + old + count))
            kept.append(range(token + max(0, count - cache.ring), token + count))
            base, token = base + old + count, token + count
        self.old_at, self.old_rows, self.new_at, self.kept = (
            torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int64, device=device)
            for parts in (old_at, old_rows, new_at, kept)
        )

    def _per_token(self, values: list[int]) -> Tensor:
        if len(values) == 1:
            return torch.tensor(values[0], device=self.device)
        counts = torch.tensor(self.counts)
        return torch.tensor(values).repeat_interleave(counts).to(self.device)

    def _padded(self, x: Tensor) -> Tensor:
        """``[N, heads, D] -> [batch, width, heads, D]``."""
        x = x if self.pad is None else x[self.pad]
        return x.unflatten(0, (len(self.counts), -1))


def _joined(store: Tensor, slots: list[int], ends: list[int]) -> Tensor:
    """The first ``ends[i]`` rows of each slot end to end; one sequence is a view."""
    parts = [store[slot, :end] for slot, end in zip(slots, ends, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class SequenceContext:
    """``batch`` whole sequences of ``length`` tokens, positions from 0, no cache."""

    kernels: Sequence[Kernels] = ()

    def __init__(
        self, config: BeamConfig, batch: int, length: int, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.batch, self.length = config, batch, length
        self.positions = torch.arange(length, device=device).repeat(batch)
        self.rope = rope_table(length, config.head_dim, config.rope_theta, device)
        lengths = [length] * batch
        self.spans_full = Spans(lengths, lengths, None, device)
        self.spans_window = Spans(lengths, lengths, config.sliding_window, device)

    def destination(
        self, layer: int, packed: Tensor, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """New rows, one a token, in order."""
        shape = (packed.shape[0], kv_heads, self.config.head_dim)
        self.k, self.v = packed.new_empty(shape), packed.new_empty(shape)
        return self.k, self.v, None

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Causal attention within each sequence, windowed in sliding layers."""
        spans = self.spans_full if self.config.is_full(layer) else self.spans_window
        o: Tensor = self.kernels[layer].prefill_attention(q, self.k, self.v, spans)
        return o


def _check_rows(cache: KVCache, counts: list[int], slots: list[int]) -> None:
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (*counts, *slots))
    if not whole or len(counts) != len(slots) or min(counts, default=0) < 0 or sum(counts) < 1:
        raise PromptError(
            f"a pass needs a whole number of tokens for each slot, at least one in all; "
            f"got counts {counts} for slots {slots}"
        )
    if len(set(slots)) < len(slots) or not all(0 <= s < cache.slots for s in slots):
        raise PromptError(
            f"slots {slots} must be different ones from 0 to {cache.slots - 1}; "
            "make the cache with as many slots as there are sequences"
        )
