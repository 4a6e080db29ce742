"""What a switchboard does, without a page: choose, try, compare, and let no kernel break anything.

Work that takes long runs in a thread of its own, one at a time, with progress and an end that can
be asked for. A variant that fails is taken out of what is selected, and why is kept.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.kernels import ledger, registry
from workbench.kernels.catalogue import BUILT_IN, LAYER_OPS, MODEL_OPS, REFERENCE
from workbench.kernels.check import Verdict, check
from workbench.kernels.registry import Rule, Selection
from workbench.kernels.requirements import Where
from workbench.kernels.tables import Resolved
from workbench.kernels.trial import trial
from workbench.model.swap import Comparison, compare

if TYPE_CHECKING:
    from workbench.model.beam import Beam

OPS = (*LAYER_OPS, *MODEL_OPS)
TRIAL_SECONDS = 60.0  # of one variant in its child, which imports torch first
STEP_SECONDS = 120.0  # of one pass of a comparison; interpreted kernels take seconds


class StoppedError(Exception):
    """Asked for: not an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a job is: ``done`` of ``of`` steps, and what it does now."""

    done: int = 0
    of: int = 1
    what: str = ""


class Job:
    """A task in a thread. ``ended`` is set when it is over or given up."""

    def __init__(self, task: Callable[[Job], None], *, silence: float | None = None) -> None:
        self.progress = Progress()
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.given_up = False
        self._silence, self._heard = silence, time.monotonic()
        self._stop = threading.Event()
        self._task = task
        self._thread = threading.Thread(target=self._run, daemon=True, name="workbench-kernels")

    def start(self) -> Job:
        """Begin."""
        self._heard = time.monotonic()
        self._thread.start()
        return self

    def tell(self, done: int, of: int, what: str) -> None:
        """Note progress; the place where a stop takes hold."""
        if self._stop.is_set():
            raise StoppedError
        self._heard = time.monotonic()
        self.progress = Progress(done=done, of=of, what=what)

    @property
    def stopping(self) -> bool:
        """Whether an end was asked for."""
        return self._stop.is_set()

    @property
    def silent(self) -> bool:
        """Whether it has said nothing for longer than it may."""
        quiet = time.monotonic() - self._heard
        return not self.ended.is_set() and self._silence is not None and quiet > self._silence

    def stop(self) -> None:
        """Ask for an end and return at once."""
        self._stop.set()

    def give_up(self) -> None:
        """Wait no more for a thread that does not return: nothing can end it."""
        self.given_up = True
        self._stop.set()
        self.ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it ended within ``timeout`` seconds."""
        return self.ended.wait(timeout)

    def _run(self) -> None:
        try:
            self._task(self)
        except StoppedError:
            pass
        except BaseException as error:  # a thread has nobody to raise to
            self.error = error
        finally:
            self.ended.set()


