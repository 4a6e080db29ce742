"""The bench: right variants alone get a time, and the arithmetic of the figures is what it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench
from workbench.errors import KernelError
from workbench.kernels import reference, registry
from workbench.kernels.bench import bench
from workbench.kernels.case import Request
from workbench.kernels.catalogue import OPS
from workbench.kernels.footprint import footprint, too_large
from workbench.kernels.ops import operation
from workbench.kernels.peaks import measured_peaks
from workbench.kernels.results import BenchResult, BenchRow
from workbench.kernels.roofline import Rates
from workbench.kernels.shapes import Shapes
from workbench.kernels.timing import (
    COLD,
    MIN_ROUNDS,
    Candidate,
    Flush,
    l2_bytes,
    measure,
    sets_wanted,
)

SHAPES = Shapes.of(workbench.resolve("beam-tiny").config)
PEAKS = Rates(label="made up", kind="measured here", bandwidth=1e9, flops={"fp32": 2e9})
Variant = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def mine() -> Iterator[Callable[[str, Variant], str]]:
    """Registers a variant "mine" for the length of a test."""
    made: list[str] = []

    def add(op: str, function: Variant) -> str:
        registry.register(op, "mine")(function)
        made.append(op)
        return "mine"

    yield add
    for op in made:
        registry.unregister(op, "mine")


def run(op: str, *variants: str, **settings: Any) -> BenchResult:
    settings = {"tokens": (3,), "rounds": 4, "dtype": torch.float32, "peaks": PEAKS} | settings
    return bench([op], SHAPES, variants=variants or None, device="cpu", **settings)


# -- who gets a time ----------------------------------------------------------------------------


def test_a_right_variant_is_timed_beside_the_reference(mine: Callable[..., str]) -> None:
    def slow(*args: Any) -> Tensor:
        time.sleep(0.004)
        return reference.rms_norm(*args)

    mine("rms_norm", slow)
    result = run("rms_norm", "torch", "mine")
    torch_row, row = result.rows
    assert (torch_row.variant, row.variant) == ("torch", "mine")
    assert row.passed
    assert row.microseconds is not None
    assert torch_row.microseconds is not None
    assert 4000 <= row.microseconds < 40_000
    assert row.microseconds_low is not None
    assert row.microseconds_high is not None
    assert row.microseconds_low <= row.microseconds <= row.microseconds_high
    assert (row.rounds, row.in_graph) == (4, False)
    assert torch_row.ratio_to_reference == 1
    assert row.ratio_to_reference == pytest.approx(torch_row.microseconds / row.microseconds)
    # x in, y out, the weight, in float32; the bound is the larger of the two at the peaks.
    hidden = SHAPES.hidden
    assert row.bytes == (2 * 3 + 1) * hidden * 4
    assert row.flops == 4 * 3 * hidden
    assert row.bytes_per_second == pytest.approx(row.bytes / row.microseconds * 1e6)
    assert row.flops_per_second == pytest.approx(row.flops / row.microseconds * 1e6)
    bound = max(row.bytes / 1e9, row.flops / 2e9) * 1e6
    assert row.bound_microseconds == pytest.approx(bound)
    assert row.limit == "memory"
    assert row.roofline_fraction == pytest.approx(bound / row.microseconds)
    assert result.how == "measured here"
    assert result.peaks["bandwidth"] == 1e9
    # The distribution's version: some builds leave the "+cu130" of torch.__version__ out.
    assert str(result.versions["torch"]).split("+")[0] == torch.__version__.split("+")[0]
    assert not result.interrupted


def test_faster_than_the_limit_of_a_cpu_says_why() -> None:
    """What a cache gives is no speed of memory."""
    slow = replace(PEAKS, bandwidth=1.0)
    (row,) = run("rms_norm", "torch", peaks=slow).rows
    assert row.roofline_fraction is not None
    assert row.roofline_fraction > 1
    assert "the caches are not emptied" in row.reason
    fast = replace(PEAKS, bandwidth=1e15, flops={"fp32": 1e18})
    (row,) = run("rms_norm", "torch", peaks=fast).rows
    assert row.timed
    assert row.reason == ""


def _zeros(x: Tensor, *rest: Any) -> Tensor:
    return torch.zeros_like(x)


def _raises(*args: Any) -> Tensor:
    raise RuntimeError("no such luck")


def _half(x: Tensor, *rest: Any) -> Tensor:
    return reference.rms_norm(x, *rest).half()


@pytest.mark.parametrize(
    ("function", "status", "gate", "words"),
    [
        (_zeros, "refused", "relative error", "is allowed"),
        (_half, "refused", "dtype", "float16"),
        (_raises, "raised", "", "no such luck"),
        (lambda *a: None, "raised", "result", "must return"),
    ],
)
def test_a_wrong_variant_gets_a_reason_and_no_time(
    mine: Callable[..., str], function: Variant, status: str, gate: str, words: str
) -> None:
    mine("rms_norm", function)
    right, wrong = run("rms_norm", "torch", "mine").rows
    assert right.timed
    assert (wrong.status, wrong.gate) == (status, gate)
    assert words in wrong.reason
    assert not wrong.timed
    assert wrong.roofline_fraction is None
    assert wrong.to_dict()["passed"] is False


def test_outputs_are_judged_again_after_the_timed_loop(mine: Callable[..., str]) -> None:
    calls = 0

    def goes_stale(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        right = reference.rms_norm(*args)
        return right if calls < 12 else torch.ones_like(right)

    mine("rms_norm", goes_stale)
    (row,) = run("rms_norm", "mine").rows
    assert calls > 12
    assert (row.status, row.gate) == ("refused", "after timing: relative error")
    assert row.microseconds is None


def test_a_variant_that_fails_in_the_timed_loop_has_no_time(mine: Callable[..., str]) -> None:
    calls = 0

    def tires(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise RuntimeError("tired")
        return reference.rms_norm(*args)

    mine("rms_norm", tires)
    right, row = run("rms_norm", "torch", "mine").rows
    assert right.timed
    assert (row.status, row.timed) == ("raised", False)
    assert "tired" in row.reason


def test_what_cannot_run_here_says_why(mine: Callable[..., str]) -> None:
    registry.register("rms_norm", "mine", requires=(lambda where: "it is Sunday",))(_zeros)
    try:
        (row,) = run("rms_norm", "mine").rows
    finally:
        registry.unregister("rms_norm", "mine")
    assert (row.status, row.reason, row.timed) == ("unavailable", "it is Sunday", False)
    assert row.to_dict()["available"] is False
    assert row.to_dict()["passed"] is None


def test_an_interpreted_kernel_is_never_timed() -> None:
    from workbench.kernels.requirements import Where

    reason = registry.why_not("rms_norm", "triton", Where.of("cpu", torch.float32, SHAPES))
    if reason is not None:
        pytest.skip(reason)
    torch_row, row = run("rms_norm", "torch", "triton").rows
    assert torch_row.timed
    assert (row.status, row.reason) == ("passed", "interpreted: not a speed")
    assert row.max_error is not None
    assert row.microseconds is None
    assert row.roofline_fraction is None


def test_a_cache_is_written_again_for_the_second_judgement(mine: Callable[..., str]) -> None:
    calls = 0

    def writes_at_first(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 12:
            args = (*args[:4], args[4].clone(), args[5].clone(), *args[6:])
        return reference.qkv_write(*args, **kwargs)

    mine("qkv_write", writes_at_first)
    (row,) = run("qkv_write", "mine", flavours=("full",)).rows
    assert calls > 12
    assert (row.status, row.gate) == ("refused", "after timing: relative error")


# -- every operation ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_every_operation_can_be_timed(op: str) -> None:
    flavours = operation(op).flavours[:1]
    (row,) = run(op, "torch", flavours=flavours, tokens=(2,), rounds=3, peaks=CPU).rows
    assert row.timed, row.reason
    assert row.bytes is not None
    assert row.bytes > 0


CPU = replace(PEAKS, flops={"fp32": 2e9, "bf16": 2e9})


@pytest.mark.parametrize("op", OPS)
def test_footprint_is_near_what_arguments_take(op: str) -> None:
    for flavour in operation(op).flavours:
        request = Request(shapes=SHAPES, tokens=40, dtype=torch.float32, flavour=flavour)
        case = operation(op).case(request)
        tensors = [a for a in (*case.args, *case.kwargs.values()) if isinstance(a, Tensor)]
        real = sum(t.numel() * t.element_size() for t in tensors)
        assert footprint(op, request).held > 0.5 * real
        assert footprint(op, request).peak >= footprint(op, request).held


def test_experts_of_the_full_model_do_not_fit_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = Shapes.of(workbench.resolve("beam-501b").config, 8)
    request = Request(shapes=full, tokens=1)
    weights = 256 * 3 * 320 * 5120 * 2
    assert weights <= footprint("expert_mlp", request).held < 1.1 * weights
    monkeypatch.setattr("workbench.kernels.footprint.free_bytes", lambda device: weights)
    reason = too_large("expert_mlp", request)
    assert reason is not None
    assert "2.5 GB of memory are free" in reason
    assert too_large("boundary", request) is None
    (row,) = bench(
        ["expert_mlp"], full, variants=["torch"], tokens=[1], device="cpu", peaks=CPU
    ).rows
    assert (row.status, row.timed) == ("unavailable", False)


# -- interruption, bad values -------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_measured() -> None:
    def stop_at_the_second(done: int, of: int, label: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    result = run("rms_norm", "torch", tokens=(1, 2, 3), on_progress=stop_at_the_second)
    assert result.interrupted
    assert [row.tokens for row in result.rows] == [1]
    assert result.rows[0].timed


def test_ctrl_c_in_a_round_keeps_the_whole_rounds() -> None:
    done = 0

    def call() -> None:
        nonlocal done
        done += 1
        if done == 1 + 2 * 5 + 1:  # one to warm up, five rounds of two calls, one more
            raise KeyboardInterrupt

    a = Candidate("a", [call])
    b = Candidate("b", [call])
    assert measure([a, b], "cpu", rounds=20) is False
    assert len(a.seconds) == len(b.seconds) == 4
    assert a.timing() is not None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ops": ["nonsense"]}, "no operation"),
        ({"ops": []}, "at least one operation"),
        ({"variants": ["nonsense"]}, "no variant 'nonsense'"),
        ({"tokens": (0,)}, "tokens must be 1 or more"),
        ({"flavours": ("hexagonal",)}, "no flavour 'hexagonal'"),
        ({"rounds": 2}, "needs 3 rounds"),
    ],
)
def test_bad_values(settings: dict[str, Any], words: str) -> None:
    arguments = {"ops": ["rms_norm"], "shapes": SHAPES, "device": "cpu", "peaks": PEAKS} | settings
    with pytest.raises(KernelError, match=words):
        bench(**{"dtype": torch.float32, **arguments})


def test_no_speed_without_a_passed_check() -> None:
    right = BenchRow(op="boundary", variant="mine", tokens=1, status="passed", microseconds=3.0)
    for status in ("refused", "raised", "time limit", "crashed", "unavailable"):
        with pytest.raises(KernelError, match="shows no speed"):
            replace(right, status=status)
    with pytest.raises(KernelError, match="shows no speed"):
        BenchRow(op="boundary", variant="mine", tokens=1, status="refused", roofline_fraction=0.5)
    with pytest.raises(KernelError, match="without microseconds"):
        BenchRow(op="boundary", variant="mine", tokens=1, status="passed", roofline_fraction=0.5)
    with pytest.raises(KernelError, match="must be a number"):
        replace(right, microseconds=float("nan"))


# -- timing -------------------------------------------------------------------------------------


def test_a_time_is_that_of_one_call() -> None:
    slow = Candidate("slow", [lambda: time.sleep(0.006)] * 2, repeat=2)
    quick = Candidate("quick", [lambda: time.sleep(0.002)])
    assert measure([slow, quick], "cpu", rounds=MIN_ROUNDS)
    timing, other = slow.timing(), quick.timing()
    assert timing is not None
    assert other is not None
    assert (timing.calls, timing.rounds, timing.in_graph) == (4, 3, False)
    assert 0.006 <= timing.low <= timing.median <= timing.high < 0.06
    assert 0.002 <= other.median < timing.median


def test_candidates_take_turns() -> None:
    order: list[str] = []
    both = [Candidate(n, [lambda n=n: order.append(n)]) for n in "ab"]  # type: ignore[misc]
    measure(both, "cpu", rounds=3)
    assert order == ["a", "b"] + ["a", "b"] * 3  # warm-up, then the rounds


def test_too_few_rounds_give_no_time() -> None:
    one = Candidate("one", [lambda: None])
    one.seconds = [1.0, 1.0]
    assert one.timing() is None
    one.seconds = [1.0, 2.0, 4.0]
    timing = one.timing()
    assert timing is not None
    assert timing.median == 2.0
    with pytest.raises(KernelError, match="nothing to time"):
        Candidate("none", [])


@pytest.mark.parametrize("touched", [0, 1e3, 5e6, 60e6, 1e9])
def test_rotation_is_cold(touched: float) -> None:
    calls, cache = 32, 60_000_000
    sets = sets_wanted(touched, calls, cache)
    assert 1 <= sets <= calls
    # Either each call has a set of its own, or what lies between two uses exceeds the cache.
    assert sets == calls or sets * touched > COLD * cache
    if touched == 1e9:
        assert sets == 1


def test_a_cpu_has_nothing_to_flush() -> None:
    assert l2_bytes("cpu") == 0
    Flush("cpu")()


def test_peaks_of_this_cpu() -> None:
    peaks = measured_peaks("cpu")
    assert peaks.kind == "measured here"
    assert set(peaks.flops) == {"fp32", "bf16"}
    assert 1e8 < peaks.bandwidth < 1e13  # from a busy small core to a large server's cache
    with pytest.raises(KernelError, match="cpu or cuda"):
        measured_peaks("meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_times_are_of_graphs_and_cold() -> None:
    """A copy of 8 MiB, which fits every L2, must not look faster than memory."""
    size = 8 * 2**20 // 4
    sources = [torch.rand(size, device="cuda") for _ in range(16)]
    targets = [torch.empty_like(s) for s in sources]
    calls = [lambda s=s, t=t: t.copy_(s) for s, t in zip(sources, targets, strict=True)]  # type: ignore[misc]
    one = Candidate("copy", calls)
    waits = Candidate("waits", [lambda: sources[0].sum().item()])
    assert measure([one, waits], "cuda", rounds=10)
    timing, other = one.timing(), waits.timing()
    assert timing is not None
    assert other is not None
    assert timing.in_graph
    assert size * 4 / timing.median < 1.1 * measured_peaks("cuda").bandwidth
    assert not other.in_graph
    assert "host time included" in other.note
