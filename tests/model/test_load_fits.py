"""Which models are loaded, which are refused and which go to vLLM; by numbers found otherwise.

What is free is faked where a test needs a small machine; everything else is real.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import workbench
from model.fake_hub import Hub, running_hub
from workbench import cli
from workbench.errors import CheckpointError, ServingError
from workbench.model import checkpoint, fits
from workbench.model.beam import Beam
from workbench.model.cache import KVCache
from workbench.model.checkpoint_save import INDEX_FILE
from workbench.model.fits import DoesNotFitError, fit_on
from workbench.model.parallel import Shard
from workbench.model.partial import take_layers
from workbench.model.presets import ZOO, beam_501b, resolve
from workbench.serving.served_model import ServedBeam

TINY = ZOO / "beam-tiny"
CONFIG = resolve("beam-tiny").config
REPO = "some-lab/Beam-Tiny"


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what is free: on the CPU, and on a GPU, which is there then."""

    def set_free(cpu: int | None, cuda: int | None = None) -> None:
        sizes = {"cpu": cpu, "cuda:0": cuda, "cuda": cuda}
        monkeypatch.setattr(fits, "free_bytes", lambda device: sizes[device])
        if cuda is not None:
            card = SimpleNamespace(total_memory=1 << 40)
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)

    return set_free


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """beam-tiny in files of 2 MB."""
    folder = tmp_path_factory.mktemp("sharded")
    workbench.save(checkpoint.load("beam-tiny"), folder, shard_bytes=2 << 20, tokenizer_folder=TINY)
    return folder


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A folder of the full model's configuration and an index; no weight file is there."""
    return big_folder(tmp_path / "big")


def big_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(beam_501b().config.to_json())
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return folder


