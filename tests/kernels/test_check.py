"""Right kernels that are written another way pass, whatever the numbers; and what a check reports.

The kernels here compute in float64 and round where the reference rounds: other sums, other order,
no shared code. A false refusal would make people distrust the gate, so each runs on several seeds.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import oracle, registry
from workbench.kernels.case import Request
from workbench.kernels.catalogue import OPS
from workbench.kernels.check import (
    POISON,
    POISON_INTEGER,
    Verdict,
    _Poison,
    check,
    check_variants,
    judge,
    poison,
    prepare,
    rejudge,
    requests,
)
from workbench.kernels.ops import OPERATIONS, operation
from workbench.kernels.reach import Reach, Spans
from workbench.kernels.shapes import Shapes

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
Kernel = Callable[..., Any]
WRITTEN: dict[str, Kernel] = {}


def another_way(function: Kernel) -> Kernel:
    WRITTEN[function.__name__] = function
    return function


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    power = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) ** 2 / x.shape[-1]
    return (wide * weight.double() / torch.sqrt(power + eps)).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


@another_way
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, weight, eps)


@another_way
def boundary(
    h: Tensor, sublayer: Tensor, post: Tensor, scale: tuple[float, float], after: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    p = norm(sublayer, post, eps)
    part = (p.double() * scale[0]).to(h.dtype), (h.double() * scale[1]).to(h.dtype)
    stream = (part[1].double() + part[0].double()).to(h.dtype)
    return stream, norm(stream, after, eps)


@another_way
def qkvg(x: Tensor, weight: Tensor) -> Tensor:
    halves = x.double().chunk(2, -1), weight.double().chunk(2, -1)
    return sum(a @ b.T for a, b in zip(*halves, strict=True)).to(x.dtype)  # type: ignore[union-attr]


def rotated(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.double().chunk(2, -1)
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


@another_way
def qkv_write(
    packed: Tensor, qk_norm: Tensor, positions: Tensor, rope: Tensor, k_rows: Tensor,
    v_rows: Tensor, rows: Tensor | None, *, heads: int, full: bool, eps: float,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    groups, depth = k_rows.shape[1:]
    q_out = torch.empty(packed.shape[0], heads, depth, dtype=packed.dtype)
    for i in range(packed.shape[0]):
        parts = packed[i].unflatten(0, (-1, depth))
        q, k = norm(parts[:heads], qk_norm[0], eps), norm(parts[heads:][:groups], qk_norm[1], eps)
        v = parts[heads + groups :][:groups]
        if full:
            q = (q.double() * (1 + (int(positions[i]) + 1) / 2048) ** 0.1).to(q.dtype)
        else:
            q, k = (rotated(t, rope[positions[i]]) for t in (q, k))
        q_out[i] = q
        row = i if rows is None else int(rows[i])
        if row >= 0:
            for store, new, scale in ((k_rows, k, k_scale), (v_rows, v, v_scale)):
                if store.dtype == FP8:
                    new = (new.float() / scale).clamp(-448, 448).to(FP8)
                store[row] = new
    return q_out


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query ``[A, D]`` over ``[S, G, D]``, block by block with a running maximum."""
    group = q.shape[0] // k.shape[1]
    q = q.double().unflatten(0, (-1, group)) * q.shape[-1] ** -0.5  # [G, group, D]
    most = torch.full((*q.shape[:2], 1), -math.inf, dtype=torch.float64)
    total, out = torch.zeros_like(most), torch.zeros_like(q)
    for start in range(0, k.shape[0], 100):
        keys, values = (x[start : start + 100].double().transpose(0, 1) for x in (k, v))
        scores = q @ keys.mT
        new = torch.maximum(most, scores.amax(-1, keepdim=True))
        power = torch.exp(scores - new)
        shrink = torch.exp(most - new)
        total = total * shrink + power.sum(-1, keepdim=True)
        out = out * shrink + power @ values
        most = new
    return (out / total).flatten(0, 1)


