"""Record vLLM's own KV cache accounting, as a table for ordinary tests.

Run with a Python environment with vllm 0.33.0 (README.md beside this file):

    python tests/engine/record_kv_figures.py            # write tests/data/engine_kv_figures.json

No figure is computed here. Beam's configuration, the attention layers with the cache
specifications they ask for, the scheduler's in-flight tokens, the planner (groups, blocks,
concurrency, longest length that fits) and its errors are the engine's; this script chooses the
inputs and writes the answers down. Two things differ from a GPU: the attention layers carry a CPU
implementation (only their ``attn_backend`` is exchanged for the CUDA one, which decides the block
size of a sliding layer), and asynchronous scheduling is set by hand, because the CPU platform
switches it off. README.md describes every field of the file.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

# Each must be set before vllm is first imported.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np

FILE = Path(__file__).resolve().parents[1] / "data" / "engine_kv_figures.json"
MILLION = 1 << 20
GIB = 1 << 30
ODD_BYTES = 12_345_678_901

SPEC_FACTORS: dict[str, list[Any]] = {
    "max_model_len": [1, 15, 16, 17, 511, 512, 513, 8192, 100_000, 131_072, MILLION],
    "max_num_batched_tokens": [1, 512, 2048, 8192, 16384],
    "async_scheduling": [False, True],
    "window": [1, 16, 512, 2048],
    "block_size": [16, 32, 64, 128],
    "kv_cache_dtype": ["auto", "fp8"],
    "tensor_parallel_size": [1, 2, 4, 8, 16],
}
SPEC_COLUMNS = [
    *SPEC_FACTORS,
    "kv_heads_per_rank",
    "max_in_flight_tokens",
    "full_page_size_bytes",
    "full_max_memory_usage_bytes",
    "sliding_page_size_bytes",
    "sliding_max_admission_blocks_per_request",
    "sliding_max_memory_usage_bytes",
]
RUN_COLUMNS = [
    "max_model_len",
    "max_num_batched_tokens",
    "async_scheduling",
    "available_memory",
    "max_in_flight_tokens",
    "max_memory_usage_bytes",
    "max_model_len_that_fits",
    "num_blocks",
    "max_concurrency",
    "logged_tokens",
]


@dataclass(frozen=True)
class Layers:
    """Attention layers of one model: which are full, and the shape of their KV heads."""

    count: int
    full: tuple[int, ...] = ()
    window: int = 512
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class Case:
    """One question to the planner; `runs` are rows of the first four RUN_COLUMNS."""

    name: str
    target: Layers
    draft: Layers | None = None
    tp: int = 8
    draft_tp: int | None = None  # the engine's drafter always runs under the target's
    dtype: str = "auto"
    block_size: int = 16
    layout: str | None = None
    backend: str = "FLASH_ATTN"
    manager_off: bool = False
    speculative_tokens: int = 7
    edge: bool = False  # ask again with exactly enough memory for the first run, and a byte less
    runs: tuple[tuple[int, int, bool, int], ...] = field(default=())


BEAM = Layers(52, tuple(i for i in range(52) if i % 6 == 3))
TINY = Layers(9, (2, 8), window=256, kv_heads=2, head_dim=64)
DRAFTER = Layers(5, window=2048)


def hybrid(full: int, sliding: int, window: int = 512) -> Layers:
    """`full` full layers spread evenly among `sliding` sliding ones."""
    count = full + sliding
    return Layers(count, tuple((2 * i + 1) * count // (2 * full) for i in range(full)), window)


def planner_cases() -> Iterator[Case]:
    """Every question put to the planner."""
    main = (
        (MILLION, 8192, True, int(40.25 * GIB)),
        (131_072, 2048, False, 10 * GIB),
        (8192, 16384, True, ODD_BYTES),
        (100_000, 512, True, 5 * GIB),
    )
    wide = ((131_072, 8192, True, 10 * GIB), (8193, 2048, False, ODD_BYTES))
    small = ((8192, 2048, True, 1 * GIB), (513, 512, False, 123_456_789))
    for tp, dtype, draft in product((1, 2, 4, 8, 16), ("auto", "fp8"), (None, DRAFTER)):
        yield Case("beam", BEAM, draft, tp=tp, dtype=dtype, runs=main, edge=tp == 8)
    for block_size in (32, 64, 128):
        for draft in (None, DRAFTER):
            yield Case("beam", BEAM, draft, block_size=block_size, runs=wide)
    for draft in (None, DRAFTER):
        yield Case("beam", BEAM, draft, layout="BLHNC", runs=wide)
    for backend, block_size in (("FLASHINFER", 16), ("FLASHINFER", 64), ("FLASHINFER", 128)):
        for draft in (None, DRAFTER):
            yield Case("beam", BEAM, draft, backend=backend, block_size=block_size, runs=wide)
    for layers in (1, 2, 3, 8, 9, 10, 13, 14):
        yield Case("drafter depth", BEAM, Layers(layers, window=2048), runs=wide)
    for layers in (1, 5, 9, 14):
        yield Case("drafter of the target's window", BEAM, Layers(layers), runs=wide)
    for tokens in (1, 3, 15):
        yield Case("speculative tokens", BEAM, DRAFTER, speculative_tokens=tokens, runs=wide)

    other_pages = (
        (Layers(5, window=2048, kv_heads=4), 1, None),
        (Layers(5, window=2048, kv_heads=4), 8, None),
        (Layers(5, window=2048, head_dim=64), 8, None),
        (Layers(5, window=2048, head_dim=96), 1, None),
        (Layers(5, window=2048, head_dim=96), 8, None),
        (Layers(5, window=2048, kv_heads=16), 8, None),
        (Layers(5, kv_heads=4), 2, None),
        (Layers(5, head_dim=64), 8, None),
        (Layers(5, head_dim=96), 8, None),
        (DRAFTER, 8, 1),
        (DRAFTER, 4, 1),
        (Layers(5), 8, 1),
    )
    for (draft, tp, draft_tp), layout in product(other_pages, (None, "BLHNC")):
        yield Case(
            "drafter of another page",
            BEAM,
            draft,
            tp=tp,
            draft_tp=draft_tp,
            layout=layout,
            runs=wide[:1],
        )

    tiny_drafts = (
        None,
        Layers(2, window=128, kv_heads=2, head_dim=64),
        Layers(2, window=256, kv_heads=2, head_dim=64),
    )
    for draft, tp in product(tiny_drafts, (1, 2)):
        yield Case("small", TINY, draft, tp=tp, runs=small)
    yield Case("small", TINY, tp=4, dtype="fp8", runs=small)

    for draft in (None, DRAFTER, Layers(5), Layers(20, window=2048)):
        yield Case("all sliding", Layers(24), draft, runs=wide)
        yield Case("all full", Layers(24, tuple(range(24))), draft, runs=wide)
    for full, sliding in (
        (10, 52), (13, 12), (12, 13), (2, 3), (3, 2), (4, 6), (5, 7), (6, 9), (7, 10), (10, 7),
        (10, 14), (10, 15), (10, 20), (1, 1), (1, 5), (3, 4),
    ):  # fmt: skip
        yield Case("counts", hybrid(full, sliding), runs=wide[:1])
    for full, sliding, layers in ((12, 13, 5), (9, 9, 9), (6, 7, 8), (4, 8, 5), (20, 20, 5)):
        yield Case(
            "counts with a drafter",
            hybrid(full, sliding),
            Layers(layers, window=2048),
            runs=wide[:1],
        )

    drafts = (None, DRAFTER, Layers(5), Layers(5, tuple(range(5))))
    for draft, layout in product(drafts, (None, "BLHNC")):
        yield Case("manager off", BEAM, draft, manager_off=True, layout=layout, runs=wide)
    for target in (Layers(24), Layers(24, tuple(range(24)))):
        for draft in (None, DRAFTER, Layers(5)):
            yield Case("manager off", target, draft, manager_off=True, runs=wide[:1])
    narrow = Layers(5, window=2048, kv_heads=4)
    yield Case("manager off", BEAM, narrow, manager_off=True, runs=wide[:1])
    yield Case("manager off", BEAM, Layers(5, kv_heads=4), manager_off=True, runs=wide[:1])
    yield Case(
        "too little memory",
        BEAM,
        DRAFTER,
        runs=(
            (MILLION, 8192, True, 2 * GIB),
            (8192, 8192, True, 12 * 5 * 8192 * 30),
            (8192, 8192, True, 8192),
            (8192, 8192, True, 0),
        ),
    )


# ---------------------------------------------------------------------------------------------
# The engine
# ---------------------------------------------------------------------------------------------


def write_config(folder: Path, layers: Layers, draft: bool) -> str:
    """A `config.json` that the engine accepts as Beam, or as its DFlash2 drafter."""
    kinds = [
        "full_attention" if i in layers.full else "sliding_attention" for i in range(layers.count)
    ]
    config: dict[str, Any] = {
        "model_type": "beam",
        "architectures": ["BeamForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "num_hidden_layers": layers.count,
        "num_attention_heads": 48,
        "num_key_value_heads": layers.kv_heads,
        "head_dim": layers.head_dim,
        "sliding_window": layers.window,
        "layer_types": kinds,
        "max_position_embeddings": MILLION,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": 163840,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    if draft:
        config |= {
            "model_type": "qwen3",
            "architectures": ["DFlash2BeamDraftModel"],
            "use_sliding_window": True,
            "is_causal": False,
            "dflash_config": {
                "target_layer_ids": [1, 13, 25, 37, 49],
                "mask_token_id": 3,
                "conv_kernel_size": 4,
                "conv_group_size": 64,
                "selector_rank": 256,
                "selector_top_k": 8,
                "final_logit_softcapping": 30.0,
                "causal": False,
            },
        }
    else:
        config |= {
            "moe_intermediate_size": 2560,
            "mlp_layer_types": ["dense"] * min(3, layers.count - 1)
            + ["sparse"] * (layers.count - min(3, layers.count - 1)),
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": False,
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engine_config(target: Layers, draft: Layers | None, speculative_tokens: int) -> Any:
    """The engine's `VllmConfig` for Beam with or without a DFlash2 drafter."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        arguments: dict[str, Any] = {"model": write_config(folder / "target", target, False)}
        if draft is not None:
            arguments["speculative_config"] = {
                "method": "dflash",
                "model": write_config(folder / "draft", draft, True),
                "num_speculative_tokens": speculative_tokens,
            }
        return EngineArgs(
            skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, **arguments
        ).create_engine_config()


