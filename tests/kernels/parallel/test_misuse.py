"""Ranks, mailboxes, states and variants that do not belong together: refused before a kernel runs.

Most of these would otherwise write beside a buffer, wait for minutes, or end in a traceback.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.parallel import ranks as places
from workbench.kernels.parallel.check import check_group
from workbench.kernels.parallel.jobs import DECODE, PREFILL, _read
from workbench.kernels.parallel.mailbox import Mailbox
from workbench.kernels.parallel.ranks import STORE_PORT, Ranks
from workbench.kernels.parallel.tp_chain import TpRankStep
from workbench.kernels.rank import RankState, RankWeights
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.reference import boundary
from workbench.kernels.triton_runtime import why_not
from workbench.model.presets import resolve

from ..rank.conftest import small_config
from .conftest import in_threads, rank_of, whole_model

runs = pytest.mark.skipif(why_not("cpu") is not None, reason="Triton's interpreter does not run")


def alone() -> Ranks:
    return Ranks(rank=0, world=1, device=torch.device("cpu"), backend="none")


# ------------------------------------------------------------------ joining


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("cpu", {"RANK": None}, "none of several ranks"),
        ("cpu", {"WORLD_SIZE": "two"}, "none of several ranks"),
        ("cpu", {"RANK": "2"}, "there is no rank 2 of 2"),
        ("cpu", {"LOCAL_RANK": "-1"}, "there is no GPU -1"),
        ("tpu", {}, "ranks run on cuda or cpu, not on 'tpu'"),
        ("cpu", {STORE_PORT: "one"}, f"{STORE_PORT} is 'one' and no port"),
        ("cpu", {STORE_PORT: "0"}, f"{STORE_PORT} is '0' and no port"),
        ("cpu", {STORE_PORT: "99999"}, "no port"),
        ("cpu", {}, "these ranks cannot meet: .*MASTER_ADDR"),
    ],
)
def test_a_process_that_is_no_rank_is_told_why(
    kind: str, changes: dict[str, str | None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    given = {"RANK": "1", "WORLD_SIZE": "2"} | changes
    with pytest.raises(KernelError, match=said) as caught:
        Ranks.join(kind, {name: value for name, value in given.items() if value is not None})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_store_that_is_gone_is_not_waited_for(
    torchrun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
    for name in ("CONNECT", "MEET"):
        assert getattr(places, name) <= timedelta(minutes=2)
        monkeypatch.setattr(places, name, timedelta(seconds=0.3))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    given = {"RANK": "1", "WORLD_SIZE": "2"} | ({} if torchrun else {STORE_PORT: port})
    with pytest.raises(KernelError, match="the 2 ranks did not meet at") as caught:
        Ranks.join("cpu", given)
    assert "\n" not in str(caught.value)


def test_nobody_joins_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(KernelError, match="has met other ranks already"):
        Ranks.join("cpu", {"RANK": "0", "WORLD_SIZE": "1", STORE_PORT: "1"})


# ------------------------------------------------------------------ mailboxes


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rows": 0}, "room for 1 or more rows, not for 0"),
        ({"rows": 1.5}, "room for 1 or more rows"),
        ({"hidden": 0}, "rows of 1 or more values"),
        ({"hidden": 7, "dtype": torch.bfloat16}, "no whole number of words"),
        ({"dtype": torch.float16}, "not float16"),
        ({"dtype": torch.int64}, "not int64"),
    ],
)
def test_a_mailbox_that_cannot_be_opened(more: dict[str, Any], said: str) -> None:
    how: dict[str, Any] = {"hidden": 64, "dtype": torch.float32, **more}
    with pytest.raises(KernelError, match=said):
        Mailbox.open(alone(), **how)


def own_files() -> set[str]:
    return {each for each in os.listdir("/dev/shm") if each.startswith("workbench-mailbox-")}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_memory_that_one_rank_cannot_have_is_refused_by_all(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, given = own_files(), os.posix_fallocate
    asked: list[int] = []

    def full(handle: int, start: int, size: int) -> None:
        asked.append(size)
        if len(asked) > 1:
            raise OSError(code, os.strerror(code))
        given(handle, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)

    def work(ranks: Ranks) -> str:
        with pytest.raises(KernelError) as caught:
            Mailbox.open(ranks, 64, torch.float32, rows=2)
        return str(caught.value)

    first, second = in_threads(2, work)
    assert first == second
    assert "memory that all ranks see, 0.0 MB of each, has no room in /dev/shm" in first
    assert os.strerror(code) in first
    assert own_files() == kept


def test_memory_of_all_ranks_is_there_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file with holes would kill whoever writes where the memory is full."""
    kept, seen, mapped = own_files(), [], torch.from_file

    def noted(name: str, **how: Any) -> Tensor:
        status = Path(name).stat()
        seen.append(512 * status.st_blocks >= status.st_size > 0)
        return mapped(name, **how)

    monkeypatch.setattr(torch, "from_file", noted)
    in_threads(2, lambda ranks: Mailbox.open(ranks, 64, torch.float32).inbox.shape)
    assert seen == [True] * 4
    assert own_files() == kept


