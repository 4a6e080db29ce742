"""The decode step's waterfall: numbers, order, labels, and what is said of a wrong variant."""

from __future__ import annotations

import copy
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from workbench import views
from workbench.errors import KernelError, WorkbenchError
from workbench.kernels.rank.recorded_runs import (
    DECODE,
    FP8,
    RECORDED,
    recorded_decode,
    recorded_fp8,
)

CHECKOUT = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(recorded_decode())


ALONE = "no all-reduce on one GPU"
NONE = dict.fromkeys(("milliseconds", "low", "high", "repeat", "rounds", "fraction_of_floor"))


def numbers(view: Any) -> list[str]:
    """The columns at the right of each row, from the top, without their names."""
    (trace,) = [t for t in view.figure.data if t.type == "scatter" and t.mode == "text"]
    return [str(text) for text in trace.text[1:]]


def names(view: Any) -> list[list[str]]:
    """The lines beside each bar: its name, and below it its source."""
    return [re.sub("<(?!br)[^>]*>", "", t).split("<br>") for t in view.figure.layout.yaxis.ticktext]


def bars(view: Any) -> dict[int, tuple[float, Any]]:
    """By row: where the bar ends, and its trace."""
    rows = {round(float(y)): place for place, y in enumerate(view.figure.layout.yaxis.tickvals)}
    traces = [t for t in view.figure.data if t.type == "bar" and t.name != "saved"]
    found = [(rows[round(float(y))], float(x), t) for t in traces
             for x, y in zip(t.x, t.y, strict=True)]  # fmt: skip
    assert len(found) == len({place for place, *_ in found})
    return {place: (x, trace) for place, x, trace in found}


def hovers(view: Any, trace: Any) -> str:
    """Everything that hovering over a trace's bars can say."""
    shared = view.figure.layout.template.data.bar[0]
    parts = [trace.hovertemplate or shared.hovertemplate, trace.meta or shared.meta,
             *(trace.hovertext or ())]  # fmt: skip
    return " ".join(filter(None, parts)).replace("<br>", " ")


def test_each_variant_has_its_bar_with_its_document_s_numbers(document: dict[str, Any]) -> None:
    view = views.rank_waterfall(document, others=[("another", 2.0, "elsewhere", 1.4)])
    # The floor by hand: bytes over the bandwidth that the run measured.
    floor = (document["weight_bytes"] + document["cache_bytes"]) / document["bandwidth"] * 1e3
    above = None
    for place, row in enumerate(document["variants"].values()):
        spent = row["milliseconds"]
        assert bars(view)[place][0] == pytest.approx(spent, rel=1e-6)
        saved = [] if above is None else [f"{above - spent:.2f}".replace("-", "−")]
        assert numbers(view)[place].split() == [f"{spent:.2f}", *saved, f"{spent / floor:.2f}"]
        assert " ".join(names(view)[place]).startswith(row["title"])
        above = spent
    count = len(document["variants"])
    assert sorted(bars(view)) == list(range(count + 5))
    found = [bars(view)[count + i][0] for i in range(5)]
    assert found == pytest.approx([2.0, 4.47, 4.59, 8.95, 3.30])
    assert numbers(view)[count].split() == ["2.00", "1.43"]  # of its own floor
    assert numbers(view)[count + 1].split() == ["4.47", f"{4.47 / floor:.2f}"]
    # Of other hardware: no multiple of this floor.
    assert [text.split() for text in numbers(view)[-2:]] == [["8.95"], ["3.30", "5.65"]]
    lines = [s.x0 for s in view.figure.layout.shapes if s.type == "line"]
    assert lines == pytest.approx([floor, 4.47])
    assert f"{list(document['variants'].values())[-1]['milliseconds']:.2f} ms" in title(view)


def title(view: Any) -> str:
    return str(view.figure.layout.title.text + view.figure.layout.title.subtitle.text)


