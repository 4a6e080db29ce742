"""Pieces of a bar of memory: how the weights are grouped and how a piece is filled."""

from __future__ import annotations

from typing import Any

from workbench.model.weights import WeightPart
from workbench.views import theme

# name -> the parts in it, colour, pattern
WEIGHT_GROUPS: dict[str, tuple[tuple[WeightPart, ...], str, str]] = {
    "experts": (("experts",), theme.SPARSE, ""),
    "dense MLPs": (("dense_mlp",), theme.DENSE, ""),
    "attention": (("attention",), theme.NEUTRAL, ""),
    "embedding, head": (("embedding", "head"), theme.NEUTRAL, "-"),
    "routers, norms": (("router", "norms"), theme.NEUTRAL, "+"),
    "drafter": (("drafter",), theme.DRAFTER, "/"),
}


def piece_marker(color: str, pattern: str, opacity: float = 0.6) -> dict[str, Any]:
    """Fill of a piece: the colour alone, or strokes of it where colours are shared.

    Words on a piece are read through ``opacity`` in either theme.
    """
    return {
        "color": theme.rgba(color, opacity),
        "line": {"width": 0},
        "pattern": {
            "shape": pattern,
            "solidity": 0.4,
            "size": 5,
            "fgcolor": color,
            "bgcolor": theme.rgba(color, 0.3),
            "fillmode": "replace",
        },
    }
