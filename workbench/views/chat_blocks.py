"""A chat as blocks: what was said, thought, called and answered, in the order of a page.

The same blocks make the live page, which is sent what changes in them, and the page that stays. All
text in them is printable and none of it is markup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.serving.client.chat import Event
from workbench.serving.client.conversation import Conversation
from workbench.serving.client.json_check import read_json, to_json
from workbench.serving.client.reply import STOPPED, Piece, Reply, Speculation, ToolCall
from workbench.serving.client.tools import ToolResult
from workbench.terminal import printable
from workbench.views.numbers import plural

Kind = Literal["user", "answer", "call", "error"]
Change = dict[str, Any]
_FINISHES = {
    "stop": "",
    "tool_calls": "",
    "length": "cut off at the limit of tokens",
    STOPPED: "stopped here",
}


@dataclass(slots=True)
class Block:
    """One block.

    ``fields`` by kind: ``user`` and ``error`` have ``text``; ``answer`` has ``reasoning``,
    ``text``, ``foot`` and, parsed, ``value`` with ``parsed`` true; ``call`` has ``name``,
    ``arguments``, ``done`` and, when it is, ``result``, ``failed`` and ``foot``.
    """

    id: int
    kind: Kind
    fields: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As a page takes it."""
        return {"id": self.id, "kind": self.kind, **self.fields}


class Blocks:
    """The blocks of one chat; :meth:`add` takes what a turn yields.

    Args:
        changed: told of every change: a block that is ``new``, fields to ``set``, text to ``add``.
    """

    def __init__(self, changed: Callable[[Change], object] = lambda _: None) -> None:
        self.all: list[Block] = []
        self._changed = changed
        self._next = 0
        self._answer: Block | None = None  # of the round that is being written
        self._calls: dict[int, Block] = {}  # its calls, by their index
        self._waiting: list[Block] = []  # calls that have no result yet

    def user(self, text: str) -> None:
        """Begin a turn."""
        self._end()
        self._new("user", text=printable(text))

    def add(self, event: Event) -> None:
        """A piece, an answer, or what came of a call."""
        if isinstance(event, Piece):
            self._piece(event)
        elif isinstance(event, Reply):
            self._reply(event)
        else:
            self._result(event)

    def error(self, text: str) -> None:
        """Say that the turn has failed; what is there of it stays to be read."""
        for block in reversed(self.all):
            if block.kind == "user":
                break
            if block.kind == "call" and not block.fields["done"]:
                self._set(block, result="not called", failed=True, done=True)
        self._end()
        self._new("error", text=printable(text))

    def clear(self) -> None:
        """Take all away; the page is to be written anew after that."""
        self.all.clear()
        self._end()

    def _end(self) -> None:
        self._answer, self._calls, self._waiting = None, {}, []

    def _new(self, kind: Kind, **fields: Any) -> Block:
        block = Block(self._next, kind, fields)
        self._next += 1
        self.all.append(block)
        self._changed({"new": block.to_dict()})
        return block

    def _set(self, block: Block, **fields: Any) -> None:
        block.fields.update(fields)
        self._changed({"id": block.id, "set": fields})

    def _append(self, block: Block, name: str, text: str) -> None:
        block.fields[name] += text
        self._changed({"id": block.id, "add": {name: text}})

    def _answering(self) -> Block:
        if self._answer is None:
            self._calls = {}
            self._answer = self._new("answer", reasoning="", text="", foot="")
        return self._answer

    def _call(self, index: int, name: str) -> Block:
        if index not in self._calls:
            empty = {"arguments": "", "done": False, "result": "", "failed": False, "foot": ""}
            self._calls[index] = self._new("call", name=printable(name), **empty)
        return self._calls[index]

    def _piece(self, piece: Piece) -> None:
        answer = self._answering()
        if piece.kind == "tool":
            self._append(self._call(piece.index, piece.name), "arguments", printable(piece.text))
        else:
            self._append(answer, piece.kind, printable(piece.text))

    def _reply(self, reply: Reply) -> None:
        answer = self._answering()
        # Pieces have brought all of it, unless it came whole or from a file.
        for name, text in (("reasoning", reply.reasoning), ("text", reply.text)):
            if answer.fields[name] != printable(text):
                self._set(answer, **{name: printable(text)})
        if reply.value is not None:
            shown, parsed = _plain(reply.value)
            if parsed:
                self._set(answer, value=shown, parsed=True)
        blocks = [block for _, block in sorted(self._calls.items())]
        for number, call in enumerate(reply.tool_calls):
            block = blocks[number] if number < len(blocks) else self._call(number, call.name)
            self._set(block, name=printable(call.name), arguments=pretty_arguments(call))
            self._waiting.append(block)
        self._set(answer, foot=printable(foot(reply)))
        self._answer = None

    def _result(self, result: ToolResult) -> None:
        if not self._waiting:
            return  # a file may hold a result that nothing asked for
        block = self._waiting.pop(0)
        failed = result.error is not None
        text = result.error if result.error is not None else _pretty(result.content)
        took = f"{result.seconds:,.2f} s" if result.seconds >= 0.01 else ""
        self._set(block, result=printable(text), failed=failed, foot=took, done=True)


