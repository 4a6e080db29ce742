"""Data sheet values against what the sheets print for servers and racks, and names that differ."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise
from typing import Any

import pytest

from workbench import hardware
from workbench.datasheet import SHEETS, GpuSheet, UnknownGpuError, detected, sheet
from workbench.errors import WorkbenchError
from workbench.hardware import Gpu

HOPPER = ("H100", "H200")
RACKS = ("GB200", "GB300")

# As printed: FLOP/s of a whole server (8 GPUs) or rack (72) with 2:4 sparsity; fp32 has none.
PRINTED_SPARSE = {
    "H100": (1, {"tf32": 989e12, "bf16": 1979e12, "fp8": 3958e12}),
    "H200": (1, {"tf32": 989e12, "bf16": 1979e12, "fp8": 3958e12}),
    "B200": (8, {"tf32": 18e15, "bf16": 36e15, "fp8": 72e15, "fp4": 144e15}),
    "GB200": (72, {"tf32": 180e15, "bf16": 360e15, "fp8": 720e15, "fp4": 1440e15}),
    "GB300": (72, {"tf32": 180e15, "bf16": 360e15, "fp8": 720e15}),
}


def test_the_five_gpus_are_there() -> None:
    assert list(SHEETS) == ["H100", "H200", "B200", "GB200", "GB300"]
    assert all(one.name == name for name, one in SHEETS.items())


@pytest.mark.parametrize("name", SHEETS)
def test_tensor_rates_are_half_of_the_printed_sparse_ones(name: str) -> None:
    gpus, sparse = PRINTED_SPARSE[name]
    for dtype, printed in sparse.items():
        assert SHEETS[name].flops[dtype] == pytest.approx(printed / gpus / 2, rel=1e-3), dtype


def test_gb300_fp4_is_the_printed_dense_rate_not_half_of_the_sparse_one() -> None:
    rate = SHEETS["GB300"].flops["fp4"]
    assert rate * 72 == pytest.approx(1080e15)  # "1,440 | 1,080 PFLOPS"
    assert rate == pytest.approx(1.5 * SHEETS["GB200"].flops["fp4"])
    assert rate == 3 * SHEETS["GB300"].flops["fp8"]


@pytest.mark.parametrize("name", SHEETS)
def test_rates_double_as_the_type_halves(name: str) -> None:
    flops = SHEETS[name].flops
    assert flops["bf16"] == pytest.approx(2 * flops["tf32"], rel=1e-3)
    assert flops["fp8"] == pytest.approx(2 * flops["bf16"], rel=1e-3)
    assert flops["fp32"] < flops["tf32"] / 7
    if name in HOPPER:
        assert "fp4" not in flops
    elif name != "GB300":
        assert flops["fp4"] == pytest.approx(2 * flops["fp8"])


@pytest.mark.parametrize(
    ("name", "units", "clock"),
    # Streaming multiprocessors and boost clock (GHz) give the FP32 rate: 128 lanes, 2 operations.
    [("H100", 132, 1.98), ("H200", 132, 1.98), ("B200", 148, 1.98), ("GB200", 148, 2.112)],
)
def test_fp32_is_lanes_times_clock(name: str, units: int, clock: float) -> None:
    expected = units * 128 * 2 * clock * 1e9
    assert SHEETS[name].flops["fp32"] == pytest.approx(expected, rel=0.01)


def test_gb300_fp32_is_within_its_one_printed_digit() -> None:
    assert 5.5e15 <= 72 * SHEETS["GB300"].flops["fp32"] < 6.5e15


@pytest.mark.parametrize(
    ("name", "gpus", "total", "unit"),
    [  # capacity of the system as printed, and the last digit that is printed
        ("H100", 8, 640e9, 1e9),
        ("H200", 8, 1128e9, 1e9),
        ("B200", 8, 1440e9, 1e9),
        ("GB200", 72, 13.4e12, 0.1e12),
        ("GB300", 72, 20e12, 1e12),
    ],
)
def test_capacity_times_gpus_is_the_systems(
    name: str, gpus: int, total: float, unit: float
) -> None:
    assert abs(SHEETS[name].memory_bytes * gpus - total) <= unit / 2


@pytest.mark.parametrize(
    ("name", "mebibytes", "package"),
    # nvidia-smi's total lies between the printed GB and the same number of GiB.
    [
        ("H100", 81559, 80),
        ("H200", 143771, 141),
        ("B200", 183359, 180),
        ("GB200", 189471, 186),
        ("GB300", 284208, 279),
    ],
)
def test_the_driver_total_is_between_printed_gb_and_gib(
    name: str, mebibytes: int, package: int
) -> None:
    one = SHEETS[name]
    assert one.driver_bytes == mebibytes * 1024 * 1024
    assert one.memory_bytes == package * 10**9
    assert one.memory_bytes < one.driver_bytes < package * 2**30
    # torch's total, where recorded, is a little less; it is what there is to plan with.
    assert one.usable_bytes == (one.torch_bytes or one.driver_bytes)
    assert 0.99 * one.driver_bytes < one.usable_bytes <= one.driver_bytes


def test_order_of_capacity_and_bandwidth() -> None:
    ordered = list(SHEETS.values())
    for smaller, larger in pairwise(ordered):
        assert smaller.memory_bytes < larger.memory_bytes
        assert smaller.usable_bytes < larger.usable_bytes
        assert smaller.bandwidth <= larger.bandwidth
        assert smaller.flops["bf16"] <= larger.flops["bf16"]
    assert SHEETS["H100"].bandwidth == 3.35e12
    assert SHEETS["H200"].bandwidth == 4.8e12
    assert SHEETS["B200"].bandwidth * 8 == 64e12
    assert all(SHEETS[name].bandwidth * 72 == 576e12 for name in RACKS)


@pytest.mark.parametrize("name", SHEETS)
def test_nvlink_is_one_direction(name: str) -> None:
    one = SHEETS[name]
    both_ways = 900e9 if name in HOPPER else 1.8e12
    # 18 links a GPU in both generations, of 25 and 50 GB/s each way.
    assert one.nvlink_bandwidth == both_ways / 2 == 18 * (25e9 if name in HOPPER else 50e9)
    assert one.nvlink_domain == (72 if name in RACKS else 8)
    if name in RACKS:  # 130 TB/s is printed for the rack, both ways
        assert 2 * one.nvlink_bandwidth * 72 == pytest.approx(130e12, rel=0.01)


def test_compute_capabilities() -> None:
    assert {name: one.compute_capability for name, one in SHEETS.items()} == {
        "H100": (9, 0),
        "H200": (9, 0),
        "B200": (10, 0),
        "GB200": (10, 0),
        "GB300": (10, 3),
    }


# -- sources --------------------------------------------------------------------------------------

NOT_FIGURES = {"name", "form", "flops", "sources", "measured", "torch_bytes"}


@pytest.mark.parametrize("name", SHEETS)
def test_every_figure_has_a_source_and_every_source_a_figure(name: str) -> None:
    one = SHEETS[name]
    figures = {f.name for f in fields(one)} - NOT_FIGURES
    figures |= {f"flops.{dtype}" for dtype in one.flops}
    recorded = {"torch_bytes"} if one.torch_bytes else set()
    assert set(one.sources) == figures | recorded
    assert all("NVIDIA" in text for key, text in one.sources.items() if key not in recorded)
    assert set(one.flops) == {"bf16", "fp8", "tf32", "fp32"} | (
        set() if name in HOPPER else {"fp4"}
    )
    for figure in figures - {"compute_capability"}:
        owner, _, dtype = figure.partition(".")
        value = getattr(one, owner)[dtype] if dtype else getattr(one, owner)
        assert value > 0


@pytest.mark.parametrize("name", SHEETS)
def test_the_arithmetic_is_named(name: str) -> None:
    one = SHEETS[name]
    for dtype in ("bf16", "fp8", "tf32"):
        text = one.sources[f"flops.{dtype}"]
        assert "sparsity" in text
        assert "halved" in text or "dense" in text
    assert "halved" in one.sources["nvlink_bandwidth"]
    if name in RACKS:
        assert all("/ 72" in one.sources[key] for key in ("bandwidth", "memory_bytes"))
        assert all("/ 72" in one.sources[f"flops.{dtype}"] for dtype in one.flops)


def test_measured_values_are_apart_and_below_the_limits() -> None:
    h200 = SHEETS["H200"]
    values = {what: value for what, (value, _) in h200.measured.items()}
    assert values == {
        "copy_bandwidth": 4.28e12,
        "read_bandwidth": 4.23e12,
        "bf16_flops_low": 770e12,
        "bf16_flops_high": 798e12,
    }
    assert all("recorded, one H200, torch 2.11, CUDA 13.0" in t for _, t in h200.measured.values())
    assert values["copy_bandwidth"] < h200.bandwidth
    assert values["bf16_flops_high"] < h200.flops["bf16"]
    assert not any(SHEETS[name].measured for name in SHEETS if name != "H200")


# -- the dataclass --------------------------------------------------------------------------------


def test_json_form_holds_everything() -> None:
    for one in SHEETS.values():
        value = json.loads(json.dumps(one.to_dict()))
        assert set(value) == {f.name for f in fields(one)} | {"usable_bytes"}
        assert value["flops"] == dict(one.flops)
        assert value["sources"] == dict(one.sources)
    value = SHEETS["H200"].to_dict()
    assert value["compute_capability"] == "9.0"
    assert value["usable_bytes"] == 150_109_880_320  # torch's total on the H200 of this project
    assert value["measured"]["read_bandwidth"]["value"] == 4.23e12


def test_without_a_driver_total_the_printed_capacity_is_used() -> None:
    one = replace(SHEETS["B200"], driver_bytes=None)
    assert one.usable_bytes == 180 * 10**9
    assert one.to_dict()["driver_bytes"] is None


def test_sheets_cannot_be_changed() -> None:
    one = SHEETS["H100"]
    changeable: Any = one
    with pytest.raises(FrozenInstanceError):
        changeable.bandwidth = 1.0
    for mapping in (one.flops, one.sources, one.measured, SHEETS):
        anything: Any = mapping
        with pytest.raises(TypeError):
            anything["bf16"] = 1.0
    assert len({*SHEETS.values()}) == 5  # usable as keys of a cache


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-SXM5-80GB", "H100"),
        ("NVIDIA H200", "H200"),
        (" nvidia  h200 ", "H200"),
        ("h200_sxm", "H200"),
        ("NVIDIA B200", "B200"),
        ("DGX B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("gb200-nvl72", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("Gb300 NVL72", "GB300"),
    ],
)
def test_names_of_people_and_drivers(text: str, name: str) -> None:
    assert sheet(text) is SHEETS[name]


@pytest.mark.parametrize(
    ("text", "original"),
    [
        ("H100 PCIe", "H100 (SXM, 80 GB)"),
        ("NVIDIA H100 NVL", "H100 (SXM, 80 GB)"),
        ("NVIDIA H100 80GB HBM2e", "H100 (SXM, 80 GB)"),
        ("NVIDIA H200 NVL", "H200 (SXM)"),
        ("NVIDIA H200 MIG 1g.18gb", "H200 (SXM)"),
        ("GB200 NVL4", "GB200 (NVL72)"),
    ],
)
def test_a_variant_is_refused_as_another_card(text: str, original: str) -> None:
    with pytest.raises(UnknownGpuError) as caught:
        sheet(text)
    message = str(caught.value)
    assert message.startswith(f"unknown GPU {text!r}: ")
    assert f"it is not the {original} and" in message


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("H20O", "the closest name is H200"),
        ("NVIDIA H20", "the closest name is H200"),
        ("NVIDIA A100-SXM4-80GB", "name one of these"),
        ("A100", "the closest name is H100"),
        ("GH200", "the closest name is H200"),
        ("B300", "the closest name is GB300"),
        ("GB20", "the closest name is GB200"),
        ("MI300X", "name one of these"),
        ("", "name one of these"),
        ("NVIDIA", "name one of these"),
        ("x" * 5000, "name one of these"),
    ],
)
def test_an_unknown_name_says_what_is_known(text: str, advice: str) -> None:
    with pytest.raises(WorkbenchError, match=r"^unknown GPU '") as caught:
        sheet(text)
    message = str(caught.value)
    assert all(f"{one.name} ({one.form})" in message for one in SHEETS.values())
    assert message.endswith(f"; {advice}")
    assert "\n" not in message
    assert len(message) < 300


# -- this machine ---------------------------------------------------------------------------------


def here(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> tuple[GpuSheet | None, ...]:
    monkeypatch.setattr(hardware, "torch_gpus", lambda: gpus)
    found = detected()
    assert tuple(gpu for gpu, _ in found) == gpus
    return tuple(known for _, known in found)


def test_detected_takes_the_memory_of_the_gpu_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    total = int(139.8 * 2**30)  # what torch 2.11 reports on an H200
    h200 = Gpu(name="NVIDIA H200", memory_bytes=total, compute_capability=(9, 0))
    (known,) = here(monkeypatch, h200)
    assert known is not None
    assert known.usable_bytes == total
    assert "measured here" in known.sources["torch_bytes"]
    assert known.flops == SHEETS["H200"].flops
    table = SHEETS["H200"]
    assert replace(known, torch_bytes=table.torch_bytes, sources=table.sources) == table
    assert table.torch_bytes == 150_109_880_320  # the table itself is untouched


def test_detected_keeps_what_it_does_not_know_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 143771 * 2**20
    found = here(
        monkeypatch,
        Gpu(name="NVIDIA L40S", memory_bytes=46068 * 2**20, compute_capability=(8, 9)),
        Gpu(name="NVIDIA H200", memory_bytes=total, compute_capability=(9, 0)),
        Gpu(name="NVIDIA H200 NVL", memory_bytes=total, compute_capability=(9, 0)),
        Gpu(name="NVIDIA H200", memory_bytes=total // 2, compute_capability=(9, 0)),  # a slice
        Gpu(name="NVIDIA H200", memory_bytes=total, compute_capability=(8, 0)),
        Gpu(name="NVIDIA GB300", memory_bytes=252 * 10**9, compute_capability=(10, 3)),  # desktop
    )
    assert [known is not None for known in found] == [False, True, False, False, False, False]
    assert here(monkeypatch) == ()


def test_detected_agrees_with_torch_here() -> None:
    assert [gpu for gpu, _ in detected()] == list(hardware.torch_gpus())


def test_looking_up_a_sheet_imports_nothing_heavy() -> None:
    code = (
        "import sys; from workbench.datasheet import sheet; sheet('GB200').to_dict();"
        "print(sorted({'torch', 'numpy', 'plotly', 'IPython'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
