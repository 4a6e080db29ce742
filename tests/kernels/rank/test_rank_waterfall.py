"""The waterfall's document, its command, and the graphs on a GPU where there is one."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from workbench import views
from workbench.cli_bench import bench_app
from workbench.cli_bench_decode import page
from workbench.errors import KernelError
from workbench.kernels.rank import RankState, RankWeights, waterfall
from workbench.kernels.rank.graph import Times, capture, time_replays
from workbench.kernels.rank.reference import StepCheck, check_step
from workbench.kernels.rank.stages import NAMES, cumulative, make, stage
from workbench.kernels.rank.targets import job
from workbench.kernels.rank.waterfall import NOTE, SCHEMA, TIMED, described, measure
from workbench.kernels.roofline import Rates
from workbench.kernels.triton_compile import compile_in_child
from workbench.model.presets import resolve

from .conftest import Make

RATES = Rates(label="a machine", kind="measured here", bandwidth=1e9, flops={}, notes=())
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted, so without a GPU")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted step takes a tenth of a second."""
    monkeypatch.setattr(waterfall, "STEPS", 3)


@without_gpu
def test_the_document_says_what_was_measured(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waterfall, "_interpreted", lambda name, device: False)
    weights, _ = rank(dtype=torch.bfloat16)
    weights.layers = weights.layers[:2]
    state = RankState(weights, 40, headroom=16)
    names = ["naive", "norms", "products", "fused"]
    found = measure(weights, state, variants=names, rounds=2, rates=RATES, model="small", rank=1)
    d = json.loads(json.dumps(described(found, RATES)))
    assert d["schema"] == SCHEMA
    assert d["note"].startswith(NOTE)
    assert "interpreted" in d["note"]
    assert not d["in_graph"]
    assert "no all-reduce on one GPU" in NOTE
    assert (d["kind"], d["batch"], d["context"], d["layers"]) == ("decode", 1, 40, 2)
    assert (d["tp"], d["rank"], d["model"], d["how"]) == (2, 1, "small", "measured here")
    moved = weights.step_bytes() + weights.cache_bytes(40)
    assert d["floor_milliseconds"] == pytest.approx(moved / 1e9 * 1e3)
    assert d["weight_bytes"] + d["cache_bytes"] == moved
    assert list(d["variants"]) == names
    for row in d["variants"].values():
        assert row["passed"]
        assert 0 < row["low"] <= row["milliseconds"] <= row["high"]
        assert row["fraction_of_floor"] == pytest.approx(
            d["floor_milliseconds"] / row["milliseconds"]
        )
        assert row["check"]["worst_layer_error"] < d["error_limit"]
    fastest = min(row["milliseconds"] for row in d["variants"].values())
    assert d["milliseconds"] == fastest == d["variants"][d["fastest"]]["milliseconds"]
    assert d["experts"] == {"per_step": 3, "over_steps": d["experts"]["over_steps"], "steps": 3,
                            "of": 12}  # fmt: skip
    assert 3 <= d["experts"]["over_steps"] <= 9
    # Every switch of the chain was left out once; costs are against the whole chain.
    switches = [name for name in NAMES if stage(name).changes]
    assert list(d["leave_one_out"]) == switches
    for row in d["leave_one_out"].values():
        whole = d["variants"]["products"]["milliseconds"]
        assert row["costs"] == pytest.approx(row["milliseconds"] - whole)
    assert d["versions"]["torch"] == torch.__version__.partition("+")[0] or d["versions"]["torch"]
    assert len(d["date"]) == 10
    assert state.position.tolist() == [40]


@without_gpu
def test_what_cannot_run_here_is_left_out_or_refused(rank: Make) -> None:
    weights, state = rank()
    weights.layers = weights.layers[:1]  # a dense one alone
    state = RankState(weights, 8)
    found = measure(weights, state, rounds=2, rates=RATES, leave_one_out=False, profile=False)
    assert "compute capability 9.0" in found.left_out["fused_pdl"]
    assert "persistent" in found.left_out
    assert set(found.variants) | set(found.left_out) == set(NAMES)
    assert found.failed == []
    assert found.experts == {}
    with pytest.raises(KernelError, match="compute capability"):
        measure(weights, state, variants=["fused_pdl"], rounds=2, rates=RATES)
    with pytest.raises(KernelError, match="no variant 'fastest'"):
        measure(weights, state, variants=["fastest"], rounds=2, rates=RATES)


