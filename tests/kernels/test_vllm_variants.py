"""The variants that call vLLM 0.33.0, against plain float64 computations (``vllm_cases``).

On a CPU the engine's pure Triton kernels run in Triton's interpreter, in a process of the Python
that has the engine; on a GPU all of them run here. Without the engine only the first tests do.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.requirements import Where

HERE = Path(__file__).parent
MODULES = ("vllm_beam", "vllm_experts", "vllm_attention", "vllm_dflash2")
ENGINE = os.environ.get("ENGINE_PYTHON") or (
    sys.executable if importlib.util.find_spec("vllm") else None
)
HAS_GPU = torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None
# Relative error allowed. What rounds only where its contract says so differs by single last bits
# (the order of a float32 sum), far under the 2e-3 that one BF16 rounding of everything makes.
SINGLE_BITS = 5e-4
ROUNDED = 7e-3  # products in BF16; the engine rounds each expert's output before their sum
LIMITS = {
    **dict.fromkeys(registry.OPS, SINGLE_BITS),
    **dict.fromkeys(("qkvg", "dense_mlp", "expert_mlp"), ROUNDED),
    **dict.fromkeys(("decode_attention", "prefill_attention"), ROUNDED),
    "router": 1e-5,
    "selector_walk": 0.0,
}
# In the interpreter these need the engine's compiled operations.
COMPILED = ("router", "expert_mlp")
SEEDS = {"bfloat16": (1, 8), "float32": (7,)}


for module in MODULES:
    importlib.import_module(f"workbench.kernels.{module}")
VARIANTS = [v for v in registry._variants.values() if v.origin.rpartition(".")[2] in MODULES]


def variants(op: str) -> list[registry.Variant]:
    return [variant for variant in VARIANTS if variant.op == op]


def test_every_operation_has_one() -> None:
    assert {v.op for v in VARIANTS if v.name == "vllm"} == set(registry.OPS)
    own = {v.op for v in VARIANTS if v.name == "vllm_fa3"}
    assert own == {"decode_attention", "prefill_attention"}


def test_importing_the_adapters_imports_nothing_of_vllm() -> None:
    code = (
        "import sys, importlib\n"
        f"for m in {MODULES}: importlib.import_module('workbench.kernels.' + m)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'triton')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_adapter_says_what_of_the_engine_it_calls() -> None:
    for op in registry.OPS:
        for variant in variants(op):
            first = (variant.function.__doc__ or "").split("\n\n")
            assert ".py" in " ".join(first[:2]), (op, variant.name)


@pytest.mark.parametrize("op", registry.OPS)
def test_a_cpu_is_refused_with_a_reason(op: str) -> None:
    for variant in variants(op):
        reason = variant.why_not(Where(device="cpu", dtype=torch.bfloat16))
        assert reason is not None
        assert "CUDA" in reason


def test_noise_of_one_s_own_is_refused() -> None:
    from workbench.kernels.vllm_dflash2 import selector_walk

    edges, ids = torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, dtype=torch.int64)
    with pytest.raises(KernelError, match="its own noise"):
        selector_walk(edges, ids, torch.ones(1), torch.zeros(1, 2, 3))


def test_a_ring_s_positions_keep_their_rows_and_distances() -> None:
    """The block table of a ring: every visible position leads to the row that holds it."""
    from workbench.kernels.reach import Reach
    from workbench.kernels.vllm_attention import _tables

    for rows, page, length, window in ((32, 16, 8, 20), (27, 27, 4, 24), (48, 16, 1, 48)):
        first = torch.tensor([0, 3, rows - 1, rows, 2 * rows + 5, 1_000_003])
        slots = torch.tensor([4, 0, 5, 1, 3, 2])
        table, lengths, longest = _tables(
            Reach(slots, first, span=rows, window=window), rows, page, length
        )
        assert int(lengths.max()) <= longest
        for b, start in enumerate(first.tolist()):
            moved = int(lengths[b]) - length  # where the kernel believes the first query to be
            assert moved <= start
            assert (start - moved) % rows == 0
            for query in range(length):
                for back in range(min(window, start + query + 1)):
                    seen = moved + query - back
                    row = int(table[b, seen // page]) * page + seen % page
                    assert row == int(slots[b]) * rows + (start + query - back) % rows


def test_the_experts_copy_of_a_weight_is_made_once_and_anew_when_it_changes() -> None:
    from workbench.kernels.vllm_experts import _DOWN, _engine_down

    down = torch.randn(3, 4, 5)
    copy = _engine_down(down)
    assert copy.is_contiguous()
    assert torch.equal(copy, down.transpose(1, 2))
    assert _engine_down(down) is copy
    down.mul_(2.0)
    assert torch.equal(_engine_down(down), down.transpose(1, 2))
    held = len(_DOWN)
    del down
    assert len(_DOWN) == held - 1


def check(size: str, tokens: int, device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Errors of every variant that can run; a failure is the error's text."""
    if str(HERE) not in sys.path:
        sys.path.append(str(HERE))
    import vllm_cases
    from vllm_oracle import relative_error

    where = (
        Where.of(device, dtype)
        if device == "cuda"
        # The interpreter stands for a GPU, of none of the capabilities that some kernels need.
        else Where(device="cuda", dtype=dtype, capability=(0, 0))
    )
    found = []
    for case in vllm_cases.cases(size, tokens, device, dtype, 11 + tokens):
        for variant in variants(case.op):
            if variant.why_not(where) is not None or variant.name in case.skip:
                continue
            inserts = case.label.endswith("same dtype one cache") and dtype == torch.bfloat16
            if device == "cpu" and case.op == "qkv_write" and not inserts:
                continue  # these end in a compiled operation
            if device == "cpu" and case.label.endswith("two caches"):
                continue  # so do these
            got = case.call(variant.function)
            pairs = zip(got, case.expected(), strict=True)
            rows = case.op.endswith("attention")
            errors = [relative_error(a, b, rows) for a, b in pairs]
            found.append(
                {"op": case.op, "variant": variant.name, "case": case.label, "error": max(errors)}
            )
    return found


