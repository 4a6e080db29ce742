"""One set of inputs of an operation: what every variant is called with, checked and timed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.roofline import Work
from workbench.kernels.shapes import Shapes

Outputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What inputs are wanted.

    ``flavour`` is one of the operation's own (a sliding or a full layer, a float8 cache, …);
    ``strided`` makes the rows views of a wider tensor; ``extreme`` adds numbers that overflow where
    care is not taken, and sequences that have just begun; ``context`` is how many tokens came
    before, for attention (None: enough to wrap a ring).
    """

    shapes: Shapes
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    flavour: str = ""
    strided: bool = False
    seed: int = 0
    context: int | None = None
    extreme: bool = False

    def generator(self) -> torch.Generator | None:
        """Fresh random numbers of this request's seed, on its device; the meta device has none."""
        if self.device == "meta":
            return None
        return torch.Generator(device=self.device).manual_seed(self.seed)

    @property
    def label(self) -> str:
        """A short name: tokens, flavour, what is odd about it, dtype."""
        parts = [
            f"{self.tokens} token{'s' * (self.tokens != 1)}",
            self.flavour,
            "strided" * self.strided,
            "extreme" * self.extreme,
            "" if self.context is None else f"after {self.context}",
            str(self.dtype).removeprefix("torch."),
        ]
        return ", ".join(p for p in parts if p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """An argument that is written in place: only ``rows`` along ``dim`` may change.

    ``rows`` are the rows that must be written, in the order of the oracle's output ``name``.
    """

    argument: int
    name: str
    rows: Tensor
    dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arguments of one call, and the work it is.

    ``returns`` names the tensors that the function returns, in order. ``work`` counts bytes and
    FLOPs of one call, each operand read or written once. ``joint`` names two written arguments that
    are halves of one tensor.
    """

    op: str
    request: Request
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    returns: tuple[str, ...] = ("y",)
    written: tuple[Written, ...] = ()
    joint: tuple[int, int] | None = None
    work: Work

    def fresh(self) -> tuple[Any, ...]:
        """The arguments, those that are written as copies."""
        args = list(self.args)
        if self.joint is not None:
            first, second = self.joint
            args[first], args[second] = beside(args[first], args[second])
            return tuple(args)
        for one in self.written:
            args[one.argument] = args[one.argument].clone()
        return tuple(args)

    def call(self, function: Callable[..., Any]) -> Outputs:
        """Call once on fresh copies of what is written; the outputs by name.

        Raises:
            KernelError: the result is not the tensors that the operation returns.
        """
        args = self.fresh()
        return self.outputs(function(*args, **self.kwargs), args)

    def outputs(self, result: Any, args: tuple[Any, ...]) -> Outputs:
        """What a call gave by name, from its result and the arguments it was called with.

        Raises:
            KernelError: the result is not the tensors that the operation returns.
        """
        # As the model takes it: a tensor alone where one is due, else a tuple; never a list.
        found = result
        if len(self.returns) == 1 and isinstance(result, Tensor):
            found = (result,)
        elif len(self.returns) == 1:
            found = None
        elif self.returns == () and result is None:
            found = ()
        if not isinstance(found, tuple) or len(found) != len(self.returns):
            raise KernelError(
                f"{self.op} must return {len(self.returns)} tensor(s) "
                f"({', '.join(self.returns) or 'nothing'}), not {_kind(result)}"
            )
        for name, value in zip(self.returns, found, strict=True):
            if not isinstance(value, Tensor):
                raise KernelError(f"{self.op} must return tensors; {name} is {_kind(value)}")
        named = dict(zip(self.returns, found, strict=True))
        for one in self.written:
            named[one.name] = args[one.argument].index_select(one.dim, one.rows)
        return named


def beside(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of two tensors as the halves of one, row by row: how vLLM keeps K and V."""
    width = first.shape[-1]
    both = torch.empty(
        (*first.shape[:-1], width + second.shape[-1]), dtype=first.dtype, device=first.device
    )
    halves = both[..., :width], both[..., width:]
    for half, source in zip(halves, (first, second), strict=True):
        half.copy_(source)
    return halves


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__
