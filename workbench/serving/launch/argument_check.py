"""Does the engine take a launch's arguments? Its own parser says so, where it is installed.

The parser runs in a Python of its own: a vLLM that crashes, hangs or prints cannot do harm here.
Elsewhere the options' names are compared with those recorded of vLLM 0.33.0, which is less, and the
answer says which of the two it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from workbench.errors import ServingError
from workbench.serving.launch.engine_program import python_of
from workbench.serving.launch.extra_arguments import recorded, unknown_options

_SECONDS = 180.0  # importing vLLM takes 20 s on a slow host
_SOURCE = Path(__file__).with_name("parse_arguments.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Arguments that were found good: ``by`` whom, and ``remark`` where the engine's parser did not
    run although it was asked for."""

    by: str
    remark: str | None = None

    def __str__(self) -> str:
        return f"accepted by {self.by}" + (f" ({self.remark})" if self.remark else "")


def check_arguments(words: list[str], *, engine: str | Path | None = None) -> Checked:
    """Whether ``vllm serve`` takes these arguments; nothing is started or loaded.

    Args:
        words: ``vllm serve`` and its arguments, of :attr:`Launch.words`.
        engine: the ``vllm`` program or the Python that has it; this Python by default.

    Raises:
        ServingError: the engine refuses them, in its own words; or there is no such program.
    """
    remark = None
    python = None if engine is None else python_of(engine)
    if python is None and engine is None and find_spec("vllm") is not None:
        python = sys.executable
    if python is not None:
        answer, remark = _asked(python, words[2:])
        if answer is not None:
            version, refusal = answer
            if refusal is not None:
                raise ServingError(f"vLLM {version} refuses these arguments: {refusal}")
            return Checked(by=f"the parser of vLLM {version}")
    elif engine is not None:
        remark = f"no Python was found behind {engine}"
    unknown = unknown_options(words)
    if unknown:
        raise ServingError(
            f"vLLM {recorded()['vllm']} has no option {', '.join(unknown)}; see vllm serve --help"
        )
    return Checked(by=f"the recorded option names of vLLM {recorded()['vllm']}", remark=remark)


@contextmanager
def _nowhere() -> Iterator[str]:
    """A folder to run in, so that no file here hides a module: an empty one where there can be."""
    try:
        made = tempfile.TemporaryDirectory()
    except OSError:  # a system that is read-only throughout
        yield os.sep
        return
    with made as folder:
        yield folder


def _asked(python: str, words: list[str]) -> tuple[tuple[str, str | None] | None, str | None]:
    """(version, refusal) by the parser; or None and why it could not be asked."""
    variables = {k: v for k, v in os.environ.items() if k not in ("VLLM_API_KEY", "HF_TOKEN")}
    with _nowhere() as nowhere:
        try:
            done = subprocess.run(
                [python, "-c", _SOURCE.read_text("utf-8")],
                input=json.dumps(words),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                cwd=nowhere,
                env=variables,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"its parser did not answer within {_SECONDS:.0f} s"
        except OSError as error:
            raise ServingError(f"{python} cannot be run ({error.strerror or error})") from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        return (str(answer["vllm"]), answer["refusal"]), None
    except (IndexError, ValueError, KeyError, TypeError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return None, f"its parser does not run: {last[0][:300]}"
