"""How far a starting engine is, from what it logs: a stage, a sentence, its own counts.

The lines are those of vLLM 0.33 (recorded ones: ``tests/data/startup_logs``) and of releases near
it. Nothing is estimated: a fraction is one that the engine states, of the step it is at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Stage = Literal[
    "starting",
    "loading weights",
    "compiling",
    "sizing the KV cache",
    "warming up",
    "capturing graphs",
    "opening the port",
    "ready",
    "ended",
]
MAX_LINE = 4096  # characters read of a line; a progress bar has some hundred
_MOST_READ = 1 << 20  # bytes of the log read at once
_TAIL = 1 << 16  # bytes of its end that an error looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One thing that a starting server said.

    Attributes:
        seconds: since the start was asked for.
        stage: what it is at.
        text: the same in words, with the engine's figures.
        fraction: 0 to 1, how much of this step is done by the engine's own count, or None.
    """

    seconds: float
    stage: Stage
    text: str
    fraction: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "stage": self.stage,
            "text": self.text,
            "fraction": self.fraction,
        }

    def __str__(self) -> str:
        return f"{self.seconds:7.1f} s  {self.text}"


# Literal text, what to read, the stage, the sentence with the groups, and which groups count.
_LINES: tuple[tuple[str, re.Pattern[str], Stage, str, tuple[int, int] | None], ...] = tuple(
    (literal, re.compile(pattern), stage, sentence, counts)  # type: ignore[misc]
    for literal, pattern, stage, sentence, counts in (
        ("non-default args", r"non-default args: ", "starting", "arguments read", None),
        ("LLM engine (v", r"LLM engine \(v([\w.+-]{1,64})\)", "starting", "vLLM {0} begins", None),
        (
            "Resolved architecture",
            r"Resolved architecture: (\w{1,80})",
            "starting",
            "architecture {0}",
            None,
        ),
        ("load model", r"Starting to load model", "loading weights", "loading weights", None),
        ("Loading model from", r"Loading model from", "loading weights", "loading weights", None),
        (
            "checkpoint shards",
            r"(?:L|l)oading \w{1,20} checkpoint shards:.{0,40}\| (\d{1,6})/(\d{1,6})",
            "loading weights",
            "loading weights: {0} of {1} shards",
            (1, 2),
        ),
        (
            "Loading weights took",
            r"Loading weights took (\d{1,9}(?:\.\d{1,2})?)",
            "loading weights",
            "weights read in {0} s",
            None,
        ),
        (
            "Model loading took",
            r"Model loading took (\d{1,9}(?:\.\d+)?) Gi?B(?: memory)? and (\d{1,9}(?:\.\d{1,2})?)",
            "loading weights",
            "weights loaded: {0} GiB a GPU in {1} s",
            None,
        ),
        (
            "torch.compile",
            r"torch\.compile took (\d{1,9}(?:\.\d{1,2})?)",
            "compiling",
            "compiled in {0} s",
            None,
        ),
        ("Dynamo bytecode", r"Dynamo bytecode transform", "compiling", "compiling", None),
        (
            "KV cache memory:",
            r"Available KV cache memory: (-?\d{1,9}(?:\.\d+)?) GiB",
            "sizing the KV cache",
            "KV cache: {0} GiB a GPU",
            None,
        ),
        (
            "Maximum concurrency",
            r"Maximum concurrency for ([\d,]{1,20}) tokens per request: (\d{1,12}(?:\.\d+)?)x",
            "sizing the KV cache",
            "KV cache: {1} requests of {0} tokens at once",
            None,
        ),
        ("kernel warmup start", r"JIT kernel warmup starting", "warming up", "warming up", None),
        (
            "kernel warmup (",
            r"JIT kernel warmup .{1,40}: {1,4}\d{1,3}%\|.{0,80}\| (\d{1,6})/(\d{1,6})",
            "warming up",
            "warming up: {0} of {1} kernels",
            (1, 2),
        ),
        (
            "warmup finished",
            r"warmup finished in (\d{1,9}(?:\.\d{1,2})?)",
            "warming up",
            "warmed up in {0} s",
            None,
        ),
        (
            "Capturing ",
            r"Capturing (?:(dflash2|[a-z]\w{1,30}) )?CUDA graphs \(([\w, =.]{1,60})\): "
            r"{1,4}\d{1,3}%\|.{0,80}\| (\d{1,6})/(\d{1,6})",
            "capturing graphs",
            "capturing CUDA graphs ({0}{1}): {2} of {3}",
            (3, 4),
        ),
        (
            "Graph capturing finished",
            r"Graph capturing finished in (\d{1,9}) secs, took (\d{1,9}(?:\.\d+)?) GiB",
            "capturing graphs",
            "CUDA graphs captured in {0} s, {1} GiB",
            None,
        ),
        (
            "init engine (",
            r"init engine \(.{1,80}\) took (\d{1,9}(?:\.\d{1,2})?)",
            "opening the port",
            "engine initialised in {0} s",
            None,
        ),
        (
            "Starting vLLM",
            r"Starting vLLM (?:API )?server",
            "opening the port",
            "opening the port",
            None,
        ),
    )
)
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_PREFIX = re.compile(
    r"^(?:\([\w= -]{1,80}\) )?(?:(?:INFO|WARNING|ERROR) \d\d-\d\d [\d:]{8} \[[^\]]{1,80}\] ?)?"
)
_ERROR = re.compile(r"^[\w.]{0,80}(?:Error|Exception|Interrupt)\b.{0,400}|^vllm.{0,40}: error: .+")
_VALIDATION = re.compile(r"\bvalidation errors? for \w+$")


