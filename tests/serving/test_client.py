"""The client against a scripted server: what it sends, what it reads, what it says goes wrong."""

from __future__ import annotations

import gzip
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from serving import openai_server as fake
from serving.certificates import make_certificate
from workbench.errors import ServingError
from workbench.serving.api_key import ApiKey, find_key
from workbench.serving.client import bounds
from workbench.serving.client import reply as reply_module
from workbench.serving.client.client import Client, ServedModel
from workbench.serving.client.reply import Piece, Reply, Usage

SECRET = "sk-Tell4Nobody"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def failing(server: fake.Scripted, **options: Any) -> str:
    """What the error says; also that it is one line, and says no more than a reader can take."""
    with Client(server.url, **options) as client, pytest.raises(ServingError) as caught:
        list(client.chat("hello"))
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 600
    return said


# -- what is sent ---------------------------------------------------------------------------------


def test_a_request_has_what_was_asked_and_nothing_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-1")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"X-Other: {SECRET}\nAuthorization: {SECRET}")
    with fake.serving(fake.say("a")) as server, Client(server.url) as client:
        client.chat(
            "hello", temperature=0.5, top_p=0.9, seed=7, max_tokens=3, reasoning="low",
            extra={"top_k": 4},
        ).finish()  # fmt: skip
        asked = server.asked[-1]
    assert asked.body == {
        "model": fake.MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.5, "top_p": 0.9, "seed": 7, "max_tokens": 3,
        "reasoning_effort": "low", "top_k": 4,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert set(asked.headers) == {
        "host", "accept", "accept-encoding", "connection", "user-agent", "content-type",
        "content-length",
    }  # fmt: skip
    assert SECRET not in str(server.asked)


def test_reasoning_as_a_truth_value_goes_to_the_chat_template() -> None:
    with fake.serving(fake.say("a"), fake.say("a")) as server, Client(server.url) as client:
        client.chat("hello").finish()
        extra = {"chat_template_kwargs": {"x": 1}}
        client.chat("hello", reasoning=False, extra=extra).finish()
    assert server.chats[0].keys() == {"model", "messages", "stream", "stream_options"}
    assert server.chats[1]["chat_template_kwargs"] == {
        "x": 1, "thinking": False, "enable_thinking": False,
    }  # fmt: skip
    assert extra == {"chat_template_kwargs": {"x": 1}}


def test_the_model_is_asked_for_once_and_is_the_only_one() -> None:
    with fake.serving(fake.say("a"), fake.say("b")) as server:
        with Client(server.url) as client:
            assert client.models() == (ServedModel(id=fake.MODEL, max_model_len=4096),)
            client.chat("one").finish()
            client.chat("two").finish()
            assert [a.path for a in server.asked] == [
                "/v1/models", "/v1/models", "/v1/chat/completions", "/v1/chat/completions",
            ]  # fmt: skip
        server.models = {"data": [{"id": "a"}, {"id": "b"}]}
        with pytest.raises(ServingError, match=r"serves a, b; say which one: model="):
            _ = Client(server.url).model
        assert Client(server.url, model="b").model == "b"
        server.models = {"data": []}
        with pytest.raises(ServingError, match="serves no model"):
            _ = Client(server.url).model


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1}, "temperature is a number from 0 to 2"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p is a number above 0"),
        ({"seed": 1.5}, "seed is a whole number"),
        ({"max_tokens": 0}, "max_tokens is a whole number from 1"),
        ({"reasoning": "much"}, "reasoning is none, low, medium, high, True or False"),
        ({"extra": {"model": "x"}}, "model cannot be given in extra"),
        ({"extra": {"x": object()}}, "cannot be written as JSON"),
        ({"extra": {"x": float("inf")}}, "cannot be written as JSON"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_sent(
    settings: dict[str, Any], words: str
) -> None:
    with fake.serving() as server, Client(server.url) as client:
        with pytest.raises(ServingError, match=words):
            client.chat("hello", **settings)
        assert not server.asked


@pytest.mark.parametrize("messages", [[], {}, 5, ["hello"], [{"content": "x"}], "\ud800"])
def test_messages_that_are_none_are_refused(messages: Any) -> None:
    with fake.serving() as server, Client(server.url) as client:
        with pytest.raises(ServingError, match="messages"):
            client.chat(messages)
        assert not server.asked


# -- what is read ---------------------------------------------------------------------------------


def test_a_stream_gives_pieces_and_then_the_reply() -> None:
    step = fake.stream(
        fake.delta(role="assistant", content=""),
        fake.delta(reasoning="Let me "),
        fake.delta(reasoning="see."),
        fake.delta(content="Four"),
        fake.delta(content="."),
        fake.delta("stop", content=""),
        fake.counts(11, 4),
        pause=0.02,
    )
    with fake.serving(step) as server, Client(server.url) as client:
        answer = client.chat("2 + 2?")
        with pytest.raises(ServingError, match="has not ended"):
            _ = answer.reply
        assert list(answer) == [
            Piece(kind="reasoning", text="Let me "),
            Piece(kind="reasoning", text="see."),
            Piece(kind="text", text="Four"),
            Piece(kind="text", text="."),
        ]
        reply = answer.reply
        with pytest.raises(ServingError, match="read once"):
            list(answer)
    assert (reply.text, reply.reasoning, reply.finish) == ("Four.", "Let me see.", "stop")
    assert reply.usage == Usage(prompt=11, completion=4)
    assert reply.model == fake.MODEL
    assert reply.speculation is None
    # Seven pauses of 20 ms: one before the first piece, three between the first and the last.
    assert reply.timing.first is not None
    assert 0.02 <= reply.timing.first < reply.timing.total
    assert reply.timing.per_token is not None
    assert 0.02 <= reply.timing.per_token < reply.timing.total / 3
    assert reply.timing.total >= 0.14


@pytest.mark.parametrize(
    "fields",
    [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": "hm",
      "reasoning_content": "hm"}],
)  # fmt: skip
def test_reasoning_has_two_names_and_is_read_once(fields: dict[str, str]) -> None:
    step = fake.stream(fake.delta(**fields), fake.delta("stop", content="yes"))
    with fake.serving(step) as server, Client(server.url) as client:
        reply = client.chat("?").finish()
    assert (reply.reasoning, reply.text, reply.usage) == ("hm", "yes", None)
    assert reply.timing.per_token is None  # nobody counted tokens


