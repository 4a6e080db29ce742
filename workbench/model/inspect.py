"""What happens inside Beam for a prompt: captured values, logit lens, router load, layer table.

:func:`capture` runs one prompt through the whole model, with torch module hooks that are gone when
it returns; the forward pass computes what it always does, bit for bit, and the hooks look on.
Captured floats are float32 on the CPU whatever the model's dtype and device. Places of the residual
stream are numbered 0 … L: 0 is the embedding, ``l + 1`` is the stream after layer l. Changing what
the model computes is :func:`intervene`, in ``intervene.py``; captures inside its block see it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, cast, get_args

import torch
from torch import Tensor, nn

from workbench.errors import InspectionError, PromptError
from workbench.kernels import ops
from workbench.model.beam import Beam, Layer, SparseMLP
from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext
from workbench.model.intervene import check_index, check_layers, intervene, layer_of
from workbench.model.prompts import Several, prompt_ids
from workbench.model.tensors import tensor_specs

if TYPE_CHECKING:
    import pandas

__all__ = [
    "Capture", "KVContents", "LayerRow", "LogitLens", "RouterLoad", "attention_probabilities",
    "capture", "intervene", "layer_table", "logit_lens", "router_load",
]  # fmt: skip

MAX_BYTES = 2 << 30  # default bound on what one capture may hold in memory
KV_CHUNK = 512  # tokens a prefill pass when KV contents are captured

FrameKind = Literal["tokens", "hidden", "attention", "router", "kv", "logits"]


class _Shown:
    """Notebook display of a value: its short text (views add figures)."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": repr(self)}


