"""Writing a checkpoint: streamed, and whole or not at all.

Everything is written to a hidden folder inside the target folder, flushed to the disk, and only
then moved into place. Whatever stops it before that (Ctrl-C, a full disk) leaves the old files as
they were; whatever stops the moving is undone.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import CheckpointError, WorkbenchError
from workbench.model.beam import Beam
from workbench.model.checkpoint_layout import Target, tensor_targets
from workbench.model.partial import PartialConfig
from workbench.model.presets import resolve
from workbench.model.quantisation import CONFIG_KEYS, MODELOPT_FILE
from workbench.model.tensors import TensorSpec, tensor_specs

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@torch.no_grad()
def save(
    beam: Beam,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int | None = None,
    tokenizer_folder: str | Path | None = None,
) -> None:
    """Write ``config.json``, the weights and the tokenizer's files; vLLM loads the result.

    Args:
        folder: made if absent. A checkpoint that is there is replaced; its superfluous shards, and
            what says of its weights that they are quantised, are removed; other files stay.
        dtype: of the stored tensors; routers are float32 always.
        shard_bytes: most bytes of tensors in a file (a single larger tensor has a file to itself);
            one file when None. With more than one file an index is written.
        tokenizer_folder: where the files of ``beam.tokenizer`` are; the folder that ``beam`` was
            loaded from when None. Without a tokenizer none are written.

    Raises:
        CheckpointError: no weights, not the whole model, NaN or infinite weights, no tokenizer
            files, or the folder cannot be written. The files there are then unchanged.
    """
    folder = Path(folder)
    _refuse(beam, dtype, shard_bytes)
    tokenizer = _tokenizer_files(beam, tokenizer_folder)
    files = _partition(beam, dtype, shard_bytes)
    targets = tensor_targets(beam.config)
    with replacing(folder) as scratch:
        for name, specs in files.items():
            _write_tensors(scratch / name, beam, targets, specs, dtype)
        if len(files) > 1:
            write_text(scratch / INDEX_FILE, _index(files, dtype))
        write_text(scratch / "config.json", _config(beam, dtype))
        for name, text in tokenizer.items():
            write_text(scratch / name, text)


def _refuse(beam: Beam, dtype: torch.dtype, shard_bytes: int | None) -> None:
    if beam.device.type == "meta":
        raise CheckpointError(f"{beam.name} is on the meta device and has no weights to save")
    if beam.shard.world > 1:
        raise CheckpointError(
            f"this is rank {beam.shard.rank} of {beam.shard.world} of {beam.name}; "
            "load the whole model to save it"
        )
    if isinstance(beam.config, PartialConfig):
        raise CheckpointError(
            f"this is {beam.name}, not a whole model, and an engine would take it for one; "
            "load the whole model to save it"
        )
    if dtype not in _NAMES:
        raise CheckpointError(f"weights cannot be stored as {dtype}; use bfloat16 or float32")
    if shard_bytes is not None and shard_bytes < 1:
        raise CheckpointError(f"shard_bytes must be at least 1, not {shard_bytes}")


def _tokenizer_files(beam: Beam, folder: str | Path | None) -> dict[str, str]:
    if beam.tokenizer is None:
        return {}
    try:
        source = resolve(beam.name).folder if folder is None else Path(folder)
        if source is None:
            raise FileNotFoundError(beam.name)
        return {name: (source / name).read_text(encoding="utf-8") for name in TOKENIZER_FILES}
    except (WorkbenchError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{' and '.join(TOKENIZER_FILES)} of {beam.name} are not where it was loaded from; "
            "name their folder as tokenizer_folder"
        ) from error


def _stored(spec: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if spec.fp32 else dtype


def _bytes(spec: TensorSpec, dtype: torch.dtype) -> int:
    return spec.size * _stored(spec, dtype).itemsize


def _partition(
    beam: Beam, dtype: torch.dtype, shard_bytes: int | None
) -> dict[str, list[TensorSpec]]:
    """Tensors of each file, in file order, by the file's name."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in tensor_specs(beam.config):
        size = _bytes(spec, dtype)
        if shard_bytes is not None and shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += size
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": specs
        for number, specs in enumerate(shards, 1)
    }


