"""What the machine is, and what the doctor makes of it."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from workbench import doctor, hardware
from workbench.cli import app
from workbench.hardware import Gpu, Machine, machine


def some_machine(**changes: Any) -> Machine:
    values: dict[str, Any] = {
        "cpu": "a processor",
        "cores": 2,
        "memory_bytes": 16 * 10**9,
        "system": "Linux",
        "gpus": (),
        "driver_gpus": (),
        "versions": {},
    }
    return Machine(**(values | changes))


def gpus(count: int, memory: float, capability: tuple[int, int]) -> tuple[Gpu, ...]:
    gpu = Gpu(name="a GPU", memory_bytes=int(memory), compute_capability=capability)
    return (gpu,) * count


# -- machine --------------------------------------------------------------------------------------


def test_machine_agrees_with_the_system() -> None:
    here = machine()
    plain = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}  # nproc obeys them
    count = subprocess.run(["nproc"], capture_output=True, text=True, check=True, env=plain).stdout
    assert here.cores == int(count) or here.cores < (os.cpu_count() or 1)
    meminfo = Path("/proc/meminfo").read_text("ascii").split()
    total = int(meminfo[meminfo.index("MemTotal:") + 1]) * 1024
    assert here.memory_bytes is not None
    assert 0 < here.memory_bytes <= total * 1.001
    assert here.versions["python"] == platform.python_version()
    assert here.versions["torch"] == metadata.version("torch")
    assert len(here.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_machine_has_json_text_and_page_forms() -> None:
    here = some_machine(
        cpu="<b>cpu</b>",
        gpus=gpus(1, 150e9, (9, 0)),
        versions={"python": "3.12", "torch": "2.11", "vllm": None},
    )
    value = json.loads(json.dumps(here.to_dict()))
    assert value["gpus"] == [
        {"name": "a GPU", "memory_bytes": 150 * 10**9, "compute_capability": "9.0"}
    ]
    assert value["versions"]["vllm"] is None
    text = str(here)
    assert "a GPU, 150 GB, compute capability 9.0" in text
    assert "python 3.12, torch 2.11" in text
    assert "vllm" not in text
    bundle = here._repr_mimebundle_()
    assert bundle["text/plain"] == text
    assert "<b>cpu" not in bundle["text/html"]


def test_versions_are_read_without_importing() -> None:
    code = (
        "import sys; from workbench.hardware import versions; v = versions();"
        "print(v['torch'] is not None, sorted({'torch', 'plotly', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True []"


def test_a_driver_that_lists_gpus_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200'\necho 'NVIDIA H200'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert hardware.driver_gpus() == ("NVIDIA H200", "NVIDIA H200")
    program.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    assert hardware.driver_gpus() == ()


# -- doctor ---------------------------------------------------------------------------------------


def test_torch_and_gpu_mismatches_have_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.torch_check(some_machine()).ok
    unused = some_machine(driver_gpus=("NVIDIA H200",))
    monkeypatch.setattr(torch.version, "cuda", None)
    cpu_build = doctor.torch_check(unused)
    assert not cpu_build.ok
    assert "CPU build of torch beside 1 × NVIDIA H200" in cpu_build.found
    assert "CUDA build" in str(cpu_build.remedy)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    hidden = doctor.torch_check(unused)
    assert not hidden.ok
    assert "CUDA_VISIBLE_DEVICES" in str(hidden.remedy)
    used = some_machine(driver_gpus=("NVIDIA H200",), gpus=gpus(1, 150e9, (9, 0)))
    assert doctor.torch_check(used).ok


def test_one_rank_needs_a_gpu_of_141_gb() -> None:
    assert not doctor.one_rank(some_machine()).possible
    assert not doctor.one_rank(some_machine(gpus=gpus(8, 85e9, (9, 0)))).possible
    assert doctor.one_rank(some_machine(gpus=gpus(1, 150e9, (9, 0)))).possible
    assert "take 125 GB" in doctor.one_rank(some_machine()).reason  # 501.01 B x 2 bytes / 8


@pytest.mark.parametrize(
    ("count", "memory", "capability", "fits"),
    [
        (8, 150e9, (9, 0), "fits in BF16, FP8"),  # 8 x H200: 1.2 TB
        (4, 150e9, (9, 0), "fits in FP8"),
        (4, 150e9, (8, 0), None),  # no FP8 arithmetic before 8.9
        (2, 190e9, (10, 0), "fits in NVFP4"),
        (1, 190e9, (10, 0), None),
    ],
)
def test_the_whole_model_needs_memory_for_its_weights(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    memory: float,
    capability: tuple[int, int],
    fits: str | None,
) -> None:
    here = some_machine(gpus=gpus(count, memory, capability))
    monkeypatch.setattr(doctor, "version_of", lambda _: "0.33.0")
    result = doctor.whole_model(here)
    assert result.possible == (fits is not None)
    assert result.reason.endswith(fits) if fits else "fits in" not in result.reason
    monkeypatch.setattr(doctor, "version_of", lambda _: None)
    assert not doctor.whole_model(here).possible


def test_package_versions_are_compared() -> None:
    assert doctor.package_check("numpy", 1, "model").ok
    old = doctor.package_check("numpy", 99, "model")
    assert not old.ok
    assert str(old.remedy).endswith("-m pip install 'numpy>=99'")
    absent = doctor.package_check("no-such-distribution-here", 0, "model")
    assert (absent.ok, absent.found) == (False, "not installed")


def test_lab_extensions_are_looked_for_beside_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {c.name: c.ok for c in doctor.lab_checks()}
    assert all(ok for name, ok in found.items() if name.startswith("Lab extension")), found
    monkeypatch.setattr(doctor, "jupyter_folders", lambda: [tmp_path])
    missing = doctor.extension_check("jupyterlab-plotly", "plotly")
    assert not missing.ok
    assert "plotly" in str(missing.remedy)
    extension = tmp_path / "labextensions" / "jupyterlab-plotly"
    extension.mkdir(parents=True)
    (extension / "package.json").write_text("{}")
    assert doctor.extension_check("jupyterlab-plotly", "plotly").ok


def test_a_kernel_or_server_of_another_environment_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    monkeypatch.setattr(doctor, "jupyter_folders", lambda: [tmp_path])
    for program, ok in (("python", True), (sys.executable, True), ("/other/bin/python", False)):
        spec.write_text(json.dumps({"argv": [program, "-m", "ipykernel_launcher"]}))
        check = doctor.kernel_check()
        assert check.ok == ok
        assert ok or "workbench lab" in str(check.remedy)
    other = tmp_path / "jupyter-lab"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not doctor.server_check().ok
    other.unlink()
    assert doctor.server_check().ok


def test_chromium_check_follows_path_and_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not doctor.chromium_check().ok
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert doctor.chromium_check().found == str(program)
    monkeypatch.setenv("CHROMIUM", "/no/such/program")
    assert "is not a program" in doctor.chromium_check().found


def test_exit_status_follows_the_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for possible, code in ((True, 0), (False, 1)):
        verdict = doctor.Capability(name="tiny", possible=possible, reason="because")
        monkeypatch.setattr(doctor, "tiny_model", lambda _, v=verdict: v)
        result = CliRunner().invoke(app, ["doctor", "--json"])
        assert result.exit_code == code
        value = json.loads(result.stdout)
        assert value["ok"] is possible
        assert value["runs"][0]["reason"] == "because"
        names = [check["name"] for check in value["checks"]]
        assert len(names) == len(set(names))
        assert names == [c["name"] for c in json.loads(
            CliRunner().invoke(app, ["doctor", "--json"]).stdout)["checks"]]  # fmt: skip
        assert all(check["ok"] or check["remedy"] for check in value["checks"])
        page = CliRunner().invoke(app, ["doctor"])
        assert "What runs here" in page.stdout
        assert all(name in page.stdout for name in names)
