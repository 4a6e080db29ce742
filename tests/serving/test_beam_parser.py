"""The reader behind the ``beam`` parsers: replies taken apart, however they are cut into pieces."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import workbench
from workbench.errors import ServingError
from workbench.serving.vllm_plugin.reply_reader import (
    Call,
    Piece,
    Reply,
    ReplyReader,
    count_between,
    read_reply,
    state_after,
    thinking_is_over,
)
from workbench.serving.vllm_plugin.response_template import MOST_OPENER, ResponseTemplate

FOLDER = Path(workbench.__file__).parent / "model" / "zoo" / "beam-tiny"
SHIPPED: dict[str, Any] = json.loads((FOLDER / "tokenizer_config.json").read_text("utf-8"))
TEMPLATE = ResponseTemplate.of(SHIPPED["response_template"])
SILENT = ("<|end|>", "<|eos|>", "<|user|>")


def reply(thinking: str | None, content: str | None, *calls: Call) -> Reply:
    return Reply(thinking=thinking, content=content, calls=calls)


CALL_F = Call(name="f", arguments="{}", complete=True)
# Written by hand: (what the model wrote, the field its prompt left open, what must come out).
SAMPLES: list[tuple[str, Any, Reply]] = [
    ("", None, reply(None, None)),
    ("2", "content", reply(None, "2")),
    ("def f(x):\n    return x", None, reply(None, "def f(x):\n    return x")),
    ("Easy.</think><answer>2</answer>", "thinking", reply("Easy.", "2")),
    ("<think>Easy.</think><answer>2</answer>", None, reply("Easy.", "2")),
    (
        'Look it up.</think><tool_call>add\n{"x": 1}</tool_call>',
        "thinking",
        reply("Look it up.", None, Call(name="add", arguments='{"x": 1}', complete=True)),
    ),
    (
        "<tool_call>a.b-c_1\n{}</tool_call><tool_call>d\n[1]</tool_call><|end|>",
        None,
        reply(
            None,
            None,
            Call(name="a.b-c_1", arguments="{}", complete=True),
            Call(name="d", arguments="[1]", complete=True),
        ),
    ),
    (  # an answer, then a call
        "One moment.</answer><tool_call>now\n{}</tool_call>",
        "content",
        reply(None, "One moment.", Call(name="now", arguments="{}", complete=True)),
    ),
    # Cut off: in the thinking, in the answer, within a marker, within a call and within its name.
    ("I think tha", "thinking", reply("I think tha", None)),
    ("Yes.</think><answer>It", "thinking", reply("Yes.", "It")),
    ("Yes.</thi", "thinking", reply("Yes.</thi", None)),
    (
        '<tool_call>add\n{"x"',
        None,
        reply(None, None, Call(name="add", arguments='{"x"', complete=False)),
    ),
    ("2<tool_call>ad", None, reply(None, "2")),
    ("2<tool_call>", None, reply(None, "2")),
    ("2<tool_ca", None, reply(None, "2<tool_ca")),
    # What only looks like a marker is text; blanks stay; other markers of the tokenizer go.
    ("a < b <ans> </answer", "content", reply(None, "a < b <ans> </answer")),
    (" \n2 </answer>\n", "content", reply(None, " \n2 \n")),
    ("2</answer><|end|><|eos|>", "content", reply(None, "2")),
    ("<think></think><answer></answer>", None, reply(None, None)),
    (  # a name that cannot be one
        "<tool_call>1x\n{}</tool_call>",
        None,
        reply(None, "<tool_call>1x\n{}</tool_call>"),
    ),
    (  # inside a field only its own closer counts
        "<think>a<answer>b</answer></think><answer>c",
        None,
        reply("a<answer>b</answer>", "c"),
    ),
    ("é漢🙂</think>ж", "thinking", reply("é漢🙂", "ж")),
    # Where it is not known what the prompt opened, closers are still no text.
    ("2</answer><tool_call>f\n{}</tool_call>", None, reply(None, "2", CALL_F)),
    ("so</think><answer>2</answer>", None, reply(None, "so2")),
]


def gathered(pieces: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thinking, content and (name, arguments) of the pieces, in the way a client adds them up."""
    thinking, content, calls = "", "", []
    for piece in pieces:
        if piece.name is not None:
            assert piece.field == "tool_calls"
            assert piece.call == len(calls)
            assert not piece.text
            calls.append((piece.name, ""))
        elif piece.field == "tool_calls":
            assert piece.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
        else:
            assert piece.text
            assert piece.call is None
            thinking += piece.text if piece.field == "thinking" else ""
            content += piece.text if piece.field == "content" else ""
    return thinking, content, calls


def streamed(parts: list[str], inside: Any) -> tuple[str, str, list[tuple[str, str]]]:
    reader = ReplyReader(TEMPLATE, inside=inside, silent=SILENT)
    pieces = [piece for part in parts for piece in reader.push(part)]
    return gathered([*pieces, *reader.finish()])


def as_gathered(reply: Reply) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for call in reply.calls]
    return reply.thinking or "", reply.content or "", calls


