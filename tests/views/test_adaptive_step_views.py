"""Views of adaptive verification, one step and its time line: values, marks, words, sizes."""

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest

from views import narrow
from views.spec_steps import block
from views.spec_steps import run as made_up
from workbench.errors import DraftError
from workbench.spec.adaptive import Adaptive, Situation
from workbench.spec.cost_table import CostTable
from workbench.spec.hindsight import hindsight
from workbench.spec.step import RequestStep, Step
from workbench.views import theme
from workbench.views.adaptive_objective import objective_curve
from workbench.views.adaptive_survival import survival_map
from workbench.views.adaptive_time import decisions_over_time
from workbench.views.view import View

TABLE = CostTable(draft=((1, 0.5), (128, 2.0)), verify=((1, 4.0), (32, 8.0), (1024, 130.0)),
                  captured=4, label="made up")  # fmt: skip
HOSTILE = "<script>alert(1)</script>"


def decided(
    requests: int, *, drafted: int = 7, seed: int = 0, index: int = 12, seconds: float = 0.02
) -> Step:
    """A step that the engine's policy decided, its verdicts drawn."""
    rng = random.Random(seed)
    live = np.array([[rng.random() ** 0.4 for _ in range(drafted)] for _ in range(requests)])
    stale = np.clip(live * np.array([rng.uniform(0.8, 1.1) for _ in range(drafted)]), 0, 1)
    ones = np.ones(requests, np.int64)
    situation = Situation(drafted=ones * drafted, plain=ones, samples=ones > 0, stale=stale,
                          live=live)  # fmt: skip
    decision = Adaptive(TABLE).decide(situation)
    parts = []
    for r in range(requests):
        admitted = int(decision.admitted[r])
        accepted = next((i for i in range(admitted) if rng.random() > live[r, i]), admitted)
        made = block(rng, r, 40 + r, drafted=drafted, admitted=admitted, accepted=accepted)
        parts.append(replace(made, expected=tuple(live[r]), stale=tuple(stale[r])))
    return Step(
        index=index, rows=requests + decision.budget, seconds=seconds, requests=tuple(parts),
        verify_seconds=seconds / 2, decide_seconds=seconds / 100, policy="adaptive",
        reason=decision.reason, objective=tuple(decision.objective.tolist()),
    )  # fmt: skip


def failed(step: Step) -> Step:
    reason = f"policy {HOSTILE} failed: {HOSTILE}; fixed verification in its place"
    return replace(step, policy=HOSTILE, reason=reason, objective=())


def plain(text: str) -> str:
    return re.sub(r"<[^>]+>", "", text.replace("<br>", " ")).strip()


def named(view: View) -> dict[str, Any]:
    return {plain(t.name): t for t in view.figure.data if t.name and t.showlegend is not False}


def subtitle(view: View) -> str:
    words = re.sub(r"<br>", " ", view.figure.layout.title.subtitle.text)
    return plain(words).replace("\u00a0", " ")


def size(view: View) -> int:
    return len(json.dumps(view._repr_mimebundle_(), allow_nan=False).encode())


def heat(view: View) -> Any:
    return next(t for t in view.figure.data if t.type == "heatmap")


# -- the survival map -----------------------------------------------------------------------------


def survivals(part: RequestStep) -> list[float]:
    values, chance = [], 1.0
    for each in part.expected:
        chance *= each
        values.append(chance)
    return values


@pytest.mark.parametrize("requests", [1, 9, 32, 64, 128])
def test_survival_map_has_every_request_sorted_with_its_frontier(requests: int) -> None:
    step = decided(requests, seed=requests)
    view = survival_map(step)
    z = np.array(heat(view).z)
    order = sorted(step.requests, key=lambda p: -sum(survivals(p)))
    assert z == pytest.approx(np.array([survivals(p) for p in order]), abs=1e-6)
    told = np.array(heat(view).customdata)
    assert told.shape == (requests, 7, 3)
    assert (told == told[:, :1]).all()
    wanted = [[p.request, p.admitted, p.accepted] for p in order]
    assert told[:, 0].tolist() == wanted
    line = named(view)["frontier: verified to its left"]
    assert line.line.shape == "vh"  # so each row has one x, from its upper edge down
    assert list(line.x[:-1]) == [p.admitted + 0.5 for p in order]
    assert list(line.y) == [row - 0.5 for row in range(requests + 1)]
    low, high = view.figure.layout.yaxis.range
    assert (low, high) == (requests - 0.5, -0.5)
    assert size(view) < 30_000
    in_order = survival_map(step, sort="request")
    assert np.array(heat(in_order).customdata)[:, 0, 0].tolist() == list(range(requests))


