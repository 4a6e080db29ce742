"""A chat that is over, or was recorded, as a page and as text."""

from __future__ import annotations

from html import escape

from workbench.serving.client.conversation import Conversation
from workbench.terminal import printable
from workbench.views import theme
from workbench.views.chat_blocks import Block, blocks_of, foot, pretty_arguments, pretty_json
from workbench.views.numbers import plural
from workbench.views.page import box, page
from workbench.views.view import View

_FAINT = "color:var(--jp-ui-font-color2,inherit)"
_WRAP = ("white-space:pre-wrap", "overflow-wrap:anywhere")
_RED = "#D13438"  # what failed; 4.9 : 1 on white, 3.8 on the dark theme's #111
_CARD = (f"border:1px solid {theme.LINE}", "border-radius:3px", "padding:6px 10px",
         "margin:6px 10px 6px 13px")  # fmt: skip
# What was said is in one width of letters, as on the live page: it may be code.
_SAID = (f"font:{theme.TEXT}px/1.5 {theme.MONO}", *_WRAP)
LETTERS = 100_000  # of one text on a page


def conversation(value: Conversation) -> View:
    """A chat, turn by turn; ``value`` is ``chat.conversation`` or ``read_conversation(path)``.

    Reasoning is folded. Everything that comes from a model, a tool or a server is escaped.
    """
    model = printable(value.model) or "a model"
    subtitle = f"{plural(len(value.turns), 'turn')} · times {value.source}"
    system = ""
    if value.system is not None:
        system = _folded("system prompt", printable(value.system))
    body = system + "".join(map(block_html, blocks_of(value)))
    text = chat_text(value)
    return View(
        html=page(
            f"Chat with {model}",
            subtitle,
            box(body, "max-width:900px", f"font-size:{theme.TEXT}px"),
        ),
        text=text,
    )


def chat_text(value: Conversation) -> str:
    """The chat in plain text; no times, so that equal answers say equal words."""
    lines = []
    for turn in value.turns:
        lines.append(f"> {printable(turn.user)}")
        results = list(turn.results)
        for reply in turn.replies:
            if reply.reasoning:
                lines.append(f"({printable(reply.reasoning.strip())})")
            if reply.text:
                lines.append(printable(reply.text))
            for call in reply.tool_calls:
                came = results.pop(0) if results else None
                said = "no result" if came is None else came.error or came.content
                arguments = pretty_arguments(call)
                lines.append(f"{printable(call.name)}({arguments}) → {printable(said)}")
            if words := foot(reply, times=False):
                lines.append(f"-- {printable(words)}")
    return "\n".join(lines) or "nothing said yet"


def block_html(block: Block) -> str:
    """A block as HTML, with its styles in it."""
    of = block.fields
    if block.kind == "user":
        said = box(_shortened(of["text"]), *_SAID)
        heading = box("you", "font-weight:600", f"font-size:{theme.SMALL}px", _FAINT)
        edge = f"border-left:3px solid {theme.SLIDING}"
        return box(heading + said, edge, "padding:2px 10px", "margin:14px 0 8px")
    if block.kind == "error":
        sign = box("✗ ", f"color:{_RED}", "font-weight:700", tag="span")
        return box(sign + escape(of["text"]), *_CARD, *_WRAP, f"border-color:{_RED}")
    small = (f"font-size:{theme.SMALL}px", _FAINT, "margin-top:4px")
    under = box(escape(of["foot"]), *small) if of["foot"] else ""
    if block.kind == "call":
        head = box(f"<b>{escape(of['name'])}</b>({_shortened(of['arguments'])})", *_SAID)
        color = f"color:{_RED}" if of["failed"] else ""
        sign = "✗ " if of["failed"] else "→ "
        came = of["result"] if of["done"] else "no result"
        result = box(_shortened(sign + came), *_SAID, "max-height:200px", "overflow-y:auto", color)
        return box(head + result + under, *_CARD)
    reasoning = _folded("reasoning", of["reasoning"]) if of["reasoning"] else ""
    if not of["text"]:  # cut off while it thought: that is all there is to read
        reasoning = reasoning.replace("<details ", "<details open ", 1)
    text = pretty_json(of["value"]) if of.get("parsed") else of["text"]
    said = box(_shortened(text), *_SAID)
    return box(reasoning + said + under, "margin:6px 0", "padding:0 10px 0 13px")


def _shortened(text: str) -> str:
    """HTML of a text, of a very long one its beginning; the value it is from has it all."""
    if len(text) <= LETTERS:
        return escape(text)
    return escape(f"{text[:LETTERS]}\n… {len(text) - LETTERS:,} letters more")


def _folded(name: str, text: str) -> str:
    head = box(escape(name), f"font-size:{theme.SMALL}px", _FAINT, "cursor:pointer", tag="summary")
    inner = box(_shortened(text), *_SAID, _FAINT, "padding:4px 10px")
    return box(head + inner, "margin:4px 0", tag="details")
