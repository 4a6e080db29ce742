"""The chat dashboard without a browser: turns, changes sent to a page, errors, the page that stays.

What a page shows is put together here from the messages, as the page's script does it.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving import openai_server as fake
from workbench.errors import ServingError
from workbench.serving.address import Address
from workbench.serving.client.chat import Chat
from workbench.serving.client.client import Client
from workbench.serving.client.conversation import read_conversation
from workbench.serving.server.server import Server
from workbench.views.background import HERTZ, stop_after_interrupted_cell, stop_all
from workbench.views.chat_board import ChatBoard, chat
from workbench.views.chat_page import conversation

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">&\x1b[31m\u202e'
SPECULATION = {
    "acceptance_histogram": [2, 1, 1, 0, 0, 0, 0, 2], "num_spec_steps": 6,
    "num_accepted_draft_tokens": 17, "num_draft_tokens": 38, "num_spec_tokens": 7,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    stop_all()
    deadline = time.monotonic() + 10
    while any(t.name.startswith("workbench-") for t in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread goes on after it was cancelled"
        time.sleep(0.01)


class Page:
    """What a page would have been sent, and what it then shows."""

    def __init__(self, board: ChatBoard) -> None:
        self.board = board
        self.messages: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.blocks: dict[int, dict[str, Any]] = {}
        self.box = board.widget.prompt
        board.widget.send = self.take

    def take(self, message: dict[str, Any]) -> None:
        message = json.loads(json.dumps(message, allow_nan=False))  # as it travels
        self.messages.append(message)
        self.times.append(time.monotonic())
        if message["kind"] == "reset":
            self.blocks = {b["id"]: dict(b) for b in message["blocks"]}
        elif message["kind"] == "changes":
            for change in message["changes"]:
                if "new" in change:
                    self.blocks[change["new"]["id"]] = dict(change["new"])
                elif "set" in change:
                    self.blocks[change["id"]] |= change["set"]
                else:
                    for name, text in change["add"].items():
                        self.blocks[change["id"]][name] += text
        elif message["kind"] == "taken":
            self.box = ""
        elif message["kind"] == "returned" and not self.box:
            self.box = message["text"]

    def press(self, kind: str, **content: Any) -> None:
        self.board._message(None, {"kind": kind, **content}, None)

    def kinds(self) -> list[str]:
        return [b["kind"] for b in self.blocks.values()]

    def last(self, kind: str) -> dict[str, Any]:
        return [b for b in self.blocks.values() if b["kind"] == kind][-1]


def wait_for(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@dataclass
class Answer:
    n: int
    why: list[str]


def test_an_answer_arrives_in_few_messages_and_whole() -> None:
    words = [f"w{n} " for n in range(60)]
    step = fake.stream(
        fake.delta(reasoning="Let me "), fake.delta(reasoning="see."),
        *(fake.delta(content=word) for word in words), fake.delta("stop"),
        fake.counts(3, 62, speculative_decoding=SPECULATION), pause=0.01,
    )  # fmt: skip
    with fake.serving(step) as server:
        board = chat(server.url, prompt="hello")
        page = Page(board)
        page.press("send", text="hello", settings={"temperature": 0.5, "max_tokens": 70})
        assert page.box == ""
        assert board.widget.state == "writing"
        board.wait(20)
        assert (server.chats[0]["temperature"], server.chats[0]["max_tokens"]) == (0.5, 70)
    assert page.kinds() == ["user", "answer"]
    answer = page.last("answer")
    assert answer["text"] == "".join(words)
    assert answer["reasoning"] == "Let me see."
    assert "62 tokens" in answer["foot"]
    assert "ms a token" in answer["foot"]
    # 1 + 17/6
    assert "acceptance length 3.83: 17 of 38 draft tokens in 6 steps" in answer["foot"]
    sent = [t for m, t in zip(page.messages, page.times, strict=True) if m["kind"] == "changes"]
    assert len(sent) >= 5  # it was watched while it came
    # One is the user's, one the end's; between them ten a second.
    assert len(sent) <= HERTZ * (sent[-1] - sent[0]) + 3
    # Words of one handing over are one change.
    assert all(len(m["changes"]) <= 4 for m in page.messages if m["kind"] == "changes")
    assert board.widget.state == "ready"
    assert board.text.startswith("> hello\n(Let me see.)\nw0 w1 ")
    assert "first token" not in board.text  # no times in what is compared


def test_tools_are_cards_and_a_structured_answer_is_a_value() -> None:
    steps = (
        fake.call(("add", '{"a": 1, "b": 2}'), ("add", '{"a": 1}')),
        fake.say('{"n": 3, ', '"why": ["a"]}'),
    )
    with fake.serving(*steps) as server:
        board = chat(server.url, tools=[add], schema=Answer)
        page = Page(board)
        board.send("1+2?", temperature=0)
        board.wait(20)
    assert page.kinds() == ["user", "answer", "call", "call", "answer"]
    first, second = (b for b in page.blocks.values() if b["kind"] == "call")
    assert (first["name"], first["arguments"], first["result"]) == ("add", "a=1, b=2", "3")
    assert (first["failed"], second["failed"]) == (False, True)
    assert "'b' is a required property" in second["result"]
    assert page.last("answer")["value"] == {"n": 3, "why": ["a"]}
    assert board.chat.turns[0].value == Answer(3, ["a"])
    assert "add(a=1, b=2) → 3" in board.text


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (fake.document({"error": {"message": "no"}}, code=401), "wants an API key"),
        (fake.document(b"<html>", kind="text/html"), "is it an OpenAI-compatible server"),
        (fake.bytes_of(b"data: {\n\n"), "no JSON"),
        (fake.dies_after(fake.delta(content="half")), "ended the connection"),
        (fake.redirect("http://127.0.0.1:9/"), "not followed"),
    ],
)
def test_a_failed_turn_says_why_in_its_place_and_gives_the_text_back(
    step: fake.Step, words: str
) -> None:
    with fake.serving(step, fake.say("well")) as server:
        board = chat(server.url)
        page = Page(board)
        page.press("send", text="hello")
        with pytest.raises(ServingError, match=words):
            board.wait(20)
        assert words in page.last("error")["text"]
        assert page.box == "hello"
        assert "history is as it was before" in board.widget.status
        assert board.chat.turns == ()
        assert words in board._static_html()
        page.press("send", text="again")
        board.wait(20)
        assert page.last("answer")["text"] == "well"
        assert [m["content"] for m in server.chats[-1]["messages"]] == ["again"]


def test_a_call_that_was_under_way_when_the_server_died_is_said() -> None:
    half = fake.delta(tool_calls=[{"index": 0, "function": {"name": "add", "arguments": '{"a"'}}])
    with fake.serving(fake.dies_after(half)) as server:
        board = chat(server.url, tools=[add])
        page = Page(board)
        board.send("?")
        with pytest.raises(ServingError):
            board.wait(20)
    assert page.last("call")["failed"] is True
    assert page.last("call")["result"] == "not called"


def test_nobody_there_shows_with_the_first_turn() -> None:
    board = chat("http://127.0.0.1:9")
    page = Page(board)
    page.press("send", text="hello")
    with pytest.raises(ServingError):
        board.wait(20)
    assert "nothing answers at http://127.0.0.1:9" in page.last("error")["text"]
    with pytest.raises(ServingError, match="not this machine"):
        chat("http://192.0.2.1")


def test_stop_button_interrupt_and_stop_all_end_a_turn() -> None:
    with fake.serving(*[fake.drips()] * 3, fake.say("next")) as server:
        board = chat(server.url)
        page = Page(board)

        def ends(how: Any) -> None:
            page.press("send", text="go on")
            wait_for(lambda: page.kinds()[-1] == "answer" and len(page.last("answer")["text"]) > 3)
            how()
            board.wait(5)
            assert page.last("answer")["foot"].startswith("stopped here")
            assert board.widget.state == "ready"
            assert page.box == ""  # what was kept is not given back

        ends(lambda: page.press("stop"))
        ends(stop_all)
        interrupted = SimpleNamespace(error_in_exec=KeyboardInterrupt())
        ends(lambda: stop_after_interrupted_cell(interrupted))
        assert len(board.chat.turns) == 3
        page.press("send", text="go on")
        board.wait(5)
        assert page.last("answer")["text"] == "next"


def test_stop_before_the_first_word_gives_the_text_back() -> None:
    with fake.serving(fake.waits(3, fake.say("late"))) as server:
        board = chat(server.url)
        page = Page(board)
        page.press("send", text="hello")
        time.sleep(0.2)
        start = time.monotonic()
        page.press("stop")
        board.wait(5)
        assert time.monotonic() - start < 1
    assert "stopped before it said anything" in page.last("error")["text"]
    assert page.box == "hello"


def test_a_second_send_is_refused_while_one_is_under_way() -> None:
    with fake.serving(fake.drips()) as server:
        board = chat(server.url)
        page = Page(board)
        page.press("send", text="one")
        page.press("send", text="two")
        assert "still under way" in board.widget.status
        assert [b["text"] for b in page.blocks.values() if b["kind"] == "user"] == ["one"]
        page.press("undo")
        assert "still under way" in board.widget.status
        board.stop()


def test_undo_and_a_new_view_show_what_there_is() -> None:
    with fake.serving(fake.say("1"), fake.call(("add", '{"a": 1, "b": 2}')), fake.say("3")) as s:
        board = chat(s.url, tools=[add])
        page = Page(board)
        for text in ("a", "b"):
            board.send(text)
            board.wait(20)
        before = dict(page.blocks)
        page.press("ready")
        assert page.messages[-1]["kind"] == "reset"
        assert page.blocks == before
        page.press("undo")
        assert page.kinds() == ["user", "answer"]
        assert page.box == "b"
        assert len(board.chat.turns) == 1
        page.press("undo")
        page.press("undo")
        assert "no turn to take back" in board.widget.status
        assert page.blocks == {}


@pytest.mark.parametrize(
    "content", [None, {}, {"kind": "send"}, {"kind": "send", "text": " ", "settings": 3},
                {"kind": "send", "text": "a", "settings": {"temperature": "hot"}},
                {"kind": "send", "text": "a", "settings": {"max_tokens": 1.5}},
                {"kind": "stop"}, {"kind": "undo"}, {"kind": ["x"]}],
)  # fmt: skip
def test_odd_messages_of_a_page_are_answered_in_the_status(content: Any) -> None:
    with fake.serving() as server:
        board = chat(server.url)
        page = Page(board)
        board._message(None, content, None)
        assert board.widget.state == "ready"
        assert not server.asked
        assert page.blocks == {}


def test_settings_of_a_page() -> None:
    with fake.serving(fake.say("a"), fake.say("b")) as server:
        board = chat(server.url)
        page = Page(board)
        page.press("send", text="a", settings={"temperature": 0, "max_tokens": 5.0})
        board.wait(20)
        page.press("send", text="b", settings={"temperature": None, "max_tokens": None})
        board.wait(20)
    assert server.chats[0]["temperature"] == 0
    assert server.chats[0]["max_tokens"] == 5
    assert not server.chats[1].keys() & {"temperature", "max_tokens"}


@pytest.mark.parametrize(
    ("chosen", "field", "value"),
    [("high", "reasoning_effort", "high"),
     (True, "chat_template_kwargs", {"thinking": True, "enable_thinking": True})],
)  # fmt: skip
def test_reasoning_and_tools_are_chosen_on_the_page(chosen: Any, field: str, value: Any) -> None:
    with fake.serving(fake.say("a"), fake.say("b"), fake.say("c")) as server:
        board = chat(server.url, tools=[add])
        page = Page(board)
        page.press("send", text="a", settings={"reasoning": chosen}, tools=False)
        board.wait(20)
        assert board.widget.settings["tools"] is False
        page.press("send", text="b", settings={"reasoning": None}, tools=True)
        board.wait(20)
        page.press("send", text="c", settings={"reasoning": "hard"}, tools=True)
        assert "reasoning is none, low" in board.widget.status
    assert server.chats[0][field] == value
    assert "tools" not in server.chats[0]
    assert field not in server.chats[1]
    assert [t["function"]["name"] for t in server.chats[1]["tools"]] == ["add"]


def test_clear_takes_all_back_and_not_while_a_turn_is_under_way() -> None:
    with fake.serving(fake.say("1"), fake.document({}, code=500), fake.drips()) as server:
        board = chat(server.url)
        page = Page(board)
        board.send("a")
        board.wait(20)
        page.press("send", text="b")
        with pytest.raises(ServingError):
            board.wait(20)
        assert page.kinds() == ["user", "answer", "user", "error"]
        page.press("clear")
        assert page.blocks == {}
        assert board.chat.turns == ()
        page.press("send", text="c")
        wait_for(lambda: page.kinds() == ["user", "answer"] and page.last("answer")["text"])
        page.press("clear")
        assert "still under way" in board.widget.status
        board.stop()
        assert [m["content"] for m in server.chats[-1]["messages"]] == ["c"]


# -- text that is not ours ------------------------------------------------------------------------


def evil() -> tuple[ChatBoard, Page]:
    """A chat in which everything that can be is markup."""

    def echo(text: str) -> str:
        raise ValueError(text)

    arguments = json.dumps({"text": EVIL})
    steps = (
        fake.stream(
            fake.delta(reasoning=EVIL), fake.delta(content=EVIL),
            fake.delta(tool_calls=[
                {"index": 0, "id": EVIL, "function": {"name": "echo", "arguments": arguments}},
                {"index": 1, "id": "x", "function": {"name": EVIL, "arguments": EVIL}},
            ]), fake.delta(EVIL),
        ),
        fake.say(json.dumps({EVIL: EVIL})),
        fake.document({"error": {"message": EVIL}}, code=500),
    )  # fmt: skip
    with fake.serving(*steps) as server:
        board = chat(server.url, tools=[echo], schema=dict[str, str], model=EVIL)
        page = Page(board)
        board.send(EVIL)
        board.wait(20)
        board.send(EVIL)
        with pytest.raises(ServingError):
            board.wait(20)
    return board, page


def strings(value: Any) -> Iterator[str]:
    """Every text in a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from (name, *strings(part))
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_nothing_that_comes_from_a_server_becomes_markup() -> None:
    board, page = evil()
    view = conversation(board.chat.conversation)
    assert view.html is not None
    for html in (view.html, board._static_html()):
        tags = Tags()
        tags.feed(html)
        assert tags.seen <= {"div", "span", "details", "summary", "b"}
        assert tags.attributes <= {"style", "title"}
        assert "\x1b" not in html
        assert "\u202e" not in html
    # What was typed goes back into the box as it was typed.
    sent = [m for m in page.messages if m["kind"] != "returned"]
    for text in (view.text, board.text, *strings(sent)):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_the_page_s_script_knows_no_markup() -> None:
    folder = Path(__file__).parents[2] / "workbench" / "views"
    script = (folder / "chat.js").read_text("utf-8")
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert banned not in script
    used = set(re.findall(r"bw-chat-([a-z-]+)", (folder / "chat.css").read_text("utf-8")))
    named = set(re.findall(r'make\("[a-z]+", "([a-z-]+)"', script))
    named |= set(re.findall(r'new Passage\("([a-z-]+)"', script))
    named |= set(re.findall(r"bw-chat-([a-z-]+)", script)) | {"user", "error", "is-null"}
    assert used <= named


