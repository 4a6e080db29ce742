"""``Conversation``: a chat as a plain value, and as a JSON file that can be read again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from workbench.errors import ServingError
from workbench.files import expand, write_whole
from workbench.serving.client.json_check import read_json, short, to_json, without_surrogates
from workbench.serving.client.reply import STOPPED, Reply, Speculation, Timing, ToolCall, Usage
from workbench.serving.client.tools import ToolResult

FORMAT = "beam-workbench-chat"
VERSION = 1
_BYTES = 256 * 2**20  # of a file that is read


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """From what the user said to the last answer to it.

    Attributes:
        user: what was said.
        messages: the user's, the model's and the tools', as they are sent with later turns.
        replies: one, and one more for every round of tool calls.
        results: what came of all tool calls, in order.
    """

    user: str
    messages: tuple[dict[str, Any], ...]
    replies: tuple[Reply, ...]
    results: tuple[ToolResult, ...]

    @property
    def reply(self) -> Reply:
        """The last answer."""
        return self.replies[-1]

    @property
    def text(self) -> str:
        """Of the last answer."""
        return self.reply.text

    @property
    def value(self) -> Any:
        """Of the last answer, where a schema was asked for."""
        return self.reply.value

    @property
    def stopped(self) -> bool:
        """Whether it was ended from here."""
        return self.reply.finish == STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat so far.

    Attributes:
        model: as the server calls it, "" before the first answer.
        system: what the model is told before everything, or None.
        tools: as they are offered, with their schemas.
        turns: oldest first.
        date: when it was written to a file; None for one that goes on.
        note: where it ran, in the words of whoever kept it: engine, version, hardware.
    """

    model: str
    system: str | None
    tools: tuple[dict[str, Any], ...]
    turns: tuple[Turn, ...]
    date: str | None = None
    note: str = ""

    @property
    def source(self) -> str:
        """Where its numbers come from."""
        if self.date is None:
            return "measured here, at the client"
        note = f", {self.note}" if self.note else ""
        return f"recorded {self.date[:10]} at the client{note}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON. A value that has no JSON is left out: its text is in the reply."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "date": self.date or datetime.now(UTC).isoformat(timespec="seconds"),
            "model": self.model,
            "note": self.note,
            "system": self.system,
            "tools": list(self.tools),
            "turns": [_turn_to_dict(turn) for turn in self.turns],
        }

    def save(self, path: str | os.PathLike[str], *, note: str = "") -> None:
        """Write it whole, or not at all; ``note`` says where the server ran.

        Raises:
            FileError: the file cannot be written.
            ServingError: the note, or what the model is told, is no text.
        """
        for name, said in (("note", note), ("system", self.system or "")):
            if not isinstance(said, str):
                raise ServingError(f"{name} is text, not {said!r:.40}")
        kept = dataclasses.replace(self, note=note or self.note)
        # Halves of signs may stand in what the user typed.
        text = without_surrogates(to_json(kept.to_dict()))
        write_whole(expand(path), f"{text}\n".encode())


