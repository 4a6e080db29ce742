"""Launches of prefill attention that a plan chooses on a GPU, run here through the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.kernels import oracle, reference
from workbench.kernels.gates import errors
from workbench.kernels.reach import Spans
from workbench.kernels.triton_prefill import PrefillPlan, launch_prefill, prefill_attention

BF16 = torch.bfloat16
# What an H200 gets for up to 16 keys, and the widest tile that the same kernel is given.
SMALL = PrefillPlan(block_m=16, block_n=16, splits=1, warps=4, stages=1, bulk=False)
WIDE = PrefillPlan(block_m=64, block_n=64, splits=1, warps=4, stages=3)
pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(keys: int, heads: int, groups: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((keys, heads, 64), (keys, groups, 64), (keys, groups, 64))
    q, k, v = (torch.randn(shape, generator=generator).to(BF16) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("lengths", [[1], [7], [16], [3, 0, 11], [16, 5]])
@pytest.mark.parametrize("window", [None, 4, 16, 512])
@pytest.mark.parametrize("plan", [SMALL, WIDE], ids=["small", "wide"])
def test_few_keys_in_small_and_wide_tiles(
    lengths: list[int], window: int | None, plan: PrefillPlan
) -> None:
    """Six heads a group: a tile of 16 rows ends inside a token's heads."""
    q, k, v = drawn(sum(lengths), 12, 2, len(lengths) + sum(lengths))
    spans = Spans(lengths, lengths, window)
    exact = oracle.prefill_attention(q, k, v, spans)["o"]
    own = errors(reference.prefill_attention(q, k, v, spans), exact)
    found = errors(launch_prefill(q, k, v, spans, plan), exact)
    assert found.relative <= 1.25 * own.relative + 2.0**-13
    assert found.element <= 2.5 * own.element + 2.0**-10


@pytest.mark.parametrize("window", [20, 21, 512])
def test_a_window_that_hides_nothing_changes_nothing(window: int) -> None:
    """Twenty keys: a query sees all before it from a window of 20 on, not with one of 19."""
    q, k, v = drawn(20, 4, 1, 7)
    whole = prefill_attention(q, k, v, Spans([20], [20], None))
    assert torch.equal(prefill_attention(q, k, v, Spans([20], [20], window)), whole)
    assert not torch.equal(prefill_attention(q, k, v, Spans([20], [20], 19)), whole)