class KVContents(NamedTuple):
    """What one layer's KV cache holds of a prompt and can still see: S positions, G KV heads.

    ``positions`` int64 ``[S]``; ``k`` (after QK norm and RoPE) and ``v`` float32 ``[S, G, D]``.
    """

    positions: Tensor
    k: Tensor
    v: Tensor

    def __repr__(self) -> str:
        return f"KVContents(positions {_ranges(self.positions.tolist())}, {_shape(self.k)})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Capture(_Shown):
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
            parts += [f"{word} {_ranges(numbers)}"] if numbers else []
        return f"Capture({self.model}: {', '.join(parts)}, logits {_shape(self.logits)})"

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
        return _frame(self, kind)

    def to_parquet(self, folder: str | Path) -> Path:
        """Write ``<kind>.parquet`` for every kind held, and ``capture.json``, to a new folder.

        The folder appears when all of it is written, or not at all. Returns its path.

        Raises:
            InspectionError: the folder exists and is not empty, it cannot be written, or pandas or
                pyarrow is not installed.
        """
        target = Path(folder)
        for package in ("pandas", "pyarrow"):
            _needs(package)
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
    ids, config = _ids(beam, prompt), beam.config
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
    _check_bytes(
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
        tokens=tuple(_text(beam, i) for i in ids),
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

    def core(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As in :class:`SequenceContext`."""
        if layer in self.layers:
            visible = self.window_mask
            if self.config.is_full(layer):
                visible = torch.ones_like(visible).tril()
            self.maps[layer] = attention_probabilities(q[0], k[0], visible).cpu()
        return super().core(layer, q, k, v)


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


def _ids(beam: Beam, prompt: str | Sequence[int]) -> list[int]:
    if not isinstance(prompt, str | Sequence):
        raise InspectionError(f"the prompt must be text or a list of token ids, not {prompt!r}")
    if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], str | Sequence):
        raise InspectionError(f"one prompt is inspected at a time, not a list of {len(prompt)}")
    try:
        # As a list of one, so that an empty prompt is not taken for an empty list of prompts.
        return prompt_ids(beam, cast(Several, [prompt]))[0]
    except PromptError as error:
        raise InspectionError(str(error)) from None


def _held(config: BeamConfig, layer: int, length: int) -> int:
    """Tokens whose keys a layer still sees at the end of ``length`` tokens."""
    return length if config.is_full(layer) else min(length, config.sliding_window)


def _check_bytes(parts: dict[str, int], length: int, most: int) -> None:
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


def _text(beam: Beam, token_id: int) -> str:
    tokenizer = beam.tokenizer
    if tokenizer is None or token_id >= tokenizer.vocab_size:  # the table may be padded
        return f"#{token_id}"
    return tokenizer.token_text(token_id)


# -- logit lens ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LogitLens(_Shown):
    """What the model would predict if it stopped at each place of the residual stream.

    The stream at each of the ``L + 1`` places goes through final norm, head and softcap. Natural
    logarithms; T tokens, k best.

    Attributes:
        model, token_ids, tokens: as in :class:`Capture`.
        layers: the layer before each place: -1 for the embedding, then 0 … L - 1.
        top_ids, top_probs: most likely next tokens, int64 and float32 ``[L + 1, T, k]``.
        entropy: of the next-token distribution, nats, float32 ``[L + 1, T]``.
        kl: KL(final ‖ here), nats ``[L + 1, T]``: what using this distribution in place of the
            model's own costs; 0 in the last row.
        target_rank: rank of the token that comes next in the prompt, int64 ``[L + 1, T]``; 1 is the
            most likely, 0 at the last position, where none comes next.
        target_prob: its probability, float32 ``[L + 1, T]``; NaN at the last position.
        texts: the text of every id in ``top_ids``.
    """

    model: str
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    top_ids: Tensor
    top_probs: Tensor
    entropy: Tensor
    kl: Tensor
    target_rank: Tensor
    target_prob: Tensor
    texts: Mapping[int, str]

    def __repr__(self) -> str:
        places, tokens, top = self.top_ids.shape
        return f"LogitLens({self.model}: {places} places × {tokens} tokens, {top} best)"


def logit_lens(
    beam: Beam, prompt: str | Sequence[int], *, top_k: int = 5, max_bytes: int = MAX_BYTES
) -> LogitLens:
    """Read the residual stream at every place through the model's own head.

    Raises:
        InspectionError: as :func:`capture`, or ``top_k`` is not in 1 … V.
    """
    vocabulary = beam.config.vocab_size
    if check_index(top_k, vocabulary + 1, "top_k") == 0:
        raise InspectionError(f"top_k is 0; ask for 1 … {vocabulary} tokens")
    length = len(_ids(beam, prompt))
    _check_bytes({"logits": 16 * length * vocabulary}, length, max_bytes)  # four of them at a time
    seen = capture(beam, prompt, router=False, max_bytes=max_bytes)
    assert seen.hidden is not None
    target = torch.tensor(seen.token_ids[1:])[:, None]
    columns: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        final = _log_probs(beam, seen.hidden[-1])
        for stream in seen.hidden:
            logp = _log_probs(beam, stream)
            p = logp.exp()
            ahead = logp[:-1].gather(1, target)  # log-probability of the next token
            rank = 1 + (logp[:-1] > ahead).sum(1)
            top = logp.topk(top_k, -1)
            row = {
                "top_ids": top.indices,
                "top_probs": top.values.exp(),
                "entropy": -(p * logp).sum(-1),
                "kl": (final.exp() * (final - logp)).sum(-1),
                "target_rank": torch.cat((rank, rank.new_zeros(1))),
                "target_prob": torch.cat((ahead[:, 0].exp(), torch.tensor([nan]))),
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    tensors = {name: torch.stack(values) for name, values in columns.items()}
    return LogitLens(
        model=seen.model,
        token_ids=seen.token_ids,
        tokens=seen.tokens,
        layers=tuple(range(-1, beam.config.num_hidden_layers)),
        texts={i: _text(beam, i) for i in tensors["top_ids"].unique().tolist()},
        **tensors,
    )


def _log_probs(beam: Beam, stream: Tensor) -> Tensor:
    """``[T, H]`` on the CPU -> next-token log-probabilities, float32 ``[T, V]`` on the CPU."""
    x = ops.rms_norm(stream.to(beam.device, beam.dtype), beam.norm, beam.config.rms_norm_eps)
    return beam.logits(x).log_softmax(-1).cpu()


# -- router load --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RouterLoad(_Shown):
    """How often each expert was chosen; rows are the captured sparse layers in order.

    ``counts`` int64 ``[layers, experts]``; ``layers`` names the rows; ``tokens`` is T.
    """

    layers: tuple[int, ...]
    tokens: int
    counts: Tensor

    @property
    def share(self) -> Tensor:
        """Each expert's part of its layer's choices, float64 ``[layers, experts]``."""
        return self.counts.double() / self.counts.sum(-1, keepdim=True)

    @property
    def imbalance(self) -> Tensor:
        """Busiest expert's load over the mean load, float64 ``[layers]``; 1 is perfectly even."""
        return self.share.amax(-1) * self.counts.shape[-1]

    def __repr__(self) -> str:
        experts = self.counts.shape[-1]
        return f"RouterLoad(layers {_ranges(self.layers)}, {experts} experts, {self.tokens} tokens)"


def router_load(captured: Capture) -> RouterLoad:
    """Count the experts chosen in a capture.

    Raises:
        InspectionError: the capture holds no router choices.
    """
    if not captured.router_ids:
        raise InspectionError(
            "the capture holds no router choices; call capture(..., router=True) and, if layers "
            "are named, name a sparse one"
        )
    layers = tuple(sorted(captured.router_ids))
    experts = captured.config.num_experts
    counts = [captured.router_ids[i].flatten().bincount(minlength=experts) for i in layers]
    return RouterLoad(layers=layers, tokens=len(captured.tokens), counts=torch.stack(counts))


# -- layer table --------------------------------------------------------------------------------


class LayerRow(TypedDict):
    """One layer in plain values; ``window`` in tokens, None for full attention."""

    index: int
    attention: str
    window: int | None
    position_encoding: str
    mlp: str
    experts: int
    experts_per_token: int
    parameters: int


def layer_table(config: BeamConfig) -> list[LayerRow]:
    """What each layer is, one plain row a layer; ``experts`` is 0 in dense layers."""
    parameters = [0] * config.num_hidden_layers
    for spec in tensor_specs(config):
        if spec.layer is not None:
            parameters[spec.layer] += spec.size
    return [
        LayerRow(
            index=i,
            attention=config.layer_types[i],
            window=None if config.is_full(i) else config.sliding_window,
            position_encoding="none + SSMax" if config.is_full(i) else "RoPE",
            mlp=config.mlp_layer_types[i],
            experts=config.num_experts if config.is_sparse(i) else 0,
            experts_per_token=config.num_experts_per_tok if config.is_sparse(i) else 0,
            parameters=parameters[i],
        )
        for i in range(config.num_hidden_layers)
    ]


# -- export -------------------------------------------------------------------------------------


def _needs(package: str) -> Any:
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError:
        raise InspectionError(
            f"{package} is not installed, and exporting needs it; install beam-workbench[lab]"
        ) from None


def _frame(c: Capture, kind: FrameKind) -> pandas.DataFrame:
    pandas = _needs("pandas")
    if kind == "tokens":
        logp = c.logits[:-1].log_softmax(-1).gather(1, torch.tensor(c.token_ids[1:])[:, None])
        return pandas.DataFrame(
            {
                "position": range(len(c.tokens)),
                "token_id": c.token_ids,
                "token": c.tokens,
                "logprob": torch.cat((torch.tensor([nan]), logp[:, 0])).numpy(),
                "top_id": c.logits.argmax(-1).numpy(),
            }
        )
    if kind == "hidden":
        assert c.hidden is not None
        return _long(("hidden", "position", "dimension"), {"value": c.hidden}, c.hidden_index)
    if kind == "logits":
        return _long(("position", "token_id"), {"logit": c.logits})
    frames = []
    for layer in {"attention": c.attention, "router": c.router_ids, "kv": c.kv}[kind]:
        if kind == "attention":
            frame = _visible_pairs(c, layer)
        elif kind == "router":
            ids, weights = c.router_ids[layer], c.router_weights[layer]
            frame = _long(("position", "choice"), {"expert": ids, "weight": weights})
        else:
            held = c.kv[layer]
            first = held.positions.tolist()
            frame = _long(
                ("position", "head", "dimension"), {"key": held.k, "value": held.v}, first
            )
        frame.insert(0, "layer", layer)
        frames.append(frame)
    return pandas.concat(frames, ignore_index=True)


def _visible_pairs(c: Capture, layer: int) -> pandas.DataFrame:
    """Attention of one layer, only the (query, key) pairs its mask lets through."""
    position = torch.arange(len(c.tokens))
    distance = position[:, None] - position
    reach = len(c.tokens) if c.config.is_full(layer) else c.config.sliding_window
    query, key = ((distance >= 0) & (distance < reach)).nonzero(as_tuple=True)
    probabilities = c.attention[layer][:, query, key]  # [A, pairs]
    frame = _long(("head", "pair"), {"probability": probabilities})
    pair = frame.pop("pair")
    frame.insert(1, "query", query.numpy()[pair])
    frame.insert(2, "key", key.numpy()[pair])
    return frame


def _long(
    axes: tuple[str, ...], values: dict[str, Tensor], first: Sequence[int] | None = None
) -> pandas.DataFrame:
    """Tensors of one shape -> a row an element; ``first`` labels the first axis (default 0 …)."""
    shape = next(iter(values.values())).shape
    columns: dict[str, Any] = {}
    for number, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        labels = torch.arange(size) if number or first is None else torch.tensor(first)
        view = [1] * len(shape)
        view[number] = size
        columns[axis] = labels.view(view).expand(shape).flatten().numpy()
    columns.update({name: value.flatten().numpy() for name, value in values.items()})
    return _needs("pandas").DataFrame(columns)


def _shape(x: Tensor) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"


def _ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0…2, 5"``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}…{b}" for a, b in runs)
