"""What lies in the files of a checkpoint: headers first, then any part of any tensor.

A header is checked by safetensors (sizes, overlaps, the file's length) and says where each tensor's
bytes are; :func:`read_part` reads those of a part straight into memory of its own. Nothing is
mapped: a file may be larger than the machine's memory, and what is not asked for is never touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workbench.errors import CheckpointError
from workbench.files import FileError, read_json
from workbench.model.checkpoint_layout import Index
from workbench.model.checkpoint_save import INDEX_FILE, SINGLE_FILE

# What read_part can give, by the word that stands in a header.
READABLE = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
_PIECE = 64 << 20  # bytes a read: Ctrl-C waits for one of them at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file's header says of one tensor; its bytes begin at ``start`` of the file.

    ``stamp`` tells the file that was looked at from one that takes its place later.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    stamp: tuple[int, ...]


def read_headers(folder: Path, wanted: Callable[[str], bool] | None = None) -> dict[str, Header]:
    """The headers of all tensors in a folder's weight files, by name.

    Args:
        wanted: opens only the files that the index names for a tensor of which this is true. The
            others need not be there; without an index there is one file, which is opened.

    Raises:
        CheckpointError: files are missing, damaged, or not what the index says.
    """
    files, index = _weight_files(folder, wanted)
    headers: dict[str, Header] = {}
    for file in files:
        for header in _file_headers(file):
            if header.name in headers:
                raise CheckpointError(
                    f"tensor {header.name} is in both {headers[header.name].file.name} and {file}; "
                    "remove one of them"
                )
            headers[header.name] = header
    opened_names = {file.name for file in files}
    for name, place in index.items():
        if place not in opened_names:
            continue
        if name not in headers or headers[name].file.name != place:
            raise CheckpointError(
                f"{folder / INDEX_FILE} places tensor {name} in {place}, which does not hold it; "
                "write the checkpoint again"
            )
    return headers


def read_part(header: Header, index: Index = ()) -> Tensor:
    """``tensor[index]`` on the CPU, in the stored dtype.

    Of the leading axes only what ``index`` names is read: whole numbers pick, the first slice cuts
    a run of rows. Further entries are applied to what was read.

    Raises:
        CheckpointError: the file cannot be read, or is another one than when its header was read.
    """
    dtype = READABLE[header.dtype]
    shape, rest, first = list(header.shape), list(index), 0
    while rest and isinstance(rest[0], int):
        first = first * shape.pop(0) + rest.pop(0)  # type: ignore[operator]
    first *= prod(shape)
    if rest and isinstance(rest[0], slice):
        begin, end, _ = rest.pop(0).indices(shape[0])  # type: ignore[union-attr]
        shape[0] = max(0, end - begin)
        first += begin * prod(shape[1:])
        rest.insert(0, slice(None))
    memory = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
    _fill(memory, header, header.start + first * dtype.itemsize)
    part: Tensor = memory.view(dtype).view(shape)
    return part[tuple(rest)] if rest else part


def _fill(memory: Tensor, header: Header, start: int) -> None:
    view, done = memory.numpy().data, 0
    try:
        with header.file.open("rb", buffering=0) as stream:
            stream.seek(start)
            while done < len(view):
                count = stream.readinto(view[done : done + _PIECE])
                if not count:
                    raise CheckpointError(
                        f"{header.file} ends inside tensor {header.name}; fetch it or write it "
                        "again"
                    )
                done += count
            if _stamp(stream) != header.stamp:
                raise CheckpointError(
                    f"{header.file} was changed while it was read; load it again once it is whole"
                )
    except OSError as error:
        raise CheckpointError(
            f"{header.file} cannot be read ({error.strerror or error}); fetch it or write it again"
        ) from error


def _stamp(stream: IO[bytes]) -> tuple[int, ...]:
    found = os.fstat(stream.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The file through safetensors, for torch; its errors in one sentence."""
    with _opened(file, "pt") as tensors:
        yield tensors


@contextmanager
def _opened(file: Path, framework: str) -> Iterator[Any]:
    try:
        with safe_open(file, framework=framework, device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or corrupt ({error}); fetch it or write it again"
        ) from error


def _file_headers(file: Path) -> list[Header]:
    # For numpy the file is mapped to be read only, which costs no memory however large it is; the
    # mapping that torch is given counts in full against what the machine may promise.
    with _opened(file, "numpy"), file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        described = json.loads(stream.read(length))
        stamp = _stamp(stream)
    described.pop("__metadata__", None)
    return [
        Header(
            name=name,
            file=file,
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
            start=8 + length + entry["data_offsets"][0],
            stamp=stamp,
        )
        for name, entry in described.items()
    ]


# -- which files --------------------------------------------------------------------------------


def _weight_files(
    folder: Path, wanted: Callable[[str], bool] | None
) -> tuple[list[Path], dict[str, str]]:
    """The files to open, and the index's map of tensor to file (empty without one)."""
    index = folder / INDEX_FILE
    if not index.exists():
        if (folder / SINGLE_FILE).exists():
            _check_regular(folder / SINGLE_FILE)
            return [folder / SINGLE_FILE], {}
        raise CheckpointError(
            f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
        )
    names = _weight_map(index)
    chosen = {tensor: file for tensor, file in names.items() if wanted is None or wanted(tensor)}
    # False for a name no file system can hold, too.
    absent = {tensor: file for tensor, file in chosen.items() if not os.path.exists(folder / file)}
    if absent:
        tensor, file = next(iter(absent.items()))
        fetch = "fetch the missing file or write the checkpoint again"
        if wanted is not None:
            fetch = f"fetch {_listed(sorted(set(absent.values())))}, which the chosen layers need"
        raise CheckpointError(f"{index} places {tensor} in {file}, which is not there; {fetch}")
    files = [folder / file for file in sorted(set(chosen.values()))]
    for path in files:
        _check_regular(path)
    return files, names


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json(index)["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except FileError as error:
        raise CheckpointError(f"{index} is not a readable index: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not a readable index with a weight_map; restore the file"
        ) from error
    if not names:
        raise CheckpointError(f"{index} has an empty weight_map; restore the file")
    for tensor, file in names.items():
        beside = Path(file).name == file and file.endswith(".safetensors")
        if not beside or not file.isprintable():
            raise CheckpointError(
                f"{index} places {tensor} in {file!r:.300}, which is not a safetensors file beside "
                "it"
            )
    return names


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _check_regular(file: Path) -> None:
    # Opening a pipe waits for a writer that may never come.
    if not file.is_file():
        raise CheckpointError(f"{file} is not a regular file; fetch it or write it again")
