"""Blocks drafted at every position of a continuation, for replay and for the record.

A greedy continuation is the same whatever is drafted, so what the drafter would propose at each of
its positions, and how much of it the target would accept, can be recorded once. Any policy of
drafting and trimming can then be played through exactly, without a model.

Above temperature 0 the same holds of one sampled continuation, as drafts are chosen greedily: the
verdict accepts a draft d with probability p(d) and gives any other token t with probability p(t),
which is to draw the next token from p and to accept d where it is that token. So the text can be
drawn first, and what is accepted are the drafts that agree with it. Which draws a live run would
have made is another matter: the two agree in distribution, not token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.errors import DraftError, PromptError
from workbench.model.beam import Beam
from workbench.model.context import SequenceContext
from workbench.model.generate import Cancel, Generation
from workbench.model.prompts import Prompts, prompt_ids
from workbench.model.sampling import Sampling
from workbench.spec.asked import check_kinds, check_pair, check_room
from workbench.spec.decode import decode
from workbench.spec.draft_attention import SequenceBlocks
from workbench.spec.drafter import Drafter
from workbench.spec.positions import Position as Position
from workbench.spec.positions import at_every_position as at_every_position
from workbench.spec.positions import replay_full as replay_full
from workbench.spec.positions import replayed as replayed
from workbench.spec.selector import Proposal, walk

Progress = Callable[[int, int], None]
_TOGETHER = 16  # prompts whose continuations are decoded in one batch
_GATHERED = 2**24  # elements of K that the blocks of one pass look at, all of them together
_GREEDY = Sampling()
_DECIMALS = 6  # of recorded scores: finer than float32 is at their size


def record_every_position(
    beam: Beam,
    drafter: Drafter,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    speculative_tokens: int | None = None,
    sampling: Sampling = _GREEDY,
    stop_at_eos: bool = True,
    unary: bool = False,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Iterator[Position]:
    """Draft at every output position of the continuations; a prompt's positions in order.

    The first new token, which the prefill gives, has no block: the first position is the one
    behind it, as in the decode loop. ``accepted`` is exact up to the last position: the target
    continues as many tokens further as a block has drafts, past a stop token and past
    ``max_new_tokens``, unless the context is full before.

    Args:
        beam, drafter: the target, and a drafter of it.
        prompts: as for :func:`workbench.spec.decode.decode`; request numbers are their order.
        max_new_tokens: most tokens of each prompt.
        speculative_tokens: drafts a block; as many as the drafter was trained with when None.
        sampling: how the continuations are picked, each with a draw of its own (seed and number);
            drafts are greedy at any temperature. Give the record's header the same sampling.
        stop_at_eos: whether an end-of-sequence token ends its sequence.
        unary: whether the candidates' own logits are recorded, too.
        progress: told after each prompt how many are done, of how many.
        cancel: looked at between passes; when set, the record ends with the prompt before.

    Raises:
        PromptError: a prompt or ``max_new_tokens`` that cannot be decoded from. Raised here.
        DraftError: a drafter of another target, or a number of drafts out of range. Raised here.
    """
    check_kinds(beam, sampling, None, cancel)
    check_pair(beam, drafter)
    drafts = drafter.block - 1 if speculative_tokens is None else speculative_tokens
    if not isinstance(drafts, int) or isinstance(drafts, bool) or not 1 <= drafts < 64:
        raise DraftError(f"speculative_tokens must be a whole number from 1 to 63, not {drafts!r}")
    most = max_new_tokens
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise PromptError(f"max_new_tokens must be a whole number of at least 1, not {most!r}")
    several = prompt_ids(beam, prompts)
    for ids in several:
        room = beam.config.max_position_embeddings - len(ids)
        check_room(drafter, len(ids), min(most, room))
    eos = beam.config.eos_token_id
    if eos is None and beam.tokenizer is not None:
        eos = beam.tokenizer.eos_id
    stop = eos if stop_at_eos else None
    return _record(beam, drafter, several, most, drafts, sampling, stop, unary, progress, cancel)


def _record(
    beam: Beam,
    drafter: Drafter,
    prompts: list[list[int]],
    most: int,
    drafts: int,
    sampling: Sampling,
    eos: int | None,
    unary: bool,
    progress: Progress | None,
    cancel: Cancel | None,
) -> Iterator[Position]:
    limit = beam.config.max_position_embeddings
    for start in range(0, len(prompts), _TOGETHER):
        batch = prompts[start : start + _TOGETHER]
        written = _continued(beam, batch, start, most + drafts, sampling, cancel)
        for request, (prompt, generation) in enumerate(zip(batch, written, strict=True), start):
            if generation.finish is None:
                return  # cancelled
            ids = [*prompt, *generation.token_ids]
            end = min(len(prompt) + most, limit)  # where max_new_tokens or the context ends it
            stop = ids.index(eos, len(prompt)) + 1 if eos in ids[len(prompt) : end] else end
            found: list[Position] = []
            for first, proposal in blocks(beam, drafter, ids, len(prompt), stop - 1, drafts):
                found += _positions(request, ids, first + 1, end, proposal, unary)
                if cancel is not None and cancel.is_set():
                    return
            yield from found
            if progress is not None:
                progress(request + 1, len(prompts))


def _continued(
    beam: Beam,
    batch: list[list[int]],
    first: int,
    tokens: int,
    sampling: Sampling,
    cancel: Cancel | None,
) -> list[Generation]:
    """Continuations of prompts from number ``first`` on, each with a seed of its own."""
    seeds = [(sampling.seed + first + i) % 2**63 for i in range(len(batch))]
    run = decode(
        beam,
        None,
        batch,
        max_new_tokens=tokens,
        sampling=sampling,
        seeds=seeds,
        stop_at_eos=False,
        cancel=cancel,
    )
    for _ in run:
        pass
    return [run.generations[request] for request in range(len(batch))]


def blocks(
    beam: Beam, drafter: Drafter, ids: list[int], first: int, end: int, drafts: int
) -> Iterator[tuple[int, Proposal]]:
    """Greedy drafts behind every anchor from ``first`` up to ``end - 1``, a part at a time.

    Yields the first anchor of a part and its :class:`Proposal`, R consecutive anchors. A block
    sees the context strictly before its anchor, computed in one pass of the target over ``ids``.
    """
    if end <= first:
        return
    c, query_len = drafter.config, drafts + 1
    with torch.inference_mode():
        sequence = torch.tensor(ids[:end], device=beam.device)
        taps: dict[int, Tensor] = dict.fromkeys(drafter.taps, sequence)
        beam(sequence, SequenceContext(beam.config, 1, end, beam.device), taps)
        kv = drafter.context(torch.cat([taps[layer] for layer in drafter.taps], -1))
        kept = drafter.context_keys(kv, torch.arange(end, device=beam.device))
        context = [(k[None], v[None]) for k, v in kept]
    width = (min(c.sliding_window, end) + query_len) * c.kv_size
    together = max(1, _GATHERED // width)
    for start in range(first, end, together):
        with torch.inference_mode():
            anchors = torch.arange(start, min(start + together, end), device=beam.device)
            attention = SequenceBlocks(
                context,
                torch.zeros_like(anchors),
                anchors,
                query_len,
                c.sliding_window,
                drafter.limit,
            )
            tokens = sequence[anchors]
            hidden = drafter(drafter.block_ids(tokens, query_len), attention, query_len)
            proposal = walk(drafter, hidden.unflatten(0, (-1, query_len))[:, 1:], tokens)
        yield start, proposal


def _positions(
    request: int, ids: list[int], first: int, end: int, proposal: Proposal, unary: bool
) -> list[Position]:
    """Positions from ``first`` on; ``ids`` go on behind ``end`` as far as the target did."""
    drafted = proposal.token_ids.tolist()
    candidates = proposal.candidates.tolist()
    scores, own = (
        x.double().round(decimals=_DECIMALS).tolist() for x in (proposal.scores, proposal.unary)
    )
    made = []
    for row, drafts in enumerate(drafted):
        at = first + row
        accepted = 0
        for draft, token in zip(drafts, ids[at : at + len(drafts)], strict=False):
            if draft != token:
                break
            accepted += 1
        made.append(
            Position(
                request=request,
                position=at,
                token_id=ids[at],
                left=end - at,
                drafted=tuple(drafts),
                accepted=accepted,
                candidates=_table(candidates[row]),
                scores=_table(scores[row]),
                unary=_table(own[row]) if unary else (),
            )
        )
    return made


def _table(rows: list[list[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, rows))
