"""The document of several ranks' decode steps, measured for real by processes on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.errors import KernelError
from workbench.kernels.parallel import measure
from workbench.kernels.parallel.measure import GROUP_STAGES, SINGLE, measure_group
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_chain import TpRankStep
from workbench.kernels.parallel.weights import tp_weights
from workbench.kernels.rank import RankWeights, waterfall
from workbench.kernels.roofline import Rates

from ..rank.conftest import small_config
from .conftest import in_threads

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted, so without a GPU")


def rates(bandwidth: float = 1e9) -> Rates:
    return Rates(label="a machine", kind="measured here", bandwidth=bandwidth, flops={}, notes=())


def small(ranks: Ranks, **how: Any) -> RankWeights:
    """Two layers, of 4 ranks."""
    made = tp_weights(small_config(), ranks, 4, layers=2, dtype=torch.float32, **how)
    for tensor in made.tensors():
        if tensor.dim() > 1 and tensor is not made.embed:
            tensor.mul_(5)
    return made


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waterfall, "STEPS", 3)


def measured(world: int = 2, **how: Any) -> list[dict[str, Any]]:
    """What each rank says; rank 1 has the better bandwidth."""

    def work(ranks: Ranks) -> dict[str, Any]:
        own = rates(1e9 * (1 + ranks.rank))
        asked = {"stages": ["naive"], "contexts": [24], "rounds": 4, "rates": own} | how
        return measure_group(small(ranks), ranks, **asked)

    return in_threads(world, work)


def test_the_document_says_what_was_measured() -> None:
    said: list[tuple[int, int, str]] = []
    each = measured(
        stages=["naive", "persistent"], batches=[1, 3], contexts=[24], model="small",
        progress=lambda *told: said.append(told),
    )  # fmt: skip
    d = json.loads(json.dumps(each[0], allow_nan=False))
    assert json.loads(json.dumps(each[1])) == d  # complete on every rank
    assert (d["schema"], d["kind"]) == ("workbench-parallel-decode/1", "parallel-decode")
    assert (d["model"], d["gpus"], d["tp"], d["layers"], d["of_layers"]) == ("small", 2, 4, 2, 3)
    assert (d["dtype"], d["device"], d["backend"]) == ("float32", "cpu", "threads")
    assert d["hardware"] == "2 × a machine"
    assert d["note"].startswith("2 of 4 ranks; they make up a model with 2/4 of the heads")
    assert "interpreted" in d["note"]
    assert d["calls"] == []
    assert d["left_out"] == {}
    assert len(d["date"]) == 10
    one = in_threads(2, small)[0]
    assert d["weights"]["bytes_per_gpu"] == one.bytes
    assert d["weights"]["bytes_all"] == 2 * one.bytes
    assert d["weights"]["seconds"] > 0
    assert [(run["batch"], run["context"]) for run in d["runs"]] == [(1, 24), (3, 24)]
    for run in d["runs"]:
        batch = run["batch"]
        assert run["bandwidth"] == 2e9
        assert run["weight_bytes"] == one.step_bytes(run["distinct_experts"], batch)
        assert run["cache_bytes"] == one.cache_bytes(24, batch)
        moved = run["weight_bytes"] + run["cache_bytes"]
        assert run["floor_milliseconds"] == pytest.approx(moved / 2e9 * 1e3)
        assert run["distinct_experts"] == 3 if batch == 1 else 3 < run["distinct_experts"] <= 9
        assert run["left_out"] == {"persistent": measure.PERSISTENT}
        assert list(run["variants"]) == ["naive"]
        row = run["variants"]["naive"]
        assert (row["exchange"], row["title"]) == ("nccl", "plain torch, one CUDA graph")
        assert row["passed"]
        assert row["check"]["ranks"] == 2
        assert row["check"]["worst_layer_error"] < run["error_limit"]
        assert run["error_limit"] >= 2 * run["plain_error"] > 0
        assert 0 < row["low"] <= row["milliseconds"] <= row["high"]
        assert row["low"] <= row["slowest_rank_milliseconds"] <= row["high"]
        assert row["rounds"] == 4
        assert row["without"]["milliseconds"] > 0
        assert row["communication_milliseconds"] == pytest.approx(
            row["milliseconds"] - row["without"]["milliseconds"]
        )
        assert row["fraction_of_floor"] == pytest.approx(
            run["floor_milliseconds"] / row["milliseconds"]
        )
        assert (run["fastest"], run["milliseconds"]) == ("naive", row["milliseconds"])
    places = [place for place, _, _ in said]
    assert places == sorted(set(places))
    assert said[0][2] == "all-reduces alone"
    assert said[-1] == (said[0][1], said[0][1], "done")


def test_a_wrong_step_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = TpRankStep._boundary

    def unsummed(self: Any, h: Any, sublayer: Any, *rest: Any) -> Any:
        return kept(self, h, sublayer * (1 + 0.01 * self.ranks.rank), *rest)

    monkeypatch.setattr(TpRankStep, "_boundary", unsummed)
    run = measured()[1]["runs"][0]
    row = run["variants"]["naive"]
    assert not row["passed"]
    assert "a layer's error" in row["failures"][0]
    assert [row[name] for name in measure.TIMES] == [None] * 5
    assert row["without"] is None
    assert (run["fastest"], run["milliseconds"]) == (None, None)


def test_what_cannot_be_is_left_out_with_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(contexts=[24, 9999])
    for d in found:
        assert [run["context"] for run in d["runs"]] == [24]
        assert list(d["left_out"]) == ["batch 1, context 9,999"]
        assert "exceeds the model's 4096" in d["left_out"]["batch 1, context 9,999"]
    with pytest.raises(KernelError, match="exceeds the model's 4096"):
        measured(contexts=[9999])
    with pytest.raises(KernelError, match="no all-reduce"):
        measured(stages=["persistent"])
    # Copies of the chosen experts, of which one sequence has few and a batch many.
    monkeypatch.setattr(measure, "free_bytes", lambda device: 3 * 2 * 3 * 3 * 12 * 96 * 4 - 1)
    found = measured(batches=[1, 2], stages=["naive"])
    assert [run["batch"] for run in found[0]["runs"]] == [1]
    assert (
        "copies the experts that 2 sequences chose" in found[0]["left_out"]["batch 2, context 24"]
    )


def test_what_cannot_be_asked_for() -> None:
    for how, says in (
        ({"stages": ["fastest"]}, "no variant 'fastest'"),
        ({"stages": []}, "nothing was asked for"),
        ({"batches": []}, "nothing was asked for"),
        ({"rounds": 1}, "2 rounds or more"),
    ):
        with pytest.raises(KernelError, match=says):
            measured(**how)
    with pytest.raises(TypeError, match="several names"):
        measured(stages="naive")


def test_each_stage_has_the_one_rank_stage_that_it_is_compared_with() -> None:
    from workbench.kernels.rank.stages import NAMES

    assert set(GROUP_STAGES) == {
        *NAMES, "products_boundary", "fused_boundary", "fused_products", "load_boundary"
    }  # fmt: skip
    assert GROUP_STAGES["fused_boundary"].stage.name == "fused_pdl"
    assert GROUP_STAGES["load_boundary"].stage.name == "load"
    assert GROUP_STAGES["fused_products"].stage.name == "fused_pdl"
    assert GROUP_STAGES["fused_products"].exchange == "products"
    assert GROUP_STAGES["fused_products"].title.endswith(", products send their own sums")
    assert {n for n, one in GROUP_STAGES.items() if one.exchange == "boundary"} == {
        "products_boundary", "fused_boundary", "load_boundary"
    }  # fmt: skip
    assert SINGLE[0] == "naive"
    assert SINGLE[-5:] == (
        "products_boundary", "fused", "fused_pdl", "fused_boundary", "fused_products"
    )  # fmt: skip


def of_one_process(ranks: Ranks, batch: int, stages: list[str], timed: bool) -> Any:
    waterfall.STEPS = 2
    if timed:
        measure._interpreted = lambda name, device: False
    config = small_config(
        vocab_size=64, head_dim=16, hidden_size=64, num_attention_heads=4, num_experts=5,
        num_experts_per_tok=2, intermediate_size=64, moe_intermediate_size=64,
    )  # fmt: skip
    weights = tp_weights(config, ranks, 4, layers=2, dtype=torch.bfloat16)
    return measure_group(
        weights, ranks, batches=[batch], contexts=[20], stages=stages, rounds=2, rates=rates()
    )


@without_gpu
def test_processes_measure_one_sequence_together(together: Callable[..., list[Any]]) -> None:
    """BF16, gloo, the exchange's shared file: what is interpreted is checked, and not timed."""
    stages = ["naive", "norms", "products", "fused", "fused_boundary", "fused_products"]
    found = together(2, of_one_process, 1, stages, False)
    assert found[0] == found[1]
    run = found[0]["runs"][0]
    assert list(run["variants"]) == stages
    assert run["left_out"] == {}
    for name, row in run["variants"].items():
        assert row["passed"], row["failures"]
        assert row["interpreted"] == (name != "naive")
        assert (row["milliseconds"] is None) == (name != "naive")
    assert found[0]["backend"] == "gloo"
    assert run["plain_error"] > 1e-4  # rounding, so that it is BF16 that was compared


