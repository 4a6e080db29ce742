"""What a Triton kernel becomes on a GPU that is not here: registers, shared memory, spills.

Triton needs no GPU to compile, only to launch. ``intercepted`` takes the place of the launch, binds
the arguments as Triton would (types, constants, divisibility by 16) and compiles for every target
instead. Inputs may lie on the meta device, so that full Beam shapes take no memory.

Kernels that a process interprets cannot be compiled in it: ``compile_in_child`` runs jobs in a
Python of its own (``child.py``), with a time limit, and survives a compiler that hangs or crashes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.kernels.child import MARK, is_number, run_child, whole_characters

__all__ = ["TARGETS", "CompileError", "Compiled", "Job", "compile_in_child", "intercepted"]

# Hopper (H100, H200) and Blackwell (B200), as compute capability times ten.
TARGETS = (90, 100)

# What a block may have (CUDA C++ Programming Guide, "Compute Capabilities"): a kernel that takes
# more compiles, and fails when it is launched.
_SHARED_LIMIT = {
    capability: 1024 * kib
    for capability, kib in ((80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99))
}
_REGISTER_FILE = 64 * 1024

# Instructions that say which unit a product runs on, and how data comes in.
_FEATURES = {
    "tcgen05.mma": r"\btcgen05\.mma\b",
    "wgmma": r"\bwgmma\.mma_async\b",
    "mma": r"\bmma\.sync\b",
    "cp.async.bulk": r"\bcp\.async\.bulk\b",
    "cp.async": r"\bcp\.async\.c[ag]\b",
}


class CompileError(WorkbenchError):
    """Compiling cannot start: a wrong job, a process that interprets, a tool that is not there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel compiled for one target, or why it was not (then ``error``, and no figures).

    A kernel that compiles and that such a GPU could not launch has its figures and an ``error``.
    ``registers`` and ``spill_bytes`` (local memory: 0 if nothing spills) are of one thread,
    ``shared_bytes`` of one block. ``features`` are those of the PTX. ``seconds`` is the time that
    compiling took here; next to nothing if Triton's cache on disk had the kernel.
    """

    job: str
    kernel: str
    target: str
    registers: int | None = None
    shared_bytes: int | None = None
    spill_bytes: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    constants: dict[str, str] = dataclasses.field(default_factory=dict)
    features: tuple[str, ...] = ()
    seconds: float | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them; ``Compiled.from_dict`` is the way back."""
        return dataclasses.asdict(self) | {"features": list(self.features)}

    @classmethod
    def from_dict(cls, fields: Any) -> Compiled:
        """What ``to_dict`` gave.

        Raises:
            CompileError: it is something else.
        """
        if not isinstance(fields, dict) or set(fields) != set(cls.__slots__):
            raise CompileError("A compiled kernel has other fields than these.")
        made: dict[str, Any] = {}
        for name, value in fields.items():
            if name == "constants":
                fine = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
            elif name == "features":
                fine = isinstance(value, list) and all(isinstance(v, str) for v in value)
                value = tuple(value) if fine else value
            elif name == "seconds":
                fine = value is None or is_number(value)
            elif name in ("job", "kernel", "target", "error"):
                fine = isinstance(value, str) or (value is None and name == "error")
                value = whole_characters(value) if isinstance(value, str) else value
            else:
                fine = value is None or (isinstance(value, int) and is_number(value))
            if not fine:
                raise CompileError(f"{name} of a compiled kernel cannot be {value!r:.40}.")
            made[name] = value
        return cls(**made)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Something to call in the child, inside ``intercepted``.

    ``call`` is "package.module:function" or "path/of/file.py:function"; the function takes
    ``argument`` (whatever JSON can hold), builds its inputs (on the meta device) and calls what is
    to be compiled.
    """

    name: str
    call: str
    argument: Any = None


# --- in the process that compiles -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """Stands for a meta tensor, whose ``data_ptr`` is 0 for any view: its base is aligned."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset


def _placed(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor) and arg.device.type == "meta":
        return _Address(dtype=arg.dtype, offset=int(arg.storage_offset()) * arg.element_size())
    if type(arg) is tuple:
        return tuple(_placed(each) for each in arg)
    return arg


