"""Weights packed by oneDNN: float32 products on a CPU at the speed of its memory.

``torch.nn.functional.linear`` reads a plain float32 weight from memory at about 7 GB/s on the
machine this was measured on, and its cost grows with the rows; oneDNN's blocked layout reaches
12-20 GB/s and costs nearly the same for eight rows as for one, which is what makes verifying a
block of draft tokens cheap (benchmarks/NOTES.md). The operators are the ones Inductor uses; where
they are missing, :func:`pack` gives None and the plain product is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

PACK_ROWS = 8  # the layout is chosen for this many rows; it was the faster one at 1 to 512 rows


class PackedWeight:
    """A ``[out, in]`` matrix in oneDNN's layout, valid while its source tensor is unchanged."""

    __slots__ = ("_source", "_tensor", "_version")

    def __init__(self, source: Tensor, matrix: Tensor) -> None:
        self._source, self._version = source, source._version
        self._tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, PACK_ROWS)

    def usable(self, x: Tensor) -> bool:
        """Whether ``x @ matrix.T`` may be computed here: no gradient, weight unchanged since."""
        return (
            self._version == self._source._version
            and x.dtype == torch.float32
            and not x.requires_grad
            and not (self._source.requires_grad and torch.is_grad_enabled())
        )

    def __call__(self, x: Tensor) -> Tensor:
        """``[N, in] -> [N, out]``."""
        return torch.ops.mkldnn._linear_pointwise(x, self._tensor, None, "none", [], "")


def available() -> bool:
    """Whether this torch build has the operators."""
    return torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )


def pack(source: Tensor, matrix: Tensor | None = None) -> PackedWeight | None:
    """Pack ``matrix`` (a two-dimensional view of ``source``, which it is by default).

    None when this machine, dtype or device has no packed form: the caller then uses the plain one.
    """
    matrix = source if matrix is None else matrix
    if source.device.type != "cpu" or source.dtype != torch.float32 or source.is_inference():
        return None
    return PackedWeight(source, matrix.detach().contiguous()) if available() else None
