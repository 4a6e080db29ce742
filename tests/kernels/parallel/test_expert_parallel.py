"""Whole experts on several ranks: each rank's prefill is that of the whole model on its tokens."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.parallel import jobs
from workbench.kernels.parallel.compare_prefill import (
    checked_layers,
    compare_prefill,
    measure_tp_prefill,
)
from workbench.kernels.parallel.ep_weights import ep_config, ep_sliced, ep_weights, gathered
from workbench.kernels.parallel.expert_parallel import (
    EpPrefillState,
    EpPrefillStep,
    _Parcel,
    listed,
    placed_sum,
)
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.weights import tp_weights
from workbench.kernels.rank import RankWeights
from workbench.kernels.rank.prefill_check import sample_rows
from workbench.kernels.rank.prefill_state import PrefillState, needed_bytes
from workbench.kernels.rank.prefill_step import LAYOUTS, Choices, PrefillStep
from workbench.kernels.roofline import Rates
from workbench.model.presets import resolve

from ..rank.conftest import small_config
from .conftest import in_threads, whole_model

LOADS = ("routed", "one unused", "last rank idle", "all to rank 1", "one expert of each")
MOST, FEWER = 26, 7  # tokens of rank 0, and how many each following one has less


def apart(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def loaded(load: str, world: int, count: int, seed: int) -> Choices | None:
    """Experts for ``count`` tokens of both sparse layers: 3 of 12, shares of any size."""
    if load == "routed":
        return None
    of_rank = 12 // world
    allowed = {
        "one unused": [e for e in range(12) if e != 5],
        "last rank idle": list(range(12 - of_rank)),
        "all to rank 1": list(range(of_rank, 2 * of_rank)),
        "one expert of each": [0, 4, 8],
    }[load]
    generator = torch.Generator().manual_seed(seed)
    layers: list[tuple[Tensor, Tensor] | None] = [None]
    for _ in range(2):
        order = torch.rand(count, len(allowed), generator=generator).argsort(-1)[:, :3]
        layers.append((torch.tensor(allowed)[order], torch.rand(count, 3, generator=generator)))
    return Choices(layers=layers)


class Losing(EpPrefillStep):
    """Adds nothing of what came back from the last rank."""

    def _add(self, m: Tensor, parcel: _Parcel) -> None:
        parcel.place[:, -1] = -1
        super()._add(m, parcel)


def rows_by_hand(ids: Tensor, world: int, chunk: int, rounds: int) -> list[list[int]]:
    """Distinct tokens for each rank, chunk by chunk, counted one by one."""
    found = [[0] * world for _ in range(rounds)]
    for token, chosen in enumerate(ids.tolist()):
        for rank in {expert // (12 // world) for expert in chosen}:
            found[token // chunk][rank] += 1
    return found


def errors(
    ranks: Ranks, form: str, loads: list[str], chunks: list[int], overlap: bool
) -> list[dict[str, Any]]:
    """Each load and chunk against the whole model on one rank; ranks with fewer tokens, too."""
    torch.set_grad_enabled(False)
    whole, _ = whole_model(layout=LAYOUTS.get(form, "HI"))
    weights = ep_sliced(whole, ranks.rank, ranks.world)
    most, context = (MOST, 30) if form == "naive" else (10, 9)
    tokens = most - FEWER * ranks.rank
    found = []
    for load in loads:
        state = PrefillState(whole, 1, tokens, context, seed=5 + ranks.rank)
        own = PrefillState(whole, 1, tokens, context, seed=5 + ranks.rank)
        given = loaded(load, ranks.world, tokens, ranks.rank)
        rows = sample_rows(state, 4)
        PrefillStep(whole, state, "naive", choices=given)()
        for chunk in chunks:
            own.poison()
            step = EpPrefillStep(
                weights, own, ranks, form, chunk=chunk, watch=rows, choices=given, overlap=overlap
            )
            step()
            logits = apart(own.logits, state.logits)
            pairs = zip(own.k + own.v, state.k + state.v, strict=True)
            caches = max(apart(a, b) for a, b in pairs)
            same_token = own.next_token.tolist() == state.next_token.tolist()
            counted = [
                rows_by_hand(pair[0], ranks.world, chunk, -(-most // chunk))
                for pair in step.chosen.layers
                if pair is not None
            ]
            if form == "naive":  # interpreted kernels take seconds a step
                made: dict[str, Any] = {"chunk": chunk, "choices": given, "overlap": overlap}
                Losing(weights, own, ranks, form, **made)()
            lost = apart(own.logits, state.logits)
            if form == "naive":
                own.poison()
                EpPrefillStep(weights, own, ranks, form, **made, without=step)()
            found.append(
                {
                    "load": load,
                    "logits": logits,
                    "caches": caches,
                    "token": same_token,
                    "sent once": [each.sent for each in step.traffic] == counted,
                    "received": [each.received for each in step.traffic],
                    "pairs": sum(sum(each.pairs) for each in step.traffic),
                    "lost": lost,
                    "bytes": step.bytes_sent(),
                    "rows out": sum(
                        sum(sum(c) - c[ranks.rank] for c in layer) for layer in counted
                    ),
                    "without": bool(torch.isfinite(own.logits).all()),
                }
            )
    return found


def agrees(all_ranks: list[list[dict[str, Any]]], world: int, form: str = "naive") -> None:
    total = sum((MOST if form == "naive" else 10) - FEWER * rank for rank in range(world))
    for case in zip(*all_ranks, strict=True):
        load = case[0]["load"]
        # Every (token, expert) pair of two layers is multiplied exactly once, somewhere.
        assert sum(found["pairs"] for found in case) == 2 * 3 * total
        for rank, found in enumerate(case):
            assert found["logits"] < 1e-4, load
            assert found["caches"] < 1e-4, load
            assert found["token"], load
            assert found["sent once"], load
            assert found["without"]
            busy = {
                "last rank idle": range(world - 1),
                "all to rank 1": [1],
                "one expert of each": {e * world // 12 for e in (0, 4, 8)},
            }.get(load, range(world))
            idle = rank not in busy
            came = sum(sum(sum(c) for c in layer) for layer in found["received"])
            assert (came == 0) == idle, (load, rank)
            if form == "naive" and world - 1 in busy:
                assert found["lost"] > 1e-2, load
            into = sum(
                sum(sum(c) - c[rank] for c in layer) for layer in found["received"]
            )  # fmt: skip
            assert found["bytes"] == found["rows out"] * (96 * 4 + 3 * 8) + into * 96 * 4


@pytest.mark.parametrize(
    ("world", "chunks", "overlap"),
    [
        (2, [7, 100], False),
        pytest.param(4, [7], False, marks=pytest.mark.full),
        pytest.param(2, [7, 1], True, marks=pytest.mark.full),
    ],
)
def test_each_rank_prefills_as_the_whole_model_would(
    together: Callable[..., list[Any]], world: int, chunks: list[int], overlap: bool
) -> None:
    agrees(together(world, errors, "naive", list(LOADS), chunks, overlap), world)


@pytest.mark.parametrize("form", [pytest.param("chain", marks=pytest.mark.full), "ours"])
def test_kernels_skip_absent_experts(together: Callable[..., list[Any]], form: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("Triton kernels are interpreted on a CPU only without a GPU")
    agrees(together(2, errors, form, ["last rank idle"], [100], False), 2, form)


# ------------------------------------------------------------------ sums and lists


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_placed_sum_takes_the_rows_that_are_there(
    kernel: bool, shared: bool, small_work: None
) -> None:
    if kernel and torch.cuda.is_available():
        pytest.skip("Triton kernels are interpreted on a CPU only without a GPU")
    torch.manual_seed(0)
    product = torch.randn(9, 100).bfloat16()
    place = torch.tensor([[0, -1, 8], [-1, -1, -1], [3, 4, 5], [-1, 7, -1]], dtype=torch.int32)
    shares = torch.rand(4, 3)
    got = placed_sum(product, place, shares if shared else None, kernel)
    for row, slots in enumerate(place.tolist()):
        wanted = torch.zeros(100, dtype=torch.float64)
        for slot, at in enumerate(slots):
            if at >= 0:
                wanted += product[at].double() * (float(shares[row, slot]) if shared else 1.0)
        assert (got[row].double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()
    assert placed_sum(product[:0], place, None, kernel).abs().sum() == 0


def test_a_list_has_every_true_place_once_and_in_order() -> None:
    mask = torch.rand(5, 7) < 0.4
    at, place = listed(mask, int(mask.sum()))
    assert at.tolist() == [i for i, there in enumerate(mask.flatten().tolist()) if there]
    assert place.flatten()[at].tolist() == list(range(len(at)))
    assert (place[~mask] == -1).all()
    assert listed(torch.zeros(3, dtype=torch.bool), 0)[0].tolist() == []


# ------------------------------------------------------------------ weights


def test_ranks_have_all_but_the_experts_alike(small_work: None) -> None:
    config = small_config()
    made = in_threads(3, lambda ranks: ep_weights(config, ranks, dtype=torch.float32))
    first = made[0]
    assert first.shapes.experts == 12
    for other in made[1:]:
        assert torch.equal(first.embed, other.embed)
        assert torch.equal(first.lm_head, other.lm_head)
        for a, b in zip(first.layers, other.layers, strict=True):
            for name in a.__slots__:
                x, y = getattr(a, name), getattr(b, name)
                if isinstance(x, Tensor):
                    own = not a.dense and name in ("gate_up", "down")
                    assert torch.equal(x, y) != own, name
    assert made[1].layers[1].gate_up.shape == (4, 96, 96)
    assert made[1].layers[1].router.shape == (12, 96)
    assert (made[2].first, made[2].own) == (8, 4)


def test_fewer_ranks_than_parts_are_a_smaller_model_of_the_same_ranks(small_work: None) -> None:
    config = small_config()
    ranks = in_threads(2, lambda r: ep_weights(config, r, parts=3, dtype=torch.float32))
    whole = in_threads(3, lambda r: ep_weights(config, r, dtype=torch.float32))
    assert ranks[0].config.num_experts == 8
    for a, b in zip(ranks[0].layers, whole[0].layers, strict=True):
        assert a.gate_up.shape == b.gate_up.shape
        assert a.down.shape == b.down.shape
        assert a.qkvg.shape == b.qkvg.shape


def test_sliced_and_gathered_again_they_are_the_whole_model(small_work: None) -> None:
    whole, _ = whole_model()

    def back(ranks: Ranks) -> RankWeights:
        return gathered(ep_sliced(whole, ranks.rank, ranks.world), ranks)

    for made in in_threads(4, back):
        for a, b in zip(made.tensors(), whole.tensors(), strict=True):
            assert torch.equal(a, b)


def test_one_cache_for_all_sliding_layers_is_enough_for_a_prefill(small_work: None) -> None:
    kinds = ("sliding_attention",) * 2 + ("full_attention", "sliding_attention")
    whole = whole_model(
        num_hidden_layers=4, layer_types=kinds, mlp_layer_types=("dense",) + ("sparse",) * 3
    )[0]
    weights = ep_sliced(whole, 0, 1)
    apart_from, shared = PrefillState(whole, 2, 40, 0), EpPrefillState(weights, 2, 40, 0, chunk=9)
    shared.token.copy_(apart_from.token)
    PrefillStep(whole, apart_from, "naive")()
    EpPrefillStep(weights, shared, alone(), "naive", chunk=9)()
    assert apart(shared.logits, apart_from.logits) < 1e-5
    places = [cache.data_ptr() for cache in shared.k]
    assert places[0] == places[1] == places[3] != places[2]
    assert torch.allclose(shared.k[0], apart_from.k[3], atol=1e-4)  # the last sliding layer's


def test_a_state_of_the_full_model_leaves_room_beside_an_eighth_of_the_experts() -> None:
    config = resolve("beam-501b").config
    whole = RankWeights.random(config, 1, device="meta")
    weights = ep_sliced(whole, 7, 8)
    assert 138e9 < weights.bytes < 140e9
    state = EpPrefillState(weights, 1, 32_768, 0)
    held = {id(cache): cache for cache in (*state.k, *state.v)}.values()
    # Nine full layers, and one cache for all others.
    assert sum(cache.nbytes for cache in held) == 10 * 2 * 32_768 * 8 * 128 * 2
    # An H200 has 150.1 GB: with the weights, 9 GB for all that a prefill needs.
    distinct = copy(weights)
    distinct.layers = [layer for layer in weights.layers if layer.full] + weights.layers[:1]
    assert 4e9 < state.bytes(distinct) < 9e9
    assert needed_bytes(weights, 1, 32_768, 0) > 14e9  # what a state with all caches asks


# ------------------------------------------------------------------ what is refused


def alone(rank: int = 0, world: int = 1) -> Ranks:
    return Ranks(rank=rank, world=world, device=torch.device("cpu"), backend="gloo")


def test_weights_that_cannot_be_are_refused(small_work: None) -> None:
    config, whole = small_config(), whole_model()[0]
    with pytest.raises(KernelError, match="12 experts cannot be shared out whole among 5 ranks"):
        ep_config(config, 5)
    with pytest.raises(KernelError, match="4 ranks cannot be some of 3"):
        ep_config(config, 4, 3)
    with pytest.raises(KernelError, match="hold 2 experts, and a token asks 3"):
        ep_config(config, 1, 6)
    with pytest.raises(KernelError, match="12 experts cannot be shared out whole among 8 ranks"):
        ep_sliced(whole, 0, 8)
    for layers in (0, 4):
        with pytest.raises(KernelError, match=r"layers 1 to 3, so . of them cannot be run"):
            ep_weights(config, alone(), layers=layers, dtype=torch.float32)
    with pytest.raises(KernelError, match="layers 1 to 3, so 4 of them cannot be taken"):
        ep_sliced(whole, 0, 2).part(4)
    with pytest.raises(KernelError, match="activations cannot be int8"):
        ep_weights(config, alone(), dtype=torch.int8)
    with pytest.raises(KernelError, match="depends on the other ranks"):
        ep_sliced(whole, 0, 2).step_bytes()


def test_steps_that_cannot_be_are_refused(small_work: None) -> None:
    whole = whole_model()[0]
    weights, state = ep_sliced(whole, 0, 1), PrefillState(whole, 1, 4, 0)
    for chunk in (0, -3, True):
        with pytest.raises(KernelError, match="chunks of 1 or more"):
            EpPrefillStep(weights, state, alone(), "naive", chunk=chunk)
    with pytest.raises(KernelError, match="make the weights with ep_weights"):
        EpPrefillStep(whole, state, alone(), "naive")  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="are of rank 1 of 2, and this is rank 0 of 1"):
        EpPrefillStep(ep_sliced(whole, 1, 2), state, alone(), "naive")
    step = EpPrefillStep(weights, state, alone(), "naive")
    with pytest.raises(KernelError, match="run the step with it first"):
        EpPrefillStep(weights, state, alone(), "naive", without=step)


def test_ranks_with_other_chunks_are_refused_on_all(small_work: None) -> None:
    whole = whole_model()[0]

    def make(ranks: Ranks) -> str:
        state = PrefillState(whole, 1, 4, 0)
        weights = ep_sliced(whole, ranks.rank, ranks.world)
        with pytest.raises(KernelError) as raised:
            EpPrefillStep(weights, state, ranks, "naive", chunk=2 + ranks.rank)
        return str(raised.value)

    assert all("chunks of [2, 3] tokens" in said for said in in_threads(2, make))


# ------------------------------------------------------------------ both layouts, compared


RATES = Rates(label="a machine", kind="made up", bandwidth=1e11, flops={"fp32": 1e9, "bf16": 1e9})


def compared(ranks: Ranks) -> dict[str, Any]:
    """The document; and what becomes of a layout that is wrong, or that the ranks cannot have."""
    torch.set_grad_enabled(False)
    made: dict[str, Any] = {
        "tokens": 20, "rounds": 2, "dtype": torch.float32, "rates": RATES, "chunk": 8,
    }  # fmt: skip
    config = small_config()
    heard: list[tuple[int, int, str]] = []
    found: dict[str, Any] = {
        "right": compare_prefill(
            config, ranks, 4, **made, progress=lambda *said: heard.append(said)
        ),
        "progress": heard,
    }
    weights = tp_weights(config, ranks, 4, dtype=torch.float32)
    found["eight"] = measure_tp_prefill(
        weights, ranks, sequences=3, tokens=5, context=11, rounds=2, rates=RATES
    )
    with pytest.raises(KernelError) as raised:
        compare_prefill(config, ranks, sequences=3, **made)
    found["uneven"] = str(raised.value)
    jobs._rates = lambda *_: RATES  # in this process, which ends
    request = {
        "model": "small", "config": config.to_dict(), "tp": 2, "layers": 1, "dtype": "float32",
        "tokens": 5, "rounds": 2,
    }  # fmt: skip
    found["asked"] = jobs.prefill(request, ranks, lambda done, of, label: None)
    right = EpPrefillStep._own

    def wrong(self: EpPrefillStep, *args: Any) -> Tensor:
        return right(self, *args) * (1.0 if ranks.rank else 1.01)

    EpPrefillStep._own = wrong  # type: ignore[method-assign]  # in this process, which ends
    found["wrong"] = compare_prefill(config, ranks, layouts=["ep"], **made)
    return found


@pytest.mark.full
def test_the_layouts_are_compared(together: Callable[..., list[Any]]) -> None:
    first, second = together(2, compared)
    assert first["right"] == second["right"]
    found = first["right"]
    assert (found["schema"], found["kind"]) == ("workbench-parallel-prefill/1", "parallel-prefill")
    sizes = ("gpus", "tp", "layers", "experts", "of_experts", "sequences", "tokens")
    assert [found[name] for name in sizes] == [2, 4, 3, 6, 12, 2, 20]
    assert "6 of 12 experts" in found["note"]
    for name in ("tp", "ep"):
        row = found["layouts"][name]
        assert row["failures"] == []
        assert row["check"]["layers"] == 3
        assert 0 < row["check"]["worst_layer_error"] < row["error_limit"] == 1e-4
        assert [run["overlap"] for run in row["runs"]] == [1, 2]
        for run in row["runs"]:
            assert run["low"] <= run["milliseconds"] <= run["high"]
            # Two sequences of 20 tokens, whichever way they go.
            assert run["tokens_per_second"] == pytest.approx(40e3 / run["milliseconds"])
            assert run["communication_milliseconds"] == pytest.approx(
                run["milliseconds"] - run["without"]["milliseconds"]
            )
        fastest = row["runs"][row["fastest"]]
        assert row["milliseconds"] == min(run["milliseconds"] for run in row["runs"])
        assert row["tokens_per_second"] == fastest["tokens_per_second"]
    speeds = [found["layouts"][name]["tokens_per_second"] for name in ("ep", "tp")]
    assert found["ratio"] == pytest.approx(speeds[0] / speeds[1])
    # A ring of two sends a row of 96 values once from each rank: two sums a layer, the embedding.
    assert found["layouts"]["tp"]["bytes_sent_per_token"] == 2 * 96 * 4 * 7
    # At most every token goes to the other rank and back, in two sparse layers.
    assert 0 < found["layouts"]["ep"]["bytes_sent_per_token"] <= 2 * (2 * 96 * 4 + 3 * 8)
    assert [said[0] for said in first["progress"]] == sorted(said[0] for said in first["progress"])
    eight = first["eight"]
    assert eight["passed"]
    assert (eight["sequences"], eight["tokens"], eight["context"]) == (3, 5, 11)
    assert "3 sequences cannot be shared out evenly among 2 ranks" in first["uneven"]
    # A request that says nothing of sequences: one of each rank, in both layouts.
    assert (first["asked"]["sequences"], [*first["asked"]["layouts"]]) == (2, ["tp", "ep"])
    wrong = first["wrong"]["layouts"]["ep"]
    assert not wrong["passed"]
    assert "a layer's error" in wrong["failures"][0]
    assert wrong["runs"] == []
    assert first["wrong"]["ratio"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layouts": ["pp"]}, "no layout 'pp'; there are tp and ep"),
        ({"layouts": []}, "no layout is asked for"),
        ({"overlaps": [0]}, "1 or more pieces"),
        ({"rounds": 1}, "2 rounds or more"),
        ({"sequences": 0}, "1 or more sequences"),
        ({"layers": 4}, "layers 1 to 3"),
        ({"tokens": 5000}, "exceed the model's context"),
    ],
)
def test_comparisons_that_cannot_be_are_refused(
    changes: dict[str, Any], words: str, small_work: None
) -> None:
    made: dict[str, Any] = {"tokens": 4, "dtype": torch.float32, "rates": RATES}
    with pytest.raises(KernelError, match=words):
        compare_prefill(small_config(), alone(), **made | changes)


def test_checked_layers_are_the_first_that_hold_every_kind() -> None:
    config = resolve("beam-501b").config
    assert checked_layers(config, 52) == 5  # three dense, a full and a sliding sparse one
    assert checked_layers(config, 4) == 4
    assert checked_layers(config, 2) == 1
