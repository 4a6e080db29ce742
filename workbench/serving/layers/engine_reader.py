"""Reading attributes that may not be there, off objects that are not ours, as plain values.

Runs inside the engine's worker (:mod:`workbench.serving.layers.engine_worker`): the standard
library only, and nothing that raises.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?=\.|$)")
_MOST_NOTES = 100
_MOST_ITEMS = 256  # of a list that is not ours
_LONGEST = 200  # letters of a text that is not ours
_DEPTH = 4


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """A value as None, bool, number, text, list or dict of these; other objects by their class.

    Types of torch are recognised by name, so that torch need not be imported.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int):  # what msgpack, on which the engine's answers travel, can hold
        return int(value) if -(2**63) <= value < 2**63 else "a number of more than 64 bits"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):  # halves of letters, as in a path that is no UTF-8, cannot travel
        return str(value)[:_LONGEST].encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, type):
        return value.__name__
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    if depth > 0 and isinstance(value, Mapping):
        pairs = list(value.items())[:_MOST_ITEMS]
        return {_key(key): plain(item, depth - 1) for key, item in pairs}
    if depth > 0 and isinstance(value, list | tuple | set | frozenset):
        items = [plain(item, depth - 1) for item in list(value)[:_MOST_ITEMS]]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if hasattr(value, "func") and callable(value):  # functools.partial
        value = value.func
    name = getattr(value, "__qualname__", None)
    if not isinstance(name, str):
        return kind.__name__
    if name.endswith("<lambda>"):  # what it calls says more than where it was written
        names = getattr(getattr(value, "__code__", None), "co_names", ())
        name = ".".join(names) or name
    return name[:_LONGEST]


def _key(key: Any) -> str:
    made = plain(key, 0)
    return made if isinstance(made, str) else str(made)


def layer_of(path: str) -> int | None:
    """The layer that a module's or parameter's path names: ``model.layers.3.mlp`` is 3."""
    found = _LAYER.search(path)
    return int(found[1]) if found else None


def within_layer(path: str) -> str:
    """A path without what stands before the layer: ``mlp.experts``; unchanged outside layers."""
    found = _LAYER.search(path)
    return path[found.end() + 1 :] if found else path


class Reader:
    """Reads attributes that may not be there, and keeps notes of what was not."""

    def __init__(self) -> None:
        self._notes: dict[str, int] = {}

    # -- attributes -----------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Keep a note; equal ones are counted."""
        text = text[: 2 * _LONGEST].encode("utf-8", "replace").decode("utf-8")
        if text in self._notes or len(self._notes) < _MOST_NOTES:
            self._notes[text] = self._notes.get(text, 0) + 1

    def failed(self, section: str, error: Exception) -> None:
        """Note a section that could not be read."""
        try:
            said = str(error)
        except Exception:  # an error may not be able to say what it is
            said = "?"
        self.note(f"{section} could not be read: {type(error).__name__}: {said}")

    def said(self) -> list[str]:
        """All notes."""
        return [text if n == 1 else f"{text} ({n} times)" for text, n in self._notes.items()]

    def maybe(self, thing: Any, path: str) -> Any:
        """``thing.a.b`` for ``"a.b"``, or None where something on the way is missing."""
        for name in path.split("."):
            if thing is None:
                return None
            try:
                thing = getattr(thing, name)
            except Exception:  # a property may raise anything
                return None
        return thing

    def need(self, thing: Any, path: str) -> Any:
        """The same, with a note where the attribute is missing (not where it is None)."""
        for name in path.split("."):
            if thing is None:
                return None
            try:
                thing = getattr(thing, name)
            except Exception as error:
                self.note(f"{type(thing).__name__}.{name} cannot be read ({type(error).__name__})")
                return None
        return thing

    def first(self, *ways: Callable[[], Any]) -> Any:
        """The first value that is not None of functions that may raise."""
        for way in ways:
            try:
                found = way()
            except Exception:  # the next way may work
                continue
            if found is not None:
                return found
        return None

    def window(self, thing: Any, name: str = "sliding_window") -> Any:
        """A window in tokens, "none" where the attribute is None, None where it is missing."""
        try:
            value = getattr(thing, name)
        except Exception:
            self.note(f"{type(thing).__name__}.{name} is missing")
            return None
        return "none" if value is None else plain(value)
