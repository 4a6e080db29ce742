"""Do confidences hold on prompts that the estimator has not seen? Writes JSON.

    PYTHONPATH=. python benchmarks/adaptive_calibration.py --out calibration.json

For each temperature sequences are decoded together, with prompts held out from training (code and
prose in turns), until the estimator has seen so many steps; then other prompts, while it goes on
learning. The expected calibration error (15 bins of equal mass) of the conditional confidences and
of their running product is that of these others; beside it those of the start, up to the first
refit, and of the drafter's own word.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import torch

import workbench
from workbench.files import write_whole
from workbench.hardware import cpu_name
from workbench.model.sampling import Sampling
from workbench.spec.acceptance import REFIT_STEPS, Estimator
from workbench.spec.adaptive import Adaptive
from workbench.spec.calibration import Of, evidence, reliability
from workbench.spec.decode import decode
from workbench.spec.profile import profile
from workbench.spec.step import Step

DATA = Path(__file__).parents[1] / "tests" / "data"


def errors(steps: list[Step], of: Of = "expected") -> dict[str, Any]:
    """Of both kinds of confidences, with how many were tested."""
    found: dict[str, Any] = {}
    for kind in ("conditional", "survival"):
        seen = reliability(*evidence(steps, of, kind))
        found[kind] = {"error": seen.error, "count": seen.count}
    return found


def main() -> None:
    """Parse the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    code, prose = (
        json.loads((DATA / f"heldout_{kind}.json").read_text("utf-8"))["prompts"]
        for kind in ("code", "prose")
    )
    texts = [text for both in zip(code, prose, strict=True) for text in both]
    beam = workbench.load("beam-tiny")
    drafter = workbench.load_drafter(beam)
    runs = []
    for heat in (0.0, 1.0):
        sampling = Sampling(temperature=heat)
        table = profile(
            beam, drafter, requests=given.concurrency, context=160, sampling=sampling, keep=False
        )
        estimator, steps = Estimator(drafter.block - 1), []
        for part in (texts[::2], texts[1::2]):  # seen, then others
            run = decode(
                beam, drafter, part, max_new_tokens=160, slots=given.concurrency,
                policy=Adaptive(table), estimator=estimator, sampling=sampling,
            )  # fmt: skip
            steps.append([])
            for step in run:
                if step.phase == "decode":
                    steps[-1].append(step)
                if len(steps[-1]) >= given.steps:
                    run.close()
        runs.append(
            {
                "temperature": heat,
                "steps": [len(several) for several in steps],
                "start": errors(steps[0][:REFIT_STEPS]),
                "held_out": errors(steps[1]),
                "drafter": errors(steps[1], "confidences"),
                "slope": estimator.coefficients().slope,
                "intercepts": estimator.coefficients().intercepts,
            }
        )
    document = {
        "how": f"measured: {cpu_name()}, torch {torch.__version__}, {date.today().isoformat()}",
        "concurrency": given.concurrency,
        "bins": 15,
        "runs": runs,
    }
    text = json.dumps(document, indent=1) + "\n"
    print(text)
    if given.out is not None:
        write_whole(given.out, text.encode())


if __name__ == "__main__":
    main()
