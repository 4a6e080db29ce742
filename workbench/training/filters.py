"""Which files belong in the corpus, and what is cut from their text."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from workbench.training.documents import Kind
from workbench.training.sources import Package

MAX_FILE_BYTES = 256_000
MIN_FILE_BYTES = 64

TEST_PARTS = frozenset(
    {"test", "tests", "_tests", "testdata", "test-data", "test_data", "fixtures"}
)
VENDORED_PARTS = frozenset(
    {"_vendor", "vendor", "vendored", "_vendored", "externals", "_externals", "extern", "_extern"}
    | {"third_party", "thirdparty", "third-party", "bundled", "_bundled", "vendored_packages"}
)
PROSE_PARTS = frozenset({"doc", "docs", "documentation", "_sources"})
TEST_FILE = re.compile(r"^(test_.*|.*_tests?|conftest)\.py$")
GENERATED = re.compile(
    r"@generated|auto-?generated|automatically generated|generated (by|from|file|code)\b"
    r"|do not (edit|modify)|DO NOT (EDIT|MODIFY)",
    re.IGNORECASE,
)
LICENCE_HEADER = re.compile(r"\A(?:#!.*\n)?(?:[ \t]*(?:#.*)?\n)*?(?:#.*\n)+")


def kind_of(path: str) -> Kind | None:
    """The class of text that a path belongs to, or None for neither."""
    if path.endswith(".py"):
        return "code"
    folders = PurePosixPath(path).parts[:-1]
    if path.endswith(".rst") or (path.endswith(".txt") and PROSE_PARTS & set(folders)):
        return "prose"
    return None


def reason_to_drop(package: Package, path: str, data: bytes) -> str | None:
    """Why a file does not belong in the corpus, or None if it does (near-duplicates aside)."""
    parts = PurePosixPath(path).parts
    folders = {part.lower() for part in parts[:-1]}
    kind = kind_of(path)
    if kind is None or kind not in package.kinds:
        return "other_kind"
    if any(path.startswith(prefix) for prefix in package.skip):
        return "skipped"
    if folders & VENDORED_PARTS:
        return "vendored"
    if folders & TEST_PARTS or TEST_FILE.match(parts[-1]):
        return "test"
    if any(part.endswith((".dist-info", ".egg-info")) for part in parts):
        return "metadata"
    if len(data) > MAX_FILE_BYTES:
        return "too_large"
    if len(data) < MIN_FILE_BYTES:
        return "too_small"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "not_utf8"
    if "\x00" in text:
        return "not_utf8"
    if kind == "code" and GENERATED.search(text[:1500]):
        return "generated"
    return "data" if looks_like_data(text) else None


def looks_like_data(text: str) -> bool:
    """True for minified files and tables: very long lines, or few letters among the signs."""
    longest = max(map(len, text.splitlines()), default=0)
    dense = "".join(text.split())
    letters = sum(map(str.isalpha, dense))
    return longest > 2000 or len(text) > 120 * (1 + text.count("\n")) or letters < 0.5 * len(dense)


def clean(text: str, kind: Kind) -> str:
    """Unix line ends, no byte order mark, and for code no licence comment at the top.

    The same licence text stands in thousands of files: a model would spend its capacity on it and
    held-out figures would look better than they are.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if kind == "code":
        header = LICENCE_HEADER.match(text)
        if header and re.search(r"copyright|licen[cs]e|SPDX", header.group(), re.IGNORECASE):
            text = text[header.end() :].lstrip("\n")
    return text