def test_survival_map_marks_each_slot_by_its_fate() -> None:
    step = decided(12, seed=1)
    view = survival_map(step, sort="request")
    counts = Counter[str]()
    for part in step.requests:
        counts["✓ accepted"] += part.accepted
        counts["✗ refused"] += part.rejected > 0
        counts["(✗) behind a refused one, verified in vain"] += max(0, part.rejected - 1)
        counts["○ trimmed, never verified"] += part.trimmed
    assert min(counts.values()) > 0
    for name, count in counts.items():
        assert f"{name} ({count})" in named(view), name
    texts = [t for t in view.figure.data if t.type == "scatter" and t.mode == "text"]
    found = {plain(t.text): set(zip(t.x.tolist(), t.y.tolist(), strict=True)) for t in texts}
    each = list(enumerate(step.requests))
    assert found["✓"] == {(s, r) for r, p in each for s in range(1, p.accepted + 1)}
    assert found["✗"] == {(p.accepted + 1, r) for r, p in each if p.accepted < p.admitted}
    assert found["(✗)"] == {(s, r) for r, p in each for s in range(p.accepted + 2, p.admitted + 1)}
    assert found["○"] == {(s, r) for r, p in each for s in range(p.admitted + 1, 8)}
    # Where rows are low, refusals alone; the rest follows from them and the frontier.
    low = decided(90, seed=1)
    low = replace(low, requests=(*step.requests, *low.requests))
    found_low = named(survival_map(low, sort="request"))
    refused = [(p.accepted + 1, r) for r, p in enumerate(low.requests) if p.rejected]
    mark = found_low[f"refused, all to its left accepted ({len(refused)})"]
    assert list(zip(mark.x.tolist(), mark.y.tolist(), strict=True)) == refused
    vain = sum(max(0, p.rejected - 1) for p in low.requests)
    assert vain > 0
    assert len(found_low[f"behind it, verified in vain ({vain})"].x) == vain


def test_survival_map_says_what_it_shows() -> None:
    step = decided(5, seed=1)
    drafted, accepted = 35, sum(p.accepted for p in step.requests)
    view = survival_map(step, source="made up here")
    words = f"{step.budget} of {drafted} drafts verified, {accepted} of them accepted"
    assert subtitle(view).startswith(f"made up here · {words} · adaptive: {step.reason}")
    assert view.text.startswith(f"step 12: {words}")
    first = max(step.requests, key=lambda p: sum(survivals(p)))
    signs = "✓" * first.accepted + "✗" * first.rejected + "○" * first.trimmed
    numbers = " ".join(f"{s:.2f}" for s in survivals(first))
    assert view.text.splitlines()[2].split(maxsplit=2) == [str(first.request), signs, numbers]
    some = survival_map(decided(40), most=10)
    assert "10 of 40 requests shown" in subtitle(some)
    assert np.array(heat(some).z).shape == (10, 7)
    wide = survival_map(decided(128, drafted=63))
    assert size(wide) < 30_000
    assert "15 of 128 requests shown" in subtitle(wide)


def test_survival_map_without_an_estimator_takes_the_drafters_word() -> None:
    step = decided(4)
    own = replace(step, requests=tuple(replace(p, expected=(), stale=()) for p in step.requests))
    view = survival_map(own, sort="request")
    assert "the drafter's own, not calibrated" in subtitle(view)
    wanted = [np.cumprod(p.confidences).tolist() for p in own.requests]
    assert np.array(heat(view).z) == pytest.approx(np.array(wanted), abs=1e-6)


