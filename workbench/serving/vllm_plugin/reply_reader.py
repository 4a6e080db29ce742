"""Reading a reply by its template: whole, or piece by piece as it is streamed.

What comes out does not depend on where the pieces were cut: a piece that ends inside a marker is
held back until it is known what it is. Text is passed on as it was written, blanks included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from workbench.serving.vllm_plugin.response_template import (
    MOST_OPENER,
    Field,
    Marker,
    ResponseTemplate,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text of one field, or the opening of a tool call.

    Attributes:
        field: whose text it is.
        text: never empty, but in the piece that opens a tool call.
        call: which tool call of the reply, from 0; None for other fields.
        name: the function's name, in the piece that opens its call.
    """

    field: Field
    text: str = ""
    call: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call as it was written: ``arguments`` is its text, JSON if the model made it so.

    ``complete`` is False where the reply ended inside it.
    """

    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole reply, taken apart; None where there was no text of the field."""

    thinking: str | None
    content: str | None
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Find:
    """A marker's place in the text. ``end`` is None while more text must decide whether it is."""

    start: int
    end: int | None
    field: Field | None  # None: a marker that means nothing here
    opens: bool
    name: str | None = None


class ReplyReader:
    """Takes a reply's text in pieces of any length and gives the text of its fields.

    Text outside every field counts as content: a model that forgets its markers is still heard. A
    field's text ends at its own closer, or with the reply; the closer of a text that was not opened
    here is left out, and so is an opener that the reply ends in.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        inside: Field | None = None,
        silent: Iterable[str] = (),
    ) -> None:
        """``inside`` is the field that the prompt left open; ``silent`` texts are left out (a
        tokenizer's other markers, which a server asked for the template's markers shows too)."""
        self.template = template
        self.inside = inside
        self.closed: set[Field] = set()
        self.opened: set[Field] = set() if inside is None else {inside}
        self.calls = 0 if inside != "tool_calls" else 1
        self._silent = tuple(
            Marker.of_text(text) for text in dict.fromkeys(silent) if text not in template.markers
        )
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """What can be told of the reply now that ``text`` has come."""
        self._held += text
        return list(self._take(final=False))

    def finish(self) -> list[Piece]:
        """What was held back, now that nothing more comes."""
        return list(self._take(final=True))

    def _take(self, *, final: bool) -> Iterator[Piece]:
        while True:
            found = self._next(final)
            if found is None:
                yield from self._text(len(self._held))
                return
            yield from self._text(found.start)
            if found.end is None:
                return
            self._held = self._held[found.end - found.start :]
            if found.field is None:
                continue
            if not found.opens:
                self.closed.add(found.field)
                self.inside = None
                continue
            self.inside = found.field
            self.opened.add(found.field)
            if found.name is not None:
                yield Piece(field=found.field, call=self.calls, name=found.name)
                self.calls += 1

    def _text(self, end: int) -> Iterator[Piece]:
        """Hand out the held text before ``end``."""
        text, self._held = self._held[:end], self._held[end:]
        if text:
            field = self.inside or "content"
            yield Piece(
                field=field, text=text, call=self.calls - 1 if field == "tool_calls" else None
            )

    def _next(self, final: bool) -> _Find | None:
        """The first marker in the held text; where two begin at one place, the longest."""
        best: _Find | None = None
        for marker, field, opens in self._watched():
            found = _find(self._held, marker, field, opens, final)
            if found is not None and (best is None or _order(found) < _order(best)):
                best = found
        return best

    def _watched(self) -> Iterator[tuple[Marker, Field | None, bool]]:
        regions = self.template.regions
        if self.inside is None:
            for region in regions.values():
                for marker in region.openers:
                    yield marker, region.field, True
                if region.field != "tool_calls":  # closes what a prompt opened unseen
                    for marker in region.closers:
                        yield marker, None, False
        elif self.inside in regions:
            for marker in regions[self.inside].closers:
                yield marker, self.inside, False
        for marker in self._silent:
            yield marker, None, False


def _order(found: _Find) -> tuple[int, int]:
    """First the leftmost; at one place first what is undecided, then the longest."""
    return found.start, -(1 << 60) if found.end is None else -found.end


def _find(text: str, marker: Marker, field: Field | None, opens: bool, final: bool) -> _Find | None:
    """The first place of ``text`` where ``marker`` stands, or may yet."""
    at = text.find(marker.head)
    while at >= 0:
        if marker.literal:
            return _Find(start=at, end=at + len(marker.head), field=field, opens=opens)
        match = marker.pattern.match(text, at, at + MOST_OPENER)
        room = len(text) - at < MOST_OPENER
        if match is None and room and not final:
            return _Find(start=at, end=None, field=field, opens=opens)
        if match is None and room and "\n" not in text[at:]:  # cut off within the opener
            return _Find(start=at, end=len(text), field=None, opens=False)
        if match is not None:
            # A match that reaches the end of what has come may grow with what comes.
            sure = final or not room or match.end() < len(text)
            end, name = match.end() if sure else None, match.groupdict().get("name")
            return _Find(start=at, end=end, field=field, opens=opens, name=name)
        at = text.find(marker.head, at + 1)
    if final:
        return None
    for length in range(min(len(marker.head) - 1, len(text)), 0, -1):
        if text.endswith(marker.head[:length]):
            return _Find(start=len(text) - length, end=None, field=field, opens=opens)
    return None


def read_reply(
    template: ResponseTemplate,
    text: str,
    *,
    inside: Field | None = None,
    silent: Iterable[str] = (),
) -> Reply:
    """A whole reply at once; arguments as of :class:`ReplyReader`."""
    reader = ReplyReader(template, inside=inside, silent=silent)
    texts: dict[Field, list[str]] = {"thinking": [], "content": []}
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in (*reader.push(text), *reader.finish()):
        if piece.name is not None:
            names.append(piece.name)
            arguments.append([])
        elif piece.call is None:
            texts[piece.field].append(piece.text)
        elif arguments:  # a call that the prompt had opened has no name, and is the prompt's
            arguments[-1].append(piece.text)
    last = len(names) - 1
    return Reply(
        thinking="".join(texts["thinking"]) or None,
        content="".join(texts["content"]) or None,
        calls=tuple(
            Call(
                name=name,
                arguments="".join(parts),
                complete=index < last or reader.inside != "tool_calls",
            )
            for index, (name, parts) in enumerate(zip(names, arguments, strict=True))
        ),
    )


def state_after(
    template: ResponseTemplate, prompt: str, *, silent: Iterable[str] = ()
) -> ReplyReader:
    """A reader that has read the part of the prompt which belongs to the reply."""
    reader = ReplyReader(template, silent=silent)
    reader.push(template.message_of(prompt))
    return reader


def thinking_is_over(reader: ReplyReader) -> bool:
    """Whether the thinking is done: closed, or the reply has begun without any."""
    if "thinking" not in reader.template.regions:
        return True
    return "thinking" in reader.closed or bool(reader.opened & {"content", "tool_calls"})


def count_between(
    ids: Iterable[int], openers: frozenset[int], closers: frozenset[int], *, inside: bool
) -> int:
    """Tokens between an opener and a closer, markers not counted; ``inside``: at the beginning."""
    count = 0
    for token in ids:
        if inside:
            inside = token not in closers
            count += inside
        else:
            inside = token in openers
    return count
