"""Starts vLLM's CPU build on a free loopback port, and ends it whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import workbench

FOLDER = Path(workbench.__file__).parent / "model" / "zoo" / "beam-tiny"
PARSERS = ("--reasoning-parser=beam", "--tool-call-parser=beam", "--enable-auto-tool-choice")
# A small model likes blanks better than a value: a grammar that allows them at will may never end.
COMPACT = '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}'
SCRIPTED = "--logits-processors=serving_real.scripted:Scripted"
TESTS = Path(__file__).resolve().parent.parent
START_SECONDS = 240  # 35 to 55 on two cores; longer where other work runs
QUIET_SECONDS = 30  # for an orderly end

# Nothing is looked up or sent anywhere, and one core is left to whoever asks the server.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ARGUMENTS = (
    "--host=127.0.0.1",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=512",  # longer prompts are prefilled in chunks
    "--served-model-name=beam-tiny",
    "--seed=0",
)


class StartError(RuntimeError):
    """The server did not come up; the message ends with the last lines of its log."""


class RealServer:
    """A child process with a process group of its own; a context manager that leaves none behind.

    Attributes:
        url: its base address.
        words: the command it was started with.
        seconds: how long it took until it was ready.
    """

    def __init__(self, python: str, model: Path, log: Path, arguments: Sequence[str] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.words = ["vllm", "serve", str(model), f"--port={self.port}", *ARGUMENTS, *arguments]
        command = [python, "-m", "vllm.entrypoints.cli.main", *self.words[1:]]
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(TESTS)}
        environment["VLLM_CACHE_ROOT"] = str(log.parent / "vllm-cache")
        self.log = log
        self.began = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        self.seconds = 0.0

    def __enter__(self) -> RealServer:
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])

    def ready(self) -> bool:
        """Whether it answers that it is well."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_until_ready(self) -> None:
        """Raise StartError when it ends, or is not ready in time."""
        while not self.ready():
            spent = time.monotonic() - self.began
            if self.process.poll() is not None:
                raise StartError(f"the server ended at its start:\n{self.tail()}")
            if spent > START_SECONDS:
                raise StartError(f"the server was not ready in {START_SECONDS} s:\n{self.tail()}")
            time.sleep(0.5)
        self.seconds = time.monotonic() - self.began

    def members(self) -> list[int]:
        """Processes of its group that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[2]) == self.process.pid and fields[0] != "Z":
                        found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """SIGKILL to the front end alone, as the system does when memory runs out."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=10)

    def stop(self) -> None:
        """Ask it to end, then make it; afterwards no process of its group is left."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=QUIET_SECONDS)
        deadline = time.monotonic() + QUIET_SECONDS
        while self.members() and time.monotonic() < deadline:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            time.sleep(0.1)
        self.process.wait(timeout=QUIET_SECONDS)
        left = self.members()
        if left:
            raise RuntimeError(f"processes {left} of the server could not be ended")
