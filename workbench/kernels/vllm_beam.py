"""vLLM 0.33.0's own Beam kernels as variants named ``vllm``: norms, projection, RoPE, gate, MLP.

Thin adapters: each calls one or two functions of the engine, named in its docstring, and changes
layouts only. Nothing of vLLM is imported before a variant is called for the first time (that import
takes about 20 s). The engine's remaining kernels are in ``vllm_attention``, ``vllm_experts`` and
``vllm_dflash2``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.registry import register
from workbench.kernels.requirements import Where, activations, vllm_importable

FLOATS = activations(torch.bfloat16, torch.float32)
PAGE = 16  # the engine's default block size, used where it divides the rows of a cache
_CONSTANTS: dict[tuple[Any, ...], Tensor] = {}
_CONSTANTS_MAX = 1024


@cache
def engine(module: str) -> Any:
    """A module of vLLM, imported at first use: its file's path with dots, without ``vllm/``."""
    return importlib.import_module(f"vllm.{module}")


def ships(pattern: str) -> bool:
    """Whether a file matching ``pattern`` lies in the installed vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return any(True for folder in folders for _ in Path(folder).glob(pattern))


def compiled_operations(where: Where) -> str | None:
    """Requirement: the shared libraries with the engine's CUDA operations."""
    if ships("_C*.so") and ships("_moe_C*.so"):
        return None
    return "this vLLM comes without its compiled CUDA operations"


