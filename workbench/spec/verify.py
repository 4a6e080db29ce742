"""Verification: how many drafted tokens the target accepts, and the token it puts behind them.

Pure functions on tensors, after vLLM 0.33.0's rejection sampler: greedy, ``standard`` (Leviathan
et al., arXiv 2211.17192) and block verification (arXiv 2403.10444). The stochastic ones are
lossless: what a step emits is distributed as if the target had drawn it token by token. Sampling
settings come first (:meth:`workbench.model.sampling.Sampling.probabilities`): the ``p`` tested here
is the distribution that plain decoding draws from.

Shape letters: B sequences, N drafted slots, V vocabulary, K candidates. A sequence owns N + 1 rows
of the target: row i judges draft i, the row behind its last admitted draft gives the bonus token.
``admitted`` (0 to N) is how many of a sequence's drafts are verified: later drafts and rows are
never looked at, whatever they hold. A draft of -1 is a placeholder that must be refused. Every
sequence is computed by itself, from its own rows and its own random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from workbench.errors import DraftError
from workbench.model.sampling import draw as draw_ids

# Uniform numbers below this are raised to it, as in the engine: a token to which the target gives
# no probability must not pass because u came out as 0.
LOWEST_UNIFORM = 4.66e-10

# The greedy search looks for the maximum of blocks this wide first (see first_maximum).
_SEARCH_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict:
    """What the target said of each sequence's drafts.

    Attributes:
        accepted: how many of the admitted drafts are kept, a prefix; int64 ``[B]``.
        token: the token behind them, the target's own: the correction of the first refused draft,
            or the bonus token where all admitted drafts were accepted; int64 ``[B]``.
    """

    accepted: Tensor
    token: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sparse:
    """The distribution each draft was drawn from: q is 0 outside K candidates.

    Attributes:
        ids: the candidates, distinct within a slot; int64 ``[B, N, K]``.
        probabilities: of each candidate, given the drafts before it; they add up to 1; floating
            ``[B, N, K]``.
    """

    ids: Tensor
    probabilities: Tensor


# Proposals that were chosen, not drawn: q is 1 at the draft and 0 elsewhere.
OneHot: TypeAlias = None
Proposals: TypeAlias = OneHot | Sparse


def first_maximum(logits: Tensor) -> Tensor:
    """Id of the largest logit, the lowest among equals: ``[..., V]`` -> int64 ``[...]``.

    It is ``argmax``, which torch documents to be the first maximum (NaN counts as the largest). On
    a CPU argmax goes number by number while amax is vectorised, so the block that holds the maximum
    is found first: 19 µs instead of 54 µs for 8 x 4096 (measured on one thread of an x86 CPU).
    """
    vocabulary = logits.shape[-1]
    if logits.device.type != "cpu" or vocabulary % _SEARCH_WIDTH:
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, _SEARCH_WIDTH))
    block = blocks.amax(-1).argmax(-1, keepdim=True)  # [..., 1]
    index = block.unsqueeze(-1).expand(*block.shape, _SEARCH_WIDTH)
    inside = blocks.gather(-2, index).squeeze(-2).argmax(-1)
    return block.squeeze(-1) * _SEARCH_WIDTH + inside


def verify_greedy(logits: Tensor, drafts: Tensor, admitted: Tensor) -> Verdict:
    """Accept drafts while each is the target's most likely token, the lowest id among equals.

    Args:
        logits: the target's, floating ``[B, N + 1, V]``.
        drafts: token ids, -1 for a placeholder; int64 ``[B, N]``.
        admitted: drafts to verify, 0 to N; int64 ``[B]``.

    Raises:
        DraftError: shapes or dtypes that do not belong together.
    """
    _check(logits, drafts, admitted)
    best = first_maximum(logits)  # [B, N + 1]
    kept = (best[:, :-1] == drafts) & _admitted_slots(drafts, admitted)
    accepted = _leading(kept)
    return Verdict(accepted=accepted, token=best.gather(1, accepted[:, None])[:, 0])


def verify_standard(
    p: Tensor,
    drafts: Tensor,
    admitted: Tensor,
    u: Tensor,
    draw: Tensor,
    q: Proposals = None,
) -> Verdict:
    """Token by token: accept draft d while p(d) > u q(d), then correct from max(p - q, 0).

    Args:
        p: the target's probabilities after all sampling settings, rows that add up to 1; floating
            ``[B, N + 1, V]``. Row i is conditional on drafts 0 to i - 1.
        drafts: token ids, -1 for a placeholder; int64 ``[B, N]``.
        admitted: drafts to verify, 0 to N; int64 ``[B]``.
        u: independent uniform numbers in [0, 1); column i decides on draft i, the last column is
            not used; floating ``[B, N + 1]``.
        draw: one more uniform number in [0, 1) a sequence, for the corrected or bonus token;
            floating ``[B]``.
        q: None for drafts that were chosen (one-hot), :class:`Sparse` for drafts that were drawn.

    A one-hot refusal draws from p without the draft, a refused placeholder from p, and so does a
    draft to which its own q gives no probability: it cannot have been drawn from that q.

    Raises:
        DraftError: shapes or dtypes that do not belong together.
    """
    _check_draws(p, drafts, admitted, u, draw, q)
    slots = _Slots.of(p, drafts, admitted, q)
    accepted = _leading(slots.usable & (slots.log_p > _uniform(u, slots).log() + slots.log_q))
    return _emit(p, slots, admitted, accepted, torch.ones_like(accepted, dtype=torch.float64), draw)


def verify_block(
    p: Tensor,
    drafts: Tensor,
    admitted: Tensor,
    u: Tensor,
    draw: Tensor,
    q: Proposals = None,
) -> Verdict:
    """Block verification: the longest accepted prefix, on average never shorter than standard's.

    Arguments and errors are those of :func:`verify_standard`. With e_i the joint ratio
    ``exp(L_i)``, ``L_i = min(L_{i-1} + log p(d_i) - log q(d_i), 0)``, the prefix that ends with
    draft i is accepted if ``u_i <= h_i``: ``h_i = e_i`` for the last draft that can be verified
    (the last admitted one, or the one before a placeholder), otherwise ``S / (S + 1 - e_i)`` with
    ``S = sum over x of max(e_i p_{i+1}(x) - q_{i+1}(x), 0)``. All prefixes are tried; behind the
    longest accepted one, the token is drawn from ``max(e p - q, 0)``, with e that prefix's ratio.
    """
    _check_draws(p, drafts, admitted, u, draw, q)
    slots = _Slots.of(p, drafts, admitted, q)
    B, N = drafts.shape
    # Slot by slot, as it is defined: N is small, and a scan could round differently in a batch.
    gain = torch.where(slots.usable, slots.log_p - slots.log_q, 0.0)
    running, ratios = gain.new_zeros(B), [gain.new_ones(B)]
    for i in range(N):
        running = (running + gain[:, i]).clamp(max=0.0)
        ratios.append(running.exp())
    ratio = torch.stack(ratios, 1)  # [B, N + 1]: of the prefix of each length, 1 if empty
    # Outside the candidates q is 0: the sum there is e times what the candidates leave of p.
    inner, next_p, next_q = ratio[:, 1:N], slots.candidate_p[:, 1:], slots.candidate_q[:, 1:]
    residual = inner * (1.0 - next_p.sum(-1)).clamp(min=0.0)
    residual = residual + (inner[..., None] * next_p - next_q).clamp(min=0.0).sum(-1)
    threshold = residual / (residual + 1.0 - inner)
    # 0 / 0: the whole prefix has been as likely as it was drafted, and so is all that follows.
    threshold = torch.where((residual == 0) & (inner == 1), 1.0, threshold)
    threshold = torch.where(slots.usable[:, 1:], threshold, inner)
    threshold = torch.cat((threshold, ratio[:, max(N, 1) :]), 1)  # [B, N]
    passed = slots.usable & (_uniform(u, slots) <= threshold)
    length = torch.arange(1, N + 1, device=p.device)
    accepted = torch.nn.functional.pad(passed * length, (1, 0)).amax(1)
    return _emit(p, slots, admitted, accepted, ratio.gather(1, accepted[:, None])[:, 0], draw)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slots:
    """Both distributions at the drafted slots; float64, meaningless where not ``usable``."""

    drafts: Tensor  # [B, N]
    usable: Tensor  # [B, N] bool, a prefix: admitted and before any placeholder
    log_p: Tensor  # [B, N] the target's, of the draft
    log_q: Tensor  # [B, N] the proposal's, of the draft
    ids: Tensor  # [B, N, K] where q may be above 0
    candidate_p: Tensor  # [B, N, K]
    candidate_q: Tensor  # [B, N, K]

    @staticmethod
    def of(p: Tensor, drafts: Tensor, admitted: Tensor, q: Proposals) -> _Slots:
        if q is None:  # one candidate, the draft itself
            ids = drafts.clamp(min=0)[..., None]
            candidate_q = torch.ones_like(ids, dtype=torch.float64)
        else:
            ids, candidate_q = q.ids, q.probabilities.double()
        candidate_p = p[:, :-1].gather(2, ids).double()
        drawn = ids == drafts[..., None]  # the draft among the candidates; never for -1
        log_q = torch.where(drawn, candidate_q, 0.0).sum(-1).log()
        real = _admitted_slots(drafts, admitted) & (log_q > -torch.inf)
        return _Slots(
            drafts=drafts,
            usable=real.cumprod(1).bool(),
            log_p=torch.where(drawn, candidate_p, 0.0).sum(-1).log(),
            log_q=log_q,
            ids=ids,
            candidate_p=candidate_p,
            candidate_q=candidate_q,
        )


def _emit(
    p: Tensor, slots: _Slots, admitted: Tensor, accepted: Tensor, scale: Tensor, draw: Tensor
) -> Verdict:
    """Draw the token behind each accepted prefix: from max(scale p - q, 0), or from plain p."""
    row = p[torch.arange(p.shape[0], device=p.device), accepted].double()  # [B, V]
    N = slots.drafts.shape[1]
    if N:
        # The first slot that was not accepted; a placeholder or nothing at all keeps p.
        slot = accepted.clamp(max=N - 1)[:, None]
        refused = slots.usable.gather(1, slot) & (accepted < admitted)[:, None]  # [B, 1]
        index = slot[..., None].expand(-1, -1, slots.ids.shape[2])
        ids, q = (t.gather(1, index)[:, 0] for t in (slots.ids, slots.candidate_q))
        left = row * scale[:, None]
        left = left.scatter(1, ids, (left.gather(1, ids) - q).clamp(min=0.0))
        # Nothing left: p and q agree up to rounding. A refusal then has a probability of rounding
        # size, and p keeps even that draw the target's own.
        refused = refused & (left.sum(1, keepdim=True) > 0)
        row = torch.where(refused, left, row)
    return Verdict(accepted=accepted, token=draw_ids(row, draw))


def _admitted_slots(drafts: Tensor, admitted: Tensor) -> Tensor:
    return torch.arange(drafts.shape[1], device=drafts.device) < admitted[:, None]


def _leading(kept: Tensor) -> Tensor:
    """Length of the unbroken run of True at the start of each row: ``[B, N]`` -> int64 ``[B]``."""
    return kept.cumprod(1).sum(1)


def _uniform(u: Tensor, slots: _Slots) -> Tensor:
    u = u[:, : slots.drafts.shape[1]].to(slots.drafts.device, torch.float64)
    return u.clamp(min=LOWEST_UNIFORM)


def _check(rows: Tensor, drafts: Tensor, admitted: Tensor) -> None:
    if drafts.dim() != 2 or rows.dim() != 3 or rows.shape[:2] != (len(drafts), drafts.shape[1] + 1):
        raise DraftError(
            f"drafts of shape {list(drafts.shape)} do not go with target rows of shape "
            f"{list(rows.shape)}: [B, N] needs [B, N + 1, V], one row more than drafts"
        )
    if admitted.shape != drafts.shape[:1]:
        raise DraftError(
            f"admitted has shape {list(admitted.shape)} for {len(drafts)} sequences; "
            "give one count for each"
        )
    for name, ids in (("drafts", drafts), ("admitted", admitted)):
        if ids.dtype != torch.int64:
            raise DraftError(f"{name} must be int64, not {ids.dtype}")


def _check_draws(
    p: Tensor, drafts: Tensor, admitted: Tensor, u: Tensor, draw: Tensor, q: Proposals
) -> None:
    _check(p, drafts, admitted)
    if u.shape != p.shape[:2] or draw.shape != p.shape[:1]:
        raise DraftError(
            f"uniform numbers of shapes {list(u.shape)} (u) and {list(draw.shape)} (draw) do not "
            f"go with target rows of shape {list(p.shape)}: give one for each row, and one more "
            "for each sequence"
        )
    if q is None:
        return
    if q.ids.dim() != 3 or q.ids.shape[:2] != drafts.shape or not q.ids.shape[2]:
        raise DraftError(
            f"candidates of shape {list(q.ids.shape)} do not go with drafts of shape "
            f"{list(drafts.shape)}: [B, N] needs [B, N, K] candidates, K at least 1"
        )
    if q.ids.shape != q.probabilities.shape:
        raise DraftError(
            f"the proposal has {list(q.ids.shape)} candidates and {list(q.probabilities.shape)} "
            "probabilities; give one for each"
        )
    if q.ids.dtype != torch.int64:
        raise DraftError(f"candidate ids must be int64, not {q.ids.dtype}")
