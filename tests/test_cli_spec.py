"""Drafting on the command line: generate, demo, trace, bench speculative, train drafter.

The target and the drafter are those of ``spec.cycle``: every token and every accepted run is known.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from spec.cycle import CYCLE_TEXT, DRAFTS, accepted_runs, bundle, cycle_ids, make, written
from workbench import terminal_spec
from workbench.cli import app
from workbench.model import presets
from workbench.spec import bench as bench_module
from workbench.spec import bench_runs
from workbench.spec.loop import Decoding
from workbench.spec.recording import Recording
from workbench.spec.step import RequestStep, Step
from workbench.spec.trace import Trace

COUNT = 30
RUNS = accepted_runs(COUNT)
LENGTH = 1 + sum(RUNS) / len(RUNS)
TEXT = "".join(CYCLE_TEXT) * (COUNT // len(CYCLE_TEXT))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The models are too small to share out, and waiting for a second thread costs more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Checkpoints of the target and of its drafter."""
    return make(tmp_path_factory.mktemp("cycle"))


@pytest.fixture(scope="session")
def drafted(folders: tuple[str, str]) -> list[str]:
    """MODEL and --drafter."""
    target, drafter = folders
    return [target, "--drafter", drafter]


@pytest.fixture
def bundled(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A package whose beam-tiny is this target, with its drafter."""
    zoo = tmp_path / "zoo"
    bundle(zoo, "beam-tiny", *folders)
    monkeypatch.setattr(presets, "ZOO", zoo)
    presets.bundled.cache_clear()
    yield zoo / "beam-tiny"
    presets.bundled.cache_clear()


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def document(*arguments: str, code: int = 0) -> dict[str, Any]:
    """The one JSON document of a command, alone on stdout."""
    result = run(*arguments, "--json", code=code)
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def survival(runs: list[int], slots: int = DRAFTS) -> list[float]:
    return [sum(r > slot for r in runs) / len(runs) for slot in range(slots)]


GENERATE = ["--prompt", "def f(x):", "--max-new-tokens", str(COUNT)]

# -- generate -------------------------------------------------------------------------------------


def test_generate_drafts_and_counts(drafted: list[str]) -> None:
    value = document("generate", *drafted, *GENERATE)
    assert value["token_ids"] == written(COUNT)
    assert value["text"] == TEXT
    assert value["new_tokens"] == COUNT
    assert value["steps"] == len(RUNS)
    assert value["acceptance_length"] == pytest.approx(LENGTH)
    assert value["per_position_acceptance"] == pytest.approx(survival(RUNS))
    assert value["accepted"] == sum(RUNS)
    assert value["drafted"] == DRAFTS * len(RUNS)
    assert value["drafted"] == value["accepted"] + value["rejected"] + value["trimmed"]
    # In the last step there is room for fewer than seven drafts and one more.
    left = COUNT - 1 - sum(r + 1 for r in RUNS[:-1])
    assert value["trimmed"] == DRAFTS - (left - 1)
    timed = COUNT - 1 - (RUNS[0] + 1)  # not the prefill's token, not the first decode step's
    assert value["tokens_per_second"] == pytest.approx(timed / value["seconds"])
    assert value["drafter"] == drafted[2]
    assert (value["speculative_tokens"], value["method"]) == (DRAFTS, "standard")


def test_generate_without_drafting_gives_the_same_tokens(drafted: list[str]) -> None:
    value = document("generate", drafted[0], "--no-draft", *GENERATE)
    assert value["token_ids"] == written(COUNT)
    assert (value["drafter"], value["acceptance_length"]) == (None, 1.0)
    assert (value["per_position_acceptance"], value["drafted"]) == ([], 0)
    assert value["steps"] == COUNT - 1


def test_generate_adaptive_writes_the_same_and_measures_once(
    drafted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEAM_WORKBENCH_CACHE", str(tmp_path / "cache"))
    trace = tmp_path / "run.jsonl"
    asked = ("generate", *drafted, *GENERATE, "--adaptive")
    first = run(*asked, "--json", "--trace", str(trace))
    value = json.loads(first.stdout)
    assert value["token_ids"] == written(COUNT)
    assert value["policy"] == "adaptive"
    # stderr is no terminal here: a line instead of a bar, and only while something is measured.
    (measuring,) = (line for line in first.stderr.splitlines() if "measuring" in line)
    assert re.fullmatch(r"workbench: measuring .* on this machine, in \d+ timings; .*", measuring)
    assert value["drafted"] == value["accepted"] + value["rejected"] + value["trimmed"]
    (kept,) = (tmp_path / "cache").iterdir()
    steps = [step for step in Trace.read(trace).steps if step.phase == "decode"]
    for step in steps:
        if step.policy:  # the budget is where the objective it saw is largest
            best = max(range(len(step.objective)), key=step.objective.__getitem__)
            assert step.budget == best
            assert step.decide_seconds > 0
    assert any(step.policy for step in steps)
    before = kept.stat().st_mtime_ns
    again = run(*asked, "--json")
    assert json.loads(again.stdout)["policy"] == "adaptive"
    assert "measuring" not in again.stderr
    assert kept.stat().st_mtime_ns == before
    assert document("generate", *drafted, *GENERATE)["policy"] is None
    refused = run("generate", drafted[0], *GENERATE, "--adaptive", "--no-draft", code=2)
    assert "--adaptive asks for drafts" in refused.stderr


def test_generate_takes_a_number_of_drafts(drafted: list[str]) -> None:
    value = document("generate", *drafted, *GENERATE, "--speculative-tokens", "3")
    runs = accepted_runs(COUNT, 3)
    assert value["token_ids"] == written(COUNT)
    assert value["acceptance_length"] == pytest.approx(1 + sum(runs) / len(runs))
    assert value["per_position_acceptance"] == pytest.approx(survival(runs, 3))


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("proposals", ["greedy", "probabilistic"])
def test_generate_samples_with_every_method(
    drafted: list[str], method: str, proposals: str
) -> None:
    options = ["--temperature", "0.5", "--method", method, "--proposals", proposals]
    value = document("generate", *drafted, *GENERATE, *options)
    assert value["token_ids"] == written(COUNT), "the target is all but certain"
    assert (value["method"], value["proposals"]) == (method, proposals)


def test_generate_says_what_drafting_did(drafted: list[str]) -> None:
    result = run("generate", *drafted, *GENERATE)
    assert result.stdout == TEXT
    assert result.stderr.count("\n") == 1
    assert f"acceptance length {LENGTH:.2f} over {len(RUNS)} blocks" in result.stderr
    assert f"{sum(RUNS)} drafts accepted" in result.stderr
    assert re.search(r"[\d,]+ tokens/s \(decode, measured here\)", result.stderr)


@pytest.fixture(scope="session")
def misled(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """MODEL and a --drafter that is wrong behind every token: it proposes the one after next."""
    target, drafter = folders
    folder = tmp_path_factory.mktemp("misled") / "drafter"
    shutil.copytree(drafter, folder)
    tensors = load_file(folder / "model.safetensors")
    book = tensors["candidate_selector.predecessor_codebook"]
    book[:, : len(CYCLE_TEXT)] = 0
    for number, token in enumerate(cycle_ids()):
        book[token, (number + 2) % len(CYCLE_TEXT)] = 1
    save_file(tensors, folder / "model.safetensors")
    return [target, "--drafter", str(folder)]


@pytest.mark.parametrize("command", ["generate", "trace record", "bench speculative"])
def test_acceptance_of_nothing_is_not_silent(
    command: str, misled: list[str], drafted: list[str], tmp_path: Path
) -> None:
    """Output is right then, and only slower: nobody would notice."""
    more = ["--out", str(tmp_path / "t.jsonl")] if command == "trace record" else []
    more += ["--rounds", "1"] if command == "bench speculative" else []
    result = run(*command.split(), *misled, *GENERATE, *more, "--json")
    assert json.loads(result.stdout)["acceptance_length"] == 1
    assert "workbench: the target accepted 0 of " in result.stderr
    assert "mask_token_id" in result.stderr
    if command == "generate":
        assert "the target accepted" not in run("generate", *drafted, *GENERATE).stderr
        hot = run("generate", *misled, *GENERATE, "--temperature", "5")
        assert "the target accepted" not in hot.stderr, "where drafts may well be refused"


def test_a_model_without_a_drafter_decodes_and_says_so(folders: tuple[str, str]) -> None:
    result = run("generate", folders[0], *GENERATE)
    assert result.stdout == TEXT
    assert f"without a drafter (none is bundled with {folders[0]})" in result.stderr
    result = run("generate", folders[0], *GENERATE, "--no-draft")
    assert "without a drafter" in result.stderr
    assert "bundled" not in result.stderr


def test_a_bundled_drafter_is_used_unless_told_not_to(bundled: Path) -> None:
    value = document("generate", "beam-tiny", *GENERATE)
    assert value["drafter"] == "beam-tiny-dflash2"
    assert value["acceptance_length"] == pytest.approx(LENGTH)
    assert document("generate", "beam-tiny", *GENERATE, "--no-draft")["drafter"] is None
    named = document("generate", "beam-tiny", *GENERATE, "--drafter", "beam-tiny-dflash2")
    assert named["acceptance_length"] == pytest.approx(LENGTH)
    assert "drafter beam-tiny-dflash2, bundled" in run("info", "beam-tiny").stdout
    lines = run("demo", "--prompt", "x", "--max-new-tokens", "9", "--json").stdout.splitlines()
    assert json.loads(lines[0])["drafter"] == "beam-tiny-dflash2"


def test_doctor_looks_for_the_drafter(bundled: Path) -> None:
    from workbench.doctor import drafter_check

    check = drafter_check()
    assert check.ok
    assert check.found == "beam-tiny-dflash2 is bundled and loads, 7 drafts a step"
    weights = bundled / "dflash2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    check = drafter_check()
    assert not check.ok
    assert check.found.startswith("does not load: ")
    assert check.remedy is not None
    (bundled / "dflash2" / "config.json").unlink()
    check = drafter_check()
    assert (check.ok, check.found) == (True, "none is bundled: decoding runs without one")


def test_info_says_which_drafter_is_known_by_its_shape() -> None:
    text = run("info", "beam-501b").stdout
    assert "drafter beam-501b-dflash2, known by its shape only" in text


# -- traces ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def recorded(drafted: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of one drafted run."""
    torch.set_num_threads(1)
    file = tmp_path_factory.mktemp("trace") / "run.jsonl"
    document("generate", *drafted, *GENERATE, "--trace", str(file))
    return file


def test_a_trace_holds_the_run(recorded: Path, drafted: list[str]) -> None:
    trace = Trace.read(recorded)
    assert trace.skipped == 0
    assert trace.header["model"] == drafted[0]
    assert trace.header["drafter"] == drafted[2]
    assert trace.header["speculative_tokens"] == DRAFTS
    assert trace.header["max_new_tokens"] == COUNT
    parts = [r for step in trace.steps for r in step.requests]
    assert [t for r in parts for t in r.token_ids] == written(COUNT)
    assert [r.accepted for r in parts if r.drafted] == RUNS
    blocks = [r for r in parts if r.drafted]
    assert all(len(r.candidates) == len(r.scores) == DRAFTS for r in blocks), "with its detail"


def test_trace_summary_is_what_generate_said(recorded: Path) -> None:
    value = document("trace", "summary", str(recorded))
    assert value["steps"] == len(RUNS)
    assert value["acceptance_length"] == pytest.approx(LENGTH)
    assert value["per_position_acceptance"] == pytest.approx(survival(RUNS))
    assert value["accepted"] == sum(RUNS)
    assert value["accepted"] + value["rejected"] + value["trimmed"] == DRAFTS * len(RUNS)
    assert (value["skipped"], value["mode"]) == (0, "steps")
    text = run("trace", "summary", str(recorded)).stdout
    assert f"acceptance length {LENGTH:.3f}" in text
    assert "every line read" in text


def test_trace_show_lists_blocks_and_tokens(recorded: Path) -> None:
    text = run("trace", "show", str(recorded)).stdout
    rows = [line for line in text.splitlines() if re.match(r" +\d+ +0 +\d+  ", line)]
    assert len(rows) == 1 + len(RUNS)
    assert rows[0].endswith("›self")
    assert "✓✓✓✓✗✗✗" in rows[1]
    assert rows[1].endswith("✓. ✓x ✓·= ✓⏎ ≠self")
    assert "✓✓✓○○○○" in rows[-1]
    assert "+⏎" in rows[-1]
    assert rows[-1].endswith("ended by length")
    for word in ("accepted draft", "corrected by the target", "bonus", "trimmed"):
        assert word in text
    few = run("trace", "show", str(recorded), "--limit", "2").stdout
    assert f"{len(RUNS) - 1} more" in few
    value = document("trace", "show", str(recorded), "--limit", "2")
    assert len(value["lines"]) == 2
    assert value["acceptance_length"] == pytest.approx(LENGTH), "of the whole trace"
    assert value["header"]["format"] == "beam-workbench-trace"


def test_lines_that_cannot_be_read_are_counted(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    file.write_bytes(recorded.read_bytes()[:-40])
    for command in ("summary", "show"):
        result = run("trace", command, str(file), "--json")
        assert json.loads(result.stdout)["skipped"] == 1
        assert json.loads(result.stdout)["accepted"] == sum(RUNS[:-1])
        assert result.stderr == f"workbench: 1 line of {file} could not be read and was skipped\n"


def test_a_trace_of_elsewhere_is_shown_without_its_tokenizer(
    recorded: Path, tmp_path: Path
) -> None:
    head, *rest = recorded.read_text("utf-8").splitlines(keepends=True)
    header = json.loads(head) | {"model": "\x1b[31mnowhere\u202e"}
    file = tmp_path / "else.jsonl"
    file.write_text("".join([json.dumps(header) + "\n", *rest]), "utf-8")
    result = run("trace", "show", str(file))
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output
    assert f"›#{written(1)[0]}" in result.stdout
    assert "shown by their ids" in result.stderr
    assert "\x1b" not in run("trace", "summary", str(file)).output


def test_a_trace_is_not_overwritten_unasked(
    recorded: Path, drafted: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "there.jsonl"
    file.write_text("precious", "utf-8")
    result = run("generate", *drafted, *GENERATE, "--trace", str(file), code=1)
    assert "exists already" in result.stderr
    assert (file.read_text("utf-8"), result.stdout) == ("precious", "")
    run("generate", *drafted, *GENERATE, "--trace", str(file), "--overwrite")
    assert Trace.read(file).acceptance().accepted == sum(RUNS)


@pytest.mark.parametrize("command", [["generate"], ["trace", "record"]])
def test_ctrl_c_keeps_the_steps_that_were_written(
    command: list[str], drafted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cut.jsonl"
    name = "--trace" if command == ["generate"] else "--out"
    calls, real = 0, Decoding.__next__

    def interrupted(self: Decoding) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Decoding, "__next__", interrupted)
    result = run(*command, *drafted, *GENERATE, name, str(file), code=130)
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.output
    trace = Trace.read(file)
    assert (len(trace.steps), trace.skipped) == (3, 0)
    assert trace.acceptance().accepted == sum(RUNS[:2])


# -- trace record ---------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three prompts, the first longer than the context."""
    file = tmp_path / "prompts.jsonl"
    texts = ["def f(x): " * 900, "abc", "class A"]
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), "utf-8")
    return file


def test_record_takes_prompts_from_files_and_options(
    drafted: list[str], prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    options = ["--prompts", str(prompts), "--prompt", "x", "--prompt-tokens", "8", "--count", "2"]
    lengths = ["--max-new-tokens", str(COUNT), "--concurrency", "2", "--out", str(file)]
    value = document("trace", "record", *drafted, *options, *lengths)
    trace = Trace.read(file)
    parts = [r for step in trace.steps for r in step.requests]
    assert {r.request for r in parts} == {0, 1}
    assert min(r.position for r in parts if r.request == 0) == 8
    for request in (0, 1):
        assert [t for r in parts if r.request == request for t in r.token_ids] == written(COUNT)
    assert value["accepted"] == 2 * sum(RUNS)
    assert value["requests"] == 2
    assert (value["file"], value["interrupted"]) == (str(file), False)


def test_record_every_position_replays_to_the_same_figures(
    drafted: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "every.jsonl"
    options = ["--prompt", "def", "--max-new-tokens", str(COUNT), "--out", str(file)]
    value = document("trace", "record", *drafted, *options, "--every-position")
    assert (value["mode"], value["positions"]) == ("every-position", COUNT - 1)
    trace = Trace.read(file)
    # Behind the first token the drafter is right for four tokens, then three, two, one, none.
    assert [p.accepted for p in trace.positions[:6]] == [4, 3, 2, 1, 0, 4]
    again = document("trace", "summary", str(file))
    assert again["acceptance_length"] == value["acceptance_length"]
    live = document("generate", *drafted, "--prompt", "def", "--max-new-tokens", str(COUNT))
    assert value["acceptance_length"] == pytest.approx(live["acceptance_length"])
    text = run("trace", "show", str(file), "--limit", "1").stdout
    assert "✓. ✓x ✓·= ✓⏎ ✗x ✗·= ✗⏎" in text
    assert f"{COUNT - 2} more" in text


def test_record_every_position_of_a_sampled_text(drafted: list[str], tmp_path: Path) -> None:
    file = tmp_path / "every.jsonl"
    options = ["--prompt", "def", "--max-new-tokens", "30", "--out", str(file)]
    sampled = ["--temperature", "0.5", "--seed", "3", "--every-position"]
    value = document("trace", "record", *drafted, *options, *sampled)
    assert value["positions"] == 29
    trace = Trace.read(file)
    assert trace.header["sampling"] == {"temperature": 0.5, "top_p": 1.0, "seed": 3}
    assert Recording.of(trace).exact


# -- demo -----------------------------------------------------------------------------------------

DEMO = ["--prompt", "def", "--max-new-tokens", str(COUNT), "--temperature", "0"]


def test_demo_prints_steps_and_tokens_as_json_lines(drafted: list[str]) -> None:
    lines = [
        json.loads(line) for line in run("demo", *drafted, *DEMO, "--json").stdout.splitlines()
    ]
    start, *middle, summary = lines
    assert (start["type"], start["drafter"], start["context"]) == ("start", drafted[2], 1024)
    tokens = [line for line in middle if line["type"] == "token"]
    steps = [line for line in middle if line["type"] == "step"]
    assert len(tokens) + len(steps) == len(middle)
    assert [t["token_id"] for t in tokens] == summary["token_ids"] == written(COUNT)
    assert [t["index"] for t in tokens] == list(range(COUNT))
    assert "".join(t["text"] for t in tokens) == summary["text"] == TEXT
    kinds = ["first"]
    for accepted in RUNS[:-1]:
        kinds += ["accepted"] * accepted + ["corrected"]
    kinds += ["accepted"] * RUNS[-1] + ["bonus"]
    assert [t["kind"] for t in tokens] == kinds
    assert [s["accepted"] for s in steps if s["drafted"]] == RUNS
    assert tokens[-1]["finished"] == "length"
    assert summary["acceptance_length"] == pytest.approx(LENGTH)
    assert summary["context_used"] == tokens[-1]["context_used"] == start["prompt_tokens"] + COUNT


def test_demo_on_a_pipe_is_plain(drafted: list[str]) -> None:
    result = run("demo", *drafted, *DEMO)
    assert result.stdout == f"def{TEXT}\n"
    assert "\x1b" not in result.output
    assert re.search(
        rf"{COUNT} tokens, ended by length; .*acceptance length {LENGTH:.2f} .*"
        r"draft [\d.]+ ms, verify [\d.]+ ms a step; context \d+ of 1024",
        result.stderr,
    )
    plain = run("demo", drafted[0], *DEMO)
    assert plain.stdout == result.stdout
    assert "without a drafter (none is bundled with" in plain.stderr


def spawn(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "workbench.cli", *arguments]
    return subprocess.Popen(command, **options)


def in_terminal(*arguments: str, interrupt_behind: str = "", **variables: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    main, other = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    environment.pop("NO_COLOR", None)
    streams = {"stdout": other, "stderr": other, "stdin": other}
    with spawn(*arguments, env=environment | variables, **streams) as process:
        os.close(other)
        data, deadline = b"", time.monotonic() + 60
        while time.monotonic() < deadline and select.select([main], [], [], 60)[0]:
            try:
                data += os.read(main, 65536)
            except OSError:  # the terminal's other side is closed
                break
            if interrupt_behind and interrupt_behind.encode() in data:
                interrupt_behind = ""
                process.send_signal(signal.SIGINT)
        process.wait(60)
    os.close(main)
    assert process.returncode == 0
    return data.decode("utf-8", "replace")


def test_demo_in_a_terminal_marks_tokens_without_colour(drafted: list[str]) -> None:
    text = in_terminal("demo", *drafted, *DEMO, NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*38;", text), "no colour"
    first = "def\x1b[0mself"  # neither the prompt's style nor a mark
    line = "".join(f"\x1b[4m{piece}\x1b[0m" for piece in (".", "x", " =", "⏎"))
    assert f"{first}{line}" in text, "accepted tokens are underlined, a line end too"
    assert f"\x1b[1;7mself\x1b[0m{line}" in text, "a corrected token is reversed"
    assert "\x1b[1;3m⏎" in text, "the bonus token is bold italic"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").replace("\n", " ")
    for word in ("accepted draft", "corrected by the target", "bonus", "✗ rejected"):
        assert word in plain
    assert f"{COUNT} tokens, ended by length" in plain
    assert f"acceptance length {LENGTH:.2f} over" in " ".join(plain.split())


def test_ctrl_c_ends_the_demo_with_its_summary(drafted: list[str]) -> None:
    arguments = ["--prompt", "def", "--max-new-tokens", "1000", "--temperature", "0"]
    text = in_terminal("demo", *drafted, *arguments, interrupt_behind="acceptance length")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "").replace("\n", " ")
    assert re.search(r"\d+ tokens, stopped; .*drafts accepted.*of 1024", plain)
    assert "Traceback" not in plain


def test_marks_differ_without_colour() -> None:
    signs = [sign for sign, _, _ in terminal_spec.MARKS.values()]
    assert len(set(signs)) == len(signs)
    looks = {
        kind: {w for w in style.split() if not w.startswith("#")}
        for kind, (_, style, _) in terminal_spec.MARKS.items()
    }
    shown = [looks[kind] for kind in ("accepted", "corrected", "bonus", "plain")]
    assert all(a != b for i, a in enumerate(shown) for b in shown[:i])
    slots = [sign for sign, _ in terminal_spec.SLOTS.values()]
    assert len(set(slots)) == len(slots) == 3
    assert terminal_spec.block_signs(7, 5, 2, 9).plain == "✓✓✗✗✗○○  "


def test_legends_are_true_where_every_draft_was_trimmed() -> None:
    # A token of such a step is plain, though something was drafted.
    assert "· plain, no draft verified" in terminal_spec.signs_legend().plain
    assert "not drafted" not in terminal_spec.marks_legend().plain
    part = RequestStep(
        request=0, position=4, drafted=(5, 6), token_ids=(7,), kinds=("plain",)
    )  # fmt: skip
    step = Step(index=3, rows=1, seconds=0.1, requests=(part,))
    line = terminal_spec.step_lines([step], None, 2)[1].plain
    assert line.split()[:4] == ["3", "0", "4", "○○"]
    assert line.endswith("·#7")


# -- bench ----------------------------------------------------------------------------------------

BENCH = ["--max-new-tokens", str(COUNT), "--rounds", "1"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(bench_module, "COST_ROUNDS", 3)


@pytest.mark.usefixtures("quick")
def test_bench_speculative_answers_the_contract(drafted: list[str], tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = ["bench", "speculative", *drafted, *BENCH, "--prompt", "def", "--prompt", "abc"]
    value = document(*arguments, "--out", str(file))
    assert value["acceptance_length"] == pytest.approx(LENGTH)
    assert (value["pairs"], value["compared"], value["identical"]) == (2, 2, 2)
    assert set(value["target_ms"]) == {"1", "2", "4", "8"}
    assert value["speedup"] > 0
    assert value["draft_ms"] > 0
    for policy in value["policies"].values():
        assert policy["tokens_per_second"] > 0
        assert policy["tpot_p99_ms"] >= policy["tpot_p50_ms"] > 0
    assert json.loads(file.read_text("utf-8")) == value
    page = run(*arguments).stdout
    assert "speedup" in page
    assert "2 of 2 prompts identical in all three" in page
    assert "adaptive verification" in page
    assert set(value["policies"]) == {"none", "fixed", "adaptive"}
    assert "measured here" in page


@pytest.mark.usefixtures("quick")
def test_bench_uses_its_own_prompts(drafted: list[str]) -> None:
    value = document("bench", "speculative", *drafted, *BENCH, "--count", "3")
    assert value["prompts"] == 3


@pytest.mark.usefixtures("quick")
def test_ctrl_c_in_a_benchmark_prints_what_there_is(
    drafted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_module, "costs", interrupted)
    arguments = ["bench", "speculative", *drafted, *BENCH, "--prompt", "def"]
    value = document(*arguments, code=130)
    assert (value["interrupted"], value["pairs"], value["draft_ms"]) == (True, 1, None)
    assert "interrupted" in run(*arguments, code=130).stdout
    monkeypatch.setattr(bench_runs, "decode", interrupted)
    result = run(*arguments, code=130)
    assert (result.stdout, result.stderr.splitlines()[-1]) == ("", "workbench: interrupted")


# -- train drafter --------------------------------------------------------------------------------


def test_train_drafter_passes_its_options_and_prints_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workbench.training import distil

    seen = []
    record = {
        "steps": 3,
        "seconds": 1.5,
        "loss": 2.0,
        "acceptance_length": 2.5,
        "checkpoint": "out",
        "losses": [[1, 4.0, 3.0, 1.0], [3, 2.0, 1.5, 0.5]],
    }

    def fake_run(config: str, resume: bool, progress: Any) -> dict[str, Any]:
        seen.append((config, resume))
        progress(1, 3, 4.0, 1000.0)
        return record

    monkeypatch.setattr(distil, "run", fake_run)
    assert document("train", "drafter", "--config", "mine.toml", "--resume") == record
    page = run("train", "drafter", "--config", "mine.toml").stdout
    assert seen == [("mine.toml", True), ("mine.toml", False)]
    assert "loss  4.000 █▁ 2.000" in page
    assert "3 steps" in page
    assert "acceptance length 2.50" in page

    def interrupted(*_: Any, **__: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(distil, "run", interrupted)
    told = run("train", "drafter", "--config", "mine.toml", code=130).stderr
    assert "nothing is saved yet, so start again without --resume" in told


@pytest.mark.parametrize("kind", ["model", "drafter"])
def test_ctrl_c_in_training_says_whether_it_can_go_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first save --resume would be refused."""
    from workbench.training import distil, pretrain
    from workbench.training.settings import CONFIGS, bundled_settings

    def interrupted(*_: Any, **__: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    for module in (distil, pretrain):
        monkeypatch.setattr(module, "run", interrupted)
    state = tmp_path / "state"
    text = (CONFIGS / f"{bundled_settings(kind)[0]}.toml").read_text("utf-8")
    config = tmp_path / "mine.toml"
    config.write_text(re.sub(r"(?m)^state = .*$", f'state = "{state}"', text), "utf-8")
    arguments = ["train", kind, "--config", str(config)]
    assert "start again without --resume" in run(*arguments, code=130).stderr
    (state / "step-7").mkdir(parents=True)
    told = run(*arguments, code=130).stderr
    assert told == "workbench: interrupted; go on from the last saved state with --resume\n"


# -- wrong values and wrong usage -----------------------------------------------------------------

P = ["--prompt", "x"]
WRONG = [
    (["generate", "{target}", *P, "--drafter", "nope"], "unknown drafter 'nope'"),
    (["generate", "{target}", *P, "--drafter", "beam-501b-dflash2"], "shape only"),
    (["generate", "{target}", *P, "--drafter", "{target}"], "dflash_config is missing"),
    (["generate", "beam-tiny", *P, "--drafter", "{drafter}"], "hidden_size is 64"),
    (["generate", "{target}", *P, "--speculative-tokens", "3"], "no drafter is bundled with"),
    (["generate", "{target}", *P, "--method", "block"], "no drafter is bundled with"),
    (["generate", "{drafted}", *P, "--speculative-tokens", "0"], "speculative_tokens"),
    (["generate", "{drafted}", *P, "--speculative-tokens", "64"], "speculative_tokens"),
    (["generate", "{drafted}", *P, "--trace", "{folder}"], "exists already"),
    (["generate", "{drafted}", *P, "--trace", "{folder}/a/b"], "cannot be written"),
    (["demo", "{target}", *P, "--drafter", "nope"], "unknown drafter 'nope'"),
    (["demo", "{drafted}", "--prompt", ""], "the prompt is empty"),
    (["trace", "summary", "{folder}/none"], "cannot be read"),
    (["trace", "summary", "{folder}"], "not a regular file"),
    (["trace", "show", "{target}/config.json"], "is not a trace"),
    (["trace", "record", "{target}", *P, "--every-position", "--out", "{folder}/o"],
     "no drafter is bundled with"),
    (["trace", "record", "{drafted}", "--prompts", "{folder}/none", "--out", "{folder}/o"],
     "cannot be read"),
    (["trace", "record", "{drafted}", *P, "--out", "{folder}/o", "--max-new-tokens", "0"],
     "max_new_tokens"),
    (["trace", "record", "{drafted}", *P, "--out", "{folder}/o", "--max-new-tokens", "0",
      "--every-position"], "max_new_tokens"),
    (["bench", "speculative", "{target}"], "no drafter is bundled with"),
    (["bench", "speculative", "nope"], "unknown model"),
    (["bench", "speculative", "{drafted}", "--max-new-tokens", "3"], "max_new_tokens"),
    (["bench", "speculative", "{drafted}", "--out", "{folder}"], "cannot be written"),
    (["train", "drafter", "--config", "{folder}/none.toml"], "cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[" ".join(a)[:60] for a, _ in WRONG])
def test_a_wrong_value_gives_one_sentence(
    arguments: list[str], says: str, folders: tuple[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    target, drafter = folders
    names = {"{target}": target, "{drafter}": drafter, "{folder}": str(folder)}
    filled: list[str] = []
    for argument in arguments:
        if argument == "{drafted}":
            filled += [target, "--drafter", drafter]
        else:
            filled.append(re.sub(r"\{\w+\}", lambda m: names[m.group()], argument))
    result = run(*filled, "--json", code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("workbench: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", *P, "--no-draft", "--drafter", "d"],
        ["generate", "x", *P, "--no-draft", "--speculative-tokens", "3"],
        ["demo", "x", "--no-draft", "--method", "block"],
        ["generate", "x", *P, "--method", "exact"],
        ["generate", "x", *P, "--proposals", "all"],
        ["trace"],
        ["trace", "summary"],
        ["trace", "show", "x", "--limit", "0"],
        ["trace", "record", "x", *P],
        ["trace", "record", "x", "--out", "o"],
        ["trace", "record", "x", *P, "--out", "o", "--every-position", "--no-draft"],
        ["trace", "record", "x", *P, "--out", "o", "--every-position", "--method", "block"],
        ["bench"],
        ["bench", "speculative", "x", "--rounds", "0"],
        ["bench", "speculative", "x", "--concurrency", "none"],
        ["train", "drafter"],
    ],
)
def test_wrong_usage_is_the_parsers_business(arguments: list[str]) -> None:
    result = run(*arguments, code=2)
    assert "Usage" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "command",
    ["generate", "demo", "train drafter", "trace show", "trace summary", "trace record",
     "bench speculative"],
)  # fmt: skip
def test_options_are_lower_case(command: str) -> None:
    """A metavar can turn into an option's name; the names are part of the contract."""
    page = CliRunner().invoke(app, [*command.split(), "--help"]).output
    names = re.findall(r"--[A-Za-z][\w-]*", page)
    assert names
    assert [n for n in names if n != n.lower()] == []
