"""``BeamConfig``: every rule refuses what it must, and the presets add up by hand arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ConfigError, ModelNotFoundError
from workbench.model.config import BeamConfig, Source
from workbench.model.drafter_config import DFlash2Config
from workbench.model.presets import beam_501b, known_models, resolve, resolve_drafter
from workbench.model.tensors import (
    active_parameters,
    parameters_by_part,
    tensor_specs,
    total_parameters,
)

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "sliding_window": 5,
    "max_position_embeddings": 512,
}
COUNTS = [name for name, value in BASE.items() if isinstance(value, int)]


def built(**changes: Any) -> BeamConfig:
    return BeamConfig.from_dict(BASE | changes)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_counts_are_whole_numbers_of_at_least_one(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        built(**{name: value})


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "routed_scaling_factor"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1e-6", None])
def test_factors_are_positive_and_finite(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        built(**{name: value})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries for 3 layers"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 entries for 3 layers"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for 3 layers"),
        (
            {"layer_types": ["full_attention", "global_attention", "full_attention"]},
            r"layer_types\[1\] is 'global_attention'; use one of full_attention, sliding",
        ),
        ({"mlp_layer_types": ["dense", "sparse", 3]}, r"mlp_layer_types\[2\] is 3"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"mlp_layer_types": 3}, "mlp_layer_types must be a list"),
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        (
            {"rope_parameters": {"rope_theta": 2.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is not 1",
        ),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ({"final_logit_softcapping": -30}, "final_logit_softcapping"),
        ({"final_logit_softcapping": float("nan")}, "final_logit_softcapping"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) exceeds num_experts \(8\)"),
        ({"n_group": 2}, "n_group and topk_group must be given together"),
        ({"topk_group": 2}, "n_group and topk_group must be given together"),
        ({"n_group": 3, "topk_group": 1}, "n_group must divide num_experts"),
        ({"n_group": 0, "topk_group": 1}, "n_group must divide num_experts"),
        ({"n_group": 2.0, "topk_group": 1}, "n_group must divide num_experts"),
        ({"n_group": 2, "topk_group": 3}, "topk_group must lie in"),
        ({"n_group": 2, "topk_group": 0}, "topk_group must lie in"),
        ({"n_group": 8, "topk_group": 4}, "fewer than two experts a group"),
        ({"n_group": 4, "topk_group": 1}, r"num_experts_per_tok \(3\) exceeds the experts of"),
        ({"eos_token_id": 64}, "eos_token_id must be null or a token id below 64"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"pad_token_id": 1.0}, "pad_token_id"),
        ({"rope_parameters": "default"}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta"),
        ({"rope_parameters": {"full_attention": None}}, "exactly one non-null entry"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1.0},
                    "sliding_attention": {"rope_theta": 2.0},
                }
            },
            "exactly one non-null entry",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 2.0}, "other": None}},
            "exactly one non-null entry",
        ),
    ],
)
def test_what_contradicts_beam_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        built(**changes)


@pytest.mark.parametrize("name", [n for n in BASE if n not in ("head_dim",) and "types" not in n])
def test_missing_field_is_named_with_its_file(name: str) -> None:
    data = {key: value for key, value in BASE.items() if key != name}
    with pytest.raises(ConfigError, match=rf"^some/config\.json: the field {name} is missing"):
        BeamConfig.from_dict(data, where="some/config.json")


@pytest.mark.parametrize("name", ["head_dim", "layer_types", "mlp_layer_types"])
def test_null_is_the_same_as_absent(name: str) -> None:
    data = built().to_dict()
    given, absent = {**data, name: None}, {k: v for k, v in data.items() if k != name}
    assert BeamConfig.from_dict(given) == BeamConfig.from_dict(absent)


def test_absent_fields_take_the_engines_defaults() -> None:
    data = {k: v for k, v in BASE.items() if k not in ("layer_types", "mlp_layer_types")}
    del data["head_dim"]
    config = BeamConfig.from_dict(data)
    assert config.layer_types == ("sliding_attention",) * 3
    assert config.mlp_layer_types == ("sparse",) * 3
    assert config.head_dim == 12
    assert (config.rope_theta, config.rms_norm_eps, config.norm_topk_prob) == (10000.0, 1e-6, True)
    assert (config.n_group, config.topk_group, config.final_logit_softcapping) == (None,) * 3


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_type": "default", "rope_theta": 500.0}, 500.0),
        ({"full_attention": None, "sliding_attention": {"rope_theta": 70.0}}, 70.0),
        ({"sliding_attention": {"rope_type": "default", "rope_theta": 70.0}}, 70.0),
        ({"rope_type": "default"}, 10000.0),
        (None, 10000.0),
    ],
)
def test_both_forms_of_rope_parameters(rope: dict[str, Any] | None, theta: float) -> None:
    assert built(rope_parameters=rope).rope_theta == theta


def test_derived_shapes_and_layer_lists() -> None:
    config = built()
    assert (config.q_size, config.kv_size) == (64, 32)
    assert config.full_layers == (1,)
    assert config.sliding_layers == (0, 2)
    assert config.sparse_layers == (1, 2)
    assert [config.is_full(i) for i in range(3)] == [False, True, False]
    assert [config.is_sparse(i) for i in range(3)] == [False, True, True]


def test_round_trip_keeps_every_field_and_every_unknown_key() -> None:
    extra = {
        "model_type": "beam",
        "architectures": ["BeamForCausalLM"],
        "transformers_version": "5.19.0",
        "x": [1, {}],
    }
    given = BASE | extra | {
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5,
        "final_logit_softcapping": 30.0, "norm_topk_prob": False, "eos_token_id": 1,
        "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 70.0}},
    }  # fmt: skip
    config = BeamConfig.from_dict(given)
    data = json.loads(config.to_json())
    again = BeamConfig.from_dict(data)
    assert again == config
    assert again.extra == config.extra
    assert {key: data[key] for key in extra} == extra
    assert data["rope_parameters"] == {"rope_type": "default", "rope_theta": 70.0}
    assert {key: data[key] for key in given if key != "rope_parameters"} == {
        key: value for key, value in given.items() if key != "rope_parameters"
    }


def test_config_is_frozen_and_replace_checks_again() -> None:
    config = built()
    with pytest.raises(AttributeError):
        config.hidden_size = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.extra["a"] = 1  # type: ignore[index]
    assert json.loads(config.to_json())["model_type"] == "beam"
    assert config.replace(sliding_window=9).sliding_window == 9
    with pytest.raises(ConfigError, match="layer_types has 3 entries for 4 layers"):
        config.replace(num_hidden_layers=4)


def test_config_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert BeamConfig.from_json(tmp_path) == BeamConfig.from_json(tmp_path / "config.json")
    for text, says in (
        ("{", "is not valid JSON"),
        ("[1]", "holds a list"),
        (json.dumps(BASE | {"layer_types": []}), r"config\.json: layer_types has 0 entries"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=says):
            BeamConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        BeamConfig.from_json(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        BeamConfig.from_json(tmp_path)


# -- presets and counts -------------------------------------------------------------------------


def test_501b_adds_up_by_hand() -> None:
    """The arithmetic of the published dimensions, written out without the library's formulas."""
    hidden, layers, sparse, dense = 5120, 52, 49, 3
    expert = 3 * hidden * 2560
    experts = 256 * expert * sparse
    # q and gate and o: 48 heads of 128; k and v: 8 heads of 128; one gate bias a query head
    attention = layers * (3 * hidden * 48 * 128 + 2 * hidden * 8 * 128 + 48)
    mlp = dense * 3 * hidden * 12288
    routers = sparse * (256 * hidden + 256)
    norms = layers * (4 * hidden + 2 * 128) + hidden
    embedding = 163840 * hidden
    config = beam_501b().config
    assert parameters_by_part(config) == {
        "embedding": embedding, "head": embedding, "attention": attention, "norms": norms,
        "dense_mlp": mlp, "router": routers, "experts": experts,
    }  # fmt: skip
    total = experts + attention + mlp + routers + norms + 2 * embedding
    assert total_parameters(config) == total
    assert round(total / 1e9, 3) == 501.012
    active = total - experts + 8 * expert * sparse
    assert active_parameters(config) == active
    assert round(active / 1e9, 2) == 23.18


