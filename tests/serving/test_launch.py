"""What a launch says in each of its forms, read back by shells and by the engine's names."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ServingError, WorkbenchError
from workbench.model.layout import Layout
from workbench.model.plan import make_plan
from workbench.model.presets import ZOO, bundled_drafter
from workbench.serving.launch.argument_check import check_arguments
from workbench.serving.launch.dry_run import dry_run
from workbench.serving.launch.extra_arguments import recorded
from workbench.serving.launch.launch import Launch, launch_for, launch_of, words_of

DATA = Path(__file__).parents[1] / "data"
OPTIONS = set(json.loads((DATA / "engine_serve_options.json").read_text("utf-8")))


def full(**options: Any) -> Launch:
    """The full model as its announcement serves it."""
    given = {"checkpoint": "/models/beam", "drafter": "/models/drafter"} | options
    return launch_for("beam-501b", **given)


def after(words: list[str], option: str) -> str:
    assert words.count(option) == 1, words
    return words[words.index(option) + 1]


def run_in_shell(command: str, folder: Path, *programs: str) -> list[dict[str, Any]]:
    """A command as pasted into a shell, with programs that only note what they are given."""
    note = folder / "given.jsonl"
    note.unlink(missing_ok=True)
    source = (
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"with open({str(note)!r}, 'a') as file:\n"
        "    print(json.dumps({'words': [os.path.basename(sys.argv[0]), *sys.argv[1:]],\n"
        "        'environment': dict(os.environ)}), file=file)\n"
    )
    for name in programs:
        program = folder / name
        program.write_text(source)
        program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    for shell in ("bash", "sh"):  # read as a script first: no word may be cut or run
        subprocess.run([shell, "-n"], input=command, text=True, check=True, env=environment)
    subprocess.run(["bash", "-c", command], check=True, env=environment)
    return [json.loads(line) for line in note.read_text().splitlines()]


def test_the_published_example() -> None:
    words = full().words
    assert words[:3] == ["vllm", "serve", "/models/beam"]
    assert after(words, "--tensor-parallel-size") == "4"
    assert after(words, "--kv-cache-dtype") == "fp8"
    assert after(words, "--reasoning-parser") == after(words, "--tool-call-parser") == "beam"
    assert "--enable-auto-tool-choice" in words
    assert json.loads(after(words, "--speculative-config")) == {
        "method": "dflash",
        "model": "/models/drafter",
        "num_speculative_tokens": 7,
        "enable_adaptive_verification": True,
    }
    assert after(words, "--per-request-spec-decode-metrics") == "summary"
    assert after(words, "--host") == "127.0.0.1"
    assert after(words, "--served-model-name") == "beam-501b"
    assert "--load-format" not in words
    assert "--data-parallel-size" not in words


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dp": 8, "expert_parallel": True},
        {"dummy_weights": True, "adaptive": False, "statistics": "detailed"},
        {"async_scheduling": False, "extra": ("--seed", "3", "--no-enable-prefix-caching")},
        {"speculate": False, "drafter": None},
    ],
)
def test_every_option_is_one_of_the_engine_s(options: dict[str, Any]) -> None:
    launch = full(**options)
    said = {word for word in launch.words if word.startswith("--")}
    assert said <= OPTIONS
    assert len(said) >= 12
    assert str(check_arguments(launch.words)).endswith("option names of vLLM 0.33.0")


def test_recorded_options_are_those_of_the_engine() -> None:
    assert set(recorded()["options"]) == OPTIONS
    assert recorded()["vllm"] == "0.33.0"
    options = recorded()["options"]
    assert options["--device-memory-utilization"] == ["gpu_memory_utilization", None]
    assert options["--enable-custom-all-reduce"] == ["disable_custom_all_reduce", False]
    assert not {"host", "api_key", "tool_call_parser"} & set(recorded()["engine"])


def test_dp_attention_with_expert_parallelism() -> None:
    words = full(dp=8, expert_parallel=True, sequences=64).words
    assert after(words, "--tensor-parallel-size") == "1"
    assert after(words, "--data-parallel-size") == "8"
    assert "--enable-expert-parallel" in words
    assert after(words, "--max-num-seqs") == "8"  # of one group


def test_dummy_weights_and_no_adaptive_verification() -> None:
    words = full(dummy_weights=True, adaptive=False, statistics="none").words
    assert after(words, "--load-format") == "dummy"
    assert "enable_adaptive_verification" not in after(words, "--speculative-config")
    assert "--per-request-spec-decode-metrics" not in words


def test_statistics_are_not_asked_for_without_speculation() -> None:
    """The engine refuses them then."""
    words = full(speculate=False, drafter=None).words
    assert "--per-request-spec-decode-metrics" not in words
    assert "--speculative-config" not in words


def test_a_plan_becomes_a_launch() -> None:
    plan = make_plan(
        "beam-501b", "GB200", gpus=8, weights="nvfp4", context=65536, sequences=32,
        drafter="beam-501b-dflash2",
    )  # fmt: skip
    launch = launch_of(plan, checkpoint="/models/beam", drafter="/models/drafter", port=9000)
    words, planned = launch.words, plan.arguments
    for option in (
        *("--tensor-parallel-size", "--kv-cache-dtype", "--block-size", "--max-model-len"),
        *("--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization"),
    ):
        assert after(words, option) == after(planned, option)
    assert after(words, "--port") == "9000"
    assert json.loads(after(words, "--speculative-config"))["model"] == "/models/drafter"
    fixed = launch_of(plan, checkpoint="/models/beam", drafter="/models/drafter", adaptive=False)
    assert "adaptive" not in after(fixed.words, "--speculative-config")
    assert launch.hosts == 2  # four GPUs a host


def test_a_plan_that_does_not_run_is_refused() -> None:
    plan = make_plan("beam-501b", "H100", gpus=8, context=4096)
    with pytest.raises(ServingError, match="does not fit"):
        launch_of(plan, checkpoint="/models/beam")
    fits = make_plan("beam-501b", "GB300", gpus=8, context=4096)
    assert fits.runs
    with pytest.raises(ServingError, match="no drafter"):
        launch_of(fits, checkpoint="/models/beam", drafter="/models/drafter")
    with pytest.raises(WorkbenchError, match="checkpoint is empty"):
        launch_of(fits, checkpoint="")
    drafting = make_plan(
        "beam-501b", "GB300", gpus=8, context=4096, drafter="beam-501b-dflash2"
    )  # fmt: skip
    with pytest.raises(WorkbenchError, match="drafter's hidden_size"):
        launch_of(drafting, drafter=str(bundled_drafter("beam-tiny")))


def test_a_bundled_model_brings_its_folders_and_its_length() -> None:
    words = launch_for("beam-tiny").words
    assert (Path(words[2]) / "config.json").is_file()
    drafter = json.loads(after(words, "--speculative-config"))["model"]
    assert (Path(drafter) / "config.json").is_file()
    assert after(words, "--max-model-len") == "2048"
    assert after(words, "--tensor-parallel-size") == "1"


def test_on_a_cpu() -> None:
    launch = launch_for("beam-tiny", cpu=True, sequences=8)
    words = launch.words
    assert after(words, "--dtype") == "float32"
    assert "--enforce-eager" in words
    assert "--gpu-memory-utilization" not in words
    assert "--speculative-config" not in words
    assert launch.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert launch.environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert (
        after(
            launch_for("beam-tiny", cpu=True, sequences=2, context=64).words,
            "--max-num-batched-tokens",
        )
        == "128"
    )
    with pytest.raises(ServingError, match="CPU build lacks"):
        launch_for("beam-tiny", cpu=True, speculate=True)
    with pytest.raises(ServingError, match="is for GPUs"):
        launch_for("beam-tiny", cpu=True, tp=2)


# -- what a shell makes of it ----------------------------------------------------------------------


def test_pasted_into_a_shell(tmp_path: Path) -> None:
    launch = full(checkpoint="/models/the beam's $HOME", extra=("--seed", "3"))
    (given,) = run_in_shell(launch.shell(), tmp_path, "vllm")
    assert given["words"] == launch.words
    assert "/models/the beam's $HOME" in given["words"]
    assert given["words"][-2:] == ["--seed", "3"]


HOSTILE = (
    '/models/a b\'s "c" $HOME `id` $(id) ;&|<>*?[x]~#!{a,b}\\n\\',
    "/modèles/光束 🔦/ß",
    "/m/" + "x" * 4000,
    "/models/--port=1",
    "org/beam@main:tag",
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP4": {},
    "DP8+EP": {"dp": 8, "expert_parallel": True},
    "dummy weights": {"dummy_weights": True},
    "no drafter": {"speculate": False},
    "two hosts": {"tp": 8, "host_gpus": 4},
    "four hosts": {"tp": 8, "dp": 2, "host_gpus": 4},
    "DP over two hosts": {"dp": 8, "expert_parallel": True, "host_gpus": 4},
    "foreign": {"host": "0.0.0.0", "foreign": True, "port": 9001},
    "extra": {"extra": ("--hf-overrides", json.dumps({"a": '$(id)\\ "b" it\'s'}), "--seed=-1")},
}


@pytest.mark.parametrize("path", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_every_word_arrives_as_it_was_meant(
    tmp_path: Path, path: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each form pasted into a shell whose docker, ray and vllm only note what they are given."""
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-key")
    drafter = None if options.get("speculate") is False else path + "-dflash2"
    launch = launch_for("beam-501b", checkpoint=path, drafter=drafter, **options)
    assert launch.words[2] == path
    if launch.hosts > 1:
        nodes = launch.multi_node(head="fd00::1")
        (head,) = run_in_shell(nodes.head, tmp_path, "ray")
        assert "--node-ip-address=fd00::1" in head["words"]
        assert head["environment"]["VLLM_HOST_IP"] == "fd00::1"
        (worker,) = run_in_shell(nodes.worker, tmp_path, "ray")
        assert "--address=[fd00::1]:6379" in worker["words"]
        (stop,) = run_in_shell(nodes.stop, tmp_path, "ray")
        assert stop["words"] == ["ray", "stop"]
        (given,) = run_in_shell(nodes.serve, tmp_path, "vllm")
        assert given["words"] == launch.command(ray=True)
        assert "a-secret-key" not in str(nodes)
        return
    (given,) = run_in_shell(launch.shell(), tmp_path, "vllm")
    assert given["words"] == launch.words
    if '"' in path:
        with pytest.raises(ServingError, match="comma or a quote"):
            launch.docker()
        return
    command = launch.docker(image="registry.local/a b:c$d")
    assert "a-secret-key" not in command
    (given,) = run_in_shell(command, tmp_path, "docker")
    assert given["environment"]["VLLM_API_KEY"] == "a-secret-key"
    words = given["words"]
    at = words.index("registry.local/a b:c$d")
    inside = [launch.host if word == "0.0.0.0" else word for word in words[at + 1 :]]
    assert inside == launch.words[1:]
    models = {model for model in (path, drafter) if model is not None and model[0] == "/"}
    mounts = {words[i + 1] for i, word in enumerate(words[:at]) if word == "--mount"}
    assert mounts == {f"type=bind,source={m},target={m},readonly" for m in models}
    assert after(words[:at], "--publish") == f"{launch.host}:{launch.port}:{launch.port}"