def test_a_whole_answer_is_read_like_a_stream() -> None:
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "Four.", "reasoning": "Hm.", "tool_calls": calls}
    answer = {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12,
                  "completion_tokens_details": {"reasoning_tokens": 4},
                  "prompt_tokens_details": {"cached_tokens": 2}},
        "metrics": {"time_to_first_token_ms": 3.0, "speculative_decoding": SPECULATION},
    }  # fmt: skip
    with fake.serving(fake.document(answer)) as server, Client(server.url) as client:
        reply = client.chat("2 + 2?", stream=False)
    assert isinstance(reply, Reply)
    assert (reply.text, reply.reasoning, reply.model) == ("Four.", "Hm.", "m")
    assert reply.tool_calls[0].name == "f"
    assert reply.usage == Usage(prompt=3, completion=9, reasoning=4, cached=2)
    assert reply.speculation is not None
    assert reply.timing.first is None
    assert "stream" not in server.chats[0]


SPECULATION = {
    "mean_acceptance_length": 1.2325581395348837,
    "draft_acceptance_rate": 0.07751937984496124,
    "acceptance_histogram": [39, 1, 0, 3],
    "num_spec_steps": 43,
    "num_accepted_draft_tokens": 10,
    "num_draft_tokens": 129,
    "num_spec_tokens": 3,
}


def test_speculation_of_a_request_is_read_from_the_last_chunk() -> None:
    # Seven slots, six steps; the totals are counted from the steps, the lengths from the totals.
    accepted, drafted = [7, 0, 2, 7, 1, 0], [7, 7, 7, 7, 7, 3]
    histogram = [accepted.count(n) for n in range(8)]
    metrics = {
        "mean_acceptance_length": 1 + sum(accepted) / 6,
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": histogram,
        "num_spec_steps": 6,
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": 7,
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }
    steps = (fake.say("a", speculative_decoding=metrics),
             fake.say("a", speculative_decoding=SPECULATION))  # fmt: skip
    with fake.serving(*steps) as server, Client(server.url) as client:
        found = client.chat("hello").finish().speculation
        brief = client.chat("hello").finish().speculation
    assert found is not None
    assert found.acceptance_length == pytest.approx(23 / 6)
    assert found.rate_drafted == pytest.approx(17 / 38)
    assert found.histogram == (2, 1, 1, 0, 0, 0, 0, 2)
    assert found.step_accepted == tuple(accepted)
    assert found.step_drafted == tuple(drafted)
    assert brief is not None
    assert brief.acceptance_length == pytest.approx(SPECULATION["mean_acceptance_length"])
    assert brief.rate_drafted == pytest.approx(SPECULATION["draft_acceptance_rate"])
    assert brief.step_accepted is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_spec_steps": -1},
        {"num_spec_steps": "43"},
        {"num_spec_steps": 42},  # the histogram has 43
        {"num_accepted_draft_tokens": 11},
        {"acceptance_histogram": {"0": 39}},
        {"per_step_accepted": [1, None]},
    ],
)
def test_counts_that_are_not_understood_are_none_and_said(wrong: dict[str, Any]) -> None:
    step = fake.say("fine", speculative_decoding=SPECULATION | wrong)
    with fake.serving(step) as server, Client(server.url) as client:
        reply = client.chat("hello").finish()
    assert reply.text == "fine"
    assert reply.speculation is None
    assert len(reply.notes) == 1
    assert "not understood" in reply.notes[0]


