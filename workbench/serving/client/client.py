"""``Client``: chat with a server that speaks the OpenAI API, vLLM's above all.

An answer comes as a :class:`Stream` of pieces, its reasoning apart from its text, and is a
:class:`~workbench.serving.client.reply.Reply` in the end. Nothing is sent to any host but the one
that was named, nothing is asked twice, and whatever goes wrong is one sentence in a
``ServingError``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

from workbench.errors import ServingError
from workbench.serving.address import Address
from workbench.serving.api_key import VARIABLE, find_key
from workbench.serving.client.chat_settings import ChatSettings, Effort
from workbench.serving.client.json_check import short, to_json
from workbench.serving.client.reply import Collector, Piece, Reply
from workbench.serving.client.structured import Shape, parse, shape_of
from workbench.serving.client.tools import Tool, toolbox
from workbench.serving.client.wire import Cut, Wire

TIMEOUT = 120.0  # seconds of silence; a long prompt on a busy server takes that long to read
LONGEST_TIMEOUT = 604_800
Messages = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that a server has; ``max_model_len`` is None where it does not say."""

    id: str
    max_model_len: int | None = None


class Client:
    """Talks to one server.

    Args:
        address: ``http://127.0.0.1:8000`` and the like.
        key: where the API key is from: the name of an environment variable, ``ask`` for a prompt,
            None for none. A key itself is refused here: it would stand in the notebook.
        model: which of the server's; None takes the only one.
        foreign: whether ``address`` may be another machine.
        timeout: seconds of silence after which an answer is given up. Reading the prompt is such a
            silence, and where nothing is streamed so is the whole answer.

    Attributes:
        address: checked.
        timeout: as given.

    Raises:
        ServingError: no such address, a key that is missing, no ``openai`` package.
    """

    def __init__(
        self,
        address: str | Address,
        *,
        key: str | None = VARIABLE,
        model: str | None = None,
        foreign: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not number or not 0 < timeout <= LONGEST_TIMEOUT:
            raise ServingError(
                f"timeout is a number of seconds above 0, at most {LONGEST_TIMEOUT:,} (a week), "
                f"not {timeout!r:.40}"
            )
        self.address = Address.of(address, foreign=foreign)
        self.timeout = float(timeout)
        self._model = model
        self._wire = Wire(self.address, find_key(key), self.timeout)

    def __repr__(self) -> str:
        model = "" if self._model is None else f", model={self._model!r}"
        return f"Client({self.address.url!r}{model})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way, as :meth:`Stream.stop` does; the client is of no use after it."""
        self._wire.close()

    def models(self) -> tuple[ServedModel, ...]:
        """What the server serves.

        Raises:
            ServingError: it cannot be asked, or says something else.
        """
        page: Any = None
        with self._wire.request("the list of models") as asking:
            page = self._wire.get("/models")
        asking.check()
        found = page.get("data") if isinstance(page, Mapping) else None
        if not isinstance(found, list) or not all(isinstance(m, Mapping) for m in found):
            raise self._another()
        return tuple(map(_served, found))

    @property
    def model(self) -> str:
        """The name that requests carry; asks the server the first time where none was given.

        Raises:
            ServingError: the server has none or several, or cannot be asked.
        """
        if self._model is None:
            names = [model.id for model in self.models()]
            if len(names) != 1:
                listed = ", ".join(short(name, 60) for name in names[:8]) or "no model"
                raise ServingError(f"{self.address} serves {listed}; say which one: model=")
            self._model = names[0]
        return self._model

    @overload
    def chat(
        self, messages: Messages, *, tools: Sequence[Any] = ..., schema: Any = ...,
        temperature: float | None = ..., top_p: float | None = ..., seed: int | None = ...,
        max_tokens: int | None = ..., reasoning: Effort | bool | None = ...,
        extra: Mapping[str, Any] | None = ..., stream: Literal[True] = ...,
    ) -> Stream: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Messages, *, tools: Sequence[Any] = ..., schema: Any = ...,
        temperature: float | None = ..., top_p: float | None = ..., seed: int | None = ...,
        max_tokens: int | None = ..., reasoning: Effort | bool | None = ...,
        extra: Mapping[str, Any] | None = ..., stream: Literal[False],
    ) -> Reply: ...  # fmt: skip

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] = (),
        schema: Any = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        max_tokens: int | None = None,
        reasoning: Effort | bool | None = None,
        extra: Mapping[str, Any] | None = None,
        stream: bool = True,
    ) -> Stream | Reply:
        """Ask for one answer. Tools are offered, not called:
        :class:`~workbench.serving.client.chat.Chat` does that.

        Args:
            messages: a text, or messages as the API takes them.
            tools: functions, or what ``@tool`` makes of them.
            schema: what the answer must be: a JSON schema, a dataclass, another Python type.
            temperature, top_p, seed, max_tokens, reasoning, extra: see
                :class:`~workbench.serving.client.chat_settings.ChatSettings`.
            stream: piece by piece; False waits for the whole and returns it.

        Raises:
            ServingError: a setting is wrong; without a stream also whatever the stream raises.
        """
        settings = ChatSettings(
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_tokens=max_tokens,
            reasoning=reasoning,
            extra=extra or {},
        )
        answer = self.answer(messages, toolbox(tools), schema, settings, stream=stream)
        return answer if stream else answer.finish()

    def answer(
        self,
        messages: Messages,
        tools: Mapping[str, Tool],
        schema: Any,
        settings: ChatSettings,
        *,
        stream: bool = True,
    ) -> Stream:
        """What :meth:`chat` makes of its arguments; nothing is sent before it is read."""
        request: dict[str, Any] = {"messages": _messages(messages), **settings.to_request()}
        if tools:
            request["tools"] = [tool.to_request() for tool in tools.values()]
        shape = None if schema is None else shape_of(schema)
        if shape is not None:
            request["response_format"] = shape.response_format
        if stream:
            request |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            to_json(request).encode()
        except (TypeError, ValueError) as error:
            raise ServingError(
                f"the request cannot be written as JSON ({short(error, 120)}); give messages, "
                "schema and extra as plain values"
            ) from None
        return Stream(self, request, shape)

    def _another(self) -> ServingError:
        return ServingError(
            f"what answers at {self.address} is no OpenAI-compatible server; is the address right?"
        )


