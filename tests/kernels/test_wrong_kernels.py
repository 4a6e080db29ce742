"""Every way of being wrong that we could think of is refused, by the gate that names it.

A mutant is the torch reference with one mistake. What is asserted is the name of the gate, since a
refusal that does not say why helps nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.kernels import reference, registry
from workbench.kernels.catalogue import OPS
from workbench.kernels.check import Verdict, check, check_variants
from workbench.kernels.ops import OPERATIONS
from workbench.kernels.reach import Reach, Spans
from workbench.kernels.shapes import Shapes

pytestmark = pytest.mark.usefixtures("one_thread")

Kernel = Callable[..., Any]
Judge = Callable[..., Verdict]
BF16, FP32 = torch.bfloat16, torch.float32
RETURNING = [op for op in OPS if op != "context_kv_write"]  # that one only writes


def changed(op: str, change: Callable[[Tensor], Any]) -> Kernel:
    """The reference of ``op``, every tensor that it returns changed."""
    right = OPERATIONS[op].reference

    def mutant(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        return tuple(map(change, result)) if isinstance(result, tuple) else change(result)

    return mutant


def refused(verdict: Verdict, *gates: str) -> None:
    assert verdict.status == "refused", verdict.sentence()
    assert verdict.gate in gates, verdict.sentence()
    assert repr(verdict.gate) in verdict.sentence()
    assert not verdict.passed
    failed = verdict.to_dict()["failed"]
    assert [f["gate"] for f in failed] == [verdict.gate], "stops at the first gate that fails"


# -- mistakes that any operation can make -------------------------------------------------------


@pytest.mark.parametrize("op", RETURNING)
def test_zeros(op: str, verdict_of: Judge) -> None:
    gate = {"router": "experts differ", "selector_walk": "choice"}.get(op, "relative error")
    refused(verdict_of(op, changed(op, torch.zeros_like)), gate)


@pytest.mark.parametrize("op", RETURNING)
def test_an_output_that_is_never_written(op: str, verdict_of: Judge) -> None:
    refused(verdict_of(op, changed(op, torch.empty_like)), "unwritten")


@pytest.mark.parametrize("op", RETURNING)
def test_a_tail_that_is_skipped(op: str, verdict_of: Judge) -> None:
    def skip(y: Tensor) -> Tensor:
        out = torch.empty_like(y)
        out[..., :-1] = y[..., :-1]
        return out

    refused(verdict_of(op, changed(op, skip)), "unwritten")


@pytest.mark.parametrize("op", RETURNING)
def test_one_row_that_is_skipped(op: str, verdict_of: Judge) -> None:
    def skip(y: Tensor) -> Tensor:
        out = torch.empty_like(y)
        out[:-1] = y[:-1]
        return out

    refused(verdict_of(op, changed(op, skip)), "unwritten")


@pytest.mark.parametrize("op", RETURNING)
def test_a_tail_of_zeros(op: str, verdict_of: Judge) -> None:
    """Memory that happened to be zero hides from "unwritten", but not from the numbers."""

    def zero(y: Tensor) -> Tensor:
        out = torch.zeros_like(y)
        out[..., :-1] = y[..., :-1]
        return out

    gates = {"router": ("experts differ", "choice"), "selector_walk": ("choice",)}
    refused(
        verdict_of(op, changed(op, zero)),
        *gates.get(op, ("relative error", "worst row", "worst element")),
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("op", RETURNING)
def test_one_number_that_is_not_finite(op: str, value: float, verdict_of: Judge) -> None:
    def spoil(y: Tensor) -> Tensor:
        y = y.clone()
        if y.is_floating_point() and y.numel():
            y.view(-1)[y.numel() // 2] = value
        return y

    refused(verdict_of(op, changed(op, spoil)), "finite")


@pytest.mark.parametrize("op", RETURNING)
def test_a_wrong_shape(op: str, verdict_of: Judge) -> None:
    refused(verdict_of(op, changed(op, lambda y: y[None])), "shape")
    refused(verdict_of(op, changed(op, lambda y: y[..., :-1])), "shape")


@pytest.mark.parametrize("op", RETURNING)
def test_a_wrong_dtype(op: str, verdict_of: Judge) -> None:
    other = {torch.int64: torch.int32}
    refused(verdict_of(op, changed(op, lambda y: y.to(other.get(y.dtype, torch.float64)))), "dtype")


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_number_of_results(op: str, verdict_of: Judge) -> None:
    right = OPERATIONS[op].reference

    def more(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        return (*(found if isinstance(found, tuple) else (found,)), args[0])

    verdict = verdict_of(op, more)
    assert (verdict.status, verdict.gate) == ("raised", "result")
    assert op in verdict.reason


@pytest.mark.parametrize("op", RETURNING)
@pytest.mark.parametrize("result", [None, 7, "text", {"y": 1}])
def test_no_tensors(op: str, result: Any, verdict_of: Judge) -> None:
    verdict = verdict_of(op, lambda *a, **k: result)
    assert (verdict.status, verdict.gate) == ("raised", "result")
    assert ("None" if result is None else type(result).__name__) in verdict.reason


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_that_raises(op: str, verdict_of: Judge) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("no\nsecond line")

    verdict = verdict_of(op, broken)
    assert verdict.status == "raised"
    assert "ZeroDivisionError: no" in verdict.reason
    assert "second line" not in verdict.reason
    assert verdict.cases == 1


@pytest.mark.parametrize("op", RETURNING)
def test_a_result_of_an_earlier_call(op: str, verdict_of: Judge) -> None:
    """The first request is asked again with other numbers."""
    right, kept = OPERATIONS[op].reference, {}

    def lazy(*args: Any, **kwargs: Any) -> Any:
        key = (args[0].shape, args[0].dtype, kwargs.get("full"))
        args = tuple(a for a in args if a is not None)
        if key not in kept:
            kept[key] = right(*args, **kwargs)
        return kept[key]

    if op == "selector_walk":  # its noise is None in the first flavour, and a cache ignores it

        def lazy(*args: Any, **kwargs: Any) -> Any:
            return kept.setdefault(args[0].shape, right(*args))

    verdict = verdict_of(op, lazy)
    assert verdict.status == "refused", verdict.sentence()
    gates = ("relative error", "choice", "weights", "experts differ")
    assert verdict.gate in gates, verdict.sentence()


@pytest.mark.parametrize("op", OPS)
def test_an_input_that_is_changed(op: str, verdict_of: Judge) -> None:
    right = OPERATIONS[op].reference

    def spoil(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        args[0].neg_()
        return result

    verdict = verdict_of(op, spoil)
    refused(verdict, "inputs")
    assert "argument 0" in verdict.reason


def test_an_input_whose_rows_are_swapped(verdict_of: Judge) -> None:
    def spoil(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = reference.rms_norm(x, weight, eps)
        x.copy_(x.flip(0))
        return y

    refused(verdict_of("rms_norm", spoil), "inputs")


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("router", "selector_walk")])
def test_one_row_of_another_token(op: str, verdict_of: Judge) -> None:
    """An off-by-one in the row index: right numbers in the wrong place."""
    if op == "context_kv_write":
        right = OPERATIONS[op].reference

        def shift(kv: Tensor, *args: Any, **kwargs: Any) -> None:
            right(kv.roll(1, 0), *args, **kwargs)

        refused(verdict_of(op, shift), "relative error")
    else:
        refused(verdict_of(op, changed(op, lambda y: y.roll(1, -1))), "relative error")


STRIDED = [op for op in OPS if op != "selector_walk"]  # none of its arguments has strided rows


@pytest.mark.parametrize("op", STRIDED)
def test_strided_rows_read_as_contiguous(op: str, verdict_of: Judge) -> None:
    right = OPERATIONS[op].reference
    place = 4 if op == "candidate_edges" else 0

    def mutant(*args: Any, **kwargs: Any) -> Any:
        args_ = list(args)
        x = args_[place]
        plain = torch.empty(x.shape, device="meta").stride()
        args_[place] = x.as_strided(x.shape, plain, x.storage_offset())
        return right(*args_, **kwargs)

    verdict = verdict_of(op, mutant)
    gates = ("relative error", "worst row", "worst element", "choice", "weights")
    refused(verdict, *gates)
    assert "strided" in verdict.reason, "every other case is contiguous"


# -- mistakes of one operation ------------------------------------------------------------------


def twice(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An RMSNorm that rounds before the weight and after it."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


@pytest.mark.parametrize("seed", range(5))
def test_a_norm_that_rounds_twice(seed: int, verdict_of: Judge) -> None:
    refused(verdict_of("rms_norm", twice, seed=1000 * seed), "relative error")


@pytest.mark.parametrize("seed", range(5))
def test_a_boundary_whose_second_norm_rounds_twice(seed: int, verdict_of: Judge) -> None:
    """Beside the roundings of the stream it is too little to show against the whole oracle."""

    def mutant(h, sublayer, post_weight, scale, next_weight, eps):  # type: ignore[no-untyped-def]
        h, _ = reference.boundary(h, sublayer, post_weight, scale, next_weight, eps)
        return h, twice(h, next_weight, eps)

    verdict = verdict_of("boundary", mutant, seed=1000 * seed, tokens=(7, 8))
    refused(verdict, "second norm")


def test_a_finished_sublayer_whose_norm_rounds_twice(verdict_of: Judge) -> None:
    def mutant(x, coefficients, base, residual, weight, eps, query_len):  # type: ignore[no-untyped-def]
        right = OPERATIONS["conv_residual_norm"].reference
        h, _ = right(x, coefficients, base, residual, weight, eps, query_len)
        return h, twice(h, weight, eps)

    refused(verdict_of("conv_residual_norm", mutant), "second norm")


def test_a_boundary_that_swaps_the_factors_or_forgets_the_post_norm(verdict_of: Judge) -> None:
    def swapped(h, sublayer, post_weight, scale, next_weight, eps):  # type: ignore[no-untyped-def]
        return reference.boundary(h, sublayer, post_weight, scale[::-1], next_weight, eps)

    def bare(h, sublayer, post_weight, scale, next_weight, eps):  # type: ignore[no-untyped-def]
        h = sublayer * scale[0] + h * scale[1]
        return h, reference.rms_norm(h, next_weight, eps)

    refused(verdict_of("boundary", swapped), "relative error")
    refused(verdict_of("boundary", bare), "relative error")


def reach_of(reach: Reach, window: int | None = None, later: int = 0) -> Reach:
    return Reach(
        reach.slots,
        reach.first + later,
        span=reach.span,
        window=window if window is not None else reach.window,
        view=reach.view,
    )


@pytest.mark.parametrize("by", [-1, 1])
def test_a_decode_window_that_is_off_by_one(by: int, verdict_of: Judge) -> None:
    def mutant(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
        if reach.window is not None:
            reach = reach_of(reach, reach.window + by)
        return reference.decode_attention(q, k, v, reach, **scales)

    verdict = verdict_of("decode_attention", mutant)
    refused(verdict, "relative error")
    assert "sliding" in verdict.reason


@pytest.mark.parametrize("by", [-1, 1])
def test_decode_positions_that_are_off_by_one(by: int, verdict_of: Judge) -> None:
    """One later: a key that is not there yet; one earlier: not its own."""

    def mutant(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
        if reach.window is None:
            reach = reach_of(reach, later=by)
            reach.span += by
        return reference.decode_attention(q, k, v, reach, **scales)

    verdict = verdict_of("decode_attention", mutant)
    refused(verdict, "relative error")
    assert "full" in verdict.reason


def test_a_verify_step_that_lets_every_token_see_the_last_one(verdict_of: Judge) -> None:
    def mutant(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
        tokens = q.shape[1]
        if tokens > 1 and reach.window is None:
            last = Reach(
                reach.slots.repeat_interleave(tokens),
                (reach.first + tokens - 1).repeat_interleave(tokens),
                span=reach.span,
                window=None,
            )
            flat = q.flatten(0, 1)[:, None]
            return reference.decode_attention(flat, k, v, last, **scales).view(q.shape)
        return reference.decode_attention(q, k, v, reach, **scales)

    verdict = verdict_of("decode_attention", mutant)
    refused(verdict, "relative error")
    assert "full verify" in verdict.reason


@pytest.mark.parametrize("by", [-1, 1])
def test_a_prefill_window_that_is_off_by_one(by: int, verdict_of: Judge) -> None:
    def mutant(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        if spans.window is not None:
            spans = Spans(spans.q_lengths, spans.k_lengths, spans.window + by)
        return reference.prefill_attention(q, k, v, spans)

    refused(verdict_of("prefill_attention", mutant), "relative error", "worst row")


@pytest.mark.parametrize("flavour", ["full ragged", "sliding ragged"])
def test_a_prefill_whose_past_is_at_the_wrong_end(flavour: str, tiny: Shapes) -> None:
    """Top-left instead of bottom-right alignment: the queries taken for the first positions."""

    def mutant(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        parts = zip(
            q.split(spans.q_lengths), k.split(spans.k_lengths), v.split(spans.k_lengths),
            strict=True,
        )  # fmt: skip
        out = []
        for a, b, c in parts:
            n = a.shape[0]
            whole = Spans([n], [n], spans.window)
            out.append(reference.prefill_attention(a, b[:n], c[:n], whole))
        return torch.cat(out)

    registry.register("prefill_attention", "mine")(mutant)
    refused(check("prefill_attention", "mine", tiny), "relative error")


def test_heads_that_are_grouped_the_wrong_way(verdict_of: Judge) -> None:
    """Query head a belongs to KV head a // (A / G), not a % G."""

    def decode(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
        order = torch.arange(q.shape[2]).view(k.shape[2], -1).T.flatten()
        o = reference.decode_attention(q[:, :, order.argsort()], k, v, reach, **scales)
        return o[:, :, order]

    def prefill(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        order = torch.arange(q.shape[1]).view(k.shape[1], -1).T.flatten()
        return reference.prefill_attention(q[:, order.argsort()], k, v, spans)[:, order]

    refused(verdict_of("decode_attention", decode), "relative error")
    refused(verdict_of("prefill_attention", prefill), "relative error")


def test_a_float8_cache_read_without_its_scales(verdict_of: Judge) -> None:
    def no_k(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
        return reference.decode_attention(q, k, v, reach, v_scale=scales.get("v_scale", 1.0))

    def no_v(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
        return reference.decode_attention(q, k, v, reach, k_scale=scales.get("k_scale", 1.0))

    for mutant in (no_k, no_v):
        verdict = verdict_of("decode_attention", mutant)
        refused(verdict, "relative error")
        assert "fp8" in verdict.reason


def qkv_mutant(**changes: Any) -> Kernel:
    def mutant(*args: Any, **kwargs: Any) -> Tensor:
        return reference.qkv_write(*args, **{**kwargs, **changes})

    return mutant


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_float8_cache_written_without_its_scales(name: str, verdict_of: Judge) -> None:
    verdict = verdict_of("qkv_write", qkv_mutant(**{name: 1.0}))
    refused(verdict, "relative error")
    assert "fp8" in verdict.reason
    assert f", {name[0]}: " in verdict.reason


def packed_parts(packed: Tensor, heads: int, kv_heads: int, depth: int) -> tuple[Tensor, ...]:
    x = packed.unflatten(-1, (-1, depth))
    return x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :][:, :kv_heads]


def pairs(x: Tensor, positions: Tensor, rope: Tensor) -> Tensor:
    """RoPE of neighbouring channels, which is another model's."""
    cos, sin = rope[positions][:, None].chunk(2, -1)
    a, b = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def test_rope_of_neighbouring_channels(verdict_of: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(*args: Any, **kwargs: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(reference, "apply_rope", pairs)
            return reference.qkv_write(*args, **kwargs)

    verdict = verdict_of("qkv_write", mutant)
    refused(verdict, "relative error")
    assert "sliding" in verdict.reason


def test_rope_that_turns_the_other_way(verdict_of: Judge) -> None:
    def mutant(packed: Tensor, norm: Tensor, at: Tensor, rope: Tensor, *rest: Any, **how: Any):  # type: ignore[no-untyped-def]
        half = rope.shape[1] // 2
        turned = torch.cat((rope[:, :half], -rope[:, half:]), -1)
        return reference.qkv_write(packed, norm, at, turned, *rest, **how)

    refused(verdict_of("qkv_write", mutant), "relative error")


def test_positions_that_are_off_by_one(verdict_of: Judge) -> None:
    def mutant(packed: Tensor, norm: Tensor, at: Tensor, *rest: Any, **how: Any) -> Tensor:
        return reference.qkv_write(packed, norm, (at - 1).clamp_min(0), *rest, **how)

    verdict = verdict_of("qkv_write", mutant)
    refused(verdict, "relative error")
    assert "sliding" in verdict.reason


def test_ssmax_on_the_keys(verdict_of: Judge) -> None:
    def mutant(packed, norm, at, rope, k_rows, v_rows, rows, *, full, **how):  # type: ignore[no-untyped-def]
        q = reference.qkv_write(packed, norm, at, rope, k_rows, v_rows, rows, full=full, **how)
        if full and rows.numel():
            factor = reference.ssmax_scale(at)[rows >= 0]
            wanted = rows[rows >= 0]
            k_rows[wanted] = (k_rows[wanted].float() * factor).to(k_rows.dtype)
        return q

    verdict = verdict_of("qkv_write", mutant)
    refused(verdict, "relative error")
    assert "full" in verdict.reason
    assert ", k: " in verdict.reason


def test_full_layers_that_forget_ssmax_or_rotate(verdict_of: Judge) -> None:
    def forgets(packed, norm, at, *rest: Any, full: bool, **how: Any):  # type: ignore[no-untyped-def]
        return reference.qkv_write(packed, norm, at * (not full), *rest, full=full, **how)

    verdict = verdict_of("qkv_write", forgets)
    refused(verdict, "relative error")
    assert "full" in verdict.reason
    refused(verdict_of("qkv_write", qkv_mutant(full=False)), "relative error")
    refused(verdict_of("qkv_write", qkv_mutant(full=True)), "relative error")


@pytest.mark.parametrize("op", ["qkv_write", "context_kv_write"])
def test_a_row_that_belongs_to_nobody(op: str, verdict_of: Judge) -> None:
    """Row -1 taken as the last row, as an index in Python is."""
    right = OPERATIONS[op].reference
    place, dim = (6, 0) if op == "qkv_write" else (6, 1)

    def mutant(*args: Any, **kwargs: Any) -> Any:
        args_ = list(args)
        last = args[4].shape[dim] - 1
        args_[place] = torch.where(args[place] < 0, last, args[place])
        return right(*args_, **kwargs)

    def beyond(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        spare = sorted(set(range(args[4].shape[dim])) - set(args[place].tolist()))[0]
        args[5].select(dim, spare).zero_()
        return result

    refused(verdict_of(op, mutant), "untouched", "relative error", "worst row")
    verdict = verdict_of(op, beyond)
    refused(verdict, "untouched")
    assert ", v: " in verdict.reason


@pytest.mark.parametrize("op", ["qkv_write", "context_kv_write"])
def test_a_cache_row_that_is_not_written(op: str, verdict_of: Judge) -> None:
    right = OPERATIONS[op].reference

    def mutant(*args: Any, **kwargs: Any) -> Any:
        args_ = list(args)
        rows = args_[6].clone()
        rows[-1:] = -1
        args_[6] = rows
        return right(*args_, **kwargs)

    def neither(*args: Any, **kwargs: Any) -> Any:
        args_ = list(args)
        args_[4], args_[5] = args[4].clone(), args[5].clone()
        return right(*args_, **kwargs)

    refused(verdict_of(op, mutant), "relative error")
    refused(verdict_of(op, neither), "relative error")


def router_mutant(change: Callable[..., tuple[Tensor, Tensor]]) -> Kernel:
    def mutant(x: Tensor, weight: Tensor, bias: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        return change(reference.router_scores(x, weight), bias, **how)

    return mutant


def test_the_biased_score_as_the_weight(verdict_of: Judge) -> None:
    def biased(scores: Tensor, bias: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        ids, _ = reference.route(scores, bias, **how)
        weights = (scores + bias).gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True)

    refused(verdict_of("router", router_mutant(biased)), "weights")


def test_a_choice_without_the_bias(verdict_of: Judge) -> None:
    def unbiased(scores: Tensor, bias: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        return reference.route(scores, torch.zeros_like(bias), **how)

    refused(verdict_of("router", router_mutant(unbiased)), "choice")


def test_weights_that_are_not_renormalised(verdict_of: Judge) -> None:
    def raw(scores: Tensor, bias: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        return reference.route(scores, bias, **{**how, "renormalise": False})

    refused(verdict_of("router", router_mutant(raw)), "weights")


def test_groups_that_are_ignored_or_ranked_by_one_expert(verdict_of: Judge) -> None:
    def ignored(scores: Tensor, bias: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        return reference.route(scores, bias, **{**how, "n_group": None, "topk_group": None})

    def by_one(scores, bias, top_k, n_group, topk_group, renormalise):  # type: ignore[no-untyped-def]
        if n_group in (None, 1):
            return reference.route(scores, bias, top_k, n_group, topk_group, renormalise)
        groups = (scores + bias).unflatten(-1, (n_group, -1))
        kept = groups.amax(-1).topk(topk_group, -1).indices
        mask = torch.ones(groups.shape[:-1], dtype=torch.bool).scatter(-1, kept, False)
        ids = groups.masked_fill(mask[..., None], -9.0).flatten(-2).topk(top_k, -1).indices
        weights = scores.gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True)

    for mutant in (ignored, by_one):
        verdict = verdict_of("router", router_mutant(mutant))
        refused(verdict, "choice")
        assert "groups" in verdict.reason


def test_a_router_in_bfloat16_or_with_an_expert_twice(verdict_of: Judge) -> None:
    def narrow(x: Tensor, weight: Tensor, bias: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(x.to(BF16), weight.to(BF16)).float())
        return reference.route(scores, bias, **how)

    def double(scores: Tensor, bias: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        ids, weights = reference.route(scores, bias, **how)
        ids = ids.clone()
        ids[:, -1] = ids[:, 0]
        return ids, weights

    def outside(scores: Tensor, bias: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        ids, weights = reference.route(scores, bias, **how)
        return ids + scores.shape[-1] - 1, weights

    refused(verdict_of("router", narrow), "choice", "weights")
    refused(verdict_of("router", router_mutant(double)), "experts differ")
    refused(verdict_of("router", router_mutant(outside)), "experts exist")


def test_an_expert_that_is_dropped(verdict_of: Judge) -> None:
    def drops(x, gate_up, down, ids, weights, scale):  # type: ignore[no-untyped-def]
        return reference.expert_mlp(x, gate_up, down, ids[:, :-1], weights[:, :-1], scale)

    def last(x, gate_up, down, ids, weights, scale):  # type: ignore[no-untyped-def]
        weights = torch.where(ids == len(gate_up) - 1, 0, weights)
        return reference.expert_mlp(x, gate_up, down, ids, weights, scale)

    refused(verdict_of("expert_mlp", drops), "relative error")
    refused(verdict_of("expert_mlp", last), "relative error")


def test_experts_without_scale_weights_or_with_gate_and_up_swapped(verdict_of: Judge) -> None:
    right = reference.expert_mlp
    mutants: list[Kernel] = [
        lambda x, gu, d, i, w, s: right(x, gu, d, i, w, 1.0),
        lambda x, gu, d, i, w, s: right(x, gu, d, i, torch.full_like(w, 0.25), s),
        lambda x, gu, d, i, w, s: right(x, gu.roll(gu.shape[1] // 2, 1), d, i, w, s),
        lambda x, gu, d, i, w, s: right(x, gu, d, i.flip(-1), w, s),
    ]
    for mutant in mutants:
        refused(verdict_of("expert_mlp", mutant), "relative error")


def test_an_mlp_with_gate_and_up_swapped_or_another_activation(verdict_of: Judge) -> None:
    def swapped(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return reference.dense_mlp(x, gate_up.roll(len(gate_up) // 2, 0), down)

    def gelu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear(F.gelu(gate) * up, down)

    refused(verdict_of("dense_mlp", swapped), "relative error")
    refused(verdict_of("dense_mlp", gelu), "relative error")


def test_a_product_in_less_than_its_dtype(verdict_of: Judge) -> None:
    """TF32 keeps 10 bits of float32's 23; a bfloat16 sum loses more than one rounding."""

    def short(x: Tensor) -> Tensor:
        if x.dtype != FP32:
            return x
        bits = x.contiguous().view(torch.int32)
        return (((bits + 0x1000) >> 13) << 13).view(FP32)

    def tf32(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(short(x), short(weight))

    def in_two(x: Tensor, weight: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return F.linear(x[:, :half], weight[:, :half]) + F.linear(x[:, half:], weight[:, half:])

    verdict = verdict_of("qkvg", tf32)
    refused(verdict, "relative error")
    assert "float32" in verdict.reason
    verdict = verdict_of("qkvg", in_two)
    refused(verdict, "relative error")
    assert "bfloat16" in verdict.reason


def test_a_gate_without_its_bias_and_a_cap_that_clamps(verdict_of: Judge) -> None:
    refused(verdict_of("output_gate", lambda o, g, b: o * torch.sigmoid(g)), "relative error")
    clamp = lambda x, cap: x.float().clamp(-cap, cap)  # noqa: E731
    refused(verdict_of("softcap", clamp), "relative error")
    refused(verdict_of("softcap", lambda x, cap: torch.tanh(x.float() / cap)), "relative error")


def test_a_norm_without_its_weight_or_without_the_mean(verdict_of: Judge) -> None:
    right = reference.rms_norm
    bare = lambda x, w, eps: right(x, torch.ones_like(w), eps)  # noqa: E731
    centred = lambda x, w, eps: right(x - x.mean(-1, keepdim=True), w, eps)  # noqa: E731
    plus_one = lambda x, w, eps: right(x, w + 1, eps)  # noqa: E731
    for mutant in (bare, centred, plus_one):
        refused(verdict_of("rms_norm", mutant), "relative error")


@pytest.mark.parametrize("flavour", ["", "sampled"])
def test_a_walk_that_takes_the_last_maximum(flavour: str, tiny: Shapes) -> None:
    def last(edges: Tensor, ids: Tensor, temperature: Tensor, noise: Tensor | None) -> Any:
        turned = edges.flip(-1), ids.flip(-1), temperature
        # Flipped, the slot behind which the scores lie is counted from the end as well.
        back = turned[0].clone()
        back[:, 1:] = back[:, 1:].flip(-2)
        tokens, realized = OPERATIONS["selector_walk"].reference(
            back, turned[1], temperature, None if noise is None else noise.flip(-1)
        )
        return tokens, realized.flip(-1)

    registry.register("selector_walk", "mine")(last)
    verdict = check("selector_walk", "mine", tiny)
    refused(verdict, "choice")


def test_a_walk_without_noise_or_that_stays_in_slot_zero(verdict_of: Judge) -> None:
    right = OPERATIONS["selector_walk"].reference

    def greedy(edges: Tensor, ids: Tensor, temperature: Tensor, noise: Tensor | None) -> Any:
        return right(edges, ids, temperature, None)

    def still(edges: Tensor, ids: Tensor, temperature: Tensor, noise: Tensor | None) -> Any:
        return right(edges[:, :, :1].expand_as(edges).contiguous(), ids, temperature, noise)

    verdict = verdict_of("selector_walk", greedy)
    refused(verdict, "choice")
    assert "sampled" in verdict.reason
    refused(verdict_of("selector_walk", still), "choice")


def test_a_convolution_that_crosses_blocks_or_takes_the_earlier_rows_kernel(
    verdict_of: Judge,
) -> None:
    right = OPERATIONS["dynamic_conv"].reference

    def crosses(x: Tensor, coefficients: Tensor, base: Tensor, query_len: int) -> Tensor:
        return right(x, coefficients, base, max(1, x.shape[0]))

    def earlier(x: Tensor, coefficients: Tensor, base: Tensor, query_len: int) -> Tensor:
        moved = coefficients.clone()
        moved[:, 1] = coefficients[:, 1].roll(1, 0)
        return right(x, moved, base, query_len)

    refused(verdict_of("dynamic_conv", earlier), "relative error")
    refused(verdict_of("dynamic_conv", crosses, tokens=(1, 8, 16)), "relative error")


def test_edges_with_rows_and_columns_swapped_or_another_anchor(verdict_of: Judge) -> None:
    right = OPERATIONS["candidate_edges"].reference
    refused(verdict_of("candidate_edges", lambda *a: right(*a).mT.contiguous()), "relative error")

    def unanchored(p, s, ids, unary, hidden, anchors):  # type: ignore[no-untyped-def]
        return right(p, s, ids, unary, hidden, (anchors + 1) % len(p))

    refused(verdict_of("candidate_edges", unanchored), "relative error")


def test_context_keys_of_one_layers_norm_or_without_scales(verdict_of: Judge) -> None:
    right = OPERATIONS["context_kv_write"].reference

    def one_norm(kv: Tensor, weight: Tensor, *rest: Any, **scales: Any) -> None:
        right(kv, weight[:1].expand_as(weight), *rest, **scales)

    def no_scale(*args: Any, **scales: Any) -> None:
        right(*args, k_scale=None, v_scale=None)

    refused(verdict_of("context_kv_write", one_norm), "relative error")
    verdict = verdict_of("context_kv_write", no_scale)
    refused(verdict, "relative error")
    assert "fp8" in verdict.reason


def test_an_empty_batch_that_raises(verdict_of: Judge) -> None:
    def mutant(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.stack([reference.rms_norm(row, weight, eps) for row in x])

    verdict = verdict_of("rms_norm", mutant)
    assert verdict.status == "raised"
    assert verdict.reason.startswith("0 tokens")


def test_a_wrong_variant_does_not_spoil_the_verdict_of_the_next(tiny: Shapes) -> None:
    """They are given the same inputs, and the first one overwrites them."""

    def spoils(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = reference.rms_norm(x, weight, eps)
        x.zero_()
        return y

    def raises(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        weight.zero_()
        raise RuntimeError("after writing")

    registry.register("rms_norm", "spoils")(spoils)
    registry.register("rms_norm", "raises")(raises)
    found = list(check_variants("rms_norm", ["spoils", "raises", "torch"], tiny))
    assert [v.status for v in found] == ["refused", "raised", "passed"], found
