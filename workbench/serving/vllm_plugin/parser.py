"""The ``beam`` reasoning and tool parsers as vLLM asks for them: thin, over :mod:`reply_reader`.

Both names stand for one :class:`BeamParser`, which reads a reply once, from where its prompt left
off. A function that the request forces is not looked for: there the answer's text, held to a
grammar by the engine, is its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from openai.types.responses import ToolChoiceFunction
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionNamedToolChoiceParam
from vllm.parser.abstract_parser import Parser
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers.abstract_tool_parser import ToolParser

from workbench.errors import ServingError
from workbench.serving.vllm_plugin.reply_reader import (
    Piece,
    ReplyReader,
    count_between,
    state_after,
    thinking_is_over,
)
from workbench.serving.vllm_plugin.response_template import ResponseTemplate


def template_of(tokenizer: Any) -> ResponseTemplate:
    """The ``response_template`` of a tokenizer's configuration.

    Raises:
        ServingError: it has none, or one that cannot be served.
    """
    data = getattr(tokenizer, "response_template", None)
    if not isinstance(data, dict):
        data = (getattr(tokenizer, "init_kwargs", None) or {}).get("response_template")
    if data is None:
        raise ServingError(
            "the tokenizer_config.json has no response_template, by which the beam parsers tell "
            "thinking, answer and tool calls apart; add one, or serve without these parsers"
        )
    return ResponseTemplate.of(data)


def _ids_of(tokenizer: Any, markers: Iterable[str]) -> frozenset[int] | None:
    """The ids of markers that are one token each; None where one is not."""
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary.get(marker) for marker in markers]
    return None if None in ids else frozenset(i for i in ids if i is not None)


def _text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


class BeamReasoningParser(ReasoningParser):
    """Says where the thinking ends; the engine asks it when a grammar begins after the thinking."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self.template = template_of(tokenizer)
        regions = self.template.regions
        thinking = regions.get("thinking")
        if thinking is None:
            raise ServingError("the response_template has no field thinking to parse reasoning by")
        ends = [marker.head for marker in thinking.closers]
        ends += [m.head for name, r in regions.items() if name != "thinking" for m in r.openers]
        self._starts = _ids_of(tokenizer, [marker.head for marker in thinking.openers])
        self._closers = _ids_of(tokenizer, [marker.head for marker in thinking.closers])
        self._ends = _ids_of(tokenizer, ends)

    @property
    def reasoning_start_str(self) -> str | None:
        """The first opener of thinking."""
        return self.template.regions["thinking"].openers[0].head

    @property
    def reasoning_end_str(self) -> str | None:
        """The first closer of thinking."""
        return self.template.regions["thinking"].closers[0].head

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the message that these ids end with has its thinking behind it."""
        text = _text_of(self.model_tokenizer, input_ids)
        return thinking_is_over(state_after(self.template, text))

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """The same, of ids that end with ``delta_ids`` and had it not behind them before."""
        if self._ends is not None and self._ends.isdisjoint(delta_ids):
            return False  # no marker came, so nothing changed: asked for every token
        return self.is_reasoning_end(input_ids)

    def count_reasoning_tokens(self, token_ids: Sequence[int], inside: bool = False) -> int:
        """Tokens of thinking in a reply; ``inside`` is whether its prompt had opened it."""
        if self._starts is None or self._closers is None:
            return 0
        return count_between(token_ids, self._starts, self._closers, inside=inside)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Not asked for: :class:`BeamParser` reads text."""
        raise NotImplementedError("the beam parsers read a reply as a whole (BeamParser)")

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Not asked for: :class:`BeamParser` takes a reply apart."""
        raise NotImplementedError("the beam parsers read a reply as a whole (BeamParser)")

    def extract_reasoning_streaming(self, *args: Any, **kwargs: Any) -> DeltaMessage | None:
        """Not asked for: :class:`BeamParser` takes a reply apart."""
        raise NotImplementedError("the beam parsers read a reply as a whole (BeamParser)")


class BeamToolParser(ToolParser):
    """Stands for the name ``beam``; the grammar for forced calls is vLLM's own."""


