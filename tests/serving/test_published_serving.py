"""Published figures beside a plan's roofline, recordings and what a server's metrics say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from workbench.datasheet import sheet
from workbench.kernels.rank.recorded_runs import recorded_decode
from workbench.kernels.roofline import data_sheet_rates
from workbench.model.asked import SizingError
from workbench.model.layout import Layout
from workbench.model.plan import Plan, make_plan
from workbench.model.presets import beam_501b
from workbench.model.references import comparisons
from workbench.model.steptime import decode_step
from workbench.model.weights import PRECISIONS
from workbench.serving.monitor.sample import Sample
from workbench.serving.monitor.spread import Spread
from workbench.serving.published_row import KINDS, Figure, Row
from workbench.serving.published_serving import LENGTH, PublishedBeside, beside_published

DECODE, DRAFTED, SINGLE, LENGTHS, MANY, GAIN, TAIL, PREFILL, PROMPTS = range(9)
ASKED: dict[str, Any] = {"weights": "nvfp4", "context": 131_072, "sequences": 32}
PLAN = make_plan("beam-501b", "GB200", gpus=8, drafter="beam-501b-dflash2", **ASKED)


@pytest.fixture(scope="module")
def nothing() -> PublishedBeside:
    return beside_published(PLAN)


def values(row: Row, kind: Any) -> list[float]:
    return [one.value for one in row.of(kind)]


def only(row: Row) -> Figure:
    (found,) = row.of("measured here")
    return found


# -- published, modelled, recorded ------------------------------------------------------------


def test_what_was_announced_stands_there(nothing: PublishedBeside) -> None:
    """The announcement's figures, written down once more."""
    rows = nothing.rows
    assert values(rows[DECODE], "published") == [8.95, 3.30]
    assert values(rows[SINGLE], "published") == [pytest.approx(708)]
    assert values(rows[DRAFTED], "published") == [pytest.approx(3.71 / 708 * 1000)]
    assert values(rows[LENGTHS], "published")[0] == LENGTH == 3.71
    assert values(rows[MANY], "published") == [15_012, 16_632]
    assert values(rows[GAIN], "published")[0] == pytest.approx(16_632 / 15_012 - 1, abs=5e-4)
    assert values(rows[TAIL], "published") == [-0.09]
    assert values(rows[PREFILL], "published") == [328, 176]
    assert values(rows[PROMPTS], "published") == [98_700, 168_800]


def test_what_others_published_says_whose_it_is(nothing: PublishedBeside) -> None:
    _, *others = nothing.rows[GAIN].of("published")
    assert [round(one.value, 3) for one in others] == [0.153, 0.218]
    assert all("Muse Glimmer" in one.label and "52228" in one.source for one in others)
    _, *lengths = nothing.rows[LENGTHS].of("published")
    assert {one.label.partition(",")[0]: one.value for one in lengths} == {
        "Qwen3.5-4B": 5.97, "Qwen3.8-27B": 4.80, "Muse Glimmer": 5.70,
    }  # fmt: skip
    assert all("DFlash2 blog" in one.source for one in lengths)


def test_every_figure_says_where_it_is_from_and_every_gap_why(nothing: PublishedBeside) -> None:
    for row in nothing.rows:
        assert [f.kind for f in row.figures] == sorted(
            (f.kind for f in row.figures), key=KINDS.index
        )
        for kind in KINDS:
            assert bool(row.of(kind)) is not (kind in row.missing), (row.name, kind)
        assert all(len(one.source) > 5 for one in row.figures)
        assert "not measured here" in row.missing["measured here"]
        for one in row.of("recorded"):
            assert "date not recorded" in one.source or "2026-" in one.source
    assert nothing.seconds == 0
    assert json.loads(json.dumps(nothing.to_dict()))["rows"][0]["unit"] == "ms"


