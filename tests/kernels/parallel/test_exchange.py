"""Exchanges inside a kernel: the sum of all ranks, the same bits everywhere, and the steps on them.

On a CPU the kernels are interpreted, in processes that map each other's inboxes; on one GPU the
ranks are streams of one process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.parallel.mailbox import PATIENCE, Mailbox, words_of
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.targets import job
from workbench.kernels.parallel.tp_chain import TpRankStep
from workbench.kernels.parallel.tp_fused import whole_stream
from workbench.kernels.rank import RankState, RankWeights
from workbench.kernels.rank.chain import RankStep
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.reference import boundary
from workbench.kernels.triton_compile import compile_in_child
from workbench.kernels.triton_runtime import why_not
from workbench.model.presets import resolve

from .conftest import rank_of, whole_model

runs = pytest.mark.skipif(why_not("cpu") is not None, reason="Triton's interpreter does not run")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

FP32 = 1e-4
STEPS = 3
FORMS = [("nccl", None), ("boundary", False), ("boundary", True)]


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """What an all-reduce of rounded parts is: added in float32, rounded once."""
    return torch.stack([each.float() for each in ranks.gather(x)]).sum(0).to(x.dtype)


def sums(ranks: Ranks, dtype: torch.dtype, hidden: int) -> None:
    from workbench.kernels.parallel import triton_exchange as tx

    box = Mailbox.open(ranks, hidden, dtype, rows=4)
    done = 0
    for two in (False, True):
        for rows in (1, 3):
            x = torch.randn(
                rows, hidden, generator=torch.Generator().manual_seed(10 * rows + ranks.rank)
            )
            x = x.to(dtype)
            x[0, 0], x[-1, -1] = -0.0, 3e38 if dtype == torch.float32 else 1e38
            got = tx.exchanges(box, x, 3, two=two)
            assert torch.equal(got, summed(x, ranks)), f"two {two}, {rows} rows"
            done += 3
            assert int(box.count) == done
    box.check()


def steps(ranks: Ranks, forms: list[Any]) -> dict[str, Any]:
    """Logits, tokens and the stream's length of consecutive steps in every form."""
    from workbench.kernels.parallel.tp_fused import TpFusedStep
    from workbench.kernels.parallel.tp_load import TpLoadStep

    found: dict[str, Any] = {}
    for kind, exchange, two, batch in forms:
        weights, state = rank_of(whole_model(batch=batch), ranks.rank, ranks.world)
        box = Mailbox.open(ranks, weights.shapes.hidden, torch.float32, rows=batch)
        step: Any
        if kind == "chain":
            step = TpRankStep(weights, state, ranks, {"reduced_boundary": exchange}, mailbox=box)
        elif kind == "fused":
            step = TpFusedStep(weights, state, ranks, exchange=exchange, mailbox=box)
            if exchange == "products":  # full layers whose parts are merged by their own kernel
                config = dataclasses.replace(step.config, sliding_splits=1)
                step = TpFusedStep(
                    weights, state, ranks, exchange=exchange, mailbox=box, config=config
                )
        else:
            load = LoadState.over(state, weights)
            step = TpLoadStep(weights, load, ranks, exchange=exchange, mailbox=box, two=two)
        rows = []
        for _ in range(STEPS):
            step()
            assert torch.equal(state.token, state.next_token)
            rows.append((state.logits.tolist(), state.token.tolist()))
        step.check()
        assert state.position.tolist() == [state.context + STEPS] * batch
        h = whole_stream(step)
        lengths = h.flatten(1).double().norm(dim=1).tolist()
        found[f"{kind} {exchange} {two} {batch}"] = {"steps": rows, "h": lengths}
    return found


def all_of_it(ranks: Ranks, forms: list[Any]) -> dict[str, Any]:
    sums(ranks, torch.bfloat16, 80)
    sums(ranks, torch.float32, 48)
    return steps(ranks, forms)


