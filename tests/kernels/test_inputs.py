"""Inputs: junk that cannot be seen, choices that differ, and the sizes of the published models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.case import Case, Request
from workbench.kernels.catalogue import OPS
from workbench.kernels.ops import OPERATIONS
from workbench.kernels.shapes import Shapes
from workbench.model.presets import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
CASES = [(op, flavour) for op in OPS for flavour in OPERATIONS[op].flavours]


def case_of(op: str, shapes: Shapes, tokens: int = 8, flavour: str = "", **how: object) -> Case:
    return OPERATIONS[op].case(Request(shapes=shapes, tokens=tokens, flavour=flavour, **how))  # type: ignore[arg-type]


def tensors(case: Case) -> list[Tensor]:
    return [x for x in (*case.args, *case.kwargs.values()) if isinstance(x, Tensor)]


@pytest.mark.parametrize(("op", "flavour"), CASES)
def test_a_seed_gives_the_same_numbers_and_another_seed_others(
    op: str, flavour: str, tiny: Shapes
) -> None:
    one, same, other = (case_of(op, tiny, flavour=flavour, seed=s) for s in (3, 3, 4))
    bits = [[x.contiguous().view(torch.uint8) for x in tensors(c)] for c in (one, same, other)]
    assert all(torch.equal(a, b) for a, b in zip(bits[0], bits[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(bits[0], bits[2], strict=True))


@pytest.mark.parametrize("tokens", [0, 1, 3, 33])
@pytest.mark.parametrize(("op", "flavour"), CASES)
def test_any_number_of_tokens_makes_a_case_that_the_reference_computes(
    op: str, flavour: str, tokens: int, tiny: Shapes
) -> None:
    case = case_of(op, tiny, tokens, flavour)
    found = case.call(OPERATIONS[op].reference)
    assert set(found) == {*case.returns, *(w.name for w in case.written)}
    for name, y in found.items():
        assert bool(torch.isfinite(y.float()).all()), name
        if tokens:
            assert y.numel()
            size = float(y.float().abs().mean())
            assert size > 1e-3, f"{name}: an output near nothing proves nothing"


@pytest.mark.parametrize("flavour", OPERATIONS["decode_attention"].flavours)
def test_what_no_query_sees_is_junk_and_changes_nothing(flavour: str, tiny: Shapes) -> None:
    case = case_of("decode_attention", tiny, 8, flavour)
    q, k, v, reach = case.args
    right = OPERATIONS["decode_attention"].reference(*case.args, **case.kwargs)
    shown = torch.zeros(k.shape[:2], dtype=torch.bool)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            at = int(reach.first[b]) + t
            low = 0 if reach.window is None else max(0, at - reach.window + 1)
            for p in range(low, at + 1):
                shown[reach.slots[b], p % k.shape[1]] = True
    hidden = ~shown
    assert int(hidden.sum()) >= k.shape[1], "at least one slot belongs to nobody"
    for cache, scale in ((k, "k_scale"), (v, "v_scale")):
        values = cache.float() * case.kwargs.get(scale, 1.0)
        largest = float(values[shown].abs().max())
        assert float(values[hidden].abs().min()) > max(8.0, 1.5 * largest)
        assert largest < 7
    others = []
    for cache in (k, v):
        changed = cache.clone().float()
        changed[hidden] = -changed[hidden].flip(-1) / 2
        others.append(changed.to(cache.dtype))
    again = OPERATIONS["decode_attention"].reference(q, *others, reach, **case.kwargs)
    assert torch.equal(again, right)


def test_rings_have_wrapped_and_some_sequences_are_shorter(tiny: Shapes) -> None:
    _, k, _, reach = case_of("decode_attention", tiny, 8, "sliding").args
    assert int(reach.first.max()) > k.shape[1], "every row of the ring was overwritten"
    assert len(set(reach.first.tolist())) == 8
    assert reach.slots.tolist() != list(range(8))
    assert k.shape[1] >= tiny.window + 8 - 1
    _, k, _, reach = case_of("decode_attention", tiny, 8, "full verify").args
    assert k.shape[1] > int(reach.first.max()) + 7
    assert reach.span >= int(reach.first.max()) + 8


def test_extreme_sequences_have_begun_and_several_are_verified(tiny: Shapes) -> None:
    for flavour in OPERATIONS["decode_attention"].flavours:
        for tokens in (2, 7, 40):
            q, _, _, reach = case_of(
                "decode_attention", tiny, tokens, flavour, extreme=True
            ).args  # fmt: skip
            assert int(reach.first.min()) <= 3 < int(reach.first.max())
            assert q.shape[0] > 1
            if "verify" in flavour:
                assert q.shape[1] == {2: 1, 7: 3, 40: 8}[tokens]
    assert case_of("decode_attention", tiny, 7, "full verify").args[0].shape[:2] == (1, 7)
    begun = {
        int(case_of("decode_attention", tiny, 1, "full", extreme=True, seed=s).args[3].first)
        for s in range(12)
    }
    assert 0 in begun
    assert max(begun) > tiny.window


def test_norms_meet_rows_as_small_as_eps(tiny: Shapes) -> None:
    for op, place in (("rms_norm", 0), ("boundary", 1), ("qkv_write", 0), ("context_kv_write", 0)):
        for how in ({"tokens": 8}, {"tokens": 1, "extreme": True, "seed": 2}):
            case = case_of(op, tiny, flavour=OPERATIONS[op].flavours[0], dtype=FP32, **how)  # type: ignore[arg-type]
            x = case.args[place]
            x = x[:, : tiny.head_dim] if op == "qkv_write" else x[:, 0, 0] if x.dim() > 2 else x
            squares = x.square().flatten(1).mean(-1)
            near = squares[(squares > tiny.eps / 4) & (squares < 8 * tiny.eps)]
            assert len(near) >= 1 or squares.min() == 0, op


@pytest.mark.parametrize("op", ["qkv_write", "context_kv_write"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_cache_rows_are_distinct_and_hold_marks(op: str, dtype: torch.dtype, tiny: Shapes) -> None:
    case = case_of(op, tiny, 8, OPERATIONS[op].flavours[0], dtype=dtype)
    rows = case.args[6].tolist()
    assert rows.count(-1) == 1
    wanted = [r for r in rows if r >= 0]
    assert len(set(wanted)) == 7
    assert wanted != sorted(wanted)
    for one in case.written:
        assert one.rows.tolist() == wanted
        store = case.args[one.argument].float()
        assert 50 < float(store.std()) < 150
    before = case.args[4].clone()
    case.call(OPERATIONS[op].reference)
    assert torch.equal(case.args[4], before), "a call writes on copies"


def test_float8_caches_are_used_in_their_middle(tiny: Shapes) -> None:
    case = case_of("qkv_write", tiny, 8, "sliding fp8")
    found = case.call(OPERATIONS["qkv_write"].reference)
    for name in ("k", "v"):
        assert found[name].dtype == FP8
        size = found[name].float().abs()
        assert 10 < float(size.mean()) < 100
        assert float(size.max()) < 448, "nothing is clamped"


def test_routing_and_candidates_are_distinct(tiny: Shapes) -> None:
    ids, weights = case_of("expert_mlp", tiny, 20).args[3:5]
    assert all(len(set(row)) == tiny.top_k for row in ids.tolist())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < tiny.experts
    sums = weights.sum(-1)
    assert 0.5 <= float(sums.min()) < 0.8 < 1.2 < float(sums.max()) <= 1.5
    for op, place in (("candidate_edges", 2), ("selector_walk", 1)):
        found = case_of(op, tiny, 24).args[place]
        assert found.shape == (3, tiny.draft_tokens, tiny.candidates)
        assert int(found.max()) < tiny.full_vocabulary
        for row in found.flatten(0, 1).tolist():
            assert len(set(row)) == tiny.candidates
            assert row != sorted(row)


def test_the_walk_meets_ties(tiny: Shapes) -> None:
    edges = case_of("selector_walk", tiny, 32).args[0]
    best = edges.amax(-1, keepdim=True)
    assert int(((edges == best).sum(-1) > 1).sum()) > 0


def test_the_gate_and_strided_rows_are_views(tiny: Shapes) -> None:
    o, gate, _ = case_of("output_gate", tiny, 8).args
    assert gate.stride(0) == tiny.packed
    assert gate.shape == o.shape
    for op, flavour in CASES:
        strided = case_of(op, tiny, 8, flavour, strided=True)
        plain = case_of(op, tiny, 8, flavour)
        wide = [
            i for i, x in enumerate(strided.args)
            if isinstance(x, Tensor) and x.dim() > 1 and not x.is_contiguous()
        ]  # fmt: skip
        assert wide or op == "selector_walk", op
        for a, b in zip(strided.args, plain.args, strict=True):
            if isinstance(a, Tensor):
                assert a.shape == b.shape
                assert a.stride(-1) == 1


# -- sizes --------------------------------------------------------------------------------------

# The published recipe: each of 8 ranks, and of 4.
SIZES = {
    8: dict(heads=6, kv_heads=1, packed=1792, expert_width=320, mlp_width=1536, vocabulary=20480),
    4: dict(heads=12, kv_heads=2, packed=3584, expert_width=640, mlp_width=3072, vocabulary=40960),
}


@pytest.mark.parametrize("tp", SIZES)
def test_sizes_of_the_published_model(tp: int) -> None:
    config = resolve("beam-501b").config
    shapes = Shapes.of(config, tp)
    for name, value in SIZES[tp].items():
        assert getattr(shapes, name) == value, name
    assert (shapes.hidden, shapes.head_dim, shapes.experts, shapes.top_k) == (5120, 128, 256, 8)
    assert (shapes.window, shapes.full_vocabulary) == (512, 163840)


def test_tensors_of_a_rank_of_the_published_model() -> None:
    """As ``performance.md`` lists them: 1792 x 5120, 3072 x 5120, 5120 x 1536, 640 x 5120."""
    shapes = Shapes.of(resolve("beam-501b").config, 8)

    def of(op: str, flavour: str = "", tokens: int = 1) -> list[list[int]]:
        case = case_of(op, shapes, tokens, flavour)
        return [list(x.shape) for x in case.args if isinstance(x, Tensor)]

    assert of("qkvg") == [[1, 5120], [1792, 5120]]
    assert of("dense_mlp") == [[1, 5120], [3072, 5120], [5120, 1536]]
    assert of("router") == [[1, 5120], [256, 5120], [256]]
    assert of("softcap") == [[1, 20480]]
    assert of("output_gate") == [[1, 6, 128], [1, 6, 128], [6]]
    q, k, v = of("decode_attention", "sliding")
    assert q == [1, 1, 6, 128]
    assert k == v == [2, 512 + 16, 1, 128]
    packed, norm, _, rope, k, v, _ = of("qkv_write", "full")
    assert packed == [1, 1792]
    assert (norm, rope[1]) == ([2, 128], 128)
    assert k == v == [6, 1, 128]


def test_kv_heads_are_replicated_when_there_are_more_ranks() -> None:
    config = resolve("beam-501b").config
    assert [Shapes.of(config, tp).kv_heads for tp in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize("tp", [0, -1, 3, 5, True, "8", 1.0])
def test_ranks_that_do_not_divide_the_model(tp: object) -> None:
    with pytest.raises(KernelError, match="does not divide this model; choose a divisor of its 48"):
        Shapes.of(resolve("beam-501b").config, tp)  # type: ignore[arg-type]


def test_more_tokens_than_the_context_is_a_sentence(tiny: Shapes) -> None:
    with pytest.raises(KernelError, match=r"exceed the context of 2048; ask for fewer"):
        case_of("prefill_attention", tiny, 5000, "sliding ragged")