@contextlib.contextmanager
def intercepted(
    targets: Sequence[int] = TARGETS,
    *,
    job: str = "",
    on_result: Callable[[Compiled], None] | None = None,
) -> Iterator[list[Compiled]]:
    """Compile for ``targets`` every Triton kernel that the body would launch, and launch none.

    Gives the list that fills as kernels are met, one entry a kernel, its constants and a target;
    a kernel launched again with the same specialisation is compiled once. A kernel that does not
    compile is an entry with an ``error``, and the body goes on. Of an autotuned kernel every
    configuration is compiled. While the body runs no other thread of the process can launch.

    Raises:
        CompileError: Triton is not installed, or this process interprets its kernels.
    """
    from workbench.kernels.triton_runtime import INTERPRETED

    if INTERPRETED:
        raise CompileError(
            "This process interprets Triton kernels and cannot compile them: start Python with "
            "TRITON_INTERPRET=0, or use compile_in_child."
        )
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    found: list[Compiled] = []
    seen: set[tuple[object, ...]] = set()

    def run(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        placed = [_placed(arg) for arg in args]
        named = {name: _placed(arg) for name, arg in kwargs.items()}
        for target in targets:
            result = _compiled(kernel, placed, named, target, job, seen)
            if result is not None:
                found.append(result)
                if on_result is not None:
                    on_result(result)

    def run_all(tuned: Any, *args: Any, **kwargs: Any) -> None:
        tuned.nargs = dict(zip(tuned.arg_names, args, strict=False))
        for config in tuned.prune_configs(kwargs):
            tuned.fn.run(*args, **kwargs, **config.all_kwargs())

    before = jit.run, tuner.run
    jit.run, tuner.run = run, run_all
    try:
        yield found
    finally:
        jit.run, tuner.run = before


def _compiled(
    kernel: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    capability: int,
    job: str,
    seen: set[tuple[object, ...]],
) -> Compiled | None:
    """Bind and compile for one target; None if that was done before."""
    compiler = importlib.import_module("triton.compiler")
    jit = importlib.import_module("triton.runtime.jit")
    knobs = importlib.import_module("triton.knobs")
    gpu = importlib.import_module("triton.backends.compiler").GPUTarget
    target = gpu("cuda", capability, 32)
    name, of = kernel.fn.__name__, f"sm_{capability}"
    constants: dict[str, str] = {}
    start = time.perf_counter()
    try:
        # As JITFunction.run does, with the target given instead of asked from the driver.
        options = dict(kwargs)
        options["debug"] = options.get("debug", kernel.debug) or knobs.runtime.debug
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        backend = compiler.make_backend(target)
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialised, chosen = bind(*args, **options)
        key = (kernel.cache_key, of, str(specialised), str(sorted(map(str, chosen.items()))))
        if key in seen:
            return None
        seen.add(key)
        parsed, signature, constexprs, attributes = kernel._pack_args(
            backend, options, bound, specialised, chosen
        )
        constants = {
            kernel.params[path[0]].name: str(value)
            for path, value in constexprs.items()
            if kernel.params[path[0]].is_constexpr
        }
        source = compiler.ASTSource(kernel, signature, constexprs, attributes)
        binary = compiler.compile(source, target=target, options=parsed.__dict__)
        registers, spilled = _resources(binary.asm["cubin"], binary.metadata.name)
    except Exception as error:  # whatever the compiler raises is the answer
        return Compiled(
            job=job,
            kernel=name,
            target=of,
            constants=constants,
            seconds=time.perf_counter() - start,
            error=_text(error),
        )
    return Compiled(
        job=job,
        kernel=name,
        target=of,
        registers=registers,
        shared_bytes=binary.metadata.shared,
        spill_bytes=spilled,
        num_warps=binary.metadata.num_warps,
        num_stages=binary.metadata.num_stages,
        constants=constants,
        features=tuple(
            each for each, pattern in _FEATURES.items() if re.search(pattern, binary.asm["ptx"])
        ),
        seconds=time.perf_counter() - start,
        error=_unlaunchable(binary.metadata, registers, capability),
    )


def _text(error: BaseException, limit: int = 4000) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= limit else text[:limit] + " ..."


def _unlaunchable(metadata: Any, registers: int, capability: int) -> str | None:
    """Why a launch would fail although the kernel compiles (what a driver would check)."""
    threads = metadata.num_warps * 32
    limit = _SHARED_LIMIT.get(capability, metadata.shared)
    if metadata.shared > limit:
        return (
            f"takes {metadata.shared} bytes of shared memory, a block has {limit}: smaller tiles "
            "or fewer stages"
        )
    if (getattr(metadata, "tmem_size", None) or 0) > 512:
        return f"takes {metadata.tmem_size} columns of tensor memory, a block has 512"
    if threads * registers > _REGISTER_FILE:
        return f"{threads} threads of {registers} registers: a block has {_REGISTER_FILE}"
    return None


@functools.cache
def _cuobjdump() -> str:
    return importlib.import_module("triton.knobs").nvidia.cuobjdump.path


def _resources(cubin: bytes, name: str) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, read from the binary by NVIDIA's own tool.

    Triton itself reads the same two from the driver, once a kernel is loaded on a GPU.
    """
    # In memory: a process that is cut off leaves no folder behind.
    with os.fdopen(os.memfd_create("kernel.cubin"), "wb") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", f"/proc/self/fd/{file.fileno()}"],
            pass_fds=[file.fileno()],
            capture_output=True,
            text=True,
            check=False,
        )
    line = re.search(rf"Function {re.escape(name)}:\s*(.*)", said.stdout)
    figures = dict(re.findall(r"(\w+):(\d+)", line.group(1))) if line else {}
    if "REG" not in figures:
        raise CompileError(
            f"cuobjdump tells no resource usage of {name}: {(said.stderr or said.stdout).strip()}"
        )
    return int(figures["REG"]), int(figures.get("STACK", 0)) + int(figures.get("LOCAL", 0))


# --- jobs in a child process ----------------------------------------------------------------------


def compile_in_child(
    jobs: Sequence[Job],
    timeout: float,
    *,
    targets: Sequence[int] = TARGETS,
    on_result: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Run ``jobs`` in a Python that compiles and does not launch; ``timeout`` seconds in all.

    Never raises for what a job does: one that raises, launches no kernel, ends the process or is
    cut off is an entry with an ``error`` and ``kernel`` "", in the order of the jobs; a new child
    goes on behind a job that ended the process. The child and all it started are gone when this
    returns, also by an exception (KeyboardInterrupt). ``on_result`` is called as results come in.

    Raises:
        CompileError: ``timeout`` is not positive, an argument is nothing that JSON can hold, or
            this process is itself such a child.
    """
    if MARK in os.environ:
        raise CompileError("This process compiles or tries a kernel for another: it starts none.")
    if not timeout > 0:
        raise CompileError(f"timeout is {timeout} s: it must be positive.")
    deadline = time.monotonic() + timeout
    results: list[Compiled] = []

    def keep(result: Compiled) -> None:
        results.append(result)
        if on_result is not None:
            on_result(result)

    waiting = list(jobs)
    while waiting:
        done, why = _run_child(waiting, targets, deadline, keep)
        waiting = waiting[done:]
        if why is None:
            break
        timed_out = time.monotonic() >= deadline
        # A crash is the fault of the job that was running; out of time are all that remain.
        for job in waiting if timed_out else waiting[:1]:
            text = f"not compiled within {timeout:g} s" if timed_out else why
            keep(Compiled(job=job.name, kernel="", target="", error=text))
        waiting = [] if timed_out else waiting[1:]
    return results


def _run_child(
    jobs: Sequence[Job],
    targets: Sequence[int],
    deadline: float,
    keep: Callable[[Compiled], None],
) -> tuple[int, str | None]:
    """One child. Gives how many jobs it finished, and why it stopped before the last, else None."""
    try:
        request = json.dumps(
            {"jobs": [dataclasses.asdict(job) for job in jobs], "targets": list(targets)}
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise CompileError(f"A job's argument must be something JSON can hold: {error}.") from error
    done = 0

    def take(message: dict[str, Any]) -> bool:
        nonlocal done
        if done == len(jobs) or len(message) != 1:
            return False
        if message == {"done": jobs[done].name}:
            done += 1
            return True
        try:
            result = Compiled.from_dict(message.get("result"))
        except CompileError:
            return False
        if result.job != jobs[done].name:
            return False
        keep(result)
        return True

    ended = run_child(
        "workbench.kernels.triton_compile",
        request,
        deadline,
        take,
        TRITON_INTERPRET="0",
        CUDA_VISIBLE_DEVICES="",  # no GPU is needed, and none can be touched
    )
    if done == len(jobs):
        return done, None
    if ended.late:
        return done, "time is up"
    if ended.spoiled:
        return done, "the compiling process wrote something that is no result"
    tail = ended.output.strip().splitlines()[-3:]
    return done, f"the compiling process ended with {ended.how}: {' / '.join(tail) or 'no message'}"


def _resolve(call: str) -> Callable[[Any], object]:
    """The function that "module:function" or "file.py:function" names."""
    where, _, name = call.rpartition(":")
    if not where or not name:
        raise CompileError(f"{call!r} is no function: write module:function or file.py:function.")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        if spec is None or spec.loader is None or not Path(where).is_file():
            raise CompileError(f"There is no file {where} to take {name} from.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and inspect look a module up by its name
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    function: Callable[[Any], object] | None = getattr(module, name, None)
    if not callable(function):
        raise CompileError(f"{where} has no function {name}.")
    return function


def _main() -> None:
    """The child: a request on stdin, a JSON line a result on what was stdout."""
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a job prints must not mix with the answers

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    def tell(result: Compiled) -> None:
        say({"result": result.to_dict()})

    for job in (Job(**fields) for fields in request["jobs"]):
        error = None
        met: list[Compiled] = []
        try:
            with intercepted(request["targets"], job=job.name, on_result=tell) as met:
                _resolve(job.call)(job.argument)
        except Exception as raised:
            error = _text(raised)
        if error is None and not met:
            error = "launches no Triton kernel"
        if error is not None:
            tell(Compiled(job=job.name, kernel="", target="", error=error))
        say({"done": job.name})


if __name__ == "__main__":
    _main()
