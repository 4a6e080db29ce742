"""Where vLLM is: the program that starts it, from what a user names or from what is installed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from workbench.errors import ServingError
from workbench.files import expand

# How a Python starts the engine where its `vllm` program is not at hand.
_MODULE = "vllm.entrypoints.cli.main"
_INSTALL = (
    "install vLLM in an environment of its own and name it (engine=, --engine); the README's "
    "section on serving has the lines"
)


def engine_command(engine: str | Path | None = None) -> list[str]:
    """The words that stand for ``vllm`` in a command that is started here.

    Args:
        engine: the ``vllm`` program, a Python that has vLLM, or the folder of an environment with
            either; what is beside this Python or on PATH by default.

    Raises:
        ServingError: there is no such program, or vLLM is not found.
    """
    if engine is not None:
        program = _program(engine)
        return [program, "-m", _MODULE] if _is_python(program) else [program]
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("vllm")
    if found is None:
        raise ServingError(f"vLLM is not installed here; {_INSTALL}")
    return [found]


def python_of(engine: str | Path) -> str | None:
    """The Python behind an engine's program; None where it is none that can be told.

    Raises:
        ServingError: there is no such program.
    """
    program = _program(engine)
    if _is_python(program):
        return program
    try:
        with open(program, "rb") as file:
            first = file.readline(4096)
    except OSError:
        return None
    if first.startswith(b"#!"):
        words = first[2:].decode(errors="replace").split()
        # pip writes a shell's line where the path is too long or has blanks.
        if words and _is_python(words[0]) and os.access(words[0], os.X_OK):
            return words[0]
    beside = Path(program).with_name("python")
    return str(beside) if os.access(beside, os.X_OK) else None


def _program(engine: str | Path) -> str:
    text = str(engine)
    path = expand(text) if os.sep in text or expand(text).is_dir() else None
    if path is not None and path.is_dir():  # of an environment
        inside = [path / "bin" / name for name in ("vllm", "python")]
        path = next((each for each in inside if os.access(each, os.X_OK)), path)
    found = shutil.which(str(path.absolute()) if path else text)
    if found is None:
        what = (
            "is a folder without bin/vllm"
            if path and path.is_dir()
            else "was not found or cannot be run"
        )
        raise ServingError(f"the engine's program {text!r:.200} {what}; {_INSTALL}")
    return found


def _is_python(program: str) -> bool:
    return Path(program).name.startswith(("python", "pypy"))
