"""Adaptive against fixed verification on a CPU, in turns, sequences decoded together. Writes JSON.

    PYTHONPATH=. python benchmarks/adaptive_cpu.py --concurrency 128 --temperature 1 --out one.json
    PYTHONPATH=. python benchmarks/adaptive_cpu.py --merge one.json two.json --out all.json

Fixed verification is decoding without any policy or estimator. The cost table is measured first;
adaptive verification is frugal, as on the command line; the
estimator learns through all pairs, beginning with one that is not counted. Both runs of a pair
have the same prompts, each new ones, held out from training: code, prose, or both in turns.
Tokens/s are of the decode steps in which every place is taken, TPOT is of all requests. The first
pairs are also simulated, from a record of the blocks at every position of their texts (above
temperature 0 of other texts with the same prompts) and, since a machine's speed drifts, with a cost
table that is the mean of one measured before and one after the pair. Needs a quiet machine;
`taskset` gives it two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import torch

import workbench
from workbench.files import write_whole
from workbench.hardware import cpu_name
from workbench.model.beam import Beam
from workbench.model.sampling import Sampling
from workbench.spec.acceptance import Estimator
from workbench.spec.adaptive import Adaptive, Fixed, Policy
from workbench.spec.cost_table import CostTable
from workbench.spec.decode import decode
from workbench.spec.drafter import Drafter
from workbench.spec.every_position import record_every_position
from workbench.spec.profile import profile
from workbench.spec.recording import Recording
from workbench.spec.replay import replay
from workbench.spec.simulation_result import SimulationResult
from workbench.spec.trace import Trace

SCHEMA = "workbench-adaptive-cpu/1"
DATA = Path(__file__).parents[1] / "tests" / "data"
NAMES = ("fixed", "adaptive")


def texts(mix: str) -> list[str]:
    """Held-out prompts of a mix."""
    code, prose = (
        json.loads((DATA / f"heldout_{kind}.json").read_text("utf-8"))["prompts"]
        for kind in ("code", "prose")
    )
    mixed = [text for both in zip(code, prose, strict=True) for text in both]
    return {"code": code, "prose": prose, "mixed": mixed}[mix]


def decoded(
    beam: Beam,
    drafter: Drafter,
    prompts: list[str],
    policy: Policy | None,
    estimator: Estimator,
    sampling: Sampling,
    given: argparse.Namespace,
) -> dict[str, Any]:
    """One run's figures."""
    deciding = {} if policy is None else {"policy": policy, "estimator": estimator}
    run = decode(
        beam, drafter, prompts, max_new_tokens=given.new_tokens, slots=given.concurrency,
        sampling=sampling, seeds=[sampling.seed + i for i in range(len(prompts))], **deciding,
    )  # fmt: skip
    full = [s for s in run if s.phase == "decode" and len(s.requests) == given.concurrency]
    parts = [r for step in full for r in step.requests]
    seconds = sum(step.seconds for step in full)
    return {
        "tokens_per_second": sum(step.tokens for step in full) / seconds,
        "admitted": statistics.fmean(r.admitted for r in parts),
        "accepted": statistics.fmean(r.accepted for r in parts),
        "decide_share": sum(step.decide_seconds for step in full) / seconds,
        "tpot": [g.seconds / g.timed_tokens for g in run.generations.values() if g.timed_tokens],
    }


def recorded(
    beam: Beam,
    drafter: Drafter,
    prompts: list[str],
    sampling: Sampling,
    given: argparse.Namespace,
) -> Recording:
    """What the simulator is driven by."""
    positions = record_every_position(
        beam, drafter, prompts, max_new_tokens=given.new_tokens, sampling=sampling
    )
    header = {
        "mode": "every-position", "model": beam.name, "drafter": drafter.name,
        "sampling": {"temperature": sampling.temperature}, "max_new_tokens": given.new_tokens,
    }  # fmt: skip
    return Recording.of(Trace(header=header, positions=tuple(positions)))


def figures(result: SimulationResult, concurrency: int) -> dict[str, Any]:
    """A simulation's, of the steps that are counted when measured."""
    full = result.history.requests == concurrency
    ms = result.history.ms[full].sum()
    return {
        "tokens_per_second": float(1e3 * result.history.tokens[full].sum() / ms),
        "tpot": (1e-3 * result.tpot_ms).tolist(),
    }


def mean_of(a: CostTable, b: CostTable) -> CostTable:
    """Two tables of the same sizes."""
    curves = [
        tuple((size, (x + y) / 2) for (size, x), (_, y) in zip(one, other, strict=True))
        for one, other in ((a.draft, b.draft), (a.verify, b.verify))
    ]
    return CostTable(draft=curves[0], verify=curves[1], captured=a.captured, label=a.label)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Of the median, at least 95 %, by order statistics: no assumption about how values spread."""
    n, ordered = len(values), sorted(values)
    for k in range((n - 1) // 2, -1, -1):  # the narrowest that holds the median often enough
        outside = 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n
        if outside <= 0.05:
            return ordered[k], ordered[n - 1 - k]
    return None


def percentile_ms(seconds: Sequence[float], percent: float) -> float:
    """Of requests' times."""
    return float(1e3 * np.percentile(np.array(seconds), percent))


