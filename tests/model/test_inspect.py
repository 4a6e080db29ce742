"""Captured values against the FP64 reference, and the exports against the values."""

import json
import math
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import workbench
from reference import beam_fp64 as ref
from workbench.errors import InspectionError
from workbench.model import capture as capture_module
from workbench.model.beam import Beam
from workbench.model.context import SequenceContext
from workbench.model.inspect import (
    Capture,
    RouterLoad,
    capture,
    layer_table,
    logit_lens,
    router_load,
)
from workbench.model.parallel import Shard
from workbench.model.presets import ZOO, beam_501b
from workbench.model.tokenizer import Tokenizer

Small = Any  # conftest.Small: folder, config, weights, tokens, reference
PAGE = Path(__file__).resolve().parents[2] / "docs" / "inspection.md"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def beam(features: Small) -> Beam:
    return workbench.load(features.folder)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Beam:
    """A random model that reads text: the bundled tokenizer on a small config."""
    folder = tmp_path_factory.mktemp("speaking") / "random-beam"
    tokenizer = Tokenizer.from_folder(ZOO / "beam-tiny")
    config = {
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 4,
        "max_position_embeddings": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "final_logit_softcapping": 15.0,
    }
    ref.random_checkpoint(folder, config, seed=5)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ZOO / "beam-tiny" / name, folder / name)
    return workbench.load(folder)


def assert_close(got: Tensor, expected: np.ndarray | Tensor, atol: float = 1e-4) -> None:
    np.testing.assert_allclose(got.numpy(), np.asarray(expected), rtol=0, atol=atol)


def hooks(beam: Beam) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in beam.modules())


def visible(config: dict[str, Any], layer: int, tokens: int) -> np.ndarray:
    query, key = np.indices((tokens, tokens))
    seen = key <= query
    if ref.attention_type(config, layer) == "sliding_attention":
        seen &= key > query - config["sliding_window"]
    return seen


# --- capture ---------------------------------------------------------------------------------


def test_every_captured_value_is_the_references(each_small: Small) -> None:
    config, expected = each_small.config, each_small.reference
    layers, tokens = config["num_hidden_layers"], len(each_small.tokens)
    seen = capture(workbench.load(each_small.folder), each_small.tokens, attention=True)

    assert seen.token_ids == tuple(each_small.tokens)
    assert_close(seen.logits, expected["logits"])
    assert seen.hidden is not None
    assert seen.hidden.shape == (layers + 1, tokens, config["hidden_size"])
    assert_close(seen.hidden, np.stack(expected["hidden"]))
    assert seen.hidden_index == tuple(range(layers + 1))
    assert list(seen.attention) == list(range(layers))
    for layer, probabilities in seen.attention.items():
        assert probabilities.dtype == torch.float32
        assert_close(probabilities, expected["attention"][layer], atol=1e-5)
        assert_close(probabilities.sum(-1), np.ones(probabilities.shape[:2]), atol=1e-6)
        hidden = ~visible(config, layer, tokens)
        assert (probabilities.numpy()[:, hidden] == 0).all()
    assert list(seen.router_ids) == list(expected["router"]) == list(seen.router_weights)
    for layer, (ids, weights) in expected["router"].items():
        np.testing.assert_array_equal(seen.router_ids[layer].numpy(), ids)
        assert_close(seen.router_weights[layer], weights, atol=1e-5)


def test_kv_contents_are_what_the_reference_would_cache(features: Small, beam: Beam) -> None:
    config, weights, tokens = features.config, features.weights, len(features.tokens)
    seen = capture(beam, features.tokens, kv=True)
    assert list(seen.kv) == [0, 1, 2, 3]
    for layer, (positions, k, v) in seen.kv.items():
        sliding = ref.attention_type(config, layer) == "sliding_attention"
        first = tokens - config["sliding_window"] if sliding else 0
        assert positions.tolist() == list(range(first, tokens))
        here = f"model.layers.{layer}."
        x = ref.rms_norm(
            features.reference["hidden"][layer], weights[here + "input_layernorm.weight"], 1e-6
        )[first:]
        shape = (tokens - first, 2, 16)
        keys = (x @ weights[here + "self_attn.k_proj.weight"].T).reshape(shape)
        keys = ref.rms_norm(keys, weights[here + "self_attn.k_norm.weight"], 1e-6)
        if sliding:
            for row in range(len(keys)):
                keys[row] = [ref.rotate(head, first + row, 10000.0) for head in keys[row]]
        assert_close(k, keys)
        assert_close(v, (x @ weights[here + "self_attn.v_proj.weight"].T).reshape(shape))


