"""A prefill by several tensor-parallel ranks: the sublayers' partial sums made whole.

:class:`TpPrefillStep` is a :class:`~workbench.kernels.rank.prefill_step.PrefillStep` whose
embedding and next token range over the vocabulary of all ranks and which adds every sublayer's
result over the ranks, in place, in the activations' dtype, before the boundary behind it. The
experts' weighted sum is therefore made before the boundary instead of inside it; the routed scale
follows the sum over the ranks, as one rank's follows its own sum.

With ``overlap`` pieces the tokens go through a layer in pieces, each with an all-reduce of its own
that runs beside the next piece's products: o_proj of the second piece hides the first one's sum,
the first piece's experts the second one's, its next QKV product the last. Attention alone takes all
tokens at once. The values are those of one piece, up to the matmul library's order of additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_chain import best_token, partial_embedding
from workbench.kernels.parallel.weights import first_holder, in_step
from workbench.kernels.rank import naive
from workbench.kernels.rank.prefill_state import PrefillState
from workbench.kernels.rank.prefill_step import Choices, PrefillConfig, PrefillStep
from workbench.kernels.rank.weights import LayerWeights, RankWeights
from workbench.kernels.reference import linear


def group_state(
    weights: RankWeights,
    ranks: Ranks,
    sequences: int = 8,
    tokens: int = 2048,
    context: int = 0,
    *,
    seed: int = 1,
) -> PrefillState:
    """A state of which every rank has the same tokens, drawn from the vocabulary of all ranks.

    Earlier keys and values are each rank's own, but those of a KV head that several ranks share
    are the same.

    Raises:
        KernelError: on all ranks alike, as
            :class:`~workbench.kernels.rank.prefill_state.PrefillState` says.
    """
    holder = first_holder(weights.config, weights.shapes.tp, ranks.rank)
    state = in_step(
        ranks,
        lambda: PrefillState(weights, sequences, tokens, context, seed=seed * 1000 + holder),
    )
    generator = torch.Generator(device=weights.device).manual_seed(seed)
    state.token.random_(ranks.world * weights.shapes.vocabulary, generator=generator)
    ranks.broadcast(state.token)
    return state


@dataclass(slots=True, eq=False)
class _Sum:
    """A sublayer's result on its way to being whole."""

    value: Tensor
    work: Any = None

    def whole(self) -> Tensor:
        """The sum over the ranks; the current stream waits for it."""
        if self.work is not None:
            self.work.wait()
        return self.value


