"""Inside a vLLM worker while layers are compared: hooks that keep the streams of one pass.

``EngineWorker.workbench_parity`` hands every call on to :func:`parity_step`; arguments and answers
are numbers, texts, bytes, and lists and dicts of these, so that they pass any executor. In this
order: ``about`` (limits and settings), ``watch`` (hooks are registered), a prompt of the caller's,
``seen`` (which passes there were, and a digest of what was kept), ``take`` (tensors of one layer of
one rank as bytes), ``stop`` (everything is as it was). Nothing is raised into the engine: an answer
has its reason under ``error``.

Kept is the first pass of exactly the tokens that were announced, positions from 0. Each engine's
decoder layer is described by one :class:`Boundary`; a layer that none describes is not guessed at.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.serving.layers.engine_reader import Reader, Row, plain

SCHEMA = "workbench-layer-parity-worker/1"
METHOD = "workbench_parity"
HEAD = -1  # in place of a layer: final norm and logits

_STATE = "_workbench_parity_state"
_MOST_PASSES = 64  # that are counted


@dataclass(frozen=True, slots=True)
class Boundary:
    """How one engine's decoder layer takes and gives the residual stream.

    ``arguments`` are those of its ``forward``, which is compared with it; ``before`` names the
    residual stream among them. The layer answers with (stream after it, that stream through the
    norm that follows): the first is what is compared, so a fused next norm is not part of it.
    ``logits`` says whose hook sees router logits: the router's module ("gate"), or the experts'
    keyword of that name ("experts").
    """

    layer: str
    arguments: tuple[str, ...]
    before: str
    logits: str


BOUNDARIES = (
    # vLLM 0.33.0, models/beam/nvidia/model.py. Its all-reduce is done when the layer returns, in
    # the fused boundary or before it.
    Boundary(
        "BeamDecoderLayer",
        ("positions", "hidden_states", "normalized_states", "next_norm_weight"),
        "hidden_states",
        "gate",
    ),
    # workbench/serving/vllm_plugin/model.py, which vLLM's CPU build runs
    Boundary("BeamLayer", ("positions", "h", "x", "next_norm", "rope"), "h", "experts"),
)


class NotUnderstoodError(Exception):
    """Something of the engine's that this module does not know; the message is for the user."""


