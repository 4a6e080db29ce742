"""What a checkpoint says of its quantised weights: ``quantization_config``, read and checked.

Three ways of saying it are known: fp8 (as DeepSeek and transformers write it), modelopt, and
compressed-tensors. It stands in ``config.json``, with older ModelOpt in ``hf_quant_config.json``.
What is stored for one weight, and the values that it stands for, is in ``quantised.py``.

Sources: vLLM's ``model_executor/layers/quantization`` (fp8, modelopt, compressed_tensors).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from workbench.errors import CheckpointError
from workbench.files import read_json
from workbench.model.asked import shown
from workbench.model.config import is_int, read_config_json

Layout = Literal["block", "channel", "tensor"]

GROUP = 16  # inputs that share an E4M3 scale in NVFP4
BLOCK = (128, 128)
CONFIG_KEYS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"
SUPPORTED = (
    "supported are fp8 (E4M3 with scales of blocks, rows or tensors), modelopt (FP8, "
    "FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, or MIXED_PRECISION of these) and "
    "compressed-tensors (float-quantized with E4M3, nvfp4-pack-quantized)"
)

_FP8_ALGORITHMS: dict[str, Layout] = {
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "channel",
    "FP8_PB_WO": "block",
    "FP8_BLOCK_SCALES": "block",  # the same, by an earlier name
}
_NVFP4_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
_MIXED = "MIXED_PRECISION"
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
_NVFP4_FORMAT = "nvfp4-pack-quantized"

# Scales of activations and of the KV cache: an engine's business, no part of any weight.
_BYSTANDER = re.compile(
    r"[._](input_scale|input_global_scale|activation_scale|output_scale|prob_output_scale|"
    r"[kvq]_scale|[kvq]_zero_point|kv_scale|prob_scale|[kv]_cache\.scale|self_attn\.q\.scale)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """What a checkpoint says of its quantised weights.

    Attributes:
        method: fp8, modelopt or compressed-tensors.
        where: the file and key that says so.
        layouts: the scales that E4M3 weights may have; empty when there are none of them.
        block: rows and columns that share a scale in the layout ``block``.
        nvfp4: whether there are NVFP4 weights.
        ignored: names, wildcards or ``re:`` expressions of modules that are not quantised.
    """

    method: str
    where: str
    layouts: tuple[Layout, ...] = ()
    block: tuple[int, int] = BLOCK
    nvfp4: bool = False
    ignored: tuple[str, ...] = ()

    def ignores(self, module: str) -> bool:
        """Whether a module (``model.layers.0.self_attn.q_proj``) is listed as not quantised."""
        return any(_matches(entry, module) for entry in self.ignored)

    def bystander(self, tensor: str) -> bool:
        """Whether a stored tensor comes with quantised weights and is not needed for them."""
        return _BYSTANDER.search(tensor) is not None


def _matches(entry: str, module: str) -> bool:
    # Whole parts of the dotted name only: "gate", a router, must not take "gate_proj" with it.
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    if "*" in entry or "?" in entry:
        pattern = entry if entry.endswith(".*") else entry.removesuffix("*") or "*"
        return fnmatchcase(module, pattern) or fnmatchcase(module, pattern + ".*")
    return f".{entry}." in f".{module}."


# -- what the checkpoint says -------------------------------------------------------------------


def read_quantisation(folder: Path) -> Quantisation | None:
    """How the weights in ``folder`` are quantised; None when its files say nothing of it.

    Raises:
        CheckpointError: a method or format that is not supported, or an unusable description.
    """
    config = folder / "config.json"
    data = read_config_json(config) if config.exists() else {}
    older = folder / MODELOPT_FILE
    for key in CONFIG_KEYS:
        if data.get(key) is not None and not (_lacks_layers(data[key]) and older.exists()):
            return parse_quantisation(data[key], f"{key} in {config}")
    if not older.exists():
        return None
    described = read_json(older)
    if isinstance(described, Mapping):
        described = {"quant_method": "modelopt", **described}
    return parse_quantisation(described, str(older))


def parse_quantisation(described: Any, where: str) -> Quantisation:
    """A ``quantization_config`` read.

    Raises:
        CheckpointError: a method or format that is not supported, or an unusable description.
    """
    if not isinstance(described, Mapping):
        raise CheckpointError(f"{where} is {shown(described)}, not an object; restore the file")
    method = described.get("quant_method")
    if method == "fp8":
        return _fp8(described, where)
    if isinstance(method, str) and method.startswith("modelopt"):
        return _modelopt(described, where)
    if method == "compressed-tensors":
        return _compressed_tensors(described, where)
    raise CheckpointError(f"{where} has quant_method {shown(method)}; {SUPPORTED}")


def _fp8(described: Mapping[str, Any], where: str) -> Quantisation:
    number_format = described.get("fmt", "e4m3")
    if number_format != "e4m3":
        raise CheckpointError(f"{where} has fmt {shown(number_format)}; {SUPPORTED}")
    block = described.get("weight_block_size")
    ignored = described.get("ignored_layers") or described.get("modules_to_not_convert")
    return Quantisation(
        method="fp8",
        where=where,
        layouts=("channel", "tensor") if block is None else ("block",),
        block=BLOCK if block is None else _block(block, "weight_block_size", where),
        ignored=_names(ignored, where),
    )


def _modelopt(described: Mapping[str, Any], where: str) -> Quantisation:
    inner = described.get("quantization", described)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{where}: quantization is {shown(inner)}, not an object; restore it")
    if inner.get("quant_algo") is None:  # of the KV cache only
        return Quantisation(method="modelopt", where=where)
    entries: list[Mapping[str, Any]] = [inner]
    if _upper(inner["quant_algo"]) == _MIXED:
        layers = inner.get("quantized_layers")
        entries = list(layers.values()) if isinstance(layers, Mapping) else []
        if not entries or not all(isinstance(entry, Mapping) for entry in entries):
            raise CheckpointError(
                f"{where} has MIXED_PRECISION without a table quantized_layers; restore the file"
            )
    layouts: list[Layout] = []
    blocks: set[tuple[int, int]] = set()
    nvfp4 = False
    for entry in entries:
        word = _upper(entry.get("quant_algo"))
        layout = _FP8_ALGORITHMS.get(word) if isinstance(word, str) else None
        if word in _NVFP4_ALGORITHMS:
            nvfp4 = True
            _check_groups([entry.get("group_size")], where)
        elif layout is None:
            raise CheckpointError(f"{where} has quant_algo {shown(word)}; {SUPPORTED}")
        else:
            layouts.append(layout)
        if layout == "block":  # its group is the side of a block
            side = BLOCK[0] if entry is inner else _number(entry.get("group_size", BLOCK[0]))
            blocks.add(_block([side, side], "group_size", where))
    if nvfp4:
        _check_groups([inner.get("group_size")], where)
    if len(blocks) > 1:
        raise CheckpointError(f"{where} has blocks of several sizes; {SUPPORTED}")
    return Quantisation(
        method="modelopt",
        where=where,
        layouts=tuple(dict.fromkeys(layouts)),
        block=blocks.pop() if blocks else BLOCK,
        nvfp4=nvfp4,
        ignored=_names(inner.get("ignore") or inner.get("exclude_modules"), where),
    )


def _lacks_layers(described: Any) -> bool:
    """Whether ModelOpt's older file has to say which layer is quantised how."""
    return (
        isinstance(described, Mapping)
        and "quantization" not in described
        and _upper(described.get("quant_algo")) == _MIXED
        and "quantized_layers" not in described
    )


