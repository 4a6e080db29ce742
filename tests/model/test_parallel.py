"""Tensor parallelism: the ranks' partial sums are the whole, and ranks in step are the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from reference import beam_fp64
from workbench.errors import ConfigError
from workbench.model.beam import Beam
from workbench.model.checkpoint import load
from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext
from workbench.model.parallel import Communicator, Shard
from workbench.model.presets import beam_501b

from .conftest import CONFIGS, Small

pytestmark = pytest.mark.usefixtures("one_thread")

FP32 = 1e-4


class Threads:
    """All-reduce and all-gather between threads of this process; a view for each rank."""

    def __init__(self, world: int) -> None:
        self.parts: list[Tensor | None] = [None] * world
        # A rank that dies must not leave the others waiting for ever.
        self.barrier = threading.Barrier(world, timeout=30)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x
        self.barrier.wait()
        parts = [part for part in self.parts if part is not None]
        self.barrier.wait()
        assert len(parts) == len(self.parts)
        return parts

    def rank(self, rank: int) -> Communicator:
        exchange = self.exchange

        class Rank:
            def all_reduce(self, x: Tensor) -> Tensor:
                return torch.stack(exchange(rank, x)).sum(0)

            def all_gather(self, x: Tensor) -> Tensor:
                return torch.cat(exchange(rank, x), -1)

        return Rank()


def ranks(small: Small, world: int) -> list[Beam]:
    return [load(small.folder, shard=Shard(rank=rank, world=world)) for rank in range(world)]


def together(beams: list[Beam], work: Callable[[Beam], Tensor]) -> list[Tensor]:
    """What each rank makes of the same work, all of them in step."""
    threads = Threads(len(beams))
    for rank, beam in enumerate(beams):
        beam.connect(threads.rank(rank))
    with ThreadPoolExecutor(len(beams)) as pool:
        return list(pool.map(work, beams))


WORLDS = [("features", 2), ("features", 4), ("defaults", 2), ("defaults", 4), ("many_experts", 4)]
CASES = [*WORLDS, ("engine_plain", 2), ("engine_plain", 4), ("engine_grouped", 2)]
each_case = pytest.mark.parametrize(("name", "world"), CASES)


@each_case
def test_ranks_in_step_give_the_logits_of_the_whole(
    small: Callable[[str], Small], name: str, world: int
) -> None:
    it = small(name)
    for logits in together(ranks(it, world), lambda beam: beam.sequence_logits(it.ids)):
        error = (logits.double() - torch.tensor(it.reference["logits"])).abs().max()
        assert error < FP32


@each_case
def test_ranks_in_step_decode_from_their_caches(
    small: Callable[[str], Small], name: str, world: int
) -> None:
    it = small(name)

    def decode(beam: Beam) -> Tensor:
        cache = beam.new_cache(2)  # the other slot has the same tokens, 20 behind
        hidden = [beam.extend(cache, it.ids[:20], [20], [0])]
        for position in range(20, len(it.ids), 5):
            part = it.ids[position : position + 5]
            behind = it.ids[position - 20 : position - 15]
            counts = [len(part), len(behind)]
            hidden.append(beam.extend(cache, torch.cat((part, behind)), counts)[: len(part)])
        return beam.logits(torch.cat(hidden))

    for logits in together(ranks(it, world), decode):
        error = (logits.double() - torch.tensor(it.reference["logits"])).abs().max()
        assert error < FP32


@each_case
def test_partial_sums_of_each_block_add_up(
    small: Callable[[str], Small], name: str, world: int
) -> None:
    """Attention's o_proj and every MLP, against the reference's block on the same input."""
    it = small(name)
    x = torch.randn(30, it.config["hidden_size"], generator=torch.Generator().manual_seed(world))
    beams = ranks(it, world)
    for number in range(it.config["num_hidden_layers"]):
        parts = []
        for beam in beams:
            context = SequenceContext(beam.config, 1, 30)
            context.kernels = beam.kernels().layers
            parts.append(beam.layers[number].attention(x, context))
        expected, _ = beam_fp64.attention_block(it.config, it.weights, number, x.double().numpy())
        assert (sum(parts).double() - torch.tensor(expected)).abs().max() < 1e-5
        assert (parts[0].double() - torch.tensor(expected)).abs().max() > 0.01  # truly partial
        mlps = [beam.layers[number].mlp(x, beam.kernels().layers[number]) for beam in beams]
        alone = load(it.folder)
        whole = alone.layers[number].mlp(x, alone.kernels().layers[number])
        assert (sum(mlps) - whole).abs().max() < 1e-5
        assert (mlps[0] - whole).abs().max() > 0.01


@each_case
def test_embedding_rows_and_logit_columns(
    small: Callable[[str], Small], name: str, world: int
) -> None:
    it = small(name)
    beams = ranks(it, world)
    streams = torch.stack([beam.embed(it.ids) for beam in beams])
    assert torch.equal(streams.sum(0), torch.tensor(it.reference["hidden"][0]).float())
    assert ((streams != 0).any(-1).sum(0) == 1).all()  # each row comes from one rank
    assert [beam.lm_head.shape[0] for beam in beams] == [it.config["vocab_size"] // world] * world


def test_norms_and_routers_are_whole_on_every_rank(features: Small) -> None:
    whole = dict(load(features.folder).named_parameters())
    for beam in ranks(features, 4):
        for name, parameter in beam.named_parameters():
            if "norm" in name or "router" in name:
                assert torch.equal(parameter, whole[name]), name


def test_a_rank_of_the_full_model_has_the_engines_shapes() -> None:
    """TP8 of beam-501b: the shapes and the 125.5 GB that the engine's packing gives."""
    beam = load("beam-501b", device="meta", shard=Shard(rank=7, world=8))
    attention, dense, sparse = beam.layers[3].attention, beam.layers[0].mlp, beam.layers[3].mlp
    assert attention.qkvg.shape == (1792, 5120)
    assert attention.o_proj.shape == (5120, 768)
    assert dense.gate_up.shape == (2 * 1536, 5120)
    assert dense.down.shape == (5120, 1536)
    assert sparse.gate_up.shape == (256, 640, 5120)
    assert sparse.down.shape == (256, 320, 5120)
    assert sparse.router.weight.shape == (256, 5120)
    assert beam.lm_head.shape == (20480, 5120)
    size = sum(p.numel() * p.element_size() for p in beam.parameters())
    assert round(size / 1e9, 1) == 125.5
    assert round(size / 2**30, 1) == 116.9
    for world, rows in ((4, 3584), (16, 896 + 128)):  # TP16: 3 query heads and one of 8 KV heads
        rank = load("beam-501b", device="meta", shard=Shard(world=world))
        assert rank.layers[0].attention.qkvg.shape == (rows, 5120)


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16, 48])
def test_every_query_head_finds_its_own_kv_head(world: int) -> None:
    """48 query heads in groups of 6: a rank must hold the KV head of each of its query heads."""
    config = beam_501b().config
    for rank in range(world):
        shard = Shard(rank=rank, world=world)
        mine, kept = shard.part(48), shard.kv_heads(config)
        needed = sorted({head // 6 for head in range(mine.start, mine.stop)})
        assert needed == list(range(kept.start, kept.stop))


@pytest.mark.parametrize(
    ("changes", "world", "says"),
    [
        ({}, 3, r"3 ranks does not divide num_attention_heads \(4\)"),
        ({"num_attention_heads": 16, "num_key_value_heads": 16}, 16, "intermediate_size"),
        ({"intermediate_size": 42}, 4, r"does not divide intermediate_size \(42\)"),
        ({"moe_intermediate_size": 22}, 4, r"does not divide moe_intermediate_size \(22\)"),
        ({"vocab_size": 62}, 4, r"does not divide vocab_size \(62\)"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8},
            4,
            "neither splits nor replicates the 6 KV heads",
        ),
    ],
)
def test_what_does_not_divide_is_named(changes: dict[str, int], world: int, says: str) -> None:
    config = BeamConfig.from_dict(CONFIGS["features"] | changes)
    with pytest.raises(ConfigError, match=says):
        Beam(config, Shard(world=world))


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0), (0, -1)])
def test_ranks_that_do_not_exist(rank: int, world: int) -> None:
    config = BeamConfig.from_dict(CONFIGS["features"])
    with pytest.raises(ConfigError, match=f"rank {rank} of {world} does not exist"):
        Beam(config, Shard(rank=rank, world=world))
