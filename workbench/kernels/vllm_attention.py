"""vLLM 0.33.0's attention as variants: its Triton kernel and FlashAttention 3 (``vllm_fa3``).

The engine's kernels find keys through a block table: logical page j of a sequence is physical page
``table[b, j]``. A slot of our cache is ``R / page`` consecutive physical pages, and position p lies
in row ``p % R``, so logical page j of slot s is physical page ``s * (R / page) + j % (R / page)``.
For a ring the positions are first brought below ``2 R + T`` by taking whole rounds off them, which
changes neither rows nor distances; so the table has a fixed size and no number is read back.

The engine makes table and lengths once a step for all layers of a kind. Here they are made in every
call (three small launches for full caches, five for rings), because a call knows only its own
arguments; timings of a variant contain them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.reach import Reach, Spans
from workbench.kernels.registry import register
from workbench.kernels.requirements import Where, activations, vllm_importable
from workbench.kernels.vllm_beam import PAGE, engine, kept, scalar, ships

BF16 = activations(torch.bfloat16)
_TILE = 32  # keys of the Triton kernel's widest step: it reads the table that far past the end
_SEGMENTS = 16  # v1/attention/backends/triton_attn.py: NUM_PAR_SOFTMAX_SEGMENTS
_GRID_2D = 128  # the same file: MIN_LAUNCH_GRID_SIZE_2D
_SPLITS = 32  # config/attention.py: flash_attn_max_num_splits_for_cuda_graph
_SPLIT_TOKENS = 512  # the engine's largest captured graph; beyond it chooses the splits itself


def flash_attention_3(where: Where) -> str | None:
    """Requirement: Hopper, and the library with FlashAttention 3."""
    if where.capability is None or where.capability[0] != 9:
        return "FlashAttention 3 runs on Hopper (compute capability 9.x) only"
    if not ships("vllm_flash_attn/_vllm_fa3_C*.so"):
        return "this vLLM comes without FlashAttention 3"
    return None


def _paged(cache: Tensor, page: int) -> Tensor:
    """``[S, R, G, D]`` as ``[pages, page, G, D]``, the same memory."""
    slots, rows, heads, dim = cache.shape
    step, row, head, _ = cache.stride()
    first = step if page == rows else page * row
    return cache.as_strided((slots * rows // page, page, heads, dim), (first, row, head, 1))


def _page(k_cache: Tensor, v_cache: Tensor) -> int:
    """The engine's default block where it divides R and slots are dense; else a slot is a page."""
    rows = k_cache.shape[1]
    dense = all(c.stride(0) == rows * c.stride(1) for c in (k_cache, v_cache))
    return PAGE if dense and rows % PAGE == 0 else rows


def _tables(reach: Reach, rows: int, page: int, tokens: int) -> tuple[Tensor, Tensor, int]:
    """Block table int32 ``[B, pages]``, lengths int32 ``[B]``, the longest length (on the host)."""
    first, longest = reach.first, reach.span
    if reach.window is not None:
        first = torch.minimum(first, first.remainder(rows).add_(rows))
        longest = 2 * rows - 1 + tokens
    device = first.device
    pages, columns = rows // page, -(-(longest + _TILE) // page)
    column = kept(
        ("column", columns, pages, device), lambda: torch.arange(columns, device=device) % pages
    )
    table = torch.empty(len(first), columns, dtype=torch.int32, device=device)
    torch.add(column, reach.slots[:, None], alpha=pages, out=table)
    lengths = torch.empty(len(first), dtype=torch.int32, device=device)
    torch.add(first, tokens, out=lengths)
    return table, lengths, longest


def _query_starts(batch: int, tokens: int, device: torch.device) -> Tensor:
    """int32 0, T, 2 T ... ``[B + 1]``."""
    return kept(
        ("starts", batch, tokens, device),
        lambda: torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens,
    )


def _segments(q: Tensor, groups: int) -> dict[str, Any]:
    """Scratch with which the Triton kernel splits the keys of short queries, as its backend's."""
    tokens, heads, dim = q.shape
    width = 1 << (dim - 1).bit_length()

    def scratch(*more: int) -> Tensor:
        return q.new_empty(tokens, heads, _SEGMENTS, *more, dtype=torch.float32)

    return {
        "seq_threshold_3D": _GRID_2D // groups,
        "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": scratch(width),
        "softmax_segm_max": scratch(),
        "softmax_segm_expsum": scratch(),
    }


