"""Drafts behind real held-out code: the first step behind many places of it, on a CPU.

    PYTHONPATH=. python benchmarks/drafter_real_text.py --corpus build/corpus --out FILE

At each place the context is what people wrote, and what counts is how many of the 7 drafts are the
target's own greedy continuation. The card has this figure of 1,024 places (``from_real_text``); its
standard error is 0.06 there, so the bar of 3.0 wants more places.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path

import torch

import workbench
from workbench.files import write_whole
from workbench.training.drafter_evaluate import evaluate_drafter
from workbench.training.texts import read_corpus

PART = 512  # places at once


def main() -> None:
    """Parse the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--drafter", help="a folder (default: the bundled one)")
    parser.add_argument("--places", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of real text before each")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    started = time.perf_counter()
    beam = workbench.load("beam-tiny")
    drafter = workbench.load_drafter(beam, a.drafter)
    assert beam.tokenizer is not None
    code = {"code": read_corpus(a.corpus, beam.tokenizer).held_out["code"]}
    means = []
    for seed in range(-(-a.places // PART)):
        found = evaluate_drafter(
            drafter, code, prompts=PART, prompt=a.prompt, response=1, seed=100 + seed
        )
        means.append(found["code"]["from_real_text"])
        print(f"{PART * len(means)} places: {sum(means) / len(means):.4f}", flush=True)
    parts = torch.tensor(means, dtype=torch.float64)
    document = {
        "how": "measured on a CPU, float32, greedy",
        "places": PART * len(means),
        "prompt_tokens": a.prompt,
        "acceptance_length": round(float(parts.mean()), 4),
        "standard_error": round(float(parts.std() / len(parts) ** 0.5), 4),
        "parts": means,
        "drafter": "the bundled one" if a.drafter is None else Path(a.drafter).name,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": date.today().isoformat(),
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if a.out is not None:
        write_whole(a.out, text.encode())


if __name__ == "__main__":
    main()
