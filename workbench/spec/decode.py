"""``decode``: tokens from a target and its drafter, as a stream of :class:`Step` values.

``for step in decode(beam, drafter, prompts)`` yields one a pass: what was drafted, verified,
accepted and given to every sequence, and how long it took. Sequences have different lengths, join
between steps and leave when they end; more of them than there are slots wait for one. A consumer
may stop anywhere: the model is only read, and between steps nothing is held (no inference mode, no
lock). The loop itself is in ``loop.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.errors import DraftError, PromptError
from workbench.model.beam import Beam
from workbench.model.generate import Cancel
from workbench.model.prompts import Prompts, prompt_ids
from workbench.model.sampling import Sampling
from workbench.spec.acceptance import Estimator
from workbench.spec.adaptive import Policy
from workbench.spec.asked import check_kinds, check_pair, check_whole
from workbench.spec.deciding import Decider
from workbench.spec.drafter import Drafter
from workbench.spec.loop import MOST_DRAFTS, Decoding, Method, Proposals, Settings

__all__ = ["Decoding", "decode"]

MOST_SLOTS = 128  # sequences decoded together, unless asked otherwise
_GREEDY = Sampling()


def decode(
    beam: Beam,
    drafter: Drafter | None,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    speculative_tokens: int | None = None,
    sampling: Sampling = _GREEDY,
    seeds: Sequence[int] | None = None,
    method: Method = "standard",
    proposals: Proposals = "greedy",
    stop_at_eos: bool = True,
    prefill_chunk: int = 512,
    slots: int | None = None,
    cancel: Cancel | None = None,
    detail: bool = False,
    policy: Policy | None = None,
    estimator: Estimator | None = None,
) -> Decoding:
    """Decode prompts, drafting ahead when there is a drafter; yields a :class:`Step` a pass.

    Args:
        beam: the target, whole.
        drafter: :func:`load_drafter`'s, of this target; None decodes plainly.
        prompts: a text, a list of texts, the ids of one prompt, or a list of such lists.
        max_new_tokens: most tokens for each prompt; fewer if the context is full.
        speculative_tokens: draft tokens a step; as many as the drafter was trained with when None.
        sampling: the same for every sequence, each with generators of its own: its tokens do not
            depend on the others. Temperature, top-p and so on act before the test of a draft.
        seeds: a seed for each prompt (several samples of one prompt); the sampling's when None.
        method: ``standard`` rejection sampling or ``block`` verification, above temperature 0.
        proposals: whether drafts are the ``greedy`` walk's (judged as certain proposals), or
            ``probabilistic``: drawn, and judged with the distribution they were drawn from. Above
            temperature 0 only.
        stop_at_eos: whether an end-of-sequence token ends its sequence (it is given as well).
        prefill_chunk: most prompt tokens a pass.
        slots: sequences decoded together; all prompts, at most 128, when None.
        cancel: looked at between steps and between prefill chunks; when set, the run ends.
        detail: whether steps carry candidates and scores of every slot.
        policy: decides at each step how many drafts of each sequence are verified
            (``adaptive.py``); all that there is room for when None.
        estimator: of the confidences that the policy is told, to go on with one that has learned;
            a fresh one when None.

    Raises:
        PromptError: a prompt or a setting of plain decoding that cannot be used. Raised here,
            before anything is computed.
        DraftError: a drafter of another target, or a setting of drafting out of range.
    """
    check_kinds(beam, sampling, seeds, cancel)
    if slots is not None:
        check_whole("slots", slots, 1, 1 << 16)
    if drafter is not None:
        check_pair(beam, drafter)
    if drafter is None and policy is not None:
        raise DraftError("a policy chooses among drafts, but there is no drafter; give one")
    if policy is None and estimator is not None:
        raise DraftError("an estimator serves a policy, but there is none; give one")
    if drafter is None and speculative_tokens:
        raise DraftError("speculative_tokens asks for drafts, but there is no drafter; give one")
    drafts = speculative_tokens or 0
    if drafter is not None:
        drafts = drafter.block - 1 if speculative_tokens is None else speculative_tokens
        check_whole("speculative_tokens", drafts, 1, MOST_DRAFTS)
    settings = Settings(
        max_new_tokens=max_new_tokens,
        speculative_tokens=drafts,
        sampling=sampling,
        method=method,
        proposals=proposals,
        prefill_chunk=prefill_chunk,
        detail=detail,
    )
    several = prompt_ids(beam, prompts)
    if seeds is not None and len(seeds) != len(several):
        raise PromptError(f"{len(seeds)} seeds were given for {len(several)} prompts; give as many")
    eos = beam.config.eos_token_id
    if eos is None and beam.tokenizer is not None:
        eos = beam.tokenizer.eos_id
    together = min(len(several), MOST_SLOTS) if slots is None else slots
    decider = None if policy is None else Decider(policy, drafts, estimator)
    end = eos if stop_at_eos else None
    run = Decoding(beam, drafter, settings, together, end, cancel, decider)
    for number, ids in enumerate(several):
        run._join(ids, max_new_tokens, None if seeds is None else seeds[number])
    return run