def test_pale_bars_reach_from_each_bar_to_the_one_above(document: dict[str, Any]) -> None:
    (trace,) = [t for t in views.rank_waterfall(document).figure.data if t.name == "saved"]
    spent = [row["milliseconds"] for row in document["variants"].values()]
    pairs = [(one, above) for above, one in pairwise(spent) if one < above]
    # The fused chain by itself is slower than the bar above: it has no pale part.
    assert len(pairs) == len(spent) - 2
    ends = list(zip(trace.base, trace.base + trace.x, strict=True))
    assert ends == [pytest.approx(pair, abs=1e-4) for pair in [*pairs, (3.30, 8.95)]]


def test_every_bar_has_its_source_and_says_that_there_is_no_all_reduce(
    document: dict[str, Any],
) -> None:
    whose = f"recorded elsewhere, {ALONE}"
    for view in (
        views.rank_waterfall(document, others=[("another", 2.0, whose)]),
        views.rank_leave_one_out(document),
    ):
        for place, (_, trace) in bars(view).items():
            beside, over = " ".join(names(view)[place][1:]), hovers(view, trace)
            if "published" in beside and "included" in beside:  # the pair of the announcement
                assert "all-reduces included" in beside
                assert "GB200, TP8" in over
                assert "public announcement" in over
                continue
            assert "recorded" in beside
            assert ALONE in beside
            assert "H200" in over or whose in over
            assert "no all-reduce" in over
        first = hovers(view, bars(view)[0][1])
        for word in ("NVIDIA H200", document["date"], document["versions"]["torch"]):
            assert word in first
            assert word in view.text
    measured = views.rank_waterfall(document | {"how": "measured here"})
    assert names(measured)[0][1] == f"measured here, {ALONE}"


def test_whose_idea_a_bar_is_is_told_without_colour(document: dict[str, Any]) -> None:
    view = views.rank_waterfall(document)
    traces = list(dict.fromkeys(id(trace) for _, trace in bars(view).values()))
    looks = {(t.marker.pattern.shape, t.name) for _, t in bars(view).values()}
    assert len({name for _, name in looks}) == len(traces) == 7
    headings = [a.text for a in view.figure.layout.annotations]
    for row, (_, trace) in zip(document["variants"].values(), bars(view).values(), strict=False):
        shape = trace.marker.pattern.shape
        assert shape == {"published": "/", "engine": "."}.get(row["origin"], shape)
        if row["origin"] != "start":
            assert any(f"<b>{trace.name}</b>" in text for text in headings)


@pytest.mark.parametrize(
    "other",
    [{"model": "beam-tiny"}, {"tp": 4}, {"batch": 8}, {"layers": 8}],
)
def test_another_step_is_not_compared_with_the_engine_s(
    document: dict[str, Any], other: dict[str, Any]
) -> None:
    view = views.rank_waterfall(document | other)
    assert len(bars(view)) == len(document["variants"])
    assert "vLLM" not in view.text + view.figure.to_json()
    assert "GB200" not in view.figure.to_json()


def test_the_engine_s_times_are_those_of_about_the_context(document: dict[str, Any]) -> None:
    def engine(context: int) -> list[str]:
        text = views.rank_waterfall(document | {"context": context}).text
        return re.findall(r"^vLLM 0.33, BF16, (.*?)  .* ([\d.]+) ms", text, re.MULTILINE)

    assert engine(4096) == [("graph replay", "4.47"), ("context 4k", "4.59")]
    assert engine(131_072) == [("context 120k", "4.91")]
    assert engine(1_048_064) == []


