"""Exchanges inside a kernel: the sum of all ranks, the same bits everywhere, and the steps on them.

On a CPU the kernels are interpreted, in processes that map each other's inboxes; on one GPU the
ranks are streams of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.parallel.mailbox import Mailbox, words_of
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
    hold(together(2, all_of_it, [("chain", "exchange", None, 1), ("fused", "boundary", None, 1)]))
    assert set(Path("/dev/shm").glob("workbench-mailbox-*")) <= before, "an inbox was left behind"


@runs
@pytest.mark.full
def test_every_form_decodes(together: Callable[..., list[Any]]) -> None:
    forms = [("chain", "nccl", None, 1), ("fused", "nccl", None, 1), ("chain", "exchange", None, 3)]
    hold(together(2, all_of_it, [*forms, *(("load", *form, 3) for form in FORMS)]))


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
        ("elsewhere", "they have nccl and boundary"),
        ("without", "Mailbox"),
        ("norm", "leave norm_in_qkvg and norm_in_router out"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(wrong: str, wanted: str) -> None:
    tp_fused = pytest.importorskip("workbench.kernels.parallel.tp_fused")
    from workbench.kernels.rank.fused_config import FusedConfig

    weights, state = whole_model()
    ranks = Ranks(rank=0, world=1, device=torch.device("cpu"), backend="none")
    how: dict[str, Any] = {"exchange": "nccl"}
    if wrong == "elsewhere":
        how["exchange"] = "post"
    if wrong == "without":
        how["exchange"] = "boundary"
    if wrong == "norm":
        how["config"] = FusedConfig(norm_in_router=True)
    with pytest.raises(KernelError, match=wanted):
        tp_fused.TpFusedStep(weights, state, ranks, **how)


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
@pytest.mark.parametrize(("world", "batch"), [(2, 1), (8, 1), (2, 8), (8, 128)])
def test_the_steps_compile_for_hopper_and_blackwell(world: int, batch: int) -> None:
    found = compile_in_child([job(resolve("beam-501b").config, world, batch)], 250)
    assert [each for each in found if each.error] == []
    names = {each.kernel for each in found}
    assert {"exchange_rows", "exchange_embedding", "exchange_pick"} <= names
    assert {each.target for each in found} >= {"sm_90", "sm_100"}


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
    for _ in range(4):  # the first compiles, while the others wait
        torch.cuda.synchronize()
        got = []
        for box, part, stream in zip(boxes, parts, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(tx.exchanges(box, part, calls, two=two))
        torch.cuda.synchronize()
        for box in boxes:
            box.check()
    for each in got[1:]:
        assert torch.equal(each, got[0])
    apart = (got[0].double() - wanted.double().sum(0)).norm() / wanted.double().sum(0).norm()
    assert apart < torch.finfo(torch.bfloat16).eps
    assert math.isfinite(float(apart))


def test_a_compiled_step_needs_no_memory() -> None:
    """Tensors without memory are enough to compile: an inbox of them has places, too."""
    weights = RankWeights.random(resolve("beam-501b").config, 8, layers=1, device="meta")
    box = Mailbox.virtual(8, weights.shapes.hidden, device="meta")[-1]
    assert (box.rank, box.world, box.words) == (7, 8, 2560)
    assert box.inbox.numel() == 2 * (8 * 128 * 2560 + 128 * 2560 + 8 * 128 * 2)
    assert isinstance(RankState(weights, 16), RankState)