def test_tool_calls_come_in_parts_and_interleaved() -> None:
    def part(index: int, text: str, **more: Any) -> dict[str, Any]:
        function = {"arguments": text} | ({"name": more.pop("name")} if "name" in more else {})
        return fake.delta(tool_calls=[{"index": index, "function": function, **more}])

    step = fake.stream(
        part(0, "", name="add", id="i0"), part(1, '{"b"', name="sub", id="i1"),
        part(0, '{"a": 1}'), part(1, ": 2}", name="sub", id="i1"),
        fake.delta("tool_calls"),
    )  # fmt: skip
    with fake.serving(step) as server, Client(server.url) as client:
        answer = client.chat("hello")
        pieces = list(answer)
    assert [(p.index, p.name, p.text) for p in pieces] == [
        (0, "add", ""), (1, "sub", '{"b"'), (0, "", '{"a": 1}'), (1, "", ": 2}"),
    ]  # fmt: skip
    assert {p.kind for p in pieces} == {"tool"}
    assert [(c.id, c.name, c.arguments) for c in answer.reply.tool_calls] == [
        ("i0", "add", '{"a": 1}'), ("i1", "sub", '{"b": 2}'),
    ]  # fmt: skip


def asked_for(index: Any, identity: Any, name: Any, arguments: Any) -> Any:
    function = {"name": name, "arguments": arguments}
    given = {"index": index, "id": identity, "function": function}
    return fake.delta(tool_calls=[{k: v for k, v in given.items() if v != "left out"}])


@pytest.mark.parametrize(
    ("chunks", "calls"),
    [
        ([asked_for(None, None, "f", None)], [("call_0", "f", "")]),  # null is: not there
        ([asked_for(0, None, None, None)], [("call_0", "", "")]),
        # Servers that number every call 0, or none of them, tell them apart by id and name.
        ([asked_for(0, "a", "f", "{}"), asked_for(0, "b", "g", "{1}")],
         [("a", "f", "{}"), ("b", "g", "{1}")]),
        ([asked_for("left out", "a", "f", "{}"), asked_for("left out", "b", "g", "{"),
          asked_for("left out", None, None, "1}")], [("a", "f", "{}"), ("b", "g", "{1}")]),
        ([asked_for(0, "a", "f", "{}"), asked_for(0, "b", "g", "{"), asked_for(1, "c", "h", "[]"),
          asked_for(0, None, None, "1}")],
         [("a", "f", "{}"), ("b", "g", "{1}"), ("c", "h", "[]")]),
        # A new id alone is the same call: older servers made one for every part.
        ([asked_for(0, "a", "f", "{"), asked_for(0, "b", None, "}")], [("a", "f", "{}")]),
        ([asked_for(1, "b", "g", "{"), asked_for(0, "a", "f", "{}"), asked_for(1, "", "", "1}")],
         [("a", "f", "{}"), ("b", "g", "{1}")]),
    ],
)  # fmt: skip
def test_tool_calls_as_servers_number_them(chunks: list[Any], calls: list[Any]) -> None:
    step = fake.stream(*chunks, fake.delta("tool_calls"))
    with fake.serving(step) as server, Client(server.url) as client:
        answer = client.chat("hello")
        pieces = list(answer)
    assert [(c.id, c.name, c.arguments) for c in answer.reply.tool_calls] == calls
    for place, call in enumerate(answer.reply.tool_calls):  # pieces say which call they are of
        assert "".join(p.text for p in pieces if p.index == place) == call.arguments


