"""Bytes and FLOPs against the tensors themselves: what is needed is counted by brute force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.kernels.case import Case, Request
from workbench.kernels.catalogue import OPS
from workbench.kernels.ops import OPERATIONS
from workbench.kernels.shapes import Shapes

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP32 = torch.bfloat16, torch.float32


def sized(x: Tensor) -> int:
    return x.numel() * x.element_size()


def outputs(case: Case) -> dict[str, Tensor]:
    return case.call(OPERATIONS[case.op].reference)


def case_of(
    op: str, shapes: Shapes, tokens: int, dtype: torch.dtype, flavour: str, **how: Any
) -> Case:
    request = Request(shapes=shapes, tokens=tokens, dtype=dtype, flavour=flavour, **how)
    return OPERATIONS[op].case(request)


def tensors(*found: Any) -> int:
    return sum(sized(x) for x in found)


def rope_rows(case: Case, positions: Tensor, rope: Tensor) -> int:
    return 0 if case.kwargs.get("full") else len(positions) * rope.shape[1] * rope.element_size()


def visible(case: Case) -> tuple[set[tuple[int, int]], int]:
    """(every (slot, position) that is seen, pairs of query and key), by enumeration."""
    q, _, _, at = case.args
    seen: set[tuple[int, int]] = set()
    pairs = 0
    if case.op == "decode_attention":
        for b in range(q.shape[0]):
            for t in range(q.shape[1]):
                here = int(at.first[b]) + t
                for p in range(here + 1):
                    if at.window is None or here - p < at.window:
                        seen.add((b, p))
                        pairs += 1
        return seen, pairs
    for b, (queries, keys) in enumerate(zip(at.q_lengths, at.k_lengths, strict=True)):
        seen |= {(b, p) for p in range(keys)}  # all are read: they are the arguments
        for t in range(queries):
            here = keys - queries + t
            pairs += sum(1 for p in range(here + 1) if at.window is None or here - p < at.window)
    return seen, pairs


def needed(case: Case) -> float:
    """Bytes of every operand that is needed, once, and of every output."""
    a, out = case.args, outputs(case)
    gone = tensors(*out.values())
    match case.op:
        case "qkv_write":
            packed, _, positions, rope, k, _, rows = a
            q_and_kv = packed[:, : out["q"].shape[1] * out["q"].shape[2] + 2 * k[0].numel()]
            # The work is that of n tokens that are all written, which is what a step does.
            cache = 2 * len(positions) * k[0].numel() * k.element_size()
            positions_rows = tensors(*(x for x in (positions, rows) if x is not None))
            return (
                sized(q_and_kv) + sized(out["q"]) + cache + rope_rows(case, positions, rope)
                + positions_rows
            )  # fmt: skip
        case "context_kv_write":
            kv, _, positions, rope, k, _, rows, _ = a
            cache = 2 * len(rows) * k[:, 0].numel() * k.element_size()
            return sized(kv) + cache + rope_rows(case, positions, rope) + tensors(positions, rows)
        case "decode_attention" | "prefill_attention":
            q, k = a[0], a[1]
            row = k[0, 0].numel() if case.op == "decode_attention" else k[0].numel()
            return 2 * len(visible(case)[0]) * row * k.element_size() + sized(q) + gone
        case "output_gate":
            return tensors(a[0], a[1], a[2]) + gone
        case "expert_mlp":
            x, gate_up, down, ids, weights, _ = a
            each = sized(gate_up[0]) + sized(down[0])
            return len(ids.unique()) * each + tensors(x, ids, weights) + gone
        case "candidate_edges":
            predecessors, _, ids, unary, hidden, _ = a
            width = predecessors.shape[1] * predecessors.element_size()
            # The K candidates of each position are distinct; the last has no successor position.
            before = ids.shape[0] * (1 + (ids.shape[1] - 1) * ids.shape[2])
            return (ids.numel() + before) * width + tensors(ids, unary, hidden) + gone
        case "selector_walk":
            edges, ids, _, noise = a
            row = ids.shape[0] * ids.shape[1] * ids.shape[2] * edges.element_size()
            return row + sized(ids) + (0 if noise is None else sized(noise)) + gone
        case _:
            return tensors(*(x for x in a if isinstance(x, Tensor))) + gone


CASES = [(op, flavour) for op in OPS for flavour in OPERATIONS[op].flavours]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("tokens", [1, 8, 24])
@pytest.mark.parametrize(("op", "flavour"), CASES)
def test_bytes(op: str, flavour: str, tokens: int, dtype: torch.dtype, tiny: Shapes) -> None:
    case = case_of(op, tiny, tokens, dtype, flavour)
    # Weights of norms, scales and the like, a few hundred bytes, may be counted or not.
    small = 4 * max(tiny.hidden, tiny.head_dim * tiny.draft_layers, tiny.experts)
    assert case.work.bytes == pytest.approx(needed(case), abs=small, rel=1e-9)


@pytest.mark.parametrize(("op", "flavour"), CASES)
def test_nothing_is_no_work(op: str, flavour: str, tiny: Shapes) -> None:
    work = case_of(op, tiny, 0, BF16, flavour).work
    assert work.flops == 0
    # The weights of norms, of a kilobyte, are left in.
    assert work.bytes <= 4 * tiny.hidden * 4


@pytest.mark.parametrize("flavour", OPERATIONS["decode_attention"].flavours)
@pytest.mark.parametrize("tokens", [1, 8, 24])
def test_flops_of_decode_attention(flavour: str, tokens: int, tiny: Shapes) -> None:
    for extreme in (False, True):  # with a sequence that has just begun
        case = case_of("decode_attention", tiny, tokens, BF16, flavour, extreme=extreme)
        q = case.args[0]
        assert case.work.flops == 4 * visible(case)[1] * q.shape[2] * q.shape[3]
        assert case.work.bytes == needed(case)


@pytest.mark.parametrize("flavour", OPERATIONS["prefill_attention"].flavours)
@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_flops_of_prefill_attention(flavour: str, tokens: int, tiny: Shapes) -> None:
    case = case_of("prefill_attention", tiny, tokens, BF16, flavour)
    q = case.args[0]
    assert case.work.flops == 4 * visible(case)[1] * q.shape[1] * q.shape[2]


@pytest.mark.parametrize("tokens", [1, 8])
def test_flops_of_products(tokens: int, tiny: Shapes) -> None:
    """As torch itself counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    for op in ("qkvg", "dense_mlp", "router"):
        case = case_of(op, tiny, tokens, BF16, "")
        with FlopCounterMode(display=False) as counter:
            outputs(case)
        assert case.work.flops == counter.get_total_flops(), op
    case = case_of("expert_mlp", tiny, 40, BF16, "")
    with FlopCounterMode(display=False) as counter:
        outputs(case)  # the grouped form: the chosen experts only
    assert case.work.flops == counter.get_total_flops()


def test_a_float8_cache_halves_what_attention_reads(tiny: Shapes) -> None:
    plain = case_of("decode_attention", tiny, 8, BF16, "full").work
    eight = case_of("decode_attention", tiny, 8, BF16, "full fp8").work
    q_and_o = 2 * 8 * tiny.heads * tiny.head_dim * 2
    assert eight.bytes - q_and_o == (plain.bytes - q_and_o) / 2
    assert eight.flops == plain.flops


def test_the_kind_of_arithmetic(tiny: Shapes) -> None:
    for op in OPS:
        math = case_of(op, tiny, 1, BF16, OPERATIONS[op].flavours[0]).work.math
        products = ("qkvg", "dense_mlp", "expert_mlp", "decode_attention", "prefill_attention")
        assert math == ("bf16" if op in products else "bf16x3" if op == "router" else "fp32"), op
        assert case_of(op, tiny, 1, FP32, OPERATIONS[op].flavours[0]).work.math == "fp32"
