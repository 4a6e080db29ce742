"""An engine's start-up log against our prediction, line by line, knowing what each line means.

What the log states is used, what it does not is asked for or taken from the release's defaults and
said so. The memory in the log is rounded to 0.01 GiB, so a prediction from it is a range: *agrees*
means that the logged figure lies in it, *close* that it is at most 2 % beside it. What is left for
the cache is modelled: its range is a workspace with and without the allowance for the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from workbench.datasheet import GpuSheet, sheet
from workbench.model.asked import SizingError, instance, shown
from workbench.model.config import BeamConfig
from workbench.model.display import gib
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_planner import KVPlan
from workbench.model.kv_settings import KVDtype
from workbench.model.layout import Layout
from workbench.model.plan import UTILIZATION, budget_bytes
from workbench.model.presets import config_of, drafter_config_of
from workbench.model.sizing import size_kv
from workbench.model.weights import Precision, precision, size_weights
from workbench.model.workspace import PROCESS_BYTES, buffer_bytes, workspace_bytes
from workbench.serving.engine_versions import CONCURRENCY_MEANINGS, VersionRules
from workbench.serving.startup_log import (
    CONCURRENCY_HALF_WIDTH,
    StartupLog,
    parse_startup_log,
)

CLOSE = 0.02  # beyond it a figure differs
_PLANNER = "0.33"  # the release whose grouping rule kv_planner.py states

Verdict = Literal["agrees", "close", "differs", "not stated"]

_KV_DTYPES: dict[str, KVDtype] = {
    "auto": "bf16",
    "bfloat16": "bf16",
    "float16": "bf16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One line of the log: what it says, what was predicted (a range), and what it means.

    ``logged`` is None where the log is silent; it is rounded to +- ``rounding``. ``unit`` is
    "bytes", "tokens", "groups" or "x".
    """

    line: str
    logged: float | None
    low: float
    high: float
    unit: str
    how: str
    meaning: str
    rounding: float = 0.0

    @property
    def error(self) -> float | None:
        """Relative distance of the logged figure from the predicted range; 0 inside it.

        The log rounds, so a figure within its last digit of the range is inside.
        """
        if self.logged is None:
            return None
        low, high = self.low - self.rounding, self.high + self.rounding
        nearest = min(max(self.logged, low), high)
        return (self.logged - nearest) / nearest if nearest else float(self.logged != 0)

    @property
    def verdict(self) -> Verdict:
        """How the two compare."""
        error = self.error
        if error is None:
            return "not stated"
        return "agrees" if error == 0 else "close" if abs(error) <= CLOSE else "differs"

    @property
    def predicted_text(self) -> str:
        """The predicted range in words."""
        low, high = figure(self.low, self.unit), figure(self.high, self.unit)
        return low if low == high else f"{low} … {high}"

    @property
    def logged_text(self) -> str:
        """The logged figure in words."""
        return "-" if self.logged is None else figure(self.logged, self.unit)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Reconciliation:
    """A log beside its prediction; :func:`reconcile` makes it.

    ``settings`` are what was computed with: name to (value, where it comes from). Strings that
    come from the log are a server's text: escape them before they become HTML.
    """

    version: str | None
    settings: dict[str, tuple[Any, str]]
    rows: tuple[Comparison, ...]
    caveats: tuple[str, ...]

    @property
    def compared(self) -> int:
        """Lines of the log that could be compared."""
        return sum(row.logged is not None for row in self.rows)

    @property
    def agrees(self) -> bool:
        """Whether something was compared, and no stated figure differs by more than 2 %."""
        return self.compared > 0 and all(row.verdict != "differs" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "version": self.version,
            "agrees": self.agrees,
            "compared": self.compared,
            "settings": {
                name: {"value": value, "from": source}
                for name, (value, source) in self.settings.items()
            },
            "rows": [
                {
                    "line": row.line,
                    "logged": row.logged,
                    "predicted_low": row.low,
                    "predicted_high": row.high,
                    "unit": row.unit,
                    "error": row.error,
                    "verdict": row.verdict,
                    "how": row.how,
                    "meaning": row.meaning,
                }
                for row in self.rows
            ],
            "caveats": list(self.caveats),
        }

    def __repr__(self) -> str:
        lines = [f"vLLM {self.version or 'of unknown version'}"]
        for row in self.rows:
            lines.append(
                f"{row.line:<26} logged {row.logged_text:>18}   predicted "
                f"{row.predicted_text:<36} {row.verdict}"
            )
        lines += [f"note: {caveat}" for caveat in self.caveats]
        return "\n".join(lines)


