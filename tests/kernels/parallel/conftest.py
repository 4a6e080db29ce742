"""Small groups of ranks: as threads of this process, and as processes that speak by gloo."""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.kernels.parallel.ranks import STORE_PORT, Ranks
from workbench.kernels.parallel.weights import sliced
from workbench.kernels.rank import RankState, RankWeights
from workbench.model.parallel import Shard

from ..rank.conftest import small_config

ROOT = Path(__file__).parents[3]
PATIENCE = 120  # seconds a group of processes may take


class Meeting:
    """Where the threads of a group lay down what they give to the others."""

    def __init__(self, world: int) -> None:
        self.parts: list[Any] = [None] * world
        # A rank that dies must not leave the others waiting for ever.
        self.barrier = threading.Barrier(world, timeout=60)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x.clone()
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


@dataclass(slots=True, kw_only=True, eq=False)
class ThreadRanks(Ranks):
    """A rank that is a thread of this process."""

    meeting: Meeting = field(repr=False)

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = self.meeting.exchange(self.rank, x)
        assert all(part.shape == x.shape and part.dtype == x.dtype for part in parts)
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x.copy_(torch.stack(self.gather(x)).sum(0))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        assert x.is_contiguous()
        return x.copy_(self.gather(x)[source])


def in_threads(
    world: int, work: Callable[[Ranks], Any], kind: type[ThreadRanks] = ThreadRanks
) -> list[Any]:
    """What each rank makes of the same work, all of them in step."""
    meeting = Meeting(world)

    def one(rank: int) -> Any:
        it = kind(rank=rank, world=world, device=torch.device("cpu"), backend="threads",
                  meeting=meeting)  # fmt: skip
        try:
            return work(it)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        tasks = [pool.submit(one, rank) for rank in range(world)]
    # A rank that failed by itself, before those that it left waiting.
    errors = [task.exception() for task in tasks]
    own = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    for error in own or [e for e in errors if e is not None]:
        raise error
    return [task.result() for task in tasks]


def _process(
    rank: int, world: int, port: int, out: str, work: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), STORE_PORT: str(port)}
    ranks = Ranks.join("cpu", environment)
    try:
        found = {"result": work(ranks, *args)}
    except BaseException:
        found = {"error": traceback.format_exc()}
    Path(out, str(rank)).write_text(json.dumps(found), encoding="utf-8")
    if "error" in found:
        os._exit(1)  # without waiting for the others, which wait for this one
    ranks.close()


@pytest.fixture
def together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run a function of a test file in so many processes; what each returns (JSON)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The processes import the test file by the name that pytest gives it.
    monkeypatch.syspath_prepend(str(ROOT))

    def run(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        context = torch.multiprocessing.get_context("spawn")
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        started = [
            context.Process(
                target=_process, args=(rank, world, store.port, str(tmp_path), work, args)
            )
            for rank in range(world)
        ]
        try:
            for process in started:
                process.start()
            end = time.monotonic() + PATIENCE
            while any(each.is_alive() for each in started) and time.monotonic() < end:
                if any(each.exitcode not in (None, 0) for each in started):
                    break
                time.sleep(0.02)
        finally:
            for process in started:
                if process.is_alive():
                    process.terminate()
                process.join()
        files = [tmp_path / str(rank) for rank in range(world)]
        found = [json.loads(each.read_text()) if each.exists() else {} for each in files]
        for rank, each in enumerate(found):
            if "error" in each:
                pytest.fail(f"rank {rank}: {each['error']}")
        assert all("result" in each for each in found), "a rank ended without a result"
        return [each["result"] for each in found]

    return run


@pytest.fixture(autouse=True)
def small_work(one_thread: None) -> None:
    """Tensors this small only wait for a second thread."""


def whole_model(
    *, context: int = 40, batch: int = 1, layout: Any = "HI", dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> tuple[RankWeights, RankState]:  # fmt: skip
    """All of a small model and its caches, for one rank alone."""
    weights = RankWeights.random(
        small_config(**changes), 1, device="cpu", dtype=dtype, down_layout=layout
    )
    # The few values of a small layer would leave everything near zero otherwise.
    for tensor in weights.tensors():
        if tensor.dim() > 1 and tensor is not weights.embed:
            tensor.mul_(5)
    return weights, RankState(weights, context, batch=batch, headroom=16)


def rank_of(
    whole: tuple[RankWeights, RankState], rank: int, world: int
) -> tuple[RankWeights, RankState]:
    """One rank's slices of the weights and of the caches."""
    weights, state = whole
    part = sliced(weights, rank, world)
    made = RankState(part, state.context, batch=state.batch, headroom=16)
    heads = Shard(rank=rank, world=world).kv_heads(weights.config)
    for mine, all_heads in zip((*made.k, *made.v), (*state.k, *state.v), strict=True):
        mine.copy_(all_heads[:, :, heads])
    made._first_rings.copy_(made._rings)
    made.begin_with(state.token)
    return part, made
