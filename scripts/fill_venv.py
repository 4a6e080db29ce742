"""Create the virtual environment and fill it: torch first, then the project in editable mode.

The Makefile calls this with the standard library alone; run again it only adds what is missing.

torch goes first because its default build brings several GB of CUDA libraries. On a Linux machine
without an NVIDIA GPU three ways are tried in turn: the CPU build that pip is configured to see, the
CPU build that uv knows where to find, and last, said aloud, whatever pip finds.
Everything after it is held to constraints.txt. Where another torch is asked for, the pins of torch
and triton do not apply (a CUDA build of torch names its own triton).
"""

import argparse
import fcntl
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# The lines of constraints.txt that a torch of the user's choice takes out of force.
TORCH_FAMILY = re.compile(r"^(torch|triton)==", re.MULTILINE)


class FillError(Exception):
    """The environment could not be filled; the message says what to do."""


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def has_nvidia_gpu() -> bool:
    """Whether `nvidia-smi` is there and lists a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def pinned(name: str) -> str:
    """The `name==version` line of constraints.txt."""
    match = re.search(rf"^{re.escape(name)}==\S+", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    if match is None:
        raise FillError(f"constraints.txt does not pin {name}: add a line {name}==VERSION")
    return match.group()


class Venv:
    """A virtual environment and its pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"

    def _runs(self, *arguments: str) -> bool:
        if not self.python.exists():
            return False
        done = subprocess.run([str(self.python), *arguments], capture_output=True, check=False)
        return done.returncode == 0

    def create(self) -> None:
        """Make the environment, or make it anew if it is broken or its Python is too old."""
        fresh = "import sys; sys.exit(sys.version_info < (3, 11))"
        if self._runs("-c", fresh) and self._runs("-m", "pip", "--version"):
            return
        say(f"making {self.folder.name} with {platform.python_version()}")
        command = [sys.executable, "-m", "venv", "--clear", str(self.folder)]
        if subprocess.run(command, check=False).returncode != 0:
            raise FillError(f"could not make the environment {self.folder} (see above)")

    def pip(self, *arguments: str, expected: bool = True) -> bool:
        """Run `pip install`; True on success. Where success is `expected`, a failure is shown."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", *arguments]
        command.append("--disable-pip-version-check")
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode != 0 and expected:
            say(done.stdout)
        return done.returncode == 0

    def torch_version(self) -> str | None:
        """The installed torch, or None. Read from its metadata: importing it takes seconds."""
        code = "import importlib.metadata as m; print(m.version('torch'))"
        done = subprocess.run(
            [str(self.python), "-c", code], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None


def install_cpu_torch(venv: Venv, requirement: str, index: list[str]) -> bool:
    """Install the CPU build of an exactly pinned torch; False where there is none to be had."""
    if venv.pip(f"{requirement}+cpu", *index, expected=False):
        return True
    uv = shutil.which("uv")
    if uv is None and venv.pip("uv", expected=False):
        uv = str(venv.folder / "bin" / "uv")
    if uv is None:
        return False
    say("pip sees no CPU build of torch here; asking uv for one")
    command = [uv, "pip", "install", "--quiet", "--python", str(venv.python)]
    command += ["--torch-backend=cpu", requirement]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def install_torch(venv: Venv, wanted: str, index: list[str]) -> None:
    """Install `wanted`, or the pin of constraints.txt where `wanted` is empty."""
    requirement = wanted or pinned("torch")
    before = venv.torch_version()
    if before is not None and f"torch=={before.split('+')[0]}" == requirement:
        return
    say(f"installing {requirement}")
    exact = re.fullmatch(r"torch==[\d.]+", requirement) is not None
    if exact and sys.platform == "linux" and not has_nvidia_gpu():
        if install_cpu_torch(venv, requirement, index):
            return
        say(
            "No NVIDIA GPU and no CPU build of torch within reach: taking the build that pip finds,"
            " which may bring several GB of CUDA libraries. To avoid that, stop now and name an"
            " index that has CPU builds: make TORCH_INDEX=URL ..."
        )
    if not venv.pip(requirement, *index):
        raise FillError(f"pip could not install {requirement} (see above)")


def constraints_for(venv: Venv, wanted: str) -> Path:
    """constraints.txt, less the torch family where the user chose another torch."""
    if not wanted or wanted == pinned("torch"):
        return CONSTRAINTS
    kept = [
        line
        for line in CONSTRAINTS.read_text("utf-8").splitlines(keepends=True)
        if not TORCH_FAMILY.match(line)
    ]
    path = venv.folder / "constraints-without-torch.txt"
    path.write_text("".join(kept), "utf-8")
    return path


def fill(venv: Venv, extras: str, wanted: str, index: list[str]) -> None:
    """Create the environment if needed, install torch, then the project with `extras`."""
    venv.create()
    constraints = constraints_for(venv, wanted)
    install_torch(venv, wanted, index)
    say(f"installing the workbench with {extras} (a minute or two the first time)")
    # The build back end comes from constraints.txt as well, so the build needs no second download.
    if not venv.pip(pinned("setuptools")):
        raise FillError("pip could not install setuptools (see above)")
    project = f"{ROOT}[{extras}]"
    arguments = ["--no-build-isolation", "--constraint", str(constraints), "--editable", project]
    if not venv.pip(*arguments):
        raise FillError("pip could not install the workbench (see above)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="lab,test,train", help="comma-separated")
    parser.add_argument("--torch", default="", help="a requirement; default: the pin")
    parser.add_argument("--torch-index", default="", help="an extra index to look for torch in")
    options = parser.parse_args()
    index = ["--extra-index-url", options.torch_index] if options.torch_index else []
    folder = options.venv.resolve()
    try:
        # Two calls at a time (`make lab` beside `make test`) would install over each other.
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fill(Venv(folder), options.extras, options.torch, index)
    except FillError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run make again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
