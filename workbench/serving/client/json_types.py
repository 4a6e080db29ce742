"""Python types as JSON schemas, and JSON back as values of them.

What a tool's arguments and a structured answer have in common. Objects are closed
(``additionalProperties: false``): a misspelt name is an error, never an argument that is lost.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import (
    Annotated,
    Any,
    Literal,
    NewType,
    NotRequired,
    Required,
    TypeGuard,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from workbench.errors import ServingError
from workbench.serving.client.json_check import JsonSchema, problem, short, to_json

KNOWN = (
    "str, int, float, bool, None, Literal, Enum, list, tuple, dict, Optional, unions, dataclasses "
    "and TypedDict"
)
_SCALARS: dict[Any, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}
_UNIONS = (Union, types.UnionType)
_MARKS = (Required, NotRequired)  # of a field of a TypedDict


class _Writer:
    """Schemas of types; classes that contain themselves go into ``$defs``."""

    def __init__(self) -> None:
        self.defs: JsonSchema = {}
        self._open: list[type] = []
        self._named: dict[type, str] = {}  # those that contain themselves

    def of(self, hint: Any, where: str) -> JsonSchema:
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            schema = self.of(args[0], where)
            words = [extra for extra in args[1:] if isinstance(extra, str)]
            return schema | {"description": words[0]} if words else schema
        if not isinstance(hint, Hashable):
            raise ServingError(f"{where} has {hint!r:.60} for a type; write list[…] or dict[…]")
        if origin in _MARKS:
            return self.of(args[0], where)
        if hint is Any:
            return {}
        if hint is None or hint is type(None):
            return {"type": "null"}
        if hint in _SCALARS:
            return {"type": _SCALARS[hint]}
        if (meant := _alias(hint)) is not None:
            return self.of(meant, where)
        if origin is Literal:
            return _choice(args, where)
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _choice([member.value for member in hint], where)
        if origin in _UNIONS:
            return {"anyOf": [self.of(arg, where) for arg in args]}
        if hint is list or origin is list:
            return {"type": "array"} | ({"items": self.of(args[0], f"{where}[]")} if args else {})
        if hint is tuple or origin is tuple:
            return self._tuple(args, where)
        if hint is dict or origin is dict:
            return self._dict(args, where)
        if _is_record(hint):
            return self._record(hint, where)
        name = getattr(hint, "__name__", hint)
        raise ServingError(f"{where} has the type {name!s:.60}, which has no JSON; use {KNOWN}")

    def _tuple(self, args: tuple[Any, ...], where: str) -> JsonSchema:
        if not args:
            return {"type": "array"}
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": self.of(args[0], f"{where}[]")}
        each = [self.of(arg, f"{where}[{i}]") for i, arg in enumerate(args)]
        fixed = {"prefixItems": each, "minItems": len(each), "maxItems": len(each)}
        return {"type": "array", **fixed, "items": False}

    def _dict(self, args: tuple[Any, ...], where: str) -> JsonSchema:
        if not args:
            return {"type": "object"}
        if args[0] is not str:
            raise ServingError(f"{where} is a dict whose keys are not str; names in JSON are text")
        return {"type": "object", "additionalProperties": self.of(args[1], f"{where}[…]")}

    def _record(self, kind: type, where: str) -> JsonSchema:
        if kind in self._open:  # it contains itself: its schema comes when the outer one is closed
            if kind not in self._named:
                same = sum(k.__name__ == kind.__name__ for k in self._named)
                self._named[kind] = f"{kind.__name__}_{same}" if same else kind.__name__
            return {"$ref": f"#/$defs/{self._named[kind]}"}
        self._open.append(kind)
        try:
            hints, needed, defaults = _fields(kind, where)
            each = {name: self.of(hint, f"{where}.{name}") for name, hint in hints.items()}
        finally:
            self._open.pop()
        schema = _closed(each, needed, defaults)
        words = inspect.cleandoc(kind.__doc__ or "").split("\n")[0]
        if words and not words.startswith(f"{kind.__name__}("):  # what dataclasses write themselves
            schema["description"] = words
        if kind in self._named:
            self.defs[self._named[kind]] = schema
            return {"$ref": f"#/$defs/{self._named[kind]}"}
        return schema


def schema_of(hint: Any, where: str) -> JsonSchema:
    """The JSON schema of a type; ``where`` names it in an error.

    Raises:
        ServingError: the type, or one in it, has no JSON.
    """
    writer = _Writer()
    schema = writer.of(hint, where)
    return schema | {"$defs": writer.defs} if writer.defs else schema


def arguments_schema(
    hints: Mapping[str, Any], needed: Iterable[str], defaults: Mapping[str, Any], where: str
) -> JsonSchema:
    """The schema of a function's arguments: a closed object.

    Args:
        hints: name -> type, in order.
        needed: names without a default.
        defaults: of the others; one without JSON is left out.
        where: how an error calls the function.

    Raises:
        ServingError: a type has no JSON.
    """
    writer = _Writer()
    each = {name: writer.of(hint, f"{where}({name})") for name, hint in hints.items()}
    schema = _closed(each, needed, defaults)
    return schema | {"$defs": writer.defs} if writer.defs else schema


def type_hints(thing: Any, where: str) -> dict[str, Any]:
    """The resolved type hints of a function or a class.

    Raises:
        ServingError: one of them names what is not defined.
    """
    try:
        return get_type_hints(thing, include_extras=True)
    except Exception as error:  # a hint in quotes may be any expression
        raise ServingError(
            f"a type hint of {where} cannot be read ({short(error)}); define the type before it, "
            "outside of functions"
        ) from None


def build(hint: Any, value: Any) -> Any:
    """A JSON value as a value of a type whose schema it fits (``problem`` found nothing).

    Raises:
        ServingError: a class does not take it, in its ``__post_init__`` for one.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated or origin in _MARKS:
        return build(args[0], value)
    if (meant := _alias(hint)) is not None:
        return build(meant, value)
    if hint is int or hint is float:
        try:
            return hint(value)  # JSON does not tell 3 from 3.0
        except OverflowError:
            raise ServingError("a number in it is too large for a float") from None
    if origin is Literal:
        return next(
            a for a in args if a == value and isinstance(a, bool) == isinstance(value, bool)
        )
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if origin in _UNIONS:
        fitting = (arg for arg in args if problem(value, schema_of(arg, "it")) is None)
        return build(next(fitting), value)
    if origin is tuple and args[-1] is not Ellipsis:
        return tuple(build(arg, item) for arg, item in zip(args, value, strict=True))
    if hint is tuple or origin is tuple:
        return tuple(build(args[0], item) if args else item for item in value)
    if origin is list:
        return [build(args[0], item) for item in value]
    if origin is dict:
        return {name: build(args[1], item) for name, item in value.items()}
    if _is_record(hint):
        return _built_record(hint, value)
    return value