class TpPrefillStep(PrefillStep):
    """One prefill by all ranks together; every rank calls it, with the same tokens.

    ``h`` and ``chosen`` are the same on every rank, the logits each rank's part of the vocabulary,
    ``next_token`` ids of the whole one.
    """

    def __init__(
        self,
        weights: RankWeights,
        state: PrefillState,
        ranks: Ranks,
        form: str = "ours",
        *,
        config: PrefillConfig | None = None,
        watch: Tensor | None = None,
        choices: Choices | None = None,
        overlap: int = 1,
        communicate: bool = True,
    ) -> None:
        """As a prefill of one rank; ``overlap``: pieces the tokens go through a layer in.

        ``communicate=False`` leaves out every exchange: the same products of partial sums, to see
        what the exchanges cost.

        Raises:
            KernelError: what a prefill of one rank refuses, fewer than one piece, or tokens beyond
                the vocabulary of all ranks.
        """
        if isinstance(overlap, bool) or not isinstance(overlap, int) or overlap < 1:
            raise KernelError(
                f"a prefill goes through its layers in 1 or more pieces, not {overlap!r:.20}"
            )
        super().__init__(weights, state, form, config=config, watch=watch, choices=choices)
        self.ranks, self.communicate = ranks, communicate
        vocabulary = ranks.world * weights.shapes.vocabulary
        if weights.device.type != "meta":
            least, most = int(state.token.min()), int(state.token.max())
            if least < 0 or most >= vocabulary:
                raise KernelError(
                    f"the tokens {least} to {most} are not all among the {vocabulary} of "
                    f"{ranks.world} ranks; draw them with group_state"
                )
        count = state.sequences * state.tokens
        pieces = min(overlap, count)
        self._sizes = [count // pieces + (i < count % pieces) for i in range(pieces)]
        self._ones = torch.ones(self._sizes[0], 1, device=weights.device)

    def __call__(self) -> None:
        """Launch the prefill."""
        w, st, call = self.weights, self.state, self._call
        self.h, self.chosen = [], Choices()
        embedded = self._embed()
        self._keep(embedded)
        h = list(embedded.split(self._sizes))
        x = [call["rms_norm"](each, w.layers[0].input_norm, w.shapes.eps) for each in h]
        packed = self._packed(len(embedded), x[0])
        for i, each in enumerate(x):
            packed = self._project_piece(packed, i, each, w.layers[0])
        del embedded
        norms = [*(layer.input_norm for layer in w.layers[1:]), w.norm]
        following: list[LayerWeights | None] = [*w.layers[1:], None]
        for index, layer in enumerate(w.layers):
            o = self._attended(index, layer, packed)
            del packed  # its memory is the products' behind it
            sums = [self._begin(linear(part, layer.o_proj)) for part in o.split(self._sizes)]
            del o
            pairs: list[tuple[Tensor, Tensor]] = []
            for i, attended in enumerate(sums):
                h[i], y = self._boundary(
                    h[i], attended.whole(), layer.post_attention_norm, layer.scales[0],
                    layer.pre_mlp_norm,
                )  # fmt: skip
                sums[i] = self._begin(self._partial(index, layer, i, y, pairs))
                del y
            self._note(layer, pairs)
            after = following[index]
            packed = self._packed(st.sequences * st.tokens, h[0])
            for i, mlp in enumerate(sums):
                h[i], x[i] = behind_mlp(self, layer, h[i], mlp.whole(), norms[index], self._ones)
                if after is not None:
                    packed = self._project_piece(packed, i, x[i], after)
            del sums
            if self.watch is not None:
                self._keep(_joined(h))
        logits, cap = linear(_joined(x)[st.last], w.lm_head), w.shapes.softcap
        st.logits.copy_(logits if cap is None else call["softcap"](logits, cap))
        st.next_token.copy_(self._choose())

    # ------------------------------------------------------------------ exchanges

    def _begin(self, partial: Tensor) -> _Sum:
        """Begin to add ``partial`` over the ranks, in its own memory."""
        if not self.communicate or self.ranks.world == 1:
            return _Sum(partial)
        if len(self._sizes) == 1:
            return _Sum(self.ranks.all_reduce(partial))
        import torch.distributed as dist

        # On NCCL's own stream: the products of the next piece do not wait for it.
        return _Sum(partial, dist.all_reduce(partial, group=self.ranks.group, async_op=True))

    def _embed(self) -> Tensor:
        made = partial_embedding(self.state.token, self.weights.embed, self.ranks.rank)
        return self.ranks.all_reduce(made) if self.communicate else made

    def _choose(self) -> Tensor:
        logits = self.state.logits
        if not self.communicate:
            return naive.argmax(logits) + self.ranks.rank * logits.shape[1]
        return best_token(logits, self.ranks)

    # ------------------------------------------------------------------ pieces

    def _packed(self, count: int, like: Tensor) -> Tensor:
        """Room for the packed projection of several pieces; one piece makes its own."""
        rows = count if len(self._sizes) > 1 else 0
        return like.new_empty(rows, self.weights.shapes.packed)

    def _project_piece(self, packed: Tensor, i: int, x: Tensor, layer: LayerWeights) -> Tensor:
        """The packed projection with piece ``i`` in it."""
        if len(self._sizes) == 1:
            return self._project(x, layer.qkvg)
        first = sum(self._sizes[:i])
        torch.mm(x, layer.qkvg.mT, out=packed[first : first + len(x)])
        return packed

    def _attended(self, index: int, layer: LayerWeights, packed: Tensor) -> Tensor:
        """Cache writes, attention and output gate of all tokens, ``[S T, A D]``."""
        st, call, s = self.state, self._call, self.weights.shapes
        k, v = st.k[index].flatten(0, 1), st.v[index].flatten(0, 1)
        q = call["qkv_write"](
            packed, layer.qk_norm, st.position, st.rope, k, v, st.rows[layer.full],
            heads=s.heads, full=layer.full, eps=s.eps,
        )  # fmt: skip
        gate = packed[:, packed.shape[1] - s.heads * s.head_dim :].unflatten(-1, (-1, s.head_dim))
        spans = st.spans[layer.full]
        o: Tensor | None = None
        if self.form == "ours":
            from workbench.kernels.rank.triton_prefill_attention import gated_prefill

            plan = self.config.full if layer.full else self.config.sliding
            o = gated_prefill(q, k, v, gate, layer.gate_bias, spans, plan)
        if o is None:
            o = call["output_gate"](
                call["prefill_attention"](q, k, v, spans), gate, layer.gate_bias
            )
        assert o is not None  # for the type checker
        return o.flatten(1)

    def _partial(
        self,
        index: int,
        layer: LayerWeights,
        piece: int,
        x: Tensor,
        pairs: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """This rank's part of a piece's MLP, before the routed scale; what was chosen to
        ``pairs``."""
        if layer.dense:
            return self._dense(layer, x)
        ids, shares = self._route(index, layer, x)
        if self.given is not None:
            first = sum(self._sizes[:piece])
            ids, shares = (each[first : first + len(x)] for each in (ids, shares))
        pairs.append((ids, shares))
        if self.form == "ours":
            return weighted_experts(x, layer, ids, shares, self.config)
        made: Tensor = self._call["expert_mlp"](
            x, layer.gate_up, self.weights.down_ih(layer), ids, shares, 1.0
        )
        return made

    def _note(self, layer: LayerWeights, pairs: list[tuple[Tensor, Tensor]]) -> None:
        if layer.dense:
            self.chosen.layers.append(None)
        elif len(pairs) == 1:
            self.chosen.layers.append(pairs[0])
        else:
            ids, shares = zip(*pairs, strict=True)
            self.chosen.layers.append((torch.cat(ids), torch.cat(shares)))


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def behind_mlp(
    step: PrefillStep, layer: LayerWeights, h: Tensor, m: Tensor, next_norm: Tensor, ones: Tensor
) -> tuple[Tensor, Tensor]:
    """The stream behind an MLP whose whole sum is ``m [N, H]``, and its norm.

    A sparse layer's sum is not scaled yet. ``ones``: float32 ``[N or more, 1]``.
    """
    behind = (layer.post_mlp_norm, layer.scales[1], next_norm)
    if layer.dense:
        return step._boundary(h, m, *behind)
    s = step.weights.shapes
    if step.form != "ours":
        return step._boundary(h, m * s.routed_scale, *behind)
    from workbench.kernels.rank.triton_prefill_vectors import expert_boundary

    # One "expert" with share 1: its sum is the row, and the scale needs no pass of its own.
    return expert_boundary(
        h, m, ones[: len(m)], s.routed_scale, *behind, s.eps, warps=step.config.boundary_warps
    )


def weighted_experts(
    x: Tensor, layer: LayerWeights, ids: Tensor, shares: Tensor, config: PrefillConfig
) -> Tensor:
    """Every token's weighted sum over its K experts, ``[N, H]``: float32, rounded once."""
    from workbench.kernels.launching import dependent_launch
    from workbench.kernels.rank.triton_prefill_experts import grouped_experts
    from workbench.kernels.triton_expert_sort import follows
    from workbench.kernels.triton_experts import _combine_kernel
    from workbench.kernels.triton_runtime import INTERPRETED, triton

    product, place = grouped_experts(x, layer.gate_up, layer.down, ids, launch=config.experts)
    if place is not None:
        raise KernelError(
            "several ranks add the experts' products by pair: give DownLaunch(ordered=False)"
        )
    out = torch.empty_like(x)
    early, top_k, hidden = dependent_launch(x), ids.shape[1], x.shape[1]
    columns = min(triton.next_power_of_2(hidden), 8192 if INTERPRETED else 1024)
    # Rows are the grid's second axis, which ends at 65,535.
    for first in range(0, len(x), 1 << 15):
        rows = out[first : first + (1 << 15)]
        _combine_kernel[(triton.cdiv(hidden, columns), len(rows))](
            product[first * top_k :], shares[first:], rows, 1.0, top_k, hidden, columns, early,
            num_warps=4, **follows(early),
        )  # fmt: skip
    return out
