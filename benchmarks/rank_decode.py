"""The recorded decode step of one rank: waterfall, per-kernel times, and a sweep of launch sizes.

    PYTHONPATH=. python3 benchmarks/rank_decode.py --out result.json [--layers N] [--context N]
        [--variants naive,fused,fused_pdl] [--sweep seconds] [--sweep-out sweep.json]
        [--contexts 1024,32768] [--no-leave-one-out] [--experts fp8]

Needs a GPU; ``workbench bench decode`` is the same measurement without the sweep and the further
contexts. The sweep comes first: it changes one launch size of the fused chain at a time, takes
together what gained, and the waterfall is then measured with that. Every replay is checked against
the FP64 reference before it is timed. With ``--experts fp8`` the sweep is of these experts' sizes.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from workbench.cli_bench_decode import page
from workbench.files import write_whole
from workbench.kernels.peaks import measured_peaks
from workbench.kernels.rank.fused import FusedStep
from workbench.kernels.rank.fused_config import FusedConfig
from workbench.kernels.rank.graph import Replay, capture, time_replays
from workbench.kernels.rank.reference import check_step
from workbench.kernels.rank.stages import make
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.waterfall import described, measure
from workbench.kernels.rank.weights import EXPERT_FORMATS, RankWeights
from workbench.model.presets import resolve

GAIN = 0.998  # a size is taken over when the step takes less than this of the usual one's time

CHOICES: dict[str, list[Any]] = {
    "ahead": ["off", "late"],
    "norm_in_router": [False],
    "norm_in_qkvg": [True],
    "o_proj": [(16, 4), (16, 8), (64, 8)],
    "gate_up": [(1, 4), (2, 4), (1, 1)],
    "down": [(2, 2), (8, 8), (2, 4)],
    "attend_warps": [2, 8],
    "router": [(2, 4), (1, 8)],
    "qkvg": [(4, 8), (1, 2)],
    "sliding_splits": [4],
    "full_splits": [64],
    "dense_up": [(1, 2)],
}
FP8_CHOICES: dict[str, list[Any]] = {
    "fp8_up": [(1, 2), (2, 2), (2, 4), (1, 4), (4, 4)],
    "fp8_down": [(4, 4), (2, 1), (2, 2), (8, 4), (8, 8)],
}


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def sweep(
    weights: RankWeights, state: RankState, seconds: float, rounds: int
) -> tuple[FusedConfig, dict[str, Any]]:
    """Milliseconds of the fused chain with one launch size changed at a time, then together."""
    base, started = FusedConfig(), time.monotonic()
    rows: list[dict[str, Any]] = []
    best: dict[str, tuple[float, Any]] = {}

    def taken(config: FusedConfig) -> tuple[float, float]:
        usual = capture(FusedStep(weights, state, config=base), state)
        other = capture(FusedStep(weights, state, config=config), state)
        times = time_replays({"usual": usual, "other": other}, state, rounds)
        return times["other"].median * 1e3, times["usual"].median * 1e3

    choices = FP8_CHOICES if weights.experts == "fp8" else CHOICES
    for name, values in choices.items():
        for value in values:
            if time.monotonic() - started > seconds:
                break
            spent, usual = taken(replace(base, **{name: value}))
            ratio = spent / usual
            rows.append({"size": name, "value": value, "milliseconds": spent, "usual": usual})
            say(f"{name} {value}: {spent:.4f} ms, usual {usual:.4f}")
            if ratio < GAIN and ratio < best.get(name, (1.0, None))[0]:
                best[name] = (ratio, value)
    together = {name: value for name, (_, value) in best.items()}
    spent, usual = taken(replace(base, **together))
    say(f"together {together}: {spent:.4f} ms, usual {usual:.4f}")
    result = {"rows": rows, "together": together, "milliseconds": spent, "usual": usual}
    return (replace(base, **together) if spent < usual else base), result


def at_context(
    weights: RankWeights, context: int, names: list[str], rounds: int, bandwidth: float
) -> dict[str, Any]:
    """Milliseconds and floor of some variants at another context."""
    state = RankState(weights, context)
    cache = weights.cache_bytes(context)
    row: dict[str, Any] = {
        "context": context,
        "cache_bytes": cache,
        "floor_milliseconds": (weights.step_bytes() + cache) / bandwidth * 1e3,
        "variants": {},
    }
    replays: dict[str, Replay] = {}
    for name in names:
        replays[name] = capture(make(name, weights, state), state)
        check = check_step(replays[name].step, weights, state, replays[name])
        row["variants"][name] = {"check": check.to_dict(), "failures": check.failures(2e-2)}
    for name, times in time_replays(replays, state, rounds).items():
        row["variants"][name] |= {
            "milliseconds": times.median * 1e3,
            "low": times.low * 1e3,
            "high": times.high * 1e3,
        }
        say(f"context {context}: {name} {times.median * 1e3:.4f} ms")
    return row


def main() -> int:
    """Measure, write, and exit with 1 where a variant is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="beam-501b")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--variants")
    parser.add_argument("--contexts", default="")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sweep", type=float, default=0.0)
    parser.add_argument("--experts", choices=EXPERT_FORMATS, default="same")
    parser.add_argument("--no-leave-one-out", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep-out", type=Path)
    given = parser.parse_args()
    started = time.monotonic()
    rates = measured_peaks("cuda")
    torch.cuda.empty_cache()
    say(f"{time.monotonic() - started:.1f} s: {rates.bandwidth / 1e12:.3f} TB/s")
    of = resolve(given.model).config
    with torch.inference_mode():
        weights = RankWeights.random(of, given.tp, layers=given.layers, experts=given.experts)
        state = RankState(weights, given.context)
        torch.cuda.synchronize()
        say(f"{time.monotonic() - started:.1f} s: {weights.bytes / 2**30:.2f} GiB of weights")
        config = FusedConfig()
        if given.sweep:
            config, result = sweep(weights, state, given.sweep, 12)
            write_whole(given.sweep_out or given.out.with_suffix(".sweep.json"), json_text(result))
        found = measure(
            weights,
            state,
            variants=given.variants.split(",") if given.variants else None,
            rounds=given.rounds,
            leave_one_out=not given.no_leave_one_out,
            rates=rates,
            config=config,
            model=given.model,
            progress=lambda _done, _of, label: say(f"{time.monotonic() - started:.1f} s: {label}"),
        )
        document = described(found, rates) | {"fused_config": asdict(config)}
        write_whole(given.out, json_text(document))
        page(document, Console(stderr=True, width=160))
        say(f"experts {document['experts']}")
        names = [n for n in ("fused_pdl", "persistent") if n in document["variants"]]
        for context in (int(part) for part in given.contexts.split(",") if part):
            row = at_context(weights, context, names, given.rounds, rates.bandwidth)
            document.setdefault("contexts", []).append(row)
            write_whole(given.out, json_text(document))
    say(f"{time.monotonic() - started:.1f} s: done")
    return 1 if found.failed else 0


def json_text(document: dict[str, Any]) -> bytes:
    """Indented JSON with a line end, UTF-8."""
    import json

    return (json.dumps(document, indent=1) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main())
