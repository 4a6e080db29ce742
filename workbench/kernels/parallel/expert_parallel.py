"""A prefill by ranks that hold whole experts: attention of one's own tokens, experts of all.

Every rank prefills its own sequences with the whole attention. In a sparse layer it sends each
token to every rank that owns one of the token's experts, once, however many of them it owns, with
their ids there and their shares. The owner adds its experts' outputs in float32, rounds the sum to
the activations' dtype and sends it back; the token's own rank adds what came back in the order of
the ranks in float32, rounds it, and scales it as one rank would.

The tokens go in chunks, so that what arrives stays small. How many rows go where is exchanged once
a layer, and the host reads it: a prefill's layer takes milliseconds. With ``overlap`` the next
chunk travels and the last one returns while a chunk is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.parallel.ep_weights import EpWeights
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_prefill import behind_mlp
from workbench.kernels.parallel.triton_sums import launch_placed_rows
from workbench.kernels.rank.prefill_state import PrefillState
from workbench.kernels.rank.prefill_step import Choices, PrefillConfig, PrefillStep
from workbench.kernels.rank.weights import LayerWeights, RankWeights

CHUNK = 8192  # tokens of a rank that travel together


# ------------------------------------------------------------------ sums of rows


def placed_sum(product: Tensor, place: Tensor, shares: Tensor | None, kernel: bool) -> Tensor:
    """``[R, H]``: each row's sum over its slots, in float32 in their order, rounded once.

    ``product [P, H]``, whose dtype the result has; ``place`` int32 ``[R, S]``, rows of ``product``
    or -1 for a slot without one; ``shares`` float32 ``[R, S]`` or None: 1. ``kernel``: by Triton
    instead of plain torch.
    """
    (count, slots), hidden = place.shape, product.shape[1]
    if not product.shape[0] or not count:
        return product.new_zeros(count, hidden)
    if kernel:
        return launch_placed_rows(product, place, shares)
    total = torch.zeros(count, hidden, dtype=torch.float32, device=product.device)
    for slot in range(slots):
        at = place[:, slot].long()
        value = product[at.clamp_min(0)].float()
        if shares is not None:
            value = value * shares[:, slot, None]
        total += torch.where((at >= 0)[:, None], value, 0.0)
    return total.to(product.dtype)


def listed(mask: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Where ``mask`` is true, and how far along the list that is.

    ``(int64 [total], int32 of mask's shape)``: positions in the flat mask in their order, and each
    position's place among them, -1 where the mask is false. ``total`` is how many there are, which
    the caller knows, so that nothing is read on the host.
    """
    flat = mask.flatten()
    place = flat.cumsum(0) - 1
    # What is false goes to a slot past the end.
    made = torch.empty(total + 1, dtype=torch.int64, device=mask.device)
    made.scatter_(0, torch.where(flat, place, total), torch.arange(len(flat), device=mask.device))
    return made[:total], torch.where(flat, place, -1).int().view(mask.shape)


# ------------------------------------------------------------------ what travels


@dataclass(slots=True, kw_only=True, eq=False)
class Traffic:
    """What a sparse layer's exchange moved: rows by chunk and by rank, on the host.

    Attributes:
        sent, received: ``[chunks][ranks]`` rows, one's own among them.
        pairs: ``[chunks]`` (token, expert) pairs that this rank multiplied.
        labels: what came with the rows of each chunk, int32 ``[rows, 2 K]``: ids of this rank's
            experts (-1: another rank's), and the bits of the float32 shares.
    """

    sent: list[list[int]]
    received: list[list[int]]
    pairs: list[int]
    labels: list[Tensor] = field(default_factory=list, repr=False)

    def rows_out(self, rank: int) -> int:
        """Rows that left rank ``rank``."""
        return sum(sum(each) - each[rank] for each in self.sent)

    def rows_in(self, rank: int) -> int:
        """Rows that came to rank ``rank`` from others."""
        return sum(sum(each) - each[rank] for each in self.received)


@dataclass(slots=True, eq=False)
class _Swap:
    """Rows on their way; ``kept`` is what they are read from until they are there."""

    value: Tensor
    work: Any = None
    kept: Tensor | None = None

    def here(self) -> Tensor:
        """The rows that arrived; the current stream waits for them."""
        if self.work is not None:
            self.work.wait()
        self.kept = None
        return self.value


