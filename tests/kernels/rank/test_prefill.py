"""A rank's prefill: against a plain numpy step token by token, and its kernels against float64."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from workbench.cli_bench_prefill import page, prefill
from workbench.errors import KernelError
from workbench.kernels.rank import RankWeights
from workbench.kernels.rank.prefill_bench import kernel_rows, measure_prefill, padding
from workbench.kernels.rank.prefill_check import check_prefill, sample_rows
from workbench.kernels.rank.prefill_state import PrefillState, counted_flops
from workbench.kernels.rank.prefill_step import FORMS, Choices, PrefillStep
from workbench.kernels.rank.triton_prefill_attention import GatedPlan, gated_prefill
from workbench.kernels.rank.triton_prefill_experts import (
    DownLaunch,
    ExpertsLaunch,
    UpLaunch,
    grouped_experts,
)
from workbench.kernels.rank.triton_prefill_sort import sorted_places
from workbench.kernels.rank.triton_prefill_vectors import (
    expert_boundary,
    split_logits,
    split_parts,
)
from workbench.kernels.reach import Spans
from workbench.kernels.reference import boundary
from workbench.kernels.roofline import Rates

from .conftest import small_config
from .rank_numpy import NumpyRank

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton kernels are interpreted on a CPU only without a GPU"
)


def made(form: str, dtype: torch.dtype = torch.float32, **changes: Any) -> RankWeights:
    """Weights of one of two ranks, values of the size that a large model's have."""
    weights = RankWeights.random(
        small_config(**changes), 2, device="cpu", dtype=dtype,
        down_layout="IH" if form == "chain" else "HI",
    )  # fmt: skip
    for tensor in weights.tensors():
        if tensor.dim() > 1 and tensor is not weights.embed:
            tensor.mul_(5)
    return weights


def plainly(weights: RankWeights, state: PrefillState, b: int) -> NumpyRank:
    """A decoding numpy rank behind the earlier tokens of sequence ``b``."""
    caches = []
    for store in (state.k, state.v):
        of_layers = []
        for layer, cache in zip(weights.layers, store, strict=True):
            # The numpy rank looks for position p in row p modulo the rows.
            rows = state.context if layer.full else min(state.context, state.shapes.window)
            kept = torch.zeros(1, max(rows, 1), *cache.shape[2:])
            past = state.past[layer.full]
            for p in range(state.context - past, state.context):
                kept[0, p % max(rows, 1)] = cache[b, p - state.context + past]
            of_layers.append(kept)
        caches.append(of_layers)
    like = SimpleNamespace(
        position=[state.context], token=[0], k=caches[0], v=caches[1], shapes=state.shapes
    )
    plain = NumpyRank(weights, like, 0)  # type: ignore[arg-type]
    if state.context:
        for layer, keys, values in zip(weights.layers, plain.keys, plain.values, strict=True):
            for p in [p for p in keys if p < state.context - state.past[layer.full]]:
                del keys[p], values[p]  # a row that the prefill's cache has not, and no one sees
    return plain


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("sequences", "tokens", "context"), [(2, 26, 0), (1, 3, 40), (2, 1, 7)])
def test_a_prefill_is_its_tokens_one_after_the_other(
    form: str, sequences: int, tokens: int, context: int, one_thread: None
) -> None:
    weights = made(form)
    state = PrefillState(weights, sequences, tokens, context)
    plain = [plainly(weights, state, b) for b in range(sequences)]
    state.poison()
    step = PrefillStep(weights, state, form)
    step()
    for b, one in enumerate(plain):
        for token in state.token[b * tokens : (b + 1) * tokens].tolist():
            one.token = token
            wanted = one.step()
        got = state.logits[b].double().numpy()
        assert np.abs(got - wanted).max() < 2e-4 * np.abs(wanted).max()
        assert int(state.next_token[b]) == int(wanted.argmax())
        for index, layer in enumerate(weights.layers):
            for t in range(tokens):
                row = state.past[layer.full] + t
                for store, kept in ((state.k, one.keys), (state.v, one.values)):
                    found, there = store[index][b, row].numpy(), kept[index][context + t]
                    assert np.abs(found - there).max() < 2e-4 * np.abs(there).max()
        ids = [pair[0][(b + 1) * tokens - 1] for pair in step.chosen.layers if pair is not None]
        assert [set(row.tolist()) for row in ids] == one.experts


