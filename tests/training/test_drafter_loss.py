"""The losses of a drafter against sums written out slot by slot."""

import math

import pytest
import torch
from torch import Tensor

from workbench.kernels import reference_dflash2
from workbench.model.beam import Beam
from workbench.model.drafter_config import DFlash2Config
from workbench.spec.drafter import Drafter
from workbench.spec.selector import walk
from workbench.training.distil_settings import DistilSettings
from workbench.training.drafter_loss import (
    LossTerms,
    block_losses,
    dpace_weights,
    slot_weights,
)
from workbench.training.drafter_start import drafter_optimizers, start

BLOCKS, SLOTS = 6, 4


def case(drafter: Drafter) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, anchors, labels (some of them likely), live (some slots do not count)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BLOCKS, SLOTS, 64, generator=generator)
    anchors = torch.randint(400, (BLOCKS,), generator=generator)
    labels = torch.randint(400, (BLOCKS, SLOTS), generator=generator)
    with torch.no_grad():
        ids, _ = drafter.candidates(hidden)
    labels[::2] = ids[::2, :, 2]
    live = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
    live[1, 2:] = False
    live[4] = False
    return hidden, anchors, labels, live


def written_out(
    drafter: Drafter, hidden: Tensor, anchors: Tensor, labels: Tensor, live: Tensor, inject: bool
) -> tuple[float, float, float]:
    """(backbone, selector, recall) in float64, one slot at a time."""
    s, cap = drafter.selector, 30.0
    backbone = weights = selector = ranked = found = count = 0.0
    for b in range(BLOCKS):
        before = int(anchors[b])
        for k in range(SLOTS):
            label, h = int(labels[b, k]), hidden[b, k].double()
            raw = drafter.target.lm_head.double() @ h
            logits = cap * torch.tanh(raw / cap)
            if live[b, k]:
                weight = math.exp(-k / 2.5)
                weights += weight
                backbone += weight * float(logits.logsumexp(0) - logits[label])
                count += 1
                ids = logits.topk(6).indices.tolist()
                found += label in ids or inject
                if label not in ids and inject:
                    ids[-1] = label
                if label in ids:
                    g = s.projection.double() @ h
                    scores = torch.stack(
                        [
                            logits[c]
                            + (s.predecessor[before].double() * g * s.successor[c].double()).sum()
                            for c in ids
                        ]
                    )
                    selector += weight * (scores.logsumexp(0) - scores[ids.index(label)]).item()
                    ranked += weight
            before = label
    return backbone / weights, selector / ranked, found / count


@pytest.mark.parametrize("inject", [False, True])
def test_losses_are_the_weighted_means(drafter: Drafter, inject: bool) -> None:
    hidden, anchors, labels, live = case(drafter)
    terms = LossTerms(decay=2.5, selector_weight=0.5, inject=inject)
    losses = block_losses(drafter, hidden, anchors, labels, live, terms)
    backbone, selector, recall = written_out(drafter, hidden, anchors, labels, live, inject)
    assert float(losses.backbone) == pytest.approx(backbone, rel=1e-5)
    assert float(losses.selector) == pytest.approx(selector, rel=1e-5)
    assert float(losses.recall) == pytest.approx(recall, rel=1e-6)
    assert losses.total.item() == pytest.approx(backbone + 0.5 * selector, rel=1e-5)
    if not inject:
        assert 0.3 < recall < 0.9, "the case has labels of both kinds"


def test_slots_that_do_not_count_have_no_influence(drafter: Drafter) -> None:
    hidden, anchors, labels, live = case(drafter)
    base = block_losses(drafter, hidden, anchors, labels, live, LossTerms())
    other = torch.where(live, labels, (labels + 7) % 400)
    again = block_losses(drafter, hidden, anchors, other, live, LossTerms())
    assert again.total.item() == base.total.item()
    none = block_losses(drafter, hidden, anchors, labels, torch.zeros_like(live), LossTerms())
    assert none.total.item() == 0.0


def test_the_teacher_forced_score_is_the_edge_behind_the_right_candidate(
    drafter: Drafter,
) -> None:
    """Where the previous label is a candidate, training's score is serving's edge."""
    hidden, anchors, labels, live = case(drafter)
    with torch.no_grad():
        ids, unary = drafter.candidates(hidden)
        edges = drafter.edges(hidden, ids, unary, anchors)
    compared = 0
    for b in range(BLOCKS):
        for k in range(SLOTS):
            only = torch.zeros_like(live)
            only[b, k] = True
            before = 0 if k == 0 else (ids[b, k - 1] == labels[b, k - 1]).nonzero().flatten()
            gold = (ids[b, k] == labels[b, k]).nonzero().flatten()
            if (k and not len(before)) or not len(gold):
                continue
            scores = edges[b, k, int(before)]
            expected = float(scores.logsumexp(0) - scores[int(gold)])
            losses = block_losses(drafter, hidden, anchors, labels, only, LossTerms())
            assert float(losses.selector) == pytest.approx(expected, abs=2e-5)
            compared += 1
    assert compared >= 8


