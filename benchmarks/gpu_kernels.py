"""The recorded run: every variant of every operation at Beam-501B's shapes, checked and timed.

    PYTHONPATH=. python3 benchmarks/gpu_kernels.py [--op boundary ...] [--tp 8 4]
        [--tokens 1 7 8 64 1024] [--variant torch triton ...] [--seconds 1.0] [--budget 540]
        [--jobs 12] [--verdicts FILE] [--out benchmarks/results/kernels-h200.json]

Needs a CUDA GPU, and torch, triton, numpy alone beside this checkout. For each tensor-parallel
size, operation and flavour it checks every variant on fresh inputs (extreme ones, strides, an empty
batch), then times those that passed, each on the arguments it was judged on; one that fails the
check is recorded with its gate and without a time. With ``--jobs`` the checks come first, in so
many processes; compilers and oracles keep a GPU waiting, and nothing is timed meanwhile. Verdicts
that ``--verdicts`` holds already are used, not made again. Results are written after every
operation, so a run that is cut short leaves what it had, and rows that ``--out`` holds already, of
the same hardware, versions and date, are kept. Progress goes to stderr; the last line on stdout is
one JSON document.

A file named ``kernels-….json`` in ``benchmarks/results/`` is found by a checkout's notebooks; with
``--packaged`` it goes to ``workbench/kernels/recorded/`` too, which an installed wheel carries.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import workbench
from workbench import hardware
from workbench.kernels.bench import bench
from workbench.kernels.catalogue import OPS
from workbench.kernels.check import check_variants
from workbench.kernels.footprint import footprint
from workbench.kernels.ops import operation
from workbench.kernels.peaks import measured_peaks
from workbench.kernels.registry import names
from workbench.kernels.results import PACKAGED, BenchResult, BenchRow, load, without_speed
from workbench.kernels.roofline import Rates
from workbench.kernels.shapes import Shapes

RESULTS = Path(__file__).parent / "results"
CHECKED = (1, 7, 8, 64, 1024)
NOTE = "benchmarks/gpu_kernels.py: one rank, random BF16 inputs, cold L2, CUDA graphs"

# (tensor-parallel ranks, operation, flavour)
Unit = tuple[int, str, str]


def say(text: str) -> None:
    """A line on stderr, with the time since the start."""
    print(f"{time.monotonic() - STARTED:7.1f} s  {text}", file=sys.stderr, flush=True)


def sizes(tp: int) -> Shapes:
    """What one of ``tp`` ranks of Beam-501B sees."""
    return Shapes.of(workbench.resolve("beam-501b").config, tp)


def check_unit(unit: Unit, variants: list[str], tokens: list[int]) -> list[dict[str, Any]]:
    """Verdicts of the variants on one flavour of an operation, each with its unit."""
    tp, op, flavour = unit
    found = []
    for verdict in check_variants(
        op, variants, sizes(tp), tokens=tokens, dtypes=[torch.bfloat16], device="cuda",
        flavours=[flavour],
    ):  # fmt: skip
        found.append({"tp": tp, "flavour": flavour, **verdict.to_dict()})
        name = f"TP{tp} {flavour or 'plain'}: " if operation(op).flavours != ("",) else f"TP{tp} "
        say(f"{name}{verdict.sentence()} ({verdict.seconds:.1f} s)")
    torch.cuda.empty_cache()
    return found


def _worker(units: Any, found: Any, tokens: list[int]) -> None:
    """Check units until none is left; a GPU error ends the process, which would only repeat it."""
    while True:
        try:
            unit, own = units.get(timeout=1)
        except queue.Empty:
            return
        try:
            verdicts = check_unit(unit, own, tokens)
        except Exception as error:  # an oracle's too: after a GPU error nothing runs any more
            verdicts = [
                {"tp": unit[0], "op": unit[1], "flavour": unit[2], "variant": n, "gate": "",
                 "status": "crashed", "reason": f"{type(error).__name__}: {error}"[:300]}
                for n in own
            ]  # fmt: skip
        found.put(verdicts)
        if any("CUDA error" in v["reason"] or "[CUDA]" in v["reason"] for v in verdicts):
            found.close()
            found.join_thread()
            os._exit(1)


def check_in_processes(
    wanted: list[tuple[Unit, list[str]]], options: argparse.Namespace, keep: Any, until: float
) -> None:
    """Check these variants of the units; what is not done in time is left.

    The verdicts of a unit are given to ``keep`` as they come.
    """
    context = multiprocessing.get_context("spawn")
    units, found = context.Queue(), context.Queue()
    for unit in wanted:
        units.put(unit)
    workers = [
        context.Process(target=_worker, args=(units, found, options.check_tokens), daemon=True)
        for _ in range(min(options.jobs, len(wanted)))
    ]
    for worker in workers:
        worker.start()
    left = len(wanted)
    while left and time.monotonic() < until:
        alive = any(worker.is_alive() for worker in workers)
        try:
            keep(found.get(timeout=1))
            left -= 1
        except queue.Empty:
            if not alive:
                break
    for worker in workers:
        worker.terminate()
        worker.join()


def judged(rows: tuple[BenchRow, ...], verdicts: list[dict[str, Any]]) -> list[BenchRow]:
    """The rows; those of variants that the check refused lose their times."""
    refused = {
        (v["tp"], v["op"], v["flavour"], v["variant"]): v
        for v in verdicts
        if v["status"] not in ("passed", "unavailable")
    }
    found = []
    for row in rows:
        verdict = refused.get((row.tp, row.op, row.flavour, row.variant))
        if verdict is not None and row.passed:
            row = without_speed(row, verdict["status"], verdict["gate"], verdict["reason"])
        found.append(row)
    return found


def tell(row: BenchRow) -> None:
    """A row in one line."""
    what = f"TP{row.tp} {row.op:<18} {row.flavour or 'plain':<16} {row.tokens:>5} {row.variant:<8}"
    if row.microseconds is not None:
        say(
            f"{what} {row.microseconds:9.2f} us  {row.roofline_fraction:6.1%} of the limit "
            f"({row.limit}), {row.ratio_to_reference or 0:6.2f} x torch {row.reason}"
        )
    elif row.status != "unavailable":
        say(f"{what} {row.status} {row.gate}: {row.reason}")


def merged(before: BenchResult | None, now: BenchResult) -> BenchResult:
    """The rows of both, those of ``now`` where both have one.

    Raises:
        SystemExit: they are of different hardware, versions or days.
    """
    if before is None:
        return now
    for name in ("hardware", "versions", "date"):
        if getattr(before, name) != getattr(now, name):
            sys.exit(f"gpu_kernels.py: the file to add to has another {name}; give another --out")

    def key(row: BenchRow) -> tuple[object, ...]:
        return row.tp, row.op, row.flavour, row.tokens, row.variant

    newer = {key(row) for row in now.rows}
    return replace(now, rows=(*(r for r in before.rows if key(r) not in newer), *now.rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--op", nargs="+", default=list(OPS), choices=OPS, metavar="OP")
    parser.add_argument("--variant", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--tp", nargs="+", type=int, default=[8, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(CHECKED))
    parser.add_argument("--check-tokens", nargs="+", type=int, default=list(CHECKED))
    parser.add_argument("--flavour", nargs="+", default=[], metavar="F", help="only these, in turn")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=1.0, help="of rounds, a comparison")
    parser.add_argument("--budget", type=float, default=float("inf"), help="stop after so many s")
    parser.add_argument("--jobs", type=int, default=1, help="processes that check, before timing")
    parser.add_argument("--check-budget", type=float, default=float("inf"), help="s, with --jobs")
    parser.add_argument("--no-times", action="store_true", help="only check")
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels-gpu.json")
    parser.add_argument("--verdicts", type=Path, default=None, help="read and write verdicts here")
    parser.add_argument("--aside", type=Path, default=None, help="write rows here that lost times")
    parser.add_argument("--packaged", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels.py needs a CUDA GPU that torch can use", file=sys.stderr)
        return 1
    options.variant = options.variant or sorted({n for op in OPS for n in names(op)})
    verdicts: list[dict[str, Any]] = []
    if options.verdicts is not None and options.verdicts.exists():
        verdicts = json.loads(options.verdicts.read_text())

    def keep(found: list[dict[str, Any]]) -> None:
        verdicts.extend(found)
        if options.verdicts is not None:
            options.verdicts.write_text(json.dumps(verdicts, indent=1) + "\n")

    def unchecked(unit: Unit) -> list[str]:
        known = {v["variant"] for v in verdicts if (v["tp"], v["op"], v["flavour"]) == unit}
        return [n for n in names(unit[1]) if n in options.variant and n not in known]

    # The heaviest last: a run that is cut short has the most operations.
    ops = sorted(options.op, key=lambda op: _weight(op))
    units = [(tp, op, f) for op in ops for tp in options.tp for f in operation(op).flavours]
    if options.jobs > 1:
        wanted = [(unit, left) for unit in reversed(units) if (left := unchecked(unit))]
        check_in_processes(wanted, options, keep, STARTED + options.check_budget)
        say(f"checked, of {len(wanted)} units: {sum(not unchecked(unit) for unit, _ in wanted)}")
    before = load(options.out) if options.out.exists() else None
    peaks = Rates(**dict(before.peaks)) if before is not None else measured_peaks("cuda")
    say(f"peaks: {peaks.notes}, {dict(peaks.flops)}")
    hardware.machine = cache(hardware.machine)  # it asks nvidia-smi, which takes its time
    whole, skipped, aside, made = before, [], [], 0
    if options.flavour:
        units = [unit for f in options.flavour for unit in units if unit[2] == f]
    for unit in units:
        if time.monotonic() - STARTED > options.budget:
            skipped.append(" ".join(map(str, unit)))
            continue
        if left := unchecked(unit):
            keep(check_unit(unit, left, options.check_tokens))
        if options.no_times:
            continue
        tp, op, flavour = unit
        of_unit = [v for v in verdicts if (v["tp"], v["op"], v["flavour"]) == unit]
        crashed = {v["variant"] for v in of_unit if v["status"] == "crashed"}
        sound = [n for n in names(op) if n in options.variant and n not in crashed]
        if not sound:
            continue
        result = bench(
            [op],
            sizes(tp),
            variants=sound,
            tokens=options.tokens,
            flavours=[flavour],
            device="cuda",
            model="beam-501b",
            rounds=options.rounds,
            seconds=options.seconds,
            peaks=peaks,
            note=NOTE,
        )
        rows = judged(result.rows, verdicts)
        aside += [a.to_dict() for a, b in zip(result.rows, rows, strict=True) if a.timed > b.timed]
        if options.aside is not None:
            options.aside.write_text(json.dumps(aside, indent=1) + "\n")
        for row in rows:
            tell(row)
        made += len(rows)
        whole = merged(whole, replace(result, rows=tuple(rows)))
        whole.write(options.out)
        if options.packaged:
            PACKAGED.mkdir(exist_ok=True)
            whole.write(PACKAGED / options.out.name)
        torch.cuda.empty_cache()
        if result.interrupted:
            say("interrupted; what was measured is kept")
            return 130
    every = whole.rows if whole else ()
    bad = sorted({f"{r.variant} of {r.op}: {r.status} {r.gate}" for r in every
                  if r.status not in ("passed", "unavailable")})  # fmt: skip
    bad += sorted({f"check of {v['variant']} of {v['op']} {v['flavour']}: {v['status']} {v['gate']}"
                   for v in verdicts if v["status"] not in ("passed", "unavailable")})  # fmt: skip
    summary = {
        "rows": len(every),
        "of this run": made,
        "timed": sum(r.timed for r in every),
        "not right": bad,
        "not run for lack of time": skipped,
        "seconds": round(time.monotonic() - STARTED, 1),
        "out": str(options.out),
    }
    print(json.dumps(summary))
    return 1 if bad else 0


def _weight(op: str) -> int:
    from workbench.kernels.case import Request

    shapes = sizes(8)
    flavours = operation(op).flavours
    return sum(footprint(op, Request(shapes=shapes, tokens=64, flavour=f)).held for f in flavours)


STARTED = time.monotonic()

if __name__ == "__main__":
    sys.exit(main())
