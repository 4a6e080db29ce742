"""What drafts and verifications cost on this machine: :func:`profile` measures a cost table.

As the engine does at its start: steps of growing size on made-up contexts, the median of a few
each. They are steps of the decode loop itself, with a policy that admits what is to be timed: a
pass alone, again and again, finds everything in the caches and costs less than in a step. Kept in a
file by what it depends on, so that the next start reads it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.errors import DraftError, WorkbenchError
from workbench.files import cache_folder, read_json, write_whole
from workbench.hardware import cpu_name, versions
from workbench.model.beam import Beam
from workbench.model.prompts import prompt_ids
from workbench.model.sampling import Sampling
from workbench.spec.adaptive import Decision, Ints, Situation
from workbench.spec.asked import check_kinds, check_pair, check_whole
from workbench.spec.bench_prompts import PROMPTS
from workbench.spec.cost_table import CostTable
from workbench.spec.decode import decode
from workbench.spec.drafter import Drafter
from workbench.spec.loop import MOST_DRAFTS
from workbench.spec.step import Step

ROUNDS = 5  # steps of each size, of which the median is taken
MOST_REQUESTS = 512
CONTEXT = 256
STEPS = 2  # sizes measured for each row more of all sequences
SCHEMA = "workbench-cost-table/4"
_GREEDY = Sampling()

Progress = Callable[[int, int], None]


def profile(
    beam: Beam,
    drafter: Drafter,
    *,
    requests: int,
    drafts: int | None = None,
    context: int | None = None,
    sampling: Sampling = _GREEDY,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
    keep: bool = True,
) -> CostTable:
    """The cost table of ``requests`` sequences decoded together, measured here or kept from before.

    A verification of n rows has one row of n sequences up to ``requests``, and beyond that drafts
    dealt out unevenly, as a policy does: what a step with so many admitted drafts looks like. The
    draft curve has all else that a step takes but deciding.

    Args:
        requests: the most sequences decoded together.
        drafts: draft tokens a step; as many as the drafter was trained with when None.
        context: tokens of each sequence before the first step; each goes on from there. 256 when
            None, or half of what the models hold where that is less.
        sampling: how tokens are picked: judging drafts at a temperature costs more.
        rounds: steps of each size.
        progress: told steps done and of how many.
        keep: whether a table of these very settings that was measured before is taken, and this
            one kept, in the user's cache folder (``$BEAM_WORKBENCH_CACHE``).

    Raises:
        PromptError, DraftError: a setting of the wrong kind or out of range, or contexts that do
            not fit the models.
    """
    check_kinds(beam, sampling, None, None)
    check_pair(beam, drafter)
    check_whole("requests", requests, 1, MOST_REQUESTS)
    check_whole("rounds", rounds, 1)
    count = drafter.block - 1 if drafts is None else drafts
    check_whole("drafts", count, 1, MOST_DRAFTS)
    # Behind the context there is its first token, and then a step whose drafts all have room.
    positions = min(beam.config.max_position_embeddings, drafter.limit)
    limit = positions - count - 2
    if limit < 1:
        raise DraftError(
            f"{count} drafts a step leave no room for a context in the {positions} positions of "
            f"{beam.name} with {drafter.name}; ask for fewer drafts"
        )
    if context is None:
        context = max(1, min(CONTEXT, positions // 2, limit))
    check_whole("context", context, 1, limit)
    file = (
        cache_folder()
        / f"cost-{_key(beam, drafter, sampling, requests, count, context, rounds)}.json"
    )
    if keep and (known := _read(file)) is not None:
        return known
    table = _measured(beam, drafter, sampling, requests, count, context, rounds, progress)
    if keep:
        text = json.dumps({"schema": SCHEMA, **table.to_dict()}, indent=1) + "\n"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text.encode())
        except (OSError, WorkbenchError):
            pass  # it is measured again next time
    return table


@dataclass(slots=True, kw_only=True)
class _Scheduled:
    """Admits so many drafts of each request as the next step is to have.

    Attributes:
        steps: rows of each sequence of the steps to come, its last token among them.
    """

    steps: Iterator[list[int]]
    name: str = field(default="scheduled", init=False)

    def decide(self, situation: Situation) -> Decision:
        """As scheduled, whatever the confidences."""
        admitted: Ints = np.array(next(self.steps), np.int64) - 1
        return Decision(admitted=admitted, budget=int(admitted.sum()))


def _measured(
    beam: Beam,
    drafter: Drafter,
    sampling: Sampling,
    requests: int,
    drafts: int,
    context: int,
    rounds: int,
    progress: Progress | None,
) -> CostTable:
    few, widest = _doublings(requests), requests * (drafts + 1)
    beyond = sorted({*range(requests, widest, max(1, requests // STEPS)), widest})
    # Sequences, and the rows of each in the steps to be timed: for few sequences the least and the
    # most, for all of them every size. The first round is not counted.
    plan: list[tuple[int, list[list[int]]]] = []
    for n in few:
        rows = beyond if n == requests else [n, n * (drafts + 1)]
        turns = [rows[i % len(rows) :] + rows[: i % len(rows)] for i in range(rounds + 1)]
        dealt = [_spread(r, n, drafts + 1, t) for t, turn in enumerate(turns) for r in turn]
        plan.append((n, dealt))
    of, done = sum(len(steps) for _, steps in plan), 0
    draft: dict[int, list[float]] = {n: [] for n in few}
    verify: dict[int, list[float]] = {n: [] for n in sorted({*few, *beyond})}
    for n, steps in plan:
        for number, step in enumerate(_timed(beam, drafter, sampling, n, drafts, context, steps)):
            if number >= len(steps) // (rounds + 1):
                rest = step.seconds - step.verify_seconds - step.decide_seconds
                draft[n].append(1e3 * rest)
                if n == requests or step.rows == n:
                    verify[step.rows].append(1e3 * step.verify_seconds)
            done += 1
            if progress is not None:
                progress(done, of)
    return CostTable.from_curves(draft, verify, label=_label(beam, sampling, requests, context))


def _timed(
    beam: Beam,
    drafter: Drafter,
    sampling: Sampling,
    requests: int,
    drafts: int,
    context: int,
    steps: list[list[int]],
) -> Iterator[Step]:
    """Decode steps with so many rows of each sequence; begun anew where the contexts end."""
    prompts = prompt_ids(beam, list(PROMPTS)) if beam.tokenizer is not None else [[1, 2, 3, 4]]
    text = [token for prompt in prompts for token in prompt]
    text = (text * (context // len(text) + 2))[: context + len(text)]
    # Not the same text in each: sequences that all write the same are judged faster.
    ids = [text[r % (len(text) - context + 1) :][:context] for r in range(requests)]
    limit = min(beam.config.max_position_embeddings, drafter.limit)
    most = max(1, (limit - context - 1) // (drafts + 1) - 1)
    for first in range(0, len(steps), most):
        part = steps[first : first + most]
        run = decode(
            beam,
            drafter,
            ids,
            max_new_tokens=min((len(part) + 1) * (drafts + 1), limit - context),
            speculative_tokens=drafts,
            sampling=sampling,
            stop_at_eos=False,
            slots=requests,
            policy=_Scheduled(steps=iter(part)),
        )
        decoded = (step for step in run if step.phase == "decode")
        for _ in part:
            yield next(decoded)
        run.close()


def _doublings(most: int) -> list[int]:
    """1, 2, 4 … and ``most``."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sorted({*sizes, most})


