"""A prefill of several sequences through one rank: plain torch, the registry's kernels, or ours.

``PrefillStep(weights, state, "ours")()`` embeds, runs every layer, writes the caches and leaves the
last token's logits of each sequence in the state. Forms:

* ``naive``: unfused operations, ``scaled_dot_product_attention``, a loop over the experts with the
  matmul library; it asks the host once a layer which experts were chosen.
* ``chain``: the registry's Triton kernels, products by the matmul library. Down projections "IH".
* ``ours``: as ``chain``, with the output gate inside attention, the experts' grouped products,
  their sum inside the boundary, and the router on tensor cores from split weights. Down
  projections "HI".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.launching import dependent_launch
from workbench.kernels.rank import naive
from workbench.kernels.rank.alone import Alone
from workbench.kernels.rank.choices import refuse_experts
from workbench.kernels.rank.prefill_state import PrefillState
from workbench.kernels.rank.weights import DownLayout, LayerWeights, RankWeights
from workbench.kernels.reference import linear
from workbench.kernels.requirements import Where

FORMS = ("naive", "chain", "ours")
# How the experts' down projections must lie; other forms take either way.
LAYOUTS: dict[str, DownLayout] = {"chain": "IH", "ours": "HI"}
_OPS = (
    "rms_norm", "qkv_write", "prefill_attention", "output_gate", "boundary", "router",
    "expert_mlp", "dense_mlp", "softcap",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Launch sizes of ``ours``; None: the usual ones."""

    experts: Any = None  # ExpertsLaunch
    router: Any = None  # RouterLaunch
    boundary_warps: int = 4
    full: Any = None  # GatedPlan of full layers
    sliding: Any = None  # GatedPlan of sliding layers


@dataclass(slots=True, kw_only=True, eq=False)
class Choices:
    """Experts that were chosen before, to be taken instead of the router's: a layer each, None in
    dense layers: (ids int64 ``[N, K]``, shares float32 ``[N, K]``)."""

    layers: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)


def refuse_form(form: str, weights: RankWeights, device: torch.device) -> None:
    """Refuse a form that cannot run on ``device``; of the weights only sizes are asked for.

    Raises:
        KernelError: no such form, FP8 experts, operations that do not run there, or rows that the
            grouped products' descriptors cannot tell of.
    """
    if form not in FORMS:
        raise KernelError(f"there is no form {form!r:.60} of a prefill; use {', '.join(FORMS)}")
    if weights.experts != "same":
        raise KernelError("a prefill reads experts of the activations' dtype: leave out FP8")
    where = Where.of(device, weights.dtype, weights.shapes)
    for op in _OPS:
        registry.find(op, _variant(form), where)
    s, size = weights.shapes, weights.norm.element_size()
    odd = [n for n in (s.hidden, s.expert_width) if n * size % 16]
    if form == "ours" and odd and any(not layer.dense for layer in weights.layers):
        raise KernelError(
            f"the form ours reads rows of whole 16 bytes, and {odd[0]} values are none; use the "
            "form chain (--variants chain) or another --tp"
        )


def _variant(form: str) -> str:
    """Whose operations a form takes from the registry."""
    return "torch" if form == "naive" else "triton"


