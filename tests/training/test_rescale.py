"""Rescaling leaves the function of the model alone and only touches exponents."""

from __future__ import annotations

import torch

import workbench
from workbench.training.rescale import rescale_outputs


def test_outputs_come_to_scale_one_and_logits_stay() -> None:
    beam = workbench.load("beam-tiny", device="cpu", dtype=torch.float32)
    ids = torch.randint(16, 4096, (120,), generator=torch.Generator().manual_seed(3))
    before = {name: p.clone() for name, p in beam.named_parameters()}
    logits = beam.sequence_logits(ids)
    with torch.no_grad():
        beam.get_parameter("layers.3.mlp.down").mul_(64.0)
        beam.get_parameter("layers.0.attention.o_proj").mul_(1 / 32)
    exponents = rescale_outputs(beam, ids)
    assert (beam.sequence_logits(ids) - logits).abs().max() < 2e-3  # the norm's eps is not scaled
    assert set(exponents) == {
        f"layers.{i}.{w}" for i in range(9) for w in ("attention.o_proj", "mlp.down")
    }
    for name, exponent in rescale_outputs(beam, ids).items():
        assert abs(exponent) <= 1, name  # at most the rounding of a half
    for name, p in beam.named_parameters():
        if name not in exponents:
            assert torch.equal(p, before[name])
        else:
            ratio = (p / before[name])[before[name] != 0]
            assert torch.equal(ratio.frexp().mantissa, torch.full_like(ratio, 0.5)), name
