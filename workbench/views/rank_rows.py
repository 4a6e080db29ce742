"""The bars of a rank's decode step: what the views read from a document and set beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError
from workbench.model.reference_figures import reference
from workbench.views import theme
from workbench.views.rank_sources import (
    comparable,
    described,
    engine_figures,
    experts,
    reference_source,
    variant_source,
    whence,
)

# look -> heading above its bars (clear of the lines across them), colour, pattern: told
# apart without colour as well.
LOOKS = {
    "start": ("", theme.NEUTRAL, ""),
    "published": ("Published optimisations", theme.SLIDING, "/"),
    "engine": ("Read off the engine's code", theme.DRAFTER, "."),
    "ours": ("This workbench's operations", theme.SPARSE, "x"),
    "whole": ("This workbench's whole steps", theme.SPARSE, ""),
    "besides": ("This workbench's, other runs", theme.SPARSE, "\\"),
    "absent": ("Not run there", theme.NEUTRAL, ""),
    "other": ("Other runs on one H200", theme.NEUTRAL, "-"),
    "elsewhere": ("Other hardware: GB200, TP8", theme.NEUTRAL, "|"),
}
APART = "elsewhere"  # of another machine: no floor, no line of ours reaches it
Other = Mapping[str, Any] | tuple[str, float, str] | tuple[str, float, str, float]

_PUBLISHED = {
    "before the optimisations": "decode, batch 1, before the optimisations",
    "after the optimisations": "decode, batch 1, after the optimisations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bar: ``milliseconds`` None has no time, ``why`` says the reason.

    ``source`` stands below the name, ``whence`` in the hover; ``above`` are the milliseconds of the
    bar that this one is compared with, ``of_floor`` is the floor over the time, ``floor`` (ms) its
    own floor where that is not the document's.
    """

    name: str
    look: str
    source: str
    whence: str
    milliseconds: float | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    of_floor: float | None = None
    floor: float | None = None
    why: str = ""

    @property
    def saved(self) -> float | None:
        """Milliseconds less than the bar above."""
        if self.milliseconds is None or self.above is None:
            return None
        return self.above - self.milliseconds


def timed(row: Mapping[str, Any]) -> bool:
    """Whether a document's row may be shown with its time: what is not right has none."""
    return bool(row.get("passed")) and row.get("milliseconds") is not None


def reason(row: Mapping[str, Any]) -> str:
    """Why a row has no time."""
    if row.get("passed"):
        return "interpreted, not timed" if row.get("interpreted") else "not timed"
    return "not right, not timed: " + ("; ".join(map(str, row.get("failures") or ())) or "no check")


def look(row: Mapping[str, Any]) -> str:
    """The look of a document's variant: by whose idea it is."""
    origin = str(row.get("origin", "ours"))
    if origin == "ours" and not row.get("forms"):
        return "whole"
    return origin if origin in LOOKS else "ours"


def variant_rows(document: Mapping[str, Any]) -> list[Row]:
    """The document's variants in its order, then those that could not run, with the reason.

    Raises:
        WorkbenchError: there is no variant.
    """
    variants = document.get("variants") or {}
    if not variants:
        raise WorkbenchError("this run has no variant of the step; run `workbench bench decode`")
    rows: list[Row] = []
    above, of = None, whence(document)
    for name, row in variants.items():
        right = timed(row)
        rows.append(
            Row(
                name=str(row.get("title", name)),
                look=look(row),
                source=variant_source(document),
                whence=of,
                milliseconds=row["milliseconds"] if right else None,
                low=row.get("low") if right else None,
                high=row.get("high") if right else None,
                above=above,
                of_floor=row.get("fraction_of_floor") if right else None,
                why="" if right else reason(row),
            )
        )
        above = rows[-1].milliseconds  # without it nobody knows what the next one saves
    for name, why in (document.get("left_out") or {}).items():
        one = variant_source(document)
        rows.append(Row(name=str(name), look="absent", source=one, whence=of, why=str(why)))
    return rows


def other_rows(document: Mapping[str, Any], others: Sequence[Other]) -> list[Row]:
    """Other runs, the engine's recorded times and the published pair.

    The latter two are of the full model's rank at batch 1: beside another model's step there are
    none. The engine's are of about this context.
    """
    rows: list[Row] = []
    # The engine's are BF16 on an H200: a floor of other bytes or of another card is not theirs.
    alike = "H200" in str(document.get("hardware")) and document.get("dtype") == "bfloat16"
    alike = alike and not experts(document)
    floor_here = document.get("floor_milliseconds") if alike else None
    for run in others:
        if isinstance(run, Mapping):
            rows += _run_rows(document, run)
    for label, milliseconds, whose, *floor in (o for o in others if not isinstance(o, Mapping)):
        rows.append(
            Row(
                name=label, look="other", source=whose, whence=whose, milliseconds=milliseconds,
                of_floor=floor[0] / milliseconds if floor else None,
            )
        )  # fmt: skip
    for label, one in engine_figures(document):
        rows.append(
            Row(
                name=label,
                look="other",
                source=f"{one.kind}, no all-reduce on one GPU",
                whence=reference_source(one),
                milliseconds=one.value,
                of_floor=floor_here / one.value if floor_here else None,
            )
        )
    above = None
    for label, name in _PUBLISHED.items() if comparable(document) else ():
        one = reference(name)
        rows.append(
            Row(
                name=label, look=APART, source=f"{one.kind}, all-reduces included",
                whence=f"{reference_source(one)}; all-reduces included",
                milliseconds=one.value, above=above,
            )
        )  # fmt: skip
        above = one.value
    return rows


def _run_rows(document: Mapping[str, Any], run: Mapping[str, Any]) -> list[Row]:
    """The whole steps of another run that have a time, each with that run's own floor."""
    floor = run.get("floor_milliseconds")
    kept = experts(run).partition(" (")[0]
    rows = []
    for name, row in (run.get("variants") or {}).items():
        if look(row) != "whole" or not timed(row):
            continue
        rows.append(
            Row(
                name=str(row.get("title", name)) + (f", {kept} experts" if kept else ""),
                look="besides", source=variant_source(run), whence=described(run),
                milliseconds=row["milliseconds"], low=row.get("low"), high=row.get("high"),
                of_floor=row.get("fraction_of_floor"),
                floor=floor if floor != document.get("floor_milliseconds") else None,
            )
        )  # fmt: skip
    return rows
