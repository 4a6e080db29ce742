"""Bits per byte, against a model run one token at a time and a log-sum-exp in numpy."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.errors import TrainingError
from workbench.model.beam import Beam
from workbench.model.config import BeamConfig
from workbench.model.tokenizer import Tokenizer
from workbench.training import evaluate
from workbench.training.evaluate import bits_per_byte, counted_experts, evaluate_held_out
from workbench.training.settings import TrainingSettings

CONTEXT = 16
TEXTS = [
    "x = 1\n",
    "def f(naïve):\n    return '東京' + naïve\n",
    "",
    "for index in range(10):\n    print(index, end=' ')\n" * 4,  # several contexts long
    "import os",
]


@pytest.fixture(scope="module")
def beam(small_config: BeamConfig, small_tokenizer: Tokenizer) -> Beam:
    """Random weights, and a context so small that texts do not fit."""
    beam = Beam(small_config.replace(max_position_embeddings=CONTEXT, sliding_window=4))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in beam.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.1 if "norm" in name else 0.2))
            if "norm" in name:
                p.add_(1)
    beam.tokenizer = small_tokenizer
    return beam.eval()


def nats_one_by_one(beam: Beam, ids: list[int]) -> list[float]:
    """Cost of every token but the first, each from the window that first reaches it.

    Windows start every half context; a token is predicted from all that stands before it in the
    first window that holds it. Decoded token by token through the KV cache.
    """
    costs: dict[int, float] = {}
    for start in range(0, len(ids), CONTEXT // 2):
        cache = beam.new_cache()
        for place in range(start, min(start + CONTEXT, len(ids)) - 1):
            with torch.no_grad():
                hidden = beam.extend(cache, torch.tensor([ids[place]]), [1])
                logits = beam.logits(hidden)[0].double().numpy()
            largest = logits.max()
            whole = largest + np.log(np.exp(logits - largest).sum())
            costs.setdefault(place + 1, float(whole - logits[ids[place + 1]]))
    assert sorted(costs) == list(range(1, len(ids)))
    return [costs[i] for i in sorted(costs)]


@pytest.mark.parametrize("tokens_a_pass", [1, 40, 16384])
def test_bits_per_byte_against_decoding_token_by_token(beam: Beam, tokens_a_pass: int) -> None:
    assert beam.tokenizer is not None
    costs = [c for text in TEXTS for c in nats_one_by_one(beam, beam.tokenizer.encode(text))]
    size = sum(len(text.encode()) for text in TEXTS)
    told: list[int] = []
    result = bits_per_byte(beam, TEXTS, progress=told.append, tokens_a_pass=tokens_a_pass)
    assert max(len(beam.tokenizer.encode(text)) for text in TEXTS) > 4 * CONTEXT
    assert result["tokens"] == len(costs)
    assert result["bytes"] == size == sum(len(t) for t in TEXTS) + 6  # ï, ï, 東, 京
    assert result["bits_per_byte"] == pytest.approx(sum(costs) / math.log(2) / size, abs=6e-5)
    assert told == list(np.cumsum([len(text.encode()) for text in TEXTS]))


@pytest.mark.parametrize("context", [2, 3, 5, 16, 17])
def test_windows_score_every_token_once_with_half_a_context_before_it(context: int) -> None:
    for length in range(5 * context + 2):
        ids = list(range(100, 100 + length))
        scored: list[int] = []
        for window, first in evaluate._windows(ids, context):
            assert len(window) <= context
            start = window[0] - 100
            assert window == ids[start : start + len(window)]
            for place in range(first, len(window)):
                scored.append(start + place)
                assert place >= min(start + place, context // 2)
        assert scored == list(range(1, length)), f"{length} tokens"


def test_wrong_uses_are_named(beam: Beam, small_config: BeamConfig) -> None:
    for nothing in ([], [""]):
        with pytest.raises(TrainingError, match="no text to score; give"):
            bits_per_byte(beam, nothing)
    with pytest.raises(TrainingError, match=r"beam has no tokenizer\.json"):
        bits_per_byte(Beam(small_config), ["x"])
    assert beam.tokenizer is not None
    largest = max(beam.tokenizer.encode("import os"))
    small = Beam(small_config.replace(vocab_size=largest))
    small.tokenizer = beam.tokenizer
    with pytest.raises(
        TrainingError,
        match=rf"gives token {largest} and has 400 tokens, but .* vocab_size is {largest};",
    ):
        bits_per_byte(small, ["import os"])


def test_texts_are_read_from_files(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.py", tmp_path / "b.jsonl"
    plain.write_bytes("é\r\n".encode())
    lines.write_text('{"text": "one"}\n{"text": "two", "path": "p"}\n')
    assert [t.replace("\r\n", "\n") for t in evaluate.read_texts([plain, lines])] == [
        "é\n",
        "one",
        "two",
    ]
    wrong = {
        "a.txt": (b"\xff\xfe", "not UTF-8 text; convert"),
        "c.jsonl": (b'{"body": "x"}\n', "not JSON lines with a 'text'"),
        "d.jsonl": (b"[1]\n", "not JSON lines"),
        "e.jsonl": (b"{", "not JSON lines"),
        "f.jsonl": (b"[" * 100_000, "not JSON lines"),
        "g.jsonl": (b'{"text": ' + b"1" * 5_000 + b"}", "not JSON lines"),
        "h.jsonl": (b'{"text": 5}', "not JSON lines"),
    }
    for name, (content, message) in wrong.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TrainingError, match=rf"{name} is {message}"):
            list(evaluate.read_texts([tmp_path / name]))
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", tmp_path / "pipe", tmp_path):
        with pytest.raises(TrainingError, match=rf"{name} is not a regular file; write the text"):
            list(evaluate.read_texts([name]))
    with pytest.raises(TrainingError, match="none cannot be read"):
        list(evaluate.read_texts([tmp_path / "none"]))


def test_held_out_sets_are_scored_up_to_the_bytes_asked_for(
    beam: Beam, make_settings: Callable[..., TrainingSettings], tmp_path: Path
) -> None:
    def lines(*texts: str) -> str:
        return "".join(json.dumps({"text": text}) + "\n" for text in texts)

    (tmp_path / "heldout_code.jsonl").write_text(lines("a = 1\n" * 5, "b = 2\n", "c = 3\n"))
    (tmp_path / "heldout_prose.jsonl").write_text(lines("Some prose.\n"))
    settings = make_settings(corpus=str(tmp_path), evaluate_bytes=31)
    results = evaluate_held_out(beam, settings)
    assert list(results) == ["heldout_code", "heldout_prose"]
    shares = results["heldout_code"].pop("expert_share")
    assert results["heldout_code"] == bits_per_byte(beam, ["a = 1\n" * 5, "b = 2\n"])
    assert 0 <= shares["least"] < 1 < shares["most"]
    assert evaluate_held_out(beam, make_settings(corpus=str(tmp_path), evaluate_bytes=0)) == {}


def test_experts_are_counted_and_the_hooks_go(beam: Beam) -> None:
    routers = [beam.layers[layer].get_submodule("mlp.router") for layer in (1, 2)]
    ids = torch.randint(0, 400, (2, 12), generator=torch.Generator().manual_seed(4))
    seen: dict[int, list[int]] = {1: [], 2: []}
    handles = [
        router.register_forward_hook(
            lambda _m, _i, out, layer=layer: seen[layer].extend(out[0].flatten().tolist())
        )
        for layer, router in zip(seen, routers, strict=True)
    ]
    with torch.no_grad(), counted_experts(beam) as counts:
        beam.sequence_logits(ids)
        beam.sequence_logits(ids)
    for handle in handles:
        handle.remove()
    for layer, chosen in seen.items():
        assert len(chosen) == 2 * 24 * 2
        assert counts[layer].tolist() == [chosen.count(expert) for expert in range(8)]
    with pytest.raises(RuntimeError, match="stop"), counted_experts(beam):
        raise RuntimeError("stop")
    assert not any(router._forward_hooks for router in routers)
    table = {1: torch.tensor([0, 4, 4]), 2: torch.tensor([3, 1, 2])}
    assert evaluate._shares(table) == {"least": 0.0, "most": 1.5}
    assert evaluate._shares({}) == {}