@contextmanager
def one_rank(vllm_config: Any) -> Iterator[None]:
    """The current configuration, in which attention layers may be built."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config):
        yield


class ImportOnly(ModuleType):
    """Stands in for a kernel package: its names can be imported, nothing can be run."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def backend_class(name: str) -> Any:
    """The engine's CUDA attention backend of this name."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name == "FLASHINFER" and "flashinfer" not in sys.modules and not find_spec("flashinfer"):
        for part in ("", ".decode", ".prefill", ".utils", ".trace", ".fp4_quantization"):
            sys.modules[f"flashinfer{part}"] = ImportOnly(f"flashinfer{part}")
    return AttentionBackendEnum[name].get_class()


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def layer_index(name: str) -> int:
    return int(name.split(".")[2])


def heads_per_rank(vllm_config: Any, kv_heads: int, tp: int) -> int:
    """The engine's own rule for KV heads on one rank."""
    config = vllm_config.model_config
    old_tp = vllm_config.parallel_config.tensor_parallel_size
    old_heads = config.hf_text_config.num_key_value_heads
    vllm_config.parallel_config.tensor_parallel_size = tp
    config.hf_text_config.num_key_value_heads = kv_heads
    config.model_arch_config.total_num_kv_heads = kv_heads
    try:
        return config.get_num_kv_heads(vllm_config.parallel_config)
    finally:
        vllm_config.parallel_config.tensor_parallel_size = old_tp
        config.hf_text_config.num_key_value_heads = old_heads
        config.model_arch_config.total_num_kv_heads = old_heads


