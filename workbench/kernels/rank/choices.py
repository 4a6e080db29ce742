"""Experts that were chosen beforehand, so that two implementations do the same work.

How long a step takes depends on how many experts its tokens touch, so both sides of a comparison
are fed the same choices: those that a run recorded, or seeded ones where a record would be large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from workbench.errors import KernelError

# Standard deviation of an expert's log popularity in a layer of random weights: with it the loads
# of the experts vary as in the recorded steps (1024 rows: variance 108 at a mean of 32).
SPREAD = 0.27


def seeded_choices(
    layers: int, tokens: int, experts: int, top_k: int, seed: int, *, spread: float = SPREAD
) -> tuple[Tensor, Tensor]:
    """Experts of every layer and token as a router of random weights would choose them.

    An expert of a layer has a popularity, whose logarithm is normal with ``spread`` (0: all are
    alike); a token draws ``top_k`` distinct ones in proportion. The same on every machine with the
    same torch: a CPU generator draws, one for each layer. Dense layers have entries, too, which
    nobody reads.

    Returns:
        ids: int64 ``[layers, tokens, top_k]`` on the CPU, in no order of size.
        shares: float32, alike, near ``1 / top_k``; those of a token add up to 1.

    Raises:
        KernelError: more experts of a token than there are, or sizes that are no sizes.
    """
    if layers < 0 or tokens < 0 or not 1 <= top_k <= experts or spread < 0:
        raise KernelError(
            f"{top_k} of {experts} experts of {tokens} tokens in {layers} layers, spread {spread}, "
            "cannot be drawn; give 1 or more experts of a token, and no more than there are"
        )
    ids = torch.empty(layers, tokens, top_k, dtype=torch.int64)
    shares = torch.empty(layers, tokens, top_k)
    for layer in range(layers):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        popularity = torch.exp(spread * torch.randn(experts, generator=generator))
        # The first top_k arrivals of exponential clocks: drawing without putting back.
        clocks = torch.rand(tokens, experts, generator=generator).log_().neg_().div_(popularity)
        ids[layer] = clocks.topk(top_k, dim=-1, largest=False).indices
        weight = torch.rand(tokens, top_k, generator=generator).mul_(0.1).add_(0.95)
        shares[layer] = weight / weight.sum(-1, keepdim=True)
    return ids, shares


def of_layers(
    ids: Tensor, shares: Tensor, dense: Sequence[bool], device: torch.device | str = "cpu"
) -> list[tuple[Tensor, Tensor] | None]:
    """A pair of every layer on ``device``, None in dense ones: what a prefill's ``Choices`` hold.

    Raises:
        KernelError: choices of another number of layers.
    """
    if len(dense) != ids.shape[0]:
        raise KernelError(f"choices of {ids.shape[0]} layers do not fit a model of {len(dense)}")
    return [
        None if is_dense else (ids[i].to(device), shares[i].to(device))
        for i, is_dense in enumerate(dense)
    ]


def read_choices(path: str | Path) -> dict[int, tuple[Tensor, Tensor]]:
    """Recorded choices by number of rows: ids int64 and shares float32, ``[layers, rows, K]``.

    The file holds tensors ``ids R`` and ``shares R``, as ``benchmarks/rank_load.py --record``
    writes them: safetensors.

    Raises:
        KernelError: it cannot be read, or a number of rows lacks its ids or shares.
    """
    path = Path(path)
    try:
        held = load(path.read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise KernelError(f"{path} holds no recorded choices of experts: {reason:.160}") from error
    return paired(held, str(path))


def paired(held: Mapping[str, Tensor], name: str) -> dict[int, tuple[Tensor, Tensor]]:
    """The tensors of a record of that ``name`` by number of rows.

    Raises:
        KernelError: a tensor without its other half, or of another shape.
    """
    if not isinstance(held, Mapping) or not held:
        raise KernelError(f"{name} holds no recorded choices of experts; record them again")
    found = {}
    for key in sorted(held):
        kind, _, rows = str(key).partition(" ")
        other = f"{'shares' if kind == 'ids' else 'ids'} {rows}"
        if kind not in ("ids", "shares") or not rows.isdecimal() or other not in held:
            raise KernelError(
                f'{name} has a tensor "{key!s:.40}", and pairs "ids ROWS" and "shares ROWS" are '
                "read here; record the choices again"
            )
        ids, shares = held[f"ids {rows}"], held[f"shares {rows}"]
        if ids.ndim != 3 or ids.shape != shares.shape or ids.shape[1] != int(rows):
            raise KernelError(
                f"{name}: choices of {rows} rows must be [layers, {rows}, K] with shares alike, "
                f"not {list(ids.shape)} and {list(shares.shape)}"
            )
        found[int(rows)] = (ids.long(), shares.float())
    return found


def refuse_experts(ids: Tensor, experts: int) -> None:
    """Refuse a sparse layer's choices, ``[..., K]``, that kernels could not place in their lists.

    Raises:
        KernelError: experts that do not exist, or one that a token has twice.
    """
    if not ids.numel() or ids.device.type == "meta":
        return
    if int(ids.min()) < 0 or int(ids.max()) >= experts:
        raise KernelError(
            f"recorded choices name experts {int(ids.min())} to {int(ids.max())}, and there are 0 "
            f"to {experts - 1}; record them with the same model"
        )
    near = ids.sort(-1).values
    if bool((near[..., 1:] == near[..., :-1]).any()):
        raise KernelError(
            "recorded choices name an expert twice for one token; record them with a router"
        )


def distinct_experts(ids: Tensor) -> float:
    """Distinct experts of a layer, the mean of the sparse ones; ids below 0 mark a dense layer."""
    counts = [int(each.unique().numel()) for each in ids if int(each.min()) >= 0]
    return sum(counts) / len(counts) if counts else 0.0
