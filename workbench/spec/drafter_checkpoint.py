"""A drafter's checkpoint in the engine's names: vLLM 0.33.0 loads what is written here.

A folder of its own with ``config.json`` and safetensors. The bundled target has its drafter beside
it (``model/zoo/NAME/dflash2``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from workbench.errors import CheckpointError, DraftError
from workbench.model.beam import Beam
from workbench.model.checkpoint import DTYPES, Header, opened, read_headers
from workbench.model.checkpoint_save import SINGLE_FILE, flush, replacing, write_text
from workbench.model.drafter_config import DFlash2Config, drafter_tensors
from workbench.model.presets import bundled_drafter, resolve_drafter
from workbench.spec.asked import first_line
from workbench.spec.drafter import Drafter, check_target

_PLAIN = {
    "fc.weight": "fc",
    "hidden_norm.weight": "hidden_norm",
    "norm.weight": "norm",
    "candidate_selector.predecessor_codebook": "selector.predecessor",
    "candidate_selector.successor_codebook": "selector.successor",
    "candidate_selector.hidden_projection.weight": "selector.projection",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "self_attn.o_proj.weight": "attention.o_proj",
    "self_attn.q_norm.weight": "attention.q_norm",
    "self_attn.k_norm.weight": "attention.k_norm",
    "mlp.down_proj.weight": "mlp.down",
    "attention_conv.base_kernel": "attention_conv.base",
    "attention_conv.kernel_projection.weight": "attention_conv.projection",
    "mlp_conv.base_kernel": "mlp_conv.base",
    "mlp_conv.kernel_projection.weight": "mlp_conv.projection",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stored tensor lies in the module: a parameter, and the rows of it."""

    parameter: str
    rows: slice


def places(config: DFlash2Config) -> Iterator[tuple[str, tuple[int, ...], Place]]:
    """(stored name, shape, place) of every tensor of a drafter."""
    q, kv, mlp = config.q_size, config.kv_size, config.intermediate_size
    packed = {
        "self_attn.q_proj.weight": ("attention.qkv", slice(0, q)),
        "self_attn.k_proj.weight": ("attention.qkv", slice(q, q + kv)),
        "self_attn.v_proj.weight": ("attention.qkv", slice(q + kv, q + 2 * kv)),
        "mlp.gate_proj.weight": ("mlp.gate_up", slice(0, mlp)),
        "mlp.up_proj.weight": ("mlp.gate_up", slice(mlp, 2 * mlp)),
    }
    for tensor in drafter_tensors(config):
        if tensor.layer is None:
            yield tensor.name, tensor.shape, Place(_PLAIN[tensor.name], slice(None))
            continue
        prefix = f"layers.{tensor.layer}."
        leaf = tensor.name.removeprefix(prefix)
        parameter, rows = packed.get(leaf) or (_IN_LAYER[leaf], slice(None))
        yield tensor.name, tensor.shape, Place(prefix + parameter, rows)


def load_drafter(target: Beam, drafter: str | Path | None = None) -> Drafter:
    """A drafter with its weights, of the target's device and dtype, ready to draft for it.

    Args:
        target: the model whose tokens are drafted; embedding and head are taken from it.
        drafter: a folder with ``config.json`` and safetensors; None for the one that is bundled
            with the target.

    Raises:
        DraftError: a field of the drafter does not go with the target, or none is bundled with it.
        ModelNotFoundError, ConfigError: there is no such folder, or its config is unusable.
        CheckpointError: files or tensors are missing, unknown, damaged, or of the wrong kind.
    """
    if not isinstance(target, Beam):
        raise DraftError(f"target must be a loaded model (load(...)), not {first_line(target)}")
    if drafter is None:
        folder = bundled_drafter(target.name)
        if folder is None:
            raise DraftError(
                f"no drafter is bundled with {target.name}; name the folder of one, or decode "
                "without a drafter"
            )
        resolved = resolve_drafter(folder)
    else:
        resolved = resolve_drafter(drafter)
    if resolved.folder is None:
        raise DraftError(
            f"{resolved.name} is known by its shape only and has no weights here; give the folder "
            "of its checkpoint"
        )
    check_target(resolved.config, target)
    # Before anything is made in the shape that the config claims: it may be far beyond any machine.
    headers = read_headers(resolved.folder)
    _check(resolved.config, headers, resolved.folder)
    with torch.device("meta"):
        made = Drafter(resolved.config, target)
    made.to_empty(device=target.device).to(target.dtype)
    _read(made, headers)
    made.name = resolved.name if drafter is not None else f"{target.name}-dflash2"
    made.pack()
    return made.eval()


def _check(config: DFlash2Config, headers: dict[str, Header], folder: Path) -> None:
    known = set()
    for name, shape, _ in places(config):
        known.add(name)
        if name not in headers:
            raise CheckpointError(f"tensor {name} is missing from the drafter in {folder}")
        header = headers[name]
        if header.shape != shape:
            raise CheckpointError(
                f"tensor {name} in {header.file} has shape {list(header.shape)}, but the drafter's "
                f"config needs {list(shape)}"
            )
        if header.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name} in {header.file} has dtype {header.dtype}; it must be "
                f"{' or '.join(DTYPES)}"
            )
    for name in headers:
        if name not in known:
            raise CheckpointError(
                f"tensor {name} in {headers[name].file} is unknown to the drafter's config; "
                "remove it"
            )


@torch.no_grad()
def _read(drafter: Drafter, headers: dict[str, Header]) -> None:
    parameters = dict(drafter.named_parameters())
    where = {name: place for name, _, place in places(drafter.config)}
    for file in dict.fromkeys(header.file for header in headers.values()):
        with opened(file) as tensors:
            for name, header in headers.items():
                if header.file != file:
                    continue
                region = parameters[where[name].parameter][where[name].rows]
                region.copy_(tensors.get_tensor(name))
                if not torch.isfinite(region).all():
                    raise CheckpointError(
                        f"tensor {name} in {file} has values that are NaN or infinite; the "
                        "checkpoint is damaged"
                    )


def stored_tensors(drafter: Drafter, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The drafter's tensors by the engine's names, on the CPU."""
    parameters: dict[str, nn.Parameter] = dict(drafter.named_parameters())
    return {
        name: parameters[place.parameter].detach()[place.rows].to("cpu", dtype).contiguous()
        for name, _, place in places(drafter.config)
    }


@torch.no_grad()
def save_drafter(
    drafter: Drafter, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write ``config.json`` and ``model.safetensors``, both or neither.

    Raises:
        CheckpointError: weights that are NaN or infinite, another dtype than bfloat16 or float32,
            or the folder cannot be written. The files there are then unchanged.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise CheckpointError(f"weights cannot be stored as {dtype}; use bfloat16 or float32")
    tensors = stored_tensors(drafter, dtype)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"tensor {name} has values that are NaN or infinite, so nothing was saved"
            )
    config = drafter.config.replace(
        extra={**drafter.config.extra, "torch_dtype": str(dtype).removeprefix("torch.")}
    )
    with replacing(Path(folder)) as scratch:
        with (scratch / SINGLE_FILE).open("wb") as stream:
            stream.write(to_bytes(tensors, metadata={"format": "pt"}))
            flush(stream)
        write_text(scratch / "config.json", config.to_json())
