"""``workbench doctor``: what this machine can run, and what is missing with its remedy."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workbench.errors import WorkbenchError
from workbench.files import read_json
from workbench.hardware import Machine, gigabytes, machine, version_of

Purpose = Literal["model", "notebooks", "browser tests", "serving"]

# Distribution -> lowest major version; the exact ranges are in pyproject.toml.
_MODEL_PACKAGES = {"numpy": 1, "safetensors": 0, "tokenizers": 0, "torch": 2}
_LAB_PACKAGES = {
    "jupyterlab": 4,
    "ipykernel": 6,
    "ipywidgets": 8,
    "anywidget": 0,
    "plotly": 6,
    "pandas": 2,
    "pyarrow": 17,
}
# What the browser loads: folder under share/jupyter/labextensions -> distribution that brings it.
_LAB_EXTENSIONS = {
    "@jupyter-widgets/jupyterlab-manager": "jupyterlab_widgets",
    "anywidget": "anywidget",
    "jupyterlab-plotly": "plotly",
}
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_RANK_MEMORY = 141e9  # bytes; the smallest data-centre GPU that holds one of eight BF16 ranks
_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Something one may want to run here, and whether it can, and why."""

    name: str
    possible: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing looked for: what was found, and what to do where it is not as it should be."""

    name: str
    purpose: Purpose
    ok: bool
    found: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything ``workbench doctor`` says."""

    machine: Machine
    runs: tuple[Capability, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether the tiny model runs: what everything else builds on."""
        return self.runs[0].possible

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of ``workbench doctor --json``."""
        return {
            "ok": self.ok,
            "machine": self.machine.to_dict(),
            "runs": [
                {"name": c.name, "possible": c.possible, "reason": c.reason} for c in self.runs
            ],
            "checks": [
                {
                    "name": c.name,
                    "purpose": c.purpose,
                    "ok": c.ok,
                    "found": c.found,
                    "remedy": c.remedy,
                }
                for c in self.checks
            ],
        }


def diagnose() -> Diagnosis:
    """Look at everything; runs the tiny model for half a second."""
    here = machine()
    checks = (
        *model_checks(here),
        drafter_check(),
        *lab_checks(),
        chromium_check(),
        vllm_check(),
    )
    runs = (tiny_model(here), one_rank(here), whole_model(here))
    return Diagnosis(machine=here, runs=runs, checks=checks)


# -- what can run ---------------------------------------------------------------------------------


def tiny_model(here: Machine) -> Capability:
    """Decode with the bundled model, and say how fast that was."""
    name = "beam-tiny, the bundled model"
    try:
        from workbench.model.checkpoint import load
        from workbench.model.generate import generate

        result = generate(load("beam-tiny"), "def ", max_new_tokens=32, stop_at_eos=False)
    except (ImportError, OSError, WorkbenchError) as error:
        return Capability(name=name, possible=False, reason=str(error) or type(error).__name__)
    import torch

    threads = torch.get_num_threads()
    using = f"{threads} of {here.cores} cores" if threads < here.cores else f"{threads} cores"
    return Capability(
        name=name,
        possible=True,
        reason=f"measured just now: {result.tokens_per_second:.0f} tokens/s on {using}, float32",
    )


def one_rank(here: Machine) -> Capability:
    """One of eight tensor-parallel ranks of the full model, at full depth."""
    from workbench.model.info import info

    weights = info("beam-501b").parameters.total * 2 / _RANKS
    needs = (
        f"needs one GPU with at least {_RANK_MEMORY / 1e9:.0f} GB (modelled: BF16 weights of one "
        f"of {_RANKS} ranks take {weights / 1e9:.0f} GB)"
    )
    largest = max((gpu.memory_bytes for gpu in here.gpus), default=0)
    found = f"the largest here has {gigabytes(largest)}" if largest else "there is none here"
    return Capability(
        name="one full-depth rank of beam-501b",
        possible=largest >= _RANK_MEMORY,
        reason=f"{needs}; {found}",
    )


def whole_model(here: Machine) -> Capability:
    """The full model served by vLLM on the GPUs of this machine."""
    from workbench.model.info import info

    total = info("beam-501b").parameters.total
    # Bytes a parameter, and the compute capability from which a GPU multiplies in it.
    formats = (("BF16", 2.0, (8, 0)), ("FP8", 1.0, (8, 9)), ("NVFP4", 0.5625, (10, 0)))
    sizes = ", ".join(f"{total * size / 1e9:.0f} GB in {name}" for name, size, _ in formats)
    needs = f"needs vLLM, its checkpoint, and GPUs that hold the weights (modelled: {sizes})"
    memory = sum(gpu.memory_bytes for gpu in here.gpus)
    fits = [
        name
        for name, size, capability in formats
        if here.gpus
        and all(gpu.compute_capability >= capability for gpu in here.gpus)
        and total * size <= 0.9 * memory  # the rest is for KV cache and activations
    ]
    found = (
        f"{len(here.gpus)} × {here.gpus[0].name} with {gigabytes(memory)} together"
        if here.gpus
        else "no GPU"
    )
    vllm = version_of("vllm")
    engine = f"vLLM {vllm}" if vllm else "no vLLM"
    precision = f"; fits in {', '.join(fits)}" if fits else ""
    return Capability(
        name="the whole beam-501b through vLLM",
        possible=bool(fits and vllm),
        reason=f"{needs}; here: {found}, {engine}{precision}",
    )


# -- what is there --------------------------------------------------------------------------------


def package_check(distribution: str, major: int, purpose: Purpose) -> Check:
    """Whether a distribution is installed beside this Python, in a version new enough."""
    version = version_of(distribution)
    wanted = f"{distribution}>={major}" if major else distribution
    if version is None:
        ok, found = False, "not installed"
    else:
        digits = version.split(".")[0]
        ok, found = not digits.isdigit() or int(digits) >= major, version
    remedy = None if ok else f"{sys.executable} -m pip install '{wanted}'"
    return Check(name=distribution, purpose=purpose, ok=ok, found=found, remedy=remedy)


def model_checks(here: Machine) -> list[Check]:
    """The packages the model runs on, and whether torch and the GPU fit together."""
    checks = [package_check(name, major, "model") for name, major in _MODEL_PACKAGES.items()]
    return [*checks, torch_check(here)]


def torch_check(here: Machine) -> Check:
    """A CUDA build of torch where there is an NVIDIA GPU, and one its driver can serve."""

    def check(ok: bool, found: str, remedy: str | None = None) -> Check:
        name = "torch and the GPU"
        return Check(name=name, purpose="model", ok=ok, found=found, remedy=remedy)

    try:
        import torch
    except (ImportError, OSError) as error:
        return check(
            False,
            f"torch cannot be imported ({error})",
            f"{sys.executable} -m pip install --force-reinstall torch",
        )
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    if not here.driver_gpus and not here.gpus:
        return check(True, f"{build} of torch, no NVIDIA GPU: everything runs on the CPU")
    if here.gpus:
        return check(True, f"{build} of torch, {len(here.gpus)} × {here.gpus[0].name}")
    if not torch.version.cuda:
        return check(
            False,
            f"{build} of torch beside {len(here.driver_gpus)} × {here.driver_gpus[0]}",
            "install a CUDA build: make clean, then make TORCH='torch' lab; "
            "or pip install --force-reinstall torch",
        )
    return check(
        False,
        f"{build} of torch finds none of {len(here.driver_gpus)} × {here.driver_gpus[0]}",
        "unset CUDA_VISIBLE_DEVICES if it is set; else update the NVIDIA driver",
    )


def drafter_check(model: str = "beam-tiny") -> Check:
    """Whether the bundled model has a drafter, and whether that loads."""
    from workbench.model.presets import bundled_drafter

    def check(ok: bool, found: str, remedy: str | None = None) -> Check:
        return Check(name=f"drafter of {model}", purpose="model", ok=ok, found=found, remedy=remedy)

    if bundled_drafter(model) is None:
        return check(True, "none is bundled: decoding runs without one")
    try:
        from workbench.model.checkpoint import load
        from workbench.spec.drafter_checkpoint import load_drafter

        drafter = load_drafter(load(model))
    except (ImportError, OSError, WorkbenchError) as error:
        reason = str(error) or type(error).__name__
        return check(
            False, f"does not load: {reason}", "install the workbench again, or use --no-draft"
        )
    return check(True, f"{drafter.name} is bundled and loads, {drafter.block - 1} drafts a step")


def lab_checks() -> list[Check]:
    """JupyterLab, its browser extensions, and the kernel in the same environment."""
    checks = [package_check(name, major, "notebooks") for name, major in _LAB_PACKAGES.items()]
    checks.append(package_check("jupyterlab_widgets", 3, "notebooks"))
    checks += [extension_check(name, bringer) for name, bringer in _LAB_EXTENSIONS.items()]
    return [*checks, server_check(), kernel_check()]


def extension_check(extension: str, distribution: str) -> Check:
    """Whether JupyterLab, started from this environment, finds a browser extension."""
    folders = [folder / "labextensions" / extension for folder in jupyter_folders()]
    found = next((folder for folder in folders if (folder / "package.json").is_file()), None)
    return Check(
        name=f"Lab extension {extension}",
        purpose="notebooks",
        ok=found is not None,
        found="not beside the server" if found is None else "found",
        remedy=None
        if found
        else f"{sys.executable} -m pip install --force-reinstall --no-deps {distribution}",
    )


def jupyter_folders() -> list[Path]:
    """Where a server of this environment looks for extensions and kernels, in its order."""
    if importlib.util.find_spec("jupyter_core") is None:
        return [Path(sys.prefix) / "share" / "jupyter"]
    paths = importlib.import_module("jupyter_core.paths")
    return [Path(folder) for folder in paths.jupyter_path()]


def server_check() -> Check:
    """Whether ``jupyter lab`` typed in this shell starts the server of this environment."""
    name = "jupyter-lab on PATH"
    program = shutil.which("jupyter-lab")
    own = Path(sys.executable).parent / "jupyter-lab"
    if program is None:
        return Check(
            name=name, purpose="notebooks", ok=True, found="none; `workbench lab` uses its own"
        )
    if own.exists() and Path(program).resolve() == own.resolve():
        return Check(name=name, purpose="notebooks", ok=True, found="that of this environment")
    return Check(
        name=name,
        purpose="notebooks",
        ok=False,
        found=f"{program}, of another environment, which lacks this one's packages",
        remedy="start the notebooks with `workbench lab`",
    )


def kernel_check() -> Check:
    """Whether the kernel named python3 is this Python."""
    name = "kernel python3"
    for folder in jupyter_folders():
        spec = folder / "kernels" / "python3" / "kernel.json"
        if not spec.is_file():
            continue
        try:
            program = read_json(spec)["argv"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            program = "an unreadable kernel.json"
        # Jupyter itself puts its own interpreter in the place of a bare "python".
        if program in ("python", "python3") or _same_file(program, sys.executable):
            return Check(name=name, purpose="notebooks", ok=True, found="this Python")
        return Check(
            name=name,
            purpose="notebooks",
            ok=False,
            found=f"{program} ({spec})",
            remedy="start the notebooks with `workbench lab`, which brings its own kernel",
        )
    return Check(
        name=name, purpose="notebooks", ok=True, found="none registered; `workbench lab` brings it"
    )


def _same_file(a: str, b: str) -> bool:
    # Not resolved: a virtual environment's python is a link, and where it links to is not it.
    return os.path.abspath(a) == os.path.abspath(b)


def chromium_check() -> Check:
    """A Chromium for the browser tests."""
    named = os.environ.get("CHROMIUM")
    candidates = (named,) if named else _CHROMIUM
    found = next((path for path in map(shutil.which, candidates) if path), None)
    return Check(
        name="Chromium",
        purpose="browser tests",
        ok=found is not None,
        found=found or (f"CHROMIUM={named} is not a program" if named else "not on PATH"),
        remedy=None if found else "install it (Debian: apt install chromium) or set CHROMIUM",
    )


def vllm_check() -> Check:
    """vLLM, which lives in an environment of its own."""
    version = version_of("vllm")
    return Check(
        name="vllm",
        purpose="serving",
        ok=version is not None,
        found=version or "not in this environment",
        remedy=None
        if version
        else "give it an environment to itself: python3 -m venv .venv-serving && "
        "source .venv-serving/bin/activate && pip install -e '.[serving]'",
    )
