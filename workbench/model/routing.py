"""How many different experts a batch touches: expected, and measured from a model's routing.

A step reads each touched expert's weights once, so its bytes grow with the number of *different*
experts. Under uniform routing that is :func:`~workbench.model.weights.expected_experts`; real
routers prefer some experts, and neighbouring tokens choose alike, so real batches touch fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import torch
from torch import Tensor

from workbench.errors import InspectionError
from workbench.model.beam import Beam
from workbench.model.capture import Capture, capture
from workbench.model.display import Shown
from workbench.model.weights import expected_experts

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TouchedExperts(Shown):
    """Different experts touched a layer by batches of tokens; means over the sparse layers.

    ``uniform`` is the exact expectation under uniform routing. ``independent`` are tokens drawn
    from all that were recorded (a decode step of many sequences), ``consecutive`` tokens that
    follow one another in one text (a verify step, a prefill chunk); both were measured on
    ``tokens`` tokens of ``texts`` texts. None: a batch is larger than what was recorded.
    """

    model: str
    experts: int
    per_token: int
    layers: tuple[int, ...]
    texts: int
    tokens: int
    batches: tuple[int, ...]
    uniform: tuple[float, ...]
    independent: tuple[float | None, ...]
    consecutive: tuple[float | None, ...]

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "model": self.model,
            "experts": self.experts,
            "per_token": self.per_token,
            "layers": list(self.layers),
            "texts": self.texts,
            "tokens": self.tokens,
            "batches": list(self.batches),
            "uniform": list(self.uniform),
            "independent": list(self.independent),
            "consecutive": list(self.consecutive),
        }

    def __repr__(self) -> str:
        def cell(value: float | None) -> str:
            return f"{'-':>12}" if value is None else f"{value:>12.2f}"

        rows = [f"{'tokens':>6}{'uniform':>12}{'independent':>12}{'consecutive':>12}"]
        for row in zip(self.batches, self.uniform, self.independent, self.consecutive, strict=True):
            rows.append(f"{row[0]:>6}" + "".join(cell(value) for value in row[1:]))
        head = (
            f"{self.model}: different experts of {self.experts} (top {self.per_token}) a layer, "
            f"measured on {self.tokens:,} tokens of {self.texts} texts"
        )
        return "\n".join([head, *rows])


def touched_experts(
    beam: Beam, texts: Sequence[str], *, batches: Sequence[int] = BATCHES
) -> TouchedExperts:
    """Run ``texts`` through ``beam`` and count the different experts that batches touch.

    Raises:
        InspectionError: no text, no sparse layer, or a batch size below 1.
        PromptError: a text is longer than the model's context.
    """
    if isinstance(texts, str) or not texts:
        raise InspectionError("give a list of one or more texts")
    captures = [capture(beam, text, router=True, hidden=False) for text in texts]
    return count_touched(captures, model=beam.name, batches=batches)


def count_touched(
    captures: Sequence[Capture], *, model: str, batches: Sequence[int] = BATCHES
) -> TouchedExperts:
    """The same from captures that hold router choices, one a text."""
    if not captures or any(not c.router_ids for c in captures):
        raise InspectionError(
            "no router choices were captured; the model needs a sparse layer, and capture(...) "
            "router=True"
        )
    for size in batches:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InspectionError(f"a batch has at least 1 token, not {size!r:.40}")
    config = captures[0].config
    layers = tuple(sorted(captures[0].router_ids))
    experts, each = config.num_experts, config.num_experts_per_tok
    chosen = {layer: [c.router_ids[layer] for c in captures] for layer in layers}
    return TouchedExperts(
        model=model,
        experts=experts,
        per_token=each,
        layers=layers,
        texts=len(captures),
        tokens=sum(len(ids) for ids in chosen[layers[0]]),
        batches=tuple(batches),
        uniform=tuple(expected_experts(experts, each, n) for n in batches),
        independent=tuple(
            _mean(_independent(torch.cat(chosen[layer]), experts, n) for layer in layers)
            for n in batches
        ),
        consecutive=tuple(
            _mean(_consecutive(chosen[layer], experts, n) for layer in layers) for n in batches
        ),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _independent(ids: Tensor, experts: int, size: int) -> float | None:
    """Expected different experts in ``size`` tokens drawn without replacement. Exact.

    ``ids`` int64 ``[tokens, choices]``. An expert that n of T tokens chose stays untouched with
    probability C(T - n, size) / C(T, size).
    """
    tokens = len(ids)
    if size > tokens:
        return None
    counts = ids.flatten().bincount(minlength=experts).tolist()
    draws = comb(tokens, size)
    return sum(1.0 - comb(tokens - n, size) / draws for n in counts)


def _consecutive(texts: Sequence[Tensor], experts: int, size: int) -> float | None:
    """Mean of the different experts over every run of ``size`` tokens within a text."""
    total = runs = 0
    for ids in texts:
        if len(ids) < size:
            continue
        used = torch.zeros(len(ids), experts, dtype=torch.int64)
        used.scatter_(1, ids.to(used.device), 1)
        sums = torch.cat([torch.zeros(1, experts, dtype=torch.int64), used.cumsum(0)])
        total += int(((sums[size:] - sums[:-size]) > 0).sum())
        runs += len(ids) - size + 1
    return total / runs if runs else None
