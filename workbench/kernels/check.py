"""Is a variant right? Fresh random inputs, poisoned outputs, gates relative to the reference.

:func:`check` calls a variant on many cases and gives a :class:`Verdict`: passed, or the first gate
that it failed, by name. It runs in this process; code that is not trusted goes through
``trial.py``, which does the same in a child process with a time limit.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import KernelError
from workbench.kernels import registry, triton_runtime
from workbench.kernels.case import Case, Outputs, Request
from workbench.kernels.catalogue import BUILT_IN
from workbench.kernels.gates import compare, errors
from workbench.kernels.inputs import grouping
from workbench.kernels.ops import Operation, operation
from workbench.kernels.requirements import Where
from workbench.kernels.shapes import Shapes
from workbench.kernels.surroundings import fingerprints, process_state

# More than 16 rows, several draft blocks, more than 8 tokens for an expert of a small model.
TOKENS = (1, 7, 40)
# Tokens before those of the long request of an attention; the oracle goes query by query.
LONG = {"cpu": 1500, "cuda": 20_000}
STATUSES = ("passed", "refused", "raised", "time limit", "crashed", "unavailable")
# What fresh memory is filled with: finite, since NaN could be the kernel's own, and far from any
# right value. Representable in bfloat16, float16 saturates to -inf.
POISON = -(2.0**126)
POISON_INTEGER = -(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One gate of one output of one case: what was found and what is allowed, without units."""

    case: str
    output: str
    gate: str
    found: float
    limit: float
    passed: bool
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check found. ``gate`` names the first gate that failed, "" where none did.

    ``max_error`` is the largest relative error of any output against the float64 oracle, and
    ``own_error`` that of the torch reference on the same case.
    """

    op: str
    variant: str
    status: str
    gate: str = ""
    reason: str = ""
    device: str = ""
    cases: int = 0
    max_error: float | None = None
    own_error: float | None = None
    seconds: float = 0.0
    findings: tuple[Finding, ...] = field(default=(), repr=False)

    @property
    def passed(self) -> bool:
        """Whether every gate of every case was passed."""
        return self.status == "passed"

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON; of the findings only the failed ones."""
        found = {name: getattr(self, name) for name in self.__slots__ if name != "findings"}
        found["passed"] = self.passed
        found["failed"] = [f.to_dict() for f in self.findings if not f.passed]
        return found

    def sentence(self) -> str:
        """One line for a person."""
        if self.passed:
            return (
                f"{self.variant} of {self.op} passed {self.cases} cases: error "
                f"{self.max_error or 0:.2e}, the reference's own {self.own_error or 0:.2e}"
            )
        what = f" by the gate {self.gate!r}" if self.gate else ""
        return f"{self.variant} of {self.op}: {self.status}{what}: {self.reason}"


class _Poison(TorchDispatchMode):
    """Fills every freshly allocated, uninitialised tensor, so that what is not written shows."""

    _EMPTY = frozenset(
        {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
         "aten::new_empty_strided"}
    )  # fmt: skip

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile inside: it would quietly run the function as it is instead."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.name in self._EMPTY and isinstance(made, Tensor):
            poison(made)
        if isinstance(made, list):  # an undefined tensor comes as None, and None cannot go back
            made = [torch.empty(0) if one is None else one for one in made]
        return made


def poison(x: Tensor) -> None:
    """Fill with what no right output holds."""
    if x.dtype == torch.float8_e4m3fn:
        x.view(torch.uint8).fill_(0xFE)  # -448
    elif x.is_floating_point():
        x.fill_(POISON)
    elif x.dtype in (torch.int32, torch.int64):
        x.fill_(POISON_INTEGER)


def requests(
    op: Operation | str,
    shapes: Shapes,
    *,
    tokens: Sequence[int] = TOKENS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    device: str = "cpu",
    seed: int = 0,
    flavours: Sequence[str] | None = None,
) -> list[Request]:
    """The inputs a check uses: each flavour and dtype at each number of tokens, and the odd ones.

    ``flavours`` None: all that the operation has.

    Every other one is extreme, with another window and eps than the model's. Odd ones: the first
    request again with other numbers (which a variant that kept its last result, or a weight that
    lay at the same address, fails), strided rows, a long context for attention, an empty batch.
    """
    op = operation(op) if isinstance(op, str) else op
    made: list[Request] = []

    def add(n: int, dtype: torch.dtype, flavour: str, extreme: bool = False, **how: Any) -> None:
        own = seed + len(made)
        made.append(
            Request(
                shapes=_others(shapes, own) if extreme else shapes,
                tokens=n,
                dtype=dtype,
                device=device,
                flavour=flavour,
                seed=own,
                extreme=extreme,
                **how,
            )
        )

    flavours = [f for f in op.flavours if flavours is None or f in flavours]
    if op.name == "router" and grouping(shapes) is None:
        flavours = [f for f in flavours if f != "groups"]
    if not flavours:
        return []
    for i, dtype in enumerate(dtypes):
        for j, flavour in enumerate(flavours):
            for k, n in enumerate(tokens):
                add(n, dtype, flavour, (i + j + k) % 2 == 1)
    first = flavours[0]
    add(tokens[0], dtypes[0], first)
    for flavour in flavours:
        add(tokens[-1], dtypes[0], flavour, extreme=True, strided=True)
    if op.name in ("decode_attention", "prefill_attention") and "full" in flavours:
        before = min(shapes.context - 2, LONG[torch.device(device).type])
        add(2, dtypes[0], "full", context=before)
    add(0, dtypes[0], first)
    return made


