"""Some layers of a model: what is read, what comes out, and that it is not taken for the whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import beam_fp64
from reference.safetensors_numpy import write_safetensors
from workbench.errors import CheckpointError, ConfigError, DraftError
from workbench.kernels.reference import depth_scale
from workbench.model import checkpoint_read
from workbench.model.beam import Beam
from workbench.model.checkpoint import load, load_into, save
from workbench.model.checkpoint_read import Header
from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext
from workbench.model.generate import generate
from workbench.model.parallel import Shard
from workbench.model.partial import (
    PartialConfig,
    compare_layer,
    layer_words,
    run_layer,
    take_layers,
)
from workbench.model.tensors import tensor_specs
from workbench.spec.drafter_checkpoint import load_drafter

pytestmark = pytest.mark.usefixtures("one_thread")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYERS = 6
CONFIG: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "max_position_embeddings": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "mlp_layer_types": ["dense", "dense", *["sparse"] * 4],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "final_logit_softcapping": 6.0,
}
IDS = torch.arange(30) * 7 % 32


def place_of(name: str) -> str:
    """The file of a tensor: one for each layer, one for the rest."""
    return f"layer-{name.split('.')[2]}.safetensors" if ".layers." in name else "rest.safetensors"


def write(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    files: dict[str, dict[str, np.ndarray]] = {}
    for name, array in tensors.items():
        files.setdefault(place_of(name), {})[name] = array
    for file, part in files.items():
        write_safetensors(folder / file, part)
    weight_map = {name: place_of(name) for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return beam_fp64.random_tensors(CONFIG, 5)


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, np.ndarray]) -> Path:
    return write(tmp_path / "whole", tensors)


def streams_of(beam: Beam, ids: Tensor = IDS) -> list[Tensor]:
    """The residual stream after the embedding and after every layer, as a whole pass has it."""
    streams = dict.fromkeys(range(beam.config.num_hidden_layers), torch.empty(0))
    with torch.no_grad():
        beam(ids, SequenceContext(beam.config, 1, len(ids)), streams)
        return [beam.embed(ids), *streams.values()]


# -- what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [[0, 3, 5], [4], [1, 2], list(range(LAYERS))])
def test_a_layer_makes_of_its_input_what_it_makes_in_the_whole_bit_for_bit(
    folder: Path, layers: list[int], dtype: torch.dtype
) -> None:
    whole, part = load(folder, dtype=dtype), load(folder, layers=layers, dtype=dtype)
    streams = streams_of(whole)
    for layer in layers:
        after = run_layer(part, layer, streams[layer])
        assert after.dtype == dtype
        assert torch.equal(after, streams[layer + 1]), layer
        assert not torch.equal(after, streams[layer])
        assert torch.equal(run_layer(whole, layer, streams[layer]), after)
        gap = compare_layer(part, layer, streams[layer], streams[layer + 1])
        assert (gap.layer, gap.most, gap.relative) == (layer, 0.0, 0.0)


def test_layers_keep_their_depth_and_kinds_in_the_fp64_reference(
    folder: Path, tensors: dict[str, np.ndarray]
) -> None:
    """Each layer by itself against the independent reference of the whole."""
    config, weights = beam_fp64.load_reference(folder)
    hidden = beam_fp64.forward(config, weights, IDS.tolist())["hidden"]
    part = load(folder, layers=[1, 2, 5])
    for layer in (1, 2, 5):
        after = run_layer(part, layer, torch.tensor(hidden[layer]))
        expected = torch.tensor(hidden[layer + 1])
        torch.testing.assert_close(after.double(), expected, rtol=1e-4, atol=1e-4)
        # With the depth of its place it would be far off: the test can tell.
        wrong = load(folder, layers=[1, 2, 5])
        wrong.layers[0 if layer == 1 else 1].scales = (depth_scale(2), depth_scale(3))
        if layer != 5:
            off = run_layer(wrong, layer, torch.tensor(hidden[layer])).double() - expected
            assert off.abs().max() > 1e-2


def test_the_first_layers_are_the_beginning_of_the_whole(folder: Path) -> None:
    whole, part = load(folder), load(folder, layers=range(4))
    hidden = part(IDS, SequenceContext(part.config, 1, len(IDS)))
    stream = streams_of(whole)[4]
    expected = part.kernels().model.rms_norm(stream, whole.norm, 1e-6)
    assert torch.equal(hidden, expected)
    assert torch.equal(part.lm_head, whole.lm_head)
    assert torch.equal(part.embed_tokens, whole.embed_tokens)


def test_batches_are_sequences_of_their_own(folder: Path) -> None:
    part = load(folder, layers=[4])
    one, two = (torch.randn(9, 24, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    both = run_layer(part, 4, torch.stack((one, two)))
    torch.testing.assert_close(both[0], run_layer(part, 4, one))
    torch.testing.assert_close(both[1], run_layer(part, 4, two))


def test_a_gap_is_measured(folder: Path) -> None:
    part = load(folder, layers=[3])
    before = streams_of(load(folder))[3]
    after = run_layer(part, 3, before).double()
    other = after.clone()
    other[4, 7] += 0.5
    gap = compare_layer(part, 3, before, other)
    assert gap.most == pytest.approx(0.5)
    rms = np.sqrt(0.25 / other.numel()) / np.sqrt(np.mean(other.numpy() ** 2))
    assert gap.relative == pytest.approx(rms)
    with pytest.raises(CheckpointError, match=r"after layer 3 has shape \[2, 24\]"):
        compare_layer(part, 3, before, other[:2])


def test_everything_else_works_on_it(folder: Path) -> None:
    """Cache, decoding and chunks go by the places in it."""
    part = load(folder, layers=[1, 2, 5])
    cache = part.new_cache()
    with torch.no_grad():
        chunks = [part.extend(cache, IDS[:20], [20]), part.extend(cache, IDS[20:], [10])]
        whole = part.sequence_logits(IDS)
    torch.testing.assert_close(part.logits(torch.cat(chunks)), whole, rtol=1e-4, atol=1e-5)
    assert len(cache.k) == 3
    assert cache.k[1].shape[1] == cache.ring  # layer 2 slides, layer 1 grows
    assert cache.k[0].shape[1] == cache.capacity
    assert len(generate(part, IDS[:4].tolist(), max_new_tokens=3).token_ids) == 3


# -- never taken for the whole ------------------------------------------------------------------


def test_name_and_config_say_what_it_is(folder: Path) -> None:
    part = load(folder, layers=[5, 0, 3])  # in any order
    config = part.config
    assert part.name == f"layers 0, 3 and 5 of {folder}"
    assert isinstance(config, PartialConfig)
    assert config.layer_indices == (0, 3, 5)
    assert (config.num_hidden_layers, config.of_layers) == (3, LAYERS)
    assert [layer.original for layer in part.layers] == [0, 3, 5]
    assert [(row.place, row.layer, row.attention, row.mlp) for row in config.table] == [
        (0, 0, "sliding_attention", "dense"),
        (1, 3, "sliding_attention", "sparse"),
        (2, 5, "sliding_attention", "sparse"),
    ]
    assert config.place(5) == 2
    with pytest.raises(CheckpointError, match="layer 4 is not here: these are layers 0, 3 and 5"):
        config.place(4)
    assert "layer_indices=(0, 3, 5)" in repr(config)
    whole = BeamConfig.from_dict(CONFIG)
    assert config != whole
    assert take_layers(whole, [0, 3, 5]) == config != take_layers(whole, [0, 3, 4])
    assert [spec.name for spec in tensor_specs(config) if "q_proj" in spec.name] == [
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 3, 5)
    ]


def test_words() -> None:
    words = {(3,): "layer 3", (0, 3, 51): "layers 0, 3 and 51", (0, 1, 2): "layers 0…2"}
    words |= {(0, 2): "layers 0 and 2", (0, 1, 2, 9, 10, 50): "layers 0…2, 9…10 and 50"}
    for layers, text in words.items():
        assert layer_words(layers) == text


def test_all_layers_are_still_named(folder: Path) -> None:
    part, whole = load(folder, layers=range(LAYERS)), load(folder)
    assert part.name == f"layers 0…5 of {folder}"
    assert torch.equal(part.sequence_logits(IDS), whole.sequence_logits(IDS))


def test_its_description_is_not_read_as_a_model(folder: Path) -> None:
    described = take_layers(BeamConfig.from_dict(CONFIG), [1, 4]).to_dict()
    assert (described["layer_indices"], described["of_layers"]) == ([1, 4], LAYERS)
    with pytest.raises(ConfigError, match=r"layer_indices says that these are some layers"):
        BeamConfig.from_dict(described)
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="layer_indices"):
        load(folder)


def test_it_is_not_saved(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"this is layers 0 and 5 of .* not a whole model"):
        save(load(folder, layers=[0, 5]), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_shapes_of_the_full_model_without_weights() -> None:
    part = load("beam-501b", layers=[0, 3, 51], device="meta")
    assert part.name == "layers 0, 3 and 51 of beam-501b"
    assert [layer.attention.full for layer in part.layers] == [False, True, True]
    assert [hasattr(layer.mlp, "router") for layer in part.layers] == [False, True, True]
    scales = [layer.scales[0][0] for layer in part.layers]
    assert scales == pytest.approx([2**-0.5, 8**-0.5, 104**-0.5])


# -- what is read -------------------------------------------------------------------------------


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of each tensor that were read, by its name."""
    counts: dict[str, int] = {}
    fill = checkpoint_read._fill

    def counted(memory: Tensor, header: Header, start: int) -> None:
        counts[header.name] = counts.get(header.name, 0) + memory.nbytes
        fill(memory, header, start)

    monkeypatch.setattr(checkpoint_read, "_fill", counted)
    return counts


