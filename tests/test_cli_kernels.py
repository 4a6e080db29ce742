"""``workbench kernels list|check|bench`` as scripts use them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from workbench.cli import app
from workbench.cli_kernels import kernels_app
from workbench.cli_kernels_asked import registered_in
from workbench.errors import KernelError
from workbench.kernels.catalogue import OPS
from workbench.kernels.results import load

CONTRACT = {
    "op",
    "variant",
    "available",
    "reason",
    "max_error",
    "passed",
    "microseconds",
    "roofline_fraction",
}


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["kernels", *arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def document(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--device", "cpu", "--json", code=code)
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    for row in value["ops"]:
        assert set(row) >= CONTRACT
    return value


def refused(*arguments: str) -> str:
    """The one sentence of a wrong value."""
    result = run(*arguments, code=1)
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("workbench: ")
    assert "Traceback" not in result.stderr
    return str(lines[-1])


def test_every_option_says_its_name() -> None:
    """Some releases of typer name ``--x`` with the metavar X "--X"."""
    from inspect import signature
    from typing import get_type_hints

    from typer.models import OptionInfo

    for command in kernels_app.registered_commands:
        assert command.callback is not None
        hints = get_type_hints(command.callback, include_extras=True)
        for name in signature(command.callback).parameters:
            for info in getattr(hints[name], "__metadata__", ()):
                if isinstance(info, OptionInfo):
                    named = [info.default, *(info.param_decls or ())]
                    assert any(str(n).startswith("--") for n in named), name


def test_list_has_every_operation() -> None:
    value = document("list")
    assert {row["op"] for row in value["ops"]} == set(OPS)
    for op in OPS:
        rows = [row for row in value["ops"] if row["op"] == op]
        assert [row["variant"] for row in rows][:3] == ["torch", "compile", "triton"]
        assert rows[0]["available"] is True
        for row in rows:
            assert row["available"] == (row["reason"] == "")
            assert row["microseconds"] is None
    assert value["model"] == "beam-tiny"
    page = run("list", "--device", "cpu", "--op", "router").stdout
    assert "router" in page
    assert "boundary" not in page


def test_check() -> None:
    value = document("check", "--op", "boundary", "--op", "softcap", "--variant", "torch")
    assert [(r["op"], r["variant"], r["passed"]) for r in value["ops"]] == [
        ("boundary", "torch", True),
        ("softcap", "torch", True),
    ]
    assert 0 < value["ops"][0]["max_error"] < 0.01
    assert all(row["microseconds"] is None for row in value["ops"])
    result = run("check", "--op", "softcap", "--variant", "torch", "--device", "cpu")
    assert "passed" in result.stdout
    assert "torch of softcap passed" in result.stderr  # progress


def test_bench(tmp_path: Path) -> None:
    out, trace = tmp_path / "kernels-here.json", tmp_path / "step.json"
    value = document(
        "bench", "--op", "boundary", "--variant", "torch", "--tokens", "2", "--tokens", "3",
        "--rounds", "3", "--out", str(out), "--timeline", str(trace),
    )  # fmt: skip
    assert [row["tokens"] for row in value["ops"]] == [2, 3]
    for row in value["ops"]:
        assert row["passed"] is True
        assert row["microseconds"] > 0
        assert row["roofline_fraction"] > 0
    assert value["how"] == "measured here"
    assert value["versions"]["torch"] == torch.__version__
    assert value["peaks"]["kind"] == "measured here"
    recorded = load(out)
    assert recorded.how == "recorded"
    assert recorded.rows[0].microseconds == pytest.approx(value["ops"][0]["microseconds"], rel=1e-4)
    names = {e.get("name") for e in json.loads(trace.read_text())["traceEvents"]}
    assert {"boundary[torch]", "qkvg[torch]"} <= names
    assert value["timeline"]["file"] == str(trace)
    page = run(
        "bench", "--op", "boundary", "--variant", "torch", "--device", "cpu", "--rounds", "3"
    ).stdout  # fmt: skip
    assert "measured here on" in page


def test_bench_of_a_flavour_and_a_rank() -> None:
    value = document(
        "bench", "--op", "decode_attention", "--flavour", "full", "--tp", "2", "--variant", "torch",
        "--tokens", "1", "--rounds", "3", "--dtype", "bfloat16",
    )  # fmt: skip
    (row,) = value["ops"]
    assert (row["flavour"], row["tp"], row["dtype"]) == ("full", 2, "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "--op", "nonsense"], "no operation 'nonsense'"),
        (["check", "--op", "boundary", "--variant", "nonsense"], "no variant 'nonsense'"),
        (["check", "--op", "boundary", "--tokens", "0"], "--tokens must be 1 or more"),
        (["bench", "--op", "boundary", "--flavour", "odd"], "no flavour 'odd'"),
        (["bench", "--op", "boundary", "--rounds", "1"], "needs 3 rounds"),
        (["bench", "--op", "boundary", "--model", "no-such"], "unknown model"),
        (["bench", "--op", "boundary", "--tp", "7"], "tensor parallelism over 7"),
        (["check", "--file", "absent.py"], "absent.py cannot be read"),
        (["bench", "--file", "absent.py", "--flavour", "full"], "leave --flavour"),
        (["bench", "--file", "absent.py", "--rounds", "5"], "leave --flavour, --rounds"),
        (["bench", "--op", "boundary", "--rounds", "0"], "needs 3 rounds"),
        (["bench", "--op", "boundary", "--rounds", "-5"], "needs 3 rounds"),
        *(
            (
                ["check", "--file", "absent.py", "--seconds", seconds],
                "--seconds must be more than 0",
            )
            for seconds in ("nan", "inf", "1e300", "0", "-1", "86401")
        ),
        (["check", "--op", "boundary", "--seconds", "5"], "--seconds is the time limit"),
        *(
            ([command, "--op", "boundary", option, where], words)
            for command, option in (
                ("list", "--out"),
                ("check", "--out"),
                ("bench", "--out"),
                ("bench", "--timeline"),
            )
            for where, words in (
                (".", "it is a folder"),
                ("", "it is a folder"),
                ("no/such/folder.json", "cannot be written (No such file or directory)"),
                ("/proc/x.json", "cannot be written"),
                ("x" * 300, "cannot be written (File name too long)"),
            )
        ),
        (["bench", "--op", "boundary", "--out", "a", "--timeline", "./a"], "named for two things"),
    ],
)
def test_bad_values(arguments: list[str], words: str) -> None:
    sentence = refused(*arguments, "--device", "cpu")
    assert words in sentence
    result = run(*arguments, "--device", "cpu", code=1)
    assert result.stderr.strip() == sentence, "no progress: nothing is checked or timed before"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu() -> None:
    assert "no CUDA GPU" in refused("bench", "--device", "cuda")


def test_what_does_not_fit_is_refused_before_it_is_allocated() -> None:
    """All experts of a layer of the full model: 20 GB, and more while they are drawn."""
    sentence = refused(
        "check", "--model", "beam-501b", "--tp", "1", "--tokens", "1000000", "--op", "expert_mlp",
        "--device", "cpu",
    )  # fmt: skip
    assert "GB" in sentence
    assert "--tp" in sentence


def test_wrong_usage() -> None:
    assert run("bench", "--device", "abacus", code=2)
    assert run("bench", "--tokens", "few", code=2)


# -- a variant from a file ----------------------------------------------------------------------

GOOD = """
from workbench.kernels import reference
from workbench.kernels.registry import register

