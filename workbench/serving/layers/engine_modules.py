"""What is chosen in an engine's modules: precisions, kernels, routers; and the weights' bytes.

Runs inside the engine's worker (:mod:`workbench.serving.layers.engine_worker`): the standard
library only, and nothing that raises. Paths below are those of vLLM 0.33's ``model_executor``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from workbench.serving.layers.engine_reader import Reader, Row, layer_of, plain, within_layer

# Of a linear's method, its scheme or the layer itself: what multiplies.
_KERNELS = ("kernel", "fp8_linear", "linear_kernel", "backend", "cpu_linear", "_gemm_impl")
# Of a method of mixtures of experts (layers/fused_moe/oracle): one name a precision.
_BACKENDS = (
    "unquantized_backend", "fp8_backend", "nvfp4_backend", "mxfp4_backend", "mxfp8_backend",
    "wna16_backend",
)  # fmt: skip
_ROUTING = (
    "top_k", "global_num_experts", "scoring_func", "renormalize", "num_expert_group", "topk_group",
    "routed_scaling_factor", "custom_routing_function",
)  # fmt: skip
_CHOICE = re.compile(r"^(allow|use|enable)_|fuse|merged|low_latency|kernel|gemm")
# Truth values of every module, and two of how a checkpoint is read.
_NO_CHOICES = frozenset(
    ("training", "call_super_init", "dump_patches", "allow_fp8_block_shape_mismatch",
     "is_fused_checkpoint_transposed")
)  # fmt: skip
GATES = ("gate", "router")  # names of a router's matrix, or of the module that holds it


def weights(model: Any, seen: set[int]) -> list[Row]:
    """Bytes and numbers of the parameters of each layer and of each part outside layers.

    ``seen`` are parameters that another model has counted; theirs are ``shared``.
    """
    rows: dict[tuple[int | None, str], Row] = {}
    for path, weight in model.named_parameters():
        layer = layer_of(path)
        part = "layer" if layer is not None else path.rpartition(".")[0] or path
        row = rows.setdefault(
            (layer, part),
            {"layer": layer, "part": part, "bytes": 0, "elements": 0, "shared": 0, "dtypes": {}},
        )
        size = int(weight.numel()) * int(weight.element_size())
        if id(weight) in seen:
            row["shared"] += size
            continue
        seen.add(id(weight))
        row["bytes"] += size
        row["elements"] += int(weight.numel())
        dtype = str(plain(weight.dtype))
        row["dtypes"][dtype] = row["dtypes"].get(dtype, 0) + size
    return list(rows.values())


def modules(reader: Reader, model: Any, attention: set[int]) -> list[Row]:
    """What is chosen in modules: how linears and experts are quantised, kernels, routers.

    Attention layers (``attention``, by identity) are read elsewhere. A module that several layers
    share, a table of rotations for one, is read for each of them, and once for a layer that reaches
    it by two paths.
    """
    rows = []
    package = type(model).__module__.rpartition(".")[0]
    seen: set[tuple[int, int | None]] = set()
    for path, module in _every_module(model):
        known = id(module), layer_of(path)
        if not path or id(module) in attention or known in seen:
            continue
        seen.add(known)
        row: Row = {}
        try:
            row = _module(reader, path, module, package)
        except Exception as error:
            reader.failed(f"module {within_layer(path)}", error)
        if row:
            about = {"path": path, "layer": layer_of(path), "place": within_layer(path)}
            rows.append(about | {"class": type(module).__name__} | row)
    return rows


def _every_module(model: Any) -> list[tuple[str, Any]]:
    try:
        return list(model.named_modules(remove_duplicate=False))
    except Exception:  # modules that hold each other, for one: then each once
        return list(model.named_modules())


def _module(reader: Reader, path: str, module: Any, package: str) -> Row:
    row: Row = {}
    own = dict(module.named_parameters(recurse=False))
    method = reader.maybe(module, "quant_method")
    choices = _choices(module, package)
    if any(name.startswith(("w13_", "w2_")) for name in own):
        row = _experts(reader, module, method)
        choices |= row.pop("choices")
    elif own and (method is not None or path.rpartition(".")[2] in GATES):
        row = _linear(reader, module, method)
    elif any(name in own for name in GATES):  # a router's matrix that is no layer of the engine's
        row = {"kind": "weights"}
    router = module.__dict__.get("router")
    if router is not None:
        row["router"] = _router(reader, router)
    if choices:
        row["choices"] = choices
    if row:
        row["weights"] = {
            name: {"shape": plain(weight.shape), "dtype": plain(weight.dtype)}
            for name, weight in own.items()
        }
    return row


def _linear(reader: Reader, module: Any, method: Any) -> Row:
    """``layers/linear.py``, ``layers/quantization/``, ``router/gate_linear.py``.

    Of compressed tensors the scheme lies on the module. The CPU build multiplies with
    ``cpu_linear`` and may leave an empty weight behind (``layers/utils.py``).
    """
    scheme = reader.maybe(module, "scheme")
    kernels: Row = {}
    for holder in (module, scheme, method):
        for name in _KERNELS:
            value = reader.maybe(holder, name)
            if value is not None:
                kernels.setdefault(name.strip("_"), plain(value))
    if "cpu_linear" in kernels:  # then the method's own product is not used
        kernels.pop("gemm_impl", None)
    return {
        "kind": "linear",
        "method": None if method is None else type(method).__name__,
        "scheme": None if scheme is None else type(scheme).__name__,
        "kernels": kernels,
        "tp": plain(reader.maybe(module, "tp_size")),
    }


def _experts(reader: Reader, module: Any, method: Any) -> Row:
    """``layers/fused_moe/routed_experts.py``; ``layer.py: FusedMoE`` in older releases.

    ``moe_kernel`` holds how tokens are prepared and which experts' kernel runs
    (``modular_kernel.py: FusedMoEKernel``). A kernel may want experts wider than they are: the
    width without what is added to them stands in the layer's ``moe_config``.
    """
    config = reader.maybe(module, "moe_config")
    kernel = reader.maybe(method, "moe_kernel")
    cpu = reader.first(lambda: method.cpu_fused_moe, lambda: module.cpu_fused_moe)
    runs = reader.first(lambda: kernel.fused_experts, lambda: kernel.impl.fused_experts)
    backend = reader.first(*(_attribute(method, name) for name in _BACKENDS))

    def count(*names: str) -> Any:
        ways = [_attribute(holder, name) for name in names for holder in (module, config)]
        return plain(reader.first(*ways))

    choices = {
        name: value
        for name in ("skip_final_all_reduce", "use_deferred_moe_finalize")
        if isinstance(value := reader.maybe(config, name), bool)
    }
    return {
        "kind": "experts",
        "method": None if method is None else type(method).__name__,
        "backend": plain(backend),
        "experts_class": plain(reader.maybe(method, "experts_cls")),
        "kernel": plain(reader.first(lambda: runs, lambda: kernel, lambda: cpu)),
        "prepare": plain(reader.maybe(kernel, "prepare_finalize")),
        "total": count("global_num_experts", "num_experts"),
        "local": count("local_num_experts", "num_local_experts"),
        "per_token": count("top_k", "experts_per_token"),
        "width": count("intermediate_size_per_partition_unpadded",
                       "intermediate_size_per_partition"),
        "padded_width": count("intermediate_size_per_partition"),
        "expert_parallel": count("use_ep"),
        "scoring_func": count("scoring_func"),
        "renormalize": count("renormalize"),
        "choices": choices,
    }  # fmt: skip


def _attribute(holder: Any, name: str) -> Callable[[], Any]:
    return lambda: getattr(holder, name)


def _router(reader: Reader, router: Any) -> Row:
    """``layers/fused_moe/router/``: a plain object beside the experts, not a module."""
    found = ((name, reader.maybe(router, name)) for name in _ROUTING)
    return {"class": type(router).__name__} | {
        name: plain(value) for name, value in found if value is not None
    }


def _choices(module: Any, package: str) -> Row:
    """Which of several ways a module takes: its truth values, and functions that it holds.

    All of them of a module of the model's own package (of ``models/beam/nvidia``: ``attention.py``
    merges projections, takes a low-latency product, inserts keys and values in one kernel;
    ``model.py`` holds the function of each residual boundary, fused with an all-reduce or not), and
    of the engine's layers the truth values whose names speak of kernels.
    """
    whole = bool(package) and f"{type(module).__module__}.".startswith(f"{package}.")
    found: Row = {}
    for name, value in list(module.__dict__.items()):
        if name in _NO_CHOICES or name.startswith("_"):
            continue
        if isinstance(value, bool):
            if whole or _CHOICE.search(name):
                found[name] = value
        elif whole and callable(value) and not hasattr(value, "named_parameters"):
            found[name] = plain(value)
    return found
