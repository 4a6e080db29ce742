"""``workbench serve`` as scripts and people use it; the engine only pretends to be one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from serving.fake_engine import all_gone, asked, free_port, pids, runs, write_engine
from workbench.cli import app
from workbench.model.plan import make_plan
from workbench.serving.launch.launch import launch_for
from workbench.serving.server.server import stop_all

COMMAND = [sys.executable, "-m", "workbench.cli", "serve"]
LOG = Path(__file__).parent / "data" / "startup_logs" / "h200_52_layers_cuda_graphs.txt"


def run(*arguments: str, code: int = 0, **environment: str) -> Result:
    """The command in this process, which takes a tenth of the time of one of its own."""
    result = CliRunner().invoke(app, ["serve", *arguments], env=environment)
    assert result.exit_code == code, result.stderr
    return result


def printed(*arguments: str) -> list[str]:
    """The words that ``--print`` prints, and nothing else."""
    result = run(*arguments, "--print")
    assert result.stderr == ""
    return shlex.split(result.stdout.replace("\\\n", " "))


def test_print_is_the_command_and_nothing_else() -> None:
    words = printed("beam-501b", "--checkpoint", "/models/beam", "--drafter", "/models/drafter")
    like = launch_for("beam-501b", checkpoint="/models/beam", drafter="/models/drafter")
    assert words == like.words
    assert words[:3] == ["vllm", "serve", "/models/beam"]
    assert words[words.index("--tensor-parallel-size") + 1] == "4"


def test_options_reach_the_command() -> None:
    words = printed(
        "beam-501b", "--dp", "4", "--expert-parallel", "--kv-dtype", "bf16", "--context", "9000",
        "--sequences", "32", "--port", "9001", "--dummy-weights", "--no-adaptive", "--name", "me",
        "--statistics", "none", "--batched-tokens", "4096", "--speculative-tokens", "3",
        "--extra", "--seed 3", "--checkpoint", "/models/beam",
    )  # fmt: skip
    text = " ".join(words)
    for said in (
        "--data-parallel-size 4 --enable-expert-parallel --kv-cache-dtype bfloat16",
        *("--max-model-len 9000", "--max-num-seqs 8", "--port 9001", "--load-format dummy"),
        *("--served-model-name me", "--max-num-batched-tokens 4096", "--seed 3"),
        '"num_speculative_tokens": 3}',
    ):
        assert said in text
    assert "adaptive" not in text
    assert "--per-request" not in text
    plain = " ".join(printed("beam-501b", "--no-speculation", "--tp", "8"))
    assert "--speculative-config" not in plain
    assert "--tensor-parallel-size 8" in plain
    cpu = " ".join(printed("beam-tiny", "--cpu"))
    assert "--dtype float32 --enforce-eager" in cpu


def test_a_plan_chooses_the_layout_and_the_sequences() -> None:
    words = printed(
        "beam-501b", "--gpu", "B200", "--gpus", "8", "--weights", "nvfp4", "--context", "1048576"
    )
    plan = make_plan(
        "beam-501b", "B200", gpus=8, weights="nvfp4", context=1048576,
        drafter="beam-501b-dflash2",
    )  # fmt: skip
    assert words[words.index("--tensor-parallel-size") + 1] == str(plan.layout.tp)
    assert words[words.index("--max-num-seqs") + 1] == str(min(64, plan.max_sequences))
    failed = run("beam-501b", "--gpu", "H100", "--gpus", "8", "--print", code=1)
    assert "does not fit" in failed.stderr
    assert failed.stdout == ""


def test_a_command_of_one_host_for_several_is_remarked_on() -> None:
    asked_for = ("beam-501b", "--gpu", "GB200", "--gpus", "8", "--weights", "nvfp4")
    result = run(*asked_for, "--print")
    assert "8 GPUs are 2 hosts here" in result.stderr
    assert "--form ray" in result.stderr
    assert result.stdout.startswith("vllm serve")
    assert run(*asked_for, "--form", "ray").stderr == ""


def test_an_open_server_wants_a_key() -> None:
    asked_for = ("beam-tiny", "--host", "0.0.0.0", "--foreign", "--print")
    assert "set VLLM_API_KEY where" in run(*asked_for, VLLM_API_KEY="").stderr
    assert run(*asked_for, VLLM_API_KEY="sk-1").stderr == ""


def test_forms() -> None:
    asked_for = ("beam-501b", "--checkpoint", "/models/beam", "--tp", "8", "--host-gpus", "8")
    docker = run(*asked_for, "--form", "docker").stdout
    assert docker.startswith("docker run")
    assert "vllm/vllm-openai:reflection-beam" in docker
    ray = run(*asked_for[:-1], "4", "--form", "ray", "--head", "10.0.0.1").stdout
    assert "ray start --head --node-ip-address=10.0.0.1" in ray
    assert "--distributed-executor-backend ray" in ray
    keywords = run(*asked_for, "--form", "keywords").stdout
    given: dict[str, Any] = {}
    exec(keywords, {"vllm": type("Module", (), {"LLM": lambda **words: given.update(words)})})
    assert given["tensor_parallel_size"] == 8
    assert given["speculative_config"]["method"] == "dflash"
    document = json.loads(run(*asked_for, "--form", "keywords", "--json").stdout)
    assert document["keywords"] == given
    shell = json.loads(run(*asked_for, "--print", "--json").stdout)
    assert shlex.split(shell["command"].replace("\\\n", " ")) == shell["arguments"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give a MODEL"),
        (["nobody"], 1, "unknown model"),
        (["beam-tiny", "--extra", "--port 1"], 1, "a second time what --port says"),
        (["beam-tiny", "--host", "0.0.0.0"], 1, "is not this machine"),
        (["beam-501b", "--form", "ray"], 1, "host_gpus=4"),
        (["beam-tiny", "--cpu", "--gpu", "H100"], 1, "contradict"),
        (["beam-tiny", "--no-speculation", "--drafter", "/x"], 1, "leave one"),
        (["beam-tiny", "--print", "--check", "--extra", "--seeed 1"], 1, "no option --seeed"),
        (["beam-501b", "--engine", "no-such-program"], 1, "was not found"),
        (["--stop", "1"], 1, "no server of yours"),
    ],
)
def test_wrong_usage_is_one_sentence(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    result = run(*arguments, code=code, BEAM_WORKBENCH_CACHE=str(tmp_path))
    assert words in " ".join(result.stderr.split())
    assert result.stdout == ""
    if code == 1:
        assert result.stderr.count("\n") == 1


# -- a server --------------------------------------------------------------------------------------


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = str(write_engine(folder))
        self.port = str(free_port())
        self.environment = {"BEAM_WORKBENCH_CACHE": str(folder / "cache")}
        self.behave()

    def behave(self, **behaviour: object) -> None:
        self.environment |= asked(self.folder, **behaviour)

    def arguments(self, *more: str) -> list[str]:
        given = ["beam-tiny", "--cpu", "--engine", self.engine, "--port", self.port, "--no-check"]
        return [*given, *more]

    def run(self, *arguments: str, code: int = 0) -> Result:
        return run(*arguments, code=code, **self.environment)

    def start(self, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *self.arguments(*more)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )

    def all(self) -> list[int]:
        found = pids(self.folder)
        workers = found["workers"]
        assert isinstance(workers, list)
        assert isinstance(found["engine"], int)
        return [found["engine"], *workers]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("BEAM_WORKBENCH_CACHE", str(tmp_path / "cache"))
    yield Rig(tmp_path)
    stop_all()


def test_serve_until_ctrl_c(rig: Rig) -> None:
    rig.behave(log=str(LOG))
    with rig.start("--json") as program:
        assert program.stdout is not None
        lines = []
        for line in program.stdout:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "ready":
                break
        assert lines[-1]["url"] == f"http://127.0.0.1:{rig.port}"
        assert lines[-1]["model"] == "beam-tiny"
        texts = [line["text"] for line in lines if line["event"] == "progress"]
        assert "weights loaded: 116.97 GiB a GPU in 3.18 s" in texts
        everything = [lines[-1]["pid"], *rig.all()]
        assert all(runs(pid) for pid in everything)
        program.send_signal(signal.SIGINT)
        rest, errors = program.communicate(timeout=20)
    assert program.returncode == 0
    assert json.loads(rest)["event"] == "stopped"
    assert errors == ""
    assert all_gone(everything, within=1.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_serve_ends_with_the_command(rig: Rig, number: int) -> None:
    with rig.start() as program:
        assert program.stdout is not None
        for line in program.stdout:
            if "is ready at" in line:
                break
        everything = rig.all()
        program.send_signal(number)
        _, errors = program.communicate(timeout=20)
    assert "Traceback" not in errors
    assert all_gone(everything)


def test_an_interrupted_start_says_so(rig: Rig) -> None:
    rig.behave(hang=True)
    with rig.start() as program:
        everything = rig.all()
        program.send_signal(signal.SIGINT)
        out, errors = program.communicate(timeout=20)
    assert program.returncode == 130
    assert "was ended before it was ready" in out
    assert errors == "workbench: interrupted\n"
    assert all_gone(everything, within=1.0)


def test_in_the_background_listed_and_stopped(rig: Rig) -> None:
    started = rig.run(*rig.arguments("--background", "--json"))
    ready = json.loads(started.stdout.splitlines()[-1])
    everything = [ready["pid"], *rig.all()]
    assert all(runs(pid) for pid in everything)
    (server,) = json.loads(rig.run("--list", "--json").stdout)["servers"]
    assert (server["port"], server["ready"], server["pid"]) == (int(rig.port), True, ready["pid"])
    assert "beam-tiny  ready" in rig.run("--list").stdout
    again = rig.run(*rig.arguments(), code=1)
    assert "belongs to your server beam-tiny" in again.stderr
    stopped = json.loads(rig.run("--stop", rig.port, "--json").stdout)
    assert stopped["stopped"]["port"] == int(rig.port)
    assert all_gone(everything, within=1.0)
    assert rig.run("--list").stdout == "no server runs\n"


def test_an_engine_that_dies(rig: Rig) -> None:
    rig.behave(code=4)
    failed = rig.run(*rig.arguments(), code=1)
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("workbench: the engine ended with exit code 4 before it was ready")
    assert "ValueError: no <b>heads</b>" in last
    assert "See root cause above" in failed.stderr
    assert "\x1b" not in failed.stderr
    rig.behave()
    (rig.folder / "pids.json").unlink()
    with rig.start() as program:
        assert program.stdout is not None
        next(line for line in program.stdout if "is ready at" in line)
        os.kill(rig.all()[0], signal.SIGKILL)
        _, errors = program.communicate(timeout=20)
    assert program.returncode == 1
    assert "ended by itself" in errors
