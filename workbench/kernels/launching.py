"""What launch configurations depend on beside sizes: asked of the device in one place.

A tensor without memory (the meta device) stands for one on a Hopper or Blackwell GPU: that is what
kernels are compiled for when no GPU is here (``targets.py``), so they are compiled as they would be
launched there.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

H200_MULTIPROCESSORS = 132
# The interpreter runs programs one after the other: few, and enough to divide work among them.
INTERPRETER_MULTIPROCESSORS = 2


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """How many programs a GPU runs at the same time, at one a multiprocessor."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return H200_MULTIPROCESSORS if device.type == "meta" else INTERPRETER_MULTIPROCESSORS


@lru_cache(maxsize=16)
def _dependent(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return device.type == "meta"


def dependent_launch(x: Tensor) -> bool:
    """Whether a kernel on ``x`` is launched as a programmatic dependent of the one before it.

    Such a launch is set up while its predecessor still runs (compute capability 9.0 and newer). It
    is safe because every kernel here waits for the predecessor before its first access that
    depends on it.
    """
    return _dependent(x.device)
