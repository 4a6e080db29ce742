"""The command line's contract: documents, exit status, one sentence for a wrong value."""

import errno
import json
import math
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner

import workbench
import workbench.views
from workbench import cli, terminal
from workbench.cli import app
from workbench.model.beam import Beam
from workbench.model.config import BeamConfig
from workbench.model.generate import Token
from workbench.model.presets import ZOO
from workbench.model.tokenizer import Tokenizer

CONFIG = BeamConfig(
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    mlp_layer_types=("dense", "sparse", "sparse"),
    sliding_window=16,
    max_position_embeddings=2048,
    final_logit_softcapping=30.0,
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The models are too small to share out, and waiting for a second thread costs more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint folder of a small random model with the bundled tokenizer."""
    beam = Beam(CONFIG)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in beam.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.1 if "norm" in name else 0.2))
            if "norm" in name:
                p.add_(1)
    beam.tokenizer = Tokenizer.from_folder(ZOO / "beam-tiny")
    path = tmp_path_factory.mktemp("checkpoint")
    workbench.save(beam, path, tokenizer_folder=ZOO / "beam-tiny")
    return str(path)


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def document(*arguments: str) -> dict[str, Any]:
    """The one JSON document of a command, alone on stdout."""
    result = run(*arguments, "--json")
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def spawn(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "workbench.cli", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **(pipes | options))


# -- info -----------------------------------------------------------------------------------------


def test_info_of_the_full_model() -> None:
    value = document("info", "beam-501b")
    hidden, vocab, layers, heads, kv, dim = 5120, 163840, 52, 48, 8, 128
    experts, width, dense = 256, 2560, 12288
    attention = layers * (hidden * dim * (3 * heads + 2 * kv) + heads)
    norms = layers * (4 * hidden + 2 * dim) + hidden
    router = 49 * (experts * hidden + experts)
    one_expert = 49 * 3 * hidden * width
    rest = 2 * vocab * hidden + attention + norms + router + 3 * 3 * hidden * dense
    assert value["parameters"]["total"] == rest + experts * one_expert
    assert value["parameters"]["active"] == rest + 8 * one_expert
    assert f"{value['parameters']['total'] / 1e9:.2f}" == "501.01"
    assert f"{value['parameters']['active'] / 1e9:.2f}" == "23.18"
    kinds = [layer["attention"] for layer in value["layers"]]
    assert (kinds.count("sliding_attention"), kinds.count("full_attention")) == (43, 9)
    assert [layer["mlp"] for layer in value["layers"]] == ["dense"] * 3 + ["sparse"] * 49
    assert [layer["index"] for layer in value["layers"]] == list(range(52))
    outside = 2 * vocab * hidden + hidden
    inside = sum(layer["parameters"] for layer in value["layers"])
    assert inside + outside == value["parameters"]["total"]
    assert sum(value["parameters"]["by_part"].values()) == value["parameters"]["total"]
    fields = value["fields"]
    assert fields["sliding_window"] == {"value": 512, "source": "published", "note": ""}
    assert fields["num_key_value_heads"]["source"] == "derived"
    assert set(fields) >= {"vocab_size", "rope_theta", "tie_word_embeddings", "layer_types"}
    assert all(entry["source"] for entry in fields.values())


def test_info_of_a_folder_says_what_its_config_states(folder: str) -> None:
    fields = document("info", folder)["fields"]
    stated = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    for name in ("hidden_size", "layer_types", "final_logit_softcapping"):
        assert fields[name]["value"] == stated[name]
        assert fields[name]["source"] == "checkpoint"


def test_info_page_shows_layers_parts_and_sources() -> None:
    text = run("info", "beam-501b").stdout
    assert "501.01 B parameters, 23.18 B active" in text
    assert text.count("█") == 9 + 1  # one a full layer, one in the legend
    assert text.count("●") == 3 + 1
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if line.startswith("num_attention_heads"))
    assert "48" in row
    assert "derived" in row


def test_info_value_has_text_and_page_forms(tmp_path: Path) -> None:
    config = CONFIG.to_dict()
    hostile = tmp_path / "<script>"
    hostile.mkdir()
    (hostile / "config.json").write_text(json.dumps(config), "utf-8")
    bundle = workbench.info(hostile)._repr_mimebundle_()
    assert "<script>" not in bundle["text/html"]
    assert "&lt;script&gt;" in bundle["text/html"]
    assert "<script>" in bundle["text/plain"]


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("import workbench", 0.5),
        ("from workbench.cli import app; app(['--help'])", 1.0),
        ("from workbench.cli import app; app(['info', 'beam-501b'])", 3.0),
    ],
)
def test_light_commands_start_fast_and_import_no_torch(code: str, limit: float) -> None:
    wrapped = (
        f"import sys\ntry: exec({code!r})\nexcept SystemExit as end: assert not end.code\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", wrapped], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr.strip() == "False"
    # Processor time, so that other work on the machine does not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < limit


# -- generate, logits, evaluate -------------------------------------------------------------------


def test_generate_prints_the_librarys_tokens(folder: str, tmp_path: Path) -> None:
    arguments = ["generate", folder, "--max-new-tokens", "12"]
    value = document(*arguments, "--prompt", "def f(x):")
    expected = workbench.generate(workbench.load(folder), "def f(x):", max_new_tokens=12)
    assert value["token_ids"] == list(expected.token_ids)
    assert value["text"] == expected.text
    assert value["prompt_tokens"] == expected.prompt_tokens
    assert value["new_tokens"] == len(value["token_ids"]) == value["steps"] + 1
    assert value["acceptance_length"] == 1.0
    assert value["per_position_acceptance"] == []
    assert value["tokens_per_second"] == pytest.approx((value["steps"] - 1) / value["seconds"])
    file = tmp_path / "prompt.txt"
    file.write_text("def f(x):", "utf-8")
    assert document(*arguments, "--prompt-file", str(file))["token_ids"] == value["token_ids"]
    human = run(*arguments, "--prompt", "def f(x):", "--no-draft")
    assert human.stdout.rstrip("\n") == expected.text.rstrip("\n")
    assert "without a drafter" in human.stderr
    assert "12 tokens after" in human.stderr


def test_generate_seed_temperature_and_dtype_reach_the_model(folder: str) -> None:
    base = ["generate", folder, "--prompt", "x", "--max-new-tokens", "10"]

    def ids(*more: str) -> list[int]:
        found: list[int] = document(*base, *more)["token_ids"]
        return found

    hot = ids("--temperature", "1", "--seed", "1")
    assert hot == ids("--temperature", "1", "--seed", "1")
    assert hot != ids("--temperature", "1", "--seed", "2")
    assert hot != ids("--temperature", "1", "--seed", "1", "--top-p", "0.05")
    greedy = ids()
    assert greedy == ids("--seed", "9")
    expected = workbench.generate(
        workbench.load(folder, dtype=torch.bfloat16), "x", max_new_tokens=10
    )
    assert ids("--dtype", "bfloat16") == list(expected.token_ids)


def test_a_prompt_can_come_from_standard_input(folder: str) -> None:
    arguments = ["generate", folder, "--prompt-file", "-", "--max-new-tokens", "3", "--json"]
    result = CliRunner().invoke(app, arguments, input="def f(x):")
    expected = document(*arguments[:2], "--prompt", "def f(x):", *arguments[4:6])
    assert json.loads(result.stdout)["token_ids"] == expected["token_ids"]


def test_logits_are_the_models(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "logits.safetensors"
    value = document("logits", folder, "--prompt", "def f(x):", "--out", str(file))
    beam = workbench.load(folder)
    assert beam.tokenizer is not None
    ids = beam.tokenizer.encode("def f(x):")
    with torch.no_grad():
        expected = beam.sequence_logits(torch.tensor(ids)).numpy()
    stored = load_file(file)
    assert value["token_ids"] == ids == stored["token_ids"].tolist()
    assert stored["logits"].dtype == "float32"
    assert stored["logits"].shape == (len(ids), CONFIG.vocab_size)
    assert abs(stored["logits"] - expected).max() < 1e-5
    assert [t["token_id"] for t in value["top"]] == expected.argmax(-1).tolist()
    assert [t["logit"] for t in value["top"]] == pytest.approx(expected.max(-1).tolist(), abs=1e-5)
    page = run("logits", folder, "--prompt", "def f(x):").stdout.splitlines()
    assert len(page) == 1 + len(ids)
    assert page[1].split()[:2] == ["0", "<|bos|>"]


def test_logits_take_a_prompt_as_long_as_the_context(folder: str) -> None:
    text = "x " * 2047
    beam = workbench.load(folder)
    assert beam.tokenizer is not None
    longest = beam.tokenizer.decode(beam.tokenizer.encode(text)[1:2048])
    count = len(beam.tokenizer.encode(longest))
    assert count == 2048, "the text should fill the context exactly"
    assert len(document("logits", folder, "--prompt", longest)["top"]) == count
    result = run("logits", folder, "--prompt", longest + " y", code=1)
    assert "2049 tokens, which exceeds the context of 2048" in result.stderr


def test_a_full_disk_leaves_the_old_file(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "logits.safetensors"
    file.write_bytes(b"precious")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = run("logits", folder, "--prompt", "x", "--out", str(file), code=1)
    assert "No space left on device" in result.stderr
    assert file.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [file]


def test_evaluate_is_the_code_length_of_the_files(folder: str, tmp_path: Path) -> None:
    texts = ["def f(x):\n    return x\n", "naïve ≤ 東京"]
    files = [tmp_path / "a.py", tmp_path / "b.txt"]
    beam = workbench.load(folder)
    assert beam.tokenizer is not None
    nats, tokens = 0.0, 0
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, "utf-8")
        ids = beam.tokenizer.encode(text)
        with torch.no_grad():
            logs = beam.sequence_logits(torch.tensor(ids)).double().log_softmax(-1)
        nats -= sum(logs[i, ids[i + 1]].item() for i in range(len(ids) - 1))
        tokens += len(ids) - 1
    size = sum(len(text.encode()) for text in texts)
    for arguments in (["--file", str(files[0]), "--file", str(files[1])],
                      ["--file", str(files[0]), str(files[1])]):  # fmt: skip
        value = document("evaluate", folder, *arguments)
        assert (value["bytes"], value["tokens"]) == (size, tokens)
        assert value["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, abs=2e-4)


# -- the bundled model ----------------------------------------------------------------------------

CODE = """
class Stack:
    def __init__(self, items=None):
        self.items = list(items or [])

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def __len__(self):
        return len(self.items)
"""


def test_the_bundled_model_knows_python_and_a_random_one_does_not(
    folder: str, tmp_path: Path
) -> None:
    file = tmp_path / "stack.py"
    file.write_text(CODE, "utf-8")
    trained = document("evaluate", "beam-tiny", "--file", str(file))["bits_per_byte"]
    untrained = document("evaluate", folder, "--file", str(file))["bits_per_byte"]
    assert trained < 1.5
    assert untrained > 3.0


def test_the_bundled_models_text_is_its_argmax(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.py"
    prompt.write_text(CODE[: CODE.index("\n        self.items.append")], "utf-8")
    arguments = ["--prompt-file", str(prompt), "--max-new-tokens", "10"]
    value = document("generate", "beam-tiny", *arguments)
    beam = workbench.load("beam-tiny")
    assert beam.tokenizer is not None
    ids = beam.tokenizer.encode(prompt.read_text("utf-8"))
    for expected in value["token_ids"]:  # whole-sequence forwards: no cache, no chunks
        with torch.no_grad():
            assert int(beam.sequence_logits(torch.tensor(ids))[-1].argmax()) == expected
        ids.append(expected)
    assert value["text"] == beam.tokenizer.decode(value["token_ids"])
    assert "self" in value["text"]


def test_doctor_runs_the_bundled_model() -> None:
    value = document("doctor")
    assert value["ok"] is True
    assert re.fullmatch(
        r"measured just now: \d+ tokens/s on (\d+ of )?\d+ cores?, float32",
        value["runs"][0]["reason"],
    )


# -- train ----------------------------------------------------------------------------------------


def test_train_passes_its_options_and_prints_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.training import pretrain

    seen = []
    record = {
        "steps": 3,
        "seconds": 1.5,
        "loss": 2.0,
        "bits_per_byte": None,
        "checkpoint": "out",
        "losses": [[1, 4.0], [3, 2.0]],
    }

    def fake_run(config: str, resume: bool, progress: Any) -> dict[str, Any]:
        seen.append((config, resume))
        progress(1, 3, 4.0, 1000.0)
        return record

    monkeypatch.setattr(pretrain, "run", fake_run)
    assert document("train", "model", "--config", "mine.toml", "--resume") == record
    page = run("train", "model", "--config", "mine.toml").stdout
    assert seen == [("mine.toml", True), ("mine.toml", False)]
    assert "loss  4.000 █▁ 2.000" in page
    assert "3 steps" in page

    def interrupted(*_: Any, **__: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "run", interrupted)
    result = run("train", "model", "--config", "mine.toml", code=130)
    assert "--resume" in result.stderr


# -- wrong values and wrong usage -----------------------------------------------------------------

WRONG = [
    (["info", "nope"], "unknown model 'nope'"),
    (["info", "{empty}"], "config.json cannot be read"),
    (["generate", "nope", "--prompt", "x"], "unknown model"),
    (["generate", "beam-501b", "--prompt", "x"], "shape only"),
    (["generate", "{empty}", "--prompt", "x"], "config.json"),
    (["generate", "{folder}", "--prompt", ""], "the prompt is empty"),
    (["generate", "{folder}", "--prompt", "x " * 3000], "context of 2048"),
    (["generate", "{folder}", "--prompt", "x", "--temperature", "-1"], "temperature"),
    (["generate", "{folder}", "--prompt", "x", "--temperature", "nan"], "temperature"),
    (["generate", "{folder}", "--prompt", "x", "--top-p", "0"], "top_p"),
    (["generate", "{folder}", "--prompt", "x", "--seed", "-1"], "seed"),
    (["generate", "{folder}", "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens"),
    (["generate", "{folder}", "--prompt", "x", "--device", "tpu"], "device 'tpu'"),
    (["generate", "{folder}", "--prompt", "x", "--device", "meta"], "device 'meta'"),
    (["generate", "{folder}", "--prompt", "x", "--device", "meta:0"], "device 'meta:0'"),
    (["generate", "{folder}", "--prompt-file", "{empty}/none"], "none cannot be read"),
    (["generate", "{folder}", "--prompt-file", "{empty}"], "Is a directory"),
    (["generate", "{folder}", "--prompt-file", "{binary}"], "is not UTF-8 text (byte 2)"),
    (["logits", "{folder}", "--prompt", "x", "--out", "{empty}"], "cannot be written"),
    (["logits", "{folder}", "--prompt", "x", "--out", "{empty}/a/b"], "cannot be written"),
    (["evaluate", "{folder}", "--file", "{empty}"], "is not a file"),
    (["evaluate", "{folder}", "--file", "{binary}"], "is not UTF-8"),
    (["train", "model", "--config", "{empty}/none.toml"], "cannot be read"),
    (["demo", "nope"], "unknown model"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[" ".join(a)[:45] for a, _ in WRONG])
@pytest.mark.parametrize("json_too", [False, True])
def test_a_wrong_value_gives_one_sentence(
    arguments: list[str], says: str, json_too: bool, folder: str, tmp_path: Path
) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.mkdir()
    binary.write_bytes(b"ok\xff\x00")
    names = {"{folder}": folder, "{empty}": str(empty), "{binary}": str(binary)}
    filled = [re.sub(r"\{\w+\}", lambda m: names[m.group()], a) for a in arguments]
    result = run(*filled, *(["--json"] if json_too else []), code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("workbench: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["info"],
        ["generate", "x"],
        ["generate", "x", "--prompt", "a", "--prompt-file", "b"],
        ["generate", "x", "--prompt", "a", "--dtype", "int4"],
        ["generate", "x", "--prompt", "a", "--max-new-tokens", "many"],
        ["evaluate", "x"],
        ["train", "model"],
        ["lab", "--port", "70000"],
    ],
)
def test_wrong_usage_is_the_parsers_business(arguments: list[str]) -> None:
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert "Usage" in result.stderr


def test_errors_reach_the_shell_without_a_traceback() -> None:
    with spawn("info", "nope") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("workbench: unknown model 'nope'")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "demo"])
def test_ctrl_c(command: str, folder: str) -> None:
    arguments = [command, folder, "--prompt", "x", "--max-new-tokens", "2000"]
    with spawn(*arguments, "--temperature", "1", bufsize=0) as process:
        assert process.stdout is not None
        process.stdout.read(40)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert err.count("\n") == 1
    if command == "generate":
        assert (process.returncode, err) == (130, "workbench: interrupted\n")
    else:  # stopping is how one leaves the demo: it is no failure
        assert process.returncode == 0
        assert re.fullmatch(r"\d+ tokens, stopped; .*context \d+ of 2048\n", err)


@pytest.mark.parametrize(
    ("handled", "code", "says"),
    [("signal.default_int_handler", 130, "workbench: interrupted\n"), ("signal.SIG_IGN", 7, "")],
)
def test_ctrl_c_while_the_command_line_is_imported(
    tmp_path: Path, handled: str, code: int, says: str
) -> None:
    """The first thing that takes time is typer: here it presses Ctrl-C itself."""
    (tmp_path / "typer.py").write_text(
        "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nsys.exit(7)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"import signal\nsignal.signal(signal.SIGINT, {handled})\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "workbench.cli", "info", "beam-tiny"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (code, says)


def test_importing_the_command_line_leaves_ctrl_c_alone() -> None:
    says = (
        "import signal, workbench.cli as cli; from workbench import cli_start; "
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, "
        "cli_start.is_program())"
    )
    done = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True False\n", done.stderr


def test_a_reader_that_leaves_is_no_error(folder: str) -> None:
    with spawn("demo", folder, "--json", "--max-new-tokens", "400") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["type"] == "start"
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""


SHELL = [
    ("{w} info beam-tiny --json >&-", 1, "workbench: standard output is closed.*"),
    ("{w} info beam-tiny --json 2>&- >/dev/null", 0, ""),
    ("{w} generate beam-tiny --prompt-file - <&-", 1, "workbench: standard input is closed.*"),
    ("{w} --help >/dev/full", 1, "workbench: No space left on device.*"),
    ("{w} --version >/dev/full", 1, "workbench: No space left on device.*"),
    ("{w} info beam-tiny | true; exit ${PIPESTATUS[0]}", 141, ""),
]


@pytest.mark.parametrize(("line", "code", "says"), SHELL, ids=[line for line, _, _ in SHELL])
def test_streams_that_are_closed_full_or_left(line: str, code: int, says: str) -> None:
    program = f"{sys.executable} -m workbench.cli"
    done = subprocess.run(
        ["bash", "-c", line.replace("{w}", program)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert re.fullmatch(says, done.stderr.strip()), done.stderr


@pytest.mark.parametrize("error", [ValueError, ImportError, RuntimeError])
def test_an_interrupt_that_a_library_renames_is_one(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(_: str) -> None:
        with suppress(KeyboardInterrupt):
            cli._interrupt(signal.SIGINT, None)
        raise error("SystemError: <built-in> returned a result")

    monkeypatch.setattr(cli, "_interrupted", False)
    monkeypatch.setattr("workbench.model.info.info", describe)
    assert run("info", "beam-tiny", code=130).stderr == "workbench: interrupted\n"


def test_memory_that_runs_out_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.model.info.info", lambda _: torch.empty(10**15))
    says = run("info", "beam-tiny", code=1).stderr
    assert says == "workbench: there is not enough memory for this; use a smaller size\n"


def test_errors_disarm_control_characters(tmp_path: Path) -> None:
    name = str(tmp_path / "a\x1b]0;x\x07\u202eb")
    says = run("generate", "beam-tiny", "--prompt-file", name, code=1).stderr
    assert "a␛]0;x␇\ufffdb cannot be read" in says
    assert all(c.isprintable() for c in says.strip())


def test_ids_beyond_the_tokenizer_are_shown_as_numbers() -> None:
    beam = workbench.load("beam-tiny")
    assert beam.tokenizer is not None
    beyond = beam.tokenizer.vocab_size + 3
    assert cli._labels(beam, [beyond]) == [f"#{beyond}"]


# -- demo, terminal -------------------------------------------------------------------------------


def test_demo_prints_json_lines(folder: str) -> None:
    arguments = ["--prompt", "def f(x):", "--max-new-tokens", "9", "--temperature", "0"]
    lines = [
        json.loads(line) for line in run("demo", folder, *arguments, "--json").stdout.splitlines()
    ]
    start, *tokens, summary = lines
    assert (start["type"], start["context"]) == ("start", 2048)
    assert [t["type"] for t in tokens] == ["token"] * 9
    expected = workbench.generate(workbench.load(folder), "def f(x):", max_new_tokens=9)
    assert [t["token_id"] for t in tokens] == summary["token_ids"] == list(expected.token_ids)
    assert "".join(t["text"] for t in tokens) == summary["text"] == expected.text
    assert tokens[-1]["finished"] == "length"
    assert summary["context_used"] == tokens[-1]["context_used"] == expected.prompt_tokens + 9


def test_demo_on_a_pipe_has_no_escape_codes(folder: str) -> None:
    result = run("demo", folder, "--prompt", "x = ", "--max-new-tokens", "9", "--seed", "4")
    assert result.stdout.startswith("x = ")
    assert "\x1b" not in result.output
    assert re.search(r"9 tokens, ended by length; .*context \d+ of 2048", result.stderr)


def in_terminal(*arguments: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    main, other = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    environment.pop("NO_COLOR", None)
    with spawn(
        *arguments, stdout=other, stderr=other, stdin=other, env=environment, text=False
    ) as process:
        os.close(other)
        data = b""
        while select.select([main], [], [], 60)[0]:
            try:
                piece = os.read(main, 65536)
            except OSError:  # the terminal's other side is closed
                break
            data += piece
        process.wait(60)
    os.close(main)
    assert process.returncode == 0
    return data.decode("utf-8", "replace")


def test_demo_in_a_terminal_is_coloured_and_keeps_every_character(folder: str) -> None:
    prompt = "\x1b]0;gotcha\x07 [bold]x[/bold]\n"
    arguments = ["demo", folder, "--prompt", prompt, "--max-new-tokens", "60", "--seed", "1"]
    text = in_terminal(*arguments)
    assert "\x1b]0;" not in text, "an escape sequence of the prompt reached the terminal"
    assert "␛]0;gotcha␇ [bold]x[/bold]" in text
    assert "p ≥ 0.9" in text
    assert "context" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")
    assert "60 tokens, ended by length" in plain
    written = run(*arguments).stdout.removeprefix(prompt)
    last_words = terminal.printable(written).rstrip("\n").split("\n")[-1][-20:]
    assert last_words in plain.replace("\n", "")


def test_printable_leaves_text_alone_and_disarms_controls() -> None:
    assert terminal.printable("a\n\tb é 東 🎈") == "a\n\tb é 東 🎈"
    assert terminal.printable("\x00\x1b[2J\x7f\x9b\u202e") == "␀␛[2J␡\ufffd\ufffd"


def test_marks_that_turn_the_direction_or_end_a_line_are_disarmed() -> None:
    for code in (0x061C, 0x200E, 0x200F, 0x2028, 0x2029, 0x202A, 0x202E, 0x2066, 0x2069):
        assert terminal.printable(f"a{chr(code)}b") == "a\ufffdb", hex(code)
    token = Token(sequence=0, index=0, id=1, text="\x1b[2J\u202e", logprob=-0.5, finished=None)
    view = workbench.views.written("p\u200f", [token])
    for text in (view.text, view.html):
        assert not set("\x1b\u202e\u200f") & set(text)
    assert view.text.startswith("p\ufffd␛[2J\ufffd\n")


def test_probability_styles_are_ordered_and_complete() -> None:
    styles = [terminal.probability_style(p) for p in (1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.05, 0.0)]
    first, second, third, last = (style for _, style, _ in terminal.PROBABILITY_STYLES)
    assert styles == [first, first, second, second, third, third, last, last]
    assert "underline" in last


def test_sparkline_shows_means_of_equal_stretches() -> None:
    assert terminal.sparkline([0.0, 7.0]) == "▁█"
    assert terminal.sparkline([float(i) for i in range(8)], width=8) == "▁▂▃▄▅▆▇█"
    assert terminal.sparkline([0, 2, 6, 8], width=2) == "▁█"
    assert terminal.sparkline([3.0, 3.0]) == "▁▁"
    assert terminal.sparkline([]) == ""


def test_json_has_no_not_a_number() -> None:
    with pytest.raises(ValueError, match="JSON"):
        terminal.emit({"x": math.nan})


def test_version() -> None:
    assert run("--version").stdout.strip() == workbench.__version__


@pytest.mark.parametrize(
    "command", ["generate", "logits", "evaluate", "demo", "train model", "lab"]
)
def test_options_are_lower_case(command: str) -> None:
    """A metavar can turn into an option's name; the names are part of the contract."""
    page = CliRunner().invoke(app, [*command.split(), "--help"]).output
    names = re.findall(r"--[A-Za-z][\w-]*", page)
    assert names
    assert [n for n in names if n != n.lower()] == []


def test_device_is_taken() -> None:
    run = CliRunner().invoke(
        app,
        [
            "generate",
            "beam-tiny",
            "--prompt",
            "x",
            "--max-new-tokens",
            "2",
            "--device",
            "cpu",
            "--json",
        ],
    )
    assert run.exit_code == 0, run.output
