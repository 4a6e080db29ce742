"""How fast variants are, and how close to what the hardware can do; right ones only.

A variant is timed after it passed the gates of ``check`` on the very arguments it is timed on, and
its outputs are judged again afterwards, from the buffers that the timed loop wrote: outputs are
poisoned, the loop runs once more, and what it left is compared with the oracle. ``timing.py`` says
how time is measured, ``peaks.py`` what it is compared with.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import torch
from torch import Tensor

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.case import Case, Request
from workbench.kernels.catalogue import REFERENCE
from workbench.kernels.check import Finding, Prepared, judge, poison, prepare, rejudge
from workbench.kernels.footprint import SHARE, footprint, free_bytes, too_large
from workbench.kernels.gates import errors
from workbench.kernels.ops import Operation, operation
from workbench.kernels.peaks import measured_peaks
from workbench.kernels.requirements import Where
from workbench.kernels.results import BenchResult, BenchRow, without_speed
from workbench.kernels.roofline import Bound, Rates, bound
from workbench.kernels.shapes import Shapes
from workbench.kernels.timing import (
    COLD,
    ROUNDS,
    SECONDS,
    Candidate,
    check_rounds,
    l2_bytes,
    measure,
    sets_wanted,
)

# Argument sets that are compared with the oracle, before and after: it is in float64 and slow.
JUDGED = 4
INTERPRETED = "interpreted: not a speed"
# There a call may find its inputs where the one before left them, faster than memory gives them.
WARM = "beyond the measured limit: on a CPU the caches are not emptied between calls"
AFTER = "after timing"
# A round should take about this long at the roofline, so that what encloses it does not count.
ROUND_SECONDS = {"cuda": 5e-4, "cpu": 2e-3}
CALLS = {"cuda": (4, 32), "cpu": (1, 8)}
CPU_SETS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One comparison: all variants of an operation on the same arguments."""

    op: str
    request: Request
    model: str = ""


Progress = Callable[[int, int, str], None]


