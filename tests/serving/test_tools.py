"""Tools: schemas off type hints, arguments checked, and every way a call goes wrong."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, NewType, NotRequired, TypedDict

import jsonschema
import pytest

from workbench.errors import ServingError
from workbench.serving.client.json_types import build, schema_of
from workbench.serving.client.reply import ToolCall
from workbench.serving.client.tools import Tool, ToolResult, run, tool, toolbox


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass(frozen=True)
class Point:
    """A place on a map."""

    x: float
    y: float = 0.0


@dataclass
class Route:
    name: Annotated[str, "what it is called"]
    points: list[Point]
    tags: dict[str, int] = field(default_factory=dict)
    ends: tuple[int, str] | None = None


@dataclass
class Tree:
    value: int
    children: list[Tree]


class Row(TypedDict):
    id: int
    note: NotRequired[str]


Metres = NewType("Metres", float)


@tool
def measure(
    path: Route,
    unit: Unit = Unit.METRE,
    how: Literal["fast", "exact"] = "fast",
    scale: float = 1,
    deep: bool = False,
    most: int | None = None,
) -> dict[str, Any]:
    """Measure a path.

    It is measured along its points, one
    after the other.

    Args:
        path: in metres.
        scale (float): what it is multiplied with,
            after all else.
        nothing: is no argument.

    Returns:
        the length: a number.
    """
    return {"length": len(path.points) * scale, "unit": unit, "kind": type(path.points[0]).__name__}


def asked(name: str, arguments: str) -> ToolCall:
    return ToolCall(id="1", name=name, arguments=arguments)


def call(function: Tool | Callable[..., Any], arguments: str = "{}") -> ToolResult:
    box = toolbox([function])
    return run(asked(next(iter(box)), arguments), box)


# -- schemas --------------------------------------------------------------------------------------


def test_the_schema_of_a_function_is_closed_and_says_what_the_hints_say() -> None:
    point = {
        "type": "object", "description": "A place on a map.",
        "properties": {"x": {"type": "number"}, "y": {"type": "number", "default": 0.0}},
        "required": ["x"], "additionalProperties": False,
    }  # fmt: skip
    path = {
        "type": "object",
        "description": "in metres.",
        "properties": {
            "name": {"type": "string", "description": "what it is called"},
            "points": {"type": "array", "items": point},
            "tags": {"type": "object", "additionalProperties": {"type": "integer"}},
            "ends": {
                "anyOf": [
                    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}],
                     "minItems": 2, "maxItems": 2, "items": False},
                    {"type": "null"},
                ],
                "default": None,
            },
        },
        "required": ["name", "points"],
        "additionalProperties": False,
    }  # fmt: skip
    assert measure.to_request() == {
        "type": "function",
        "function": {
            "name": "measure",
            "description": "Measure a path.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": path,
                    "unit": {"enum": ["m", "ft"], "type": "string", "default": "m"},
                    "how": {"enum": ["fast", "exact"], "type": "string", "default": "fast"},
                    "scale": {"type": "number", "default": 1,
                              "description": "what it is multiplied with, after all else."},
                    "deep": {"type": "boolean", "default": False},
                    "most": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    }  # fmt: skip
    jsonschema.Draft202012Validator.check_schema(measure.schema)


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (None, {"type": "null"}),
        (Any, {}),
        (list, {"type": "array"}),
        (dict, {"type": "object"}),
        (tuple, {"type": "array"}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (Metres, {"type": "number"}),
        (Literal[1, "a", None], {"enum": [1, "a", None]}),
        (Row, {"type": "object", "required": ["id"], "additionalProperties": False,
               "properties": {"id": {"type": "integer"}, "note": {"type": "string"}}}),
    ],
)  # fmt: skip
def test_the_schema_of_a_type(hint: Any, schema: dict[str, Any]) -> None:
    assert schema_of(hint, "it") == schema


def test_a_class_that_contains_itself_is_defined_once() -> None:
    schema = schema_of(Tree, "it")
    assert schema["$ref"] == "#/$defs/Tree"
    assert schema["$defs"]["Tree"]["properties"]["children"] == {
        "type": "array", "items": {"$ref": "#/$defs/Tree"},
    }  # fmt: skip
    given = {"value": 1, "children": [{"value": 2, "children": []}]}
    jsonschema.validate(given, schema)
    assert build(Tree, given) == Tree(1, [Tree(2, [])])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"value": 1, "children": [{"value": 2}]}, schema)


def test_two_classes_of_one_name_that_contain_themselves() -> None:
    def other() -> type:
        @dataclass
        class Tree:
            leaves: dict[str, Tree]

        Tree.__annotations__["leaves"] = dict[str, Tree]
        return Tree

    there = other()
    schema = schema_of(tuple[Tree, there], "it")  # type: ignore[valid-type]
    assert set(schema["$defs"]) == {"Tree", "Tree_1"}
    jsonschema.validate([{"value": 1, "children": []}, {"leaves": {"a": {"leaves": {}}}}], schema)


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (set[int], "has no JSON"),
        (bytes, "has no JSON"),
        (dict[int, str], "keys are not str"),
        (Literal[b"x"], "choose among"),
        (list[complex], "complex"),
        ([int], "write list"),
        (Callable[[int], int], "has no JSON"),
    ],
)
def test_a_type_without_json_is_refused(hint: Any, words: str) -> None:
    with pytest.raises(ServingError, match=words):
        schema_of(hint, "it")


def test_what_is_no_tool_is_refused() -> None:
    def untyped(x):  # type: ignore[no-untyped-def]
        return x

    def stars(*xs: int) -> int:
        return len(xs)

    def named(**xs: int) -> int:
        return len(xs)

    def placed(x: int, /) -> int:
        return x

    async def later(x: int) -> int:
        return x

    def unknown(x: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
        return x

    for function, words in (
        (untyped, "x of untyped has no type"),
        (stars, r"\*xs"),
        (named, r"\*\*xs"),
        (placed, "no name for a model"),
        (later, "asynchronous"),
        (unknown, "type hint of unknown cannot be read"),
        (lambda: 1, "cannot be a tool's name"),
        (len, "is a Python function"),
        (5, "is a Python function"),
    ):
        with pytest.raises(ServingError, match=words):
            toolbox([function])  # type: ignore[list-item]
    with pytest.raises(ServingError, match="two tools are called measure"):
        toolbox([measure, measure])
    with pytest.raises(ServingError, match="a list of functions"):
        toolbox(measure)  # type: ignore[arg-type]
    with pytest.raises(ServingError, match="timeout"):
        tool(timeout=0)(stars)


def test_a_tool_is_still_a_function_and_a_method_may_be_one() -> None:
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def add(self, n: int) -> int:
            """Add to the total."""
            self.total += n
            return self.total

    counter = Counter()
    box = toolbox([counter.add, tool(name="twice", timeout=2)(lambda: 2)])
    assert run(asked("add", '{"n": 3}'), box).content == "3"
    assert counter.total == 3
    assert run(asked("twice", "{}"), box).content == "2"
    assert measure(Route("a", [Point(1)]))["length"] == 1
    assert repr(box["twice"]) == "Tool(twice: no arguments)"


# -- calls ----------------------------------------------------------------------------------------


def test_arguments_become_values_of_their_types() -> None:
    seen: list[Any] = []

    def take(
        path: Route, unit: Unit, pair: tuple[int, ...], either: int | str | Point, far: Metres,
        one: Literal[1, True], row: Row,
    ) -> None:  # fmt: skip
        seen.extend((path, unit, pair, either, far, one, row))

    given = {
        "path": {"name": "p", "points": [{"x": 1}], "tags": {"a": 1.0}, "ends": [3, "z"]},
        "unit": "ft", "pair": [1, 2], "either": {"x": 2, "y": 3}, "far": 4, "one": True,
        "row": {"id": 5},
    }  # fmt: skip
    result = call(take, json.dumps(given))
    assert result.error is None
    assert result.content == "null"
    assert seen == [
        Route("p", [Point(1.0)], {"a": 1}, (3, "z")), Unit.FOOT, (1, 2), Point(2.0, 3.0), 4.0,
        True, {"id": 5},
    ]  # fmt: skip
    assert isinstance(seen[0].points[0].x, float)
    assert isinstance(seen[4], float)
    assert seen[5] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"path": ', "no JSON"),
        ("{'path': 1}", "no JSON"),
        ("[1]", "do not fit: the whole"),
        ("{}", "'path' is a required property"),
        ('{"path": {"name": "a", "points": []}, "lenght": 1}', "'lenght' was unexpected"),
        ('{"path": {"name": "a", "points": [{"x": "far"}]}}', "path.points[0].x: 'far'"),
        ('{"path": {"name": "a", "points": []}, "unit": "km"}', "unit: 'km' is not one of"),
        ('{"path": {"name": "a", "points": []}, "scale": NaN}', "NaN is no JSON"),
        ('{"path": {"name": "a", "points": []}, "scale": true}', "scale: True is not of type"),
        ("[" * 100_000, "nested too deeply"),
        ('{"path": ' + "9" * 5000 + "}", "no JSON"),
    ],
)
def test_arguments_that_do_not_fit_are_told(arguments: str, words: str) -> None:
    result = call(measure, arguments)
    assert result.error is not None
    assert words in result.error
    assert len(result.error) < 700
    assert json.loads(result.content) == {"error": result.error}


def test_what_a_tool_returns_is_text_or_json() -> None:
    one = '{"path": {"name": "a", "points": [{"x": 1}]}}'
    assert json.loads(call(measure, one).content) == {"length": 1, "unit": "m", "kind": "Point"}

    def text() -> str:
        return 'naïve "text"'

    def record() -> Route:
        return Route("a", [Point(1)])

    class Words(str):
        def __len__(self) -> int:
            raise RuntimeError("not a length")

    def words() -> str:
        return Words("a\ud800")

    def echo(x: str) -> str:
        assert x.encode()  # what a model escapes by halves is whole here
        return x

    assert call(words).content == "a\ufffd"
    assert call(echo, '{"x": "a\\ud800b"}').content == "a\ufffdb"

    assert call(text).content == 'naïve "text"'
    assert call(text, "").content == 'naïve "text"'  # no arguments at all
    assert json.loads(call(record).content)["points"] == [{"x": 1, "y": 0.0}]


def raises() -> None:
    raise ValueError("a\nb \x1b[0m " + "c" * 5000)


def leaves() -> None:
    sys.exit(3)


def gives_a_set() -> set[int]:
    return {1}


def gives_nan() -> float:
    return float("nan")


def gives_itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def gives_much() -> str:
    return "x" * 200_000


def recurses() -> None:
    recurses()


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raises_in_silence() -> None:
    raise SilentError


def interrupts() -> None:
    raise KeyboardInterrupt


@dataclass
class Lazy:
    """Works its field out when somebody looks, and fails."""

    field: int = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "field":
            raise OSError("the disk is gone")
        return object.__getattribute__(self, name)


def gives_what_fails_later() -> Lazy:
    return Lazy()


class Items(dict[str, int]):
    def items(self) -> Any:
        raise OSError("the disk is gone")


def gives_items_that_fail() -> dict[str, int]:
    return Items(a=1)


def half(x: float) -> float:
    return x / 2


@dataclass
class Positive:
    n: int

    def __post_init__(self) -> None:
        if self.n <= 0:
            raise ValueError("n must be positive")


def takes_positive(p: Positive) -> int:
    return p.n


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (raises, "{}", "raises raised ValueError: a b ␛[0m ccc"),
        (leaves, "{}", "leaves raised SystemExit: 3"),
        (gives_a_set, "{}", "returned what is no JSON (a set has no JSON)"),
        (gives_nan, "{}", "returned what is no JSON"),
        (gives_itself, "{}", "returned what is no JSON"),
        (gives_much, "{}", "returned 200,000 letters, and 100,000 is the most"),
        (recurses, "{}", "RecursionError"),
        (raises_in_silence, "{}", "raised SilentError: a SilentError without a text"),
        (interrupts, "{}", "interrupts raised KeyboardInterrupt"),
        (gives_what_fails_later, "{}", "no JSON (the disk is gone)"),
        (gives_items_that_fail, "{}", "no JSON (the disk is gone)"),
        (half, '{"x": 1e400}', "1e400 is beyond a float"),
        (half, '{"x": ' + "9" * 400 + "}", "too large for a float"),
        (takes_positive, '{"p": {"n": -1}}', "do not fit: Positive does not take it: n must be"),
    ],
)
def test_a_tool_that_fails_says_so_and_no_more(
    function: Callable[..., Any], arguments: str, words: str
) -> None:
    result = call(function, arguments)
    assert result.error is not None
    assert words in result.error
    assert "\n" not in result.error
    assert len(result.error) < 700
    assert json.loads(result.content) == {"error": result.error}


def test_an_unknown_tool_is_told_what_there_is() -> None:
    result = run(asked("mesure", "{}"), toolbox([measure, raises]))
    assert result.error == "there is no tool 'mesure'; there is: measure, raises"
    assert "there is: no tool" in str(run(asked("x", "{}"), {}).error)


def test_a_tool_that_takes_too_long_is_left_behind() -> None:
    over = threading.Event()

    @tool(timeout=0.2)
    def waits() -> str:
        over.wait(10)
        return "late"

    start = time.monotonic()
    result = call(waits)
    assert time.monotonic() - start < 2
    assert "waits took longer than 0.2 s" in str(result.error)
    assert 0.2 <= result.seconds < 2
    over.set()


def test_a_stop_does_not_wait_for_a_tool() -> None:
    over, stop = threading.Event(), threading.Event()

    def waits() -> None:
        over.wait(10)

    threading.Timer(0.2, stop.set).start()
    start = time.monotonic()
    result = run(asked("waits", "{}"), toolbox([waits]), stop)
    assert time.monotonic() - start < 2
    assert "waits was stopped" in str(result.error)
    called: list[int] = []

    def notes() -> None:
        called.append(1)

    assert "was not called" in str(run(asked("notes", "{}"), toolbox([notes]), stop).error)
    assert not called
    over.set()