def test_survival_map_of_unequal_blocks_and_of_no_numbers() -> None:
    rng = random.Random(2)
    parts = [
        replace(block(rng, 0, 9, drafted=7), expected=(0.5,) * 7),
        replace(block(rng, 1, 9, drafted=3), expected=(0.5, nan, 0.5)),
        RequestStep(request=2, position=9, token_ids=(5,), kinds=("plain",)),
    ]
    view = survival_map(Step(index=0, rows=13, seconds=0.1, requests=tuple(parts)))
    z = np.array(heat(view).z)
    assert z.shape == (2, 7)
    assert z[1, 0] == 0.5
    assert np.isnan(z[1, 1:]).all()
    assert "0.50 ? ?" in view.text
    assert size(view) > 0  # JSON without NaN


# -- the objective --------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [1, 32, 128])
def test_objective_curve_marks_chosen_and_hindsight(requests: int) -> None:
    step = decided(requests, seed=requests)
    view = objective_curve(step, TABLE)
    best = hindsight(step, TABLE)
    found = named(view)
    line = found["expected by the policy"]
    assert [line.y[0], line.y[-1]] == pytest.approx([step.objective[0], step.objective[-1]])
    assert (line.x[0], line.x[-1]) == (0, 7 * requests)
    assert all(
        y == pytest.approx(step.objective[x], rel=1e-6) for x, y in zip(line.x, line.y, strict=True)
    )
    chosen = found[f"chosen: {step.budget} draft{'s' * (step.budget != 1)}"]
    assert chosen.x[0] == step.budget == int(np.argmax(step.objective))
    assert chosen.y[0] == max(step.objective)
    star = found[f"best in hindsight: {best.budget} draft{'s' * (best.budget != 1)}"]
    assert (star.x[0], star.y[0]) == (best.budget, best.best)
    got = found["what it got"]
    ms = TABLE.draft_ms(requests) + TABLE.verify_ms(step.rows)
    assert (got.x[0], got.y[0]) == (step.budget, pytest.approx(step.tokens / ms))
    cost = found["cost of a step by the table"]
    at = list(cost.x).index(7 * requests)
    assert cost.y[at] == pytest.approx(TABLE.draft_ms(requests) + TABLE.verify_ms(8 * requests))
    assert {s.x0 for s in view.figure.layout.shapes} == {step.budget}
    estimated = not best.exact
    assert ("in hindsight, estimated" in found) is estimated
    assert ("estimated: nobody judged" in view.text) is estimated
    assert step.reason in subtitle(view)
    assert subtitle(view).endswith("times: made up")
    assert size(view) < 30_000


def test_objective_curve_with_every_verdict_is_exact() -> None:
    step = decided(12, seed=5)
    known = [p.accepted for p in step.requests]
    assert "estimated" in objective_curve(step, TABLE).text
    view = objective_curve(step, TABLE, known=known)
    assert "estimated" not in view.text + subtitle(view)
    after = named(view)["in hindsight"]
    ms = [TABLE.draft_ms(12) + TABLE.verify_ms(12 + b) for b in range(85)]
    wanted = [(12 + min(b, sum(known))) / each for b, each in enumerate(ms)]
    assert list(after.y) == pytest.approx(wanted)
    with pytest.raises(DraftError, match="contradict"):
        objective_curve(step, TABLE, known=[9] * 12)