@pytest.fixture
def hub(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.repos[REPO] = {path.name: path.read_bytes() for path in sharded.iterdir()}
        yield running


def loaded_bytes(beam: Beam) -> int:
    return sum(parameter.nbytes for parameter in beam.parameters())


def same_weights(a: Beam, b: Beam) -> bool:
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


# -- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["beam-tiny", "beam-501b"])
def test_weights_are_what_loading_allocates(model: str, dtype: torch.dtype) -> None:
    meta = checkpoint.load(model, device="meta", dtype=dtype)
    fit = fit_on(resolve(model).config, name=model, dtype=dtype, free=1)
    assert fit.weights_bytes == loaded_bytes(meta)
    part = checkpoint.load(model, device="meta", dtype=dtype, layers=[0, 3])
    config = take_layers(resolve(model).config, [0, 3])
    assert fits.weights_bytes(config, dtype.itemsize) == loaded_bytes(part)
    shard = Shard(rank=1, world=2)
    rank = checkpoint.load(model, device="meta", dtype=dtype, shard=shard)
    assert fits.weights_bytes(resolve(model).config, dtype.itemsize, shard) == loaded_bytes(rank)


def test_the_full_models_numbers() -> None:
    fit = fit_on(beam_501b().config, name="beam-501b", free=2_008_000_000_000)
    router = 49 * (256 * 5120 + 256)
    assert fit.weights_bytes == 4 * 501_012_021_952  # float32, routers are that anyway
    narrow = fit_on(beam_501b().config, name="beam-501b", dtype=torch.bfloat16, free=1)
    assert narrow.weights_bytes == 2 * 501_012_021_952 + 2 * router
    assert fit.fits
    assert 2 * 163_840 * 5120 <= narrow.room_bytes < 4 << 30  # a whole embedding on its way


def test_the_room_holds_the_cache_of_a_sequence() -> None:
    for model in ("beam-tiny", "beam-501b"):
        config = resolve(model).config
        cache = KVCache(config, dtype=torch.bfloat16, device="meta")
        cache.reserve(min(fits.CONTEXT, config.max_position_embeddings))
        fit = fit_on(config, name=model, dtype=torch.bfloat16, free=1)
        assert cache.nbytes < fit.room_bytes


def test_a_byte_decides(free: Callable[..., None]) -> None:
    free(0)
    needed = fit_on(CONFIG, name="beam-tiny").needed_bytes
    free(needed)
    assert isinstance(workbench.load("beam-tiny"), Beam)
    free(needed - 1)
    assert isinstance(workbench.load("beam-tiny"), ServedBeam)


def test_small_models_are_counted_with_their_packed_copy() -> None:
    wide = fit_on(CONFIG, name="x", free=1)
    narrow = fit_on(CONFIG, name="x", dtype=torch.bfloat16, free=1)
    assert wide.room_bytes - narrow.room_bytes >= wide.weights_bytes


def test_what_is_free_here() -> None:
    free = fits.free_bytes("cpu")
    total = workbench.machine().memory_bytes
    assert free is not None
    assert total is not None
    assert 0 < free <= total
    assert fits.free_bytes("meta") is None


def test_a_containers_limit(tmp_path: Path) -> None:
    names = ("limit", "used", "stat")
    paths = [str(tmp_path / name) for name in names]
    for name, text in zip(names, ("1000\n", "700\n", "anon 5\ninactive_file 200\n"), strict=True):
        (tmp_path / name).write_text(text)
    assert fits._cgroup_free(*paths, "inactive_file") == 500
    (tmp_path / "limit").write_text("max\n")
    assert fits._cgroup_free(*paths, "inactive_file") is None
    assert fits._cgroup_free("/nowhere/a", "/nowhere/b", "/nowhere/c", "x") is None


@pytest.mark.parametrize(
    ("limit", "used", "stat", "free"),
    [
        ("1000", "<garbage>", "anon 5", 1000),  # the limit holds whatever else is unknown
        ("1000", "700", None, 300),
        ("1000", "700", "one two three\n\x00", 300),
        ("1000", "700", "inactive_file x", 300),
        ("1000", "100", "inactive_file 5000", 1000),
        ("1000", "5000", "", 0),
        ("1000", "-5", "", 1000),
        ("9223372036854771712", "5", "", None),  # how version 1 says that there is no limit
        ("0", "0", "", None),
        ("-1", "0", "", None),
        ("garbage", "0", "", None),
        ("1" * 5000, "0", "", None),
    ],
)
def test_odd_limits(
    limit: str, used: str, stat: str | None, free: int | None, tmp_path: Path
) -> None:
    paths = [str(tmp_path / name) for name in ("limit", "used", "stat")]
    for path, text in zip(paths, (limit, used, stat), strict=True):
        if text is not None:
            Path(path).write_text(text)
    assert fits._cgroup_free(*paths, "inactive_file") == free


@pytest.mark.parametrize("available", [None, "MemAvailable: 0 kB", "MemAvailable: x", "", "\xff"])
@pytest.mark.parametrize("total", [None, 0, 5000])
def test_machines_that_do_not_say(
    available: str | None, total: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if available is not None:
        (tmp_path / "meminfo").write_text(available, "latin-1")
    path = tmp_path / "meminfo"
    monkeypatch.setattr(fits, "Path", lambda name: path if "meminfo" in name else Path(name))
    monkeypatch.setattr(fits, "_CGROUPS", ())
    monkeypatch.setattr(fits, "usable_memory", lambda: total)
    assert fits.free_bytes("cpu") == (total or None)
    fit = fit_on(CONFIG, name="a\nb")
    assert fit.fits is (not total)
    assert str(fit).isprintable()


def test_a_limit_counts_where_it_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "_available", lambda: 700)
    monkeypatch.setattr(fits, "_cgroup_free", lambda *_: 600)
    assert fits.free_bytes("cpu") == 600
    monkeypatch.setattr(fits, "_cgroup_free", lambda *_: None)
    assert fits.free_bytes("cpu") == 700


# -- folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["beam-tiny", TINY, str(TINY)])
def test_what_fits_is_loaded_as_ever(model: Any) -> None:
    ours, theirs = workbench.load(model), checkpoint.load(model)
    assert same_weights(ours, theirs)
    assert ours.name == theirs.name == str(model)
    if model == TINY:
        return  # the same folder once more
    prompt = "def mean(values):"
    assert (
        workbench.generate(ours, prompt, max_new_tokens=8).token_ids
        == workbench.generate(theirs, prompt, max_new_tokens=8).token_ids
    )


def test_options_are_passed_on() -> None:
    told: list[tuple[int, int]] = []
    beam = workbench.load(
        "beam-tiny",
        dtype=torch.bfloat16,
        layers=iter([3, 0]),  # can be read once
        progress=lambda done, total: told.append((done, total)),
    )
    assert same_weights(beam, checkpoint.load("beam-tiny", dtype=torch.bfloat16, layers=[0, 3]))
    assert beam.name == "layers 0 and 3 of beam-tiny"
    assert told[-1] == (loaded_bytes(beam), loaded_bytes(beam))
    assert workbench.load("beam-501b", device="meta").device == torch.device("meta")


def test_what_does_not_fit_is_planned_for_vllm(big: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served = workbench.load(big)
    assert isinstance(served, ServedBeam)
    assert served.fit is not None
    assert served.fit.weights_bytes == 4 * 501_012_021_952
    assert served.server is None
    assert "does not fit cpu: float32 weights of 1,866.42 GiB (exact)" in repr(served)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cpu"}, "leave device out to have it planned for vLLM, or load some of its"),
        ({"layers": range(52)}, "layers 0…51 of .*; load fewer layers"),
        ({"shard": Shard(rank=0, world=8)}, "233.5. GiB .*split it over more ranks"),
        ({"serve": False}, r"it cannot be served here.* 8 x H200.* would do, on .*: vllm serve "),
    ],
)
def test_what_was_wished_is_refused_with_numbers(
    options: dict[str, Any], says: str, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.serving.served_model.detected", lambda: ())
    with pytest.raises(DoesNotFitError, match=says) as caught:
        workbench.load(big, **options)
    assert "(exact)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not caught.value.fit.fits
    assert isinstance(caught.value, CheckpointError)


def test_layers_fit_where_the_whole_does_not(free: Callable[..., None], sharded: Path) -> None:
    whole = fit_on(CONFIG, name="x", free=0).needed_bytes
    part = fit_on(take_layers(CONFIG, [1, 4]), name="x", free=0).needed_bytes
    free((whole + part) // 2)
    assert isinstance(workbench.load(sharded), ServedBeam)
    beam = workbench.load(sharded, layers=[1, 4])
    assert same_weights(beam, checkpoint.load(sharded, layers=[1, 4]))


def test_a_gpu_that_has_room_is_named(free: Callable[..., None]) -> None:
    free(0, cuda=1 << 40)
    with pytest.raises(DoesNotFitError, match=r"cuda:0 has room .* bfloat16: load it with device="):
        workbench.load("beam-tiny")
    free(0, cuda=1 << 10)  # of 1 TiB: taken by somebody else
    assert isinstance(workbench.load("beam-tiny"), ServedBeam)


def test_unknown_memory_is_tried(free: Callable[..., None]) -> None:
    free(None)
    assert same_weights(workbench.load("beam-tiny"), checkpoint.load("beam-tiny"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "beam-501b"}, "known by its shape only"),
        ({"model": "beam-tiny", "revision": "v1"}, "revision is of a model of the hub, and 'beam-"),
        ({"model": "beam-tiny", "layers": [0], "shard": Shard()}, "layers and shard do not go"),
        ({"model": "beam-tiny", "layers": "01"}, "layers takes a list"),
        ({"model": "beam-tiny", "layers": 5}, "layers takes a list"),
        ({"model": "beam-tiny", "layers": b"\0"}, "layers takes a list"),
        ({"model": "some-lab/other", "layers": "0"}, "layers takes a list"),  # before the hub
        ({"model": "beam-tiny", "layers": itertools.count()}, "more than 10,000 numbers"),
        ({"model": "beam-tiny", "serve": 1}, "serve must be True, False or None, not 1"),
        ({"model": "beam-tiny", "serve": "no"}, "serve must be True, False or None, not 'no'"),
        ({"model": "beam-tiny", "shard": 5}, "shard must be a Shard"),
        ({"model": "beam-tiny", "device": "tpu"}, "device 'tpu' does not exist"),
        ({"model": "beam-tiny", "serve": True, "layers": [0]}, "leave dtype, shard and layers out"),
        ({"model": "beam-tiny", "serve": True, "device": "cuda:1"}, "'cuda', which is all GPUs"),
        ({"model": "beam-501b", "serve": True}, "has no weights to serve"),
    ],
)
def test_refusals(options: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        workbench.load(**options)


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(beam_501b().config.to_json())
    with pytest.raises(CheckpointError, match="holds no weights"):
        workbench.load(tmp_path)


def test_serving_is_refused_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.serving.served_model.detected", lambda: ())
    with pytest.raises(ServingError, match="no GPU that torch can use is in this machine; 1 x H1"):
        workbench.load("beam-tiny", serve=True)


# -- hub ----------------------------------------------------------------------------------------


def test_a_model_of_the_hub_is_loaded(hub: Hub, sharded: Path) -> None:
    beam = workbench.load(REPO)
    assert beam.name == REPO
    assert same_weights(beam, checkpoint.load(sharded))
    assert beam.tokenizer is not None
    files = {path.name for path in sharded.glob("*.safetensors")}
    assert len(files) > 5
    assert files <= set(hub.fetched(REPO))


def test_of_layers_only_their_files_are_fetched(hub: Hub, sharded: Path) -> None:
    beam = workbench.load(REPO, layers=[2])
    assert beam.name == f"layer 2 of {REPO}"
    assert same_weights(beam, checkpoint.load(sharded, layers=[2]))
    places: dict[str, str] = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    expected = {
        file for name, file in places.items() if ".layers." not in name or ".layers.2." in name
    }
    got = {name for name in hub.fetched(REPO) if name.endswith(".safetensors")}
    assert got == expected
    assert len(got) < len(set(places.values()))


def test_of_what_does_not_fit_no_weights_are_fetched(hub: Hub, free: Callable[..., None]) -> None:
    free(0)
    served = workbench.load(REPO, revision="v1")
    assert isinstance(served, ServedBeam)
    assert (served.name, served.checkpoint) == (REPO, REPO)
    assert not [name for name in hub.fetched(REPO) if name.endswith(".safetensors")]
    words = served.replan("H200").launch.words
    assert words[2] == REPO
    assert words[words.index("--revision") + 1] == "v1"
    with pytest.raises(DoesNotFitError):
        workbench.load(REPO, serve=False)
    assert not [name for name in hub.fetched(REPO) if name.endswith(".safetensors")]


def test_of_the_shapes_no_weights_are_fetched(hub: Hub) -> None:
    assert workbench.load(REPO, device="meta").device == torch.device("meta")
    assert not [name for name in hub.fetched(REPO) if name.endswith(".safetensors")]


def test_another_kind_of_model(hub: Hub) -> None:
    hub.repos[REPO]["config.json"] = b'{"model_type": "llama"}'
    with pytest.raises(workbench.WorkbenchError, match="model_type is 'llama'; only 'beam'"):
        workbench.load(REPO)


# -- command line -------------------------------------------------------------------------------


def run(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == code, result.output
    return result


def test_generate_says_how_to_serve_what_does_not_fit(
    big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.serving.served_model.detected", lambda: ())
    says = run("generate", str(big), "--prompt", "x", code=1).stderr
    assert says.count("\n") == 1
    assert "does not fit cpu" in says
    assert f"vllm serve {big} --host 127.0.0.1" in says


def test_info_remarks_on_what_does_not_fit(big: Path) -> None:
    result = run("info", str(big))
    assert "501.01 B" in result.stdout
    assert "vllm serve" in result.stderr
    assert json.loads(run("info", str(big), "--json").stdout)["folder"] == str(big)
    (big / INDEX_FILE).unlink()
    assert run("info", str(big)).stderr == ""  # shapes alone are not served
    assert run("info", "beam-tiny").stderr == ""


@pytest.mark.parametrize("index", ["{}", "<html>", '{"weight_map": {"a\\n": "../../etc/passwd"}}'])
def test_info_of_a_folder_that_cannot_be_served(
    index: str, tmp_path: Path, free: Callable[..., None]
) -> None:
    free(0)
    folder = tmp_path / "a\n\x1b[2Jb"
    folder.mkdir()
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    (folder / INDEX_FILE).write_text(index)
    result = run("info", str(folder))
    assert "11.18 M" in result.stdout
    assert "\x1b" not in result.stderr
    assert "characters that cannot be printed" in result.stderr
    says = run("generate", str(folder), "--prompt", "x", code=1).stderr
    assert says.count("\n") == 1
    assert "does not fit cpu" in says


def test_info_of_a_hubs_model_without_weights(hub: Hub, free: Callable[..., None]) -> None:
    free(0)
    hub.repos["a/b"] = {"config.json": (TINY / "config.json").read_bytes(), "x.bin": b""}
    result = run("info", "a/b")
    assert "11.18 M" in result.stdout
    assert "nor can it be served: a/b has no weights that can be read" in result.stderr
    assert "a/b has no weights" in run("generate", "a/b", "--prompt", "x", code=1).stderr


def test_info_and_generate_of_the_hub(hub: Hub) -> None:
    found = json.loads(run("info", REPO, "--json").stdout)
    assert found["model"] == REPO
    assert found["parameters"] == workbench.info("beam-tiny").to_dict()["parameters"]
    words = ("--prompt", "def mean(values):", "--max-new-tokens", "6", "--no-draft")
    ours = run("generate", REPO, *words).stdout
    assert ours == run("generate", "beam-tiny", *words, "--dtype", "float32").stdout
    says = run("generate", "some-lab/none", "--prompt", "x", code=1).stderr
    assert says.count("\n") == 1
    assert "there is no such model or it is private" in says
