"""The tokenizer of a checkpoint: byte-level BPE, lossless, markers only when asked for.

Ordinary text can contain the very characters of a marker ("<think>" in a source file, say). Reading
them as the marker would let text steer the model, so that happens only with ``special=True``.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Backend

_ROLES = ("system", "user", "assistant", "tool")
_JSON_KINDS = {
    str: "a text",
    dict: "an object",
    list: "a list",
    int: "a number",
    float: "a number",
    bool: "true or false",
}
_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·"}


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level BPE vocabulary, as character -> byte.

    Printable Latin-1 bytes stand for themselves; the other 68, in order, for U+0100 onward.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


class DecodeStream:
    """Turns ids into text one at a time, never cutting a UTF-8 sequence in two."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that became complete with this token: often one piece, possibly empty.

        Raises TokenizerError for an id outside the vocabulary.
        """
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, special=self._special))

    def flush(self) -> str:
        """The rest at the end: U+FFFD for a sequence that was never completed, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class Tokenizer:
    """Text to ids and back. Make one with :meth:`from_folder`."""

    def __init__(self, definition: str, config: Mapping[str, Any], *, where: str = "here") -> None:
        """Takes the content of tokenizer.json and the parsed tokenizer_config.json.

        Raises TokenizerError if either is malformed, lacks a bos or eos token, or has a field of
        the wrong type.
        """
        from tokenizers import Tokenizer as Backend

        try:
            self._markers_on: _Backend = Backend.from_str(definition)
            self._markers_off: _Backend = Backend.from_str(definition)
            added = json.loads(definition).get("added_tokens", [])
            self.markers: dict[str, int] = {t["content"]: t["id"] for t in added if t["special"]}
        except Exception as error:  # the backend raises bare Exception for a malformed file
            raise TokenizerError(
                f"the tokenizer.json {where} is not a tokenizer definition: {error}"
            ) from error
        self._markers_off.encode_special_tokens = True
        self.chat_template: str = _typed(config, "chat_template", "", where)
        self.response_template: dict[str, Any] = _typed(config, "response_template", {}, where)
        self.bos_id = self._named(config, "bos_token", where)
        self.eos_id = self._named(config, "eos_token", where)
        # Only decoding needs the first two; a foreign checkpoint may have no padding and no mask.
        self.pad_id, self.mask_id = (
            None if config.get(name) in (None, "") else self._named(config, name, where)
            for name in ("pad_token", "mask_token")
        )
        self.vocab_size: int = self._markers_on.get_vocab_size(with_added_tokens=True)
        self._bytes, self._marker_ids = self._byte_table(where)

    def _named(self, config: Mapping[str, Any], name: str, where: str) -> int:
        token = config.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if token is not None and not isinstance(token, str):
            raise TokenizerError(
                f"the tokenizer_config.json {where} gives {name} as {_JSON_KINDS[type(token)]}; "
                "give the token's text"
            )
        if token not in self.markers:
            raise TokenizerError(
                f"the tokenizer_config.json {where} gives {name} = {token!r}, which is not among "
                "the special tokens of tokenizer.json; add it there or correct the name"
            )
        return self.markers[token]

    def _byte_table(self, where: str) -> tuple[list[bytes], frozenset[int]]:
        marker_ids = frozenset(self.markers.values())
        alphabet = byte_alphabet()
        table: list[bytes] = []
        for token_id in range(self.vocab_size):
            token = self._markers_on.id_to_token(token_id)
            if token is None:
                raise TokenizerError(f"the tokenizer.json {where} has no token of id {token_id}")
            if token_id in marker_ids:
                table.append(token.encode("utf-8"))
                continue
            try:
                table.append(bytes(alphabet[character] for character in token))
            except KeyError as error:
                raise TokenizerError(
                    f"the tokenizer.json {where} is not byte-level: token {token_id} ({token!r}) "
                    "holds a character outside the byte alphabet"
                ) from error
        return table, marker_ids

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Reads tokenizer.json and tokenizer_config.json of a checkpoint folder.

        Raises TokenizerError if one is missing or malformed.
        """
        folder = Path(path)
        try:
            definition = (folder / "tokenizer.json").read_text(encoding="utf-8")
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TokenizerError(
                f"the folder {folder} has no readable tokenizer.json and tokenizer_config.json: "
                f"{error}"
            ) from error
        if not isinstance(config, dict):
            raise TokenizerError(f"the tokenizer_config.json in {folder} is not a JSON object")
        return cls(definition, config, where=f"in {folder}")

    def encode(self, text: str, *, bos: bool = True, special: bool = False) -> list[int]:
        """Ids of a text; with ``bos`` the beginning-of-sequence id comes first.

        With ``special=False`` the characters of a marker are plain text, with True the marker.
        Raises TokenizerError for text that UTF-8 cannot hold (a lone surrogate).
        """
        backend = self._markers_on if special else self._markers_off
        try:
            ids = backend.encode(_utf8(text), add_special_tokens=False).ids
        except TypeError as error:
            raise TokenizerError(f"encode takes a string, not {type(text).__name__}") from error
        return [self.bos_id, *ids] if bos else list(ids)

    def encode_batch(self, texts: Sequence[str], *, bos: bool = True) -> list[list[int]]:
        """Ids of many texts, in parallel, markers as plain text; as :meth:`encode` for each."""
        encodings = self._markers_off.encode_batch_fast(
            [_utf8(text) for text in texts], add_special_tokens=False
        )
        head = [self.bos_id] if bos else []
        return [head + encoding.ids for encoding in encodings]

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes one token stands for; a marker gives none unless ``special``.

        Raises TokenizerError for an id outside the vocabulary.
        """
        # A negative id would otherwise count from the end of the table without a word.
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(
                f"token id {token_id} is outside the vocabulary, which has ids 0 to "
                f"{self.vocab_size - 1}"
            )
        if token_id in self._marker_ids and not special:
            return b""
        return self._bytes[token_id]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ids; markers are left out unless ``special``.

        Bytes that are not UTF-8 become U+FFFD. Raises TokenizerError for an unknown id.
        """
        data = b"".join(self.token_bytes(token_id, special=special) for token_id in ids)
        return data.decode("utf-8", errors="replace")

    def decode_stream(self, *, special: bool = False) -> DecodeStream:
        """A decoder to push ids into one by one; in sum it gives what :meth:`decode` gives."""
        return DecodeStream(self, special=special)

    def token_text(self, token_id: int) -> str:
        """One token as a label: ⏎ newline, ⇥ tab, · space, \\xNN for a piece of a character.

        Raises TokenizerError for an id outside the vocabulary.
        """
        data = self.token_bytes(token_id, special=True)
        if token_id in self._marker_ids:
            return data.decode("utf-8")
        text = data.decode("utf-8", errors="surrogateescape")
        return "".join(map(_visible, text))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, thinking: bool = False) -> list[int]:
        """Ids of a conversation, up to where the assistant is to write.

        Each message has a ``role`` (system, user, assistant, tool) and a text ``content``; an
        assistant's may also have ``thinking`` and ``tool_calls``. With ``thinking`` the assistant
        opens with its thinking, else with its answer. Message text is never read as a marker.
        Raises TokenizerError for no messages, an unknown role or content that is not text.
        """
        if not messages:
            raise TokenizerError("a chat needs at least one message; the list is empty")
        ids = [self.bos_id]
        for index, message in enumerate(messages):
            ids += self._message(index, message)
        return ids + self._marked("<|assistant|>", "<think>" if thinking else "<answer>")

    def _marked(self, *names: str) -> list[int]:
        try:
            return [self.markers[name] for name in names]
        except KeyError as error:
            raise TokenizerError(
                f"this tokenizer has no marker {error.args[0]!r}, so it cannot format a chat"
            ) from error

    def _message(self, index: int, message: Mapping[str, Any]) -> list[int]:
        role = message.get("role")
        if role not in _ROLES:
            raise TokenizerError(
                f"message {index} has the role {role!r}; use one of {', '.join(_ROLES)}"
            )
        content = message.get("content") or ""
        thought = message.get("thinking") or ""
        if not isinstance(content, str) or not isinstance(thought, str):
            raise TokenizerError(f"message {index} needs text as its content and thinking")
        ids = self._marked(f"<|{role}|>")
        if role == "assistant":
            if thought:
                ids += self._wrapped("<think>", thought, "</think>")
            if content:
                ids += self._wrapped("<answer>", content, "</answer>")
            for call in message.get("tool_calls") or ():
                ids += self._wrapped("<tool_call>", _call_text(index, call), "</tool_call>")
        else:
            ids += self.encode(content, bos=False)
        return ids + self._marked("<|end|>")

    def _wrapped(self, opener: str, text: str, closer: str) -> list[int]:
        return self._marked(opener) + self.encode(text, bos=False) + self._marked(closer)


def _typed(config: Mapping[str, Any], name: str, absent: str | dict[str, Any], where: str) -> Any:
    """A field of tokenizer_config.json that is of the type of ``absent``, which null stands for."""
    value = config.get(name)
    if value is None:
        return absent
    if not isinstance(value, type(absent)):
        raise TokenizerError(
            f"the tokenizer_config.json {where} gives {name} as {_JSON_KINDS[type(value)]}; "
            f"give {_JSON_KINDS[type(absent)]} or leave it out"
        )
    return value


def _call_text(index: int, call: object) -> str:
    """A tool call as the model writes it: the function's name, a newline, its arguments as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TokenizerError(f"a tool call of message {index} has no function name")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f"{function['name']}\n{arguments}"


def _utf8(text: str) -> str:
    """The text itself, once it is known that UTF-8 can hold it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text holds a lone surrogate at position {error.start}, which UTF-8 cannot "
            "encode; replace it first"
        ) from error
    except AttributeError as error:
        raise TokenizerError(f"a text must be a string, not {type(text).__name__}") from error
    return text


def _visible(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # surrogateescape: a byte that is no whole character
        return f"\\x{code - 0xDC00:02x}"
    if character in _VISIBLE:
        return _VISIBLE[character]
    return character if character.isprintable() else f"\\u{code:04x}"
