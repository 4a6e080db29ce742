"""Adaptive verification as it happens: what is verified, why, and what it comes to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from math import isfinite
from time import monotonic
from typing import TYPE_CHECKING, Any

from workbench.errors import DraftError, PromptError, WorkbenchError
from workbench.model.sampling import Sampling
from workbench.spec.acceptance import REFIT_STEPS, Estimator
from workbench.spec.adaptive import Adaptive as AdaptivePolicy
from workbench.spec.adaptive import Fixed, NoDrafts, Policy
from workbench.spec.asked import check_pair
from workbench.spec.cost_table import CostTable
from workbench.spec.decode import MOST_SLOTS, decode
from workbench.spec.loop import MOST_DRAFTS
from workbench.spec.profile import profile
from workbench.views import theme
from workbench.views.adaptive_page import AdaptivePage, serving, settings_words
from workbench.views.adaptive_watch import Watch
from workbench.views.drafting_run import Run, Source

if TYPE_CHECKING:
    from workbench.model.beam import Beam
    from workbench.spec.drafter import Drafter
    from workbench.spec.step import Step

POLICIES = ("adaptive", "fixed", "none")
IN_TURN = " and fixed in turn"
_TURN, _TURN_STEPS = 1.0, 4  # s and steps that a turn takes at least
_TOLD = 0.2  # s between two words on a measurement that goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSettings:
    """What the controls say.

    Attributes:
        policy: ``adaptive``, ``fixed``, ``none``, or the name of the caller's own; ``adaptive and
            fixed in turn`` changes every second or so. Acts at once.
        concurrency: sequences decoded together. Acts at once.
        temperature: of the next start.
        speculative_tokens: draft tokens a step, of the next start.
    """

    policy: str
    concurrency: int
    temperature: float
    speculative_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    concurrency: int
    policy: Policy


class _MeasuringStoppedError(Exception):
    """The run was cancelled while the cost table was measured."""


class Adaptive(AdaptivePage):
    """Decisions of adaptive verification, step by step. :func:`adaptive` makes it.

    Running the cell again, the stop button and an interrupt of the kernel each end decoding.

    Attributes:
        run: the newest run, None before the first.
        watch: its figures and last steps.
        settings: what it runs with, and what the next one is started with.
        table: what steps cost; None until it was measured.
    """

    def __init__(
        self,
        beam: Beam,
        drafter: Drafter,
        prompts: Sequence[str],
        *,
        settings: AdaptiveSettings,
        own: Policy | None,
        table: CostTable | None,
        estimator: Estimator | None,
        max_new_tokens: int,
        most: int,
        stop_at_eos: bool,
        autostart: bool,
    ) -> None:
        self.beam, self.drafter, self.table = beam, drafter, table
        self.estimator, self.autostart = estimator, autostart
        self.max_new_tokens = max_new_tokens
        self._prompts, self._most, self._stop_at_eos = tuple(prompts), most, stop_at_eos
        self._given_table = table
        self._fresh: dict[tuple[int, int, float], CostTable | None] = {}  # measured anew, or to be
        self._own = own
        mine = [] if own is None else [own_name(own)]
        self._names = [*mine, *POLICIES, *(name + IN_TURN for name in (*mine, "adaptive"))]
        self._turn = _Turn()
        self.settings = self._check(settings)
        super().__init__(
            _to_page(settings),
            {
                "policies": self._names,
                "concurrencies": _steps_to(most, settings.concurrency),
                "drafts": max(2 * (drafter.block - 1), settings.speculative_tokens),
                "trained": drafter.block - 1,
            },
        )

    def start(self, **changes: Any) -> None:
        """Decode from the beginning; ``changes`` are fields of :class:`AdaptiveSettings`.

        Raises:
            DraftError: there is no such setting, or no such policy.
        """
        self.settings = self._changed(changes)
        self._begin()

    def change(self, **changes: Any) -> None:
        """Change settings of a run that goes on.

        ``policy`` and ``concurrency`` act before its next step, the others from the next start on.

        Raises:
            DraftError: there is no such setting, or no such policy.
        """
        self.settings = self._changed(changes)
        self.widget.settings = _to_page(self.settings)

    def measure(self) -> None:
        """Measure anew what steps cost, whatever table was given or kept, and start with that."""
        self._fresh[self._measured_for] = None
        self._begin()

    @property
    def text(self) -> str:
        """Counts of each policy; no times, so that equal runs say equal words."""
        head = f"{self.beam.name}: {settings_words(_to_page(self.settings))}"
        with self._page:
            return f"{head}\n{self.watch.text or '-- nothing decoded yet'}"

    # -- beneath ----------------------------------------------------------------------------------

    def _changed(self, changes: Mapping[str, Any]) -> AdaptiveSettings:
        try:
            return self._check(replace(self.settings, **changes))
        except TypeError as error:
            known = ", ".join(AdaptiveSettings.__dataclass_fields__)
            raise DraftError(f"settings of this page are {known}: {error}") from error

    def _check(self, settings: AdaptiveSettings) -> AdaptiveSettings:
        if settings.policy not in self._names:
            known = ", ".join(map(repr, self._names))
            raise DraftError(f"policy must be one of {known}, not {settings.policy!r:.60}")
        _check_whole("concurrency", settings.concurrency, self._most)
        _check_whole("speculative_tokens", settings.speculative_tokens, MOST_DRAFTS)
        heat = settings.temperature
        if isinstance(heat, bool) or not isinstance(heat, int | float) or not isfinite(heat):
            raise DraftError(f"temperature must be a number from 0 on, not {heat!r:.60}")
        Sampling(temperature=heat)  # refuses what no run can be started with
        return settings

    def _take(self, prompt: str, settings: Mapping[str, Any]) -> None:
        known = AdaptiveSettings.__dataclass_fields__
        self.settings = self._changed({k: v for k, v in settings.items() if k in known})

    def _make(self, paused: bool) -> None:
        asked = self.settings
        self.widget.settings = _to_page(asked)
        cancel = threading.Event()
        learned = self.estimator is not None and self.estimator.steps >= REFIT_STEPS
        try:
            decoding = decode(
                self.beam,
                self.drafter,
                self._prompts[0],
                max_new_tokens=self.max_new_tokens,
                speculative_tokens=asked.speculative_tokens,
                sampling=Sampling(temperature=asked.temperature),
                stop_at_eos=self._stop_at_eos,
                slots=self._most,
                cancel=cancel,
                policy=Fixed(),  # until the first step asks for what is wanted
                estimator=self.estimator,
            )
        except WorkbenchError as error:
            self._refuse(error)
            return
        self.watch = Watch(self.table, calibrated=learned)
        steps = serving(decoding, self._prompts, self._wanted, self.max_new_tokens)
        source = Source(name="adaptive", steps=self._measured(steps, cancel))
        self._launch(self.beam, [], [source], cancel, paused)

    def _measured(self, steps: Iterator[Step], cancel: threading.Event) -> Iterator[Step]:
        """The steps, the cost table measured before the first where none was given."""
        try:
            self.table = self.watch.table = self._known_table() or self._profile(cancel)
            yield from steps
        except _MeasuringStoppedError:
            return
        finally:
            steps.close()  # type: ignore[attr-defined]

    @property
    def _measured_for(self) -> tuple[int, int, float]:
        """What a cost table depends on, of the settings."""
        asked = self.settings
        return asked.concurrency, asked.speculative_tokens, asked.temperature

    def _known_table(self) -> CostTable | None:
        if self._measured_for in self._fresh:
            return self._fresh[self._measured_for]
        return self._given_table

    def _profile(self, cancel: threading.Event) -> CostTable:
        key = concurrency, drafts, temperature = self._measured_for
        anew = key in self._fresh
        found = profile(
            self.beam,
            self.drafter,
            requests=concurrency,
            drafts=drafts,
            sampling=Sampling(temperature=temperature),
            progress=self._measuring(cancel),
            keep=not anew,
        )
        if anew:
            self._fresh[key] = found
        self.widget.status = "reading the prompts"
        return found

    def _measuring(self, cancel: threading.Event) -> Callable[[int, int], None]:
        told = monotonic()

        def progress(done: int, of: int) -> None:
            nonlocal told
            if cancel.is_set():
                raise _MeasuringStoppedError
            if monotonic() - told > _TOLD:
                told = monotonic()
                self.widget.status = f"measuring what steps cost here, once: {done} of {of} passes"

        return progress

    def _wanted(self) -> _Wanted:
        asked = self.settings
        turns = asked.policy.endswith(IN_TURN)
        self.watch.focus = self._step_name(asked.policy.removesuffix(IN_TURN)) if turns else None
        return _Wanted(concurrency=asked.concurrency, policy=self._policy(asked.policy))

    def _step_name(self, name: str) -> str:
        """What steps call a policy of the menu."""
        if self._own is not None and name == self._names[0]:
            with suppress(Exception):  # a user's code may raise anything
                return str(self._own.name)
        return name

    def _policy(self, name: str) -> Policy:
        if name.endswith(IN_TURN):
            name = self._turn.of(name.removesuffix(IN_TURN))
        if self._own is not None and name == self._names[0]:
            return self._own
        if name == "adaptive" and self.table is not None:
            return AdaptivePolicy(self.table)
        return NoDrafts() if name == "none" else Fixed()

    def _end(self, run: Run) -> str:
        return "stopped" if run.cancelled else "over"

    def _static_html(self) -> str:
        return (
            f'<div style="font-family:{theme.SANS};font-size:{theme.TEXT}px;opacity:.75">'
            "Decisions are shown here when the notebook runs: "
            f"<pre>{escape(self.text)}</pre></div>"
        )


class _Turn:
    """Whose turn it is, where a policy and fixed verification take turns."""

    def __init__(self) -> None:
        self._fixed, self._since, self._steps = False, 0.0, 0

    def of(self, name: str) -> str:
        """The policy of the next step: asked before each."""
        self._steps += 1
        if self._steps > _TURN_STEPS and monotonic() - self._since > _TURN:
            self._fixed, self._since, self._steps = not self._fixed, monotonic(), 1
        return "fixed" if self._fixed else name


def own_name(policy: Policy) -> str:
    """A caller's policy as the menu calls it, told apart from those that are always there."""
    name = type(policy).__name__
    with suppress(Exception):  # a user's code may raise anything
        name = str(policy.name) or name
    return f"{name} (yours)" if name in POLICIES else name


