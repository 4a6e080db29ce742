"""vLLM 0.33.0's router and experts as variants named ``vllm``, as its Beam uses them on Hopper."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from workbench.kernels.registry import register
from workbench.kernels.requirements import activations, vllm_importable
from workbench.kernels.vllm_beam import FLOATS, compiled_operations, engine

_FUSED_MOE = "model_executor.layers.fused_moe"
# down weight -> (its version, the copy [E, H, I]); an entry ends with its weight.
_DOWN = WeakIdKeyDictionary()


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """float32 ``[N, E]``: the tiers of ``GateLinear.forward`` that a float32 weight reaches."""
    gate = engine(f"{_FUSED_MOE}.router.gate_linear").GateLinear
    major = torch.cuda.get_device_capability(x.device)[0]
    if (weight.shape[1], weight.shape[0]) in gate.FP32_SUPPORTED_SHAPES and major in (9, 10):
        out: Tensor = torch.ops.vllm.fp32_router_gemm_dispatch(x.contiguous(), weight, major == 10)
        return out
    return F.linear(x.float(), weight)


@register("router", "vllm", requires=(vllm_importable, compiled_operations, FLOATS))
def router(
    x: Tensor,
    weight: Tensor,
    correction_bias: Tensor,
    *,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    renormalise: bool,
) -> tuple[Tensor, Tensor]:
    """``GateLinear`` of ``model_executor/layers/fused_moe/router/gate_linear.py``, then top-k.

    Its layer object needs an initialised engine, so what is called is the operation it dispatches
    to, ``fp32_router_gemm_dispatch`` (up to 32 tokens a kernel of its own for 256 x 5120 and four
    other shapes, else a cast and a float32 product). The choice is
    ``router/fused_topk_bias_router.py: fused_topk_bias``, or with groups
    ``router/grouped_topk_router.py: fused_grouped_topk``, whose int32 ids are converted.
    """
    if x.shape[0] == 0:
        return x.new_empty(0, top_k, dtype=torch.int64), x.new_empty(0, top_k, dtype=torch.float32)
    logits = _logits(x, weight)
    if n_group is not None and topk_group is not None and (n_group > 1 or topk_group > 1):
        weights, ids = engine(f"{_FUSED_MOE}.router.grouped_topk_router").fused_grouped_topk(
            hidden_states=x,
            gating_output=logits,
            topk=top_k,
            renormalize=renormalise,
            e_score_correction_bias=correction_bias,
            num_expert_group=n_group,
            topk_group=topk_group,
            scoring_func="sigmoid",
        )
        return ids.to(torch.int64), weights
    weights, ids = engine(f"{_FUSED_MOE}.router.fused_topk_bias_router").fused_topk_bias(
        hidden_states=x,
        gating_output=logits,
        scoring_func="sigmoid",
        e_score_correction_bias=correction_bias,
        topk=top_k,
        renormalize=renormalise,
        indices_type=torch.int64,
    )
    return ids, weights


def _engine_down(down: Tensor) -> Tensor:
    """``down [E, I, H]`` as the engine keeps it, ``[E, H, I]``: a copy, made once for a weight."""
    version = None if down.is_inference() else down._version
    known = _DOWN.get(down)
    if known is None or known[0] != version:
        known = (version, down.detach().transpose(1, 2).contiguous())
        _DOWN[down] = known
    copy: Tensor = known[1]
    return copy


@register(
    "expert_mlp",
    "vllm",
    requires=(vllm_importable, compiled_operations, activations(torch.bfloat16)),
)
def expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, scale: float
) -> Tensor:
    """``model_executor/layers/fused_moe/fused_moe.py: fused_experts``, the Triton experts.

    The engine keeps the down weights as ``[E, H, I]``: they are **copied** at the first call with a
    weight tensor and the copy kept as long as that tensor lives, so the down weights take twice
    their memory. Each expert's output is rounded before the sum over experts, as in the engine.
    ``scale`` is one more elementwise launch, as there. ``ids`` and ``weights`` are made contiguous:
    the engine's kernels take their rows for neighbours without looking.
    """
    if x.shape[0] == 0:
        return torch.empty_like(x)
    out: Tensor = engine(_FUSED_MOE).fused_experts(
        x.contiguous(), gate_up, _engine_down(down), weights.contiguous(), ids.contiguous()
    )
    return out if scale == 1.0 else out.mul_(scale)
