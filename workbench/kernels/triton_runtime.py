"""The one place that imports Triton, so that every kernel file runs on a GPU and on a CPU alike.

``from workbench.kernels.triton_runtime import INTERPRETED, libdevice, tl, triton`` gives

* on a machine with a CUDA GPU: Triton as it is;
* without one: Triton whose kernels run on CPU tensors in its interpreter, repaired by
  ``triton_interpreter`` (as shipped, it computes BF16 and FP8 from the wrong bits, silently);
* with ``TRITON_INTERPRET=0`` in the environment: Triton as it is, GPU or not, to compile only.

Triton decides between the two once, when it is imported. Importing *this* module decides and
changes nothing: Triton is imported when one of the four names is first asked for, and ``why_not``
answers before.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import WorkbenchError

if TYPE_CHECKING:  # at run time these are attributes made by ``__getattr__`` below
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    INTERPRETED: bool

__all__ = ["INTERPRETED", "TritonUnavailableError", "libdevice", "tl", "triton", "why_not"]

_SWITCH = "TRITON_INTERPRET"
_NAMES = ("INTERPRETED", "libdevice", "tl", "triton")
_importing = threading.RLock()

_IMPORTED_WITHOUT = (
    "Triton was imported in this process before its interpreter was switched on (torch.compile "
    "imports it too) and it cannot be switched on later: restart the kernel and import "
    "workbench.kernels before torch.compile runs, or start Python with TRITON_INTERPRET=1"
)
_NOT_INSTALLED = (
    "the package triton is not installed (it has Linux wheels only): on Linux, "
    "`pip install triton` in the version that belongs to this torch"
)


class TritonUnavailableError(WorkbenchError):
    """Triton's kernels cannot run in this process; the sentence says why and what to do."""


def why_not(device: str) -> str | None:
    """Why Triton kernels cannot run on tensors of ``device`` in this process; None when they can.

    Imports neither Triton nor anything else and changes nothing, so it may be asked at any time
    (a later answer differs only if something imported Triton in between).
    """
    if device not in ("cpu", "cuda"):
        return f"Triton kernels take cpu or cuda tensors, not {device}"
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        return _NOT_INSTALLED
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        return "this machine has no CUDA GPU that torch can use"
    interpreted = _is_interpreted() if "triton" in sys.modules else _wants_interpreter(has_gpu)
    if device == "cuda":
        if interpreted:
            return (
                "TRITON_INTERPRET=1 is set, so kernels are interpreted on the CPU: start Python "
                "without it to run them on the GPU"
            )
        return None
    if interpreted:
        return None
    if os.environ.get(_SWITCH) is not None and not _switched_on():
        return (
            f"TRITON_INTERPRET={os.environ[_SWITCH]} is set, so Triton only compiles here: start "
            "Python without it to run kernels on CPU tensors"
        )
    if has_gpu:
        return (
            "Triton compiles for the GPU in this process: move the tensors to cuda, or start "
            "Python with TRITON_INTERPRET=1 to interpret kernels on CPU tensors"
        )
    return _IMPORTED_WITHOUT


def __getattr__(name: str) -> Any:
    """Import Triton when one of its names is first asked for (``from ... import tl`` asks)."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _importing:
        if name not in globals():
            globals().update(_load())
    return globals()[name]


def _load() -> dict[str, Any]:
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        raise TritonUnavailableError(_NOT_INSTALLED + ".")
    interpret = _wants_interpreter(torch.cuda.is_available())
    if "triton" not in sys.modules:
        _import_triton(interpret=interpret)
    elif interpret and not _is_interpreted():
        raise TritonUnavailableError(_IMPORTED_WITHOUT + ".")
    interpreted = _is_interpreted()
    if interpreted:
        from workbench.kernels import triton_interpreter

        triton_interpreter.install()
    return {
        "INTERPRETED": interpreted,
        "triton": importlib.import_module("triton"),
        "tl": importlib.import_module("triton.language"),
        "libdevice": importlib.import_module("triton.language.extra.libdevice"),
    }


def _import_triton(*, interpret: bool) -> None:
    """Import Triton in the mode wanted, leaving the environment as it was.

    ``@triton.jit`` asks the switch at every decoration, Triton's own functions (``tl.sum``) are
    decorated during the import. So the variable is set for the import only, and the answer is then
    kept in Triton's settings: a variable left behind would reach every child process, and there
    it would keep a torch.compile for a GPU, or our compiling child, from compiling.
    """
    before = os.environ.get(_SWITCH)
    if interpret:
        os.environ[_SWITCH] = "1"
    try:
        triton_module = importlib.import_module("triton")
    finally:
        if before is None:
            os.environ.pop(_SWITCH, None)
    if interpret and before is None:
        knobs = triton_module.knobs
        propagate = knobs.propagate_env
        knobs.propagate_env = False  # else the assignment below writes the variable again
        try:
            knobs.runtime.interpret = True
        finally:
            knobs.propagate_env = propagate


def _switched_on() -> bool:
    return os.environ.get(_SWITCH, "").strip().lower() in ("1", "y", "yes", "on", "true")


def _wants_interpreter(has_gpu: bool) -> bool:
    """The mode this process should be in: as the variable says, else interpreted without a GPU."""
    return _switched_on() if _SWITCH in os.environ else not has_gpu


def _is_interpreted() -> bool:
    """Whether the Triton that is imported already decorates for its interpreter.

    Asked of one of Triton's own functions, not of the variable, which may have changed since.
    """
    standard = sys.modules.get("triton.language.standard")
    return type(getattr(standard, "sum", None)).__name__ == "InterpretedFunction"
