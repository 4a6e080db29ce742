"""What a decode step reads and changes beside the weights: ids, positions, caches, outputs.

Everything is allocated once, so that the addresses a CUDA graph has recorded stay valid; a step
leaves the next token and the next position where it found the old ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels.footprint import free_bytes
from workbench.kernels.rank.weights import SPARE_BYTES, RankWeights

HEADROOM = 1024  # positions behind the context into which replays may advance
_MOST = 1 << 60  # bytes
_CHUNK = 1 << 16  # rows of the RoPE table made at a time: its angles are float64


class RankState:
    """One decode step's inputs and outputs, for ``batch`` sequences of equal position.

    The caches hold ``context`` tokens before the first step, which decodes at position ``context``;
    up to ``headroom`` steps may follow. Then the position stays at the last row, ``capacity - 1``.

    Attributes:
        token: int64 ``[B]``, ids that the next step embeds, below the rank's vocabulary.
        position: int64 ``[B]``, where the next step's token stands.
        k, v: a layer each, ``[B, R, G, D]``. Full layers have ``R = capacity`` rows, and position p
            lies in row p; sliding layers have a ring of ``R = window`` rows (``capacity`` if that
            is less), and position p lies in row ``p % R``.
        rope: float32 ``[capacity, D]``, D/2 cosines, then D/2 sines, from float64 angles.
        logits: float32 ``[B, V]``, softcapped, of the rank's part of the vocabulary.
        next_token: int64 ``[B]``, the last step's argmax (also in ``token`` by then).
        expert_ids: int32 ``[layers, B, top_k]``, chosen in the last step; -1 in dense layers.
    """

    def __init__(
        self,
        weights: RankWeights,
        context: int,
        *,
        batch: int = 1,
        headroom: int = HEADROOM,
        seed: int = 1,
    ) -> None:
        """Allocate and fill with N(0, 1) keys and values and random token ids.

        Raises:
            KernelError: sizes that are not positive, a context beyond the model's, or one whose
                caches do not fit the free memory.
        """
        s, device = weights.shapes, weights.device
        if context < 1 or batch < 1 or headroom < 1:
            raise KernelError(
                f"context, batch and headroom must be at least 1, not {context}, {batch} and "
                f"{headroom}"
            )
        if context > s.context:
            raise KernelError(
                f"a context of {context} tokens exceeds the model's {s.context}; choose a smaller"
            )
        self.context, self.batch, self.capacity = context, batch, context + headroom
        self.shapes = s
        meta = device.type == "meta"  # sizes only
        need, free = self._bytes(weights), None if meta else free_bytes(str(device))
        spare = SPARE_BYTES // 2 if device.type == "cuda" else 0
        if need > _MOST:  # beyond any memory, and beyond what torch can count
            raise KernelError(
                f"the caches of {batch} sequences of {context} tokens need "
                f"{hardware.gigabytes(need)}; choose a shorter --context or fewer sequences "
                "(--batch)"
            )
        if free is not None and need + spare > free:
            raise KernelError(
                f"the caches of {batch} sequences of {context} tokens need "
                f"{hardware.gigabytes(need)}, and {hardware.gigabytes(free)} of memory are free on "
                f"{device}; choose a shorter --context or fewer sequences (--batch)"
            )
        generator = None if meta else torch.Generator(device=device).manual_seed(seed)

        def cache(layers: int, rows: int) -> Tensor:
            shape = (2, layers, batch, rows, s.kv_heads, s.head_dim)
            made = torch.empty(shape, dtype=weights.dtype, device=device)
            return made.normal_(generator=generator)

        kinds = [layer.full for layer in weights.layers]
        full, self._rings = (cache(kinds.count(kind), self.rows_of(kind)) for kind in (True, False))
        # A ring forgets: what the steps write over is needed again after a reset.
        self._first_rings = self._rings.clone()
        of = {True: iter(full.unbind(1)), False: iter(self._rings.unbind(1))}
        pairs = [next(of[kind]) for kind in kinds]
        self.k = [pair[0] for pair in pairs]
        self.v = [pair[1] for pair in pairs]
        self.rope = rope_rows(self.capacity, s.head_dim, s.theta, device)
        self._first_token = torch.randint(
            s.vocabulary, (batch,), generator=generator, device=device
        )
        self.token = self._first_token.clone()
        self.position = torch.full((batch,), context, dtype=torch.int64, device=device)
        self.logits = torch.zeros(batch, s.vocabulary, dtype=torch.float32, device=device)
        self.next_token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.expert_ids = torch.full(
            (len(weights.layers), batch, s.top_k), -1, dtype=torch.int32, device=device
        )

    def begin_with(self, tokens: Tensor) -> None:
        """Tokens int64 ``[B]`` for the first step, now and after every reset."""
        self._first_token.copy_(tokens)
        self.token.copy_(tokens)

    def rows_of(self, full: bool) -> int:
        """Cache rows of a layer."""
        return self.capacity if full else min(self.shapes.window, self.capacity)

    def reset(self) -> None:
        """Back to the first token, to position ``context`` and to the rings of that moment.

        Rows of full layers behind the context keep what was written: no step reads them before it
        writes them. So a sequence of steps that starts at a reset always gives the same tokens.
        """
        self.token.copy_(self._first_token)
        self.position.fill_(self.context)
        self._rings.copy_(self._first_rings)

    def _bytes(self, weights: RankWeights) -> int:
        s = self.shapes
        # Rings are there twice.
        rows = sum(self.rows_of(x.full) * (1 if x.full else 2) for x in weights.layers)
        cache = 2 * rows * self.batch * s.kv_heads * s.head_dim * weights.norm.element_size()
        return cache + 4 * self.capacity * s.head_dim + 4 * self.batch * s.vocabulary


def rope_rows(rows: int, head_dim: int, theta: float, device: torch.device | str) -> Tensor:
    """cos and sin of positions 0 to ``rows - 1``, float32 ``[rows, D]`` from float64 angles."""
    table = torch.empty(rows, head_dim, dtype=torch.float32, device=device)
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64)
    frequency = theta ** (-exponent / head_dim)
    for start in range(0, rows, _CHUNK):
        part = table[start : start + _CHUNK]
        position = torch.arange(start, start + part.shape[0], device=device, dtype=torch.float64)
        angle = position[:, None] * frequency
        part.copy_(torch.cat((angle.cos(), angle.sin()), -1))
    return table
