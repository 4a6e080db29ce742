"""Kernels as pages: what is selected, what there is, what an operation is, what a trial found."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.errors import WorkbenchError
from workbench.kernels.case import Request
from workbench.kernels.catalogue import LAYER_OPS, MODEL_OPS, REFERENCE
from workbench.kernels.ops import DTYPES, operation
from workbench.kernels.requirements import Where
from workbench.kernels.results import BenchResult
from workbench.kernels.roofline import Rates, bound
from workbench.kernels.shapes import Shapes
from workbench.kernels.tables import Resolved
from workbench.kernels.triton_compile import Compiled
from workbench.views.kernel_words import (
    BAD,
    FAINT,
    GOOD,
    Cell,
    checked,
    choices,
    html_table,
    spills,
    text_table,
)
from workbench.views.page import page
from workbench.views.view import View

if TYPE_CHECKING:
    from workbench.kernels.trial import Trial

OPS = (*LAYER_OPS, *MODEL_OPS)


def kernel_table(rows: Sequence[Resolved]) -> View:
    """What was asked for, what runs and why: the rows of ``beam.kernels()``.

    The last column is the verdict of the last check in this process, if there was one.
    """
    head = ("operation", "layers", "requested", "runs", "checked here", "reason")
    cells = table_cells(rows)
    swapped = sum(row.resolved != REFERENCE for row in rows)
    subtitle = f"{len({row.op for row in rows})} operations · " + (
        f"{swapped} of {len(rows)} lines not the reference" if swapped else "all the reference"
    )
    html = page("Kernels in use", subtitle, html_table(head, cells, mono=4))
    return View(html=html, text=text_table(head, cells))


def table_cells(rows: Sequence[Resolved]) -> list[list[Cell]]:
    """The table's lines: operation, layers, requested, runs, checked, reason."""
    made: list[list[Cell]] = []
    for row in rows:
        # What was swapped stands out: the reference recedes.
        plain = row.requested == row.resolved == REFERENCE
        runs = row.resolved if row.requested == row.resolved else (row.resolved, BAD)
        made.append(
            [
                row.op,
                row.layers or "–",
                (row.requested, FAINT) if plain else row.requested,
                (row.resolved, FAINT) if plain else runs,
                checked(row.op, row.resolved),
                row.reason,
            ]
        )
    return made


def kernel_variants(where: Where, ops: Sequence[str] = OPS) -> View:
    """Which variants of each operation run at ``where``, and what is in the way of the others."""
    rows: list[list[Cell]] = []
    for op in ops:
        known = choices(op, where)
        rows.append([
            op,
            (", ".join(name for name, why in known if not why), GOOD),
            ("\n".join(f"{name}: {why}" for name, why in known if why), FAINT),
        ])  # fmt: skip
    head = ("operation", "runs here", "does not, because")
    kind = "a CPU" if where.device == "cpu" else "a GPU"
    subtitle = f"on {kind}, {str(where.dtype).removeprefix('torch.')} · asked of each variant"
    html = page("Variants", subtitle, html_table(head, rows, mono=2))
    return View(html=html, text=text_table(head, rows))


def kernel_operations(
    shapes: Shapes, rates: Rates | BenchResult, *, tokens: int = 8, dtype: str = "bfloat16"
) -> View:
    """What each operation is: arguments, and the least bytes, FLOPs and time of one call.

    The time is the roofline's at ``rates``, whose kind (measured, data sheet) the subtitle says;
    of a bench they are the rates that it measured.
    Where an operation has several kinds of inputs, the first two are shown (for attention: sliding
    and full layers).

    Raises:
        RooflineError: rates without the arithmetic that an operation needs.
    """
    if isinstance(rates, BenchResult):
        peaks = rates.peaks
        source = f"the rates {rates.source}"
        rates = Rates(
            label=rates.hardware,
            kind="measured here",
            bandwidth=peaks["bandwidth"],
            flops=peaks["flops"],
        )
    else:
        source = f"the rates of {rates.label} ({rates.kind})"
    rows: list[list[Cell]] = []
    for name in OPS:
        op = operation(name)
        arguments = ", ".join(inspect.signature(op.reference).parameters)
        for flavour in op.flavours[: 1 + ("attention" in name)]:
            request = Request(
                shapes=shapes, tokens=tokens, device="meta", flavour=flavour, dtype=DTYPES[dtype]
            )
            work = op.case(request).work
            least = bound(work, rates)
            rows.append([
                name if flavour in ("", op.flavours[0]) else "",
                f"{op.title}{f', {flavour} layers' if 'attention' in name else ''}\n({arguments})",
                _size(work.bytes),
                _flops(work.flops),
                f"{1e6 * least.seconds:.3g} µs",
                least.limit,
            ])  # fmt: skip
    head = ("operation", "what, and arguments", "bytes", "FLOPs", "at best", "limit")
    subtitle = (
        f"{shapes.label}, {tokens} tokens, {dtype} · modelled: every operand once, at {source}"
    )
    html = page("Operations", subtitle, html_table(head, rows, mono=1, numbers=(2, 3, 4)))
    return View(html=html, text=f"{subtitle}\n{text_table(head, rows)}")