def test_another_run_s_whole_steps_stand_beside_with_their_own_floor(
    document: dict[str, Any],
) -> None:
    """Experts in FP8 are no step of the BF16 floor, and vLLM's BF16 is none of theirs."""
    other = copy.deepcopy(document) | {
        "expert_weights": "fp8 (e4m3, one scale)", "floor_milliseconds": 0.9,
        "error_gate": {"quantisation": {"mlp_output": 0.0234}},
    }  # fmt: skip
    for name in ("fused", "fused_pdl"):
        other["variants"][name] |= {"milliseconds": 1.8, "fraction_of_floor": 0.5}
    other["variants"]["fused"] |= {"passed": False}
    del other["variants"]["persistent"]  # it reads BF16
    view = views.rank_waterfall(document, others=[other, ("another", 2.0, "elsewhere")])
    count = len(document["variants"])
    assert numbers(view)[count].split() == ["1.80", "2.00"]
    said = "fused chain, dependent launches, fp8 experts"
    assert " ".join(names(view)[count]) == f"{said} recorded, {ALONE}"
    over = hovers(view, bars(view)[count][1])
    assert "fp8 (e4m3, one scale)" in over
    assert "rounding moves a layer's MLP output by 2.3%" in over
    assert names(view)[count + 1] == ["another", "elsewhere"]  # the wrong one is not there
    (mark,) = [t for t in view.figure.data if t.name == "its own floor"]
    assert list(mark.x) == [0.9]
    assert list(mark.y) == [view.figure.layout.yaxis.tickvals[count]]
    # By itself: its experts are in the subtitle, and no multiple of its floor is vLLM's.
    alone = views.rank_waterfall(other)
    assert "experts fp8 (e4m3, one scale)" in title(alone).replace("<br>", " ")
    assert numbers(alone)[count - 1].split() == ["4.47"]


def test_the_recorded_fp8_run_stands_beside_the_recorded_one(document: dict[str, Any]) -> None:
    """By the figures of the two runs' reports, not by what the documents hold."""
    run = recorded_fp8()
    view = views.rank_waterfall(document, others=[run])
    count = len(document["variants"])
    assert names(view)[count - 1] == ["one persistent CUDA kernel", f"recorded, {ALONE}"]
    shown = {place: numbers(view)[place].split() for place in (0, count - 2, count - 1)}
    assert shown == {0: ["15.37", "11.29"], count - 2: ["2.32", "0.62", "1.70"],
                     count - 1: ["1.99", "0.32", "1.46"]}  # fmt: skip
    # FP8's whole steps only, each over the floor of its own bytes.
    beside = [" ".join(names(view)[place]) for place in (count, count + 1)]
    steps = ("fused chain", "fused chain, dependent launches")
    assert beside == [f"{step}, fp8 experts recorded, {ALONE}" for step in steps]
    assert bars(view)[count + 1][0] == pytest.approx(1.938, abs=1e-3)
    assert numbers(view)[count + 1].split() == ["1.94", "2.04"]
    assert numbers(view)[count + 2].split() == ["4.47", "3.28"]  # vLLM's is over the BF16 floor
    (mark,) = [t for t in view.figure.data if t.name == "its own floor"]
    assert list(mark.x) == pytest.approx([0.948, 0.948], abs=1e-3)
    lines = [s.x0 for s in view.figure.layout.shapes if s.type == "line"]
    assert lines == pytest.approx([1.362, 4.47], abs=1e-3)
    over = hovers(view, bars(view)[count + 1][1])
    assert "rounding moves a layer's MLP output by 4.6%" in over
    assert all(w in over for w in ("NVIDIA H200", run["date"], run["versions"]["torch"]))
    assert "15.37 → 1.99 ms" in title(view)


def test_a_wrong_variant_has_a_reason_in_place_of_its_time(document: dict[str, Any]) -> None:
    row = document["variants"]["gate"]
    was, after = row["milliseconds"], document["variants"]["attention"]["milliseconds"]
    row["passed"], row["failures"] = False, ["layer 3 is <b>off</b>"]
    view = views.rank_waterfall(document)
    place = list(document["variants"]).index("gate")
    assert place not in bars(view)
    assert numbers(view)[place].split() == ["–"]
    assert f"{was:.2f}" not in " ".join(numbers(view))
    # What the next one saves of it, nobody knows.
    assert numbers(view)[place + 1].split()[0] == f"{after:.2f}"
    assert len(numbers(view)[place + 1].split()) == 2
    beside = view.figure.layout.yaxis.ticktext[place]
    assert "not right, not timed: layer 3 is &lt;b&gt;off" in beside.replace("<br>", " ")
    assert "<b>off" not in beside
    assert "layer 3 is <b>off</b>" in view.text
    row.update(NONE)  # as measured
    assert views.rank_waterfall(document).text == view.text
    assert "&lt;b&gt;off" in view._repr_mimebundle_()["text/html"]


