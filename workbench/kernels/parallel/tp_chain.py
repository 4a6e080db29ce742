"""The chain of single operations on several ranks: partial sums made whole, one vocabulary.

A rank owns the tokens ``r * V`` to ``(r + 1) * V`` of the group's vocabulary. It looks up its own
tokens' embedding rows and leaves zeros for the others', so that the sum over the ranks is the
embedding; it sums what o_proj and the MLP give over the ranks in front of the boundary; and the
next token is the best of the ranks' best ones. Nothing here waits for the GPU, so that the whole
step, collectives and all, is captured in one CUDA graph a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.parallel.mailbox import Mailbox
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.rank import naive
from workbench.kernels.rank.chain import RankStep
from workbench.kernels.rank.stages import refuse_foreign
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import RankWeights
from workbench.kernels.requirements import Where

OP = "reduced_boundary"  # the registry's operation of several ranks


def partial_embedding(tokens: Tensor, table: Tensor, rank: int) -> Tensor:
    """Rows ``[B, H]`` of the tokens int64 ``[B]`` that ``rank``'s ``table [V, H]`` has, else 0.

    Over the ranks they add up to the embedding, exactly: one summand of each is not zero.
    """
    own = tokens - rank * table.shape[0]
    absent = (own < 0) | (own >= table.shape[0])
    rows = naive.embedding(own.clamp(0, table.shape[0] - 1), table)
    return rows.masked_fill(absent[:, None], 0.0)


def best_token(logits: Tensor, ranks: Ranks) -> Tensor:
    """The first of the largest logits of all ranks, int64 ``[B]`` in the group's vocabulary.

    ``logits [B, V]`` are this rank's; for all ranks to call together.
    """
    index = naive.argmax(logits)[:, None]
    # As float64, which holds every float32 and every index exactly, both go in one message.
    place = index + ranks.rank * logits.shape[1]
    pair = torch.cat((logits.gather(-1, index).double(), place.double()), -1)
    each = ranks.all_gather(pair).unflatten(-1, (-1, 2))
    # argmax takes the first of equals: the lowest rank's, whose tokens come first.
    best = each[..., 0].argmax(-1, keepdim=True)
    return each[..., 1].gather(-1, best)[:, 0].long()


def refuse_made(name: str, made: object, h: Tensor) -> None:
    """Refuse what a variant of ``reduced_boundary`` gave, where it is no stream and no norm of it.

    Raises:
        KernelError: with what it should be.
    """
    if isinstance(made, tuple) and len(made) == 2:
        like = [
            (each.shape, each.dtype, each.device) == (h.shape, h.dtype, h.device)
            for each in made
            if isinstance(each, Tensor)
        ]
        if like == [True, True]:
            return
    found = made if isinstance(made, tuple) else (made,)
    said = ", ".join(
        f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
        if isinstance(each, Tensor)
        else type(each).__name__
        for each in found
    )
    raise KernelError(
        f"the variant {name} of {OP} gave ({said:.120}): return the new stream and its norm, both "
        f"{str(h.dtype).removeprefix('torch.')} {list(h.shape)} on {h.device}"
    )


class TpRankStep(RankStep):
    """One decode step of the group's model; every rank calls its own, together with the others.

    Tokens are of the group's vocabulary, ``state.logits`` are the rank's own part of the logits.
    ``variants`` may name a variant of ``reduced_boundary`` (``exchanges.py``) beside the forms of
    the other operations; without one, an all-reduce and the form of ``boundary`` follow each other.
    """

    def __init__(
        self,
        weights: RankWeights,
        state: RankState,
        ranks: Ranks,
        variants: Mapping[str, str] | None = None,
        *,
        mailbox: Mailbox | None = None,
    ) -> None:
        """Resolve the forms, as :class:`RankStep` does.

        Raises:
            KernelError: an unknown operation or form, one that cannot run here, or a state or a
                mailbox of other weights or ranks.
        """
        refuse_foreign(weights, state)
        if mailbox is not None:
            mailbox.refuse_other(ranks, weights.shapes.hidden, weights.dtype, weights.device)
        own = dict(variants or {})
        name = own.pop(OP, None)
        super().__init__(weights, state, own)
        self.ranks, self.mailbox = ranks, mailbox
        self._reduced: Callable[..., tuple[Tensor, Tensor]] | None = None
        if name is not None:
            where = Where.of(weights.device, weights.dtype, weights.shapes)
            self._reduced = registry.find(OP, name, where).function
            self.variants[OP] = name
        self._exchanges = 0  # of this step, so far

    def check(self) -> None:
        """Nothing, where no kernel gave up waiting.

        Raises:
            KernelError: one did.
        """
        if self.mailbox is not None:
            self.mailbox.check()

    def _embed(self) -> Tensor:
        self._exchanges = 0
        rows = partial_embedding(self.state.token, self.weights.embed, self.ranks.rank)
        return self.ranks.all_reduce(rows)

    def _boundary(
        self,
        h: Tensor,
        sublayer: Tensor,
        post: Tensor,
        scale: tuple[float, float],
        following: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if self._reduced is None:
            whole = self.ranks.all_reduce(sublayer.contiguous())
            return super()._boundary(h, whole, post, scale, following)
        eps = self.weights.shapes.eps
        made = self._reduced(
            self.ranks, self.mailbox, self._exchanges, h, sublayer, post, scale, following, eps
        )
        refuse_made(self.variants[OP], made, h)
        self._exchanges += 1
        return made

    def _choose(self) -> Tensor:
        if self._reduced is not None and self.mailbox is not None:
            self.mailbox.count.add_(self._exchanges)
        return best_token(self.state.logits, self.ranks)
