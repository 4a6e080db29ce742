"""Every-position records: the blocks of the decode loop, and a replay with its figures."""

from __future__ import annotations

import threading
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import pytest
import torch

import workbench
from spec.planted import small_drafter, small_target
from workbench.errors import DraftError, PromptError
from workbench.model.beam import Beam
from workbench.model.sampling import Sampling
from workbench.spec import every_position
from workbench.spec.decode import decode
from workbench.spec.drafter import Drafter
from workbench.spec.every_position import record_every_position
from workbench.spec.metrics import Tally
from workbench.spec.positions import Position, replay_full, replayed
from workbench.spec.selector import Proposal
from workbench.spec.step import Step
from workbench.spec.trace import Trace, TraceWriter, header

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], [7], [3, 3, 2, 1], [9, 8]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Beam:
    return small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Beam) -> Drafter:
    return small_drafter(target)


def lived(target: Beam, drafter: Drafter, prompts: list[list[int]], **asked: Any) -> list[Step]:
    return list(decode(target, drafter, prompts, detail=True, **asked))


def check(steps: list[Step], positions: list[Position]) -> int:
    """Every block of the run is in the record, and the replay is the run; how many blocks."""
    at = {(p.request, p.position): p for p in positions}
    live = [r for step in steps for r in step.requests if r.drafted]
    for r in live:
        p = at[r.request, r.position]
        assert p.drafted == r.drafted
        assert p.candidates == r.candidates
        for recorded, here in ((p.scores, r.scores), (p.unary, r.unary)):
            for slot, other in zip(recorded, here, strict=True):
                assert slot == pytest.approx(other, abs=2e-4)
        assert min(p.accepted, r.admitted) == r.accepted
    for request in {r.request for step in steps for r in step.requests}:
        accepted = [r.accepted for r in live if r.request == request]
        assert list(replay_full(positions, request)) == accepted
    tally = Tally()
    for step in steps:
        if step.phase == "decode":  # a record begins behind the token of the prefill
            tally.add(step)
    ours, theirs = replayed(positions).to_dict(), tally.acceptance().to_dict()
    assert ours.pop("length_tokens") == pytest.approx(theirs.pop("length_tokens"))
    assert ours.pop("length_requests") == pytest.approx(theirs.pop("length_requests"))
    assert ours == theirs
    return len(live)


@pytest.mark.parametrize("drafts", [1, 3, 4])
def test_the_record_is_the_loop_s(target: Beam, drafter: Drafter, drafts: int) -> None:
    asked = {"max_new_tokens": 40, "speculative_tokens": drafts}
    steps = lived(target, drafter, PROMPTS, **asked)
    positions = list(record_every_position(target, drafter, PROMPTS, unary=True, **asked))
    # 40 new tokens: all but the first have a block.
    assert len(positions) == len(PROMPTS) * 39
    assert check(steps, positions) > 50
    # The case is worth something only if blocks were accepted, refused and cut by the limit.
    assert {p.accepted for p in positions} >= {0, 1}
    assert any(r.trimmed for step in steps for r in step.requests) == (drafts > 1)


def test_accepted_is_what_the_target_continues_with(target: Beam, drafter: Drafter) -> None:
    prompts = [[a, b] for a in range(11) for b in range(6)]
    positions = list(record_every_position(target, drafter, prompts, max_new_tokens=3))
    longer = workbench.generate(target, prompts, max_new_tokens=9, stop_at_eos=False)
    assert {p.accepted for p in positions} >= {0, 1}
    for p in positions:
        prompt, new = prompts[p.request], longer[p.request].token_ids
        truth = new[p.position - len(prompt) :][: len(p.drafted)]
        assert len(truth) == len(p.drafted) == drafter.block - 1
        agreeing = [a == b for a, b in zip(p.drafted, truth, strict=True)]
        assert p.accepted == (agreeing.index(False) if False in agreeing else len(agreeing))
        assert p.token_id == truth[0]
        assert p.left == len(prompt) + 3 - p.position
        assert p.unary == ()