@dataclass(slots=True, kw_only=True, eq=False)
class _Parcel:
    """A chunk of this rank's tokens on its way to the experts and back."""

    chunk: int
    first: int  # of the chunk's tokens
    place: Tensor  # int32 [tokens, ranks]: the row of what comes back
    rows: _Swap
    labels: _Swap
    back: _Swap | None = None


class EpPrefillState(PrefillState):
    """A state to time a prefill with, whose sliding layers all write one cache.

    Within a prefill no layer reads another's cache, and a server would keep the window's rows of a
    sliding layer and no more: of 32,768 tokens of the 501B model this is 1.3 GB in place of 7.0,
    which decides whether an eighth of the experts leaves room for it. The earlier rows that
    sliding layers see are the same in all of them. After a call only the last sliding layer's rows
    are there, so a check against float64 needs a ``PrefillState``.
    """

    def __init__(
        self,
        weights: EpWeights,
        sequences: int = 1,
        tokens: int = 32_768,
        context: int = 0,
        *,
        chunk: int = CHUNK,
        seed: int = 1,
    ) -> None:
        """Allocate; ``chunk`` is the step's, on which the activations' size depends.

        Raises:
            KernelError: as :class:`~workbench.kernels.rank.prefill_state.PrefillState` says.
        """
        self._chunk = chunk
        held: list[LayerWeights] = []
        place: list[int] = []  # of each layer's cache
        sliding: int | None = None
        for layer in weights.layers:
            if not layer.full and sliding is not None:
                place.append(sliding)
                continue
            place.append(len(held))
            sliding = sliding if layer.full else len(held)
            held.append(layer)
        distinct = EpWeights(
            rank=weights.rank, world=weights.world, config=weights.config, shapes=weights.shapes,
            layers=held, embed=weights.embed, norm=weights.norm, lm_head=weights.lm_head,
            down_layout=weights.down_layout, seed=weights.seed,
        )  # fmt: skip
        super().__init__(distinct, sequences, tokens, context, seed=seed)
        self.k = [self.k[at] for at in place]
        self.v = [self.v[at] for at in place]

    def bytes(self, weights: RankWeights) -> int:
        """Bytes of the caches of ``weights``' layers, and of the activations of a chunked step.

        What arrives is taken as an even routing's, every token on as many ranks as it may be.
        """
        s, size = weights.shapes, weights.norm.element_size()
        count = self.sequences * self.tokens
        rows = sum(self.past[layer.full] + self.tokens for layer in weights.layers)
        caches = 2 * rows * self.sequences * s.kv_heads * s.head_dim * size
        world = weights.world if isinstance(weights, EpWeights) else 1
        own = min(self._chunk, count)
        # Rows on their way, here and back, and the experts' activations and products.
        moved = own * (3 * min(world, s.top_k) * s.hidden + s.top_k * (s.hidden + s.expert_width))
        at_once = (
            count * (4 * s.hidden + s.packed + 2 * s.heads * s.head_dim),  # around attention
            count * 3 * (s.hidden + s.mlp_width),  # in a dense MLP
            count * 3 * s.hidden + moved,
        )
        ends = 4 * (self.context + self.tokens) * s.head_dim + 4 * self.sequences * s.vocabulary
        return caches + max(at_once) * size + ends


