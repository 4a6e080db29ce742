"""Builds the training corpus of beam-tiny from the packages that packages.toml names.

The result is a pure function of the archives, whose versions are exact: files are read in the
order of the list and of their paths, the hold-out is by hash of path, and near-duplicates are
removed in that order. ``python -m workbench.training.corpus --out build/corpus`` runs it.

Splits
    ``train``, ``heldout_code`` and ``heldout_prose`` (1 % of the files of each kind, by sha256 of
    ``package/path``), and ``heldout_package`` (whole packages that no file of is trained on).

Near-duplicates
    A file is the set of its 5-line shingles over its normalised lines (white space squeezed, blank
    lines and a licence header left out). The held-out splits are filled first; then a training file
    is dropped if more than 20 % of its shingles occur in held-out text, or more than 50 % in
    training text already taken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.training.documents import (
    KINDS,
    SPLITS,
    CorpusError,
    Document,
    Kind,
    Split,
    json_line,
    write_whole,
)
from workbench.training.duplicates import remove_near_duplicates
from workbench.training.filters import MIN_FILE_BYTES, clean, reason_to_drop
from workbench.training.sources import (
    PACKAGES_FILE,
    Package,
    fetch,
    load_packages,
    read_members,
)

HELDOUT_PER_10000 = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """Size and content hash of one split's file."""

    file: str
    files: int
    bytes: int
    bytes_by_kind: dict[str, int]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageReport:
    """What one package gave, by split, and why files of it were left out."""

    name: str
    version: str
    license: str
    source: str
    role: str
    archive: str
    archive_sha256: str
    files: dict[str, int]
    bytes: dict[str, int]
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """Everything the model card says about the corpus; ``corpus.json`` holds the same."""

    splits: dict[str, SplitReport]
    packages: tuple[PackageReport, ...]
    dropped: dict[str, int]
    python: str
    seconds: float = field(compare=False)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# --- hold-out and limits -------------------------------------------------------------------------


def held_out_by_hash(key: str) -> bool:
    """True for the 1 % of keys (``package/path``) whose sha256 puts them into the hold-out."""
    return _order_of(key) % 10_000 < HELDOUT_PER_10000


def _order_of(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode("utf-8")).digest()[:8], "big")


def split_of(package: Package, document: Document) -> Split:
    """The split a document belongs to, before near-duplicates are removed."""
    if package.role == "heldout_package":
        return "heldout_package"
    if held_out_by_hash(document.key):
        return "heldout_code" if document.kind == "code" else "heldout_prose"
    return "train"


def cap(package: Package, documents: list[Document]) -> tuple[list[Document], int]:
    """Keeps at most ``max_mb`` of each kind, files taken by hash of path; and how many went."""
    if package.max_mb is None:
        return documents, 0
    left = {kind: int(package.max_mb * 1e6) for kind in KINDS}
    chosen: set[str] = set()
    for document in sorted(documents, key=lambda d: _order_of("cap/" + d.key)):
        size = len(document.text.encode("utf-8"))
        if size <= left[document.kind]:
            left[document.kind] -= size
            chosen.add(document.key)
    return [d for d in documents if d.key in chosen], len(documents) - len(chosen)


# --- the build ----------------------------------------------------------------------------------


