"""Layers of an engine beside their expectation, as values.

All texts in them come from the engine: escape them before they become HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.errors import ServingError
from workbench.model.config import is_int
from workbench.model.display import Shown, ranges
from workbench.serving.layers.engine_expected import NONE, Key, Source, Value, Whose

Verdict = Literal["same", "differs", "odd one out", "not found", "not compared"]
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerField:
    """One fact of a layer: what was expected, what the engine has, and what the first stands on.

    ``found`` and ``expected`` are None where they are not known; a window that there is not is
    "none".
    """

    name: str
    expected: Value
    found: Value
    source: Source

    @property
    def verdict(self) -> Verdict:
        """How the two compare. The odd one out differs from most layers of its kind only."""
        if self.expected is None:
            return "not compared"
        if self.found is None:
            return "not found"
        if self.expected == self.found and isinstance(self.expected, bool) == isinstance(
            self.found, bool
        ):
            return "same"
        return "odd one out" if self.source == "others" else "differs"

    @property
    def agrees(self) -> bool:
        """Whether there is nothing to point out."""
        return self.verdict in ("same", "not compared")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayer:
    """One layer as the engine built it. ``name`` is the engine's for its attention."""

    model: Whose
    index: int
    name: str
    attention: Literal["full", "sliding", ""]
    fields: tuple[LayerField, ...]

    @property
    def differences(self) -> tuple[LayerField, ...]:
        """Fields that are not as expected, or were not found."""
        return tuple(one for one in self.fields if not one.agrees)

    def __getitem__(self, name: str) -> LayerField:
        for one in self.fields:
            if one.name == name:
                return one
        raise KeyError(name)

    def found(self, name: str) -> Value:
        """What the engine has, None also for a field that this layer does not have."""
        return next((one.found for one in self.fields if one.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """One KV cache group. ``expected`` are the layers that our rule puts there.

    ``index`` is the engine's number, None for a group of ours that the engine has not;
    ``expected`` is None where the rule could not be applied.
    """

    index: int | None
    kind: str | None
    keeps: str | None
    block_size: int | None
    page_bytes: int | None
    layers: tuple[Key, ...]
    expected: tuple[Key, ...] | None

    @property
    def agrees(self) -> bool:
        """Whether these are the layers of the rule's group."""
        return self.expected is None or set(self.layers) == set(self.expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDifference:
    """Something that tensor-parallel ranks do not have in common: its values by rank."""

    where: str
    field: str
    values: tuple[tuple[int, Value], ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineLayers(Shown):
    """An engine's layers beside their expectation; :func:`engine_layers` makes it.

    ``engine`` holds what the first rank says of itself, its compilation and its captured graphs,
    as plain values; ``documents`` what every rank answered, to be kept as JSON and read again.
    """

    layers: tuple[EngineLayer, ...]
    settings: tuple[LayerField, ...]
    groups: tuple[EngineGroup, ...]
    ranks: tuple[int, ...]
    rank_differences: tuple[RankDifference, ...]
    engine: Mapping[str, Any]
    notes: tuple[str, ...]
    documents: tuple[Document, ...] = field(compare=False)

    @property
    def differences(self) -> tuple[tuple[EngineLayer, LayerField], ...]:
        """Every field of every layer that is not as expected."""
        return tuple((layer, one) for layer in self.layers for one in layer.differences)

    @property
    def agrees(self) -> bool:
        """Whether layers, groups, settings and ranks show nothing to point out."""
        return (
            not self.differences
            and all(group.agrees for group in self.groups)
            and all(one.agrees for one in self.settings)
            and not self.rank_differences
        )

    @property
    def compared(self) -> int:
        """Fields of layers that could be compared with something."""
        return sum(
            one.verdict not in ("not compared", "not found")
            for layer in self.layers
            for one in layer.fields
        )

    @property
    def gathered(self) -> tuple[tuple[Whose, LayerField, tuple[int, ...]], ...]:
        """Equal differences of several layers together: whose, the field, which layers."""
        rows: dict[tuple[object, ...], tuple[Whose, LayerField, list[int]]] = {}
        for layer, one in self.differences:
            key = (layer.model, one.name, one.verdict, one.expected, type(one.found), one.found)
            rows.setdefault(key, (layer.model, one, []))[2].append(layer.index)
        return tuple((model, one, tuple(indices)) for model, one, indices in rows.values())

    def of(self, model: Whose) -> tuple[EngineLayer, ...]:
        """The target's layers, or the drafter's."""
        return tuple(layer for layer in self.layers if layer.model == model)

    def folded(self, model: Whose) -> tuple[tuple[EngineLayer, ...], ...]:
        """Layers of one model that are alike in every field, together, in order of the first.

        The number of the KV cache group counts only where it is not as expected.
        """
        alike: dict[tuple[object, ...], list[EngineLayer]] = {}
        for layer in self.of(model):
            row: list[object] = [layer.attention]
            for one in layer.fields:
                number = one.name == "KV group" and one.agrees
                shown = None if number else (type(one.found), one.found, one.expected)
                row.append((one.name, one.verdict, shown))
            alike.setdefault(tuple(row), []).append(layer)
        return tuple(map(tuple, alike.values()))

    def layer(self, index: int, model: Whose = "target") -> EngineLayer:
        """One layer.

        Raises:
            ServingError: there is none of that number.
        """
        for one in self.layers:
            if (one.model, one.index) == (model, index):
                return one
        raise ServingError(
            f"the {model} has no layer {index!r:.40}; it has {len(self.of(model))} layers, from 0"
        )

    def __repr__(self) -> str:
        counts = f"{len(self.of('target'))} layers"
        if drafter := len(self.of("drafter")):
            counts += f" and {drafter} of a drafter"
        version = self.engine.get("version") or "of unknown version"
        lines = [
            f"vLLM {version}: {counts}, {self.compared:,} fields compared on "
            f"{len(self.ranks)} rank{'s' * (len(self.ranks) != 1)}: "
            + ("all as expected" if self.agrees else "with differences")
        ]
        for model, one, indices in self.gathered:
            lines.append(
                f"{model} layer{'s' * (len(indices) > 1)} {ranges(indices)}: {one.name} "
                f"{value_text(one.found)}, expected {value_text(one.expected)} ({one.verdict})"
            )
        lines += [f"{one.where}: ranks differ in {one.field}" for one in self.rank_differences]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON; ``documents`` are read again by :func:`engine_layers`."""
        return {
            "agrees": self.agrees,
            "compared": self.compared,
            "ranks": list(self.ranks),
            "layers": [
                {
                    "model": layer.model,
                    "index": layer.index,
                    "name": layer.name,
                    "fields": {one.name: _field_dict(one) for one in layer.fields},
                }
                for layer in self.layers
            ],
            "settings": {one.name: _field_dict(one) for one in self.settings},
            "groups": [
                {
                    "index": group.index,
                    "kind": group.kind,
                    "keeps": group.keeps,
                    "block_size": group.block_size,
                    "page_bytes": group.page_bytes,
                    "layers": [list(key) for key in group.layers],
                    "expected": None
                    if group.expected is None
                    else [list(key) for key in group.expected],
                    "agrees": group.agrees,
                }
                for group in self.groups
            ],
            "rank_differences": [
                {"where": one.where, "field": one.field, "values": [list(v) for v in one.values]}
                for one in self.rank_differences
            ],
            "engine": dict(self.engine),
            "notes": list(self.notes),
            "documents": [dict(document) for document in self.documents],
        }


def _field_dict(one: LayerField) -> dict[str, Any]:
    return {
        "expected": one.expected,
        "found": one.found,
        "from": one.source,
        "verdict": one.verdict,
    }


def value_text(value: Value) -> str:
    """A value in words: "not known" for None, counts with separators."""
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_int(value):
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(map(value_text, value)) or NONE
    return str(value)


def keys_text(keys: Sequence[Key]) -> str:
    """Layers in words: ``0…2, 5; drafter 0, 1``."""
    parts = []
    for whose in ("target", "drafter"):
        numbers = [index for model, index in keys if model == whose]
        if numbers:
            parts.append(f"{'drafter ' * (whose == 'drafter')}{ranges(numbers)}")
    return "; ".join(parts) or NONE
