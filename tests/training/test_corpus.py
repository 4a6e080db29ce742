"""The corpus builder and the tokenizer's training, on tiny packages and without a network."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from workbench.model.tokenizer import Tokenizer
from workbench.training import bpe, corpus, filters
from workbench.training.documents import SPLITS, CorpusError, Document, read_split
from workbench.training.sources import Package, load_packages


def code(seed: str, lines: int = 40) -> str:
    """Python-looking text whose lines no other seed shares."""
    draw = random.Random(seed)
    return "".join(f"value_{draw.randrange(10**9)} = compute(argument)\n" for _ in range(lines))


def is_held_out(key: str) -> bool:
    """The rule of the hold-out, written a second time: first 16 hex digits, modulo 10 000."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) % 10_000 < 100


def path_that(held_out: bool, package: str, suffix: str = ".py", folder: str = "") -> str:
    paths = (f"{folder}module_{n}{suffix}" for n in range(5000))
    return next(path for path in paths if is_held_out(f"{package}/{path}") is held_out)


def folder_package(root: Path, name: str, files: dict[str, str | bytes], **fields) -> Package:
    folder = root / name
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode())
    fields = {"license": "MIT", "kinds": ("code", "prose"), **fields}
    return Package(name=name, version="1.0", source="folder", folder=str(folder), **fields)


def paths(out: Path, split: str) -> list[str]:
    return [document.key for document in read_split(out, split)]


def test_the_hash_split_is_fixed_for_good():
    # Known in advance (sha256sum of the key): a change of the rule would leak held-out text.
    held = [n for n in range(400) if corpus.held_out_by_hash(f"pkg/module_{n}.py")]
    assert held == HELD_OUT_OF_400
    share = sum(corpus.held_out_by_hash(f"pkg/module_{n}.py") for n in range(20_000)) / 20_000
    assert 0.008 < share < 0.012


HELD_OUT_OF_400 = [91, 105, 156, 185, 222, 263, 264, 303]


def test_split_and_roles(tmp_path):
    held, kept = path_that(True, "a"), path_that(False, "a")
    prose = path_that(True, "a", ".rst")
    package = folder_package(tmp_path, "a", {held: code("1"), kept: code("2"), prose: code("3")})
    whole = folder_package(tmp_path, "b", {"x.py": code("4")}, role="heldout_package")
    report = corpus.build_corpus(tmp_path / "out", packages=[package, whole], progress=False)
    assert paths(tmp_path / "out", "train") == [f"a/{kept}"]
    assert paths(tmp_path / "out", "heldout_code") == [f"a/{held}"]
    assert paths(tmp_path / "out", "heldout_prose") == [f"a/{prose}"]
    assert paths(tmp_path / "out", "heldout_package") == ["b/x.py"]
    assert report.splits["train"].bytes == len(code("2").encode())
    assert report.packages[0].files == {"train": 1, "heldout_code": 1, "heldout_prose": 1}
    assert report.packages[0].license == "MIT"


@pytest.mark.parametrize(("shared_lines", "kept"), [(0, True), (10, True), (13, False)])
def test_training_text_that_shares_a_fifth_with_held_out_text_is_dropped(
    tmp_path, shared_lines, kept
):
    # 40 lines make 36 shingles of five lines; n shared lines at the start share n - 4 of them:
    # 6 of 36 is below a fifth, 9 of 36 above.
    held, train = path_that(True, "a"), path_that(False, "a")
    original = code("original")
    copy = original.splitlines(keepends=True)[:shared_lines]
    text = "".join(copy) + code("other", 40 - shared_lines)
    # Indentation and blank lines must not hide a copy.
    disguised = text.replace("value", "    value").replace("\n", "\n\n")
    package = folder_package(tmp_path, "a", {held: original, train: disguised})
    report = corpus.build_corpus(tmp_path / "out", packages=[package], progress=False)
    assert (f"a/{train}" in paths(tmp_path / "out", "train")) is kept
    assert report.dropped.get("duplicate_of_heldout", 0) == (not kept)


