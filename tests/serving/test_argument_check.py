"""The engine's own parser as the judge, in a process that may do what it likes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from workbench.errors import ServingError
from workbench.serving.launch import argument_check
from workbench.serving.launch.argument_check import check_arguments
from workbench.serving.launch.engine_program import engine_command, python_of
from workbench.serving.launch.launch import launch_for

ENGINE = os.environ.get("ENGINE_PYTHON") or (sys.executable if find_spec("vllm") else None)
needs_engine = pytest.mark.skipif(
    ENGINE is None, reason="vLLM is not installed; name a Python that has it in ENGINE_PYTHON"
)

# A package with the engine's names and an ordinary parser behind them.
PARSER = """
import argparse, dataclasses
from typing import Literal
def make_arg_parser(parser):
    parser.add_argument("model")
    for name in ("--host", "--served-model-name", "--kv-cache-dtype", "--reasoning-parser",
                 "--tool-call-parser", "--disable-access-log-for-endpoints",
                 "--per-request-spec-decode-metrics"):
        parser.add_argument(name)
    for name in ("--port", "--tensor-parallel-size", "--block-size", "--max-model-len",
                 "--max-num-seqs", "--max-num-batched-tokens", "--seed"):
        parser.add_argument(name, type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--enable-auto-tool-choice", action="store_true")
    parser.add_argument("--speculative-config", type=__import__("json").loads)
    return parser
def validate_parsed_serve_args(namespace): pass
FlexibleArgumentParser = argparse.ArgumentParser
class AsyncEngineArgs:
    @staticmethod
    def from_cli_args(namespace): pass
SpeculativeMethod = Literal["ngram", Literal["dflash"]]
@dataclasses.dataclass
class SpeculativeConfig:
    method: str = ""
    model: str = ""
    num_speculative_tokens: int = 0
class Names:
    def __getattr__(self, name): return self.look
    def look(self, name):
        if name != "beam": raise KeyError(f"no parser {name}")
ReasoningParserManager = ToolParserManager = Names()
def load_general_plugins(): print("a plugin prints something")
"""
MODULES = (
    *("entrypoints/common/cli_args", "utils/argparse_utils", "engine/arg_utils", "plugins"),
    *("config/speculative", "reasoning", "tool_parsers"),
)


def package(folder: Path, start: str) -> None:
    """A package ``vllm`` whose first lines are ``start``."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(f"__version__ = '0.33.0'\n{start}\n")
    for name in MODULES:
        module = folder / "vllm" / f"{name}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        (module.parent / "__init__.py").touch()
        module.write_text(PARSER)


@pytest.fixture
def words() -> list[str]:
    return launch_for("beam-tiny", adaptive=False).words


def test_the_engine_s_parser_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    package(tmp_path, "print('INFO something')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    good = check_arguments(words, engine=sys.executable)
    assert str(good) == "accepted by the parser of vLLM 0.33.0"
    for wrong, why in (
        (["--seed", "many"], "argument --seed: invalid int value: 'many'"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--reasoning-parser", "beem"], "no parser beem"),
    ):
        with pytest.raises(ServingError, match=f"vLLM 0.33.0 refuses .*{why}"):
            check_arguments([*words, *wrong], engine=sys.executable)
    adaptive = launch_for("beam-tiny").words
    with pytest.raises(ServingError, match="has no enable_adaptive_verification"):
        check_arguments(adaptive, engine=sys.executable)


@pytest.mark.parametrize(
    ("start", "remark"),
    [
        ("import os; os.kill(os.getpid(), 11)", "exit status -11"),
        ("import os; os._exit(0)", "exit status 0"),
        ("raise ImportError('libcuda.so.1: no such file')", "libcuda.so.1"),
        ("import time; time.sleep(60)", "did not answer within"),
    ],
)
def test_a_broken_engine_does_no_harm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    start: str,
    remark: str,
) -> None:
    package(tmp_path, start)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(argument_check, "_SECONDS", 1.0)
    checked = check_arguments(words, engine=sys.executable)
    assert checked.by == "the recorded option names of vLLM 0.33.0"
    assert checked.remark is not None
    assert remark in checked.remark
    with pytest.raises(ServingError, match="has no option --seeed"):
        check_arguments([*words, "--seeed", "1"], engine=sys.executable)


def test_without_an_engine_the_recorded_names_judge(words: list[str]) -> None:
    if find_spec("vllm"):
        pytest.skip("vLLM is beside this Python")
    assert check_arguments(words).remark is None
    with pytest.raises(ServingError, match=r"has no option --seeed, --x; see"):
        check_arguments([*words, "--seeed", "1", "--x=1"])


def test_the_key_is_not_handed_to_the_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    package(tmp_path, "import os; raise ImportError(str(sorted(os.environ)))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VLLM_API_KEY", "sk-1")
    remark = check_arguments(words, engine=sys.executable).remark
    assert remark is not None
    assert "VLLM_API_KEY" not in remark


def test_a_system_that_is_read_only_throughout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    package(tmp_path, "import os; assert os.getcwd() == os.sep")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def refuse() -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(argument_check.tempfile, "TemporaryDirectory", refuse)
    assert check_arguments(words, engine=sys.executable).by == "the parser of vLLM 0.33.0"


def test_a_parser_that_nobody_waits_for_ends_by_itself() -> None:
    """Whoever asked may have been killed, and could not end it then."""
    source = argument_check._SOURCE.read_text("utf-8").replace(
        "signal.alarm(600)", "signal.alarm(1)"
    )
    assert "signal.alarm(1)" in source
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE) as hanging:
        assert hanging.wait(20) == -signal.SIGALRM


def test_the_python_behind_a_program(tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    assert python_of(program) == python_of(sys.executable) == sys.executable
    assert engine_command(program) == [str(program)]
    assert engine_command(sys.executable)[1:] == ["-m", "vllm.entrypoints.cli.main"]
    program.write_text("#!/bin/sh\n'''exec' a long path\n")
    assert python_of(program) is None
    (tmp_path / "python").symlink_to(sys.executable)
    assert python_of(program) == str(tmp_path / "python")
    with pytest.raises(ServingError, match="was not found"):
        python_of("no-such-program-anywhere")


@needs_engine
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dp": 8, "expert_parallel": True},
        {
            "dummy_weights": True,
            "adaptive": False,
            "statistics": "detailed",
            "extra": ("--seed", "1"),
        },
        {"tp": 8, "host_gpus": 4},
        {"speculate": False, "async_scheduling": False},
    ],
)
def test_the_real_engine_takes_what_we_say(options: dict[str, object]) -> None:
    given = {"checkpoint": "/models/beam"} | options
    launch = launch_for("beam-501b", **given)  # type: ignore[arg-type]
    checked = check_arguments(launch.command(ray=launch.hosts > 1), engine=ENGINE)
    assert checked.by.startswith("the parser of vLLM 0.3")


@needs_engine
def test_the_real_engine_refuses_nonsense() -> None:
    words = launch_for("beam-501b", checkpoint="/models/beam").words
    for wrong in (["--seed", "x"], ["--no-such-option"], ["--reasoning-parser", "beem"]):
        with pytest.raises(ServingError, match="refuses these arguments"):
            check_arguments([*words, *wrong], engine=ENGINE)
