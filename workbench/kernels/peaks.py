"""What this machine reaches: memory bandwidth and matrix products, measured here and now.

A roofline drawn from a data sheet blames every kernel for what no program gets; this one is drawn
from the best that a plain copy, a plain sum and a plain matrix product reached in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels.roofline import Rates

REPEATS = 7
GPU_BYTES = 2 * 2**30  # far more than any cache
CPU_BYTES = 64 * 2**20
GPU_MATRIX, GPU_MATRIX_FP32 = 8192, 4096
CPU_MATRIX = 768


def measured_peaks(device: torch.device | str = "cpu") -> Rates:
    """Rates of this machine's CPU or GPU: bytes/s of memory, FLOP/s of BF16 and FP32 products.

    ``bandwidth`` is the better of a copy (bytes read and written) and a sum (bytes read); the notes
    give both. Random data: on zeros a GPU's matrix products are faster. Less than a second.

    Raises:
        KernelError: a device that is neither a CPU nor a CUDA GPU of this machine.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise KernelError("this machine has no CUDA GPU that torch can use; use --device cpu")
        return _gpu(device)
    if kind != "cpu":
        raise KernelError(f"peaks are measured on cpu or cuda, not on {kind}")
    return _cpu()


def _rates(label: str, copy: float, read: float, flops: dict[str, float], what: str) -> Rates:
    return Rates(
        label=label,
        kind="measured here",
        bandwidth=max(copy, read),
        flops=flops,
        notes=(
            f"copy {copy / 1e9:,.1f} GB/s (read and written), read only {read / 1e9:,.1f} GB/s; "
            f"bandwidth is the larger",
            what,
        ),
    )


def _gpu(device: torch.device | str) -> Rates:
    def timed(work: Callable[[], Any]) -> float:
        for _ in range(2):
            work()
        found = []
        for _ in range(REPEATS):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            work()
            after.record()
            torch.cuda.synchronize(device)
            found.append(before.elapsed_time(after) / 1e3)
        return statistics.median(found)

    free = torch.cuda.mem_get_info(device)[0]
    size = min(GPU_BYTES, free // 4)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / timed(lambda: target.copy_(source))
    sink = torch.empty((), dtype=torch.float32, device=device)
    read = size / timed(lambda: torch.sum(source, dim=0, out=sink))
    source = target = torch.empty(0)  # before the matrices are made
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        flops = {
            name: _product(n, dtype, device, timed)
            for name, n, dtype in (
                ("bf16", GPU_MATRIX, torch.bfloat16),
                ("fp32", GPU_MATRIX_FP32, torch.float32),
            )
        }
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return _rates(
        torch.cuda.get_device_name(device),
        copy,
        read,
        flops,
        f"matrix products of random data: BF16 {GPU_MATRIX}³, FP32 {GPU_MATRIX_FP32}³ without TF32",
    )


def _cpu() -> Rates:
    def timed(work: Callable[[], Any]) -> float:
        work()
        found = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
        return min(found)  # other processes only ever add

    source = torch.ones(CPU_BYTES // 4)
    target = torch.empty_like(source)
    copy = 2 * CPU_BYTES / timed(lambda: target.copy_(source))
    read = CPU_BYTES / timed(lambda: source.sum())
    n = CPU_MATRIX
    flops = {
        "fp32": _product(n, torch.float32, "cpu", timed),
        "bf16": _product(n // 2, torch.bfloat16, "cpu", timed),
    }
    return _rates(
        f"{hardware.cpu_name()}, {torch.get_num_threads()} threads",
        copy,
        read,
        flops,
        f"matrix products of random data: FP32 {n}³, BF16 {n // 2}³",
    )


def _product(
    n: int,
    dtype: torch.dtype,
    device: torch.device | str,
    timed: Callable[[Callable[[], Any]], float],
) -> float:
    generator = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn(n, n, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, dtype=dtype, device=device)
    return 2 * n**3 / timed(lambda: torch.mm(a, b, out=out))