def layer_specs(
    vllm_config: Any,
    models: Iterable[tuple[Layers, int, bool]],
    dtype: str,
    block_size: int,
    backend: str,
) -> dict[str, Any]:
    """Cache specifications, by the engine's attention layers; models are (layers, tp, draft)."""
    import torch
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    vllm_config.cache_config.cache_dtype = dtype
    vllm_config.cache_config.block_size = block_size
    vllm_config.cache_config.sliding_window = None  # as Beam does before it makes its layers
    vllm_config.compilation_config.static_forward_context.clear()
    place = 0
    for layers, tp, draft in models:
        kv_heads = heads_per_rank(vllm_config, layers.kv_heads, tp)
        for index in range(layers.count):
            with one_rank(vllm_config):
                torch.set_default_dtype(torch.bfloat16)
                attention = Attention(
                    kv_heads,
                    layers.head_dim,
                    1.0,
                    num_kv_heads=kv_heads,
                    cache_config=vllm_config.cache_config,
                    per_layer_sliding_window=None if index in layers.full else layers.window,
                    prefix=layer_name(place),
                )
                torch.set_default_dtype(torch.float32)
            attention.attn_backend = backend_class(backend)
            attention.is_draft_layer = draft
            place += 1
    with one_rank(vllm_config):
        return get_kv_cache_spec(vllm_config)


