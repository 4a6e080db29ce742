"""How the KV cache grows with the context: bytes by kind of layer over a grid of contexts."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.model.asked import SizingError
from workbench.model.config import is_int, short
from workbench.model.kv_settings import KVSettings
from workbench.model.sizing import Account, KVSizing, size_kv

_LEAST, _MOST = 2, 4096  # points of a curve


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCurve:
    """Bytes on one GPU at each of ``contexts`` tokens; :func:`kv_curve` makes it.

    ``full``, ``sliding``, ``drafter`` and ``padding`` are the parts by ``account`` and add up to
    what it counts; ``naive`` is every layer at full length. All lists are as long as ``contexts``,
    which ascend. ``refusal`` is why the engine would not start like that, None where it would.
    ``settings`` are those of the sizing that the curve was made from; its context is one of the
    points.
    """

    settings: KVSettings
    account: Account
    window: int
    contexts: tuple[int, ...]
    full: tuple[int, ...]
    sliding: tuple[int, ...]
    drafter: tuple[int, ...]
    padding: tuple[int, ...]
    naive: tuple[int, ...]
    refusal: str | None = None

    @property
    def total(self) -> tuple[int, ...]:
        """All parts together at each context."""
        parts = zip(self.full, self.sliding, self.drafter, self.padding, strict=True)
        return tuple(map(sum, parts))

    @property
    def at(self) -> int:
        """The place of the sizing's own context in the lists."""
        return self.contexts.index(self.settings.context)

    @property
    def flat_from(self) -> int | None:
        """The context from which a sliding layer grows no more, or None where it always grows.

        Its window by the ideal account; by the engine's, what a window and the tokens in flight
        come to.
        """
        bends = {
            "ideal": self.window,
            "admission": self.window - 1 + self.settings.in_flight_tokens,
        }
        bend = bends.get(self.account)
        return bend if bend is not None and bend < self.contexts[-1] and any(self.sliding) else None


def kv_curve(sizing: KVSizing, *, account: Account = "admission", points: int = 49) -> KVCurve:
    """``sizing`` at other contexts, up to the model's ``max_position_embeddings``.

    ``points`` contexts evenly spread over a logarithmic axis, all powers of two, and those where a
    line bends (the windows, the engine's bound for each) or that were asked for, so that straight
    lines between the points are right to within a block. A pure function.

    Raises:
        SizingError: fewer than 2 or more than 4096 points, or no such account.
    """
    if not is_int(points) or not _LEAST <= points <= _MOST:
        raise SizingError(f"a curve has from {_LEAST} to {_MOST:,} points, not {short(points)}")
    config, drafter, s = sizing.config, sizing.drafter, sizing.settings
    most = config.max_position_embeddings
    windows = [config.sliding_window] if config.sliding_layers else []
    windows += [drafter.sliding_window] if drafter is not None else []
    bends = [*windows, *(window - 1 + s.in_flight_tokens for window in windows), s.context]
    spread = [round(most ** (i / (points - 1))) for i in range(points)]
    powers = [1 << i for i in range(most.bit_length())]
    contexts = sorted({n for n in (*bends, *spread, *powers) if 1 <= n <= most})
    rows = []
    naive = []
    for context in contexts:
        at = size_kv(
            config,
            context=context,
            sequences=s.sequences,
            kv_dtype=s.kv_dtype,
            tp=s.tp,
            block_size=s.block_size,
            batched_tokens=s.batched_tokens,
            async_scheduling=s.async_scheduling,
            drafter=drafter,
        )
        rows.append(at.per_gpu(account))
        naive.append(at.per_gpu("naive").total)
    return KVCurve(
        settings=s,
        account=account,
        window=config.sliding_window,
        contexts=tuple(contexts),
        full=tuple(row.full for row in rows),
        sliding=tuple(row.sliding for row in rows),
        drafter=tuple(row.drafter for row in rows),
        padding=tuple(row.padding for row in rows),
        naive=tuple(naive),
        refusal=sizing.hybrid_off_refusal if account == "hybrid_off" else None,
    )
