"""Plain float64 pieces to check the variants that call vLLM; independent of the workbench's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

EPS = 1e-6
FP8 = torch.float8_e4m3fn
SIZES: dict[str, dict[str, int]] = {
    "small": dict(
        hidden=96, heads=6, kv=2, dim=32, experts=16, top_k=4, expert=32, mlp=48, vocab=300,
        window=12, rank=16, candidates=4, draft_layers=3, draft_vocab=50, context=70,
    ),
    "tp8": dict(
        hidden=5120, heads=6, kv=1, dim=128, experts=256, top_k=8, expert=320, mlp=1536,
        vocab=20480, window=512, rank=256, candidates=16, draft_layers=5, draft_vocab=163840,
        context=4096,
    ),
    "tp4": dict(
        hidden=5120, heads=12, kv=2, dim=128, experts=256, top_k=8, expert=640, mlp=3072,
        vocab=40960, window=512, rank=256, candidates=16, draft_layers=5, draft_vocab=163840,
        context=4096,
    ),
}  # fmt: skip


@dataclass
class Case:
    """One call: ``call(function)`` gives outputs, ``expected()`` what they must be (float64)."""

    op: str
    label: str
    call: Callable[[Any], tuple[Tensor, ...]]
    expected: Callable[[], tuple[Tensor, ...]]
    skip: tuple[str, ...] = ()  # variants that say no to it
    weights: dict[str, Tensor] = field(default_factory=dict)


class Draw:
    """Random tensors of one device and dtype."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        found = torch.randn(shape, generator=self.generator, device=self.device) * scale
        return found.to(dtype or self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """Drawn in the activation dtype, in place: experts of the full model are large."""
        found = torch.empty(shape, dtype=self.dtype, device=self.device)
        return found.normal_(0.0, shape[-1] ** -0.5, generator=self.generator)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator, device=self.device)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def attention(q: Tensor, k: Tensor, v: Tensor, q_at: Tensor, window: int | None) -> Tensor:
    """``q [T, A, D]`` at positions ``q_at`` over ``k, v [K, G, D]`` at positions 0 .. K-1."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(share, 1) for x in (k, v))
    scores = torch.einsum("tad,kad->atk", q.double(), k) * q.shape[-1] ** -0.5
    distance = q_at[:, None] - torch.arange(k.shape[0], device=q.device)
    seen = (distance >= 0) & (distance < (window or 1 << 62))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("atk,kad->tad", weights, v)


def rope_table(positions: int, dim: int, device: str) -> Tensor:
    angle = torch.arange(positions, device=device).double()[:, None] * 10000.0 ** (
        -torch.arange(0, dim, 2, device=device).double() / dim
    )
    return torch.cat((angle.cos(), angle.sin()), -1).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """NeoX rotation of ``x [N, heads, D]`` by rows of a table, in float64."""
    cos, sin = table.double()[:, None].chunk(2, -1)
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def to_fp8(x: Tensor, scale: float) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(FP8)


def relative_error(found: Tensor, expected: Tensor, rows: bool = False) -> float:
    """``|found - expected| / |expected|``; infinite when a value is not finite.

    With ``rows`` the largest of every row's, a row being what the last two axes hold: attention
    over few keys gives large outputs, which would hide the others.
    """
    found, expected = found.double(), expected.double()
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    if rows:
        found, expected = found.flatten(0, -3).flatten(1), expected.flatten(0, -3).flatten(1)
        return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
    norm = float(expected.norm())
    return float((found - expected).norm()) / norm if norm else float(found.norm())
