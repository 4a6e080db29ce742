"""Before and while a server is started: can it be, where does it log, who will own it."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import workbench
from workbench.errors import ServingError
from workbench.files import expand
from workbench.serving.api_key import VARIABLE as KEY_VARIABLE
from workbench.serving.launch.extra_arguments import keyword_of
from workbench.serving.launch.launch import Launch, is_path
from workbench.serving.server.server_state import State, state_folder, states
from workbench.serving.server.startup_progress import last_lines

_FIRST_WORD_SECONDS = 60.0  # for two small Pythons to begin
_LOGS = 20  # logs that are kept
_HEAD = "workbench: "
_UNASKABLE = ("ssl_keyfile", "ssl_certfile")


def check_startable(launch: Launch) -> None:
    """Whether it can be started here.

    Raises:
        ServingError: not on this system, not on one host, nothing to serve, not to be asked, or
            open to other machines without a key.
    """
    if os.name != "posix":
        raise ServingError("vLLM is started on Linux or macOS; connect to a server elsewhere")
    if launch.hosts > 1:
        raise ServingError(
            f"{launch.layout.name} takes {launch.hosts} hosts, and one is started here; use the "
            "commands of the Ray form"
        )
    models = [("checkpoint", launch.checkpoint)]
    if launch.speculation is not None:
        models.append(("drafter", launch.speculation.drafter))
    for what, model in models:
        if model is None:
            raise ServingError(f"the {what} is missing; give its folder or hub id")
        if is_path(model) and not os.path.isfile(os.path.join(model, "config.json")):
            raise ServingError(f"the {what} {model} has no config.json; give its folder")
    if launch.exposed and not os.environ.get(KEY_VARIABLE):
        raise ServingError(
            f"other machines reach {launch.host}: set {KEY_VARIABLE} in the environment, which the "
            "server then asks for"
        )
    for word in launch.extra:
        if keyword_of(word) in _UNASKABLE:
            raise ServingError(
                f"{word} is not for a server that is started here: it is asked over "
                "plain HTTP on this machine"
            )


def check_port(launch: Launch) -> None:
    """Whether the port is free.

    Raises:
        ServingError: it is taken, by whom if that is known, or nobody may have it.
    """
    ours = next((state for state in states() if state.port == launch.port), None)
    if ours is not None:
        what = "what is left of your server" if ours.left_over else "your server"
        raise ServingError(
            f"port {launch.port} belongs to {what} {ours.model}, process "
            f"{ours.supervisor.pid}; attach to it, stop it or choose another port"
        )
    family = socket.AF_INET6 if ":" in launch.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((launch.host, launch.port))
        except OSError as error:
            raise ServingError(
                f"port {launch.port} of {launch.host} cannot be had ({error.strerror or error}); "
                "choose another port"
            ) from error


def open_log(log: str | Path | None, port: int, command: list[str]) -> tuple[Path, int]:
    """A log with a first line, and where in it this start begins (bytes).

    Raises:
        ServingError: it cannot be written; a full disk is found out here, before anything runs.
    """
    if log is None:
        folder = state_folder() / "logs"
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{port}-{os.getpid()}.log"
    else:
        path = Path(os.path.abspath(expand(log)))
    head = f"{_HEAD}{time.strftime('%Y-%m-%d %H:%M:%S')} {json.dumps(command)}\n"
    try:
        if log is None:
            folder.mkdir(mode=0o700, exist_ok=True)
            _forget_old(folder)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "ab", buffering=0) as file:
            start = os.fstat(descriptor).st_size
            file.write(head.encode())
            with suppress(OSError):  # a device has nothing to be written through
                os.fsync(descriptor)
    except OSError as error:
        raise ServingError(
            f"the log {path} cannot be written ({error.strerror or error}); free space or name "
            "another file"
        ) from error
    return path, start


def _forget_old(folder: Path) -> None:
    """Keep the newest logs and those of servers that run."""
    used = {state.log for state in states()}
    logs = sorted(path for path in folder.glob("*.log") if str(path) not in used)
    for path in logs[: max(0, len(logs) - _LOGS + 1)]:
        with suppress(OSError):
            path.unlink()


def start_supervised(
    command: list[str], environment: dict[str, str], log: Path, state: dict[str, Any]
) -> tuple[State, subprocess.Popen[bytes]]:
    """The state and the supervisor, after it has said that the engine was started.

    Args:
        command: the engine's words, ``environment`` what is set for it where it is not set yet.
        state: the fields of :class:`State` that are known before.

    Raises:
        ServingError: it was not started; nothing is left then.
    """
    root = str(Path(workbench.__file__).resolve().parent.parent)
    given = os.environ.get("PYTHONPATH")
    added = {name: value for name, value in environment.items() if name not in os.environ}
    request = {
        "command": command,
        # The engine has its own Python: our source is not put on its path.
        "environment": {"PYTHONPATH": given, **added},
        "stop_seconds": state["stop_seconds"],
        "state": state,
    }
    with open(log, "ab") as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "workbench.serving.server.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, given]))},
            start_new_session=True,
        )
    assert child.stdin is not None
    assert child.stdout is not None
    # Until the whole line is there it starts nothing, so an interrupt before that leaves nothing.
    try:
        with suppress(BrokenPipeError):
            child.stdin.write((json.dumps(request) + "\n").encode())
            child.stdin.flush()
        line = _first_line(child.stdout)
        answer: dict[str, Any] = json.loads(line) if line else {}
        child.stdout.close()
        if "state" not in answer:
            with suppress(OSError):
                child.stdin.close()
            child.wait()
            lines = last_lines(log, state["log_start"], 1)
            known = [line for line in lines if not line.startswith(_HEAD)]  # ours says nothing
            said = answer.get("error") or "; ".join(known) or "its supervisor ended at once"
            raise ServingError(f"{state['model']} was not started: {said}; the log is {log}")
        made = State.from_dict(answer["state"])
        if state["keep"]:
            child.stdin.close()
    except BaseException:
        with suppress(OSError):
            child.stdin.close()
        child.terminate()
        child.wait()
        raise
    return made, child


def _first_line(stream: IO[bytes]) -> bytes:
    if not select.select([stream], [], [], _FIRST_WORD_SECONDS)[0]:
        raise ServingError(
            f"the server's supervisor said nothing within {_FIRST_WORD_SECONDS:.0f} s; this "
            "machine is too busy to start one"
        )
    return stream.readline()