def test_what_could_not_run_is_named_with_the_reason(document: dict[str, Any]) -> None:
    document["left_out"] = {"persistent": "nvcc is not here"}
    view = views.rank_waterfall(document)
    place = len(document["variants"])
    assert names(view)[place] == ["persistent", "nvcc is not here"]
    assert place not in bars(view)
    assert re.search("^persistent +nvcc is not here$", view.text, re.MULTILINE)


def test_one_variant_alone_and_none_that_is_right(document: dict[str, Any]) -> None:
    alone = {name: document["variants"][name] for name in ("fused",)}
    view = views.rank_waterfall(document | {"variants": alone, "model": "other"})
    assert len(bars(view)) == 1
    assert len(numbers(view)[0].split()) == 2  # nothing above it: nothing saved
    assert "→" not in title(view)
    alone["fused"] = alone["fused"] | {"passed": False, "failures": []} | NONE
    view = views.rank_waterfall(document | {"variants": alone, "model": "other"})
    assert bars(view) == {}
    assert "not right, not timed: no check" in view.text


def test_leaving_one_out_is_sorted_and_signed(document: dict[str, Any]) -> None:
    document["leave_one_out"]["dense"]["costs"] = -0.25
    document["leave_one_out"]["kv"]["costs"] = None
    view = views.rank_leave_one_out(document)
    drawn = bars(view)
    assert len(drawn) == len(document["leave_one_out"]) - 1
    # Slowest first in each group, and what has no time last.
    published = [drawn[place][0] for place in range(4)]
    costs = {name: row["costs"] for name, row in document["leave_one_out"].items()}
    wanted = sorted((costs[n] for n in ("norms", "merged", "router", "dense")), reverse=True)
    assert published == pytest.approx(wanted, rel=1e-6)
    assert names(view)[4][0] == "fused KV-cache update"
    assert 4 not in drawn
    assert numbers(view)[3].split()[-1] == "−0.25"
    norms = document["leave_one_out"]["norms"]
    assert numbers(view)[0].split() == [f"{norms['milliseconds']:.2f}", f"{norms['costs']:+.2f}"]
    assert re.search("^dense-MLP kernel +−0.25 ms$", view.text, re.MULTILINE)
    assert re.search("^fused KV-cache update +not timed", view.text, re.MULTILINE)
    whole = document["variants"]["products"]["milliseconds"]
    assert norms["costs"] == pytest.approx(norms["milliseconds"] - whole, abs=2e-3)
    assert f"({whole:.2f} ms)" in title(view)
    document["leave_one_out"]["gate"] |= {"passed": False, "failures": ["layer 1 is off"]}
    assert "layer 1 is off" in views.rank_leave_one_out(document).text
    for row in document["leave_one_out"].values():
        row["costs"] = None
    with pytest.raises(WorkbenchError, match="timed none of them"):
        views.rank_leave_one_out(document)
    document["leave_one_out"] = {}
    with pytest.raises(WorkbenchError, match="did not leave optimisations out"):
        views.rank_leave_one_out(document)


def cells(view: Any) -> list[list[str]]:
    """The table's texts, a row each."""
    rows = re.findall("<tr.*?</tr>", view.html, re.DOTALL)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


def test_kernels_add_up_to_the_step(document: dict[str, Any]) -> None:
    view = views.rank_kernels(document)
    rows = document["kernels"]["fused"]
    total = sum(row["microseconds"] for row in rows)
    step = document["variants"]["fused"]["milliseconds"] * 1e3
    table = cells(view)
    for row, shown in zip(rows, table[1:], strict=False):
        spent, count = row["microseconds"], row["launches"]
        wanted = [row["kernel"], f"{spent:,.1f}", f"{spent / total:.1%}", f"{count:.0f}"]
        assert shown[:5] == [*wanted, f"{spent / count:.2f}"]
    sums = [row[:2] for row in table[len(rows) + 1 :]]
    assert sums == [
        ["= all kernels", f"{total:,.1f}"],
        ["+ between launches", f"{step - total:,.1f}"],
        ["= the step", f"{step:,.1f}"],
    ]
    assert len(table[1][5]) > len(table[5][5]) > 0  # bars of text
    for form in (view.text, view.html):
        assert ALONE in form
        assert "NVIDIA H200" in form
        assert document["date"] in form
        assert "overlap" not in form
    assert "overlap" in views.rank_kernels(document, "fused_pdl").text
    with pytest.raises(WorkbenchError, match="no kernel times of 'router'; it has those of: naive"):
        views.rank_kernels(document, "router")
    with pytest.raises(WorkbenchError, match="it has those of: none"):
        views.rank_kernels(document | {"kernels": {}})


