"""Responses written by the target itself: what a drafter is trained on.

A drafter has to guess what the target says next, not what the authors of the training text said, so
prefixes of training documents are continued by the target, in batches of thousands of rows of one
length: position and visible keys are then the same for all rows, no mask is needed, and a step
costs little more than its launches (on one H200; figures in the model card of the drafter).

Small models loop. A response counts up to where it has fallen into repetition, and not at all when
little is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.errors import TrainingError
from workbench.kernels.reference import rope_table
from workbench.kernels.tables import Kernels
from workbench.model.beam import Beam
from workbench.training.streams import StreamStore

PREFILL_TOKENS = 32768  # prompt tokens a pass: bounds the memory of the experts' activations
NGRAM = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Responses:
    """Rows of one prompt length, continued.

    Attributes:
        tokens: int64 ``[R, T]``, prompt and response.
        prompt: tokens of each row that are prompt.
        valid: int64 ``[R]``, tokens of each row that count, prompt included.
        streams: ``[R, K, taps * H]``, the target's streams of the last K tokens, where they were
            kept (``streams.py``).
    """

    tokens: Tensor
    prompt: int
    valid: Tensor
    streams: Tensor | None = None

    def __post_init__(self) -> None:
        rows, length = self.tokens.shape
        if self.valid.shape != (rows,) or not 0 < self.prompt <= length:
            raise TrainingError("responses: 'valid' needs one number a row and a prompt each")

    @property
    def begin(self) -> int:
        """The first position whose stream is known; 0 where none is."""
        return 0 if self.streams is None else self.tokens.shape[1] - self.streams.shape[1]

    @property
    def counted(self) -> int:
        """Response tokens that count, over all rows."""
        return int((self.valid - self.prompt).clamp(min=0).sum())

    def kept(self, least: int) -> Responses:
        """The rows with at least ``least`` response tokens that count."""
        rows = (self.valid - self.prompt >= least).nonzero()[:, 0]
        return Responses(
            tokens=self.tokens[rows],
            prompt=self.prompt,
            valid=self.valid[rows],
            streams=None if self.streams is None else self.streams[rows.to(self.streams.device)],
        )


class RowsContext:
    """One pass of ``count`` tokens for each of B rows that all hold the same number of tokens.

    Flat tokens are position-major: token ``t * B + b`` is row b's t-th new one. Keys and values of
    every layer are kept whole; what a sliding layer sees is a slice of them.
    """

    kernels: Sequence[Kernels] = ()

    def __init__(self, cache: RowsCache, rows: slice, start: int, count: int) -> None:
        self.cache, self.rows, self.start, self.count = cache, rows, start, count
        device = cache.k[0].device
        self.batch = rows.stop - rows.start
        new = torch.arange(start, start + count, device=device)
        self.positions = new.repeat_interleave(self.batch)
        self.rope = cache.rope
        self._mask: Tensor | None = None
        if count > 1:  # a prefill: which of the keys up to the end each query sees, window aside
            self._distance = new[:, None] - torch.arange(start + count, device=device)

    def destination(
        self, layer: int, packed: Tensor, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """New rows, one a token, in order; :meth:`attend` stores them."""
        shape = (packed.shape[0], kv_heads, self.cache.head_dim)
        self._k, self._v = packed.new_empty(shape), packed.new_empty(shape)
        return self._k, self._v, None

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """q ``[N, A, D]`` over the rows' keys so far -> ``[N, A, D]``."""
        cache, end = self.cache, self.start + self.count
        window = cache.windows[layer]
        first = 0 if window is None else max(0, self.start - window + 1)
        stored = []
        for store, new in ((cache.k[layer], self._k), (cache.v[layer], self._v)):
            store[self.start : end, self.rows] = new.unflatten(0, (self.count, self.batch))
            stored.append(store[first:end, self.rows].permute(1, 2, 0, 3))  # [B, G, S, D]
        keys, values = stored
        group = q.shape[1] // keys.shape[1]
        # Query heads of one KV head become rows: no copy of K and V for grouped-query attention.
        rows = q.view(self.count, self.batch, keys.shape[1], group, -1).permute(1, 2, 0, 3, 4)
        mask = None
        if self.count > 1:
            distance = self._distance[:, first:]
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            mask = seen.repeat_interleave(group, 0)
        o = F.scaled_dot_product_attention(rows.flatten(2, 3), keys, values, attn_mask=mask)
        o = o.unflatten(2, (self.count, group)).permute(2, 0, 1, 3, 4)
        return o.reshape(q.shape)


