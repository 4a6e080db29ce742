"""What a verification costs by its token rows: steps of many rows, checked, timed, as curves.

:func:`measure_verify` gives the JSON of ``workbench bench verify`` (``schema`` counts its
versions): ``model``, ``tp``, ``layers``, ``context``, ``dtype``, ``device``, ``note``,
``bandwidth`` (measured in the same run) and ``sizes``, one for each number of rows: ``rows``,
``sequences``, ``check`` (``reference.StepCheck`` of sampled rows), ``failures``, ``distinct``
(experts a sparse layer), ``bytes`` that must be read, ``floor_milliseconds``, ``milliseconds``
(median), ``low``, ``high`` and ``samples``; where kernels are interpreted nothing is timed, and
the times are None. ``spec/verify_costs.py`` makes a cost table of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from typing import Any, cast

import torch

from workbench.errors import KernelError
from workbench.kernels.rank.fused import FusedStep
from workbench.kernels.rank.graph import ROUNDS, Replay, capture, time_replays
from workbench.kernels.rank.load_check import check_load, told
from workbench.kernels.rank.load_state import HEADROOM, NEW_MOST, LoadState, refuse_many
from workbench.kernels.rank.load_step import LoadStep, refuse_load
from workbench.kernels.rank.reference import StepCheck, check_step
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.waterfall import _refusal
from workbench.kernels.rank.weights import RankWeights
from workbench.kernels.roofline import Rates
from workbench.kernels.triton_runtime import INTERPRETED

SCHEMA = "workbench-rank-verify/1"
NOTE = "no all-reduce on one GPU: the rank's partial sums are used as if they were whole"
SEQUENCES = 128  # at most, where none is said
CHECKED = 2  # rows of each size that are compared with float64: it is slow
# Of a layer's stream; plain torch reaches 6e-3 in BF16 (benchmarks/NOTES.md).
LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


def spread(tokens: int, sequences: int | None) -> list[int]:
    """New rows of each sequence: ``tokens`` in all, as even as they go.

    Raises:
        KernelError: no tokens, no sequences, or more rows a sequence than a step takes.
    """
    count = min(tokens, SEQUENCES if sequences is None else sequences)
    refuse_many(count)  # before as many are listed
    if count < 1:
        raise KernelError(
            f"{tokens} tokens of {sequences} sequences cannot be verified; give 1 or more of each"
        )
    if -(-tokens // count) > NEW_MOST:
        raise KernelError(
            f"{tokens} tokens over {count} sequences are more than {NEW_MOST} rows of one, the "
            "most that a verification takes; give more --sequences or fewer --tokens"
        )
    return [tokens // count + (r < tokens % count) for r in range(count)]


def _made(
    weights: RankWeights, context: int, fresh: Sequence[int]
) -> tuple[Replay, RankState, StepCheck, float, int]:
    """A captured step, its state, whether it is right, distinct experts a sparse layer, and bytes
    of keys and values that it must read. One row goes through the chain of one sequence, which asks
    for its weights earlier and has no lists of experts to make."""
    if sum(fresh) == 1:
        one = RankState(weights, context, headroom=HEADROOM)
        alone = capture(FusedStep(weights, one), one)
        check = check_step(alone.step, weights, one, alone)
        one.reset()
        sparse = any(not layer.dense for layer in weights.layers)
        distinct = float(weights.shapes.top_k) if sparse else 0.0
        return alone, one, check, distinct, weights.cache_bytes(context, 1)
    state = LoadState(weights, [context] * len(fresh), fresh)
    kept = cast(RankState, state)
    step = LoadStep(weights, state, advance=False)
    replay = capture(step, kept)
    rows = sorted({0, state.rows - 1})[:CHECKED]
    check = check_load(step, weights, state, run=replay, rows=rows)
    return replay, kept, check, step.distinct(), state.read_bytes()


def _unmade(error: Exception, size: int, done: Sequence[int]) -> KernelError | None:
    """What a step says that does not fit; None for what says it itself, and for a defect."""
    if isinstance(error, KernelError):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        fitted = f", or --tokens {','.join(map(str, done))}, which fitted" if done else ""
        return KernelError(
            f"the GPU's memory was full at a verification of {size} tokens: give a shorter "
            f"--context or fewer --layers{fitted}"
        )
    return _refusal(f"of {size} tokens", error)


def measure_verify(
    weights: RankWeights,
    tokens: Sequence[int],
    context: int,
    rates: Rates,
    *,
    sequences: int | None = None,
    rounds: int = ROUNDS,
    model: str = "",
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Check and time a step of each number of token rows, sequences of ``context`` tokens.

    Raises:
        KernelError: no sizes, one that :func:`spread` or the state refuses, or a step that cannot
            run here.
    """
    sizes = sorted(dict.fromkeys(tokens))
    if not sizes:
        raise KernelError("no number of tokens was given; give some, --tokens 1,8,64")
    refuse_load(weights, weights.device)
    fresh = {size: spread(size, sequences) for size in sizes}
    say = progress or (lambda done, of, label: None)
    limit = LIMITS.get(weights.dtype, max(LIMITS.values()))
    rows: list[dict[str, Any]] = []
    for done, size in enumerate(sizes):
        say(done, len(sizes), f"{size} tokens")
        try:
            replay, state, check, distinct, read = _made(weights, context, fresh[size])
        except Exception as error:
            said = _unmade(error, size, [row["rows"] for row in rows])
            if said is None:
                raise
            raise said from error
        failures = check.failures(limit)
        moved = weights.step_bytes(distinct, size) + read
        row: dict[str, Any] = {
            "rows": size,
            "sequences": len(fresh[size]),
            "check": told(check),
            "failures": failures,
            "distinct": distinct,
            "bytes": moved,
            "floor_milliseconds": moved / rates.bandwidth * 1e3,
            **dict.fromkeys(("milliseconds", "low", "high", "samples")),
        }
        if not failures and not INTERPRETED:
            times = time_replays({"step": replay}, state, rounds)["step"]
            row |= {
                "milliseconds": times.median * 1e3,
                "low": times.low * 1e3,
                "high": times.high * 1e3,
                "samples": [each * 1e3 for each in times.seconds],
            }
        rows.append(row)
        del state, replay
    return {
        "schema": SCHEMA,
        "model": model,
        "tp": weights.shapes.tp,
        "layers": len(weights.layers),
        "of_layers": weights.config.num_hidden_layers,
        "context": context,
        "dtype": str(weights.dtype).removeprefix("torch."),
        "device": weights.device.type,
        "note": NOTE,
        "bandwidth": rates.bandwidth,
        "how": "measured here",
        "sizes": rows,
        "date": date.today().isoformat(),
    }
