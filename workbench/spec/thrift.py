"""When deciding is not worth its time: :class:`Thrift` of a frugal policy.

At one sequence on a CPU a step is short and its rows are cheap, so that deciding what to trim can
take more than trimming gains. The gains that decisions promise are weighed against what they took;
where they do not pay, the policy rests and all drafts are verified for a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Decisions that are weighed against what they cost, and the steps rested after they did not pay.
WEIGHED, RESTS = 32, 480
# Promises are the best of many guesses, so they come true in part; and what deciding costs is more
# than its own time, since it takes room in the processor's caches.
_PROMISED = 2.0  # times its cost


@dataclass(slots=True)
class _Scales:
    """Of steps with one number of requests.

    Attributes:
        left: steps to rest.
        why: the reason for it.
        promised: gains over verifying all, of the decisions weighed.
        deciding, rest: seconds of these steps, deciding and all else.
    """

    left: int = 0
    why: str = ""
    promised: list[float] = field(default_factory=list)
    deciding: float = 0.0
    rest: float = 0.0


class Thrift:
    """Weighs decisions, apart for each number of requests decoded together.

    It belongs to a policy and not to a run: what one run found out holds in the next.
    """

    def __init__(self) -> None:
        """With nothing weighed."""
        self._of: dict[int, _Scales] = {}

    def rest(self, requests: int) -> str:
        """Why this step of so many requests is a rest; empty if it is to be decided."""
        scales = self._of.get(requests)
        if scales is None or not scales.left:
            return ""
        scales.left -= 1
        return scales.why

    def weigh(self, requests: int, promise: float, deciding: float, step: float) -> None:
        """A step that was decided.

        Args:
            requests: decoded together.
            promise: gain in expected tokens/s over verifying all drafts; 0.05 for 5 %.
            deciding: seconds that it took.
            step: seconds of the whole step.
        """
        scales = self._of.setdefault(requests, _Scales())
        scales.promised.append(promise)
        scales.deciding += deciding
        scales.rest += step - deciding
        if len(scales.promised) < WEIGHED:
            return
        found = _Scales()
        # A step of no time but deciding, as from a clock too coarse, cannot be weighed.
        cost = scales.deciding / scales.rest if scales.rest > 0 else 0.0
        gain = sum(scales.promised) / WEIGHED
        if gain < _PROMISED * cost:
            found.left, found.why = (
                RESTS,
                f"rests: trimming promises {gain:.1%}, deciding costs {cost:.1%}; all drafts for "
                f"{RESTS} steps",
            )
        self._of[requests] = found
