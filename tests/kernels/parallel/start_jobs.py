"""Jobs of ranks for ``test_start.py``: they answer, fail and hang in the ways that a rank can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from workbench.errors import KernelError
from workbench.kernels.parallel import Ranks

# A rank that does not come to meet the others.
if os.environ.get("START_JOBS_ABSENT") == os.environ.get("RANK"):
    time.sleep(600)


def _meet(ranks: Ranks, told: Any) -> None:
    """Tell everyone's process id, and go on when it has been told."""
    pids = ranks.tell(os.getpid())
    told(0, 1, " ".join(map(str, pids)))
    ranks.barrier()


def _wait_for_the_others(ranks: Ranks) -> None:
    while True:
        ranks.all_reduce(torch.ones(4, device=ranks.device))
        time.sleep(0.001)


def total(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    _meet(ranks, told)
    print("a line of a library on stdout")
    values = torch.tensor(request["values"], dtype=torch.float64, device=ranks.device)
    x = values * (ranks.rank + 1)
    ranks.all_reduce(x)
    return {
        "sum": x.tolist(),
        "rank": ranks.rank,
        "world": ranks.world,
        "threads": torch.get_num_threads(),
        "multicast": [
            os.environ.get(name)
            for name in (
                "NCCL_NVLS_ENABLE",
                "TORCH_SYMM_MEM_DISABLE_MULTICAST",
                "NVSHMEM_DISABLE_NVLS",
            )
        ],
        "long": "x" * request.get("long", 0),
    }


def refuse(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    """Rank 1 gives up; the others are in a collective, or hear of it before it says why."""
    _meet(ranks, told)
    if ranks.rank != 1:
        _wait_for_the_others(ranks)
    if request.get("leave_first"):
        ranks.close()
        time.sleep(0.7)
    raise KernelError("the third layer is missing")


def refuse_alike(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    raise KernelError("there is nothing to do")


def kill_oneself(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    _meet(ranks, told)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_the_others(ranks)
    return {}


def leave(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    _meet(ranks, told)
    if ranks.rank == 1:
        print("the disk is on fire", file=sys.stderr, flush=True)
        os._exit(3)
    _wait_for_the_others(ranks)
    return {}


def fill_memory(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    _meet(ranks, told)
    if ranks.rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nmore")
    _wait_for_the_others(ranks)
    return {}


def divide(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    _meet(ranks, told)
    if ranks.rank == 1:
        return {"quotient": 1 // (ranks.rank - 1)}
    _wait_for_the_others(ranks)
    return {}


def stand(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    """Wait for each other again and again."""
    _meet(ranks, told)
    _wait_for_the_others(ranks)
    return {}


def hang(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    """Deaf to SIGTERM, as behind a driver that is busy, and with a helper of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "600"])
    pids = ranks.tell(f"{os.getpid()} {helper.pid}")
    told(0, 1, " ".join(pids))
    while True:
        time.sleep(0.01)


def spin(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    """Rank 1 gives up while the other waits for a kernel of an hour."""
    _meet(ranks, told)
    if ranks.rank != 1:
        for _ in range(60):
            torch.cuda._sleep(100_000_000_000)
        torch.cuda.synchronize()
    raise KernelError("the third layer is missing")


def litter(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    """Leave what a killed rank leaves: shared memory that nobody could delete."""
    if ranks.rank == 1:
        Path(request["nccl"]).write_bytes(b"1")
        Path(f"/dev/shm/torch_{os.getpid()}_77_0").write_bytes(b"1")
    _meet(ranks, told)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_the_others(ranks)
    return {}


def unsayable(request: dict[str, Any], ranks: Ranks, told: Any) -> dict[str, Any]:
    return {"tensor": torch.ones(1)} if request["tensor"] else {"number": float("nan")}
