"""The decode step's waterfall: numbers, order, labels, and what is said of a wrong variant."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from workbench import views
from workbench.errors import KernelError, WorkbenchError
from workbench.kernels.rank.recorded_runs import (
    DECODE,
    PERSISTENT,
    RECORDED,
    recorded_decode,
    recorded_persistent,
)

CHECKOUT = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(recorded_decode())


def words(view: Any) -> list[str]:
    """What stands beside the bars, from the top."""
    (trace,) = [t for t in view.figure.data if t.type == "scatter"]
    return [text.split(">", 1)[1].split("<")[0].strip() for text in trace.text]


def test_each_variant_has_its_bar_with_time_and_part_of_the_floor(document: dict[str, Any]) -> None:
    view = views.rank_waterfall(document, others=[("another", 2.0, "elsewhere")])
    bars = {int(y): float(x) for t in view.figure.data if t.type == "bar"
            for x, y in zip(t.x, t.y, strict=True)}  # fmt: skip
    # The floor by hand: bytes over the bandwidth that the run measured.
    floor = (document["weight_bytes"] + document["cache_bytes"]) / document["bandwidth"] * 1e3
    for place, row in enumerate(document["variants"].values()):
        assert bars[place] == pytest.approx(row["milliseconds"], rel=1e-6)
        assert words(view)[place].startswith(f"{row['milliseconds']:.2f} ms")
        assert f"{floor / row['milliseconds']:.0%} of the floor" in words(view)[place]
    count = len(document["variants"])
    assert sorted(bars) == list(range(count + 5))
    assert [bars[count + i] for i in range(5)] == pytest.approx([2.0, 4.47, 4.59, 8.95, 3.30])
    assert "all-reduces included" in words(view)[-1]
    assert "no all-reduce on one GPU" in view.figure.to_json().replace("<br>", " ")
    assert "recorded (NVIDIA H200" in view.text


def test_origins_are_told_apart_without_colour(document: dict[str, Any]) -> None:
    bars = [t for t in views.rank_waterfall(document).figure.data if t.type == "bar"]
    patterns = [t.marker.pattern.shape for t in bars]
    assert len(set(patterns)) == len(patterns) == 5
    assert all(t.name for t in bars)


def test_a_wrong_variant_has_a_reason_in_place_of_its_time(document: dict[str, Any]) -> None:
    row = document["variants"]["gate"]
    row["passed"], row["failures"] = False, ["layer 3 is <b>off</b>"]
    view = views.rank_waterfall(document)
    place = list(document["variants"]).index("gate")
    assert f"{row['milliseconds']:.2f} ms" not in words(view)[place]
    (trace,) = [t for t in view.figure.data if t.type == "scatter"]
    assert "layer 3 is" in trace.text[place]
    assert "<b>off" not in trace.text[place]
    assert "layer 3 is <b>off</b>" in view.text
    row.update(dict.fromkeys(("milliseconds", "low", "high", "fraction_of_floor")))  # as measured
    assert views.rank_waterfall(document).text == view.text
    assert "&lt;b&gt;off" in view._repr_mimebundle_()["text/html"]


def test_leaving_one_out_is_sorted_and_signed(document: dict[str, Any]) -> None:
    document["leave_one_out"]["gate"]["costs"] = -0.25
    document["leave_one_out"]["kv"]["costs"] = None
    view = views.rank_leave_one_out(document)
    (bar,) = view.figure.data
    assert list(bar.x) == sorted(bar.x, reverse=True)
    assert "output-gate kernel: -0.25 ms" in view.text
    assert len(bar.x) == len(document["leave_one_out"]) - 1
    assert "kv: not timed" in view.text
    one = document["leave_one_out"]["norms"]
    whole = document["variants"]["products"]["milliseconds"]
    assert one["costs"] == pytest.approx(one["milliseconds"] - whole, abs=2e-3)
    for row in document["leave_one_out"].values():
        row["costs"] = None
    with pytest.raises(WorkbenchError, match="timed none of them"):
        views.rank_leave_one_out(document)
    document["leave_one_out"] = {}
    with pytest.raises(WorkbenchError, match="did not leave optimisations out"):
        views.rank_leave_one_out(document)


def test_kernels_add_up(document: dict[str, Any]) -> None:
    view = views.rank_kernels(document)
    rows = document["kernels"]["fused"]
    total = sum(row["microseconds"] for row in rows)
    assert f"kernels {total:,.0f} µs" in view.text
    # A launch of it apart, and its part of all.
    first = rows[0]
    line = next(x for x in view.text.splitlines() if x.startswith(first["kernel"]))
    assert f"{first['microseconds'] / first['launches']:.2f}" in line
    assert line.endswith(f"{first['microseconds'] / total:.1%}")
    assert "overlap" not in view.text
    assert "overlap" in views.rank_kernels(document, "fused_pdl").text
    with pytest.raises(WorkbenchError, match="no kernel times of 'router'; it has those of: naive"):
        views.rank_kernels(document, "router")


def test_nothing_to_show_is_said(document: dict[str, Any]) -> None:
    document["variants"] = {}
    with pytest.raises(WorkbenchError, match="no variant of the step"):
        views.rank_waterfall(document)


def test_the_recorded_runs_are_those_of_the_benchmarks() -> None:
    for name in (DECODE, PERSISTENT):
        assert (RECORDED / name).read_bytes() == (CHECKOUT / name).read_bytes()
    document = recorded_decode()
    assert document["how"] == "recorded"
    assert all(row["passed"] for row in document["variants"].values())
    # The Triton chain's bars: 1.85 times the floor, 0.57 of the engine's replay, two runs alike.
    best = document["variants"]["fused_pdl"]["milliseconds"]
    assert best <= 1.85 * document["weights_floor_milliseconds"]
    assert best <= 0.57 * 4.47
    assert document["repeat_percent"] <= 2
    check = recorded_persistent()["time"]["all_layers"]
    assert check["next_token_equal"]
    assert check["expert_sets_different"] == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON, or a part of it"),
        ("[]", "holds no document"),
        ('{"schema": "workbench-rank-decode/9"}', "of another release"),
        ("{}", "says schema None"),
        (json.dumps({"schema": "workbench-rank-decode/1", "note": ""}), "lacks variants"),
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