def test_many_kernels_end_in_one_line_and_names_are_escaped(document: dict[str, Any]) -> None:
    rows = document["kernels"]["naive"]
    rows[0]["kernel"] = "void at::native::<script>alert(1)</script>"
    view = views.rank_kernels(document, "naive")
    rest = rows[16:]
    line = next(row for row in cells(view) if "other" in row[0])
    spent, count = (sum(r[key] for r in rest) for key in ("microseconds", "launches"))
    assert line[:2] == [f"{len(rest)} others", f"{spent:,.1f}"]
    assert line[3] == f"{count:,.0f}"
    assert cells(view)[1][0] == "&lt;script&gt;alert(1)&lt;/script&gt;"
    document["variants"]["naive"].update(NONE)
    assert "= the step" not in views.rank_kernels(document, "naive").text


def test_a_step_by_context_stands_over_its_floor(document: dict[str, Any]) -> None:
    view = views.rank_contexts(document)
    rows = sorted([document, *document["contexts"]], key=lambda row: row["context"])
    *ours, floor, engine = view.figure.data
    for line, name in zip(ours, ("persistent", "fused_pdl"), strict=True):  # the fastest one first
        spent = [row["variants"][name]["milliseconds"] for row in rows]
        assert [int(x) for x in line.x] == [1024, 4096, 32_768, 131_072, 1_048_064]
        assert list(line.y) == pytest.approx(spent, rel=1e-6)
        over = [one / least for one, least in zip(spent, floor.y, strict=True)]
        assert list(line.customdata[:, 3]) == pytest.approx(over)
        assert document["variants"][name]["title"] in line.name
    assert (ours[0].y[-1], floor.y[-1]) == pytest.approx((3.226, 2.481), abs=1e-3)
    # The floor by hand: bytes over the bandwidth of the run.
    read = [document["weight_bytes"] + row["cache_bytes"] for row in rows]
    assert list(floor.y) == pytest.approx([1e3 * b / document["bandwidth"] for b in read])
    assert list(engine.y) == [4.58, 4.59, 4.68, 4.91]
    # Numbers of two lines and a floor, none between two others.
    assert [t.textposition.split()[0] for t in (*ours, floor)] == ["bottom", "top", "bottom"]
    for word in ("NVIDIA H200", document["date"], document["versions"]["torch"], ALONE):
        assert word in title(view).replace("<br>", " ")
        assert word in view.text
    assert "1,048,064 tokens    3.23 ms  floor  2.48 ms  1.30 × floor" in view.text
    assert view.figure.layout.xaxis.ticktext == ("1k", "4k", "32k", "128k", "1M")


