"""Building the CUDA sources: for both architectures where nvcc is, and what goes wrong in words."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from pathlib import Path

import pytest

from workbench.errors import KernelError
from workbench.kernels.rank import cuda_build, persistent

try:
    NVCC: str | None = cuda_build.find_nvcc()
except KernelError:
    NVCC = None
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def fake_nvcc(folder: Path, body: str, version: str = "release 13.0") -> str:
    """A program that answers --version, and else runs ``body`` (sh; $OUT is the library)."""
    path = folder / "nvcc"
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n'
        f'echo "$@" >> {folder}/calls\n'
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && OUT=$2; shift; done\n' + body + "\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def calls(folder: Path) -> list[str]:
    """Command lines the fake compiler was called with."""
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


@needs_nvcc
@pytest.mark.parametrize(
    "architecture",
    [cuda_build.ARCHITECTURES[0]]
    + [pytest.param(each, marks=pytest.mark.full) for each in cuda_build.ARCHITECTURES[1:]],
)
def test_the_step_compiles(tmp_path: Path, architecture: str) -> None:
    path = cuda_build.build(architecture=architecture, folder=tmp_path)
    library = ctypes.CDLL(str(path))
    assert library.rank_params_size() == ctypes.sizeof(persistent._Params)
    assert library.rank_layer_size() == ctypes.sizeof(persistent._Layer)
    # 227 KiB is what a block of these architectures may have.
    assert 0 < library.rank_shared_bytes() <= 227 * 1024
    # A packed pair of outputs takes a word; a block's partials are six heads of 132 words.
    grow = library.rank_exchange_words(101) - library.rank_exchange_words(100)
    assert grow == 6 * 132
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing is left over


@needs_nvcc
def test_a_source_that_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"failed to compile step\.cu for sm_90a .*error"):
        cuda_build.build(folder=tmp_path, flags=("-DEMPTY=no such value",))
    assert list(tmp_path.iterdir()) == []


def test_a_second_build_is_read_from_the_cache(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, 'echo library > "$OUT"')
    folder = tmp_path / "cache"
    first = cuda_build.build(nvcc=nvcc, folder=folder)
    assert first.read_text() == "library\n"
    assert cuda_build.build(nvcc=nvcc, folder=folder) == first
    assert len(calls(tmp_path)) == 1
    command = calls(tmp_path)[0]
    assert "arch=compute_90a,code=sm_90a" in command
    assert str(cuda_build.SOURCES / "step.cu") in command


def test_what_a_library_came_from_is_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    nvcc = fake_nvcc(tmp_path, 'echo library > "$OUT"')
    names = {cuda_build.build(nvcc=nvcc, folder=folder).name}
    names.add(cuda_build.build(nvcc=nvcc, folder=folder, architecture="sm_100a").name)
    names.add(cuda_build.build(nvcc=nvcc, folder=folder, flags=("-DX=1",)).name)
    newer = fake_nvcc(tmp_path, 'echo library > "$OUT"', version="release 13.1")
    names.add(cuda_build.build(nvcc=newer, folder=folder).name)
    sources = tmp_path / "cuda"
    shutil.copytree(cuda_build.SOURCES, sources)
    header = sources / "shape.cuh"
    header.write_text(header.read_text() + "// changed\n")
    monkeypatch.setattr(cuda_build, "SOURCES", sources)
    names.add(cuda_build.build(nvcc=newer, folder=folder).name)
    assert len(names) == 5
    assert len(calls(tmp_path)) == 5


def test_a_failing_compiler_is_one_sentence(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, 'echo "step.cu(3): error: no luck" >&2; echo more >&2; exit 2')
    with pytest.raises(KernelError) as caught:
        cuda_build.build(nvcc=nvcc, folder=tmp_path / "cache")
    assert "exit code 2" in str(caught.value)
    assert "step.cu(3): error: no luck" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="left no library"):
        cuda_build.build(nvcc=fake_nvcc(tmp_path, "exit 0"), folder=tmp_path / "cache")


def test_no_compiler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(KernelError, match="needs nvcc, which is neither in") as caught:
        cuda_build.build(folder=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_the_compiler_of_cuda_home_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    wanted = fake_nvcc(tmp_path / "bin", "exit 0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda_build.find_nvcc() == wanted


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEAM_WORKBENCH_CACHE", str(tmp_path / "own"))
    assert cuda_build.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("BEAM_WORKBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cuda_build.cache_folder() == tmp_path / "beam-workbench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cuda_build.cache_folder() == tmp_path / "home" / ".cache" / "beam-workbench"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(KernelError, match="BEAM_WORKBENCH_CACHE"):
        cuda_build.build(nvcc=fake_nvcc(tmp_path, "exit 0"), folder=tmp_path / "cache")


def test_a_cache_where_a_file_is(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, 'echo library > "$OUT"')
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match="BEAM_WORKBENCH_CACHE"):
        cuda_build.build(nvcc=nvcc, folder=tmp_path / "file" / "cache")


def test_a_damaged_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = fake_nvcc(tmp_path, 'echo no library > "$OUT"')
    monkeypatch.setenv("BEAM_WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: nvcc)
    with pytest.raises(KernelError, match=r"cannot be loaded .* delete it"):
        cuda_build.load()