def _spread(rows: int, requests: int, most: int, turn: int = 0) -> list[int]:
    """Rows of each sequence of a pass: one each, and drafts as a policy deals them out, at most
    ``most`` rows of a sequence; fewer sequences for fewer rows.

    Each sequence has a chance of acceptance drawn at random, and the likeliest drafts are in: some
    sequences have all of theirs and many none. A pass of uneven sequences takes longer than one of
    even ones: attention pads them to the longest.
    """
    counts = [1] * min(rows, requests)
    draw = random.Random(f"{rows}, {requests}, {turn}")
    chances = [draw.random() for _ in counts]
    ranked = sorted(
        ((chance ** (k + 1), i) for i, chance in enumerate(chances) for k in range(most - 1)),
        reverse=True,
    )
    for _, i in ranked[: rows - len(counts)]:
        counts[i] += 1
    return counts


def _hardware(beam: Beam) -> str:
    gpu = beam.device.type == "cuda"
    return torch.cuda.get_device_name(beam.device) if gpu else cpu_name()


def _label(beam: Beam, sampling: Sampling, requests: int, context: int) -> str:
    return (
        f"measured here: {_hardware(beam)}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, up to {requests} sequences, context {context}, temperature "
        f"{sampling.temperature:g}, {date.today().isoformat()}"
    )


def _key(beam: Beam, drafter: Drafter, sampling: Sampling, *settings: int) -> str:
    """Of everything a table depends on."""
    parts: list[Any] = [
        _hardware(beam), torch.get_num_threads(), dict(versions()), str(beam.dtype),
        beam.config.to_dict(), drafter.config.to_dict(), sampling.temperature,
        sampling.top_p, *settings,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def _read(file: Path) -> CostTable | None:
    """The table kept in a file; None where there is none that can be used."""
    try:
        data = read_json(file)
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            return None
        return CostTable.from_dict(data)
    except WorkbenchError:
        return None  # measured anew
