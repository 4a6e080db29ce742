"""How far apart two runs of a layer are: errors of tokens, and exchanged experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.serving.layers.parity_judging import NO_NUMBER, Limits
from workbench.serving.layers.parity_reference import Choices
from workbench.serving.layers.parity_values import ChoiceSource, Flip, Gap, RouterFigures

_MOST_FLIPS = 16  # that are kept one by one


def token_errors(difference: Tensor, beside: Tensor) -> Tensor:
    """Relative error of each token: ``[T, N]`` both, float64 -> ``[T]``, at most ``NO_NUMBER``."""
    scale = beside.norm(dim=-1).clamp_min(1e-300)
    return _finite(difference.norm(dim=-1) / scale)


def gap(difference: Tensor, beside: Tensor, apart: Tensor | None = None) -> Gap | None:
    """Figures over tokens, without those that ``apart`` (bool ``[T]``) names.

    Args:
        difference: of a run to the float32 one, float64 ``[T, N]``.
        beside: what it is relative to, likewise.
        apart: None for no token.

    Returns:
        None where no token is left.
    """
    left = torch.ones_like(beside[:, 0], dtype=torch.bool) if apart is None else ~apart
    if not bool(left.any()):
        return None
    errors = token_errors(difference, beside)[left]
    worst = int(errors.argmax())
    cosine = torch.cosine_similarity(beside[left], (beside + difference)[left], dim=-1)
    return Gap(
        mean=float(errors.mean()),
        worst=float(errors[worst]),
        worst_token=int(left.nonzero()[worst, 0]),
        cosine=float(cosine.nan_to_num(-1.0).min()),
        largest=float(_finite(difference[left].abs()).max()),
    )


def router_figures(
    exact: Choices,
    ours: Choices,
    engine: Tensor | None,
    source: ChoiceSource,
    errors: Tensor,
    limits: Limits,
) -> tuple[RouterFigures, Tensor]:
    """The engine's choices of experts beside ours.

    Args:
        exact, ours: of our float32 run, and of our run in the engine's precision.
        engine: ids of the engine ``[T, K]``; None where they could not be seen.
        source: how these are known.
        errors: the engine's relative error of each token, ``[T]``.
        limits: what near ties are.

    Returns:
        The figures, and which tokens are to be kept apart (bool ``[T]``): those with exchanged
        experts, the engine's or ours.
    """
    mine = _members(exact.ids, exact.scores)
    flipped_ours = (_members(ours.ids, exact.scores) != mine).any(-1)
    flipped = torch.zeros_like(flipped_ours)
    flips: list[Flip] = []
    if engine is not None:
        theirs = _members(engine, exact.scores)
        flipped = (theirs != mine).any(-1)
        flips = sorted(
            _flips(flipped, mine, theirs, exact.scores, errors), key=lambda one: -one.margin
        )
    error = float(_finite((ours.scores - exact.scores).abs()).max())
    figures = RouterFigures(
        source=source,
        flipped=int(flipped.sum()),
        flipped_ours=int(flipped_ours.sum()),
        widest=flips[0].margin if flips else 0.0,
        allowed=limits.margin(error),
        score_error=error,
        flips=tuple(flips[:_MOST_FLIPS]),
    )
    return figures, flipped | flipped_ours


def _members(ids: Tensor, like: Tensor) -> Tensor:
    """Sets of experts as bool ``[T, E]``, the shape of ``like``, of ids ``[T, K]``."""
    return torch.zeros_like(like, dtype=torch.bool).scatter_(1, ids.to(like.device).long(), True)


def _flips(
    flipped: Tensor, mine: Tensor, theirs: Tensor, scores: Tensor, errors: Tensor
) -> Iterator[Flip]:
    for token in flipped.nonzero()[:, 0].tolist():
        ours = (mine[token] & ~theirs[token]).nonzero()[:, 0]
        engine = (theirs[token] & ~mine[token]).nonzero()[:, 0]
        row = scores[token]
        # A set that lost an expert and took none has no margin: it is as wrong as can be.
        apart = (
            float(_finite(row[ours].max() - row[engine].min()))
            if ours.numel() and engine.numel()
            else NO_NUMBER
        )
        yield Flip(
            token=token,
            margin=apart,
            ours=tuple(ours.tolist()),
            engine=tuple(engine.tolist()),
            error=float(errors[token]),
        )


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(NO_NUMBER, NO_NUMBER).clamp_max(NO_NUMBER)