def both_ways(ranks: Ranks) -> list[Any]:
    """BF16: whether products that send give the bits that the boundary's kernel sends for them."""
    from workbench.kernels.parallel.tp_fused import TpFusedStep

    found = []
    for exchange in ("boundary", "products"):
        weights, state = rank_of(whole_model(dtype=torch.bfloat16), ranks.rank, ranks.world)
        box = Mailbox.open(ranks, weights.shapes.hidden, torch.bfloat16, rows=2)
        step = TpFusedStep(weights, state, ranks, exchange=exchange, mailbox=box)
        rows = []
        for _ in range(2):
            step()
            rows.append((state.logits.tolist(), state.token.tolist()))
        step.check()
        assert int(box.count) == 2 * 2 * (len(weights.layers) + 1)
        assert step._attended.any() == step._moved.any() == (exchange == "boundary")
        found.append((rows, whole_stream(step).tolist()))
    assert found[0] == found[1]
    return found[1][0]


def one_silent(ranks: Ranks) -> str:
    """Rank 1 sends nothing: rank 0 gives up, says so, and waits no more."""
    from workbench.kernels.parallel import triton_exchange as tx

    box = Mailbox.open(ranks, 16, torch.float32, rows=2)
    box.patience = 50
    said = ""
    if ranks.rank == 0:
        tx.exchanges(box, torch.ones(2, 16), 1)
        try:
            box.check()
        except KernelError as error:
            said = str(error)
    ranks.barrier()
    return said


