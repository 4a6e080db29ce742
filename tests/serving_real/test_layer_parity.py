"""A real engine's layers against ours, one by one: vLLM's CPU build with the workbench's Beam.

A process starts an engine, asks it for every comparison and prints them (``SCRIPT``); the tests
look at what it printed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from serving_real.server import ENVIRONMENT, FOLDER, TESTS
from workbench.serving.layers.layer_parity import LayerParity

LENGTH = 700  # more than two windows of 256
SCRIPT = """
import json, os, sys

def main():
    import vllm
    from workbench.errors import ServingError
    from workbench.serving.layers.engine_worker import EXTENSION
    from workbench.serving.layers.layer_parity import layer_parity
    folder, dtype, tp = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(sys.argv[4]) as file:
        asked = json.load(file)
    llm = vllm.LLM(
        folder, worker_extension_cls=EXTENSION, enforce_eager=True, dtype=dtype, seed=0,
        max_model_len=1024, max_num_batched_tokens=1024, max_num_seqs=4, tensor_parallel_size=tp,
        skip_tokenizer_init=True,
    )
    for one in asked:
        try:
            value = layer_parity(llm, one.pop("checkpoint"), **one).to_dict()
        except ServingError as error:
            value = {"error": str(error)}
        print("VALUE " + json.dumps(value, allow_nan=False), flush=True)
    del llm

if __name__ == "__main__":
    main()
"""


def answers(
    python: str, place: Path, dtype: str, tp: int, asked: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What an engine of its own says to each comparison."""
    (place / "script.py").write_text(SCRIPT, "utf-8")
    (place / "asked.json").write_text(json.dumps(asked), "utf-8")
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(TESTS)}
    environment["VLLM_CACHE_ROOT"] = str(place / "vllm-cache")
    words = [python, "script.py", str(FOLDER), dtype, str(tp), "asked.json"]
    with (place / "out.txt").open("wb") as out, (place / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            words, stdout=out, stderr=log, env=environment, cwd=place, start_new_session=True
        )
        try:
            code = process.wait(timeout=240)
        finally:  # workers of an engine that hangs as well
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = (place / "out.txt").read_text("utf-8", "replace")
    assert code == 0, (place / "log.txt").read_text("utf-8", "replace")[-3000:]
    return [json.loads(line[6:]) for line in said.splitlines() if line.startswith("VALUE ")]


def with_window(place: Path, window: int) -> Path:
    """beam-tiny by links, with another window in its configuration."""
    made = place / f"window-{window}"
    made.mkdir()
    (made / "model.safetensors").symlink_to(FOLDER / "model.safetensors")
    config = json.loads((FOLDER / "config.json").read_text("utf-8")) | {"sliding_window": window}
    (made / "config.json").write_text(json.dumps(config), "utf-8")
    return made


@pytest.fixture(scope="module")
def said(
    serving_python: str, tmp_path_factory: pytest.TempPathFactory, text_ids: list[int]
) -> list[dict[str, Any]]:
    """Of one engine in float32: every layer, wrong references, a prompt too long, once more."""
    place = tmp_path_factory.mktemp("parity")
    ids = text_ids[:LENGTH]
    every = {"checkpoint": str(FOLDER), "layers": list(range(9)), "prompt_token_ids": ids}
    asked = [
        dict(every),
        *(
            every | {"checkpoint": str(with_window(place, n)), "layers": [0, 2, 7], "head": False}
            for n in (255, 128)
        ),
        every | {"prompt_token_ids": text_ids[:1100]},
        every | {"layers": [1, 8]},
    ]
    return answers(serving_python, place, "float32", 1, asked)


def test_every_layer_and_the_head_agree(said: list[dict[str, Any]]) -> None:
    value = LayerParity.from_dict(said[0])
    assert len(value.layers) == 10
    assert value.tokens == LENGTH
    assert value.engine["layer_class"] == "BeamLayer"
    for each in value.layers:
        assert each.engine is not None
        assert each.yardstick is not None
        print(f"{each.name}: mean {each.engine.mean:.1e}, worst {each.engine.worst:.1e}")
        assert each.engine.worst < 1e-5
        assert each.yardstick.mean > 1e-3
        if each.router is not None:
            assert (each.router.source, each.router.flipped) == ("ids", 0)
    assert value.agrees


def test_another_window_is_called_different(said: list[dict[str, Any]]) -> None:
    value = LayerParity.from_dict(said[2])
    assert [each.verdict for each in value.layers] == ["differs", "agrees", "differs"]
    for layer in (0, 7):
        gap = value[layer].engine
        assert gap is not None
        assert gap.worst_token >= 128


def test_a_window_one_token_short_is_seen(said: list[dict[str, Any]]) -> None:
    """Less than bfloat16 rounds, and a thousand times what float32 does."""
    value = LayerParity.from_dict(said[1])
    print([(each.verdict, each.engine) for each in value.layers])
    assert [each.verdict == "agrees" for each in value.layers] == [False, True, False]
    for layer in (0, 7):
        gap = value[layer].engine
        assert gap is not None
        assert gap.worst > 1e-4
        assert gap.worst_token >= 255


def test_a_prompt_in_two_pieces_is_refused_and_leaves_no_trace(said: list[dict[str, Any]]) -> None:
    assert "has 1100 tokens and the engine takes 1023 in one piece" in said[3]["error"]
    first, again = LayerParity.from_dict(said[0]), LayerParity.from_dict(said[4])
    for layer in (1, 8):  # the prefix cache holds the prompt by now
        assert again[layer].verdict == "agrees"
        assert again[layer].tokens == first[layer].tokens


def test_two_ranks_in_bfloat16(serving_python: str, tmp_path: Path, text_ids: list[int]) -> None:
    """Workers in processes of their own: what they say passes as bytes, and both say the same."""
    asked = [
        {"checkpoint": str(FOLDER), "layers": [0, 2, 8], "prompt_token_ids": text_ids[:LENGTH]}
    ]
    value = LayerParity.from_dict(answers(serving_python, tmp_path, "bfloat16", 2, asked)[0])
    assert value.engine["tp"] == 2
    assert value.agrees
    for each in value.layers:
        print(f"{each.name}: {each.ratio} of ours")
        assert each.ratio is not None
        assert 0.7 < each.ratio < 1.4
        assert each.layer is None or each.rank_gap == 0