# -- the page that stays --------------------------------------------------------------------------


def test_a_recorded_chat_is_a_page_and_a_text_that_is_always_the_same(tmp_path: Path) -> None:
    steps = (
        fake.call(("add", '{"a": 1, "b": 2}')),
        fake.stream(fake.delta(reasoning="So."), fake.delta(content="3"), fake.delta("length"),
                    fake.counts(3, 2, speculative_decoding=SPECULATION)),
    )  # fmt: skip
    texts = []
    for _ in range(2):
        with fake.serving(*steps) as server:
            talk = Chat(Client(server.url), tools=[add], system="Be brief.")
            talk.send("1+2?")
        talk.save(tmp_path / "chat.json", note="vLLM 0.33, a laptop")
        recorded = read_conversation(tmp_path / "chat.json")
        view = conversation(recorded)
        texts.append(view.text)
    assert texts[0] == texts[1]
    assert texts[0] == (
        "> 1+2?\nadd(a=1, b=2) → 3\n-- 4 tokens\n(So.)\n3\n-- cut off at the limit of tokens · "
        "2 tokens · acceptance length 3.83: 17 of 38 draft tokens in 6 steps, counted by the server"
    )
    assert view.figure is None
    assert view.html is not None
    assert "Chat with tiny" in view.html
    assert "recorded 20" in view.html
    assert "vLLM 0.33, a laptop" in view.html
    assert "Be brief." in view.html
    assert "first token after" in view.html
    assert ">system prompt<" in view.html
    assert view.html.count("<details") == 2  # what it was told, and what it thought


