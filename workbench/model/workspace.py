"""What a GPU holds beside weights and KV cache: scratch of one batch, tables, the process."""

from __future__ import annotations

from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config
from workbench.model.layout import Layout
from workbench.model.serve_command import Speculation

# NCCL's buffers and captured graphs: what a process holds beside its tensors. An allowance.
PROCESS_BYTES = 1 << 30


def workspace_bytes(
    config: BeamConfig,
    layout: Layout,
    batched_tokens: int,
    sequences: int,
    speculation: Speculation | None = None,
    drafter: DFlash2Config | None = None,
) -> int:
    """Bytes one GPU needs beside weights and KV cache. **Modelled**, not the engine's own figure.

    The residual stream with its norms, the wider of attention projections and the experts' two
    scratch buffers (as vLLM 0.33's Triton experts lay them out: one row of every chosen expert for
    every token that meets there), the logits of every row that is sampled in FP32,
    :func:`buffer_bytes` and :data:`PROCESS_BYTES`. Recorded starts of the engine on one H200 took
    0.5 to 0.9 GiB less (``tests/model/test_plan.py``).
    """
    c, hidden = config, config.hidden_size
    stream = 4 * batched_tokens * hidden * 2
    attention = batched_tokens * (2 * c.q_size + 2 * c.kv_size) // layout.tp * 2
    experts = 0
    if c.sparse_layers:
        # Under data parallelism the groups' tokens meet in the experts.
        chosen = batched_tokens * layout.dp * c.num_experts_per_tok
        width = c.moe_intermediate_size // layout.expert_slices
        experts = chosen * (max(width, hidden) + max(2 * width, hidden)) * 2
    rows = sequences * (1 + (speculation.tokens if speculation else 0))
    logits = min(rows, batched_tokens) * c.vocab_size * 4
    tables = buffer_bytes(config, drafter, layout)
    return stream + max(attention, experts) + logits + tables + PROCESS_BYTES


def buffer_bytes(
    config: BeamConfig, drafter: DFlash2Config | None = None, layout: Layout | None = None
) -> int:
    """Bytes that loading makes beside the parameters, on one GPU. Exact.

    Cosines and sines of every position, FP32 for the model's sliding layers and BF16 for a drafter:
    half a GiB at one million positions. And the drafter's second copy of what makes keys and values
    of its context, stacked for all layers (vLLM 0.33).
    """
    size = 4 * config.max_position_embeddings * config.head_dim if config.sliding_layers else 0
    if drafter is not None:
        d, tp = drafter, layout.tp if layout is not None else 1
        heads = max(1, d.num_key_value_heads // tp)
        size += 2 * d.max_position_embeddings * d.head_dim
        size += 2 * d.num_hidden_layers * d.head_dim * (2 * heads * d.hidden_size + 1)
    return size