def test_long_prompts_fill_the_cache_in_chunks(
    features: Small, beam: Beam, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = capture(beam, features.tokens, kv=True).kv
    monkeypatch.setattr(capture_module, "KV_CHUNK", 7)
    for layer, contents in capture(beam, features.tokens, kv=True).kv.items():
        assert contents.positions.tolist() == whole[layer].positions.tolist()
        assert_close(contents.k, whole[layer].k, atol=1e-5)
        assert_close(contents.v, whole[layer].v, atol=1e-5)


def test_capturing_changes_no_bit_and_leaves_no_hook(features: Small, beam: Beam) -> None:
    before = beam.sequence_logits(features.ids)
    seen = capture(beam, features.tokens, attention=True, kv=True)
    assert torch.equal(seen.logits, before)
    assert hooks(beam) == 0
    assert torch.equal(beam.sequence_logits(features.ids), before)
    assert torch.equal(capture(beam, features.tokens, hidden=False, router=False).logits, before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_capture_leaves_no_hook(
    features: Small, beam: Beam, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    before = beam.sequence_logits(features.ids)
    installed: list[int] = []

    def stop(*_: object) -> None:
        installed.append(hooks(beam))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(SequenceContext, "attend", stop)
        with pytest.raises(error):
            capture(beam, features.tokens, attention=True)
    assert installed[0] > 0
    assert hooks(beam) == 0
    assert torch.equal(beam.sequence_logits(features.ids), before)


def test_captured_values_are_the_callers_own(features: Small, beam: Beam) -> None:
    seen = capture(beam, features.tokens, attention=True, kv=True)
    before = beam.sequence_logits(features.ids)
    for value in (
        seen.hidden,
        *seen.attention.values(),
        *seen.router_weights.values(),
        seen.kv[1].k,
    ):
        assert value is not None
        value.zero_()
    assert torch.equal(beam.sequence_logits(features.ids), before)
    again = capture(beam, features.tokens)
    assert again.hidden is not None
    assert_close(again.hidden, np.stack(features.reference["hidden"]))


def test_layers_can_be_chosen(features: Small, beam: Beam) -> None:
    whole = capture(beam, features.tokens, attention=True)
    some = capture(beam, features.tokens, layers=[3, 1], attention=[2], kv=True)
    assert some.hidden_index == (0, 2, 4)
    assert some.hidden is not None
    for index in some.hidden_index:
        assert torch.equal(some.stream(index), whole.stream(index))
    assert list(some.router_ids) == [1, 3]
    assert list(some.kv) == [1, 3]
    assert list(some.attention) == [2]
    assert torch.equal(some.attention[2], whole.attention[2])
    assert list(capture(beam, features.tokens, layers=[1], attention=True).attention) == [1]
    bare = capture(beam, features.tokens, hidden=False, router=False)
    assert bare.hidden is None
    assert bare.hidden_index == ()
    assert not bare.attention
    assert not bare.router_ids
    assert not bare.kv
    assert bare.kinds() == ("tokens", "logits")
    with pytest.raises(InspectionError, match=r"hidden state 3 was not captured"):
        some.stream(3)
    with pytest.raises(InspectionError, match=r"hidden state 5 does not exist"):
        some.stream(5)


def test_bfloat16_is_captured_in_float32(features: Small) -> None:
    half = workbench.load(features.folder, dtype=torch.bfloat16)
    before = half.sequence_logits(features.ids)
    seen = capture(half, features.tokens, attention=True, kv=True)
    assert torch.equal(seen.logits, before)
    assert seen.hidden is not None
    for value in (seen.hidden, seen.attention[1], seen.router_weights[1], seen.kv[0].k):
        assert value.dtype == torch.float32
    assert torch.equal(seen.hidden, seen.hidden.bfloat16().float())
    for probabilities in seen.attention.values():
        assert_close(probabilities.sum(-1), np.ones(probabilities.shape[:2]), atol=1e-6)
    # Early layers are near the exact values: bfloat16 has 8 bits.
    assert_close(seen.attention[0], features.reference["attention"][0], atol=0.05)


def test_text_prompts_carry_their_tokens_texts(speaking: Beam) -> None:
    assert speaking.tokenizer is not None
    seen = capture(speaking, "def f(x):\n    return x")
    assert seen.token_ids == tuple(speaking.tokenizer.encode("def f(x):\n    return x"))
    assert seen.tokens == tuple(speaking.tokenizer.token_text(i) for i in seen.token_ids)
    assert "def" in seen.tokens
    assert capture(speaking, list(seen.token_ids)).tokens == seen.tokens


def test_without_a_tokenizer_tokens_are_numbers(features: Small, beam: Beam) -> None:
    assert capture(beam, [5, 0, 63]).tokens == ("#5", "#0", "#63")


def test_values_show_themselves_in_one_line(features: Small, beam: Beam) -> None:
    name = features.folder.name
    beam.name = name
    seen = capture(beam, features.tokens, attention=[1, 3], kv=True, layers=[0, 1, 3])
    shown = {
        seen: f"Capture({name}: 45 tokens, hidden 0…2, 4, attention of layers 1, 3, "
        "router of layers 1, 3, kv of layers 0…1, 3, logits [45, 64])",
        router_load(seen): "RouterLoad(layers 1, 3, 8 experts, 45 tokens)",
        logit_lens(beam, features.tokens): f"LogitLens({name}: 5 places × 45 tokens, 5 best)",
    }
    for value, text in shown.items():
        assert repr(value) == text
        assert value._repr_mimebundle_() == {"text/plain": text}
    assert repr(seen.kv[0]) == "KVContents(positions 40…44, [5, 2, 16])"


# --- logit lens ------------------------------------------------------------------------------


def test_logit_lens_is_the_references_head_at_every_place(features: Small, beam: Beam) -> None:
    weights, tokens = features.weights, features.tokens
    lens = logit_lens(beam, tokens, top_k=4)
    assert lens.layers == (-1, 0, 1, 2, 3)
    assert lens.token_ids == tuple(tokens)
    shares = []
    for stream in features.reference["hidden"]:
        x = ref.rms_norm(stream, weights["model.norm.weight"], 1e-6)
        logits = 6.0 * np.tanh(x @ weights["lm_head.weight"].T / 6.0)
        shares.append([ref.softmax(row) for row in logits])
    p = np.array(shares)  # [places, T, V]
    final = p[-1]
    assert_close(lens.entropy, -(p * np.log(p)).sum(-1))
    assert_close(lens.kl, (final * np.log(final / p)).sum(-1))
    assert (lens.kl[-1] == 0).all()
    assert (lens.kl[:-1] > 0.01).all()
    for place in range(5):
        for t in range(len(tokens)):
            order = sorted(range(64), key=lambda i: -p[place, t, i])
            assert lens.top_ids[place, t].tolist() == order[:4]
            assert_close(lens.top_probs[place, t], p[place, t, order[:4]], atol=1e-5)
            if t + 1 < len(tokens):
                assert lens.target_rank[place, t] == 1 + order.index(tokens[t + 1])
                assert math.isclose(
                    lens.target_prob[place, t], p[place, t, tokens[t + 1]], abs_tol=1e-5
                )
    assert (lens.target_rank[:, -1] == 0).all()
    assert lens.target_prob[:, -1].isnan().all()
    assert set(lens.texts) == set(lens.top_ids.flatten().tolist())
    assert lens.texts[int(lens.top_ids[0, 0, 0])] == f"#{int(lens.top_ids[0, 0, 0])}"


def test_logit_lens_reads_text(speaking: Beam) -> None:
    assert speaking.tokenizer is not None
    lens = logit_lens(speaking, "import os")
    assert all(speaking.tokenizer.token_text(i) == text for i, text in lens.texts.items())
    assert len(lens.tokens) == lens.top_ids.shape[1]


# --- router load and layer table -------------------------------------------------------------


def test_router_load_counts_the_references_choices(each_small: Small) -> None:
    config = each_small.config
    load = router_load(capture(workbench.load(each_small.folder), each_small.tokens))
    assert isinstance(load, RouterLoad)
    choices = each_small.reference["router"]
    assert load.layers == tuple(choices)
    assert load.counts.shape == (len(choices), config["num_experts"])
    for row, (ids, _) in enumerate(choices.values()):
        counts = [int((ids == e).sum()) for e in range(config["num_experts"])]
        assert load.counts[row].tolist() == counts
        total = len(each_small.tokens) * config["num_experts_per_tok"]
        assert sum(counts) == total
        assert_close(load.share[row], np.array(counts) / total, atol=1e-12)
        mean = total / config["num_experts"]
        assert math.isclose(load.imbalance[row], max(counts) / mean, rel_tol=1e-12)


def test_layer_table_of_small_models(each_small: Small) -> None:
    config = each_small.config
    table = layer_table(workbench.BeamConfig.from_json(each_small.folder))
    tensors = ref.expected_tensors(config)
    assert [row["index"] for row in table] == list(range(config["num_hidden_layers"]))
    for row in table:
        layer = row["index"]
        full = ref.attention_type(config, layer) == "full_attention"
        sparse = ref.mlp_type(config, layer) == "sparse"
        prefix = f"model.layers.{layer}."
        shapes = [shape for name, (shape, _) in tensors.items() if name.startswith(prefix)]
        assert row == {
            "index": layer,
            "attention": "full_attention" if full else "sliding_attention",
            "window": None if full else config["sliding_window"],
            "position_encoding": "none + SSMax" if full else "RoPE",
            "mlp": "sparse" if sparse else "dense",
            "experts": config["num_experts"] if sparse else 0,
            "experts_per_token": config["num_experts_per_tok"] if sparse else 0,
            "parameters": sum(map(math.prod, shapes)),
        }


def test_layer_table_of_the_full_model() -> None:
    table = layer_table(beam_501b().config)
    assert [row["index"] for row in table if row["window"] is None] == [
        3,
        9,
        15,
        21,
        27,
        33,
        39,
        45,
        51,
    ]
    assert sum(row["window"] == 512 for row in table) == 43
    assert [row["mlp"] for row in table] == ["dense"] * 3 + ["sparse"] * 49
    # 501.01 B in total, of which embedding and head are 2 × 163840 × 5120.
    total = sum(row["parameters"] for row in table) + 2 * 163840 * 5120
    assert total == pytest.approx(501.01e9, abs=0.005e9)


# --- export ----------------------------------------------------------------------------------

AXES: dict[Any, tuple[list[str], list[str]]] = {
    "hidden": (["hidden", "position", "dimension"], ["value"]),
    "attention": (["layer", "head", "query", "key"], ["probability"]),
    "router": (["layer", "position", "choice"], ["expert", "weight"]),
    "kv": (["layer", "position", "head", "dimension"], ["key", "value"]),
    "logits": (["position", "token_id"], ["logit"]),
}


@pytest.fixture
def full_capture(features: Small, beam: Beam) -> Capture:
    return capture(beam, features.tokens, attention=[0, 1], kv=True, layers=[0, 1, 3])


def test_frames_hold_every_value_under_its_coordinates(
    features: Small, full_capture: Capture
) -> None:
    c, tokens = full_capture, len(features.tokens)
    assert c.hidden is not None
    assert c.kinds() == ("tokens", *AXES)
    expected: dict[str, dict[tuple[int, ...], Any]] = {
        "hidden": {
            (i, t, d): c.stream(i)[t, d].item()
            for i in (0, 1, 2, 4) for t in range(tokens) for d in range(48)
        },
        "attention": {
            (i, a, q, k): c.attention[i][a, q, k].item()
            for i in (0, 1) for a in range(4) for q in range(tokens) for k in range(tokens)
            if visible(features.config, i, tokens)[q, k]
        },
        "router": {
            (i, t, j): (c.router_ids[i][t, j].item(), c.router_weights[i][t, j].item())
            for i in (1, 3) for t in range(tokens) for j in range(3)
        },
        "kv": {
            (i, p, g, d): (c.kv[i].k[s, g, d].item(), c.kv[i].v[s, g, d].item())
            for i in (0, 1, 3) for s, p in enumerate(c.kv[i].positions.tolist())
            for g in range(2) for d in range(16)
        },
        "logits": {(t, v): c.logits[t, v].item() for t in range(tokens) for v in range(64)},
    }  # fmt: skip
    for kind, (axes, values) in AXES.items():
        frame = c.to_frame(kind)
        assert list(frame.columns) == axes + values
        assert not frame.duplicated(axes).any()
        names = zip(*(frame[name].tolist() for name in axes), strict=True)
        held = frame[values[0]].tolist()
        if len(values) == 2:
            held = list(zip(held, frame[values[1]].tolist(), strict=True))
        assert dict(zip(names, held, strict=True)) == expected[kind]


def test_tokens_frame_scores_the_prompt(features: Small, full_capture: Capture) -> None:
    frame = full_capture.to_frame("tokens")
    tokens, logits = features.tokens, features.reference["logits"]
    assert frame["position"].tolist() == list(range(len(tokens)))
    assert frame["token_id"].tolist() == tokens
    assert frame["token"].tolist() == [f"#{i}" for i in tokens]
    assert frame["top_id"].tolist() == logits.argmax(-1).tolist()
    logprob = [math.log(ref.softmax(logits[t])[tokens[t + 1]]) for t in range(len(tokens) - 1)]
    assert math.isnan(frame["logprob"][0])
    np.testing.assert_allclose(frame["logprob"][1:], logprob, atol=1e-4)


def test_one_token_prompts_have_frames_too(beam: Beam) -> None:
    seen = capture(beam, [9], attention=True, kv=True)
    assert seen.to_frame("tokens")["logprob"].isna().tolist() == [True]
    assert seen.to_frame("attention")["probability"].tolist() == [1.0] * 4 * 4
    assert logit_lens(beam, [9]).target_rank.tolist() == [[0]] * 5


def test_parquet_round_trip(tmp_path: Path, full_capture: Capture) -> None:
    folder = full_capture.to_parquet(tmp_path / "new" / "run")
    assert folder == tmp_path / "new" / "run"
    kinds = full_capture.kinds()
    assert {f.name for f in folder.iterdir()} == {f"{k}.parquet" for k in kinds} | {"capture.json"}
    for kind in kinds:
        back = pd.read_parquet(folder / f"{kind}.parquet")
        pd.testing.assert_frame_equal(back, full_capture.to_frame(kind))
    about = json.loads((folder / "capture.json").read_text())
    assert workbench.BeamConfig.from_dict(about["config"]) == full_capture.config
    assert about["kinds"] == list(kinds)
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["run"]  # no scratch left


def test_parquet_never_overwrites(tmp_path: Path, full_capture: Capture) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("taken", "file"):
        with pytest.raises(InspectionError, match=rf"{name} exists already; remove it or name"):
            full_capture.to_parquet(tmp_path / name)
    assert (tmp_path / "taken" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert (full_capture.to_parquet(tmp_path / "empty") / "router.parquet").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_parquet_is_written_whole_or_not_at_all(
    tmp_path: Path,
    full_capture: Capture,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    write, written = pd.DataFrame.to_parquet, []

    def fail_at_third(frame: pd.DataFrame, path: Path, **options: Any) -> None:
        if len(written) == 2:
            raise error
        written.append(path)
        write(frame, path, **options)

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fail_at_third)
    expected = InspectionError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        full_capture.to_parquet(tmp_path / "run")
    assert len(written) == 2
    assert list(tmp_path.iterdir()) == []
    if expected is InspectionError:
        assert "No space left on device" in str(caught.value)


def test_parquet_appears_in_one_step(
    tmp_path: Path, full_capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped just before the folder gets its name, nothing is there."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        full_capture.to_parquet(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["pandas", "pyarrow"])
def test_missing_packages_are_named(
    tmp_path: Path, full_capture: Capture, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InspectionError, match=rf"{package} is not installed.*install"):
        full_capture.to_parquet(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    if package == "pandas":
        with pytest.raises(InspectionError, match="pandas is not installed"):
            full_capture.to_frame("router")


def test_frames_that_cannot_be_given_are_refused(beam: Beam) -> None:
    bare = capture(beam, [1, 2, 3], hidden=False, layers=[0])
    for kind in ("hidden", "attention", "router", "kv"):
        with pytest.raises(InspectionError, match=rf"^{kind} was not captured; .*{kind}=True"):
            bare.to_frame(kind)  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match=r"no frame of kind 'gates'; use one of tokens, hid"):
        bare.to_frame("gates")  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match=r"holds no router choices"):
        router_load(bare)


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], r"the prompt is empty"),
        ("", r"the prompt is empty"),
        ("text", r"has no tokenizer"),
        ([1, 64], r"token id 64 at position 1"),
        ([1, -1], r"token id -1 at position 1"),
        ([1, 2.5], r"2.5 at position 1"),
        ([[1, 2], [3, 4]], r"one prompt is inspected at a time, not a list of 2"),
        (["a", "b", "c"], r"one prompt is inspected at a time, not a list of 3"),
        ([1] * 513, r"has 513 tokens.*context"),
        (7, r"must be text or a list of token ids, not 7"),
    ],
)
@pytest.mark.parametrize("look", [capture, logit_lens])
def test_wrong_prompts_get_one_sentence(
    beam: Beam, prompt: Any, sentence: str, look: Callable[..., Any]
) -> None:
    with pytest.raises(InspectionError, match=sentence) as caught:
        look(beam, prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"layers": [4]}, r"layer 4 does not exist; choose one of 0 … 3"),
        ({"attention": [0, -1]}, r"layer -1 does not exist"),
        ({"attention": 2}, r"attention takes a list, such as \[3\], not 2"),
        ({"layers": 1}, r"layers takes a list"),
    ],
)
def test_wrong_layers_get_one_sentence(beam: Beam, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InspectionError, match=sentence):
        capture(beam, [1, 2], **settings)


