"""The decode step as a chain of fused Triton kernels: nine launches a layer, one sequence.

What it does beyond the single operations of ``chain.py``: QK norm, RoPE, cache write and attention
are one kernel; merging the attention's parts and the output gate are part of the output projection;
softcap and argmax are part of the head; and with ``dependent`` every kernel is a programmatic
dependent of the one before it and asks for its weights before it waits. Triton only, so it compiles
for every GPU that Triton knows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.launching import dependent_launch
from workbench.kernels.rank import fp8
from workbench.kernels.rank import triton_attention as ta
from workbench.kernels.rank import triton_experts as te
from workbench.kernels.rank import triton_vectors as tv
from workbench.kernels.rank.fused_config import FusedConfig
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import LayerWeights, RankWeights
from workbench.kernels.requirements import Where
from workbench.kernels.triton_runtime import INTERPRETED, triton
from workbench.model.config import SSMAX_LENGTH, SSMAX_POWER

# The interpreter runs programs one after the other: few, and enough to divide work among them.
_FEW = FusedConfig(
    qkvg=(256, 4), o_proj=(128, 4), router=(16, 4), gate_up=(32, 4), down=(128, 4),
    fp8_up=(32, 4), fp8_down=(128, 4), dense_up=(256, 4), dense_down=(128, 4), head=(1024, 4),
    keys=32, sliding_splits=2, full_splits=3,
)  # fmt: skip


LONG_TILES = 2  # tiles of keys a program, above which its loads overlap its products


class _Boundary(NamedTuple):
    """Arguments of one boundary: post-norm, scaled add, next norm."""

    h: Tensor
    sublayer: Tensor
    post: Tensor
    following: Tensor
    stream: Tensor
    normed: Tensor
    scale: tuple[float, float]


def refuse_fused(
    weights: RankWeights, state: RankState, device: torch.device, dependent: bool | None
) -> None:
    """Refuse what the fused chain cannot do on ``device``; only sizes of the others are asked for.

    Raises:
        KernelError: several sequences, experts in the other layout, Triton that does not run
            here, dependent launches on a GPU that has none, or FP8 on one that is too old.
    """
    s = weights.shapes
    if device.type != "meta":  # sizes only: nothing is launched
        registry.find("qkvg", "triton", Where.of(device, weights.dtype, s))
    if state.batch != 1:
        raise KernelError(
            f"the fused chain decodes one sequence, not {state.batch}; use the chain of "
            "single operations for a batch"
        )
    if weights.down_layout != "HI":
        raise KernelError('the fused chain reads down projections [E, H, I]: relayout("HI")')
    if s.head_dim & (s.head_dim - 1):
        raise KernelError(
            f"the fused chain takes heads of a power of two, not {s.head_dim}; use the chain "
            "of single operations"
        )
    if dependent and not dependent_launch(torch.empty(0, device=device)):
        raise KernelError(
            "programmatic dependent launches need a GPU of compute capability 9.0 or newer; "
            "leave them out (fused instead of fused_pdl)"
        )
    if weights.experts == "fp8" and (reason := fp8.why_not(device)):
        raise KernelError(reason)


class FusedStep:
    """One decode step of one sequence; call it to launch it on the current stream.

    Attributes:
        h: ``[layers + 1, 1, H]``, the stream before the first layer and after each layer of the
            last step.
    """

    def __init__(
        self,
        weights: RankWeights,
        state: RankState,
        *,
        dependent: bool | None = None,
        config: FusedConfig | None = None,
    ) -> None:
        """Allocate what passes between the kernels, a buffer for each place it is written.

        ``dependent`` (None: where the GPU has it): programmatic dependent launches.

        Raises:
            KernelError: as :func:`refuse_fused` says.
        """
        s, device = weights.shapes, weights.device
        refuse_fused(weights, state, device, dependent)
        self.weights, self.state = weights, state
        able = dependent_launch(weights.norm)
        self.dependent = able if dependent is None else dependent
        self.config = config or (_FEW if INTERPRETED else FusedConfig())
        count, dtype = len(weights.layers), weights.dtype

        def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        single = torch.float32
        self.h = buffer(count + 1, 1, s.hidden)
        self._middle = buffer(count, s.hidden)  # the stream after attention
        self._x = buffer(count + 1, s.hidden)  # normed for attention; the last for the head
        self._y = buffer(count, s.hidden)  # normed for the MLP
        self._packed = buffer(count, s.packed)
        self._attended = buffer(count, s.hidden)
        self._moved = buffer(count, s.hidden)  # the MLP's output
        self._gated = buffer(count, s.heads * s.head_dim)
        splits = [self._splits(layer.full) for layer in weights.layers]
        self._parts = [buffer(n, s.heads, s.head_dim, kind=single) for n in splits]
        self._lse = [buffer(n, s.heads, kind=single) for n in splits]
        self._scores = buffer(count, s.experts, kind=single)
        self._ids = torch.full((count, 1, s.top_k), -1, dtype=torch.int64, device=device)
        self._shares = buffer(count, s.top_k, kind=single)
        width = max(s.top_k * s.expert_width, s.mlp_width)
        self._act = buffer(count, width)
        programs = triton.cdiv(s.vocabulary, self.config.head[0])
        self._best = buffer(programs, kind=single)
        self._where = buffer(programs, kind=torch.int32)

    def _splits(self, full: bool) -> int:
        rows, c = self.state.rows_of(full), self.config
        most = c.full_splits if full else c.sliding_splits
        return max(1, min(most, triton.cdiv(rows, c.keys)))

    def _long(self, full: bool) -> bool:
        """Whether a part of the keys is several tiles, whose loads are worth overlapping."""
        c = self.config
        return self.state.rows_of(full) > LONG_TILES * c.keys * self._splits(full)

    def expert_ids(self) -> Tensor:
        """Experts of the last step, int64 ``[layers, 1, K]``, -1 in dense layers."""
        return self._ids

    def __call__(self) -> None:
        """Launch the step: token -> next token, position -> position + 1."""
        w = self.weights
        self._begin()
        pending: _Boundary | None = None  # the boundary in front of the next attention
        norms = [*(layer.input_norm for layer in w.layers[1:]), w.norm]
        for index, (layer, next_norm) in enumerate(zip(w.layers, norms, strict=True)):
            self._attention(index, layer, pending)
            middle = _Boundary(
                self.h[index], self._attended[index], layer.post_attention_norm,
                layer.pre_mlp_norm, self._middle[index], self._y[index], layer.scales[0],
            )  # fmt: skip
            if layer.dense:
                self._boundary(middle)
                self._dense(index, layer)
            else:
                self._sparse(index, layer, middle)
            pending = _Boundary(
                self._middle[index], self._moved[index], layer.post_mlp_norm, next_norm,
                self.h[index + 1], self._x[index + 1], layer.scales[1],
            )  # fmt: skip
            if not self.config.norm_in_qkvg or index + 1 == len(w.layers):
                self._boundary(pending)
                pending = None
        self._head()

    def _begin(self) -> None:
        w, s = self.weights, self.weights.shapes
        # Not a dependent: this launch waits for everything before the step.
        tv.embed_norm[(1,)](
            self.state.token, w.embed, w.layers[0].input_norm, self.h[0], self._x[0], s.eps,
            s.hidden, *tv.parts(s.hidden), num_warps=self.config.vector_warps,
        )  # fmt: skip

    def _boundary(self, b: _Boundary) -> None:
        s, pdl = self.weights.shapes, self.dependent
        tv.boundary[(1,)](
            b.h, b.sublayer, b.post, b.following, b.stream, b.normed, *b.scale, s.eps,
            s.hidden, *tv.parts(s.hidden), pdl,
            num_warps=self.config.vector_warps, enable_fp_fusion=False, **tv.options(pdl),
        )  # fmt: skip

    def _normed_product(
        self, b: _Boundary, weight: Tensor, out: Tensor, tile: tuple[int, int]
    ) -> None:
        s, pdl, width = self.weights.shapes, self.dependent, out.shape[-1]
        tv.boundary_matvec[(triton.cdiv(width, tile[0]),)](
            b.h, b.sublayer, b.post, b.following, b.stream, b.normed, weight, out, *b.scale, s.eps,
            width, s.hidden, *tv.parts(s.hidden), tile[0], pdl,
            num_warps=tile[1], **tv.options(pdl),
        )  # fmt: skip

    def _product(
        self, x: Tensor, weight: Tensor, out: Tensor, tile: tuple[int, int], gated: bool = False
    ) -> None:
        pdl, width, inner = self.dependent, out.shape[-1], weight.shape[-1]
        tv.matvec[(triton.cdiv(width, tile[0]),)](
            x, weight, out, width, inner, *tv.parts(inner), tile[0], gated, pdl,
            num_warps=tile[1], **tv.options(pdl),
        )  # fmt: skip

    def _attention(self, index: int, layer: LayerWeights, pending: _Boundary | None) -> None:
        st, s, c, pdl = self.state, self.weights.shapes, self.config, self.dependent
        packed, parts, lse = self._packed[index], self._parts[index], self._lse[index]
        if pending is None:
            self._product(self._x[index], layer.qkvg, packed, c.qkvg)
        else:
            self._normed_product(pending, layer.qkvg, packed, c.qkvg)
        ta.attend[(s.kv_heads, parts.shape[0])](
            packed, layer.qk_norm, st.position, st.rope, st.k[index], st.v[index], parts, lse,
            st.rows_of(layer.full), s.head_dim**-0.5 * math.log2(math.e), s.eps,
            s.heads, s.kv_heads, s.head_dim,
            max(16, triton.next_power_of_2(s.heads // s.kv_heads + 1)), c.keys, parts.shape[0],
            layer.full, self._long(layer.full), SSMAX_LENGTH, SSMAX_POWER, pdl,
            num_warps=c.attend_warps, **tv.options(pdl),
        )  # fmt: skip
        inner = s.heads * s.head_dim
        gate = packed[s.packed - inner :]
        out = self._attended[index]
        if parts.shape[0] > c.sliding_splits:
            columns = min(32, s.head_dim)
            ta.merge_gate[(s.heads, triton.cdiv(s.head_dim, columns))](
                parts, lse, gate, layer.gate_bias, self._gated[index], s.heads, s.head_dim,
                parts.shape[0], triton.next_power_of_2(parts.shape[0]), columns, pdl,
                num_warps=4, **tv.options(pdl),
            )  # fmt: skip
            self._last_product(self._gated[index], layer.o_proj, out, c.o_proj)
            return
        self._o_proj(parts, lse, gate, layer, out)

    # What ends a sublayer: several ranks' steps send what it writes.

    def _o_proj(
        self, parts: Tensor, lse: Tensor, gate: Tensor, layer: LayerWeights, out: Tensor
    ) -> None:
        s, c, pdl = self.weights.shapes, self.config, self.dependent
        ta.o_proj[(triton.cdiv(s.hidden, c.o_proj[0]),)](
            parts, lse, gate, layer.gate_bias, layer.o_proj, out, s.hidden,
            s.heads, s.head_dim, triton.next_power_of_2(s.heads), parts.shape[0], c.o_proj[0], pdl,
            num_warps=c.o_proj[1], **tv.options(pdl),
        )  # fmt: skip

    def _last_product(self, x: Tensor, weight: Tensor, out: Tensor, tile: tuple[int, int]) -> None:
        self._product(x, weight, out, tile)

    def _experts_down(
        self, act: Tensor, layer: LayerWeights, ids: Tensor, shares: Tensor, out: Tensor,
        tile: tuple[int, int],
    ) -> None:  # fmt: skip
        te.launch_experts_down(
            act, layer.down, ids, shares, out, self.weights.shapes.routed_scale, *tile,
            self.dependent, self.dependent, layer.down_scale,
        )  # fmt: skip

    def _dense(self, index: int, layer: LayerWeights) -> None:
        act = self._act[index, : self.weights.shapes.mlp_width]
        self._product(self._y[index], layer.gate_up, act, self.config.dense_up, gated=True)
        self._last_product(act, layer.down, self._moved[index], self.config.dense_down)

    def _sparse(self, index: int, layer: LayerWeights, middle: _Boundary) -> None:
        s, c, pdl = self.weights.shapes, self.config, self.dependent
        assert layer.router is not None  # for the type checker: a sparse layer has one
        y, ids, shares = self._y[index], self._ids[index], self._shares[index]
        if c.norm_in_router:
            self._normed_product(middle, layer.router, self._scores[index], c.router)
        else:
            self._boundary(middle)
            self._product(y, layer.router, self._scores[index], c.router)
        assert layer.correction_bias is not None
        te.launch_top_k(
            self._scores[index], layer.correction_bias, ids, shares, s, self._ahead(index),
            c.ahead_programs, c.ahead == "late", pdl,
        )  # fmt: skip
        act = self._act[index, : s.top_k * s.expert_width].view(s.top_k, s.expert_width)
        scaled = layer.gate_up_scale is not None
        up, down = (c.fp8_up, c.fp8_down) if scaled else (c.gate_up, c.down)
        te.launch_experts_up(y, layer.gate_up, ids, act, *up, pdl, layer.gate_up_scale)
        self._experts_down(act, layer, ids, shares, self._moved[index], down)

    def _ahead(self, index: int) -> Tensor | None:
        """What is brought into the L2 while the experts are chosen."""
        layers = self.weights.layers
        if self.config.ahead == "off" or index + 1 == len(layers) or INTERPRETED:
            return None
        return layers[index + 1].qkvg

    def _head(self) -> None:
        w, st, s, pdl = self.weights, self.state, self.weights.shapes, self.dependent
        rows, warps = self.config.head
        cap = s.softcap or 1.0
        programs = self._best.shape[0]
        tv.head[(programs,)](
            self._x[-1], w.lm_head, st.logits, self._best, self._where, 1.0 / cap, float(cap),
            s.vocabulary, s.hidden, *tv.parts(s.hidden), rows, s.softcap is not None, pdl,
            num_warps=warps, **tv.options(pdl),
        )  # fmt: skip
        self._pick()

    def _pick(self) -> None:
        st, s, pdl, programs = self.state, self.weights.shapes, self.dependent, self._best.shape[0]
        tv.pick[(1,)](
            self._best, self._where, st.token, st.next_token, st.position, st.capacity - 1,
            programs, triton.next_power_of_2(programs), s.vocabulary, pdl,
            num_warps=8, **tv.options(pdl),
        )  # fmt: skip
