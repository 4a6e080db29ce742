"""The options of drafting, shared by ``generate``, ``demo``, ``trace record`` and ``bench``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from workbench.model.beam import Beam
    from workbench.model.sampling import Sampling
    from workbench.spec.adaptive import Policy
    from workbench.spec.drafter import Drafter
    from workbench.spec.loop import Decoding
    from workbench.spec.trace import TraceWriter


class MethodName(StrEnum):
    """How drafts are verified above temperature 0."""

    standard = "standard"
    block = "block"


class ProposalsName(StrEnum):
    """How drafts are chosen above temperature 0."""

    greedy = "greedy"
    probabilistic = "probabilistic"


NoDraft = Annotated[bool, typer.Option("--no-draft", help="Decode without a drafter.")]
DrafterFolder = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="A drafter's folder. Default: the one bundled with the model, if there is one.",
        metavar="FOLDER",
    ),
]
SpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        "--speculative-tokens",
        help="Draft tokens a step. Default: as many as the drafter was trained with.",
        metavar="N",
    ),
]
Method = Annotated[
    MethodName | None,
    typer.Option("--method", help="Verification above temperature 0. Default: standard."),
]
Proposals = Annotated[
    ProposalsName | None,
    typer.Option("--proposals", help="Drafts above temperature 0. Default: greedy."),
]
AdaptiveFlag = Annotated[
    bool,
    typer.Option(
        "--adaptive",
        help="Verify only drafts that are worth it, by costs measured here (once, then kept).",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the trace file if there is one.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What the options ask for."""

    no_draft: bool = False
    drafter: str | None = None
    speculative_tokens: int | None = None
    method: str | None = None
    proposals: str | None = None
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.no_draft and self._named:
            raise typer.BadParameter(f"{self._named[0]} asks for drafts, --no-draft for none")

    @property
    def _named(self) -> list[str]:
        options = ("drafter", "speculative_tokens", "method", "proposals")
        named = [name for name in options if getattr(self, name) is not None]
        named += ["adaptive"] * self.adaptive
        return [f"--{name.replace('_', '-')}" for name in named]

    def load(self, beam: Beam) -> Drafter | None:
        """The drafter; None where none is wanted, or none is bundled and none was asked for."""
        from workbench.model.presets import bundled_drafter

        if self.no_draft or (not self._named and bundled_drafter(beam.name) is None):
            return None
        from workbench.spec.drafter_checkpoint import load_drafter

        return load_drafter(beam, self.drafter)

    def decoding(
        self, beam: Beam, drafter: Drafter | None, prompts: Any, sampling: Sampling, **more: Any
    ) -> Decoding:
        """A run of the loop with these settings; ``more`` as :func:`decode` takes it."""
        from workbench.spec.decode import decode

        chosen = {
            name: str(value)
            for name in ("method", "proposals")
            if (value := getattr(self, name)) is not None
        }
        if self.adaptive and drafter is not None:
            more["policy"] = self._policy(beam, drafter)
        return decode(
            beam,
            drafter,
            prompts,
            speculative_tokens=self.speculative_tokens,
            sampling=sampling,
            **chosen,  # type: ignore[arg-type]
            **more,
        )

    def _policy(self, beam: Beam, drafter: Drafter) -> Policy:
        """Adaptive verification of one sequence, with a bar while its costs are measured, or a line
        where stderr is no terminal."""
        from workbench.spec.adaptive import Adaptive
        from workbench.spec.profile import profile
        from workbench.terminal_kernels import Progress

        said = False
        with Progress("measuring costs") as bar:

            def told(done: int, of: int) -> None:
                nonlocal said
                if not said and not sys.stderr.isatty():
                    said = True
                    bar.say(
                        "workbench: measuring what drafts and verifications cost on this machine, "
                        f"in {of} timings; the table is kept for the next time if it can be written"
                    )
                bar.told(done, of, "")

            table = profile(
                beam,
                drafter,
                requests=1,
                drafts=self.speculative_tokens,
                progress=told,
            )
        return Adaptive(table, frugal=True)

    def why_none(self, beam: Beam) -> str:
        """Why there is no drafter, for a sentence."""
        if self.no_draft:
            return "without a drafter"
        return f"without a drafter (none is bundled with {beam.name})"


@contextmanager
def trace_of(
    decoding: Decoding, path: Path | None, overwrite: bool = False
) -> Iterator[TraceWriter | None]:
    """Where the steps of a run go; None where no file was named."""
    if path is None:
        yield None
        return
    from workbench.spec.trace import TraceWriter, header

    settings, drafter = decoding.settings, decoding.drafter
    head = header(
        model=decoding.beam.name,
        drafter=None if drafter is None else drafter.name,
        sampling=settings.sampling,
        speculative_tokens=None if drafter is None else settings.speculative_tokens,
        method=settings.method,
        proposals=settings.proposals,
        max_new_tokens=settings.max_new_tokens,
    )
    with TraceWriter(path, head, overwrite=overwrite) as writer:
        yield writer