def _compressed_tensors(described: Mapping[str, Any], where: str) -> Quantisation:
    transforms = described.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise CheckpointError(
            f"{where} has a transform_config: its weights are rotated and not the model's own; "
            f"{SUPPORTED}"
        )
    sparsity = described.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise CheckpointError(
            f"{where} has sparse weights ({shown(sparsity['format'])}); {SUPPORTED}"
        )
    groups = described.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{where} has no config_groups; restore the file")
    layouts: list[Layout] = []
    blocks: set[tuple[int, int]] = set()
    nvfp4 = False
    for name, group in groups.items():
        here = f"{where}, {name}"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if weights is None and isinstance(group, Mapping):
            continue  # of activations only
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"{here} is not an object with weights; restore the file")
        form = group.get("format") or described.get("format")
        kind = (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True))
        strategy = weights.get("strategy")
        if form in _FLOAT_FORMATS and kind == ("float", 8, True):
            if strategy not in ("tensor", "channel", "block"):
                raise CheckpointError(f"{here} has strategy {shown(strategy)}; {SUPPORTED}")
            layouts.append(strategy)
            if strategy == "block":
                blocks.add(_block(weights.get("block_structure"), "block_structure", here))
        elif form == _NVFP4_FORMAT and kind == ("float", 4, True):
            _check_groups([weights.get("group_size")], here)
            nvfp4 = True
        else:
            raise CheckpointError(
                f"{here} has format {shown(form)} of {shown(weights.get('type'))} with "
                f"{shown(weights.get('num_bits'))} bits; {SUPPORTED}"
            )
    if len(blocks) > 1:
        raise CheckpointError(f"{where} has blocks of several sizes; {SUPPORTED}")
    return Quantisation(
        method="compressed-tensors",
        where=where,
        layouts=tuple(dict.fromkeys(layouts)),
        block=blocks.pop() if blocks else BLOCK,
        nvfp4=nvfp4,
        ignored=_names(described.get("ignore"), where),
    )


def _upper(word: Any) -> Any:
    return word.upper() if isinstance(word, str) else word


def _number(value: Any) -> Any:
    """A whole number, also where it was written as text."""
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 9 else value


def _block(value: Any, key: str, where: str) -> tuple[int, int]:
    if isinstance(value, list | tuple) and len(value) == 2:
        rows, columns = value
        if is_int(rows) and is_int(columns) and min(rows, columns) > 0:
            return rows, columns
    raise CheckpointError(
        f"{where} has {key} {shown(value)}; it must be two whole numbers, such as [128, 128]"
    )


def _check_groups(groups: Iterable[Any], where: str) -> None:
    for group in groups:
        if group is not None and _number(group) != GROUP:
            raise CheckpointError(
                f"{where} has group_size {shown(group)}; NVFP4 has a scale for each {GROUP} inputs"
            )


def _names(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(
            f"{where} lists the modules that are not quantised as {shown(value)}; it must be a "
            "list of names"
        )
    for name in value:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise CheckpointError(
                f"{where} lists {shown(name)}, which is no regular expression ({error})"
            ) from error
    return tuple(value)
