"""The recorded compilation: every Triton kernel of the workbench as Hopper and Blackwell get it.

    .venv/bin/python benchmarks/compile_kernels.py [--op boundary ...] [--tp 8 4]
        [--tokens 1 8 1024] [--dtype bfloat16 ...] [--out workbench/kernels/recorded/...json]

Needs Triton and no GPU: what a variant would launch at Beam-501B's shapes is compiled for sm_90 and
sm_100 instead, and registers, shared memory and spills are read off the binary. Some minutes on
two cores where Triton's cache on disk is empty. Blackwell has never run these kernels: the file
says what compiles for it and what it takes there, not that it is right or fast.

Rows that agree in everything but the tokens and TP sizes they were met at are one row, which lists
those. Exit code 1 if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import workbench
from workbench.files import write_whole
from workbench.kernels.catalogue import OPS
from workbench.kernels.ops import DTYPES
from workbench.kernels.results import PACKAGED
from workbench.kernels.shapes import Shapes
from workbench.kernels.targets import jobs
from workbench.kernels.triton_compile import TARGETS, Compiled, Job, compile_in_child

NOTE = (
    "compiled without a GPU; registers, shared memory and local memory (spills) are read off the "
    "binaries; the sm_100 binaries have never run on a Blackwell GPU"
)


def wanted(options: argparse.Namespace) -> dict[str, tuple[Job, dict[str, Any]]]:
    """Jobs by name, each with the operation, TP, tokens and dtype that its rows are of."""
    config = workbench.resolve("beam-501b").config
    found = {}
    for op in options.op:
        for tp in options.tp:
            for dtype in options.dtype:
                for tokens in options.tokens:
                    (job,) = jobs(Shapes.of(config, tp), ops=[op], tokens=[tokens], dtype=dtype)
                    name = f"{op} TP{tp} {tokens} {dtype}"
                    at = {"op": op, "tp": tp, "tokens": tokens, "dtype": dtype}
                    found[name] = replace(job, name=name), at
    return found


def merged(
    results: list[Compiled], of: dict[str, tuple[Job, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """One row for each operation, kernel, target, dtype and set of figures."""
    rows: dict[str, dict[str, Any]] = {}
    for result in results:
        at = of[result.job][1]
        row = {
            "op": at["op"],
            "kernel": result.kernel,
            "target": result.target,
            "dtype": at["dtype"],
            "registers": result.registers,
            "shared_bytes": result.shared_bytes,
            "spill_bytes": result.spill_bytes,
            "warps": result.num_warps,
            "stages": result.num_stages,
            "features": list(result.features),
        }
        if result.error:
            row["error"] = result.error
        kept = rows.setdefault(json.dumps(row), row | {"at": {}})
        met = kept["at"].setdefault(f"TP{at['tp']}", [])
        if at["tokens"] not in met:
            met.append(at["tokens"])
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--op", nargs="+", default=list(OPS), choices=OPS, metavar="OP")
    parser.add_argument("--tp", nargs="+", type=int, default=[8, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 1024])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=list(DTYPES))
    parser.add_argument("--seconds", type=float, default=7200.0, help="give up after so many")
    parser.add_argument("--out", type=Path, default=PACKAGED / "compiled-sm90-sm100.json")
    options = parser.parse_args()
    started = time.monotonic()
    of = wanted(options)

    def tell(result: Compiled) -> None:
        at = f"{time.monotonic() - started:7.1f} s  {result.job} {result.kernel} {result.target}"
        figures = f"{result.registers} registers, {result.spill_bytes} bytes spilled"
        print(f"{at}: {result.error or figures}", file=sys.stderr, flush=True)

    results = compile_in_child([job for job, _ in of.values()], options.seconds, on_result=tell)
    rows = merged(results, of)
    document = {
        "format": "workbench compiled kernels",
        "version": 1,
        "date": datetime.now(UTC).date().isoformat(),
        "note": NOTE,
        "model": "beam-501b",
        "targets": [f"sm_{target}" for target in TARGETS],
        "tp": options.tp,
        "tokens": options.tokens,
        "versions": {
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "workbench": workbench.__version__,
        },
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = json.dumps(document | {"rows": []}, indent=1).removesuffix("[]\n}")
    write_whole(options.out, f"{head}[\n{lines}\n ]\n}}\n".encode())
    bad = [row for row in rows if "error" in row]
    print(f"{len(rows)} rows, {len(bad)} of them errors: {options.out}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
