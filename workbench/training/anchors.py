"""Blocks to train on: where they begin in a sequence, and who sees whom in all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.reference import apply_rope, rms_norm
from workbench.spec.drafter import Drafter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The same number of blocks in each of S sequences; B in all, sequence by sequence.

    Attributes:
        places: int64 ``[S, n]``, position of each block's anchor.
        anchors: int64 ``[B]``, the anchor tokens.
        labels: int64 ``[B, N]``, the tokens that follow each anchor.
        live: bool ``[B, N]``, whether a label counts.
    """

    places: Tensor
    anchors: Tensor
    labels: Tensor
    live: Tensor


def draw_anchors(
    valid: Tensor, first: int, count: int, length: int, generator: torch.Generator
) -> Tensor:
    """``count`` different positions a row from ``first`` to ``valid - 2``: int64 ``[S, count]``.

    Drawn on the CPU from ``generator``. A row with fewer positions gives -1 for those it lacks. Any
    position has at least one token behind it that counts.
    """
    place = torch.arange(first, length)
    keys = torch.rand(len(valid), len(place), generator=generator)
    keys = keys.masked_fill(place >= valid[:, None] - 1, 2.0)
    count_here = min(count, keys.shape[1])
    best = keys.topk(count_here, 1, largest=False)
    drawn = torch.where(best.values < 2.0, place[best.indices], -1)
    return F.pad(drawn, (0, count - count_here), value=-1)


def make_blocks(tokens: Tensor, valid: Tensor, places: Tensor, query_len: int) -> Blocks:
    """Tokens ``[S, T]``, valid ``[S]`` and places ``[S, n]`` (-1: none) on one device -> blocks.

    A place of -1 becomes a block at position 0 without labels that count.
    """
    at = places.clamp(min=0)
    offset = torch.arange(1, query_len, device=tokens.device)
    ahead = at[..., None] + offset  # [S, n, N]
    live = (ahead < valid[:, None, None]) & (places >= 0)[..., None]
    inside = ahead.clamp(max=tokens.shape[1] - 1)
    labels = tokens.gather(1, inside.flatten(1)).view(ahead.shape)
    return Blocks(
        places=at,
        anchors=tokens.gather(1, at).flatten(),
        labels=labels.flatten(0, 1),
        live=live.flatten(0, 1),
    )


def sequence_context(
    drafter: Drafter, streams: Tensor, shape: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """(K, V) of each drafter layer over S whole sequences of T tokens, ``[S, T, G, D]``.

    The values of :meth:`Drafter.context_keys` for positions from 0, which asks the device for the
    longest position; here the host knows it, and a training step waits for nothing.
    """
    kv = drafter.context(streams)
    positions = torch.arange(shape[1], device=streams.device).repeat(shape[0])
    table = drafter.rope(shape[1])
    pairs = []
    for index, layer in enumerate(drafter.layers):
        norm, eps = layer.get_parameter("attention.k_norm"), drafter.config.rms_norm_eps
        key = apply_rope(rms_norm(kv[:, index, 0], norm, eps), positions, table)
        pairs.append((key.unflatten(0, tuple(shape)), kv[:, index, 1].unflatten(0, tuple(shape))))
    return pairs


class TrainingBlocks:
    """Many blocks of whole sequences in one attention product a sequence.

    The keys of a sequence are its context and all its blocks' own rows, end to end; a mask, made
    once and shared by the layers, leaves each row its window of the context and its own block. Sees
    exactly what :class:`workbench.spec.draft_attention.SequenceBlocks` sees, which gathers a window
    for each block; the gradient of a gather costs more than the products that are masked away.
    """

    def __init__(
        self,
        context: list[tuple[Tensor, Tensor]],
        places: Tensor,
        query_len: int,
        window: int,
        limit: int,
    ) -> None:
        sequences, count = places.shape
        self.context, self.sequences = context, sequences  # per layer K, V [S, T, G, D]
        length, device = context[0][0].shape[1], places.device
        rows = places[..., None] + torch.arange(query_len, device=device)
        self.positions = rows.clamp(max=limit - 1).flatten()
        key = torch.arange(length, device=device)
        place = rows.flatten(1)[..., None]  # [S, n * Q, 1]
        anchor = places.repeat_interleave(query_len, 1)[..., None]
        old = (key < anchor) & (key > place - window)
        block = torch.arange(count * query_len, device=device) // query_len
        own = (block[:, None] == block).expand(sequences, -1, -1)
        self._seen = torch.cat((old, own), -1)[:, None]  # [S, 1, n * Q, T + n * Q]
        self._mask: Tensor | None = None

    @property
    def seen(self) -> Tensor:
        """Bool ``[S, 1, n * Q, T + n * Q]``: the keys each row sees, context then all blocks."""
        return self._seen

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As :class:`workbench.spec.drafter.DraftAttention`."""
        group = q.shape[1] // k.shape[1]
        old_k, old_v = self.context[layer]
        keys, values = (
            torch.cat((old, new.unflatten(0, (self.sequences, -1)).to(old.dtype)), 1)
            .transpose(1, 2)
            .repeat_interleave(group, 1)
            for old, new in ((old_k, k), (old_v, v))
        )
        queries = q.unflatten(0, (self.sequences, -1)).transpose(1, 2).to(keys.dtype)
        if self._mask is None or self._mask.dtype != keys.dtype:
            added = torch.zeros(self._seen.shape, dtype=keys.dtype, device=q.device)
            self._mask = added.masked_fill_(~self._seen, float("-inf"))
        mask = self._mask.expand(-1, q.shape[1], -1, -1)
        o = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return o.transpose(1, 2).flatten(0, 1)
