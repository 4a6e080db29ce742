"""The training pass's attention: flash attention for full layers, FlexAttention for the window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext


def window_blocks(window: int, length: int, device: torch.device | str) -> Any:
    """FlexAttention's block mask of ``length`` tokens that see themselves and ``window - 1`` back.

    FlexAttention computes it forward on a CPU as well (which is how it is tested), but backward on
    CUDA alone.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < window)

    return create_block_mask(visible, None, None, length, length, device=device)


class TrainingContext(SequenceContext):
    """:class:`SequenceContext` that skips what a sliding window hides, on CUDA."""

    def __init__(
        self, config: BeamConfig, batch: int, length: int, device: torch.device | str
    ) -> None:
        super().__init__(config, batch, length, device)
        self.window_blocks = None
        if torch.device(device).type == "cuda":
            self.window_blocks = window_blocks(config.sliding_window, length, device)

    def core(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of ``[B, A, T, D]`` on itself."""
        if self.config.is_full(layer) or self.window_blocks is None:
            return super().core(layer, q, k, v)
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, block_mask=self.window_blocks)
