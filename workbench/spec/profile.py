"""What drafts and verifications cost on this machine: :func:`profile` measures a cost table.

As the engine does at its start: passes of growing size on made-up contexts, the median of a few
each. Kept in a file by what it depends on, so that the next start reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workbench.errors import DraftError, WorkbenchError
from workbench.files import cache_folder, write_whole
from workbench.hardware import cpu_name, versions
from workbench.model.beam import Beam
from workbench.model.prompts import prompt_ids
from workbench.spec.asked import check_pair, check_whole
from workbench.spec.bench_prompts import PROMPTS
from workbench.spec.cost_table import CostTable
from workbench.spec.drafter import Drafter
from workbench.spec.loop import MOST_DRAFTS
from workbench.spec.passes import Call, Passes, rotated, seconds_of

ROUNDS = 5  # passes of each size, of which the median is taken
MOST_REQUESTS = 512
STEPS = 2  # sizes measured for each row more of all sequences
SCHEMA = "workbench-cost-table/1"

Progress = Callable[[int, int], None]


def profile(
    beam: Beam,
    drafter: Drafter,
    *,
    requests: int,
    drafts: int | None = None,
    context: int = 256,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
    keep: bool = True,
) -> CostTable:
    """The cost table of ``requests`` sequences decoded together, measured here or kept from before.

    A pass of n rows has one row of n sequences up to ``requests``, and beyond that n rows spread
    evenly over all: what a step with so many admitted drafts looks like.

    Args:
        requests: the most sequences decoded together.
        drafts: draft tokens a step; as many as the drafter was trained with when None.
        context: tokens of each sequence before a pass.
        rounds: passes of each size.
        progress: told passes done and of how many.
        keep: whether a table of these very settings that was measured before is taken, and this
            one kept, in the user's cache folder (``$BEAM_WORKBENCH_CACHE``).

    Raises:
        DraftError: a setting out of range, or contexts that do not fit the models.
    """
    check_pair(beam, drafter)
    check_whole("requests", requests, 1, MOST_REQUESTS)
    check_whole("rounds", rounds, 1)
    count = drafter.block - 1 if drafts is None else drafts
    check_whole("drafts", count, 1, MOST_DRAFTS)
    limit = min(beam.config.max_position_embeddings, drafter.limit) - count - 1
    check_whole("context", context, 1, limit)
    file = cache_folder() / f"cost-{_key(beam, drafter, requests, count, context, rounds)}.json"
    if keep and (known := _read(file)) is not None:
        return known
    table = _measured(beam, drafter, requests, count, context, rounds, progress)
    if keep:
        text = json.dumps({"schema": SCHEMA, **table.to_dict()}, indent=1) + "\n"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text.encode())
        except (OSError, WorkbenchError):
            pass  # it is measured again next time
    return table


@torch.inference_mode()
def _measured(
    beam: Beam,
    drafter: Drafter,
    requests: int,
    drafts: int,
    context: int,
    rounds: int,
    progress: Progress | None,
) -> CostTable:
    prompts = prompt_ids(beam, list(PROMPTS)) if beam.tokenizer is not None else [[1, 2, 3, 4]]
    passes = Passes(
        beam, drafter, prompts, drafts, context=context, batch=requests, widest=drafts + 1
    )
    few = _doublings(requests)
    widest = requests * (drafts + 1)
    rows = {*few, *range(requests, widest, max(1, requests // STEPS)), widest}
    timed: list[tuple[int, Call]] = [
        (n, partial(passes.target, _spread(n, requests))) for n in sorted(rows)
    ]
    timed += [(-n, partial(passes.draft, n)) for n in few]
    spent: dict[int, list[float]] = {name: [] for name, _ in timed}
    of, done = len(timed) * (rounds + 1), 0
    for number in range(-1, rounds):  # the first round is not counted: caches, allocator
        for name, call in rotated(timed, max(0, number)):
            seconds = seconds_of(call, beam.device)
            if number >= 0:
                spent[name].append(1e3 * seconds)
            done += 1
            if progress is not None:
                progress(done, of)
    return CostTable.from_curves(
        {-name: times for name, times in spent.items() if name < 0},
        {name: times for name, times in spent.items() if name > 0},
        label=_label(beam, requests, context),
    )


def _doublings(most: int) -> list[int]:
    """1, 2, 4 … and ``most``."""
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sorted({*sizes, most})


def _spread(rows: int, requests: int) -> list[int]:
    """Rows of each sequence of a pass, as even as can be; fewer sequences for fewer rows."""
    batch = min(rows, requests)
    each, more = divmod(rows, batch)
    return [each + 1] * more + [each] * (batch - more)


def _hardware(beam: Beam) -> str:
    gpu = beam.device.type == "cuda"
    return torch.cuda.get_device_name(beam.device) if gpu else cpu_name()


def _label(beam: Beam, requests: int, context: int) -> str:
    return (
        f"measured here: {_hardware(beam)}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, up to {requests} sequences, context {context}, "
        f"{date.today().isoformat()}"
    )


def _key(beam: Beam, drafter: Drafter, *settings: int) -> str:
    """Of everything a table depends on."""
    parts: list[Any] = [
        _hardware(beam), torch.get_num_threads(), dict(versions()), str(beam.dtype),
        beam.config.to_dict(), drafter.config.to_dict(), *settings,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def _read(file: Path) -> CostTable | None:
    """The table kept in a file; None where there is none that can be used."""
    try:
        data = json.loads(file.read_text("utf-8"))
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            return None
        return CostTable.from_dict(data)
    except (OSError, ValueError, DraftError):
        return None  # measured anew
