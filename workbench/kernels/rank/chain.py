"""The decode step as a chain of swappable operations: every published optimisation is a switch.

``RankStep(weights, state, {"boundary": "triton", ...})`` runs embedding, layers, head, softcap,
argmax, and puts the next token and position where the next step looks for them. Operations of the
registry go by their names there and take any variant registered for them; beside those there are
``"split"`` of qkvg (four linears), ``"plain"`` of qkv_write and expert_mlp (no fusion, no host
round trip), ``"rows"`` of expert_mlp (:mod:`workbench.kernels.rank.triton_experts`), and the two
products that the registry does not know, ``o_proj`` and ``lm_head``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.rank import fp8, naive
from workbench.kernels.rank.alone import Alone
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import LayerWeights, RankWeights
from workbench.kernels.reach import Reach
from workbench.kernels.reference import linear
from workbench.kernels.requirements import Where

# The operations of a step, and the forms before any optimisation.
NAIVE: dict[str, str] = {
    "rms_norm": "torch",
    "qkvg": "split",
    "qkv_write": "plain",
    "decode_attention": "torch",
    "output_gate": "torch",
    "o_proj": "torch",
    "boundary": "torch",
    "router": "torch",
    "expert_mlp": "plain",
    "dense_mlp": "torch",
    "lm_head": "torch",
    "softcap": "torch",
}
# Forms that are of this step and not of the registry.
OWN: dict[str, tuple[str, ...]] = {
    "qkvg": ("split",),
    "qkv_write": ("plain",),
    "expert_mlp": ("plain", "rows"),
    "o_proj": ("torch", "triton"),
    "lm_head": ("torch", "triton"),
}
_NOT_REGISTERED = ("o_proj", "lm_head")
_KEPT_OUT = {"expert_mlp": ("torch",)}  # waits for the host with several tokens: "plain" instead


def forms(op: str) -> list[str]:
    """Every form of an operation of the step.

    Raises:
        KernelError: the step has no such operation.
    """
    if op not in NAIVE:
        raise KernelError(f"a decode step has no switch {op!r:.60}; it has {', '.join(NAIVE)}")
    known = [] if op in _NOT_REGISTERED else registry.names(op)
    return [*OWN.get(op, ()), *(n for n in known if n not in _KEPT_OUT.get(op, ()))]


def resolved(
    variants: Mapping[str, str], weights: RankWeights, state: RankState, device: torch.device
) -> dict[str, Callable[..., Any]]:
    """The function of every operation on ``device``; only sizes of weights and state are asked for.

    Raises:
        KernelError: a form that cannot run there, or on such weights.
    """
    where = Where.of(device, weights.dtype, weights.shapes)
    experts = variants["expert_mlp"]
    if experts not in OWN["expert_mlp"]:
        if weights.experts != "same":
            raise KernelError(
                f"expert_mlp's variant {experts} cannot read {fp8.DESCRIPTION} experts: choose "
                f"the form {' or '.join(OWN['expert_mlp'])}"
            )
        if experts == "triton" and weights.down_layout != "IH":
            raise KernelError(
                "expert_mlp's variant triton reads down projections [E, I, H] and these weights "
                'are [E, H, I]: choose the form rows, or weights.relayout("IH") first'
            )
    return {op: _resolve(op, name, weights, state, where) for op, name in variants.items()}


def _resolve(
    op: str, name: str, weights: RankWeights, state: RankState, where: Where
) -> Callable[..., Any]:
    s = weights.shapes
    if op == "qkvg" and name == "split":
        return naive.split_projections(s.heads, s.kv_heads, s.head_dim)
    if name == "plain":
        if op == "qkv_write":
            return naive.qkv_write
        return naive.expert_mlp(weights.down_layout == "HI")
    if op in _NOT_REGISTERED:
        if name == "torch":
            return linear
        registry.find("qkvg", "triton", where)  # refuses where Triton does not run
        from workbench.kernels.triton_linear import project

        return project
    if op == "expert_mlp" and name == "rows":
        registry.find("expert_mlp", "triton", where)
        if state.batch > 1 or weights.down_layout != "HI":
            raise KernelError(
                "the form rows of expert_mlp is for one sequence and down projections by rows, not "
                f"for {state.batch} and {weights.down_layout}; stages from experts on want one "
                'sequence and weights.relayout("HI"); take attention or load for more'
            )
        if weights.experts == "fp8" and (reason := fp8.why_not(torch.device(where.device))):
            raise KernelError(reason)
        from workbench.kernels.rank.triton_experts import expert_mlp_rows

        return expert_mlp_rows
    return registry.find(op, name, where).function


class RankStep(Alone):
    """One decode step on ``state``; call it to launch it on the current stream.

    Attributes:
        variants: form of every operation.
        h: after a call (or a replay of the graph that holds it) the stream ``[B, H]`` before the
            first layer and after each layer.
    """

    def __init__(
        self, weights: RankWeights, state: RankState, variants: Mapping[str, str] | None = None
    ) -> None:
        """Resolve the forms; what is not named is the naive one.

        Raises:
            KernelError: an unknown operation or form, or one that cannot run here.
        """
        self.weights, self.state = weights, state
        asked = dict(variants or {})
        for op, name in asked.items():
            if name not in forms(op):
                raise KernelError(
                    f"there is no form {name!r:.60} of {op}; there are {', '.join(forms(op))}"
                )
        self.variants = {**NAIVE, **asked}
        self._call = resolved(self.variants, weights, state, weights.device)
        self._slots = torch.arange(state.batch, device=weights.device)
        self.h: list[Tensor] = []
        self._ids: list[Tensor | None] = []

    def __call__(self) -> None:
        """Launch the step: token -> next token, position -> position + 1, no host round trip."""
        w, st, call = self.weights, self.state, self._call
        h = self._embed()
        x = call["rms_norm"](h, w.layers[0].input_norm, w.shapes.eps)
        self.h, self._ids = [h], []
        kinds = {layer.full for layer in w.layers}
        reach = {full: self._reach(full) for full in kinds}
        rows = {full: self._rows(full) for full in kinds}
        norms = [*(layer.input_norm for layer in w.layers[1:]), w.norm]
        for index, (layer, next_norm) in enumerate(zip(w.layers, norms, strict=True)):
            a = self._attention(index, layer, x, reach[layer.full], rows[layer.full])
            h, x = self._boundary(
                h, a, layer.post_attention_norm, layer.scales[0], layer.pre_mlp_norm
            )
            m = self._mlp(layer, x)
            h, x = self._boundary(h, m, layer.post_mlp_norm, layer.scales[1], next_norm)
            self.h.append(h)
        logits, cap = call["lm_head"](x, w.lm_head), w.shapes.softcap
        st.logits.copy_(logits if cap is None else call["softcap"](logits, cap))
        self._advance(self._choose())

    def expert_ids(self) -> Tensor:
        """Experts of the last step, int64 ``[layers, B, K]``, -1 in dense layers."""
        none = torch.full(
            (self.state.batch, self.weights.shapes.top_k), -1, device=self.weights.device
        )
        return torch.stack([none if ids is None else ids for ids in self._ids])

    def _reach(self, full: bool) -> Reach:
        st, window = self.state, self.weights.shapes.window
        return Reach(
            self._slots,
            st.position,
            span=st.rows_of(full),
            window=None if full else window,
            view=slice(0, st.batch),
        )

    def _rows(self, full: bool) -> Tensor:
        rows = self.state.rows_of(full)
        return self._slots * rows + self.state.position % rows

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, reach: Reach, rows: Tensor
    ) -> Tensor:
        w, st, call, s = self.weights, self.state, self._call, self.weights.shapes
        packed = call["qkvg"](x, layer.qkvg)
        q = call["qkv_write"](
            packed,
            layer.qk_norm,
            st.position,
            st.rope,
            st.k[index].flatten(0, 1),
            st.v[index].flatten(0, 1),
            rows,
            heads=s.heads,
            full=layer.full,
            eps=w.shapes.eps,
        )
        o = call["decode_attention"](q[:, None], st.k[index], st.v[index], reach)[:, 0]
        gate = packed[:, packed.shape[1] - s.heads * s.head_dim :].unflatten(-1, (-1, s.head_dim))
        o = call["output_gate"](o, gate, layer.gate_bias)
        return call["o_proj"](o.flatten(1), layer.o_proj)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        w, s, call = self.weights, self.weights.shapes, self._call
        if layer.dense:
            self._ids.append(None)
            return call["dense_mlp"](x, layer.gate_up, layer.down)
        ids, shares = call["router"](
            x,
            layer.router,
            layer.correction_bias,
            top_k=s.top_k,
            n_group=s.n_group,
            topk_group=s.topk_group,
            renormalise=s.renormalise,
        )
        self._ids.append(ids)
        own = self.variants["expert_mlp"] in OWN["expert_mlp"]
        down = layer.down if own else w.down_ih(layer)
        scales = () if layer.gate_up_scale is None else (layer.gate_up_scale, layer.down_scale)
        return call["expert_mlp"](x, layer.gate_up, down, ids, shares, s.routed_scale, *scales)

    def _advance(self, chosen: Tensor) -> None:
        st = self.state
        st.next_token.copy_(chosen)
        st.token.copy_(chosen)
        st.position.add_(1).clamp_(max=st.capacity - 1)
