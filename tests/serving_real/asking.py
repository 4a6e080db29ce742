"""Requests to a server by the standard library alone, so that counts depend on no client."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

_PROXYLESS = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _request(url: str, body: dict[str, Any] | None) -> urllib.request.Request:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})


class RefusedError(RuntimeError):
    """The server refused; the message is its status and its words."""


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer of a POST; raises RefusedError for any status but 200."""
    try:
        with _PROXYLESS.open(_request(f"{url}{path}", body), timeout=120) as answer:
            document: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        raise RefusedError(f"{error.code}: {text[:500]}") from None
    return document


def page(url: str) -> str:
    """The text of ``/metrics``."""
    with _PROXYLESS.open(_request(f"{url}/metrics", None), timeout=30) as answer:
        return str(answer.read().decode())


def stream(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON chunks of a streamed answer, as they come.

    Raises:
        ConnectionError: it broke off before its end was said.
    """
    ended = False
    with _PROXYLESS.open(_request(f"{url}{path}", body | {"stream": True}), timeout=120) as answer:
        for line in answer:
            text = line.decode().strip()
            if text == "data: [DONE]":
                ended = True
            elif text.startswith("data: "):
                yield json.loads(text.removeprefix("data: "))
    if not ended:
        raise ConnectionError("the stream ended without its last line")


def chat(url: str, **body: Any) -> dict[str, Any]:
    """A chat completion at temperature 0."""
    return ask(url, "/v1/chat/completions", {"model": "beam-tiny", "temperature": 0} | body)


def complete(url: str, ids: list[int], **body: Any) -> dict[str, Any]:
    """A greedy completion of token ids, with the ids of its tokens."""
    wanted = {"model": "beam-tiny", "prompt": ids, "temperature": 0, "return_token_ids": True}
    return ask(url, "/v1/completions", wanted | body)
