"""Record the small trace that notebook 04 replays: two prompts, few candidates, short numbers.

`python scripts/record_trace.py` writes workbench/spec/recorded/beam-tiny-dflash2.jsonl with the
bundled model and drafter (or `--drafter FOLDER`). Run it again after either has changed.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import workbench
from workbench.spec.recorded import RECORDED
from workbench.spec.step import RequestStep, Step
from workbench.spec.trace import TraceWriter, header

PROMPTS = [
    'class Stack:\n    """A last-in, first-out list."""\n\n    def __init__(self):',
    "import json\nfrom pathlib import Path\n\n\ndef read_json(path):",
]
NEW_TOKENS = 64
KEPT = 4  # candidates of a slot: what a page shows, and small enough to come with the package


def short(part: RequestStep) -> RequestStep:
    """With the best candidates alone, the one that was taken among them, and fewer digits."""
    candidates, unary, scores = [], [], []
    slots = zip(part.drafted, part.candidates, part.unary, part.scores, strict=True)
    for token, ids, own, realized in slots if part.candidates else ():
        order = sorted(range(len(ids)), key=lambda i: (ids[i] != token, -realized[i]))[:KEPT]
        candidates.append(tuple(ids[i] for i in order))
        unary.append(tuple(round(own[i], 2) for i in order))
        scores.append(tuple(round(realized[i], 2) for i in order))
    return replace(
        part,
        confidences=tuple(round(value, 3) for value in part.confidences),
        candidates=tuple(candidates),
        unary=tuple(unary),
        scores=tuple(scores),
    )


def shorter(step: Step) -> Step:
    times = {n: round(getattr(step, n), 6) for n in ("draft_seconds", "verify_seconds", "seconds")}
    return replace(step, requests=tuple(map(short, step.requests)), **times)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RECORDED / "beam-tiny-dflash2.jsonl")
    options = parser.parse_args(arguments)
    beam = workbench.load("beam-tiny")
    drafter = workbench.load_drafter(beam, options.drafter)
    asked: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop_at_eos": False}
    for _ in workbench.decode(beam, drafter, PROMPTS[0], **asked):
        pass  # the recorded run finds everything warm
    made = header(
        model=beam.name,
        drafter=Path(drafter.name).name,
        speculative_tokens=drafter.block - 1,
        max_new_tokens=NEW_TOKENS,
        prompts=PROMPTS,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with TraceWriter(options.out, made, overwrite=True) as out:
        for step in workbench.decode(beam, drafter, PROMPTS, slots=1, detail=True, **asked):
            out.write(shorter(step))
    print(f"{options.out}: {out.lines} steps, {options.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
