"""Adaptive against fixed verification on a CPU, in turns, sequences decoded together. Writes JSON.

    PYTHONPATH=. python benchmarks/adaptive_cpu.py --concurrency 128 --pairs 2 --temperature 1

The cost table is measured first; each policy keeps an estimator of its own, which learns in a pair
that is not counted. Tokens/s are of the decode steps in which every place is taken, TPOT is of all
requests of both ends. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import torch

import workbench
from workbench.files import write_whole
from workbench.hardware import cpu_name
from workbench.model.beam import Beam
from workbench.model.sampling import Sampling
from workbench.spec.acceptance import Estimator
from workbench.spec.adaptive import Adaptive, Fixed, Policy
from workbench.spec.decode import decode
from workbench.spec.drafter import Drafter
from workbench.spec.profile import profile

PROMPTS = Path(__file__).parents[1] / "tests" / "data" / "heldout_code.json"


def decoded(
    beam: Beam,
    drafter: Drafter,
    prompts: list[str],
    policy: Policy,
    estimator: Estimator,
    sampling: Sampling,
    given: argparse.Namespace,
) -> dict[str, Any]:
    """One run's figures."""
    run = decode(
        beam, drafter, prompts, max_new_tokens=given.new_tokens, slots=given.concurrency,
        policy=policy, estimator=estimator, sampling=sampling,
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


def main() -> None:
    """Parse the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--requests", type=int, help="of a run (default: 2 a place, at most 200)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    texts = json.loads(PROMPTS.read_text("utf-8"))["prompts"]
    count = min(given.requests or 2 * given.concurrency, len(texts))
    beam = workbench.load("beam-tiny")
    drafter = workbench.load_drafter(beam)
    table = profile(beam, drafter, requests=given.concurrency, context=200, rounds=7, keep=False)
    policies: dict[str, Policy] = {"fixed": Fixed(), "adaptive": Adaptive(table)}
    learned = {name: Estimator(drafter.block - 1) for name in policies}
    pairs: list[dict[str, dict[str, Any]]] = []
    for number in range(-1, given.pairs):
        first = 7 * number % len(texts)
        prompts = [*texts[first:], *texts[:first]][:count]
        sampling = Sampling(temperature=given.temperature, seed=number + 1)
        order = list(policies) if number % 2 else list(policies)[::-1]
        pair = {
            name: decoded(beam, drafter, prompts, policies[name], learned[name], sampling, given)
            for name in order
        }
        if number >= 0:
            pairs.append(pair)
            ratio = pair["adaptive"]["tokens_per_second"] / pair["fixed"]["tokens_per_second"]
            print(f"pair {number}: adaptive over fixed {ratio:.3f}", flush=True)
    ratios = [p["adaptive"]["tokens_per_second"] / p["fixed"]["tokens_per_second"] for p in pairs]
    found: dict[str, Any] = {
        "how": f"measured: {cpu_name()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, {date.today().isoformat()}",
        "concurrency": given.concurrency, "temperature": given.temperature, "requests": count,
        "ratio": statistics.median(ratios), "ratios": ratios, "cost_table": table.to_dict(),
    }  # fmt: skip
    for name in policies:
        tpot = sorted(t for p in pairs for t in p[name].pop("tpot"))
        found[name] = {
            key: statistics.median(p[name][key] for p in pairs) for key in pairs[0][name]
        } | {
            "tpot_p50_ms": 1e3 * statistics.median(tpot),
            "tpot_p99_ms": 1e3 * tpot[int(0.99 * (len(tpot) - 1))],
        }
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if given.out is not None:
        write_whole(given.out, text.encode())


if __name__ == "__main__":
    main()
