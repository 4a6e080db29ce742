"""In which precision a checkpoint stores its parts, for a plan: from its index and configuration.

The names of the tensors tell: a weight of FP8 or NVFP4 comes with scales. Where there are none to
look at, ``quantization_config`` is all there is. A part of which only some layers are quantised
counts as quantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from workbench.files import FileError, read_json
from workbench.model.config import BeamConfig
from workbench.model.hub import INDEX_FILE, SINGLE_FILE
from workbench.model.quantisation import Quantisation, read_quantisation
from workbench.model.weights import Precision, WeightDtype

_PARTS = {
    "attention": re.compile(r"\.self_attn\.\w+_proj"),
    "dense_mlp": re.compile(r"\.mlp\.(gate|up|gate_up|down)_proj"),
    "experts": re.compile(r"\.mlp\.experts\."),
}
_NVFP4 = re.compile(r"(weight_scale_2|weight_global_scale|weight_packed)$")
_FP8 = re.compile(r"_scale(_inv)?$")


def stored_precision(folder: Path, config: BeamConfig) -> Precision:
    """The precision of a checkpoint's parts, as its files say.

    Raises:
        ConfigError, CheckpointError: they cannot be read, or say something that is not supported.
    """
    quantisation = read_quantisation(folder)
    if quantisation is None:
        return Precision()
    names = _tensor_names(folder)
    if names:
        return _by_names([name for name in names if not quantisation.bystander(name)])
    return _by_config(quantisation, config)


def _tensor_names(folder: Path) -> tuple[str, ...]:
    with suppress(FileError, TypeError, KeyError):
        places = read_json(folder / INDEX_FILE)["weight_map"]
        if isinstance(places, dict):
            return tuple(places)
    if not (folder / SINGLE_FILE).is_file():
        return ()
    from workbench.model.checkpoint_read import read_headers

    return tuple(read_headers(folder))


def _by_names(names: Iterable[str]) -> Precision:
    found: dict[str, WeightDtype] = {}
    for name in names:
        for part, pattern in _PARTS.items():
            if not pattern.search(name):
                continue
            if _NVFP4.search(name):
                found[part] = "nvfp4"
            elif _FP8.search(name):
                found.setdefault(part, "fp8")
    return Precision(**found)


def _by_config(quantisation: Quantisation, config: BeamConfig) -> Precision:
    sparse = set(config.sparse_layers)
    dense = next((i for i in range(config.num_hidden_layers) if i not in sparse), 0)
    last = max(sparse, default=0)
    modules = {
        "attention": f"model.layers.{last}.self_attn.q_proj",
        "dense_mlp": f"model.layers.{dense}.mlp.gate_proj",
        "experts": f"model.layers.{last}.mlp.experts.0.gate_proj",
    }
    found: dict[str, WeightDtype] = {}
    for part, module in modules.items():
        if quantisation.ignores(module) or not (quantisation.layouts or quantisation.nvfp4):
            continue
        # Where a checkpoint has both, NVFP4 is of the experts: so vLLM's kernels for Beam take it.
        both = bool(quantisation.layouts) and quantisation.nvfp4
        narrow = quantisation.nvfp4 and (part == "experts" or not both)
        found[part] = "nvfp4" if narrow else "fp8"
    return Precision(**found)
