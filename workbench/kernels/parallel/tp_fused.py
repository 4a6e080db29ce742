"""The fused chain of one sequence on several ranks: partial sums made whole, twice a layer.

:class:`~workbench.kernels.rank.fused.FusedStep` with an exchange in front of each boundary, for the
embedding and for the next token. Forms of the exchange:

* ``nccl``: NCCL's all-reduce, then the boundary's own kernel;
* ``boundary``: one kernel does both (``triton_exchange.py``), and is a dependent launch as the
  others are, so the kernel behind it asks for its weights while this one waits for the other ranks;
* ``products``: the same, but the kernels that end a sublayer send their rows themselves
  (``triton_push.py``), so that the boundary's kernel only receives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.parallel import triton_exchange as tx
from workbench.kernels.parallel import triton_push as push
from workbench.kernels.parallel.mailbox import Mailbox
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_chain import best_token, partial_embedding
from workbench.kernels.rank import triton_vectors as tv
from workbench.kernels.rank.fused import FusedStep, _Boundary
from workbench.kernels.rank.fused_config import FusedConfig
from workbench.kernels.rank.stages import refuse_foreign
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import LayerWeights, RankWeights

EXCHANGES = ("nccl", "boundary", "products")


def refuse_exchange(
    exchange: str, mailbox: Mailbox | None, among: tuple[str, ...] = EXCHANGES
) -> None:
    """Refuse a form of the exchange that a step has not, or one without its mailbox.

    Raises:
        KernelError: with what there is.
    """
    if exchange not in among:
        raise KernelError(
            f"this step of several ranks has no exchange {exchange!r:.40}; it has "
            f"{', '.join(among[:-1])} and {among[-1]}"
        )
    if exchange != "nccl" and mailbox is None:
        raise KernelError(
            f"the exchange {exchange} needs memory that all ranks see: give it "
            "Mailbox.open(ranks, hidden, dtype)"
        )


def refuse_odd_rows(config: FusedConfig) -> None:
    """Refuse launch sizes by which a BF16 word of two rows belongs to two programs.

    Raises:
        KernelError: with the first of them.
    """
    for name in ("o_proj", "down", "fp8_down", "dense_down"):
        rows, warps = getattr(config, name)
        if rows % 2:
            raise KernelError(
                f"two BF16 rows are sent in one word, so a program cannot own {rows} of them: "
                f"give {name}=({rows + 1}, {warps}), or take the exchange boundary"
            )


def calls_of(weights: RankWeights) -> int:
    """Exchanges of a step: the embedding, two a layer, the next token."""
    return 2 * len(weights.layers) + 2


class TpFusedStep(FusedStep):
    """One decode step of one sequence on all ranks; every rank launches it.

    Attributes:
        h: as in ``FusedStep``, the same bits on all ranks.
        exchange: "nccl", "boundary" or "products".
    """

    def __init__(
        self,
        weights: RankWeights,
        state: RankState,
        ranks: Ranks,
        *,
        exchange: str = "boundary",
        mailbox: Mailbox | None = None,
        dependent: bool | None = None,
        config: FusedConfig | None = None,
    ) -> None:
        """As ``FusedStep``; token ids are of all ranks' vocabulary, rank by rank.

        Raises:
            KernelError: as ``FusedStep``, another exchange, a state or a mailbox of other weights
                or ranks, or a configuration whose products compute their own boundary or, with the
                exchange ``products``, cannot send it.
        """
        refuse_exchange(exchange, mailbox)
        refuse_foreign(weights, state)
        if mailbox is not None:
            mailbox.refuse_other(ranks, weights.shapes.hidden, weights.dtype, weights.device)
        super().__init__(weights, state, dependent=dependent, config=config)
        if self.config.norm_in_qkvg or self.config.norm_in_router:
            raise KernelError(
                "a boundary inside the product behind it sees one rank's part only: leave "
                "norm_in_qkvg and norm_in_router out on several ranks"
            )
        if exchange == "products" and weights.dtype.itemsize == 2:
            refuse_odd_rows(self.config)
        self.ranks, self.exchange, self.mailbox = ranks, exchange, mailbox
        self._calls, self._call = calls_of(weights), 0
        self._row = torch.zeros(1, dtype=torch.int64, device=weights.device)
        self._last = torch.full_like(state.position, state.capacity - 1)

    def check(self) -> None:
        """Nothing, where no kernel gave up waiting.

        Raises:
            KernelError: one did.
        """
        if self.mailbox is not None:
            self.mailbox.check()

    def _begin(self) -> None:
        w, s, st = self.weights, self.weights.shapes, self.state
        following = w.layers[0].input_norm
        self._call = 1
        if self.exchange != "nccl":
            assert self.mailbox is not None
            tx.launch_embedding(
                self.mailbox, st.token, w.embed, following, self.h[0], self._x[:1], s.eps
            )
            return
        self.h[0].copy_(
            self.ranks.all_reduce(partial_embedding(st.token, w.embed, self.ranks.rank))
        )
        tv.embed_norm[(1,)](
            self._row, self.h[0], following, self.h[0], self._x[0], s.eps,
            s.hidden, *tv.parts(s.hidden), num_warps=self.config.vector_warps,
        )  # fmt: skip

    def _o_proj(
        self, parts: Tensor, lse: Tensor, gate: Tensor, layer: LayerWeights, out: Tensor
    ) -> None:
        if self.exchange != "products":
            super()._o_proj(parts, lse, gate, layer, out)
            return
        assert self.mailbox is not None
        push.launch_o_proj(
            self.mailbox, self._call, parts, lse, gate, layer.gate_bias, layer.o_proj,
            self.config.o_proj, self.dependent,
        )  # fmt: skip

    def _last_product(self, x: Tensor, weight: Tensor, out: Tensor, tile: tuple[int, int]) -> None:
        if self.exchange != "products":
            super()._last_product(x, weight, out, tile)
            return
        assert self.mailbox is not None
        push.launch_matvec(self.mailbox, self._call, x, weight, tile, self.dependent)

    def _experts_down(
        self, act: Tensor, layer: LayerWeights, ids: Tensor, shares: Tensor, out: Tensor,
        tile: tuple[int, int],
    ) -> None:  # fmt: skip
        if self.exchange != "products":
            super()._experts_down(act, layer, ids, shares, out, tile)
            return
        assert self.mailbox is not None
        push.launch_experts_down(
            self.mailbox, self._call, act, layer.down, ids, shares,
            self.weights.shapes.routed_scale, tile, self.dependent, layer.down_scale,
        )  # fmt: skip

    def _boundary(self, b: _Boundary) -> None:
        s = self.weights.shapes
        if self.exchange != "nccl":
            assert self.mailbox is not None
            pushed = self.exchange == "products"
            tx.launch_exchange(
                self.mailbox, self._call, b.h, b.sublayer, None, 1, b.post, b.following, b.stream,
                b.normed.view(1, -1), b.scale, s.eps, two=False, pushed=pushed,
                dependent=self.dependent,
            )  # fmt: skip
            self._call += 1
            return
        self.ranks.all_reduce(b.sublayer)
        # Not a dependent: what comes before it is NCCL's.
        tv.boundary[(1,)](
            b.h, b.sublayer, b.post, b.following, b.stream, b.normed, *b.scale, s.eps,
            s.hidden, *tv.parts(s.hidden), False,
            num_warps=self.config.vector_warps, enable_fp_fusion=False,
        )  # fmt: skip

    def _pick(self) -> None:
        st, s = self.state, self.weights.shapes
        if self.exchange != "nccl":
            assert self.mailbox is not None
            tx.launch_pick(
                self.mailbox, self._calls, self._best[None], self._where[None], st.token,
                st.next_token, st.position, self._last, s.vocabulary, dependent=self.dependent,
            )  # fmt: skip
            return
        st.next_token.copy_(best_token(st.logits, self.ranks))
        st.token.copy_(st.next_token)
        st.position.add_(1).clamp_(max=st.capacity - 1)


def whole_stream(step: object) -> Tensor:
    """The stream ``[layers + 1, N, H]`` of a step, also where other ranks hold rows of it."""
    gathered = getattr(step, "gathered_h", None)
    if gathered is not None:
        found: Tensor = gathered()
        return found
    h = step.h  # type: ignore[attr-defined]
    return h if isinstance(h, Tensor) else torch.stack(list(h))
