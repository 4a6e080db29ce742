"""The page of adaptive verification without a browser: figures, controls, messages, policies.

Target and drafter write a cycle that is known by hand (``spec/cycle.py``); figures are compared
with the steps they are of.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jupyter_client.session import Session

import workbench
from spec import cycle
from workbench import views
from workbench.errors import DraftError, PromptError
from workbench.model.beam import Beam
from workbench.model.sampling import Sampling
from workbench.spec.acceptance import Estimator
from workbench.spec.adaptive import Adaptive, Decision, Fixed, NoDrafts, Policy, budget_of, survival
from workbench.spec.bench_prompts import PROMPTS
from workbench.spec.calibration import evidence, reliability
from workbench.spec.cost_table import CostTable
from workbench.spec.decode import decode
from workbench.spec.drafter import Drafter
from workbench.spec.drafter_checkpoint import load_drafter
from workbench.spec.step import RequestStep, Step
from workbench.views import adaptive_board, adaptive_page
from workbench.views.adaptive_board import IN_TURN, _Turn
from workbench.views.adaptive_page import serving
from workbench.views.adaptive_watch import BUCKET, LAST_STEPS, SPAN, Watch, objective, rows
from workbench.views.background import HERTZ, stop_all

PROMPT_TEXTS = ["def f():", "x = 1\n", "# a"]
TABLE = CostTable(
    draft=((1, 1.0), (8, 1.5)), verify=((1, 3.0), (24, 5.0), (64, 30.0)), label="made"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Beam:
    folder = tmp_path_factory.mktemp("cycle")
    cycle.make(folder)
    return workbench.load(folder / "target")


@pytest.fixture(scope="module")
def drafter(target: Beam, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    folder = tmp_path_factory.mktemp("drafter")
    return load_drafter(target, cycle.make(folder)[1])


@pytest.fixture(scope="module")
def steps(target: Beam, drafter: Drafter) -> list[Step]:
    """Of eight sequences, trimmed by TABLE."""
    run = decode(
        target, drafter, PROMPT_TEXTS * 2 + PROMPT_TEXTS[:2], max_new_tokens=60,
        policy=Adaptive(TABLE),
    )  # fmt: skip
    found = list(run)
    shares = [step.budget / max(1, len(step.objective) - 1) for step in found if step.policy]
    assert min(shares) < 0.5 < max(shares), "they show nothing"
    return found


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    stop_all()
    deadline = time.monotonic() + 10
    while any(t.name.startswith("workbench-") for t in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread goes on after it was cancelled"
        time.sleep(0.01)


class Page:
    """What a page would have been sent."""

    def __init__(self, board: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        self.times: list[float] = []
        board.widget.send = self.take

    def take(self, message: dict[str, Any]) -> None:
        self.sizes.append(len(json.dumps(message, allow_nan=False)))
        self.messages.append(message)
        self.times.append(time.monotonic())

    @property
    def updates(self) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["kind"] == "update"]


def press(board: Any, kind: str, **settings: Any) -> None:
    """As the page does: buttons carry all settings, ``change`` what acts at once."""
    if kind == "change":
        message = {"kind": kind, "settings": settings}
    else:
        message = {"kind": kind, "settings": {**board.widget.settings, **settings}}
    board._message(None, message, None)


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def decodes(steps: list[Step]) -> list[Step]:
    return [step for step in steps if step.phase == "decode"]


def page_of(target: Beam, drafter: Drafter, **options: Any) -> Any:
    asked = {"concurrency": 3, "table": TABLE, "max_new_tokens": 40, "most": 16, **options}
    return views.adaptive(target, drafter, PROMPT_TEXTS, **asked)


# -- figures --------------------------------------------------------------------------------------


def test_rows_are_the_steps_own(steps: list[Step]) -> None:
    step = decodes(steps)[3]
    found = rows(step)
    for row, part in enumerate(step.requests):
        product = 1.0
        for slot, chance in enumerate(part.expected):
            product *= chance
            assert found["survival"][row][slot] == pytest.approx(1000 * product, abs=0.51)
        assert [found[name][row] for name in ("request", "drafted", "admitted", "accepted")] == [
            part.request, len(part.drafted), part.admitted, part.accepted,
        ]  # fmt: skip


def test_what_nobody_said_is_minus_one_and_never_nan() -> None:
    nan = float("nan")
    parts = (
        RequestStep(request=0, position=5, drafted=(1, 2), expected=(0.5, nan), admitted=2,
                    token_ids=(9,), kinds=("corrected",)),
        RequestStep(request=1, position=5, token_ids=(9,), kinds=("plain",)),
        RequestStep(request=2, position=5, drafted=(1, 2), admitted=2, token_ids=(9,),
                    kinds=("corrected",)),
    )  # fmt: skip
    step = Step(index=0, rows=9, seconds=0.1, policy="adaptive", requests=parts)
    assert rows(step)["survival"] == [[500, -1], [-1, -1], [-1, -1]]
    watch = Watch(TABLE)
    for _ in range(3):
        watch.add(step)
    json.dumps(watch.figures() | watch.slow_figures(), allow_nan=False)
    assert watch.figures()["objective"] is None


def test_the_curve_is_the_policys_or_what_adaptive_would_have_weighed(steps: list[Step]) -> None:
    step = decodes(steps)[2]
    found = objective(step, TABLE)
    assert found is not None
    assert found["own"]
    assert found["chosen"] == step.budget
    assert found["drafts"] == len(step.objective) - 1
    assert [found["chosen"], round(step.objective[step.budget], 4)] in found["curve"]
    assert all(round(step.objective[n], 4) == value for n, value in found["curve"])
    # The same step as fixed verification would leave it, without an objective.
    bare = objective(replace(step, objective=()), TABLE)
    assert bare is not None
    assert not bare["own"]
    stale = np.array([part.stale for part in step.requests])
    drafted = np.array([len(part.drafted) for part in step.requests])
    ones = np.ones(len(stale), np.int64)
    _, expected = budget_of(survival(stale, drafted), drafted, ones > 0, ones, TABLE)
    assert bare["curve"][0][0] == 0
    assert bare["curve"][-1][0] == drafted.sum()
    assert [v for _, v in bare["curve"]] == pytest.approx(
        [expected[n] for n, _ in bare["curve"]], abs=1e-4
    )
    assert objective(step, None) is None


def test_hindsight_stands_beside_it(steps: list[Step]) -> None:
    """The best budget by the curve that is sent, which knows what was accepted."""
    for step in decodes(steps)[:6]:
        found = objective(step, TABLE)
        assert found is not None
        best = max(value for _, value in found["after"])
        assert [found["best"], best] in found["after"]
        got = len(step.requests) + sum(part.accepted for part in step.requests)
        ms = TABLE.draft_ms(len(step.requests)) + TABLE.verify_ms(step.rows)
        assert best >= got / ms - 1e-3


def test_a_large_step_is_sent_in_few_points() -> None:
    rng = np.random.default_rng(1)
    parts = tuple(
        RequestStep(
            request=1000 + n, position=99, drafted=tuple(range(7)),
            expected=tuple(rng.uniform(0.1, 1, 7)), stale=tuple(rng.uniform(0.1, 1, 7)),
            admitted=3, accepted=1, token_ids=(0, 1), kinds=("accepted", "corrected"),
        )
        for n in range(128)
    )  # fmt: skip
    step = Step(index=77, rows=512, seconds=0.1, policy="adaptive", reason="x" * 60,
                objective=tuple(rng.uniform(1, 2, 897)), requests=parts)  # fmt: skip
    watch = Watch(TABLE)
    for _ in range(800):  # as many as the lines hold, and more
        watch.add(step)
    figures = watch.figures()
    assert len(figures["objective"]["curve"]) <= 100
    assert len(figures["lines"]) == round(SPAN / BUCKET)
    assert len(json.dumps(figures | watch.slow_figures())) < 24_000


def test_tiles_and_lines_are_sums_over_the_steps(steps: list[Step]) -> None:
    watch = Watch(TABLE)
    for step in steps:
        watch.add(step)
    counted = decodes(steps)[1:]  # the first is not
    last = [s for s in counted if s.policy][-1]  # a step without drafts is not shown
    assert counted[-1].policy == ""  # but counts
    same = [s for s in counted if len(s.requests) == len(last.requests)]
    tiles = {label: (value, note) for label, value, note in watch.figures()["tiles"]}
    seconds = sum(s.seconds for s in same)
    assert tiles["tokens/s"][0] == f"{sum(s.tokens for s in same) / seconds:,.0f}"
    drafted = sum(len(r.drafted) for s in same for r in s.requests)
    assert tiles["drafts verified"][0] == f"{sum(s.budget for s in same) / drafted:.0%}"
    events = [r for s in same for r in s.requests if r.drafted]
    length = 1 + sum(r.accepted for r in events) / len(events)
    assert tiles["acceptance length"] == (f"{length:.2f}", f"n = {len(events)} draft events")
    assert tiles["time deciding"][0] == f"{sum(s.decide_seconds for s in same) / seconds:.1%}"
    assert sum(bucket.sums.tokens for bucket in watch.buckets) == sum(s.tokens for s in counted)
    assert sum(bucket.sums.admitted for bucket in watch.buckets) == sum(s.budget for s in counted)
    times = [point[0] for point in watch.figures()["lines"]]
    assert times == sorted(times)
    assert times[-1] == 0


def test_a_ratio_is_of_the_same_number_of_sequences_and_of_enough_steps() -> None:
    def step(policy: str, requests: int, seconds: float) -> Step:
        part = RequestStep(request=0, position=3, drafted=(1,), expected=(0.5,), stale=(1.0,),
                           token_ids=(2,), kinds=("plain",))  # fmt: skip
        parts = tuple(replace(part, request=n) for n in range(requests))
        return Step(index=0, rows=1, seconds=seconds, policy=policy, requests=parts)

    watch = Watch(TABLE)
    watch.add(step("fixed", 4, 9.0))  # the first one counts nowhere

    def ratio() -> list[list[str]]:
        return [tile for tile in watch.figures()["tiles"] if tile[0].startswith("over ")]

    for _ in range(8):
        watch.add(step("fixed", 4, 0.2))
        watch.add(step("fixed", 2, 0.7))
    for _ in range(7):
        watch.add(step("adaptive", 4, 0.1))
    assert ratio() == [["over fixed", "–", "fixed: 20 tokens/s"]]
    watch.add(step("adaptive", 4, 0.1))
    assert ratio() == [["over fixed", "2.00 ×", "fixed: 20 tokens/s"]]
    watch.add(step("fixed", 4, 0.2))
    assert ratio() == [["over adaptive", "0.50 ×", "adaptive: 40 tokens/s"]]
    watch.focus = "adaptive"
    assert ratio() == [["over fixed", "2.00 ×", "fixed: 20 tokens/s"]]
    watch.add(step("adaptive", 2, 0.7))
    assert ratio() == [["over fixed", "–", "fixed: 3 tokens/s"]]


def test_a_shorter_length_is_told_by_what_it_brings() -> None:
    def step(policy: str, accepted: int, seconds: float) -> Step:
        part = RequestStep(request=0, position=3, drafted=(1, 2, 3), expected=(0.5,) * 3,
                           stale=(1.0,) * 3, admitted=accepted, accepted=accepted,
                           token_ids=(2,) * (accepted + 1), kinds=("plain",) * (accepted + 1),
                           )  # fmt: skip
        return Step(index=0, rows=4, seconds=seconds, policy=policy, requests=(part,))

    # fixed: 4 tokens in 0.4 s; adaptive 3 tokens in so many seconds
    for seconds, told in (
        (0.2, "50% more tokens/s: a gain"),
        (0.5, "40% fewer tokens/s: a loss"),
        (0.3, "the same tokens/s within 1%"),
    ):
        watch = Watch(TABLE)
        watch.add(step("fixed", 3, 9.0))  # the first one counts nowhere
        for _ in range(8):
            watch.add(step("fixed", 3, 0.4))
        for _ in range(7):
            watch.add(step("adaptive", 2, seconds))
        assert watch.figures()["verdict"] == ""  # too few
        watch.add(step("adaptive", 2, seconds))
        words = f"adaptive: 3.00 instead of 4.00, and {told}"
        assert watch.figures()["verdict"] == words
        watch.add(step("fixed", 3, 0.4))  # whoever's turn it is
        assert watch.figures()["verdict"] == words


def test_the_page_has_the_colours_of_the_figures(steps: list[Step]) -> None:
    look = adaptive_page.look()

    def color(view: views.View, name: str) -> str:
        found = [t for t in view.figure.data if t.name and f">{name}" in t.name]
        return str(found[0].line.color or found[0].marker.color)

    decided = next(s for s in reversed(steps) if s.objective and s.budget)
    budget = views.objective_curve(decided, TABLE)
    assert look["hindsight"] == color(budget, "in hindsight") == color(budget, "best in hindsight")
    assert look["chosen"] == color(budget, "expected by the policy") == color(budget, "chosen")
    run = views.decisions_over_time(steps, against=[replace(s, policy="fixed") for s in steps])
    assert look["policy"] == color(run, "adaptive")
    assert look["fixed"] == color(run, "fixed, for comparison")
    assert look["drafted"] == color(run, "drafted")
    trust = views.reliability_diagram(steps, after=3)
    assert look["start"] == color(trust, "first 3 steps")
    assert look["calibrated"] == color(trust, "later steps")
    script = (Path(adaptive_page.__file__).parent / "adaptive.js").read_text("utf-8")
    named = set(re.findall(r"\blook\.(\w+)", script))
    assert {"hindsight", "policy", "slots"} <= named <= set(look)


def test_reliability_is_told_of_the_start_and_of_what_came_after(steps: list[Step]) -> None:
    many = [replace(step, index=n) for n in range(20) for step in decodes(steps)]
    watch, learned = Watch(TABLE), Watch(TABLE, calibrated=True)
    for step in many:
        watch.add(step)
        learned.add(step)
    assert len(many) > 200
    found = watch.slow_figures()["reliability"]
    assert found["first"] == 100
    for name, part in (("early", many[:100]), ("late", many[100:])):
        expected = reliability(*(values[-4096:] for values in evidence(part)))
        assert found[name]["count"] == expected.count > 100
        assert found[name]["error"] == pytest.approx(expected.error, abs=6e-4)
        for (predicted, observed, count), of in zip(
            found[name]["bins"], expected.bins, strict=True
        ):
            assert count == of.count
            assert predicted == pytest.approx(of.predicted, abs=6e-4)
            assert observed == pytest.approx(of.observed, abs=6e-4)
    assert learned.slow_figures()["reliability"]["early"]["count"] == 0


def test_drift_is_said_with_its_alarm(steps: list[Step]) -> None:
    slow = [replace(s, draft_seconds=0.0015, verify_seconds=9.0, seconds=9.1) for s in steps]
    for several, alarm in ((steps, None), (slow, True)):
        watch = Watch(TABLE)
        for step in several:
            watch.add(step)
        costs = watch.slow_figures()["drift"]
        assert alarm is None or costs["alarm"] is alarm
        assert "verification at" in costs["sentence"]
        assert "keep=" not in costs["sentence"]  # the page has a button for it
    assert "drift" not in Watch().slow_figures()


def test_the_past_is_bounded_and_words_are_the_same_each_time(steps: list[Step]) -> None:
    watch, again = Watch(TABLE), Watch(TABLE)
    for n in range(3 * LAST_STEPS):
        watch.add(steps[n % len(steps)])
        again.add(replace(steps[n % len(steps)], seconds=0.5, decide_seconds=0.1))
    assert len(watch.steps) == LAST_STEPS
    assert watch.text == again.text
    assert watch.text.startswith("adaptive, 8 together: ")


# -- decoding -------------------------------------------------------------------------------------


def test_serving_keeps_as_many_as_are_wanted_and_writes_what_the_target_would(
    target: Beam, drafter: Drafter
) -> None:
    policies: dict[str, Policy] = {"fixed": Fixed(), "none": NoDrafts()}
    wanted = SimpleNamespace(concurrency=3, policy=policies["fixed"])
    run = decode(target, drafter, PROMPT_TEXTS[0], max_new_tokens=24, slots=8, policy=Fixed())
    written: dict[int, list[int]] = {}
    ended: dict[int, int] = {}
    counts: list[int] = []
    source = serving(run, PROMPT_TEXTS, lambda: wanted, 24)
    for number, step in enumerate(source):
        for part in step.requests:
            written.setdefault(part.request, []).extend(part.token_ids)
            if part.finished is not None:
                ended[part.request] = len(written[part.request])
        if step.phase == "decode":
            counts.append(len(step.requests))
            assert step.policy == wanted.policy.name
            assert len(step.requests) == wanted.concurrency
        assert len(run.generations) <= 8
        if number == 20:
            wanted.concurrency, wanted.policy = 6, policies["none"]
        if number == 60:
            wanted.concurrency = 2
        if number == 90:
            break
    source.close()  # type: ignore[attr-defined]
    assert set(counts) == {2, 3, 6}
    assert len(ended) > 6
    assert set(ended.values()) <= set(range(12, 25))
    assert len(set(ended.values())) > 3, "they end together"
    for tokens in written.values():
        assert tokens == cycle.written(len(tokens))


def test_turns_change_by_time_and_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(adaptive_board, "monotonic", lambda: now[0])
    turn, found = _Turn(), []
    for _ in range(40):
        found.append(turn.of("adaptive"))
        now[0] += 0.11
    changes = [n for n, (a, b) in enumerate(pairwise(found), 1) if a != b]
    assert set(found) == {"adaptive", "fixed"}
    assert all(9 <= b - a <= 11 for a, b in pairwise(changes))
    slow = _Turn()
    found = []
    for _ in range(16):
        found.append(slow.of("mine"))
        now[0] += 5.0
    assert found == ["mine"] * 4 + ["fixed"] * 4 + ["mine"] * 4 + ["fixed"] * 4


# -- the page -------------------------------------------------------------------------------------


def test_a_run_is_shown_and_controls_act_before_the_next_step(
    target: Beam, drafter: Drafter
) -> None:
    board = page_of(target, drafter)
    page = Page(board)
    press(board, "start")
    wait_for(lambda: len(page.updates) > 3)
    assert board.widget.state == "running"
    last = page.updates[-1]
    assert last["policy"] == "adaptive"
    assert len(last["rows"]["request"]) == 3
    assert last["status"].endswith("running")
    press(board, "change", policy="fixed", concurrency=9)
    wait_for(lambda: page.updates[-1]["policy"] == "fixed")
    wait_for(lambda: len(page.updates[-1]["rows"]["request"]) == 9)
    press(board, "pause")
    wait_for(lambda: board.widget.state == "paused")
    time.sleep(0.3)
    seen = board.watch.seen
    press(board, "step")
    wait_for(lambda: board.watch.seen == seen + 1)
    time.sleep(0.2)
    assert board.watch.seen == seen + 1
    press(board, "resume")
    wait_for(lambda: board.watch.seen > seen + 5)
    press(board, "stop")
    wait_for(lambda: board.widget.state == "ended")
    assert board.widget.status.endswith("stopped")
    assert {m["kind"] for m in page.messages} == {"reset", "update", "heard"}
    policies = {step.policy for step in board.steps if step.phase == "decode"}
    assert policies <= {"adaptive", "fixed"}
    assert "fixed, 9 together" in board.text


def test_updates_are_few_and_small(target: Beam, drafter: Drafter) -> None:
    board = page_of(target, drafter, concurrency=16)
    page = Page(board)
    board.start()
    time.sleep(1.5)
    board.stop()
    assert board.watch.decoded > 20
    gaps = [b - a for a, b in pairwise(page.times)]
    assert len(page.updates) <= 1.5 * HERTZ + 5
    assert sum(gap < 0.5 / HERTZ for gap in gaps) <= 4  # begin and end
    assert max(page.sizes) < 24_000
    slow = [m for m in page.updates if "reliability" in m]
    assert len(slow) < len(page.updates) / 2


def test_a_page_that_is_drawn_later_is_told_all_there_is(target: Beam, drafter: Drafter) -> None:
    board = page_of(target, drafter, autostart=False)
    press(board, "ready")
    assert board.run is None
    board.start()
    wait_for(lambda: board.watch.decoded > 4)
    board.stop()
    page = Page(board)
    press(board, "ready")
    assert [m["kind"] for m in page.messages] == ["reset", "update"]
    assert {"reliability", "drift", "rows", "objective"} <= set(page.messages[-1])
    live = page_of(target, drafter)
    press(live, "ready")
    wait_for(lambda: live.run is not None and live.watch.seen > 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"policy": "oracle"}, "policy must be one of 'adaptive', 'fixed', 'none', 'adaptive and"),
        ({"concurrency": 17}, "concurrency must be a whole number from 1 to 16, not 17"),
        ({"concurrency": True}, "concurrency must be"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temperature": -1}, "temperature must be 0"),
        ({"speculative_tokens": 0}, "speculative_tokens must be a whole number from 1"),
    ],
)
def test_what_no_run_can_be_started_with_is_said(
    target: Beam, drafter: Drafter, settings: dict[str, Any], said: str
) -> None:
    board = page_of(target, drafter)
    Page(board)
    press(board, "start", **settings)
    assert board.run is None
    assert board.widget.trouble
    assert said in board.widget.status
    with pytest.raises((DraftError, PromptError), match=said.split(",")[0]):
        board.change(**settings)
    with pytest.raises(DraftError, match="settings of this page are policy"):
        board.start(heat=1)
    board._message(None, "no message", None)
    board._message(None, {"kind": "change", "settings": 3}, None)


def test_a_change_that_is_refused_leaves_the_run_as_it_was(target: Beam, drafter: Drafter) -> None:
    board = page_of(target, drafter)
    Page(board)
    board.start()
    press(board, "change", policy="nobody's")
    assert "policy must be one of" in board.widget.status
    assert board.settings.policy == "adaptive"
    seen = board.watch.seen
    wait_for(lambda: board.watch.seen > seen + 3)
    board.stop()


def test_arguments_are_checked(target: Beam, drafter: Drafter, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no prompts"):
        views.adaptive(target, drafter, [])
    cycle.make(tmp_path)
    another = workbench.load(tmp_path / "target")
    with pytest.raises(DraftError, match="was loaded for another"):
        views.adaptive(another, drafter, PROMPT_TEXTS)
    with pytest.raises(DraftError, match="a policy has a name and decide"):
        views.adaptive(target, drafter, PROMPT_TEXTS, policy=3)  # type: ignore[arg-type]
    with pytest.raises(DraftError, match="concurrency must be"):
        page_of(target, drafter, concurrency=0)
    board = page_of(target, drafter, estimator=Estimator(3))
    Page(board)
    board.start()
    assert "the estimator is for 3 drafts" in board.widget.status
    assert views.adaptive(target, drafter, "one text")._prompts == ("one text",)


def even(situation: Any) -> Decision:
    admitted = np.minimum(situation.drafted, 2)
    return Decision(admitted=admitted, budget=int(admitted.sum()), reason="two each")


def test_a_policy_of_ones_own_is_one_more_in_the_menu(target: Beam, drafter: Drafter) -> None:
    mine = SimpleNamespace(name="two <b>each</b>", decide=even)
    board = page_of(target, drafter, policy=mine)
    page = Page(board)
    assert board.widget.choices["policies"][0] == "two <b>each</b>"
    assert f"two <b>each</b>{IN_TURN}" in board.widget.choices["policies"]
    board.start()
    wait_for(lambda: len(page.updates) > 2)
    assert page.updates[-1]["policy"] == "two <b>each</b>"
    assert page.updates[-1]["reason"] == "two each"
    assert set(page.updates[-1]["rows"]["admitted"]) <= {0, 1, 2}
    board.change(policy="adaptive")
    wait_for(lambda: page.updates[-1]["policy"] == "adaptive")
    board.stop()
    assert "<b>" not in board._static_html()
    taken = page_of(target, drafter, policy=SimpleNamespace(name="fixed", decide=even))
    assert taken.settings.policy == "fixed (yours)"


def test_a_policy_that_fails_is_said_and_the_run_goes_on(target: Beam, drafter: Drafter) -> None:
    class Broken:
        @property
        def name(self) -> str:
            raise RuntimeError("no name either")

        def decide(self, situation: Any) -> Decision:
            raise ValueError("on purpose")

    board = page_of(target, drafter, policy=Broken())
    page = Page(board)
    board.start()
    wait_for(lambda: len(page.updates) > 3)
    board.stop()
    last = page.updates[-1]
    assert last["failed"]
    assert "ValueError: on purpose; fixed verification in its place" in last["reason"]
    assert board.run.error is None


def test_costs_are_measured_first_where_no_table_was_given(
    target: Beam, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    hold, told = threading.Event(), threading.Event()

    def profile(beam: Beam, drafter: Drafter, **options: Any) -> CostTable:
        asked.append(options)
        for done in range(400):
            options["progress"](done, 400)
            if hold.wait(0.01):
                break
            if done > 30:
                told.set()
        return TABLE

    monkeypatch.setattr(adaptive_board, "profile", profile)
    board = page_of(target, drafter, table=None)
    page = Page(board)
    board.start(concurrency=5, temperature=0.5)
    told.wait(10)
    assert "measuring what steps cost here, once: " in board.widget.status
    assert board.table is None
    board.stop()  # while it measures
    assert board.widget.state == "ended"
    assert not page.updates
    hold.set()
    board.start()
    wait_for(lambda: len(page.updates) > 1)
    board.stop()
    assert board.table is TABLE
    assert page.updates[-1]["objective"] is not None
    assert [a["requests"] for a in asked] == [5, 5]
    assert asked[0]["sampling"] == Sampling(temperature=0.5)
    # Anew, whatever is known; and once for these settings.
    press(board, "measure")
    wait_for(lambda: board.watch.seen > 2)
    press(board, "start")
    wait_for(lambda: board.watch.seen > 2)
    board.stop()
    assert [a["keep"] for a in asked] == [True, True, False]


def test_what_fails_in_the_background_is_said_and_raised(
    target: Beam, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(*_: Any, **__: Any) -> CostTable:
        raise DraftError("this machine cannot be measured")

    monkeypatch.setattr(adaptive_board, "profile", profile)
    board = page_of(target, drafter, table=None)
    Page(board)
    board.start()
    with pytest.raises(DraftError, match="cannot be measured"):
        board.wait(10)
    assert board.widget.status == "DraftError: this machine cannot be measured"
    assert board.widget.trouble


def test_a_saved_page_says_what_it_is(target: Beam, drafter: Drafter) -> None:
    board = page_of(target, drafter)
    assert board.text.endswith("-- nothing decoded yet")
    bundle = board._repr_mimebundle_()
    assert bundle["text/plain"] == board.text
    assert "Decisions are shown here when the notebook runs" in bundle["text/html"]


def test_the_script_is_one_module_made_of_two() -> None:
    script = adaptive_page._script()
    assert script.count("export default") == 1
    assert "export default { render: renderAdaptive };" in script
    drafting = (Path(adaptive_page.__file__).parent / "drafting.js").read_text("utf-8")
    assert drafting.count(adaptive_page._EXPORT) == 1
    for name in ("make", "shape", "ink", "percent", "line", "point", "across", "below", "field",
                 "slider", "menu", "button"):  # fmt: skip
        assert f"\nfunction {name}(" in script or f"\nconst {name} = (" in script, name
    assert "innerHTML" not in script


@pytest.mark.full
def test_watching_costs_a_few_per_cent_of_processor_time() -> None:
    """Processor time of the whole process a step, watched and not, in turns."""
    beam = workbench.load("beam-tiny")
    drafter = workbench.load_drafter(beam)
    table = CostTable(draft=((1, 3.0), (32, 8.0)), verify=((1, 4.0), (32, 10.0), (256, 31.0)))
    session = Session(key=b"k")
    count = 40

    def not_watched() -> float:
        before, wanted = 0.0, SimpleNamespace(concurrency=32, policy=Adaptive(table))
        run = decode(beam, drafter, PROMPTS[0], max_new_tokens=96, slots=128, policy=Fixed())
        source = serving(run, PROMPTS, lambda: wanted, 96)
        for number, _ in enumerate(source):
            if number == 8:
                before = time.process_time()
            if number == 8 + count:
                break
        return (time.process_time() - before) / count

    def watched() -> float:
        board = views.adaptive(beam, drafter, PROMPTS, table=table, max_new_tokens=96)
        board.widget.send = lambda content: session.serialize(
            session.msg("comm_msg", content={"comm_id": "c", "data": {"content": content}})
        )
        board.step(8)
        wait_for(lambda: board.watch.seen == 8, 60)
        before = time.process_time()
        board.resume()
        wait_for(lambda: board.watch.seen >= 8 + count, 100)
        spent, seen = time.process_time() - before, board.watch.seen - 8
        board.stop()
        return spent / seen

    not_watched()
    pairs = [(not_watched(), watched()) for _ in range(6)]
    ratio = min(b for _, b in pairs) / min(a for a, _ in pairs)
    print(f"processor time a step, watched over not: {ratio:.3f}")
    assert ratio < 1.05
