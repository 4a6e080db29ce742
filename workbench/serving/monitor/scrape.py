"""``Scraper``: one connection to a server, asked again and again within bounds.

No redirect is followed, no proxy is asked, an answer is at most 16 MB and has to be there within
ten seconds, however slowly it comes. An API key is taken from the environment for each request and
kept nowhere.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from workbench.errors import ServingError
from workbench.serving.address import Address
from workbench.serving.api_key import VARIABLE as KEY_VARIABLE
from workbench.serving.api_key import ApiKey, find_key
from workbench.serving.http_errors import certificate

LIMIT = 16 * 2**20  # bytes of an answer
CONNECT_SECONDS, READ_SECONDS, WHOLE_SECONDS = 2.0, 5.0, 10.0
_PIECE = 1 << 16
_LONGEST_VERSION = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came, and when its first line did: wall time since 1970, and :func:`clock`."""

    body: bytes
    at: float
    clock: float


def clock() -> float:
    """Seconds on a clock that is never set and goes on while the machine sleeps, where there is
    one: the server's counters go on meanwhile."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class Scraper:
    """GET requests to one server over a connection that is kept. For one thread;
    :meth:`abort` may come from another."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None  # the connection lets go of it before the end
        self._late = False
        self._aborted = False

    def get(self, path: str, *, limit: int = LIMIT) -> Answer:
        """The answer to one request.

        Raises:
            ServingError: there is none, or one that is not meant: a redirect, an error status,
                more than ``limit`` bytes, fewer than announced.
        """
        where = self.address.url + path
        self._late = False
        watch = threading.Timer(WHOLE_SECONDS, self._give_up)
        watch.daemon = True
        watch.start()
        kept = self._connection is not None
        done = False
        try:
            try:
                answer = self._ask(path, where, limit)
            except ConnectionError:
                # A server closes what was idle for long: the second time is meant.
                if not kept or self._late or self._aborted:
                    raise
                self.close()
                answer = self._ask(path, where, limit)
            if self._late:
                raise TimeoutError
            if self._aborted:  # what ends with its connection looks whole
                raise ConnectionAbortedError
            done = True
            return answer
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            why = self._why(TimeoutError() if self._late else error, where)
            raise ServingError(why) from None
        finally:
            watch.cancel()
            if not done:
                self.close()

    def version(self) -> str | None:
        """The version that a vLLM server says it has; None where it says nothing of the kind."""
        try:
            found = json.loads(self.get("/version", limit=1 << 12).body)
        except (ServingError, ValueError, RecursionError):
            return None
        version = found.get("version") if isinstance(found, dict) else None
        if not isinstance(version, str) or not 0 < len(version) <= _LONGEST_VERSION:
            return None
        return version if version.isascii() and version.isprintable() else None

    def abort(self) -> None:
        """End a request that is under way, from any thread; there will be no other."""
        self._aborted = True
        self._shut()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            with suppress(OSError):
                connection.close()

    def _ask(self, path: str, where: str, limit: int) -> Answer:
        key = _key(self.address)
        connection = self._connect()
        connection.request("GET", self.address.path + path, headers=_headers(key))
        response = connection.getresponse()
        at, when = time.time(), clock()
        with response:
            self._check(response, where, limit, key)
            announced = response.length  # None of an answer in chunks, or one that just ends
            pieces, size = [], 0
            while piece := response.read1(_PIECE):
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise ServingError(f"{where} is longer than {limit:,} bytes; it was not read")
                if size == announced:
                    break
        if announced is not None and size < announced:
            raise http.client.IncompleteRead(b"", announced - size)
        body = b"".join(pieces)
        if key is not None and key.within(body):
            raise ServingError(f"{where} repeats the API key that it was sent; it was not read")
        return Answer(body=body, at=at, clock=when)

    def _connect(self) -> http.client.HTTPConnection:
        # One that the server said it would close has let go of its socket: it is made anew here,
        # since what the library would open by itself could not be ended from elsewhere.
        if self._connection is None or self._connection.sock is None:
            self.close()
            secure = self.address.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = kind(self.address.host, self.address.port, timeout=CONNECT_SECONDS)
            self._connection = connection
            connection.connect()
            self._socket = connection.sock
            self._socket.settimeout(READ_SECONDS)
            if self._aborted:
                raise ConnectionAbortedError
        return self._connection

    def _check(
        self, response: http.client.HTTPResponse, where: str, limit: int, key: ApiKey | None
    ) -> None:
        status = response.status
        if status == 200:
            coding = response.headers.get("Content-Encoding", "identity")
            if coding.strip().lower() not in ("", "identity"):
                raise ServingError(f"{where} came compressed, which was not asked for")
            if (response.length or 0) > limit:
                raise ServingError(f"{where} is longer than {limit:,} bytes; it was not read")
            return
        said = f"{where} answers {status}"
        if 300 <= status < 400:
            there = response.headers.get("Location", "")
            if key is not None:
                there = key.hide(there)
            raise ServingError(
                f"{said}, a redirect to {there[:80]!r}, which is not followed; give the address "
                "itself if it is the right one"
            )
        if status in (401, 403):
            if key is None and os.environ.get(KEY_VARIABLE):
                raise ServingError(
                    f"{said}: it wants an API key, and none is sent over plain http to another "
                    "machine; use https, or forward its port here with ssh -L"
                )
            told = f"refuses the key in {KEY_VARIABLE}" if key else "wants an API key"
            raise ServingError(f"{said}: it {told}; set {KEY_VARIABLE} in the environment")
        if status == 404:
            raise ServingError(f"{said}: there is no such page; give the address of a vLLM server")
        raise ServingError(f"{said}; look at the server's log")

    def _give_up(self) -> None:
        self._late = True
        self._shut()

    def _shut(self) -> None:
        sock = self._socket
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _why(self, error: BaseException, where: str) -> str:
        if isinstance(error, TimeoutError):
            return f"{where} did not answer in time; the server may be busy or gone"
        if isinstance(error, ssl.SSLError):
            return certificate(self.address, error)
        if isinstance(error, socket.gaierror | UnicodeError):
            return f"no machine is known by the name {self.address.host!r:.80}; check the address"
        if isinstance(error, ConnectionRefusedError):
            return f"nothing answers at {self.address} (connection refused); is the server running?"
        if isinstance(error, http.client.IncompleteRead):
            return f"{where} was cut: the server ended it before its end"
        if isinstance(error, ConnectionError):  # RemoteDisconnected among them
            return f"{self.address} closed the connection without an answer; is the server ending?"
        if isinstance(error, http.client.HTTPException):
            return f"{self.address} does not speak HTTP as it should; check scheme and port"
        strerror = error.strerror if isinstance(error, OSError) else None
        return f"{self.address} cannot be reached ({strerror or type(error).__name__})"


def _key(address: Address) -> ApiKey | None:
    """The key to send there, None where none is.

    Raises:
        ServingError: it has characters that no key has.
    """
    if address.scheme == "http" and not address.loopback:
        return None  # everybody on the way could read it
    return find_key(KEY_VARIABLE)


def _headers(key: ApiKey | None) -> dict[str, str]:
    made = {
        "Accept": "text/plain;version=0.0.4, */*;q=0.1",
        "Accept-Encoding": "identity",
        "User-Agent": "beam-workbench",
    }
    return made | ({"Authorization": key.header} if key is not None else {})
