"""Random tensors and numbers for the inputs of an operation, from a request's seed."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from workbench.kernels.case import Request
from workbench.kernels.reference import rope_table

JUNK = 1e4  # finite, since 0 * NaN would be NaN even in a right kernel
# FP8 cases store x / scale: with scales from here, values of order one use the format's middle.
SCALES = (0.021, 0.034)


class Draw:
    """Random tensors of a request's dtype and device."""

    def __init__(self, request: Request) -> None:
        self.request, self.generator = request, request.generator()
        self.dice = random.Random(request.seed)  # for single numbers: on the host on any device

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, contiguous."""
        r = self.request
        x = torch.randn(shape, generator=self.generator, device=r.device, dtype=torch.float32)
        return (x * std).to(dtype or r.dtype)

    def rows(self, *shape: int, std: float = 1.0) -> Tensor:
        """As ``normal``; where strided rows are wanted, a view of a wider tensor full of junk."""
        x = self.normal(*shape, std=std)
        if not self.request.strided:
            return x
        wide = torch.full(
            (*shape[:-1], shape[-1] + 16), JUNK, dtype=x.dtype, device=x.device
        )  # 16: rows stay aligned, as slices of a packed projection are
        wide[..., : shape[-1]] = x
        return wide[..., : shape[-1]]

    def norm(self, size: int) -> Tensor:
        """A norm's weight: around one."""
        return 1 + self.normal(size, std=0.1)

    def matrix(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Weights of variance 1 / fan-in, the last axis being the fan-in."""
        return self.normal(*shape, std=shape[-1] ** -0.5, dtype=dtype)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from ``low`` to ``high - 1``."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.request.device)

    def order(self, size: int) -> Tensor:
        """A random permutation."""
        return torch.randperm(size, generator=self.generator, device=self.request.device)

    def scale(self) -> float:
        """Of a float8 cache; never a power of two, for which dividing is exact."""
        return self.dice.uniform(*SCALES)

    def around(self, value: float) -> float:
        """Half to one and a half of ``value``."""
        return value * self.dice.uniform(0.5, 1.5)

    @property
    def small(self) -> float:
        """A factor that brings the mean square of normal numbers near the norm's eps."""
        return 1.5 * self.request.shapes.eps**0.5

    def small_rows(self, rows: int, many: int = 1) -> list[int]:
        """Which rows should be that small: ``many`` of several rows, a single row if extreme."""
        if rows > 1 or (rows and self.request.extreme):
            return self.dice.sample(range(rows), min(rows, many))
        return []

    def rope(self, rows: int, head_dim: int) -> Tensor:
        """A RoPE table, float32 ``[at least rows, D]``, of positions counted from somewhere else.

        A kernel that computes the angles, instead of reading them, is seen.
        """
        r = self.request
        table = rope_table(rows, head_dim, r.shapes.theta, r.device)
        return table.roll(self.dice.randrange(1, rows) if rows > 1 else 0, 0)
