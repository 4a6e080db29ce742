"""The target's streams of the responses, kept as the target writes them.

What a drafter reads of its target does not change while the drafter is trained. Kept, it spares
every training step the target's pass over the step's sequences, prompts included; it takes
``2 * taps * H`` bytes a token in bfloat16 (2.5 kB for beam-tiny), so there is a limit for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import TrainingError
from workbench.kernels.footprint import free_bytes
from workbench.model.beam import Beam

# Beside the streams: caches while the target writes, activations while the drafter is trained.
RESERVED_SHARE = 0.25


class StreamStore:
    """Streams of a batch of rows, from position ``first`` on: ``kept [B, T - first, taps * H]``.

    The last token's stay zero: nothing is written behind it, and no block looks at it.
    """

    def __init__(self, beam: Beam, taps: tuple[int, ...], first: int) -> None:
        self.beam, self.taps, self.first = beam, taps, first
        self.kept = torch.empty(0)

    def bytes(self, rows: int, length: int) -> int:
        """What ``rows`` of ``length`` tokens take."""
        width = len(self.taps) * self.beam.config.hidden_size
        return rows * (length - self.first) * width * self.beam.dtype.itemsize

    def open(self, rows: int, length: int) -> None:
        """Make room for ``rows`` of ``length`` tokens."""
        width = len(self.taps) * self.beam.config.hidden_size
        shape = (rows, length - self.first, width)
        self.kept = torch.zeros(shape, dtype=self.beam.dtype, device=self.beam.device)

    def wanted(self) -> dict[int, Tensor]:
        """What the target's pass is to fill in."""
        return dict.fromkeys(self.taps, torch.empty(0))

    def put(self, streams: dict[int, Tensor], rows: slice, start: int) -> None:
        """Streams ``[n * b, H]`` each of ``n`` tokens of b ``rows`` from ``start`` on."""
        batch = rows.stop - rows.start
        for tap, part in zip(self.taps, self.kept.chunk(len(self.taps), -1), strict=True):
            new = streams[tap].unflatten(0, (-1, batch))  # position-major
            unseen = max(0, self.first - start)
            if unseen < len(new):
                at = start + unseen - self.first
                part[rows, at : start + len(new) - self.first] = new[unseen:].transpose(0, 1)


def check_room(gigabytes: float, device: torch.device) -> None:
    """Refuse to keep more than the device has room for.

    Raises:
        TrainingError: more than three quarters of what is free.
    """
    free = free_bytes(str(device))
    most = None if free is None else free * (1 - RESERVED_SHARE) / 1e9
    if most is not None and gigabytes > most:
        raise TrainingError(
            f"stream_gigabytes asks for {gigabytes:g} GB of memory on {device}, where {most:.1f} "
            "can be taken for it; lower it (0 keeps nothing)"
        )
