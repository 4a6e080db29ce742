"""Builds the project's CUDA sources with ``nvcc`` on first use and keeps the result.

A library is kept under a key of everything that it came from: the sources, the architecture, the
flags and the compiler's version. It is written under another name and then renamed, so that two
processes that build at once both end with a whole file.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from workbench.errors import KernelError
from workbench.files import CACHE_VARIABLE, cache_folder

SOURCES = Path(__file__).resolve().parent / "cuda"
# Architecture-specific targets; both have everything the kernels use.
ARCHITECTURES = ("sm_90a", "sm_100a")
FLAGS = ("-O3", "-std=c++17", "-shared", "-cudart", "static", "--compiler-options", "-fPIC")
_SECONDS = 300


def find_nvcc() -> str:
    """Path of ``nvcc``: in ``$CUDA_HOME/bin``, on the PATH, or in ``/usr/local/cuda/bin``.

    Raises:
        KernelError: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    places = [str(Path(home) / "bin")] if home else []
    places += [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(places))
    if found is None:
        raise KernelError(
            "the persistent CUDA kernel is compiled on first use and needs nvcc, which is neither "
            "in $CUDA_HOME/bin nor on the PATH nor in /usr/local/cuda/bin; install the CUDA "
            "toolkit, or use a Triton variant"
        )
    return found


def build(
    source: str = "step.cu",
    *,
    architecture: str = "sm_90a",
    folder: Path | None = None,
    nvcc: str | None = None,
    flags: tuple[str, ...] = (),
) -> Path:
    """The shared library of ``cuda/<source>``, compiled for ``architecture`` unless it is kept.

    ``folder`` (None: :func:`cache_folder`) keeps it; ``flags`` are added to ``FLAGS``.

    Raises:
        KernelError: no ``nvcc``, it fails (its first error is in the sentence), or the folder
            cannot be written.
    """
    compiler = find_nvcc() if nvcc is None else nvcc
    place = cache_folder() if folder is None else folder
    stem = Path(source).stem
    target = place / f"{stem}-{architecture}-{_key(source, architecture, compiler, flags)}.so"
    if target.is_file():
        return target
    try:
        place.mkdir(parents=True, exist_ok=True)
        work = tempfile.mkdtemp(prefix=f".{stem}-", dir=place)
    except OSError as error:
        raise KernelError(
            f"the compiled kernel cannot be kept in {place}: {error.strerror}; set "
            f"${CACHE_VARIABLE} to a folder that can be written"
        ) from error
    try:
        made = Path(work) / target.name
        number = architecture.removeprefix("sm_")
        _run(
            [
                compiler,
                f"-gencode=arch=compute_{number},code={architecture}",
                *FLAGS,
                *flags,
                str(SOURCES / source),
                "-o",
                str(made),
            ],
            f"compile {source} for {architecture}",
        )
        if not made.is_file():
            raise KernelError(
                f"{compiler} said that it compiled {source} and left no library; is it an nvcc?"
            )
        os.replace(made, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def load(source: str = "step.cu", *, architecture: str = "sm_90a") -> ctypes.CDLL:
    """:func:`build`, then loaded.

    Raises:
        KernelError: it cannot be built or loaded.
    """
    path = build(source, architecture=architecture)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(
            f"the compiled kernel {path} cannot be loaded ({error}); delete it, and it is built "
            "again on the next use"
        ) from error


def _key(source: str, architecture: str, compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.cu*")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    version = _run([compiler, "--version"], "say its version")
    digest.update("\0".join((source, architecture, version, *FLAGS, *flags)).encode())
    return digest.hexdigest()[:16]


def _run(command: list[str], purpose: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, errors="replace"
        )
    except OSError as error:
        raise KernelError(f"{command[0]} cannot be run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelError(
            f"{command[0]} took more than {_SECONDS} s to {purpose}; try again on a quieter machine"
        ) from error
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line.lower()), "")
        said = " ".join((first or (lines[-1] if lines else "no message")).split())
        raise KernelError(
            f"{command[0]} failed to {purpose} (exit code {done.returncode}): {said:.300}"
        )
    return done.stdout
