"""Logit lens: what the model would predict if it stopped at each place of its stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor

from workbench.errors import InspectionError
from workbench.kernels import reference
from workbench.model.beam import Beam
from workbench.model.capture import MAX_BYTES, capture, check_bytes, one_prompt, token_label
from workbench.model.display import Shown
from workbench.model.intervene import check_index


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LogitLens(Shown):
    """What the model would predict if it stopped at each place of the residual stream.

    The stream at each of the ``L + 1`` places goes through final norm, head and softcap. Natural
    logarithms; T tokens, k best.

    Attributes:
        model, token_ids, tokens: as in :class:`Capture`.
        layers: the layer before each place: -1 for the embedding, then 0 … L - 1.
        top_ids, top_probs: most likely next tokens, int64 and float32 ``[L + 1, T, k]``.
        entropy: of the next-token distribution, nats, float32 ``[L + 1, T]``.
        kl: KL(final ‖ here), nats ``[L + 1, T]``: what using this distribution in place of the
            model's own costs; 0 in the last row.
        target_rank: rank of the token that comes next in the prompt, int64 ``[L + 1, T]``; 1 is the
            most likely, 0 at the last position, where none comes next.
        target_prob: its probability, float32 ``[L + 1, T]``; NaN at the last position.
        texts: the text of every id in ``top_ids``.
    """

    model: str
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    top_ids: Tensor
    top_probs: Tensor
    entropy: Tensor
    kl: Tensor
    target_rank: Tensor
    target_prob: Tensor
    texts: Mapping[int, str]

    def __repr__(self) -> str:
        places, tokens, top = self.top_ids.shape
        return f"LogitLens({self.model}: {places} places × {tokens} tokens, {top} best)"


def logit_lens(
    beam: Beam, prompt: str | Sequence[int], *, top_k: int = 5, max_bytes: int = MAX_BYTES
) -> LogitLens:
    """Read the residual stream at every place through the model's own head.

    Raises:
        InspectionError: as :func:`capture`, or ``top_k`` is not in 1 … V.
    """
    vocabulary = beam.config.vocab_size
    if check_index(top_k, vocabulary + 1, "top_k") == 0:
        raise InspectionError(f"top_k is 0; ask for 1 … {vocabulary} tokens")
    length = len(one_prompt(beam, prompt))
    check_bytes({"logits": 16 * length * vocabulary}, length, max_bytes)  # four of them at a time
    seen = capture(beam, prompt, router=False, max_bytes=max_bytes)
    assert seen.hidden is not None
    target = torch.tensor(seen.token_ids[1:])[:, None]
    columns: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        final = _log_probs(beam, seen.hidden[-1])
        for stream in seen.hidden:
            logp = _log_probs(beam, stream)
            p = logp.exp()
            ahead = logp[:-1].gather(1, target)  # log-probability of the next token
            rank = 1 + (logp[:-1] > ahead).sum(1)
            top = logp.topk(top_k, -1)
            row = {
                "top_ids": top.indices,
                "top_probs": top.values.exp(),
                "entropy": -(p * logp).sum(-1),
                "kl": (final.exp() * (final - logp)).sum(-1),
                "target_rank": torch.cat((rank, rank.new_zeros(1))),
                "target_prob": torch.cat((ahead[:, 0].exp(), torch.tensor([nan]))),
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    tensors = {name: torch.stack(values) for name, values in columns.items()}
    return LogitLens(
        model=seen.model,
        token_ids=seen.token_ids,
        tokens=seen.tokens,
        layers=tuple(range(-1, beam.config.num_hidden_layers)),
        texts={i: token_label(beam, i) for i in tensors["top_ids"].unique().tolist()},
        **tensors,
    )


def _log_probs(beam: Beam, stream: Tensor) -> Tensor:
    """``[T, H]`` on the CPU -> next-token log-probabilities, float32 ``[T, V]`` on the CPU."""
    x = reference.rms_norm(stream.to(beam.device, beam.dtype), beam.norm, beam.config.rms_norm_eps)
    return beam.logits(x).log_softmax(-1).cpu()
