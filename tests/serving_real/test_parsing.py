"""Reasoning, answers, tool calls and structured output over HTTP, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving_real.asking import chat, stream
from serving_real.server import RealServer

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
        },
    },
}
CALL = '<tool_call>add\n{"x": %d}</tool_call>'
CALL = '<tool_call>add\n{"x": %d}</tool_call>'
# What is dictated, whether the prompt opens with thinking, with tools or not, and by hand:
# (reasoning, content, tool calls) that must come out.
CASES: list[tuple[str, bool, bool, tuple[str, str, list[tuple[str, str]]]]] = [
    ("Easy.</think><answer>2</answer><|eos|>", True, False, ("Easy.", "2", [])),
    ("Easy.</think><answer>2</answer><|eos|>", True, True, ("Easy.", "2", [])),
    ("2</answer><|eos|>", False, False, ("", "2", [])),
    ("2</answer><|end|><|eos|>", False, True, ("", "2", [])),
    ("a < b, é漢🙂</answer><|eos|>", False, False, ("", "a < b, é漢🙂", [])),
    (
        'So: look.</think><tool_call>add\n{"x": 1}</tool_call><|eos|>',
        True,
        True,
        ("So: look.", "", [("add", '{"x": 1}')]),
    ),
    (
        "One.</answer>" + CALL % 1 + CALL % 2 + "<|eos|>",
        False,
        True,
        ("", "One.", [("add", '{"x": 1}'), ("add", '{"x": 2}')]),
    ),
    ("</think><answer>ok</answer><|eos|>", True, False, ("", "ok", [])),
]


def asked(
    beam: Any, script: str | None, thinking: bool, with_tool: bool, **more: Any
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "1 + 1?"}],
        "chat_template_kwargs": {"thinking": thinking},
        "max_tokens": 100,
    } | more
    if script is not None:
        ids = beam.tokenizer.encode(script, bos=False, special=True)
        body["vllm_xargs"] = {"script": ",".join(map(str, ids))}
        body.setdefault("max_tokens", len(ids))
    if with_tool:
        body["tools"] = [TOOL]
    return body


def whole(server: RealServer, body: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    message = chat(server.url, **body)["choices"][0]["message"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return message.get("reasoning") or "", message.get("content") or "", calls


def streamed(server: RealServer, body: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    reasoning, content, calls = "", "", dict[int, tuple[str, str]]()
    wanted = {"model": "beam-tiny", "temperature": 0} | body
    for chunk in stream(server.url, "/v1/chat/completions", wanted):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                calls[call["index"]] = (
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
    return reasoning, content, [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize(("script", "thinking", "tools", "expected"), CASES)
def test_a_reply_is_taken_apart(
    beam_server: RealServer,
    beam: Any,
    script: str,
    thinking: bool,
    tools: bool,
    expected: tuple[str, str, list[tuple[str, str]]],
) -> None:
    body = asked(beam, script, thinking, tools)
    assert whole(beam_server, body) == expected
    assert streamed(beam_server, body) == expected


@pytest.mark.parametrize("cut", [3, 5, 9, 12])
def test_a_reply_cut_off(beam_server: RealServer, beam: Any, cut: int) -> None:
    """Whole and streamed say the same, and no marker shows."""
    script = 'Hm.</think><answer>It is</answer><tool_call>add\n{"x": 1}</tool_call><|eos|>'
    body = asked(beam, script, True, True, max_tokens=cut)
    first = whole(beam_server, body)
    assert streamed(beam_server, body) == first
    assert first[0].startswith("Hm")
    assert "<" not in first[0] + first[1]


def test_what_the_model_writes_itself(beam_server: RealServer, beam: Any) -> None:
    """It goes on in the field that the prompt opened."""
    for thinking in (True, False):
        body = asked(beam, None, thinking, False, max_tokens=12)
        reasoning, content, calls = whole(beam_server, body)
        assert bool(reasoning) == thinking
        assert bool(content) != thinking
        assert not calls
        assert streamed(beam_server, body) == (reasoning, content, calls)


NAMED = {"type": "function", "function": {"name": "mark"}}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["function", "class"]}, "done": {"type": "boolean"}},
    "required": ["kind", "done"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream_it", [False, True])
def test_structured_output(beam_server: RealServer, beam: Any, stream_it: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    body = asked(beam, None, False, False, response_format=form)
    _, content, _ = (streamed if stream_it else whole)(beam_server, body)
    value = json.loads(content)
    assert set(value) == {"kind", "done"}
    assert value["kind"] in ("function", "class")
    assert isinstance(value["done"], bool)


@pytest.mark.parametrize("stream_it", [False, True])
@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_tool_that_must_be_called(
    beam_server: RealServer, beam: Any, choice: Any, stream_it: bool
) -> None:
    tool = {"type": "function", "function": {"name": "mark", "parameters": SCHEMA}}
    body = asked(beam, None, False, False, tools=[tool], tool_choice=choice)
    _, content, calls = (streamed if stream_it else whole)(beam_server, body)
    assert not content
    assert [name for name, _ in calls] == ["mark"]
    assert set(json.loads(calls[0][1])) == {"kind", "done"}
