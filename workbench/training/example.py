"""One training example of a drafter as plain values: to look at, not to train on.

Made by the functions that a training step uses, from one prompt instead of a corpus.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from workbench.errors import TrainingError
from workbench.model.beam import Beam
from workbench.training.anchors import TrainingBlocks, draw_anchors, make_blocks
from workbench.training.distil_settings import DistilSettings
from workbench.training.drafter_loss import slot_weights
from workbench.training.regenerate import continue_rows, valid_lengths


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingExample:
    """A sequence of T tokens with n blocks of an anchor and N slots.

    Attributes:
        token_ids: prompt and response.
        prompt: how many of them are prompt.
        valid: how many count, prompt included; the rest is a loop, or lies behind an end of text.
        places: position of each block's anchor, ascending.
        labels: of each block the N tokens that the slots are to name.
        live: whether a label counts.
        weights: of each slot in the loss; the same for all blocks.
        seen: bool ``[n * (N + 1), T + n * (N + 1)]``: which keys a row of a block sees. Keys are
            the target's context, position by position, then the rows of all blocks.
        window: positions of the context that a row sees at most, its own included.
    """

    token_ids: tuple[int, ...]
    prompt: int
    valid: int
    places: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    live: tuple[tuple[bool, ...], ...]
    weights: tuple[float, ...]
    seen: np.ndarray
    window: int


@torch.no_grad()
def training_example(
    beam: Beam,
    settings: DistilSettings,
    prompt: str,
    *,
    response: int = 64,
    blocks: int = 4,
    seed: int = 0,
) -> TrainingExample:
    """What training with ``settings`` would make of ``prompt``, with fewer blocks.

    The target continues the prompt greedily by ``response`` tokens; ``blocks`` anchors are drawn.

    Raises:
        TrainingError: the target has no tokenizer, prompt and response exceed its context, or the
            response is too short for so many anchors.
    """
    if beam.tokenizer is None:
        raise TrainingError(f"{beam.name} has no tokenizer.json, so no text can be read for it")
    config = settings.drafter_config(beam.config)
    query = config.block_size or 8
    ids = torch.tensor([beam.tokenizer.encode(prompt)], device=beam.device)
    length = ids.shape[1]
    tokens = continue_rows(beam, ids, response)
    valid = valid_lengths(
        tokens,
        length,
        beam.config.eos_token_id,
        run=settings.repeat_run,
        grace=settings.repeat_grace,
    )
    tokens, valid = tokens.cpu(), valid.cpu()
    generator = torch.Generator().manual_seed(seed)
    places = draw_anchors(valid, length, blocks, tokens.shape[1], generator).sort(1).values
    if int(places.min()) < 0:
        raise TrainingError(
            f"{blocks} anchors do not fit {int(valid) - length} response tokens that count; ask "
            "for fewer blocks or a longer response"
        )
    made = make_blocks(tokens, valid, places, query)
    nothing = torch.empty(1, tokens.shape[1], 1, 1)  # only its length says what is seen
    attention = TrainingBlocks(
        [(nothing, nothing)],
        places,
        query,
        config.sliding_window,
        min(config.max_position_embeddings, beam.config.max_position_embeddings),
    )
    return TrainingExample(
        token_ids=tuple(tokens[0].tolist()),
        prompt=length,
        valid=int(valid),
        places=tuple(places[0].tolist()),
        labels=tuple(map(tuple, made.labels.tolist())),
        live=tuple(map(tuple, made.live.tolist())),
        weights=tuple(slot_weights(query - 1, settings.decay).tolist()),
        seen=attention.seen[0, 0].numpy(),
        window=config.sliding_window,
    )
