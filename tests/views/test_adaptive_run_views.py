"""Views of runs and policies: values against counts made here, alarms, words, escaping, sizes."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from views import narrow
from workbench.errors import DraftError
from workbench.spec.adaptive import Decision, Situation
from workbench.spec.cost_table import CostTable
from workbench.spec.published import published
from workbench.spec.simulate import compare, parametric, simulate
from workbench.spec.simulation_result import SimulationResult
from workbench.spec.step import RequestStep, Step
from workbench.spec.sweep import SweepRow, sweep
from workbench.views import theme
from workbench.views.adaptive_costs import cost_curves
from workbench.views.adaptive_policies import LOOKS, policy_comparison
from workbench.views.adaptive_reliability import NOTHING, reliability_diagram
from workbench.views.adaptive_sweep import concurrency_sweep
from workbench.views.view import View

HOSTILE = "<script>alert(1)</script>"
TABLE = CostTable(draft=[(1, 0.5), (8, 1.2)], verify=[(1, 3.0), (16, 6.0), (64, 12.0)],
                  captured=16, label="measured: a bench")  # fmt: skip
DEAR = CostTable(draft=[(1, 0.4), (64, 2.0)], verify=[(1, 3.0), (8, 3.5), (512, 40.0)])


def made(
    count: int, *, requests: int = 4, policy: bool = True, bias: float = 0.0, slow: float = 1.0,
    seed: int = 0,
) -> list[Step]:  # fmt: skip
    """Steps whose drafts are accepted with their expected probability less ``bias``."""
    rng = random.Random(seed)
    steps = []
    for index in range(count):
        parts = []
        for request in range(requests):
            chances = [rng.uniform(0.3, 1.0) for _ in range(5)]
            admitted = rng.randrange(6)
            accepted = 0
            while accepted < admitted and rng.random() < chances[accepted] - bias:
                accepted += 1
            parts.append(
                RequestStep(
                    request=request, position=9 + index, drafted=(1, 2, 3, 4, 5),
                    confidences=tuple(min(1.0, c + 0.1) for c in chances),
                    expected=tuple(chances) if policy else (), admitted=admitted,
                    accepted=accepted, token_ids=(1,), kinds=("corrected",),
                )
            )  # fmt: skip
        rows = requests + sum(p.admitted for p in parts)
        steps.append(
            Step(
                index=index, rows=rows, draft_seconds=0.001,
                verify_seconds=slow * TABLE.verify_ms(rows) / 1e3, seconds=0.01,
                policy="adaptive" if policy else "", requests=tuple(parts),
            )
        )  # fmt: skip
    return steps


@pytest.fixture(scope="module")
def results() -> dict[str, SimulationResult]:
    source = parametric([0.9, 0.8, 0.7, 0.6], requests=24, tokens=24, seed=3)
    return compare(source, DEAR, concurrency=16, requests=40)


@pytest.fixture(scope="module")
def rows() -> tuple[SweepRow, ...]:
    source = parametric([0.9, 0.8, 0.7, 0.6], requests=24, tokens=24, seed=3)
    return sweep(source, DEAR, (1, 8, 64), requests=64)


def plain(text: str) -> str:
    return re.sub(r"<[^>]+>", "", text).replace("\u00a0", " ").strip()


def title(view: View) -> str:
    return plain(view.figure.layout.title.text.replace("<br>", " "))


def subtitle(view: View) -> str:
    return plain(view.figure.layout.title.subtitle.text.replace("<br>", " "))


def notes(view: View) -> list[str]:
    found = [plain(n.text.replace("<br>", " ")) for n in view.figure.layout.annotations]
    for trace in view.figure.data:
        if getattr(trace, "mode", "") == "text":
            found += [plain(word) for word in trace.text]
    return found


def named(view: View, name: str) -> list[Any]:
    return [t for t in view.figure.data if t.name and plain(t.name) == name]


def size(view: View) -> int:
    return len(json.dumps(view._repr_mimebundle_(), allow_nan=False).encode())


# -- reliability ----------------------------------------------------------------------------------


def pairs(steps: list[Step], survival: bool, of: str = "expected") -> list[tuple[float, bool]]:
    """Predictions and outcomes that are known, slot by slot."""
    found = []
    for part in (p for s in steps for p in s.requests):
        value = 1.0
        for slot, chance in enumerate(getattr(part, of)):
            value = value * chance if survival else chance
            judged = slot < part.admitted and slot <= part.accepted
            settled = survival and part.accepted < part.admitted  # a refusal refuses what follows
            if judged or settled:
                found.append((value, slot < part.accepted))
    return found


def error(found: list[tuple[float, bool]]) -> float:
    """Expected calibration error of 15 bins of equal mass."""
    order = sorted(found, key=lambda one: one[0])
    each, more = divmod(len(order), 15)
    total, at = 0.0, 0
    for b in range(15):
        part = order[at : at + each + (b < more)]
        at += len(part)
        total += abs(sum(p for p, _ in part) - sum(y for _, y in part))
    return total / len(order)


def test_reliability_has_bins_and_errors_of_both_kinds() -> None:
    steps = made(120)
    view = reliability_diagram(steps)
    for panel, survival in enumerate((False, True)):
        line = named(view, "calibrated")[panel]
        found = pairs(steps, survival)
        assert line.customdata[:, 2].sum() == len(found)
        assert len(line.x) == 15
        assert float((line.y * line.customdata[:, 2]).sum()) == pytest.approx(
            sum(y for _, y in found), rel=1e-5
        )
        assert float((line.x * line.customdata[:, 2]).sum()) == pytest.approx(
            sum(p for p, _ in found), rel=1e-5
        )
        own = pairs(steps, survival, "confidences")
        said = f"calibrated {error(found):.3f}, drafter {error(own):.3f}"
        assert any(said in note for note in notes(view)), said
        assert f"error {error(found):.3f} (n = {len(found):,} predictions)" in view.text
        # Wilson's bars hold the point.
        assert (line.error_y.array >= 0).all()
        assert (line.error_y.arrayminus >= 0).all()
    assert title(view).endswith(f"off by {100 * error(pairs(steps, True)):.1f} points on average")


def test_reliability_of_the_start_beside_later_steps() -> None:
    start, later = made(30, bias=0.25), made(90, seed=1)
    view = reliability_diagram([*start, *later], after=30)
    for panel, survival in enumerate((False, True)):
        first, rest = named(view, "first 30 steps")[panel], named(view, "later steps")[panel]
        assert first.customdata[:, 2].sum() == len(pairs(start, survival))
        assert rest.customdata[:, 2].sum() == len(pairs(later, survival))
        early, late = error(pairs(start, survival)), error(pairs(later, survival))
        assert early > 2 * late  # what was planted
        assert any(f"first {early:.3f}, later {late:.3f}" in note for note in notes(view))
        assert first.line.color != rest.line.color
        assert first.line.dash != rest.line.dash
    assert title(view).endswith("points in later steps")
    alone = reliability_diagram(start, after=30)
    assert named(alone, "later steps") == []
    assert "none of them later" in subtitle(alone)
    for after in (0, -1, True):
        with pytest.raises(DraftError, match="1 step or more"):
            reliability_diagram(start, after=after)


def test_reliability_without_a_policy_is_the_drafters_own() -> None:
    steps = made(40, policy=False)
    view = reliability_diagram(steps)
    assert named(view, "calibrated") == []
    assert len(named(view, "the drafter's own word")) == 2
    assert "no policy decided here" in subtitle(view)
    assert "calibrated" not in view.text
    for nothing in ([], made(0), [replace(s, requests=()) for s in steps]):
        view = reliability_diagram(nothing)
        assert view.text == NOTHING
        assert NOTHING in notes(view)
        assert title(view) == "Reliability of the confidences"


# -- costs ----------------------------------------------------------------------------------------


def test_cost_curves_are_the_tables_also_between_sizes() -> None:
    view = cost_curves(TABLE)
    (verify,) = named(view, "table, verification")
    (draft,) = named(view, "table, draft")
    for line, of in ((verify, TABLE.verify_ms), (draft, TABLE.draft_ms)):
        for x, y in zip(line.x.tolist(), line.y.tolist(), strict=True):
            assert y == pytest.approx(of(x), rel=1e-6)
    # Drawn as straight lines it is right at every size: the steps up to 16 rows, the line above.
    every = np.arange(1, 65)
    drawn = np.interp(every, verify.x, verify.y)
    assert drawn.tolist() == pytest.approx([TABLE.verify_ms(int(n)) for n in every], rel=1e-5)
    assert "no step measured beside it" in subtitle(view)
    assert "measured: a bench" in subtitle(view)
    assert "1 row 3.00, 16 rows 6.00, 64 rows 12.00" in view.text
    assert not named(view, "a pass")


def test_a_table_over_many_sizes_has_logarithmic_axes() -> None:
    wide = CostTable(draft=[(1, 1.0), (512, 6.0)], verify=[(1, 4.0), (16384, 326.0)])
    layout = cost_curves(wide).figure.layout
    assert layout.xaxis.type == layout.xaxis2.type == layout.yaxis.type == "log"
    assert layout.yaxis2.type is None  # 1 to 6 ms need none
    free = CostTable(draft=[(1, 0.0), (512, 6.0)], verify=[(1, 4.0)])
    assert cost_curves(free).figure.layout.yaxis2.type is None
    assert cost_curves(TABLE).figure.layout.xaxis.type is None


def test_measured_passes_stand_over_the_curves_and_drift_is_told() -> None:
    steps = made(60)
    view = cost_curves(TABLE, steps, source="measured on a test")
    assert "steps measured on a test" in subtitle(view)
    passes, medians = named(view, "a pass")[0], named(view, "median of a size")[0]
    assert passes.x.tolist() == [s.rows for s in steps]
    assert passes.y.tolist() == pytest.approx([1e3 * s.verify_seconds for s in steps], rel=1e-5)
    assert medians.x.tolist() == sorted({s.rows for s in steps})
    assert medians.customdata.sum() == 60
    assert medians.y.tolist() == pytest.approx(
        [TABLE.verify_ms(rows) for rows in sorted({s.rows for s in steps})], rel=1e-5
    )
    assert title(view) == "Costs of a step: as the cost table says"
    assert "verification 1.00 × the table" in notes(view)
    # 1 ms against the table's 1.2: four requests are padded to eight.
    assert "draft 0.83 × the table" in notes(view)
    slow = cost_curves(TABLE, made(60, slow=1.7))
    assert title(slow) == "Costs of a step: the cost table is off"
    assert theme.FULL in slow.figure.layout.title.text
    assert "verification, drifted 1.70 × the table" in notes(slow)
    assert "cost drift: verification at 1.70 ×" in subtitle(slow)
    assert "cost drift" in slow.text
    (marks,) = named(slow, "median of a size, drifted")
    assert (marks.marker.color, marks.marker.symbol) == (theme.FULL, "x")
    assert named(slow, "median of a size")[0].marker.color == theme.SPARSE  # drafts did not
    few = cost_curves(TABLE, made(3, slow=5))
    assert title(few) == "Costs of a step: few of them yet"


# -- policies -------------------------------------------------------------------------------------


def test_policies_have_their_figures_and_ratios(results: dict[str, SimulationResult]) -> None:
    view = policy_comparison(results)
    bars = [t for t in view.figure.data if isinstance(t, go.Bar)]
    fixed, adaptive, oracle = (results[n] for n in ("fixed", "adaptive", "oracle"))
    assert bars[0].x.tolist() == pytest.approx([r.tokens_per_second for r in results.values()])
    assert bars[1].x.tolist() == [r.admitted - r.accepted for r in results.values()]
    assert bars[2].x.tolist() == [r.missed for r in results.values()]
    assert bars[3].x.tolist() == pytest.approx(
        [r.acceptance_length for r in results.values()], rel=1e-6
    )
    points = [t for t in view.figure.data if getattr(t, "mode", "") == "markers"]
    assert points[0].x.tolist() == pytest.approx(
        [np.percentile(r.tpot_ms, 50) for r in results.values()], rel=1e-6
    )
    assert points[1].x.tolist() == pytest.approx(
        [np.percentile(r.tpot_ms, 99) for r in results.values()], rel=1e-6
    )
    change = adaptive.tokens_per_second / fixed.tokens_per_second - 1
    share = (adaptive.tokens_per_second - fixed.tokens_per_second) / (
        oracle.tokens_per_second - fixed.tokens_per_second
    )
    assert change > 0  # what this table is made for
    assert title(view) == f"Adaptive: {100 * change:+.1f} % tokens/s"
    assert subtitle(view).startswith(f"against fixed, {100 * share:.0f} % of the oracle's gain")
    assert subtitle(view)[: subtitle(view).index(" ·")] in view.text
    assert f"{adaptive.tokens_per_second:,.0f} ({100 * change:+.1f} %)" in notes(view)
    assert "nothing drafted" in notes(view)
    assert "modelled" in subtitle(view)
    assert [plain(t) for t in view.figure.layout.yaxis.ticktext] == [
        "none (plain)", "fixed", "adaptive", "oracle",
    ]  # fmt: skip
    assert len({(color, pattern) for color, pattern, *_ in LOOKS.values()}) == len(LOOKS)
    assert len(view.text.splitlines()) == 7
    assert policy_comparison({}).text == "there is no policy to compare"


def test_policies_stand_one_above_the_other_and_a_shorter_length_is_told_by_what_it_brings(
    results: dict[str, SimulationResult],
) -> None:
    layout = policy_comparison(results).figure.layout
    assert all(axis.domain is None for axis in policy_comparison(results).figure.select_xaxes())
    sides = [layout[f"yaxis{n}"].domain for n in ("", "2", "3", "4")]
    assert all(low > high for (low, _), (_, high) in itertools.pairwise(sides))
    short = replace(results["fixed"], acceptance_length=results["fixed"].acceptance_length - 0.5)
    lengths = (
        f"acceptance length {short.acceptance_length:.2f} instead of "
        f"{results['fixed'].acceptance_length:.2f}, "
    )
    for factor, told in ((1.2, "a gain all the same: the rows"), (0.9, "no gain: the rows")):
        speed = factor * results["fixed"].tokens_per_second
        view = policy_comparison(
            {"fixed": results["fixed"], "adaptive": replace(short, tokens_per_second=speed)}
        )
        assert lengths + told in subtitle(view)
        assert lengths + told in view.text
    same = replace(results["fixed"], tokens_per_second=1e4)
    view = policy_comparison({"fixed": results["fixed"], "adaptive": same})
    assert "instead of" not in subtitle(view)


def test_what_failed_or_was_estimated_is_said(results: dict[str, SimulationResult]) -> None:
    class Broken:
        name = "mine"

        def decide(self, situation: Situation) -> Decision:
            raise ValueError("no")

    source = parametric([0.9, 0.8, 0.7, 0.6], requests=24, tokens=24, seed=3)
    mine = simulate(source, Broken(), DEAR, concurrency=16, requests=40)
    view = policy_comparison({"fixed": results["fixed"], "mine": mine})
    said = f"mine failed in {mine.steps} of {mine.steps} steps, fixed verification in their place"
    assert said in subtitle(view)
    assert said in view.text
    assert title(view) == "Policies of verification"
    how = "verdicts beyond what was verified were drawn"
    some = replace(results["adaptive"], estimated=True, estimated_how=how, estimated_events=3)
    view = policy_comparison({**results, "adaptive": some})
    assert f"in part estimated (adaptive): {how}" in subtitle(view)
    assert "estimated" not in subtitle(policy_comparison(results))
    with pytest.raises(DraftError, match="same requests"):
        policy_comparison({"a": mine, "b": replace(mine, concurrency=3)})


# -- sweep ----------------------------------------------------------------------------------------


def test_a_sweep_has_changes_over_the_concurrency(rows: tuple[SweepRow, ...]) -> None:
    view = concurrency_sweep(rows[::-1])  # sorted by itself
    for name, line_name in (("adaptive", "adaptive, modelled"), ("oracle", "oracle, modelled"),
                            ("none", "plain decoding")):  # fmt: skip
        rate, p99 = named(view, line_name)
        assert rate.x.tolist() == p99.x.tolist() == [1, 8, 64]
        for place, row in enumerate(rows):
            mine, fixed = row.policies[name], row.policies["fixed"]
            assert rate.y[place] == pytest.approx(
                100 * (mine.tokens_per_second / fixed.tokens_per_second - 1), abs=1e-3
            )
            assert p99.y[place] == pytest.approx(
                100 * (mine.tpot_p99_ms / fixed.tpot_p99_ms - 1), abs=1e-3
            )
    layout = view.figure.layout
    assert layout.xaxis.type == layout.xaxis2.type == "log"
    assert list(layout.xaxis2.ticktext) == ["1", "2", "4", "8", "16", "32", "64"]
    assert "lines modelled" in subtitle(view)
    # The axes hold adaptive and oracle; plain decoding beyond them is said in words.
    low, high = layout.yaxis.range
    for name in ("adaptive, modelled", "oracle, modelled"):
        assert low < named(view, name)[0].y.min() <= named(view, name)[0].y.max() < high
    outside = [y for y in named(view, "plain decoding")[0].y if not low <= y <= high]
    assert outside
    assert f"plain: −{-min(outside):.1f} % ↓" in notes(view)
    assert not named(view, "published")


def test_measured_and_published_points(rows: tuple[SweepRow, ...]) -> None:
    points = [
        {"concurrency": 8, "ratio": 1.25, "low": 1.2, "high": 1.32, "p99_ratio": 0.9,
         "label": "code"},
        SimpleNamespace(concurrency=8, ratio=0.98, label="prose"),
    ]  # fmt: skip
    view = concurrency_sweep(rows, measured=points, published=published())
    code, waiting = named(view, "measured: code")
    assert code.y.tolist() == pytest.approx([25.0], abs=1e-3)
    assert code.error_y.array.tolist() == pytest.approx([7.0], abs=1e-3)
    assert code.error_y.arrayminus.tolist() == pytest.approx([5.0], abs=1e-3)
    assert waiting.y.tolist() == pytest.approx([-10.0], abs=1e-3)
    (prose,) = named(view, "measured: prose")  # its p99 is not known
    assert prose.y.tolist() == pytest.approx([-2.0], abs=1e-3)
    assert not prose.error_y.array.any()
    assert code.x[0] != prose.x[0]  # side by side
    assert "+25.0 % (+20.0 % to +32.0 %, 95 %)" in plain(code.hovertext[0])
    star, star99 = named(view, "published")
    assert (list(star.x), list(star.y)) == ([128], [pytest.approx(10.8)])
    assert list(star99.y) == [-9.0]
    assert {"+10.8 %", "−9.0 %"} <= set(notes(view))
    assert "measured at 8 (code): tokens/s +25.0 %" in view.text
    assert "measured at 8 (prose): tokens/s −2.0 %" in view.text
    assert "published at 128: tokens/s +10.8 %, p99 TPOT −9.0 %" in view.text
    assert "star: published, another machine, model and drafter" in subtitle(view)
    low, high = view.figure.layout.yaxis.range
    assert low < -2.0 < 32.0 < high
    alone = concurrency_sweep([], measured=points)
    assert "lines modelled" not in subtitle(alone)
    assert len(named(alone, "measured: code")) == 2
    for bad in ({"ratio": 1.0}, {"concurrency": 8}, {"concurrency": 0, "ratio": 1.0},
                {"concurrency": 8, "ratio": float("nan")}):  # fmt: skip
        with pytest.raises(DraftError, match="a concurrency and a ratio"):
            concurrency_sweep(rows, measured=[bad])
    assert concurrency_sweep([]).text == "the sweep has no concurrency yet"


# -- all of them ----------------------------------------------------------------------------------


def every(
    steps: list[Step], results: dict[str, SimulationResult], rows: tuple[SweepRow, ...],
    name: str = "a",
) -> dict[str, View]:  # fmt: skip
    table = replace(TABLE, label=name)
    point = {"concurrency": 8, "ratio": 1.1, "low": 1.0, "high": 1.2, "label": name}
    some = {**results, name: replace(results["adaptive"], label=name, estimated=True,
                                     estimated_how=name, failed_steps=2)}  # fmt: skip
    return {
        "reliability": reliability_diagram(steps, source=f"measured: {name}"),
        "reliability after": reliability_diagram(steps, after=20, source=f"measured: {name}"),
        "costs": cost_curves(table, steps, source=f"measured: {name}"),
        "policies": policy_comparison(some if results else {}),
        "sweep": concurrency_sweep(rows, measured=[point], published=published()),
    }


@pytest.mark.parametrize("count", [0, 1, 200])
def test_views_are_the_same_every_time_and_small(
    count: int, results: dict[str, SimulationResult], rows: tuple[SweepRow, ...]
) -> None:
    steps = made(count, requests=12)
    once, twice = (every(steps, results, rows) for _ in range(2))
    for name, view in once.items():
        assert view._repr_mimebundle_() == twice[name]._repr_mimebundle_(), name
        assert size(view) < 30_000, name
        assert "nan" not in view.text.lower().split(), name
        assert "None" not in view.text, name
        narrow.check(view, name)
        layout = view.figure.layout
        assert layout.title.text.startswith("<span style="), name
        assert layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
        for axis in [*view.figure.select_xaxes(), *view.figure.select_yaxes()]:
            if axis.title.text:
                assert axis.title.text.startswith("<span style="), name
        for trace in view.figure.data:
            if trace.name and trace.showlegend is not False:
                assert trace.name.startswith("<span style="), (name, trace.name)
                assert len(trace.x), (name, trace.name)


def test_names_never_become_markup(
    results: dict[str, SimulationResult], rows: tuple[SweepRow, ...]
) -> None:
    steps = made(60, slow=2.0)
    hostile = every(steps, results, (*rows, replace(rows[0], concurrency=3, label=HOSTILE)),
                    HOSTILE)  # fmt: skip
    for name, view in hostile.items():
        drawn = json.dumps(json.loads(view.figure.to_json()), ensure_ascii=False)
        assert "<script" not in drawn, name
        assert "&lt;script&gt;" in drawn, name
        assert "<script" not in view._repr_mimebundle_()["text/html"], name
