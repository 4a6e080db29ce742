"""A prefill checked and timed: whole, by kernel, and against the operations that it needs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import torch

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels.rank.load_check import told
from workbench.kernels.rank.prefill_check import check_prefill, sample_rows
from workbench.kernels.rank.prefill_state import PrefillState, counted_flops
from workbench.kernels.rank.prefill_step import LAYOUTS, PrefillConfig, PrefillStep, captured
from workbench.kernels.rank.waterfall import _refusal
from workbench.kernels.rank.weights import RankWeights
from workbench.kernels.roofline import Rates

LIMIT = 1.2e-2  # of a layer's relative error in BF16: about twice what plain torch has
LIMIT_FLOAT32 = 1e-4
NOTE = "no all-reduce on one GPU: the rank's partial sums are used as if they were whole"


def timed(
    work: Callable[[], Any], rounds: int = 5, warm: int = 1, gpu: bool = True
) -> dict[str, float]:
    """Milliseconds of ``rounds`` calls: median, least and most; on a GPU between two events."""
    for _ in range(warm):
        work()
    if not gpu:
        found = []
        for _ in range(rounds):
            started = time.perf_counter()
            work()
            found.append((time.perf_counter() - started) * 1e3)
    else:
        torch.cuda.synchronize()
        pairs = []
        for _ in range(rounds):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            work()
            after.record()
            pairs.append((before, after))
        torch.cuda.synchronize()
        found = [before.elapsed_time(after) for before, after in pairs]
    return {"milliseconds": statistics.median(found), "low": min(found), "high": max(found)}


def by_kernel(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Times of each kernel in one run on a GPU, the largest first.

    ``microseconds``: from start to end, in a dependent launch also its wait for the kernel before.
    ``own_microseconds``: from the end of all kernels that ended earlier, or its start if that is
    later, to its own end. These add up to the run, less the gaps between launches.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    spans = [
        (str(e.name)[:100], float(e.time_range.start), float(e.time_range.end))
        for e in recorded.events()
        if "CUDA" in str(e.device_type) and e.time_range.end > e.time_range.start
    ]
    return kernel_rows(spans)


def kernel_rows(spans: Sequence[tuple[str, float, float]]) -> list[dict[str, Any]]:
    """Rows of :func:`by_kernel` from (kernel, start, end) in microseconds."""
    rows: dict[str, dict[str, Any]] = {}
    ended = float("-inf")
    for name, start, end in sorted(spans, key=lambda span: span[2]):
        row = rows.setdefault(
            name, {"kernel": name, "launches": 0, "microseconds": 0.0, "own_microseconds": 0.0}
        )
        row["launches"] += 1
        row["microseconds"] += end - start
        row["own_microseconds"] += end - max(start, ended)
        ended = end
    return sorted(rows.values(), key=lambda row: -row["own_microseconds"])


def padding(step: PrefillStep) -> dict[str, float]:
    """Rows that blocks of 64, 128, 256 tokens compute over rows that there are, all layers."""
    experts = step.weights.shapes.experts
    pairs = [pair[0] for pair in step.chosen.layers if pair is not None]
    counts = [ids.flatten().bincount(minlength=experts) for ids in pairs]
    total = sum(int(c.sum()) for c in counts)
    found: dict[str, float] = {}
    for block in (64, 128, 256):
        rows = sum(int(((c + block - 1) // block * block).sum()) for c in counts)
        found[str(block)] = rows / max(total, 1)
    found["most_tokens_of_an_expert"] = max((int(c.max()) for c in counts), default=0)
    return found


def checked(
    weights: RankWeights, state: PrefillState, form: str, config: PrefillConfig | None, rows: int
) -> dict[str, Any]:
    """A prefill's ``rows`` and last rows against the float64 reference; ``failures`` in words."""
    watch = sample_rows(state, rows)
    step = PrefillStep(weights, state, form, config=config, watch=watch)
    check = check_prefill(step, weights, state)
    limit = LIMIT_FLOAT32 if weights.dtype == torch.float32 else LIMIT
    return told(check) | {"failures": check.failures(limit), "rows": len(watch)}