def test_copies_within_training_and_within_held_out_text_are_dropped(tmp_path):
    first, second = path_that(False, "a"), path_that(False, "b")
    packages = [
        folder_package(tmp_path, "a", {first: code("same")}),
        folder_package(tmp_path, "b", {second: code("same"), "sub/" + second: code("new")}),
        folder_package(tmp_path, "c", {"x.py": code("whole")}, role="heldout_package"),
        folder_package(tmp_path, "d", {path_that(True, "d"): code("whole") + "last_line = 1\n"}),
    ]
    report = corpus.build_corpus(tmp_path / "out", packages=packages, progress=False)
    assert f"b/{second}" not in paths(tmp_path / "out", "train")
    assert f"a/{first}" in paths(tmp_path / "out", "train")
    assert paths(tmp_path / "out", "heldout_package") == ["c/x.py"]
    assert paths(tmp_path / "out", "heldout_code") == []
    assert report.dropped == {"duplicate_within_heldout": 1, "duplicate_within_train": 1}


def test_what_is_left_out_and_why(tmp_path):
    files = {
        "a/_vendor/lib.py": code("v1"),
        "a/externals/lib.py": code("v2"),
        "a/tests/helper.py": code("t1"),
        "a/test_thing.py": code("t2"),
        "a/big.py": code("big", 8000),
        "a/small.py": "x = 1\n",
        "a/latin.py": code("l").encode() + b"# \xe9\n",
        "a/made.py": "# This file was automatically generated.\n" + code("g"),
        "a/table.py": "t = [" + "0x1f, " * 300 + "]\n",
        "a/notes.txt": code("n"),
        "docs/guide.txt": code("g2"),
        "skipped/a.py": code("s"),
        "a/good.py": code("ok"),
    }
    package = folder_package(tmp_path, "p", files, skip=("skipped/",))
    report = corpus.build_corpus(tmp_path / "out", packages=[package], progress=False)
    assert report.dropped == {
        "vendored": 2,
        "test": 2,
        "too_large": 1,
        "too_small": 1,
        "not_utf8": 1,
        "generated": 1,
        "data": 1,
        "other_kind": 1,
        "skipped": 1,
    }
    assert paths(tmp_path / "out", "train") == ["p/a/good.py", "p/docs/guide.txt"]


def test_licence_header_and_line_ends_are_cleaned():
    text = (
        "\ufeff#!/usr/bin/env python\n# Copyright 2020 A. Body\r\n# Licence: MIT\r\n\r\nx = 1\r\n"
    )
    assert filters.clean(text, "code") == "x = 1\n"
    kept = "# How this works: first a, then b.\nx = 1\n"
    assert filters.clean(kept, "code") == kept


def test_cap_keeps_the_same_files_whatever_their_order(tmp_path):
    package = Package(
        name="a", version="1", license="MIT", source="wheel", kinds=("code",), max_mb=0.005
    )
    documents = [
        Document(package="a", path=f"{n}.py", kind="code", text=code(str(n))) for n in range(20)
    ]
    kept, over = corpus.cap(package, documents)
    assert 0 < sum(len(d.text) for d in kept) <= 5000
    assert over == 20 - len(kept) > 0
    assert {d.key for d in corpus.cap(package, documents[::-1])[0]} == {d.key for d in kept}


