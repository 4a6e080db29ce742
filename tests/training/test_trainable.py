"""The model in training: its first weights, and routers whose load is balanced."""

import numpy as np
import pytest
import torch

from workbench.kernels import reference
from workbench.model.beam import Beam, Router
from workbench.model.config import BeamConfig
from workbench.training.trainable import CountingRouter, balance, build

CPU = torch.device("cpu")


def routers(beam: Beam) -> list[CountingRouter]:
    return [m for m in beam.modules() if isinstance(m, CountingRouter)]


def test_a_counting_router_is_the_router_and_counts(small_config: BeamConfig) -> None:
    config = small_config.replace(n_group=4, topk_group=2)
    counting, plain = CountingRouter(config), Router(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in ("weight", "correction_bias"):
            values = torch.randn(getattr(plain, name).shape, generator=generator)
            getattr(plain, name).copy_(values)
            getattr(counting, name).copy_(values)
    x = torch.randn(50, config.hidden_size, generator=generator)
    kernels = Beam(config).kernels().layers[1]
    expected_ids, expected_weights = plain(x, kernels)
    for times in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):  # routers stay in float32 all the same
            ids, weights = counting(x, kernels)
        assert torch.equal(ids, expected_ids)
        assert torch.equal(weights, expected_weights)
        counted = np.bincount(ids.flatten().numpy(), minlength=8)
        assert counting.load.tolist() == (times * counted).tolist()
    assert counting.load.sum() == 2 * 50 * config.num_experts_per_tok


def test_bias_moves_against_the_load(small_config: BeamConfig) -> None:
    beam = build(small_config, 0, CPU)
    first, second = routers(beam)
    first.load.copy_(torch.tensor([70.0, 10, 10, 10, 0, 0, 0, 0]))
    second.load.fill_(5.0)
    balance(beam, 0.01)
    # Mean load 12.5: expert 0 goes down, all others up, then the mean change is taken off.
    change = np.array([-0.01] + 7 * [0.01])
    expected = change - change.mean()
    np.testing.assert_allclose(first.correction_bias.detach().numpy(), expected, atol=1e-8)
    assert not second.correction_bias.any(), "an even load moves nothing"
    assert not first.load.any()
    assert not second.load.any()


def test_a_skewed_load_is_evened_out_and_no_expert_stays_dead(small_config: BeamConfig) -> None:
    beam = build(small_config, 0, CPU)
    router = routers(beam)[0]
    generator = torch.Generator().manual_seed(1)
    tilt = torch.linspace(-1.5, 1.5, 8)  # scores from 0.18 to 0.82 whatever the token
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = tilt
        router.weight[:, 1:] = torch.randn(8, 63, generator=generator) * 0.02

    def loads() -> np.ndarray:
        x = torch.randn(400, small_config.hidden_size, generator=generator)
        x[:, 0] = 1.0
        router(x, beam.kernels().layers[1])
        return router.load.numpy().copy()

    before = loads()
    assert (before[:4] == 0).all(), "half of the experts are dead to begin with"
    for _ in range(100):
        balance(beam, 0.01)
        loads()
    balance(beam, 0.01)
    after = loads()
    assert after.min() > 0.5 * after.mean()
    assert after.max() < 1.5 * after.mean()
    # The bias steers the choice only: the weights of what is chosen come from the scores.
    bias = router.correction_bias.detach().numpy()
    assert (np.diff(bias) < 0).all(), "the rarer an expert by its scores, the higher its bias"
    assert bias.mean() == pytest.approx(0, abs=1e-6)


def test_first_weights_depend_on_the_seed_alone(small_config: BeamConfig) -> None:
    one, same, other = (build(small_config, seed, CPU).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embed_tokens"], other["embed_tokens"])


def test_first_weights_have_the_scale_that_the_stream_needs(small_config: BeamConfig) -> None:
    beam = build(small_config, 0, CPU)
    values = {n: p.detach() for n, p in beam.named_parameters()}
    assert values["embed_tokens"].std() == pytest.approx(1, rel=0.05)
    assert values["lm_head"].std() == pytest.approx(0.02, rel=0.05)
    for name, fan_in in (
        ("layers.0.attention.qkvg", 64),
        ("layers.0.attention.o_proj", 64),
        ("layers.0.mlp.down", 96),
        ("layers.1.mlp.gate_up", 64),
        ("layers.1.mlp.down", 32),  # [experts, width, hidden], transposed
        ("layers.1.mlp.router.weight", 64),
    ):
        assert values[name].std() == pytest.approx(fan_in**-0.5, rel=0.1), name
    assert all((values[n] == 1).all() for n in values if n.endswith("norm"))
    frozen = [n for n, p in beam.named_parameters() if not p.requires_grad]
    assert frozen == [f"layers.{i}.mlp.router.correction_bias" for i in (1, 2)]
    assert not any(values[n].any() for n in (*frozen, "layers.2.attention.gate_bias"))


def test_training_computes_what_inference_computes(small_config: BeamConfig) -> None:
    """The trained weights in a plain Beam, whose experts are computed another way."""
    trained = build(small_config, 0, CPU)
    with torch.no_grad():
        for router in routers(trained):
            router.correction_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    plain = Beam(small_config)
    plain.load_state_dict(trained.state_dict())
    ids = torch.randint(0, 400, (3, 40), generator=torch.Generator().manual_seed(2))
    assert ids.numel() > reference.DENSE_EXPERTS_MAX_TOKENS, "the grouped form must run"
    with torch.no_grad():
        torch.testing.assert_close(
            trained.sequence_logits(ids), plain.sequence_logits(ids), rtol=0, atol=1e-4
        )
