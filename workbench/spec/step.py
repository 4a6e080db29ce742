"""``Step``: what one step of the decode loop did, as plain values.

Words for a slot of a block, kept apart everywhere: *accepted*; *rejected*, verified and refused;
*trimmed*, drafted but never verified (engines count it as rejected). A slot that was verified
behind a refused one counts as rejected, too: its verdict no longer mattered, its cost did.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, Literal, get_args

from workbench.errors import TraceError

if TYPE_CHECKING:  # it brings torch, which reading a trace needs not
    from workbench.model.generate import Finish

Kind = Literal["first", "plain", "accepted", "corrected", "bonus"]
Phase = Literal["prefill", "decode"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_OF_A_POLICY = ("decide_seconds", "policy", "reason", "objective")
# What a drafter or a policy said may be no finite number, which JSON has no words for.
_SAID = ("confidences", "expected", "stale", "unary", "scores")
_SPELLED = {"nan": nan, "inf": inf, "-inf": -inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStep:
    """One request in one step.

    What the drafter or an estimator said (confidences, expected, stale, unary, scores) is kept as
    it was said, also where it is NaN or infinite; counts never are.

    Attributes:
        request: its number, kept while the request lives and not used again.
        position: tokens of the sequence before this step, prompt included: the index of the first
            token the step gives. The anchor, row 0 of the verified rows, is at ``position - 1``.
        drafted: the drafter's token ids, N of them, empty in a step without drafts.
        confidences: for each draft token, the probability the walk gave it among its candidates
            (softmax of the realized scores at the request's temperature, 1 where that is 0). It is
            the drafter's own word and not calibrated.
        expected, stale: where a policy decided, for each draft token the estimator's probability
            that it is accepted if all before it are: of this draft, by which the budget was
            allocated, and of the request's draft before, by which the budget was made.
        admitted: how many of the drafted were verified, a prefix.
        accepted: how many of the admitted the target accepted, a prefix.
        token_ids: what the step gave the sequence; normally ``accepted + 1`` tokens, fewer when a
            stop token or a limit came first.
        kinds: of each of these tokens: ``first`` of the prompt's prefill, ``plain`` of a step
            without verified drafts, ``accepted`` draft, ``corrected`` at the first refused slot,
            ``bonus`` behind verified drafts that were all accepted.
        finished: why the sequence ended here, None if it goes on.
        candidates, unary, scores: with ``detail``, of each slot the K candidates' ids, their own
            logits, and their realized scores behind the path that was walked; else empty.
    """

    request: int
    position: int
    drafted: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    expected: tuple[float, ...] = ()
    stale: tuple[float, ...] = ()
    admitted: int = 0
    accepted: int = 0
    token_ids: tuple[int, ...]
    kinds: tuple[Kind, ...]
    finished: Finish | None = None
    candidates: tuple[tuple[int, ...], ...] = ()
    unary: tuple[tuple[float, ...], ...] = ()
    scores: tuple[tuple[float, ...], ...] = ()

    @property
    def trimmed(self) -> int:
        """Drafted but not verified."""
        return len(self.drafted) - self.admitted

    @property
    def rejected(self) -> int:
        """Verified and not accepted."""
        return self.admitted - self.accepted

    @property
    def cut(self) -> int:
        """Tokens the verdict gave that a stop token or a limit took away again."""
        return self.accepted + 1 - len(self.token_ids)

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON; what is empty or None is left out.

        A score or confidence that is no finite number is the word ``"nan"``, ``"inf"`` or
        ``"-inf"``.
        """
        # Not asdict(), which copies every tuple: a step with detail would cost four times as much.
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {name: _spelled(values[name]) for name in _SAID}
        return {k: v for k, v in values.items() if v is not None and v != ()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RequestStep:
        """Back from :meth:`to_dict`.

        Raises:
            TraceError: a value is missing, of the wrong kind, or contradicts another.
        """
        known = {f.name for f in fields(cls)}
        try:
            values = {k: _tuples(v) for k, v in data.items() if k in known}
            values |= {k: _read(v) for k, v in values.items() if k in _SAID}
            made = cls(**values)
            _check(made)
        except TraceError:
            raise
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise TraceError(f"a request of a step cannot be read: {error}") from error
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the decode loop, all requests that took part. Times are wall time in seconds.

    Attributes:
        index: number of the step in its run, from 0.
        phase: ``prefill`` (one request's prompt, which gives its first token) or ``decode``.
        rows: token rows the target ran.
        draft_seconds: context K/V, block pass, selector and walk; 0 without drafts.
        verify_seconds: the target's pass and the verdict.
        decide_seconds: what a policy took, confidences and learning included; 0 without one.
        seconds: the whole step.
        policy: name of the policy that decided what was verified, "" without one.
        reason: why, in its words.
        objective: expected tokens a millisecond for budgets 0 to all drafts, where it weighs them.
        requests: each request's part, in the order of their rows.
    """

    index: int
    phase: Phase = "decode"
    rows: int
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decide_seconds: float = 0.0
    seconds: float
    policy: str = ""
    reason: str = ""
    objective: tuple[float, ...] = ()
    requests: tuple[RequestStep, ...]

    @property
    def tokens(self) -> int:
        """Tokens the step gave, all requests together."""
        return sum(len(r.token_ids) for r in self.requests)

    @property
    def budget(self) -> int:
        """Draft tokens that were verified, all requests together."""
        return sum(r.admitted for r in self.requests)

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON; what only a policy gives is left out without one.

        Numbers that are not finite are words, as in :meth:`RequestStep.to_dict`; times stay as they
        are, and a trace refuses one that is none.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "requests"}
        values["objective"] = _spelled(values["objective"])
        if not self.policy:
            values = {k: v for k, v in values.items() if k not in _OF_A_POLICY}
        return values | {"requests": [r.to_dict() for r in self.requests]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Step:
        """Back from :meth:`to_dict`.

        Raises:
            TraceError: a value is missing, of the wrong kind, or contradicts another.
        """
        known = {f.name for f in fields(cls)} - {"requests"}
        try:
            requests = tuple(RequestStep.from_dict(r) for r in data["requests"])
            values = {k: _tuples(v) for k, v in data.items() if k in known}
            values |= {k: _read(v) for k, v in values.items() if k == "objective"}
            made = cls(**values, requests=requests)
            counts = all(_is_whole(n) and n >= 0 for n in (made.index, made.rows))
            times = (
                made.draft_seconds, made.verify_seconds, made.decide_seconds, made.seconds
            )  # fmt: skip
            words = (made.policy, made.reason)
            if not all(isinstance(word, str) for word in words) or not all(
                _is_number(x) for x in made.objective
            ):
                raise TraceError("a step has a policy without words, or an objective of no numbers")
            if not counts or not all(_is_real(t) and t >= 0 for t in times):
                raise TraceError("a step has a negative count or time")
            if made.phase not in get_args(Phase):
                raise TraceError(f"a step has the phase {made.phase!r:.40}")
        except TraceError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
            raise TraceError(f"a step cannot be read: {error}") from error
        return made


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


def _spelled(said: Any) -> Any:
    """Numbers, in a tuple or in rows of a table, with words for those that are not finite."""
    if isinstance(said, float):
        return said if isfinite(said) else str(float(said))
    if not isinstance(said, tuple):
        return said
    # A sum is finite only if all its terms are: the usual case, at a small part of the cost.
    with suppress(TypeError, OverflowError):  # rows of a table have no sum
        if isfinite(sum(said)):
            return said
    return tuple(_spelled(part) for part in said)


def _read(said: Any) -> Any:
    """Back from :func:`_spelled`."""
    if isinstance(said, tuple):
        return tuple(_read(part) for part in said)
    return _SPELLED.get(said, said) if isinstance(said, str) else said


def _check(r: RequestStep) -> None:
    whole = (r.request, r.position, r.admitted, r.accepted, *r.drafted, *r.token_ids)
    if not all(_is_whole(n) for n in whole) or r.request < 0 or r.position < 0:
        raise TraceError("a request of a step has a count or a token id that is no whole number")
    if not 0 <= r.accepted <= r.admitted <= len(r.drafted):
        raise TraceError(
            f"a request of a step has {len(r.drafted)} drafted, {r.admitted} admitted and "
            f"{r.accepted} accepted tokens; each must be at most the one before"
        )
    if len(r.kinds) != len(r.token_ids) or not set(r.kinds) <= set(KINDS):
        raise TraceError("a request of a step needs one kind for each of its tokens")
    if len(r.token_ids) > r.accepted + 1:
        raise TraceError("a request of a step gave more tokens than it accepted, and one more")
    if r.finished not in (None, "eos", "length", "context"):
        raise TraceError("a request of a step ended for no reason that is known")
    for name in ("confidences", "expected", "stale", "candidates", "unary", "scores"):
        if len(getattr(r, name)) not in (0, len(r.drafted)):
            raise TraceError(f"a request of a step needs {name} for each drafted token or none")
    tables = [t for t in (r.candidates, r.unary, r.scores) if t != ()]
    if (
        len({len(row) for table in tables for row in table}) > 1
        or not all(_is_number(x) for x in (*r.confidences, *r.expected, *r.stale))
        or not all(_is_whole(n) for row in r.candidates for n in row)
        or not all(_is_number(x) for table in (r.unary, r.scores) for row in table for x in row)
    ):
        raise TraceError("a request of a step has scores or candidates that are no numbers")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_real(value)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
