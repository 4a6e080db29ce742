"""The server under test, and what our own model says to the same prompts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench
from serving_real.server import COMPACT, FOLDER, PARSERS, SCRIPTED, RealServer

HELD_OUT = Path(__file__).parent.parent / "data" / "heldout_code.json"


@pytest.fixture(scope="session")
def serving_python() -> str:
    """A Python that has vLLM's CPU build and this workbench; skips where none is named."""
    named = os.environ.get("SERVING_PYTHON")
    if not named:
        pytest.skip("no server to test: make test-serving, or name a Python in SERVING_PYTHON")
    done = subprocess.run([named, "--version"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"SERVING_PYTHON={named} does not run: {done.stderr}")
    return named


@pytest.fixture(scope="session")
def beam_server(
    serving_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    """``beam-tiny`` in float32 with the beam parsers, plain decoding."""
    log = tmp_path_factory.mktemp("beam-server") / "log.txt"
    with RealServer(serving_python, FOLDER, log, (*PARSERS, COMPACT, SCRIPTED)) as server:
        yield server


@pytest.fixture(scope="session")
def beam() -> Any:
    """Our own model in float32, with as many threads as the cores that tests may use."""
    torch.set_num_threads(1)
    return workbench.load("beam-tiny")


@pytest.fixture(scope="session")
def text_ids(beam: Any) -> list[int]:
    """Python source that the model was not trained on, as one long row of ids."""
    prompts = json.loads(HELD_OUT.read_text("utf-8"))["prompts"]
    ids: list[int] = beam.tokenizer.encode("\n".join(prompts), bos=False)
    assert len(ids) >= 4000
    return ids
