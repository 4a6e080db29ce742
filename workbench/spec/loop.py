"""The loop behind :func:`workbench.spec.decode.decode`: prefill, draft, verify, for a batch.

A step drafts behind the tokens that are there, runs the target once over each sequence's last token
and its admitted drafts, and keeps what the target itself would have written. Then the caches are
set back to the kept tokens, and the drafter's context grows by the verified rows.

A sequence's place among those that decode is its slot in both caches; when one ends, the last takes
its slot. Nothing is drawn here, and between steps nothing is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat
from threading import RLock
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from workbench.errors import DraftError, PromptError, WorkbenchError
from workbench.model.beam import Beam
from workbench.model.generate import Cancel, Generation
from workbench.model.prompts import One, prompt_ids
from workbench.model.sampling import Sampling
from workbench.spec.asked import check_room, check_whole
from workbench.spec.deciding import Decided, Decider
from workbench.spec.draft_cache import DraftCache
from workbench.spec.drafter import Drafter
from workbench.spec.selector import Proposal, propose
from workbench.spec.sequences import Running
from workbench.spec.step import Kind, RequestStep, Step
from workbench.spec.verify import Sparse, Verdict, verify_block, verify_greedy, verify_standard

Method = Literal["standard", "block"]
Proposals = Literal["greedy", "probabilistic"]
MOST_DRAFTS = 63  # draft tokens a step
_ACCEPTED: Kind = "accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run of the loop was asked for; :func:`decode` explains each."""

    max_new_tokens: int
    speculative_tokens: int
    sampling: Sampling
    method: Method
    proposals: Proposals
    prefill_chunk: int
    detail: bool

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("prefill_chunk", self.prefill_chunk, 1)
        check_whole("speculative_tokens", self.speculative_tokens, 0, MOST_DRAFTS)
        for name, known in (("method", Method), ("proposals", Proposals)):
            value, words = getattr(self, name), get_args(known)
            if value not in words:
                raise DraftError(
                    f"{name} must be {' or '.join(map(repr, words))}, not {value!r:.60}"
                )


