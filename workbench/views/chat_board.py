"""The chat dashboard: talk to a server, watch it think, call tools and answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.errors import ServingError, WorkbenchError
from workbench.serving.address import Address
from workbench.serving.api_key import VARIABLE
from workbench.serving.client.chat import Chat, Event
from workbench.serving.client.chat_settings import ChatSettings
from workbench.serving.client.client import Client
from workbench.serving.client.conversation import Turn
from workbench.serving.client.json_check import without_surrogates
from workbench.serving.client.tools import Tool
from workbench.serving.server.server import Server
from workbench.terminal import printable
from workbench.views import theme
from workbench.views.chat_blocks import Blocks, Change
from workbench.views.chat_page import block_html, chat_text
from workbench.views.chat_run import Speaking
from workbench.views.dashboard import Dashboard
from workbench.views.page import box

_HERE = Path(__file__).parent
_BUTTONS = ("send", "stop", "undo", "clear")
_SETTINGS = ("temperature", "max_tokens", "reasoning")  # those that the page changes


class ChatWidget(anywidget.AnyWidget):
    """The page's side. All text travels as text, never as HTML.

    To the page: ``reset`` (all blocks), ``changes`` (what is new, at most ten times a second),
    ``taken`` and ``returned`` (the text in the box was sent; a text is to stand there again), and
    ``heard``, which answers each button: a kernel that is busy with a cell hears nothing. From the
    page: ``send`` (with text, settings, and whether tools are offered), ``stop``, ``undo``,
    ``clear``, and ``ready`` when a view of it has been drawn.
    """

    _esm = (_HERE / "chat.js").read_text("utf-8")
    _css = (_HERE / "chat.css").read_text("utf-8")
    prompt = traitlets.Unicode().tag(sync=True)
    state = traitlets.Unicode("ready").tag(sync=True)  # ready, writing
    status = traitlets.Unicode("").tag(sync=True)
    settings = traitlets.Dict().tag(sync=True)
    about = traitlets.Unicode("").tag(sync=True)
    look = traitlets.Dict().tag(sync=True)


class ChatBoard(Dashboard):
    """A chat, live. :func:`chat` makes it.

    The stop button and an interrupt of the kernel each end a turn. A turn that fails says why in
    its place, its text goes back into the box, and the next one can be sent.

    Attributes:
        chat: the conversation, with its history.
        schema: what each turn's last answer must be, or None.
        run: the newest turn, None before the first.
    """

    def __init__(self, chat: Chat, *, prompt: str, schema: Any) -> None:
        self.chat, self.schema = chat, schema
        self._tools = chat.tools  # all of them: the page may offer the model none
        self.run: Speaking | None = None
        self._page = threading.RLock()  # what is sent to it comes from several threads
        self._changes: list[Change] = []
        self._blocks = Blocks(self._note_change)
        for turn in chat.turns:  # a chat that began elsewhere
            self._show_turn(turn)
        self.widget = ChatWidget(
            prompt=prompt,
            status="ready",
            settings=self._settings(),
            about=self._about(),
            look={
                "mono": theme.MONO,
                "sans": theme.SANS,
                "text": theme.TEXT,
                "small": theme.SMALL,
                "user": theme.SLIDING,
            },
        )
        self.widget.on_msg(self._message)

    # -- in a cell --------------------------------------------------------------------------------

    def send(self, text: str, **settings: Any) -> None:
        """Say something; :meth:`wait` waits for what comes of it.

        ``settings`` are fields of :class:`workbench.serving.client.chat_settings.ChatSettings`.

        Raises:
            ServingError: a setting is wrong, or a turn is under way.
        """
        with self._page:
            run = Speaking(self.chat, text, self._show, schema=self.schema, **settings)
            self.run = run
            self._blocks.user(text)
            self._flush()
            self.widget.prompt = ""
            self.widget.send({"kind": "taken"})
            self.widget.state, self.widget.status = "writing", "waiting for the server"
        run.start()

    def stop(self) -> None:
        """End the turn under way; raises what went wrong in the background, if anything did."""
        if self.run is not None:
            self.run.stop()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the turn is over; raises what went wrong, TimeoutError if it goes on."""
        if self.run is not None:
            self.run.wait(timeout)

    def undo(self) -> None:
        """Take the last turn back.

        Raises:
            ServingError: there is none, or one is under way.
        """
        with self._page:
            taken = self.chat.undo()
            self._blocks.clear()
            for turn in self.chat.turns:
                self._show_turn(turn)
            self._reset()
            self.widget.send({"kind": "returned", "text": taken.user})
            self.widget.status = "the last turn was taken back"

    def clear(self) -> None:
        """Take all turns back, and what the page says of turns that failed.

        Raises:
            ServingError: one is under way.
        """
        with self._page:
            if self.chat.busy:
                raise ServingError("a turn is still under way; wait for it, or stop() it")
            while self.chat.turns:
                self.chat.undo()
            self._blocks.clear()
            self._reset()
            self.widget.status = "ready"

    @property
    def text(self) -> str:
        """The conversation; no times, so that equal answers say equal words."""
        return chat_text(self.chat.conversation)

    # -- beneath ----------------------------------------------------------------------------------

    def _about(self) -> str:
        tools = ", ".join(self.chat.tools)
        words = [str(self.chat.client.address), *([f"tools: {tools}"] if tools else [])]
        if self.chat.system is not None:
            words.append("with a system prompt")
        if self.schema is not None:
            name = getattr(self.schema, "__name__", None) or "a JSON schema"
            words.append(f"answers as {name}")
        words.append("times are measured here, at the client")
        return printable(" · ".join(words))

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self.chat.settings, name) for name in _SETTINGS} | {
            "has_tools": bool(self._tools),
            "tools": bool(self.chat.tools) or not self._tools,
        }

    def _show_turn(self, turn: Turn) -> None:
        self._blocks.user(turn.user)
        results = iter(turn.results)
        for reply in turn.replies:
            self._blocks.add(reply)
            for _, result in zip(reply.tool_calls, results, strict=False):
                self._blocks.add(result)

    def _note_change(self, change: Change) -> None:
        """Keep a change until it is sent; text that follows text is one change with it."""
        last = self._changes[-1] if self._changes else {}
        if "add" in change and last.get("id") == change["id"] and "add" in last:
            (name, text), *_ = change["add"].items()
            if name in last["add"]:
                last["add"][name] += text
                return
        self._changes.append(change)

    def _flush(self) -> None:
        if self._changes:
            changes, self._changes = self._changes, []
            self.widget.send({"kind": "changes", "changes": changes})

    def _reset(self) -> None:
        self._changes = []
        self.widget.send({"kind": "reset", "blocks": [b.to_dict() for b in self._blocks.all]})

    def _show(self, run: Speaking, batch: list[Event], ended: bool) -> None:
        with self._page:
            for event in batch:
                self._blocks.add(event)
            if ended:
                self._conclude(run)
            self._flush()
            if ended:
                self.widget.state = "ready"
            elif batch:
                self.widget.status = "writing"

    def _conclude(self, run: Speaking) -> None:
        """Say how a turn ended; one that is not in the history gives its text back."""
        kept = any(turn is run.turn for turn in self.chat.turns)
        if run.error is not None:
            kind = "" if isinstance(run.error, WorkbenchError) else f"{type(run.error).__name__}: "
            self._blocks.error(f"{kind}{run.error}")
            self.widget.status = "the turn failed; the history is as it was before"
        elif not kept:
            self._blocks.error("stopped before it said anything; the history is as it was before")
            self.widget.status = "stopped"
        else:
            self.widget.status = "stopped" if run.turn and run.turn.stopped else "ready"
        if not kept:
            self.widget.send({"kind": "returned", "text": run.text})

    def _message(self, _: Any, content: Any, __: Any) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind in _BUTTONS:
            self.widget.send({"kind": "heard"})
        try:
            if kind == "send":
                self.chat.settings = _from_page(content.get("settings"), self.chat.settings)
                if not self.chat.busy:  # a turn under way keeps the tools it began with
                    self.chat.tools = {} if content.get("tools") is False else self._tools
                self.widget.settings = self._settings()
                self.send(without_surrogates(str(content.get("text", ""))))
            elif kind == "stop" and self.run is not None:
                self.widget.status = "stopping"
                self.run.cancel()
            elif kind == "undo":
                self.undo()
            elif kind == "clear":
                self.clear()
            elif kind == "ready":
                with self._page:
                    self._reset()
        except WorkbenchError as error:
            self.widget.status = printable(str(error))

    def _static_html(self) -> str:
        with self._page:
            shown = "".join(map(block_html, self._blocks.all))
        font = f"font-family:{theme.SANS}", f"font-size:{theme.TEXT}px"
        if not shown:
            words = f"A chat runs here when the notebook does: {self._about()}"
            return box(escape(words), *font, "opacity:.75")
        return box(shown, *font, "max-width:900px")


