"""Replay: against the model decoding anew, and against a loop written out request by request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import workbench
from workbench.errors import DraftError, TraceError
from workbench.model.beam import Beam
from workbench.spec.acceptance import Estimator
from workbench.spec.adaptive import Adaptive, Decision, Fixed, NoDrafts, Oracle, Policy, Situation
from workbench.spec.cost_table import CostTable
from workbench.spec.decode import decode
from workbench.spec.drafter import Drafter
from workbench.spec.every_position import record_every_position
from workbench.spec.positions import Position
from workbench.spec.recording import Recording
from workbench.spec.replay import replay
from workbench.spec.simulation_result import SimulationResult
from workbench.spec.step import RequestStep, Step
from workbench.spec.trace import Trace

PROMPTS = ["def read_json(path):", "class Stack:\n    def push(self", "import os\n\n\ndef walk"]
NEW = 30
TABLE = CostTable(
    draft=((1, 0.5), (4, 0.9), (16, 2.0)),
    verify=((1, 2.0), (2, 2.5), (4, 3.5), (8, 5.0), (16, 8.5), (32, 12.0), (64, 30.0)),
    captured=16,
    label="made up",
)
SLOTS = 5


@pytest.fixture(scope="module")
def pair() -> tuple[Beam, Drafter]:
    beam = workbench.load("beam-tiny")
    return beam, workbench.load_drafter(beam)


@pytest.fixture(scope="module")
def recorded(pair: tuple[Beam, Drafter]) -> list[Position]:
    return list(record_every_position(*pair, PROMPTS, max_new_tokens=NEW, stop_at_eos=False))


def made_up(requests: int = 7, tokens: int = 24, seed: int = 3) -> list[Position]:
    """Positions with scores that tell something of the verdict; requests of different lengths.

    Those of odd number end by a stop token, two tokens before their limit.
    """
    rng = np.random.default_rng(seed)
    positions = []
    for request in range(requests):
        first, long = int(rng.integers(3, 30)), tokens - 2 * request
        for i in range(long):
            sharp = rng.gamma(2.0, 2.0, SLOTS)
            scores = rng.normal(size=(SLOTS, 4))
            scores[np.arange(SLOTS), rng.integers(0, 4, SLOTS)] += sharp
            said = rng.random(SLOTS) < 1 / (1 + np.exp(1.0 - 0.6 * sharp))
            positions.append(
                Position(
                    request=request,
                    position=first + i,
                    token_id=7,
                    left=long - i + 2 * (request % 2),
                    drafted=(1,) * SLOTS,
                    accepted=int(np.cumprod(said).sum()),
                    scores=tuple(tuple(map(float, row)) for row in scores),
                )
            )
    return positions


# -- against the model ----------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_fixed_replay_is_the_run(
    pair: tuple[Beam, Drafter], recorded: list[Position], slots: int
) -> None:
    asked: dict[str, Any] = {"max_new_tokens": NEW, "stop_at_eos": False, "slots": slots}
    steps = [step for step in decode(*pair, PROMPTS, **asked) if step.phase == "decode"]
    played = replay(recorded, Fixed(), TABLE, concurrency=slots)
    history = played.history
    parts = [step.requests for step in steps]
    assert history.requests.tolist() == [len(several) for several in parts]
    for name, of in (
        ("drafted", lambda r: len(r.drafted)),
        ("admitted", lambda r: r.admitted),
        ("accepted", lambda r: r.accepted),
        ("tokens", lambda r: len(r.token_ids)),
    ):
        live = [sum(of(r) for r in several) for several in parts]
        assert getattr(history, name).tolist() == live, name
    assert played.tokens == len(PROMPTS) * (NEW - 1)
    assert (played.estimated, played.missed) == (False, 0)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("most", [1, 3])
def test_a_trimmed_replay_is_decoding_anew_step_by_step(
    pair: tuple[Beam, Drafter], recorded: list[Position], most: int
) -> None:
    """Every step drafts from a fresh prefill of all text so far, and keeps at most ``most``."""
    beam, drafter = pair
    runs: list[list[int]] = []  # tokens of each step, by prompt
    for prompt in PROMPTS:
        assert beam.tokenizer is not None
        text = [*beam.tokenizer.encode(prompt)]
        first = next(iter(decode(beam, drafter, [text], max_new_tokens=1, stop_at_eos=False)))
        text += first.requests[0].token_ids
        limit = len(text) + NEW - 1
        given = []
        while len(text) < limit:
            # The prefill of all but the last token gives that token again, and then drafts.
            run = decode(beam, drafter, [text[:-1]], max_new_tokens=9, stop_at_eos=False)
            again, step = next(run), next(run)
            assert again.requests[0].token_ids == (text[-1],)
            kept = step.requests[0].token_ids[: min(most, limit - len(text) - 1) + 1]
            text += kept
            given.append(len(kept))
        runs.append(given)
    played = replay(recorded, Fixed(most), TABLE, concurrency=1)
    assert played.history.tokens.tolist() == [n for given in runs for n in given]
    assert max(map(max, runs)) == most + 1, "the case trims something that is accepted"
    together = replay(recorded, Fixed(most), TABLE)
    assert together.steps == max(map(len, runs))
    assert together.tokens == sum(map(sum, runs))
    assert (played.missed > 0, played.estimated) == (True, False)


# -- against a loop written out -------------------------------------------------------------------


@dataclass
class Alive:
    """A request of the written-out loop."""

    request: int
    positions: list[Position]
    came: float
    at: int = 0
    stale: list[float] = field(default_factory=lambda: [1.0] * SLOTS)


def feature(scores: Sequence[float]) -> float:
    top = max(scores)
    rest = sum(math.exp(s - top) for s in scores) - 1
    return min(40.0, max(-40.0, -math.log(rest))) if rest > 0 else 40.0


def written_out(
    positions: list[Position],
    policy: Policy,
    concurrency: int,
    estimator: Estimator | None,
) -> tuple[list[tuple[int, int, int, int, float]], list[float]]:
    """(requests, admitted, accepted, tokens, ms) of each step, and TPOT by request."""
    by: dict[int, list[Position]] = {}
    for p in positions:
        by.setdefault(p.request, []).append(p)
    waiting = list(enumerate(by))
    alive: list[Alive] = []
    steps, tpot, clock = [], {}, 0.0
    while waiting or alive:
        while waiting and len(alive) < concurrency:
            number, request = waiting.pop(0)
            alive.append(Alive(number, by[request], clock))
        here = [s.positions[s.at] for s in alive]
        room = [min(SLOTS, p.left - 1) for p in here]
        admitted = [0] * len(alive)
        if any(room):
            if estimator is None:
                live = [
                    [1 / sum(math.exp(s - max(row)) for s in row) for row in p.scores] for p in here
                ]
            else:
                f = np.array([[feature(row) for row in p.scores] for p in here], np.float32)
                predicted = estimator.predict(f)
                live = predicted.astype(float).tolist()
            known = [min(p.accepted, r) for p, r in zip(here, room, strict=True)]
            admitted = policy.decide(
                Situation(
                    drafted=np.array(room),
                    plain=np.ones(len(alive), int),
                    samples=np.ones(len(alive), bool),
                    stale=np.array([s.stale for s in alive]),
                    live=np.array(live),
                    known=np.array(known),
                )
            ).admitted.tolist()
            for s, row in zip(alive, live, strict=True):
                s.stale = row
        accepted = [min(p.accepted, a) for p, a in zip(here, admitted, strict=True)]
        if estimator is not None and any(room):
            estimator.observe(predicted, f, np.array(accepted), np.array(admitted))
        ms = TABLE.verify_ms(len(alive) + sum(admitted))
        ms += TABLE.draft_ms(len(alive)) if any(room) else 0.0
        clock += ms
        tokens = 0
        for s, a in zip(alive, accepted, strict=True):
            given = min(a + 1, len(s.positions) - s.at)
            s.at += given
            tokens += given
            if s.at == len(s.positions):
                tpot[s.request] = (clock - s.came) / s.at
        steps.append((len(alive), sum(admitted), sum(accepted), tokens, ms))
        alive = [s for s in alive if s.at < len(s.positions)]
    return steps, [tpot[number] for number in sorted(tpot)]


def check_against(
    played: SimulationResult, steps: list[tuple[int, int, int, int, float]], tpot: list[float]
) -> None:
    h = played.history
    columns = (h.requests, h.admitted, h.accepted, h.tokens)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == [step[:4] for step in steps]
    assert h.ms.tolist() == pytest.approx([step[4] for step in steps])
    assert played.tpot_ms.tolist() == pytest.approx(tpot)
    ms, tokens = sum(step[4] for step in steps), sum(step[3] for step in steps)
    assert played.tokens_per_second == pytest.approx(1e3 * tokens / ms)


@pytest.mark.parametrize("concurrency", [1, 3, 7])
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(
    "policy", [Fixed(), Fixed(2), Adaptive(TABLE), Oracle(TABLE)], ids=lambda p: p.name
)
def test_replay_is_the_written_out_loop(policy: Policy, calibrated: bool, concurrency: int) -> None:
    positions = made_up()
    theirs = Estimator(SLOTS) if calibrated else None
    ours = Estimator(SLOTS) if calibrated else None
    steps, tpot = written_out(positions, policy, concurrency, theirs)
    played = replay(positions, policy, TABLE, concurrency=concurrency, estimator=ours)
    check_against(played, steps, tpot)
    if ours is not None and theirs is not None:
        assert ours.steps == theirs.steps
        assert ours.counts.tolist() == theirs.counts.tolist()


def test_the_estimator_learns_during_a_replay() -> None:
    positions = made_up(requests=12, tokens=60, seed=5)
    estimator, other = Estimator(SLOTS), Estimator(SLOTS)
    written = written_out(positions, Adaptive(TABLE), 1, other)
    played = replay(positions, Adaptive(TABLE), TABLE, concurrency=1, estimator=estimator)
    check_against(played, *written)
    assert len(estimator.history) > 2
    assert estimator.slope == pytest.approx(other.slope, rel=1e-3)
    assert estimator.slope != 0.5
    fresh = replay(positions, Adaptive(TABLE), TABLE, concurrency=1)
    assert fresh.history.admitted.tolist() == played.history.admitted.tolist()


@pytest.mark.parametrize(
    "policy", [Fixed(), Fixed(2), Adaptive(TABLE), Oracle(TABLE)], ids=lambda p: p.name
)
def test_identities(policy: Policy) -> None:
    positions = made_up()
    played = replay(positions, policy, TABLE, concurrency=4)
    h = played.history
    assert (h.accepted <= h.admitted).all()
    assert (h.admitted <= h.drafted).all()
    assert (h.tokens == h.accepted + h.requests - h.cut).all()
    assert (h.budget == h.admitted).all()
    assert played.wasted == (h.admitted - h.accepted).sum()
    assert played.drafted == h.drafted.sum() == SLOTS * played.events
    assert played.tokens == len(positions)
    assert played.acceptance_length == pytest.approx(1 + played.accepted / played.events)
    assert len(h) == played.steps
    assert h.requests.max() == 4
    assert h.cut.sum() > 0 or policy != Fixed(), "stop tokens take tokens away"


class Watcher:
    """Decides as another, and keeps what it saw and decided."""

    name = "watcher"

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seen: list[tuple[Situation, Decision]] = []

    def decide(self, situation: Situation) -> Decision:
        decision = self.policy.decide(situation)
        self.seen.append((situation, decision))
        return decision


@pytest.mark.parametrize(
    "policy", [Fixed(), Fixed(1), NoDrafts(), Adaptive(TABLE)], ids=lambda p: p.name
)
def test_no_policy_beats_the_oracle_in_a_step(policy: Policy) -> None:
    watcher = Watcher(policy)
    replay(made_up(), watcher, TABLE, concurrency=5)

    def rate(situation: Situation, decision: Decision) -> float:
        assert situation.known is not None
        given = np.minimum(situation.known, decision.admitted).sum() + len(situation.drafted)
        rows = len(situation.drafted) + int(decision.admitted.sum())
        return float(given / (TABLE.draft_ms(len(situation.drafted)) + TABLE.verify_ms(rows)))

    rates = [(rate(s, Oracle(TABLE).decide(s)), rate(s, d)) for s, d in watcher.seen]
    assert all(best >= mine - 1e-12 for best, mine in rates)
    assert any(best > mine for best, mine in rates)


def test_a_step_sees_the_confidences_of_the_step_before() -> None:
    watcher = Watcher(Fixed(0))  # every step goes on by one token: nothing else moves
    replay(made_up(requests=2, tokens=9), watcher, TABLE, concurrency=1, estimator=None)
    first, second = watcher.seen[0][0], watcher.seen[1][0]
    assert (first.stale == 1).all()
    assert (second.stale == first.live).all()
    assert (second.live != first.live).any()
    fresh = [i for i, (s, _) in enumerate(watcher.seen) if (s.stale == 1).all()]
    assert len(fresh) == 2, "once for each request, when it joins"


def test_plain_decoding_pays_for_no_draft() -> None:
    positions = made_up(requests=2, tokens=10)
    plain = replay(positions, NoDrafts(), TABLE, concurrency=1, drafting=False)
    none = replay(positions, NoDrafts(), TABLE, concurrency=1)
    assert plain.steps == none.steps == len(positions)
    assert plain.ms == pytest.approx(2.0 * len(positions))
    # The request of even number needs no draft for its last token, the odd one stops before.
    assert none.ms - plain.ms == pytest.approx(0.5 * (len(positions) - 1))
    assert (plain.acceptance_length, plain.drafted, plain.policy) == (1.0, 0, "none")
    assert plain.tpot_p50_ms == pytest.approx(2.0)


def test_a_policy_that_fails_is_fixed_and_said_to_be() -> None:
    class Broken:
        name = "mine"

        def decide(self, situation: Situation) -> Decision:
            if situation.drafted.min() < SLOTS:
                raise RuntimeError("no room")
            return Fixed().decide(situation)

    positions = made_up()
    played, fixed = (replay(positions, p, TABLE, concurrency=3) for p in (Broken(), Fixed()))
    assert played.history.admitted.tolist() == fixed.history.admitted.tolist()
    assert 0 < played.failed_steps < played.steps
    assert "no room" in played.failures[0]
    assert (fixed.failed_steps, fixed.failures) == (0, ())


def test_a_reason_in_the_words_of_a_failure_is_none() -> None:
    class Wordy:
        name = "wordy"

        def decide(self, situation: Situation) -> Decision:
            return replace(Fixed(2).decide(situation), reason="fixed verification in its place")

    played = replay(made_up(), Wordy(), TABLE, concurrency=3)
    assert (played.failed_steps, played.failures) == (0, ())


# -- traces of steps ------------------------------------------------------------------------------


def lived(positions: list[Position], most: int = SLOTS) -> Trace:
    """The trace of a run one request at a time, at most so many drafts of it verified."""
    at = {(p.request, p.position): p for p in positions}
    steps: list[Step] = []
    for request in dict.fromkeys(p.request for p in positions):
        spots = sorted(p for r, p in at if r == request)
        here, end = spots[0], spots[-1] + 1
        parts = [RequestStep(request=request, position=here - 1, token_ids=(7,), kinds=("first",))]
        while here < end:
            p = at[request, here]
            room = min(SLOTS, p.left - 1)
            admitted = min(room, most)
            accepted = min(p.accepted, admitted)
            given = min(accepted + 1, end - here)
            done = here + given == end
            parts.append(
                RequestStep(
                    request=request,
                    position=here,
                    drafted=p.drafted if room else (),
                    confidences=(0.7,) * SLOTS if room else (),
                    admitted=admitted,
                    accepted=accepted,
                    token_ids=(7,) * given,
                    kinds=("plain",) * given,
                    finished=("eos" if request % 2 else "length") if done else None,
                    scores=p.scores if room else (),
                )
            )
            here += given
        for i, part in enumerate(parts):
            phase: Any = "decode" if i else "prefill"
            steps.append(Step(index=0, phase=phase, rows=1, seconds=0.0, requests=(part,)))
    head = {"mode": "steps", "sampling": {"temperature": 0.0}}
    return Trace(header=head, steps=tuple(steps))


def limited(positions: list[Position]) -> Trace:
    """With the limit of new tokens in its header, that of the made-up positions of request 0."""
    trace = lived(positions)
    return replace(trace, header=trace.header | {"max_new_tokens": positions[0].left + 1})


def test_the_policy_of_a_run_is_replayed_from_its_steps_exactly() -> None:
    positions = [p for p in made_up() if p.request % 2 == 0]  # whose end is the limit
    played = replay(lived(positions), Fixed(), TABLE, concurrency=3)
    exact = replay(positions, Fixed(), TABLE, concurrency=3)
    assert played.tpot_ms.tolist() == pytest.approx(exact.tpot_ms.tolist())
    for name in ("drafted", "admitted", "accepted", "tokens", "requests"):
        ours, theirs = getattr(played.history, name), getattr(exact.history, name)
        assert ours.tolist() == theirs.tolist(), name
    assert (played.estimated, played.estimated_how, played.estimated_events) == (False, "", 0)


def test_a_limit_in_the_header_bounds_drafts_before_a_stop_token() -> None:
    positions = [p for p in made_up(requests=2, tokens=20) if p.request == 1]
    trace = limited(positions)
    played, exact = (replay(source, Fixed(), TABLE) for source in (trace, positions))
    assert played.history.admitted.tolist() == exact.history.admitted.tolist()


def test_trimming_less_than_the_run_is_estimated_and_said() -> None:
    positions = [p for p in made_up() if p.request % 2 == 0]
    trace = lived(positions, 2)
    same = replay(trace, Fixed(2), TABLE, concurrency=1)
    exact = replay(positions, Fixed(2), TABLE, concurrency=1)
    assert same.history.accepted.tolist() == exact.history.accepted.tolist()
    # What trimmed drafts would have been accepted nobody saw.
    assert (same.estimated, same.estimated_events) == (True, 0)
    assert same.estimated_how.startswith("missed tokens alone")
    more = replay(trace, Fixed(), TABLE, concurrency=1)
    assert more.estimated
    assert 0 < more.estimated_events <= more.events
    assert f"{more.estimated_events:,} of {more.events:,} verdicts" in more.estimated_how
    assert more.tokens == len(positions)
    again = replay(trace, Fixed(), TABLE, concurrency=1)
    assert again.to_dict() == more.to_dict()


def test_trimming_more_than_the_run_leaves_its_path() -> None:
    """Exact while it stays on recorded blocks; the first that is not is stood in for."""
    request = [p for p in made_up() if p.request == 0]
    trace = lived(request)
    recording = Recording.of(trace)
    starts = [part.position for step in trace.steps[1:] for part in step.requests]
    own = (np.flatnonzero(recording.own) + request[0].position).tolist()
    drafted = [p for p in starts if any(q.position == p and q.left > 1 for q in request)]
    assert own == drafted
    at = {p.position: p for p in request}
    for i, position in enumerate(range(request[0].position, request[-1].position + 1)):
        before = max(start for start in drafted if start <= position)
        assert recording.known[i] == at[before].accepted or recording.sure[i] < SLOTS
        assert recording.left[i] == at[position].left
    played = replay(trace, Fixed(1), TABLE)
    assert 0 < played.estimated_events < played.events
    assert not recording.exact
    assert Recording.of(request).exact


def test_a_verdict_beyond_what_was_verified_is_drawn_with_the_slots_rates() -> None:
    """Half the judged second slots were accepted; so are half the trimmed ones."""

    def step(request: int, admitted: int, accepted: int) -> Step:
        part = RequestStep(
            request=request, position=5, drafted=(1, 1), admitted=admitted, accepted=accepted,
            token_ids=(7,) * (accepted + 1), kinds=("plain",) * (accepted + 1),
            confidences=(0.5, 0.5),
        )  # fmt: skip
        return Step(index=0, rows=1, seconds=0.0, requests=(part,))

    steps = [step(r, 2, 1 + r % 2) for r in range(100)]
    steps += [step(r, 1, 1) for r in range(100, 500)]
    # A second slot behind a refused one was not judged, and nothing behind that is unknown.
    steps += [step(r, 2, 0) for r in range(500, 700)]
    steps += [step(r, 1, 0) for r in range(700, 800)]
    recording = Recording.of(Trace(header={"mode": "steps"}, steps=tuple(steps)), seed=1)
    known, sure = recording.known[recording.first], recording.sure[recording.first]
    assert known[:100].tolist() == [1, 2] * 50
    assert set(known[100:500].tolist()) == {1, 2}
    assert known[100:500].mean() == pytest.approx(1.5, abs=0.1)  # 4 standard errors
    assert (known[500:] == 0).all()
    assert sure.tolist() == [2] * 100 + [1] * 400 + [2] * 300


# -- wrong input ----------------------------------------------------------------------------------


def bare(position: Position) -> Position:
    return replace(position, scores=())


def scored(position: Position, score: float) -> Position:
    return replace(position, scores=((score, *position.scores[0][1:]), *position.scores[1:]))


def heated(temperature: float) -> Trace:
    header = {"mode": "every-position", "sampling": {"temperature": temperature}}
    return Trace(header=header, positions=tuple(made_up(1)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trace": []}, "no drafted blocks"),
        ({"trace": None}, "positions of an every-position record"),
        ({"trace": ["x"]}, "positions of an every-position record"),
        ({"trace": Trace(header={"mode": "steps"})}, "no drafted blocks"),
        ({"trace": Trace(header={"mode": "every-position"})}, "no drafted blocks"),
        ({"trace": [bare(p) for p in made_up(1)]}, "no scores"),
        ({"trace": [bare(p) for p in made_up(1)], "estimator": None}, "no confidences"),
        ({"concurrency": 0}, "concurrency must be a whole number of at least 1, not 0"),
        ({"concurrency": 1.5}, "concurrency must be a whole number"),
        ({"concurrency": True}, "concurrency must be a whole number"),
        ({"estimator": Estimator(3)}, "give Estimator(5)"),
        ({"estimator": "warm"}, "'fresh' or None"),
        ({"table": {}}, "needs a CostTable"),
        ({"policy": Adaptive}, "Adaptive is its class; give Adaptive(...)"),
        ({"policy": "adaptive"}, "str lacks one"),
        ({"trace": [scored(p, 1e39) for p in made_up(1)]}, "has a score beyond float32"),
        ({"trace": [scored(p, math.inf) for p in made_up(1)]}, "has a score beyond float32"),
        ({"trace": heated(1e-40)}, "temperature 1e-40; it must be 0 or a number from 1e-05 up"),
        ({"trace": heated(math.inf)}, "temperature inf"),
        ({"trace": heated(math.nan)}, "temperature nan"),
    ],
)
def test_wrong_input_is_one_sentence(change: dict[str, Any], says: str) -> None:
    asked: dict[str, Any] = {"trace": made_up(2), "policy": Adaptive(TABLE), "table": TABLE}
    asked |= change
    with pytest.raises((DraftError, TraceError)) as caught:
        replay(asked.pop("trace"), asked.pop("policy"), asked.pop("table"), **asked)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_lowest_temperature_of_a_trace_is_the_samplings() -> None:
    from workbench.model.sampling import LOWEST_TEMPERATURE

    assert Recording.of(heated(LOWEST_TEMPERATURE)).features is not None
    assert Recording.of(heated(0)).features is not None
    with pytest.raises(TraceError, match="temperature"):
        Recording.of(heated(LOWEST_TEMPERATURE * 0.999))


def test_positions_that_no_sequence_has_do_not_fill_the_memory() -> None:
    positions = made_up(1)
    far = replace(positions[-1], position=10**15)
    with pytest.raises(TraceError, match="damaged"):
        replay([*positions, far], Fixed(), TABLE)


def test_policies_that_look_at_no_confidences_need_no_scores() -> None:
    positions = made_up(3)
    for policy in (Fixed(), Oracle(TABLE), NoDrafts()):
        played = replay([bare(p) for p in positions], policy, TABLE)
        assert played.ms == replay(positions, policy, TABLE).ms
