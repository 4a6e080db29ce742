"""Checkpoints in Hugging Face names: read and written tensor by tensor through safetensors.

Reading looks at the headers of all files first (``checkpoint_read.py``), so that a wrong checkpoint
is refused before anything is allocated; then each slice goes from its file into its parameter, on
the target device, dequantised where it is stored in FP8 or NVFP4 (``quantised.py``). At no time is
there more in memory than the model and one tensor. A tensor-parallel rank reads its own slices
only, a part of a model (``partial.py``) its own layers. Writing is in ``checkpoint_save.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from workbench.errors import CheckpointError
from workbench.files import expand
from workbench.model.beam import Beam
from workbench.model.checkpoint_layout import (
    Target,
    float32_parameters,
    fused_tensors,
    tensor_targets,
)
from workbench.model.checkpoint_read import Header, opened, read_headers, read_part
from workbench.model.checkpoint_save import save
from workbench.model.config import BeamConfig
from workbench.model.parallel import Shard
from workbench.model.partial import PartialConfig, take_layers
from workbench.model.presets import known_models, resolve
from workbench.model.quantisation import CONFIG_KEYS, read_quantisation
from workbench.model.quantised import Weight, find_weight
from workbench.model.tensors import TensorSpec, tensor_specs
from workbench.model.tokenizer import Tokenizer

__all__ = ["DTYPES", "Header", "load", "load_into", "opened", "read_headers", "save"]

DTYPES = ("BF16", "F16", "F32")  # of ordinary tensors; routers have to be F32
_QUANTISABLE = ("attention", "dense_mlp", "experts", "head")  # parts with linear layers

Progress = Callable[[int, int], None]


def load(
    model: str | Path = "beam-tiny",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    shard: Shard | None = None,
    layers: Iterable[int] | None = None,
    check_finite: bool = True,
    progress: Progress | None = None,
) -> Beam:
    """A Beam with its weights, ready for inference.

    Weights that the folder stores in FP8 or NVFP4 are dequantised; see
    :mod:`workbench.model.quantised` for what is supported.

    Args:
        model: a bundled checkpoint, or a folder with ``config.json`` and safetensors.
        device: where the weights go; the CPU when None. ``"meta"`` reads no weights and allocates
            nothing: the shapes of any model, ``beam-501b`` included.
        dtype: of weights and activations: float32 on a CPU and bfloat16 elsewhere when None.
            Routers are float32 always.
        shard: the tensor-parallel rank to read; the whole model when None.
        layers: some layers only, such as ``[0, 3, 51]``, between the embedding and the head: for
            study, from a checkpoint of any size. Files without anything of them need not be there.
            See :mod:`workbench.model.partial`.
        check_finite: refuse weights that are NaN or infinite.
        progress: told after each tensor how many bytes of the model are filled, of how many.

    Raises:
        ModelNotFoundError, ConfigError: see :func:`workbench.model.presets.resolve`.
        ConfigError: the shard does not divide the model.
        CheckpointError: files or tensors are missing, unknown, damaged, or of the wrong kind; the
            way they are quantised is not supported; layers that the model does not have.
        TokenizerError: the folder has a damaged tokenizer.
    """
    resolved = resolve(model)
    where = target_device(device)
    dtype = target_dtype(dtype, where)
    config = _plain(resolved.config)
    name = resolved.name
    if layers is not None:
        if shard is not None:
            raise CheckpointError(
                "layers and shard do not go together: some layers are loaded whole; leave one out"
            )
        config = take_layers(config, layers)
        name = f"{config.words} of {name}"
    with torch.device("meta"):
        beam = Beam(config, shard)
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
        _read(beam, plan, check_finite, progress)
    beam.name = name
    if resolved.folder is not None and (resolved.folder / "tokenizer.json").exists():
        beam.tokenizer = Tokenizer.from_folder(resolved.folder)
    return beam.eval()


def load_into(beam: Beam, folder: str | Path, *, check_finite: bool = True) -> None:
    """Overwrite the weights of ``beam`` with those in ``folder``; dtype and device stay.

    Of the folder's ``config.json`` only the ``quantization_config`` is read. Headers are checked
    before the first write; should reading fail after that (a NaN, a failing disk), the weights are
    partly overwritten.

    Raises:
        ConfigError: the folder's ``config.json`` cannot be read.
        CheckpointError: files or tensors are missing, unknown, damaged, or of the wrong kind.
    """
    if beam.device.type == "meta":
        raise CheckpointError(
            f"{beam.name} is on the meta device and has no memory to read into; use load()"
        )
    _read(beam, _plan(beam, expand(folder)), check_finite, None)


# -- where and how ------------------------------------------------------------------------------


def _plain(config: BeamConfig) -> BeamConfig:
    """The config of the weights in memory, which are not quantised whatever the files were."""
    if not any(key in config.extra for key in CONFIG_KEYS):
        return config
    return config.replace(
        extra={key: value for key, value in config.extra.items() if key not in CONFIG_KEYS}
    )


def target_device(device: torch.device | str | None) -> torch.device:
    """The device that :func:`load` takes an argument for; CheckpointError where there is none."""
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


def target_dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of :func:`load`'s weights; CheckpointError for one that is not computed in."""
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


