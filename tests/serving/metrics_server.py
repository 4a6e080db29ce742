"""A small web server with pages of metrics: in a thread, scripted, or as a program of its own.

As a program, ``python metrics_server.py PORT``: serves a :class:`PretendServer`; what is posted to
``/request`` is one more request, a JSON list of accepted runs. Its first line of output is its
port.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, *_: object) -> None:
        """Who asked has gone: nothing to be said."""


class Scripted:
    """A server in a thread. ``answer(path)`` gives (status, headers, body); a context manager.

    Attributes:
        times: when a page was asked for, on the monotonic clock.
        headers: those of each request.
        most: requests that were under way at once, at most.
    """

    def __init__(self, answer: Callable[[str], tuple[int, dict[str, str], bytes]]) -> None:
        self.answer = answer
        self.times: list[float] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.most = self._now = 0
        lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

            def do_GET(self) -> None:
                with lock:
                    outer.paths.append(self.path)
                    if self.path.endswith("/metrics"):
                        outer.times.append(time.monotonic())
                    outer.headers.append(dict(self.headers))
                    outer._now += 1
                    outer.most = max(outer.most, outer._now)
                try:
                    status, headers, body = outer.answer(self.path)
                    self.send_response(status)
                    for name, value in ({"Content-Length": str(len(body))} | headers).items():
                        if value:
                            self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body)
                    if "Connection" in headers:
                        self.close_connection = True
                except OSError:
                    self.close_connection = True
                finally:
                    with lock:
                        outer._now -= 1

            def log_message(self, *args: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def serving(page: Callable[[], str], version: str | None = "0.33.0") -> Scripted:
    """A server whose page is what is returned at that moment."""

    def answer(path: str) -> tuple[int, dict[str, str], bytes]:
        if path == "/version" and version is not None:
            return 200, {}, json.dumps({"version": version}).encode()
        if path == "/metrics":
            return 200, {"Content-Type": "text/plain; version=0.0.4"}, page().encode()
        return 404, {}, b"Not Found"

    return Scripted(answer)


class Child:
    """The same in a process of its own, which can be killed."""

    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(port)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def request(self, accepted: Sequence[int]) -> None:
        asked = urllib.request.Request(
            f"{self.url}/request", data=json.dumps(list(accepted)).encode(), method="POST"
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert answer.status == 200

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


def _main(port: int) -> None:
    from serving.metrics_pages import realistic

    pretend, lock = realistic(), threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def do_GET(self) -> None:
            with lock:
                self._answer(200 if self.path == "/metrics" else 404, pretend.page().encode())

        def do_POST(self) -> None:
            runs = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                pretend.request(runs)
                self._answer(200, b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = _Server(("127.0.0.1", port), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
