"""What the tests of the kernels share.

Triton decides once a process whether it interprets. torch.compile imports Triton too, so on a
machine without a GPU the interpreter is switched on here, when pytest loads this folder and before
any test runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from workbench.kernels import registry, triton_runtime
from workbench.kernels.catalogue import BUILT_IN, OPS
from workbench.kernels.check import Verdict, check
from workbench.kernels.shapes import Shapes
from workbench.model.beam import Beam
from workbench.model.checkpoint import load

if triton_runtime.why_not("cpu") is None:
    importlib.import_module("workbench.kernels.triton_runtime").triton  # noqa: B018 - imports it


@pytest.fixture(autouse=True)
def nothing_selected_or_registered() -> Iterator[None]:
    """Every test starts and ends with the reference everywhere and no variant of its own."""
    registry.reset()
    yield
    registry.reset()
    for op in OPS:
        for name in registry.names(op):
            if name not in BUILT_IN[op]:
                registry.unregister(op, name)


@pytest.fixture(scope="session")
def tiny_beam() -> Beam:
    """beam-tiny: full attention in layers 2 and 8, a dense MLP in layer 0."""
    return load("beam-tiny", device="cpu", dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny(tiny_beam: Beam) -> Shapes:
    """The sizes of beam-tiny."""
    return Shapes.of(tiny_beam.config)


@pytest.fixture
def verdict_of(tiny: Shapes) -> Callable[..., Verdict]:
    """Check a function as a variant of an operation, at the sizes of beam-tiny."""

    def run(op: str, function: Callable[..., Any], **how: Any) -> Verdict:
        registry.register(op, "mine")(function)
        return check(op, "mine", tiny, **how)

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