def bench(
    ops: Sequence[str],
    shapes: Shapes | Sequence[Shapes],
    *,
    variants: Sequence[str] | None = None,
    tokens: Sequence[int] = (1, 8),
    flavours: Sequence[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = None,
    model: str = "",
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    seed: int = 0,
    peaks: Rates | None = None,
    on_progress: Progress | None = None,
    note: str = "",
) -> BenchResult:
    """Time variants of operations, each comparison interleaved; Ctrl-C keeps what was measured.

    ``variants`` None: all that there are; those that cannot run here get a row that says why.
    ``flavours`` None: all of each operation (an operation without any of those named is left out).
    ``rounds`` and ``seconds`` bound a comparison. ``peaks`` are measured unless given.
    ``on_progress(done, of, label)`` is told the progress.

    Raises:
        KernelError: an operation, variant, flavour or number that cannot be.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    every = [shapes] if isinstance(shapes, Shapes) else list(shapes)
    cells = list(_cells(ops, every, tokens, flavours, dtype, device, seed, model))
    _check_variants(ops, variants)
    check_rounds(rounds)
    peaks = peaks or measured_peaks(device)
    rows: list[BenchRow] = []
    interrupted = False
    try:
        for number, cell in enumerate(cells):
            if on_progress is not None:
                on_progress(number, len(cells), f"{cell.op}, {cell.request.label}")
            found = _compare(cell, variants, peaks, rounds, seconds)
            rows += found.rows
            if found.interrupted:
                interrupted = True
                break
        else:
            if on_progress is not None:
                on_progress(len(cells), len(cells), "")
    except KeyboardInterrupt:
        interrupted = True
    machine = hardware.machine()
    gpu = torch.device(device).type == "cuda"
    return BenchResult(
        rows=tuple(rows),
        device=torch.device(device).type,
        hardware=torch.cuda.get_device_name(device) if gpu else machine.cpu,
        peaks=peaks.to_dict(),
        machine={k: v for k, v in machine.to_dict().items() if k != "versions"},
        versions=machine.versions,
        date=date.today().isoformat(),
        interrupted=interrupted,
        note=note,
    )


def _cells(
    ops: Sequence[str],
    every: Sequence[Shapes],
    tokens: Sequence[int],
    flavours: Sequence[str] | None,
    dtype: torch.dtype,
    device: str,
    seed: int,
    model: str,
) -> Iterator[Cell]:
    if not ops or not every or not tokens:
        raise KernelError("a bench needs at least one operation, one set of shapes and tokens")
    for n in tokens:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise KernelError(f"tokens must be 1 or more to be timed, not {n!r:.20}")
    known = [f for name in ops for f in operation(name).flavours]
    for flavour in flavours or ():
        if flavour not in known:
            raise KernelError(
                f"{', '.join(ops):.80} has no flavour {flavour!r:.40}; there are "
                f"{', '.join(repr(f) for f in dict.fromkeys(known))}"
            )
    for one in every:
        for name in ops:
            for flavour in operation(name).flavours:
                if flavours is None or flavour in flavours:
                    for n in tokens:
                        request = Request(
                            shapes=one, tokens=n, dtype=dtype, device=device, flavour=flavour,
                            seed=seed,
                        )  # fmt: skip
                        yield Cell(op=name, request=request, model=model)


def _check_variants(ops: Sequence[str], variants: Sequence[str] | None) -> None:
    known = [name for op in ops for name in registry.names(op)]
    for variant in variants or ():
        if variant not in known:
            raise KernelError(
                f"there is no variant {variant!r:.60} of {', '.join(ops):.80}; there are "
                f"{', '.join(dict.fromkeys(known))}"
            )


@dataclass(slots=True, kw_only=True)
class _Found:
    rows: list[BenchRow] = field(default_factory=list)
    interrupted: bool = False


def _compare(
    cell: Cell, variants: Sequence[str] | None, peaks: Rates, rounds: int, seconds: float
) -> _Found:
    """All variants of one cell: judged, timed in turn, judged again."""
    request, op = cell.request, operation(cell.op)
    names = [v for v in registry.names(cell.op) if variants is None or v in variants]
    where = Where.of(request.device, request.dtype, request.shapes)
    blank: dict[str, Any] = {
        "op": cell.op,
        "flavour": request.flavour,
        "tokens": request.tokens,
        "model": cell.model,
        "tp": request.shapes.tp,
        "dtype": str(request.dtype).removeprefix("torch."),
    }
    rows: dict[str, BenchRow] = {}
    for name in names:
        reason = registry.why_not(cell.op, name, where)
        if reason is not None:
            rows[name] = BenchRow(variant=name, status="unavailable", reason=reason, **blank)
    large = too_large(cell.op, request)
    ready = [name for name in names if name not in rows]
    if large is not None:
        for name in ready:
            rows[name] = BenchRow(variant=name, status="unavailable", reason=large, **blank)
        ready = []
    if not ready:
        return _Found(rows=[rows[name] for name in names])
    sets = _sets(op, request, peaks)
    limit = bound(sets.cases[0].work, peaks)
    blank |= _work(sets.cases[0], limit)
    candidates: dict[str, _Timed] = {}
    for name in ready:
        row, timed = _judged(op, name, sets, blank)
        rows[name] = row
        if timed is not None:
            candidates[name] = timed
    whole = True
    if candidates:
        whole = measure(
            [t.candidate for t in candidates.values()],
            request.device,
            rounds=rounds,
            seconds=seconds,
        )
    for name, timed in candidates.items():
        rows[name] = _finished(op, rows[name], timed, sets, limit)
    reference = rows[REFERENCE].microseconds if REFERENCE in rows else None
    if reference:
        for name, row in rows.items():
            if row.microseconds:
                rows[name] = replace(row, ratio_to_reference=reference / row.microseconds)
    return _Found(rows=[rows[name] for name in names], interrupted=not whole)


# -- arguments ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sets:
    """Arguments to rotate over: the first few with what they are judged by."""

    cases: tuple[Case, ...]
    prepared: tuple[Prepared, ...]
    repeat: int


def _sets(op: Operation, request: Request, peaks: Rates) -> _Sets:
    """As many sets of fresh random arguments as cold caches need and memory holds."""
    first = prepare(op, request)
    touched = first.case.work.bytes
    kind = torch.device(request.device).type
    low, high = CALLS[kind]
    least = bound(first.case.work, peaks).seconds
    calls = max(low, min(high, math.ceil(ROUND_SECONDS[kind] / max(least, 1e-7))))
    cache = l2_bytes(request.device)
    wanted = sets_wanted(touched, calls, cache) if kind == "cuda" else min(calls, CPU_SETS)
    free, need = free_bytes(request.device), footprint(op.name, request)
    if free is not None:
        room = int((SHARE * free - (need.peak - need.held)) // max(1, 2 * need.held))
        wanted = max(1, min(wanted, 1 + room))
    prepared = [first]
    cases = [first.case]
    for index in range(1, wanted):
        other = replace(request, seed=request.seed + index)
        if index < JUDGED:
            prepared.append(prepare(op, other))
            cases.append(prepared[-1].case)
        else:
            cases.append(op.case(other))
    # A set that comes round again within a round must find the cache cold: else each comes once.
    cold = kind != "cuda" or touched * wanted > COLD * cache
    repeat = math.ceil(calls / wanted) if cold else 1
    return _Sets(cases=tuple(cases), prepared=tuple(prepared), repeat=repeat)


def _work(case: Case, limit: Bound) -> dict[str, Any]:
    return {
        "bytes": float(case.work.bytes),
        "flops": float(case.work.flops),
        "math": case.work.math,
        "bound_microseconds": limit.seconds * 1e6,
        "limit": limit.limit,
    }


# -- before and after the timed loop ------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Timed:
    candidate: Candidate
    args: list[tuple[Any, ...]]


def _judged(
    op: Operation, name: str, sets: _Sets, blank: dict[str, Any]
) -> tuple[BenchRow, _Timed | None]:
    """The row of a variant before it is timed, and what to time where it passed."""
    request = sets.cases[0].request
    own: dict[str, Any] = {}
    try:
        variant = registry.find(op.name, name)
        # A compiler allocates for itself, out of sight of what poisons fresh memory.
        poisoned = not variant.origin.endswith("variants_compile")
        with _launches(request.device) as interpreted:
            for prepared in sets.prepared:
                findings = list(judge(op, prepared, variant.function, poisoned=poisoned))
                _errors(own, findings, prepared)
                failed = next((f for f in findings if not f.passed), None)
                if failed is not None:
                    return BenchRow(
                        variant=name, status="refused", gate=failed.gate,
                        reason=_why(failed), **own, **blank,
                    ), None  # fmt: skip
    except (Exception, SystemExit, GeneratorExit) as error:  # what a kernel raises is its result
        gate = "result" if isinstance(error, KernelError) else ""
        return BenchRow(
            variant=name, status="raised", gate=gate, reason=_said(error), **own, **blank
        ), None
    row = BenchRow(variant=name, status="passed", **own, **blank)
    if interpreted:
        return replace(row, reason=INTERPRETED), None
    args = [case.fresh() for case in sets.cases]
    calls = [
        _call(variant.function, a, case) for a, case in zip(args, sets.cases, strict=True)
    ]  # fmt: skip
    return row, _Timed(candidate=Candidate(name, calls, sets.repeat), args=args)


def _call(function: Callable[..., Any], args: tuple[Any, ...], case: Case) -> Callable[[], Any]:
    kwargs = dict(case.kwargs)
    return lambda: function(*args, **kwargs)


def _finished(op: Operation, row: BenchRow, timed: _Timed, sets: _Sets, limit: Bound) -> BenchRow:
    """The row with its time, if what the timed loop left is still right."""
    candidate = timed.candidate
    timing = candidate.timing()
    if timing is None:
        raised = bool(candidate.error) and not candidate.seconds
        reason = candidate.error or "interrupted before enough rounds were done"
        return without_speed(row, "raised" if raised else row.status, "", reason)
    failed = _rejudged(op, timed, sets)
    if failed is not None:
        return without_speed(row, "refused", *failed)
    seconds = timing.median
    assert row.bytes is not None
    assert row.flops is not None
    fraction = limit.fraction(seconds)
    warm = fraction > 1 and torch.device(sets.cases[0].request.device).type == "cpu"
    return replace(
        row,
        reason="; ".join(filter(None, (timing.note, WARM if warm else ""))),
        microseconds=seconds * 1e6,
        microseconds_low=timing.low * 1e6,
        microseconds_high=timing.high * 1e6,
        calls=timing.calls,
        rounds=timing.rounds,
        in_graph=timing.in_graph,
        bytes_per_second=row.bytes / seconds,
        flops_per_second=row.flops / seconds,
        roofline_fraction=fraction,
    )


def _rejudged(op: Operation, timed: _Timed, sets: _Sets) -> tuple[str, str] | None:
    """None, or the gate and the reason: the loop's own outputs, poisoned and written once more."""
    candidate = timed.candidate
    try:
        for case, args, result in zip(sets.cases, timed.args, candidate.outputs, strict=True):
            if candidate.graph is not None:
                for value in result if isinstance(result, tuple | list) else (result,):
                    if isinstance(value, Tensor):
                        poison(value)
            for one in case.written:
                args[one.argument].copy_(case.args[one.argument])
        candidate.again()
        for prepared, args, result in zip(
            sets.prepared, timed.args, candidate.outputs, strict=False
        ):
            outputs = prepared.case.outputs(result, args)
            failed = next((f for f in rejudge(op, prepared, outputs) if not f.passed), None)
            if failed is not None:
                return f"{AFTER}: {failed.gate}", _why(failed)
    except Exception as error:
        return AFTER, _said(error)
    return None


def _errors(own: dict[str, Any], findings: Sequence[Finding], prepared: Prepared) -> None:
    """Keep the largest relative error so far, and the reference's own beside it."""
    for one in findings:
        worse = one.gate == "relative error" and own.get("max_error", -1.0) <= one.found
        if worse and math.isfinite(one.found):
            reference = errors(prepared.own[one.output], prepared.exact[one.output])
            own |= {"max_error": one.found, "own_error": reference.relative}


def _why(failed: Finding) -> str:
    detail = failed.note or f"{failed.found:.3g} where {failed.limit:.3g} is allowed"
    return f"{failed.case}, {failed.output}: {detail}"


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


@contextmanager
def _launches(device: str) -> Iterator[list[int]]:
    """Fills the list where a Triton kernel is interpreted inside the block (on a CPU, always)."""
    seen: list[int] = []
    shipped = sys.modules.get("triton.runtime.interpreter")
    if torch.device(device).type != "cpu" or shipped is None:
        yield seen
        return
    executor: Any = shipped.GridExecutor
    before = executor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return before(self, *args, **kwargs)

    executor.__call__ = launch
    try:
        yield seen
    finally:
        executor.__call__ = before
