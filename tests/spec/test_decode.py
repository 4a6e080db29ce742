"""The decode loop: lossless whatever is drafted, and its Steps say what happened."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench
from spec.planted import plant, small_drafter, small_target
from workbench.errors import DraftError, PromptError, WorkbenchError
from workbench.model.beam import Beam
from workbench.model.sampling import Sampling
from workbench.spec import loop
from workbench.spec.adaptive import Adaptive
from workbench.spec.cost_table import CostTable
from workbench.spec.decode import decode
from workbench.spec.drafter import Drafter
from workbench.spec.sequences import Running
from workbench.spec.step import Step

# A row of the target costs so much beside a step that only likely drafts are worth it.
STEEP = CostTable(draft=((1, 0.1), (8192, 400.0)), verify=((1, 1.0), (32768, 8000.0)))
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], [7], [3, 3, 2, 1], [9, 8]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Beam:
    return small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Beam) -> Drafter:
    return small_drafter(target)


def plain(target: Beam, prompts: list[list[int]], n: int, **more: Any) -> list[tuple[int, ...]]:
    """What the loop without drafts of ``model/generate.py`` writes."""
    return [g.token_ids for g in workbench.generate(target, prompts, max_new_tokens=n, **more)]


def ids_of(run: loop.Decoding) -> list[tuple[int, ...]]:
    return [g.token_ids for g in run.generations.values()]


def true_until(truth: list[tuple[int, ...]], wrong: int) -> Any:
    """Drafts that are right up to slot ``wrong`` and wrong there, and right behind it."""

    def plan(running: Running, n: int) -> list[int]:
        ahead = truth[running.request][len(running.ids) :]
        drafts = [*ahead, *[0] * n][:n]
        if wrong < n:
            drafts[wrong] = (drafts[wrong] + 1) % 12
        return drafts

    return plan


@pytest.mark.parametrize("wrong", [0, 1, 2, 3, 4])
def test_greedy_is_plain_decoding_and_counts_what_was_planted(
    target: Beam, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    truth = plain(target, PROMPTS, 60)
    holder = plant(monkeypatch, true_until(truth, wrong))
    run = holder["run"] = decode(target, drafter, PROMPTS, max_new_tokens=21)
    steps = list(run)
    assert ids_of(run) == [ids[:21] for ids in truth]
    assert [step.index for step in steps] == list(range(len(steps)))
    for step in steps[1:]:
        for part in step.requests:
            assert part.admitted == min(4, 21 - (part.position - len(PROMPTS[part.request])) - 1)
            assert part.accepted == min(wrong, part.admitted)
            last = "corrected" if part.accepted < part.admitted else "bonus"
            if part.admitted == 0:
                last = "plain"
            assert part.kinds == ("accepted",) * part.accepted + (last,)
            whole = [*PROMPTS[part.request], *truth[part.request]]
            assert list(part.token_ids) == whole[part.position :][: part.accepted + 1]
    if wrong == 4:  # 20 tokens after the first are exactly four whole blocks
        assert len(steps) == 5
        assert all(part.kinds[-1] == "bonus" for step in steps[1:] for part in step.requests)


def test_every_real_draft_is_judged_as_plain_decoding_goes_on(
    target: Beam, drafter: Drafter
) -> None:
    truth = plain(target, PROMPTS, 40)
    run = decode(target, drafter, PROMPTS, max_new_tokens=40, detail=True)
    accepted = 0
    for step in run:
        for part in step.requests:
            ahead = truth[part.request][part.position - len(PROMPTS[part.request]) :]
            right = 0
            while right < part.admitted and part.drafted[right] == ahead[right]:
                right += 1
            assert part.accepted == right
            accepted += right
            for slot, token in enumerate(part.drafted):
                at = part.candidates[slot].index(token)
                assert part.scores[slot][at] == max(part.scores[slot])  # the walk is greedy
                chance = torch.tensor(part.scores[slot]).softmax(-1)[at]
                assert part.confidences[slot] == pytest.approx(float(chance), rel=1e-5)
                assert list(part.unary[slot]) == sorted(part.unary[slot], reverse=True)
    assert ids_of(run) == truth
    assert accepted > 0  # else the test has seen refused drafts only


@pytest.mark.parametrize("drafts", [1, 2, 6, 11])
def test_any_number_of_drafts_is_lossless(target: Beam, drafter: Drafter, drafts: int) -> None:
    run = decode(target, drafter, PROMPTS, max_new_tokens=30, speculative_tokens=drafts)
    steps = list(run)
    assert ids_of(run) == plain(target, PROMPTS, 30)
    assert {len(p.drafted) for s in steps for p in s.requests} <= {0, drafts}


def test_without_a_drafter_every_step_gives_one_plain_token(target: Beam) -> None:
    run = decode(target, None, PROMPTS, max_new_tokens=7)
    steps = list(run)
    assert [s.phase for s in steps] == ["prefill"] + ["decode"] * 6
    assert {p.kinds for s in steps[1:] for p in s.requests} == {("plain",)}
    assert all(s.draft_seconds == 0 and s.rows == 5 for s in steps[1:])
    assert ids_of(run) == plain(target, PROMPTS, 7)


def test_more_prompts_than_slots_wait_and_lose_nothing(target: Beam, drafter: Drafter) -> None:
    run = decode(target, drafter, PROMPTS * 3, max_new_tokens=19, slots=2, prefill_chunk=4)
    width = [len(step.requests) for step in run]
    assert max(width) == 2
    assert ids_of(run) == plain(target, PROMPTS, 19) * 3


def test_join_and_leave_between_steps(target: Beam, drafter: Drafter) -> None:
    truth = plain(target, PROMPTS, 40)
    run = decode(target, drafter, PROMPTS[:3], max_new_tokens=40, slots=4)
    for _ in range(4):
        next(run)
    run.leave(0)
    with pytest.raises(DraftError, match="request 0 is not decoding"):
        run.leave(0)
    number = run.join(PROMPTS[3], max_new_tokens=12)
    assert number == 3
    assert run.requests == (2, 1, 3)  # the last took the slot of the one that left
    for _ in run:
        pass
    assert run.join(PROMPTS[4]) == 4  # a run that is through goes on with who joins
    for _ in run:
        pass
    got = run.generations
    assert [got[n].token_ids for n in (1, 2)] == truth[1:3]
    assert got[3].token_ids == truth[3][:12]
    assert got[4].token_ids == truth[4]
    left = got[0]
    assert left.finish is None
    assert left.token_ids == truth[0][: left.new_tokens]
    run.forget(0)
    assert 0 not in run.generations
    assert run.join([1]) == 5  # numbers are not used again


def test_a_stop_token_within_a_block_cuts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = small_target(tmp_path / "free")
    truth = plain(free, PROMPTS[:1], 40, stop_at_eos=False)
    stop = next(t for i, t in enumerate(truth[0]) if i >= 3 and t not in truth[0][:i])
    at = truth[0].index(stop)
    target = small_target(tmp_path / "stopping", eos_token_id=stop)
    holder = plant(monkeypatch, true_until(truth, 99))
    run = holder["run"] = decode(target, small_drafter(target), PROMPTS[0], max_new_tokens=40)
    steps = list(run)
    assert ids_of(run) == [truth[0][: at + 1]]
    last = steps[-1].requests[0]
    assert last.finished == "eos"
    assert last.accepted == 4  # the verdict stands; what came behind the stop token is cut
    assert last.cut == 5 - len(last.token_ids)
    assert run.generations[0].finish == "eos"
    # and where it is not asked to stop, it goes on
    holder["run"] = decode(
        target, small_drafter(target), PROMPTS[0], max_new_tokens=40, stop_at_eos=False
    )
    assert [*holder["run"]][-1].requests[0].finished == "length"


@pytest.mark.parametrize("room", [1, 2, 3, 9])
def test_a_full_context_ends_a_sequence_at_its_last_position(
    target: Beam, drafter: Drafter, room: int
) -> None:
    limit = target.config.max_position_embeddings
    prompts = [[1 + i % 11 for i in range(limit - room)], [2, 3]]
    run = decode(target, drafter, prompts, max_new_tokens=30, prefill_chunk=16)
    steps = list(run)
    first = run.generations[0]
    assert (first.new_tokens, first.finish) == (room, "context")
    assert ids_of(run) == plain(target, prompts, 30, prefill_chunk=16)
    assert all(s.requests[0].position < limit for s in steps)


def test_an_event_ends_the_run_between_two_steps(target: Beam, drafter: Drafter) -> None:
    cancel = threading.Event()
    run = decode(target, drafter, PROMPTS, max_new_tokens=40, cancel=cancel)
    next(run)
    next(run)
    cancel.set()
    assert list(run) == []
    assert [g.finish for g in run.generations.values()] == [None] * 5
    assert all(
        a == b[: len(a)] for a, b in zip(ids_of(run), plain(target, PROMPTS, 40), strict=True)
    )


@pytest.mark.parametrize("where", ["propose", "verify_greedy"])
def test_an_interrupt_within_a_step_ends_the_run_and_harms_nothing(
    target: Beam, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run = decode(target, drafter, PROMPTS, max_new_tokens=40)
    for _ in range(3):
        next(run)
    before = ids_of(run)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(run)
    monkeypatch.undo()
    assert list(run) == []
    assert ids_of(run) == before
    assert ids_of_all(decode(target, drafter, PROMPTS, max_new_tokens=40)) == plain(
        target, PROMPTS, 40
    )


def ids_of_all(run: loop.Decoding) -> list[tuple[int, ...]]:
    for _ in run:
        pass
    return ids_of(run)


# -- above temperature 0 --------------------------------------------------------------------------


def joint(target: Beam, prompt: list[int], sampling: Sampling) -> dict[tuple[int, int, int], float]:
    """Exact probability of each first three tokens, by running the target on all of them."""
    vocabulary = target.config.vocab_size
    heads = [[*prompt, a, b] for a in range(vocabulary) for b in range(vocabulary)]
    with torch.inference_mode():
        logits = target.sequence_logits(torch.tensor(heads))[:, -3:]
    p = sampling.probabilities(logits.flatten(0, 1)).double().unflatten(0, (-1, 3))
    return {
        (a, b, c): float(p[row, 0, a] * p[row, 1, b] * p[row, 2, c])
        for row, (a, b) in enumerate((a, b) for a in range(vocabulary) for b in range(vocabulary))
        for c in range(vocabulary)
    }


@pytest.mark.parametrize(
    ("method", "proposals", "trims"),
    [
        ("standard", "greedy", False),
        pytest.param("standard", "probabilistic", False, marks=pytest.mark.full),
        pytest.param("block", "greedy", False, marks=pytest.mark.full),
        ("block", "probabilistic", False),
        pytest.param("standard", "greedy", True, marks=pytest.mark.full),
        ("standard", "probabilistic", True),
        pytest.param("block", "probabilistic", True, marks=pytest.mark.full),
    ],
)
def test_what_is_sampled_has_the_targets_distribution(
    target: Beam, drafter: Drafter, method: Any, proposals: Any, trims: bool
) -> None:
    # 12 ** 3 sequences, exactly; the first token is the prefill's, two are behind drafts.
    sampling, prompt = Sampling(temperature=0.8, top_p=0.95), [4, 1, 7]
    expected = joint(target, prompt, sampling)
    samples = 4096
    run = decode(
        target, drafter, [prompt] * samples, max_new_tokens=4, sampling=sampling,
        seeds=range(samples), method=method, proposals=proposals, speculative_tokens=3,
        policy=Adaptive(STEEP) if trims else None,
    )  # fmt: skip
    parts = [p for step in run for p in step.requests]
    accepted = sum(p.accepted for p in parts)
    assert accepted > samples / 10  # else drafts were hardly ever taken, and nothing was tested
    if trims:
        admitted = {p.admitted for p in parts if p.position > len(prompt) and p.drafted}
        assert len(admitted) > 1  # some drafts were trimmed, and some were not
    seen = Counter(ids[:3] for ids in ids_of(run))
    assert all(expected[ids] > 0 for ids in seen)
    statistic = cells = rest = hits = 0.0
    for ids, p in expected.items():
        if p * samples >= 5:
            statistic += (seen[ids] - p * samples) ** 2 / (p * samples)
            cells += 1
        else:
            rest, hits = rest + p * samples, hits + seen[ids]
    statistic += (hits - rest) ** 2 / rest
    # Wilson and Hilferty: the quantile at a false-alarm rate of 1e-4 (z = 3.719).
    limit = cells * (1 - 2 / (9 * cells) + 3.719 * (2 / (9 * cells)) ** 0.5) ** 3
    assert cells > 40
    assert statistic < limit


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(target: Beam, drafter: Drafter) -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    for proposals in ("greedy", "probabilistic"):
        together = decode(
            target, drafter, PROMPTS, max_new_tokens=25, sampling=sampling, proposals=proposals
        )
        alone = [
            ids_of_all(
                decode(
                    target, drafter, p, max_new_tokens=25, sampling=sampling, proposals=proposals
                )
            )[0]
            for p in PROMPTS
        ]
        assert ids_of_all(together) == alone
    other = decode(target, drafter, PROMPTS, max_new_tokens=25, sampling=sampling, seeds=[9] * 5)
    assert ids_of_all(other) != alone


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"speculative_tokens": 0}, DraftError, "speculative_tokens must be a whole number"),
        ({"speculative_tokens": 64}, DraftError, "from 1 to 63"),
        ({"speculative_tokens": 2.5}, DraftError, "speculative_tokens"),
        ({"max_new_tokens": 0}, PromptError, "max_new_tokens"),
        ({"slots": 0}, DraftError, "slots"),
        ({"method": "fly"}, DraftError, "method must be 'standard' or 'block', not 'fly'"),
        ({"proposals": None}, DraftError, "proposals must be"),
        ({"seeds": [1]}, PromptError, "1 seeds were given for 5 prompts"),
        ({"prompts": [[99]]}, PromptError, "token id 99"),
        ({"prompts": []}, PromptError, "empty"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(
    target: Beam, drafter: Drafter, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    asked: dict[str, Any] = {"prompts": PROMPTS} | changes
    with pytest.raises((error, WorkbenchError), match=words):
        decode(target, drafter, **asked)


def test_a_drafter_of_another_model_is_refused(target: Beam, tmp_path: Path) -> None:
    other = small_drafter(small_target(tmp_path))
    with pytest.raises(DraftError, match="was loaded for another"):
        decode(target, other, PROMPTS)
    with pytest.raises(DraftError, match="there is no drafter"):
        decode(target, None, PROMPTS, speculative_tokens=3)


def test_weights_that_are_not_finite_are_said(tmp_path: Path) -> None:
    target = small_target(tmp_path)
    drafter = small_drafter(target)
    with torch.no_grad():
        target.lm_head[3] = torch.nan
    with pytest.raises(WorkbenchError, match="not finite"):
        list(decode(target, drafter, PROMPTS))


def test_steps_survive_json(target: Beam, drafter: Drafter) -> None:
    for step in decode(target, drafter, PROMPTS, max_new_tokens=20, detail=True):
        assert Step.from_dict(step.to_dict()) == step