def build_corpus(
    out_dir: str | os.PathLike[str],
    *,
    packages: Sequence[Package] | None = None,
    progress: bool = True,
) -> CorpusReport:
    """Downloads the packages and writes ``<split>.jsonl`` for each split, then ``corpus.json``.

    Archives stay in ``out_dir/downloads`` and are not fetched again. Each file is written whole or
    not at all. Raises CorpusError for a package that cannot be had.
    """
    start = time.perf_counter()
    out = Path(out_dir)
    chosen = load_packages() if packages is None else tuple(packages)

    def say(message: str) -> None:
        if progress:
            print(f"[{time.perf_counter() - start:6.1f} s] {message}", file=sys.stderr, flush=True)

    def fetch_and_say(package: Package) -> Path:
        archive = fetch(package, out / "downloads")
        say(f"have {package.name} {package.version}")
        return archive

    with ThreadPoolExecutor(max_workers=4) as pool:
        archives = list(pool.map(fetch_and_say, chosen))

    splits: dict[Split, list[Document]] = {split: [] for split in SPLITS}
    dropped: dict[str, Counter[str]] = {package.name: Counter() for package in chosen}
    for package, archive in zip(chosen, archives, strict=True):
        documents = _documents(package, archive, dropped[package.name])
        trained: list[Document] = []
        for document in documents:
            split = split_of(package, document)
            (trained if split == "train" else splits[split]).append(document)
        trained, over = cap(package, trained)
        dropped[package.name]["over_max_mb"] += over
        splits["train"] += trained
        say(f"read {package.name}: {len(documents)} files")
    kept, duplicates = remove_near_duplicates(splits)
    for document, reason in duplicates:
        dropped[document.package][reason] += 1
    say(f"removed {len(duplicates)} near-duplicates")

    split_reports: dict[str, SplitReport] = {}
    for split in SPLITS:
        split_reports[split] = _write_split(out, split, kept[split])
    report = CorpusReport(
        splits=split_reports,
        packages=tuple(
            _package_report(p, a, kept, dropped[p.name])
            for p, a in zip(chosen, archives, strict=True)
        ),
        dropped=dict(sorted(sum(dropped.values(), Counter[str]()).items())),
        python=platform.python_version(),
        seconds=round(time.perf_counter() - start, 1),
    )
    text = json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n"
    write_whole(out / "corpus.json", [text.encode("utf-8")])
    for name, made in split_reports.items():
        say(f"{name}: {made.files} files, {made.bytes / 1e6:.1f} MB")
    return report


def _documents(package: Package, archive: Path, dropped: Counter[str]) -> list[Document]:
    documents: dict[str, Document] = {}
    for path, data in read_members(package, archive):
        reason = reason_to_drop(package, path, data)
        if reason is not None:
            dropped[reason] += 1
            continue
        kind: Kind = "code" if path.endswith(".py") else "prose"
        text = clean(data.decode("utf-8"), kind)
        if len(text) < MIN_FILE_BYTES:
            dropped["too_small"] += 1
            continue
        documents[path] = Document(package=package.name, path=path, kind=kind, text=text)
    return [documents[path] for path in sorted(documents)]


def _write_split(out: Path, split: Split, documents: list[Document]) -> SplitReport:
    sizes = Counter[str]()
    for document in documents:
        sizes[document.kind] += len(document.text.encode("utf-8"))
    name = f"{split}.jsonl"
    sha256 = write_whole(out / name, map(json_line, documents))
    return SplitReport(
        file=name,
        files=len(documents),
        bytes=sizes.total(),
        bytes_by_kind={kind: sizes[kind] for kind in KINDS},
        sha256=sha256,
    )


def _package_report(
    package: Package, archive: Path, kept: dict[Split, list[Document]], dropped: Counter[str]
) -> PackageReport:
    files, sizes = Counter[str](), Counter[str]()
    for split, documents in kept.items():
        for document in documents:
            if document.package == package.name:
                files[split] += 1
                sizes[split] += len(document.text.encode("utf-8"))
    sha256 = ""
    if archive.is_file():
        with archive.open("rb") as handle:
            sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
    version = platform.python_version() if package.source == "stdlib" else package.version
    return PackageReport(
        name=package.name,
        version=version,
        license=package.license,
        source=package.source,
        role=package.role,
        archive=archive.name if archive.is_file() else "",
        archive_sha256=sha256,
        files=dict(files),
        bytes=dict(sizes),
        dropped={reason: n for reason, n in sorted(dropped.items()) if n},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: builds the corpus; exit status 1 and one sentence if that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.corpus", description=main.__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--packages", type=Path, default=PACKAGES_FILE, help="the package list")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="build from these packages only")
    parser.add_argument("--skip", nargs="+", metavar="NAME", default=[], help="leave these out")
    parser.add_argument("--quiet", action="store_true", help="no progress lines")
    options = parser.parse_args(arguments)
    try:
        packages = load_packages(options.packages)
        names = {package.name for package in packages}
        unknown = sorted(set(options.skip + (options.only or [])) - names)
        if unknown:
            raise CorpusError(f"the package list {options.packages} has no package {unknown[0]!r}")
        if options.only:
            packages = tuple(p for p in packages if p.name in options.only)
        packages = tuple(p for p in packages if p.name not in options.skip)
        build_corpus(options.out, packages=packages, progress=not options.quiet)
    except CorpusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
