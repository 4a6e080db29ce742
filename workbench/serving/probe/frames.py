"""Frames between the engine and its writer: values by name, and arrays as they lie in memory.

A frame is two sizes (of all that follows, and of the JSON in it), the JSON, and the bytes of the
arrays, which the JSON lists. It never leaves the machine, so numbers have its own byte order.

Values that are other ones in each frame may lie in arrays too, ``counts`` and ``times``, so that
the JSON stays the same: it then says whose they are (``fields``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Arrays: TypeAlias = Mapping[str, tuple[str, bytes]]  # kind as the array module names it, bytes
_SIZES = struct.Struct("=II")
MOST = 64 * 2**20  # bytes of a frame; a pass of 1,024 requests with 16 drafts has about 0.5 MiB
_KINDS = {"f": 4, "d": 8, "i": 4, "q": 8, "?": 1}


def pack(values: Mapping[str, Any], arrays: Arrays | None = None) -> bytes:
    """One frame.

    Args:
        values: JSON values by name.
        arrays: of float32 ``f``, float64 ``d``, int32 ``i``, int64 ``q`` or bool ``?``, flat.
    """
    given = arrays or {}
    layout = [[name, kind, len(data)] for name, (kind, data) in given.items()]
    return framed(dumped([values, layout]), *(data for _, data in given.values()))


def dumped(values: Any) -> bytes:
    """Their JSON."""
    return json.dumps(values, separators=(",", ":")).encode("ascii")


def framed(text: bytes, *data: bytes | memoryview) -> bytes:
    """One frame of its JSON, ``[values, layout]``, and of the arrays in the layout's order."""
    size = len(text) + sum(map(len, data))
    return b"".join((_SIZES.pack(size, len(text)), text, *data))


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        """Nothing was read yet."""
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], dict[str, list[Any]]]]:
        """The frames that are whole with these bytes: values, and arrays as flat lists.

        Raises:
            ValueError: this is no frame.
        """
        self._held += data
        while len(self._held) >= _SIZES.size:
            size, text = _SIZES.unpack_from(self._held)
            if not text <= size <= MOST:
                raise ValueError(f"a frame of {size:,} bytes with {text:,} of JSON")
            if len(self._held) < _SIZES.size + size:
                return
            frame = bytes(self._held[_SIZES.size : _SIZES.size + size])
            del self._held[: _SIZES.size + size]
            yield _unpack(frame, text)


def _unpack(frame: bytes, text: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    values, layout = json.loads(frame[:text])
    arrays: dict[str, list[Any]] = {}
    at = text
    for name, kind, size in layout:
        if kind not in _KINDS or size % _KINDS[kind] or at + size > len(frame):
            raise ValueError(f"array {name!r:.40} of a frame has {size} bytes of kind {kind!r:.8}")
        arrays[name] = memoryview(frame[at : at + size]).cast(kind).tolist()
        at += size
    for kind, names in values.pop("fields", {}).items():
        numbers = iter(arrays.pop(kind))
        for name, many in names:  # 0: a number, not a list
            found = [next(numbers) for _ in range(many)] if many else next(numbers)
            if name:
                values[name] = found
    return values, arrays