def test_docker_mounts_what_links_lead_to(tmp_path: Path) -> None:
    disk, folder = tmp_path / "disk", tmp_path / "beam"
    for made in (disk / "a", disk / "b", folder):
        made.mkdir(parents=True)
    (disk / "a" / "one").write_text("1")
    (disk / "b" / "two").symlink_to("../a/one")
    (folder / "model-1.safetensors").symlink_to(disk / "a" / "one")
    (folder / "model-2.safetensors").symlink_to("../disk/b/two")  # over two links
    (folder / "config.json").symlink_to("model-1.safetensors")
    (folder / "gone").symlink_to("/nowhere/at/all")
    (folder / "round").symlink_to("round")
    words = shlex.split(full(checkpoint=str(folder), drafter="org/drafter").docker())
    mounts = [words[i + 1] for i, word in enumerate(words) if word == "--mount"]
    assert mounts == [
        f"type=bind,source={where},target={where},readonly"
        for where in (folder, disk / "a", disk / "b")
    ]
    with pytest.raises(ServingError, match="numeric address, not on gpu-host"):
        full(host="gpu-host", foreign=True).docker()
    assert "127.0.0.1:8000:8000" in full(host="localhost").docker()


@pytest.mark.parametrize("head", ["", " ", "-x", "a b", "a\nb", "a\x1b", 3])
def test_heads_that_are_no_address(head: Any) -> None:
    with pytest.raises(ServingError, match="head host's address") as caught:
        full(tp=8, host_gpus=4).multi_node(head=head)
    assert "\n" not in str(caught.value)


