"""One published thing and the figures that stand beside it: :class:`Row`, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from workbench.model.asked import SizingError
from workbench.model.reference_figures import Reference, reference

Kind = Literal["published", "modelled", "recorded", "measured here"]
KINDS: tuple[Kind, ...] = ("published", "modelled", "recorded", "measured here")
Unit = Literal["ms", "tokens/s", "tokens a step", "change"]
_NOT_HERE = "not measured here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number with what it is of.

    Attributes:
        value: in its row's unit; a change is 0.108 for +10.8 %.
        kind: how it came about.
        label: what distinguishes it within its row, such as "after the optimisations".
        source: where, with what, when, and what is not in it.
    """

    value: float
    kind: Kind
    label: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was published of one thing, and the others' figures of it.

    Attributes:
        name: the thing.
        unit: of all its figures.
        figures: in the order of their kinds.
        missing: why a kind has no figure, by kind.
        remark: what to bear in mind when comparing.
    """

    name: str
    unit: Unit
    figures: tuple[Figure, ...]
    missing: dict[Kind, str]
    remark: str = ""

    def of(self, kind: Kind) -> tuple[Figure, ...]:
        """Its figures of one kind."""
        return tuple(figure for figure in self.figures if figure.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "name": self.name,
            "unit": self.unit,
            "figures": [
                {"value": f.value, "kind": f.kind, "label": f.label, "source": f.source}
                for f in self.figures
            ],
            "missing": dict(self.missing),
            "remark": self.remark,
        }


def row(
    name: str,
    unit: Unit,
    figures: Iterable[Figure],
    *,
    modelled: Callable[[], float] | None = None,
    how: str = "",
    measured: Figure | None = None,
    missing: dict[Kind, str] | None = None,
    remark: str = "",
) -> Row:
    found = [*figures]
    absent: dict[Kind, str] = {"recorded": "not recorded", "measured here": _NOT_HERE}
    absent |= missing or {}
    if modelled is not None:
        try:
            found.append(Figure(value=modelled(), kind="modelled", label="", source=how))
        except SizingError as error:  # a plan over more than one NVLink domain, a short context
            absent["modelled"] = f"not modelled: {error}"
    if measured is not None:
        found.append(measured)
    found.sort(key=lambda figure: KINDS.index(figure.kind))
    there = {figure.kind for figure in found}
    reasons: dict[Kind, str] = {kind: why for kind, why in absent.items() if kind not in there}
    return Row(name=name, unit=unit, figures=tuple(found), missing=reasons, remark=remark)


def references(*names: str, label: str = "") -> list[Figure]:
    return [_reference(reference(name), label or name.rsplit(", ", 1)[-1]) for name in names]


def _reference(one: Reference, label: str) -> Figure:
    place = "hardware not stated" if one.where == "not stated" else one.where
    date = "; date not recorded" if one.kind == "recorded" else ""
    return Figure(
        value=one.value, kind=one.kind, label=label, source=f"{place}; {one.note}{date}"
    )  # fmt: skip
