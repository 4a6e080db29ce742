"""Sampling settings: how the next token is drawn from logits.

Sampling is inverse-CDF in vocabulary order: one uniform number a token, taken from a generator that
belongs to the sequence. A sequence therefore draws the same tokens whatever else is decoded beside
it, and on whichever device the logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from workbench.errors import PromptError

# Below this a float32 quotient of logits overflows; 0 (greedy) is what is meant there.
LOWEST_TEMPERATURE = 1e-5


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Temperature, top-p and seed.

    Args:
        temperature: 0 is greedy (the token of the highest logit, the lowest id among equals);
            otherwise logits are divided by it, in float32.
        top_p: keep the smallest set of most probable tokens whose probability reaches ``top_p``;
            the token that crosses it is kept, and among equally probable ones the lower ids.
        seed: seed of each sequence's own generator; greedy sampling does not use it.

    Raises:
        PromptError: a value out of range; the message names it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        t, p, seed = self.temperature, self.top_p, self.seed
        if not _is_number(t) or not isfinite(t) or t < 0 or 0 < t < LOWEST_TEMPERATURE:
            raise PromptError(
                f"temperature must be 0 (greedy) or a number from {LOWEST_TEMPERATURE:g} up, "
                f"not {t!r}"
            )
        if not _is_number(p) or not 0 < p <= 1:
            raise PromptError(f"top_p must be above 0 and at most 1, not {p!r}")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise PromptError(f"seed must be a whole number from 0 to 2**63 - 1, not {seed!r}")

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken and nothing is drawn."""
        return self.temperature == 0

    def generator(self) -> torch.Generator:
        """A new generator at the start of this seed's stream, for one sequence.

        It lives on the CPU whatever the model's device, so that a seed means the same everywhere.
        """
        return torch.Generator().manual_seed(self.seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that is sampled from: logits ``[N, V]`` -> float32 ``[N, V]``.

        Rows add up to 1; what top-p leaves out is exactly 0.

        Raises:
            PromptError: for greedy settings, which sample from no distribution.
        """
        if self.greedy:
            raise PromptError("greedy sampling has no distribution; set a temperature above 0")
        logits = logits.float()
        # The maximum goes first: whatever the temperature, the largest exponent is then exp(0).
        scaled = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        probabilities = scaled.softmax(-1)
        return probabilities if self.top_p == 1 else top_p_filter(probabilities, self.top_p)

    def pick(
        self, logits: Tensor, generators: torch.Generator | Sequence[torch.Generator]
    ) -> Tensor:
        """Next token ids: logits ``[N, V]`` -> int64 ``[N]``.

        ``generators`` is one for each row (see :meth:`generator`), or a single one that serves all
        rows in order. Each row takes exactly one number from it; greedy takes none.
        """
        if self.greedy:
            return logits.argmax(-1)
        return draw(self.probabilities(logits), uniforms(generators, logits.shape[0]))


def top_p_filter(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set that reaches ``top_p``, and renormalise; ``[N, V]`` float32.

    A token stays if the more probable ones together have less than ``top_p``; the stable sort puts
    the lower id first among equals.
    """
    ranked, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    before = ranked.double().cumsum(-1) - ranked
    ranked = ranked.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(probabilities).scatter_(-1, order, ranked)
    return kept / kept.sum(-1, keepdim=True)


def uniforms(generators: torch.Generator | Sequence[torch.Generator], count: int) -> Tensor:
    """``count`` numbers in [0, 1), float64 on the CPU, one a generator (or all from one)."""
    if isinstance(generators, torch.Generator):
        return torch.rand(count, generator=generators, dtype=torch.float64)
    if len(generators) != count:
        raise PromptError(f"{len(generators)} generators were given for {count} rows of logits")
    return torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generators])


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF in vocabulary order: ``[N, V]`` and ``[N]`` in [0, 1) -> ids int64 ``[N]``.

    In float64, so that over a large vocabulary a token's share is not lost in the running sum.
    """
    cdf = probabilities.double().cumsum(-1)
    target = uniform.to(cdf.device)[:, None] * cdf[:, -1:]
    ids = torch.searchsorted(cdf, target, right=True)[:, 0]
    return ids.clamp_(max=cdf.shape[-1] - 1)  # uniform * total may round up to the total
