"""Files a user names: special files are left alone, and what cannot be read says why."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from workbench import files
from workbench.errors import WorkbenchError
from workbench.files import FileError, expand, read_json, read_text, write_whole


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to("real")
    for data in (b"new", b"newer"):  # dangling at first
        write_whole(link, data)
        assert (os.readlink(link), target.read_bytes()) == ("real", data)
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_device_is_written_into() -> None:
    master, slave = os.openpty()
    try:
        name = os.ttyname(slave)
        write_whole(name, b"hello")
        assert os.read(master, 16) == b"hello"
        assert stat.S_ISCHR(os.stat(name).st_mode)
    finally:
        os.close(master)
        os.close(slave)


def test_what_is_no_file_is_refused_and_kept(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    before = {path: path.lstat().st_ino for path in tmp_path.iterdir()}
    for name, says in (("pipe", "regular"), ("folder", "a folder"), ("a", "symbolic"), ("\0", "")):
        with pytest.raises(FileError, match=f"cannot be written.*{says}"):
            write_whole(tmp_path / name, b"data")
    assert {path: path.lstat().st_ino for path in tmp_path.iterdir()} == before


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    write_whole(tmp_path / ("n" * 255), b"data")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("n" * 255, b"data")]


def test_text_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LIMIT", 10)
    (tmp_path / "text").write_text("0123456789")
    assert read_text(tmp_path / "text") == "0123456789"
    for endless in (tmp_path / "more", Path("/dev/zero")):
        (tmp_path / "more").write_text("0123456789X")
        with pytest.raises(FileError, match="more than 10 bytes"):
            read_text(endless)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("{", "not valid JSON"),
        (None, "not a regular file"),
    ],
    ids=["deep", "long integer", "cut", "pipe"],
)
def test_json_that_cannot_be_parsed(text: str | None, says: str, tmp_path: Path) -> None:
    if text is None:
        os.mkfifo(tmp_path / "x.json")
    else:
        (tmp_path / "x.json").write_text(text)
    with pytest.raises(FileError, match=says):
        read_json(tmp_path / "x.json")


def test_home_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("~/x") == tmp_path / "x"
    wrong: list[Any] = ["~nosuchuser/x", None, 5, b"x"]
    for path in wrong:
        with pytest.raises(WorkbenchError, match=r"not known here|is not a path"):
            expand(path)
