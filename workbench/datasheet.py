"""What NVIDIA prints about the GPUs Beam is served on, figure by figure with its source.

Every rate is the **dense** one, per GPU. Data sheets often print the rate with 2:4 sparsity, for a
whole server or rack, and NVLink in both directions together: each value says in ``sources`` how it
was derived from what is printed. These are limits of the hardware; no program reaches them all,
and what this project measured stands apart in ``measured``.

The documents are named for whoever wants to check. They were not at hand when this was written:
each figure was compared with public copies and tables instead. The least certain are B200's and
GB200's bandwidth (7.7 TB/s in some tables), GB300's 279 GB (288 in others) and every ``fp32``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from workbench import hardware
from workbench.errors import WorkbenchError
from workbench.hardware import Gpu

MIB = 2**20

# How far a GPU's own total may lie from the driver's usual one before it must be another card:
# torch reports about half a percent less than nvidia-smi, the next variant differs by a tenth.
MEMORY_TOLERANCE = 0.03


class UnknownGpuError(WorkbenchError):
    """A GPU name for which no data sheet values are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSheet:
    """Data sheet values of one GPU; :func:`sheet` looks them up by name.

    ``memory_bytes`` is the printed capacity in decimal bytes. It is *less* than ``driver_bytes``,
    the total that the driver reports (nvidia-smi's MiB), because what is printed as GB is close to
    GiB. ``torch_bytes`` is torch's ``total_memory``, which is what an engine divides up: about half
    a percent below the driver's total; None where it was not recorded.

    ``bandwidth`` is of the GPU's memory, in bytes/s. ``flops`` has dense FLOP/s by "bf16", "fp8",
    "fp4", "tf32" and "fp32" (this one outside the tensor cores); a type the chip has no tensor
    core for is absent. ``nvlink_bandwidth`` is bytes/s in ONE direction, half of the printed total;
    ``nvlink_domain`` is how many GPUs reach one another over NVLink in the system of ``form``,
    ``host_gpus`` how many of them one operating system has.

    ``sources`` names the document and the arithmetic for each figure, by field, for the rates as
    "flops.bf16"; ``measured`` has (value, where it was recorded) for what was measured on this GPU.
    """

    name: str
    form: str
    memory_bytes: int
    driver_bytes: int | None
    torch_bytes: int | None = None
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    nvlink_bandwidth: float
    nvlink_domain: int
    host_gpus: int
    compute_capability: tuple[int, int]
    sources: Mapping[str, str] = field(hash=False)
    measured: Mapping[str, tuple[float, str]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("flops", "sources", "measured"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def usable_bytes(self) -> int:
        """Bytes to plan with: torch's total where recorded, else the driver's, else the printed."""
        return self.torch_bytes or self.driver_bytes or self.memory_bytes

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "name": self.name,
            "form": self.form,
            "memory_bytes": self.memory_bytes,
            "driver_bytes": self.driver_bytes,
            "torch_bytes": self.torch_bytes,
            "usable_bytes": self.usable_bytes,
            "bandwidth": self.bandwidth,
            "flops": dict(self.flops),
            "nvlink_bandwidth": self.nvlink_bandwidth,
            "nvlink_domain": self.nvlink_domain,
            "host_gpus": self.host_gpus,
            "compute_capability": "{}.{}".format(*self.compute_capability),
            "sources": dict(self.sources),
            "measured": {
                what: {"value": value, "source": source}
                for what, (value, source) in self.measured.items()
            },
        }


HOPPER = "NVIDIA H100 Tensor Core GPU Architecture white paper, H100 SXM5"
H100_SHEET = "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM"
H200_SHEET = "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM"
HGX = "NVIDIA HGX platform page, HGX B200"
DGX = "NVIDIA DGX B200 data sheet"
GB200 = "NVIDIA GB200 NVL72 data sheet"
GB300 = "NVIDIA GB300 NVL72 data sheet"
CAPABILITY = "NVIDIA developer site, CUDA GPU Compute Capability"
LISTING = "in public nvidia-smi listings"
RECORDED = "recorded, one H200, torch 2.11, CUDA 13.0"

H100_SXM = GpuSheet(
    name="H100",
    form="SXM, 80 GB",
    memory_bytes=80 * 10**9,
    driver_bytes=81559 * MIB,
    bandwidth=3.35e12,
    flops={"bf16": 989.4e12, "fp8": 1978.9e12, "tf32": 494.7e12, "fp32": 66.9e12},
    nvlink_bandwidth=450e9,
    nvlink_domain=8,
    host_gpus=8,
    compute_capability=(9, 0),
    sources={
        "memory_bytes": f"{H100_SHEET}: 80 GB",
        "driver_bytes": f"81559 MiB for «NVIDIA H100 80GB HBM3» {LISTING}",
        "bandwidth": f"{H100_SHEET}: 3.35 TB/s",
        "flops.bf16": f"{HOPPER}: 989.4 TFLOPS dense (the data sheet prints 1,979 with sparsity)",
        "flops.fp8": f"{HOPPER}: 1,978.9 TFLOPS dense (the data sheet prints 3,958 with sparsity)",
        "flops.tf32": f"{HOPPER}: 494.7 TFLOPS dense (the data sheet prints 989 with sparsity)",
        "flops.fp32": f"{HOPPER}: 66.9 TFLOPS",
        "nvlink_bandwidth": f"{H100_SHEET}: 900 GB/s in both directions together, halved",
        "nvlink_domain": f"{H100_SHEET}: 8 GPUs in HGX H100 and DGX H100",
        "host_gpus": f"{H100_SHEET}: 8 GPUs in HGX H100 and DGX H100",
        "compute_capability": CAPABILITY,
    },
)

H200_SXM = GpuSheet(
    name="H200",
    form="SXM",
    memory_bytes=141 * 10**9,
    driver_bytes=143771 * MIB,
    torch_bytes=150_109_880_320,
    bandwidth=4.8e12,
    flops=H100_SXM.flops,  # the same GH100 chip at the same clocks: the memory is what differs
    nvlink_bandwidth=450e9,
    nvlink_domain=8,
    host_gpus=8,
    compute_capability=(9, 0),
    sources={
        "memory_bytes": f"{H200_SHEET}: 141 GB",
        "driver_bytes": f"143771 MiB for «NVIDIA H200» {LISTING} and on this project's H200",
        "torch_bytes": f"torch's total_memory; {RECORDED}",
        "bandwidth": f"{H200_SHEET}: 4.8 TB/s",
        "flops.bf16": f"{H200_SHEET}: 1,979 TFLOPS with sparsity, halved; digits as {HOPPER}",
        "flops.fp8": f"{H200_SHEET}: 3,958 TFLOPS with sparsity, halved; digits as {HOPPER}",
        "flops.tf32": f"{H200_SHEET}: 989 TFLOPS with sparsity, halved; digits as {HOPPER}",
        "flops.fp32": f"{H200_SHEET}: 67 TFLOPS; digits as {HOPPER}",
        "nvlink_bandwidth": f"{H200_SHEET}: 900 GB/s in both directions together, halved",
        "nvlink_domain": f"{H200_SHEET}: 8 GPUs in HGX H200 and DGX H200",
        "host_gpus": f"{H200_SHEET}: 8 GPUs in HGX H200 and DGX H200",
        "compute_capability": CAPABILITY,
    },
    measured={
        "copy_bandwidth": (4.28e12, f"copy, bytes read and written; {RECORDED}"),
        "read_bandwidth": (4.23e12, f"read only (a sum); {RECORDED}"),
        "bf16_flops_low": (770e12, f"matmul 8192³, random data, slowest; {RECORDED}"),
        "bf16_flops_high": (798e12, f"matmul 8192³, random data, fastest; {RECORDED}"),
    },
)

B200_SXM = GpuSheet(
    name="B200",
    form="HGX and DGX",
    memory_bytes=180 * 10**9,
    driver_bytes=183359 * MIB,
    bandwidth=8e12,
    flops={"bf16": 2.25e15, "fp8": 4.5e15, "fp4": 9e15, "tf32": 1.125e15, "fp32": 75e12},
    nvlink_bandwidth=900e9,
    nvlink_domain=8,
    host_gpus=8,
    compute_capability=(10, 0),
    sources={
        "memory_bytes": f"{DGX}: 1,440 GB / 8 (announced with 192 GB)",
        "driver_bytes": f"183359 MiB for «NVIDIA B200» {LISTING}",
        "bandwidth": f"{DGX}: 64 TB/s / 8 (a 7,680 bit bus at 3,996 MHz, which drivers report, "
        "gives 7.7 TB/s, and so do later tables)",
        "flops.bf16": f"{HGX}: 36 PFLOPS with sparsity, halved, / 8",
        "flops.fp8": f"{HGX}: 72 PFLOPS with sparsity, halved, / 8",
        "flops.fp4": f"{HGX}: 144 PFLOPS with sparsity and 72 without, the latter / 8",
        "flops.tf32": f"{HGX}: 18 PFLOPS with sparsity, halved, / 8",
        "flops.fp32": f"{HGX}: 600 TFLOPS / 8",
        "nvlink_bandwidth": f"{HGX}: 1.8 TB/s in both directions together, halved",
        "nvlink_domain": f"{HGX}: 8 GPUs",
        "host_gpus": f"{HGX}: 8 GPUs",
        "compute_capability": CAPABILITY,
    },
)

GB200_NVL72 = GpuSheet(
    name="GB200",
    form="NVL72",
    memory_bytes=186 * 10**9,
    driver_bytes=189471 * MIB,
    bandwidth=8e12,
    flops={"bf16": 2.5e15, "fp8": 5e15, "fp4": 10e15, "tf32": 1.25e15, "fp32": 80e12},
    nvlink_bandwidth=900e9,
    nvlink_domain=72,
    host_gpus=4,
    compute_capability=(10, 0),
    sources={
        "memory_bytes": f"{GB200}: 13.4 TB / 72; NVIDIA MIG User Guide, supported GPUs: 186 GB",
        "driver_bytes": f"189471 MiB for «NVIDIA GB200» {LISTING}",
        "bandwidth": f"{GB200}: 576 TB/s / 72",
        "flops.bf16": f"{GB200}: 360 PFLOPS with sparsity, halved, / 72",
        "flops.fp8": f"{GB200}: 720 PFLOPS with sparsity, halved, / 72",
        "flops.fp4": f"{GB200}: 1,440 PFLOPS with sparsity, halved, / 72",
        "flops.tf32": f"{GB200}: 180 PFLOPS with sparsity, halved, / 72",
        "flops.fp32": f"{GB200}: 5,760 TFLOPS / 72",
        "nvlink_bandwidth": f"{GB200}: 130 TB/s / 72 = 1.8 TB/s in both directions, halved",
        "nvlink_domain": f"{GB200}: 72 GPUs",
        "host_gpus": f"{GB200}: 18 compute trays, 72 / 18",
        "compute_capability": CAPABILITY,
    },
)

GB300_NVL72 = GpuSheet(
    name="GB300",
    form="NVL72",
    memory_bytes=279 * 10**9,
    driver_bytes=284208 * MIB,
    bandwidth=8e12,
    flops={"bf16": 2.5e15, "fp8": 5e15, "fp4": 15e15, "tf32": 1.25e15, "fp32": 6e15 / 72},
    nvlink_bandwidth=900e9,
    nvlink_domain=72,
    host_gpus=4,
    compute_capability=(10, 3),
    sources={
        "memory_bytes": f"{GB300}: 20 TB / 72, to the GB 279 (announced with 288 GB)",
        "driver_bytes": f"284208 MiB for «NVIDIA GB300» {LISTING}",
        "bandwidth": f"{GB300}: 576 TB/s / 72",
        "flops.bf16": f"{GB300}: 360 PFLOPS with sparsity, halved, / 72",
        "flops.fp8": f"{GB300}: 720 PFLOPS with sparsity, halved, / 72",
        # Sparsity brings only a third here, so the sparse figure must not be halved.
        "flops.fp4": f"{GB300}: 1,440 PFLOPS with sparsity and 1,080 without, the latter / 72",
        "flops.tf32": f"{GB300}: 180 PFLOPS with sparsity, halved, / 72",
        "flops.fp32": f"{GB300}: 6 PFLOPS (printed to one digit) / 72",
        "nvlink_bandwidth": f"{GB300}: 130 TB/s / 72 = 1.8 TB/s in both directions, halved",
        "nvlink_domain": f"{GB300}: 72 GPUs",
        "host_gpus": f"{GB300}: 18 compute trays, 72 / 18",
        "compute_capability": CAPABILITY,
    },
)

SHEETS: Mapping[str, GpuSheet] = MappingProxyType(
    {one.name: one for one in (H100_SXM, H200_SXM, B200_SXM, GB200_NVL72, GB300_NVL72)}
)

# Written out rather than matched by a pattern: "H100 PCIe", "H100 NVL", "H200 NVL", "GB200 NVL4",
# an HBM2e H100 or a MIG slice begin with the same letters and have other memory, rates or links.
ALIASES: Mapping[str, str] = MappingProxyType(
    {name: name for name in SHEETS}
    | dict.fromkeys(
        ("H100 SXM", "H100 SXM5", "H100 80GB HBM3", "H100 SXM 80GB", "H100 SXM5 80GB"), "H100"
    )
    | dict.fromkeys(("H200 SXM", "H200 SXM5", "H200 141GB", "H200 SXM 141GB"), "H200")
    | dict.fromkeys(("HGX B200", "DGX B200", "B200 SXM", "B200 180GB", "B200 SXM 180GB"), "B200")
    | {"GB200 NVL72": "GB200", "GB300 NVL72": "GB300"}
)


def sheet(name: str) -> GpuSheet:
    """Data sheet values by name: "gb200", "H100 SXM", or as a driver or torch says, "NVIDIA H200".

    Upper or lower case, and spaces, hyphens or underscores, make no difference. Raises
    :class:`UnknownGpuError` for any other name, and for a variant of one of these cards whose
    figures differ (H100 PCIe, H100 NVL, H200 NVL, a MIG slice), naming what is known.
    """
    if not isinstance(name, str):
        raise UnknownGpuError(f"the name of a GPU is text, not {name!r:.40}; one is GB200")
    plain = re.sub(r"[\s_-]+", " ", name).strip().upper().removeprefix("NVIDIA ")
    if plain in ALIASES:
        return SHEETS[ALIASES[plain]]
    shown = name if len(name) <= 60 else f"{name[:60]}…"
    known = [f"{one.name} ({one.form})" for one in SHEETS.values()]
    listed = f"{', '.join(known[:-1])} and {known[-1]}"
    variant_of = [one for one in SHEETS if one in plain.split()]
    closest = get_close_matches(plain, SHEETS, n=1)
    if variant_of:
        original = SHEETS[variant_of[0]]
        advice = f"it is not the {original.name} ({original.form}) and has figures of its own"
    elif closest:
        advice = f"the closest name is {closest[0]}"
    else:
        advice = "name one of these"
    raise UnknownGpuError(
        f"unknown GPU {shown!r}: data sheet values are known for {listed}; {advice}"
    )


def detected() -> tuple[tuple[Gpu, GpuSheet | None], ...]:
    """Each GPU torch can use here, in order, with its data sheet values if they are known.

    ``torch_bytes`` of these is torch's own total of that very GPU. The second value is None for a
    GPU without a sheet: an unknown name, or a known one whose memory or compute capability is not
    that card's (a MIG slice, a virtual GPU, a desktop variant under the same name). What NVLink
    connects is not looked at: ``nvlink_domain`` stays the data sheet's. Imports torch if installed.
    """
    return tuple((gpu, _sheet_of(gpu)) for gpu in hardware.torch_gpus())


def _sheet_of(gpu: Gpu) -> GpuSheet | None:
    try:
        found = sheet(gpu.name)
    except UnknownGpuError:
        return None
    expected = found.usable_bytes
    same_memory = abs(gpu.memory_bytes - expected) <= MEMORY_TOLERANCE * expected
    if not same_memory or gpu.compute_capability != found.compute_capability:
        return None
    sources = dict(found.sources) | {"torch_bytes": "measured here: torch's total_memory"}
    return replace(found, torch_bytes=gpu.memory_bytes, sources=sources)
