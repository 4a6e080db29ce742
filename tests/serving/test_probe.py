"""The probe on a stand-in engine: what it records is what was fed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from serving.probe_drive import (
    DRAFT,
    VERIFY,
    drive,
    flush,
    kinds_of,
    make_runner,
    recorded,
    run_pass,
    scheduled,
)
from serving.probe_drive import ask as ask  # fixtures
from serving.probe_drive import stand_in as stand_in
from workbench.serving import probe
from workbench.spec.adaptive import allocate, budget_of, survival


def with_tokens(truth: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Passes that gave somebody a token; in them, the requests that got one."""
    found = []
    for seen in truth:
        parts = {r: part for r, part in seen["requests"].items() if part["tokens"]}
        if parts:
            found.append(seen | {"parts": parts})
    return found


@pytest.mark.parametrize(("lag", "seed"), [(0, 1), (1, 2), (3, 3)])
def test_the_recording_is_what_was_fed(
    ask: Callable[[Path], None], tmp_path: Path, lag: int, seed: int
) -> None:
    path = tmp_path / "run.jsonl"
    ask(path)
    runner = make_runner(lag=lag, seed=seed)
    drive(runner, 120, seed)
    run = recorded(path)
    fed = with_tokens(runner.truth)
    assert len(run.trace.steps) == len(run.passes) == len(fed) > 60
    assert (run.dropped, run.inconsistent, run.trace.skipped) == (0, 0, 0)
    assert run.ended == "the engine ended"
    names: dict[int, str] = {}
    given: set[str] = set()
    decided = mixed = 0
    for index, (step, passed, seen) in enumerate(
        zip(run.trace.steps, run.passes, fed, strict=True)
    ):
        assert step.index == index
        assert step.rows == seen["rows"]
        decoding = any(not part["prefilling"] for part in seen["parts"].values())
        assert step.phase == ("decode" if decoding else "prefill")
        mixed += decoding and any(part["prefilling"] for part in seen["parts"].values())
        assert passed.plain == sum(part["own"] for part in seen["requests"].values())
        assert passed.sampling == sum(part["samples"] for part in seen["requests"].values())
        assert passed.budget == seen["budget"]
        assert step.policy == ("vllm adaptive" if seen["budget"] is not None else "")
        if seen["budget"] is not None:
            decided += 1
            assert step.budget == seen["budget"] == int(np.argmax(step.objective))
        assert [len(seen["parts"])] == [len(step.requests)]
        for part, (name, truth) in zip(step.requests, seen["parts"].items(), strict=True):
            assert names.setdefault(part.request, name) == name
            assert part.position == truth["position"]
            assert list(part.drafted) == truth["drafted"]
            assert list(part.expected) == truth["expected"]  # to the last bit
            assert list(part.stale) == truth["stale"]
            assert part.admitted == truth["admitted"]
            assert list(part.token_ids) == truth["tokens"]
            assert part.accepted == len(truth["tokens"]) - 1
            assert list(part.kinds) == kinds_of(truth, name in given)
            assert part.finished is None  # nobody says so here
            given.add(name)
        assert 0 < step.seconds < 1
        assert step.seconds == pytest.approx(step.verify_seconds + step.draft_seconds, abs=1e-6)
    assert len(set(names.values())) == len(names) > 10
    assert decided > 40
    assert mixed > 10