def hold(found: list[Any]) -> None:
    """Every form decodes what the whole model does, alone."""
    for name, rank in found[0].items():
        batch = int(name.split()[-1])
        weights, state = whole_model(batch=batch)
        step = RankStep(weights, state)
        owners = set()
        for number in range(STEPS):
            step()
            each = [torch.tensor(one[name]["steps"][number][0]) for one in found]
            assert (torch.cat(each, -1) - state.logits).abs().max() < FP32, name
            for one in found:
                assert one[name]["steps"][number][1] == state.token.tolist(), name
            owners |= {2 * token // weights.shapes.vocabulary for token in state.token.tolist()}
        assert owners == {0, 1}, "a token of each rank's vocabulary"
        wanted = torch.stack(list(step.h)).flatten(1).double().norm(dim=1)
        assert (torch.tensor(rank["h"]) - wanted).abs().max() < FP32 * wanted.max()


@runs
def test_processes_exchange_and_decode(together: Callable[..., list[Any]]) -> None:
    before = set(Path("/dev/shm").glob("workbench-mailbox-*"))
    hold(together(2, all_of_it, [("chain", "exchange", None, 1), ("fused", "products", None, 1)]))
    assert set(Path("/dev/shm").glob("workbench-mailbox-*")) <= before, "an inbox was left behind"


@runs
@pytest.mark.full
def test_every_form_decodes(together: Callable[..., list[Any]]) -> None:
    forms = [("chain", "nccl", None, 1), ("fused", "nccl", None, 1), ("chain", "exchange", None, 3),
             ("fused", "boundary", None, 1)]  # fmt: skip
    hold(together(2, all_of_it, [*forms, *(("load", *form, 3) for form in FORMS)]))


@runs
@pytest.mark.full
def test_products_that_send_change_no_bit(together: Callable[..., list[Any]]) -> None:
    found = together(2, both_ways)
    assert [token for _, token in found[0]] == [token for _, token in found[1]]
    assert found[0] != found[1], "each rank has logits of its own"


def in_slot(box: Mailbox, number: int, dtype: torch.dtype) -> Tensor:
    """What an inbox holds of exchange ``number``: the first row ``[world, H]`` of each rank."""
    size = 2 * box.world * box.rows * box.words
    words = box.inbox[:size].view(2, box.world, box.rows, box.words)[number % 2]
    assert torch.equal(words[:, 0] >> 32, torch.full_like(words[:, 0], number))
    assert not words[:, 1:].any()
    return words[:, 0].to(torch.int32).contiguous().view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=runs), pytest.param("cuda", marks=gpu)]
)
def test_products_send_their_rows_to_all(dtype: torch.dtype, device: str) -> None:
    """Three ranks one after the other: all of them send, then each receives.

    Small whole numbers, so that every sum is exact and its one rounding known.
    """
    from workbench.kernels.parallel import triton_exchange as tx
    from workbench.kernels.parallel import triton_push as push

    world, hidden, tile, dependent = 3, 80, (32, 4), False
    random = torch.Generator().manual_seed(5)

    def whole(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randint(-9, 10, shape, generator=random).to(device, kind)

    boxes = Mailbox.virtual(world, hidden, dtype, rows=2, device=device)
    for box in boxes:
        box.count.fill_(6)
    x, matrix = [whole(40) for _ in boxes], [whole(hidden, 40) for _ in boxes]
    merged = [2 * whole(2, 3, 16, kind=torch.float32) for _ in boxes]
    projection = [whole(hidden, 48) for _ in boxes]
    act, down = [whole(2, 40) for _ in boxes], [whole(5, hidden, 40) for _ in boxes]
    ids = torch.tensor([[4, 1], [0, 4], [3, 2]], device=device)
    shares = torch.tensor([0.5, 0.25], device=device)
    none = torch.zeros(48, device=device, dtype=dtype)
    # A gate of 0 is a half, two parts of equal weight their mean.
    o = [(each.double().mean(0) / 2).flatten() for each in merged]
    wanted = [
        [m.double() @ v.double() for m, v in zip(matrix, x, strict=True)],
        [m.double() @ v for m, v in zip(projection, o, strict=True)],
        [
            (shares.double()[:, None] * torch.einsum("ehk,ek->eh", d[at].double(), a.double()))
            .sum(0).to(dtype).double() * 2
            for d, a, at in zip(down, act, ids, strict=True)
        ],
    ]  # fmt: skip
    for call, each in enumerate(wanted, 1):
        for r, box in enumerate(boxes):
            if call == 1:
                push.launch_matvec(box, call, x[r], matrix[r], tile, dependent)
            elif call == 2:
                push.launch_o_proj(
                    box, call, merged[r], torch.zeros(2, 3, device=device), none, none[:3],
                    projection[r], tile, dependent,
                )  # fmt: skip
            else:
                push.launch_experts_down(
                    box, call, act[r], down[r], ids[r], shares, 2.0, tile, dependent
                )
        parts = torch.stack(each).to(dtype)
        exact = dtype == torch.float32 or call == 3  # there the wanted is rounded by now
        assert torch.equal(parts.double(), torch.stack(each)) == exact
        got = []
        for box in boxes:
            assert torch.equal(in_slot(box, 6 + call + 1, dtype), parts)
            stream, out = whole(1, hidden), whole(1, hidden)
            h = torch.arange(hidden, device=device, dtype=dtype)[None] / 16
            post = following = torch.ones(hidden, device=device, dtype=dtype)
            tx.launch_exchange(
                box, call, h, torch.full_like(h, math.nan), None, 1, post, following, stream, out,
                (0.5, 0.75), 1e-6, two=False, pushed=True,
            )  # fmt: skip
            got.append((stream, out))
            box.check()
        summed = parts.float().sum(0, keepdim=True).to(dtype)
        for have, want in zip(
            got[0], boundary(h, summed, post, (0.5, 0.75), following, 1e-6), strict=True
        ):
            apart = (have.double() - want.double()).norm() / want.double().norm()
            assert apart < torch.finfo(dtype).eps
        assert all(torch.equal(a, b) for one in got[1:] for a, b in zip(one, got[0], strict=True))


@runs
@pytest.mark.full
def test_an_odd_number_of_ranks_exchanges(together: Callable[..., list[Any]]) -> None:
    together(3, all_of_it, [])


@runs
def test_a_rank_that_sends_nothing_is_given_up(together: Callable[..., list[Any]]) -> None:
    said = together(2, one_silent)[0]
    assert "rank 0 of 2 waited" in said
    assert "start the ranks again" in said


def test_words_hold_whole_values() -> None:
    assert words_of(5120, torch.bfloat16) == 2560
    assert words_of(5120, torch.float32) == 5120
    with pytest.raises(KernelError, match="no whole number of words"):
        words_of(7, torch.bfloat16)
    with pytest.raises(KernelError, match="not float16"):
        words_of(8, torch.float16)
    box = Mailbox.virtual(2, 8, torch.float32, rows=2, device="cpu")[0]
    with pytest.raises(KernelError, match="rows=3"):
        box.refuse_rows(3)


def test_owners_take_over_where_one_shot_receives_more() -> None:
    tx = pytest.importorskip("workbench.kernels.parallel.triton_exchange")
    assert not any(tx.two_shots(rows, 2) for rows in (1, 8, 128))
    assert [tx.two_shots(rows, 8) for rows in (1, 4, 8, 32, 128)] == [
        False,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("wrong", "wanted"),
    [
        ("elsewhere", "it has nccl, boundary and products"),
        ("without", "exchange boundary needs memory"),
        ("without products", "exchange products needs memory"),
        ("norm", "leave norm_in_qkvg and norm_in_router out"),
        ("o_proj", r"cannot own 1 of them: give o_proj=\(2, 8\)"),
        ("down", r"give down=\(2, 8\)"),
        ("fp8_down", r"give fp8_down=\(2, 8\)"),
        ("dense_down", r"give dense_down=\(2, 8\)"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(wrong: str, wanted: str) -> None:
    tp_fused = pytest.importorskip("workbench.kernels.parallel.tp_fused")
    from workbench.kernels.rank.fused_config import FusedConfig

    weights, state = whole_model(dtype=torch.bfloat16)
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), backend="none")
    how: dict[str, Any] = {"exchange": "nccl"}
    if wrong == "elsewhere":
        how["exchange"] = "post"
    elif wrong == "without":
        how["exchange"] = "boundary"
    elif wrong == "without products":
        how["exchange"] = "products"
    elif wrong == "norm":
        how["config"] = FusedConfig(norm_in_router=True)
    else:
        sizes: dict[str, Any] = {wrong: (1, 8)}
        how["config"] = FusedConfig(**sizes)
        tp_fused.TpFusedStep(weights, state, ranks, **how)  # nothing is sent by its products
        how |= {"exchange": "products", "mailbox": Mailbox.open(ranks, weights.shapes.hidden)}
        # A word holds one value of float32.
        single = whole_model()
        of_single = Mailbox.open(ranks, weights.shapes.hidden, torch.float32)
        tp_fused.TpFusedStep(*single, ranks, **(how | {"mailbox": of_single}))
    with pytest.raises(KernelError, match=wanted):
        tp_fused.TpFusedStep(weights, state, ranks, **how)


def test_the_step_of_many_rows_has_no_products_that_send() -> None:
    tp_load = pytest.importorskip("workbench.kernels.parallel.tp_load")
    weights, state = whole_model(batch=2)
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), backend="none")
    box = Mailbox.open(ranks, weights.shapes.hidden, torch.float32)
    with pytest.raises(KernelError, match="no exchange 'products'; it has nccl and boundary"):
        tp_load.TpLoadStep(
            weights, LoadState.over(state, weights), ranks, exchange="products", mailbox=box
        )


