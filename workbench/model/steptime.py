"""How long a step must take: bytes, FLOPs and communication of every operation on one GPU.

Everything here is **modelled**: a pure roofline with no constant fitted to any measurement. It
leaves out launches, chains of dependent small kernels, latency of communication, sampling, the
scheduler, uneven routing, and tile and wave quantisation, so real steps are slower; how much,
stands in :mod:`workbench.model.references`.

What counts, by operation: each weight is read once a step; of the experts, those that some token
chose; a sequence's keys and values once, however many query heads and rows use them; activations
once into and once out of each operation, intermediates staying on the chip. A step's time is the
sum over operations (none overlaps another); the largest of the three totals is the floor that no
overlap can beat. Communication moves no bytes of memory here, only bytes on the wire.

Rows are tokens that this GPU's tensor-parallel group runs; sequences are spread evenly over the
data-parallel groups and the figures are those of the fullest GPU.
"""

from __future__ import annotations

from typing import Any, Unpack

from workbench.kernels.roofline import Rates
from workbench.model.asked import SizingError, shown
from workbench.model.config import BeamConfig, is_int
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_settings import MOST_BATCHED_TOKENS, MOST_SEQUENCES
from workbench.model.layout import Layout
from workbench.model.step_operations import (
    Operations,
    attention,
    draft,
    head,
    mlps,
    norms_and_sums,
    visible_pairs,
)
from workbench.model.step_values import (
    Operation,
    StepKind,
    StepOptions,
    StepSettings,
    StepTime,
    with_shares,
)
from workbench.model.weights import matrices

__all__ = [
    "Operation",
    "StepOptions",
    "StepSettings",
    "StepTime",
    "decode_step",
    "draft_step",
    "prefill_step",
    "prompt_rate",
    "speculative_step",
    "verify_step",
    "visible_pairs",
]

# -- the steps ----------------------------------------------------------------------------------


def decode_step(
    config: BeamConfig, *, batch: int, context: int, rates: Rates, **options: Unpack[StepOptions]
) -> StepTime:
    """One token for each of ``batch`` sequences of ``context`` tokens, the new one included.

    ``batch`` counts over all data-parallel groups. Options as in :class:`StepSettings`.

    Raises:
        SizingError: a value that cannot be, with what to give instead.
    """
    _check_context(config, context)
    return _step(
        config, StepSettings(rates=rates, **options), kind="decode", sequences=batch, new=1,
        earlier=context - 1, what=f"decode, batch {batch}, context {context:,}",
    )  # fmt: skip


def verify_step(
    config: BeamConfig,
    *,
    batch: int,
    context: int,
    draft_tokens: int,
    rates: Rates,
    **options: Unpack[StepOptions],
) -> StepTime:
    """Verify ``draft_tokens`` drafts a sequence: that many rows and one, every row with logits.

    ``context`` counts up to and including the last emitted token, the first row; the drafts come
    after it. With no drafts this is :func:`decode_step`.

    Raises:
        SizingError: a value that cannot be, with what to give instead.
    """
    if not is_int(draft_tokens) or draft_tokens < 0:
        raise SizingError(f"draft_tokens must be 0 or more, not {shown(draft_tokens)}")
    _check_context(config, context, draft_tokens)
    return _step(
        config, StepSettings(rates=rates, **options), kind="verify", sequences=batch,
        new=draft_tokens + 1, earlier=context - 1,
        what=f"verify {draft_tokens} drafts, batch {batch}, context {context:,}",
    )  # fmt: skip


def prefill_step(
    config: BeamConfig,
    *,
    sequences: int,
    tokens: int,
    rates: Rates,
    earlier_context: int = 0,
    logits: bool = True,
    **options: Unpack[StepOptions],
) -> StepTime:
    """``tokens`` tokens of each of ``sequences`` sequences, after ``earlier_context`` cached ones.

    The last row of each sequence has logits, or none where a chunk does not end a prompt
    (``logits`` False).

    Raises:
        SizingError: a value that cannot be, with what to give instead.
    """
    if not is_int(earlier_context) or earlier_context < 0:
        raise SizingError(f"earlier_context must be 0 or more, not {shown(earlier_context)}")
    if not is_int(tokens) or not 1 <= tokens <= MOST_BATCHED_TOKENS:
        raise SizingError(
            f"tokens a sequence must be from 1 to {MOST_BATCHED_TOKENS:,}, not {shown(tokens)}"
        )
    _check_context(config, earlier_context + tokens)
    return _step(
        config, StepSettings(rates=rates, **options), kind="prefill", sequences=sequences,
        new=tokens, earlier=earlier_context, logits=1 if logits else 0,
        what=f"prefill {sequences} x {tokens:,} after {earlier_context:,}",
    )  # fmt: skip