def test_a_call_after_the_last_that_is_read() -> None:
    many = [asked_for(0, f"i{n}", "f", "{}") for n in range(200)]
    with fake.serving(fake.stream(*many, fake.delta("tool_calls"))) as server:
        assert "more than 128 tool calls" in failing(server)


def test_tokens_without_text_are_said() -> None:
    """A server leaves special tokens out of the text, and counts them."""
    silent = (fake.delta(role="assistant", content=""), fake.delta("length"))
    steps = [fake.stream(*silent, fake.counts(5, 8)), fake.stream(*silent, fake.counts(5, 1)),
             fake.say("a", "b")]  # fmt: skip
    with fake.serving(*steps) as server, Client(server.url) as client:
        replies = [client.chat("hello").finish() for _ in steps]
    assert replies[0].text == ""
    assert replies[0].notes[0].startswith("the server counted 8 tokens and gave no text")
    assert [reply.notes for reply in replies[1:]] == [(), ()]


def test_halves_of_signs_are_replaced() -> None:
    with fake.serving(fake.say("a\ud800b")) as server, Client(server.url) as client:
        assert client.chat("hello").finish().text == "a\ufffdb"


# -- what goes wrong ------------------------------------------------------------------------------


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ServingError, match=r"nothing answers at http.*is the server up") as caught:
        Client(url).models()
    assert "workbench serve" in str(caught.value)


@pytest.mark.parametrize("address", ["ftp://127.0.0.1", "http://user:pass@127.0.0.1", "", 5])
def test_a_wrong_address(address: Any) -> None:
    with pytest.raises(ServingError):
        Client(address)


def test_another_machine_is_meant_only_if_it_is_said_so() -> None:
    with pytest.raises(ServingError, match=r"not this machine; say foreign=True"):
        Client("http://192.0.2.1:8000")
    assert "192.0.2.1" in repr(Client("http://192.0.2.1:8000", foreign=True))


def test_401_with_and_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = fake.document({"error": "Unauthorized"}, code=401)
    with fake.serving(refusal, refusal, models=refusal) as server:
        assert "wants an API key (401); set the environment variable VLLM_API_KEY" in failing(
            server
        )
        monkeypatch.setenv("VLLM_API_KEY", SECRET)
        said = failing(server, model="m")
        assert "does not take the key from VLLM_API_KEY (401)" in said
        assert server.asked[-1].headers["authorization"] == f"Bearer {SECRET}"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"error": {"message": "max_tokens is too large"}}, 400, "refuses the request (400): max"),
        ({"object": "error", "message": "The model `x` does not exist."}, 404, "(404): The model"),
        ({"detail": [{"loc": ["body"], "msg": "Field required"}]}, 422, "Field required"),
        ({"detail": "Not Found"}, 404, "(404): Not Found"),
        (b"<html>nginx</html>", 404, "is it an OpenAI-compatible server"),
        ({"error": {"message": "busy"}}, 429, "too much to do (429): busy"),
        ({"error": {"message": "EngineDeadError"}}, 500, "failed (500): EngineDeadError"),
        (b"", 503, "failed (503)"),
        ({"error": {"message": "a\n\x1b[31mb" + 1000 * "c"}}, 400, "a ␛[31mbccc"),
    ],
)
def test_what_a_server_says_is_passed_on_printable_and_short(
    body: Any, code: int, words: str
) -> None:
    with fake.serving(fake.document(body, code=code)) as server:
        assert words in failing(server)
        assert len(server.chats) == 1  # nothing is asked twice


