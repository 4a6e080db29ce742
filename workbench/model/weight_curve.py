"""Bytes of weights that a step reads, over the tokens of the step: few experts at first, then all.

A function of :func:`~workbench.model.weights.active_bytes` alone; the views draw what it gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from workbench.model.asked import SizingError
from workbench.model.config import BeamConfig, is_int, is_number, short
from workbench.model.layout import Layout
from workbench.model.weights import (
    PARTS,
    PRECISIONS,
    Precision,
    WeightPart,
    active_bytes,
    expected_experts,
    size_weights,
)

MOST_TOKENS = 1 << 24
_POINTS_AN_OCTAVE = 4
_LAST = 1024
# Four points an octave: between them, on a logarithmic axis, a straight line is near enough.
_STEPS = range(_POINTS_AN_OCTAVE * (_LAST.bit_length() - 1) + 1)
BATCHES = tuple(sorted({round(2 ** (i / _POINTS_AN_OCTAVE)) for i in _STEPS}))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCurve:
    """Bytes of weights that one GPU reads in a step; :func:`weight_curve` makes it.

    ``batches`` are tokens of the step over all data-parallel groups, ascending. ``parts`` and
    ``distinct`` (different experts touched a layer, of ``experts``) are as long. ``held`` is all
    that the GPU holds, drafters left out. ``measured`` tells whether ``distinct`` was given;
    otherwise it is the exact expectation under uniform routing.
    """

    precision: Precision
    layout: Layout
    experts: int
    per_token: int
    batches: tuple[int, ...]
    parts: Mapping[WeightPart, tuple[float, ...]]
    distinct: tuple[float, ...]
    measured: bool
    held: int

    @property
    def total(self) -> tuple[float, ...]:
        """All parts together at each batch."""
        return tuple(map(sum, zip(*self.parts.values(), strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "precision": self.precision.name,
            "layout": self.layout.name,
            "experts": self.experts,
            "per_token": self.per_token,
            "batches": list(self.batches),
            "parts": {part: list(values) for part, values in self.parts.items()},
            "distinct": list(self.distinct),
            "measured": self.measured,
            "held": self.held,
        }


def weight_curve(
    config: BeamConfig,
    precision: Precision = PRECISIONS["bf16"],
    layout: Layout = Layout(),  # noqa: B008 - frozen
    *,
    batches: Sequence[int] = BATCHES,
    distinct: Sequence[float] | None = None,
) -> WeightCurve:
    """Bytes of weights read a step by one GPU of ``layout`` for each of ``batches`` tokens.

    ``distinct`` gives the different experts a layer touches at each batch, where they were measured
    on a model with as many experts; left out, they are those expected under uniform routing. A pure
    function.

    Raises:
        SizingError: batches that do not ascend from at least 1, another number of ``distinct``, or
            as ``active_bytes``.
    """
    counts = bool(batches) and all(map(is_int, batches)) and batches[0] >= 1
    if not counts or any(a >= b for a, b in pairwise(batches)):
        raise SizingError("batches must be whole numbers from 1 on, in ascending order")
    if batches[-1] > MOST_TOKENS:
        raise SizingError(
            f"a step has at most {MOST_TOKENS:,} tokens here, not {short(batches[-1])}"
        )
    experts, each = config.num_experts, config.num_experts_per_tok
    if distinct is None:
        touched = tuple(expected_experts(experts, each, n) for n in batches)
    elif len(distinct) != len(batches) or not all(map(is_number, distinct)):
        raise SizingError(
            f"give one number of different experts for each of the {len(batches)} batches"
        )
    else:
        touched = tuple(map(float, distinct))
    steps = [
        active_bytes(config, n, precision, layout, distinct=d)
        for n, d in zip(batches, touched, strict=True)
    ]
    return WeightCurve(
        precision=precision,
        layout=layout,
        experts=experts,
        per_token=each,
        batches=tuple(batches),
        parts=MappingProxyType({part: tuple(step[part] for step in steps) for part in PARTS}),
        distinct=touched,
        measured=distinct is not None,
        held=size_weights(config, precision, layout).per_gpu_bytes,
    )
