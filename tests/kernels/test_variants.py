"""Every variant that runs here, other than the compiler's, passes the check of its operation.

On a machine without a GPU this is Triton through its interpreter. Parametrised over the catalogue:
a variant that is added to it is checked without a change here. (``compile`` is in
``test_compile_variant.py``: it must not compile in a process whose Triton interprets.)
"""

from __future__ import annotations

import pytest
import torch

from workbench.kernels import registry
from workbench.kernels.catalogue import BUILT_IN, OPS
from workbench.kernels.check import check, requests
from workbench.kernels.ops import OPERATIONS
from workbench.kernels.requirements import Where
from workbench.kernels.shapes import Shapes

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float32)
# The interpreter takes milliseconds a program, and attention has many flavours.
TOKENS = {"decode_attention": (1, 5), "prefill_attention": (1, 6)}
FEW = (1, 20)  # one, and more than one tile of 16 rows, several draft blocks


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op in OPS for name in BUILT_IN[op] if name != "compile"]
)
def test_a_variant_passes_the_check(op: str, name: str, tiny: Shapes) -> None:
    runs = [d for d in DTYPES if registry.why_not(op, name, Where.of(DEVICE, d, tiny)) is None]
    if not runs:
        pytest.skip(str(registry.why_not(op, name, Where.of(DEVICE, DTYPES[0], tiny))))
    tokens = TOKENS.get(op, FEW)
    verdict = check(op, name, tiny, tokens=tokens, device=DEVICE)
    assert verdict.passed, verdict.sentence()
    wanted = requests(op, tiny, tokens=tokens, device=DEVICE)
    assert verdict.cases == sum(r.dtype in runs for r in wanted), "no case was left out"
    assert {r.flavour for r in wanted} == set(OPERATIONS[op].flavours)
    print(f"{verdict.sentence()}, {verdict.seconds:.1f} s")


@pytest.mark.parametrize("op", OPS)
def test_triton_runs_here(op: str, tiny: Shapes) -> None:
    """So that the test above cannot pass by skipping all it is for."""
    for dtype in DTYPES:
        assert registry.why_not(op, "triton", Where.of(DEVICE, dtype, tiny)) is None
