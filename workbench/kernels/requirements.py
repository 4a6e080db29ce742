"""What a variant needs: functions from :class:`Where` to None, or to a clause that says why not."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from workbench.kernels.shapes import Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where an operation would run: device, activation dtype, sizes (None: any)."""

    device: str
    dtype: torch.dtype
    capability: tuple[int, int] | None = None
    shapes: Shapes | None = None

    @classmethod
    def of(
        cls, device: torch.device | str, dtype: torch.dtype, shapes: Shapes | None = None
    ) -> Where:
        """With the compute capability of a CUDA device."""
        kind = torch.device(device).type
        capability = torch.cuda.get_device_capability(device) if kind == "cuda" else None
        return cls(device=kind, dtype=dtype, capability=capability, shapes=shapes)


Requirement = Callable[[Where], str | None]


def triton_runs(where: Where) -> str | None:
    """Triton on a CUDA device, or its interpreter on a CPU."""
    from workbench.kernels.triton_runtime import why_not

    return why_not(where.device)


@lru_cache(maxsize=1)
def _vllm() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed in this environment"
    return None


def vllm_importable(where: Where) -> str | None:
    """vLLM is installed, and the tensors are on a GPU, where its kernels run."""
    if where.device != "cuda":
        return "vLLM's kernels run on a CUDA device only"
    return _vllm()


@lru_cache(maxsize=1)
def _cpp_compiler() -> str | None:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return None if found else "torch.compile needs a C++ compiler (g++ or clang++) on a CPU"


def compiles(where: Where) -> str | None:
    """torch.compile works: a C++ compiler on a CPU, real Triton on a GPU."""
    if where.device == "cuda":
        return triton_runs(where)
    return _cpp_compiler()


def activations(*dtypes: torch.dtype) -> Requirement:
    """Only these activation dtypes."""

    def check(where: Where) -> str | None:
        if where.dtype in dtypes:
            return None
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        return f"it computes in {names}, not {str(where.dtype).removeprefix('torch.')}"

    return check


def cuda_only(where: Where) -> str | None:
    """A CUDA device."""
    return None if where.device == "cuda" else "it runs on a CUDA device only"
