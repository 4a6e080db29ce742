"""The documents of the training corpus and the files they are kept in."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workbench.errors import WorkbenchError

Kind = Literal["code", "prose"]
Split = Literal["train", "heldout_code", "heldout_prose", "heldout_package"]

KINDS: tuple[Kind, ...] = ("code", "prose")
SPLITS: tuple[Split, ...] = ("train", "heldout_code", "heldout_prose", "heldout_package")


class CorpusError(WorkbenchError):
    """The corpus cannot be built; the message says which package or setting is the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One file of the corpus."""

    package: str
    path: str
    kind: Kind
    text: str

    @property
    def key(self) -> str:
        return f"{self.package}/{self.path}"


def write_whole(path: Path, chunks: Iterable[bytes]) -> str:
    """Writes a file whole or not at all; returns the sha256 of its content."""
    digest = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            for chunk in chunks:
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return digest.hexdigest()


def read_split(out_dir: Path, split: str) -> Iterator[Document]:
    """Yields the documents of a split that build_corpus wrote.

    Raises CorpusError if the split is not there.
    """
    path = Path(out_dir) / f"{split}.jsonl"
    try:
        lines = path.open(encoding="utf-8")
    except OSError as error:
        raise CorpusError(
            f"there is no split {split!r} at {path}; build the corpus first with "
            f"python -m workbench.training.corpus --out {out_dir}"
        ) from error
    with lines:
        for line in lines:
            yield Document(**json.loads(line))


def json_line(document: Document) -> bytes:
    record = {f: getattr(document, f) for f in ("package", "path", "kind", "text")}
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8")
