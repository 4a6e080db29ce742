"""Near-duplicates of the corpus: found by shingles of lines, held-out text first."""

from __future__ import annotations

import hashlib

from workbench.training.documents import SPLITS, Document, Split

SHINGLE_LINES = 5
MAX_SHARED_WITH_HELDOUT = 0.20
MAX_SHARED_WITH_TRAIN = 0.50


def shingles(text: str) -> set[int]:
    """The 64-bit hashes of all runs of 5 normalised, non-blank lines (one hash if shorter)."""
    lines = [line for line in (" ".join(line.split()) for line in text.splitlines()) if line]
    if not lines:
        return set()
    last = max(1, len(lines) - SHINGLE_LINES + 1)
    return {_hash64("\n".join(lines[i : i + SHINGLE_LINES])) for i in range(last)}


def _hash64(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def remove_near_duplicates(
    splits: dict[Split, list[Document]],
) -> tuple[dict[Split, list[Document]], list[tuple[Document, str]]]:
    """Returns the splits without near-duplicates, and the dropped documents with the reason."""
    kept: dict[Split, list[Document]] = {split: [] for split in SPLITS}
    dropped: list[tuple[Document, str]] = []
    held_out: set[int] = set()
    for split in ("heldout_package", "heldout_code", "heldout_prose"):
        for document in splits[split]:
            own = shingles(document.text)
            if not own or len(own & held_out) > MAX_SHARED_WITH_TRAIN * len(own):
                dropped.append((document, "duplicate_within_heldout"))
                continue
            held_out |= own
            kept[split].append(document)
    trained: set[int] = set()
    for document in splits["train"]:
        own = shingles(document.text)
        if not own or len(own & trained) > MAX_SHARED_WITH_TRAIN * len(own):
            dropped.append((document, "duplicate_within_train"))
        elif len(own & held_out) > MAX_SHARED_WITH_HELDOUT * len(own):
            dropped.append((document, "duplicate_of_heldout"))
        else:
            trained |= own
            kept["train"].append(document)
    return kept, dropped
