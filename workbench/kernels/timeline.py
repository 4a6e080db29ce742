"""A kernel timeline of one step, as a trace file that Perfetto and chrome://tracing open.

While a step is traced, the model's tables of kernels are replaced by tables whose functions carry
their name, "boundary[triton]", into the profiler: on a CPU the operators below such a span are its
own, on a GPU the kernels that were launched inside it. Outside the block nothing has changed.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from workbench import hardware
from workbench.errors import KernelError
from workbench.files import write_whole
from workbench.kernels import registry
from workbench.kernels.catalogue import OPS
from workbench.kernels.tables import Kernels, Resolution

# Complete events of these categories are kept: what ran, and where it was launched.
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
SPANS = ("user_annotation", "gpu_user_annotation")
_KEPT = {"cpu_op", "cuda_runtime", "cuda_driver", "ac2g", "async_cpu_to_gpu", *KERNELS, *SPANS}


class HasKernels(Protocol):
    """A model whose kernels can be pinned: ``workbench.model.beam.Beam``."""

    pinned: Resolution | None

    def kernels(self) -> Resolution: ...


@contextmanager
def instrumented(model: HasKernels) -> Iterator[Resolution]:
    """Inside the block every call of an operation is a span "op[variant]" of the profiler.

    The selection in force when the block begins is what the model runs in it.
    """
    before = model.pinned
    found = model.kernels()
    named: dict[tuple[str, Callable[..., Any]], str] = {}
    for row in found.rows:
        function = registry.find(row.op, row.resolved).function
        named[row.op, function] = f"{row.op}[{row.resolved}]"
    tables: dict[int, Kernels] = {}

    def table(kernels: Kernels) -> Kernels:
        if id(kernels) not in tables:
            functions = {op: getattr(kernels, op) for op in OPS}
            tables[id(kernels)] = Kernels(
                {op: _spanned(named.get((op, f), op), f) for op, f in functions.items()}
            )
        return tables[id(kernels)]

    model.pinned = Resolution(
        layers=tuple(table(k) for k in found.layers), model=table(found.model), rows=found.rows
    )
    try:
        yield model.pinned
    finally:
        model.pinned = before


def _spanned(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A traced step: ``document`` is the Chrome trace, times in it in microseconds.

    ``spans`` sums the time of each "op[variant]": on a GPU that of the kernels launched in it, on
    a CPU the wall time of its calls, both in microseconds and with the profiler's own cost, so
    that shares are what to read. ``device`` is cpu or cuda.
    """

    document: Mapping[str, Any]
    spans: Mapping[str, float]
    calls: Mapping[str, int]
    device: str

    def write(self, path: str | Path) -> None:
        """Write the trace (JSON), whole or not at all; open it at ui.perfetto.dev, which reads it
        in the browser, or in chrome://tracing.

        Raises:
            FileError: it cannot be written.
        """
        write_whole(path, json.dumps(self.document, allow_nan=False).encode())


def trace_step(
    model: HasKernels, step: Callable[[], Any], *, device: str = "cpu", warm_up: int = 2
) -> Timeline:
    """Trace one call of ``step``, which runs ``model``; ``warm_up`` calls go before, untraced.

    On a CPU an interpreted Triton kernel is traced as the interpreter's work, which is no speed.

    Raises:
        KernelError: the profiler gave no spans, so the step did not run this model.
    """
    gpu = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize()

    with instrumented(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events.*")
        for _ in range(warm_up):
            step()
        wait()
        with profile(activities=activities) as profiler:
            with record_function("step"):
                step()
            wait()
    with tempfile.TemporaryDirectory(prefix="workbench-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        raw = json.loads(path.read_text(encoding="utf-8"))
    return _timeline(raw, "cuda" if gpu else "cpu")


def _timeline(raw: Mapping[str, Any], device: str) -> Timeline:
    events = [e for e in raw.get("traceEvents", ()) if e.get("ph") == "M" or _kept(e)]
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in SPANS and _is_op(e)]
    if not spans:
        raise KernelError(
            "the traced step called no operation of this model; give a step that runs its forward"
        )
    host = [e for e in spans if e["cat"] == "user_annotation"]
    calls: dict[str, int] = {}
    for e in host:
        calls[e["name"]] = calls.get(e["name"], 0) + 1
    totals = _gpu_totals(events, host) if device == "cuda" else _totals(host)
    # Perfetto sorts; a reader with a text editor does not.
    start = min(float(e["ts"]) for e in events if e.get("ph") == "X")
    for e in events:
        if "ts" in e and e.get("ph") != "M":
            e["ts"] = round(float(e["ts"]) - start, 3)
    events.sort(key=lambda e: (e.get("ph") != "M", float(e.get("ts", 0))))
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": "workbench kernels bench --timeline",
            "device": device,
            "hardware": torch.cuda.get_device_name() if device == "cuda" else hardware.cpu_name(),
            "versions": {k: v for k, v in hardware.versions().items() if v is not None},
        },
        "traceEvents": events,
    }
    return Timeline(document=document, spans=totals, calls=calls, device=device)


def _kept(event: Mapping[str, Any]) -> bool:
    if event.get("ph") == "X":
        return event.get("cat") in _KEPT and "ts" in event and "dur" in event
    return event.get("ph") in ("s", "f") and event.get("cat") in _KEPT


def _is_op(event: Mapping[str, Any]) -> bool:
    return str(event.get("name", "")).partition("[")[0] in OPS


def _totals(spans: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for e in spans:
        found[e["name"]] = found.get(e["name"], 0.0) + float(e["dur"])
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _gpu_totals(events: list[dict[str, Any]], host: list[dict[str, Any]]) -> dict[str, float]:
    """Device time of the kernels that were launched inside each span, by their correlation."""
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found: dict[str, float] = {}
    for e in events:
        if e.get("cat") not in KERNELS:
            continue
        launch = launches.get(e.get("args", {}).get("correlation"))
        if launch is None:
            continue
        at = float(launch["ts"])
        for span in host:
            begun = float(span["ts"])
            if span["tid"] == launch["tid"] and begun <= at <= begun + float(span["dur"]):
                e.setdefault("args", {})["operation"] = span["name"]
                found[span["name"]] = found.get(span["name"], 0.0) + float(e["dur"])
                break
        else:
            found["outside operations"] = found.get("outside operations", 0.0) + float(e["dur"])
    return dict(sorted(found.items(), key=lambda item: -item[1]))
