"""Tools: Python functions that a model may call, and what happens when it does.

The JSON schema of a tool is read off its type hints and docstring. Whatever goes wrong with a call
becomes a sentence for the model and for the reader, never the end of the session.
"""

from __future__ import annotations

import contextvars
import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from workbench.errors import ServingError
from workbench.serving.client.json_check import (
    JsonSchema,
    problem,
    read_json,
    short,
    to_json,
    without_surrogates,
)
from workbench.serving.client.json_types import arguments_schema, build, type_hints
from workbench.serving.client.reply import ToolCall

TIMEOUT = 30.0  # seconds a call may take
_MOST = 100_000  # letters of a result: more would fill the model's context
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_POLL = 0.05  # seconds between two looks at a stop button


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tool:
    """A function offered to a model; calling the tool calls the function.

    Attributes:
        description: the first paragraph of the docstring.
        schema: of the arguments, a closed object.
        hints: the type of each argument.
        timeout: seconds that a call of the model's may take.
    """

    name: str
    description: str
    schema: JsonSchema
    function: Callable[..., Any]
    hints: Mapping[str, Any]
    timeout: float = TIMEOUT

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Tool({self.name}: {', '.join(self.hints) or 'no arguments'})"

    def to_request(self) -> dict[str, Any]:
        """As the chat API takes it."""
        inner = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": inner}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came of a call.

    Attributes:
        content: what the model is told: text as it is, anything else as JSON.
        error: what went wrong, None where nothing did; the model is told that as well.
        seconds: measured here.
    """

    call: ToolCall
    content: str
    error: str | None
    seconds: float


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *, name: str | None = None, timeout: float = TIMEOUT
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: float = TIMEOUT,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function, as ``@tool`` or ``@tool(timeout=5)``.

    Types may be those of :data:`workbench.serving.client.json_types.KNOWN`;
    ``Annotated[str, "what it is"]`` or the docstring's ``Args:`` describe an argument.

    Args:
        name: by default the function's.
        timeout: seconds that a call of the model's may take.

    Raises:
        ServingError: an argument has no type, or one without JSON.
    """

    def made(function: Callable[..., Any]) -> Tool:
        return _tool(function, name, timeout)

    return made if function is None else made(function)


