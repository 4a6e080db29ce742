"""Recordings of a monitor: JSON lines, readable at any moment up to the last whole line.

The first line is a header: which server, how often, when and where. Further lines have a ``kind``:
``sample`` (:meth:`workbench.serving.monitor.sample.Sample.to_dict`) or ``server`` (what the server
says of itself). A line reaches the file in one write. Reading takes a file for data and nothing
else; a line that is not what it should be is skipped and counted.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from workbench.errors import ServingError, TraceError
from workbench.files import FileError, expand
from workbench.serving.address import Address
from workbench.serving.monitor.sample import Sample
from workbench.spec import trace_lines

FORMAT, VERSION = "beam-workbench-serving", 1


def header(address: Address, *, hertz: float) -> dict[str, Any]:
    """The header of a recording of this server that begins now; hardware only of this machine."""
    from workbench import hardware

    made: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "address": address.url,
        "hertz": hertz,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": None,
    }
    if address.loopback:
        made["hardware"] = {
            "cpu": hardware.cpu_name(),
            "cores": hardware.usable_cores(),
            "memory_bytes": hardware.usable_memory(),
            "gpus": list(hardware.driver_gpus()),
        }
    return made


class SampleWriter:
    """Writes a recording as it goes, from any thread; a context manager.

    A line is one unbuffered write, taken back if it fails, so the file ends with a whole line at
    any moment.
    """

    def __init__(
        self, path: str | os.PathLike[str], head: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        """Make the file and write the header.

        Raises:
            ServingError: the file exists and ``overwrite`` is false, or it cannot be written.
        """
        try:
            self.path = expand(path)
        except FileError as error:
            raise ServingError(str(error)) from error
        self.lines = 0  # samples
        self._lock = threading.Lock()
        self._end = 0  # bytes that are whole lines
        self._descriptor: int | None = self._open(overwrite)
        try:
            self._append(head)
        except BaseException:
            self._shut()
            if not overwrite:  # it was made just now, and says nothing
                with suppress(OSError):
                    self.path.unlink()
            raise

    def write(self, sample: Sample) -> None:
        """Append a sample.

        Raises:
            ServingError: the file cannot be written any further, or is closed.
        """
        self._append({"kind": "sample", **sample.to_dict()})
        self.lines += 1

    def server(self, version: str | None) -> None:
        """Append what the server says of itself.

        Raises:
            ServingError: the file cannot be written any further, or is closed.
        """
        self._append({"kind": "server", "version": version})

    def close(self) -> None:
        """Close the file; it may be called again.

        Raises:
            ServingError: the system says only now that the last lines did not reach the disk.
        """
        try:
            self._shut()
        except OSError as error:
            raise ServingError(
                f"{self.path} may lack its last lines ({error.strerror or error}); "
                "look at the disk it is on"
            ) from error

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _shut(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self, overwrite: bool) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        try:
            if overwrite and self.path.exists():
                if not stat.S_ISREG(self.path.stat().st_mode):
                    raise ServingError(
                        f"{self.path} is not a regular file; give the recording another name"
                    )
                return os.open(self.path, flags | os.O_TRUNC, 0o666)
            return os.open(self.path, flags | os.O_EXCL, 0o666)
        except FileExistsError as error:
            raise ServingError(
                f"{self.path} exists already; give the recording another name"
            ) from error
        except OSError as error:
            raise ServingError(
                f"{self.path} cannot be written ({error.strerror or error}); "
                "give the recording another name"
            ) from error
        except ServingError:
            raise
        except ValueError as error:  # a NUL in the name
            raise ServingError(f"{self.path} cannot be written ({error})") from error

    def _append(self, value: Mapping[str, Any]) -> None:
        try:
            line = trace_lines.encode(value, "a line")
        except TraceError as error:
            raise ServingError(f"{self.path}: {error}") from error
        with self._lock:
            if self._descriptor is None:
                raise ServingError(f"{self.path} is closed; record into another file")
            try:
                written = 0
                while written < len(line):  # one write, unless the disk is nearly full
                    written += os.write(self._descriptor, line[written:])
                self._end += len(line)
            except BaseException as error:  # an interrupt too: half a line must not stay
                descriptor = self._descriptor
                with suppress(OSError):
                    os.ftruncate(descriptor, self._end)
                if not isinstance(error, OSError):
                    raise
                self._descriptor = None
                with suppress(OSError):
                    os.close(descriptor)
                raise ServingError(
                    f"recording ended: {self.path} cannot be written any further "
                    f"({error.strerror or error}); it has {self.lines:,} samples, all whole"
                ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a recording holds.

    Attributes:
        header: its first line.
        samples: in the order of the file.
        version: the engine's, as it said last; None where it did not.
        skipped: lines that could not be read.
    """

    header: Mapping[str, Any]
    samples: tuple[Sample, ...]
    version: str | None
    skipped: int

    @property
    def source(self) -> str:
        """Where the figures come from, in words: recorded, on what, with which engine, when."""
        machine = self.header.get("hardware")
        known: list[str] = []
        if isinstance(machine, Mapping):
            gpus = machine.get("gpus")
            listed = gpus if isinstance(gpus, list) else []
            known = [_word(name) for name in dict.fromkeys(str(gpu) for gpu in listed)]
            known = known or [_word(machine.get("cpu"))]
        engine = [] if self.version is None else [f"vLLM {_word(self.version)}"]
        model = self.samples[-1].model if self.samples else ""
        named = [_word(model)] if model else []
        words = [*known, *engine, *named, _word(self.header.get("date"))[:10]]
        return f"recorded: {', '.join(word for word in words if word)}"


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a recording, also one that is still being written or ended in a crash.

    Raises:
        ServingError: it cannot be read, has no header of a recording, or that of a newer version.
    """
    samples: list[Sample] = []
    version: str | None = None
    skipped = 0
    try:
        where = expand(path)
        if not stat.S_ISREG(where.stat().st_mode):  # before opening, which may wait for ever
            raise ServingError(f"{where} is not a regular file; give a recording of the monitor")
        with where.open("rb") as file:
            found = trace_lines.lines(file)
            head = _header(next(found, b""), str(where))
            for line in found:
                try:
                    data = trace_lines.parse(line)
                    if data["kind"] == "sample":
                        samples.append(Sample.from_dict(data))
                    elif data["kind"] == "server":
                        told = data["version"]
                        version = told if isinstance(told, str) else version
                    else:
                        skipped += 1
                except trace_lines.BAD:
                    skipped += 1
    except OSError as error:
        raise ServingError(
            f"{path} cannot be read ({error.strerror or error}); give a recording of the monitor"
        ) from error
    except ServingError:
        raise
    except ValueError as error:  # a NUL in the name, or no such home folder
        raise ServingError(f"{path} cannot be read ({error}); give a recording") from error
    return Recording(header=head, samples=tuple(samples), version=version, skipped=skipped)


def _header(line: bytes, path: str) -> dict[str, Any]:
    try:
        data = trace_lines.parse(line)
    except trace_lines.BAD:
        data = {}
    if data.get("format") != FORMAT:
        raise ServingError(
            f"{path} is no recording of the monitor: its first line lacks "
            f'"format": "{FORMAT}"; give a file that workbench monitor --record wrote'
        )
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ServingError(f"{path} has no version in its header; record it again")
    if version > VERSION:
        raise ServingError(
            f"{path} is a recording of version {version}, this workbench reads up to {VERSION}; "
            "update the workbench"
        )
    return data


def _word(value: object) -> str:
    """A text of a file in a sentence: short, on one line, and nothing that moves a cursor."""
    text = value if isinstance(value, str) else ""
    return "".join(sign for sign in text if sign.isprintable())[:80]
