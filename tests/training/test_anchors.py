"""Blocks in training: where they begin, and that they see what a served block sees."""

from collections.abc import Iterator

import pytest
import torch

from workbench.model.beam import Beam
from workbench.spec.draft_attention import CachedBlocks, SequenceBlocks
from workbench.spec.draft_cache import DraftCache
from workbench.spec.drafter import Drafter
from workbench.training.anchors import (
    TrainingBlocks,
    draw_anchors,
    make_blocks,
    sequence_context,
)
from workbench.training.drafter_evaluate import target_pass

WINDOW, QUERY = 9, 5


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_anchors_are_different_positions_with_a_token_behind_them() -> None:
    valid = torch.tensor([40, 14, 11, 12])
    seen: set[int] = set()
    for seed in range(200):
        drawn = draw_anchors(valid, 10, 6, 40, torch.Generator().manual_seed(seed))
        assert drawn.shape == (4, 6)
        real = [[a for a in row if a >= 0] for row in drawn.tolist()]
        assert [len(row) for row in real] == [6, 3, 0, 1]
        assert all(len(set(row)) == len(row) for row in real)
        assert sorted(real[1]) == [10, 11, 12]
        assert real[3] == [10]
        seen |= set(real[0])
    assert seen == set(range(10, 39)), "every position is drawn at times"
    assert draw_anchors(valid, 38, 6, 40, torch.Generator()).tolist()[0] == [38, -1, -1, -1, -1, -1]


def test_labels_are_the_tokens_behind_the_anchor() -> None:
    tokens = torch.arange(60).view(2, 30) + 100
    blocks = make_blocks(tokens, torch.tensor([20, 30]), torch.tensor([[5, 17, -1], [28, 0, 3]]), 5)
    assert blocks.places.tolist() == [[5, 17, 0], [28, 0, 3]]
    assert blocks.anchors.tolist() == [105, 117, 100, 158, 130, 133]
    assert blocks.labels[0].tolist() == [106, 107, 108, 109]
    assert blocks.live[0].tolist() == [True] * 4
    assert blocks.labels[1, :2].tolist() == [118, 119]
    assert blocks.live[1].tolist() == [True, True, False, False]  # 20 tokens count
    assert blocks.live[2].tolist() == [False] * 4
    assert blocks.labels[3, 0].tolist() == 159
    assert blocks.live[3].tolist() == [True, False, False, False]


def sequences(rows: int = 3, length: int = 40) -> torch.Tensor:
    return torch.randint(20, 400, (rows, length), generator=torch.Generator().manual_seed(2))


