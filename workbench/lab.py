"""Opening the notebooks: a writable copy, and JupyterLab on this machine's loopback address.

The copy belongs to the user. A notebook that was changed there is never written again; one that was
left as it was follows the version that comes with the workbench. Which is which is known from the
hash of what was last copied, kept in a small file beside the notebooks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import FileError, expand, read_json, write_whole
from workbench.hardware import version_of

DEFAULT_FOLDER = Path("~/beam-workbench/notebooks")
RECORD = ".copied-notebooks.json"  # name -> SHA-256 of the version last copied
START = "00_start_here.ipynb"
_START_SECONDS = 90.0  # a cold start reads hundreds of files; 3 s when they are cached
_STOP_SECONDS = 10.0


class LabError(WorkbenchError):
    """The notebooks cannot be copied or JupyterLab cannot be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What :func:`copy_notebooks` did: the names in each state, sorted."""

    folder: Path
    written: tuple[str, ...]  # new, or brought up to date
    unchanged: tuple[str, ...]
    kept: tuple[str, ...]  # changed by the user, while a different version comes with the workbench


def notebook_source() -> Path:
    """The folder of the notebooks that come with the workbench: a checkout's, or the installed one.

    Raises:
        LabError: neither has a notebook.
    """
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "notebooks", package / "_notebooks"):
        if any(folder.glob("*.ipynb")):
            return folder
    raise LabError(
        f"no notebooks were found beside {package} or in it; install beam-workbench again"
    )


def copy_notebooks(folder: Path, source: Path | None = None) -> Copied:
    """Bring the copy in ``folder`` up to date without touching what the user changed.

    Raises:
        LabError: the folder cannot be written, or is the one the notebooks come from.
    """
    source = notebook_source() if source is None else source
    folder = expand(folder).absolute()
    if os.path.realpath(folder) == os.path.realpath(source):
        raise LabError(
            f"{folder} is where the notebooks come from; give --dir another folder for the copy"
        )
    written, unchanged, kept = [], [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        record = _read_record(folder / RECORD)
        for path in sorted(source.glob("*.ipynb")):
            data, target = path.read_bytes(), folder / path.name
            current = _digest(target.read_bytes()) if target.exists() else None
            new = _digest(data)
            if current == new:
                unchanged.append(path.name)
            elif current is None or current == record.get(path.name):
                write_whole(target, data)
                written.append(path.name)
            else:
                kept.append(path.name)
                continue  # its record stays: should the user undo the change, it follows again
            record[path.name] = new
        write_whole(folder / RECORD, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
    except OSError as error:
        raise LabError(
            f"the notebooks cannot be copied to {folder} ({error.strerror}); "
            "give --dir a folder you can write to"
        ) from error
    return Copied(
        folder=folder, written=tuple(written), unchanged=tuple(unchanged), kept=tuple(kept)
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_record(path: Path) -> dict[str, str]:
    """What was copied when; an unreadable record knows nothing, so every difference is kept."""
    try:
        data = read_json(path)
    except FileError:
        return {}
    return {str(k): str(v) for k, v in data.items()} if isinstance(data, dict) else {}


# -- the server ---------------------------------------------------------------------------------


def run_lab(folder: Path, *, port: int | None, browser: bool, say: Callable[[str], None]) -> int:
    """Serve ``folder`` with JupyterLab until Ctrl-C; returns the exit code.

    ``say`` is given the lines a user should see, the address with its token among them.

    Raises:
        LabError: JupyterLab is not installed, the port is taken, or the server does not come up.
    """
    for module in ("jupyterlab", "ipykernel"):
        if importlib.util.find_spec(module) is None:
            raise LabError(
                f"{module} is not installed beside this Python; "
                f"run: {sys.executable} -m pip install {module}"
            )
    if port is not None and not _free(port):
        raise LabError(f"port {port} of 127.0.0.1 is taken; choose another --port or leave it out")
    with tempfile.TemporaryDirectory(prefix="beam-workbench-") as scratch:
        server: subprocess.Popen[bytes] | None = None
        ended = False

        def end(number: int, frame: FrameType | None) -> None:
            nonlocal ended
            ended = True
            if server is not None:  # else Popen is at work, and a server it started would be lost
                raise KeyboardInterrupt

        environment = _environment(Path(scratch))
        previous = _handle(end)
        try:
            server = subprocess.Popen(
                _command(folder, port, browser),
                env=environment,
                stdin=subprocess.DEVNULL,
                # Ctrl-C then reaches this process alone, which stops the server in its own order.
                start_new_session=True,
            )
            if ended:
                raise KeyboardInterrupt
            url = _wait_for(server, folder)
            say(f"JupyterLab: {url}")
            say(f"Notebooks:  {folder}")
            say("Ctrl-C stops it; every saved notebook stays.")
            return server.wait()
        except KeyboardInterrupt:
            say("Stopping JupyterLab and its kernels …")
            return 0
        finally:
            for number in previous:  # a second signal must not leave the server running
                signal.signal(number, signal.SIG_IGN)
            if server is not None:
                _stop(server)
            for number, handler in previous.items():
                signal.signal(number, handler)


def _handle(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install ``handler`` for what ends a program, a closed terminal included; what was there.

    A signal that is ignored (``nohup``) stays so.
    """
    previous: dict[int, Any] = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
            previous[number] = signal.signal(number, handler)
    return previous