def add_sdist(folder: Path, name: str, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as tar:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{name}/{path}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo(f"{name}/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)


def test_archives_that_are_there_are_read_and_not_fetched_again(tmp_path, monkeypatch):
    downloads = tmp_path / "out" / "downloads"
    add_sdist(downloads / "s-1.0", "s-1.0", {"src/s/a.py": code("s")})
    (downloads / "w-2.0").mkdir()
    with zipfile.ZipFile(downloads / "w-2.0" / "w-2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("w/a.py", code("w"))
        wheel.writestr("w-2.0.dist-info/notes.py", code("d"))

    def no_program(*arguments, **keywords):
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr(subprocess, "run", no_program)
    packages = [
        Package(name=n, version=v, license="MIT", source=s, kinds=("code",))
        for n, v, s in (("s", "1.0", "sdist"), ("w", "2.0", "wheel"))
    ]
    report = corpus.build_corpus(tmp_path / "out", packages=packages, progress=False)
    assert paths(tmp_path / "out", "train") == ["s/src/s/a.py", "w/w/a.py"]
    archive = downloads / "s-1.0" / "s-1.0.tar.gz"
    assert report.packages[0].archive_sha256 == hashlib.sha256(archive.read_bytes()).hexdigest()


def test_a_failed_download_leaves_nothing_and_is_said_in_one_sentence(tmp_path, monkeypatch):
    def fails(command, *, cwd, **keywords):
        (Path(cwd) / "half.whl").write_bytes(b"half")
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no such version\n")

    monkeypatch.setattr(subprocess, "run", fails)
    package = Package(name="x", version="9", license="MIT", source="wheel", kinds=("code",))
    with pytest.raises(CorpusError, match=r"x 9 was not downloaded: ERROR: no such version"):
        corpus.build_corpus(tmp_path / "out", packages=[package], progress=False)
    assert list((tmp_path / "out" / "downloads").iterdir()) == []
    assert not (tmp_path / "out" / "corpus.json").exists()


def test_build_is_deterministic_and_its_hashes_are_those_of_the_files(tmp_path):
    files = {f"m{n}.py": code(str(n)) for n in range(30)}
    package = folder_package(tmp_path, "a", files)
    one = corpus.build_corpus(tmp_path / "one", packages=[package], progress=False)
    two = corpus.build_corpus(tmp_path / "two", packages=[package], progress=False)
    assert one == two
    for split in SPLITS:
        data = (tmp_path / "one" / f"{split}.jsonl").read_bytes()
        assert one.splits[split].sha256 == hashlib.sha256(data).hexdigest()
    saved = json.loads((tmp_path / "one" / "corpus.json").read_text())
    assert saved["splits"]["train"]["files"] == len(paths(tmp_path / "one", "train"))
    records = [json.loads(x) for x in (tmp_path / "one" / "train.jsonl").read_text().splitlines()]
    assert all(set(r) == {"package", "path", "kind", "text"} for r in records)
    assert all(r["text"] == files[r["path"]] for r in records)


def test_the_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    package = folder_package(tmp_path, "a", {path_that(False, "a"): code("1")})
    out = tmp_path / "out"
    corpus.build_corpus(out, packages=[package], progress=False)
    before = (out / "corpus.json").read_bytes()

    real = corpus.write_whole

    def disk_full(path, chunks):
        def some(chunks):
            yield b"{ half"
            raise OSError(28, "No space left on device")

        return real(path, some(chunks) if path.name == "corpus.json" else chunks)

    monkeypatch.setattr(corpus, "write_whole", disk_full)
    with pytest.raises(OSError, match="No space left"):
        corpus.build_corpus(out, packages=[package], progress=False)
    assert (out / "corpus.json").read_bytes() == before
    assert not [p for p in out.iterdir() if p.name.startswith(".")]


def test_the_shipped_list_is_exact_and_permissive():
    packages = load_packages()
    assert [p.name for p in packages if p.role == "heldout_package"] == ["networkx"]
    permissive = {"PSF-2.0", "Python-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0"}
    permissive |= {"0BSD", "Zlib", "CC0-1.0", "LicenseRef-Public-Domain"}
    for package in packages:
        # "OR" lets us choose one of the licences; "AND" binds us to all of them.
        choices = [set(choice.split(" AND ")) for choice in package.license.split(" OR ")]
        assert any(choice <= permissive for choice in choices), package.name
        assert package.version == "running" or package.version[0].isdigit(), package.name
        assert not set("<>*~^") & set(package.version), package.name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("package = 3 =", "cannot be read"),
        ('[[package]]\nname = "a"\n', "package a .* wrong fields"),
        (
            '[[package]]\nname = "a"\nversion = "1"\nlicense = "MIT"\nsource = "ftp"\n'
            'kinds = ["code"]\n',
            "source 'ftp'",
        ),
        (
            '[[package]]\nname = "a"\nversion = "1"\nlicense = "MIT"\nsource = "wheel"\n'
            'kinds = ["poem"]\n',
            "kinds",
        ),
        (
            2 * '[[package]]\nname = "a"\nversion = "1"\nlicense = "MIT"\nsource = "wheel"\n'
            'kinds = ["code"]\n',
            "names a twice",
        ),
    ],
)
def test_a_wrong_package_list_is_named(tmp_path, text, message):
    file = tmp_path / "packages.toml"
    file.write_text(text)
    with pytest.raises(CorpusError, match=message):
        load_packages(file)


def test_command_line(tmp_path, capsys):
    package = folder_package(tmp_path, "a", {path_that(False, "a"): code("1")})
    listed = tmp_path / "packages.toml"
    listed.write_text(
        '[[package]]\nname = "a"\nversion = "1.0"\nlicense = "MIT"\nsource = "folder"\n'
        f'kinds = ["code"]\nfolder = {json.dumps(package.folder)}\n'
    )
    arguments = ["--out", str(tmp_path / "out"), "--packages", str(listed)]
    assert corpus.main(arguments) == 0
    assert "train: 1 files" in capsys.readouterr().err
    assert corpus.main([*arguments, "--skip", "b"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no package 'b'" in error
    with pytest.raises(CorpusError, match="build the corpus first"):
        list(read_split(tmp_path / "nowhere", "train"))


def test_import_is_light():
    heavy = {"numpy", "pandas", "plotly", "torch", "tokenizers", "transformers"}
    program = (
        "import sys, workbench.training.corpus, workbench.training.bpe, workbench.model.tokenizer\n"
        f"print(sorted(set(sys.modules) & {heavy!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# --- training of the tokenizer ------------------------------------------------------------------


def documents(count: int = 40) -> list[Document]:
    return [
        Document(
            package="a",
            path=f"{n}.py",
            kind="code" if n % 4 else "prose",
            text=f"def function_{n}(x):\n    return '<think>', x + {n * 37}\n" + code(str(n)),
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    definition = bpe.train_tokenizer([d.text for d in documents()], vocab_size=300)
    return bpe.write_tokenizer(tmp_path_factory.mktemp("tokenizer"), definition)


def test_training_gives_the_asked_vocabulary_specials_first_all_bytes_next(tokenizer):
    assert tokenizer.vocab_size == 300
    assert [tokenizer.markers[t] for t in bpe.SPECIAL_TOKENS] == list(range(16))
    assert {tokenizer.token_bytes(i) for i in range(16, 272)} == {bytes([b]) for b in range(256)}
    assert all(len(tokenizer.token_bytes(i)) >= 2 for i in range(272, 300))
    again = bpe.train_tokenizer([d.text for d in documents()], vocab_size=300)
    assert json.loads(again)["model"]["vocab"] == tokenizer_vocab(tokenizer)
    with pytest.raises(CorpusError, match="train on more text"):
        bpe.train_tokenizer(["abc"], vocab_size=300)


def tokenizer_vocab(tokenizer: Tokenizer) -> dict[str, int]:
    return dict(tokenizer._markers_on.get_vocab(with_added_tokens=True))


def test_sample_is_deterministic_mixed_and_bounded():
    drawn = bpe.sample(documents(), limit_bytes=20_000)
    assert drawn == bpe.sample(documents(), limit_bytes=20_000)
    largest = max(len(d.text) for d in documents())
    assert 20_000 <= sum(map(len, drawn)) <= 20_000 + largest


def test_token_file_holds_every_document_between_bos_and_eos(tokenizer, tmp_path):
    report = bpe.write_tokens(tokenizer, documents(), tmp_path / "t.u16")
    data = (tmp_path / "t.u16").read_bytes()
    ids = np.frombuffer(data, dtype="<u2")
    assert (
        report.tokens == len(ids) == report.tokens_by_kind["code"] + report.tokens_by_kind["prose"]
    )
    assert report.sha256 == hashlib.sha256(data).hexdigest()
    assert ids[0] == tokenizer.bos_id
    assert ids[-1] == tokenizer.eos_id
    # The texts contain "<think>": only bos and eos may be markers all the same.
    assert set(ids[ids < 16].tolist()) == {tokenizer.bos_id, tokenizer.eos_id}
    ends = np.flatnonzero(ids == tokenizer.eos_id)
    starts = np.concatenate([[0], ends[:-1] + 1])
    texts = [tokenizer.decode(ids[a + 1 : b].tolist()) for a, b in zip(starts, ends, strict=True)]
    assert sorted(texts) == sorted(d.text for d in documents())
    assert texts != [d.text for d in documents()], "the order is to be shuffled"
    assert report.bytes == sum(len(t.encode()) for t in texts)
    assert bpe.write_tokens(tokenizer, documents(), tmp_path / "u.u16").sha256 == report.sha256
    packed = bpe.compress(tmp_path / "t.u16", preset=0)
    assert lzma.decompress(packed.read_bytes()) == data
