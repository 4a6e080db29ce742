"""``Acceptance``: a snapshot of every acceptance figure, each with its formula and its base.

The base of nearly every figure is the *draft event*: one request in one step that had at least one
drafted token. Per event ``drafted >= admitted >= accepted``; what was drafted and not admitted is
*trimmed*, what was admitted and not accepted is *rejected*. What has no base is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, get_args

Curve = Literal["survival", "conditional", "verified_share"]
CURVES: tuple[Curve, ...] = get_args(Curve)
_Z = 1.959963984540054  # 97.5 % quantile of the normal distribution


def over(count: float, base: float) -> float | None:
    """``count / base``, None over nothing."""
    return count / base if base else None


@dataclass(frozen=True, slots=True)
class Rate:
    """``count`` of ``n`` with its 95 % band (Wilson's score interval); None where n is 0.

    ``(p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)`` with p = count/n and z = 1.96. It takes
    the n for independent; the events of one text are not quite, so it is a little narrow.
    """

    count: int
    n: int

    @property
    def value(self) -> float | None:
        """``count / n``."""
        return over(self.count, self.n)

    @property
    def low(self) -> float | None:
        """Lower end of the band."""
        return self._end(-1)

    @property
    def high(self) -> float | None:
        """Upper end of the band."""
        return self._end(1)

    def _end(self, sign: int) -> float | None:
        if not self.n:
            return None
        if self.count == (self.n if sign > 0 else 0):
            return (1 + sign) / 2  # exactly, where the formula only rounds to it
        p, n = self.count / self.n, self.n
        half = _Z * sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        return (p + _Z**2 / (2 * n) + sign * half) / (1 + _Z**2 / n)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Acceptance:
    """Figures of a set of draft events, as :class:`Tally` counted them.

    Identities: ``sum(histogram) = events``; ``sum(i * histogram[i]) = accepted``;
    ``1 + sum(survival) = length_pooled``; ``emitted = accepted + events + plain + first - cut``;
    the conditionals up to i multiply to ``survival[i]`` where every event drafted more than i
    tokens and none was trimmed.

    Attributes:
        events: draft events.
        drafted, admitted, accepted: draft tokens, over all events.
        plain: a request's steps without drafts, its prefill not counted.
        first: prefills that gave a token.
        emitted: tokens that the sequences kept, of events, plain steps and prefills.
        cut: tokens of the verdicts that a stop token or a limit took away again. Acceptance is
            counted from the verdict, before the cut.
        requests: those with at least one event.
        length_requests: mean over requests of ``1 + accepted_r / events_r``.
        length_tokens: the same weighted with the tokens each request emitted in all its steps.
        histogram: ``[i]`` is the number of events with exactly i accepted tokens.
        drafted_at: ``[i]`` is the number of events with more than i tokens drafted.
        admitted_at, accepted_at: likewise admitted and accepted.
        reached_at: ``[i]``: events whose slot i was admitted and everything before it accepted.
    """

    events: int
    drafted: int
    admitted: int
    accepted: int
    plain: int
    first: int
    emitted: int
    cut: int
    requests: int
    length_requests: float | None
    length_tokens: float | None
    histogram: tuple[int, ...]
    drafted_at: tuple[int, ...]
    admitted_at: tuple[int, ...]
    reached_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @property
    def trimmed(self) -> int:
        """Drafted and never verified."""
        return self.drafted - self.admitted

    @property
    def rejected(self) -> int:
        """Verified and not accepted: the refused slot and those behind it."""
        return self.admitted - self.accepted

    @property
    def length_pooled(self) -> float | None:
        """Acceptance length, ``1 + accepted / events``: the corrected or bonus token counts."""
        return 1 + self.accepted / self.events if self.events else None

    @property
    def rate_drafted(self) -> float | None:
        """``accepted / drafted``: what engines call the draft acceptance rate."""
        return over(self.accepted, self.drafted)

    @property
    def rate_verified(self) -> float | None:
        """``accepted / admitted``: of the rows that were paid for."""
        return over(self.accepted, self.admitted)

    @property
    def survival(self) -> tuple[float | None, ...]:
        """``[i] = #(accepted > i) / events``: unconditional, never rising with i."""
        return tuple(r.value for r in self.rates("survival"))

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """``[i] = #(accepted > i) / #(admitted > i and accepted >= i)``: given all before it."""
        return tuple(r.value for r in self.rates("conditional"))

    @property
    def verified_share(self) -> tuple[float | None, ...]:
        """``[i] = #(admitted > i) / #(drafted > i)``: below 1 where slots were trimmed."""
        return tuple(r.value for r in self.rates("verified_share"))

    def rates(self, curve: Curve) -> tuple[Rate, ...]:
        """One of the three curves with count, base n and band at each slot of a block."""
        base = {
            "survival": (self.accepted_at, (self.events,) * len(self.accepted_at)),
            "conditional": (self.accepted_at, self.reached_at),
            "verified_share": (self.admitted_at, self.drafted_at),
        }
        return tuple(Rate(count, n) for count, n in zip(*base[curve], strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Figures by name, for JSON; None where undefined.

        ``bands`` has, for each curve, low, high and n at each slot.
        """
        counts = ("events", "drafted", "admitted", "accepted", "rejected", "trimmed", "emitted")
        lengths = ("length_pooled", "length_requests", "length_tokens")
        rest = ("cut", "plain", "first", "requests", *lengths, "rate_drafted", "rate_verified")
        return (
            {name: getattr(self, name) for name in (*counts, *rest)}
            | {name: list(getattr(self, name)) for name in ("histogram", *CURVES)}
            | {"bands": {c: [[r.low, r.high, r.n] for r in self.rates(c)] for c in CURVES}}
        )

    def __str__(self) -> str:
        lines = [
            f"acceptance length {_n(self.length_pooled)} (pooled, bonus included; "
            f"{self.events:,} draft events of {self.requests:,} requests)",
            f"mean over requests {_n(self.length_requests)}, "
            f"weighted with their tokens {_n(self.length_tokens)}",
            f"drafted {self.drafted:,} = accepted {self.accepted:,} + rejected {self.rejected:,} "
            f"+ trimmed {self.trimmed:,}; accepted of drafted {_n(self.rate_drafted)}, "
            f"of verified {_n(self.rate_verified)}",
            f"emitted {self.emitted:,} = accepted {self.accepted:,} + one an event {self.events:,} "
            f"+ plain {self.plain:,} + first {self.first:,} - cut {self.cut:,}",
        ]
        if self.accepted_at:
            lines.append("slot  survival [95 %]        conditional [95 %]  of n       verified")
        curves = zip(*(self.rates(c) for c in CURVES), strict=True)
        for slot, (survival, conditional, verified) in enumerate(curves, 1):
            lines.append(
                f"{slot:>4}  {_band(survival)}  {_band(conditional)}  {conditional.n:>9,}  "
                f"{_n(verified.value):>8}"
            )
        runs = ", ".join(f"{run}: {count:,}" for run, count in enumerate(self.histogram))
        lines.append(f"events by accepted run: {runs}")
        return "\n".join(lines)

    __repr__ = __str__


def _n(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _band(rate: Rate) -> str:
    if rate.value is None or rate.low is None or rate.high is None:
        return f"{'n/a':<20}"
    return f"{rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}]"