def read_conversation(path: str | os.PathLike[str]) -> Conversation:
    """A chat from its file. Parsed values come back as JSON gives them.

    Raises:
        ServingError: the file cannot be read, or is no chat.
    """
    where = expand(path)
    try:
        if not where.is_file():
            raise ServingError(f"{where} is no file; give one that a chat was saved to")
        if where.stat().st_size > _BYTES:
            raise ServingError(f"{where} is larger than {_BYTES:,} bytes, too large for a chat")
        data = read_json(where.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ServingError(f"{where} cannot be read ({error.strerror or error})") from None
    except ServingError:
        raise
    except ValueError as error:
        raise ServingError(f"{where} is no JSON ({short(error, 80)}); give a saved chat") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ServingError(f"{where} is no chat of the workbench; give one that chat.save wrote")
    if data.get("version") != VERSION:
        raise ServingError(
            f"{where} is a chat of version {short(data.get('version'), 20)}, and this workbench "
            f"reads version {VERSION}; update the workbench"
        )
    try:
        return Conversation(
            model=_typed(data, "model", str),
            system=_typed(data, "system", str, None),
            tools=tuple(_objects(data, "tools")),
            turns=tuple(_turn(turn) for turn in _objects(data, "turns")),
            date=_typed(data, "date", str),
            note=_typed(data, "note", str),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServingError(f"{where} is a chat with a fault: {short(error, 120)}") from None


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    return {
        "user": turn.user,
        "messages": list(turn.messages),
        "replies": [_reply_to_dict(reply) for reply in turn.replies],
        "results": [dataclasses.asdict(result) for result in turn.results],
    }


def _reply_to_dict(reply: Reply) -> dict[str, Any]:
    made = {f.name: getattr(reply, f.name) for f in dataclasses.fields(reply)}
    try:
        made["value"] = read_json(to_json(reply.value))
    except (TypeError, ValueError):
        made["value"] = None
    return made  # dataclasses within are written by to_json


def _typed(data: Mapping[str, Any], name: str, *kinds: Any) -> Any:
    """A field of one of these kinds; None among them allows null."""
    value = data[name]
    allowed = tuple(kind for kind in kinds if kind is not None)
    if value is None and None in kinds:
        return None
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ValueError(f"{name} is {value!r:.40}")
    return value


def _objects(data: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _typed(data, name, list)
    if not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{name} is no list of objects")
    return found


def _turn(data: Mapping[str, Any]) -> Turn:
    replies = tuple(_reply(reply) for reply in _objects(data, "replies"))
    if not replies:
        raise ValueError("a turn has no reply")
    return Turn(
        user=_typed(data, "user", str),
        messages=tuple(_objects(data, "messages")),
        replies=replies,
        results=tuple(
            ToolResult(
                call=_call(_typed(result, "call", dict)),
                content=_typed(result, "content", str),
                error=_typed(result, "error", str, None),
                seconds=_typed(result, "seconds", int, float),
            )
            for result in _objects(data, "results")
        ),
    )


def _call(data: Mapping[str, Any]) -> ToolCall:
    return ToolCall(**{name: _typed(data, name, str) for name in ("id", "name", "arguments")})


def _reply(data: Mapping[str, Any]) -> Reply:
    timing = _typed(data, "timing", dict)
    usage = _typed(data, "usage", dict, None)
    return Reply(
        text=_typed(data, "text", str),
        reasoning=_typed(data, "reasoning", str),
        tool_calls=tuple(_call(call) for call in _objects(data, "tool_calls")),
        finish=_typed(data, "finish", str),
        model=_typed(data, "model", str),
        usage=None
        if usage is None
        else Usage(
            prompt=_typed(usage, "prompt", int),
            completion=_typed(usage, "completion", int),
            reasoning=_typed(usage, "reasoning", int, None),
            cached=_typed(usage, "cached", int, None),
        ),
        speculation=_speculation(_typed(data, "speculation", dict, None)),
        timing=Timing(
            first=_typed(timing, "first", int, float, None),
            per_token=_typed(timing, "per_token", int, float, None),
            total=_typed(timing, "total", int, float),
        ),
        value=data["value"],
        notes=tuple(str(note) for note in _typed(data, "notes", list)),
    )


def _speculation(data: Mapping[str, Any] | None) -> Speculation | None:
    if data is None:
        return None

    def counts(name: str, *kinds: Any) -> tuple[int, ...] | None:
        found = _typed(data, name, list, *kinds)
        if found is not None and any(type(n) is not int for n in found):
            raise ValueError(f"{name} is no list of counts")
        return None if found is None else tuple(found)

    return Speculation(
        steps=_typed(data, "steps", int),
        accepted=_typed(data, "accepted", int),
        drafted=_typed(data, "drafted", int),
        histogram=counts("histogram") or (),
        speculative_tokens=_typed(data, "speculative_tokens", int),
        step_accepted=counts("step_accepted", None),
        step_drafted=counts("step_drafted", None),
    )
