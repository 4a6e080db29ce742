"""Captured values as tidy pandas frames: one row an element, one column an axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from workbench.errors import InspectionError

if TYPE_CHECKING:
    import pandas

    from workbench.model.capture import Capture

FrameKind = Literal["tokens", "hidden", "attention", "router", "kv", "logits"]


def needs(package: str) -> Any:
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError:
        raise InspectionError(
            f"{package} is not installed, and exporting needs it; install beam-workbench[lab]"
        ) from None


def frame(c: Capture, kind: FrameKind) -> pandas.DataFrame:
    pandas = needs("pandas")
    if kind == "tokens":
        logp = c.logits[:-1].log_softmax(-1).gather(1, torch.tensor(c.token_ids[1:])[:, None])
        return pandas.DataFrame(
            {
                "position": range(len(c.tokens)),
                "token_id": c.token_ids,
                "token": c.tokens,
                "logprob": torch.cat((torch.tensor([nan]), logp[:, 0])).numpy(),
                "top_id": c.logits.argmax(-1).numpy(),
            }
        )
    if kind == "hidden":
        assert c.hidden is not None
        return _long(("hidden", "position", "dimension"), {"value": c.hidden}, c.hidden_index)
    if kind == "logits":
        return _long(("position", "token_id"), {"logit": c.logits})
    frames = []
    for layer in {"attention": c.attention, "router": c.router_ids, "kv": c.kv}[kind]:
        if kind == "attention":
            frame = _visible_pairs(c, layer)
        elif kind == "router":
            ids, weights = c.router_ids[layer], c.router_weights[layer]
            frame = _long(("position", "choice"), {"expert": ids, "weight": weights})
        else:
            held = c.kv[layer]
            first = held.positions.tolist()
            frame = _long(
                ("position", "head", "dimension"), {"key": held.k, "value": held.v}, first
            )
        frame.insert(0, "layer", layer)
        frames.append(frame)
    return pandas.concat(frames, ignore_index=True)


def _visible_pairs(c: Capture, layer: int) -> pandas.DataFrame:
    """Attention of one layer, only the (query, key) pairs its mask lets through."""
    position = torch.arange(len(c.tokens))
    distance = position[:, None] - position
    reach = len(c.tokens) if c.config.is_full(layer) else c.config.sliding_window
    query, key = ((distance >= 0) & (distance < reach)).nonzero(as_tuple=True)
    probabilities = c.attention[layer][:, query, key]  # [A, pairs]
    frame = _long(("head", "pair"), {"probability": probabilities})
    pair = frame.pop("pair")
    frame.insert(1, "query", query.numpy()[pair])
    frame.insert(2, "key", key.numpy()[pair])
    return frame


def _long(
    axes: tuple[str, ...], values: dict[str, Tensor], first: Sequence[int] | None = None
) -> pandas.DataFrame:
    """Tensors of one shape -> a row an element; ``first`` labels the first axis (default 0 …)."""
    shape = next(iter(values.values())).shape
    columns: dict[str, Any] = {}
    for number, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        labels = torch.arange(size) if number or first is None else torch.tensor(first)
        view = [1] * len(shape)
        view[number] = size
        columns[axis] = labels.view(view).expand(shape).flatten().numpy()
    columns.update({name: value.flatten().numpy() for name, value in values.items()})
    return needs("pandas").DataFrame(columns)
