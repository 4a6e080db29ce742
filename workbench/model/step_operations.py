"""Bytes, FLOPs and communication of each operation of a step, for one GPU of a layout."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.kernels.roofline import (
    Work,
    all_gather_bytes,
    all_reduce_bytes,
    bound,
    expected_destinations,
    expected_visits,
    math_of,
)
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_settings import KV_WIDTH
from workbench.model.step_values import DISPATCH_WIDTH, Operation, StepSettings, with_shares
from workbench.model.weights import expected_experts, matrix_bytes, size_weights

ACTIVATION = 2  # bytes of a BF16 number


def visible_pairs(new: int, earlier: int, window: int | None) -> tuple[int, int]:
    """Keys that ``new`` causal rows after ``earlier`` tokens see: (different ones, pairs).

    Row i of 1 … new sees itself and everything before it, at most ``window`` keys where there is a
    window. Pairs count (query, key) over all rows, exactly.
    """
    if window is None:
        return earlier + new, new * earlier + new * (new + 1) // 2
    growing = min(max(window - earlier, 0), new)  # rows that still see everything before them
    pairs = growing * earlier + growing * (growing + 1) // 2 + (new - growing) * window
    return min(earlier, window - 1) + new, pairs


# -- operations ---------------------------------------------------------------------------------


class Operations:
    """Collects the operations of one step."""

    def __init__(self, settings: StepSettings) -> None:
        self.settings = settings
        self.found: list[Operation] = []

    def add(
        self,
        name: str,
        *,
        count: int = 1,
        flops: float = 0.0,
        math: str = "bf16",
        storage: str = "",
        weights: float = 0.0,
        kv: float = 0.0,
        activations: float = 0.0,
        wire: float = 0.0,
    ) -> None:
        """Amounts are of one of ``count`` times; an operation that is never done is left out."""
        if count < 1:
            return
        weights, kv, activations = count * weights, count * kv, count * activations
        work = Work(
            name=name,
            bytes=weights + kv + activations,
            flops=count * flops,
            math=math,
            storage=storage,
            wire_bytes=count * wire,
            count=count,
        )
        self.found.append(
            Operation(
                work=work,
                bound=bound(work, self.settings.rates),
                weight_bytes=weights,
                kv_bytes=kv,
                activation_bytes=activations,
            )
        )

    def linear(
        self,
        name: str,
        rows: float,
        shapes: Iterable[tuple[int, int]],
        *,
        count: int = 1,
        storage: str = "bf16",
        more: float = 0.0,
        inputs: float,
        outputs: float,
    ) -> None:
        """Products of ``rows`` rows with weights ``[out, in]``; ``inputs`` and ``outputs`` numbers
        a row go in and out, ``more`` bytes of weights besides."""
        shapes = tuple(shapes)
        self.add(
            name,
            count=count,
            flops=2 * rows * sum(out * wide for out, wide in shapes),
            math=math_of(storage, self.settings.rates),
            storage=storage,
            weights=more + sum(matrix_bytes(out, wide, storage) for out, wide in shapes),
            activations=ACTIVATION * rows * (inputs + outputs),
        )

    def shared(self) -> tuple[Operation, ...]:
        """All of them, with their share of the step's time."""
        return with_shares(self.found)


