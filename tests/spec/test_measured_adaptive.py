"""The file of measured adaptive verification: what is read, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from workbench import views
from workbench.errors import TraceError, WorkbenchError
from workbench.spec.measured_adaptive import SCHEMA, measured_adaptive

SMALL = Path(__file__).parents[1] / "data" / "adaptive_cpu.json"


def test_every_value_of_a_run_is_read() -> None:
    found = measured_adaptive(SMALL)
    data = json.loads(SMALL.read_text("utf-8"))
    assert found.how == data["how"]
    assert len(found.runs) == len(data["runs"]) == 3
    for run, one in zip(found.runs, data["runs"], strict=True):
        for name in ("concurrency", "ratio", "low", "high", "p99_ratio", "pairs"):
            assert getattr(run, name) == one.get(name), name
    first = found.runs[0]
    assert first.fixed["tpot_p99_ms"] * first.p99_ratio == first.adaptive["tpot_p99_ms"]
    assert [run.label for run in found.runs] == [
        "temperature 0, mixed", "temperature 0", "temperature 1, code",
    ]  # fmt: skip


def test_the_one_that_comes_with_the_workbench_can_be_drawn() -> None:
    found = measured_adaptive()
    assert found.how.startswith("measured: ")
    assert {1, 8, 32, 128} <= {run.concurrency for run in found.runs}
    for run in found.runs:
        assert 0.5 < run.ratio < 3
        if run.low is not None and run.high is not None:
            assert run.low <= run.ratio <= run.high
    text = views.concurrency_sweep((), measured=found.runs).text
    assert sum(line.startswith("measured at ") for line in text.splitlines()) == len(found.runs)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "has not the schema"),
        ({"schema": "another/1", "runs": []}, "has not the schema"),
        ({"schema": SCHEMA}, "needs a list of runs"),
        ({"schema": SCHEMA, "runs": [1]}, "needs a list of runs"),
        ({"schema": SCHEMA, "runs": [{"ratio": 1.1}]}, "run 1 of .*concurrency must be"),
        ({"schema": SCHEMA, "runs": [{"concurrency": True, "ratio": 1}]}, "concurrency must be"),
        ({"schema": SCHEMA, "runs": [{"concurrency": 8}]}, "run 1 of .* needs a ratio"),
        ({"schema": SCHEMA, "runs": [{"concurrency": 8, "ratio": "1"}]}, "ratio must be a number"),
        ({"schema": SCHEMA, "runs": [{"concurrency": 8, "ratio": -1}]}, "ratio must be a number"),
        (
            {"schema": SCHEMA, "runs": [{"concurrency": 8, "ratio": 10**400}]},
            "ratio must be a number",
        ),
        (
            {"schema": SCHEMA, "runs": [{"concurrency": 8, "ratio": 1, "low": [1]}]},
            "low must be a number",
        ),
        ({"schema": SCHEMA, "runs": [{"concurrency": 8, "ratio": 1, "pairs": 0}]}, "pairs must be"),
        (
            {"schema": SCHEMA, "runs": [{"concurrency": 8, "ratio": 1, "fixed": 3}]},
            "fixed must be figures",
        ),
    ],
)
def test_what_is_no_such_file_is_refused_in_a_sentence(
    tmp_path: Path, data: Any, said: str
) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps(data), "utf-8")
    with pytest.raises(TraceError, match=said):
        measured_adaptive(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match=r"missing\.json"):
        measured_adaptive(tmp_path / "missing.json")
    file = tmp_path / "half.json"
    file.write_text('{"schema": ', "utf-8")
    with pytest.raises(TraceError, match="is not JSON"):
        measured_adaptive(file)
