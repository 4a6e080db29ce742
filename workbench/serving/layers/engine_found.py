"""A worker's document as fields of layers, in the words of the expectation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from workbench.model.config import is_int
from workbench.serving.layers.engine_expected import ALL_TOKENS, Key, Value, Whose, kv_name
from workbench.serving.layers.engine_modules import GATES

_WHOSE: tuple[Whose, ...] = ("target", "drafter")
# Said of a layer, and no field of it: its weights have packed copies, its router is a function.
PACKED, ROUTED = "weights packed", "routed by"


def found_layers(document: Mapping[str, Any]) -> dict[Key, dict[str, Value]]:
    """Every layer that one worker has, with the facts of it that were found.

    A fact that a layer should have and has not is None.
    """
    dtype = _text((document.get("settings") or {}).get("dtype"))
    layers: dict[Key, dict[str, Value]] = {}
    for row in _rows(document.get("attention")):
        key = _key(row.get("model"), row.get("layer"))
        if key is not None:
            layers.setdefault(key, {}).update(_attention(row, dtype))
    for whose in _WHOSE:
        model = (document.get("models") or {}).get(whose) or {}
        by_layer: dict[int, list[Mapping[str, Any]]] = {}
        for row in _rows(model.get("modules")):
            if is_int(row.get("layer")):
                by_layer.setdefault(row["layer"], []).append(row)
        for index, rows in by_layer.items():
            layers.setdefault((whose, index), {}).update(_modules(rows))
        for row in _rows(model.get("weights")):
            key = _key(whose, row.get("layer"))
            if key is not None and is_int(row.get("bytes")):
                fields = layers.setdefault(key, {})
                fields["weight bytes"] = None if fields.get(PACKED) else row["bytes"]
    return layers


def most_common(values: Iterable[Value]) -> Value:
    """The most frequent value, the earliest of several; None where most are not known.

    What most layers do not have is expected of none: a module that they share is found in one.
    """
    counts = Counter((type(value), value) for value in values)
    unknown = counts.pop((type(None), None), 0)
    if not counts:
        return None
    usual = max(counts, key=lambda key: counts[key])
    return usual[1] if counts[usual] > unknown else None


def kept(spec: Mapping[str, Any]) -> str | None:
    """What the cache manager keeps of a sequence: all tokens, or a window of them.

    With the hybrid manager off, windowed layers have a full spec that records their window
    (``v1/kv_cache_interface.py: FullAttentionSpec``), so the kind of spec decides.
    """
    kind, window = _text(spec.get("kind")), spec.get("window")
    if kind is None:
        return None
    return f"window {window}" if kind.startswith("SlidingWindow") else ALL_TOKENS


def _rows(rows: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes):
        yield from (row for row in rows if isinstance(row, Mapping))


def _key(whose: Any, index: Any) -> Key | None:
    return (whose, index) if whose in _WHOSE and is_int(index) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _value(value: Any) -> Value:
    """A value of the document as one of a field: lists as tuples, dicts not at all."""
    if isinstance(value, list | tuple):
        return tuple(item if is_int(item) else str(item) for item in value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _joined(*parts: Any) -> str | None:
    """Different texts of ``parts`` behind each other, None where there is none."""
    texts = [str(part) for part in parts if part not in (None, "")]
    return ", ".join(dict.fromkeys(texts)) or None


def _attention(row: Mapping[str, Any], dtype: str | None) -> dict[str, Value]:
    fields: dict[str, Value] = {
        "name": _value(row.get("name")),
        "backend": _value(row.get("backend")),
        "implementation": _value(row.get("implementation")),
        "window": _value(row.get("window")),
        "query heads": _value(row.get("heads")),
        "KV heads": _value(row.get("kv_heads")),
        "head size": _value(row.get("head_size")),
        "KV dtype": kv_name(_text(row.get("kv_cache_dtype")), dtype),
        "KV group": _value(row.get("group")),
    }
    cache = row.get("cache") or {}
    fields |= {
        "cache keeps": kept(cache),
        "block size": _value(cache.get("block_size")),
        "page bytes": _value(cache.get("page_bytes")),
    }
    # Found where there is such a thing; nothing says what it must be.
    for name, value in (
        ("FlashAttention", row.get("flash_attention")),
        ("kernel window", row.get("kernel_window")),
        ("cache tensor", row.get("cache_dtype")),
        ("shares the cache of", row.get("shares_cache_of")),
    ):
        if value is not None:
            fields[name] = _value(value)
    return fields


def _modules(rows: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    fields: dict[str, Value] = {}
    projections: list[str | None] = []
    matrices: list[str | None] = []
    gates: list[str | None] = []
    routers: list[Mapping[str, Any]] = []
    sparse = packed = False
    for row in rows:
        place = str(row.get("place") or "")
        last = place.rpartition(".")[2]
        kind = row.get("kind")
        if kind == "experts":
            sparse = True
            fields |= _experts(row)
            fields["MLP weights"] = _precision(row)
            routers.append(row)
        elif kind == "linear":
            fields[place] = _linear(row)
            packed |= _is_packed(row)
            if last in GATES:
                gates.append(_dtype(row))
            elif place.startswith("self_attn"):
                projections.append(_precision(row))
            elif place.startswith("mlp."):
                matrices.append(_precision(row))
        elif kind == "weights":
            gates += [_dtype(row, name) for name in GATES if name in (row.get("weights") or {})]
        router = row.get("router")
        if isinstance(router, Mapping):
            fields["router"] = _value(router.get("class"))
            routers.append(router)
        for name, choice in (row.get("choices") or {}).items():
            fields[f"{place}.{name}" if place else str(name)] = _value(choice)
    fields["attention weights"] = _joined(*projections)
    if sparse:
        fields["router dtype"] = _joined(*gates)
        for name, key in (("scores", "scoring_func"), ("renormalises", "renormalize")):
            said = (row[key] for row in routers if row.get(key) is not None)
            fields[f"router {name}"] = _value(next(said, None))
        own = (row.get("custom_routing_function") for row in routers)
        if function := next((name for name in own if name is not None), None):
            # Then what the router was told of scores is not used.
            fields |= {"router scores": None, "router renormalises": None, ROUTED: str(function)}
    else:
        fields["MLP weights"] = _joined(*matrices)
    fields["MLP"] = "sparse" if sparse else "dense" if matrices else None
    if packed:
        fields[PACKED] = True
    return fields


def _experts(row: Mapping[str, Any]) -> dict[str, Value]:
    fields = {
        "experts": _value(row.get("total")),
        "experts here": _value(row.get("local")),
        "experts a token": _value(row.get("per_token")),
        "expert width": _value(row.get("width")),
        "expert kernel": _joined(
            row.get("method"), row.get("backend"), row.get("kernel") or row.get("experts_class")
        ),
    }
    for name, key in (("tokens brought by", "prepare"), ("expert width, padded", "padded_width")):
        value = row.get(key)
        if value is not None and (key != "padded_width" or value != row.get("width")):
            fields[name] = _value(value)
    return fields


def _linear(row: Mapping[str, Any]) -> str:
    """Method, shape, dtype and kernels of a linear layer, in one line."""
    weight = (row.get("weights") or {}).get("weight") or {}
    shape = weight.get("shape")
    kernels = row.get("kernels") or {}
    parts = [
        row.get("scheme") or row.get("method") or row.get("class"),
        f"{shape}" if shape else None,
        weight.get("dtype"),
        *(f"{name} {value}" for name, value in kernels.items()),
    ]
    return " ".join(str(part) for part in parts if part is not None)


def _is_packed(row: Mapping[str, Any]) -> bool:
    """Whether the weight was emptied because a packed copy is used in its place."""
    shape = ((row.get("weights") or {}).get("weight") or {}).get("shape")
    return isinstance(shape, list) and 0 in shape


def _dtype(row: Mapping[str, Any], *names: str) -> str | None:
    weights = row.get("weights") or {}
    for name in names or ("weight", "w13_weight", "w2_weight"):
        if name in weights:
            return _text((weights[name] or {}).get("dtype"))
    return None


def _precision(row: Mapping[str, Any]) -> str | None:
    """``fp8``, ``nvfp4``, or the dtype of what is not quantised; another method by its name."""
    method = row.get("scheme") or row.get("method")
    if not isinstance(method, str):
        return _dtype(row)
    lower = method.lower()
    if "unquantized" in lower or "embedding" in lower:
        return _dtype(row)
    if "fp4" in lower:
        return "nvfp4" if "mx" not in lower else "mxfp4"
    return "fp8" if "fp8" in lower else method
