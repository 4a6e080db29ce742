"""``TraceWriter``: lines of a trace file, each written whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from workbench.errors import TraceError
from workbench.files import FileError, expand
from workbench.spec.positions import Position
from workbench.spec.step import Step
from workbench.spec.trace_lines import check_header, encode


class TraceWriter:
    """Writes a trace as the run goes; a context manager.

    Each line is one unbuffered write, taken back if it fails or is interrupted, so the file ends
    with a whole line at any moment.
    """

    def __init__(
        self, path: str | os.PathLike[str], header: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        """Make the file and write the header.

        Raises:
            TraceError: the file exists and ``overwrite`` is false, it cannot be made, or the header
                is none of :func:`header`.
        """
        check_header(header, "the header given")
        first = encode(header, "the header")
        try:
            self.path = expand(path)
        except FileError as error:
            raise TraceError(str(error)) from error
        self.lines = 0  # steps or positions written
        self._mode = header["mode"]
        self._end = 0  # bytes that are whole lines
        self._descriptor: int | None = self._open(overwrite)
        try:
            self._append(first)
        except BaseException:
            self.close()
            if not overwrite:  # it was made just now, and says nothing
                with suppress(OSError):
                    self.path.unlink()
            raise

    def write(self, line: Step | Position) -> None:
        """Append one step (or position, in that mode).

        Raises:
            TraceError: it has a time or a count that is not finite, or the file cannot be written;
                what it holds by then stays readable. Scores may be what they are.
        """
        wanted = Step if self._mode == "steps" else Position
        if not isinstance(line, wanted):
            raise TraceError(
                f"a trace of mode {self._mode} takes a {wanted.__name__} a line, "
                f"not a {type(line).__name__}"
            )
        self._append(encode(line.to_dict(), f"line {self.lines + 2}"))
        self.lines += 1

    def close(self) -> None:
        """Close the file; writing is over. It may be called again.

        Raises:
            TraceError: the system says only now that the last lines did not reach the disk.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            os.close(descriptor)
        except OSError as error:
            raise TraceError(
                f"{self.path} may lack its last lines ({error.strerror or error}); "
                "look at the disk it is on"
            ) from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, overwrite: bool) -> int:
        # Appending, so that a line lands at the end also after one was taken back.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        try:
            if overwrite and self.path.exists():
                if not stat.S_ISREG(self.path.stat().st_mode):
                    raise TraceError(
                        f"{self.path} is not a regular file; give the trace another name"
                    )
                return os.open(self.path, flags | os.O_TRUNC, 0o666)
            return os.open(self.path, flags | os.O_EXCL, 0o666)
        except FileExistsError as error:
            raise TraceError(
                f"{self.path} exists already; give the trace another name, or say that it may be "
                "overwritten"
            ) from error
        except FileNotFoundError as error:
            raise TraceError(
                f"{self.path} cannot be written: its folder does not exist; make that first"
            ) from error
        except OSError as error:
            raise TraceError(
                f"{self.path} cannot be written ({error.strerror or error}); "
                "give the trace another name"
            ) from error
        except TraceError:
            raise
        except ValueError as error:  # a NUL in the name
            raise TraceError(f"{self.path} cannot be written ({error})") from error

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            raise TraceError(f"{self.path} is closed; a trace is written in one go")
        try:
            written = 0
            while written < len(line):  # one write, unless the disk is nearly full
                written += os.write(self._descriptor, line[written:])
            self._end += len(line)
        except BaseException as error:  # an interrupt too: half a line must not stay
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            if not isinstance(error, OSError):
                raise
            self.close()
            raise TraceError(
                f"{self.path} cannot be written any further ({error.strerror or error}); make "
                f"room and record again (lines that can be read, header apart: {self.lines:,})"
            ) from error
