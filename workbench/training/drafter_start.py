"""A drafter before its first step, and its optimizers."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from workbench.kernels import registry
from workbench.kernels.requirements import Where
from workbench.model.beam import Beam
from workbench.model.drafter_config import DFlash2Config
from workbench.spec.drafter import Drafter
from workbench.training.distil_settings import DistilSettings
from workbench.training.drafter_loss import training_kernels
from workbench.training.optimizer import Muon

CODEBOOK_STD = 0.02
# Of the target's final norm. With all of it, the head of a trained target turns untrained states
# into confident guesses, and the first hundred steps go into taking them back.
NORM_SHARE = 0.3


def start(config: DFlash2Config, target: Beam, seed: int) -> Drafter:
    """A drafter with trainable float32 weights on the target's device.

    Convolutions begin as the identity and the successor codebook is zero, so that the selector adds
    nothing yet; the final norm begins as a share of the target's, whose head it feeds. Matrices
    have variance 1 / fan-in.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            drafter = Drafter(config, target)
        finally:
            torch.set_default_dtype(default)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if name == "norm":
                p.copy_(target.norm * NORM_SHARE)
            elif leaf.endswith("norm"):
                p.fill_(1.0)
            elif leaf == "base":  # [2, taps, H]
                p.zero_()
                p[:, 0] = 1.0
            elif leaf == "successor" or ("_conv." in name and leaf == "projection"):
                p.zero_()
            else:
                std = CODEBOOK_STD if name.startswith("selector.") else p.shape[-1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=generator) * std)
            p.requires_grad_(True)
    where = Where.of(target.device, torch.float32, target.shapes)
    torch_forms = registry.resolve(target.kinds, where, registry.rules())
    drafter.pinned = training_kernels(torch_forms.model)
    return drafter.to(target.device)


def drafter_optimizers(drafter: Drafter, settings: DistilSettings) -> list[Optimizer]:
    """Muon for the backbone's matrices, AdamW for the selector, the convolutions and the norms.

    Packed projections are cut into blocks of equal rows that never straddle two projections.
    """
    matrices: dict[tuple[int, int], list[nn.Parameter]] = {}
    selector, vectors = [], []
    for name, p in drafter.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if name.startswith("selector."):
            selector.append(p)
        elif p.dim() != 2 or "_conv." in name:
            vectors.append(p)
        else:
            rows = p.shape[0]
            if leaf == "qkv":
                rows = drafter.config.kv_size
            elif leaf == "gate_up":
                rows = p.shape[0] // 2
            matrices.setdefault((rows, p.shape[1]), []).append(p)
    muon = Muon(
        [{"params": p, "block": block} for block, p in matrices.items()],
        lr=settings.matrix_rate,
        weight_decay=settings.weight_decay,
        momentum=0.95,
    )
    adam = AdamW(
        [
            {"params": selector, "lr": settings.codebook_rate},
            {"params": vectors, "lr": settings.vector_rate},
        ],
        betas=(0.9, 0.95),
        eps=1e-10,
        weight_decay=0.0,
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]
