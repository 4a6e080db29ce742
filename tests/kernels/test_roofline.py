"""The roofline against hand-written sums, simulated collectives and enumerated routing."""

import json
import subprocess
import sys
from itertools import combinations
from typing import Any

import pytest
import torch

from workbench.datasheet import sheet
from workbench.errors import WorkbenchError
from workbench.kernels.roofline import (
    Bound,
    Rates,
    RooflineError,
    Work,
    all_gather_bytes,
    all_reduce_bytes,
    bound,
    data_sheet_rates,
    expected_destinations,
    expected_visits,
    math_of,
    recorded_rates,
)

ROUND = Rates(
    label="round", kind="measured here", bandwidth=1e12, flops={"bf16": 1e14}, nvlink=1e11
)


@pytest.mark.parametrize(
    ("work", "memory", "compute", "wire", "seconds", "limit"),
    [
        (Work(name="a", bytes=2e9, flops=1e11), 2e-3, 1e-3, 0, 2e-3, "memory"),
        (Work(name="b", bytes=1e9, flops=3e11), 1e-3, 3e-3, 0, 3e-3, "compute"),
        (Work(name="c", bytes=1e9, flops=3e11, wire_bytes=4e8), 1e-3, 3e-3, 4e-3, 7e-3, "wire"),
        (Work(name="d", bytes=1e9, flops=1e11), 1e-3, 1e-3, 0, 1e-3, "memory"),
        (Work(name="e", wire_bytes=1e8), 0, 0, 1e-3, 1e-3, "wire"),
        (Work(name="f", flops=1e11, math="bf16x3"), 0, 3e-3, 0, 3e-3, "compute"),
        (Work(name="nothing"), 0, 0, 0, 0, "memory"),
    ],
)
def test_bound(
    work: Work, memory: float, compute: float, wire: float, seconds: float, limit: str
) -> None:
    found = bound(work, ROUND)
    assert found.memory_seconds == pytest.approx(memory)
    assert found.compute_seconds == pytest.approx(compute)
    assert found.wire_seconds == pytest.approx(wire)
    assert found.seconds == pytest.approx(seconds)
    assert found.limit == limit


def test_fraction_of_a_measured_time() -> None:
    found = Bound(memory_seconds=1e-3, compute_seconds=0.0, wire_seconds=1e-3)
    assert found.fraction(4e-3) == pytest.approx(0.5)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RooflineError, match="measured time must be more than 0"):
            found.fraction(wrong)


def test_values_as_json() -> None:
    work = Work(name="a", bytes=2e9, flops=1e11, count=3, storage="fp8", math="bf16")
    assert json.loads(json.dumps(work.to_dict())) == {
        "name": "a", "bytes": 2e9, "flops": 1e11, "math": "bf16", "storage": "fp8",
        "wire_bytes": 0.0, "count": 3,
    }  # fmt: skip
    assert json.loads(json.dumps(bound(work, ROUND).to_dict()))["limit"] == "memory"
    for rates in (data_sheet_rates("GB200"), recorded_rates("H200")):
        assert json.loads(json.dumps(rates.to_dict()))["bandwidth"] == rates.bandwidth


# -- rates ----------------------------------------------------------------------------------------


def test_data_sheet_rates_are_the_sheets() -> None:
    rates, one = data_sheet_rates("gb300"), sheet("GB300")
    assert rates.kind == "data sheet"
    assert (rates.bandwidth, rates.nvlink, rates.nvlink_domain) == (8e12, 900e9, 72)
    assert dict(rates.flops) == dict(one.flops)
    assert data_sheet_rates(one) == rates


def test_recorded_rates_say_what_is_not_recorded() -> None:
    rates = recorded_rates("H200")
    assert rates.kind == "recorded"
    assert rates.bandwidth == 4.23e12
    assert 770e12 < rates.flops["bf16"] < 798e12
    assert rates.flops["fp8"] == sheet("H200").flops["fp8"]
    assert "torch 2.11" in rates.notes[0]
    assert rates.notes[1] == "fp8, tf32, fp32 and NVLink from the data sheet: not recorded"
    with pytest.raises(RooflineError, match="no rates were recorded on the GB200; use the data"):
        recorded_rates("GB200")


def test_how_weights_are_stored_is_not_what_they_are_multiplied_in() -> None:
    hopper, blackwell = data_sheet_rates("H200"), data_sheet_rates("B200")
    assert [math_of(s, hopper) for s in ("bf16", "fp8", "nvfp4", "fp32")] == [
        "bf16", "fp8", "bf16", "bf16x3",
    ]  # fmt: skip
    assert [math_of(s, blackwell) for s in ("bf16", "fp8", "nvfp4", "fp32")] == [
        "bf16", "fp8", "fp4", "bf16x3",
    ]  # fmt: skip
    assert math_of("fp8", ROUND) == "bf16"


