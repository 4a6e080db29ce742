"""The operations of Beam's forward pass in plain torch: what each one is, with its roundings.

Shape letters: N tokens, H hidden, A query heads, G KV heads, D head_dim, E experts, K experts a
token, I expert width. "Rounded" means cast to the activation dtype; every norm, the router, RoPE
and SwiGLU compute in float32 and round once (vLLM 0.33.0's Beam, described in docs/model.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.model.config import SSMAX_LENGTH, SSMAX_POWER

# Above this many tokens it pays to sort tokens by expert; at or below, computing every expert for
# every token is two matrix products and no bookkeeping (measured on a CPU, benchmarks/NOTES.md).
DENSE_EXPERTS_MAX_TOKENS = 32
DENSE_EXPERTS_MAX_EXPERTS = 32


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x [N, in] @ weight [out, in].T``, through the weight's packed form when it has one."""
    packed = getattr(weight, "packed", None)
    if packed is not None and packed.usable(x):
        return packed(x)
    return F.linear(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis in float32, times ``weight`` in float32, rounded once."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def depth_scale(n: int) -> tuple[float, float]:
    """Factors of the ``n``-th residual add: (1/sqrt(n), sqrt((n-1)/n)) for (new, stream).

    Attention of layer l (from 0) is add 2(l+1), its MLP add 2(l+1)+1: the stream keeps unit
    variance over depth when the normed sublayer outputs have it.
    """
    return n**-0.5, ((n - 1) / n) ** 0.5


def boundary(
    h: Tensor,  # [N, H] residual stream
    sublayer: Tensor,  # [N, H] attention or MLP output
    post_weight: Tensor,  # [H]
    scale: tuple[float, float],
    next_weight: Tensor,  # [H] norm before the next sublayer
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Post-norm, depth-scaled add, next pre-norm: returns (new stream, next sublayer's input).

    ``h = round(round(p * scale[0]) + round(h * scale[1]))`` with ``p = rms_norm(sublayer)``.
    """
    h = rms_norm(sublayer, post_weight, eps) * scale[0] + h * scale[1]
    return h, rms_norm(h, next_weight, eps)


def rope_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and signed sin for :func:`apply_rope`, float32 ``[N, 1, D]``.

    NeoX layout (first half / second half); the sine of the first half is negated so that a
    rotation is ``x * cos + roll(x) * sin``. The angles are float64: the engine's are float32, whose
    error grows with the position, to 0.03 rad at one million (docs/model.md).
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
    angle = positions.double()[:, None, None] * theta ** (-exponent / head_dim)  # [N, 1, D/2]
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [N, heads, D]`` in float32, rounded once."""
    y = x.float()
    return torch.addcmul(y * cos, y.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def ssmax_scale(positions: Tensor) -> Tensor:
    """SSMax factor of full layers' queries, float32 ``[N, 1, 1]``: (1 + (p+1)/2048)^0.1."""
    return (1.0 + (positions.to(torch.float32) + 1.0) / SSMAX_LENGTH).pow(SSMAX_POWER)[
        :, None, None
    ]


def output_gate(o: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """``round(o * round(sigmoid(round(gate + bias))))``; o, gate ``[N, A, D]``, bias ``[A]``."""
    return o * torch.sigmoid(gate + bias[:, None])


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once; ``gate_up [..., 2 I]`` -> ``[..., I]``."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """Sigmoid affinity of every expert, float32 ``[N, E]``; ``weight [E, H]`` is float32."""
    return torch.sigmoid(F.linear(x.float(), weight))


def route(
    scores: Tensor,  # [N, E] float32, from router_scores
    correction_bias: Tensor,  # [E] float32
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    renormalise: bool,
) -> tuple[Tensor, Tensor]:
    """Choose experts: (ids int64 ``[N, K]``, weights float32 ``[N, K]``).

    The choice ranks ``scores + correction_bias``, among the experts of the best ``topk_group``
    groups (a group's rank: the sum of its two best biased scores). The weights are the unbiased
    scores, divided by their sum when ``renormalise``.
    """
    choice = scores + correction_bias
    if n_group is not None and topk_group is not None and topk_group < n_group:
        groups = choice.unflatten(-1, (n_group, -1))  # [N, groups, E / groups]
        rank = groups.topk(2, -1).values.sum(-1)
        keep = torch.zeros_like(rank).scatter_(-1, rank.topk(topk_group, -1).indices, 1.0)
        choice = groups.masked_fill(keep[..., None] == 0, float("-inf")).flatten(-2)
    ids = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) if renormalise else weights


def expert_mlp(
    x: Tensor,  # [N, H]
    gate_up: Tensor,  # [E, 2 I, H]
    down: Tensor,  # [E, I, H], transposed so that all experts' down products are one matrix
    ids: Tensor,  # [N, K]
    weights: Tensor,  # [N, K] float32
) -> Tensor:
    """Weighted sum of the chosen experts' SwiGLU outputs, ``[N, H]`` (before the routed scale)."""
    if x.shape[0] == 1:
        return expert_mlp_gathered(x, gate_up, down, ids, weights)
    if x.shape[0] <= DENSE_EXPERTS_MAX_TOKENS and gate_up.shape[0] <= DENSE_EXPERTS_MAX_EXPERTS:
        return expert_mlp_dense(x, gate_up, down, ids, weights)
    return expert_mlp_grouped(x, gate_up, down, ids, weights)


def expert_mlp_gathered(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """One token (``x [1, H]``): only the weights of its K experts are read."""
    chosen = ids[0]
    act = swiglu(F.linear(x, gate_up[chosen].flatten(0, 1)).unflatten(-1, (len(chosen), -1)))
    act = act * weights[..., None].to(act.dtype)  # [1, K, I]
    return act.flatten(1) @ down[chosen].flatten(0, 1)


def expert_mlp_dense(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Every expert on every token, those not chosen weighted by zero."""
    experts = gate_up.shape[0]
    table = torch.zeros(x.shape[0], experts, dtype=weights.dtype, device=x.device)
    table = table.scatter(1, ids, weights)
    act = swiglu(_all_gate_up(x, gate_up).unflatten(-1, (experts, -1)))  # [N, E, I]
    act = (act * table[..., None].to(act.dtype)).flatten(1)
    packed = getattr(down, "packed", None)
    if packed is not None and packed.usable(act):
        return packed(act)
    return act @ down.flatten(0, 1)


def _all_gate_up(x: Tensor, gate_up: Tensor) -> Tensor:
    packed = getattr(gate_up, "packed", None)
    if packed is not None and packed.usable(x):
        return packed(x)
    return F.linear(x, gate_up.flatten(0, 1))


def expert_mlp_grouped(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Tokens sorted by expert, one pair of matrix products for each expert that was chosen."""
    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=gate_up.shape[0]).tolist()
    rows = order // top_k
    scale = weights.flatten()[order][:, None]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            act = swiglu(F.linear(x[rows[part]], gate_up[expert]))
            out.index_add_(0, rows[part], (act @ down[expert]).float() * scale[part])
            start += count
    return out.to(x.dtype)


def softcap(logits: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(logits / cap)`` in float32; float32 logits unchanged when ``cap`` is None."""
    logits = logits.float()
    return logits if cap is None else torch.tanh(logits / cap) * cap
