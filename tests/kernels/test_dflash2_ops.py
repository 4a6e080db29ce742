"""DFlash2's operations, reference and Triton, against the float64 oracle; on a GPU where one is."""

from __future__ import annotations

import importlib
import math
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from workbench.kernels import oracle_dflash2 as oracle
from workbench.kernels import reference_dflash2 as reference
from workbench.kernels import triton_runtime

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
# Largest ||error|| / ||exact||: one bfloat16 rounding of random values is 1.7e-3, two are 2.4e-3.
ONE_ROUNDING = {BF16: 2e-3, FP32: 5e-7}
SEVERAL_ROUNDINGS = {BF16: 4e-3, FP32: 1e-6}


@pytest.fixture(params=["torch", "triton"])
def variant(request: pytest.FixtureRequest) -> ModuleType | SimpleNamespace:
    """A module with the five operations."""
    if request.param == "torch":
        return reference
    return triton_variant()


def triton_variant() -> SimpleNamespace:
    reason = triton_runtime.why_not(DEVICE)
    if reason is not None:
        pytest.skip(reason)
    found = {}
    for name in ("triton_dflash2", "triton_selector"):
        found |= vars(importlib.import_module(f"workbench.kernels.{name}"))
    return SimpleNamespace(**found)


class Draw:
    """Random tensors of one test, the same on every device."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(DEVICE, dtype)

    def wider(self, rows: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Rows that are views of a wider tensor, as those of a packed product are."""
        return self.normal(rows, 3, *shape, dtype=dtype, scale=scale)[:, 1]

    def integers(self, most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=self.generator).to(DEVICE)

    def distinct(self, most: int, rows: int, count: int) -> Tensor:
        picks = [torch.randperm(most, generator=self.generator)[:count] for _ in range(rows)]
        return torch.stack(picks).to(DEVICE) if picks else torch.empty(0, count, device=DEVICE)


def error(got: Tensor, exact: Tensor) -> float:
    assert got.shape == exact.shape
    return float((got.cpu().double() - exact).norm() / exact.norm())


