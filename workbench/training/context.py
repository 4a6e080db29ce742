"""The training pass's attention: flash attention for full layers, FlexAttention for the window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext


class TrainingContext(SequenceContext):
    """:class:`SequenceContext` that skips what a sliding window hides, on CUDA."""

    def __init__(
        self, config: BeamConfig, batch: int, length: int, device: torch.device | str
    ) -> None:
        super().__init__(config, batch, length, device)
        self.window_blocks = None
        if torch.device(device).type == "cuda":
            from torch.nn.attention.flex_attention import create_block_mask

            window = config.sliding_window

            def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (q >= k) & (q - k < window)

            self.window_blocks = create_block_mask(
                visible, None, None, length, length, device=device
            )

    def core(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of ``[B, A, T, D]`` on itself."""
        if self.config.is_full(layer):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.window_blocks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.window_mask)
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, block_mask=self.window_blocks)
