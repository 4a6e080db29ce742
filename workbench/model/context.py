"""What one forward pass attends to: positions, masks and the attention core itself.

The model computes on flat tokens ``[N, …]``; a context knows which sequence and position each
token has and answers ``attend(layer, q, k, v)``. Masks and position tables are made once a pass
and shared by all layers. :class:`CachedContext` is prefill and decode over a :class:`KVCache`;
:class:`SequenceContext` is whole sequences without a cache (training, evaluation).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.errors import PromptError
from workbench.kernels import ops
from workbench.model.cache import KVCache
from workbench.model.config import BeamConfig


class Context(Protocol):
    """What the model asks of a context. N tokens, A query heads, G KV heads, D head_dim."""

    cos: Tensor  # [N, 1, D] float32
    sin: Tensor
    ssmax: Tensor  # [N, 1, 1] float32

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q ``[N, A, D]``, k and v ``[N, G, D]`` -> ``[N, A, D]``, scale D**-0.5."""
        ...


class _Positions:
    """Position-dependent factors, shared by the layers of a pass."""

    def __init__(self, config: BeamConfig, positions: Tensor) -> None:
        self.positions = positions
        self.cos, self.sin = ops.rope_angles(positions, config.head_dim, config.rope_theta)
        self.ssmax = ops.ssmax_scale(positions)


