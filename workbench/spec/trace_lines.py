"""Lines of a trace file: values to bytes and back, with nothing taken on trust."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, BinaryIO, Literal, get_args

from workbench.errors import TraceError

Mode = Literal["steps", "every-position"]
MODES: tuple[Mode, ...] = get_args(Mode)
FORMAT, VERSION = "beam-workbench-trace", 1
LONGEST = 16 * 2**20  # bytes of a line; 128 requests with 16 candidates at 16 slots are below 4 MiB
# What a line that is no step may raise on its way to one.
BAD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def encode(value: Mapping[str, Any], what: str) -> bytes:
    """One line of JSON, its newline included.

    Raises:
        TraceError: a number is not finite (JSON has none such) or a value is none of JSON's.
    """
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (*BAD,) as error:
        raise TraceError(
            f"{what} of a trace cannot be written as JSON ({error}), and nothing of it is; give it "
            "text and finite numbers of Python"
        ) from error
    line = text.encode("ascii") + b"\n"
    if len(line) > LONGEST:
        raise TraceError(f"{what} of a trace has {len(line):,} bytes; {LONGEST:,} is the most")
    return line


def parse(line: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        ValueError, RecursionError: it is none. NaN and infinities, and whole numbers beyond 64
            bits, are refused: no field may have them, and arithmetic fails on them later.
    """
    data = json.loads(
        line.decode("utf-8"), parse_constant=_refuse, parse_float=_real, parse_int=_whole
    )
    if not isinstance(data, dict):
        raise ValueError("a line of a trace is a JSON object")
    return data


def lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines that are not blank, in a bounded memory; ``b""`` for one that is too long."""
    while line := file.readline(LONGEST):
        if len(line) < LONGEST or line.endswith(b"\n"):
            if not line.isspace():
                yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LONGEST)
        yield b""


def read_header(line: bytes, path: str) -> dict[str, Any]:
    """The header in the first line of a file.

    Raises:
        TraceError: it is none of a trace, or of a newer version.
    """
    try:
        data = parse(line)
    except BAD as error:
        raise TraceError(
            f"{path} is not a trace: its first line is no JSON object; give a file that the "
            "workbench recorded"
        ) from error
    check_header(data, path)
    return data


def check_header(data: Mapping[str, Any], where: str) -> None:
    """Whether this version can read what stands under the header.

    Raises:
        TraceError: it cannot; the message begins with ``where``.
    """
    if data.get("format") != FORMAT:
        raise TraceError(
            f'{where} is not a trace: its header lacks "format": "{FORMAT}"; give a file that the '
            "workbench recorded"
        )
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise TraceError(f"{where} has no trace version in its header; record it again")
    if version > VERSION:
        raise TraceError(
            f"{where} is a trace of version {version}, this workbench reads up to {VERSION}; "
            "update the workbench"
        )
    if data.get("mode") not in MODES:
        raise TraceError(f"{where} has a mode in its header that is none of {', '.join(MODES)}")


def describe(header: Mapping[str, Any]) -> str:
    """The header in two lines, for people; whatever it holds, no control character gets out."""
    sampling = _mapping(header.get("sampling"))
    hardware = _mapping(header.get("hardware"))
    listed = hardware.get("gpus")
    gpus = [_mapping(g).get("name") for g in listed] if isinstance(listed, list) else []
    machine = [hardware.get("cpu"), *dict.fromkeys(g for g in gpus if isinstance(g, str))]
    versions = _mapping(header.get("versions"))
    drafter = header.get("drafter")
    drafts = (
        "no drafter"
        if drafter is None
        else f"drafter {_clean(drafter)}, {_clean(header.get('speculative_tokens'))} drafts a "
        f"block, {_clean(header.get('proposals'))} proposals, {_clean(header.get('method'))} "
        "verification"
    )
    return (
        f"trace ({_clean(header.get('mode'))}) of {_clean(header.get('model'))}, {drafts}, "
        f"temperature {_clean(sampling.get('temperature'))}\n"
        f"recorded {_clean(header.get('date'))} on {' and '.join(map(_clean, machine))}, "
        f"torch {_clean(versions.get('torch'))}"
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _clean(value: object) -> str:
    """A header's value as text to print: short, one line, no terminal control sequences."""
    if value is None:
        return "unknown"
    text = str(value) if isinstance(value, str | int | float) else type(value).__name__
    text = "".join(c if c.isprintable() else "?" for c in text[:81])
    return text if len(text) <= 80 else text[:79] + "…"


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _real(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is beyond a float")
    return value


def _whole(text: str) -> int:
    # Before int(), which takes the square of the digits' number.
    value = int(text) if len(text) <= 20 else 2**63
    if not -(2**63) <= value < 2**63:
        raise ValueError("a whole number has more than 64 bits")
    return value
