"""The runs of a benchmark: the same prompts decoded in three ways, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, TypeAlias, get_args

import torch

from workbench.model.beam import Beam
from workbench.model.generate import Generation
from workbench.spec.acceptance import Estimator
from workbench.spec.adaptive import Adaptive
from workbench.spec.cost_table import CostTable
from workbench.spec.decode import decode
from workbench.spec.drafter import Drafter
from workbench.spec.metrics import Acceptance, Tally
from workbench.spec.profile import profile

Progress = Callable[[int, int, str], None]  # done, of how many, what is next
Way = Literal["none", "fixed", "adaptive"]
WAYS: tuple[Way, ...] = get_args(Way)
LEAST_NEW_TOKENS = 16  # fewer are a few steps, which time nothing
WARM_SECONDS = 0.5  # of calls before the first timed one: caches, allocator, clock frequency


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. ``tokens``, ``seconds`` and ``deciding`` (seconds) are of its timed decode steps."""

    tokens: int
    seconds: float
    deciding: float
    generations: list[Generation]
    tally: Tally

    @property
    def speed(self) -> float:
        """Tokens/s."""
        return self.tokens / self.seconds


Turn: TypeAlias = Mapping[Way, Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a prompt's greedy output in one way first differs from that without the drafter.

    ``index`` counts new tokens from 0; ``margin`` is the distance of the target's two highest
    logits there, recomputed without a cache: a rounding error decides where it is tiny.
    """

    prompt: int
    way: Way
    index: int
    plain: int | None
    speculative: int | None
    margin: float

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


class Turns:
    """Prompts decoded in all three ways, group by group.

    Attributes:
        drafts: draft tokens a step.
        turns: those that are whole, each with the prompts of its group.
        table: what adaptive verification decides by, once it is measured.
    """

    def __init__(
        self,
        beam: Beam,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        speculative_tokens: int | None,
        most: int,
        concurrency: int,
    ) -> None:
        """Check what is asked for.

        Raises:
            PromptError, DraftError: as :func:`decode`.
        """
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
        self.concurrency = concurrency
        self.turns: list[tuple[tuple[int, ...], Turn]] = []
        self.table: CostTable | None = None
        self._policy: Adaptive | None = None  # one for all turns: what it finds not to pay is known
        self._estimator = Estimator(self.drafts)

    @property
    def timed(self) -> list[Turn]:
        """The turns whose runs all went on long enough."""
        return [turn for _, turn in self.turns if all(o.seconds > 0 for o in turn.values())]

    def go(self, rounds: int, context: int, warm_seconds: float, progress: Progress | None) -> None:
        """Decode; a turn is kept once all its runs are through.

        Args:
            rounds: how often each group is decoded.
            context: tokens of the contexts behind which the cost table is measured.
            warm_seconds: of decoding before the first timed run.
            progress: told before each part.
        """
        of = rounds * len(self.groups) + 2

        def tell(done: int, label: str) -> None:
            if progress is not None:
                progress(done, of, label)

        tell(0, "cost table")
        self.table = profile(
            self.beam,
            self.drafter,
            requests=self.concurrency,
            drafts=self.drafts,
            context=context,
        )
        self._policy = Adaptive(self.table, frugal=True)
        tell(1, "warming up")
        began = perf_counter()
        while perf_counter() - began < warm_seconds:
            for way in WAYS:
                self._decode(self.groups[0], way, LEAST_NEW_TOKENS, Estimator(self.drafts))
        for number in range(rounds):
            for index, group in enumerate(self.groups):
                if self.turns:
                    tell(1 + len(self.turns), f"prompt {group[0]}, round {number + 1}")
                # Every order, so that none gains by its place.
                at = number + index
                order = [*WAYS[at % 3 :], *WAYS[: at % 3]]
                if at // 3 % 2:
                    order.reverse()
                outcomes = {
                    way: self._decode(group, way, self.most, self._estimator) for way in order
                }
                self.turns.append((group, outcomes))
        tell(of - 1, "target and drafter alone")

    def acceptance(self, way: Way) -> Acceptance:
        """Of the timed turns."""
        tally = Tally(self.drafts)
        for turn in self.timed:
            tally.merge(turn[way].tally)
        return tally.acceptance()

    def outputs(self) -> dict[int, tuple[int, ...]]:
        """What each prompt gives without the drafter."""
        return {
            prompt: generation.token_ids
            for group, turn in self.turns
            for prompt, generation in zip(group, turn["none"].generations, strict=True)
        }

    def differences(self) -> tuple[Difference, ...]:
        """The first difference of each prompt whose outputs are not all the same."""
        found: dict[int, Difference] = {}
        for group, turn in self.turns:
            for way in ("fixed", "adaptive"):
                both = zip(turn["none"].generations, turn[way].generations, strict=True)
                for prompt, (a, b) in zip(group, both, strict=True):
                    if prompt not in found and a.token_ids != b.token_ids:
                        found[prompt] = self._difference(prompt, way, a.token_ids, b.token_ids)
        return tuple(found[prompt] for prompt in sorted(found))

    def _difference(
        self, prompt: int, way: Way, a: tuple[int, ...], b: tuple[int, ...]
    ) -> Difference:
        shorter = min(len(a), len(b))
        at = next((i for i in range(shorter) if a[i] != b[i]), shorter)
        return Difference(
            prompt=prompt,
            way=way,
            index=at,
            plain=a[at] if at < len(a) else None,
            speculative=b[at] if at < len(b) else None,
            margin=_margin(self.beam, [*self.prompts[prompt], *a[:at]]),
        )

    def _decode(self, group: tuple[int, ...], way: Way, most: int, estimator: Estimator) -> Outcome:
        deciding: dict[str, Any] = {}
        if way == "adaptive" and self._policy is not None:
            deciding = {"policy": self._policy, "estimator": estimator}
        drafter = None if way == "none" else self.drafter
        decoding = decode(
            self.beam,
            drafter,
            [self.prompts[p] for p in group],
            max_new_tokens=most,
            speculative_tokens=None if drafter is None else self.drafts,
            slots=len(group),
            **deciding,
        )
        tally, tokens, seconds, decided = Tally(self.drafts), 0, 0.0, 0.0
        for step in decoding:
            tally.add(step)
            if step.phase == "decode" and decoding.steps > 1:
                tokens += step.tokens
                seconds += step.seconds
                decided += step.decide_seconds
        generations = [decoding.generations[r] for r in range(len(group))]
        return Outcome(
            tokens=tokens, seconds=seconds, deciding=decided, generations=generations, tally=tally
        )


@torch.inference_mode()
def _margin(beam: Beam, ids: list[int]) -> float:
    """Distance of the two highest logits behind ``ids``."""
    logits = beam.sequence_logits(torch.tensor(ids, device=beam.device))[-1]
    first, second = logits.topk(2).values.tolist()
    return float(first - second)