def draft_step(
    config: BeamConfig,
    drafter: DFlash2Config,
    *,
    batch: int,
    context: int,
    draft_tokens: int,
    rates: Rates,
    **options: Unpack[StepOptions],
) -> StepTime:
    """One pass of a DFlash2 drafter after a verify step of as many drafts.

    Keys and values of ``draft_tokens + 1`` target rows a sequence are projected, then a block of
    as many query rows (anchor and masks) runs through the windowed layers; ``draft_tokens`` rows
    have logits. ``context`` counts the verified tokens of a sequence, before the anchor. The
    drafter is BF16; attention and MLP are split over the tensor-parallel ranks, the rest is whole
    on each.

    Raises:
        SizingError: a value that cannot be, with what to give instead.
        ConfigError: not a drafter of this model.
    """
    if not is_int(draft_tokens) or draft_tokens < 1:
        raise SizingError(f"draft_tokens must be 1 or more, not {shown(draft_tokens)}")
    drafter.check_target(config)
    if draft_tokens >= drafter.sliding_window:
        raise SizingError(
            f"{draft_tokens} draft tokens and their anchor do not fit into the drafter's window of "
            f"{drafter.sliding_window} tokens; draft fewer"
        )
    _check_context(config, context, draft_tokens + 1)
    settings = StepSettings(rates=rates, **options)
    settings.check(config)
    _check_sequences(batch)
    matrices(config, settings.precision, settings.layout, drafter)  # refuses a bad split
    work = Operations(settings)
    draft(work, config, drafter, -(-batch // settings.layout.dp), context, draft_tokens)
    return StepTime(
        kind="draft",
        what=f"draft {draft_tokens} tokens, batch {batch}, context {context:,}",
        tokens=batch * (draft_tokens + 1),
        settings=settings,
        operations=work.shared(),
    )


def speculative_step(
    config: BeamConfig,
    drafter: DFlash2Config,
    *,
    batch: int,
    context: int,
    draft_tokens: int,
    rates: Rates,
    **options: Unpack[StepOptions],
) -> StepTime:
    """A verify step and the drafter's pass after it, one after the other; ``tokens`` are verified.

    Raises:
        SizingError, ConfigError: as the two steps.
    """
    verify = verify_step(
        config, batch=batch, context=context, draft_tokens=draft_tokens, rates=rates, **options
    )
    draft = draft_step(
        config, drafter, batch=batch, context=context, draft_tokens=draft_tokens, rates=rates,
        **options,
    )  # fmt: skip
    return StepTime(
        kind="speculative",
        what=f"verify and draft {draft_tokens} tokens, batch {batch}, context {context:,}",
        tokens=verify.tokens,
        settings=verify.settings,
        operations=with_shares((*verify.operations, *draft.operations)),
    )


def prompt_rate(
    config: BeamConfig, *, prompt: int, chunk: int, rates: Rates, **options: Unpack[StepOptions]
) -> tuple[float, float]:
    """Prompt tokens a second of a whole layout that prefills one prompt after another.

    Each data-parallel group runs a chunk of ``chunk`` tokens of its own ``prompt`` a step; only the
    last has logits. Returns the rate with no overlap and the one with all overlapped.

    Raises:
        SizingError: a chunk that does not divide the prompt, or as :func:`prefill_step`.
    """
    if not (is_int(chunk) and is_int(prompt)) or chunk < 1 or prompt < 1 or prompt % chunk:
        raise SizingError(
            f"chunks of {shown(chunk)} tokens do not divide a prompt of {shown(prompt)}; "
            "choose a divisor"
        )
    groups = options.get("layout", Layout()).dp
    seconds = overlapped = 0.0
    for earlier in range(0, prompt, chunk):
        step = prefill_step(
            config,
            sequences=groups,
            tokens=chunk,
            earlier_context=earlier,
            logits=earlier + chunk == prompt,
            rates=rates,
            **options,
        )
        seconds += step.seconds
        overlapped += step.overlapped_seconds
    return groups * prompt / seconds, groups * prompt / overlapped


def _step(
    config: BeamConfig,
    settings: StepSettings,
    *,
    kind: StepKind,
    what: str,
    sequences: int,
    new: int,
    earlier: int,
    logits: int | None = None,
) -> StepTime:
    """``new`` rows of each sequence; ``logits`` rows of each need the head, None for all."""
    settings.check(config)
    _check_sequences(sequences)
    work = Operations(settings)
    here = -(-sequences // settings.layout.dp)
    rows, total = here * new, sequences * new
    attention(work, config, here, new, earlier)
    mlps(work, config, rows, total)
    head(work, config, here * (new if logits is None else logits))
    norms_and_sums(work, config, rows)
    return StepTime(kind=kind, what=what, tokens=total, settings=settings, operations=work.shared())


# -- checks -------------------------------------------------------------------------------------


def _check_sequences(value: Any) -> None:
    if not is_int(value) or not 1 <= value <= MOST_SEQUENCES:
        raise SizingError(f"sequences must be from 1 to {MOST_SEQUENCES:,}, not {shown(value)}")


def _check_context(config: BeamConfig, context: Any, after: int = 0) -> None:
    most = config.max_position_embeddings
    if not is_int(context) or context < 1 or context + after > most:
        added = f" with {after:,} drafted after them" if after else ""
        raise SizingError(f"context must be from 1 to {most:,} tokens{added}, not {shown(context)}")