def test_soft_targets_mix_in_the_targets_distribution(drafter: Drafter) -> None:
    hidden, anchors, labels, live = case(drafter)
    plain = block_losses(drafter, hidden, anchors, labels, live, LossTerms())
    sure = torch.zeros(BLOCKS, SLOTS, 400).scatter(-1, labels[..., None], 60.0)
    same = block_losses(
        drafter, hidden, anchors, labels, live, LossTerms(soft_targets=0.6), teacher=sure
    )
    assert same.total.item() == pytest.approx(plain.total.item(), rel=1e-6)
    flat = block_losses(
        drafter, hidden, anchors, labels, live, LossTerms(soft_targets=1.0), teacher=sure * 0
    )
    logs = drafter.logits(hidden).log_softmax(-1).mean(-1)
    weights = slot_weights(SLOTS, 4.0) * live
    expected = -float((weights * logs).sum() / weights.sum())
    assert float(flat.backbone) == pytest.approx(expected, rel=1e-5)


def test_slot_weights() -> None:
    assert slot_weights(3, 4.0).tolist() == pytest.approx([1.0, 0.778801, 0.606531], abs=1e-6)


def test_dpace_weights_are_the_gradient_of_the_smoothed_accepted_length() -> None:
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(5, 7, generator=generator)
    live = torch.ones(5, 7, dtype=torch.bool)
    live[2, 4:] = False
    smooth = (0.5 * probability + 0.5).where(live, 1.0)
    logs = smooth.log().requires_grad_()
    length = (logs.cumsum(1).exp() * live).sum()  # sum over m of the product of r up to m
    length.backward()
    weights = dpace_weights(probability, live, 0.5)
    assert logs.grad is not None
    torch.testing.assert_close(weights * live, logs.grad * live)
    assert weights[0, 0] > weights[0, 3] > weights[0, 6] > 0


def test_a_new_drafter_selects_what_its_backbone_prefers(
    drafter_config: DFlash2Config, target: Beam
) -> None:
    drafter = start(drafter_config, target, 0)
    hidden, anchors, labels, live = case(drafter)
    with torch.no_grad():
        proposal = walk(drafter, hidden, anchors)
    assert torch.equal(proposal.token_ids, drafter.logits(hidden).argmax(-1))
    assert torch.equal(proposal.scores, proposal.unary)
    losses = block_losses(drafter, hidden, anchors, labels, live, LossTerms())
    losses.total.backward()
    s = drafter.selector
    assert s.successor.grad is not None
    assert s.successor.grad.abs().sum() > 0
    assert s.predecessor.grad is not None
    assert not s.predecessor.grad.any(), "nothing flows through a codebook of zeros"


def test_convolutions_of_a_new_drafter_change_nothing(
    drafter_config: DFlash2Config, target: Beam
) -> None:
    drafter = start(drafter_config, target, 0)
    x = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    for layer in drafter.layers:
        for name in ("attention_conv", "mlp_conv"):
            conv = layer.get_submodule(name)
            for side, delta in enumerate(conv.coefficients(x)):  # type: ignore[operator]
                out = drafter.kernels.dynamic_conv(x, delta, conv.base[side], 5)  # type: ignore[index]
                assert torch.equal(out, x)


def test_training_convolutions_are_the_reference_and_differentiable(drafter: Drafter) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 15, 64, generator=generator)
    delta = torch.randn(15, 3, 4, generator=generator)
    base = torch.randn(3, 64, generator=generator)
    weight = torch.rand(64, generator=generator)
    kernels = drafter.kernels
    out = kernels.dynamic_conv(x, delta, base, 5)
    expected = reference_dflash2.dynamic_conv(x, delta, base, 5)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    pair = kernels.conv_residual_norm(x, delta, base, residual, weight, 1e-6, 5)
    expected_pair = reference_dflash2.conv_residual_norm(x, delta, base, residual, weight, 1e-6, 5)
    for mine, theirs in zip(pair, expected_pair, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    wide = [t.double().requires_grad_() for t in (x, delta, base)]

    def conv(x: Tensor, delta: Tensor, base: Tensor) -> Tensor:
        # The rows in float64, as gradcheck wants; the function itself computes in float32.
        kernel = base.unflatten(-1, (4, 16)) + delta[..., None]
        rows = x.unflatten(-1, (4, 16))
        out = [
            sum(kernel[i, t] * rows[i - t] for t in range(3) if i % 5 >= t)  # type: ignore[misc]
            for i in range(15)
        ]
        return torch.stack(out).flatten(1)  # type: ignore[arg-type]

    upstream = torch.randn(15, 64, generator=generator)
    (conv(*wide) * upstream.double()).sum().backward()
    narrow = [t.clone().requires_grad_() for t in (x, delta, base)]
    (kernels.dynamic_conv(*narrow, 5) * upstream).sum().backward()
    for mine, theirs in zip(narrow, wide, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad.float(), atol=1e-4, rtol=1e-4)


def test_every_parameter_has_one_optimizer(drafter: Drafter) -> None:
    settings = DistilSettings(
        drafter={}, target="t", output="o", state="s", corpus="c",  # type: ignore[arg-type]
        responses=1, rows=1, response=9, steps=1, batch=1, anchors=1,
    )  # fmt: skip
    optimizers = drafter_optimizers(drafter, settings)
    groups = [g for o in optimizers for g in o.param_groups]
    held = [id(p) for g in groups for p in g["params"]]
    assert sorted(held) == sorted(id(p) for p in drafter.parameters())
    for group in optimizers[0].param_groups:
        rows, columns = group["block"]
        assert all(p.numel() % (rows * columns) == 0 for p in group["params"])
    shapes = {id(p): n for n, p in drafter.named_parameters()}
    assert {shapes[id(p)].rsplit(".", 1)[-1] for g in optimizers[0].param_groups
            for p in g["params"]} == {"fc", "qkv", "o_proj", "gate_up", "down"}  # fmt: skip
