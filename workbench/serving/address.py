"""``Address``: the base URL of a server, checked before anything is sent to it."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from workbench.errors import ServingError

_PORTS = {"http": 80, "https": 443}
_EXAMPLE = "give one like http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is.

    Attributes:
        scheme: ``http`` or ``https``.
        host: a name or a numeric address, without brackets.
        port: 1 to 65535.
        path: what stands before every path of the server, "" or ``/like/this``.
    """

    scheme: str
    host: str
    port: int
    path: str = ""

    @classmethod
    def of(cls, given: str | Address, *, foreign: bool = False) -> Address:
        """The address in a text; one that is checked already goes through the same check.

        ``http://`` may be left out, and a last ``/v1`` or ``/metrics`` is taken off: people paste
        what they have.

        Args:
            given: ``http://127.0.0.1:8000``, ``localhost:8000`` …
            foreign: whether a host that is not this machine may be asked.

        Raises:
            ServingError: it is no such address, names a user or a password, or another machine.
        """
        text = given.url if isinstance(given, Address) else given
        if not isinstance(text, str):
            raise ServingError(f"a server's address is text, not {text!r:.60}; {_EXAMPLE}")
        text = text.strip()
        if "://" not in text:
            text = f"http://{text}"
        if any(ord(sign) <= 32 or sign == "\\" for sign in text):
            raise ServingError(f"{text!r:.80} has blanks or control characters; {_EXAMPLE}")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ServingError(f"{text!r:.80} is no address ({error}); {_EXAMPLE}") from None
        if parts.scheme not in _PORTS:
            raise ServingError(f"a server speaks http or https, not {parts.scheme!r:.40}")
        if parts.username is not None or parts.password is not None:
            raise ServingError(
                "a server's address names no user and no password: they end in logs; give an API "
                "key in the environment instead"
            )
        if not parts.hostname or parts.query or parts.fragment or port == 0:
            raise ServingError(f"{text!r:.80} is no server's address; {_EXAMPLE}")
        path = parts.path.rstrip("/")
        for end in ("/v1", "/metrics"):
            path = path.removesuffix(end)
        made = cls(
            scheme=parts.scheme,
            host=parts.hostname,
            port=port or _PORTS[parts.scheme],
            path=path.rstrip("/"),
        )
        if made.host in ("0.0.0.0", "::") and not foreign:  # what servers say of themselves
            raise ServingError(
                f"{made.host} is not this machine alone, it is every network of one; to ask a "
                "server here give http://127.0.0.1 with its port, to listen there say foreign=True "
                "(--foreign)"
            )
        if not (foreign or made.loopback):
            raise ServingError(
                f"{made.host} is not this machine; say foreign=True (--foreign) if it is meant, or "
                "forward its port here with ssh -L"
            )
        return made

    @property
    def loopback(self) -> bool:
        """Whether it is this machine, by its name or number: nothing is looked up."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """Without a slash at the end; paths are put behind it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def __str__(self) -> str:
        return self.url