def test_contexts_of_a_bench_are_lines_of_their_variants(document: dict[str, Any]) -> None:
    del document["contexts"]
    with pytest.raises(WorkbenchError, match="at two contexts"):
        views.rank_contexts(document)
    with pytest.raises(WorkbenchError, match="at two contexts"):
        views.rank_contexts()
    far = {"milliseconds": 4.0, "low": 3.9, "high": 4.1, "failures": []}
    document["contexts"] = [{
        "context": 1_048_064, "floor_milliseconds": 2.5,
        "variants": {"fused_pdl": far, "fused": far | {"failures": ["layer 9 is off"]}},
    }]  # fmt: skip
    view = views.rank_contexts(document)
    ours, floor, _ = view.figure.data
    near = document["variants"]["fused_pdl"]["milliseconds"]
    assert list(ours.y) == pytest.approx([near, 4.0])
    assert list(floor.y) == pytest.approx([document["floor_milliseconds"], 2.5])
    assert "dependent launches" in ours.name
    # Two documents of one step are one line, that of another step is a line of its own.
    other = document | {"context": 32_768, "contexts": []}
    both = views.rank_contexts(document, other).figure.data
    assert [len(t.x) for t in both if "dependent" in t.name] == [3]
    apart = views.rank_contexts(document, other | {"hardware": "another"}).figure.data
    assert [len(t.x) for t in apart if "dependent" in t.name] == [2]
    # Half the bytes are another floor, and each says whose it is.
    half = {name: row | {"milliseconds": 1.9} for name, row in document["variants"].items()}
    half = document | {"expert_weights": "fp8", "floor_milliseconds": 0.9, "variants": half}
    floors = [t for t in views.rank_contexts(half, document).figure.data if ">floor" in t.name]
    assert [float(t.y[0]) for t in floors] == pytest.approx(
        [0.9, document["floor_milliseconds"]], rel=1e-6
    )
    assert "fp8 experts" in floors[0].name
    tiny = document | {"model": "beam-tiny"}
    assert "vLLM" not in views.rank_contexts(tiny).text


def test_names_from_a_document_are_never_markup(document: dict[str, Any]) -> None:
    hostile = "<script>alert(1)</script>"
    for name in ("norms", "fused"):
        document["variants"][name]["title"] = hostile
    document |= {"hardware": hostile, "note": hostile, "left_out": {hostile: hostile}}
    document["contexts"] = [
        {"context": 9000, "floor_milliseconds": 1.4, "variants": {"fused": {"milliseconds": 3.0}}}
    ]
    made = (
        views.rank_waterfall(document, others=[(hostile, 2.0, hostile)]),
        views.rank_leave_one_out(document),
        views.rank_kernels(document),
        views.rank_contexts(document),
    )
    for view in made:
        assert hostile in view.text
        bundle = view._repr_mimebundle_()
        assert "<script>" not in json.dumps({k: v for k, v in bundle.items() if k != "text/plain"})


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        (("variants", "norms", "milliseconds"), float("nan"), "variants.norms.milliseconds"),
        (("variants", "norms", "milliseconds"), -1.0, "variants.norms.milliseconds"),
        (("variants", "norms", "low"), "<script>", "variants.norms.low"),
        (("variants", "norms", "fraction_of_floor"), 0, "variants.norms.fraction_of_floor"),
        (("variants", "norms", "failures"), 1.0, "variants.norms.failures"),
        (("variants", "norms"), None, "variants.norms"),
        (("variants",), [1], "variants"),
        (("floor_milliseconds",), 0, "floor_milliseconds"),
        (("floor_milliseconds",), 10**400, "floor_milliseconds"),
        (("context",), 4096.5, "context"),
        (("layers",), float("inf"), "layers"),
        (("hardware",), {"a": 1}, "hardware"),
        (("versions",), "2.11", "versions"),
        (("leave_one_out", "norms", "costs"), float("inf"), "leave_one_out.norms.costs"),
        (("kernels", "fused", 0, "microseconds"), None, r"kernels.fused\[0\].microseconds"),
        (("kernels", "fused", 1), [], r"kernels.fused\[1\]"),
        (("contexts",), [{"variants": {}}], r"contexts\[0\].context"),
        (("contexts", 1, "variants", "persistent", "high"), -1, r"\[1\].variants.persistent.high"),
        (("schema",), "workbench-rank-decode/9", "says schema 'workbench-rank-decode/9'"),
    ],
)
def test_a_damaged_field_is_named(
    document: dict[str, Any], place: tuple[Any, ...], value: Any, field: str
) -> None:
    inner: Any = document
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    whole = recorded_decode()
    for view in (
        views.rank_waterfall,
        views.rank_leave_one_out,
        views.rank_kernels,
        views.rank_contexts,
        lambda damaged: views.rank_waterfall(whole, others=[damaged]),
    ):
        with pytest.raises(WorkbenchError, match=field) as caught:
            view(document)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("bar", "said"),
    [
        (("one", 2.0), "a bar beside the document's is"),
        ("one", "a bar beside the document's is"),
        (None, "a bar beside the document's is"),
        (("one", -2.0, "whose"), "ms should be a number above 0"),
        (("one", "2", "whose"), "ms should be a number above 0"),
        (("one", 2.0, None), "whose of a bar is a text"),
        (("one", 2.0, "whose", 0.0), "floor should be a number above 0"),
    ],
)
def test_a_wrong_bar_is_refused(document: dict[str, Any], bar: Any, said: str) -> None:
    with pytest.raises(WorkbenchError, match=said):
        views.rank_waterfall(document, others=[bar])
    for wrong in (None, [], "x.json"):
        with pytest.raises(WorkbenchError, match="is a dict, as recorded_decode"):
            views.rank_waterfall(wrong)  # type: ignore[arg-type]


