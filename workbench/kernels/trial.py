"""Try a variant that nobody has vouched for: compile, check and time it in a process of its own.

A kernel that writes out of bounds, hangs or takes the process down takes down the child; what comes
back is a :class:`Trial` that says which. Source that a notebook cell registered is taken from the
cell, so a cell that defines a variant must hold everything the variant needs, imports included.

A trial finds mistakes, not malice: whatever the child writes raises nothing here and what is no
verdict counts as a crash, but code that runs in the child can write a well-formed verdict of its
own, and it has the rights of the user who tried it.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from workbench.errors import KernelError
from workbench.kernels import ledger, registry
from workbench.kernels.case import Request
from workbench.kernels.catalogue import BUILT_IN, REFERENCE
from workbench.kernels.check import Verdict, check
from workbench.kernels.child import MARK, run_child, whole_characters
from workbench.kernels.ops import DTYPES, operation
from workbench.kernels.requirements import Where
from workbench.kernels.results import row_of
from workbench.kernels.shapes import Shapes
from workbench.kernels.triton_compile import Compiled, Job, compile_in_child

OUTPUT_BYTES = 4000  # of what it printed, the end
TIMING_SECONDS = 0.5  # of rounds
SECONDS = 120.0  # a child imports torch and Triton first: some seconds on a small machine
MOST_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a trial found. ``status`` is one of ``check.STATUSES``; ``error`` a sentence or "".

    ``compiled`` has an entry for each Triton kernel and GPU generation, made without a GPU;
    ``timing`` is a row of ``bench`` where the variant passed and is not interpreted, else None, and
    ``untimed`` says why.
    """

    op: str
    variant: str
    status: str
    gate: str = ""
    error: str = ""
    verdict: Verdict | None = None
    compiled: tuple[Compiled, ...] = ()
    timing: dict[str, Any] | None = None
    untimed: str = ""
    seconds: float = 0.0
    output: str = field(default="", repr=False)

    @property
    def passed(self) -> bool:
        """Whether the variant may be swapped in."""
        return self.status == "passed"

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        found["verdict"] = None if self.verdict is None else self.verdict.to_dict()
        found["compiled"] = [c.to_dict() for c in self.compiled]
        found["passed"] = self.passed
        return found

    def __str__(self) -> str:
        if self.verdict is not None and self.passed:
            return self.verdict.sentence()
        what = f" by the gate {self.gate!r}" if self.gate else ""
        return f"{self.variant} of {self.op}: {self.status}{what}: {self.error}"


def source_of(op: str, variant: str) -> str:
    """The whole cell or file that registered a variant.

    Raises:
        KernelError: there is no such variant, or its source is not to be had.
    """
    name = _file_of(op, variant)
    text = "".join(linecache.getlines(name)) if name else ""
    if not text:
        raise KernelError(
            f"the source of {variant} of {op} is not to be had: register it in a notebook cell or "
            "a file, or give source="
        )
    return text


def _file_of(op: str, variant: str) -> str:
    """The name of the file, or the cell, of the variant's code; "" where it has none."""
    function = registry.find(op, variant).function
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return "" if code is None else str(code.co_filename)


