"""Training tokens: one long stream on disk, and batches of windows drawn from it by step number."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workbench.errors import TrainingError
from workbench.model.tokenizer import Tokenizer

MAX_VOCABULARY = 1 << 16  # ids are kept as uint16
# No file of a corpus is longer than 256 kB and no token shorter than a byte: the first document
# always ends within this many tokens.
FIRST_DOCUMENT = 1 << 18


class TokenStream:
    """A flat array of token ids (uint16), from which steps draw windows.

    The windows of a step depend on the seed and the step number only, so a resumed run sees
    exactly what an uninterrupted one would have seen.
    """

    def __init__(self, tokens: np.ndarray, seed: int) -> None:
        self.tokens, self.seed = tokens, seed

    def batch(self, step: int, batch: int, length: int) -> Tensor:
        """Windows of step ``step``: int64 ``[batch, length + 1]`` (inputs and shifted targets)."""
        rng = np.random.default_rng((self.seed, step))
        starts = rng.integers(0, len(self.tokens) - length, size=batch)
        window = starts[:, None] + np.arange(length + 1)
        return torch.from_numpy(self.tokens[window].astype(np.int64))


def open_stream(corpus: str, tokenizer: Tokenizer, length: int, seed: int) -> TokenStream:
    """The training stream of a corpus folder, or of this interpreter's sources for "stdlib".

    Raises:
        TrainingError: no tokens there, fewer than one window, or tokens of another tokenizer.
    """
    if tokenizer.vocab_size > MAX_VOCABULARY:
        raise TrainingError(
            f"a vocabulary of {tokenizer.vocab_size} does not fit the 16-bit ids of a training "
            f"stream; use a tokenizer of at most {MAX_VOCABULARY} tokens"
        )
    tokens = _stdlib_tokens(tokenizer) if corpus == "stdlib" else corpus_tokens(corpus, tokenizer)
    if len(tokens) <= length:
        raise TrainingError(
            f"the corpus {corpus} has {len(tokens)} tokens, fewer than one window of {length} "
            "and its target; train on more text or lower 'length'"
        )
    return TokenStream(tokens, seed)


def corpus_tokens(corpus: str, tokenizer: Tokenizer) -> np.ndarray:
    """``train.tokens.u16`` of a corpus folder, uint16 ``[M]``, read as it is used.

    Raises:
        TrainingError: it is missing, cut off, or was made with another tokenizer.
    """
    file = Path(corpus) / "train.tokens.u16"
    again = f"'python -m workbench.training.bpe --corpus {corpus} --out TOKENIZER --tokens'"
    if not file.is_file() or file.stat().st_size < 2:
        raise TrainingError(
            f"there are no training tokens at {file}; make them with 'python -m "
            f"workbench.training.corpus --out {corpus}' and then {again}"
        )
    if file.stat().st_size % 2:
        raise TrainingError(f"{file} is cut off in the middle of a token; make it again: {again}")
    tokens = np.memmap(file, dtype="<u2", mode="r")
    if int(tokens.max()) >= tokenizer.vocab_size or not _encodes(tokenizer, tokens):
        raise TrainingError(
            f"{file} was made with another tokenizer; name the one it was made with in the "
            f"field 'tokenizer', or make the tokens again: {again}"
        )
    return tokens


def _encodes(tokenizer: Tokenizer, tokens: np.ndarray) -> bool:
    """Whether the tokenizer gives the stream's first document back, id for id."""
    head: list[int] = tokens[:FIRST_DOCUMENT].tolist()
    end = head.index(tokenizer.eos_id) if tokenizer.eos_id in head else len(head)
    return head[:end] == tokenizer.encode(tokenizer.decode(head[1:end]))


def _stdlib_tokens(tokenizer: Tokenizer, most_bytes: int = 3_000_000) -> np.ndarray:
    ids: list[int] = []
    size = 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        ids += [*tokenizer.encode(text), tokenizer.eos_id]
        size += len(text)
        if size > most_bytes:
            break
    return np.array(ids, dtype=np.uint16)