def test_a_step_up_from_a_link_leads_where_the_link_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk" / "a").mkdir(parents=True)
    (tmp_path / "disk" / "beam").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "disk" / "a")
    monkeypatch.chdir(tmp_path / "here")
    beam = str(tmp_path / "disk" / "beam")
    assert full(checkpoint="link/../beam").words[2] == beam
    assert full(checkpoint=f"{tmp_path}/here/link/../beam").words[2] == beam
    assert full(checkpoint="./link").words[2] == str(tmp_path / "here" / "link")


def test_without_a_checkpoint_the_command_names_what_is_missing() -> None:
    command = launch_for("beam-501b").shell()
    assert "'<path of the Beam checkpoint>'" in command
    assert "<path of the DFlash2 drafter>" in command


def test_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-secret-key")
    launch = full(port=9001)
    command = launch.docker()
    assert "a-secret-key" not in command
    (given,) = run_in_shell(command, tmp_path, "docker")
    words = given["words"]
    at = words.index("vllm/vllm-openai:reflection-beam")
    before, inside = words[:at], words[at + 1 :]
    assert before[:3] == ["docker", "run", "--rm"]
    assert after(before, "--gpus") == "all"
    assert "--ipc=host" in before
    assert after(before, "--publish") == "127.0.0.1:9001:9001"
    assert after(before, "--entrypoint") == "vllm"
    mounts = [before[i + 1] for i, word in enumerate(before) if word == "--mount"]
    assert mounts == [
        "type=bind,source=/models/beam,target=/models/beam,readonly",
        "type=bind,source=/models/drafter,target=/models/drafter,readonly",
    ]
    variables = [before[i + 1] for i, word in enumerate(before) if word == "--env"]
    assert "VLLM_API_KEY" in variables  # by name: Docker takes its value from where it runs
    assert "HF_HUB_OFFLINE=1" in variables
    assert inside[:2] == ["serve", "/models/beam"]
    assert after(inside, "--host") == "0.0.0.0"
    rest = [word for word in inside if word != "0.0.0.0"]
    assert rest == [word for word in launch.words[1:] if word != "127.0.0.1"]


