"""Checkpoints: what is read, what is refused, and that saving is whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import workbench
from reference import beam_fp64
from reference.safetensors_numpy import bfloat16_bits, read_safetensors, write_safetensors
from workbench.errors import CheckpointError, ConfigError, ModelNotFoundError, WorkbenchError
from workbench.model import checkpoint, checkpoint_save
from workbench.model.beam import Beam
from workbench.model.checkpoint import load, load_into, save
from workbench.model.checkpoint_layout import tensor_targets
from workbench.model.config import BeamConfig
from workbench.model.parallel import Shard
from workbench.model.tensors import tensor_specs

pytestmark = pytest.mark.usefixtures("one_thread")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "max_position_embeddings": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
ROOT = Path(workbench.__file__).parents[1]


def stored(seed: int = 3) -> dict[str, np.ndarray]:
    return beam_fp64.random_tensors(CONFIG, seed)


def write(folder: Path, tensors: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A checkpoint folder; with several shards also its index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if shards == 1:
        write_safetensors(folder / SINGLE, tensors)
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"part-{number}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def equal(a: Beam, b: Beam) -> bool:
    other = dict(b.named_parameters())
    return all(
        p.dtype == other[n].dtype and torch.equal(p, other[n]) for n, p in a.named_parameters()
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "good", stored())


# -- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
def test_targets_cover_every_element_of_every_parameter_once(world: int) -> None:
    config = BeamConfig.from_dict(CONFIG)
    shapes = {spec.name: spec.shape for spec in tensor_specs(config)}
    for rank in range(world):
        shard = Shard(rank=rank, world=world)
        with torch.device("meta"):
            beam = Beam(config, shard)
        written = {name: torch.zeros(p.shape) for name, p in beam.named_parameters()}
        targets = tensor_targets(config, shard)
        assert targets.keys() == shapes.keys()
        for name, target in targets.items():
            source = torch.empty(shapes[name])[target.source]
            if target.transposed:
                source = source.transpose(-1, -2)
            region = written[target.parameter][target.region]
            assert region.shape == source.shape, name
            region += 1
        assert all(torch.all(count == 1) for count in written.values())


def test_every_value_arrives_in_its_place(folder: Path) -> None:
    """By hand, for each kind of tensor, from the file's own numbers."""
    beam = load(folder)
    file = {k: torch.tensor(v) for k, v in read_safetensors(folder / SINGLE).items()}
    here = "model.layers.1."

    def same(parameter: torch.Tensor, *names: str) -> None:
        expected = torch.cat([file[name].float() for name in names])
        assert parameter.dtype == torch.float32
        torch.testing.assert_close(parameter.flatten(), expected.flatten(), rtol=0, atol=0)

    layer = beam.layers[1]
    attention = layer.attention
    projections = [f"{here}self_attn.{n}_proj.weight" for n in ("q", "k", "v", "gate")]
    same(attention.qkvg, *projections)
    same(attention.qk_norm, f"{here}self_attn.q_norm.weight", f"{here}self_attn.k_norm.weight")
    same(attention.gate_bias, f"{here}self_attn.gate_bias")
    same(attention.o_proj, f"{here}self_attn.o_proj.weight")
    same(layer.input_norm, f"{here}input_layernorm.weight")
    same(layer.post_attention_norm, f"{here}post_attention_layernorm.weight")
    same(layer.pre_mlp_norm, f"{here}pre_feedforward_layernorm.weight")
    same(layer.post_mlp_norm, f"{here}post_feedforward_layernorm.weight")
    same(layer.mlp.router.weight, ROUTER)
    same(layer.mlp.router.correction_bias, f"{here}mlp.gate.e_score_correction_bias")
    for expert in range(4):
        prefix = f"{here}mlp.experts.{expert}."
        same(layer.mlp.gate_up[expert], prefix + "gate_proj.weight", prefix + "up_proj.weight")
        same(layer.mlp.down[expert].T.contiguous(), prefix + "down_proj.weight")
    dense = beam.layers[0].mlp
    same(dense.gate_up, *(f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up")))
    same(dense.down, "model.layers.0.mlp.down_proj.weight")
    same(beam.embed_tokens, "model.embed_tokens.weight")
    same(beam.norm, "model.norm.weight")
    same(beam.lm_head, "lm_head.weight")


def test_loaded_model_is_ready_for_inference(folder: Path) -> None:
    beam = load(folder)
    assert beam.name == str(folder)
    assert beam.tokenizer is None
    assert not beam.training
    assert not any(p.requires_grad for p in beam.parameters())
    assert beam.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routers_stay_float32(folder: Path, dtype: torch.dtype) -> None:
    beam = load(folder, dtype=dtype)
    whole = dict(load(folder).named_parameters())
    for name, parameter in beam.named_parameters():
        assert parameter.dtype == (torch.float32 if "router" in name else dtype), name
        assert torch.equal(parameter, whole[name].to(parameter.dtype)), name


def test_shards_dtypes_and_fused_experts_give_the_same_model(tmp_path: Path) -> None:
    tensors = stored()
    plain = load(write(tmp_path / "plain", tensors))
    assert equal(plain, load(write(tmp_path / "sharded", tensors, shards=5)))
    wide = {
        name: (array.astype(np.uint32) << 16).view(np.float32)
        if array.dtype == np.uint16
        else array
        for name, array in tensors.items()
    }
    assert equal(plain, load(write(tmp_path / "float32", wide)))
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            word: np.stack([tensors.pop(f"{prefix}{e}.{word}_proj.weight") for e in range(4)])
            for word in ("gate", "up", "down")
        }
        tensors[prefix + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], 1)
        tensors[prefix + "down_proj"] = parts["down"]
    fused = write(tmp_path / "fused", tensors)
    assert equal(plain, load(fused))
    for rank in range(2):
        shard = Shard(rank=rank, world=2)
        assert equal(load(tmp_path / "plain", shard=shard), load(fused, shard=shard))
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"] = parts["up"][2]
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj.*is there a second time"):
        load(write(tmp_path / "both", tensors))
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    tensors["model.layers.1.mlp.experts.down_proj"] = parts["down"][:3]
    with pytest.raises(CheckpointError, match=r"experts\.down_proj in .* has shape \[3, 24, 8\]"):
        load(write(tmp_path / "three", tensors))


