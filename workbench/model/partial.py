"""Some layers of a model by themselves: a model to study layers of a checkpoint of any size with.

Embedding, the chosen layers in their order, final norm and head. Inside, its layers are numbered
from 0 (the places that caches, captures and kernel selections use); its configuration says which
layer of the whole each of them is. That number decides its tensors' names and its depth-scaled
residual adds; its kinds of attention and MLP come along. Text that
such a model writes means nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from workbench.errors import CheckpointError, ConfigError
from workbench.model.asked import shown
from workbench.model.config import AttentionType, BeamConfig, MlpType
from workbench.model.display import ranges

if TYPE_CHECKING:  # configurations are read where there is no torch
    from torch import Tensor

    from workbench.model.beam import Beam, Layer

_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLayer:
    """A layer of a partial model: its place in it, and what it is in the whole one."""

    place: int
    layer: int
    attention: AttentionType
    mlp: MlpType


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialConfig(BeamConfig):
    """The configuration of some layers; ``num_hidden_layers`` counts these.

    Attributes:
        layer_indices: which layer of the whole each one is, ascending.
        of_layers: how many layers the whole has.
    """

    layer_indices: tuple[int, ...]
    of_layers: int

    def __post_init__(self) -> None:
        BeamConfig.__post_init__(self)  # super() does not know a class with slots
        numbers = self.layer_indices
        if len(numbers) != self.num_hidden_layers or list(numbers) != sorted(set(numbers)):
            raise ConfigError(
                f"layer_indices {list(numbers)} must be {self.num_hidden_layers} different numbers "
                "in ascending order, one for each layer"
            )
        if numbers[0] < 0 or numbers[-1] >= self.of_layers:
            raise ConfigError(
                f"layer_indices {list(numbers)} must lie in 0…{self.of_layers - 1}, the layers of "
                "the whole model"
            )

    def original(self, layer: int) -> int:
        """Which layer of the whole model the layer at place ``layer`` is."""
        return self.layer_indices[layer]

    def place(self, layer: int) -> int:
        """Where layer ``layer`` of the whole model is in this one.

        Raises:
            CheckpointError: it is not among the chosen ones.
        """
        if layer not in self.layer_indices:
            raise CheckpointError(
                f"layer {shown(layer)} is not here: these are {self.words}; load it with layers=[…]"
            )
        return self.layer_indices.index(layer)

    @property
    def words(self) -> str:
        """``layers 0, 3 and 51``; runs as ``0…2``."""
        return layer_words(self.layer_indices)

    @property
    def table(self) -> tuple[ChosenLayer, ...]:
        """A row for each layer."""
        return tuple(
            ChosenLayer(
                place=place,
                layer=layer,
                attention=self.layer_types[place],
                mlp=self.mlp_layer_types[place],
            )
            for place, layer in enumerate(self.layer_indices)
        )

    def wants(self, tensor: str) -> bool:
        """Whether a checkpoint's tensor is of a chosen layer, or of no layer at all."""
        found = _LAYER.match(tensor)
        return found is None or int(found[1]) in self.layer_indices


def layer_words(layers: Iterable[int]) -> str:
    """``[0, 3, 51]`` -> ``layers 0, 3 and 51``."""
    text = ranges(layers)
    if text.isdecimal():
        return f"layer {text}"
    *first, last = text.split(", ")
    return f"layers {', '.join(first)} and {last}" if first else f"layers {last}"


def take_layers(config: BeamConfig, layers: Iterable[int]) -> PartialConfig:
    """The configuration of ``layers`` of a model, in ascending order.

    Raises:
        CheckpointError: no layers, one twice, or one that the model does not have.
    """
    numbers = _checked(layers, config.num_hidden_layers)
    values: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(BeamConfig)}
    values |= {
        "num_hidden_layers": len(numbers),
        "layer_types": tuple(config.layer_types[i] for i in numbers),
        "mlp_layer_types": tuple(config.mlp_layer_types[i] for i in numbers),
    }
    return PartialConfig(**values, layer_indices=numbers, of_layers=config.num_hidden_layers)


