"""The closed forms against the model's own operations, the measured effects against plain loops."""

import math

import numpy as np
import pytest
import torch

import workbench
from workbench.errors import InspectionError, PromptError
from workbench.kernels import reference
from workbench.model import effects
from workbench.model.beam import Beam
from workbench.model.inspect import Capture

PROMPT = "def f(x):\n    return x + 1\n"


def test_ssmax_scale_is_the_models() -> None:
    positions = [0, 1, 511, 2047, 1_048_575]
    models = reference.ssmax_scale(torch.tensor(positions)).flatten().tolist()
    assert [effects.ssmax_scale(p) for p in positions] == pytest.approx(models, rel=1e-6)


def test_after_one_wavelength_a_pair_stands_where_it_was() -> None:
    config = workbench.resolve("beam-501b").config
    waves = effects.rope_wavelengths(config)
    assert len(waves) == 64
    table = reference.rope_table(4096, config.head_dim, config.rope_theta, "cpu")
    for pair in (5, 20, 40):  # rows are whole positions: off by up to half of one
        step = 2 * math.pi / waves[pair]  # radians a position
        whole, half = round(waves[pair]), round(waves[pair] / 2)
        assert float(table[whole, pair]) == pytest.approx(1, abs=step**2 / 8 + 1e-6)
        assert float(table[half, pair]) == pytest.approx(-1, abs=step**2 / 8 + 1e-6)


def test_what_survives_is_what_a_chain_of_adds_leaves() -> None:
    config = workbench.resolve("beam-501b").config
    adds = effects.residual_adds(config)
    assert [a.number for a in adds] == list(range(2, 106))
    assert (adds[0].layer, adds[0].sublayer) == (0, "attention")
    assert (adds[-1].layer, adds[-1].sublayer) == (51, "mlp")
    for tracked in (2, 3, 50, 105):
        stream = 0.0  # the part of the tracked sublayer's output, 1, that the stream holds
        for number in range(2, 106):
            new, old = reference.depth_scale(number)
            stream = stream * old + (new if number == tracked else 0.0)
        assert adds[tracked - 2].survives == pytest.approx(stream, rel=1e-12)
        assert adds[tracked - 2].survives == pytest.approx(1 / math.sqrt(105), rel=1e-12)


def test_parameter_groups_hold_every_parameter_once() -> None:
    groups = effects.parameter_groups(workbench.resolve("beam-501b").config)
    assert round(sum(g.total for g in groups) / 1e9, 2) == 501.01
    assert round(sum(g.active for g in groups) / 1e9, 2) == 23.18
    experts = [g for g in groups if g.part == "experts"]
    assert sorted(layer for g in experts for layer in g.layers) == list(range(3, 52))
    # 8 of 256 experts, three matrices of 5120 x 2560 each, seven layers a group.
    assert {g.active for g in experts} == {7 * 8 * 3 * 5120 * 2560}
    full = next(g for g in groups if g.attention == "full_attention")
    assert full.layers == (3, 9, 15, 21, 27, 33, 39, 45, 51)


def test_stream_rms_leaves_the_first_token_out() -> None:
    hidden = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    expected = [np.sqrt(np.mean(hidden.numpy()[i, 1:] ** 2)) for i in range(2)]
    assert effects.stream_rms(hidden) == pytest.approx(expected)
    alone = hidden[:, :1]
    assert effects.stream_rms(alone)[0] == pytest.approx(np.sqrt((0 + 1 + 4 + 9) / 4))


def test_attention_reach_of_maps_made_by_hand() -> None:
    itself = effects.attention_reach(torch.eye(4), window=2)
    assert (itself.distance, itself.entropy, itself.itself) == (0, 0, 1)
    assert (itself.first, itself.beyond) == (0, 0)
    first = torch.zeros(4, 4)
    first[:, 0] = 1
    back = effects.attention_reach(first, window=2)
    assert back.distance == pytest.approx((1 + 2 + 3) / 3)
    assert (back.first, back.itself) == (1, 0)
    assert back.beyond == pytest.approx(2 / 3)  # queries 2 and 3
    even = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert effects.attention_reach(even, window=9).entropy == pytest.approx(math.log(2))
    alone = effects.attention_reach(torch.ones(1, 1), window=2)
    assert (alone.distance, alone.first, alone.itself) == (0, 1, 1)


def test_attention_reach_counts_no_weight_twice() -> None:
    maps = torch.rand(9, 9, generator=torch.Generator().manual_seed(3)).tril()
    maps /= maps.sum(-1, keepdim=True)
    reach = effects.attention_reach(maps, window=4)
    rows = maps.double().tolist()
    assert reach.first == pytest.approx(sum(row[0] for row in rows[1:]) / 8)
    assert reach.itself == pytest.approx(sum(rows[q][q] for q in range(1, 9)) / 8)
    assert reach.first + reach.itself <= 1
    far = sum(rows[q][k] for q in range(1, 9) for k in range(9) if q - k >= 4)
    assert reach.beyond == pytest.approx(far / 8)


def nll(logits: torch.Tensor, ids: tuple[int, ...]) -> float:
    """Mean next-token loss, in numpy and float64."""
    z = logits.double().numpy()[:-1]
    p = z - z.max(-1, keepdims=True)
    p = p - np.log(np.exp(p).sum(-1, keepdims=True))
    return float(-np.mean([p[t, ids[t + 1]] for t in range(len(ids) - 1)]))


def test_ablation_measures_each_part(beam: Beam) -> None:
    whole = workbench.capture(beam, PROMPT)
    effect = effects.ablation(beam, PROMPT, experts=[2])
    assert effect.tokens == len(whole.token_ids) - 1
    assert effect.loss == pytest.approx(nll(whole.logits, whole.token_ids), abs=1e-6)
    assert len(effect.layers) == 5
    assert list(effect.experts) == [2]

    # A layer that adds nothing: its output scale is 0 and the stream's is 1.
    for layer in (0, 4):
        scales = beam.layers[layer].scales
        beam.layers[layer].scales = ((0.0, 1.0), (0.0, 1.0))
        try:
            without = nll(workbench.capture(beam, PROMPT).logits, whole.token_ids)
        finally:
            beam.layers[layer].scales = scales
        assert effect.layers[layer] == pytest.approx(without, abs=1e-5)
        assert effect.layer_effects()[layer] == pytest.approx(without - effect.loss, abs=1e-5)

    # An expert whose bias is minus infinity is never among the best.
    bias = beam.layers[2].mlp.router.correction_bias
    kept = bias.clone()
    for expert in (0, 7):
        with torch.no_grad():
            bias[expert] = -torch.inf
            without = nll(workbench.capture(beam, PROMPT).logits, whole.token_ids)
            bias.copy_(kept)
        assert effect.experts[2][expert] == pytest.approx(without, abs=1e-5)
        assert effect.expert_effects()[2][expert] == pytest.approx(without - effect.loss, abs=1e-5)


def test_ablation_leaves_the_model_as_it_was(beam: Beam, seen: Capture) -> None:
    effects.ablation(beam, PROMPT)
    again = workbench.capture(beam, seen.token_ids)
    assert torch.equal(again.logits, seen.logits)


def test_ablation_needs_something_to_predict(beam: Beam) -> None:
    with pytest.raises(InspectionError, match="at least two tokens"):
        effects.ablation(beam, [5])
    with pytest.raises(PromptError, match="empty"):
        effects.ablation(beam, "")
    with pytest.raises(InspectionError, match="layer 0 has a dense MLP"):
        effects.ablation(beam, PROMPT, experts=[0])
