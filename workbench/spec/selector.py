"""From a drafter's block pass to draft tokens: candidates, edges, and the walk over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import DraftError
from workbench.spec.draft_attention import CachedBlocks
from workbench.spec.draft_cache import DraftCache
from workbench.spec.drafter import Drafter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """What was drafted for R requests, N slots each, K candidates a slot.

    Attributes:
        token_ids: int64 ``[R, N]``.
        candidates: int64 ``[R, N, K]``, best first by their own logits.
        unary: float32 ``[R, N, K]``, these logits, softcapped.
        scores: float32 ``[R, N, K]``, realized: behind the path walked, before temperature.
    """

    token_ids: Tensor
    candidates: Tensor
    unary: Tensor
    scores: Tensor

    def probabilities(self, temperature: float) -> Tensor:
        """The proposal distribution over the K candidates, float32 ``[R, N, K]``.

        Conditional on the path before it, and exactly 0 for every token that is no candidate.
        Temperature 0 is taken as 1.
        """
        return (self.scores / (temperature or 1.0)).softmax(-1)

    def confidences(self, temperature: float) -> Tensor:
        """Probability of each draft token among its candidates, float32 ``[R, N]``."""
        chosen = self.candidates == self.token_ids[..., None]
        return (self.probabilities(temperature) * chosen).sum(-1)


def gumbel(generators: Sequence[torch.Generator], slots: int, top_k: int) -> Tensor:
    """Gumbel noise float32 ``[R, slots, top_k]`` on the CPU, a generator a request."""
    uniform = torch.stack(
        [torch.rand(slots, top_k, generator=g, dtype=torch.float64) for g in generators]
    )
    # rand may give exactly 0, whose noise would be -inf for every candidate of a slot.
    return -torch.log(-torch.log(uniform.clamp(min=2.0**-60))).float()


def walk(
    drafter: Drafter,
    hidden: Tensor,
    anchors: Tensor,
    *,
    temperature: float = 0.0,
    noise: Tensor | None = None,
) -> Proposal:
    """Mask rows' states ``[R, N, H]`` and anchors ``[R]`` -> the drafted path.

    The path is the greedy one unless ``noise [R, N, K]`` is given and the temperature is above 0.
    Only temperature acts on drafts; other sampling parameters act on what verifies them.

    Raises:
        DraftError: the scores are NaN or infinite.
    """
    ids, unary = drafter.candidates(hidden)
    edges = drafter.edges(hidden, ids, unary, anchors)
    if not bool(edges.sum().isfinite()):  # a walk over NaN has no first maximum
        raise DraftError(
            f"the scores of {drafter.name} are not finite; check its weights and config, and any "
            "intervention"
        )
    hottest = min(temperature, torch.finfo(torch.float32).max)  # beyond it all are alike
    heat = torch.full((len(anchors),), hottest, device=hidden.device)
    tokens, scores = drafter.kernels.selector_walk(edges, ids, heat, noise)
    return Proposal(token_ids=tokens, candidates=ids, unary=unary, scores=scores)


def propose(
    drafter: Drafter,
    cache: DraftCache,
    anchors: Tensor,
    slots: list[int],
    speculative_tokens: int,
    *,
    temperature: float = 0.0,
    generators: Sequence[torch.Generator] | None = None,
) -> Proposal:
    """Draft one block for each slot, behind the context that its cache holds.

    Args:
        anchors: int64 ``[R]``, the last token of each sequence, whose context is not there yet.
        generators: one a request, to sample the walk; the greedy walk when None.

    Raises:
        DraftError: no anchor, or not one for each slot.
    """
    if not slots or anchors.shape != (len(slots),):
        raise DraftError(
            f"propose needs an anchor for each slot, at least one: got {list(anchors.shape)} for "
            f"{len(slots)} slots"
        )
    query_len = 1 + speculative_tokens
    starts = torch.tensor([cache.ends[s] for s in slots], device=anchors.device)
    attention = CachedBlocks(cache, starts, slots, query_len, cache.limit)
    hidden = drafter(drafter.block_ids(anchors, query_len), attention, query_len)
    rows = hidden.unflatten(0, (-1, query_len))[:, 1:]  # the anchor's row names no candidate
    noise = None
    if generators is not None and temperature > 0:
        noise = gumbel(generators, speculative_tokens, drafter.config.selector_top_k)
        noise = noise.to(hidden.device)
    return walk(drafter, rows, anchors, temperature=temperature, noise=noise)