class Switch:
    """Selects kernels for one model, in the scope of the whole process (``kernels.select``).

    Attributes:
        problems: what went wrong with a variant of an operation, in a sentence.
        note: what the last action did, "" for nothing to say.
        comparison: the last comparison that ended.
        job: what runs, or ran last.
    """

    def __init__(self, beam: Beam, prompt: Sequence[int], *, new_tokens: int = 4) -> None:
        self.beam, self.prompt, self.new_tokens = beam, tuple(prompt), new_tokens
        self.problems: dict[tuple[str, str], str] = {}
        self.note = ""
        self.comparison: Comparison | None = None
        self.job: Job | None = None
        self._lock = threading.RLock()
        self.trial_seconds, self.step_seconds = TRIAL_SECONDS, STEP_SECONDS

    # -- what is selected -------------------------------------------------------------------------

    @property
    def where(self) -> Where:
        """What variants are asked about."""
        return Where.of(self.beam.device, self.beam.dtype, self.beam.shapes)

    @property
    def selection(self) -> Selection:
        """The rules of the process."""
        return registry.select()

    def rows(self) -> tuple[Resolved, ...]:
        """Requested, resolved and why, as the model would run now.

        A selection that cannot run here, made elsewhere, is taken out and said in ``note``.
        """
        try:
            return registry.resolve(self.beam.kinds, self.where, self.selection).rows
        except WorkbenchError as error:
            self.note = f"{error}; back to the reference"
            registry.reset()
            return registry.resolve(self.beam.kinds, self.where, ()).rows

    def current(self, layers: str) -> dict[str, str]:
        """The variant of every operation in ``layers``: the last rule that covers them."""
        found = dict.fromkeys(OPS, REFERENCE)
        for rule in self.selection:
            if rule.layers in ("all", layers) or rule.op in MODEL_OPS:
                found[rule.op] = rule.variant
        return found

    def apply(self, wanted: Mapping[str, str], layers: str = "all") -> Job | None:
        """Select ``wanted`` (operation to variant) in ``layers``; a job where one must be tried.

        A variant of the workbench is selected at once. One that a notebook registered and that has
        not passed a check here is tried in a process of its own first.
        """
        now = self.current(layers)
        changes = {op: name for op, name in wanted.items() if name != now[op]}
        self.note = ""
        untried = []
        for op, name in changes.items():
            self.problems = {key: why for key, why in self.problems.items() if key[0] != op}
            if self._vouched(op, name):
                self._select(op, name, layers)
            else:
                untried.append((op, name))
        if not untried:
            return None
        return self._start(lambda job: self._try(job, untried, then=layers))

    def reset(self) -> None:
        """The reference everywhere."""
        registry.reset()
        self.problems.clear()
        self.note = ""

    def _vouched(self, op: str, name: str) -> bool:
        if name in BUILT_IN[op]:
            return True
        known = ledger.verdict(op, name)
        return known is not None and known.passed

    def _select(self, op: str, name: str, layers: str) -> None:
        """One rule more, those that it hides left out; nothing changes where it cannot run."""
        with self._lock:
            before = self.selection
            pattern = layers if op in LAYER_OPS else "all"
            kept = tuple(
                rule
                for rule in before
                if rule.op != op or (pattern != "all" and rule.layers != pattern)
            )
            added = (Rule(op=op, variant=name, layers=pattern),)
            registry.reset(kept if name == REFERENCE and pattern == "all" else kept + added)
            try:
                registry.resolve(self.beam.kinds, self.where, self.selection)
            except Exception as error:  # importing a variant's module may raise anything
                registry.reset(before)
                self.problems[op, name] = _sentence(error)

    # -- jobs -------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a job runs."""
        return self.job is not None and not self.job.ended.is_set()

    def stop(self) -> None:
        """Ask the job to end."""
        if self.job is not None:
            self.job.stop()

    def check(self) -> Job | None:
        """Check every selected variant; a notebook's own each in a process of its own."""
        rows = self.rows()
        wanted = list(dict.fromkeys((r.op, r.resolved) for r in rows if r.resolved != REFERENCE))
        if not wanted:
            self.note = "nothing to check: all operations run the reference"
            return None
        return self._start(lambda job: self._try(job, wanted, then=None))

    def compare(self) -> Job:
        """Compare the reference (A) with what is selected (B) on the prompt."""
        return self._start(self._compare, silence=self.step_seconds)

    def watch(self) -> None:
        """Give up a job that has said nothing for too long, and deselect what it ran."""
        job = self.job
        if job is not None and job.silent:
            job.give_up()
            self._drop(
                self._suspects(), f"did not return within {self.step_seconds:g} s in the model"
            )

    def _start(self, task: Callable[[Job], None], silence: float | None = None) -> Job:
        if self.running:
            raise WorkbenchError("something is running already; stop it or wait for its end")
        self.note = ""
        self.job = Job(task, silence=silence).start()
        return self.job

    def _try(self, job: Job, wanted: Sequence[tuple[str, str]], then: str | None) -> None:
        """Check each; with ``then`` those that pass are selected in these layers."""
        for number, (op, name) in enumerate(wanted):
            start = f"{name} of {op}"
            job.tell(number, len(wanted), f"{start}: starting")

            def tell(words: str, number: int = number, start: str = start) -> None:
                job.tell(number, len(wanted), f"{start}: {words}")

            try:
                found = self._verdict(op, name, tell)
            except WorkbenchError as error:
                self._drop([(op, name)], str(error))
                continue
            if found.passed:
                self.problems.pop((op, name), None)
                if then is not None:
                    self._select(op, name, then)
            else:
                gate = f" by the gate “{found.gate}”" if found.gate else ""
                self._drop([(op, name)], f"{found.status}{gate}: {found.reason}")
        job.tell(len(wanted), len(wanted), "")

    def _verdict(self, op: str, name: str, tell: Callable[[str], None]) -> Verdict:
        """Of a check here for what the workbench brings, in a child for a notebook's own."""
        device = self.beam.device.type
        if name not in BUILT_IN[op]:
            found = trial(
                op, name, self.beam.shapes, tokens=(1, 7), device=device,
                seconds=self.trial_seconds, compile_for=(), on_progress=tell,
            )  # fmt: skip
            return found.verdict or Verdict(
                op=op, variant=name, status=found.status, gate=found.gate, reason=found.error
            )

        def told(done: int, of: int, label: str) -> None:
            tell(f"checking {done} of {of}" + (f": {label}" if label else ""))

        verdict = check(op, name, self.beam.shapes, tokens=(1, 7), device=device, on_case=told)
        ledger.note(verdict)
        return verdict

    def _compare(self, job: Job) -> None:
        chosen = self.selection
        try:
            found = compare(
                self.beam, (), chosen, self.prompt, new_tokens=self.new_tokens,
                on_progress=job.tell, stop=lambda: job.stopping,
            )  # fmt: skip
        except StoppedError:
            return
        except Exception as error:  # whatever a kernel raises
            if not job.given_up:
                self._drop(self._culprits(error), _sentence(error))
            return
        if found is None or job.given_up:
            return
        self.comparison = found
        if not isfinite(found.relative_error) or not isfinite(found.largest_difference):
            self._drop(self._suspects(), "the model's logits are not numbers with it")
        elif not found.passed:
            own = [key for key in self._suspects() if key[1] not in BUILT_IN[key[0]]]
            apart = found.against_exact or found.relative_error
            why = f"logits off by {apart:.1e} where {found.limit:.1e} is allowed"
            if apart <= found.limit:
                why = "greedy tokens differ where logits within the limit could not turn them over"
                if found.decided:
                    why = (
                        f"logits off by more than ten times {found.limit:.1e} at {found.far} of "
                        f"{found.positions} positions"
                    )
            self._drop(own, f"refused in the model: {why}")
            if not own:
                self.note = why

    def _suspects(self) -> list[tuple[str, str]]:
        """What is selected and not the reference; where a notebook's own are among it, those."""
        every = list(
            dict.fromkeys((r.op, r.resolved) for r in self.rows() if r.resolved != REFERENCE)
        )
        own = [(op, name) for op, name in every if name not in BUILT_IN[op]]
        return own or every

    def _culprits(self, error: BaseException) -> list[tuple[str, str]]:
        """The variants whose function the error passed through; else all suspects."""
        codes = {id(frame.f_code) for frame, _ in traceback.walk_tb(error.__traceback__)}
        found = []
        for op, name in dict.fromkeys((r.op, r.resolved) for r in self.rows()):
            function: Any = registry.function(op, name)
            code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
            if name != REFERENCE and id(code) in codes:
                found.append((op, name))
        return found or self._suspects()

    def _drop(self, which: Sequence[tuple[str, str]], why: str) -> None:
        for op, name in which:
            self.problems[op, name] = why
            registry.deselect(op, name)


def _sentence(error: BaseException) -> str:
    if isinstance(error, WorkbenchError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
