"""Measured runs of adaptive against fixed verification on a CPU, as they come with the workbench.

``benchmarks/adaptive_cpu.py`` makes them, in pairs that take turns; :func:`measured_adaptive` reads
them for figures that put a measurement beside a simulation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from sys import float_info
from typing import Any

from workbench.errors import TraceError
from workbench.files import read_text
from workbench.spec.recorded import RECORDED

SCHEMA = "workbench-adaptive-cpu/1"
_FILE = "adaptive-cpu.json"
_PARTS = ("fixed", "adaptive", "simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Pairs of adaptive and fixed verification on the same prompts.

    Attributes:
        concurrency: sequences decoded together.
        ratio: tokens/s of adaptive over fixed verification.
        low, high: of its 95 % interval, None where it was not recorded.
        p99_ratio: the same ratio of the 99th percentile of the time per output token, or None.
        temperature: of the sampling.
        mix: what was decoded, ``code`` for one; "" where it was not recorded.
        pairs: how many, None where it was not recorded.
        fixed, adaptive: figures of each side, by name.
        simulated: what the simulation says of the same load, by name.
    """

    concurrency: int
    ratio: float
    low: float | None = None
    high: float | None = None
    p99_ratio: float | None = None
    temperature: float = 0.0
    mix: str = ""
    pairs: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    adaptive: Mapping[str, Any] = field(default_factory=dict)
    simulated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Temperature and mix, for legends."""
        return f"temperature {self.temperature:g}" + (f", {self.mix}" if self.mix else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAdaptive:
    """A file of them.

    Attributes:
        how: machine, versions and date.
        runs: in the file's order.
    """

    how: str
    runs: tuple[MeasuredRun, ...]


def measured_adaptive(path: str | Path | None = None) -> MeasuredAdaptive:
    """The runs of a file; of the one that comes with the workbench when None.

    What a run needs is ``concurrency`` and ``ratio``; all else may be missing or null.

    Raises:
        FileError: the file cannot be read.
        TraceError: it is no such file, or a value is of the wrong kind.
    """
    file = RECORDED / _FILE if path is None else Path(path)
    try:
        data = json.loads(read_text(str(file)))
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        raise TraceError(f"{file} is not JSON ({error}); write it anew") from error
    if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
        raise TraceError(f"{file} has not the schema {SCHEMA!r}; benchmarks/adaptive_cpu.py has it")
    runs = data.get("runs")
    if not isinstance(runs, list) or not all(isinstance(run, Mapping) for run in runs):
        raise TraceError(f"{file} needs a list of runs")
    return MeasuredAdaptive(
        how=str(data.get("how") or "measured, machine not recorded"),
        runs=tuple(_run(run, f"run {number} of {file}") for number, run in enumerate(runs, 1)),
    )


def _run(data: Mapping[str, Any], where: str) -> MeasuredRun:
    counts = {name: data.get(name) for name in ("concurrency", "pairs")}
    for name, count in counts.items():
        missing = count is None and name == "pairs"
        if not missing and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise TraceError(f"{where}: {name} must be a whole number from 1 on, not {count!r:.40}")
    names = ("ratio", "low", "high", "p99_ratio", "temperature")
    numbers = {name: _number(data.get(name), name, where) for name in names}
    if numbers["ratio"] is None:
        raise TraceError(f"{where} needs a ratio of tokens/s, adaptive over fixed")
    for name in _PARTS:
        if not isinstance(data.get(name) or {}, Mapping):
            raise TraceError(f"{where}: {name} must be figures by name")
    return MeasuredRun(
        concurrency=int(counts["concurrency"] or 0),
        ratio=numbers["ratio"],
        low=numbers["low"],
        high=numbers["high"],
        p99_ratio=numbers["p99_ratio"],
        temperature=numbers["temperature"] or 0.0,
        mix=str(data.get("mix") or ""),
        pairs=counts["pairs"],
        **{name: data.get(name) or {} for name in _PARTS},
    )


def _number(value: Any, name: str, where: str) -> float | None:
    if value is None:
        return None
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not 0 <= value <= float_info.max:
        raise TraceError(f"{where}: {name} must be a number from 0 on, not {value!r:.40}")
    return float(value)
