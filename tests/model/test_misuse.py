"""Wrong calls of the model itself: one clear sentence each, and nothing computed on the way."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import workbench
from workbench.errors import ConfigError, PromptError
from workbench.model.beam import Beam
from workbench.model.config import BeamConfig
from workbench.model.parallel import Shard
from workbench.model.presets import resolve


@pytest.fixture(scope="module")
def beam() -> Beam:
    return workbench.load("beam-tiny", device="cpu", dtype=torch.float32)


IDS = torch.tensor([5, 6, 7])


@pytest.mark.parametrize(
    ("ids", "counts", "slots", "says"),
    [
        (IDS, [2], None, "must be 2 whole numbers"),
        (IDS.float(), [3], None, "must be 3 whole numbers"),
        (IDS[None], [3], None, "must be 3 whole numbers"),
        (IDS, [2, 1], [0, 0], "different ones from 0 to 1"),
        (IDS, [2, 1], [0, 2], "different ones from 0 to 1"),
        (IDS, [2, 1], [0, -1], "different ones from 0 to 1"),
        (IDS, [3], [0, 1], "a whole number of tokens for each slot"),
        (IDS, [4, -1], [0, 1], "a whole number of tokens for each slot"),
        (IDS[:0], [0, 0], [0, 1], "at least one in all"),
        (IDS[:0], [], [], "at least one in all"),
    ],
)
def test_a_pass_that_does_not_fit_together(
    beam: Beam, ids: torch.Tensor, counts: list[int], slots: list[int] | None, says: str
) -> None:
    cache = beam.new_cache(2)
    with pytest.raises(PromptError, match=says):
        beam.extend(cache, ids, counts, slots)
    assert cache.lengths == [0, 0]
    assert cache.capacity == 0


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.zeros(2049, dtype=torch.int64), "2049 tokens exceed the model's context of 2048"),
        (torch.zeros(0, dtype=torch.int64), "whole numbers"),
        (torch.zeros(3), "whole numbers"),
        (torch.zeros(1, 1, 3, dtype=torch.int64), "whole numbers"),
    ],
)
def test_whole_sequences_are_checked(beam: Beam, ids: torch.Tensor, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        beam.sequence_logits(ids)


@pytest.mark.parametrize("arguments", [{"slots": 0}, {"slots": -1}, {"rollback": -1}])
def test_caches_have_slots_and_room(beam: Beam, arguments: dict[str, int]) -> None:
    with pytest.raises(PromptError, match=next(iter(arguments))):
        beam.new_cache(**arguments)


def test_slots_that_do_not_exist(beam: Beam) -> None:
    cache = beam.new_cache(2)
    for slot in (-1, 2):
        with pytest.raises(PromptError, match=f"no slot {slot}"):
            cache.truncate(slot, 0)
        with pytest.raises(PromptError, match=f"no slot {slot}"):
            cache.contents(0, slot)


def test_a_rank_alone_computes_nothing() -> None:
    rank = workbench.load("beam-tiny", device="cpu", shard=Shard(rank=1, world=2))
    with pytest.raises(ConfigError, match="rank 1 of 2 alone"):
        rank.sequence_logits(IDS)
    with pytest.raises(ConfigError, match="rank 1 of 2 alone"):
        workbench.generate(rank, [5, 6], max_new_tokens=2)


def test_bytes_are_no_token_ids(beam: Beam) -> None:
    for prompt in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        wrong: Any = prompt
        with pytest.raises(PromptError, match="prompts must be"):
            workbench.generate(beam, wrong)


def test_a_window_beyond_the_context_takes_no_memory(beam: Beam) -> None:
    config = beam.config.replace(sliding_window=10**9, max_position_embeddings=512)
    with torch.device("meta"):
        cache = Beam(config).new_cache()
    assert cache.ring == 512 + 16
    assert cache.k[0].shape[1] == 512 + 16


HUGE = [10**9 + 1, 10**30, 10**400]


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("name", ["num_hidden_layers", "num_experts", "vocab_size", "head_dim"])
def test_absurd_counts_are_refused_at_once(name: str, value: int) -> None:
    data = resolve("beam-tiny").config.to_dict()
    if name in ("vocab_size", "head_dim") and value < 1 << 40:
        pytest.skip("large, but a number some model could have")
    begun = time.perf_counter()
    with pytest.raises(ConfigError, match=name):
        BeamConfig.from_dict({**data, name: value})
    with pytest.raises(ConfigError, match="num_hidden_layers|" + name):
        BeamConfig.from_dict({k: v for k, v in data.items() if "types" not in k} | {name: value})
    assert time.perf_counter() - begun < 0.5


@pytest.mark.parametrize("name", ["rms_norm_eps", "routed_scaling_factor", "rope_theta"])
def test_absurd_factors_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        resolve("beam-tiny").config.replace(**{name: 10**400})


def test_config_files_that_are_no_files_or_too_deep(tmp_path: Any) -> None:
    import os

    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        BeamConfig.from_json(tmp_path)
    deep = tmp_path / "deep.json"
    for text in ("[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"):
        deep.write_text(text)
        with pytest.raises(ConfigError, match=r"deep\.json"):
            BeamConfig.from_json(deep)
