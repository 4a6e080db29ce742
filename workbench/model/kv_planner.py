"""How vLLM 0.33 lays a hybrid KV cache out: layers in groups, groups in blocks of one shared pool.

One *block* holds ``block_size`` tokens of every layer of one group, so all groups must be equally
wide. The planner makes groups of the size of the rarest kind of layer; a group that comes out
shorter wastes the missing layers' part of each of its blocks (*padding layers*). A drafter's layers
are a kind of their own when their window differs from the target's, and then change the size of
every group.

This is our own statement of the engine's rule (``v1/core/kv_cache_planning.py`` and
``v1/kv_cache_interface.py`` of vLLM 0.33.0); ``tests/test_engine_kv.py`` holds it to the engine's
own functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from workbench.model.asked import SizingError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayer:
    """The KV cache of one attention layer on one tensor-parallel rank.

    ``window`` is None for a layer that sees everything. ``token_bytes`` is what one token takes:
    keys and values of the rank's KV heads. ``drafter`` marks a layer of the drafter; it does not
    take part in the grouping rule.
    """

    index: int
    window: int | None
    token_bytes: int
    drafter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table: positions in the planner's list, one window for all.

    ``block_size`` is this group's tokens a block: the engine gives layers with smaller pages
    longer blocks, so that a block of every group has the same number of bytes.
    """

    layers: tuple[int, ...]
    window: int | None
    block_size: int
    pages: tuple[int, ...]  # bytes of each layer's part of a block

    @property
    def block_bytes(self) -> int:
        """Bytes of a block that this group's layers use."""
        return sum(self.pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """The groups of one rank; ``block_bytes`` is one block of the shared pool."""

    layers: tuple[KVLayer, ...]
    groups: tuple[KVGroup, ...]
    block_bytes: int

    @property
    def padding_layers(self) -> int:
        """Layers' worth of room that the groups leave unused, for pages of one size."""
        widest = max(len(g.layers) for g in self.groups)
        return sum(widest - len(g.layers) for g in self.groups)

    def blocks_per_sequence(self, context: int, in_flight: int) -> int:
        """Blocks the engine keeps free to admit a sequence of ``context`` tokens."""
        return sum(
            admission_blocks(g.window, g.block_size, context, in_flight) for g in self.groups
        )

    def bytes_per_sequence(self, context: int, in_flight: int) -> int:
        """The same in bytes of the pool, padding included."""
        return self.block_bytes * self.blocks_per_sequence(context, in_flight)


def admission_blocks(window: int | None, block_size: int, context: int, in_flight: int) -> int:
    """Blocks of one layer that the engine counts on for a sequence of ``context`` tokens.

    A full layer holds every token. A sliding one holds its window's earlier ``window - 1`` tokens
    and all that is scheduled and not settled yet, never more than the context, and one block more
    because a window need not begin where a block begins.
    """
    if window is None:
        return -(-context // block_size)
    return -(-min(window - 1 + in_flight, context) // block_size) + 1


@lru_cache(maxsize=256)
def plan_groups(layers: tuple[KVLayer, ...], block_size: int, *, hybrid: bool = True) -> KVPlan:
    """Groups of ``layers`` (in model order, the drafter's last) as the engine's planner makes them.

    ``hybrid=False`` is ``--disable-hybrid-kv-cache-manager``: where there are full layers, sliding
    ones are stored like them.

    Raises:
        SizingError: the engine refuses these layers.
    """
    if not layers:
        raise SizingError("a model without attention layers has no KV cache; give one with layers")
    if not hybrid:
        return _unified(layers, block_size)
    kinds = _buckets((layer.window, layer.token_bytes) for layer in layers)
    windows = {layer.window for layer in layers}
    if len(windows) == 1:
        # One kind of attention: a single group, whose pages may differ from layer to layer.
        return _single_group(layers, block_size)
    page = max(layer.token_bytes for layer in layers) * block_size
    counts = [len(positions) for positions in kinds.values()]
    size = min(counts)
    if max(counts) < 1.5 * size:
        size = max(counts)  # the engine's own heuristic against too much padding
    groups = []
    for positions in kinds.values():
        layer = layers[positions[0]]
        number = -(-len(positions) // size)
        groups += [
            KVGroup(
                layers=tuple(positions[i::number]),
                window=layer.window,
                block_size=_scaled_block(page, layer.token_bytes, block_size),
                pages=(page,) * len(positions[i::number]),
            )
            for i in range(number)
        ]
    return KVPlan(
        layers=layers,
        groups=tuple(groups),
        block_bytes=max(group.block_bytes for group in groups),
    )


def _scaled_block(page: int, token_bytes: int, block_size: int) -> int:
    """Tokens a page of ``page`` bytes holds: a whole multiple of the block, or padded to it."""
    own = token_bytes * block_size
    return block_size * (page // own) if page % own == 0 else block_size


def _buckets(kinds: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """Positions of each kind, kinds in the order in which they first appear."""
    buckets: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(kinds):
        buckets.setdefault(kind, []).append(position)
    return buckets


def _single_group(layers: Sequence[KVLayer], block_size: int) -> KVPlan:
    group = KVGroup(
        layers=tuple(range(len(layers))),
        window=layers[0].window,
        block_size=block_size,
        pages=tuple(layer.token_bytes * block_size for layer in layers),
    )
    return KVPlan(layers=tuple(layers), groups=(group,), block_bytes=group.block_bytes)


def _unified(layers: tuple[KVLayer, ...], block_size: int) -> KVPlan:
    """Every layer stored at full length; windows still apply to what is computed."""
    windows = {layer.window for layer in layers if layer.window is not None}
    if len(windows) > 1:
        raise SizingError(
            "the engine does not start with the hybrid manager off when sliding windows differ "
            f"({', '.join(map(str, sorted(windows)))}); leave it on, or use no drafter"
        )
    if all(layer.window is not None for layer in layers):
        return _single_group(layers, block_size)  # nothing to unify with: windows stay windows
    return full_length(layers, block_size)


def full_length(layers: tuple[KVLayer, ...], block_size: int) -> KVPlan:
    """One group in which every layer keeps every token, whatever its window."""
    full = tuple(
        KVLayer(index=x.index, window=None, token_bytes=x.token_bytes, drafter=x.drafter)
        for x in layers
    )
    return _single_group(full, block_size)