def summary(
    pairs: list[dict[str, Any]], table: CostTable, count: int, given: argparse.Namespace
) -> dict[str, Any]:
    """What the pairs come to."""
    ratios = [p["adaptive"]["tokens_per_second"] / p["fixed"]["tokens_per_second"] for p in pairs]
    sure = interval(ratios)
    simulated = [p for p in pairs if "simulated" in p]
    found: dict[str, Any] = {
        "concurrency": given.concurrency, "temperature": given.temperature, "mix": given.mix,
        "pairs": len(pairs), "requests": len(pairs) * count, "new_tokens": given.new_tokens,
        "ratio": statistics.median(ratios),
        "low": sure[0] if sure else None, "high": sure[1] if sure else None,
        "ratios": [round(r, 4) for r in ratios],
    }  # fmt: skip
    for name in NAMES:
        tpot = [t for p in pairs for t in p[name]["tpot"]]
        found[name] = {
            key: statistics.median(p[name][key] for p in pairs)
            for key in ("tokens_per_second", "admitted", "accepted", "decide_share")
        } | {"tpot_p50_ms": percentile_ms(tpot, 50), "tpot_p99_ms": percentile_ms(tpot, 99)}
    found["p99_ratio"] = found["adaptive"]["tpot_p99_ms"] / found["fixed"]["tpot_p99_ms"]
    if simulated:
        found["simulated"] = {"pairs": len(simulated)} | {
            name: {
                "tokens_per_second_of_measured": statistics.median(
                    p["simulated"][name]["tokens_per_second"] / p[name]["tokens_per_second"]
                    for p in simulated
                ),
                "tpot_p99_of_measured": percentile_ms(
                    [t for p in simulated for t in p["simulated"][name]["tpot"]], 99
                )
                / percentile_ms([t for p in simulated for t in p[name]["tpot"]], 99),
            }
            for name in NAMES
        }
    found["cost_table"] = table.to_dict()
    return found


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """All pairs, or as many as the time allows."""
    began = time.monotonic()
    everything = texts(given.mix)
    count = given.requests or max(34, 3 * given.concurrency // 2)
    beam = workbench.load("beam-tiny")
    drafter = workbench.load_drafter(beam)
    sampling = Sampling(temperature=given.temperature)
    settings: dict[str, Any] = {
        "requests": given.concurrency, "context": 160, "sampling": sampling, "keep": False,
    }  # fmt: skip
    table = profile(beam, drafter, **settings, rounds=7)
    policies: dict[str, Policy | None] = {"fixed": None, "adaptive": Adaptive(table, frugal=True)}
    estimator = Estimator(drafter.block - 1)
    pairs: list[dict[str, Any]] = []
    for number in range(-1, given.pairs):
        if pairs and time.monotonic() - began > given.seconds:
            break
        first = 37 * (number + 1) % len(everything)
        prompts = [*everything[first:], *everything[:first]][:count]
        sampling = Sampling(temperature=given.temperature, seed=1000 * (number + 1))
        state = estimator.state()
        order = list(policies) if number % 2 else list(policies)[::-1]
        simulated = 0 <= number < given.simulated
        before = profile(beam, drafter, **settings, rounds=3) if simulated else table
        pair: dict[str, Any] = {
            name: decoded(beam, drafter, prompts, policies[name], estimator, sampling, given)
            for name in order
        }
        if number < 0:
            continue
        if simulated:
            costs = mean_of(before, profile(beam, drafter, **settings, rounds=3))
            recording = recorded(beam, drafter, prompts, sampling, given)
            pair["simulated"] = {
                name: figures(
                    replay(
                        recording, policies[name] or Fixed(), costs,
                        concurrency=given.concurrency, estimator=Estimator.from_state(state),
                    ),
                    given.concurrency,
                )
                for name in NAMES
            }  # fmt: skip
        pairs.append(pair)
        ratio = pair["adaptive"]["tokens_per_second"] / pair["fixed"]["tokens_per_second"]
        print(
            f"{given.concurrency} sequences, temperature {given.temperature:g}, {given.mix}, pair "
            f"{number}: adaptive over fixed {ratio:.3f}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        if given.out is not None:  # whatever comes, the pairs so far are kept
            write(given.out, [summary(pairs, table, count, given)])
    return summary(pairs, table, count, given)


def write(out: Path, runs: list[dict[str, Any]], how: str | None = None) -> None:
    """Runs as one document."""
    said = how or (
        f"measured: {cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{date.today().isoformat()}"
    )
    document = {"schema": SCHEMA, "how": said, "runs": runs}
    write_whole(out, (json.dumps(document, indent=1) + "\n").encode())


def main() -> None:
    """Parse the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--mix", choices=("mixed", "code", "prose"), default="mixed")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--simulated", type=int, default=3, help="pairs that are simulated as well")
    parser.add_argument("--requests", type=int, help="of a run (default: 1.5 a place, at least 34)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1e9, help="no pair begins later")
    parser.add_argument("--merge", type=Path, nargs="+", help="documents to put together")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.merge:
        documents = [json.loads(path.read_text("utf-8")) for path in given.merge]
        runs = [run for document in documents for run in document["runs"]]
        runs.sort(key=lambda run: (run["concurrency"], run["temperature"], run["mix"]))
        write(given.out, runs, documents[0]["how"])
        return
    found = measured(given)
    if given.out is not None:
        write(given.out, [found])
    print(json.dumps({k: v for k, v in found.items() if k != "cost_table"}, indent=1))


if __name__ == "__main__":
    main()
