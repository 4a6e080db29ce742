"""What drafting gains here: plain and speculative decoding in turns, and what their parts cost.

Every prompt is decoded greedily without the drafter and with it, one right after the other, the
order alternating; the speed-up is the median over these pairs of tokens/s with the drafter over
tokens/s without, so a machine whose speed drifts slows both sides. Speeds are of decode steps
alone: the prefill and each run's first decode step are not timed. Then the two costs that decide
about drafting are measured in turns behind one fixed context: the target's pass by rows, and a
draft.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from time import perf_counter
from typing import Any

import torch

from workbench.errors import DraftError
from workbench.hardware import cpu_name, versions
from workbench.model.beam import Beam
from workbench.model.generate import Generation
from workbench.spec.costs import ROWS, costs
from workbench.spec.decode import decode
from workbench.spec.drafter import Drafter
from workbench.spec.metrics import Acceptance, Tally, repeated
from workbench.spec.rates import over

Progress = Callable[[int, int, str], None]  # done, of how many, what is next
LEAST_NEW_TOKENS = 16  # fewer are a few steps, which time nothing
CONTEXT = 256  # tokens behind which costs are measured
COST_ROUNDS = 40
WARM_SECONDS = 0.5  # of calls before the first timed one: caches, allocator, clock frequency
_MOST_CONCURRENCY = 1024


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
class Difference:
    """Where the two greedy outputs of a prompt first differ.

    ``index`` counts new tokens from 0; ``margin`` is the distance of the target's two highest
    logits there, recomputed without a cache: a rounding error decides where it is tiny.
    """

    prompt: int
    index: int
    plain: int | None
    speculative: int | None
    margin: float

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeBench:
    """What :func:`bench` measured.

    Attributes:
        speedup, speedup_low, speedup_high: median, 10th and 90th percentile over the pairs.
        none, fixed: without the drafter, and with a fixed number of drafts a step.
        acceptance: of all speculative runs.
        target_ms: milliseconds of a target pass with its logits, by rows of each sequence.
        draft_ms: milliseconds of a draft: block pass, selector, walk, and the context K/V of the
            rows that a step keeps.
        context: tokens behind which these two were measured.
        compared, identical, differences: prompts, and how the two outputs of each agree.
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
    none: Policy
    fixed: Policy
    acceptance: Acceptance
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
        own = ("none", "fixed", "acceptance", "target_ms", "differences")
        values = {name: getattr(self, name) for name in self.__slots__ if name not in own}
        return values | {
            "policies": {"none": self.none.to_dict(), "fixed": self.fixed.to_dict()},
            "acceptance_length": self.acceptance.length_pooled,
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
    """Measure; Ctrl-C ends it with the pairs that are whole, if there is one.

    Args:
        beam, drafter: the target, and a drafter of it.
        prompts: token ids of each prompt.
        speculative_tokens: drafts a step; as many as the drafter was trained with when None.
        max_new_tokens: most new tokens of each prompt; an end-of-sequence token ends it before.
        rounds: how often each prompt is decoded both ways.
        concurrency: sequences decoded together; prompts are taken so many at a time, and from the
            first again where they do not suffice.
        progress: told before each pair.

    Raises:
        PromptError, DraftError: a prompt or a setting that cannot be used, or nothing long enough
            to be timed.
    """
    _check("max_new_tokens", max_new_tokens, LEAST_NEW_TOKENS, None)
    _check("rounds", rounds, 1, None)
    _check("concurrency", concurrency, 1, _MOST_CONCURRENCY)
    run = _Pairs(beam, drafter, prompts, speculative_tokens, max_new_tokens, concurrency)
    context = min(CONTEXT, beam.config.max_position_embeddings - max(*ROWS, run.drafts + 1))
    target_ms: dict[int, float] = {}
    draft_ms: float | None = None
    interrupted = False
    try:
        run.go(rounds, progress)
        kept = round(run.acceptance().length_pooled or 1)
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
    ratios = [pair.speculative.speed / pair.plain.speed for pair in run.timed]
    low, high = _spread(ratios)
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
        none=_policy([pair.plain for pair in run.timed]),
        fixed=_policy([pair.speculative for pair in run.timed]),
        acceptance=run.acceptance(),
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


# -- pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """One run; ``tokens`` and ``seconds`` are those of its timed decode steps."""

    tokens: int
    seconds: float
    generations: list[Generation]
    tally: Tally

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A group of prompts decoded both ways."""

    group: tuple[int, ...]
    plain: _Outcome
    speculative: _Outcome


def _policy(runs: Sequence[_Outcome]) -> Policy:
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


class _Pairs:
    """Prompts decoded both ways, group by group."""

    def __init__(
        self,
        beam: Beam,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        speculative_tokens: int | None,
        most: int,
        concurrency: int,
    ) -> None:
        self.beam, self.drafter, self.most = beam, drafter, most
        self.prompts = [list(prompt) for prompt in prompts]
        # Made, and not run: whatever cannot be used is refused here.
        asked = decode(
            beam,
            drafter,
            self.prompts,
            max_new_tokens=most,
            speculative_tokens=speculative_tokens,
            slots=1,
        )
        self.drafts = asked.settings.speculative_tokens
        asked.close()
        count = len(self.prompts)
        self.groups = [
            tuple((first + i) % count for i in range(concurrency))
            for first in range(0, count, concurrency)
        ]
        self.pairs: list[_Pair] = []

    @property
    def timed(self) -> list[_Pair]:
        """The pairs whose both runs went on long enough."""
        return [p for p in self.pairs if p.plain.seconds > 0 and p.speculative.seconds > 0]

    def go(self, rounds: int, progress: Progress | None) -> None:
        """Decode; a pair is kept once both of its runs are through."""
        of = rounds * len(self.groups) + 1

        def tell(label: str) -> None:
            if progress is not None:
                progress(len(self.pairs), of, label)

        tell("warming up")
        began = perf_counter()
        while perf_counter() - began < WARM_SECONDS:
            for drafter in (None, self.drafter):
                self._decode(self.groups[0], drafter, LEAST_NEW_TOKENS)
        for number in range(rounds):
            for index, group in enumerate(self.groups):
                tell(f"prompt {group[0]}, round {number + 1}")
                drafters = [None, self.drafter]
                if (number + index) % 2:
                    drafters.reverse()
                outcomes = [self._decode(group, drafter, self.most) for drafter in drafters]
                if (number + index) % 2:
                    outcomes.reverse()
                self.pairs.append(_Pair(group=group, plain=outcomes[0], speculative=outcomes[1]))
        tell("target and drafter alone")

    def acceptance(self) -> Acceptance:
        """Of the timed pairs."""
        tally = Tally(self.drafts)
        for pair in self.timed:
            tally.merge(pair.speculative.tally)
        return tally.acceptance()

    def outputs(self) -> dict[int, tuple[int, ...]]:
        """What each prompt gives without the drafter."""
        return {
            prompt: generation.token_ids
            for pair in self.pairs
            for prompt, generation in zip(pair.group, pair.plain.generations, strict=True)
        }

    def differences(self) -> tuple[Difference, ...]:
        """The first difference of each prompt whose outputs are not the same."""
        found: dict[int, Difference] = {}
        for pair in self.pairs:
            both = zip(pair.plain.generations, pair.speculative.generations, strict=True)
            for prompt, (a, b) in zip(pair.group, both, strict=True):
                if prompt not in found and a.token_ids != b.token_ids:
                    found[prompt] = self._difference(prompt, a.token_ids, b.token_ids)
        return tuple(found[prompt] for prompt in sorted(found))

    def _difference(self, prompt: int, a: tuple[int, ...], b: tuple[int, ...]) -> Difference:
        shorter = min(len(a), len(b))
        at = next((i for i in range(shorter) if a[i] != b[i]), shorter)
        return Difference(
            prompt=prompt,
            index=at,
            plain=a[at] if at < len(a) else None,
            speculative=b[at] if at < len(b) else None,
            margin=_margin(self.beam, [*self.prompts[prompt], *a[:at]]),
        )

    def _decode(self, group: tuple[int, ...], drafter: Drafter | None, most: int) -> _Outcome:
        decoding = decode(
            self.beam,
            drafter,
            [self.prompts[p] for p in group],
            max_new_tokens=most,
            speculative_tokens=None if drafter is None else self.drafts,
            slots=len(group),
        )
        tally, tokens, seconds = Tally(self.drafts), 0, 0.0
        for step in decoding:
            tally.add(step)
            if step.phase == "decode" and decoding.steps > 1:
                tokens += step.tokens
                seconds += step.seconds
        generations = [decoding.generations[r] for r in range(len(group))]
        return _Outcome(tokens=tokens, seconds=seconds, generations=generations, tally=tally)


@torch.inference_mode()
def _margin(beam: Beam, ids: list[int]) -> float:
    """Distance of the two highest logits behind ``ids``."""
    logits = beam.sequence_logits(torch.tensor(ids, device=beam.device))[-1]
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """10th and 90th percentile."""
    return _percentile(values, 10), _percentile(values, 90)


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
