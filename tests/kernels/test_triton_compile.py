"""Kernels compiled for GPUs that are not here, in a child process, and what is read off them.

The jobs that the child calls are functions of this file, which it imports by its path.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workbench.kernels.triton_compile import (
    Compiled,
    CompileError,
    Job,
    compile_in_child,
    intercepted,
)
from workbench.kernels.triton_runtime import INTERPRETED, tl, triton


@triton.jit
def _add(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.load(x + i, mask=i < n, other=0.0) + tl.load(y + i, mask=i < n, other=0.0)
    tl.store(out + i, total, mask=i < n)


@triton.jit
def _gemm(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + m * K + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
        right = tl.load(b + k[:, None] * N + n, mask=(k[:, None] < K) & (n < N), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(out + m * N + n, total, mask=(m < M) & (n < N))


@triton.jit
def _centred(x, out, B: tl.constexpr):
    """Keeps its B values until their sum is known: with one warp, B / 32 registers and more."""
    i = tl.arange(0, B)
    values = tl.load(x + i)
    tl.store(out + i, values - tl.sum(values, 0))


@triton.jit
def _wrong_type(x, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), tl.load(x + tl.arange(0, B)) & 0.5)


@triton.autotune(configs=[triton.Config({"B": 64}), triton.Config({"B": 256})], key=["n"])
@triton.jit
def _tuned(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, 1.0, mask=i < n)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def elementwise(size: int) -> None:
    print("a job may print")
    x = meta(size)
    for _ in range(3):  # the same specialisation: compiled once
        _add[(triton.cdiv(size, 1024),)](x, x, torch.empty_like(x), size, B=1024, num_warps=8)
    odd = meta(size + 1)[1:]  # not aligned to 16 bytes: another kernel
    _add[(1,)](odd, x, torch.empty_like(x), size, B=1024, num_warps=8)


def gemm(size: int) -> None:
    out = meta(size, size, dtype=torch.float32)
    _gemm[(1, 1)](meta(size, size), meta(size, size), out, size, size, size, BM=64, BN=128, BK=64)


def spills(_: object) -> None:
    x = meta(32768, dtype=torch.float32)
    _centred[(1,)](x, torch.empty_like(x), B=32768, num_warps=1)


def too_much_shared(_: object) -> None:
    x, y = meta(256, 256), meta(256, 256)
    out = meta(256, 256, dtype=torch.float32)
    _gemm[(1, 1)](x, y, out, 256, 256, 256, BM=128, BN=128, BK=128, num_stages=5, num_warps=8)


def wrong_type(_: object) -> None:
    _wrong_type[(1,)](meta(64), B=64)
    _add[(1,)](meta(64), meta(64), meta(64), 64, B=64, num_wraps=4)  # no such option
    _add[(1,)](meta(64), meta(64), meta(64), 64, B=64)


def untouched(path: str) -> None:
    """Memory of this machine, at addresses that a launch would write to."""
    x = torch.full((64,), 7.0)
    _add[(1,)](x, x, x, 64, B=64)
    _tuned[lambda meta: (1,)](x, 64)
    with open(path, "w") as file:
        json.dump({"values": x.tolist(), "gpu": torch.cuda.is_initialized()}, file)


def raises(_: object) -> None:
    raise ZeroDivisionError("of the job")


def launches_nothing(_: object) -> None:
    pass


def hangs(path: str) -> None:
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def crashes(_: object) -> None:
    _add[(1,)](meta(64), meta(64), meta(64), 64, B=64)
    os.kill(os.getpid(), signal.SIGSEGV)


def job(function: object, argument: object = None) -> Job:
    name = function.__name__  # type: ignore[attr-defined]
    return Job(name=name, call=f"{__file__}:{name}", argument=argument)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """An empty cache of compiled kernels, so that everything here is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield patch


@pytest.fixture(scope="module")
def results(
    cache: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Compiled]]:
    seen: list[Compiled] = []
    path = tmp_path_factory.mktemp("untouched") / "said.json"
    found = compile_in_child(
        [
            job(elementwise, 1_000_000_000),  # 2 GB each, were they not on the meta device
            job(gemm, 6144),
            job(spills),
            job(too_much_shared),
            job(wrong_type),
            job(crashes),
            job(untouched, str(path)),
            job(raises),
            job(launches_nothing),
            Job(name="no file", call="/nowhere/kernels.py:run"),
            Job(name="no function", call="workbench.kernels.triton_compile:nothing"),
        ],
        timeout=240,
        on_result=seen.append,
    )
    assert seen == found
    assert json.loads(path.read_text()) == {"values": [7.0] * 64, "gpu": False}
    by_job: dict[str, list[Compiled]] = {}
    for each in found:
        by_job.setdefault(each.job, []).append(each)
    return by_job


def test_an_elementwise_kernel(results: dict[str, list[Compiled]]) -> None:
    found = results["elementwise"]
    assert [(each.kernel, each.target) for each in found] == [
        ("_add", "sm_90"),
        ("_add", "sm_100"),
        ("_add", "sm_90"),  # the one whose first input is not aligned
        ("_add", "sm_100"),
    ]
    for each in found:
        assert each.error is None
        assert each.registers is not None
        assert 8 <= each.registers <= 64
        assert (each.shared_bytes, each.spill_bytes, each.num_warps) == (0, 0, 8)
        assert each.constants == {"B": "1024"}
        assert each.features == ()
        assert each.seconds is not None
        assert each.seconds > 0.01