@pytest.mark.parametrize("top_k", [0, 65, -1, 2.0])
def test_a_wrong_top_k_is_refused(beam: Beam, top_k: Any) -> None:
    with pytest.raises(InspectionError, match="top_k"):
        logit_lens(beam, [1, 2], top_k=top_k)


def test_memory_is_bounded_before_anything_runs(
    beam: Beam, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [1] * 500
    one_map = 4 * 4 * 500 * 500  # float32, 4 heads
    logits = 4 * 500 * 64
    mask = 500 * 500
    streams = 4 * 5 * 500 * 48
    kv = 2 * 4 * 32 * (2 * 500 + 2 * 5)
    exactly = one_map + logits + mask
    options: dict[str, Any] = {"hidden": False, "router": False}
    capture(beam, prompt, attention=[1], max_bytes=exactly, **options)
    capture(beam, prompt, kv=True, max_bytes=kv + logits + mask, **options)
    monkeypatch.setattr(Beam, "forward", lambda *_: pytest.fail("the model ran"))
    for settings, most, advice in (
        ({"attention": [1], **options}, exactly - 1, r"name fewer layers \(attention=\[3\]\)"),
        ({"attention": True, **options}, 3 * one_map, r"attention maps alone .*raise max_bytes"),
        ({}, streams + logits + mask - 1, r"hidden states alone .*layers=\[3\]"),
        (options, logits + mask - 1, r"the mask alone .*shorten the prompt"),
        # Keys and values of two full layers whole, of two sliding ones the window of 5.
        ({"kv": True, **options}, kv + logits + mask - 1, "KV"),
        ({"kv": True, **options}, logits + mask, r"KV contents alone .*layers=\[3\]"),
    ):
        with pytest.raises(InspectionError, match=rf"inspecting 500 tokens would take .*{advice}"):
            capture(beam, prompt, max_bytes=most, **settings)
    with pytest.raises(InspectionError, match=r"inspecting 500 tokens would take"):
        logit_lens(beam, prompt, max_bytes=4 * logits - 1)


class _Ranks:
    """Two ranks as two threads: each waits for the other's tensor."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.shared, self.barrier = rank, shared, barrier

    def _all(self, x: Tensor) -> list[Tensor]:
        self.shared[self.rank] = x
        self.barrier.wait(timeout=60)
        both = list(self.shared)
        self.barrier.wait(timeout=60)
        return both

    def all_reduce(self, x: Tensor) -> Tensor:
        return sum(self._all(x), torch.zeros_like(x))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), -1)


def test_connected_ranks_capture_their_own_heads(features: Small, beam: Beam) -> None:
    shared: list[Any] = [None, None]
    barrier = threading.Barrier(2)

    def look(rank: int) -> Capture:
        part = workbench.load(features.folder, shard=Shard(rank=rank, world=2))
        part.connect(_Ranks(rank, shared, barrier))
        with workbench.intervene(part, ablate_layers=[2], force_routing={1: [0, 1, 2]}):
            return capture(part, features.tokens, attention=[1], kv=True)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(look, range(2))
    with workbench.intervene(beam, ablate_layers=[2], force_routing={1: [0, 1, 2]}):
        whole = capture(beam, features.tokens, attention=[1], kv=True)
    assert whole.hidden is not None
    for part in (first, second):
        assert part.hidden is not None
        assert_close(part.hidden, whole.hidden)
        assert_close(part.logits, whole.logits)
    assert_close(torch.cat((first.attention[1], second.attention[1])), whole.attention[1])
    assert_close(torch.cat((first.kv[3].k, second.kv[3].k), 1), whole.kv[3].k)


def test_one_rank_alone_is_refused(features: Small) -> None:
    rank = workbench.load(features.folder, shard=Shard(rank=1, world=2))
    with pytest.raises(InspectionError, match=r"rank 1 of 2 alone gives partial sums"):
        capture(rank, [1, 2, 3])


# --- the page --------------------------------------------------------------------------------


def test_the_documentations_examples_run(
    speaking: Beam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in one namespace, on a random model in the bundled one's place."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workbench, "load", lambda name: speaking)
    space: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)
    assert (tmp_path / "run" / "router.parquet").exists()
    assert hooks(speaking) == 0