def _built_record(kind: type, value: Mapping[str, Any]) -> Any:
    hints = type_hints(kind, kind.__name__)
    given = {name: build(hints[name], item) for name, item in value.items()}
    try:
        return kind(**given)
    except Exception as error:  # the class is the user's own
        raise ServingError(f"{kind.__name__} does not take it: {short(error)}") from None


def _alias(hint: Any) -> Any:
    """What a ``NewType`` or ``type X = …`` (Python 3.12) stands for; None for anything else."""
    if isinstance(hint, NewType):
        return hint.__supertype__
    return hint.__value__ if type(hint).__name__ == "TypeAliasType" else None


def _is_record(hint: Any) -> TypeGuard[type]:
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or is_typeddict(hint))


def _fields(kind: type, where: str) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """Type hints of the fields, the names that must be given, and the others' defaults."""
    hints = type_hints(kind, where)
    if is_typeddict(kind):
        required: frozenset[str] = kind.__required_keys__  # type: ignore[attr-defined]
        # Python does not see the mark where annotations are kept as text.
        loose = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
        return hints, [name for name in hints if name in required - loose], {}
    missing = dataclasses.MISSING
    taken = [f for f in dataclasses.fields(kind) if f.init]
    needed = [f.name for f in taken if f.default is missing and f.default_factory is missing]
    defaults = {f.name: f.default for f in taken if f.default is not missing}
    return {f.name: hints[f.name] for f in taken}, needed, defaults


def _closed(
    each: Mapping[str, JsonSchema], needed: Iterable[str], defaults: Mapping[str, Any]
) -> JsonSchema:
    """A closed object of these properties."""
    properties = {}
    for name, schema in each.items():
        properties[name] = dict(schema)
        if name in defaults:
            with suppress(TypeError, ValueError):  # a word to the model: Python has its own
                properties[name]["default"] = json.loads(to_json(defaults[name]))
    return {
        "type": "object",
        "properties": properties,
        "required": list(needed),
        "additionalProperties": False,
    }


def _choice(values: Iterable[Any], where: str) -> JsonSchema:
    listed = list(values)
    if not listed or any(not isinstance(v, str | int | float | None) for v in listed):
        raise ServingError(
            f"{where} must choose among texts, numbers, truth values and None, of which there is "
            "at least one"
        )
    kinds = {_SCALARS.get(type(v), "null") for v in listed}
    return {"enum": listed} | ({"type": kinds.pop()} if len(kinds) == 1 else {})
