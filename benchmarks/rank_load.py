"""The recorded rank under load: batched decode, verification, millions of cached tokens.

    PYTHONPATH=. python3 benchmarks/rank_load.py --out result.json [--seconds 100] [--layers N]
        [--parts tune,check,chain,batches,verify,long,sweep,profile] [--no-warm]
        [--record experts.safetensors] [--replay experts.safetensors]

Needs a GPU (``--device cpu --model beam-tiny --tp 2 --batches 3`` interprets a small rank). What is
wrong is not timed. The result is written after every part, and parts that ``--seconds`` leaves no
time for are named in it. Kernels are compiled beforehand by processes of their own (the rank leaves
the card no room for more than one at a time).

``tune`` times whole steps with one choice changed at a time, in turn with the step without it and
with the same experts in both, and keeps what is faster: the registry's kernel instead of the step's
own, launch sizes, prefetches, launches without dependents. The choices are checked, measured
against the default and used by the parts behind. ``--replay`` feeds recorded experts to the step
and to the chain of single operations.

Bytes of a step (TP8, BF16): an expert 9.83 MB; what is not experts 1.97 GB; 0.131 MB of cache a
sequence, layer and 512 tokens. With 57 / 160 / 248 distinct experts a layer at 8 / 32 / 128 rows:
29.4 / 79.7 / 124 GB, floors 7.0 / 18.9 / 29.3 ms at 4.22 TB/s.

First run, at 1k context (ms): chain 9.13 / 20.7 / 31.6; load 9.86 / 21.2 / 32.2, plain launches
9.78 / 21.1 / 32.2. There, kernels without the experts' added up to 2.3 / 2.6 / 3.9 ms, of which
attention 0.64 / 0.77 / 1.53, and dependent launches saved nothing, because a program asked for
640-byte rows by bulk prefetches, which made a down product 20 % slower.

At 57 experts 64 rows a program make 285 up programs for 264 places: the 21 of a second wave ran
alone, 99 us instead of the 89 that the sweep's 52 experts (260 programs) gave; down programs that
wait there can ask for their weights meanwhile.

Predicted for the second (ms): no prefetch 9.2 / 20.6 / 31.5 (dependent launches hide 1 us of each
of 520); half as many programs for attention, and its own keys in a part of their own, 0.15 / 0.2 /
0.5 less; the fastest mix 8.6 / 20.2 / 31.0. Prefetches of lines gain at most 0.1. Verification at
8k, 1 / 8 / 128 / 256 / 512 / 1024 rows: 2.4 / 8.9 / 31.8 / 34 / 37 / 42.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save

from workbench.errors import WorkbenchError
from workbench.files import write_whole
from workbench.kernels.peaks import measured_peaks
from workbench.kernels.rank.chain import RankStep
from workbench.kernels.rank.choices import read_choices
from workbench.kernels.rank.fused import FusedStep
from workbench.kernels.rank.graph import Replay, capture, kernel_times, time_replays
from workbench.kernels.rank.load_check import check_load
from workbench.kernels.rank.load_config import (
    FEW,
    FROM_CHAIN,
    Experts,
    LoadConfig,
    config_for,
)
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.rank.load_step import Choices, LoadStep
from workbench.kernels.rank.reference import check_step
from workbench.kernels.rank.stages import cumulative
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import LayerWeights, RankWeights
from workbench.kernels.triton_runtime import INTERPRETED
from workbench.model.presets import resolve

LIMIT = 2e-2  # error of a layer's stream; plain torch reaches 6e-3 in BF16
PARTS = ("tune", "check", "chain", "batches", "verify", "long", "sweep", "profile")
USUAL = PARTS[:6]  # the sweep of the experts alone was the first run's
CHECKS: dict[str, tuple[list[int], list[int]]] = {
    "8, all layers": ([1024, 100, 511, 512, 777, 1024, 1500, 3000], [1] * 8),
    "7": ([1024, 5, 600, 511, 512, 513, 2000], [1] * 7),
    "33": ([1024] * 33, [1] * 33),
    "100": ([900 + i for i in range(100)], [1] * 100),
    "verify 5 x 1..8": ([700, 1024, 90, 512, 2048], [3, 1, 8, 5, 2]),
    "verify 100 x 3": ([1024 - i for i in range(100)], [3] * 100),
    "verify 128 x 8": ([1024] * 128, [8] * 128),
}
# Rows, and the share of the time for tuning; from 512 on verifications of 128 sequences.
TUNED = {8: 0.3, 32: 0.2, 128: 0.25, 1024: 0.15, 512: 0.1}
LARGE = 256  # rows from which the trials are those of large steps
UP = [
    Experts(rows=32, depth=128, swap=False),
    Experts(rows=16, depth=128, swap=False),
    Experts(rows=16, depth=256, swap=False),
    Experts(rows=32, depth=64, stages=6, swap=False),
    Experts(rows=32, depth=256, stages=3, swap=False),
    Experts(rows=64, depth=64, stages=5, swap=False),
    Experts(rows=64, depth=128, stages=3, swap=False),
    Experts(rows=32, depth=128, swap=False, first=False),
    Experts(rows=32, depth=128, swap=False, warps=8),
    Experts(rows=64, depth=64),
    Experts(rows=64, depth=64, stages=6),
    Experts(rows=64, depth=128, stages=3),
    Experts(rows=32, depth=128),
    Experts(rows=16, depth=256, stages=3),
    Experts(rows=64, depth=64, tma=True),
    Experts(rows=64, depth=64, stages=6, tma=True),
    Experts(rows=64, depth=128, stages=3, tma=True),
    Experts(rows=32, depth=128, tma=True),
    Experts(rows=32, depth=128, swap=False, programs=3),
    Experts(rows=32, depth=128, swap=False, programs=3, ahead=512),
    Experts(rows=16, depth=256, swap=False, programs=3),
    Experts(rows=16, depth=256, swap=False, programs=3, ahead=1024),
    Experts(rows=16, depth=128, swap=False, programs=4, ahead=1024),
]
DOWN = [
    Experts(rows=64, depth=64, stages=5, ahead=320),
    Experts(rows=64, depth=64, stages=5),
    Experts(rows=128, depth=64, stages=5, ahead=320),
    Experts(rows=128, depth=64, stages=5),
    Experts(rows=128, depth=64, stages=3, ahead=320),
    Experts(rows=32, depth=64, stages=5, ahead=320),
    Experts(rows=64, depth=64, stages=5, ahead=320, first=False),
    Experts(rows=64, depth=64, stages=5, swap=False, ahead=320),
    Experts(rows=128, depth=64, stages=4, swap=False, ahead=320),
    Experts(rows=64, depth=64, stages=5, tma=True),
    Experts(rows=128, depth=64, stages=5, tma=True),
    Experts(rows=128, depth=64, stages=5, tma=True, warps=8),
    Experts(rows=64, depth=64, stages=5, programs=4),
    Experts(rows=64, depth=64, stages=5, programs=4, ahead=320),
    Experts(rows=128, depth=64, stages=5, programs=2),
    Experts(rows=128, depth=64, stages=5, programs=2, ahead=320),
    Experts(rows=32, depth=64, stages=5, programs=6, ahead=320),
    Experts(rows=64, depth=64, stages=4, programs=4, ahead=320, swap=False),
]


def _ahead(columns: int) -> dict[str, Any]:
    return {"ahead": columns}


# What is tried, the most promising first: a name, and changes of a LoadConfig: a field's new value,
# or a mapping of changes to a launch.
TRIALS: list[tuple[str, dict[str, Any]]] = [
    ("down ahead 320", {"down": {"tma": False, "warps": 4, "ahead": 320}}),
    ("up 32 x 128", {"up": {"rows": 32, "depth": 128, "stages": 5, "swap": False, "tma": False}}),
    ("up 16 x 256", {"up": {"rows": 16, "depth": 256, "stages": 3, "swap": False, "tma": False}}),
    ("qkvg ahead 512", {"qkvg": _ahead(512)}),
    ("chain qkvg, attention", {"chain": ("qkvg", "attention")}),
    ("attention 66 programs", {"programs": 66}),
    ("chain combine, o_proj, boundary", {"chain": ("combine", "o_proj", "boundary")}),
    ("chain router", {"chain": ("router",)}),
    ("boundary 16 warps", {"vector_warps": 16}),
    ("rounded products", {"float_products": 0}),
    ("attention 264 programs", {"programs": 264}),
    ("o_proj ahead 256", {"o_proj": _ahead(256)}),
    ("router ahead 256", {"router": _ahead(256)}),
    ("router 10 splits", {"router": {"splits": 10}}),
    ("qkvg 3 splits", {"qkvg": {"splits": 3}}),
    ("o_proj 1 split", {"o_proj": {"splits": 1}}),
    ("chain qkvg", {"chain": ("qkvg",)}),
    ("chain o_proj", {"chain": ("o_proj",)}),
    ("chain combine", {"chain": ("combine",)}),
    ("chain all but experts", {"chain": FROM_CHAIN}),
    ("attention 128 keys", {"keys": 128, "attend_stages": 2}),
    ("attention 32 keys", {"keys": 32, "attend_stages": 4}),
    ("qkvg 8 splits", {"qkvg": {"splits": 8}}),
    ("qkvg 32 rows, 2 splits", {"qkvg": {"rows": 32, "splits": 2}}),
    ("o_proj 32 rows, 1 split", {"o_proj": {"rows": 32, "splits": 1}}),
    ("router 16 rows, 10 splits", {"router": {"rows": 16, "splits": 10}}),
    ("qkvg ahead 64", {"qkvg": _ahead(64)}),
    ("down ahead 64", {"down": {"tma": False, "warps": 4, "ahead": 64}}),
    ("up 32 x 256", {"up": {"rows": 32, "depth": 256, "stages": 3, "swap": False, "tma": False}}),
    ("up 64 x 64", {"up": {"rows": 64, "depth": 64, "stages": 6, "swap": True, "tma": True}}),
    ("up without TMA", {"up": {"tma": False}}),
    ("down without TMA", {"down": {"tma": False, "warps": 4}}),
    ("down 2 programs", {"down": {"tma": False, "warps": 4, "ahead": 0, "programs": 2}}),
    ("attention 8 warps", {"attend_warps": 8}),
    ("boundary 4 warps", {"vector_warps": 4}),
    ("o_proj 3 splits", {"o_proj": {"splits": 3}}),
    ("o_proj ahead 64", {"o_proj": _ahead(64)}),
    ("plain launches", {"dependent": False}),
]
LARGE_TRIALS: list[tuple[str, dict[str, Any]]] = [
    ("up 32 tokens", {"up": {"tokens": 32}}),
    ("up 64 tokens", {"up": {"tokens": 64}}),
    ("up 128 tokens, 8 warps", {"up": {"tokens": 128, "warps": 8}}),
    ("up weights tall", {"up": {"swap": True}}),
    ("up weights tall, TMA", {"up": {"swap": True, "tma": True}}),
    ("up 128 columns", {"up": {"depth": 128, "stages": 3}}),
    ("down 32 tokens", {"down": {"tokens": 32}}),
    ("down 64 tokens", {"down": {"tokens": 64}}),
    ("down other side tall", {"down": {"swap": "other"}}),
    ("down TMA", {"down": {"tma": True, "swap": True}}),
    ("down 5 stages", {"down": {"stages": 5}}),
    ("chain qkvg", {"chain": ("qkvg",)}),
    ("chain o_proj", {"chain": ("o_proj",)}),
    ("chain router", {"chain": ("router",)}),
    ("chain combine, o_proj, boundary", {"chain": ("combine", "o_proj", "boundary")}),
    ("attention 528 programs", {"programs": 528}),
    ("attention 8 warps", {"attend_warps": 8}),
    ("attention 32 keys", {"keys": 32, "attend_stages": 3}),
]
# Kernels that a changed field changes, which are then all that is compiled ahead.
CHANGED: dict[str, tuple[str, ...]] = {
    "qkvg": ("product_rows", "attend_rows"), "up": ("up_rows",),
    "o_proj": ("product_rows", "boundary_rows"), "down": ("down_rows",),
    "router": ("router_rows", "choose_and_place"), "programs": ("attend_rows",),
    "keys": ("attend_rows",), "attend_stages": ("attend_rows",), "attend_warps": ("attend_rows",),
    "vector_warps": ("boundary_rows", "embed_norm_rows"),
    "float_products": ("down_rows", "boundary_rows"),
}  # fmt: skip
GAIN = 0.002  # of a step's time, below which a choice is not worth changing
LOST = 0.01  # of a step's time, by which a choice lost that the next size need not try


def changed(config: LoadConfig, changes: dict[str, Any]) -> LoadConfig:
    """``config`` with a trial's changes; operations of the chain are added to those it has."""
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        now = getattr(config, name)
        if name == "chain":
            fields[name] = tuple(op for op in FROM_CHAIN if op in {*now, *value})
        elif isinstance(value, dict):
            if value.get("swap") == "other":
                value = value | {"swap": not now.swap}
            fields[name] = replace(now, **value)
        else:
            fields[name] = value
    return replace(config, **fields)