def test_a_redirect_is_not_followed_and_the_key_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    with fake.serving(fake.say("stolen")) as other:
        for target in (f"{other.url}/v1/chat/completions", "https://evil.example/", "gopher://x",
                       "http://[", ""):  # fmt: skip
            with fake.serving(fake.redirect(target)) as server:
                said = failing(server)
                assert "redirects to" in said
                assert "not followed" in said
        with fake.serving(models=fake.redirect(f"{other.url}/v1/models", 302)) as server:
            assert "redirects to" in failing(server)
        assert not other.asked


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_a_server_here_is_reached_past_every_proxy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake.serving() as proxy, fake.serving(fake.say("direct")) as server:
        monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with Client(server.url) as client:
            assert client.chat("hello").finish().text == "direct"
        assert not proxy.asked


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (fake.document(b"<html></html>", kind="text/html"), "text/html where a stream"),
        (fake.document({"choices": []}), "application/json where a stream"),
        (fake.bytes_of(b"data: {\"choices\": [\n\n"), "no JSON in the middle of the answer"),
        (fake.bytes_of(b"data: \xff\xfe\n\n"), "no JSON in the middle of the answer"),
        (fake.bytes_of(b"data: [1, 2]\n\n"), "malformed: a part of it is no JSON object"),
        (fake.bytes_of(b"data: 7\n\n"), "malformed"),
        (fake.bytes_of(b'data: {"a": ' + b"9" * 10_000 + b"}\n\n"), "no JSON in the middle"),
        (fake.bytes_of(b"data: " + b"[" * 100_000 + b"\n\n"), "no JSON in the middle"),
        (fake.bytes_of(b"hello\n\n"), "ended the stream with nothing in it"),
        (fake.bytes_of(b""), "ended"),
        (fake.stream({"choices": 3}), "choices are no list"),
        (fake.stream({"choices": [3]}), "choices are no list"),
        (fake.stream(fake.delta(content=3)), "content is no text"),
        (fake.stream(fake.delta(content=["a"])), "content is no text"),
        (fake.stream(fake.delta(tool_calls=[3])), "tool calls are no list"),
        (fake.stream(fake.delta(tool_calls=[{"index": 10**9}])), "index is no number of a call"),
        (fake.stream(fake.delta(tool_calls=[{"index": 0, "function": 1}])), "has no function"),
        (fake.stream(fake.delta(content="a")), "ended the stream with no finish in it"),
        (fake.stream(fake.delta(content="a"), done=False), "ended the stream with no finish"),
        (fake.stream(fake.delta(content="a"), {"error": {"message": "engine died"}}),
         "reports an error instead of the answer: engine died"),
        (fake.stream({"error": "engine died"}),
         "reports an error instead of the answer: engine died"),
        (fake.document(b"x", code=500, kind="text/plain; charset=hex"), "failed (500)"),
        (fake.dies_after(fake.delta(content="a")), "ended the connection in the middle of the"),
        (fake.dies_after(), "ended the connection in the middle of the answer"),
    ],
)  # fmt: skip
def test_a_malformed_stream(step: fake.Step, words: str) -> None:
    with fake.serving(step, fake.say("well")) as server:
        assert words in failing(server)
        with Client(server.url) as client:  # and the session goes on
            assert client.chat("again").finish().text == "well"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (fake.document(b"<html></html>", kind="text/html"), "no OpenAI-compatible server"),
        (fake.document(b"{", kind="application/json"), "no JSON in the middle"),
        (fake.document(b"x", kind="text/plain; charset=rot13"), "no OpenAI-compatible server"),
        (fake.document([1]), "no OpenAI-compatible server"),
        (fake.document({"choices": []}), "ended the stream with no finish"),
    ],
)
def test_a_whole_answer_that_is_none(step: fake.Step, words: str) -> None:
    with (
        fake.serving(step) as server,
        Client(server.url) as client,
        pytest.raises(ServingError, match=words),
    ):
        client.chat("hello", stream=False)


@pytest.mark.parametrize(
    "models", [[1], {"data": 3}, {"data": [3]}, {"data": [{}]},
               fake.document(b"hi", kind="text/plain")]
)  # fmt: skip
def test_a_list_of_models_that_is_none(models: Any) -> None:
    with (
        fake.serving(models=models) as server,
        Client(server.url) as client,
        pytest.raises(ServingError, match="OpenAI-compatible"),
    ):
        client.models()


def test_something_that_is_no_http_server() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def greet() -> None:
            accepted, _ = listening.accept()
            accepted.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
            accepted.recv(10_000)  # closing with words unread would be a reset
            accepted.close()

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(ServingError, match="does not speak HTTP"):
            Client(f"127.0.0.1:{listening.getsockname()[1]}").models()


