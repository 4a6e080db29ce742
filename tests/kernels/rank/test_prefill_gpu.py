"""A rank's prefill at full width on a GPU: every form against float64, and graphs that repeat."""

from __future__ import annotations

import pytest
import torch

from workbench.kernels.rank import RankWeights
from workbench.kernels.rank.prefill_bench import LIMIT
from workbench.kernels.rank.prefill_check import check_prefill, sample_rows
from workbench.kernels.rank.prefill_state import PrefillState
from workbench.kernels.rank.prefill_step import FORMS, LAYOUTS, PrefillStep, captured
from workbench.model.presets import resolve

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LAYERS = 5  # three dense ones, a full sparse one, a sliding sparse one


@pytest.fixture(scope="module")
def weights() -> RankWeights:
    return RankWeights.random(resolve("beam-501b").config, 8, layers=LAYERS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("sequences", "tokens", "context"), [(3, 77, 0), (2, 700, 1000), (5, 700, 5000), (1, 1, 600)]
)
def test_every_layer_is_the_references(
    form: str, sequences: int, tokens: int, context: int, weights: RankWeights
) -> None:
    weights.relayout(LAYOUTS.get(form, weights.down_layout))
    state = PrefillState(weights, sequences, tokens, context)
    with torch.inference_mode():
        step = PrefillStep(weights, state, form, watch=sample_rows(state, 5))
        run = captured(step)
        assert check_prefill(step, weights, state, run).failures(LIMIT) == []


def test_a_replay_gives_the_same_bits(weights: RankWeights) -> None:
    weights.relayout("HI")
    state = PrefillState(weights, 2, 600, 100)
    with torch.inference_mode():
        run = captured(PrefillStep(weights, state))
        found = []
        for _ in range(2):
            state.poison()
            run()
            found.append((state.logits.clone(), state.k[4].clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
