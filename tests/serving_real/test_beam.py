"""``beam-tiny`` on a real server computes what our own model computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import workbench
from serving_real.asking import RefusedError, ask, complete, page
from serving_real.server import RealServer

# Around the window of 256 tokens, the chunk of 512 and twice that, and near the whole context.
LENGTHS = (1, 2, 17, 255, 256, 257, 300, 511, 512, 513, 777, 1024, 1500, 2000)
CLOSE = 1e-4


def counters(text: str) -> dict[str, float]:
    """The page's samples of the engine summed over labels, but for one that is told apart."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                reason = sample.labels.get("finished_reason")
                name = sample.name if reason is None else f"{sample.name}:{reason}"
                found[name] = found.get(name, 0.0) + sample.value
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_log_probabilities(
    beam_server: RealServer, beam: Any, text_ids: list[int], length: int
) -> None:
    ids = [beam.tokenizer.bos_id, *text_ids[: length - 1]]
    answer = complete(beam_server.url, ids, max_tokens=1, prompt_logprobs=0)
    said = answer["choices"][0]["prompt_logprobs"]
    assert said[0] is None
    got = torch.tensor([row[str(i)]["logprob"] for row, i in zip(said[1:], ids[1:], strict=True)])
    with torch.inference_mode():
        ours = beam.sequence_logits(torch.tensor(ids)).double().log_softmax(-1)
    wanted = ours[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    worst = float((got.double() - wanted).abs().max()) if length > 1 else 0.0
    print(f"{length} tokens: largest difference {worst:.1e}")
    assert worst < CLOSE


def test_greedy_tokens_of_many_prompts_at_once(
    beam_server: RealServer, beam: Any, text_ids: list[int]
) -> None:
    """Forty prompts of 3 to 1400 tokens, eight at a time: batches, chunks, windows left behind."""
    prompts = [
        [beam.tokenizer.bos_id, *text_ids[at * 90 : at * 90 + 3 + at * at * 9 // 10]]
        for at in range(40)
    ]
    assert max(map(len, prompts)) > 1300
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: complete(beam_server.url, p, max_tokens=40), prompts))
    ours = workbench.generate(beam, prompts, max_new_tokens=40)
    for prompt, answer, generation in zip(prompts, answers, ours, strict=True):
        choice = answer["choices"][0]
        assert choice["token_ids"] == list(generation.token_ids), len(prompt)
        assert choice["finish_reason"] == ("stop" if generation.finish == "eos" else "length")


def test_counters_are_those_of_the_requests(
    beam_server: RealServer, beam: Any, text_ids: list[int]
) -> None:
    before = counters(page(beam_server.url))
    sent = [(20, 5), (300, 17), (40, 1), (7, 30)]
    used = [
        complete(beam_server.url, text_ids[:prompt], max_tokens=new, ignore_eos=True)["usage"]
        for prompt, new in sent
    ]
    assert [(u["prompt_tokens"], u["completion_tokens"]) for u in used] == sent
    after = counters(page(beam_server.url))
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown["vllm:prompt_tokens_total"] == sum(prompt for prompt, _ in sent)
    assert grown["vllm:generation_tokens_total"] == sum(new for _, new in sent)
    assert grown["vllm:request_success_total:length"] == len(sent)
    assert grown["vllm:request_success_total:stop"] == 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


def test_the_engine_says_what_it_serves(beam_server: RealServer) -> None:
    log = beam_server.log.read_text("utf-8", "replace")
    assert "BeamForCausalLM" in log
    with pytest.raises(
        RefusedError, match="400"
    ):  # beyond the context: refused, and the server lives
        ask(beam_server.url, "/v1/completions", {"model": "beam-tiny", "prompt": [5] * 2100})
    assert beam_server.ready()
