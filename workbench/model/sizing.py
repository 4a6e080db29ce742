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

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from workbench.model.asked import SizingError
from workbench.model.config import AttentionType, BeamConfig
from workbench.model.display import Shown, gib
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_planner import (
    KVLayer,
    KVPlan,
    admission_blocks,
    full_length,
    plan_groups,
)
from workbench.model.kv_settings import (
    KV_WIDTH,
    KVDtype,
    KVSettings,
    check_heads,
    checked_settings,
)
from workbench.model.presets import config_of, drafter_config_of

Account = Literal["ideal", "admission", "hybrid_off", "naive"]
Binding = Literal["in_flight_tokens", "max_model_len", "no_sliding_layers"]

ACCOUNTS: tuple[Account, ...] = ("ideal", "admission", "hybrid_off", "naive")


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
    hybrid_off_bytes: int
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
    unified: KVPlan  # hybrid manager off
    refusal: str  # why the engine would not start with it off
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

        ``hybrid_off`` is what every layer at full length takes, also where the engine would not
        start like that (:attr:`hybrid_off_refusal`).

        Raises:
            SizingError: no such account.
        """
        s, rank = self.settings, self._rank
        if account == "ideal":
            return self._bytes(lambda k: k.tokens(s.context) * k.rank_bytes)
        if account == "naive":
            return self._bytes(lambda k: s.context * k.rank_bytes if k.name != "drafter" else 0)
        if account == "hybrid_off":
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
        return None if self._rank.refusal else self._rank.unified

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
        """Which term of the engine's bound holds for the model's sliding layers.

        Of a model without any, which holds for its drafter's.
        """
        window = self._bound_window
        if window is None:
            return "no_sliding_layers"
        s = self.settings
        held = window - 1 + s.in_flight_tokens
        return "in_flight_tokens" if held < s.context else "max_model_len"

    @property
    def _bound_window(self) -> int | None:
        windows = {k.name: k.window for k in self._rank.kinds}
        return windows.get("sliding") or windows.get("drafter")

    @property
    def binding_sentence(self) -> str:
        """:attr:`binding` in words, with its numbers."""
        s, window = self.settings, self._bound_window
        if window is None:
            return f"every layer grows with the context, here {s.context:,} tokens"
        whose = "a sliding layer" if self.config.sliding_layers else "a layer of the drafter"
        twice = "two batches of " if s.async_scheduling else ""
        held = window - 1 + s.in_flight_tokens
        sum_ = f"window - 1 + in flight = {window - 1:,} + {s.in_flight_tokens:,}"
        others = ""
        if self.drafter is not None and self.drafter.sliding_window != window:
            theirs = self.drafter.sliding_window - 1 + s.in_flight_tokens
            others = f"; the drafter's hold {min(theirs, s.context):,}"
        if self.binding == "in_flight_tokens":
            return (
                f"{whose} holds {held:,} tokens ({sum_}, {twice}max_num_batched_tokens "
                f"{s.batched_tokens:,}), whatever the context{others}"
            )
        return (
            f"{whose} holds the whole context of {s.context:,} tokens, because {sum_} is no less"
            f"{others}"
        )

    @property
    def per_layer(self) -> tuple[LayerKV, ...]:
        """Every layer on one GPU, the drafter's last."""
        s, plan = self.settings, self._rank.plan
        admission = self._layer_bytes(plan)
        off = self._layer_bytes(self._rank.unified)
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
                    hybrid_off_bytes=off[position],
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
            b = self.per_gpu(account)
            parts = (b.full, b.sliding, b.drafter, b.padding, b.total)
            lines.append(f"{account:<12}" + "".join(f"{gib(size):>13}" for size in parts))
        return "\n".join([*lines, f"binding: {self.binding_sentence}"])

    # -- for JSON -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of ``workbench kv --json``."""
        s, stored = self.settings, self.stored
        off = self.per_gpu("hybrid_off").total
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

    def _layer_bytes(self, plan: KVPlan) -> dict[int, int]:
        """Bytes of each layer, by its place in the planner's list, in the engine's blocks."""
        s = self.settings
        found: dict[int, int] = {}
        for group in plan.groups:
            blocks = s.sequences * admission_blocks(
                group.window, group.block_size, s.context, s.in_flight_tokens
            )
            found |= {
                place: blocks * page for place, page in zip(group.layers, group.pages, strict=True)
            }
        return found

    def _engine_bytes(self, plan: KVPlan) -> KVBytes:
        s = self.settings
        sums = {"full": 0, "sliding": 0, "drafter": 0}
        total = 0
        for group, shares in zip(plan.groups, _shares(plan, self.config), strict=True):
            blocks = s.sequences * admission_blocks(
                group.window, group.block_size, s.context, s.in_flight_tokens
            )
            total += blocks * plan.block_bytes
            for kind, size in shares:
                sums[kind] += blocks * size
        return KVBytes(**sums, padding=total - sum(sums.values()))


@lru_cache(maxsize=512)
def _shares(plan: KVPlan, config: BeamConfig) -> tuple[tuple[tuple[str, int], ...], ...]:
    """For each group, the bytes of one of its blocks by kind of layer."""
    found = []
    for group in plan.groups:
        sizes: dict[str, int] = {}
        for position, page in zip(group.layers, group.pages, strict=True):
            layer = plan.layers[position]
            full = not layer.drafter and config.is_full(layer.index)
            kind = "drafter" if layer.drafter else "full" if full else "sliding"
            sizes[kind] = sizes.get(kind, 0) + page
        found.append(tuple(sizes.items()))
    return tuple(found)


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
    config, extra = config_of(model), drafter_config_of(drafter)
    settings = checked_settings(
        config,
        context=context,
        sequences=sequences,
        kv_dtype=kv_dtype,
        tp=tp,
        block_size=block_size,
        batched_tokens=batched_tokens,
        async_scheduling=async_scheduling,
    )
    if extra is not None:
        extra.check_target(config)
        check_heads(extra, settings.tp, whose="the drafter's ")
    rank = _rank(config, extra, settings.kv_dtype, settings.tp, settings.block_size)
    return KVSizing(config=config, drafter=extra, settings=settings, _rank=rank)


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
        unified, refusal = full_length(tuple(layers), block_size), str(error)
    return _Rank(
        kinds=tuple(kind for kind in kinds if kind.layers),
        plan=plan_groups(tuple(layers), block_size),
        unified=unified,
        refusal=refusal,
        replicas=max(1, tp // kv),
    )