class Stream:
    """One answer as it arrives: iterate over it once, then ask for :attr:`reply`.

    The request is sent when the first piece is asked for. Leaving the loop early, :meth:`stop` from
    anywhere, and Ctrl-C each close the connection, upon which vLLM ends the request.
    """

    def __init__(self, client: Client, request: dict[str, Any], shape: Shape | None) -> None:
        self._client, self._request, self._shape = client, request, shape
        self._cut = Cut()
        self._reply: Reply | None = None
        self._begun = threading.Lock()
        self._collector = Collector()

    def __repr__(self) -> str:
        if self._reply is None:
            return "Stream(unfinished; iterate over it)"
        return f"Stream(finish={self._reply.finish!r})"

    def __iter__(self) -> Iterator[Piece]:
        if not self._begun.acquire(blocking=False):
            raise ServingError("a stream is read once; ask again for another answer")
        return self._pieces()

    def stop(self) -> None:
        """End it, from any thread; whoever reads it goes on at once, with what there is."""
        self._cut()

    def finish(self) -> Reply:
        """Read all that is left, and return the answer.

        Raises:
            ServingError: what reading it raises.
        """
        if self._reply is None:
            for _ in self:
                pass
        return self.reply

    @property
    def reply(self) -> Reply:
        """The answer, once it is over."""
        if self._reply is None:
            raise ServingError("the answer has not ended; read the stream to its end first")
        return self._reply

    def _pieces(self) -> Iterator[Piece]:
        wire = self._client._wire
        with wire.request("the answer", self._cut) as asking:
            if not self._cut.done:
                self._request["model"] = self._client.model
            self._collector = collector = Collector()
            if self._cut.done:
                pass
            elif "stream" in self._request:
                with wire.events("/chat/completions", self._request) as events:
                    for document in events:
                        yield from collector.add(document)
            else:
                document = wire.post("/chat/completions", self._request)
                if not isinstance(document, Mapping):
                    raise self._client._another()
                yield from collector.add(document, whole=True)
            self._check_end()
        asking.check()
        self._finish()

    def _check_end(self) -> None:
        if self._collector.finish is None and not self._cut.done:
            seen = "nothing" if not self._collector.seen else "no finish"
            raise ServingError(
                f"{self._client.address} ended the stream with {seen} in it, so the answer is not "
                "whole; look into the server's log, and ask again"
            )

    def _finish(self) -> None:
        # What had ended before it was cut is a whole answer.
        stopped = self._collector.finish is None
        reply = self._collector.reply(stopped=stopped).map_text(self._client._wire.hide)
        self._reply = reply  # also where its text does not become the value that was asked for
        if not (self._shape is None or stopped or reply.tool_calls):
            self._reply = replace(reply, value=parse(reply, self._shape))


def _messages(given: Messages) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    wrong = not isinstance(given, Sequence) or not given
    if wrong or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in given):
        raise ServingError(
            "messages are a text, or a list of objects like {'role': 'user', 'content': 'hello'}"
        )
    return [dict(message) for message in given]


def _served(model: Mapping[str, Any]) -> ServedModel:
    name, length = model.get("id"), model.get("max_model_len")
    if not isinstance(name, str) or not name:
        raise ServingError("the server lists a model without a name; is it OpenAI-compatible?")
    return ServedModel(id=name, max_model_len=length if type(length) is int else None)
