"""A drafter's checkpoint: the engine's names, what is refused, and drafters of other targets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reference import dflash2_fp64 as reference
from reference.safetensors_numpy import bfloat16_bits, read_safetensors, write_safetensors
from workbench.errors import CheckpointError, ConfigError, DraftError, ModelNotFoundError
from workbench.model.checkpoint import load
from workbench.model.drafter_config import DFlash2Config, drafter_tensors
from workbench.model.parallel import Shard
from workbench.spec.drafter import Drafter
from workbench.spec.drafter_checkpoint import load_drafter, save_drafter

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("error")]
Get = Callable[[str], Any]
FILE = "model.safetensors"


@pytest.fixture
def folder(drafting: Get, tmp_path: Path) -> Path:
    """A copy of a drafter's folder to damage."""
    return Path(shutil.copytree(drafting("grouped").folder, tmp_path / "copy"))


def bits(folder: Path) -> dict[str, np.ndarray]:
    return {name: bfloat16_bits(array) for name, array in read_safetensors(folder / FILE).items()}


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a ``config.json``; those of ``dflash_config`` there."""
    data = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        (data["dflash_config"] if name in data["dflash_config"] else data)[name] = value
    (folder / "config.json").write_text(json.dumps(data))


# -- names and bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "grouped", "deep"])
def test_names_and_shapes_are_the_engines(drafting: Get, name: str) -> None:
    d = drafting(name)
    stored = {n: a.shape for n, a in read_safetensors(d.folder / FILE).items()}
    assert stored == reference.expected_tensors(d.config)
    assert stored == {t.name: t.shape for t in drafter_tensors(d.drafter.config)}
    assert sum(p.numel() for p in d.drafter.parameters()) == sum(
        t.size for t in drafter_tensors(d.drafter.config)
    )
    assert sorted(p.name for p in d.folder.iterdir()) == ["config.json", FILE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_weights_are_the_loaded_ones_bit_for_bit(
    make: Any, drafting: Get, dtype: torch.dtype, tmp_path: Path
) -> None:
    d = make("deep", dtype)
    save_drafter(d.drafter, tmp_path)
    for name in (FILE, "config.json"):
        assert (tmp_path / name).read_bytes() == (d.folder / name).read_bytes()
    random = reference.random_tensors(d.config, seed=len("deep"))
    found = bits(tmp_path)
    assert found.keys() == random.keys()
    for name, array in found.items():
        assert np.array_equal(array, random[name]), name


def test_float32_weights_keep_every_bit(drafting: Get, tmp_path: Path) -> None:
    d = drafting("plain")
    drafter = Drafter(d.drafter.config, d.drafter.target)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in drafter.parameters():
            p.normal_(generator=generator)
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    again = load_drafter(d.drafter.target, tmp_path)
    for (name, a), (_, b) in zip(drafter.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float32"
    with pytest.raises(CheckpointError, match="float16"):
        save_drafter(drafter, tmp_path / "half", dtype=torch.float16)


def test_the_config_is_one_that_the_engine_takes(drafting: Get) -> None:
    """The fields without which vLLM 0.33.0 drops the window or takes the block for causal."""
    d = drafting("grouped")
    config = d.config
    assert config["architectures"] == ["DFlash2BeamDraftModel"]
    assert (config["model_type"], config["use_sliding_window"]) == ("qwen3", True)
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert config["is_causal"] is config["dflash_config"]["causal"] is False
    assert config["dflash_config"]["target_layer_ids"] == [0, 3]
    assert DFlash2Config.from_dict(config) == d.drafter.config
    assert d.drafter.block == 8
    assert drafting("deep").drafter.block == 8  # where a checkpoint does not say


def test_a_drafter_has_no_embedding_and_no_head_of_its_own(drafting: Get) -> None:
    d = drafting("plain")
    assert d.drafter.target not in list(d.drafter.modules())
    names = [name for name, _ in d.drafter.named_parameters()]
    assert not [name for name in names if "embed" in name or "head" in name]


# -- damaged checkpoints ------------------------------------------------------------------------

NAMES = [
    "fc.weight",
    "layers.1.self_attn.k_proj.weight",
    "layers.0.mlp_conv.base_kernel",
    "candidate_selector.successor_codebook",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "nan", "infinite"])
def test_a_damaged_tensor_is_refused_by_its_name(
    drafting: Get, folder: Path, name: str, damage: str
) -> None:
    tensors = bits(folder)
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][:-1]
    elif damage == "dtype":
        tensors[name] = tensors[name].astype(np.float32)
    else:
        tensors[name].flat[-1] = 0x7FC0 if damage == "nan" else 0xFF80
    write_safetensors(folder / FILE, tensors)
    if damage == "dtype":  # FP32 is as good as BF16; anything else is refused
        load_drafter(drafting("grouped").drafter.target, folder)
        raw = (folder / FILE).read_bytes().replace(b'"F32"', b'"I32"')
        (folder / FILE).write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        load_drafter(drafting("grouped").drafter.target, folder)
    assert f"tensor {name} " in str(caught.value)
    word = {"missing": "missing", "shape": "shape", "dtype": "dtype"}.get(damage, "NaN or infinite")
    assert word in str(caught.value)


def test_an_unknown_tensor_is_refused_by_its_name(drafting: Get, folder: Path) -> None:
    for name in ("embed_tokens.weight", "layers.2.input_layernorm.weight"):
        tensors = bits(folder)
        tensors[name] = tensors["norm.weight"]
        write_safetensors(folder / FILE, tensors)
        with pytest.raises(CheckpointError, match=f"tensor {name} .* unknown"):
            load_drafter(drafting("grouped").drafter.target, folder)
        del tensors[name]
        write_safetensors(folder / FILE, tensors)
    load_drafter(drafting("grouped").drafter.target, folder)


def test_files_that_are_not_there_or_no_checkpoint(drafting: Get, folder: Path) -> None:
    target = drafting("grouped").drafter.target
    with pytest.raises(ModelNotFoundError, match="unknown drafter"):
        load_drafter(target, folder / "nowhere")
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=FILE):
        load_drafter(target, folder)
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError):
        load_drafter(target, folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_drafter(target, folder)


def test_weights_that_are_not_finite_are_not_saved(drafting: Get, make: Any, folder: Path) -> None:
    before = (folder / FILE).read_bytes()
    d = make("grouped")
    with torch.no_grad():
        d.drafter.layers[1].attention.qkv[-1, -1] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_proj\.weight"):
        save_drafter(d.drafter, folder)
    assert (folder / FILE).read_bytes() == before


# -- drafters of other targets ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 96),
        ("vocab_size", 80),
        ("target_layer_ids", [0, 4]),  # the target has layers 0 to 3
        ("target_layer_ids", [3, 0]),
        ("target_layer_ids", [0, 0]),
        ("mask_token_id", 72),
        ("block_size", 1),
        ("conv_group_size", 11),
        ("num_key_value_heads", 4),
        ("selector_top_k", 100),
        ("head_dim", 7),
        ("final_logit_softcapping", 0),
        ("layer_types", ["sliding_attention"]),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("is_causal", True),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_its_field(
    drafting: Get, folder: Path, field: str, value: Any
) -> None:
    edit_config(folder, **{field: value})
    with pytest.raises((DraftError, ConfigError), match=field):
        load_drafter(drafting("grouped").drafter.target, folder)


def test_a_shape_beyond_any_machine_is_refused_before_it_is_made(
    drafting: Get, folder: Path
) -> None:
    target = drafting("plain").drafter.target
    huge = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1 << 40)
    edit_config(folder, **huge)
    with pytest.raises(CheckpointError, match="but the drafter's config needs"):
        load_drafter(target, folder)


def test_a_missing_field_is_named(drafting: Get, folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    for field in ("sliding_window", "selector_rank", "dflash_config"):
        inner = data["dflash_config"] if field in data["dflash_config"] else data
        rest = {k: v for k, v in inner.items() if k != field}
        changed = rest if inner is data else {**data, "dflash_config": rest}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=field):
            load_drafter(drafting("grouped").drafter.target, folder)


@pytest.mark.parametrize("changes", [{"hidden_size": 96}, {"vocab_size": 80}])
def test_a_mismatch_with_the_target_is_a_draft_error(
    drafting: Get, folder: Path, changes: dict[str, int]
) -> None:
    """One kind of error for every pair that does not go together, with both values in it."""
    (field, value), target = *changes.items(), drafting("grouped").drafter.target
    edit_config(folder, **changes)
    with pytest.raises(DraftError, match=f"{field} is {value}.* {getattr(target.config, field)}"):
        load_drafter(target, folder)


def test_a_rank_is_no_target(make: Any, drafting: Get) -> None:
    rank = load(make.folder / "target", shard=Shard(rank=1, world=2))
    with pytest.raises(DraftError, match="tensor-parallel"):
        load_drafter(rank, drafting("grouped").folder)


def test_a_target_without_a_bundled_drafter_says_so(drafting: Get) -> None:
    with pytest.raises(DraftError, match="no drafter is bundled"):
        load_drafter(drafting("grouped").drafter.target)
    with pytest.raises((DraftError, ConfigError), match=r"beam-501b-dflash2|hidden_size"):
        load_drafter(drafting("grouped").drafter.target, "beam-501b-dflash2")