@pytest.mark.parametrize(
    "changes",
    [
        {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
        {"final_logit_softcapping": None, "mlp_layer_types": ("sparse",) * 3},
    ],
)
def test_other_models_agree_too(changes: dict[str, Any], one_thread: None) -> None:
    weights = made("ours", **changes)
    state = PrefillState(weights, 1, 5, 30)
    plain = plainly(weights, state, 0)
    PrefillStep(weights, state)()
    for token in state.token.tolist():
        plain.token = token
        wanted = plain.step()
    assert np.abs(state.logits[0].numpy() - wanted).max() < 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("form", ["chain", "ours"])
def test_bfloat16_stays_within_the_gate_of_plain_torch(form: str, one_thread: None) -> None:
    found = {}
    for name in ("naive", form):
        weights = made(name, torch.bfloat16)
        state = PrefillState(weights, 2, 9, 30)
        step = PrefillStep(weights, state, name, watch=sample_rows(state, 3))
        found[name] = check_prefill(step, weights, state)
    own = found["naive"].worst
    assert 1e-4 < own < 1e-2
    assert found[form].failures(2 * own) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [("", ""), ("stream", "a layer's error"), ("cache", "cache row"), ("token", "next token")],
)
def test_the_check_finds_what_is_wrong(fault: str, words: str, one_thread: None) -> None:
    weights = made("naive")
    state = PrefillState(weights, 1, 6, 9)
    step = PrefillStep(weights, state, "naive", watch=sample_rows(state, 2))

    def run() -> None:
        step()
        if fault == "stream":
            step.h[2] = step.h[2] * 1.05
        elif fault == "cache":  # of the last token, which no other row of the check reads
            state.k[1][0, -1] = state.k[1][0, -2]
        elif fault == "token":
            state.next_token.copy_(state.logits.argmin(-1))

    failures = " / ".join(check_prefill(step, weights, state, run).failures(1e-4))
    assert words in failures
    assert bool(failures) == bool(fault)


def test_given_choices_replace_the_router(one_thread: None) -> None:
    weights = made("ours")
    state = PrefillState(weights, 1, 6, 4)
    step = PrefillStep(weights, state)
    step()
    own, wanted = step.chosen, state.logits.clone()
    PrefillStep(weights, state, choices=own)()
    assert torch.equal(state.logits, wanted)
    other = Choices(
        layers=[None if p is None else ((p[0] + 1) % 12, p[1].flip(0)) for p in own.layers]
    )
    naive = PrefillStep(weights, state, "naive", choices=other)
    naive()
    forced = state.logits.clone()
    assert (forced - wanted).abs().max() > 1e-2 * wanted.abs().max()
    PrefillStep(weights, state, choices=other)()
    assert (state.logits - forced).abs().max() < 2e-4 * forced.abs().max()
    with pytest.raises(KernelError, match="no experts for sparse layer 1"):
        PrefillStep(weights, state, choices=Choices(layers=[None, None, None]))()


# ------------------------------------------------------------------ kernels


