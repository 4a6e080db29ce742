"""N-gram speculation on a real server: its counters are those of the algorithm, done by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import workbench
from serving_real.asking import complete, page
from serving_real.ngram import count, total
from serving_real.server import FOLDER, PARSERS, RealServer

K, LEAST, MOST = 4, 2, 4
SETTINGS = {
    "method": "ngram",
    "num_speculative_tokens": K,
    "prompt_lookup_min": LEAST,
    "prompt_lookup_max": MOST,
}
SPECULATIVE = f"--speculative-config={json.dumps(SETTINGS)}"
NEW = 48


@pytest.fixture(scope="module")
def ngram_server(
    serving_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    log = tmp_path_factory.mktemp("ngram-server") / "log.txt"
    with RealServer(serving_python, FOLDER, log, (*PARSERS, SPECULATIVE)) as server:
        yield server


def spec_counters(text: str) -> tuple[int, int, int, list[int]]:
    """(drafts, draft tokens, accepted, accepted by position)."""
    found: dict[str, float] = {}
    positions = [0] * K
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_per_pos_total"):
                positions[int(sample.labels["position"])] += int(sample.value)
            elif sample.name.startswith("vllm:spec_decode_"):
                found[sample.name] = found.get(sample.name, 0) + sample.value
    prefix = "vllm:spec_decode_num_"
    words = ("drafts_total", "draft_tokens_total", "accepted_tokens_total")
    drafts, tokens, accepted = (int(found[prefix + word]) for word in words)
    return drafts, tokens, accepted, positions


def test_counters_of_speculation(ngram_server: RealServer, beam: Any, text_ids: list[int]) -> None:
    prompts = [
        [beam.tokenizer.bos_id, *text_ids[at : at + 60 + at // 4]] for at in range(0, 900, 90)
    ]
    before = spec_counters(page(ngram_server.url))
    answers = [
        complete(ngram_server.url, prompt, max_tokens=NEW, ignore_eos=True) for prompt in prompts
    ]
    after = spec_counters(page(ngram_server.url))
    truth = workbench.generate(beam, prompts, max_new_tokens=NEW + K, stop_at_eos=False)
    for answer, generation in zip(answers, truth, strict=True):
        assert answer["choices"][0]["token_ids"] == list(generation.token_ids)[:NEW]
    wanted = total(
        [
            count(p, list(g.token_ids), new_tokens=NEW, least=LEAST, most=MOST, k=K)
            for p, g in zip(prompts, truth, strict=True)
        ]
    )
    assert wanted.accepted > 50  # source repeats itself: there is something to count
    grown = tuple(b - a for a, b in zip(before[:3], after[:3], strict=True))
    assert grown == (wanted.drafts, wanted.draft_tokens, wanted.accepted)
    assert [b - a for a, b in zip(before[3], after[3], strict=True)] == wanted.per_position
