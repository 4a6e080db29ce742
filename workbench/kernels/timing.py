"""Honest times of short GPU work: graphs, cold caches, variants in turn, medians with their spread.

A kernel of some microseconds cannot be timed alone: launching it from Python takes longer, and its
second call finds its inputs in the cache. So several calls, each on a set of arguments of its own,
go into one CUDA graph, and before each replay so much else is read that nothing of any set is left
in the L2: every call reads its inputs from memory, as a layer of a model does. Candidates take
turns (A B C A B C …), so that a clock that drifts drifts for all of them; events on the device
enclose a replay, and a call's time is that of the replay divided by its calls.

On a CPU a wall clock encloses the calls, and the caches are as the rotation leaves them.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from workbench.errors import KernelError

Call = Callable[[], Any]

# Between two uses of the same arguments at least this many times the cache is read.
COLD = 3
ROUNDS = 25
MIN_ROUNDS = 3  # with fewer there is no median worth its name
SECONDS = 4.0  # all rounds of one comparison together, once MIN_ROUNDS are done
NOT_IN_A_GRAPH = "not in a graph: host time included"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call: the median over ``rounds``, and the 10th and 90th percentile.

    ``calls`` were timed together in each round; ``in_graph`` says that they were one CUDA graph,
    so that no host time is in them; ``note`` says what a reader must know.
    """

    median: float
    low: float
    high: float
    calls: int
    rounds: int
    in_graph: bool
    note: str = ""


class Candidate:
    """Calls that are timed as one: one for each set of arguments, in the order of the rotation.

    ``outputs[i]`` is what the last timed call of set i gave, once :func:`measure` has run; in a
    graph these are the graph's own buffers, which every replay writes again.
    """

    def __init__(self, name: str, calls: Sequence[Call], repeat: int = 1) -> None:
        if not calls:
            raise KernelError(f"{name}: there is nothing to time")
        self.name, self.calls, self.repeat = name, list(calls), max(1, repeat)
        self.outputs: list[Any] = [None] * len(self.calls)
        self.seconds: list[float] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.error = ""

    @property
    def count(self) -> int:
        """Calls in one round."""
        return len(self.calls) * self.repeat

    def run(self) -> None:
        """All calls of a round, each set in turn; the outputs of the last turn are kept."""
        for _ in range(self.repeat):
            for index, call in enumerate(self.calls):
                self.outputs[index] = call()

    def again(self) -> None:
        """One more round, untimed: by the graph where there is one."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.run()

    def timing(self) -> Timing | None:
        """What the rounds so far say; None with fewer than :data:`MIN_ROUNDS`."""
        if len(self.seconds) < MIN_ROUNDS:
            return None
        each = sorted(s / self.count for s in self.seconds)
        cuts = statistics.quantiles(each, n=10, method="inclusive")
        return Timing(
            median=statistics.median(each),
            low=cuts[0],
            high=cuts[-1],
            calls=self.count,
            rounds=len(each),
            in_graph=self.graph is not None,
            note=self.error,
        )


def l2_bytes(device: torch.device | str) -> int:
    """Bytes of the GPU's L2 cache, asked of the device; 0 on a CPU."""
    if torch.device(device).type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def sets_wanted(touched: float, calls: int, cache: int) -> int:
    """How many argument sets ``calls`` calls rotate over.

    With fewer sets than calls a set comes round again inside the graph: then all sets together
    must be more than ``COLD`` times the cache. Otherwise each call has a set of its own.
    """
    if touched <= 0:
        return calls
    return max(1, min(calls, int(COLD * cache // touched) + 1))


class Flush:
    """Reads ``COLD`` times the L2 of a GPU and more, so that nothing else is left in it.

    Reading, not writing: lines that were written would have to go to memory during what is timed.
    """

    def __init__(self, device: torch.device | str) -> None:
        size = (COLD + 1) * l2_bytes(device)
        self._buffer = torch.ones(size // 4, dtype=torch.float32, device=device) if size else None
        self._sink = torch.empty((), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        if self._buffer is not None:
            torch.sum(self._buffer, dim=0, out=self._sink)


def check_rounds(rounds: int) -> None:
    """Raise KernelError where so many rounds give no median: before anything is computed."""
    if rounds < MIN_ROUNDS:
        raise KernelError(f"a median needs {MIN_ROUNDS} rounds or more, not {rounds}")


def measure(
    candidates: Sequence[Candidate],
    device: torch.device | str,
    *,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    on_round: Callable[[int, int], None] | None = None,
) -> bool:
    """Time the candidates in turn; each keeps its own times. False where Ctrl-C ended it early.

    A candidate that raises is left with the error in ``error`` and without times. Ctrl-C ends the
    rounds; those that are whole count.

    Raises:
        KernelError: fewer than :data:`MIN_ROUNDS` rounds are asked for.
    """
    check_rounds(rounds)
    gpu = torch.device(device).type == "cuda"
    flush = Flush(device)
    try:
        ready = [c for c in candidates if _warm(c, gpu)]
        started = time.perf_counter()
        for done in range(rounds):
            if done >= MIN_ROUNDS and time.perf_counter() - started > seconds:
                break
            if on_round is not None:
                on_round(done, rounds)
            # A round counts whole or not at all, so that all candidates have the same rounds.
            times = _gpu_round(ready, flush) if gpu else [_cpu(c) for c in ready]
            for candidate, spent in zip(ready, times, strict=True):
                candidate.seconds.append(spent)
    except KeyboardInterrupt:
        if gpu:
            torch.cuda.synchronize(device)
        return False
    return True


def _warm(candidate: Candidate, gpu: bool) -> bool:
    """Run once, capture where that is possible, and run what will be timed; False on an error."""
    try:
        candidate.run()
        if gpu:
            candidate.error = _capture(candidate)
            for _ in range(3):
                candidate.again()
            torch.cuda.synchronize()
    except Exception as error:  # whatever a kernel raises is its own result
        candidate.error = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        candidate.outputs = [None] * len(candidate.calls)
        candidate.graph = None
        return False
    return True


def _capture(candidate: Candidate) -> str:
    """Capture a round in a graph; "" or why it is not in one."""
    torch.cuda.synchronize()
    # Asked first: a capture that fails half-way leaves torch's own state damaged.
    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        candidate.run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return f"{NOT_IN_A_GRAPH} (it waits for the GPU in the middle)"
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    kept = candidate.outputs
    candidate.outputs = [None] * len(candidate.calls)
    try:
        with torch.cuda.graph(graph):
            candidate.run()
    except RuntimeError as error:
        with suppress(RuntimeError):
            torch.cuda.synchronize()
        candidate.outputs = kept
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        return f"{NOT_IN_A_GRAPH} (capture failed: {reason:.120})"
    candidate.graph = graph
    return ""


def _gpu_round(candidates: Sequence[Candidate], flush: Flush) -> list[float]:
    events = []
    for candidate in candidates:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush()
        before.record()
        candidate.again()
        after.record()
        events.append((before, after))
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in events]


def _cpu(candidate: Candidate) -> float:
    started = time.perf_counter()
    candidate.run()
    return time.perf_counter() - started
