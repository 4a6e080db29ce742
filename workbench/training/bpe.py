"""Trains the byte-level BPE vocabulary of beam-tiny and writes the training tokens.

``python -m workbench.training.bpe --corpus build/corpus --out FOLDER`` trains the tokenizer;
``--tokens`` also encodes the training split. Both are deterministic for a given corpus.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.model.tokenizer import Tokenizer
from workbench.training.documents import KINDS, CorpusError, Document, read_split, write_whole

VOCAB_SIZE = 4096
SAMPLE_BYTES = 30_000_000
MAX_TOKEN_CHARACTERS = 24
CONTEXT = 2048
SEED = 0

BOS, EOS, PAD, MASK = "<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>"
SPECIAL_TOKENS = (
    BOS,
    EOS,
    PAD,
    MASK,
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<tool_call>",
    "</tool_call>",
    "<|reserved|>",
)

# What a token may never reach across. In this order:
#   line breaks with the indentation that follows, so that one token can be "newline, 8 spaces";
#   a word with at most one sign before it (" name", "_name", ".name", "(name");
#   one digit, so that numbers are read digit by digit;
#   signs, with at most one space before them;
#   spaces, the last of a run left to the word that follows.
PIECES = (
    r"(?:\r?\n)+[ \t]*"
    r"|[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

CHAT_TEMPLATE = """\
{{- '<|bos|>' -}}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('Unknown role: ' ~ message.role) -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>' -}}
{%- if message.role == 'assistant' -%}
{%- if message.thinking -%}{{- '<think>' ~ message.thinking ~ '</think>' -}}{%- endif -%}
{%- if message.content -%}{{- '<answer>' ~ message.content ~ '</answer>' -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function is defined else call -%}
{%- set arguments = function.arguments -%}
{{- '<tool_call>' ~ function.name ~ '\\n' -}}
{{- arguments if arguments is string else arguments | tojson -}}
{{- '</tool_call>' -}}
{%- endfor -%}
{%- else -%}
{{- message.content or '' -}}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' ~ ('<think>' if thinking else '<answer>') -}}
{%- endif -%}
"""

RESPONSE_TEMPLATE: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"open": "<answer>", "close": "</answer>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)\n",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """Sizes of the encoded training split, by kind of text."""

    file: str
    documents: int
    tokens: int
    bytes: int
    tokens_by_kind: dict[str, int]
    bytes_by_kind: dict[str, int]
    bytes_per_token: dict[str, float]
    sha256: str
    seconds: float = field(compare=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sample(
    documents: Iterable[Document], *, limit_bytes: int = SAMPLE_BYTES, seed: int = SEED
) -> list[str]:
    """Texts of about ``limit_bytes`` in all, drawn without replacement, mixed as the corpus is."""
    order = list(documents)
    random.Random(seed).shuffle(order)
    texts, left = [], limit_bytes
    for document in order:
        if left <= 0:
            break
        texts.append(document.text)
        left -= len(document.text.encode("utf-8"))
    return texts


def train_tokenizer(
    texts: Sequence[str], *, vocab_size: int = VOCAB_SIZE, progress: bool = False
) -> str:
    """Trains the byte-level BPE and returns the content of its tokenizer.json.

    Raises CorpusError if the texts are too few to fill the vocabulary.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_TOKEN_CHARACTERS,
        show_progress=progress,
    )
    backend.train_from_iterator(texts, trainer=trainer, length=len(texts))
    reached = backend.get_vocab_size()
    if reached != vocab_size:
        raise CorpusError(
            f"the texts give a vocabulary of {reached} tokens instead of {vocab_size}; "
            "train on more text or ask for a smaller vocabulary"
        )
    return str(backend.to_str(pretty=False))


