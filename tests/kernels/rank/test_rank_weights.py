"""Weights and state of a rank: sizes by hand, what fits, what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from workbench.errors import KernelError
from workbench.kernels.rank import RankState, RankWeights
from workbench.kernels.rank import weights as rank_weights
from workbench.kernels.rank.fp8 import quantisation_error
from workbench.kernels.rank.state import rope_rows
from workbench.model.presets import resolve

from .conftest import Make, small_config


def test_the_full_rank_has_the_bytes_counted_by_hand() -> None:
    full = RankWeights.random(resolve("beam-501b").config, 8, device="meta")
    h, bf16, fp32 = 5120, 2, 4
    small = (2 * 128 + 6 + 4 * h) * bf16  # qk norms, gate biases, four norms
    attention = (1792 * h + h * 768) * bf16 + small
    router = 256 * h * fp32 + 256 * fp32
    expert = (640 * h + h * 320) * bf16
    dense = (3072 * h + h * 1536) * bf16
    head = 20480 * h * bf16
    total = 52 * attention + 49 * (router + 256 * expert) + 3 * dense + 2 * head + h * bf16
    assert full.bytes == total
    assert full.bytes / 2**30 == pytest.approx(116.88, abs=0.01)
    step = 52 * attention + 49 * (router + 8 * expert) + 3 * dense + head + 2 * h * bf16
    assert full.step_bytes() == step
    assert step == pytest.approx(5.83e9, rel=1e-3)
    assert full.step_bytes(57) - full.step_bytes() == 49 * 49 * expert
    assert full.step_bytes(batch=8) - full.step_bytes() == 7 * h * bf16


def test_a_full_layer_reads_all_keys_and_a_sliding_one_its_window() -> None:
    full = RankWeights.random(resolve("beam-501b").config, 8, device="meta")
    row = 2 * 128 * 2  # key and value, one KV head, BF16
    assert full.cache_bytes(4096) == row * (9 * 4097 + 43 * 512)
    assert full.cache_bytes(99) == row * 52 * 100
    assert full.cache_bytes(4096, batch=3) == 3 * full.cache_bytes(4096)


def test_values_are_as_documented_and_follow_the_seed() -> None:
    one = RankWeights.random(small_config(), 2, device="cpu", seed=5)
    same = RankWeights.random(small_config(), 2, device="cpu", seed=5)
    other = RankWeights.random(small_config(), 2, device="cpu", seed=6)
    for a, b in zip(one.tensors(), same.tensors(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.lm_head, other.lm_head)
    sparse = one.layers[1]
    assert sparse.router is not None
    assert sparse.router.dtype == torch.float32
    assert sparse.qkvg.dtype == torch.bfloat16
    assert float(sparse.gate_up.float().std()) == pytest.approx(0.02, rel=0.05)
    assert float(one.embed.float().std()) == pytest.approx(1, rel=0.05)
    assert float(sparse.input_norm.float().mean()) == pytest.approx(1, abs=0.05)
    assert one.layers[0].scales == ((2**-0.5, 0.5**0.5), (3**-0.5, (2 / 3) ** 0.5))
    assert one.layers[0].router is None
    assert sparse.gate_up.shape == (12, 48, 96)
    assert sparse.down.shape == (12, 96, 24)


def test_the_other_layout_lies_in_the_same_memory() -> None:
    rank = RankWeights.random(small_config(), 2, device="cpu")
    before = [layer.down.clone() for layer in rank.layers]
    places = [layer.down.data_ptr() for layer in rank.layers]
    rank.relayout("IH")
    assert rank.down_layout == "IH"
    for layer, old, place in zip(rank.layers, before, places, strict=True):
        assert layer.down.data_ptr() == place
        assert layer.down.is_contiguous()
        assert torch.equal(layer.down, old if layer.dense else old.mT)
        assert layer.dense or rank.down_ih(layer) is layer.down
    rank.relayout("HI")
    for layer, old in zip(rank.layers, before, strict=True):
        assert torch.equal(layer.down, old)
    assert rank.down_ih(rank.layers[1]).shape == (12, 24, 96)


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("beam-501b").config
    # Of 24 GB an eighth is kept; embedding and head 0.42, dense layers 0.074, sparse ones 2.55 GB:
    # (21 - 0.42 - 3 x 0.074) / 2.55 = 7.99, so three dense and seven sparse ones.
    monkeypatch.setattr(rank_weights, "free_bytes", lambda device: 24 * 10**9)
    with pytest.raises(KernelError, match=r"125 GB.*24 GB of memory.*10 layers would fit"):
        RankWeights.random(config, 8, device="cpu")
    monkeypatch.setattr(rank_weights, "free_bytes", lambda device: 10**8)
    with pytest.raises(KernelError, match="not even one layer would fit"):
        RankWeights.random(config, 8, device="cpu")


def test_memory_that_runs_out_on_the_way_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = rank_weights._layer

    def second_fails(*args: object) -> object:
        if made:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        made.append(1)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(rank_weights, "_layer", second_fails)
    with pytest.raises(KernelError, match="full after 1 of 3 layers"):
        RankWeights.random(small_config(), 2, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": 0}, "layers 1 to 3"),
        ({"layers": 4}, "layers 1 to 3"),
        ({"tp": 5}, "does not divide"),
        ({"down_layout": "XY"}, "IH or HI"),
        ({"dtype": torch.int8}, "activations cannot be int8"),
        ({"dtype": torch.float8_e4m3fn}, "activations cannot be float8_e4m3fn"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], words: str) -> None:
    given = {"tp": 2, "device": "cpu"} | arguments
    with pytest.raises(KernelError, match=words):
        RankWeights.random(small_config(), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda w: w.relayout("XX"), "IH or HI, not 'XX'"),
        (lambda w: w.expert(w.layers[0], 0), "a dense layer has no experts"),
        (lambda w: w.expert(w.layers[1], -1), "no expert -1; choose one of 0 to 11"),
        (lambda w: w.expert(w.layers[1], 12), "no expert 12"),
        (lambda w: w.unrounded(-1, 0), "no layer -1 here; choose one of 0 to 2"),
        (lambda w: w.unrounded(3, 0), "no layer 3 here"),
        (lambda w: w.unrounded(1, 12), "no expert 12"),
        (lambda w: w.step_bytes(-1), "0 to 12 experts"),
        (lambda w: w.step_bytes(float("nan")), "0 to 12 experts"),
        (lambda w: w.step_bytes(batch=0), "1 or more sequences"),
        (lambda w: w.cache_bytes(-1), "at position -1"),
        (lambda w: quantisation_error(w, 0), "a layer with FP8 experts \\(1 to 2\\)"),
        (lambda w: quantisation_error(w, 9), "in layer 9"),
        (lambda w: quantisation_error(w, tokens=0), "over 0 tokens"),
    ],
)
def test_what_does_not_exist_is_refused(ask: Any, words: str, rank: Make) -> None:
    weights, _ = rank(experts="fp8")
    layout, shapes = weights.down_layout, [t.shape for t in weights.tensors()]
    with pytest.raises(KernelError, match=words):
        ask(weights)
    assert (weights.down_layout, [t.shape for t in weights.tensors()]) == (layout, shapes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sentence for machines without a GPU")
def test_without_a_gpu_cuda_is_refused() -> None:
    with pytest.raises(KernelError, match="no CUDA GPU"):
        RankWeights.random(small_config(), 2)


def test_rope_rows_are_cosines_and_sines_of_exact_angles() -> None:
    table = rope_rows(70_000, 8, 10000.0, "cpu")
    assert table.shape == (70_000, 8)
    for position in (0, 1, 65_535, 65_536, 69_999):
        for i in range(4):
            angle = position * 10000.0 ** (-i / 4)
            assert float(table[position, i]) == np.float32(math.cos(angle))
            assert float(table[position, 4 + i]) == np.float32(math.sin(angle))


def test_a_state_has_rings_and_room_to_advance(rank: Make) -> None:
    weights, state = rank(40, headroom=5, batch=2)
    assert [k.shape for k in state.k] == [(2, 24, 2, 32), (2, 45, 2, 32), (2, 24, 2, 32)]
    assert state.capacity == 45
    assert state.position.tolist() == [40, 40]
    assert (state.token >= 0).all()
    assert (state.token < 100).all()
    first = state.token.clone()
    state.token.add_(1)
    state.position.add_(3)
    state.reset()
    assert torch.equal(state.token, first)
    assert state.position.tolist() == [40, 40]
    short = RankState(weights, 10, headroom=5)
    assert short.k[0].shape[1] == short.k[1].shape[1] == 15


def test_contexts_that_cannot_be_are_refused(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _ = rank()
    with pytest.raises(KernelError, match=r"exceeds the model's 4096"):
        RankState(weights, 4097)
    with pytest.raises(KernelError, match="at least 1"):
        RankState(weights, 0)
    monkeypatch.setattr("workbench.kernels.rank.state.free_bytes", lambda device: 1000)
    with pytest.raises(KernelError, match=r"caches of 1 sequences of 40 tokens need.*--context"):
        RankState(weights, 40)
