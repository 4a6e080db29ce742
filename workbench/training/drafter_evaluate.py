"""How good a drafter is on held-out text: recall, accuracy and acceptance lengths.

The target continues held-out prefixes greedily, and the drafter drafts from every position of the
responses. With greedy decoding what is drafted depends on the tokens before alone, so the accepted
length from every position gives exactly the steps that serving would take, for the walk as for the
two drafts it is compared with: the backbone's own best tokens (unary), and the best that any walk
over the candidates could do (oracle).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.model.beam import Beam
from workbench.model.context import SequenceContext
from workbench.spec.draft_attention import SequenceBlocks
from workbench.spec.drafter import Drafter
from workbench.spec.selector import walk
from workbench.training.drafter_loss import pair_scores
from workbench.training.regenerate import continue_rows, repeated_ngrams, valid_lengths

BLOCKS_A_PASS = 2048
TOKENS_A_PASS = 32768


def prompts_of(documents: list[list[int]], count: int, length: int, seed: int) -> Tensor:
    """Prefixes of held-out documents that end anywhere in them, int64 ``[<= count, length]``.

    Documents shorter than ``length`` tokens give none; one document gives several when there are
    fewer documents than prompts.
    """
    long = [d for d in documents if len(d) >= length]
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count if long else 0):
        document = long[i % len(long)]
        start = int(torch.randint(len(document) - length + 1, (1,), generator=generator))
        rows.append(document[start : start + length])
    return torch.tensor(rows, dtype=torch.int64).view(-1, length)


@torch.no_grad()
def evaluate_drafter(
    drafter: Drafter,
    held_out: dict[str, list[list[int]]],
    *,
    prompts: int = 64,
    prompt: int = 128,
    response: int = 128,
    seed: int = 1,
    each_step: Callable[[], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Figures of each class of held-out text; a class without a long enough document is left out.

    Keys of a class:
        acceptance_length: pooled, bonus included, of greedy decoding of the responses.
        acceptance_length_unary, acceptance_length_oracle: of the two other drafts.
        without_loops: the walk's, of the steps before a response falls into repetition.
        from_real_text: the walk's mean from the first token behind real text alone.
        repeated_share: share of the response tokens that begin an 8-gram that was there before.
        recall, accuracy: by slot, over all positions: the label among the candidates, and the
            walk's token right behind a right path (teacher-forced predecessor).
        prompts, tokens: how many.
    """
    found = {}
    for name, documents in held_out.items():
        rows = prompts_of(documents, prompts, prompt, seed)
        if len(rows):
            found[name] = _evaluate(drafter, rows, response, each_step)
    return found


def _evaluate(
    drafter: Drafter, prompts: Tensor, response: int, each_step: Callable[[], None] | None
) -> dict[str, Any]:
    beam, slots = drafter.target, drafter.block - 1
    prompt = prompts.shape[1]
    # A block's length of tokens beyond the last position: every draft has its verdict.
    tokens = continue_rows(beam, prompts.to(beam.device), response + slots, each_step=each_step)
    eos = beam.config.eos_token_id
    ended = valid_lengths(tokens, prompt, eos, run=0)
    looping = valid_lengths(tokens, prompt, eos)
    counts = _accepted(drafter, tokens, prompt, response, each_step)
    end = ended.clamp(max=prompt + response).cpu()
    loops = looping.clamp(max=prompt + response).cpu()
    again = repeated_ngrams(tokens)[:, prompt : prompt + response].float().mean()
    result: dict[str, Any] = {
        "acceptance_length": _replayed(counts["walk"], end - prompt),
        "acceptance_length_unary": _replayed(counts["unary"], end - prompt),
        "acceptance_length_oracle": _replayed(counts["oracle"], end - prompt),
        "without_loops": _replayed(counts["walk"], loops - prompt),
        "from_real_text": round(1 + float(counts["walk"][:, 0].float().mean()), 4),
        "repeated_share": round(float(again), 4),
        "recall": [round(float(x), 4) for x in counts["recall"]],
        "accuracy": [round(float(x), 4) for x in counts["accuracy"]],
        "prompts": len(prompts),
        "tokens": int((end - prompt).sum()),
    }
    return result