def _others(shapes: Shapes, seed: int) -> Shapes:
    """The same sizes with another window, shorter than the requests, and another eps."""
    dice = random.Random(seed)
    return replace(
        shapes,
        window=min(shapes.window, dice.randrange(9, 30)),
        eps=shapes.eps * dice.uniform(2.0, 20.0),
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with what it is judged by: the oracle's outputs and the reference's."""

    case: Case
    own: Outputs
    exact: Outputs


def prepare(op: Operation, request: Request, memory: Case | None = None) -> Prepared:
    """Make the inputs, and compute oracle and reference on them.

    ``memory``: a case of the same sizes whose tensors are overwritten and used, so that a kernel
    that goes by addresses, and not by what is there, is seen.
    """
    case = op.case(request)
    if memory is not None:
        case = replace(case, args=tuple(map(_onto, memory.args, case.args)))
    own = case.call(op.reference)
    exact = {} if op.oracle is None else op.oracle(*case.args, **case.kwargs)
    return Prepared(case, own, exact)


def _onto(old: Any, new: Any) -> Any:
    same = isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape
    return old.copy_(new) if same and old.dtype == new.dtype else new


def check(
    op: str,
    variant: str,
    shapes: Shapes,
    *,
    tokens: Sequence[int] = TOKENS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    device: str = "cpu",
    seed: int = 0,
    on_case: Callable[[int, int, str], None] | None = None,
) -> Verdict:
    """Check one variant. ``on_case(done, of, label)`` is told the progress.

    A variant that is refused, or raises, is taken out of what ``registry.select`` chose.

    Raises:
        KernelError: an operation or variant that does not exist.
    """
    found = list(
        check_variants(
            op,
            [variant],
            shapes,
            tokens=tokens,
            dtypes=dtypes,
            device=device,
            seed=seed,
            on_case=on_case,
        )
    )
    if found[0].status in ("refused", "raised"):
        registry.deselect(op, variant)
    return found[0]


def check_variants(
    op: str,
    variants: Sequence[str],
    shapes: Shapes,
    *,
    tokens: Sequence[int] = TOKENS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    device: str = "cpu",
    seed: int = 0,
    flavours: Sequence[str] | None = None,
    on_case: Callable[[int, int, str], None] | None = None,
) -> Iterator[Verdict]:
    """Verdicts of several variants of one operation, on the same cases (the oracle runs once).

    ``flavours`` None: all of the operation. A variant that cannot do one of them fails as a whole.

    Raises:
        KernelError: an operation or variant that does not exist.
    """
    it = operation(op)
    _decide_triton(device)
    runs = [
        _Run(op, name, shapes, device, [d for d in dtypes if _runs(op, name, shapes, device, d)])
        for name in variants
    ]
    wanted = requests(
        it, shapes, tokens=tokens, dtypes=dtypes, device=device, seed=seed, flavours=flavours
    )
    if any(run.dtypes for run in runs):
        memory: Case | None = None
        for number, request in enumerate(wanted):
            if on_case is not None:
                on_case(number, len(wanted), request.label)
            takers = [run for run in runs if run.takes(request)]
            if takers:
                again = number > 0 and replace(request, seed=wanted[0].seed) == wanted[0]
                over = memory if again else None
                prepared = prepare(it, request, over)
                if number == 0:
                    memory = prepared.case
                for run in takers:
                    run.judge(it, prepared)
                    if run.status != "passed":  # it may have written on its inputs
                        prepared = prepare(it, request, over)
        if on_case is not None:
            on_case(len(wanted), len(wanted), "")
    for run in runs:
        yield run.verdict()


def _decide_triton(device: str) -> None:
    """Import Triton as it should be here before anything else does.

    torch.compile and the dispatch mode of a check import it too, without its interpreter, and then
    no Triton variant would run on a CPU until the process ends.
    """
    if torch.device(device).type == "cpu" and triton_runtime.why_not("cpu") is None:
        with contextlib.suppress(ImportError):  # its variants then say why they do not run
            _ = triton_runtime.triton


def _runs(op: str, name: str, shapes: Shapes, device: str, dtype: torch.dtype) -> bool:
    return registry.why_not(op, name, Where.of(device, dtype, shapes)) is None


class _Run:
    """One variant on its way through the cases; stops at the first gate that fails."""

    def __init__(
        self, op: str, name: str, shapes: Shapes, device: str, dtypes: list[torch.dtype]
    ) -> None:
        self.op, self.name, self.device, self.dtypes = op, name, device, dtypes
        self.variant = registry.find(op, name) if dtypes else None
        self.reason = "" if dtypes else registry.why_not(
            op, name, Where.of(device, torch.bfloat16, shapes)
        ) or ""  # fmt: skip
        self.findings: list[Finding] = []
        self.status = "passed" if dtypes else "unavailable"
        self.gate, self.cases, self.seconds = "", 0, 0.0
        self.max_error: float | None = None
        self.own_error: float | None = None
        # What the first call returned, and copies: a later call must not write there.
        self.first: list[tuple[str, Tensor, Tensor]] = []

    def takes(self, request: Request) -> bool:
        return self.status == "passed" and request.dtype in self.dtypes

    def judge(self, op: Operation, prepared: Prepared) -> None:
        assert self.variant is not None
        started = time.perf_counter()
        label = prepared.case.request.label
        # A compiler allocates for itself, out of a dispatch mode's sight.
        provided = BUILT_IN[self.op].get(self.name)
        hidden = provided is None or not provided.module.endswith("variants_compile")
        last: list[Any] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            last[:] = [self.variant.function(*args, **kwargs)]  # type: ignore[union-attr]
            return last[0]

        found: list[Finding] = []
        try:
            found = list(judge(op, prepared, call, poisoned=hidden))
        except KeyboardInterrupt:
            raise
        except KernelError as error:  # the wrong number or kind of results
            self._fail("raised", "result", _said(error))
        except BaseException as error:  # whatever a kernel raises, SystemExit too, is its verdict
            self._fail("raised", "", f"{label}: {type(error).__name__}: {_said(error):.300}")
        if self.status == "passed" and all(one.passed for one in found):
            found += self._kept(prepared.case, last[0])
        self.seconds += time.perf_counter() - started
        self.cases += 1
        for one in found:
            self.findings.append(one)
            if one.gate == "relative error" and (self.max_error or 0) <= one.found:
                self.max_error = one.found
                own = prepared.own[one.output]
                self.own_error = errors(own, prepared.exact[one.output]).relative
            if not one.passed and self.status == "passed":
                detail = one.note or f"{one.found:.3g} where {one.limit:.3g} is allowed"
                self._fail("refused", one.gate, f"{label}, {one.output}: {detail}")

    def _kept(self, case: Case, result: Any) -> list[Finding]:
        """The first call's outputs, if this call wrote on them; else those of this one, if first"""
        if not self.first:
            returned = result if isinstance(result, tuple) else (result,)
            self.first = [
                (name, x, x.clone()) for name, x in zip(case.returns, returned, strict=False)
            ]
            return []
        return [
            Finding(
                case=case.request.label,
                output=name,
                gate="own output",
                found=1.0,
                limit=0.0,
                passed=False,
                note="a later call wrote on what an earlier one had returned",
            )
            for name, kept, copy in self.first
            if not torch.equal(kept, copy)
        ][:1]

    def _fail(self, status: str, gate: str, reason: str) -> None:
        self.status, self.gate, self.reason = status, gate, reason

    def verdict(self) -> Verdict:
        return Verdict(
            op=self.op,
            variant=self.name,
            status=self.status,
            gate=self.gate,
            reason=self.reason,
            device=self.device,
            cases=self.cases,
            max_error=self.max_error,
            own_error=self.own_error,
            seconds=self.seconds,
            findings=tuple(self.findings),
        )


def _said(error: BaseException) -> str:
    """The first line of what an error says, also where its own ``__str__`` raises."""
    try:
        lines = str(error).strip().splitlines()
    except Exception as another:
        return f"(its message cannot be made: {type(another).__name__})"
    return lines[0] if lines else ""


def judge(
    op: Operation, prepared: Prepared, function: Callable[..., Any], *, poisoned: bool = True
) -> Iterator[Finding]:
    """Call ``function`` on a case and compare; findings end with the first one that failed.

    Raises:
        KernelError: it returns something else than the operation does.
        Exception: whatever the function raises.
    """
    case = prepared.case
    _decide_triton(case.request.device)
    before = fingerprints(case.args, case.kwargs)
    args = case.fresh()
    inside = _Poison() if poisoned else contextlib.nullcontext()
    with process_state(case.request.device) as changed, inside:
        result = function(*args, **case.kwargs)
    outputs = case.outputs(result, args)
    for finding in _findings(op, prepared, outputs, args, before, changed):
        yield finding
        if not finding.passed:
            return


def rejudge(op: Operation, prepared: Prepared, outputs: Outputs) -> Iterator[Finding]:
    """The numeric gates on outputs that are there already (after a timed loop)."""
    for finding in _numbers(op, prepared, outputs):
        yield finding
        if not finding.passed:
            return


def _findings(
    op: Operation,
    prepared: Prepared,
    outputs: Outputs,
    args: tuple[Any, ...],
    before: dict[str, int],
    changed: list[str],
) -> Iterator[Finding]:
    case, label = prepared.case, prepared.case.request.label

    def finding(output: str, gate: str, passed: bool, note: str = "", found: float = 0) -> Finding:
        return Finding(
            case=label, output=output, gate=gate, found=found, limit=0.0, passed=passed, note=note
        )

    if changed:
        note = f"it left {' and '.join(changed)} of the process changed"
        yield finding("process", "state", False, note, len(changed))
    for name, own in prepared.own.items():
        got = outputs[name]
        for gate, a, b in (
            ("shape", tuple(got.shape), tuple(own.shape)),
            ("dtype", got.dtype, own.dtype),
            ("device", got.device.type, own.device.type),
        ):
            same = a == b
            note = "" if same else f"{a} where {b} is due"
            yield finding(name, gate, same, note)
        if got.dim() and got.numel():  # the model and other kernels read rows
            step = got.stride(-1)
            dense = step == 1 or step == own.stride(-1) or got.shape[-1] == 1
            note = f"neighbours in a row are {step} apart (strides {got.stride()}) where 1 is due"
            yield finding(name, "layout", dense, "" if dense else note, 0 if dense else step)
        left = 0
        if got.dtype != torch.float8_e4m3fn:  # caches: their rows are looked after by "untouched"
            mark = torch.zeros((), dtype=got.dtype, device=got.device)
            poison(mark)
            left = int((got == mark).sum()) if mark != 0 else 0
        yield finding(
            name, "unwritten", left == 0, f"{left} of {got.numel()} elements were not written", left
        )
        if got.is_floating_point():
            values = got.float()
            bad = int((~torch.isfinite(values)).sum())
            yield finding(
                name,
                "finite",
                bad == 0,
                f"{bad} of {got.numel()} elements are NaN or infinite",
                bad,
            )
    yield from _untouched(case, args, before, finding)
    yield from _numbers(op, prepared, outputs)


def _numbers(op: Operation, prepared: Prepared, outputs: Outputs) -> Iterator[Finding]:
    label = prepared.case.request.label
    for name, exact in prepared.exact.items():
        for gate, found, limit in compare(outputs[name], prepared.own[name], exact, op.gate(name)):
            yield Finding(
                case=label, output=name, gate=gate, found=found, limit=limit, passed=found <= limit
            )
    if op.judge is not None:
        for gate, found, limit in op.judge(prepared.case, outputs):
            yield Finding(
                case=label,
                output=prepared.case.returns[0],
                gate=gate,
                found=found,
                limit=limit,
                passed=found <= limit,
            )


def _untouched(
    case: Case,
    args: tuple[Any, ...],
    before: dict[str, int],
    finding: Callable[..., Finding],
) -> Iterator[Finding]:
    """Rows that nothing belongs in, and inputs: as they were."""
    for one in case.written:
        old, new = case.args[one.argument], args[one.argument]
        keep = torch.ones(old.shape[one.dim], dtype=torch.bool, device=old.device)
        keep[one.rows] = False
        rows = keep.nonzero().flatten()
        a, b = (x.index_select(one.dim, rows).contiguous().view(torch.uint8) for x in (old, new))
        changed = int((a != b).sum())
        yield finding(
            one.name, "untouched", changed == 0, "rows that must not be written were", changed
        )
    after = fingerprints(args, case.kwargs)
    written = {f"argument {one.argument}" for one in case.written}
    for name, was in before.items():
        if name not in written and after.get(name) != was:
            yield finding(name, "inputs", False, f"{name} was changed, or memory around it", 1)
            return