def experts_plainly(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(*ids.shape, x.shape[1], dtype=torch.float64)
    for n, chosen in enumerate(ids.tolist()):
        for k, e in enumerate(chosen):
            gate, up = (gate_up[e].double() @ x[n].double()).chunk(2)
            out[n, k] = down[e].double() @ (gate / (1 + torch.exp(-gate)) * up)
    return out


@pytest.mark.parametrize(
    "launch",
    [
        ExpertsLaunch(
            tokens=32, up=UpLaunch(rows=32, depth=32),
            down=DownLaunch(columns=64, each=1, ordered=True),
        ),
        ExpertsLaunch(
            tokens=32, halves=False, up=UpLaunch(rows=16, depth=64, tail=False),
            down=DownLaunch(columns=32, depth=32, each=2),
        ),
        ExpertsLaunch(
            tokens=64, up=UpLaunch(rows=64, depth=64),
            down=DownLaunch(columns=128, each=3, ordered=True),
        ),
        ExpertsLaunch(
            tokens=32, up=UpLaunch(rows=32, depth=32),
            down=DownLaunch(columns=64, each=1),
        ),
    ],
    ids=["tail", "no tail, by pair", "wide", "by pair"],
)  # fmt: skip
@pytest.mark.parametrize(("tokens", "spread"), [(70, 12), (90, 3), (1, 12)])
def test_grouped_experts_are_each_experts_mlp(
    launch: ExpertsLaunch, tokens: int, spread: int, one_thread: None
) -> None:
    """Sizes that no tile divides; with few experts several blocks each, and experts of no token."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 200)[:, :104]  # rows further apart than they are long
    gate_up, down = torch.randn(12, 80, 104) * 0.2, torch.randn(12, 104, 40) * 0.2
    ids = torch.rand(tokens, spread).topk(3, -1).indices
    product, place = grouped_experts(x, gate_up, down, ids, launch=launch)
    assert (place is None) == (not launch.down.ordered)
    got = (product if place is None else product[place.flatten().long()]).unflatten(0, ids.shape)
    wanted = experts_plainly(x, gate_up, down, ids)
    assert (got - wanted).abs().max() < 2e-6 * wanted.abs().max()


@pytest.mark.parametrize(("tokens", "experts"), [(70, 12), (300, 40), (200, 4), (1, 5)])
def test_the_sort_places_every_pair_once(tokens: int, experts: int, one_thread: None) -> None:
    ids = torch.rand(tokens, experts).topk(3, -1).indices
    order, blocks, place = sorted_places(ids, experts, 32)
    flat = ids.flatten()
    assert torch.equal(order[place.flatten().long()], torch.arange(len(flat), dtype=torch.int32))
    assert torch.equal(order.long(), flat.argsort(stable=True))
    covered = []
    for expert, place, count in blocks.tolist():
        if expert >= 0:
            assert 1 <= count <= 32
            assert (flat[order[place : place + count].long()] == expert).all()
            covered += range(place, place + count)
    assert sorted(covered) == list(range(flat.numel()))


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    ("sequences", "context", "window"),
    [([37, 5], 150, None), ([37], 0, None), ([3], 400, None), ([37, 21], 150, 40), ([4], 0, 40)],
)
def test_attention_with_the_gate_is_one_after_the_other(
    sequences: list[int], context: int, window: int | None, late: bool, one_thread: None
) -> None:
    """Three query heads a KV head, tiles that no length divides, sequences of other lengths."""
    torch.manual_seed(0)
    n, heads, groups, dim = sum(sequences), 6, 2, 32
    keys = [context + t for t in sequences]
    spans = Spans(sequences, keys, window, "cpu")
    q, packed = torch.randn(n, heads, dim), torch.randn(n, 3 * heads * dim)
    k, v = torch.randn(sum(keys), groups, dim), torch.randn(sum(keys), groups, dim)
    gate, bias = (
        packed[:, heads * dim : 2 * heads * dim].unflatten(-1, (heads, dim)),
        torch.randn(6),
    )
    plan = GatedPlan(block_m=32, block_n=16, late=late)
    got = gated_prefill(q, k, v, gate, bias, spans, plan)
    assert got is not None
    wanted, row, first = torch.zeros(n, heads, dim, dtype=torch.float64), 0, 0
    for tokens, length in zip(sequences, keys, strict=True):
        for t in range(tokens):
            newest = length - tokens + t
            low = 0 if window is None else max(0, newest - window + 1)
            for h in range(heads):
                seen = slice(first + low, first + newest + 1)
                score = k[seen, h // 3].double() @ q[row, h].double() / dim**0.5
                o = score.softmax(0) @ v[seen, h // 3].double()
                wanted[row, h] = o * torch.sigmoid(gate[row, h].double() + bias[h].double())
            row += 1
        first += length
    assert (got - wanted).abs().max() < 2e-6 * wanted.abs().max()


def test_attention_that_descriptors_cannot_read_is_left_to_the_operations(
    one_thread: None,
) -> None:
    q, gate = torch.randn(2, 2, 32), torch.randn(2, 2, 32)
    odd = torch.randn(8, 1, 33)[:, :, :32]  # rows that do not begin on 16 bytes
    spans = Spans([2], [8], None, "cpu")
    assert gated_prefill(q, odd, odd, gate, torch.zeros(2), spans, GatedPlan()) is None


def test_kernel_times_of_their_own_add_up_to_the_run() -> None:
    # b begins while a runs and waits for it; c after a gap; the second a lies within c.
    rows = kernel_rows([("a", 0, 10), ("b", 4, 13), ("c", 15, 20), ("a", 16, 19)])
    fields = ("kernel", "launches", "microseconds", "own_microseconds")
    assert [tuple(row[field] for field in fields) for row in rows] == [
        ("a", 2, 13, 13), ("b", 1, 9, 3), ("c", 1, 5, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("hidden", [96, 160])
def test_the_sum_and_the_boundary_round_as_one_after_the_other(
    hidden: int, one_thread: None
) -> None:
    torch.manual_seed(0)
    h, product = torch.randn(7, hidden).bfloat16(), torch.randn(7, 3, hidden).bfloat16()
    shares = torch.rand(7, 3)
    post, following = torch.rand(hidden).bfloat16() + 0.5, torch.rand(hidden).bfloat16() + 0.5
    stream, out = expert_boundary(h, product, shares, 2.5, post, (0.5, 0.8), following, 1e-6)
    shuffled = torch.randperm(21)
    rows = torch.empty(21, hidden, dtype=product.dtype)
    rows[shuffled] = product.flatten(0, 1)
    place = shuffled.int().view(7, 3)
    other = expert_boundary(h, rows, shares, 2.5, post, (0.5, 0.8), following, 1e-6, place=place)
    assert torch.equal(other[0], stream)
    assert torch.equal(other[1], out)
    total = (product.double() * shares[..., None].double()).sum(1)
    m = total.to(torch.bfloat16) * 2.5
    wanted = boundary(h, m, post, (0.5, 0.8), following, 1e-6)
    for got, want in ((stream, wanted[0]), (out, wanted[1])):
        # A sum in another order may fall on the other side of a rounding, rarely.
        assert (got != want).float().mean() < 0.02
        assert (got.float() - want.float()).abs().max() < 0.03 * want.float().abs().max()


def test_split_router_weights_are_exact_and_their_logits_float32s(one_thread: None) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(20, 200), torch.randn(40, 200).bfloat16()
    parts = split_parts(weight)
    assert torch.equal(parts.double().sum(0), weight.double())
    got = split_logits(x, parts)[0].double()
    wanted = x.double() @ weight.double().T
    assert (got - wanted).abs().max() < 3e-7 * wanted.abs().max()
    assert (x.double() @ parts[0].double().T - wanted).abs().max() > 1e-4 * wanted.abs().max()


# ------------------------------------------------------------------ what is counted and refused


def test_counted_work_is_that_of_the_tokens_one_by_one(one_thread: None) -> None:
    weights = made("ours")
    state = PrefillState(weights, 2, 29, 40)
    s, products, attention = weights.shapes, 0, 0
    for layer in weights.layers:
        for t in range(29):
            seen = 40 + t + 1
            attention += 2 * 4 * 32 * s.heads * (seen if layer.full else min(seen, 24))
            products += 2 * 2 * (layer.qkvg.numel() + layer.o_proj.numel())
            if layer.dense:
                products += 2 * 2 * (layer.gate_up.numel() + layer.down.numel())
            else:
                each = layer.gate_up[0].numel() + layer.down[0].numel()
                assert layer.router is not None
                products += 2 * 2 * (3 * each + layer.router.numel())
    products += 2 * 2 * weights.lm_head.numel()
    found = counted_flops(weights, state)
    assert found == {"products": products, "attention": attention, "all": products + attention}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, 5, 0), "needs 1 or more sequences"),
        ((1, 0, 0), "needs 1 or more sequences"),
        ((1, 5, -1), "context of 0 or more"),
        ((1, 100, 4000), "exceed the model's context of 4096"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    sizes: tuple[int, int, int], words: str, one_thread: None
) -> None:
    weights = made("ours")
    with pytest.raises(KernelError, match=words):
        PrefillState(weights, *sizes)


def test_what_does_not_fit_is_refused(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = made("ours")
    monkeypatch.setattr("workbench.kernels.rank.prefill_state.free_bytes", lambda _: 1000)
    with pytest.raises(KernelError, match="choose fewer --sequences"):
        PrefillState(weights, 2, 5, 10)


def test_forms_that_cannot_be_are_refused(one_thread: None) -> None:
    weights = made("ours")
    state = PrefillState(weights, 1, 4, 0)
    with pytest.raises(KernelError, match="no form 'best' of a prefill"):
        PrefillStep(weights, state, "best")
    with pytest.raises(KernelError, match=r'relayout\("IH"\)'):
        PrefillStep(weights, state, "chain")
    with pytest.raises(KernelError, match="no rows of this prefill are watched"):
        PrefillStep(weights, state).expert_ids()


# ------------------------------------------------------------------ the measurement

RATES = Rates(label="a machine", kind="made up", bandwidth=1e11, flops={"fp32": 1e9, "bf16": 1e9})


def test_padding_counts_the_rows_of_blocks(one_thread: None) -> None:
    step = PrefillStep(made("naive"), PrefillState(made("naive"), 1, 1, 0), "naive")
    ids = torch.tensor([[0, 1]] * 65 + [[0, 2]] * 64)  # 129 pairs of 0, 65 of 1, 64 of 2
    step.chosen = Choices(layers=[None, (ids, ids.float())])
    assert padding(step) == {
        "64": (192 + 128 + 64) / 258,
        "128": (256 + 128 + 128) / 258,
        "256": (256 * 3) / 258,
        "most_tokens_of_an_expert": 129,
    }


def test_a_form_that_is_wrong_is_not_timed(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = made("ours")
    state = PrefillState(weights, 1, 4, 5)
    found = measure_prefill(weights, state, ["naive", "chain"], RATES, rounds=2)
    assert weights.down_layout == "HI"
    flops = counted_flops(weights, state)["all"]
    row, interpreted = found["variants"]["naive"], found["variants"]["chain"]
    assert row["failures"] == interpreted["failures"] == []
    assert row["flops_per_second"] == pytest.approx(flops / row["milliseconds"] * 1e3)
    assert row["fraction_of_peak"] == pytest.approx(row["flops_per_second"] / 1e9)
    assert "milliseconds" not in interpreted  # right, and no speed
    assert found["floor_milliseconds"] == pytest.approx(flops / 1e9 * 1e3)
    right = PrefillStep._attention

    def wrong(self: PrefillStep, *args: Any) -> Tensor:
        return right(self, *args) * torch.linspace(1, 2, weights.shapes.hidden)

    monkeypatch.setattr(PrefillStep, "_attention", wrong)
    found = measure_prefill(weights, state, ["naive"], RATES, rounds=2)
    assert "a layer's error" in found["variants"]["naive"]["failures"][0]
    assert "milliseconds" not in found["variants"]["naive"]
    assert found["milliseconds"] is None
    text = io.StringIO()
    page(found, Console(file=text, width=120))
    assert "FAILED" in text.getvalue()


def test_the_command_gives_one_document() -> None:
    app = typer.Typer()
    app.command()(prefill)
    small = ["--model", "beam-tiny", "--tp", "2", "--sequences", "2", "--tokens", "3", "--layers",
             "2", "--device", "cpu", "--rounds", "2", "--context", "7"]  # fmt: skip
    result = CliRunner().invoke(app, [*small, "--variants", "naive", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["kind"], found["sequences"], found["tokens"], found["context"]) == (
        "prefill", 2, 3, 7,
    )  # fmt: skip
    assert list(found["variants"]) == ["naive"]
    result = CliRunner().invoke(app, ["--model", "beam-tiny"])
    assert isinstance(result.exception, KernelError)
    assert "no CUDA GPU" in str(result.exception)
