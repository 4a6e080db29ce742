"""``Probe``: what is noted where in a pass of the engine (``passes.py`` says what belongs to it).

    execute_model          begin
      get_num_tokens       budget, stale confidences
      reallocate_drafts    the admitted counts are in the manager's buffer
      (the forward)
    sample_tokens          copies begin; then the engine samples,
      estimator.step         the verdict is there; the estimator may have learned
      (drafting)           and the pass is noted; those before it are handed on, now and then

Everything runs in the thread that runs the engine, and nothing waits: tensors are copied behind
the engine's own work and read once an event says so. Passes are handed on at the end of one: all
of its work is on the device by then, and the engine is about to wait for some of it.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from time import perf_counter
from typing import Any

from workbench.serving.probe import log
from workbench.serving.probe.feed import PATIENCE, Feed, Words
from workbench.serving.probe.frames import pack
from workbench.serving.probe.passes import End, Pass, Texts
from workbench.serving.probe.said import costs, curves_of, header
from workbench.serving.probe.slots import Slot, make_slots
from workbench.serving.probe.wrapping import Wrapped

WARM_UP = ("_warmup_", "_v2_mixed_warmup")  # how the engine names its own requests
PERIOD = 0.05  # seconds between two times that passes are handed on: each wakes a thread


class Probe:
    """The probe of one process.

    Attributes:
        on: whether passes are noted.
        why_off: why not and never again, "" while it can be on.
        dropped: passes that were lost because the writer was behind.
        passes: begun in all, those that were lost included.
    """

    def __init__(self, destination: str, version: str) -> None:
        """Nothing is wrapped and no file opened yet.

        Args:
            destination: as in ``BEAM_PROBE``.
            version: of vLLM.
        """
        self.destination, self.version = destination, version
        self.on, self.why_off = False, ""
        self.dropped = self.passes = 0
        self._wrapped: list[Wrapped] = []
        self._feed: Feed | None = None
        self._free: deque[Slot] = deque()
        self._pending: deque[Pass] = deque()
        self._many = 1  # passes that are not left to wait for the period's end
        self._handed = 0.0  # when passes were last handed on, in seconds since the probe began
        self._texts = Texts()  # of the feed's thread
        self._now: Pass | None = None
        self._clock = self._began = 0.0
        self._lock = threading.Lock()
        self._states: Any = None  # the engine's requests
        self._stream: Any = None  # the one that the engine knows as its own
        self._costs: Words | None = None
        self._ends: tuple[End, ...] = ()  # of new requests, not yet said
        self._headed = False
        self._learned = 0  # calls of the estimator's step
        self._fit_due = True

    # -- on and off ------------------------------------------------------------------------------

    def install(self, runner: type, manager: type, estimator: type) -> None:
        """Wrap the engine's classes."""
        self._wrapped = [
            Wrapped(runner, "execute_model", self, before=self._begin),
            Wrapped(manager, "get_num_tokens", self, self._tick, self._weighed),
            Wrapped(manager, "reallocate_drafts", self, self._tick, self._allocated),
            Wrapped(runner, "sample_tokens", self, self._before_sampling, self._sampled),
            Wrapped(estimator, "step", self, after=self._has_learned),
            Wrapped(manager, "set_cost_curves", self, after=self._priced),
        ]
        self.resume()

    def resume(self) -> None:
        """Note passes, from the next one on; nothing after a failure.

        What went by meanwhile is unknown: ends of requests that came, steps of the estimator.
        """
        if not self.why_off:
            for each in self._wrapped:
                each.put()
            self._fit_due = True  # the estimator may have learned meanwhile
            self.on = True

    def pause(self) -> None:
        """Note nothing until :meth:`resume`: the engine's methods are its own again."""
        self.on = False
        for each in self._wrapped:
            each.take()
        if self._now is not None:
            self._lose(self._now)
            self._now = None

    def fail(self, where: str, error: Exception) -> None:
        """An error in a hook: off, for good, with one line."""
        self.off(f"{where}: {type(error).__name__}: {error}")

    def off(self, why: str, *, quiet: bool = False) -> None:
        """Off for good; the engine's methods are its own again. May be called from any thread."""
        with self._lock:  # the feed may fail at the same time as a hook
            if self.why_off:
                return
            self.why_off = why or "no reason given"
        self.on = False
        for each in self._wrapped:
            each.take()
        if self._feed is not None:
            self._feed.close(lambda: _end(self.why_off, self.dropped))
        if not quiet:
            log.warning("probe off: %s", " ".join(why.split())[:400])

    def close(self) -> None:
        """The engine's process ends: hand on what has arrived, and say that this is the end."""
        if self._feed is None or self.why_off:
            return
        self.on = False
        try:
            self._hand_on()
        except Exception as error:  # the device may be gone
            log.debug("probe: the last passes are lost: %s", error)
        self._feed.close(lambda: _end("the engine ended", self.dropped), PATIENCE)
        with self._lock:  # what becomes of the writer now is nobody's concern
            self.why_off = self.why_off or "the engine ended"

    # -- hooks -----------------------------------------------------------------------------------

    def _priced(self, manager: Any, args: Any, named: Any, _: Any) -> None:
        """At start-up, outside of any pass: the time to allocate what is needed."""
        if not _first_rank():
            self.off("not the first rank", quiet=True)
            return
        self._costs = costs(manager, *_curves(args, named))
        self._prepare(manager.req_states)
        if self._headed:  # priced anew
            assert self._feed is not None  # for the type checker
            self._feed.say(self._costs)

    def _begin(self, runner: Any, args: Any, named: Any) -> None:
        scheduled = args[0] if args else named["scheduler_output"]
        if named.get("dummy_run") or (len(args) > 2 and args[2]):
            return
        if not scheduled.total_num_scheduled_tokens:  # the last request has ended
            self._hand_on()
            return
        if next(iter(scheduled.num_scheduled_tokens), "").startswith(WARM_UP):  # nobody asked
            return
        if not self._headed:
            self._head(runner)
            if not self.on:
                return
        if runner.req_states is not self._states:
            raise RuntimeError("a second engine runs in this process; a recording has one")
        if new := scheduled.scheduled_new_reqs:
            self._ends += tuple(end for each in new if (end := _end_of(each)) is not None)
        number, self.passes = self.passes, self.passes + 1
        slot = self._slot() if self._now is not None or not self._free else self._free.popleft()
        if slot is None:
            return
        if self._stream is None:  # not before the engine has looked, and asked until then
            self._stream = vars(runner).get("main_stream")
        at = perf_counter() - self._began
        self._now = Pass(number, at, slot, self.dropped, self._ends)
        self._ends = ()
        slot.mark(0, self._stream)

    def _tick(self, *_: Any) -> None:
        self._clock = perf_counter()

    def _weighed(self, manager: Any, *_: Any) -> None:
        if (now := self._now) is None:
            return
        now.decide_seconds += perf_counter() - self._clock
        if self._costs is None:  # made before the hooks were put
            self._costs = costs(manager, *curves_of(manager))
            assert self._feed is not None  # for the type checker
            self._feed.say(self._costs)
        now.budget = manager._batch_budget[2]
        now.stale = manager._stale_confidences[manager._stale_idx].np.copy()

    def _allocated(self, *_: Any) -> None:
        if (now := self._now) is not None:
            now.decide_seconds += perf_counter() - self._clock
            now.allocated = True

    def _before_sampling(self, runner: Any, *_: Any) -> None:
        now, state = self._now, runner.execute_model_state
        if now is None or state is None:
            return
        batch = state.input_batch
        now.rows, now.tokens = batch.idx_mapping_np, batch.num_tokens
        now.drafted, now.scheduled = batch.num_draft_tokens_per_req, batch.num_scheduled_tokens
        now.computed, now.prompt = batch.num_computed_tokens_np, batch.prefill_len_np
        now.prefilling, now.names = batch.is_prefilling_np, batch.req_ids
        states, manager = runner.req_states, runner.adaptive_verification
        live = admitted = None
        if manager is not None and now.allocated:
            live, admitted = manager._confidence_probs, manager._batch_draft_capacity
            rows = manager._max_total_logits - len(now.names) * manager.num_bonus_tokens
            now.most_drafts = rows if rows > 0 else 0
        now.slot.copy(live, states.draft_tokens, states.total_len.gpu, admitted)

    def _has_learned(self, estimator: Any, *_: Any) -> None:
        self._learned += 1
        if estimator._steps_since_refit == 0:
            self._fit_due = True
        if (now := self._now) is None:
            return
        now.slot.mark(1)
        if self._fit_due:
            now.slot.copy_fit(estimator.slope, estimator.intercepts)
            now.fitted, self._fit_due = self._learned, False

    def _sampled(self, runner: Any, args: Any, named: Any, output: Any) -> None:
        now, self._now = self._now, None
        if now is None:
            return
        if now.names is None or output is None:  # the pass failed in the engine
            self._lose(now)
            return
        if not hasattr(output, "copy_event"):
            raise TypeError(
                f"sample_tokens gave {type(output).__name__}, which holds no sampled tokens: "
                "pipeline parallelism is not supported"
            )
        now.ids, now.sampled = output.sampled_token_ids, output.num_sampled_tokens_np
        now.copied = output.copy_event
        now.slot.mark(2)
        self._pending.append(now)
        at = perf_counter() - self._began
        if at - self._handed >= PERIOD or len(self._pending) > self._many:
            self._handed = at
            self._hand_on(keep=1)

    # -- what happens to a pass ------------------------------------------------------------------

    def _slot(self) -> Slot | None:
        """Room for the next pass; the oldest one that waits is dropped for it."""
        if self._now is not None:  # begun and never sampled: its room is free
            self._lose(self._now)
            self._now = None
        if not self._free and self._feed is not None:
            lost = self._feed.drop_oldest()
            if isinstance(lost, _Sent):
                self._ends = lost.noted.ends + self._ends
                self.dropped += 1
        if not self._free:
            self.dropped += 1
            return None
        return self._free.popleft()

    def _hand_on(self, keep: int = 0) -> None:
        """What has arrived; the last ``keep`` passes are not even asked, which costs a call."""
        pending, arrived = self._pending, []
        try:
            while len(pending) > keep and pending[0].done():
                arrived.append(_Sent(self, pending.popleft()))
        finally:  # also where the device is gone: what had arrived before is whole
            if arrived:
                assert self._feed is not None  # for the type checker: a pass has a slot by then
                self._feed.put(arrived)

    def _lose(self, lost: Pass) -> None:
        """A pass that is not sent; what it would have said of new requests the next one says."""
        self._ends = lost.ends + self._ends
        self._let_go(lost.slot)

    def _let_go(self, slot: Slot) -> None:
        slot.reset()
        self._free.append(slot)

    # -- beginning -------------------------------------------------------------------------------

    def _prepare(self, states: Any) -> None:
        """Memory and writer; once."""
        if self._feed is not None:
            return
        rows, drafts = int(states.max_num_reqs), int(states.num_speculative_steps)
        self._states = states
        self._free.extend(make_slots(rows, drafts, states.draft_tokens.device))
        self._many = max(1, len(self._free) // 4)
        self._feed = Feed(self.destination, self.off)
        self._began = perf_counter()
        atexit.register(self.close)

    def _head(self, runner: Any) -> None:
        """The header, once the runner is known that has the configuration."""
        if not _first_rank():
            self.off("not the first rank", quiet=True)
            return
        self._prepare(runner.req_states)
        assert self._feed is not None  # for the type checker
        self._feed.say(lambda: pack({"what": "header", "header": header(runner, self.version)}))
        if self._costs is not None:
            self._feed.say(self._costs)
        self._headed = True
        log.info("probe on: recording to %s", self.destination)


class _Sent:
    """A pass in the feed's queue."""

    __slots__ = ("_probe", "noted")

    def __init__(self, probe: Probe, done: Pass) -> None:
        self._probe, self.noted = probe, done

    def data(self) -> bytes:
        return self.noted.frame(self.noted.slot.seconds(), self._probe._texts)

    def release(self) -> None:
        self._probe._let_go(self.noted.slot)


def _end(reason: str, dropped: int) -> bytes:
    return pack({"what": "end", "reason": reason, "dropped": dropped})


def _end_of(request: Any) -> End | None:
    """A new request's name, the length it ends at and the tokens it ends with; None: not said."""
    asked = getattr(request, "sampling_params", None)
    if asked is None:
        return None
    prompt, most = request.prompt_token_ids, asked.max_tokens
    stops = {*(asked.stop_token_ids or ()), asked.eos_token_id} - {None}
    length = None if prompt is None or most is None else len(prompt) + int(most)
    return request.req_id, length, sorted(int(token) for token in stops)


def _first_rank() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _curves(args: Any, named: Any) -> tuple[Any, Any]:
    both = (*args, *(named[name] for name in ("draft_curve", "verify_curve") if name in named))
    return both[0], both[1]