class PrefillStep(Alone):
    """One prefill; call it to launch it on the current stream.

    Attributes:
        h: after a call, the watched rows of the stream ``[rows, H]`` before the first layer and
            behind each layer.
        chosen: after a call, the experts of every token.
    """

    def __init__(
        self,
        weights: RankWeights,
        state: PrefillState,
        form: str = "ours",
        *,
        config: PrefillConfig | None = None,
        watch: Tensor | None = None,
        choices: Choices | None = None,
    ) -> None:
        """Resolve the form's kernels.

        ``watch``: int64 rows (of ``S T``) whose stream is kept; None: none.

        Raises:
            KernelError: an unknown form, one that cannot run here or on such weights, or choices
                that are not of this prefill.
        """
        refuse_form(form, weights, weights.device)
        if choices is not None:
            _refuse_choices(choices, weights, state)
        layout = LAYOUTS.get(form, weights.down_layout)
        if weights.down_layout != layout:
            raise KernelError(
                f"the form {form} reads down projections {layout} and these weights are "
                f'{weights.down_layout}: call weights.relayout("{layout}") first'
            )
        self.weights, self.state, self.form = weights, state, form
        self.config, self.watch, self.given = config or PrefillConfig(), watch, choices
        where = Where.of(weights.device, weights.dtype, weights.shapes)
        self._call: dict[str, Callable[..., Any]] = {
            op: registry.find(op, _variant(form), where).function for op in _OPS
        }
        s = weights.shapes
        self._project: Callable[..., Tensor] = linear
        if form == "naive":
            self._call["qkv_write"] = naive.qkv_write
            self._project = naive.split_projections(s.heads, s.kv_heads, s.head_dim)
        self._parts: list[Tensor | None] = []
        if form == "ours" and weights.dtype == torch.bfloat16:
            from workbench.kernels.rank.triton_prefill_vectors import split_parts

            self._parts = [None if w.router is None else split_parts(w.router)
                           for w in weights.layers]  # fmt: skip
        self.h: list[Tensor] = []
        self.chosen = Choices()

    def __call__(self) -> None:
        """Launch the prefill."""
        w, st, call = self.weights, self.state, self._call
        eps = w.shapes.eps
        self.h, self.chosen = [], Choices()
        h = self._embed()
        self._keep(h)
        x = call["rms_norm"](h, w.layers[0].input_norm, eps)
        norms = [*(layer.input_norm for layer in w.layers[1:]), w.norm]
        for index, (layer, next_norm) in enumerate(zip(w.layers, norms, strict=True)):
            a = self._attention(index, layer, x)
            h, x = self._boundary(
                h, a, layer.post_attention_norm, layer.scales[0], layer.pre_mlp_norm
            )
            del a  # its memory is the next product's
            h, x = self._mlp(index, layer, h, x, next_norm)
            self._keep(h)
        logits, cap = linear(x[st.last], w.lm_head), w.shapes.softcap
        st.logits.copy_(logits if cap is None else call["softcap"](logits, cap))
        st.next_token.copy_(self._choose())

    def expert_ids(self) -> Tensor:
        """Experts of the watched rows, int64 ``[layers, rows, K]``, -1 in dense layers."""
        if self.watch is None:
            raise KernelError("no rows of this prefill are watched; give it rows to watch")
        none = torch.full(
            (len(self.watch), self.weights.shapes.top_k), -1, device=self.weights.device
        )
        return torch.stack(
            [none if pair is None else pair[0][self.watch] for pair in self.chosen.layers]
        )

    def _keep(self, h: Tensor) -> None:
        if self.watch is not None:
            self.h.append(h[self.watch])

    def _attention(self, index: int, layer: LayerWeights, x: Tensor) -> Tensor:
        st, call, s = self.state, self._call, self.weights.shapes
        packed = self._project(x, layer.qkvg)
        k, v = st.k[index].flatten(0, 1), st.v[index].flatten(0, 1)
        q = call["qkv_write"](
            packed, layer.qk_norm, st.position, st.rope, k, v, st.rows[layer.full],
            heads=s.heads, full=layer.full, eps=s.eps,
        )  # fmt: skip
        gate = packed[:, packed.shape[1] - s.heads * s.head_dim :].unflatten(-1, (-1, s.head_dim))
        spans = st.spans[layer.full]
        o = None
        if self.form == "ours":
            from workbench.kernels.rank.triton_prefill_attention import gated_prefill

            plan = self.config.full if layer.full else self.config.sliding
            o = gated_prefill(q, k, v, gate, layer.gate_bias, spans, plan)
        if o is None:
            o = call["prefill_attention"](q, k, v, spans)
            o = call["output_gate"](o, gate, layer.gate_bias)
        return linear(o.flatten(1), layer.o_proj)

    def _mlp(
        self, index: int, layer: LayerWeights, h: Tensor, x: Tensor, next_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        call, s = self._call, self.weights.shapes
        behind = (layer.post_mlp_norm, layer.scales[1], next_norm)
        if layer.dense:
            self.chosen.layers.append(None)
            return self._boundary(h, self._dense(layer, x), *behind)
        ids, shares = self._route(index, layer, x)
        self.chosen.layers.append((ids, shares))
        if self.form == "ours":
            from workbench.kernels.rank.triton_prefill_experts import grouped_experts
            from workbench.kernels.rank.triton_prefill_vectors import expert_boundary

            product, place = grouped_experts(
                x, layer.gate_up, layer.down, ids, launch=self.config.experts
            )
            return expert_boundary(
                h, product, shares, s.routed_scale, *behind, s.eps, place=place,
                warps=self.config.boundary_warps,
            )  # fmt: skip
        down = self.weights.down_ih(layer)
        m = call["expert_mlp"](x, layer.gate_up, down, ids, shares, s.routed_scale)
        return self._boundary(h, m, *behind)

    def _dense(self, layer: LayerWeights, x: Tensor) -> Tensor:
        if self.form == "naive":
            m: Tensor = self._call["dense_mlp"](x, layer.gate_up, layer.down)
            return m
        from workbench.kernels.triton_elementwise import swiglu

        return linear(swiglu(linear(x, layer.gate_up)), layer.down)

    def _route(self, index: int, layer: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.given is not None:
            given = self.given.layers[index]
            assert given is not None  # for the type checker: _refuse_choices has looked
            return given
        s = self.weights.shapes
        if self._parts:
            from workbench.kernels.rank.triton_prefill_vectors import split_logits
            from workbench.kernels.triton_router import launch_top_k

            parts, bias = self._parts[index], layer.correction_bias
            assert parts is not None
            assert bias is not None
            logits = split_logits(x, parts, self.config.router)
            return launch_top_k(
                logits, bias, s.top_k, s.n_group, s.topk_group, s.renormalise, dependent_launch(x)
            )
        chosen: tuple[Tensor, Tensor] = self._call["router"](
            x, layer.router, layer.correction_bias, top_k=s.top_k, n_group=s.n_group,
            topk_group=s.topk_group, renormalise=s.renormalise,
        )  # fmt: skip
        return chosen


def _refuse_choices(choices: Choices, weights: RankWeights, state: PrefillState) -> None:
    """Refuse choices of other layers or tokens, or of experts that kernels could not place."""
    s, count = weights.shapes, len(weights.layers)
    if len(choices.layers) != count:
        raise KernelError(
            f"the recorded choices are of {len(choices.layers)} layers, and this model has {count}"
        )
    wanted = (state.sequences * state.tokens, s.top_k)
    for index, (layer, given) in enumerate(zip(weights.layers, choices.layers, strict=True)):
        if layer.dense:
            continue
        if given is None:
            raise KernelError(f"the recorded choices have no experts for sparse layer {index}")
        ids, shares = given
        if tuple(ids.shape) != wanted or shares.shape != ids.shape:
            raise KernelError(
                f"the recorded choices of layer {index} must be {list(wanted)}, a row a token, not "
                f"{list(ids.shape)} and {list(shares.shape)}; record them with as many tokens"
            )
        refuse_experts(ids, s.experts)


def captured(step: PrefillStep) -> Callable[[], None]:
    """The step once called (which compiles its kernels), then as a CUDA graph's replay.

    On a CPU, and for ``naive``, which asks the host, the step itself.

    Raises:
        KernelError: it cannot be captured.
    """
    step()
    if step.weights.device.type != "cuda" or step.form == "naive":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise KernelError(
            f"the prefill cannot be captured in a CUDA graph: {reason:.200}"
        ) from error
    return graph.replay
