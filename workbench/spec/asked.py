"""What callers of the decode loop ask for, checked: each thing refused in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.errors import DraftError, PromptError
from workbench.model.beam import Beam
from workbench.model.sampling import Sampling
from workbench.spec.drafter import Drafter


def first_line(value: Any) -> str:
    """A wrong value for a message; a model that is served says in its first line what it is."""
    return repr(value).partition("\n")[0][:120]


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise DraftError unless ``value`` is a whole number in this range."""
    bad = not isinstance(value, int) or isinstance(value, bool) or value < least
    if bad or (most is not None and isinstance(value, int) and value > most):
        upto = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise DraftError(f"{name} must be a whole number {upto}, not {value!r:.60}")


def check_pair(beam: Beam, drafter: Drafter) -> None:
    """Raise DraftError unless ``drafter`` was loaded for this very model, as it is now."""
    if not isinstance(drafter, Drafter):
        raise DraftError(
            f"drafter must be a loaded one (load_drafter(beam, ...)), not {drafter!r:.60}"
        )
    if drafter.target is not beam:
        raise DraftError(
            f"{drafter.name} was loaded for another {drafter.target.name}; load it for this model: "
            "load_drafter(beam, ...)"
        )
    ours, theirs = (drafter.dtype, drafter.device), (beam.dtype, beam.device)
    if ours != theirs:
        raise DraftError(
            f"{drafter.name} is {ours[0]} on {ours[1]}, {beam.name} is {theirs[0]} on {theirs[1]}; "
            "load both anew, the drafter with load_drafter(beam, ...)"
        )


def check_kinds(beam: Any, sampling: Any, seeds: Any, cancel: Any) -> None:
    """Raise PromptError for an argument of the wrong kind, naming it."""
    if not isinstance(beam, Beam):
        raise PromptError(f"beam must be a loaded model (load(...)), not {first_line(beam)}")
    if not isinstance(sampling, Sampling):
        raise PromptError(f"sampling must be a Sampling, not {sampling!r:.60}")
    if seeds is not None and (not isinstance(seeds, Sequence) or isinstance(seeds, str | bytes)):
        raise PromptError(f"seeds must be a list with one for each prompt, not {seeds!r:.60}")
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        raise PromptError(
            f"cancel must have is_set(), as threading.Event has, not be {cancel!r:.60}"
        )


def check_room(drafter: Drafter, prompt: int, room: int) -> None:
    """Raise DraftError where ``prompt`` tokens and ``room`` new ones leave the drafter's context.

    It may be shorter than the target's. The last token never becomes context.
    """
    if prompt + room - 1 > drafter.limit:
        raise DraftError(
            f"a prompt of {prompt} tokens and {room} new ones exceed the drafter's context of "
            f"{drafter.limit} (its max_position_embeddings); ask for fewer new tokens, or decode "
            "without a drafter"
        )