def test_a_rank_reads_its_own_slices_only(tmp_path: Path) -> None:
    """Rank 0 never looks at what rank 1 holds: damage there does not reach it."""
    tensors = stored()
    nan = bfloat16_bits(np.array([np.inf]))[0]
    half = {"model.layers.0.self_attn.q_proj.weight": 16, "lm_head.weight": 16, EXPERT: 4}
    for name, rows in half.items():
        tensors[name][rows:] = nan
    tensors["model.layers.0.self_attn.o_proj.weight"][:, 16:] = nan
    folder = write(tmp_path, tensors)
    assert torch.isfinite(load(folder, shard=Shard(rank=0, world=2)).lm_head).all()
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        load(folder, shard=Shard(rank=1, world=2))


def test_replicated_kv_heads_go_to_the_ranks_whose_queries_need_them(folder: Path) -> None:
    whole = load(folder).layers[0].attention.qkvg
    for rank in range(4):  # 4 ranks, 2 KV heads: ranks 0 and 1 have head 0, ranks 2 and 3 head 1
        part = load(folder, shard=Shard(rank=rank, world=4)).layers[0].attention.qkvg
        q, k, v, gate = whole.split((32, 16, 16, 32))
        mine, head = slice(8 * rank, 8 * rank + 8), slice(8 * (rank // 2), 8 * (rank // 2) + 8)
        assert torch.equal(part, torch.cat((q[mine], k[head], v[head], gate[mine])))


def test_load_into_overwrites_in_place(folder: Path, tmp_path: Path) -> None:
    beam = load(folder)
    memory = beam.lm_head.data_ptr()
    other = write(tmp_path / "other", stored(seed=4))
    load_into(beam, other)
    assert beam.lm_head.data_ptr() == memory
    assert equal(beam, load(other))
    ids = torch.arange(20)
    # The packed copies of the old weights, if there are any, must be gone too.
    torch.testing.assert_close(beam.sequence_logits(ids), load(other).sequence_logits(ids))
    half = load(folder, dtype=torch.bfloat16)
    load_into(half, other)
    assert half.dtype == torch.bfloat16
    with torch.device("meta"):
        empty = Beam(beam.config)
    with pytest.raises(CheckpointError, match="meta device"):
        load_into(empty, other)


def test_training_parameters_can_be_overwritten(folder: Path) -> None:
    beam = load(folder)
    beam.requires_grad_(True)
    load_into(beam, folder)
    assert all(p.requires_grad and p.is_leaf for p in beam.parameters())


# -- what is refused ----------------------------------------------------------------------------


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str, **kwargs: Any) -> None:
    """One clear sentence, and no memory is allocated before it."""

    def allocate(*_: Any) -> None:
        raise AssertionError("weights were allocated for a checkpoint that the headers rule out")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_materialise", allocate)
        with pytest.raises(CheckpointError, match=says) as caught:
            load(folder, **kwargs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", [EXPERT, ROUTER, "lm_head.weight", "model.layers.0.self_attn.gate_bias"]
)
@pytest.mark.parametrize("shards", [1, 3])
def test_missing_tensor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shards: int
) -> None:
    tensors = stored()
    del tensors[name]
    refused(
        write(tmp_path, tensors, shards), monkeypatch, rf"tensor {name} is missing from {tmp_path}"
    )