def test_a_slow_server_is_given_up_after_silence_and_not_before() -> None:
    slow = fake.stream(*[fake.delta(content="a")] * 6, fake.delta("stop"), pause=0.15)
    with fake.serving(slow) as server, Client(server.url, timeout=0.8) as client:
        assert client.chat("hello").finish().text == "aaaaaa"  # 1.05 s in all, 0.15 s of silence
    with fake.serving(fake.waits(2, fake.say("late"))) as server:
        start = time.monotonic()
        assert "sent nothing for 0.3 s" in failing(server, timeout=0.3)
        assert time.monotonic() - start < 1.9
    with fake.serving() as server, pytest.raises(ServingError, match="timeout is a number"):
        Client(server.url, timeout=0)


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, fake.__file__], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        client = Client(process.stdout.readline().strip(), timeout=20)
        answer = client.chat("hello")
        pieces = iter(answer)
        for _ in range(3):
            next(pieces)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(ServingError, match="ended the connection in the middle of the answer"):
            list(pieces)
        process.wait(10)
        with pytest.raises(ServingError, match="nothing answers"):
            client.chat("again").finish()
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait(10)


# -- stopping -------------------------------------------------------------------------------------


def stopped_after(server: fake.Scripted, seconds: float) -> tuple[Reply, float]:
    """The reply of a stream that is stopped from another thread, and how long that took."""
    with Client(server.url, timeout=30) as client:
        answer = client.chat("hello")
        at: list[float] = []

        def stop() -> None:
            time.sleep(seconds)
            at.append(time.monotonic())
            answer.stop()

        thread = threading.Thread(target=stop)
        thread.start()
        reply = answer.finish()
        took = time.monotonic() - at[0]
        thread.join()
        answer.stop()  # once more is no harm
        return reply, took


def test_stop_ends_a_stream_at_once_with_what_there_is() -> None:
    with fake.serving(fake.drips("ab")) as server:
        reply, took = stopped_after(server, 0.3)
        assert reply.finish == "stopped"
        assert set(reply.text.split("ab")) == {""}
        assert reply.text
        assert took < 1
        assert server.gone.wait(5)  # the server learns of it


def test_stop_ends_a_wait_for_the_first_word_and_for_the_list_of_models() -> None:
    silent = fake.waits(3, fake.say("late"))
    with fake.serving(silent) as server:
        reply, took = stopped_after(server, 0.2)
        assert (reply.text, reply.finish) == ("", "stopped")
        assert took < 1
    with fake.serving(models=silent) as server:
        reply, took = stopped_after(server, 0.2)
        assert took < 1
        assert not server.chats


def test_stop_before_the_beginning_sends_nothing() -> None:
    with fake.serving(fake.say("a")) as server, Client(server.url) as client:
        answer = client.chat("hello")
        answer.stop()
        assert list(answer) == []
        assert answer.reply.finish == "stopped"
        assert not server.asked


def test_leaving_the_loop_closes_the_connection() -> None:
    with fake.serving(fake.drips(), fake.say("next")) as server, Client(server.url) as client:
        answer = client.chat("hello")
        for piece in answer:
            assert piece.text == "x"
            break
        del answer, piece
        assert server.gone.wait(5)
        assert client.chat("hello").finish().text == "next"


def test_two_streams_at_once_are_stopped_apart() -> None:
    with fake.serving(fake.drips("a"), fake.drips("b")) as server, Client(server.url) as client:
        first, second = client.chat("1"), client.chat("2")
        one, two = iter(first), iter(second)
        next(one)
        client.models()  # is no part of the stream that is being read
        next(two)
        first.stop()
        assert {p.text for p in one} <= {"a"}
        assert first.reply.finish == "stopped"
        assert next(two).text == "b"
        second.stop()
        list(two)


# -- what has no end ------------------------------------------------------------------------------


def endless(data: bytes, kind: str = "text/event-stream", code: int = 200) -> fake.Step:
    def write(to: fake.Answering) -> None:
        to.send_response(code)
        to.send_header("content-type", kind)
        to.send_header("transfer-encoding", "chunked")
        to.end_headers()
        while True:
            to.part(data)

    return write


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (endless(b"x" * 50_000), "an event of more than"),
        (endless(b"data: " + b"x" * 50_000 + b"\n"), "an event of more than"),
        (endless(b": hello\n" * 5000), "an event of more than"),
        (endless(b"x" * 50_000, code=500), "an answer of more than"),
        (endless(f"data: {json.dumps(fake.delta(content='x' * 9000))}\n\n".encode()),
         "an answer of more than 300,000 letters"),
        (endless(f"data: {json.dumps(asked_for(0, None, None, 'x' * 9000))}\r\n\r\n".encode()),
         "an answer of more than 300,000 letters"),
    ],
)  # fmt: skip
def test_what_has_no_end_is_not_read_without_end(
    step: fake.Step, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "EVENT", 400_000)
    monkeypatch.setattr(bounds, "DOCUMENT", 400_000)
    monkeypatch.setattr(reply_module, "LETTERS", 300_000)
    with fake.serving(step) as server:
        assert words in failing(server)
        assert server.gone.wait(5)  # the connection is closed
    whole = endless(b" " * 50_000, "application/json")
    with fake.serving(whole, models=whole) as server, Client(server.url, model="tiny") as client:
        with pytest.raises(ServingError, match="an answer of more than 400,000 bytes"):
            client.chat("hello", stream=False)
        with pytest.raises(ServingError, match="an answer of more than 400,000 bytes"):
            client.models()


