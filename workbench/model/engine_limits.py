"""What vLLM 0.33 refuses although the memory suffices, and what else a plan should say aloud."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.datasheet import GpuSheet
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_settings import KVSettings
from workbench.model.layout import Layout
from workbench.model.serve_command import Speculation
from workbench.model.weights import FP8_BLOCK, NVFP4_GROUP, Precision, expert_block

LEAST_BLOCK = 32  # the engine refines the experts' FP8 blocks down to this and no further
_TRTLLM = 64  # its TRT-LLM kernels pad the experts' width to a multiple of this


def refusals(
    config: BeamConfig,
    weights: Precision,
    layout: Layout,
    kv: KVSettings | None = None,
    speculation: Speculation | None = None,
) -> tuple[str, ...]:
    """Why vLLM 0.33 would not start like this; empty where it would.

    ``kv.sequences`` is what one data-parallel group takes at once.
    """
    return (
        *_layout_refusals(layout),
        *_width_refusals(config, weights, layout),
        *(() if kv is None else _batch_refusals(kv, speculation)),
    )


def _layout_refusals(layout: Layout) -> Iterator[str]:
    if layout.expert_parallel and layout.tp > 1 and layout.dp > 1:
        yield (
            "vLLM 0.33's Beam takes expert parallelism with tensor or with data parallelism, not "
            "with both at once; use TP or DP alone"
        )


def _width_refusals(config: BeamConfig, weights: Precision, layout: Layout) -> Iterator[str]:
    c = config
    kv = max(1, c.num_key_value_heads // layout.tp) * c.head_dim
    # Merged projections: each part must be whole scale blocks by itself.
    widths: dict[str, tuple[int, ...]] = {"attention": (c.q_size // layout.tp, kv)}
    if len(c.sparse_layers) < c.num_hidden_layers:
        widths["dense_mlp"] = (c.intermediate_size // layout.tp,)
    if c.sparse_layers:
        widths["experts"] = (c.moe_intermediate_size // layout.expert_slices,)
    for part, parts in widths.items():
        dtype = getattr(weights, part)
        step = {"fp8": FP8_BLOCK, "nvfp4": NVFP4_GROUP}.get(dtype, 1)
        odd = next((width for width in parts if width % step), None)
        if odd is None:
            continue
        if part == "experts" and dtype == "fp8":
            block = expert_block(c, layout)
            if layout.expert_slices > 1 and block >= LEAST_BLOCK:
                continue  # refined, see _notes
            yield (
                f"a GPU's slice of the experts is {odd} wide: their FP8 scale blocks would have to "
                f"be smaller than {LEAST_BLOCK}; use expert parallelism or fewer GPUs"
            )
            continue
        yield (
            f"a GPU's slice of the {part.replace('_', ' ')} is {odd} wide, no multiple of the "
            f"{step} numbers that share a scale in {dtype}; use fewer ranks"
        )


def _batch_refusals(kv: KVSettings, speculation: Speculation | None) -> Iterator[str]:
    if kv.sequences > kv.batched_tokens:
        yield (
            f"{kv.sequences:,} sequences a group are more than the {kv.batched_tokens:,} batched "
            "tokens; raise the batched tokens"
        )
    if speculation is not None and kv.batched_tokens <= speculation.tokens + 1:
        yield (
            f"{kv.batched_tokens:,} batched tokens leave no room for an anchor and "
            f"{speculation.tokens} draft tokens; raise the batched tokens"
        )


def notes(
    config: BeamConfig,
    weights: Precision,
    layout: Layout,
    gpu: GpuSheet,
    kv: KVSettings,
    drafter: DFlash2Config | None,
    speculation: Speculation | None,
) -> tuple[str, ...]:
    """What memory does not show and the engine does not refuse; one sentence each."""
    return (
        *_weight_notes(config, weights, layout, gpu),
        *_speculation_notes(kv, drafter, speculation),
    )


def _weight_notes(
    config: BeamConfig, weights: Precision, layout: Layout, gpu: GpuSheet
) -> Iterator[str]:
    width = config.moe_intermediate_size // layout.expert_slices
    if config.sparse_layers and weights.experts == "fp8" and width % FP8_BLOCK:
        block = expert_block(config, layout)
        if LEAST_BLOCK <= block < FP8_BLOCK:
            yield (
                f"slices of {width} are no multiple of {FP8_BLOCK}: the engine refines the "
                f"experts' FP8 scale blocks to {block} x {block}, for its Triton kernels only"
            )
    if config.sparse_layers and weights.experts == "nvfp4" and width % _TRTLLM:
        yield (
            f"slices of {width} are no multiple of {_TRTLLM}: the engine's TRT-LLM kernels pad the "
            f"experts to {-(-width // _TRTLLM) * _TRTLLM}, which is not counted here"
        )
    if "nvfp4" in (weights.attention, weights.dense_mlp, weights.experts) and (
        "fp4" not in gpu.flops
    ):
        yield (
            f"{gpu.name} has no FP4 arithmetic: NVFP4 weights are read as such and multiplied in "
            "BF16"
        )
    if layout.gpus > gpu.nvlink_domain:
        yield (
            f"{layout.gpus} GPUs are more than the {gpu.nvlink_domain} that NVLink joins: what "
            "goes between the groups of them is slower"
        )
    if layout.gpus > gpu.host_gpus:
        yield (
            f"{layout.gpus} GPUs are {-(-layout.gpus // gpu.host_gpus)} hosts of {gpu.host_gpus}: "
            "the command alone starts one host and wants the engine's options for several"
        )


def _speculation_notes(
    kv: KVSettings, drafter: DFlash2Config | None, speculation: Speculation | None
) -> Iterator[str]:
    if speculation is None:
        return
    rows = speculation.tokens + 1
    if drafter is None:
        yield "the drafter's weights and cache are not counted, because its shape is not known"
    elif drafter.block_size is not None and rows > drafter.block_size:
        yield (
            f"the drafter was trained on blocks of {drafter.block_size}, so its drafts beyond "
            f"{drafter.block_size - 1} are guesses it never learnt"
        )
    if drafter is not None and drafter.max_position_embeddings < kv.context:
        yield (
            f"the drafter knows {drafter.max_position_embeddings:,} positions, fewer than the "
            f"context of {kv.context:,}"
        )
    if kv.sequences * rows > kv.batched_tokens >= rows:
        yield (
            f"with {speculation.tokens} speculative tokens the engine runs at most "
            f"{kv.batched_tokens // rows:,} sequences a group at once (batched tokens / {rows}); "
            "raise the batched tokens for more"
        )
