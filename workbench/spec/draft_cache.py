"""Keys and values of the drafter's layers: a ring a sequence, position p in row ``p % ring``.

It holds the context of verified tokens and, in front of it, the query rows of the running pass. All
layers are windowed, so ``window - 1`` rows of context and one block are all that is ever seen.
Which position a row holds follows from where the block starts; rejected drafts need no erasing: the
next context and the next block overwrite them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.errors import DraftError

if TYPE_CHECKING:
    from workbench.spec.drafter import Drafter


class DraftCache:
    """Rings of ``slots`` sequences for a drafter; blocks have at most ``query_len`` rows.

    Attributes:
        k, v: ``[L, slots, ring, G, D]``.
        ends: of each slot, one past the last position whose context is there.
    """

    def __init__(self, drafter: Drafter, slots: int, query_len: int) -> None:
        c = drafter.config
        self.drafter, self.slots, self.window = drafter, slots, c.sliding_window
        self.limit, self.query_len = drafter.limit, query_len
        self.ring = min(self.window - 1, self.limit) + query_len
        shape = (c.num_hidden_layers, slots, self.ring, c.num_key_value_heads, c.head_dim)
        # Zeros, not empty: a masked row must not hold NaN, which 0 * NaN would let through.
        self.k = torch.zeros(shape, dtype=drafter.dtype, device=drafter.device)
        self.v = torch.zeros_like(self.k)
        self.ends = [0] * slots
        norms = [layer.get_parameter("attention.k_norm") for layer in drafter.layers]
        self._norms = torch.stack(list(norms)).detach()
        self._table = drafter.rope(self.limit)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.k.numel() * self.k.element_size()

    def write(self, streams: Tensor, counts: list[int], slots: list[int], keep: list[int]) -> None:
        """Store the context of target rows: ``streams [sum(counts), taps * H]``.

        Args:
            counts: rows of each slot, those that the target just ran.
            keep: how many of them are verified; the rest (rejected drafts) are not stored.

        Raises:
            DraftError: streams, counts and keep that do not belong together, or a full context.
        """
        self._check(streams, counts, slots, keep)
        positions: list[int] = []
        rows: list[int] = []
        source: list[int] = []
        base = 0
        for slot, count, kept in zip(slots, counts, keep, strict=True):
            end = self.ends[slot] + kept
            # Of a long chunk only what the next block can see: rows would be written twice else.
            first = max(self.ends[slot], end - (self.ring - self.query_len))
            positions += range(first, end)
            rows += [slot * self.ring + p % self.ring for p in range(first, end)]
            source += range(base + first - self.ends[slot], base + kept)
            base += count
        if rows:
            device = streams.device
            if len(source) < len(streams):
                streams = streams[torch.tensor(source, device=device)]
            self.drafter.kernels.context_kv_write(
                self.drafter.context(streams),
                self._norms,
                torch.tensor(positions, device=device),
                self._table,
                self.k.flatten(1, 2),
                self.v.flatten(1, 2),
                torch.tensor(rows, device=device),
                self.drafter.config.rms_norm_eps,
                k_scale=None,
                v_scale=None,
            )
        for slot, kept in zip(
            slots, keep, strict=True
        ):  # last: an interrupted write counts nothing
            self.ends[slot] += kept

    def _check(self, streams: Tensor, counts: list[int], slots: list[int], keep: list[int]) -> None:
        width = self.drafter.fc.shape[1]
        if streams.shape != (sum(counts), width):
            raise DraftError(
                f"streams must be [{sum(counts)}, {width}], the tapped layers side by side, not "
                f"{list(streams.shape)}"
            )
        for slot, count, kept in zip(slots, counts, keep, strict=True):
            if not (0 <= slot < self.slots and 0 <= kept <= count):
                raise DraftError(
                    f"slot {slot} of {self.slots} cannot keep {kept} of {count} rows of context"
                )
            if self.ends[slot] + kept > self.limit:
                raise DraftError(
                    f"slot {slot} would have {self.ends[slot] + kept} positions of context, more "
                    f"than the drafter's {self.limit}"
                )

    def release(self, slot: int) -> None:
        """Forget a sequence."""
        self.ends[slot] = 0

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Give a sequence another slot (see :meth:`workbench.model.cache.KVCache.move`)."""
        if source != target:
            for store in (self.k, self.v):
                store[:, target] = store[:, source]
            self.ends[target], self.ends[source] = self.ends[source], 0