def trial(
    op: str,
    variant: str,
    shapes: Shapes,
    *,
    source: str | None = None,
    folder: str | Path | None = None,
    tokens: Sequence[int] = (1, 7),
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    device: str | None = None,
    seconds: float = SECONDS,
    compile_for: Sequence[int] = (90, 100),
    on_progress: Callable[[str], None] | None = None,
) -> Trial:
    """Check, time and compile a variant in child processes, within ``seconds`` in all.

    ``source`` is Python that registers it, by default the cell or file that did; modules beside it
    are found in ``folder``, by default that of the file, or the working directory. A variant that
    fails is also taken out of what is selected; the verdict is kept (``ledger``) where the source
    is that of the registered function. ``on_progress`` is told in words where things are.

    Raises:
        KernelError: an unknown operation, no source, settings that cannot be, or a trial inside a
            trial: a cell that registers a variant and tries it is run again by the child.
    """
    operation(op)
    if not isinstance(shapes, Shapes):
        raise KernelError(
            f"shapes must be a Shapes, such as beam.shapes, not {type(shapes).__name__}"
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _refuse_settings(op, variant, tokens, dtypes, device, seconds)
    if MARK in os.environ:
        raise KernelError(
            f"{variant} of {op} is being tried in this very process, which starts no trial of its "
            "own; call try_variant in another cell or file than the one that registers the variant"
        )
    if source is None:
        source = source_of(op, variant)
    # The verdict is on this function, whatever replaces it meanwhile, where this is its source.
    registered, where = registry.function(op, variant), ""
    if registered is not None:
        where = _file_of(op, variant)
        if not where or "".join(linecache.getlines(where)) != source:
            registered, where = None, ""
    if folder is None:
        folder = Path(where).parent if Path(where).is_file() else Path.cwd()
    started = time.monotonic()
    tell = on_progress or (lambda _: None)
    argument = {
        "source": source.removeprefix("\ufeff"),
        "folder": str(Path(folder).resolve()),
        "op": op,
        "variant": variant,
        "shapes": shapes.to_dict(),
        "tokens": list(tokens),
        "dtypes": list(dtypes),
        "device": device,
    }
    found = _run(argument, seconds, tell)
    compiled: list[Compiled] = []
    if found["status"] == "passed" and compile_for and "triton" in source:
        left = seconds - (time.monotonic() - started)
        tell("compiling for " + " and ".join(f"sm_{c}" for c in compile_for))
        job = Job(name=variant, call=f"{__name__}:compile_here", argument=argument)
        compiled = compile_in_child([job], max(1.0, left), targets=compile_for)
        compiled = [c for c in compiled if c.error != "launches no Triton kernel"]
    result = Trial(
        op=op,
        variant=variant,
        compiled=tuple(compiled),
        seconds=time.monotonic() - started,
        **found,
    )
    if result.verdict is not None and registered is not None:
        ledger.note(result.verdict, registered)
    if not result.passed:
        registry.deselect(op, variant)
    return result


def _refuse_settings(
    op: str,
    variant: str,
    tokens: Any,
    dtypes: Any,
    device: Any,
    seconds: Any,
) -> None:
    """KernelError for what the child could only fail on."""
    registry.check_name(op, variant)
    if variant in BUILT_IN[op]:
        raise KernelError(
            f"{variant} of {op} comes with the workbench and needs no trial; check_variant checks "
            "it, and a variant of your own needs another name"
        )
    real = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not real or not 0 < seconds <= MOST_SECONDS:
        raise KernelError(
            f"seconds must be a number more than 0 and at most {MOST_SECONDS:,.0f} (a day), not "
            f"{seconds!r:.40}"
        )
    if not _several(tokens) or any(type(n) is not int or n < 1 for n in tokens):
        raise KernelError(
            f"tokens must be one or more whole numbers above 0, not {tokens!r:.60}; for example "
            "(1, 7)"
        )
    if not _several(dtypes) or any(d not in list(DTYPES) for d in dtypes):
        raise KernelError(
            f"dtypes must be one or more of {', '.join(DTYPES)}, not {dtypes!r:.60}; for example "
            '("bfloat16",)'
        )
    if device not in ("cpu", "cuda"):
        raise KernelError(f'device must be "cpu" or "cuda", not {device!r:.40}')
    if device == "cuda" and not torch.cuda.is_available():
        raise KernelError('torch sees no GPU here; leave device out, or say device="cpu"')


def _several(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes) and len(given) > 0


def _run(argument: dict[str, Any], seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """The checking child: fields of a Trial."""
    op, variant = argument["op"], argument["variant"]
    verdict: Verdict | None = None
    said: dict[str, str] = {"progress": "starting"}
    timing: dict[str, Any] | None = None

    def take(message: dict[str, Any]) -> bool:
        nonlocal verdict, timing
        if len(message) != 1:
            return False
        kind, value = next(iter(message.items()))
        if kind in ("progress", "error", "untimed") and isinstance(value, str):
            said[kind] = " ".join(whole_characters(value).split())
            if kind == "progress":
                tell(said[kind])
            return True
        if kind == "timing":
            timing = _timing(value, op, variant)
            return timing is not None
        found = ledger.read(value, op, variant) if kind == "verdict" else None
        if verdict is None or verdict.passed:  # what is refused stays refused
            verdict = found or verdict
        return found is not None

    ended = run_child(
        __name__,
        json.dumps(argument),
        time.monotonic() + seconds,
        take,
        output_bytes=OUTPUT_BYTES,
        TRITON_INTERPRET=None,
    )

    def failed(status: str, error: str) -> dict[str, Any]:
        # Not what it may have said before: a verdict of a process that then broke is worth nothing.
        made = Verdict(
            op=op, variant=variant, status=status, reason=error, device=argument["device"]
        )
        return {"status": status, "error": error, "verdict": made, "output": ended.output}

    # What is refused stays refused, however the process ended after it.
    if verdict is None or verdict.passed:
        at = said["progress"]
        if ended.spoiled:
            return failed("crashed", f"the process wrote something that is no verdict, while {at}")
        if ended.late:
            return failed("time limit", f"did not return within {seconds:g} s, while {at}")
        if "error" in said:
            return failed("raised", said["error"])
        if ended.code != 0 or verdict is None:
            last = ended.output.strip().splitlines()[-1:]
            hint = "" if ended.code != -signal.SIGSEGV else "; an access outside of a tensor?"
            tail = f": {last[0]:.200}" if last else hint
            return failed("crashed", f"the process ended with {ended.how}, while {at}{tail}")
    return {
        "status": verdict.status,
        "gate": verdict.gate,
        "error": verdict.reason,
        "verdict": verdict,
        "timing": timing if verdict.passed else None,
        "untimed": said.get("untimed", ""),
        "output": ended.output,
    }


def _timing(fields: Any, op: str, variant: str) -> dict[str, Any] | None:
    """A row of a bench on this variant, with a time; None for anything else."""
    try:
        row = row_of(fields, "the timing")
    except KernelError:
        return None
    fits = (row.op, row.variant) == (op, variant) and row.timed
    return row.to_dict() if fits else None


# -- in the child -------------------------------------------------------------------------------


def _import(argument: dict[str, Any]) -> None:
    """Run the source that registers the variant, Triton being in the right mode before it."""
    with contextlib.suppress(Exception):  # without Triton a torch variant can be tried all the same
        from workbench.kernels import triton_runtime

        _ = triton_runtime.triton
    sys.path.append(argument["folder"])  # last: what lies there hides nothing
    source = argument["source"]
    module = ModuleType(f"{argument['variant']}_{argument['op']}")
    module.__file__ = str(Path(argument["folder"]) / f"{module.__name__}.py")
    # No such file need be: Triton and tracebacks read the lines from here, as those of a cell.
    lines = source.splitlines(keepends=True)
    linecache.cache[module.__file__] = (len(source), None, lines, module.__file__)
    sys.modules[module.__name__] = module
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)


def compile_here(argument: dict[str, Any]) -> None:
    """Call the variant on the meta device; ``triton_compile`` compiles what it would launch."""
    _import(argument)
    op, variant = operation(argument["op"]), argument["variant"]
    function = registry.find(op.name, variant).function
    shapes = Shapes(**argument["shapes"])
    for flavour in op.flavours:
        for n in argument["tokens"]:
            request = Request(
                shapes=shapes, tokens=n, device="meta", flavour=flavour,
                dtype=DTYPES[argument["dtypes"][0]],
            )  # fmt: skip
            case = op.case(request)
            function(*case.fresh(), **case.kwargs)


def _finite(value: Any) -> Any:
    """The value with the largest number in place of infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    odd = isinstance(value, float) and not abs(value) <= sys.float_info.max
    return sys.float_info.max if odd else value


def _main() -> None:
    """A request on stdin, JSON lines on what was stdout; what the code prints goes to stderr."""
    argument = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(_finite(message)) + "\n")
        out.flush()

    op, variant, device = argument["op"], argument["variant"], argument["device"]
    shapes = Shapes(**argument["shapes"])
    say({"progress": "importing"})
    try:
        _import(argument)
        registry.find(op, variant)
    except BaseException as error:
        try:
            words = f"{error!s:.400}"
        except Exception:  # its __str__ is foreign too
            words = "it has no words"
        say({"error": f"{type(error).__name__}: {words}"})
        return

    def told(done: int, of: int, label: str) -> None:
        say({"progress": f"checking {done} of {of}" + (f": {label}" if label else "")})

    verdict = check(
        op, variant, shapes,
        tokens=argument["tokens"], dtypes=[DTYPES[d] for d in argument["dtypes"]],
        device=device, on_case=told,
    )  # fmt: skip
    say({"verdict": verdict.to_dict()})
    if verdict.passed:
        _time(argument, shapes, verdict, say)


def _time(
    argument: dict[str, Any],
    shapes: Shapes,
    verdict: Verdict,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Time it beside the reference, unless it is interpreted; judged again after the timed loop."""
    op, variant, device = argument["op"], argument["variant"], argument["device"]
    dtype = DTYPES[argument["dtypes"][0]]
    if registry.interpreted(op, variant, Where.of(device, dtype, shapes)):
        say({"untimed": "interpreted: not a speed"})
        return
    from workbench.kernels.bench import bench

    say({"progress": "timing"})
    tokens = max(argument["tokens"])
    if not tokens:
        say({"untimed": "an empty batch takes no time worth measuring"})
        return
    result = bench(
        [op],
        shapes,
        variants=[REFERENCE, variant],
        tokens=[tokens],
        flavours=[operation(op).flavours[0]],
        dtype=dtype,
        device=device,
        seconds=TIMING_SECONDS,
    )
    row = next(r for r in result.rows if r.variant == variant)
    if not row.passed:
        fields = verdict.to_dict() | {"status": row.status, "gate": row.gate, "reason": row.reason}
        say({"verdict": fields})
    elif row.timed:
        say({"timing": row.to_dict()})
    else:
        say({"untimed": row.reason})


if __name__ == "__main__":
    _main()
