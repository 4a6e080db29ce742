"""Random weights of one rank that holds whole experts and all of the attention.

The other layout of the full model: attention, dense MLPs, routers, embedding and head are on every
rank alike, and of the experts, at their whole width, each rank has its share: rank r the experts
``r E / N`` to ``(r + 1) E / N - 1``. Of eight ranks one takes 139 GB of the 501B model.

Fewer GPUs than ``parts`` hold that many of the ranks: a model with ``E N / parts`` experts, whose
ranks have the shapes they have of ``parts``. Everything is drawn where it lies, as in
:mod:`workbench.kernels.rank.weights`, and what ranks have alike is then sent from rank 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels.footprint import free_bytes
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.weights import in_step
from workbench.kernels.rank.weights import (
    CORRECTION_STD,
    DownLayout,
    LayerWeights,
    RankWeights,
    _layer,
    _Maker,
    rank_bytes,
    refuse_too_large,
)
from workbench.kernels.shapes import Shapes
from workbench.model.config import BeamConfig

# Seeds of the ranks' experts lie so far apart that no two ranks of two runs draw the same.
_APART = 1000


class EpWeights(RankWeights):
    """One rank of ``world``: whole attention, whole experts of its own.

    A :class:`~workbench.kernels.rank.weights.RankWeights` of one tensor-parallel rank of one whose
    sparse layers hold ``own`` experts, ``first`` on, in ``gate_up [own, 2 I, H]`` and ``down``;
    ``shapes.experts`` and the routers are of all experts.

    Attributes:
        rank, world: which of how many.
        first, own: the first of this rank's experts, and how many they are.
    """

    def __init__(self, *, rank: int, world: int, **made: Any) -> None:
        super().__init__(**made)
        refuse_world(self.shapes.experts, world)
        self.rank, self.world = rank, world
        self.own = self.shapes.experts // world
        self.first = rank * self.own

    def step_bytes(self, distinct_experts: float | None = None, batch: int = 1) -> float:
        """Not told: which experts a decode step reads depends on the other ranks' tokens.

        Raises:
            KernelError: always.
        """
        raise KernelError(
            "what a decode step reads of whole experts on several ranks depends on the other "
            "ranks' tokens; ask for the bytes of tensor-parallel weights"
        )

    def part(self, layers: int) -> EpWeights:
        """The first ``layers`` layers, in the same memory.

        Raises:
            KernelError: there are not so many.
        """
        if not 1 <= layers <= len(self.layers):
            raise KernelError(
                f"these weights have layers 1 to {len(self.layers)}, so {layers} of them cannot be "
                "taken; choose a number in between"
            )
        return EpWeights(
            rank=self.rank, world=self.world, config=self.config, shapes=self.shapes,
            layers=self.layers[:layers], embed=self.embed, norm=self.norm, lm_head=self.lm_head,
            down_layout=self.down_layout, seed=self.seed,
        )  # fmt: skip


def refuse_world(experts: int, world: int) -> None:
    """Refuse so many ranks for so many experts.

    Raises:
        KernelError: they do not divide the experts.
    """
    if world < 1 or experts % world:
        raise KernelError(
            f"{experts} experts cannot be shared out whole among {world} ranks; choose a number "
            "of ranks that divides them"
        )


def ep_config(config: BeamConfig, world: int, parts: int | None = None) -> BeamConfig:
    """The model that ``world`` of ``parts`` (None: all) ranks make up: fewer experts, else whole.

    Raises:
        KernelError: more ranks than parts, experts that do not divide, or fewer than a token asks.
    """
    of = world if parts is None else parts
    if not 1 <= world <= of:
        raise KernelError(
            f"{world} ranks cannot be some of {of}; choose 1 to {of} GPUs, or more parts"
        )
    refuse_world(config.num_experts, of)
    count = config.num_experts // of * world
    if count < config.num_experts_per_tok:
        raise KernelError(
            f"{world} of {of} ranks hold {count} experts, and a token asks "
            f"{config.num_experts_per_tok}; use more GPUs or fewer parts"
        )
    return config if count == config.num_experts else config.replace(num_experts=count)


def ep_weights(
    config: BeamConfig,
    ranks: Ranks,
    *,
    parts: int | None = None,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    down_layout: DownLayout = "HI",
) -> EpWeights:
    """This rank's weights of the first ``layers`` layers (None: all); all ranks call it.

    Distributions as in :meth:`workbench.kernels.rank.weights.RankWeights.random`.

    Raises:
        KernelError: ``parts`` or ``layers`` does not suit the model, or it does not fit the memory
            of one of the ranks, which all of them then say.
    """
    model = ep_config(config, ranks.world, parts)
    shapes = Shapes.of(model, 1, label=f"{ranks.world} expert-parallel ranks")
    count = model.num_hidden_layers if layers is None else layers
    if not 1 <= count <= model.num_hidden_layers:
        raise KernelError(
            f"the model has layers 1 to {model.num_hidden_layers}, so {layers} of them cannot be "
            "run; choose a number in between"
        )
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise KernelError(
            f"activations cannot be {str(dtype).removeprefix('torch.')}; use bfloat16 or float32"
        )
    own = replace(shapes, experts=shapes.experts // ranks.world)

    def make() -> tuple[list[LayerWeights], dict[str, Tensor]]:
        together = ranks.world if ranks.device.type == "cpu" else 1
        refuse_too_large(model, own, count, ranks.device, dtype)
        if together > 1:  # processes that share the memory
            _refuse_together(rank_bytes(model, own, count, dtype), together)
        maker = _Maker(ranks.device, dtype, seed * _APART + ranks.rank)
        layers = [_made(model, shapes, own, index, maker, down_layout) for index in range(count)]
        return layers, {
            "embed": maker.normal(shapes.vocabulary, shapes.hidden, std=1.0),
            "norm": maker.norm(shapes.hidden),
            "lm_head": maker.normal(shapes.vocabulary, shapes.hidden),
        }

    made, ends = in_step(ranks, make)
    for layer in made:
        experts = {tensor.data_ptr() for tensor in layer.of_experts()}
        for tensor in layer.tensors():
            if tensor.data_ptr() not in experts:
                ranks.broadcast(tensor)
    for tensor in ends.values():
        ranks.broadcast(tensor)
    return EpWeights(
        rank=ranks.rank, world=ranks.world, config=model, shapes=shapes, layers=made,
        down_layout=down_layout, seed=seed, **ends,
    )  # fmt: skip


def _refuse_together(each: int, world: int) -> None:
    """Refuse what so many processes cannot have of one machine's memory."""
    free = free_bytes("cpu")
    if free is not None and world * each > free - free // 8:
        raise KernelError(
            f"the weights of {world} ranks need {hardware.gigabytes(world * each)} together, and "
            f"{hardware.gigabytes(free)} of memory are free; give fewer layers or fewer ranks"
        )