def test_objective_curve_of_other_policies() -> None:
    step = decided(4, seed=2)
    fixed = replace(step, policy="fixed", reason="all drafts", objective=())
    found = named(objective_curve(fixed, TABLE))
    assert "expected by the policy" not in found
    assert any(name.startswith(f"chosen: {step.budget} drafts, what it got") for name in found)
    view = objective_curve(failed(step), TABLE)
    assert plain(view.figure.layout.title.text).endswith(": the policy failed")
    assert "fixed verification in its place" in subtitle(view)
    assert any(name.startswith("fixed in its place: ") for name in named(view))
    step = decided(12, seed=0)
    lost = survival_map(failed(step))
    assert plain(lost.figure.layout.title.text).endswith(": the policy failed")
    assert lost.text.splitlines()[0].endswith("; fixed verification in its place")
    blind = replace(step, requests=tuple(replace(p, expected=()) for p in step.requests))
    view = objective_curve(blind, TABLE)
    assert "no hindsight: request" in view.text
    assert "in hindsight" not in named(view)
    assert "expected by the policy" in named(view)


# -- over time ------------------------------------------------------------------------------------


def trail(count: int, *, seconds: float, budget: int, accepted: int, policy: str) -> list[Step]:
    """Steps of two requests, always the same."""
    rng = random.Random(0)
    steps = []
    for index in range(count):
        parts = tuple(
            block(rng, r, 20 + index, admitted=budget, accepted=accepted) for r in range(2)
        )
        steps.append(Step(index=index, rows=2 + 2 * budget, seconds=seconds, requests=parts,
                          decide_seconds=seconds / 50, policy=policy))  # fmt: skip
    return steps


def test_decisions_over_time_draws_three_panels() -> None:
    steps = [*made_up(0), *trail(40, seconds=0.5, budget=4, accepted=3, policy="adaptive")]
    view = decisions_over_time(steps, window=8)
    found = [t for t in view.figure.data if plain(t.name) == "adaptive"]
    assert [t.yaxis or "y" for t in found] == ["y", "y2", "y3"]
    for trace, value in zip(found, (8.0, 2 * 4 / 0.5, 4.0), strict=True):
        assert list(trace.y) == pytest.approx([value] * 40)
        assert list(trace.x) == pytest.approx([0.5 * (n + 1) for n in range(40)])
    assert list(named(view)["drafted"].y) == pytest.approx([14.0] * 40)
    assert list(decisions_over_time(steps, over="step").figure.data[1].x) == list(range(1, 41))
    headings = [plain(n.text) for n in view.figure.layout.annotations]
    assert headings == [
        "drafts verified", "speed: what counts", "acceptance length: trimming shortens it",
    ]  # fmt: skip
    assert view.text == (
        "adaptive: 40 decode steps, 320 tokens; 57% of 560 drafts verified · acceptance length "
        "4.00 · 16 tokens/s, 2.0% of the time for deciding"
    )


FIXED = trail(30, seconds=0.5, budget=7, accepted=4, policy="fixed")  # 10 tokens in 0.5 s


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.32, "25.0% more tokens/s: a gain, the rows it saved were worth more than the tokens"),
        (0.5, "20.0% fewer tokens/s: a loss, the tokens given up were worth more than the rows"),
        (0.401, "the same tokens/s within 1 %: neither gain nor loss"),
    ],
)
def test_a_shorter_length_is_told_by_what_it_brings(seconds: float, told: str) -> None:
    steps = trail(30, seconds=seconds, budget=4, accepted=3, policy="adaptive")
    view = decisions_over_time(steps, against=FIXED)
    words = f"acceptance length 4.00 instead of 5.00 and {told}"
    assert words in view.text
    assert words in subtitle(view)
    assert "the runs gave 240 and 300 tokens" in view.text
    lines = [t for t in view.figure.data if plain(t.name) == "fixed, for comparison"]
    assert [list(t.y)[-1] for t in lines] == pytest.approx([14.0, 20.0, 5.0])
    low, high = view.figure.layout.xaxis3.range
    assert low == 0
    assert high > max(0.5, seconds) * 30


def test_decisions_compared_with_what_cannot_be() -> None:
    steps = trail(5, seconds=0.5, budget=4, accepted=3, policy="adaptive")
    assert "has no decode step" in decisions_over_time(steps, against=[]).text
    still = [replace(s, seconds=0.0) for s in FIXED]
    assert "no time is known" in decisions_over_time(steps, against=still).text
    undrafted = [s for s in made_up(20, drafted=0, requests=2) if s.phase == "decode"]
    text = decisions_over_time(steps, against=undrafted).text
    assert "more tokens/s" in text or "fewer tokens/s" in text
    assert "acceptance length undefined: nothing was drafted" in text