def test_a_mailbox_of_other_rows_or_ranks_is_refused() -> None:
    weights, state = whole_model()
    hidden, kind = weights.shapes.hidden, torch.float32
    half = Mailbox.open(alone(), hidden, torch.bfloat16)
    wide = Mailbox.open(alone(), 2 * hidden, kind)
    two = Mailbox.virtual(2, hidden, kind, device="cpu")
    for box, what in ((half, "row"), (wide, "row"), (two[0], "rank"), (two[1], "rank")):
        with pytest.raises(KernelError, match=rf"mailbox is of another step \({what} differ"):
            TpRankStep(weights, state, alone(), {"reduced_boundary": "exchange"}, mailbox=box)
    TpRankStep(weights, state, alone(), mailbox=Mailbox.open(alone(), hidden, kind))


@runs
def test_every_step_refuses_what_is_not_its_own() -> None:
    from workbench.kernels.parallel.tp_fused import TpFusedStep
    from workbench.kernels.parallel.tp_load import TpLoadStep
    from workbench.kernels.parallel.triton_exchange import exchanges

    weights, state = whole_model()
    rows = LoadState.over(state, weights)
    other, foreign = whole_model(dtype=torch.bfloat16)
    few = RankWeights.random(small_config(), 1, device="cpu", dtype=torch.float32, layers=1)
    short = RankState(few, 40)
    box = Mailbox.open(alone(), 2 * weights.shapes.hidden, torch.float32)
    steps: tuple[Any, ...] = (TpRankStep, TpFusedStep)
    for step in steps:
        how: dict[str, Any] = {"exchange": "nccl"} if step is TpFusedStep else {}
        with pytest.raises(KernelError, match=r"state is of other weights \(dtype differ"):
            step(weights, foreign, alone(), **how)
        with pytest.raises(KernelError, match=r"state is of other weights \(layers differ"):
            step(weights, short, alone(), **how)
    with pytest.raises(KernelError, match=r"state is of other weights \(dtype differ"):
        TpLoadStep(weights, LoadState.over(foreign, other), alone(), exchange="nccl")
    with pytest.raises(KernelError, match=r"state is of other weights \(layers differ"):
        TpLoadStep(weights, LoadState.over(short, few), alone(), exchange="nccl")
    for made in (
        lambda: TpFusedStep(weights, state, alone(), mailbox=box),
        lambda: TpLoadStep(weights, rows, alone(), mailbox=box),
    ):
        with pytest.raises(KernelError, match="mailbox is of another step"):
            made()
    several = LoadState(weights, [9] * 3)
    small = Mailbox.open(alone(), weights.shapes.hidden, torch.float32, rows=2)
    with pytest.raises(KernelError, match="3 rows does not fit an inbox of 2"):
        TpLoadStep(weights, several, alone(), mailbox=small)
    with pytest.raises(KernelError, match="fused chain decodes one sequence, not 2"):
        TpFusedStep(*whole_model(batch=2), alone(), exchange="nccl")
    with pytest.raises(KernelError, match="rows of 64 values do not fit a mailbox of 128 words"):
        exchanges(Mailbox.open(alone(), 128, torch.float32), torch.zeros(1, 64), 1)


