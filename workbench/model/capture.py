"""One prompt through the whole model, with what it computed on the way.

The forward pass computes what it always does, bit for bit; torch module hooks, gone when
:func:`capture` returns, look on. Captured floats are float32 on the CPU whatever the model's dtype
and device. Places of the residual stream are numbered 0 … L: 0 is the embedding, ``l + 1`` is the
stream after layer l.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from workbench.errors import InspectionError, PromptError
from workbench.model.beam import Beam, Layer, SparseMLP
from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext
from workbench.model.display import Shown, ranges, shape_text
from workbench.model.export import FrameKind, frame, needs
from workbench.model.intervene import check_index, check_layers, layer_of
from workbench.model.prompts import Several, prompt_ids

if TYPE_CHECKING:
    import pandas

MAX_BYTES = 2 << 30  # default bound on what one capture may hold in memory
KV_CHUNK = 512  # tokens a prefill pass when KV contents are captured


class KVContents(NamedTuple):
    """What one layer's KV cache holds of a prompt and can still see: S positions, G KV heads.

    ``positions`` int64 ``[S]``; ``k`` (after QK norm and RoPE) and ``v`` float32 ``[S, G, D]``.
    """

    positions: Tensor
    k: Tensor
    v: Tensor

    def __repr__(self) -> str:
        return f"KVContents(positions {ranges(self.positions.tolist())}, {shape_text(self.k)})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Capture(Shown):
    """One prompt of T tokens, as the model saw it. What was not asked for is None or empty.

    Attributes:
        model: the model's name.
        config: its shape.
        token_ids: the prompt.
        tokens: each token's text (``#id`` without a tokenizer).
        logits: softcapped, float32 ``[T, V]``.
        hidden: residual stream, not normalised, float32 ``[L + 1, T, H]``; with ``layers`` given
            only the rows ``hidden_index``.
        hidden_index: which place of the stream each row of ``hidden`` is.
        attention: layer -> probabilities, float32 ``[A, T, T]`` (head, query, key), rows sum to 1.
        router_ids: sparse layer -> chosen experts, int64 ``[T, K]``.
        router_weights: sparse layer -> their weights, float32 ``[T, K]``, before the routed scale.
        kv: layer -> what its cache holds after prefill of the prompt.
    """

    model: str
    config: BeamConfig
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    logits: Tensor
    hidden: Tensor | None
    hidden_index: tuple[int, ...]
    attention: Mapping[int, Tensor]
    router_ids: Mapping[int, Tensor]
    router_weights: Mapping[int, Tensor]
    kv: Mapping[int, KVContents]

    def __repr__(self) -> str:
        parts = [f"{len(self.tokens)} tokens"]
        for word, numbers in (
            ("hidden", self.hidden_index),
            ("attention of layers", self.attention),
            ("router of layers", self.router_ids),
            ("kv of layers", self.kv),
        ):
            parts += [f"{word} {ranges(numbers)}"] if numbers else []
        return f"Capture({self.model}: {', '.join(parts)}, logits {shape_text(self.logits)})"

    def stream(self, index: int) -> Tensor:
        """The residual stream at place ``index`` of 0 … L: ``[T, H]``.

        Raises:
            InspectionError: there is no such place, or it was not captured.
        """
        index = check_index(index, self.config.num_hidden_layers + 1, "hidden state")
        if self.hidden is None or index not in self.hidden_index:
            raise InspectionError(
                f"hidden state {index} was not captured; use capture(..., hidden=True) and, if "
                "layers are named, name its layer"
            )
        return self.hidden[self.hidden_index.index(index)]

    def kinds(self) -> tuple[FrameKind, ...]:
        """The kinds that :meth:`to_frame` can give for this capture."""
        held: dict[FrameKind, object] = {
            "tokens": True, "hidden": self.hidden_index, "attention": self.attention,
            "router": self.router_ids, "kv": self.kv, "logits": True,
        }  # fmt: skip
        return tuple(kind for kind, value in held.items() if value)

    def to_frame(self, kind: FrameKind) -> pandas.DataFrame:
        """A tidy pandas frame, one observation a row; ``position`` joins them to ``tokens``.

        - ``tokens``: position, token_id, token, logprob (of this token given those before it,
          natural logarithm, NaN at position 0), top_id (the most likely next token);
        - ``hidden``: hidden (place in the stream), position, dimension, value;
        - ``attention``: layer, head, query, key, probability; only keys a query can see;
        - ``router``: layer, position, choice (0 is the first chosen), expert, weight;
        - ``kv``: layer, position, head, dimension, key, value;
        - ``logits``: position, token_id, logit.

        Raises:
            InspectionError: the kind is unknown or was not captured, or pandas is not installed.
        """
        if kind not in get_args(FrameKind):
            known = ", ".join(get_args(FrameKind))
            raise InspectionError(f"there is no frame of kind {kind!r}; use one of {known}")
        if kind not in self.kinds():
            raise InspectionError(
                f"{kind} was not captured; call capture(..., {kind}=True) and name a layer with it"
            )
        return frame(self, kind)

    def to_parquet(self, folder: str | Path) -> Path:
        """Write ``<kind>.parquet`` for every kind held, and ``capture.json``, to a new folder.

        The folder appears when all of it is written, or not at all. Returns its path.

        Raises:
            InspectionError: the folder exists and is not empty, it cannot be written, or pandas or
                pyarrow is not installed.
        """
        target = Path(folder)
        for package in ("pandas", "pyarrow"):
            needs(package)
        try:
            if target.exists() and not (target.is_dir() and not any(target.iterdir())):
                raise InspectionError(f"{target} exists already; remove it or name a new folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".capture-", dir=target.parent) as scratch:
                staged = Path(scratch) / "capture"
                staged.mkdir()
                for kind in self.kinds():
                    self.to_frame(kind).to_parquet(staged / f"{kind}.parquet", index=False)
                about = {
                    "model": self.model,
                    "kinds": self.kinds(),
                    "config": self.config.to_dict(),
                }
                (staged / "capture.json").write_text(json.dumps(about, indent=2) + "\n", "utf-8")
                staged.rename(target)
        except OSError as error:
            raise InspectionError(
                f"{target} could not be written ({error.strerror or error}); nothing was left there"
            ) from error
        return target


def capture(
    beam: Beam,
    prompt: str | Sequence[int],
    *,
    hidden: bool = True,
    attention: bool | Iterable[int] = False,
    router: bool = True,
    kv: bool = False,
    layers: Iterable[int] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Capture:
    """Run one prompt without a cache and keep what is asked for.

    Args:
        beam: the model; a sharded one needs its communicator, and gives its own rank's heads.
        prompt: a text, or token ids.
        hidden: keep the residual stream at every place.
        attention: keep attention probabilities: True for all of ``layers``, or a list of layers.
        router: keep the experts chosen in sparse layers, and their weights.
        kv: keep what a KV cache holds after prefill of the prompt (one more pass).
        layers: keep hidden, router and kv of these layers only (the embedding always).
        max_bytes: bound on the memory that the captured values and the mask may take.

    Raises:
        InspectionError: an empty or too long prompt, a token id or a layer that does not exist, or
            values that would take more than ``max_bytes`` (attention grows with the square of the
            prompt's length: name few layers).
    """
    ids, config = one_prompt(beam, prompt), beam.config
    length, count = len(ids), config.num_hidden_layers
    kept = check_layers(range(count) if layers is None else layers, count, "layers")
    maps = kept if attention is True else ()
    if not isinstance(attention, bool):
        maps = check_layers(attention, count, "attention")
    index = (0, *(layer + 1 for layer in kept)) if hidden else ()
    share = beam.shard.world
    if share > 1 and beam.communicator is None:
        raise InspectionError(
            f"rank {beam.shard.rank} of {share} alone gives partial sums; connect its ranks "
            "(Beam.connect) or load the whole model"
        )
    check_bytes(
        {
            "hidden states": 4 * len(index) * length * config.hidden_size,
            "attention maps": 4 * len(maps) * length**2 * (config.num_attention_heads // share),
            "KV contents": 8 * kv * config.kv_size * sum(_held(config, i, length) for i in kept),
            "logits": 4 * length * config.vocab_size,
            "the mask": length**2,
        },
        length,
        max_bytes,
    )
    context = SequenceContext(config, 1, length, beam.device)
    if maps:
        context = _AttentionRecorder(config, length, beam.device, maps)
    streams: dict[int, Tensor] = {}
    chosen: dict[int, tuple[Tensor, Tensor]] = {}

    def embedded(_: nn.Module, args: tuple[Any, ...]) -> None:
        streams[0] = _float(args[0])

    with ExitStack() as hooks, torch.no_grad():
        if hidden:
            hooks.callback(layer_of(beam, 0).register_forward_pre_hook(embedded).remove)
        for i in kept:
            _watch(
                hooks, layer_of(beam, i), i, streams if hidden else None, chosen if router else None
            )
        logits = beam.logits(beam(torch.tensor(ids, device=beam.device), context))
    return Capture(
        model=beam.name,
        config=config,
        token_ids=tuple(ids),
        tokens=tuple(token_label(beam, i) for i in ids),
        logits=logits.cpu(),
        hidden=torch.stack([streams[i] for i in index]) if hidden else None,
        hidden_index=index,
        attention=context.maps if isinstance(context, _AttentionRecorder) else {},
        router_ids={layer: pair[0] for layer, pair in chosen.items()},
        router_weights={layer: pair[1] for layer, pair in chosen.items()},
        kv=_kv_contents(beam, ids, kept) if kv else {},
    )


def attention_probabilities(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Softmax of ``q k^T / sqrt(D)`` over visible keys, in float32.

    ``q``, ``k`` ``[A, T, D]``, ``visible`` bool ``[T, T]`` (query, key) -> ``[A, T, T]``; keys that
    are not visible get exactly 0.
    """
    scores = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-1, -2)
    return scores.masked_fill_(~visible, float("-inf")).softmax(-1)