def attention(work: Operations, c: BeamConfig, here: int, new: int, earlier: int) -> None:
    """Embedding, attention and its projections: ``new`` rows of each of ``here`` sequences."""
    s = work.settings
    tp, hidden, layers, rows = s.layout.tp, c.hidden_size, c.num_hidden_layers, here * new
    heads, q = c.num_attention_heads // tp, c.q_size // tp
    kv = max(1, c.num_key_value_heads // tp) * c.head_dim
    width, storage = KV_WIDTH[s.kv_dtype], s.precision.attention
    # A rank looks up the rows of its part of the vocabulary; every rank ends with all of them.
    row_bytes = matrix_bytes(s.layout.vocabulary(c) // tp, hidden, "bf16") / c.vocab_size
    work.add(
        "embedding",
        weights=min(rows, c.vocab_size) * row_bytes,
        activations=ACTIVATION * rows * hidden,
    )
    work.linear(
        "qkvg_projection", rows, [(q, hidden), (q, hidden), (kv, hidden), (kv, hidden)],
        count=layers, storage=storage, inputs=hidden, outputs=2 * q + 2 * kv,
    )  # fmt: skip
    # QK norm, RoPE and the cache update as the one kernel that engines fuse them into.
    work.add(
        "kv_write", count=layers,
        weights=matrix_bytes(1, 2 * c.head_dim, "bf16"),
        kv=rows * 2 * kv * width,
        activations=ACTIVATION * rows * (2 * q + 2 * kv),
    )  # fmt: skip
    for name, window, count in (
        ("attention_full", None, len(c.full_layers)),
        ("attention_sliding", c.sliding_window, len(c.sliding_layers)),
    ):
        keys, pairs = visible_pairs(new, earlier, window)
        work.add(  # the output gate is its epilogue: queries and gate in, gated output out
            name, count=count, math=s.attention_math,
            flops=4 * c.head_dim * heads * here * pairs,
            weights=matrix_bytes(1, heads, "bf16"),
            kv=here * keys * 2 * kv * width,
            activations=ACTIVATION * rows * 3 * q,
        )  # fmt: skip
    work.linear(
        "o_proj", rows, [(hidden, q)], count=layers, storage=storage, inputs=q, outputs=hidden
    )


def mlps(work: Operations, c: BeamConfig, rows: int, total: int) -> None:
    """Dense MLPs, routers and experts: ``rows`` here of ``total`` over all groups."""
    s = work.settings
    layout, hidden, sparse = s.layout, c.hidden_size, len(c.sparse_layers)
    dense = c.intermediate_size // layout.tp
    if sparse < c.num_hidden_layers:
        work.linear(
            "dense_mlp", rows, [(dense, hidden), (dense, hidden), (hidden, dense)],
            count=c.num_hidden_layers - sparse, storage=s.precision.dense_mlp,
            inputs=hidden, outputs=hidden,
        )  # fmt: skip
    if not sparse:
        return
    experts, chosen = c.num_experts, c.num_experts_per_tok
    work.add(
        "router", count=sparse, math=s.router_math, storage="fp32",
        flops=2 * rows * experts * hidden,
        weights=matrix_bytes(experts, hidden, "fp32") + matrix_bytes(1, experts, "fp32"),
        activations=rows * (ACTIVATION * hidden + 4 * experts),
    )  # fmt: skip
    distinct = s.distinct
    if distinct is None:
        distinct = expected_experts(experts, chosen, total)
    wide = c.moe_intermediate_size // layout.expert_slices
    held = layout.experts_per_gpu(c)
    storage = s.precision.experts
    here = size_weights(c, s.precision, layout).per_gpu["experts"] / sparse  # of one layer
    # Tokens that reach this GPU: its group's, or all groups', or those that chose an expert here.
    arriving: float = total if layout.dp > 1 else rows
    if layout.expert_parallel:
        arriving *= expected_visits(experts, chosen, held)
    work.add(
        "experts", count=sparse, math=math_of(storage, s.rates), storage=storage,
        flops=6 * total * chosen * held / experts * hidden * wide,
        weights=distinct / experts * here,
        activations=ACTIVATION * arriving * 2 * hidden,
    )  # fmt: skip


def head(work: Operations, c: BeamConfig, rows: int) -> None:
    """The head over ``rows`` rows, softcap in its epilogue, and the gathering of the logits."""
    if not rows:
        return
    tp = work.settings.layout.tp
    vocabulary = work.settings.layout.vocabulary(c) // tp
    work.linear(
        "head", rows, [(vocabulary, c.hidden_size)], inputs=c.hidden_size, outputs=vocabulary
    )
    if work.settings.communication and tp > 1:
        work.add("logits_gather", wire=all_gather_bytes(ACTIVATION * rows * vocabulary * tp, tp))


def norms_and_sums(work: Operations, c: BeamConfig, rows: int) -> None:
    """Norms with the residual stream, and what goes between GPUs in every layer."""
    s, layout = work.settings, work.settings.layout
    hidden, layers, sparse = c.hidden_size, c.num_hidden_layers, len(c.sparse_layers)
    message = ACTIVATION * rows * hidden
    # A boundary reads the sublayer's output and the stream and writes the stream and the next
    # input: two a layer. The first norm reads and writes once; the last is the last boundary's.
    work.add(
        "norms",
        weights=matrix_bytes(1, hidden, "bf16") * (4 * layers + 1),
        activations=message * (4 * 2 * layers + 2),
    )
    if not s.communication:
        return
    tp, dp = layout.tp, layout.dp
    if tp > 1:  # after the embedding, o_proj, the dense MLPs, and experts that are not dispatched
        work.add(
            "all_reduce",
            count=1 + layers + (layers if dp == 1 else layers - sparse),
            wire=all_reduce_bytes(message, tp, s.all_reduce),
        )
    if dp == 1 or not sparse:
        return
    # Of a group's rows each rank sends an equal part to the other groups' GPUs and, at the end,
    # collects the results of the others' parts.
    back = all_gather_bytes(message, tp)
    if layout.expert_parallel:
        copies = expected_destinations(c.num_experts, c.num_experts_per_tok, layout.gpus)
        numbers = rows / tp * hidden * copies
        work.add(
            "all_to_all",
            count=sparse,
            wire=numbers * (DISPATCH_WIDTH[s.dispatch_dtype] + ACTIVATION) + back,
        )
    else:  # every GPU has a slice of every expert: all tokens to all, partial sums back
        everything = dp * message
        work.add(
            "gather_scatter",
            count=sparse,
            wire=2 * all_gather_bytes(everything, layout.gpus) + back,
        )


def draft(
    work: Operations, c: BeamConfig, d: DFlash2Config, here: int, context: int, drafts: int
) -> None:
    """Operations of the drafter's pass; amounts as in vLLM 0.33's DFlash2 for Beam."""
    s = work.settings
    tp, hidden, layers = s.layout.tp, d.hidden_size, d.num_hidden_layers
    block = drafts + 1
    rows = here * block
    q, kv = d.q_size // tp, max(1, d.num_key_value_heads // tp) * d.head_dim
    heads, wide, width = (
        d.num_attention_heads // tp,
        d.intermediate_size // tp,
        KV_WIDTH[s.kv_dtype],
    )
    reads = len(d.target_layer_ids) * hidden
    work.add(
        "draft_embedding",
        weights=rows * matrix_bytes(s.layout.vocabulary(c) // tp, hidden, "bf16") / c.vocab_size,
        activations=ACTIVATION * rows * hidden,
    )
    work.linear("draft_context", rows, [(hidden, reads)], inputs=reads, outputs=hidden)
    # K and V weights serve the target's rows and the block's; they are read once.
    work.add(
        "draft_qkv", count=layers, storage="bf16",
        flops=2 * rows * hidden * (q + 2 * (2 * kv)),
        weights=matrix_bytes(q, hidden, "bf16") + 2 * matrix_bytes(kv, hidden, "bf16"),
        kv=2 * rows * 2 * kv * width,
        activations=ACTIVATION * rows * (2 * hidden + q),
    )  # fmt: skip
    # Row j of the block sees all of the block and the window's other keys before itself.
    old = [min(max(d.sliding_window - 1 - j, 0), context) for j in range(block)]
    work.add(
        "draft_attention", count=layers, math=s.attention_math,
        flops=4 * d.head_dim * heads * here * (sum(old) + block * block),
        kv=here * (old[0] + block) * 2 * kv * width,
        activations=ACTIVATION * rows * 2 * q,
    )  # fmt: skip
    work.linear("draft_o_proj", rows, [(hidden, q)], count=layers, inputs=q, outputs=hidden)
    work.linear(
        "draft_mlp", rows, [(wide, hidden), (wide, hidden), (hidden, wide)],
        count=layers, inputs=hidden, outputs=hidden,
    )  # fmt: skip
    taps = 2 * d.conv_kernel_size
    work.linear(
        "draft_convolutions", rows, [(taps * (hidden // d.conv_group_size), hidden)],
        count=2 * layers, more=matrix_bytes(taps, hidden, "bf16"),
        inputs=2 * hidden, outputs=2 * hidden,
    )  # fmt: skip
    logits = here * drafts
    vocabulary = s.layout.vocabulary(c) // tp
    work.linear("draft_head", logits, [(vocabulary, hidden)], inputs=hidden, outputs=vocabulary)
    # For each drafted position, the codes of the candidates there and of those before them.
    codes = 2 * d.selector_top_k * d.selector_rank
    work.linear("draft_selector", logits, [(d.selector_rank, hidden)], inputs=hidden, outputs=codes)
    work.add(
        "draft_norms",
        weights=matrix_bytes(1, hidden, "bf16") * (2 * layers + 2)
        + layers * matrix_bytes(1, 2 * d.head_dim, "bf16"),
        activations=ACTIVATION * rows * hidden * (4 * 2 * layers + 4),
    )
    if s.communication and tp > 1:
        work.add(
            "draft_all_reduce",
            count=2 * layers + 1,
            wire=all_reduce_bytes(ACTIVATION * rows * hidden, tp, s.all_reduce),
        )