def _accepted(
    drafter: Drafter,
    tokens: Tensor,
    prompt: int,
    response: int,
    each_step: Callable[[], None] | None,
) -> dict[str, Tensor]:
    """Accepted drafts from each response position: ``[R, response]`` of walk, unary and oracle.

    Also recall and accuracy ``[N]``, over all of them.
    """
    c, slots = drafter.config, drafter.block - 1
    rows, length = tokens.shape
    parts: dict[str, list[Tensor]] = {name: [] for name in ("walk", "unary", "oracle")}
    recall, accuracy = torch.zeros(2, slots, dtype=torch.float64)
    group = max(1, min(TOKENS_A_PASS // length, BLOCKS_A_PASS // response))
    for low in range(0, rows, group):
        part = tokens[low : low + group]
        context = drafter.context_keys(
            drafter.context(target_streams(drafter, part)),
            torch.arange(length, device=part.device).repeat(len(part)),
        )
        split = [(k.unflatten(0, part.shape), v.unflatten(0, part.shape)) for k, v in context]
        sequence = torch.arange(len(part), device=part.device).repeat_interleave(response)
        places = torch.arange(prompt, prompt + response, device=part.device).repeat(len(part))
        blocks = SequenceBlocks(
            split, sequence, places, drafter.block, c.sliding_window, drafter.limit
        )
        anchors = part[sequence, places]
        hidden = drafter(drafter.block_ids(anchors, drafter.block), blocks, drafter.block)
        mask_rows = hidden.unflatten(0, (-1, drafter.block))[:, 1:]
        proposal = walk(drafter, mask_rows, anchors)
        offset = torch.arange(1, slots + 1, device=part.device)
        labels = part[sequence[:, None], places[:, None] + offset]
        among = (proposal.candidates == labels[..., None]).any(-1)
        for name, right in (
            ("walk", proposal.token_ids == labels),
            ("unary", proposal.candidates[..., 0] == labels),
            ("oracle", among),
        ):
            parts[name].append(right.long().cumprod(1).sum(1).view(len(part), response).cpu())
        recall += among.double().sum(0).cpu()
        forced = _teacher_forced(drafter, mask_rows, anchors, labels, proposal.candidates)
        accuracy += (forced == labels).double().sum(0).cpu()
        if each_step is not None:
            each_step()
    counts = {name: torch.cat(values) for name, values in parts.items()}
    seen = rows * response
    return counts | {"recall": recall / seen, "accuracy": accuracy / seen}


def _teacher_forced(
    drafter: Drafter, hidden: Tensor, anchors: Tensor, labels: Tensor, ids: Tensor
) -> Tensor:
    """The candidate the selector prefers behind the true previous token, int64 ``[B, N]``."""
    unary = drafter.logits(hidden).gather(-1, ids)
    scores = unary + pair_scores(drafter, hidden, anchors, labels, ids)
    return ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]


def _replayed(accepted: Tensor, counted: Tensor) -> float | None:
    """Pooled acceptance length of decoding rows whose accepted lengths ``[R, P]`` are known.

    A row's steps begin at its first response token (which the prefill gave) and go on until
    ``counted`` tokens are there; drafts beyond that are cut. None: there is no step.
    """
    steps = emitted = 0
    for row, count in zip(accepted.tolist(), counted.tolist(), strict=True):
        at = 0
        while at + 1 < min(count, len(row)):
            steps, emitted = steps + 1, emitted + row[at] + 1
            at += row[at] + 1
    return round(emitted / steps, 4) if steps else None


def target_streams(drafter: Drafter, tokens: Tensor) -> Tensor:
    """What the drafter reads of the target, over whole sequences ``[S, T]``: ``[S * T, taps * H]``.

    No gradient.
    """
    streams, _ = target_pass(drafter.target, tokens, drafter.taps)
    return streams


@torch.no_grad()
def target_pass(beam: Beam, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target over whole sequences ``[S, T]``: (tapped streams end to end, final states)."""
    streams = {tap: beam.norm.new_empty(0) for tap in taps}
    context = SequenceContext(beam.config, len(tokens), tokens.shape[1], beam.device)
    hidden = beam(tokens.flatten(), context, streams=streams)
    return torch.cat([streams[tap] for tap in taps], -1), hidden


def headline(held_out: dict[str, dict[str, Any]]) -> float | None:
    """The acceptance length that a run is named by: of code, or of the first class there is."""
    figures = held_out.get("code") or next(iter(held_out.values()), {})
    value: float | None = figures.get("acceptance_length")
    return value