def test_unknown_tensor_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = stored() | {"model.layers.0.mlp.gate.weight": stored()[ROUTER]}
    says = rf"tensor model\.layers\.0\.mlp\.gate\.weight in {tmp_path}/{SINGLE} is unknown"
    refused(write(tmp_path, tensors), monkeypatch, says)
    # One layer more than the config has.
    extra = {n.replace("layers.2", "layers.3"): a for n, a in stored().items() if "layers.2" in n}
    refused(write(tmp_path, stored() | extra), monkeypatch, r"tensor model\.layers\.3\..* unknown")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (EXPERT, lambda a: a[:-1], r"has shape \[7, 24\], but the config needs \[8, 24\]"),
        (EXPERT, lambda a: a.T, r"has shape \[24, 8\]"),
        ("lm_head.weight", lambda a: a.reshape(-1), r"has shape \[768\]"),
        (ROUTER, lambda a: bfloat16_bits(a), "has dtype BF16; it must be F32"),
        (
            "model.layers.1.mlp.gate.e_score_correction_bias",
            lambda a: bfloat16_bits(a),
            "has dtype BF16; it must be F32",
        ),
    ],
)
def test_wrong_shape_or_router_dtype_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, says: str
) -> None:
    tensors = stored()
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    folder = write(tmp_path, tensors)
    refused(folder, monkeypatch, rf"tensor {name} in {folder}/{SINGLE} {says}")


@pytest.mark.parametrize("dtype", ["I16", "U16"])
def test_wrong_dtype_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    # The same bytes under another name of a two-byte type, of the same length in the header.
    data = (folder / SINGLE).read_bytes()
    at = data.index(b'"BF16"', data.index(EXPERT.encode()))
    (folder / SINGLE).write_bytes(data[:at] + f'"{dtype}" '.encode() + data[at + 6 :])
    says = rf"tensor {EXPERT} in {folder}/{SINGLE} has dtype {dtype}; it must be BF16 or F16 or F32"
    refused(folder, monkeypatch, says)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -5000])
def test_truncated_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, monkeypatch, rf"{file} is truncated or corrupt \(.+\)")


@pytest.mark.parametrize("damage", [b"not a checkpoint at all", b"\x10\0\0\0\0\0\0\0{broken"])
def test_corrupt_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    folder = write(tmp_path, stored(), shards=3)
    (folder / "part-1.safetensors").write_bytes(damage)
    refused(folder, monkeypatch, r"part-1\.safetensors is truncated or corrupt")