class RowsCache:
    """Keys and values of ``rows`` sequences of at most ``length`` tokens: ``[T, B, G, D]``."""

    def __init__(self, beam: Beam, rows: int, length: int) -> None:
        c = beam.config
        self.head_dim = c.head_dim
        self.rope = rope_table(length, c.head_dim, c.rope_theta, beam.device)
        self.windows = [
            None if c.is_full(i) else c.sliding_window for i in range(c.num_hidden_layers)
        ]
        shape = (length, rows, c.num_key_value_heads, c.head_dim)
        self.k = [torch.empty(shape, dtype=beam.dtype, device=beam.device) for _ in self.windows]
        self.v = [torch.empty_like(k) for k in self.k]


@torch.no_grad()
def continue_rows(
    beam: Beam,
    prompts: Tensor,
    new_tokens: int,
    *,
    temperature: Tensor | None = None,
    generator: torch.Generator | None = None,
    each_step: Callable[[], None] | None = None,
    keep: StreamStore | None = None,
) -> Tensor:
    """Prompts ``[B, P]`` with ``new_tokens`` more each, int64 ``[B, P + new_tokens]``.

    Args:
        temperature: ``[B]``, 0 for greedy; all greedy when None.
        generator: on the model's device, for the rows with a temperature.
        each_step: called after every token; may raise to stop (an interrupt, a time limit).
        keep: takes the target's streams as they are computed.

    Raises:
        TrainingError: prompts and responses exceed the model's context.
    """
    batch, prompt = prompts.shape
    limit = beam.config.max_position_embeddings
    if prompt < 1 or new_tokens < 1 or prompt + new_tokens > limit:
        raise TrainingError(
            f"prompts of {prompt} and responses of {new_tokens} tokens do not fit the target's "
            f"context of {limit}; lower prompt_max or response"
        )
    tokens = prompts.new_empty(batch, prompt + new_tokens)
    tokens[:, :prompt] = prompts
    cache = RowsCache(beam, batch, prompt + new_tokens)
    sampled = None if temperature is None else temperature.nonzero()[:, 0]
    if sampled is not None and not len(sampled):
        sampled = None

    def pick(hidden: Tensor) -> Tensor:
        logits = beam.logits(hidden)
        if sampled is not None and temperature is not None:
            # Gumbel noise: the maximum is a draw from the softmax.
            noise = torch.empty(len(sampled), logits.shape[1], device=logits.device)
            noise.exponential_(generator=generator).log_().neg_()
            logits[sampled] = logits[sampled] / temperature[sampled, None] + noise
        return logits.argmax(-1)

    def run(ids: Tensor, rows: slice, start: int) -> Tensor:
        """Tokens ``[b, n]`` of some rows, from ``start`` on -> states of the last ``[b, H]``."""
        context = RowsContext(cache, rows, start, ids.shape[1])
        streams = None if keep is None else keep.wanted()
        hidden: Tensor = beam(ids.T.flatten(), context, streams)[-context.batch :]
        if keep is not None and streams is not None:
            keep.put(streams, rows, start)
        return hidden

    if keep is not None:
        keep.open(batch, prompt + new_tokens)
    step = max(1, PREFILL_TOKENS // prompt)
    ends = []
    for low in range(0, batch, step):
        rows = slice(low, min(batch, low + step))
        ends.append(run(prompts[rows], rows, 0))
        if each_step is not None:
            each_step()
    tokens[:, prompt] = pick(torch.cat(ends))
    for at in range(prompt, prompt + new_tokens - 1):
        tokens[:, at + 1] = pick(run(tokens[:, at : at + 1], slice(0, batch), at))
        if each_step is not None:
            each_step()
    return tokens


def valid_lengths(
    tokens: Tensor, prompt: int, eos: int | None, *, run: int = 16, grace: int = 0
) -> Tensor:
    """How many tokens of each row ``[R, T]`` count, int64 ``[R]``, prompt included.

    A response counts up to and with its first end-of-text token, and up to the end of the first
    ``run`` 8-grams in a row that the row has had before (then it is in a loop) plus ``grace``
    tokens. A row shorter than an 8-gram is never cut for repetition.
    """
    rows, length = tokens.shape
    place = torch.arange(length, device=tokens.device)
    valid = torch.full((rows,), length, device=tokens.device)
    if eos is not None:
        ended = (tokens == eos) & (place >= prompt)
        first = torch.where(ended, place, length).amin(1)
        valid = torch.minimum(valid, first + 1)
    if length >= NGRAM + run - 1 and run:
        repeated = repeated_ngrams(tokens)  # [R, T - 7], of the 8-gram that begins there
        repeated = repeated & (place[: repeated.shape[1]] >= prompt - NGRAM + 1)
        total = F.pad(repeated.cumsum(1), (1, 0))
        looping = total[:, run:] - total[:, :-run] == run  # the run of 8-grams that begins here
        begin = torch.where(looping, place[: looping.shape[1]], length).amin(1)
        valid = torch.minimum(valid, (begin + NGRAM + run - 1 + grace).clamp(max=length))
    return valid


def repeated_ngrams(tokens: Tensor) -> Tensor:
    """Whether the 8-gram that begins at a place began earlier in its row, bool ``[R, T - 7]``."""
    # A polynomial hash modulo 2**64 (int64 wraps): equal 8-grams are equal, others all but never.
    grams = tokens.unfold(1, NGRAM, 1)
    hashes = torch.zeros_like(grams[..., 0])
    for i in range(NGRAM):
        hashes = hashes * 6364136223846793005 + grams[..., i] + 1442695040888963407
    ordered, order = hashes.sort(dim=1, stable=True)
    again = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return torch.zeros_like(again).scatter(1, order, again)


class PromptSource:
    """Prompts from a flat token stream ``[M]``: documents that each end with ``eos``.

    A prompt lies within one document. Drawn from the seed and the round alone.
    """

    def __init__(self, tokens: np.ndarray, eos: int, seed: int) -> None:
        self.tokens, self.seed = tokens, seed
        ends = np.flatnonzero(np.asarray(tokens) == eos)
        if not len(ends) or ends[-1] != len(tokens) - 1:
            ends = np.append(ends, len(tokens))
        self.ends = ends  # of each document, its end-of-text token left out
        self.starts = np.concatenate(([0], ends[:-1] + 1))

    def draw(self, round_: int, rows: int, length: int, from_start: float) -> Tensor:
        """Prompts int64 ``[rows, length]``; a share begins where its document does.

        Raises:
            TrainingError: no document has ``length`` tokens.
        """
        sizes = self.ends - self.starts
        long = np.flatnonzero(sizes >= length)
        if not len(long):
            raise TrainingError(
                f"no document of the corpus has {length} tokens to begin with; lower prompt_max "
                "or train on longer texts"
            )
        rng = np.random.default_rng((self.seed, round_))
        room = sizes[long] - length + 1  # places a prompt may begin
        edges = room.cumsum()
        at = rng.integers(0, edges[-1], size=rows)
        which = np.searchsorted(edges, at, side="right")
        offset = at - (edges[which] - room[which])
        headed = rng.random(rows) < from_start
        which[headed] = rng.integers(0, len(long), size=int(headed.sum()))
        offset[headed] = 0
        first = self.starts[long[which]] + offset
        window = np.asarray(self.tokens)[first[:, None] + np.arange(length)]
        return torch.from_numpy(window.astype(np.int64))
