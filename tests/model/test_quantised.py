"""FP8 and NVFP4 checkpoints: every code, every scale, against a decoder of bits in numpy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reference import beam_fp64
from reference.safetensors_numpy import from_bfloat16_bits, write_safetensors
from workbench.errors import CheckpointError, WorkbenchError
from workbench.model import checkpoint_read, checkpoint_save, quantised
from workbench.model.beam import Beam
from workbench.model.checkpoint import load, load_into, save
from workbench.model.checkpoint_read import Header, read_headers
from workbench.model.config import BeamConfig
from workbench.model.parallel import Shard
from workbench.model.quantisation import parse_quantisation, read_quantisation
from workbench.model.quantised import Fp8Weight, Nvfp4Weight, find_weight

pytestmark = pytest.mark.usefixtures("one_thread")

SINGLE = "model.safetensors"
CONFIG: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
    "max_position_embeddings": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
Q = "model.layers.0.self_attn.q_proj.weight"
Raw = dict[str, tuple[str, np.ndarray]]


# -- the formats, decoded bit by bit -------------------------------------------------------------


def e4m3(code: int) -> float:
    """OCP FP8 E4M3: 4 exponent bits (bias 7), 3 of the mantissa, no infinity, S.1111.111 is NaN."""
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1(code: int) -> float:
    """OCP FP4 E2M1: 2 exponent bits (bias 1), 1 of the mantissa."""
    sign, exponent, mantissa = -1.0 if code >> 3 else 1.0, code >> 1 & 3, code & 1
    if exponent == 0:
        return sign * mantissa / 2
    return sign * (2 + mantissa) * 2.0 ** (exponent - 2)


E4M3 = np.array([e4m3(code) for code in range(256)], np.float32)
E2M1 = np.array([e2m1(code) for code in range(16)], np.float32)
FINITE = np.flatnonzero(np.isfinite(E4M3)).astype(np.uint8)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code of the nearest entry of a table of codes 0, 1, …; NaN entries are never chosen."""
    order = np.argsort(np.where(np.isnan(table), np.inf, table), kind="stable")
    order = order[: np.count_nonzero(~np.isnan(table))]
    middles = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(middles, values)].astype(np.uint8)


def test_the_tables_are_those_of_the_standard() -> None:
    assert np.nanmax(E4M3) == 448
    assert (E4M3[1], E4M3[8], E4M3[0x38]) == (2.0**-9, 2.0**-6, 1.0)
    assert np.flatnonzero(np.isnan(E4M3)).tolist() == [0x7F, 0xFF]
    assert E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert nearest(np.array([0.3, -5.1, 2.4]), E2M1).tolist() == [1, 15, 4]


# -- quantising, by test code --------------------------------------------------------------------


@dataclass
class Form:
    """A way of storing weights: what config.json says, and the tensors of one weight.

    ``make`` maps ``[out, in]`` to (endings of names -> what is stored, the values it stands for).
    The ending "" is the codes themselves.
    """

    config: dict[str, Any]
    make: Callable[[np.ndarray], tuple[Raw, np.ndarray]]
    error: float  # relative error of a value
    older: dict[str, Any] = field(default_factory=dict)  # hf_quant_config.json instead


def fp8(
    ending: str, block: tuple[int, int] | None, shape: str, kind: str = "F32"
) -> Callable[[np.ndarray], tuple[Raw, np.ndarray]]:
    """E4M3 with a scale for each block (None: rows or all, as ``shape`` says)."""

    def make(weight: np.ndarray) -> tuple[Raw, np.ndarray]:
        out, width = weight.shape
        rows, columns = block or ((1, width) if shape.startswith("channel") else (out, width))
        down, across = -(-out // rows), -(-width // columns)
        scale = np.empty((down, across), np.float32)
        codes, values = np.empty((out, width), np.uint8), np.empty((out, width), np.float32)
        for i in range(down):
            for j in range(across):
                at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                one = np.float32(np.abs(weight[at]).max() / 448)
                if kind == "BF16":
                    bits = one.reshape(1).view(np.uint32) >> 16
                    one = (bits.astype(np.uint32) << 16).view(np.float32)[0]
                scale[i, j] = one
                codes[at] = nearest(weight[at] / one, E4M3)
                values[at] = E4M3[codes[at]] * one
        if shape == "block4":
            scale = scale[:, None, :, None]
        elif shape == "channel":
            scale = scale[:, 0]
        elif shape in ("tensor", "tensor1"):
            scale = scale.reshape(() if shape == "tensor" else 1)
        return {"": ("F8_E4M3", codes), ending: (kind, scale)}, values

    return make


def nvfp4(divides: bool) -> Callable[[np.ndarray], tuple[Raw, np.ndarray]]:
    def make(weight: np.ndarray) -> tuple[Raw, np.ndarray]:
        out, width = weight.shape
        factor = np.float32(np.abs(weight).max() / (6 * 448))
        groups = weight.reshape(out, width // 16, 16)
        scale = nearest(np.abs(groups).max(-1) / 6 / factor, E4M3)
        stored_factor = np.float32(1) / factor if divides else factor
        each = E4M3[scale] / stored_factor if divides else E4M3[scale] * stored_factor
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.nan_to_num(groups / each[..., None])
        codes = nearest(np.clip(scaled, -6, 6), E2M1)
        values = (E2M1[codes] * each[..., None]).reshape(out, width)
        codes = codes.reshape(out, width)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        endings = ("_packed", "_scale", "_global_scale") if divides else ("", "_scale", "_scale_2")
        one = np.array([stored_factor] if divides else stored_factor)
        kinds = (("U8", packed), ("F8_E4M3", scale), ("F32", one))
        return dict(zip(endings, kinds, strict=True)), values

    return make


def compressed(strategy: str, form: str = "float-quantized", **weights: Any) -> dict[str, Any]:
    args = {"type": "float", "num_bits": 8, "symmetric": True, "strategy": strategy} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None}}
    ignore = ["lm_head", "re:.*mlp.gate$"]
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": groups,
        "ignore": ignore, "quantization_status": "compressed",
    }  # fmt: skip