def test_index_and_files_must_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, stored(), shards=3)
    index = json.loads((folder / INDEX).read_text())

    def indexed(weight_map: Any) -> Path:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return folder

    good = index["weight_map"]
    moved = good | {EXPERT: next(f for f in sorted(set(good.values())) if f != good[EXPERT])}
    refused(indexed(moved), monkeypatch, rf"places tensor {EXPERT} in part-\d.*does not hold it")
    refused(indexed(good | {"ghost": "part-0.safetensors"}), monkeypatch, "places tensor ghost in")
    absent = good | {EXPERT: "part-9.safetensors"}
    refused(indexed(absent), monkeypatch, rf"{INDEX} places {EXPERT} in part-9\.safetensors, which")
    outside = good | {EXPERT: "../part-0.safetensors"}
    refused(indexed(outside), monkeypatch, "is not a safetensors file beside it")
    refused(indexed({}), monkeypatch, "empty weight_map")
    refused(indexed([1]), monkeypatch, f"{INDEX} is not a readable index")
    (folder / INDEX).write_text("{")
    refused(folder, monkeypatch, f"{INDEX} is not a readable index")
    # The same tensor in two shards.
    shutil.rmtree(folder)
    write(folder, stored(), shards=3)
    weights = stored()
    write_safetensors(folder / "part-1.safetensors", weights)
    refused(folder, monkeypatch, r"is in both part-\d\.safetensors and .*part-\d\.safetensors")


def test_folder_without_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / SINGLE).unlink()
    refused(folder, monkeypatch, f"{folder} holds no weights: neither {SINGLE} nor {INDEX}")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load(folder)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [EXPERT, "model.norm.weight", ROUTER])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, bad: float, name: str) -> None:
    tensors = stored()
    flat = tensors[name].reshape(-1)
    if tensors[name].dtype == np.float32:
        flat[-1] = bad
    else:
        flat[-1] = {np.inf: 0x7F80, -np.inf: 0xFF80}.get(bad, 0x7FC0)
    folder = write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"tensor {name} in {folder}/{SINGLE} has values"):
        load(folder)
    with pytest.raises(CheckpointError, match=f"tensor {name} "):
        load(folder, dtype=torch.bfloat16)
    loaded = load(folder, check_finite=False)
    assert sum(int((~torch.isfinite(p)).sum()) for p in loaded.parameters()) == 1


def test_values_too_large_for_the_dtype_are_named(tmp_path: Path) -> None:
    tensors = stored()
    tensors["model.norm.weight"][3] = bfloat16_bits(np.array([1e6]))[0]
    folder = write(tmp_path, tensors)
    assert load(folder).norm.max() > 9e5
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* infinite in float16"):
        load(folder, dtype=torch.float16)


