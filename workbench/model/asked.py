"""What callers ask for, checked: whole numbers, names and paths, each refused in one sentence."""

from __future__ import annotations

import operator
from typing import Any

from workbench.errors import WorkbenchError
from workbench.model.config import is_int

_SHOWN = 60  # characters of a wrong value that are worth repeating


class SizingError(WorkbenchError):
    """A question about memory that has no answer: a size, layout or machine that cannot be."""


def shown(value: Any) -> str:
    """A wrong value for a message: short, and on one line."""
    if is_int(value):
        # repr of a huge integer may itself be refused
        return f"{value:,}" if abs(value) < 1 << 60 else "a number far beyond any model"
    text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def whole(name: str, value: Any, most: int, unit: str = "") -> int:
    """``value`` as an int from 1 to ``most``; integers of numpy and torch are taken too.

    Raises:
        SizingError: anything else, booleans and floats included.
    """
    number = value
    if not isinstance(value, bool | int) and hasattr(value, "__index__"):
        try:
            number = operator.index(value)
        except TypeError:  # an array of several numbers
            number = value
    if not is_int(number) or not 1 <= number <= most:
        raise SizingError(
            f"{name} must be a whole number from 1 to {most:,}{unit and f' {unit}'}, "
            f"not {shown(value)}"
        )
    return number


def instance(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> None:
    """Raise SizingError when ``value`` is none of ``kinds``; ``what`` says what it should be."""
    if not isinstance(value, kinds):
        raise SizingError(f"{name} must be {what}, not {shown(value)}")


def path(name: str, value: Any) -> str | None:
    """A path or a name of a model that stands in a command: text that can be pasted as it is.

    Raises:
        SizingError: no text, empty, longer than any path, with control characters, or beginning
            with ``-``, which the engine would take for an option.
    """
    if value is None:
        return None
    instance(name, value, str, "text")
    if not value.strip():
        raise SizingError(f"{name} is empty; give a path or a name, or leave it out")
    if len(value) > 4096:
        raise SizingError(f"{name} has {len(value):,} characters; a path has at most 4,096")
    if not value.isprintable():
        raise SizingError(
            f"{name} {shown(value)} has characters that cannot be printed; a command with them "
            "could not be copied, so give another path"
        )
    if value.startswith("-"):
        raise SizingError(
            f"{name} {shown(value)} begins with -, which the engine takes for an option; "
            "write ./ before it"
        )
    return str(value)
