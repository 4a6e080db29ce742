"""``Lane``: what a watched run has come to, in a memory that does not grow with its steps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from workbench.spec.metrics import Acceptance, Tally
from workbench.spec.rates import over
from workbench.spec.step import KINDS, Kind, RequestStep, Step
from workbench.terminal import printable
from workbench.views.numbers import plural
from workbench.views.spec_curves import WINDOW, length_words
from workbench.views.spec_curves import _health as health
from workbench.views.spec_marks import TokenTexts, label

# Kept for a page that is drawn later, for hovers and for texts. With the candidates of every slot a
# step takes some 15 kB.
LAST_STEPS = 256
LAST_PIECES = 4000
_POINTS = 240  # of the line over the run; when it is full, every second point goes
_PART = "◌"  # stands for a piece of a character, whose text comes with the next token
_CANDIDATES = 6  # of a slot, shown under it
_NUMBER: dict[Kind, int] = {kind: number for number, kind in enumerate(KINDS)}
PROMPT = -1  # in the place of a kind: text that was given, not written

# text, kind's number, step, slot (-1: none), confidence (-1: none), 1 if it stands for no text,
# request
Piece = tuple[str, int, int, int, float, int, int]


class Lane:
    """Figures of one source of steps, its last steps and its last text.

    One request's text is followed until it ends, then that of the next; figures are of all.

    Attributes:
        name: as the page calls it.
        source: where the steps come from: "measured here" or "recorded". A recording may have kept
            a part of the candidates.
        steps: the last steps, oldest first.
        pieces: the last tokens as text.
        tokens: emitted so far.
        request: whose text is, or was last, followed; None before the first step.
        refused, offered: draft events that the target corrected, of those whose candidates are
            known; and how many of these had the target's token among the candidates.
        timed_seconds, timed_tokens: of all decode steps but the first.
    """

    def __init__(
        self,
        name: str,
        tokenizer: TokenTexts,
        *,
        slots: int,
        prompt: Callable[[int], str],
        source: str = "measured here",
    ) -> None:
        self.name, self.slots, self.source = name, slots, source
        self.steps: deque[Step] = deque(maxlen=LAST_STEPS)
        self.pieces: deque[Piece] = deque(maxlen=LAST_PIECES)
        self.counts: Counter[Kind] = Counter()
        self.seen = self.tokens = 0
        self.timed_steps = self.timed_tokens = 0
        self.timed_seconds = self.draft_seconds = self.verify_seconds = 0.0
        self.finished: str | None = None
        self._tokenizer, self._prompt = tokenizer, prompt
        self._tally = Tally(slots)
        self.request: int | None = None
        self.refused = self.offered = self._choice = 0
        self._decoded = 0
        self._shown: int | None = None
        self._stream: Any = None
        self._last: dict[int, int] = {}  # last token of each request that goes on
        self._anchors: deque[dict[int, int]] = deque(maxlen=LAST_STEPS)
        self._events = self._accepted = 0
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._recent_sum = 0
        self._line: list[tuple[int, float, float]] = []
        self._stride = 1
        self._labels: dict[int, str] = {}

    # -- counting ---------------------------------------------------------------------------------

    def add(self, step: Step) -> list[Piece]:
        """Count a step; the text it adds to the page."""
        self.seen += 1
        self._tally.add(step)
        self.steps.append(step)
        self._anchors.append({r.request: self._last.get(r.request, -1) for r in step.requests})
        if step.phase == "decode":
            self._time(step)
        new: list[Piece] = []
        for part in step.requests:
            self.tokens += len(part.token_ids)
            self.counts.update(part.kinds)
            if part.drafted:
                self._event(part.accepted)
                self._refusal(part)
            if part.token_ids:
                self._last[part.request] = part.token_ids[-1]
            new += self._write(step, part)
            if part.finished is not None:
                self._last.pop(part.request, None)
                self.finished = part.finished
        self.pieces.extend(new)
        return new

    def _time(self, step: Step) -> None:
        self._decoded += 1
        if self._decoded == 1:
            return  # kernels and buffers are used for the first time
        self.timed_steps += 1
        self.timed_tokens += step.tokens
        self.timed_seconds += step.seconds
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds

    def _event(self, accepted: int) -> None:
        if len(self._recent) == WINDOW:
            self._recent_sum -= self._recent[0]
        self._recent.append(accepted)
        self._recent_sum += accepted
        self._events += 1
        self._accepted += accepted
        if self._events % self._stride == 0:
            if len(self._line) == _POINTS:
                del self._line[::2]  # the first of each pair: the last one stays
                self._stride *= 2
                if self._events % self._stride:
                    return
            self._line.append(self._point())

    def _refusal(self, part: RequestStep) -> None:
        """Whether the selector could have been right where the target refused a draft."""
        if part.kinds and part.kinds[-1] == "corrected" and part.accepted < len(part.candidates):
            ids = part.candidates[part.accepted]
            self.refused += 1
            self.offered += part.token_ids[-1] in ids
            self._choice = max(self._choice, len(ids))

    def _point(self) -> tuple[int, float, float]:
        recent = 1 + self._recent_sum / len(self._recent)
        return self.tokens, round(1 + self._accepted / self._events, 3), round(recent, 3)

    def _write(self, step: Step, part: RequestStep) -> list[Piece]:
        if self._shown is None:
            self._shown, self._stream = part.request, self._tokenizer.decode_stream()
            self.request = part.request
            again = "\n\n" if self.pieces else ""
            given = again + printable(self._prompt(part.request))
            pieces: list[Piece] = (
                [(given, PROMPT, step.index, -1, -1, 0, part.request)] if given else []
            )
        elif part.request == self._shown:
            pieces = []
        else:
            return []
        for slot, (token, kind) in enumerate(zip(part.token_ids, part.kinds, strict=True)):
            text, stands = printable(self._stream.push(token)), 0
            if not text:
                name = self._tokenizer.token_text(token)
                text, stands = (_PART if name.startswith("\\x") else name), 1
            drafted = kind == "accepted"
            sure = part.confidences[slot] if drafted and slot < len(part.confidences) else -1.0
            pieces.append((text, _NUMBER[kind], step.index, slot if drafted else -1,
                           round(sure, 3), stands, part.request))  # fmt: skip
        if part.finished is not None:
            if rest := printable(self._stream.flush()):
                pieces.append((rest, _NUMBER["plain"], step.index, -1, -1, 0, part.request))
            self._shown = None
        return pieces

    # -- figures ----------------------------------------------------------------------------------

    def acceptance(self) -> Acceptance:
        """Of everything counted so far."""
        return self._tally.acceptance()

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over the time of the decode steps, the first one left out; None before that."""
        return over(self.timed_tokens, self.timed_seconds)

    def milliseconds(self) -> tuple[float, float, float] | None:
        """Mean of a decode step, of drafting and of verifying in it; None before the second."""
        if not self.timed_steps:
            return None
        times = (self.timed_seconds, self.draft_seconds, self.verify_seconds)
        whole, draft, verify = (1000 * t / self.timed_steps for t in times)
        return whole, draft, verify

    @property
    def text(self) -> str:
        """The last of the text, and the counts; the same on every run that has the same steps."""
        written = "".join(piece[0] for piece in self.pieces if not piece[5])
        return f"{written}\n-- {self.name}: {self.words()}"

    def words(self) -> str:
        """Counts and acceptance length in a line, no times."""
        each = ", ".join(f"{self.counts[kind]:,} {kind}" for kind in KINDS if self.counts[kind])
        counted = f"{plural(self.tokens, 'token')}: {each}" if each else "nothing written yet"
        if not self.slots:
            return counted
        return f"{counted}; {length_words(self.acceptance())}"

    def figures(self, first: Lane | None = None) -> dict[str, Any]:
        """What the page shows beside text and blocks: tiles as words, charts as numbers.

        ``first`` is the lane that plain decoding runs in, to compare with.
        """
        acceptance = self.acceptance()
        tiles = [*self._speed(), *self._ratio(first), *self._drafting(acceptance)]
        if not self.slots:
            return {"tiles": tiles}
        curves = {
            curve: [
                [_round(rate.value), _round(rate.low), _round(rate.high), rate.n]
                for rate in acceptance.rates(curve)
            ]
            for curve in ("survival", "conditional")
        }  # fmt: skip
        line = [*self._line, self._point()] if self._events else []
        return {
            "tiles": tiles,
            "events": acceptance.events,
            "histogram": list(acceptance.histogram),
            "line": line,
            **curves,
        }

    def _speed(self) -> list[list[str]]:
        speed, times = self.tokens_per_second, self.milliseconds()
        if speed is None or times is None:
            return [["tokens/s", "–", self.source], ["a step", "–", self.source]]
        whole, draft, verify = (f"{ms:.1f}" for ms in times)
        parts = f"draft {draft}, verify {verify}" if self.slots else "nothing is drafted"
        return [["tokens/s", f"{speed:,.0f}", self.source], ["a step", f"{whole} ms", parts]]

    def _ratio(self, first: Lane | None) -> list[list[str]]:
        if first is None or first is self:
            return []
        mine, other = self.tokens_per_second, first.tokens_per_second
        said = f"{mine / other:.2f} ×" if mine and other else "–"
        return [[f"× {first.name}", said, "same prompt, taking turns"]]

    def _drafting(self, acceptance: Acceptance) -> list[list[str]]:
        if not self.slots:
            return []
        length = acceptance.length_pooled
        rate = acceptance.rate_drafted
        counted = f"n = {plural(acceptance.events, 'draft event')}, at most {self.slots + 1}"
        fates = f"{acceptance.rejected:,} rejected, {acceptance.trimmed:,} trimmed"
        return [
            ["acceptance length", "undefined" if length is None else f"{length:.2f}",
             f"{counted}{health(acceptance)}"],
            ["drafts accepted", "undefined" if rate is None else f"{rate:.0%}",
             f"of {acceptance.drafted:,}: {fates}"],
            *self._missed(),
        ]  # fmt: skip

    def _missed(self) -> list[list[str]]:
        """At the refused slots: the selector's mistakes, beside those that no selector mends."""
        share = over(self.offered, self.refused)
        if share is None:
            return []
        slots = plural(self.refused, "refused slot")
        label = f"target's token among the {self._choice}{self._kept}"  # candidates of a slot
        return [[label, f"{share:.0%}", f"{self.offered:,} of {slots}"]]

    # -- blocks -----------------------------------------------------------------------------------

    def blocks(self, last: int) -> list[dict[str, Any]]:
        """The last draft events as the page draws them, oldest first; the newest with candidates.

        A request's part without drafts is shown as well: a block without slots.
        """
        found: list[dict[str, Any]] = []
        for step, anchors in zip(reversed(self.steps), reversed(self._anchors), strict=True):
            for part in reversed(step.requests):
                found.append(self._block(step, part, anchors, detail=not found))
                if len(found) == last:
                    return found[::-1]
        return found[::-1]

    def block(self, step: int, request: int) -> dict[str, Any] | None:
        """One block with its candidates, None if it is too long ago."""
        for other, anchors in zip(reversed(self.steps), reversed(self._anchors), strict=True):
            if other.index == step:
                for part in other.requests:
                    if part.request == request:
                        return self._block(other, part, anchors, detail=True)
        return None

    def _block(
        self, step: Step, part: RequestStep, anchors: dict[int, int], *, detail: bool
    ) -> dict[str, Any]:
        sure = part.confidences or (-1.0,) * len(part.drafted)
        own = bool(part.kinds) and part.kinds[-1] != "accepted"
        anchor = anchors[part.request]
        made = {
            "step": step.index,
            "request": part.request,
            "admitted": part.admitted,
            "accepted": part.accepted,
            "kept": len(part.token_ids),
            "slots": [
                [self._label(token), round(value, 3)]
                for token, value in zip(part.drafted, sure, strict=True)
            ],
            "kind": _NUMBER[part.kinds[-1]] if own else -1,
            "token": self._label(part.token_ids[-1]) if own else "",
            "anchor": self._label(anchor) if anchor >= 0 else "",
            "finished": part.finished or "",
        }
        if detail:
            made["candidates"] = [
                self._candidates(part, slot) for slot in range(len(part.candidates))
            ]
            if own and part.kinds[-1] == "corrected" and part.accepted < len(part.candidates):
                made["rank"] = self._rank(part)
        return made

    @property
    def _kept(self) -> str:
        return " kept" if self.source == "recorded" else ""

    def _rank(self, part: RequestStep) -> str:
        """Which candidate of the refused slot, by realized score, the target's token is."""
        ids, scores = part.candidates[part.accepted], part.scores[part.accepted]
        token = part.token_ids[-1]
        if token not in ids:
            return f"none of the {len(ids)} candidates{self._kept}"
        own = scores[ids.index(token)]
        place = 1 + sum(score > own for score in scores)
        return f"candidate {place} of {len(ids)}{self._kept}"

    def _label(self, token_id: int) -> str:
        found = self._labels.get(token_id)
        if found is None:
            if len(self._labels) == LAST_PIECES:
                self._labels.clear()
            found = self._labels[token_id] = label(self._tokenizer, token_id)
        return found

    def _candidates(self, part: RequestStep, slot: int) -> list[list[Any]]:
        """Best realized score first. In the last place is 1 for the one that was taken and 2 for
        the one that the target wrote instead; these are never left out."""
        ids, scores = part.candidates[slot], part.scores[slot]
        unary = part.unary[slot] if part.unary else ()
        order = sorted(range(len(ids)), key=lambda i: (-scores[i], i))
        taken = next((i for i in order if ids[i] == part.drafted[slot]), None)
        right = None
        if slot == part.accepted and part.kinds and part.kinds[-1] == "corrected":
            right = next((i for i in order if ids[i] == part.token_ids[-1]), None)
        named = {i for i in (taken, right) if i is not None}
        best: Sequence[int] = [i for i in order if i not in named][: _CANDIDATES - len(named)]
        some = [i for i in order if i in named or i in best]
        rows: list[list[Any]] = []
        for i in some:
            own = round(unary[i], 1) if unary else None
            name = self._label(ids[i])
            mark = 1 if i == taken else 2 if i == right else 0
            rows.append([name, own, round(scores[i], 1), mark])
        return rows


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