class BeamParser(Parser):
    """Thinking, answer and tool calls of one reply."""

    always_adjust_request = True
    enable_auto_tools = False

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None, **kwargs: Any) -> None:
        self.template = template_of(tokenizer)
        super().__init__(tokenizer, tools, **kwargs)
        special: list[str] = list(getattr(tokenizer, "all_special_tokens", ()))
        self._silent = tuple(token for token in special if token not in self.template.markers)
        self._prompt: list[int] | None = None
        self._reading: _Reading | None = None

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """The prompt that the reply goes on from."""
        self._prompt = list(prompt_token_ids)

    def adjust_request(self, request: Any) -> Any:
        """Let the markers through; hold a forced call to its schema."""
        request.skip_special_tokens = False
        if hasattr(request, "spaces_between_special_tokens"):
            request.spaces_between_special_tokens = False
        return request if self._tool_parser is None else self._tool_parser.adjust_request(request)

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        """See :meth:`BeamReasoningParser.is_reasoning_end`; without reasoning it never began."""
        return self._reasoning_parser is None or self._reasoning_parser.is_reasoning_end(input_ids)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Tokens of thinking in the reply."""
        if not isinstance(self._reasoning_parser, BeamReasoningParser):
            return 0
        inside = self._after_prompt(self.template).inside == "thinking"
        return self._reasoning_parser.count_reasoning_tokens(token_ids, inside)

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        """A whole reply: (reasoning, content, tool calls)."""
        reading = self._begin(request, auto=enable_auto_tools)
        reading.take(model_output, finished=True)
        calls = [
            FunctionCall(id=make_tool_call_id(), name=name, arguments=arguments)
            for name, arguments in reading.calls
        ]
        return reading.reasoning or None, reading.content or None, calls or None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """What a piece of the reply adds to the message; None if nothing."""
        if self._reading is None:
            if prompt_token_ids is not None:
                self.set_prompt_token_ids(prompt_token_ids)
            self._reading = self._begin(request, auto=self.enable_auto_tools)
        return self._reading.take(delta_text, finished=finished).delta(request.include_reasoning)

    def _after_prompt(self, template: ResponseTemplate) -> ReplyReader:
        text = _text_of(self.model_tokenizer, self._prompt or ())
        return state_after(template, text, silent=self._silent)

    def _begin(self, request: Any, *, auto: bool) -> _Reading:
        choice: Any = request.tool_choice if self._tool_parser is not None else "none"
        template = self.template
        if choice not in (None, "auto") or not (auto and request.tools):
            template = template.keeping("thinking", "content")  # the markup of calls is then text
        name = None
        if isinstance(choice, ToolChoiceFunction):
            name = choice.name
        elif isinstance(choice, ChatCompletionNamedToolChoiceParam):
            name = choice.function.name
        return _Reading(
            self._after_prompt(template),
            reasoning=self._reasoning_parser is not None,
            forced=name,
            required=choice == "required",
        )


class _Added:
    """What one piece of text added."""

    def __init__(self) -> None:
        self.reasoning = self.content = ""
        self.calls: dict[int, tuple[str | None, str]] = {}

    def call(self, index: int, name: str | None, arguments: str) -> None:
        """Text of a call, in its first piece its name."""
        known, text = self.calls.get(index, (None, ""))
        self.calls[index] = (name or known, text + arguments)

    def delta(self, include_reasoning: bool) -> DeltaMessage | None:
        """The same as a message of the protocol."""
        fields: dict[str, Any] = {}
        if self.reasoning and include_reasoning:
            fields["reasoning"] = self.reasoning
        if self.content:
            fields["content"] = self.content
        if self.calls:
            fields["tool_calls"] = [
                DeltaToolCall(
                    index=index,
                    id=make_tool_call_id() if name else None,
                    type="function" if name else None,
                    function=DeltaFunctionCall(name=name, arguments=arguments),
                )
                for index, (name, arguments) in self.calls.items()
            ]
        return DeltaMessage(**fields) if fields else None


class _Reading:
    """One reply on its way: the reader, what is asked of it, and the sum of what it gave."""

    def __init__(
        self, reader: ReplyReader, *, reasoning: bool, forced: str | None, required: bool
    ) -> None:
        self.reader = reader
        self.parse_reasoning, self.forced, self.required = reasoning, forced, required
        self.reasoning = self.content = ""
        self.calls: list[tuple[str, str]] = []
        self._held = ""  # the answer of a reply in which some call is required

    def take(self, text: str, *, finished: bool) -> _Added:
        """Read on."""
        added = _Added()
        pieces = self.reader.push(text)
        if finished:
            pieces += self.reader.finish()
        for piece in pieces:
            self._route(piece, added)
        if finished and self._held:
            self._required_calls(added)
        self.reasoning += added.reasoning
        self.content += added.content
        for index, (name, arguments) in added.calls.items():
            if index == len(self.calls):
                self.calls.append((name or "", ""))
            known, before = self.calls[index]
            self.calls[index] = (known, before + arguments)
        return added

    def _route(self, piece: Piece, added: _Added) -> None:
        if piece.field == "thinking" and self.parse_reasoning:
            added.reasoning += piece.text
        elif piece.field == "tool_calls" and piece.call is not None:
            added.call(piece.call, piece.name, piece.text)
        elif self.required:
            self._held += piece.text
        elif self.forced is not None:
            first = not self.calls and not added.calls
            added.call(0, self.forced if first else None, piece.text)
        else:
            added.content += piece.text

    def _required_calls(self, added: _Added) -> None:
        """The grammar's form is a list of objects with a name and parameters."""
        try:
            calls = [(call["name"], call["parameters"]) for call in json.loads(self._held)]
        except (ValueError, TypeError, KeyError):
            added.content += self._held  # cut off: shown as it is
            return
        for index, (name, parameters) in enumerate(calls):
            added.call(index, str(name), json.dumps(parameters, ensure_ascii=False))


def parser_class(*, reasoning: bool, tools: bool, auto: bool, strict: Any) -> type[BeamParser]:
    """The parser of a server that was asked for reasoning, for tool calls, or for both."""

    class Composed(BeamParser):
        reasoning_parser_cls = BeamReasoningParser if reasoning else None
        tool_parser_cls = BeamToolParser if tools else None
        tool_strict_level = strict
        enable_auto_tools = auto

    return Composed
