"""How much of a server's answer is read: an endless one ends in a sentence, not in the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from workbench.errors import ServingError

DOCUMENT = 64 * 2**20  # bytes of an answer that comes whole; a million tokens are some 5 MB
EVENT = 16 * 2**20  # bytes of one event of a stream, and of one line
LETTERS = 32 * 2**20  # of all text of one answer


def bounded(found: Any, *, events: bool, where: str) -> Any:
    """``found``, the bytes of an answer, with a limit: that of one event in a stream of ``events``,
    or of the whole of any other answer.

    Reading beyond it raises a ServingError that begins with ``where``.
    """
    import httpx2

    class Bounded(httpx2.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            return _events(found, where) if events else _whole(found, where)

        def close(self) -> None:
            found.close()

    return Bounded()


def _whole(found: Iterable[bytes], where: str) -> Iterator[bytes]:
    size = 0
    for piece in found:
        size += len(piece)
        if size > DOCUMENT:
            raise too_long(where, f"an answer of more than {DOCUMENT:,} bytes")
        yield piece


def _events(found: Iterable[bytes], where: str) -> Iterator[bytes]:
    size, last = 0, b""
    for piece in found:
        # An event ends with a blank line; one that ends between two pieces is seen by its end.
        end = max((last + piece).rfind(blank) for blank in (b"\n\n", b"\r\r", b"\r\n\r\n"))
        size = size + len(piece) if end < 0 else len(last) + len(piece) - end
        if size > EVENT:
            raise too_long(where, f"an event of more than {EVENT:,} bytes")
        last = piece[-3:]
        yield piece


def too_long(where: str, what: str) -> ServingError:
    """About an answer of which no more is read."""
    return ServingError(f"{where} sends {what}, and no more of it was read; ask for less")
