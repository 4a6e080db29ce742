"""What the ranks of a group hold: slices of one model, or parts of their own and the rest alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.errors import ConfigError, KernelError
from workbench.kernels.parallel import weights as parallel_weights
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.weights import (
    first_holder,
    group_label,
    in_step,
    sliced,
    tp_state,
    tp_weights,
)
from workbench.kernels.rank import RankState, RankWeights
from workbench.kernels.rank.weights import rank_bytes
from workbench.model.presets import resolve

from ..rank.conftest import small_config
from .conftest import in_threads

A, G, D, W, X = 12, 4, 32, 80, 48  # heads, KV heads, head_dim, dense and expert width


def rows_of_heads(packed: Tensor, first: int, heads: range) -> Tensor:
    return torch.cat([packed[(first + head) * D : (first + head + 1) * D] for head in heads])


@pytest.mark.parametrize("layout", ["HI", "IH"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_slices_are_the_heads_and_widths_of_a_rank(layout: Any, world: int) -> None:
    whole = RankWeights.random(
        small_config(), 1, device="cpu", dtype=torch.float32, down_layout=layout
    )
    for rank in range(world):
        part = sliced(whole, rank, world)
        a, g, w, i = (n // world for n in (A, G, W, X))
        heads, kv = range(rank * a, rank * a + a), range(rank * g, rank * g + g)
        for mine, all_of in zip(part.layers, whole.layers, strict=True):
            firsts = (0, A, A + G, A + 2 * G)
            expected = torch.cat(
                [
                    rows_of_heads(all_of.qkvg, first, of)
                    for first, of in zip(firsts, (heads, kv, kv, heads), strict=True)
                ]
            )
            assert torch.equal(mine.qkvg, expected)
            assert torch.equal(mine.o_proj, all_of.o_proj[:, heads.start * D : heads.stop * D])
            assert mine.gate_bias.tolist() == all_of.gate_bias[heads.start : heads.stop].tolist()
            if mine.dense:
                pairs = [(mine.gate_up, all_of.gate_up, mine.down, all_of.down)]
                width, n = W, w
            else:
                four = (mine.gate_up, all_of.gate_up, mine.down, all_of.down)
                pairs = list(zip(*four, strict=True))  # an expert each
                width, n = X, i
            for up, whole_up, down, whole_down in pairs:
                lo, hi = rank * n, rank * n + n
                assert torch.equal(up[:n], whole_up[lo:hi])
                assert torch.equal(up[n:], whole_up[width + lo : width + hi])
                by_row = layout == "IH" and not mine.dense
                assert torch.equal(down, whole_down[lo:hi] if by_row else whole_down[:, lo:hi])
            assert torch.equal(mine.input_norm, all_of.input_norm)
            assert mine.dense or torch.equal(mine.router, all_of.router)
            assert mine.scales == all_of.scales
        v = 200 // world
        assert torch.equal(part.embed, whole.embed[rank * v : rank * v + v])
        assert torch.equal(part.lm_head, whole.lm_head[rank * v : rank * v + v])
        assert {t.data_ptr() for t in part.tensors()}.isdisjoint(
            t.data_ptr() for t in whole.tensors()
        )
        # The rank has just the sizes that random weights of such a rank have.
        made = RankWeights.random(
            small_config(), world, device="cpu", dtype=torch.float32, down_layout=layout
        )
        assert [t.shape for t in part.tensors()] == [t.shape for t in made.tensors()]
        assert part.shapes == made.shapes
        assert all(t.is_contiguous() for t in part.tensors())


@pytest.mark.parametrize("layout", ["HI", "IH"])
def test_slices_of_fp8_experts_mean_slices_of_what_they_meant(layout: Any) -> None:
    whole = RankWeights.random(
        small_config(), 1, device="cpu", dtype=torch.float32, down_layout=layout, experts="fp8"
    )
    for rank in range(2):
        part = sliced(whole, rank, 2)
        lo, hi = rank * 24, rank * 24 + 24
        up, down = part.expert(part.layers[1], 5)
        whole_up, whole_down = whole.expert(whole.layers[1], 5)
        assert torch.equal(up, torch.cat((whole_up[lo:hi], whole_up[48 + lo : 48 + hi])))
        assert torch.equal(down, whole_down[:, lo:hi])


def test_what_cannot_be_sliced() -> None:
    rank = RankWeights.random(small_config(), 2, device="cpu", dtype=torch.float32, layers=1)
    with pytest.raises(KernelError, match="one of 2 ranks already"):
        sliced(rank, 0, 2)
    whole = RankWeights.random(small_config(), 1, device="cpu", dtype=torch.float32, layers=1)
    with pytest.raises(ConfigError, match="rank 2 of 2 does not exist"):
        sliced(whole, 2, 2)
    with pytest.raises(KernelError, match="does not divide"):
        sliced(whole, 0, 5)


def made_in_threads(world: int, tp: int, **how: Any) -> list[Any]:
    changes = how.pop("changes", {})
    config = small_config(**changes)
    return in_threads(
        world, lambda ranks: tp_weights(config, ranks, tp, dtype=torch.float32, **how)
    )


@pytest.mark.parametrize("experts", ["same", "fp8"])
def test_ranks_hold_norms_and_routers_alike_and_the_rest_their_own(experts: Any) -> None:
    one, other = made_in_threads(2, 4, experts=experts)
    assert one.shapes.tp == 4
    assert one.seconds == other.seconds > 0
    alike = {"qk_norm", "input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm",
             "router", "correction_bias"}  # fmt: skip
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for name in mine.__slots__:
            value = getattr(mine, name)
            if isinstance(value, Tensor):
                same = torch.equal(value.float(), getattr(theirs, name).float())
                assert same == (name in alike), name
    assert torch.equal(one.norm, other.norm)
    assert not torch.equal(one.embed, other.embed)
    assert not torch.equal(one.lm_head, other.lm_head)
    again = made_in_threads(2, 4, experts=experts)[1]
    pairs = zip(other.tensors(), again.tensors(), strict=True)
    assert all(torch.equal(a.float(), b.float()) for a, b in pairs)
    another = made_in_threads(2, 4, experts=experts, seed=1)[0]
    assert not torch.equal(another.embed, one.embed)


def test_ranks_that_share_a_kv_head_share_its_rows_and_its_cache() -> None:
    config = small_config(num_key_value_heads=2)

    def work(ranks: Ranks) -> tuple[RankWeights, RankState]:
        weights = tp_weights(config, ranks, 4, dtype=torch.float32)
        return weights, tp_state(weights, ranks, 30, batch=2)

    made = in_threads(4, work)
    heads = 3 * D
    for layer in range(3):
        kv = [weights.layers[layer].qkvg[heads : heads + 2 * D] for weights, _ in made]
        keys = [state.k[layer] for _, state in made]
        for each in (kv, keys):
            assert torch.equal(each[0], each[1])
            assert torch.equal(each[2], each[3])
            assert not torch.equal(each[0], each[2])
        q = [weights.layers[layer].qkvg[:heads] for weights, _ in made]
        assert not torch.equal(q[0], q[1])
    tokens = made[0][1].token
    assert tokens.shape == (2,)
    assert int(tokens.max()) < 50  # of one rank's vocabulary
    for _, state in made:
        assert torch.equal(state.token, tokens)
        state.token.fill_(7)
        state.reset()
        assert torch.equal(state.token, tokens)
    whole = in_threads(2, lambda ranks: tp_state(made[0][0], ranks, 30, seed=2).k[0])
    assert not torch.equal(whole[0], keys[0][:1])


def test_who_has_a_kv_head_first() -> None:
    config = resolve("beam-501b").config  # 8 KV heads
    for tp in (1, 2, 4, 8):
        assert [first_holder(config, tp, rank) for rank in range(tp)] == list(range(tp))
    assert [first_holder(config, 16, rank) for rank in range(6)] == [0, 0, 2, 2, 4, 4]
    assert [first_holder(config, 48, rank) for rank in (0, 5, 6, 47)] == [0, 0, 6, 42]


def test_all_ranks_refuse_what_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelError, match="--gpus 4 needs --tp 4 or more"):
        made_in_threads(4, 2)
    with pytest.raises(KernelError, match="does not divide this model"):
        made_in_threads(2, 5)
    with pytest.raises(KernelError, match="layers 1 to 3, so 9"):
        made_in_threads(2, 2, layers=9)

    def alone(ranks: Ranks) -> str:
        def make() -> int:
            if ranks.rank == 1:
                raise KernelError("there is no room")
            return 3

        with pytest.raises(KernelError) as caught:
            in_step(ranks, make)
        return str(caught.value)

    assert in_threads(3, alone) == ["rank 1 of 3: there is no room"] * 3
    # Ranks on a CPU share its memory: what one of them could take does not fit twice.
    config = small_config()
    shapes = made_in_threads(1, 2)[0].shapes
    need = rank_bytes(config, shapes, 3, torch.float32)
    monkeypatch.setattr(parallel_weights, "free_bytes", lambda device: int(1.8 * need))
    assert made_in_threads(1, 2)
    with pytest.raises(KernelError, match="2 ranks of 3 layers need"):
        made_in_threads(2, 2)


def test_labels() -> None:
    assert group_label(8, 2) == "2 of 8 ranks"
    assert group_label(8, 8) == "all 8 ranks"
