"""``Wire``: HTTP to one server and no other, through the ``openai`` package.

Redirects are not followed. A server on this machine is reached past every proxy. What is sent has
no headers but those that the API needs, whatever the environment says to the ``openai`` package. A
request can be cut from another thread, whatever it waits for. Of an answer no more is read than
:mod:`workbench.serving.client.bounds` says, and a key that a server repeats is cut out of it.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from workbench.errors import ServingError
from workbench.serving.address import Address
from workbench.serving.api_key import ApiKey
from workbench.serving.client.bounds import bounded
from workbench.serving.client.json_check import short
from workbench.serving.http_errors import Sentences

if TYPE_CHECKING:
    import httpx2

CONNECT = 5.0  # seconds to reach a server
_PROXIES = "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY"
_HEADERS = frozenset(
    ("accept", "connection", "content-length", "content-type", "host", "transfer-encoding")
)


class Cut:
    """Ends one request from another thread.

    Attributes:
        done: whether it was asked to.
    """

    def __init__(self) -> None:
        self.done = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def __call__(self) -> None:
        """End it; whoever waits for the server goes on at once. Once is as good as twice."""
        with self._lock:
            self.done = True
            self._shut()

    def watch(self, event: str, info: dict[str, Any]) -> None:
        """A ``trace`` extension of httpcore: learns of the connection when there is one."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                if self.done:
                    self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            # Closing would leave a thread that reads from it waiting. The class's own method:
            # that of an encrypted socket takes its state away from the thread that reads.
            with suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class Request:
    """Keeps whatever goes wrong within as a sentence, which :meth:`check` raises after it.

    After it, so that no frame of the traceback holds the error itself, and in it what a server
    echoed. Once it is cut nothing is raised: what it was waiting for is nobody's concern any more.
    """

    def __init__(
        self, current: threading.local, sentences: Sentences, doing: str, cut: Cut | None
    ) -> None:
        self._current, self._sentences, self._doing, self._cut = current, sentences, doing, cut
        self._outer: Cut | None = None
        self._sentence: str | None = None

    def __enter__(self) -> Request:
        self._outer = getattr(self._current, "cut", None)
        self._cut = self._cut or self._outer
        self._current.cut = self._cut
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._current.cut = self._outer
        if not isinstance(error, Exception):
            return False
        if self._cut is not None and self._cut.done:
            return True
        if not isinstance(error, ServingError):
            about = self._sentences.about(error, self._doing)
            self._sentence = about or self._sentences.unknown(error, self._doing)
        return self._sentence is not None

    def check(self) -> None:
        """Raise what went wrong.

        Raises:
            ServingError: something did.
        """
        if self._sentence is not None:
            raise ServingError(self._sentence)


