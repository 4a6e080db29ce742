"""What a chain of single operations does otherwise on several ranks, as one rank alone does it.

:class:`~workbench.kernels.rank.chain.RankStep` and
:class:`~workbench.kernels.rank.prefill_step.PrefillStep` are such chains; those of several ranks
(``kernels/parallel/tp_chain.py``, ``tp_prefill.py``) make the sums whole in these places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.kernels.rank import naive
from workbench.kernels.rank.weights import RankWeights


class Alone:
    """A chain on ``weights``; its ``state`` has ``token [N]`` and the ``logits [B, V]``."""

    weights: RankWeights
    state: Any
    _call: dict[str, Callable[..., Any]]

    def _embed(self) -> Tensor:
        """The tokens' rows of the embedding, ``[N, H]``."""
        return naive.embedding(self.state.token, self.weights.embed)

    def _boundary(
        self,
        h: Tensor,
        sublayer: Tensor,
        post: Tensor,
        scale: tuple[float, float],
        following: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The stream ``[N, H]`` behind a sublayer, and its norm."""
        made: tuple[Tensor, Tensor] = self._call["boundary"](
            h, sublayer, post, scale, following, self.weights.shapes.eps
        )
        return made

    def _choose(self) -> Tensor:
        """The next tokens, int64 ``[B]``."""
        return naive.argmax(self.state.logits)
