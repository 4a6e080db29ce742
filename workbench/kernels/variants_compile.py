"""The variant "compile": the references through torch.compile, compiled at the first call.

What a compiler cannot see through is done outside it: the masks of attention, and the choice of a
form of the expert MLP. Shapes that change are compiled once as dynamic ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels import reference, reference_dflash2
from workbench.kernels.catalogue import DRAFTER_OPS, OPS
from workbench.kernels.reach import Reach, Spans
from workbench.kernels.reference import FP8
from workbench.kernels.registry import register
from workbench.kernels.requirements import compiles

RECOMPILATIONS = 64
# One token gathers its experts' weights; more tokens compute every expert, which needs no host.
GATHER_MAX_TOKENS = 1


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile(function)``, made at the first call so that importing costs nothing."""
    ready: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not ready:
            _allow_recompilations()
            ready.append(torch.compile(function, dynamic=True))
        return ready[0](*args, **kwargs)

    call.__module__ = __name__  # where it was made, not where what it wraps was
    return call


def _allow_recompilations() -> None:
    """Room for every dtype and flavour of an operation: beyond the limit torch.compile runs the
    function uncompiled, with a log line, and its time would be taken for compiled code's."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILATIONS)


_WRITTEN_HERE = ("decode_attention", "prefill_attention", "expert_mlp", "context_kv_write")
for _op in OPS:
    if _op not in _WRITTEN_HERE:
        _room = reference_dflash2 if _op in DRAFTER_OPS else reference
        register(_op, "compile", requires=(compiles,))(compiled(getattr(_room, _op)))


@compiled
def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q ``[B, G, R, D]``, k and v ``[B, S, G, D]``."""
    return F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)


@compiled
def _attend_fp8(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, k_scale: float, v_scale: float
) -> Tensor:
    k, v = (k.float() * k_scale).to(q.dtype), (v.float() * v_scale).to(q.dtype)
    return F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)


@register("decode_attention", "compile", requires=(compiles,))
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    reach: Reach,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """As the reference; the mask comes from outside the compiled part."""
    if not q.numel():
        return torch.empty_like(q)
    tokens, group = q.shape[1], q.shape[2] // k_cache.shape[2]
    where = (reach.slots if reach.view is None else reach.view, slice(reach.span))
    keys, values = k_cache[where], v_cache[where]
    rows = q.unflatten(2, (k_cache.shape[2], -1)).transpose(1, 2).flatten(2, 3)
    mask = reach.mask(tokens, k_cache.shape[1], group, q.dtype)
    if keys.dtype == FP8:
        o = _attend_fp8(rows, keys, values, mask, k_scale, v_scale)
    else:
        o = _attend(rows, keys, values, mask)
    return o.unflatten(2, (tokens, -1)).transpose(1, 2).reshape(q.shape)


@compiled
def _prefill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One chunk: q ``[T, A, D]``, k and v ``[S, G, D]``."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


@register("prefill_attention", "compile", requires=(compiles,))
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """As the reference, a sequence at a time."""
    if not q.numel():
        return torch.empty_like(q)
    parts = zip(
        q.split(spans.q_lengths), k.split(spans.k_lengths), v.split(spans.k_lengths), strict=True
    )
    return torch.cat(
        [
            _prefill(*part, spans.mask(part[0].shape[0], part[1].shape[0], q.device))
            for part in parts
            if part[0].shape[0]
        ]
    )


_context_rows = compiled(reference_dflash2.context_rows)


@register("context_kv_write", "compile", requires=(compiles,))
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
    """Norm and rotation compiled; the scatter not: Inductor fails on caches of dynamic strides."""
    if kv.shape[0]:
        key, value, target = _context_rows(kv, weight, positions, rope, rows, eps)
        reference_dflash2.store_context(k_rows, target, key, k_scale, rows)
        reference_dflash2.store_context(v_rows, target, value, v_scale, rows)


_gathered = compiled(reference.expert_mlp_gathered)
_dense = compiled(reference.expert_mlp_dense)


@register("expert_mlp", "compile", requires=(compiles,))
def expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, scale: float
) -> Tensor:
    """One token reads only its own experts; more tokens compute all of them."""
    form = _gathered if x.shape[0] <= GATHER_MAX_TOKENS else _dense
    return form(x, gate_up, down, ids, weights) * scale if x.shape[0] else torch.empty_like(x)
