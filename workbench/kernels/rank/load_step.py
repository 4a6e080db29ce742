"""A step of many rows as a chain of fused Triton kernels: ten launches a sparse layer.

Decode of a batch, and verification: see ``load_state.py``. A layer is the packed projection,
attention (with norms, positions, cache write, merging, gate), output projection, boundary, router
(product; choice and places), the experts' two products, and the boundary that adds them up. Every
kernel is a programmatic dependent of the one before it where the GPU has that. Operations can be
left to the registry's kernels one by one (``LoadConfig.chain``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.launching import dependent_launch, multiprocessors
from workbench.kernels.rank import load_attention as la
from workbench.kernels.rank import load_experts as le
from workbench.kernels.rank import load_products as lp
from workbench.kernels.rank.choices import refuse_experts
from workbench.kernels.rank.load_config import (
    FEW,
    FROM_CHAIN,
    Experts,
    LoadConfig,
    Product,
    config_for,
)
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.rank.triton_vectors import options, parts
from workbench.kernels.rank.weights import LayerWeights, RankWeights
from workbench.kernels.reach import Reach
from workbench.kernels.requirements import Where
from workbench.kernels.triton_experts import _combine_kernel as combine
from workbench.kernels.triton_linear import project
from workbench.kernels.triton_runtime import INTERPRETED, triton
from workbench.model.config import SSMAX_LENGTH, SSMAX_POWER

LONG = 2048  # keys of a sequence, above which attention takes twice the programs
MOST_TOKENS = 128  # rows of the step in one tile of a product


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Recorded experts of every layer and row, which take the place of the router's.

    ``ids`` int64 and ``shares`` float32, ``[layers, N, K]``; dense layers' entries are not read.
    """

    ids: Tensor
    shares: Tensor


def refuse_load(weights: RankWeights, device: torch.device, choices: Choices | None = None) -> None:
    """Refuse what the step cannot do on ``device``; only sizes are asked for.

    Raises:
        KernelError: Triton does not run there, experts in the other layout or in FP8, heads that
            are no power of two, or choices of another shape.
    """
    s = weights.shapes
    if device.type != "meta":
        registry.find("qkvg", "triton", Where.of(device, weights.dtype, s))
    if weights.down_layout != "HI":
        raise KernelError('the step of many rows reads down projections [E, H, I]: relayout("HI")')
    if weights.experts != "same":
        raise KernelError(
            "the step of many rows reads experts of the activations' dtype, not FP8: leave out "
            "--experts fp8"
        )
    if s.head_dim & (s.head_dim - 1):
        raise KernelError(
            f"the step of many rows takes heads of a power of two, not {s.head_dim}; use the chain "
            "of single operations"
        )
    if choices is not None:
        shape = choices.ids.shape
        wanted = (len(weights.layers), s.top_k)
        if (shape[0], shape[-1]) != wanted or choices.shares.shape != shape:
            raise KernelError(
                f"recorded choices must be [{wanted[0]} layers, rows, {wanted[1]} experts], not "
                f"{list(shape)}; record them with a step of the same model"
            )


