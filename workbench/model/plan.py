"""A plan: these GPUs, these weights, so much context, so many sequences. Does it fit, how far?

A GPU's memory goes, in this order, to what the engine may not touch (``1 - utilization``), the
weights, the workspace (activations of one batch, tables, the process), and what is left is the KV
cache's pool. Weights and KV cache are exact; the workspace is **modelled** and states so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from workbench.datasheet import GpuSheet, sheet
from workbench.kernels.roofline import data_sheet_rates
from workbench.model.asked import SizingError, instance, path, shown, whole
from workbench.model.config import BeamConfig, is_number
from workbench.model.display import Shown, gib
from workbench.model.drafter_config import DFlash2Config
from workbench.model.engine_limits import notes, refusals
from workbench.model.kv_inverse import largest
from workbench.model.kv_settings import MOST_SEQUENCES, KVDtype
from workbench.model.layout import Layout, layouts
from workbench.model.presets import (
    assumed_drafter,
    beam_501b_dflash2,
    config_of,
    drafter_config_of,
)
from workbench.model.serve_command import Speculation, engine_arguments, shell
from workbench.model.sizing import KVSizing, size_kv
from workbench.model.step_values import StepTime
from workbench.model.steptime import decode_step
from workbench.model.weights import Precision, WeightSizing, precision, size_weights
from workbench.model.workspace import workspace_bytes

UTILIZATION = 0.92  # the engine's default gpu_memory_utilization (vLLM 0.33)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Shown):
    """What a layout needs and leaves on each GPU; :func:`make_plan` makes it.

    ``kv`` sizes one data-parallel group: ``sequences`` is spread over ``layout.dp`` of them.
    ``workspace_bytes`` is modelled. ``max_context`` is the longest context at this concurrency,
    ``max_sequences`` the most sequences at this context, over all groups, that the engine also runs
    at once (a batch has a token for each, and for each of its drafts); both by the engine's own
    account, exactly, and 0 where nothing fits. ``refusals`` are reasons why the engine would not
    start although the memory suffices.
    """

    model: str
    config: BeamConfig
    gpu: GpuSheet
    layout: Layout
    precision: Precision
    sequences: int
    weights: WeightSizing
    kv: KVSizing
    utilization: float
    workspace_bytes: int
    max_context: int
    max_sequences: int
    speculation: Speculation | None
    checkpoint: str | None
    refusals: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def memory_bytes(self) -> int:
        """One GPU's memory."""
        return self.gpu.usable_bytes

    @property
    def budget_bytes(self) -> int:
        """What the engine may use of it."""
        return budget_bytes(self.memory_bytes, self.utilization)

    @property
    def weights_bytes(self) -> int:
        """Weights on the fullest GPU, the drafter's included."""
        return self.weights.per_gpu_bytes

    @property
    def pool_bytes(self) -> int:
        """What is left for the KV cache; negative where the weights alone do not fit."""
        return self.budget_bytes - self.weights_bytes - self.workspace_bytes

    @property
    def kv_bytes(self) -> int:
        """What the engine needs there to admit the plan's sequences at their full length."""
        return self.kv.pool_bytes

    @property
    def free_bytes(self) -> int:
        """What the KV cache leaves of the pool; negative by how much the plan does not fit."""
        return self.pool_bytes - self.kv_bytes

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.free_bytes >= 0

    @property
    def runs(self) -> bool:
        """Whether it fits and the engine accepts the layout."""
        return self.fits and not self.refusals

    @property
    def sequences_per_group(self) -> int:
        """Sequences of one data-parallel group."""
        return self.kv.settings.sequences

    @property
    def arguments(self) -> list[str]:
        """``vllm serve`` and its arguments, one word each."""
        return engine_arguments(
            layout=self.layout,
            kv=self.kv.settings,
            checkpoint=self.checkpoint,
            speculation=self.speculation,
            utilization=self.utilization,
            sequences=self.sequences_per_group,
        )

    @property
    def serve_command(self) -> str:
        """The same for a shell."""
        return shell(self.arguments)

    @property
    def reach(self) -> str:
        """How far it goes, in words."""
        longest = f"{self.max_context:,} tokens"
        if self.max_context == self.config.max_position_embeddings:
            longest = f"the model's own {longest}"
        return (
            f"at this concurrency up to {longest}; at this context up to {self.max_sequences:,} "
            f"sequences on all {self.layout.gpus} GPUs together"
        )

    @property
    def verdict(self) -> str:
        """In one sentence: whether it runs, and by how much."""
        what = (
            f"{self.model} in {self.precision.name} on {self.layout.gpus} x {self.gpu.name} "
            f"({self.layout.name})"
        )
        if self.weights_bytes > self.budget_bytes:
            return (
                f"{what} does not fit: a GPU's weights of {gib(self.weights_bytes)} exceed the "
                f"{gib(self.budget_bytes)} that the engine may use; take more GPUs or narrower "
                "weights"
            )
        if self.pool_bytes <= 0:
            return (
                f"{what} does not fit: a GPU's weights of {gib(self.weights_bytes)} and workspace "
                f"of {gib(self.workspace_bytes)} leave nothing of the {gib(self.budget_bytes)} "
                "that the engine may use; take more GPUs, narrower weights or fewer batched tokens"
            )
        if not self.fits and not self.max_sequences:
            return (
                f"{what} does not fit: short by {gib(-self.free_bytes)} a GPU for a single "
                f"sequence a group of {self.kv.settings.context:,} tokens; at most "
                f"{self.max_context:,} tokens at the concurrency asked for"
            )
        if not self.fits:
            return (
                f"{what} does not fit: short by {gib(-self.free_bytes)} a GPU for "
                f"{self.sequences:,} x {self.kv.settings.context:,} tokens; at most "
                f"{self.max_sequences:,} sequences of that length, or {self.max_context:,} tokens "
                "at that concurrency"
            )
        if self.refusals:
            return f"{what} fits, but the engine refuses it: {self.refusals[0]}"
        return f"{what} fits with {gib(self.free_bytes)} a GPU to spare"

    def decode_step(self) -> StepTime | None:
        """One plain decode step of all sequences, **modelled** at data sheet rates.

        None where GPUs beyond one NVLink domain take part: the network between is not known.
        """
        try:
            return decode_step(
                self.config,
                batch=self.sequences,
                context=self.kv.settings.context,
                rates=data_sheet_rates(self.gpu),
                layout=self.layout,
                precision=self.precision,
                kv_dtype=self.kv.settings.kv_dtype,
            )
        except SizingError:
            return None

    def __repr__(self) -> str:
        rows = (
            ("weights, exact", self.weights_bytes),
            ("workspace, modelled", self.workspace_bytes),
            ("KV cache, engine admission", self.kv_bytes),
            ("free", self.free_bytes),
            ("the engine may use", self.budget_bytes),
        )
        drafter = "counted" if self.kv.drafter is not None else "none"
        lines = [
            f"{self.verdict}; drafter: {drafter}",
            *(f"  {name:<28}{gib(size):>14}" for name, size in rows),
        ]
        lines.append(self.reach)
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of ``workbench plan --json``."""
        settings, step = self.kv.settings, self.decode_step()
        return {
            "model": self.model,
            "gpu": self.gpu.name,
            "gpus": self.layout.gpus,
            "layout": {
                "name": self.layout.name,
                "tp": self.layout.tp,
                "dp": self.layout.dp,
                "expert_parallel": self.layout.expert_parallel,
            },
            "weights": self.precision.name,
            "kv_dtype": settings.kv_dtype,
            "context": settings.context,
            "sequences": self.sequences,
            "sequences_per_group": self.sequences_per_group,
            "batched_tokens": settings.batched_tokens,
            "fits": self.fits,
            "runs": self.runs,
            "verdict": self.verdict,
            "refusals": list(self.refusals),
            "notes": list(self.notes),
            "per_gpu": {
                "memory_bytes": self.memory_bytes,
                "budget_bytes": self.budget_bytes,
                "weights_bytes": self.weights_bytes,
                "weights": dict(self.weights.per_gpu),
                "workspace_bytes": self.workspace_bytes,
                "kv_bytes": self.kv_bytes,
                "kv_ideal_bytes": self.kv.per_gpu("ideal").total,
                "free_bytes": self.free_bytes,
            },
            "modelled_decode_ms": None if step is None else step.milliseconds,
            "max_context": self.max_context,
            "max_sequences": self.max_sequences,
            "arguments": self.arguments,
            "serve_command": self.serve_command,
        }


def make_plan(
    model: BeamConfig | str,
    gpu: GpuSheet | str,
    *,
    gpus: int | None = None,
    layout: Layout | None = None,
    weights: str | Precision = "bf16",
    kv_dtype: KVDtype = "fp8",
    context: int,
    sequences: int = 1,
    batched_tokens: int = 8192,
    block_size: int = 16,
    async_scheduling: bool = True,
    drafter: DFlash2Config | str | None = None,
    speculation: Speculation | None = None,
    checkpoint: str | None = None,
    utilization: float = UTILIZATION,
    name: str | None = None,
) -> Plan:
    """Plan a model on ``gpus`` GPUs (or in a given ``layout``). A pure function.

    ``model``, ``gpu`` and ``drafter`` are values, or names as on the command line ("beam-501b",
    "GB200", "beam-501b-dflash2"); ``name`` is what the plan calls the model.

    Without a layout, the first that runs is taken (tensor parallel before data parallel, see
    :func:`~workbench.model.layout.layouts`), or the first of all where none does. ``drafter`` gives
    the drafter's shape; the engine is then asked to use it, as ``speculation`` says.

    Raises:
        SizingError: a value that cannot be, or no layout of so many GPUs exists.
    """
    given: dict[str, Any] = {
        "weights": precision(weights),
        "kv_dtype": kv_dtype,
        "context": context,
        "sequences": sequences,
        "batched_tokens": batched_tokens,
        "block_size": block_size,
        "async_scheduling": async_scheduling,
        "drafter": drafter,
        "speculation": speculation,
        "checkpoint": checkpoint,
        "utilization": utilization,
        "name": name or (model if isinstance(model, str) else "the model"),
    }
    if drafter is not None and speculation is None:
        given["speculation"] = Speculation()
    config, card = config_of(model), _card(gpu)
    if layout is not None:
        instance("layout", layout, Layout, "a Layout, such as Layout(tp=8)")
        if gpus is not None and gpus != layout.gpus:
            raise SizingError(
                f"{layout.name} takes {layout.gpus} GPUs, but {shown(gpus)} are given; "
                "make tp x dp equal to the number of GPUs"
            )
        given |= {"drafter": drafter_config_of(drafter), "remarks": _remarks(drafter)}
        return _plan(config, card, layout, **given)
    if gpus is None:
        raise SizingError("say on how many GPUs, or in which layout")
    plans = all_plans(config, card, gpus=gpus, **given)
    return next((plan for plan in plans if plan.runs), plans[0])


def _remarks(drafter: DFlash2Config | str | None) -> tuple[str, ...]:
    known = isinstance(drafter, str) and drafter == beam_501b_dflash2().name
    return (assumed_drafter(str(drafter)),) if known else ()


def all_plans(
    model: BeamConfig | str, gpu: GpuSheet | str, *, gpus: int, **given: Any
) -> tuple[Plan, ...]:
    """The plan of every layout of ``gpus`` GPUs; arguments as for :func:`make_plan`.

    Raises:
        SizingError: as there.
    """
    config, card = config_of(model), _card(gpu)
    found = layouts(config, gpus)
    if not found:
        raise SizingError(
            f"the model cannot be spread over {gpus:,} GPUs: no split divides its heads, widths "
            "and vocabulary; use another number, such as a power of two"
        )
    options: dict[str, Any] = {"weights": "bf16", "kv_dtype": "fp8", "sequences": 1} | given
    options["weights"] = precision(options["weights"])
    options["remarks"] = _remarks(options.get("drafter"))
    options["drafter"] = drafter_config_of(options.get("drafter"))
    options.setdefault("name", model if isinstance(model, str) else "the model")
    plans = []
    refused: SizingError | None = None
    for layout in found:
        try:
            plans.append(_plan(config, card, layout, **options))
        except SizingError as error:  # a layout that the drafter cannot follow
            refused = error
    if not plans:
        raise refused or SizingError("no layout can be planned")
    return tuple(plans)


def budget_bytes(memory: int, utilization: float) -> int:
    """Bytes of ``memory`` that the engine uses, rounded up as it does."""
    return ceil(memory * utilization)


def _card(gpu: GpuSheet | str) -> GpuSheet:
    if isinstance(gpu, str):
        return sheet(gpu)
    instance("gpu", gpu, GpuSheet, "the name of a GPU or its GpuSheet")
    return gpu


def _plan(
    config: BeamConfig,
    gpu: GpuSheet,
    layout: Layout,
    *,
    weights: Precision,
    kv_dtype: KVDtype,
    context: int,
    sequences: int,
    batched_tokens: int = 8192,
    block_size: int = 16,
    async_scheduling: bool = True,
    drafter: DFlash2Config | None = None,
    speculation: Speculation | None = None,
    checkpoint: str | None = None,
    utilization: float = UTILIZATION,
    name: str = "the model",
    remarks: tuple[str, ...] = (),
) -> Plan:
    if speculation is not None:
        instance("speculation", speculation, Speculation, "a Speculation, or None")
    checkpoint = path("checkpoint", checkpoint)
    if not is_number(utilization) or not 0 < utilization <= 1:
        raise SizingError(
            f"gpu memory utilization must be above 0 and at most 1, not {shown(utilization)}"
        )
    sequences = whole("sequences", sequences, MOST_SEQUENCES)
    sized = size_weights(config, weights, layout, drafter)
    settings: dict[str, Any] = {
        "kv_dtype": kv_dtype,
        "tp": layout.tp,
        "block_size": block_size,
        "batched_tokens": batched_tokens,
        "async_scheduling": async_scheduling,
        "drafter": drafter,
    }
    group = -(-sequences // layout.dp)
    kv = size_kv(config, context=context, sequences=group, **settings)
    batched_tokens = kv.settings.batched_tokens
    workspace = workspace_bytes(config, layout, batched_tokens, group, speculation, drafter)
    room = budget_bytes(gpu.usable_bytes, utilization) - sized.per_gpu_bytes

    def holds(tokens: int, count: int) -> bool:
        """Whether ``count`` sequences of ``tokens`` fit into each group, logits and all."""
        needed = size_kv(config, context=tokens, sequences=count, **settings).pool_bytes
        work = workspace_bytes(config, layout, batched_tokens, count, speculation, drafter)
        return needed + work <= room

    # The engine wants a token of the batch for each sequence, and for each of its drafts.
    most = min(MOST_SEQUENCES, batched_tokens // (speculation.tokens + 1 if speculation else 1))
    return Plan(
        model=name,
        config=config,
        gpu=gpu,
        layout=layout,
        precision=weights,
        sequences=sequences,
        weights=sized,
        kv=kv,
        utilization=utilization,
        workspace_bytes=workspace,
        max_context=largest(config.max_position_embeddings, lambda n: holds(n, group)),
        max_sequences=layout.dp * largest(most, lambda n: holds(kv.settings.context, n)),
        speculation=speculation,
        checkpoint=checkpoint,
        refusals=refusals(config, weights, layout, kv.settings, speculation),
        notes=(*notes(config, weights, layout, gpu, kv.settings, drafter, speculation), *remarks),
    )
