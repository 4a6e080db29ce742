"""The recorded run: every variant of every operation at Beam-501B's shapes, checked and timed.

    PYTHONPATH=. python3 benchmarks/gpu_kernels.py [--op boundary ...] [--tp 8 4]
        [--tokens 1 7 8 64 1024] [--variant torch triton ...] [--seconds 1.0] [--budget 540]
        [--out benchmarks/results/kernels-h200.json]

Needs a CUDA GPU, and torch, triton, numpy alone beside this checkout. For each tensor-parallel
size and operation it checks every variant on fresh inputs (flavours, strides, an empty batch), then
times those that passed, each on the arguments it was judged on; one that fails the check is
recorded with its gate and without a time. Results are written after every operation, so a run that
is cut short leaves what it had. Progress goes to stderr; the last line on stdout is one JSON
document.

A file named ``kernels-….json`` in ``benchmarks/results/`` is found by a checkout's notebooks; with
``--packaged`` it goes to ``workbench/kernels/recorded/`` too, which an installed wheel carries.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import workbench
from workbench.kernels.bench import bench
from workbench.kernels.catalogue import OPS
from workbench.kernels.check import check_variants
from workbench.kernels.footprint import footprint
from workbench.kernels.ops import operation
from workbench.kernels.peaks import measured_peaks
from workbench.kernels.registry import names
from workbench.kernels.results import PACKAGED, BenchResult, BenchRow, without_speed
from workbench.kernels.shapes import Shapes

RESULTS = Path(__file__).parent / "results"


def say(text: str) -> None:
    """A line on stderr, with the time since the start."""
    print(f"{time.monotonic() - STARTED:7.1f} s  {text}", file=sys.stderr, flush=True)


def one_operation(
    op: str, shapes: Shapes, options: argparse.Namespace, peaks: object
) -> tuple[BenchResult, list[dict[str, object]]]:
    """Check, then time; rows of variants that the check refused lose their times."""
    wanted = [n for n in names(op) if not options.variant or n in options.variant]
    verdicts = []
    for verdict in check_variants(
        op, wanted, shapes, tokens=options.check_tokens, dtypes=[torch.bfloat16], device="cuda"
    ):
        say(f"TP{shapes.tp} {verdict.sentence()} ({verdict.seconds:.1f} s)")
        verdicts.append(verdict)
    refused = {v.variant: v for v in verdicts if v.status not in ("passed", "unavailable")}
    result = bench(
        [op],
        shapes,
        variants=wanted,
        tokens=options.tokens,
        device="cuda",
        model="beam-501b",
        rounds=options.rounds,
        seconds=options.seconds,
        peaks=peaks,  # type: ignore[arg-type]
    )
    rows: list[BenchRow] = []
    for row in result.rows:
        verdict = refused.get(row.variant)
        if verdict is not None and row.passed:
            row = without_speed(row, verdict.status, verdict.gate, verdict.reason)
        rows.append(row)
        if row.microseconds is not None:
            say(
                f"TP{row.tp} {row.op:<20} {row.flavour or 'plain':<15} {row.tokens:>5} "
                f"{row.variant:<10} {row.microseconds:9.2f} us  {row.roofline_fraction:6.1%} of "
                f"the limit ({row.limit}), {row.ratio_to_reference or 0:6.2f} x torch "
                f"{row.reason}"
            )
        elif row.status != "unavailable":
            say(f"TP{row.tp} {row.op} {row.flavour} {row.tokens} {row.variant}: {row.status} "
                f"{row.gate}: {row.reason}")  # fmt: skip
    found = [{**v.to_dict(), "tp": shapes.tp} for v in verdicts]
    return replace(result, rows=tuple(rows)), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--op", nargs="+", default=list(OPS), choices=OPS, metavar="OP")
    parser.add_argument("--variant", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--tp", nargs="+", type=int, default=[8, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 7, 8, 64, 1024])
    parser.add_argument("--check-tokens", nargs="+", type=int, default=[1, 7, 8, 64, 1024])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=1.0, help="of rounds, a comparison")
    parser.add_argument("--budget", type=float, default=float("inf"), help="stop after so many s")
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels-gpu.json")
    parser.add_argument("--verdicts", type=Path, default=None, help="also write the verdicts here")
    parser.add_argument("--packaged", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels.py needs a CUDA GPU that torch can use", file=sys.stderr)
        return 1
    config = workbench.resolve("beam-501b").config
    peaks = measured_peaks("cuda")
    say(f"peaks: {peaks.notes}, {dict(peaks.flops)}")
    whole: BenchResult | None = None
    verdicts: list[dict[str, object]] = []
    skipped = []
    # The heaviest last: a run that is cut short has the most operations.
    ops = sorted(options.op, key=lambda op: _weight(op, config))
    for op in ops:
        for tp in options.tp:
            if time.monotonic() - STARTED > options.budget:
                skipped.append(f"{op} TP{tp}")
                continue
            result, found = one_operation(op, Shapes.of(config, tp), options, peaks)
            verdicts += found
            note = "benchmarks/gpu_kernels.py: one rank, random BF16 inputs, cold L2, CUDA graphs"
            rows = (*(whole.rows if whole else ()), *result.rows)
            whole = replace(result, rows=rows, note=note)
            whole.write(options.out)
            if options.packaged:
                PACKAGED.mkdir(exist_ok=True)
                whole.write(PACKAGED / options.out.name)
            if options.verdicts is not None:
                options.verdicts.write_text(json.dumps(verdicts, indent=1) + "\n")
            torch.cuda.empty_cache()
            if result.interrupted:
                say("interrupted; what was measured is kept")
                return 130
    rows = whole.rows if whole else ()
    bad = sorted({f"{r.variant} of {r.op}: {r.status} {r.gate}" for r in rows
                  if r.status not in ("passed", "unavailable")})  # fmt: skip
    summary = {
        "rows": len(rows),
        "timed": sum(r.timed for r in rows),
        "not right": bad,
        "not run for lack of time": skipped,
        "seconds": round(time.monotonic() - STARTED, 1),
        "out": str(options.out),
    }
    print(json.dumps(summary))
    return 1 if bad else 0


def _weight(op: str, config: object) -> int:
    from workbench.kernels.case import Request

    shapes = Shapes.of(config, 8)  # type: ignore[arg-type]
    flavours = operation(op).flavours
    return sum(footprint(op, Request(shapes=shapes, tokens=64, flavour=f)).held for f in flavours)


STARTED = time.monotonic()

if __name__ == "__main__":
    sys.exit(main())
