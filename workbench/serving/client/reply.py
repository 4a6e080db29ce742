"""What a chat server answers: pieces as they arrive, and the whole as :class:`Reply`.

:class:`Collector` reads the chunks of a stream, or the one document without one. The names of the
fields are those of the OpenAI chat API and of vLLM 0.33; what is of another kind than they say is
an error, what a server does not give is None.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from workbench.errors import ServingError
from workbench.serving.client.bounds import LETTERS, too_long
from workbench.serving.client.json_check import short, without_surrogates

PieceKind = Literal["text", "reasoning", "tool"]
STOPPED = "stopped"  # the finish of an answer that was ended from here
_CALLS = 128  # tool calls of one answer, at most
_NOTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What arrived at once.

    Attributes:
        kind: ``tool`` is a part of a call's arguments, as JSON text.
        text: never changed; a view makes control characters visible.
        index: which tool call of the answer, from 0.
        name: of the tool, with the first piece of its call.
    """

    kind: PieceKind
    text: str
    index: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model asks for; ``arguments`` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens, counted by the server. ``reasoning`` is a part of ``completion``, ``cached`` of
    ``prompt``; None where it does not say."""

    prompt: int
    completion: int
    reasoning: int | None = None
    cached: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding of one request, counted by the server.

    vLLM gives it with ``--per-request-spec-decode-metrics summary`` or ``detailed``, as
    ``metrics.speculative_decoding`` beside ``usage``. An engine with adaptive verification counts
    trimmed drafts as drafted, so ``drafted`` is what was scheduled, verified or not.

    Attributes:
        steps: verification steps: the draft events of this request.
        accepted, drafted: draft tokens, over all steps.
        histogram: ``[i]`` is the number of steps with exactly i accepted draft tokens.
        speculative_tokens: the most that are drafted a step.
        step_accepted, step_drafted: by step, in order; None but in the detailed form.
    """

    steps: int
    accepted: int
    drafted: int
    histogram: tuple[int, ...]
    speculative_tokens: int
    step_accepted: tuple[int, ...] | None = None
    step_drafted: tuple[int, ...] | None = None

    @property
    def acceptance_length(self) -> float | None:
        """``1 + accepted / steps``: the bonus or corrected token counts. None without a step."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def rate_drafted(self) -> float | None:
        """``accepted / drafted``; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds, measured here at the client: the way to the server and back is in them.

    Attributes:
        first: from sending the request to the first piece of the answer: time to first token. None
            where nothing came, or all at once.
        per_token: TPOT, from the first to the last piece over ``completion - 1`` tokens. With
            speculative decoding a piece may hold several tokens, those of the first piece count as
            one instant. None where the server does not count tokens.
        total: from sending the request to the end of the answer.
    """

    first: float | None
    per_token: float | None
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of a model.

    Attributes:
        text: what it says.
        reasoning: what it thought before, where the server tells the two apart.
        tool_calls: in the order of the answer.
        finish: ``stop``, ``length``, ``tool_calls``, whatever else the server says, or ``stopped``
            where it was ended from here.
        model: as the server calls it.
        usage, speculation: None where the server does not give them.
        timing: measured here.
        value: the answer parsed, where a schema was asked for.
        notes: what of the server's statistics was not understood; that tokens have no text.
    """

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish: str
    model: str
    usage: Usage | None
    speculation: Speculation | None
    timing: Timing
    value: Any = None
    notes: tuple[str, ...] = ()

    def map_text(self, change: Callable[[str], str]) -> Reply:
        """The same with every text changed."""
        return replace(
            self,
            text=change(self.text),
            reasoning=change(self.reasoning),
            tool_calls=tuple(
                ToolCall(id=change(c.id), name=change(c.name), arguments=change(c.arguments))
                for c in self.tool_calls
            ),
        )


