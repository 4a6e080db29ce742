"""FP8 experts: the rounding by brute force, bytes by hand, kernels and steps against float64."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from workbench.cli_bench import bench_app
from workbench.cli_bench_decode import page
from workbench.errors import KernelError
from workbench.kernels.rank import RankState, RankWeights, fp8, triton_experts, waterfall
from workbench.kernels.rank import weights as rank_weights
from workbench.kernels.rank.chain import RankStep
from workbench.kernels.rank.early import refuse_early
from workbench.kernels.rank.fused import FusedStep
from workbench.kernels.rank.graph import capture
from workbench.kernels.rank.reference import Reference, check_step
from workbench.kernels.rank.stages import cumulative, make
from workbench.kernels.rank.targets import job
from workbench.kernels.rank.waterfall import described, measure
from workbench.kernels.roofline import Rates
from workbench.kernels.triton_compile import compile_in_child
from workbench.model.presets import resolve

from .conftest import Make, small_config
from .rank_numpy import NumpyRank, e4m3, expert_values, values
from .test_rank_chain import SMALL

RATES = Rates(label="a machine", kind="measured here", bandwidth=1e9, flops={}, notes=())
CODES = e4m3(torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8))
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted, so without a GPU")


def small(**changes: Any) -> RankWeights:
    given = {"tp": 2, "device": "cpu", "dtype": torch.float32, "experts": "fp8"} | changes
    return RankWeights.random(small_config(), **given)


def step_of(name: str, weights: RankWeights, state: RankState) -> Any:
    if name == "fused":
        return FusedStep(weights, state, config=SMALL)
    return RankStep(weights, state, cumulative("products") if name == "triton" else None)


# ------------------------------------------------------------------ the format


def test_every_weight_becomes_the_nearest_value_of_its_rows_scale() -> None:
    rows = torch.randn(6, 67, generator=torch.Generator().manual_seed(3)) * 0.02
    rows[1] = 0
    rows[2] *= 1e-30
    rows[3, 5] = 700.0  # leaves the others among the subnormals or at zero
    rounded, scale = fp8.quantise(rows)
    assert rounded.dtype == torch.float8_e4m3fn
    found = e4m3(rounded)
    for row in range(6):
        exact = values(rows[row])
        largest = np.abs(exact).max()
        assert float(scale[row]) == pytest.approx(max(largest / 448, 1.2e-38), rel=1e-3)
        if largest:
            assert np.abs(found[row]).max() == 448
        grid = np.sort(CODES) * float(scale[row])
        least = np.abs(grid[None, :] - exact[:, None]).min(1)
        off = np.abs(found[row] * float(scale[row]) - exact)
        assert (off <= least + 1e-6 * np.abs(exact)).all()
    assert np.array_equal(values(fp8.dequantise(rounded, scale)), found * values(scale)[:, None])


def test_experts_are_rounded_from_what_can_be_drawn_again() -> None:
    weights = small(seed=5)
    layer = weights.layers[1]
    assert layer.gate_up.shape == (12, 48, 96)
    assert layer.down.shape == (12, 96, 24)
    assert layer.gate_up.dtype == layer.down.dtype == torch.float8_e4m3fn
    assert layer.gate_up_scale is not None
    assert layer.down_scale is not None
    assert layer.gate_up_scale.shape == (12, 48)
    assert layer.down_scale.shape == (12, 96)
    assert weights.layers[0].gate_up_scale is None
    assert weights.layers[0].gate_up.dtype == torch.float32
    moved, size, all_values = 0.0, 0.0, []
    for index in (1, 2):
        for expert in range(12):
            was = [values(each) for each in weights.unrounded(index, expert)]
            now = expert_values(weights, weights.layers[index], expert)
            meant = weights.expert(weights.layers[index], expert)
            for old, new, also in zip(was, now, meant, strict=True):
                assert np.array_equal(new, values(also))
                # Half a step of 1/8, or of the least exponent's where the row has larger ones.
                step = np.abs(old).max(1, keepdims=True) / 448 * 2.0**-10
                assert (np.abs(new - old) <= np.maximum(np.abs(old) / 16, step) * 1.00001).all()
                moved, size = moved + ((new - old) ** 2).sum(), size + (old**2).sum()
                all_values.append(new.ravel())
    assert 0.022 < (moved / size) ** 0.5 < 0.030
    spread = np.concatenate(all_values)
    assert spread.std() == pytest.approx(0.02, rel=0.01)
    assert abs(spread.mean()) < 2e-4
    assert len({each.tobytes() for each in all_values}) == len(all_values) == 48


def test_the_seed_makes_the_experts_in_either_layout() -> None:
    one, same, other, turned = (
        small(**given) for given in ({}, {}, {"seed": 1}, {"down_layout": "IH"})
    )
    for a, b, c, d in zip(one.layers, same.layers, other.layers, turned.layers, strict=True):
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        if a.dense:
            continue
        assert not torch.equal(a.gate_up.view(torch.uint8), c.gate_up.view(torch.uint8))
        assert d.down.shape == (12, 24, 96)
        for expert in (0, 11):
            for x, y in zip(one.expert(a, expert), turned.expert(d, expert), strict=True):
                assert torch.equal(x, y)
    before = one.layers[2].down
    place, meant = before.data_ptr(), one.expert(one.layers[2], 3)[1]
    one.relayout("IH")
    assert one.layers[2].down.data_ptr() == place
    assert one.layers[2].down.is_contiguous()
    assert torch.equal(one.expert(one.layers[2], 3)[1], meant)
    with pytest.raises(KernelError, match="layer 0 has no FP8 experts"):
        one.unrounded(0, 0)


def test_the_experts_never_exist_in_another_format() -> None:
    """One expert at a time is there in float32."""
    largest: dict[bool, int] = {True: 0, False: 0}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                kind = out.element_size() == 1
                largest[kind] = max(largest[kind], out.numel())
            return out

    config = small_config(num_experts=96, mlp_layer_types=("sparse",) * 3)
    with Watch():
        RankWeights.random(config, 2, device="cpu", experts="fp8")
    assert largest[True] == 96 * 48 * 96
    assert largest[False] == 512 * 96  # qkvg


# ------------------------------------------------------------------ bytes


def test_the_full_rank_has_the_bytes_counted_by_hand() -> None:
    config = resolve("beam-501b").config
    full = RankWeights.random(config, 8, device="meta", experts="fp8")
    plain = RankWeights.random(config, 8, device="meta")
    each = 640 * 5120 + 5120 * 320  # values of an expert
    scales = 4 * (640 + 5120)
    assert plain.bytes - full.bytes == 49 * 256 * (2 * each - each - scales)
    assert full.bytes / 2**30 == pytest.approx(59.7, abs=0.05)
    assert rank_weights.rank_bytes(config, full.shapes, 52, torch.bfloat16, "fp8") == full.bytes
    assert plain.step_bytes() - full.step_bytes() == 49 * 8 * (each - scales)
    assert full.step_bytes(57) - full.step_bytes() == pytest.approx(49 * 49 * (each + scales))
    # The floor of both on the H200 whose run comes with the package.
    floors = [(w.step_bytes() + w.cache_bytes(4096)) / 4.249e12 * 1e3 for w in (plain, full)]
    assert floors == pytest.approx([1.378, 0.927], abs=1e-3)


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in test_rank_weights, but a sparse layer is 1.296 GB:
    # (21 - 0.42 - 3 x 0.074) / 1.296 = 15.7, so three dense and fifteen sparse ones.
    monkeypatch.setattr(rank_weights, "free_bytes", lambda device: 24 * 10**9)
    with pytest.raises(KernelError, match=r"need 64 GB.*24 GB of memory.*18 layers would fit"):
        RankWeights.random(resolve("beam-501b").config, 8, device="cpu", experts="fp8")


# ------------------------------------------------------------------ kernels


@without_gpu
@pytest.mark.parametrize(
    ("hidden", "width", "experts", "top_k"),
    [(90, 37, 5, 3), (64, 16, 4, 1), (33, 70, 9, 8)],
)
@pytest.mark.parametrize("sizes", [(8, 4), (1, 1), (64, 128)])
def test_kernels_at_odd_sizes(
    hidden: int, width: int, experts: int, top_k: int, sizes: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(hidden)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    up, up_scale = fp8.quantise(normal(experts, 2 * width, hidden))
    down, down_scale = fp8.quantise(normal(experts, hidden, width) * 0.3)
    x, shares = normal(hidden), torch.rand(top_k, generator=generator)
    ids = torch.randperm(experts, generator=generator)[:top_k]
    act, out = torch.full((top_k, width), torch.nan), torch.full((hidden,), torch.nan)
    triton_experts.launch_experts_up(x, up, ids, act, sizes[0], 4, False, up_scale)
    triton_experts.launch_experts_down(
        act, down, ids, shares, out, 2.5, sizes[1], 4, False, False, down_scale
    )
    total = np.zeros(hidden)
    for j, expert in enumerate(ids.tolist()):
        gate, also = np.split((e4m3(up[expert]) @ values(x)) * values(up_scale[expert]), 2)
        wanted = gate / (1 + np.exp(-gate)) * also
        assert np.abs(values(act[j]) - wanted).max() < 2e-6 * np.abs(wanted).max()
        total += float(shares[j]) * values(down_scale[expert]) * (e4m3(down[expert]) @ wanted)
    assert np.abs(values(out) - 2.5 * total).max() < 3e-6 * np.abs(2.5 * total).max()


# ------------------------------------------------------------------ steps


@without_gpu
@pytest.mark.parametrize("name", ["naive", "triton", "fused"])
def test_steps_are_those_of_a_plain_computation(name: str, rank: Make) -> None:
    weights, state = rank(40, experts="fp8")
    plain = NumpyRank(weights, state)
    step = step_of(name, weights, state)
    for _ in range(3):
        wanted = plain.step()
        step()
        got = state.logits[0].double().numpy()
        assert np.abs(got - wanted).max() < 2e-4 * np.abs(wanted).max()
        assert state.token.tolist() == [plain.token]
        assert [set(row.tolist()) for row in step.expert_ids()[1:, 0]] == plain.experts


@pytest.mark.parametrize("layout", ["HI", "IH"])
def test_a_batch_of_plain_torch_too(layout: str, rank: Make) -> None:
    weights, state = rank(30, batch=3, layout=layout, experts="fp8")
    plain = [NumpyRank(weights, state, b) for b in range(3)]
    RankStep(weights, state)()
    for b, one in enumerate(plain):
        wanted = one.step()
        assert np.abs(values(state.logits[b]) - wanted).max() < 2e-4 * np.abs(wanted).max()


def test_the_reference_itself_is_a_plain_computation(rank: Make) -> None:
    weights, state = rank(40, dtype=torch.float64, experts="fp8")
    reference, h = Reference(weights, state), weights.embed[state.token[0]]
    for index in range(3):
        h = reference.layer(index, h, 0, 40).h
    wanted = NumpyRank(weights, state).step()
    assert np.abs(values(reference.logits(h)) - wanted).max() < 1e-9


@without_gpu
@pytest.mark.parametrize("name", ["triton", "fused"])
def test_bfloat16_stays_within_the_gate_of_plain_torch(
    name: str, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, state = rank(40, dtype=torch.bfloat16, experts="fp8")
    own = check_step(RankStep(weights, state), weights, state)
    state.reset()
    # Rounding to FP8 is in the reference too: the step's own error is that of BF16.
    assert 1e-4 < own.worst < 1e-2
    check = check_step(step_of(name, weights, state), weights, state)
    assert check.failures(2 * own.worst) == []
    # A kernel that forgets one projection's scales is found out.
    real = triton_experts.launch_experts_up
    monkeypatch.setattr(triton_experts, "launch_experts_up", lambda *a: real(*a[:7]))
    state.reset()
    check = check_step(step_of(name, weights, state), weights, state)
    assert "a layer's error" in check.failures(2 * own.worst)[0]


# ------------------------------------------------------------------ what rounding costs


def test_the_rounding_of_a_layer_is_measured_and_bounded() -> None:
    weights = small()
    found = fp8.quantisation_error(weights, tokens=3)
    assert found is not None
    assert (found.layer, found.tokens, found.limit) == (1, 3, 0.0625)
    layer, x = (
        weights.layers[1],
        values(torch.randn(3, 96, generator=torch.Generator().manual_seed(0))),
    )
    outputs: list[Any] = [[], []]
    for row in x:
        score = 1 / (1 + np.exp(-(values(layer.router) @ row)))
        chosen = np.argsort(-(score + values(layer.correction_bias)))[:3]
        share = score[chosen] / score[chosen].sum()
        for kind in (0, 1):
            total = np.zeros(96)
            for part, expert in zip(share, chosen, strict=True):
                was = [values(each) for each in weights.unrounded(1, int(expert))]
                up, down = (was, expert_values(weights, layer, int(expert)))[kind]
                gate, also = np.split(up @ row, 2)
                total += part * (down @ (gate / (1 + np.exp(-gate)) * also))
            outputs[kind].append(total)
    was_all, now_all = (np.stack(each) for each in outputs)
    wanted = np.linalg.norm(now_all - was_all) / np.linalg.norm(was_all)
    assert found.mlp_output == pytest.approx(wanted, rel=1e-5)
    assert 0.022 < found.weights < 0.030
    # Three independent roundings, of gate, up and down.
    assert found.mlp_output == pytest.approx(3**0.5 * found.weights, rel=0.25)
    assert found.passed
    assert fp8.quantisation_error(small(experts="same")) is None
    assert fp8.quantisation_error(small(layers=1)) is None


def test_weights_that_are_not_what_was_drawn_do_not_pass() -> None:
    weights = small()
    scale = weights.layers[1].down_scale
    assert scale is not None
    scale.mul_(1.1)
    found = fp8.quantisation_error(weights)
    assert found is not None
    assert not found.passed
    assert found.to_dict()["passed"] is False


# ------------------------------------------------------------------ refusals


@without_gpu
def test_what_cannot_read_fp8_experts_says_so(rank: Make) -> None:
    weights, state = rank(experts="fp8")
    with pytest.raises(KernelError, match=r"persistent kernel reads BF16 experts, not fp8"):
        make("persistent", weights, state)
    with pytest.raises(KernelError, match=r"variant triton cannot read fp8 .*plain or rows"):
        RankStep(weights, state, {"expert_mlp": "triton"})
    with pytest.raises(KernelError, match="same or fp8, not as 'int4'"):
        small(experts="int4")


def test_gpus_that_are_too_old_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.9 or newer, and this one has 8.0" in str(fp8.why_not(gpu))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8.why_not(gpu) is None
    assert fp8.why_not(torch.device("cpu")) is None


def test_caches_that_do_not_fit_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rank_weights, "workbench.kernels.rank.early"):
        place = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{place}.free_bytes", lambda device: 75 * 10**9)
    given: dict[str, Any] = {
        "layers": None, "device": torch.device("cpu"), "dtype": torch.bfloat16, "experts": "fp8",
        "variants": (),
    }  # fmt: skip
    config = resolve("beam-501b").config
    refuse_early(config, 8, context=4096, batch=1, **given)
    # Nine full layers of a million tokens, 512 bytes each: 4.6 GB a sequence; 10.9 GB are left.
    refuse_early(config, 8, context=10**6, batch=2, **given)
    with pytest.raises(KernelError, match=r"3 sequences of 1000000 tokens need 1[345].*fewer"):
        refuse_early(config, 8, context=10**6, batch=3, **given)


# ------------------------------------------------------------------ document and command


@without_gpu
def test_the_document_says_what_the_experts_are(
    rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waterfall, "STEPS", 2)
    weights, _ = rank(dtype=torch.bfloat16, experts="fp8")
    weights.layers = weights.layers[:2]
    state = RankState(weights, 40, headroom=16)
    names = ["naive", "fused"]
    found = measure(weights, state, variants=names, rounds=2, rates=RATES, leave_one_out=False)
    d = json.loads(json.dumps(described(found, RATES)))
    assert d["expert_weights"] == "fp8 (e4m3, one float32 scale a row)"
    assert d["floor_milliseconds"] == pytest.approx(
        (weights.step_bytes() + weights.cache_bytes(40)) / 1e9 * 1e3
    )
    gate = d["error_gate"]["arithmetic"]
    assert gate["limit"] == d["error_limit"] == pytest.approx(2 * gate["plain_torch"])
    assert 0 < gate["worst"] <= gate["limit"]
    lost = d["error_gate"]["quantisation"]
    assert 0.02 < lost["weights"] < lost["mlp_output"] < lost["limit"] == 2**-4
    assert lost["passed"]
    console = Console(width=300, record=True, file=StringIO())
    page(d, console)
    said = console.export_text()
    assert f"MLP output by {lost['mlp_output']:.1%} (limit 6.2%)" in said
    assert "experts fp8 (e4m3, one float32 scale a row)" in said


def test_the_other_documents_say_their_dtype(rank: Make) -> None:
    weights, state = rank()
    found = measure(weights, state, variants=["naive"], rounds=2, rates=RATES, leave_one_out=False)
    assert found.head["expert_weights"] == "float32"
    assert found.to_dict()["error_gate"]["quantisation"] is None


def run(*arguments: str) -> Any:
    small_run = ("--model", "beam-tiny", "--tp", "2", "--device", "cpu", "--rounds", "2")
    return CliRunner().invoke(bench_app, ["decode", *small_run, *arguments])


@without_gpu
def test_the_command_runs_fp8_experts(tmp_path: Path, one_thread: None) -> None:
    asked = ("--experts", "fp8", "--layers", "2", "--context", "30", "--no-leave-one-out")
    said = run(*asked, "--variants", "naive,fused", "--json", "--out", str(tmp_path / "f.json"))
    assert said.exit_code == 0, said.output
    document = json.loads(said.stdout)
    assert document == json.loads((tmp_path / "f.json").read_text())
    assert [row["passed"] for row in document["variants"].values()] == [True, True]
    assert document["expert_weights"] == fp8.DESCRIPTION
    said = run(*asked, "--variants", "persistent")
    assert "reads BF16 experts" in str(said.exception)


@without_gpu
def test_rounding_beyond_its_limit_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.setattr(fp8, "ERROR_LIMIT", 0.01)
    said = run("--experts", "fp8", "--layers", "2", "--context", "9", "--variants", "naive")
    assert said.exit_code == 1
    assert "1.0% is the most it may" in str(said.exception)


@pytest.mark.full
def test_the_fused_chain_with_fp8_experts_compiles_for_hopper_and_blackwell() -> None:
    config = resolve("beam-501b").config
    found = compile_in_child([job(config, experts="fp8")], 240, targets=(90, 100))
    assert [result.error for result in found if result.error] == []
    experts = [r for r in found if r.kernel in ("experts_up", "experts_down")]
    assert {(r.kernel, r.target) for r in experts} == {
        (kernel, target) for kernel in ("experts_up", "experts_down")
        for target in ("sm_90", "sm_100")
    }  # fmt: skip
    assert all(r.constants["SCALED"] == "True" and r.spill_bytes == 0 for r in experts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_of_a_full_width_rank_agree_with_float64() -> None:
    weights = RankWeights.random(resolve("beam-501b").config, 8, layers=5, experts="fp8")
    state = RankState(weights, 4096)
    with torch.inference_mode():
        own = 0.0
        for name in ("naive", "products", "fused", "fused_pdl"):
            replay = capture(make(name, weights, state), state)
            check = check_step(replay.step, weights, state, replay)
            own = own or check.worst
            assert check.failures(2 * own) == [], name
            bits = []
            for _ in range(3):
                state.reset()
                replay()
                replay()
                bits.append(state.logits.clone())
            assert torch.equal(bits[0], bits[1])
            assert torch.equal(bits[0], bits[2])
        lost = fp8.quantisation_error(weights)
        assert lost is not None
        assert 0.025 < lost.weights < 0.028
        assert lost.mlp_output == pytest.approx(3**0.5 * lost.weights, rel=0.1)
