"""Values of a JSON document as their dataclasses declare them; whatever else is in it is refused.

A document may be of another release, damaged, or somebody's who means no good: what is drawn and
printed of it later has the declared types, finite numbers and whole numbers of a sensible size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_MOST = 1 << 53  # that JSON's numbers hold exactly
_DEEP = 3  # levels of lists and objects in what an engine says of itself
_SHOWN = 60

_T = TypeVar("_T")


class UnreadableError(Exception):
    """A value that is not what its place declares; the message names the place."""


def read_value(kind: type[_T], found: Any, place: str = "it") -> _T:
    """The dataclass ``kind`` with the values of a mapping, checked against its annotations.

    Raises:
        UnreadableError: a value is missing, unknown or of another type.
    """
    if not isinstance(found, Mapping):
        raise UnreadableError(f"{place} is no object")
    hints = get_type_hints(kind)
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    wrong = [name for name in found if name not in known] or sorted(known - set(found))
    if wrong:
        raise UnreadableError(f"{place} has {_word(wrong[0])} too many or too few")
    return kind(**{name: _read(hints[name], found[name], name) for name in known})


def _read(hint: Any, found: Any, place: str) -> Any:
    origin, given = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (inner,) = (each for each in given if each is not NoneType)
        return None if found is None else _read(inner, found, place)
    if origin is Literal:
        return _said(found if isinstance(found, str) and found in given else None, found, place)
    if origin is tuple:
        if not isinstance(found, list | tuple):
            raise UnreadableError(f"{place} is no list")
        return tuple(_read(given[0], each, place) for each in found)
    if is_dataclass(hint):
        return read_value(hint, found, place)  # type: ignore[arg-type]
    if hint is float:
        return _said(_finite(found), found, place)
    if hint is int:
        whole = isinstance(found, int) and not isinstance(found, bool) and 0 <= found < _MOST
        return _said(found if whole else None, found, place)
    if hint is str:
        return _said(found if isinstance(found, str) else None, found, place)
    if isinstance(found, Mapping) and _plain(found):  # what an engine says of itself
        return dict(found)
    raise UnreadableError(f"{place} is no object of plain values")


def _said(value: Any, found: Any, place: str) -> Any:
    if value is None:
        raise UnreadableError(f"{place} is {_word(found)}")
    return value


def _finite(found: Any) -> float | None:
    if not isinstance(found, int | float) or isinstance(found, bool):
        return None
    try:
        value = float(found)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def _plain(found: Any, level: int = 0) -> bool:
    if found is None or isinstance(found, bool | str):
        return True
    if isinstance(found, int | float):
        return _finite(found) is not None
    if level == _DEEP:
        return False
    if isinstance(found, Mapping):
        return all(isinstance(k, str) and _plain(v, level + 1) for k, v in found.items())
    return isinstance(found, list | tuple) and all(_plain(v, level + 1) for v in found)


def _word(found: Any) -> str:
    """A wrong value in a few characters; of nested ones the kind alone."""
    if isinstance(found, str):
        return ascii(found[:_SHOWN])
    return f"{found}" if found is None or isinstance(found, bool | float) else type(found).__name__
