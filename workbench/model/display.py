"""Short texts of values, for ``repr`` and notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # sizing shows values where there is no torch
    from torch import Tensor


class Shown:
    """Notebook display of a value: its short text (views add figures)."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": repr(self)}


def shape_text(x: Tensor) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0…2, 5"``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}…{b}" for a, b in runs)


def gib(count: float) -> str:
    """Bytes in GiB, or MiB and KiB where they are few, two decimals."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(count) >= step:
            return f"{count / step:,.2f} {unit}"
    return f"{count / 2**10:,.2f} KiB" if count else "0"
