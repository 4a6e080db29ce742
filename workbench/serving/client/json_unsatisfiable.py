"""Schemas that no JSON value can satisfy, found before a server is asked to.

Not a proof the other way round: what is found here is unsatisfiable, the rest may be as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from workbench.serving.client.json_check import problem, short

_SCALAR_KEYWORDS = frozenset(
    (
        "type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "minLength", "maxLength", "pattern",
    )
)  # fmt: skip


def unsatisfiable(schema: Any) -> str | None:
    """Why no JSON value can satisfy a valid schema, as far as can be told; None where one may."""
    refs = {ref: _target(schema, ref) for ref in _references(schema)}
    inner = {ref: found for ref, found in refs.items() if found is not None}
    # What must contain itself is never reached when one begins with what contains nothing.
    possible: set[str] = set()
    while grown := {
        r for r in inner.keys() - possible if not _Search(inner, possible).why(inner[r])
    }:
        possible |= grown
    return _Search(inner, possible).why(schema)


def _references(schema: Any) -> set[str]:
    found: set[str] = set()
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            left += one.values()
            if isinstance(one.get("$ref"), str):
                found.add(one["$ref"])
        elif isinstance(one, list):
            left += one
    return found


@dataclass(frozen=True, slots=True)
class _Search:
    """Looks for what nothing fits, given the references that something is known to fit."""

    inner: Mapping[str, Any]
    possible: AbstractSet[str]

    def why(self, schema: Any, where: str = "the whole") -> str | None:
        if schema is False:
            return f"{where} allows nothing"
        if not isinstance(schema, Mapping):
            return None
        if schema.get("not") in (True, {}):
            return f"{where} excludes everything"
        reference = schema.get("$ref")
        if isinstance(reference, str) and (why := self._why_not(reference, where)):
            return why
        for name in ("anyOf", "oneOf"):
            reasons = [self.why(part, where) for part in schema.get(name, [])]
            if reasons and all(reasons):
                return reasons[0]
        for part in schema.get("allOf", []):
            if why := self.why(part, where):
                return why
        return _no_choice(schema, where) or _empty_range(schema, where) or self._part(schema, where)

    def _why_not(self, reference: str, where: str) -> str | None:
        if reference not in self.inner:
            return f"{where} refers to {short(reference, 80)}, which is not in the schema"
        if reference in self.possible:
            return None
        assuming = _Search(self.inner, self.inner.keys())
        other = assuming.why(self.inner[reference], where)
        return other or f"{where} must contain itself without end"

    def _part(self, schema: Mapping[str, Any], where: str) -> str | None:
        """Properties and items that there must be and cannot."""
        if schema.get("type") == "object":
            properties = schema.get("properties", {})
            closed = schema.get("additionalProperties") is False
            for name in schema.get("required", []):
                at = short(name, 60)
                if name in properties:
                    if why := self.why(properties[name], at):
                        return why
                elif closed and "patternProperties" not in schema:
                    return f"{at} is required and not allowed"
        if schema.get("type") == "array":
            needed, first = schema.get("minItems", 0), schema.get("prefixItems", [])
            for number, part in enumerate(first[:needed]):
                if why := self.why(part, f"{where}[{number}]"):
                    return why
            if needed > len(first):
                return self.why(schema.get("items", True), f"{where}[]")
        return None


def _target(root: Any, reference: str) -> Any:
    """What a reference within the schema points to; None where there is nothing."""
    if reference[:1] == "#" and reference[1:2] not in ("", "/"):
        return True  # an anchor: anything, as far as is looked here
    if reference[:1] != "#":
        return None
    found = root
    for step in filter(None, reference[1:].split("/")):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, Mapping) and step in found:
            found = found[step]
        else:
            return None
    return found


def _no_choice(schema: Mapping[str, Any], where: str) -> str | None:
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is None:
        return None
    if not choices:
        return f"{where} has an empty enum"
    rest = {k: v for k, v in schema.items() if k in _SCALAR_KEYWORDS}
    if all(problem(choice, rest) for choice in choices):
        return f"none of the choices of {where} fits its other keywords"
    return None


def _empty_range(schema: Mapping[str, Any], where: str) -> str | None:
    kinds = schema.get("type")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds or ())
    for kind, low, high in (
        ("string", "minLength", "maxLength"),
        ("array", "minItems", "maxItems"),
        ("object", "minProperties", "maxProperties"),
    ):
        if kinds == {kind} and schema.get(low, 0) > schema.get(high, math.inf):
            return f"{where} has a {low} above its {high}"
    if kinds and kinds <= {"number", "integer"}:
        low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
        high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
        if low > high or (low == high and low in _excluded(schema)):
            return f"{where} has its minimum above its maximum"
    return None


def _excluded(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    return schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
