"""What a drafter is trained to do: guess each slot's token, and rank its candidates.

The backbone's loss is the cross-entropy of the softcapped logits with the data token (which is what
the target said), early slots weighing more: an error there costs the whole block. The selector's is
the cross-entropy of the edge scores over the K candidates, behind the true previous token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels.reference import linear, rms_norm
from workbench.kernels.tables import Kernels
from workbench.spec.drafter import Drafter
from workbench.training.anchors import TrainingBlocks, make_blocks, sequence_context


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """How the two losses are formed (the fields of ``DistilSettings`` of these names)."""

    decay: float = 4.0
    dpace: float = 0.0
    soft_targets: float = 0.0
    selector_weight: float = 1.0
    inject: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Losses:
    """Scalars: what is minimised, its two parts, and the share of labels among the candidates."""

    total: Tensor
    backbone: Tensor
    selector: Tensor
    recall: Tensor


def sequence_losses(
    drafter: Drafter,
    streams: Tensor,
    final: Tensor,
    tokens: Tensor,
    valid: Tensor,
    places: Tensor,
    terms: LossTerms,
) -> Losses:
    """Losses of the blocks at ``places [S, n]`` of sequences ``tokens [S, T]``.

    ``streams [S * T, taps * H]`` and ``final [S * T, H]`` are the target's, without a gradient.
    """
    c, query = drafter.config, drafter.block
    limit = min(c.max_position_embeddings, drafter.target.config.max_position_embeddings)
    blocks = make_blocks(tokens, valid, places, query)
    context = sequence_context(drafter, streams, tokens.shape)
    attention = TrainingBlocks(context, blocks.places, query, c.sliding_window, limit)
    hidden = drafter(drafter.block_ids(blocks.anchors, query), attention, query)
    mask_rows = hidden.unflatten(0, (-1, query))[:, 1:]
    teacher = None
    if terms.soft_targets:
        # The target's state at position p names the token at p + 1.
        before = blocks.places[..., None] + torch.arange(query - 1, device=tokens.device)
        before = before.clamp(max=tokens.shape[1] - 1).flatten(1)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None] * tokens.shape[1] + before
        with torch.no_grad():
            teacher = drafter.target.logits(final[rows.flatten()])
        teacher = teacher.view(*blocks.labels.shape, -1)
    return block_losses(
        drafter, mask_rows, blocks.anchors, blocks.labels, blocks.live, terms, teacher
    )


def slot_weights(count: int, decay: float, device: torch.device | str = "cpu") -> Tensor:
    """``exp(-(k - 1) / decay)`` for slots k = 1 .. ``count``, float32 ``[count]``."""
    return torch.exp(-torch.arange(count, device=device) / decay)


def dpace_weights(probability: Tensor, live: Tensor, smoothing: float) -> Tensor:
    """D-PACE: how much the expected accepted length depends on each slot, ``[B, N]``.

    With ``r = (1 - smoothing) * probability + smoothing`` of the label in each slot (1 where it
    does not count), slot j weighs the sum over m >= j of the product of r up to m. No gradient.
    """
    r = ((1 - smoothing) * probability.detach() + smoothing).where(live, 1.0)
    survival = r.cumprod(1).where(live, 0.0)
    return survival.flip(1).cumsum(1).flip(1)


def block_losses(
    drafter: Drafter,
    hidden: Tensor,
    anchors: Tensor,
    labels: Tensor,
    live: Tensor,
    terms: LossTerms,
    teacher: Tensor | None = None,
) -> Losses:
    """Losses of B blocks of N slots.

    Args:
        hidden: ``[B, N, H]``, the drafter's states of the mask rows.
        anchors, labels, live: as in :class:`workbench.training.anchors.Blocks`.
        teacher: ``[B, N, V]``, the target's own logits for the labels' positions, when
            ``terms.soft_targets`` is above 0.
    """
    logits = drafter.logits(hidden)  # float32 [B, N, V]
    wrong = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    wrong = wrong.view(labels.shape)
    weights = slot_weights(labels.shape[1], terms.decay, labels.device) * live
    if terms.dpace:
        weights = dpace_weights(torch.exp(-wrong), live, terms.dpace) * live
    if terms.soft_targets and teacher is not None:
        soft = -(teacher.float().softmax(-1) * logits.log_softmax(-1)).sum(-1)
        wrong = torch.lerp(wrong, soft, terms.soft_targets)
    backbone = (weights * wrong).sum() / weights.sum().clamp(min=1e-6)

    ids = logits.detach().topk(drafter.config.selector_top_k, -1).indices
    found = ids == labels[..., None]
    if terms.inject:
        missing = ~found.any(-1)
        last = torch.where(missing, labels, ids[..., -1])
        ids = torch.cat((ids[..., :-1], last[..., None]), -1)
        found = ids == labels[..., None]
    present = found.any(-1)
    scores = logits.gather(-1, ids) + pair_scores(drafter, hidden, anchors, labels, ids)
    gold = found.to(torch.uint8).argmax(-1)
    misranked = F.cross_entropy(scores.flatten(0, 1), gold.flatten(), reduction="none")
    ranked = weights * present
    selector = (ranked * misranked.view(labels.shape)).sum() / (ranked.sum() + 1e-6)
    return Losses(
        total=backbone + terms.selector_weight * selector,
        backbone=backbone.detach(),
        selector=selector.detach(),
        recall=((present & live).sum() / live.sum().clamp(min=1)).detach(),
    )


def pair_scores(
    drafter: Drafter, hidden: Tensor, anchors: Tensor, labels: Tensor, ids: Tensor
) -> Tensor:
    """The selector's term of each candidate behind the true previous token, float32 ``[B, N, K]``.

    As one product with all successors, of which K are taken: the gradient of looking up the
    candidates' rows would be added up row by row.
    """
    s = drafter.selector
    before = torch.cat((anchors[:, None], labels[:, :-1]), 1)
    weighted = F.embedding(before, s.predecessor) * linear(hidden, s.projection)
    return linear(weighted, s.successor).gather(-1, ids).float()


def training_kernels(functions: Kernels) -> Kernels:
    """The torch operations, with convolutions whose products are float32 ones.

    The reference multiplies in float64 to round a product and a sum once; a gradient needs no such
    care, and the copies in float64 are most of its cost.
    """
    table: dict[str, Callable[..., Any]] = {op: getattr(functions, op) for op in Kernels.__slots__}
    return Kernels(
        table | {"dynamic_conv": _dynamic_conv, "conv_residual_norm": _conv_residual_norm}
    )


def _dynamic_conv(x: Tensor, coefficients: Tensor, base: Tensor, query_len: int) -> Tensor:
    taps, groups = coefficients.shape[1:]
    blocks = x.float().unflatten(0, (-1, query_len)).unflatten(-1, (groups, -1))
    kernel = base.float().unflatten(-1, (groups, -1)) + coefficients.float()[..., None]
    kernel = kernel.unflatten(0, (-1, query_len))  # [blocks, Q, taps, groups, H / groups]
    out = kernel[:, :, 0] * blocks
    for tap in range(1, taps):
        earlier = F.pad(blocks[:, :-tap], (0, 0, 0, 0, tap, 0))
        out = out + kernel[:, :, tap] * earlier
    return out.flatten(2).flatten(0, 1).to(x.dtype)


def _conv_residual_norm(
    x: Tensor,
    coefficients: Tensor,
    base: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    query_len: int,
) -> tuple[Tensor, Tensor]:
    residual = _dynamic_conv(x, coefficients, base, query_len) + residual
    return residual, rms_norm(residual, weight, eps)
