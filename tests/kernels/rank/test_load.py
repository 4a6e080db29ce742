"""The step of many rows against float64, the one-sequence chain, and recorded choices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from workbench.cli import app
from workbench.errors import KernelError
from workbench.kernels.rank import RankState, RankWeights
from workbench.kernels.rank.chain import RankStep
from workbench.kernels.rank.load_check import check_load
from workbench.kernels.rank.load_config import (
    FROM_CHAIN,
    Experts,
    LoadConfig,
    Product,
    config_for,
)
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.rank.load_step import Choices, LoadStep
from workbench.kernels.rank.load_verify import measure_verify, spread
from workbench.kernels.rank.reference import Reference, check_step
from workbench.kernels.rank.stages import cumulative, make
from workbench.kernels.roofline import Rates
from workbench.spec.simulate import cost_table
from workbench.spec.verify_costs import verify_table

from .conftest import Make, small_config

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton kernels are interpreted on a CPU only without a GPU"
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

RUNNER = CliRunner()
RATES = Rates(label="test", kind="measured here", bandwidth=1e9, flops={}, notes=())
SMALL = LoadConfig(
    qkvg=Product(rows=128, depth=32, splits=2), o_proj=Product(rows=64, depth=32, splits=2),
    router=Product(rows=16, depth=32, splits=2), up=Experts(rows=32, depth=32),
    down=Experts(rows=64, depth=32), dense_up=Product(rows=32, depth=64),
    dense_down=Product(rows=64, depth=32, splits=1), head=Product(rows=64, depth=64),
    keys=16, programs=4,
)  # fmt: skip


@interpreted
@pytest.mark.parametrize(
    ("contexts", "new"),
    [
        ((40,), 1),
        ((5, 40, 70), 1),
        ((40, 9), (3, 1)),
        ((30, 3, 61), (5, 16, 2)),
    ],
)
def test_every_row_is_that_of_the_reference(
    contexts: tuple[int, ...], new: Any, rank: Make
) -> None:
    weights, _ = rank(8)
    state = LoadState(weights, contexts, new, headroom=4)
    step = LoadStep(weights, state, config=SMALL)
    found = check_load(step, weights, state)
    assert found.failures(1e-4) == []
    assert found.worst < 2e-5
    assert found.margin > 0


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_launch_sizes_give_the_same(dtype: torch.dtype, rank: Make) -> None:
    weights, _ = rank(8, dtype=dtype)
    # Several passes of an expert's pairs, programs with several tiles, parts that are no multiple,
    # tiles beyond the end, one part of attention.
    other = LoadConfig(
        qkvg=Product(rows=64, depth=64, splits=1), o_proj=Product(rows=32, depth=64, splits=3),
        router=Product(rows=16, depth=64, splits=1),
        up=Experts(rows=32, depth=64, tokens=4, programs=2),
        down=Experts(rows=64, depth=64, tokens=4, swap=False, programs=1),
        dense_up=Product(rows=64, depth=32), dense_down=Product(rows=32, depth=16, splits=2),
        head=Product(rows=256, depth=32), keys=32, programs=1,
    )  # fmt: skip
    state = LoadState(weights, (30, 3, 61), (5, 9, 2), headroom=4)
    found = check_load(LoadStep(weights, state, config=other), weights, state)
    assert found.failures(1e-4 if dtype == torch.float32 else 2e-2) == []


@pytest.mark.full
@interpreted
def test_rows_of_a_batch_are_the_one_sequence_chains(rank: Make) -> None:
    weights, one = rank(40)
    chain = RankStep(weights, one, cumulative("products"))
    state = LoadState(weights, [40, 40, 40], headroom=4)
    step = LoadStep(weights, state)
    for index, layer in enumerate(weights.layers):
        # The same cache for every sequence, each in its own place.
        rows = 40 if layer.full else min(40, one.rows_of(False))
        for theirs, mine in ((one.k, state.k), (one.v, state.v)):
            for r in range(3):
                for position in range(40 - rows, 40):
                    if layer.full:
                        place, source = int(state.start[r]) + position, position
                    else:
                        place = r * state.ring + position % state.ring
                        source = position % one.rows_of(False)
                    mine[index][place] = theirs[index][0, source]
    state.token.copy_(one.token.expand(3))
    for _ in range(3):
        chain()
        step()
        torch.testing.assert_close(
            state.logits, one.logits.expand(3, -1), rtol=2e-4, atol=2e-4 * one.logits.abs().max()
        )
        assert state.token.tolist() == one.token.tolist() * 3
        assert state.position.tolist() == one.position.tolist() * 3


@interpreted
def test_the_waterfalls_stage_decodes_a_batch(rank: Make) -> None:
    weights, state = rank(40, batch=3)
    state.position[1] = 11  # of mixed lengths, in the state of equal ones
    found = check_step(make("load", weights, state), weights, state)
    assert found.failures(1e-4) == []
    assert state.position.tolist() == [41, 12, 41]


@pytest.mark.full
@interpreted
def test_recorded_choices_give_the_same_bits(rank: Make) -> None:
    weights, _ = rank(8)
    state = LoadState(weights, (20, 33), (2, 1), headroom=4)
    free = LoadStep(weights, state, config=SMALL)
    free()
    wanted, recorded = state.logits.clone(), free.recorded()
    assert free.distinct() == sum(len(set(layer.flatten().tolist())) for layer in free.ids[1:]) / 2
    again = LoadStep(weights, state, config=SMALL, choices=recorded)
    again()
    assert torch.equal(state.logits, wanted)


@pytest.mark.full
@interpreted
def test_given_experts_are_the_ones_that_compute(rank: Make) -> None:
    weights, _ = rank(8)
    state = LoadState(weights, (20, 33, 7), 1, headroom=4)
    free = LoadStep(weights, state, advance=False, config=SMALL)
    free()
    # Every row gets the experts behind its own, with the shares that the router would give these:
    # they depend on the stream, so a layer's are right after as many passes as it has before it.
    ids = (free.ids + 1) % weights.shapes.experts
    shares = free.shares.clone()
    reference = Reference(weights, cast(RankState, state.by_row()))
    for _ in range(len(weights.layers)):
        step = LoadStep(
            weights, state, advance=False, config=SMALL, choices=Choices(ids=ids, shares=shares)
        )
        step()
        for index, layer in enumerate(weights.layers):
            if layer.dense:
                continue
            for b, position in enumerate(state.position.tolist()):
                scores = reference.layer(index, step.h[index][b], b, position).scores
                assert scores is not None
                assert layer.correction_bias is not None
                mine = (scores - layer.correction_bias.double())[ids[index, b]]
                shares[index, b] = (mine / mine.sum()).float()
    found = check_load(step, weights, state)
    assert found.failures(1e-4) == []
    assert not torch.equal(step.ids[1:].sort().values, ids[1:].sort().values)
    # Had the router's own experts computed, the layers would be far off.
    own = reference.layer(1, step.h[1][0], 0, 20).h
    assert float((step.h[2][0].double() - own).norm() / own.norm()) > 1e-2


@interpreted
@pytest.mark.parametrize(
    ("contexts", "new", "said"),
    [
        ([], 1, "at least one sequence"),
        ([5, 0], 1, "context of 1 or more"),
        ([5, 5], [1], "number of new rows"),
        ([5], 17, "1 to 16 new rows"),
        ([5], 0, "1 to 16 new rows"),
        ([5000], 1, "exceeds the model's 4096"),
    ],
)
def test_what_a_state_cannot_be_is_said(contexts: Any, new: Any, said: str, rank: Make) -> None:
    weights, _ = rank(8)
    with pytest.raises(KernelError, match=said):
        LoadState(weights, contexts, new)


@interpreted
def test_what_a_step_cannot_do_is_said(rank: Make) -> None:
    weights, _ = rank(8)
    state = LoadState(weights, [5], 1)
    step = LoadStep(weights, state, config=SMALL)
    other = Choices(ids=step.ids[:, :, :2], shares=step.shares[:, :, :2])
    with pytest.raises(KernelError, match="3 layers, rows, 3 experts"):
        LoadStep(weights, state, choices=other)
    with pytest.raises(KernelError, match="of 1 rows cannot be replayed in a step of 2"):
        LoadStep(weights, LoadState(weights, [5, 6]), choices=step.recorded())
    with pytest.raises(KernelError, match="rows to check"):
        check_load(step, weights, state, rows=[1])
    weights.relayout("IH")
    with pytest.raises(KernelError, match="relayout"):
        LoadStep(weights, state)


@pytest.mark.full
@interpreted
def test_a_wrong_row_shows(rank: Make) -> None:
    weights, _ = rank(8)
    state = LoadState(weights, (20, 33), (1, 2), headroom=4)
    step = LoadStep(weights, state, config=SMALL)

    def spoiled() -> None:
        step()
        step.h[2][2] *= 1.01  # layers 1 and, from its stream, 2 of the last row

    found = check_load(step, weights, state, run=spoiled)
    assert found.layer_errors[0] < 1e-4 < 5e-3 < found.layer_errors[1]
    assert check_load(step, weights, state, run=spoiled, rows=[0, 1]).worst < 1e-4


def test_tokens_are_spread_evenly() -> None:
    assert spread(7, 3) == [3, 2, 2]
    assert spread(2, 5) == [1, 1]
    assert spread(1024, None) == [8] * 128
    with pytest.raises(KernelError, match="more --sequences"):
        spread(33, 2)
    with pytest.raises(KernelError, match="cannot be verified"):
        spread(0, None)


@interpreted
def test_verification_is_checked_and_not_timed_here(rank: Make) -> None:
    weights, _ = rank(8)
    found = measure_verify(weights, [3, 1, 3], 20, RATES, sequences=2, rounds=2)
    assert [(row["rows"], row["sequences"]) for row in found["sizes"]] == [(1, 1), (3, 2)]
    assert all(row["failures"] == [] and row["milliseconds"] is None for row in found["sizes"])
    # One row is the one-sequence chain's, whose state counts its cache in the same way.
    alone = LoadState(weights, [20], 1)
    assert found["sizes"][0]["bytes"] == weights.step_bytes(3, 1) + alone.read_bytes()
    # Keys and values that three layers read: one with everything, two with the window's 24 at most.
    moved = found["sizes"][1]["bytes"] - weights.step_bytes(found["sizes"][1]["distinct"], 3)
    assert moved == 2 * 2 * 32 * 4 * ((22 + 21) + 2 * (22 + 21))


def test_a_cost_table_has_the_medians_and_says_where_they_are_from(tmp_path: Path) -> None:
    draft = {"draft": [[1, 0.5], [8, 0.75]], "origins": {"draft": "modelled"}, "label": "other"}
    where = tmp_path / "table.json"
    made = verify_table(
        {1: [2.0, 9.0, 3.0], 8: [8.0, 8.5]}, draft, label="a card", date="2026-01-01"
    )
    where.write_text(json.dumps(made))
    read = cost_table(str(where))
    assert (read.draft, read.verify) == ("modelled", "measured")
    assert [read.table.verify_ms(n) for n in (1, 8)] == [3.0, 8.25]
    assert read.table.draft_ms(8) == 0.75
    with pytest.raises(KernelError, match=r"\[4\] tokens were not timed"):
        verify_table({1: [2.0], 4: None}, draft, label="a card", date="2026-01-01")


@interpreted
def test_the_command_checks_a_small_rank_and_says_what_it_cannot(tmp_path: Path) -> None:
    small = ["bench", "verify", "--model", "beam-tiny", "--tp", "2", "--layers", "2"]
    small += ["--device", "cpu", "--dtype", "float32", "--context", "20"]
    out = tmp_path / "verify.json"
    result = RUNNER.invoke(app, [*small, "--tokens", "3,1", "--json", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert json.loads(out.read_text()) == found
    assert [row["rows"] for row in found["sizes"]] == [1, 3]
    assert all(row["check"]["worst_layer_error"] < 1e-4 for row in found["sizes"])
    for more, said in (
        (["--tokens", "a"], "whole numbers from 1 on"),
        (["--tokens", "64", "--sequences", "2"], "more --sequences"),
        (["--tokens", "1", "--table", str(tmp_path / "t.json")], "no cost table"),
        (["--tokens", "1", "--context", "999999999"], "exceeds the model's"),
    ):
        wrong = RUNNER.invoke(app, [*small, *more])
        assert wrong.exit_code == 1
        assert said in " ".join(wrong.output.split())
    assert not (tmp_path / "t.json").exists()


MIXES = [
    *(
        pytest.param(mix, marks=pytest.mark.full)
        for mix in (("qkvg",), ("o_proj",), ("router",), ("combine",), ("qkvg", "attention"))
    ),
    pytest.param(("o_proj", "combine", "boundary"), marks=pytest.mark.full),
    FROM_CHAIN,
]


@interpreted
@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_operations_left_to_the_registry_give_the_same(mix: tuple[str, ...], rank: Make) -> None:
    weights, _ = rank(8)
    state = LoadState(weights, (30, 30, 30), headroom=4)
    step = LoadStep(weights, state, config=replace(SMALL, chain=mix))
    assert check_load(step, weights, state).failures(1e-4) == []
    free = step.recorded()
    # Given experts are used whoever asks the router.
    state.reset()
    ids = (free.ids + 1) % weights.shapes.experts
    given = Choices(ids=ids, shares=free.shares)
    again = LoadStep(weights, state, advance=False, config=replace(SMALL, chain=mix), choices=given)
    again()
    mixed = state.logits.clone()
    LoadStep(weights, state, advance=False, config=SMALL, choices=given)()
    torch.testing.assert_close(mixed, state.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(again.shares[1:], free.shares[1:])


@interpreted
def test_what_cannot_be_left_to_the_registry_is_said(rank: Make) -> None:
    weights, _ = rank(8)
    mixed, equal = LoadState(weights, [5, 9]), LoadState(weights, [5, 5])
    for state, mix, said in (
        (equal, ("attention",), "caches of one size"),
        (mixed, ("qkvg", "attention"), "caches of one size"),
        (equal, ("boundary",), "o_proj and combine"),
        (equal, ("head",), "cannot leave head"),
    ):
        with pytest.raises(KernelError, match=said):
            LoadStep(weights, state, config=replace(SMALL, chain=mix))


@pytest.mark.parametrize("rows", [1, 4, 8, 64, 100, 128, 256, 512, 1024])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_into_shared_memory(rows: int, itemsize: int) -> None:
    c = config_for(rows, single=itemsize == 4)
    token_tile = max(16, min(128, 1 << (rows - 1).bit_length()))
    products = (c.qkvg, c.o_proj, c.dense_down, c.head)
    tiles = [(p.rows + token_tile, p.depth, p.stages) for p in products]
    tiles.append((2 * c.dense_up.rows + token_tile, c.dense_up.depth, c.dense_up.stages))
    tiles.append((2 * c.up.rows + c.up.tokens, c.up.depth, c.up.stages))
    tiles.append((c.down.rows + c.down.tokens, c.down.depth, c.down.stages))
    for height, depth, stages in tiles:
        assert height * depth * stages * itemsize < 227 * 1024


@on_gpu
@pytest.mark.parametrize("new", [1, 3])
def test_a_small_rank_on_a_gpu(new: int) -> None:
    weights = RankWeights.random(small_config(), 2, device="cuda", dtype=torch.bfloat16)
    for tensor in weights.tensors():
        if tensor.dim() > 1 and tensor is not weights.embed:
            tensor.mul_(5)
    state = LoadState(weights, [40, 9, 200, 24, 23], new)
    assert check_load(LoadStep(weights, state), weights, state).failures(3e-2) == []