def test_a_gemm_runs_on_the_tensor_cores_of_each(results: dict[str, list[Compiled]]) -> None:
    hopper, blackwell = results["gemm"]
    assert (hopper.target, blackwell.target) == ("sm_90", "sm_100")
    assert "wgmma" in hopper.features
    assert "tcgen05.mma" in blackwell.features
    for each in (hopper, blackwell):
        assert each.error is None
        assert each.registers is not None
        # 64 x 128 float32 sums over 4 warps are 64 registers a thread, wherever they are kept
        assert 64 < each.registers <= 255
        assert each.spill_bytes == 0
        # 3 stages of a 64 x 64 and a 64 x 128 tile of BF16, and a few barriers
        assert each.shared_bytes is not None
        assert 0 <= each.shared_bytes - 3 * 2 * (64 * 64 + 64 * 128) <= 64


def test_a_tile_too_large_spills(results: dict[str, list[Compiled]]) -> None:
    for each in results["spills"]:
        assert each.registers is not None
        assert each.spill_bytes is not None
        assert 0 < each.registers <= 255
        # 32768 values in 32 threads: what is in no register lies in local memory
        assert each.spill_bytes >= 4 * (1024 - each.registers)


def test_more_shared_memory_than_a_block_has_is_an_error(
    results: dict[str, list[Compiled]],
) -> None:
    for each in results["too_much_shared"]:
        assert each.shared_bytes is not None
        assert each.shared_bytes > 227 * 1024
        assert each.error is not None
        assert each.error.startswith(f"takes {each.shared_bytes} bytes of shared memory")


def test_errors_of_kernels_are_results(results: dict[str, list[Compiled]]) -> None:
    found = results["wrong_type"]
    assert [(each.kernel, each.target, each.error is None) for each in found] == [
        ("_wrong_type", "sm_90", False),
        ("_wrong_type", "sm_100", False),
        ("_add", "sm_90", False),
        ("_add", "sm_100", False),
        ("_add", "sm_90", True),  # and the job went on
        ("_add", "sm_100", True),
    ]
    assert "invalid operands" in str(found[0].error)
    assert "num_wraps" in str(found[2].error)
    assert found[0].registers is None


def test_every_configuration_of_an_autotuned_kernel(results: dict[str, list[Compiled]]) -> None:
    found = [each for each in results["untouched"] if each.kernel == "_tuned"]
    assert [(each.constants["B"], each.target, each.error) for each in found] == [
        ("64", "sm_90", None),
        ("64", "sm_100", None),
        ("256", "sm_90", None),
        ("256", "sm_100", None),
    ]


def test_errors_of_jobs_are_results(results: dict[str, list[Compiled]]) -> None:
    errors = {
        name: [(each.kernel, each.error) for each in found]
        for name, found in results.items()
        if not found[0].kernel
    }
    assert errors == {
        "raises": [("", "ZeroDivisionError: of the job")],
        "launches_nothing": [("", "launches no Triton kernel")],
        "no file": [("", "CompileError: There is no file /nowhere/kernels.py to take run from.")],
        "no function": [
            ("", "CompileError: workbench.kernels.triton_compile has no function nothing.")
        ],
    }


def test_a_crash_costs_one_job(results: dict[str, list[Compiled]]) -> None:
    *before, last = results["crashes"]
    assert [(each.kernel, each.error) for each in before] == [("_add", None), ("_add", None)]
    assert last.kernel == ""
    assert str(last.error).startswith("the compiling process ended with signal SIGSEGV")


def test_a_job_that_hangs_is_cut_off(tmp_path: Path) -> None:
    for limit in (4, 8, 30):  # a busy machine may need longer until the job begins to hang
        start = time.monotonic()
        found = compile_in_child([job(hangs, str(tmp_path / "pid")), job(gemm, 64)], timeout=limit)
        assert limit <= time.monotonic() - start < limit + 20
        assert [(each.job, each.error) for each in found] == [
            ("hangs", f"not compiled within {limit} s"),
            ("gemm", f"not compiled within {limit} s"),
        ]
        if (tmp_path / "pid").exists():
            break
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
def test_a_process_that_interprets_cannot_compile() -> None:
    with pytest.raises(CompileError, match="or use compile_in_child"), intercepted():
        pass


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(CompileError, match="timeout is 0 s: it must be positive"):
        compile_in_child([], timeout=0)
    with pytest.raises(CompileError, match="something JSON can hold"):
        compile_in_child([job(raises, argument=torch.ones(1))], timeout=5)


def test_results_survive_json(results: dict[str, list[Compiled]]) -> None:
    for found in results.values():
        for each in found:
            assert Compiled.from_dict(json.loads(json.dumps(each.to_dict()))) == each
    with pytest.raises(dataclasses.FrozenInstanceError):
        results["gemm"][0].registers = 0  # type: ignore[misc]