def reconcile(
    log: StartupLog | str,
    model: BeamConfig | str,
    *,
    drafter: DFlash2Config | str | None = None,
    gpu: GpuSheet | str | None = None,
    weights: str | Precision = "bf16",
    expert_parallel: bool = False,
    version: str | None = None,
    context: int | None = None,
    tp: int | None = None,
    kv_dtype: KVDtype | None = None,
    block_size: int | None = None,
    batched_tokens: int | None = None,
    async_scheduling: bool | None = None,
) -> Reconciliation:
    """Compare an engine's start-up log (text, or already parsed) with what is predicted for it.

    ``model`` is the model that was served (a configuration, name or folder), ``drafter`` likewise.
    With ``gpu`` the memory left for the cache is predicted too, for ``weights`` of that precision.
    The other arguments stand in for what the log does not say; where it does, it is believed.

    Raises:
        StartupLogError: the text holds no such lines, or lines that contradict each other.
        SizingError: what the log says cannot be of this model.
    """
    if version is not None:
        instance("version", version, str, 'a version such as "0.33.0"')
    if isinstance(log, str):
        if log.strip() and len(log.splitlines()) == 1 and log.strip().endswith((".txt", ".log")):
            raise SizingError(
                f"{shown(log)} looks like a path; give the text in the file: Path(...).read_text()"
            )
        parsed = parse_startup_log(log, version=version)
    else:
        instance("log", log, StartupLog, "the text of a start-up log, or a StartupLog")
        parsed = log
    rules = parsed.rules
    config, extra = config_of(model), drafter_config_of(drafter)
    if gpu is not None:
        instance("gpu", gpu, (str, GpuSheet), "the name of a GPU or its GpuSheet")
    card = sheet(gpu) if isinstance(gpu, str) else gpu
    settings: dict[str, tuple[Any, str]] = {}

    remarks: list[str] = []

    def setting(name: str, logged: Any, given: Any, default: Any, where: str) -> Any:
        words = name.replace("_", " ")
        if logged is not None and given is not None and logged != given:
            remarks.append(
                f"The log says {words} {logged}; the {given} that was given is not used."
            )
        elif logged is None and given is None and default is not None:
            remarks.append(f"The log does not say {words}: taken as {default} ({where}).")
        value, source = (
            (logged, "log") if logged is not None
            else (given, "given") if given is not None
            else (default, where)
        )  # fmt: skip
        if value is None:
            raise SizingError(f"the log does not say {words}; give {name}=")
        settings[name] = (value, source)
        return value

    length = setting("context", parsed.max_model_len, context, None, "")
    ranks = setting("tp", parsed.tensor_parallel_size, tp, 1, "assumed")
    block = setting("block_size", parsed.block_size, block_size, 16, "the engine's default")
    batch = setting(
        "batched_tokens", parsed.max_num_batched_tokens, batched_tokens, 8192, "assumed"
    )
    both = setting(
        "async_scheduling", parsed.async_scheduling, async_scheduling,
        rules.async_by_default, "the release's default",
    )  # fmt: skip
    dtype = setting("kv_dtype", _kv_dtype(parsed), kv_dtype, "bf16", "assumed")
    batches = rules.in_flight_batches[bool(both)]
    sizing = size_kv(
        config,
        context=length,
        kv_dtype=dtype,
        tp=ranks,
        block_size=block,
        # The release decides how many batches are in flight; the sizing's own rule is 0.33's.
        batched_tokens=batch * batches,
        async_scheduling=False,
        drafter=extra,
    )
    old = rules.concurrency == "tokens_over_length"
    if parsed.hybrid_manager_off or old:
        if sizing.hybrid_off_plan is None:
            raise SizingError(sizing.hybrid_off_refusal or "the engine refuses these layers")
        plan = sizing.hybrid_off_plan
    else:
        plan = sizing.plan
    rows = _rows_of_memory(parsed, config, extra, card, precision(weights), ranks, batch,
                           expert_parallel)  # fmt: skip
    rows += _rows_of_pool(parsed, rules, plan, length, batch * batches, block)
    return Reconciliation(
        version=parsed.version,
        settings=settings,
        rows=tuple(rows),
        caveats=(*_said(parsed), *remarks, *_caveats(parsed, extra)),
    )