def judge(found: list[dict[str, Any]], dtype: str) -> None:
    for line in found:
        limit = LIMITS[line["op"]]
        if dtype == "float32":
            limit = min(limit, 1e-5)
        assert line["error"] <= limit, line


@pytest.mark.skipif(
    ENGINE is None or HAS_GPU, reason="vLLM is not installed; name its Python in ENGINE_PYTHON"
)
@pytest.mark.parametrize(
    ("dtype", "tokens"), [(d, n) for d, numbers in SEEDS.items() for n in numbers]
)
def test_pure_triton_kernels_in_the_interpreter(dtype: str, tokens: int) -> None:
    environment = dict(
        os.environ,
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
        VLLM_TARGET_DEVICE="cpu",
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(
            [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    )
    done = subprocess.run(
        [str(ENGINE), str(Path(__file__)), dtype, str(tokens)],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    seen = {line["op"] for line in found}
    missing = {*COMPILED} if dtype == "bfloat16" else {*COMPILED, "qkv_write"}
    if dtype == "float32":
        missing |= {"decode_attention", "prefill_attention"}  # BF16 only
    assert seen == set(registry.OPS) - missing
    judge(found, dtype)


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU and vLLM in this environment")
@pytest.mark.parametrize("size", ["tp8", "tp4"])
@pytest.mark.parametrize("tokens", [1, 7, 8, 64])
def test_all_kernels_on_a_gpu(size: str, tokens: int) -> None:
    found = check(size, tokens, "cuda", torch.bfloat16)
    assert {line["op"] for line in found} == set(registry.OPS)
    judge(found, "bfloat16")


if __name__ == "__main__":
    import workbench.kernels.triton_runtime as runtime

    assert runtime.INTERPRETED  # imports Triton and repairs its interpreter, before vLLM does
    print(json.dumps(check("small", int(sys.argv[2]), "cpu", getattr(torch, sys.argv[1]))))
