"""How much memory Beam's KV cache takes: per layer, per GPU, and by three different accounts.

Full layers keep every token; sliding layers need their window only. What that costs depends on who
is asked, so three figures stand side by side everywhere:

* **ideal**: exactly the tokens that later steps can still read. No engine reaches it.
* **admission**: what vLLM 0.33 keeps free before it admits a sequence: whole blocks, room for the
  tokens in flight in every sliding layer, groups of layers padded to one width.
* **hybrid off**: every layer at full length, as with ``--disable-hybrid-kv-cache-manager``.

Against them stands the **naive** answer, the model's layers all at full length and no drafter,
which is what a calculator says that does not know about windows.

Bytes are *stored* (each KV head once), *resident* (with the copies that tensor parallelism makes
when there are more ranks than KV heads) or *read* (by one decode step, copies included).
FP8 means one byte a number with scales per tensor, which take no bytes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from workbench.model.config import AttentionType, BeamConfig, is_int, short
from workbench.model.display import Shown, gib
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_planner import (
    KVLayer,
    KVPlan,
    SizingError,
    admission_blocks,
    plan_groups,
)
from workbench.model.presets import config_of, drafter_config_of

KVDtype = Literal["bf16", "fp8"]
Account = Literal["ideal", "admission", "hybrid_off", "naive"]
Binding = Literal["in_flight_tokens", "max_model_len", "no_sliding_layers"]

KV_WIDTH: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp8": 1})
ACCOUNTS: tuple[Account, ...] = ("ideal", "admission", "hybrid_off", "naive")

MOST_SEQUENCES = 1 << 20
MOST_BATCHED_TOKENS = 1 << 24
MOST_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSettings:
    """What a sizing was asked for.

    ``context`` and ``batched_tokens`` (the engine's ``max_num_batched_tokens``) count tokens,
    ``tp`` tensor-parallel ranks, ``block_size`` tokens a block. ``context`` is each sequence's
    length and, for the engine's account, its ``max_model_len``.
    """

    context: int
    sequences: int = 1
    kv_dtype: KVDtype = "bf16"
    tp: int = 1
    block_size: int = 16
    batched_tokens: int = 8192
    async_scheduling: bool = True

    @property
    def in_flight_tokens(self) -> int:
        """Tokens scheduled and not settled yet: two batches under asynchronous scheduling."""
        return self.batched_tokens * (2 if self.async_scheduling else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """One layer's KV cache on one GPU, all sequences, in bytes by each account.

    Layers of a drafter come after the model's and have ``drafter`` set.
    """

    index: int
    attention: AttentionType
    drafter: bool
    window: int | None
    ideal_bytes: int
    admission_bytes: int
    hybrid_off_bytes: int | None
    naive_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBytes:
    """Bytes by kind of layer; ``padding`` is room in the engine's blocks that no layer uses."""

    full: int
    sliding: int
    drafter: int = 0
    padding: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.full + self.sliding + self.drafter + self.padding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Layers of one kind on one rank: how many, their window, one token's bytes here and whole."""

    name: Literal["full", "sliding", "drafter"]
    layers: int
    window: int | None
    rank_bytes: int
    whole_bytes: int

    def tokens(self, context: int) -> int:
        """Tokens of a sequence that a later step can still read."""
        return context if self.window is None else min(self.window, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A model (and its drafter) as one rank stores it; everything that no slider moves."""

    kinds: tuple[_Kind, ...]
    plan: KVPlan
    unified: KVPlan | None  # hybrid manager off; None where the engine refuses that
    refusal: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class KVSizing(Shown):
    """The KV cache of ``settings.sequences`` sequences; :func:`size_kv` makes it.

    Methods named ``per_gpu`` answer for one GPU of the tensor-parallel group, everything else for
    the whole model.
    """

    config: BeamConfig
    drafter: DFlash2Config | None
    settings: KVSettings
    _rank: _Rank

    # -- whole model, each KV head once ---------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """Bytes one more token of context adds in the layers that grow, each head once."""
        return sum(k.layers * k.whole_bytes for k in self._rank.kinds if k.window is None)

    @property
    def naive_bytes_per_token(self) -> int:
        """What a calculator without windows says a token adds: all layers of the model."""
        return sum(k.layers * k.whole_bytes for k in self._rank.kinds if k.name != "drafter")

    @property
    def stored(self) -> KVBytes:
        """Ideal bytes, each head once: full layers, sliding layers, the drafter's."""
        return self._bytes(lambda k: k.tokens(self.settings.context) * k.whole_bytes)

    # -- with the copies of tensor parallelism --------------------------------------------------

    @property
    def replicas(self) -> int:
        """Copies of each of the model's KV heads over the tensor-parallel ranks."""
        return self._rank.replicas

    @property
    def resident_bytes(self) -> int:
        """Ideal bytes over all ranks, copies included."""
        return self.settings.tp * self.per_gpu("ideal").total

    @property
    def read_bytes_per_step(self) -> int:
        """Bytes one decode step reads over all ranks, one new token a sequence.

        Full layers read everything, sliding ones their window; a drafter's pass reads its own.
        """
        return self.resident_bytes

    # -- one GPU --------------------------------------------------------------------------------

    def per_gpu(self, account: Account) -> KVBytes:
        """Bytes on one GPU by one account.

        Raises:
            SizingError: ``hybrid_off`` where the engine refuses it (windows that differ).
        """
        s, rank = self.settings, self._rank
        if account == "ideal":
            return self._bytes(lambda k: k.tokens(s.context) * k.rank_bytes)
        if account == "naive":
            return self._bytes(lambda k: s.context * k.rank_bytes if k.name != "drafter" else 0)
        if account == "hybrid_off":
            if rank.unified is None:
                raise SizingError(rank.refusal)
            return self._engine_bytes(rank.unified)
        if account == "admission":
            return self._engine_bytes(rank.plan)
        raise SizingError(f"unknown account {account!r}; use one of {', '.join(ACCOUNTS)}")

    @property
    def hybrid_off_refusal(self) -> str | None:
        """Why the engine would not start with the hybrid manager off, or None."""
        return self._rank.refusal or None

    @property
    def plan(self) -> KVPlan:
        """The engine's groups of layers on one rank."""
        return self._rank.plan

    @property
    def hybrid_off_plan(self) -> KVPlan | None:
        """The same with the hybrid manager off, None where the engine refuses that."""
        return self._rank.unified

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of the shared pool that the engine counts for one sequence."""
        return self._rank.plan.blocks_per_sequence(
            self.settings.context, self.settings.in_flight_tokens
        )

    @property
    def pool_bytes(self) -> int:
        """Bytes a GPU's pool needs to admit all sequences: their blocks and the null block."""
        blocks = self.settings.sequences * self.blocks_per_sequence + 1
        return blocks * self._rank.plan.block_bytes

    @property
    def binding(self) -> Binding:
        """Which term of the engine's bound holds for the sliding layers."""
        windows = [k.window for k in self._rank.kinds if k.window is not None]
        if not windows:
            return "no_sliding_layers"
        s = self.settings
        return (
            "in_flight_tokens"
            if max(windows) - 1 + s.in_flight_tokens < s.context
            else "max_model_len"
        )

    @property
    def binding_sentence(self) -> str:
        """:attr:`binding` in words, with its numbers."""
        s, window = self.settings, self.config.sliding_window
        if self.binding == "no_sliding_layers":
            return f"every layer grows with the context, here {s.context:,} tokens"
        twice = "two batches of " if s.async_scheduling else ""
        sum_ = f"window - 1 + in flight = {window - 1:,} + {s.in_flight_tokens:,}"
        if self.binding == "in_flight_tokens":
            return (
                f"a sliding layer holds {window - 1 + s.in_flight_tokens:,} tokens ({sum_}, "
                f"{twice}max_num_batched_tokens {s.batched_tokens:,}), whatever the context"
            )
        return (
            f"a sliding layer holds the whole context of {s.context:,} tokens, because {sum_} "
            "is no less"
        )

    @property
    def per_layer(self) -> tuple[LayerKV, ...]:
        """Every layer on one GPU, the drafter's last."""
        s, plan, unified = self.settings, self._rank.plan, self._rank.unified
        admission = dict.fromkeys(range(len(plan.layers)), 0)
        for group in plan.groups:
            blocks = admission_blocks(group.window, group.block_size, s.context, s.in_flight_tokens)
            for position, page in zip(group.layers, group.pages, strict=True):
                admission[position] = s.sequences * blocks * page
        off_tokens = -(-s.context // s.block_size) * s.block_size
        rows = []
        for position, layer in enumerate(plan.layers):
            window = layer.window
            tokens = s.context if window is None else min(window, s.context)
            rows.append(
                LayerKV(
                    index=layer.index,
                    attention="full_attention" if window is None else "sliding_attention",
                    drafter=layer.drafter,
                    window=window,
                    ideal_bytes=s.sequences * tokens * layer.token_bytes,
                    admission_bytes=admission[position],
                    hybrid_off_bytes=None
                    if unified is None
                    else s.sequences * off_tokens * layer.token_bytes,
                    naive_bytes=0 if layer.drafter else s.sequences * s.context * layer.token_bytes,
                )
            )
        return tuple(rows)

    def __repr__(self) -> str:
        s = self.settings
        lines = [
            f"KV cache of {s.sequences:,} x {s.context:,} tokens in {s.kv_dtype}, TP{s.tp}"
            + (", with a drafter" if self.drafter else "")
            + f": {self.bytes_per_token:,} bytes a token grow",
            f"{'one GPU':<12}"
            + "".join(f"{name:>13}" for name in ("full", "sliding", "drafter", "padding", "total")),
        ]
        for account in ACCOUNTS:
            if account == "hybrid_off" and self.hybrid_off_refusal:
                lines.append(f"{account:<12} refused by the engine")
                continue
            b = self.per_gpu(account)
            parts = (b.full, b.sliding, b.drafter, b.padding, b.total)
            lines.append(f"{account:<12}" + "".join(f"{gib(size):>13}" for size in parts))
        return "\n".join([*lines, f"binding: {self.binding_sentence}"])

    # -- for JSON -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of ``workbench kv --json``."""
        s, stored = self.settings, self.stored
        off = None if self._rank.unified is None else self.per_gpu("hybrid_off").total
        return {
            "context": s.context,
            "sequences": s.sequences,
            "kv_dtype": s.kv_dtype,
            "tp": s.tp,
            "block_size": s.block_size,
            "batched_tokens": s.batched_tokens,
            "async_scheduling": s.async_scheduling,
            "drafter": self.drafter is not None,
            "bytes_per_token": self.bytes_per_token,
            "full_bytes": stored.full,
            "sliding_bytes": stored.sliding,
            "drafter_bytes": stored.drafter,
            "total_bytes": stored.total,
            "replicas": self.replicas,
            "resident_bytes": self.resident_bytes,
            "read_bytes_per_step": self.read_bytes_per_step,
            "per_gpu_bytes": self.per_gpu("ideal").total,
            "per_gpu": {
                "ideal_bytes": self.per_gpu("ideal").total,
                "admission_bytes": self.per_gpu("admission").total,
                "admission_padding_bytes": self.per_gpu("admission").padding,
                "hybrid_off_bytes": off,
                "naive_bytes": self.per_gpu("naive").total,
            },
            "engine": {
                "version": ENGINE,
                "groups": [
                    {
                        "layers": [self._rank.plan.layers[i].index for i in group.layers],
                        "attention": "full_attention" if group.window is None
                        else "sliding_attention",
                        "window": group.window,
                    }
                    for group in self._rank.plan.groups
                ],
                "block_bytes": self._rank.plan.block_bytes,
                "blocks_per_sequence": self.blocks_per_sequence,
                "pool_bytes": self.pool_bytes,
                "in_flight_tokens": s.in_flight_tokens,
                "hybrid_off_refusal": self.hybrid_off_refusal,
            },
            "per_layer": [
                {
                    "index": layer.index,
                    "attention": layer.attention,
                    "drafter": layer.drafter,
                    "ideal_bytes": layer.ideal_bytes,
                    "admission_bytes": layer.admission_bytes,
                    "hybrid_off_bytes": layer.hybrid_off_bytes,
                    "naive_bytes": layer.naive_bytes,
                }
                for layer in self.per_layer
            ],
            "binding": self.binding,
            "binding_sentence": self.binding_sentence,
        }  # fmt: skip

    # -- sums -----------------------------------------------------------------------------------

    def _bytes(self, each: Callable[[_Kind], int]) -> KVBytes:
        sums = {"full": 0, "sliding": 0, "drafter": 0}
        for kind in self._rank.kinds:
            sums[kind.name] += self.settings.sequences * kind.layers * each(kind)
        return KVBytes(**sums)

    def _engine_bytes(self, plan: KVPlan) -> KVBytes:
        s = self.settings
        sums = {"full": 0, "sliding": 0, "drafter": 0}
        total = 0
        for group in plan.groups:
            blocks = s.sequences * admission_blocks(
                group.window, group.block_size, s.context, s.in_flight_tokens
            )
            total += blocks * plan.block_bytes
            for position, page in zip(group.layers, group.pages, strict=True):
                layer = plan.layers[position]
                kind = (
                    "drafter" if layer.drafter else "sliding" if self._is_sliding(layer) else "full"
                )
                sums[kind] += blocks * page
        return KVBytes(**sums, padding=total - sum(sums.values()))

    def _is_sliding(self, layer: KVLayer) -> bool:
        return self.config.layer_types[layer.index] == "sliding_attention"


# The engine whose accounting ``admission`` and ``hybrid_off`` reproduce.
ENGINE = "vLLM 0.33"


def size_kv(
    model: BeamConfig | str,
    *,
    context: int,
    sequences: int = 1,
    kv_dtype: KVDtype = "bf16",
    tp: int = 1,
    block_size: int = 16,
    batched_tokens: int = 8192,
    async_scheduling: bool = True,
    drafter: DFlash2Config | str | None = None,
) -> KVSizing:
    """Size the KV cache of ``sequences`` sequences of ``context`` tokens. A pure function.

    ``model`` is a configuration, or a name or folder as on the command line. ``batched_tokens`` is
    the engine's ``max_num_batched_tokens``; asynchronous scheduling, its default, keeps two such
    batches in flight. ``drafter`` adds a DFlash2 drafter's layers: its configuration, name or
    folder.

    Raises:
        SizingError: a value that cannot be, with what to give instead.
    """
    settings = KVSettings(
        context=context,
        sequences=sequences,
        kv_dtype=kv_dtype,
        tp=tp,
        block_size=block_size,
        batched_tokens=batched_tokens,
        async_scheduling=async_scheduling,
    )
    config, extra = config_of(model), drafter_config_of(drafter)
    check_settings(settings, config)
    if extra is not None:
        check_heads(extra, tp, whose="the drafter's ")
    rank = _rank(config, extra, kv_dtype, tp, block_size)
    return KVSizing(config=config, drafter=extra, settings=settings, _rank=rank)


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
    config = config_of(model)
    most = config.max_position_embeddings if limit is None else limit
    return largest(
        most,
        lambda n: fits(size_kv(config, context=n, **settings), budget, account=account),
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
    config = config_of(model)
    return largest(
        limit,
        lambda n: fits(size_kv(config, sequences=n, **settings), budget, account=account),
    )


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


@lru_cache(maxsize=512)
def _rank(
    config: BeamConfig,
    drafter: DFlash2Config | None,
    kv_dtype: KVDtype,
    tp: int,
    block_size: int,
) -> _Rank:
    width = KV_WIDTH[kv_dtype]
    kv = config.num_key_value_heads
    token = 2 * config.head_dim * width  # keys and values of one head
    heads = max(1, kv // tp)
    layers = [
        KVLayer(
            index=i,
            window=None if config.is_full(i) else config.sliding_window,
            token_bytes=heads * token,
        )
        for i in range(config.num_hidden_layers)
    ]
    kinds = [
        _Kind(name="full", layers=len(config.full_layers), window=None,
              rank_bytes=heads * token, whole_bytes=kv * token),
        _Kind(name="sliding", layers=len(config.sliding_layers), window=config.sliding_window,
              rank_bytes=heads * token, whole_bytes=kv * token),
    ]  # fmt: skip
    if drafter is not None:
        drafter_kv = drafter.num_key_value_heads
        drafter_token = 2 * drafter.head_dim * width
        drafter_heads = max(1, drafter_kv // tp)
        kinds.append(
            _Kind(
                name="drafter",
                layers=drafter.num_hidden_layers,
                window=drafter.sliding_window,
                rank_bytes=drafter_heads * drafter_token,
                whole_bytes=drafter_kv * drafter_token,
            )
        )
        layers += [
            KVLayer(
                index=config.num_hidden_layers + i,
                window=drafter.sliding_window,
                token_bytes=drafter_heads * drafter_token,
                drafter=True,
            )
            for i in range(drafter.num_hidden_layers)
        ]
    refusal = ""
    try:
        unified = plan_groups(tuple(layers), block_size, hybrid=False)
    except SizingError as error:
        unified, refusal = None, str(error)
    return _Rank(
        kinds=tuple(kind for kind in kinds if kind.layers),
        plan=plan_groups(tuple(layers), block_size),
        unified=unified,
        refusal=refusal,
        replicas=max(1, tp // kv),
    )


def check_settings(settings: KVSettings, config: BeamConfig) -> None:
    """Raise SizingError, in one sentence, for a value that cannot be."""
    s = settings
    _check_count("context", s.context, config.max_position_embeddings, "tokens")
    _check_count("sequences", s.sequences, MOST_SEQUENCES, "sequences")
    _check_count("block size", s.block_size, MOST_BLOCK, "tokens")
    _check_count("batched tokens", s.batched_tokens, MOST_BATCHED_TOKENS, "tokens")
    if s.kv_dtype not in KV_WIDTH:
        raise SizingError(f"unknown KV dtype {s.kv_dtype!r:.40}; use one of {', '.join(KV_WIDTH)}")
    if not isinstance(s.async_scheduling, bool):
        raise SizingError(f"async_scheduling must be true or false, not {s.async_scheduling!r:.40}")
    check_heads(config, s.tp)


def check_heads(config: BeamConfig | DFlash2Config, tp: int, *, whose: str = "") -> None:
    """Raise SizingError when ``tp`` ranks cannot share the heads evenly."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if not is_int(tp) or tp < 1:
        raise SizingError(f"tensor parallelism needs at least 1 rank, not {short(tp)}")
    good = [n for n in range(1, heads + 1) if not heads % n and (not kv % n or not n % kv)]
    if tp not in good:
        raise SizingError(
            f"tensor parallelism over {short(tp)} ranks does not divide {whose}{heads} query heads "
            f"and {kv} KV heads evenly; use one of {', '.join(map(str, good))}"
        )


def _check_count(name: str, value: Any, most: int, unit: str) -> None:
    if not is_int(value) or not 1 <= value <= most:
        raise SizingError(f"{name} must be from 1 to {most:,} {unit}, not {_shown(value)}")


def _shown(value: Any) -> str:
    return f"{value:,}" if is_int(value) and abs(value) < 1 << 60 else short(value)[:60]
