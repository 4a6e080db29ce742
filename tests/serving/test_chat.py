"""A chat: histories, rounds of tool calls, stopping, failing, undoing, files."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from serving import openai_server as fake
from workbench.errors import ServingError
from workbench.files import FileError
from workbench.serving.client import client as client_module
from workbench.serving.client.chat import Chat
from workbench.serving.client.chat_settings import ChatSettings
from workbench.serving.client.client import Client
from workbench.serving.client.conversation import Conversation, read_conversation
from workbench.serving.client.reply import Piece, Reply
from workbench.serving.client.tools import ToolResult, tool

SPECULATION = {
    "acceptance_histogram": [1, 0, 1], "num_spec_steps": 2, "num_accepted_draft_tokens": 2,
    "num_draft_tokens": 4, "num_spec_tokens": 2,
}  # fmt: skip


CLIENT = str(Path(client_module.__file__).parent)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_history_grows_and_is_sent_without_reasoning() -> None:
    first = fake.stream(fake.delta(reasoning="hm"), fake.delta("stop", content="one"))
    with fake.serving(first, fake.say("two")) as server:
        chat = Chat(Client(server.url), system="Be brief.", settings=ChatSettings(temperature=0))
        assert chat.send("1?").text == "one"
        assert chat.send("2?", temperature=1, max_tokens=9).text == "two"
        one, two = server.chats
    system = {"role": "system", "content": "Be brief."}
    assert one["messages"] == [system, user("1?")]
    assert two["messages"] == [system, user("1?"), assistant("one"), user("2?")]
    assert (one["temperature"], two["temperature"], two["max_tokens"]) == (0, 1, 9)
    assert chat.messages == [*two["messages"], assistant("two")]
    assert chat.turns[0].reply.reasoning == "hm"
    with pytest.raises(ServingError, match="settings of a turn are temperature"):
        chat.send("3?", temprature=1)
    for nothing in ("", " \n", None):
        with pytest.raises(ServingError, match="nothing to send"):
            chat.send(nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_forced_once_a_turn(choice: Any) -> None:
    call = fake.call(("add", '{"a": 1, "b": 2}'))
    with fake.serving(call, call, fake.say("3"), call, fake.say("3")) as server:
        chat = Chat(Client(server.url), tools=[add])
        assert chat.send("1+2?", extra={"tool_choice": choice, "top_k": 4}).text == "3"
        assert chat.send("1+2?", extra={"tool_choice": "none"}).text == "3"
        bodies = server.chats
    assert [body["tool_choice"] for body in bodies] == [choice, "auto", "auto", "none", "none"]
    assert [body.get("top_k") for body in bodies] == [4, 4, 4, None, None]


def test_tools_are_called_until_there_is_an_answer() -> None:
    steps = (
        fake.call(("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}'), text="Adding."),
        fake.call(("add", '{"a": 3, "b": 7}')),
        fake.say("10"),
    )
    with fake.serving(*steps) as server:
        chat = Chat(Client(server.url), tools=[add])
        events = list(chat.stream("1+2+3+4?"))
        bodies = server.chats
    kinds = [type(e) for e in events if not isinstance(e, Piece)]
    assert kinds == [Reply, ToolResult, ToolResult, Reply, ToolResult, Reply]
    assert [e.content for e in events if isinstance(e, ToolResult)] == ["3", "7", "10"]
    assert all(body["tools"] == [chat.tools["add"].to_request()] for body in bodies)

    def asks(text: str, *calls: tuple[str, str]) -> dict[str, Any]:
        made = [{"id": f"id{i}", "type": "function", "function": {"name": "add", "arguments": a}}
                for i, a in calls]  # fmt: skip
        return {"role": "assistant", "content": text, "tool_calls": made}

    def told(call: str, text: str) -> dict[str, str]:
        return {"role": "tool", "tool_call_id": call, "content": text}

    assert bodies[2]["messages"] == [
        user("1+2+3+4?"),
        asks("Adding.", ("0", '{"a": 1, "b": 2}'), ("1", '{"a": 3, "b": 4}')),
        told("id0", "3"), told("id1", "7"),
        asks("", ("0", '{"a": 3, "b": 7}')),
        told("id0", "10"),
    ]  # fmt: skip
    turn = chat.turns[0]
    assert (turn.user, turn.text, len(turn.replies), len(turn.results)) == ("1+2+3+4?", "10", 3, 3)
    assert chat.messages == [*bodies[2]["messages"], assistant("10")]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("add", '{"a": 1', "no JSON"),
        ("add", '["a"]', "do not fit"),
        ("add", '{"a": 1, "b": "2"}', "b: '2' is not of type 'integer'"),
        ("sub", "{}", "there is no tool 'sub'"),
        ("fail", "{}", "fail raised ZeroDivisionError"),
        ("odd", "{}", "odd returned what is no JSON"),
        ("slow", "{}", "slow took longer than 0.1 s"),
    ],
)
def test_a_call_that_fails_is_told_to_the_model_and_the_session_goes_on(
    name: str, arguments: str, words: str
) -> None:
    def fail() -> float:
        return 1 / 0

    def odd() -> object:
        return object()

    @tool(timeout=0.1)
    def slow() -> None:
        time.sleep(0.5)

    with fake.serving(fake.call((name, arguments)), fake.say("Sorry."), fake.say("Yes.")) as server:
        chat = Chat(Client(server.url), tools=[add, fail, odd, slow])
        turn = chat.send("?")
        assert turn.text == "Sorry."
        assert words in str(turn.results[0].error)
        told = server.chats[1]["messages"][-1]
        assert json.loads(told["content"])["error"] == turn.results[0].error
        # What is sent back must be readable: vLLM's templates parse it.
        back = server.chats[1]["messages"][-2]["tool_calls"][0]["function"]
        assert isinstance(json.loads(back["arguments"]), dict)
        assert chat.send("again").text == "Yes."


def test_rounds_have_a_limit_and_the_history_is_as_before() -> None:
    ask = fake.call(("add", '{"a": 1, "b": 2}'))
    with fake.serving(fake.say("hi"), *[ask] * 5) as server:
        chat = Chat(Client(server.url), tools=[add], max_rounds=3)
        chat.send("hello")
        before = chat.messages
        with pytest.raises(ServingError, match=r"4 times in a row, and max_rounds is 3"):
            chat.send("loop")
        assert len(server.chats) == 5
    assert chat.messages == before
    assert not chat.busy


@dataclass
class Answer:
    n: int


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((fake.dies_after(fake.delta(content="a")),), "ended the connection"),
        ((fake.call(("add", '{"a": 1, "b": 2}')), fake.dies_after()), "ended the connection"),
        ((fake.document({"detail": "no"}, code=500),), "failed"),
        ((fake.say("no JSON"),), "the answer is no JSON"),
    ],
)
def test_a_turn_that_fails_leaves_the_history_as_it_was(
    steps: tuple[fake.Step, ...], words: str
) -> None:
    with fake.serving(fake.say("hi"), *steps, fake.say('{"n": 3}')) as server:
        chat = Chat(Client(server.url), tools=[add])
        chat.send("hello")
        before = chat.messages
        with pytest.raises(ServingError, match=words):
            chat.send("?", schema=Answer)
        assert chat.messages == before
        assert chat.send("?", schema=Answer).value == Answer(3)
        assert server.chats[-1]["messages"] == [*before, user("?")]


def test_leaving_a_turn_early_drops_it() -> None:
    with fake.serving(fake.drips(), fake.say("b")) as server:
        chat = Chat(Client(server.url))
        events = chat.stream("a")
        next(events)
        assert chat.busy
        with pytest.raises(ServingError, match="still under way"):
            chat.send("b")
        with pytest.raises(ServingError, match="still under way"):
            chat.undo()
        del events
        assert not chat.busy
        assert server.gone.wait(5)
        assert not chat.turns
        assert chat.send("b").text == "b"


class Interrupt:
    """Ctrl-C at the n-th line of the client's own code."""

    def __init__(self, line: int) -> None:
        self.left, self.where = line, ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        ours = frame.f_code.co_filename.startswith(CLIENT) and frame.f_code.co_name != "__del__"
        return self.line if ours else None

    def line(self, frame: FrameType, event: str, arg: object) -> Any:
        self.left -= event == "line"
        if self.left == 0:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            sys.settrace(None)
            raise KeyboardInterrupt
        return self.line


