"""A Beam in training: its initial weights, and routers that count and balance their experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.kernels import reference, registry
from workbench.kernels.requirements import Where
from workbench.kernels.tables import Kernels
from workbench.model.beam import Beam, SparseMLP
from workbench.model.config import BeamConfig


class CountingRouter(nn.Module):
    """A router in training: float32 under autocast, and it counts each expert's tokens."""

    load: Tensor

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)
        self.register_buffer("load", torch.zeros(config.num_experts), persistent=False)

    def forward(self, x: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """As :class:`workbench.model.beam.Router`."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = reference.router_scores(x, self.weight)
            ids, weights = reference.route(
                scores,
                self.correction_bias,
                c.num_experts_per_tok,
                c.n_group,
                c.topk_group,
                c.norm_topk_prob,
            )
        with torch.no_grad():
            ones = torch.ones_like(ids, dtype=torch.float32).flatten()
            self.load.add_(torch.zeros_like(self.load).scatter_add(0, ids.flatten(), ones))
        return ids, weights


def build(config: BeamConfig, seed: int, device: torch.device) -> Beam:
    """A Beam with trainable float32 weights, initialised from ``seed``.

    The embedding has unit variance (the depth-scaled stream keeps it); matrices have variance
    1 / fan-in; the post-norms make the scale of what follows them irrelevant.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        beam = Beam(config)
        for module in beam.modules():
            if isinstance(module, SparseMLP):
                module.router = CountingRouter(config)  # type: ignore[assignment]
        for name, p in beam.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            with torch.no_grad():
                if leaf.endswith("norm"):
                    p.fill_(1.0)
                elif leaf in ("gate_bias", "correction_bias"):
                    p.zero_()
                else:
                    fan_in = p.shape[-2] if leaf == "down" and p.dim() == 3 else p.shape[-1]
                    std = {"embed_tokens": 1.0, "lm_head": 0.02}.get(leaf, fan_in**-0.5)
                    p.copy_(torch.randn(p.shape, generator=generator) * std)
            p.requires_grad_(leaf != "correction_bias")
    # Training differentiates and compiles the torch forms, whatever is selected for decoding; the
    # dense form of the experts needs no host round trip.
    where = Where.of(device, torch.float32, beam.shapes)
    beam.pinned = registry.resolve(beam.kinds, where, registry.rules(expert_mlp="dense"))
    return beam.to(device)


@torch.no_grad()
def balance(beam: Beam, rate: float) -> None:
    """Move every correction bias against its expert's load since the last call."""
    for module in beam.modules():
        if isinstance(module, CountingRouter):
            module.correction_bias.add_((module.load.mean() - module.load).sign(), alpha=rate)
            module.correction_bias.sub_(module.correction_bias.mean())
            module.load.zero_()