def _kv_dtype(log: StartupLog) -> KVDtype | None:
    if log.kv_cache_dtype is None:
        return None
    if log.kv_cache_dtype not in _KV_DTYPES:
        raise SizingError(
            f"the log's KV cache dtype {log.kv_cache_dtype[:40]!r} is not sized here; "
            f"known are {', '.join(sorted(_KV_DTYPES))}"
        )
    return _KV_DTYPES[log.kv_cache_dtype]


def _rows_of_memory(
    log: StartupLog,
    config: BeamConfig,
    drafter: DFlash2Config | None,
    gpu: GpuSheet | None,
    weights: Precision,
    tp: int,
    batched_tokens: int,
    expert_parallel: bool,
) -> list[Comparison]:
    layout = Layout(tp=tp, dp=log.data_parallel_size or 1, expert_parallel=expert_parallel)
    sized = size_weights(config, weights, layout, drafter).per_gpu_bytes
    loaded = sized + buffer_bytes(config, drafter, layout)
    rows = [
        Comparison(
            line="Model loading took",
            logged=log.model_loading_bytes,
            low=loaded,
            high=loaded,
            unit="bytes",
            how=f"weights in {weights.name} and their tables on one GPU of {layout.name}, exact",
            meaning="GPU memory that loading took: parameters, tables, what allocating rounds up.",
            rounding=log.model_loading_half_width,
        )
    ]
    if gpu is None:
        return rows
    utilization = log.gpu_memory_utilization or (
        log.rules.gpu_memory_utilization if log.version else UTILIZATION
    )
    rows_at_once = log.max_num_seqs or 256
    work = workspace_bytes(config, layout, batched_tokens, rows_at_once, drafter=drafter)
    left = budget_bytes(gpu.usable_bytes, utilization) - sized - work
    rows.append(
        Comparison(
            line="Available KV cache memory",
            logged=log.available_kv_bytes,
            low=max(0, left),
            high=max(0, left + PROCESS_BYTES),
            unit="bytes",
            how=(
                f"{gib(gpu.usable_bytes)} x {utilization:g} - weights {gib(sized)} - workspace "
                f"{gib(work)} (modelled), of which {gib(PROCESS_BYTES)} an allowance"
            ),
            meaning=(
                "What profiling left for the cache on the GPU with the least: a share of its "
                "memory, less weights, activations and what else the process holds."
            ),
            rounding=log.available_kv_half_width,
        )
    )
    return rows


