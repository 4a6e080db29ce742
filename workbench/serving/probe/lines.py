"""Frames of the probe as lines of a trace; in the writer's process, on the standard library alone.

A pass in which requests decode is one :class:`~workbench.spec.step.Step` of phase ``decode`` with
all requests that got a token, also those whose prompt ended in the same pass (kind ``first``); a
pass that only read prompts is one of phase ``prefill``. Chunks of prompts that gave no token are in
``rows`` and in the time, and are no requests; nor is a request that had ended before the pass and
ran on because the engine is asynchronous: it throws those tokens away. What a step has no room for
is under its key ``engine``; lines whose ``kind`` is ``engine`` are no steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite
from operator import mul
from typing import Any, NamedTuple, TypeAlias

from workbench.spec.step import Kind, RequestStep, Step
from workbench.spec.trace_lines import encode

Values: TypeAlias = dict[str, Any]
Arrays: TypeAlias = dict[str, list[Any]]

POLICY = "vllm adaptive"
RECORDED_BY = "workbench probe"  # in the header
_KNOWN = 16384  # requests that are remembered; the engine runs 1,024 at once, or a few times that
_FLOAT32 = 9  # digits that tell a float32 from all others
_FLOAT64 = 12  # of the objective, which can be worked out again


class Line(NamedTuple):
    """A line, and under which name a reader that comes later gets the newest of it."""

    data: bytes
    keep: str = ""


class Lines:
    """Turns frames into lines, one after the other."""

    def __init__(self) -> None:
        """No frame was seen yet."""
        self.ended = False
        self._index = 0
        self._numbers: dict[str, int] = {}  # of requests; those seen last are last
        self._next = 0
        self._begun: set[int] = set()  # numbers of those that have a token
        self._ends: dict[str, tuple[int | None, frozenset[int]]] = {}  # length and tokens
        self._ended: set[int] = set()  # numbers
        self._most = 0  # length at which every request ends; 0 is unknown
        self._draft_ms: list[float] = []
        self._verify_ms: list[float] = []
        self._dropped = 0

    def of(self, values: Values, arrays: Arrays) -> list[Line]:
        """The lines of a frame; none of a pass that gave nobody a token.

        Raises:
            ValueError, KeyError: it is none of the probe's.
        """
        what = values["what"]
        if what == "header":
            self._most = values["header"].get("engine", {}).get("max_model_len") or 0
            return [Line(encode(values["header"], "the header"), "header")]
        if what == "costs":
            self._draft_ms, self._verify_ms = arrays["draft_ms"], arrays["verify_ms"]
            said = {name: values[name] for name in ("draft", "verify", "captured", "most_rows")}
            return [_engine("costs", "costs", **said, context=values["context"])]
        if what == "end":
            self.ended = True
            return [*self._lost(values["dropped"]), _engine("end", "", reason=values["reason"])]
        if what != "pass":
            raise ValueError(f"a frame of kind {what!r:.40}")
        return self._pass(values, arrays)

    def end(self, reason: str) -> list[Line]:
        """The last line, if none was sent."""
        return [] if self.ended else self.of({"what": "end", "reason": reason,
                                              "dropped": self._dropped}, {})  # fmt: skip

    def _lost(self, dropped: int) -> list[Line]:
        if dropped <= self._dropped:
            return []
        self._dropped = dropped
        return [_engine("dropped", "", passes=dropped)]

    def _pass(self, values: Values, arrays: Arrays) -> list[Line]:
        found = self._lost(values["dropped"])
        for name, length, stops in values["ends"]:
            self._will_end(name, length, stops)
        if values["fitted"] is not None:
            slope, *intercepts = (_short(x, _FLOAT32) for x in arrays["fit"])
            found.append(
                _engine(
                    "coefficients", "coefficients",
                    step=values["fitted"], slope=slope, intercepts=intercepts,
                )
            )  # fmt: skip
        try:
            _complete(values, arrays)
            step = self._step(values, arrays)
        except ValueError as error:
            reason = str(error)
            return [*found, _engine("inconsistent", "", number=values["number"], reason=reason)]
        if step is None:
            return found
        self._index += 1
        extra = {
            "pass": values["number"],
            "at": round(values["at"], 6),
            "plain": values["plain"],
            "sampling": values["sampling"],
        }
        if values["budget"] is not None:
            extra["budget"] = values["budget"]
        if values["discarded"]:
            extra["discarded"] = values["discarded"]
        whole = step.to_dict() | {"engine": extra}
        return [*found, Line(encode(whole, f"step {step.index}"))]

    def _step(self, values: Values, arrays: Arrays) -> Step | None:
        count, decided = len(values["names"]), values["budget"] is not None
        if any(len(arrays[name]) < count for name in ("row", "sampled", "drafted", "admitted")):
            raise ValueError(f"arrays of a pass of {count} requests are too short")
        parts, decoding = [], False
        values["discarded"], lost = 0, False
        for i, name in enumerate(values["names"]):
            number = self._number(name)
            if not arrays["sampled"][i]:
                continue  # its prompt goes on
            if number in self._ended:
                values["discarded"] += 1
                lost |= arrays["admitted"][i] > 0
                continue
            parts.append(self._part(number, i, values, arrays, decided))
            self._look_for_end(name, parts[-1])
            decoding |= not arrays["prefilling"][i]
        if not parts:
            return None
        seconds, verify, draft = values["seconds"]
        asked = decided and decoding
        total = sum(arrays["drafted"])
        return Step(
            index=self._index,
            phase="decode" if decoding else "prefill",
            rows=values["rows"],
            draft_seconds=_time(draft),
            verify_seconds=_time(verify),
            decide_seconds=_time(values["decide_seconds"]) if asked else 0.0,
            seconds=_time(seconds),
            policy=POLICY if asked else "",
            reason=(
                f"{values['budget']} of {total} drafts give the most tokens a millisecond"
                if asked
                else ""
            ),
            # Where the engine spent drafts on a request that had ended, what it weighed is not of
            # the requests of this step.
            objective=self._objective(values, arrays) if asked and not lost else (),
            requests=tuple(parts),
        )

    def _number(self, name: str) -> int:
        """A request's number: kept while it is seen now and then, and not used again."""
        number = self._numbers.pop(name, None)
        if number is None:
            number, self._next = self._next, self._next + 1
        self._numbers[name] = number
        if len(self._numbers) > _KNOWN:
            oldest = next(iter(self._numbers))
            self._ends.pop(oldest, None)
            gone = self._numbers.pop(oldest)
            self._begun.discard(gone)
            self._ended.discard(gone)
        return number

    def _will_end(self, name: str, length: int | None, stops: list[int]) -> None:
        if self._numbers.get(name) in self._ended:
            self._ended.discard(self._numbers.pop(name))  # another request of that name
        self._ends.pop(name, None)
        self._ends[name] = length, frozenset(stops)
        if len(self._ends) > 2 * _KNOWN:  # never seen in a pass
            del self._ends[next(iter(self._ends))]

    def _look_for_end(self, name: str, part: RequestStep) -> None:
        length, stops = self._ends.get(name, (None, frozenset()))
        now = part.position + len(part.token_ids)
        limits = [n for n in (length, self._most) if n]
        if (limits and now >= min(limits)) or not stops.isdisjoint(part.token_ids):
            self._ended.add(part.request)

    def _part(
        self, number: int, i: int, values: Values, arrays: Arrays, decided: bool
    ) -> RequestStep:
        width, slots = values["width"], values["slots"]
        drafted, admitted, sampled = (arrays[n][i] for n in ("drafted", "admitted", "sampled"))
        accepted = sampled - 1
        if not 0 <= accepted <= admitted <= drafted <= slots or sampled > width:
            raise ValueError(
                f"request {number} has {drafted} drafts of {slots}, {admitted} admitted and "
                f"{sampled} of {width} tokens sampled"
            )
        last: Kind
        if arrays["prefilling"][i] and number not in self._begun:
            last = "first"
        elif not admitted:
            last = "plain"
        else:
            last = "bonus" if accepted == admitted else "corrected"
        self._begun.add(number)
        row = arrays["row"][i]
        at = row * slots
        accepted_kind: Kind = "accepted"
        said = decided and drafted
        return RequestStep(
            request=number,
            position=arrays["lengths"][row],
            drafted=tuple(arrays["drafts"][at : at + drafted]),
            expected=_shorts(arrays["live"][at : at + drafted]) if said else (),
            stale=_shorts(arrays["stale"][at : at + drafted]) if said else (),
            admitted=admitted,
            accepted=accepted,
            token_ids=tuple(arrays["tokens"][i * width : i * width + sampled]),
            kinds=(*(accepted_kind,) * accepted, last),
        )

    def _objective(self, values: Values, arrays: Arrays) -> tuple[float, ...]:
        """What the manager weighed, worked out as it does; () where its budget does not follow."""
        slots, requests = values["slots"], len(values["names"])
        likely: list[float] = []
        for row, drafted in zip(arrays["row"], arrays["drafted"], strict=False):
            likely += accumulate(arrays["stale"][row * slots : row * slots + drafted], mul)
        if not all(map(isfinite, likely)):
            return ()
        likely.sort(reverse=True)
        most = min(len(likely), values["most_drafts"])
        first = values["plain"]
        verify = self._verify_ms[first : first + most + 1]
        if len(verify) <= most or requests >= len(self._draft_ms):
            return ()
        draft, sampling = self._draft_ms[requests], values["sampling"]
        gained = [0.0, *accumulate(likely[:most])]
        weighed = [(sampling + g) / (draft + v) for g, v in zip(gained, verify, strict=True)]
        if weighed.index(max(weighed)) != values["budget"]:
            return ()
        return tuple(_short(x, _FLOAT64) for x in weighed)


def _complete(values: Values, arrays: Arrays) -> None:
    """What follows from the rest: drafts of a pass without any, and what its rows are for."""
    count = len(values["names"])
    drafted = arrays.setdefault("drafted", [0] * count)
    arrays.setdefault("admitted", drafted)  # nobody trims
    # The engine's number of scheduled tokens is that of before the trimming.
    own = [s - d for s, d in zip(arrays["scheduled"], drafted, strict=False)]
    values["plain"] = sum(own)
    values["sampling"] = sum(
        c + n >= p for c, n, p in zip(arrays["computed"], own, arrays["prompt"], strict=False)
    )


def _engine(what: str, keep: str, **said: Any) -> Line:
    line = {"kind": "engine", "what": what} | said
    return Line(encode(line, f"the engine's {what}"), keep)


def _shorts(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(_short(x, _FLOAT32) for x in values)


def _short(x: float, digits: int) -> float:
    return float(f"{x:.{digits}g}")


def _time(seconds: float) -> float:
    """A clock's difference, to the 0.1 µs; what a device says may be a little below 0."""
    return round(max(0.0, seconds), 7)
