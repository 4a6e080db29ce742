"""memcheck and racecheck of the persistent kernel and of a ring with the same waits. Writes JSON.

    PYTHONPATH=. python3 benchmarks/rank_sanitize.py --out sanitize.json

Whether the ring's waits are enough, ``workbench/kernels/rank/cuda/ring_check.cu`` shows: the same
ring in 20 lines, its textbook part alone, that part through CUDA's own C++ interface, and a ring
with a real race, which the tool must find for its silence about the others to mean something.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from workbench.kernels.rank import RankState, RankWeights
from workbench.kernels.rank.cuda_build import SOURCES, find_nvcc
from workbench.kernels.rank.persistent import PersistentStep, architecture_of
from workbench.model.presets import resolve

MODES = {
    0: "the step's ring",
    1: "each slot once: one bulk copy, one mbarrier wait a thread",
    2: "each slot once, through cuda::barrier and memcpy_async_tx",
    3: "each slot once, no wait: a real race",
    4: "the step's ring, two groups waited for, one freed",
    5: "the step's own producer and product, one block",
    6: "the step's own producer and product, a block on every SM",
    7: "the step's ring, a block on every SM",
    8: "the step's own producer and product, with barriers of the consumers between",
}


def child(layers: int, context: int) -> None:
    """A few layers under the tool, with patience for its slowness."""
    weights = RankWeights.random(resolve("beam-501b").config, 8, layers=layers)
    state = RankState(weights, context)
    step = PersistentStep(weights, state, patience=400)
    step()
    step.check()
    print("finite", bool(torch.isfinite(state.logits).all()), "position", int(state.position))


def under(tool: str, command: list[str], seconds: int, *options: str) -> dict[str, Any]:
    """What compute-sanitizer's ``tool`` says about a command."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    started = time.perf_counter()
    full = [sanitizer, "--tool", tool, "--print-limit", "40", *options, *command]
    try:
        done = subprocess.run(full, capture_output=True, text=True, timeout=seconds, check=False)
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        text, code = (error.stdout or b"").decode(errors="replace"), "timeout"
    kinds = sorted(set(re.findall(r"(?:Potential )?(?:WAW|WAR|RAW) hazard", text)))
    between = sorted(set(re.findall(r"(?:Read|Write) Thread.*? at ([^\n(]+\([^)]*\))", text)))
    summary = [line.strip("= ") for line in text.splitlines() if "SUMMARY" in line]
    return {
        "seconds": round(time.perf_counter() - started, 1), "exit": code,
        "summary": summary[:2], "kinds": kinds, "between": between[:12],
        "said": [line for line in text.splitlines() if not line.startswith("=====")][-2:],
        "first": text[:1500] if summary and not kinds else text[:600],
    }  # fmt: skip


def main() -> None:
    """Parse the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--contexts", type=int, nargs="+", default=[700, 6000])
    parser.add_argument("--seconds", type=int, default=60, help="a run of the tool may take")
    parser.add_argument("--out")
    a = parser.parse_args()
    if a.child:
        child(a.layers[0], a.contexts[0])
        return
    target = architecture_of(torch.device("cuda"))
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "ring": {}, "step": {}}
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "ring_check")
        gencode = f"-gencode=arch=compute_{target[3:]},code={target}"
        source = str(SOURCES / "ring_check.cu")
        subprocess.run(
            [find_nvcc(), gencode, "-O3", "-std=c++17", "-lineinfo", source, "-o", program],
            check=True,
        )
        for mode, what in MODES.items():
            result = under("racecheck", [program, str(mode)], 30)
            found["ring"][what] = result
            print(what, result["summary"], result["kinds"], result["said"], flush=True)
    for tool, layers, context in product(("memcheck", "racecheck"), a.layers, a.contexts):
        command = [sys.executable, __file__, "--child", "--layers", str(layers)]
        command += ["--contexts", str(context)]
        result = under(tool, command, a.seconds, "--kernel-name", "kns=rank_step")
        found["step"][f"{tool}, {layers} layers, context {context}"] = result
        print(tool, layers, context, result["summary"], result["kinds"], flush=True)
    if a.out:
        Path(a.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