def _size(count: float) -> str:
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= of:
            return f"{count / of:.3g} {unit}"
    return f"{count:.0f} B"


def _flops(count: float) -> str:
    for unit, of in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= of:
            return f"{count / of:.3g} {unit}"
    return f"{count:.0f}"


def kernel_trial(trial: Trial) -> View:
    """The stages of ``kernels.try_variant``: checked, compiled, timed, and what came of each."""
    verdict = trial.verdict
    rows: list[list[Cell]] = []
    if trial.passed and verdict is not None:
        gates = f"all gates of {verdict.cases} cases"
        found = (
            f"error {verdict.max_error or 0:.1e}, the reference's own {verdict.own_error or 0:.1e}"
        )
        rows.append(["checked", ("✓ passed", GOOD), f"{gates}: {found}"])
    else:
        gate = f" by the gate “{trial.gate}”" if trial.gate else ""
        rows.append(["checked", (f"✗ {trial.status}{gate}", BAD), trial.error])
    for one in trial.compiled:
        fine = one.error is None
        figures = (
            f"{one.registers} registers, {one.shared_bytes} B shared, {spills(one)}"
            if one.registers is not None
            else ""
        )
        said = ", ".join(filter(None, (f"{one.kernel}: {figures}".rstrip(": "), one.error or "")))
        rows.append([
            f"compiled for {one.target}", ("✓" if fine else "✗", GOOD if fine else BAD), said
        ])  # fmt: skip
    if trial.timing:
        rows.append(["timed", ("✓", GOOD), f"{trial.timing.get('microseconds', 0):.1f} µs a call"])
    elif trial.passed:
        rows.append(["timed", ("–", FAINT), trial.untimed or "no"])
    status = "may be swapped in" if trial.passed else "stays out, this process goes on"
    title = f"{trial.variant} of {trial.op}: {status}"
    head = ("stage", "", "found")
    html = page(title, "measured here, in a process of its own", html_table(head, rows, mono=0))
    return View(html=html, text=f"{title}\n{text_table(head, rows)}")


def compiled_kernels(compiled: Sequence[Compiled] | Mapping[str, Any]) -> View:
    """Registers, shared memory and spills of Triton kernels on GPUs that need not be here.

    ``compiled`` is a trial's, or the document of a recorded file
    (``workbench/kernels/recorded/compiled-*.json``). One line a kernel; of the versions it was
    compiled in, for sizes and numbers of tokens, it has the largest figures.

    Raises:
        WorkbenchError: nothing was compiled.
    """
    if isinstance(compiled, Mapping):
        found = [_Figures(**{n: row.get(n) for n in _Figures._fields}) for row in compiled["rows"]]
        versions = f"Triton {compiled['versions'].get('triton')}"
        sizes = ", ".join(f"TP{tp}" for tp in compiled["tp"])
        tokens = ", ".join(f"{count:,}" for count in compiled["tokens"])
        source = (
            f"recorded, {compiled['date']} ({versions}) · {compiled['model']}, {sizes}, "
            f"{tokens} tokens · sm_100 was not run"
        )
    else:
        found = [
            _Figures(**{n: getattr(one, n, None) for n in _Figures._fields})  # type: ignore[arg-type]
            for one in compiled
        ]
        source = "compiled here"
    if not found:
        raise WorkbenchError("there are no compiled kernels to show; compile some first")
    targets = sorted({one.target for one in found}, key=lambda t: int(t.removeprefix("sm_")))
    groups: dict[tuple[str, str], list[_Figures]] = {}
    for one in found:
        name = one.kernel.removesuffix("_kernel").strip("_")
        groups.setdefault((one.op or "", name), []).append(one)
    rows: list[list[Cell]] = []
    last = ""
    for (op, kernel), some in groups.items():
        row: list[Cell] = [] if not any(one.op for one in found) else [op if op != last else ""]
        last = op
        by = [[one for one in some if one.target == target] for target in targets]
        row += [kernel, str(max(map(len, by)))]
        row += [_worst(group) for group in by]
        rows.append(row)
    head = ["kernel", "versions", *(f"{t}: registers, shared, spilled" for t in targets)]
    head = head if len(head) == len(rows[0]) else ["operation", *head]
    failed = sum(bool(one.error) for one in found)
    subtitle = f"{source} · largest of all versions, {failed or 'no'} errors"
    html = page("Compiled without a GPU", subtitle, html_table(head, rows, mono=len(head) - 3))
    return View(html=html, text=f"{subtitle}\n{text_table(head, rows)}")


class _Figures(NamedTuple):
    """What both sources say of a kernel."""

    op: str | None
    kernel: str
    target: str
    registers: int | None
    shared_bytes: int | None
    spill_bytes: int | None
    error: str | None


def _worst(some: Sequence[_Figures]) -> Cell:
    errors = [one.error for one in some if one.error]
    if errors:
        return errors[0], BAD
    if not some:
        return "–", FAINT
    registers = max(one.registers or 0 for one in some)
    shared = max(one.shared_bytes or 0 for one in some)
    spilled = max(one.spill_bytes or 0 for one in some)
    return f"{registers}, {_shared(shared)}, " + (f"{spilled} B" if spilled else "nothing")


def _shared(count: int) -> str:
    return f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} B"