@another_way
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, reach: Reach, *, k_scale: float = 1.0, v_scale: float = 1.0
) -> Tensor:
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            at = int(reach.first[b]) + t
            low = 0 if reach.window is None else max(0, at - reach.window + 1)
            rows = [p % k.shape[1] for p in range(low, at + 1)]
            keys, values = (x[int(reach.slots[b])].float()[rows] for x in (k, v))
            out[b, t] = attend(q[b, t], keys * k_scale, values * v_scale)
    return out


@another_way
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    out = torch.empty_like(q)
    for b in range(len(spans.q_lengths)):
        q0, k1 = int(spans.q_starts[b]), int(spans.k_starts[b + 1])
        for t in range(spans.q_lengths[b]):
            end = k1 - spans.q_lengths[b] + t + 1
            start = int(spans.k_starts[b])
            if spans.window is not None:
                start = max(start, end - spans.window)
            out[q0 + t] = attend(q[q0 + t], k[start:end], v[start:end])
    return out


@another_way
def output_gate(o: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    inner = (gate.double() + bias.double()[:, None]).to(o.dtype)
    share = (1 / (1 + torch.exp(-inner.double()))).to(o.dtype)
    return (o.double() * share.double()).to(o.dtype)


@another_way
def router(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, n_group: int | None,
    topk_group: int | None, renormalise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scores = 1 / (1 + torch.exp(-(x.double() @ weight.double().T)))
    ids = torch.empty(x.shape[0], top_k, dtype=torch.int64)
    for i, row in enumerate((scores + bias.double()).tolist()):
        open_ = list(range(len(row)))
        if n_group is not None and topk_group is not None:
            size = len(row) // n_group
            rank = {
                g: sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(n_group)
            }  # fmt: skip
            kept = sorted(rank, key=lambda g: -rank[g])[:topk_group]
            open_ = [e for e in open_ if e // size in kept]
        ids[i] = torch.tensor(sorted(open_, key=lambda e: -row[e])[:top_k])
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights.float()


@another_way
def expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, scale: float
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(x.shape[0]):
        for e, w in zip(ids[i].tolist(), weights[i].tolist(), strict=True):
            gate, up = (gate_up[e].double() @ x[i].double()).to(x.dtype).double().chunk(2)
            act = (silu(gate) * up).to(x.dtype)
            out[i] += w * (down[e].double().T @ act.double())
    return (out.to(x.dtype).double() * scale).to(x.dtype)


@another_way
def dense_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x.double() @ gate_up.double().T).to(x.dtype).double().chunk(2, -1)
    return ((silu(gate) * up).to(x.dtype).double() @ down.double().T).to(x.dtype)


@another_way
def softcap(logits: Tensor, cap: float) -> Tensor:
    power = torch.exp(-2 * logits.double().abs() / cap)
    return (cap * logits.double().sign() * (1 - power) / (1 + power)).float()


@another_way
def dynamic_conv(x: Tensor, coefficients: Tensor, base: Tensor, query_len: int) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(x.shape[0]):
        for tap in range(min(base.shape[0], i % query_len + 1)):
            kernel = base[tap].double().unflatten(0, (coefficients.shape[2], -1))
            kernel = kernel + coefficients[i, tap].double()[:, None]
            out[i] += kernel.flatten() * x[i - tap].double()
    return out.to(x.dtype)


@another_way
def conv_residual_norm(
    x: Tensor, coefficients: Tensor, base: Tensor, residual: Tensor, weight: Tensor, eps: float,
    query_len: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    stream = dynamic_conv(x, coefficients, base, query_len).double() + residual.double()
    return stream.to(x.dtype), norm(stream.to(x.dtype), weight, eps)


@another_way
def context_kv_write(
    kv: Tensor, weight: Tensor, positions: Tensor, rope: Tensor, k_rows: Tensor, v_rows: Tensor,
    rows: Tensor, eps: float, *, k_scale: Tensor | None, v_scale: Tensor | None,
) -> None:  # fmt: skip
    for i, row in enumerate(rows.tolist()):
        for layer in range(kv.shape[1] if row >= 0 else 0):
            key = rotated(norm(kv[i, layer, 0], weight[layer], eps), rope[positions[i]])
            for store, new, scale in (
                (k_rows, key, k_scale), (v_rows, kv[i, layer, 1], v_scale)
            ):  # fmt: skip
                if store.dtype == FP8:
                    unit = 1.0 if scale is None else scale[layer]
                    new = (new.float() / unit).clamp(-448, 448).to(FP8)
                store[layer, row] = new


@another_way
def candidate_edges(
    predecessors: Tensor, successors: Tensor, ids: Tensor, unary: Tensor, hidden: Tensor,
    anchors: Tensor,
) -> Tensor:  # fmt: skip
    batch, positions, k = ids.shape
    edges = torch.empty(batch, positions, k, k)
    for b in range(batch):
        for n in range(positions):
            before = ids[b, n - 1] if n else anchors[b].expand(k)
            query = (predecessors[before].double() * hidden[b, n].double()).to(hidden.dtype)
            pair = (query.double() @ successors[ids[b, n]].double().T).to(hidden.dtype)
            edges[b, n] = pair.float() + unary[b, n]
    return edges


@another_way
def selector_walk(
    edges: Tensor, ids: Tensor, temperature: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens, realized = torch.empty_like(ids[..., 0]), torch.empty_like(edges[:, :, 0])
    for b in range(ids.shape[0]):
        slot = 0
        for n in range(ids.shape[1]):
            scores = realized[b, n] = edges[b, n, slot]
            values = scores.double()
            if noise is not None and float(temperature[b]):
                values = values / temperature[b].double() + noise[b, n].double()
            listed = values.tolist()
            slot = listed.index(max(listed))
            tokens[b, n] = ids[b, n, slot]
    return tokens, realized


@pytest.mark.parametrize("op", OPS)
def test_a_right_kernel_written_another_way_passes(op: str, tiny: Shapes) -> None:
    registry.register(op, "mine")(WRITTEN[op])
    slow = op.endswith(("attention", "kv_write", "qkv_write"))
    tokens = (1, 5) if slow else (1, 20)
    for seed in range(3):
        verdict = check(op, "mine", tiny, tokens=tokens, seed=1000 * seed)
        assert verdict.passed, verdict.sentence()
        assert verdict.cases == len(requests(op, tiny, tokens=tokens))


@pytest.mark.parametrize("op", ["rms_norm", "boundary", "qkvg", "output_gate", "dense_mlp"])
def test_a_kernel_that_rounds_less_than_the_reference_passes(op: str, tiny: Shapes) -> None:
    """Float64 inside and one rounding at the end: nobody may be refused for being better."""

    def better(*args: Any) -> Any:
        found = tuple(y.to(args[0].dtype) for y in getattr(oracle, op)(*args).values())
        return found if len(found) > 1 else found[0]

    registry.register(op, "mine")(better)
    for seed in range(4):
        verdict = check(op, "mine", tiny, tokens=(1, 20), seed=1000 * seed)
        assert verdict.passed, verdict.sentence()


def test_attention_may_round_its_probabilities(tiny: Shapes) -> None:
    """As every fused attention does before the product with V."""

    def fused(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
        seen = reach.visible(q.shape[1], k.shape[1])  # [B, T, span]
        keys, values = (
            (x[reach.slots, : reach.span].float() * scales.get(name, 1.0)).to(q.dtype)
            for x, name in ((k, "k_scale"), (v, "v_scale"))
        )
        group = q.shape[2] // k.shape[2]
        keys, values = (x.repeat_interleave(group, 2).float() for x in (keys, values))
        scores = torch.einsum("btad,bsad->btas", q.float(), keys) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen[:, :, None], -math.inf)
        power = torch.exp(scores - scores.amax(-1, keepdim=True))
        out = torch.einsum("btas,bsad->btad", power.to(q.dtype).float(), values)
        return (out / power.sum(-1, keepdim=True)).to(q.dtype)

    registry.register("decode_attention", "mine")(fused)
    for seed in range(2):
        verdict = check("decode_attention", "mine", tiny, tokens=(1, 6), seed=1000 * seed)
        assert verdict.passed, verdict.sentence()


def test_a_passed_verdict_says_how_large_the_errors_were(tiny: Shapes) -> None:
    verdict = check("rms_norm", "torch", tiny)
    assert verdict.passed
    assert verdict.max_error == verdict.own_error
    assert 1.5e-3 < verdict.own_error < 2e-3  # one rounding to bfloat16
    assert verdict.cases == 9
    assert f"passed {verdict.cases} cases" in verdict.sentence()
    told = verdict.to_dict()
    assert told["passed"] is True
    assert told["failed"] == []
    assert "findings" not in told


def test_progress_is_told_case_by_case(tiny: Shapes) -> None:
    told: list[tuple[int, int, str]] = []
    check("rms_norm", "torch", tiny, on_case=lambda *a: told.append(a))
    labels = [r.label for r in requests("rms_norm", tiny)]
    assert told == [*((i, 9, label) for i, label in enumerate(labels)), (9, 9, "")]


def test_the_requests_cover_flavours_dtypes_strides_and_nothing(tiny: Shapes) -> None:
    wanted = requests("qkv_write", tiny, tokens=(1, 7))
    plain = {(r.flavour, r.dtype, r.tokens) for r in wanted if not r.strided}
    for flavour in ("sliding", "full", "sliding fp8", "full fp8"):
        for dtype in (BF16, FP32):
            for n in (1, 7):
                assert (flavour, dtype, n) in plain
    assert {r.flavour for r in wanted if r.strided} == set(OPERATIONS["qkv_write"].flavours)
    assert [r.tokens for r in wanted].count(0) == 1
    assert len({r.seed for r in wanted}) == len(wanted), "fresh numbers in every case"
    again = [r for r in wanted if (r.flavour, r.dtype, r.tokens) == ("sliding", BF16, 1)]
    assert len(again) == 2, "a variant that keeps its last result is asked twice"


def test_flavours_can_be_checked_apart(tiny: Shapes) -> None:
    """A variant that has no form for one kind of input is right or wrong in the others."""
    wanted = requests("decode_attention", tiny, flavours=("full",))
    assert {r.flavour for r in wanted} == {"full"}
    assert sum(r.context is not None for r in wanted) == 1
    wanted = requests("decode_attention", tiny, flavours=("sliding fp8",))
    assert {r.flavour for r in wanted} == {"sliding fp8"}
    assert any(r.extreme for r in wanted)
    assert [r.tokens for r in wanted].count(0) == 1
    assert requests("rms_norm", tiny, flavours=("full",)) == []

    def greedy_only(edges: Tensor, ids: Tensor, temperature: Tensor, noise: Any) -> Any:
        if noise is not None:
            raise KernelError("no noise here")
        return OPERATIONS["selector_walk"].reference(edges, ids, temperature, noise)

    registry.register("selector_walk", "greedy")(greedy_only)
    for flavours, status in ((("",), "passed"), (("sampled",), "raised"), (None, "raised")):
        (verdict,) = check_variants("selector_walk", ["greedy"], tiny, flavours=flavours)
        assert verdict.status == status, verdict.sentence()


def test_undefined_tensors_of_a_list_can_go_back_to_torch() -> None:
    """FlashAttention 3 gives a list of which parts may be undefined. Those come as None where
    fresh memory is marked, and torch takes no None back: an operation that returns what the mode
    returned is then refused by torch itself."""

    def undefined(x: Tensor) -> list[Tensor | None]:
        return [x, None]

    undefined._schema = SimpleNamespace(name="somewhere::undefined")  # type: ignore[attr-defined]
    x = torch.rand(3)
    found = _Poison().__torch_dispatch__(undefined, (), (x,))
    assert found[0] is x
    library = torch.library.Library("workbench_test_undefined", "DEF")
    library.define("give(Tensor x) -> Tensor[]")
    library.impl("give", lambda _: found, "CPU")
    first, second = torch.ops.workbench_test_undefined.give(x)
    assert torch.equal(first, x)
    assert second.numel() == 0
    library.define("give_none(Tensor x) -> Tensor[]")
    library.impl("give_none", undefined, "CPU")
    with pytest.raises(RuntimeError, match="Unable to cast"):
        torch.ops.workbench_test_undefined.give_none(x)


def test_every_other_request_is_extreme_and_of_another_model(tiny: Shapes) -> None:
    wanted = requests("decode_attention", tiny)
    for flavour in OPERATIONS["decode_attention"].flavours:
        own = [r for r in wanted if r.flavour == flavour]
        assert {r.shapes.window for r in own if not r.extreme} == {tiny.window}
        odd = [r for r in own if r.extreme]
        assert {r.dtype for r in odd} == {BF16, FP32}
        assert any(r.tokens == 40 for r in odd)
        assert len({r.shapes.window for r in odd} | {tiny.window}) > 2
        assert len({r.shapes.eps for r in odd} | {tiny.eps}) == len(odd) + 1
    (long,) = [r for r in wanted if r.context is not None]
    assert (long.flavour, long.context, long.tokens) == ("full", 1500, 2)
    assert long.label == "2 tokens, full, after 1500, bfloat16"
    short = replace(tiny, context=64, window=32)
    (long,) = [r for r in requests("prefill_attention", short) if r.context is not None]
    assert long.context == 62


def test_a_router_of_any_number_of_experts(tiny: Shapes) -> None:
    for experts, top_k in ((1, 1), (2, 1), (6, 2), (7, 3), (12, 4), (16, 16)):
        shapes = replace(tiny, experts=experts, top_k=top_k, n_group=None, topk_group=None)
        groups = [r for r in requests("router", shapes) if r.flavour == "groups"]
        assert bool(groups) == ((experts, top_k) in ((6, 2), (12, 4))), experts
        for request in groups:
            how = operation("router").case(request).kwargs
            width = experts // how["n_group"]
            assert width * how["n_group"] == experts
            assert width >= 2
            assert top_k <= width * how["topk_group"] < experts
        verdict = check("router", "torch", shapes)
        assert verdict.passed, verdict.sentence()


def test_what_is_refused_does_not_stay_selected(tiny: Shapes) -> None:
    @registry.register("softcap", "mine")
    def mine(logits: Tensor, cap: float) -> Tensor:
        return logits.float()

    registry.select(softcap="mine", rms_norm="torch")
    assert not check("softcap", "mine", tiny).passed
    assert [(r.op, r.variant) for r in registry.selection()] == [("rms_norm", "torch")]
    check("rms_norm", "torch", tiny)
    assert len(registry.selection()) == 1, "what passes stays"


CHILD = """
import workbench
from workbench.kernels.check import check
from workbench.kernels.shapes import Shapes

shapes = Shapes.of(workbench.resolve("beam-tiny").config)
for variant in ("torch", "triton"):
    print(check("rms_norm", variant, shapes, tokens=(2,)).sentence())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted beside a GPU")
def test_a_check_leaves_triton_to_be_interpreted() -> None:
    """A dispatch mode, and a torch variant that compiles, import Triton as well."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120, check=False
    )
    assert [line.split(" passed")[0] for line in done.stdout.splitlines()] == [
        "torch of rms_norm", "triton of rms_norm",
    ], done.stdout + done.stderr  # fmt: skip


def test_what_cannot_run_here_is_unavailable_and_says_why(tiny: Shapes) -> None:
    asked: list[str] = []

    @registry.register("rms_norm", "mine", requires=(lambda where: "it needs a quantum computer",))
    def mine(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        asked.append("called")
        return x

    verdict = check("rms_norm", "mine", tiny)
    assert (verdict.status, verdict.reason) == ("unavailable", "it needs a quantum computer")
    assert not verdict.passed
    assert verdict.cases == 0
    assert not asked


def test_a_variant_of_one_dtype_is_checked_in_that_one(tiny: Shapes) -> None:
    seen = set()

    def only(where: Any) -> str | None:
        return None if where.dtype == FP32 else "float32 only"

    @registry.register("rms_norm", "mine", requires=(only,))
    def mine(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        seen.add(x.dtype)
        return norm(x, weight, eps)

    verdict = check("rms_norm", "mine", tiny)
    assert verdict.passed
    assert (seen, verdict.cases) == ({FP32}, 3)


def test_several_variants_are_judged_on_the_same_cases(tiny: Shapes) -> None:
    seen: dict[str, list[float]] = {"a": [], "b": []}
    for name, log in seen.items():

        def mine(x: Tensor, weight: Tensor, eps: float, log: list[float] = log) -> Tensor:
            log.append(float(x.double().sum()))
            return norm(x, weight, eps)

        registry.register("rms_norm", name)(mine)
    found = list(check_variants("rms_norm", ["a", "b"], tiny))
    assert [v.variant for v in found] == ["a", "b"]
    assert seen["a"] == seen["b"]
    assert len(set(seen["a"])) > 7


def test_unknown_names_are_sentences(tiny: Shapes) -> None:
    with pytest.raises(KernelError, match=r"no operation 'norm'.*rms_norm"):
        check("norm", "torch", tiny)
    with pytest.raises(KernelError, match=r"no variant 'cuda' of rms_norm; there are torch"):
        check("rms_norm", "cuda", tiny)
    with pytest.raises(KernelError, match="no flavour 'fp4'"):
        operation("qkv_write").case(Request(shapes=tiny, tokens=1, flavour="fp4"))
    with pytest.raises(KernelError, match="0 or more, not -1"):
        operation("rms_norm").case(Request(shapes=tiny, tokens=-1))


def test_outputs_of_a_timed_loop_are_judged_again(tiny: Shapes) -> None:
    op = operation("rms_norm")
    prepared = prepare(op, Request(shapes=tiny, tokens=8))
    right = prepared.case.call(op.reference)
    assert all(f.passed for f in rejudge(op, prepared, right))
    wrong = {"y": right["y"].clone()}
    wrong["y"][3] = 0
    failed = [f for f in rejudge(op, prepared, wrong) if not f.passed]
    assert [f.gate for f in failed] == ["relative error"]


@pytest.mark.parametrize("make", ["empty", "empty_like", "new_empty", "empty_strided"])
def test_fresh_memory_is_poisoned_inside_a_check_only(make: str, tiny: Shapes) -> None:
    held: list[Tensor] = []

    def mine(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        held.append(
            {
                "empty": lambda: torch.empty(x.shape, dtype=x.dtype),
                "empty_like": lambda: torch.empty_like(x),
                "new_empty": lambda: x.new_empty(x.shape),
                "empty_strided": lambda: torch.empty_strided(x.shape, (300, 1), dtype=x.dtype),
            }[make]().clone()
        )
        return norm(x, weight, eps)

    op = operation("rms_norm")
    prepared = prepare(op, Request(shapes=tiny, tokens=2))
    assert all(f.passed for f in judge(op, prepared, mine))
    assert bool((held[0] == POISON).all())
    list(judge(op, prepared, mine, poisoned=False))
    torch.empty(4)  # the mode is gone
    assert float(torch.tensor(POISON, dtype=BF16)) == POISON, "bfloat16 holds it"
    whole = torch.zeros(3, dtype=torch.int64)
    poison(whole)
    assert whole.tolist() == [POISON_INTEGER] * 3


def test_a_verdict_of_a_failure_keeps_the_numbers(tiny: Shapes) -> None:
    @registry.register("rms_norm", "mine")
    def mine(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x, weight, eps) * 1.5

    verdict: Verdict = check("rms_norm", "mine", tiny)
    (failed,) = verdict.to_dict()["failed"]
    assert failed["gate"] == verdict.gate == "relative error"
    assert failed["found"] == pytest.approx(0.5, rel=0.02)
    assert failed["limit"] < 0.003
    assert verdict.max_error == failed["found"]
    assert "1 token, bfloat16, y: 0.5" in verdict.reason