def test_a_field_without_a_value_is_one_that_is_not_there(document: dict[str, Any]) -> None:
    without = {name: value for name, value in document.items() if name != "hardware"}
    assert (
        views.rank_waterfall(document | {"hardware": None}).text
        == views.rank_waterfall(without).text
    )
    assert "None" not in views.rank_waterfall(document | {"hardware": None}).text


def test_a_saved_notebook_keeps_little(document: dict[str, Any]) -> None:
    made = {
        views.rank_waterfall: 24_000,
        views.rank_leave_one_out: 13_000,
        views.rank_kernels: 7_000,
        views.rank_contexts: 9_000,
    }
    for view, most in made.items():
        assert len(json.dumps(view(document)._repr_mimebundle_())) < most


def test_nothing_to_show_is_said(document: dict[str, Any]) -> None:
    document["variants"] = {}
    with pytest.raises(WorkbenchError, match="no variant of the step"):
        views.rank_waterfall(document)


def test_the_recorded_runs_are_those_of_the_benchmarks() -> None:
    for name in (DECODE, FP8):
        assert (RECORDED / name).read_bytes() == (CHECKOUT / name).read_bytes()
    document, fp8 = recorded_decode(), recorded_fp8()
    for run in (document, fp8):
        assert run["how"] == "recorded"
        rows = [*run["variants"].values(), *run["leave_one_out"].values()]
        assert all(row["passed"] for row in rows)
        for context in run.get("contexts", []):
            assert not any(row["failures"] for row in context["variants"].values())
    # The Triton chain's bars: 1.85 times the floor, 0.57 of the engine's replay, two runs alike.
    best = document["variants"]["fused_pdl"]["milliseconds"]
    assert best <= 1.85 * document["weights_floor_milliseconds"]
    assert best <= 0.57 * 4.47
    assert document["repeat_percent"] <= 2
    # The persistent kernel, and the Triton chain with FP8 experts beside their own floor.
    assert document["fastest"] == "persistent"
    assert document["milliseconds"] == pytest.approx(1.992, abs=1e-3)
    assert best == pytest.approx(2.317, abs=1e-3)
    assert document["floor_milliseconds"] == pytest.approx(1.362, abs=1e-3)
    check = document["variants"]["persistent"]["check"]
    assert check["next_token_equal"]
    assert check["expert_sets_unexplained"] == 0
    assert fp8["expert_weights"].startswith("fp8")
    assert fp8["milliseconds"] == pytest.approx(1.938, abs=1e-3)
    assert fp8["floor_milliseconds"] == pytest.approx(0.948, abs=1e-3)
    assert fp8["error_gate"]["quantisation"]["passed"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON, or a part of it"),
        ("[]", "holds no document"),
        ('{"schema": "workbench-rank-decode/9"}', "of another release"),
        ("{}", "says schema None"),
        (json.dumps({"schema": "workbench-rank-decode/1", "note": ""}), "lacks variants"),
        ('{"schema": NaN}', "NaN is no number of JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(content)
    with pytest.raises(KernelError, match=said) as caught:
        recorded_decode(file)
    assert str(file) in str(caught.value)
    with pytest.raises(KernelError, match="cannot be read"):
        recorded_decode(tmp_path / "nowhere.json")
    with pytest.raises(KernelError, match="it is no file"):
        recorded_decode(tmp_path)
