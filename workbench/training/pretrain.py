"""Pretraining of a tiny Beam: ``workbench train model --config F [--resume]``.

Float32 weights, bfloat16 arithmetic on CUDA, Muon for matrices and AdamW for the rest. The router's
correction bias is not trained by gradient: after every step it moves against each expert's load, so
that no expert dies and no loss term pulls at the router.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from workbench.kernels import ops
from workbench.model.beam import Beam, SparseMLP
from workbench.model.checkpoint import load, save
from workbench.model.config import BeamConfig
from workbench.model.tokenizer import Tokenizer
from workbench.training.context import TrainingContext
from workbench.training.data import open_stream
from workbench.training.evaluate import evaluate_held_out
from workbench.training.optimizer import Muon, split_parameters
from workbench.training.settings import TrainingSettings, read_settings
from workbench.training.state import load_state, save_state


class Progress(Protocol):
    """Told after every logged step; the command line draws a bar from it."""

    def __call__(self, step: int, steps: int, loss: float, tokens_per_second: float) -> None:
        """``loss`` is nats a token, averaged since the last call."""
        ...


class CountingRouter(nn.Module):
    """A router in training: float32 under autocast, and it counts each expert's tokens."""

    load: Tensor

    def __init__(self, config: BeamConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)
        self.register_buffer("load", torch.zeros(config.num_experts), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As :class:`workbench.model.beam.Router`."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = ops.router_scores(x, self.weight)
            ids, weights = ops.route(
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
                module.expert_mlp = ops.expert_mlp_dense  # no host round trip, compiles whole
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
    return beam.to(device)


def optimizers_for(beam: Beam, settings: TrainingSettings) -> list[Optimizer]:
    """Muon for the matrices, AdamW for embedding, head, routers and vectors."""
    matrices, rest = split_parameters(beam)
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


def rate_factor(step: int, settings: TrainingSettings) -> float:
    """Learning-rate factor of ``step``: linear warm-up, flat, linear cool-down to zero."""
    up = (step + 1) / max(1, settings.warmup)
    cooldown = settings.cooldown * settings.steps
    down = (settings.steps - step) / cooldown if cooldown else 1.0
    return min(1.0, up, down)


@torch.no_grad()
def balance(beam: Beam, rate: float) -> None:
    """Move every correction bias against its expert's load since the last call."""
    for module in beam.modules():
        if isinstance(module, CountingRouter):
            module.correction_bias.add_((module.load.mean() - module.load).sign(), alpha=rate)
            module.correction_bias.sub_(module.correction_bias.mean())
            module.load.zero_()


def train(
    settings: TrainingSettings, *, resume: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Train, save and evaluate; returns the record that is also written as ``training.json``.

    Interrupting (Ctrl-C) saves the state at the end of the running step and re-raises;
    ``resume=True`` then goes on to exactly the weights an uninterrupted run would have had.

    Raises:
        TrainingError: corpus or saved state cannot be used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_folder(settings.tokenizer)
    stream = open_stream(settings.corpus, tokenizer, settings.length, settings.seed)
    beam = build(settings.model, settings.seed, device)
    optimizers = optimizers_for(beam, settings)
    record: dict[str, Any] = {"step": 0, "seconds": 0.0, "losses": []}
    if resume:
        record = load_state(settings.state, beam, optimizers)
    loss_of = _loss_function(beam, settings, device)
    pace = max(1, settings.steps // 200)  # about 200 points on the loss curve
    total = torch.zeros((), device=device)
    since, clock, begun = 0, time.perf_counter(), time.perf_counter()
    step = record["step"]

    def keep() -> None:
        record["seconds"] += time.perf_counter() - begun
        save_state(settings.state, step, beam, optimizers, record)

    try:
        while step < settings.steps:
            factor = rate_factor(step, settings)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * factor
            batch = stream.batch(step, settings.batch, settings.length)
            loss = loss_of(batch.to(device, non_blocking=True))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            balance(beam, settings.balance_rate * min(1.0, 2 * factor))
            total += loss.detach()
            since, step = since + 1, step + 1
            record["step"] = step
            if step % pace == 0 or step == settings.steps:
                mean = float(total) / since
                if not math.isfinite(mean):
                    raise FloatingPointError(f"the loss is {mean} at step {step}")
                record["losses"].append([step, round(mean, 4)])
                seconds = time.perf_counter() - clock
                if progress is not None:
                    tokens = since * settings.batch * settings.length
                    progress(step, settings.steps, mean, tokens / seconds)
                total.zero_()
                since, clock = 0, time.perf_counter()
            if step % settings.save_every == 0 and step < settings.steps:
                keep()
                begun = time.perf_counter()
    except KeyboardInterrupt:
        keep()
        raise
    if device.type == "cuda":
        torch.cuda.synchronize()
    record["seconds"] += time.perf_counter() - begun
    return _finish(beam, tokenizer, settings, record, device)


def run(
    config: str | Path, resume: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """What the command line calls: read the configuration, train, report the contract's keys."""
    return train(read_settings(config), resume=resume, progress=progress)


def _loss_function(
    beam: Beam, settings: TrainingSettings, device: torch.device
) -> Callable[[Tensor], Tensor]:
    context = TrainingContext(settings.model, settings.batch, settings.length, device)

    def loss_of(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = beam.logits(beam(tokens[:, :-1].flatten(), context))
        return F.cross_entropy(logits, tokens[:, 1:].flatten())

    if device.type == "cuda" and settings.compile:
        compiled: Callable[[Tensor], Tensor] = torch.compile(loss_of)
        return compiled
    return loss_of


def _finish(
    beam: Beam,
    tokenizer: Tokenizer,
    settings: TrainingSettings,
    record: dict[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    trained = Beam(settings.model)
    trained.load_state_dict({k: v.cpu() for k, v in beam.state_dict().items()})
    trained.tokenizer = tokenizer
    save(trained, settings.output, tokenizer_folder=settings.tokenizer)
    # What is reported is measured on the file that was written, bfloat16 rounding included.
    shipped = load(settings.output, device=device, dtype=torch.float32)
    held_out = evaluate_held_out(shipped, settings)
    losses = record["losses"]
    result = {
        "steps": record["step"],
        "seconds": round(record["seconds"], 1),
        "loss": losses[-1][1] if losses else None,
        "bits_per_byte": held_out.get("heldout_code", {}).get("bits_per_byte"),
        "checkpoint": str(settings.output),
        "held_out": held_out,
        "tokens": record["step"] * settings.batch * settings.length,
        "hardware": _hardware(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "settings": {
            name: getattr(settings, name)
            for name in TrainingSettings.__dataclass_fields__
            if name not in ("model", "output", "state", "corpus", "tokenizer")
        },
        "losses": losses,
    }
    temporary = settings.output / f".training.json.{os.getpid()}"
    temporary.write_text(json.dumps(result) + "\n")
    os.replace(temporary, settings.output / "training.json")
    return result


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
