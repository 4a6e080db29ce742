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
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from workbench.errors import WorkbenchError

Kind = Literal["code", "prose"]
Split = Literal["train", "heldout_code", "heldout_prose", "heldout_package"]

PACKAGES_FILE = Path(__file__).with_name("packages.toml")
SPLITS: tuple[Split, ...] = ("train", "heldout_code", "heldout_prose", "heldout_package")
KINDS: tuple[Kind, ...] = ("code", "prose")
SOURCES = ("stdlib", "wheel", "sdist", "debian", "folder")
MAX_FILE_BYTES = 256_000
MIN_FILE_BYTES = 64
HELDOUT_PER_10000 = 100
SHINGLE_LINES = 5
MAX_SHARED_WITH_HELDOUT = 0.20
MAX_SHARED_WITH_TRAIN = 0.50

# Wheels are asked for with one fixed target, so that every machine reads the same archive.
WHEEL_TARGET = (
    "--only-binary=:all:",
    "--python-version=3.13",
    "--implementation=cp",
    "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux_2_27_x86_64",
    "--platform=manylinux2014_x86_64",
)

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


class CorpusError(WorkbenchError):
    """The corpus cannot be built; the message says which package or setting is the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One source of text: see the head of packages.toml for what the fields mean."""

    name: str
    version: str
    license: str
    source: str
    kinds: tuple[Kind, ...]
    role: Literal["train", "heldout_package"] = "train"
    max_mb: float | None = None
    skip: tuple[str, ...] = ()
    folder: str | None = None


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


# --- the list of packages -----------------------------------------------------------------------


def load_packages(path: Path = PACKAGES_FILE) -> tuple[Package, ...]:
    """Reads a list of packages.

    Raises CorpusError for an unreadable file, an unknown field, source, kind or role, or a package
    named twice.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("package", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CorpusError(f"the package list {path} cannot be read: {error}") from error
    packages = []
    for entry in entries:
        name = entry.get("name", "?")
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
        }
        try:
            package = Package(**fields)
        except TypeError as error:
            raise CorpusError(f"package {name} in {path} has wrong fields: {error}") from error
        if package.source not in SOURCES:
            raise CorpusError(
                f"package {name} in {path} has the source {package.source!r}; "
                f"use one of {', '.join(SOURCES)}"
            )
        if not package.kinds or set(package.kinds) - set(KINDS):
            raise CorpusError(f"package {name} in {path} needs kinds out of code and prose")
        if package.role not in ("train", "heldout_package"):
            raise CorpusError(f"package {name} in {path} has the unknown role {package.role!r}")
        packages.append(package)
    twice = [name for name, n in Counter(p.name for p in packages).items() if n > 1]
    if twice:
        raise CorpusError(f"the package list {path} names {twice[0]} twice; keep one entry")
    return tuple(packages)


# --- archives -----------------------------------------------------------------------------------


def fetch(package: Package, downloads: Path) -> Path:
    """Returns the package's archive (or folder), downloading it unless it is there already.

    Raises CorpusError when the download fails.
    """
    if package.source == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    if package.source == "folder":
        folder = Path(package.folder or package.name)
        if not folder.is_dir():
            raise CorpusError(f"package {package.name} names the folder {folder}, which is not one")
        return folder
    version = package.version.replace(":", "_")
    home = downloads / f"{package.name}-{version}"
    if not home.is_dir():
        downloads.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{package.name}-", dir=downloads))
        try:
            _download(package, temporary)
            os.replace(temporary, home)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    archives = sorted(p for p in home.iterdir() if p.is_file())
    if len(archives) != 1:
        raise CorpusError(f"{home} should hold exactly one archive; delete the folder and rerun")
    return archives[0]


def _download(package: Package, into: Path) -> None:
    if package.source == "debian":
        command = ["apt-get", "download", "-qq", f"{package.name}={package.version}"]
    else:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--ignore-requires-python", "--dest", "."]
        command += WHEEL_TARGET if package.source == "wheel" else ["--no-binary", package.name]
        command.append(f"{package.name}=={package.version}")
    try:
        done = subprocess.run(command, cwd=into, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CorpusError(
            f"package {package.name} {package.version} needs the program {command[0]}, which "
            f"cannot be started here ({error}); leave the package out with --skip {package.name}"
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CorpusError(f"package {package.name} {package.version} was not downloaded: {last}")


def read_members(package: Package, archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yields (path, content) of the regular files worth a look, in the archive's order."""
    if archive.is_dir():
        for file in sorted(archive.rglob("*")):
            path = file.relative_to(archive).as_posix()
            if _wanted_suffix(path) and file.is_file() and not file.is_symlink():
                yield path, file.read_bytes()
    elif archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as bundle:
            for name in bundle.namelist():
                if _wanted_suffix(name):
                    yield _without_top(package, name), bundle.read(name)
    elif archive.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as tar,
        ):
            yield from _tar_members(package, tar)
        if process.returncode != 0:
            raise CorpusError(f"the archive {archive} is damaged; delete it and rerun")
    else:
        with tarfile.open(archive, mode="r:*") as tar:
            yield from _tar_members(package, tar)


def _tar_members(package: Package, tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        if member.isfile() and _wanted_suffix(member.name):
            handle = tar.extractfile(member)
            if handle is not None:
                yield _without_top(package, member.name), handle.read()


def _wanted_suffix(path: str) -> bool:
    return path.endswith((".py", ".rst", ".txt"))


def _without_top(package: Package, path: str) -> str:
    # A source archive has one folder named after the release at its top; a wheel does not.
    return path.split("/", 1)[-1] if package.source == "sdist" else path.removeprefix("./")


# --- filters ------------------------------------------------------------------------------------


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


# --- near-duplicates ----------------------------------------------------------------------------


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


# --- writing ------------------------------------------------------------------------------------


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


def _json_line(document: Document) -> bytes:
    record = {f: getattr(document, f) for f in ("package", "path", "kind", "text")}
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8")


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
    sha256 = write_whole(out / name, map(_json_line, documents))
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