def test_the_modelled_step_is_the_plan_s() -> None:
    """The same roofline that stands beside the references, and another for another plan."""
    (known,) = [
        one
        for one in comparisons()
        if one.reference.name == "decode, batch 1, after the optimisations"
        and "NVFP4" in one.assumptions
    ]
    assert values(beside_published(PLAN).rows[DECODE], "modelled") == [known.modelled]
    four = make_plan("beam-501b", "GB300", layout=Layout(tp=4), **{**ASKED, "weights": "fp8"})
    step = decode_step(
        beam_501b().config, batch=1, context=4096, rates=data_sheet_rates("GB300"),
        layout=Layout(tp=4), precision=PRECISIONS["fp8"], kv_dtype="fp8",
    )  # fmt: skip
    found = beside_published(four)
    assert values(found.rows[DECODE], "modelled") == [pytest.approx(step.milliseconds)]
    assert "4 x GB300, TP4, fp8" in found.plan


def test_without_a_drafter_its_rows_are_not_modelled() -> None:
    plain = make_plan("beam-501b", "GB200", gpus=8, **ASKED)
    rows = beside_published(plain).rows
    for row in (rows[DRAFTED], rows[SINGLE], rows[MANY]):
        assert not row.of("modelled")
        assert "no drafter" in row.missing["modelled"]
    assert rows[DECODE].of("modelled")


def test_what_cannot_be_modelled_is_a_sentence() -> None:
    """Beyond one NVLink domain the network is not known."""
    card = replace(sheet("GB200"), nvlink_domain=4)
    rows = beside_published(make_plan("beam-501b", card, gpus=8, **ASKED)).rows
    assert not rows[DECODE].of("modelled")
    assert rows[DECODE].missing["modelled"].startswith("not modelled: ")


def test_recorded_figures_are_those_of_the_documents(nothing: PublishedBeside) -> None:
    document = recorded_decode()
    own = [one for one in nothing.rows[DECODE].of("recorded") if "own" in one.label]
    assert [one.value for one in own] == [document["milliseconds"]]
    assert document["date"] in own[0].source
    (length,) = nothing.rows[LENGTHS].of("recorded")
    assert 3.5 < length.value < 3.8
    assert "H200" in length.source


def test_a_plan_is_wanted() -> None:
    with pytest.raises(SizingError, match="plan"):
        beside_published("beam-501b")  # type: ignore[arg-type]


# -- measured -----------------------------------------------------------------------------------


def spread(seconds: float, count: int = 1) -> Spread:
    """``count`` observations of so many seconds, in one bucket that holds them."""
    return Spread(((seconds / 2, seconds, count),), seconds * count)


def sample(at: int, **more: Any) -> Sample:
    return Sample(
        at=float(at),
        seconds=0.5,
        model="beam-501b",
        **{"running": 1, "generation_tokens": 0} | more,
    )


def lone(*, drafts: int | None) -> list[Sample]:
    """One request: first seen, then two intervals with 40 and 60 outputs of 5 and 10 ms."""
    speculative = {} if drafts is None else {"drafts": drafts, "accepted_tokens": 2 * drafts}
    return [
        sample(0),
        sample(1, itl=spread(0.005, 40), generation_tokens=120, **speculative),
        sample(2, itl=spread(0.010, 60), generation_tokens=180, tpot=spread(0.004), running=0,
               finished={"stop": 1}, **speculative),
    ]  # fmt: skip


def test_a_lone_request_measures_the_step() -> None:
    rows = beside_published(PLAN, lone(drafts=None)).rows
    assert only(rows[DECODE]).value == pytest.approx((40 * 5 + 60 * 10) / 100)
    assert only(rows[DECODE]).source == (
        "beam-501b; mean between two outputs while one request ran, n = 100"
    )
    for row in (rows[DRAFTED], rows[SINGLE], rows[LENGTHS], rows[MANY]):
        assert not row.of("measured here")


