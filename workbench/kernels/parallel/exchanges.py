"""The operation ``reduced_boundary``: partial sums made whole, and the boundary behind them.

Its variants have the signature of :func:`nccl`. A variant of your own is registered as any other,
and a step of single operations takes it by its name (docs/parallel.md checks and times one):

    @register("reduced_boundary", "mine")
    def mine(ranks, mailbox, call, h, partial, post, scale, following, eps): ...

    TpRankStep(weights, state, ranks, {"reduced_boundary": "mine"}, mailbox=mailbox)
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.parallel.mailbox import Mailbox
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.registry import register
from workbench.kernels.requirements import Where

OP = "reduced_boundary"


@register(OP, "nccl")
def nccl(
    ranks: Ranks,
    mailbox: Mailbox | None,
    call: int,
    h: Tensor,
    partial: Tensor,
    post: Tensor,
    scale: tuple[float, float],
    following: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``torch.distributed``'s all-reduce (NCCL, gloo on CPUs), then the registry's boundary.

    Every rank calls it with its own ``partial [N, H]``, the stream ``h [N, H]`` and the weights
    ``[H]`` of the norm behind the sublayer (``post``) and of the next one (``following``), all in
    the activations' dtype; ``scale``: factors of the normed sum and of the stream that are added.
    ``call`` counts those of a step from 0, and behind its last one the step moves the mailbox's
    count on. Returns the new stream and its norm, ``[N, H]`` in the activations' dtype and the same
    bits on all ranks. ``partial`` may be written over; nothing may wait for the host, so that it
    can be captured in a CUDA graph.
    """
    whole = ranks.all_reduce(partial.contiguous())
    where = Where.of(h.device, h.dtype)
    name = "torch" if registry.why_not("boundary", "triton", where) else "triton"
    boundary = registry.find("boundary", name, where).function
    made: tuple[Tensor, Tensor] = boundary(h, whole, post, scale, following, eps)
    return made


@register(OP, "exchange")
def exchange(
    ranks: Ranks,
    mailbox: Mailbox | None,
    call: int,
    h: Tensor,
    partial: Tensor,
    post: Tensor,
    scale: tuple[float, float],
    following: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Both in one Triton kernel, through memory that all ranks see (``triton_exchange.py``).

    Every rank computes every row, so that the streams are whole everywhere.

    Raises:
        KernelError: no mailbox, or one without room for so many rows.
    """
    if mailbox is None:
        raise KernelError(
            "the exchange inside the boundary needs memory that all ranks see: give the step "
            "mailbox=Mailbox.open(ranks, hidden, dtype)"
        )
    from workbench.kernels.parallel.triton_exchange import launch_exchange

    stream, out = torch.empty_like(h), torch.empty_like(h)
    launch_exchange(
        mailbox, call, h, partial.contiguous(), None, 1, post, following, stream, out, scale, eps,
        two=False,
    )  # fmt: skip
    return stream, out