def test_an_empty_board_says_what_it_is() -> None:
    board = chat("http://127.0.0.1:9", tools=[add], schema=Answer)
    assert "http://127.0.0.1:9 · tools: add · answers as Answer" in board._static_html()
    assert board.text == "nothing said yet"
    bundle = board._repr_mimebundle_()
    assert bundle["text/plain"] == "nothing said yet"
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_a_server_that_was_started_here_is_talked_to_by_its_name() -> None:
    with fake.serving(fake.say("1")) as running:
        server = object.__new__(Server)  # one is made by starting an engine
        server.address, server.model = Address.of(running.url), "served"
        board = chat(server)
        board.send("a")
        board.wait(20)
        assert [a.path for a in running.asked] == ["/v1/chat/completions"]
        assert running.chats[0]["model"] == "served"


def test_a_chat_that_began_in_a_cell_goes_on_in_a_board() -> None:
    with fake.serving(fake.say("1"), fake.say("2")) as server:
        talk = Chat(Client(server.url))
        talk.send("a")
        board = chat(talk)
        page = Page(board)
        page.press("ready")
        assert page.kinds() == ["user", "answer"]
        board.send("b")
        board.wait(20)
        assert len(server.chats[-1]["messages"]) == 3
        with pytest.raises(ServingError, match="already"):
            chat(talk, tools=[add])