def test_decisions_mark_the_steps_in_which_a_policy_failed() -> None:
    steps = [decided(3, seed=n, index=n) for n in range(10)]
    steps[4], steps[7] = failed(steps[4]), failed(steps[7])
    view = decisions_over_time(steps, over="step")
    marks = named(view)["the policy failed (2 steps)"]
    assert list(marks.x) == [5, 8]
    assert f"in 2 steps: policy {HOSTILE} failed" in view.text


# -- all of them ----------------------------------------------------------------------------------


def every(step: Step, steps: Sequence[Step], against: Sequence[Step] | None) -> dict[str, View]:
    return {
        "survival": survival_map(step),
        "objective": objective_curve(step, TABLE),
        "time": decisions_over_time(steps, against=against),
    }


PREFILL = made_up(0)[0]
PLAIN = next(s for s in made_up(9) if s.phase == "decode" and not s.requests[0].drafted)
LONG = [decided(2, seed=n, index=n) for n in range(700)]
CASES: dict[str, tuple[Step, list[Step], list[Step] | None]] = {
    "one": (decided(1), [decided(1)], None),
    "usual": (decided(32), [decided(32, seed=n, index=n) for n in range(40)], FIXED),
    "most": (decided(128), LONG, LONG),
    "one slot": (decided(6, drafted=1), [decided(6, drafted=1)], FIXED),
    "failed": (failed(decided(3)), [failed(decided(3))], None),
    "prefill": (PREFILL, [PREFILL], [PREFILL]),
    "nothing drafted": (PLAIN, [PLAIN], None),
    "no requests": (Step(index=0, rows=0, seconds=0.0, requests=()), [], []),
    "no policy": (made_up(3, requests=4)[-1], made_up(30, requests=4), None),
}


@pytest.mark.parametrize("case", CASES)
def test_every_view_of_every_step(case: str) -> None:
    once, twice = every(*CASES[case]), every(*CASES[case])
    for name, view in once.items():
        bundle = view._repr_mimebundle_()
        assert bundle == twice[name]._repr_mimebundle_(), name
        assert size(view) < 30_000, name
        assert HOSTILE not in json.dumps({**bundle, "text/plain": ""}), name
        assert "nan" not in view.text.lower().split(), name
        narrow.check(view, name)
        layout = view.figure.layout
        assert "measured here" in subtitle(view), name
        assert layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
        for axis in [*view.figure.select_xaxes(), *view.figure.select_yaxes()]:
            if axis.title.text:
                assert axis.title.text == theme.ink(plain(axis.title.text)), name
        for trace in view.figure.data:  # every mark has a place
            if trace.name and trace.showlegend is not False:
                assert len(trace.x), (name, trace.name)


def test_views_of_nothing_say_so() -> None:
    for view, words in (
        (survival_map(PREFILL), "survival of step 0: a prefill drafts nothing"),
        (survival_map(PLAIN), f"survival of step {PLAIN.index}: nothing was drafted"),
        (objective_curve(PREFILL, TABLE), "budget of step 0: a prefill drafts nothing"),
        (objective_curve(PLAIN, TABLE), f"budget of step {PLAIN.index}: nothing was drafted"),
        (decisions_over_time([]), "decisions over time: there is no decode step"),
    ):
        assert view.text == words
        assert plain(view.figure.layout.annotations[0].text) == words.split(": ")[1]


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(DraftError, match="at least one row"):
        survival_map(PLAIN, most=0)
    with pytest.raises(DraftError, match="sorted by survival or request"):
        survival_map(PLAIN, sort="size")  # type: ignore[arg-type]
    with pytest.raises(DraftError, match="over time or step"):
        decisions_over_time([], over="tokens")  # type: ignore[arg-type]
    with pytest.raises(DraftError, match="a window is a whole number"):
        decisions_over_time([], window=0)
