"""What policies of verification give from one sequence to many, by a cost table: a sweep.

Drafts are cheap where few sequences decode together and dear where many do, so what a policy is
worth depends on the concurrency before all else. :func:`sweep` simulates every policy on the same
requests at each, and :class:`SweepRow` has the changes against fixed verification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from workbench.errors import DraftError
from workbench.spec.cost_table import CostTable
from workbench.spec.published import Published, published
from workbench.spec.recording import Recording
from workbench.spec.replay import check_number
from workbench.spec.simulate import MOST_CONCURRENCY, compare, default_requests
from workbench.spec.simulation_result import SimulationResult

__all__ = ["CONCURRENCIES", "Published", "SweepFigures", "SweepRow", "published", "sweep"]

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
Figure = Literal["tokens_per_second", "tpot_p50_ms", "tpot_p99_ms", "acceptance_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFigures:
    """A policy's figures at one concurrency, of :class:`SimulationResult`; without its steps."""

    policy: str
    tokens_per_second: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    acceptance_length: float
    drafted: int
    admitted: int
    accepted: int
    wasted: int
    missed: int
    estimated: bool
    failed_steps: int

    @classmethod
    def of(cls, result: SimulationResult) -> SweepFigures:
        """Of a replay or simulation."""
        return cls(**{f.name: getattr(result, f.name) for f in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """Policies on the same requests at one concurrency.

    Attributes:
        concurrency: sequences decoded together.
        requests: how many were decoded in all.
        policies: figures by the policy's name.
        label: where acceptance and times are from.
        baseline: the policy that changes are against: ``fixed``, or the first where it is missing.
    """

    concurrency: int
    requests: int
    policies: Mapping[str, SweepFigures]
    label: str

    @classmethod
    def of(cls, results: Mapping[str, SimulationResult]) -> SweepRow:
        """Of results that are of the same requests, at least one of them.

        Raises:
            DraftError: there is none, or they differ in concurrency or number of requests.
        """
        if not results:
            raise DraftError("a comparison needs the result of at least one policy")
        loads = {(r.concurrency, r.requests) for r in results.values()}
        if len(loads) > 1:
            raise DraftError(
                "policies are compared on the same requests at one concurrency, and these results "
                f"have {' and '.join(f'{n} requests at {c}' for c, n in sorted(loads))}"
            )
        concurrency, requests = loads.pop()
        return cls(
            concurrency=concurrency,
            requests=requests,
            policies={name: SweepFigures.of(result) for name, result in results.items()},
            label="; ".join(dict.fromkeys(result.label for result in results.values())),
        )

    @property
    def baseline(self) -> str:
        """The policy that changes are against."""
        return "fixed" if "fixed" in self.policies else next(iter(self.policies))

    def change(self, policy: str, figure: Figure = "tokens_per_second") -> float | None:
        """A figure against the baseline's: 0.1 for a tenth more, None where the policy is missing.

        Raises:
            DraftError: there is no such figure.
        """
        if figure not in get_args(Figure):
            raise DraftError(f"{figure!r:.40} is none of {', '.join(get_args(Figure))}")
        if policy not in self.policies:
            return None
        base = float(getattr(self.policies[self.baseline], figure))
        return float(getattr(self.policies[policy], figure)) / base - 1

    def share_of_oracle(self, policy: str) -> float | None:
        """Of the tokens a second that the oracle has over the baseline, the share that a policy
        reaches: 1 for all, below 0 where it is slower than the baseline. None where one of them is
        missing, or the oracle has nothing over it.
        """
        best, reached = self.change("oracle"), self.change(policy)
        if best is None or reached is None or best <= 0:
            return None
        return reached / best

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "concurrency": self.concurrency,
            "requests": self.requests,
            "label": self.label,
            "policies": {
                name: {f.name: getattr(figures, f.name) for f in fields(figures)}
                for name, figures in self.policies.items()
            },
        }


def sweep(
    source: Recording,
    table: CostTable,
    concurrencies: Sequence[int] = CONCURRENCIES,
    requests: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[SweepRow, ...]:
    """None, fixed, adaptive and oracle at each concurrency, as :func:`compare` gives them.

    Confidences are a fresh estimator's; the drafter's own where the recording has no scores.

    Args:
        source: of a trace (:meth:`Recording.of`), or ``parametric``.
        table: what steps cost.
        concurrencies: sequences decoded together, 1 to 512 each.
        requests: of each concurrency; ``default_requests`` of it when None.
        seed: of the draw of requests.
        progress: told after each policy how many are done, of how many in all.

    Raises:
        TraceError, DraftError: as :func:`compare`, or a concurrency is given twice.
    """
    if not isinstance(source, Recording):
        raise DraftError(f"a sweep draws from a Recording, not {source!r:.60}")
    if not isinstance(concurrencies, Sequence):
        raise DraftError(f"a sweep takes a list of concurrencies, not {concurrencies!r:.60}")
    asked = list(concurrencies)
    for concurrency in asked:
        check_number("concurrency", concurrency, 1, MOST_CONCURRENCY)
    if len(set(asked)) < len(asked):
        raise DraftError(f"a sweep takes each concurrency once, not {asked!r:.80}")
    load = [default_requests(c) if requests is None else requests for c in asked]
    rows: list[SweepRow] = []

    def told(done: int, of: int) -> None:
        if progress is not None:
            progress(len(rows) * of + done, len(asked) * of)

    for concurrency, count in zip(asked, load, strict=True):
        results = compare(
            source,
            table,
            concurrency=concurrency,
            requests=count,
            estimator="fresh" if source.features is not None else None,
            seed=seed,
            progress=told,
        )
        rows.append(SweepRow.of(results))
    return tuple(rows)