@register("rms_norm", "mine")
def rms_norm(x, weight, eps):
    return reference.rms_norm(x, weight, eps)
"""


def test_a_file_that_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a byte-order mark, keywords, a module beside it, and one that hides a standard one."""
    path = tmp_path / "mine.py"
    source = GOOD.replace('"rms_norm", "mine"', 'op="rms_norm", name="mine"')
    path.write_text("import beside, queue\nqueue.Queue\n" + source, encoding="utf-8-sig")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "queue.py").write_text("raise RuntimeError('mine')")
    monkeypatch.chdir(tmp_path)
    value = document("check", "--file", "mine.py", "--dtype", "float32", "--tokens", "1")
    assert [(r["op"], r["variant"], r["passed"]) for r in value["ops"]] == [
        ("rms_norm", "mine", True)
    ]


def test_a_file_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD.replace("return reference", "return 0 * reference"))
    result = run("bench", "--file", str(path), "--device", "cpu", "--json", code=1)
    assert json.loads(result.stdout)["ops"][0]["passed"] is False
    assert "by the gate 'relative error'" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "registers none"),
        ("def (", "is not Python (line 1)"),
        (GOOD, "registers none"),
        (GOOD.replace("rms_norm", "softcap").replace("mine", "a" * 61), "at most 60 characters"),
        ("x = \0", "is not Python"),
        ("x = " + "1 + " * 20_000 + "1", "nested too deeply"),
        ("x = " + "-" * 20_000 + "1", "nested too deeply"),
        ("x = a" + ".b" * 20_000, "nested too deeply"),
        ("x = " + "(" * 300 + ")" * 300, "is not Python"),
    ],
    ids=range(9),
)
def test_files_that_have_nothing(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert words in refused("check", "--file", str(path), "--op", "softcap")


def test_registered_in_reads_without_running() -> None:
    source = (
        'raise SystemExit\n@register("a", "b", requires=(x,))\ndef f(): ...\n'
        '@registry.register("c", "d")\ndef g(): ...\nregister(name, "e")\n'
        '@register("f", name="g")\ndef h(): ...\n@register(name="j", op="i")\ndef k(): ...\n'
        'register("l")\nregister(**{"op": "m", "name": "n"})\nregister(3, name="o")\n'
    )
    assert registered_in(source, "it") == [("a", "b"), ("c", "d"), ("f", "g"), ("i", "j")]
    with pytest.raises(KernelError, match=r"it is not Python \(line 1\)"):
        registered_in("(", "it")


def test_ctrl_c_ends_cleanly() -> None:
    """What was measured is printed, the status is 130, and there is no traceback."""
    import signal

    code = (
        "import signal, workbench.kernels.bench as b\n"
        "old = b._compare\n"
        "def compare(*args):\n"
        "    found = old(*args)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    return found\n"
        "b._compare = compare\n"
        "import sys; from workbench.cli import main\n"
        "sys.argv = ['workbench', *sys.argv[1:]]\n"
        "main()\n"
    )
    assert signal.SIGINT
    result = subprocess.run(
        [sys.executable, "-c", code, "kernels", "bench", "--op", "boundary", "--variant", "torch",
         "--rounds", "3", "--device", "cpu", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 130, result.stderr
    assert "Traceback" not in result.stderr
    value = json.loads(result.stdout)
    assert value["interrupted"] is True
