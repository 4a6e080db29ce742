"""``Chat``: a conversation with a model that calls tools, turn by turn.

A turn runs until the model says something without asking for a tool. One that fails, at whatever
point, leaves the history as it was before, so the next one can be sent.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any

from workbench.errors import ServingError
from workbench.serving.client.chat_settings import ChatSettings
from workbench.serving.client.client import Client, Stream
from workbench.serving.client.conversation import Conversation, Turn
from workbench.serving.client.json_check import read_json
from workbench.serving.client.reply import STOPPED, Piece, Reply, ToolCall
from workbench.serving.client.tools import Tool, ToolResult, run, toolbox

MAX_ROUNDS = 8
_BUSY = "a turn is still under way; wait for it, or stop() it"
Event = Piece | Reply | ToolResult


class Chat:
    """A conversation.

    Args:
        client: of the server.
        tools: functions that the model may call, or what ``@tool`` makes of them.
        system: what the model is told before everything.
        settings: how answers are asked for; :meth:`send` changes some of them for one turn.
        max_rounds: answers in a row that ask for tools; a turn with more of them has failed.

    Attributes:
        client, system, settings, max_rounds: as given.
        tools: by name.

    Raises:
        ServingError: a tool or a setting is wrong.
    """

    def __init__(
        self,
        client: Client,
        *,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        system: str | None = None,
        settings: ChatSettings | None = None,
        max_rounds: int = MAX_ROUNDS,
    ) -> None:
        if type(max_rounds) is not int or max_rounds < 0:
            raise ServingError(f"max_rounds is a whole number, not {max_rounds!r:.40}")
        if system is not None and not isinstance(system, str):
            raise ServingError(f"system is a text, not {system!r:.40}")
        self.client, self.system, self.max_rounds = client, system, max_rounds
        self.settings = settings or ChatSettings()
        self.tools = toolbox(tools)
        self._turns: list[Turn] = []
        self._held: dict[str, weakref.ref[_Held]] = {}  # the turn that is under way
        self._stop = threading.Event()
        self._stream: Stream | None = None

    def __repr__(self) -> str:
        return f"Chat({self.client!r}, {len(self._turns)} turns)"

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Turns that ended, oldest first."""
        return tuple(self._turns)

    @property
    def busy(self) -> bool:
        """Whether a turn is under way."""
        held = self._held.get("turn", _nothing)()
        return held is not None and not held.over

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history as it is sent: reasoning is not in it."""
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*first, *(dict(m) for turn in self._turns for m in turn.messages)]

    @property
    def conversation(self) -> Conversation:
        """What there is so far, as a value."""
        replies = [reply for turn in self._turns for reply in turn.replies]
        return Conversation(
            model=replies[-1].model if replies else "",
            system=self.system,
            tools=tuple(tool.to_request() for tool in self.tools.values()),
            turns=self.turns,
        )

    def save(self, path: str | os.PathLike[str], *, note: str = "") -> None:
        """Write the conversation as JSON; ``note`` says where the server ran.

        Raises:
            FileError: the file cannot be written.
        """
        self.conversation.save(path, note=note)

    def send(self, text: str, *, schema: Any = None, **settings: Any) -> Turn:
        """Say something and wait for all that comes of it.

        Args:
            schema: what the last answer must be, as :meth:`Client.chat` takes it.
            settings: fields of :class:`ChatSettings` for this turn.

        Raises:
            ServingError: the server, a setting, the answer; the history is as it was before.
        """
        turn: list[Turn] = []
        events = self.stream(text, schema=schema, ended=turn.append, **settings)
        try:
            for _ in events:
                pass
        finally:
            events.close()
        return turn[0]

    def stream(
        self,
        text: str,
        *,
        schema: Any = None,
        ended: Callable[[Turn], object] | None = None,
        **settings: Any,
    ) -> _Held:
        """The same piece by piece: pieces, then the answer they make up, then what came of each
        tool call it asked for, and so on. Leaving the loop early drops the turn.

        Args:
            ended: called with the turn when it is over, also when it was stopped.

        Raises:
            ServingError: as :meth:`send`; that a turn is under way already among it.
        """
        if not isinstance(text, str) or not text.strip():
            raise ServingError("there is nothing to send; say something")
        try:
            asked = replace(self.settings, **settings)
        except TypeError:
            known = ", ".join(ChatSettings.__dataclass_fields__)
            raise ServingError(f"the settings of a turn are {known}") from None
        held = _Held(self._turn(text, schema, asked, ended))
        self._take(held)
        self._stop.clear()
        return held

    def stop(self) -> None:
        """End the turn that is under way, from any thread.

        Text that had come stays, as a turn that says it was stopped; where there was none the
        history is as it was before.
        """
        self._stop.set()
        stream = self._stream
        if stream is not None:
            stream.stop()

    def undo(self) -> Turn:
        """Take the last turn back, and return it.

        Raises:
            ServingError: there is none, or one is under way.
        """
        if self.busy:
            raise ServingError(_BUSY)
        if not self._turns:
            raise ServingError("there is no turn to take back")
        return self._turns.pop()

    def _take(self, held: _Held) -> None:
        """Make this the turn that is under way.

        No lock is held meanwhile: an interrupt may come between any two steps, and one that was
        never released would end the chat. One turn of two that begin at once gets the place.
        """
        before = self._held.get("turn", _nothing)()
        if before is not None and self._stop.is_set():
            before.close()  # a turn that was stopped, and that nobody reads any more
        if not self.busy:
            self._held.pop("turn", None)
        mine = weakref.ref(held)
        if self._held.setdefault("turn", mine) is not mine:
            raise ServingError(_BUSY)

    def _turn(
        self,
        text: str,
        schema: Any,
        asked: ChatSettings,
        ended: Callable[[Turn], object] | None,
    ) -> Generator[Event, None, None]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
        replies: list[Reply] = []
        results: list[ToolResult] = []
        while True:
            history = [*self.messages, *messages]
            self._stream = stream = self.client.answer(history, self.tools, schema, asked)
            if self._stop.is_set():  # between the last look and now
                stream.stop()
            try:
                yield from stream
            finally:
                self._stream = None
            replies.append(stream.reply)
            yield stream.reply
            if stream.reply.finish == STOPPED or not stream.reply.tool_calls:
                break
            if len(replies) > self.max_rounds:
                raise ServingError(
                    f"the model asked for tools {len(replies)} times in a row, and max_rounds is "
                    f"{self.max_rounds}; allow more, or tell it when to stop"
                )
            messages.append(_asking(stream.reply))
            for call in stream.reply.tool_calls:
                result = run(call, self.tools, self._stop)
                results.append(result)
                told = {"role": "tool", "tool_call_id": call.id, "content": result.content}
                messages.append(told)
                yield result
            if asked.extra.get("tool_choice") not in (None, "none"):
                # What forces a call would force one after every result: the turn would not end.
                asked = replace(asked, extra={**asked.extra, "tool_choice": "auto"})
        last = replies[-1]
        messages.append({"role": "assistant", "content": last.text})
        turn = Turn(
            user=text, messages=tuple(messages), replies=tuple(replies), results=tuple(results)
        )
        if last.text or last.finish != STOPPED:
            self._turns.append(turn)
        if ended is not None:
            ended(turn)


class _Held(Iterator[Event]):
    """Events of a turn, which hold the chat until they are over, or nobody wants them any more.

    Attributes:
        over: nothing comes any more.
    """

    def __init__(self, events: Generator[Event, None, None]) -> None:
        self.over = False
        self._events = events

    def __next__(self) -> Event:
        try:
            if self.over:
                raise StopIteration
            return next(self._events)
        except BaseException as error:
            if isinstance(error, ValueError) and getgeneratorstate(self._events) == GEN_RUNNING:
                raise ServingError("this turn is being read in another thread already") from None
            self.close()
            raise

    def close(self) -> None:
        """Let go; what has not ended is dropped. One that is read at this moment goes on."""
        if not self.over and getgeneratorstate(self._events) != GEN_RUNNING:
            self.over = True
            self._events.close()


def _nothing() -> None:
    """What a turn that is gone is."""


def _asking(reply: Reply) -> dict[str, Any]:
    """An answer that asks for tools, as it is sent back with their results."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": _sound(call)},
        }
        for call in reply.tool_calls
    ]
    return {"role": "assistant", "content": reply.text, "tool_calls": calls}


def _sound(call: ToolCall) -> str:
    """Arguments that a server can read again: chat templates of vLLM parse them, and refuse the
    whole request where they cannot. What they were is in the result that the model is told."""
    try:
        sound = isinstance(read_json(call.arguments), dict)
    except ValueError:
        sound = False
    return call.arguments if sound else "{}"
