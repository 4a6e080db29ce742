"""Checkpoints in Hugging Face names: read and written tensor by tensor through safetensors.

Reading looks at the headers of all files first, so that a wrong checkpoint is refused before
anything is allocated; then each slice goes straight from the mapped file into its parameter, on the
target device. At no time is there more in memory than the model and the file being read. A
tensor-parallel rank reads its own slices only. Writing is in ``checkpoint_save.py``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from workbench.errors import CheckpointError
from workbench.files import FileError, expand, read_json
from workbench.model.beam import Beam
from workbench.model.checkpoint_layout import (
    Target,
    float32_parameters,
    fused_tensors,
    tensor_targets,
)
from workbench.model.checkpoint_save import INDEX_FILE, SINGLE_FILE, save
from workbench.model.parallel import Shard
from workbench.model.presets import known_models, resolve
from workbench.model.tensors import tensor_specs
from workbench.model.tokenizer import Tokenizer

__all__ = ["load", "load_into", "save"]

DTYPES = ("BF16", "F16", "F32")  # of ordinary tensors; routers have to be F32


def load(
    model: str | Path = "beam-tiny",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    shard: Shard | None = None,
    check_finite: bool = True,
) -> Beam:
    """A Beam with its weights, ready for inference.

    Args:
        model: a bundled checkpoint, or a folder with ``config.json`` and safetensors.
        device: where the weights go; the CPU when None. ``"meta"`` reads no weights and allocates
            nothing: the shapes of any model, ``beam-501b`` included.
        dtype: of weights and activations: float32 on a CPU and bfloat16 elsewhere when None.
            Routers are float32 always.
        shard: the tensor-parallel rank to read; the whole model when None.
        check_finite: refuse weights that are NaN or infinite.

    Raises:
        ModelNotFoundError, ConfigError: see :func:`workbench.model.presets.resolve`.
        ConfigError: the shard does not divide the model.
        CheckpointError: files or tensors are missing, unknown, damaged, or of the wrong kind.
        TokenizerError: the folder has a damaged tokenizer.
    """
    resolved = resolve(model)
    where = _device(device)
    dtype = _dtype(dtype, where)
    with torch.device("meta"):
        beam = Beam(resolved.config, shard)
    if where.type == "meta":
        _materialise(beam, where, dtype)
    elif resolved.folder is None:
        with_weights = [name for name in known_models() if name != resolved.name]
        raise CheckpointError(
            f"{resolved.name} is known by its shape only and has no weights here: give the folder "
            f"of its checkpoint, load a bundled model ({', '.join(with_weights) or 'none'}), "
            "or pass device='meta' for the shapes alone"
        )
    else:
        plan = _plan(beam, resolved.folder)
        _materialise(beam, where, dtype)
        _read(beam, plan, check_finite)
    beam.name = resolved.name
    if resolved.folder is not None and (resolved.folder / "tokenizer.json").exists():
        beam.tokenizer = Tokenizer.from_folder(resolved.folder)
    return beam.eval()


def load_into(beam: Beam, folder: str | Path, *, check_finite: bool = True) -> None:
    """Overwrite the weights of ``beam`` with those in ``folder``; dtype and device stay.

    The folder's ``config.json`` is not read. Headers are checked before the first write; should
    reading fail after that (a NaN, a failing disk), the weights are partly overwritten.

    Raises:
        CheckpointError: files or tensors are missing, unknown, damaged, or of the wrong kind.
    """
    if beam.device.type == "meta":
        raise CheckpointError(
            f"{beam.name} is on the meta device and has no memory to read into; use load()"
        )
    _read(beam, _plan(beam, expand(folder)), check_finite)


# -- where and how ------------------------------------------------------------------------------


def _device(device: torch.device | str | None) -> torch.device:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of types that are refused below
            where = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"device {device!r} does not exist; use 'cpu', 'cuda', 'cuda:1' or 'meta'"
        ) from error
    if where.type not in ("cpu", "cuda", "meta"):
        raise CheckpointError(f"device '{where}' is not supported; use 'cpu', 'cuda' or 'meta'")
    if where.type == "cpu" and where.index:
        raise CheckpointError(f"device '{where}' does not exist: there is one CPU; use 'cpu'")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise CheckpointError(
            f"device '{where}' is not there: torch sees {torch.cuda.device_count()} CUDA devices; "
            "use device='cpu'"
        )
    return where if where.type == "cuda" else torch.device(where.type)


def _dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"dtype {dtype} cannot be computed in; use float32 or bfloat16")
    return dtype


def _materialise(beam: Beam, device: torch.device, dtype: torch.dtype) -> None:
    """Replace meta parameters by uninitialised ones of ``device``, routers in float32."""
    fp32 = float32_parameters(beam.config)
    for name, parameter in list(beam.named_parameters()):
        module, _, leaf = name.rpartition(".")
        memory = torch.empty(
            parameter.shape, dtype=torch.float32 if name in fp32 else dtype, device=device
        )
        setattr(beam.get_submodule(module), leaf, nn.Parameter(memory, requires_grad=False))


# -- headers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file's header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """One slice to read: the stored tensor's name, and where it goes."""

    stored: str
    name: str  # the plain tensor's name: the stored one, or one expert of a fused tensor
    target: Target


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that hold weights, and the index's map of tensor to file (empty without one)."""
    index = folder / INDEX_FILE
    if not index.exists():
        if (folder / SINGLE_FILE).exists():
            _check_regular(folder / SINGLE_FILE)
            return [folder / SINGLE_FILE], {}
        raise CheckpointError(
            f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
        )
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
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} places {tensor} in {file!r}, which is not a safetensors file beside it"
            )
        if not os.path.exists(folder / file):  # false for a name no file system can hold, too
            raise CheckpointError(
                f"{index} places {tensor} in {file}, which is not there; "
                "fetch the missing file or write the checkpoint again"
            )
    files = [folder / file for file in sorted(set(names.values()))]
    for path in files:
        _check_regular(path)
    return files, names