def tokenizer_config(*, context: int = CONTEXT) -> dict[str, Any]:
    """The content of tokenizer_config.json, in the names Hugging Face's loaders read."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "mask_token": MASK,
        "additional_special_tokens": list(SPECIAL_TOKENS[4:]),
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        "response_template": RESPONSE_TEMPLATE,
    }


def write_tokenizer(folder: str | os.PathLike[str], definition: str) -> Tokenizer:
    """Writes tokenizer.json and tokenizer_config.json, each whole or not at all, and loads them."""
    target = Path(folder)
    write_whole(target / "tokenizer.json", [definition.encode("utf-8")])
    config = json.dumps(tokenizer_config(), indent=1, ensure_ascii=False) + "\n"
    write_whole(target / "tokenizer_config.json", [config.encode("utf-8")])
    return Tokenizer.from_folder(target)


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[Document], *, batch: int = 512
) -> Iterator[tuple[Document, list[int]]]:
    """Yields each document with its ids: bos, the text, eos."""
    for start in range(0, len(documents), batch):
        part = documents[start : start + batch]
        for document, ids in zip(part, tokenizer.encode_batch([d.text for d in part]), strict=True):
            ids.append(tokenizer.eos_id)
            yield document, ids


def write_tokens(
    tokenizer: Tokenizer,
    documents: Iterable[Document],
    path: str | os.PathLike[str],
    *,
    seed: int = SEED,
) -> TokenReport:
    """Writes documents as one row of uint16 little-endian ids, in an order shuffled by ``seed``.

    The file is written whole or not at all. Raises CorpusError if an id does not fit in 16 bits.
    """
    import numpy as np

    start = time.perf_counter()
    if tokenizer.vocab_size > 1 << 16:
        raise CorpusError(f"a vocabulary of {tokenizer.vocab_size} does not fit in 16-bit ids")
    order = list(documents)
    random.Random(seed).shuffle(order)
    tokens = dict.fromkeys(KINDS, 0)
    sizes = dict.fromkeys(KINDS, 0)

    def chunks() -> Iterator[bytes]:
        for document, ids in encode_documents(tokenizer, order):
            tokens[document.kind] += len(ids)
            sizes[document.kind] += len(document.text.encode("utf-8"))
            yield np.asarray(ids, dtype="<u2").tobytes()

    target = Path(path)
    sha256 = write_whole(target, chunks())
    return TokenReport(
        file=target.name,
        documents=len(order),
        tokens=sum(tokens.values()),
        bytes=sum(sizes.values()),
        tokens_by_kind={str(kind): n for kind, n in tokens.items()},
        bytes_by_kind={str(kind): n for kind, n in sizes.items()},
        bytes_per_token={str(k): round(sizes[k] / n, 4) for k, n in tokens.items() if n},
        sha256=sha256,
        seconds=round(time.perf_counter() - start, 1),
    )


def compress(path: Path, *, preset: int = 6) -> Path:
    """Writes ``path`` + ``.xz`` beside a file of uint16 ids, whole or not at all; returns its path.

    The window spans the whole training split and the coder knows that ids are two bytes wide,
    which together save a tenth over the defaults. Preset 9 takes minutes for 150 MB.
    """
    target = path.with_name(path.name + ".xz")
    layout = {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": 192 << 20}
    packer = lzma.LZMACompressor(filters=[{**layout, "lp": 1, "pb": 1, "lc": 3}])

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as source:
            while block := source.read(1 << 20):
                yield packer.compress(block)
        yield packer.flush()

    write_whole(target, chunks())
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: trains the tokenizer, and with --tokens encodes the training split."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.bpe", description=main.__doc__
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the built corpus")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer files")
    parser.add_argument("--tokens", action="store_true", help="write train.tokens.u16 as well")
    parser.add_argument("--compress", action="store_true", help="and train.tokens.u16.xz")
    options = parser.parse_args(arguments)
    try:
        documents = list(read_split(options.corpus, "train"))
        definition = train_tokenizer(sample(documents), progress=True)
        tokenizer = write_tokenizer(options.out, definition)
        if options.tokens or options.compress:
            report = write_tokens(tokenizer, documents, options.corpus / "train.tokens.u16")
            text = json.dumps(report.to_dict(), indent=1) + "\n"
            write_whole(options.corpus / "tokens.json", [text.encode("utf-8")])
            print(text, file=sys.stderr)
        if options.compress:
            compress(options.corpus / "train.tokens.u16")
    except CorpusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