@dataclass(slots=True)
class _Call:
    """A call as it arrives; ``number`` is the server's index, unless that is another call's."""

    number: int
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class Collector:
    """Puts one answer together.

    Attributes:
        finish: as the server said; None until it has.
        seen: documents of the server that were read.
    """

    def __init__(self) -> None:
        self.finish: str | None = None
        self.seen = 0
        self._started = time.perf_counter()
        self._first: float | None = None
        self._last = self._started
        self._texts: dict[PieceKind, list[str]] = {"text": [], "reasoning": []}
        self._calls: dict[int, _Call] = {}  # by number
        self._call_at: dict[int, _Call] = {}  # the newest by the server's index
        self._letters = 0
        self._usage: Usage | None = None
        self._speculation: Speculation | None = None
        self._model = ""
        self._notes: list[str] = []

    def add(self, document: Any, *, whole: bool = False) -> list[Piece]:
        """Read a chunk, or the one document where the answer came ``whole``; what is new in it.

        Raises:
            ServingError: it is not what a chat server sends.
        """
        if not isinstance(document, Mapping):
            raise _malformed("a part of it is no JSON object", document)
        self.seen += 1
        self._model = _text(document, "model") or self._model
        self._statistics(document)
        choices = document.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(c, Mapping) for c in choices):
            raise _malformed("its choices are no list of objects", choices)
        pieces: list[Piece] = []
        for choice in choices[:1]:  # one is asked for
            delta = choice.get("message" if whole else "delta") or {}
            if not isinstance(delta, Mapping):
                raise _malformed("a choice has no message", choice)
            pieces += self._pieces(delta)
            self.finish = _text(choice, "finish_reason") or self.finish
        if pieces:
            self._last = time.perf_counter()
            if self._first is None and not whole:
                self._first = self._last
        return pieces

    def reply(self, *, stopped: bool = False) -> Reply:
        """The answer, as far as it came."""
        finish = STOPPED if stopped else self.finish
        if finish is None:
            raise ServingError("the answer has not ended yet")
        return Reply(
            text="".join(self._texts["text"]),
            reasoning="".join(self._texts["reasoning"]),
            tool_calls=self._tool_calls(),
            finish=finish,
            model=self._model,
            usage=self._usage,
            speculation=self._speculation,
            timing=self._timing(),
            notes=(*self._notes, *self._silence(finish)),
        )

    def _silence(self, finish: str) -> list[str]:
        """That tokens were counted and nothing of them is to be seen."""
        said = any(self._texts.values()) or self._calls
        if said or finish == STOPPED or self._usage is None or self._usage.completion < 2:
            return []
        return [
            f"the server counted {self._usage.completion:,} tokens and gave no text: it leaves "
            "special tokens out, and the markers of its reasoning and tool parsers"
        ]

    def _timing(self) -> Timing:
        first, per_token = self._first, None
        if first is not None and self._usage is not None and self._usage.completion > 1:
            per_token = (self._last - first) / (self._usage.completion - 1)
        return Timing(
            first=None if first is None else first - self._started,
            per_token=per_token,
            total=time.perf_counter() - self._started,
        )

    def _pieces(self, delta: Mapping[str, Any]) -> list[Piece]:
        # vLLM calls it `reasoning`; before 0.12 `reasoning_content`, and for a while both at once.
        reasoning = _text(delta, "reasoning") or _text(delta, "reasoning_content")
        new: tuple[tuple[PieceKind, str], ...] = (
            ("reasoning", reasoning),
            ("text", _text(delta, "content")),
        )
        pieces = [Piece(kind=kind, text=text) for kind, text in new if text]
        for piece in pieces:
            self._texts[piece.kind].append(self._counted(piece.text))
        calls = delta.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise _malformed("its tool calls are no list of objects", calls)
        return pieces + [self._call(call, place) for place, call in enumerate(calls)]

    def _call(self, call: Mapping[str, Any], place: int) -> Piece:
        index = call.get("index")
        index = place if index is None else index
        if type(index) is not int or not 0 <= index < _CALLS:
            raise _malformed("a tool call's index is no number of a call", index)
        function = call.get("function") or {}
        if not isinstance(function, Mapping):
            raise _malformed("a tool call has no function", call)
        identity, name = _text(call, "id"), _text(function, "name")
        known = self._call_at.get(index)
        # Id and name come once; a server that repeats them with every part means the same call.
        # One that numbers none, or all alike, begins a call with another id and a name.
        another = known is not None and bool(name and known.id and identity not in ("", known.id))
        if known is None or another:
            if len(self._calls) >= _CALLS:
                raise _malformed(f"it has more than {_CALLS} tool calls", index)
            number = index
            while number in self._calls:
                number += 1
            known = self._call_at[index] = self._calls[number] = _Call(number=number)
        known.id = known.id or self._counted(identity)
        fresh = bool(name) and not known.name
        if fresh:
            known.name = self._counted(name)
        text = _text(function, "arguments")
        if text:
            known.arguments.append(self._counted(text))
        return Piece(kind="tool", text=text, index=known.number, name=name if fresh else "")

    def _tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(
                id=call.id or f"call_{call.number}",
                name=call.name,
                arguments="".join(call.arguments),
            )
            for _, call in sorted(self._calls.items())
        )

    def _counted(self, text: str) -> str:
        """``text``, which is kept: no answer fills the memory."""
        self._letters += len(text)
        if self._letters > LETTERS:
            raise too_long("the server", f"an answer of more than {LETTERS:,} letters")
        return text

    def _statistics(self, document: Mapping[str, Any]) -> None:
        """Usage and speculation. An answer is not lost for counts that are not understood."""
        usage, metrics = document.get("usage"), document.get("metrics")
        try:
            if usage is not None:
                self._usage = _usage(usage)
            if isinstance(metrics, Mapping) and metrics.get("speculative_decoding") is not None:
                self._speculation = _speculation(metrics["speculative_decoding"])
        except (KeyError, TypeError, ValueError) as error:
            note = f"the server's counts were not understood: {short(error, 120)}"
            if note not in self._notes and len(self._notes) < _NOTES:
                self._notes.append(note)


