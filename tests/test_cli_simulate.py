"""``workbench simulate``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from workbench.cli import app
from workbench.errors import DraftError
from workbench.spec.adaptive import Adaptive, Decision, Situation
from workbench.spec.cost_table import CostTable
from workbench.spec.positions import Position
from workbench.spec.recorded import RECORDED
from workbench.spec.recording import Recording
from workbench.spec.simulate import card_source, compare, cost_table
from workbench.spec.trace import Trace, TraceWriter, header

POLICIES = ["none", "fixed", "adaptive", "oracle"]
SMALL = ["--concurrency", "4", "--requests", "12"]


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def document(*arguments: str) -> dict[str, Any]:
    """The one JSON document, alone on stdout."""
    result = run(*arguments, "--json")
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An every-position trace of two requests, 20 tokens each, three drafts a block."""
    file = tmp_path_factory.mktemp("trace") / "every.jsonl"
    made = header(model="m", drafter="d", speculative_tokens=3, mode="every-position")
    with TraceWriter(file, made) as out:
        for request in range(2):
            for i in range(20):
                out.write(
                    Position(
                        request=request,
                        position=5 + i,
                        token_id=1,
                        left=20 - i,
                        drafted=(1, 2, 3),
                        accepted=(i * (3 + request)) % 4,
                        scores=((2.0, i / 9), (1.5, 0.5), (1.0, 0.9)),
                    )
                )
    return file


def test_json_has_the_figures_of_every_policy() -> None:
    value = document("--concurrency", "8", "--requests", "40", "--seed", "5")
    assert list(value["policies"]) == POLICIES
    table = cost_table("h200-rank").table
    results = compare(card_source(), table, concurrency=8, requests=40, seed=5)
    for name, row in value["policies"].items():
        result = results[name]
        assert row["tokens_per_second"] == result.tokens_per_second
        assert row["tpot_p50_ms"] == result.tpot_p50_ms
        assert row["tpot_p99_ms"] == result.tpot_p99_ms
        assert row["acceptance_length"] == result.acceptance_length
    assert value["policies"]["none"]["tpot_p99_ms"] == pytest.approx(9.241)  # eight rows
    assert (value["concurrency"], value["requests"], value["seed"]) == (8, 40, 5)
    assert value["origins"] == {
        "tokens_per_second": "modelled",
        "tpot": "modelled",
        "acceptance": "modelled",
        "draft_ms": "modelled",
        "verify_ms": "recorded",
    }
    assert value["published"]["adaptive_tokens_per_second"] == 16632
    assert value["estimated"] == {}
    assert value == document("--concurrency", "8", "--requests", "40", "--seed", "5")


def test_the_page_says_where_every_figure_is_from() -> None:
    page = run(*SMALL).stdout
    rows = [line.split() for line in page.splitlines() if line.split(" ")[0] in POLICIES]
    assert [row[0] for row in rows] == POLICIES
    value = document(*SMALL)["policies"]
    for row in rows:
        figures = value[row[0]]
        assert row[1] == f"{figures['tokens_per_second']:,.0f}"
        assert row[4] == f"{figures['tpot_p99_ms']:.2f}"
        assert row[6] == f"{figures['acceptance_length']:.2f}"
    joined = " ".join(page.split())
    assert "4 sequences together, 12 requests drawn with seed 0" in joined
    assert "tokens/s and TPOT: modelled" in joined
    assert "acceptance that is modelled" in joined
    assert "verification recorded, drafting modelled" in joined
    assert "published" in joined
    assert "16,632" in joined


def test_steps_that_fell_back_are_counted_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(policy: Adaptive, situation: Situation) -> Decision:
        raise DraftError("no such luck")

    monkeypatch.setattr(Adaptive, "decide", broken)
    value = document(*SMALL)
    said = value["failed"]["adaptive"]
    assert "no such luck" in said
    assert f"of {value['policies']['adaptive']['steps']:,} steps" in said
    assert list(value["failed"]) == ["adaptive"]
    assert "adaptive: fixed verification in" in run(*SMALL).stdout


