"""What the probe costs a running engine: blocks of passes with it and without it in turn.

Used by ``serving_probe.py``, which says what an engine is here (:class:`Steady`). A block is some
seventy passes of a batch that stays full. Sets of four blocks, two with the probe and two without,
come in random order, so whatever drifts meets all alike; two blocks without it against each other
are the control. The first passes of a block belong to what was before it and are left out, as are
passes in which a request came, and their neighbours.

Then, in blocks of their own, since timing costs time too: the hooks, each by itself; what the calls
into torch take of the host; what the copies take of the GPU.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

SETTLE = 10  # passes at a block's begin that are left out: what was handed on is written by then
PASSES = 60  # that follow
BLOCKS = ("on", "off", "on", "off")
HOOKS = ("_begin", "_tick", "_weighed", "_allocated", "_before_sampling", "_has_learned",
         "_sampled")  # fmt: skip
RESAMPLES = 4000
LEVEL = 0.95


class Steady(Protocol):
    """An engine whose batch stays full.

    Attributes:
        starts: when each pass began, in seconds of ``perf_counter``.
        clean: whether a pass was one of a full batch that only decoded.
    """

    starts: list[float]
    clean: list[bool]

    def advance(self) -> None:
        """One step of the engine; requests that ended are replaced."""


class Block(NamedTuple):
    """Passes in seconds, from one's begin to the next one's."""

    mean: float
    median: float
    kept: int


def run(engine: Steady, passes: int = PASSES, settle: int = SETTLE) -> Block:
    """A block, of the engine as it is."""
    first = len(engine.starts) + settle
    go_on(engine, settle + passes + 1)
    return block_of(engine.starts[first:], engine.clean[first - 1 :])


def go_on(engine: Steady, passes: int) -> None:
    """So many passes more, or one above that."""
    last = len(engine.starts) + passes
    while len(engine.starts) < last:
        engine.advance()


def block_of(starts: Sequence[float], clean: Sequence[bool]) -> Block:
    """Of passes between clean ones; ``clean`` has one more in front.

    Raises:
        ValueError: too few are.
    """
    kept = [
        end - begin
        for i, (begin, end) in enumerate(pairwise(starts))
        if all(clean[i : i + 3])  # the one before, this one, and the next, which was begun in it
    ]
    if len(kept) < 10:
        raise ValueError(f"{len(kept)} of {len(starts) - 1} passes were of a full batch")
    return Block(statistics.fmean(kept), statistics.median(kept), len(kept))


def measure(
    engine: Steady, switch: Callable[[bool], None], until: float, seed: int = 0
) -> tuple[list[dict[str, list[Block]]], list[str]]:
    """Sets of blocks until a time of ``time.monotonic``; at least three.

    Returns:
        The sets, by "on" and "off", and why blocks were thrown away with their set.
    """
    rng = random.Random(seed)
    sets: list[dict[str, list[Block]]] = []
    lost: list[str] = []
    while time.monotonic() < until or len(sets) + len(lost) < 3:
        found: dict[str, list[Block]] = {"on": [], "off": []}
        order = list(BLOCKS)
        rng.shuffle(order)
        try:
            for name in order:
                switch(name == "on")
                found[name].append(run(engine))
        except ValueError as error:
            lost.append(str(error))
            continue
        for blocks in found.values():
            rng.shuffle(blocks)  # for the controls: neither is always the earlier one
        sets.append(found)
    return sets, lost


def summary(sets: Sequence[dict[str, list[Block]]], seed: int = 0) -> dict[str, Any]:
    """The cost as a share of a pass without the probe, by blocks' means and by their medians.

    ``interval`` is the bootstrap's over sets, for the mean over sets; ``typical`` the median over
    sets, which a few sets with something odd in them do not move, and its interval.
    """
    found: dict[str, Any] = {"sets": len(sets), "level": LEVEL}
    for of in ("mean", "median"):
        on, off = (
            np.array([[getattr(block, of) for block in each[name]] for each in sets])
            for name in ("on", "off")
        )
        base = off.mean(1)
        found[of] = {
            "pass_ms": {"on": 1e3 * float(np.mean(on)), "off": 1e3 * float(np.mean(off))},
            "extra_us": 1e6 * float(np.mean(on.mean(1) - base)),
            "cost_share": estimate(on.mean(1) / base - 1, seed),
            "control_off": estimate((off[:, 0] - off[:, 1]) / base, seed),
            "control_on": estimate((on[:, 0] - on[:, 1]) / base, seed),
        }
    return found


def estimate(shares: Any, seed: int) -> dict[str, Any]:
    """Mean and median of float ``[sets]``, with the bootstrap's intervals."""
    picks = np.random.default_rng(seed).integers(0, len(shares), (RESAMPLES, len(shares)))
    drawn = shares[picks]
    ends = (50 * (1 - LEVEL), 50 * (1 + LEVEL))
    return {
        "share": float(np.mean(shares)),
        "interval": np.percentile(drawn.mean(1), ends).tolist(),
        "typical": float(np.median(shares)),
        "typical_interval": np.percentile(np.median(drawn, axis=1), ends).tolist(),
    }


# ------------------------------------------------------------------ where it goes


