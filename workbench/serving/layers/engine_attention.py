"""An engine's attention layers and the groups of its KV cache.

Runs inside the engine's worker (:mod:`workbench.serving.layers.engine_worker`): the standard
library only, and nothing that raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workbench.serving.layers.engine_reader import Reader, Row, layer_of, plain


def attention_layers(reader: Reader, worker: Any) -> Iterator[tuple[str, Any]]:
    """Attention layers by the engine's names.

    ``static_forward_context`` (``config/compilation.py``) also holds mixture-of-experts layers,
    which have no attention backend.
    """
    known = reader.need(worker, "vllm_config.compilation_config.static_forward_context")
    for name, layer in (known or {}).items():
        if reader.maybe(layer, "attn_backend") is not None or hasattr(layer, "get_attn_backend"):
            yield str(name), layer


def groups(reader: Reader, worker: Any) -> list[Row]:
    """``kv_cache_config.kv_cache_groups`` (``v1/kv_cache_interface.py``), in their order."""
    held = reader.need(worker, "model_runner.kv_cache_config.kv_cache_groups")
    rows = []
    for index, group in enumerate(held or ()):
        spec = reader.need(group, "kv_cache_spec")
        rows.append(
            {
                "index": index,
                "layers": [str(name) for name in reader.need(group, "layer_names") or ()],
                **_spec(reader, spec),
            }
        )
    return rows


def _spec(reader: Reader, spec: Any) -> Row:
    return {
        "kind": type(spec).__name__ if spec is not None else None,
        "block_size": plain(reader.need(spec, "block_size")),
        "window": plain(reader.maybe(spec, "sliding_window")) or "none",
        "page_bytes": plain(reader.maybe(spec, "page_size_bytes")),
        "kv_heads": plain(reader.maybe(spec, "num_kv_heads")),
        "dtype": plain(reader.maybe(spec, "dtype")),
    }


def attention(reader: Reader, worker: Any, models: Mapping[str, Any]) -> list[Row]:
    """Each attention layer (``model_executor/layers/attention/attention.py``), and its group.

    Whose layer it is follows from the object itself: the drafter's layers go by names of their
    own that continue the target's numbers.
    """
    homes: dict[int, tuple[str, str]] = {}
    for whose, model in models.items():
        for path, module in model.named_modules():
            homes.setdefault(id(module), (whose, path))
    held = reader.need(worker, "model_runner.kv_cache_config.kv_cache_groups")
    specs: dict[str, tuple[int | None, Any]] = {}
    for number, group in enumerate(held or ()):
        spec = reader.maybe(group, "kv_cache_spec")
        single = reader.maybe(spec, "kv_cache_specs")  # UniformTypeKVCacheSpecs
        for name in reader.maybe(group, "layer_names") or ():
            own = single.get(name) if isinstance(single, Mapping) else spec
            specs[str(name)] = (number, own)
    rows = []
    homeless, groupless = [], []
    for name, layer in attention_layers(reader, worker):
        whose, path = homes.get(id(layer), ("", name))
        if not whose:
            homeless.append(name)
        index, spec = specs.get(name, (None, None))
        if index is None and reader.maybe(layer, "kv_sharing_target_layer_name") is None:
            groupless.append(name)
        rows.append(_attention_layer(reader, name, layer, whose, path, index, spec))
    for names, where in ((homeless, "model that was found"), (groupless, "KV cache group")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            reader.note(f"in no {where}: {', '.join(names[:3])}{more}")
    return rows


def _attention_layer(
    reader: Reader, name: str, layer: Any, whose: str, path: str, index: int | None, spec: Any
) -> Row:
    implementation = reader.need(layer, "impl")
    backend = reader.first(
        lambda: layer.attn_backend.get_name(), lambda: layer.get_attn_backend().get_name()
    )
    if backend is None:
        reader.note(f"{type(layer).__name__} names no attention backend")
    cache = reader.maybe(layer, "kv_cache")
    if isinstance(cache, list | tuple):  # one for each virtual engine, in older releases
        cache = cache[0] if cache else None
    return {
        "name": name,
        "model": whose or None,
        "path": path,
        "layer": layer_of(path),
        "class": type(layer).__name__,
        "backend": plain(backend),
        "implementation": None if implementation is None else type(implementation).__name__,
        "flash_attention": plain(reader.maybe(implementation, "vllm_flash_attn_version")),
        "window": reader.window(layer),
        "kernel_window": plain(reader.maybe(implementation, "sliding_window")),
        "kv_cache_dtype": plain(reader.need(layer, "kv_cache_dtype")),
        "heads": plain(reader.need(layer, "num_heads")),
        "kv_heads": plain(reader.need(layer, "num_kv_heads")),
        "head_size": plain(reader.need(layer, "head_size")),
        "shares_cache_of": plain(reader.maybe(layer, "kv_sharing_target_layer_name")),
        "cache_shape": plain(reader.maybe(cache, "shape")),
        "cache_dtype": plain(reader.maybe(cache, "dtype")),
        "group": index,
        "cache": None if spec is None else _spec(reader, spec),
    }