def blocks_of(conversation: Conversation) -> list[Block]:
    """The blocks of a chat that is over."""
    blocks = Blocks()
    for turn in conversation.turns:
        blocks.user(turn.user)
        results = list(turn.results)
        for reply in turn.replies:
            blocks.add(reply)
            for _ in reply.tool_calls:
                if results:
                    blocks.add(results.pop(0))
    return blocks.all


def pretty_arguments(call: ToolCall) -> str:
    """A call's arguments as ``name=value``, or as the model wrote them where they are no object."""
    try:
        given = read_json(call.arguments or "{}")
    except ValueError:
        return printable(call.arguments)
    if not isinstance(given, dict):
        return printable(call.arguments)
    return printable(", ".join(f"{name}={to_json(value)}" for name, value in given.items()))


def foot(reply: Reply, *, times: bool = True) -> str:
    """What there is to say about an answer: how it ended, tokens, times, speculation."""
    finish = _FINISHES.get(reply.finish, f"finish: {reply.finish}")
    parts = [finish] if finish else []
    if reply.usage is not None:
        tokens = plural(reply.usage.completion, "token")
        if reply.usage.reasoning:
            tokens += f", {reply.usage.reasoning:,} of them reasoning"
        parts.append(tokens)
    first, per_token = reply.timing.first, reply.timing.per_token
    if times and first is not None:
        # Tokens that came as one have no time of their own.
        each = (
            ""
            if per_token is None or per_token < 5e-5
            else f", then {1000 * per_token:,.1f} ms a token"
        )
        parts.append(f"first token after {first:,.2f} s{each}, at the client")
    if reply.speculation is not None:
        parts.append(speculation_words(reply.speculation))
    return " · ".join([*parts, *reply.notes])


def speculation_words(found: Speculation) -> str:
    """One line on the speculative decoding of a request."""
    length = found.acceptance_length
    if length is None:
        return "nothing drafted, says the server"
    return (
        f"acceptance length {length:.2f}: {found.accepted:,} of {found.drafted:,} draft tokens in "
        f"{plural(found.steps, 'step')}, counted by the server"
    )


def _plain(value: Any) -> tuple[Any, bool]:
    """A parsed value as JSON, and whether it has one."""
    try:
        return _readable(read_json(to_json(value))), True
    except (TypeError, ValueError):
        return None, False


def _readable(value: Any) -> Any:
    """A JSON value with the control characters in it made visible."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_readable(part) for part in value]
    if isinstance(value, dict):
        return {printable(name): _readable(part) for name, part in value.items()}
    return value


def _pretty(text: str) -> str:
    """JSON of a tool on lines of its own where it is an object or a list."""
    try:
        found = read_json(text)
    except ValueError:
        return text
    return pretty_json(found) if isinstance(found, Mapping | list) else text


def pretty_json(value: Any) -> str:
    """JSON with a line a field."""
    import json

    return json.dumps(value, indent=2, ensure_ascii=False)