def set_run(vllm_config: Any, max_model_len: int, batched: int, asynchronous: bool) -> None:
    vllm_config.model_config.max_model_len = max_model_len
    vllm_config.model_config.original_max_model_len = max_model_len
    vllm_config.scheduler_config.max_num_batched_tokens = batched
    vllm_config.scheduler_config.async_scheduling = asynchronous


# ---------------------------------------------------------------------------------------------
# Layer figures
# ---------------------------------------------------------------------------------------------


def spec_inputs() -> Iterator[tuple[Any, ...]]:
    """Two rows for each (length, batch, window), the rest drawn; every pair of values occurs."""
    names = list(SPEC_FACTORS)
    raw = iter(np.random.PCG64(3).random_raw(4096).tolist())
    rows = []
    for length, batch, window in product(
        *(SPEC_FACTORS[n] for n in ("max_model_len", "max_num_batched_tokens", "window"))
    ):
        for asynchronous in (False, True):
            rest = [
                SPEC_FACTORS[name][next(raw) % len(SPEC_FACTORS[name])]
                for name in ("block_size", "kv_cache_dtype", "tensor_parallel_size")
            ]
            rows.append((length, batch, asynchronous, window, *rest))
    for a, b in combinations(range(len(names)), 2):
        seen = {(row[a], row[b]) for row in rows}
        missing = set(product(SPEC_FACTORS[names[a]], SPEC_FACTORS[names[b]])) - seen
        if missing:
            raise RuntimeError(f"No row has {names[a]}, {names[b]} = {sorted(missing)}.")
    yield from rows


def spec_rows() -> dict[str, Any]:
    """One row for each of `spec_inputs`, by the specifications of two engine layers."""
    vllm_config = engine_config(BEAM, None, 0)
    pairs: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    rows = []
    dtypes = {}
    for row in spec_inputs():
        length, batch, asynchronous, window, block_size, dtype, tp = row
        key = (window, block_size, dtype, tp)
        if key not in pairs:
            layers = Layers(2, (0,), window)
            specs = layer_specs(vllm_config, [(layers, tp, False)], dtype, block_size, "FLASH_ATTN")
            full, sliding = specs[layer_name(0)], specs[layer_name(1)]
            if full.block_size != block_size or sliding.block_size != block_size:
                raise RuntimeError(f"The engine chose another block size for {key}.")
            pairs[key] = full, sliding
            dtypes[dtype] = str(full.dtype).removeprefix("torch."), full.kv_quant_mode.name
        full, sliding = pairs[key]
        set_run(vllm_config, length, batch, asynchronous)
        rows.append(
            [
                *row[:2],
                int(asynchronous),
                *row[3:],
                full.num_kv_heads,
                vllm_config.max_in_flight_tokens,
                full.page_size_bytes,
                full.max_memory_usage_bytes(vllm_config),
                sliding.page_size_bytes,
                sliding.max_admission_blocks_per_request(vllm_config.max_in_flight_tokens, length),
                sliding.max_memory_usage_bytes(vllm_config),
            ]
        )
    return {
        "kv_heads": 8,
        "head_dim": 128,
        "backend": "FLASH_ATTN",
        "spec_dtype_and_quant_mode": dtypes,
        "columns": SPEC_COLUMNS,
        "rows": rows,
    }


# ---------------------------------------------------------------------------------------------
# Planner figures
# ---------------------------------------------------------------------------------------------


def one_or_list(values: Iterable[int]) -> int | list[int]:
    """The common value of all groups, or the value of each."""
    listed = list(values)
    return listed[0] if len(set(listed)) == 1 else listed


def describe_error(error: Exception) -> dict[str, str]:
    message = str(error).partition(" Try increasing")[0]  # then come general hints
    return {"type": type(error).__name__, "message": message}