def trained(drafter: Drafter, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """States of all rows ``[S, n, Q, H]`` through the training mask."""
    streams, _ = target_pass(drafter.target, tokens, drafter.taps)
    return rows_of(drafter, streams, tokens, places)


def rows_of(
    drafter: Drafter, streams: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    context = sequence_context(drafter, streams, tokens.shape)
    attention = TrainingBlocks(context, places, QUERY, WINDOW, 64)
    ids = drafter.block_ids(tokens.gather(1, places).flatten(), QUERY)
    return drafter(ids, attention, QUERY).view(*places.shape, QUERY, -1)


def served(drafter: Drafter, tokens: torch.Tensor, place: int) -> torch.Tensor:
    """States of one served block ``[Q, H]``: target chunks into the draft cache, then a pass."""
    beam = drafter.target
    cache, drafts = beam.new_cache(), DraftCache(drafter, 1, QUERY)
    for chunk in tokens[:place].split(7):
        streams = {tap: torch.empty(0) for tap in drafter.taps}
        beam.extend(cache, chunk, [len(chunk)], [0], streams=streams)
        features = torch.cat([streams[tap] for tap in drafter.taps], -1)
        drafts.write(features, [len(chunk)], [0], [len(chunk)])
    attention = CachedBlocks(drafts, torch.tensor([place]), [0], QUERY, 64)
    return drafter(drafter.block_ids(tokens[place : place + 1], QUERY), attention, QUERY)


def test_a_trained_block_is_the_served_block(drafter: Drafter) -> None:
    tokens = sequences()
    # Before the window is full, when it just is, far behind, and at the end of the sequence.
    places = torch.tensor([[1, 3, 8, 9, 10], [20, 21, 22, 30, 35], [39, 5, 12, 2, 38]])
    states = trained(drafter, tokens, places)
    for row, at in enumerate(places.tolist()):
        for column, place in enumerate(at):
            expected = served(drafter, tokens[row], place)
            torch.testing.assert_close(states[row, column], expected, atol=2e-5, rtol=1e-5)


def test_a_trained_block_is_the_gathered_block(drafter: Drafter) -> None:
    tokens = sequences()
    places = torch.tensor([[0, 7, 31], [4, 13, 14], [26, 27, 39]])
    states = trained(drafter, tokens, places)
    streams, _ = target_pass(drafter.target, tokens, drafter.taps)
    positions = torch.arange(40).repeat(3)
    pairs = drafter.context_keys(drafter.context(streams), positions)
    context = [(k.unflatten(0, (3, 40)), v.unflatten(0, (3, 40))) for k, v in pairs]
    for (k, v), (own_k, own_v) in zip(
        context, sequence_context(drafter, streams, (3, 40)), strict=True
    ):
        assert torch.equal(k, own_k)
        assert torch.equal(v, own_v)
    which = torch.arange(3).repeat_interleave(3)
    blocks = SequenceBlocks(context, which, places.flatten(), QUERY, WINDOW, 64)
    ids = drafter.block_ids(tokens.gather(1, places).flatten(), QUERY)
    gathered = drafter(ids, blocks, QUERY).view_as(states)
    torch.testing.assert_close(states, gathered, atol=2e-5, rtol=1e-5)


def test_who_sees_whom(drafter: Drafter, target: Beam) -> None:
    tokens, places = sequences(2), torch.tensor([[20, 23], [20, 30]])
    streams, _ = target_pass(target, tokens, drafter.taps)
    base = rows_of(drafter, streams, tokens, places)

    def changed(position: int) -> torch.Tensor:
        """Rows of the first sequence that a change of its target state at a position moves."""
        other = streams.clone()
        other[position] += 1.0
        moved = (rows_of(drafter, other, tokens, places) - base).abs().amax(-1) > 1e-6
        assert not moved[1].any(), "no other sequence"
        return moved[0]

    # The anchor's own state is hidden from its block, and so is everything behind it.
    assert changed(20).tolist() == [[False] * 5, [True] * 5]
    assert changed(22).tolist() == [[False] * 5, [True] * 5]
    assert not changed(23).any()
    assert changed(19).tolist()[0] == [True] * 5
    # Out of every row's window, though the second layer reads rows that saw further.
    assert not changed(20 - WINDOW).any()
    # The oldest state in row 0's window reaches the others through row 0 alone.
    assert changed(20 - WINDOW + 1)[0].all()
    # The anchor's token moves its whole block and no other block.
    swapped = tokens.clone()
    swapped[0, 20] = tokens[0, 20] + 1
    moved = (rows_of(drafter, streams, swapped, places) - base).abs().amax(-1) > 1e-6
    assert moved[0].tolist() == [[True] * 5, [False] * 5]
    assert not moved[1].any()


def test_each_row_has_its_own_left_edge(drafter: Drafter) -> None:
    tokens, places = sequences(1), torch.tensor([[20]])
    streams, _ = target_pass(drafter.target, tokens, drafter.taps)
    context = sequence_context(drafter, streams, tokens.shape)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(QUERY, heads, 16, generator=generator) for heads in (4, 2, 2))
    base = TrainingBlocks(context, places, QUERY, WINDOW, 64).attend(0, q, k, v)
    for position in range(40):
        moved_context = [(old_k, old_v.clone()) for old_k, old_v in context]
        moved_context[0][1][0, position] += 1.0
        blocks = TrainingBlocks(moved_context, places, QUERY, WINDOW, 64)
        moved = (blocks.attend(0, q, k, v) - base).abs().amax((1, 2)) > 0
        seen = [20 + j - (WINDOW - 1) <= position < 20 for j in range(QUERY)]
        assert moved.tolist() == seen, position
