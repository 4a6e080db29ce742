"""Bring every sublayer's output to a scale of about one, by exact powers of two.

Training leaves the scale of ``o_proj`` and the down projections free, since the norm behind them
cancels it; in beam-tiny it drifted to 30-130. The function of the model does not depend on it, but
the absolute rounding error of those outputs does, so the finished weights are scaled back. A power
of two changes no bit of a weight but its exponent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.model.beam import Beam


@torch.no_grad()
def rescale_outputs(beam: Beam, token_ids: Tensor) -> dict[str, int]:
    """Scale ``o_proj`` and ``down`` of every layer so that its outputs have an RMS near one.

    Args:
        beam: the model; its weights are changed in place.
        token_ids: int64 ``[T]``, the text that the outputs are measured on.

    Returns:
        The exponent of two each weight was multiplied by, by parameter name.
    """
    rms: dict[str, float] = {}

    def meter(name: str) -> Callable[[Any, Any, Tensor], None]:
        def note(_module: Any, _inputs: Any, output: Tensor) -> None:
            rms[name] = float(output.float().square().mean().sqrt())

        return note

    outputs = {}
    for index in range(len(beam.layers)):
        outputs[f"layers.{index}.attention.o_proj"] = f"layers.{index}.attention"
        outputs[f"layers.{index}.mlp.down"] = f"layers.{index}.mlp"
    handles = [
        beam.get_submodule(module).register_forward_hook(meter(name))
        for name, module in outputs.items()
    ]
    try:
        beam.sequence_logits(token_ids)
    finally:
        for handle in handles:
            handle.remove()
    exponents = {}
    for name, size in rms.items():
        exponents[name] = -round(float(torch.tensor(size).log2())) if size > 0 else 0
        beam.get_parameter(name).mul_(2.0 ** exponents[name])
    return exponents
