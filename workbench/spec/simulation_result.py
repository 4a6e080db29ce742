"""The figures of a replay or simulation: its steps, and what they come to.

Totals, rates and percentiles are made here from the steps and the requests' times, so each has one
definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from workbench.spec.adaptive import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedSteps:
    """The steps of a replay, arrays of one value a step: int64, ``ms`` float64.

    Per step ``drafted = accepted + rejected + trimmed`` with ``rejected = admitted - accepted`` and
    ``trimmed = drafted - admitted``, and ``tokens = accepted + requests - cut``.

    Attributes:
        requests: sequences decoded together.
        drafted: draft tokens.
        admitted, accepted: draft tokens verified (the budget), and accepted.
        missed: that would have been accepted, too, had they been verified.
        cut: tokens of the verdict that the end of a sequence took away.
        tokens: given to the sequences.
        ms: draft and verification by the cost table.
    """

    requests: Ints
    drafted: Ints
    admitted: Ints
    accepted: Ints
    missed: Ints
    cut: Ints
    tokens: Ints
    ms: Floats

    @property
    def budget(self) -> Ints:
        """What the policies call ``admitted``, all requests together."""
        return self.admitted

    def __len__(self) -> int:
        """Steps."""
        return len(self.ms)

    @classmethod
    def of(cls, rows: Sequence[tuple[Any, ...]]) -> PlayedSteps:
        """From the values of each step, in the order of the attributes; at least one step."""
        columns = list(zip(*rows, strict=True))
        names = [f.name for f in fields(cls)]
        whole = [np.array(column, np.int64) for column in columns[:-1]]
        return cls(
            **dict(zip(names[:-1], whole, strict=True)), ms=np.array(columns[-1], np.float64)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulationResult:
    """What a policy gives on a recording with a cost table: decode steps alone, without prefills.

    Attributes:
        policy: its name.
        concurrency: sequences decoded together, at most.
        requests, steps, tokens: how many; ``tokens`` of decode steps.
        ms: of all steps together, by the cost table.
        tokens_per_second: ``tokens / ms``, all requests together.
        tpot_p50_ms, tpot_p99_ms: over requests, of the time from joining to the last token by the
            tokens given in it.
        tpot_ms: float64 ``[requests]``, the same of each.
        acceptance_length: ``1 + accepted / events``; 1 where nothing was drafted.
        events: requests' steps with drafts.
        drafted, admitted, accepted: draft tokens.
        wasted: verified and not accepted.
        missed: trimmed, though the target would have accepted them.
        label: where acceptance and times are from.
        estimated: whether anything here rests on more than the record determines (times apart).
        estimated_how: what, and how it was estimated; empty if nothing.
        estimated_events: events whose verdict was estimated.
        failures: what was wrong where the policy's decisions could not be used, some of it.
        failed_steps: steps where fixed verification took its place.
        history: step by step.
    """

    policy: str
    concurrency: int
    requests: int
    steps: int
    tokens: int
    ms: float
    tokens_per_second: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    tpot_ms: Floats
    acceptance_length: float
    events: int
    drafted: int
    admitted: int
    accepted: int
    wasted: int
    missed: int
    label: str
    estimated: bool
    estimated_how: str
    estimated_events: int
    failures: tuple[str, ...]
    failed_steps: int
    history: PlayedSteps

    @classmethod
    def of(
        cls,
        steps: PlayedSteps,
        tpot_ms: Floats,
        *,
        policy: str,
        concurrency: int,
        events: int,
        label: str,
        estimated_how: str = "",
        estimated_events: int = 0,
        failures: tuple[str, ...] = (),
        failed_steps: int = 0,
    ) -> SimulationResult:
        """What these steps come to; the arguments are the attributes of the same name."""
        tokens, ms = int(steps.tokens.sum()), float(steps.ms.sum())
        admitted, accepted = int(steps.admitted.sum()), int(steps.accepted.sum())
        return cls(
            policy=policy,
            concurrency=concurrency,
            requests=len(tpot_ms),
            steps=len(steps),
            tokens=tokens,
            ms=ms,
            tokens_per_second=1e3 * tokens / ms,
            tpot_p50_ms=float(np.percentile(tpot_ms, 50)),
            tpot_p99_ms=float(np.percentile(tpot_ms, 99)),
            tpot_ms=tpot_ms,
            acceptance_length=1 + accepted / events if events else 1.0,
            events=events,
            drafted=int(steps.drafted.sum()),
            admitted=admitted,
            accepted=accepted,
            wasted=admitted - accepted,
            missed=int(steps.missed.sum()),
            label=label,
            estimated=bool(estimated_how),
            estimated_how=estimated_how,
            estimated_events=estimated_events,
            failures=failures,
            failed_steps=failed_steps,
            history=steps,
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures by name, for JSON; without the arrays."""
        arrays = {"tpot_ms", "history"}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in arrays}
        return values | {"failures": list(self.failures)}