def test_tensor_parallelism_must_divide(folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not divide num_attention_heads"):
        load(folder, shard=Shard(rank=0, world=3))
    with pytest.raises(ConfigError, match="rank 2 of 2 does not exist"):
        load(folder, shard=Shard(rank=2, world=2))


def test_wrong_arguments_are_one_sentence(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="unknown model 'nothing-here'"):
        load("nothing-here")
    with pytest.raises(CheckpointError, match="device 'gpu' does not exist"):
        load(folder, device="gpu")
    with pytest.raises(CheckpointError, match="device 'cuda:77' is not there"):
        load(folder, device="cuda:77")
    with pytest.raises(CheckpointError, match=r"dtype torch\.int8 cannot be computed in"):
        load(folder, dtype=torch.int8)


def test_preset_without_weights_says_what_to_do() -> None:
    with pytest.raises(CheckpointError, match=r"beam-501b .* no weights here.*device='meta'"):
        load("beam-501b")


# -- saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [None, 1, 3000, 10_000, 10**9])
def test_what_is_saved_is_what_was_loaded(
    folder: Path, tmp_path: Path, shard_bytes: int | None
) -> None:
    beam = load(folder)
    target = tmp_path / "new" / "deep"
    save(beam, target, shard_bytes=shard_bytes)
    assert equal(beam, load(target))
    original, again = stored(), {}
    files = sorted(target.glob("*.safetensors"))
    for file in files:
        again |= read_safetensors(file)  # the independent reader
    _, reference = beam_fp64.load_reference(folder)
    assert again.keys() == original.keys()
    assert all(np.array_equal(reference[name], again[name]) for name in original)
    config, _ = beam_fp64.load_reference(target)  # index and config included
    assert config["torch_dtype"] == "bfloat16"
    assert (config["architectures"], config["model_type"]) == (["BeamForCausalLM"], "beam")
    if shard_bytes in (None, 10**9):
        assert [file.name for file in files] == [SINGLE]
    else:
        index = json.loads((target / INDEX).read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        sizes = {n: 4 * a.size if "mlp.gate." in n else 2 * a.size for n, a in again.items()}
        assert index["metadata"]["total_size"] == sum(sizes.values())
        for file in files:
            with safe_open(file, framework="numpy") as tensors:
                held = sum(sizes[name] for name in tensors.keys())  # noqa: SIM118
                assert held <= shard_bytes or len(list(tensors.keys())) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtype_of_the_file(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    beam = load(folder)
    save(beam, tmp_path / "x", dtype=dtype)
    with safe_open(tmp_path / "x" / SINGLE, framework="pt") as file:
        found = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
    word = {torch.float32: "F32", torch.float16: "F16"}[dtype]
    assert all(kind == ("F32" if ".mlp.gate." in name else word) for name, kind in found.items())
    if dtype == torch.float32:
        assert equal(beam, load(tmp_path / "x"))
    assert json.loads((tmp_path / "x/config.json").read_text())["torch_dtype"] == str(dtype)[6:]


def test_unknown_config_keys_survive(folder: Path, tmp_path: Path) -> None:
    extra = {"dtype": "float32", "quantised_by": "nobody"}
    (folder / "config.json").write_text(json.dumps(CONFIG | extra))
    save(load(folder), tmp_path / "x")
    data = json.loads((tmp_path / "x/config.json").read_text())
    assert (data["dtype"], data["quantised_by"]) == ("bfloat16", "nobody")


def test_saving_replaces_all_of_an_old_checkpoint_and_nothing_else(
    folder: Path, tmp_path: Path
) -> None:
    target = write(tmp_path / "old", stored(seed=9), shards=3)
    (target / "drafter.safetensors").write_bytes(b"mine")
    beam = load(folder)
    save(beam, target, shard_bytes=4000)
    assert not (target / "part-0.safetensors").exists()
    assert equal(beam, load(target))
    save(beam, target)
    assert sorted(p.name for p in target.iterdir()) == [
        "config.json",
        "drafter.safetensors",
        SINGLE,
    ]
    assert (target / "drafter.safetensors").read_bytes() == b"mine"
    save(load(target), target)  # onto itself
    assert equal(beam, load(target))


def test_tokenizer_files_travel(folder: Path, tmp_path: Path) -> None:
    bundled = ROOT / "workbench/model/zoo/beam-tiny"
    names = ("tokenizer.json", "tokenizer_config.json")
    for name in names:
        shutil.copy(bundled / name, folder)
    beam = load(folder)
    assert beam.tokenizer is not None
    save(beam, tmp_path / "x")
    assert all((tmp_path / "x" / n).read_bytes() == (bundled / n).read_bytes() for n in names)
    beam.name = "trained here"
    with pytest.raises(CheckpointError, match="tokenizer_folder"):
        save(beam, tmp_path / "y")
    assert not (tmp_path / "y").exists()
    save(beam, tmp_path / "y", tokenizer_folder=bundled)
    again = load(tmp_path / "y").tokenizer
    assert again is not None
    assert again.encode("def f():") == beam.tokenizer.encode("def f():")


def test_what_cannot_be_saved(folder: Path, tmp_path: Path) -> None:
    beam = load(folder)
    target = tmp_path / "x"
    with pytest.raises(CheckpointError, match="shard_bytes must be at least 1"):
        save(beam, target, shard_bytes=0)
    with pytest.raises(CheckpointError, match=r"cannot be stored as torch\.float64"):
        save(beam, target, dtype=torch.float64)
    with pytest.raises(CheckpointError, match="this is rank 1 of 2"):
        save(load(folder, shard=Shard(rank=1, world=2)), target)
    with pytest.raises(CheckpointError, match="meta device"):
        save(load("beam-501b", device="meta"), target)
    with pytest.raises(CheckpointError, match="could not be written"):
        save(beam, folder / SINGLE / "x")
    beam.layers[2].mlp.gate_up[3, 8:].fill_(float("nan"))  # the up rows of expert 3
    with pytest.raises(CheckpointError, match=f"tensor {EXPERT} has values that are NaN"):
        save(beam, target)
    assert not target.exists()


# -- whole or not at all ------------------------------------------------------------------------


class Fails:
    """Calls a function, except the ``at``-th time, when it raises instead."""

    def __init__(self, function: Callable[..., Any], at: int, error: BaseException) -> None:
        self.function, self.left, self.error = function, at, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise self.error
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_failure_at_any_step_leaves_the_old_checkpoint(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: BaseException,
    shards: int,
) -> None:
    beam = load(folder)
    target = write(tmp_path / "old", stored(seed=9), shards)
    before = contents(target)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError
    failures = 0
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_save.os, step, Fails(getattr(os, step), failures, error))
            with suppress(expected):
                save(beam, target, shard_bytes=4000)
                break
        assert contents(target) == before
        assert not [path for path in target.iterdir() if path.is_dir()]
        failures += 1
    assert failures > 5  # every file was flushed and moved, so there were that many chances
    assert equal(beam, load(target))


def test_a_new_folder_disappears_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beam = load(folder)
    failing = Fails(os.fsync, 0, OSError(errno.ENOSPC, "No space left"))
    monkeypatch.setattr(checkpoint_save.os, "fsync", failing)
    with pytest.raises(CheckpointError, match=r"could not be written \(No space left\)"):
        save(beam, tmp_path / "a/b")
    assert not (tmp_path / "a").exists()


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Sets the size beyond which the kernel refuses to write, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_kernel_refuses(
    folder: Path, tmp_path: Path, largest_file: Callable[[int], None]
) -> None:
    beam = load(folder)
    target = write(tmp_path / "old", stored(seed=9))
    before = contents(target)
    largest_file((folder / SINGLE).stat().st_size // 2)
    with pytest.raises(CheckpointError, match="could not be written"):
        save(beam, target)
    assert contents(target) == before
    assert not [path for path in target.iterdir() if path.is_dir()]


def child(code: str, *arguments: str | Path, **kwargs: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_control_c_while_saving(folder: Path) -> None:
    process = child(
        """
        import sys
        from workbench import load, save
        beam = load(sys.argv[1])
        print("saving", flush=True)
        try:
            for turn in range(10**6):
                save(beam, sys.argv[1], shard_bytes=(2000, 4000)[turn % 2])
        except KeyboardInterrupt:
            print("stopped", flush=True)
        """,
        folder,
    )
    beam = load(folder)
    assert process.stdout is not None
    assert process.stdout.readline() == "saving\n"
    time.sleep(0.15)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0] == "stopped\n"
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert equal(beam, load(folder))


# -- memory -------------------------------------------------------------------------------------

MEASURE = """
    import sys, time
    def memory(field):  # KiB now (VmRSS) or at most so far (VmHWM) -> bytes
        text = open("/proc/self/status").read()
        return int(text.split(field + ":")[1].split()[0]) * 1024
"""
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc"
)


def measured(code: str, *arguments: str | Path) -> list[float]:
    """The numbers that a child process prints."""
    process = child(textwrap.dedent(MEASURE) + textwrap.dedent(code), *arguments)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 0
    return [float(word) for word in out.split()]


@needs_proc
def test_501b_on_the_meta_device_is_quick_and_small() -> None:
    seconds, grown, parameters = measured(
        """
        import workbench, workbench.model.checkpoint
        before, seconds = memory("VmRSS"), []
        for _ in range(3):  # the machine may be busy with something else
            start = time.perf_counter()
            beam = workbench.load("beam-501b", device="meta")
            seconds.append(time.perf_counter() - start)
        parameters = sum(p.numel() for p in beam.parameters())
        print(min(seconds), memory("VmHWM") - before, parameters)
        """
    )
    assert round(parameters / 1e9, 2) == 501.01
    assert grown < 1e9
    assert seconds < 2.0


@needs_proc
def test_loading_and_saving_are_streamed(tmp_path: Path) -> None:
    """200 MB in shards of 25 MB. Peak while loading: the model and a shard; saving: a tensor."""
    shard, tensor, slack = 25_000_000, 2 * 8000 * 512, 20_000_000
    config = tmp_path / "wide.json"
    wide = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 60, "vocab_size": 8000}
    config.write_text(json.dumps(CONFIG | wide))
    (saving,) = measured(
        """
        import torch
        from workbench.model.beam import Beam
        from workbench.model.checkpoint import save
        from workbench.model.config import BeamConfig
        torch.set_default_dtype(torch.bfloat16)
        beam = Beam(BeamConfig.from_json(sys.argv[1]))
        for parameter in beam.parameters():
            parameter.fill_(0.5)
        before = memory("VmHWM")
        save(beam, sys.argv[2], shard_bytes=int(sys.argv[3]))
        print(memory("VmHWM") - before)
        """,
        config,
        tmp_path / "model",
        str(shard),
    )
    files = [file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors")]
    assert len(files) > 7
    assert sum(files) > 190e6
    assert saving < tensor + slack
    (loading,) = measured(
        """
        import torch
        from workbench.model.checkpoint import load
        before = memory("VmRSS")
        beam = load(sys.argv[1], dtype=torch.bfloat16)
        print(memory("VmHWM") - before)
        """,
        tmp_path / "model",
    )
    assert sum(files) < loading < sum(files) + shard + slack


def test_errors_are_workbench_errors() -> None:
    assert issubclass(CheckpointError, WorkbenchError)
    assert issubclass(WorkbenchError, ValueError)


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu", "vulkan", "mkldnn", "cpu:7", "tpu", 1.5])
def test_devices_that_cannot_be_computed_on(device: Any) -> None:
    with pytest.raises(CheckpointError, match=r"device .*; use 'cpu'|: there is one CPU"):
        load("beam-tiny", device=device)


@pytest.mark.parametrize("model", [None, 5, b"x", "~nosuchuser/x"])
def test_models_that_are_no_path(model: Any) -> None:
    with pytest.raises(WorkbenchError, match=r"a name or a folder, not|not known here"):
        load(model)


def test_meta_may_have_an_index() -> None:
    assert load("beam-tiny", device="meta:0").device == torch.device("meta")


def test_files_that_are_no_files(tmp_path: Path) -> None:
    for file in (SINGLE, INDEX):
        folder = tmp_path / file
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        os.mkfifo(folder / file)
        with pytest.raises(CheckpointError, match="not a regular file"):
            load(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "not a readable index.*nested too deeply"),
        ('{"weight_map": {"a": ' + "9" * 5000 + "}}", "not a readable index"),
        (
            json.dumps({"weight_map": {"a": "x" * 5000 + ".safetensors"}}),
            "which is not there",
        ),
        ('{"weight_map": {"a": "\\u0000.safetensors"}}', r"in '\\x00.safetensors', which is not a"),
        ('{"weight_map": {"a": "\\u001b[2J.safetensors"}}', r"in '\\x1b\[2J.safetensors', which"),
    ],
    ids=["deep", "long integer", "long name", "NUL", "escape"],
)
def test_hostile_indexes(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path)
