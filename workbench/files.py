"""Files of the command line: written whole or not at all, and errors in one sentence."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from workbench.errors import WorkbenchError


class FileError(WorkbenchError):
    """A file that cannot be read or written; the message names it."""


def write_whole(path: str | Path, data: bytes) -> None:
    """Write ``data`` to ``path``, or leave what is there as it is.

    The bytes go to a hidden file beside it first, which takes its place once it is on the disk.

    Raises:
        FileError: the folder is missing or not writable, the disk is full, the path is a folder.
    """
    path = Path(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}"
    try:
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise FileError(
            f"{path} cannot be written ({error.strerror or error}); nothing was written there"
        ) from error


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, exactly; ``-`` reads standard input.

    Raises:
        FileError: it cannot be read, or is not UTF-8.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror or error}); give a text file"
        ) from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it first"
        ) from error
