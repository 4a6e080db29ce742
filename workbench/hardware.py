"""This machine: processor, memory, GPUs, and the versions of what the workbench builds on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

# Distributions whose versions are worth stating beside a measured figure, in this order.
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "jupyterlab",
    "ipywidgets",
    "anywidget",
    "plotly",
    "vllm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that torch can use; memory in bytes, compute capability as (major, minor)."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Machine:
    """What figures measured here were measured on; :func:`machine` makes it.

    ``cores`` are the ones this process may use, ``memory_bytes`` likewise (container limits count;
    None where the system does not say). ``versions`` has None for what is not installed.
    """

    cpu: str
    cores: int
    memory_bytes: int | None
    system: str
    gpus: tuple[Gpu, ...]
    driver_gpus: tuple[str, ...]
    versions: dict[str, str | None]

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "cpu": self.cpu,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "system": self.system,
            "gpus": [
                {
                    "name": gpu.name,
                    "memory_bytes": gpu.memory_bytes,
                    "compute_capability": "{}.{}".format(*gpu.compute_capability),
                }
                for gpu in self.gpus
            ],
            "driver_gpus": list(self.driver_gpus),
            "versions": dict(self.versions),
        }

    def lines(self) -> list[tuple[str, str]]:
        """(what, value) in words, for people."""
        memory = "unknown" if self.memory_bytes is None else gigabytes(self.memory_bytes)
        rows = [
            ("processor", f"{self.cpu}, {self.cores} core{'s' * (self.cores != 1)}"),
            ("memory", memory),
            ("system", self.system),
        ]
        rows += [
            (
                f"GPU {i}",
                "{}, {}, compute capability {}.{}".format(
                    gpu.name, gigabytes(gpu.memory_bytes), *gpu.compute_capability
                ),
            )
            for i, gpu in enumerate(self.gpus)
        ]
        if not self.gpus:
            seen = f" (the driver lists {', '.join(self.driver_gpus)})" if self.driver_gpus else ""
            rows.append(("GPU", f"none that torch can use{seen}"))
        rows.append(
            ("versions", ", ".join(f"{k} {v}" for k, v in self.versions.items() if v is not None))
        )
        return rows

    def __str__(self) -> str:
        return "\n".join(f"{name:<10} {value}" for name, value in self.lines())

    __repr__ = __str__

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, str]:
        cell = 'style="text-align:left;padding:1px 12px 1px 0"'
        rows = "".join(
            f"<tr><th {cell}>{escape(name)}</th><td {cell}>{escape(value)}</td></tr>"
            for name, value in self.lines()
        )
        return {"text/plain": str(self), "text/html": f"<table>{rows}</table>"}


def machine() -> Machine:
    """Look at this machine. Imports torch, where it is installed, to ask for the GPUs."""
    return Machine(
        cpu=cpu_name(),
        cores=usable_cores(),
        memory_bytes=usable_memory(),
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        gpus=torch_gpus(),
        driver_gpus=driver_gpus(),
        versions=versions(),
    )


def versions() -> dict[str, str | None]:
    """Installed versions of Python and :data:`PACKAGES`, read without importing them."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES}


def version_of(distribution: str) -> str | None:
    """Installed version of one distribution, None if it is absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's own name, as far as the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            return name.stdout.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def usable_cores() -> int:
    """Cores this process may use: affinity, and a container's quota (rounded up)."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def usable_memory() -> int | None:
    """Bytes of memory: the machine's, or a container's limit if that is less."""
    limits = []
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits, default=None)


def torch_gpus() -> tuple[Gpu, ...]:
    """The GPUs torch can use; none where torch is absent or built without CUDA."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a shared library of a damaged installation
        return ()
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Gpu(
                name=properties.name,
                memory_bytes=properties.total_memory,
                compute_capability=(properties.major, properties.minor),
            )
        )
    return tuple(found)


def driver_gpus() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs the driver knows, whatever torch can use."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if listing.returncode != 0:
        return ()
    return tuple(line.strip() for line in listing.stdout.splitlines() if line.strip())


def gigabytes(count: int) -> str:
    """Bytes in decimal gigabytes, as data sheets write them."""
    return f"{count / 1e9:.0f} GB" if count >= 10**10 else f"{count / 1e9:.1f} GB"