def toolbox(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Tools by name; plain functions become tools.

    Raises:
        ServingError: two have one name, or a function is no tool.
    """
    if callable(tools) or not isinstance(tools, Sequence):
        raise ServingError("tools is a list of functions: tools=[f, g]")
    box: dict[str, Tool] = {}
    for one in tools:
        made = one if isinstance(one, Tool) else _tool(one, None, TIMEOUT)
        if made.name in box:
            raise ServingError(f"two tools are called {made.name}; rename one: @tool(name=…)")
        box[made.name] = made
    return box


def run(call: ToolCall, box: Mapping[str, Tool], stop: threading.Event | None = None) -> ToolResult:
    """Do what a model asks for; whatever goes wrong is in the result.

    ``stop`` gives up waiting for the function, which Python cannot end: it goes on by itself.
    """
    start = time.perf_counter()
    try:
        content, error = _outcome(call, box, stop), None
    except _FailedError as failed:
        error = str(failed)
        content = json.dumps({"error": error}, ensure_ascii=False)
    return ToolResult(call=call, content=content, error=error, seconds=time.perf_counter() - start)


class _FailedError(Exception):
    """What a model is told about a call that gave nothing."""


def _outcome(call: ToolCall, box: Mapping[str, Tool], stop: threading.Event | None) -> str:
    if call.name not in box:
        there = ", ".join(box) or "no tool"
        raise _FailedError(f"there is no tool {short(repr(call.name), 80)}; there is: {there}")
    if stop is not None and stop.is_set():
        raise _FailedError(f"{call.name} was not called: the turn was stopped")
    chosen = box[call.name]
    value = _timed(chosen, _arguments(chosen, call.arguments), stop)
    try:
        # Of a class that is a str and more only the letters: its methods are the tool's.
        content = str.__str__(value) if isinstance(value, str) else to_json(value)
    except Exception as error:  # a value may work itself out only now, and fail in any way
        raise _FailedError(
            f"{chosen.name} returned what is no JSON ({short(error, 120)}); return text, "
            "numbers, lists, dicts or dataclasses of them"
        ) from None
    if len(content) > _MOST:
        raise _FailedError(
            f"{chosen.name} returned {len(content):,} letters, and {_MOST:,} is the most; ask it "
            "for less"
        )
    return without_surrogates(content)


def _arguments(chosen: Tool, text: str) -> dict[str, Any]:
    try:
        given = read_json(text or "{}")  # some models write nothing where there are no arguments
    except ValueError as error:
        raise _FailedError(
            f"the arguments of {chosen.name} are no JSON ({short(error, 80)}): {short(text, 120)}"
        ) from None
    if wrong := problem(given, chosen.schema):
        raise _FailedError(f"the arguments of {chosen.name} do not fit: {wrong}")
    try:
        return {name: build(chosen.hints[name], value) for name, value in given.items()}
    except ServingError as error:
        raise _FailedError(f"the arguments of {chosen.name} do not fit: {error}") from None


def _timed(chosen: Tool, arguments: dict[str, Any], stop: threading.Event | None) -> Any:
    """Call in a thread, which is left behind when it takes too long."""
    returned: list[Any] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            returned.append(chosen.function(**arguments))
        except BaseException as error:  # SystemExit as well: it is the tool's, not the session's
            raised.append(error)

    # What it prints belongs to the cell that runs, which ipykernel keeps in the context.
    context = contextvars.copy_context()
    thread = threading.Thread(
        target=context.run, args=(work,), daemon=True, name=f"tool {chosen.name}"
    )
    thread.start()
    deadline = time.monotonic() + chosen.timeout
    while thread.is_alive():
        thread.join(min(_POLL, max(0.0, deadline - time.monotonic())))
        if stop is not None and stop.is_set():
            raise _FailedError(f"{chosen.name} was stopped; what it would have returned is lost")
        if thread.is_alive() and time.monotonic() >= deadline:
            raise _FailedError(
                f"{chosen.name} took longer than {chosen.timeout:g} s; it goes on by itself, and "
                "what it returns is lost"
            )
    if raised:
        raise _FailedError(f"{chosen.name} raised {type(raised[0]).__name__}: {short(raised[0])}")
    return returned[0]


# -- a function's schema --------------------------------------------------------------------------


def _tool(function: Any, name: str | None, timeout: float) -> Tool:
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise ServingError(
            f"a tool is a Python function, not {short(repr(function), 60)}; wrap it in one: def …"
        )
    name = function.__name__ if name is None else name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ServingError(
            f"{short(repr(name), 60)} cannot be a tool's name; use up to 64 letters, digits, _ and "
            "-: @tool(name=…)"
        )
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not timeout > 0 or (isinstance(timeout, int) and timeout > 2**53):
        raise ServingError(f"the timeout of {name} is a number of seconds above 0")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ServingError(f"{name} is asynchronous; a tool is a plain function: def {name}(…)")
    parameters = inspect.signature(function).parameters
    hints = type_hints(function, name)
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ServingError(
                f"{name} has the argument {parameter}, which has no name for a model to give; "
                "write each argument out"
            )
        if parameter.name not in hints:
            raise ServingError(
                f"the argument {parameter.name} of {name} has no type; write "
                f"{parameter.name}: str, or whatever it is"
            )
    empty = inspect.Parameter.empty
    words = inspect.cleandoc(function.__doc__ or "")
    taken = {p: hints[p] for p in parameters}
    schema = arguments_schema(
        taken,
        [p.name for p in parameters.values() if p.default is empty],
        {p.name: p.default for p in parameters.values() if p.default is not empty},
        name,
    )
    for argument, description in _described(words).items():
        if argument in schema["properties"]:
            schema["properties"][argument].setdefault("description", description)
    return Tool(
        name=name,
        description=" ".join(words.split("\n\n")[0].split()),
        schema=schema,
        function=function,
        hints=taken,
        timeout=float(timeout),
    )


def _described(words: str) -> dict[str, str]:
    """Name -> description, of a docstring's ``Args:``."""
    found: dict[str, str] = {}
    name, depth = "", None
    for line in words.partition("\nArgs:\n")[2].split("\n"):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if indent == 0:
            break
        depth = indent if depth is None else depth
        if indent <= depth:
            name, colon, rest = line.strip().partition(":")
            name = name.split(" (")[0].strip()
            found[name] = rest.strip() if colon else ""
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return {name: text for name, text in found.items() if text}
