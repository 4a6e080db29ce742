"""``workbench kv`` and ``workbench plan`` as scripts use them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.model.presets import beam_501b_dflash2, bundled_drafter, resolve

FULL = 9 * 2 * 8 * 128


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "workbench.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result


def document(*arguments: str, code: int = 0) -> dict[str, Any]:
    lines = run(*arguments, "--json", code=code).stdout.splitlines()
    assert len(lines) == 1
    value = json.loads(lines[0])
    assert isinstance(value, dict)
    return value


def test_no_option_is_taken_for_its_metavar() -> None:
    """Some releases of typer name ``--x`` with the metavar X "--X"; such options say their name."""
    from inspect import signature
    from typing import get_type_hints

    from typer.models import OptionInfo

    from workbench.cli import app, train_app

    for command in (*app.registered_commands, *train_app.registered_commands):
        assert command.callback is not None
        hints = get_type_hints(command.callback, include_extras=True)
        for name in signature(command.callback).parameters:
            for info in getattr(hints[name], "__metadata__", ()):
                if isinstance(info, OptionInfo) and info.metavar is not None:
                    # In an annotation typer keeps the first explicit name as the default.
                    named = bool(info.param_decls) or isinstance(info.default, str)
                    assert named or info.metavar.lower() != name, name


def test_kv_has_the_contract_s_keys() -> None:
    value = document("kv", "beam-501b", "--context", "1048576", "--kv-dtype", "fp8", "--tp", "8")
    assert value["bytes_per_token"] == 18_432 == FULL
    assert value["full_bytes"] == 18 * 2**30
    assert value["sliding_bytes"] == 43 * 512 * 2 * 8 * 128
    assert value["total_bytes"] == value["full_bytes"] + value["sliding_bytes"]
    assert value["resident_bytes"] == value["read_bytes_per_step"] == value["total_bytes"]
    assert value["per_gpu_bytes"] * 8 == value["total_bytes"]
    assert [layer["index"] for layer in value["per_layer"]] == list(range(52))
    assert {"ideal_bytes", "admission_bytes", "hybrid_off_bytes"} <= set(value["per_layer"][0])
    assert value["per_layer"][3]["attention"] == "full_attention"
    assert value["binding"] == "in_flight_tokens"
    assert value["model"] == "beam-501b"


def test_kv_options_reach_the_sizing() -> None:
    def admission(*more: str) -> int:
        value = document("kv", "beam-501b", "--context", "131072", *more)
        return int(value["per_layer"][0]["admission_bytes"])

    page = 2 * 8 * 128 * 2
    assert admission() == (-(-(511 + 16_384) // 16) + 1) * 16 * page
    assert admission("--no-async-scheduling") == (-(-(511 + 8192) // 16) + 1) * 16 * page
    assert admission("--batched-tokens", "2048") == (-(-(511 + 4096) // 16) + 1) * 16 * page
    assert admission("--block-size", "64") == (-(-(511 + 16_384) // 64) + 1) * 64 * page
    assert admission("--sequences", "3") == 3 * admission()
    assert len(document("kv", "beam-501b", "--context", "9", "--drafter")["per_layer"]) == 57
    small = document("kv", "beam-tiny", "--context", "2048")
    assert small["bytes_per_token"] == 2 * 2 * 2 * 64 * 2


def test_plan_has_the_contract_s_keys() -> None:
    value = document(
        "plan", "beam-501b", "--gpu", "gb200", "--gpus", "8", "--weights", "nvfp4",
        "--kv-dtype", "fp8", "--context", "1048576", "--sequences", "2",
        "--checkpoint", "/models/beam", "--drafter", "/models/drafter",
    )  # fmt: skip
    assert value["fits"] is True
    assert value["per_gpu"]["weights_bytes"] > 30 * 2**30
    assert value["per_gpu"]["kv_bytes"] > 2 * 18 * 2**30 // 8
    assert value["per_gpu"]["free_bytes"] > 0
    assert value["max_context"] == 1_048_576
    assert value["max_sequences"] >= 2
    words = shlex.split(value["serve_command"].replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "/models/beam"]
    assert "/models/drafter" in words[words.index("--speculative-config") + 1]


def test_a_plan_that_does_not_fit_is_told_and_exits_with_one() -> None:
    asked = ("plan", "beam-501b", "--gpu", "H100", "--gpus", "8", "--context", "4096")
    value = document(*asked, code=1)
    assert value["fits"] is False
    assert value["max_context"] == 0
    result = run(*asked, code=1)
    assert result.stderr.startswith("workbench: beam-501b in bf16 on 8 x H100 (TP8) does not fit")
    assert result.stderr.count("\n") == 1
    assert "vllm serve" not in result.stdout  # no command to copy that cannot start
    assert "does not fit" not in result.stdout  # said once


def test_layout_can_be_given() -> None:
    common = ("plan", "beam-501b", "--gpu", "GB300", "--weights", "nvfp4", "--context", "4096")
    spread = document(*common, "--dp", "4", "--ep")
    assert spread["layout"] == {
        "name": "DP4 + EP4", "tp": 1, "dp": 4, "expert_parallel": True,
    }  # fmt: skip
    assert document(*common, "--gpus", "8", "--tp", "4")["layout"]["name"] == "TP4 x DP2"
    assert document(*common, "--gpus", "8", "--dp", "2")["layout"]["name"] == "TP4 x DP2"
    assert document(*common, "--gpus", "4", "--ep")["layout"]["name"] == "TP4 + EP4"


def test_a_drafter_s_folder_gives_its_shape(tmp_path: Path) -> None:
    thin = beam_501b_dflash2().config.replace(num_hidden_layers=1)
    (tmp_path / "config.json").write_text(thin.to_json(), "utf-8")
    value = document("kv", "beam-501b", "--context", "99", "--drafter-config", str(tmp_path))
    assert len(value["per_layer"]) == 53
    assert len(value["engine"]["groups"]) == 53  # groups as thin as the rarest kind of layer


@pytest.fixture
def alone(tmp_path: Path) -> str:
    """A model that no drafter is known for."""
    (tmp_path / "config.json").write_text(resolve("beam-tiny").config.to_json())
    return str(tmp_path)


def test_a_model_without_a_drafter_has_none_to_count(alone: str) -> None:
    tiny = document("plan", alone, "--gpu", "H200", "--context", "99", "--drafter", "org/x")
    assert tiny["per_gpu"]["weights"]["drafter"] == 0
    assert any("not counted" in note for note in tiny["notes"])
    refused = run("kv", alone, "--context", "9", "--drafter", code=1)
    assert "no drafter is known for" in refused.stderr


def test_a_bundled_drafter_is_counted_and_not_assumed() -> None:
    tiny = document("plan", "beam-tiny", "--gpu", "H200", "--context", "99")
    stored = bundled_drafter("beam-tiny")
    assert stored is not None
    size = (stored / "model.safetensors").stat().st_size
    assert tiny["per_gpu"]["weights"]["drafter"] == pytest.approx(size, rel=1e-2)
    assert not any("assumed" in note for note in tiny["notes"])


def test_a_drafter_that_is_not_here_is_assumed_and_said() -> None:
    asked = ("plan", "beam-501b", "--gpu", "GB200", "--gpus", "8", "--weights", "nvfp4")
    value = document(*asked, "--context", "4096", "--drafter", "org/drafter")
    assert value["per_gpu"]["weights"]["drafter"] > 0
    assert any("counted as beam-501b-dflash2" in note for note in value["notes"])
    preset = document(*asked, "--context", "4096")["notes"]
    assert any("shape is assumed: counted as beam-501b-dflash2" in note for note in preset)
    plain = document(*asked, "--context", "4096", "--no-speculation")["notes"]
    assert not any("counted" in note for note in plain)


def test_pages_say_how_each_figure_is_known() -> None:
    page = run("kv", "beam-501b", "--context", "131072", "--drafter").stdout
    for words in (
        "ideal",
        "engine admission bound (vLLM 0.33)",
        "naive",
        "does not start",
        "what limits it:",
    ):
        assert words in page
    page = run("plan", "beam-501b", "--gpu", "H200", "--gpus", "8", "--context", "4096").stdout
    for words in ("modelled", "exact", "TP8 + EP8", "vllm serve", "of which the engine may use"):
        assert words in page
    assert "TP8 *" in page  # the layout that was taken
    narrow = run("plan", "--help").stdout
    for option in ("--no-async-scheduling", "--speculative-tokens", "--gpu GPU"):
        assert option in narrow


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("kv nobody --context 9", "unknown model 'nobody'"),
        ("kv beam-501b --context 0", "context must be a whole number from 1"),
        ("kv beam-501b --context -4096", "not -4,096"),
        ("kv beam-501b --context 9999999999999999999999", "far beyond any model"),
        ("kv beam-501b --context 9 --tp 7", "use one of 1, 2, 4, 8, 16, 24, 48"),
        ("kv beam-501b --context 9 --block-size 0", "block size must be"),
        ("kv beam-501b --context 9 --block-size 24", "multiple of 16 tokens, not 24"),
        ("kv '' --context 9", "the model's name is empty"),
        ("kv beam-501b --context 9 --drafter-config ''", "the drafter's name is empty"),
        ("plan beam-501b --gpu H200 --gpus 8 --context 9 --checkpoint ''", "checkpoint is empty"),
        ("plan beam-501b --gpu H200 --gpus 8 --context 9 --checkpoint=-x", "begins with -"),
        ("plan beam-501b --gpu H200 --gpus 8 --dp 0 --context 9", "dp must be a whole number"),
        ("plan beam-501b --gpu H200 --gpus 8 --context 9 --drafter /etc/hosts", "unknown drafter"),
        (
            "plan beam-501b --gpu H200 --gpus 8 --context 9 --no-speculation --drafter x",
            "contradict each other",
        ),
        ("kv beam-501b --context 9 --drafter-config /nowhere", "unknown drafter '/nowhere'"),
        ("kv beam-tiny --context 4096", "from 1 to 2,048"),
        ("plan beam-501b --gpu A100 --gpus 8 --context 9", "unknown GPU 'A100'"),
        ("plan beam-501b --gpu H200 --gpus 0 --context 9", "gpus must be a whole number"),
        ("plan beam-501b --gpu H200 --gpus 600 --context 9", "cannot be spread over 600 GPUs"),
        ("plan beam-501b --gpu H200 --gpus 8 --tp 3 --context 9", "--tp 3 does not divide 8 GPUs"),
        ("plan beam-501b --gpu H200 --gpus 8 --tp 4 --dp 4 --context 9", "TP4 x DP4 takes 16 GPUs"),
        ("plan beam-501b --gpu H200 --tp 0 --context 9", "tp must be a whole number"),
        ("plan beam-501b --gpu H200 --context 9 --weights int4", "unknown weights 'int4'"),
        ("plan beam-501b --gpu H200 --context 9 --utilization 2", "at most 1"),
        (
            "plan beam-501b --gpu H200 --context 9 --speculative-tokens 0",
            "from 1 to 1,023",
        ),
    ],
)
def test_wrong_values_are_one_sentence(arguments: str, says: str) -> None:
    for more in ([], ["--json"]):
        result = run(*shlex.split(arguments), *more, code=1)
        assert result.stdout == ""
        assert result.stderr.startswith("workbench: ")
        assert says in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["kv beam-501b", "kv beam-501b --context many", "plan"])
def test_wrong_usage_is_the_parser_s(arguments: str) -> None:
    run(*shlex.split(arguments), code=2)
