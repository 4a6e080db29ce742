"""JSON in and out: read strictly, checked against a schema, written from Python values."""

from __future__ import annotations

import dataclasses
import json
import re
from enum import Enum
from importlib import import_module
from math import isfinite
from typing import Any

from workbench.errors import ServingError
from workbench.terminal import printable

JsonSchema = dict[str, Any]
_HALVES = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
_LONGEST = 300  # letters of an error that is somebody else's


def short(text: object, most: int = _LONGEST) -> str:
    """Text of a model, a server or a tool for a message: one line, printable, not long."""
    try:
        words = str.__str__(str(text))
    except Exception:  # an error of the user's own, whose text is worked out and fails
        words = f"a {type(text).__name__} without a text"
    line = " ".join(printable(words).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def without_surrogates(text: str) -> str:
    """``text`` as it can be written as UTF-8: JSON may escape halves of signs (``\\ud800``)."""
    return _HALVES.sub("\ufffd", text)


def read_json(text: str) -> Any:
    """Strict JSON: not-a-number and infinity are refused, also as ``1e400``; halves of signs are
    replaced, so that what is read can be written again.

    Raises:
        ValueError: it is no JSON, or nested deeper or with longer numbers than Python reads.
    """
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_real)
        return _whole_signs(value) if _ESCAPED.search(text) or _HALVES.search(text) else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole_signs(value: Any) -> Any:
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, list):
        return [_whole_signs(one) for one in value]
    if isinstance(value, dict):
        return {without_surrogates(name): _whole_signs(one) for name, one in value.items()}
    return value


def _real(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text:.40} is beyond a float")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def to_json(value: Any) -> str:
    """A Python value as JSON text; dataclasses as objects, enumerations as their values.

    Raises:
        TypeError, ValueError: it has no JSON.
    """
    try:
        return json.dumps(value, default=_plain, allow_nan=False, ensure_ascii=False)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"a {type(value).__name__} has no JSON")


def validator(schema: JsonSchema | bool) -> Any:
    """A ``jsonschema`` validator (draft 2020-12) that fetches nothing from anywhere.

    Raises:
        ServingError: the schema is none, or ``jsonschema`` is not installed.
    """
    try:
        jsonschema, referencing = import_module("jsonschema"), import_module("referencing")
    except ImportError:
        raise ServingError(
            "checking JSON against a schema needs jsonschema: pip install jsonschema"
        ) from None
    kind = jsonschema.Draft202012Validator
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ServingError(
            f"this is no JSON schema: {short(error.message)} (at {place(error.absolute_path)})"
        ) from None
    except RecursionError:
        raise ServingError("the JSON schema is nested too deeply; flatten it") from None
    return kind(schema, registry=referencing.Registry())


def problem(value: Any, schema: JsonSchema | bool) -> str | None:
    """What is wrong with a JSON value by a schema, in a few words; None where nothing is.

    Raises:
        ServingError: the schema is none, or refers to what is not in it.
    """
    checking = validator(schema)
    try:
        found = import_module("jsonschema").exceptions.best_match(checking.iter_errors(value))
    except RecursionError:
        return "it, or its schema, is nested too deeply"
    except OverflowError:
        return "it has a number that is too long to be compared"
    except import_module("referencing").exceptions.Unresolvable as error:
        raise ServingError(
            f"the JSON schema refers to {short(error, 120)}, which is not in it; put it under $defs"
        ) from None
    except re.error as error:
        raise ServingError(
            f"a pattern of the JSON schema is no regular expression: {short(error)}"
        ) from None
    return None if found is None else f"{place(found.absolute_path)}: {short(found.message)}"


def place(path: Any) -> str:
    """Where in a document, like ``rows[2].name``."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return short("".join(steps).lstrip("."), 120) or "the whole"
