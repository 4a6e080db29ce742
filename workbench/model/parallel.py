"""Tensor-parallel slices: which rows and columns of each weight one rank holds.

Heads, gate rows, MLP and expert widths and the vocabulary are split. KV heads are split while
there are at least as many as ranks and replicated beyond that. Norms and the router are whole on
every rank; ``o_proj`` and the down projections give partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from workbench.errors import ConfigError
from workbench.model.config import BeamConfig


class Communicator(Protocol):
    """What a sharded model needs between ranks; ``torch.distributed`` or threads can provide it."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of ``x`` over the ranks."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The ranks' ``x`` concatenated along the last axis, in rank order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Rank ``rank`` of ``world`` tensor-parallel ranks."""

    rank: int = 0
    world: int = 1

    def check(self, config: BeamConfig) -> None:
        """Raise ConfigError, naming the field, when ``world`` does not divide the model."""
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ConfigError(
                f"tensor-parallel rank {self.rank} of {self.world} does not exist; "
                "give 0 <= rank < world"
            )
        for name in (
            "num_attention_heads",
            "intermediate_size",
            "moe_intermediate_size",
            "vocab_size",
        ):
            if getattr(config, name) % self.world:
                raise ConfigError(
                    f"tensor parallelism over {self.world} ranks does not divide {name} "
                    f"({getattr(config, name)}); choose a divisor"
                )
        kv = config.num_key_value_heads
        if kv % self.world and self.world % kv:
            raise ConfigError(
                f"tensor parallelism over {self.world} ranks neither splits nor replicates the "
                f"{kv} KV heads evenly; choose a divisor or a multiple of {kv}"
            )

    def part(self, size: int) -> slice:
        """This rank's equal part of an axis of ``size``."""
        step = size // self.world
        return slice(self.rank * step, (self.rank + 1) * step)

    def kv_heads(self, config: BeamConfig) -> slice:
        """This rank's KV heads: its share, or the one head its query heads belong to."""
        kv = config.num_key_value_heads
        if kv >= self.world:
            return self.part(kv)
        head = self.rank * kv // self.world
        return slice(head, head + 1)