def _rows_of_pool(
    log: StartupLog,
    rules: VersionRules,
    plan: KVPlan,
    length: int,
    in_flight: int,
    block_size: int,
) -> list[Comparison]:
    """Blocks, concurrency and tokens that follow from the logged memory."""
    rows = _rows_of_groups(log, plan)
    product = _row_of_product(log, rules, length)
    if log.num_gpu_blocks is not None:
        blocks = [log.num_gpu_blocks] * 2
        how = "the logged number of blocks"
    elif log.available_kv_bytes is not None:
        half = log.available_kv_half_width
        blocks = [
            max(0, log.available_kv_bytes + side * half) // plan.block_bytes for side in (-1, 1)
        ]
        how = f"the logged memory in blocks of {plan.block_bytes:,} bytes"
    else:
        return rows + product
    a_sequence = plan.blocks_per_sequence(length, in_flight)
    tokens: list[float]
    concurrency: list[float]
    if rules.concurrency == "tokens_over_length":
        tokens = [float(n * block_size) for n in blocks]
        concurrency = [n / length for n in tokens]
        how_many = f"{how}, of {block_size} tokens, over {length:,}"
    else:
        concurrency = [n / a_sequence for n in blocks]
        smallest = min(group.block_size for group in plan.groups)
        if rules.tokens == "blocks_per_group":
            tokens = [float(n // len(plan.groups) * smallest) for n in blocks]
        else:
            tokens = [float(int(n * length)) for n in concurrency]
        how_many = f"{how}, {a_sequence:,} for a sequence of {length:,} tokens"
    return [
        *rows,
        Comparison(
            line="Maximum concurrency",
            logged=log.max_concurrency,
            low=concurrency[0],
            high=concurrency[1],
            unit="x",
            how=how_many,
            meaning=CONCURRENCY_MEANINGS[rules.concurrency],
            rounding=CONCURRENCY_HALF_WIDTH,
        ),
        Comparison(
            line="KV cache size",
            logged=log.num_tokens,
            low=tokens[0],
            high=tokens[1],
            unit="tokens",
            how=f"from {how}",
            meaning=log.explanation,
        ),
    ]


def _rows_of_groups(log: StartupLog, plan: KVPlan) -> list[Comparison]:
    if log.group_block_sizes is None:
        return []
    count = len(plan.groups)
    return [
        Comparison(
            line="KV cache groups",
            logged=len(log.group_block_sizes),
            low=count,
            high=count,
            unit="groups",
            how=f"the planner's rule on {len(plan.layers)} layers",
            meaning="Groups of layers that share a block table; a drafter changes them.",
        )
    ]


def _row_of_product(log: StartupLog, rules: VersionRules, length: int) -> list[Comparison]:
    """Where the memory is not stated, the two other figures can be held against each other."""
    if rules.tokens != "concurrency_x_length" or log.max_concurrency is None:
        return []
    low, high = ((log.max_concurrency + side * CONCURRENCY_HALF_WIDTH) * length for side in (-1, 1))
    return [
        Comparison(
            line="KV cache size",
            logged=log.num_tokens,
            low=int(low),
            high=int(high) + 1,
            unit="tokens",
            how="the logged concurrency x max_model_len",
            meaning=log.explanation,
        )
    ]


def _said(log: StartupLog) -> list[str]:
    """The log's own caveats, less the one about a setting that a remark speaks of."""
    return [text for text in log.caveats if "whether asynchronous scheduling is on" not in text]


def _caveats(log: StartupLog, drafter: DFlash2Config | None) -> list[str]:
    notes = []
    if log.version is not None and not log.version.startswith(_PLANNER):
        notes.append(
            f"How layers are grouped is known of vLLM {_PLANNER} and used for {log.version} too; "
            "older releases padded kinds of nearly equal number more seldom."
        )
    if log.speculative and drafter is None:
        notes.append(
            "The engine ran with a drafter and none was given here: its layers are missing."
        )
    if drafter is not None and log.speculative is False:
        notes.append("A drafter was given, but the engine ran without one.")
    for what, size in (
        ("pipeline", log.pipeline_parallel_size),
        ("decode context", log.decode_context_parallel_size),
    ):
        if size is not None and size > 1:
            notes.append(
                f"The engine ran {what} parallel over {size}, which is not predicted here."
            )
    return notes


def figure(value: float, unit: str) -> str:
    """A number with its unit, as the log writes it."""
    if unit == "bytes":
        return gib(value)
    if unit == "x":
        return f"{value:,.2f}x"
    return f"{value:,.0f} {unit}"
