"""Step times against brute force: pairs one by one, bytes tensor by tensor, sends by listing."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from workbench.errors import WorkbenchError
from workbench.kernels.roofline import Rates, data_sheet_rates, recorded_rates
from workbench.model.asked import SizingError
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config, drafter_tensors
from workbench.model.layout import Layout
from workbench.model.presets import beam_501b, beam_501b_dflash2, resolve
from workbench.model.sizing import size_kv
from workbench.model.steptime import (
    StepTime,
    decode_step,
    draft_step,
    prefill_step,
    prompt_rate,
    speculative_step,
    verify_step,
    visible_pairs,
)
from workbench.model.tensors import tensor_specs
from workbench.model.weights import PRECISIONS, Precision, active_bytes

BEAM = beam_501b().config
TINY = resolve("beam-tiny").config
DRAFTER = beam_501b_dflash2().config
H200 = recorded_rates("H200")
GB200 = data_sheet_rates("GB200")
TP8 = Layout(tp=8)

SMALL = BeamConfig(
    vocab_size=128,
    hidden_size=48,
    intermediate_size=40,
    moe_intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=3,
    layer_types=("sliding_attention", "full_attention") * 2,
    mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
    sliding_window=5,
    max_position_embeddings=512,
)


def attended(new: int, earlier: int, window: int | None) -> tuple[int, int]:
    """Different keys and (query, key) pairs, one by one."""
    pairs = [
        (i, j)
        for i in range(earlier, earlier + new)
        for j in range(i + 1)
        if window is None or j > i - window
    ]
    return len({j for _, j in pairs}), len(pairs)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
def test_visible_pairs_one_by_one(window: int | None) -> None:
    for new in (1, 2, 3, 7, 12):
        for earlier in (0, 1, 3, 4, 5, 6, 20):
            assert visible_pairs(new, earlier, window) == attended(new, earlier, window)


# -- FLOPs ----------------------------------------------------------------------------------------


def by_hand(new: int, sequences: int, earlier: int, logits: int) -> float:
    """All FLOPs of SMALL on one GPU: every matrix by its rows, every pair of every head."""
    rows, total = new * sequences, 0.0
    for tensor in tensor_specs(SMALL):
        if len(tensor.shape) != 2 or tensor.part == "embedding":
            continue
        uses = sequences * logits if tensor.part == "head" else rows
        if tensor.expert is not None:  # its share of the tokens
            total += 2 * tensor.size * uses * SMALL.num_experts_per_tok / SMALL.num_experts
        else:
            total += 2 * tensor.size * uses
    for kind in SMALL.layer_types:
        _, pairs = attended(new, earlier, 5 if kind == "sliding_attention" else None)
        for _ in range(SMALL.num_attention_heads):
            total += sequences * pairs * (2 * SMALL.head_dim + 2 * SMALL.head_dim)  # QK and PV
    return total


def test_flops_by_hand() -> None:
    decode = decode_step(SMALL, batch=3, context=9, rates=H200)
    assert decode.flops == pytest.approx(by_hand(1, 3, 8, 1))
    verify = verify_step(SMALL, batch=3, context=9, draft_tokens=4, rates=H200)
    assert verify.flops == pytest.approx(by_hand(5, 3, 8, 5))
    prefill = prefill_step(SMALL, sequences=2, tokens=7, earlier_context=3, rates=H200)
    assert prefill.flops == pytest.approx(by_hand(7, 2, 3, 1))
    silent = prefill_step(SMALL, sequences=2, tokens=7, rates=H200, logits=False)
    assert silent.flops == pytest.approx(by_hand(7, 2, 0, 0))
    assert (decode.tokens, verify.tokens, prefill.tokens) == (3, 15, 14)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_share_the_flops_and_repeat_the_router(tp: int) -> None:
    whole = decode_step(BEAM, batch=16, context=4096, rates=GB200)
    rank = decode_step(BEAM, batch=16, context=4096, rates=GB200, layout=Layout(tp=tp))
    router = 49 * 2 * 16 * 256 * 5120
    assert whole.operation("router").work.flops == rank.operation("router").work.flops == router
    assert tp * (rank.flops - router) == pytest.approx(whole.flops - router)


def test_expert_parallel_gpus_share_experts_and_their_tokens() -> None:
    one = decode_step(BEAM, batch=64, context=1024, rates=GB200)
    layout = Layout(dp=4, expert_parallel=True)
    gpu = decode_step(BEAM, batch=64, context=1024, rates=GB200, layout=layout)
    for name in ("experts", "router", "qkvg_projection", "attention_full", "head"):
        assert 4 * gpu.operation(name).work.flops == pytest.approx(one.operation(name).work.flops)
    assert 4 * gpu.operation("experts").weight_bytes == pytest.approx(
        one.operation("experts").weight_bytes
    )
    # Attention is whole on every GPU.
    assert gpu.operation("o_proj").weight_bytes == one.operation("o_proj").weight_bytes


# -- bytes ----------------------------------------------------------------------------------------


def test_weights_of_a_rank_tensor_by_tensor() -> None:
    # By the rules of the split, in BF16 with FP32 routers, 2 of 8 experts touched.
    for tp in (1, 2, 4, 8):
        total = 0.0
        for tensor in tensor_specs(SMALL):
            name, size = tensor.name, tensor.size
            if tensor.part == "embedding":
                size = 3 * SMALL.hidden_size  # three rows are looked up, wherever they lie
            if ".k_proj" in name or ".v_proj" in name:
                size //= min(tp, SMALL.num_key_value_heads)
            elif tensor.part not in ("norms", "router"):
                size /= tp
            if tensor.expert is not None:
                size *= 2 / SMALL.num_experts
            total += size * (4 if tensor.fp32 else 2)
        step = decode_step(
            SMALL, batch=3, context=9, rates=H200, layout=Layout(tp=tp), distinct=2.0
        )
        assert step.weight_bytes == pytest.approx(total), tp


@pytest.mark.parametrize("chosen", [*PRECISIONS.values(), Precision(attention="nvfp4")])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=4),
        TP8,
        Layout(tp=16),
        Layout(dp=4, expert_parallel=True),
        Layout(tp=2, dp=4),
        Layout(tp=2, dp=4, expert_parallel=True),
        Layout(tp=8, expert_parallel=True),
    ],
)
def test_weights_agree_with_active_bytes(layout: Layout, chosen: Precision) -> None:
    for rows in (1, 4):
        step = verify_step(
            BEAM, batch=8, context=99, draft_tokens=rows - 1, rates=GB200, layout=layout,
            precision=chosen,
        )  # fmt: skip
        expected = active_bytes(BEAM, 8 * rows, chosen, layout)
        assert step.weight_bytes == pytest.approx(sum(expected.values()), rel=1e-12)
        assert step.operation("experts").weight_bytes == pytest.approx(expected["experts"])
    chunk = prefill_step(
        BEAM, sequences=8, tokens=64, rates=GB200, layout=layout, precision=chosen, logits=False,
        distinct=200.0,
    )  # fmt: skip
    expected = active_bytes(BEAM, 8 * 64, chosen, layout, distinct=200.0, logits=0)
    assert chunk.weight_bytes == pytest.approx(sum(expected.values()), rel=1e-12)
    assert "head" not in {op.name for op in chunk.operations}


@pytest.mark.parametrize("tp", [1, 2, 8, 16])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("context", [1, 511, 512, 513, 100_000, 1_048_576])
def test_keys_and_values_read_agree_with_sizing(tp: int, kv_dtype: Any, context: int) -> None:
    step = decode_step(
        BEAM, batch=6, context=context, rates=GB200, layout=Layout(tp=tp), kv_dtype=kv_dtype
    )
    read = sum(step.operation(f"attention_{kind}").kv_bytes for kind in ("full", "sliding"))
    sizing = size_kv(BEAM, context=context, sequences=6, tp=tp, kv_dtype=kv_dtype)
    assert read == sizing.per_gpu("ideal").total
    width = 2 if kv_dtype == "bf16" else 1
    assert step.operation("kv_write").kv_bytes == 6 * 52 * 2 * 128 * max(1, 8 // tp) * width
    assert step.kv_bytes == read + step.operation("kv_write").kv_bytes


def test_verification_reads_each_key_once_for_all_rows() -> None:
    step = verify_step(SMALL, batch=2, context=9, draft_tokens=3, rates=H200)
    token = 2 * 2 * 16 * 2  # keys and values, two heads of 16, BF16
    for name, window in (("attention_full", None), ("attention_sliding", 5)):
        keys = attended(4, 8, window)[0]
        assert step.operation(name).kv_bytes == 2 * 2 * keys * token  # two layers, two sequences
    none = verify_step(SMALL, batch=2, context=9, draft_tokens=0, rates=H200)
    assert none.operations == decode_step(SMALL, batch=2, context=9, rates=H200).operations


def test_activations_by_hand() -> None:
    step = decode_step(SMALL, batch=3, context=9, rates=H200)
    expected = {
        "embedding": 3 * 48 * 2,
        "qkvg_projection": 4 * 3 * 2 * (48 + 128 + 128 + 32 + 32),
        "kv_write": 4 * 3 * 2 * ((128 + 32 + 32) + 128),  # Q, K, V in; Q out, K and V to the cache
        "attention_full": 2 * 3 * 2 * (128 + 128 + 128),  # queries, gate, output
        "attention_sliding": 2 * 3 * 2 * (128 + 128 + 128),
        "o_proj": 4 * 3 * 2 * (128 + 48),
        "dense_mlp": 3 * 2 * (48 + 48),
        "router": 3 * 3 * (2 * 48 + 4 * 8),
        "experts": 3 * 3 * 2 * (48 + 48),
        "head": 3 * 2 * (48 + 128),
        "norms": 3 * 48 * 2 * (2 + 4 * 8),
    }
    assert {op.name: op.activation_bytes for op in step.operations} == expected
    for op in step.operations:
        assert op.work.bytes == op.weight_bytes + op.kv_bytes + op.activation_bytes


# -- precision ------------------------------------------------------------------------------------


def test_nvfp4_weights_are_half_a_byte_everywhere_but_multiplied_where_there_is_arithmetic() -> (
    None
):
    options: dict[str, Any] = {"layout": TP8, "precision": PRECISIONS["nvfp4"]}
    hopper = decode_step(BEAM, batch=8, context=1024, rates=H200, **options).operation("experts")
    blackwell = decode_step(BEAM, batch=8, context=1024, rates=GB200, **options)
    assert (hopper.work.storage, hopper.work.math) == ("nvfp4", "bf16")
    assert blackwell.operation("experts").work.math == "fp4"
    assert blackwell.operation("o_proj").work.math == "bf16"
    assert hopper.weight_bytes == blackwell.operation("experts").weight_bytes
    full = decode_step(BEAM, batch=8, context=1024, rates=H200, layout=TP8).operation("experts")
    assert hopper.weight_bytes / full.weight_bytes == pytest.approx((0.5 + 1 / 16) / 2, rel=1e-4)
    assert hopper.bound.compute_seconds == full.bound.compute_seconds


def test_router_and_attention_arithmetic() -> None:
    step = {
        math: prefill_step(
            BEAM, sequences=1, tokens=8192, rates=H200, layout=TP8, router_math=math
        ).operation("router").bound.compute_seconds
        for math in ("bf16x3", "tf32", "fp32")
    }  # fmt: skip
    assert step["bf16x3"] == pytest.approx(49 * 2 * 8192 * 256 * 5120 / (784e12 / 3))
    assert step["fp32"] == pytest.approx(49 * 2 * 8192 * 256 * 5120 / 66.9e12)
    assert step["bf16x3"] < step["fp32"]
    bf16, fp8 = (
        decode_step(BEAM, batch=1, context=99, rates=GB200, attention_math=math)
        .operation("attention_full").bound.compute_seconds
        for math in ("bf16", "fp8")
    )  # fmt: skip
    assert bf16 == pytest.approx(2 * fp8)


# -- communication --------------------------------------------------------------------------------


def wire(step: StepTime) -> dict[str, float]:
    return {op.name: op.work.wire_bytes for op in step.operations if op.work.wire_bytes}


def test_communication_of_tensor_parallel() -> None:
    step = decode_step(BEAM, batch=4, context=99, rates=GB200, layout=TP8)
    message = 4 * 5120 * 2
    assert step.operation("all_reduce").work.count == 1 + 2 * 52  # embedding, o_proj, MLP
    assert wire(step) == {
        "all_reduce": 105 * 2 * 7 / 8 * message,
        "logits_gather": 7 * 4 * 20480 * 2,  # own slice to seven others
    }
    one_shot = decode_step(
        BEAM, batch=4, context=99, rates=GB200, layout=TP8, all_reduce="one_shot"
    )
    assert wire(one_shot)["all_reduce"] == 105 * 7 * message
    assert step.operation("all_reduce").bound.seconds == wire(step)["all_reduce"] / 900e9
    alone = decode_step(BEAM, batch=4, context=99, rates=GB200, layout=TP8, communication=False)
    assert wire(alone) == {}
    assert [op.work for op in alone.operations] == [
        op.work for op in step.operations if not op.work.wire_bytes
    ]
    assert wire(decode_step(BEAM, batch=4, context=99, rates=GB200)) == {}


@pytest.mark.parametrize(("sent", "width"), [("bf16", 2), ("fp8", 1 + 1 / 32), ("nvfp4", 0.5625)])
def test_all_to_all_by_enumeration(sent: Any, width: float) -> None:
    layout = Layout(dp=4, expert_parallel=True)  # two experts of SMALL a GPU, six sequences each
    step = decode_step(SMALL, batch=24, context=9, rates=GB200, layout=layout, dispatch_dtype=sent)
    copies = [
        len({expert // 2 for expert in chosen} - {own})
        for chosen in combinations(range(8), 3)
        for own in range(4)
    ]
    each = 6 * 48 * sum(copies) / len(copies)
    assert wire(step) == {"all_to_all": pytest.approx(3 * each * (width + 2))}  # three layers


def test_tokens_that_reach_a_gpus_experts_by_enumeration() -> None:
    def experts(layout: Layout) -> float:
        step = decode_step(SMALL, batch=24, context=9, rates=GB200, layout=layout)
        return step.operation("experts").activation_bytes / (3 * 2 * 2 * 48)  # rows in, rows out

    chosen = list(combinations(range(8), 3))
    reach = sum(bool({0, 1} & set(choice)) for choice in chosen) / len(chosen)
    assert experts(Layout(dp=4, expert_parallel=True)) == pytest.approx(24 * reach)
    assert experts(Layout(tp=4, expert_parallel=True)) == pytest.approx(24 * reach)
    assert experts(Layout(tp=2, dp=2, expert_parallel=True)) == pytest.approx(24 * reach)
    assert experts(Layout(tp=2, dp=2)) == 24  # slices of all experts: every group's tokens
    assert experts(Layout(tp=4)) == 24


def test_communication_of_mixed_layouts() -> None:
    rows, row = 8, 48 * 2
    mixed = decode_step(
        SMALL, batch=16, context=9, rates=GB200, layout=Layout(tp=4, dp=2, expert_parallel=True)
    )
    copies = [len(set(chosen) - {own}) for chosen in combinations(range(8), 3) for own in range(8)]
    sends = rows / 4 * row * 2 * sum(copies) / len(copies)
    found = wire(mixed)
    # Embedding, four o_proj and the dense MLP are summed; expert layers exchange and collect.
    assert found["all_reduce"] == 6 * 2 * 3 / 4 * rows * row
    assert found["all_to_all"] == pytest.approx(3 * (sends + 3 / 4 * rows * row))
    sliced = wire(decode_step(SMALL, batch=16, context=9, rates=GB200, layout=Layout(tp=4, dp=2)))
    # 16 rows to all eight GPUs, sums back in eighths, then a group's rows collected by its four.
    assert sliced["gather_scatter"] == 3 * (2 * 7 / 8 * 16 + 3 / 4 * 8) * row
    tp = wire(decode_step(SMALL, batch=16, context=9, rates=GB200, layout=Layout(tp=4)))
    ep = wire(
        decode_step(
            SMALL, batch=16, context=9, rates=GB200, layout=Layout(tp=4, expert_parallel=True)
        )
    )
    assert tp == ep  # every rank has all rows: experts, whole or sliced, end in one sum


def test_the_fullest_group_counts() -> None:
    layout = Layout(dp=4, expert_parallel=True)
    five, eight = (
        decode_step(BEAM, batch=batch, context=999, rates=GB200, layout=layout) for batch in (5, 8)
    )
    assert five.operation("o_proj") == replace(
        eight.operation("o_proj"), share=five.operation("o_proj").share
    )
    assert five.operation("experts").work.bytes < eight.operation("experts").work.bytes
    assert (five.tokens, eight.tokens) == (5, 8)


# -- known figures --------------------------------------------------------------------------------


def test_known_figures_of_one_rank() -> None:
    step = decode_step(BEAM, batch=1, context=4096, rates=H200, layout=TP8, communication=False)
    assert step.weight_bytes == pytest.approx(5.83e9, rel=1e-3)
    assert 1.37e-3 < step.weight_bytes / 4.23e12 < 1.38e-3
    assert 1.38 < step.milliseconds < 1.40
    each = 3 * 5120 * 320 * 2
    for batch, distinct in ((8, 57.4), (32, 163.3), (128, 251.6)):
        found = decode_step(BEAM, batch=batch, context=1024, rates=H200, layout=TP8)
        experts = found.operation("experts").weight_bytes / 49 / each
        assert experts == pytest.approx(distinct, abs=0.05)
    prefill = prefill_step(
        BEAM, sequences=8, tokens=2048, earlier_context=100_000, rates=H200, layout=TP8
    )
    attention = {n: prefill.operation(f"attention_{n}").work.flops for n in ("full", "sliding")}
    # 16,384 rows through 6 of 48 heads; by the middle row, 101,024.5 keys are seen.
    assert attention["full"] == pytest.approx(9 * 4 * 128 * 6 * 16384 * 101_024.5)
    assert attention["full"] == pytest.approx(45e12, rel=0.02)
    assert attention["sliding"] == 43 * 4 * 128 * 6 * 16384 * 512
    assert prefill.flops - sum(attention.values()) == pytest.approx(90e12, rel=0.002)
    # The head for 8 rows only: nothing beside the 2.7 TFLOP that all rows would take.
    assert prefill.operation("head").work.flops == 2 * 8 * 20480 * 5120


# -- the drafter ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_weights_of_a_drafters_pass_tensor_by_tensor(tp: int) -> None:
    total = 0.0
    for tensor in drafter_tensors(DRAFTER):
        size: float = tensor.size
        if "codebook" in tensor.name:
            continue  # looked up, not read
        if tensor.part in ("attention", "mlp"):
            size /= tp
        elif tensor.name.endswith(("q_norm.weight", "k_norm.weight")):
            pass
        total += 2 * size
    total += 2 * 163840 * 5120 / tp  # the target's head
    total += 2 * 24 * 5120 / tp  # 3 x 8 rows of the target's embedding
    step = draft_step(
        BEAM, DRAFTER, batch=3, context=9999, draft_tokens=7, rates=GB200, layout=Layout(tp=tp)
    )
    assert step.weight_bytes == pytest.approx(total)


def test_flops_of_a_drafters_pass_by_hand() -> None:
    step = draft_step(BEAM, DRAFTER, batch=2, context=9999, draft_tokens=7, rates=GB200)
    total = 2.0 * 14 * 163840 * 5120  # the target's head on the 2 x 7 masks
    for tensor in drafter_tensors(DRAFTER):
        if len(tensor.shape) != 2 or "codebook" in tensor.name:
            continue
        rows = 14 if "hidden_projection" in tensor.name else 16
        if tensor.name.endswith(("k_proj.weight", "v_proj.weight")):
            rows += 16  # the target's rows besides the block's
        total += 2 * rows * tensor.size
    assert step.flops - step.operation("draft_attention").work.flops == pytest.approx(total)


@pytest.mark.parametrize("context", [1, 9, 10, 11, 50])
def test_attention_of_a_drafters_block_one_by_one(context: int) -> None:
    small = DRAFTER.replace(sliding_window=12)
    step = draft_step(BEAM, small, batch=2, context=context, draft_tokens=3, rates=GB200)
    end = context + 4
    pairs = [
        (i, j)
        for i in range(context, end)
        for j in range(end)
        if i - 12 < j < i + 12  # symmetric window; the block sees itself whole
    ]
    attention = step.operation("draft_attention")
    assert attention.work.flops == 5 * 2 * len(pairs) * 32 * 4 * 128
    token = 2 * 8 * 128 * 2
    assert attention.kv_bytes == 5 * 2 * len({j for _, j in pairs}) * token
    # Context rows of the tokens just verified, and the block's own.
    assert step.operation("draft_qkv").kv_bytes == 5 * 2 * (4 + 4) * token


def test_a_speculative_step_is_both() -> None:
    options: dict[str, Any] = {"batch": 2, "context": 999, "draft_tokens": 5, "rates": GB200}
    verify = verify_step(BEAM, layout=TP8, **options)
    draft = draft_step(BEAM, DRAFTER, layout=TP8, **options)
    both = speculative_step(BEAM, DRAFTER, layout=TP8, **options)
    assert both.seconds == pytest.approx(verify.seconds + draft.seconds)
    assert both.tokens == verify.tokens == 12
    assert sum(op.share for op in both.operations) == pytest.approx(1)
    assert draft.operation("draft_all_reduce").work.count == 11


# -- sums, order, speed ---------------------------------------------------------------------------


def test_sums_and_shares() -> None:
    step = prefill_step(BEAM, sequences=2, tokens=999, rates=GB200, layout=TP8)
    seconds = [op.bound.seconds for op in step.operations]
    assert step.seconds == pytest.approx(sum(seconds))
    assert step.milliseconds == pytest.approx(1e3 * step.seconds)
    assert [op.share for op in step.operations] == pytest.approx(
        [s / sum(seconds) for s in seconds]
    )
    assert step.memory_seconds == pytest.approx(
        (step.weight_bytes + step.kv_bytes + step.activation_bytes) / 8e12
    )
    assert step.wire_seconds == pytest.approx(step.wire_bytes / 900e9)
    assert step.overlapped_seconds == max(
        step.memory_seconds, step.compute_seconds, step.wire_seconds
    )
    assert step.overlapped_seconds <= step.seconds
    assert step.seconds <= step.memory_seconds + step.compute_seconds + step.wire_seconds
    assert step.tokens_per_second == pytest.approx(1998 / step.seconds)


def rising(values: list[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


LAYOUTS = [Layout(), TP8, Layout(dp=8, expert_parallel=True), Layout(tp=2, dp=4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_more_work_takes_longer(layout: Layout) -> None:
    def decode(**changes: Any) -> float:
        given: dict[str, Any] = {"batch": 16, "context": 4096, "layout": layout, "rates": GB200}
        return decode_step(BEAM, **given | changes).seconds

    assert rising([decode(batch=n) for n in (8, 16, 64, 512, 4096)])
    assert rising([decode(context=n) for n in (1, 100, 512, 513, 10_000, 1_000_000)])
    weights = [decode(precision=PRECISIONS[name]) for name in ("nvfp4", "fp8", "bf16")]
    assert rising(weights)
    assert decode(kv_dtype="fp8") < decode(kv_dtype="bf16")
    assert decode(rates=GB200) < decode(rates=data_sheet_rates("H200")) < decode(rates=H200)
    assert rising([decode(distinct=float(n)) for n in (8, 64, 256)])

    def verify(drafts: int) -> float:
        return verify_step(
            BEAM, batch=8, context=999, draft_tokens=drafts, rates=GB200, layout=layout
        ).seconds

    assert rising([verify(n) for n in (0, 1, 3, 7, 15)])

    def prefill(**changes: Any) -> float:
        given: dict[str, Any] = {"sequences": 8, "tokens": 512, "layout": layout, "rates": GB200}
        return prefill_step(BEAM, **given | changes).seconds

    assert rising([prefill(tokens=n) for n in (1, 100, 512, 4096)])
    assert rising([prefill(earlier_context=n) for n in (0, 100, 600, 100_000)])
    assert prefill(logits=False) < prefill()


def test_a_prompt_in_chunks() -> None:
    layout = Layout(dp=2, expert_parallel=True)
    options: dict[str, Any] = {"rates": GB200, "layout": layout}
    rate, overlapped = prompt_rate(BEAM, prompt=3000, chunk=1000, **options)
    steps = [
        prefill_step(BEAM, sequences=2, tokens=1000, earlier_context=n, logits=n == 2000, **options)
        for n in (0, 1000, 2000)
    ]
    assert rate == pytest.approx(6000 / sum(s.seconds for s in steps))
    assert overlapped == pytest.approx(6000 / sum(s.overlapped_seconds for s in steps))
    # A prompt's pairs are the same in one chunk as in three.
    whole = prefill_step(BEAM, sequences=2, tokens=3000, **options)
    for name in ("attention_full", "attention_sliding"):
        assert whole.operation(name).work.flops == sum(s.operation(name).work.flops for s in steps)


def test_a_model_of_another_shape() -> None:
    for config in (TINY, SMALL.replace(layer_types=("sliding_attention",) * 4)):
        step = decode_step(config, batch=2, context=9, rates=H200)
        names = [op.name for op in step.operations]
        assert ("attention_full" in names) == bool(config.full_layers)
        assert step.seconds > 0
    dense = SMALL.replace(mlp_layer_types=("dense",) * 4)
    for layout in (Layout(), Layout(dp=2), Layout(tp=2)):
        step = decode_step(dense, batch=2, context=9, rates=H200, layout=layout)
        assert not {"router", "experts", "gather_scatter"} & {op.name for op in step.operations}


def test_json_and_text() -> None:
    step = decode_step(BEAM, batch=1, context=4096, rates=H200, layout=TP8)
    value = json.loads(json.dumps(step.to_dict()))
    assert value["source"] == step.source == "modelled"
    assert (value["kind"], value["layout"], value["precision"]) == ("decode", "TP8", "bf16")
    assert value["rates"]["kind"] == "recorded"
    assert value["milliseconds"] == step.milliseconds
    assert [op["name"] for op in value["operations"]] == [op.name for op in step.operations]
    assert sum(op["share"] for op in value["operations"]) == pytest.approx(1)
    lines = repr(step).splitlines()
    assert len(lines) == 2 + len(step.operations)
    assert "1.391 ms modelled" in lines[0]
    assert "H200 at recorded rates" in lines[0]
    assert len({len(line.rsplit("  ", 1)[0]) for line in lines[1:]}) == 1  # columns stand


def test_a_step_takes_less_than_a_millisecond() -> None:
    def fastest(make: Callable[[int], StepTime]) -> float:
        make(1)
        times = []
        for context in range(2, 40):
            start = time.perf_counter()
            make(context)
            times.append(time.perf_counter() - start)
        return min(times)

    assert fastest(lambda n: decode_step(BEAM, batch=n, context=n, rates=GB200, layout=TP8)) < 1e-3
    assert fastest(lambda n: prefill_step(BEAM, sequences=n, tokens=n, rates=GB200)) < 1e-3


# -- bad input ------------------------------------------------------------------------------------


def decode(**changes: Any) -> StepTime:
    given: dict[str, Any] = {"batch": 1, "context": 99, "rates": GB200}
    return decode_step(BEAM, **given | changes)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: decode(batch=0), r"^sequences must be from 1 to 1,048,576, not 0$"),
        (lambda: decode(batch=True), r"^sequences must be from 1"),
        (lambda: decode(context=0), r"^context must be from 1 to 1,048,576 tokens, not 0$"),
        (lambda: decode(context=1_048_577), r"^context must be from 1 to 1,048,576 tokens, not"),
        (lambda: decode(context=9.5), r"^context must be from 1"),
        (lambda: decode(kv_dtype="int4"), r"^unknown KV dtype 'int4'; use one of bf16, fp8$"),
        (lambda: decode(router_math="bf16"), r"^unknown router arithmetic 'bf16'; the router"),
        (lambda: decode(attention_math="fp4", rates=H200), r"^H200 has no fp4 arithmetic"),
        (lambda: decode(dispatch_dtype="fp6"), r"^unknown dispatch dtype 'fp6'; use one of bf16,"),
        (lambda: decode(all_reduce="tree"), r"^unknown all-reduce 'tree'; use one of ring,"),
        (lambda: decode(distinct=257), r"^distinct experts must be from 0 to 256, not 257$"),
        (lambda: decode(distinct=float("nan")), r"^distinct experts must be from 0 to 256, not"),
        (lambda: decode(layout=Layout(tp=5)), r"^tensor parallelism over 5 ranks does not divide"),
        (lambda: decode(layout=Layout(tp=16), rates=H200),
         r"^TP16 takes more GPUs than NVLink connects \(H200: 8\), and the network"),
        (lambda: decode(layout=TP8, rates=Rates(
            label="lone", kind="recorded", bandwidth=1.0, flops={"bf16": 1.0})),
         r"^lone has no NVLink rate, so TP8 cannot be modelled"),
        (lambda: verify_step(BEAM, batch=1, context=9, draft_tokens=-1, rates=GB200),
         r"^draft_tokens must be 0 or more, not -1$"),
        (lambda: verify_step(BEAM, batch=1, context=1_048_576, draft_tokens=1, rates=GB200),
         r"^context must be from 1 to 1,048,576 tokens with 1 drafted after them, not 1,048,576$"),
        (lambda: prefill_step(BEAM, sequences=1, tokens=0, rates=GB200),
         r"^tokens a sequence must be from 1 to"),
        (lambda: prefill_step(BEAM, sequences=1, tokens=9, earlier_context=-1, rates=GB200),
         r"^earlier_context must be 0 or more, not -1$"),
        (lambda: prefill_step(BEAM, sequences=1, tokens=9, earlier_context=1_048_570, rates=GB200),
         r"^context must be from 1 to 1,048,576 tokens, not 1,048,579$"),
        (lambda: draft_step(BEAM, DRAFTER, batch=1, context=9, draft_tokens=0, rates=GB200),
         r"^draft_tokens must be 1 or more, not 0$"),
        (lambda: draft_step(BEAM, DRAFTER, batch=1, context=9, draft_tokens=2048, rates=GB200),
         r"^2048 draft tokens and their anchor do not fit into the drafter's window of 2048"),
        (lambda: draft_step(BEAM, DRAFTER.replace(intermediate_size=4097), batch=1, context=9,
                            draft_tokens=7, rates=GB200, layout=TP8),
         r"does not divide the drafter's intermediate_size"),
        (lambda: prompt_rate(BEAM, prompt=100, chunk=30, rates=GB200),
         r"^chunks of 30 tokens do not divide a prompt of 100; choose a divisor$"),
        (lambda: decode().operation("sampling"), r"^this step has no operation 'sampling'; use"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(SizingError, match=text) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_drafter_of_another_model_is_refused() -> None:
    other: DFlash2Config = DRAFTER.replace(hidden_size=4096)
    with pytest.raises(
        WorkbenchError, match="the drafter's hidden_size is 4096, the target's 5120"
    ):
        draft_step(BEAM, other, batch=1, context=9, draft_tokens=7, rates=GB200)


def test_a_rank_on_its_own_may_be_of_any_layout() -> None:
    step = decode(layout=Layout(tp=16), rates=H200, communication=False)
    assert step.wire_bytes == 0
