"""The check of several ranks: what is right passes, and each way of being wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.parallel.check import (
    GroupCheck,
    check_group,
    check_group_load,
    fingerprint,
)
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_chain import TpRankStep
from workbench.kernels.rank import RankState, RankWeights
from workbench.kernels.rank.chain import RankStep
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.rank.reference import check_step

from .conftest import ThreadRanks, in_threads, rank_of, whole_model

LIMIT = 1e-5
Make = Callable[[RankWeights, RankState, Ranks], Any]


def checks(
    make: Make = TpRankStep,
    world: int = 2,
    *,
    steps: int = 1,
    kind: type[ThreadRanks] = ThreadRanks,
    load: bool = False,
    rows: Any = None,
    prepare: Callable[[Ranks, RankState], None] | None = None,
    **model: Any,
) -> list[GroupCheck]:
    """The check of the last of so many steps, as every rank sees it."""

    def work(ranks: Ranks) -> GroupCheck:
        weights, state = rank_of(whole_model(**model), ranks.rank, ranks.world)
        step = make(weights, state, ranks)
        for _ in range(steps - 1):
            step()
        if prepare is not None:
            prepare(ranks, state)
        if load:
            over = LoadState.over(state, weights)
            return check_group_load(step, weights, over, ranks, rows=rows)
        return check_group(step, weights, state, ranks)

    found = in_threads(world, work, kind)
    assert all(each.to_dict() == found[0].to_dict() for each in found)  # one verdict
    return found


@pytest.mark.parametrize(("world", "batch"), [(2, 1), (4, 2)])
def test_the_right_step_passes_and_its_errors_are_those_of_one_rank(world: int, batch: int) -> None:
    weights, state = whole_model(batch=batch)
    alone = RankStep(weights, state)
    for steps in (1, 3):
        while int(state.position[0]) < 40 + steps - 1:
            alone()
        # Not from the rank's own logits: a check of the whole model says the same.
        found = checks(world=world, steps=steps, batch=batch)[0]
        assert found.failures(LIMIT) == []
        assert found.differences == ()
        assert found.world == world
        assert found.sequences == batch
        one = check_step(alone, weights, state)
        assert found.margin == pytest.approx(one.margin, rel=1e-3)
        assert 0 < found.worst < 10 * one.worst
        assert len(found.layer_errors) == 3


def test_bf16_is_as_right_as_one_rank_is() -> None:
    found = checks(dtype=torch.bfloat16)[0]
    weights, state = whole_model(dtype=torch.bfloat16)
    one = check_step(RankStep(weights, state), weights, state)
    limit = 2 * max(one.worst, one.cache_error, one.logits_error)
    assert found.failures(limit) == []
    assert found.worst > 1e-4  # rounding, so that it is BF16 that was compared


def test_rows_of_a_batch_are_compared_where_asked() -> None:
    found = checks(load=True, batch=3, rows=[0, 2])[0]
    assert found.failures(LIMIT) == []
    assert found.sequences == 2
    with pytest.raises(KernelError, match="rows to check must be among 0 to 2"):
        checks(load=True, batch=3, rows=[3])

    class WrongRow(TpRankStep):
        def __call__(self) -> None:
            super().__call__()
            self.h[2][1] *= 1.5

    assert checks(WrongRow, load=True, batch=3, rows=[0, 2])[0].failures(LIMIT) == []
    assert "a layer's error" in checks(WrongRow, load=True, batch=3)[0].failures(LIMIT)[0]


class Unsummed(TpRankStep):
    """Leaves one sublayer's partial sums as they are."""

    count = 0

    def _boundary(self, h: Tensor, sublayer: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        self.count += 1
        if self.count == 3:  # attention of layer 1
            return RankStep._boundary(self, h, sublayer, *rest)
        return super()._boundary(h, sublayer, *rest)


class OneBit(TpRankStep):
    """Rank 1's stream is off by the last bit of one value behind layer 1."""

    def __call__(self) -> None:
        super().__call__()
        if self.ranks.rank == 1:
            self.h[2].view(torch.int32)[0, 17] ^= 1


class OtherExpert(TpRankStep):
    """The last rank says that it took another expert than it did."""

    def expert_ids(self) -> Tensor:
        ids = super().expert_ids()
        if self.ranks.rank == self.ranks.world - 1:
            ids[2, 0, 1] = (ids[2, 0, 1] + 1) % 12
        return ids


class OwnVocabulary(TpRankStep):
    """Takes the best of its own logits for the best of all."""

    def _choose(self) -> Tensor:
        return RankStep._choose(self)


def test_ranks_that_differ_are_named_with_the_place() -> None:
    cases = {
        Unsummed: "the stream behind layer 1 of rank 1 is not that of rank 0, bit for bit",
        OneBit: "the stream behind layer 1 of rank 1 is not that of rank 0, bit for bit",
        OtherExpert: "the experts of rank 1 is not that of rank 0, bit for bit",
        OwnVocabulary: "the next token of rank 1 is not that of rank 0, bit for bit",
    }
    for make, sentence in cases.items():
        for load in (False, True):
            assert checks(make, load=load)[0].failures(LIMIT) == [sentence], make

    def other_token(ranks: Ranks, state: RankState) -> None:
        state.token.add_(int(ranks.rank == 2))

    found = checks(world=4, prepare=other_token)[0]
    assert found.failures(LIMIT) == ["the token of rank 2 is not that of rank 0, bit for bit"]


class FewerRanks(ThreadRanks):
    """Sums all ranks but the last, alike on all of them, where BF16 or FP32 is summed."""

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.gather(x)
        kept = parts if x.dtype == torch.float64 else parts[:-1]
        return x.copy_(torch.stack(kept).sum(0))


class WrongOffset(TpRankStep):
    """Believes its rows to begin one token later."""

    def _embed(self) -> Tensor:
        kept = self.state.token
        self.state.token = kept - 1
        try:
            return super()._embed()
        finally:
            self.state.token = kept


class NextRank(TpRankStep):
    """Says that the best token is the one in the other rank's vocabulary."""

    def _choose(self) -> Tensor:
        size = self.weights.shapes.vocabulary
        return (super()._choose() + size) % (size * self.ranks.world)


class OneCache(TpRankStep):
    """Rank 1 writes a wrong key."""

    def __call__(self) -> None:
        at = int(self.state.position[0])
        super().__call__()
        if self.ranks.rank == 1:
            self.state.k[1][0, at] += 0.5


class OneHead(TpRankStep):
    """Rank 1's part of the logits is off."""

    def __call__(self) -> None:
        super().__call__()
        if self.ranks.rank == 1:
            self.state.logits *= 1.01


def test_what_all_ranks_do_wrong_alike_is_caught_by_the_reference() -> None:
    assert "a layer's error" in checks(kind=FewerRanks)[0].failures(LIMIT)[0]
    assert not checks(WrongOffset)[0].finite  # another row than the token's
    assert "another next token" in checks(NextRank)[0].failures(LIMIT)[0]


def test_what_one_rank_does_wrong_is_everyones_verdict() -> None:
    found = checks(OneCache)[0]
    assert found.cache_error > 0.1
    assert len(found.failures(LIMIT)) == 1
    found = checks(OneHead)[0]
    assert found.logits_error == pytest.approx(0.01, rel=1e-3)
    assert len(found.failures(LIMIT)) == 1


class Nan(TpRankStep):
    """All ranks lose a value on the way."""

    def __call__(self) -> None:
        super().__call__()
        self.h[3][0, 4] = torch.nan


def test_what_is_no_number_and_what_is_no_token() -> None:
    assert "no numbers" in checks(Nan)[0].failures(LIMIT)[0]

    def beyond(ranks: Ranks, state: RankState) -> None:
        state.token.fill_(200)  # the vocabulary's size

    assert not checks(prepare=beyond)[0].finite


class Halves(TpRankStep):
    """Keeps only its half of the stream, and gives the whole when asked."""

    def __call__(self) -> None:
        super().__call__()
        parts = [h.chunk(self.ranks.world, -1)[self.ranks.rank].contiguous() for h in self.h]
        self.h = parts

    def gathered_h(self) -> list[Tensor]:
        return [self.ranks.all_gather(h) for h in self.h]


def test_a_stream_that_is_shared_out_is_gathered() -> None:
    assert checks(Halves)[0].failures(LIMIT) == []


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64])
def test_a_fingerprint_knows_every_bit_and_place(kind: torch.dtype) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]
    x = torch.randint(-9999, 9999, (2, 33)).to(bits)
    first = int(fingerprint(x.view(kind)))
    assert first == int(fingerprint(x.clone().view(kind)))
    for place in (0, 5, 65):
        for bit in range(8 * kind.itemsize - 1):
            other = x.clone()
            other.view(-1)[place] ^= 1 << bit
            assert int(fingerprint(other.view(kind))) != first
    swapped = x.flip(0)
    assert int(fingerprint(swapped.view(kind))) != first
