"""Weights and caches of the ranks of one group, so that together they are one model.

Each rank makes its own part where it lies, and what all ranks hold alike (norms, routers, the
correction biases) comes from rank 0. A group of fewer ranks than the tensor parallelism is the
first of its ranks: a model with that part of the heads, the widths and the vocabulary, whose ranks
have exactly the shapes of the whole model's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from workbench import hardware
from workbench.errors import KernelError, WorkbenchError
from workbench.kernels.footprint import free_bytes
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import (
    DownLayout,
    ExpertFormat,
    LayerWeights,
    RankWeights,
    rank_bytes,
)
from workbench.kernels.shapes import Shapes
from workbench.model.config import BeamConfig
from workbench.model.parallel import Shard

# The seeds of a group's ranks, one after the other, and those of the next group behind them.
_RANKS_OF_A_SEED = 1000

Made = TypeVar("Made")


class TpWeights(RankWeights):
    """One rank's weights as :func:`tp_weights` makes them.

    Attributes:
        seconds: how long making them took, the slowest rank's; None where nothing was made.
    """

    seconds: float | None = None


def group_label(tp: int, world: int) -> str:
    """Which of the ranks a group of ``world`` is: "2 of 8 ranks", "all 8 ranks"."""
    return f"all {tp} ranks" if world == tp else f"{world} of {tp} ranks"


def in_step(ranks: Ranks, make: Callable[[], Made]) -> Made:
    """What ``make`` (no collectives in it) gives on this rank, or on all ranks the first refusal.

    A rank that alone cannot go on would leave the others waiting for it.

    Raises:
        KernelError: ``make`` refused on some rank, or its memory was full; the sentence of the
            first of them, with its number where not all of them say the same.
    """
    made, reason = None, ""
    try:
        made = make()
    except torch.OutOfMemoryError:
        reason = "the GPU's memory was full; give fewer --layers, sequences or shorter contexts"
    except WorkbenchError as error:
        reason = str(error)
    said = ranks.tell(reason)
    first = next((rank for rank, each in enumerate(said) if each), None)
    if first is None:
        assert made is not None  # for the type checker: it did not refuse
        return made
    alike = all(said) or ranks.world == 1
    raise KernelError(said[first] if alike else f"rank {first} of {ranks.world}: {said[first]}")


def tp_weights(
    config: BeamConfig,
    ranks: Ranks,
    tp: int = 8,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    experts: ExpertFormat = "same",
    down_layout: DownLayout = "HI",
) -> TpWeights:
    """This rank's random weights of a group of ``ranks.world`` of ``tp`` ranks, on its device.

    As :meth:`RankWeights.random` makes them, each rank from a seed of its own. Norms, routers and
    correction biases are rank 0's everywhere; ranks that share a KV head have it from the first of
    them. For all ranks to call together.

    Raises:
        KernelError: on all ranks alike: more ranks than ``tp``, or a rank's weights do not suit the
            model or do not fit (CPU ranks share the machine's memory).
    """
    started = time.perf_counter()
    if ranks.world > tp:
        raise KernelError(
            f"{ranks.world} ranks are more than the {tp} of the model: --gpus {ranks.world} needs "
            f"--tp {ranks.world} or more"
        )

    def make() -> TpWeights:
        count = config.num_hidden_layers if layers is None else layers
        if ranks.device.type == "cpu":
            _refuse_together(config, Shapes.of(config, tp), count, dtype, experts, ranks.world)
        made = TpWeights.random(
            config, tp, layers=layers, device=ranks.device, dtype=dtype,
            seed=seed * _RANKS_OF_A_SEED + ranks.rank, down_layout=down_layout, experts=experts,
        )  # fmt: skip
        assert isinstance(made, TpWeights)  # for the type checker: random makes its own class
        return made

    made = in_step(ranks, make)
    for tensor in replicated(made):
        ranks.broadcast(tensor)
    _share_kv(made, ranks)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    made.seconds = max(ranks.tell(time.perf_counter() - started))
    return made


def _refuse_together(
    config: BeamConfig,
    shapes: Shapes,
    layers: int,
    dtype: torch.dtype,
    experts: ExpertFormat,
    world: int,
) -> None:
    free = free_bytes("cpu")
    if free is None or not 1 <= layers <= config.num_hidden_layers:
        return
    need = world * rank_bytes(config, shapes, layers, dtype, experts)
    if need > free - free // 8:
        raise KernelError(
            f"the weights of {world} ranks of {layers} layers need {hardware.gigabytes(need)} "
            f"together, and {hardware.gigabytes(free)} of memory are free; give fewer --layers or "
            "fewer --gpus"
        )


def replicated(weights: RankWeights) -> Iterator[Tensor]:
    """What every rank holds whole and alike: norms, routers, correction biases."""
    for layer in weights.layers:
        yield from (
            layer.qk_norm,
            layer.input_norm,
            layer.post_attention_norm,
            layer.pre_mlp_norm,
            layer.post_mlp_norm,
        )
        if layer.router is not None and layer.correction_bias is not None:
            yield from (layer.router, layer.correction_bias)
    yield weights.norm


def first_holder(config: BeamConfig, tp: int, rank: int) -> int:
    """The first of the ranks that hold the KV heads of ``rank``: itself, or the first sharing."""
    kv = config.num_key_value_heads
    if kv >= tp:
        return rank
    head = rank * kv // tp
    return -(-head * tp // kv)


def _share_kv(weights: RankWeights, ranks: Ranks) -> None:
    """Give ranks that share a KV head its rows of the packed projection."""
    s = weights.shapes
    holders = [first_holder(weights.config, s.tp, rank) for rank in range(ranks.world)]
    first = s.heads * s.head_dim
    rows = slice(first, first + 2 * s.kv_heads * s.head_dim)
    for holder in sorted(set(holders)):
        if holders.count(holder) == 1:
            continue
        for layer in weights.layers:
            mine = layer.qkvg[rows]
            shared = ranks.broadcast(mine.clone(), holder)
            if holders[ranks.rank] == holder:
                mine.copy_(shared)


def tp_state(
    weights: RankWeights,
    ranks: Ranks,
    context: int,
    *,
    batch: int = 1,
    headroom: int = 64,
    seed: int = 1,
) -> RankState:
    """This rank's caches of one group: each its own heads', shared heads alike, rank 0's tokens.

    The first tokens are below the vocabulary of one rank, so that a rank alone can start with them,
    too. For all ranks to call together.

    Raises:
        KernelError: on all ranks alike, as :class:`RankState` says.
    """
    holder = first_holder(weights.config, weights.shapes.tp, ranks.rank)

    def make() -> RankState:
        return RankState(
            weights, context, batch=batch, headroom=headroom,
            seed=seed * _RANKS_OF_A_SEED + holder,
        )  # fmt: skip

    state = in_step(ranks, make)
    state.begin_with(ranks.broadcast(state.token.clone()))
    return state


def sliced(whole: RankWeights, rank: int, world: int) -> RankWeights:
    """Copies of what rank ``rank`` of ``world`` holds of the ``whole`` model (weights at tp 1).

    Raises:
        KernelError: ``whole`` is itself a rank's, or ``world`` does not divide the model.
        ConfigError: there is no such rank.
    """
    if whole.shapes.tp != 1:
        raise KernelError(
            f"these weights are those of one of {whole.shapes.tp} ranks already; slice weights "
            "that were made with tp=1"
        )
    shard, shapes = Shard(rank=rank, world=world), Shapes.of(whole.config, world)
    shard.check(whole.config)
    vocabulary = shard.part(whole.shapes.vocabulary)
    return RankWeights(
        config=whole.config,
        shapes=shapes,
        layers=[_sliced_layer(layer, whole, shard) for layer in whole.layers],
        embed=whole.embed[vocabulary].clone(),
        norm=whole.norm.clone(),
        lm_head=whole.lm_head[vocabulary].clone(),
        down_layout=whole.down_layout,
        experts=whole.experts,
        seed=whole.seed,
    )


def _sliced_layer(layer: LayerWeights, whole: RankWeights, shard: Shard) -> LayerWeights:
    s = whole.shapes
    heads, kv_heads = shard.part(s.heads), shard.kv_heads(whole.config)
    q, k, v, gate = (
        each.unflatten(0, (-1, s.head_dim))
        for each in layer.qkvg.split(
            [n * s.head_dim for n in (s.heads, s.kv_heads, s.kv_heads, s.heads)]
        )
    )
    kept: dict[str, Any] = {
        each.name: value.clone()
        for each in fields(layer)
        if isinstance(value := getattr(layer, each.name), Tensor)
    }
    kept["qkvg"] = torch.cat((q[heads], k[kv_heads], v[kv_heads], gate[heads])).flatten(0, 1)
    # Column slices are views whose rows lie apart; a clone of one in this format does not.
    rows = torch.contiguous_format
    columns = layer.o_proj.unflatten(1, (-1, s.head_dim))[:, heads]
    kept["o_proj"] = columns.clone(memory_format=rows).flatten(1)
    kept["gate_bias"] = layer.gate_bias[heads].clone()
    width = shard.part(s.mlp_width if layer.dense else s.expert_width)
    kept["gate_up"] = _gate_and_up(layer.gate_up, width, -2)
    if layer.dense or whole.down_layout == "HI":
        kept["down"] = layer.down[..., width].clone(memory_format=rows)
    else:
        kept["down"] = layer.down[:, width].clone(memory_format=rows)
    if layer.gate_up_scale is not None:
        kept["gate_up_scale"] = _gate_and_up(layer.gate_up_scale, width, -1)
    return replace(layer, **kept)


def _gate_and_up(both: Tensor, width: slice, axis: int) -> Tensor:
    """The same part of the gate's and of the up projection's rows; as bytes where they are FP8."""
    kind = both.dtype
    values = both.view(torch.uint8) if kind.itemsize == 1 else both
    parts = [each.transpose(axis, 0)[width].transpose(0, axis) for each in values.chunk(2, axis)]
    return torch.cat(parts, axis).contiguous().view(kind)