def poison(monkeypatch: pytest.MonkeyPatch, variant: ModuleType) -> None:
    """Outputs come from torch.empty: what a variant leaves unwritten is NaN or nonsense."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        made = empty(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(math.nan if made.is_floating_point() else -(2**40))

    monkeypatch.setattr(variant.torch, "empty", poisoned)


# -- convolution --------------------------------------------------------------------------------

# rows, query_len, groups, channels a group, taps
CONVOLUTIONS = [
    (16, 8, 24, 16, 2),
    (15, 5, 10, 12, 4),  # nothing a power of two
    (9, 9, 7, 4, 3),
    (6, 1, 3, 16, 2),  # one row a request: no row before
    (6, 2, 40, 1, 4),  # more taps than rows
    (70, 7, 5, 8, 1),
    (1, 8, 9, 32, 2),
]


def convolution(draw: Draw, case: tuple[int, int, int, int, int], dtype: torch.dtype) -> dict:
    rows, query_len, groups, width, taps = case
    return dict(
        x=draw.wider(rows, groups * width, dtype=dtype),
        coefficients=draw.normal(rows, 2, taps, groups, dtype=dtype, scale=0.3)[:, 1],
        base=draw.normal(taps, groups * width, dtype=dtype),
        query_len=query_len,
    )


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_dynamic_conv(
    variant: ModuleType,
    case: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = convolution(Draw(1), case, dtype)
    poison(monkeypatch, variant)
    got = variant.dynamic_conv(**inputs)
    monkeypatch.undo()
    exact = oracle.dynamic_conv(**inputs)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert error(got, exact) < ONE_ROUNDING[dtype]
    if dtype == BF16:  # rounded once, element by element: half a unit in the last place
        slack = 1e-5 * exact.abs().max()
        assert bool(((got.cpu().double() - exact).abs() <= 2**-8 * exact.abs() + slack).all())


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_conv_residual_norm(
    variant: ModuleType,
    case: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = Draw(2)
    inputs = convolution(draw, case, dtype)
    rows, hidden = inputs["x"].shape
    residual = draw.wider(rows, hidden, dtype=dtype, scale=3.0)
    before = residual.clone()
    weight = draw.normal(hidden, dtype=dtype)
    arguments = (*list(inputs.values())[:3], residual, weight, 1e-3, inputs["query_len"])
    poison(monkeypatch, variant)
    stream, normed = variant.conv_residual_norm(*arguments)
    monkeypatch.undo()
    exact_stream, exact_normed = oracle.conv_residual_norm(*arguments)
    assert stream.dtype == normed.dtype == dtype
    assert error(stream, exact_stream) < SEVERAL_ROUNDINGS[dtype]
    assert error(normed, exact_normed) < SEVERAL_ROUNDINGS[dtype]
    assert torch.equal(residual, before)
    if dtype == BF16:  # the norm is of the rounded stream, and is rounded once
        wide = stream.cpu().double()
        factor = (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
        again = wide * factor * weight.cpu().double()
        assert bool(((normed.cpu().double() - again).abs() <= 2**-7.99 * again.abs()).all())


def test_convolution_with_the_first_tap_alone_is_the_identity(variant: ModuleType) -> None:
    draw = Draw(3)
    x = draw.normal(24, 96, dtype=BF16)
    base = torch.zeros(2, 96, dtype=BF16, device=DEVICE)
    base[0] = 1.0
    assert torch.equal(variant.dynamic_conv(x, draw.normal(24, 2, 6, dtype=BF16) * 0, base, 8), x)


def test_convolution_looks_back_within_its_request_only(variant: ModuleType) -> None:
    inputs = convolution(Draw(4), (24, 8, 6, 16, 3), FP32)
    before = variant.dynamic_conv(**inputs)
    changed = inputs["x"].clone()
    changed[11] = math.inf  # row 3 of the second request
    after = variant.dynamic_conv(**{**inputs, "x": changed})
    differ = (before != after).any(-1).nonzero().flatten().tolist()
    assert differ == [11, 12, 13]
    changed = inputs["x"].clone()
    changed[7] = math.nan  # the last row of the first request: no tap of the second may read it
    after = variant.dynamic_conv(**{**inputs, "x": changed})
    assert not bool(after[8:].isnan().any())


# -- selector -----------------------------------------------------------------------------------

# requests, positions, candidates, rank
SELECTORS = [(2, 3, 16, 32), (3, 2, 5, 20), (1, 1, 1, 256), (1, 2, 20, 96), (1, 2, 64, 7)]


def selector(draw: Draw, case: tuple[int, int, int, int], dtype: torch.dtype) -> dict:
    batch, positions, top_k, rank = case
    vocabulary = 150
    hidden = draw.normal(batch, positions + 1, rank, dtype=dtype)[:, 1:]
    return dict(
        predecessors=draw.normal(vocabulary, rank, dtype=dtype),
        successors=draw.normal(vocabulary, rank, dtype=dtype),
        ids=draw.distinct(vocabulary, batch * positions, top_k).view(batch, positions, top_k),
        unary=draw.normal(batch, positions, top_k, scale=4.0),
        hidden=hidden,
        anchors=draw.integers(vocabulary, batch, 8)[:, 0],
    )


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("case", SELECTORS)
def test_candidate_edges(
    variant: ModuleType,
    case: tuple[int, int, int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = selector(Draw(5), case, dtype)
    poison(monkeypatch, variant)
    got = variant.candidate_edges(**inputs)
    monkeypatch.undo()
    exact = oracle.candidate_edges(**inputs)
    assert got.dtype == FP32
    # In units of what is added up: an edge alone can be a small difference of large numbers.
    whole = oracle.candidate_edges(
        **{k: v.abs() if v.is_floating_point() else v for k, v in inputs.items()}
    )
    assert float((got.double() - exact).norm() / whole.norm()) < SEVERAL_ROUNDINGS[dtype]
    # One anchor, equal rows; to a rounding, since the interpreter's products are numpy's, whose
    # rows may be added up in different orders.
    assert error(got[:, 0], got[:, 0, :1].expand_as(got[:, 0])) < SEVERAL_ROUNDINGS[dtype]
    if dtype == BF16:  # what is added to the unary logit is a bfloat16
        pair = got.double() - inputs["unary"].double()[:, :, None]
        assert float((pair - pair.to(BF16).double()).abs().max()) < 2e-6 * float(got.abs().max())


WALKS = [(3, 7, 16), (2, 5, 5), (1, 1, 1), (2, 3, 33), (1, 8, 64)]


@pytest.mark.parametrize("heat", [0.0, 0.7])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("case", WALKS)
def test_selector_walk(
    variant: ModuleType,
    case: tuple[int, int, int],
    noisy: bool,
    heat: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, positions, top_k = case
    draw = Draw(6)
    # A coarse grid makes ties common: the first maximum must win among them.
    edges = draw.normal(batch, positions, top_k, top_k, scale=3.0).round()
    if top_k > 1:
        edges[..., 1] = -math.inf  # a candidate in the padding of the vocabulary
    ids = draw.distinct(999, batch * positions, top_k).view(batch, positions, top_k)
    temperature = torch.full((batch,), heat, device=DEVICE)
    temperature[0] = 0.0  # greedy and sampled requests in one batch
    noise = -(-draw.normal(batch, positions, top_k).sigmoid().log()).log() if noisy else None
    poison(monkeypatch, variant)
    tokens, realized = variant.selector_walk(edges, ids, temperature, noise)
    monkeypatch.undo()
    regret = oracle.walk_regret(edges, ids, temperature, noise, tokens, realized)
    assert tokens.dtype == torch.int64
    assert float(regret.max()) <= 2e-6
    assert bool((regret[0] == 0).all())
    same = reference.selector_walk(edges, ids, temperature, noise)
    assert torch.equal(tokens, same[0])
    assert torch.equal(realized, same[1])


def test_the_walk_finds_what_was_hidden_for_it(variant: ModuleType) -> None:
    edges = torch.zeros(1, 3, 4, 4, device=DEVICE)
    edges[0, 0, 0, 2] = 5.0  # slot 0 -> 2 -> 3 -> 1, and louder edges where no path goes
    edges[0, 1, 2, 3] = 1.0
    edges[0, 1, 1, 0] = 99.0
    edges[0, 2, 3, 1] = 1.0
    edges[0, 2, 0, 2] = 99.0
    ids = torch.arange(12, device=DEVICE).view(1, 3, 4) + 100
    cold, hot = torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
    tokens, realized = variant.selector_walk(edges, ids, cold, None)
    assert tokens.tolist() == [[102, 107, 109]]
    assert realized[0].tolist() == [[0, 0, 5, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    noise = torch.zeros(1, 3, 4, device=DEVICE)
    noise[0, 0, 1] = 6.0  # takes the first step to slot 1, whose loud edge leads to slot 0
    tokens, realized = variant.selector_walk(edges, ids, hot, noise)
    assert tokens.tolist() == [[101, 104, 110]]
    assert realized[0].tolist() == [[0, 0, 5, 0], [99, 0, 0, 0], [0, 0, 99, 0]]
    assert variant.selector_walk(edges, ids, cold, noise)[0].tolist() == [[102, 107, 109]]


def test_regret_notices_every_kind_of_wrong_walk() -> None:
    draw = Draw(7)
    edges = draw.normal(1, 4, 6, 6).cpu()
    edges[0, 1] = 0.0  # all tied
    ids = draw.distinct(50, 4, 6).view(1, 4, 6).cpu()
    cold, hot = torch.zeros(1), torch.ones(1)
    noise = draw.normal(1, 4, 6).cpu()
    tokens, realized = reference.selector_walk(edges, ids, cold, None)

    def judge(tokens: Tensor, realized: Tensor, noise: Tensor | None = None) -> list[float]:
        heat = cold if noise is None else hot
        return oracle.walk_regret(edges, ids, heat, noise, tokens, realized)[0].tolist()

    assert judge(tokens, realized) == [0.0] * 4
    foreign = tokens.clone()
    foreign[0, 2] = 51  # no candidate
    assert judge(foreign, realized) == [0.0, 0.0, math.inf, math.inf]
    shifted = realized.clone()
    shifted[0, 3, 5] = shifted[0, 3, 5].nextafter(torch.tensor(9.0))
    assert judge(tokens, shifted) == [0.0, 0.0, 0.0, math.inf]
    late = tokens.clone()
    late[0, 1] = ids[0, 1, 1]  # tied, but not the first
    assert judge(late, realized)[:2] == [0.0, math.inf]
    worst = tokens.clone()
    slot = int(realized[0, 3].argmin())
    worst[0, 3] = ids[0, 3, slot]
    gap = float(realized[0, 3].double().max() - realized[0, 3].double().min())
    assert judge(worst, realized) == [0.0, 0.0, 0.0, gap]
    sampled, scores = reference.selector_walk(edges, ids, hot, noise)
    assert max(judge(sampled, scores, noise)) <= 1e-6
    # The greedy walk judged as a sampled one: short of the maximum by what the noise decided.
    assert max(judge(tokens, realized, noise)) > 0.01


# -- context ------------------------------------------------------------------------------------

# tokens, layers, kv heads, head_dim
CONTEXTS = [(7, 5, 2, 128), (1, 1, 1, 16), (5, 2, 3, 24), (40, 2, 8, 32)]


def context(
    draw: Draw, case: tuple[int, int, int, int], dtype: torch.dtype, cache: torch.dtype
) -> dict:
    tokens, layers, heads, dim = case
    slots = tokens + 9
    rows = torch.randperm(slots, generator=draw.generator)[:tokens].to(DEVICE)
    rows[2::3] = -1
    positions = draw.integers(64, tokens)
    positions[2::3] = 10**12  # of a token without a row: must not be looked up
    # Keys and values of a cache lie side by side: both are strided views.
    store = draw.normal(layers, slots, heads, 2, dim).to(cache)
    angle = draw.normal(64, dim // 2, scale=9.0)
    return dict(
        kv=draw.normal(tokens, 2, layers, 2, heads, dim, dtype=dtype)[:, 1],
        weight=draw.normal(layers, dim, dtype=dtype),
        positions=positions,
        rope=torch.cat((angle.cos(), angle.sin()), -1).to(dtype),
        k_rows=store[:, :, :, 0],
        v_rows=store[:, :, :, 1],
        rows=rows,
        eps=1e-6,
        k_scale=None,
        v_scale=None,
    )


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("case", CONTEXTS)
def test_context_kv_write(
    variant: ModuleType, case: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    inputs = context(Draw(8), case, dtype, dtype)
    before_k, before_v = inputs["k_rows"].clone(), inputs["v_rows"].clone()
    exact_k, exact_v = oracle.context_kv_write(**inputs)
    variant.context_kv_write(**inputs)
    assert error(inputs["k_rows"], exact_k) < SEVERAL_ROUNDINGS[dtype]
    assert torch.equal(inputs["v_rows"].cpu().double(), exact_v)  # values are copied
    unchanged = sorted(set(range(before_k.shape[1])) - set(inputs["rows"].tolist()))
    assert torch.equal(inputs["k_rows"][:, unchanged], before_k[:, unchanged])
    assert torch.equal(inputs["v_rows"][:, unchanged], before_v[:, unchanged])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("case", CONTEXTS[:3])
def test_context_kv_write_to_fp8(
    variant: ModuleType, case: tuple[int, int, int, int], dtype: torch.dtype, scaled: bool
) -> None:
    draw = Draw(9)
    inputs = context(draw, case, dtype, FP8)
    layers = case[1]
    if scaled:  # the first layer's scale is so small that its values saturate
        inputs["k_scale"] = draw.normal(layers).abs() * 0.05 + 0.02
        inputs["v_scale"] = draw.normal(layers).abs() * 0.05 + 0.02
        inputs["k_scale"][0] = inputs["v_scale"][0] = 0.001
    exact = oracle.context_kv_write(**inputs)
    unchanged = sorted(set(range(inputs["k_rows"].shape[1])) - set(inputs["rows"].tolist()))
    before = [inputs[c][:, unchanged].float() for c in ("k_rows", "v_rows")]
    same = {**inputs, "k_rows": inputs["k_rows"].clone(), "v_rows": inputs["v_rows"].clone()}
    reference.context_kv_write(**same)
    variant.context_kv_write(**inputs)
    for index, cache in enumerate(("k_rows", "v_rows")):
        scale = inputs[cache[0] + "_scale"]
        unit = torch.ones(layers, device=DEVICE) if scale is None else scale
        got = inputs[cache].cpu().double() * unit.cpu().double()[:, None, None, None]
        # Three bits of mantissa: half a unit is 1/16 of the value, 2**-10 below the normal range.
        bound = exact[index].abs() / 16 + 2**-10 * unit.cpu().double().max() + 1e-6
        if dtype == BF16:  # and before it, BF16 roundings of the norm and of the rotated pair
            bound += 2**-7 * exact[index].abs().max()
        assert bool(((got - exact[index]).abs() <= bound * 1.01).all())
        assert torch.equal(inputs[cache][:, unchanged].float(), before[index])
        differ = inputs[cache].view(torch.uint8) != same[cache].view(torch.uint8)
        assert float(differ.float().mean()) < 0.002  # the last bit of a norm seldom shows in FP8
    if scaled:
        assert float(inputs["k_rows"][0].float().abs().max()) == 448.0


def test_nothing_is_written_where_no_token_has_a_row(variant: ModuleType) -> None:
    for cache in (BF16, FP8):
        inputs = context(Draw(10), (4, 2, 2, 16), BF16, cache)
        inputs["rows"][:] = -1
        inputs["positions"][:] = -5
        before = inputs["k_rows"].float(), inputs["v_rows"].float()
        variant.context_kv_write(**inputs)
        assert torch.equal(inputs["k_rows"].float(), before[0])
        assert torch.equal(inputs["v_rows"].float(), before[1])


# -- all of them --------------------------------------------------------------------------------


def test_empty_batches(variant: ModuleType) -> None:
    draw = Draw(11)
    inputs = convolution(draw, (0, 8, 4, 16, 2), BF16)
    assert variant.dynamic_conv(**inputs).shape == (0, 64)
    nothing = torch.empty(0, 64, dtype=BF16, device=DEVICE)
    both = variant.conv_residual_norm(
        *list(inputs.values())[:3], nothing, draw.normal(64, dtype=BF16), 1e-6, 8
    )
    assert [t.shape for t in both] == [(0, 64), (0, 64)]
    for batch, positions in ((0, 7), (2, 0)):
        ids = torch.zeros(batch, positions, 4, dtype=torch.int64, device=DEVICE)
        table = draw.normal(9, 8, dtype=BF16)
        hidden = draw.normal(batch, positions, 8, dtype=BF16)
        anchors = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        edges = variant.candidate_edges(table, table, ids, ids.float(), hidden, anchors)
        assert edges.shape == (batch, positions, 4, 4)
        tokens, realized = variant.selector_walk(edges, ids, anchors.float(), None)
        assert tokens.shape == (batch, positions)
        assert realized.shape == (batch, positions, 4)
    inputs = context(draw, (0, 2, 2, 16), BF16, BF16)
    before = inputs["k_rows"].clone()
    variant.context_kv_write(**inputs)
    assert torch.equal(inputs["k_rows"], before)


def test_triton_rounds_where_the_reference_does() -> None:
    """Bit for bit, but for values within a float32 rounding of the middle between two bfloat16."""
    variant = triton_variant()
    draw = Draw(12)
    inputs = convolution(draw, (64, 8, 20, 16, 2), BF16)
    residual, weight = draw.normal(64, 320, dtype=BF16), draw.normal(320, dtype=BF16)
    finish = (*list(inputs.values())[:3], residual, weight, 1e-6, 8)
    edge = selector(draw, (2, 7, 16, 256), BF16)
    write = context(draw, (48, 5, 2, 128), BF16, BF16)
    copy = {**write, "k_rows": write["k_rows"].clone(), "v_rows": write["v_rows"].clone()}
    reference.context_kv_write(**write)
    variant.context_kv_write(**copy)
    pairs = {
        "dynamic_conv": (reference.dynamic_conv(**inputs), variant.dynamic_conv(**inputs)),
        "residual": (
            reference.conv_residual_norm(*finish)[0],
            variant.conv_residual_norm(*finish)[0],
        ),
        "norm": (reference.conv_residual_norm(*finish)[1], variant.conv_residual_norm(*finish)[1]),
        "edges": (reference.candidate_edges(**edge), variant.candidate_edges(**edge)),
        "keys": (write["k_rows"], copy["k_rows"]),
        "values": (write["v_rows"], copy["v_rows"]),
    }
    differ = {name: float((a != b).float().mean()) for name, (a, b) in pairs.items()}
    assert max(differ.values()) < 1e-3, differ
    assert differ["values"] == 0.0


TILINGS = {
    "dynamic_conv": ("_conv_tile", [(1, 2, 4), (4, 8, 4)]),
    "conv_residual_norm": ("_norm_tile", [(1, 4, 4), (2, 16, 4)]),  # several pieces a row
    "candidate_edges": ("_edges_tile", [(False, 4), (True, 2)]),  # sums; a matrix product
    "context_kv_write": ("_context_tile", [(1, 1, 4), (8, 2, 4)]),
}


@pytest.mark.parametrize("op", TILINGS)
def test_the_choice_of_tiles_changes_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen for a shape on a GPU is not what the interpreter chooses: try several."""
    variant = triton_variant()
    draw = Draw(13)

    def results() -> list[Tensor]:
        if op == "candidate_edges":
            return [variant.candidate_edges(**edge)]
        if op == "dynamic_conv":
            return [variant.dynamic_conv(**conv)]
        if op == "conv_residual_norm":
            return list(variant.conv_residual_norm(*finish))
        caches = {name: write[name].clone() for name in ("k_rows", "v_rows")}
        variant.context_kv_write(**{**write, **caches})
        return list(caches.values())

    conv = convolution(draw, (10, 5, 20, 12, 2), FP32)
    rest = draw.normal(10, 240), draw.normal(240), 1e-6, 5
    finish = (*list(conv.values())[:3], *rest)
    edge = selector(draw, (2, 2, 13, 40), FP32)
    write = context(draw, (11, 2, 3, 24), FP32, FP32)
    usual = results()
    name, tilings = TILINGS[op]
    for tiling in tilings:
        monkeypatch.setattr(variant, name, lambda *_, tiling=tiling: tiling)
        for got, expected in zip(results(), usual, strict=True):
            assert error(got, expected.cpu().double()) < 1e-6