class Decoding(Iterator[Step]):
    """Steps of one run, made by :func:`decode`; figures are up to date after each.

    Attributes:
        settings: what was asked for.
        decider: the policy and its estimator, None where all drafts are verified.
        steps: decode steps so far.
        tokens: tokens given by decode steps so far, all sequences together.
    """

    def __init__(
        self,
        beam: Beam,
        drafter: Drafter | None,
        settings: Settings,
        slots: int,
        eos: int | None,
        cancel: Cancel | None,
        decider: Decider | None = None,
    ) -> None:
        self.beam, self.drafter, self.settings = beam, drafter, settings
        self.decider = decider
        self.steps = self.tokens = 0
        self._eos, self._cancel = eos, cancel
        self._slots, self._index, self._closed = slots, 0, False
        self._lock = RLock()  # held within a step: another thread's next, join or close waits
        self._next = 0  # the next request's number
        self._waiting: deque[Running] = deque()
        self._alive: list[Running] = []  # a sequence's place here is its slot
        self._all: dict[int, Running] = {}
        rollback = max(16, settings.speculative_tokens + 1)
        self._cache = beam.new_cache(slots, rollback)
        self._drafts: DraftCache | None = None
        if drafter is not None:
            self._drafts = DraftCache(drafter, slots, 1 + settings.speculative_tokens)

    def __next__(self) -> Step:
        with self._lock:
            return self._advance()

    def _advance(self) -> Step:
        if self._cancel is not None and self._cancel.is_set():
            self.close()  # an event that is cleared again does not revive the run
        if self._closed:
            raise StopIteration
        try:
            while self._waiting and len(self._alive) < self._slots:
                step = self._prefill()
                if step is None:  # cancelled between two chunks
                    raise StopIteration
                return step
            if not self._alive:
                raise StopIteration
            return self._decode()
        except StopIteration:
            raise
        except BaseException:
            # The caches may be half written. What was decoded stays; the run is over.
            self.close()
            raise

    def close(self) -> None:
        """End here and let go of the caches; :attr:`generations` stays."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._alive.clear()
            self._cache, self._drafts = self.beam.new_cache(1), None  # nothing, in place of much

    def join(
        self, prompt: One, *, max_new_tokens: int | None = None, seed: int | None = None
    ) -> int:
        """Add a sequence between two steps; its request number. It waits while no slot is free.

        ``max_new_tokens`` and ``seed`` are the run's where they are None.

        Raises:
            PromptError: the prompt cannot be decoded from.
            DraftError: the run was closed, or the drafter's context is too short for it.
        """
        if self._closed:
            raise DraftError("this run has ended; start another with decode(...)")
        most = self.settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_whole("max_new_tokens", most, 1)
        ids = prompt_ids(self.beam, prompt)
        if len(ids) != 1:
            raise PromptError(f"join takes one prompt, not {len(ids)}; join each on its own")
        with self._lock:
            return self._join(ids[0], most, seed)

    def leave(self, request: int) -> None:
        """Take a sequence out between two steps; what it has stays in :attr:`generations`.

        Raises:
            DraftError: there is no such request, or it has ended.
        """
        with self._lock:
            running = self._found(request)
            if running is not None and running in self._waiting:
                self._waiting.remove(running)
            elif running is not None and running in self._alive:
                self._remove(self._alive.index(running))
            else:
                raise DraftError(f"request {request} is not decoding; it has ended or never joined")

    def forget(self, request: int) -> None:
        """Drop an ended sequence's tokens, so that a run without an end does not grow.

        Raises:
            DraftError: there is no such request, or it is still decoding.
        """
        with self._lock:
            running = self._found(request)
            if running is None or running in self._alive or running in self._waiting:
                raise DraftError(f"request {request} is decoding, or never joined")
            del self._all[request]

    @property
    def requests(self) -> tuple[int, ...]:
        """Numbers of the sequences that decode or wait."""
        return tuple(r.request for r in (*self._alive, *self._waiting))

    @property
    def generations(self) -> dict[int, Generation]:
        """What each sequence has so far, by request."""
        return {number: running.generation for number, running in self._all.items()}

    @property
    def context_used(self) -> dict[int, int]:
        """Tokens of each sequence so far, prompt included."""
        return {number: running.position for number, running in self._all.items()}

    # -- one step -------------------------------------------------------------------------------

    def _join(self, ids: list[int], most: int, seed: int | None) -> int:
        sampling = self.settings.sampling
        if seed is not None:
            sampling = replace(sampling, seed=seed)
        running = Running.of(self.beam, self._next, ids, most, sampling)
        if self.drafter is not None:
            check_room(self.drafter, len(ids), running.room)
        number, self._next = self._next, self._next + 1
        self._all[number] = running
        self._waiting.append(running)
        return number

    def _found(self, request: object) -> Running | None:
        whole = isinstance(request, int) and not isinstance(request, bool)
        return self._all.get(request) if whole else None  # type: ignore[call-overload]

    def _prefill(self) -> Step | None:
        """The prompts that are next, and the first token of each.

        Short ones go together in one pass; a long one alone, in chunks.
        """
        start = perf_counter()
        chunk, drafting = self.settings.prefill_chunk, 0.0
        group = self._next_group()
        slots = list(range(len(self._alive), len(self._alive) + len(group)))
        for slot in slots:
            self._release(slot)
        with torch.inference_mode():
            # Room for all that may come, at once: a cache that grows is copied each time.
            self._cache.reserve(max(len(r.prompt) + r.room for r in group))
            ends: list[int] = []  # of the rows that give each prompt's first token
            hidden: Tensor | None = None
            for first in range(0, max(len(r.prompt) for r in group), chunk):
                if first and self._cancel is not None and self._cancel.is_set():
                    return None
                parts = [r.prompt[first : first + chunk] for r in group]
                counts = [len(part) for part in parts]
                ids = torch.tensor(list(chain.from_iterable(parts)), device=self.beam.device)
                hidden, streams = self._extend(ids, counts, slots)
                drafting += self._write_context(streams, counts, slots, counts)
                ends = [end - 1 for end in accumulate(counts)]
            assert hidden is not None  # for the type checker: prompts are never empty
            logits = self._logits(hidden[torch.tensor(ends, device=hidden.device)])
            picked = self.settings.sampling.pick(logits, [r.generator for r in group]).tolist()
        parts_of = []
        for running, token in zip(group, picked, strict=True):
            position = running.position
            kept, kinds = running.take(self.beam, [token], ["first"], self._eos)
            self._waiting.popleft()
            self._alive.append(running)
            parts_of.append(
                RequestStep(
                    request=running.request,
                    position=position,
                    token_ids=kept,
                    kinds=kinds,
                    finished=running.finish,
                )
            )
        seconds = perf_counter() - start
        for running in group:
            running.prefill_seconds = seconds
        for slot in reversed(slots):
            if self._alive[slot].finish is not None:
                self._remove(slot)
        rows = sum(len(r.prompt) for r in group)
        return self._step("prefill", rows, drafting, seconds - drafting, 0.0, seconds, parts_of)

    def _next_group(self) -> list[Running]:
        """Waiting sequences whose prompts fit into one pass together; at least the first."""
        room = self._slots - len(self._alive)
        group: list[Running] = []
        tokens = 0
        for running in self._waiting:
            tokens += len(running.prompt)
            if group and (tokens > self.settings.prefill_chunk or len(group) == room):
                break
            group.append(running)
        return group

    def _decode(self) -> Step:
        start = perf_counter()
        alive, slots = list(self._alive), list(range(len(self._alive)))
        admitted = [0] * len(alive)
        room = admitted
        proposal: Proposal | None = None
        decided: Decided | None = None
        if self._drafts is not None and any(running.left > 1 for running in alive):
            # What a sequence has no room for is never verified: its last token needs no draft.
            n = self.settings.speculative_tokens
            admitted = room = [min(n, running.left - 1) for running in alive]
            proposal = self._propose(alive, slots)
        drafted = perf_counter()
        if self.decider is not None and proposal is not None:
            decided = self.decider.rest(room)
            if decided is None:
                scores = proposal.scores.float().cpu().numpy()
                heat = min(self.settings.sampling.temperature, torch.finfo(torch.float32).max)
                decided = self.decider.decide([r.request for r in alive], room, scores, heat)
            admitted = decided.decision.admitted.tolist()
        deciding = perf_counter()
        with torch.inference_mode():
            verdict, streams = self._verify(alive, slots, proposal, admitted)
            accepted, tokens = verdict.accepted.tolist(), verdict.token.tolist()
            lists = _Lists.of(proposal, self.settings)
        verified = perf_counter()
        if self.decider is not None and decided is not None:
            self.decider.learn(accepted, admitted)
        learned = perf_counter()
        for slot, (running, kept) in enumerate(zip(alive, accepted, strict=True)):
            self._cache.truncate(slot, running.position + kept)
        parts = []
        for row, running in enumerate(alive):
            verdict_of = (admitted[row], accepted[row], tokens[row])
            parts.append(self._give(running, row, room[row] > 0, verdict_of, lists, decided))
        counts = [a + 1 for a in admitted]
        # A sequence that ends needs no context: none of its rows is kept.
        keep = [0 if r.finish else a + 1 for r, a in zip(alive, accepted, strict=True)]
        writing = self._write_context(streams, counts, slots, keep)
        for slot in reversed(slots):
            if alive[slot].finish is not None:
                self._remove(slot)
        seconds = perf_counter() - start
        for running, part in zip(alive, parts, strict=True):
            running.count(len(part.token_ids), seconds, timed=self.steps > 0)
        self.steps += 1
        drafting = (drafted - start if proposal is not None else 0.0) + writing
        policy = deciding - drafted + learned - verified if decided else 0.0
        if self.decider is not None and decided is not None:
            self.decider.spent(policy, seconds)
        times = (drafting, verified - deciding, policy)
        return self._step("decode", sum(counts), *times, seconds, parts, decided)

    @torch.inference_mode()
    def _propose(self, alive: list[Running], slots: list[int]) -> Proposal:
        assert self.drafter is not None  # for the type checker: only called with one
        assert self._drafts is not None
        asked = self.settings
        sampled = asked.proposals == "probabilistic" and not asked.sampling.greedy
        return propose(
            self.drafter,
            self._drafts,
            torch.tensor([r.anchor for r in alive], device=self.beam.device),
            slots,
            asked.speculative_tokens,
            temperature=asked.sampling.temperature,
            generators=[r.draft_generator for r in alive] if sampled else None,
        )

    def _verify(
        self,
        alive: list[Running],
        slots: list[int],
        proposal: Proposal | None,
        admitted: list[int],
    ) -> tuple[Verdict, Tensor | None]:
        """Run the target over anchors and admitted drafts, and judge."""
        device, asked = self.beam.device, self.settings
        anchors = torch.tensor([[r.anchor] for r in alive], device=device)
        counts = [a + 1 for a in admitted]
        width = asked.speculative_tokens + 1 if proposal is not None else 1
        rows = anchors if proposal is None else torch.cat((anchors, proposal.token_ids), 1)
        whole = min(counts) == width
        place = None if whole else _places(counts, width, device)
        ids = rows.flatten() if place is None else rows.flatten()[place]
        hidden, streams = self._extend(ids, counts, slots)
        logits = self._logits(hidden)
        if proposal is None and not asked.sampling.greedy:
            token = asked.sampling.pick(logits, [r.generator for r in alive])
            return Verdict(accepted=torch.zeros_like(token), token=token), streams
        limits = torch.tensor(admitted, device=device)
        drafts = rows[:, 1:]
        if asked.sampling.greedy:
            return verify_greedy(_blocks(logits, place, len(alive), width), drafts, limits), streams
        p = _blocks(asked.sampling.probabilities(logits), place, len(alive), width)
        # Without drafts one number, as plain decoding takes: a sequence draws the same numbers
        # whatever is decoded beside it.
        uniform = torch.zeros(len(alive), width + 1, dtype=torch.float64)
        for row, running in enumerate(alive):
            taken = width + 1 if admitted[row] else 1
            uniform[row, -taken:] = torch.rand(
                taken, generator=running.generator, dtype=torch.float64
            )
        uniform = uniform.to(device)
        q = None
        if asked.proposals == "probabilistic" and proposal is not None:
            q = Sparse(
                ids=proposal.candidates,
                probabilities=proposal.probabilities(asked.sampling.temperature),
            )
        verify = verify_block if asked.method == "block" else verify_standard
        return verify(p, drafts, limits, uniform[:, :width], uniform[:, width], q), streams

    def _extend(
        self, ids: Tensor, counts: list[int], slots: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states, and the streams that the drafter reads, ``[N, taps * H]``."""
        if self.drafter is None:
            return self.beam.extend(self._cache, ids, counts, slots), None
        taps: dict[int, Tensor] = dict.fromkeys(self.drafter.taps, ids)
        hidden = self.beam.extend(self._cache, ids, counts, slots, taps)
        return hidden, torch.cat([taps[layer] for layer in self.drafter.taps], -1)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.beam.logits(hidden)
        if not bool(logits.sum(-1).isfinite().all()):
            raise WorkbenchError(
                f"the logits of {self.beam.name} are not finite; check the weights and any "
                "intervention"
            )
        return logits

    def _write_context(
        self, streams: Tensor | None, counts: list[int], slots: list[int], keep: list[int]
    ) -> float:
        """Give the drafter the verified rows; the seconds it took."""
        if self._drafts is None or streams is None:
            return 0.0
        start = perf_counter()
        with torch.inference_mode():
            self._drafts.write(streams, counts, slots, keep)
        return perf_counter() - start

    def _give(
        self,
        running: Running,
        row: int,
        drafting: bool,
        verdict: tuple[int, int, int],
        lists: _Lists,
        decided: Decided | None,
    ) -> RequestStep:
        """Hand a sequence its tokens, and say what happened: admitted, accepted, the next token."""
        position, (admitted, accepted, token) = running.position, verdict
        last: Kind = "plain" if not admitted else "corrected"
        if admitted and accepted == admitted:
            last = "bonus"
        kinds: list[Kind] = [*repeat(_ACCEPTED, accepted), last]
        drafts = lists.tokens[row] if drafting else []
        kept, kinds_kept = running.take(self.beam, [*drafts[:accepted], token], kinds, self._eos)
        none: tuple[()] = ()
        told = drafting and decided is not None and len(decided.live) > row
        return RequestStep(
            request=running.request,
            position=position,
            drafted=tuple(drafts),
            confidences=tuple(lists.confidences[row]) if drafting else none,
            expected=tuple(decided.live[row].tolist()) if told and decided else none,
            stale=tuple(decided.stale[row].tolist()) if told and decided else none,
            admitted=admitted,
            accepted=accepted,
            token_ids=kept,
            kinds=kinds_kept,
            finished=running.finish,
            candidates=lists.candidates[row] if drafting and lists.candidates else none,
            unary=lists.unary[row] if drafting and lists.unary else none,
            scores=lists.scores[row] if drafting and lists.scores else none,
        )

    def _step(
        self,
        phase: Literal["prefill", "decode"],
        rows: int,
        drafting: float,
        verifying: float,
        deciding: float,
        seconds: float,
        parts: list[RequestStep],
        decided: Decided | None = None,
    ) -> Step:
        decision = None if decided is None else decided.decision
        step = Step(
            index=self._index,
            phase=phase,
            rows=rows,
            draft_seconds=drafting,
            verify_seconds=verifying,
            decide_seconds=deciding,
            seconds=seconds,
            policy=self.decider.name if self.decider is not None and decision else "",
            reason=decision.reason if decision else "",
            objective=tuple(decision.objective.tolist()) if decision else (),
            requests=tuple(parts),
        )
        self._index += 1
        if phase == "decode":
            self.tokens += step.tokens
        return step

    def _remove(self, slot: int) -> None:
        """Free a slot; the last sequence takes it, so that slots stay neighbours."""
        last = len(self._alive) - 1
        self._release(slot)
        self._cache.move(last, slot)
        if self._drafts is not None:
            self._drafts.move(last, slot)
        self._alive[slot] = self._alive[last]
        self._alive.pop()

    def _release(self, slot: int) -> None:
        self._cache.truncate(slot, 0)
        if self._drafts is not None:
            self._drafts.release(slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lists:
    """A proposal's values on the host, by request."""

    tokens: list[list[int]]
    confidences: list[list[float]]
    candidates: list[tuple[tuple[int, ...], ...]]
    unary: list[tuple[tuple[float, ...], ...]]
    scores: list[tuple[tuple[float, ...], ...]]

    @classmethod
    def of(cls, proposal: Proposal | None, settings: Settings) -> _Lists:
        if proposal is None:
            return cls(tokens=[], confidences=[], candidates=[], unary=[], scores=[])
        detail = settings.detail
        return cls(
            tokens=proposal.token_ids.tolist(),
            confidences=proposal.confidences(settings.sampling.temperature).tolist(),
            candidates=_nested(proposal.candidates) if detail else [],
            unary=_nested(proposal.unary) if detail else [],
            scores=_nested(proposal.scores) if detail else [],
        )


def _nested(values: Tensor) -> list[tuple[tuple[Any, ...], ...]]:
    return [tuple(tuple(slot) for slot in request) for request in values.tolist()]


def _places(counts: list[int], width: int, device: torch.device) -> Tensor:
    """Where the rows of a ragged batch lie in its padded ``[batch, width]``."""
    return torch.tensor(
        [b * width + i for b, rows in enumerate(counts) for i in range(rows)], device=device
    )


def _blocks(rows: Tensor, place: Tensor | None, batch: int, width: int) -> Tensor:
    """Flat rows ``[n, V]`` -> padded ``[batch, width, V]``; the padding is zero."""
    if place is not None:
        rows = rows.new_zeros(batch * width, rows.shape[1]).index_copy_(0, place, rows)
    return rows.unflatten(0, (batch, width))