def test_with_drafts_it_measures_the_step_with_them() -> None:
    found = beside_published(PLAN, lone(drafts=50))
    rows = found.rows
    assert not rows[DECODE].of("measured here")
    assert only(rows[DRAFTED]).value == pytest.approx(8.0)
    assert only(rows[SINGLE]).value == pytest.approx(1 / 0.004)
    assert only(rows[LENGTHS]).value == pytest.approx(3.0)
    assert "100 draft events" in only(rows[LENGTHS]).source
    assert found.seconds == pytest.approx(1.5)


@pytest.mark.parametrize(
    "crowd", [{"running": 2}, {"finished": {"stop": 2}}, {"running": 1, "finished": {"length": 3}}]
)
def test_a_crowd_is_no_lone_request(crowd: dict[str, Any]) -> None:
    samples = [sample(0), sample(1, itl=spread(0.02, 9), **crowd)]
    rows = beside_published(PLAN, samples).rows
    assert not rows[DECODE].of("measured here")


def busy(rate: int, tpot: float, running: int = 128) -> list[Sample]:
    return [
        sample(at, running=running, generation_tokens=rate // 2, tpot=spread(tpot, 100),
               prompt_tokens=1000 if at else 0)
        for at in range(4)
    ]  # fmt: skip


def test_many_requests_and_prompts() -> None:
    rows = beside_published(PLAN, busy(9000, 0.02)).rows
    assert only(rows[MANY]).value == pytest.approx(9000)
    assert "128 running on average" in only(rows[MANY]).source
    assert only(rows[PROMPTS]).value == pytest.approx(2000)  # the interval without prompts is out
    assert not rows[PREFILL].of("measured here")


def test_adaptive_over_fixed_wants_both_runs() -> None:
    adaptive, fixed = busy(9000, 0.018), busy(8000, 0.020)
    rows = beside_published(PLAN, adaptive, fixed=fixed).rows
    assert only(rows[GAIN]).value == pytest.approx(0.125)
    assert only(rows[TAIL]).value == pytest.approx(-0.1)
    alone = beside_published(PLAN, adaptive).rows
    for row in (alone[GAIN], alone[TAIL]):
        assert not row.of("measured here")
        assert "one with fixed" in row.missing["measured here"]


def test_times_beyond_the_last_bucket_are_no_figure() -> None:
    open_end = Spread(((80.0, float("inf"), 100),), 9000.0)
    samples: Sequence[Sample] = [replace(one, tpot=open_end) for one in busy(9000, 0.02)]
    rows = beside_published(PLAN, samples, fixed=busy(8000, 0.02)).rows
    assert not rows[TAIL].of("measured here")
    assert isinstance(PLAN, Plan)


@pytest.mark.parametrize(
    "wrong",
    [None, 5, [5], [None], "abc", {"a": 1}, sample(0), [replace(sample(0), seconds=float("inf"))]],
)
def test_what_are_no_samples_is_said(wrong: Any) -> None:
    with pytest.raises(SizingError, match="samples takes a list of a monitor's samples, not"):
        beside_published(PLAN, wrong)
    with pytest.raises(SizingError, match="fixed takes a list of a monitor's samples, not"):
        beside_published(PLAN, fixed=wrong)


@pytest.mark.parametrize(
    "odd",
    [
        {"generation_tokens": float("nan")},
        {"seconds": 0.0},
        {"drafts": float("nan"), "accepted_tokens": 1},
        {"itl": Spread((), 0.0), "running": 1},
        {"itl": spread(float("nan")), "running": 1},
        {"tpot": spread(float("inf")), "running": 1, "drafts": 1},
        {"running": None, "finished": None},
    ],
)
def test_odd_samples_make_no_figure(odd: dict[str, Any]) -> None:
    samples = [replace(one, prompt_tokens=None, **odd) for one in busy(9000, 0.02)]
    found = beside_published(PLAN, iter(samples))
    json.dumps(found.to_dict(), allow_nan=False)
    if "seconds" in odd or "generation_tokens" in odd or "finished" in odd:
        assert not found.rows[MANY].of("measured here")