class EpPrefillStep(PrefillStep):
    """One prefill of this rank's sequences; all ranks call it together.

    Attributes:
        traffic: after a call, what each sparse layer moved.
    """

    weights: EpWeights

    def __init__(
        self,
        weights: EpWeights,
        state: PrefillState,
        ranks: Ranks,
        form: str = "ours",
        *,
        chunk: int = CHUNK,
        config: PrefillConfig | None = None,
        watch: Tensor | None = None,
        choices: Choices | None = None,
        overlap: bool = False,
        without: EpPrefillStep | None = None,
    ) -> None:
        """As a prefill of one rank; all ranks make it together.

        ``chunk``: tokens of this rank that travel together. ``without``: a step of the same state
        that ran before; this one takes the experts that that one chose and, instead of an exchange,
        copies as many rows of its own: the same products, to see what the exchange costs. What it
        gives is of no use otherwise.

        Raises:
            KernelError: what a prefill of one rank refuses, weights that are not this rank's part,
                a chunk of no tokens, another chunk than some other rank's, or a ``without`` that
                has not run.
        """
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise KernelError(f"tokens travel in chunks of 1 or more, not of {chunk!r:.20}")
        if not isinstance(weights, EpWeights):
            raise KernelError(
                "an expert-parallel prefill reads whole experts of its own rank: make the weights "
                "with ep_weights"
            )
        if (weights.rank, weights.world) != (ranks.rank, ranks.world):
            raise KernelError(
                f"these weights are of rank {weights.rank} of {weights.world}, and this is rank "
                f"{ranks.rank} of {ranks.world}; make them for these ranks"
            )
        super().__init__(weights, state, form, config=config, watch=watch, choices=choices)
        sparse = sum(not layer.dense for layer in weights.layers)
        if without is not None and len(without.traffic) != sparse:
            raise KernelError("there is no exchange to leave out yet: run the step with it first")
        self.ranks, self.chunk, self.overlap, self.without = ranks, chunk, overlap, without
        count = state.sequences * state.tokens
        told = ranks.tell([chunk, -(-count // chunk)])
        if len({each[0] for each in told}) > 1:
            raise KernelError(
                f"the ranks send chunks of {sorted({each[0] for each in told})} tokens; all of "
                "them must take the same"
            )
        # A rank with fewer tokens than another takes part in the other's exchanges with none.
        self._rounds = max(each[1] for each in told)
        self._ones = torch.ones(count, 1, device=weights.device)
        self.traffic: list[Traffic] = []

    def __call__(self) -> None:
        """Launch the prefill; the host waits in every sparse layer."""
        self.traffic = []
        super().__call__()

    def _mlp(
        self, index: int, layer: LayerWeights, h: Tensor, x: Tensor, next_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        if layer.dense:
            return super()._mlp(index, layer, h, x, next_norm)
        ids, shares = self._route(index, layer, x)
        if self.without is not None:
            same = self.without.chosen.layers[index]
            assert same is not None  # for the type checker: a sparse layer's
            ids, shares = same
        self.chosen.layers.append((ids, shares))
        m = self._exchanged(layer, x, ids, shares)
        return behind_mlp(self, layer, h, m, next_norm, self._ones)

    # ------------------------------------------------------------------ the exchange

    def _exchanged(self, layer: LayerWeights, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """Every own token's sum over its experts on all ranks, ``[N, H]``, not scaled yet."""
        traffic = self._counted(ids)
        self.traffic.append(traffic)
        m = torch.empty_like(x)
        ahead: _Parcel | None = None
        going: _Parcel | None = None
        for chunk in range(self._rounds):
            parcel = ahead or self._send(traffic, chunk, x, ids, shares)
            ahead = None
            if self.overlap and chunk + 1 < self._rounds:
                ahead = self._send(traffic, chunk + 1, x, ids, shares)
            labels = parcel.labels.here()
            if self.without is None:
                traffic.labels.append(labels)
            made = self._own(layer, parcel.rows.here(), labels, traffic.pairs[chunk])
            parcel.back = self._swap(made, traffic.received[chunk], traffic.sent[chunk])
            if going is not None:
                self._add(m, going)
            going = parcel
            if not self.overlap:
                self._add(m, parcel)
                going = None
        if going is not None:
            self._add(m, going)
        return m

    def _counted(self, ids: Tensor) -> Traffic:
        """How many rows and pairs go where, asked of all ranks at once and read on the host."""
        world, rounds = self.ranks.world, self._rounds
        hit = self._hits(ids)
        spare = rounds * self.chunk - len(ids)
        rows, pairs = (
            F.pad(each, (0, spare)).view(world, rounds, self.chunk).sum(-1)
            for each in (hit.any(-1).long(), hit.sum(-1))
        )
        out = torch.stack((rows, pairs), -1)  # [ranks, rounds, 2]
        if self.without is not None:
            out.tolist()  # the host waits as it does with the exchange
            return self.without.traffic[len(self.traffic)]
        came = out if world == 1 else torch.empty_like(out)
        if world > 1:
            import torch.distributed as dist

            dist.all_to_all_single(came, out, group=self.ranks.group)
        sent, received = torch.stack((out, came)).tolist()
        return Traffic(
            sent=[[sent[r][c][0] for r in range(world)] for c in range(rounds)],
            received=[[received[r][c][0] for r in range(world)] for c in range(rounds)],
            pairs=[sum(received[r][c][1] for r in range(world)) for c in range(rounds)],
        )

    def _hits(self, ids: Tensor) -> Tensor:
        """Whether an expert of a token is a rank's, bool ``[ranks, N, K]``."""
        every = torch.arange(self.ranks.world, device=ids.device)
        return (ids // self.weights.own) == every[:, None, None]

    def _send(
        self, traffic: Traffic, chunk: int, x: Tensor, ids: Tensor, shares: Tensor
    ) -> _Parcel:
        """Let a chunk's tokens go: to each rank once, in the order of ranks, then of tokens."""
        first = chunk * self.chunk
        x, ids, shares = (each[first : first + self.chunk] for each in (x, ids, shares))
        sent, received = traffic.sent[chunk], traffic.received[chunk]
        at, place = listed(self._hits(ids).any(-1), sum(sent))
        rank, token = (at // len(x), at % len(x)) if len(x) else (at, at)
        local = ids[token] - rank[:, None] * self.weights.own
        local = torch.where((local >= 0) & (local < self.weights.own), local, -1)
        labels = torch.cat((local.int(), shares[token].view(torch.int32)), -1)
        if self.without is None:
            arriving = self._swap(labels, sent, received)
        else:
            arriving = _Swap(self.without.traffic[len(self.traffic) - 1].labels[chunk])
        return _Parcel(
            chunk=chunk,
            first=first,
            place=place.mT.contiguous(),
            rows=self._swap(x[token], sent, received),
            labels=arriving,
        )

    def _swap(self, rows: Tensor, sent: list[int], received: list[int]) -> _Swap:
        """Rows for the ranks, ``sent`` of them to each, against ``received`` from each."""
        if self.ranks.world == 1:
            return _Swap(rows)
        if self.without is not None:
            return _Swap(_copied(rows, sum(received)))
        import torch.distributed as dist

        out = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(
            out, rows, received, sent, group=self.ranks.group, async_op=self.overlap
        )
        return _Swap(out, work, rows)

    def _own(self, layer: LayerWeights, x: Tensor, labels: Tensor, pairs: int) -> Tensor:
        """The weighted sum of this rank's experts for every row that arrived, ``[R, H]``."""
        top_k = labels.shape[1] // 2
        ids = labels[:, :top_k]
        shares = labels[:, top_k:].contiguous().view(torch.float32)
        if not pairs:
            return torch.zeros_like(x)
        at, place = listed(ids >= 0, pairs)
        token, expert = at // top_k, ids.flatten()[at].long()[:, None]
        if self.form == "ours":
            return placed_sum(self._grouped(layer, x, token, expert), place, shares, True)
        one = torch.ones(pairs, 1, device=x.device)
        down = self.weights.down_ih(layer)
        product = self._call["expert_mlp"](x[token], layer.gate_up, down, expert, one, 1.0)
        return placed_sum(product, place, shares, self.form == "chain")

    def _grouped(self, layer: LayerWeights, x: Tensor, token: Tensor, expert: Tensor) -> Tensor:
        """Outputs of ``expert [P, 1]`` for the rows ``token [P]`` of x, rounded: ``[P, H]``."""
        from workbench.kernels.rank.triton_prefill_experts import (
            default_launch,
            launch_down,
            launch_gate_up,
        )
        from workbench.kernels.rank.triton_prefill_sort import sorted_places

        how = self.config.experts or default_launch()
        how = replace(how, down=replace(how.down, ordered=False))
        order, blocks, _ = sorted_places(expert, self.weights.own, how.tokens)
        # The order of rows instead of pairs: absent experts have no pairs, and x no copy.
        rows = token.int()[order.long()]
        act = launch_gate_up(x, layer.gate_up, rows, blocks, 1, how)
        return launch_down(act, layer.down, order, blocks, how)

    def _add(self, m: Tensor, parcel: _Parcel) -> None:
        """Add what came back for a chunk, in the order of the ranks."""
        assert parcel.back is not None  # for the type checker: it has been sent back
        back = parcel.back.here()
        count = len(parcel.place)
        if count:
            m[parcel.first : parcel.first + count] = placed_sum(
                back, parcel.place, None, self.form != "naive"
            )

    # ------------------------------------------------------------------ what it cost

    def bytes_sent(self) -> int:
        """Bytes that left this rank in the last call: tokens with their labels, and answers."""
        s, size = self.weights.shapes, self.weights.norm.element_size()
        out = sum(each.rows_out(self.ranks.rank) for each in self.traffic)
        back = sum(each.rows_in(self.ranks.rank) for each in self.traffic)
        return out * (s.hidden * size + 8 * s.top_k) + back * s.hidden * size


def _copied(rows: Tensor, count: int) -> Tensor:
    """``count`` rows copied from ``rows``, over and over."""
    if not len(rows):
        return rows.new_zeros(count, *rows.shape[1:])
    return rows[torch.arange(count, device=rows.device) % len(rows)]
