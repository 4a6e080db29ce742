"""A prefill by several ranks is the prefill of the whole model by one, in whatever pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_prefill import TpPrefillStep, group_state
from workbench.kernels.parallel.weights import sliced
from workbench.kernels.rank import RankWeights
from workbench.kernels.rank.prefill_check import sample_rows
from workbench.kernels.rank.prefill_state import PrefillState
from workbench.kernels.rank.prefill_step import LAYOUTS, Choices, PrefillStep
from workbench.model.parallel import Shard

from .conftest import in_threads, whole_model

SEQUENCES, TOKENS, CONTEXT = 2, 13, 30


def apart(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def part_of(
    whole: RankWeights, state: PrefillState, ranks: Ranks
) -> tuple[RankWeights, PrefillState]:
    """A rank's slices of the weights and of the caches, and the same tokens."""
    weights = sliced(whole, ranks.rank, ranks.world)
    own = PrefillState(weights, state.sequences, state.tokens, state.context)
    heads = Shard(rank=ranks.rank, world=ranks.world).kv_heads(whole.config)
    for mine, every in zip((*own.k, *own.v), (*state.k, *state.v), strict=True):
        mine.copy_(every[:, :, heads])
    own.token.copy_(state.token)
    own.poison()
    return weights, own


def errors(ranks: Ranks, form: str, overlaps: list[int]) -> list[dict[str, Any]]:
    """How far each number of pieces is from the whole model on one rank."""
    torch.set_grad_enabled(False)
    whole, _ = whole_model(layout=LAYOUTS.get(form, "HI"))
    # Interpreted kernels take seconds: a few tokens.
    sizes = (SEQUENCES, TOKENS, CONTEXT) if form == "naive" else (1, 5, 9)
    state = PrefillState(whole, *sizes)
    rows = sample_rows(state, 4)
    weights, own = part_of(whole, state, ranks)
    one = PrefillStep(whole, state, "naive", watch=rows)
    one()
    vocabulary = Shard(rank=ranks.rank, world=ranks.world).part(whole.shapes.vocabulary)
    heads = Shard(rank=ranks.rank, world=ranks.world).kv_heads(whole.config)
    found = []
    for overlap in overlaps:
        own.poison()
        step = TpPrefillStep(weights, own, ranks, form, overlap=overlap, watch=rows)
        step()
        pairs = [(a, b) for a, b in zip(own.k + own.v, state.k + state.v, strict=True)]
        found.append(
            {
                "logits": apart(own.logits, state.logits[:, vocabulary]),
                "caches": max(apart(a, b[:, :, heads]) for a, b in pairs),
                "streams": max(apart(a, b) for a, b in zip(step.h, one.h, strict=True)),
                "tokens": own.next_token.tolist() == state.next_token.tolist(),
                "experts": torch.equal(step.expert_ids(), one.expert_ids()),
                "every token": [len(p[0]) for p in step.chosen.layers if p is not None],
            }
        )
    if form != "naive":
        return found
    # Given experts are each piece's own: shifted by one row they would be another token's.
    given = TpPrefillStep(weights, own, ranks, form, overlap=3, choices=one.chosen)
    own.poison()
    given()
    found[0]["given"] = apart(own.logits, state.logits[:, vocabulary])
    alone = TpPrefillStep(weights, own, ranks, form, communicate=False)
    alone()
    found[0]["alone"] = apart(own.logits, state.logits[:, vocabulary])
    return found


@pytest.mark.parametrize(
    ("world", "form", "overlaps"),
    [
        (2, "naive", [1, 2, 3, 100]),
        (2, "ours", [2]),
        pytest.param(4, "naive", [1, 2, 3], marks=pytest.mark.full),
        pytest.param(2, "chain", [2], marks=pytest.mark.full),
    ],
)
def test_it_is_the_prefill_of_the_whole_model(
    together: Callable[..., list[Any]], world: int, form: str, overlaps: list[int]
) -> None:
    if form != "naive" and torch.cuda.is_available():
        pytest.skip("Triton kernels are interpreted on a CPU only without a GPU")
    for of_rank in together(world, errors, form, overlaps):
        if form == "naive":
            assert of_rank[0]["alone"] > 1e-2  # what the exchanges are for
            assert of_rank[0]["given"] < 1e-4
        for found in of_rank:
            assert found["tokens"]
            assert found["experts"]
            assert found["every token"] == [SEQUENCES * TOKENS if form == "naive" else 5] * 2
            assert max(found[name] for name in ("logits", "caches", "streams")) < 1e-4


def test_a_tie_is_the_least_token(small_work: None) -> None:
    whole, _ = whole_model()
    state = PrefillState(whole, 1, 3, 0)

    def choose(ranks: Ranks) -> list[int]:
        weights, own = part_of(whole, state, ranks)
        step = TpPrefillStep(weights, own, ranks, "naive")
        own.logits.zero_()
        own.logits[0, 7] = own.logits[0, 3] = 2.0  # in every rank's part
        tied = step._choose().tolist()
        own.logits[0, 9] = 2.0 + ranks.rank
        return tied + step._choose().tolist()

    assert in_threads(2, choose) == [[3, 109]] * 2


def test_the_group_has_the_same_tokens_and_its_own_caches(small_work: None) -> None:
    whole, _ = whole_model(num_key_value_heads=2)

    def state(ranks: Ranks) -> tuple[Tensor, Tensor]:
        made = group_state(sliced(whole, ranks.rank, ranks.world), ranks, 2, 50, 4)
        return made.token, made.k[1][:, :4]

    made = in_threads(4, state)
    assert all(torch.equal(token, made[0][0]) for token, _ in made)
    assert made[0][0].max() >= 100  # of 200, rank 0's being 50
    keys = [key for _, key in made]
    assert torch.equal(keys[0], keys[1])  # four ranks share two heads
    assert torch.equal(keys[2], keys[3])
    assert not torch.equal(keys[0], keys[2])


@pytest.mark.parametrize("overlap", [0, -1, True, 1.5])
def test_pieces_that_cannot_be_are_refused(overlap: Any, small_work: None) -> None:
    whole, _ = whole_model()
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), backend="gloo")
    with pytest.raises(KernelError, match="1 or more pieces"):
        TpPrefillStep(whole, PrefillState(whole, 1, 2, 0), ranks, "naive", overlap=overlap)


def test_tokens_and_choices_that_cannot_be_are_refused(small_work: None) -> None:
    whole, _ = whole_model()
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), backend="gloo")
    state = PrefillState(whole, 1, 2, 0)
    with pytest.raises(KernelError, match="choices are of 0 layers"):
        TpPrefillStep(whole, state, ranks, "naive", choices=Choices())
    state.token[1] = 200
    with pytest.raises(KernelError, match="not all among the 200 of 1 ranks"):
        TpPrefillStep(whole, state, ranks, "naive")