def test_docker_mounts_a_hub_cache_with_what_its_links_lead_to(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--beam" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    words = shlex.split(full(checkpoint=str(folder), drafter="org/drafter").docker())
    root = tmp_path / "models--org--beam"
    assert f"type=bind,source={root},target={root},readonly" in words
    assert words.count("--mount") == 1  # the drafter is a name for the engine to look up
    assert "HF_HUB_OFFLINE=1" not in words
    with pytest.raises(ServingError, match="comma"):
        full(checkpoint="/models/a,b").docker()
    with pytest.raises(ServingError, match="takes 2 hosts"):
        full(tp=8, host_gpus=4).docker()


def test_two_hosts_of_four(tmp_path: Path) -> None:
    launch = full(tp=8, host_gpus=4)
    nodes = launch.multi_node(head="10.0.0.1")
    assert (nodes.hosts, nodes.host_gpus) == (2, 4)
    (head,) = run_in_shell(nodes.head, tmp_path, "ray")
    assert head["words"][:3] == ["ray", "start", "--head"]
    assert "--node-ip-address=10.0.0.1" in head["words"]
    assert "--num-gpus=4" in head["words"]
    assert head["environment"]["VLLM_HOST_IP"] == "10.0.0.1"
    worker_command = nodes.worker.replace("<address of this host>", "10.0.0.2")
    (worker,) = run_in_shell(worker_command, tmp_path, "ray")
    assert "--address=10.0.0.1:6379" in worker["words"]
    assert "--node-ip-address=10.0.0.2" in worker["words"]
    assert worker["environment"]["VLLM_HOST_IP"] == "10.0.0.2"
    (served,) = run_in_shell(nodes.serve, tmp_path, "vllm")
    words = served["words"]
    assert after(words, "--tensor-parallel-size") == "8"
    assert after(words, "--distributed-executor-backend") == "ray"
    assert "--pipeline-parallel-size" not in words  # adaptive verification refuses it
    assert {word for word in words if word.startswith("--")} <= OPTIONS
    ray = ["--distributed-executor-backend", "ray"]
    assert [word for word in words if word not in ray] == launch.words
    assert "'<address of the head host>'" in launch.multi_node().serve


@pytest.mark.parametrize(
    ("layout", "hosts", "local", "spans"),
    [
        ({"dp": 8, "expert_parallel": True}, 2, "4", False),
        ({"tp": 2, "dp": 4}, 2, "2", False),
        ({"dp": 6, "expert_parallel": True}, 2, "3", False),
        ({"tp": 8, "dp": 2}, 4, None, True),
    ],
)
def test_data_parallel_groups_over_hosts(
    layout: dict[str, Any], hosts: int, local: str | None, spans: bool
) -> None:
    nodes = full(**layout, host_gpus=4).multi_node(head="10.0.0.1")
    assert nodes.hosts == hosts
    words = shlex.split(nodes.serve.replace("\\\n", " "))
    assert after(words, "--data-parallel-backend") == "ray"
    assert ("--data-parallel-size-local" in words) == (local is not None)
    if local is not None:
        assert after(words, "--data-parallel-size-local") == local
    assert ("VLLM_RAY_DP_PACK_STRATEGY=span" in words) == spans


def test_ray_is_for_several_hosts() -> None:
    with pytest.raises(ServingError, match="host_gpus=4"):
        full(tp=8).multi_node()
    with pytest.raises(ServingError, match="fits one host"):
        full(tp=4, host_gpus=4).multi_node()
    with pytest.raises(ServingError, match="evenly over 2 hosts of 4 GPUs"):
        full(dp=5, expert_parallel=True, host_gpus=4).multi_node()
    with pytest.raises(ServingError, match="evenly over 3 hosts of 3 GPUs"):
        full(tp=4, dp=2, host_gpus=3).multi_node()


# -- in this process -------------------------------------------------------------------------------


def test_keywords_mean_what_the_words_mean() -> None:
    extra = ("--seed", "3", "--no-enable-prefix-caching", "--compilation-config.mode", "3")
    launch = full(async_scheduling=False, dummy_weights=True, extra=extra)
    keywords = launch.keywords()
    assert keywords.pop("model") == "/models/beam"
    # The words once more, read in a few lines that know nothing of the launch.
    words, read = launch.words[3:], dict[str, Any]()
    for i, word in enumerate(words):
        if word.startswith("--"):
            value = None if [*words, "--"][i + 1].startswith("--") else words[i + 1]
            name = word[2:].removeprefix("no-").replace("-", "_")
            read[name] = value if value is not None else not word.startswith("--no-")
    for name in (
        *("host", "port", "tool_call_parser", "enable_auto_tool_choice"),
        "disable_access_log_for_endpoints",
    ):
        del read[name]
    assert read.pop("compilation_config.mode") == "3"
    assert keywords.pop("compilation_config") == {"mode": 3}
    assert json.loads(read.pop("speculative_config")) == keywords.pop("speculative_config")
    assert keywords.keys() == read.keys()
    for name, value in keywords.items():
        assert type(value)(read[name]) == value, name
    assert keywords["enable_prefix_caching"] is keywords["async_scheduling"] is False
    assert keywords["load_format"] == "dummy"


def test_keywords_of_options_that_are_said_twice() -> None:
    assert full(extra=("--seed", "1", "--seed=2")).keywords()["seed"] == 2  # as argparse does
    part, entire = ("--compilation-config.mode", "3"), ("--compilation-config", '{"a": 1}')
    for extra in (part + entire, entire + part):
        with pytest.raises(ServingError, match="given whole and in part"):
            full(extra=extra).keywords()
    two = full(extra=(*part, "--compilation-config.b.c=4")).keywords()
    assert two["compilation_config"] == {"mode": 3, "b": {"c": 4}}
    with pytest.raises(ServingError, match="--seed wants a value"):
        full(extra=("--seed",)).keywords()


def test_keywords_refuse_data_parallelism() -> None:
    with pytest.raises(ServingError, match="refuses in one process"):
        full(dp=8, expert_parallel=True).keywords()


def test_a_disabled_switch_is_a_false_keyword() -> None:
    extra = ("--disable-prefix-caching", "--disable-log-stats", "--enable-custom-all-reduce")
    keywords = full(extra=(*extra, "--disable-cascade-attn", "--enable-log-requests")).keywords()
    assert keywords["enable_prefix_caching"] is False
    assert keywords["disable_log_stats"] is True
    assert keywords["disable_custom_all_reduce"] is False  # it has no enable_ of this name
    assert keywords["disable_cascade_attn"] is True
    assert not {"enable_log_requests", "enable_custom_all_reduce"} & keywords.keys()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--port", "1"], "a second time what --port says"),
        (["--host=0.0.0.0"], "a second time what --host says"),
        (["--hos", "0.0.0.0"], "a second time what --host says"),
        (["--tensor-parallel-size", "2"], "a second time"),
        (["--tensor_parallel_size", "2"], "a second time"),
        (["--no-async-scheduling"], "a second time what --async-scheduling says"),
        (["--disable-expert-parallel"], "a second time what --enable-expert-parallel"),
        (["--device-memory-utilization", "1"], "a second time what --gpu-memory-utilization"),
        (["--speculative-config.method", "ngram"], "a second time"),
        (["--max-num-seq", "4"], "write --max-num-seq out in full: --max-num-seqs"),
        (["--max-num-seqs", "4"], "a second time what --max-num-seqs"),
        (["--ssl-keyf=/k"], "write --ssl-keyf out in full: --ssl-keyfile"),
        (["--api-key", "sk-1"], "set VLLM_API_KEY in the environment"),
        (["--api-k=sk-1"], "set VLLM_API_KEY in the environment"),
        (["--hf-token", "x"], "set HF_TOKEN"),
        (["--config", "a.yaml"], "a file of arguments"),
        (["--uds", "/tmp/x"], "not for here"),
        (["--headl"], "not for here"),
        (["-tp", "2"], "out in full"),
        (["--"], "out in full"),
        (["--=x"], "out in full"),
        (["--enforce-eager", "true"], "takes no value, not 'true'"),
        (["--no-enable-prefix-caching=1"], "takes no value, not '1'"),
        (["3"], "no option"),
        (["--seed", "1\n"], "no printable text"),
        ("--seed 1", "a list of words"),
        ([1], "no printable text"),
        (3, "a list of words"),
    ],
)
def test_extra_arguments_that_clash(extra: Any, words: str) -> None:
    with pytest.raises(ServingError, match=words) as caught:
        full(extra=extra)
    assert "sk-1" not in str(caught.value)


