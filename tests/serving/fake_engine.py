"""A program that starts, logs and ends like an engine, for tests of what starts and ends one.

``vllm serve MODEL --port N …`` with its behaviour in ``FAKE_ENGINE`` (JSON):

- ``log``: a recorded log to print on its way up, in ``parts`` pieces, ``pause`` seconds apart;
- ``code``: it ends with that code after the log, before it opens the port;
- ``hang``: it never opens the port; ``deaf``: it ignores SIGTERM;
- ``pids``: a file for the ids of itself and its workers: one in its process group and one that has
  left for a session of its own.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

SOURCE = """
import http.server, json, os, signal, subprocess, sys, time
asked = json.loads(os.environ["FAKE_ENGINE"])
deaf = asked.get("deaf")
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
workers = [subprocess.Popen(sleep, start_new_session=away) for away in (False, True)]
with open(asked["pids"] + ".part", "w") as file:
    json.dump({"engine": os.getpid(), "workers": [w.pid for w in workers],
               "words": sys.argv, "key": os.environ.get("VLLM_API_KEY"),
               "path": os.environ.get("PYTHONPATH")}, file)
os.rename(asked["pids"] + ".part", asked["pids"])
if asked.get("log"):
    text = open(asked["log"], newline="").read()
    parts = asked.get("parts", 1)
    for i in range(parts):
        sys.stdout.write(text[len(text) * i // parts : len(text) * (i + 1) // parts])
        sys.stdout.flush()
        time.sleep(asked.get("pause", 0))
if "code" in asked:
    print("(EngineCore pid=7) ERROR 11-29 19:12:47 [core.py:99] "
          "ValueError: no <b>heads</b>\\x1b[2J", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    os._exit(asked["code"])
if asked.get("hang"):
    time.sleep(600)

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *words):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Page).serve_forever()
"""


def write_engine(folder: Path) -> Path:
    """The program, as ``vllm`` in the folder."""
    program = folder / "vllm"
    program.write_text(f"#!{sys.executable} -S\n{SOURCE}")
    program.chmod(0o755)
    return program


def free_port() -> int:
    """A port that nobody has, below those that the system gives to whoever asks for any."""
    for _ in range(100):
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def runs(pid: int) -> bool:
    """Whether there is such a process and it has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return not Path("/proc/self").exists()
    return status.rpartition(")")[2].split()[0] != "Z"


def all_gone(pids: list[int], within: float = 10.0) -> bool:
    """Whether all of the processes end in that time (seconds)."""
    until = time.monotonic() + within
    while any(runs(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def asked(folder: Path, **behaviour: object) -> dict[str, str]:
    """The variable that tells the program what to do."""
    return {"FAKE_ENGINE": json.dumps({"pids": str(folder / "pids.json"), **behaviour})}


def pids(folder: Path, within: float = 10.0) -> dict[str, object]:
    """What the program wrote down, once it has."""
    until = time.monotonic() + within
    while not (folder / "pids.json").exists():
        assert time.monotonic() < until, "the engine did not start"
        time.sleep(0.01)
    found: dict[str, object] = json.loads((folder / "pids.json").read_text())
    return found