def test_a_split_router_loses_nothing() -> None:
    # What the rate "bf16x3" rests on: an FP32 number is the exact sum of three BF16 numbers, and a
    # product of two BF16 numbers (8 bits each) is exact in FP32 (24 bits).
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    rest, parts = weight.double(), []
    for _ in range(3):
        parts.append(rest.float().bfloat16())
        rest = rest - parts[-1].double()
    assert not rest.any()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(4)).bfloat16()
    exact = x.double() * weight.double()
    assert torch.equal(sum(((x.float() * p.float()).double() for p in parts), exact * 0), exact)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: bound(Work(name="x", flops=1.0, math="fp4"), data_sheet_rates("H200")),
         r"^H200 has no fp4 arithmetic; .* name one of bf16, fp8, tf32, fp32$"),
        (lambda: bound(Work(name="x", wire_bytes=1.0),
                       Rates(label="alone", kind="recorded", bandwidth=1.0, flops={})),
         r"^x: alone has no NVLink rate; give one$"),
        (lambda: Work(name="x", bytes=-1.0), r"^x: bytes must be 0 or more, not -1.0$"),
        (lambda: Work(name="x", flops=float("nan")), r"^x: flops must be 0 or more, not nan$"),
        (lambda: Work(name="x", wire_bytes=float("inf")), r"^x: wire_bytes must be 0 or more"),
        (lambda: Rates(label="r", kind="recorded", bandwidth=0.0, flops={}),
         r"^r: the rate bandwidth must be more than 0, not 0.0$"),
        (lambda: Rates(label="r", kind="recorded", bandwidth=1.0, flops={"fp8": -2.0}),
         r"^r: the rate fp8 must be more than 0"),
        (lambda: Rates(label="r", kind="recorded", bandwidth=1.0, flops={}, nvlink=float("nan")),
         r"^r: the rate nvlink must be more than 0"),
        (lambda: math_of("int3", ROUND), r"^unknown storage 'int3'; use bf16, fp8, nvfp4 or fp32$"),
        (lambda: all_reduce_bytes(1.0, 2, "tree"),  # type: ignore[arg-type]
         r"^unknown all-reduce 'tree'; use one of ring, one_shot, in_switch$"),
        (lambda: expected_visits(8, 9, 1), r"^1 of 8 experts with 9 a token cannot be"),
        (lambda: data_sheet_rates("H20"), r"^unknown GPU 'H20'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(make: Any, text: str) -> None:
    with pytest.raises(WorkbenchError, match=text) as caught:
        make()
    assert "\n" not in str(caught.value)


# -- communication --------------------------------------------------------------------------------


def ring(parts: list[list[int]], *, gather_only: bool = False) -> tuple[list[list[int]], list[int]]:
    """A ring all-reduce of one number a chunk, sent step by step; also the numbers each rank sent.

    ``gather_only`` starts from rank r holding the final chunk r + 1, as after a reduce-scatter.
    """
    ranks = len(parts)
    held, sent = [list(p) for p in parts], [0] * ranks
    for phase in (1,) if gather_only else (0, 1):
        for step in range(ranks - 1):
            moved = []
            for rank in range(ranks):
                chunk = (rank + phase - step) % ranks
                moved.append(((rank + 1) % ranks, chunk, held[rank][chunk]))
                sent[rank] += 1
            for to, chunk, value in moved:
                held[to][chunk] = held[to][chunk] + value if phase == 0 else value
    return held, sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ring_volume_is_what_a_simulated_ring_sends(ranks: int) -> None:
    parts = [[100 * rank + chunk for chunk in range(ranks)] for rank in range(ranks)]
    sums = [sum(p[chunk] for p in parts) for chunk in range(ranks)]
    held, sent = ring(parts)
    assert all(h == sums for h in held)  # the simulation is an all-reduce
    message = 64.0 * ranks  # 64 bytes a chunk
    assert all(64 * count == all_reduce_bytes(message, ranks) for count in sent)
    owned = [[sums[c] if c == (r + 1) % ranks else -1 for c in range(ranks)] for r in range(ranks)]
    held, sent = ring(owned, gather_only=True)
    assert all(h == sums for h in held)
    assert all(64 * count == all_gather_bytes(message, ranks) for count in sent)


def test_other_all_reduces() -> None:
    assert all_reduce_bytes(10.0, 8, "one_shot") == 70  # the message to seven others
    assert all_reduce_bytes(80.0, 8, "in_switch") == 80 + 10  # message up once, own part of the sum
    for algorithm in ("ring", "one_shot", "in_switch"):
        assert all_reduce_bytes(10.0, 1, algorithm) == 0  # type: ignore[arg-type]
    assert all_gather_bytes(10.0, 1) == 0


@pytest.mark.parametrize(
    ("experts", "chosen", "gpus"),
    [(6, 2, 3), (8, 3, 4), (8, 2, 8), (7, 3, 3), (5, 5, 2), (9, 1, 4), (6, 2, 1)],
)
def test_destinations_by_enumeration(experts: int, chosen: int, gpus: int) -> None:
    # Consecutive runs, the first ones larger where experts do not divide.
    owner = [gpu for gpu in range(gpus) for _ in range(experts // gpus + (gpu < experts % gpus))]
    assert len(owner) == experts
    choices = list(combinations(range(experts), chosen))
    visited = [{owner[e] for e in choice} for choice in choices]
    others = [len(found - {own}) for found in visited for own in range(gpus)]
    assert expected_destinations(experts, chosen, gpus) == pytest.approx(sum(others) / len(others))
    for gpu in range(gpus):
        share = sum(gpu in found for found in visited) / len(visited)
        assert expected_visits(experts, chosen, owner.count(gpu)) == pytest.approx(share)


def test_the_roofline_does_not_import_torch() -> None:
    code = "import sys, workbench.kernels.roofline; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