def _checked(layers: object, count: int) -> tuple[int, ...]:
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        raise CheckpointError(f"layers takes a list, such as [0, 3], not {shown(layers)}")
    numbers: list[int] = []
    for layer in layers:
        try:  # numpy's and torch's whole numbers are welcome, True and 1.0 are not
            number = None if isinstance(layer, bool) else operator.index(layer)
        except TypeError:
            number = None
        if number is None:
            raise CheckpointError(f"layers takes whole numbers, not {shown(layer)}")
        if not 0 <= number < count:
            raise CheckpointError(
                f"there is no layer {shown(number)} to load; the model has layers 0 to {count - 1}"
            )
        if number in numbers:
            raise CheckpointError(f"layer {number} is named twice in layers; name it once")
        numbers.append(number)
    if not numbers:
        raise CheckpointError("layers is empty; name at least one layer, such as [0]")
    return tuple(sorted(numbers))


# -- a layer by itself --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGap:
    """How far a layer's output stream is from another's, given the same input.

    ``most``: the largest absolute difference of an element. ``relative``: root mean square of the
    differences over that of the other stream. Both are 0 for the same bits.
    """

    layer: int
    most: float
    relative: float


def run_layer(beam: Beam, layer: int, stream: Tensor) -> Tensor:
    """The residual stream after a layer, given the stream before it.

    Args:
        beam: a whole model, or a part of one that has the layer.
        layer: its number in the whole model.
        stream: before the layer (after the one below it, or the embedding), ``[T, H]`` or
            ``[B, T, H]``: whole sequences from position 0. Cast to the model's dtype and device.

    Returns:
        The stream after the layer, of the same shape, in the model's dtype: the bits that the
        whole model computes with the same kernels, when ``stream`` is its own.

    Raises:
        CheckpointError: the model does not have the layer, or the stream another shape.
        ConfigError: a tensor-parallel rank that was not connected to the others.
    """
    import torch

    from workbench.model.context import SequenceContext

    config = beam.config
    module = _layer(beam, layer)
    if beam.shard.world > 1 and beam.communicator is None:
        raise ConfigError(
            f"this is rank {beam.shard.rank} of {beam.shard.world} alone, whose sums are partial; "
            "load the whole model"
        )
    if (
        not isinstance(stream, torch.Tensor)
        or stream.dim() not in (2, 3)
        or stream.shape[-1] != config.hidden_size
        or not 0 < stream.shape[-2] <= config.max_position_embeddings
        or stream.numel() == 0
    ):
        got = list(stream.shape) if isinstance(stream, torch.Tensor) else shown(stream)
        raise CheckpointError(
            f"the stream before a layer must be [T, {config.hidden_size}] or "
            f"[B, T, {config.hidden_size}] with 1 to {config.max_position_embeddings} tokens, "
            f"not {got}"
        )
    batch = stream.shape[0] if stream.dim() == 3 else 1
    with torch.no_grad():
        kernels = beam.kernels()
        context = SequenceContext(config, batch, stream.shape[-2], beam.device)
        context.kernels = kernels.layers
        h = stream.to(device=beam.device, dtype=beam.dtype).reshape(-1, config.hidden_size)
        x = kernels.model.rms_norm(h, module.input_norm, config.rms_norm_eps)
        after, _ = module(h, x, beam.norm, context)  # the norm that follows is not looked at
        return after.view(stream.shape)


def compare_layer(beam: Beam, layer: int, before: Tensor, after: Tensor) -> LayerGap:
    """A layer's output for the stream ``before`` it, against a stream ``after`` it from elsewhere.

    ``after`` is what another model or engine made of the same input, of the same shape.

    Raises:
        CheckpointError: see :func:`run_layer`; or ``after`` has another shape.
    """
    ours = run_layer(beam, layer, before)
    if after.shape != ours.shape:
        raise CheckpointError(
            f"the stream after layer {layer} has shape {list(after.shape)}, the one before it "
            f"{list(ours.shape)}; give both for the same tokens"
        )
    theirs = after.detach().to(device=ours.device).double()
    gap = ours.double() - theirs
    scale = theirs.square().mean().sqrt().item()
    rms = gap.square().mean().sqrt().item()
    relative = 0.0 if rms == 0 else rms / scale if scale else float("inf")
    return LayerGap(layer=layer, most=gap.abs().max().item(), relative=relative)


def _layer(beam: Beam, layer: int) -> Layer:
    from workbench.model.beam import Layer

    config = beam.config
    numbers = [config.original(place) for place in range(config.num_hidden_layers)]
    if isinstance(layer, bool) or layer not in numbers:
        here = layer_words(numbers)
        raise CheckpointError(f"layer {shown(layer)} is not in {beam.name}, which has {here}")
    module = beam.layers[numbers.index(layer)]
    assert isinstance(module, Layer)  # for the type checker: ModuleList forgets
    return module
