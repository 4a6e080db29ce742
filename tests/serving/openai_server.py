"""A scripted server that speaks as much of the OpenAI chat API as the tests ask of it.

Every request is kept, so that what a client sent can be counted. What is answered to the chat
requests is a list of functions that write to the connection, taken in order: whole and broken
streams, silence, redirects, an end in the middle. Run as a program it drips one endless answer.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Scripted:
    """The server: where it is, what it was asked, what it will answer."""

    url: str
    script: list[Callable[[Answering], None]]
    asked: list[Asked] = field(default_factory=list)
    models: Any = None
    gone: threading.Event = field(default_factory=threading.Event)  # a client left a stream early

    @property
    def chats(self) -> list[Any]:
        """Bodies of the chat requests."""
        return [a.body for a in self.asked if a.path.endswith("/chat/completions")]


class Answering(BaseHTTPRequestHandler):
    """One connection; the script's functions write to it."""

    protocol_version = "HTTP/1.1"
    scripted: Scripted

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._note(None)
        if self.path.endswith("/models"):
            listed = {"object": "list", "data": [{"id": MODEL, "object": "model",
                      "max_model_len": 4096}]}  # fmt: skip
            answer = listed if self.scripted.models is None else self.scripted.models
            answer(self) if callable(answer) else document(answer)(self)
        else:
            document({"detail": "Not Found"}, code=404)(self)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._note(json.loads(raw))
        step = self.scripted.script.pop(0) if self.scripted.script else document({}, code=500)
        try:
            step(self)
        except (BrokenPipeError, ConnectionResetError):
            self.scripted.gone.set()
            self.close_connection = True

    def _note(self, body: Any) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.scripted.asked.append(Asked(self.command, self.path, headers, body))

    # -- what scripts are made of -----------------------------------------------------------------

    def begin(self, kind: str = "text/event-stream") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def part(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def event(self, document: Any) -> None:
        self.part(f"data: {json.dumps(document)}\n\n".encode())

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def break_off(self) -> None:
        """End as a killed process does: at once, with a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.wfile.flush()
        self.connection.close()
        self.close_connection = True


Step = Callable[[Answering], None]


@contextmanager
def serving(*script: Step, models: Any = None) -> Iterator[Scripted]:
    """A server that answers chat requests with these, in order."""
    scripted = Scripted(url="", script=list(script), models=models)
    handler = type("Handler", (Answering,), {"scripted": scripted})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that goes away is part of the script
    server.block_on_close = False
    scripted.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield scripted
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chunk with this delta."""
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
            "choices": [choice]}  # fmt: skip


def counts(prompt: int, completion: int, **metrics: Any) -> dict[str, Any]:
    """The chunk after the last, as vLLM sends it when usage was asked for."""
    usage = {"prompt_tokens": prompt, "completion_tokens": completion,
             "total_tokens": prompt + completion}  # fmt: skip
    made = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
            "choices": [], "usage": usage}  # fmt: skip
    return made | ({"metrics": metrics} if metrics else {})


def stream(*chunks: Any, done: bool = True, pause: float = 0.0) -> Step:
    """A stream of these documents; ``done`` ends it as it should be ended."""

    def write(to: Answering) -> None:
        to.begin()
        for chunk in chunks:
            to.event(chunk)
            time.sleep(pause)
        if done:
            to.part(b"data: [DONE]\n\n")
        to.end()

    return write


def say(*words: str, prompt: int = 5, finish: str = "stop", **metrics: Any) -> Step:
    """A stream that says these words, one token each, and ends."""
    last = delta(finish)
    return stream(
        delta(role="assistant", content=""),
        *(delta(content=word) for word in words),
        last,
        counts(prompt, len(words), **metrics),
    )


def call(*calls: tuple[str, str], text: str = "") -> Step:
    """A stream that asks for tools, each a name and its arguments, which come in two parts."""
    chunks = [delta(content=text)] if text else []
    for index, (name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        first = {"name": name, "arguments": arguments[:half]}
        more = {"index": index, "id": f"id{index}", "type": "function", "function": first}
        chunks.append(delta(tool_calls=[more]))
        rest = {"index": index, "function": {"arguments": arguments[half:]}}
        chunks.append(delta(tool_calls=[rest]))
    return stream(*chunks, delta("tool_calls"), counts(9, 4))


def document(body: Any, *, code: int = 200, kind: str = "application/json") -> Step:
    """One answer, JSON unless it is bytes already."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    def write(to: Answering) -> None:
        to.send_response(code)
        to.send_header("content-type", kind)
        to.send_header("content-length", str(len(data)))
        to.end_headers()
        to.wfile.write(data)

    return write


def redirect(to_url: str, code: int = 307) -> Step:
    def write(to: Answering) -> None:
        to.send_response(code)
        to.send_header("location", to_url)
        to.send_header("content-length", "0")
        to.end_headers()

    return write


def bytes_of(data: bytes) -> Step:
    """A stream with this in it."""

    def write(to: Answering) -> None:
        to.begin()
        to.part(data)
        to.end()

    return write


def dies_after(*chunks: Any) -> Step:
    def write(to: Answering) -> None:
        to.begin()
        for chunk in chunks:
            to.event(chunk)
        time.sleep(0.05)  # what was sent shall be read before the reset
        to.break_off()

    return write


def waits(seconds: float, then: Step) -> Step:
    def write(to: Answering) -> None:
        time.sleep(seconds)
        then(to)

    return write


def drips(word: str = "x", every: float = 0.02) -> Step:
    """A stream without an end."""

    def write(to: Answering) -> None:
        to.begin()
        while True:
            to.event(delta(content=word))
            time.sleep(every)

    return write


if __name__ == "__main__":
    with serving(*[drips()] * 100) as running:
        print(running.url, flush=True)
        sys.stdin.read()