class LoadStep:
    """One step of all rows of ``state``; call it to launch it on the current stream.

    With ``advance`` (the default where every sequence has one row) a row's next token and position
    are left where the next step looks for them; otherwise only ``state.next_token`` is written.

    Attributes:
        h: ``[N, H]`` each, the stream before the first layer and after each of the ``layers``.
        ids, shares: ``[layers, N, K]``, the router's own choice (-1 in dense layers) and what the
            experts were weighted with.
    """

    def __init__(
        self,
        weights: RankWeights,
        state: LoadState,
        *,
        dependent: bool | None = None,
        advance: bool | None = None,
        choices: Choices | None = None,
        config: LoadConfig | None = None,
    ) -> None:
        """Allocate what passes between the kernels.

        Raises:
            KernelError: as :func:`refuse_load` says, choices of another number of rows, or of
                experts that a row cannot have.
        """
        s, device = weights.shapes, weights.device
        refuse_load(weights, device, choices)
        if choices is not None and choices.ids.shape[1] != state.rows:
            raise KernelError(
                f"recorded choices of {choices.ids.shape[1]} rows cannot be replayed in a step of "
                f"{state.rows}; record them with as many rows"
            )
        if choices is not None:
            sparse = [index for index, layer in enumerate(weights.layers) if not layer.dense]
            refuse_experts(choices.ids[sparse], s.experts)
        self.weights, self.state, self.choices = weights, state, choices
        able = dependent_launch(weights.norm)
        self.advance = max(state.fresh) == 1 if advance is None else advance
        equal = max(state.fresh) == 1 and len(set(state.contexts)) == 1
        usual = config_for(state.rows, single=weights.dtype == torch.float32, equal=equal)
        self.config = config or (FEW if INTERPRETED else usual)
        wanted = self.config.dependent if dependent is None else dependent
        self.dependent = able if wanted is None else wanted
        c, n, count, dtype = self.config, state.rows, len(weights.layers), weights.dtype
        single = torch.float32

        def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        self._h = list(buffer(count + 1, n, s.hidden))
        self.h = list(self._h)
        self._middle = buffer(n, s.hidden)  # the stream after attention
        self._x, self._y = buffer(n, s.hidden), buffer(n, s.hidden)  # normed
        self._packed = buffer(c.qkvg.splits, n, s.packed, kind=single)
        self._gated = buffer(n, s.heads * s.head_dim)
        splits = max(c.o_proj.splits, c.dense_down.splits)
        self._parts = buffer(splits, n, s.hidden, kind=single)
        self._splits = {full: self._attention_splits(full) for full in set(state.kinds)}
        most = max(self._splits.values())
        self._attended = buffer(most, n, s.heads, s.head_dim, kind=single)
        self._lse = buffer(2, most, n, s.heads, kind=single)
        self._arrivals = buffer(state.sequences, s.kv_heads, kind=torch.int32)
        self._logits = buffer(c.router.splits, n, s.experts, kind=single)
        self.ids = torch.full((count, n, s.top_k), -1, dtype=torch.int64, device=device)
        self.shares = buffer(count, n, s.top_k, kind=single)
        self._counts = buffer(s.experts + 1, kind=torch.int32)
        self._active = buffer(s.experts, kind=torch.int32)
        self._slots = buffer(s.experts, n, kind=torch.int32)
        self._act = buffer(n, max(s.top_k * s.expert_width, s.mlp_width))
        exact = n <= c.float_products or dtype == single
        self._products = buffer(n * s.top_k, s.hidden, kind=single if exact else dtype)
        self._tiles = triton.cdiv(s.vocabulary, c.head.rows)
        self._best = buffer(n, self._tiles, kind=single)
        self._where = buffer(n, self._tiles, kind=torch.int32)
        # How many rows of the step a tile of a product holds, and how many such tiles there are.
        self._tokens = max(16, min(MOST_TOKENS, triton.next_power_of_2(n)))
        self._token_tiles = triton.cdiv(n, self._tokens)
        self._call = self._from_chain()
        self._reach: dict[bool, tuple[Reach, Tensor]] = {}

    def _from_chain(self) -> dict[str, Callable[..., Any]]:
        """The registry's kernels of the operations that are left to it.

        Raises:
            KernelError: an operation that cannot be, or attention without what it reads.
        """
        chain, state, s = self.config.chain, self.state, self.weights.shapes
        if unknown := set(chain) - set(FROM_CHAIN):
            raise KernelError(
                f"a step of many rows cannot leave {', '.join(sorted(unknown))} to the registry's "
                f"kernels; it can leave {', '.join(FROM_CHAIN)}"
            )
        if not chain:
            return {}
        if "attention" in chain:
            equal = max(state.fresh) == 1 and len(set(state.contexts)) == 1
            if "qkvg" not in chain or not equal:
                raise KernelError(
                    "the registry's attention reads the registry's qkvg and caches of one size "
                    "with one new row each: leave qkvg to it too, or attention to neither"
                )
        if "boundary" in chain and not {"o_proj", "combine"} <= set(chain):
            raise KernelError(
                "the registry's boundary reads whole sublayers: leave o_proj and combine to it too"
            )
        device = self.weights.device
        # On the meta device kernels are compiled and not launched: any place will do.
        where = None if device.type == "meta" else Where.of(device, self.weights.dtype, s)
        names = ("qkvg", "qkv_write", "decode_attention", "output_gate", "boundary", "router")
        return {name: registry.find(name, "triton", where).function for name in names}

    def _attention_splits(self, full: bool) -> int:
        state, c, window = self.state, self.config, self.weights.shapes.window
        keys = [each if full else min(each, window - 1) for each in state.contexts]
        # Long caches: two programs a multiprocessor, so that one's products hide the other's loads.
        programs = c.programs * (2 if max(keys) > LONG else 1)
        share = max(c.keys, triton.cdiv(sum(keys) * self.weights.shapes.kv_heads, programs))
        splits = max(1, min(c.most_splits, triton.cdiv(max(keys), share)))
        return splits if splits == 1 else splits + 1  # one more for the new rows' own keys

    def expert_ids(self) -> Tensor:
        """The router's choice in the last step, int64 ``[layers, N, K]``, -1 in dense layers."""
        return self.ids

    def recorded(self) -> Choices:
        """A copy of the last step's choices, for another step to be given."""
        used = self.ids if self.choices is None else self.choices.ids
        return Choices(ids=used.clone(), shares=self.shares.clone())

    def distinct(self) -> float:
        """Distinct experts of the last step, the mean of the sparse layers."""
        used = self.ids if self.choices is None else self.choices.ids
        sparse = [i for i, layer in enumerate(self.weights.layers) if not layer.dense]
        counts = [int(used[i].unique().numel()) for i in sparse]
        return sum(counts) / len(counts) if counts else 0.0

    def __call__(self) -> None:
        """Launch the step."""
        w, st = self.weights, self.state
        self._begin()
        h, x = self._h[0], self._x
        self.h = [h]
        if "attention" in self.config.chain:
            self._reach = {full: self._reached(full) for full in set(st.kinds)}
        norms = [*(layer.input_norm for layer in w.layers[1:]), w.norm]
        for index, (layer, next_norm) in enumerate(zip(w.layers, norms, strict=True)):
            middle, y = self._boundary(
                h, *self._attention(index, layer, x), layer.post_attention_norm,
                layer.pre_mlp_norm, self._middle, self._y, layer.scales[0],
            )  # fmt: skip
            sublayer = self._dense(layer, y) if layer.dense else self._sparse(index, layer, y)
            h, x = self._boundary(
                middle, *sublayer, layer.post_mlp_norm, next_norm, self._h[index + 1], self._x,
                layer.scales[1],
            )  # fmt: skip
            self.h.append(h)
        self._head(x)

    def _begin(self) -> None:
        w, st, s = self.weights, self.state, self.weights.shapes
        # Not a dependent: this launch waits for everything before the step.
        lp.embed_norm_rows[(st.rows,)](
            st.token, w.embed, w.layers[0].input_norm, self._h[0], self._x, s.eps,
            s.hidden, *parts(s.hidden), num_warps=self.config.vector_warps,
        )  # fmt: skip

    def _boundary(
        self, h: Tensor, source: Tensor, shares: Tensor | None, count: int, post: Tensor,
        following: Tensor, stream: Tensor, out: Tensor, scale: tuple[float, float],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The new stream and its norm, where they lie."""
        s, pdl, n = self.weights.shapes, self.dependent, self.state.rows
        opens = shares is None and out is self._y  # the router behind it counts
        if "boundary" in self.config.chain:
            if opens:
                self._counts.zero_()
            made = self._call["boundary"](h, source.view(n, -1), post, scale, following, s.eps)
            return made[0], made[1]
        counts = self._counts.numel() if opens else 0
        lp.boundary_rows[(n,)](
            h, source, source if shares is None else shares, post, following, stream, out,
            self._counts, *scale, s.routed_scale, s.eps, n, s.hidden, *parts(s.hidden), count,
            shares is not None, counts, triton.next_power_of_2(self._counts.numel()), pdl,
            num_warps=self.config.vector_warps, enable_fp_fusion=False, **options(pdl),
        )  # fmt: skip
        return stream, out

    def _product(self, x: Tensor, weight: Tensor, out: Tensor, tile: Product) -> None:
        """``out`` float32 ``[splits, N, width]`` of ``x [N, K]``."""
        width, inner = weight.shape
        lp.product_rows[(triton.cdiv(width, tile.rows), tile.splits, self._token_tiles)](
            x, weight, out, self.state.rows, width, inner, _span(inner, tile), self._tokens,
            tile.rows, tile.depth, _ahead(tile, _span(inner, tile), weight), self.dependent,
            num_warps=tile.warps, num_stages=tile.stages, **options(self.dependent),
        )  # fmt: skip

    def _reached(self, full: bool) -> tuple[Reach, Tensor]:
        """What the registry's attention is told of a kind of layer, and the rows it writes."""
        st = self.state
        rows = st.capacity if full else st.ring
        slots = torch.arange(st.sequences, device=st.position.device)
        window = None if full else self.weights.shapes.window
        view = slice(0, st.sequences)
        reach = Reach(slots, st.position, span=rows, window=window, view=view)
        return reach, slots * rows + st.position % rows

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor
    ) -> tuple[Tensor, Tensor | None, int]:
        """The sublayer's output in parts, as a boundary takes it."""
        c, call = self.config, self._call
        packed, count = self._packed, c.qkvg.splits
        if "qkvg" in c.chain:
            packed, count = call["qkvg"](x, layer.qkvg), 1
        else:
            self._product(x, layer.qkvg, packed, c.qkvg)
        gated = self._gated
        if "attention" in c.chain:
            gated = self._chain_attention(index, layer, packed)
        else:
            self._attend(index, layer, packed, count)
        if "o_proj" in c.chain:
            return project(gated, layer.o_proj), None, 1
        self._product(gated, layer.o_proj, self._parts, c.o_proj)
        return self._parts, None, c.o_proj.splits

    def _chain_attention(self, index: int, layer: LayerWeights, packed: Tensor) -> Tensor:
        st, s, call = self.state, self.weights.shapes, self._call
        k, v = st.k[index], st.v[index]
        reach, rows = self._reach[layer.full]
        q = call["qkv_write"](
            packed, layer.qk_norm, st.position, st.rope, k, v, rows, heads=s.heads,
            full=layer.full, eps=s.eps,
        )  # fmt: skip
        k, v = (each.unflatten(0, (st.sequences, -1)) for each in (k, v))
        o = call["decode_attention"](q[:, None], k, v, reach)[:, 0]
        gate = packed[:, packed.shape[1] - s.heads * s.head_dim :].unflatten(-1, (-1, s.head_dim))
        gated: Tensor = call["output_gate"](o, gate, layer.gate_bias)
        return gated.flatten(1)

    def _attend(self, index: int, layer: LayerWeights, packed: Tensor, count: int) -> None:
        st, s, c, pdl = self.state, self.weights.shapes, self.config, self.dependent
        splits, fresh = self._splits[layer.full], max(st.fresh)
        heads = max(16, triton.next_power_of_2(fresh * (s.heads // s.kv_heads)))
        la.attend_rows[(splits, s.kv_heads, st.sequences)](
            packed, layer.qk_norm, st.position, st.first, st.new, st.start, st.rope,
            layer.gate_bias, st.k[index], st.v[index], self._attended, self._lse, self._arrivals,
            self._gated, st.rows, st.ring, s.head_dim**-0.5 * math.log2(math.e), s.eps,
            s.heads, s.kv_heads, s.head_dim, count, s.window,
            heads, max(16, triton.next_power_of_2(fresh)), c.keys, splits, c.attend_stages,
            layer.full, SSMAX_LENGTH, SSMAX_POWER, pdl,
            num_warps=c.attend_warps * (2 if heads >= 64 else 1), **options(pdl),
        )  # fmt: skip

    def _dense(self, layer: LayerWeights, y: Tensor) -> tuple[Tensor, Tensor | None, int]:
        s, pdl, tile, n = self.weights.shapes, self.dependent, self.config.dense_up, self.state.rows
        act = self._act.view(-1)[: n * s.mlp_width].view(n, s.mlp_width)
        lp.gated_rows[(triton.cdiv(s.mlp_width, tile.rows), self._token_tiles)](
            y, layer.gate_up, act, n, s.mlp_width, s.hidden, self._tokens,
            tile.rows, tile.depth, _ahead(tile, s.hidden, layer.gate_up), pdl,
            num_warps=tile.warps, num_stages=tile.stages, **options(pdl),
        )  # fmt: skip
        if "boundary" in self.config.chain:
            return project(act, layer.down), None, 1
        self._product(act, layer.down, self._parts, self.config.dense_down)
        return self._parts, None, self.config.dense_down.splits

    def _sparse(
        self, index: int, layer: LayerWeights, y: Tensor
    ) -> tuple[Tensor, Tensor | None, int]:
        s, c, pdl, n = self.weights.shapes, self.config, self.dependent, self.state.rows
        shares = self.shares[index]
        if "router" in c.chain:
            self._chain_router(index, layer, y)
        else:
            self._router(index, layer, y)
        self.launch_experts(layer, y)
        if "combine" not in c.chain:
            return self._products, shares, s.top_k
        made = torch.empty(n, s.hidden, dtype=y.dtype, device=y.device)
        columns = min(triton.next_power_of_2(s.hidden), 8192 if INTERPRETED else 1024)
        combine[(triton.cdiv(s.hidden, columns), n)](
            self._products, shares, made, s.routed_scale, s.top_k, s.hidden, columns, pdl,
            num_warps=4, **options(pdl),
        )  # fmt: skip
        return made, None, 1

    def _router(self, index: int, layer: LayerWeights, y: Tensor) -> None:
        s, tile, pdl, n = self.weights.shapes, self.config.router, self.dependent, self.state.rows
        assert layer.router is not None  # for the type checker: a sparse layer has both
        assert layer.correction_bias is not None
        lp.router_rows[(triton.cdiv(s.experts, tile.rows), tile.splits, self._token_tiles)](
            y, layer.router, self._logits, n, s.experts, s.hidden, _span(s.hidden, tile),
            self._tokens, tile.rows, tile.depth,
            _ahead(tile, _span(s.hidden, tile), layer.router), pdl,
            num_warps=tile.warps, num_stages=tile.stages, **options(pdl),
        )  # fmt: skip
        groups, kept = s.n_group or 1, s.topk_group or 1
        if kept >= groups:
            groups = kept = 1
        given, shares = self.choices, self.shares[index]
        lp.choose_and_place[(n,)](
            self._logits, layer.correction_bias, self.ids[index], shares,
            self.ids[index] if given is None else given.ids[index],
            shares if given is None else given.shares[index],
            self._counts, self._active, self._slots, n, s.experts, s.top_k, tile.splits,
            groups, kept, triton.next_power_of_2(groups),
            triton.next_power_of_2(s.experts // groups), s.renormalise, given is not None,
            max(32, triton.next_power_of_2(s.top_k)), pdl,
            num_warps=1, **options(pdl),
        )  # fmt: skip

    def _chain_router(self, index: int, layer: LayerWeights, y: Tensor) -> None:
        s, pdl, given = self.weights.shapes, self.dependent, self.choices
        ids, shares = self._call["router"](
            y, layer.router, layer.correction_bias, top_k=s.top_k, n_group=s.n_group,
            topk_group=s.topk_group, renormalise=s.renormalise,
        )  # fmt: skip
        used = (ids, shares) if given is None else (given.ids[index], given.shares[index])
        lp.place_rows[(self.state.rows,)](
            *used, ids, self.ids[index], self.shares[index], self._counts, self._active,
            self._slots, self.state.rows, s.experts, s.top_k,
            max(32, triton.next_power_of_2(s.top_k)), pdl,
            num_warps=1, **options(pdl),
        )  # fmt: skip

    def launch_experts(self, layer: LayerWeights, y: Tensor | None = None) -> None:
        """The experts' two products of the pairs that the lists name, for ``y`` or the last one."""
        self.launch_up(layer, y)
        self.launch_down(layer)

    def launch_up(self, layer: LayerWeights, y: Tensor | None = None) -> None:
        """Gate and up products and their SwiGLU, a row a pair."""
        s, e, pdl, n = self.weights.shapes, self.config.up, self.dependent, self.state.rows
        tma = e.tma and _described(layer.gate_up)
        ahead = 0 if tma else _ahead(e, s.hidden, layer.gate_up)
        le.up_rows[(self._programs(e, s.expert_width),)](
            self._y if y is None else y, _weights(layer.gate_up, e, tma), self._counts,
            self._active, self._slots, self._act, n, s.experts, s.top_k, s.hidden,
            s.expert_width, e.tokens, e.rows, e.depth, e.swap, tma, e.first, ahead, pdl,
            num_warps=e.warps, num_stages=e.stages, **options(pdl),
        )  # fmt: skip

    def _programs(self, tile: Experts, width: int) -> int:
        s = self.weights.shapes
        most = min(self.state.rows * s.top_k, s.experts) * triton.cdiv(width, tile.rows)
        shared = tile.programs * multiprocessors(self.weights.device)
        return min(most, shared) if shared else most

    def launch_down(self, layer: LayerWeights) -> None:
        """Down products, a row a pair."""
        s, e, pdl, n = self.weights.shapes, self.config.down, self.dependent, self.state.rows
        tma = e.tma and _described(layer.down)
        ahead = 0 if tma else _ahead(e, s.expert_width, layer.down)
        le.down_rows[(self._programs(e, s.hidden),)](
            self._act, _weights(layer.down, e, tma), self._counts, self._active, self._slots,
            self._products, n, s.experts, s.hidden, s.expert_width, e.tokens, e.rows, e.depth,
            e.swap, tma, e.first, ahead, pdl,
            num_warps=e.warps, num_stages=e.stages, **options(pdl),
        )  # fmt: skip

    def _head(self, x: Tensor) -> None:
        w, st, s, pdl = self.weights, self.state, self.weights.shapes, self.dependent
        tile, cap, n = self.config.head, s.softcap or 1.0, st.rows
        lp.head_rows[(self._tiles, self._token_tiles)](
            x, w.lm_head, st.logits, self._best, self._where, 1.0 / cap, float(cap), n,
            s.vocabulary, s.hidden, self._tokens, tile.rows, tile.depth, s.softcap is not None,
            _ahead(tile, s.hidden, w.lm_head), pdl,
            num_warps=tile.warps, num_stages=tile.stages, **options(pdl),
        )  # fmt: skip
        self._pick()

    def _pick(self) -> None:
        st, s, pdl = self.state, self.weights.shapes, self.dependent
        lp.pick_rows[(st.rows,)](
            self._best, self._where, st.token, st.next_token, st.position, st.last, self._tiles,
            triton.next_power_of_2(self._tiles), s.vocabulary, self.advance, pdl,
            num_warps=4, **options(pdl),
        )  # fmt: skip


def _span(inner: int, tile: Product) -> int:
    """Columns of a split, whole tiles."""
    return triton.cdiv(triton.cdiv(inner, tile.splits), tile.depth) * tile.depth


def _ahead(tile: Product | Experts, inner: int, weight: Tensor) -> int:
    """Columns to ask for ahead, whole lines of 128 bytes; none where a row has fewer."""
    whole = tile.ahead * weight.element_size() % 128 == 0
    return tile.ahead if whole and tile.ahead <= inner else 0


def _described(weight: Tensor) -> bool:
    """Whether a descriptor can tell of the weight: rows lie whole 16 bytes apart."""
    return weight.shape[-1] * weight.element_size() % 16 == 0


def _weights(weight: Tensor, tile: Experts, tma: bool) -> Any:
    """The experts' weights as a kernel takes them: the tensor, or a descriptor of its tiles."""
    if not tma:
        return weight
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.rows, tile.depth])
