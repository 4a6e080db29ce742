"""The variant "compile" passes the check of every operation, in processes of their own.

torch.compile imports Triton, and Triton's interpreter, which the other tests switch on, must not be
on where it compiles for a GPU. What was compiled is kept in pytest's cache folder, so the second
run of these tests is quick.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from workbench.kernels.catalogue import OPS
from workbench.kernels.requirements import Where, compiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Compiling takes seconds an operation when nothing of it is in the cache yet.
QUICK = ("softcap",)

CODE = """
import json, sys
import torch
from torch._dynamo.utils import counters
torch.set_num_threads(1)
from workbench.kernels.check import check
from workbench.kernels.shapes import Shapes
from workbench.model.presets import resolve
shapes = Shapes.of(resolve("beam-tiny").config)
for op in sys.argv[2:]:
    graphs = counters["stats"]["unique_graphs"]
    v = check(op, "compile", shapes, tokens=(1, 7), device=sys.argv[1])
    print(json.dumps({"op": op, "status": v.status, "cases": v.cases, "said": v.sentence(),
                      "graphs": counters["stats"]["unique_graphs"] - graphs,
                      "seconds": round(v.seconds, 1)}), flush=True)
"""

pytestmark = pytest.mark.skipif(
    compiles(Where.of(DEVICE, torch.float32)) is not None, reason="torch.compile cannot run here"
)


# Wrong only where it is really compiled: torch.compile runs a function as it is inside a dispatch
# mode, such as the one that poisons fresh memory, unless the mode says that it may compile.
WRONG = """
import torch
from workbench.kernels import reference, registry
from workbench.kernels.check import check
from workbench.kernels.shapes import Shapes
from workbench.model.presets import resolve
@torch.compile
def norm(x, weight, eps):
    y = reference.rms_norm(x, weight, eps)
    return y * 2 if torch.compiler.is_compiling() else y
registry.register("rms_norm", "mine")(lambda x, weight, eps: norm(x, weight, eps))
v = check("rms_norm", "mine", Shapes.of(resolve("beam-tiny").config), tokens=(7,))
print(v.status, v.gate, sep=",")
"""


def child(pytestconfig: pytest.Config, *arguments: str) -> str:
    cache = pytestconfig.cache.mkdir("inductor")  # type: ignore[union-attr]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-c", *arguments],
        capture_output=True, text=True, timeout=900, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(ops: tuple[str, ...], pytestconfig: pytest.Config) -> None:
    said = child(pytestconfig, CODE, DEVICE, *ops)
    told = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [line["op"] for line in told] == list(ops)
    for line in told:
        print(f"{line['said']}, {line['seconds']} s")
        assert line["status"] == "passed", line["said"]
        assert line["cases"] > 6
        assert line["graphs"] > 0, "nothing was compiled"


@pytest.mark.full
def test_a_compiled_kernel_of_ones_own_is_checked_as_it_is_compiled(
    pytestconfig: pytest.Config,
) -> None:
    assert child(pytestconfig, WRONG).strip() == "refused,relative error"


@pytest.mark.full
def test_compile_passes_for_the_quick_operations(pytestconfig: pytest.Config) -> None:
    run(QUICK, pytestconfig)


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_compile_passes_for_the_others(pytestconfig: pytest.Config) -> None:
    run(tuple(op for op in OPS if op not in QUICK), pytestconfig)