@register("decode_attention", "vllm", requires=(vllm_importable, BF16))
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    reach: Reach,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """``v1/attention/ops/triton_unified_attention.py: unified_attention``, BF16 and FP8 caches.

    Pages of 16 rows where that divides R, else one page a slot. Up to eight tokens a sequence split
    their keys into 16 segments, with the thresholds of ``v1/attention/backends/triton_attn.py``.
    """
    batch, tokens, _, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    page = _page(k_cache, v_cache)
    table, lengths, longest = _tables(reach, k_cache.shape[1], page, tokens)
    flat = q.flatten(0, 1)
    mode = engine("v1.kv_cache_interface").KVQuantMode
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    engine("v1.attention.ops.triton_unified_attention").unified_attention(
        q=flat,
        k=_paged(k_cache, page),
        v=_paged(v_cache, page),
        out=out.flatten(0, 1),
        cu_seqlens_q=_query_starts(batch, tokens, q.device),
        max_seqlen_q=tokens,
        seqused_k=lengths,
        max_seqlen_k=longest,
        softmax_scale=dim**-0.5,
        causal=True,
        window_size=_window(reach.window),
        block_table=table,
        softcap=0.0,
        q_descale=None,
        k_descale=scalar(k_scale, q.device) if fp8 else None,
        v_descale=scalar(v_scale, q.device) if fp8 else None,
        kv_quant_mode=mode.FP8_PER_TENSOR if fp8 else mode.NONE,
        **_segments(flat, k_cache.shape[2]),
    )
    return out


def _window(window: int | None) -> tuple[int, int]:
    """(keys to the left, keys to the right); -1 is no limit."""
    return (-1, -1) if window is None else (window - 1, 0)


@register("decode_attention", "vllm_fa3", requires=(vllm_importable, flash_attention_3, BF16))
def decode_attention_fa3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    reach: Reach,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """``vllm_flash_attn/flash_attn_interface.py: flash_attn_varlen_func`` with a block table.

    What the engine uses by default on Hopper, with its 32 splits at most under CUDA graphs, but
    without the schedule that it prepares once a step: the library prepares one in each call.

    Raises:
        KernelError: R is not a multiple of 16, or the cache is FP8 (the library reads such a cache
            only with an FP8 query, which is another operation).
    """
    if k_cache.dtype != q.dtype:
        raise KernelError(
            "vllm_fa3 of decode_attention reads BF16 caches only (with an FP8 cache the library "
            "wants an FP8 query); select vllm or another variant for an FP8 cache"
        )
    batch, tokens, _, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    page = _page(k_cache, v_cache)
    if page != PAGE:
        raise KernelError(
            f"vllm_fa3 of decode_attention needs dense slots of a multiple of {PAGE} rows, these "
            f"have {k_cache.shape[1]}; allocate more rows or select another variant"
        )
    table, lengths, longest = _tables(reach, k_cache.shape[1], page, tokens)
    engine("vllm_flash_attn.flash_attn_interface").flash_attn_varlen_func(
        q=q.flatten(0, 1),
        k=_paged(k_cache, page),
        v=_paged(v_cache, page),
        out=out.flatten(0, 1),
        cu_seqlens_q=_query_starts(batch, tokens, q.device),
        max_seqlen_q=tokens,
        seqused_k=lengths,
        max_seqlen_k=longest,
        softmax_scale=dim**-0.5,
        causal=True,
        window_size=list(_window(reach.window)),
        block_table=table,
        num_splits=_SPLITS if batch * tokens <= _SPLIT_TOKENS else 0,
        fa_version=3,
    )
    return out


@register("prefill_attention", "vllm", requires=(vllm_importable, BF16))
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """``v1/attention/ops/triton_unified_attention.py: unified_attention`` over flat keys.

    The flat K and V are read as pages of 16 rows where every sequence begins at a multiple of 16,
    else as pages of one row (the engine's caches are always the former).
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    lengths = spans.k_lengths
    whole = sum(lengths) == k.shape[0] and not any(n % PAGE for n in (*lengths, k.shape[0]))
    page = PAGE if whole else 1
    columns = -(-(max(lengths) + _TILE) // page)
    table = torch.empty(len(lengths), columns, dtype=torch.int32, device=q.device)
    column = kept(("line", columns, q.device), lambda: torch.arange(columns, device=q.device))
    begin = spans.k_starts[:-1] if page == 1 else spans.k_starts[:-1] // page
    torch.add(column, begin[:, None], out=table)
    engine("v1.attention.ops.triton_unified_attention").unified_attention(
        q=q,
        k=_paged(k[None], page),
        v=_paged(v[None], page),
        out=out,
        cu_seqlens_q=spans.q_starts.to(torch.int32),
        max_seqlen_q=max(spans.q_lengths),
        seqused_k=spans.k_starts.diff().to(torch.int32),
        max_seqlen_k=max(lengths),
        softmax_scale=q.shape[-1] ** -0.5,
        causal=True,
        window_size=_window(spans.window),
        block_table=table,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return out


@register("prefill_attention", "vllm_fa3", requires=(vllm_importable, flash_attention_3, BF16))
def prefill_attention_fa3(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """``vllm_flash_attn/flash_attn_interface.py: flash_attn_varlen_func`` over flat keys.

    The engine reads keys through a block table here too; the flat form does not need one.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    engine("vllm_flash_attn.flash_attn_interface").flash_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        out=out,
        cu_seqlens_q=spans.q_starts.to(torch.int32),
        max_seqlen_q=max(spans.q_lengths),
        cu_seqlens_k=spans.k_starts.to(torch.int32),
        max_seqlen_k=max(spans.k_lengths),
        softmax_scale=q.shape[-1] ** -0.5,
        causal=True,
        window_size=list(_window(spans.window)),
        fa_version=3,
    )
    return out