def test_a_trace_gives_recorded_acceptance(every: Path) -> None:
    value = document(*SMALL, "--trace", str(every))
    assert value["origins"]["acceptance"] == "recorded"
    assert value["source"].startswith("recorded: m with d, 20")
    source = Recording.of(Trace.read(every))
    table = cost_table("h200-rank").table
    results = compare(source, table, concurrency=4, requests=12)
    for name, row in value["policies"].items():
        assert row["tokens_per_second"] == results[name].tokens_per_second
    assert "acceptance that is recorded" in " ".join(
        run(*SMALL, "--trace", str(every)).stdout.split()
    )


def test_a_trace_of_steps_is_estimated_in_part_and_says_how() -> None:
    bundled = str(RECORDED / "beam-tiny-dflash2.jsonl")
    value = document(*SMALL, "--trace", bundled)
    assert value["origins"]["acceptance"] == "recorded, in part estimated"
    assert value["policies"]["adaptive"]["estimated"]
    assert "stands in" in value["estimated"]["adaptive"]
    assert "adaptive, estimated: " in run(*SMALL, "--trace", bundled).stdout


def test_scores_that_are_missing_leave_the_drafter_s_confidences(tmp_path: Path) -> None:
    whole = Trace.read(RECORDED / "beam-tiny-dflash2.jsonl")
    file = tmp_path / "bare.jsonl"
    with TraceWriter(file, whole.header) as out:
        for step in whole.steps:
            data = step.to_dict()
            for part in data["requests"]:
                for name in ("candidates", "unary", "scores"):
                    part.pop(name, None)
            out.write(type(step).from_dict(data))
    value = document(*SMALL, "--trace", str(file))
    assert "not calibrated" in value["notes"][0]
    assert "not calibrated" in run(*SMALL, "--trace", str(file)).stdout


def test_a_cost_table_of_the_user_s_own(tmp_path: Path) -> None:
    file = tmp_path / "flat.json"
    table = CostTable(draft=((1, 1.0),), verify=((1, 4.0),), label="my card, today")
    file.write_text(json.dumps(table.to_dict() | {"origins": {"verify": "measured"}}), "utf-8")
    value = document(*SMALL, "--cost-table", str(file))
    assert value["policies"]["none"]["tpot_p50_ms"] == pytest.approx(4.0)
    assert value["cost_table"]["label"] == "my card, today"
    assert value["origins"]["verify_ms"] == "measured"
    # Rows are free: nothing is trimmed.
    assert value["policies"]["adaptive"]["admitted"] == value["policies"]["fixed"]["admitted"]


WRONG = [
    (["--concurrency", "0"], "concurrency must be a whole number from 1 to 512, not 0"),
    (["--concurrency", "1000"], "from 1 to 512"),
    (["--concurrency", "2", "--requests", "0"], "requests must be a whole number of at least 1"),
    (["--concurrency", "2", "--seed", "-1"], "seed must be a whole number of at least 0"),
    (["--concurrency", "2", "--cost-table", "nope"], "there is no cost table 'nope'"),
    (["--concurrency", "2", "--cost-table", "{empty}"], "is no cost table"),
    (["--concurrency", "2", "--trace", "{empty}"], "is not a trace"),
    (["--concurrency", "2", "--trace", "nope.jsonl"], "cannot be read"),
    (["--concurrency", "2", "--trace", "{headed}"], "no drafted blocks to replay"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_a_wrong_value_gives_one_sentence(arguments: list[str], says: str, tmp_path: Path) -> None:
    empty, headed = tmp_path / "empty.json", tmp_path / "headed.jsonl"
    empty.write_text("", "utf-8")
    with TraceWriter(headed, header(model="m", mode="every-position")):
        pass
    names = {"{empty}": str(empty), "{headed}": str(headed)}
    result = run(*(names.get(a, a) for a in arguments), "--json", code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("workbench: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--concurrency", "many"], [*SMALL, "--seed", "x"]])
def test_wrong_usage_is_the_parsers_business(arguments: list[str]) -> None:
    result = run(*arguments, code=2)
    assert "Usage" in result.output


def test_options_are_lower_case() -> None:
    names = re.findall(r"--[A-Za-z][\w-]*", run("--help").output)
    assert {"--concurrency", "--cost-table", "--trace", "--requests", "--seed", "--json"} <= {
        *names
    }
    assert [n for n in names if n != n.lower()] == []