def _index(files: Mapping[str, list[TensorSpec]], dtype: torch.dtype) -> str:
    total = sum(_bytes(spec, dtype) for specs in files.values() for spec in specs)
    weight_map = {spec.name: file for file, specs in files.items() for spec in specs}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def _config(beam: Beam, dtype: torch.dtype) -> str:
    word = str(dtype).removeprefix("torch.")
    data: dict[str, Any] = beam.config.to_dict()
    for key in CONFIG_KEYS:  # of the files that the weights came from; these are plain
        data.pop(key, None)
    data["torch_dtype"] = word
    if "dtype" in data:  # the newer name of the same key
        data["dtype"] = word
    return json.dumps(data, indent=2) + "\n"


# -- one file -----------------------------------------------------------------------------------


def _write_tensors(
    file: Path,
    beam: Beam,
    targets: Mapping[str, Target],
    specs: list[TensorSpec],
    dtype: torch.dtype,
) -> None:
    """The safetensors layout: header length, JSON header, then the tensors one after another."""
    # Wide elements first: every tensor then starts at a multiple of its element size.
    ordered = sorted(specs, key=lambda spec: -_stored(spec, dtype).itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in ordered:
        end = offset + _bytes(spec, dtype)
        header[spec.name] = {
            "dtype": _NAMES[_stored(spec, dtype)],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    parameters = dict(beam.named_parameters())
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for spec in ordered:
            target = targets[spec.name]
            tensor = _stored_tensor(parameters[target.parameter], target, _stored(spec, dtype))
            if not torch.isfinite(torch.stack(torch.aminmax(tensor))).all():
                raise CheckpointError(
                    f"tensor {spec.name} has values that are NaN or infinite as "
                    f"{_NAMES[tensor.dtype]}, so nothing was saved"
                )
            stream.write(tensor.flatten().view(torch.uint8).numpy().data)
        flush(stream)


def _stored_tensor(parameter: Tensor, target: Target, dtype: torch.dtype) -> Tensor:
    tensor = parameter.detach()[target.region]
    tensor = tensor.transpose(-1, -2) if target.transposed else tensor
    return tensor.to(device="cpu", dtype=dtype).contiguous()


def write_text(file: Path, text: str) -> None:
    with file.open("wb") as stream:
        stream.write(text.encode())
        flush(stream)


def flush(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


# -- all files or none --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """One file of the folder: replaced by ``new`` (or removed when None), kept as ``old``."""

    final: Path
    new: Path | None
    old: Path


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A scratch folder whose files replace those of ``folder`` when the block succeeds."""
    created = [p for p in (folder, *folder.parents) if not p.exists()]
    # Named before it is made: an interrupt in between leaves nothing that has no name.
    scratch = folder / f".saving-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.mkdir(mode=0o700)
        yield scratch
        _replace(folder, scratch)
        created = []
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written ({error.strerror or error}); nothing there was changed"
        ) from error
    finally:
        _remove(scratch)
        for path in created:
            with suppress(OSError):  # never made, or somebody else's file is in it by now
                path.rmdir()


def _remove(scratch: Path) -> None:
    """Remove it even when an interrupt comes in the middle of that."""
    try:
        shutil.rmtree(scratch, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _replace(folder: Path, scratch: Path) -> None:
    new = {path.name: path for path in sorted(scratch.iterdir())}
    backup = scratch / "old"
    backup.mkdir()
    moves = [
        _Move(final=folder / name, new=new.get(name), old=backup / name)
        for name in sorted({*new, *_old_files(folder)})
    ]
    try:
        for move in moves:
            if move.final.exists():
                os.replace(move.final, move.old)
            if move.new is not None:
                os.replace(move.new, move.final)
        _flush_directory(folder)
    except BaseException:
        # What was done is read off the files, so an interrupt between two steps loses nothing.
        for move in reversed(moves):
            if move.old.exists():
                os.replace(move.old, move.final)
            elif move.new is not None and not move.new.exists():
                move.final.unlink(missing_ok=True)
        raise


def _old_files(folder: Path) -> set[str]:
    """What is there of another checkpoint and would be read together with the new one: its weight
    files, and the file by which an engine would take plain weights for quantised ones."""
    names = {path.name for path in folder.glob("model-*-of-*.safetensors")}
    names |= {SINGLE_FILE, MODELOPT_FILE}
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # no index, or none
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        names.update(name for name in index["weight_map"].values() if Path(name).name == name)
    return {name for name in (*names, INDEX_FILE) if (folder / name).exists()}


def _flush_directory(folder: Path) -> None:
    """Make renames durable, where a directory can be opened (not on Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