def _from_page(given: Any, before: ChatSettings) -> ChatSettings:
    """Settings as a page sends them: null is the server's own default, what is missing stays."""
    if not isinstance(given, Mapping):
        return before
    taken = {name: given[name] for name in _SETTINGS if name in given}
    limit = taken.get("max_tokens")
    if isinstance(limit, float) and limit.is_integer():  # a page knows one kind of number
        taken["max_tokens"] = int(limit)
    return replace(before, **taken)


def chat(
    server: Client | Chat | Server | Address | str,
    *,
    tools: Sequence[Tool | Callable[..., Any]] = (),
    system: str | None = None,
    schema: Any = None,
    prompt: str = "",
    settings: ChatSettings | None = None,
    model: str | None = None,
    key: str | None = VARIABLE,
    foreign: bool = False,
) -> ChatBoard:
    """A chat with a server, live: text as it is written, reasoning folded, tools as cards.

    Args:
        server: an address, a client, a server that was started here, or a chat with its history.
        tools, system, settings: as :class:`workbench.serving.client.chat.Chat` takes them.
        schema: what each turn's last answer must be; it is shown as a tree.
        prompt: what stands in the box at first.
        model, key, foreign: as :class:`workbench.serving.client.client.Client` takes them, for an
        address.

    Raises:
        ServingError: no address, no tool; whether a server is there shows with the first turn.
    """
    if isinstance(server, Chat):
        if tools or system is not None or settings is not None:
            raise ServingError("a chat has its tools, its system and its settings already")
        return ChatBoard(server, prompt=prompt, schema=schema)
    if isinstance(server, Server):
        model, foreign = model or server.model, foreign or not server.address.loopback
        server = server.address
    if not isinstance(server, Client):
        server = Client(server, model=model, key=key, foreign=foreign)
    made = Chat(server, tools=tools, system=system, settings=settings)
    return ChatBoard(made, prompt=prompt, schema=schema)