def modelopt(algorithm: Any, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


SPARED = ["gate", "lm_head", "model.embed_tokens"]
FORMS = {
    "fp8 blocks": Form(
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], "modules_to_not_convert": SPARED,
        },
        fp8("_scale_inv", (128, 128), "block"), 2**-4,
    ),
    "fp8 small blocks": Form(  # that end inside every tensor, and between gate and up rows
        {"quant_method": "fp8", "weight_block_size": [20, 14]},
        fp8("_scale_inv", (20, 14), "block"), 2**-4,
    ),
    "fp8 tensor": Form(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": SPARED},
        fp8("_scale", None, "tensor"), 2**-4,
    ),
    "fp8 channel": Form({"quant_method": "fp8"}, fp8("_scale", None, "channel1", "BF16"), 2**-4),
    "modelopt fp8": Form(modelopt("FP8"), fp8("_scale", None, "tensor"), 2**-4),
    "modelopt rows": Form(
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fp8("_scale", None, "channel"), 2**-4
    ),
    "modelopt blocks": Form(
        modelopt("fp8_pb_wo"), fp8("_scale", (128, 128), "block4"), 2**-4
    ),
    "modelopt nvfp4": Form(modelopt("NVFP4", group_size=16), nvfp4(False), 2**-2),
    "modelopt nvfp4, older": Form(
        {}, nvfp4(False), 2**-2,
        older={
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {
                "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"],
            },
        },
    ),
    "compressed tensor": Form(compressed("tensor"), fp8("_scale", None, "tensor1"), 2**-4),
    "compressed channel": Form(
        compressed("channel"), fp8("_scale", None, "channel1", "BF16"), 2**-4
    ),
    "compressed blocks": Form(
        compressed("block", block_structure=[128, 128]), fp8("_scale", (128, 128), "block"), 2**-4
    ),
    "compressed nvfp4": Form(
        compressed("tensor_group", "nvfp4-pack-quantized", num_bits=4, group_size=16),
        nvfp4(True), 2**-2,
    ),
}  # fmt: skip
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def write_raw(file: Path, tensors: Raw) -> None:
    """A safetensors file of any dtype; BF16 is given as float32 that BF16 holds."""
    header: dict[str, Any] = {}
    chunks, offset = [], 0
    width = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
    for name, (kind, array) in sorted(tensors.items(), key=lambda item: -width[item[1][0]]):
        data = np.ascontiguousarray(array)
        if kind == "BF16":
            data = (data.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        raw = data.tobytes()
        end = offset + len(raw)
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [offset, end]}
        chunks.append(raw)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def floats(array: np.ndarray) -> np.ndarray:
    return array if array.dtype == np.float32 else from_bfloat16_bits(array).astype(np.float32)


def linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def originals(config: dict[str, Any] = CONFIG) -> dict[str, np.ndarray]:
    """A random checkpoint as float32, its experts with outliers that make scales differ."""
    found = {name: floats(a).copy() for name, a in beam_fp64.random_tensors(config, 11).items()}
    for number, name in enumerate(name for name in found if linear(name)):
        found[name][number % found[name].shape[0]] *= 1 + number % 5
    return found


def quantise(form: Form, tensors: dict[str, np.ndarray]) -> tuple[Raw, dict[str, np.ndarray]]:
    """The stored tensors of every linear layer, and the float32 checkpoint they stand for."""
    stored: Raw = {}
    plain: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if linear(name):
            parts, plain[name] = form.make(array)
            stored |= {name + ending: part for ending, part in parts.items()}
        else:
            plain[name] = array
            stored[name] = ("F32" if ".mlp.gate." in name else "BF16", array)
    return stored, plain


