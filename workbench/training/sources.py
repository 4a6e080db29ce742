"""Where the corpus comes from: the list of packages, their archives, the files inside them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workbench.training.documents import KINDS, CorpusError, Kind

PACKAGES_FILE = Path(__file__).with_name("packages.toml")
SOURCES = ("stdlib", "wheel", "sdist", "debian", "folder")

# Wheels are asked for with one fixed target, so that every machine reads the same archive.
WHEEL_TARGET = (
    "--only-binary=:all:",
    "--python-version=3.13",
    "--implementation=cp",
    "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux_2_27_x86_64",
    "--platform=manylinux2014_x86_64",
)


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
