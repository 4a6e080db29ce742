"""The rank under load: lines, floors, stacked kernel times, and what is said of damaged files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.errors import KernelError, WorkbenchError
from workbench.kernels.rank.recorded_loads import LOAD, PREFILL, recorded_load, recorded_prefill
from workbench.kernels.rank.recorded_runs import RECORDED
from workbench.views.rank_batches import _mode, rank_load, rank_verify
from workbench.views.rank_prompts import rank_prefill

CHECKOUT = Path(__file__).parents[2] / "benchmarks" / "results"
REPLAYS = {1: 4.47, 2: 5.33, 4: 7.26, 8: 11.1, 16: 16.1, 32: 23.9, 64: 31.9, 128: 36.2}


@pytest.fixture
def load() -> dict[str, Any]:
    return copy.deepcopy(recorded_load())


@pytest.fixture
def prefill() -> dict[str, Any]:
    return copy.deepcopy(recorded_prefill())


def lines(view: Any, axis: str = "y") -> dict[str, dict[int, float]]:
    """Points by the name of their line, of one panel."""
    found = {}
    for trace in view.figure.data:
        if trace.type == "scatter" and (trace.yaxis or "y") == axis:
            name = (trace.name or trace.meta).replace("</span>", "").partition(">")[2] or trace.meta
            found[name] = dict(zip(map(int, trace.x), map(float, trace.y), strict=True))
    return found


def test_batches_have_their_times_and_multiples_of_the_floor(load: dict[str, Any]) -> None:
    view = rank_load(load)
    found, above = lines(view), lines(view, "y2")
    for name, part in (("fused for many rows", "batches"), ("single operations", "chain")):
        rows = {int(k): row for k, row in load[part].items() if k in map(str, REPLAYS)}
        assert found[name] == pytest.approx({n: r["milliseconds"] for n, r in rows.items()})
        # The floor by hand: bytes over the bandwidth that the run measured.
        for n, row in rows.items():
            floor = row.get("bytes", row["floor"] * load["bandwidth"] / 1e3) / load["bandwidth"]
            assert above[name][n] == pytest.approx(row["milliseconds"] / floor / 1e3, rel=1e-4)
    assert found["vLLM 0.33, graph replay"] == pytest.approx(REPLAYS)
    assert found["vLLM 0.33, whole step, tuned"] == pytest.approx({8: 10.11, 32: 20.88, 128: 32.7})
    floor = {n: load["batches"][str(n)]["floor"] for n in REPLAYS}
    assert found["floor"] == pytest.approx(floor)
    assert above["vLLM 0.33, graph replay"][8] == pytest.approx(11.1 / floor[8])
    said = f"8 sequences  {load['batches']['8']['milliseconds']:6.2f} ms  floor {floor[8]:6.2f} ms"
    assert said in view.text
    for word in ("recorded on NVIDIA H200", "torch 2.11.0", load["date"], "no all-reduce",
                 "date not recorded", "1,024 tokens of context"):  # fmt: skip
        assert word in view.text


def test_the_engine_s_times_stand_beside_its_own_rank_only(load: dict[str, Any]) -> None:
    load["layers"] = 5
    assert set(lines(rank_load(load))) == {"fused for many rows", "single operations", "floor"}
    assert "vLLM" not in rank_verify(load).text


def test_wrong_and_odd_batches_have_no_point(load: dict[str, Any]) -> None:
    assert "7" in load["batches"]
    load["batches"]["8"]["failures"] = ["a layer's error"]
    found = lines(rank_load(load))["fused for many rows"]
    assert sorted(found) == [1, 2, 4, 16, 32, 64, 128]


def test_a_verification_has_its_floor_and_the_bench_s_document_too(load: dict[str, Any]) -> None:
    found = lines(rank_verify(load))
    rows = {int(n): row for n, row in load["verify"].items() if n.isdigit()}
    wanted = {n: row["milliseconds"] for n, row in rows.items()}
    assert found["fused for many rows"] == pytest.approx(wanted)
    assert sorted(wanted)[-1] == 1024
    assert found["floor"] == pytest.approx({n: row["floor"] for n, row in rows.items()})
    assert found["vLLM 0.33, graph replay"] == pytest.approx(REPLAYS)
    sizes = [{"rows": 4, "sequences": 2, "milliseconds": 6.0, "floor_milliseconds": 4.0,
              "failures": []}]  # fmt: skip
    view = rank_verify({"sizes": sizes, "model": "another", "context": 500})
    assert lines(view) == {"fused for many rows": {4: 6.0}, "floor": {4: 4.0}}
    assert "4 tokens    6.00 ms  floor   4.00 ms  1.50 × floor" in view.text
    assert "500 tokens of context" in view.text
    odd = [sizes[0] | {"rows": rows} for rows in (3, 100)]  # asked for, and so drawn
    assert lines(rank_verify({"sizes": odd}))["floor"] == {3: 4.0, 100: 4.0}


def test_the_engine_s_bf16_stands_beside_no_other_dtype(
    load: dict[str, Any], prefill: dict[str, Any]
) -> None:
    assert "vLLM" in rank_load(load).text
    assert "vLLM" in rank_prefill(prefill).text
    assert "vLLM" not in rank_load(load | {"dtype": "float32"}).text
    assert "vLLM" not in rank_prefill(prefill | {"dtype": "float32"}).text


def stacks(view: Any) -> dict[float, dict[str, float]]:
    """Milliseconds by part of each bar that has parts, by its place."""
    found: dict[float, dict[str, float]] = {}
    for trace in view.figure.data:
        if trace.type == "bar" and trace.showlegend is not False:
            for x, y in zip(trace.x, trace.y, strict=True):
                found.setdefault(round(float(y), 1), {})[trace.meta] = float(x)
    return dict(sorted(found.items()))


def test_a_prefill_s_parts_add_up_to_its_time(prefill: dict[str, Any]) -> None:
    view = rank_prefill(prefill)
    order = [f"{form}_{c}" for c in (0, 100_000) for form in ("ours", "chain")
             if f"{form}_{c}" in prefill]  # fmt: skip
    found = list(stacks(view).values())
    assert len(found) == len(order)
    for name, parts in zip(order, found, strict=True):
        row = prefill[name]
        assert sum(parts.values()) == pytest.approx(row["milliseconds"], rel=2e-3)
        # The kernels were timed in a run of their own, at other clocks.
        assert parts.get("in no kernel", 0) < 0.1 * row["milliseconds"]
        unit = "own_microseconds" if "own_microseconds" in row["kernels"][0] else "microseconds"
        total = sum(k[unit] for k in row["kernels"])
        down = sum(k[unit] for k in row["kernels"] if "down" in k["kernel"])
        share = down / max(total, row["milliseconds"] * 1e3) * row["milliseconds"]
        assert parts["experts: down"] == pytest.approx(share, rel=1e-5)
    for row in (prefill["ours_0"], prefill["ours_100000"]):
        rate = row["flops"]["all"] / row["milliseconds"] / prefill["matrix_rate"] * 1e3
        assert f"{row['milliseconds']:,.1f} ms, {rate:.1%} of the matrix rate" in view.text
    engine = prefill["ours_0"]["flops"]["all"] / 0.318 / prefill["matrix_rate"]
    assert f"318.0 ms, {engine:.1%} of the matrix rate" in view.text
    for word in ("328.0 ms", "176.0 ms", "GB200", "published", "recorded on NVIDIA H200"):
        assert word in view.text
    (numbers,) = [t for t in view.figure.data if t.type == "scatter"]
    assert [text.split()[0] for text in numbers.text[-2:]] == ["328", "176"]


def test_kernels_own_times_are_taken_where_there_are_any(prefill: dict[str, Any]) -> None:
    kernels = [("_gate_up_kernel", 60.0, 90.0), ("_top_k_kernel", 30.0, 80.0), ("odd", 5.0, 5.0)]
    row = prefill["ours_0"] | {"milliseconds": 0.1, "kernels": [
        {"kernel": n, "launches": 1, "microseconds": all_, "own_microseconds": own}
        for n, own, all_ in kernels]}  # fmt: skip
    document = {"ours_0": row, "matrix_rate": 7e14}
    view = rank_prefill(document)
    assert list(stacks(view).values()) == [
        pytest.approx(
            {
                "experts: gate and up": 0.06,
                "router and sort": 0.03,
                "norms and the rest": 0.005,
                "in no kernel": 0.005,
            }
        )
    ]
    assert "kernel's own end" in view.text
    for kernel in row["kernels"]:
        del kernel["own_microseconds"]
    view = rank_prefill(document)
    parts = next(iter(stacks(view).values()))
    assert parts["experts: gate and up"] == pytest.approx(0.1 * 90 / 175)
    assert "kernels overlap" in view.text


def test_a_long_bar_ends_at_the_edge_and_says_how_long_it_is(prefill: dict[str, Any]) -> None:
    view = rank_prefill(prefill)
    edge = view.figure.layout.xaxis.range[1]
    assert edge < prefill["naive_0"]["milliseconds"] / 3
    ends = np.concatenate([t.x for t in view.figure.data if t.type == "bar"])
    assert ends.max() <= edge * (1 + 1e-6)
    (numbers,) = [t for t in view.figure.data if t.type == "scatter"]
    assert f"{prefill['naive_0']['milliseconds']:,.0f}" in [t.split()[0] for t in numbers.text]


def test_the_bench_s_own_document_is_drawn_too() -> None:
    row = {"milliseconds": 3.0, "fraction_of_peak": 0.5, "failures": []}
    wrong = {"milliseconds": 1.0, "failures": ["a layer's error"]}
    view = rank_prefill(
        {"context": 7, "variants": {"naive": row, "ours": wrong}, "model": "beam-tiny"}
    )
    assert "behind 7 tokens" in view.text
    assert "3.0 ms, 50.0% of the matrix rate" in view.text
    assert "this workbench" not in view.text
    assert "vLLM" not in view.text


def test_views_say_the_same_each_time(load: dict[str, Any], prefill: dict[str, Any]) -> None:
    for view, document in ((rank_load, load), (rank_verify, load), (rank_prefill, prefill)):
        one, two = view(document), view(copy.deepcopy(document))
        assert one.text == two.text
        assert one.figure.to_json() == two.figure.to_json()
        assert len(one.figure.to_json()) < 20_000


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("milliseconds", "fast", "batches\\[8\\].milliseconds .* should be a number above 0"),
        ("milliseconds", -1.0, "should be a number above 0"),
        ("floor", None, "batches\\[8\\].floor"),
        ("floor", float("inf"), "should be a number above 0"),
    ],
)
def test_damaged_fields_are_named(load: dict[str, Any], part: str, value: Any, words: str) -> None:
    load["batches"]["8"][part] = value
    with pytest.raises(WorkbenchError, match=words):
        rank_load(load)


def test_what_is_no_such_document_is_refused(
    load: dict[str, Any], prefill: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(WorkbenchError, match="is a dict, as recorded_load"):
        rank_load([])  # type: ignore[arg-type]
    with pytest.raises(WorkbenchError, match="is a dict, as recorded_prefill"):
        rank_prefill("x")  # type: ignore[arg-type]
    with pytest.raises(WorkbenchError, match="no times of verify"):
        rank_verify({"batches": load["batches"]})
    with pytest.raises(WorkbenchError, match="should be an object"):
        rank_load({"batches": {"8": 3}})
    with pytest.raises(WorkbenchError, match="no time of a prefill"):
        rank_prefill({"matrix_rate": 1e12})
    prefill["ours_0"]["kernels"] = {"a": 1}
    with pytest.raises(WorkbenchError, match="kernels of ours behind 0"):
        rank_prefill(prefill)
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"kind": "decode"}))
    with pytest.raises(KernelError, match="no document of a batched decode"):
        recorded_load(file)
    with pytest.raises(KernelError, match="no document of a prefill"):
        recorded_prefill(file)
    with pytest.raises(KernelError, match="cannot be read"):
        recorded_load(tmp_path / "absent.json")


@pytest.mark.parametrize("name", [LOAD, PREFILL])
def test_the_package_has_the_checkout_s_record(name: str) -> None:
    content = (RECORDED / name).read_bytes()
    assert len(content) < 60_000
    assert content == (CHECKOUT / name).read_bytes()


def test_no_line_runs_over_sizes_that_were_not_measured() -> None:
    floor = {4: 1.0, 8: 2.0, 16: 3.0, 32: 4.0}
    assert _mode([8, 16, 32], floor) == "lines+markers"
    assert _mode([8, 32], floor) == "markers"
    assert _mode([], floor) == "lines+markers"