def _malformed(what: str, found: object) -> ServingError:
    return ServingError(
        f"the server's answer is malformed: {what} ({short(repr(found), 80)}); is it an "
        "OpenAI-compatible server?"
    )


def _text(holder: Mapping[str, Any], name: str) -> str:
    value = holder.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _malformed(f"{name} is no text", value)
    return without_surrogates(value)


def _count(holder: Mapping[str, Any], name: str) -> int:
    value = holder[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r:.40}, no count")
    return value


def _counts(values: Any, name: str) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{name} is no list of counts")
    return tuple(values)


def _usage(usage: Any) -> Usage:
    if not isinstance(usage, Mapping):
        raise ValueError("usage is no object")

    def part(group: str, name: str) -> int | None:
        details = usage.get(group)
        given = isinstance(details, Mapping) and details.get(name) is not None
        return _count(details, name) if given and details is not None else None

    return Usage(
        prompt=_count(usage, "prompt_tokens"),
        completion=_count(usage, "completion_tokens"),
        reasoning=part("completion_tokens_details", "reasoning_tokens"),
        cached=part("prompt_tokens_details", "cached_tokens"),
    )


def _speculation(found: Any) -> Speculation:
    if not isinstance(found, Mapping):
        raise ValueError("speculative_decoding is no object")

    def listed(name: str) -> tuple[int, ...] | None:
        return _counts(found[name], name) if found.get(name) is not None else None

    made = Speculation(
        steps=_count(found, "num_spec_steps"),
        accepted=_count(found, "num_accepted_draft_tokens"),
        drafted=_count(found, "num_draft_tokens"),
        histogram=_counts(found["acceptance_histogram"], "acceptance_histogram"),
        speculative_tokens=_count(found, "num_spec_tokens"),
        step_accepted=listed("per_step_accepted"),
        step_drafted=listed("per_step_drafted"),
    )
    accepted = sum(i * n for i, n in enumerate(made.histogram))
    if sum(made.histogram) != made.steps or accepted != made.accepted:
        raise ValueError("acceptance_histogram does not add up to the steps and accepted tokens")
    return made