def _made(
    config: BeamConfig,
    shapes: Shapes,
    own: Shapes,
    index: int,
    make: _Maker,
    layout: DownLayout,
) -> LayerWeights:
    """A layer with the rank's experts, and a router of all."""
    layer = _layer(config, own, index, make, layout, "same")
    if not layer.dense:
        layer.router = make.normal(shapes.experts, shapes.hidden, dtype=torch.float32)
        layer.correction_bias = make.normal(shapes.experts, std=CORRECTION_STD, dtype=torch.float32)
    return layer


def ep_sliced(whole: RankWeights, rank: int, world: int) -> EpWeights:
    """Rank ``rank``'s part of the whole model's weights (tp 1), in the memory they have.

    Raises:
        KernelError: weights of one of several tensor-parallel ranks, or ranks that do not divide
            the experts.
    """
    if whole.shapes.tp != 1:
        raise KernelError(
            f"these weights are of one of {whole.shapes.tp} tensor-parallel ranks; give those of "
            "the whole model (--tp 1)"
        )
    if whole.experts != "same":
        raise KernelError("whole experts are shared out in the activations' dtype: leave out FP8")
    refuse_world(whole.shapes.experts, world)
    own = whole.shapes.experts // world
    held = slice(rank * own, (rank + 1) * own)
    layers = [
        layer if layer.dense else replace(layer, gate_up=layer.gate_up[held], down=layer.down[held])
        for layer in whole.layers
    ]
    return EpWeights(
        rank=rank, world=world, config=whole.config, shapes=whole.shapes, layers=layers,
        embed=whole.embed, norm=whole.norm, lm_head=whole.lm_head, down_layout=whole.down_layout,
        seed=whole.seed,
    )  # fmt: skip


def _refuse_gathered(weights: EpWeights, world: int) -> bool:
    if weights.device.type != "cuda":
        return True
    each = [sum(t.numel() * t.element_size() for t in a.of_experts()) for a in weights.layers]
    # A layer's experts are there twice while the ranks' parts are joined.
    need = world * (sum(each) + max(each))
    free = torch.cuda.mem_get_info(weights.device)[0]
    free += torch.cuda.memory_reserved(weights.device) - torch.cuda.memory_allocated(weights.device)
    if need > free:
        raise KernelError(
            f"the experts of all {world} ranks in {len(each)} layers need "
            f"{hardware.gigabytes(need)}, and {hardware.gigabytes(free)} of memory are free; "
            "check fewer layers"
        )
    return True


def gathered(weights: EpWeights, ranks: Ranks) -> RankWeights:
    """The whole model's weights on every rank, the experts of all ranks copied: for a few layers.

    Raises:
        KernelError: they do not fit the free memory of one of the ranks, which all then say.
    """
    layers: list[LayerWeights] = []
    in_step(ranks, lambda: _refuse_gathered(weights, ranks.world))
    for layer in weights.layers:
        if layer.dense:
            layers.append(layer)
            continue
        gate_up, down = (torch.cat(ranks.gather(t)) for t in (layer.gate_up, layer.down))
        layers.append(replace(layer, gate_up=gate_up, down=down))
    return RankWeights(
        config=weights.config, shapes=weights.shapes, layers=layers, embed=weights.embed,
        norm=weights.norm, lm_head=weights.lm_head, down_layout=weights.down_layout,
        seed=weights.seed,
    )  # fmt: skip
