"""Different experts a batch touches: exact enumeration of small recordings, and the tiny model."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

import workbench
from workbench.errors import InspectionError
from workbench.model.routing import _consecutive, _independent, touched_experts


def test_independent_draws_by_enumeration() -> None:
    ids = torch.tensor([[0, 1], [0, 2], [3, 4], [0, 1], [5, 0], [2, 4]])
    for size in range(1, 7):
        counts = [
            len(set(ids[list(rows)].flatten().tolist())) for rows in combinations(range(6), size)
        ]
        assert _independent(ids, 8, size) == pytest.approx(sum(counts) / len(counts), rel=1e-12)
    assert _independent(ids, 8, 7) is None


def test_consecutive_runs_by_counting() -> None:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 9, (n, 3), generator=generator) for n in (1, 5, 12)]
    for size in range(1, 13):
        runs = [
            len(set(ids[i : i + size].flatten().tolist()))
            for ids in texts
            for i in range(len(ids) - size + 1)
        ]
        assert _consecutive(texts, 9, size) == pytest.approx(sum(runs) / len(runs), rel=1e-12)
    assert _consecutive(texts, 9, 13) is None


def test_the_tiny_model_touches_fewer_than_uniform() -> None:
    beam = workbench.load("beam-tiny")
    texts = ["def mean(values):\n    return sum(values) / len(values)\n", "A graph is a set of"]
    touched = touched_experts(beam, texts, batches=(1, 2, 4, 8))
    assert touched.independent[0] == touched.consecutive[0] == touched.uniform[0] == 4
    assert touched.layers == beam.config.sparse_layers
    for independent, uniform in zip(touched.independent, touched.uniform, strict=True):
        assert independent is not None
        assert independent <= uniform + 1e-9
    # Drawn alike from the same tokens, the router's own counts say the same.
    ids = [workbench.capture(beam, text).router_ids[touched.layers[0]] for text in texts]
    share = torch.cat(ids).flatten().bincount(minlength=16)
    assert int(share.sum()) == 4 * touched.tokens
    assert "measured on" in repr(touched)


@pytest.mark.parametrize("texts", [[], "a text"])
def test_texts_are_checked(texts: object) -> None:
    with pytest.raises(InspectionError, match="list of one or more texts"):
        touched_experts(workbench.load("beam-tiny"), texts)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_batches_are_checked(size: object) -> None:
    with pytest.raises(InspectionError, match="at least 1 token"):
        touched_experts(workbench.load("beam-tiny"), ["x"], batches=[size])  # type: ignore[list-item]
