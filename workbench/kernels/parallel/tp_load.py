"""The step of many rows on several ranks: :class:`LoadStep` with its partial sums made whole.

Forms of the exchange as in ``tp_fused.py``, but for ``products``. In ``boundary`` the parts of a
product, or the experts of a row, are added up in the same kernel that sends them; in ``nccl`` a
kernel of its own does so. Where rows have owners (``triton_exchange.two_shots``), the stream of a
row is on its owner alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.parallel import triton_exchange as tx
from workbench.kernels.parallel.mailbox import Mailbox
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_chain import best_token, partial_embedding
from workbench.kernels.parallel.tp_fused import calls_of, refuse_exchange
from workbench.kernels.rank import load_products as lp
from workbench.kernels.rank.load_config import LoadConfig
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.rank.load_step import Choices, LoadStep
from workbench.kernels.rank.triton_vectors import options, parts
from workbench.kernels.rank.weights import RankWeights
from workbench.kernels.triton_runtime import triton


class TpLoadStep(LoadStep):
    """One step of many rows on all ranks; every rank launches it.

    Attributes:
        exchange: "nccl" or "boundary".
        two: whether rows have owners.
    """

    def __init__(
        self,
        weights: RankWeights,
        state: LoadState,
        ranks: Ranks,
        *,
        exchange: str = "boundary",
        mailbox: Mailbox | None = None,
        two: bool | None = None,
        dependent: bool | None = None,
        advance: bool | None = None,
        choices: Choices | None = None,
        config: LoadConfig | None = None,
    ) -> None:
        """As ``LoadStep``; ``two`` (None: as ``two_shots`` says): rows have owners.

        Raises:
            KernelError: as ``LoadStep``, another exchange, a state or a mailbox of other weights
                or ranks, or more rows than the mailbox has room for.
        """
        refuse_exchange(exchange, mailbox, ("nccl", "boundary"))
        _refuse_foreign(weights, state)
        if mailbox is not None:
            mailbox.refuse_other(ranks, weights.shapes.hidden, weights.dtype, weights.device)
        super().__init__(
            weights, state, dependent=dependent, advance=advance, choices=choices, config=config
        )
        if exchange == "boundary":
            assert mailbox is not None
            mailbox.refuse_rows(state.rows)
        self.ranks, self.exchange, self.mailbox = ranks, exchange, mailbox
        usual = tx.two_shots(state.rows, ranks.world) if two is None else two
        self.two = usual and ranks.world > 1 and exchange == "boundary"
        self._all_calls, self._at = calls_of(weights), 0
        self._sum = torch.zeros(
            state.rows, weights.shapes.hidden, dtype=weights.dtype, device=weights.device
        )
        self._rows = torch.arange(state.rows, device=weights.device)

    def check(self) -> None:
        """Nothing, where no kernel gave up waiting.

        Raises:
            KernelError: one did.
        """
        if self.mailbox is not None:
            self.mailbox.check()

    def gathered_h(self) -> Tensor:
        """The stream ``[layers + 1, N, H]``, each row from its owner; for all ranks to call."""
        h = torch.stack(list(self.h))
        if self.two:
            theirs = self._rows % self.ranks.world != self.ranks.rank
            h[1:, theirs] = 0
            self.ranks.all_reduce(h[1:])
        return h

    def _begin(self) -> None:
        w, st, s = self.weights, self.state, self.weights.shapes
        self._at = 1
        following = w.layers[0].input_norm
        if self.exchange == "boundary":
            assert self.mailbox is not None
            tx.launch_embedding(
                self.mailbox, st.token, w.embed, following, self._h[0], self._x, s.eps
            )
            return
        self._h[0].copy_(
            self.ranks.all_reduce(partial_embedding(st.token, w.embed, self.ranks.rank))
        )
        lp.embed_norm_rows[(st.rows,)](
            self._rows, self._h[0], following, self._h[0], self._x, s.eps,
            s.hidden, *parts(s.hidden), num_warps=self.config.vector_warps,
        )  # fmt: skip

    def _boundary(
        self, h: Tensor, source: Tensor, shares: Tensor | None, count: int, post: Tensor,
        following: Tensor, stream: Tensor, out: Tensor, scale: tuple[float, float],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        s, pdl, n = self.weights.shapes, self.dependent, self.state.rows
        opens = shares is None and out is self._y  # the router behind it counts
        if self.exchange == "boundary":
            assert self.mailbox is not None
            tx.launch_exchange(
                self.mailbox, self._at, h, source, shares, count, post, following, stream, out,
                scale, s.eps, routed_scale=s.routed_scale, counts=self._counts if opens else None,
                two=self.two, dependent=pdl,
            )  # fmt: skip
            self._at += 1
            return stream, out
        counts = self._counts.numel() if opens else 0
        tx.partial_rows[(n,)](
            source, source if shares is None else shares, self._sum, self._counts, s.routed_scale,
            n, s.hidden, *parts(s.hidden), count, shares is not None, counts,
            triton.next_power_of_2(self._counts.numel()), pdl,
            num_warps=self.config.vector_warps, enable_fp_fusion=False, **options(pdl),
        )  # fmt: skip
        self.ranks.all_reduce(self._sum)
        # Not a dependent: what comes before it is NCCL's.
        lp.boundary_rows[(n,)](
            h, self._sum, self._sum, post, following, stream, out, self._counts, *scale,
            s.routed_scale, s.eps, n, s.hidden, *parts(s.hidden), 1, False, 0,
            triton.next_power_of_2(self._counts.numel()), False,
            num_warps=self.config.vector_warps, enable_fp_fusion=False,
        )  # fmt: skip
        return stream, out

    def _pick(self) -> None:
        st, s = self.state, self.weights.shapes
        if self.exchange == "boundary":
            assert self.mailbox is not None
            tx.launch_pick(
                self.mailbox, self._all_calls, self._best, self._where, st.token, st.next_token,
                st.position, st.last, s.vocabulary, advance=self.advance,
                dependent=self.dependent,
            )  # fmt: skip
            return
        st.next_token.copy_(best_token(st.logits, self.ranks))
        if self.advance:
            st.token.copy_(st.next_token)
            st.position.add_(1)
            torch.minimum(st.position, st.last, out=st.position)


def _refuse_foreign(weights: RankWeights, state: LoadState) -> None:
    """Refuse a state that was made for other weights: kernels would read beside its caches.

    Raises:
        KernelError: with what differs.
    """
    k, kinds = state.k[0], [layer.full for layer in weights.layers]
    pairs = {
        "sizes": (state.shapes, weights.shapes),
        "layers": (list(state.kinds[: len(kinds)]), kinds),  # a state of more layers will do
        "dtype": (k.dtype, weights.dtype),
        "device": (k.device, weights.device),
    }
    other = [what for what, (found, wanted) in pairs.items() if found != wanted]
    if other:
        raise KernelError(
            f"this state is of other weights ({', '.join(other)} differ): make one with "
            "LoadState(weights, contexts), or over a state of theirs"
        )
