"""``workbench bench decode --gpus N``: what is refused, said, written; gloo ranks on this CPU."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from workbench import views
from workbench.cli import app
from workbench.errors import KernelError, WorkbenchError
from workbench.kernels.parallel import jobs, recorded_groups
from workbench.kernels.parallel.recorded_groups import recorded_group
from workbench.model.presets import resolve
from workbench.terminal_parallel import decode_page, prefill_page

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton kernels are interpreted on a CPU only without a GPU"
)

TINY = ["--model", "beam-tiny", "--tp", "2", "--device", "cpu", "--dtype", "float32"]
ASKED = ["bench", "decode", *TINY, "--gpus", "2", "--layers", "2", "--rounds", "2"]
PREFILL = ["bench", "prefill", *TINY, "--gpus", "2", "--layers", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of two real ranks, as it was printed and as it was written."""
    file = tmp_path_factory.mktemp("group") / "group.json"
    more = ["--batch", "1,2", "--context", "20", "--variants", "naive,norms", "--out", str(file)]
    result = CliRunner().invoke(app, [*ASKED, *more, "--json"])
    assert result.exit_code == 0, result.output
    printed: dict[str, Any] = json.loads(result.stdout)
    assert printed == json.loads(file.read_text("utf-8"))
    return printed


@pytest.fixture
def document(run: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(run)


def shown(document: dict[str, Any], width: int = 140) -> str:
    said = StringIO()
    decode_page(document, Console(file=said, width=width))
    return said.getvalue()


def test_two_ranks_answer_with_one_document(document: dict[str, Any]) -> None:
    assert document["schema"] == "workbench-parallel-decode/1"
    assert [document[name] for name in ("gpus", "tp", "backend", "model", "how")] == [
        2, 2, "gloo", "beam-tiny", "measured here"
    ]  # fmt: skip
    assert [(one["batch"], one["context"]) for one in document["runs"]] == [(1, 20), (2, 20)]
    for one in document["runs"]:
        assert list(one["variants"]) == ["naive", "norms"]
        row = one["variants"]["naive"]
        assert row["passed"]
        assert row["check"]["worst_layer_error"] < 1e-5
        assert row["communication_milliseconds"] == pytest.approx(
            row["milliseconds"] - row["without"]["milliseconds"]
        )
        assert one["variants"]["norms"]["interpreted"]
        assert one["variants"]["norms"]["milliseconds"] is None
    assert "prefill" not in document


def test_the_views_show_what_the_command_wrote(document: dict[str, Any]) -> None:
    text = views.parallel_waterfall(document, batch=2, context=20).text
    row = document["runs"][1]["variants"]["naive"]
    assert f"{row['milliseconds']:.2f} ms  communication" in text
    assert "measured here, all-reduce by gloo" in text
    assert "interpreted, not timed" in text
    assert "all 2 ranks" in text
    assert "context 20:" in views.parallel_load(document).text


def test_the_page_says_which_ranks_and_each_steps_communication(document: dict[str, Any]) -> None:
    run = document["runs"][0]
    run["variants"]["naive"] |= {
        "milliseconds": 7.125, "without": {"milliseconds": 5.5}, "fraction_of_floor": 0.25,
        "communication_milliseconds": 1.625,
    }  # fmt: skip
    run["left_out"] = {"fused": "[red]too old[/red]"}
    document |= {
        "gpus": 2, "tp": 8, "hardware": "2 × a GPU", "left_out": {"batch 9": "it does not fit"},
        "calls": [{"rows": 4, "nccl_us": 13.25, "torch_one_shot_us": None, "exchange_us": 4.5}],
    }  # fmt: skip
    said = shown(document)
    assert "beam-tiny, 2 of 8 ranks on 2 × a GPU, 2 of 9 layers, float32" in said
    line = next(one for one in said.splitlines() if "7.125" in one)
    assert [part.strip() for part in line.strip("│").split("│")][:6] == [
        "naive", "all-reduce", "7.125", "5.500", "1.625", "25%"
    ]  # fmt: skip
    assert "all-reduce of 4 x hidden: NCCL 13.25 µs, this workbench's exchange 4.50 µs" in said
    assert "left out: fused: [red]too old[/red]" in said
    assert "left out: batch 9: it does not fit" in said
    assert "interpreted" in said
    narrow = shown(document, 60)
    assert "7.125" in narrow
    assert max(map(len, narrow.splitlines())) <= 60


@pytest.mark.full
def test_a_prefill_in_two_layouts(document: dict[str, Any]) -> None:
    more = ["--layers", "3", "--rounds", "2", "--tokens", "9", "--context", "10", "--json"]
    result = CliRunner().invoke(app, [*PREFILL, *more])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["schema"] == "workbench-parallel-prefill/1"
    assert list(found["layouts"]) == ["tp", "ep"]
    assert (found["sequences"], found["tokens"], found["context"]) == (2, 9, 10)
    for row in found["layouts"].values():
        assert row["passed"]
        assert row["tokens_per_second"] == pytest.approx(18 / row["milliseconds"] * 1e3)
    said = StringIO()
    found["layouts"]["ep"]["runs"][0] |= {"milliseconds": 77.25, "tokens_per_second": 12_345.6}
    found["layouts"]["tp"] |= {"passed": False, "failures": ["no"], "runs": []}
    found["ratio"] = 1.625
    prefill_page(found, Console(file=said, width=140))
    lines = said.getvalue().splitlines()
    (line,) = [one for one in lines if "77." in one]
    assert "12,346" in line
    assert any("FAILED" in one for one in lines)
    assert "tokens/s of ep over tp: 1.62" in lines
    assert "published: throughput of attention DP + MegaMoE over TP: 1.71, 4 x GB300" in lines
    document["prefill"] = found["layouts"]["ep"] | {
        "sequences": 8, "tokens": 2048, "context": 100_000, "published": []
    }  # fmt: skip
    assert "prefill of 8 x 2,048 tokens behind 100,000, tensor parallel" in shown(document)


def test_a_step_that_is_wrong_is_shown_and_ends_with_1(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    document["runs"][1]["variants"]["naive"] |= {
        "passed": False, "failures": ["layer 1: error 0.5"], "milliseconds": None,
        "without": None, "communication_milliseconds": None, "fraction_of_floor": None,
        "check": {"worst_layer_error": None},
    }  # fmt: skip
    monkeypatch.setattr("workbench.kernels.parallel.start.run_ranks", lambda *a, **k: document)
    result = CliRunner().invoke(app, [*ASKED, "--context", "20"])
    assert result.exit_code == 1
    assert "FAILED" in result.output
    said = " ".join(result.output.split())
    assert "naive at batch 2, context 20 did not agree with the FP64 reference: layer 1" in said


def test_a_ranks_refusal_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def refused(job: str, request: dict[str, Any], ranks: int, **more: Any) -> dict[str, Any]:
        asked.append((job, request, ranks, more["device"]))
        json.dumps(request)
        raise KernelError("rank 1 of 2: its memory was full")

    monkeypatch.setattr("workbench.kernels.parallel.start.run_ranks", refused)
    file = tmp_path / "group.json"
    more = ["--batch", "2", "--batch", "1,2", "--context", "30", "--out", str(file)]
    result = CliRunner().invoke(app, [*ASKED, *more, "--variants", "naive,fused_boundary"])
    assert result.exit_code == 1
    assert "rank 1 of 2: its memory was full" in result.output
    assert "Traceback" not in result.output
    assert not file.exists()
    ((job, request, ranks, device),) = asked
    assert (job, ranks, device) == ("workbench.kernels.parallel.jobs:decode", 2, "cpu")
    assert request["batches"] == [2, 1]
    assert request["contexts"] == [30]
    assert request["variants"] == ["naive", "fused_boundary"]
    assert request["prefill"] is None


@pytest.mark.parametrize(
    ("command", "more", "code", "said"),
    [
        (ASKED, ["--gpus", "4"], 1, "--gpus 4 is more than the 2 ranks of the model"),
        (ASKED, ["--gpus", "0"], 2, "--gpus"),
        (ASKED, ["--rank", "0"], 1, "--rank names one rank, and --gpus runs ranks 0 to 1"),
        (ASKED, ["--leave-one-out"], 1, "--leave-one-out is of one rank by itself"),
        (ASKED, ["--no-leave-one-out"], 1, "--no-leave-one-out is of one rank by itself"),
        (ASKED, ["--no-profile"], 1, "--no-profile is of one rank by itself"),
        (ASKED, ["--device", "cuda"], 1, "no CUDA GPU that torch can use; --device cpu runs the"),
        (ASKED, ["--variants", "persistent"], 1, "has no all-reduce, so several ranks cannot"),
        (ASKED, ["--variants", "quick"], 1, "there is no variant 'quick' of the step of several"),
        (ASKED, ["--variants", ","], 1, "--variants names none"),
        (ASKED, ["--batch", "1,x"], 2, "'x' is not a whole number from 1 on"),
        (ASKED, ["--batch", "1,0"], 2, "'0' is not a whole number from 1 on"),
        (ASKED, ["--batch", ""], 2, "'' is not a whole number"),
        (ASKED, ["--context", "-1"], 2, "'-1' is not a whole number"),
        (ASKED, ["--context", "20,2049"], 1, "a context of 2049 tokens exceeds the model's 2048"),
        (ASKED, ["--context", "20", "--layers", "10"], 1, "has layers 1 to 9"),
        (ASKED, ["--context", "20", "--tp", "3"], 1, "does not divide"),
        (ASKED, ["--context", "20", "--experts", "fp8", "--layers", "1"], 1, "no experts"),
        (ASKED, ["--model", "nobody"], 1, "unknown model"),
        (["bench", "decode", *TINY], ["--batch", "1,2", "--context", "9"], 1, "give one of each"),
        (["bench", "decode", *TINY], ["--context", "9,10"], 1, "or --gpus N"),
        (["bench", "decode", *TINY], ["--prefill"], 1, "--prefill goes with --gpus"),
        (PREFILL, ["--layouts", "pp"], 1, "there is no layout 'pp'; there are tp and ep"),
        (PREFILL, ["--layouts", ","], 1, "--layouts names none"),
        (PREFILL, ["--variants", "ours"], 1, "--variants is of one rank by itself"),
        (PREFILL, ["--gpus", "4"], 1, "--gpus 4 is more than the 2 ranks"),
        (PREFILL, [], 1, "exceed the model's context of 2048"),
        (PREFILL, ["--sequences", "3"], 1, "--sequences 3 cannot be shared out evenly among 2"),
        (["bench", "prefill", *TINY], ["--layouts", "tp"], 1, "--layouts are of several ranks"),
    ],
)
def test_what_cannot_be_is_said_before_a_rank_starts(
    command: list[str], more: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> Any:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("workbench.kernels.parallel.start.run_ranks", started)
    result = CliRunner().invoke(app, [*command, *more])
    assert result.exit_code == code, result.output
    assert said in " ".join(result.output.replace("│", " ").split())


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    asked = ["bench", "decode", "--gpus", "2"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    assert "--gpus 2 wants a GPU for each rank, and torch sees 1; give --gpus 1" in result.output


def test_ctrl_c_ends_the_ranks_and_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "group.json"
    code = "from workbench.cli import main; main()"
    more = ["--context", "1000", "--batch", "8", "--rounds", "1000", "--out", str(file)]
    with subprocess.Popen(
        [sys.executable, "-c", code, *ASKED, *more],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    ) as child:  # fmt: skip
        assert child.stderr is not None
        for line in child.stderr:
            if "making the weights" in line:  # both ranks are there, at work
                break
        found = _children(child.pid)
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
        assert child.wait(timeout=30) == 130
    assert rest.strip().endswith("workbench: interrupted")
    assert len(found) == 2
    assert not any(_alive(one) for one in found)
    assert list(tmp_path.iterdir()) == []


def _children(of: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{of}/task/{of}/children").read_text().split()]


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    time.sleep(0.1)
    return Path(f"/proc/{process}").exists()


# ------------------------------------------------------------------ jobs


def test_a_group_s_variants_are_those_that_the_measurement_has() -> None:
    from workbench.kernels.parallel.measure import GROUP_STAGES

    assert set(jobs.VARIANTS) == set(GROUP_STAGES) - {"persistent"}
    for name in jobs.WITHIN:
        assert GROUP_STAGES[name].exchange == ("products" if "_products" in name else "boundary")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"model": "x"}, "lacks config"),
        ({"model": "x", "config": {}, "speed": 1}, "has speed"),
        ({"model": "x", "config": {}, "dtype": "int8"}, "dtype is bfloat16 or float32"),
    ],
)
def test_a_request_that_is_none_is_refused(request_: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        jobs.decode(request_, None, lambda *_: None)  # type: ignore[arg-type]


def test_one_pair_that_can_be_is_enough() -> None:
    config, cpu = resolve("beam-tiny").config, torch.device("cpu")
    more: dict[str, Any] = {
        "layers": 2, "device": cpu, "dtype": torch.float32, "experts": "same", "variants": ()
    }  # fmt: skip
    jobs.refuse_pairs(config, 2, [(10**9, 2000), (1, 20)], **more)
    with pytest.raises(KernelError, match="the caches of 1000000000 sequences"):
        jobs.refuse_pairs(config, 2, [(10**9, 2000), (10**8, 2000)], **more)
    with pytest.raises(KernelError, match="fused chain decodes one sequence, not 2"):
        jobs.refuse_pairs(config, 2, [(2, 20)], **more | {"variants": ["fused_boundary"]})


# ------------------------------------------------------------------ recorded runs


def test_a_document_is_read_and_marked_recorded(document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "group.json"
    file.write_text(json.dumps(document))
    assert recorded_group(file) == document | {"how": "recorded"}
    assert "recorded on" in views.parallel_waterfall(recorded_group(file), 1, 20).text


def test_other_documents_are_refused(document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    for content, said in (
        ("{", "is no JSON"),
        ("[]", "holds no document"),
        (json.dumps({"schema": "workbench-rank-decode/1"}), "'workbench-rank-decode/1'"),
        (json.dumps({k: v for k, v in document.items() if k not in ("runs", "tp")}), "lacks tp, r"),
        (json.dumps(document).replace('"gpus": 2', '"gpus": NaN'), "is no number of JSON"),
    ):
        file.write_text(content)
        with pytest.raises(KernelError, match=said) as caught:
            recorded_group(file)
        assert str(file) in str(caught.value)
    with pytest.raises(KernelError, match="cannot be read"):
        recorded_group(tmp_path / "nothing.json")


def test_what_is_no_file_of_the_bench_is_said(tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    deep = tmp_path / "deep.json"
    deep.write_text('{"a": ' + "[" * 100_000)
    places: list[tuple[Any, str]] = [
        (huge, "has more than 67,108,864 bytes"), (pipe, "it is no file"),
        (tmp_path, "it is no file"), (deep, "nested too deeply"), (5, "5 is not a path"),
        ("~nobody-at-all/x", "home folder of a user who is not known"), ("a" * 5000, "cannot be"),
        ("a\0b", "is no JSON, or a part"), (Path("/dev/zero"), "it is no file"),
    ]  # fmt: skip
    for place, said in places:
        for read in (recorded_group, recorded_groups.recorded_group_prefill):
            with pytest.raises(WorkbenchError, match=said):
                read(place)


def test_a_bundled_run_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_groups, "DECODE", "nothing.json")
    with pytest.raises(
        KernelError, match=r"no run of several ranks comes with this package \(noth"
    ):
        recorded_group()
