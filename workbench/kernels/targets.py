"""Every Triton variant compiled for GPUs that are not here, at the shapes it will meet.

The variant is called on tensors without memory, and what it would launch is compiled instead: so
what is compiled is what runs, with the same constants and the same specialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from workbench.kernels import registry
from workbench.kernels.case import Request
from workbench.kernels.catalogue import OPS
from workbench.kernels.ops import DTYPES, operation
from workbench.kernels.shapes import Shapes
from workbench.kernels.triton_compile import TARGETS, Compiled, Job, compile_in_child

TOKENS = (1, 8, 1024)
SECONDS = 600.0


def jobs(
    shapes: Shapes,
    *,
    ops: Iterable[str] = OPS,
    tokens: Sequence[int] = TOKENS,
    dtype: str = "bfloat16",
    context: int | None = None,
) -> list[Job]:
    """A job for each operation: all its flavours at all these numbers of tokens."""
    return [
        Job(
            name=f"{op} {shapes.label}",
            call=f"{__name__}:compile_op",
            argument={
                "op": op,
                "shapes": shapes.to_dict(),
                "tokens": list(tokens),
                "dtype": dtype,
                "context": context,
            },
        )
        for op in ops
    ]


def compile_op(argument: dict[str, Any]) -> None:
    """Call the Triton variant of ``argument["op"]`` on the meta device, in the compiling child."""
    op = operation(argument["op"])
    function = registry.find(op.name, "triton").function
    for flavour in op.flavours:
        for n in argument["tokens"]:
            request = Request(
                shapes=Shapes(**argument["shapes"]),
                tokens=n,
                dtype=DTYPES[argument["dtype"]],
                device="meta",
                flavour=flavour,
                context=argument["context"],
            )
            case = op.case(request)
            function(*case.fresh(), **case.kwargs)


def compile_all(
    shapes: Sequence[Shapes],
    *,
    ops: Iterable[str] = OPS,
    tokens: Sequence[int] = TOKENS,
    targets: Sequence[int] = TARGETS,
    seconds: float = SECONDS,
    on_result: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Registers, shared memory and spills of every Triton kernel, for every target.

    Raises:
        CompileError: Triton is not installed, or ``seconds`` is not positive.
    """
    wanted = list(ops)
    every = [job for one in shapes for job in jobs(one, ops=wanted, tokens=tokens)]
    return compile_in_child(every, seconds, targets=targets, on_result=on_result)
