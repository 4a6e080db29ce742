"""What a step of many rows reads and changes: sequences of mixed contexts, each with new rows.

A *row* is a token that the step puts through the rank: one a sequence in a decode step, several in
a verification. Rows of a sequence follow one another, and so do the sequences. Caches are packed: a
sequence has as many rows of a full layer's as it may reach, and a ring in a sliding layer that is
longer than the window by the new rows, so that what a step writes never lies where one of its own
rows still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels.footprint import free_bytes
from workbench.kernels.rank.state import RankState, rope_rows
from workbench.kernels.rank.weights import SPARE_BYTES, RankWeights

HEADROOM = 64  # positions behind the contexts into which replays may advance
NEW_MOST = 16  # new rows of a sequence, which attention holds in one tile
SEQUENCES_MOST = 65_535  # the third axis of a launch, which attention's sequences are
_PIECE = 1 << 27  # values of a cache made at a time: random numbers come with a copy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """A layer's cache by row of the step: ``[b, rows]`` are rows of the sequence of row ``b``."""

    flat: Tensor  # [all sequences' rows, G, D]
    start: tuple[int, ...]  # of the sequence of each row of the step

    def __getitem__(self, at: tuple[int, Any]) -> Tensor:
        b, rows = at
        return self.flat[rows + self.start[b]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowView:
    """The state as :class:`~workbench.kernels.rank.reference.Reference` takes one."""

    k: list[_Rows]
    v: list[_Rows]
    ring: int
    most: int

    def rows_of(self, full: bool) -> int:
        """Rows after which a layer's positions begin again."""
        return self.most if full else self.ring


def refuse_many(sequences: int) -> None:
    """Refuse more sequences than one launch has programs for.

    Raises:
        KernelError: there are more.
    """
    if sequences > SEQUENCES_MOST:
        raise KernelError(
            f"a step of many rows takes up to {SEQUENCES_MOST:,} sequences, not {sequences:,}; "
            "give fewer"
        )


class LoadState:
    """Inputs and outputs of a step of ``N`` rows of ``R`` sequences.

    Attributes:
        token, position: int64 ``[N]``, id and place of every row.
        first, new: int32 ``[R]``, a sequence's first row and how many it has.
        start, size: int64 ``[R]``, where a sequence's rows begin in a full layer's cache, and how
            many there are.
        k, v: a layer each, ``[rows, G, D]``; position p of sequence r lies at ``start[r] + p`` in
            full layers and at ``r * ring + p % ring`` in sliding ones.
        rope: float32 ``[P, D]``, cosines then sines.
        logits: float32 ``[N, V]``, softcapped; next_token: int64 ``[N]``, their argmax.
    """

    def __init__(
        self,
        weights: RankWeights,
        contexts: Sequence[int],
        new: Sequence[int] | int = 1,
        *,
        headroom: int = HEADROOM,
        seed: int = 1,
    ) -> None:
        """Sequences of ``contexts`` cached tokens, each with ``new`` rows; N(0, 1) caches.

        Raises:
            KernelError: no sequences, sizes that are not positive or too large, or caches that do
                not fit the free memory.
        """
        s, device = weights.shapes, weights.device
        fresh = [new] * len(contexts) if isinstance(new, int) else list(new)
        if not contexts or min(contexts) < 1 or headroom < 1 or len(fresh) != len(contexts):
            raise KernelError(
                "a step needs at least one sequence, each with a context of 1 or more tokens, its "
                f"number of new rows and headroom; not contexts {list(contexts)!r:.60}, "
                f"rows {fresh!r:.60}, headroom {headroom}"
            )
        refuse_many(len(contexts))
        if not 1 <= min(fresh) <= max(fresh) <= NEW_MOST:
            raise KernelError(
                f"a sequence can have 1 to {NEW_MOST} new rows in a step, not "
                f"{min(fresh)} to {max(fresh)}; spread the tokens over more sequences"
            )
        if max(contexts) > s.context:
            raise KernelError(
                f"a context of {max(contexts)} tokens exceeds the model's {s.context}; choose a "
                "smaller"
            )
        self.shapes, self.contexts, self.fresh = s, tuple(contexts), tuple(fresh)
        self.sequences, self.rows, self.headroom = len(contexts), sum(fresh), headroom
        self.context, self.capacity = max(contexts), max(contexts) + headroom + max(fresh)
        self.ring = min(s.window, self.capacity) + max(fresh) - 1
        sizes = [c + headroom + n for c, n in zip(contexts, fresh, strict=True)]
        kinds = [layer.full for layer in weights.layers]
        total = {True: sum(sizes), False: self.ring * self.sequences}
        itemsize = weights.norm.element_size()
        need = 2 * s.kv_heads * s.head_dim * itemsize * sum(total[kind] for kind in kinds)
        meta = device.type == "meta"
        free = None if meta else free_bytes(str(device))
        spare = SPARE_BYTES // 2 if device.type == "cuda" else 0
        if free is not None and need + spare > free:
            raise KernelError(
                f"the caches of {self.sequences} sequences of up to {self.context} tokens need "
                f"{hardware.gigabytes(need)}, and {hardware.gigabytes(free)} of memory are free on "
                f"{device}; choose shorter contexts or fewer sequences"
            )
        self.cache_bytes = need
        generator = None if meta else torch.Generator(device=device).manual_seed(seed)

        def cache(rows: int) -> Tensor:
            made = torch.empty(rows, s.kv_heads, s.head_dim, dtype=weights.dtype, device=device)
            for part in made.view(-1).split(_PIECE):
                part.normal_(generator=generator)
            return made

        self.k = [cache(total[kind]) for kind in kinds]
        self.v = [cache(total[kind]) for kind in kinds]
        self.kinds = kinds
        self.rope = rope_rows(self.capacity, s.head_dim, s.theta, device)

        def column(values: Sequence[int], kind: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=kind, device=device)

        starts = [0, *accumulate(sizes)][:-1]
        self.start, self.size = column(starts, torch.int64), column(sizes, torch.int64)
        firsts = [0, *accumulate(fresh)][:-1]
        self.first, self.new = column(firsts, torch.int32), column(fresh, torch.int32)
        # Which sequence a row is of, and its place among the sequence's new rows.
        self.sequence = [r for r, n in enumerate(fresh) for _ in range(n)]
        places = [c + t for c, n in zip(contexts, fresh, strict=True) for t in range(n)]
        self._starts = starts
        self._first_position = column(places, torch.int64)
        self.position = self._first_position.clone()
        self._first_token = torch.randint(
            s.vocabulary, (self.rows,), generator=generator, device=device
        )
        self.token = self._first_token.clone()
        self.last = column(
            [sizes[r] - 1 for r in self.sequence], torch.int64
        )  # the last position a row may have
        self.logits = torch.zeros(self.rows, s.vocabulary, dtype=torch.float32, device=device)
        self.next_token = torch.zeros(self.rows, dtype=torch.int64, device=device)

    @classmethod
    def over(cls, state: RankState, weights: RankWeights) -> LoadState:
        """The same sequences, one new row each, in the tensors that ``state`` has.

        Raises:
            KernelError: more sequences than a step takes.
        """
        refuse_many(state.batch)
        made = object.__new__(cls)
        batch, device = state.batch, weights.device
        made.shapes, made.contexts, made.fresh = (
            state.shapes,
            (state.context,) * batch,
            (1,) * batch,
        )
        made.sequences = made.rows = batch
        made.headroom = state.capacity - state.context
        made.context, made.capacity, made.ring = state.context, state.capacity, state.rows_of(False)
        made.kinds = [layer.full for layer in weights.layers]
        made.k, made.v = ([each.flatten(0, 1) for each in pair] for pair in (state.k, state.v))
        made.cache_bytes = sum(2 * each.numel() * each.element_size() for each in made.k)
        made.rope, made.token, made.position = state.rope, state.token, state.position
        made.logits, made.next_token = state.logits, state.next_token
        made._first_token, made._first_position = state.token.clone(), state.position.clone()
        made._starts = [r * state.capacity for r in range(batch)]
        made.start = torch.tensor(made._starts, dtype=torch.int64, device=device)
        made.size = torch.full((batch,), state.capacity, dtype=torch.int64, device=device)
        made.first = torch.arange(batch, dtype=torch.int32, device=device)
        made.new = torch.ones(batch, dtype=torch.int32, device=device)
        made.sequence = list(range(batch))
        made.last = made.size - 1
        return made

    def rows_of(self, full: bool) -> int:
        """Cache rows of the longest sequence in a layer."""
        return self.capacity if full else self.ring

    def reset(self) -> None:
        """Back to the first tokens and positions. Rings keep what was written: their rows behind
        the positions are of later tokens then, as random as those they replaced."""
        self.token.copy_(self._first_token)
        self.position.copy_(self._first_position)

    def read_bytes(self) -> int:
        """Bytes of keys and values that a step must read at least once, all layers."""
        s = self.shapes
        keys = 0
        for full in self.kinds:
            for context, n in zip(self.contexts, self.fresh, strict=True):
                keys += context + n if full else min(context, s.window - 1) + n
        return 2 * keys * s.kv_heads * s.head_dim * self.k[0].element_size()

    def by_row(self) -> RowView:
        """The caches as the reference asks for them, by row of the step."""
        starts = {
            True: tuple(self._starts[r] for r in self.sequence),
            False: tuple(r * self.ring for r in self.sequence),
        }
        pairs = [
            [
                _Rows(flat=flat, start=starts[full])
                for flat, full in zip(each, self.kinds, strict=True)
            ]
            for each in (self.k, self.v)
        ]
        return RowView(k=pairs[0], v=pairs[1], ring=self.ring, most=self.capacity)
