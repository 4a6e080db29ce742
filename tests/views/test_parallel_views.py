"""The views of several ranks: bars and their communication, calls, batches; by hand.

Every number of these documents is made up.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from workbench import views
from workbench.errors import WorkbenchError

NOTE = "2 of 8 ranks: the model that they make up has a quarter of the heads"


def variant(title: str, spent: float | None, without: float | None, **more: Any) -> dict[str, Any]:
    """A row as the bench writes it, of a floor of 1.5 ms."""
    known = spent is not None and without is not None
    return {
        "title": title, "origin": "ours", "exchange": "nccl", "milliseconds": spent,
        "low": spent and spent * 0.99, "high": spent and spent * 1.02,
        "repeat": spent, "slowest_rank_milliseconds": spent and spent * 1.01,
        "without": None if without is None else
        {"milliseconds": without, "low": without, "high": without},
        "communication_milliseconds": (spent or 0) - (without or 0) if known else None,
        "fraction_of_floor": 1.5 / spent if spent else None, "passed": True, "failures": [],
        "check": {"worst_layer_error": 0.004},
    } | more  # fmt: skip


def made_up() -> dict[str, Any]:
    first = {
        "naive": variant("plain torch, one CUDA graph", 9.0, 7.5, origin="start"),
        "norms": variant("fused norm and residual", 8.25, 7.0, origin="published"),
        "gate": variant("output-gate kernel", 8.0, 6.75, origin="engine"),
        "products": variant("matrix-vector kernels for qkvg, o_proj, head", 4.0, 2.75),
        "fused": variant("fused chain", 3.0, 2.0),
        "fused_boundary": variant("fused chain, exchange in it", 2.5, 2.0, exchange="boundary"),
    }
    runs = [
        {"batch": 1, "context": 4096, "floor_milliseconds": 1.5, "fastest": "fused_boundary",
         "milliseconds": 2.5, "variants": first,
         "left_out": {"persistent": "the persistent kernel has no all-reduce"}},
        {"batch": 32, "context": 4096, "floor_milliseconds": 11.0,
         "variants": {"load": variant("many rows", 18.0, 16.0)}, "left_out": {}},
        {"batch": 1, "context": 100_000, "floor_milliseconds": 1.75,
         "variants": {"fused": variant("fused chain", 3.5, 2.25)}, "left_out": {}},
    ]  # fmt: skip
    return {
        "schema": "workbench-parallel-decode/1", "kind": "parallel-decode", "model": "beam-501b",
        "gpus": 2, "tp": 8, "layers": 52, "of_layers": 52, "dtype": "bfloat16", "device": "cuda",
        "backend": "nccl", "hardware": "2 × NVIDIA H200",
        "versions": {"torch": "9.9", "triton": "8.8"},
        "date": "2031-02-03", "how": "measured here", "note": NOTE,
        "weights": {"bytes_per_gpu": 125e9, "bytes_all": 250e9, "seconds": 30.0},
        "calls": [
            {"rows": 1, "nccl_us": 14.0, "exchange_us": 4.5, "torch_one_shot_us": 7.0},
            {"rows": 8, "nccl_us": 15.0, "exchange_us": 5.5, "torch_one_shot_us": 8.0},
            {"rows": 128, "nccl_us": 22.0, "exchange_us": None, "torch_one_shot_us": 12.0},
        ],
        "runs": runs,
    }  # fmt: skip


def prefill_run(overlap: int, spent: float, part: float, speed: float) -> dict[str, Any]:
    return {
        "overlap": overlap, "milliseconds": spent, "low": spent - 1, "high": spent + 1,
        "communication_milliseconds": part, "tokens_per_second": speed, "fraction_of_peak": 0.5,
    }  # fmt: skip


def prefill() -> dict[str, Any]:
    head = {k: v for k, v in made_up().items() if k not in ("runs", "calls", "kind")}
    layout: dict[str, Any] = {"passed": True, "failures": [], "interpreted": False}
    return head | {
        "schema": "workbench-parallel-prefill/1", "sequences": 2, "tokens": 32_768, "context": 0,
        "layouts": {
            "tp": layout | {"title": "tensor parallel: every sequence by all GPUs",
                            "runs": [prefill_run(1, 4000.0, 1000.0, 16_384.0),
                                     prefill_run(2, 3600.0, 500.0, 18_204.0)]},
            "ep": layout | {"title": "attention data-parallel, experts whole: one GPU each",
                            "runs": [prefill_run(1, 2500.0, -20.0, 26_214.0)]},
        },
        "ratio": 1.44, "left_out": {"pp": "there is none"},
        "published": [{"name": "one over the other", "value": 1.5, "unit": "ratio",
                       "where": "another machine", "note": "said"}],
    }  # fmt: skip


@pytest.fixture
def document() -> dict[str, Any]:
    return made_up()


def plain(text: str) -> str:
    return re.sub(r"<[^>]+>", "", text.replace("<br>", " "))


def heading(view: Any) -> str:
    title = view.figure.layout.title
    return plain(title.text) + " | " + plain(title.subtitle.text)


def segments(view: Any) -> dict[int, list[tuple[float, float, str]]]:
    """By row: from where to where each part of its bar reaches, and the name of its trace."""
    rows = {round(float(y)): at for at, y in enumerate(view.figure.layout.yaxis.tickvals)}
    found: dict[int, list[tuple[float, float, str]]] = {}
    for trace in view.figure.data:
        if trace.type != "bar":
            continue
        bases = trace.base if trace.base is not None else [0.0] * len(trace.x)
        for base, x, y in zip(bases, trace.x, trace.y, strict=True):
            one = (float(base), float(base) + float(x), plain(str(trace.name)))
            found.setdefault(rows[round(float(y))], []).append(one)
    return found


def columns(view: Any) -> list[str]:
    (trace,) = [t for t in view.figure.data if t.type == "scatter" and t.mode == "text"]
    return [str(text) for text in trace.text[1:]]


def test_a_bar_ends_at_the_step_and_its_end_is_communication(document: dict[str, Any]) -> None:
    view = views.parallel_waterfall(document)
    found = segments(view)
    for at, row in enumerate(document["runs"][0]["variants"].values()):
        spent, without = row["milliseconds"], row["without"]["milliseconds"]
        lower, upper = sorted(found[at])
        assert lower[:2] == pytest.approx((0.0, without))
        assert upper[:2] == pytest.approx((without, spent))
        assert upper[2].startswith("communication")
        assert not lower[2].startswith("communication")
        assert columns(view)[at].split() == [
            f"{spent:.2f}", f"{spent - without:.2f}", f"{spent / 1.5:.2f}"
        ]  # fmt: skip
    assert 6 not in found  # the persistent kernel: no bar, the reason beside it
    assert "has no all-reduce" in plain(view.figure.layout.yaxis.ticktext[6])
    # The published pair: whole bars, nobody knows their communication, no multiple of this floor.
    for at, published in ((7, 8.95), (8, 3.30)):
        ((start, end, name),) = found[at]
        assert (start, end) == pytest.approx((0.0, published))
        assert name == "Other hardware: GB200, TP8"
    assert [text.split() for text in columns(view)[7:]] == [["8.95"], ["3.30"]]
    (floor,) = [s for s in view.figure.layout.shapes if s.type == "line"]
    assert floor.x0 == 1.5


def test_the_title_says_which_ranks_on_what_and_from_where_to_where(
    document: dict[str, Any],
) -> None:
    said = heading(views.parallel_waterfall(document))
    assert said.startswith(
        "A decode step, 2 of 8 ranks on 2 × NVIDIA H200: 9.00 → 2.50 ms | beam-501b, TP8, 52 layers"
    )
    for word in ("measured here", "torch 9.9", "2031-02-03", NOTE, "batch 1, context 4,096"):
        assert word in said
    assert "published: the whole model; here 2 of its 8 ranks" in said
    whole = document | {"gpus": 8, "how": "recorded", "hardware": "8 × NVIDIA H200"}
    every = heading(views.parallel_waterfall(whole))
    assert "A decode step, all 8 ranks on 8 × NVIDIA H200" in every
    assert "recorded on 8 × NVIDIA H200, torch 9.9" in every
    assert "published: the whole model; here 2 of its 8 ranks" not in every
    named = heading(views.parallel_waterfall(document | {"hardware": "NVIDIA H200"}))
    assert "on 2 × NVIDIA H200:" in named
    on_cpu = document | {"device": "cpu", "hardware": "a CPU", "backend": "gloo"}
    assert "2 of 8 ranks on a CPU" in heading(views.parallel_waterfall(on_cpu))
    assert "all-reduce by gloo" in views.parallel_waterfall(on_cpu).text


def test_a_figure_has_room_for_so_much_of_a_note_and_the_text_for_all(
    document: dict[str, Any],
) -> None:
    long = "which make up a model; " + "every batch has experts of its own, " * 4 + "at last"
    document["note"] = f"2 of 8 ranks; {long}; the end"
    for view in (draw(document) for draw in VIEWS):
        said = heading(view)
        assert "2 of 8 ranks; which make up a model …" in said
        assert "experts of its own" not in said
        assert document["note"] in view.text
        assert "make up a model" not in str(view.figure.data)  # said once, not in every hover
    document["note"] = "x" * 200  # one clause: whole
    assert "x" * 200 in views.parallel_calls(document).text
    part = views.parallel_calls(document | {"layers": 8})
    assert "TP8, 8 of 52 layers" in heading(part)


def test_every_bar_says_its_source_and_exchange(document: dict[str, Any]) -> None:
    view = views.parallel_waterfall(document | {"how": "recorded"})
    names = [plain(text) for text in view.figure.layout.yaxis.ticktext]
    assert "recorded, all-reduce by NCCL" in names[0]
    assert "recorded, all-reduce inside the boundary" in names[5]
    assert all("published, all-reduces included" in name for name in names[7:])
    hovers = " ".join(
        trace.hovertemplate.replace("%{hovertext}", text)
        .replace("%{meta}", str(trace.meta))
        .replace("<br>", " ")
        .replace("<extra></extra>", "")
        for trace in view.figure.data
        if trace.type == "bar"
        for text in (trace.hovertext or ())
    )
    assert "9.000 ms a step 7.500 ms without communication" in hovers
    assert "10th to 90th percentile 8.910 to 9.180" in hovers
    assert "8.950 ms a step published: GB200, TP8" in hovers
    assert hovers.count("NVIDIA H200") == 6  # each bar of ours
    assert "None" not in hovers
    assert hovers.count("inside the boundary; recorded on") == 1
    # The one legend entry is the communication's, and its pattern is no other bar's.
    shown = [t for t in view.figure.data if t.type == "bar" and t.showlegend is not False]
    assert [plain(t.name).partition(":")[0] for t in shown] == ["communication"]
    patterns = [t.marker.pattern.shape for t in view.figure.data if t.type == "bar"]
    assert patterns.count("+") == 1
    assert len(set(patterns)) > 3


def test_products_that_send_are_a_step_of_their_own(document: dict[str, Any]) -> None:
    sent = variant("fused chain, products send", 2.25, 2.0, exchange="products")
    document["runs"][0]["variants"]["fused_products"] = sent
    view = views.parallel_waterfall(document)
    names = [plain(text) for text in view.figure.layout.yaxis.ticktext]
    assert "measured here, all-reduce sent by the products" in names[6]
    found = segments(view)
    assert sorted(found[6])[0][2] == sorted(found[5])[0][2]  # of the same kind as the boundary's
    assert sorted(found[6])[0][2] != sorted(found[3])[0][2]  # and no chain of operations


def test_the_text_says_the_same(document: dict[str, Any]) -> None:
    text = views.parallel_waterfall(document).text
    assert text == views.parallel_waterfall(copy.deepcopy(document)).text
    (line,) = [one for one in text.splitlines() if one.startswith("fused chain, exchange in it")]
    assert line.split()[-8:] == ["2.50", "ms", "communication", "0.50", "ms", "1.67", "×", "floor"]
    assert "Other hardware: GB200, TP8: published, all-reduces included" in text
    assert "persistent" in text


def test_a_bar_without_a_second_time_is_whole_and_one_that_failed_has_none(
    document: dict[str, Any],
) -> None:
    rows = document["runs"][0]["variants"]
    rows["norms"] |= {"without": None, "communication_milliseconds": None}
    rows["gate"] |= {"communication_milliseconds": -0.03}  # noise
    rows["fused"] |= {"passed": False, "failures": ["layer 3 is off"], "milliseconds": None}
    view = views.parallel_waterfall(document)
    found = segments(view)
    for at, whole in ((1, 8.25), (2, 8.0)):
        (only,) = found[at]
        assert only[:2] == pytest.approx((0.0, whole))
    assert columns(view)[2].split()[1] == "−0.03"
    assert 4 not in found
    assert "not right, not timed: layer 3 is off" in view.text


def test_another_run_another_model(document: dict[str, Any]) -> None:
    view = views.parallel_waterfall(document, batch=32, context=4096)
    assert "18.00 ms" in heading(view)
    assert "GB200" not in view.text  # published at batch 1
    assert "GB200" not in views.parallel_waterfall(document | {"model": "beam-tiny"}).text
    with pytest.raises(WorkbenchError, match=r"no run of batch 8 and context 4096; it has: batch "
                       r"1, context 4,096; batch 32, context 4,096; batch 1"):  # fmt: skip
        views.parallel_waterfall(document, batch=8)


def test_calls_by_rows(document: dict[str, Any]) -> None:
    view = views.parallel_calls(document)
    found = {plain(t.name): dict(zip(t.x.tolist(), t.y.tolist(), strict=True))
             for t in view.figure.data}  # fmt: skip
    assert found["NCCL"] == {1: 14.0, 8: 15.0, 128: 22.0}
    assert found["this workbench's exchange"] == {1: 4.5, 8: 5.5}
    assert found["torch, one shot over symmetric memory"] == {1: 7.0, 8: 8.0, 128: 12.0}
    assert "One all-reduce, 2 of 8 ranks on 2 × NVIDIA H200" in heading(view)
    lines = view.text.splitlines()
    assert lines[1].split()[-3:] == ["1", "8", "128"]
    assert lines[-1].split()[-3:] == ["4.50", "5.50", "–"]
    styles = {(t.line.dash, t.marker.symbol) for t in view.figure.data}
    assert len(styles) == 3  # told apart without colour
    for row in document["calls"]:
        row |= {"exchange_us": None, "torch_one_shot_us": None}
    assert len(views.parallel_calls(document).figure.data) == 1
    with pytest.raises(WorkbenchError, match="no times of single all-reduces"):
        views.parallel_calls(document | {"calls": []})


def test_steps_by_batch_and_context(document: dict[str, Any]) -> None:
    view = views.parallel_load(document)
    found = {(plain(t.name), t.line.dash, t.meta): (t.x.tolist(), t.y.tolist())
             for t in view.figure.data}  # fmt: skip
    short, long = "4,096 tokens of context", "100,000 tokens of context"
    assert found[short, "solid", short] == ([1, 32], [2.5, 18.0])
    without = f"{short}, without all-reduces"
    assert found[without, "dash", without] == ([1, 32], [2.0, 16.0])
    assert found["floor", "dot", f"floor, {short}"] == ([1, 32], [1.5, 11.0])
    assert found[long, "solid", long] == ([1], [3.5])
    assert "batch     1     2.50 ms  without all-reduces    2.00 ms  communication 0.50 ms  floor "\
        "1.50 ms  (fused chain, exchange in it)" in view.text  # fmt: skip
    assert view.figure.layout.yaxis.type == "log"
    low, high = (10**end for end in view.figure.layout.yaxis.range)
    assert low < 1.5 < 18.0 < high
    ranks = {plain(t.name): t.legendrank for t in view.figure.data}
    assert ranks["floor"] > 1000  # at the end
    assert set(ranks.values()) == {None, ranks["floor"]}
    more = views.parallel_load(document | {"left_out": {"batch 99, context 7": "it is too large"}})
    assert "left out, the text says why: batch 99, context 7" in heading(more)
    assert "left out: batch 99, context 7: it is too large" in more.text
    for run in document["runs"]:
        for row in run["variants"].values():
            row |= {"milliseconds": None}
    with pytest.raises(WorkbenchError, match="no step of this document was timed"):
        views.parallel_load(document)


def test_a_prefill_by_its_layout() -> None:
    view = views.parallel_prefill(prefill())
    said = heading(view)
    assert said.startswith("Prefill by layout, 2 of 8 ranks on 2 × NVIDIA H200 | beam-501b")
    assert "tokens/s of ep over tp: 1.44" in said
    assert "2 sequences of 32,768 tokens" in said
    assert "published: one over the other: 1.5, another machine" in said
    found = segments(view)
    assert [one[:2] for one in sorted(found[0])] == [(0.0, 3000.0), (3000.0, 4000.0)]
    assert [one[:2] for one in sorted(found[1])] == [(0.0, 3100.0), (3100.0, 3600.0)]
    assert [one[:2] for one in found[2]] == [(0.0, 2500.0)]  # less than nothing: no segment
    assert 3 not in found
    assert [row.split() for row in columns(view)[:3]] == [
        ["4,000", "1,000", "16,384", "50%"],
        ["3,600", "500", "18,204", "50%"],
        ["2,500", "−20", "26,214", "50%"],
    ]
    names = [plain(text) for text in view.figure.layout.yaxis.ticktext]
    assert names[0] == "tensor parallel (tp) measured here"
    assert names[1] == "tensor parallel (tp) measured here, in overlapping pieces"
    assert names[2] == "attention data-parallel, experts whole (ep) measured here"
    lines = [line for line in view.text.splitlines() if line.startswith("tensor parallel (tp)")]
    assert ["in overlapping pieces" in line for line in lines] == [False, True]
    assert "there is none" in names[3]
    assert "tokens/s of ep over tp: 1.44" in view.text
    wrong = prefill()
    wrong["layouts"]["tp"] |= {"passed": False, "failures": ["layer 2"], "runs": []}
    assert "not right, not timed: layer 2" in views.parallel_prefill(wrong).text
    for place, value, field in (
        ("layouts", {"tp": {"runs": [{"overlap": 0}]}}, r"layouts.tp.runs\[0\].overlap"),
        ("ratio", "x", "ratio"),
        ("published", [{"value": None}], r"published\[0\].value"),
        ("schema", "x", "says schema 'x'"),
        ("layouts", {}, "no layout of a prefill"),
    ):
        left: dict[str, Any] = {"left_out": {}} if not value else {}
        with pytest.raises(WorkbenchError, match=field):
            views.parallel_prefill(prefill() | {place: value} | left)
    with pytest.raises(WorkbenchError, match="recorded_group_prefill"):
        views.parallel_prefill([])  # type: ignore[arg-type]


VIEWS = (views.parallel_waterfall, views.parallel_calls, views.parallel_load)


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        (("runs", 0, "variants", "norms", "milliseconds"), float("nan"), r"variants.norms.millis"),
        (("runs", 0, "variants", "norms", "without", "milliseconds"), -1, r"norms.without.millis"),
        (("runs", 0, "variants", "fused", "communication_milliseconds"), "x", "communication"),
        (("runs", 1, "variants", "load"), 3, r"runs\[1\].variants.load"),
        (("runs", 2, "context"), 0, r"runs\[2\].context"),
        (("runs", 0, "left_out"), [], r"runs\[0\].left_out"),
        (("runs",), {"a": 1}, "runs should be a list"),
        (("left_out",), {"a": 1}, "left_out.a"),
        (("calls", 1, "nccl_us"), 0, r"calls\[1\].nccl_us"),
        (("calls", 1, "rows"), "8", r"calls\[1\].rows"),
        (("calls", 0, "rows"), 2**31, r"calls\[0\].rows should be a whole number from 1 to 2,147"),
        (("runs", 0, "batch"), 2**40, r"runs\[0\].batch"),
        (("runs", 1, "context"), 2**31, r"runs\[1\].context"),
        (("runs", 1, "variants", "load", "milliseconds"), 1e-50, "load.milliseconds should be a"),
        (("runs", 1, "variants", "load", "milliseconds"), 1e13, "a number from 1e-09 to 1e\\+12"),
        (("runs", 1, "variants", "load", "fraction_of_floor"), 5e-324, "load.fraction_of_floor"),
        (("runs", 1, "floor_milliseconds"), 1e-320, r"runs\[1\].floor"),
        (("calls", 0, "nccl_us"), 1e-300, r"calls\[0\].nccl_us"),
        (("note",), "x" * 10_001, "note should be a text of at most 10,000 letters"),
        (("runs", 0, "variants", "norms", "failures"), ["x" * 10_001], "failures should be a text"),
        (("weights",), [0] * 1_000_001, "more than 1,000,000 values"),
        (("gpus",), None, "gpus should be a whole number"),
        (("tp",), 1.5, "tp should be a whole number"),
        (("hardware",), ["x"], "hardware"),
        (("schema",), "workbench-rank-decode/1", "says schema 'workbench-rank-decode/1'"),
    ],
)  # fmt: skip
def test_a_damaged_field_is_named(
    document: dict[str, Any], place: tuple[Any, ...], value: Any, field: str
) -> None:
    inner: Any = document
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    for view in VIEWS:
        with pytest.raises(WorkbenchError, match=field) as caught:
            view(document)
        assert "\n" not in str(caught.value)


def test_what_is_no_document_is_refused() -> None:
    for view in VIEWS:
        with pytest.raises(WorkbenchError, match="is a dict, as recorded_group"):
            view("file.json")  # type: ignore[arg-type]
    with pytest.raises(WorkbenchError, match="no run with a variant"):
        views.parallel_waterfall(made_up() | {"runs": []})


def test_names_from_a_document_are_never_markup(document: dict[str, Any]) -> None:
    hostile = "<script>alert(1)</script>"
    document |= {"hardware": hostile, "note": hostile, "model": hostile}
    document["left_out"] = {hostile: hostile}
    document["runs"][0]["left_out"] = {hostile: hostile}
    for row in document["runs"][0]["variants"].values():
        row |= {"title": hostile, "exchange": hostile}
    for view in VIEWS:
        shown = view(document)
        assert hostile in shown.text
        bundle = shown._repr_mimebundle_()
        assert "<script>" not in json.dumps({k: v for k, v in bundle.items() if k != "text/plain"})


def test_a_prefill_s_names_are_never_markup_and_its_numbers_can_be_drawn() -> None:
    hostile = "<script>alert(1)</script>"
    document = prefill() | {"hardware": hostile, "note": hostile, "left_out": {hostile: hostile}}
    for row in document["layouts"].values():
        row["title"] = hostile
    document["layouts"][hostile] = {"title": hostile, "passed": False, "failures": [hostile]}
    document["published"][0] |= {"name": hostile, "where": hostile, "unit": hostile}
    shown = views.parallel_prefill(document)
    assert hostile in shown.text
    bundle = shown._repr_mimebundle_()
    assert "<script>" not in json.dumps({k: v for k, v in bundle.items() if k != "text/plain"})
    for place, value in (
        ("milliseconds", 1e-30), ("fraction_of_peak", 1e300), ("overlap", 2**31), ("low", 0),
        ("tokens_per_second", 1e15),
    ):  # fmt: skip
        wrong = prefill()
        wrong["layouts"]["ep"]["runs"][0][place] = value
        with pytest.raises(WorkbenchError, match=place):
            views.parallel_prefill(wrong)


def test_letters_that_nobody_sees_are_none_of_a_view(document: dict[str, Any]) -> None:
    """They would move a terminal's cursor, or could not be written as UTF-8."""
    odd = "a\x1b[2J\ud800\u202eb\nc\x9b\r\0"
    document |= {"hardware": odd, "model": odd, "note": odd, "left_out": {odd: odd}}
    document["runs"][0]["left_out"] = {odd: odd}
    for row in document["runs"][0]["variants"].values():
        row |= {"title": odd, "exchange": odd}
    first = copy.deepcopy(document)
    for view in VIEWS:
        bundle = view(document)._repr_mimebundle_()
        text = bundle["text/plain"]
        assert not set(text) & set("\x1b\ud800\u202e\x9b\r\0")
        assert "b c" in text
        json.dumps(bundle, ensure_ascii=False).encode()
    assert document == first  # as it was given


def test_a_saved_notebook_keeps_little(document: dict[str, Any]) -> None:
    for view, most in zip(VIEWS, (20_000, 8_000, 9_000), strict=True):
        assert len(json.dumps(view(document)._repr_mimebundle_())) < most
    assert len(json.dumps(views.parallel_prefill(prefill())._repr_mimebundle_())) < 9_000