def hooks(engine: Steady, probe: Any, classes: tuple[type, type, type], passes: int = 300) -> Any:
    """Host microseconds a pass in each hook, copies' and events' launches included."""
    taken = dict.fromkeys(HOOKS, 0.0)

    def timed(name: str) -> Callable[..., None]:
        hook = getattr(probe, name)

        def method(*given: Any) -> None:
            began = time.perf_counter()
            hook(*given)
            taken[name] += time.perf_counter() - began

        return method

    probe.pause()
    for name in HOOKS:
        setattr(probe, name, timed(name))
    try:
        probe.install(*classes)
        go_on(engine, SETTLE)
        before, first = dict(taken), probe.passes
        seconds = thread_seconds(probe)
        go_on(engine, passes)
        count = probe.passes - first
        spent = {name: 1e6 * (taken[name] - before[name]) / count for name in HOOKS}
        thread = 1e6 * (thread_seconds(probe) - seconds) / count
    finally:
        probe.pause()
        for name in HOOKS:
            delattr(probe, name)
        probe.install(*classes)
    return {"passes": count, "us": spent, "sum_us": sum(spent.values()), "feed_thread_us": thread}


def thread_seconds(probe: Any) -> float:
    """Processor time of the probe's thread; with and without the interpreter's lock."""
    return float(probe._feed.thread_seconds)


def host(engine: Steady, passes: int = 200) -> dict[str, float]:
    """What a pass takes, and how much of that the engine's thread works, without the probe.

    The engine waits for the GPU asleep, so processor time is work. Where it is nearly all of a
    pass, the GPU waits for the engine; where it is not, the engine for the GPU.
    """
    first = len(engine.starts)
    began, worked = time.perf_counter(), time.thread_time()
    go_on(engine, passes)
    worked, wall = time.thread_time() - worked, time.perf_counter() - began
    count = len(engine.starts) - first
    return {
        "passes": count, "pass_ms": 1e3 * wall / count, "host_ms": 1e3 * worked / count,
        "host_share": worked / wall,
    }  # fmt: skip


def gpu_ms(engine: Steady, passes: int = 30) -> float:
    """Milliseconds of a pass in which something runs on the GPU, by torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    go_on(engine, SETTLE)
    torch.cuda.synchronize()
    first = len(engine.starts)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        go_on(engine, passes)
        torch.cuda.synchronize()
    count = len(engine.starts) - first
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in seen.profiler.kineto_results.events()
        if event.device_type().name == "CUDA"
    )
    return covered(spans) / 1e6 / count


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """How much of the line sorted spans cover; what several cover counts once."""
    total, end = 0, None
    for begin, last in spans:
        if end is None or begin > end:
            total += last - begin
        elif last > end:
            total += last - end
        end = last if end is None else max(end, last)
    return total


def writer_seconds(probe: Any) -> float | None:
    """Processor time of the writer's process, where the system tells."""
    try:
        text = Path(f"/proc/{probe._feed.child.pid}/stat").read_text()
        user, system = text.rpartition(")")[2].split()[11:13]
    except (OSError, ValueError):
        return None
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def calls(probe: Any, times: int = 500) -> dict[str, float]:
    """Host microseconds of the calls that a pass makes, on the engine's own tensors, and of others
    that could do the same; the device is idle."""
    import torch

    slot = probe._free[0]
    gather = slot._gather
    sources, parts, events = gather._sources, gather._bytes, slot.events
    if len(sources) < 4 or events is None:
        return {}
    drafts, lengths, live, admitted = sources
    size = gather.sizes[-1]
    staged, packed = gather._staged[size], slot._packed[size]
    stream, ends = torch.cuda.current_stream(), list(packed.split(gather.each))
    work: dict[str, Callable[[], Any]] = {
        "slot.copy": lambda: slot.copy(live, drafts, lengths, admitted),
        "cat": lambda: torch.cat(parts, out=staged),
        "copy_": lambda: packed.copy_(staged, non_blocking=True),
        "four copy_": lambda: [
            to.copy_(of, non_blocking=True) for to, of in zip(ends, parts, strict=True)
        ],
        "_foreach_copy_": lambda: torch._foreach_copy_(ends, parts, non_blocking=True),
        "current_stream": torch.cuda.current_stream,
        "record": events[0].record,
        "record of a stream": lambda: events[1].record(stream),
        "query": events[1].query,
        "elapsed_time": lambda: events[0].elapsed_time(events[1]),
    }
    found = {}
    for name, call in work.items():
        torch.cuda.synchronize()
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        found[name] = 1e6 * (time.perf_counter() - began) / times
    torch.cuda.synchronize()
    return found


def device(probe: Any, times: int = 100) -> dict[str, float]:
    """Microseconds that copies and events of a pass take of the GPU, launched behind a long wait so
    that the host is not what they wait for."""
    import torch

    slot = probe._free[0]
    sources = slot._gather._sources
    if len(sources) < 4 or slot.events is None:
        return {}
    drafts, lengths, live, admitted = sources

    def copies() -> None:
        slot.copy(live, drafts, lengths, admitted)

    def whole() -> None:
        slot.mark(0)
        slot.copy(live, drafts, lengths, admitted)
        slot.mark(1)
        slot.mark(2)

    found = {}
    for name, work in (("copies", copies), ("copies and events", whole)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # cycles: some 25 ms
        begin.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        found[name] = 1e3 * begin.elapsed_time(end) / times
    slot.reset()
    return found