# -- what to read -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """One slice to read: where it lies, how it is decoded (None: as it is), where it goes."""

    stored: Header
    name: str  # the plain tensor's name: the stored one, or one expert of a fused tensor
    target: Target
    weight: Weight | None


class _Planner:
    """Finds the stored form of each tensor, and keeps account of what is used."""

    def __init__(self, folder: Path, headers: dict[str, Header]) -> None:
        self.folder, self.headers = folder, headers
        self.quantisation = read_quantisation(folder)
        self.used: set[str] = set()

    def find(
        self, name: str, shape: tuple[int, ...], *, fp32: bool = False, linear: bool = False
    ) -> tuple[Header, Weight | None] | None:
        """The tensor's header and how it is decoded; None when it is not there."""
        if linear and self.quantisation is not None:
            weight = find_weight(self.quantisation, self.headers, name, shape)
            if weight is not None:
                self.used.update(header.name for header in weight.tensors)
                return weight.codes, weight
        header = self.headers.get(name)
        if header is None:
            return None
        allowed = ("F32",) if fp32 else DTYPES
        if header.dtype not in allowed:
            hint = ""
            if linear and self.quantisation is None and header.dtype in ("F8_E4M3", "U8"):
                hint = ", or config.json must say in quantization_config what it means"
            raise CheckpointError(
                f"tensor {name} in {header.file} has dtype {header.dtype}; "
                f"it must be {' or '.join(allowed)}{hint}"
            )
        if header.shape != shape:
            raise CheckpointError(
                f"tensor {name} in {header.file} has shape {list(header.shape)}, but the config "
                f"needs {list(shape)}"
            )
        self.used.add(name)
        return header, None

    def expected(self, name: str) -> bool:
        """Whether a tensor that was not used may be there all the same."""
        return self.quantisation is not None and self.quantisation.bystander(name)


def _plan(beam: Beam, folder: Path) -> list[_Copy]:
    """What to copy, in the files' order, once the headers prove that it is all there and fits."""
    config = beam.config
    wanted = config.wants if isinstance(config, PartialConfig) else None
    planner = _Planner(folder, read_headers(folder, wanted))
    targets = tensor_targets(config, beam.shard)
    plan: list[_Copy] = []
    fused_parts: set[str] = set()
    for fused_name, fused in fused_tensors(config, targets):
        found = planner.find(fused_name, fused.shape, linear=True)
        if found is not None:
            fused_parts.update(fused.parts)
            plan += [
                _Copy(stored=found[0], name=name, target=target, weight=found[1])
                for name, target in fused.parts.items()
            ]
    for spec in tensor_specs(config):
        if spec.name in fused_parts:
            continue  # a separate copy, should there be one, is reported as unknown below
        found = planner.find(spec.name, spec.shape, fp32=spec.fp32, linear=_is_linear(spec))
        if found is None:
            raise CheckpointError(
                f"tensor {spec.name} is missing from {folder}: none of its weight files holds it"
            )
        target = targets[spec.name]
        plan.append(_Copy(stored=found[0], name=spec.name, target=target, weight=found[1]))
    for name, header in planner.headers.items():
        if name in planner.used or planner.expected(name) or (wanted and not wanted(name)):
            continue
        why = "is there a second time" if name in fused_parts else "is unknown to the config"
        raise CheckpointError(f"tensor {name} in {header.file} {why}; remove it")
    return sorted(plan, key=lambda copy: (copy.stored.file, copy.stored.start))


def _is_linear(spec: TensorSpec) -> bool:
    return spec.part in _QUANTISABLE and spec.name.endswith(".weight")


# -- weights ------------------------------------------------------------------------------------


@torch.no_grad()
def _read(beam: Beam, plan: list[_Copy], check_finite: bool, progress: Progress | None) -> None:
    parameters = dict(beam.named_parameters())
    total = sum(parameter.nbytes for parameter in parameters.values())
    done = 0
    for copy in plan:
        region = _copy(copy, parameters[copy.target.parameter], check_finite)
        done += region.nbytes
        if progress is not None:
            progress(done, total)
    beam.pack()


def _copy(copy: _Copy, parameter: Tensor, check_finite: bool) -> Tensor:
    """Fill the copy's region of the parameter; gives that region."""
    region = parameter[copy.target.region]
    goal = region.transpose(-1, -2) if copy.target.transposed else region
    if copy.weight is None:
        goal.copy_(read_part(copy.stored, copy.target.source))
    else:
        expert = tuple(at for at in copy.target.source if isinstance(at, int))
        cuts = [at for at in copy.target.source if isinstance(at, slice)]
        columns = cuts[1] if len(cuts) > 1 else slice(None)
        first = 0
        for values in copy.weight.rows(expert, cuts[0], region.device):
            goal[first : first + values.shape[0]] = values[:, columns]
            first += values.shape[0]
    # On the copy, not the source: float32 -> float16 may overflow, and a GPU checks faster.
    # The extremes of a tensor with a NaN are NaN, and they need no memory of its size.
    if check_finite and not torch.isfinite(torch.stack(torch.aminmax(region))).all():
        raise CheckpointError(
            f"tensor {copy.name} in {copy.stored.file} has values that are NaN or infinite in "
            f"{str(region.dtype).removeprefix('torch.')}; the checkpoint is damaged"
        )
    return region
