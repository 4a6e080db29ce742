"""Try a variant that nobody has vouched for: compile, check and time it in a process of its own.

A kernel that writes out of bounds, hangs or takes the process down takes down the child; what comes
back is a :class:`Trial` that says which. Source that a notebook cell registered is taken from the
cell, so a cell that defines a variant must hold everything the variant needs, imports included.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import workbench
from workbench.errors import KernelError
from workbench.kernels import ledger, registry
from workbench.kernels.case import Request
from workbench.kernels.catalogue import BUILT_IN, REFERENCE
from workbench.kernels.check import Finding, Verdict, check
from workbench.kernels.ops import DTYPES, operation
from workbench.kernels.requirements import Where
from workbench.kernels.shapes import Shapes
from workbench.kernels.triton_compile import Compiled, Job, compile_in_child

OUTPUT_BYTES = 4000  # of what it printed, the end
TIMING_SECONDS = 0.5  # of rounds
SECONDS = 120.0  # a child imports torch and Triton first: some seconds on a small machine


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
    function = registry.find(op, variant).function
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    name = "" if code is None else code.co_filename
    text = "".join(linecache.getlines(name)) if name else ""
    if not text:
        raise KernelError(
            f"the source of {variant} of {op} is not to be had: register it in a notebook cell or "
            "a file, or give source="
        )
    return text


def trial(
    op: str,
    variant: str,
    shapes: Shapes,
    *,
    source: str | None = None,
    tokens: Sequence[int] = (1, 7),
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    device: str | None = None,
    seconds: float = SECONDS,
    compile_for: Sequence[int] = (90, 100),
    on_progress: Callable[[str], None] | None = None,
) -> Trial:
    """Check, time and compile a variant in child processes, within ``seconds`` in all.

    ``source`` is Python that registers it, by default the cell or file that did. A variant that
    fails is also taken out of what is selected. ``on_progress`` is told in words where things are.

    Raises:
        KernelError: an unknown operation, no source, or settings that cannot be.
    """
    operation(op)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _refuse_settings(op, variant, tokens, dtypes, device, seconds)
    text = source_of(op, variant) if source is None else source
    registered = registry.function(op, variant)  # the verdict is on this, whatever replaces it
    started = time.monotonic()
    tell = on_progress or (lambda _: None)
    with tempfile.TemporaryDirectory(prefix="workbench-trial-") as folder:
        path = Path(folder) / f"{variant}_{op}.py"
        path.write_text(text, encoding="utf-8")
        argument = {
            "path": str(path),
            "op": op,
            "variant": variant,
            "shapes": shapes.to_dict(),
            "tokens": list(tokens),
            "dtypes": list(dtypes),
            "device": device,
        }
        found = _run(argument, seconds, tell)
        compiled: list[Compiled] = []
        if found["status"] == "passed" and compile_for and "triton" in text:
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
    if not isinstance(variant, str) or not variant.isidentifier():
        raise KernelError(f"the name of a variant is an identifier, not {variant!r:.60}")
    if variant in BUILT_IN[op]:
        raise KernelError(
            f"{variant} of {op} comes with the workbench and needs no trial; check_variant checks "
            "it, and a variant of your own needs another name"
        )
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise KernelError(f"seconds must be a number more than 0, not {seconds!r:.40}")
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
    deadline = time.monotonic() + seconds
    root = str(Path(workbench.__file__).resolve().parent.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    }
    environment.pop("TRITON_INTERPRET", None)
    verdict: Verdict | None = None
    said: dict[str, Any] = {}
    at = "starting"

    def failed(status: str, error: str, gate: str = "") -> dict[str, Any]:
        # Not what it may have said before: a verdict of a process that then broke is worth nothing.
        made = Verdict(
            op=op,
            variant=variant,
            status=status,
            gate=gate,
            reason=error,
            device=argument["device"],
        )
        return {"status": status, "gate": gate, "error": error, "verdict": made, "output": output}

    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
        reader.start()
        late = False
        try:
            with contextlib.suppress(BrokenPipeError):  # it died at once: its stderr says why
                child.stdin.write(json.dumps(argument))
                child.stdin.close()
            while True:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
                if line is None:
                    break
                message = _message(line)
                if "progress" in message:
                    at = message["progress"]
                    tell(at)
                elif "verdict" in message:
                    verdict = _verdict(message["verdict"])
                else:
                    said |= message
            child.wait(timeout=max(0.0, deadline - time.monotonic()) + 5)
        except (queue.Empty, subprocess.TimeoutExpired):
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            reader.join(timeout=5)
            if not reader.is_alive():  # else a process that left the group holds the pipe open
                child.stdout.close()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - OUTPUT_BYTES))
        output = errors.read().decode(errors="replace")
    # What is refused stays refused, however the process ended after it.
    if verdict is None or verdict.passed:
        if late:
            return failed("time limit", f"did not return within {seconds:g} s, while {at}")
        if "error" in said:
            return failed("raised", said["error"])
        if child.returncode != 0 or verdict is None:
            how = _ending(child.returncode)
            last = output.strip().splitlines()[-1:] or ["it said nothing"]
            return failed("crashed", f"the process ended with {how}, while {at}: {last[0]:.200}")
    return {
        "status": verdict.status,
        "gate": verdict.gate,
        "error": verdict.reason,
        "verdict": verdict,
        "timing": said.get("timing"),
        "untimed": said.get("untimed", ""),
        "output": output,
    }


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _verdict(fields: dict[str, Any]) -> Verdict:
    failed = tuple(Finding(**each) for each in fields["failed"])
    kept = {k: v for k, v in fields.items() if k not in ("passed", "failed")}
    return Verdict(**kept, findings=failed)


def _message(line: str) -> dict[str, Any]:
    """What the child says; {} for a line that is not the child's own (a kernel found its pipe)."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


# -- in the child -------------------------------------------------------------------------------


def _import(path: str) -> None:
    """Run the file that registers the variant, Triton being in the right mode before it."""
    import importlib.util

    with contextlib.suppress(Exception):  # without Triton a torch variant can be tried all the same
        from workbench.kernels import triton_runtime

        _ = triton_runtime.triton
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise KernelError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def compile_here(argument: dict[str, Any]) -> None:
    """Call the variant on the meta device; ``triton_compile`` compiles what it would launch."""
    _import(argument["path"])
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


def _main() -> None:
    """A request on stdin, JSON lines on what was stdout; what the code prints goes to stderr."""
    argument = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    op, variant, device = argument["op"], argument["variant"], argument["device"]
    shapes = Shapes(**argument["shapes"])
    say({"progress": "importing"})
    try:
        _import(argument["path"])
        registry.find(op, variant)
    except BaseException as error:
        say({"error": f"{type(error).__name__}: {error!s:.400}"})
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
