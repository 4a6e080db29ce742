"""KV cache: full layers grow with the sequence, sliding layers keep their window.

A sliding layer is a ring of ``window + rollback`` rows a sequence. The position a row holds
follows from the sequence's length alone, so nothing but the length has to be kept; ``rollback``
spare rows let speculative decoding write draft tokens and take back what was rejected without
having overwritten a key that is still visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import PromptError
from workbench.model.config import BeamConfig
from workbench.model.parallel import Shard


class KVCache:
    """Keys and values of ``slots`` independent sequences.

    Args:
        config: the model; its ``max_position_embeddings`` bounds every length.
        slots: number of sequences; each is written, truncated and released on its own.
        shard: the tensor-parallel rank whose KV heads are held.
        rollback: most tokens :meth:`truncate` may take back (draft tokens a step).
    """

    def __init__(
        self,
        config: BeamConfig,
        slots: int = 1,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shard: Shard | None = None,
        rollback: int = 16,
    ) -> None:
        shard = shard or Shard()
        for name, value, least in (("slots", slots, 1), ("rollback", rollback, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PromptError(
                    f"{name} must be a whole number of at least {least}, not {value!r}"
                )
        self.config, self.slots, self.rollback = config, slots, rollback
        # A window beyond the context hides nothing; its rows would never be written.
        self.window = min(config.sliding_window, config.max_position_embeddings)
        self.ring = self.window + rollback
        self.limit = config.max_position_embeddings
        self.capacity = 0  # rows a sequence in full layers
        self.lengths = [0] * slots
        self._high = [0] * slots  # one past the highest position ever written: bounds rollback
        local = shard.kv_heads(config)
        heads = local.stop - local.start
        self.group = config.num_attention_heads // shard.world // heads  # query heads a KV head
        self.k: list[Tensor] = []  # per layer [slots, rows, kv_heads, head_dim]
        self.v: list[Tensor] = []
        for layer in range(config.num_hidden_layers):
            rows = 0 if config.is_full(layer) else self.ring
            for store in (self.k, self.v):
                # Zeros, not empty: a masked row must not hold NaN, which 0 * NaN would let through.
                store.append(
                    torch.zeros(slots, rows, heads, config.head_dim, dtype=dtype, device=device)
                )

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, K and V over all layers."""
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens a sequence in full layers, at least doubling.

        Raises:
            PromptError: ``length`` exceeds the model's context.
        """
        if length > self.limit:
            raise PromptError(
                f"{length} tokens exceed the model's context of {self.limit}; "
                "shorten the prompt or ask for fewer new tokens"
            )
        if length <= self.capacity:
            return
        self.capacity = min(self.limit, max(length, 2 * self.capacity, 64))
        for layer in self.config.full_layers:
            for store in (self.k, self.v):
                old = store[layer]
                new = old.new_zeros(self.slots, self.capacity, *old.shape[2:])
                new[:, : old.shape[1]] = old
                store[layer] = new

    def advance(self, slot: int, count: int) -> None:
        """Note that ``count`` more tokens of ``slot`` have been written."""
        self.lengths[slot] += count
        self.overwriting(slot, self.lengths[slot])

    def overwriting(self, slot: int, end: int) -> None:
        """Note that rows of ``slot`` up to position ``end`` are written from now on.

        Rings lose their oldest rows by it, whether or not the pass that writes gets to its end.
        """
        self._high[slot] = max(self._high[slot], end)

    def truncate(self, slot: int, length: int) -> None:
        """Take back the tokens of ``slot`` from position ``length`` on (0 releases the slot).

        Raises:
            PromptError: more than was written, or further back than sliding layers can undo.
        """
        self._check_slot(slot)
        if not 0 <= length <= self.lengths[slot]:
            raise PromptError(f"cannot truncate {self.lengths[slot]} cached tokens to {length}")
        wrapped = self._high[slot] > self.ring
        back = 0 < length < self.lengths[slot]
        if back and wrapped and length < self._high[slot] - self.rollback:
            raise PromptError(
                f"cannot truncate to {length}: sliding layers keep only {self.rollback} tokens to "
                f"take back after {self._high[slot]}; decode the sequence anew"
            )
        self.lengths[slot] = length
        if length == 0:
            self._high[slot] = 0

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Give a sequence another slot: what is in ``target`` is lost, ``source`` is then free.

        A batch whose sequences fill neighbouring slots is attended as a view, without a copy; after
        a sequence has left, the last one moved into its slot keeps it so.

        Raises:
            PromptError: there is no such slot.
        """
        self._check_slot(source)
        self._check_slot(target)
        if source == target:
            return
        length = self.lengths[source]
        for layer in range(len(self.k)):
            rows = length if self.config.is_full(layer) else self.ring
            for store in (self.k, self.v):
                store[layer][target, :rows] = store[layer][source, :rows]
        self.lengths[target], self._high[target] = length, self._high[source]
        self.lengths[source] = self._high[source] = 0

    def ring_positions(self, ends: Tensor) -> Tensor:
        """Position held by each ring row, given how many tokens were written: ``[n] -> [n, ring]``.

        Row ``j`` holds the largest position below the end that is congruent to ``j``; a negative
        result means the row was never written.
        """
        last = ends[:, None] - 1
        return last - (last - torch.arange(self.ring, device=ends.device)) % self.ring

    def contents(self, layer: int, slot: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """What ``layer`` can still see of ``slot``: (positions [S], K [S, G, D], V [S, G, D])."""
        self._check_slot(slot)
        length = self.lengths[slot]
        device = self.k[layer].device
        first = 0 if self.config.is_full(layer) else max(0, length - self.window)
        positions = torch.arange(first, length, device=device)
        rows = positions if self.config.is_full(layer) else positions % self.ring
        return positions, self.k[layer][slot, rows], self.v[layer][slot, rows]

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise PromptError(
                f"there is no slot {slot}; this cache has slots 0 to {self.slots - 1}"
            )
