"""Words for ``vllm serve`` that a user adds: checked against what is said already, and as keywords.

What an option sets is recorded of vLLM 0.33.0's own parser (``engine_options.json``, written by
``tests/engine/record_serve_options.py``). A word is checked by its name here; whether the engine
takes its value is for its own parser to say (:mod:`workbench.serving.launch.argument_check`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any

from workbench.errors import ServingError
from workbench.files import read_json
from workbench.model.asked import shown

RECORDED = Path(__file__).parent / "engine_options.json"
_SECRET = {
    "api_key": "set VLLM_API_KEY in the environment",
    "hf_token": "set HF_TOKEN in the environment",
}
# What the launch says about itself or leaves at its default, and the argument that changes it.
_OWN = {
    "host": "host",
    "port": "port",
    "model": "checkpoint",
    "served_model_name": "name",
    "spec_method": "speculation",
    "spec_model": "speculation",
    "spec_tokens": "speculation",
    "speculative_config": "speculation",
    "per_request_spec_decode_metrics": "statistics",
    "data_parallel_size": "layout",
    "enable_expert_parallel": "layout",
    "async_scheduling": "kv",
}
_ELSEWHERE = {
    "config": "a file of arguments cannot be checked; write them out",
    "uds": "it listens on a port",
    "grpc": "it is asked over HTTP",
    "headless": "a server without an address cannot be asked anything",
    "help": "read the engine's help with vllm serve --help",
}


@cache
def recorded() -> dict[str, Any]:
    """``{"vllm": version, "options": {option: [keyword, what it sets]}, "engine": [keywords]}``.

    What an option sets is None where it takes a value; ``engine`` are the keywords of ``vllm.LLM``.
    """
    data: dict[str, Any] = read_json(RECORDED)
    return data


def server_only(keyword: str) -> bool:
    """Whether ``vllm serve`` takes this keyword and ``vllm.LLM`` does not."""
    known = any(keyword == sets for sets, _ in recorded()["options"].values())
    return known and keyword not in recorded()["engine"]


def keyword_of(word: str) -> str | None:
    """The keyword that an option sets, whatever form of it this is; None where nobody knows it."""
    found = recorded()["options"].get(_name(word))
    return None if found is None else str(found[0])


def check_extra(extra: Any, taken: Set[str]) -> tuple[str, ...]:
    """The words, if they can stand behind ours.

    Args:
        extra: words, of which the first is an option.
        taken: keywords that the command sets already.

    Raises:
        ServingError: they are no words, do not begin with an option, say something a second time
            or something that does not belong in a command.
    """
    if isinstance(extra, str) or not isinstance(extra, Sequence):
        raise ServingError(
            f'extra arguments are a list of words, such as ["--seed", "1"], not {shown(extra)}'
        )
    words = tuple(extra)
    for word in words:
        if not isinstance(word, str) or not word.isprintable():
            raise ServingError(f"the extra argument {shown(word)} is no printable text")
    if words and not words[0].startswith("-"):
        raise ServingError(f"the extra arguments begin with {shown(words[0])}, which is no option")
    for word in words:
        if not _is_option(word):
            continue
        if not word.startswith("--") or _name(word) == "--":
            raise ServingError(f"write {shown(word)} out in full, as its name with --")
        _check(word, taken)
    for option, values in _grouped(words):
        _, sets = recorded()["options"].get(_name(option), (None, None))
        if sets is not None and values:
            raise ServingError(
                f"{option} takes no value, not {shown(values[0])}; its opposite has a name of its "
                "own, see vllm serve --help"
            )
    return words


def _check(word: str, taken: Set[str]) -> None:
    options, name = recorded()["options"], _name(word)
    # The engine's parser takes an abbreviation for what it may stand for.
    meant = [name] if name in options else [other for other in options if other.startswith(name)]
    for keyword in dict.fromkeys(options[option][0] for option in meant):
        option = f"--{keyword.replace('_', '-')}"
        if keyword in _SECRET:
            raise ServingError(
                f"{option} would end in logs and lists of processes; {_SECRET[keyword]}"
            )
        if keyword in _ELSEWHERE:
            raise ServingError(f"{option} is not for here: {_ELSEWHERE[keyword]}")
        if keyword in taken or keyword in _OWN:
            where = _OWN.get(keyword)
            what = f"say it with {where}" if where else "change what it comes from"
            # Its value stays out of the message: of an abbreviation it may be anything.
            raise ServingError(f"{name} says a second time what {option} says; {what}")
    if meant and name not in options:
        raise ServingError(f"write {name} out in full: {', '.join(sorted(meant)[:3])}")


def unknown_options(words: Sequence[str]) -> tuple[str, ...]:
    """Options among the words whose names vLLM 0.33.0 does not have."""
    return tuple(_name(word) for word in words if _is_option(word) and keyword_of(word) is None)


def keywords_of(extra: Sequence[str]) -> dict[str, Any]:
    """The words as keywords of ``vllm.LLM``; what only a server takes is left out.

    A value is read as JSON where it is some, else as text; ``--a.b 1`` is ``a={"b": 1}``. Of an
    option that is said twice the last counts, as for the engine's parser.

    Raises:
        ServingError: a value and a part of it are both given, or an option lacks its value.
    """
    keywords: dict[str, Any] = {}
    whole, parts = set[str](), set[str]()
    for word, values in _grouped(extra):
        path = word.partition("=")[0].split(".")[1:]
        keyword, value = _keyword(word, values)
        if server_only(keyword):
            continue
        (parts if path else whole).add(keyword)
        if keyword in parts & whole:
            raise ServingError(f"{_name(word)} is given whole and in part; keep one of them")
        place, last = keywords, keyword
        for part in path:
            inner = place.setdefault(last, {})
            if not isinstance(inner, dict):
                raise ServingError(f"{_name(word)} is given whole and in part; keep one of them")
            place, last = inner, part.replace("-", "_")
        place[last] = value
    return keywords


def _grouped(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with its values: what follows up to the next, or behind its ``=``."""
    option, values = "", list[str]()
    for word in words:
        if not _is_option(word):
            values.append(word)
            continue
        if option:
            yield option, values
        name, equals, value = word.partition("=")
        option, values = name, [value] if equals else []
    if option:
        yield option, values


def _keyword(option: str, values: list[str]) -> tuple[str, Any]:
    """The keyword that an option sets, and to what."""
    name = _name(option)
    plain = name.removeprefix("--").removeprefix("no-").replace("-", "_")
    keyword, sets = recorded()["options"].get(name, (plain, not name.startswith("--no-")))
    if not values:
        if sets is None and name in recorded()["options"]:
            raise ServingError(f"{option} wants a value; write it behind")
        return keyword, True if sets is None else sets
    read = [_value(value) for value in values]
    return keyword, read[0] if len(read) == 1 else read


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _name(word: str) -> str:
    """An option's name as the engine's parser looks it up, without what follows ``=`` or a dot."""
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def _is_option(word: str) -> bool:
    """Whether it is an option and no negative number."""
    return len(word) > 1 and word[0] == "-" and not (word[1].isdigit() or word[1] == ".")
