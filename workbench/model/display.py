"""Short texts of values, for ``repr`` and notebooks."""

from __future__ import annotations

from collections.abc import Iterable

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
