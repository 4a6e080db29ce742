"""Results in files: what is written can be read, what is damaged or foreign is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import KernelError, WorkbenchError
from workbench.kernels import results
from workbench.kernels.catalogue import OPS
from workbench.kernels.ops import operation
from workbench.kernels.results import (
    CHECKOUT,
    PACKAGED,
    BenchResult,
    BenchRow,
    load,
    recorded,
    recorded_files,
    row_of,
)

TIMED = BenchRow(
    op="boundary",
    variant="triton",
    tokens=8,
    model="beam-501b",
    tp=8,
    status="passed",
    max_error=0.0031234567,
    own_error=0.0031,
    microseconds=2.345678,
    microseconds_low=2.3,
    microseconds_high=2.5,
    calls=32,
    rounds=25,
    in_graph=True,
    bytes=348160.0,
    flops=450560.0,
    math="fp32",
    bytes_per_second=1.4e11,
    flops_per_second=1.9e11,
    bound_microseconds=0.08,
    roofline_fraction=0.034,
    limit="memory",
    ratio_to_reference=12.5,
)
REFUSED = BenchRow(
    op="boundary", variant="mine", tokens=8, status="refused", gate="worst row", reason="0.5 > 0.1"
)
RESULT = BenchResult(
    rows=(TIMED, REFUSED),
    device="cuda",
    hardware="NVIDIA H200",
    peaks={"bandwidth": 4.2e12, "flops": {"bf16": 7.8e14}},
    machine={"cpu": "some"},
    versions={"torch": "2.11.0", "triton": "3.6.0", "vllm": None},
    date="2026-11-29",
)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "kernels-h200.json"
    RESULT.write(path)
    found = load(path)
    assert found.how == "recorded"
    assert (found.hardware, found.date, found.device) == ("NVIDIA H200", "2026-11-29", "cuda")
    assert found.rows[1] == REFUSED
    row = found.rows[0]
    assert row.microseconds == 2.3457  # five digits
    assert row.max_error == 0.0031235
    assert (row.tp, row.calls, row.in_graph, row.limit) == (8, 32, True, "memory")
    assert found.peaks == RESULT.peaks
    assert found.source == "recorded on NVIDIA H200, 2026-11-29 (torch 2.11.0, triton 3.6.0)"
    assert len(path.read_text().splitlines()) < 100  # a row a line: a change can be read
    assert found.select(variant="triton", tokens=8) == (row,)
    assert found.select(tokens=9) == ()
    with pytest.raises(KernelError, match="rows have no 'size'"):
        found.select(size=1)


def test_no_rows(tmp_path: Path) -> None:
    empty = BenchResult(rows=(), device="cpu", hardware="x")
    empty.write(tmp_path / "f.json")
    assert load(tmp_path / "f.json").rows == ()


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.__setitem__(name, value)


def _cell(row: int, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["rows"][row][document["columns"].index(name)] = value

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_set("format", "something else"), "is not a result of"),
        (_set("version", 99), "version 99"),
        (_set("rows", None), "rows is missing or of the wrong type"),
        (_set("hardware", 5), "hardware is missing"),
        (_set("columns", ["op"]), "columns do not fit"),
        (lambda d: d["columns"].__setitem__(3, "surprise"), "surprise"),
        (lambda d: d["rows"][0].pop(), "row 0 does not have"),
        (_cell(0, "tokens", "many"), "row 0: tokens cannot be 'many'"),
        (_cell(0, "tokens", True), "tokens cannot be True"),
        (_cell(0, "microseconds", "fast"), "microseconds cannot be"),
        (_cell(0, "microseconds", -1.0), "must be a number of 0 or more"),
        (_cell(0, "status", "fine"), "unknown status"),
        (_cell(0, "status", "refused"), "shows no speed"),
        (_cell(1, "microseconds", 1.0), "row 1: .*shows no speed"),
        (_cell(0, "op", ["boundary"]), "op cannot be"),
        (_cell(0, "tokens", 10**400), "tokens cannot be a number beyond what a float holds"),
        (_cell(0, "bytes", 10**400), "bytes cannot be a number beyond"),
        (_cell(0, "bytes", True), "bytes cannot be True"),
        (_cell(0, "microseconds", False), "microseconds cannot be False"),
        (_cell(0, "in_graph", 1), "in_graph cannot be 1"),
        *(
            (_cell(0, name, None), f"a time is given without {name}")
            for name in (
                "microseconds_low",
                "microseconds_high",
                "calls",
                "rounds",
                "in_graph",
                "bytes",
                "flops",
                "bytes_per_second",
                "flops_per_second",
                "bound_microseconds",
                "roofline_fraction",
            )
        ),
        *((_cell(0, name, ""), f"a time is given without {name}") for name in ("math", "limit")),
        (lambda d: d["columns"].__setitem__(d["columns"].index("bytes"), "bytes_"), "bytes_"),
        (_cell(0, "microseconds_low", 2.4), "not between its percentiles"),
        (_cell(0, "microseconds_high", 2.3), "not between its percentiles"),
        *(
            (_cell(0, name, "a\x1b[31mb"), rf"row 0: {name} cannot be 'a\\x1b\[31mb'")
            for name in ("op", "variant", "flavour", "model", "dtype", "math", "limit", "gate")
        ),
        *(
            (_set(name, "a\u202eb"), rf"{name} holds control characters \('a\\u202eb'\)")
            for name in ("hardware", "device", "date", "note")
        ),
        (_set("peaks", {"bandwidth": 1e12}), "peaks need a bandwidth and flops"),
        (_set("peaks", {"bandwidth": 1e12, "flops": 5}), "peaks need"),
        (_set("peaks", {"bandwidth": True, "flops": {}}), "peaks need"),
        (_set("peaks", {"bandwidth": 10**400, "flops": {}}), "peaks need"),
        (_set("peaks", {"bandwidth": 1e12, "flops": {"bf16": "much"}}), "peaks need"),
    ],
)
def test_damaged(tmp_path: Path, damage: Callable[[dict[str, Any]], None], words: str) -> None:
    document = RESULT.to_dict()
    damage(document)
    path = tmp_path / "kernels-x.json"
    path.write_text(json.dumps(document))
    with pytest.raises(KernelError, match=words) as error:
        load(path)
    assert str(path) in str(error.value)


def test_a_row_as_a_dictionary_comes_back() -> None:
    for row in RESULT.rows:
        assert row_of(row.to_dict(), "it") == row
    good = TIMED.to_dict()
    for bad in (
        None, [], "x", {}, good | {"more": 1}, good | {"passed": False}, good | {"available": None},
        good | {"microseconds": 10**400}, good | {"microseconds": "1"},
        {k: v for k, v in good.items() if k != "bytes"},
    ):  # fmt: skip
        with pytest.raises(KernelError, match="it"):
            row_of(bad, "it")


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 1}', '{"format": ', "null", "nonsense"])
def test_foreign_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kernels-x.json"
    path.write_text(text)
    with pytest.raises(WorkbenchError, match="kernels-x"):
        load(path)
    with pytest.raises(WorkbenchError, match="cannot be read"):
        load(tmp_path / "absent.json")


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "kernels-x.json"
    path.write_text("what was there")
    bad = BenchResult(rows=(), device="cpu", hardware="x", peaks={"bandwidth": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        bad.write(path)
    assert path.read_text() == "what was there"
    assert [p.name for p in tmp_path.iterdir()] == ["kernels-x.json"]
    with pytest.raises(WorkbenchError, match="cannot be written"):
        RESULT.write(tmp_path / "no such folder" / "f.json")


def test_recorded_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged, checkout = tmp_path / "packaged", tmp_path / "checkout"
    packaged.mkdir()
    assert recorded_files((packaged, checkout)) == []
    checkout.mkdir()
    (checkout / "cpu_decode.json").write_text("{}")  # another benchmark's
    RESULT.write(packaged / "kernels-h200.json")
    RESULT.write(checkout / "kernels-h200.json")
    RESULT.write(checkout / "kernels-b200.json")
    found = recorded_files((packaged, checkout))
    assert found == [checkout / "kernels-b200.json", packaged / "kernels-h200.json"]
    monkeypatch.setattr(results, "recorded_files", lambda: found)
    assert len(recorded()) == 2
    assert len(recorded("h200")) == 2
    assert recorded("GB300") == []


def test_what_is_recorded_here_is_whole() -> None:
    for result in recorded():
        assert result.how == "recorded"
        assert result.rows
        assert result.date
        assert result.versions["torch"]
        assert result.peaks["bandwidth"] > 0
        for row in result.rows:
            if row.microseconds is not None:
                assert row.bytes_per_second is not None
                assert row.bytes is not None
                assert row.bytes_per_second == pytest.approx(
                    row.bytes / row.microseconds * 1e6, rel=1e-3
                )


RUN = "kernels-h200.json"


def test_the_recorded_run_has_every_operation_at_every_size() -> None:
    """Beam-501B on one H200: reference and Triton, right and timed; vLLM's, right or refused."""
    (result,) = recorded("H200")
    assert (CHECKOUT / RUN).read_bytes() == (PACKAGED / RUN).read_bytes()
    assert result.versions["vllm"] == "0.33.0"
    sizes = {(op, f, n) for op in OPS for f in operation(op).flavours for n in (1, 7, 8, 64, 1024)}
    for variant in ("torch", "triton"):
        for tp in (8, 4):
            rows = result.select(variant=variant, tp=tp)
            assert {(r.op, r.flavour, r.tokens) for r in rows if r.timed} == sizes, (variant, tp)
            assert len(rows) == len(sizes)
    refused = {(r.op, r.flavour): r.gate for r in result.select(variant="vllm") if not r.passed}
    assert refused == {("softcap", ""): "relative error", ("selector_walk", "sampled"): "result"}
    assert not any(r.timed for r in result.select(variant="vllm", op="softcap"))


def test_the_recorded_losses_to_the_engine_are_those_that_the_notes_name() -> None:
    (result,) = recorded("H200")
    engine = {
        (r.tp, r.op, r.flavour, r.tokens): r.microseconds
        for r in result.select(variant="vllm")
        if r.microseconds
    }
    lost = {
        (row.tp, row.op, row.tokens)
        for row in result.select(variant="triton")
        if (theirs := engine.get((row.tp, row.op, row.flavour, row.tokens)))
        and (row.microseconds or 0) > theirs
    }
    assert lost == {
        (8, "qkvg", 1024), (4, "qkvg", 1024),  # cuBLAS
        (8, "dense_mlp", 1024), (4, "dense_mlp", 1024), (4, "dense_mlp", 64),  # cuBLAS
    }  # fmt: skip
