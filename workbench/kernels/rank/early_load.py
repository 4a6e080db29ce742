"""What a verification or a prefill would refuse, known from sizes: before anything is measured.

Making a rank's weights takes the better part of a minute and timing takes minutes, so what cannot
be is said first, with the size that could be instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels.footprint import free_bytes
from workbench.kernels.rank.load_state import HEADROOM, LoadState
from workbench.kernels.rank.prefill_state import needed_bytes, refuse_sizes
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import (
    SPARE_BYTES,
    RankWeights,
    rank_bytes,
    refuse_too_large,
)
from workbench.kernels.triton_runtime import TritonUnavailableError
from workbench.model.config import BeamConfig


def refuse_verify(
    config: BeamConfig,
    tp: int,
    *,
    layers: int | None,
    device: torch.device,
    dtype: torch.dtype,
    tokens: Sequence[int],
    sequences: int | None,
    context: int,
) -> None:
    """Refuse verifications of ``tokens`` rows each, ``sequences`` behind ``context`` tokens.

    Raises:
        KernelError: ``tp``, ``layers`` or ``context`` do not suit the model, rows that sequences
            cannot share, a step that cannot run on ``device``, or weights, caches and buffers that
            do not fit its free memory.
    """
    weights = _sizes_of(config, tp, layers, dtype)
    from workbench.kernels.rank.load_step import LoadStep, refuse_load
    from workbench.kernels.rank.load_verify import spread

    fresh = {size: spread(size, sequences) for size in sorted(set(tokens))}
    refuse_load(weights, device)
    left = _left(config, weights, device, dtype)
    if left is None:
        return

    def need(size: int, behind: int) -> int:
        if size == 1:
            return _bytes_of(RankState(weights, behind, headroom=HEADROOM))
        state = LoadState(weights, [behind] * len(fresh[size]), fresh[size])
        return _bytes_of(state, LoadStep(weights, state, advance=False))

    for size in fresh:
        wanted = need(size, context)
        if wanted <= left:
            continue
        most = _largest(lambda behind, size=size: need(size, behind) <= left, context)  # type: ignore[misc]
        advice = f"--context {most} would fit" if most else "give fewer --tokens"
        raise KernelError(
            f"a verification of {size} tokens, {len(fresh[size])} sequences behind {context} "
            f"tokens each, needs {hardware.gigabytes(wanted)}, and beside the weights "
            f"{hardware.gigabytes(max(0, left))} of memory are left on {device}: {advice}"
        )


def refuse_prefill(
    config: BeamConfig,
    tp: int,
    *,
    layers: int | None,
    device: torch.device,
    dtype: torch.dtype,
    forms: Sequence[str],
    sequences: int,
    tokens: int,
    context: int,
) -> None:
    """Refuse a prefill of ``sequences`` times ``tokens`` behind ``context`` tokens.

    Raises:
        KernelError: ``tp``, ``layers`` or sizes do not suit the model, a form that cannot run on
            ``device``, or weights, caches and activations that do not fit its free memory.
    """
    weights = _sizes_of(config, tp, layers, dtype)
    from workbench.kernels.rank.prefill_step import refuse_form

    refuse_sizes(weights.shapes, sequences, tokens, context)
    for form in forms:
        refuse_form(form, weights, device)
    left = _left(config, weights, device, dtype)
    wanted = needed_bytes(weights, sequences, tokens, context)
    if left is None or wanted <= left:
        return
    most = _largest(lambda n: needed_bytes(weights, n, tokens, context) <= left, sequences)
    advice = f"--sequences {most} would fit"
    if not most:
        most = _largest(lambda n: needed_bytes(weights, 1, n, context) <= left, tokens)
        advice = (
            f"--sequences 1 --tokens {most} would fit" if most else "choose a shorter --context"
        )
    raise KernelError(
        f"caches and activations of {sequences} sequences of {tokens} tokens behind {context} need "
        f"{hardware.gigabytes(wanted)}, and beside the weights {hardware.gigabytes(max(0, left))} "
        f"of memory are left on {device}: {advice}"
    )


def _sizes_of(config: BeamConfig, tp: int, layers: int | None, dtype: torch.dtype) -> RankWeights:
    """Weights without memory."""
    # As in early.py: let who decides for all whether kernels are interpreted be the one who knows.
    with suppress(TritonUnavailableError):
        importlib.import_module("workbench.kernels.triton_runtime").INTERPRETED  # noqa: B018
    return RankWeights.random(config, tp, layers=layers, device="meta", dtype=dtype)


def _left(
    config: BeamConfig, weights: RankWeights, device: torch.device, dtype: torch.dtype
) -> int | None:
    """Bytes left beside the weights; None where nobody knows."""
    s, count = weights.shapes, len(weights.layers)
    refuse_too_large(config, s, count, device, dtype)
    free = free_bytes(str(device))
    if free is None:
        return None
    spare = SPARE_BYTES // 2 if device.type == "cuda" else 0
    return free - rank_bytes(config, s, count, dtype) - spare


def _bytes_of(*made: Any) -> int:
    """Bytes of all tensors that these objects hold, themselves or in lists; each counted once."""
    found: dict[int, Tensor] = {}
    for value in (value for one in made for value in vars(one).values()):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Tensor):
                found[id(each)] = each
    return sum(each.numel() * each.element_size() for each in found.values())


def _largest(fits: Callable[[int], bool], below: int) -> int:
    """The largest number from 1 on that fits, where ``below`` does not; 0: none."""
    low, high = 0, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