def clean(line: str) -> str:
    """A line of the log without colours and control characters."""
    return _CONTROL.sub("", _ANSI.sub("", line[:MAX_LINE])).rstrip()


def read_line(line: str) -> tuple[Stage, str, float | None] | None:
    """Stage, sentence and fraction of a line; None where it says nothing about the start."""
    for literal, pattern, stage, sentence, counts in _LINES:
        match = pattern.search(line) if literal in line else None
        if match is None:
            continue
        groups = [group or "" for group in match.groups()]
        if literal == "Capturing ":
            groups[0] = "drafter, " if groups[0] else ""
        fraction = None
        if counts is not None:
            done, total = (int(match.group(group)) for group in counts)
            fraction = min(1.0, done / total) if total else None
        return stage, sentence.format(*groups), fraction
    return None


class ProgressReader:
    """Reads a growing log: what is new, as :class:`Progress`.

    Each sentence is given once: several workers log the same, and a bar is redrawn often. Of a bar
    every tenth is given.
    """

    def __init__(self, log: Path, start: int = 0) -> None:
        self.log = log
        self._at = start
        self._rest = ""
        self._said: set[object] = set()

    def new(self, seconds: float) -> list[Progress]:
        """What the log says beyond what was read before; empty where it cannot be read."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._at)
                data = file.read(_MOST_READ)
        except OSError:
            return []
        self._at += len(data)
        *lines, rest = (
            (self._rest + data.decode("utf-8", "replace")).replace("\r", "\n").split("\n")
        )
        self._rest = rest[-MAX_LINE:]
        found = []
        for line in lines:
            read = read_line(clean(line))
            if read is None:
                continue
            stage, text, fraction = read
            said: object = text
            if fraction is not None:  # a bar: what it is of, its total, how many tenths are done
                said = (text.rpartition(":")[0], text.rpartition(" of ")[2], int(fraction * 10))
            if said not in self._said:
                self._said.add(said)
                found.append(Progress(seconds=seconds, stage=stage, text=text, fraction=fraction))
        return found


def last_lines(log: Path, start: int = 0, lines: int = 15) -> tuple[str, ...]:
    """The log's last lines that say anything, cleaned; empty where it cannot be read."""
    return _ending(log, start)[-lines:]


def first_error(log: Path, start: int = 0) -> str | None:
    """The first error that the log's end names; what follows it is mostly its consequence."""
    lines = [_PREFIX.sub("", line).strip() for line in _ending(log, start)]
    for text, following in zip(lines, [*lines[1:], ""], strict=True):
        if _ERROR.match(text):
            # pydantic says what is wrong in the line below.
            return f"{text}: {following}" if _VALIDATION.search(text) else text
    return None


def _ending(log: Path, start: int) -> tuple[str, ...]:
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - _TAIL))
            data = file.read(_TAIL)
    except OSError:
        return ()
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    # Of a bar only what it showed last.
    rows = (clean(line.rpartition("\r")[2]) for line in text.split("\n"))
    return tuple(row for row in rows if row.strip())