@without_gpu
def test_a_wrong_variant_is_shown_as_wrong(rank: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.kernels.rank import triton_experts

    weights, state = rank()
    weights.layers = weights.layers[:2]

    real = triton_experts.expert_mlp_rows
    monkeypatch.setattr(triton_experts, "expert_mlp_rows", lambda *a: real(*a) * 1.5 + a[0])
    found = measure(
        weights, state, variants=["naive", "experts"], rounds=2, rates=RATES, leave_one_out=False
    )
    assert found.failed == ["experts"]
    assert "error" in found.variants["experts"]["failures"][0]
    # What is not right has no time anywhere.
    assert {found.variants["experts"][key] for key in TIMED} == {None}
    assert found.variants["naive"]["milliseconds"] > 0
    assert found.to_dict()["fastest"] == "naive"
    console = Console(width=200, record=True, file=StringIO())
    page(described(found, RATES), console)
    (line,) = [x for x in console.export_text().splitlines() if "FAILED" in x]
    assert line.count("–") == 4


@without_gpu
def test_an_interpreters_time_is_not_shown(rank: Make) -> None:
    weights, state = rank()
    weights.layers = weights.layers[:2]
    found = measure(weights, state, variants=["naive", "norms", "fused"], rounds=2, rates=RATES)
    assert found.failed == []
    assert found.variants["naive"]["milliseconds"] > 0
    for name in ("norms", "fused"):
        assert found.variants[name]["interpreted"]
        assert {found.variants[name][key] for key in TIMED} == {None}
    assert found.to_dict()["fastest"] == "naive"
    console = Console(width=200, record=True, file=StringIO())
    document = described(found, RATES)
    page(document, console)
    assert console.export_text().count(" interpreted ") >= 2
    assert "interpreted, not timed" in views.rank_waterfall(document | {"model": "small"}).text


def test_nothing_is_timed_where_the_chain_is_wrong(
    rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.kernels.rank import triton_experts

    weights, state = rank()
    weights.layers = weights.layers[:2]
    real = triton_experts.expert_mlp_rows
    monkeypatch.setattr(triton_experts, "expert_mlp_rows", lambda *a: real(*a) * 1.5 + a[0])
    found = measure(weights, state, variants=["products"], rounds=2, rates=RATES)
    assert found.failed == ["products"]
    assert found.leave_one_out == {}
    assert found.to_dict()["milliseconds"] is None


@without_gpu
def test_what_was_not_timed_has_no_number(rank: Make) -> None:
    weights, state = rank()
    told: list[tuple[int, int, str]] = []
    found = measure(
        weights, state, variants=["norms"], rounds=2, rates=RATES, profile=False,
        progress=lambda *one: told.append(one),
    )  # fmt: skip
    assert told == [(0, 4, "capturing norms"), (1, 4, "checking plain torch"),
                    (2, 4, "checking norms"), (3, 4, "timing")]  # fmt: skip
    document = described(found, RATES)
    assert document["repeat_percent"] is None
    assert document["rounds"] is None
    assert "nothing was timed" in shown(document)
    assert "differ by" not in shown(document)


def shown(document: dict[str, Any], width: int = 140) -> str:
    said = StringIO()
    page(document, Console(file=said, width=width))
    return said.getvalue()


@without_gpu
def test_the_page_shows_names_as_they_are_and_whole_numbers(rank: Make) -> None:
    weights, state = rank()
    found = measure(weights, state, variants=["naive"], rounds=2, rates=RATES, profile=False)
    found.head["model"] = "./[/x][bold]y"
    found.left_out["fused"] = "[red]why[/red]"
    document = described(found, RATES)
    spent = f"{document['variants']['naive']['milliseconds']:.3f}"
    for width in (40, 80, 140):
        text = shown(document, width)
        assert "./[/x][bold]y" in text
        assert "[red]why[/red]" in text
        assert spent in text
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width


@without_gpu
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"variants": []}, "no variant was asked for"),
        ({"variants": ["norms"], "rounds": 1}, "2 rounds or more, not 1"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: dict[str, Any], said: str, rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waterfall, "make", lambda *_: pytest.fail("a step was made"))
    weights, state = rank()
    with pytest.raises(KernelError, match=said):
        measure(weights, state, rates=RATES, **arguments)
    with pytest.raises(TypeError, match="several names"):
        measure(weights, state, rates=RATES, variants="naive")


