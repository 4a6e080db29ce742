"""Ranks in step are the model: the chain on slices of the weights, and the sharded Beam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_chain import TpRankStep, best_token, partial_embedding
from workbench.kernels.rank.chain import RankStep
from workbench.model.checkpoint import load
from workbench.model.parallel import Shard

from ..rank.rank_numpy import NumpyRank
from .conftest import in_threads, rank_of, whole_model

STEPS = 8
FP32 = 1e-4


def decoded(ranks: Ranks, steps: int = STEPS, **model: Any) -> list[tuple[Tensor, Tensor]]:
    """Logits of this rank and next tokens of consecutive steps."""
    weights, state = rank_of(whole_model(**model), ranks.rank, ranks.world)
    step = TpRankStep(weights, state, ranks)
    found = []
    for _ in range(steps):
        step()
        assert torch.equal(state.token, state.next_token)
        found.append((state.logits.clone(), state.next_token.clone()))
    assert state.position.tolist() == [state.context + steps] * state.batch
    return found


@pytest.mark.parametrize(
    ("world", "model"),
    [
        (2, {}),
        (4, {}),
        (4, {"num_key_value_heads": 2, "layout": "IH"}),  # two ranks share a KV head
        (2, {"batch": 3, "final_logit_softcapping": None}),
    ],
)
def test_ranks_in_step_decode_as_the_whole_does(world: int, model: dict[str, Any]) -> None:
    weights, state = whole_model(**model)
    numpy = [NumpyRank(weights, state, b) for b in range(state.batch)]
    step = RankStep(weights, state)
    each = in_threads(world, lambda ranks: decoded(ranks, **model))
    owners = set()
    for number in range(STEPS):
        step()
        logits = torch.cat([rank[number][0] for rank in each], -1)
        assert (logits - state.logits).abs().max() < FP32
        for b, one in enumerate(numpy):
            assert abs(logits[b].double().numpy() - one.step()).max() < FP32
        for rank in each:
            assert rank[number][1].tolist() == state.next_token.tolist()
            assert rank[number][1].tolist() == [one.token for one in numpy]
        owners |= {token * world // weights.shapes.vocabulary for token in state.token.tolist()}
    assert len(owners) > 1  # tokens whose rows other ranks have


def test_the_first_of_equal_logits_is_the_next_token() -> None:
    logits = torch.tensor([[0.0, 2, 1, 2], [5, 1, 1, 1], [1, 1, 1, 1], [-3, -2, -1, -1]])
    parts = logits.split(2, -1)
    for world, cut in ((2, parts), (1, (logits,))):
        found = in_threads(world, lambda ranks, cut=cut: best_token(cut[ranks.rank], ranks))
        assert [each.tolist() for each in found] == [[1, 0, 0, 2]] * world


def test_each_embedding_row_comes_from_one_rank() -> None:
    table = torch.randn(12, 5)
    tokens = torch.tensor([0, 3, 4, 11, 7])
    rows = torch.stack([partial_embedding(tokens, table[r * 4 : r * 4 + 4], r) for r in range(3)])
    assert torch.equal(rows.sum(0), table[tokens])
    assert ((rows != 0).any(-1).sum(0) == 1).all()


def of_one_process(ranks: Ranks, ids: list[int]) -> dict[str, Any]:
    """Logits of a sharded Beam; what the chain decodes; a sum in BF16."""
    beam = load("beam-tiny", dtype=torch.float32, shard=Shard(rank=ranks.rank, world=ranks.world))
    beam.connect(ranks)
    with torch.inference_mode():
        whole = beam.sequence_logits(torch.tensor(ids))
    steps = decoded(ranks)
    low = decoded(ranks, 1, dtype=torch.bfloat16)
    return {
        "beam": whole.tolist(),
        "rows": beam.lm_head.shape[0],
        "logits": [logits.tolist() for logits, _ in steps],
        "tokens": [token.tolist() for _, token in steps],
        "finite": bool(torch.isfinite(low[0][0]).all()),
        "told": ranks.tell({"rank": ranks.rank}),
    }


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 4])
def test_processes_that_speak_by_gloo(together: Callable[..., list[Any]], world: int) -> None:
    """The issue's own test: CPU, gloo, a tiny model, the logits of the unsharded model."""
    alone = load("beam-tiny", dtype=torch.float32)
    ids = [(7 * n * n + 3) % alone.config.vocab_size for n in range(24)]
    with torch.inference_mode():
        wanted = alone.sequence_logits(torch.tensor(ids))
    found = together(world, of_one_process, ids)
    for rank in found:
        assert rank["rows"] == alone.config.vocab_size // world
        assert rank["told"] == [{"rank": number} for number in range(world)]
        assert rank["finite"]
        assert (torch.tensor(rank["beam"]) - wanted).abs().max() < 1e-4
    weights, state = whole_model()
    step = RankStep(weights, state)
    for number in range(STEPS):
        step()
        logits = torch.cat([torch.tensor(rank["logits"][number]) for rank in found], -1)
        assert (logits - state.logits).abs().max() < FP32
        assert {rank["tokens"][number][0] for rank in found} == {int(state.token)}