@without_gpu
@pytest.mark.full
def test_processes_measure_a_batch_together(together: Callable[..., list[Any]]) -> None:
    """The steps of many rows, timed as a GPU's are: with the experts given, too."""
    stages = ["load", "load_boundary"]
    found = together(2, of_one_process, 2, stages, True)
    assert found[0] == found[1]
    run = found[0]["runs"][0]
    assert 2 <= run["distinct_experts"] <= 4
    assert list(run["variants"]) == stages
    for row in run["variants"].values():
        assert row["passed"], row["failures"]
        given, alone = row["same_choices"]["milliseconds"], row["without"]["milliseconds"]
        assert row["milliseconds"] > 0
        assert row["communication_milliseconds"] == pytest.approx(given - alone)
    assert run["fastest"] in run["variants"]


def test_an_all_reduce_that_cannot_be_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of any rank; a GPU that broke or is full is no such reason, and ends the run."""

    def ways(error: Exception | None) -> None:
        def way(work: Any, rows: int) -> Any:
            if error is not None:
                raise error
            return lambda: None

        for name in ("_nccl", "_exchange", "_one_shot"):
            monkeypatch.setattr(measure, name, way)

    told = ["", "no peer\naccess"]
    work: Any = SimpleNamespace(
        weights=SimpleNamespace(device=torch.device("cuda")),
        ranks=SimpleNamespace(world=2, tell=lambda own: [own, told[1]]),
        refuse_lost=lambda: None,
    )
    for error, reason in ((None, "no peer\naccess"), (KernelError("no\nroom"), "no room")):
        ways(error)
        left_out: dict[str, str] = {}
        (found,) = measure._calls(work, [8], left_out)
        assert found == {
            "rows": 8, "nccl_us": None, "exchange_us": None, "torch_one_shot_us": None
        }  # fmt: skip
        assert left_out == {f"{name} of 8 rows": reason for name in found if name != "rows"}
    for broken in (torch.OutOfMemoryError("full"), torch.AcceleratorError("illegal address")):
        ways(broken)
        with pytest.raises(type(broken)):
            measure._calls(work, [8], {})
