"""Files a user names: written whole or not at all, read within bounds, errors in one sentence."""

from __future__ import annotations

import json
import os
import stat
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError

CACHE_VARIABLE = "BEAM_WORKBENCH_CACHE"
LIMIT = 64 * 2**20  # bytes; no text or JSON file that is read whole comes near it


class FileError(WorkbenchError):
    """A file that cannot be read or written; the message names it."""


def expand(path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` and ``~user`` replaced by the home folder.

    Raises:
        FileError: it is not a path, or there is no such user.
    """
    try:
        return Path(path).expanduser()
    except TypeError as error:
        raise FileError(f"{path!r} is not a path; give a string or a pathlib.Path") from error
    except RuntimeError as error:
        raise FileError(
            f"{path} starts with the home folder of a user who is not known here; "
            "write the folder out in full"
        ) from error


def cache_folder() -> Path:
    """Where what can be made again is kept: ``$BEAM_WORKBENCH_CACHE``, or the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "beam-workbench"


def is_folder(path: Path) -> bool:
    """Whether the folder is there; false for a name that no file system can hold, too."""
    return os.path.isdir(path)  # Path.is_dir raises for a name that is too long


def write_whole(path: str | Path, data: bytes) -> None:
    """Write ``data`` to ``path``, or leave what is there as it is.

    The bytes go to a hidden file beside it first, which takes its place once it is on the disk. A
    symbolic link stays, and what it points to is written. A character device (``/dev/null``) cannot
    be replaced without destroying it, so it is written into.

    Raises:
        FileError: the folder is missing or not writable, the disk is full, the path is a folder,
            a pipe, a socket or a disk.
    """
    path = Path(path)
    try:
        try:
            mode: int | None = path.stat().st_mode
        except FileNotFoundError:
            mode = None
        if mode is not None and stat.S_ISCHR(mode):
            with path.open("wb", buffering=0) as device:
                device.write(data)
            return
        if mode is not None and not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise FileError(f"{path} cannot be written: it is {kind}; give the name of a file")
        _replace(Path(os.path.realpath(path)), data)
    except FileNotFoundError as error:
        raise FileError(
            f"{path} cannot be written: its folder does not exist; make that first"
        ) from error
    except OSError as error:
        raise FileError(
            f"{path} cannot be written ({error.strerror or error}); nothing was written there"
        ) from error
    except FileError:
        raise
    except ValueError as error:  # a NUL in the name
        raise FileError(f"{path} cannot be written ({error}); choose another name") from error


def _replace(target: Path, data: bytes) -> None:
    # Of a fixed length, however long the name: 255 bytes are all that a file system allows.
    tag = zlib.crc32(os.fsencode(target.name))
    temporary = target.parent / f".{tag:08x}.{os.getpid()}.part"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file of at most 64 MiB, exactly; ``-`` reads standard input.

    Raises:
        FileError: it cannot be read, is larger, or is not UTF-8.
    """
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise FileError("standard input is closed; give a file or pipe a text in")
            data = sys.stdin.buffer.read(LIMIT + 1)
        else:
            with Path(path).open("rb") as file:  # a pipe is welcome: bash makes them of <(command)
                data = file.read(LIMIT + 1)
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror or error}); give a text file"
        ) from error
    if len(data) > LIMIT:
        raise FileError(f"{path} holds more than {LIMIT:,} bytes; give a smaller text file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it first"
        ) from error


def read_json(path: Path) -> Any:
    """The value in a JSON file: a regular file of at most 64 MiB.

    Raises:
        FileError: it cannot be read, or holds no JSON that can be parsed.
    """
    try:
        found = path.stat()  # before it is opened, which on a pipe would wait for a writer
        if not stat.S_ISREG(found.st_mode):
            raise FileError(f"{path} is not a regular file; restore it")
        if found.st_size > LIMIT:
            raise FileError(f"{path} has more than {LIMIT:,} bytes; restore it")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read ({error.strerror or error}); restore it") from error
    except FileError:
        raise
    except RecursionError as error:
        raise FileError(f"{path} is nested too deeply; restore it") from error
    except ValueError as error:
        raise FileError(f"{path} is not valid JSON ({error}); restore it") from error
