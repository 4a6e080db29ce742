"""Muon over stacks of matrices, the split of Beam's parameters between it and AdamW, the rates.

``torch.optim.Muon`` takes two-dimensional parameters one at a time; Beam's experts are stacks of
small ones, so here all blocks of one shape are orthogonalised in one batched product.
Source of the method: K. Jordan et al., "Muon: an optimizer for hidden layers", 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from workbench.training.settings import TrainingSettings

# Quintic Newton-Schulz coefficients: steepest at zero while singular values stay within 0.7-1.2.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Move ``[M, rows, columns]`` to nearby matrices whose singular values are about one.

    The product runs in bfloat16 on CUDA and in float32 elsewhere.
    """
    a, b, c = _NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        # Three launches instead of seven: a small model's step waits for launches.
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(Optimizer):
    """Momentum, then orthogonalised: every direction of a block moves by the same amount.

    A group names its ``block`` (rows, columns): parameters are viewed as ``[-1, rows, columns]``.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, weight_decay: float, momentum: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            rows, columns = group["block"]
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            buffers = []
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                buffers.append(self.state[p]["momentum"])
            grads = [p.grad for p in params]
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            ahead = torch._foreach_lerp(grads, buffers, group["momentum"])  # Nesterov
            update = orthogonalise(torch.cat([t.view(-1, rows, columns) for t in ahead]))
            rate = group["lr"] * max(1.0, rows / columns) ** 0.5
            parts = update.split([p.numel() // (rows * columns) for p in params])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            updates = [u.reshape(p.shape) for u, p in zip(parts, params, strict=True)]
            torch._foreach_add_(params, updates, alpha=-rate)


def split_parameters(
    model: nn.Module,
) -> tuple[dict[tuple[int, int], list[nn.Parameter]], dict[str, list[nn.Parameter]]]:
    """(matrices by block shape for Muon, the rest by kind for AdamW).

    Packed projections are cut into blocks of equal rows that never straddle two projections.
    """
    matrices: dict[tuple[int, int], list[nn.Parameter]] = {}
    rest: dict[str, list[nn.Parameter]] = {"embedding": [], "head": [], "router": [], "vector": []}
    for name, p in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "embed_tokens":
            rest["embedding"].append(p)
        elif leaf == "lm_head":
            rest["head"].append(p)
        elif ".router." in name:
            if leaf == "weight":
                rest["router"].append(p)
        elif leaf == "qkvg":
            config = model.config
            matrices.setdefault((config.kv_size, p.shape[-1]), []).append(p)  # type: ignore[union-attr, arg-type]
        elif leaf == "gate_up":
            matrices.setdefault((p.shape[-2] // 2, p.shape[-1]), []).append(p)
        elif p.dim() >= 2 and leaf != "qk_norm":
            matrices.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        else:
            rest["vector"].append(p)
    return matrices, rest


def optimizers_for(model: nn.Module, settings: TrainingSettings) -> list[Optimizer]:
    """Muon for the matrices, AdamW for embedding, head, routers and vectors."""
    matrices, rest = split_parameters(model)
    muon = Muon(
        [{"params": p, "block": block} for block, p in matrices.items()],
        lr=settings.matrix_rate,
        weight_decay=settings.weight_decay,
        momentum=0.95,
    )
    rates = {
        "embedding": settings.embedding_rate,
        "head": settings.head_rate,
        "router": settings.router_rate,
        "vector": settings.vector_rate,
    }
    adam = AdamW(
        [{"params": rest[kind], "lr": rate} for kind, rate in rates.items() if rest[kind]],
        betas=(0.9, 0.95),
        eps=1e-10,
        weight_decay=0.0,
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


class Schedule(Protocol):
    """What the rates of a run follow (see :class:`TrainingSettings`)."""

    @property
    def steps(self) -> int: ...

    @property
    def warmup(self) -> int: ...

    @property
    def cooldown(self) -> float: ...


def rate_factor(step: int, settings: Schedule) -> float:
    """Learning-rate factor of ``step``: linear warm-up, flat, linear cool-down to zero."""
    up = (step + 1) / max(1, settings.warmup)
    cooldown = settings.cooldown * settings.steps
    down = (settings.steps - step) / cooldown if cooldown else 1.0
    return min(1.0, up, down)


def set_rates(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Set every group's learning rate to ``factor`` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
