"""Which Triton a process gets, and what it is told when it cannot have the one it needs.

Triton decides once a process, so each situation is a process of its own, forked from one that has
imported torch (which is what takes time) and not Triton.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.kernels import triton_runtime

FORKS = """
import importlib.util, json, os, subprocess, sys
from workbench.kernels import triton_runtime as runtime
def importing():
    try:
        from workbench.kernels.triton_runtime import INTERPRETED, libdevice, tl, triton
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    made = triton.jit(tl.sum.fn)
    return {"interpreted": INTERPRETED, "made": type(made).__name__, "sum": type(tl.sum).__name__}
for name, switch, body in json.load(sys.stdin):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        if switch is not None:
            os.environ["TRITON_INTERPRET"] = switch
        said = {}
        exec(body)
        os.write(write, json.dumps([name, said]).encode())
        os._exit(0)
    os.close(write)
    print(os.fdopen(read).read() or json.dumps([name, {"died": True}]))
    os.waitpid(pid, 0)
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    body: str
    switch: str | None = None


SITUATIONS = {
    "bare CPU": Situation(
        body="""
said |= {device: runtime.why_not(device) for device in ("cpu", "cuda", "meta")}
said["before"] = "triton" in sys.modules
said["import"] = importing()
said["switch"] = os.environ.get("TRITON_INTERPRET")
probe = "import triton, triton.language as tl; print(type(tl.sum).__name__)"
said["child"] = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout
said["after"] = runtime.why_not("cpu")
"""
    ),
    "switched on": Situation(
        switch="1",
        body="""
said |= {"cpu": runtime.why_not("cpu"), "import": importing()}
said["switch"] = os.environ.get("TRITON_INTERPRET")
""",
    ),
    "switched on, with a GPU": Situation(
        switch="1",
        body="""
runtime.torch.cuda.is_available = lambda: True
said |= {"cpu": runtime.why_not("cpu"), "cuda": runtime.why_not("cuda")}
""",
    ),
    "compiling only": Situation(
        switch="0", body='said |= {"cpu": runtime.why_not("cpu"), "import": importing()}'
    ),
    "imported before": Situation(
        body="""
import triton
said |= {"cpu": runtime.why_not("cpu"), "import": importing()}
said["again"] = importing()
"""
    ),
    "with a GPU": Situation(
        body="""
runtime.torch.cuda.is_available = lambda: True
said |= {"cpu": runtime.why_not("cpu"), "cuda": runtime.why_not("cuda"), "import": importing()}
said["after"] = runtime.why_not("cuda")
"""
    ),
    "not installed": Situation(
        body="""
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
said |= {"cpu": runtime.why_not("cpu"), "cuda": runtime.why_not("cuda"), "import": importing()}
"""
    ),
}

INTERPRETED = {
    "interpreted": True,
    "made": "InterpretedFunction",
    "sum": "InterpretedFunction",
}
COMPILED = {"interpreted": False, "made": "JITFunction", "sum": "JITFunction"}
NO_GPU = "this machine has no CUDA GPU that torch can use"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the situations have no GPU")


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, object]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps([[name, each.switch, each.body] for name, each in SITUATIONS.items()]),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    answers = dict(json.loads(line) for line in done.stdout.splitlines())
    assert not [name for name, answer in answers.items() if "died" in answer], done.stderr
    return answers


def test_without_a_gpu_kernels_are_interpreted(said: dict[str, dict[str, object]]) -> None:
    assert said["bare CPU"] == {
        "cpu": None,
        "cuda": NO_GPU,
        "meta": "Triton kernels take cpu or cuda tensors, not meta",
        "before": False,  # neither the module nor why_not imports Triton
        "import": INTERPRETED,
        "switch": None,  # nothing is left behind for a child process
        "child": "JITFunction\n",
        "after": None,
    }


def test_a_switch_of_the_users_is_kept(said: dict[str, dict[str, object]]) -> None:
    assert said["switched on"] == {"cpu": None, "import": INTERPRETED, "switch": "1"}
    assert said["switched on, with a GPU"]["cpu"] is None
    assert "TRITON_INTERPRET=1 is set" in str(said["switched on, with a GPU"]["cuda"])


def test_switched_off_triton_only_compiles(said: dict[str, dict[str, object]]) -> None:
    assert said["compiling only"]["import"] == COMPILED
    assert "TRITON_INTERPRET=0 is set, so Triton only compiles" in str(
        said["compiling only"]["cpu"]
    )


def test_imported_before_it_says_what_to_do(said: dict[str, dict[str, object]]) -> None:
    answer = said["imported before"]
    for sentence in (answer["import"], answer["again"], answer["cpu"]):
        assert "imported in this process before its interpreter was switched on" in str(sentence)
        assert "restart the kernel and import workbench.kernels before torch.compile" in str(
            sentence
        )
    assert str(answer["import"]).startswith("TritonUnavailableError: ")
    assert issubclass(triton_runtime.TritonUnavailableError, WorkbenchError)


def test_with_a_gpu_triton_is_left_alone(said: dict[str, dict[str, object]]) -> None:
    answer = said["with a GPU"]
    assert answer["cuda"] is None
    assert answer["after"] is None
    assert answer["import"] == COMPILED
    assert "move the tensors to cuda" in str(answer["cpu"])


def test_without_triton_it_says_so(said: dict[str, dict[str, object]]) -> None:
    answer = said["not installed"]
    assert "the package triton is not installed" in str(answer["cpu"])
    assert answer["cpu"] == answer["cuda"]
    assert answer["import"] == f"TritonUnavailableError: {answer['cpu']}."


def test_no_other_name_is_offered() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'language'"):
        _ = triton_runtime.language  # type: ignore[attr-defined]