def test_a_state_of_other_weights_is_refused(rank: Make) -> None:
    weights, state = rank()
    for others, what in (
        (rank(dtype=torch.bfloat16)[0], "dtype"),
        (rank(num_experts=24)[0], "sizes"),
        (rank(num_hidden_layers=4, layer_types=("full_attention",) * 4,
              mlp_layer_types=("dense",) * 4)[0], "layers"),
    ):  # fmt: skip
        for act in (lambda w: make("naive", w, state),
                    lambda w: measure(w, state, rounds=2, rates=RATES)):  # fmt: skip
            with pytest.raises(KernelError, match=what):
                act(others)
    make("naive", weights, state)


@without_gpu
def test_what_triton_cannot_run_is_left_out_and_a_defect_is_not(
    rank: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    from workbench.kernels.triton_runtime import TritonUnavailableError

    weights, state = rank()
    shipped = waterfall.make

    def broken(error: Exception) -> None:
        def made(name: str, *rest: Any) -> Any:
            if name == "fused":
                raise error
            return shipped(name, *rest)

        monkeypatch.setattr(waterfall, "make", made)

    options: dict[str, Any] = {"rounds": 2, "rates": RATES, "profile": False}
    for error, said in (
        (OutOfResources(300, 200, "shared memory"), "cannot run the variant fused at these sizes"),
        (TritonUnavailableError("there is no Triton"), "there is no Triton"),
        (ModuleNotFoundError("No module named 'x'"), "the variant fused is not here"),
    ):
        broken(error)
        monkeypatch.setattr(waterfall, "NAMES", ("naive", "fused"))
        found = measure(weights, state, leave_one_out=False, **options)
        assert said in found.left_out["fused"]
        assert list(found.variants) == ["naive"]
        with pytest.raises(KernelError, match=said):
            measure(weights, state, variants=["fused"], **options)
    for defect in (CompilationError(None, None, "a defect"), ImportError("cut short")):
        broken(defect)
        with pytest.raises(type(defect)):
            measure(weights, state, **options)


def test_stages_add_up() -> None:
    assert cumulative("naive") == {}
    assert cumulative("merged") == {"boundary": "triton", "rms_norm": "triton", "qkvg": "torch"}
    assert cumulative("products")["qkvg"] == "triton"
    assert "boundary" not in cumulative("products", leave_out=("norms",))
    published = [name for name in NAMES if stage(name).origin == "published"]
    assert published == ["norms", "merged", "router", "kv", "dense"]


def test_times_are_medians_with_their_spread() -> None:
    times = Times.of([float(n) for n in range(1, 12)])
    assert (times.median, times.low, times.high, times.rounds) == (6, 2, 10, 11)


@without_gpu
def test_too_many_replays_for_the_state_are_refused(rank: Make) -> None:
    weights, state = rank(headroom=2)
    replay = capture(make("naive", weights, state), state)
    with pytest.raises(KernelError, match="more headroom"):
        time_replays({"a": replay, "b": replay}, state, 2)
    with pytest.raises(KernelError, match="2 rounds or more"):
        time_replays({"a": replay}, state, 1)


TINY = "--model beam-tiny --tp 2 --device cpu --context 9"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(bench_app, ["decode", *arguments])


@without_gpu
def test_the_command_answers_with_one_document(tmp_path: Path, one_thread: None) -> None:
    file = tmp_path / "decode.json"
    small = ("--model", "beam-tiny", "--tp", "2", "--device", "cpu", "--rounds", "2")
    asked = ("--variants", "naive,fused", "--no-leave-one-out", "--layers", "2")
    said = run(*small, *asked, "--context", "30", "--json", "--out", str(file))
    assert said.exit_code == 0, said.output
    document = json.loads(said.stdout)
    assert document == json.loads(file.read_text())
    for key in ("kind", "batch", "context", "milliseconds", "floor_milliseconds",
                "fraction_of_floor", "variants", "hardware", "versions"):  # fmt: skip
        assert document[key] or key == "kernels", key
    assert list(document["variants"]) == ["naive", "fused"]
    shown = run(*small, "--variants", "naive", "--layers", "2", "--context", "9")
    assert shown.exit_code == 0
    assert "no all-reduce on one GPU" in " ".join(shown.stdout.split())
    assert "plain torch" in shown.stdout


@without_gpu
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "no CUDA GPU that torch can use; --device cpu runs a small model"),
        ("--variants naive,quick", "no variant 'quick' of the step; there are naive, norms"),
        ("--variants ,", "--variants names none; give some of naive, norms"),
        ("--rank 8", "no rank 8 of 8"),
        ("--model beam-tiny --device cpu --tp 3 --context 9", "does not divide"),
        ("--model beam-nothing", "unknown model"),
        ("--model beam-tiny --tp 2 --device cpu --context 2049", "exceeds the model's 2048"),
        ("--model beam-tiny", "4096 tokens exceeds the model's 2048 (beam-tiny); give --context 2"),
        ("--context 1048577", "give --context 1048576 or less"),
        ("--model beam-tiny --context 2048", "no CUDA GPU"),
        ("--device cpu", "layers would fit"),
        (f"{TINY} --layers 99", "the model has layers 1 to 9"),
        (f"{TINY} --batch 2 --variants fused", "one sequence, not 2"),
        (
            f"{TINY} --batch 2 --variants naive,experts",
            "for one sequence",
        ),
        (
            f"{TINY} --batch 2 --variants persistent",
            "one sequence, not 2",
        ),
        (f"{TINY} --experts fp8 --layers 1", "the first 1 layers of this model have no experts"),
        (f"{TINY} --variants fused_pdl", "compute capability 9.0"),
        (f"{TINY} --variants persistent", "runs on a CUDA GPU"),
        (
            f"{TINY} --batch 900000",
            "choose a shorter --context or fewer",
        ),
        (f"{TINY} --batch {10**20}", "choose a shorter --context or fewer"),
    ],
)
def test_wrong_requests_are_one_sentence(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(device: str) -> Rates:
        raise AssertionError("something was measured before the refusal")

    monkeypatch.setattr("workbench.kernels.peaks.measured_peaks", measured)
    for place in ("weights", "early"):
        monkeypatch.setattr(f"workbench.kernels.rank.{place}.free_bytes", lambda device: 16 * 10**9)
    said = run(*arguments.split())
    assert said.exit_code == 1
    assert words in str(said.exception)
    assert "\n" not in str(said.exception)


@without_gpu
def test_a_result_that_cannot_be_written_is_shown(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    asked = ("--rounds", "2", "--variants", "naive", "--layers", "2")
    said = run(*TINY.split(), *asked, "--json", "--out", "/dev/full")
    assert said.exit_code == 1
    assert "/dev/full cannot be written (No space left" in str(said.exception)
    assert json.loads(said.stdout)["variants"]["naive"]["passed"]


@pytest.mark.full
def test_the_fused_chain_compiles_for_blackwell() -> None:
    """At the full rank's sizes, without a GPU; nothing may exceed what a block can have."""
    config = resolve("beam-501b").config
    found = compile_in_child([job(config), job(config, context=10**6)], 240, targets=(100,))
    assert [result.error for result in found if result.error] == []
    kernels = {result.kernel for result in found}
    assert {"attend", "o_proj", "experts_up", "experts_down", "matvec", "head"} <= kernels


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_of_a_full_width_rank_agree_with_float64() -> None:
    weights = RankWeights.random(resolve("beam-501b").config, 8, layers=5)
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
            assert state.position.tolist() == [4098]


def test_the_floor_of_a_batch_counts_the_experts_that_it_met(rank: Make) -> None:
    weights, state = rank(20, batch=3)
    found = measure(
        weights, state, variants=("naive",), rounds=2, leave_one_out=False, profile=False,
        rates=RATES,
    ).to_dict()  # fmt: skip
    distinct = found["experts"]["per_step"]
    assert weights.shapes.top_k < distinct <= 3 * weights.shapes.top_k
    moved = weights.step_bytes(distinct, 3) + weights.cache_bytes(20, 3)
    assert found["floor_milliseconds"] == pytest.approx(1e3 * moved / RATES.bandwidth)
    row = found["variants"]["naive"]
    share = found["floor_milliseconds"] / row["milliseconds"]
    assert row["fraction_of_floor"] == pytest.approx(share)


def test_ties_are_counted_by_choices() -> None:
    def check(sets: int, sequences: int) -> list[str]:
        return StepCheck(
            layer_errors=(0.0,) * 52, cache_error=0.0, logits_error=0.0, expert_sets=sets,
            unexplained_sets=0, margin=1.0, next_token_equal=True, finite=True,
            sequences=sequences,
        ).failures(1e-2)  # fmt: skip

    # 15 of 100 for one sequence, 5 of 100 among many: 7.8 of 52, and 83.2 of 1,664.
    assert [bool(check(n, 1)) for n in (7, 8)] == [False, True]
    assert [bool(check(n, 32)) for n in (16, 83, 84)] == [False, False, True]