def plan_run(vllm_config: Any, specs: Any, groups: Any, run: tuple[int, int, bool, int]) -> Any:
    """One row of RUN_COLUMNS and, if the engine refused, its error."""
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    from vllm.v1.core.kv_cache_utils import (
        get_kv_cache_capacity,
        get_max_concurrency_for_kv_cache_config,
    )

    length, batch, asynchronous, memory = run
    builder = get_kv_cache_config_builder(vllm_config)
    per_block = planning._pool_bytes_per_block_from_builder(builder, vllm_config, groups)
    set_run(vllm_config, MILLION, batch, asynchronous)
    fits = planning._estimate_max_model_len_from_groups(
        builder, vllm_config, groups, memory - per_block
    )
    if fits:  # the same answer by the engine's own way to it, --max-model-len auto
        vllm_config.model_config.original_max_model_len = -1
        planning.get_kv_cache_configs(vllm_config, [specs], [memory], groups)
        if vllm_config.model_config.max_model_len != fits:
            raise RuntimeError(f"Two answers to what fits: {fits} and the automatic length.")
    set_run(vllm_config, length, batch, asynchronous)
    row = [
        length,
        batch,
        int(asynchronous),
        memory,
        vllm_config.max_in_flight_tokens,
        planning._max_memory_usage_bytes_from_groups(builder, vllm_config, groups),
        fits,
    ]
    try:
        (config,) = planning.get_kv_cache_configs(vllm_config, [specs], [memory], groups)
    except ValueError as error:
        return [*row, None, None, None], describe_error(error)
    tokens, concurrency = get_kv_cache_capacity(vllm_config, config)
    if concurrency != get_max_concurrency_for_kv_cache_config(vllm_config, config):
        raise RuntimeError("The engine's two concurrencies differ.")
    return [*row, config.num_blocks, concurrency, tokens], None


def plan(case: Case, groupings: list[Any]) -> dict[str, Any]:
    """The planner's answer to one case; a new grouping is appended to `groupings`."""
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    from vllm.v1.kv_cache_interface import (
        get_kv_cache_spec_kind,
        get_kv_cache_spec_sliding_window,
    )

    vllm_config = engine_config(case.target, case.draft, case.speculative_tokens)
    vllm_config.parallel_config.tensor_parallel_size = case.tp
    vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = case.manager_off
    models = [(case.target, case.tp, False)]
    if case.draft is not None:
        models.append((case.draft, case.draft_tp or case.tp, True))
    specs = layer_specs(vllm_config, models, case.dtype, case.block_size, case.backend)
    vllm_config.cache_config.kv_cache_layout = case.layout
    layouts = get_supported_kv_cache_layouts([backend_class(case.backend)])
    layout = resolve_kv_cache_layout(
        vllm_config, [[layout.name for layout in layouts]], specs.values()
    )

    def shape(layers: Layers, tp: int) -> dict[str, Any]:
        return {
            "layers": layers.count,
            "full": list(layers.full),
            "window": layers.window,
            "kv_heads": layers.kv_heads,
            "head_dim": layers.head_dim,
            "tp": tp,
        }

    document: dict[str, Any] = {
        "name": case.name,
        "target": shape(case.target, case.tp),
        "draft": None if case.draft is None else shape(case.draft, case.draft_tp or case.tp),
        "kv_cache_dtype": case.dtype,
        "block_size": case.block_size,
        "backend": case.backend,
        "layout": layout.name,
        "layout_was_set": case.layout is not None,
        "manager_off": case.manager_off,
        "speculative_tokens": case.speculative_tokens if case.draft is not None else 0,
    }
    set_run(vllm_config, *case.runs[0][:3])
    try:
        groups = planning.get_global_kv_cache_groups(vllm_config, [specs])
    except Exception as error:  # what the engine raises is the figure to record
        return document | {"error": describe_error(error)}
    grouping = [
        [
            type(group.kv_cache_spec).__name__,
            get_kv_cache_spec_kind(group.kv_cache_spec).value,
            getattr(group.kv_cache_spec, "sliding_window", None)
            or get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            [layer_index(name) for name in group.layer_names],
        ]
        for group in groups
    ]
    if any(group.is_eagle_group for group in groups):
        raise RuntimeError("A DFlash2 group took the EAGLE block drop.")
    extra = {getattr(g.kv_cache_spec, "extra_retained_tokens", 0) for g in groups}
    if extra != {0}:
        raise RuntimeError(f"A sliding layer retains extra tokens: {extra}.")
    if grouping not in groupings:
        groupings.append(grouping)
    builder = get_kv_cache_config_builder(vllm_config)
    try:
        per_block = planning._pool_bytes_per_block_from_builder(builder, vllm_config, groups)
    except Exception as error:
        return document | {"grouping": groupings.index(grouping), "error": describe_error(error)}
    rows, errors = [], {}
    runs = list(case.runs)
    if case.edge:
        needed = plan_run(vllm_config, specs, groups, runs[0])[0][5]
        runs += [(*runs[0][:3], needed + per_block - missing) for missing in (0, 1)]
    for number, run in enumerate(runs):
        row, error = plan_run(vllm_config, specs, groups, run)
        rows.append(row)
        if error is not None:
            errors[str(number)] = error
    return document | {
        "grouping": groupings.index(grouping),
        "group_block_size": one_or_list(group.kv_cache_spec.block_size for group in groups),
        "group_page_size_bytes": one_or_list(
            group.kv_cache_spec.page_size_bytes for group in groups
        ),
        "bytes_per_block": per_block,
        "runs": rows,
        "run_errors": errors,
    }


