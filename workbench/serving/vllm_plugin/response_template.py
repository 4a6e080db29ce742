"""A checkpoint's ``response_template``: which markers wrap thinking, answer and tool calls.

It stands in ``tokenizer_config.json``, version 1: a ``start_anchor`` after which the assistant
writes, and fields ``thinking``, ``content`` and ``tool_calls``, each with an opener and a closer; a
tool call's opener names the function in a group ``name``. vLLM 0.33's Beam parser reads the same
entry. Nothing of vLLM is imported here; :mod:`reply_reader` reads text with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from workbench.errors import ServingError

Field = Literal["thinking", "content", "tool_calls"]
FIELDS: tuple[Field, ...] = ("thinking", "content", "tool_calls")

# An opener given as a pattern is looked for within so many characters: what has not become one by
# then is text. Without a bound a stray "<tool_call>" would hold back all that follows it.
MOST_OPENER = 256

_KEYS = {"version", "defaults", "start_anchor", "fields"}
_FIELD_KEYS = {
    "open", "open_pattern", "close", "content", "repeats", "optional", "transform"
}  # fmt: skip
_TRANSFORM = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_SPECIAL = frozenset(".^$*+?{}[]|()")
_QUANTIFIERS = frozenset("*+?{")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Text that opens or closes a field.

    Attributes:
        head: the literal text it begins with.
        pattern: the whole of it; matched where the head was found.
        literal: whether the head is all of it.
    """

    head: str
    pattern: re.Pattern[str]
    literal: bool

    @classmethod
    def of_text(cls, text: str) -> Marker:
        """A marker that is always the same text."""
        return cls(head=text, pattern=re.compile(re.escape(text)), literal=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """How one field is written: any of ``openers``, the field's text, any of ``closers``."""

    field: Field
    openers: tuple[Marker, ...]
    closers: tuple[Marker, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTemplate:
    """A checked ``response_template``.

    Attributes:
        anchors: texts after whose last occurrence in the prompt the assistant's message begins.
        regions: by field; a template that was read has ``content``.
    """

    anchors: tuple[str, ...]
    regions: Mapping[Field, Region]

    @classmethod
    def of(cls, data: object, where: str = "response_template") -> ResponseTemplate:
        """The template of the parsed JSON object.

        Raises:
            ServingError: it is no template of version 1, or one with a part that a served reply
                cannot be read by; the message names the part.
        """
        data = _object(data, where)
        if data.get("version", 1) != 1:
            raise ServingError(f"{where}: version is {data['version']!r:.40}; only 1 is known")
        _only(data, _KEYS, where)
        defaults = _object(data.get("defaults", {}), f"{where}.defaults")
        _only(defaults, {"role"}, f"{where}.defaults")
        fields = _object(data.get("fields"), f"{where}.fields")
        _only(fields, set(FIELDS), f"{where}.fields")
        if "content" not in fields:
            raise ServingError(f"{where}: there is no field content; say how an answer is written")
        anchors = _texts(data.get("start_anchor"), f"{where}.start_anchor")
        regions = {name: _region(name, fields[name], where) for name in FIELDS if name in fields}
        return cls(anchors=anchors, regions=regions)

    @property
    def markers(self) -> frozenset[str]:
        """The literal openers and closers, and the heads of the others."""
        every = (m for r in self.regions.values() for m in (*r.openers, *r.closers))
        return frozenset(marker.head for marker in every)

    def keeping(self, *fields: Field) -> ResponseTemplate:
        """This template with only some of its fields: the markers of the others are then text."""
        regions = {name: region for name, region in self.regions.items() if name in fields}
        return ResponseTemplate(anchors=self.anchors, regions=regions)

    def message_of(self, prompt: str) -> str:
        """What of the prompt belongs to the message that the assistant is to continue.

        That is what follows the last anchor; "" where there is none.
        """
        ends = [prompt.rfind(anchor) + len(anchor) for anchor in self.anchors if anchor in prompt]
        return prompt[max(ends) :] if ends else ""


def _region(name: Field, data: object, where: str) -> Region:
    where = f"{where}.fields.{name}"
    data = _object(data, where)
    _only(data, _FIELD_KEYS, where)
    calls = name == "tool_calls"
    kind = "json" if calls else "text"
    if data.get("content", "text") != kind:
        raise ServingError(f"{where}.content is {data.get('content')!r:.40}; it must be {kind!r}")
    for key in ("repeats", "optional"):
        if not isinstance(data.get(key, False), bool):
            raise ServingError(f"{where}.{key} must be true or false")
    if ("open" in data) == ("open_pattern" in data):
        raise ServingError(f"{where} needs open or open_pattern, and not both")
    if "open" in data:
        openers = tuple(map(Marker.of_text, _texts(data["open"], f"{where}.open")))
    else:
        openers = (_pattern(data["open_pattern"], f"{where}.open_pattern"),)
    names = {group for opener in openers for group in opener.pattern.groupindex}
    if names != ({"name"} if calls else set()):
        asked = "one group, name, for the function's name" if calls else "no named group"
        raise ServingError(f"{where}: the opener must have {asked}")
    if data.get("transform") not in (None, _TRANSFORM) or (not calls and "transform" in data):
        raise ServingError(
            f"{where}.transform must be left out"
            + (" or give a function with name {name} and arguments {content}" if calls else "")
        )
    closers = tuple(map(Marker.of_text, _texts(data.get("close"), f"{where}.close")))
    return Region(field=name, openers=openers, closers=closers)


def _pattern(text: object, where: str) -> Marker:
    if not isinstance(text, str) or not text:
        raise ServingError(f"{where} must be a regular expression, not {text!r:.60}")
    try:
        pattern = re.compile(text, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise ServingError(f"{where} is no regular expression: {error}") from None
    head = _head(text)
    if not head:
        raise ServingError(
            f"{where} must begin with literal text and have no alternatives, so that it can be "
            "found in a stream"
        )
    return Marker(head=head, pattern=pattern, literal=False)


def _head(pattern: str) -> str:
    """The literal text that every match of ``pattern`` begins with; "" where it cannot be told."""
    if "|" in pattern.replace("\\|", ""):
        return ""
    head: list[str] = []
    at = 0
    while at < len(pattern):
        sign, step = pattern[at], 1
        if sign == "\\" and at + 1 < len(pattern):
            escaped, step = pattern[at + 1], 2
            sign = _ESCAPED.get(escaped, "") if escaped.isalnum() else escaped
        elif sign in _SPECIAL or sign == "\\":
            sign = ""
        after = pattern[at + step : at + step + 1]
        if not sign or after in _QUANTIFIERS:
            break
        head.append(sign)
        at += step
    return "".join(head)


def _object(data: object, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ServingError(f"{where} must be a JSON object, not {data!r:.60}")
    return data


def _only(data: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise ServingError(
            f"{where} has {unknown[0]!r:.40}, which cannot be served; known are "
            f"{', '.join(sorted(known))}"
        )


def _texts(data: object, where: str) -> tuple[str, ...]:
    texts = [data] if isinstance(data, str) else data
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise ServingError(f"{where} must be a text or a list of texts, not {data!r:.60}")
    return tuple(dict.fromkeys(texts))
