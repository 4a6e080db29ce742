"""Choices that two sides are fed, and the parts of the engine's benchmark that need no engine."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from workbench.errors import KernelError, WorkbenchError
from workbench.kernels.rank.choices import (
    distinct_experts,
    of_layers,
    read_choices,
    seeded_choices,
)
from workbench.kernels.rank.weights import RankWeights
from workbench.model.presets import resolve

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "rank_engine.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_engine", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def weights() -> RankWeights:
    return RankWeights.random(resolve("beam-501b").config, 8, device="meta")


# ------------------------------------------------------------------ choices


def test_seeded_choices_repeat_and_every_token_has_distinct_experts() -> None:
    ids, shares = seeded_choices(3, 500, 16, 4, 11)
    again, same_shares = seeded_choices(3, 500, 16, 4, 11)
    assert torch.equal(ids, again)
    assert torch.equal(shares, same_shares)
    assert ids.shape == shares.shape == (3, 500, 4)
    assert ids.dtype == torch.int64
    assert {len(set(row)) for row in ids.flatten(0, 1).tolist()} == {4}
    assert int(ids.min()) == 0
    assert int(ids.max()) == 15
    assert torch.allclose(shares.sum(-1), torch.ones(3, 500))
    assert float(shares.min()) > 0.2
    assert not torch.equal(ids[0], ids[1])
    assert not torch.equal(ids, seeded_choices(3, 500, 16, 4, 12)[0])
    # A layer's do not depend on how many layers there are.
    assert torch.equal(seeded_choices(1, 500, 16, 4, 11)[0][0], ids[0])


def test_loads_of_seeded_experts_vary_as_the_recorded_ones() -> None:
    """Recorded: 1024 rows of 8 of 256 experts had a variance of 108 at a mean of 32."""
    ids, _ = seeded_choices(6, 1024, 256, 8, 5)
    loads = torch.stack([each.flatten().bincount(minlength=256) for each in ids]).float()
    assert float(loads.mean()) == 32
    assert 80 < float(loads.var(dim=1).mean()) < 140
    # All alike: drawing without putting back keeps below a Poisson distribution's variance.
    even, _ = seeded_choices(6, 1024, 256, 8, 5, spread=0.0)
    loads = torch.stack([each.flatten().bincount(minlength=256) for each in even]).float()
    assert 26 < float(loads.var(dim=1).mean()) < 37
    # Few tokens touch as many experts as chance says: 256 (1 - (1 - 8/256)^8) = 57.4.
    few, _ = seeded_choices(40, 8, 256, 8, 5)
    assert 55 < distinct_experts(few) < 59


def test_all_experts_can_be_chosen_and_more_are_refused() -> None:
    ids, _ = seeded_choices(1, 20, 4, 4, 0)
    assert torch.equal(ids.sort(-1).values, torch.arange(4).expand(1, 20, 4))
    with pytest.raises(KernelError, match="5 of 4 experts"):
        seeded_choices(1, 20, 4, 5, 0)
    with pytest.raises(KernelError, match="spread -1"):
        seeded_choices(1, 20, 4, 2, 0, spread=-1)


def test_pairs_of_layers_leave_dense_ones_out() -> None:
    ids, shares = seeded_choices(3, 5, 8, 2, 0)
    pairs = of_layers(ids, shares, [True, False, False])
    assert pairs[0] is None
    assert pairs[2] is not None
    assert torch.equal(pairs[2][0], ids[2])
    assert torch.equal(pairs[2][1], shares[2])
    with pytest.raises(KernelError, match="3 layers do not fit a model of 2"):
        of_layers(ids, shares, [True, False])


def record(rows: tuple[int, ...] = (2, 7), layers: int = 3) -> dict[str, torch.Tensor]:
    held = {}
    for n in rows:
        ids, shares = seeded_choices(layers, n, 16, 4, n)
        ids[0] = -1
        held |= {f"ids {n}": ids.to(torch.int16), f"shares {n}": shares}
    return held


def test_records_are_read_back(tmp_path: Path) -> None:
    held, path = record(), tmp_path / "experts.safetensors"
    save_file(held, path)
    found = read_choices(path)
    assert sorted(found) == [2, 7]
    for n, (ids, shares) in found.items():
        assert ids.dtype == torch.int64
        assert torch.equal(ids, held[f"ids {n}"].long())
        assert torch.equal(shares, held[f"shares {n}"])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ids 9": torch.zeros(3, 9, 4)}, 'tensor "ids 9"'),
        ({"weights": torch.zeros(1)}, 'tensor "weights"'),
        ({"shares 7": torch.zeros(3, 6, 4)}, "must be"),
        ({"ids 5": torch.zeros(3, 7, 4), "shares 5": torch.zeros(3, 7, 4)}, "must be"),
    ],
)
def test_half_a_record_is_refused(
    tmp_path: Path, change: dict[str, torch.Tensor], word: str
) -> None:
    path = tmp_path / "experts.safetensors"
    save_file(record() | change, path)
    with pytest.raises(KernelError, match=word):
        read_choices(path)


def test_files_that_are_no_records_are_refused(tmp_path: Path) -> None:
    for name in ("experts.pt", "experts.safetensors"):
        path = tmp_path / name
        with pytest.raises(KernelError, match="no recorded choices"):
            read_choices(path)
        path.write_bytes(b"nothing of the kind")
        with pytest.raises(KernelError, match="no recorded choices"):
            read_choices(path)
    # torch's own format is a pickle, and none is read, whatever it holds.
    torch.save(record(), tmp_path / "experts.pt")
    with pytest.raises(KernelError, match="no recorded choices"):
        read_choices(tmp_path / "experts.pt")


def test_distinct_experts_counts_sparse_layers_only() -> None:
    ids = torch.tensor([[[-1, -1]], [[3, 5]], [[0, 0]]])
    assert distinct_experts(ids) == 1.5
    assert distinct_experts(ids[:1]) == 0


# ------------------------------------------------------------------ what the engine is fed


class Router:
    """As the engine's: weights and ids of each token, int32."""

    def select_experts(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, *, input_ids: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shares, ids = router_logits.topk(4)
        return shares, ids.int()


def routed(router: Router, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return router.select_experts(
        hidden_states=torch.zeros(tokens, 8), router_logits=torch.rand(tokens, 16)
    )


def fed_routers(
    bench: ModuleType, order: tuple[int, ...]
) -> tuple[Any, list[Any], dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Three routers of a class of their own, first asked in ``order``."""
    kind = type("Fed", (Router,), {"select_experts": Router.select_experts})
    given = {n: seeded_choices(3, n, 16, 4, n) for n in (2, 7)}
    feed = bench.Feed(given)
    feed.install(kind)
    routers = [kind() for _ in range(3)]
    for place in order:
        routed(routers[place], 30)
    return feed, routers, given


def test_routers_are_fed_by_layer_in_whatever_order_they_were_asked(bench: ModuleType) -> None:
    feed, routers, given = fed_routers(bench, (1, 0, 2))
    modules = [("model", SimpleNamespace())]
    modules += [
        (f"model.layers.{4 + i}.mlp.experts", SimpleNamespace(router=each))
        for i, each in enumerate(routers)
    ]
    assert feed.settle(modules) == [5, 4, 6]
    for n, (ids, shares) in given.items():
        for layer, router in enumerate(routers):
            got_shares, got_ids = routed(router, n)
            assert got_ids.dtype == torch.int32
            assert torch.equal(got_ids.long(), ids[layer])
            assert torch.equal(got_shares, shares[layer])
    # A number of tokens that nobody recorded keeps the router's own, and so does a feed that is
    # off: one of 30 tokens chose from 16 logits, the largest first.
    shares, _ = routed(routers[0], 30)
    assert torch.equal(shares, shares.sort(-1, descending=True).values)
    feed.on = False
    shares, ids = routed(routers[0], 7)
    assert not torch.equal(ids.long(), given[7][0][0])
    assert feed.served == {2: 3, 7: 3}


def test_what_lies_where_a_graph_reads_is_exchanged_in_place(bench: ModuleType) -> None:
    feed, routers, given = fed_routers(bench, (2, 1, 0))
    feed.settle([(f"layers.{i}.x", SimpleNamespace(router=r)) for i, r in enumerate(routers)])
    seen = [routed(router, 7)[1] for router in routers]
    where = [each.data_ptr() for each in seen]
    feed.fill(7, torch.arange(4).expand(3, 7, 4), given[7][1])
    assert all(torch.equal(each, torch.arange(4).expand(7, 4).int()) for each in seen)
    assert [routed(router, 7)[1].data_ptr() for router in routers] == where
    assert len(set(where)) == 3


def test_routers_that_do_not_match_the_choices_are_refused(bench: ModuleType) -> None:
    feed, routers, _ = fed_routers(bench, (0, 1))
    named = [(f"layers.{i}.x", SimpleNamespace(router=r)) for i, r in enumerate(routers)]
    with pytest.raises(WorkbenchError, match="2 routers were asked"):
        feed.settle(named)
    routed(routers[2], 2)
    with pytest.raises(WorkbenchError, match="2 of them belong to named layers"):
        feed.settle(named[:2])
    with pytest.raises(WorkbenchError, match="more than 3 routers"):
        routed(type(routers[0])(), 2)


def test_choices_to_feed_are_the_sparse_layers_and_a_seeded_prefill(
    bench: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "experts.safetensors"
    held = record()
    save_file(held, path)
    shapes = SimpleNamespace(experts=16, top_k=4)
    found, origin = bench.choices_to_feed(path, [True, False, False], shapes, (2, 7), 64)
    assert origin == {2: "recorded", 7: "recorded", 64: "seed 8"}
    assert torch.equal(found[7][0], held["ids 7"][1:].long())
    assert torch.equal(found[64][0], seeded_choices(3, 64, 16, 4, 8)[0][1:])
    for message, dense, sizes, tokens in (
        ("no choices of 5 rows", [True, False, False], shapes, (5,)),
        ("not of this model", [True, False], shapes, (2,)),
        ("outside 0..15", [False, False, False], shapes, (2,)),
        ("outside 0..7", [True, False, False], SimpleNamespace(experts=8, top_k=4), (2,)),
    ):
        with pytest.raises(WorkbenchError, match=message):
            bench.choices_to_feed(path, dense, sizes, tokens, 64)


# ------------------------------------------------------------------ sizes, floors, documents


def test_the_engine_gets_the_sizes_of_one_of_eight_ranks(
    bench: ModuleType, weights: RankWeights
) -> None:
    config = bench.engine_config(weights.config, weights.shapes, 52)
    wanted = {
        "hidden_size": 5120, "num_hidden_layers": 52, "num_attention_heads": 6,
        "num_key_value_heads": 1, "head_dim": 128, "sliding_window": 512,
        "intermediate_size": 1536, "moe_intermediate_size": 320, "num_experts": 256,
        "num_experts_per_tok": 8, "vocab_size": 20480, "n_group": None, "topk_group": None,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0, "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    assert {name: config[name] for name in wanted} == wanted
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [
        3, 9, 15, 21, 27, 33, 39, 45, 51,
    ]  # fmt: skip
    assert config["mlp_layer_types"] == ["dense"] * 3 + ["sparse"] * 49
    assert json.loads(json.dumps(config)) == config
    assert len(bench.engine_config(weights.config, weights.shapes, 5)["layer_types"]) == 5
    assert bench.moe_config_name(weights.shapes) == "E=256,N=320,device_name=NVIDIA_H200.json"


def test_floor_counts_what_a_step_reads(bench: ModuleType, weights: RankWeights) -> None:
    """Bytes by hand, from the sizes of a rank."""
    hidden, layers = 5120, 52
    expert = 3 * 320 * hidden * 2
    attention = (1792 * hidden + hidden * 768 + 2 * 128 + 6) * 2 + 4 * hidden * 2
    dense = 3 * 1536 * hidden * 2
    router = 256 * (hidden + 1) * 4
    head = (20480 + 1) * hidden * 2
    for distinct, rows, context in ((8, 1, 1024), (57.5, 8, 1024), (247, 128, 100)):
        keys = 9 * (context + 1) + 43 * min(context + 1, 512)
        moved = layers * attention + 3 * dense + 49 * (router + distinct * expert)
        moved += head + rows * (hidden * 2 + keys * 2 * 128 * 2)
        found = bench.floor_milliseconds(weights, distinct, rows, context, 4.28e12)
        assert found == pytest.approx(moved / 4.28e12 * 1e3, rel=1e-9)


def test_the_fastest_step_of_each_number_of_rows_is_ours(bench: ModuleType) -> None:
    document = {
        "first": {"8": {"milliseconds": 9.9, "distinct": 57.0}},
        "batches": {"8": {"milliseconds": 9.8, "distinct": 57.0}, "3": {"milliseconds": 6.0}},
        "profile": {"8": {"plain": {"milliseconds": 9.7, "distinct": 57.0}, "config": {}}},
        "chain": {"check": {"failures": []}, "32": {"milliseconds": 20.7, "distinct": 160.0}},
        "verify": {"8": {"milliseconds": 1.0}},
    }
    found = bench.ours(document)
    assert {n: row["milliseconds"] for n, row in found.items()} == {8: 9.7, 3: 6.0, 32: 20.7}
    assert found[8]["part"] == "profile, plain launches"
    assert found[32] == {"milliseconds": 20.7, "distinct": 160.0, "part": "chain"}
    assert bench.ours({}) == {}


def test_the_graph_of_a_decode_step_is_found(bench: ModuleType) -> None:
    key = namedtuple("key", "cg_mode num_tokens uniform_token_count")
    graphs = {
        key(_Mode("PIECEWISE"), 8, None): "pieces",
        key(_Mode("FULL"), 8, 4): "a verification",
        key(_Mode("FULL"), 8, 1): "right",
    }
    assert bench.graph_of(graphs, 8) == "right"
    with pytest.raises(WorkbenchError, match="no graph of 16 tokens"):
        bench.graph_of(graphs, 16)


class _Mode(str):
    """A mode that can be a key and has a name."""

    @property
    def name(self) -> str:
        return str(self)


def test_tuned_launch_sizes_are_checked(bench: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    sizes = {"BLOCK_SIZE_M": 16, "num_warps": 4}
    path.write_text(json.dumps({"triton_version": "3.6", "8": sizes}))
    assert bench.checked_moe_config(path) == {"8": sizes}
    for text in ("{}", '{"8": {}}', '{"eight": {"BLOCK_SIZE_M": 1, "num_warps": 1}}', "[1]", "no"):
        path.write_text(text)
        with pytest.raises(WorkbenchError, match="launch sizes"):
            bench.checked_moe_config(path)


def test_surroundings_are_those_of_the_engine(
    bench: ModuleType, weights: RankWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = tmp_path / "tuned.json"
    tuned.write_text(json.dumps({"8": {"BLOCK_SIZE_M": 16, "num_warps": 4}}))
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_TUNED_CONFIG_FOLDER", "VLLM_HOST_IP",
                 "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_COLOR",
                 "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HF_HUB_OFFLINE",
                 "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"):  # fmt: skip
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr(sys, "path", list(sys.path))
    site = tmp_path / "site"
    bench.surroundings([site], tuned, weights.shapes)
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(site), "before"]
    assert sys.path[1] == str(site)
    folder = Path(os.environ["VLLM_TUNED_CONFIG_FOLDER"])
    written = json.loads((folder / "E=256,N=320,device_name=NVIDIA_H200.json").read_text())
    assert written == {"8": {"BLOCK_SIZE_M": 16, "num_warps": 4}}


def test_summaries(bench: ModuleType) -> None:
    assert bench.summary([5.0])["milliseconds"] == 5.0
    row = bench.summary([float(n) for n in range(11)])
    assert (row["low"], row["milliseconds"], row["high"], row["rounds"]) == (1.0, 5.0, 9.0, 11)
