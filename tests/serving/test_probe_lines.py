"""Passes as lines of a trace, by hand and by what vLLM 0.33.0 itself decided (recorded vectors)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.serving.probe.lines import Lines
from workbench.spec.adaptive import budget_of, survival
from workbench.spec.cost_table import CostTable
from workbench.spec.step import Step

ENGINE = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "engine_adaptive.json").read_text("utf-8")
)


def costs(table: dict[str, Any], sizes: int = 4096) -> tuple[dict[str, Any], dict[str, Any]]:
    """The frame of a recorded table."""
    made = CostTable(
        draft=table["draft_curve"],
        verify=table["verify_curve"],
        captured=table["captured"]
        or max(n for n, _ in (*table["draft_curve"], *table["verify_curve"])),
    )
    verify = made.verify_ms(np.arange(sizes))
    verify[: len(table["verify_ms"])] = table["verify_ms"]  # the engine's own as far as recorded
    values = {
        "what": "costs", "draft": table["draft_curve"], "verify": table["verify_curve"],
        "captured": table["captured"], "most_rows": 4096, "context": None,
    }  # fmt: skip
    return values, {"draft_ms": table["draft_ms"], "verify_ms": verify.tolist()}


def frame(**changed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A pass of three requests with two drafts each: one is whole, one is refused, one is new.

    Their persistent rows are 2, 0 and 3; row 1 is somebody's who waits.
    """
    values = {
        "what": "pass", "number": 4, "at": 1.5, "seconds": [0.004, 0.003, 0.001],
        "decide_seconds": 0.0002, "rows": 12, "budget": 3, "most_drafts": 100, "slots": 2,
        "width": 3, "names": ["a", "b", "c"], "fitted": None, "dropped": 0,
        "ends": [],
    }  # fmt: skip
    arrays = {
        "row": [2, 0, 3], "drafted": [2, 2, 0], "admitted": [2, 1, 0, -7], "sampled": [3, 1, 1],
        "tokens": [11, 12, 13, 21, -1, -1, 31, -1, -1], "prefilling": [False, False, True],
        "scheduled": [3, 3, 7], "computed": [39, 49, 0], "prompt": [30, 50, 7],
        "lengths": [50, 77, 40, 7], "drafts": [98, 99, 0, 0, 11, 12, 0, 0],
        "live": [0.75, 0.5, 0.1, 0.1, 0.5, 0.25, 1.0, 1.0],
        "stale": [0.25, 0.5, 0.1, 0.1, 0.75, 0.5, 1.0, 1.0],
    }  # fmt: skip
    for name, value in changed.items():
        (values if name in values else arrays)[name] = value
    return values, arrays


def only(lines: Lines, given: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    (line,) = lines.of(*given)
    assert line.data.endswith(b"\n")
    assert line.keep == ""
    found: dict[str, Any] = json.loads(line.data)
    return found


def test_a_pass_by_hand() -> None:
    lines = Lines()
    # 9 rows of its own, then 1 ms more for each draft; drafting costs nothing.
    table = {
        "draft_curve": [[1, 0.0]], "verify_curve": [[9, 1.0], [13, 5.0]], "captured": 0,
        "draft_ms": [0.0] * 5, "verify_ms": [1.0] * 10 + [2.0, 3.0, 4.0, 5.0],
    }  # fmt: skip
    values, arrays = costs(table, 14)
    lines.of(values, arrays)
    data = only(lines, frame(budget=0, admitted=[0, 0, 0], sampled=[1, 1, 1]))
    # Survivals 3/4, 3/8, 1/4, 1/8: tokens 3, 3.75, 4.125, 4.375, 4.5 for 1, 2, 3, 4, 5 ms.
    assert data["objective"] == [3.0, 1.875, 1.375, 1.09375, 0.9]
    assert [r["kinds"] for r in data["requests"]] == [["plain"], ["plain"], ["first"]]
    data = only(lines, frame())  # that budget is not the table's: what was weighed is not known
    assert "objective" not in data or data["objective"] == []
    assert data["index"] == 1
    assert data["phase"] == "decode"
    assert (data["rows"], data["seconds"]) == (12, 0.004)
    assert (data["verify_seconds"], data["draft_seconds"]) == (0.003, 0.001)
    assert data["decide_seconds"] == 0.0002
    assert data["reason"] == "3 of 4 drafts give the most tokens a millisecond"
    assert data["engine"] == {"pass": 4, "at": 1.5, "plain": 9, "sampling": 3, "budget": 3}
    assert data["requests"] == [
        {
            "request": 0, "position": 40, "drafted": [11, 12], "expected": [0.5, 0.25],
            "stale": [0.75, 0.5], "admitted": 2, "accepted": 2, "token_ids": [11, 12, 13],
            "kinds": ["accepted", "accepted", "bonus"],
        },
        {
            "request": 1, "position": 50, "drafted": [98, 99], "expected": [0.75, 0.5],
            "stale": [0.25, 0.5], "admitted": 1, "accepted": 0, "token_ids": [21],
            "kinds": ["corrected"],
        },
        {
            "request": 2, "position": 7, "admitted": 0, "accepted": 0, "token_ids": [31],
            "kinds": ["plain"],  # it had its first token before, and comes again
        },
    ]  # fmt: skip
    Step.from_dict(data)


def test_prompts_alone_are_a_prefill_and_chunks_are_no_step() -> None:
    lines = Lines()
    alone = {
        "budget": None, "drafted": [0] * 3, "admitted": [0] * 3, "prefilling": [True] * 3,
    }  # fmt: skip
    assert lines.of(*frame(**alone, sampled=[0, 0, 0])) == []
    data = only(lines, frame(**alone, sampled=[0, 1, 1]))
    assert (data["index"], data["phase"], data["rows"]) == (0, "prefill", 12)
    assert [r["request"] for r in data["requests"]] == [1, 2]
    assert [r["kinds"] for r in data["requests"]] == [["first"], ["first"]]
    assert "policy" not in data
    assert "budget" not in data["engine"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"sampled": [4, 1, 1]},  # more than was admitted
        {"admitted": [3, 1, 0]},  # more than was drafted
        {"drafted": [3, 2, 0]},  # more than there are slots
        {"sampled": [3]},  # of fewer requests
    ],
)
def test_a_pass_that_contradicts_itself_is_told_and_left_out(wrong: dict[str, Any]) -> None:
    lines = Lines()
    data = only(lines, frame(**wrong))
    assert (data["kind"], data["what"], data["number"]) == ("engine", "inconsistent", 4)
    assert data["reason"].startswith(("request 0 has", "arrays of a pass of 3"))
    assert only(lines, frame())["index"] == 0