def _check_whole(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise DraftError(f"{name} must be a whole number from 1 to {most}, not {value!r:.60}")


def _steps_to(most: int, given: int) -> list[int]:
    """Where the slider stops: doublings, and the number that was asked for."""
    doublings = [1 << n for n in range(most.bit_length()) if 1 << n <= most]
    return sorted({*doublings, most, given})


def _to_page(settings: AdaptiveSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in AdaptiveSettings.__dataclass_fields__}


def adaptive(
    beam: Beam,
    drafter: Drafter,
    prompts: Sequence[str],
    *,
    concurrency: int = 32,
    policy: str | Policy = "adaptive",
    table: CostTable | None = None,
    temperature: float = 0.0,
    speculative_tokens: int | None = None,
    estimator: Estimator | None = None,
    max_new_tokens: int = 128,
    most: int = MOST_SLOTS,
    stop_at_eos: bool = True,
    autostart: bool = True,
) -> Adaptive:
    """Adaptive verification as it happens: decisions, their reasons, and what they come to.

    Sequences that end are replaced by the next prompt, in turn, until it is stopped. Policy and
    number of sequences change while it runs, so two policies can be compared in the same minutes.

    Args:
        beam: the target, with its tokenizer.
        drafter: of this target.
        prompts: texts to go on from.
        concurrency: sequences decoded together, 1 to ``most``.
        policy: ``adaptive``, ``fixed`` (all drafts), ``none``, ``adaptive and fixed in turn``, or
            an object with a ``name`` and ``decide(situation)``, which then is one more in the menu.
        table: what steps cost; by default measured here at the first start, and kept
            (:func:`workbench.spec.profile.profile`).
        temperature: 0 is greedy.
        speculative_tokens: draft tokens a step; as many as the drafter was trained with when None.
        estimator: of the confidences, to go on with one that has learned; a fresh one for each
            start when None.
        max_new_tokens: most tokens of a request.
        most: places that are kept, the upper end of the slider.
        stop_at_eos: as :func:`workbench.spec.decode.decode` takes it.
        autostart: begin as soon as a page shows it (and only then: a notebook that runs without a
            page decodes nothing here).

    Raises:
        DraftError: a drafter of another target, an unknown policy, or a number out of its range.
        PromptError: there are no prompts.
    """
    check_pair(beam, drafter)
    several = [prompts] if isinstance(prompts, str) else list(prompts)
    if not several:
        raise PromptError("there are no prompts to go on from; give at least one text")
    own = None if isinstance(policy, str) else policy
    if own is not None and not callable(getattr(own, "decide", None)):
        raise DraftError(
            f"a policy has a name and decide(situation), and {type(own).__name__} lacks one; take "
            "'adaptive', 'fixed', 'none' or write one"
        )
    _check_whole("most", most, 1 << 16)
    settings = AdaptiveSettings(
        policy=policy if isinstance(policy, str) else own_name(policy),
        concurrency=concurrency,
        temperature=temperature,
        speculative_tokens=drafter.block - 1 if speculative_tokens is None else speculative_tokens,
    )
    return Adaptive(
        beam,
        drafter,
        several,
        settings=settings,
        own=own,
        table=table,
        estimator=estimator,
        max_new_tokens=max_new_tokens,
        most=most,
        stop_at_eos=stop_at_eos,
        autostart=autostart,
    )