def test_a_long_stream_of_short_events_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "EVENT", 1000)
    monkeypatch.setattr(bounds, "DOCUMENT", 1000)
    for blank in ("\n\n", "\r\n\r\n", "\r\r"):
        chunks = [*[fake.delta(content="a")] * 300, fake.delta("stop")]
        data = "".join(f"data: {json.dumps(chunk)}{blank}" for chunk in chunks).encode()

        def write(to: fake.Answering, data: bytes = data) -> None:
            to.begin()
            for at in range(0, len(data), 97):  # events end anywhere within a piece
                to.part(data[at : at + 97])
            to.end()

        with fake.serving(write) as server, Client(server.url) as client:
            assert client.chat("hello").finish().text == "a" * 300


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("code", [200, 500])
def test_a_compressed_answer_is_not_unpacked(kind: str, code: int) -> None:
    bomb = gzip.compress(b" " * 10_000_000)

    def write(to: fake.Answering) -> None:
        to.send_response(code)
        to.send_header("content-type", kind)
        to.send_header("content-encoding", "gzip")
        to.send_header("content-length", str(len(bomb)))
        to.end_headers()
        to.wfile.write(bomb)

    with fake.serving(write) as server:
        assert "compressed form" in failing(server)


# -- the client closed, and the environment -------------------------------------------------------


def test_a_closed_client_ends_what_is_under_way_and_says_so() -> None:
    steps = [fake.drips(), fake.waits(5, fake.say("late"))]
    for step in steps:
        with fake.serving(step) as server:
            client = Client(server.url)
            answer = client.chat("hello")
            threading.Timer(0.3, client.close).start()
            start = time.monotonic()
            assert answer.finish().finish == "stopped"
            assert time.monotonic() - start < 3
            for ask in (client.models, client.chat("again").finish):
                with pytest.raises(ServingError, match="was closed; make another"):
                    ask()
            client.close()
            assert len(server.chats) == 1


@pytest.mark.parametrize(
    ("name", "value", "scheme"),
    [
        ("HTTP_PROXY", "gopher://me:secret@x:1", "http"),
        ("SSL_CERT_FILE", "/nowhere/at/all", "https"),
        ("SSLKEYLOGFILE", "/nowhere/at/all", "https"),
    ],
)
def test_an_environment_that_cannot_be_used(
    name: str, value: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ServingError, match="proxies or certificates") as caught:
        Client(f"{scheme}://192.0.2.1:8000", foreign=True)
    assert "secret" not in str(caught.value)
    Client("http://127.0.0.1:8000")  # hears nothing of it


def test_a_proxy_that_is_dead_is_named_as_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with pytest.raises(ServingError, match="or the proxy that the environment names"):
        Client("http://192.0.2.1:8000", foreign=True).models()


def test_a_certificate_that_is_not_trusted_and_one_that_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate = make_certificate(tmp_path)
    with certificate.serving(b"", b'{"data": [{"id": "m"}]}') as url:
        with pytest.raises(ServingError, match=r"not trusted .*nothing was sent there"):
            Client(url).models()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
        assert Client(url).models() == (ServedModel(id="m"),)
    with fake.serving() as server, pytest.raises(ServingError, match="does not speak https"):
        Client(server.url.replace("http", "https")).models()


# -- keys -----------------------------------------------------------------------------------------


def everything(error: BaseException) -> str:
    """What a reader of a traceback may see at most: every frame but the test's, with its locals."""
    assert error.__traceback__ is not None
    kept = traceback.TracebackException(
        type(error), error, error.__traceback__.tb_next, capture_locals=True
    )
    return "".join(kept.format())