def whole(
    weights: RankWeights,
    state: PrefillState,
    form: str,
    config: PrefillConfig | None,
    peak: float,
    rounds: int,
    profile: bool = True,
) -> dict[str, Any]:
    """Time of a prefill and its kernels, its rate over the counted operations; ``peak``: FLOP/s."""
    gpu = weights.device.type == "cuda"
    step = PrefillStep(weights, state, form, config=config)
    replay = captured(step)
    flops = counted_flops(weights, state)
    found: dict[str, Any] = timed(replay, rounds, gpu=gpu) | {"flops": flops}
    rate = flops["all"] / found["milliseconds"] * 1e3
    found |= {"flops_per_second": rate, "fraction_of_peak": rate / peak, "padding": padding(step)}
    found["kernels"] = by_kernel(replay) if gpu and profile else []
    return found


def _unmade(
    error: Exception, form: str, done: Sequence[str], state: PrefillState
) -> KernelError | None:
    """What a form says that does not fit; None for what says it itself, and for a defect."""
    if isinstance(error, KernelError):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        other = f", or leave it out (--variants {done[0]} fitted)" if done else ""
        return KernelError(
            f"the GPU's memory was full in the form {form} of {state.sequences} x {state.tokens} "
            f"tokens behind {state.context}: give fewer --sequences or --tokens or a shorter "
            f"--context{other}"
        )
    return _refusal(form, error)


def measure_prefill(
    weights: RankWeights,
    state: PrefillState,
    forms: Sequence[str],
    rates: Rates,
    *,
    model: str = "",
    rounds: int = 5,
    rows: int = 4,
    profile: bool = True,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Check and time every form; one that fails its check, or is ``interpreted``, is not timed.

    The experts' down projections are turned to the layout that a form reads, and back at the end.

    Raises:
        KernelError: a form that does not exist or cannot run here.
    """
    first = weights.down_layout
    variants: dict[str, dict[str, Any]] = {}
    name = "bf16" if weights.dtype == torch.bfloat16 else "fp32"
    for done, form in enumerate(forms):
        if progress is not None:
            progress(done, len(forms), form)
        weights.relayout(LAYOUTS.get(form, weights.down_layout))
        # On a CPU Triton's kernels are interpreted: right, and no speed.
        slow = weights.device.type == "cpu" and form != "naive"
        try:
            check = checked(weights, state, form, None, rows)
            row: dict[str, Any] = {"check": check, "failures": check.pop("failures")}
            row["interpreted"] = slow
            if not row["failures"] and not slow:
                row |= whole(weights, state, form, None, rates.flops[name], rounds, profile)
        except Exception as error:
            said = _unmade(error, form, list(variants), state)
            if said is None:
                raise
            raise said from error
        variants[form] = row
    weights.relayout(first)
    flops = counted_flops(weights, state)
    best = [row["milliseconds"] for row in variants.values() if "milliseconds" in row]
    floor = flops["all"] / rates.flops[name] * 1e3
    machine, gpu = hardware.machine(), weights.device.type == "cuda"
    return {
        "kind": "prefill",
        "model": model,
        "tp": weights.shapes.tp,
        "layers": len(weights.layers),
        "of_layers": weights.config.num_hidden_layers,
        "dtype": str(weights.dtype).removeprefix("torch."),
        "device": weights.device.type,
        "sequences": state.sequences,
        "batch": state.sequences,
        "tokens": state.tokens,
        "context": state.context,
        "flops": flops,
        "matrix_rate": rates.flops[name],
        "milliseconds": min(best) if best else None,
        "floor_milliseconds": floor,
        "fraction_of_floor": floor / min(best) if best else None,
        "variants": variants,
        "hardware": machine.gpus[0].name if gpu and machine.gpus else rates.label,
        "versions": dict(machine.versions),
        "date": date.today().isoformat(),
        "note": NOTE,
        "how": "measured here",
    }
