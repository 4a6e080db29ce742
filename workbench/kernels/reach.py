"""Which keys the queries of a pass see: what attention kernels are told besides q, K and V.

Made once a pass and shared by the layers of a kind, so the dense masks that plain torch needs are
computed at most once; other kernels read the few tensors and numbers and need no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


class Reach:
    """Queries over a cache ``[S, R, G, D]`` in which position p of a slot lies in row ``p % R``.

    A full layer's cache has more rows than positions; a sliding layer's is a ring of at least
    ``window + T - 1`` rows.

    Attributes:
        slots: int64 ``[B]``, the cache slot of each sequence.
        first: int64 ``[B]``, the position of each sequence's first query; query t is at first + t.
        span: rows of a slot that can matter (a host number): what lies beyond is never read.
        window: tokens a query sees, itself included; None: everything before it.
        view: the slots as a slice where they are neighbours, so that no copy is made.
    """

    __slots__ = ("_masks", "alone", "first", "slots", "span", "view", "window")

    def __init__(
        self,
        slots: Tensor,
        first: Tensor,
        *,
        span: int,
        window: int | None,
        view: slice | None = None,
        alone: bool = False,
    ) -> None:
        self.slots, self.first, self.span, self.window = slots, first, span, window
        self.view = view
        self.alone = alone  # one query that sees every row of the span: no mask is needed
        self._masks: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def visible(self, tokens: int, rows: int) -> Tensor:
        """Whether query t of sequence b sees row r, bool ``[B, T, span]``, ``rows`` = R."""
        row = torch.arange(self.span, device=self.first.device)
        query = (self.first[:, None] + torch.arange(tokens, device=self.first.device))[..., None]
        if self.window is None:
            # Not taken modulo R: the padded queries of a ragged batch may lie beyond the cache.
            return row <= query
        last = self.first[:, None] + (tokens - 1)  # [B, 1]
        held = (last - (last - row) % rows)[:, None]  # the newest position that a row can hold
        return (held >= 0) & (held <= query) & (held > query - self.window)

    def mask(self, tokens: int, rows: int, group: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores, 0 or -inf, ``[B, 1, T * group, span]``; None: all is seen.

        Query heads that share a KV head are rows of one product, hence ``group`` (A / G) of them.
        """
        if self.alone and tokens == 1:
            return None
        key = (tokens, rows, group, dtype)
        found = self._masks.get(key)
        if found is None:
            seen = self.visible(tokens, rows)
            added = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            added.masked_fill_(~seen, float("-inf"))
            found = self._masks[key] = added.repeat_interleave(group, 1)[:, None]
        return found


class Spans:
    """Queries of B sequences laid end to end, over keys laid end to end.

    The queries of a sequence are the last ``q_lengths[b]`` of its ``k_lengths[b]`` key positions.

    Attributes:
        q_starts, k_starts: int64 ``[B + 1]``, where each sequence begins in the flat tensors.
        q_lengths, k_lengths: the same on the host.
        window: tokens a query sees, itself included; None: everything before it.
    """

    __slots__ = ("_mask", "k_lengths", "k_starts", "q_lengths", "q_starts", "window")

    def __init__(
        self,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        window: int | None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.q_lengths, self.k_lengths, self.window = list(q_lengths), list(k_lengths), window
        self.q_starts = torch.tensor([0, *accumulate(self.q_lengths)], device=device)
        self.k_starts = torch.tensor([0, *accumulate(self.k_lengths)], device=device)
        self._mask: dict[tuple[int, int], Tensor] = {}

    @property
    def uniform(self) -> bool:
        """Whether all sequences have the same lengths."""
        return len(set(self.q_lengths)) <= 1 and len(set(self.k_lengths)) <= 1

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Whether query i of ``queries`` sees key j of ``keys``, bool ``[queries, keys]``."""
        found = self._mask.get((queries, keys))
        if found is None:
            position = torch.arange(keys - queries, keys, device=device)[:, None]
            distance = position - torch.arange(keys, device=device)
            found = distance >= 0
            if self.window is not None:
                found &= distance < self.window
            self._mask[queries, keys] = found
        return found