def test_extra_arguments_that_do_not_clash() -> None:
    extra = (
        "--seed",
        "-1",
        "--enforce-eager",
        "--max-num-queued-reqs",
        "9",
        "--api-server-count",
        "2",
    )
    assert full(extra=extra).words[-7:] == list(extra)
    quiet = full(extra=("--disable-access-log-for-endpoints", "/ping"))
    assert after(quiet.words, "--disable-access-log-for-endpoints") == "/ping"
    assert words_of("--seed 1 --hf-overrides '{\"a\": 1}'")[-1] == '{"a": 1}'
    with pytest.raises(ServingError, match="cannot be read"):
        words_of("--seed '1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "not this machine"),
        ({"host": "192.168.1.4"}, "not this machine"),
        ({"host": "a b"}, "blanks"),
        ({"host": "127.0.0.1/x"}, "more than a host"),
        ({"host": "127.0.0.1#"}, "no server.s address"),
        ({"port": 0}, "from 1 to 65,535"),
        ({"port": True}, "from 1 to 65,535"),
        ({"statistics": "all"}, "one of none, summary, detailed"),
        ({"name": "-x"}, "begins with -"),
        ({"name": "a\x1b[2J"}, "printable"),
        ({"utilization": 1.5}, "utilization"),
        ({"dummy_weights": 1}, "true or false"),
        ({"host_gpus": 0}, "host_gpus"),
        ({"context": 2_000_000}, "context"),
        ({"kv_dtype": "fp4"}, "KV dtype"),
        ({"tp": 5}, "5"),
        ({"tp": 2, "dp": 2, "expert_parallel": True}, "expert parallelism"),
        ({"sequences": 9000}, "batched"),
        ({"speculate": False}, "drafter"),
        ({"checkpoint": "-x"}, "begins with -"),
        ({"checkpoint": ""}, "checkpoint is empty"),
        ({"drafter": ""}, "drafter is empty"),
        ({"drafter": str(bundled_drafter("beam-tiny"))}, "drafter's hidden_size is .* trained for"),
        ({"drafter": str(bundled_drafter("beam-tiny")), "dp": 8}, "drafter's hidden_size"),
        ({"drafter": str(ZOO / "beam-tiny")}, "not a DFlash2 drafter's config"),
    ],
)
def test_wrong_values(options: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkbenchError, match=words) as caught:
        full(**options)
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_foreign_host_has_to_be_meant() -> None:
    launch = full(host="0.0.0.0", foreign=True)
    assert after(launch.words, "--host") == "0.0.0.0"
    assert launch.address.url == "http://127.0.0.1:8000"
    assert launch.exposed
    six = full(host="::1")
    assert (six.exposed, six.address.url) == (False, "http://[::1]:8000")
    assert "--publish '[::1]:8000:8000'" in six.docker()