@pytest.mark.parametrize("wrong", [0, 2, 3, 4])
def test_accepted_counts_on_behind_the_last_token(
    target: Beam, drafter: Drafter, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    longer = workbench.generate(target, PROMPTS, max_new_tokens=20, stop_at_eos=False)
    truth = iter(generation.token_ids for generation in longer)

    def right_up_to_wrong(_: Drafter, hidden: torch.Tensor, anchors: torch.Tensor) -> Proposal:
        new, (blocks, slots, _) = next(truth), hidden.shape
        tokens = torch.tensor([new[1 + i : 1 + i + slots] for i in range(blocks)])
        tokens[:, wrong:] = (tokens[:, wrong:] + 1) % 12
        nothing = torch.zeros(blocks, slots, 3)
        return Proposal(token_ids=tokens, candidates=nothing.long(), unary=nothing, scores=nothing)

    monkeypatch.setattr(every_position, "walk", right_up_to_wrong)
    positions = list(record_every_position(target, drafter, PROMPTS, max_new_tokens=6))
    assert [p.accepted for p in positions] == [wrong] * 5 * len(PROMPTS)


def test_stop_tokens(tmp_path: Path, target: Beam) -> None:
    # A token that one prompt writes early and that comes at all: its greedy texts, counted.
    texts = [g.token_ids for g in workbench.generate(target, PROMPTS, max_new_tokens=40)]
    eos = max(range(12), key=lambda i: sum(i in text[3:30] for text in texts))
    stopping = small_target(tmp_path, eos_token_id=eos)
    drafter = small_drafter(stopping)
    steps = lived(stopping, drafter, PROMPTS, max_new_tokens=40)
    ended = {r.finished for step in steps for r in step.requests if r.finished}
    assert "eos" in ended
    positions = list(
        record_every_position(stopping, drafter, PROMPTS, max_new_tokens=40, unary=True)
    )
    check(steps, positions)
    assert len(positions) < len(PROMPTS) * 39
    going = record_every_position(stopping, drafter, PROMPTS, max_new_tokens=40, stop_at_eos=False)
    assert len(list(going)) == len(PROMPTS) * 39


def test_at_the_end_of_the_context(target: Beam, drafter: Drafter) -> None:
    prompts = [[1, 2, 3] * 28, [5] * 94, [5] * 95, [4, 2] * 20]  # of 96
    steps = lived(target, drafter, prompts, max_new_tokens=30)
    positions = list(record_every_position(target, drafter, prompts, max_new_tokens=30, unary=True))
    check(steps, positions)
    counts = [sum(p.request == i for p in positions) for i in range(4)]
    assert counts == [96 - 84 - 1, 1, 0, 29]
    assert max(p.position for p in positions) == 95


def test_parts_and_batches_do_not_matter(
    target: Beam, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(record_every_position(target, drafter, PROMPTS, max_new_tokens=20))
    monkeypatch.setattr(every_position, "_GATHERED", 3 * (5 + 5) * 16)  # three blocks a part
    monkeypatch.setattr(every_position, "_TOGETHER", 2)
    told: list[tuple[int, int]] = []
    parts = list(
        record_every_position(
            target,
            drafter,
            PROMPTS,
            max_new_tokens=20,
            progress=lambda done, of: told.append((done, of)),
        )
    )
    assert told == [(i, 5) for i in range(1, 6)]
    for a, b in zip(whole, parts, strict=True):
        assert (a.request, a.position, a.drafted) == (b.request, b.position, b.drafted)
        assert (a.accepted, a.candidates) == (b.accepted, b.candidates)


def test_cancelling_leaves_whole_prompts(target: Beam, drafter: Drafter) -> None:
    cancel = threading.Event()

    def progress(done: int, of: int) -> None:
        if done == 2:
            cancel.set()

    found = list(
        record_every_position(
            target, drafter, PROMPTS, max_new_tokens=10, progress=progress, cancel=cancel
        )
    )
    assert [p.request for p in found] == [0] * 9 + [1] * 9
    assert list(record_every_position(target, drafter, PROMPTS, cancel=cancel)) == []


def test_into_a_file_and_back(tmp_path: Path, target: Beam, drafter: Drafter) -> None:
    positions = list(
        record_every_position(target, drafter, PROMPTS[0], max_new_tokens=12, unary=True)
    )
    head = header(model="a", drafter="b", speculative_tokens=4, mode="every-position")
    with TraceWriter(tmp_path / "t", head) as writer:
        for p in positions:
            writer.write(p)
    trace = Trace.read(tmp_path / "t")
    assert trace.positions == tuple(positions)
    assert trace.acceptance() == replayed(positions)


def test_misuse_is_told_at_once(target: Beam, drafter: Drafter, tmp_path: Path) -> None:
    other = small_target(tmp_path)
    with pytest.raises(DraftError, match="loaded for another"):
        record_every_position(other, drafter, PROMPTS)
    for wrong in (0, 64, True, 1.5):
        with pytest.raises(DraftError, match="speculative_tokens must be"):
            record_every_position(target, drafter, PROMPTS, speculative_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="max_new_tokens must be"):
        record_every_position(target, drafter, PROMPTS, max_new_tokens=0)
    with pytest.raises(PromptError, match="prompt"):
        record_every_position(target, drafter, [[99]])


# -- sampled texts ---------------------------------------------------------------------------------


def chances(target: Beam, ids: list[int], temperature: float) -> torch.Tensor:
    """Of the token behind ``ids``."""
    with torch.inference_mode():
        logits = target.sequence_logits(torch.tensor(ids))[-1]
    return torch.softmax(logits.double() / temperature, 0)


def test_a_sampled_record_accepts_with_the_verdicts_probabilities(
    target: Beam, drafter: Drafter
) -> None:
    prompt, many, temperature, drafts = [1, 2, 3], 500, 5.0, 2
    # Exactly: over every first token, the block behind it, and whether its drafts are accepted.
    expected = [0.0] * (drafts + 1)
    first = chances(target, prompt, temperature)
    for token in range(len(first)):
        ids = [*prompt, token]
        ((_, proposal),) = every_position.blocks(target, drafter, ids, 3, 4, drafts)
        one, two = proposal.token_ids[0].tolist()
        p1 = float(first[token] * chances(target, ids, temperature)[one])
        p2 = p1 * float(chances(target, [*ids, one], temperature)[two])
        expected = [a + b for a, b in zip(expected, (first[token] - p1, p1 - p2, p2), strict=True)]
    assert min(expected) > 0.003, "each must come to be seen"
    positions = record_every_position(
        target,
        drafter,
        [prompt] * many,
        max_new_tokens=2,
        speculative_tokens=drafts,
        sampling=Sampling(temperature=temperature, seed=11),
        stop_at_eos=False,
    )
    accepted = [p.accepted for p in positions]
    assert len(accepted) == many
    for count, share in enumerate(expected):
        off = accepted.count(count) / many - share
        assert abs(off) < 4 * (share * (1 - share) / many) ** 0.5


def test_a_sampled_record_replays_to_the_lengths_of_live_runs(
    target: Beam, drafter: Drafter
) -> None:
    prompts, sampling = [[5, 1, 2]] * 300, Sampling(temperature=5.0, seed=2)
    asked: dict[str, Any] = {"max_new_tokens": 12, "sampling": sampling, "stop_at_eos": False}
    recorded = list(record_every_position(target, drafter, prompts, **asked))
    run = decode(target, drafter, prompts, seeds=range(900, 1200), slots=100, **asked)
    lengths: list[list[float]] = [[], []]
    for request in range(len(prompts)):
        lengths[0].append(len(list(replay_full(recorded, request))))
    steps: dict[int, int] = dict.fromkeys(range(len(prompts)), 0)
    for step in run:
        for r in step.requests:
            steps[r.request] += bool(r.drafted)
    lengths[1] = [float(n) for n in steps.values()]
    means = [fmean(each) for each in lengths]
    error = sum(pvariance(each) / len(each) for each in lengths) ** 0.5
    assert 0 < error < 0.2
    assert abs(means[0] - means[1]) < 4 * error
    assert means[0] < 10.8, "some drafts must be accepted"


def test_each_prompt_is_drawn_with_a_seed_of_its_own(target: Beam, drafter: Drafter) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 6, "stop_at_eos": False}
    both = record_every_position(
        target, drafter, [[1, 2]] * 20, sampling=Sampling(temperature=1.0, seed=4), **asked
    )
    texts: dict[int, list[int]] = {}
    for p in both:
        texts.setdefault(p.request, []).append(p.token_id)
    assert len({tuple(text) for text in texts.values()}) > 10
    # The number of a prompt decides, not who is recorded with it.
    alone = record_every_position(
        target, drafter, [1, 2], sampling=Sampling(temperature=1.0, seed=21), **asked
    )
    assert [p.token_id for p in alone] == texts[17]