def test_what_is_lost_and_learned_is_told_once() -> None:
    lines = Lines()
    first, second = lines.of(*frame(dropped=3))
    assert json.loads(first.data) == {"kind": "engine", "what": "dropped", "passes": 3}
    assert json.loads(second.data)["index"] == 0
    assert len(lines.of(*frame(dropped=3))) == 1
    fit = np.array([0.1, -0.7, 1.1], np.float32)
    told, step = lines.of(*frame(dropped=3, fitted=200, fit=fit.tolist()))
    said = json.loads(told.data)
    assert told.keep == "coefficients"
    assert (said["step"], np.float32(said["slope"])) == (200, fit[0])
    assert np.array(said["intercepts"], np.float32).tolist() == fit[1:].tolist()
    assert "fit" not in json.loads(step.data)
    lost, ended = lines.of({"what": "end", "reason": "because", "dropped": 5}, {})
    assert json.loads(lost.data)["passes"] == 5
    assert json.loads(ended.data) == {"kind": "engine", "what": "end", "reason": "because"}
    assert lines.end("again") == []


def test_confidences_that_are_no_numbers_are_kept_as_said() -> None:
    lines = Lines()
    table = ENGINE["tables"][0]
    lines.of(*costs(table))
    nan = float("nan")
    data = only(lines, frame(live=[nan] * 8, stale=[nan] * 8))
    assert data["requests"][0]["expected"] == ["nan", "nan"]
    assert data["objective"] == []
    Step.from_dict(data)


@pytest.mark.parametrize("number", range(len(ENGINE["decisions"])))
def test_the_objective_of_what_the_engine_decided(number: int) -> None:
    """The engine's own budgets follow from the objective that is written beside them."""
    case, unit = ENGINE["decisions"][number], ENGINE["unit"]
    drafted, slots = case["drafted"], len(case["stale"][0])
    count = len(drafted)
    table = ENGINE["tables"][case["table"]]
    values, arrays = costs(table)
    lines = Lines()
    lines.of(values, arrays)
    flat = {name: [c / unit for row in case[name] for c in row] for name in ("stale", "live")}
    # Whoever reads its prompt to the end, and those who decode, sample.
    prompt = [
        100 + n - (0 if s else -1) for n, s in zip(case["plain"], case["samples"], strict=True)
    ]
    decided = frame(
        rows=case["rows"], budget=case["budget"], most_drafts=max(0, case["most_rows"] - count),
        slots=slots, width=slots + 1, names=[f"r{i}" for i in range(count)],
        row=list(range(count)), drafted=drafted, admitted=case["admitted"],
        scheduled=[n + d for n, d in zip(case["plain"], drafted, strict=True)],
        computed=[100] * count, prompt=prompt, sampled=case["samples"],
        tokens=[5] * count * (slots + 1), lengths=[100] * count, prefilling=[False] * count,
        drafts=[6] * count * slots, **flat,
    )  # fmt: skip
    data = only(lines, decided)
    step = Step.from_dict(data)
    assert int(np.argmax(step.objective)) == case["budget"]
    assert step.rows == sum(case["plain"]) + case["budget"]
    assert step.budget == sum(
        a for a, s in zip(case["admitted"], case["samples"], strict=True) if s
    )
    # The same by the workbench's policy.
    stale = np.array(case["stale"]) / unit
    budget, objective = budget_of(
        survival(stale, np.array(drafted)), np.array(drafted), np.array(case["samples"], bool),
        np.array(case["plain"]),
        CostTable(draft=table["draft_curve"], verify=table["verify_curve"],
                  captured=table["captured"] or 1 << 20),
        case["most_rows"],
    )  # fmt: skip
    assert budget == case["budget"]
    assert list(step.objective) == pytest.approx(objective.tolist(), rel=1e-11)
