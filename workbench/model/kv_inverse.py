"""How far a budget of bytes reaches: the longest context, the most sequences. Exact."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from workbench.model.asked import SizingError, shown, whole
from workbench.model.config import BeamConfig
from workbench.model.kv_settings import MOST_SEQUENCES
from workbench.model.presets import config_of
from workbench.model.sizing import Account, KVSizing, size_kv

MOST_LIMIT = 1 << 62


def max_context(
    model: BeamConfig | str,
    budget: int,
    *,
    account: Account = "admission",
    limit: int | None = None,
    **settings: Any,
) -> int:
    """Most tokens of context for which the KV cache fits into ``budget`` bytes on each GPU.

    Exact: a search on the same function that sizes. By the admission account, the pool's null
    block counts. At most ``limit`` tokens, by default the model's ``max_position_embeddings``; 0
    where not even one token fits. ``settings`` are those of :func:`size_kv` without ``context``.
    """
    config, room = config_of(model), _budget(budget)
    most = config.max_position_embeddings
    if limit is not None:
        most = min(most, whole("limit", limit, MOST_LIMIT))
    return largest(
        most,
        lambda n: fits(size_kv(config, context=n, **settings), room, account=account),
    )


def max_sequences(
    model: BeamConfig | str,
    budget: int,
    *,
    account: Account = "admission",
    limit: int = MOST_SEQUENCES,
    **settings: Any,
) -> int:
    """Most sequences whose KV cache fits into ``budget`` bytes on each GPU; see `max_context`."""
    config, room = config_of(model), _budget(budget)
    return largest(
        min(MOST_SEQUENCES, whole("limit", limit, MOST_LIMIT)),
        lambda n: fits(size_kv(config, sequences=n, **settings), room, account=account),
    )


def _budget(budget: int) -> int:
    """Bytes, 0 or less included: a negative budget holds nothing."""
    if isinstance(budget, bool) or not hasattr(budget, "__index__"):
        raise SizingError(f"a budget is a whole number of bytes, not {shown(budget)}")
    return operator.index(budget)


def fits(sizing: KVSizing, budget: int, *, account: Account = "admission") -> bool:
    """Whether one GPU's part fits into ``budget`` bytes, by one account."""
    needed = sizing.pool_bytes if account == "admission" else sizing.per_gpu(account).total
    return needed <= budget


def largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n of 1 … most for which ``holds``, which is false above some n; 0 if none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
