"""The recorded runs of several ranks that come with the package: read, whole, drawn as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from workbench import views
from workbench.kernels.parallel.recorded_groups import (
    DECODE,
    PREFILL,
    recorded_group,
    recorded_group_prefill,
)
from workbench.kernels.rank.recorded_runs import RECORDED

CHECKOUT = Path(__file__).parents[3] / "benchmarks" / "results"
EXCHANGED = {  # the step whose kernels exchange, and the one that differs in nothing else
    "products_boundary": "products",
    "fused_boundary": "fused_pdl",
    "fused_products": "fused_pdl",
    "load_boundary": "load",
}


@pytest.fixture(scope="module")
def group() -> dict[str, Any]:
    return recorded_group()


@pytest.fixture(scope="module")
def layouts() -> dict[str, Any]:
    return recorded_group_prefill()


def steps(document: dict[str, Any]) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    return [(run, name, row) for run in document["runs"] for name, row in run["variants"].items()]


@pytest.mark.parametrize("name", [DECODE, PREFILL])
def test_the_package_has_the_checkout_s_record(name: str) -> None:
    content = (RECORDED / name).read_bytes()
    assert content == (CHECKOUT / name).read_bytes()
    assert len(content) < 250_000
    compact = json.dumps(json.loads(content), ensure_ascii=False, separators=(",", ":"))
    assert content.decode() == compact + "\n"


def test_they_say_what_they_were_recorded_on(
    group: dict[str, Any], layouts: dict[str, Any]
) -> None:
    for document in (group, layouts):
        assert document["how"] == "recorded"
        assert (document["model"], document["tp"], document["gpus"]) == ("beam-501b", 8, 2)
        assert (document["hardware"], document["device"]) == ("2 × NVIDIA H200", "cuda")
        assert document["note"].startswith("2 of 8 ranks")
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", document["date"])
        assert {"torch", "triton", "nccl"} <= {k for k, v in document["versions"].items() if v}
    assert group["layers"] == group["of_layers"] == 52
    assert {"took_seconds"}.isdisjoint({*group, *group["prefill"], *layouts})
    pairs = {(batch, context) for batch in (1, 8, 32, 128) for context in (4096, 100_000)}
    there = {(run["batch"], run["context"]) for run in group["runs"]}
    absent = {f"batch {batch}, context {context:,}" for batch, context in pairs - there}
    assert there <= pairs
    assert absent == {*group["left_out"]}  # with a reason
    assert (1, 4096) in there


def test_every_step_was_right_by_its_own_limit(group: dict[str, Any]) -> None:
    for run, name, row in steps(group):
        check, limit = row["check"], run["error_limit"]
        assert limit == pytest.approx(2 * run["plain_error"])
        assert 0 < check["worst_layer_error"] <= limit, (run["batch"], name)
        assert check["finite"]
        assert check["next_token_equal"]
        assert check["expert_sets_unexplained"] == 0
        assert check["ranks"] == 2
        assert row["passed"]
        assert [row["failures"], row["interpreted"], check["differences"]] == [[], False, []]


def test_communication_is_what_a_step_takes_without_it_less(group: dict[str, Any]) -> None:
    for run, name, row in steps(group):
        spent, without = row["milliseconds"], row["without"]["milliseconds"]
        alike = (row["same_choices"] or row)["milliseconds"]  # with the same experts
        assert row["communication_milliseconds"] == pytest.approx(alike - without)
        assert run["floor_milliseconds"] < without < spent, name
        assert row["low"] <= spent <= row["high"]
        assert spent == pytest.approx(row["repeat"], rel=0.02)  # timed again
        assert row["communication_milliseconds"] > 0
        assert row["fraction_of_floor"] == pytest.approx(run["floor_milliseconds"] / spent)
    for run in group["runs"]:
        of = {name: row["milliseconds"] for name, row in run["variants"].items()}
        assert run["fastest"] == min(of, key=of.__getitem__)


def test_an_exchange_inside_the_step_costs_less_than_nccl(group: dict[str, Any]) -> None:
    compared = 0
    for run, name, row in steps(group):
        other = run["variants"].get(EXCHANGED.get(name, ""))
        if other is None:
            continue
        compared += 1
        assert row["exchange"] != "nccl" == other["exchange"]
        assert row["communication_milliseconds"] < other["communication_milliseconds"]
        assert row["milliseconds"] < other["milliseconds"]
    assert compared >= len(group["runs"])
    # The optimisations in their order, each with everything before it.
    first = next(run for run in group["runs"] if (run["batch"], run["context"]) == (1, 4096))
    order = ["naive", "norms", "merged", "router", "kv", "dense", "gate", "attention", "experts",
             "products"]  # fmt: skip
    times = [first["variants"][name]["milliseconds"] for name in order]
    assert times == sorted(times, reverse=True)
    assert first["milliseconds"] < first["variants"]["fused_pdl"]["milliseconds"] < times[-1]


def test_single_calls_keep_the_bar(group: dict[str, Any]) -> None:
    calls = {call["rows"]: call for call in group["calls"]}
    assert calls[1]["exchange_us"] <= 12
    for call in calls.values():
        assert call["exchange_us"] < call["torch_one_shot_us"] < call["nccl_us"]
    # What a step adds is of the size of two calls a layer: they are in it.
    first = next(run for run in group["runs"] if (run["batch"], run["context"]) == (1, 4096))
    for name, way in (("naive", "nccl_us"), ("fused_boundary", "exchange_us")):
        added = first["variants"][name]["communication_milliseconds"]
        assert added > 0.5 * 2 * 52 * calls[1][way] / 1e3, name


def test_the_prefills_are_right_and_timed(group: dict[str, Any], layouts: dict[str, Any]) -> None:
    alone = group["prefill"]
    assert (alone["sequences"], alone["tokens"], alone["context"]) == (8, 2048, 100_000)
    assert [one["value"] for one in alone["published"]] == [328, 176]
    assert all(one["where"] == "GB200, TP8" for one in alone["published"])
    assert (layouts["sequences"], layouts["tokens"], {*layouts["layouts"]}) == (
        2, 32_768, {"tp", "ep"}
    )  # fmt: skip
    (beside,) = layouts["published"]
    assert beside["where"] == "4 x GB300"
    assert beside["value"] == pytest.approx(168.8 / 98.7)
    for prefill, rows in [
        (alone, 8 * 2048),
        *((layout, 2 * 32_768) for layout in layouts["layouts"].values()),
    ]:
        assert prefill["passed"]
        assert not prefill["failures"]
        assert prefill["check"]["worst_layer_error"] <= prefill["error_limit"]
        assert prefill["check"]["expert_sets_unexplained"] == 0
        assert [run["overlap"] for run in prefill["runs"]] == [1, 2]
        for run in prefill["runs"]:
            spent, without = run["milliseconds"], run["without"]["milliseconds"]
            assert run["communication_milliseconds"] == pytest.approx(spent - without)
            assert run["tokens_per_second"] == pytest.approx(1e3 * rows / spent)
            assert 0 < run["fraction_of_peak"] < 1
        assert prefill["milliseconds"] == min(run["milliseconds"] for run in prefill["runs"])
    tp, ep = (layouts["layouts"][name] for name in ("tp", "ep"))
    assert layouts["ratio"] == pytest.approx(ep["tokens_per_second"] / tp["tokens_per_second"])
    assert ep["bytes_sent_per_token"] < tp["bytes_sent_per_token"]


def columns(view: Any) -> list[list[str]]:
    (trace,) = [t for t in view.figure.data if t.type == "scatter" and t.mode == "text"]
    return [str(text).split() for text in trace.text[1:]]


def test_the_views_show_the_recorded_figures(
    group: dict[str, Any], layouts: dict[str, Any]
) -> None:
    first = next(run for run in group["runs"] if (run["batch"], run["context"]) == (1, 4096))
    rows = [*first["variants"].values()]
    shown = columns(views.parallel_waterfall(group))
    assert shown[: len(rows)] == [
        [
            f"{row['milliseconds']:.2f}", f"{row['communication_milliseconds']:.2f}",
            f"{row['milliseconds'] / first['floor_milliseconds']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    assert shown[len(rows) + len(first["left_out"]) :] == [["8.95"], ["3.30"]]
    for trace, field in zip(
        views.parallel_calls(group).figure.data,
        ("nccl_us", "torch_one_shot_us", "exchange_us"), strict=True,
    ):  # fmt: skip
        assert trace.x.tolist() == [call["rows"] for call in group["calls"]]
        assert trace.y.tolist() == pytest.approx([call[field] for call in group["calls"]])
    solid = {t.meta: t for t in views.parallel_load(group).figure.data if t.line.dash == "solid"}
    for run in group["runs"]:
        trace = solid[f"{run['context']:,} tokens of context"]
        at = trace.x.tolist().index(run["batch"])
        assert trace.y[at] == pytest.approx(run["milliseconds"])
    timed = [run for layout in layouts["layouts"].values() for run in layout["runs"]]
    assert columns(views.parallel_prefill(layouts)) == [
        [
            f"{run['milliseconds']:,.0f}", f"{run['communication_milliseconds']:,.0f}",
            f"{run['tokens_per_second']:,.0f}", f"{run['fraction_of_peak']:.0%}",
        ]
        for run in timed
    ]  # fmt: skip