def test_the_registry_knows_the_exchanges() -> None:
    assert registry.names("reduced_boundary") == ["nccl", "exchange"]
    with pytest.raises(KernelError, match="several ranks together"):
        registry.rules(reduced_boundary="exchange")
    weights, state = whole_model()
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), backend="none")
    with pytest.raises(KernelError, match="no variant 'post' of reduced_boundary"):
        TpRankStep(weights, state, ranks, {"reduced_boundary": "post"})
    step = TpRankStep(weights, state, ranks, {"reduced_boundary": "exchange"})
    if why_not("cpu") is None:
        with pytest.raises(KernelError, match=r"mailbox=Mailbox\.open"):
            step()


def test_a_variant_of_one_s_own_is_used(one_thread: None) -> None:
    """Registered as any other; it is told of both exchanges of every layer, in their order."""
    calls = []

    @registry.register("reduced_boundary", "mine")
    def mine(ranks, mailbox, call, h, partial, post, scale, following, eps):  # type: ignore[no-untyped-def]
        calls.append(call)
        return boundary(h, 2 * partial, post, scale, following, eps)

    try:
        assert registry.names("reduced_boundary")[-1] == "mine"
        weights, state = whole_model()
        ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), backend="none")
        TpRankStep(weights, state, ranks, {"reduced_boundary": "mine"})()
        assert calls == list(range(2 * len(weights.layers)))
        # A norm takes any factor out again, but for epsilon.
        other = whole_model()[1]
        RankStep(weights, other)()
        assert (state.logits - other.logits).abs().max() < FP32
        assert not torch.equal(state.logits, other.logits)
    finally:
        registry.unregister("reduced_boundary", "mine")


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "batch", "exchange"),
    [
        (2, 1, "boundary"), (8, 1, "boundary"), (2, 1, "products"), (8, 1, "products"),
        (2, 8, "boundary"), (8, 128, "boundary"),
    ],
)  # fmt: skip
def test_the_steps_compile_for_hopper_and_blackwell(world: int, batch: int, exchange: str) -> None:
    config = resolve("beam-501b").config
    formats: tuple[Any, ...] = ("same", "fp8") if exchange == "products" else ("same",)
    jobs = [job(config, world, batch, exchange=exchange, experts=each) for each in formats]
    found = compile_in_child(jobs, 250)
    assert [each for each in found if each.error] == []
    names = {each.kernel for each in found}
    assert {"exchange_rows", "exchange_embedding", "exchange_pick"} <= names
    senders = {"push_o_proj", "push_matvec", "push_experts_down"}
    assert names & senders == (senders if exchange == "products" else set())
    ended = {"o_proj", "experts_down"}  # by kernels that write their sums down
    assert names & ended == (ended if (batch, exchange) == (1, "boundary") else set())
    assert {each.target for each in found} >= {"sm_90", "sm_100"}
    ours = [each for each in found if each.kernel.startswith(("push", "exchange"))]
    if batch == 1:
        assert {each.spill_bytes for each in ours} == {0}


@gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("two", [False, True])
def test_ranks_as_streams_of_one_gpu(world: int, two: bool) -> None:
    from workbench.kernels.parallel import triton_exchange as tx

    rows, hidden, calls = 5, 5120, 6
    boxes = Mailbox.virtual(world, hidden, rows=rows)
    parts = [torch.randn(rows, hidden, device="cuda").bfloat16() for _ in range(world)]
    streams = [torch.cuda.Stream() for _ in range(world)]
    wanted = torch.stack([part.float() for part in parts])
    # A kernel's first launch waits for everything on the GPU, so it must not meet one that waits.
    for box, part in zip(boxes, parts, strict=True):
        box.patience = 1
        tx.exchanges(box, part, calls, two=two)
        torch.cuda.synchronize()
        with pytest.raises(KernelError, match="gave up"):
            box.check()
    for box in boxes:
        box.patience = PATIENCE
        for each in (box.inbox, box.count, box.lost):
            each.zero_()
    for _ in range(4):
        torch.cuda.synchronize()
        got = []
        for box, part, stream in zip(boxes, parts, streams, strict=True):
            with torch.cuda.stream(stream):  # as many rows as all ranks' programs find room for
                got.append(tx.exchanges(box, part, calls, two=two))
        torch.cuda.synchronize()
        for box in boxes:
            box.check()
    for each in got[1:]:
        assert torch.equal(each, got[0])
    apart = (got[0].double() - wanted.double().sum(0)).norm() / wanted.double().sum(0).norm()
    assert apart < torch.finfo(torch.bfloat16).eps
    assert math.isfinite(float(apart))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_decode_as_float64_says() -> None:
    """The first layers of the real rank: all kinds of them, one sequence and a batch."""
    from workbench.kernels.parallel.start import run_ranks

    request = {
        "model": "beam-501b", "config": resolve("beam-501b").config.to_dict(), "layers": 5,
        "batches": [1, 8], "contexts": [1000], "rounds": 5,
        "variants": ["fused_pdl", "fused_boundary", "load", "load_boundary"],
    }  # fmt: skip
    found = run_ranks("workbench.kernels.parallel.jobs:decode", request, 2)
    assert found["calls"][0]["exchange_us"] <= 12 < 2 * found["calls"][0]["nccl_us"]
    for run in found["runs"]:
        rows = {name: row for name, row in run["variants"].items() if row["milliseconds"]}
        assert [row["failures"] for row in rows.values()] == [[]] * len(rows)
        name = "fused" if run["batch"] == 1 else "load"
        slower = rows["fused_pdl" if run["batch"] == 1 else name]
        assert rows[f"{name}_boundary"]["milliseconds"] < slower["milliseconds"]


def test_a_compiled_step_needs_no_memory() -> None:
    """Tensors without memory are enough to compile: an inbox of them has places, too."""
    weights = RankWeights.random(resolve("beam-501b").config, 8, layers=1, device="meta")
    box = Mailbox.virtual(8, weights.shapes.hidden, device="meta")[-1]
    assert (box.rank, box.world, box.words) == (7, 8, 2560)
    assert box.inbox.numel() == 2 * (8 * 128 * 2560 + 128 * 2560 + 8 * 128 * 2)
    assert isinstance(RankState(weights, 16), RankState)