def test_the_workbench_decides_the_same_from_the_recording(
    ask: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    ask(path)
    runner = make_runner(requests=12, drafts=7, seed=5, logits=60)
    drive(runner, 100, 5)
    run = recorded(path)
    assert run.tables is not None
    for size, table in enumerate(runner.adaptive_verification.cost_tables[1]):
        assert run.tables.verify_ms(size) == table
    for size, table in enumerate(runner.adaptive_verification.cost_tables[0]):
        assert run.tables.draft_ms(size) == table
    assert run.most_rows == 60
    trimmed = capped = 0
    for seen, step, passed in zip(
        with_tokens(runner.truth), run.trace.steps, run.passes, strict=True
    ):
        # Requests whose prompt goes on are no requests of a step, and have no drafts.
        assert all(r in seen["parts"] or not part["drafted"] for r, part in
                   seen["requests"].items())  # fmt: skip
        if passed.budget is None:
            continue
        drafted = np.array([len(part.drafted) for part in step.requests])
        stale, live = (np.zeros((len(drafted), 7)) for _ in range(2))
        for row, part in enumerate(step.requests):
            stale[row, : drafted[row]], live[row, : drafted[row]] = part.stale, part.expected
        # What budget_of wants of requests are their numbers alone; those without a token count too.
        others = len(seen["requests"]) - len(drafted)
        pad = np.zeros((others, 7))
        budget, objective = budget_of(
            survival(
                np.concatenate((stale, pad)), np.concatenate((drafted, [0] * others)).astype(int)
            ),
            np.concatenate((drafted, [0] * others)).astype(int),
            np.arange(len(seen["requests"])) < passed.sampling,
            np.array([passed.plain] + [0] * (len(seen["requests"]) - 1)),
            run.tables,
            run.most_rows,
        )
        assert budget == passed.budget
        assert objective == pytest.approx(np.array(step.objective), rel=1e-11)
        admitted = allocate(survival(live, drafted), drafted, budget)
        assert admitted.tolist() == [part.admitted for part in step.requests]
        trimmed += budget < drafted.sum()
        capped += len(objective) - 1 < drafted.sum()
    assert trimmed > 20
    assert capped > 5


def test_coefficients_and_costs_are_the_engines(
    ask: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    ask(path)
    runner = make_runner(seed=4)
    drive(runner, 60, 4)
    run = recorded(path)
    fits = [runner.truth[0]["fit"]]
    fits += [seen["fit"] for n, seen in enumerate(runner.truth, 1) if n % 5 == 0]
    assert [[f.slope, *f.intercepts] for f in run.coefficients] == fits
    assert [f.step for f in run.coefficients] == [1, *range(5, len(runner.truth) + 1, 5)]
    assert run.tables is not None
    assert run.tables.draft == tuple((n, ms) for n, ms in DRAFT)
    assert run.tables.verify == tuple((n, ms) for n, ms in VERIFY)
    assert run.tables.captured == 128
    head = run.trace.header
    assert (head["model"], head["drafter"], head["speculative_tokens"]) == (
        "a-model", "a-drafter", 5,
    )  # fmt: skip
    assert head["versions"]["vllm"] == "0.33.0"
    assert head["versions"]["torch"] == torch.__version__
    assert head["engine"]["max_num_seqs"] == 8
    assert head["engine"]["eos_token_id"] == 1


def test_without_adaptive_verification_all_drafts_are_admitted(
    ask: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    ask(path)
    runner = make_runner(adaptive=False, seed=6)
    drive(runner, 60, 6)
    run = recorded(path)
    fed = with_tokens(runner.truth)
    assert run.tables is None
    assert run.trace.header["policy"] == ""
    assert len(run.trace.steps) == len(fed)
    events = accepted = 0
    for step, seen in zip(run.trace.steps, fed, strict=True):
        assert step.policy == ""
        assert step.objective == ()
        for part, truth in zip(step.requests, seen["parts"].values(), strict=True):
            assert list(part.drafted) == truth["drafted"]
            assert part.admitted == len(part.drafted)
            assert part.expected == part.stale == ()
            events += bool(truth["drafted"])
            accepted += len(truth["tokens"]) - 1
    figures = run.trace.acceptance()
    assert (figures.events, figures.accepted) == (events, accepted)


def test_a_preempted_request_keeps_its_number(ask: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    ask(path)
    runner = make_runner()
    run_pass(runner, scheduled({"a": 5}, new=[("a", 5)]))
    run_pass(runner, scheduled({"b": 4}, new=[("b", 4)], finished={"a"}))
    run_pass(runner, scheduled({"a": 6}, new=[("a", 6)]))
    flush(runner)
    first, other, again = (step.requests[0] for step in recorded(path).trace.steps)
    assert (first.request, other.request, again.request) == (0, 1, 0)
    assert (first.kinds, other.kinds, again.kinds) == (("first",), ("first",), ("plain",))


def test_a_pass_that_the_engine_gives_up_is_no_step(
    ask: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    ask(path)
    runner = make_runner()
    run_pass(runner, scheduled({"a": 5}, new=[("a", 5)]))
    runner.execute_model(scheduled({"a": 4}, {"a": [-1] * 3}))
    runner.execute_model_state = None
    assert runner.sample_tokens(None) is None
    runner.execute_model(scheduled({"a": 3}, {"a": [-1] * 2}))  # and begun, but never sampled
    run_pass(runner, scheduled({"a": 6}, {"a": [-1] * 5}))
    runner.execute_model(None, dummy_run=True)
    runner.execute_model(None, None, True)
    flush(runner)
    run = recorded(path)
    assert [p.number for p in run.passes] == [0, 3]
    assert len(run.trace.steps[1].requests[0].drafted) == 5


def test_tables_that_were_made_before_the_probe_are_the_managers(
    ask: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    ask(path)
    from vllm.v1.worker.gpu import model_runner  # noqa: F401

    made = probe.active()
    assert made is not None
    made.pause()
    runner = make_runner(seed=5)
    made.resume()
    drive(runner, 60, 5)
    run = recorded(path)
    assert run.tables is not None
    assert run.tables.captured == 128
    by_requests, by_tokens = runner.adaptive_verification.cost_tables
    for size in range(1, len(by_requests)):
        assert run.tables.draft_ms(size) == pytest.approx(by_requests[size], rel=1e-9)
    for size in range(1, 1000):
        assert run.tables.verify_ms(size) == pytest.approx(by_tokens[size], rel=1e-9)
    assert len(run.tables.verify) < 20
    decided = [s for s in run.trace.steps if s.policy]
    assert len(decided) > 20
    assert all(int(np.argmax(s.objective)) == s.budget for s in decided)


def test_tables_made_after_the_first_pass_and_passes_at_start_up(
    ask: Callable[[Path], None], tmp_path: Path
) -> None:
    """As vLLM starts: its own requests without the manager, then the tables, then users."""
    path = tmp_path / "run.jsonl"
    ask(path)
    runner = make_runner(seed=5)
    manager, runner.adaptive_verification = runner.adaptive_verification, None
    warm = "_warmup_0_"
    run_pass(runner, scheduled({warm: 5}, new=[(warm, 5)]))
    run_pass(runner, scheduled({warm: 4}, {warm: [-1] * 3}))
    runner.adaptive_verification = manager
    runner.execute_model(scheduled({}, finished={warm}))
    run_pass(runner, scheduled({"a": 5}, new=[("a", 5)]))
    manager.set_cost_curves(DRAFT, [[1, 2.0], [128, 9.0]])
    run_pass(runner, scheduled({"a": 4}, {"a": [-1] * 3}))
    flush(runner)
    run = recorded(path)
    assert run.trace.header["policy"] == "vllm adaptive"
    assert [len(s.requests[0].drafted) for s in run.trace.steps] == [0, 3]
    assert run.tables is not None
    assert run.tables.verify == ((1, 2.0), (128, 9.0))
    assert run.trace.steps[1].objective


class New(tuple[str, int]):
    """A new request as the engine's scheduler tells it: with its prompt and its settings."""

    def __new__(cls, name: str, length: int, most: int | None, stops: list[int]) -> New:
        made = super().__new__(cls, (name, length))
        made.req_id, made.prompt_token_ids = name, [7] * length
        made.sampling_params = SimpleNamespace(
            max_tokens=most, stop_token_ids=stops, eos_token_id=1
        )
        return made

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SimpleNamespace


def test_what_the_engine_throws_away_is_no_request_of_a_step(
    ask: Callable[[Path], None], tmp_path: Path
) -> None:
    """A request that has reached its limit runs on for a pass or two beside one that goes on."""
    path = tmp_path / "run.jsonl"
    ask(path)
    runner = make_runner(seed=7)
    new = [New("a", 5, 1, []), New("b", 6, 1000, []), New("c", 4, 1000, list(range(2, 1000)))]
    run_pass(runner, scheduled({"a": 5, "b": 6, "c": 4}, new=new))
    for _ in range(3):
        run_pass(runner, scheduled(dict.fromkeys("abc", 4), {n: [-1] * 3 for n in "abc"}))
    # Another request of the same name is one that counts.
    again = [New("a", 5, 1000, [])]
    run_pass(runner, scheduled({"a": 5}, new=again, finished={"a", "c"}))
    run_pass(runner, scheduled({"a": 4}, {"a": [-1] * 3}))
    flush(runner)
    run = recorded(path)
    seen = [[r.request for r in s.requests] for s in run.trace.steps]
    assert len(seen) == 6
    assert seen[0] == [0, 1, 2]  # in the engine's order: c, a, b
    assert seen[1:4] == [[2]] * 3  # a had its one token, c its stop token
    assert seen[4] == seen[5] == [3]
    truth = [t["requests"]["b"] for t in runner.truth[1:4]]
    figures = run.trace.acceptance()
    counted = [*truth, runner.truth[5]["requests"]["a"]]
    assert (figures.events, figures.accepted) == (4, sum(len(t["tokens"]) - 1 for t in counted))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    discarded = [line["engine"].get("discarded", 0) for line in lines if "index" in line]
    assert discarded == [0, 2, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("/srv/models/beam-tiny", "beam-tiny"),
        ("/srv/models/beam-tiny/", "beam-tiny"),
        ("~/beam-tiny/dflash2", "dflash2"),
        ("./beam-tiny", "beam-tiny"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("a-model", "a-model"),
    ],
)
def test_a_header_names_models_and_no_folders_of_a_machine(
    ask: Callable[[Path], None], tmp_path: Path, given: str, name: str
) -> None:
    ask(tmp_path / "run.jsonl")
    runner = make_runner()
    runner.vllm_config.model_config.model = given
    runner.vllm_config.speculative_config.model = given
    run_pass(runner, scheduled({"a": 5}, new=[("a", 5)]))
    flush(runner)
    head = recorded(tmp_path / "run.jsonl").trace.header
    assert (head["model"], head["drafter"]) == (name, name)
