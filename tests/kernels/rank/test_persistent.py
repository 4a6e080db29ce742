"""The persistent step: what it refuses (anywhere), and against float64 (on a GPU with nvcc)."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch

from workbench.errors import KernelError
from workbench.kernels.rank import RankState, RankWeights, cuda_build, persistent
from workbench.kernels.rank.graph import capture
from workbench.kernels.rank.persistent import PersistentStep
from workbench.kernels.rank.reference import check_step
from workbench.model.presets import resolve

BEAM = resolve("beam-501b").config


def on_meta(config: Any = BEAM, tp: int = 8, **state: Any) -> tuple[RankWeights, RankState]:
    """A rank without memory."""
    weights = RankWeights.random(config, tp, layers=4, device="meta")
    return weights, RankState(weights, 100, **state)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 4096}, "hidden 5120"),
        ({"num_experts": 128}, "experts 256"),
        ({"num_experts_per_tok": 4}, "top_k 8"),
        ({"moe_intermediate_size": 2048}, "expert_width 320"),
        ({"intermediate_size": 8192}, "mlp_width 1536"),
        ({"sliding_window": 1024}, "sliding_window 1024"),
        ({"n_group": 8, "topk_group": 4}, "n_group 8"),
    ],
)
def test_other_sizes_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    weights, state = on_meta(BEAM.replace(**changes))
    with pytest.raises(KernelError, match=named) as caught:
        PersistentStep(weights, state)
    assert "\n" not in str(caught.value)


def test_tp4_is_refused() -> None:
    with pytest.raises(KernelError, match="with heads 6, not 12"):
        PersistentStep(*on_meta(tp=4))


def test_two_sequences_are_refused() -> None:
    with pytest.raises(KernelError, match="one sequence, not 2"):
        PersistentStep(*on_meta(batch=2))


def test_fp8_experts_are_refused_before_their_bytes_are_read_as_bf16() -> None:
    weights = RankWeights.random(BEAM, 8, layers=1, device="meta", experts="fp8")
    with pytest.raises(KernelError, match="reads experts in BF16, not in fp8"):
        PersistentStep(weights, RankState(weights, 16))


def test_weights_elsewhere_are_refused() -> None:
    with pytest.raises(KernelError, match="on a CUDA GPU"):
        PersistentStep(*on_meta())


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    for capability, wanted in (((9, 0), "sm_90a"), ((10, 0), "sm_100a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert persistent.architecture_of(device) == wanted
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(KernelError, match=r"A GPU has 8\.9"):
        persistent.architecture_of(device)


def test_every_wait_of_the_source_has_words() -> None:
    source = (cuda_build.SOURCES / "waits.cuh").read_text()
    names = source[source.index("enum Wait {") + 11 :].split("}")[0].split(",")
    assert len([n for n in names if n.strip()]) == len(persistent.WAITS)


def test_structures_are_those_of_the_source() -> None:
    source = (cuda_build.SOURCES / "params.cuh").read_text()
    body = source[source.index("struct Params {") : source.index("unsigned patience")]
    for name, _ in persistent._Params._fields_[:-4]:
        assert name in body
    # 14 pointers, 4 ints, 4 floats.
    assert ctypes.sizeof(persistent._Layer) == 14 * 8 + 8 * 4


def ready() -> bool:
    """Whether the kernel can run here."""
    if not torch.cuda.is_available():
        return False
    try:
        cuda_build.find_nvcc()
        persistent.architecture_of(torch.device("cuda"))
    except KernelError:
        return False
    return True


gpu = pytest.mark.skipif(not ready(), reason="needs nvcc and a GPU of compute capability 9.0 or 10")


@pytest.fixture(scope="module")
def weights() -> RankWeights:
    """Three dense layers, two sparse ones, one of them with full attention."""
    return RankWeights.random(BEAM, 8, layers=5)


@gpu
@pytest.mark.parametrize("context", [1, 100, 511, 512, 4095, 5160, 40000])
def test_every_layer_against_float64(weights: RankWeights, context: int) -> None:
    state = RankState(weights, context)
    step = PersistentStep(weights, state)
    found = check_step(step, weights, state)
    step.check()
    assert found.finite
    assert found.worst <= 1e-2
    assert found.unexplained_sets == 0
    assert found.next_token_equal or found.margin <= 1e-2
    assert int(state.position) == context + 1
    assert int(state.token) == int(state.next_token) == int(state.logits.argmax())


@gpu
def test_a_sequence_that_outgrows_short_attention(weights: RankWeights) -> None:
    """Steps before, at and behind 16 splits of 320 keys, and back: no word of the other is left."""
    state = RankState(weights, 5117)
    step = PersistentStep(weights, state)
    for _ in range(2):
        for position in range(5117, 5124):
            assert int(state.position) == position
            found = check_step(step, weights, state)
            step.check()
            assert found.worst <= 1e-2
            assert found.unexplained_sets == 0
        state.reset()


@gpu
@pytest.mark.parametrize("context", [600, 7000])
def test_the_chain_is_its_layers(weights: RankWeights, context: int) -> None:
    state = RankState(weights, context)
    step = PersistentStep(weights, state)
    step()
    step.check()
    whole = step.h.clone()
    state.reset()
    h = whole[0]
    for index in range(len(weights.layers)):
        h = step.layers(index, index + 1, h)
        assert torch.equal(h, whole[index + 1])
    assert int(state.position) == context  # layers alone do not advance


@gpu
def test_replays_are_bit_identical(weights: RankWeights) -> None:
    state = RankState(weights, 4000)
    step = PersistentStep(weights, state)
    replay = capture(step, state)
    caches = [t.clone() for t in (*state.k, *state.v)]
    runs = []
    for _ in range(3):
        for cache, kept in zip((*state.k, *state.v), caches, strict=True):
            cache.copy_(kept)
        state.reset()
        tokens = []
        for _ in range(20):
            replay()
            tokens.append(state.next_token.clone())
        runs.append((torch.cat(tokens), state.logits.clone()))
    step.check()
    for tokens_then, logits in runs[1:]:
        assert torch.equal(tokens_then, runs[0][0])
        assert torch.equal(logits, runs[0][1])
    assert int(state.position) == 4020


@gpu
def test_the_position_stays_at_the_last_row(weights: RankWeights) -> None:
    state = RankState(weights, 50, headroom=2)
    step = PersistentStep(weights, state)
    for _ in range(4):
        step()
    step.check()
    assert int(state.position) == 51


@gpu
def test_weights_that_are_not_renormalised() -> None:
    weights = RankWeights.random(BEAM.replace(norm_topk_prob=False), 8, layers=4)
    state = RankState(weights, 100)
    assert check_step(PersistentStep(weights, state), weights, state).worst <= 1e-2


@gpu
def test_a_wait_that_gives_up(weights: RankWeights) -> None:
    state = RankState(weights, 600)
    step = PersistentStep(weights, state, patience=0.1)
    step._released[5] = -1000  # block 5 seems to be far behind
    for _ in range(3):
        step()  # the later ones leave at once
    with pytest.raises(KernelError, match=r"gave up: block \d+ waited too long for the other"):
        step.check()
    assert int(state.position) == 600
    found = check_step(step, weights, state)
    step.check()
    assert found.worst <= 1e-2
    assert math.isfinite(found.worst)
