"""Every way of being wrong that we could think of is refused, by the gate that names it.

A mutant is the torch reference with one mistake. What is asserted is the name of the gate, since a
refusal that does not say why helps nobody.
"""

from __future__ import annotations

import math
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


@pytest.mark.parametrize("op", RETURNING)
def test_tensors_in_a_list_or_one_in_a_tuple(op: str, verdict_of: Judge) -> None:
    """The model takes what is documented: it would index a list by its rows."""
    right = OPERATIONS[op].reference

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        return list(found) if isinstance(found, tuple) else (found,)

    verdict = verdict_of(op, wrapped)
    assert (verdict.status, verdict.gate) == ("raised", "result")
    assert "a list of 2" in verdict.reason or "a tuple of 1" in verdict.reason


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (UnspeakableError(), "UnspeakableError: (its message cannot be made: RuntimeError)"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_whatever_is_raised_is_a_verdict(
    error: BaseException, words: str, verdict_of: Judge
) -> None:
    def broken(*args: Any) -> Any:
        raise error

    verdict = verdict_of("rms_norm", broken)
    assert verdict.status == "raised"
    assert words in verdict.reason


def test_ctrl_c_is_not_a_verdict(verdict_of: Judge) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verdict_of("rms_norm", interrupted)


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
    for dim in (0, 1):  # a row may also be reversed or sorted in itself

        def spoil(x: Tensor, weight: Tensor, eps: float, dim: int = dim) -> Tensor:
            y = reference.rms_norm(x, weight, eps)
            x.copy_(x.flip(dim))
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


def beside_the_gate(o: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """Zeroes q, k and v, which lie before the gate in the packed projection."""
    y = reference.output_gate(o, gate, bias)
    before = gate.storage_offset()
    gate.as_strided((gate.shape[0], before), (gate.stride(0), 1), 0).zero_()
    return y


def beside_a_strided_row(x: Tensor, weight: Tensor) -> Tensor:
    y = reference.qkvg(x, weight)
    if x.shape[0] and not x.is_contiguous():
        x.as_strided((1,), (1,), x.shape[1]).zero_()
    return y


def moves_positions(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
    o = reference.decode_attention(q, k, v, reach, **scales)
    reach.first.add_(1)
    return o


def narrows_the_window(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    o = reference.prefill_attention(q, k, v, spans)
    spans.window = None if spans.window is None else spans.window - 1
    return o


def moves_a_start(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    o = reference.prefill_attention(q, k, v, spans)
    spans.k_starts[-1] -= 1
    return o


def rescales(*args: Any, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    OPERATIONS["context_kv_write"].reference(*args, k_scale=k_scale, v_scale=v_scale)
    if v_scale is not None:
        v_scale.mul_(2)


@pytest.mark.parametrize(
    ("op", "mutant", "where"),
    [
        ("output_gate", beside_the_gate, "argument 1"),
        ("qkvg", beside_a_strided_row, "argument 0"),
        ("decode_attention", moves_positions, "argument 3 (first)"),
        ("prefill_attention", narrows_the_window, "argument 3 (window)"),
        ("prefill_attention", moves_a_start, "argument 3 (k_starts)"),
        ("context_kv_write", rescales, "argument v_scale"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_memory_around_an_input_or_inside_what_describes_it(
    op: str, mutant: Kernel, where: str, verdict_of: Judge
) -> None:
    verdict = verdict_of(op, mutant)
    refused(verdict, "inputs")
    assert where in verdict.reason


@pytest.mark.parametrize("op", ["boundary", "softcap", "router", "decode_attention"])
def test_an_output_that_a_later_call_overwrites(op: str, verdict_of: Judge) -> None:
    right, kept = OPERATIONS[op].reference, {}

    def static(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        several = found if isinstance(found, tuple) else (found,)
        key = tuple((x.shape, x.dtype) for x in several)
        held = kept.setdefault(key, several)
        for x, new in zip(held, several, strict=True):
            x.copy_(new)
        return held if isinstance(found, tuple) else held[0]

    refused(verdict_of(op, static), "own output")


def test_a_weight_that_is_known_by_its_address(verdict_of: Judge) -> None:
    """What it is after training, or under an adapter, is not what it was."""
    kept: dict[Any, Tensor] = {}

    def mutant(x: Tensor, weight: Tensor) -> Tensor:
        held = kept.setdefault((weight.data_ptr(), weight.dtype), weight.clone())
        kept.setdefault((id(weight), weight.dtype), weight)  # it must not be another's address
        return reference.qkvg(x, held)

    refused(verdict_of("qkvg", mutant), "relative error")


@pytest.mark.parametrize("op", ["qkvg", "decode_attention", "boundary"])
def test_rows_whose_numbers_lie_apart(op: str, verdict_of: Judge) -> None:
    refused(verdict_of(op, changed(op, lambda y: y.mT.contiguous().mT)), "layout")


STATE: dict[str, Callable[[], object]] = {
    "the grad mode": lambda: torch.set_grad_enabled(False),
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the default device": lambda: torch.set_default_device("meta"),
    "autocast on cpu": lambda: torch.set_autocast_enabled("cpu", True),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "the precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "the number of threads": lambda: torch.set_num_threads(2),
    "the default random generator": lambda: torch.rand(1),
}


@pytest.mark.parametrize("what", STATE)
@pytest.mark.parametrize("raises", [False, True])
def test_a_process_that_is_left_changed(what: str, raises: bool, verdict_of: Judge) -> None:
    def mutant(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = reference.rms_norm(x, weight, eps)
        STATE[what]()
        if raises:
            raise RuntimeError("after it")
        return y

    def now() -> list[Any]:
        return [
            torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(),
            torch.is_autocast_enabled("cpu"), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.get_num_threads(),
            torch.get_rng_state().tolist(),
        ]  # fmt: skip

    before = now()
    verdict = verdict_of("rms_norm", mutant)
    assert now() == before, "it is put back"
    if raises:
        assert (verdict.status, verdict.reason[-8:]) == ("raised", "after it")
    else:
        refused(verdict, "state")
        assert what in verdict.reason


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

    verdict = verdict_of(op, mutant, tokens=(7,))
    gates = ("relative error", "worst row", "worst element", "choice", "weights")
    refused(verdict, *gates)
    assert "strided" in verdict.reason, "every other case is contiguous"


# -- what only some inputs show -----------------------------------------------------------------


def of(op: str, **places: Any) -> Kernel:
    """The reference of ``op`` with arguments, by place or by name, of its own choice."""
    right = OPERATIONS[op].reference

    def mutant(*args: Any, **kwargs: Any) -> Any:
        own = list(args)
        for name, value in places.items():
            if name[0] == "a" and name[1:].isdigit():
                own[int(name[1:])] = value(own[int(name[1:])]) if callable(value) else value
            elif name in kwargs:
                kwargs[name] = value
        return right(*own, **kwargs)

    return mutant


def first_rows(op: str, rows: int) -> Kernel:
    def cut(y: Tensor) -> Tensor:
        y = y.clone()
        y[rows:] = 0
        return y

    return changed(op, cut)


def alone_without_window(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    if spans.uniform:
        spans = Spans(spans.q_lengths, spans.k_lengths, None)
    return reference.prefill_attention(q, k, v, spans)


def alike_as_one(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    if spans.uniform:
        spans = Spans([sum(spans.q_lengths)], [sum(spans.k_lengths)], spans.window)
    return reference.prefill_attention(q, k, v, spans)


def window_of_256(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    window = None if spans.window is None else 256
    return reference.prefill_attention(q, k, v, Spans(spans.q_lengths, spans.k_lengths, window))


def nothing_after_900_keys(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    o = reference.prefill_attention(q, k, v, spans)
    return torch.zeros_like(o) if max(spans.k_lengths) > 900 else o


def at_most_600_keys(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
    if reach.window is None:
        reach = Reach(reach.slots, reach.first.clamp(max=599), span=reach.span, window=None)
    return reference.decode_attention(q, k, v, reach, **scales)


def first_slot_for_all(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
    if q.shape[1] == 1:
        return reference.decode_attention(q, k, v, reach, **scales)
    one = Reach(reach.slots[:1], reach.first[:1], span=reach.span, window=reach.window)
    return torch.cat([reference.decode_attention(x[None], k, v, one, **scales) for x in q])


def zeros_at_the_start(q: Tensor, k: Tensor, v: Tensor, reach: Reach, **scales: float) -> Tensor:
    o = reference.decode_attention(q, k, v, reach, **scales)
    return o * (reach.first >= 4)[:, None, None, None]


def without_maximum(
    q: Tensor, k: Tensor, v: Tensor, reach: Reach, *, k_scale: float = 1.0, v_scale: float = 1.0
) -> Tensor:
    seen = reach.visible(q.shape[1], k.shape[1])[:, :, None]  # [B, T, 1, span]
    keys, values = (
        (x[reach.slots, : reach.span].float() * scale).repeat_interleave(
            q.shape[2] // k.shape[2], 2
        )
        for x, scale in ((k, k_scale), (v, v_scale))
    )
    scores = torch.einsum("btad,bsad->btas", q.float(), keys) / math.sqrt(q.shape[-1])
    power = torch.where(seen, torch.exp(scores), 0.0)
    o = torch.einsum("btas,bsad->btad", power / power.sum(-1, keepdim=True), values)
    return o.to(q.dtype)


def no_rows_nowhere(packed: Tensor, norm: Tensor, at: Tensor, rope: Tensor, *rest: Any, **how: Any):  # type: ignore[no-untyped-def]
    k_rows, v_rows, rows = rest
    if rows is None:
        k_rows, v_rows = k_rows.clone(), v_rows.clone()
    return reference.qkv_write(packed, norm, at, rope, k_rows, v_rows, rows, **how)


def own_angles(rope: Tensor) -> Tensor:
    return reference.rope_table(rope.shape[0], rope.shape[1], 1e4, "cpu")


def overflowing(x: Tensor) -> Tensor:
    """A sigmoid as e / (1 + e)."""
    e = torch.exp(x.float())
    return e / (1 + e)


def gated(o: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return (o.float() * overflowing(gate.float() + bias.float()[:, None])).to(o.dtype)


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).float().chunk(2, -1)
    return F.linear((gate * overflowing(gate) * up).to(x.dtype), down)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, w: Tensor, scale: float):  # type: ignore[no-untyped-def]
    gate, up = torch.einsum("nh,ekh->nek", x, gate_up).float().chunk(2, -1)
    act = (gate * overflowing(gate) * up).to(x.dtype)
    table = torch.zeros(x.shape[0], gate_up.shape[0]).scatter(1, ids, w)
    return torch.einsum("nei,eih,ne->nh", act, down, table.to(x.dtype)) * scale


def capped(logits: Tensor, cap: float) -> Tensor:
    e = torch.exp(2 * logits.float() / cap)
    return (e - 1) / (e + 1) * cap


def eight_an_expert(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, w: Tensor, scale: float):  # type: ignore[no-untyped-def]
    w = w.clone()
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        w[token[8:], place[8:]] = 0
    return reference.expert_mlp(x, gate_up, down, ids, w, scale)


def warm(temperature: Tensor) -> Tensor:
    return torch.where(temperature > 0, 0.7, temperature)


MIDDLE = (51**-0.5, (50 / 51) ** 0.5)
SUBTLE: list[tuple[str, str, Kernel, str, str]] = [
    # operation, what is wrong, kernel, gate, where it must have shown
    ("boundary", "the factors of one layer", of("boundary", a3=MIDDLE), "relative error", ""),
    ("boundary", "no eps", of("boundary", a5=0.0), "finite", ""),
    ("rms_norm", "no eps", of("rms_norm", a2=0.0), "relative error", ""),
    ("rms_norm", "eps of one model", of("rms_norm", a2=1e-6), "relative error", "extreme"),
    ("qkv_write", "no eps", of("qkv_write", eps=0.0), "relative error", ", q"),
    ("context_kv_write", "no eps", of("context_kv_write", a7=0.0), "relative error", ", k"),
    ("conv_residual_norm", "no eps", of("conv_residual_norm", a5=0.0), "relative error", ", x"),
    ("rms_norm", "16 rows", first_rows("rms_norm", 16), "relative error", "40 tokens"),
    ("dynamic_conv", "two blocks", first_rows("dynamic_conv", 16), "relative error", "40 tokens"),
    ("candidate_edges", "one request", first_rows("candidate_edges", 1), "relative error", ""),
    ("expert_mlp", "a capacity", eight_an_expert, "relative error", "40 tokens"),
    ("qkv_write", "rows are None", no_rows_nowhere, "relative error", "sequence"),
    ("qkv_write", "its own angles", of("qkv_write", a3=own_angles), "relative error", "sliding"),
    ("qkv_write", "scales", of("qkv_write", k_scale=0.02, v_scale=0.03), "relative error", "fp8"),
    ("decode_attention", "scales", of("decode_attention", k_scale=0.02), "relative error", "fp8"),
    ("decode_attention", "one slot", first_slot_for_all, "relative error", "verify"),
    ("decode_attention", "the start", zeros_at_the_start, "relative error", "extreme"),
    ("decode_attention", "long contexts", at_most_600_keys, "relative error", "after 1500"),
    ("decode_attention", "large scores", without_maximum, "finite", "extreme"),
    ("prefill_attention", "one whole sequence", alone_without_window, "relative error", "sliding"),
    ("prefill_attention", "several alike", alike_as_one, "relative error", "batch"),
    ("prefill_attention", "one window", window_of_256, "relative error", "extreme"),
    ("prefill_attention", "long contexts", nothing_after_900_keys, "relative error", "after 1500"),
    ("output_gate", "large gates", gated, "finite", "extreme"),
    ("dense_mlp", "large gates", mlp, "finite", "extreme"),
    ("expert_mlp", "large gates", experts, "finite", "extreme"),
    ("softcap", "large logits", capped, "finite", "extreme"),
    ("softcap", "clipped", of("softcap", a0=lambda x: x.clamp(-90, 90)), "relative error", ""),
    ("softcap", "the cap of one model", of("softcap", a1=30.0), "relative error", ""),
    ("expert_mlp", "the factor of one model", of("expert_mlp", a5=2.5), "relative error", ""),
    ("expert_mlp", "weights", of("expert_mlp", a4=lambda w: w / w.sum(-1)[:, None]),
     "relative error", ""),
    ("router", "renormalised", of("router", renormalise=True), "weights", ""),
    ("router", "not renormalised", of("router", renormalise=False), "weights", ""),
    ("selector_walk", "one temperature", of("selector_walk", a2=warm), "choice", "sampled"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "mutant", "gate", "where"),
    [pytest.param(op, *rest, id=f"{op}: {what}") for op, what, *rest in SUBTLE],
)
def test_what_only_some_inputs_show(
    op: str, mutant: Kernel, gate: str, where: str, verdict_of: Judge
) -> None:
    verdict = verdict_of(op, mutant)
    refused(verdict, gate)
    assert where in verdict.reason


def test_groups_of_another_number(verdict_of: Judge) -> None:
    """Four of eight groups at all times."""

    def mutant(*args: Any, topk_group: int, **how: Any) -> Any:
        topk_group = 4 if how["n_group"] == 8 else topk_group
        return reference.router(*args, topk_group=topk_group, **how)

    verdict = verdict_of("router", mutant)
    refused(verdict, "choice")
    assert "groups" in verdict.reason


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
