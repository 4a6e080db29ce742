"""A decode step as one CUDA graph, and how long replays of several graphs take, in turn.

The step finds its token and position in the state and leaves the next ones there, so a graph is
captured once and every replay decodes one token further. The weights of a rank are thousands of
times the L2, so that nothing of a step is left in it when the next begins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.errors import KernelError
from workbench.kernels.rank.reference import Step
from workbench.kernels.rank.state import RankState

ROUNDS = 40


@dataclass(slots=True, kw_only=True, eq=False)
class Replay:
    """A step, and the graph that holds it; without one (on a CPU) the step itself is called."""

    step: Step
    graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Decode one token further."""
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()


def capture(step: Step, state: RankState) -> Replay:
    """Run ``step`` once (which compiles its kernels), then capture it; the state is reset after.

    Raises:
        KernelError: the step cannot be captured, for instance because it waits for the GPU.
    """
    state.reset()
    step()
    if state.token.device.type != "cuda":
        state.reset()
        return Replay(step=step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise KernelError(f"the step cannot be captured in a CUDA graph: {reason:.200}") from error
    state.reset()
    return Replay(step=step, graph=graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of single replays: ``median``, 10th and 90th percentile, and how many there were."""

    median: float
    low: float
    high: float
    rounds: int
    seconds: tuple[float, ...] = field(repr=False)

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        """Of two or more measured replays."""
        cuts = statistics.quantiles(seconds, n=10, method="inclusive")
        return cls(
            median=statistics.median(seconds),
            low=cuts[0],
            high=cuts[-1],
            rounds=len(seconds),
            seconds=tuple(seconds),
        )


def time_replays(
    replays: Mapping[str, Callable[[], None]], state: RankState, rounds: int = ROUNDS
) -> dict[str, Times]:
    """Time the replays in turn (A B C A B C …), each between two events on the device.

    Every round starts at the state's first position, and each replay of it decodes one token
    further. A round begins with one untimed replay: launching a graph takes the host a while, which
    then happens while the GPU is busy instead of between two events. On a CPU a wall clock encloses
    the call.

    Raises:
        KernelError: fewer than two rounds, or more replays than positions in the state.
    """
    if rounds < 2:
        raise KernelError(f"a median needs 2 rounds or more, not {rounds}")
    if len(replays) + 1 > state.capacity - state.context:
        raise KernelError(
            f"{len(replays) + 1} replays in turn need as many positions, and the state has "
            f"{state.capacity - state.context} behind its context; give it more headroom"
        )
    gpu = state.token.device.type == "cuda"
    found: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        state.reset()
        events: list[tuple[str, Any, Any]] = []
        if gpu:
            next(iter(replays.values()))()
        for name, replay in replays.items():
            if gpu:
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                replay()
                after.record()
                events.append((name, before, after))
            else:
                started = time.perf_counter()
                replay()
                found[name].append(time.perf_counter() - started)
        if gpu:
            torch.cuda.synchronize()
            for name, before, after in events:
                found[name].append(before.elapsed_time(after) / 1e3)
    state.reset()
    return {name: Times.of(seconds) for name, seconds in found.items()}


def kernel_times(replay: Replay, state: RankState, replays: int = 4) -> list[dict[str, Any]]:
    """Microseconds a step of each kernel by name, the largest first; empty without a GPU.

    ``launches`` a step and ``microseconds`` a step, from the profiler's record of ``replays``.
    Kernels launched as programmatic dependents start before their predecessor ends, so their times
    contain waiting and their sum exceeds the step's time.
    """
    if state.token.device.type != "cuda":
        return []
    from torch.profiler import ProfilerActivity, profile

    state.reset()
    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(replays):
            replay()
        torch.cuda.synchronize()
    state.reset()
    rows = []
    for event in recorded.key_averages():
        spent = float(getattr(event, "self_device_time_total", 0.0))
        if spent > 0 and event.count >= replays:
            rows.append(
                {
                    "kernel": str(event.key)[:120],
                    "launches": event.count / replays,
                    "microseconds": spent / replays,
                }
            )
    return sorted(rows, key=lambda row: -row["microseconds"])
