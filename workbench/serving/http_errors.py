"""What went wrong between here and a server, as one sentence: what, where, what to do.

What a server says is passed on, printable and short, and without the key that it was sent.
"""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.request import getproxies

from workbench.serving.address import Address
from workbench.serving.api_key import VARIABLE, ApiKey
from workbench.serving.client.json_check import short

_START = "one is started with: workbench serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentences:
    """Sentences about one server.

    Attributes:
        key: what was sent, None for none.
        timeout: seconds of silence that were waited.
    """

    address: Address
    key: ApiKey | None
    timeout: float

    def quote(self, text: object, most: int = 300) -> str:
        """Somebody else's words. The key goes first: half of one would not be found."""
        words = str(text)
        return short(words if self.key is None else self.key.hide(words), most)

    def redirect(self, location: str | None) -> str:
        """About an answer that points elsewhere."""
        return (
            f"{self.address} redirects to {self.quote(location or 'nowhere', 120)}, which is not "
            "followed, and nothing was sent there; give the address of the server itself"
        )

    def about(self, error: Exception, doing: str) -> str | None:
        """About an error of the ``openai`` package; None where it is no matter of the network.

        Args:
            doing: what was waited for: ``the answer``.
        """
        import openai

        if isinstance(error, openai.APITimeoutError):
            return self._late(error, doing)
        if isinstance(error, openai.APIConnectionError):
            return self._unreachable(error, doing)
        if isinstance(error, openai.APIStatusError):
            return self._refused(error)
        if isinstance(error, openai.APIError):  # in the middle of a stream
            body = error.body if isinstance(error.body, dict) else {"error": error.body}
            said = self.quote(_said(body) or error.message)
            return f"{self.address} reports an error instead of {doing}: {said}"
        if isinstance(error, ValueError | RecursionError):  # a number may be too long, too
            return (
                f"{self.address} sent what is no JSON in the middle of {doing} "
                f"({self.quote(error, 80)}); is it an OpenAI-compatible server?"
            )
        return None

    def unknown(self, error: Exception, doing: str) -> str:
        """About an error that nobody thought of: whatever a server can do, it is a sentence."""
        return (
            f"{self.address} sent what could not be read in the middle of {doing} "
            f"({type(error).__name__}: {self.quote(error, 80)}); please report it"
        )

    def _late(self, error: Exception, doing: str) -> str:
        import httpx2

        if isinstance(error.__cause__, httpx2.ConnectTimeout | httpx2.PoolTimeout):
            return f"{self.address} did not accept a connection in time; is the address right?"
        return (
            f"{self.address} sent nothing for {self.timeout:g} s, and {doing} was given up; if it "
            "is only busy, wait longer: timeout="
        )

    def _unreachable(self, error: Exception, doing: str) -> str:
        import httpx2

        cause = error.__cause__
        why = self.quote(cause or error, 120)
        if isinstance(cause, httpx2.ConnectError):
            if (refused := _within(cause, ssl.SSLError)) is not None:
                return certificate(self.address, refused)
            if not self.address.loopback and getproxies():
                return (
                    f"{self.address}, or the proxy that the environment names on the way there, "
                    f"cannot be reached ({why}); is the server up, and the proxy meant?"
                )
            return f"nothing answers at {self.address} ({why}); is the server up? {_START}"
        if isinstance(cause, httpx2.ProxyError | httpx2.UnsupportedProtocol):
            return f"{self.address} cannot be reached ({why}); check the proxy"
        silent = ("illegal", "without sending a response")
        if isinstance(cause, httpx2.RemoteProtocolError) and any(w in str(cause) for w in silent):
            return (
                f"what is at {self.address} does not speak HTTP, or went away at once ({why}); is "
                "the port right, and the server up?"
            )
        return (
            f"{self.address} ended the connection in the middle of {doing} ({why}); look into the "
            "server's log, and ask again"
        )

    def _refused(self, error: Any) -> str:
        code, said = error.status_code, self.quote(_said(error.body))
        words = f": {said}" if said else ""
        if code in (401, 403):
            if self.key is None:
                return (
                    f"{self.address} wants an API key ({code}); set the environment variable "
                    f"{VARIABLE} before, or say key='ask'"
                )
            source = self.key.source
            return f"{self.address} does not take the key from {source} ({code}); set the right one"
        if code == 404:
            hint = "" if said else "; is it an OpenAI-compatible server, and its address complete?"
            return f"{self.address} does not have what was asked for (404){words}{hint}"
        if code == 429:
            return f"{self.address} has too much to do (429){words}; ask again later"
        if code >= 500:
            return f"{self.address} failed ({code}){words}; look into the server's log"
        return f"{self.address} refuses the request ({code}){words}"


def _within(error: BaseException, kind: type[Exception]) -> Exception | None:
    """The error of this kind from which another one came."""
    seen: BaseException | None = error
    for _ in range(8):
        if seen is None or isinstance(seen, kind):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def certificate(address: Address, error: Exception) -> str:
    """About an encrypted connection that could not be made."""
    reason = getattr(error, "verify_message", "") or getattr(error, "reason", "") or str(error)
    why = short(reason, 120)
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"{address} has a certificate that is not trusted ({why}), and nothing was sent there; "
            "name its authority's file in SSL_CERT_FILE, or forward its port here with ssh -L"
        )
    return (
        f"{address} does not speak https as it should ({why}); is the scheme right? A server "
        "without a certificate is http://"
    )


def _said(body: object) -> str:
    """What a server says is wrong: OpenAI's form, that of older vLLMs, FastAPI's, in this order.

    The ``openai`` package has taken the outermost ``error`` off where there was one.
    """
    if not isinstance(body, dict):
        return ""
    inner = body.get("error", body)
    for name in ("message", "detail", "error"):
        said = inner.get(name) if isinstance(inner, dict) else inner
        if isinstance(said, str) and said:
            return said
        if isinstance(said, list) and said:
            return json.dumps(said[0])
    return ""