def layouts() -> dict[str, Any]:
    """KV cache layouts that the CUDA backends accept, most preferred first."""
    from unittest.mock import patch

    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    found = {}
    for backend, (label, capability) in product(
        ("FLASH_ATTN", "FLASHINFER"), (("hopper", (9, 0)), ("blackwell", (10, 0)))
    ):
        with patch.object(
            type(current_platform),
            "get_device_capability",
            lambda *_, capability=capability, **__: DeviceCapability(*capability),
        ):
            names = [x.name for x in get_supported_kv_cache_layouts([backend_class(backend)])]
        found[f"{backend} {label}"] = names
    return found


# ---------------------------------------------------------------------------------------------
# The file
# ---------------------------------------------------------------------------------------------


def rows_on_lines(document: Any, depth: int = 0) -> str:
    """JSON with a line for each table row, so that a changed figure shows as a changed line."""
    if isinstance(document, dict) and depth < 2:
        inner = ",\n".join(
            f"{json.dumps(key)}: {rows_on_lines(value, depth + 1)}"
            for key, value in document.items()
        )
        return "{\n" + inner + "\n}"
    compact = json.JSONEncoder(separators=(",", ":")).encode
    if isinstance(document, list) and document and isinstance(document[0], list | dict):
        return "[\n" + ",\n".join(map(compact, document)) + "\n]"
    return compact(document)


def main() -> int:
    """Command line; writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=FILE, metavar="FILE")
    arguments = parser.parse_args()
    groupings: list[Any] = []
    plans = [plan(case, groupings) for case in planner_cases()]
    document = {
        "about": "vLLM's own KV cache accounting for Beam, on a CPU; recorded, not measured here",
        "recorder": "tests/engine/record_kv_figures.py",
        "recorded_on": datetime.now(UTC).date().isoformat(),
        "versions": {package: version(package) for package in ("vllm", "torch")},
        "hardware": f"{platform.machine()} CPU",
        "called": [
            "vllm.engine.arg_utils.EngineArgs.create_engine_config",
            "vllm.config.VllmConfig.max_in_flight_tokens",
            "vllm.config.ModelConfig.get_num_kv_heads",
            "vllm.model_executor.layers.attention.Attention.get_kv_cache_spec",
            "vllm.v1.worker.gpu.attn_utils.get_kv_cache_spec",
            "vllm.v1.kv_cache_interface.FullAttentionSpec, SlidingWindowSpec",
            "vllm.v1.attention.backends.utils.get_supported_kv_cache_layouts",
            "vllm.v1.attention.backends.utils.resolve_kv_cache_layout",
            "vllm.v1.core.kv_cache_planning.get_global_kv_cache_groups",
            "vllm.v1.core.kv_cache_planning.get_kv_cache_configs",
            "vllm.v1.core.kv_cache_planning._pool_bytes_per_block_from_builder",
            "vllm.v1.core.kv_cache_planning._max_memory_usage_bytes_from_groups",
            "vllm.v1.core.kv_cache_planning._estimate_max_model_len_from_groups",
            "vllm.v1.core.kv_cache_utils.get_kv_cache_capacity",
        ],
        "layouts": layouts(),
        "specs": spec_rows(),
        "planner": {"run_columns": RUN_COLUMNS, "groupings": groupings, "plans": plans},
    }
    arguments.output.write_text(rows_on_lines(document) + "\n")
    print(
        f"{len(document['specs']['rows'])} layer rows, {len(plans)} plans, "
        f"{sum(len(p.get('runs', ())) for p in plans)} runs, {len(groupings)} groupings, "
        f"{arguments.output.stat().st_size} bytes"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
