"""``Position``: what the drafter proposed at one output position, and how much would be accepted.

Recorded at every position of a continuation, whether the decode loop would draft there or
not (:func:`workbench.spec.every_position.record_every_position`). The continuation does not depend
on what was drafted, so any policy can be replayed on such a record exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from workbench.errors import TraceError
from workbench.spec.metrics import Acceptance, Tally
from workbench.spec.step import Kind, RequestStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A block drafted at one position.

    Attributes:
        request: number of the prompt.
        position: index in the sequence, prompt included, of the first drafted token; the anchor is
            the token before it. As :attr:`workbench.spec.step.RequestStep.position`.
        token_id: the token that the target's continuation has at ``position``.
        left: tokens the sequence may still get here, this one included: what the limit of new
            tokens and the context leave. A decode loop has at most ``left - 1`` drafts verified.
        drafted: N token ids, of the walk.
        accepted: how many of them the target accepts, all being verified whatever is left.
        candidates, scores, unary: of each slot the K candidates' ids, realized scores behind the
            path that was walked, and own logits; the last may be absent.
    """

    request: int
    position: int
    token_id: int
    left: int
    drafted: tuple[int, ...]
    accepted: int
    candidates: tuple[tuple[int, ...], ...] = ()
    scores: tuple[tuple[float, ...], ...] = ()
    unary: tuple[tuple[float, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON; what is empty is left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # asdict() would copy deep
        return {k: v for k, v in values.items() if v != () or k == "drafted"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Position:
        """Back from :meth:`to_dict`.

        Raises:
            TraceError: a value is missing, of the wrong kind, or contradicts another.
        """
        known = {f.name for f in fields(cls)}
        try:
            made = cls(**{k: _tuples(v) for k, v in data.items() if k in known})
            counts = (made.request, made.position, made.token_id, made.accepted)
            whole = (*counts, made.left - 1, *made.drafted)
            tables = [t for t in (made.candidates, made.scores, made.unary) if t != ()]
            sound = (
                all(_is_whole(n) and n >= 0 for n in whole)
                and made.accepted <= len(made.drafted)
                and all(len(t) == len(made.drafted) for t in tables)
                and len({len(row) for table in tables for row in table}) <= 1
                and all(_is_whole(n) for row in made.candidates for n in row)
                and all(_is_real(x) for t in (made.scores, made.unary) for row in t for x in row)
            )
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise TraceError(f"a position cannot be read: {error}") from error
        if not sound:
            raise TraceError("a position has values that are no numbers or contradict each other")
        return made


def replay_full(positions: Iterable[Position], request: int) -> Iterator[int]:
    """Accepted lengths of one request when every step drafts, and all that fits is verified.

    It walks from the request's first position on, each time by the accepted tokens and one more:
    what the decode loop does with as many drafts. The last token that a limit leaves needs no
    draft, so no length is given there. A position that is missing (a line that could not be read)
    ends the walk.
    """
    at = {p.position: p for p in positions if p.request == request}
    return (step.accepted for step in _walk(at) if step.drafted)


def replayed(positions: Iterable[Position]) -> Acceptance:
    """Figures of :func:`replay_full` over every request: those of a live run with these drafts."""
    tally = Tally()
    requests: dict[int, dict[int, Position]] = {}
    for p in positions:
        requests.setdefault(p.request, {})[p.position] = p
    for request, at in requests.items():
        for step in _walk(at):
            tally.add_request(step)
        tally.leave(request)
    return tally.acceptance()


def at_every_position(positions: Iterable[Position]) -> Acceptance:
    """Figures with every position as a draft event of its own, whether a run would draft there.

    Positions weigh the same here, while a run drafts seldom where blocks are long, so this is not
    the acceptance length of a run (:func:`replayed`). ``emitted`` counts each block's own tokens,
    which overlap.
    """
    tally = Tally()
    for p in positions:
        n = len(p.drafted)
        tally.add_request(_step(p, n, p.accepted, (p.token_id,) * (p.accepted + 1)))
    return tally.acceptance()


def _walk(at: Mapping[int, Position]) -> Iterator[RequestStep]:
    """Steps of a run through one request's positions."""
    position, end = min(at, default=0), max(at, default=0) + 1
    while (block := at.get(position)) is not None:
        admitted = min(len(block.drafted), block.left - 1)
        accepted = min(block.accepted, admitted)
        given = range(position, min(position + accepted + 1, end))  # a stop token may be the last
        tokens = tuple(at[i].token_id for i in given if i in at)
        yield _step(block, admitted, accepted, tokens)
        position += accepted + 1


def _step(block: Position, admitted: int, accepted: int, tokens: tuple[int, ...]) -> RequestStep:
    kinds: list[Kind] = ["accepted"] * accepted
    kinds.append("corrected" if accepted < admitted else "bonus" if admitted else "plain")
    return RequestStep(
        request=block.request,
        position=block.position,
        drafted=block.drafted if admitted else (),
        admitted=admitted,
        accepted=accepted,
        token_ids=tokens,
        kinds=tuple(kinds[: len(tokens)]),
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