def fuse(form: Form, tensors: dict[str, np.ndarray]) -> tuple[Raw, dict[str, np.ndarray]]:
    """The same with the experts of a layer in two tensors, each expert quantised by itself."""
    stored, plain = quantise(form, {n: a for n, a in tensors.items() if ".experts." not in n})
    for layer in (1, 2):
        here = f"model.layers.{layer}.mlp.experts."
        for fused, words in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            made: dict[str, list[np.ndarray]] = {}
            kinds: dict[str, str] = {}
            for expert in range(4):
                names = [f"{here}{expert}.{word}_proj.weight" for word in words]
                parts, values = form.make(np.concatenate([tensors[name] for name in names]))
                plain |= dict(zip(names, np.split(values, len(names)), strict=True))
                for ending, (kind, array) in parts.items():
                    made.setdefault(ending, []).append(array)
                    kinds[ending] = kind
            for ending, arrays in made.items():
                # As found in the wild: transformers' names for blocks, ModelOpt's for the others.
                word = "" if ending in ("", "_scale_inv") else "_weight"
                stored[here + fused + word + ending] = (kinds[ending], np.stack(arrays))
    return stored, plain


def folder_of(folder: Path, form: Form, stored: Raw, config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = dict(config) | ({"quantization_config": form.config} if form.config else {})
    (folder / "config.json").write_text(json.dumps(data))
    if form.older:
        (folder / "hf_quant_config.json").write_text(json.dumps(form.older))
    write_raw(folder / SINGLE, stored)
    return folder


def plain_folder(folder: Path, plain: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / SINGLE, plain)
    return folder


def equal(a: Beam, b: Beam) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(x == y and torch.equal(p, q) for (x, p), (y, q) in pairs)


# -- whole models --------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
def test_a_quantised_checkpoint_is_the_checkpoint_of_its_values(
    tmp_path: Path, form: Form, fused: bool
) -> None:
    """Whole, a rank, some layers, every dtype: as a float32 file of numpy's values loads."""
    stored, plain = (fuse if fused else quantise)(form, originals())
    packed = folder_of(tmp_path / "packed", form, stored)
    floats = plain_folder(tmp_path / "plain", plain)
    beam = load(packed)
    assert equal(beam, load(floats))
    assert "quantization_config" not in beam.config.extra
    assert equal(load(packed, layers=[0, 2]), load(floats, layers=[0, 2]))
    for dtype in (torch.bfloat16, torch.float16):
        assert equal(load(packed, dtype=dtype), load(floats, dtype=dtype))
    for rank in range(2):
        shard = Shard(rank=rank, world=2)
        assert equal(load(packed, shard=shard), load(floats, shard=shard))
    again = load(floats, layers=None)
    load_into(again, packed)
    assert equal(again, beam)


@each_form
def test_save_quantise_load_is_within_the_formats_error(tmp_path: Path, form: Form) -> None:
    """Each value is off by half a step of its format at most, next to its scale's largest."""
    beam = load(plain_folder(tmp_path / "plain", originals()))
    save(beam, tmp_path / "saved", dtype=torch.float32)
    headers = read_headers(tmp_path / "saved")
    tensors = {name: quantised.read_part(header).numpy() for name, header in headers.items()}
    stored, _ = quantise(form, tensors)
    found = load(folder_of(tmp_path / "packed", form, stored))
    ours = dict(beam.named_parameters())
    worst = 0.0
    for name, parameter in found.named_parameters():
        gap = (parameter - ours[name]).abs()
        limit = ours[name].abs()
        if name.rsplit(".", 1)[-1] in ("qkvg", "o_proj", "gate_up", "down"):
            # Half a step: relative to the value, and for the small ones to the largest around it.
            floor = limit.amax() * (2**-10 / 448 if form.error == 2**-4 else 2**-2 / 6 + 2**-5)
            assert (gap <= form.error * limit * 1.07 + floor).all(), name
            worst = max(worst, (gap / limit.amax()).max().item())
        else:
            assert torch.equal(parameter, ours[name]), name
    assert worst > 1e-3  # it was quantised indeed
    save(found, tmp_path / "again", dtype=torch.float32)  # and is plain from now on
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    assert equal(load(tmp_path / "again"), found)


@pytest.mark.parametrize("name", ["modelopt nvfp4, older", "compressed nvfp4", "fp8 blocks"])
def test_saved_over_its_quantised_self_nothing_calls_it_quantised(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine reads the older ModelOpt's file wherever config.json says nothing."""
    form = FORMS[name]
    stored, plain = quantise(form, originals())
    folder = folder_of(tmp_path / "packed", form, stored)
    told = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    beam = load(folder)
    flush = checkpoint_save._flush_directory

    def full(where: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_save, "_flush_directory", full)  # the last step fails: undone
    with pytest.raises(CheckpointError, match="nothing there was changed"):
        save(beam, folder)
    assert {path.name: path.read_bytes() for path in folder.glob("*.json")} == told
    assert equal(load(folder), beam)
    monkeypatch.setattr(checkpoint_save, "_flush_directory", flush)
    save(beam, folder, dtype=torch.float32)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", SINGLE]
    assert read_quantisation(folder) is None
    assert equal(load(folder), load(plain_folder(tmp_path / "plain", plain)))


def test_weights_put_into_a_model_are_plain_when_saved(tmp_path: Path) -> None:
    """load_into leaves the config alone, which may be that of a quantised folder."""
    form = FORMS["fp8 blocks"]
    folder = folder_of(tmp_path / "packed", form, quantise(form, originals())[0])
    beam = Beam(BeamConfig.from_json(folder))
    assert "quantization_config" in beam.config.extra
    load_into(beam, folder)
    save(beam, tmp_path / "saved")
    assert read_quantisation(tmp_path / "saved") is None
    load(tmp_path / "saved")


def test_scales_may_lie_in_another_file(tmp_path: Path) -> None:
    form = FORMS["modelopt nvfp4"]
    stored, plain = quantise(form, originals())
    folder = folder_of(tmp_path / "packed", form, stored)
    (folder / SINGLE).unlink()
    place = {name: f"part-{len(name) % 4}.safetensors" for name in stored}
    for file in set(place.values()):
        write_raw(folder / file, {n: part for n, part in stored.items() if place[n] == file})
    (folder / (SINGLE + ".index.json")).write_text(json.dumps({"weight_map": place}))
    split = [n for n in stored if linear(n) and place[n] != place[n + "_scale"]]
    assert split
    assert equal(load(folder), load(plain_folder(tmp_path / "plain", plain)))


def test_what_an_engine_needs_besides_is_passed_over(tmp_path: Path) -> None:
    form = FORMS["modelopt nvfp4"]
    stored, _ = quantise(form, originals())
    one = ("F32", np.float32([0.5]))
    here = "model.layers.1."
    more = [f"{here}self_attn.{n}" for n in ("k_proj.k_scale", "v_proj.v_scale", "attn.k_scale")]
    more += [f"{here}self_attn.q_proj.input_scale", f"{here}mlp.experts.0.up_proj.input_scale"]
    more += [f"{here}self_attn.{n}" for n in ("k_cache.scale", "q.scale", "attn.k_zero_point")]
    folder = folder_of(tmp_path, form, stored | dict.fromkeys(more, one))
    load(folder)
    for name in ("self_attn.q_proj.pre_quant_scale", "self_attn.q_proj.bias"):
        folder_of(tmp_path, form, stored | {here + name: one})
        with pytest.raises(CheckpointError, match=f"{name} in .* is unknown"):
            load(folder)
    # Where nothing is quantised they are unknown.
    folder_of(tmp_path, Form({}, form.make, 0), quantise_none() | {more[0]: one})
    with pytest.raises(CheckpointError, match=r"k_scale in .* is unknown"):
        load(folder)


def quantise_none() -> Raw:
    return {
        name: ("F32" if ".mlp.gate." in name else "BF16", array)
        for name, array in originals().items()
    }


def test_a_quantised_head_and_plain_weights_side_by_side(tmp_path: Path) -> None:
    """What is stored says what it is: BF16 in a listed module, FP8 in the head."""
    make = fp8("_scale_inv", (20, 14), "block")
    form = Form({"quant_method": "fp8", "weight_block_size": [20, 14]}, make, 0)
    tensors = originals()
    stored, plain = quantise(form, tensors)
    head, plain["lm_head.weight"] = make(tensors["lm_head.weight"])
    stored |= {"lm_head.weight" + ending: part for ending, part in head.items()}
    for name in (Q, "model.layers.2.mlp.experts.1.down_proj.weight"):
        del stored[name + "_scale_inv"]
        as_bf16 = (tensors[name].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        stored[name], plain[name] = ("BF16", as_bf16), as_bf16
    folder = folder_of(tmp_path / "packed", form, stored)
    assert equal(load(folder), load(plain_folder(tmp_path / "plain", plain)))


def test_mixed_precision(tmp_path: Path) -> None:
    """ModelOpt's FP8 attention and NVFP4 experts in one checkpoint."""
    layers = {f"model.layers.{i}.self_attn.q_proj": {"quant_algo": "FP8"} for i in range(3)}
    layers["model.layers.1.mlp.experts.0.up_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    mixed = modelopt("MIXED_PRECISION", quantized_layers=layers)
    a, b = FORMS["modelopt fp8"], FORMS["modelopt nvfp4"]
    tensors = originals()
    (one, values), (two, others) = quantise(a, tensors), quantise(b, tensors)
    stored = {n: p for n, p in one.items() if "experts" not in n}
    stored |= {n: p for n, p in two.items() if "experts" in n}
    plain = {n: others[n] if "experts" in n else values[n] for n in tensors}
    folder = folder_of(tmp_path / "packed", Form(mixed, a.make, 0), stored)
    assert equal(load(folder), load(plain_folder(tmp_path / "plain", plain)))


def test_mixed_precision_with_blocks(tmp_path: Path) -> None:
    """There group_size is the side of a block for FP8 and the run of a scale for NVFP4; older
    exports keep the table of layers in ModelOpt's own file."""
    layers: dict[str, Any] = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8_PB_WO", "group_size": 20},
        "model.layers.1.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": "16"},
    }
    make, b = fp8("_scale_inv", (20, 20), "block"), FORMS["modelopt nvfp4"]
    tensors = originals()
    (one, values), (two, others) = quantise(Form({}, make, 0), tensors), quantise(b, tensors)
    stored = {n: p for n, p in one.items() if "experts" not in n}
    stored |= {n: p for n, p in two.items() if "experts" in n}
    plain = {n: others[n] if "experts" in n else values[n] for n in tensors}
    expected = load(plain_folder(tmp_path / "plain", plain))
    mixed = modelopt("MIXED_PRECISION", quantized_layers=layers)
    assert equal(load(folder_of(tmp_path / "new", Form(mixed, make, 0), stored)), expected)
    older = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    form = Form(modelopt("MIXED_PRECISION"), make, 0, older=older)
    assert equal(load(folder_of(tmp_path / "old", form, stored)), expected)


def test_stacks_with_inputs_first_are_named(tmp_path: Path) -> None:
    """As Llama 4's experts lie; neither vLLM's Beam nor this one takes them."""
    for form, dtype in ((NVFP4, "U8"), (FP8_ONE, "F8_E4M3")):
        stored, _ = fuse(form, originals())
        name = "model.layers.1.mlp.experts.gate_up_proj"
        stored[name] = (dtype, np.swapaxes(stored[name][1], 1, 2))
        with pytest.raises(CheckpointError, match=rf"{name} .*inputs before outputs") as caught:
            load(folder_of(tmp_path, form, stored))
        assert "\n" not in str(caught.value)


# -- one weight, code by code --------------------------------------------------------------------


def found(tmp_path: Path, config: dict[str, Any], stored: Raw, shape: tuple[int, ...]) -> Any:
    write_raw(tmp_path / SINGLE, stored)
    quantisation = parse_quantisation(config, "config.json")
    return find_weight(quantisation, read_headers(tmp_path), "w.weight", shape)


def values_of(weight: Fp8Weight | Nvfp4Weight, rows: slice = slice(None)) -> np.ndarray:
    return torch.cat(list(weight.rows((), rows, torch.device("cpu")))).numpy()


def test_all_256_codes_of_e4m3(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    for scale in (1.0, 0.0371, -2.5e-3, 1e30):
        stored = {"w.weight": ("F8_E4M3", codes), "w.weight_scale": ("F32", np.float32([scale]))}
        values = values_of(found(tmp_path, {"quant_method": "fp8"}, stored, (4, 64)))
        expected = E4M3[codes] * np.float32(scale)
        np.testing.assert_array_equal(values, expected)
        assert np.isnan(values).sum() == 2


@pytest.mark.parametrize("divides", [False, True])
def test_all_codes_of_e2m1_with_all_scales(tmp_path: Path, divides: bool) -> None:
    """256 groups, each with all 16 codes in another order, under each E4M3 scale."""
    rng = np.random.default_rng(0)
    codes = np.array([rng.permutation(16) for _ in range(256)], np.uint8).reshape(32, 128)
    scale = np.arange(256, dtype=np.uint8).reshape(32, 8)
    factor = np.float32(0.0123)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    config = FORMS["compressed nvfp4" if divides else "modelopt nvfp4"].config
    endings = ("_packed", "_scale", "_global_scale") if divides else ("", "_scale", "_scale_2")
    parts = (("U8", packed), ("F8_E4M3", scale), ("F32", factor.reshape(1)))
    stored = {"w.weight" + ending: part for ending, part in zip(endings, parts, strict=True)}
    values = values_of(found(tmp_path, config, stored, (32, 128)))
    each = E4M3[scale] / factor if divides else E4M3[scale] * factor
    expected = E2M1[codes].reshape(32, 8, 16) * each[..., None]
    np.testing.assert_array_equal(values, expected.reshape(32, 128))
    assert np.isnan(values).sum() == 32


@pytest.mark.parametrize("shape", [(300, 200), (128, 129), (1, 1), (127, 256), (257, 5)])
def test_blocks_that_do_not_divide(
    tmp_path: Path, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "_CHUNK", 1000)  # several chunks, that cut blocks
    rng = np.random.default_rng(1)
    codes = FINITE[rng.integers(0, len(FINITE), shape)]
    out, width = shape
    scale = rng.uniform(0.1, 2, (-(-out // 128), -(-width // 128))).astype(np.float32)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stored = {"w.weight": ("F8_E4M3", codes), "w.weight_scale_inv": ("F32", scale)}
    weight = found(tmp_path, config, stored, shape)
    expected = np.empty(shape, np.float32)
    for i in range(out):
        for j in range(width):
            expected[i, j] = E4M3[codes[i, j]] * scale[i // 128, j // 128]
    np.testing.assert_array_equal(values_of(weight), expected)
    np.testing.assert_array_equal(values_of(weight, slice(out // 3, out)), expected[out // 3 :])


def test_decoding_takes_a_bounded_piece_at_a_time(tmp_path: Path) -> None:
    codes = np.full((5000, 1024), 0x38, np.uint8)
    stored = {"w.weight": ("F8_E4M3", codes), "w.weight_scale": ("F32", np.float32([2.0]))}
    weight = found(tmp_path, {"quant_method": "fp8"}, stored, (5000, 1024))
    pieces = [len(piece) for piece in weight.rows((), slice(None), torch.device("cpu"))]
    assert sum(pieces) == 5000
    assert max(pieces) * 1024 <= quantised._CHUNK


# -- what is refused -----------------------------------------------------------------------------

FP8_BLOCKS, FP8_ONE = FORMS["fp8 blocks"], FORMS["fp8 tensor"]
NVFP4, PACKED = FORMS["modelopt nvfp4"], FORMS["compressed nvfp4"]


def without(*endings: str) -> Callable[[Raw], None]:
    def change(stored: Raw) -> None:
        for ending in endings:
            del stored[Q + ending]

    return change


def reshaped(ending: str, how: Callable[[np.ndarray], np.ndarray]) -> Callable[[Raw], None]:
    def change(stored: Raw) -> None:
        kind, array = stored[Q + ending]
        stored[Q + ending] = (kind, how(array))

    return change


def retyped(ending: str, kind: str) -> Callable[[Raw], None]:
    def change(stored: Raw) -> None:
        stored[Q + ending] = (kind, stored[Q + ending][1])

    return change


@pytest.mark.parametrize(
    ("form", "change", "says"),
    [
        (FP8_BLOCKS, without("_scale_inv"), rf"{Q} in .* its scale {Q}_scale_inv or .* is missing"),
        (FP8_ONE, without("_scale"), rf"its scale {Q}_scale_inv or {Q}_scale is missing"),
        (NVFP4, without("_scale"), rf"{Q} in .* its scale {Q}_scale is missing"),
        (NVFP4, without("_scale_2"), rf"its scale {Q}_scale_2 is missing"),
        (PACKED, without("_global_scale"), rf"its scale {Q}_global_scale is missing"),
        (PACKED, without("_packed"), rf"tensor {Q} is missing"),
        (
            FP8_BLOCKS,
            reshaped("_scale_inv", lambda a: np.ones((2, 1), np.float32)),
            r"_scale_inv in .* has shape \[2, 1\], but the config needs \[1, 1\]",
        ),
        (
            FP8_ONE,
            reshaped("_scale", lambda a: np.ones(63, np.float32)),
            r"has shape \[63\], but the config needs \[64\] or \[64, 1\] or \[\] or \[1\]",
        ),
        (FP8_ONE, reshaped("", lambda a: a[:-1]), r"has shape \[63, 48\], .* needs \[64, 48\]"),
        (NVFP4, reshaped("", lambda a: a[:, :-1]), r"has shape \[64, 23\], .* needs \[64, 24\]"),
        (NVFP4, reshaped("_scale", lambda a: a.T), r"has shape \[3, 64\], .* needs \[64, 3\]"),
        (
            NVFP4,
            reshaped("_scale_2", lambda a: np.ones(2, np.float32)),
            r"_scale_2 in .* has shape \[2\], but the config needs \[\] or \[1\] or \[1, 1\]",
        ),
        (
            FP8_ONE,
            retyped("", "U8"),
            r"is stored as U8, which does not go with quant",
        ),
        (FP8_ONE, retyped("", "F8_E5M2"), r"has dtype F8_E5M2; it must be BF16"),
        (NVFP4, retyped("_scale", "U8"), r"q_proj\.weight_scale in .* dtype U8; .* F8_E4M3"),
        (
            NVFP4,
            lambda stored: stored.update({Q + "_scale_2": ("BF16", np.float32(1.0))}),
            r"_scale_2 in .* has dtype BF16; it must be F32",
        ),
        (
            NVFP4,
            lambda stored: stored.update({Q: ("BF16", originals()[Q])}),
            rf"tensor {Q}_scale.* in .* is unknown to the config",
        ),
    ],
)
def test_damaged_parts_are_named(
    tmp_path: Path, form: Form, change: Callable[[Raw], None], says: str
) -> None:
    stored, _ = quantise(form, originals())
    change(stored)
    with pytest.raises(CheckpointError, match=says) as caught:
        load(folder_of(tmp_path, form, stored))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("form", "part"),
    [
        *((form, part) for form in (FP8_BLOCKS, FP8_ONE) for part in ("codes", "scale")),
        *((form, part) for form in (NVFP4, PACKED) for part in ("scale", "factor")),
    ],
)
def test_nan_is_named(tmp_path: Path, form: Form, part: str) -> None:
    stored, _ = quantise(form, originals())
    endings = list(form.make(originals()[Q])[0])
    kind, array = stored[Q + endings[("codes", "scale", "factor").index(part)]]
    array.reshape(-1)[-1] = 0xFF if kind == "F8_E4M3" else np.nan
    folder = folder_of(tmp_path, form, stored)
    with pytest.raises(CheckpointError, match=rf"tensor {Q} in {folder}/{SINGLE} has values that"):
        load(folder)
    assert load(folder, check_finite=False).layers[0].attention.qkvg.isnan().any()


def test_widths_that_nvfp4_cannot_have(tmp_path: Path) -> None:
    config = CONFIG | {"moe_intermediate_size": 24}
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    stored = quantise_config(config)
    stored[name] = ("U8", np.zeros((48, 12), np.uint8))
    with pytest.raises(CheckpointError, match=rf"{name} .* for each 16 inputs, .* 24 of them"):
        load(folder_of(tmp_path, NVFP4, stored, config))


def quantise_config(config: dict[str, Any]) -> Raw:
    return {
        name: ("F32" if ".mlp.gate." in name else "BF16", floats(array))
        for name, array in beam_fp64.random_tensors(config, 2).items()
    }


@pytest.mark.parametrize(
    "entry",
    [
        Q.removesuffix(".weight"), "self_attn.q_proj", "q_proj", "model.layers.0",
        "model.layers.0.self_attn*", "model.layers.0.*", "*.q_proj", "*",
    ],
)  # fmt: skip
def test_a_weight_is_not_quantised_and_listed_as_plain(tmp_path: Path, entry: str) -> None:
    form = Form(FP8_ONE.config | {"ignored_layers": [entry]}, FP8_ONE.make, 0)
    stored, _ = quantise(form, originals())
    with pytest.raises(
        CheckpointError, match=r"is stored as F8_E4M3, but quantization_config in .* lists it as"
    ):
        load(folder_of(tmp_path, form, stored))


@pytest.mark.parametrize(
    ("entry", "module", "matches"),
    [
        ("gate", "model.layers.1.mlp.gate", True),
        ("gate", "model.layers.1.mlp.experts.0.gate_proj", False),
        ("model.layers.1", "model.layers.1.self_attn.q_proj", True),
        ("model.layers.1", "model.layers.10.self_attn.q_proj", False),
        ("model.layers.1*", "model.layers.10.self_attn.q_proj", False),
        ("model.layers.1*", "model.layers.1.self_attn.q_proj", True),
        ("*mlp.gate*", "model.layers.1.mlp.gate_proj", False),
        ("re:.*mlp.gate$", "model.layers.1.mlp.gate", True),
        ("re:.*mlp.gate$", "model.layers.1.mlp.gate_proj", False),
        ("re:.*lm_head", "lm_head", True),
        ("re:lm", "model.lm_head", False),
        ("lm_head", "lm_head", True),
    ],
)
def test_lists_of_plain_modules(entry: str, module: str, matches: bool) -> None:
    config = {"quant_method": "fp8", "modules_to_not_convert": [entry]}
    assert parse_quantisation(config, "x").ignores(module) == matches


def test_quantised_tensors_without_a_word_in_the_config(tmp_path: Path) -> None:
    for form in (FP8_ONE, NVFP4):
        stored, _ = quantise(form, originals())
        folder = folder_of(tmp_path, Form({}, form.make, 0), stored)
        with pytest.raises(CheckpointError, match=r"or config.json must say in quan"):
            load(folder)
    embedding = {"model.embed_tokens.weight": ("U8", np.zeros((32, 48), np.uint8))}
    folder = folder_of(tmp_path, NVFP4, stored | embedding)
    with pytest.raises(CheckpointError, match=r"dtype U8; it must be BF16 or F16 or F32$"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([1], r"is \[1\], not an object"),
        ({}, "has quant_method None; supported are fp8"),
        ({"quant_method": "awq"}, "has quant_method 'awq'; supported are fp8"),
        ({"quant_method": "mxfp4"}, "has quant_method 'mxfp4'; .* compressed-tensors"),
        ({"quant_method": 5}, "has quant_method 5"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "has fmt 'e5m2'"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"block_size \[128\]; it must",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"\[0, 128\]; it must be two"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "must be a list of names"),
        ({"quant_method": "fp8", "ignored_layers": ["re:("]}, "no regular expression"),
        (modelopt("INT4_AWQ"), "has quant_algo 'INT4_AWQ'"),
        (modelopt("MXFP8"), "has quant_algo 'MXFP8'"),
        (modelopt("NVFP4", group_size=32), "has group_size 32; NVFP4 has a scale for each 16"),
        (modelopt("NVFP4", group_size="16x"), "has group_size '16x'"),
        (modelopt("MIXED_PRECISION"), "without a table quantized_layers"),
        (
            modelopt(
                "MIXED_PRECISION",
                quantized_layers={
                    name: {"quant_algo": "FP8_PB_WO", "group_size": size}
                    for name, size in (("a", 64), ("b", 128))
                },
            ),
            "blocks of several sizes",
        ),
        (
            modelopt(
                "MIXED_PRECISION",
                quantized_layers={"a": {"quant_algo": "FP8_PB_WO", "group_size": 0}},
            ),
            r"has group_size \[0, 0\]",
        ),
        (modelopt(["NVFP4"]), r"has quant_algo \['NVFP4'\]"),
        (
            modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A8_AWQ"}}),
            "has quant_algo 'W4A8_AWQ'",
        ),
        ({"quant_method": "modelopt", "quantization": 3}, "quantization is 3"),
        (compressed("tensor") | {"config_groups": {}}, "has no config_groups"),
        (compressed("tensor", num_bits=4), "has format 'float-quantized' of 'float' with 4 bits"),
        (compressed("tensor", type="int"), "of 'int' with 8 bits"),
        (compressed("group"), "has strategy 'group'"),
        (compressed("block"), "has block_structure None"),
        (compressed("channel", "pack-quantized"), "has format 'pack-quantized'"),
        (compressed("channel", "mxfp4-pack-quantized", num_bits=4), "'mxfp4-pack-quantized'"),
        (
            compressed("tensor_group", "nvfp4-pack-quantized", num_bits=4, group_size=32),
            "group_size 32",
        ),
        (
            compressed("tensor") | {"transform_config": {"config_groups": {"R1": {}}}},
            "has a transform_config: its weights are rotated",
        ),
        (compressed("tensor") | {"sparsity_config": {"format": "sparse-24"}}, "sparse weights"),
        (compressed("tensor") | {"config_groups": {"g": 1}}, "g is not an object"),
    ],
)
def test_methods_that_are_not_supported(tmp_path: Path, config: Any, says: str) -> None:
    stored = quantise_none()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    write_raw(tmp_path / SINGLE, stored)
    with pytest.raises(CheckpointError, match=says) as caught:
        load(tmp_path)
    assert re.search(r"quantization_config in .*config\.json", str(caught.value))
    assert "\n" not in str(caught.value)


def test_descriptions_that_say_little(tmp_path: Path) -> None:
    assert read_quantisation(tmp_path) is None
    only_cache = {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}
    found = parse_quantisation(only_cache, "x")
    assert (found.layouts, found.nvfp4) == ((), False)
    activations = compressed("tensor")
    activations["config_groups"]["more"] = {"targets": ["Attention"], "weights": None}
    assert parse_quantisation(activations, "x").layouts == ("tensor",)
    for text, says in (("[1]", "not an object"), ("{", "not valid JSON")):
        (tmp_path / "hf_quant_config.json").write_text(text)
        with pytest.raises(WorkbenchError, match=says):
            read_quantisation(tmp_path)


@pytest.mark.parametrize("form", [FP8_BLOCKS, NVFP4, None], ids=["fp8", "nvfp4", "bf16"])
def test_one_expert_of_a_stack_is_in_memory_at_a_time(
    tmp_path: Path, form: Form | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest: dict[str, int] = {}
    fill = checkpoint_read._fill

    def noted(memory: torch.Tensor, header: Header, start: int) -> None:
        largest[header.name] = max(largest.get(header.name, 0), memory.nbytes)
        fill(memory, header, start)

    monkeypatch.setattr(checkpoint_read, "_fill", noted)
    plain = Form({}, lambda weight: ({"": ("BF16", weight)}, weight), 0)
    stored, _ = fuse(form or plain, originals())
    load(folder_of(tmp_path, form or plain, stored))
    width = 2 if form is None else 1 if form is FP8_BLOCKS else 0.5  # bytes a value
    here = "model.layers.1.mlp.experts."
    assert largest[here + "gate_up_proj"] == 32 * 48 * width  # the gate or the up rows of one
    assert largest[here + "down_proj"] == 48 * 32 * width
