"""What launches depend on: devices, and tensors that a kernel could not read."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry, triton_runtime
from workbench.kernels.case import Request
from workbench.kernels.catalogue import OPS
from workbench.kernels.launching import dependent_launch, multiprocessors
from workbench.kernels.ops import operation
from workbench.kernels.shapes import Shapes

needs_triton = pytest.mark.skipif(
    triton_runtime.why_not("cpu") is not None, reason=str(triton_runtime.why_not("cpu"))
)


def test_a_tensor_without_memory_stands_for_one_on_hopper_or_blackwell() -> None:
    meta, here = torch.empty(3, device="meta"), torch.empty(3)
    assert dependent_launch(meta)
    assert not dependent_launch(here)
    assert multiprocessors(meta.device) == 132
    assert multiprocessors(here.device) < 8


@needs_triton
@pytest.mark.parametrize("op", OPS)
def test_what_a_kernel_would_read_wrong_is_refused_by_name(op: str, tiny: Shapes) -> None:
    """Every matrix argument once column by column: the same numbers, another order in memory."""
    it = operation(op)
    case = it.case(Request(shapes=tiny, tokens=9, flavour=it.flavours[0]))
    function = registry.find(op, "triton").function
    names = list(inspect.signature(it.reference).parameters)
    tried = 0
    for place, value in enumerate(case.args):
        if not isinstance(value, Tensor) or value.dim() < 2 or min(value.shape[-2:]) < 2:
            continue
        turned = value.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert torch.equal(turned.float(), value.float())
        args = list(case.fresh())
        args[place] = turned
        with pytest.raises(KernelError, match=rf"{names[place]} of {op} has strides .*contiguous"):
            function(*args, **case.kwargs)
        tried += 1
    assert tried


@needs_triton
def test_rows_may_lie_further_apart_where_the_operation_says_so(tiny: Shapes) -> None:
    wide = torch.randn(5, tiny.hidden + 16)
    norm = registry.find("rms_norm", "triton").function
    weight = torch.ones(tiny.hidden)
    assert torch.equal(
        norm(wide[:, : tiny.hidden], weight, 1e-6),
        norm(wide[:, : tiny.hidden].contiguous(), weight, 1e-6),
    )
    with pytest.raises(KernelError, match="weight of rms_norm"):
        norm(wide[:, : tiny.hidden], torch.ones(tiny.hidden, 2)[:, 0], 1e-6)
