"""Patterns that name layers: ``"all"``, ``"sliding"``, ``"full"``, ``"dense"``, ``"sparse"``,
``"3"``, ``"0-8"``, and several of them with commas (their union)."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from workbench.errors import KernelError
from workbench.model.config import BeamConfig

WORDS = ("all", "sliding", "full", "dense", "sparse")
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_AROUND = re.compile(r" *([,-]) *")


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """For each layer: whether its attention is full, and whether its MLP is sparse."""

    full: tuple[bool, ...]
    sparse: tuple[bool, ...]

    @classmethod
    def of(cls, config: BeamConfig) -> LayerKinds:
        """The layers of a model."""
        count = range(config.num_hidden_layers)
        return cls(
            tuple(config.is_full(i) for i in count), tuple(config.is_sparse(i) for i in count)
        )

    def __len__(self) -> int:
        return len(self.full)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.full)))

    def has(self, op: str, layer: int) -> bool:
        """Whether the layer computes this operation at all."""
        if op in ("router", "expert_mlp"):
            return self.sparse[layer]
        return not self.sparse[layer] if op == "dense_mlp" else True

    def word(self, word: str) -> list[int]:
        """The layers of one of ``WORDS``."""
        choose = {
            "all": lambda i: True,
            "sliding": lambda i: not self.full[i],
            "full": lambda i: self.full[i],
            "dense": lambda i: not self.sparse[i],
            "sparse": lambda i: self.sparse[i],
        }[word]
        return [i for i in self if choose(i)]

    def name(self, layers: Sequence[int], op: str) -> str:
        """The shortest pattern that names these layers among those which have ``op``."""
        for word in WORDS:
            if [i for i in self.word(word) if self.has(op, i)] == list(layers):
                return word
        runs: list[list[int]] = []
        for layer in layers:
            if runs and layer == runs[-1][1] + 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def describe(layers: str | int | Iterable[int]) -> str:
    """A pattern as text, its grammar checked.

    Raises:
        KernelError: not a pattern.
    """
    text = _AROUND.sub(r"\1", layers.strip(" ")) if isinstance(layers, str) else _numbers(layers)
    parts = text.split(",")
    for part in parts:
        found = _RANGE.fullmatch(part)
        if part not in WORDS and (
            found is None or (found[2] is not None and int(found[2]) < int(found[1]))
        ):
            raise KernelError(
                f"layers={text!r:.60} names no layers; use {', '.join(WORDS)}, a number, a range "
                "such as 0-8, or several of these with commas"
            )
    return text


def _numbers(layers: object) -> str:
    """Whole numbers of any kind (int, numpy's) as text; what is none comes out as no pattern."""
    if isinstance(layers, bool | str):
        return str(layers)
    try:
        number = operator.index(layers)  # type: ignore[arg-type]
        return str(number) if abs(number) < 10**6 else "a number of more than 6 digits"
    except Exception:  # whatever a foreign class raises: it is no whole number
        pass
    try:
        return ",".join(_numbers(each) for each in layers)  # type: ignore[attr-defined]
    except Exception:
        return f"{layers!r:.60}"


def matching(pattern: str, kinds: LayerKinds) -> list[int]:
    """The layers that a pattern names, ascending.

    Raises:
        KernelError: it names none of this model's, or one that it does not have.
    """
    found: set[int] = set()
    for part in pattern.split(","):
        if part in WORDS:
            found.update(kinds.word(part))
            continue
        match = _RANGE.fullmatch(part)
        if match is None:
            describe(pattern)
            continue
        low, high = int(match[1]), int(match[2] or match[1])
        if high >= len(kinds):
            raise KernelError(
                f"layers={pattern!r:.60} names layer {high}; this model has layers 0 to "
                f"{len(kinds) - 1}"
            )
        found.update(range(low, high + 1))
    if not found:
        raise KernelError(f"layers={pattern!r:.60} matches none of this model's {len(kinds)}")
    return sorted(found)