class CachedContext(_Positions):
    """One pass of ``counts[i]`` new tokens for cache slot ``slots[i]``, ragged counts allowed.

    Call :meth:`commit` after the pass: until then the cache's lengths are unchanged and no row has
    been overwritten that the next pass sees, so an interrupted pass leaves the cache as it was.
    """

    def __init__(
        self, cache: KVCache, counts: Sequence[int], slots: Sequence[int] | None = None
    ) -> None:
        self.cache = cache
        self.counts = list(counts)
        self.slots = list(range(len(self.counts))) if slots is None else list(slots)
        self.device = cache.k[0].device
        _check_rows(cache, self.counts, self.slots)
        starts = [cache.lengths[s] for s in self.slots]
        ends = [s + c for s, c in zip(starts, self.counts, strict=True)]
        cache.reserve(max(ends))
        positions = torch.cat(
            [torch.arange(s, e) for s, e in zip(starts, ends, strict=True)]
        ) if len(ends) > 1 else torch.arange(starts[0], ends[0])  # fmt: skip
        super().__init__(cache.config, positions.to(self.device))
        self._late: list[tuple[Tensor, Tensor, Tensor]] = []  # (store, rows, values) of long chunks
        self._plan(starts, ends)

    def commit(self) -> None:
        """Count the new tokens as written."""
        for store, rows, values in self._late:
            store.index_copy_(0, rows, values)
        self._late.clear()
        for slot, count in zip(self.slots, self.counts, strict=True):
            self.cache.advance(slot, count)

    def _plan(self, starts: list[int], ends: list[int]) -> None:
        cache, width = self.cache, max(self.counts)
        batch = len(self.counts)
        # Flat tokens <-> padded [batch, width]; None when all counts are equal (a plain view).
        self.pad = self.unpad = None
        q_pos = self.positions
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
            q_pos = q_pos[self.pad]
        q_pos = q_pos.view(batch, width)
        slot_of = self._per_token(self.slots)
        self.rows_full = slot_of * cache.capacity + self.positions
        self.rows_ring = slot_of * cache.ring + self.positions % cache.ring
        self.slot_index = self._slot_index()

        self.span = max(ends)  # keys of full layers that are looked at
        self.mask_full = None
        if batch > 1 or width > 1:
            keys = torch.arange(self.span, device=self.device)
            self.mask_full = self._grouped(keys <= q_pos[..., None])

        # A chunk longer than the spare rows would overwrite keys its first queries still see, so it
        # attends to the old window and itself, and is stored when the pass is committed.
        self.long_chunk = width > cache.rollback + 1
        if self.long_chunk:
            reach = torch.arange(1 - cache.window, 0, device=self.device)
            old = torch.tensor(starts, device=self.device)[:, None] + reach  # [batch, window - 1]
            self.old_rows = torch.tensor(self.slots, device=self.device)[:, None] * cache.ring
            self.old_rows = self.old_rows + old % cache.ring
            new = q_pos if self.pad is None else self._hide_padding(q_pos, ends)
            positions = torch.cat((old, new), 1)
            kept = [
                t
                for offset, count in zip([0, *accumulate(self.counts)], self.counts, strict=False)
                for t in range(offset + max(0, count - cache.ring), offset + count)
            ]
            self.kept = torch.tensor(kept, device=self.device)
        else:
            for slot, end in zip(self.slots, ends, strict=True):
                cache.overwriting(slot, end)
            positions = cache.ring_positions(torch.tensor(ends, device=self.device))
        seen = positions[:, None, :]  # [batch, 1, keys]
        visible = (seen >= 0) & (seen <= q_pos[..., None])
        self.mask_ring = self._grouped(visible & (seen > q_pos[..., None] - cache.window))

    def _hide_padding(self, q_pos: Tensor, ends: list[int]) -> Tensor:
        """Positions of padded new keys, with padding moved where no query sees it."""
        width = q_pos.shape[1]
        count = torch.tensor(self.counts, device=self.device)[:, None]
        real = torch.arange(width, device=self.device) < count
        return torch.where(real, q_pos, max(ends))

    def _per_token(self, values: list[int]) -> Tensor:
        if len(values) == 1:
            return torch.tensor(values[0], device=self.device)
        counts = torch.tensor(self.counts)
        return torch.tensor(values).repeat_interleave(counts).to(self.device)

    def _slot_index(self) -> slice | Tensor:
        first = self.slots[0]
        if self.slots == list(range(first, first + len(self.slots))):
            return slice(first, first + len(self.slots))
        return torch.tensor(self.slots, device=self.device)

    def _grouped(self, mask: Tensor) -> Tensor:
        """``[batch, width, keys] -> [batch, 1, width * query heads a KV head, keys]``.

        As the number added to the scores, since otherwise every layer converts it anew.
        """
        added = torch.zeros(mask.shape, dtype=self.cache.k[0].dtype, device=self.device)
        added.masked_fill_(~mask, float("-inf"))
        return added.repeat_interleave(self.cache.group, 1)[:, None]

    def _padded(self, x: Tensor) -> Tensor:
        """``[N, heads, D] -> [batch, width, heads, D]``."""
        x = x if self.pad is None else x[self.pad]
        return x.unflatten(0, (len(self.counts), -1))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v, then attend over everything this layer may see."""
        keys, values, mask = self._store(layer, k, v)
        batch, heads, width = len(self.counts), keys.shape[2], max(self.counts)
        # Query heads of one KV head become rows: no copy of K and V for grouped-query attention.
        rows = self._padded(q).unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)
        o = self.core(layer, rows, keys.transpose(1, 2), values.transpose(1, 2), mask)
        o = o.unflatten(2, (width, -1)).transpose(1, 2).reshape(batch * width, *q.shape[1:])
        return o if self.unpad is None else o[self.unpad]

    def core(
        self, layer: int, rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Softmax attention of ``rows [B, G, R, D]`` over ``keys [B, G, S, D]``; overridable."""
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)

    def _store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        cache = self.cache
        flat_k, flat_v = cache.k[layer].flatten(0, 1), cache.v[layer].flatten(0, 1)
        if cache.config.is_full(layer):
            flat_k.index_copy_(0, self.rows_full, k)
            flat_v.index_copy_(0, self.rows_full, v)
            where = (self.slot_index, slice(self.span))
            return cache.k[layer][where], cache.v[layer][where], self.mask_full
        if not self.long_chunk:
            flat_k.index_copy_(0, self.rows_ring, k)
            flat_v.index_copy_(0, self.rows_ring, v)
            return cache.k[layer][self.slot_index], cache.v[layer][self.slot_index], self.mask_ring
        keys = torch.cat((flat_k[self.old_rows], self._padded(k)), 1)
        values = torch.cat((flat_v[self.old_rows], self._padded(v)), 1)
        rows = self.rows_ring[self.kept]
        self._late += ((flat_k, rows, k[self.kept]), (flat_v, rows, v[self.kept]))
        return keys, values, self.mask_ring


class SequenceContext(_Positions):
    """``batch`` whole sequences of ``length`` tokens, positions from 0, no cache."""

    def __init__(
        self, config: BeamConfig, batch: int, length: int, device: torch.device | str = "cpu"
    ) -> None:
        position = torch.arange(length, device=device)
        super().__init__(config, position.repeat(batch))
        self.config, self.batch, self.length = config, batch, length
        distance = position[:, None] - position
        self.window_mask = (distance >= 0) & (distance < config.sliding_window)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention within each sequence, windowed in sliding layers."""
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return self.core(layer, q, k, v).transpose(1, 2).flatten(0, 1)

    def core(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of ``[B, A, T, D]`` on itself; overridable."""
        if self.config.is_full(layer):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.window_mask)


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
