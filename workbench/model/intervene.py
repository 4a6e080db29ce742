"""Interventions: run Beam with a hidden state, a layer, an expert or a routing changed.

Everything is done by torch module hooks that exist only inside the ``with`` block, so a model
without an intervention has nothing of this module in its code path. Places of the residual stream
are numbered as in ``Capture.hidden``: 0 is the embedding, ``l + 1`` is the stream after layer l.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workbench.errors import InspectionError
from workbench.kernels import reference
from workbench.model.beam import Beam, Layer, Router, SparseMLP
from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext

Patch = Tensor | Sequence[float] | Callable[[Tensor], Tensor]
Routing = Tensor | Sequence[int] | Sequence[Sequence[int]]


def intervene(
    beam: Beam,
    *,
    patch_hidden: Mapping[tuple[int, int | None], Patch] | None = None,
    ablate_layers: Iterable[int] = (),
    ablate_experts: Iterable[tuple[int, int]] = (),
    force_routing: Mapping[int, Routing] | None = None,
) -> AbstractContextManager[Beam]:
    """Change what ``beam`` computes inside a ``with`` block; everything is undone on leaving it.

    It holds for every pass in the block: ``capture``, ``logit_lens``, ``sequence_logits``, and
    ``generate`` and ``stream`` over a KV cache. Positions are absolute, counted from 0, and mean
    that position of *every* sequence of a batch; there is no choosing among sequences.
    The model object itself is changed, so other threads that run it see the change too.

    Args:
        beam: the model; the block's ``as`` name is this same object.
        patch_hidden: ``{(stream, position): value}`` replaces the residual stream at place
            ``stream`` in ``0 … L`` (see the module). ``position`` None means all positions. The
            value is ``[H]``; or, with None, ``[T, H]`` for positions ``0 … T - 1``; or a function
            from the selected rows ``[n, H]`` (model dtype and device) to new rows ``[n, H]``.
            Applied in the order given, after any ablation of that layer.
        ablate_layers: layers that contribute nothing: the stream passes through unchanged. They
            still compute, so their attention and routing can be captured and their KV is cached.
        ablate_experts: ``(layer, expert)`` pairs that the router never chooses, as if the
            correction bias were minus infinity; the others' weights follow.
        force_routing: ``{layer: ids}`` with ids ``[K]`` for every token, or ``[T, K]`` for
            positions ``0 … T - 1`` (later ones route freely). The weights are the router's own
            scores of those experts, renormalised if the model does so.

    Raises:
        InspectionError: a layer, expert, width or routing that does not fit the model; during a
            pass without a cache, a position outside the sequence; on leaving the block, a named
            position that no pass reached.
    """
    changes = _Changes(beam)
    ablated = check_layers(ablate_layers, beam.config.num_hidden_layers, "ablate_layers")
    changes.add_stream(ablated, patch_hidden or {})
    changes.add_routing(ablate_experts, force_routing or {})
    return _applied(beam, changes)


@contextmanager
def _applied(beam: Beam, changes: _Changes) -> Iterator[Beam]:
    handles: list[RemovableHandle] = []
    try:
        for register in changes.registrations():
            handles.append(register())
        yield beam
    finally:
        for handle in handles:
            handle.remove()
    changes.check_reached()  # only when the block ended without an error


def check_index(value: object, size: int, what: str) -> int:
    """``value`` as an index below ``size``; InspectionError names ``what`` otherwise."""
    try:
        if isinstance(value, bool):
            raise TypeError
        index = operator.index(value)  # type: ignore[arg-type]  # whatever it is, TypeError says
    except TypeError:
        raise InspectionError(f"a {what} must be a whole number, not {value!r}") from None
    if not 0 <= index < size:
        raise InspectionError(
            f"{what} {index} does not exist; choose one of 0 … {size - 1} of this model"
        )
    return index


def check_layers(wanted: object, count: int, name: str) -> tuple[int, ...]:
    """Distinct layer indices in order; InspectionError when one is not below ``count``."""
    if not isinstance(wanted, Iterable):
        raise InspectionError(f"{name} takes a list, such as [3], not {wanted!r}")
    return tuple(sorted({check_index(layer, count, "layer") for layer in wanted}))


def layer_of(beam: Beam, index: int) -> Layer:
    """Layer ``index`` with its type (a ``ModuleList`` forgets it)."""
    layer = beam.layers[index]
    assert isinstance(layer, Layer)
    return layer


class _Span:
    """The positions ``start … start + length - 1`` that a change names, and which have been run."""

    def __init__(self, name: str, start: int, length: int) -> None:
        self.name, self.start, self.seen = name, start, [False] * length

    @property
    def stop(self) -> int:
        return self.start + len(self.seen)

    def select(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of a pass that lie in the span, and their offsets from its start; both ``[n]``."""
        rows = ((positions >= self.start) & (positions < self.stop)).nonzero()[:, 0]
        offsets = positions[rows] - self.start
        for offset in offsets.tolist():
            self.seen[offset] = True
        return rows, offsets


