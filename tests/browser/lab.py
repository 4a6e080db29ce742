"""JupyterLab in a real browser: start it, open a notebook, run it, look at the page."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent.parent
WIDTH = 1280  # of the window, in px: nothing may be clipped at this width

# Nothing of the browser's own goes to the network, and no sandbox is needed for a page we wrote.
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

_KERNEL_READY = """async () => {
    const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
    if (!context) return false;
    await context.ready;
    const kernel = context.session?.kernel;
    return !!kernel && kernel.connectionStatus === 'connected' && kernel.status === 'idle'
        && !!(await kernel.info);
}"""

_FINISHED = """() => {
    const panel = window.jupyterapp.shell.currentWidget;
    const cells = panel.content.widgets.filter(cell => cell.model.type === 'code');
    return panel.sessionContext.session?.kernel?.status === 'idle'
        && cells.every(cell => cell.model.executionCount !== null
                               && cell.model.executionState !== 'running');
}"""


@dataclass
class Lab:
    """A running server; the notebooks it serves are a copy."""

    url: str
    token: str
    log: Path


@contextmanager
def running_lab(scratch: Path) -> Iterator[Lab]:
    """JupyterLab on loopback with folders of its own, so that no user setting plays a part."""
    notebooks = scratch / "notebooks"
    notebooks.mkdir()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copy(path, notebooks)
    folders = {
        name: scratch / name.lower()
        for name in (
            "JUPYTER_CONFIG_DIR",
            "JUPYTER_DATA_DIR",
            "JUPYTER_RUNTIME_DIR",
            "JUPYTERLAB_SETTINGS_DIR",
            "JUPYTERLAB_WORKSPACES_DIR",
            "IPYTHONDIR",
        )
    }
    for folder in folders.values():
        folder.mkdir()
    _no_news(folders["JUPYTERLAB_SETTINGS_DIR"])
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {k: str(v) for k, v in folders.items()} | {"PYTHONPATH": path}
    # The browser draws on the cores that torch's threads would spin on, waiting for each other.
    environment["OMP_NUM_THREADS"] = "1"
    token, port, log = secrets.token_hex(16), _free_port(), scratch / "lab.log"
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"),
        *(f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"),
        *(f"--ServerApp.root_dir={notebooks}", "--LabApp.expose_app_in_browser=True"),
    ]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            lab = Lab(url=f"http://127.0.0.1:{port}", token=token, log=log)
            _wait_for_server(lab, server)
            yield lab
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _no_news(settings: Path) -> None:
    """A fresh profile would ask whether it may fetch news."""
    folder = settings / "@jupyterlab" / "apputils-extension"
    folder.mkdir(parents=True)
    (folder / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for_server(lab: Lab, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended at once:\n{lab.log.read_text()[-2000:]}")
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{lab.url}/api/status?token={lab.token}", timeout=2).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"JupyterLab did not come up:\n{lab.log.read_text()[-2000:]}")


@dataclass
class Notebook:
    """A notebook open in the browser, with everything the page complained about."""

    page: Page
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def run_all(self, timeout: float = 90) -> None:
        """Run every cell and wait for the last."""
        self.command("notebook:run-all-cells")
        self.until(_FINISHED, timeout)

    def command(self, name: str, **arguments: Any) -> None:
        """A command of JupyterLab, as its menus would give it."""
        self.page.evaluate(
            "([name, arguments]) => { window.jupyterapp.commands.execute(name, arguments); }",
            [name, arguments],
        )

    def until(self, predicate: str, timeout: float = 20, argument: Any = None) -> Any:
        """Poll a JavaScript function (async ones too) until it gives something true."""
        deadline = time.monotonic() + timeout
        while True:
            value = self.page.evaluate(predicate, argument)
            if value:
                return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {timeout} s: {predicate}\n{self.errors[:5]}")
            time.sleep(0.05)

    def cell_errors(self) -> list[str]:
        """Tracebacks among the outputs, as text."""
        errors: list[str] = self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets
                .filter(cell => cell.model.type === 'code')
                .flatMap(cell => cell.model.outputs.toJSON())
                .filter(output => output.output_type === 'error')
                .map(output => `${output.ename}: ${output.evalue}`)"""
        )
        return errors

    def theme(self, name: str) -> None:
        """Switch to "JupyterLab Light" or "JupyterLab Dark"."""
        self.command("apputils:change-theme", theme=name)
        light = "true" if "Light" in name else "false"
        self.until(f"() => document.body.dataset.jpThemeLight === '{light}'")

    def photograph(self, folder: Path, name: str) -> list[Path]:
        """The notebook from top to bottom at the window's width, in as few pictures as it takes."""
        size = self.page.viewport_size
        self.page.set_viewport_size({"width": WIDTH, "height": 2000})
        pictures: list[Path] = []
        at_end = False
        while not at_end:
            top = 1800 * len(pictures)
            at_end = self.page.evaluate(
                """top => {
                    const panel = window.jupyterapp.shell.currentWidget.content;
                    const node = panel.node.querySelector('.jp-WindowedPanel-outer');
                    node.scrollTop = top;
                    return top + node.clientHeight >= node.scrollHeight;
                }""",
                top,
            )
            self.page.wait_for_timeout(800)  # plots draw when they come into sight
            pictures.append(folder / f"{name}-{len(pictures) + 1}.png")
            self.page.screenshot(path=pictures[-1])
        self.page.set_viewport_size(size or {"width": WIDTH, "height": 900})
        return pictures


@contextmanager
def open_notebook(browser: Browser, lab: Lab, name: str) -> Iterator[Notebook]:
    """Open one notebook and wait until its kernel answers."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 900})
    notebook = Notebook(page=page)
    own = urlsplit(lab.url).netloc

    def note_request(url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != own:
            notebook.outside.append(url)

    page.on("console", lambda m: notebook.errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: notebook.errors.append(str(error)))
    page.on("request", lambda request: note_request(request.url))
    page.on("websocket", lambda socket_: note_request(socket_.url))
    try:
        # `reset` starts from an empty workspace, whatever the one before left open.
        page.goto(f"{lab.url}/lab/tree/{name}?token={lab.token}&reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        # The indicator says "idle" before the kernel can be reached, and a run is then dropped.
        notebook.until(_KERNEL_READY, 60)
        yield notebook
    finally:
        page.close()
