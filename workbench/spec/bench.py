"""What drafting gains here: ways of decoding in turns, and what their parts cost.

Every prompt is decoded greedily without the drafter (``none``), verifying all drafts (``fixed``)
and verifying those that pay (``adaptive``), one right after the other, the order changing; a gain
is the median over these turns of tokens/s over tokens/s, so a machine whose speed drifts slows all
sides. Speeds are of decode steps alone: the prefill and each run's first decode step are not timed.
Then the two costs that decide about drafting are measured in turns behind one fixed context: the
target's pass by rows, and a draft.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

from workbench.errors import DraftError
from workbench.hardware import cpu_name, versions
from workbench.model.beam import Beam
from workbench.spec.bench_runs import (
    LEAST_NEW_TOKENS,
    WARM_SECONDS,
    Difference,
    Outcome,
    Progress,
    Turns,
)
from workbench.spec.costs import ROWS, costs
from workbench.spec.drafter import Drafter
from workbench.spec.metrics import Acceptance, repeated
from workbench.spec.profile import CONTEXT, MOST_REQUESTS
from workbench.spec.rates import over

COST_ROUNDS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One way of decoding. Tokens/s are of all sequences of a batch together.

    Attributes:
        tokens_per_second, low, high: median over the runs, 10th and 90th percentile.
        tpot_p50_ms, tpot_p99_ms: percentiles over requests of a request's time per output token in
            milliseconds, over its timed steps.
        runs, tokens, seconds: what was timed, in all.
    """

    tokens_per_second: float
    low: float
    high: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    runs: int
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeBench:
    """What :func:`bench` measured.

    Attributes:
        pairs: turns that are whole; each decoded the same prompts in all three ways.
        speedup, speedup_low, speedup_high: of ``fixed`` over ``none``: median, 10th and 90th
            percentile over the turns.
        adaptive_gain, adaptive_gain_low, adaptive_gain_high: the same of ``adaptive`` over
            ``fixed``.
        none, fixed, adaptive: without the drafter, verifying all drafts, verifying those that pay.
        acceptance, adaptive_acceptance: of all runs of ``fixed``, of ``adaptive``.
        decide_share: of the time of adaptive's steps, deciding and learning.
        cost_table: where the times are from that adaptive decides by.
        target_ms: milliseconds of a target pass with its logits, by rows of each sequence.
        draft_ms: milliseconds of a draft: block pass, selector, walk, and the context K/V of the
            rows that a step keeps.
        context: tokens behind which these two were measured.
        compared, identical, differences: prompts, and how the outputs of each agree.
        repeated_share: of the plain outputs, tokens inside repeated 8-grams: small models loop, and
            drafts of a loop are easily right.
        interrupted: Ctrl-C ended it; the costs may then be missing (empty, None).
    """

    model: str
    drafter: str
    dtype: str
    device: str
    threads: int
    prompts: int
    rounds: int
    concurrency: int
    speculative_tokens: int
    max_new_tokens: int
    pairs: int
    speedup: float
    speedup_low: float
    speedup_high: float
    adaptive_gain: float
    adaptive_gain_low: float
    adaptive_gain_high: float
    none: Policy
    fixed: Policy
    adaptive: Policy
    acceptance: Acceptance
    adaptive_acceptance: Acceptance
    decide_share: float
    cost_table: str
    target_ms: dict[int, float]
    draft_ms: float | None
    context: int
    compared: int
    identical: int
    differences: tuple[Difference, ...]
    repeated_share: float | None
    hardware: str
    versions: dict[str, str | None]
    date: str
    interrupted: bool

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON: policies under their names, rows as text."""
        own = (
            "none", "fixed", "adaptive", "acceptance", "adaptive_acceptance", "target_ms",
            "differences",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in self.__slots__ if name not in own}
        return values | {
            "policies": {
                "none": self.none.to_dict(),
                "fixed": self.fixed.to_dict(),
                "adaptive": self.adaptive.to_dict(),
            },
            "acceptance_length": self.acceptance.length_pooled,
            "adaptive_acceptance_length": self.adaptive_acceptance.length_pooled,
            "per_position_acceptance": list(self.acceptance.survival),
            "acceptance": self.acceptance.to_dict(),
            "target_ms": {str(rows): ms for rows, ms in self.target_ms.items()},
            "differences": [d.to_dict() for d in self.differences],
            "how": "measured here",
        }


def bench(
    beam: Beam,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    speculative_tokens: int | None = None,
    max_new_tokens: int = 128,
    rounds: int = 3,
    concurrency: int = 1,
    progress: Progress | None = None,
) -> SpeculativeBench:
    """Measure; Ctrl-C ends it with the turns that are whole, if there is one.

    Adaptive verification decides by this machine's cost table for so many sequences
    (:func:`workbench.spec.profile.profile`: measured first, or kept from before), and its estimator
    learns from turn to turn.

    Args:
        beam, drafter: the target, and a drafter of it.
        prompts: token ids of each prompt.
        speculative_tokens: drafts a step; as many as the drafter was trained with when None.
        max_new_tokens: most new tokens of each prompt; an end-of-sequence token ends it before.
        rounds: how often each prompt is decoded in all three ways.
        concurrency: sequences decoded together; prompts are taken so many at a time, and from the
            first again where they do not suffice.
        progress: told before the cost table is measured and before each turn.

    Raises:
        PromptError, DraftError: a prompt or a setting that cannot be used, or nothing long enough
            to be timed.
    """
    _check("max_new_tokens", max_new_tokens, LEAST_NEW_TOKENS, None)
    _check("rounds", rounds, 1, None)
    _check("concurrency", concurrency, 1, MOST_REQUESTS)
    run = Turns(beam, drafter, prompts, speculative_tokens, max_new_tokens, concurrency)
    room = min(beam.config.max_position_embeddings, drafter.limit)
    rows = max(*ROWS, run.drafts + 1)
    context = min(CONTEXT, room - rows - 1)
    if context < 1:
        raise DraftError(
            f"costs are measured behind a context of at least 1 token and with {rows} rows of a "
            f"sequence, and {beam.name} with {drafter.name} holds {room} tokens; bench a larger "
            "model, or fewer drafts"
        )
    target_ms: dict[int, float] = {}
    draft_ms: float | None = None
    interrupted = False
    try:
        run.go(rounds, context, WARM_SECONDS, progress)
        kept = round(run.acceptance("fixed").length_pooled or 1)
        target_ms, draft_ms = costs(
            beam,
            drafter,
            prompts,
            run.drafts,
            context=context,
            batch=concurrency,
            kept=kept,
            rounds=COST_ROUNDS,
            warm_seconds=WARM_SECONDS,
        )
    except KeyboardInterrupt:
        interrupted = True
        if not run.timed:
            raise
    if not run.timed:
        raise DraftError(
            "no prompt went on long enough to be timed; give others, or a larger max_new_tokens"
        )
    ratios = [turn["fixed"].speed / turn["none"].speed for turn in run.timed]
    low, high = _spread(ratios)
    gains = [turn["adaptive"].speed / turn["fixed"].speed for turn in run.timed]
    gain_low, gain_high = _spread(gains)
    adaptive = [turn["adaptive"] for turn in run.timed]
    differences = run.differences()
    outputs = run.outputs()
    gpu = beam.device.type == "cuda"
    return SpeculativeBench(
        model=beam.name,
        drafter=drafter.name,
        dtype=str(beam.dtype).removeprefix("torch."),
        device=beam.device.type,
        threads=torch.get_num_threads(),
        prompts=len(prompts),
        rounds=rounds,
        concurrency=concurrency,
        speculative_tokens=run.drafts,
        max_new_tokens=max_new_tokens,
        pairs=len(ratios),
        speedup=statistics.median(ratios),
        speedup_low=low,
        speedup_high=high,
        adaptive_gain=statistics.median(gains),
        adaptive_gain_low=gain_low,
        adaptive_gain_high=gain_high,
        none=_policy([turn["none"] for turn in run.timed]),
        fixed=_policy([turn["fixed"] for turn in run.timed]),
        adaptive=_policy(adaptive),
        acceptance=run.acceptance("fixed"),
        adaptive_acceptance=run.acceptance("adaptive"),
        decide_share=sum(o.deciding for o in adaptive) / sum(o.seconds for o in adaptive),
        cost_table=run.table.label if run.table is not None else "",
        target_ms=target_ms,
        draft_ms=draft_ms,
        context=context,
        compared=len(outputs),
        identical=len(outputs) - len(differences),
        differences=differences,
        repeated_share=over(
            sum(sum(repeated(ids)) for ids in outputs.values()), sum(map(len, outputs.values()))
        ),
        hardware=torch.cuda.get_device_name(beam.device) if gpu else cpu_name(),
        versions=versions(),
        date=date.today().isoformat(),
        interrupted=interrupted,
    )


def _check(name: str, value: object, least: int, most: int | None) -> None:
    bad = not isinstance(value, int) or isinstance(value, bool) or value < least
    if bad or (most is not None and isinstance(value, int) and value > most):
        upto = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise DraftError(f"{name} must be a whole number {upto}, not {value!r:.60}")


def _policy(runs: Sequence[Outcome]) -> Policy:
    speeds = [run.speed for run in runs]
    # Of each request: seconds a token.
    tpots = [g.seconds / g.timed_tokens for run in runs for g in run.generations if g.timed_tokens]
    low, high = _spread(speeds)
    return Policy(
        tokens_per_second=statistics.median(speeds),
        low=low,
        high=high,
        tpot_p50_ms=1e3 * statistics.median(tpots),
        tpot_p99_ms=1e3 * _percentile(tpots, 99),
        runs=len(runs),
        tokens=sum(run.tokens for run in runs),
        seconds=sum(run.seconds for run in runs),
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """10th and 90th percentile."""
    return _percentile(values, 10), _percentile(values, 90)


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
