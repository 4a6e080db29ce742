"""``ApiKey``: a key for a server, from the environment or a prompt, that no text shows."""

from __future__ import annotations

import os
import re
from getpass import getpass

from workbench.errors import ServingError

VARIABLE = "VLLM_API_KEY"  # what vLLM itself reads its key from
ASK = "ask"
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_SHORTEST = 4  # letters that are looked for in texts; any shorter would hide half of them


class ApiKey:
    """A key and where it is from. Neither ``repr`` nor a format shows it.

    Attributes:
        source: the name of an environment variable, or ``ask``.
    """

    __slots__ = ("_secret", "source")

    def __init__(self, secret: str, source: str) -> None:
        """Keep a key.

        Raises:
            ServingError: it is empty, or cannot stand in a header.
        """
        self.source = source  # first: a frame of a traceback may show what was half made
        sound = bool(secret) and all(33 <= ord(sign) < 127 for sign in secret)
        if not sound:
            del secret  # a traceback may be shown with the names and values of its frames
            where = "typed" if source == ASK else f"in {source}"
            raise ServingError(
                f"the key {where} is empty or has blanks or signs that no header takes; set it anew"
            )
        self._secret = secret

    def __repr__(self) -> str:
        return f"ApiKey(from {self.source})"

    def __reduce__(self) -> str:
        raise TypeError("a key is not written anywhere")

    @property
    def header(self) -> str:
        """The value of the ``Authorization`` header."""
        return f"Bearer {self._secret}"

    def within(self, data: bytes) -> bool:
        """Whether the key stands in what a server sent."""
        return len(self._secret) >= _SHORTEST and self._secret.encode() in data

    def hide(self, text: str) -> str:
        """``text`` without the key: a server may repeat what it was sent."""
        return text.replace(self._secret, "…") if len(self._secret) >= _SHORTEST else text


def find_key(given: str | None) -> ApiKey | None:
    """The key that ``given`` stands for.

    Args:
        given: the name of an environment variable, ``ask`` for a prompt, or None for no key. Of
            :data:`VARIABLE`, the default, nobody needs to have heard: where it is not set there is
            no key.

    Raises:
        ServingError: the variable is not set, or what was given is no name of one.
    """
    if given is None:
        return None
    if given == ASK:
        try:
            return ApiKey(getpass("API key: ").strip(), ASK)
        except (EOFError, OSError):
            pass
        raise ServingError(
            f"there is nobody to ask for a key; set the environment variable {VARIABLE}"
        )
    if not isinstance(given, str) or not _NAME.fullmatch(given):
        del given  # perhaps it is a key: it is not repeated, in no frame of a traceback either
        raise ServingError(
            "key is the name of an environment variable, in capitals, or 'ask' for a prompt; a key "
            "itself does not belong into a notebook"
        )
    if not os.environ.get(given, "").strip():
        if given == VARIABLE:
            return None
        raise ServingError("the environment variable that key names is not set; set it before")
    return ApiKey(os.environ[given].strip(), given)