class Watch:
    """Hooks on some layers of one worker's model, and what they kept.

    ``kept[layer]`` holds tensors on the CPU: "before" and "after" ``[tokens, hidden]``, "mlp"
    ``[tokens, hidden]`` (what goes into the MLP), of sparse layers "ids" int32 ``[tokens, K]``
    and "logits" float32 ``[tokens, experts]`` where they could be seen; ``kept[HEAD]`` "logits"
    ``[rows, vocabulary]`` before the softcap.
    """

    def __init__(self, model: Any, layers: Sequence[int], tokens: int, head: bool) -> None:
        self.tokens = tokens
        self.kept: dict[int, dict[str, Any]] = {}
        self.passes: list[int] = []  # tokens of every pass seen, at the first layer watched
        self.errors: list[str] = []
        self._undo: list[Callable[[], None]] = []
        self._open: set[int] = set()  # layers whose pass is being kept right now
        known = layers_of(model)
        found = {i: boundary_of(known[i]) for i in layers if i < len(known)}
        boundaries = {i: one for i, one in found.items() if one is not None}
        self.here = list(boundaries)
        try:
            for layer, boundary in boundaries.items():
                self._hook(known[layer], layer, boundary)
            if head:
                self._hook_head(model)
        except Exception:  # the caller has no watch to close
            self.close()
            raise

    def close(self) -> None:
        """Take every hook away."""
        while self._undo:
            self._undo.pop()()

    # -- hooks ----------------------------------------------------------------------------------

    def _guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **named: Any) -> None:
            try:
                function(*args, **named)
            except Exception as error:  # the engine's pass goes on
                text = f"{type(error).__name__}: {error}"
                if text not in self.errors:
                    self.errors.append(text[:400])

        return call

    def _hook(self, module: Any, layer: int, boundary: Boundary) -> None:
        names = boundary.arguments

        def before(_: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            given = dict(zip(names, args, strict=False)) | dict(named)
            stream, positions = given[boundary.before], given["positions"]
            self._open.discard(layer)
            if layer == self.here[0] and len(self.passes) < _MOST_PASSES:
                self.passes.append(int(stream.shape[0]))
            if layer in self.kept or stream.shape[0] != self.tokens or stream.dim() != 2:
                return
            if positions.flatten().tolist() != list(range(self.tokens)):
                return  # another request's tokens, or not from its start
            self.kept[layer] = {"before": _copied(stream)}
            self._open.add(layer)

        def after(_: Any, args: Any, named: Any, output: Any) -> None:
            if layer in self._open:
                self._open.discard(layer)
                self.kept[layer]["after"] = _copied(output[0])

        self._add(module.register_forward_pre_hook(self._guarded(before), with_kwargs=True))
        self._add(module.register_forward_hook(self._guarded(after), with_kwargs=True))

        def into_mlp(_: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            if layer in self._open:
                self.kept[layer]["mlp"] = _copied(_first(args, named))

        self._add(module.mlp.register_forward_pre_hook(self._guarded(into_mlp), with_kwargs=True))
        experts = getattr(module.mlp, "experts", None)
        if experts is not None:
            self._hook_router(module.mlp, experts, layer, boundary)

    def _hook_router(self, mlp: Any, experts: Any, layer: int, boundary: Boundary) -> None:
        def keep(name: str, tensor: Any) -> None:
            if layer in self._open and tensor.dim() == 2 and tensor.shape[0] == self.tokens:
                self.kept[layer][name] = _copied(tensor)

        # vLLM's own way to see which experts were chosen (layers/fused_moe/router/base_router.py);
        # kernels that choose for themselves never call it.
        router: Any = getattr(experts, "router", None)
        if hasattr(router, "set_capture_fn") and hasattr(router, "capture_fn"):
            earlier = router.capture_fn

            def chosen(ids: Any) -> None:
                self._guarded(keep)("ids", ids)
                if earlier is not None:
                    earlier(ids)

            router.set_capture_fn(chosen)
            self._undo.append(lambda: router.set_capture_fn(earlier))
        if boundary.logits == "gate" and hasattr(mlp.gate, "register_forward_hook"):

            def gate(_: Any, args: Any, output: Any) -> None:
                keep("logits", output[0] if isinstance(output, tuple) else output)

            self._add(mlp.gate.register_forward_hook(self._guarded(gate)))
        elif boundary.logits == "experts":

            def logits(_: Any, args: Any, named: Mapping[str, Any]) -> None:
                keep("logits", named["router_logits"])

            self._add(experts.register_forward_pre_hook(self._guarded(logits), with_kwargs=True))

    def _hook_head(self, model: Any) -> None:
        processor = getattr(model, "logits_processor", None)
        if processor is None:
            return

        def logits(_: Any, args: Any, output: Any) -> None:
            # Whatever comes first once all layers were kept belongs to the prompt's last token.
            done = all("after" in self.kept.get(layer, {}) for layer in self.here)
            if done and self.here and HEAD not in self.kept and output is not None:
                self.kept[HEAD] = {"logits": _copied(output)}

        self._add(processor.register_forward_hook(self._guarded(logits)))

    def _add(self, handle: Any) -> None:
        self._undo.append(handle.remove)


def layers_of(model: Any) -> Sequence[Any]:
    """The model's decoder layers.

    Raises:
        NotUnderstoodError: they are not where both known engines keep them.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise NotUnderstoodError(f"{type(model).__name__} has no model.layers")
    found: Sequence[Any] = list(layers)
    return found


def boundary_of(layer: Any) -> Boundary | None:
    """How a layer carries its streams; None where the layer is on another pipeline rank.

    Raises:
        NotUnderstoodError: it is no layer of a known engine.
    """
    name = type(layer).__name__
    if name == "PPMissingLayer":
        return None
    arguments = tuple(inspect.signature(type(layer).forward).parameters)[1:]
    for boundary in BOUNDARIES:
        if boundary.layer == name and boundary.arguments == arguments:
            if not hasattr(layer, "mlp"):
                break
            return boundary
    raise NotUnderstoodError(
        f"the engine's layers are {name}({', '.join(arguments)}), whose residual stream this "
        f"release does not know ({' and '.join(each.layer for each in BOUNDARIES)} it does)"
    )


# -- the steps ----------------------------------------------------------------------------------


def parity_step(worker: Any, action: str, *given: Any) -> Row:
    """Do one step in this worker; see the module's docstring. ``error`` is None or a sentence."""
    row: Row = {"schema": SCHEMA, "rank": plain(getattr(worker, "rank", None)), "error": None}
    try:
        row |= _STEPS[action](worker, *given)
    except NotUnderstoodError as error:
        row["error"] = str(error)
    except Exception as error:
        row["error"] = f"{action} failed in the worker ({type(error).__name__}: {error})"[:600]
    return row


def _about(worker: Any) -> Row:
    """Limits of a prompt, and what else decides whether hooks see a pass at all."""
    reader = Reader()
    config = reader.need(worker, "vllm_config")
    layers = layers_of(_model(worker))
    known = [boundary_of(layer) for layer in layers]
    runner = type(reader.need(worker, "model_runner"))
    platforms = sys.modules.get("vllm.platforms")
    return {
        "layers": len(layers),
        "layer_class": next((each.layer for each in known if each is not None), None),
        "here": [i for i, each in enumerate(known) if each is not None],
        "eager": plain(reader.need(config, "model_config.enforce_eager")),
        "max_model_len": plain(reader.need(config, "model_config.max_model_len")),
        "max_tokens": plain(reader.need(config, "scheduler_config.max_num_batched_tokens")),
        "dtype": plain(reader.need(config, "model_config.dtype")),
        "quantization": plain(reader.maybe(config, "model_config.quantization")) or "none",
        "kv_cache_dtype": plain(reader.need(config, "cache_config.cache_dtype")),
        "attention_backend": _backend(reader, layers, known),
        "tp": plain(reader.need(config, "parallel_config.tensor_parallel_size")),
        "pp": plain(reader.need(config, "parallel_config.pipeline_parallel_size")),
        "version": plain(getattr(sys.modules.get("vllm"), "__version__", None)),
        "runner": f"{runner.__module__}.{runner.__qualname__}",
        "device": plain(reader.maybe(worker, "device")),
        "device_name": plain(
            reader.first(lambda: platforms.current_platform.get_device_name())  # type: ignore[union-attr]
        ),
    }


def _backend(reader: Reader, layers: Sequence[Any], known: Sequence[Boundary | None]) -> Any:
    first = next((layer for layer, each in zip(layers, known, strict=True) if each), None)
    backend = reader.maybe(first, "self_attn.attn.attn_backend")
    return plain(reader.first(lambda: backend.get_name()))


def _watch(worker: Any, layers: Sequence[int], tokens: int, head: bool) -> Row:
    _stop(worker)
    watch = Watch(_model(worker), list(layers), tokens, head)
    setattr(worker, _STATE, watch)
    return {"here": watch.here}


def _seen(worker: Any) -> Row:
    watch = _state(worker)
    return {
        "passes": watch.passes,
        "errors": watch.errors,
        "kept": {
            str(layer): {name: _digest(tensor) for name, tensor in held.items()}
            for layer, held in watch.kept.items()
        },
    }


def _take(worker: Any, layer: int, rank: int) -> Row:
    """The tensors of one layer, of the rank asked for; other ranks answer without them."""
    if getattr(worker, "rank", None) != rank:
        return {}
    held = _state(worker).kept.get(layer, {})
    return {"tensors": {name: packed(tensor) for name, tensor in held.items()}}


def _stop(worker: Any) -> Row:
    watch = getattr(worker, _STATE, None)
    if watch is not None:
        watch.close()
        delattr(worker, _STATE)
    return {}


_STEPS: dict[str, Callable[..., Row]] = {
    "about": _about, "watch": _watch, "seen": _seen, "take": _take, "stop": _stop,
}  # fmt: skip


def _state(worker: Any) -> Watch:
    watch = getattr(worker, _STATE, None)
    if watch is None:
        raise NotUnderstoodError("no layers are being watched in this worker")
    found: Watch = watch
    return found


def _model(worker: Any) -> Any:
    reader = Reader()
    model = reader.first(
        lambda: worker.get_model(), lambda: worker.model_runner.get_model(),
        lambda: worker.model_runner.model,
    )  # fmt: skip
    if model is None:
        raise NotUnderstoodError("the engine's model was not found in its worker")
    return model


# -- tensors ------------------------------------------------------------------------------------


def _first(args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(named.values()))


def _copied(tensor: Any) -> Any:
    """A copy on the CPU: the engine may write into its own again."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _bytes(tensor: Any) -> bytes:
    import torch

    data: bytes = tensor.view(torch.uint8).numpy().tobytes()
    return data


def packed(tensor: Any) -> Row:
    """A tensor as its shape, its dtype's name and its bytes."""
    return {
        "shape": [int(n) for n in tensor.shape],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "data": _bytes(tensor),
    }


def unpacked(row: Mapping[str, Any]) -> Any:
    """The tensor that :func:`packed` made bytes of, on the CPU."""
    import torch

    raw = torch.frombuffer(bytearray(row["data"]), dtype=torch.uint8)
    return raw.view(getattr(torch, row["dtype"])).reshape(row["shape"])


def _digest(tensor: Any) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()
