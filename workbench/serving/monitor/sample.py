"""``Sample``: what one interval between two pages of metrics came to, of an engine or of all.

Counts are what was added in the interval and are never negative. A server that was started anew
begins a new series: its first sample has what the new process counted by then, and no rates, since
nobody knows in which time.

Engines do not tell trimmed drafts from verified ones: their counters take each draft that was
scheduled for one that was drafted, also where adaptive verification looked at none of it. Rates of
acceptance are therefore per scheduled draft, and what is called rejected includes the trimmed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from workbench.serving.monitor.spread import Spread, below, real, whole, wholes
from workbench.spec.rates import Acceptance, over

COUNTS = (
    "prompt_tokens",
    "generation_tokens",
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
)
SPREADS = ("ttft", "tpot", "itl", "e2e")
# What the times are, for headings. An output of a request brings as many tokens as a step gave it,
# several with speculation; TPOT leaves out the first token.
TIMES: Mapping[str, str] = {
    "ttft": "TTFT: arrival to first token",
    "itl": "ITL: between two outputs of a request",
    "tpot": "TPOT: mean of each finished request",
    "e2e": "arrival to last token",
}
_LATEST = 253_402_300_800.0  # s since 1970, the year 10000: calendars end there
_SHORTEST, _LONGEST = 1e-9, 1e9  # s
PER_SCHEDULED = "per scheduled draft: engines count trimmed drafts as drafted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One interval.

    Attributes:
        at: its end, wall time in seconds since 1970.
        seconds: its length.
        engine: the label of an engine; None for all together.
        model: the served model's name, as the server says it.
        restarted: the server was started anew in this interval.
        missed: pages that were asked for and did not come since the sample before.
        prompt_tokens, generation_tokens: tokens prefilled and given out.
        preemptions: requests that lost their KV cache.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache and found there.
        drafts: draft events: a request's step with at least one scheduled draft.
        draft_tokens, accepted_tokens: over all events.
        accepted_at: ``[i]`` is the number of events with more than i tokens accepted.
        finished: requests that ended, by reason.
        running, waiting: requests at the end of the interval.
        kv_usage: share of the KV cache in use then, 0 to 1; of several engines the mean.
        ttft, itl, tpot, e2e: times, as :data:`TIMES` says.
        unusable: what the page had in a form that is none: a count that is not a number.
        engines: of all together, the sample of each.

    A count or a time that the engine does not export is None.
    """

    at: float
    seconds: float
    engine: str | None = None
    model: str = ""
    restarted: bool = False
    missed: int = 0
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    preemptions: int | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    accepted_at: tuple[int, ...] = ()
    finished: Mapping[str, int] | None = None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    ttft: Spread | None = None
    itl: Spread | None = None
    tpot: Spread | None = None
    e2e: Spread | None = None
    unusable: tuple[str, ...] = ()
    engines: tuple[Sample, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether the counts took the seconds of the interval: not so after a restart."""
        return not self.restarted and self.seconds > 0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens given out a second, all requests together."""
        return self._rate(self.generation_tokens)

    @property
    def prompt_tokens_per_second(self) -> float | None:
        """Tokens prefilled a second."""
        return self._rate(self.prompt_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """``1 + accepted / drafts``, bonus included; None where nothing was drafted."""
        if not self.drafts or self.accepted_tokens is None:
            return None
        return 1 + self.accepted_tokens / self.drafts

    @property
    def prefix_hit_rate(self) -> float | None:
        """Prompt tokens found in the prefix cache, of those looked up."""
        if self.prefix_hits is None or self.prefix_queries is None:
            return None
        return over(self.prefix_hits, self.prefix_queries)

    @property
    def acceptance(self) -> Acceptance | None:
        """The figures that the counters determine; None where the engine has no such counters.

        ``admitted`` is ``drafted``, so nothing counts as trimmed (see above); the verified share
        and the means over requests are undefined; ``emitted`` is that of the draft events alone,
        before a stop token cuts any. The conditional is over events that had all before accepted:
        where an event was shorter than the longest, or was trimmed, it is a lower bound.
        """
        if self.drafts is None or self.draft_tokens is None or not self.accepted_at:
            return None
        # A page may be made between two counters: no slot has more than the one before it.
        accepted_at, left = [], self.drafts
        for count in self.accepted_at:
            left = min(left, count)
            accepted_at.append(left)
        accepted = sum(accepted_at)
        drafted = max(self.draft_tokens, accepted)
        reached_at = (self.drafts, *accepted_at[:-1])
        unknown = (0,) * len(accepted_at)
        return Acceptance(
            events=self.drafts,
            drafted=drafted,
            admitted=drafted,
            accepted=accepted,
            plain=0,
            first=0,
            emitted=accepted + self.drafts,
            cut=0,
            requests=0,
            length_requests=None,
            length_tokens=None,
            histogram=tuple(
                a - b for a, b in zip((self.drafts, *accepted_at), (*accepted_at, 0), strict=True)
            ),
            drafted_at=unknown,
            admitted_at=unknown,
            reached_at=reached_at,
            accepted_at=tuple(accepted_at),
        )

    def of(self, engine: str | None) -> Sample | None:
        """The sample of one engine, None where it was not there; ``engine`` None is all."""
        if engine is None or engine == self.engine:
            return self
        return next((sample for sample in self.engines if sample.engine == engine), None)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, for JSON; what the engine does not export is left out."""
        made: dict[str, Any] = {"at": self.at, "seconds": self.seconds, "engine": self.engine}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in made or value is None or value == field.default:
                continue
            if isinstance(value, Spread):
                made[field.name] = value.to_dict()
            elif field.name == "engines":
                made[field.name] = [sample.to_dict() for sample in value]
            elif isinstance(value, tuple):
                made[field.name] = list(value)
            else:
                made[field.name] = dict(value) if field.name == "finished" else value
        return made

    def figures(self) -> dict[str, Any]:
        """What follows from the counts, by name, for JSON; None where undefined."""
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "tokens_per_second",
                "prompt_tokens_per_second",
                "acceptance_length",
                "prefix_hit_rate",
            )
        }
        acceptance = self.acceptance
        found["conditional_acceptance"] = None if acceptance is None else [*acceptance.conditional]
        for name in SPREADS:
            spread: Spread | None = getattr(self, name)
            for share in (50, 99):
                place = None if spread is None else spread.percentile(share / 100)
                found[f"{name}_p{share}_seconds"] = None if place is None else place.seconds
                if place is not None and place.beyond:
                    found[f"{name}_p{share}_beyond"] = True
                if place is not None and place.below is not None:
                    found[f"{name}_p{share}_below_seconds"] = place.below
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """What :meth:`to_dict` made; further names are passed over.

        Raises:
            ValueError, TypeError, KeyError: a field is missing or of another kind.
        """
        engine, model = data["engine"], data.get("model", "")
        if not isinstance(model, str) or not (engine is None or isinstance(engine, str)):
            raise TypeError("names of a sample are texts")
        seconds = below(data["seconds"], _LONGEST)
        if 0 < seconds < _SHORTEST:
            raise ValueError(f"{seconds:g} s is no length of a sample")
        found: dict[str, Any] = {
            name: whole(data[name]) for name in (*COUNTS, "running", "waiting") if name in data
        }
        found |= {name: Spread.from_dict(data[name]) for name in SPREADS if name in data}
        if "finished" in data:
            found["finished"] = {str(why): whole(n) for why, n in data["finished"].items()}
        if "kv_usage" in data:
            found["kv_usage"] = real(data["kv_usage"])
        return cls(
            at=below(data["at"], _LATEST),
            seconds=seconds,
            engine=engine,
            model=model,
            restarted=data.get("restarted", False) is True,
            missed=whole(data.get("missed", 0)),
            accepted_at=wholes(data.get("accepted_at", ())),
            unusable=tuple(str(name) for name in data.get("unusable", ())),
            engines=tuple(cls.from_dict(sample) for sample in data.get("engines", ())),
            **found,
        )

    def _rate(self, count: int | None) -> float | None:
        return count / self.seconds if count is not None and self.timed else None