def test_a_key_is_sent_and_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", SECRET)
    echo = {"error": {"message": f"bad key {SECRET}, not Bearer {SECRET}"}}
    steps = (fake.document(echo, code=401), fake.document(echo, code=400),
             fake.stream(echo), fake.redirect(f"http://127.0.0.1:9/{SECRET}"))  # fmt: skip
    with fake.serving(*steps) as server, Client(server.url, key="MY_KEY") as client:
        for number in range(len(steps)):
            caplog.clear()
            with pytest.raises(ServingError) as caught:
                client.chat("hello").finish()
            shown = everything(caught.value)
            assert "does not take" in shown or "…" in shown
            assert SECRET not in shown
            # The transport's own debug lines have the headers of answers: an echo in the last one.
            assert number == 3 or SECRET not in caplog.text
        assert SECRET not in repr(client) + str(vars(client)) + str(vars(client._wire))
        assert server.asked[-1].headers["authorization"] == f"Bearer {SECRET}"


def test_a_key_that_a_server_repeats_is_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    half = len(SECRET) // 2
    counts = fake.counts(5, 2) | {"usage": {"prompt_tokens": SECRET}}
    step = fake.stream(
        fake.delta(reasoning=f"I got {SECRET}."), fake.delta(content=SECRET[:half]),
        fake.delta(content=f"{SECRET[half:]}!"), asked_for(0, SECRET, SECRET, f'"{SECRET}"'),
        fake.delta(SECRET) | {"model": SECRET}, counts,
    )  # fmt: skip
    whole = {"choices": [{"message": {"content": SECRET}, "finish_reason": "stop"}]}
    names = {"data": [{"id": SECRET}, {"id": "b"}]}
    with fake.serving(step, fake.document(whole), models=names) as server:
        with Client(server.url, model="tiny") as client:
            answer = client.chat("hello")
            pieces = list(answer)
            reply = answer.reply
            assert (reply.text, reply.reasoning) == ("…!", "I got ….")
            assert SECRET not in f"{reply!r} {pieces!r}"
            assert SECRET not in repr(client.chat("hello", stream=False))
        with Client(server.url) as client, pytest.raises(ServingError) as caught:
            client.chat("hello").finish()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("value", [f"{SECRET} {SECRET}", f"{SECRET}\u00e9", f"{SECRET}\r\nX: y"])
def test_a_key_that_is_none_stands_in_no_frame_of_the_traceback(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", value)
    monkeypatch.setattr("workbench.serving.api_key.getpass", lambda _: value)
    for given in ("MY_KEY", "ask"):
        with pytest.raises(ServingError, match="blanks or signs") as caught:
            Client("http://127.0.0.1:8000", key=given)
        assert SECRET not in everything(caught.value)


def test_where_a_key_may_be_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_key("VLLM_API_KEY") is None
    assert find_key(None) is None
    with pytest.raises(ServingError, match="is not set"):
        find_key("OTHER_KEY")
    for given in (SECRET, "", 5):
        with pytest.raises(ServingError, match="a key itself does not belong") as caught:
            find_key(given)  # type: ignore[arg-type]
        assert SECRET not in str(caught.value)
    monkeypatch.setenv("OTHER_KEY", f" {SECRET}\n")
    found = find_key("OTHER_KEY")
    assert found is not None
    assert found.header == f"Bearer {SECRET}"
    assert SECRET not in f"{found!r} {found} {[found]}"
    monkeypatch.setattr("workbench.serving.api_key.getpass", lambda _: SECRET)
    asked = find_key("ask")
    assert asked is not None
    assert asked.source == "ask"
    monkeypatch.setenv("OTHER_KEY", "two words")
    with pytest.raises(ServingError, match="blanks") as caught:
        find_key("OTHER_KEY")
    assert "two words" not in str(caught.value)


def test_nobody_to_ask_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("workbench.serving.api_key.getpass", nobody)
    with pytest.raises(ServingError, match="nobody to ask"):
        find_key("ask")


def test_a_key_does_not_go_over_an_open_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    with pytest.raises(ServingError, match=r"not sent to 192\.0\.2\.1 over plain http"):
        Client("http://192.0.2.1:8000", foreign=True)
    Client("http://192.0.2.1:8000", foreign=True, key=None)
    Client("https://192.0.2.1:8000", foreign=True)


def test_a_key_is_not_pickled() -> None:
    with pytest.raises(TypeError, match="not written"):
        ApiKey(SECRET, "ask").__reduce__()
