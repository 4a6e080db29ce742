"""What launches depend on beside sizes, asked in one place: the device, and how tensors lie.

A tensor without memory (the meta device) stands for one on a Hopper or Blackwell GPU: that is what
kernels are compiled for when no GPU is here (``targets.py``), so they are compiled as they would be
launched there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from workbench.errors import KernelError

F = TypeVar("F", bound=Callable[..., Any])

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


def strided(*names: str) -> Callable[[F], F]:
    """Decorator of a kernel's function: only these arguments may be views with rows further apart.

    Every tensor must be contiguous, those of ``names`` in their last axis alone: a kernel is told
    the distance of rows and nothing else, and would read anything else wrong without a word. The
    function then raises KernelError, which names the argument.
    """

    def decorate(function: F) -> F:
        places = list(signature(function).parameters)
        free = tuple(name in names for name in places)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for place, value in enumerate(args):
                if not isinstance(value, Tensor) or value.is_contiguous():
                    continue
                if not free[place] or (value.stride(-1) != 1 and value.shape[-1] > 1):
                    raise KernelError(
                        f"{places[place]} of {function.__name__} has strides {value.stride()} for "
                        f"the shape {tuple(value.shape)}, which this kernel cannot read; give it "
                        f"{'rows that are' if free[place] else 'a tensor that is'} contiguous"
                    )
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