class _AttentionRecorder(SequenceContext):
    """A sequence's context that also writes down probabilities; the output stays the core's own."""

    def __init__(
        self, config: BeamConfig, length: int, device: torch.device, layers: Sequence[int]
    ) -> None:
        super().__init__(config, 1, length, device)
        self.layers, self.maps = frozenset(layers), dict[int, Tensor]()

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """As in :class:`SequenceContext`."""
        if layer in self.layers:
            spans = self.spans_full if self.config.is_full(layer) else self.spans_window
            visible = spans.mask(self.length, self.length, q.device)
            k = self.k.repeat_interleave(q.shape[1] // self.k.shape[1], 1)
            heads = attention_probabilities(q.transpose(0, 1), k.transpose(0, 1), visible)
            self.maps[layer] = heads.cpu()
        return super().attend(layer, q)


def _float(x: Tensor) -> Tensor:
    """A copy to keep, float32 on the CPU (exact for bfloat16)."""
    return x.detach().to("cpu", torch.float32, copy=True)


def _watch(
    hooks: ExitStack,
    layer: Layer,
    index: int,
    streams: dict[int, Tensor] | None,
    chosen: dict[int, tuple[Tensor, Tensor]] | None,
) -> None:
    """Hooks that note the stream after a layer and its router's choice; None: not wanted."""

    def after(_: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        assert streams is not None
        streams[index + 1] = _float(output[0])

    def routed(_: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        assert chosen is not None
        chosen[index] = (output[0].detach().to("cpu", copy=True), _float(output[1]))

    if streams is not None:
        hooks.callback(layer.register_forward_hook(after).remove)
    if chosen is not None and isinstance(layer.mlp, SparseMLP):
        hooks.callback(layer.mlp.router.register_forward_hook(routed).remove)


def _kv_contents(beam: Beam, ids: list[int], layers: Sequence[int]) -> dict[int, KVContents]:
    cache = beam.new_cache()
    with torch.no_grad():
        for part in torch.tensor(ids, device=beam.device).split(KV_CHUNK):
            beam.extend(cache, part, [len(part)])
    contents = {}
    for layer in layers:
        positions, k, v = cache.contents(layer)
        contents[layer] = KVContents(positions=positions.cpu(), k=_float(k), v=_float(v))
    return contents


def one_prompt(beam: Beam, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str | Sequence):
        raise InspectionError(f"the prompt must be text or a list of token ids, not {prompt!r}")
    if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], str | Sequence):
        raise InspectionError(f"one prompt is inspected at a time, not a list of {len(prompt)}")
    try:
        # As a list of one, so that an empty prompt is not taken for an empty list of prompts.
        return prompt_ids(beam, cast(Several, [prompt]), room=0)[0]
    except PromptError as error:
        raise InspectionError(str(error)) from None


def _held(config: BeamConfig, layer: int, length: int) -> int:
    """Tokens whose keys a layer still sees at the end of ``length`` tokens."""
    return length if config.is_full(layer) else min(length, config.sliding_window)


def check_bytes(parts: dict[str, int], length: int, most: int) -> None:
    total = sum(parts.values())
    if total <= most:
        return
    largest = max(parts, key=lambda name: parts[name])
    advice = {
        "hidden states": "name fewer layers (layers=[3]) or use hidden=False",
        "attention maps": "name fewer layers (attention=[3])",
        "KV contents": "name fewer layers (layers=[3])",
        "logits": "shorten the prompt",
        "the mask": "shorten the prompt",
    }[largest]
    raise InspectionError(
        f"inspecting {length} tokens would take {total / 2**30:.3g} GiB, {largest} alone "
        f"{parts[largest] / 2**30:.3g}, above the bound of {most / 2**30:.3g}; {advice}, "
        "or raise max_bytes"
    )


def token_label(beam: Beam, token_id: int) -> str:
    tokenizer = beam.tokenizer
    if tokenizer is None or token_id >= tokenizer.vocab_size:  # the table may be padded
        return f"#{token_id}"
    return tokenizer.token_text(token_id)
