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

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """As in :class:`SequenceContext`, through FlexAttention where the window hides blocks."""
        if self.config.is_full(layer) or self.window_blocks is None:
            return super().attend(layer, q)
        from torch.nn.attention.flex_attention import flex_attention

        group = q.shape[1] // self.k.shape[1]
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, self.k, self.v))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        o = flex_attention(q, k, v, block_mask=self.window_blocks)
        assert isinstance(o, Tensor)  # for the type checker: it gives more only when asked
        return o.transpose(1, 2).flatten(0, 1)
