"""Structured output: schemas asked for and refused, answers read back and refused."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import jsonschema
import pytest

from serving import openai_server as fake
from workbench.errors import ServingError
from workbench.serving.client.client import Client
from workbench.serving.client.json_unsatisfiable import unsatisfiable
from workbench.serving.client.structured import shape_of


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Part:
    name: str
    colour: Colour
    size: float | None = None


@dataclass(frozen=True)
class Order:
    """What was ordered."""

    parts: tuple[Part, ...]
    how: Literal["post", "fetch"]


@dataclass
class Endless:
    inner: Endless


ORDER = {"parts": [{"name": "wheel", "colour": "red", "size": 2}], "how": "post"}


def asked_for(schema: Any, *steps: fake.Step) -> tuple[Any, dict[str, Any]]:
    """The value of an answer, and the request."""
    with fake.serving(*steps) as server, Client(server.url) as client:
        return client.chat("?", schema=schema).finish().value, server.chats[0]


def test_a_dataclass_is_asked_for_and_comes_back() -> None:
    text = json.dumps(ORDER)
    halves = fake.say(text[:20], text[20:])
    value, request = asked_for(Order, halves)
    assert value == Order((Part("wheel", Colour.RED, 2.0),), "post")
    format_ = request["response_format"]
    assert format_["type"] == "json_schema"
    assert format_["json_schema"]["name"] == "Order"
    assert format_["json_schema"]["strict"] is True
    schema = format_["json_schema"]["schema"]
    assert schema["description"] == "What was ordered."
    assert schema["additionalProperties"] is False
    jsonschema.validate(ORDER, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(ORDER | {"more": 1}, schema)


def test_other_types_and_plain_schemas() -> None:
    assert asked_for(list[int], fake.say("[1, 2]"))[0] == [1, 2]
    assert asked_for(Colour, fake.say('"blue"'))[0] is Colour.BLUE
    schema = {"type": "object", "title": "A b!", "properties": {"x": {"type": "integer"}}}
    value, request = asked_for(schema, fake.say(' {"x": 3}\n'))
    assert value == {"x": 3}
    assert request["response_format"]["json_schema"] == {
        "name": "A_b_", "schema": schema, "strict": True,
    }  # fmt: skip


def test_an_answer_that_asks_for_a_tool_is_not_parsed_yet() -> None:
    def look(x: int) -> int:
        return x

    with fake.serving(fake.call(("look", '{"x": 1}'))) as server, Client(server.url) as client:
        reply = client.chat("?", schema=Order, tools=[look]).finish()
    assert reply.value is None
    assert reply.tool_calls[0].name == "look"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (fake.say('{"parts": [{"na', finish="length"), "cut off in its JSON after 1 token"),
        (fake.stream(fake.delta("length", reasoning="hm")), "cut off before its JSON began; raise"),
        (fake.say("Sure: {}"), "is no JSON"),
        (fake.say("<b>no</b>"), "is no JSON"),
        (fake.say("  "), "the answer is empty"),
        (fake.say('{"parts": [], "how": "fly"}'), "does not fit Order: how: 'fly' is not one of"),
        (fake.say('{"parts": [], "how": "post", "x": 1}'), "'x' was unexpected"),
        (fake.say('{"parts": [{"name": "a"}], "how": "post"}'), "parts[0]: 'colour' is a required"),
        (fake.say("NaN"), "NaN is no JSON"),
        (fake.say("1e400"), "1e400 is beyond a float"),
        (fake.document({"error": {"message": "Grammar error: too complex"}}, code=400),
         "refuses the request (400): Grammar error"),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_said(step: fake.Step, words: str) -> None:
    with pytest.raises(ServingError) as caught:
        asked_for(Order, step)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_came_can_be_looked_at_where_it_is_no_value() -> None:
    step = fake.say('{"parts": [{"na', finish="length")
    with fake.serving(step) as server, Client(server.url) as client:
        answer = client.chat("?", schema=Order)
        with pytest.raises(ServingError, match="cut off in its JSON"):
            answer.finish()
        assert (answer.reply.text, answer.reply.value) == ('{"parts": [{"na', None)


def test_numbers_that_are_too_long_to_be_compared_are_said() -> None:
    with pytest.raises(ServingError, match="too long to be compared"):
        asked_for({"type": "integer", "multipleOf": 0.5}, fake.say("9" * 400))


def test_halves_of_signs_in_a_value_are_replaced() -> None:
    value, _ = asked_for(
        {"type": "object"}, fake.say('{"a\\ud800": ["\\udfff", "\\ud83d\\ude00"]}')
    )
    assert value == {"a\ufffd": ["\ufffd", "\U0001f600"]}  # a pair is one sign


def test_a_class_that_refuses_its_values_is_said() -> None:
    @dataclass
    class Even:
        n: int

        def __post_init__(self) -> None:
            if self.n % 2:
                raise ValueError("odd")

    assert asked_for(Even, fake.say('{"n": 2}'))[0] == Even(2)
    with pytest.raises(ServingError, match="Even does not take it: odd"):
        asked_for(Even, fake.say('{"n": 3}'))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strnig"}, "this is no JSON schema"),
        ({"properties": 3}, "this is no JSON schema"),
        ({"enum": []}, "empty enum"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum above its maximum"),
        ({"type": "number", "exclusiveMinimum": 5, "maximum": 5}, "minimum above its maximum"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength above its maxLength"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems above"),
        ({"type": "string", "enum": [1, 2]}, "none of the choices"),
        ({"type": "integer", "const": "a"}, "none of the choices"),
        ({"not": {}}, "excludes everything"),
        ({"anyOf": [{"enum": []}, False]}, "empty enum"),
        ({"allOf": [{"type": "string"}, {"enum": []}]}, "empty enum"),
        ({"type": "object", "required": ["a"], "additionalProperties": False},
         "a is required and not allowed"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"not": {}}}}, "a excludes"),
        ({"type": "array", "minItems": 1, "items": False}, "allows nothing"),
        ({"type": "array", "minItems": 1, "prefixItems": [{"enum": []}]}, "[0] has an empty enum"),
        ({"$ref": "#/$defs/x"}, "refers to #/$defs/x, which is not in the schema"),
        ({"$ref": "https://example.com/s.json"}, "which is not in the schema"),
        (Endless, "must contain itself without end"),
        (set[int], "has no JSON"),
    ],
)  # fmt: skip
def test_a_schema_that_nothing_fits_is_refused_before_anything_is_sent(
    schema: Any, words: str
) -> None:
    with fake.serving() as server, Client(server.url) as client:
        with pytest.raises(ServingError) as caught:
            client.chat("?", schema=schema)
        assert words in str(caught.value)
        assert not server.asked


def test_a_schema_that_something_fits_is_never_refused() -> None:
    """Random schemas with a value that fits by construction, checked by the library."""
    draw = random.Random(3)

    def made(depth: int) -> tuple[dict[str, Any], Any]:
        kind = draw.choice(["integer", "string", "enum", "anyOf", "array", "object"])
        if depth == 0 and kind in ("anyOf", "array", "object"):
            kind = "integer"
        if kind == "integer":
            value = draw.randint(-5, 5)
            return {"type": kind, "minimum": value - draw.randint(0, 1), "maximum": value}, value
        if kind == "string":
            text = "a" * draw.randint(0, 3)
            return {"type": kind, "minLength": len(text), "maxLength": len(text)}, text
        if kind == "enum":
            return {"type": "string", "enum": ["x", 1]}, "x"
        if kind == "anyOf":
            schema, value = made(depth - 1)
            return {"anyOf": [{"enum": []}, schema, {"not": {}}]}, value
        parts = [made(depth - 1) for _ in range(draw.randint(0, 2))]
        if kind == "array":
            fixed = [schema for schema, _ in parts]
            count = len(parts)
            schema = {"type": kind, "minItems": count, "maxItems": count, "items": False}
            return schema | ({"prefixItems": fixed} if fixed else {}), [v for _, v in parts]
        names = [f"p{n}" for n in range(len(parts))]
        properties = dict(zip(names, (s for s, _ in parts), strict=True))
        return {
            "type": kind, "properties": properties | {"no": {"enum": []}}, "required": names,
            "additionalProperties": False,
        }, dict(zip(names, (v for _, v in parts), strict=True))  # fmt: skip

    for _ in range(300):
        schema, value = made(3)
        jsonschema.validate(value, schema)
        assert unsatisfiable(schema) is None, schema


def test_shapes_pass_through() -> None:
    shape = shape_of(Order)
    assert shape_of(shape) is shape


def test_classes_that_refer_to_each_other_are_looked_through_quickly() -> None:
    names = [f"C{n}" for n in range(14)]
    every = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    full = {"type": "object", "properties": every, "required": names}
    stuck = {"$ref": "#/$defs/C0", "$defs": dict.fromkeys(names, full)}
    start = time.monotonic()
    assert "must contain itself without end" in str(unsatisfiable(stuck))
    # One of them may be nothing, and so may all that refer to it alone.
    ended = {"anyOf": [{"type": "null"}, full]}
    assert unsatisfiable(stuck | {"$defs": dict.fromkeys(names, ended)}) is None
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("reference", ["#/anyOf/1", "#here", "#/$defs/a~1b"])
def test_references_of_every_kind_are_followed(reference: str) -> None:
    schema = {
        "anyOf": [{"type": "null"}, {"type": "integer", "$anchor": "here"}],
        "$defs": {"a/b": {"type": "integer"}},
        "properties": {"x": {"$ref": reference}},
        "required": ["x"],
        "type": "object",
    }
    assert unsatisfiable(schema) is None