def kept(key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    """A small constant tensor, made once for each ``key``.

    While a CUDA graph is captured nothing is kept: the tensor would lie in that graph's memory.
    """
    found = _CONSTANTS.get(key)
    if found is None:
        found = make()
        if not (found.is_cuda and torch.cuda.is_current_stream_capturing()):
            if len(_CONSTANTS) >= _CONSTANTS_MAX:
                _CONSTANTS.clear()
            _CONSTANTS[key] = found
    return found


def scalar(value: float, device: torch.device) -> Tensor:
    """``value`` as a float32 tensor ``[1]``, the form in which the engine's kernels read scales."""
    return kept(
        ("scalar", value, device),
        lambda: torch.full((1,), value, dtype=torch.float32, device=device),
    )


def count(n: int, device: torch.device) -> Tensor:
    """int64 0 .. n-1."""
    return kept(("count", n, device), lambda: torch.arange(n, device=device))


def page_of(rows: int) -> int:
    """Rows a page of a flat cache of ``rows`` rows has: the engine's default, or one page."""
    return PAGE if rows % PAGE == 0 else max(rows, 1)


def side_by_side(k_rows: Tensor, v_rows: Tensor) -> bool:
    """Whether V of a head lies right behind its K, as in the engine's own cache.

    That is so when ``k_rows`` and ``v_rows`` are the two halves of one ``[..., G, 2 D]`` tensor.
    """
    step = k_rows.shape[-1] * k_rows.element_size()
    return (
        k_rows.dtype == v_rows.dtype
        and k_rows.stride() == v_rows.stride()
        and k_rows.stride(-1) == 1
        and v_rows.data_ptr() - k_rows.data_ptr() == step
    )


def joint_cache(k_rows: Tensor) -> Tensor:
    """The engine's view ``[pages, G, page, 2 D]`` of a cache for which ``side_by_side`` holds.

    ``k_rows`` is ``[M, G, D]``, the K half.
    """
    rows, heads, dim = k_rows.shape
    page = page_of(rows)
    row, head, _ = k_rows.stride()
    return k_rows.as_strided((rows // page, heads, page, 2 * dim), (page * row, head, row, 1))


@register("rms_norm", "vllm", requires=(vllm_importable, FLOATS))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``models/beam/nvidia/layernorm.py: beam_rms_norm``; ``x [N, H]`` as it is."""
    out: Tensor = engine("models.beam.nvidia.layernorm").beam_rms_norm(x, weight, eps)
    return out


@register("boundary", "vllm", requires=(vllm_importable, FLOATS))
def boundary(
    h: Tensor,
    sublayer: Tensor,
    post_weight: Tensor,
    scale: tuple[float, float],
    next_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``models/beam/nvidia/layernorm.py: beam_norm_residual_norm``, without programmatic launch.

    The engine launches it so only behind its fused all-reduce.
    """
    hidden, normed = engine("models.beam.nvidia.layernorm").beam_norm_residual_norm(
        sublayer, h, post_weight, eps, next_weight, eps, scale
    )
    return hidden, normed


@lru_cache(maxsize=64)
def _low_latency(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the engine would use its low-latency product (Blackwell only, needs FlashInfer)."""
    if importlib.util.find_spec("flashinfer") is None:
        return False
    weight = torch.empty(shape, dtype=dtype, device=device)
    return bool(engine("models.beam.nvidia.projection").use_low_latency_gemm(weight))


@register("qkvg", "vllm", requires=(vllm_importable, FLOATS))
def qkvg(x: Tensor, weight: Tensor) -> Tensor:
    """``models/beam/nvidia/projection.py: packed_projection``.

    On Hopper that is ``torch.nn.functional.linear``. On Blackwell the engine's low-latency products
    need FlashInfer; without it this is the plain product there too.
    """
    low = weight.is_cuda and _low_latency(tuple(weight.shape), weight.dtype, weight.device)
    out: Tensor = engine("models.beam.nvidia.projection").packed_projection(x, weight, low)
    return out


def store_rows(
    k: Tensor,
    v: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    slots: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """``_custom_ops.py: reshape_and_cache_flash``: K and V ``[N, G, D]`` to flat cache rows."""
    rows, heads, dim = k_rows.shape
    page = page_of(rows)
    fp8 = k_rows.dtype == torch.float8_e4m3fn
    caches = []
    for flat in (k_rows, v_rows):
        row, head, _ = flat.stride()
        paged = flat.as_strided((rows // page, page, heads, dim), (page * row, row, head, 1))
        caches.append(paged.view(torch.uint8) if fp8 else paged)
    engine("_custom_ops").reshape_and_cache_flash(
        k, v, *caches, slots, "fp8" if fp8 else "auto", k_scale, v_scale
    )


@register("qkv_write", "vllm", requires=(vllm_importable, FLOATS))
def qkv_write(
    packed: Tensor,
    qk_norm: Tensor,
    positions: Tensor,
    rope: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    rows: Tensor | None,
    *,
    heads: int,
    full: bool,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """``models/beam/nvidia/attention_ops.py: beam_qk_norm_rope``.

    It inserts K and V itself where the engine's would: a BF16 cache with V of a head right behind
    its K (``k_rows`` and ``v_rows`` the two halves of a ``[M, G, 2 D]`` tensor). For any other
    cache, FP8 among them, the engine writes K to a buffer and runs a second operation, and so does
    this: ``_custom_ops.py: reshape_and_cache_flash``.
    """
    groups, dim = k_rows.shape[-2:]
    tokens = packed.shape[0]
    q_width, kv_width = heads * dim, groups * dim
    if tokens == 0:
        return packed.new_empty(0, heads, dim)
    q, k, v, _ = packed.split([q_width, kv_width, kv_width, q_width], -1)
    slots = count(tokens, packed.device) if rows is None else rows
    insert = k_rows.dtype == packed.dtype == torch.bfloat16 and side_by_side(k_rows, v_rows)
    q, k = engine("models.beam.nvidia.attention_ops").beam_qk_norm_rope(
        q,
        k,
        qk_norm[0],
        qk_norm[1],
        eps,
        positions,
        None if full else rope,
        dim,
        0 if full else dim,
        ssmax=full,
        value=v if insert else None,
        kv_cache=joint_cache(k_rows) if insert else None,
        slot_mapping=slots if insert else None,
    )
    if not insert:
        scales = [scalar(value, packed.device) for value in (k_scale, v_scale)]
        values = v.unflatten(-1, (groups, dim))
        store_rows(k.view(tokens, groups, dim), values, k_rows, v_rows, slots, *scales)
    return q.view(tokens, heads, dim)


@register("output_gate", "vllm", requires=(vllm_importable, FLOATS))
def output_gate(o: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """``models/beam/nvidia/attention_ops.py: beam_output_gate``; ``o`` is made contiguous."""
    heads, dim = o.shape[1:]
    out: Tensor = engine("models.beam.nvidia.attention_ops").beam_output_gate(
        o.contiguous().flatten(1), gate.flatten(1), bias, num_heads=heads, head_dim=dim
    )
    return out.view(o.shape)


@register("softcap", "vllm", requires=(vllm_importable, FLOATS))
def softcap(logits: Tensor, cap: float) -> Tensor:
    """``models/beam/nvidia/activation.py: beam_softcap_logits``.

    The engine works in place and rounds to the logits' dtype. So this clones, and BF16 logits come
    back as float32 with BF16's precision; clone and conversion are not part of the engine's kernel.
    """
    capped: Tensor = engine("models.beam.nvidia.activation").beam_softcap_logits(
        logits.clone(memory_format=torch.contiguous_format), cap
    )
    return capped.float()


@register("dense_mlp", "vllm", requires=(vllm_importable, FLOATS))
def dense_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``models/beam/nvidia/moe.py: BeamMLP.forward`` without its tensor-parallel layers.

    Those are two ``torch.nn.functional.linear``; between them runs
    ``models/beam/nvidia/activation.py: beam_silu_mul``.
    """
    act = engine("models.beam.nvidia.activation").beam_silu_mul(F.linear(x, gate_up))
    return F.linear(act, down)
