"""Text to distil a drafter on, and text kept from it: any corpus as one stream of token ids."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.errors import TrainingError
from workbench.model.tokenizer import Tokenizer
from workbench.training.data import MAX_VOCABULARY, corpus_tokens
from workbench.training.evaluate import HELD_OUT, read_texts

SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl")
HELD_OUT_EVERY = 10  # of the documents that come without a held-out set, each tenth is kept from it
STDLIB_BYTES = 3_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Texts:
    """Token ids: what is trained on, and held-out documents by class.

    Attributes:
        stream: uint16 ``[M]``, documents that each end with the end-of-text token.
        held_out: documents of each class, each from its beginning-of-text token.
    """

    stream: np.ndarray
    held_out: dict[str, list[list[int]]]


def read_corpus(corpus: str, tokenizer: Tokenizer, *, most: int = 256) -> Texts:
    """The texts of a prepared corpus, "stdlib", a folder of text files, a file or JSON lines.

    Args:
        most: held-out documents of each class that are read.

    Raises:
        TrainingError: there is no text, or it cannot be read; the vocabulary is too large.
    """
    if tokenizer.vocab_size > MAX_VOCABULARY:
        raise TrainingError(
            f"a vocabulary of {tokenizer.vocab_size} does not fit the 16-bit ids of a training "
            f"stream; use a target with at most {MAX_VOCABULARY} tokens"
        )
    if corpus == "stdlib":
        return _split(_stdlib(tokenizer), tokenizer.eos_id, corpus)
    folder = Path(corpus)
    if (folder / "train.tokens.u16").is_file():
        held_out = {}
        for name in HELD_OUT:
            file = folder / f"{name}.jsonl"
            if file.is_file():
                held_out[name.removeprefix("heldout_")] = _encoded([file], tokenizer, most)
        return Texts(stream=corpus_tokens(corpus, tokenizer), held_out=held_out)
    files = [folder] if folder.is_file() else _text_files(folder)
    if not files:
        raise TrainingError(
            f"the corpus {corpus} is neither a text file nor a folder with any "
            f"({', '.join(SUFFIXES)}) or with train.tokens.u16; name one of these"
        )
    return _split(_encoded(files, tokenizer, None), tokenizer.eos_id, corpus)


def _text_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())


def _encoded(files: list[Path], tokenizer: Tokenizer, most: int | None) -> list[list[int]]:
    documents: list[list[int]] = []
    for text in read_texts(files):
        if most is not None and len(documents) >= most:
            break
        if text.strip():
            documents.append(tokenizer.encode(text))
    return documents


def _stdlib(tokenizer: Tokenizer) -> list[list[int]]:
    documents: list[list[int]] = []
    size = 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        documents.append(tokenizer.encode(text))
        size += len(text)
        if size > STDLIB_BYTES:
            break
    return documents


def _split(documents: list[list[int]], eos: int, corpus: str) -> Texts:
    """Every tenth document is held out; of one or two documents, the last tenth of their tokens."""
    if not documents:
        raise TrainingError(f"the corpus {corpus} has no text in it; give at least one file")
    if len(documents) > 2:
        kept = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or documents[-1:]
        places = set(range(HELD_OUT_EVERY - 1, len(documents), HELD_OUT_EVERY))
        places = places or {len(documents) - 1}
        train = [d for i, d in enumerate(documents) if i not in places]
    else:
        cuts = [max(1, len(d) - len(d) // HELD_OUT_EVERY) for d in documents]
        train = [d[:cut] for d, cut in zip(documents, cuts, strict=True)]
        kept = [d[cut:] for d, cut in zip(documents, cuts, strict=True) if d[cut:]]
    stream = np.array([i for d in train for i in (*d, eos)], dtype=np.uint16)
    return Texts(stream=stream, held_out={"text": kept} if kept else {})
