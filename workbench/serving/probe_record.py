"""Lines of the probe read back: steps, the engine's passes behind them, and what it said."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from workbench.errors import DraftError, TraceError
from workbench.serving.probe.lines import RECORDED_BY
from workbench.spec import trace_lines
from workbench.spec.acceptance import Coefficients
from workbench.spec.cost_table import CostTable
from workbench.spec.step import RequestStep, Step

_HISTORY = 10_000  # fits of the estimator kept, a million steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The engine's pass behind a step.

    Attributes:
        number: of the pass, from 0 where the probe began; a number that is missing was dropped, or
            gave nobody a token.
        at: seconds since the probe began, at the pass's begin on the host.
        plain: rows of the target that are no drafts, all requests together.
        sampling: requests that get a token of their own.
        budget: drafts that the manager wanted verified; None where it was not asked.
    """

    number: int
    at: float
    plain: int
    sampling: int
    budget: int | None = None


def read_header(line: bytes, where: str) -> dict[str, Any]:
    """The header in the first line of a recording.

    Raises:
        TraceError: it is no trace, or not of the probe.
    """
    header = trace_lines.read_header(line, where)
    if header.get("recorded_by") != RECORDED_BY:
        raise TraceError(
            f"{where} is a trace, but not of the probe; read it with workbench.Trace.read"
        )
    return header


class Reading:
    """Takes the lines behind a header, one after the other; its attributes are what they add up to
    so far, as ``ProbeRun`` explains them."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header
        self.tables: CostTable | None = None
        self.most_rows: int | None = None
        self.coefficients: deque[Coefficients] = deque(maxlen=_HISTORY)
        self.dropped = self.inconsistent = self.missed = self.skipped = 0
        self.ended: str | None = None
        self.passed = Pass(number=0, at=0.0, plain=0, sampling=0)

    def take(self, line: bytes) -> Step | None:
        """A step, whose pass is then ``passed``; None of any other line."""
        try:
            data = trace_lines.parse(line)
            if data.get("kind") == "engine":
                self._said(data)
                return None
            step = _exact(Step.from_dict(data))
            self.passed = _pass_of(data)
        except (*trace_lines.BAD, DraftError):
            self.skipped += 1
            return None
        return step

    def _said(self, data: dict[str, Any]) -> None:
        what = data["what"]
        if what == "costs":
            rows = _whole(data["most_rows"])  # the whole line, or nothing of it
            self.tables, self.most_rows = _tables(data, self.header), rows
        elif what == "coefficients":
            slope, intercepts = data["slope"], data["intercepts"]
            self.coefficients.append(
                Coefficients(
                    step=_whole(data["step"]),
                    slope=_float32(slope),
                    intercepts=tuple(_float32(x) for x in intercepts),
                )
            )
        elif what == "dropped":
            self.dropped = _whole(data["passes"])
        elif what == "missed":
            self.missed += _whole(data["lines"])
        elif what == "inconsistent":
            self.inconsistent += 1
        elif what == "end":
            self.ended = _clean(data["reason"], 400)
        # What a later probe says besides is no reason to stop.


def _exact(step: Step) -> Step:
    """Nine digits tell a float32 from all others: this is the one they stand for."""
    return replace(step, requests=tuple(_exact_part(part) for part in step.requests))


def _exact_part(part: RequestStep) -> RequestStep:
    if not part.expected and not part.stale:
        return part
    return replace(
        part,
        expected=tuple(_float32(x) for x in part.expected),
        stale=tuple(_float32(x) for x in part.stale),
    )


def _float32(x: object) -> float:
    if not isinstance(x, int | float):
        raise ValueError(f"{x!r:.40} is no number")
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def _pass_of(data: dict[str, Any]) -> Pass:
    said = data["engine"]
    budget = said.get("budget")
    return Pass(
        number=_whole(said["pass"]),
        at=_seconds(said["at"]),
        plain=_whole(said["plain"]),
        sampling=_whole(said["sampling"]),
        budget=None if budget is None else _whole(budget),
    )


def _tables(data: dict[str, Any], header: dict[str, Any]) -> CostTable:
    """Given no captured size at all the engine takes steps everywhere."""
    draft, verify = (tuple((size, ms) for size, ms in data[name]) for name in ("draft", "verify"))
    largest = max(size for size, _ in (*draft, *verify))
    engine = header.get("engine")
    version = engine.get("version") if isinstance(engine, dict) else None
    length = data.get("context")
    context = f", context {_whole(length):,}" if length else ""
    return CostTable(
        draft=draft,
        verify=verify,
        captured=data["captured"] or largest,
        label=f"vLLM {_clean(version or '', 40)}'s own start-up profile{context}, "
        f"{_clean(header.get('date', 'date not recorded'), 40)}",
    )


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{value!r:.40} is no time")
    return float(value)


def _clean(value: object, most: int) -> str:
    """Text of a file to print: one line without control characters."""
    text = value if isinstance(value, str) else type(value).__name__
    return "".join(sign if sign.isprintable() else "?" for sign in text[:most])