def interrupted(line: int) -> str:
    """Where a turn with a tool was interrupted; that the chat is as it was before is seen here."""
    at, before = Interrupt(line), sys.gettrace()
    steps = fake.call(("add", '{"a": 1, "b": 2}')), fake.say("3")
    with fake.serving(*steps) as server, Client(server.url, timeout=5) as client:
        chat = Chat(client, tools=[add])
        sys.settrace(at)
        try:
            chat.send("1+2?")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert not chat.busy, at.where
        # The last lines are those after the end of the turn.
        assert [turn.text for turn in chat.turns] in ([], ["3"]), at.where
        kept = len(chat.turns)
        if kept:
            assert chat.undo().user == "1+2?"
        with fake.serving(fake.say("again")) as other, Client(other.url) as second:
            chat.client = second
            assert chat.send("2?").text == "again", at.where
            assert other.chats[0]["messages"] == [user("2?")], at.where
    return at.where


@pytest.mark.parametrize("start", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (8, 15))])
def test_ctrl_c_at_any_line_leaves_the_chat_as_it_was(start: int) -> None:
    begin = threading.active_count()
    seen, line = set(), start
    while where := interrupted(line):
        seen.add(where.split(":")[0])
        line += 23
    assert line > 400
    assert {"chat.py", "client.py", "wire.py"} <= seen
    deadline = time.monotonic() + 5
    while threading.active_count() > begin and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= begin