def _command(folder: Path, port: int | None, browser: bool) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={folder}",
        "--ServerApp.log_level=WARN",
        "--LabApp.log_level=WARN",
        "--LabApp.extension_manager=readonly",  # no look-ups in a package registry
        f"--LabApp.default_url=/lab/tree/{START}" if (folder / START).exists() else "",
        "" if port is None else f"--ServerApp.port={port}",
        "" if port is None else "--ServerApp.port_retries=0",
        "" if browser else "--ServerApp.open_browser=False",
        # The server only listens on loopback, and containers know no other user.
        "--ServerApp.allow_root=True" if hasattr(os, "geteuid") and os.geteuid() == 0 else "",
    ]
    return [argument for argument in command if argument]


def _environment(scratch: Path) -> dict[str, str]:
    """The server's environment: this interpreter is its Python kernel, whatever else is registered.

    JUPYTER_PATH is searched first, so a kernel of that name in the user's own folders, which may
    belong to another environment, does not get in the way. JupyterLab's question whether it may
    fetch news is left out.
    """
    kernel = importlib.import_module("ipykernel.kernelspec").get_kernel_dict()
    kernel["display_name"] = "Python 3 (Beam Workbench)"
    kernel["argv"][0] = sys.executable
    page = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    for file, content in (
        (scratch / "kernels" / "python3" / "kernel.json", kernel),
        (scratch / "labconfig" / "page_config.json", page),
    ):
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content), encoding="utf-8")
    environment = dict(os.environ)
    # A terminal inside JupyterLab, and `!workbench` in a cell, then find the command.
    commands = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment["PATH"] = os.pathsep.join(filter(None, commands))
    for name in ("JUPYTER_PATH", "JUPYTER_CONFIG_PATH"):
        paths = [str(scratch), os.environ.get(name, "")]
        environment[name] = os.pathsep.join(filter(None, paths))
    if version_of("beam-workbench") is None:  # runs from a source tree: kernels must find it too
        modules = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, modules))
    return environment


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
    return True


def _wait_for(server: subprocess.Popen[bytes], folder: Path) -> str:
    """The server's address with its token, once it answers there.

    The server writes the file that names them a moment before it listens.
    """
    from jupyter_core.paths import jupyter_runtime_dir

    file = Path(jupyter_runtime_dir()) / f"jpserver-{server.pid}.json"
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        code = server.poll()
        if code is not None:
            raise LabError(f"JupyterLab ended at once with exit code {code}; what it said is above")
        with suppress(OSError, ValueError, KeyError):  # not there yet, or half-written
            data = json.loads(file.read_text(encoding="utf-8"))
            page = f"tree/{START}" if (folder / START).exists() else ""
            with socket.create_connection(("127.0.0.1", data["port"]), timeout=1):
                pass  # refused is an OSError: not listening yet
            return f"{data['url']}lab/{page}?token={data['token']}"
        time.sleep(0.1)
    raise LabError(f"JupyterLab did not come up within {_START_SECONDS:.0f} s")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server, which ends its kernels; by force only if it does not."""
    if server.poll() is not None:
        return
    server.terminate()
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
