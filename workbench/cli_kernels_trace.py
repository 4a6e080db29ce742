"""The traced step of ``workbench kernels bench --timeline``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from workbench.cli_kernels_asked import Asked


def trace(asked: Asked, dtype: torch.dtype, path: Path) -> dict[str, Any]:
    """Trace a decode step and write it; what it was, for the document."""
    import torch

    from workbench.kernels.timeline import trace_step
    from workbench.terminal import note

    beam, what = _traced_model(asked, dtype)
    batch, before = max(asked.tokens), min(64, asked.shapes.window)
    cache = beam.new_cache(slots=batch, rollback=16)
    ids = torch.arange(batch * before, device=beam.device) % 97 + 1
    with torch.inference_mode():
        beam.extend(cache, ids, [before] * batch)

        def step() -> None:
            beam.logits(beam.extend(cache, ids[:batch], [1] * batch))

        traced = trace_step(beam, step, device=asked.device)
    traced.write(path)
    what = f"a decode step of {batch} sequence{'s' * (batch != 1)} after {before} tokens, {what}"
    note(f"wrote {path}: {what}; open it at ui.perfetto.dev")
    return {
        "file": str(path),
        "what": what,
        "microseconds": {k: round(v, 1) for k, v in traced.spans.items()},
        "calls": dict(traced.calls),
        "measures": "kernels on the GPU" if traced.device == "cuda" else "calls on the CPU",
    }


def _traced_model(asked: Asked, dtype: torch.dtype) -> tuple[Any, str]:
    """The model, or, where it has no weights here, the first layers of one rank of its shape."""
    from dataclasses import replace

    import torch

    from workbench.model.beam import Beam
    from workbench.model.checkpoint import load
    from workbench.model.parallel import Shard
    from workbench.model.presets import resolve

    resolved = resolve(asked.model)
    if resolved.folder is not None and asked.tp == 1:
        return load(asked.model, device=asked.device, dtype=dtype), resolved.name
    config = resolved.config
    kinds = list(zip(config.layer_types, config.mlp_layer_types, strict=True))
    wanted = {kind for pair in kinds for kind in pair}
    count = next(
        n for n in range(1, len(kinds) + 1) if {k for pair in kinds[:n] for k in pair} == wanted
    )
    count = min(len(kinds), count + 1)
    config = replace(
        config,
        num_hidden_layers=count,
        layer_types=config.layer_types[:count],
        mlp_layer_types=config.mlp_layer_types[:count],
    )
    with torch.device("meta"):
        beam = Beam(config, Shard(rank=0, world=asked.tp))
    beam.connect(_Alone(asked.tp))
    generator = torch.Generator(device=asked.device).manual_seed(0)
    for module in beam.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            kind = torch.float32 if weight.dtype == torch.float32 and _is_router(module) else dtype
            made = torch.empty(weight.shape, dtype=kind, device=asked.device)
            fan_in = weight.shape[-1]
            made.normal_(std=fan_in**-0.5, generator=generator)
            if weight.dim() == 1 or "norm" in name:
                made.add_(1)
            setattr(module, name, torch.nn.Parameter(made, requires_grad=False))
    what = f"the first {count} layers of {resolved.name} on one of {asked.tp} ranks, random weights"
    return beam.eval(), f"{what}, no communication"


def _is_router(module: Any) -> bool:
    return type(module).__name__ == "Router"


class _Alone:
    """The other ranks are absent: sums stay partial, which costs no time."""

    def __init__(self, world: int) -> None:
        self.world = world

    def all_reduce(self, x: Any) -> Any:
        """The rank's own part."""
        return x

    def all_gather(self, x: Any) -> Any:
        """The rank's own part."""
        return x
