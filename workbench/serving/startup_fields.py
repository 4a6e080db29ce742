"""The fields of a start-up log out of its lines: which line counts, and how its value is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from workbench.serving.startup_lines import GIB, Hit, StartupLogError

MAX_BYTES = 2**50  # 1 PiB in one GPU: not a GPU
MAX_COUNT = 10**15

# Names of fields in the result, where lines call them otherwise.
_PUBLIC = {
    "model_loading": "model_loading_bytes",
    "first_max_model_len": "max_model_len",
    "kv_cache_memory_bytes": "available_kv_bytes",
    "disable_hybrid_kv_cache_manager": "hybrid_manager_off",
}

T = TypeVar("T")


class Found(NamedTuple):
    """Where a field of the result was read: its name, the line's number from 1, the line."""

    field: str
    line: int
    text: str


def number(text: str) -> float:
    """A figure as the log prints it, thousands separated by commas."""
    return float(text.replace(",", ""))


def whole(text: str) -> int | None:
    """A whole number, or None for anything else (a setting left at None, say)."""
    digits = text.replace(",", "")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 40 else None


def fraction(text: str) -> float | None:
    """A number above 0 and at most 1, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None


def flag(text: str) -> bool | None:
    """True or False, as Python or the log writes it."""
    return {"True": True, "enabled": True, "False": False, "disabled": False}.get(text)


def word(text: str) -> str | None:
    """A name of at most 64 characters, or None where it is not set."""
    return text if 0 < len(text) <= 64 and text != "None" else None


def sizes(text: str) -> tuple[int, ...] | None:
    """A printed tuple of whole numbers."""
    values = tuple(whole(part.strip()) or 0 for part in text.split(",") if part.strip())
    return values if values and all(values) else None


def padding(text: str) -> tuple[int, float]:
    """``(layers, percent)`` of "2 padding layers, may waste at most 4.65%"."""
    words = text.split()
    return int(words[0]), float(words[-1].rstrip("%"))


class FieldReader:
    """The hits by field, with the rule for several: one kind of line is believed before another,
    and within a kind all lines must agree unless a caller says which of them counts."""

    def __init__(self, hits: list[Hit]) -> None:
        self._by_field: dict[str, list[Hit]] = {}
        for hit in hits:
            self._by_field.setdefault(hit.field, []).append(hit)
        self.caveats: list[str] = []
        self.found: list[Found] = []

    def hits(self, field: str) -> list[Hit]:
        """The hits of the most trustworthy kind of line."""
        hits = self._by_field.get(field, [])
        best = min((hit.source for hit in hits), default=0)
        return [hit for hit in hits if hit.source == best]

    def note(self, field: str, hit: Hit) -> None:
        self.found.append(Found(_PUBLIC.get(field, field), hit.line, hit.text[:2000]))

    def one(
        self,
        field: str,
        read: Callable[[str], T | None],
        differing: Callable[[Iterable[T]], T] | None = None,
    ) -> T | None:
        """The one value of a field; ``differing`` chooses where lines may disagree."""
        values: dict[T, Hit] = {}
        for hit in self.hits(field):
            value = read(hit.value)
            if value is not None:
                values.setdefault(value, hit)
        if not values:
            return None
        if len(values) > 1 and differing is None:
            (first, one), (second, other) = list(values.items())[:2]
            raise StartupLogError(
                f"Line {one.line} and line {other.line} disagree about {field} ({first} and "
                f"{second}); give the log of one engine's start."
            )
        chosen = next(iter(values)) if differing is None else differing(values)
        self.note(field, values[chosen])
        return chosen

    def count(
        self, field: str, differing: Callable[[Iterable[int]], int] | None = None
    ) -> int | None:
        """A whole number; refused where it cannot be one of an engine's."""
        value = self.one(field, whole, differing)
        if value is not None and value > MAX_COUNT:
            raise StartupLogError(f"The log says {field} = {value:,}, which no engine can have.")
        return value

    def gibs(self, field: str) -> list[float]:
        """All values in GiB that lines of the best kind give."""
        values = []
        for hit in self.hits(field):
            value = float(hit.value)
            if value * GIB > MAX_BYTES:
                raise StartupLogError(
                    f"Line {hit.line} speaks of {hit.value} GiB in one GPU, which is more than "
                    "any has; check what was pasted."
                )
            values.append(value)
        return values

    def reject_second_start(self) -> None:
        """Two engines of one name with different process ids are two starts, not two ranks."""
        ids: dict[str, tuple[str, int]] = {}
        for hit in self._by_field.get("version", []) + self._by_field.get("num_tokens", []):
            if hit.process is None:
                continue
            name, pid = hit.process
            seen, line = ids.setdefault(name, (pid, hit.line))
            if seen != pid:
                raise StartupLogError(
                    f"The text holds two starts of an engine (lines {line} and {hit.line}); give "
                    "the log of one."
                )
