"""Results of a bench: rows of figures with all that they depend on, and the recorded ones.

No speed without a check: a row that carries a time and has not passed cannot be made, nor read
from a file. Recorded results are JSON files in ``recorded/`` beside this module, which an installed
wheel carries, and in ``benchmarks/results/`` of a checkout. Needs no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from workbench.errors import KernelError
from workbench.files import read_json, write_whole

FORMAT, VERSION = "workbench kernels bench", 1
STATUSES = ("passed", "refused", "raised", "time limit", "crashed", "unavailable")
How = Literal["measured here", "recorded"]

PACKAGED = Path(__file__).parent / "recorded"
CHECKOUT = Path(__file__).parents[2] / "benchmarks" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One variant on one kind and size of input.

    ``status`` is the check's, on the very arguments that were timed; ``gate`` names the gate that
    refused it ("after timing: …" where the outputs of the timed loop failed), ``reason`` says in
    words why it was refused, why a variant that passed has no time, or what a reader must know of
    it. Errors are relative to the
    float64 oracle: the variant's, and the torch reference's own on the same arguments.

    ``microseconds`` is the median over ``rounds`` of one call, ``microseconds_low`` and ``_high``
    the 10th and 90th percentile, ``calls`` how many calls a round held; ``in_graph`` False means
    that host time is included. ``bytes`` and ``flops`` are the least a call needs, ``math`` the
    arithmetic they are counted in; ``bound_microseconds`` is the larger of the two at the measured
    peaks, ``limit`` which one, ``roofline_fraction`` bound over median (1: at the limit).
    ``ratio_to_reference`` is how many times faster than the torch reference in the same rounds.

    Raises:
        KernelError: a time without a passed check, or figures that cannot be.
    """

    op: str
    variant: str
    flavour: str = ""
    tokens: int
    model: str = ""
    tp: int = 1
    dtype: str = "bfloat16"
    status: str
    gate: str = ""
    reason: str = ""
    max_error: float | None = None
    own_error: float | None = None
    microseconds: float | None = None
    microseconds_low: float | None = None
    microseconds_high: float | None = None
    calls: int | None = None
    rounds: int | None = None
    in_graph: bool | None = None
    bytes: float | None = None
    flops: float | None = None
    math: str = ""
    bytes_per_second: float | None = None
    flops_per_second: float | None = None
    bound_microseconds: float | None = None
    roofline_fraction: float | None = None
    limit: str = ""
    ratio_to_reference: float | None = None

    def __post_init__(self) -> None:
        what = f"{self.variant} of {self.op} at {self.tokens} tokens"
        if self.status not in STATUSES:
            raise KernelError(f"{what}: unknown status {self.status!r:.40}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value >= 0):
                raise KernelError(
                    f"{what}: {name} must be a number of 0 or more, not {_shown(value)}"
                )
        timed = [name for name in SPEEDS if getattr(self, name) is not None]
        if timed and self.status != "passed":
            raise KernelError(
                f"{what}: a variant whose check says {self.status!r} shows no speed, but "
                f"{timed[0]} is given"
            )
        if timed and not self.microseconds:
            raise KernelError(f"{what}: {timed[0]} is given without microseconds of more than 0")

    @property
    def passed(self) -> bool:
        """Whether the check on the timed arguments was passed."""
        return self.status == "passed"

    @property
    def timed(self) -> bool:
        """Whether there is a time."""
        return self.microseconds is not None

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON, and ``available`` and ``passed`` as the command line has
        them."""
        found = {name: getattr(self, name) for name in COLUMNS}
        available = self.status != "unavailable"
        return found | {"available": available, "passed": self.passed if available else None}


COLUMNS = tuple(f.name for f in fields(BenchRow))
SPEEDS = (
    "microseconds",
    "microseconds_low",
    "microseconds_high",
    "bytes_per_second",
    "flops_per_second",
    "roofline_fraction",
    "ratio_to_reference",
)
_COUNTS = ("tokens", "tp", "calls", "rounds")
_NUMBERS = (*_COUNTS, *SPEEDS, "max_error", "own_error", "bytes", "flops", "bound_microseconds")
_WITH_A_TIME = (
    *SPEEDS[1:6],
    *("calls", "rounds", "in_graph", "bytes", "flops", "math", "bound_microseconds", "limit"),
)
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Rows, and what they were measured on. All of this is in the file.

    ``device`` is cpu or cuda, ``hardware`` the name of the processor or GPU, ``peaks`` the rates
    measured in the same run (``roofline.Rates.to_dict``), ``machine`` what
    ``workbench.hardware.machine`` says, ``date`` an ISO date, ``interrupted`` whether Ctrl-C ended
    it early. ``how`` says whether it was measured in this process or read from a file.
    """

    rows: tuple[BenchRow, ...]
    device: str
    hardware: str
    peaks: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    date: str = ""
    how: How = "measured here"
    interrupted: bool = False
    note: str = ""

    @property
    def source(self) -> str:
        """Where the figures come from, in words, for captions."""
        torch, triton = (self.versions.get(name) for name in ("torch", "triton"))
        software = ", ".join(
            f"{name} {version}" for name, version in (("torch", torch), ("triton", triton))
            if version
        )  # fmt: skip
        where = f"{self.how} on {self.hardware}, {self.date}"
        return f"{where} ({software})" if software else where

    def select(self, **values: Any) -> tuple[BenchRow, ...]:
        """The rows with these values: ``select(op="boundary", tokens=8)``.

        Raises:
            KernelError: a name that rows do not have.
        """
        for name in values:
            if name not in COLUMNS:
                raise KernelError(f"rows have no {name!r:.40}; they have {', '.join(COLUMNS)}")
        wanted = values.items()
        return tuple(r for r in self.rows if all(getattr(r, k) == v for k, v in wanted))

    def to_dict(self) -> dict[str, Any]:
        """The document of a file: rows as lists under ``columns``, floats to 5 digits."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "device": self.device,
            "hardware": self.hardware,
            "date": self.date,
            "note": self.note,
            "interrupted": self.interrupted,
            "versions": dict(self.versions),
            "machine": dict(self.machine),
            "peaks": dict(self.peaks),
            "columns": list(COLUMNS),
            "rows": [[_short(getattr(row, name)) for name in COLUMNS] for row in self.rows],
        }

    @classmethod
    def from_dict(cls, document: Any, where: str = "this document") -> BenchResult:
        """A result from what :meth:`to_dict` gave; it then counts as recorded.

        Raises:
            KernelError: it is no such document, or a value in it cannot be; ``where`` is named.
        """
        if not isinstance(document, Mapping) or document.get("format") != FORMAT:
            raise KernelError(
                f"{where} is not a result of `workbench kernels bench`; give a file that its "
                "--out wrote"
            )
        if document.get("version") != VERSION:
            raise KernelError(
                f"{where} has version {document.get('version')!r:.20} of the format and this "
                f"workbench reads {VERSION}; run the bench again"
            )

        def part(name: str, kind: type) -> Any:
            value = document.get(name)
            if not isinstance(value, kind):
                raise KernelError(
                    f"{where}: {name} is missing or of the wrong type; run the bench again"
                )
            if isinstance(value, str) and not value.isprintable():
                raise KernelError(
                    f"{where}: {name} holds control characters ({value!a:.60}); run the bench again"
                )
            return value

        columns = part("columns", list)
        unknown = [c for c in columns if c not in COLUMNS]
        lacking = [c for c in ("op", "variant", "tokens", "status") if c not in columns]
        if unknown or lacking or len(set(columns)) != len(columns):
            raise KernelError(
                f"{where}: its columns do not fit (unknown: {unknown[:3]}, missing: {lacking}); "
                "run the bench again"
            )
        rows = []
        for number, values in enumerate(part("rows", list)):
            line = f"{where}, row {number}"
            if not isinstance(values, list) or len(values) != len(columns):
                raise KernelError(f"{line} does not have {len(columns)} values; run it again")
            rows.append(_row(dict(zip(columns, values, strict=True)), line))
        return cls(
            rows=tuple(rows),
            device=part("device", str),
            hardware=part("hardware", str),
            date=part("date", str),
            note=part("note", str),
            interrupted=part("interrupted", bool),
            versions=part("versions", dict),
            machine=part("machine", dict),
            peaks=_peaks(part("peaks", dict), where),
            how="recorded",
        )

    def write(self, path: str | Path) -> None:
        """Write the file, whole or not at all, one row a line.

        Raises:
            FileError: it cannot be written.
        """
        document = self.to_dict()
        rows = document.pop("rows")
        head = json.dumps(document, allow_nan=False, indent=1)
        lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
        text = f'{head[: head.rindex("}")].rstrip()},\n "rows": [\n{lines}\n ]\n}}\n'
        write_whole(path, text.encode())


def _is_number(value: Any) -> bool:
    """A finite number that a float can hold; a bool is none."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and abs(value) <= _LARGEST


def _shown(value: Any) -> str:
    """A value for a sentence: in ASCII, a few words long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
        return "a number beyond what a float holds"  # Python refuses to print the longest
    return f"{value!a:.40}"


def _peaks(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Rates as figures and tables use them, or none at all."""
    flops = given.get("flops")
    rates = [given.get("bandwidth"), *(flops.values() if isinstance(flops, dict) else [None])]
    if given and not all(_is_number(rate) and rate > 0 for rate in rates):
        raise KernelError(
            f"{where}: peaks need a bandwidth and flops, numbers of more than 0; run the bench "
            "again"
        )
    return given


def row_of(values: Any, where: str) -> BenchRow:
    """The row that :meth:`BenchRow.to_dict` gave, every value checked.

    Raises:
        KernelError: it is something else; ``where`` is named.
    """
    if not isinstance(values, dict) or set(values) != {*COLUMNS, "available", "passed"}:
        raise KernelError(f"{where} is no row of a bench")
    row = _row({name: values[name] for name in COLUMNS}, where)
    if row.to_dict() != values:
        raise KernelError(f"{where}: available or passed is not what its status says")
    return row


def _row(values: dict[str, Any], where: str) -> BenchRow:
    for name, value in values.items():
        if name in _COUNTS:
            fine = isinstance(value, int) and _is_number(value)
            fine = fine or (value is None and name in ("calls", "rounds"))
        elif name in _NUMBERS:
            fine = value is None or _is_number(value)
        elif name == "in_graph":
            fine = value is None or isinstance(value, bool)
        else:  # a name or a sentence: control characters would move a terminal's cursor
            fine = isinstance(value, str) and (value.isprintable() or name == "reason")
        if not fine:
            raise KernelError(f"{where}: {name} cannot be {_shown(value)}; run the bench again")
    try:
        row = BenchRow(**values)
    except KernelError as error:
        raise KernelError(f"{where}: {error}") from None
    if row.timed:
        lacking = [name for name in _WITH_A_TIME if getattr(row, name) in (None, "")]
        if lacking:
            raise KernelError(f"{where}: a time is given without {lacking[0]}; run the bench again")
        low, high = row.microseconds_low or 0.0, row.microseconds_high or inf
        if not low <= (row.microseconds or 0.0) <= high:
            raise KernelError(
                f"{where}: the median is not between its percentiles; run the bench again"
            )
    return row


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def load(path: str | Path) -> BenchResult:
    """A recorded result from a file.

    Raises:
        FileError: it cannot be read, or holds no JSON.
        KernelError: it is not a result of this bench.
    """
    return BenchResult.from_dict(read_json(Path(path)), str(path))


def recorded_files(folders: Sequence[Path] = (PACKAGED, CHECKOUT)) -> list[Path]:
    """Files of recorded results, by name; of two with one name the packaged one counts."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("kernels-*.json")) if folder.is_dir() else ():
            found.setdefault(path.name, path)
    return [found[name] for name in sorted(found)]


def recorded(hardware: str = "") -> list[BenchResult]:
    """Recorded results, newest first; ``hardware`` keeps those with it in their name ("H200").

    Raises:
        FileError, KernelError: a file that is damaged; it is named.
    """
    every = [load(path) for path in recorded_files()]
    kept = [r for r in every if hardware.lower() in r.hardware.lower()]
    return sorted(kept, key=lambda r: r.date, reverse=True)


def without_speed(row: BenchRow, status: str, gate: str, reason: str) -> BenchRow:
    """The row with its times taken away, and why."""
    nothing = dict.fromkeys((*SPEEDS, "calls", "rounds", "in_graph"))
    return replace(row, status=status, gate=gate, reason=reason, **nothing)  # type: ignore[arg-type]