def test_nothing_else_is_read(
    folder: Path, tensors: dict[str, np.ndarray], bytes_read: dict[str, int]
) -> None:
    load(folder, layers=[1, 4])
    expected = {
        name: array.nbytes
        for name, array in tensors.items()
        if ".layers." not in name or name.split(".")[2] in ("1", "4")
    }
    assert bytes_read == expected


def test_files_of_other_layers_may_be_missing_or_damaged(
    folder: Path, tensors: dict[str, np.ndarray]
) -> None:
    expected = load(folder, layers=[1, 4])
    for layer in (0, 2):
        (folder / f"layer-{layer}.safetensors").unlink()
    (folder / "layer-3.safetensors").write_bytes(b"not a checkpoint at all")
    found = load(folder, layers=[1, 4])
    pairs = zip(found.named_parameters(), expected.named_parameters(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    with pytest.raises(
        CheckpointError,
        match=r"in layer-0\.safetensors, which is not there; fetch layer-0\.safetensors, "
        r"layer-2\.safetensors, which the chosen layers need",
    ):
        load(folder, layers=[0, 1, 2])
    with pytest.raises(CheckpointError, match=r"layer-3\.safetensors is truncated or corrupt"):
        load(folder, layers=[3])
    with pytest.raises(CheckpointError, match=r"layer-0\.safetensors, which is not there"):
        load(folder)


@pytest.mark.parametrize("how", ["other bytes", "written anew", "grown", "shorter", "gone"])
def test_a_file_that_changes_while_it_is_read_is_not_taken(folder: Path, how: str) -> None:
    """Where the old header places a tensor the new file may have anything."""
    file = folder / "layer-4.safetensors"
    whole = file.read_bytes()

    def change(done: int, of: int) -> None:
        if file.exists() and file.read_bytes() == whole:
            if how == "other bytes":
                file.write_bytes(whole[:-64] + bytes(64))
                os.utime(file, ns=(1, 1))  # a copy that keeps the time of what it is of
            elif how == "written anew":
                (folder / "new").write_bytes(whole)
                os.replace(folder / "new", file)
            elif how == "grown":
                file.write_bytes(whole + b"more")
            elif how == "shorter":
                file.write_bytes(whole[:-8000])
            else:
                file.unlink()

    says = {"shorter": "changed while|ends inside", "gone": "cannot be read"}.get(
        how, "changed while"
    )
    with pytest.raises(CheckpointError, match=says):
        load(folder, layers=[1, 4], progress=change)


def test_what_belongs_to_no_chosen_layer_is_left_alone(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    """Damage, other kinds of tensors and layers beyond the config's, outside of what was asked."""
    altered = {name: array.copy() for name, array in tensors.items()}
    altered["model.layers.2.mlp.experts.0.up_proj.weight"][:] = 0x7FC0  # NaN
    altered["model.layers.6.eh_proj.weight"] = np.zeros((2, 2), np.float32)
    altered["model.layers.3.self_attn.qkv_bias"] = np.zeros(2, np.float32)
    del altered["model.layers.0.mlp.up_proj.weight"]
    write_safetensors(tmp_path / SINGLE, altered)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert torch.isfinite(load(tmp_path, layers=[1, 4, 5]).sequence_logits(IDS)).all()
    for layer, says in ((2, "NaN or infinite"), (3, "qkv_bias .* is unknown"), (0, "is missing")):
        with pytest.raises(CheckpointError, match=says):
            load(tmp_path, layers=[layer])


def test_a_file_far_larger_than_any_memory(tmp_path: Path, bytes_read: dict[str, int]) -> None:
    """Three terabytes in one sparse file, of which a layer of some kilobytes is loaded."""
    wide = 1 << 34
    config = CONFIG | {
        "num_hidden_layers": 2, "intermediate_size": wide,
        "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = list(tensor_specs(BeamConfig.from_dict(config)))
    header: dict[str, Any] = {}
    offset = 0
    for spec in sorted(specs, key=lambda spec: not spec.fp32):  # aligned
        end = offset + spec.size * (4 if spec.fp32 else 2)
        kind = "F32" if spec.fp32 else "BF16"
        header[spec.name] = {"dtype": kind, "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    marked = header["model.layers.1.self_attn.q_norm.weight"]["data_offsets"][0]
    try:
        with (tmp_path / SINGLE).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.seek(8 + len(text) + marked)
            file.write(b"\x80\x3f")  # 1.0
            file.truncate(8 + len(text) + offset)
    except OSError:
        pytest.skip("this file system holds no sparse file of 2.4 TB")
    assert offset > 2e12
    part = load(tmp_path, layers=[1], dtype=torch.bfloat16)
    assert part.layers[0].attention.qk_norm[0].tolist() == [1.0] + [0.0] * 7
    wanted = sum(parameter.nbytes for parameter in part.parameters())
    assert sum(bytes_read.values()) == wanted < 50_000


def test_progress_and_interruption(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    part = load(folder, layers=[0, 4], progress=lambda done, of: told.append((done, of)))
    total = sum(parameter.nbytes for parameter in part.parameters())
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def stop(done: int, of: int) -> None:
        if done > of // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(folder, layers=[0, 4], progress=stop)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_load_into_a_part(folder: Path, tmp_path: Path) -> None:
    part = load(folder, layers=[2, 5])
    other = write(tmp_path / "other", beam_fp64.random_tensors(CONFIG, 6))
    (other / "layer-0.safetensors").unlink()
    load_into(part, other)
    assert torch.equal(part.sequence_logits(IDS), load(other, layers=[2, 5]).sequence_logits(IDS))


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([], "layers is empty; name at least one"),
        ([0, 6], "there is no layer 6 to load; the model has layers 0 to 5"),
        ([-1], "there is no layer -1 to load"),
        ([10**30], "there is no layer a number far beyond any model"),
        ([2, 0, 2], "layer 2 is named twice"),
        ([1.0], r"layers takes whole numbers, not 1\.0"),
        ([True], "layers takes whole numbers, not True"),
        (["0"], "layers takes whole numbers, not '0'"),
        ([None], "layers takes whole numbers, not None"),
        ([[0]], r"layers takes whole numbers, not \[0\]"),
        ("0,3", r"layers takes a list, such as \[0, 3\], not '0,3'"),
        (3, "layers takes a list"),
    ],
)
def test_layers_that_cannot_be_loaded(folder: Path, layers: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        load(folder, layers=layers)
    assert "\n" not in str(caught.value)


def test_whole_numbers_of_other_libraries(folder: Path) -> None:
    layers = [np.int64(4), torch.tensor(1)]
    assert load(folder, layers=layers).name.startswith("layers 1 and 4 of")
    assert load(folder, layers=iter(range(2))).name.startswith("layers 0…1 of")


def test_not_with_tensor_parallelism(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="layers and shard do not go together"):
        load(folder, layers=[0], shard=Shard(rank=0, world=2))


def test_not_of_a_preset_without_weights() -> None:
    with pytest.raises(CheckpointError, match=r"beam-501b is known by its shape only"):
        load("beam-501b", layers=[0])


@pytest.mark.parametrize(
    "change",
    [
        {"layer_indices": (0, 3)},
        {"layer_indices": (3, 0, 5)},
        {"layer_indices": (0, 0, 5)},
        {"layer_indices": (-1, 0, 5)},
        {"layer_indices": (0, 3, 6)},
    ],
)
def test_configs_that_cannot_be(change: dict[str, Any]) -> None:
    config = take_layers(BeamConfig.from_dict(CONFIG), [0, 3, 5])
    with pytest.raises(ConfigError, match="layer_indices"):
        config.replace(**change)


def test_layers_that_cannot_be_run(folder: Path) -> None:
    part, stream = load(folder, layers=[1, 4]), torch.zeros(3, 24)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: run_layer(part, 0, stream), r"layer 0 is not in layers 1 and 4 of .*, which has"),
        (lambda: run_layer(part, True, stream), "layer True is not in"),
        (lambda: run_layer(part, 1, torch.zeros(3, 23)), r"must be \[T, 24\] or \[B, T, 24\]"),
        (lambda: run_layer(part, 1, torch.zeros(24)), r"not \[24\]"),
        (lambda: run_layer(part, 1, torch.zeros(0, 24)), r"not \[0, 24\]"),
        (lambda: run_layer(part, 1, torch.zeros(129, 24)), "1 to 128 tokens"),
        (lambda: run_layer(part, 1, [[0.0] * 24]), "must be"),  # type: ignore[arg-type]
    ]
    for call, says in wrong:
        with pytest.raises(CheckpointError, match=says):
            call()
    rank = load(folder, shard=Shard(rank=0, world=2))
    with pytest.raises(ConfigError, match="rank 0 of 2"):
        run_layer(rank, 1, stream)


def test_a_drafter_refuses_a_part() -> None:
    part = load("beam-tiny", layers=[0, 2, 5, 8])
    with pytest.raises(DraftError, match=r"layers 0, 2, 5 and 8 of .* is a part of a model"):
        load_drafter(part, Path(checkpoint_read.__file__).parent / "zoo" / "beam-tiny" / "dflash2")