def test_two_chats_at_once_and_one_chat_from_two_threads() -> None:
    answers: list[str] = []

    def several(client: Client) -> None:
        chat = Chat(client)
        answers.extend(chat.send("?").text for _ in range(5))

    with fake.serving(*[fake.say("a")] * 20) as server, Client(server.url) as client:
        threads = [threading.Thread(target=several, args=(client,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert answers == ["a"] * 20
    with fake.serving(fake.drips(), fake.say("b")) as server, Client(server.url) as client:
        chat = Chat(client)
        events = chat.stream("go on")
        next(events)
        reading = threading.Thread(target=lambda: [None for _ in events], daemon=True)
        reading.start()
        said = set()
        for _ in range(200):
            for ask in (events.__next__, lambda: chat.send("?"), chat.undo):
                with suppress(ServingError):
                    ask()
                    continue
                said.add(True)
        assert said
        assert chat.busy
        chat.stop()
        reading.join(5)
        assert not chat.busy
        assert [turn.stopped for turn in chat.turns] == [True]
        assert chat.send("more").text == "b"


def test_a_turn_that_was_stopped_and_is_not_read_any_more_gives_way() -> None:
    with fake.serving(fake.drips(), fake.say("b")) as server:
        chat = Chat(Client(server.url))
        events = chat.stream("go on")
        next(events)
        with pytest.raises(ServingError, match="wait for it, or stop"):
            chat.send("more")
        chat.stop()
        assert chat.send("more").text == "b"
        assert list(events) == []
        assert [turn.user for turn in chat.turns] == ["more"]


def test_a_stopped_turn_keeps_its_text() -> None:
    with fake.serving(fake.drips("ab"), fake.say("c")) as server:
        chat = Chat(Client(server.url))
        threading.Timer(0.3, chat.stop).start()
        turn = chat.send("go on")
        assert turn.stopped
        assert chat.turns == (turn,)
        chat.send("more")
        said = server.chats[1]["messages"]
        assert said == [user("go on"), assistant(turn.text), user("more")]
        assert turn.text.startswith("ab")


def test_a_turn_that_is_stopped_before_it_says_anything_is_not_kept() -> None:
    over = threading.Event()

    def wait() -> None:
        over.wait(10)

    for step in (fake.waits(3, fake.say("late")), fake.call(("wait", "{}"))):
        with fake.serving(step, fake.say("c")) as server:
            chat = Chat(Client(server.url), tools=[wait])
            start = time.monotonic()
            threading.Timer(0.3, chat.stop).start()
            turn = chat.send("go on")
            assert time.monotonic() - start < 2
            assert turn.stopped
            assert chat.turns == ()
            assert len(server.chats) == 1
            assert chat.send("more").text == "c"
    over.set()


def test_undo_takes_the_last_turn_back() -> None:
    with fake.serving(fake.say("1"), fake.say("2"), fake.say("3")) as server:
        chat = Chat(Client(server.url))
        with pytest.raises(ServingError, match="no turn to take back"):
            chat.undo()
        chat.send("a")
        chat.send("b")
        assert chat.undo().user == "b"
        chat.send("c")
        assert server.chats[-1]["messages"] == [user("a"), assistant("1"), user("c")]


def test_a_chat_is_saved_and_read_again(tmp_path: Path) -> None:
    steps = (
        fake.call(("add", '{"a": 1, "b": 2}'), ("add", "{")),
        fake.say("3", speculative_decoding=SPECULATION),
        fake.say('{"n": 4}', speculative_decoding=SPECULATION | {"per_step_accepted": [0, 2]}),
    )
    with fake.serving(*steps) as server:
        chat = Chat(Client(server.url), tools=[add], system="Be brief.")
        chat.send("1+2?")
        chat.send("4?", schema=Answer)
    path = tmp_path / "chat.json"
    chat.save(path, note="a scripted server")
    data = json.loads(path.read_text())
    assert data["tools"] == [chat.tools["add"].to_request()]
    read = read_conversation(path)
    assert read.turns[0] == chat.turns[0]
    assert read.turns[1].messages == chat.turns[1].messages
    assert read.turns[1].value == {"n": 4}  # as JSON gives it
    assert read.turns[1].reply.speculation == chat.turns[1].reply.speculation
    assert (read.model, read.system, read.note) == (fake.MODEL, "Be brief.", "a scripted server")
    assert read.source == f"recorded {data['date'][:10]} at the client, a scripted server"
    assert chat.conversation.source == "measured here, at the client"
    read.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == data
    with pytest.raises(FileError):
        chat.save(tmp_path / "nowhere" / "chat.json")


def test_what_no_file_can_hold_is_saved_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    with fake.serving(fake.say('{"n": "\\ud800"}')) as server:
        chat = Chat(Client(server.url))
        chat.send("n?", schema={"type": "object"})
        chat.save(path, note="half \ud800 a sign")
    read = read_conversation(path)
    assert read.turns[0].value == {"n": "\ufffd"}
    assert read.note == "half \ufffd a sign"
    with pytest.raises(ServingError, match="note is text"):
        chat.save(path, note=3)  # type: ignore[arg-type]
    with pytest.raises(ServingError, match="system is a text"):
        Chat(chat.client, system=3)  # type: ignore[arg-type]


def test_a_file_that_is_no_chat_is_refused(tmp_path: Path) -> None:
    with fake.serving(fake.say("1")) as server:
        chat = Chat(Client(server.url))
        chat.send("a")
    good = json.loads(json.dumps(chat.conversation.to_dict(), default=vars_of))
    path = tmp_path / "chat.json"

    def saying(text: bytes) -> str:
        path.write_bytes(text)
        with pytest.raises(ServingError) as caught:
            read_conversation(path)
        return str(caught.value)

    assert "no JSON" in saying(b"{")
    assert "no JSON" in saying(b"\xff")
    assert "no chat of the workbench" in saying(b"[]")
    assert "version 2" in saying(json.dumps(good | {"version": 2}).encode())
    assert "fault" in saying(json.dumps(good | {"turns": 3}).encode())
    assert "fault" in saying(json.dumps(good | {"turns": [{}]}).encode())
    for name in good["turns"][0]["replies"][0]:
        for wrong in ("missing", {"x": 1}):
            broken = json.loads(json.dumps(good))
            reply = broken["turns"][0]["replies"][0]
            if wrong == "missing":
                del reply[name]
            elif name != "value":
                reply[name] = wrong
            else:
                continue
            assert "fault" in saying(json.dumps(broken).encode()), (name, wrong)
    with pytest.raises(ServingError, match="is no file"):
        read_conversation(tmp_path)
    assert isinstance(good, dict)


def vars_of(value: Any) -> Any:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def test_an_empty_chat_is_a_value_too(tmp_path: Path) -> None:
    chat = Chat(Client("http://127.0.0.1:9"))
    chat.save(tmp_path / "c.json")
    assert read_conversation(tmp_path / "c.json").turns == ()
    assert isinstance(chat.conversation, Conversation)
    with pytest.raises(ServingError, match="max_rounds"):
        Chat(Client("http://127.0.0.1:9"), max_rounds=-1)