def contexts_of(rows: int, context: int) -> tuple[list[int], int]:
    """Sequences and new rows of each: a decode step, or from LARGE rows on a verification at 8k."""
    return ([context] * rows, 1) if rows < LARGE else ([8192] * 128, rows // 128)


BEGAN = time.monotonic()


def say(text: str) -> None:
    """Progress with the seconds since the start, on stderr."""
    print(f"{time.monotonic() - BEGAN:6.1f} s: {text}", file=sys.stderr, flush=True)


class Run:
    """The document, what is left of the time, and the weights."""

    def __init__(self, given: argparse.Namespace, compiling: Compiling | None) -> None:
        self.given, self.compiling = given, compiling
        self.gpu = given.device == "cuda"
        rates = measured_peaks(given.device)
        if self.gpu:
            torch.cuda.empty_cache()
        self.bandwidth = rates.bandwidth
        say(f"{rates.bandwidth / 1e12:.3f} TB/s")
        self.weights = RankWeights.random(
            resolve(given.model).config, given.tp, layers=given.layers, device=given.device,
            dtype=torch.bfloat16,
        )  # fmt: skip
        self.synchronize()
        say(f"{self.weights.bytes / 2**30:.2f} GiB of weights")
        self.configs: dict[int, LoadConfig] = {}
        # Recorded experts by number of rows: given ones, and those of the steps of this run.
        self.given_choices: dict[int, Choices] = {}
        self.choices: dict[str, torch.Tensor] = {}
        if given.replay is not None:
            for rows, (ids, shares) in read_choices(given.replay).items():
                self.given_choices[rows] = Choices(
                    ids=ids.to(given.device), shares=shares.to(given.device)
                )
        self.document: dict[str, Any] = {
            "schema": "workbench-rank-load/1", "model": given.model, "tp": given.tp,
            "layers": len(self.weights.layers), "bandwidth": self.bandwidth,
            "hardware": torch.cuda.get_device_name() if self.gpu else "CPU, interpreted",
            "torch": torch.__version__, "note": "no all-reduce on one GPU",
        }  # fmt: skip

    def compiled(self, name: str) -> None:
        """Wait until the kernels of a part have been compiled ahead."""
        if self.compiling is not None:
            self.compiling.wait(name)

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    @property
    def late(self) -> bool:
        return time.monotonic() - BEGAN > self.given.seconds

    def write(self) -> None:
        self.document["seconds"] = time.monotonic() - BEGAN
        if self.given.record is not None and self.choices:
            write_whole(self.given.record, save(self.choices))
        write_whole(self.given.out, (json.dumps(self.document, indent=1) + "\n").encode())

    def config(self, rows: int, *, decode: bool = True) -> LoadConfig | None:
        """What was found for the nearest number of rows of the same kind; None: the default.

        Steps that are no ``decode`` of sequences of one size cannot take the registry's attention.
        """
        near = [n for n in self.configs if (n < LARGE) == (rows < LARGE) and rows > 4]
        if not near:
            return None
        found = min(near, key=lambda n: abs(math.log(n / rows)))
        best, base = self.configs[found], config_for(rows)
        if config_for(found) != base:  # products of tiles of another size: only these are as good
            best = replace(base, up=best.up, down=best.down, chain=best.chain)
        return replace(best, chain=tuple(op for op in best.chain if decode or op != "attention"))

    def timed(
        self, contexts: list[int], new: int = 1, *, label: str, profile: bool = False,
        dependent: bool | None = None, config: LoadConfig | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Milliseconds of a step as one graph, its floor and the experts it touched."""
        state = LoadState(self.weights, contexts, new)
        step = LoadStep(
            self.weights, state, dependent=dependent,
            config=config or self.config(state.rows, decode=new == 1),
            choices=self.given_choices.get(state.rows),
        )  # fmt: skip
        kept = cast(RankState, state)
        replay = capture(step, kept)
        times = time_replays({"load": replay}, kept, self.given.rounds)["load"]
        if not bool(torch.isfinite(state.logits).all()):
            raise WorkbenchError(f"{label}: logits that are no numbers")
        used = step.recorded()
        if f"ids {state.rows}" not in self.choices:  # the first step of so many rows: a decode's
            self.choices[f"ids {state.rows}"] = used.ids.to(torch.int16).cpu()
            self.choices[f"shares {state.rows}"] = used.shares.cpu()
        row = self.row(times.median, times.low, times.high, step.distinct(), state)
        if profile:
            row["kernels"] = kernel_times(replay, kept)
        say(
            f"{label}: {row['milliseconds']:.3f} ms, floor {row['floor']:.3f} "
            f"({row['of_floor']:.3f} x), {row['distinct']:.1f} experts"
        )
        return row

    def row(
        self, median: float, low: float, high: float, distinct: float, state: LoadState
    ) -> dict[str, Any]:
        moved = self.weights.step_bytes(distinct, state.rows) + state.read_bytes()
        floor = moved / self.bandwidth * 1e3
        return {
            "rows": state.rows, "sequences": state.sequences, "context": state.context,
            "milliseconds": median * 1e3, "low": low * 1e3, "high": high * 1e3,
            "distinct": distinct, "bytes": moved, "floor": floor, "of_floor": median * 1e3 / floor,
        }  # fmt: skip


# ------------------------------------------------------------------ parts


def tune(run: Run) -> dict[str, Any]:
    """Whole steps with one choice changed at a time; what is faster stays."""
    found: dict[str, Any] = {}
    lost: set[str] = set()
    for rows in [*run.given.batches, *(n for n in TUNED if run.gpu and n >= LARGE)]:
        if run.late:
            break
        run.compiled(f"tune {rows}")
        until = time.monotonic() + run.given.tune_seconds * TUNED.get(rows, 1.0)
        found[str(rows)] = _tuned(run, rows, until, lost)
        run.document["tune"] = found
        run.write()
        if run.gpu:
            torch.cuda.empty_cache()
    if run.compiling is not None:
        run.compiling.drop("tune")
    return found


def _tuned(run: Run, rows: int, until: float, lost: set[str]) -> dict[str, Any]:
    """One size's trials; ``lost`` are those that lost at the size before, and is changed."""
    contexts, new = contexts_of(rows, run.given.context)
    state = LoadState(run.weights, contexts, new)
    kept = cast(RankState, state)
    base = default = _default(rows)
    # The same experts in every trial: how many are touched changes from step to step.
    recorder = LoadStep(
        run.weights, state, config=default, advance=False, choices=run.given_choices.get(rows)
    )
    recorder()
    run.synchronize()
    choices, distinct = recorder.recorded(), recorder.distinct()

    def made(config: LoadConfig) -> Replay:
        step = LoadStep(run.weights, state, config=config, choices=choices, advance=False)
        return capture(step, kept)

    standing = made(base)
    entry: dict[str, Any] = {"rows": rows, "distinct": distinct, "trials": []}
    for name, changes in (LARGE_TRIALS if rows >= LARGE else TRIALS)[: run.given.choices]:
        config = changed(base, changes)
        # Nothing would change, or what a size before has settled; attention grows with the batch.
        settled = name in lost and not (rows == 128 and ("attention" in name or "chain" in name))
        if config == base or settled or name.split()[0] in base.chain:
            continue
        if run.late or time.monotonic() > until:
            entry.setdefault("no_time_for", []).append(name)
            continue
        run.compiled(f"tune {rows} {name}")
        row: dict[str, Any] = {"trial": name}
        entry["trials"].append(row)
        try:
            trial = made(config)
            rounds = 8 if rows <= 8 else 4
            times = time_replays({"with": trial, "without": standing}, kept, rounds)
        except Exception as error:  # too much shared memory, or a compiler's refusal
            row["error"] = f"{type(error).__name__}: {error}"[:200]
            say(f"tune {rows} {name}: {row['error']}")
            continue
        with_it, without = (times[each].median * 1e3 for each in ("with", "without"))
        stays = with_it < without * (1 - GAIN)
        (lost.add if with_it > without * (1 + LOST) else lost.discard)(name)
        row |= {"milliseconds": with_it, "without": without, "stays": stays}
        say(f"tune {rows} {name}: {with_it:.3f} ms, without {without:.3f}{' STAYS' * stays}")
        if stays:
            base, standing = config, trial
        del trial
    start = made(default)
    times = time_replays({"chosen": standing, "default": start}, kept, run.given.rounds)
    for name, each in times.items():
        entry[name] = run.row(each.median, each.low, each.high, distinct, state)
    del standing, start
    # The choice is checked with the router's own experts before anything else uses it.
    count = len(run.weights.layers)
    step = LoadStep(run.weights, state, config=base, advance=False)
    found = check_load(
        step, run.weights, state, run=capture(step, kept), rows=sorted({0, state.rows - 1}),
        layers=sorted({0, 2, 3, count - 1} & set(range(count))),
    )  # fmt: skip
    entry |= {
        "config": asdict(base),
        "check": {**found.to_dict(), "failures": found.failures(LIMIT)},
    }
    if not entry["check"]["failures"]:
        run.configs[rows] = base
    say(
        f"tune {rows}: {entry['chosen']['milliseconds']:.3f} ms "
        f"({entry['chosen']['of_floor']:.3f} x), default {entry['default']['milliseconds']:.3f}, "
        f"worst {found.worst:.1e} {entry['check']['failures']}"
    )
    return entry


def _default(rows: int) -> LoadConfig:
    return FEW if INTERPRETED else config_for(rows)


def check(run: Run) -> dict[str, Any]:
    """Sampled rows and layers of odd sizes and mixed contexts against float64; one whole depth."""
    found: dict[str, Any] = {}
    count = len(run.weights.layers)
    some = sorted({0, 2, 3, 4, 9, 10, count // 2, count - 1} & set(range(count)))
    cases = CHECKS
    if not run.gpu:
        cases = {"3": ([40, 9, 30], [1, 3, 2])}
    for name, (contexts, new) in cases.items():
        run.compiled(f"check {name}")
        state = LoadState(run.weights, contexts, new)
        config = run.config(state.rows, decode=False)
        step = LoadStep(run.weights, state, config=config)
        replay = capture(step, cast(RankState, state))
        rows = sorted({0, state.rows // 2, state.rows - 1})
        result = check_load(
            step, run.weights, state, run=replay, rows=rows, layers=None if "all" in name else some
        )
        # A replay from the same state gives the same bits.
        first = state.logits.clone()
        state.reset()
        replay()
        run.synchronize()
        same = bool(torch.equal(first, state.logits))
        failures = result.failures(LIMIT) + ([] if same else ["two replays differ"])
        found[name] = {**result.to_dict(), "bit_equal": same, "failures": failures}
        say(f"check {name}: worst {result.worst:.2e}, logits {result.logits_error:.1e} {failures}")
        run.document["check"] = found
        run.write()
    return found


def sweep(run: Run) -> dict[str, Any]:
    """The experts' two products alone, over many layers' weights, each launch size in turn."""
    found: dict[str, Any] = {}
    sparse = [layer for layer in run.weights.layers if not layer.dense][:24]
    s = run.weights.shapes
    each = s.expert_width * s.hidden * 2
    for batch in run.given.batches:
        state = LoadState(run.weights, [run.given.context] * batch)
        step = LoadStep(run.weights, state)
        step()  # the lists of its last layer serve for all
        run.synchronize()
        distinct = int(step._counts[-1])
        rows: dict[str, list[dict[str, Any]]] = {"up": [], "down": []}

        usual = step.config
        for name, choices, moved in (("up", UP, 2 * each), ("down", DOWN, each)):
            launch = step.launch_up if name == "up" else step.launch_down
            for choice in choices[: run.given.choices]:
                if run.late:
                    break
                step.config = replace(usual, **cast(Any, {name: choice}))
                try:
                    spent = _seconds(launch, sparse, run.gpu)
                except Exception as error:  # too much shared memory, or a compiler's refusal
                    reason = f"{type(error).__name__}: {error}"[:200]
                    rows[name].append({**asdict(choice), "error": reason})
                    say(f"sweep {batch} {name} {choice}: {reason}")
                    continue
                speed = moved * distinct / spent
                rows[name].append(
                    {**asdict(choice), "microseconds": spent * 1e6, "bytes_per_second": speed}
                )
                say(
                    f"sweep {batch} {name} {_short(choice)}: {spent * 1e6:.1f} us, "
                    f"{speed / run.bandwidth:.1%}"
                )
            step.config = usual
        best = {}
        for name, choices in (("up", UP), ("down", DOWN)):
            timed = [
                (row["microseconds"], choice)
                for row, choice in zip(rows[name], choices, strict=False)
                if "microseconds" in row
            ]
            if timed:
                best[name] = min(timed, key=lambda pair: pair[0])[1]
        if len(best) == 2:
            run.configs[batch] = replace(usual, **cast(Any, best))
            step.config = run.configs[batch]
            both = _seconds(step.launch_experts, sparse, run.gpu)
            speed = 3 * each * distinct / both
            say(f"sweep {batch}: both {both * 1e6:.1f} us, {speed / run.bandwidth:.1%}")
            rows["both"] = [{"microseconds": both * 1e6, "distinct": distinct}]
        found[str(batch)] = rows
        run.document["sweep"] = found
        run.write()
    return found


def profile(run: Run) -> dict[str, Any]:
    """Each kernel's time in the whole step, launched plainly, so that no time is waiting."""
    found: dict[str, Any] = {}
    for batch in run.given.batches:
        found[str(batch)] = run.timed(
            [run.given.context] * batch, label=f"plain launches {batch}", profile=True,
            dependent=False,
        )  # fmt: skip
        for row in found[str(batch)].get("kernels", [])[:12]:
            say(f"   {row['kernel'][:30]}: {row['launches']:.0f} x "
                f"{row['microseconds'] / row['launches']:.2f} us")  # fmt: skip
        run.document["profile"] = found
        run.write()
    return found


class Replayed:
    """A router of the chain that chooses as ever and whose choice is not used: recorded ones are.

    Layers are told apart by where their router's weight lies.
    """

    def __init__(self, router: Callable[..., Any], weights: RankWeights, given: Choices) -> None:
        self.router = router
        self.of_layer = {
            layer.router.data_ptr(): (given.ids[index], given.shares[index])
            for index, layer in enumerate(weights.layers)
            if layer.router is not None
        }

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """The recorded ids and shares of the layer that ``weight`` is of."""
        self.router(x, weight, *rest, **named)
        return self.of_layer[weight.data_ptr()]


def chain(run: Run) -> dict[str, Any]:
    """The chain of single operations, for comparison: its experts lie the other way round."""
    found: dict[str, Any] = {}
    forms = cumulative("products") | {"expert_mlp": "triton"}
    run.weights.relayout("IH")
    try:
        state = RankState(run.weights, run.given.context, batch=3, headroom=64)
        replay = capture(RankStep(run.weights, state, forms), state)
        result = check_step(replay.step, run.weights, state, replay)
        found["check"] = {**result.to_dict(), "failures": result.failures(LIMIT)}
        say(f"chain check: worst {result.worst:.2e} {result.failures(LIMIT)}")
        for batch in run.given.batches:
            if run.late:
                break
            state = RankState(run.weights, run.given.context, batch=batch, headroom=64)
            step = RankStep(run.weights, state, forms)
            given = run.given_choices.get(batch)
            if given is not None:
                step._call["router"] = Replayed(step._call["router"], run.weights, given)
            replay = capture(step, state)
            times = time_replays({"chain": replay}, state, run.given.rounds)["chain"]
            ids = step.expert_ids()
            layers = [i for i, each in enumerate(run.weights.layers) if not each.dense]
            distinct = sum(int(ids[i].unique().numel()) for i in layers) / max(1, len(layers))
            moved = run.weights.step_bytes(distinct, batch)
            moved += run.weights.cache_bytes(run.given.context, batch)
            floor = moved / run.bandwidth * 1e3
            found[str(batch)] = {
                "milliseconds": times.median * 1e3, "low": times.low * 1e3,
                "high": times.high * 1e3, "floor": floor, "distinct": distinct,
                "of_floor": times.median * 1e3 / floor, "replayed": given is not None,
            }  # fmt: skip
            say(f"chain {batch}: {times.median * 1e3:.3f} ms, floor {floor:.3f}, {distinct:.1f}")
            run.document["chain"] = found
            run.write()
            del replay, state, step
    finally:
        run.weights.relayout("HI")
    return found


def one_sequence(run: Run, context: int) -> dict[str, Any]:
    """A step of one sequence through the fused chain of one."""
    state = RankState(run.weights, context, headroom=64)
    replay = capture(FusedStep(run.weights, state), state)
    result = check_step(replay.step, run.weights, state, replay)
    times = time_replays({"fused": replay}, state, run.given.rounds)["fused"]
    experts = float(run.weights.shapes.top_k)
    moved = run.weights.step_bytes(experts, 1) + run.weights.cache_bytes(context, 1)
    floor = moved / run.bandwidth * 1e3
    say(f"one sequence at {context}: {times.median * 1e3:.3f} ms, floor {floor:.3f}")
    return {
        "rows": 1, "context": context, "milliseconds": times.median * 1e3, "distinct": experts,
        "floor": floor, "of_floor": times.median * 1e3 / floor,
        "failures": result.failures(LIMIT),
    }  # fmt: skip


def batches(run: Run) -> dict[str, Any]:
    """Every power of two up to 128, and odd ones."""
    found: dict[str, Any] = {}
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 3, 7, 33, 100):
        if run.late:
            break
        run.compiled(f"batch {batch}")
        found[str(batch)] = run.timed([run.given.context] * batch, label=f"batch {batch}")
        if batch == 1:
            found["1, one sequence's chain"] = one_sequence(run, run.given.context)
        run.document["batches"] = found
        run.write()
    return found


def verify(run: Run) -> dict[str, Any]:
    """Token rows of verifications at 8k context: the cost table's curve."""
    found: dict[str, Any] = {}
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if run.late:
            break
        sequences = min(tokens, 128)
        run.compiled(f"verify {tokens}")
        if tokens == 1:  # as ``workbench bench verify`` has it
            found["1, one sequence's chain"] = one_sequence(run, 8192)
        found[str(tokens)] = run.timed(
            [8192] * sequences, tokens // sequences, label=f"verify {tokens}"
        )
        run.document["verify"] = found
        run.write()
    return found


def long(run: Run) -> dict[str, Any]:
    """Four million cached tokens."""
    found: dict[str, Any] = {}
    for sequences, context in ((128, 32768), (4, 1_000_000), (1, 1_000_000)):
        if run.late:
            break
        name = f"{sequences} x {context}"
        try:
            found[name] = run.timed([context] * sequences, label=name)
        except WorkbenchError as error:
            found[name] = {"error": str(error)}
            say(f"{name}: {error}")
        run.document["long"] = found
        run.write()
    return found


# ------------------------------------------------------------------ helpers


def _short(choice: Experts) -> str:
    flags = "".join(
        letter for letter, on in
        (("S", choice.swap), ("T", choice.tma), ("f", not choice.first)) if on
    )  # fmt: skip
    return (
        f"{choice.rows} x {choice.depth} w{choice.warps} s{choice.stages} a{choice.ahead} "
        f"p{choice.programs} {flags}"
    )


def _seconds(
    launch: Callable[[LayerWeights], None], layers: list[LayerWeights], gpu: bool, rounds: int = 10
) -> float:
    """Median seconds a layer of a graph of ``launch`` for every layer."""

    def work() -> None:
        for layer in layers:
            launch(layer)

    work()
    if not gpu:
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) / len(layers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    pairs = []
    for _ in range(rounds):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        pairs.append((before, after))
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) / 1e3 for a, b in pairs)
    return times[len(times) // 2] / len(layers)


def compile_ahead(job: tuple[str, int, list[int], Any, dict[str, Any], Any, bool]) -> str:
    """Compile what a step would launch into Triton's cache on disk, in a process of its own.

    ``job``: model, ranks, contexts, new rows, changes, the kernels to compile (None: all), and
    whether the step has given experts and stays where it is, as in a trial.
    """
    from triton.runtime.jit import JITFunction

    model, tp, contexts, new, changes, wanted, trial = job
    if not hasattr(JITFunction, "plain_run"):
        cast(Any, JITFunction).plain_run = JITFunction.run
    plain = cast(Any, JITFunction).plain_run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if wanted is not None and self.__name__ not in wanted:
            return None
        return plain(self, *args, grid=grid, warmup=True, **options)

    cast(Any, JITFunction).run = compiled
    weights = RankWeights.random(resolve(model).config, tp, layers=5, device="meta")
    state = LoadState(weights, contexts, new)
    config = changed(config_for(state.rows), changes)
    free = LoadStep(weights, state, config=config)
    if not trial:
        free()
        return ""
    choices = Choices(ids=free.ids, shares=free.shares)
    LoadStep(weights, state, config=config, choices=choices, advance=False)()
    return ""


# Kernels of a step in three parts that take about as long to compile as one another.
THIRDS = (
    ("attend_rows", "pick_rows", "choose_and_place", "embed_norm_rows"),
    ("product_rows", "gated_rows", "head_rows"),
    ("up_rows", "down_rows", "boundary_rows", "router_rows"),
)


class Compiling:
    """Processes that compile, and which of their jobs a part has to wait for."""

    def __init__(self, given: argparse.Namespace) -> None:
        workers = max(1, min(14, (os.cpu_count() or 2) - 2))
        self.pool = ProcessPoolExecutor(workers, get_context("spawn"))
        self.jobs: dict[str, list[Any]] = {}
        for rows in (n for n in TUNED if n in given.batches or n >= LARGE):
            contexts, new = contexts_of(rows, given.context)
            self.add(given, f"tune {rows}", contexts, new, trial=True)
            for name, changes in LARGE_TRIALS if rows >= LARGE else TRIALS:
                kernels = [CHANGED.get(field) for field in changes]
                wanted = None if None in kernels else sum(cast(Any, kernels), ())
                self.add(given, f"tune {rows} {name}", contexts, new, changes, wanted, trial=True)
        for name, (contexts, fresh) in CHECKS.items():
            self.add(given, f"check {name}", contexts, fresh)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 3, 7, 33, 100):
            self.add(given, f"batch {batch}", [given.context] * batch, 1)
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            count = min(tokens, 128)
            self.add(given, f"verify {tokens}", [8192] * count, tokens // count)

    def add(
        self, given: argparse.Namespace, name: str, contexts: list[int], new: Any,
        changes: dict[str, Any] | None = None, wanted: Any = None, *, trial: bool = False,
    ) -> None:  # fmt: skip
        """A job that the part ``name`` waits for; all kernels: one for each third of them."""
        every = changes is None or "dependent" in changes
        for kernels in THIRDS if every else (wanted,):
            job = (given.model, given.tp, contexts, new, changes or {}, kernels, trial)
            self.jobs.setdefault(name, []).append(self.pool.submit(compile_ahead, job))

    def wait(self, name: str) -> None:
        """Until the jobs of ``name`` have ended; what one could not do is compiled when needed."""
        for future in self.jobs.pop(name, []):
            if (error := future.exception()) is not None:
                say(f"compiling ahead for {name}: {type(error).__name__} {str(error)[:160]}")

    def drop(self, part: str) -> None:
        """Give up jobs of a part that has ended, and have not begun."""
        for name in [each for each in self.jobs if each.startswith(part)]:
            for future in self.jobs.pop(name):
                future.cancel()

    def end(self) -> None:
        """Drop what nobody waits for any more."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def main() -> int:
    """Measure, write, and exit with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="beam-501b")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batches", default="8,32,128")
    parser.add_argument(
        "--choices", type=int, default=100, help="how many choices are tried at a size"
    )
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--tune-seconds", type=float, default=50, help="for all sizes together")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--parts", default=",".join(USUAL))
    parser.add_argument("--record", type=Path, help="keep the experts chosen in timed steps here")
    parser.add_argument("--replay", type=Path, help="experts that take the router's place")
    parser.add_argument("--no-warm", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.batches = [int(each) for each in given.batches.split(",")]
    asked = given.parts.split(",")
    if unknown := set(asked) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    compiling = None if given.device != "cuda" or given.no_warm else Compiling(given)
    failed: list[str] = []
    with torch.inference_mode():
        run = Run(given, compiling)
        works = {"tune": tune, "check": check, "sweep": sweep, "profile": profile,
                 "chain": chain, "batches": batches, "verify": verify, "long": long}  # fmt: skip
        for name in asked:
            if run.late:
                run.document.setdefault("no_time_for", []).append(name)
                say(f"no time for {name}")
                continue
            try:
                run.document[name] = works[name](run)
            except Exception as error:  # the parts behind it are worth their time all the same
                run.document.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"
                failed.append(name)
                say(f"{name} failed: {type(error).__name__}: {error!s:.600}")
            if run.gpu:
                torch.cuda.empty_cache()
            run.write()
        wrong = [k for k, row in run.document.get("check", {}).items() if row["failures"]]
        tuned = run.document.get("tune", {})
        wrong += [f"tune {k}" for k, row in tuned.items() if row["check"]["failures"]]
    if compiling is not None:
        compiling.end()
    say(f"done; wrong: {wrong}, failed: {failed}")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
