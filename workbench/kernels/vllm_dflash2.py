"""vLLM 0.33.0's DFlash2 kernels as variants named ``vllm``, as its Beam drafter uses them."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.registry import register
from workbench.kernels.requirements import vllm_importable
from workbench.kernels.vllm_beam import (
    FLOATS,
    PAGE,
    count,
    engine,
    joint_cache,
    kept,
    scalar,
    side_by_side,
    store_rows,
)


@register("dynamic_conv", "vllm", requires=(vllm_importable, FLOATS))
def dynamic_conv(x: Tensor, coefficients: Tensor, base: Tensor, query_len: int) -> Tensor:
    """``model_executor/models/qwen3_dflash2.py: dflash2_grouped_conv_impl``.

    Beam's drafter runs it for the side in front of each sublayer.
    """
    out: Tensor = engine("model_executor.models.qwen3_dflash2").dflash2_grouped_conv_impl(
        x, coefficients, base, query_len, x.shape[1] // coefficients.shape[-1]
    )
    return out


@register("conv_residual_norm", "vllm", requires=(vllm_importable, FLOATS))
def conv_residual_norm(
    x: Tensor,
    coefficients: Tensor,
    base: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    query_len: int,
) -> tuple[Tensor, Tensor]:
    """``models/beam/nvidia/dflash2_conv_ops.py: conv_residual_norm``.

    The engine updates the residual in place; this hands it a clone, one launch more.
    """
    normed, updated = engine("models.beam.nvidia.dflash2_conv_ops").conv_residual_norm(
        x,
        coefficients,
        base.contiguous(),
        residual.clone(memory_format=torch.contiguous_format),
        weight,
        eps,
        query_len,
        x.shape[1] // coefficients.shape[-1],
    )
    return updated, normed


@register("candidate_edges", "vllm", requires=(vllm_importable, FLOATS))
def candidate_edges(
    predecessors: Tensor,
    successors: Tensor,
    ids: Tensor,
    unary: Tensor,
    hidden: Tensor,
    anchors: Tensor,
) -> Tensor:
    """``models/beam/nvidia/dflash2_ops.py: candidate_edges``; all tensors made contiguous."""
    out: Tensor = engine("models.beam.nvidia.dflash2_ops").candidate_edges(
        predecessors.contiguous(),
        successors.contiguous(),
        ids.contiguous(),
        unary.contiguous(),
        hidden.contiguous(),
        anchors,
        ids.shape[-1],
    )
    return out


@register("context_kv_write", "vllm", requires=(vllm_importable, FLOATS))
def context_kv_write(
    kv: Tensor,
    weight: Tensor,
    positions: Tensor,
    rope: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    rows: Tensor,
    eps: float,
    *,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """``models/beam/nvidia/dflash2_context_ops.py: store_context_kv``, one launch for all layers.

    The engine's kernel writes K and V through one pointer, so V of a head must lie right behind its
    K: ``k_rows`` and ``v_rows`` the two halves of a ``[L, M, G, 2 D]`` tensor. For two caches apart
    it writes to a buffer in the dtype of ``kv``, and ``_custom_ops.py: reshape_and_cache_flash``
    moves (and quantises) each layer's rows: the same values, but L + 2 launches, whose time is not
    the engine's.
    """
    if kv.shape[0] == 0:
        return
    kv, rows = kv.contiguous(), rows.contiguous()
    if side_by_side(k_rows, v_rows):
        _store(kv, weight, positions, rope, k_rows, rows, eps, (k_scale, v_scale))
        return
    tokens, layers, _, heads, dim = kv.shape
    room = -(-tokens // PAGE) * PAGE
    buffer = kv.new_empty(layers, room, heads, 2 * dim)[..., :dim]
    here = count(tokens, kv.device)
    _store(kv, weight, positions, rope, buffer, here, eps, (None, None))
    keys = buffer[:, :tokens].contiguous()
    one = scalar(1.0, kv.device)
    for layer in range(layers):
        scales = [one if s is None else s[layer : layer + 1] for s in (k_scale, v_scale)]
        store_rows(keys[layer], kv[:, layer, 1], k_rows[layer], v_rows[layer], rows, *scales)


def _store(
    kv: Tensor,
    weight: Tensor,
    positions: Tensor,
    rope: Tensor,
    k_rows: Tensor,
    slots: Tensor,
    eps: float,
    scales: tuple[Tensor | None, Tensor | None],
) -> None:
    """The engine's kernel; ``k_rows`` ``[L, M, G, D]`` is the K half of a joint cache."""
    layers = kv.shape[1]
    k_scale, v_scale = scales
    scale_addresses = None
    if k_scale is not None and v_scale is not None:
        scale_addresses = torch.stack(
            (_addresses(k_scale, layers), _addresses(v_scale, layers)), 1
        ).flatten()
    engine("models.beam.nvidia.dflash2_context_ops").store_context_kv(
        kv,
        weight.contiguous(),
        positions,
        rope,
        _addresses(k_rows, layers),
        slots,
        joint_cache(k_rows[0]),
        eps,
        scale_addresses,
    )


def _addresses(of: Tensor, layers: int) -> Tensor:
    """int64 ``[layers]``: where ``of[layer]`` begins; made by a kernel, so a graph can hold it."""
    begin, step = of.data_ptr(), of.stride(0) * of.element_size()
    return kept(
        ("addresses", begin, step, layers, of.device),
        lambda: torch.arange(layers, device=of.device) * step + begin,
    )


@register("selector_walk", "vllm", requires=(vllm_importable,))
def selector_walk(
    edges: Tensor, ids: Tensor, temperature: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``v1/worker/gpu/spec_decode/dflash2/speculator.py: _selector_walk_kernel``, greedy.

    Raises:
        KernelError: ``noise`` is given: the engine's kernel draws its own from seeds.
    """
    if noise is not None:
        raise KernelError(
            "vllm of selector_walk draws its own noise and takes none; leave noise out for the "
            "greedy walk, or select another variant"
        )
    batch, steps, top_k = ids.shape
    tokens = torch.empty(batch, steps, dtype=torch.int64, device=ids.device)
    realized = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    if ids.numel() == 0:
        return tokens, realized
    walk = engine("v1.worker.gpu.spec_decode.dflash2.speculator")
    rows = count(batch * steps, ids.device)
    # Positions only place the noise and every request is its own state: neither matters here.
    states = kept(("states", batch, steps, ids.device), lambda: rows // steps)
    walk._selector_walk_kernel[(batch,)](
        edges.contiguous(),
        ids.contiguous(),
        rows,
        states,
        temperature,
        rows,
        tokens,
        realized,
        num_steps=steps,
        top_k=top_k,
        BLOCK_K=1 << (top_k - 1).bit_length(),
        SAMPLE_PROBABILISTIC=False,
        USE_FP64=False,
        num_warps=1,
    )
    return tokens, realized
