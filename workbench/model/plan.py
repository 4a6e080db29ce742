"""A plan: these GPUs, these weights, so much context, so many sequences. Does it fit, how far?

A GPU's memory goes, in this order, to what the engine may not touch (``1 - utilization``), the
weights, the workspace (activations of one batch, CUDA context and graphs), and what is left is the
KV cache's pool. Weights and KV cache are exact; the workspace is **modelled** and states so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from workbench.datasheet import GpuSheet, sheet
from workbench.model.config import BeamConfig, is_int, is_number, short
from workbench.model.display import Shown, gib
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_planner import SizingError
from workbench.model.layout import Layout, layouts
from workbench.model.presets import config_of, drafter_config_of
from workbench.model.serve_command import Speculation, engine_arguments, shell
from workbench.model.sizing import (
    MOST_SEQUENCES,
    KVDtype,
    KVSizing,
    largest,
    size_kv,
)
from workbench.model.weights import (
    FP8_BLOCK,
    NVFP4_GROUP,
    Precision,
    WeightSizing,
    precision,
    size_weights,
)

UTILIZATION = 0.92  # the engine's default gpu_memory_utilization (vLLM 0.33)
# NCCL's buffers and captured graphs: what a process holds beside its tensors. An allowance.
PROCESS_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Shown):
    """What a layout needs and leaves on each GPU; :func:`make_plan` makes it.

    ``kv`` sizes one data-parallel group: ``sequences`` is spread over ``layout.dp`` of them.
    ``workspace_bytes`` is modelled. ``max_context`` is the longest context at this concurrency,
    ``max_sequences`` the most sequences at this context, over all groups; both by the engine's own
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
        return int(self.memory_bytes * self.utilization)

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

    def __repr__(self) -> str:
        rows = (
            ("weights, exact", self.weights_bytes),
            ("workspace, modelled", self.workspace_bytes),
            ("KV cache, engine admission", self.kv_bytes),
            ("free", self.free_bytes),
            ("the engine may use", self.budget_bytes),
        )
        lines = [self.verdict, *(f"  {name:<28}{gib(size):>14}" for name, size in rows)]
        lines.append(
            f"at most {self.max_context:,} tokens at this concurrency, {self.max_sequences:,} "
            "sequences at this context"
        )
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of ``workbench plan --json``."""
        settings = self.kv.settings
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
            "max_context": self.max_context,
            "max_sequences": self.max_sequences,
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
    the drafter's shape, ``speculation`` how the engine is asked to use it.

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
    config, gpu = config_of(model), sheet(gpu) if isinstance(gpu, str) else gpu
    if layout is not None:
        if gpus is not None and gpus != layout.gpus:
            raise SizingError(
                f"{layout.name} takes {layout.gpus} GPUs, but {short(gpus)} are given; "
                "make tp x dp equal to the number of GPUs"
            )
        return _plan(config, gpu, layout, **given | {"drafter": drafter_config_of(drafter)})
    if gpus is None:
        raise SizingError("say on how many GPUs, or in which layout")
    plans = all_plans(config, gpu, gpus=gpus, **given)
    return next((plan for plan in plans if plan.runs), plans[0])


def all_plans(
    model: BeamConfig | str, gpu: GpuSheet | str, *, gpus: int, **given: Any
) -> tuple[Plan, ...]:
    """The plan of every layout of ``gpus`` GPUs; arguments as for :func:`make_plan`.

    Raises:
        SizingError: as there.
    """
    config, gpu = config_of(model), sheet(gpu) if isinstance(gpu, str) else gpu
    found = layouts(config, gpus)
    if not found:
        raise SizingError(
            f"the model cannot be spread over {gpus:,} GPUs: no split divides its heads, widths "
            "and vocabulary; use another number, such as a power of two"
        )
    options: dict[str, Any] = {"weights": "bf16", "kv_dtype": "fp8", "sequences": 1} | given
    options["weights"] = precision(options["weights"])
    options["drafter"] = drafter_config_of(options.get("drafter"))
    options.setdefault("name", model if isinstance(model, str) else "the model")
    plans = []
    refused: SizingError | None = None
    for layout in found:
        try:
            plans.append(_plan(config, gpu, layout, **options))
        except SizingError as error:  # a layout that the drafter cannot follow
            refused = error
    if not plans:
        raise refused or SizingError("no layout can be planned")
    return tuple(plans)


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
) -> Plan:
    if not is_number(utilization) or not 0 < utilization <= 1:
        raise SizingError(
            f"gpu memory utilization must be above 0 and at most 1, not {short(utilization)}"
        )
    if not is_int(sequences) or not 1 <= sequences <= MOST_SEQUENCES:
        raise SizingError(f"sequences must be from 1 to {MOST_SEQUENCES:,}, not {short(sequences)}")
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
    workspace = workspace_bytes(config, layout, batched_tokens, group, speculation, drafter)
    room = int(gpu.usable_bytes * utilization) - sized.per_gpu_bytes

    def holds(tokens: int, count: int) -> bool:
        """Whether ``count`` sequences of ``tokens`` fit into each group, logits and all."""
        needed = size_kv(config, context=tokens, sequences=count, **settings).pool_bytes
        work = workspace_bytes(config, layout, batched_tokens, count, speculation, drafter)
        return needed + work <= room

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
        max_sequences=layout.dp * largest(MOST_SEQUENCES, lambda n: holds(context, n)),
        speculation=speculation,
        checkpoint=checkpoint,
        refusals=refusals(config, weights, layout),
        notes=_notes(config, weights, layout, gpu, group, batched_tokens, speculation),
    )


def workspace_bytes(
    config: BeamConfig,
    layout: Layout,
    batched_tokens: int,
    sequences: int,
    speculation: Speculation | None = None,
    drafter: DFlash2Config | None = None,
) -> int:
    """Bytes one GPU needs beside weights and KV cache. **Modelled**, not the engine's own figure.

    The residual stream with its norms, the wider of attention projections and the experts' two
    scratch buffers (as vLLM 0.33's Triton experts lay them out: one row of every chosen expert for
    every token that meets there), the logits of every row that is sampled in FP32,
    :func:`rotary_bytes` and :data:`PROCESS_BYTES`. Recorded starts of the engine on one H200 took
    0.5 to 0.9 GiB less (``tests/model/test_plan.py``).
    """
    c, hidden = config, config.hidden_size
    stream = 4 * batched_tokens * hidden * 2
    attention = batched_tokens * (2 * c.q_size + 2 * c.kv_size) // layout.tp * 2
    experts = 0
    if c.sparse_layers:
        # Under data parallelism the groups' tokens meet in the experts.
        chosen = batched_tokens * layout.dp * c.num_experts_per_tok
        width = c.moe_intermediate_size // layout.expert_slices
        experts = chosen * (max(width, hidden) + max(2 * width, hidden)) * 2
    rows = sequences * (1 + (speculation.tokens if speculation else 0))
    logits = min(rows, batched_tokens) * c.vocab_size * 4
    tables = rotary_bytes(config, drafter)
    return stream + max(attention, experts) + logits + tables + PROCESS_BYTES


def rotary_bytes(config: BeamConfig, drafter: DFlash2Config | None = None) -> int:
    """Bytes of the cosines and sines of every position, which each GPU holds once. Exact.

    FP32 for the model's sliding layers, BF16 for a drafter (vLLM 0.33): half a GiB at one million
    positions.
    """
    size = 4 * config.max_position_embeddings * config.head_dim if config.sliding_layers else 0
    if drafter is not None:
        size += 2 * drafter.max_position_embeddings * drafter.head_dim
    return size


def refusals(config: BeamConfig, weights: Precision, layout: Layout) -> tuple[str, ...]:
    """Why vLLM 0.33 would not load such weights in such a layout; empty where it would."""
    reasons = []
    if layout.expert_parallel and layout.tp > 1 and layout.dp > 1:
        reasons.append(
            "its Beam takes expert parallelism with tensor or with data parallelism, not with both "
            "at once; use TP or DP alone"
        )
    slices = {"attention": config.q_size // layout.tp}
    if len(config.sparse_layers) < config.num_hidden_layers:
        slices["dense_mlp"] = config.intermediate_size // layout.tp
    if config.sparse_layers:
        slices["experts"] = config.moe_intermediate_size // layout.expert_slices
    for part, width in slices.items():
        dtype, step = getattr(weights, part), 1
        if dtype == "nvfp4":
            step = NVFP4_GROUP
        elif dtype == "fp8" and part != "experts" and layout.tp > 1:
            step = FP8_BLOCK  # the blocks of the experts are refined instead, see weights.py
        if width % step:
            reasons.append(
                f"a GPU's slice of the {part.replace('_', ' ')} is {width} wide, no multiple of "
                f"the {step} numbers that share a scale in {dtype}; use fewer ranks"
            )
    return tuple(reasons)


def _notes(
    config: BeamConfig,
    weights: Precision,
    layout: Layout,
    gpu: GpuSheet,
    sequences: int,
    batched_tokens: int,
    speculation: Speculation | None,
) -> tuple[str, ...]:
    notes = []
    width = config.moe_intermediate_size // layout.expert_slices
    if config.sparse_layers and weights.experts == "fp8" and width % FP8_BLOCK:
        block = gcd(FP8_BLOCK, width)
        notes.append(
            f"the experts' slice of {width} is no multiple of {FP8_BLOCK}: the engine refines the "
            f"FP8 scale blocks to {block} x {block}, which only its Triton kernels take"
        )
    if config.sparse_layers and weights.experts == "nvfp4" and width % 64:
        notes.append(
            f"the experts' slice of {width} is no multiple of 64: the engine's TRT-LLM kernels pad "
            f"it to {-(-width // 64) * 64}, which is not counted here"
        )
    if layout.gpus > gpu.nvlink_domain:
        notes.append(
            f"{layout.gpus} GPUs are more than the {gpu.nvlink_domain} that NVLink joins: the "
            "command starts one node of several"
        )
    if speculation is not None and sequences * (speculation.tokens + 1) > batched_tokens:
        cap = batched_tokens // (speculation.tokens + 1)
        notes.append(
            f"with {speculation.tokens} speculative tokens the engine runs at most {cap:,} "
            f"sequences a group at once (batched tokens / {speculation.tokens + 1}); raise the "
            "batched tokens for more"
        )
    return tuple(notes)

