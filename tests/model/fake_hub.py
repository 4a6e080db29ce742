"""A hub on loopback: the pages of the Hugging Face hub that its client asks for, tiny.

``Hub.repos`` maps an id to its files; ``asked`` has the path of every request in order, with
``HEAD`` before those that only look. Nothing of the client is replaced.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "s" * 30


class Hub:
    """What the hub has, and what it was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.hidden: set[str] = set()  # listed, and not given: the answer is 404
        self.status: int | None = None  # of every answer, instead
        # Status, headers and body of what a path ends with, instead.
        self.instead: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.url = ""

    def fetched(self, repo: str) -> list[str]:
        """Names of the files whose contents were asked for."""
        begin = f"/{repo}/resolve/"
        paths = [path for path in self.asked if path.startswith(begin)]
        return [path.removeprefix(begin).partition("/")[2] for path in paths]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers until the end of the block."""
    hub = Hub()

    class Page(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.asked.append(self.path)
            self._answer(body=True)

        def do_HEAD(self) -> None:
            hub.asked.append(f"HEAD {self.path}")
            self._answer(body=False)

        def log_message(self, *words: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0].strip("/").split("/")
            token = (self.headers["Authorization"] or "").removeprefix("Bearer ") or None
            hub.tokens.add(token)
            if hub.status is not None:
                self._say(hub.status, {}, b"", body)
                return
            for end, (status, headers, data) in hub.instead.items():
                if "/".join(path).endswith(end):
                    self._say(status, headers, data, body)
                    return
            api = path[:2] == ["api", "models"]
            name = "/".join(path[2:4] if api else path[:2])
            if name not in hub.repos:
                self._say(401, {"X-Error-Code": "RepoNotFound"}, b"", body)
            elif name in hub.gated and token != TOKEN and not api:
                self._say(403, {"X-Error-Code": "GatedRepo"}, b"", body)
            elif api:
                self._info(name, path[4:], body)
            else:
                self._file(hub.repos[name], path[3], "/".join(path[4:]), body)

        def _info(self, name: str, rest: list[str], body: bool) -> None:
            if rest and rest[-1] not in ("main", "v1", COMMIT):
                self._say(404, {"X-Error-Code": "RevisionNotFound"}, b"", body)
                return
            files = [{"rfilename": k, "size": len(v)} for k, v in hub.repos[name].items()]
            page: dict[str, Any] = {"id": name, "sha": COMMIT, "siblings": files}
            self._say(200, {"Content-Type": "application/json"}, json.dumps(page).encode(), body)

        def _file(self, files: dict[str, bytes], revision: str, name: str, body: bool) -> None:
            if name not in files or name in hub.hidden:
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
                self._say(404, headers, b"", body)
                return
            data = files[name]
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            self._say(200, {"X-Repo-Commit": COMMIT, "ETag": etag}, data, body)

        def _say(self, status: int, headers: dict[str, str], data: bytes, body: bool) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