def test_a_launch_can_be_made_of_its_parts() -> None:
    like = full()
    made = Launch(
        layout=Layout(tp=4),
        kv=like.kv,
        checkpoint="/models/beam",
        speculation=like.speculation,
        name="beam-501b",
    )
    assert made.words == like.words


def test_a_dry_run_writes_the_shapes_that_the_engine_reads(tmp_path: Path) -> None:
    launch = launch_for("beam-501b", tp=8, dummy_weights=True)
    dry = dry_run(launch, "beam-501b", folder=tmp_path / "shapes")
    words = dry.words
    config = json.loads((Path(words[2]) / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["BeamForCausalLM"]
    assert (config["num_hidden_layers"], config["num_experts"]) == (52, 256)
    assert json.loads((Path(words[2]) / "tokenizer.json").read_text("utf-8"))["model"]
    folder = json.loads(after(words, "--speculative-config"))["model"]
    drafter = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    assert drafter["architectures"] == ["DFlash2BeamDraftModel"]
    assert drafter["use_sliding_window"] is True
    given = full(tp=8, dummy_weights=True)
    assert dry_run(given, "beam-501b", folder=tmp_path / "none") == given
    assert not (tmp_path / "none").exists()
    with pytest.raises(ServingError, match="dummy weights only"):
        dry_run(full(), "beam-501b", folder=tmp_path)
    with pytest.raises(ServingError, match="cannot be made"):
        dry_run(launch, "beam-501b", folder=Path("/dev/null/x"))
