"""Which keys a query sees, against the rule said position by position."""

from __future__ import annotations

import pytest
import torch

from workbench.kernels.reach import Reach, Spans


def held(row: int, rows: int, newest: int) -> int | None:
    """The position that a row of a slot holds when ``newest`` is the last one written."""
    found = [p for p in range(newest + 1) if p % rows == row]
    return found[-1] if found else None


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("spare", [0, 1, 6])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_ring_shows_the_window(window: int, spare: int, tokens: int) -> None:
    rows = window + tokens - 1 + spare
    first = torch.arange(0, 3 * rows)
    reach = Reach(torch.zeros_like(first), first, span=rows, window=window)
    seen = reach.visible(tokens, rows)
    assert seen.shape == (len(first), tokens, rows)
    for b, start in enumerate(first.tolist()):
        for t in range(tokens):
            at = start + t
            wanted = {p % rows for p in range(max(0, at - window + 1), at + 1)}
            assert set(seen[b, t].nonzero().flatten().tolist()) == wanted
            positions = {held(r, rows, start + tokens - 1) for r in wanted}
            assert positions == set(range(max(0, at - window + 1), at + 1)), "and they are there"


def test_a_full_cache_shows_everything_up_to_the_query() -> None:
    first = torch.tensor([0, 4, 9])
    seen = Reach(torch.tensor([2, 0, 1]), first, span=12, window=None).visible(3, 64)
    for b, start in enumerate(first.tolist()):
        for t in range(3):
            assert seen[b, t].tolist() == [row <= start + t for row in range(12)]


def test_the_mask_is_the_visibility_a_row_for_each_head_of_a_group() -> None:
    reach = Reach(torch.tensor([0, 1]), torch.tensor([2, 7]), span=6, window=3)
    mask = reach.mask(2, 6, 4, torch.bfloat16)
    assert mask is not None
    assert mask.shape == (2, 1, 8, 6)
    assert mask.dtype == torch.bfloat16
    seen = reach.visible(2, 6)
    for head in range(4):  # token-major: the heads of a token lie together
        for t in range(2):
            row = mask[:, 0, t * 4 + head]
            assert torch.equal(row == 0, seen[:, t])
            assert bool((row[~seen[:, t]] == float("-inf")).all())
    assert reach.mask(2, 6, 4, torch.bfloat16) is mask, "made once"
    assert reach.mask(2, 6, 2, torch.bfloat16) is not mask


def test_a_sequence_alone_needs_no_mask_for_one_token() -> None:
    reach = Reach(torch.tensor([0]), torch.tensor([5]), span=6, window=None, alone=True)
    assert reach.mask(1, 64, 2, torch.float32) is None
    mask = reach.mask(2, 64, 1, torch.float32)
    assert mask is not None
    assert bool(reach.visible(1, 64).all()), "as it says"


@pytest.mark.parametrize("window", [None, 1, 3])
def test_spans(window: int | None) -> None:
    spans = Spans([2, 0, 3], [2, 4, 7], window)
    assert spans.q_starts.tolist() == [0, 2, 2, 5]
    assert spans.k_starts.tolist() == [0, 2, 6, 13]
    assert spans.q_starts.dtype == spans.k_starts.dtype == torch.int64
    assert not spans.uniform
    assert Spans([3, 3], [4, 4], window).uniform
    mask = spans.mask(3, 7, torch.device("cpu"))
    for i in range(3):
        at = 7 - 3 + i
        low = 0 if window is None else max(0, at - window + 1)
        assert mask[i].nonzero().flatten().tolist() == list(range(low, at + 1))