class Wire:
    """Connections to ``address``.

    Args:
        key: None sends none.
        timeout: seconds of silence after which a server is given up.

    Raises:
        ServingError: the ``openai`` package is missing, a key would go over an open network, or
            the environment has a proxy or certificates that cannot be used.
    """

    def __init__(self, address: Address, key: ApiKey | None, timeout: float) -> None:
        try:
            import httpx2
            import openai
        except ImportError:
            raise ServingError(
                "talking to a server needs the openai package, from 3.0: pip install 'openai>=3'"
            ) from None
        if key is not None and address.scheme == "http" and not address.loopback:
            raise ServingError(
                f"the key from {key.source} is not sent to {address.host} over plain http; use "
                "https, forward the port here with ssh -L, or say key=None"
            )
        self.address, self._key = address, key
        self._sentences = Sentences(address=address, key=key, timeout=timeout)
        self._current = threading.local()
        self._closed = False
        self._cuts: weakref.WeakSet[Cut] = weakref.WeakSet()
        try:
            self._origin = _origin(httpx2.URL(address.url))
        except httpx2.InvalidURL as error:
            raise ServingError(f"{address} is no server's address ({short(error)})") from None
        try:
            self._http = httpx2.Client(
                follow_redirects=False,
                trust_env=not address.loopback,
                verify=_verified(address),
                timeout=httpx2.Timeout(timeout, connect=min(CONNECT, timeout), pool=CONNECT),
                # A connection a request: so each can be cut, and none is left over to go stale.
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                event_hooks={"request": [self._outgoing], "response": [self._incoming]},
            )
        except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
            # Not the error's words: a proxy's address may have a password in it.
            raise ServingError(
                f"what the environment says of proxies or certificates cannot be used "
                f"({type(error).__name__}); look at {_PROXIES}, SSL_CERT_FILE and SSL_CERT_DIR"
            ) from None
        self._api = openai.OpenAI(
            api_key="none",  # the real one is put on in _outgoing, and nowhere else
            base_url=f"{address.url}/v1",
            max_retries=0,
            http_client=self._http,
        )

    def close(self) -> None:
        """Cut what is under way, and close what is open; whoever reads an answer goes on at once,
        with what there is."""
        self._closed = True
        for cut in self._cuts.copy():
            cut()
        self._http.close()

    def get(self, path: str) -> Any:
        """The JSON at a path, or text where it is none; within :meth:`request`."""
        return self._clean(self._api.get(path, cast_to=object))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON, or text, that a request is answered with; within :meth:`request`."""
        document = self._api.post(path, cast_to=object, body=body)
        self._sent()
        return self._clean(document)

    @contextmanager
    def events(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[Any]]:
        """The documents of a stream of server-sent events as they come; within :meth:`request`.

        Raises:
            ServingError: the answer is no such stream.
        """
        from openai import Stream

        stream = self._api.post(
            path, cast_to=object, body=body, stream=True, stream_cls=Stream[object]
        )
        self._sent()
        try:
            kind = stream.response.headers.get("content-type", "")
            if "event-stream" not in kind:
                raise ServingError(
                    f"{self.address} answers with {self._sentences.quote(kind, 60) or 'no type'} "
                    "where a stream of events was asked for; is it an OpenAI-compatible server?"
                )
            yield map(self._clean, stream)
        finally:
            with suppress(Exception):  # what is wrong with it has been raised already
                stream.response.close()

    def request(self, doing: str, cut: Cut | None = None) -> Request:
        """Errors of the network and of the server in what is done within, see :class:`Request`.

        Args:
            cut: what ends it; None is that of a request around this one, if there is one.
            doing: what is waited for, for a sentence: ``the answer``, ``the list of models``.

        Raises:
            ServingError: the wire was closed.
        """
        if cut is not None:
            self._cuts.add(cut)
        if self._closed:
            raise ServingError(f"this client of {self.address} was closed; make another: Client(…)")
        return Request(self._current, self._sentences, doing, cut)

    def hide(self, text: str) -> str:
        """``text`` without the key: one that came in parts is found when they are together."""
        return text if self._key is None else self._key.hide(text)

    def _clean(self, document: Any) -> Any:
        """What a server sent, without the key."""
        if self._key is None:
            return document
        if isinstance(document, str):
            return self._key.hide(document)
        if isinstance(document, list):
            return [self._clean(one) for one in document]
        if isinstance(document, dict):
            return {self.hide(str(name)): self._clean(one) for name, one in document.items()}
        return document

    def _sent(self) -> None:
        """Whatever is sent next in this thread, by whoever reads an answer, is another's."""
        self._current.cut = None

    def _outgoing(self, request: httpx2.Request) -> None:
        """Last look at a request."""
        if _origin(request.url) != self._origin:
            raise ServingError(f"{short(request.url.host, 80)} is another host; nothing was sent")
        for name in list(request.headers):
            if name.lower() not in _HEADERS:
                del request.headers[name]
        request.headers["User-Agent"] = "beam-workbench"
        request.headers["Accept-Encoding"] = "identity"  # a stream comes as it is written
        if self._key is not None:
            request.headers["Authorization"] = self._key.header
        cut: Cut | None = getattr(self._current, "cut", None)
        if cut is not None:
            request.extensions = {**request.extensions, "trace": cut.watch}

    def _incoming(self, response: httpx2.Response) -> None:
        if 300 <= response.status_code < 400:
            raise ServingError(self._sentences.redirect(response.headers.get("location")))
        coding = response.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            raise ServingError(
                f"{self.address} answers in a compressed form, which was not asked for; is it an "
                "OpenAI-compatible server?"
            )
        kind = response.headers.get("content-type", "")
        events = response.status_code == 200 and "event-stream" in kind
        response.stream = bounded(response.stream, events=events, where=str(self.address))
        response.encoding = "utf-8"  # JSON is; what a server says of it may name any codec


def _verified(address: Address) -> ssl.SSLContext | bool:
    """By which certificates a server is known; there is nothing to load where none is asked for."""
    if address.scheme == "https" and os.environ.get("SSL_CERT_FILE"):
        # Also for this machine, of whose environment nothing else is heard.
        return ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
    return address.scheme == "https"


def _origin(url: httpx2.URL) -> tuple[str, str, int]:
    """Scheme, host and port."""
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)