def test_501b_has_43_sliding_and_9_full_layers_and_says_where_all_of_it_comes_from() -> None:
    resolved = beam_501b()
    config = resolved.config
    assert (len(config.sliding_layers), len(config.full_layers)) == (43, 9)
    assert config.full_layers == (3, 9, 15, 21, 27, 33, 39, 45, 51)
    assert config.sparse_layers == tuple(range(3, 52))
    # Published: 36 KiB of BF16 keys and values a token in full layers.
    assert len(config.full_layers) * 2 * 2 * config.kv_size == 36 * 1024
    # The engine's packed projection: 14336 rows, 3584 a rank with TP4, 1792 with TP8.
    assert 2 * config.q_size + 2 * config.kv_size == 14336 == 4 * 3584 == 8 * 1792
    fields = {f for f in BeamConfig.__dataclass_fields__ if f != "extra"}
    assert set(resolved.sources) == fields
    assert resolved.sources["sliding_window"] == Source(kind="published")
    assert resolved.sources["num_experts_per_tok"].kind == "derived"
    assert resolved.folder is None


def test_tensor_names_are_unique_and_complete() -> None:
    config = built()
    specs = list(tensor_specs(config))
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    # 3 outside the layers, 12 a layer for attention and norms, 3 dense, 2 + 8 x 3 a sparse layer
    assert len(names) == 3 + 3 * 12 + 3 + 2 * (2 + 24)
    assert {s.name for s in specs if s.fp32} == {
        f"model.layers.{i}.mlp.gate.{leaf}"
        for i in (1, 2)
        for leaf in ("weight", "e_score_correction_bias")
    }