class _Pass:
    """The positions of the forward pass in progress, as a pre-hook of the whole model."""

    def __init__(self) -> None:
        self.spans: list[_Span] = []
        self.positions = torch.empty(0, dtype=torch.int64)
        self.furthest = -1

    def __call__(self, beam: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context = kwargs["context"] if "context" in kwargs else args[1]
        self.positions = context.positions
        self.furthest = max(self.furthest, int(self.positions.max()))
        if isinstance(context, SequenceContext):
            for span in self.spans:
                if span.stop > context.length:
                    raise InspectionError(
                        f"{span.name} names position {span.stop - 1}, outside the prompt of "
                        f"{context.length} tokens; use positions 0 … {context.length - 1}"
                    )

    def rows(self, span: _Span | None) -> tuple[Tensor, Tensor]:
        """``span.select`` of this pass; None selects every row, with offset 0."""
        if span is not None:
            return span.select(self.positions)
        every = torch.arange(len(self.positions), device=self.positions.device)
        return every, torch.zeros_like(every)


class _HiddenPatch:
    """One entry of ``patch_hidden``, checked."""

    def __init__(self, beam: Beam, name: str, position: int | None, value: Patch) -> None:
        self.name = name
        self.function: Callable[[Tensor], Tensor] | None = None
        self.value: Tensor | None = None  # [n, H]
        self.span = None if position is None else _Span(name, position, 1)
        if not isinstance(value, Tensor) and callable(value):
            self.function = value
            return
        try:
            tensor = torch.as_tensor(value).to(beam.device, beam.dtype).detach().clone()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InspectionError(f"{name} is neither numbers nor a function: {error}") from None
        width, shape = beam.config.hidden_size, list(tensor.shape)
        whole = tensor.dim() == 2 and position is None and shape[0] > 0
        if shape[-1:] != [width] or not (tensor.dim() == 1 or whole):
            wanted = f"[{width}]" + (f" or [T, {width}]" if position is None else "")
            raise InspectionError(f"{name} has shape {shape}; this model needs {wanted}")
        if tensor.dim() == 2:
            self.span = _Span(name, 0, shape[0])
        self.value = tensor.view(-1, width)

    def new_rows(self, old: Tensor, offsets: Tensor) -> Tensor:
        """What replaces the stream's rows ``old [n, H]``, a copy that the function may write to."""
        if self.function is None:
            assert self.value is not None
            return self.value[offsets]
        new = self.function(old)
        if not isinstance(new, Tensor) or new.shape != old.shape:
            got = list(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise InspectionError(
                f"the function of {self.name} returned {got} for rows of shape {list(old.shape)}; "
                "return a tensor of the same shape"
            )
        return new.to(old.device, old.dtype)


class _StreamChange:
    """Ablation of one layer and patches of the stream after it, as hooks of the layer."""

    def __init__(self, eps: float, current: _Pass) -> None:
        self.eps, self.current, self.ablate = eps, current, False
        self.patches: list[_HiddenPatch] = []
        self.passing: Tensor | None = None  # the stream that an ablated layer lets through

    def keep(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Pre-hook of an ablated layer. A copy: a fused kernel may add to the stream in place."""
        self.passing = args[0].clone()

    def after(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor]:
        """Forward hook: ``Layer.forward`` takes (h, x, next_norm, context), gives (h, x)."""
        h, x = output
        if self.passing is not None:
            h, self.passing = self.passing, None
            x = reference.rms_norm(h, args[2], self.eps)
        return self._patched(h, x, args[2])

    def before(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pre-hook of the first layer: patches of the embedding."""
        assert isinstance(layer, Layer)
        return (*self._patched(args[0], args[1], layer.input_norm), *args[2:])

    def _patched(self, h: Tensor, x: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        for patch in self.patches:
            rows, offsets = self.current.rows(patch.span)
            if len(rows):
                # Copies: the tensors may be a cache's, a caller's or another hook's.
                new = patch.new_rows(h[rows], offsets)
                h = h.index_copy(0, rows, new)
                x = x.index_copy(0, rows, reference.rms_norm(new, norm, self.eps))
        return h, x


class _RoutingChange:
    """Ablated experts and forced ids of one sparse layer, as a forward hook of its router."""

    def __init__(self, current: _Pass) -> None:
        self.current = current
        self.blocked: set[int] = set()
        self.forced: Tensor | None = None  # [n, K]
        self.span: _Span | None = None

    def __call__(self, router: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        assert isinstance(router, Router)
        c, (ids, weights) = router.config, output
        scores = reference.router_scores(args[0], router.weight)
        if self.blocked:
            blocked = torch.tensor(sorted(self.blocked), device=scores.device)
            bias = router.correction_bias.index_fill(0, blocked, float("-inf"))
            ids, weights = reference.route(
                scores, bias, c.num_experts_per_tok, c.n_group, c.topk_group, c.norm_topk_prob
            )
        if self.forced is not None:
            rows, offsets = self.current.rows(self.span)
            chosen = self.forced[offsets]
            share = scores[rows].gather(-1, chosen)
            if c.norm_topk_prob:
                share = share / share.sum(-1, keepdim=True)
            ids, weights = ids.index_copy(0, rows, chosen), weights.index_copy(0, rows, share)
        return ids, weights


class _Changes:
    """All changes of one intervention, checked, and the hooks that make them."""

    def __init__(self, beam: Beam) -> None:
        self.beam, self.current = beam, _Pass()
        self.streams: dict[int, _StreamChange] = {}
        self.routings: dict[int, _RoutingChange] = {}

    def add_stream(
        self, ablated: Iterable[int], patches: Mapping[tuple[int, int | None], Patch]
    ) -> None:
        for layer in ablated:
            self._stream(layer + 1).ablate = True
        for key, value in patches.items():
            if not isinstance(key, tuple) or len(key) != 2:
                raise InspectionError(
                    f"patch_hidden has the key {key!r}; give (stream, position), position None "
                    "for all"
                )
            stream, position = key
            name = f"patch_hidden[{stream}, {position}]"
            index = check_index(stream, self.beam.config.num_hidden_layers + 1, "hidden state")
            if position is not None:
                position = check_index(
                    position, self.beam.config.max_position_embeddings, "position"
                )
            patch = _HiddenPatch(self.beam, name, position, value)
            self._stream(index).patches.append(patch)
            self._note(patch.span)

    def add_routing(
        self, ablated: Iterable[tuple[int, int]], forced: Mapping[int, Routing]
    ) -> None:
        config = self.beam.config
        for pair in ablated:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise InspectionError(f"ablate_experts has {pair!r}; give (layer, expert) pairs")
            change = self._routing(check_index(pair[0], config.num_hidden_layers, "layer"))
            change.blocked.add(check_index(pair[1], config.num_experts, "expert"))
        for layer, change in self.routings.items():
            _check_enough_experts(config, layer, change.blocked)
        for key, ids in forced.items():
            layer = check_index(key, config.num_hidden_layers, "layer")
            change = self._routing(layer)
            change.forced = _checked_ids(config, layer, ids, change.blocked).to(self.beam.device)
            if change.forced.dim() == 2:
                change.span = _Span(f"force_routing[{layer}]", 0, len(change.forced))
            change.forced = change.forced.view(-1, config.num_experts_per_tok)
            self._note(change.span)

    def registrations(self) -> Iterator[Callable[[], RemovableHandle]]:
        """What registers each hook, in order. The pass comes first: the others read it."""
        beam, current = self.beam, self.current
        yield partial(beam.register_forward_pre_hook, current, with_kwargs=True)
        for index, stream in self.streams.items():
            if index == 0:
                yield partial(layer_of(beam, 0).register_forward_pre_hook, stream.before)
                continue
            layer = layer_of(beam, index - 1)
            if stream.ablate:
                yield partial(layer.register_forward_pre_hook, stream.keep)
            yield partial(layer.register_forward_hook, stream.after)
        for index, change in self.routings.items():
            mlp = layer_of(beam, index).mlp
            assert isinstance(mlp, SparseMLP)
            if any(isinstance(hook, _RoutingChange) for hook in mlp.router._forward_hooks.values()):
                raise InspectionError(
                    f"the routing of layer {index} is already changed by an outer intervention; "
                    "give both changes to one intervene()"
                )
            yield partial(mlp.router.register_forward_hook, change)

    def check_reached(self) -> None:
        """Raise InspectionError if passes ran and one of the named positions was in none."""
        for span in self.current.spans:
            if self.current.furthest >= 0 and not all(span.seen):
                raise InspectionError(
                    f"{span.name} never took effect at position "
                    f"{span.start + span.seen.index(False)}: no pass in the block ran it (the last "
                    f"position run is {self.current.furthest}); name a position that is run inside"
                )

    def _stream(self, index: int) -> _StreamChange:
        fresh = _StreamChange(self.beam.config.rms_norm_eps, self.current)
        return self.streams.setdefault(index, fresh)

    def _routing(self, layer: int) -> _RoutingChange:
        if not self.beam.config.is_sparse(layer):
            sparse = ", ".join(map(str, self.beam.config.sparse_layers)) or "none"
            raise InspectionError(
                f"layer {layer} has a dense MLP and no experts; sparse layers are: {sparse}"
            )
        return self.routings.setdefault(layer, _RoutingChange(self.current))

    def _note(self, span: _Span | None) -> None:
        if span is not None:
            self.current.spans.append(span)


def _check_enough_experts(config: BeamConfig, layer: int, blocked: set[int]) -> None:
    """Whatever the scores are, the router must find K experts that are not blocked."""
    groups, kept = config.n_group or 1, config.topk_group or 1
    size = config.num_experts // groups
    live = [sum(e not in blocked for e in range(g * size, (g + 1) * size)) for g in range(groups)]
    if kept < groups:
        # A group is ranked by its two best; with fewer its rank is minus infinity, and which of
        # such groups is kept is not defined. The rest may be kept in any combination.
        live = sorted(count for count in live if count >= 2)[:kept]
    enough = len(live) >= kept and sum(live) >= config.num_experts_per_tok
    if not enough:
        raise InspectionError(
            f"ablating {len(blocked)} of {config.num_experts} experts of layer {layer} leaves too "
            f"few to choose {config.num_experts_per_tok} from; ablate fewer"
        )


def _checked_ids(config: BeamConfig, layer: int, ids: Routing, blocked: set[int]) -> Tensor:
    """Forced expert ids as int64 ``[K]`` or ``[T, K]``."""
    name, top_k, experts = f"force_routing[{layer}]", config.num_experts_per_tok, config.num_experts
    try:
        tensor = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InspectionError(f"{name} is not a table of expert ids: {error}") from None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InspectionError(f"{name} has dtype {tensor.dtype}; give expert ids as whole numbers")
    shape = list(tensor.shape)
    if tensor.dim() not in (1, 2) or shape[-1] != top_k or shape[0] == 0:
        raise InspectionError(
            f"{name} has shape {shape}; this model needs [{top_k}] or [T, {top_k}]"
        )
    rows = tensor.to(torch.int64).cpu().view(-1, top_k).tolist()
    for row in rows:
        for expert in row:
            check_index(expert, experts, "expert")
            if expert in blocked:
                raise InspectionError(
                    f"{name} chooses expert {expert}, which ablate_experts rules out; drop one"
                )
        if len(set(row)) < top_k:
            raise InspectionError(f"{name} names an expert twice in {row}; ids must be distinct")
    return tensor.to(torch.int64).clone()