# ------------------------------------------------------------------ variants of one's own


def decoded(function: Any, world: int = 2) -> Any:
    """The check of a step with a variant of ``reduced_boundary``."""
    registry.register("reduced_boundary", "mine")(function)
    try:

        def work(ranks: Ranks) -> Any:
            weights, state = rank_of(whole_model(), ranks.rank, ranks.world)
            step = TpRankStep(weights, state, ranks, {"reduced_boundary": "mine"})
            return check_group(step, weights, state, ranks).failures(1e-5)

        return in_threads(world, work)[0]
    finally:
        registry.unregister("reduced_boundary", "mine")


def right(ranks: Any, partial: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    h, post, scale, following, eps = rest
    return boundary(h, ranks.all_reduce(partial), post, scale, following, eps)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda h, y: None, r"gave \(NoneType\)"),
        (lambda h, y: h, r"gave \(float32 \[1, 96\]\): return the new stream and its norm"),
        (lambda h, y: [h, y], r"gave \(list\)"),
        (lambda h, y: (h[:, :-1], y), r"gave \(float32 \[1, 95\], float32 \[1, 96\]\)"),
        (lambda h, y: (h, y.double()), r".*float64 \[1, 96\]\): return .* both float32 \[1, 96\]"),
        (lambda h, y: (h, y, y), "gave"),
    ],
)
def test_a_variant_that_gives_something_else_is_named(spoil: Any, said: str) -> None:
    def mine(ranks, mailbox, call, h, partial, post, scale, following, eps):  # type: ignore[no-untyped-def]
        return spoil(*right(ranks, partial, h, post, scale, following, eps))

    with pytest.raises(KernelError, match="the variant mine of reduced_boundary " + said):
        decoded(mine)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda rank, h, y: (h, y), None),
        (lambda rank, h, y: (h * 1.01, y), "a layer's error"),
        (lambda rank, h, y: (h, y * 1.01), "a layer's error"),
        (lambda rank, h, y: (h * float("nan"), y), "no numbers"),
        (lambda rank, h, y: (h, y * float("nan")), "no numbers"),
        (lambda rank, h, y: (h + rank * 1e-3, y), "of rank 1 is not that of rank 0"),
    ],
)
def test_wrong_values_of_a_variant_are_caught(spoil: Any, said: str | None) -> None:
    def mine(ranks, mailbox, call, h, partial, post, scale, following, eps):  # type: ignore[no-untyped-def]
        return spoil(ranks.rank, *right(ranks, partial, h, post, scale, following, eps))

    failures = decoded(mine)
    assert failures == [] if said is None else said in failures[0]


# ------------------------------------------------------------------ requests


@pytest.mark.parametrize(
    ("usual", "name", "value"),
    [
        *((DECODE, "batches", value) for value in (1, "1", [], [0], [1.5], [True], None)),
        *((DECODE, "contexts", value) for value in ([None], [2.5])),
        *((DECODE, "variants", value) for value in ("naive", [], [1])),
        *((DECODE, "prefill", value) for value in (3, [], {"speed": 1}, {"tokens": "x"})),
        *((DECODE, "experts", value) for value in ("fp4", None, [])),
        *((DECODE, "rounds", value) for value in (1, "2", None)),
        *((DECODE, "tp", value) for value in (0, None, "2")),
        *((DECODE, "layers", value) for value in ("all", 1.5)),
        *((DECODE, "dtype", value) for value in ([], "int8", None)),
        *((PREFILL, "layouts", value) for value in ("tp", [], [2])),
        *((PREFILL, "tokens", value) for value in (0, None)),
        *((PREFILL, "context", value) for value in (-1, None)),
        *((PREFILL, name, value) for name, value in (("model", 3), ("config", []))),
    ],
)
def test_a_request_s_value_of_another_kind_is_named(
    usual: dict[str, Any], name: str, value: Any
) -> None:
    request = {"model": "m", "config": resolve("beam-tiny").config.to_dict()}
    _read(request, usual)
    with pytest.raises(KernelError, match=name):
        _read(request | {name: value}, usual)