def _check_regular(file: Path) -> None:
    # Opening a pipe waits for a writer that may never come.
    if not file.is_file():
        raise CheckpointError(f"{file} is not a regular file; fetch it or write it again")


def read_headers(folder: Path) -> dict[str, Header]:
    files, index = _weight_files(folder)
    headers: dict[str, Header] = {}
    for file in files:
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name in headers:
                    raise CheckpointError(
                        f"tensor {name} is in both {headers[name].file.name} and {file}; "
                        "remove one of them"
                    )
                view = tensors.get_slice(name)
                headers[name] = Header(
                    file=file, shape=tuple(view.get_shape()), dtype=view.get_dtype()
                )
    for name, place in index.items():
        if name not in headers or headers[name].file.name != place:
            raise CheckpointError(
                f"{folder / INDEX_FILE} places tensor {name} in {place}, which does not hold it; "
                "write the checkpoint again"
            )
    return headers


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is truncated or corrupt ({error}); fetch it or write it again"
        ) from error


def _plan(beam: Beam, folder: Path) -> dict[Path, list[_Copy]]:
    """What to copy out of each file, once the headers prove that it is all there and fits."""
    headers = read_headers(folder)
    targets = tensor_targets(beam.config, beam.shard)
    plan: dict[Path, list[_Copy]] = {}
    used: set[str] = set()

    def check(name: str, shape: tuple[int, ...], fp32: bool) -> Path:
        header = headers[name]
        if header.shape != shape:
            raise CheckpointError(
                f"tensor {name} in {header.file} has shape {list(header.shape)}, but the config "
                f"needs {list(shape)}"
            )
        allowed = ("F32",) if fp32 else DTYPES
        if header.dtype not in allowed:
            raise CheckpointError(
                f"tensor {name} in {header.file} has dtype {header.dtype}; "
                f"it must be {' or '.join(allowed)}"
            )
        used.add(name)
        return header.file

    fused_parts: set[str] = set()
    for fused_name, fused in fused_tensors(beam.config, targets):
        if fused_name in headers:
            file = check(fused_name, fused.shape, fp32=False)
            fused_parts.update(fused.parts)
            plan.setdefault(file, []).extend(
                _Copy(stored=fused_name, name=name, target=target)
                for name, target in fused.parts.items()
            )
    for spec in tensor_specs(beam.config):
        if spec.name in fused_parts:
            continue  # a separate copy, should there be one, is reported as unknown below
        if spec.name not in headers:
            raise CheckpointError(
                f"tensor {spec.name} is missing from {folder}: none of its weight files holds it"
            )
        file = check(spec.name, spec.shape, spec.fp32)
        copy = _Copy(stored=spec.name, name=spec.name, target=targets[spec.name])
        plan.setdefault(file, []).append(copy)
    for name, header in headers.items():
        if name in used:
            continue
        why = "is there a second time" if name in fused_parts else "is unknown to the config"
        raise CheckpointError(f"tensor {name} in {header.file} {why}; remove it")
    return plan


# -- weights ------------------------------------------------------------------------------------


@torch.no_grad()
def _read(beam: Beam, plan: Mapping[Path, list[_Copy]], check_finite: bool) -> None:
    parameters = dict(beam.named_parameters())
    for file, copies in plan.items():
        with opened(file) as tensors:  # one file is mapped at a time
            view, stored = None, ""
            for copy in copies:
                if view is None or copy.stored != stored:
                    view, stored = tensors.get_slice(copy.stored), copy.stored
                _copy(view, copy, parameters[copy.target.parameter], file, check_finite)
    beam.pack()


def _copy(view: Any, copy: _Copy, parameter: Tensor, file: Path, check_finite: bool) -> None:
    source: Tensor = view[copy.target.source]
    if copy.target.transposed:
        source = source.transpose(-1, -2)
    region = parameter[copy.target.region]
    region.copy_(source)
    # On the copy, not the source: float32 -> float16 may overflow, and a GPU checks faster.
    # The extremes of a tensor with a NaN are NaN, and they need no memory of its size.
    if check_finite and not torch.isfinite(torch.stack(torch.aminmax(region))).all():
        raise CheckpointError(
            f"tensor {copy.name} in {file} has values that are NaN or infinite in "
            f"{str(region.dtype).removeprefix('torch.')}; the checkpoint is damaged"
        )
