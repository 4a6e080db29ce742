"""Who sees whom in a drafter's pass: over a cache when serving, anywhere in whole sequences.

A query row at position i sees every row of its own block, earlier and later, and the context at the
``window - 1`` positions before itself: each row has its own left edge. No other block is seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.errors import DraftError
from workbench.spec.draft_cache import DraftCache


class CachedBlocks:
    """One block of ``query_len`` rows for each slot, over a :class:`DraftCache`.

    Row j of slot ``slots[i]`` is at ``starts[i] + j``, the anchor's position first. Its keys and
    values go into the cache at its position; the context of verified tokens later overwrites them.
    Positions beyond ``limit - 1`` are taken as ``limit - 1`` for RoPE: what is drafted there is
    garbage and never verified.
    """

    def __init__(
        self, cache: DraftCache, starts: Tensor, slots: list[int], query_len: int, limit: int
    ) -> None:
        if query_len > cache.query_len:  # it would overwrite context that it can still see
            raise DraftError(
                f"a block of {query_len} rows needs a draft cache made for as many, not for "
                f"{cache.query_len}; make the cache for the longest block"
            )
        self.cache, self.query_len, batch = cache, query_len, len(slots)
        device = starts.device
        place = starts[:, None] + torch.arange(query_len, device=device)  # [R, Q]
        self.positions = place.clamp(max=limit - 1).flatten()
        where = torch.tensor(slots, device=device)
        self._rows = (where[:, None] * cache.ring + place % cache.ring).flatten()
        neighbours = slots == list(range(slots[0], slots[0] + batch))
        self._slots: slice | Tensor = slice(slots[0], slots[0] + batch) if neighbours else where
        last = place[:, -1:]  # the newest position in the ring
        row = torch.arange(cache.ring, device=device)
        held = (last - (last - row) % cache.ring)[:, None]  # position that each ring row holds
        self._seen = (held >= 0) & _near(place[..., None], held, cache.window, limit)
        self._mask: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As :class:`workbench.spec.drafter.DraftAttention`."""
        keys, values = self.cache.k[layer], self.cache.v[layer]
        keys.flatten(0, 1)[self._rows] = k.to(keys.dtype)
        values.flatten(0, 1)[self._rows] = v.to(values.dtype)
        if self._mask is None:
            group = q.shape[1] // k.shape[1]
            self._mask = _added(self._seen, group, q.dtype)
        blocks = q.unflatten(0, (-1, self.query_len))
        return _attention(blocks, keys[self._slots], values[self._slots], self._mask)


class SequenceBlocks:
    """Blocks anchored anywhere in whole sequences: training, evaluation, every-position traces.

    Args:
        context: (K, V) of each layer, ``[S, T, G, D]``, K normed and rotated
            (:meth:`Drafter.context_keys`).
        sequence, anchors: int64 ``[B]``: block b begins at position ``anchors[b]`` of sequence
            ``sequence[b]`` and sees its context strictly before that.
        limit: positions of a row from here on are taken as the last one, for RoPE.
    """

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        sequence: Tensor,
        anchors: Tensor,
        query_len: int,
        window: int,
        limit: int,
    ) -> None:
        self.context, self.query_len = context, query_len
        length, device = context[0][0].shape[1], anchors.device
        place = anchors[:, None] + torch.arange(query_len, device=device)
        self.positions = place.clamp(max=limit - 1).flatten()
        # Offsets from the anchor; a window beyond the sequence has nothing more to show.
        back = torch.arange(-min(window - 1, length), 0, device=device)
        at = anchors[:, None] + back  # [B, window - 1]
        self._rows = sequence[:, None] * length + at.clamp(min=0)
        offset = torch.arange(query_len, device=device)[:, None]
        visible = (back > offset - window) & (at[:, None] >= 0)  # [B, Q, window - 1]
        own = _near(place[:, :, None], place[:, None], window, limit)
        self._seen = torch.cat((visible, own), -1)
        self._mask: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As :class:`workbench.spec.drafter.DraftAttention`."""
        old_k, old_v = (x.flatten(0, 1)[self._rows] for x in self.context[layer])
        split = (-1, self.query_len)
        keys = torch.cat((old_k, k.unflatten(0, split).to(old_k.dtype)), 1)
        values = torch.cat((old_v, v.unflatten(0, split).to(old_v.dtype)), 1)
        if self._mask is None or self._mask.dtype != q.dtype:
            self._mask = _added(self._seen, q.shape[1] // k.shape[1], q.dtype)
        return _attention(q.unflatten(0, split), keys, values, self._mask)


def _near(row: Tensor, key: Tensor, window: int, limit: int) -> Tensor:
    """Whether a row may see a key, by their positions: the window is symmetric, as the engine's.

    A key beyond the limit is outside the engine's attention length. Rows out there are never used,
    but see themselves: a row without a key would be NaN, in the cache too.
    """
    return ((key - row).abs() < window) & ((key < limit) | (row >= limit))


def _added(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """``[B, Q, S]`` -> what is added to the scores, 0 or -inf, ``[B, 1, Q * group, S]``."""
    added = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    added.masked_fill_(~seen, float("-inf"))
    return added.repeat_interleave(group, 1)[:, None]


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """``[B, Q, A, D]`` over ``[B, S, G, D]`` -> ``[B * Q, A, D]``, scale D**-0.5."""
    # Query heads of one KV head become rows: no copy of K and V for grouped-query attention.
    heads, kv_heads = q.shape[2], keys.shape[2]
    rows = q.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)
    o = F.scaled_dot_product_attention(
        rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
    )
    o = o.unflatten(2, (q.shape[1], heads // kv_heads)).transpose(1, 2)
    return o.reshape(-1, heads, q.shape[3])
