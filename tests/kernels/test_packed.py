"""Packed weights against float64 products, and every way they must step aside."""

from __future__ import annotations

import pytest
import torch

import workbench
from workbench.kernels import packed, reference
from workbench.model import beam as beam_module

pytestmark = pytest.mark.skipif(not packed.available(), reason="torch without oneDNN operators")


def weight(rows: int, columns: int) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(rows)
    return torch.nn.Parameter(torch.randn(rows, columns, generator=generator), False)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33, 300])
@pytest.mark.parametrize("shape", [(768, 256), (96, 40), (1, 3)])
def test_packed_product_is_the_product(rows: int, shape: tuple[int, int]) -> None:
    w = weight(*shape)
    w.packed = packed.pack(w)  # type: ignore[attr-defined]
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
    exact = x.double() @ w.double().T
    error = (reference.linear(x, w).double() - exact).norm() / exact.norm()
    assert error < 1e-6
    assert w.packed.usable(x)  # type: ignore[attr-defined]


def test_a_changed_weight_is_not_read_from_its_old_packed_form() -> None:
    w, x = weight(16, 8), torch.ones(2, 8)
    w.packed = packed.pack(w)  # type: ignore[attr-defined]
    with torch.no_grad():
        w.mul_(3.0)
    assert torch.allclose(reference.linear(x, w), x @ w.T)
    assert not w.packed.usable(x)  # type: ignore[attr-defined]


def test_gradients_go_through_the_plain_product() -> None:
    w = weight(16, 8)
    w.packed = packed.pack(w)  # type: ignore[attr-defined]
    x = torch.ones(2, 8, requires_grad=True)
    reference.linear(x, w).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, w.sum(0).expand(2, 8))


def test_other_dtypes_and_inference_tensors_are_not_packed() -> None:
    assert packed.pack(weight(4, 4).to(torch.bfloat16)) is None
    with torch.inference_mode():
        inside = torch.randn(4, 4)
    assert packed.pack(inside) is None


def test_model_agrees_with_and_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(16, 4096, (40,), generator=torch.Generator().manual_seed(0))
    fast = workbench.load("beam-tiny", device="cpu", dtype=torch.float32)
    monkeypatch.setattr(packed, "available", lambda: False)
    plain = workbench.load("beam-tiny", device="cpu", dtype=torch.float32)
    packs = [getattr(p, "packed", None) is not None for p in fast.parameters()]
    # 9 layers x (qkvg, o_proj, gate_up, down) and the head
    assert sum(packs) == 37
    assert not any(getattr(p, "packed", None) for p in plain.parameters())
    with torch.inference_mode():
        for rows in (1, 8, 40):
            difference = fast.sequence_logits(ids[:rows]) - plain.sequence_logits(ids[:rows])
            assert difference.abs().max() < 1e-4


def test_large_models_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_module, "PACK_BYTES", 1 << 20)
    beam = workbench.load("beam-tiny", device="cpu", dtype=torch.float32)
    assert beam.pack() == 0
    assert not any(hasattr(p, "packed") for p in beam.parameters())


def test_a_weight_that_is_trained_is_not_used_packed() -> None:
    w = torch.nn.Parameter(torch.randn(8, 4))
    w.packed = packed.pack(w)  # type: ignore[attr-defined]
    reference.linear(torch.randn(3, 4), w).sum().backward()
    assert w.grad is not None
    with torch.no_grad():
        assert w.packed.usable(torch.randn(3, 4))  # type: ignore[attr-defined]
