"""The operations by name, and which variants come with the workbench: names and modules only.

A variant's module is imported when the variant is first asked for, and only if the conditions here
hold: importing Triton's interpreter or vLLM changes the process, so it must not happen by listing.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.kernels.requirements import Requirement, compiles, triton_runs, vllm_importable

REFERENCE = "torch"

# In the order of a layer's forward pass.
LAYER_OPS = (
    "qkvg",
    "qkv_write",
    "decode_attention",
    "prefill_attention",
    "output_gate",
    "boundary",
    "router",
    "expert_mlp",
    "dense_mlp",
)
MODEL_OPS = ("rms_norm", "softcap")
DRAFTER_OPS = (
    "dynamic_conv",
    "conv_residual_norm",
    "context_kv_write",
    "candidate_edges",
    "selector_walk",
)
OPS = (*LAYER_OPS, *MODEL_OPS, *DRAFTER_OPS)
# Of several ranks together: there is none of them in a model that one process runs, so nothing
# selects them (``use``); a step of several ranks is given one (kernels/parallel/exchanges.py).
GROUP_OPS = ("reduced_boundary",)


@dataclass(frozen=True, slots=True)
class Provided:
    """The module that registers a variant, and what must hold before it is imported."""

    module: str
    requires: tuple[Requirement, ...] = ()


_TRITON = {
    "rms_norm": "triton_norms",
    "boundary": "triton_norms",
    "output_gate": "triton_elementwise",
    "softcap": "triton_elementwise",
    "qkv_write": "triton_qkv",
    "router": "triton_router",
    "qkvg": "triton_linear",
    "dense_mlp": "triton_linear",
    "expert_mlp": "triton_experts",
    "decode_attention": "triton_attention",
    "prefill_attention": "triton_prefill",
    **dict.fromkeys(DRAFTER_OPS[:3], "triton_dflash2"),
    **dict.fromkeys(DRAFTER_OPS[3:], "triton_selector"),
}
# vLLM's own kernels. It has two attentions: in Triton, and FlashAttention 3, which it prefers.
_VLLM: dict[str, dict[str, str]] = {
    **{
        op: {"vllm": "vllm_beam"}
        for op in (
            "rms_norm",
            "boundary",
            "qkvg",
            "qkv_write",
            "output_gate",
            "softcap",
            "dense_mlp",
        )
    },
    **{op: {"vllm": "vllm_experts"} for op in ("router", "expert_mlp")},
    **{
        op: {"vllm": "vllm_attention", "vllm_fa3": "vllm_attention"}
        for op in ("decode_attention", "prefill_attention")
    },
    **{op: {"vllm": "vllm_dflash2"} for op in DRAFTER_OPS},
}


def _built_in(op: str) -> dict[str, Provided]:
    here = "workbench.kernels."
    found = {
        REFERENCE: Provided(here + "variants_torch"),
        "compile": Provided(here + "variants_compile", (compiles,)),
        "triton": Provided(here + _TRITON[op], (triton_runs,)),
    }
    if op == "expert_mlp":
        found["dense"] = Provided(here + "variants_torch")
    for name, module in _VLLM.get(op, {}).items():
        found[name] = Provided(here + module, (vllm_importable,))
    return found


BUILT_IN: dict[str, dict[str, Provided]] = {op: _built_in(op) for op in OPS} | {
    "reduced_boundary": {
        "nccl": Provided("workbench.kernels.parallel.exchanges"),
        "exchange": Provided("workbench.kernels.parallel.exchanges", (triton_runs,)),
    }
}
