"""What ``bench`` says of a target and a drafter whose every token is known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench
from spec.cycle import accepted_runs, cycle_ids, make, written
from spec.planted import small_drafter, small_target
from workbench.errors import DraftError, PromptError
from workbench.model.beam import Beam
from workbench.spec import bench as module
from workbench.spec import bench_runs, loop
from workbench.spec.bench import bench
from workbench.spec.costs import costs
from workbench.spec.drafter import Drafter
from workbench.spec.drafter_checkpoint import load_drafter
from workbench.spec.verify import Verdict

PROMPT = [40, 41, 42]
TOKENS = 32
RUNS = accepted_runs(TOKENS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Beam, Drafter]:
    target, drafter = make(tmp_path_factory.mktemp("cycle"))
    beam = workbench.load(target)
    return beam, load_drafter(beam, drafter)


@pytest.fixture(autouse=True)
def quick(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """No time for warming up, few rounds, one thread, cost tables kept for these tests alone."""
    folder = tmp_path_factory.getbasetemp() / "bench-cache"
    monkeypatch.setenv("BEAM_WORKBENCH_CACHE", str(folder))
    monkeypatch.setattr(module, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(module, "COST_ROUNDS", 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_one_pair_is_what_was_decoded(pair: tuple[Beam, Drafter]) -> None:
    result = bench(*pair, [PROMPT], max_new_tokens=TOKENS, rounds=1)
    assert (result.pairs, result.prompts, result.concurrency) == (1, 1, 1)
    assert result.acceptance.length_pooled == pytest.approx(1 + sum(RUNS) / len(RUNS))
    # Not timed: the prefill's token, and what the first decode step gives.
    assert result.none.tokens == TOKENS - 2
    assert result.fixed.tokens == TOKENS - 1 - (RUNS[0] + 1)
    for policy in (result.none, result.fixed, result.adaptive):
        assert policy.runs == 1
        assert policy.tokens_per_second == pytest.approx(policy.tokens / policy.seconds)
        assert policy.low == policy.high == policy.tokens_per_second
        assert policy.tpot_p50_ms == pytest.approx(1e3 / policy.tokens_per_second)
    assert result.speedup == pytest.approx(
        result.fixed.tokens_per_second / result.none.tokens_per_second
    )
    assert result.adaptive_gain == pytest.approx(
        result.adaptive.tokens_per_second / result.fixed.tokens_per_second
    )
    assert 0 < result.decide_share < 1
    assert "measured here" in result.cost_table
    assert (result.compared, result.identical, result.differences) == (1, 1, ())
    assert sorted(result.target_ms) == [1, 2, 4, 8]
    assert result.draft_ms is not None
    assert result.draft_ms > 0
    assert not result.interrupted
    # 32 tokens of a cycle of five: the first 8-gram is new, and so are the four behind it.
    assert result.repeated_share == pytest.approx((TOKENS - 5) / TOKENS)


def test_the_document_has_the_contracts_keys(pair: tuple[Beam, Drafter]) -> None:
    result = bench(*pair, [PROMPT], max_new_tokens=TOKENS, rounds=1, speculative_tokens=5)
    value = result.to_dict()
    assert value["speculative_tokens"] == 5
    assert value["acceptance_length"] == result.acceptance.length_pooled
    assert set(value["target_ms"]) == {"1", "2", "4", "6", "8"}, "a block has six rows"
    for name in ("speedup", "draft_ms", "hardware", "versions", "date", "threads"):
        assert value[name]
    assert set(value["policies"]) == {"none", "fixed", "adaptive"}
    assert value["adaptive_acceptance_length"] == result.adaptive_acceptance.length_pooled
    for policy in value["policies"].values():
        assert {"tokens_per_second", "tpot_p50_ms", "tpot_p99_ms"} <= set(policy)


def spied(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> list[str]:
    """Note every run that is timed, and tell ``act`` its number before it begins."""
    seen: list[str] = []
    real = bench_runs.decode

    def decode(beam: Beam, drafter: Drafter | None, prompts: Any, **options: Any) -> Any:
        if options["slots"] == len(prompts) and options["max_new_tokens"] == TOKENS:
            act(len(seen))
            deciding = "adaptive" if options.get("policy") else "fixed"
            seen.append("none" if drafter is None else deciding)
        return real(beam, drafter, prompts, **options)

    monkeypatch.setattr(bench_runs, "decode", decode)
    return seen


def test_the_three_take_turns(pair: tuple[Beam, Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(monkeypatch, lambda number: None)
    told: list[tuple[int, int, str]] = []
    result = bench(
        *pair, [PROMPT, [50]], max_new_tokens=TOKENS, rounds=2, progress=lambda *a: told.append(a)
    )
    # Each is first once in three, and the order is turned round every three.
    n, f, a = "none", "fixed", "adaptive"
    assert seen == [n, f, a, f, a, n, f, a, n, a, n, f]
    assert result.pairs == 4
    assert [done for done, _, _ in told] == [0, 1, 2, 3, 4, 5]
    assert {of for _, of, _ in told} == {6}


def test_every_order_comes_up(pair: tuple[Beam, Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(monkeypatch, lambda number: None)
    bench(*pair, [PROMPT, [50]], max_new_tokens=TOKENS, rounds=5)
    orders = {tuple(seen[i : i + 3]) for i in range(0, len(seen), 3)}
    assert len(orders) == 6


def test_prompts_are_taken_together_and_fill_up(pair: tuple[Beam, Drafter]) -> None:
    result = bench(*pair, [PROMPT, [50], [51]], max_new_tokens=TOKENS, rounds=1, concurrency=2)
    assert (result.pairs, result.compared, result.identical) == (2, 3, 3)
    assert result.acceptance.requests == 4, "the first prompt again beside the third"
    assert result.fixed.tokens == 4 * (TOKENS - 1 - (RUNS[0] + 1))
    assert result.none.tokens == 4 * (TOKENS - 2)


def test_an_output_that_differs_is_named(
    pair: tuple[Beam, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept_all(logits: torch.Tensor, drafts: torch.Tensor, admitted: torch.Tensor) -> Verdict:
        at = torch.arange(len(admitted))
        return Verdict(accepted=admitted.clone(), token=logits[at, admitted].argmax(-1))

    monkeypatch.setattr(loop, "verify_greedy", accept_all)
    result = bench(*pair, [PROMPT], max_new_tokens=TOKENS, rounds=2)
    assert (result.compared, result.identical) == (1, 0)
    (found,) = result.differences
    ids = cycle_ids()
    # The drafter knows the cycle up to its end, then proposes the third token for the first.
    assert (found.prompt, found.way, found.index) == (0, "fixed", 5)
    assert (found.plain, found.speculative) == (written(6)[5], ids[2])
    # A one-hot stream of 64 dimensions is normed to 8 but for the norm's epsilon, the head's weight
    # is 3, the cap 30, and every other logit 0.
    assert found.margin == pytest.approx(30 * math.tanh(8 * 3 / 30), abs=0.01)


def interrupt_at(number: int) -> Callable[[int], None]:
    def act(run: int) -> None:
        if run == number:
            raise KeyboardInterrupt

    return act


def test_ctrl_c_keeps_the_pairs_that_are_whole(
    pair: tuple[Beam, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    spied(monkeypatch, interrupt_at(5))
    result = bench(*pair, [PROMPT, [50]], max_new_tokens=TOKENS, rounds=1)
    assert (result.interrupted, result.pairs, result.compared) == (True, 1, 1)
    assert (result.target_ms, result.draft_ms) == ({}, None)
    assert result.to_dict()["target_ms"] == {}


def test_ctrl_c_before_the_first_pair_has_nothing_to_say(
    pair: tuple[Beam, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    spied(monkeypatch, interrupt_at(2))
    with pytest.raises(KeyboardInterrupt):
        bench(*pair, [PROMPT, [50]], max_new_tokens=TOKENS, rounds=1)


def test_costs_are_those_of_their_own_calls(
    pair: tuple[Beam, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    beam, drafter = pair
    real = beam.logits
    seen: list[int] = []

    def slow(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        time.sleep(0.2 if len(hidden) == 2 * 4 else 0)
        return real(hidden)

    monkeypatch.setattr(beam, "logits", slow)
    target_ms, draft_ms = costs(
        beam, drafter, [PROMPT], 7, context=40, batch=2, rounds=3, warm_seconds=0
    )
    assert sorted(target_ms) == [1, 2, 4, 8]
    assert target_ms[4] > 200
    assert max(target_ms[1], target_ms[2], target_ms[8], draft_ms) < 200
    assert set(seen) == {2, 4, 8, 16}, "two sequences, each with so many rows"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_new_tokens": 8}, DraftError, "max_new_tokens"),
        ({"rounds": 0}, DraftError, "rounds"),
        ({"concurrency": True}, DraftError, "concurrency"),
        ({"speculative_tokens": 64}, DraftError, "speculative_tokens"),
        ({"prompts": []}, PromptError, "empty"),
        ({"prompts": [[5000]]}, PromptError, "vocabulary"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    pair: tuple[Beam, Drafter], options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        bench(*pair, **({"prompts": [PROMPT]} | options))


def test_a_model_without_room_for_a_context_is_refused(tmp_path: Path) -> None:
    target = small_target(tmp_path, max_position_embeddings=9)
    with pytest.raises(DraftError, match="holds 9 tokens; bench a larger model, or fewer drafts"):
        bench(target, small_drafter(target), [[1, 2]], max_new_tokens=16)


def test_a_prompt_without_room_to_time_is_refused(pair: tuple[Beam, Drafter]) -> None:
    limit = pair[0].config.max_position_embeddings
    with pytest.raises(DraftError, match="long enough"):
        bench(*pair, [[40] * (limit - 2)], rounds=1)


def test_the_bundled_prompts_go_on() -> None:
    """They end within a line: behind a line end the bundled model ends the text at once."""
    from workbench.spec.bench_prompts import PROMPTS

    beam = workbench.load("beam-tiny")
    written = workbench.generate(beam, list(PROMPTS), max_new_tokens=24)
    assert len(PROMPTS) >= 8
    assert all(g.new_tokens == 24 for g in written)
    for prompt in PROMPTS:
        assert not prompt.endswith("\n")
