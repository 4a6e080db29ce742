"""The drafting dashboard: speculative decoding as it happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from workbench.errors import DraftError, WorkbenchError
from workbench.model.sampling import Sampling
from workbench.spec.decode import decode
from workbench.spec.loop import MOST_DRAFTS, Method, Proposals
from workbench.terminal import printable
from workbench.views import theme
from workbench.views.drafting_lane import Lane
from workbench.views.drafting_page import PLAIN, Board
from workbench.views.drafting_run import Run, Source, cycling
from workbench.views.spec_marks import TokenTexts
from workbench.views.spec_text import written_with_drafts

if TYPE_CHECKING:
    from workbench.model.beam import Beam
    from workbench.spec.drafter import Drafter

NOTHING = "nothing"
Prompts = Literal["all in turn", "this one once"]
_IN_TURN, _ONCE = get_args(Prompts)
_SLIDER = 15  # draft tokens a step that the page offers, or twice the trained block if that is more


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingSettings:
    """What the controls say; :func:`workbench.spec.decode.decode` explains the first four.

    ``beside`` is what runs beside it: ``nothing``, ``plain decoding``, or the second drafter's
    name. ``prompts`` says whether those that the dashboard was given follow the one in the box.
    """

    speculative_tokens: int
    sampling: Sampling
    method: Method = "standard"
    proposals: Proposals = "greedy"
    beside: str = NOTHING
    prompts: Prompts = _IN_TURN


class Drafting(Board):
    """A prompt, controls, and what drafting does, step by step. :func:`drafting` makes it.

    Running the cell again, the stop button and an interrupt of the kernel each end decoding.

    Attributes:
        run: the newest run, None before the first.
        lanes: its lanes: figures, last steps, last text.
        settings: what the next run is started with.
    """

    def __init__(
        self,
        beam: Beam,
        drafter: Drafter,
        prompt: str,
        *,
        other: Drafter | None,
        settings: DraftingSettings,
        max_new_tokens: int,
        prompts: Sequence[str],
        stop_at_eos: bool,
        autostart: bool,
    ) -> None:
        self.beam, self.drafter, self.other = beam, drafter, other
        self.settings, self.max_new_tokens, self.autostart = settings, max_new_tokens, autostart
        self._prompts, self._stop_at_eos = tuple(prompts), stop_at_eos
        self._names = _names(drafter, other)
        self._beside = [NOTHING, PLAIN, *self._names[1:]]
        self._check(settings)
        most = min(MOST_DRAFTS, max(_SLIDER, 2 * (drafter.block - 1), settings.speculative_tokens))
        super().__init__(
            prompt,
            _to_page(settings),
            {
                "most": most,
                "trained": drafter.block - 1,
                "methods": list(get_args(Method)),
                "proposals": list(get_args(Proposals)),
                "beside": self._beside,
                "live": True,
                "prompts": list(get_args(Prompts)) if prompts else [],
            },
        )

    def start(self, prompt: str | None = None, **changes: Any) -> None:
        """Decode a prompt (by default the one in the box) from its beginning.

        ``changes`` are fields of :class:`DraftingSettings` to change before.

        Raises:
            DraftError: there is no such setting, or no such thing to run beside it.
        """
        try:
            self.settings = self._check(replace(self.settings, **changes))
        except TypeError as error:
            known = ", ".join(DraftingSettings.__dataclass_fields__)
            raise DraftError(f"a dashboard's settings are {known}: {error}") from error
        if prompt is not None:
            self.widget.prompt = prompt
        self._begin()

    def _check(self, settings: DraftingSettings) -> DraftingSettings:
        if settings.beside not in self._beside:
            known = ", ".join(map(repr, self._beside))
            raise DraftError(f"beside must be one of {known}, not {settings.beside!r:.60}")
        if settings.prompts not in get_args(Prompts):
            known = ", ".join(map(repr, get_args(Prompts)))
            raise DraftError(f"prompts must be one of {known}, not {settings.prompts!r:.60}")
        return settings

    def _take(self, prompt: str, settings: Mapping[str, Any]) -> None:
        self.settings = self._check(_from_page(settings, self.settings))
        self.widget.prompt = prompt

    def _make(self, paused: bool) -> None:
        self._prompt = self.widget.prompt
        self.widget.settings = _to_page(self.settings)
        cancel = threading.Event()
        drafters: list[tuple[str, Drafter | None]] = [(self._names[0], self.drafter)]
        if self.settings.beside == PLAIN:
            drafters.append((PLAIN, None))
        elif self.settings.beside != NOTHING:
            drafters.append((self.settings.beside, self.other))
        try:
            made = [self._lane(name, drafter, cancel) for name, drafter in drafters]
        except WorkbenchError as error:
            self._refuse(error)
            return
        lanes, sources = zip(*made, strict=True)
        self._launch(self.beam, lanes, sources, cancel, paused)

    def _lane(
        self, name: str, drafter: Drafter | None, cancel: threading.Event
    ) -> tuple[Lane, Source]:
        asked = self.settings
        slots = asked.speculative_tokens if drafter is not None else 0
        decoding = decode(
            self.beam,
            drafter,
            self._prompt,
            max_new_tokens=self.max_new_tokens,
            speculative_tokens=slots if drafter is not None else None,
            sampling=asked.sampling,
            method=asked.method,
            proposals=asked.proposals,
            stop_at_eos=self._stop_at_eos,
            slots=1,
            cancel=cancel,
            detail=True,
        )
        every = self._every()
        prompt: Callable[[int], str] = lambda request: every[request % len(every)]  # noqa: E731
        assert self.beam.tokenizer is not None  # for the type checker: looked at by drafting()
        lane = Lane(name, self.beam.tokenizer, slots=slots, prompt=prompt)
        steps = cycling(decoding, every) if len(every) > 1 else decoding
        return lane, Source(name=name, steps=steps)

    def _every(self) -> tuple[str, ...]:
        """The prompts of a run, in turn."""
        more = self._prompts if self.settings.prompts == _IN_TURN else ()
        return (self._prompt, *more)

    def _where(self) -> str:
        request, every = self.lanes[0].request if self.lanes else None, self._every()
        if request is None or len(every) == 1:
            return ""
        return f"prompt {1 + request % len(every)} of {len(every)}"

    def _end(self, run: Run) -> str:
        reasons = {
            "eos": "ended by the model",
            "length": f"limit of {self.max_new_tokens:,}",
            "context": "context full",
        }
        finished = self.lanes[0].finished if self.lanes else None
        return "stopped" if run.cancelled or finished is None else reasons[finished]

    def _static_html(self) -> str:
        with self._page:
            if self.lanes and self.lanes[0].steps:
                lane = self.lanes[0]
                found = written_with_drafts(
                    list(lane.steps), self._tokenizer, model=self.beam.name, source=lane.source
                )
                return str(found.html)
        return (
            f'<div style="font-family:{theme.SANS};font-size:{theme.TEXT}px;opacity:.75">'
            "Drafting runs here when the notebook does. Its prompt: "
            f"<code>{escape(printable(self._prompt))}</code></div>"
        )

    @property
    def _tokenizer(self) -> TokenTexts:
        assert self.beam.tokenizer is not None  # for the type checker: looked at by drafting()
        return self.beam.tokenizer


def _names(drafter: Drafter, other: Drafter | None) -> list[str]:
    """Names of one or two drafters, told apart."""
    # One that is not bundled is called by its folder, whose parents are nobody's business.
    names = [Path(one.name).name for one in (drafter, other) if one is not None]
    if len(set(names)) < len(names) or set(names) & {PLAIN, NOTHING}:
        names = [f"{name} ({letter})" for name, letter in zip(names, "AB", strict=False)]
    return names


def _to_page(settings: DraftingSettings) -> dict[str, Any]:
    return {
        "speculative_tokens": settings.speculative_tokens,
        "temperature": settings.sampling.temperature,
        "method": settings.method,
        "proposals": settings.proposals,
        "beside": settings.beside,
        "prompts": settings.prompts,
    }


def _from_page(data: Mapping[str, Any], before: DraftingSettings) -> DraftingSettings:
    """Settings as a page sends them; what is missing stays, what is no value is refused."""
    count = data.get("speculative_tokens", before.speculative_tokens)
    heat = data.get("temperature", before.sampling.temperature)
    sound = isinstance(heat, int | float) and not isinstance(heat, bool) and isfinite(heat)
    if type(count) is not int or not sound:
        raise DraftError("draft length must be a whole number, and temperature a number")
    return DraftingSettings(
        speculative_tokens=count,
        sampling=replace(before.sampling, temperature=heat),
        method=data.get("method", before.method),
        proposals=data.get("proposals", before.proposals),
        beside=str(data.get("beside", before.beside)),
        prompts=data.get("prompts", before.prompts),
    )


def drafting(
    beam: Beam,
    drafter: Drafter,
    prompt: str = "def ",
    *,
    other: Drafter | None = None,
    beside: Literal["nothing", "plain decoding"] | str | None = None,
    max_new_tokens: int = 400,
    speculative_tokens: int | None = None,
    sampling: Sampling | None = None,
    method: Method = "standard",
    proposals: Proposals = "greedy",
    stop_at_eos: bool = True,
    prompts: Sequence[str] = (),
    autostart: bool = True,
) -> Drafting:
    """Speculative decoding as it happens: text with marks, blocks, acceptance, speed.

    Args:
        beam: the target, with its tokenizer.
        drafter: of this target.
        prompt: what stands in the box at first.
        other: a second drafter, to run beside the first.
        beside: what takes turns with it on the same prompt: ``nothing``, ``plain decoding``, or
            the name of ``other``; that one by default if it is given.
        max_new_tokens, speculative_tokens, sampling, method, proposals, stop_at_eos: as
            :func:`workbench.spec.decode.decode` takes them; the page changes some of them.
        prompts: further prompts: the run then goes through all of them for ever, until it is
            stopped, or takes the one in the box alone; a menu chooses.
        autostart: begin as soon as a page shows it (and only then: a notebook that runs without a
            page decodes nothing here).

    Raises:
        DraftError: a drafter of another target, or an unknown ``beside``.
        WorkbenchError: the model has no tokenizer.
    """
    if beam.tokenizer is None:
        raise WorkbenchError(
            f"{beam.name} has no tokenizer.json, so there is no text to show; add it to the "
            "model's folder"
        )
    for one in (drafter, other):
        if one is not None and one.target is not beam:
            raise DraftError(
                f"{one.name} was loaded for another {one.target.name}; load it for this model: "
                "load_drafter(beam, ...)"
            )
    if beside is None:
        beside = NOTHING if other is None else _names(drafter, other)[1]
    settings = DraftingSettings(
        speculative_tokens=drafter.block - 1 if speculative_tokens is None else speculative_tokens,
        sampling=sampling or Sampling(),
        method=method,
        proposals=proposals,
        beside=beside,
    )
    return Drafting(
        beam,
        drafter,
        prompt,
        other=other,
        settings=settings,
        max_new_tokens=max_new_tokens,
        prompts=prompts,
        stop_at_eos=stop_at_eos,
        autostart=autostart,
    )