@pytest.mark.parametrize(("text", "inside", "expected"), SAMPLES)
def test_samples_whole(text: str, inside: Any, expected: Reply) -> None:
    assert read_reply(TEMPLATE, text, inside=inside, silent=SILENT) == expected


@pytest.mark.parametrize(("text", "inside", "expected"), SAMPLES)
def test_samples_in_pieces_of_every_length(text: str, inside: Any, expected: Reply) -> None:
    for size in range(1, len(text) + 1):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert streamed(parts, inside) == as_gathered(expected), size


@pytest.mark.parametrize(("text", "inside", "expected"), SAMPLES)
def test_samples_cut_in_three_anywhere(text: str, inside: Any, expected: Reply) -> None:
    for a, b in itertools.combinations(range(len(text) + 1), 2):
        assert streamed([text[:a], text[a:b], text[b:]], inside) == as_gathered(expected), (a, b)


def by_regular_expressions(text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """A reply of well-formed parts, taken apart without our reader: an oracle."""
    part = re.compile(
        r"<think>(?P<thinking>.*?)</think>|<answer>(?P<content>.*?)</answer>"
        r"|<tool_call>(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)\n(?P<arguments>.*?)</tool_call>|(?P<out>.)",
        re.DOTALL,
    )
    thinking, content, calls = "", "", []
    for match in part.finditer(text):
        thinking += match["thinking"] or ""
        content += (match["content"] or "") + (match["out"] or "")
        if match["name"]:
            calls.append((match["name"], match["arguments"]))
    return thinking, content, calls


def test_random_replies_in_random_pieces() -> None:
    rng = random.Random(7)
    letters = 'ab<>/\n {}":é|thinkanswer_'
    for _ in range(300):
        parts = []
        for _ in range(rng.randrange(5)):
            body = "".join(rng.choices(letters, k=rng.randrange(12)))
            parts.append(
                rng.choice(
                    [
                        f"<think>{body}</think>",
                        f"<answer>{body}</answer>",
                        f"<tool_call>f{rng.randrange(9)}\n{body}</tool_call>",
                        "".join(rng.choices("ab {é", k=3)),
                    ]
                )
            )
        text = "".join(parts)
        pieces, at = [], 0
        while at < len(text):
            size = rng.randrange(1, 9)
            pieces.append(text[at : at + size])
            at += size
        assert streamed(pieces, None) == by_regular_expressions(text), text


def test_text_is_passed_on_at_once() -> None:
    """Nothing is held back but what may be the beginning of a marker."""
    reader = ReplyReader(TEMPLATE, inside="thinking")
    assert reader.push("Let me see") == [Piece(field="thinking", text="Let me see")]
    assert reader.push(" 1 <") == [Piece(field="thinking", text=" 1 ")]
    assert reader.push(" 2</th") == [Piece(field="thinking", text="< 2")]
    assert reader.push("ink>") == []
    assert reader.inside is None
    assert reader.push("<tool_call>f") == []
    assert reader.push("\n{") == [
        Piece(field="tool_calls", call=0, name="f"),
        Piece(field="tool_calls", text="{", call=0),
    ]


def test_a_call_that_never_gets_its_name_is_text_in_the_end() -> None:
    reader = ReplyReader(TEMPLATE)
    long = "<tool_call>" + "x" * (MOST_OPENER + 40)
    out = [piece for sign in long for piece in reader.push(sign)]
    assert gathered(out)[1] == long  # not held back until the reply ends
    assert read_reply(TEMPLATE, long + "\n").calls == ()


def test_what_the_prompt_left_open() -> None:
    chat = "<|bos|><|user|><think>old</think><|end|><|assistant|>"
    for tail, inside, over in (
        ("<think>", "thinking", False),
        ("<answer>", "content", True),
        ("", None, False),
        ("<think>a</think>", None, True),
        ("<think>a</think><answer>b", "content", True),
        ("<tool_call>f\n", "tool_calls", True),
    ):
        reader = state_after(TEMPLATE, chat + tail)
        # The call's opener may still grow until something follows it.
        if inside == "tool_calls":
            reader.push("{")
        assert (reader.inside, thinking_is_over(reader)) == (inside, over), tail
    # What an earlier turn closed does not count, and without the anchor nothing is read.
    assert state_after(TEMPLATE, "<think>").inside is None


def test_tokens_of_thinking_are_counted() -> None:
    opens, closes = frozenset({9}), frozenset({10})
    for ids, inside, expected in (
        ([], True, 0),
        ([20, 21, 10, 22], True, 2),
        ([20, 21, 10, 22], False, 0),
        ([20, 9, 21, 22, 10, 23, 9, 24], False, 3),
        ([9, 9, 10, 9], True, 2),
    ):
        assert count_between(ids, opens, closes, inside=inside) == expected, ids


def test_a_template_may_keep_some_of_its_fields() -> None:
    """The markers of the others are then text: one reader leaves them to the next."""
    text = "so</think><answer>2</answer><tool_call>f\n{}</tool_call>"
    first = read_reply(TEMPLATE.keeping("thinking"), text, inside="thinking")
    assert first == reply("so", "<answer>2</answer><tool_call>f\n{}</tool_call>")
    assert first.content is not None
    assert read_reply(TEMPLATE, first.content) == reply(None, "2", CALL_F)
    second = read_reply(TEMPLATE.keeping("thinking", "content"), text, inside="thinking")
    assert second == reply("so", "2<tool_call>f\n{}</tool_call>")


def test_other_markers_and_several_of_them() -> None:
    """The markers come from the template; one may be the beginning of another."""
    other = ResponseTemplate.of(
        {
            "version": 1,
            "start_anchor": ["[A]", "[A2]"],
            "fields": {
                "content": {"open": ["«", "««"], "close": "»"},
                "tool_calls": {
                    "open_pattern": r"\[call (?P<name>\w+)\]",
                    "close": "[end]",
                    "content": "json",
                },
            },
        }
    )
    text = "««a»«b»[call f]{}[end]"
    expected = Reply(
        thinking=None, content="ab", calls=(Call(name="f", arguments="{}", complete=True),)
    )
    assert read_reply(other, text) == expected
    for size in range(1, len(text)):
        reader = ReplyReader(other)
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        pieces = [piece for part in parts for piece in reader.push(part)]
        assert gathered([*pieces, *reader.finish()]) == ("", "ab", [("f", "{}")])
    assert other.message_of("x[A2]y[A]z") == "z"
    assert thinking_is_over(ReplyReader(other))  # there is none in this template


def test_what_the_shipped_chat_template_writes_is_read_back() -> None:
    jinja2 = pytest.importorskip("jinja2")
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    said = {"role": "assistant", "thinking": "Easy.", "content": "2", "tool_calls": [call, call]}
    template = jinja2.Environment().from_string(SHIPPED["chat_template"])
    text = template.render(messages=[{"role": "user", "content": "?"}, said])
    reply = read_reply(TEMPLATE, TEMPLATE.message_of(text), silent=SILENT)
    assert (reply.thinking, reply.content) == ("Easy.", "2")
    assert [(c.name, json.loads(c.arguments)) for c in reply.calls] == [("add", {"x": 1})] * 2
    for thinking, inside in ((True, "thinking"), (False, "content")):
        prompt = template.render(
            messages=[said, {"role": "tool", "content": "<think>"}],
            add_generation_prompt=True,
            thinking=thinking,
        )
        assert state_after(TEMPLATE, prompt).inside == inside


def changed(**changes: Any) -> dict[str, Any]:
    """The shipped template with some entries replaced; a dotted name goes into an object."""
    data = copy.deepcopy(SHIPPED["response_template"])
    for path, value in changes.items():
        *folders, name = path.split("__")
        inner = data
        for folder in folders:
            inner = inner[folder]
        if value is ...:
            del inner[name]
        else:
            inner[name] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "must be a JSON object, not None"),
        ([], r"must be a JSON object, not \[\]"),
        (changed(version=2), "version is 2; only 1 is known"),
        (changed(extra=1), "has 'extra', which cannot be served"),
        (changed(start_anchor=...), "start_anchor must be a text or a list of texts, not None"),
        (changed(start_anchor=""), "start_anchor must be a text"),
        (changed(fields=...), "fields must be a JSON object, not None"),
        (changed(fields__content=...), "there is no field content"),
        (changed(fields__mood={}), "has 'mood'"),
        (changed(defaults__mood="x"), "defaults has 'mood'"),
        (changed(fields__thinking__close=...), "thinking.close must be a text"),
        (changed(fields__thinking__open=[]), "thinking.open must be a text"),
        (changed(fields__thinking__open_pattern="<t>"), "needs open or open_pattern, and not both"),
        (
            changed(fields__thinking__content="json"),
            "thinking.content is .json.; it must be",
        ),
        (changed(fields__thinking__transform={}), "thinking.transform must be left out"),
        (changed(fields__thinking__join=" "), "has 'join', which cannot be served"),
        (changed(fields__thinking__repeats=1), "repeats must be true or false"),
        (changed(fields__tool_calls__content=...), "it must be 'json'"),
        (changed(fields__tool_calls__transform={}), "must be left out or give a function"),
        (changed(fields__tool_calls__open_pattern="<c>"), "must have one group, name"),
        (changed(fields__tool_calls__open_pattern="<c>("), "is no regular expression"),
        (changed(fields__tool_calls__open_pattern=5), "must be a regular expression, not 5"),
        (
            changed(fields__tool_calls__open_pattern=r"\w(?P<name>x)"),
            "must begin with literal",
        ),
        (
            changed(fields__tool_calls__open_pattern=r"<?(?P<name>x)"),
            "must begin with literal",
        ),
        (changed(fields__tool_calls__open_pattern=r"<a|b(?P<name>x)"), "have no alternatives"),
    ],
)
def test_a_wrong_template_is_named(data: Any, message: str) -> None:
    with pytest.raises(ServingError, match=message) as caught:
        ResponseTemplate.of(data)
    assert "\n" not in str(caught.value)


def test_nothing_of_vllm_or_torch_is_needed() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = sys.modules['regex'] = None\n"
        "import workbench.serving.vllm_plugin, workbench.serving.vllm_plugin.reply_reader"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