def test_resolve_names_folders_and_nothing_else(tmp_path: Path) -> None:
    assert resolve("beam-501b").name == "beam-501b"
    assert "beam-501b" in known_models()
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    resolved = resolve(tmp_path)
    assert resolved.folder == tmp_path
    assert resolved.config == built()
    assert resolved.sources["hidden_size"] == Source(kind="checkpoint", note="config.json")
    assert resolved.sources["rms_norm_eps"].kind == "engine"
    with pytest.raises(ModelNotFoundError, match=r"unknown model 'beam-9000'.*beam-501b"):
        resolve("beam-9000")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": False}, "use_sliding_window must be true"),
        ({"dflash_config": {"causal": True}}, "causal in dflash_config must be false"),
        ({"dflash_config": {"selector_top_k": 257}}, "selector_top_k must be at most 256"),
        ({"rms_norm_eps": 2**64}, "rms_norm_eps must be a positive number"),
        ({"dflash_config": {"final_logit_softcapping": 10**20}}, "final_logit_softcapping"),
    ],
)
def test_a_drafter_that_the_engine_reads_otherwise_is_refused(
    changes: dict[str, Any], words: str
) -> None:
    data = resolve_drafter("beam-501b-dflash2").config.to_dict()
    nested = data["dflash_config"] | changes.get("dflash_config", {})
    with pytest.raises(ConfigError, match=words):
        DFlash2Config.from_dict(data | changes | {"dflash_config": nested})


def test_a_name_no_file_system_can_hold_is_an_unknown_model() -> None:
    for look_up in (resolve, resolve_drafter):
        with pytest.raises(ModelNotFoundError, match="unknown"):
            look_up("x" * 5000)