# -- the page's script, in a browser --------------------------------------------------------------

MODEL = """
class Model {
  constructor(fields) { this.fields = fields; this.handlers = {}; this.sent = []; }
  get(name) { return this.fields[name]; }
  set(name, value) { this.fields[name] = value; this.tell(`change:${name}`); }
  on(name, handler) { (this.handlers[name] ||= []).push(handler); }
  off(name, handler) { this.handlers[name] = this.handlers[name].filter((h) => h !== handler); }
  send(content) { this.sent.push(content); }
  tell(name, content) { for (const handler of this.handlers[name] ?? []) handler(content); }
}
"""


@pytest.fixture(scope="module")
def browser(chromium_path: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=chromium_path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def script(browser: Any) -> Iterator[Any]:
    """A page with the script in it; ``show(fields)`` draws it, ``tell(message)`` is the kernel."""
    folder = Path(__file__).parents[2] / "workbench" / "views"
    code = (folder / "chat.js").read_text("utf-8").replace("export default", "window.widget =")
    style = (folder / "chat.css").read_text("utf-8")
    page = f"""<!doctype html><meta charset="utf-8"><style>{style}</style><body></body>
    <script type="module">{MODEL}{code}
    window.show = (fields) => {{
      window.model = new Model(fields);
      window.done = window.widget.render({{ model: window.model, el: document.body }});
    }};
    window.tell = (message) => window.model.tell("msg:custom", message);
    </script>"""
    shown = browser.new_page(viewport={"width": 1280, "height": 900})
    troubles: list[str] = []
    shown.on("pageerror", lambda error: troubles.append(str(error)))
    shown.set_content(page)
    yield shown
    assert not troubles
    shown.close()


def fields(board: ChatBoard) -> dict[str, Any]:
    names = ("prompt", "state", "status", "settings", "about", "look")
    return {name: getattr(board.widget, name) for name in names}


@pytest.mark.browser
def test_the_script_shows_what_it_is_sent_as_text(script: Any) -> None:
    board, page = evil()
    script.evaluate("fields => show(fields)", fields(board))
    for message in page.messages:
        script.evaluate("message => tell(message)", message)

    def shown() -> list[str]:
        return script.eval_on_selector_all(  # type: ignore[no-any-return]
            ".bw-chat-user .bw-chat-text, .bw-chat-thought, .bw-chat-answer > .bw-chat-text, "
            ".bw-chat-arguments, .bw-chat-name, .bw-chat-result, .bw-chat-error .bw-chat-text, "
            ".bw-chat-foot",
            "all => all.map(one => one.textContent)",
        )

    texts = [
        block[name]
        for block in page.blocks.values()
        for name in ("reasoning", "text", "name", "arguments", "result", "foot")
        if name in block
    ]
    assert shown() == texts
    assert EVIL.replace("\x1b", "␛").replace("\u202e", "\ufffd") in texts
    assert script.locator("body script:not([type]), img").count() == 0
    assert script.evaluate("document.documentElement.scrollWidth") <= 1280
    page.press("ready")  # another view of it is told all at once, and shows the same
    script.evaluate("message => tell(message)", page.messages[-1])
    assert shown() == texts


@pytest.mark.browser
def test_the_script_s_keys_buttons_and_folding(script: Any) -> None:
    board = chat("http://127.0.0.1:9", prompt="hello")
    script.evaluate("fields => show(fields)", fields(board))
    sent = lambda: script.evaluate("model.sent")  # noqa: E731
    assert sent() == [{"kind": "ready"}]
    box = script.get_by_label("Message")
    box.press("Shift+Enter")
    assert box.input_value() in ("hello\n", "\nhello")
    script.get_by_label("temperature").fill("0.5")
    box.press("Enter")
    assert sent()[1]["kind"] == "send"
    assert sent()[1]["settings"] == {"temperature": 0.5, "max_tokens": None, "reasoning": None}
    assert sent()[1]["tools"] is True
    assert not script.get_by_label("tools").is_visible()  # this chat has none
    script.evaluate("() => { tell({ kind: 'taken' }); model.set('state', 'writing'); }")
    assert box.input_value() == ""
    box.fill("too early")
    box.press("Enter")
    assert len(sent()) == 2
    assert "still writing" in script.get_by_role("status").inner_text()
    box.press("Escape")
    assert sent()[2] == {"kind": "stop"}
    new = {"new": {"id": 0, "kind": "answer", "reasoning": "", "text": "", "foot": ""}}
    script.evaluate("change => tell({ kind: 'changes', changes: [change] })", new)
    fold = script.locator(".bw-chat-reasoning")
    assert not fold.is_visible()
    add = "change => tell({ kind: 'changes', changes: [{ id: 0, add: change }] })"
    script.evaluate(add, {"reasoning": "hm"})
    assert script.get_by_text("hm", exact=True).is_visible()  # while it is all there is
    script.evaluate(add, {"text": "so"})
    assert not script.get_by_text("hm", exact=True).is_visible()
    script.locator("summary", has_text="reasoning").click()
    script.evaluate(add, {"text": " it goes on"})
    assert script.get_by_text("hm", exact=True).is_visible()  # whoever opened it reads it
    # One that was cut off while it thought has nothing else to read; one that calls a tool has.
    cut = {"id": 5, "kind": "answer", "reasoning": "why", "text": "", "foot": "cut off"}
    script.evaluate("b => tell({ kind: 'changes', changes: [{ new: b }] })", cut)
    assert script.get_by_text("why", exact=True).is_visible()
    call = {"id": 6, "kind": "call", "name": "add", "arguments": "", "done": False}
    script.evaluate("b => tell({ kind: 'changes', changes: [{ new: b }] })", call)
    assert not script.get_by_text("why", exact=True).is_visible()
    script.evaluate("() => model.set('state', 'ready')")
    script.get_by_role("button", name="Undo").click()
    assert sent()[-1] == {"kind": "undo"}
    script.evaluate("() => model.tell('comm:close')")
    assert "kernel has ended" in script.get_by_role("status").inner_text()
    assert script.get_by_role("button", name="Send").is_disabled()


@pytest.mark.browser
def test_an_empty_page_is_small_and_says_what_to_do(script: Any) -> None:
    board = chat("http://127.0.0.1:9")
    script.evaluate("fields => show(fields)", fields(board))
    page = script.get_by_role("log")
    assert "press Enter" in page.inner_text()
    assert page.bounding_box()["height"] < 100  # the box to write in is in sight
    for name in ("Undo", "Clear", "Stop"):
        assert script.get_by_role("button", name=name).is_disabled()
    lines = "line\n" * 80
    said = {"new": {"id": 0, "kind": "answer", "reasoning": "", "text": lines, "foot": ""}}
    script.evaluate("change => tell({ kind: 'changes', changes: [change] })", said)
    assert "press Enter" not in page.inner_text()
    assert 300 < page.bounding_box()["height"] < 400
    left = "e => e.scrollHeight - e.scrollTop - e.clientHeight"
    more = {"id": 0, "add": {"text": "so many words " * 300}}
    script.evaluate("change => tell({ kind: 'changes', changes: [change] })", more)
    assert page.evaluate(left) < 2
    script.set_viewport_size({"width": 500, "height": 900})  # its lines are more by that
    script.wait_for_timeout(100)
    assert page.evaluate(left) < 2
    script.evaluate("() => tell({ kind: 'reset', blocks: [] })")
    assert "press Enter" in page.inner_text()


@pytest.mark.browser
def test_the_keyboard_stays_in_the_box_and_clear_is_asked_twice(script: Any) -> None:
    board = chat("http://127.0.0.1:9", tools=[add])
    script.evaluate("fields => show(fields)", fields(board))
    said = {"new": {"id": 0, "kind": "user", "text": "hello"}}
    script.evaluate("change => tell({ kind: 'changes', changes: [change] })", said)
    focused = lambda: script.evaluate("document.activeElement.ariaLabel")  # noqa: E731
    box = script.get_by_label("Message")
    script.get_by_label("tools").uncheck()
    script.get_by_label("reasoning").select_option("on")
    box.fill("a")
    script.get_by_role("button", name="Send").click()
    assert focused() == "Message"  # and not the page, where "d d" deletes the cell
    sent = lambda: script.evaluate("model.sent")  # noqa: E731
    assert (sent()[-1]["tools"], sent()[-1]["settings"]["reasoning"]) == (False, True)
    clear = script.locator("button", has_text="Clear")
    clear.click()
    assert sent()[-1]["kind"] == "send"
    assert clear.inner_text() == "Clear all?"
    clear.click()
    assert sent()[-1] == {"kind": "clear"}
    assert focused() == "Message"
    # A server that is silent is seen to be.
    script.evaluate("() => tell({ kind: 'heard' })")
    script.evaluate("() => { model.set('status', 'waiting for the server'); }")
    script.evaluate("() => { model.set('state', 'writing'); }")
    status = script.get_by_role("status")
    assert status.inner_text() == "waiting for the server"
    script.wait_for_function(
        "() => /server, \\d s/.test(document.querySelector('[role=status]').innerText)"
    )
    assert script.get_by_role("log").get_attribute("aria-busy") == "true"


@pytest.mark.browser
@pytest.mark.parametrize("letters", ["A" * 300_000, "a\n" * 150_000])
def test_a_text_without_an_end_does_not_hold_the_page(script: Any, letters: str) -> None:
    board = chat("http://127.0.0.1:9")
    script.evaluate("fields => show(fields)", fields(board))
    new = {"new": {"id": 0, "kind": "answer", "reasoning": letters, "text": "", "foot": ""}}
    script.evaluate("change => tell({ kind: 'changes', changes: [change] })", new)
    begin = time.monotonic()
    for part in range(6):
        change = {"id": 0, "add": {"text": letters[50_000 * part : 50_000 * (part + 1)]}}
        script.evaluate("c => { tell({ kind: 'changes', changes: [c] }); }", change)
        script.evaluate("document.body.offsetHeight")
    assert time.monotonic() - begin < 25
    shown = script.locator(".bw-chat-answer > .bw-chat-text").text_content()
    assert shown.startswith(letters[:100_000])
    assert "… 200,000 letters more" in shown
    assert len(shown) < 100_100
    script.evaluate("() => tell({ kind: 'changes', changes: [{ id: 0, set: { text: 'b' } }] })")
    assert script.locator(".bw-chat-answer > .bw-chat-text").text_content() == "b"
    # Letters of one width: Chromium takes minutes for an endless line of others.
    family = "e => getComputedStyle(e).fontFamily"
    assert "monospace" in script.locator(".bw-chat-answer > .bw-chat-text").evaluate(family)
    assert "monospace" in script.locator(".bw-chat-thought").evaluate(family)


def test_the_page_that_stays_is_no_longer_than_the_live_one() -> None:
    with fake.serving(fake.say("A" * 150_000)) as server:
        talk = Chat(Client(server.url))
        talk.send("a")
    view = conversation(talk.conversation)
    assert view.html is not None
    assert "… 50,000 letters more" in view.html
    assert len(view.html) < 110_000
    assert "A" * 150_000 in view.text
